"""The exchange between the processes of a mesh on the host: numbers, values, errors, and checks of equality.

All of it runs over the host group of the open mesh (gloo, on the CPU), so it never waits for a device. Every process
makes the same calls in the same order. Without a mesh of several processes each function returns what this process has.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .. import errors
from ..errors import PurestepError, RankError
from ..state import tree_json
from . import mesh as meshes

T = TypeVar("T")
_SHOWN = 3  # differences in a message
_LONGEST = 300  # letters of a value, or of a message
_CURE = (
    "every process makes this call, not the first one alone; see the first error of the processes, which torchrun "
    "names in its last lines; `torchrun --max-restarts 3` starts all of them again, and fit goes on from the last "
    "snapshot; if one was only slow, parallel.start(timeout=...) with more seconds"
)
_LATE_CURE = "parallel.start(timeout=...) with more seconds, or let all processes share the work of this one"
_last_answer = 0.0  # the time of `time.monotonic` at which the last collective ended


@contextmanager
def answered(call: str) -> Generator[None]:
    """Translate the error of a collective, which says that another process is gone or does not answer.

    Args:
        call: the collective, for the message.

    Raises:
        RankError: the collective failed.
    """
    global _last_answer
    begun = time.monotonic()
    try:
        yield
    except RuntimeError as error:  # torch.distributed.DistError is one
        groups = meshes.current()
        if isinstance(error, RankError) or groups is None:
            raise
        meshes.abort(groups)
        first = (str(error).strip().splitlines() or [""])[0][:_LONGEST]
        waited = begun - max(_last_answer, groups.opened)
        hint = _CURE
        if waited > groups.timeout:
            what = (
                f"this process was late: it made no call for {waited:.0f} s, and the others wait {groups.timeout:g} s"
            )
            hint = _LATE_CURE
        elif failure := meshes.told_failure(groups):
            what = f"another process failed: {failure}"
        else:
            what = "another process ended, failed, did not answer in time, or made another call"
        mesh = groups.mesh
        where = f"process {mesh.rank} of {mesh.size}"
        raise RankError(f"{what}; {call}{_caller()}: {first}", where=where, hint=hint) from error
    _last_answer = time.monotonic()


def _caller() -> str:
    """Text that names purestep's function that waits, and the innermost line outside of purestep that has called it."""
    function = ""
    for frame, number in traceback.walk_stack(None):
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package == "purestep":
            name = frame.f_code.co_name
            function = function if name.startswith(("_", "<")) else f" in {name}, which every process calls"
        elif package != "torch" and package not in sys.stdlib_module_names:
            file = frame.f_code.co_filename
            line = traceback.FrameSummary(file, number, frame.f_code.co_name).line or ""
            return f"{function} ({file}, line {number}: {line[:_LONGEST]})"
    return ""


# --- numbers and values -----------------------------------------------------------------------------------------------


def largest(numbers: Sequence[int]) -> list[int]:
    """The elementwise maximum of the numbers of all processes, in the range of int64; as many in every process.

    Example:
        >>> import purestep as ps
        >>> with ps.parallel.start():  # one process
        ...     largest([3, -4])
        [3, -4]
    """
    if meshes.here().size == 1:
        return list(numbers)
    found = torch.tensor(list(numbers), dtype=torch.int64)
    with answered("an exchange of numbers"):
        dist.all_reduce(found, dist.ReduceOp.MAX, group=_host())
    return found.tolist()


def by_process(number: int) -> list[int]:
    """A number of each process, at least 0, by rank."""
    mesh = meshes.here()
    return largest([number if rank == mesh.rank else 0 for rank in range(mesh.size)])


def gathered(value: T) -> list[T]:
    """The values of all processes, by rank: trees of plain values and tensors (`tree_json`), small."""
    if (mesh := meshes.here()).size == 1:
        return [value]
    own = _message(value)
    sizes = by_process(len(own))
    with answered("an exchange of values"):
        found = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes]
        dist.all_gather(found, torch.cat([own, own.new_zeros(max(sizes) - len(own))]), group=_host())
    return [value if rank == mesh.rank else _read(found[rank][:size], rank) for rank, size in enumerate(sizes)]


def from_process(value: T, rank: int) -> T:
    """The value of one process, in every process: as for `gathered`."""
    if (mesh := meshes.here()).size == 1:
        return value
    own = _message(value if mesh.rank == rank else None)
    size = by_process(len(own) if mesh.rank == rank else 0)[rank]
    with answered("a value of another process"):
        sent = own if mesh.rank == rank else torch.empty(size, dtype=torch.uint8)
        dist.broadcast(sent, src=rank, group=_host())
    return value if mesh.rank == rank else _read(sent, rank)


def _message(value: Any) -> Tensor:
    """A value as bytes: of the JSON text the length, in 8 bytes, and the text; then those of the tensors."""
    tensors: dict[str, Tensor] = {}
    tree = tree_json.encode("value", value, tensors)
    text = json.dumps([tree, {name: len(data) for name, data in tensors.items()}]).encode()
    head = torch.frombuffer(bytearray(len(text).to_bytes(8, "little") + text), dtype=torch.uint8)
    return torch.cat([head, *tensors.values()])


def _read(message: Tensor, rank: int) -> Any:
    """The value of a message, which runs no code, whoever has sent it.

    Raises:
        RankError: it is no message of `gathered` or `from_process`.
    """
    try:
        end = 8 + int.from_bytes(message[:8].numpy().tobytes(), "little")
        tree, sizes = json.loads(message[8:end].numpy().tobytes())
        data = message[end:].split(list(sizes.values()))
        return tree_json.decode(tree, {name: part.clone() for name, part in zip(sizes, data, strict=True)})
    except (ValueError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        what = f"the process sent no value of purestep: {error}"
        raise RankError(
            what, where=f"process {rank}", hint="let only the processes of one run reach each other"
        ) from error


class Channel:
    """Messages between process 0 and each other one, for one thread of each process while others make collectives.

    Every process creates a channel at the same call, since a channel starts a separate group of torch. Without a mesh
    of several processes a channel has no peers.
    """

    def __init__(self) -> None:
        mesh, groups = meshes.here(), meshes.current()
        self.rank, self.size = mesh.rank, mesh.size
        self._group: Any = None
        if groups is not None and mesh.size > 1:
            # Process 0 answers after the slowest of the others, which the others wait for too.
            self._limit = 3 * groups.timeout
            with answered("a new group of processes"):
                self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._limit))

    def send(self, value: Any, rank: int) -> None:
        """Send plain values and tensors (`tree_json`) to a process.

        Raises:
            RankError: that process has ended, or does not receive in time.
        """
        own = _message(value)
        with self._named(rank):
            dist.send(torch.tensor(len(own)), rank, group=self._group)
            dist.send(own, rank, group=self._group)

    def receive(self, rank: int) -> Any:
        """Wait for the value that a process sends.

        Raises:
            RankError: that process has ended, or does not send in time.
        """
        size = torch.tensor(0)
        with self._named(rank):
            dist.recv(size, rank, group=self._group)
            found = torch.empty(int(size), dtype=torch.uint8)
            dist.recv(found, rank, group=self._group)
        return _read(found, rank)

    @contextmanager
    def _named(self, rank: int) -> Generator[None]:
        try:
            yield
        except RuntimeError as error:
            what = f"process {rank} ended, or did not answer within {self._limit:g} s"
            hint = "see the error of that process; if it was only slow: parallel.start(timeout=...) with more seconds"
            raise RankError(what, where=f"process {self.rank} of {self.size}", hint=hint) from error

    def close(self) -> None:
        """End the group. No thread may use it any more."""
        group, self._group = self._group, None
        if group is not None:
            with suppress(Exception):  # the mesh has ended before
                dist.destroy_process_group(group)


def _host() -> Any:
    groups = meshes.current()
    assert groups is not None
    return groups.host


# --- one decides, or all fail -----------------------------------------------------------------------------------------


def first(function: Callable[[], T]) -> T:
    """Call the function in process 0, and return its value in all processes, or raise its error in all.

    Example:
        >>> first(lambda: 3), together(lambda: 4)
        (3, 4)
    """
    if (mesh := meshes.here()).size == 1:
        return function()
    value, error = _outcome(function) if mesh.rank == 0 else (None, None)
    value, sent = from_process((value, error_sent(error)), 0)
    if sent is not None:
        raise error or error_received(sent, rank=0)
    return cast(T, value)


def together(function: Callable[[], T], *, mild: type[Exception] | tuple[type[Exception], ...] = ()) -> T:
    """Call the function in every process, and return the value of this one, or raise one error in all processes.

    Args:
        function: of any value.
        mild: of several errors, the first one of another type is raised.
    """
    if (mesh := meshes.here()).size == 1:
        return function()
    value, own = _outcome(function)
    errors_sent = gathered(error_sent(own))
    failed = [(rank, error_received(sent, rank=rank)) for rank, sent in enumerate(errors_sent) if sent is not None]
    if failed:
        rank, error = min(failed, key=lambda entry: (isinstance(entry[1], mild), entry[0]))
        raise own if rank == mesh.rank and own is not None else error
    return cast(T, value)


def _outcome(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return function(), None
    except Exception as error:
        return None, error


def error_sent(error: Exception | None) -> tuple[Any, ...] | None:
    """An error as plain values, for `error_received` in another process.

    Example:
        >>> sent = error_sent(errors.NotFound("no snapshot", where="runs/1", hint="save one"))
        >>> str(error_received(sent))
        'runs/1: no snapshot (cure: save one)'
    """
    if isinstance(error, PurestepError):
        return type(error).__name__, error.what, error.where, error.hint, getattr(error, "errno", None)
    return None if error is None else ("RankError", f"{type(error).__name__}: {error}", "", "", None)


def error_received(sent: tuple[Any, ...], *, rank: int | None = None) -> PurestepError:
    """The error of another process: of its class if it is one of purestep, else a RankError.

    Args:
        sent: from `error_sent`.
        rank: the process that the message names; None if its text does.
    """
    name, what, where, hint, number = sent
    kind = getattr(errors, name, None)
    kind = kind if isinstance(kind, type) and issubclass(kind, PurestepError) else PurestepError
    if rank is not None:
        where = f"process {rank}" + (f", {where}" if where else "")
    found: Any = kind(what, where=where, hint=hint)
    if number is not None:
        found.errno = number
    return found


# --- the same in all processes ----------------------------------------------------------------------------------------


def check_same(facts: Mapping[str, Any], *, where: str, hint: str) -> None:
    """Check that a mapping is the same in all processes.

    Args:
        facts: name -> text or number.
        where: for the message.
        hint: the cure.

    Raises:
        RankError: in every process, with the names that differ and the values of two processes.
    """
    first, *others = gathered({name: str(value) for name, value in facts.items()})
    for rank, other in enumerate(others, 1):
        names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if names:
            shown: list[str] = []
            for name in names[:_SHOWN]:
                one, two = _cut(first.get(name, "missing"), other.get(name, "missing"))
                shown.append(f"{name} is {one} in process 0, {two} in process {rank}")
            more = f"; and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            raise RankError(f"processes differ: {'; '.join(shown)}{more}", where=where, hint=hint)


def _cut(*texts: str) -> list[str]:
    """The part of each text around the first letter that differs, if a text is long."""
    shortest = min(map(len, texts))
    same = next((index for index in range(shortest) if len({text[index] for text in texts}) > 1), shortest)
    start = 0 if max(map(len, texts)) <= _LONGEST else max(0, same - _LONGEST // 2)
    return ["..." * bool(start) + text[start : start + _LONGEST] for text in texts]


def checksum(value: Tensor) -> int:
    """The sum of a tensor's numbers as integers of the same size: one bit that differs changes it.

    Example:
        >>> checksum(torch.ones(3)) == checksum(torch.tensor([1.0, 1.0, 1.0000001]))
        False
    """
    flat = value.detach().reshape(-1).contiguous()
    if flat.dtype == torch.bool or flat.is_complex():
        flat = flat.view(torch.uint8)
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    return int(flat.view(kind).sum(dtype=torch.int64))
