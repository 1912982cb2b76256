"""The losses that Hugging Face models compute, and their weights."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import DataError, StepContractError
from ..metrics import torchmetrics
from ..state import known_keywords
from ..torch_ext import tracing
from ..types import Loss, Metric, Objective
from .measure import mean_of

_HF_BATCH = '{"input_ids": ..., "labels": ...}'
_OVER_LABELS = (
    *("CausalLM", "LMHeadModel", "MaskedLM", "ConditionalGeneration", "MTModel", "EncoderDecoderModel"),
    *("SequenceClassification", "TokenClassification", "ImageClassification", "VideoClassification"),
    *("AudioClassification", "AudioFrameClassification", "ForXVector", "SemanticSegmentation"),
    *("MultipleChoice", "NextSentencePrediction", "ForCTC"),
)
"""Kinds of heads whose loss is a mean over labels, as parts of the names that transformers gives to classes."""


@known_keywords
def hf_loss(
    *,
    metrics: Mapping[str, Metric | Any] | None = None,
    causal: bool | None = None,
    ignore_index: int | None = None,
    weight: Callable[[Mapping[str, Any]], Tensor | float] | None = None,
) -> Objective:
    """Build the objective of a Hugging Face model: the loss that the model computes, weighted by its counted labels.

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

    The batch is a mapping; the model receives it as keyword arguments. The weight is the number of labels that are not
    ignored. A causal model predicts each label from the tokens before it, so the first label of every row does not
    count. A model that takes ``num_items_in_batch``, as most of transformers do, receives this number and divides by
    it: micro-batches with different numbers of labels then add up to the gradient of the whole batch, whatever its loss
    is a mean over. For other models the weight is exact if their loss is a mean over the labels.

    Floating labels count each element, a CTC loss counts rows (1 if the model's configuration sums them), and
    ``start_positions`` and ``end_positions`` count the answers within the tokens. Without any of them rows are counted,
    and a warning says so; two-tower models then get ``return_loss=True``. A warning also says if the loss has further
    terms (two kinds of labels, a router's loss), or if its kind is unknown (pretraining, detection).

    Args:
        metrics: name -> ``f(outputs, labels)``; without ``labels``, ``f(outputs, batch)``. Objects and collections of
            torchmetrics as in `supervised`.
        causal: True if the model shifts the labels; None derives it from the model's loss and class.
        ignore_index: the label value that does not count; None: -100, or that of a segmentation model's configuration.
        weight: ``f(batch)`` returns the count that the model's own loss is a mean over, a number or a 0-d tensor; None:
            as above.

    Warns:
        UserWarning: when called, if micro-batches may not add up to their batch.

    Raises:
        DataError: when called, if the batch is not a mapping, or no tensor has rows.
        StepContractError: when called, if the model returns no loss, or a metric returns an invalid value.
    """
    measured = torchmetrics.functions(metrics)

    def objective(model: Any, batch: Any, /, *context: Any) -> Loss:
        del context  # A Hugging Face loss depends on the batch only.
        if not isinstance(batch, Mapping):
            found = f"this is a {type(batch).__name__}"
            raise DataError(f"hf_loss needs a mapping with 'labels', but {found}", where="batch", hint=_HF_BATCH)
        named = dict(cast(Mapping[str, Any], batch))
        module = getattr(model, "module", model)
        # A `peft.PeftModel` has the name of the task type only.
        base = module.get_base_model() if hasattr(module, "get_base_model") else module
        given, sized = dict(named), _sized(named)
        if "labels" not in named and _takes(type(base), "return_loss"):
            given["return_loss"] = True
        is_divided = weight is None and _divides(base)
        if weight is None:
            total = _count(module, base, named, sized, causal=causal, ignore_index=ignore_index)
        else:
            total = torch.as_tensor(weight(named))
        if is_divided:
            given["num_items_in_batch"] = total
        outputs = model(**given)
        mean = _loss_of(outputs)
        if mean is None:
            raise _no_loss(module, named)
        if weight is None:
            _warn_of_doubt(base, named, is_divided=is_divided)
        targets = named.get("labels", named)
        values = {name: mean_of(name, metric(outputs, targets), sized) for name, metric in measured.items()}
        return Loss(mean, total.to(mean.device, torch.float32), values)

    return objective


def _sized(named: Mapping[str, Any]) -> Tensor:
    """Return a tensor with the batch size: the labels if they are one tensor, else the first one with a dimension."""
    tensors = [value for value in (named.get("labels"), *named.values()) if isinstance(value, Tensor) and value.dim()]
    if not tensors:
        raise DataError("it has no tensor with a batch dimension", where="batch", hint=_HF_BATCH)
    return tensors[0]


def _loss_of(outputs: Any) -> Any:
    """Return the loss of a ModelOutput, a mapping, or a tuple (its first entry); None if there is none."""
    if isinstance(outputs, tuple) and not hasattr(cast(Any, outputs), "loss"):
        first: Any = cast(tuple[Any, ...], outputs)[0]
        return first if isinstance(first, Tensor) and first.dim() == 0 else None
    if isinstance(outputs, Mapping) and not hasattr(cast(Any, outputs), "loss"):
        return cast(Mapping[str, Any], outputs).get("loss")
    return getattr(outputs, "loss", None)


def _no_loss(module: Any, named: Mapping[str, Any]) -> StepContractError:
    taken = inspect.signature(getattr(module, "forward", module)).parameters
    missing = [name for name in taken if "label" in name and name not in named]
    hint = f"add {' and '.join(map(repr, missing))}, arguments of its forward, to the batch" if missing else ""
    return StepContractError(
        f"the model returned no loss for a batch of {', '.join(map(repr, named)) or 'nothing'}",
        where=type(module).__name__,
        hint=hint or "ps.supervised(criterion) for this model",
    )


def _count(
    module: Any, base: Any, batch: Mapping[str, Any], sized: Tensor, *, causal: bool | None, ignore_index: int | None
) -> Tensor:
    """The number that the loss is divided by, shape=()."""
    name, config = type(base).__name__, getattr(base, "config", None)
    labels, rows = batch.get("shift_labels", batch.get("labels")), sized.shape[0]
    if "ForCTC" in name:
        rows = 1 if getattr(config, "ctc_loss_reduction", "") == "sum" else rows
    elif isinstance(labels, Tensor):
        is_segmented = "SemanticSegmentation" in name
        # With a single class, the loss of a segmentation model is a mean over all elements.
        if labels.is_floating_point() or (is_segmented and getattr(config, "num_labels", None) == 1):
            return torch.full((), labels.numel(), device=labels.device)
        if ignore_index is None:
            ignore_index = getattr(config, "semantic_loss_ignore_index", -100) if is_segmented else -100
        shifts = _shifts(module, base) if causal is None else causal
        return ((labels[..., 1:] if shifts and "shift_labels" not in batch else labels) != ignore_index).sum()
    elif isinstance(batch.get("start_positions"), Tensor):
        # The loss is half a mean over the starts and half one over the ends. Models ignore what lies behind the tokens.
        length = next((v.shape[1] for v in batch.values() if isinstance(v, Tensor) and v.dim() > 1), None)
        places = [batch[name] for name in ("start_positions", "end_positions") if name in batch]
        if length is not None:
            return torch.stack([(place < length).sum() for place in places]).float().mean()
    return torch.full((), rows, device=sized.device)


def _shifts(module: Any, base: Any) -> bool:
    """True if the first label of a row does not count, because no token is before it."""
    adapter: Any = getattr(module, "active_peft_config", None)
    config, name = getattr(base, "config", None), _head(base)
    if getattr(adapter, "is_prompt_learning", False) and adapter.peft_type != "PREFIX_TUNING":
        return False  # Virtual tokens of PEFT are before it.
    if getattr(config, "is_encoder_decoder", False):
        return False
    is_causal = "CausalLM" in name or "LMHeadModel" in name or "ConditionalGeneration" in name
    if _calls_loss_function(type(base)):
        loss = base.loss_function
        return loss.__name__ == "ForCausalLMLoss" or (is_causal and not loss.__module__.startswith("transformers."))
    # Decoders of transformers that compute a loss without it expect labels that are shifted already.
    return is_causal and ("ConditionalGeneration" in name or not hasattr(type(base), "loss_function"))


def _divides(base: Any) -> bool:
    """True if a model's loss is divided by ``num_items_in_batch``; the rule of transformers' own Trainer."""
    if not _calls_loss_function(type(base)):
        return False
    takes = getattr(base, "accepts_loss_kwargs", None)
    return bool(takes) if takes is not None else _takes(type(base), "**")


def _head(base: Any) -> str:
    """The name of the first class from transformers among the model's bases, else that of the model's class."""
    names = [kind.__name__ for kind in type(base).__mro__ if kind.__module__.startswith("transformers.models.")]
    return names[0] if names else type(base).__name__


def _warn_of_doubt(base: Any, batch: Mapping[str, Any], *, is_divided: bool) -> None:
    """Warn if the loss of a batch may be something else than a mean over what was counted."""
    name, config = _head(base), getattr(base, "config", None)
    labels = [key for key in batch if key.endswith(("label", "labels")) and key != "shift_labels"]
    text = getattr(config, "text_config", config)
    is_routed = batch.get("output_router_logits", getattr(text, "output_router_logits", False))
    is_counted = isinstance(batch.get("labels", batch.get("start_positions")), Tensor)
    is_known = is_divided or "start_positions" in batch or any(kind in name for kind in _OVER_LABELS)
    if is_routed or getattr(text, "z_loss_coefficient", 0):
        why = "has further terms (output_router_logits, z_loss_coefficient)"
    elif len(labels) > 1:
        why = f"has {' and '.join(labels)}"
    elif not is_counted:
        why = "has no tensor of labels, and may compare the rows of a batch with each other"
    elif hasattr(type(base), "loss_function") and not is_known:
        why = "is of an unknown kind"
    else:
        return
    _say(
        f"the loss of {name} {why}: it is weighted by {'labels' if is_counted else 'rows'}, and the losses of "
        "micro-batches may not add up to that of their batch (cure: ps.hf_loss(weight=lambda batch: ...))"
    )


# Dynamo, in a user's `torch.compile`, reads none of these, so it calls them once.


@tracing.constant_in_graph
def _say(text: str) -> bool:
    warnings.warn(text, UserWarning, stacklevel=4)
    return True


@tracing.constant_in_graph
def _takes(kind: type, name: str) -> bool:
    """True if the forward of a class of models has an argument of this name; ``**``: if it takes any."""
    return name in _arguments(kind)


@tracing.constant_in_graph
def _calls_loss_function(kind: type) -> bool:
    """True if a class of transformers leaves its loss to ``self.loss_function``, which counts by one rule."""
    return "loss_function" in _read_names(kind)


@functools.cache
def _arguments(kind: Any) -> frozenset[str]:
    found = inspect.signature(kind.forward).parameters.values()
    return frozenset("**" if one.kind is one.VAR_KEYWORD else one.name for one in found)


@functools.cache
def _read_names(kind: Any) -> frozenset[str]:
    """The names of attributes that a class's forward reads, those of its bases included."""
    if not hasattr(kind, "loss_function"):
        return frozenset()
    forwards = [inspect.unwrap(vars(base)["forward"]) for base in kind.__mro__ if "forward" in vars(base)]
    return frozenset(name for forward in forwards if hasattr(forward, "__code__") for name in forward.__code__.co_names)
