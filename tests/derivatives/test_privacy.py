"""DP-SGD equals its formula, and Opacus step by step; epsilon is Opacus's."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from derivatives_cases import CROSS_ENTROPY
from helpers import assert_trees_close, tiny_convnet, tiny_mlp, vector_batch
from torch import Tensor, nn

import purestep as ps
from purestep.errors import ConfigError, StepContractError

EXACT = {"rtol": 1e-12, "atol": 1e-12}


def program(net: nn.Module | None = None, tx: Any = None, **kwargs: Any) -> ps.Program:
    return ps.program(net or tiny_mlp(), CROSS_ENTROPY, tx or ps.optim.sgd(0.5), **kwargs)


def double(rows: int = 9) -> tuple[Tensor, Tensor]:
    return vector_batch(rows, dtype=torch.float64)


@pytest.mark.parametrize("chunk_size", [None, 4])
@pytest.mark.parametrize("expected", [None, 20])
def test_an_update_is_that_of_clipped_gradients(chunk_size: int | None, expected: int | None):
    chosen, batch = program(precision="64-true"), double()
    state, norm = chosen.init(device="cpu"), 1.5
    private = ps.privacy.dp_sgd(
        chosen, max_norm=norm, noise_multiplier=0, chunk_size=chunk_size, expected_batch_size=expected
    )
    new, metrics = private.train_step(state, batch)
    each = ps.per_example(chosen)(state, batch)
    factors = (norm / (each.norms + 1e-6)).clamp(max=1)
    assert 0 < int((factors < 1).sum()) < 9
    for name, grad in each.grads.items():
        mean = torch.einsum("n,n...->...", factors, grad) / (expected or 9)
        torch.testing.assert_close(new.params[name], state.params[name] - 0.5 * mean, **EXACT)
    assert float(metrics["clipped"]) == pytest.approx(float((factors < 1).float().mean()))
    plain = chosen.train_step(state, batch)[1]
    assert float(metrics["loss"]) == pytest.approx(float(plain["loss"]), abs=1e-6)


def test_noise_follows_the_key_and_has_its_size():
    chosen = program(nn.Linear(200, 50), ps.optim.sgd(1.0))
    private = ps.privacy.dp_sgd(chosen, max_norm=0.5, noise_multiplier=3.0, expected_batch_size=10)
    silent = ps.privacy.dp_sgd(chosen, max_norm=0.5, noise_multiplier=0.0, expected_batch_size=10)
    batch = torch.randn(6, 200), torch.arange(6)
    state = chosen.init(seed=5, device="cpu")
    one, two = private.train_step(state, batch)[0], private.train_step(state, batch)[0]
    assert_trees_close(one, two, exact=True)
    clean = silent.train_step(state, batch)[0]
    noise = (one.params["weight"] - clean.params["weight"]) * 10
    assert noise.std().item() == pytest.approx(1.5, rel=0.03)
    assert abs(noise.mean().item()) < 0.05
    other = private.train_step(state._replace(key=ps.rng.advance(state.key)), batch)[0]
    assert not torch.equal(other.params["weight"], one.params["weight"])


def test_an_empty_batch_of_poisson_sampling_is_noise_alone():
    chosen = program()
    private = ps.privacy.dp_sgd(chosen, max_norm=1.0, noise_multiplier=1.0, expected_batch_size=8)
    x, y = vector_batch(4)
    state = chosen.init(device="cpu")
    new, metrics = private.train_step(state, (x[:0], y[:0]))
    assert int(new.updates) == 1
    assert not torch.equal(new.params["0.weight"], state.params["0.weight"])
    assert math.isnan(float(metrics["loss"]))


def test_fit_trains():
    chosen = ps.program(tiny_mlp(), CROSS_ENTROPY, ps.optim.adam(0.05), ema=0.5)
    private = ps.privacy.dp_sgd(chosen, max_norm=1.0, noise_multiplier=0.3)
    batches = [vector_batch(16, seed=seed) for seed in range(4)]
    result = ps.fit(private.init(device="cpu"), {"train": batches}, private, epochs=5, progress=False, device="cpu")
    assert result.history["train_loss"][-1] < result.history["train_loss"][0]
    assert 0 < result.history["train_clipped"][-1] <= 1
    ps.testing.assert_pure(private.train_step, private.init(device="cpu"), batches[0])


def test_a_gradient_that_is_not_finite_is_refused():
    private = ps.privacy.dp_sgd(program(), max_norm=1.0, noise_multiplier=1.0)
    x, y = vector_batch(4)
    x[1] = torch.nan
    state = private.init(device="cpu")
    new, metrics = private.train_step(state, (x, y))
    assert int(new.halted) == 1
    assert float(metrics["applied"]) == 0
    assert_trees_close(new.params, state.params, exact=True)


class TestErrors:
    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"max_norm": 0}, "max_norm=0"),
            ({"noise_multiplier": -1.0}, "noise_multiplier=-1.0 must be a finite number of at least 0"),
            ({"chunk_size": 0}, "chunk_size=0"),
            ({"expected_batch_size": 0.5}, "expected_batch_size=0.5"),
        ],
    )
    def test_arguments(self, options: dict[str, Any], match: str):
        with pytest.raises(ConfigError, match=match):
            ps.privacy.dp_sgd(program(), **{"max_norm": 1.0, "noise_multiplier": 1.0, **options})

    @pytest.mark.parametrize(
        ("options", "match"),
        [
            ({"accumulate": 2}, "accumulate=2"),
            ({"microbatches": 2}, "microbatches=2"),
            ({"sam": 0.05}, "sam="),
            ({"precision": "16-mixed"}, "scales its loss"),
        ],
    )
    def test_programs(self, options: dict[str, Any], match: str):
        with pytest.raises(ConfigError, match=match):
            ps.privacy.dp_sgd(program(**options), max_norm=1.0, noise_multiplier=1.0)

    def test_batchnorm_and_names(self):
        private = ps.privacy.dp_sgd(program(tiny_convnet()), max_norm=1.0, noise_multiplier=1.0)
        with pytest.raises(StepContractError, match=r"privacy\.dp_sgd: 1: a BatchNorm2d"):
            private.train_step(private.init(device="cpu"), (torch.randn(4, 1, 8, 8), torch.arange(4) % 3))
        named = ps.supervised(nn.CrossEntropyLoss(), metrics={"clipped": ps.metrics.accuracy})
        chosen = ps.program(tiny_mlp(), named, ps.optim.sgd(0.1))
        private = ps.privacy.dp_sgd(chosen, max_norm=1.0, noise_multiplier=1.0)
        with pytest.raises(StepContractError, match="metrics/clipped"):
            private.train_step(private.init(device="cpu"), vector_batch())

    def test_epsilon(self):
        good = {"steps": 10, "sample_rate": 0.1, "noise_multiplier": 1.0, "delta": 1e-5}
        for options, match in (
            ({"steps": -1}, "steps=-1"),
            ({"sample_rate": 0.0}, "sample_rate"),
            ({"delta": 1.0}, "delta"),
            ({"accountant": "gdp"}, "accountant='gdp'"),
        ):
            with pytest.raises(ConfigError, match=match):
                ps.privacy.epsilon(**{**good, **options})
        assert ps.privacy.epsilon(**{**good, "steps": 0}) == 0
        assert ps.privacy.epsilon(**{**good, "noise_multiplier": 0.0}) == math.inf


@pytest.mark.compile
def test_a_compiled_step_equals_the_eager_one():
    private = ps.privacy.dp_sgd(program(precision="64-true"), max_norm=0.9, noise_multiplier=0, chunk_size=5)
    state = private.init(device="cpu")
    expected, metrics = private.train_step(state, double())
    found, compiled = ps.compile_step(private.train_step, backend="aot_eager")(state, double())
    assert_trees_close(found.params, expected.params, **EXACT)
    assert float(compiled["clipped"]) == float(metrics["clipped"])


# --- Opacus -----------------------------------------------------------------------------------------------------------


@pytest.mark.peer
@pytest.mark.parametrize("tx", ["sgd", "adam"])
@pytest.mark.parametrize("noise", [0.0, 1.3])
@pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")  # Opacus's hooks
def test_steps_equal_those_of_opacus(tx: str, noise: float):
    pytest.importorskip("opacus", reason="needs purestep[privacy]")
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    net, norm, rows = tiny_mlp(), 1.5, 10
    own, theirs = {
        "sgd": (ps.optim.sgd(0.3, momentum=0.9), lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9)),
        "adam": (ps.optim.adam(0.01), lambda p: torch.optim.Adam(p, lr=0.01)),
    }[tx]
    private = ps.privacy.dp_sgd(program(copy.deepcopy(net), own), max_norm=norm, noise_multiplier=noise)
    state = private.init(seed=2, device="cpu")
    peer = GradSampleModule(net)
    generator = torch.Generator()
    optimizer = DPOptimizer(
        theirs(peer.parameters()),
        noise_multiplier=noise,
        max_grad_norm=norm,
        expected_batch_size=rows,
        generator=generator,
    )
    for seed in range(6):
        x, y = vector_batch(rows, seed=seed)
        generator.manual_seed(ps.rng.mix(*state.key.tolist(), "step"))  # the numbers of our step
        optimizer.zero_grad()
        nn.functional.cross_entropy(peer(x), y).backward()
        optimizer.step()
        state, _ = private.train_step(state, (x, y))
        for name, value in net.named_parameters():
            torch.testing.assert_close(state.params[name], value.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.peer
@pytest.mark.parametrize("accountant", ["rdp", "prv"])
@pytest.mark.filterwarnings("ignore:Optimal order is the:UserWarning")
def test_epsilon_is_that_of_opacus(accountant: Any):
    pytest.importorskip("opacus", reason="needs purestep[privacy]")
    from opacus.accountants import create_accountant

    theirs = create_accountant(accountant)
    for _ in range(50):
        theirs.step(noise_multiplier=1.1, sample_rate=0.02)
    found = ps.privacy.epsilon(steps=50, sample_rate=0.02, noise_multiplier=1.1, delta=1e-5, accountant=accountant)
    assert found == pytest.approx(theirs.get_epsilon(1e-5), rel=1e-9)
    assert 0 < found < 3


@pytest.mark.parametrize(("noise", "delta"), [(1e-3, 1e-5), (1.0, 1e-15)])
@pytest.mark.filterwarnings("ignore:Optimal order is the:UserWarning", "ignore:overflow enc:RuntimeWarning")
def test_what_an_accountant_cannot_compute_is_an_error(noise: float, delta: float):
    pytest.importorskip("opacus", reason="needs purestep[privacy]")
    settings: dict[str, Any] = {"steps": 1000, "sample_rate": 0.01, "noise_multiplier": noise, "delta": delta}
    with pytest.raises(ConfigError, match=r"""the accountant 'prv' fails: .*cure: accountant="rdp"""):
        ps.privacy.epsilon(**settings)
    assert ps.privacy.epsilon(**settings, accountant="rdp") > 0
