"""Agreement of the processes of a mesh on the host: one process decides, and all raise the error of one."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from ..errors import RankError
from . import mesh as meshes

T = TypeVar("T")


class _Outcome(NamedTuple):
    value: Any
    error: Exception | None


class Peers(NamedTuple):
    """The processes that make the same calls in the same order. Alone, the methods only call their function.

    Example:
        >>> Peers().first(lambda: 3), Peers().together(lambda: 4)
        (3, [4])
    """

    rank: int = 0
    count: int = 1
    timeout: float = 600.0  # seconds
    group: Any = None  # of all processes, on the CPU

    def first(self, function: Callable[[], T]) -> T:
        """Call the function in process 0, and return its value in all processes, or raise its error in all.

        Raises:
            RankError: a process ended or did not answer in time.
        """
        if self.count == 1:
            return function()
        found: list[Any] = [_outcome(function) if self.rank == 0 else None]
        self._call(lambda: dist.broadcast_object_list(found, src=0, group=self.group))
        value, error = found[0]
        if error is not None:
            raise error
        return value

    def together(self, function: Callable[[], T], *, mild: type[Exception] | tuple[type[Exception], ...] = ()) -> list[T]:
        """Call the function in every process, and return all values by rank, or raise one error in all processes.

        Args:
            function: its value is copied to the other processes.
            mild: of several errors, the first one of another type is raised.

        Raises:
            RankError: a process ended or did not answer in time.
        """
        if self.count == 1:
            return [function()]
        own = _outcome(function)
        found: list[Any] = [None] * self.count
        self._call(lambda: dist.all_gather_object(found, own, group=self.group))
        found[self.rank] = own  # with its traceback
        errors = [(isinstance(error, mild), rank, error) for rank, (_, error) in enumerate(found) if error is not None]
        if errors:
            _, rank, error = min(errors, key=lambda entry: entry[:2])
            if rank != self.rank:
                error.add_note(f"in process {rank} of {self.count}")
            raise error
        return [value for value, _ in found]

    def _call(self, collective: Callable[[], Any]) -> None:
        try:
            collective()
        except RuntimeError as error:  # of gloo: connection closed, timeout
            raise RankError(
                f"process {self.rank}: another process ended, or did not make the same call within "
                f"{self.timeout:g} s: {str(error).splitlines()[0][:200]}",
                where="parallel",
                hint="see the errors of the other processes; every process must make the same calls in the same order",
            ) from error


def peers() -> Peers:
    """The processes of the open mesh; without a mesh, this process alone."""
    groups = meshes.current()
    if groups is None or groups.mesh.size == 1:
        return Peers()
    return Peers(groups.mesh.rank, groups.mesh.size, groups.timeout, groups.host)


def _outcome(function: Callable[[], Any]) -> _Outcome:
    try:
        found = _Outcome(function(), None)
    except Exception as error:
        found = _Outcome(None, error)
    return _portable(found)


def _portable(outcome: _Outcome) -> _Outcome:
    """The outcome, or one that pickle can copy instead."""
    try:
        pickle.loads(pickle.dumps(outcome))
    except Exception as error:
        text = f"{type(outcome.error).__name__}: {outcome.error}" if outcome.error is not None else f"no copy: {error}"
        return _Outcome(None, RuntimeError(text))
    return outcome
