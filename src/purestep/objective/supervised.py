"""Supervised losses: a criterion of outputs and targets, and its weight."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence

from ..errors import ConfigError, DataError, StepContractError
from ..metrics import torchmetrics
from ..state import known_keywords
from ..types import Loss, Metric, Objective
from .measure import leading, mean_of

_OVER_ELEMENTS: tuple[type, ...] = (
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss),
    *(nn.KLDivLoss, nn.PoissonNLLLoss, nn.SoftMarginLoss, nn.HingeEmbeddingLoss),
)
_FUNCTIONS_OVER_ELEMENTS = (
    *(functional.mse_loss, functional.l1_loss, functional.smooth_l1_loss, functional.huber_loss),
    *(functional.binary_cross_entropy, functional.binary_cross_entropy_with_logits, functional.kl_div),
    *(functional.poisson_nll_loss, functional.soft_margin_loss, functional.hinge_embedding_loss),
)
"""Losses that compare each output with the target at its place: a mean over elements."""
_OVER_CLASSES: tuple[type, ...] = (
    *(nn.CrossEntropyLoss, nn.NLLLoss),
    *((nn.LinearCrossEntropyLoss,) if hasattr(nn, "LinearCrossEntropyLoss") else ()),
)
_FUNCTIONS_OVER_CLASSES = (functional.cross_entropy, functional.nll_loss)
"""Losses of class indices: a mean over the targets that are not ignored, each with the weight of its class."""
_TARGET_KEYS = ("labels", "label", "targets", "target", "y")


@known_keywords
def supervised(
    criterion: Callable[..., Tensor],
    *,
    metrics: Mapping[str, Metric | Any] | None = None,
    prepare: Callable[[Any], tuple[Any, Any]] | None = None,
    forward: Callable[[Any, Any], Any] | None = None,
) -> Objective:
    """Build the objective ``criterion(model(inputs), targets)``, with the weight that makes accumulation exact.

    Example:
        >>> import torch, purestep as ps
        >>> objective = ps.supervised(torch.nn.MSELoss())
        >>> net = torch.nn.Linear(2, 1)
        >>> loss = objective(net, (torch.ones(3, 2), torch.ones(3, 1)))
        >>> loss.mean.shape, loss.weight.item()
        (torch.Size([]), 3.0)

    The weight is the count that the criterion's mean divides by: for cross entropy the summed class weights of the
    targets that are not ignored, for elementwise losses of torch the number of elements, for any other callable the
    number of examples. It is 1 for ``reduction="sum"``, which goes with neither ``accumulate`` nor ``microbatches``
    nor several processes. A `functools.partial` of one of torch's losses counts as that loss, with the settings in the
    partial. A criterion with parameters trains with the model, under names that begin with ``objective.``.

    Examples are counted by the leading dimension of the targets. A list or tuple of targets has one entry per example
    (the boxes of an image, the labels of a graph), unless its tensors are columns: they have one leading dimension,
    which is that of the first tensor in the inputs, or they differ in rank or dtype, as the targets of two heads. The
    weight of a metric that returns a bare tensor is the number of examples.

    Args:
        criterion: a loss such as `torch.nn.CrossEntropyLoss()`, or any ``f(outputs, targets) -> 0-d tensor``.
        metrics: name -> ``f(outputs, targets)``, see `Metric`, or an object of torchmetrics as it is, see
            `metrics.from_torchmetrics`; or a ``torchmetrics.MetricCollection``.
        prepare: batch -> (inputs, targets). Default: a pair is (inputs, targets); in a mapping, ``labels``, ``label``,
            ``targets``, ``target`` or ``y`` are the targets, and the rest are inputs.
        forward: (model, inputs) -> outputs. Default: a mapping is passed as keyword arguments, a tuple as arguments.

    Raises:
        ConfigError: the criterion is one of torch's losses with ``reduction="none"``, or a class, not an instance.
        DataError: when called, if the batch is not a pair or mapping of inputs and targets, or cannot be counted.
        StepContractError: when called, if an elementwise loss of torch gets outputs and targets whose shapes differ (it
            would broadcast them) or a cross entropy of torch gets outputs of a single class (it would always be 0), if
            a loss of torch gets a tuple or mapping as outputs or targets of a dtype that it does not take, if the
            criterion does not return a tensor, or if a metric returns an invalid value.
    """
    if isinstance(criterion, type):
        name = criterion.__name__
        raise ConfigError("the criterion is a class, not an instance", where=name, hint=f"{name}()")
    # A user's criterion may have such a setting and reduce later; the step checks the result.
    if _setting(criterion, "reduction", "mean") == "none" and _is_from_torch(criterion):
        raise ConfigError('reduction="none" gives no scalar', where="criterion", hint='reduction="mean"')
    measured = torchmetrics.functions(metrics)
    has_tensors = isinstance(criterion, nn.Module) and [*criterion.parameters(), *criterion.buffers()]
    module = cast(nn.Module, criterion) if has_tensors else None
    split, run = prepare or split_batch, forward or call_model
    is_from_torch = _is_from_torch(criterion)
    is_elementwise = is_from_torch and _is_elementwise(criterion)
    is_over_classes = is_from_torch and _is_over_classes(criterion)

    def objective(model: Any, batch: Any, /, *context: Any) -> Loss:
        del context  # A supervised loss depends on the batch only.
        inputs, targets = split(batch)
        outputs = run(model, inputs)
        if is_elementwise:
            _check_shapes(criterion, outputs, targets)
        elif is_over_classes:
            _check_classes(criterion, outputs)
        if is_from_torch:
            _check_kinds(criterion, outputs, targets)
        mean: Any = criterion(outputs, targets) if module is None else _bound(model, module)(outputs, targets)
        if not isinstance(mean, Tensor):
            raise StepContractError(
                f"the criterion returned a {type(mean).__name__}", where="criterion", hint="return a 0-d tensor"
            )
        weight = _weight(criterion, _bound_weight(model, module), outputs, targets, inputs, mean)
        values = {name: mean_of(name, metric(outputs, targets), targets, inputs) for name, metric in measured.items()}
        return Loss(mean, weight, values)

    objective.module = module  # pyright: ignore[reportFunctionMemberAccess]  # `program` reads its parameters
    # Nor can a step be made of parts of a batch then.
    objective.is_sum = _setting(criterion, "reduction", "mean") == "sum"  # pyright: ignore[reportFunctionMemberAccess]
    return objective


def split_batch(batch: Any) -> tuple[Any, Any]:
    """Split a pair, or a mapping with a target key, into ``(inputs, targets)``.

    Raises:
        DataError: the batch is neither.
    """
    if isinstance(batch, Mapping):
        named = cast(Mapping[str, Any], batch)
        for key in _TARGET_KEYS:
            if key in named:
                return {name: value for name, value in named.items() if name != key}, named[key]
        kind = f"a mapping with the keys {sorted(map(str, named))}"
    elif isinstance(batch, tuple | list):
        sequence = cast(tuple[Any, ...], batch)
        if len(sequence) == 2:
            return sequence[0], sequence[1]
        kind = f"a {type(sequence).__name__} of {len(sequence)}"
    else:
        kind = f"a {type(batch).__name__}"
    raise DataError(
        f"the batch is {kind}, not a pair of inputs and targets",
        where="batch",
        hint=f"ps.supervised(..., prepare=lambda batch: (inputs, targets)), or a mapping with one of {_TARGET_KEYS}",
    )


def call_model(model: Any, inputs: Any) -> Any:
    """Call ``model(**inputs)`` for a mapping, ``model(*inputs)`` for a tuple or list, else ``model(inputs)``, also for
    a `PackedSequence`."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, tuple | list) and not isinstance(inputs, PackedSequence):
        return model(*inputs)
    return model(inputs)


def _bound(model: Any, module: nn.Module) -> Callable[..., Tensor]:
    # Outside of a program, for example in a test, the model is a plain module and the criterion has its own weights.
    return model.objective if hasattr(model, "buffers") and hasattr(model, "frozen") else module


def _bound_weight(model: Any, module: nn.Module | None) -> Tensor | None:
    """Return the class weights of a criterion; inside of a program, from the state."""
    if module is None:
        return None
    buffers = getattr(model, "buffers", None)
    if isinstance(buffers, dict):
        return cast(dict[str, Tensor], buffers).get("objective.weight")
    return cast(Tensor | None, getattr(module, "weight", None))


def _called(criterion: Any) -> Any:
    """The loss under a `functools.partial` of keyword arguments; any other criterion itself."""
    # A partial with positional arguments is not called with (outputs, targets).
    return criterion.func if isinstance(criterion, functools.partial) and not criterion.args else criterion


def _setting(criterion: Any, name: str, default: Any) -> Any:
    if isinstance(criterion, functools.partial) and name in criterion.keywords:
        return criterion.keywords[name]
    return getattr(_called(criterion), name, default)


def _is_from_torch(criterion: Any) -> bool:
    """True for a loss that torch computes. A subclass with its own forward may take other shapes, and reduce later."""
    loss = _called(criterion)
    return getattr(getattr(loss, "forward", loss), "__module__", None) in (nn.MSELoss.__module__, functional.__name__)


def _is_elementwise(criterion: Any) -> bool:
    loss = _called(criterion)
    return isinstance(loss, _OVER_ELEMENTS) or loss in _FUNCTIONS_OVER_ELEMENTS


def _is_over_classes(criterion: Any) -> bool:
    loss = _called(criterion)
    return isinstance(loss, _OVER_CLASSES) or loss in _FUNCTIONS_OVER_CLASSES


def _check_classes(criterion: Any, outputs: Any) -> None:
    loss = _called(criterion)
    from_features = hasattr(loss, "linear")  # `LinearCrossEntropyLoss`: the outputs are no scores of classes
    if isinstance(outputs, Tensor) and outputs.dim() > 1 and outputs.shape[1] == 1 and not from_features:
        raise StepContractError(
            f"outputs {list(outputs.shape)}: the loss of a single class is always 0",
            where=str(getattr(loss, "__name__", type(loss).__name__)),
            hint="nn.BCEWithLogitsLoss() with floating targets of the outputs' shape, or a last layer with 2 outputs",
        )


def _check_shapes(criterion: Any, outputs: Any, targets: Any) -> None:
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or outputs.shape == targets.shape:
        return
    loss = _called(criterion)
    if targets.shape == (*outputs.shape, 1):
        hint = "prepare=lambda batch: (batch[0], batch[1].squeeze(-1))"
    elif outputs.shape == (*targets.shape, 1):
        hint = "forward=lambda model, x: model(x).squeeze(-1)"
    else:
        hint = "forward=..., prepare=...); give both one shape (targets.expand_as(outputs) for one of many"
    raise StepContractError(
        f"outputs {list(outputs.shape)} and targets {list(targets.shape)}: the loss would compare each output with "
        "targets of other rows",
        where=str(getattr(loss, "__name__", type(loss).__name__)),
        hint=f"ps.supervised(..., {hint})",
    )


def _check_kinds(criterion: Any, outputs: Any, targets: Any) -> None:
    """Refuse, with the cure, three kinds of outputs and targets that torch refuses in its own words, or in eager mode
    only: a compiled step would take whole targets of a binary cross entropy."""
    loss = _called(criterion)
    name = str(getattr(loss, "__name__", type(loss).__name__))
    if not isinstance(outputs, Tensor):
        part = "[0]" if isinstance(outputs, tuple | list) else ".logits"
        if isinstance(outputs, Mapping):
            named = cast(Mapping[Any, Any], outputs)
            part = f'["{"logits" if "logits" in named else next(iter(named), "logits")}"]'
        found = f"the model returned a {type(outputs).__name__}, and the loss needs one tensor"
        hint = f"forward=lambda model, x: model(x){part}), or model(**x){part} if the inputs are a mapping"
    elif not isinstance(targets, Tensor):
        return
    elif not targets.is_floating_point() and name.lower().startswith(("bce", "binary", "huber")):
        found = f"the targets are {targets.dtype}, and the loss needs floating ones"
        hint = "prepare=lambda batch: (batch[0], batch[1].float()))"
    elif targets.is_floating_point() and targets.dim() < outputs.dim() and _is_over_classes(criterion):
        found = f"the targets are {targets.dtype}, and class indices are int64"
        hint = "prepare=lambda batch: (batch[0], batch[1].long()))"
    else:
        return
    raise StepContractError(found, where=name, hint=f"ps.supervised(..., {hint}")


def _weight(
    criterion: Any, class_weight: Tensor | None, outputs: Any, targets: Any, inputs: Any, mean: Tensor
) -> Tensor:
    reduction = _setting(criterion, "reduction", "mean")
    if reduction == "sum":
        return torch.ones((), dtype=torch.float32, device=mean.device)
    if _is_over_classes(criterion):
        if class_weight is None:
            class_weight = _setting(criterion, "weight", None)
        ignored = _setting(criterion, "ignore_index", None)
        return _counted_targets(targets, -100 if ignored is None else ignored, class_weight)
    is_over_elements = _is_elementwise(criterion) and reduction != "batchmean"
    size = outputs.numel() if is_over_elements else leading(targets, inputs)
    return torch.full((), size, dtype=torch.float32, device=mean.device)


def _counted_targets(targets: Tensor, ignore_index: int, class_weight: Tensor | None) -> Tensor:
    if targets.is_floating_point():  # Class probabilities: torch divides by the number of rows, also with weights.
        classes = targets.shape[min(1, targets.dim() - 1)]
        return torch.full((), targets.numel() // classes, dtype=torch.float32, device=targets.device)
    counted = targets != ignore_index
    if class_weight is None:
        return counted.sum().to(torch.float32)
    # Sum in at least float32: in bfloat16, 257 targets of weight 1 sum to 256.
    wide = class_weight.to(torch.promote_types(class_weight.dtype, torch.float32))
    of_target = wide[torch.where(counted, targets, torch.zeros_like(targets)).long()]
    return (of_target * counted).sum().to(torch.float32)
