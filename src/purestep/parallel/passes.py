"""The pass that runs: the rows that count, the weight of its loss, and the order of its collectives."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager

from torch import Tensor

from ..errors import RankError
from ..torch_ext import tracing
from . import processes

_CURE = (
    "every process runs the same layers in the same order: leave blocks that a process may skip (experts, dropped "
    "layers) out of units=[...] of ps.distribute"
)


class Pass:
    """One forward and backward pass.

    Args:
        counts: shape=(): 0 if the rows only stand in for an empty share; None: they count.
        mixes: other processes' losses reach this pass's tensors, so that its own is multiplied by its weight.
        is_checked: before each collective the processes compare its name.
    """

    def __init__(self, counts: Tensor | None, *, mixes: bool = False, is_checked: bool = False) -> None:
        self.counts = counts
        self.mixes = mixes
        self.is_checked = is_checked
        self.weight: Tensor | None = None  # shape=(): of the loss, once the forward pass has ended
        self.unit: Callable[[], None] | None = None  # puts the pieces back into the unit that is whole; see `units`

    def close_unit(self) -> None:
        """Let the unit that the backward pass has computed last have its pieces again."""
        close, self.unit = self.unit, None
        if close is not None:
            close()

    def end_forward(self, weight: Tensor) -> None:
        """Take the weight of the loss."""
        self.weight = weight
        if self.is_checked:
            meet("the loss")


_running: list[Pass] = []  # not by thread: on CUDA another thread runs the backward pass
_checking: list[bool] = []
_names: deque[str] = deque(maxlen=1000)


@contextmanager
def running(counts: Tensor | None, *, mixes: bool = False, is_checked: bool = False) -> Generator[Pass]:
    """A pass whose layers know the rows that count, and the weight of the loss. Arguments as for `Pass`."""
    one = Pass(counts, mixes=mixes, is_checked=is_checked or bool(_checking))
    _running.append(one)
    try:
        yield one
        if one.is_checked:
            meet("the end of the backward pass")
    finally:
        _running.remove(one)


def current() -> Pass:
    """The pass that runs."""
    return _running[-1] if _running else Pass(None)


@contextmanager
def checking() -> Generator[None]:
    """Let passes that begin here compare their collectives."""
    _checking.append(True)
    try:
        yield
    finally:
        _checking.pop()


def meet(name: str) -> None:
    """Note a collective inside of a pass. A checked pass first compares its name with those of the other processes: one
    process would wait for the others without end, or gather another block than they do. A graph has one order.

    Raises:
        RankError: the names differ.
    """
    if tracing.in_graph():
        return
    _names.append(name)
    if current().is_checked and not tracing.transformed():
        processes.check_same({"the next collective": name}, where="the step", hint=_CURE)


def taken() -> list[str]:
    """The names of the collectives since the last call."""
    names = list(_names)
    _names.clear()
    return names


def check_order(names: list[str]) -> None:
    """Compare what `taken` has returned in each process.

    Raises:
        RankError: with the first names that differ.
    """
    first, *others = processes.gathered(names)
    for rank, other in enumerate(others, 1):
        pairs = itertools.zip_longest(first, other, fillvalue="none")
        for number, (here, there) in enumerate(pairs, 1):
            if here != there:
                what = f"collective {number} since the last exchange is {here} in process 0, {there} in process {rank}"
                raise RankError(f"processes differ: {what}", where="train", hint=_CURE)
