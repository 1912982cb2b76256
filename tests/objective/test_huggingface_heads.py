"""Heads of transformers: `hf_loss` counts what each loss is a mean over, so micro-batches add up to their batch."""

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
BLOCKS = {
    **{"num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [3, 3]},
    **{"strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 8},
}
OWN = {"timesformer": {"num_frames": 4}, "segformer": BLOCKS, **dict.fromkeys(("wav2vec2", "hubert"), AUDIO)}
"""By family: what its configuration is made of, besides what the zoo says."""

SEVERAL = [[0.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]]
MANY = {"problem_type": "multi_label_classification"}
TWO = {"num_labels": 2}
SPOKEN = [[4, 5, -100], [6, -100, -100], [7, -100, -100]]

TABLE: list[tuple[str, str, Given, dict[str, Any], float]] = [
    # transformers' table, families, batch, settings, what the loss is a mean over
    ("CAUSAL_LM", "bert-generation bloom ctrl gpt2 llama opt qwen3", every_token, {}, 27),
    ("CAUSAL_LM", "bart cpmant marian trocr", every_token, {}, 30),  # they expect labels that are shifted
    ("MASKED_LM", "albert bert distilbert flaubert modernbert roberta", few_tokens, {}, 10),
    ("SEQ_TO_SEQ_CAUSAL_LM", "bart m2m_100 mt5 t5", translated, {}, 26),
    ("TOKEN_CLASSIFICATION", "bert llama", token_classes, {}, 30),
    ("QUESTION_ANSWERING", "bert llama", answers([1, 3, 2], [2, 4, 3]), TWO, 3),
    ("QUESTION_ANSWERING", "bert llama", answers([1, 40, 2], [2, 41, 3]), TWO, 2),  # one answer was cut off
    ("SEQUENCE_CLASSIFICATION", "electra llama", rows([1, 0, 2]), {}, 3),
    ("SEQUENCE_CLASSIFICATION", "bert gpt2", rows([1, -100, 2]), {}, 2),
    ("SEQUENCE_CLASSIFICATION", "bert gpt2", rows(SEVERAL), MANY, 9),
    ("SEQUENCE_CLASSIFICATION", "bert gpt2", rows([0.5, 1.0, -2.0]), {"num_labels": 1}, 3),
    ("MULTIPLE_CHOICE", "xlm", choices, {}, 3),
    ("NEXT_SENTENCE_PREDICTION", "fnet", rows([0, 1, 1]), {}, 3),
    ("IMAGE_CLASSIFICATION", "swin vit", pictures([0, 1, 1]), {}, 3),
    ("IMAGE_CLASSIFICATION", "vit", pictures(SEVERAL), MANY, 9),
    ("SEMANTIC_SEGMENTATION", "mobilenet_v2", segments, {}, 1504),
    ("SEMANTIC_SEGMENTATION", "segformer", segments, {"num_labels": 1}, 3 * PIXELS**2),
    ("VIDEO_CLASSIFICATION", "timesformer", videos, {}, 3),
    ("AUDIO_CLASSIFICATION", "hubert", waves([0, 1, 1]), {}, 3),
    ("CTC", "wav2vec2", waves(SPOKEN), {"ctc_loss_reduction": "mean"}, 3),
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


@pytest.mark.parametrize(("family", "name", "given", "settings", "counted"), list(heads()))
def test_the_parts_of_a_batch_add_up(
    family: str, name: str, given: Given, settings: dict[str, Any], counted: float
) -> None:
    """The loss is the model's own, and two micro-batches of one and two rows make the update of the whole batch."""
    net, batch = model(family, name, settings), in_double(given())
    parts = [{key: value[rows] for key, value in batch.items()} for rows in (slice(0, 1), slice(1, 3))]
    whole, added = (
        ps.program(net, ps.hf_loss(), ps.optim.sgd(0.5), precision="64-true", accumulate=count, keep_eval=("*",))
        for count in (1, 2)
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="the loss of")
        loss = ps.hf_loss()(net, batch)
        ps.testing.assert_accumulates(added, whole, batch, parts, rtol=1e-5)  # losses are computed in float32
    assert float(loss.weight) == counted
    assert loss.mean.item() == pytest.approx(net(**batch).loss.item(), rel=1e-5)


def test_a_sum_over_rows_counts_once_and_a_given_label_is_the_one_to_ignore() -> None:
    net = model("wav2vec2", "Wav2Vec2ForCTC", {"ctc_loss_reduction": "sum"})
    assert ps.hf_loss()(net, in_double(waves(SPOKEN)())).weight == 1
    net = model("mobilenet_v2", "MobileNetV2ForSemanticSegmentation", {})
    assert ps.hf_loss(ignore_index=-100)(net, in_double(segments())).weight == 3 * PIXELS**2


def test_twenty_families_are_in_the_table() -> None:
    assert len({family for _, families, *_ in TABLE for family in families.split()}) >= 20
