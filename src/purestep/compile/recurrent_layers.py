"""Recurrent layers in graphs for a GPU: a few steps of a sequence as operations, a long one in eager mode.

cuDNN's kernels read the addresses of the weights, which a trace does not have, so a graph repeats the layer's cell for
every step of the sequence. A graph of thousands of operations compiles for minutes, and is slower than cuDNN's kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

MOST = 64
"""Maximal number of cells in a graph: steps of the sequence x layers x directions."""

_NAMES = ("lstm", "gru", "rnn_tanh", "rnn_relu")


class Cells(TorchFunctionMode):
    """Split recurrent layers on a GPU into the operations of their cells.

    Args:
        refused: the error of a call with more than `MOST` cells, for a text that says how many there are.
    """

    def __init__(self, refused: Callable[[str], Exception]) -> None:
        super().__init__()
        self._refused = refused

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") not in _NAMES or not isinstance(args[0], Tensor) or not args[0].is_cuda:
            return func(*args, **kwargs)
        count = _cells(func.__name__, args)
        if count > MOST:
            raise self._refused(f"{func.__name__} over a long sequence: a graph would repeat its cell {count} times")
        with torch.backends.cudnn.flags(enabled=False):
            return func(*args, **kwargs)


def _cells(name: str, args: tuple[Any, ...]) -> int:
    """The number of cells of a call with the arguments ``(input, hx, weights, has_biases, layers, dropout, train,
    bidirectional, batch_first)``. A packed sequence passes its batch sizes after the input, and no ``batch_first``."""
    packed = isinstance(args[1], Tensor) and not args[1].is_floating_point()
    layers, directions = (args[5], 1 + args[8]) if packed else (args[4], 1 + args[7])
    steps = len(args[1]) if packed else args[0].shape[1 if args[8] else 0]
    return steps * layers * directions
