"""Objectives: what is differentiated, what it weighs, and what is measured on the way."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from .errors import ConfigError, DataError, StepContractError
from .types import Loss, Mean, Objective

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

Metric = Callable[[Any, Any], Any]
"""``metric(outputs, targets)``: a Mean, a ``(total, weight)`` pair, or a tensor that is a mean over the batch."""


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
    leading dimension of the batch; 1 for ``reduction="sum"``. A criterion with parameters is trained with the model,
    under ``objective.`` names.

    Args:
        criterion: `torch.nn.CrossEntropyLoss()` and the like, or any ``f(outputs, targets) -> 0-d tensor``.
        metrics: name -> ``f(outputs, targets)``, see `Metric`.
        prepare: batch -> (inputs, targets). Default: a pair is taken as it is; of a mapping, the targets are its
            ``labels``, ``label``, ``targets``, ``target`` or ``y`` and the rest are inputs.
        forward: (model, inputs) -> outputs. Default: a mapping becomes keyword arguments, a tuple arguments.

    Raises:
        ConfigError: a criterion with ``reduction="none"``, or a class instead of one of its instances.

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
    if getattr(criterion, "reduction", "mean") == "none":
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
        weight = _weight(criterion, _own_weight(model, module), outputs, targets, mean)
        values = {name: as_mean(metric(outputs, targets), targets) for name, metric in measured.items()}
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


def as_mean(value: Any, targets: Any) -> Mean:
    """What a metric returned, as a Mean: a bare tensor is a mean over the leading dimension of ``targets``."""
    if isinstance(value, Mean):
        return value._replace(total=value.total.detach(), weight=value.weight.detach())
    if isinstance(value, tuple):
        total, weight = cast(tuple[Any, Any], value)
        like = total if isinstance(total, Tensor) else torch.as_tensor(total, dtype=torch.float32)
        return Mean(like.detach().float(), torch.as_tensor(weight, dtype=torch.float32, device=like.device).detach())
    if not isinstance(value, Tensor) or value.dim() != 0:
        raise StepContractError(
            f"a metric returned {_describe(value)}",
            where="metrics",
            hint="return a Mean, a (total, weight) pair or a 0-d tensor",
        )
    size = _leading(targets)
    return Mean(value.detach().float() * size, torch.full_like(value, size, dtype=torch.float32).detach())


_HF_BATCH = '{"input_ids": ..., "labels": ...}'


def hf_loss(
    *, metrics: Mapping[str, Metric] | None = None, causal: bool | None = None, ignore_index: int = -100
) -> Objective:
    """The loss that a Hugging Face model computes itself, weighted by the labels it counts.

    The batch is a mapping that goes to the model as keyword arguments. A causal model predicts each label from the
    tokens before it, so the first label of every row is not counted. What has no ``labels`` weighs its number of rows:
    ``start_positions`` and the like, and two-tower models, which are asked for their loss (``return_loss=True``).

    The weight does what ``num_items_in_batch`` does elsewhere: micro-batches with different numbers of tokens add up to
    the gradient of the whole batch.

    Args:
        metrics: name -> ``f(outputs, labels)``; without ``labels``, ``f(outputs, batch)``.
        causal: whether the model shifts the labels; None reads it from the model's class.
        ignore_index: labels that do not count.

    Raises:
        DataError: a batch that is no mapping or has no labels.
        StepContractError: the model returned no loss.

    Example:
        >>> import torch, purestep as ps
        >>> class ForCausalLM(torch.nn.Embedding):
        ...     def forward(self, input_ids, labels):
        ...         logits = super().forward(input_ids)[:, :-1].flatten(0, 1)
        ...         return {"loss": torch.nn.functional.cross_entropy(logits, labels[:, 1:].flatten())}
        >>> tokens = torch.tensor([[1, 2, 0], [2, 1, 0]])
        >>> batch = {"input_ids": tokens, "labels": tokens.masked_fill(tokens == 0, -100)}
        >>> ps.hf_loss()(ForCausalLM(3, 3), batch).weight.item()
        2.0
    """
    measured = dict(metrics or {})

    def objective(model: Any, batch: Any, /, *context: Any) -> Loss:
        del context  # a Hugging Face loss depends on the batch alone
        named = _labelled(model, batch)
        outputs = model(**named)
        mean = _loss_of(outputs)
        if mean is None:
            raise StepContractError(
                "the model returned no loss",
                where=type(_module(model)).__name__,
                hint="ps.supervised(criterion) for this model",
            )
        labels = named.get("labels")
        targets, sized = (named if labels is None else labels), _sized(named)
        if isinstance(labels, Tensor):
            shifts = _is_causal(model) if causal is None else causal
            weight = _counted_labels(labels[..., 1:] if shifts else labels, ignore_index)
        else:
            weight = torch.full((), sized.shape[0], device=mean.device)
        values = {name: as_mean(metric(outputs, targets), sized) for name, metric in measured.items()}
        return Loss(mean, weight.to(torch.float32), values)

    return objective


def _labelled(model: Any, batch: Any) -> Mapping[str, Any]:
    """What goes to a Hugging Face model so that it returns a loss."""
    if isinstance(batch, Mapping):
        named = cast(Mapping[str, Any], batch)
        if any("label" in name or name in ("start_positions", "return_loss") for name in named):
            return named
        if "return_loss" in inspect.signature(_module(model).forward).parameters:
            return {**named, "return_loss": True}
    raise DataError("hf_loss needs a mapping with 'labels'", where="batch", hint=_HF_BATCH)


def _loss_of(outputs: Any) -> Any:
    """The loss of a ModelOutput, of a mapping, or of a tuple, in which it comes first; None where there is none."""
    if isinstance(outputs, tuple) and not hasattr(cast(Any, outputs), "loss"):
        first: Any = cast(tuple[Any, ...], outputs)[0]
        return first if isinstance(first, Tensor) and first.dim() == 0 else None
    if isinstance(outputs, Mapping) and not hasattr(cast(Any, outputs), "loss"):
        return cast(Mapping[str, Any], outputs).get("loss")
    return getattr(outputs, "loss", None)


def _sized(named: Mapping[str, Any]) -> Tensor:
    """What tells the size of a batch: the labels where they are one tensor, else the first that has a size."""
    found = [value for value in (named.get("labels"), *named.values()) if isinstance(value, Tensor) and value.dim()]
    if not found:
        raise DataError("holds no tensor with a batch size", where="batch", hint=_HF_BATCH)
    return found[0]


def _counted_labels(labels: Tensor, ignore_index: int) -> Tensor:
    if labels.is_floating_point():
        return torch.full((), labels.numel(), device=labels.device)
    return (labels != ignore_index).sum()


def masked_reconstruction(
    loss: Literal["mse", "sse"] = "mse", reduction: Literal["mean", "sum", "batch_mean"] | None = None
) -> Objective:
    """Squared error on what a masked autoencoder did not see.

    The model returns ``(reconstruction, latent, visible)``; the loss runs over ``~visible``. Batches are ``x`` or
    ``(x, meta)``.

    Args:
        loss: "mse" and "sse" compute the same and differ in the default reduction: "mean" and "batch_mean".
        reduction: "mean" over masked elements, "sum", or "batch_mean" (the sum over the batch size, which keeps the
            weight of an example when masks differ in size).

    Raises:
        DataError: a batch whose input is no tensor.
        StepContractError: the model returns something else; reconstruction, input and mask of different shapes, or a
            mask that is not boolean.
    """
    if loss not in ("mse", "sse"):
        raise ConfigError(f"{loss!r} is no loss", where="masked_reconstruction", hint='"mse" or "sse"')
    chosen = reduction or ("mean" if loss == "mse" else "batch_mean")
    _check_reduction(chosen)

    def objective(model: Any, batch: Any, /, *context: Any) -> Loss:
        del context  # the masks are drawn by the model
        x = batch[0] if isinstance(batch, tuple | list) and batch else batch
        if not isinstance(x, Tensor):
            raise DataError(f"the input is a {type(x).__name__}, not a tensor", where="batch", hint="x, or (x, meta)")
        recon, visible = _reconstructed(model(x))
        mask = ~visible if visible.dtype == torch.bool else visible
        mean = masked_sse(recon, x, mask, reduction=chosen)
        masked = mask.sum().to(torch.float32)
        weight = {"mean": masked, "sum": torch.ones_like(masked), "batch_mean": torch.full_like(masked, len(x))}
        return Loss(mean, weight[chosen], {})

    return objective


def _reconstructed(output: Any) -> tuple[Tensor, Tensor]:
    parts = cast("list[Any]", list(output)) if isinstance(output, tuple | list) else [output]
    if len(parts) == 3 and isinstance(parts[0], Tensor) and isinstance(parts[2], Tensor):
        return parts[0], parts[2]
    raise StepContractError(
        f"the model returned {_describe(output)}" + (f" of {len(parts)}" if len(parts) != 1 else ""),
        where="masked_reconstruction",
        hint="return (reconstruction, latent, visible), all of it tensors but the latent, visible of dtype bool",
    )


def masked_mse(x_recon: Tensor, x: Tensor, mask: Tensor, *, reduction: str = "mean") -> Tensor:
    """Squared error over masked elements, shape=(). ``mask`` is True where the error counts. 0 for an empty mask.

    Example:
        >>> import torch
        >>> masked_mse(torch.ones(1, 2), torch.zeros(1, 2), torch.tensor([[True, False]])).item()
        1.0
    """
    return masked_sse(x_recon, x, mask, reduction=reduction)


def masked_sse(x_recon: Tensor, x: Tensor, mask: Tensor, *, reduction: str = "batch_mean") -> Tensor:
    """As `masked_mse`, by default the summed error over the batch size."""
    _check_reduction(reduction)
    if mask.dtype != torch.bool or not x_recon.shape == x.shape == mask.shape:
        raise StepContractError(
            f"reconstruction {list(x_recon.shape)}, input {list(x.shape)} and mask {list(mask.shape)} ({mask.dtype})",
            where="masked_reconstruction",
            hint="three tensors of one shape, the mask of dtype bool",
        )
    # No boolean indexing: its result has a shape that depends on the data, which no graph can hold. No product with
    # the mask: nan x 0 is nan, and what is not scored may be missing.
    # In at least float32: of squares in float16, a few thousand add up to infinity.
    error = x_recon.to(torch.promote_types(x_recon.dtype, torch.float32)) - x
    total = torch.where(mask, error, torch.zeros_like(error)).square().sum()
    if reduction == "sum":
        return total
    return total / (mask.sum().clamp(min=1) if reduction == "mean" else len(x))


def _check_reduction(reduction: str) -> None:
    if reduction not in ("mean", "sum", "batch_mean"):
        raise ConfigError(f"{reduction!r}", where="reduction", hint='"mean", "sum" or "batch_mean"')


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


def _weight(criterion: Any, class_weight: Tensor | None, outputs: Any, targets: Any, mean: Tensor) -> Tensor:
    if getattr(criterion, "reduction", "mean") == "sum":
        return torch.ones((), dtype=torch.float32, device=mean.device)
    if isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss):
        return _counted_targets(targets, criterion.ignore_index, class_weight)
    if criterion in (functional.cross_entropy, functional.nll_loss):
        return _counted_targets(targets, -100, None)
    elementwise = isinstance(criterion, _ELEMENTWISE) or criterion in _ELEMENTWISE_FUNCTIONS
    size = outputs.numel() if elementwise else _leading(targets)
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


def _leading(targets: Any) -> int:
    if isinstance(targets, Tensor):
        return targets.shape[0] if targets.dim() else 1
    if isinstance(targets, Mapping):
        return _leading(next(iter(cast(Mapping[str, Any], targets).values())))
    if isinstance(targets, tuple | list) and targets:
        return _leading(cast(tuple[Any, ...], targets)[0])
    raise DataError(
        f"cannot count the examples of {_describe(targets)}", where="targets", hint="tensors with a leading batch size"
    )


def _module(model: Any) -> Any:
    return getattr(model, "module", model)


_CAUSAL = ("ForCausalLM", "ForConditionalGeneration")
_UNSHIFTED = (  # decoders that expect labels shifted already, though their names say otherwise
    *("Bart", "BigBirdPegasus", "Blenderbot", "CpmAnt", "FlaubertWith", "MBart", "Marian", "Musicgen", "Mvp", "PLBart"),
    *("Pegasus", "TrOCR", "Whisper", "XLMWith", "XLNet"),
)


def _is_causal(model: Any) -> bool:
    module = _module(model)
    name = type(module).__name__
    if name.startswith(_UNSHIFTED) or getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        return False
    by_name = "CausalLM" in name or name.endswith(("LMHeadModel", "DoubleHeadsModel", "ForConditionalGeneration"))
    return by_name or getattr(module, "loss_type", "") in _CAUSAL


def _describe(value: Any) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
