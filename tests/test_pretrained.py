"""Models of transformers and PEFT: trained as they are, written in their own form, and loaded without a warning."""

from __future__ import annotations

import copy
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_trees_close
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

import purestep as ps
from purestep import optim
from purestep.tools.export import weights

hf = pytest.importorskip("transformers", reason="transformers is in the extra purestep[hf]")
from rigs.zoo import families  # noqa: E402

# PEFT 0.21 reads it of every model, and transformers 5.23 has renamed it.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
Made = tuple[nn.Module, dict[str, Tensor]]
Logged = list[str]

FAMILIES = {
    "bert": "sequences",
    "gpt2": "causal",  # tied
    "llama": "causal",
    "t5": "seq2seq",  # tied under three or four names
    "vit": "images",
    "distilbert": "masked",  # tied
    "roberta": "masked",  # tied, with a bias under two names
    "opt": "causal",
    "mistral": "causal",
    "electra": "sequences",
    "resnet": "images",  # BatchNorm's buffers
    "bart": "seq2seq",  # it has a buffer, final_logits_bias
}
"""By the family's name in transformers: the kind of its head and batches in `zoo.families.HEADS`."""


def made(family: str, **more: Any) -> Made:
    return families.pair(family, FAMILIES[family], **more)


def trained(
    model: nn.Module, batch: Any, steps: int = 2, tx: optim.Transform | None = None, **fields: Any
) -> tuple[ps.Program, ps.TrainState]:
    program = ps.program(model, ps.hf_loss(), tx or optim.adamw(3e-3), **fields)
    assert program.init is not None
    state = program.init(0)
    for _ in range(steps):
        state, _ = program.train_step(state, batch)
    return program, state


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def save(directory: Path, model: Any, state: ps.TrainState, view: str | None = None) -> None:
    ps.load_into(model, state, view)
    model.save_pretrained(directory)


def files(directory: Path) -> dict[str, Any]:
    """Every file's bytes; the settings of adapters as PEFT reads them, which keeps names in sets without an order."""

    def content(path: Path) -> Any:
        if path.name != "adapter_config.json":
            return path.read_bytes()
        settings = json.loads(path.read_text("utf-8"))
        return {name: sorted(value) if isinstance(value, list) else value for name, value in settings.items()}

    return {str(path.relative_to(directory)): content(path) for path in directory.rglob("*") if path.is_file()}


@pytest.fixture
def logged() -> Iterator[Logged]:
    """The warnings that transformers and PEFT log, which pytest does not turn into errors."""
    found: Logged = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())

    handler = Kept(logging.WARNING)
    loggers = [logging.getLogger(name) for name in ("transformers", "peft")]
    for logger in loggers:
        logger.addHandler(handler)
    yield found
    for logger in loggers:
        logger.removeHandler(handler)


# --- transformers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_saved_and_loads_without_a_warning(family: str, tmp_path: Path, logged: Logged):
    model, batch = made(family)
    program, state = trained(model, batch)
    logged.clear()  # what a model says of its first forward pass is no matter of saving
    save(tmp_path, model, state)

    loaded, told = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert logged == []
    assert not any(told.values())
    assert_equal(dict(loaded.state_dict()), weights(program, state))
    assert_equal({**dict(loaded.named_buffers())}, state.buffers)


@pytest.mark.compile
@pytest.mark.parametrize("family", ["gpt2", "vit"])
def test_a_compiled_family_is_saved_as_well(family: str, tmp_path: Path, logged: Logged):
    model, batch = made(family)
    program = ps.program(model, ps.hf_loss(), optim.adamw(3e-3), ema=0.9)
    compiled = ps.compile_program(program, donate=True, backend="aot_eager")
    state = compiled.init(0)
    for _ in range(2):
        state, _ = compiled.train_step(state, batch)
    logged.clear()
    for view in ("params", "ema"):
        save(tmp_path / view, model, state, view)
        loaded = type(model).from_pretrained(tmp_path / view)
        assert_equal(dict(loaded.state_dict()), weights(program, state, view))
    assert logged == []


def test_the_average_is_saved_unless_the_view_says_otherwise(tmp_path: Path):
    model, batch = made("gpt2")
    _, state = trained(model, batch, ema=0.5)
    found = {}
    for view in (None, "ema", "params"):
        save(tmp_path / str(view), model, state, view)
        found[view] = load_file(tmp_path / str(view) / "model.safetensors")
    assert_equal(found[None], found["ema"])
    name = "transformer.wte.weight"
    assert torch.equal(found["ema"][name], ps.view(state, "ema").params[name])
    assert torch.equal(found["params"][name], state.params[name])
    assert not torch.equal(found["ema"][name], found["params"][name])


# --- PEFT -------------------------------------------------------------------------------------------------------------

ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", {"r": 4, "lora_dropout": 0.1, "target_modules": ["q_proj", "v_proj"]}),
    "DoRA": ("LoraConfig", {"r": 4, "use_dora": True, "target_modules": ["q_proj"]}),
    "LoRA and a whole head": ("LoraConfig", {"r": 4, "modules_to_save": ["lm_head"], "target_modules": ["q_proj"]}),
    "IA3": ("IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "prompt tuning": ("PromptTuningConfig", {"num_virtual_tokens": 3}),
}


def adapted(name: str = "LoRA", **more: Any) -> tuple[nn.Module, dict[str, Tensor], Callable[[], nn.Module]]:
    """A Llama with adapters, its batch, and a function that builds the same Llama again without them."""
    peft = pytest.importorskip("peft", reason="peft is in the extra purestep[hf]")
    kind, fields = ADAPTERS[name]

    def base() -> nn.Module:
        torch.manual_seed(3)
        return made("llama", **more)[0]

    torch.manual_seed(0)
    return peft.get_peft_model(base(), getattr(peft, kind)(task_type="CAUSAL_LM", **fields)), made("llama")[1], base


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapters_are_trained_alone_and_saved_in_pefts_own_form(name: str, tmp_path: Path, logged: Logged):
    model, batch, base = adapted(name)
    before = copy.deepcopy(model.state_dict())
    program, state = trained(model, batch)
    assert set(state.params) == {name for name, value in model.named_parameters() if value.requires_grad}
    assert_trees_close(state.frozen, {name: before[name] for name in state.frozen}, exact=True)
    assert not any(torch.equal(value, before[name]) for name, value in state.params.items())

    save(tmp_path, model, state)
    peft = pytest.importorskip("peft")
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path)
    assert logged == []
    assert_equal(dict(loaded.state_dict()), weights(program, state))
    found = files(tmp_path)
    assert found.keys() == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert len(found["adapter_model.safetensors"]) < sum(value.nbytes for value in before.values())


def test_adapters_train_as_in_a_loop_by_hand():
    model, batch, _ = adapted("DoRA", attention_dropout=0.0)
    _, state = trained(model, batch, steps=3, tx=optim.sgd(0.5))
    optimizer = torch.optim.SGD([p for p in model.train().parameters() if p.requires_grad], 0.5)
    for _ in range(3):
        optimizer.zero_grad()
        model(**batch).loss.backward()
        optimizer.step()
    expected = {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}
    assert_trees_close(state.params, expected, rtol=1e-5, atol=1e-6)


def test_several_adapters(tmp_path: Path):
    model, batch, base = adapted()
    peft = pytest.importorskip("peft")
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["k_proj"], task_type="CAUSAL_LM"))
    model.set_adapter("second")
    program, state = trained(model, batch)
    assert all("second" in name for name in state.params)
    save(tmp_path, model, state)
    assert {"adapter_model.safetensors", "second/adapter_model.safetensors"} <= files(tmp_path).keys()
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path)
    loaded.load_adapter(tmp_path / "second", "second")
    assert_equal(dict(loaded.state_dict()), weights(program, state))


def test_adapters_that_transformers_holds_itself(tmp_path: Path, logged: Logged):
    """``model.add_adapter``: the model stays a PreTrainedModel, and only its adapters are saved."""
    peft = pytest.importorskip("peft", reason="peft is in the extra purestep[hf]")
    torch.manual_seed(3)
    model, batch = made("llama")
    frozen = copy.deepcopy(model)
    model.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    program, state = trained(model, batch)
    save(tmp_path, model, state)
    assert "adapter_model.safetensors" in files(tmp_path)
    assert "model.safetensors" not in files(tmp_path)
    frozen.load_adapter(str(tmp_path))
    assert_equal(dict(frozen.state_dict()), weights(program, state))
    assert logged == []


@pytest.mark.parametrize("name", ["a whole model", "adapters"])
def test_a_checkpointed_model_trains_and_is_saved(name: str, tmp_path: Path):
    model, batch = made("llama") if name == "a whole model" else adapted()[:2]
    _, expected = trained(model, batch)
    checkpointed = copy.deepcopy(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # transformers 5.23 renames it, and keeps the name until 6
        checkpointed.gradient_checkpointing_enable()
    _, state = trained(checkpointed, batch)
    assert_trees_close(state.params, expected.params, rtol=0, atol=1e-5)  # AdamW enlarges what rounds differently
    save(tmp_path / "on", checkpointed, state)
    save(tmp_path / "off", model, state)
    assert files(tmp_path / "on") == files(tmp_path / "off")


# --- batches ----------------------------------------------------------------------------------------------------------


def rows() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 9, (12,), generator=generator).tolist()
    return [torch.randint(3, families.VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def tokenizer() -> Any:
    """A tokenizer of numbers, from no file: token 7 is the word "7"."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({str(n): n for n in range(families.VOCABULARY)}, unk_token="1")
    made = tokenizers.Tokenizer(words)
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="0", unk_token="1")


def test_a_collators_batch_encoding_is_a_batch():
    words = tokenizer()
    encoded = [words(" ".join(map(str, row))) for row in rows()]
    collate = hf.DataCollatorForLanguageModeling(words, mlm=False)
    loader = DataLoader(encoded, 4, collate_fn=collate)
    batches = [dict(batch) for batch in loader]
    assert all(isinstance(batch, hf.BatchEncoding) for batch in loader)
    assert (batches[0]["labels"] == -100).any()
    model, _ = made("gpt2")
    (_, state), (_, expected) = (run(model, found) for found in (loader, batches))
    assert_trees_close(state.params, expected.params, exact=True)


def test_a_dataset_of_datasets_is_a_dataset():
    """With ``set_format("torch")`` its rows are dicts of tensors, its batches too; one with rows of one length needs
    no collator."""
    datasets = pytest.importorskip("datasets", reason="pip install datasets")
    ids = torch.randint(3, families.VOCABULARY, (12, 8), generator=torch.Generator().manual_seed(1))
    dataset = datasets.Dataset.from_dict({"input_ids": ids.tolist(), "labels": ids.tolist(), "text": ["a"] * 12})
    dataset.set_format("torch", columns=["input_ids", "labels"])
    batches = [{"input_ids": part, "labels": part} for part in ids.split(4)]
    model, _ = made("gpt2")
    (_, expected), (_, state) = (run(model, found) for found in (batches, DataLoader(dataset, 4)))
    assert_trees_close(state.params, expected.params, exact=True)
    (history, _), (again, _) = (run(model, DataLoader(dataset, 4, shuffle=True)) for _ in range(2))
    assert history == again


def test_a_dataset_of_datasets_goes_on_where_it_was(tmp_path: Path):
    datasets = pytest.importorskip("datasets", reason="pip install datasets")
    ids = [[*rows()[0], 3 + index] for index in range(12)]
    dataset = datasets.Dataset.from_dict({"input_ids": ids, "labels": ids}).with_format("torch")
    model, _ = made("gpt2")
    for directory, epochs in (("whole", [2]), ("parts", [1, 2])):
        for count in epochs:
            _, state = run(model, DataLoader(dataset, 4, shuffle=True), count, snapshots=tmp_path / directory)
            if directory == "whole":
                expected = state
    assert_trees_close(state.params, expected.params, exact=True)


def run(model: nn.Module, loader: Any, epochs: int = 1, **fields: Any) -> tuple[dict[str, list[Any]], ps.TrainState]:
    program = ps.program(model, ps.hf_loss(), optim.adamw(3e-3))
    result = ps.fit(program.init(0), {"train": loader}, program, epochs=epochs, progress=False, **fields)
    return {"loss": result.history["train_loss"]}, result.state
