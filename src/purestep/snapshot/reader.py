"""Read a committed step into a state: check the template and the files, read the values."""

from __future__ import annotations

import logging
import operator
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from .. import tree
from ..parallel import mesh as meshes
from ..types import TrainState, Tree
from . import manifest as manifests
from . import orbax_io, partial_restore, parts, staging
from .manifest import Manifest, Piece
from .orbax_io import Array
from .parts import HeldRows, Spread
from .versions import environment

_log = logging.getLogger("purestep")
_EXACT = ("torch", "threads", "device")  # the bits of a step also depend on these
_ADDED = "/missed/counts"  # added to optimizers later; older snapshots get the value of the template


class Snapshot(NamedTuple):
    """The result of `Snapshots.restore`."""

    step: int
    state: Tree  # with the template's structure, devices and dtypes
    loop: Any  # the JSON that was passed to save, or None
    metrics: dict[str, float]
    meta: Any
    history: dict[str, list[Any]] | None = None  # the columns that were passed to save


def read(folder: Path, template: Tree, prefixes: set[str] | None, *, warn: bool = False) -> Snapshot:
    """Read the state of one step into new tensors. Leaves outside the prefixes are copies of the template's.

    Args:
        folder: the directory of the step.
        template: the template; it is not changed.
        prefixes: see `manifest.select`, or words of `partial_restore`; None for all leaves.
        warn: log differences in the environment that can change the bits of later steps.

    Raises:
        Mismatch: leaves differ from the template; the message has one line for each. No values were read.
        Corrupt: the step is damaged.
    """
    manifest = manifests.read(folder)
    leaves = tree.with_paths(template)
    spread = parts.spread(template)
    described = parts.described(staging.kinds(leaves), spread)
    sources: dict[str, str] = {}  # path in the template -> path in the snapshot
    stored: set[str] = set()  # paths in the snapshot that the template has too
    for prefix in [None] if prefixes is None else prefixes:
        moved = None if prefix is None else partial_restore.sources(template, prefix, manifest.leaves.keys())
        if moved is None:
            below = manifests.select(manifest.leaves, prefix, where=str(folder))
            chosen = manifests.select(described, prefix, where="the template")
            moved = {path: path for path in chosen if path in below or not path.endswith(_ADDED)}
            stored |= below
        sources |= moved
    is_first = meshes.here().rank == 0  # of several processes, one logs
    if is_first and prefixes is not None:
        _warn_of_other_fields(template, sources, manifest)
    held = {path: manifest.leaves[path] for path in stored}
    held |= {path: manifest.leaves[source] for path, source in sources.items() if source in manifest.leaves}
    wanted = {path: leaf for path, leaf in described.items() if path in sources}
    manifests.compare(held, wanted, where=str(folder), is_part=prefixes is not None)
    manifests.check_files(folder, manifest, 0)
    arrays = _arrays(folder, manifest, sources, _pieces(leaves, spread))
    made: list[Any] = []
    ties: dict[int, list[tuple[Array | None, Tensor]]] = {}
    for path, leaf in leaves:
        if path not in sources:
            made.append(leaf.detach().clone() if isinstance(leaf, Tensor) else leaf)
        elif isinstance(leaf, Tensor):
            made.append(_tied(ties.setdefault(id(leaf), []), arrays.get(path), leaf))
        else:
            made.append(manifest.leaves[sources[path]].value)
    if warn and is_first:
        _warn_of_changes(folder, manifest.environment, environment(tree.device([leaf for _, leaf in leaves])))
    _, treedef = tree.flatten(template)
    rows = manifests.read_history(folder, manifest)
    state = tree.unflatten(treedef, made)
    return Snapshot(manifest.step, state, manifest.loop, manifest.metrics, manifest.meta, rows)


def _tied(known: list[tuple[Array | None, Tensor]], values: Array | None, leaf: Tensor) -> Tensor:
    """The tensor of a leaf. One that is at two places of the template is shared again if their values are equal."""
    for other, tensor in known:
        if values is other or (values is not None and other is not None and values.tobytes() == other.tobytes()):
            return tensor
    known.append((values, staging.tensor(values, leaf)))
    return known[-1][1]


def _warn_of_other_fields(template: Tree, chosen: Collection[str], manifest: Manifest) -> None:
    """Warn if weights are restored without their buffers or average: the evaluation would differ."""
    left = [path for path in manifest.leaves if path.split("/")[0] in ("buffers", "ema") and path not in chosen]
    if isinstance(template, TrainState) and left and any(path.startswith("params/") for path in chosen):
        fields = " and ".join(dict.fromkeys(path.split("/")[0] for path in left))
        _log.warning('only trained params are restored; %s are the template\'s (cure: pass only="params")', fields)


def _warn_of_changes(folder: Path, then: dict[str, Any], now: dict[str, Any]) -> None:
    changed = [f"{name} {then.get(name)} then, {now[name]} now" for name in _EXACT if then.get(name) != now[name]]
    if changed:
        _log.warning(
            "%s: restored exactly, but later steps may differ in the last bits: %s", folder, ", ".join(changed)
        )


def load(folder: Path, manifest: Manifest, part: int, paths: Iterable[str]) -> dict[str, Array]:
    """Read some of the arrays of one part.

    Raises:
        Corrupt: a leaf is damaged; the message names it.
    """
    stored = manifest.stored(part)
    place = parts.folder(folder, manifest.parts, part)
    shapes = {path: manifest.leaves[path].stored_shape(stored[path]) for path in paths}
    try:
        values = orbax_io.read(place, shapes) if shapes else {}
    except Exception as error:
        raise manifests.unreadable(place, error) from error
    for path in shapes:
        manifests.check_values(path, manifest.leaves[path], stored[path], values.get(path), where=str(place))
    return values


def check_shapes(folder: Path, manifest: Manifest, part: int) -> None:
    """Compare the shapes in the metadata of the arrays of one part, whose files were checked, with the manifest's.

    Raises:
        Corrupt: they differ.
    """
    place = parts.folder(folder, manifest.parts, part)
    shapes = {path: manifest.leaves[path].stored_shape(piece) for path, piece in manifest.stored(part).items()}
    try:
        if shapes:
            orbax_io.check_shapes(place, shapes)
    except Exception as error:
        raise manifests.unreadable(place, error) from error


class _Held(NamedTuple):
    """The rows of a leaf that the template has, and the shape of its tensor, which may be padded."""

    rows: HeldRows
    shape: tuple[int, ...]

    def empty(self, dtype: Any) -> Array:
        """Zeros for these rows, with all columns."""
        dim = -1 if self.rows.columns is None else self.rows.columns[0]
        return np.zeros([self.rows.shape[at] if at == dim else size for at, size in enumerate(self.shape)], dtype)

    def own(self, array: Array) -> Array:
        """The columns that the template has."""
        if self.rows.columns is None:
            return array
        dim, first, end = self.rows.columns
        return np.ascontiguousarray(array.take(range(first, end), axis=dim))


def _pieces(leaves: list[tuple[str, Any]], spread: Spread) -> dict[str, _Held]:
    """The leaves of a template that are not whole. Sums over processes are held by one of them."""
    found = {path: _Held(spread.cuts[path], tuple(leaf.shape)) for path, leaf in leaves if path in spread.cuts}
    if not spread.holds_sums:
        sums = set(spread.sums)
        found |= {path: _Held(HeldRows(tuple(x.shape), 0, 0), tuple(x.shape)) for path, x in leaves if path in sums}
    return found


def _arrays(
    folder: Path, manifest: Manifest, sources: Mapping[str, str], pieces: Mapping[str, _Held]
) -> dict[str, Array]:
    """The values of the template's leaves: whole arrays as they are read, others put together from pieces.

    Args:
        folder: of the step.
        manifest: of the step.
        sources: path in the template -> path in the snapshot.
        pieces: the leaves of the template that are not whole.
    """
    found: dict[str, Array] = {}
    held: dict[str, _Held] = {}  # of the leaves that are put together
    for path, source in sources.items():
        leaf = manifest.leaves[source]
        if leaf.is_stored and (leaf.pieces or path in pieces):
            held[path] = pieces.get(path) or _Held(HeldRows(leaf.shape, 0, leaf.rows), leaf.shape)
            found[path] = held[path].empty(staging.carrier(leaf.dtype))
    for part in range(manifest.parts):
        stored = manifest.stored(part)
        needed = {
            path: stored[source]
            for path, source in sources.items()
            if source in stored and (path not in held or operator.lt(*_common(held[path].rows, stored[source])))
        }
        if part and needed:
            manifests.check_files(folder, manifest, part)
        values = load(folder, manifest, part, {sources[path] for path in needed})
        taken: set[str] = set()
        for path, piece in needed.items():
            source = sources[path]
            if path not in held:
                found[path] = values[source].copy() if source in taken else values[source]
                taken.add(source)
                continue
            first, end = _common(held[path].rows, piece)
            begin = held[path].rows.first
            own, other = np.atleast_1d(found[path]), np.atleast_1d(values[source])  # views: a scalar is one row
            own[first - begin : end - begin] = other[first - piece.first : end - piece.first]
    return found | {path: one.own(found[path]) for path, one in held.items()}


def _common(rows: HeldRows, piece: Piece) -> tuple[int, int]:
    """The first row that both have, and the end, which is not larger if they have none in common."""
    return max(rows.first, piece.first), min(rows.end, piece.end)
