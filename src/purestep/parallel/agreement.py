"""Agreement of the hosts: numbers exchanged once a call, checks that processes run the same.

All of it runs over the host group of the open mesh (gloo, on the CPU), so it never waits for a device. Every process
makes the same calls in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import RankError
from . import mesh as meshes
from .peers import answered

T = TypeVar("T")
_SHOWN = 3  # differences in a message
_LONGEST = 300  # letters of a value


def largest(numbers: Sequence[int]) -> list[int]:
    """The elementwise maximum of the numbers of all processes, in the range of int64; as many in every process.

    Example:
        >>> import purestep as ps
        >>> with ps.parallel.start():  # one process
        ...     largest([3, -4])
        [3, -4]
    """
    groups = meshes.current()
    if groups is None or groups.host is None:
        return list(numbers)
    found = torch.tensor(list(numbers), dtype=torch.int64)
    with answered("the agreement of a call"):
        dist.all_reduce(found, dist.ReduceOp.MAX, group=groups.host)
    return found.tolist()


def gathered(value: T) -> list[T]:
    """The values of all processes, by rank. They are pickled: plain data, small."""
    groups = meshes.current()
    if groups is None or groups.host is None:
        return [value]
    found: list[Any] = [None] * groups.mesh.size
    with answered("an exchange of values"):
        dist.all_gather_object(found, value, group=groups.host)
    return found


def by_process(number: int) -> list[int]:
    """A number of each process, by rank."""
    groups = meshes.current()
    if groups is None or groups.host is None:
        return [number]
    numbers = torch.zeros(groups.mesh.size, dtype=torch.int64)
    numbers[groups.mesh.rank] = number
    with answered("an exchange of numbers"):
        dist.all_reduce(numbers, group=groups.host)
    return numbers.tolist()


def from_process(value: T, rank: int) -> T:
    """The value of one process, in every process. It is pickled."""
    groups = meshes.current()
    if groups is None or groups.host is None:
        return value
    box: list[Any] = [value if groups.mesh.rank == rank else None]
    with answered("a value of another process"):
        dist.broadcast_object_list(box, src=rank, group=groups.host)
    return box[0]


def check_same(facts: Mapping[str, Any], *, where: str, hint: str) -> None:
    """Check that a mapping is the same in all processes.

    Args:
        facts: name -> text or number.
        where: for the message.
        hint: the cure.

    Raises:
        RankError: in every process, with the names that differ and the values of two processes.
    """
    first, *others = gathered({name: str(value)[:_LONGEST] for name, value in facts.items()})
    for rank, other in enumerate(others, 1):
        names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
        if names:
            shown = [
                f"{n} is {first.get(n, 'missing')} in process 0, {other.get(n, 'missing')} in process {rank}"
                for n in names[:_SHOWN]
            ]
            more = f"; and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            raise RankError(f"processes differ: {'; '.join(shown)}{more}", where=where, hint=hint)


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
