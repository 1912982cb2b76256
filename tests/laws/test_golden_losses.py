"""Twenty losses of six programs in each mode: numbers that no refactoring may move.

Compiled, donated and eager steps of a program compute the same losses up to rounding, dropout included, so one list
serves all ways to call a step. The exception is a user's own step: compiled, it seeds once and not once for each
program inside it, which gives other dropout masks. Processors round differently: lists are compared within a tolerance.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import purestep as ps
from purestep import optim, schedules

PATH = Path(__file__).parents[1] / "golden" / "losses.json"
STEPS = 20
BATCHES = 4  # different ones, taken in turn
TOLERANCE = {"plain": 5e-5, "accumulated": 5e-5, "fp16": 2e-2, "own": 5e-5, "own compiled": 5e-5}
"""Largest relative difference of a loss. Without vector instructions the float32 losses differ by less than 1e-6."""

ADVICE = f"""{{name}}, {{mode}}, {{way}}: the losses are no longer what they were, first at step {{step}}
is {{found}}
was {{wanted}}

Losses after a real change (a formula, an order of random numbers, a default) differ by more than rounding. If that is
meant, say so in CHANGELOG.md, since resumed runs go on differently, and record the losses again with

    PYTHONPATH=src python tests/laws/{Path(__file__).name}

If nothing was meant to change, the code is wrong.
"""


# --- models -----------------------------------------------------------------------------------------------------------


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 8))


def toy() -> nn.Module:
    """Eight small layers with dropout."""
    layers = [part for _ in range(7) for part in (nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1))]
    return nn.Sequential(*layers, nn.Linear(16, 8))


def convnet() -> nn.Module:
    """Three convolutions with BatchNorm."""
    layers: list[nn.Module] = []
    for before, after in ((3, 8), (8, 16), (16, 16)):
        conv = nn.Conv2d(before, after, 3, stride=1 if before == 3 else 2, padding=1, bias=False)
        layers += [conv, nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 8))


class Block(nn.Module):
    """Attention, then two linear layers; a mask of tokens to skip, or causal."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x_BTD: Tensor, seen_BT: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.norm1(x_BTD)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mask = None if seen_BT is None else seen_BT[:, None, None, :]
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x_BTD = x_BTD + self.out(mixed.transpose(1, 2).flatten(2))
        return x_BTD + self.down(functional.gelu(self.up(self.norm2(x_BTD))))


class GPT(nn.Module):
    """Two causal blocks; the embedding is also the head."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(64, 32), nn.Embedding(24, 32)
        self.blocks = nn.ModuleList(Block(32, 2) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 64, bias=False)
        self.head.weight = self.token.weight
        nn.init.normal_(self.token.weight, std=0.1)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.token(tokens_BT) + self.position.weight[: tokens_BT.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))


class LSTM(nn.Module):
    """Two recurrent layers with dropout between."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(32, 16)
        self.layers = nn.LSTM(16, 24, num_layers=2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(24, 32)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return self.head(self.layers(self.token(tokens_BT))[0])


class Adapted(nn.Module):
    """A frozen linear layer and two trained matrices of low rank."""

    def __init__(self, frozen: nn.Linear, rank: int) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


class Encoder(nn.Module):
    """Two blocks above padded tokens, frozen but for adapters, norms and the head."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(32, 32).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(32, 2) for _ in range(2))
        block: Any
        for block in self.blocks:
            block.qkv, block.up = Adapted(block.qkv, 4), Adapted(block.up, 4)
            block.out.requires_grad_(False)
            block.down.requires_grad_(False)
        self.drop, self.head = nn.Dropout(0.1), nn.Linear(32, 8)

    def forward(self, tokens_BT: Tensor, seen_BT: Tensor) -> Tensor:
        x_BTD = self.token(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, seen_BT)
        return self.head(self.drop(x_BTD))


# --- batches ----------------------------------------------------------------------------------------------------------


def vectors(generator: torch.Generator) -> Any:
    x = torch.randn(16, 16, generator=generator)
    return x, x[:, :8].argmax(1)


def images(generator: torch.Generator) -> Any:
    x = torch.randn(16, 3, 12, 12, generator=generator)
    return x, torch.randint(8, (16,), generator=generator)


def text(vocabulary: int, length: int) -> Callable[[torch.Generator], Any]:
    def batch(generator: torch.Generator) -> Any:
        tokens = torch.randint(vocabulary, (8, length + 1), generator=generator)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    return batch


def padded(generator: torch.Generator) -> Any:
    """Rows of 8 to 20 tokens; the label is a function of the token, and none where there is padding."""
    tokens = torch.randint(32, (8, 20), generator=generator)
    seen = torch.arange(20) < torch.randint(8, 21, (8, 1), generator=generator)
    return {"tokens_BT": tokens, "seen_BT": seen, "labels": torch.where(seen, tokens % 8, -100)}


# --- programs ---------------------------------------------------------------------------------------------------------


def flat_cross_entropy(logits: Tensor, classes: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, -2), classes.flatten())


def labelled(model: Any, batch: Any, factor: Any = 1.0) -> ps.Loss:
    """Cross entropy of the labels that are not ignored, times a factor from the context."""
    inputs, labels = batch if isinstance(batch, tuple) else ((batch["tokens_BT"], batch["seen_BT"]), batch["labels"])
    logits = model(*inputs) if isinstance(inputs, tuple) else model(inputs)
    mean = functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100)
    return ps.Loss(mean * factor, (labels != -100).sum().float())


class Case(NamedTuple):
    """A program but for its mode. ``tx`` takes a factor of its learning rate."""

    model: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], Any]
    objective: Callable[[], Any]
    tx: Callable[[nn.Module, float], optim.Transform]
    options: Mapping[str, Any] = MappingProxyType({})

    def program(self, rate: float = 1.0, **mode: Any) -> ps.Program:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.model()
        return ps.program(model, self.objective(), self.tx(model, rate), **{**self.options, **mode})

    def batches(self) -> list[Any]:
        generator = torch.Generator().manual_seed(1)
        return [self.batch(generator) for _ in range(BATCHES)]


def _clipped(model: nn.Module, rate: float) -> optim.Transform:
    schedule = schedules.warmup_cosine(peak=1e-2 * rate, warmup=4, total=40)
    return optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(schedule, 0.9, 0.95, mask=optim.decay_mask(model)))


def _groups(model: nn.Module, rate: float) -> optim.Transform:
    del model
    groups = {"head": optim.adamw(3e-2 * rate), "rest": optim.adam(1e-2 * rate)}
    return optim.partition(groups, [("head", "head"), ("", "rest")])


def _criterion() -> Any:
    return ps.supervised(nn.CrossEntropyLoss(), metrics={"accuracy": ps.metrics.accuracy})


CASES = {
    "mlp": Case(mlp, vectors, _criterion, _clipped, {"ema": 0.9}),
    "toy": Case(toy, vectors, lambda: labelled, lambda model, rate: optim.sgd(0.2 * rate, momentum=0.9, nesterov=True)),
    "convnet": Case(
        convnet, images, _criterion, lambda model, rate: optim.sgd(0.1 * rate, momentum=0.9, weight_decay=1e-3)
    ),
    "gpt": Case(GPT, text(64, 24), lambda: ps.supervised(flat_cross_entropy), _clipped, {"ema": 0.9}),
    "lstm": Case(LSTM, text(32, 8), lambda: labelled, lambda model, rate: optim.rmsprop(3e-3 * rate)),
    "encoder": Case(Encoder, padded, lambda: labelled, _groups),
}
PAIRS = {"mlp, toy": ("mlp", "toy"), "convnet, encoder": ("convnet", "encoder"), "gpt, lstm": ("gpt", "lstm")}
DRAWS = ("toy", "lstm", "encoder")
IN_HALF = [name for name in CASES if name != "lstm"]  # torch's LSTM in float16 exists on some processors only

MODES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulate": 2},
    # The first updates overflow, and later ones let the scale grow.
    "fp16": {"precision": "16-mixed", "scaler": ps.scaler.dynamic(2.0**20, growth_interval=4)},
}
WAYS: dict[str, Callable[[ps.Program], Any]] = {
    "eager": lambda program: program.train_step,
    "eager donated": lambda program: ps.donate(program).train_step,
    "compiled": lambda program: ps.compile_step(program.train_step),  # the donated graph, between two copies
    "compiled donated": lambda program: ps.compile_step(program.train_step, donate=True),
}


class Pair(NamedTuple):
    """The state of a user's own step."""

    first: ps.TrainState
    second: ps.TrainState


class Run(NamedTuple):
    """What was trained: the losses, and the last state."""

    losses: list[float]
    state: Any


def trained(name: str, mode: str, way: str, rate: float = 1.0) -> Run:
    """Train the program of that name, or with the mode "own" or "own compiled" the pair."""
    if name in PAIRS:
        return _pair_trained(name, way, rate)
    case = CASES[name]
    program = case.program(rate, **MODES[mode])
    assert program.init is not None
    step, state, batches, losses = WAYS[way](program), program.init(seed=3), case.batches(), []
    for number in range(STEPS):
        state, metrics = step(state, batches[number % BATCHES])
        losses.append(float(metrics["loss"]))
    return Run(losses, state)


def _pair_trained(name: str, way: str, rate: float) -> Run:
    """Train by a step that calls two programs: the first one's loss weights the second one's. Both losses are kept."""
    first, second = (CASES[part].program(rate) for part in PAIRS[name])
    assert first.init is not None
    assert second.init is not None

    def both(state: Pair, batch: Any) -> tuple[Pair, ps.Metrics]:
        one, ones = first.train_step(state.first, batch[0])
        two, twos = second.train_step(state.second, batch[1], 1 + ones["loss"].compute() / 10)
        return Pair(one, two), {"first": ones["loss"], "second": twos["loss"]}

    steps: dict[str, Callable[[], Any]] = {
        "eager": lambda: both,
        "traced": lambda: ps.compile_step(both, donate=True, backend="aot_eager"),
        "compiled donated": lambda: ps.compile_step(both, donate=True),
    }
    step, state, losses = steps[way](), Pair(first.init(seed=3), second.init(seed=4)), list[float]()
    batches = list(zip(*(CASES[part].batches() for part in PAIRS[name]), strict=True))
    for number in range(STEPS):
        state, metrics = step(state, batches[number % BATCHES])
        losses += [float(metrics["first"]), float(metrics["second"])]
    return Run(losses, state)


EAGER = [
    *((name, mode, "eager") for name in CASES for mode in ("plain", "accumulated")),
    *((name, "fp16", "eager") for name in IN_HALF),
    *((name, "plain", "eager donated") for name in CASES),
    *((name, "own", "eager") for name in PAIRS),
]
COMPILED = [
    *((name, "plain", "compiled") for name in CASES),
    *((name, "plain", "compiled donated") for name in CASES),  # the graph of the line above, and its code
    *((name, "accumulated", "compiled donated") for name in CASES),
    *((name, "fp16", "compiled donated") for name in IN_HALF),
    *((name, "own compiled", "compiled donated") for name in PAIRS),
]
RECORDED = [
    *((name, mode, way) for name, mode, way in EAGER if way == "eager"),
    *((name, "own compiled", "traced") for name in PAIRS),
]
FIRST = {"plain": ["gpt"], "accumulated": ["mlp"], "fp16": ["toy"], "own compiled": []}
"""Compiled ones that are not soak: each mode once, but a user's own step, which is traced below; attention, dropout,
clipping, an average and a schedule once. Losses of the others are compared in eager mode."""


def _compiled() -> list[Any]:
    return [
        pytest.param(name, mode, way, marks=[] if name in FIRST[mode] else pytest.mark.soak)
        for name, mode, way in COMPILED
    ]


# --- tests ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def golden() -> Any:
    return json.loads(PATH.read_text())


def compare(name: str, mode: str, way: str, found: list[float], golden: Any) -> None:
    wanted = golden[mode][name]
    assert len(found) == len(wanted)
    for step, (is_now, was) in enumerate(zip(found, wanted, strict=True)):
        if is_now != pytest.approx(was, rel=TOLERANCE[mode], abs=0.0):
            told = ADVICE.format(name=name, mode=mode, way=way, step=step, found=found, wanted=wanted)
            pytest.fail(told, pytrace=False)


def _skip_other_random_numbers(name: str) -> None:
    draws = any(part in DRAWS for part in PAIRS.get(name, (name,)))
    if draws and not torch.backends.mkl.is_available():
        pytest.skip("torch without MKL draws other dropout masks from the same seed")


@pytest.mark.parametrize(("name", "mode", "way"), EAGER)
def test_an_eager_step_computes_the_losses_that_it_did(name: str, mode: str, way: str, golden: Any) -> None:
    _skip_other_random_numbers(name)
    compare(name, mode, way, trained(name, mode, way).losses, golden)


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode", "way"), _compiled())
def test_a_compiled_step_computes_the_losses_that_it_did(name: str, mode: str, way: str, golden: Any) -> None:
    _skip_other_random_numbers(name)
    compare(name, mode, way, trained(name, mode, way).losses, golden)


def test_losses_are_recorded_of_what_is_tested(golden: Any) -> None:
    tested = {(name, mode) for name, mode, _ in (*EAGER, *COMPILED)}
    assert {(name, mode) for mode in golden for name in golden[mode]} == tested == {run[:2] for run in RECORDED}


@pytest.mark.compile
@pytest.mark.parametrize("name", PAIRS)
def test_a_users_step_draws_the_numbers_that_it_did(name: str, golden: Any) -> None:
    _skip_other_random_numbers(name)
    compare(name, "own compiled", "traced", trained(name, "own compiled", "traced").losses, golden)


@pytest.mark.parametrize("name", CASES)
def test_a_learning_rate_that_is_off_by_a_percent_is_seen(name: str, golden: Any) -> None:
    with pytest.raises(pytest.fail.Exception, match=rf"{name}, plain, eager: .*\n(.*\n)*.*{Path(__file__).name}"):
        compare(name, "plain", "eager", trained(name, "plain", "eager", rate=1.01).losses, golden)


def test_a_loss_scale_that_is_not_divided_out_is_seen(golden: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODES, "fp16", MODES["fp16"] | {"scaler": ps.scaler.dynamic(2.0**40, growth_interval=4)})
    with pytest.raises(pytest.fail.Exception, match="mlp, fp16, eager: "):
        compare("mlp", "fp16", "eager", trained("mlp", "fp16", "eager").losses, golden)


def record() -> None:
    """Write the losses of the steps that inductor does not compile."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, list[float]]] = {}
    for name, mode, way in RECORDED:
        found.setdefault(mode, {})[name] = trained(name, mode, way).losses
    lines = [
        f"  {json.dumps(mode)}: {{\n"
        + ",\n".join(f"    {json.dumps(name)}: {json.dumps(losses)}" for name, losses in of_mode.items())
        + "\n  }"
        for mode, of_mode in found.items()
    ]
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    sys.stdout.write(f"{PATH}: {sum(map(len, found.values()))} lists of losses\n")


if __name__ == "__main__":
    record()
