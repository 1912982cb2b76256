"""Snapshots of several processes: which rows of which leaves each one writes and reads, and how they wait for another.

Every process that holds pieces writes its rows into a folder ``part-1`` of one staging directory and reports; the first
process waits for all reports, writes one manifest and commits. Writers run in threads, which must make no collectives,
so a report is a file: ``<name>.pending`` is renamed to ``<name>.done`` or ``<name>.failed``, which needs no free space.
A process that dies releases its lock in the directory, so the others wait for it no longer.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..errors import RankError, WriteFailed
from ..files import read_json, regular
from ..parallel import collectives, placement
from ..parallel import mesh as meshes
from ..types import TrainState, Tree
from .manifest import Leaf, Piece, describe
from .staging import Kind

_SHORTEST, _LONGEST = 0.002, 0.05  # seconds between two looks at a report


class HeldRows(NamedTuple):
    """The rows of a leaf that this process holds: ``[first, end)`` of the first dimension of the whole tensor.

    A scalar counts as one row. The piece at rest may have more rows, which are padding, and fewer columns.
    """

    shape: tuple[int, ...]  # of the whole tensor
    first: int
    end: int
    columns: tuple[int, int, int] | None = None  # (dimension, first, end), where the axis "tensor" has cut another one
    pieces: tuple[Piece, ...] = ()  # the rows that each part has, in their order


class Spread(NamedTuple):
    """How the processes of a mesh hold a tree, and which of its leaves this process writes."""

    cuts: Mapping[str, HeldRows]  # path -> the rows of this process
    sums: tuple[str, ...]  # paths of leaves whose sum over the processes is stored
    parts: int  # that are written; a single one as one process writes a snapshot. Process n writes part n
    part: int | None  # that this process writes; None: no part
    holds_sums: bool  # this process restores the sums, the others zeros


def spread(state: Tree) -> Spread:
    """How the open mesh holds a tree, in which any `TrainState` may be in pieces.

    Raises:
        RankError: the state is in pieces, and no mesh of as many processes is open.
    """
    mesh = meshes.here()
    cuts: dict[str, HeldRows] = {}
    sums: list[str] = []
    for prefix, sharding in _shardings(state):
        if sharding.paths and (sharding.width, sharding.tensor) != (mesh.shard, mesh.tensor):
            raise RankError(
                f"the state is one of {sharding.width * sharding.tensor} pieces, and the open mesh has "
                f"shard={mesh.shard}, tensor={mesh.tensor}",
                where=prefix.rstrip("/") or "state",
                hint="save and restore inside `with ps.parallel.start(...)`, with the mesh of ps.distribute",
            )
        rows = {leaf.name: _rows(leaf, sharding, mesh) for leaf in sharding.leaves if not leaf.is_whole}
        cuts |= {prefix + path: rows[name] for path, name in sharding.paths}
        sums += [prefix + path for path in sharding.summands]
    count = mesh.shard * mesh.tensor if cuts else 1
    return Spread(cuts, tuple(sums), count, mesh.rank if mesh.rank < count else None, mesh.batch_rank == 0)


def _rows(leaf: placement.Leaf, sharding: placement.Sharding, mesh: meshes.Mesh) -> HeldRows:
    count, width = sharding.tensor, sharding.width
    at = mesh.coordinate("tensor")
    pieces: list[Piece] = []
    for part in range(width * count):
        place, other = divmod(part, count)
        piece = Piece(part, *leaf.held(place, width, other, count))
        if leaf.writes(place, other) and piece.end > piece.first:
            pieces.append(piece)
    columns = None
    if leaf.tensor > 0:
        size = leaf.shape[leaf.tensor] // count
        columns = leaf.tensor, at * size, (at + 1) * size
    first, end = leaf.held(mesh.coordinate("shard"), width, at, count)
    return HeldRows(leaf.shape, first, end, columns, tuple(sorted(pieces, key=lambda piece: piece.first)))


def _shardings(state: Tree) -> list[tuple[str, placement.Sharding]]:
    if not any(map(_is_in_pieces, tree.flatten(state, is_leaf=_is_state)[0])):
        return []  # the paths of a thousand leaves take 20 ms
    found = tree.with_paths(state, is_leaf=_is_state)
    return [(f"{path}/" if path else "", node.placement.sharding) for path, node in found if _is_in_pieces(node)]


def _is_state(node: Any) -> bool:
    return isinstance(node, TrainState)


def _is_in_pieces(node: Any) -> bool:
    return _is_state(node) and isinstance(node.placement, placement.Placement)


def described(kinds: Mapping[str, Kind], spread: Spread) -> dict[str, Leaf]:
    """`manifest.describe`, with the shapes and pieces of whole tensors."""
    records = describe(kinds)
    for path, rows in spread.cuts.items():
        whole = records[path]._replace(shape=rows.shape)
        is_cut = whole.is_stored and spread.parts > 1
        records[path] = whole._replace(pieces=rows.pieces) if is_cut else whole
    return records


@torch.no_grad()
def completed(leaves: dict[str, Any], spread: Spread) -> dict[str, Any]:
    """The leaves by path, with sums over the processes and all columns of the rows: a collective if there are any. The
    columns of one leaf after another are gathered, and stay on the host."""
    if spread.sums:
        totals = placement.all_reduced([leaves[path] for path in spread.sums], "batch")
        leaves = leaves | dict(zip(spread.sums, totals, strict=True))
    for path, rows in spread.cuts.items():
        if rows.columns is not None and spread.part is not None:
            dim = rows.columns[0]
            every = collectives.all_gather(leaves[path].contiguous(), "tensor")
            own = torch.cat(every.chunk(rows.shape[dim] // leaves[path].shape[dim]), dim)
            leaves = leaves | {path: own.cpu() if _writes(rows, spread) else leaves[path]}
    return leaves


def own(leaves: Mapping[str, Any], spread: Spread) -> dict[str, Tensor]:
    """The tensors by path whose values this process stores, as views without padding."""
    found = {path: leaf for path, leaf in leaves.items() if isinstance(leaf, Tensor) and leaf.numel()}
    if spread.cuts or spread.part != 0:
        found = {path: leaf for path, leaf in found.items() if _writes(spread.cuts.get(path), spread)}
    for path in spread.cuts.keys() & found.keys():
        rows = spread.cuts[path]
        found[path] = found[path].narrow(0, 0, rows.end - rows.first)
    return found


def _writes(rows: HeldRows | None, spread: Spread) -> bool:
    """True if this process stores these rows."""
    if rows is None or not rows.pieces or spread.parts == 1:
        return spread.part == 0
    return spread.part in [piece.part for piece in rows.pieces]


def folder(root: Path, parts: int, part: int) -> Path:
    """The folder with the values of one part of a step."""
    return root if parts == 1 else root / f"part-{part}"


# --- reports ----------------------------------------------------------------------------------------------------------


class PartReport:
    """The report of a thread to threads of other processes, as a file: pending, then done or failed.

    Args:
        path: without the ending.
    """

    def __init__(self, path: Path) -> None:
        self._pending, self._done, self._failed = (Path(f"{path}.{word}") for word in ("pending", "done", "failed"))

    def open(self) -> None:
        """Create the pending report. Every process may wait for it afterwards."""
        self.remove()
        open(self._pending, "xb", opener=regular).close()

    def done(self, value: Any = None) -> None:
        """Report a JSON value. None deletes the report, which means success too."""
        if value is None:
            return self._pending.unlink()
        with open(self._pending, "w", encoding="utf-8", opener=regular) as file:
            json.dump(value, file)
            file.flush()
            os.fsync(file.fileno())
        os.rename(self._pending, self._done)

    def fail(self, error: WriteFailed) -> None:
        """Report an error. On a full disk its text is lost."""
        with suppress(OSError), open(self._pending, "w", encoding="utf-8", opener=regular) as file:
            json.dump([error.what, error.where, error.hint, error.errno], file)
        with suppress(OSError):
            os.rename(self._pending, self._failed)

    def wait(self, *, rank: int, alive: Callable[[], bool], timeout: float) -> Any:
        """Wait for the report, and return its value.

        Args:
            rank: of the process that reports, for the messages.
            alive: False if that process has ended.
            timeout: seconds.

        Raises:
            WriteFailed: the process reported an error, has ended, or did not report in time.
        """
        end, pause = time.monotonic() + timeout, _SHORTEST
        while self._pending.exists():
            if not alive() and self._pending.exists():
                raise WriteFailed(
                    f"process {rank} ended before the snapshot was complete",
                    where=str(self._pending.parent),
                    hint="see the error of that process; a restarted run goes on from the last whole step",
                )
            if time.monotonic() > end:
                raise WriteFailed(
                    f"process {rank} did not report within {timeout:g} s",
                    where=str(self._pending.parent),
                    hint="use a faster disk, or pass a longer timeout to parallel.start",
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST)
        if self._failed.exists():
            raise _reported(self._failed, rank)
        return read_json(self._done) if self._done.exists() else None

    def remove(self) -> None:
        """Delete all files of the report."""
        for path in (self._pending, self._done, self._failed):
            path.unlink(missing_ok=True)


def _reported(path: Path, rank: int) -> WriteFailed:
    try:
        what, where, hint, number = read_json(path)
    except (OSError, ValueError, TypeError):
        what, where, hint, number = f"process {rank} could not write", str(path.parent), "see its error", None
    failed = WriteFailed(what, where=where, hint=hint)
    failed.errno = number
    return failed
