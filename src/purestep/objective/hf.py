"""The losses that Hugging Face models compute themselves."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import DataError, StepContractError
from ..types import Loss, Metric, Objective
from .measuring import mean_of

_HF_BATCH = '{"input_ids": ..., "labels": ...}'
_CAUSAL = ("ForCausalLM", "ForConditionalGeneration")
_UNSHIFTED = (  # decoders that expect labels shifted already, though their names say otherwise
    *("Bart", "BigBirdPegasus", "Blenderbot", "CpmAnt", "FlaubertWith", "MBart", "Marian", "Musicgen", "Mvp", "PLBart"),
    *("Pegasus", "TrOCR", "Whisper", "XLMWith", "XLNet"),
)


def hf_loss(
    *, metrics: Mapping[str, Metric] | None = None, causal: bool | None = None, ignore_index: int | None = None
) -> Objective:
    """The loss that a Hugging Face model computes itself, weighted by the labels it counts.

    The batch is a mapping that goes to the model as keyword arguments. A causal model predicts each label from the
    tokens before it, so the first label of every row is not counted. What has no ``labels`` weighs its number of rows:
    ``start_positions`` and the like, and two-tower models, which are asked for their loss (``return_loss=True``); so
    does a CTC loss, which is a mean over rows (1 where the model's configuration asks for their sum).

    The weight does what ``num_items_in_batch`` does elsewhere: micro-batches with different numbers of tokens add up to
    the gradient of the whole batch.

    Args:
        metrics: name -> ``f(outputs, labels)``; without ``labels``, ``f(outputs, batch)``.
        causal: whether the model shifts the labels; None reads it from the model's class.
        ignore_index: labels that do not count; None: -100, or what the configuration of a segmentation model says.

    Raises:
        DataError: when called: a batch that is no mapping or has no labels.
        StepContractError: when called: the model returned no loss, or a metric none of what a `Metric` may.

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
            raise _no_loss(_module(model), named)
        labels = named.get("labels")
        targets, sized = (named if labels is None else labels), _sized(named)
        weight = _weight(model, labels, sized.shape[0], mean, causal=causal, ignore_index=ignore_index)
        values = {name: mean_of(metric(outputs, targets), sized) for name, metric in measured.items()}
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
    found = f"a mapping of {_names(batch)}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
    raise DataError(f"hf_loss needs a mapping with 'labels', and this is {found}", where="batch", hint=_HF_BATCH)


def _names(named: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, named)) or "nothing"


def _no_loss(module: Any, named: Mapping[str, Any]) -> StepContractError:
    forward = inspect.signature(getattr(module, "forward", module)).parameters
    taken = [name for name in forward if "label" in name and name not in named]
    hint = f"{' and '.join(map(repr, taken))} in the batch, which its forward takes" if taken else ""
    return StepContractError(
        f"the model returned no loss for a batch of {_names(named)}",
        where=type(module).__name__,
        hint=hint or "ps.supervised(criterion) for this model",
    )


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


def _weight(
    model: Any, labels: Any, rows: int, mean: Tensor, *, causal: bool | None, ignore_index: int | None
) -> Tensor:
    module = _module(model)
    name, config = type(module).__name__, getattr(module, "config", None)
    if "ForCTC" in name:
        return torch.full((), 1 if getattr(config, "ctc_loss_reduction", "") == "sum" else rows, device=mean.device)
    if not isinstance(labels, Tensor):
        return torch.full((), rows, device=mean.device)
    segments = "ForSemanticSegmentation" in name
    # What such a model says of one class alone, with or without it, is a mean over all elements.
    if labels.is_floating_point() or (segments and getattr(config, "num_labels", None) == 1):
        return torch.full((), labels.numel(), device=labels.device)
    if ignore_index is None:
        ignore_index = getattr(config, "semantic_loss_ignore_index", -100) if segments else -100
    shifts = _is_causal(module) if causal is None else causal
    return ((labels[..., 1:] if shifts else labels) != ignore_index).sum()


def _module(model: Any) -> Any:
    return getattr(model, "module", model)


def _is_causal(module: Any) -> bool:
    name = type(module).__name__
    if name.startswith(_UNSHIFTED) or getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        return False
    by_name = "CausalLM" in name or name.endswith(("LMHeadModel", "DoubleHeadsModel", "ForConditionalGeneration"))
    return by_name or getattr(module, "loss_type", "") in _CAUSAL
