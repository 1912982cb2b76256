"""Gradients of one call: forward pass, loss, backward pass, and the sum over micro-batches of one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any, cast

import torch
from torch import Tensor

from .. import precision as precision_
from .. import tree
from ..errors import StepContractError
from ..metrics import Gathered, merge
from ..metrics import mean as means
from ..model import functional, write_check
from ..torch_ext import Flag, draws, foreach, is_finite, read, tracing
from ..torch_ext import decisions as flags
from ..types import Batch, Empty, Form, Loss, Mean, Metrics, Params, Share, TrainState
from . import microbatch
from .spec import Micro, Spec, last_unreached, wide

OWN_METRICS = frozenset(("loss", "lr", "grad_norm", "applied", "scale"))
"""Names of the step's own metrics."""
Forward = Callable[[functional.Bound], Any]
"""``bound model -> (mean x scale, (loss, buffers))``, to be differentiated."""


def _forward(
    spec: Spec,
    state: TrainState,
    values: dict[str, Tensor],
    rows: Batch,
    counts: Tensor | None,
    context: tuple[Any, ...],
    weigh: Callable[[Tensor], Tensor] | None,
) -> Forward:
    """Build the function to be differentiated. If ``weigh`` is not None, it takes the weight of the loss, and returns
    the factor by which the loss is then multiplied."""
    device = state.step.device
    scale = spec.scaler.scale(state.scaler)

    def forward(bound: functional.Bound) -> tuple[Tensor, tuple[Loss, Params]]:
        bound.values = values
        with precision_.autocast(spec.policy, device):
            loss = check_loss(spec.objective(bound, precision_.cast(spec.policy, rows), *context), device, train=True)
            loss = counted(loss, counts)
        _check_connected(loss.mean)
        scaled = loss.mean if scale is None else loss.mean * scale
        if weigh is not None:
            weight = loss.weight.detach()
            scaled = torch.where(weight > 0, scaled * weigh(weight).to(scaled.dtype), torch.zeros_like(scaled))
        return scaled, (tree.detach(loss), bound.buffers)

    return forward


def rows_of(batch: Batch) -> tuple[Batch, Tensor | None]:
    """The rows of a batch, and the flag of a `Share`; None for another batch."""
    return (batch.rows, batch.counts) if isinstance(batch, Share) else (batch, None)


def counted(loss: Loss, counts: Tensor | None) -> Loss:
    """The loss; with weight 0 if its rows only stand in for an empty share. Gathered outputs are kept."""
    if counts is None:
        return loss
    held = counts.to(loss.weight.device) > 0

    def kept(value: Tensor) -> Tensor:
        return torch.where(held, value, torch.zeros_like(value))

    metrics = {
        name: mean if isinstance(mean, Gathered) else means.with_sums(mean, *map(kept, mean))
        for name, mean in loss.metrics.items()
    }
    return Loss(loss.mean, kept(loss.weight), metrics)


def check_loss(loss: Any, device: torch.device, *, train: bool) -> Loss:
    """Convert an objective's result: the mean to at least float32, the weight to a 0-d float32 tensor on the device.
    With ``train``, drop gathered outputs: they are for the end of an evaluation.

    Raises:
        StepContractError: it is not a Loss, or its mean is not a floating scalar on the device.
    """
    cure = "return ps.Loss(mean, weight, metrics), or use ps.supervised"
    if not isinstance(loss, Loss):
        raise StepContractError(f"returned a {type(loss).__name__}, not a Loss", where="objective", hint=cure)
    mean: Any = loss.mean
    if not isinstance(mean, Tensor):
        raise StepContractError(f"the loss is a {type(mean).__name__}, not a tensor", where="objective", hint=cure)
    if mean.dim() != 0 or not mean.is_floating_point():
        raise StepContractError(
            f"the loss has shape {list(mean.shape)} and dtype {mean.dtype}; a floating scalar is needed",
            where="objective",
            hint='set reduction="mean", or call loss.mean() (loss.real for a complex loss)',
        )
    if mean.device != device:
        raise StepContractError(
            f"the loss is on {mean.device}, the state on {device}",
            where="objective",
            hint="call batch = ps.to_device(batch, state)",
        )
    return Loss(mean.to(wide(mean.dtype)), _weight(loss.weight, device), _checked_metrics(loss.metrics, device, train))


def _weight(given: Any, device: torch.device) -> Tensor:
    weight = torch.full((), given, device=device) if isinstance(given, int | float) else given
    if not isinstance(weight, Tensor) or weight.dim() != 0 or weight.is_complex():
        found = f"of shape {list(weight.shape)}" if isinstance(weight, Tensor) else f"a {type(weight).__name__}"
        raise StepContractError(
            f"the weight of the loss is {found}; a scalar is needed",
            where="objective",
            hint="pass the count that `mean` was divided by, as a number or a 0-d tensor",
        )
    known = given if isinstance(given, int | float) else read(weight)
    if not isinstance(known, Tensor) and known < 0:
        raise StepContractError(
            f"the weight of the loss is {known}",
            where="objective",
            hint="pass the count that `mean` was divided by; to change a sign, multiply `mean`",
        )
    return _to_device(weight.to(torch.float32), device)


def _to_device(value: Tensor, device: torch.device) -> Tensor:
    """Move a value to the device. A scalar on the host becomes the argument of a kernel: a copy would wait for the
    device, and a CUDA graph cannot record it.
    """
    if value.device == device:
        return value
    return value.to(device) if value.dim() else torch.ones((), dtype=torch.float32, device=device) * value


def _checked_metrics(given: Any, device: torch.device, train: bool) -> Metrics:
    found: dict[str, Any] = dict(cast(Any, given)) if isinstance(given, Mapping) else {"": given}
    if train and any(isinstance(mean, Gathered) for mean in found.values()):
        found = {name: mean for name, mean in found.items() if not isinstance(mean, Gathered)}
    for name, mean in found.items():
        if not isinstance(mean, Mean | Gathered):
            raise StepContractError(
                f"is a {type(mean).__name__}, not a Mean",
                where="metrics" + (f"/{name}" if name else ""),
                hint="pass ps.Loss(mean, weight, {name: ps.metrics.as_mean(value, len(x))}), or ps.Mean(total, weight)",
            )
        if name in OWN_METRICS:
            raise StepContractError(
                "the step itself has a metric of this name", where=f"metrics/{name}", hint="choose another name"
            )
        if str(name).endswith("]") and str(name).rpartition("[")[2][:-1].isdecimal():
            raise StepContractError(
                "entries of vector metrics have such names", where=f"metrics/{name}", hint="choose another name"
            )
    # A subclass of Mean keeps its type (a torchmetrics.Metric computes itself).
    checked: dict[str, Any] = {
        n: mean
        if isinstance(mean, Gathered)
        else means.with_sums(mean, *(_checked_part(n, part, device) for part in mean))
        for n, mean in found.items()
    }
    for name, mean in checked.items():
        if isinstance(mean, Gathered):
            continue
        total, weight = mean
        if total.shape != weight.shape or total.dim() > 1:
            raise StepContractError(
                f"is a Mean of a total of shape {list(total.shape)} and a weight of shape {list(weight.shape)}",
                where=f"metrics/{name}",
                hint="pass total.sum() for one number per row, or two vectors for one mean per class",
            )
    return checked


def _checked_part(name: str, given: Any, device: torch.device) -> Tensor:
    if isinstance(given, int | float):
        return torch.full((), given, dtype=torch.float32, device=device)
    if not isinstance(given, Tensor):
        hint = "pass ps.Mean(total, weight) of two tensors or numbers"
        raise StepContractError(f"is a Mean of a {type(given).__name__}", where=f"metrics/{name}", hint=hint)
    return _to_device(given, device)


def _check_connected(mean: Tensor) -> None:
    # torch.func.grad of a detached loss silently returns zeros. Dynamo cannot check, so fit checks before compiling.
    if not torch.compiler.is_dynamo_compiling() and not mean.requires_grad:
        raise _not_connected()


def _not_connected() -> StepContractError:
    return StepContractError(
        "the loss does not depend on the parameters: every gradient would be zero",
        where="objective",
        hint="remove .detach(), .item() or torch.no_grad() between model(...) and the loss",
    )


def _value_and_grad(
    spec: Spec, forward: Forward, state: TrainState, named: Params, hidden: frozenset[str], read: tuple[Any, ...]
) -> tuple[Params, Any, frozenset[str]]:
    """Return the gradients by name, the forward pass's (loss, buffers), and the parameters that the loss does not reach
    (their gradients are zeros). ``read``: what else of the step's arguments autograd is to follow."""

    def bind(params: Params) -> functional.Bound:
        bound = functional.bind(spec.template, params, state.frozen, state.buffers, train=True)
        if hidden:
            bound.params = functional.Shown(params, hidden)
        return bound

    engine = spec.engine
    if engine == "auto":
        engine = "func" if torch.compiler.is_dynamo_compiling() or tracing.transformed() else "autograd"
    if engine == "func":

        def differentiated(params: Params) -> tuple[Tensor, Any]:
            mean, extra = forward(bind(params))
            if not torch.compiler.is_dynamo_compiling():  # Dynamo does not see autograd's graph
                spec.reach.remember(_unreached(mean, params))
            return mean, extra

        with nullcontext() if tracing.transformed() else draws.EagerDropout():
            try:
                grads, (_, extra) = torch.func.grad_and_value(differentiated, has_aux=True)(named)
            except RuntimeError as error:
                if "must override the setup_context" not in str(error):
                    raise
                raise _without_setup() from error
        return grads, extra, frozenset(last_unreached(spec.reach.name))
    if tracing.transformed():
        raise StepContractError(
            'engine="autograd" inside of torch.func.vmap, grad or another transform',
            where="program",
            hint='pass ps.program(..., engine="auto"), or "func"',
        )
    # If autograd tracks the state, a derivative through the step includes that of its gradients.
    others = [leaf for leaf in tree.leaves(read) if isinstance(leaf, Tensor)]
    through = tracing.followed([*named.values(), *state.frozen.values(), *state.buffers.values(), *others])
    with torch.enable_grad():
        # Views: the gradient of this call must not pass through buffers that an earlier call computed from them.
        leaves = {
            name: value.view_as(value) if through and value.requires_grad else value.detach().requires_grad_()
            for name, value in named.items()
        }
        bound = bind(leaves)

        def backward(found: tuple[Tensor, Any]) -> tuple[Any, Any, Any]:
            tensors = list(leaves.values())
            if through or tracing.in_graph():
                found_ = torch.autograd.grad(found[0], tensors, create_graph=through, allow_unused=True)
                grads = [_with_accumulated(grad, leaf) for grad, leaf in zip(found_, tensors, strict=True)]
                return grads, found[1], found[0].grad_fn
            found[0].backward(inputs=tensors)  # adds to what a reversible layer has put there
            # Nobody else has these: the update may write into them.
            return [leaf.grad for leaf in tensors], found[1], found[0].grad_fn

        found, (loss, buffers), root = bound.hold(lambda: forward(bound), backward)
    pairs = list(zip(leaves.items(), found, strict=True))
    grads = {name: torch.zeros_like(leaf) if grad is None else grad for (name, leaf), grad in pairs}
    unreached = frozenset(name for (name, _), grad in pairs if grad is None)
    is_new = not unreached <= spec.reach.ever and not torch.compiler.is_dynamo_compiling()
    if is_new and any(node.name() == "CheckpointFunctionBackward" for node in _nodes(root)):
        raise _reentrant()
    if len(unreached) == len(leaves):
        raise _not_connected()
    spec.reach.remember(unreached)
    return grads, (loss, buffers if through else tree.detach(buffers)), unreached


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


class NoSetupContext(StepContractError):
    """An autograd.Function that torch.func cannot differentiate, but Dynamo can."""


def _without_setup() -> NoSetupContext:
    return NoSetupContext(
        "an autograd.Function of the model has no setup_context, which torch.func needs to differentiate it",
        where="program",
        hint='pass ps.program(..., engine="autograd"), or "auto"; or split its forward(ctx, ...) into forward(...) and '
        "setup_context(ctx, inputs, output)",
    )


def _with_accumulated(grad: Tensor | None, leaf: Tensor) -> Tensor | None:
    """The gradient plus ``.grad``, to which a backward call inside the model (of a reversible layer) has added."""
    if not leaf.is_leaf or leaf.grad is None:
        return grad
    return leaf.grad if grad is None else grad + leaf.grad


def _unreached(mean: Tensor, params: Params) -> frozenset[str]:
    """The parameters that are not in autograd's graph of the loss."""
    edge = torch.autograd.graph.get_gradient_edge
    wanted: dict[Any, str] = {edge(leaf).node: name for name, leaf in params.items()}
    for node in _nodes(mean.grad_fn):
        wanted.pop(node, None)
        if not wanted:
            break
    return frozenset(wanted.values())


def _micro(spec: Spec, form: Form, state: TrainState, batch: Batch, context: tuple[Any, ...]) -> Micro:
    """Run one forward and backward pass."""
    rows, counts = rows_of(batch)
    exchange = form.exchange
    is_seeded = exchange is not None and exchange.seeded
    divisor: Tensor | None = None  # of the weights, by which losses are multiplied

    def weigh(weight: Tensor) -> Tensor:
        nonlocal divisor
        cast(Any, call).weight = weight
        if exchange is None or isinstance(state.scaler, Empty):
            return weight
        # Gradients in float16 would overflow: a weight counts rows, or tokens.
        (total,) = exchange.sums([weight])
        divisor = torch.where(total > 0, total, torch.ones_like(total))
        return weight / divisor

    with nullcontext() if exchange is None else exchange.call(counts) as call:
        values = spec.values_at(state)
        forward = _forward(spec, state, values, rows, counts, context, weigh if is_seeded else None)
        grads, (loss, buffers), unreached = _value_and_grad(
            spec, forward, state, form.expand(state.params), form.hidden, (context, *values.values())
        )
    if is_seeded:
        for name in grads:  # one by one, in place: the memory of one more gradient, not of all
            grads[name] = _own(grads[name], loss.weight)
    write_check.check_sizes(state.buffers, buffers)
    metrics = {name: means.with_sums(mean, *finite_mean(*mean)) for name, mean in loss.metrics.items()}
    metrics["loss"] = finite_mean(loss.mean.float() * loss.weight, loss.weight)
    for name, value in values.items():
        if name in metrics:
            raise StepContractError(
                "a scheduled value of the program has the same name",
                where=f"metrics/{name}",
                hint="choose another name",
            )
        metrics[name] = Mean(value, torch.ones_like(value))
    grad_weight = loss.weight
    if is_seeded:
        grad_weight = torch.ones_like(loss.weight) if divisor is None else divisor
    return Micro(form.collect(grads), loss.mean, loss.weight, buffers, metrics, unreached, grad_weight)


def _own(grad: Tensor, weight: Tensor) -> Tensor:
    """A gradient to which other processes have added theirs. A loss of weight 0 is 0/0, and adds nothing."""
    return torch.where((weight > 0) | is_finite(grad), grad, torch.zeros_like(grad))


def finite_mean(total: Tensor, weight: Tensor) -> Mean:
    """Return a Mean without entries that are not finite or have no weight: one nan must not spoil an epoch's mean."""
    total = total.float()
    counted, zero = is_finite(read(total)) & (read(weight) > 0), torch.zeros_like(total)
    return Mean(flags.where(counted, total, zero), flags.where(counted, weight.float(), zero))


def gradients(spec: Spec, form: Form, state: TrainState, batch: Batch, context: tuple[Any, ...]) -> Micro:
    """Compute the weighted mean gradient of a batch over its ``microbatches`` parts."""
    batch = tree.dicts(batch)
    if spec.microbatches == 1:
        return _micro(spec, form, state, batch, context)
    total: Micro | None = None
    dtypes: dict[str, torch.dtype] = {}
    for part in _parts(batch, spec.microbatches):
        micro = _micro(spec, form, state, part, context)
        # A part of weight 0 may be padding only: its buffers are dropped.
        micro = micro._replace(buffers=kept_buffers(state.buffers, micro, read(micro.weight) != 0))
        state = state._replace(buffers=micro.buffers)
        dtypes = {name: grad.dtype for name, grad in micro.grads.items()}
        weighted = tree.map(lambda g, w=micro.grad_weight: times(g.to(wide(g.dtype)), w), micro.grads)
        summed = micro._replace(grads=weighted, mean=times(micro.mean, micro.weight))
        total = summed if total is None else _add(total, summed)
    assert total is not None
    if form.exchange is not None and form.exchange.seeded:  # sums stay sums
        one = torch.ones_like(total.weight)
        mean = total.mean / torch.where(total.weight > 0, total.weight, one)
        return total._replace(mean=mean, grad_weight=one)
    divisor = total.weight.clamp(min=torch.finfo(torch.float32).tiny)
    grads = {name: torch.where(total.weight > 0, g / divisor, g).to(dtypes[name]) for name, g in total.grads.items()}
    return total._replace(grads=grads, mean=total.mean / divisor, grad_weight=total.weight)


def _parts(batch: Batch, count: int) -> Iterator[Batch]:
    """Micro-batches. A share with fewer rows than ``count`` has fewer parts; empty shares follow them."""
    if not isinstance(batch, Share):
        yield from microbatch.split(batch, count)
        return
    filled = min(count, microbatch.count_rows(batch.rows))
    parts = list(microbatch.split(batch.rows, filled))
    yield from (Share(part, batch.counts) for part in parts)
    yield from (Share(parts[0], torch.zeros_like(batch.counts)) for _ in range(count - filled))


def kept_buffers(old: Params, micro: Micro, counted: Flag) -> Params:
    """The buffers after a forward pass if ``counted``, else the old ones."""
    # Always copy: a forward pass may have assigned the batch, or a view of a weight, to a buffer.
    new, before = list(micro.buffers.values()), [old[name] for name in micro.buffers]
    if (
        isinstance(counted, Tensor)
        and counted.device.type != "cpu"
        and tracing.may_overwrite([counted, *new, *before])
        and _plain_pairs(new, before)
    ):
        return dict(zip(micro.buffers, foreach.where(counted, new, before), strict=True))
    return {name: flags.where(counted, new, old[name]) for name, new in micro.buffers.items()}


def _plain_pairs(new: list[Tensor], old: list[Tensor]) -> bool:
    """True if one call may select all of these."""
    return bool(new) and all(
        type(a) is type(b) is Tensor and a.dtype == b.dtype and a.shape == b.shape and a.layout is torch.strided
        for a, b in zip(new, old, strict=True)
    )


def times(grad: Tensor, weight: Tensor) -> Tensor:
    """Gradient x weight; 0 for weight 0, since the loss of a batch in which nothing counts is 0/0."""
    return torch.where(weight > 0, grad * weight.to(grad.dtype), torch.zeros_like(grad))


def _add(left: Micro, right: Micro) -> Micro:
    metrics = merge(left.metrics, right.metrics)
    grads = {name: grad + right.grads[name] for name, grad in left.grads.items()}
    unreached = left.unreached & right.unreached
    weight = left.weight + right.weight
    return Micro(grads, left.mean + right.mean, weight, right.buffers, metrics, unreached, weight)
