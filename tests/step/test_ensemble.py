"""Many models in one step: each member trains like the same program alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from helpers import assert_trees_close
from torch import Tensor, nn
from torch.nn import functional

import purestep as ps
from purestep import metrics, optim, schedules, tree
from purestep.errors import ConfigError, DataError, StateError, StepContractError
from purestep.state import stacked
from purestep.types import Empty

MEMBERS = 3
CROSS_ENTROPY = ps.supervised(nn.CrossEntropyLoss(), metrics={"accuracy": metrics.accuracy})


# No bias has a gradient of 0 but for rounding (before a batch norm, of keys): Adam would divide the rounding by itself.


def mlp(dropout: float = 0.25) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(dropout), nn.Linear(8, 3)).double()


def convnet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Dropout2d(0.2),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 3),
    ).double()


class GPT(nn.Module):
    """Two causal blocks with dropout in the embedding, the attention and the residual paths."""

    def __init__(self, width: int = 8, heads: int = 2, vocabulary: int = 11, length: int = 6) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(2))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.tokens(ids) + self.places.weight[: ids.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(x).transpose(1, 2)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(0.1))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        rate = 0.1 if self.training else 0.0
        y = functional.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        x = x + functional.dropout(self.out(y.transpose(1, 2).reshape(batch, length, width)), 0.1, self.training)
        return x + self.mlp(self.norm2(x))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), nn.Linear(4, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x).mean(dim=1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.lstm, self.head = kind(4, 6, num_layers=2, dropout=0.2), nn.Linear(6, 3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.expand(5, *x.shape))[0][-1])


def rows(seed: int, *shape: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(6, *shape, dtype=torch.float64, generator=generator)
    return inputs, torch.randint(0, 3, (6,), generator=generator)


def text(seed: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 11, (4, 7), generator=torch.Generator().manual_seed(seed))
    return ids[:, :-1], ids[:, 1:]


def injected() -> optim.Transform:
    return optim.chain(optim.clip_by_global_norm(0.5), optim.inject(optim.adamw)(learning_rate=1e-2, weight_decay=0.1))


def weighted(model: Any, batch: Any) -> ps.Loss:
    """A loss with a scheduled value, random numbers of several kinds and a vector of metrics."""
    x, y = batch
    noisy = x + 0.1 * torch.randn_like(x) * torch.rand(x.shape[-1], dtype=x.dtype) + 0.1 * torch.bernoulli(x.sigmoid())
    outputs = model(noisy) * model.values["heat"]
    found = functional.cross_entropy(outputs, y)
    counts = (y[:, None] == torch.arange(3)).sum(0).float()
    return ps.Loss(found, torch.tensor(float(len(y))), {"by_class": ps.Mean(counts, torch.full((3,), 6.0))})


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any], dict[str, Any]]] = {
    "mlp": (mlp, lambda seed: rows(seed, 4), {}),
    "window and average": (mlp, lambda seed: rows(seed, 4), {"accumulate": 2, "ema": ps.ema.average(0.9, warmup=True)}),
    "parts of a batch": (mlp, lambda seed: rows(seed, 4), {"microbatches": 2, "nonfinite": "skip"}),
    "schedules and draws": (
        mlp,
        lambda seed: rows(seed, 4),
        {
            "objective": weighted,
            "values": {"heat": schedules.linear(1.0, 0.5, transition_steps=4)},
            "tx": optim.sgd(schedules.warmup_cosine(peak=0.1, warmup=2, total=9), momentum=0.9),
        },
    ),
    "convnet": (convnet, lambda seed: rows(seed, 1, 6, 6), {"ema": ps.ema.average(0.9, buffers="average")}),
    "gpt": (GPT, text, {}),
    # Its dropout runs on transposed tensors, whose masks lie in memory as the tensors do.
    "encoder layer": (Encoder, lambda seed: rows(seed, 3, 4), {"tx": optim.sgd(0.1, momentum=0.9)}),
    "lstm": (Recurrent, lambda seed: rows(seed, 4), {}),
    "gru": (lambda: Recurrent(nn.GRU), lambda seed: rows(seed, 4), {}),
}


def made(name: str = "mlp", **changes: Any) -> tuple[ps.Program, Callable[[int], Any], Callable[[], nn.Module]]:
    factory, batch, settings = CASES[name]
    given = {"objective": CROSS_ENTROPY, "tx": injected(), "precision": "64-true", **settings, **changes}
    return ps.program(factory(), given.pop("objective"), given.pop("tx"), **given), batch, factory


def started(program: ps.Program, factory: Callable[[], nn.Module], **settings: Any) -> tuple[ps.Program, ps.TrainState]:
    several = ps.ensemble(program, MEMBERS, **settings)
    return several, several.init(factory=factory, seeds=[5, -7, 2**40])


def alone(state: ps.TrainState) -> list[ps.TrainState]:
    return [ps.member(state, index) for index in range(MEMBERS)]


@pytest.mark.parametrize("name", CASES)
def test_each_member_trains_as_alone(name: str):
    program, batch, factory = made(name)
    several, state = started(program, factory)
    each = alone(state)
    for number in range(4):
        state, found = several.train_step(state, batch(number))
        each, told = zip(*(program.train_step(one, batch(number)) for one in each), strict=True)
        assert_trees_close(found, ps.stack(told), rtol=1e-6, atol=1e-6)  # metrics are float32
    assert_trees_close(state, ps.stack(each), rtol=1e-12, atol=1e-12)
    assert not torch.equal(*[tree.leaves(one.params)[0] for one in each[:2]])
    closed, _ = several.flush(state)
    assert_trees_close(closed, ps.stack([program.flush(one)[0] for one in each]), rtol=1e-12, atol=1e-12)
    measured = several.eval_step(state, batch(9), index=3)
    assert_trees_close(
        measured, ps.stack([program.eval_step(one, batch(9), index=3) for one in each]), rtol=1e-6, atol=1e-6
    )
    inputs = batch(9)[0]
    if name != "schedules and draws":
        outputs = several.bind(state)(inputs)
        torch.testing.assert_close(outputs, torch.stack([program.bind(one)(inputs) for one in each]))


@pytest.mark.parametrize("name", ["mlp", "convnet", "parts of a batch"])
def test_members_with_batches_of_their_own(name: str):
    program, batch, factory = made(name)
    several, state = started(program, factory, batches="own")
    each = alone(state)
    for number in range(3):
        own = [batch(10 * number + index) for index in range(MEMBERS)]
        state, _ = several.train_step(state, ps.stack(own))
        each = [program.train_step(one, part)[0] for one, part in zip(each, own, strict=True)]
    assert_trees_close(state, ps.stack(each), rtol=1e-12, atol=1e-12)
    assert several.eval_step(state, ps.stack(own))["loss"].total.shape == (MEMBERS,)


def test_in_float32_members_differ_from_those_alone_by_rounding():
    for precision, bound in (("32-true", 1e-5), ("16-mixed", 2e-3), ("bf16-mixed", 2e-2)):
        program, _, _ = made(precision=precision, tx=optim.sgd(0.1, momentum=0.9))
        several, state = started(program, lambda: mlp().float())
        each = alone(state)
        for number in range(4):
            x, y = rows(number, 4)
            state, _ = several.train_step(state, (x.float(), y))
            each = [program.train_step(one, (x.float(), y))[0] for one in each]
        assert_trees_close(state.params, ps.stack([one.params for one in each]), rtol=bound, atol=bound)
        assert_trees_close(state.scaler, ps.stack([one.scaler for one in each]), exact=True)


def test_attention_is_mapped_in_mixed_precision():
    """Torch's own products of attention mix dtypes inside of `torch.func.grad` and autocast."""
    program = ps.program(
        GPT().float(), ps.supervised(nn.CrossEntropyLoss()), optim.sgd(0.1), precision="bf16-mixed", keep_eval=("*",)
    )
    several = ps.ensemble(program, MEMBERS)
    state = several.init()
    each, ids = alone(state), torch.randint(11, (3, 6), generator=torch.Generator().manual_seed(0))
    for _ in range(3):
        state, _ = several.train_step(state, (ids, ids))
        each = [program.train_step(one, (ids, ids))[0] for one in each]
    assert_trees_close(state.params, ps.stack([one.params for one in each]), rtol=2e-2, atol=2e-2)


def own_batches(batch: Any, number: int, *, spoilt: int) -> list[Any]:
    """A batch for each member; that of the second member is not finite in the call ``spoilt``."""
    own = [batch(10 * number + index) for index in range(MEMBERS)]
    if number == spoilt:
        own[1][0][0, 0] = torch.inf
    return own


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_member_that_is_not_finite_does_not_stop_the_others(nonfinite: Any, accumulate: int):
    program, batch, factory = made(nonfinite=nonfinite, accumulate=accumulate, ema=0.9)
    several, state = started(program, factory, batches="own")
    each = alone(state)
    for number in range(5):
        own = own_batches(batch, number, spoilt=2)
        state, found = several.train_step(state, ps.stack(own))
        each = [program.train_step(one, part)[0] for one, part in zip(each, own, strict=True)]
        assert_trees_close(state, ps.stack(each), rtol=1e-12, atol=1e-12)
    if nonfinite == "raise":
        assert state.halted.tolist() == [0, 3 if accumulate == 1 else 4, 0]
        assert found["applied"].total.tolist() == ([1, 0, 1] if accumulate == 1 else [0, 0, 0])
    if accumulate == 1:
        assert state.updates.tolist() == ([5, 2, 5] if nonfinite == "raise" else [5, 4, 5])
    else:  # the window with the bad batch is refused, and the last one is open
        assert state.updates.tolist() == [2, 1, 2]


class DropsInput(nn.Module):
    """Dropout on a tensor that all members share, in a layout that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        x = functional.dropout(x.t(), 0.3, self.training).t()
        x = functional.alpha_dropout(x, 0.3, self.training).reshape(2, 3, 4).permute(2, 0, 1)
        x = functional.dropout(x[..., :1].expand(4, 2, 3), 0.3, self.training).permute(1, 2, 0)
        return self.head(nn.functional.dropout1d(x.flatten(0, 1)[:, :, None], 0.3, self.training)[..., 0])


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.compile)])
def test_dropout_on_a_shared_input_has_the_masks_of_each_member(compiled: bool):
    program, batch, _ = made()
    program = ps.program(DropsInput(), CROSS_ENTROPY, injected(), precision="64-true")
    several, state = started(program, DropsInput)
    each = alone(state)
    step = ps.compile_step(several.train_step, backend="aot_eager") if compiled else several.train_step
    for number in range(3):
        state, _ = step(state, batch(number))
        each = [program.train_step(one, batch(number))[0] for one in each]
    assert_trees_close(ps.clone(state), ps.stack(each), rtol=1e-12, atol=1e-12)


def brier(model: Any, batch: Any) -> ps.Loss:
    """A loss with targets as vectors, and a metric of such vectors."""
    x, y = batch
    ones = functional.one_hot(y, num_classes=3)
    loss = (model(x).softmax(-1) - ones).square().mean()
    return ps.Loss(loss, torch.tensor(6.0), {"by_class": ps.Mean(ones.sum(0).float(), torch.full((3,), 6.0))})


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.compile)])
@pytest.mark.parametrize("batches", ["shared", "own"])
def test_one_hot_targets(batches: Any, compiled: bool):
    program, batch, factory = made(objective=brier)
    several, state = started(program, factory, batches=batches)
    step = ps.compile_step(several.train_step, backend="aot_eager") if compiled else several.train_step
    parts = [batch(index if batches == "own" else 0) for index in range(MEMBERS)]
    new, found = step(state, ps.stack(parts) if batches == "own" else parts[0])
    each, told = zip(
        *(program.train_step(one, part) for one, part in zip(alone(state), parts, strict=True)), strict=True
    )
    assert_trees_close(ps.clone(new), ps.stack(each), rtol=1e-12, atol=1e-12)
    assert_trees_close(dict(found), ps.stack(told), rtol=1e-6, atol=1e-6)


NORMAL: list[Callable[[Tensor], Tensor]] = [
    lambda x: torch.normal(x, 0.5),
    lambda x: torch.normal(x.t(), 0.5).t(),
    lambda x: torch.normal(0.5, x.abs()),
    lambda x: torch.normal(x, x.abs()),
]
OTHER: dict[str, Callable[[Tensor], Tensor]] = {
    "randperm": lambda x: x[torch.randperm(len(x))],
    "binomial": lambda x: torch.binomial(torch.full_like(x, 5.0), x.sigmoid()),
    "poisson": lambda x: torch.poisson(x.abs()),
    "multinomial": lambda x: x + torch.multinomial(x.abs(), 2)[:, :1],
}


def noisy(draws: Iterable[Callable[[Tensor], Tensor]]) -> Any:
    def objective(model: Any, batch: Any) -> ps.Loss:
        x, y = batch
        found = sum(functional.cross_entropy(model(draw(x)), y) for draw in draws)
        return ps.Loss(torch.as_tensor(found), torch.tensor(6.0))

    return objective


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.compile)])
@pytest.mark.parametrize("name", OTHER)
@pytest.mark.parametrize("batches", ["shared", "own"])
def test_a_member_cannot_draw_from_other_samplers(name: str, compiled: bool, batches: Any):
    program, batch, factory = made(objective=noisy([OTHER[name]]))
    several, state = started(program, factory, batches=batches)
    step = ps.compile_step(several.train_step, backend="aot_eager") if compiled else several.train_step
    with pytest.raises(StepContractError, match=f"draws with aten::{name}, which a member .*draw in the loader"):
        step(state, ps.stack([batch(0)] * MEMBERS) if batches == "own" else batch(0))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.compile)])
@pytest.mark.parametrize("batches", ["shared", "own"])
def test_draws_are_those_of_the_member_alone(compiled: bool, batches: Any):
    program, batch, factory = made(objective=noisy(NORMAL))
    several, state = started(program, factory, batches=batches)
    step = ps.compile_step(several.train_step, backend="aot_eager") if compiled else several.train_step
    parts = [batch(index if batches == "own" else 0) for index in range(MEMBERS)]
    new, _ = step(state, ps.stack(parts) if batches == "own" else parts[0])
    each = [program.train_step(one, part)[0] for one, part in zip(alone(state), parts, strict=True)]
    assert_trees_close(ps.clone(new), ps.stack(each), rtol=1e-12, atol=1e-12)


def out_of_step(program: ps.Program, batch: Callable[[int], Any]) -> ps.TrainState:
    """Stacked states of which the second has a micro-batch more in its window."""
    first, second, third = (program.init(seed) for seed in range(MEMBERS))
    return ps.stack([first, program.train_step(second, batch(9))[0], third])


@pytest.mark.parametrize("runs", ["alone", "in run_epoch", "donated"])
def test_members_at_different_positions_in_their_windows_close_their_own(runs: str):
    program, batch, _ = made(accumulate=2, ema=0.9)
    several = ps.ensemble(program, MEMBERS)
    state = out_of_step(program, batch)
    each = alone(state)
    batches = [batch(number) for number in range(5)]
    for one in batches:
        each = [program.train_step(part, one)[0] for part in each]
    if runs == "in run_epoch":
        state, _ = ps.run_epoch(state, batches, several.train_step)
    step = ps.donate(several).train_step if runs == "donated" else several.train_step
    for one in batches if runs != "in run_epoch" else ():
        state, _ = step(state, one)
    assert_trees_close(ps.clone(state), ps.stack(each), rtol=1e-12, atol=1e-12)
    assert state.updates.tolist() == [2, 3, 2]
    closed, _ = several.flush(ps.clone(state))
    assert closed.accum.left.tolist() == [2, 2, 2]


def test_a_member_that_goes_on_after_a_halt_closes_its_own_windows():
    program, batch, factory = made(accumulate=2)
    several, state = started(program, factory, batches="own")
    each = alone(state)
    for number in range(6):
        own = own_batches(batch, number, spoilt=1)
        if number == 3:  # after an odd number of calls without it
            state = state._replace(halted=torch.zeros_like(state.halted))
            each = [one._replace(halted=torch.zeros_like(one.halted)) for one in each]
        state, _ = several.train_step(state, ps.stack(own))
        each = [program.train_step(one, part)[0] for one, part in zip(each, own, strict=True)]
    assert_trees_close(state, ps.stack(each), rtol=1e-12, atol=1e-12)
    assert state.updates.tolist() == [3, 1, 3]


def test_hyperparameters_and_weights_of_each_member():
    program, batch, factory = made("mlp")
    several = ps.ensemble(program, 2)
    state = several.init(3, vary={"learning_rate": [1e-3, 1e-1], "weight_decay": torch.tensor([0.0, 0.5])})
    rates = optim.hyperparams(state.opt_state)
    assert rates["learning_rate"].tolist() == pytest.approx([1e-3, 1e-1])
    assert rates["weight_decay"].tolist() == [0.0, 0.5]
    assert state.key.tolist() == [[3, 0], [4, 0]]
    assert_trees_close(ps.member(state, 0).params, ps.member(state, 1).params, exact=True)
    _, found = several.train_step(state, batch(0))
    assert (found["lr"].total / found["lr"].weight).tolist() == pytest.approx([1e-3, 1e-1])
    assert int(state.step[0]) == 0, "the input state is what it was"
    with ps.rng.scoped(4):
        expected = factory()
    second = ps.member(several.init(3, factory=factory), 1)
    assert_trees_close(second.params, {name: p.detach() for name, p in expected.named_parameters()}, exact=True)
    models = [factory(), factory()]
    assert_trees_close(
        several.init(models=models).params["0.weight"],
        torch.stack([one[0].weight.detach() for one in models]),
        exact=True,
    )


def test_a_number_sets_the_hyperparameter_of_all_members_and_a_tensor_that_of_each():
    program, batch, _ = made("mlp")
    several = ps.ensemble(program, 2)
    state = several.init()
    for value, expected in ((0.5, [0.5, 0.5]), (torch.tensor([0.25, 0.5]), [0.25, 0.5])):
        changed = state._replace(opt_state=optim.set_hyperparams(state.opt_state, learning_rate=value))
        assert several.train_step(changed, batch(0))[1]["lr"].total.tolist() == expected
    for model_state, told in ((state, r"a tensor of shape \[2\]"), (program.init(), "pass a number")):
        with pytest.raises(ConfigError, match=told):
            optim.set_hyperparams(model_state.opt_state, learning_rate=torch.ones(3))


def test_a_step_is_pure_and_reproducible():
    program, batch, factory = made("mlp")
    several, state = started(program, factory)
    ps.testing.assert_pure(several.train_step, state, batch(0))
    before = torch.default_generator.get_state()
    first, second = (several.train_step(state, batch(0))[0] for _ in range(2))
    assert_trees_close(first, second, exact=True)
    assert torch.equal(before, torch.default_generator.get_state())
    assert stacked.size(first) == MEMBERS


class Reads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (2 if float(x.mean() + self.linear.weight.mean()) > 0 else 1)


UNMAPPED: dict[str, Callable[[], nn.Module]] = {
    "reads a value": Reads,
    "no rule": lambda: nn.Sequential(nn.Linear(4, 3), nn.RReLU()),
    "writes into a result": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)),
    "counts by momentum": lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=None)),
}


@pytest.mark.parametrize("name", UNMAPPED)
def test_what_torch_cannot_map_is_named(name: str):
    program = ps.program(UNMAPPED[name](), CROSS_ENTROPY, optim.sgd(0.1))
    several = ps.ensemble(program, 2)
    x, y = rows(0, 4)
    with pytest.raises(StepContractError, match=r"train_step.*: torch.func cannot map this model: .*cure: replace"):
        several.train_step(several.init(), (x.float(), y))


def test_packed_sequences_cannot_be_mapped():
    class Last(nn.LSTM):
        def forward(self, x: Any) -> Tensor:
            return super().forward(x)[1][0][-1]

    several = ps.ensemble(ps.program(Last(4, 3), CROSS_ENTROPY, optim.sgd(0.1)), 2)
    x = nn.utils.rnn.pack_sequence([torch.ones(3, 4), torch.ones(2, 4)])
    with pytest.raises(StepContractError, match="cannot map this model: .*own memory"):
        several.train_step(several.init(), (x, torch.tensor([0, 1])))


def test_settings_that_do_not_fit():
    program, batch, factory = made("mlp")
    several = ps.ensemble(program, 2)
    state = several.init()
    plain = program.init()
    refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ConfigError, "members=0", lambda: ps.ensemble(program, 0)),
        (ConfigError, "batches='mine'", lambda: ps.ensemble(program, 2, batches="mine")),  # type: ignore[arg-type]
        (ConfigError, "the program is an ensemble", lambda: ps.ensemble(several, 2)),
        (ConfigError, "the program is a function", lambda: ps.ensemble(program.train_step, 2)),  # type: ignore[arg-type]
        (ConfigError, "or a function of yours", lambda: ps.ensemble(ps.Program(program.train_step), 2)),
        (ConfigError, "seeds is 3 values for 2 members", lambda: several.init(seeds=[1, 2, 3])),
        (ConfigError, r"vary\['learning_rate'\] is 1 values", lambda: several.init(vary={"learning_rate": [1.0]})),
        (ConfigError, "b1 is not a leaf", lambda: several.init(vary={"b1": [0.5, 0.6]})),
        (ConfigError, "model 1 does not fit the program", lambda: several.init(models=[factory(), convnet()])),
        (ConfigError, "model 0 is a NoneType", lambda: several.init(factory=lambda: None)),  # type: ignore[arg-type]
        (ConfigError, "model 1 is a NoneType", lambda: several.init(models=[factory(), None])),  # type: ignore[list-item]
        (ConfigError, "factory is a Sequential", lambda: several.init(factory=factory())),
        (ConfigError, "seed=None must be", lambda: several.init(seed=None)),  # type: ignore[arg-type]
        (ConfigError, "seed='a' must be", lambda: several.init(seed="a")),  # type: ignore[arg-type]
        (ConfigError, "seed=1.5 must be", lambda: several.init(seeds=[1, 1.5], factory=factory)),  # type: ignore[list-item]
        (ConfigError, "vary is a list", lambda: several.init(vary=[1e-3, 1e-2])),  # type: ignore[arg-type]
        (ConfigError, "learning_rate is a str", lambda: several.init(vary={"learning_rate": ["a", "b"]})),  # type: ignore[list-item]
        (
            ConfigError,
            r"learning_rate is of shape \[3\]",
            lambda: several.init(vary={"learning_rate": torch.ones(2, 3)}),  # type: ignore[dict-item]
        ),
        (ConfigError, "both models and factory", lambda: several.init(models=[factory()] * 2, factory=factory)),
        (StateError, "is a TrainState of one model", lambda: several.train_step(plain, batch(0))),
        (
            StateError,
            "has 2 members, and the ensemble has 3",
            lambda: ps.ensemble(program, 3).eval_step(state, batch(0)),
        ),
        (StateError, "is a dict", lambda: several.bind({})),
        (StateError, "no state to stack", lambda: ps.stack([])),
        (
            StateError,
            "params/0.bias: the leaf is .* in state 0",
            lambda: ps.stack([plain, plain._replace(params={k: v.float() for k, v in plain.params.items()})]),
        ),
        (StateError, "another structure", lambda: ps.stack([plain, plain._replace(halted=Empty())])),
        (StateError, "no member 2: it has 2 members", lambda: ps.member(state, 2)),
        (StateError, "is not stacked", lambda: ps.member(plain, 0)),
        (StateError, "the index is a float", lambda: ps.member(state, 1.0)),  # type: ignore[arg-type]
        (StateError, "the index is a slice", lambda: ps.member(state, slice(2))),  # type: ignore[arg-type]
        (StateError, "train_step: the state is that of an ensemble", lambda: program.train_step(state, batch(0))),
        (StateError, "flush: the state is that of an ensemble", lambda: program.flush(state)),
        (StateError, "eval_step: the state is that of an ensemble", lambda: program.eval_step(state, batch(0))),
        (StateError, "bind: the state is that of an ensemble", lambda: program.bind(state)),
        (StateError, "that of an ensemble", lambda: ps.predict(program, state, [batch(0)])),
        (StateError, "that of an ensemble", lambda: ps.evaluate(state, [batch(0)], program.eval_step)),
        (StateError, "that of an ensemble", lambda: ps.compile_step(program.train_step)(state, batch(0))),
        (ConfigError, "an ensemble of 2 members", lambda: ps.refresh_batchnorm(several, state, [batch(0)])),
        (StateError, "that of an ensemble", lambda: ps.refresh_batchnorm(program, state, [batch(0)])),
        (
            DataError,
            "batch/0: .*shape .* without a leading",
            lambda: ps.ensemble(program, 2, batches="own").train_step(state, batch(0)),
        ),
    ]
    for kind, told, call in refused:
        with pytest.raises(kind, match=told):
            call()


def test_an_error_of_the_objective_is_raised_as_it_is() -> None:
    def objective(model: Any, x: Tensor) -> ps.Loss:
        try:
            raise KeyError("own cause")
        except KeyError as error:
            raise RuntimeError("of the user") from error

    program = ps.ensemble(ps.program(torch.nn.Linear(4, 3), objective, ps.optim.sgd(0.1)), 2)
    with pytest.raises(RuntimeError, match="of the user") as caught:
        program.train_step(program.init(seeds=[0, 1]), torch.rand(8, 4))
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.parametrize(
    ("touch", "told"),
    [
        (lambda seen, x: seen.add_(1), r"it writes a tensor that is not in the state.*cure: call \.eval\(\)"),
        (
            lambda seen, x: torch.empty(3).normal_(),
            r"random numbers that belongs to no member \(cure: call torch\.rand",
        ),
    ],
)
def test_what_vmap_cannot_write_is_told_with_a_cure(touch: Any, told: str) -> None:
    seen = torch.zeros(())

    def objective(model: Any, x: Tensor) -> ps.Loss:
        touch(seen, x)
        return ps.Loss(model(x).square().mean(), len(x))

    program = ps.ensemble(ps.program(torch.nn.Linear(4, 3), objective, ps.optim.sgd(0.1)), 2)
    with pytest.raises(StepContractError, match=rf"test_ensemble\.py:\d+.*{told}"):
        program.train_step(program.init(seeds=[0, 1]), torch.rand(8, 4))
