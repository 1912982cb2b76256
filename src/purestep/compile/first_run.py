"""The first run of a graph on a GPU, which is still part of compiling it.

Triton's kernels are tuned and launched for the first time there, so that a compiler's error may come when some of the
state has been written. Until a graph has run once, the tensors that it works on are copied to the host, and put back
where it fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import PurestepError
from .capture import Uncaptured, stopped

Run = Callable[[list[Tensor], list[Any]], Any]
"""``(tensors, batch leaves) -> what the core returns``, as of `graphs.Graph`."""


def guarded(run: Run, tensors: list[Tensor]) -> Run:
    """``run``, whose first call changes nothing where it fails.

    Args:
        run: of a new graph.
        tensors: what the graph is made for. On the CPU, where all code is compiled before it runs, ``run`` itself;
            on meta too, where nothing runs.

    Raises:
        Uncaptured: from the call: the first run failed, for another reason than a lack of memory or Dynamo's.
    """
    return _guarded(run) if any(tensor.device.type not in ("cpu", "meta") for tensor in tensors) else run


def _guarded(run: Run) -> Run:
    has_run = False

    def call(tensors: list[Tensor], leaves: list[Any]) -> Any:
        nonlocal has_run
        if has_run:
            return run(tensors, leaves)
        before = [tensor.to("cpu", copy=True) for tensor in tensors]
        try:
            found = run(tensors, leaves)
        except Exception as error:
            try:
                _put_back(tensors, before)
            except RuntimeError:  # of a device that has failed altogether
                raise error from None
            if isinstance(error, PurestepError | torch.OutOfMemoryError) or stopped(error):
                raise
            raise Uncaptured(
                f"the compiled step fails at its first run: {type(error).__name__}: {first_line(error)}",
                where="step",
                hint="the step itself, which runs in eager mode; in fit, compile=False",
            ) from error
        has_run = True
        return found

    return call


def _put_back(tensors: list[Tensor], before: list[Tensor]) -> None:
    with torch.no_grad():
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)


def first_line(error: Exception) -> str:
    """The first line of an error's text, or its class where it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
