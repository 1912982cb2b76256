"""The heads of transformers' tables: `hf_loss` weighs by what each loss is a mean over, so that parts of a batch add up
to the whole batch, however it is cut."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rigs.zoo import families
from torch import Tensor, nn

import purestep as ps

hf = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")

CLASSES, LENGTH, PIXELS = families.CLASSES, 16, families.PIXELS
Given = Callable[[], dict[str, Tensor]]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


def attended() -> dict[str, Tensor]:
    """Three rows of 16, 9 and 5 tokens."""
    ids = torch.randint(3, families.VOCABULARY, (3, LENGTH), generator=generator())
    return {"input_ids": ids, "attention_mask": (torch.arange(LENGTH) < torch.tensor([[16], [9], [5]])).long()}


def every_token() -> dict[str, Tensor]:
    given = attended()
    return {**given, "labels": given["input_ids"].masked_fill(given["attention_mask"] == 0, -100)}


def few_tokens() -> dict[str, Tensor]:
    given = attended()
    kept = torch.arange(LENGTH) < torch.tensor([[7], [2], [1]])
    return {**given, "labels": given["input_ids"].masked_fill(~kept, -100)}


def token_classes() -> dict[str, Tensor]:
    given = every_token()
    labels = given["labels"]
    return {**given, "labels": labels.where(labels == -100, labels % CLASSES)}


def translated() -> dict[str, Tensor]:
    return {**attended(), "labels": every_token()["labels"][:, :12].contiguous()}


def rows(labels: Any) -> Given:
    return lambda: {**attended(), "labels": torch.tensor(labels)}


def answers(starts: list[int], ends: list[int]) -> Given:
    return lambda: {**attended(), "start_positions": torch.tensor(starts), "end_positions": torch.tensor(ends)}


def choices() -> dict[str, Tensor]:
    pairs = {name: torch.stack([value, value.flip(0)], 1) for name, value in attended().items()}
    return {**pairs, "labels": torch.tensor([0, 1, 1])}


def pictures(labels: Any) -> Given:
    pixels = torch.randn(3, 3, PIXELS, PIXELS, generator=generator())
    return lambda: {"pixel_values": pixels, "labels": torch.tensor(labels)}


def in_double(given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.double() if value.is_floating_point() else value for name, value in given.items()}


def segments() -> dict[str, Tensor]:
    kinds = torch.randint(CLASSES, (3, PIXELS, PIXELS), generator=generator())
    ignored = torch.arange(PIXELS).view(PIXELS, 1) >= torch.tensor([32, 12, 3]).view(3, 1, 1)
    return {**pictures(0)(), "labels": kinds.masked_fill(ignored, 255)}


def videos() -> dict[str, Tensor]:
    frames = torch.randn(3, 4, 3, PIXELS, PIXELS, generator=generator())
    return {"pixel_values": frames, "labels": torch.tensor([0, 1, 1])}


def waves(labels: Any) -> Given:
    mask = (torch.arange(1600) < torch.tensor([[1600], [900], [700]])).long()
    sound = torch.randn(3, 1600, generator=generator())
    return lambda: {"input_values": sound, "attention_mask": mask, "labels": torch.tensor(labels)}


def series() -> dict[str, Tensor]:
    draw = generator()
    return {"past_values": torch.randn(3, 16, 2, generator=draw), "target_values": torch.randn(3, 2, generator=draw)}


AUDIO = {  # two convolutions, small heads
    **{"conv_dim": [8, 8], "conv_stride": [5, 4], "conv_kernel": [10, 8], "num_feat_extract_layers": 2},
    **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 8},
    **{"apply_spec_augment": False, "tdnn_dim": [8, 8], "tdnn_kernel": [1, 1], "tdnn_dilation": [1, 1]},
}
OWN = {
    "timesformer": {"num_frames": 4},
    **dict.fromkeys(("wav2vec2", "hubert", "wavlm", "sew", "data2vec-audio", "unispeech"), AUDIO),
}
"""By family: what its configuration is made of, besides what the zoo says."""

SEVERAL = [[0.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
MANY = {"problem_type": "multi_label_classification"}
TWO = {"num_labels": 2}
SPOKEN = [[4, 5, -100], [6, -100, -100], [7, -100, -100]]
TEXT = "albert bert distilbert deberta electra fnet mobilebert modernbert mpnet roberta xlm yoso"
BOTH = f"{TEXT} gpt2 llama qwen3"
SEEN = "beit convnext deit mobilenet_v2 regnet resnet swin vit"
HEARD = "data2vec-audio hubert sew unispeech wav2vec2 wavlm"

TABLE: list[tuple[str, str, Given, dict[str, Any], int]] = [
    # transformers' table, families, batch, settings, what the loss is a mean over
    ("CAUSAL_LM", "bert-generation biogpt bloom ctrl gpt2 gpt_neox llama opt qwen3 rwkv", every_token, {}, 27),
    ("CAUSAL_LM", "bart blenderbot cpmant marian mbart pegasus plbart trocr", every_token, {}, 30),
    ("MASKED_LM", f"{TEXT} flaubert longformer tapas", few_tokens, {}, 10),
    (
        "SEQ_TO_SEQ_CAUSAL_LM",
        "bart blenderbot led m2m_100 marian mt5 pegasus switch_transformers t5",
        translated,
        {},
        26,
    ),
    ("TOKEN_CLASSIFICATION", f"{TEXT} gpt2 llama longformer", token_classes, {}, 30),
    ("QUESTION_ANSWERING", f"{BOTH} bart mt5", answers([1, 3, 2], [2, 4, 3]), TWO, 3),
    ("QUESTION_ANSWERING", f"{BOTH} bart mt5", answers([1, 40, 2], [2, 41, 3]), TWO, 2),  # one answer was cut off
    ("SEQUENCE_CLASSIFICATION", BOTH, rows([1, 0, 2]), {}, 3),
    ("SEQUENCE_CLASSIFICATION", BOTH, rows([1, -100, 2]), {}, 2),
    ("SEQUENCE_CLASSIFICATION", BOTH, rows(SEVERAL), MANY, 9),
    ("SEQUENCE_CLASSIFICATION", BOTH, rows([0.5, 1.0, -2.0]), {"num_labels": 1}, 3),
    ("MULTIPLE_CHOICE", "albert bert distilbert electra modernbert roberta xlm", choices, {}, 3),
    ("NEXT_SENTENCE_PREDICTION", "bert ernie fnet megatron-bert mobilebert", rows([0, 1, 1]), {}, 3),
    ("IMAGE_CLASSIFICATION", SEEN, pictures([0, 1, 1]), {}, 3),
    ("IMAGE_CLASSIFICATION", SEEN, pictures(SEVERAL), MANY, 9),
    ("SEMANTIC_SEGMENTATION", "mobilenet_v2", segments, {}, 1504),
    ("VIDEO_CLASSIFICATION", "timesformer", videos, {}, 3),
    ("AUDIO_CLASSIFICATION", HEARD, waves([0, 1, 1]), {}, 3),
    ("CTC", "hubert sew unispeech wav2vec2 wavlm", waves(SPOKEN), {"ctc_loss_reduction": "mean"}, 3),
    ("AUDIO_XVECTOR", "data2vec-audio wav2vec2 wavlm", waves([0, 1, 1]), {}, 3),
    ("CAUSAL_IMAGE_MODELING", "imagegpt", every_token, {}, 27),
]


def heads() -> Iterator[Any]:
    tables = importlib.import_module("transformers.models.auto.modeling_auto")
    for kind, names, given, settings, counted in TABLE:
        table = getattr(tables, f"MODEL_FOR_{kind}_MAPPING_NAMES")
        for family in names.split():
            found = table[family]
            name = found if isinstance(found, str) else found[0]
            yield pytest.param(family, name, given, settings, counted, id=f"{name}-{counted}")


def model(family: str, name: str, settings: dict[str, Any]) -> nn.Module:
    """In float64 and without dropout."""
    torch.manual_seed(0)
    return families.model(family, name, **OWN.get(family, {}), **settings).double().eval()


def parts_of(net: nn.Module, batch: dict[str, Tensor]) -> tuple[list[ps.Loss], list[ps.Loss]]:
    """The loss of a batch, and those of its first row and of the others."""
    objective: Any = ps.hf_loss()

    def losses(*cuts: slice) -> list[ps.Loss]:
        return [objective(net, {name: value[rows] for name, value in batch.items()}) for rows in cuts]

    with torch.no_grad():
        return losses(slice(None)), losses(slice(0, 1), slice(1, 3))


def mean(losses: list[ps.Loss]) -> float:
    return float(sum(loss.mean * loss.weight for loss in losses) / sum(loss.weight for loss in losses))


@pytest.mark.parametrize(("family", "name", "given", "settings", "counted"), list(heads()))
def test_the_parts_of_a_batch_add_up(
    family: str, name: str, given: Given, settings: dict[str, Any], counted: int
) -> None:
    net = model(family, name, settings)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the count that|the loss of")
        whole, parts = parts_of(net, in_double(given()))
    assert [float(loss.weight) for loss in whole] == [counted]
    assert sum(float(loss.weight) for loss in parts) == counted
    assert mean(parts) == pytest.approx(mean(whole), rel=1e-6)
