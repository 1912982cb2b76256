"""How several processes hold a state: which leaves are cut, where, and how the whole is put together.

A leaf is cut along its first dimension as `torch.chunk` and DTensor's ``Shard(0)`` do: each process holds
``ceil(rows / W)`` rows, the last ones padded with zeros, so that all pieces have one shape. A scalar counts as one row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..types import Empty, Params, TrainState
from . import collectives
from . import mesh as meshes


class Leaf(NamedTuple):
    """A parameter, whole."""

    name: str
    shape: tuple[int, ...]
    order: tuple[int, ...]  # dimensions by decreasing stride, the first one first: pieces keep channels_last
    is_cut: bool
    tensor: int = -1  # the dimension that is cut over the axis "tensor"; -1: none

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
    def rows(self) -> int:
        """The rows that are cut: the first dimension; 1 of a scalar."""
        return self.shape[0] if self.shape else 1

    def piece_shape(self, width: int) -> tuple[int, ...]:
        """The shape of a piece of one of ``width`` processes."""
        return (-(-self.rows // width), *self.shape[1:])

    def bounds(self, place: int, width: int) -> tuple[int, int]:
        """``(first, end)``: the rows that the process at ``place`` of ``width`` holds."""
        each = -(-self.rows // width)
        return min(self.rows, place * each), min(self.rows, (place + 1) * each)


class Layout(NamedTuple):
    """The pieces of a state. Equal in every process of a run."""

    width: int  # processes that hold pieces: the axis "shard" of the mesh
    data: int  # processes that hold the same pieces
    leaves: tuple[Leaf, ...]  # in the module's order
    paths: tuple[tuple[str, str], ...]  # (path of a leaf in the state that is cut, name of its parameter)
    summands: tuple[str, ...]  # paths of leaves of which every process holds a part of the sum: an open window
    tensor: int = 1  # processes that hold parts of the leaves with a dimension `Leaf.tensor`


class _NoFields(NamedTuple):
    """A node without leaves."""


class Placement(_NoFields):
    """The layout of a state's pieces, as a node without leaves: a class for each layout. Not an `Empty`, which means
    that a state is whole."""

    __slots__ = ()
    layout: Layout

    def __reduce__(self) -> tuple[Any, ...]:
        return of, (self.layout,)

    def __repr__(self) -> str:
        cut = sum(not leaf.is_whole for leaf in self.layout.leaves)
        count = self.layout.width * self.layout.tensor
        return f"Placement({cut} of {len(self.layout.leaves)} parameters in {count} pieces)"


@functools.cache
def of(layout: Layout) -> Placement:
    """The placement of a layout; the same object for equal layouts."""
    return type("Placement", (Placement,), {"layout": layout, "__slots__": ()})()


def layout_of(
    whole: TrainState,
    is_cut: Callable[[str], bool],
    width: int,
    data: int,
    *,
    sums_once: bool,
    tensor: int = 1,
    dims: Mapping[str, int] = MappingProxyType({}),
) -> Layout:
    """Plan the pieces of a state.

    Args:
        whole: the state of one process; its tensors may be on the meta device.
        is_cut: whether the parameter of a name is cut.
        width: processes that hold pieces.
        data: processes that hold the same pieces.
        sums_once: every process accumulates its own gradients, which are summed when the window closes.
        tensor: processes that hold parts of the parameters in ``dims``.
        dims: name of a parameter -> the dimension that is cut over the axis "tensor".
    """
    leaves = tuple(
        Leaf(name, tuple(value.shape), _order(value), is_cut(name) and width > 1, dims.get(name, -1))
        for name, value in whole.params.items()
    )
    shapes = {leaf.name: leaf.shape for leaf in leaves if not leaf.is_whole}
    paths: list[tuple[str, str]] = []
    summands: list[str] = []
    for path, value in tree.with_paths(whole):
        field, _, rest = path.partition("/")
        if field not in ("params", "opt_state", "ema", "accum"):
            continue
        name = next((name for name in _endings(rest) if name in shapes), None)
        if name is not None and tuple(value.shape) == shapes[name]:
            paths.append((path, name))
        if sums_once and path.startswith("accum/grads/"):
            summands.append(path)
    return Layout(width, data, leaves, tuple(paths), tuple(summands), tensor)


def _endings(path: str) -> list[str]:
    """A path's last entries: ``0/mu/w`` -> ``[0/mu/w, mu/w, w]``. Names of parameters may contain slashes."""
    parts = path.split("/")
    return ["/".join(parts[index:]) for index in range(len(parts))]


def _order(value: Tensor) -> tuple[int, ...]:
    order = tuple(range(value.dim()))
    by_stride = tuple(sorted(order, key=lambda dim: -value.stride(dim)))
    kept = value.dim() > 1 and by_stride[0] == 0 and value.permute(by_stride).is_contiguous()
    return by_stride if kept else order


# --- pieces -----------------------------------------------------------------------------------------------------------


def cut(leaf: Leaf, value: Tensor, place: int, width: int) -> Tensor:
    """The piece of the process at ``place``: a copy in the leaf's memory order."""
    return _shaped(leaf, _rows(leaf, value, width)[place].clone(), width)


def _rows(leaf: Leaf, value: Tensor, width: int) -> Tensor:
    """All pieces of a whole tensor, flat: (width, numbers of a piece)."""
    flat = value.permute(leaf.order).reshape(leaf.rows, -1) if leaf.shape else value.reshape(1, 1)
    missing = leaf.piece_shape(width)[0] * width - leaf.rows
    if missing:
        flat = torch.cat([flat, flat.new_zeros((missing, flat.shape[1]))])
    return flat.reshape(width, -1)


def _flat(leaf: Leaf, piece: Tensor) -> Tensor:
    return piece.permute(leaf.order).reshape(-1) if leaf.shape else piece.reshape(-1)


def _shaped(leaf: Leaf, flat: Tensor, width: int) -> Tensor:
    """A flat piece in its shape."""
    shape = leaf.piece_shape(width)
    return _unpermuted(leaf, flat.view([shape[dim] for dim in leaf.order])) if leaf.shape else flat.view(shape)


def _unpermuted(leaf: Leaf, value: Tensor) -> Tensor:
    if leaf.order == tuple(range(len(leaf.order))):
        return value
    return value.permute(sorted(range(len(leaf.order)), key=lambda dim: leaf.order[dim]))


def joined(leaf: Leaf, pieces: Tensor, width: int) -> Tensor:
    """The whole tensor of all pieces.

    Args:
        leaf: the parameter.
        pieces: (width, numbers of a piece).
        width: processes that hold pieces.
    """
    rows = leaf.piece_shape(width)[0] * width
    flat = pieces.reshape(rows, -1)[: leaf.rows]
    if not leaf.shape:
        return flat.reshape(())
    sizes = [leaf.shape[dim] for dim in leaf.order]
    return _unpermuted(leaf, flat.reshape(sizes))


def gathered(leaves: list[tuple[Leaf, Tensor]], width: int, *, differentiable: bool = False) -> list[Tensor]:
    """Whole tensors of pieces: one collective for each dtype. ``differentiable``: gradients are summed over the
    processes of the axis "shard", and each gets its pieces."""
    gather = collectives.gathered if differentiable else collectives.all_gather
    found: dict[int, Tensor] = {}
    for places in _by_dtype([piece for _, piece in leaves]):
        flats = [_flat(*leaves[index]) for index in places]
        together = gather(torch.cat(flats), "shard").view(width, -1)
        parts = together.split([flat.numel() for flat in flats], dim=1)
        found |= {index: joined(leaves[index][0], part, width) for index, part in zip(places, parts, strict=True)}
    return [found[index] for index in range(len(leaves))]


def wholes(layout: Layout, leaves: list[tuple[Leaf, Tensor]]) -> list[Tensor]:
    """Whole tensors of what one process holds, by both axes: at most two collectives for each dtype."""
    found = [value for _, value in leaves]
    cuts = [index for index, (leaf, _) in enumerate(leaves) if leaf.is_cut]
    parts = gathered([(leaves[index][0].part(layout.tensor), found[index]) for index in cuts], layout.width)
    for index, value in zip(cuts, parts, strict=True):
        found[index] = value
    split = [index for index, (leaf, _) in enumerate(leaves) if leaf.tensor >= 0]
    for places in _by_dtype([found[index] for index in split]):
        chosen = [split[place] for place in places]
        flats = [_flat(leaves[index][0], found[index]) for index in chosen]
        together = collectives.all_gather(torch.cat(flats), "tensor").view(layout.tensor, -1)
        for index, rows in zip(chosen, together.split([flat.numel() for flat in flats], dim=1), strict=True):
            leaf = leaves[index][0]
            sizes = [found[index].shape[dim] for dim in leaf.order]
            found[index] = torch.cat([_unpermuted(leaf, row.reshape(sizes)) for row in rows], dim=leaf.tensor)
    return found


def own(layout: Layout, leaf: Leaf, value: Tensor, mesh: meshes.Mesh) -> Tensor:
    """What one process holds of a whole tensor: a copy."""
    if leaf.tensor >= 0:
        size = value.shape[leaf.tensor] // layout.tensor
        value = value.narrow(leaf.tensor, mesh.coordinate("tensor") * size, size)
        if not leaf.is_cut:
            return _unpermuted(leaf, value.permute(leaf.order).contiguous()).clone()
    return cut(leaf.part(layout.tensor), value, mesh.coordinate("shard"), layout.width) if leaf.is_cut else value


def scattered(leaves: list[tuple[Leaf, Tensor]], width: int) -> list[Tensor]:
    """The pieces of sums over the processes of the axis "shard": one collective for each dtype."""
    found: dict[int, Tensor] = {}
    for places in _by_dtype([value for _, value in leaves]):
        columns = [_rows(*leaves[index], width) for index in places]
        own = collectives.reduce_scatter(torch.cat(columns, dim=1).reshape(-1), "shard")
        own = collectives.all_reduce(own, "data")
        parts = own.split([column.shape[1] for column in columns])
        found |= {index: _shaped(leaves[index][0], part, width) for index, part in zip(places, parts, strict=True)}
    return [found[index] for index in range(len(leaves))]


def summed(values: list[Tensor], axis: str) -> list[Tensor]:
    """Sums over the processes of an axis: one collective for each dtype."""
    found: dict[int, Tensor] = {}
    for places in _by_dtype(values):
        flats = [values[index].reshape(-1) for index in places]
        together = collectives.all_reduce(torch.cat(flats), axis)
        parts = together.split([flat.numel() for flat in flats])
        found |= {index: part.view(values[index].shape) for index, part in zip(places, parts, strict=True)}
    return [found[index] for index in range(len(values))]


def _by_dtype(values: list[Tensor]) -> list[list[int]]:
    places: dict[torch.dtype, list[int]] = {}
    for index, value in enumerate(values):
        places.setdefault(value.dtype, []).append(index)
    return list(places.values())


# --- states -----------------------------------------------------------------------------------------------------------


def part(layout: Layout, whole: TrainState) -> TrainState:
    """This process's part of a whole state."""
    groups = meshes.current()
    mesh = groups.mesh if groups is not None else meshes.Mesh()
    named = {leaf.name: leaf for leaf in layout.leaves}
    cuts, summands = dict(layout.paths), set(layout.summands)

    def of_leaf(path: str, value: Tensor) -> Tensor:
        if path in cuts:
            value = own(layout, named[cuts[path]], value, mesh)
        # The first process holds the sum so far.
        return torch.zeros_like(value) if path in summands and mesh.batch_rank else value

    return _mapped(whole, of_leaf)._replace(placement=of(layout))


def full(state: TrainState) -> TrainState:
    """The whole, plain state of pieces: a collective, which every process calls. A whole state is returned unchanged.

    Args:
        state: from a program of `distribute`.

    Returns:
        A TrainState as a program of one process has it, on every process.

    Example:
        >>> import torch, purestep as ps
        >>> program = ps.program(torch.nn.Linear(2, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1))
        >>> state = program.init(seed=0)
        >>> ps.full(state) is state
        True
    """
    placement = state.placement
    if not isinstance(placement, Placement):
        return state
    layout = placement.layout
    named = {leaf.name: leaf for leaf in layout.leaves}
    cuts, found = dict(layout.paths), dict[str, Tensor]()
    leaves = dict(tree.with_paths(TrainState(*state)))
    sums = [path for path in layout.summands if path in leaves]
    found |= dict(zip(sums, summed([leaves[path] for path in sums], "batch"), strict=True))
    leaves |= found
    for field in ("params", "opt_state", "ema", "accum"):
        places = [path for path in leaves if path.partition("/")[0] == field]
        pieces = [path for path in places if path in cuts]
        found |= dict(zip(pieces, wholes(layout, [(named[cuts[path]], leaves[path]) for path in pieces]), strict=True))
    return _mapped(TrainState(*state), lambda path, value: found.get(path, value))._replace(placement=Empty())


def weights(state: TrainState) -> TrainState:
    """The state with whole parameters and without an average, for evaluations and exports: a collective. Its other
    fields stay in pieces, and it has no placement: it cannot be trained. A state without a placement is returned
    unchanged."""
    placement = state.placement
    if not isinstance(placement, Placement):
        return state
    layout = placement.layout
    pieces = [leaf for leaf in layout.leaves if not leaf.is_whole]
    named = by_name(pieces, wholes(layout, [(leaf, state.params[leaf.name]) for leaf in pieces]))
    params = {name: named.get(name, value) for name, value in state.params.items()}
    return TrainState(*state)._replace(params=params, ema=Empty(), placement=Empty())


def _mapped(state: TrainState, fn: Callable[[str, Any], Any]) -> TrainState:
    _, treedef = tree.flatten(state)
    return tree.unflatten(treedef, [fn(path, leaf) for path, leaf in tree.with_paths(state)])


def by_name(leaves: list[Leaf], values: list[Tensor]) -> Params:
    """A dict of values by the names of leaves."""
    return {leaf.name: value for leaf, value in zip(leaves, values, strict=True)}
