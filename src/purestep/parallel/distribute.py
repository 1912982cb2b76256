"""`distribute`: the steps of a program on several processes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, Literal, cast

import torch
from torch import Tensor

from .. import tree
from ..errors import ConfigError, RankError
from ..metrics import Gathered
from ..model import check_real
from ..optim import base, numerics
from ..state import check_choice, known_keywords, views
from ..torch_ext import tracing
from ..types import Batch, Exchange, Form, Labels, Metrics, Params, Program, Share, Static, TrainState, Tree
from . import batchnorm as batchnorms
from . import collectives, joined_buffers, passes, placement, processes, tensor_parallel
from . import mesh as meshes
from . import units as blocks
from .mesh import Mesh
from .placement import Leaf, Sharding

Rules = Sequence[tuple[str, str]]
_WHERE = "distribute"
_MODES = ("replicate", "shard")
_CHECKS = 2  # passes that compare the order of their collectives, in every program


@known_keywords
def distribute(
    program: Program,
    mesh: Mesh,
    *,
    params: str | Rules = "replicate",
    units: Sequence[str] = (),
    batchnorm: Literal["sync", "average"] | None = None,
    tensor: tensor_parallel.Plan | None = None,
    buffers: Mapping[str, str] = MappingProxyType({}),
) -> Program:
    """Return the program for the processes of a mesh. Every step equals one process's step on the whole batch, up to
    rounding, dropout, and ``batchnorm="average"``; a loss that compares the rows of a batch needs `gather`.

    Example:
        >>> import torch, purestep as ps
        >>> program = ps.program(torch.nn.Linear(2, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1))
        >>> with ps.parallel.start() as mesh:  # alone: a mesh of one
        ...     state = ps.distribute(program, mesh, params="replicate").init(seed=0)
        >>> int(state.step)
        0

    Every process calls the same functions in the same order, with its rows of each batch (`fit` cuts them, `share`
    does in a loop of one's own). The objective's weights weigh the processes' gradients, losses and metrics, so shares
    may differ in size. ``init`` returns this process's part of the state; `full` puts the whole together.

    Args:
        program: from `program`.
        mesh: from `parallel.start`. On a mesh of one process the program itself is returned.
        params: "replicate": every process holds the whole state, as DistributedDataParallel; "shard": the processes of
            the axis "shard" hold pieces of parameters (frozen ones, too), optimizer state, average and window, and
            gather the parameters for each call (ZeRO-2); on a mesh with ``data`` and ``shard``, the processes of "data"
            hold equal pieces (HSDP). Or rules ``[(regex, "shard" or "replicate"), ...]`` for the names of parameters:
            the first match (`re.search`) counts, and a name without a match is replicated.
        units: names of blocks (``["blocks.*"]``; ``*`` stands for one part of a name) whose parameters are gathered
            when the block runs, freed, and gathered again in the backward pass, which repeats the block's forward pass
            (ZeRO-3): a process holds the whole parameters of one block at a time, at half as much more communication
            and a third more arithmetic. Only the block's own forward method may read its parameters, also in regions
            of activation checkpointing. A parameter that is tied to one outside of its block is gathered for the whole
            call. Every process runs these blocks in one order: leave out experts, and layers that a process may drop.
            The order is compared in the first two passes, and by `fit` after every call in eager mode.
        batchnorm: for a model whose batch normalization trains, and only there, it has no default. "sync": statistics
            of all processes' rows, with one small collective a layer in each pass: equal to one process, unless the
            program has micro-batches (theirs have other rows). "average": each process uses the statistics of its own
            rows, and the running ones are averaged, as DistributedDataParallel and most training scripts do: faster,
            and not equal to one process.
        tensor: names of layers -> styles of `torch.distributed.tensor.parallel` (``ColwiseParallel()``,
            ``RowwiseParallel()``, ``SequenceParallel()``); ``*`` in a name matches any text. The processes of the axis
            "tensor" hold parts of these layers and compute them together; ``params`` may cut the parts further. They
            draw the same random numbers. Evaluation and ``bind`` gather the whole weights.
        buffers: names of buffers that the forward pass writes -> how those of the processes become one; ``*`` in a name
            matches any text. "sum": what a pass adds to it is summed (counts of rows, sums of a codebook); "mean": the
            mean by the weights of the shares (running means over rows); "local": nothing is exchanged (a count of
            calls, which every process computes alike). Normalization layers need none.

    Returns:
        A `Program`. Its steps make collectives: all processes call them, or none.

    Raises:
        ConfigError: ``params`` has another value, or a rule matches no parameter; ``batchnorm`` is missing or has
            another value, or is "sync" for a layer with a forward method of its own; ``tensor`` matches no layer, or
            the axis does not divide a layer's dimension; ``units`` matches no block, or one without parameters in
            pieces; ``buffers`` matches no buffer. From train_step: the forward pass writes a buffer that has no
            entry in ``buffers``.
        RankError: ``params`` shards, and the mesh has ``shard=1``; it has ``tensor`` processes without a plan, or a
            plan without processes; the program is distributed already; it is no program of `purestep.program`. From
            train_step: processes run other blocks of ``units``.
    """
    static = program.static
    if static is None or program.init is None or program.bind is None or program.eval_step is None:
        raise RankError("this program has no static description", where=_WHERE, hint="pass a program of ps.program")
    if static.members:
        hint = "distribute the program of one model, or train the ensemble on one device"
        raise RankError("the program is an ensemble", where=_WHERE, hint=hint)
    if static.carry and mesh.size > 1:
        hint = "train in one process, or a model whose forward takes and returns the hidden state"
        raise RankError("the program carries buffers from batch to batch", where=_WHERE, hint=hint)
    if static.stream:
        raise RankError("the program is distributed already", where=_WHERE, hint="pass the program of ps.program")
    names = (*static.trained, *static.frozen)
    is_cut = _chosen(params, names)
    is_synced = _check_batchnorm(batchnorm, static.module)
    if tensor is not None:
        tensor_parallel.check(tensor, static.module)
    unit_names = blocks.names_of(units, static.module)
    if mesh.size == 1:
        return program
    check_real(static.module, _WHERE)
    _check_mesh(mesh, params, tensor, cuts=any(map(is_cut, names)))
    collectives.keep_in_graphs()

    # Layers that communicate, in copies of the model's modules.
    inner, splits = static, dict[str, tensor_parallel.Split]()
    if is_synced and mesh.batch_size > 1:
        inner = _changed(inner, batchnorms.synchronize)
    statistics = inner.made.statistics  # of whole weights
    if tensor is not None:
        inner = _changed(inner, tensor_parallel.parallelized(tensor, meshes.axis_mesh("tensor")))
        splits = tensor_parallel.splits(inner.module, mesh.tensor, static.frozen, static.ties)
    dims = {name: split.dim for name, split in splits.items() if split.dim >= 0}
    whole = program.init(device="meta")
    ways = joined_buffers.ways_of(static.module, whole.buffers, buffers)
    sharding = placement.sharding_of(whole, is_cut, mesh, dims)
    trained = [leaf for leaf in sharding.leaves if leaf.is_trained]
    if static.tx.elementwise and not all(leaf.is_whole for leaf in trained):
        _check_elementwise(static.tx, trained)
    in_units = blocks.leaves_of(unit_names, sharding.leaves, static.ties)
    if in_units:
        inner = _changed(inner, blocks.gathering(_units(in_units, sharding, splits)))

    hidden = frozenset(leaf.name for leaves in in_units.values() for leaf in leaves)
    own = _Distributed(program, inner, mesh, sharding, splits, hidden, ways, mixes=is_synced or bool(in_units))
    own.cuts_first = static.tx.elementwise and own.is_made_of_pieces(whole)
    steps = inner.made.steps(own.form(Form(lambda stored: stored, lambda named: named)))
    fixed = static._replace(
        made=static.made._replace(
            steps=lambda form: inner.made.steps(own.form(form)),
            statistics=lambda state, view: cast(Any, statistics)(state, view, own.exchange, placement.weights),
        ),
        labels=None if static.labels is None else own.labels,
        stream=own.exchange.stream,
    )
    for function in steps:  # read by compile_step
        vars(function)["static"] = fixed
    return Program(steps.train_step, steps.flush, own.eval_step, own.init, own.bind, fixed)


def share(batch: Batch, mesh: Mesh) -> Share:
    """Return this process's rows of a batch that all processes have.

    Example:
        >>> import torch, purestep as ps
        >>> part = ps.parallel.share((torch.arange(6), torch.arange(6)), ps.parallel.Mesh(data=2, rank=1))
        >>> part.rows[0].tolist(), part.counts.item()
        ([3, 4, 5], 1.0)

    Process r of W takes the rows from ``n r // W`` to ``n (r + 1) // W``. A process without rows takes the first row,
    which counts nothing.

    Args:
        batch: tensors, arrays and lists with one entry for each row, in any nesting, as for ``microbatches``.
        mesh: from `parallel.start`.

    Raises:
        DataError: the batch has no rows, or numbers of rows differ.
    """
    from ..step import microbatch

    at, width = mesh.batch_rank, mesh.batch_size
    count = microbatch.count_rows(batch, width)
    first, end = count * at // width, count * (at + 1) // width
    rows = microbatch.rows(batch, first, end) if end > first else microbatch.rows(batch, 0, 1)
    device = next((leaf.device for leaf in tree.leaves(rows) if isinstance(leaf, Tensor)), None)
    return Share(rows, torch.tensor(float(end > first), device=device))


def _chosen(params: Any, names: Sequence[str]) -> Callable[[str], bool]:
    """``name -> whether the parameter is cut``."""
    if isinstance(params, str):
        check_choice(_WHERE, _MODES, also='rules: [("embed", "replicate"), (".*", "shard")]', params=params)
        return lambda name: params == "shard"
    rules: list[tuple[str, str]] = []
    for rule in params if isinstance(params, list | tuple) else [params]:
        if not (isinstance(rule, tuple) and len(cast(Any, rule)) == 2) or cast(Any, rule)[1] not in _MODES:
            raise ConfigError(
                f"the rule {rule!r} must be a pair of a regular expression and a placement",
                where=_WHERE,
                hint='params=[("embed", "replicate"), (".*", "shard")]',
            )
        rules.append(cast(Any, rule))
    for pattern, _ in rules:
        if not any(re.search(pattern, name) for name in names):
            raise ConfigError(
                f"the rule {pattern!r} matches no parameter",
                where=_WHERE,
                hint=f"names are like {', '.join(names[:3])}",
            )

    def is_cut(name: str) -> bool:
        return next((kind for pattern, kind in rules if re.search(pattern, name)), "replicate") == "shard"

    return is_cut


def _check_batchnorm(batchnorm: Any, module: Any) -> bool:
    """True if layers are to be synchronized."""
    names = batchnorms.trained(module)
    if names and batchnorm is None:
        raise ConfigError(
            f"the model normalizes by the statistics of a batch ({names[0]}), of which each process has a part",
            where=_WHERE,
            hint='batchnorm="sync" for the statistics of the whole batch, equal to one process; batchnorm="average" '
            "for those of each process, as DistributedDataParallel",
        )
    return bool(names) and batchnorm == "sync"


def _check_mesh(mesh: Mesh, params: Any, tensor: Any, *, cuts: bool) -> None:
    if mesh.shard == 1 and cuts:
        raise RankError(
            f"params={params!r} cuts parameters, and the mesh has shard=1",
            where=_WHERE,
            hint=f'parallel.start(shard={mesh.size}), or params="replicate"',
        )
    if (mesh.tensor > 1) != (tensor is not None):
        raise RankError(
            f"the mesh has tensor={mesh.tensor}, and there is {'no' if tensor is None else 'a'} plan of layers",
            where=_WHERE,
            hint='parallel.start(tensor=2) with distribute(..., tensor={"blocks.*.up": ColwiseParallel()}), or neither',
        )


def _check_elementwise(tx: Any, leaves: Sequence[Leaf]) -> None:
    """Compare the updates of whole parameters with those of their pieces, on small tensors of the same names. A user's
    function that does not take these is not checked.

    Raises:
        ConfigError: they differ.
    """
    random = torch.Generator().manual_seed(0)
    norms = base.Norms(lambda _: torch.ones((), dtype=torch.float64))

    def values(size: float) -> Params:
        shapes = {leaf.name: [4, *[2] * (len(leaf.shape) - 1)] if leaf.shape else [] for leaf in leaves}
        return {n: size * torch.randn(shape, generator=random, dtype=torch.float64) for n, shape in shapes.items()}

    def half(value: Tensor) -> Tensor:
        return value[:2].clone() if value.dim() else value

    def updates(grads: Params, params: Params) -> Params:
        return base.updated(tx, grads, tx.init(params), params, norms)[0]

    def differs(size: float) -> list[str]:
        grads, params = values(size), values(1.0)
        halves = [{name: half(value) for name, value in named.items()} for named in (grads, params)]
        whole, pieces = updates(grads, params), updates(*halves)
        pairs = {name: (half(whole[name]), value) for name, value in pieces.items()}
        return [name for name, pair in pairs.items() if not torch.allclose(*pair, rtol=1e-6, equal_nan=True)]

    try:
        differing = differs(1.0) or differs(1e60)  # large gradients: clipping by any bound changes them
    except Exception:  # of a user's function, which may be made for the very shapes of this model
        return
    if differing:
        raise ConfigError(
            f"the transformation says that it is elementwise, but its update of a piece of {differing[0]} differs from "
            "that of the whole: it sums over values",
            where=_WHERE,
            hint="set elementwise=False, so that it gets whole tensors",
        )


def _units(
    in_units: Mapping[str, list[Leaf]], sharding: Sharding, splits: Mapping[str, tensor_parallel.Split]
) -> dict[str, blocks.Unit]:
    def unit(name: str, leaves: list[Leaf]) -> blocks.Unit:
        named = tuple((leaf.name.removeprefix(f"{name}."), leaf.part(sharding.tensor)) for leaf in leaves)
        return blocks.Unit(name, named, sharding.width, lambda named: tensor_parallel.as_dtensors(named, splits))

    return {name: unit(name, leaves) for name, leaves in in_units.items()}


def _changed(static: Static, change: Callable[[Any], None]) -> Static:
    """The static description of the same program with changed copies of its modules."""
    return cast(Static, cast(Callable[..., Program], static.made.rewritten)(change).static)


class _Distributed:
    """A program on the processes of a mesh, and the collectives of its steps.

    Args:
        program: of one process.
        inner: the same with layers that communicate.
        mesh: of several processes.
        sharding: of the state.
        splits: parameters that are DTensors inside of a step.
        hidden: parameters that are gathered by their units.
        ways: of joining buffers.
        mixes: as in `passes.Pass`.
    """

    def __init__(
        self,
        program: Program,
        inner: Static,
        mesh: Mesh,
        sharding: Sharding,
        splits: Mapping[str, tensor_parallel.Split],
        hidden: frozenset[str],
        ways: Mapping[str, str],
        *,
        mixes: bool,
    ) -> None:
        self._program: Any = program
        self._inner: Any = inner
        self._mesh = mesh
        self._sharding = sharding
        self._splits = splits
        self._hidden = hidden
        self.cuts_first = False  # `init` makes the optimizer's state and the average of pieces
        self._mixes = mixes
        self._checks = _CHECKS
        self._leaves = {leaf.name: leaf for leaf in sharding.leaves}
        self._pieces = [leaf for leaf in sharding.leaves if leaf.is_trained and not leaf.is_whole]
        # Cut by rows, as one process of the axis "tensor" has them.
        self._cuts = [leaf.part(sharding.tensor) for leaf in self._pieces if leaf.is_cut]
        self._frozen = [leaf for leaf in sharding.leaves if leaf.is_cut and not leaf.is_trained]
        self.exchange = Exchange(
            reduce=self._reduced,
            once=not self._cuts,
            sums=self._sums,
            buffers=functools.partial(joined_buffers.joined, ways),
            watched=functools.partial(joined_buffers.watched, ways),
            total=lambda value: collectives.all_reduce(collectives.all_reduce(value, "shard"), "tensor"),
            norm=self._norm if self._pieces else None,
            update=self._update,
            stream=(mesh.batch_rank,),
            call=self._pass,
        )

    # --- functions of the program -------------------------------------------------------------------------------------

    def init(
        self,
        seed: int = 0,
        device: torch.device | str | None = None,
        weights: Callable[[str], Tensor] | None = None,
    ) -> TrainState:
        """This process's part of the state before the first step, which every process calls; see `Program`.

        If ``device`` is None, it is on the device of the mesh, since NCCL cannot send tensors of the CPU. One parameter
        after another is whole on it, and cut; all at once with a transformation that is not elementwise.
        """
        device = "cuda" if device is None and self._mesh.device_type == "cuda" else device
        checksums: dict[str, int] = {}

        def kept(name: str, value: Tensor) -> Tensor:
            if not value.is_meta:
                checksums[f"checksum of {name}"] = processes.checksum(value)
            return self._kept(name, value) if self.cuts_first else value

        state: TrainState = self._program.static.made.init_with(None, kept)(seed, device, weights)
        processes.check_same(
            checksums,
            where="program.init",
            hint="torch.manual_seed(0) before the model is built, or the same pretrained weights, in every process",
        )
        if self.cuts_first:
            return state._replace(placement=placement.of(self._sharding))
        return placement.part(self._sharding, state)

    def is_made_of_pieces(self, whole: TrainState) -> bool:
        """True if `init` with pieces returns the pieces of the whole state, by structure: masks by size do not."""
        try:
            cut = self._program.static.made.init_with(None, self._kept)(device="meta")
        except Exception:  # of a user's function, which may be made for the very shapes of this model
            return False
        wholly_cut = placement.part(self._sharding, whole)._replace(placement=whole.placement)
        found, wanted = tree.flatten(cut), tree.flatten(wholly_cut)
        return found[1] == wanted[1] and all(
            one.shape == other.shape and one.dtype == other.dtype
            for one, other in zip(found[0], wanted[0], strict=True)
        )

    def _kept(self, name: str, value: Tensor) -> Tensor:
        leaf = self._leaves.get(name)
        return value if leaf is None else self._shard(leaf, value)

    def eval_step(self, state: TrainState, batch: Batch, *context: Any, index: int = 0) -> Metrics:
        """The metrics of all processes; see `Program`. Gathered outputs are those of this process's rows, also of a row
        that stands in for an empty share: `evaluate` joins them at its end."""
        weights = placement.weights(views.to_evaluate(state))
        with passes.running(batch.counts if isinstance(batch, Share) else None):
            metrics: Metrics = self._program.eval_step(weights, batch, *context, index=index)
        own = {name: value for name, value in metrics.items() if isinstance(value, Gathered)}
        leaves, treedef = tree.flatten({name: value for name, value in metrics.items() if name not in own})
        sums = [new.to(old.dtype) for new, old in zip(self._sums(leaves), leaves, strict=True)]
        of_all: Metrics = tree.unflatten(treedef, sums)
        return {name: own[name] if name in own else of_all[name] for name in metrics}

    def bind(self, state: TrainState, view: str | None = None, train: bool = False) -> Callable[..., Any]:
        """A callable with the whole weights, gathered now: every process calls it; see `Program`."""
        chosen = placement.weights(views.view(state, "params" if train and view is None else view))
        return self._program.bind(chosen, train=train)

    def labels(self, params: Params) -> Labels:
        """The transform's labels, apart for parameters in pieces: those of one buffer are treated alike."""
        found: Labels = self._inner.labels(params)
        return {name: (label, self._cut_by(name)) for name, label in found.items()}

    def form(self, packed: Form) -> Form:
        """The form of a step whose stored tensors are pieces, which a compiled step packs."""
        splits = {name: split for name, split in self._splits.items() if name not in self._hidden}

        def gathered(named: Params, leaves: list[Leaf]) -> Params:
            cuts = [leaf for leaf in leaves if leaf.name in named and leaf.name not in self._hidden]
            wholes = placement.all_gathered([(leaf, named[leaf.name]) for leaf in cuts], self._sharding.width)
            return named | placement.by_name(cuts, wholes)

        def expand(stored: Params) -> Params:
            return tensor_parallel.as_dtensors(gathered(packed.expand(stored), self._cuts), splits)

        def collect(named: Params) -> Params:
            named = tensor_parallel.as_parts(named, self._splits)
            return named if self._cuts else packed.collect(named)  # pieces are collected once they are reduced

        def reduce(grads: Params) -> Params:
            return packed.collect(self._reduced(grads)) if self._cuts else self._reduced(grads)

        shown: Any = functools.partial(blocks.Shown, hidden=self._hidden) if self._hidden else packed.shown
        exchange = self.exchange._replace(reduce=reduce)
        return Form(
            expand, collect, packed.unreached, exchange, shown, frozen=lambda named: gathered(named, self._frozen)
        )

    # --- collectives of a step ----------------------------------------------------------------------------------------

    def _pass(self, counts: Tensor | None) -> AbstractContextManager[passes.Pass]:
        """A forward and backward pass; see `Exchange`."""
        is_checked = not tracing.in_graph() and self._checks > 0
        if is_checked:
            self._checks -= 1
        return passes.running(counts, mixes=self._mixes, is_checked=is_checked)

    def _reduced(self, grads: Params) -> Params:
        """Sums of gradients over all processes, in pieces."""
        cuts = [leaf for leaf in self._cuts if leaf.name not in self._hidden]
        hidden = [name for name in grads if name in self._hidden]  # their units have summed them over the axis "shard"
        others = [name for name in grads if name not in self._hidden and name not in {leaf.name for leaf in cuts}]
        pieces = placement.reduce_scattered([(leaf, grads[leaf.name]) for leaf in cuts], self._sharding.width)
        found = placement.by_name(cuts, pieces)
        for names, axis in ((others, "batch"), (hidden, "data")):
            found |= dict(zip(names, placement.all_reduced([grads[name] for name in names], axis), strict=True))
        return {name: found[name] for name in grads}

    def _sums(self, values: list[Tensor]) -> list[Tensor]:
        """Sums over the processes with other examples, computed in float64: one small collective."""
        flat = torch.cat([value.reshape(-1).double() for value in values])
        parts = collectives.all_reduce(flat, "batch").split([value.numel() for value in values])
        return [part.view(value.shape).to(value.dtype) for part, value in zip(parts, values, strict=True)]

    def _cut_by(self, name: str) -> tuple[bool, bool]:
        """True for a parameter that is cut by rows; True for one that is cut over the axis "tensor"."""
        leaf = self._leaves[name]
        return leaf.is_cut, leaf.tensor >= 0

    def _norm(self, updates: Params) -> Tensor:
        """`optim.global_norm` of pieces: squares of pieces are summed over the processes, others count once."""
        if not updates:
            return torch.zeros(())
        dtype = numerics.scalar_dtype(updates)
        norms = {name: base.leaf_norm(leaf, dtype) for name, leaf in updates.items()}
        zero = torch.zeros((), dtype=dtype, device=next(iter(norms.values())).device)

        def squares(*, rows: bool, tensor: bool) -> Tensor:
            chosen = [norm for name, norm in norms.items() if self._cut_by(name) == (rows, tensor)]
            return torch.stack(chosen).square().sum() if chosen else zero

        by_rows, by_both = squares(rows=True, tensor=False), squares(rows=True, tensor=True)
        if self._cuts:
            by_rows, by_both = collectives.all_reduce(torch.stack([by_rows, by_both]), "shard").unbind()
        by_tensor = squares(rows=False, tensor=True) + by_both
        if self._sharding.tensor > 1:
            by_tensor = collectives.all_reduce(by_tensor, "tensor")
        return (squares(rows=False, tensor=False) + by_rows + by_tensor).sqrt()

    def _update(self, tx: Any, grads: Params, state: Tree, params: Params, norm: Tensor) -> Any:
        """Run a transform. One that is not elementwise sees whole tensors, and its results are cut again."""
        if not self._pieces or tx.elementwise:
            norms = base.Norms(self._norm if self._pieces else base.global_norm, norm)
            return base.updated(tx, grads, state, params, norms)
        prefix = "opt_state/"
        cuts = {path.removeprefix(prefix): name for path, name in self._sharding.paths if path.startswith(prefix)}
        entries = [(path, self._leaves[cuts[path]], leaf) for path, leaf in tree.with_paths(state) if path in cuts]
        wholes = placement.unsharded(self._sharding, [(leaf, value) for _, leaf, value in entries])
        by_path = {path: whole for (path, _, _), whole in zip(entries, wholes, strict=True)}
        whole_state = placement.mapped(state, lambda path, value: by_path.get(path, value))
        found, whole_state = tx.update(self._unsharded(grads), whole_state, self._unsharded(params))
        if not isinstance(found, dict):
            return found, whole_state  # the step names what is wrong
        own = {leaf.name: self._shard(leaf, found[leaf.name]) for leaf in self._pieces}
        return found | own, placement.mapped(
            whole_state, lambda path, value: self._shard(self._leaves[cuts[path]], value) if path in cuts else value
        )

    def _unsharded(self, named: Params) -> Params:
        """Whole tensors of what this process holds: a collective."""
        pieces = [leaf for leaf in self._pieces if leaf.name in named]
        wholes = placement.unsharded(self._sharding, [(leaf, named[leaf.name]) for leaf in pieces])
        return named | placement.by_name(pieces, wholes)

    def _shard(self, leaf: Leaf, value: Tensor) -> Tensor:
        return placement.shard_of(self._sharding, leaf, value, self._mesh)
