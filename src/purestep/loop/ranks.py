"""How many processes a run has, and what it needs for several."""

from __future__ import annotations

import logging
import os
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

from .. import data, parallel
from ..compile import states
from ..errors import RankError
from ..metrics import Gathered
from ..parallel import loaders, placement, processes
from ..parallel import mesh as meshes
from ..types import Metrics, Program, Share, Tree

_T = TypeVar("_T")

_LINES = "`with ps.parallel.start() as mesh:` and `program = ps.distribute(program, mesh)`, around init and fit"


def mesh_of(state: Tree, *, where: str, program: Program | None = None) -> parallel.Mesh | None:
    """Return the mesh of the processes that hold parts of this state; None for one process.

    Args:
        state: of any program.
        where: for messages.
        program: must be distributed if the state is.

    Raises:
        RankError: there are several processes, and the state or the program is not distributed; the state is one
            process's part, and no mesh is open; or it is a part for another mesh.
    """
    mesh = meshes.here() if meshes.here().size > 1 else None
    shardings = [part.placement.sharding for part in states(state) if isinstance(part.placement, placement.Placement)]
    what = hint = ""
    if mesh is None and shardings:
        what = "the state is one process's part of a distributed state, and no mesh of several processes is open"
        hint = "call it inside `with ps.parallel.start(...) as mesh:`; ps.full(state), there, is the whole state"
    elif mesh is None and (count := _launched()) > 1:
        what = f"this is one of {count} processes, and the program is not distributed"
        hint = f"{_LINES}; or python train.py without torchrun; or unset WORLD_SIZE where the processes are unrelated"
    elif mesh is not None and not shardings:
        what, hint = (
            f"this is process {mesh.rank} of {mesh.size}, and the state and its program are not distributed",
            _LINES,
        )
    elif mesh is not None and program is not None and program.static is not None and not program.static.stream:
        what, hint = "the state is distributed, and the program is not", "pass the program that ps.distribute returned"
    elif mesh is not None and any((sharding.data, sharding.width) != (mesh.data, mesh.shard) for sharding in shardings):
        what = (
            f"the state is for a mesh of data={shardings[0].data}, shard={shardings[0].width}, and the open mesh has "
            f"data={mesh.data}, shard={mesh.shard}"
        )
        hint = "call ps.distribute and init with the mesh that is open; fit restores snapshots of any mesh"
    if what:
        raise RankError(what, where=where, hint=hint)
    return mesh


def _launched() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    text = os.environ.get("WORLD_SIZE", "1")
    return int(text) if text.isdecimal() else 1


def check_loader(loader: Any, *, where: str) -> None:
    """Check that no sampler of a loader divides the data among processes itself.

    Raises:
        RankError: with the process and the number of parts.
    """
    loader = loader.loader if isinstance(loader, loaders.Sharded) else loader
    for part in (getattr(loader, name, None) for name in ("sampler", "batch_sampler")):
        shares = getattr(part, "num_replicas", 1)
        if isinstance(shares, int) and shares > 1:
            raise RankError(
                f"its {type(part).__name__} is for process {getattr(part, 'rank', '?')} of {shares}: it repeats rows "
                "to make equal parts, and purestep divides each batch itself",
                where=where,
                hint="DataLoader(dataset, batch_size=32, shuffle=True), with the size of the whole batch, which "
                "shuffles again in each epoch",
            )


@contextmanager
def opened(
    loader: Any, state: Tree, *, where: str, name: str, program: Program | None = None, **how: Any
) -> Generator[data.Feed]:
    """Open a loader for a function on this state (see `mesh_of`), and close it at the end, unless it is a `Feed` of
    the caller. `data.open_feed` takes ``how``."""
    mesh = mesh_of(state, where=where, program=program)
    check_loader(loader, where=name)
    feed = data.open_feed(loader, name=name, mesh=mesh, **how)
    try:
        yield feed
    finally:
        if feed is not loader:
            feed.close()


@contextmanager
def quiet(mesh: parallel.Mesh | None) -> Generator[None]:
    """Let only errors of the other processes than the first into purestep's log, which all of them would write."""
    log, is_first = logging.getLogger("purestep"), mesh is None or mesh.rank == 0

    def is_shown(record: logging.LogRecord) -> bool:
        return is_first or record.levelno >= logging.ERROR

    log.addFilter(is_shown)
    try:
        yield
    finally:
        log.removeFilter(is_shown)


def has_rows(batch: Any) -> bool:
    """False if the row of a `Share` only stands in for an empty one. Waits for the device of the flag."""
    return not isinstance(batch, Share) or bool(batch.counts > 0)


class Outputs:
    """The gathered outputs of an evaluation; of several processes, those of all rows in the order of one process."""

    def __init__(self) -> None:
        self._kinds: dict[str, type[Gathered]] = {}
        self._parts: list[tuple[int, dict[str, tuple[Any, ...]]]] = []

    def add(self, index: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Add the outputs of a batch, on the host, unless its row only stands in for an empty share."""
        self._kinds |= {name: type(one) for name, one in outputs.items()}
        if has_rows(batch):
            self._parts.append((index, {name: one.parts for name, one in outputs.items()}))

    def joined(self) -> Metrics:
        """Return the metrics of all outputs: a collective if a mesh is open."""
        if not self._kinds:
            return {}
        found = in_order(self._parts)
        joined = {name: tuple(part for parts in found for part in parts[name]) for name in self._kinds}
        return cast(Metrics, {name: kind(joined[name]) for name, kind in self._kinds.items()})


def in_order(parts: list[tuple[int, _T]]) -> list[_T]:
    """The values of all processes, by the number of the batch and then by process: a collective if a mesh is open.

    Args:
        parts: this process's (number of the batch, value) pairs, on the host.
    """
    own = parts if meshes.here().coordinate("tensor") == 0 else []  # processes of one model have the same rows
    found = [entry for given in processes.gathered(own) for entry in given]  # by process, which the sort keeps
    return [value for _, value in sorted(found, key=lambda entry: entry[0])]
