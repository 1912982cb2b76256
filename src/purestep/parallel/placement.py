"""How several processes hold a state: which leaves are cut, where, and how the whole is put together.

A leaf is cut along its first dimension as `torch.chunk` and DTensor's ``Shard(0)`` do: each process holds
``ceil(rows / W)`` rows, the last ones padded with zeros, so that all pieces have one shape. A scalar counts as one row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from .. import tree
from ..types import Empty, Params, TrainState
from . import collectives
from . import mesh as meshes

T = TypeVar("T")
_FIELDS = ("params", "frozen", "opt_state", "ema", "accum")  # of a state, that have leaves in pieces


class Leaf(NamedTuple):
    """A parameter, whole."""

    name: str
    shape: tuple[int, ...]
    order: tuple[int, ...]  # dimensions by decreasing stride, the first one first: pieces keep channels_last
    is_cut: bool
    tensor: int = -1  # the dimension that is cut over the axis "tensor"; -1: none
    is_trained: bool = True

    @property
    def is_whole(self) -> bool:
        """True if every process holds all numbers."""
        return not self.is_cut and self.tensor < 0

    def part(self, count: int) -> Leaf:
        """The same leaf, as one of ``count`` processes of the axis "tensor" has it: its rows may be cut further."""
        if self.tensor < 0:
            return self
        shape = tuple(size // count if dim == self.tensor else size for dim, size in enumerate(self.shape))
        return self._replace(shape=shape, tensor=-1)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The shape; of a scalar (1,)."""
        return self.shape or (1,)

    def piece_sizes(self, width: int) -> tuple[int, ...]:
        """The shape of a piece of one of ``width`` processes."""
        return (-(-self.sizes[0] // width), *self.sizes[1:])

    def bounds(self, place: int, width: int) -> tuple[int, int]:
        """``(first, end)``: the rows that the process at ``place`` of ``width`` holds."""
        first, end = (min(self.sizes[0], at * self.piece_sizes(width)[0]) for at in (place, place + 1))
        return first, end

    def held(self, place: int, width: int, at: int, count: int) -> tuple[int, int]:
        """``(first, end)``: the rows of the whole that the process at ``place`` of ``width`` and ``at`` of ``count`` on
        the axis "tensor" holds, all columns of them or some."""
        part = self.part(count)
        first, end = part.bounds(place, width) if self.is_cut else (0, part.sizes[0])
        skipped = at * part.sizes[0] if self.tensor == 0 else 0
        return first + skipped, end + skipped

    def writes(self, place: int, at: int) -> bool:
        """True if the process at ``place`` and ``at`` is the first one with these rows."""
        return (self.is_cut or place == 0) and (self.tensor == 0 or at == 0)


class Sharding(NamedTuple):
    """The pieces of a state. Equal in every process of a run."""

    width: int  # processes that hold pieces: the axis "shard" of the mesh
    data: int  # processes that hold the same pieces
    leaves: tuple[Leaf, ...]  # in the module's order, the frozen ones last
    paths: tuple[tuple[str, str], ...]  # (path of a leaf in the state that is cut, name of its parameter)
    summands: tuple[str, ...]  # paths of leaves of which every process holds a part of the sum: an open window
    tensor: int = 1  # processes that hold parts of the leaves with a dimension `Leaf.tensor`


class _NoFields(NamedTuple):
    """A node without leaves."""


class Placement(_NoFields):
    """A state's sharding as a node without leaves: a class for each sharding. Not an `Empty`, which means a state that
    is whole."""

    __slots__ = ()
    sharding: Sharding

    def __reduce__(self) -> tuple[Any, ...]:
        return of, (self.sharding,)

    def __repr__(self) -> str:
        cut = sum(not leaf.is_whole for leaf in self.sharding.leaves)
        count = self.sharding.width * self.sharding.tensor
        return f"Placement({cut} of {len(self.sharding.leaves)} parameters in {count} pieces)"


@functools.cache
def of(sharding: Sharding) -> Placement:
    """The placement of a sharding; the same object for equal shardings."""
    return type("Placement", (Placement,), {"sharding": sharding, "__slots__": ()})()


def sharding_of(
    whole: TrainState,
    is_cut: Callable[[str], bool],
    mesh: meshes.Mesh,
    dims: Mapping[str, int] = MappingProxyType({}),
) -> Sharding:
    """Plan the pieces of a state.

    Args:
        whole: the state of one process; its tensors may be on the meta device.
        is_cut: whether the parameter of a name is cut. If no trained one is, every process accumulates its own
            gradients, which are summed when the window closes.
        mesh: of the processes.
        dims: name of a parameter -> the dimension that is cut over the axis "tensor".
    """
    leaves = tuple(
        Leaf(name, tuple(value.shape), _order(value), is_cut(name) and mesh.shard > 1, dims.get(name, -1), is_trained)
        for named, is_trained in ((whole.params, True), (whole.frozen, False))
        for name, value in named.items()
    )
    shapes = {leaf.name: leaf.shape for leaf in leaves if not leaf.is_whole}
    sums_once = not any(leaf.is_cut and leaf.is_trained for leaf in leaves)
    paths: list[tuple[str, str]] = []
    summands: list[str] = []
    for path, value in tree.with_paths(whole):
        field, _, rest = path.partition("/")
        if field not in _FIELDS:
            continue
        name = next((name for name in _endings(rest) if name in shapes), None)
        if name is not None and tuple(value.shape) == shapes[name]:
            paths.append((path, name))
        if sums_once and path.startswith("accum/grads/"):
            summands.append(path)
    return Sharding(mesh.shard, mesh.data, leaves, tuple(paths), tuple(summands), mesh.tensor)


def _endings(path: str) -> list[str]:
    """A path's last entries: ``0/mu/w`` -> ``[0/mu/w, mu/w, w]``. Names of parameters may contain slashes."""
    parts = path.split("/")
    return ["/".join(parts[index:]) for index in range(len(parts))]


def _order(value: Tensor) -> tuple[int, ...]:
    order = tuple(range(value.dim()))
    by_stride = tuple(sorted(order, key=lambda dim: -value.stride(dim)))
    kept = value.dim() > 1 and by_stride[0] == 0 and value.permute(by_stride).is_contiguous()
    return (by_stride if kept else order) or (0,)


# --- pieces -----------------------------------------------------------------------------------------------------------


def shard_of(sharding: Sharding, leaf: Leaf, value: Tensor, mesh: meshes.Mesh) -> Tensor:
    """The part of a whole tensor that one process holds: a copy in the leaf's memory order."""
    if leaf.tensor >= 0:
        size = value.shape[leaf.tensor] // sharding.tensor
        value = value.narrow(leaf.tensor, mesh.coordinate("tensor") * size, size)
        if not leaf.is_cut:
            return _unpermuted(leaf, value.permute(leaf.order).contiguous()).clone()
    if not leaf.is_cut:
        return value
    leaf = leaf.part(sharding.tensor)
    return _piece(leaf, _rows(leaf, value, sharding.width)[mesh.coordinate("shard")].clone(), sharding.width)


def _rows(leaf: Leaf, value: Tensor, width: int) -> Tensor:
    """All pieces of a whole tensor, flat: (width, numbers of a piece)."""
    flat = value.reshape(leaf.sizes).permute(leaf.order).reshape(leaf.sizes[0], -1)
    missing = leaf.piece_sizes(width)[0] * width - leaf.sizes[0]
    if missing:
        flat = torch.cat([flat, flat.new_zeros((missing, flat.shape[1]))])
    return flat.reshape(width, -1)


def _whole(leaf: Leaf, rows: Tensor, width: int) -> Tensor:
    """The inverse of `_rows`."""
    flat = rows.reshape(leaf.piece_sizes(width)[0] * width, -1)[: leaf.sizes[0]]
    return _unpermuted(leaf, flat.reshape([leaf.sizes[dim] for dim in leaf.order])).reshape(leaf.shape)


def _piece(leaf: Leaf, flat: Tensor, width: int) -> Tensor:
    """A flat piece in its shape."""
    sizes = leaf.piece_sizes(width)
    return _unpermuted(leaf, flat.view([sizes[dim] for dim in leaf.order]))


def _unpermuted(leaf: Leaf, value: Tensor) -> Tensor:
    if leaf.order == tuple(range(len(leaf.order))):  # saves a microsecond a leaf
        return value
    return value.permute(sorted(range(len(leaf.order)), key=lambda dim: leaf.order[dim]))


# --- collectives: one for each dtype ----------------------------------------------------------------------------------

Entry = tuple[Leaf, Tensor]
"""A parameter, and what this process holds or adds to the sum."""


def all_gathered(entries: list[Entry], width: int, *, differentiable: bool = False) -> list[Tensor]:
    """Whole tensors of pieces. ``differentiable``: gradients are summed over the processes of the axis "shard", and
    each gets its pieces."""
    gather = collectives.gathered if differentiable else collectives.all_gather
    rows = _gathered_rows(entries, "shard", width, gather)
    return [_whole(leaf, each, width) for (leaf, _), each in zip(entries, rows, strict=True)]


def _gathered_parts(entries: list[Entry], count: int) -> list[Tensor]:
    """Whole tensors of the parts of layers that ``count`` processes of the axis "tensor" hold."""
    found: list[Tensor] = []
    rows = _gathered_rows(entries, "tensor", count, collectives.all_gather)
    for (leaf, own), each in zip(entries, rows, strict=True):
        sizes = [own.shape[dim] for dim in leaf.order]
        found.append(torch.cat([_unpermuted(leaf, row.reshape(sizes)) for row in each], leaf.tensor))
    return found


def _gathered_rows(
    entries: list[Entry], axis: str, width: int, gather: Callable[[Tensor, str], Tensor]
) -> list[Tensor]:
    """The flat tensors of all processes of an axis: for each entry (width, numbers of one process)."""

    def one_dtype(chosen: list[Entry]) -> list[Tensor]:
        flats = [part.permute(leaf.order).reshape(-1) for leaf, part in chosen]
        dtype = flats[0].dtype
        if dtype.itemsize > 1:
            found = gather(torch.cat(flats), axis)
        else:  # quantized weights: backends do not send float8
            found = gather(torch.cat([flat.view(torch.uint8) for flat in flats]), axis).view(dtype)
        return list(found.view(width, -1).split(_sizes(flats), dim=1))

    return _by_dtype(entries, one_dtype)


def unsharded(sharding: Sharding, entries: list[Entry]) -> list[Tensor]:
    """Whole tensors of what one process holds, by both axes."""
    found = [value for _, value in entries]
    cuts = [index for index, (leaf, _) in enumerate(entries) if leaf.is_cut]
    parts = all_gathered([(entries[index][0].part(sharding.tensor), found[index]) for index in cuts], sharding.width)
    for index, value in zip(cuts, parts, strict=True):
        found[index] = value
    split = [index for index, (leaf, _) in enumerate(entries) if leaf.tensor >= 0]
    wholes = _gathered_parts([(entries[index][0], found[index]) for index in split], sharding.tensor)
    for index, value in zip(split, wholes, strict=True):
        found[index] = value
    return found


def reduce_scattered(entries: list[Entry], width: int) -> list[Tensor]:
    """The pieces of sums over the processes of the axes "shard" and "data"."""

    def one_dtype(chosen: list[Entry]) -> list[Tensor]:
        columns = [_rows(leaf, value, width) for leaf, value in chosen]
        own = collectives.reduce_scatter(torch.cat(columns, dim=1).reshape(-1), "shard")
        flats = collectives.all_reduce(own, "data").split([column.shape[1] for column in columns])
        return [_piece(leaf, flat, width) for (leaf, _), flat in zip(chosen, flats, strict=True)]

    return _by_dtype(entries, one_dtype)


def all_reduced(values: list[Tensor], axis: str) -> list[Tensor]:
    """Sums over the processes of an axis."""

    def one_dtype(chosen: list[tuple[None, Tensor]]) -> list[Tensor]:
        flats = [value.reshape(-1) for _, value in chosen]
        sums = collectives.all_reduce(torch.cat(flats), axis).split(_sizes(flats))
        return [flat.view(value.shape) for flat, (_, value) in zip(sums, chosen, strict=True)]

    return _by_dtype([(None, value) for value in values], one_dtype)


def _sizes(flats: list[Tensor]) -> list[int]:
    return [flat.numel() for flat in flats]


def _by_dtype(
    entries: list[tuple[T, Tensor]], function: Callable[[list[tuple[T, Tensor]]], list[Tensor]]
) -> list[Tensor]:
    """Call a function with the entries of each dtype; returns the results in the order of the entries."""
    places: dict[torch.dtype, list[int]] = {}
    for index, (_, value) in enumerate(entries):
        places.setdefault(value.dtype, []).append(index)
    found: dict[int, Tensor] = {}
    for indices in places.values():
        found |= dict(zip(indices, function([entries[index] for index in indices]), strict=True))
    return [found[index] for index in range(len(entries))]


# --- states -----------------------------------------------------------------------------------------------------------


def part(sharding: Sharding, whole: TrainState) -> TrainState:
    """This process's part of a whole state."""
    mesh = meshes.here()
    named = {leaf.name: leaf for leaf in sharding.leaves}
    cuts, summands = dict(sharding.paths), set(sharding.summands)

    def of_leaf(path: str, value: Tensor) -> Tensor:
        if path in cuts:
            value = shard_of(sharding, named[cuts[path]], value, mesh)
        # The first process holds the sum so far.
        return torch.zeros_like(value) if path in summands and mesh.batch_rank else value

    return mapped(whole, of_leaf)._replace(placement=of(sharding))


def full(state: TrainState) -> TrainState:
    """The whole, plain state of pieces: a collective, which every process calls. A whole state is returned unchanged.

    Example:
        >>> import torch, purestep as ps
        >>> program = ps.program(torch.nn.Linear(2, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1))
        >>> state = program.init(seed=0)
        >>> ps.full(state) is state
        True

    Args:
        state: from a program of `distribute`.

    Returns:
        A TrainState as a program of one process has it, on every process.
    """
    placement = state.placement
    if not isinstance(placement, Placement):
        return state
    sharding = placement.sharding
    named = {leaf.name: leaf for leaf in sharding.leaves}
    cuts, found = dict(sharding.paths), dict[str, Tensor]()
    leaves = dict(tree.with_paths(TrainState(*state)))
    sums = [path for path in sharding.summands if path in leaves]
    found |= dict(zip(sums, all_reduced([leaves[path] for path in sums], "batch"), strict=True))
    leaves |= found
    for field in _FIELDS:
        places = [path for path in leaves if path.partition("/")[0] == field]
        pieces = [path for path in places if path in cuts]
        found |= dict(
            zip(pieces, unsharded(sharding, [(named[cuts[path]], leaves[path]) for path in pieces]), strict=True)
        )
    return mapped(TrainState(*state), lambda path, value: found.get(path, value))._replace(placement=Empty())


def weights(state: TrainState) -> TrainState:
    """The state with whole parameters and without an average, for evaluations and exports: a collective. Its other
    fields stay in pieces, and it has no placement: it cannot be trained. A state without a placement is returned
    unchanged."""
    placement = state.placement
    if not isinstance(placement, Placement):
        return state
    sharding = placement.sharding
    pieces = [leaf for leaf in sharding.leaves if not leaf.is_whole]
    held = {**state.params, **state.frozen}
    named = by_name(pieces, unsharded(sharding, [(leaf, held[leaf.name]) for leaf in pieces]))
    params, frozen = ({name: named.get(name, held[name]) for name in of} for of in (state.params, state.frozen))
    return TrainState(*state)._replace(params=params, frozen=frozen, ema=Empty(), placement=Empty())


def mapped(state: Any, fn: Callable[[str, Any], Any]) -> Any:
    """The tree of ``fn(path, leaf)``."""
    _, treedef = tree.flatten(state)
    return tree.unflatten(treedef, [fn(path, leaf) for path, leaf in tree.with_paths(state)])


def by_name(leaves: list[Leaf], values: list[Tensor]) -> Params:
    """A dict of values by the names of leaves."""
    return {leaf.name: value for leaf, value in zip(leaves, values, strict=True)}
