"""Models of transformers: every family that has a head of a known kind, from a configuration that is shrunk.

A configuration gets those of `SMALL` that it has, and what `OWN` says of its family. What is still large then, or does
not build, has a row that says so.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .compare import Entry
from .models import CLASSES, own_loss

LIBRARY = "transformers"
LARGEST = 3_000_000
"""Parameters; a model with more is not built."""
VOCABULARY = 99
LENGTH = 8
PIXELS = 32

_WIDTH, _LAYERS, _HEADS = 32, 2, 2
SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "n_vocab"), VOCABULARY),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "embedding_size"), _WIDTH),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers"), _LAYERS),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers", "num_encoder_layers"), _LAYERS),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads"), _HEADS),
    **dict.fromkeys(("decoder_attention_heads", "num_key_value_heads", "num_kv_heads"), _HEADS),
    **dict.fromkeys(("intermediate_size", "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_dim", "n_inner"), 64),
    **dict.fromkeys(("ffn_hidden_size", "hidden_dim", "moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 64),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("head_dim", "d_kv"), 16),
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"), 0),
    **dict.fromkeys(("image_size",), PIXELS),
    **dict.fromkeys(("patch_size",), 8),
    "num_labels": CLASSES,
}
OWN: dict[str, dict[str, Any]] = {
    "swin": {"depths": [1, 1], "num_heads": [2, 2], "embed_dim": 16, "window_size": 4, "patch_size": 4},
    "swinv2": {"depths": [1, 1], "num_heads": [2, 2], "embed_dim": 16, "window_size": 4, "patch_size": 4},
    "convnext": {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16], "patch_size": 4},
    "convnextv2": {"depths": [1, 1, 1, 1], "hidden_sizes": [8, 8, 16, 16], "patch_size": 4},
    "resnet": {"embedding_size": 8, "depths": [1, 1], "hidden_sizes": [8, 16]},
    "regnet": {"embedding_size": 8, "depths": [1, 1], "hidden_sizes": [8, 16], "groups_width": 4},
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "longformer": {"attention_window": 4},
    # By itself it makes other attention layers at its first forward pass, for short rows, and draws their weights.
    "big_bird": {"attention_type": "original_full"},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "xlm": {"emb_dim": _WIDTH, "n_words": VOCABULARY},
    "flaubert": {"emb_dim": _WIDTH, "n_words": VOCABULARY},
    "canine": {"num_hash_buckets": 64, "local_transformer_stride": 4, "downsampling_rate": 2},
}
"""By the family's name in transformers: its configuration's own."""

Batches = Callable[[int, torch.Generator], dict[str, Tensor]]


def _ids(rows: int, generator: torch.Generator, length: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, length), generator=generator)


def _attended(rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Tokens, of which the first row's last two are padding if it is not the only one."""
    mask = torch.ones(rows, LENGTH, dtype=torch.long)
    mask[0, LENGTH - 2 :] = int(rows == 1)
    return {"input_ids": _ids(rows, generator), "attention_mask": mask}


def tokens(rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Every token has a label, but for the padding."""
    batch = _attended(rows, generator)
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def classes(rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Tokens and a class for each row."""
    return {**_attended(rows, generator), "labels": torch.randint(CLASSES, (rows,), generator=generator)}


def translated(rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Tokens and shorter labels."""
    return {**_attended(rows, generator), "labels": _ids(rows, generator, LENGTH - 2)}


def pictures(rows: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Pictures of three channels and a class for each."""
    pixels = torch.randn(rows, 3, PIXELS, PIXELS, generator=generator)
    return {"pixel_values": pixels, "labels": torch.randint(CLASSES, (rows,), generator=generator)}


HEADS: dict[str, tuple[str, Batches]] = {
    "causal": ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", tokens),
    "masked": ("MODEL_FOR_MASKED_LM_MAPPING_NAMES", tokens),
    "seq2seq": ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", translated),
    "images": ("MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES", pictures),
    "sequences": ("MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES", classes),
}
"""By kind: transformers' table of the classes with this head, and their batches. A family has one row, its first."""


def entries() -> Iterator[Entry]:
    """A row for each family, by the kind of its head; nothing is built before it is trained."""
    seen = set[str]()
    for kind in HEADS:
        for family, name in _classes(kind).items():
            if not {family, name} & seen:
                seen.update((family, name))
                yield row(family, kind)
    yield detr()


def row(family: str, kind: str) -> Entry:
    """The row of a family with the head of a kind."""
    name = _classes(kind)[family]
    return own_loss(name, lambda: model(family, name), HEADS[kind][1], LIBRARY)


def _classes(kind: str) -> dict[str, str]:
    """By family: the name of its class with the head of a kind."""
    table = getattr(importlib.import_module("transformers.models.auto.modeling_auto"), HEADS[kind][0])
    return {family: names if isinstance(names, str) else names[0] for family, names in table.items()}


def model(family: str, name: str, **more: Any) -> nn.Module:
    """A model of a class of transformers with random weights, dropout as its configuration has it by itself.

    Raises:
        ValueError: it has more than `LARGEST` parameters.
    """
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[family]
    config = kind(**{**small(kind), **OWN.get(family, {}), **more})
    if hasattr(config, "is_decoder") and name.endswith(("CausalLM", "LMHeadModel")):
        config.is_decoder = True
    made = getattr(transformers, name)
    if getattr(config, "is_encoder_decoder", False):
        config.decoder_start_token_id = 0
    with torch.device("meta"):
        size = sum(leaf.numel() for leaf in made(config).parameters())
    if size > LARGEST:
        raise ValueError(f"too large: {size / 1e6:.0f} M parameters")
    return made(config)


def pair(family: str, kind: str, **more: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model with the head of a kind, and a batch of four rows."""
    return model(family, _classes(kind)[family], **more), HEADS[kind][1](4, torch.Generator().manual_seed(1))


def small(kind: Any) -> dict[str, Any]:
    """Those of `SMALL` that a class of configurations has, in its own types."""
    usual = kind()
    found = dict[str, Any]()
    for name, value in SMALL.items():
        if name in getattr(usual, "attribute_map", {}):
            continue
        had = getattr(usual, name, None)
        is_number = isinstance(had, int) and not isinstance(had, bool)
        if is_number or (name.endswith("token_id") and hasattr(usual, name)):
            found[name] = value
    found["num_labels"] = CLASSES
    rates = [name for name, had in vars(usual).items() if "drop" in name and "layer" not in name and had == 0.0]
    return {**found, **{name: 0.1 for name in rates if isinstance(getattr(usual, name), float)}}


def detr() -> Entry:
    """A detection head whose targets are lists of one dict a picture, matched on the host."""

    def make() -> nn.Module:
        import transformers

        backbone = transformers.ResNetConfig(
            embedding_size=8, depths=[1, 1], hidden_sizes=[8, 16], out_features=["stage2"]
        )
        config = transformers.DetrConfig(
            **{
                **small(transformers.DetrConfig),
                "use_timm_backbone": False,
                "backbone_config": backbone,
                "backbone": None,
            },
            num_queries=4,
        )
        return transformers.DetrForObjectDetection(config)

    def batch(rows: int, generator: torch.Generator) -> dict[str, Any]:
        targets = [
            {
                "class_labels": torch.randint(CLASSES, (2,), generator=generator),
                "boxes": torch.rand(2, 4, generator=generator) / 4 + 0.25,
            }
            for _ in range(rows)
        ]
        return {"pixel_values": torch.randn(rows, 3, PIXELS, PIXELS, generator=generator), "labels": targets}

    return own_loss("DetrForObjectDetection", make, batch, LIBRARY)
