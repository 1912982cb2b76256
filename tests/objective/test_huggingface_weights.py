"""What a Hugging Face loss is a mean over: parts of a batch add up to the batch, or a warning says why not."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import assert_trees_close
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
    return hf.ElectraForPreTraining(config), batch(ids() % 2)


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


class CLIPModel(nn.Linear):
    def forward(self, pixel_values: Tensor, return_loss: bool = False) -> Any:
        return {"loss": super().forward(pixel_values).logsumexp(0).mean() if return_loss else None}


def contrastive() -> Any:
    return CLIPModel(2, 1), {"pixel_values": torch.ones(3, 2)}


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


DOUBTED = {
    electra: "is of an unknown kind: it is weighted by labels",
    two_heads: "has labels and next_sentence_label",
    detector: "has no tensor of labels.*weighted by rows",
    contrastive: "may compare the rows of a batch with each other.*weighted by rows",
    masked_images: "has no tensor of labels",
    routed: "output_router_logits",
    with_entities: "has labels and entity_labels",
    regularized: "z_loss_coefficient",
    autoencoder: "weighted by rows",
}


@pytest.mark.parametrize("make", DOUBTED)
def test_a_loss_that_may_not_add_up_is_said_and_can_be_weighted(make: Any) -> None:
    model, inputs = make()
    with pytest.warns(UserWarning, match=rf"the loss of \w+ .*{DOUBTED[make]}.*cure: ps\.hf_loss\(weight=lambda"):
        ps.hf_loss()(model, inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        weight = ps.hf_loss(weight=lambda batch: 7)(model, inputs).weight
    assert (weight, weight.dtype) == (7, torch.float32)


def test_a_batch_without_labels_names_the_arguments_that_are_missing() -> None:
    with pytest.raises(ps.errors.StepContractError, match="no loss for a batch of 'input_ids'.*add 'labels'"):
        ps.hf_loss()(renamed()[0], {"input_ids": ids()})


def test_the_count_is_not_passed_to_a_model_that_does_not_take_it() -> None:
    class Closed(hf.GPT2LMHeadModel):
        accepts_loss_kwargs = False

        def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> Any:
            return super().forward(input_ids, attention_mask=attention_mask, labels=labels)

    model, inputs, counted = renamed()
    model.eval()
    closed = Closed(model.config).eval()
    closed.load_state_dict(model.state_dict())
    open_loss, own = ps.hf_loss()(model, inputs), ps.hf_loss()(closed, inputs)
    assert own.weight == open_loss.weight == counted
    assert own.mean.item() == pytest.approx(open_loss.mean.item(), rel=1e-6)


def test_a_users_own_torch_compile_reads_the_step_and_says_the_doubt() -> None:
    model, inputs = routed()
    program = ps.program(model, ps.hf_loss(), optim.sgd(0.1))
    state = program.init()
    with pytest.warns(UserWarning, match="output_router_logits"):
        new, _ = torch.compile(program.train_step, backend="eager")(state, inputs)
    with pytest.warns(UserWarning, match="output_router_logits"):
        old, _ = program.train_step(state, inputs)
    assert_trees_close(new.params, old.params, rtol=1e-5, atol=1e-6)


def gpt2_with(kind: str | None, config_of: Any = None) -> Any:
    """As `peft.PeftModelForCausalLM` shows itself; peft is not among the packages of the tests."""

    class PeftModelForCausalLM(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base_model = base
            self.config = base.config
            if kind is not None:
                self.active_peft_config = SimpleNamespace(is_prompt_learning=True, peft_type=kind)

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
