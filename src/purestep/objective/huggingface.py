"""The losses that Hugging Face models compute, and their weights."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from ..errors import DataError, StepContractError
from ..metrics import functions
from ..state import known_keywords
from ..types import Loss, Metric, Objective
from .measure import mean_of

_HF_BATCH = '{"input_ids": ..., "labels": ...}'
_CAUSAL = ("ForCausalLM", "ForConditionalGeneration")
_UNSHIFTED = (  # decoders that expect shifted labels, although their names say otherwise
    *("Bart", "BigBirdPegasus", "Blenderbot", "CpmAnt", "FlaubertWith", "MBart", "Marian", "Musicgen", "Mvp", "PLBart"),
    *("Pegasus", "ProphetNet", "TrOCR", "Whisper", "XLMWith", "XLNet"),
)
_SHIFTED = (  # further heads that shift labels
    *("LMHeadModel", "ModelWithLMHead", "DoubleHeadsModel", "ForConditionalGeneration", "ForCausalImageModeling"),
    *("BertGenerationDecoder", "Blip2Model", "BlipForQuestionAnswering", "ForProteinText2Text", "ForVisionText2Text"),
)
_ATTENDED = ("ElectraForPreTraining", "FunnelForPreTraining")
"""Their loss is a mean over the attended tokens, whatever the labels are."""
_UNKNOWN = (  # losses that are sums of several means, or means over boxes, masks, matched pairs or observed values
    *("ForPreTraining", "ForPretraining", "DoubleHeadsModel", "ForMaskedImageModeling", "ForObjectDetection"),
    *("ForSegmentation", "ForInstanceSegmentation", "ForUniversalSegmentation", "ForPanopticSegmentation"),
    *("ForDepthEstimation", "ForNormalEstimation", "ForPrediction", "ForVideoGrounding", "ForRNNT", "ForTDT"),
    *("ForTextToSpeech", "ForSpeechToSpeech", "ForGeneration", "ForKeypointMatching", "ForRegionToPhraseAlignment"),
    *("ForImageMatting", "ForPoseEstimation", "ForPointmapEstimation", "ForOpticalFlow", "ForMultimodalAutoencoding"),
    *(
        "FastSpeech2ConformerModel",
        "FastSpeech2ConformerWithHifiGan",
        "TapasForQuestionAnswering",
        "ForContrastiveLearning",
    ),
    *("MoshiForConditionalGeneration", "PI0ForConditionalGeneration", "TTSForConditionalGeneration"),
    *("CsmForConditionalGeneration", "HiggsAudioV2ForConditionalGeneration", "SegGptForImageSegmentation"),
    "BrosSpadeELForTokenClassification",
    *("MusicgenForCausalLM", "MusicgenForConditionalGeneration"),
    *("MusicgenMelodyForCausalLM", "MusicgenMelodyForConditionalGeneration"),
)
_CONTRASTIVE = ("Model", "ModelForConditionalGeneration")
"""Endings of the names of models that compare the rows of a batch with each other; they take ``return_loss``."""
_BIDIRECTIONAL = ("GemmaFor", "PaliGemmaFor")
"""Beginnings of the names of models whose attention, with `use_bidirectional_attention`, is causal or not by the batch:
transformers builds a causal mask for a batch with padding, and skips it for one without."""
_LABELS = ("label", "labels")
_LENGTHS = ("input_ids", "inputs_embeds", "input_features")
"""Inputs whose second dimension is the number of positions that an answer may begin or end at."""


@known_keywords
def hf_loss(
    *,
    metrics: Mapping[str, Metric | Any] | None = None,
    causal: bool | None = None,
    ignore_index: int | None = None,
    weight: Callable[[Mapping[str, Any]], Tensor | float] | None = None,
) -> Objective:
    """Build the objective of a Hugging Face model: the loss that the model computes, weighted by its counted labels.

    The batch is a mapping; the model receives it as keyword arguments. The weight has the role of
    ``num_items_in_batch`` in transformers: micro-batches with different numbers of tokens add up to the gradient of the
    whole batch. It is

    - the number of labels that are not ignored. A causal model predicts each label from the tokens before it, so the
      first label of every row does not count, except after the virtual tokens of PEFT's prompt tuning;
    - the number of rows for a batch without ``labels`` (two-tower models, which get ``return_loss=True``, and masked
      images) and for a CTC loss, which is a mean over rows (1 if the model's configuration sums them);
    - the number of answers (``start_positions``, ``end_positions``) within the tokens;
    - the number of attended tokens for discriminators (`ElectraForPreTraining`);
    - unknown for losses that are a sum of several means, or a mean over boxes, masks or observed values (pretraining
      with two heads, two kinds of labels, a router's loss, detection, forecasts): labels or rows are counted, with a
      warning. Contrastive losses (`CLIPModel`) warn too: they compare the rows of a batch, so micro-batches do not add
      up.

    Args:
        metrics: name -> ``f(outputs, labels)``; without ``labels``, ``f(outputs, batch)``. Objects and collections of
            torchmetrics as in `supervised`.
        causal: True if the model shifts the labels; None derives it from the model's class.
        ignore_index: the label value that does not count; None: -100, or that of a segmentation model's configuration.
        weight: ``f(batch)`` returns the count that the model's loss is a mean over, a number or a 0-d tensor; None: as
            above.

    Warns:
        UserWarning: when called, if the weight is unknown, the loss is no mean over rows, or rows attend differently
            with other rows (PaliGemma without ``token_type_ids``).

    Raises:
        DataError: when called, if the batch is not a mapping or has no labels.
        StepContractError: when called, if the model returns no loss, or a metric returns an invalid value.

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
    measured = functions(metrics)

    def objective(model: Any, batch: Any, /, *context: Any) -> Loss:
        del context  # A Hugging Face loss depends on the batch only.
        named = _labelled(model, batch)
        outputs = model(**named)
        _warn_of_skipped_mask(_module(model), named)
        mean = _loss_of(outputs)
        if mean is None:
            raise _no_loss(_module(model), named)
        labels = named.get("labels")
        targets, sized = (named if labels is None else labels), _sized(named)
        if weight is None:
            total = _weight(model, named, sized.shape[0], mean, causal=causal, ignore_index=ignore_index)
        else:
            total = torch.as_tensor(weight(named), device=mean.device)
        values = {name: mean_of(name, metric(outputs, targets), sized) for name, metric in measured.items()}
        return Loss(mean, total.to(torch.float32), values)

    return objective


def _labelled(model: Any, batch: Any) -> Mapping[str, Any]:
    """Return the keyword arguments with which a Hugging Face model returns a loss."""
    if isinstance(batch, Mapping):
        named = cast(Mapping[str, Any], batch)
        if any("label" in name or name in ("start_positions", "return_loss") for name in named):
            return named
        taken = inspect.signature(_base(_module(model)).forward).parameters
        if "return_loss" in taken:
            return {**named, "return_loss": True}
        if named and _has_own_targets(taken):
            return named
    found = f"a mapping of {_names(batch)}" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
    raise DataError(f"hf_loss needs a mapping with 'labels', but this is {found}", where="batch", hint=_HF_BATCH)


def _has_own_targets(taken: Mapping[str, inspect.Parameter]) -> bool:
    """True if the arguments of a forward are named and none is a label: its inputs are the targets (masked images)."""
    is_open = any(found.kind is found.VAR_POSITIONAL for found in taken.values())
    return not is_open and not any("label" in name or name == "start_positions" for name in taken)


def _names(named: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, named)) or "nothing"


def _no_loss(module: Any, named: Mapping[str, Any]) -> StepContractError:
    forward = inspect.signature(getattr(module, "forward", module)).parameters
    missing = [name for name in forward if "label" in name and name not in named]
    hint = f"add {' and '.join(map(repr, missing))}, arguments of its forward, to the batch" if missing else ""
    return StepContractError(
        f"the model returned no loss for a batch of {_names(named)}",
        where=type(module).__name__,
        hint=hint or "ps.supervised(criterion) for this model",
    )


def _loss_of(outputs: Any) -> Any:
    """Return the loss of a ModelOutput, a mapping, or a tuple (its first entry); None if there is none."""
    if isinstance(outputs, tuple) and not hasattr(cast(Any, outputs), "loss"):
        first: Any = cast(tuple[Any, ...], outputs)[0]
        return first if isinstance(first, Tensor) and first.dim() == 0 else None
    if isinstance(outputs, Mapping) and not hasattr(cast(Any, outputs), "loss"):
        return cast(Mapping[str, Any], outputs).get("loss")
    return getattr(outputs, "loss", None)


def _sized(named: Mapping[str, Any]) -> Tensor:
    """Return a tensor with the batch size: the labels if they are one tensor, else the first one with a dimension."""
    tensors = [value for value in (named.get("labels"), *named.values()) if isinstance(value, Tensor) and value.dim()]
    if not tensors:
        raise DataError("it has no tensor with a batch dimension", where="batch", hint=_HF_BATCH)
    return tensors[0]


def _weight(
    model: Any, batch: Mapping[str, Any], rows: int, mean: Tensor, *, causal: bool | None, ignore_index: int | None
) -> Tensor:
    module = _module(model)
    base = _base(module)
    name, config, labels = _head(base), getattr(module, "config", None), batch.get("labels")
    if "ForCTC" in name:
        return torch.full((), 1 if getattr(config, "ctc_loss_reduction", "") == "sum" else rows, device=mean.device)
    if name in _ATTENDED and isinstance(labels, Tensor):
        mask = batch.get("attention_mask")
        return (mask == 1).sum() if isinstance(mask, Tensor) else torch.full((), labels.numel(), device=labels.device)
    _warn_of_unknown(module, name, config, batch)
    if isinstance(batch.get("start_positions"), Tensor):
        return _answers(batch, rows)
    if not isinstance(labels, Tensor):
        return torch.full((), rows, device=mean.device)
    segments = "ForSemanticSegmentation" in name
    # With a single class, the loss of a segmentation model is a mean over all elements.
    if labels.is_floating_point() or (segments and getattr(config, "num_labels", None) == 1):
        return torch.full((), labels.numel(), device=labels.device)
    if ignore_index is None:
        ignore_index = getattr(config, "semantic_loss_ignore_index", -100) if segments else -100
    shifts = _is_causal(module) if causal is None else causal
    return ((labels[..., 1:] if shifts else labels) != ignore_index).sum()


def _answers(batch: Mapping[str, Any], rows: int) -> Tensor:
    """The number of answers that lie in the tokens. Models ignore the others, as a tokenizer cuts them off.

    The loss is half the mean over the starts and half the mean over the ends, so their numbers are averaged.
    """
    starts: Tensor = batch["start_positions"]
    length = next((batch[name].shape[1] for name in _LENGTHS if isinstance(batch.get(name), Tensor)), None)
    if length is None:
        return torch.full((), rows, device=starts.device)
    ends = batch.get("end_positions")
    places = [place for place in (starts, ends) if isinstance(place, Tensor)]
    return torch.stack([(place < length).sum() for place in places]).float().mean()


def _warn_of_unknown(module: Any, name: str, config: Any, batch: Mapping[str, Any]) -> None:
    cure = "(cure: ps.hf_loss(weight=lambda batch: ...))"
    if name.endswith(_CONTRASTIVE) and "labels" not in batch:
        text = (
            f"the loss of {name} compares the rows of a batch with each other: losses of micro-batches do not add up "
            f"to that of the batch; they are weighted by rows {cure}"
        )
    elif (why := _unknown(module, name, config, batch)) is not None:
        text = (
            f"the count that the loss of {name}{why} is a mean over is unknown: micro-batches and evaluations of "
            f"several batches are weighted by labels or rows, which may be inexact {cure}"
        )
    else:
        return
    warnings.warn(text, UserWarning, stacklevel=4)


def _warn_of_skipped_mask(module: Any, batch: Mapping[str, Any]) -> None:
    base = _base(module)
    name, config = _head(base), getattr(base, "config", None)
    if not name.startswith(_BIDIRECTIONAL) or not _setting(config, "use_bidirectional_attention"):
        return
    text = getattr(config, "text_config", config)
    is_skipped = getattr(text, "_attn_implementation", "") != "eager"
    if is_skipped and "attention_mask" in batch and "token_type_ids" not in batch:
        warnings.warn(
            f"the attention of {name} is causal in a batch with padding and in a compiled step, and bidirectional in "
            "an eager step on a batch without padding: micro-batches do not add up to their batch (cure: "
            + ("pass token_type_ids" if name.startswith("Pali") else "load the model with attn_implementation='eager'")
            + ")",
            UserWarning,
            stacklevel=3,
        )


def _unknown(module: Any, name: str, config: Any, batch: Mapping[str, Any]) -> str | None:
    """The reason why the count of a loss is unknown, as part of a sentence; "" for the head; None if it is known."""
    labels = [key for key in batch if key.endswith(_LABELS) and key != "shift_labels"]
    is_alone = name.endswith("DoubleHeadsModel") and "mc_labels" not in batch
    if (name.endswith(_UNKNOWN) and not is_alone) or _virtual_tokens(module) == "CPT":
        return ""
    if batch.get("output_router_logits", _setting(config, "output_router_logits")):
        return " with the loss of its router (output_router_logits)"
    if _setting(config, "z_loss_coefficient"):
        return " with its z_loss_coefficient"
    if "bbox_first_token_mask" in batch:
        return " with bbox_first_token_mask"
    if len(labels) > 1:
        return f" with {' and '.join(labels)}"
    return f" with {labels[0]}" if labels and labels[0] != "labels" and _is_wide(batch[labels[0]]) else None


def _setting(config: Any, name: str) -> Any:
    """A setting of a configuration, or of the one that it has for its language model."""
    return getattr(config, name, getattr(getattr(config, "text_config", None), name, None))


def _is_wide(found: Any) -> bool:
    return isinstance(found, Tensor) and found.dim() > 1


def _module(model: Any) -> Any:
    return getattr(model, "module", model)


def _base(module: Any) -> Any:
    """Return the model inside of a `peft.PeftModel`, whose class has the name of the task type only."""
    unwrap = getattr(module, "get_base_model", None)
    return module if unwrap is None else unwrap()


def _head(base: Any) -> str:
    """Return the name of the first class from transformers among the model's bases, else that of its own class."""
    kinds = type(base).__mro__
    heads = (kind.__name__ for kind in kinds if kind.__module__.startswith("transformers.models."))
    return next(heads, kinds[0].__name__)


def _virtual_tokens(module: Any) -> str:
    """Return the PEFT type if PEFT prepends virtual tokens with labels to the tokens, else ""."""
    config = getattr(module, "active_peft_config", None)
    if config is None or not getattr(config, "is_prompt_learning", False):
        return ""
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    return "" if kind == "PREFIX_TUNING" else kind  # Prefix tuning changes keys and values only.


def _is_causal(module: Any) -> bool:
    """Return True if the first label of a row does not count, because no token is before it."""
    if _virtual_tokens(module):
        return False
    base = _base(module)
    name = _head(base)
    if name.startswith(_UNSHIFTED) or getattr(getattr(base, "config", None), "is_encoder_decoder", False):
        return False
    return "CausalLM" in name or name.endswith(_SHIFTED) or getattr(base, "loss_type", "") in _CAUSAL
