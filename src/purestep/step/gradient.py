"""Gradients of one call: forward pass, loss, backward pass, and the sum over micro-batches of one batch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .. import tree
from ..errors import StepContractError
from ..metrics import mean as means
from ..metrics import merge
from ..model import functional, write_check
from ..torch_ext import draws, foreach, hidden, is_finite, tracing
from ..types import Batch, Empty, Exchange, Form, Loss, Mean, Params, Share, TrainState
from . import microbatch
from .loss_checks import check_connected, check_loss, counted, finite_mean, not_connected, rows_of
from .spec import Micro, Reach, Spec, times, wide

Forward = Callable[[functional.Bound], Any]
"""``bound model -> (mean x scale, (loss, buffers))``, to be differentiated."""


def _forward(
    spec: Spec,
    state: TrainState,
    values: dict[str, Tensor],
    rows: Batch,
    counts: Tensor | None,
    context: tuple[Any, ...],
    weigh: Callable[[Tensor], Tensor | None] | None,
    exchange: Exchange | None,
) -> Forward:
    """Build the function to be differentiated. If ``weigh`` is not None, it takes the weight of the loss, and returns
    the factor by which the loss is then multiplied, or None."""
    device = state.step.device
    scale = spec.scaler.scale(state.scaler)

    def forward(bound: functional.Bound) -> tuple[Tensor, tuple[Loss, Params]]:
        bound.values = values
        check = None if exchange is None else exchange.watched(bound.buffers)
        with spec.policy.autocast(device):
            loss = check_loss(spec.objective(bound, spec.policy.cast(rows), *context), device, train=True)
            loss = counted(loss, counts)
        check_connected(loss.mean)
        if check is not None:
            check(bound.buffers)
        scaled = loss.mean if scale is None else loss.mean * scale
        if weigh is not None:
            weight = loss.weight.detach()
            factor = weigh(weight)
            if factor is not None:
                scaled = torch.where(weight > 0, scaled * factor.to(scaled.dtype), torch.zeros_like(scaled))
        return scaled, (tree.detach(loss), bound.buffers)

    return forward


def _value_and_grad(
    spec: Spec,
    forward: Forward,
    state: TrainState,
    named: Params,
    form: Form,
    read: Any,
    batch: Batch,
) -> tuple[Params, Any, frozenset[str]]:
    """Return the gradients by name, the forward pass's (loss, buffers), and the parameters that the loss does not reach
    (their gradients are zeros). ``read``: what else of the step's arguments autograd is to follow."""

    frozen = form.frozen(state.frozen)

    def bind(params: Params) -> functional.Bound:
        bound = functional.bind(spec.template, params, frozen, state.buffers, train=True)
        bound.params, bound.frozen = form.shown(params), form.shown(frozen)
        return bound

    watches = not torch.compiler.is_dynamo_compiling() and spec.reach.watches > 0
    engine = spec.engine
    if engine == "auto":
        engine = "func" if torch.compiler.is_dynamo_compiling() or tracing.transformed() else "autograd"
    if engine == "func":
        root: Any = None  # of autograd's graph outside of the derivative by the parameters

        def differentiated(params: Params) -> tuple[Tensor, Any]:
            nonlocal root
            mean, extra = forward(bind(params))
            root = tracing.unwrapped(mean).grad_fn if watches else None
            if not torch.compiler.is_dynamo_compiling():  # Dynamo does not see autograd's graph
                spec.reach.remember(_unreached(mean, params))
            return mean, extra

        # In this frame, in a `try`: where Dynamo meets what it cannot compile, it runs the frame in eager mode, by
        # autograd.
        with nullcontext() if tracing.transformed() else draws.EagerDropout():
            try:
                with torch.enable_grad() if watches else nullcontext():  # a capture has it off
                    grads, (_, extra) = torch.func.grad_and_value(differentiated, has_aux=True)(named)
            except RuntimeError as error:
                if "must override the setup_context" not in str(error):
                    raise
                raise _without_setup() from error
        if watches:
            given = [
                leaf for leaf in tree.leaves((named, state.frozen, state.buffers, read, batch)) if _is_followed(leaf)
            ]
            if not given and any(tracing.unwrapped(grad).requires_grad for grad in grads.values()):
                # Every state would hold the graphs of all steps before it.
                raise StepContractError(
                    f"the loss depends on {_listed(_variables(root))}", where="objective", hint=_OTHERS_CURE
                )
            _warn_of_others(spec.reach, root, given, batch)
        return grads, extra, spec.reach.unreached
    if tracing.transformed():
        raise StepContractError(
            'engine="autograd" inside of torch.func.vmap, grad or another transform',
            where="program",
            hint='pass ps.program(..., engine="auto"), or "func"',
        )
    # If autograd tracks the state, a derivative through the step includes that of its gradients.
    others = [leaf for leaf in tree.leaves(read) if isinstance(leaf, Tensor)]
    through = tracing.followed([*named.values(), *state.frozen.values(), *state.buffers.values(), *others])
    watched = (others, batch) if watches and not through else None
    return _by_autograd(spec, forward, bind, named, through=through, watched=watched)


# --- torch.func -----------------------------------------------------------------------------------------------------


def _unreached(mean: Tensor, params: Params) -> frozenset[str]:
    """The parameters that are not in autograd's graph of the loss."""
    edge = torch.autograd.graph.get_gradient_edge
    wanted: dict[Any, str] = {edge(leaf).node: name for name, leaf in params.items()}
    for node in _nodes(mean.grad_fn):
        wanted.pop(node, None)
        if not wanted:
            break
    return frozenset(wanted.values())


def _without_setup() -> StepContractError:
    return StepContractError(
        "an autograd.Function of the model has no setup_context, which torch.func needs to differentiate it",
        where="program",
        hint='pass ps.program(..., engine="autograd"), or "auto"; or split its forward(ctx, ...) into forward(...) and '
        "setup_context(ctx, inputs, output)",
    )


# --- torch.autograd -------------------------------------------------------------------------------------------------


def _by_autograd(
    spec: Spec,
    forward: Forward,
    bind: Callable[[Params], functional.Bound],
    named: Params,
    *,
    through: bool,
    watched: tuple[Any, Batch] | None,
) -> tuple[Params, Any, frozenset[str]]:
    """As `_value_and_grad`, by a backward pass of `torch.autograd`.

    Args:
        spec: of the program.
        forward: see `Forward`.
        bind: named weights -> the bound model.
        named: the weights.
        through: keep the graph, for a derivative through the step.
        watched: the other arguments of the step, and its batch, to warn of other tensors; None: do not.
    """
    with torch.enable_grad():
        # Views: the gradient of this call must not pass through buffers that an earlier call computed from them.
        leaves = {
            name: value.view_as(value) if through and value.requires_grad else value.detach().requires_grad_()
            for name, value in named.items()
        }
        tensors, bound = list(leaves.values()), bind(leaves)

        def backward(found: tuple[Tensor, Any]) -> tuple[Any, Any, Any]:
            mean, extra = found
            if through or tracing.in_graph():
                grads = torch.autograd.grad(mean, tensors, create_graph=through, allow_unused=True)
                return [*map(_with_accumulated, grads, tensors)], extra, mean.grad_fn
            mean.backward(inputs=tensors)  # adds to what a reversible layer has put there
            # Nobody else has these: the update may write into them.
            return [leaf.grad for leaf in tensors], extra, mean.grad_fn

        grads, (loss, buffers), root = bound.hold(lambda: forward(bound), backward)
    unreached = frozenset(name for name, grad in zip(leaves, grads, strict=True) if grad is None)
    is_new = not unreached <= spec.reach.ever and not torch.compiler.is_dynamo_compiling()
    if is_new and any(node.name() == "CheckpointFunctionBackward" for node in _nodes(root)):
        raise _reentrant()
    if len(unreached) == len(leaves):
        raise not_connected()
    if watched is not None:
        _warn_of_others(spec.reach, root, (watched[0], tensors), watched[1])
    spec.reach.remember(unreached)
    filled = [torch.zeros_like(leaf) if grad is None else grad for grad, leaf in zip(grads, tensors, strict=True)]
    return dict(zip(leaves, filled, strict=True)), (loss, buffers if through else tree.detach(buffers)), unreached


def _with_accumulated(grad: Tensor | None, leaf: Tensor) -> Tensor | None:
    """The gradient plus ``.grad``, to which a backward call inside the model (of a reversible layer) has added."""
    if not leaf.is_leaf or leaf.grad is None:
        return grad
    return leaf.grad if grad is None else grad + leaf.grad


def _nodes(root: Any) -> Iterator[Any]:
    """The nodes of autograd's graph below this one, each once."""
    waiting, seen = [root], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting.extend(below for below, _ in node.next_functions)


def _reentrant() -> StepContractError:
    # Autograd skips such a block if none of the wanted parameters lies before it; torch raises an error if one does.
    return StepContractError(
        "activation checkpointing with use_reentrant=True gives the parameters inside no gradient",
        where="objective",
        hint="torch.utils.checkpoint.checkpoint(..., use_reentrant=False); for a Hugging Face model "
        'gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})',
    )


# --- parameters that are not the program's ----------------------------------------------------------------------------

_OTHERS_CURE = (
    "make them parameters of the model, or of the criterion of ps.supervised; call requires_grad_(False) on those that "
    "are not to be trained"
)


def _warn_of_others(reach: Reach, root: Any, given: Any, batch: Batch) -> None:
    """Warn once of tensors in the graph of a loss that require a gradient and that no step trains.

    Args:
        reach: of the program; holds those of the call before.
        root: of autograd's graph.
        given: tensors that may require a gradient: the weights, and other arguments of the step.
        batch: or the rows of a micro-batch, which are views of it.
    """
    reach.watches -= 1
    known, own = reach.others, {id(leaf) for leaf in tree.leaves((given, batch))}
    memory = {hidden.storage_address(leaf) for leaf in tree.leaves(batch) if _is_followed(leaf)}
    found = [leaf for leaf in _variables(root) if id(leaf) not in own]
    reach.others = [leaf for leaf in found if not memory or hidden.storage_address(leaf) not in memory]
    # The objective may create a tensor that requires a gradient (a gradient penalty): another one in every call.
    found = [
        leaf
        for leaf in reach.others
        if isinstance(leaf, nn.Parameter)
        or any(leaf is other for other in known)
        or (tracing.in_graph() and type(leaf) is Tensor)
    ]
    if found or not reach.watches:
        reach.others, reach.watches = [], 0
    if found:
        warnings.warn(f"the loss depends on {_listed(found)} (cure: {_OTHERS_CURE})", UserWarning, stacklevel=2)


def _is_followed(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and tracing.unwrapped(leaf).requires_grad


def _variables(root: Any) -> list[Tensor]:
    return [leaf for node in _nodes(root) if (leaf := getattr(node, "variable", None)) is not None]


def _listed(found: list[Tensor]) -> str:
    shapes = ", ".join(str(list(each.shape)) for each in found[:4]) + (", ..." if len(found) > 4 else "")
    tensors = (
        "a tensor in the objective's closure that requires"
        if len(found) == 1
        else f"{len(found)} tensors in the objective's closure that require"
    )
    return f"{tensors} a gradient, which no step trains: {shapes}"


# --- one call -------------------------------------------------------------------------------------------------------


def _micro(spec: Spec, form: Form, state: TrainState, batch: Batch, context: tuple[Any, ...]) -> Micro:
    """Run one forward and backward pass."""
    rows, counts = rows_of(batch)
    exchange = form.exchange
    divisor: Tensor | None = None  # of the weights, by which losses are multiplied

    def weigh(weight: Tensor) -> Tensor | None:
        nonlocal divisor
        if call.mixes or call.is_checked:
            call.end_forward(weight)
        if not call.mixes:
            return None
        if exchange is None or isinstance(state.scaler, Empty):
            return weight
        # Gradients in float16 would overflow: a weight counts rows, or tokens.
        (total,) = exchange.sums([weight])
        divisor = torch.where(total > 0, total, torch.ones_like(total))
        return weight / divisor

    call: Any
    with nullcontext() if exchange is None else exchange.call(counts) as call:
        values = spec.values_at(state)
        forward = _forward(spec, state, values, rows, counts, context, None if exchange is None else weigh, exchange)
        grads, (loss, buffers), unreached = _value_and_grad(
            spec, forward, state, form.expand(state.params), form, (context, *values.values()), rows
        )
    is_weighted = exchange is not None and call.mixes
    if is_weighted:
        for name in grads:  # one by one, in place: the memory of one more gradient, not of all
            grads[name] = _own(grads[name], loss.weight)
    write_check.check_sizes(state.buffers, buffers)
    metrics = {name: means.with_sums(mean, *finite_mean(*mean)) for name, mean in loss.metrics.items()}
    metrics["loss"] = finite_mean(loss.mean * loss.weight, loss.weight)
    for name, value in values.items():
        if name in metrics:
            raise StepContractError(
                "a scheduled value of the program has the same name",
                where=f"metrics/{name}",
                hint="choose another name",
            )
        metrics[name] = Mean(value, torch.ones_like(value))
    grad_weight = loss.weight
    if is_weighted:
        grad_weight = torch.ones_like(loss.weight) if divisor is None else divisor
    grads = form.collect(grads)
    return Micro(
        grads, loss.mean, loss.weight, buffers, metrics, unreached, grad_weight, loss.outputs, is_weighted=is_weighted
    )


def _own(grad: Tensor, weight: Tensor) -> Tensor:
    """A gradient to which other processes have added theirs. A loss of weight 0 is 0/0, and adds nothing."""
    return torch.where((weight > 0) | is_finite(grad), grad, torch.zeros_like(grad))


def gradients(spec: Spec, form: Form, state: TrainState, batch: Batch, context: tuple[Any, ...]) -> Micro:
    """Compute the weighted mean gradient of a batch over its ``microbatches`` parts."""
    batch = tree.dicts(batch)
    if spec.microbatches == 1:
        return _micro(spec, form, state, batch, context)
    total: Micro | None = None
    handed_out: list[tuple[Batch, Any]] = []
    dtypes: dict[str, torch.dtype] = {}
    for part in _parts(batch, spec.microbatches):
        micro = _micro(spec, form, state, part, context)
        # A part of weight 0 may be padding only: its buffers are dropped.
        micro = micro._replace(buffers=kept_buffers(state.buffers, micro, micro.weight != 0))
        state = state._replace(buffers=micro.buffers)
        handed_out.append((rows_of(part)[0], micro.outputs))
        dtypes = {name: grad.dtype for name, grad in micro.grads.items()}
        weighted = tree.map(lambda g, w=micro.grad_weight: times(g.to(wide(g.dtype)), w), micro.grads)
        summed = micro._replace(grads=weighted, mean=times(micro.mean, micro.weight))
        total = summed if total is None else _add(total, summed)
    assert total is not None
    total = total._replace(outputs=_joined_outputs(handed_out))
    if total.is_weighted:  # sums stay sums
        one = torch.ones_like(total.weight)
        mean = total.mean / torch.where(total.weight > 0, total.weight, one)
        return total._replace(mean=mean, grad_weight=one)
    divisor = total.weight.clamp(min=torch.finfo(torch.float32).tiny)
    grads = {name: torch.where(total.weight > 0, g / divisor, g).to(dtypes[name]) for name, g in total.grads.items()}
    return total._replace(grads=grads, mean=total.mean / divisor, grad_weight=total.weight)


def _joined_outputs(parts: list[tuple[Batch, Any]]) -> Any:
    """The outputs of micro-batches, ``(rows, outputs)`` each, as those of their whole batch."""
    if not any(outputs for _, outputs in parts):
        return {}
    for rows, outputs in parts:
        count = microbatch.count_rows(rows)
        for path, leaf in tree.with_paths(outputs):
            if not leaf.dim() or leaf.shape[0] != count:
                raise StepContractError(
                    f"the output has shape {list(leaf.shape)}, without the {count} rows of its micro-batch as first "
                    f"dimension: those of {len(parts)} parts cannot be joined",
                    where=f"outputs/{path}",
                    hint="transpose it, rows first; for a number use a metric; or set microbatches=1",
                )
    if len({tuple(tree.paths(outputs)) for _, outputs in parts}) > 1:
        raise StepContractError(
            "the outputs differ between the micro-batches of a call",
            where="outputs",
            hint="return the same names in every call, or set microbatches=1",
        )
    return tree.map(lambda *leaves: torch.cat(leaves), *(outputs for _, outputs in parts))


def _parts(batch: Batch, count: int) -> Iterator[Batch]:
    """Micro-batches. A share with fewer rows than ``count`` has fewer parts; empty shares follow them."""
    if not isinstance(batch, Share):
        yield from microbatch.split(batch, count)
        return
    filled = min(count, microbatch.count_rows(batch.rows))
    parts = list(microbatch.split(batch.rows, filled))
    yield from (Share(part, batch.counts) for part in parts)
    yield from (Share(parts[0], torch.zeros_like(batch.counts)) for _ in range(count - filled))


def kept_buffers(old: Params, micro: Micro, counted: Tensor) -> Params:
    """The buffers after a forward pass if ``counted``, else the old ones."""
    # Always copy: a forward pass may have assigned the batch, or a view of a weight, to a buffer.
    new, before = list(micro.buffers.values()), [old[name] for name in micro.buffers]
    if counted.device.type != "cpu" and tracing.may_overwrite([counted, *new, *before]) and _plain_pairs(new, before):
        return dict(zip(micro.buffers, foreach.where(counted, new, before), strict=True))
    return {name: torch.where(counted, new, old[name]) for name, new in micro.buffers.items()}


def _plain_pairs(new: list[Tensor], old: list[Tensor]) -> bool:
    """True if one call may select all of these."""
    return bool(new) and all(
        type(a) is type(b) is Tensor and a.dtype == b.dtype and a.shape == b.shape and a.layout is torch.strided
        for a, b in zip(new, old, strict=True)
    )


def _add(left: Micro, right: Micro) -> Micro:
    metrics = merge(left.metrics, right.metrics)
    grads = {name: grad + right.grads[name] for name, grad in left.grads.items()}
    unreached = left.unreached & right.unreached
    weight = left.weight + right.weight
    mean = left.mean + right.mean
    return Micro(grads, mean, weight, right.buffers, metrics, unreached, weight, is_weighted=right.is_weighted)
