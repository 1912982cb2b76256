"""A criterion of outputs and targets, with what it weighs."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import ConfigError, DataError, StepContractError
from ..pickling import recipe
from ..types import Loss, Metric, Objective
from .measure import leading, mean_of

_TARGET_KEYS = ("labels", "label", "targets", "target", "y")
_ELEMENTWISE = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss)
_ELEMENTWISE_FUNCTIONS = (
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
)


@recipe
def supervised(
    criterion: Callable[..., Tensor],
    *,
    metrics: Mapping[str, Metric] | None = None,
    prepare: Callable[[Any], tuple[Any, Any]] | None = None,
    forward: Callable[[Any, Any], Any] | None = None,
) -> Objective:
    """``criterion(model(inputs), targets)`` with the weight that makes accumulation exact.

    The weight is the number of things the criterion's mean is a mean over: for cross entropy the summed class weights
    of the targets that are not ignored, for elementwise losses the number of elements, for any other callable the
    number of examples; 1 for ``reduction="sum"``. A `functools.partial` of one of torch's losses counts as that loss,
    with the settings it holds. A criterion with parameters is trained with the model, under ``objective.`` names.

    Examples are counted by the leading dimension of the targets. A list or tuple of targets has one entry an example
    (an image's boxes, a graph's labels) and counts its entries, unless its tensors are columns: all of them have the
    leading dimension of the inputs, or one leading dimension and different ranks or dtypes, as the targets of two heads
    have. A metric that returns a bare tensor has the same weight.

    Args:
        criterion: `torch.nn.CrossEntropyLoss()` and the like, or any ``f(outputs, targets) -> 0-d tensor``.
        metrics: name -> ``f(outputs, targets)``, see `Metric`.
        prepare: batch -> (inputs, targets). Default: a pair is taken as it is; of a mapping, the targets are its
            ``labels``, ``label``, ``targets``, ``target`` or ``y`` and the rest are inputs.
        forward: (model, inputs) -> outputs. Default: a mapping becomes keyword arguments, a tuple arguments.

    Raises:
        ConfigError: one of torch's losses with ``reduction="none"``, or a class instead of one of its instances.
        DataError: when called: a batch that is no pair or mapping of inputs and targets, or cannot be counted.
        StepContractError: when called: the criterion returned no tensor, or a metric none of what a `Metric` may.

    Example:
        >>> import torch, purestep as ps
        >>> objective = ps.supervised(torch.nn.MSELoss())
        >>> net = torch.nn.Linear(2, 1)
        >>> loss = objective(net, (torch.ones(3, 2), torch.ones(3, 1)))
        >>> loss.mean.shape, loss.weight.item()
        (torch.Size([]), 3.0)
    """
    if isinstance(criterion, type):
        raise ConfigError("is a class", where=criterion.__name__, hint=f"{criterion.__name__}(), an instance")
    # Another's may use such a setting inside and reduce after it: the step looks at what it returns.
    if _setting(criterion, "reduction", "mean") == "none" and _is_torchs(_called(criterion)):
        raise ConfigError('reduction="none" gives no scalar', where="criterion", hint='reduction="mean"')
    measured = dict(metrics or {})
    module = criterion if isinstance(criterion, nn.Module) and _has_tensors(criterion) else None
    split, run = prepare or split_batch, forward or call_model

    def objective(model: Any, batch: Any, /, *context: Any) -> Loss:
        del context  # a supervised loss depends on the batch alone
        inputs, targets = split(batch)
        outputs = run(model, inputs)
        mean: Any = criterion(outputs, targets) if module is None else _own(model, module)(outputs, targets)
        if not isinstance(mean, Tensor):
            raise StepContractError(
                f"the criterion returned a {type(mean).__name__}", where="criterion", hint="return a 0-d tensor"
            )
        weight = _weight(criterion, _own_weight(model, module), outputs, targets, inputs, mean)
        values = {name: mean_of(metric(outputs, targets), targets, inputs) for name, metric in measured.items()}
        return Loss(mean, weight, values)

    objective.module = module  # pyright: ignore[reportFunctionMemberAccess]  # how `program` finds its parameters
    return objective


def split_batch(batch: Any) -> tuple[Any, Any]:
    """``(inputs, targets)`` of a pair or of a mapping with a target key.

    Raises:
        DataError: neither.
    """
    if isinstance(batch, Mapping):
        named = cast(Mapping[str, Any], batch)
        for key in _TARGET_KEYS:
            if key in named:
                return {name: value for name, value in named.items() if name != key}, named[key]
        found = f"a mapping with the keys {sorted(map(str, named))}"
    elif isinstance(batch, tuple | list):
        sequence = cast(tuple[Any, ...], batch)
        if len(sequence) == 2:
            return sequence[0], sequence[1]
        found = f"a {type(sequence).__name__} of {len(sequence)}"
    else:
        found = f"a {type(batch).__name__}"
    raise DataError(
        f"the batch is {found}, not a pair of inputs and targets",
        where="batch",
        hint=f"ps.supervised(..., prepare=lambda batch: (inputs, targets)), or a mapping with one of {_TARGET_KEYS}",
    )


def call_model(model: Any, inputs: Any) -> Any:
    """``model(**inputs)`` of a mapping, ``model(*inputs)`` of a tuple or list, else ``model(inputs)``."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def _has_tensors(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def _own(model: Any, module: nn.Module) -> Callable[..., Tensor]:
    # Outside a program (in a test, say) the model is a plain module and the criterion runs as it is.
    return model.objective if hasattr(model, "buffers") and hasattr(model, "frozen") else module


def _own_weight(model: Any, module: nn.Module | None) -> Tensor | None:
    """The class weights of a criterion, from the state when it is in there."""
    if module is None:
        return None
    buffers = getattr(model, "buffers", None)
    if isinstance(buffers, dict):
        return cast(dict[str, Tensor], buffers).get("objective.weight")
    return cast(Tensor | None, getattr(module, "weight", None))


def _setting(criterion: Any, name: str, default: Any) -> Any:
    """What the criterion was made with."""
    if isinstance(criterion, functools.partial) and name in criterion.keywords:
        return criterion.keywords[name]
    return getattr(_called(criterion), name, default)


def _called(criterion: Any) -> Any:
    # With arguments by position too, what it is called with is no longer outputs and targets.
    return criterion.func if isinstance(criterion, functools.partial) and not criterion.args else criterion


def _is_torchs(called: Any) -> bool:
    named = called if isinstance(called, types.FunctionType | types.BuiltinFunctionType) else type(called)
    return (named.__module__ or "").startswith("torch.")


def _weight(
    criterion: Any, class_weight: Tensor | None, outputs: Any, targets: Any, inputs: Any, mean: Tensor
) -> Tensor:
    if _setting(criterion, "reduction", "mean") == "sum":
        return torch.ones((), dtype=torch.float32, device=mean.device)
    called = _called(criterion)
    if isinstance(called, nn.CrossEntropyLoss | nn.NLLLoss) or called in (
        functional.cross_entropy,
        functional.nll_loss,
    ):
        if class_weight is None:
            class_weight = _setting(criterion, "weight", None)
        return _counted_targets(targets, _setting(criterion, "ignore_index", -100), class_weight)
    elementwise = isinstance(called, _ELEMENTWISE) or called in _ELEMENTWISE_FUNCTIONS
    size = outputs.numel() if elementwise else leading(targets, inputs)
    return torch.full((), size, dtype=torch.float32, device=mean.device)


def _counted_targets(targets: Tensor, ignore_index: int, class_weight: Tensor | None) -> Tensor:
    if targets.is_floating_point():  # class probabilities: torch divides by the number of rows, weights or not
        classes = targets.shape[min(1, targets.dim() - 1)]
        return torch.full((), targets.numel() // classes, dtype=torch.float32, device=targets.device)
    counted = targets != ignore_index
    if class_weight is None:
        return counted.sum().to(torch.float32)
    # Summed in at least float32: 257 targets of weight 1 are 256 in bfloat16.
    wide = class_weight.to(torch.promote_types(class_weight.dtype, torch.float32))
    of_target = wide[torch.where(counted, targets, torch.zeros_like(targets)).long()]
    return (of_target * counted).sum().to(torch.float32)
