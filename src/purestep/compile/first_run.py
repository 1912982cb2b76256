"""The first run of a graph on a GPU, which is part of its compilation.

It tunes and launches Triton's kernels, so a compiler error may be raised after a part of the state was written. Before
this run the graph's tensors are copied to the host; if the run fails, they are restored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import PurestepError
from .capture import Uncaptured

Run = Callable[[list[Tensor], list[Any], list[Tensor]], Any]
"""``(tensors, batch leaves, outside) -> result of the core``, like `graphs.CompiledGraph`."""


def guarded(run: Run, tensors: list[Tensor]) -> Run:
    """Wrap ``run`` to restore the tensors if its first call fails.

    Args:
        run: of a new graph.
        tensors: of the state. On the CPU, which compiles all code before it runs, and on meta, ``run`` is returned
            unchanged.

    Raises:
        Uncaptured: from the call: the first run failed, and not for lack of memory.
    """
    return _guarded(run) if any(tensor.device.type not in ("cpu", "meta") for tensor in tensors) else run


def _guarded(run: Run) -> Run:
    has_run = False

    def call(tensors: list[Tensor], leaves: list[Any], outside: list[Tensor]) -> Any:
        nonlocal has_run
        if has_run:
            return run(tensors, leaves, outside)
        before = [tensor.to("cpu", copy=True) for tensor in tensors]
        try:
            found = run(tensors, leaves, outside)
        except Exception as error:
            try:
                _put_back(tensors, before)
            except RuntimeError:  # the device has failed
                raise error from None
            if isinstance(error, PurestepError | torch.OutOfMemoryError):
                raise
            raise Uncaptured(
                f"the compiled step fails at its first run: {type(error).__name__}: {first_line(error)}",
                where="step",
                hint="call the step itself, which runs in eager mode; in fit, set compile=False",
            ) from error
        has_run = True
        return found

    return call


def _put_back(tensors: list[Tensor], before: list[Tensor]) -> None:
    with torch.no_grad():
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)


def first_line(error: Exception) -> str:
    """The first line of an error's text, or its class name if the text is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
