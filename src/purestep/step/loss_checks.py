"""From the result of an objective to a `Loss`: checks, the weight of a share, and metrics of what is finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from .. import tree
from ..errors import StepContractError
from ..metrics import Gathered
from ..metrics import mean as means
from ..torch_ext import is_finite, tracing
from ..types import Batch, Loss, Mean, Metrics, Share
from .spec import wide

OWN_METRICS = frozenset(("loss", "lr", "grad_norm", "applied", "scale"))
"""Names of the step's own metrics."""
NUMBERS: Any = (int, float, torch.SymInt, torch.SymFloat)
"""Numbers of Python; the last two are sizes in a trace for batches of many sizes."""


def check_loss(loss: Any, device: torch.device, *, train: bool) -> Loss:
    """Convert an objective's result: the mean to at least float32, the weight to a 0-d float32 tensor on the device.
    With ``train``, drop gathered outputs: they are for the end of an evaluation; without it, `Loss.outputs`.

    Raises:
        StepContractError: it is not a Loss, its mean is not a floating scalar on the device, or its outputs are not
            tensors.
    """
    cure = "return ps.Loss(mean, weight, metrics), or use ps.supervised"
    if not isinstance(loss, Loss):
        raise StepContractError(
            f"the objective returned a {type(loss).__name__}, not a Loss", where="objective", hint=cure
        )
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
    return Loss(
        mean.to(wide(mean.dtype)),
        _weight(loss.weight, device),
        _checked_metrics(loss.metrics, device, train),
        _checked_outputs(loss.outputs) if train else {},
    )


def _checked_outputs(given: Any) -> dict[str, Any]:
    """Copies of the outputs: they may share memory with weights, which a donated step writes."""
    if not isinstance(given, Mapping):
        raise StepContractError(
            f"the outputs are a {type(given).__name__}, not a mapping",
            where="outputs",
            hint='pass ps.Loss(mean, weight, metrics, outputs={"errors": errors})',
        )
    if not given:
        return {}
    found = tree.dicts(dict(cast(Mapping[str, Any], given)))
    for path, leaf in tree.with_paths(found):
        if not isinstance(leaf, Tensor):
            raise StepContractError(
                f"the output is a {type(leaf).__name__}, not a tensor",
                where=f"outputs/{path}",
                hint="pass a tensor; a number that is to be averaged is a metric",
            )
    return tree.map(lambda leaf: leaf.detach().clone(), found)


def _weight(given: Any, device: torch.device) -> Tensor:
    weight = torch.full((), given, device=device) if isinstance(given, NUMBERS) else given
    if not isinstance(weight, Tensor) or weight.dim() != 0 or weight.is_complex():
        found = f"of shape {list(weight.shape)}" if isinstance(weight, Tensor) else f"a {type(weight).__name__}"
        raise StepContractError(
            f"the weight of the loss is {found}; a scalar is needed",
            where="objective",
            hint="pass the count that `mean` was divided by, as a number or a 0-d tensor",
        )
    is_known = isinstance(given, NUMBERS) or tracing.may_branch(weight)
    if is_known and given < 0:
        raise StepContractError(
            f"the weight of the loss is {float(given)}",
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
    kept = {name: mean for name, mean in found.items() if not (train and isinstance(mean, Gathered))}
    return {name: _checked_metric(name, mean, device) for name, mean in kept.items()}


def _checked_metric(name: str, mean: Any, device: torch.device) -> Any:
    where = "metrics" + (f"/{name}" if name else "")
    if not isinstance(mean, Mean | Gathered):
        raise StepContractError(
            f"the metric is a {type(mean).__name__}, not a Mean",
            where=where,
            hint="pass ps.Loss(mean, weight, {name: ps.metrics.as_mean(value, len(x))}), or ps.Mean(total, weight)",
        )
    if name in OWN_METRICS:
        raise StepContractError("the step itself has a metric of this name", where=where, hint="choose another name")
    if str(name).endswith("]") and str(name).rpartition("[")[2][:-1].isdecimal():
        raise StepContractError("entries of vector metrics have such names", where=where, hint="choose another name")
    if isinstance(mean, Gathered):
        return mean
    total, weight = (_checked_part(name, part, device) for part in mean)
    if total.shape != weight.shape or total.dim() > 1:
        raise StepContractError(
            f"the metric is a Mean of a total {list(total.shape)} and a weight {list(weight.shape)}",
            where=where,
            hint="pass total.sum() for one number per row, or two vectors for one mean per class",
        )
    # A subclass of Mean keeps its type (a torchmetrics.Metric computes itself).
    return means.with_sums(mean, total, weight)


def _checked_part(name: str, given: Any, device: torch.device) -> Tensor:
    if isinstance(given, NUMBERS):
        return torch.full((), given, dtype=torch.float32, device=device)
    if not isinstance(given, Tensor):
        hint = "pass ps.Mean(total, weight) of two tensors or numbers"
        raise StepContractError(f"the metric is a Mean of a {type(given).__name__}", where=f"metrics/{name}", hint=hint)
    return _to_device(given, device)


def check_connected(mean: Tensor) -> None:
    """Raise `not_connected` if autograd has no graph of the loss."""
    # torch.func.grad of a detached loss silently returns zeros. Dynamo cannot check, so fit checks before compiling.
    if not torch.compiler.is_dynamo_compiling() and not mean.requires_grad:
        raise not_connected()


def not_connected() -> StepContractError:
    """The error for a loss that does not depend on any parameter."""
    return StepContractError(
        "the loss does not depend on the parameters: every gradient would be zero",
        where="objective",
        hint="remove .detach(), .item() or torch.no_grad() between model(...) and the loss",
    )


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
    return Loss(loss.mean, kept(loss.weight), metrics, loss.outputs)


def finite_mean(total: Tensor, weight: Tensor) -> Mean:
    """Return a Mean without entries that are not finite or have no weight: one nan must not spoil an epoch's mean."""
    total = means.at_least_float32(total)
    counted, zero = is_finite(total) & (weight > 0), torch.zeros_like(total)
    return Mean(torch.where(counted, total, zero), torch.where(counted, weight.to(total.dtype), zero))


def like_loss(metrics: Metrics, loss: Tensor) -> Metrics:
    """The metrics in float64 if the loss is float64, else as they are."""
    return means.in_float64(metrics) if loss.dtype == torch.float64 else metrics


def lacks_gradient(error: Exception) -> bool:
    """True for torch's errors of a derivative of, or by, a tensor without a gradient."""
    return "tensors does not require grad" in str(error).lower()
