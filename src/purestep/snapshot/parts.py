"""Snapshots of several processes: which rows of which leaves each one writes and reads.

Every process that holds pieces writes its rows into a folder ``part-1`` of one staging directory (`writer`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..errors import RankError
from ..parallel import collectives, placement
from ..parallel import mesh as meshes
from ..types import TrainState, Tree
from .manifest import Leaf, Piece, describe
from .staging import Kind


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
