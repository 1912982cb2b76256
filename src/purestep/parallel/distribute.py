"""`distribute`: the steps of a program on several processes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from .. import ema as ema_
from .. import tree
from ..errors import ConfigError, RankError
from ..optim import base, numerics
from ..pickling import recipe
from ..types import Batch, Exchange, Form, Labels, Metrics, Params, Program, Share, Static, TrainState, Tree
from . import collectives, placement
from .mesh import Mesh
from .placement import Layout

Rules = Sequence[tuple[str, str]]
_WHERE = "distribute"
_MODES = ("replicate", "shard")


@recipe
def distribute(
    program: Program,
    mesh: Mesh,
    *,
    params: str | Rules = "replicate",
) -> Program:
    """The same program on the processes of a mesh: every step equals one process's step on the whole batch.

    Every process calls the same functions in the same order, with its rows of each batch (`fit` cuts them, `share`
    does in a loop of one's own). The objective's weights weigh the processes' gradients, losses and metrics, so shares
    may differ in size. ``init`` returns this process's part of the state; `full` puts the whole together.

    Args:
        program: from `program`.
        mesh: from `parallel.start`. On a mesh of one process the program itself is returned.
        params: "replicate": every process holds the whole state, as DistributedDataParallel; "shard": the processes of
            the axis "shard" hold pieces of parameters, optimizer state, average and window, and gather the parameters
            for each call (ZeRO-2); on a mesh with ``data`` and ``shard``, the processes of "data" hold equal pieces
            (HSDP). Or rules ``[(regex, "shard" or "replicate"), ...]`` for the names of parameters: the first match
            (`re.search`) counts, and a name without a match is replicated.

    Returns:
        A `Program`. Its steps make collectives: all processes call them, or none.

    Raises:
        ConfigError: ``params`` has another value, or a rule matches no parameter.
        RankError: ``params`` shards, and the mesh has ``shard=1``; the program is distributed already; it is no
            program of `purestep.program`.

    Example:
        >>> import torch, purestep as ps
        >>> program = ps.program(torch.nn.Linear(2, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1))
        >>> with ps.parallel.start() as mesh:  # alone: a mesh of one
        ...     state = ps.distribute(program, mesh, params="replicate").init(seed=0)
        >>> int(state.step)
        0
    """
    static = program.static
    if static is None or program.init is None or program.bind is None or program.eval_step is None:
        raise RankError("this program has no static description", where=_WHERE, hint="pass a program of ps.program")
    if static.stream:
        raise RankError("the program is distributed already", where=_WHERE, hint="pass the program of ps.program")
    is_cut = _chosen(params, static.trained)
    if mesh.size == 1:
        return program
    if mesh.shard == 1 and any(map(is_cut, static.trained)):
        raise RankError(
            f"params={params!r} cuts parameters, and the mesh has shard=1",
            where=_WHERE,
            hint=f'parallel.start(shard={mesh.size}), or params="replicate"',
        )
    whole = program.init(device="meta")
    sums_once = not any(map(is_cut, static.trained))
    layout = placement.layout_of(whole, is_cut, mesh.shard, mesh.data, sums_once=sums_once)
    processes = _Processes(mesh, layout, static)
    steps = static.steps(processes.form(Form(lambda stored: stored, lambda named: named)))

    def init(seed: int = 0, device: torch.device | str | None = None) -> TrainState:
        """This process's part of the state before the first step; see `Program`."""
        state = cast(Callable[..., TrainState], program.init)(seed, device)
        return placement.part(layout, state)

    def eval_step(state: TrainState, batch: Batch, *context: Any, index: int = 0) -> Metrics:
        """The metrics of all processes; see `Program`."""
        metrics = cast(Callable[..., Metrics], program.eval_step)(
            placement.weights(state), batch, *context, index=index
        )
        leaves, treedef = tree.flatten(metrics)
        found = processes.sums(leaves)
        return tree.unflatten(treedef, [new.to(old.dtype) for new, old in zip(found, leaves, strict=True)])

    def bind(state: TrainState, view: str = "params", train: bool = False) -> Callable[..., Any]:
        """A callable with the whole weights, gathered now: every process calls it; see `Program`."""
        chosen = placement.weights(ema_.view(state, view))
        return cast(Callable[..., Any], program.bind)(chosen, train=train)

    fixed = static._replace(
        labels=None if static.labels is None else processes.labels,
        steps=lambda form: static.steps(processes.form(form)),
        stream=processes.stream,
    )
    for function in steps:  # read by compile_step
        vars(function)["static"] = fixed
    return Program(steps.train_step, steps.flush, eval_step, init, bind, fixed)


def share(batch: Batch, mesh: Mesh) -> Share:
    """This process's rows of a batch that all processes have.

    Process r of W takes the rows from ``n r // W`` to ``n (r + 1) // W``. A process without rows takes the first row,
    which counts nothing.

    Args:
        batch: tensors, arrays and lists with one entry for each row, in any nesting, as for ``microbatches``.
        mesh: from `parallel.start`.

    Raises:
        DataError: the batch has no rows, or numbers of rows differ.

    Example:
        >>> import torch, purestep as ps
        >>> part = ps.parallel.share((torch.arange(6), torch.arange(6)), ps.parallel.Mesh(data=2, rank=1))
        >>> part.rows[0].tolist(), part.counts.item()
        ([3, 4, 5], 1.0)
    """
    from ..step import microbatch

    count, at, width = microbatch.count_rows(batch), mesh.batch_rank, mesh.batch_size
    first, end = count * at // width, count * (at + 1) // width
    rows = microbatch.rows(batch, first, end) if end > first else microbatch.rows(batch, 0, 1)
    return Share(rows, torch.tensor(float(end > first)))


def _chosen(params: Any, names: Sequence[str]) -> Callable[[str], bool]:
    """``name -> whether the parameter is cut``."""
    if isinstance(params, str):
        if params not in _MODES:
            raise ConfigError(f"params is {params!r}", where=_WHERE, hint='pass "replicate", "shard", or rules')
        return lambda name: params == "shard"
    rules: list[tuple[str, str]] = []
    for rule in params if isinstance(params, list | tuple) else [params]:
        if not (isinstance(rule, tuple) and len(cast(Any, rule)) == 2) or cast(Any, rule)[1] not in _MODES:
            raise ConfigError(
                f"the rule {rule!r} is no pair of a regular expression and a placement",
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


def _largest(value: Tensor) -> Tensor:
    """The largest value of all processes, number by number."""
    if value.dtype == torch.bool:  # gloo has no such reduction
        return collectives.all_reduce(value.to(torch.uint8), "batch", "max").to(torch.bool)
    return collectives.all_reduce(value, "batch", "max")


class _Processes:
    """The collectives of one program's steps."""

    def __init__(self, mesh: Mesh, layout: Layout, static: Static) -> None:
        self.mesh = mesh
        self.layout = layout
        self.static = static
        self.leaves = {leaf.name: leaf for leaf in layout.leaves}
        self.cuts = [leaf for leaf in layout.leaves if leaf.is_cut]
        self.stream = (mesh.batch_rank,)

    def form(self, inner: Form) -> Form:
        """The form of a step whose stored tensors are pieces, in a form of their own (`packed`)."""

        def expand(stored: Params) -> Params:
            return self._whole(inner.expand(stored))

        def collect(named: Params) -> Params:  # reduced later, as a whole
            return inner.collect(named) if not self.cuts else named

        def reduce(grads: Params) -> Params:
            if not self.cuts:
                return dict(zip(grads, placement.summed(list(grads.values()), "batch"), strict=True))
            return inner.collect(self._reduced(grads))

        exchange = Exchange(
            reduce=reduce,
            once=not self.cuts,
            sums=self.sums,
            buffers=self.buffers,
            total=lambda value: collectives.all_reduce(value, "shard"),
            norm=self.norm if self.cuts else None,
            update=self.update,
            stream=self.stream,
        )
        return Form(expand, collect, inner.unreached, exchange)

    def labels(self, params: Params) -> Labels:
        """The transform's labels, apart for parameters that are cut: those of one buffer are treated alike."""
        found = cast(Callable[[Params], Labels], self.static.labels)(params)
        return {name: (label, self.leaves[name].is_cut) for name, label in found.items()}

    def _whole(self, named: Params) -> Params:
        if not self.cuts:
            return named
        cuts = [leaf for leaf in self.cuts if leaf.name in named]
        wholes = placement.gathered([(leaf, named[leaf.name]) for leaf in cuts], self.layout.width)
        return named | placement.by_name(cuts, wholes)

    def _reduced(self, grads: Params) -> Params:
        others = [leaf for leaf in self.layout.leaves if not leaf.is_cut]
        found = placement.by_name(
            self.cuts, placement.scattered([(leaf, grads[leaf.name]) for leaf in self.cuts], self.layout.width)
        )
        found |= placement.by_name(others, placement.summed([grads[leaf.name] for leaf in others], "batch"))
        return {name: found[name] for name in grads}

    def sums(self, values: list[Tensor]) -> list[Tensor]:
        """Sums over the processes with other examples, computed in float64: one small collective."""
        flat = torch.cat([value.reshape(-1).double() for value in values])
        parts = collectives.all_reduce(flat, "batch").split([value.numel() for value in values])
        return [part.view(value.shape).to(value.dtype) for part, value in zip(parts, values, strict=True)]

    def buffers(self, buffers: Params, counts: Tensor) -> Params:
        """Floating buffers averaged over the processes that counted something, the greatest of others."""
        floats = {name: value for name, value in buffers.items() if value.is_floating_point()}
        found = dict(buffers)
        if floats:
            flag = counts.double()
            kept = [torch.where(counts, value.double(), torch.zeros_like(value).double()) for value in floats.values()]
            flag, *totals = placement.summed([flag, *kept], "batch")
            means = [total / flag.clamp(min=1.0) for total in totals]
            found |= {name: mean.to(floats[name].dtype) for name, mean in zip(floats, means, strict=True)}
        others = {name: value for name, value in buffers.items() if name not in floats}
        found |= {name: _largest(value) for name, value in others.items()}
        return found

    def norm(self, updates: Params) -> Tensor:
        """`optim.global_norm` of pieces: squares of pieces are summed over the processes, others count once."""
        if not updates:
            return torch.zeros(())
        dtype = numerics.scalar_dtype(updates)
        norms = {name: base.leaf_norm(leaf, dtype) for name, leaf in updates.items()}
        zero = torch.zeros((), dtype=dtype, device=next(iter(norms.values())).device)
        cut = [norm for name, norm in norms.items() if self.leaves[name].is_cut]
        rest = [norm for name, norm in norms.items() if not self.leaves[name].is_cut]
        own, other = (torch.stack(part).square().sum() if part else zero for part in (cut, rest))
        return (collectives.all_reduce(own, "shard") + other).sqrt()

    def update(self, update: Callable[..., Any], grads: Params, state: Tree, params: Params) -> Any:
        """Run a transform. One that is not elementwise sees whole tensors, and its results are cut again."""
        if not self.cuts:
            return update(grads, state, params)
        if self.static.elementwise:
            with base.norm_of_pieces(self.norm):
                return update(grads, state, params)
        place = self.mesh.coordinate("shard")
        found, whole_state = update(self._whole(grads), self._whole_state(state), self._whole(params))
        if not isinstance(found, dict):
            return found, whole_state  # the step names what is wrong
        named = cast(Params, found)
        cut = {leaf.name: placement.cut(leaf, named[leaf.name], place, self.layout.width) for leaf in self.cuts}
        cuts = self._state_cuts()
        _, treedef = tree.flatten(whole_state)
        leaves = [
            placement.cut(self.leaves[cuts[path]], value, place, self.layout.width) if path in cuts else value
            for path, value in tree.with_paths(whole_state)
        ]
        return named | cut, tree.unflatten(treedef, leaves)

    def _whole_state(self, state: Tree) -> Tree:
        cuts = self._state_cuts()
        paths, leaves = zip(*tree.with_paths(state), strict=True) if tree.leaves(state) else ((), ())
        chosen = [index for index, path in enumerate(paths) if path in cuts]
        wholes = placement.gathered([(self.leaves[cuts[paths[i]]], leaves[i]) for i in chosen], self.layout.width)
        found = dict(zip(chosen, wholes, strict=True))
        return tree.unflatten(tree.flatten(state)[1], [found.get(i, leaf) for i, leaf in enumerate(leaves)])

    def _state_cuts(self) -> dict[str, str]:
        """Path inside the optimizer state -> name of the parameter."""
        prefix = "opt_state/"
        return {path.removeprefix(prefix): name for path, name in self.layout.paths if path.startswith(prefix)}
