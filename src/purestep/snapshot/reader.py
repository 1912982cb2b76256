"""Read a committed step into a state: check the template, read the values, check their digests."""

from __future__ import annotations

import logging
import warnings
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import tree
from ..errors import Corrupt
from ..types import TrainState, Tree
from . import digest, orbax_io, partial_restore, parts, staging, state_copy
from . import history_rows as tables
from . import manifest as manifests
from .manifest import Leaf, Manifest
from .parts import Rows, Spread
from .versions import environment

_log = logging.getLogger("purestep")
_EXACT = ("torch", "threads", "device")  # the bits of a step also depend on these
_ADDED = "/missed/counts"  # added to optimizers later; older snapshots get the value of the template
_SMALL = 1 << 20  # bytes of a leaf; for larger ones orbax's overhead is smaller than a copy
_CHUNK = 1 << 28  # bytes to read back at a time, so that verification needs no second copy of the state


class Snapshot(NamedTuple):
    """The result of `Snapshots.restore`."""

    step: int
    state: Tree  # with the template's structure, devices and dtypes
    loop: Any  # the JSON that was passed to save, or None
    metrics: dict[str, float]
    meta: Any


def read(
    folder: Path,
    template: Tree,
    prefixes: set[str] | None,
    *,
    platforms: str | None,
    warn: bool = False,
    strict: bool = False,
    quiet: bool = False,
) -> Snapshot:
    """Read the state of one step into new tensors. Leaves outside the prefixes are copies of the template's.

    Args:
        folder: the directory of the step.
        template: the template; it is not changed.
        prefixes: see `manifest.select`.
        platforms: see `orbax_io.write`.
        warn: log differences in the environment that can change the bits of later steps.
        strict: True: raise if earlier rows of the history are damaged or missing. False: warn, and fill them with None;
            the state is not affected.
        quiet: no warnings and log lines: another process of the mesh has them.

    Raises:
        Mismatch: leaves differ from the template; the message has one line for each. No values were read.
        Corrupt: the step is damaged.
    """
    manifest = manifests.read(folder)
    leaves = tree.with_paths(template)
    spread = parts.spread(template)
    described = state_copy.described(leaves, spread)
    moved = _views(template, prefixes, manifest)
    rest = None if prefixes is None else {prefix for prefix in prefixes if prefix not in moved}
    chosen, stored = set[str](), set[str]()
    if rest is None or rest:
        chosen = manifests.select(list(described), rest, where="the template")
        stored = manifests.select(list(manifest.leaves), rest, where=str(folder))
        chosen -= {path for path in chosen - stored if path.endswith(_ADDED)}
    sources = {path: path for path, _ in leaves if path in chosen} | {
        p: source for found in moved.values() for p, source in found.items()
    }
    chosen |= sources.keys()
    if not quiet:
        _warn_of_other_fields(template, chosen, manifest)
    held = {path: manifest.leaves[path] for path in stored}
    held |= {path: manifest.leaves[source] for path, source in sources.items() if source in manifest.leaves}
    wanted = {path: leaf for path, leaf in described.items() if path in chosen}
    manifests.compare(held, wanted, where=str(folder), is_part=prefixes is not None)
    held_rows = _rows(leaves, spread)
    uses = Counter((source, held_rows.get(path)) for path, source in sources.items())
    values = _held(folder, manifest, uses.keys(), platforms)
    made: list[Any] = []
    ties: dict[Any, Tensor] = {}
    for path, leaf in leaves:
        if path not in chosen:
            made.append(leaf.detach().clone() if isinstance(leaf, Tensor) else leaf)
        elif isinstance(leaf, Tensor):
            # A tensor at two places of the template is shared again if both places have the same stored value.
            source = sources[path], held_rows.get(path)
            stored_leaf = manifest.leaves[source[0]]
            key = id(leaf), stored_leaf.crc32, stored_leaf.pieces
            if key not in ties:
                uses[source] -= 1  # the last use takes the array itself, the others copy it
                given = values.get(source)
                taken = values.pop(source, None) if not uses[source] or given is None else given.copy()
                ties[key] = staging.tensor(taken, leaf)
            made.append(ties[key])
        else:
            made.append(manifest.leaves[sources[path]].value)
    if warn and not quiet:
        _warn_of_changes(folder, manifest.environment, environment(tree.device([leaf for _, leaf in leaves])))
    _, treedef = tree.flatten(template)
    loop = whole_loop(folder.parent, manifest, strict=strict, quiet=quiet)
    return Snapshot(manifest.step, tree.unflatten(treedef, made), loop, manifest.metrics, manifest.meta)


def _warn_of_other_fields(template: Tree, chosen: set[str], manifest: Manifest) -> None:
    """Warn if weights are restored without their buffers or average: the evaluation would differ."""
    left = [path for path in manifest.leaves if path.split("/")[0] in ("buffers", "ema") and path not in chosen]
    if isinstance(template, TrainState) and left and any(path.startswith("params/") for path in chosen):
        fields = " and ".join(dict.fromkeys(path.split("/")[0] for path in left))
        _log.warning('only trained params are restored; %s are the template\'s (cure: pass only="params")', fields)


def _views(template: Tree, prefixes: set[str] | None, manifest: Manifest) -> dict[str, dict[str, str]]:
    """For the prefixes that mean the view "params", the mapping from template paths to snapshot paths."""
    found = {prefix: partial_restore.sources(template, prefix, manifest.leaves.keys()) for prefix in prefixes or ()}
    return {prefix: sources for prefix, sources in found.items() if sources is not None}


def whole_loop(root: Path, manifest: Manifest, *, strict: bool, quiet: bool = False) -> Any:
    """The loop's state, with the earlier rows from the files of rows.

    Raises:
        Corrupt: with ``strict``, rows are damaged or missing. Otherwise they are filled with None, with a warning.
    """
    loop = manifest.loop
    for path, earlier in manifest.earlier.items():
        try:
            rows = tables.read(root, earlier)
        except Corrupt as error:
            if strict:
                raise
            text = (
                f"{error}: the first {earlier.rows} rows of {path} are lost and filled with None; the state is intact"
            )
            if not quiet:
                cure = f"(cure: copy {earlier.file} with its snapshots)"
                warnings.warn(f"{text} {cure}", RuntimeWarning, stacklevel=5)
            rows = [{}] * earlier.rows
        keys = path.split("/")[1:]
        loop = tables.placed(loop, keys, tables.joined(rows, tables.found(loop, keys)))
    return loop


def _warn_of_changes(folder: Path, then: dict[str, Any], now: dict[str, Any]) -> None:
    changed = [f"{name} {then.get(name)} then, {now[name]} now" for name in _EXACT if then.get(name) != now[name]]
    if changed:
        _log.warning(
            "%s: restored exactly, but later steps may differ in the last bits: %s", folder, ", ".join(changed)
        )


def verify(folder: Path, manifest: Manifest, *, part: int, platforms: str | None) -> None:
    """Read every value of one part of a step, a few leaves at a time, and compare its digest.

    Raises:
        Corrupt: a leaf is damaged; the message names it.
    """
    for group in _groups(manifest.stored(part)):
        _load(parts.folder(folder, manifest.parts, part), group, platforms)


class _Held(NamedTuple):
    """The rows of a leaf that the template has, and the shape of its tensor, which may be padded."""

    rows: Rows
    shape: tuple[int, ...]


def _rows(leaves: list[tuple[str, Any]], spread: Spread) -> dict[str, _Held]:
    """The leaves of a template that are not whole. Sums over processes are held by one of them."""
    sums = set[str]() if spread.holds_sums else set(spread.sums)
    found: dict[str, _Held] = {}
    for path, leaf in leaves:
        if path in spread.cuts:
            found[path] = _Held(spread.cuts[path], tuple(leaf.shape))
        elif path in sums:
            found[path] = _Held(Rows(tuple(leaf.shape), 0, 0), tuple(leaf.shape))
    return found


_Key = tuple[str, _Held | None]  # path in the snapshot, and what the template has of it; None: all


def _held(folder: Path, manifest: Manifest, keys: Iterable[_Key], platforms: str | None) -> dict[_Key, orbax_io.Array]:
    """The values by path and rows: whole arrays as they are read, others put together from pieces."""
    stored = [key for key in keys if manifest.leaves[key[0]].is_stored]
    whole = {path: manifest.leaves[path] for path, held in stored if held is None and not manifest.leaves[path].pieces}
    base = parts.folder(folder, manifest.parts, 0)
    found: dict[_Key, orbax_io.Array] = {(path, None): v for path, v in _values(base, whole, platforms).items()}
    rest: dict[str, list[tuple[_Held, orbax_io.Array]]] = {}
    for key in stored:
        path, held = key
        if key not in found:
            leaf = manifest.leaves[path]
            held = held or _Held(Rows(leaf.shape, 0, leaf.shape[0] if leaf.shape else 1), leaf.shape)
            found[key] = np.zeros(held.shape, staging.carrier(leaf.dtype))
            rest.setdefault(path, []).append((held, found[key]))
    for part in range(manifest.parts):
        arrays = manifest.stored(part)
        needed = {
            path: leaf
            for path, leaf in arrays.items()
            if path in rest and any(_overlap(held.rows, _place(manifest, path, part)) for held, _ in rest[path])
        }
        for group in _groups(needed):
            for path, values in _values(parts.folder(folder, manifest.parts, part), group, platforms).items():
                for held, target in rest[path]:
                    _fill(target, held.rows, values, _place(manifest, path, part))
    return found


def _place(manifest: Manifest, path: str, part: int) -> tuple[int, int]:
    """The rows of a leaf that a part contains."""
    leaf = manifest.leaves[path]
    whole = (0, leaf.shape[0] if leaf.shape else 1)
    return next(((piece.first, piece.end) for piece in leaf.pieces if piece.part == part), whole)


def _overlap(rows: Rows, stored: tuple[int, int]) -> bool:
    return max(rows.first, stored[0]) < min(rows.end, stored[1])


def _fill(target: orbax_io.Array, rows: Rows, values: orbax_io.Array, stored: tuple[int, int]) -> None:
    """Copy the rows that a stored array and a target have in common."""
    first, end = max(rows.first, stored[0]), min(rows.end, stored[1])
    if first < end:
        own, other = np.atleast_1d(target), np.atleast_1d(values)  # views: a scalar is one row
        own[first - rows.first : end - rows.first] = other[first - stored[0] : end - stored[0]]


def _values(folder: Path, leaves: dict[str, Leaf], platforms: str | None) -> dict[str, orbax_io.Array]:
    stored = {path: leaf for path, leaf in leaves.items() if leaf.is_stored}
    small = {path: leaf for path, leaf in stored.items() if staging.size(leaf.dtype, leaf.shape) <= _SMALL}
    values: dict[str, orbax_io.Array] = {}
    for group in _groups(small):
        values |= _small(folder, group)
    rest = {path: leaf for path, leaf in stored.items() if path not in values}
    _check_claims(folder, rest, platforms)
    return values | _load(folder, rest, platforms)


def _small(folder: Path, leaves: dict[str, Leaf]) -> dict[str, orbax_io.Array]:
    """Read the leaves that `orbax_io.read_chunks` can read and whose digests match."""
    chunks = orbax_io.read_chunks(folder, {path: len(leaf.shape) for path, leaf in leaves.items()})
    found: dict[str, orbax_io.Array] = {}
    for path, chunk in chunks.items():
        leaf = leaves[path]
        own = bytearray(memoryview(chunk)[: staging.size(leaf.dtype, leaf.shape)])  # an index follows the values
        if digest.of_bytes(own) == leaf.crc32 and len(own) == staging.size(leaf.dtype, leaf.shape):
            found[path] = np.frombuffer(own, staging.carrier(leaf.dtype)).reshape(leaf.shape)
    return found


def _load(folder: Path, stored: dict[str, Leaf], platforms: str | None) -> dict[str, orbax_io.Array]:
    if not stored:
        return {}
    try:
        values = orbax_io.read(folder, {path: leaf.dtype for path, leaf in stored.items()}, platforms=platforms)
    except Exception as error:
        raise manifests.unreadable(folder, error) from error

    def check(path: str) -> None:
        manifests.check_values(path, stored[path], values.get(path), where=str(folder))

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:  # a digest releases Python's lock
        list(threads.map(check, stored))  # the first error cancels the tasks that have not started
    return values


def _check_claims(folder: Path, stored: dict[str, Leaf], platforms: str | None) -> None:
    """Compare the shapes in orbax's metadata before it allocates: a few damaged bytes can claim terabytes."""
    if not stored:
        return
    try:
        claims = orbax_io.shapes(folder, platforms=platforms)
    except Exception as error:
        raise manifests.unreadable(folder, error) from error
    for path, leaf in stored.items():
        claim = claims.get(orbax_io.key(path))
        if claim is None:
            raise Corrupt(f"the values of {path} are missing", where=str(folder))
        if any(shape != leaf.shape for shape in claim):
            found = ", ".join(str(list(shape)) for shape in claim)
            text = f"the arrays' own metadata claim {found} for {path}, {leaf.text()} was written"
            raise Corrupt(text, where=str(folder))


def _groups(stored: dict[str, Leaf]) -> list[dict[str, Leaf]]:
    groups: list[dict[str, Leaf]] = []
    room = 0
    for path, leaf in stored.items():
        size = staging.size(leaf.dtype, leaf.shape)
        if not groups or size > room:
            groups.append({})
            room = _CHUNK
        groups[-1][path] = leaf
        room -= size
    return groups
