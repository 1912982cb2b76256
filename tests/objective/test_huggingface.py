"""Hugging Face models from small configurations, dropout on: through fit as they are, eager and compiled."""

from __future__ import annotations

import math
import warnings
from collections import UserDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_trees_close
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

import purestep as ps
from purestep import optim

hf = pytest.importorskip("transformers")
from rigs.zoo import families  # noqa: E402

Batch = dict[str, Tensor]
Made = tuple[nn.Module, Batch]


def tokens(rows: int = 4, length: int = 12) -> Batch:
    ids = torch.randint(1, 64, (rows, length), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def gpt2(dropout: float = 0.1) -> Made:
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    return families.model("gpt2", "GPT2LMHeadModel", **rates), tokens()


def llama() -> Made:
    return families.model("llama", "LlamaForCausalLM"), tokens()


def clip() -> Made:
    ends = {"bos_token_id": 0, "eos_token_id": 63, "pad_token_id": 1}
    text, vision = (
        {**families.small(kind), **more} for kind, more in ((hf.CLIPTextConfig, ends), (hf.CLIPVisionConfig, {}))
    )
    images = torch.randn(4, 3, families.PIXELS, families.PIXELS, generator=torch.Generator().manual_seed(1))
    batch = tokens()
    del batch["labels"]
    config = hf.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16)
    return hf.CLIPModel(config), {**batch, "pixel_values": images}


def whisper() -> Made:
    places = {"max_source_positions": 16, "max_target_positions": 16, "num_mel_bins": 8, "suppress_tokens": None}
    sounds = torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(1))
    model = families.model("whisper", "WhisperForConditionalGeneration", **places)
    return model, {"input_features": sounds, "labels": tokens()["labels"]}


MODELS: dict[str, Callable[[], Made]] = {
    "gpt2": gpt2,
    "bert": partial(families.pair, "bert", "sequences"),
    "llama": llama,
    "qwen2": partial(families.pair, "qwen2", "causal"),
    "qwen3": partial(families.pair, "qwen3", "causal"),
    "vit": partial(families.pair, "vit", "images"),
    "t5": partial(families.pair, "t5", "seq2seq"),
    "clip": clip,
    "distilbert": partial(families.pair, "distilbert", "masked"),
    "whisper": whisper,
}
CONTRASTIVE = pytest.mark.filterwarnings("ignore:the loss of CLIPModel has no tensor of labels:UserWarning")


def trained(make: Callable[[], Made], compile: bool | dict[str, str]) -> ps.FitResult:
    torch.manual_seed(0)
    model, batch = make()
    program = ps.program(model, ps.hf_loss(), optim.adamw(3e-3))
    loaders = {"train": [batch] * 5, "val": [batch]}
    return ps.fit(program.init(0), loaders, program, epochs=2, compile=compile, progress=False)


@CONTRASTIVE
@pytest.mark.slow
@pytest.mark.row("1.19", "1.29")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_it_is_eager_and_traced_alike(name: str):
    make = MODELS[name]
    eager = trained(make, compile=False)
    first, last = eager.history["train_loss"]
    assert last < 0.93 * first
    assert eager.history["val_loss"][-1] < last  # without dropout, on what it was trained on
    traced = trained(make, compile={"backend": "aot_eager"})
    # Dropout too draws the same masks: the graph's operations are those of the eager step, in the same order.
    assert traced.history["train_loss"] == pytest.approx(eager.history["train_loss"], rel=1e-5)


@CONTRASTIVE
@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.soak] if name != "distilbert" else []) for name in MODELS]
)
def test_inductor_trains_it_as_eager(name: str):
    eager, compiled = (trained(MODELS[name], compile=how).history for how in (False, True))
    assert compiled == {name: pytest.approx(values, rel=1e-3) for name, values in eager.items()}


def test_a_model_that_no_capture_takes_is_told_the_line():
    class Choosy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = gpt2()[0]

        def forward(self, **batch: Tensor) -> Any:
            outputs = self.model(**batch)
            if outputs.loss > 3:  # a branch on the value of a tensor: this is the line
                outputs.loss = outputs.loss * 2
            return outputs

    lines = Path(__file__).read_text("utf-8").splitlines()
    line = next(n for n, text in enumerate(lines, 1) if text.endswith("this is the line"))
    program = ps.program(Choosy(), ps.hf_loss(causal=True), optim.sgd(0.1))
    with pytest.raises(ps.errors.StepContractError, match=rf"test_huggingface\.py:{line}: the step reads the value"):
        ps.fit(program.init(), [tokens()], program, epochs=1, compile={"backend": "aot_eager"}, progress=False)


def test_a_traced_step_obeys_the_padding_of_every_batch():
    """The first batch has none: had the trace kept that, the others would attend to their padding."""
    torch.manual_seed(0)
    program = ps.program(gpt2(dropout=0.0)[0], ps.hf_loss(), optim.sgd(0.1))
    padded = tokens()
    padded["attention_mask"][1, 5:] = 0
    padded["labels"][1, 5:] = -100
    compiled = ps.compile_step(program.train_step, backend="aot_eager")
    eager = graph = program.init()
    for batch in (tokens(), padded):
        eager, _ = program.train_step(eager, batch)
        graph, _ = compiled(graph, batch)
    assert compiled.graphs == 1
    assert_trees_close(graph.params, eager.params, rtol=1e-5, atol=1e-6)


# --- activation checkpointing -----------------------------------------------------------------------------------------


def checkpointed(model: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers 5.23 renames it, and keeps the name until 6
        model.gradient_checkpointing_enable()
    return model


def after_two_steps(
    make: Callable[[], Made], *, checkpoint: bool, graph: bool = False, engine: Any = "autograd"
) -> Any:
    torch.manual_seed(0)
    model, batch = make()
    program = ps.program(checkpointed(model) if checkpoint else model, ps.hf_loss(), optim.sgd(0.1), engine=engine)
    step = ps.compile_step(program.train_step, backend="aot_eager") if graph else program.train_step
    state = program.init(0)
    for _ in range(2):
        state, _ = step(state, batch)
    return state.params


@pytest.mark.parametrize("name", ["gpt2", "bert", "llama", "t5"])
def test_a_checkpointed_model_trains_as_without(name: str):
    make = MODELS[name]
    assert_trees_close(
        after_two_steps(make, checkpoint=True), after_two_steps(make, checkpoint=False), atol=1e-6, rtol=0
    )


def test_checkpointing_really_runs_the_layers_again():
    model, batch = llama()
    calls: list[int] = []

    def count(*_: Any) -> None:  # deepcopy keeps a function as it is, and so the list that it writes to
        calls.append(1)

    model.model.layers[0].mlp.register_forward_pre_hook(count)
    program = ps.program(checkpointed(model), ps.hf_loss(), optim.sgd(0.1))
    program.train_step(program.init(), batch)
    assert len(calls) == 2


def test_running_statistics_are_updated_once_though_the_layer_runs_twice():
    class Net(nn.Module):
        def __init__(self, again: bool) -> None:
            super().__init__()
            self.norm, self.again = nn.BatchNorm1d(3), again

        def forward(self, x: Tensor) -> Tensor:
            if not self.again:
                return self.norm(x)
            found: Any = torch.utils.checkpoint.checkpoint(self.norm, x, use_reentrant=False)
            return found

    batch = (torch.randn(8, 3), torch.randn(8, 3))
    steps = (ps.program(Net(again), ps.supervised(nn.MSELoss()), optim.sgd(0.1)) for again in (True, False))
    twice, once = (program.train_step(program.init(), batch)[0] for program in steps)
    assert_trees_close(twice.buffers, once.buffers, exact=True)
    assert int(once.buffers["norm.num_batches_tracked"]) == 1
    assert_trees_close(twice.params, once.params, exact=True)


def test_checkpointing_and_the_func_engine_do_not_go_together():
    with pytest.raises(RuntimeError, match="requires_grad_"):
        after_two_steps(gpt2, checkpoint=True, engine="func")


def test_a_checkpointed_step_is_traced_with_the_masks_it_drew():
    traced = after_two_steps(llama, checkpoint=True, graph=True)
    assert_trees_close(traced, after_two_steps(llama, checkpoint=False), atol=1e-6, rtol=0)


# --- adapters ---------------------------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A linear layer that stays as it is, plus a product of two thin matrices that is trained (LoRA)."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.lora_b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.lora_a.T @ self.lora_b.T


def adapted() -> nn.Module:
    torch.manual_seed(0)
    model = llama()[0].requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
        layer.self_attn.v_proj = Adapted(layer.self_attn.v_proj)
    return model


def test_adapters_over_frozen_weights_are_trained_and_exported_alone(tmp_path: Path):
    program = ps.program(adapted(), ps.hf_loss(), optim.adamw(0.03))
    assert program.static is not None
    state = program.init()
    result = ps.fit(state, {"train": [tokens()] * 5}, program, epochs=2, progress=False)
    first, last = result.history["train_loss"]
    assert last < first
    assert set(result.state.params) == set(program.static.trained)
    assert_trees_close(result.state.frozen, state.frozen, exact=True)

    ps.export_weights(tmp_path / "all.safetensors", program, result.state)
    for only in ("*lora_?", program.static.trained):
        ps.export_weights(tmp_path / "adapters.safetensors", program, result.state, only=only)
        exported = load_file(tmp_path / "adapters.safetensors")
        assert set(exported) == set(program.static.trained)
    assert (tmp_path / "adapters.safetensors").stat().st_size < (tmp_path / "all.safetensors").stat().st_size / 5

    model = adapted().eval()
    missing, unexpected = model.load_state_dict(exported, strict=False)
    assert not unexpected
    assert not [name for name in missing if "lora" in name]
    ids = tokens()["input_ids"]
    assert torch.equal(model(ids).logits, program.bind(result.state)(ids).logits)


def test_exporting_what_is_not_there_is_told_the_nearest_name(tmp_path: Path):
    program = ps.program(nn.Linear(2, 1), ps.supervised(nn.MSELoss()), optim.sgd(0.1))
    expected = "only: 'weigth' matches no weight .cure: the nearest names are 'weight'"
    with pytest.raises(ps.errors.ConfigError, match=expected):
        ps.export_weights(tmp_path / "w.pt", program, program.init(), only="weigth")
    assert not list(tmp_path.iterdir())


# --- batches and weights ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [hf.BatchEncoding, UserDict])
@pytest.mark.parametrize("compile", [False, {"backend": "aot_eager"}], ids=["eager", "compiled"])
def test_a_tokenizers_batch_is_a_batch(kind: Callable[[Batch], Any], compile: Any):
    model, batch = gpt2()
    program = ps.program(model, ps.hf_loss(), optim.adamw(3e-3))
    loaders = {"train": [kind(batch)] * 3, "val": [kind(batch)]}
    result = ps.fit(program.init(), loaders, program, epochs=1, compile=compile, progress=False)
    assert math.isfinite(result.history["val_loss"][0])


def in_full(logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | None = None, **_: Any) -> Tensor:
    shifted = functional.pad(labels, (0, 1), value=-100)[:, 1:]
    total = functional.cross_entropy(logits.flatten(0, 1), shifted.flatten(), reduction="sum")
    return total / ((shifted != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def test_unequal_token_counts_add_up_to_the_gradient_that_num_items_in_batch_gives():
    torch.manual_seed(0)
    model, batch = gpt2(dropout=0.0)
    model = model.double()
    model.loss_function = in_full  # transformers' own rounds the logits to float32
    batch["labels"][:2, 3:] = -100  # 2 x 2 tokens in one half, 2 x 11 in the other
    halves = [{name: value[rows] for name, value in batch.items()} for rows in (slice(0, 2), slice(2, 4))]

    def trained_by(accumulate: int, batches: list[Batch]) -> dict[str, Tensor]:
        program = ps.program(model, ps.hf_loss(), optim.sgd(0.5), precision="64-true", accumulate=accumulate)
        state = program.init()
        for part in batches:
            state, _ = program.train_step(state, part)
        return state.params

    whole, parts = trained_by(1, [batch]), trained_by(2, halves)
    assert_trees_close(parts, whole, rtol=0, atol=1e-9)
    optimizer = torch.optim.SGD(model.train().parameters(), 0.5)
    for part in halves:
        model(**part, num_items_in_batch=torch.tensor(26)).loss.backward()
    optimizer.step()
    assert_trees_close(parts, {name: p.detach() for name, p in model.named_parameters()}, rtol=0, atol=1e-9)
