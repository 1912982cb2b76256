"""What a function does, as text: every operation below autograd, in order, on tensors without memory.

A graph of the function is made of just these operations, so that two functions with the same text have the same graph.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from . import apart

_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)

_NAMESPACES = ("aten", "prims", "purestep")
"""Operators whose code changes with torch and with purestep, and with nothing else."""


class Untold(Exception):
    """Text does not tell this apart from something else."""


def lines(function: Callable[..., Any], inputs: Sequence[Tensor]) -> list[str]:
    """What the function does with tensors like these.

    Args:
        function: flat in, list of tensors out.
        inputs: tensors that are only looked at.

    Raises:
        Untold: an operator of the user's, or a tensor that is neither an input nor made of one.
        Exception: whatever the function raises on tensors without memory.
    """
    for leaf in inputs:
        if type(leaf) not in (Tensor, torch.nn.Parameter) or leaf.is_conj() or leaf.is_neg():
            raise Untold(f"a {type(leaf).__name__} that is not memory alone")
    with apart.unloaded():
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        fakes = apart.fakes(mode, list(inputs))
        with mode, _Recorder(fakes) as recorder:
            outputs = function(*fakes)
    recorder.lines.append(f"output {recorder.text(outputs)}")
    if recorder.untold:
        raise Untold(recorder.untold)
    return [*map(layout, inputs), *recorder.lines]


class _Recorder(TorchDispatchMode):
    def __init__(self, inputs: list[Tensor]) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.untold = ""
        self._tensors: list[Tensor] = []  # kept: another tensor must not get the id of one that is gone
        self._places: dict[int, int] = {}
        for leaf in inputs:
            self._place(leaf)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":  # on which device a tensor is: nothing that a graph holds
            return func(*args, **(kwargs or {}))
        if not known(func):
            self.untold = str(func)
        asked = f"{self.text(args)} {self.text(kwargs or {})}"
        made = func(*args, **(kwargs or {}))
        self.lines.append(f"{func} {asked} {_made(made)}")
        self._place(made)
        return made

    def text(self, value: Any) -> str:
        """Tensors by the order that they came in."""
        if isinstance(value, Tensor):
            place = self._places.get(id(value))
            if place is None:
                self.untold = self.untold or f"a tensor {list(value.shape)} from elsewhere"
            return f"%{place}"
        if isinstance(value, list | tuple):
            return f"({', '.join(map(self.text, value))})"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key}: {self.text(item)}' for key, item in value.items())}}}"
        try:
            return plain(value)
        except Untold as error:  # the function goes on: it may have a way of its own with errors
            self.untold = self.untold or str(error)
            return ""

    def _place(self, made: Any) -> None:
        if isinstance(made, list | tuple):
            for item in made:
                self._place(item)
        elif isinstance(made, Tensor) and id(made) not in self._places:
            self._places[id(made)] = len(self._tensors)
            self._tensors.append(made)


def known(target: Any) -> bool:
    """Whether this is an operator of torch's or of purestep's own."""
    return target is operator.getitem or (isinstance(target, OpOverload) and target.namespace in _NAMESPACES)


def plain(value: Any) -> str:
    """A number, a word, a dtype, or several, as text that tells 1, 1.0 and True apart."""
    if type(value) in _PLAIN:
        return repr(value)
    if isinstance(value, list | tuple):
        return f"({', '.join(map(plain, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{plain(key)}: {plain(item)}' for key, item in value.items())}}}"
    raise Untold(f"a {type(value).__name__}")


def layout(value: Tensor) -> str:
    """Dtype, shape, and where its numbers lie. Not the device, which is that of the inputs or named."""
    if not all(type(size) is int for size in (*value.shape, *value.stride(), value.storage_offset())):
        raise Untold("a size that is not known")
    return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.storage_offset()}"


def _made(value: Any) -> str:
    if isinstance(value, Tensor):
        return layout(value)
    return f"({', '.join(map(_made, value))})" if isinstance(value, list | tuple) else plain(value)
