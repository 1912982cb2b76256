"""Agreement of the processes of a mesh on the host: one process decides, and all raise the error of one."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import torch.distributed as dist

from .. import errors
from ..errors import PurestepError, RankError
from . import mesh as meshes
from .peers import answered

T = TypeVar("T")


class Peers(NamedTuple):
    """The processes that make the same calls in the same order. Alone, the methods only call their function.

    Example:
        >>> Peers().first(lambda: 3), Peers().together(lambda: 4)
        (3, [4])
    """

    rank: int = 0
    size: int = 1
    timeout: float = 600.0  # seconds

    def first(self, function: Callable[[], T]) -> T:
        """Call the function in process 0, and return its value in all processes, or raise its error in all.

        Raises:
            RankError: a process ended or did not answer in time.
        """
        if self.size == 1:
            return function()
        value, own = _outcome(function) if self.rank == 0 else (None, None)
        found = [(value, sent(own))]
        self._call(lambda group: dist.broadcast_object_list(found, src=0, group=group))
        value, record = found[0]
        error = own or received(record)
        if error is not None:
            raise error
        return cast(T, value)

    def together(
        self, function: Callable[[], T], *, mild: type[Exception] | tuple[type[Exception], ...] = ()
    ) -> list[T]:
        """Call the function in every process, and return all values by rank, or raise one error in all processes.

        Args:
            function: its value is copied to the other processes: plain values, lists and tuples.
            mild: of several errors, the first one of another type is raised.

        Raises:
            RankError: a process ended or did not answer in time.
        """
        if self.size == 1:
            return [function()]
        value, own = _outcome(function)
        found: list[Any] = [None] * self.size
        self._call(lambda group: dist.all_gather_object(found, (value, sent(own)), group=group))
        errors_by_rank = [(rank, received(record)) for rank, (_, record) in enumerate(found) if record is not None]
        if errors_by_rank:
            rank, error = min(errors_by_rank, key=lambda entry: (isinstance(entry[1], mild), entry[0]))
            if rank == self.rank and own is not None:
                raise own  # with its traceback
            assert error is not None
            error.add_note(f"in process {rank} of {self.size}")
            raise error
        return [value for value, _ in found]

    def _call(self, collective: Callable[[Any], Any]) -> None:
        groups = meshes.current()
        if groups is None or groups.host is None:
            raise RankError(
                f"the mesh of {self.size} processes is closed",
                where="parallel",
                hint="use the object inside the `with ps.parallel.start(...)` block in which it was created",
            )
        with answered("an agreement of all processes"):
            collective(groups.host)


def peers() -> Peers:
    """The processes of the open mesh; without a mesh, this process alone."""
    groups = meshes.current()
    if groups is None or groups.mesh.size == 1:
        return Peers()
    return Peers(groups.mesh.rank, groups.mesh.size, groups.timeout)


def sent(error: BaseException | None) -> tuple[Any, ...] | None:
    """An error as plain values, for another process.

    Example:
        >>> received(sent(errors.DataError("no rows", where="loader")))
        DataError('loader: no rows')
    """
    if error is None:
        return None
    if isinstance(error, PurestepError):
        return type(error).__name__, error.what, error.where, error.hint, getattr(error, "errno", None)
    return type(error).__name__, str(error)


def received(record: tuple[Any, ...] | None) -> Exception | None:
    """The error of `sent`: a purestep error of its class, a builtin one, or a RuntimeError with its class's name."""
    if record is None:
        return None
    name, what, *rest = record
    if rest:
        kind = getattr(errors, name, PurestepError)
        where, hint, number = rest
        found: Any = kind(what, where=where, hint=hint)
        if number is not None:
            found.errno = number
        return found
    builtin = getattr(builtins, name, None)
    is_plain = builtin in (ValueError, TypeError, MemoryError, OSError, KeyError, NotImplementedError)
    return builtin(what) if is_plain else RuntimeError(f"{name}: {what}")


def received_from(rank: int, record: tuple[Any, ...]) -> PurestepError:
    """The error of `sent`, with its process: a purestep error of its class; any other one is a RankError.

    Example:
        >>> received_from(1, sent(errors.DataError("no rows", where="loader")))
        DataError('process 1, loader: no rows')
    """
    found = received(record)
    if not isinstance(found, PurestepError):
        return errors.RankError(f"{record[0]}: {record[1]}", where=f"process {rank}")
    where = f"process {rank}" + (f", {found.where}" if found.where else "")
    return type(found)(found.what, where=where, hint=found.hint)


def _outcome(function: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return function(), None
    except Exception as error:
        return None, error
