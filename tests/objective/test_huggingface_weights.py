"""What a Hugging Face loss is a mean over: parts of a batch add up to the batch, or a warning says why not."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purestep as ps
from purestep import optim

hf = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def ids(rows: int = 3, length: int = 16) -> Tensor:
    return torch.randint(3, 60, (rows, length), generator=torch.Generator().manual_seed(1))


def batch(labels: Tensor | None = None) -> dict[str, Tensor]:
    mask = torch.ones(3, 16, dtype=torch.int64)
    mask[1, 9:], mask[2, 4:] = 0, 0
    tokens = ids()
    return {
        "input_ids": tokens,
        "attention_mask": mask,
        "labels": tokens.masked_fill(mask == 0, -100) if labels is None else labels,
    }


def electra() -> Any:
    config = hf.ElectraConfig(vocab_size=60, embedding_size=16, **SMALL, **QUIET)
    return hf.ElectraForPreTraining(config), batch(ids() % 2), 29


def funnel() -> Any:
    rates = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
    config = hf.FunnelConfig(vocab_size=60, block_sizes=[1, 1], d_model=32, n_head=2, d_head=16, d_inner=32, **rates)
    return hf.FunnelForPreTraining(config), batch(ids() % 2), 29


def reformer() -> Any:
    shapes = {"axial_pos_shape": [4, 4], "axial_pos_embds_dim": [16, 16], "attn_layers": ["local"]}
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "attention_head_size": 8, "feed_forward_size": 32}
    rates = {"hidden_dropout_prob": 0.0, "local_attention_probs_dropout_prob": 0.0, "local_attn_chunk_length": 4}
    config = hf.ReformerConfig(vocab_size=60, is_decoder=True, pad_token_id=0, **shapes, **sizes, **rates)
    return hf.ReformerModelWithLMHead(config), batch(), 26


def bert_generation() -> Any:
    config = hf.BertGenerationConfig(vocab_size=60, max_position_embeddings=16, is_decoder=True, **SMALL, **QUIET)
    return hf.BertGenerationDecoder(config), batch(), 26


def prophetnet() -> Any:
    sizes = {"num_decoder_layers": 1, "num_encoder_layers": 1, "num_decoder_attention_heads": 2, "ngram": 2}
    rates = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "max_position_embeddings": 32}
    config = hf.ProphetNetConfig(vocab_size=60, hidden_size=32, decoder_ffn_dim=32, **sizes, **rates)
    return hf.ProphetNetForCausalLM(config), batch(), 29


def renamed() -> Any:
    class Mine(hf.GPT2LMHeadModel):
        pass

    rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0}
    return Mine(hf.GPT2Config(vocab_size=60, n_positions=32, n_embd=32, n_layer=1, n_head=2, **rates)), batch(), 26


def unmasked_prophetnet() -> Any:
    model, inputs, counted = prophetnet()
    del inputs["attention_mask"]  # which makes the loss of this model nan
    return model, inputs, counted


def xlnet() -> Any:
    config = hf.XLNetConfig(vocab_size=60, d_model=32, n_layer=1, n_head=2, d_inner=32, dropout=0.0)
    return hf.XLNetLMHeadModel(config), batch(), 29


def questions() -> Any:
    ends = {"bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 2, "pad_token_id": 0}
    text = {"vocab_size": 60, "encoder_hidden_size": 32, "max_position_embeddings": 32, **ends, **SMALL, **QUIET}
    vision = {"image_size": 16, "patch_size": 8, **SMALL}
    model = hf.BlipForQuestionAnswering(hf.BlipConfig(text_config=text, vision_config=vision, projection_dim=16))
    pixels = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    labels = ids(3, 8).where(torch.arange(8) < torch.tensor([[8], [5], [3]]), 0)
    return model, {**batch(labels), "pixel_values": pixels}, 21


MODELS = [electra, funnel, reformer, bert_generation, renamed, unmasked_prophetnet, xlnet, questions]


def cut_off() -> Any:
    """One answer lies behind the last token, as the tokenizer cut it off; the end of another one does."""
    model = hf.BertForQuestionAnswering(hf.BertConfig(vocab_size=60, max_position_embeddings=16, **SMALL, **QUIET))
    inputs = batch()
    del inputs["labels"]
    return model, {**inputs, "start_positions": torch.tensor([3, 20, 0]), "end_positions": torch.tensor([4, 21, 16])}


def test_answers_behind_the_last_token_do_not_count() -> None:
    model, inputs = cut_off()
    assert ps.hf_loss()(model, inputs).weight == 1.5  # two starts, one end
    assert ps.hf_loss()(model, {**inputs, "end_positions": torch.tensor([4, 21, 2])}).weight == 2
    embedded = {**inputs, "inputs_embeds": model.bert.embeddings.word_embeddings(inputs["input_ids"])}
    del embedded["input_ids"]
    assert ps.hf_loss()(model, embedded).weight == 1.5


def test_a_contrastive_loss_is_said_not_to_add_up() -> None:
    class CLIPModel(nn.Linear):
        def forward(self, pixel_values: Tensor, return_loss: bool = False) -> Any:
            return {"loss": super().forward(pixel_values).logsumexp(0).mean() if return_loss else None}

    with pytest.warns(
        UserWarning, match=r"loss of CLIPModel compares the rows of a batch with each other.*\(cure: ps\."
    ):
        assert ps.hf_loss()(CLIPModel(2, 1), {"pixel_values": torch.ones(3, 2)}).weight == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ps.hf_loss(weight=lambda batch: 5)(CLIPModel(2, 1), {"pixel_values": torch.ones(3, 2)}).weight == 5


GEMMA = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def paligemma() -> tuple[Any, dict[str, Tensor]]:
    sizes = {**SMALL, "image_size": 16, "patch_size": 8, "projection_dim": 32, "vision_use_head": False}
    text = {"model_type": "gemma", **GEMMA}
    config = hf.PaliGemmaConfig(text_config=text, vision_config=sizes, image_token_id=2, projection_dim=32)
    inputs = batch()
    inputs["attention_mask"][2, 4:8] = 1
    inputs["labels"][2, 4:8] = inputs["input_ids"][2, 4:8]
    for name in ("input_ids", "labels"):
        inputs[name][:, :4] = 2 if name == "input_ids" else -100
    return hf.PaliGemmaForConditionalGeneration(config), {**inputs, "pixel_values": torch.ones(3, 3, 16, 16)}


def gemma(kind: str = "eager") -> tuple[Any, dict[str, Tensor]]:
    config = hf.GemmaConfig(use_bidirectional_attention=True, **GEMMA)
    config._attn_implementation = kind
    return hf.GemmaForCausalLM(config), batch()


ATTEND_BY_ROW = {
    "PaliGemma with token_type_ids": lambda: (
        (made := paligemma())[0],
        {**made[1], "token_type_ids": (made[1]["input_ids"] != 2).long()},
    ),
    "Gemma with a mask always": gemma,
}
ATTEND_BY_BATCH = {"PaliGemma": paligemma, "Gemma": lambda: gemma("sdpa")}


@pytest.mark.parametrize("name", [*ATTEND_BY_ROW, *ATTEND_BY_BATCH])
def test_rows_that_attend_otherwise_beside_padding_are_warned_of(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = (ATTEND_BY_ROW | ATTEND_BY_BATCH)[name]()
    said = r"bidirectional in an eager step on a batch without padding.*\(cure: (pass token_type_ids|load the model)"
    with pytest.warns(UserWarning, match=said) if name in ATTEND_BY_BATCH else warnings.catch_warnings():
        objective = ps.hf_loss()
        whole = objective(model, inputs)
        parts = [objective(model, {key: value[row : row + 1] for key, value in inputs.items()}) for row in range(3)]
    assert whole.weight == sum(part.weight for part in parts)
    summed = sum(part.mean * part.weight for part in parts) / whole.weight
    assert torch.allclose(whole.mean, summed, rtol=1e-6) == (name in ATTEND_BY_ROW)


def test_a_model_without_labels_in_its_forward_needs_none() -> None:
    model, inputs = autoencoder()
    assert ps.hf_loss(weight=lambda batch: 2)(model, inputs).mean > 0
    with pytest.raises(ps.errors.DataError, match="needs a mapping with 'labels'"):
        ps.hf_loss()(renamed()[0], {"input_ids": ids()})


@pytest.mark.filterwarnings("ignore:.*not initialized")
@pytest.mark.parametrize("make", MODELS)
def test_parts_add_up_to_the_batch(make: Any) -> None:
    torch.manual_seed(0)
    model, inputs, counted = make()
    found: list[float] = []
    for parts in (1, 3):
        program = ps.program(model.double(), ps.hf_loss(), optim.sgd(0.1), precision="64-true", microbatches=parts)
        _, metrics = program.train_step(program.init(), inputs)
        assert metrics["loss"].weight == counted
        found.append(float(metrics["loss"]))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_a_discriminator_without_a_mask_weighs_every_token() -> None:
    model, inputs, _ = electra()
    del inputs["attention_mask"]
    assert ps.hf_loss()(model, inputs).weight == 48


def two_heads() -> Any:
    config = hf.BertConfig(vocab_size=60, max_position_embeddings=16, **SMALL, **QUIET)
    return hf.BertForPreTraining(config), {**batch(), "next_sentence_label": torch.tensor([0, 1, 1])}


def detector() -> Any:
    class YolosForObjectDetection(nn.Linear):
        def forward(self, pixel_values: Tensor, labels: Any) -> Any:
            return {"loss": super().forward(pixel_values).mean()}

    return YolosForObjectDetection(2, 1), {
        "pixel_values": torch.ones(3, 2),
        "labels": [{"boxes": torch.ones(1, 4)}] * 3,
    }


def masked_images() -> Any:
    sizes = {"image_size": 16, "patch_size": 8, "encoder_stride": 8}
    masked = torch.tensor([[1, 0, 1, 0], [1, 1, 1, 1]]).bool()
    model = hf.ViTForMaskedImageModeling(hf.ViTConfig(**SMALL, **sizes))
    return model, {"pixel_values": torch.ones(2, 3, 16, 16), "bool_masked_pos": masked}


def routed() -> Any:
    sizes = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = hf.MixtralConfig(vocab_size=60, **SMALL, **sizes, output_router_logits=True)
    return hf.MixtralForCausalLM(config), batch()


def with_entities() -> Any:
    sizes = {"entity_vocab_size": 9, "entity_emb_size": 8, "max_position_embeddings": 32}
    model = hf.LukeForMaskedLM(hf.LukeConfig(vocab_size=60, **SMALL, **QUIET, **sizes))
    ones = torch.ones(3, 2, dtype=torch.int64)
    entities = {"entity_ids": ones, "entity_attention_mask": ones, "entity_position_ids": torch.ones(3, 2, 4).long()}
    return model, {**batch(), **entities, "entity_labels": torch.tensor([[1, 2], [3, -100], [-100, -100]])}


def regularized() -> Any:
    sizes = {"num_key_value_heads": 2, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1}
    config = hf.BambaConfig(vocab_size=60, **SMALL, **sizes, attn_layer_indices=[0], z_loss_coefficient=0.1)
    return hf.BambaForCausalLM(config), batch()


def autoencoder() -> Any:
    decoder = {f"decoder_{name}": value for name, value in SMALL.items()}
    model = hf.ViTMAEForPreTraining(hf.ViTMAEConfig(**SMALL, **decoder, image_size=16, patch_size=8))
    return model, {"pixel_values": torch.ones(2, 3, 16, 16)}


SUMS = [two_heads, detector, masked_images, routed, with_entities, regularized, autoencoder]


@pytest.mark.parametrize("make", SUMS)
def test_a_weight_that_is_not_known_is_told_and_can_be_given(make: Any) -> None:
    model, inputs = make()
    cure = r"the count that the loss of \w+( with .*)? is a mean over is unknown.*cure: ps\.hf_loss\(weight=lambda"
    with pytest.warns(UserWarning, match=cure):
        ps.hf_loss()(model, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weight = ps.hf_loss(weight=lambda batch: 7)(model, inputs).weight
    assert (weight, weight.dtype) == (7, torch.float32)


def gpt2_with(kind: str | None, config_of: Any = None) -> Any:
    """As `peft.PeftModelForCausalLM` shows itself; peft is not among the packages of the tests."""

    class PeftModelForCausalLM(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base_model = base
            self.config = base.config
            if kind is not None:
                self.active_peft_config = SimpleNamespace(
                    is_prompt_learning=True, peft_type=SimpleNamespace(value=kind)
                )

        def get_base_model(self) -> nn.Module:
            return self.base_model

        def forward(self, labels: Tensor, **inputs: Tensor) -> Any:
            return self.base_model(labels=labels, **inputs)

    return PeftModelForCausalLM((config_of or renamed)()[0])


@pytest.mark.parametrize(
    ("kind", "counted"), [(None, 26), ("PREFIX_TUNING", 26), ("PROMPT_TUNING", 29), ("P_TUNING", 29)]
)
def test_behind_virtual_tokens_the_first_label_counts(kind: str | None, counted: int) -> None:
    assert ps.hf_loss()(gpt2_with(kind), batch()).weight == counted
    assert ps.hf_loss(causal=True)(gpt2_with(kind), batch()).weight == 26


def test_adapters_are_weighed_as_the_model_inside_of_them() -> None:
    assert ps.hf_loss()(gpt2_with(None, prophetnet), batch()).weight == 29
    assert ps.hf_loss()(gpt2_with(None, electra), batch(ids() % 2)).weight == 29


@pytest.mark.peer
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PromptEncoderConfig", "PrefixTuningConfig"])
def test_peft_itself(kind: str) -> None:
    peft = pytest.importorskip("peft")
    sizes = {"encoder_hidden_size": 16} if kind == "PromptEncoderConfig" else {}
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=4, **sizes)
    torch.manual_seed(0)
    model, inputs = peft.get_peft_model(renamed()[0], config).double(), batch()
    counted = 26 if kind == "PrefixTuningConfig" else 29
    assert ps.hf_loss()(model, inputs).weight == counted
    means = list[float]()
    for parts in (1, 3):
        program = ps.program(model, ps.hf_loss(), optim.sgd(0.1), precision="64-true", microbatches=parts)
        means.append(float(program.train_step(program.init(), inputs)[1]["loss"]))
    assert means[0] == pytest.approx(means[1], rel=1e-6)
