from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import assert_trees_close, vector_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import purestep as ps
from purestep import optim, scaler
from purestep.errors import ConfigError
from purestep.types import Empty

CPU = torch.device("cpu")
INF = 1e30  # as an input of a float16 product: infinite


def numbers(state: scaler.ScalerState) -> tuple[float, int]:
    return state.scale.item(), int(state.growth_tracker)


def follow(chosen: scaler.Scaler, verdicts: list[bool]) -> list[tuple[float, int]]:
    state = chosen.init(CPU)
    found = [numbers(state)]
    for finite in verdicts:
        state = chosen.update(state, torch.tensor(finite))
        found.append(numbers(state))
    return found


def test_by_hand():
    chosen = scaler.dynamic(8.0, growth_interval=2)
    assert follow(chosen, [True, True, True, False, True]) == [(8, 0), (8, 1), (16, 0), (16, 1), (8, 0), (8, 1)]


@settings(deadline=None)
@given(
    st.lists(st.booleans(), max_size=40),
    st.sampled_from([1.0, 2.0**16, 3.0, 2.0**126]),
    st.sampled_from([2.0, 1.5, 1e10]),
    st.sampled_from([0.5, 0.3]),
    st.integers(1, 5),
)
def test_the_rule_is_that_of_torchs_kernel(
    verdicts: list[bool], start: float, growth: float, backoff: float, every: int
):
    scale, tracker = torch.tensor(start), torch.tensor(0, dtype=torch.int32)
    theirs = [(scale.item(), int(tracker))]
    for finite in verdicts:
        found_inf = torch.tensor(0.0 if finite else 1.0)
        torch._amp_update_scale_(scale, tracker, found_inf, growth, backoff, every)
        theirs.append((scale.item(), int(tracker)))
    chosen = scaler.dynamic(start, growth_factor=growth, backoff_factor=backoff, growth_interval=every, min_scale=0.0)
    assert follow(chosen, verdicts) == theirs


def test_the_scale_stays_once_below_its_least_and_grows_from_there():
    chosen = scaler.dynamic(8.0, growth_interval=2, min_scale=4.0)
    assert follow(chosen, [False] * 3 + [True] * 2) == [(8, 0), (4, 0), (2, 0), (2, 0), (2, 1), (4, 0)]


def test_skipped_windows_without_end_do_not_end_the_training():
    """By torch's rule the scale is 0 after 166 of them, and no gradient is finite ever after."""
    program = ps.program(
        nn.Linear(2, 1),
        ps.supervised(nn.MSELoss()),
        optim.sgd(0.01),
        nonfinite="skip",
        scaler=scaler.dynamic(),
    )
    state = program.init()
    for _ in range(170):
        state, _ = program.train_step(state, (torch.full((4, 2), math.nan), torch.ones(4, 1)))
    state, _ = program.train_step(state, (torch.ones(4, 2), torch.ones(4, 1)))
    assert int(state.updates) == 1
    assert numbers(state.scaler) == (2.0**-15, 1)


def test_the_defaults_are_grad_scalers():
    peer = torch.amp.GradScaler("cpu")
    chosen = scaler.dynamic()
    assert numbers(chosen.init(CPU)) == (peer.get_scale(), 0)
    state = chosen.init(CPU)._replace(growth_tracker=torch.tensor(peer.get_growth_interval() - 1))
    assert numbers(chosen.update(state, torch.tensor(True))) == (peer.get_scale() * peer.get_growth_factor(), 0)
    assert numbers(chosen.update(state, torch.tensor(False))) == (peer.get_scale() * peer.get_backoff_factor(), 0)


def test_state_is_a_float_and_a_count():
    state = scaler.dynamic().init(CPU)
    assert (state.scale.dtype, state.growth_tracker.dtype) == (torch.float32, torch.int64)
    assert state.scale.shape == state.growth_tracker.shape == ()


def test_nothing_is_written_in_place():
    chosen = scaler.dynamic(growth_interval=1)
    state = chosen.init(CPU)
    kept = ps.clone(state)
    chosen.update(state, torch.tensor(True))
    chosen.update(state, torch.tensor(False))
    assert_trees_close(state, kept, exact=True)


def test_exhausted_below_the_smallest_scale_and_after_an_overflow_only():
    chosen = scaler.dynamic(4.0, min_scale=1.0)
    state = chosen.init(CPU)
    for expected in (2.0, 1.0, 0.5):
        state = chosen.update(state, torch.tensor(False))
        assert state.scale.item() == expected
        assert bool(chosen.exhausted(state, torch.tensor(False))) is (expected < 1.0)
        assert not bool(chosen.exhausted(state, torch.tensor(True)))


def test_off_has_no_state_and_is_exhausted_at_once():
    off = scaler.none()
    state = off.init(CPU)
    assert state == Empty()
    assert off.scale(state) is None
    assert off.update(state, torch.tensor(False)) is state
    assert bool(off.exhausted(state, torch.tensor(False)))
    assert not bool(off.exhausted(state, torch.tensor(True)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"init_scale": 0.0},
        {"init_scale": -1.0},
        {"init_scale": math.nan},
        {"growth_factor": 1.0},
        {"growth_factor": math.nan},
        {"backoff_factor": 0.0},
        {"backoff_factor": 1.0},
        {"growth_interval": 0},
        {"growth_interval": 2.5},
        {"growth_interval": True},
        {"init_scale": 0.5, "min_scale": 1.0},
    ],
)
def test_numbers_out_of_range_are_refused(wrong: dict[str, Any]):
    name, value = next(iter(wrong.items()))
    with pytest.raises(ConfigError, match=rf"^dynamic: .*{name}={value}.*\(cure: "):
        scaler.dynamic(**wrong)


class Half(nn.Module):
    """One product, whose gradient overflows in float16 wherever its input is large."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def half_program(chosen: scaler.Scaler, **kwargs: Any) -> ps.Program:
    return ps.program(
        Half(),
        ps.supervised(nn.CrossEntropyLoss()),
        optim.sgd(0.1, momentum=0.9),
        precision="16-mixed",
        scaler=chosen,
        **kwargs,
    )


@pytest.mark.row("0.11")
@pytest.mark.parametrize("seed", range(3))
def test_a_program_goes_step_for_step_with_grad_scaler(seed: int):
    """Scale, growth, skipped updates and weights beside the usual loop, with overflows at random steps."""
    chosen = half_program(scaler.dynamic(2.0**12, growth_interval=3), nonfinite="skip")
    state = chosen.init(device="cpu")
    net = Half()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    peer = torch.amp.GradScaler("cpu", init_scale=2.0**12, growth_interval=3)
    draws = torch.Generator().manual_seed(seed)
    skipped = 0
    for index in range(24):
        x, y = vector_batch(8, index)
        if torch.rand((), generator=draws) < 0.3:
            x = x * INF
        state, metrics = chosen.train_step(state, (x, y))
        optimizer.zero_grad()
        with torch.amp.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(net(x), y)
        before = peer.get_scale()
        peer.scale(loss).backward()
        peer.step(optimizer)
        peer.update()
        assert numbers(state.scaler) == (peer.get_scale(), int(peer._growth_tracker)), index
        assert float(metrics["scale"]) == before
        assert float(metrics["applied"]) == (0.0 if peer.get_scale() < before else 1.0)
        skipped += peer.get_scale() < before
        theirs = {name: p.detach() for name, p in net.named_parameters()}
        assert_trees_close(state.params, theirs, rtol=1e-6, atol=1e-7)
    assert 0 < skipped < 24
    assert int(state.updates) == 24 - skipped


@pytest.mark.row("4.6", "0.10")
def test_gradients_are_unscaled_before_they_are_clipped_and_reported():
    x, y = vector_batch(8)
    found = []
    for scale in (1.0, 2.0**12):
        tx = optim.chain(optim.clip_by_global_norm(0.01), optim.sgd(1.0))
        chosen = ps.program(
            Half(), ps.supervised(nn.CrossEntropyLoss()), tx, precision="16-mixed", scaler=scaler.dynamic(scale)
        )
        found.append(chosen.train_step(chosen.init(device="cpu"), (x, y)))
    (small, a), (large, b) = found
    assert float(a["grad_norm"]) == pytest.approx(float(b["grad_norm"]), rel=1e-2)
    assert float(a["loss"]) == pytest.approx(float(b["loss"]), rel=1e-2)
    assert_trees_close(small.params, large.params, rtol=0.0, atol=1e-3)
    moved = torch.cat([(p - small.params[f"layer.{n}"]).flatten() for n, p in Half().layer.named_parameters()])
    assert moved.norm().item() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize("scale", [2.0**16, 2.0**22 / 3, 2.0**25])
def test_gradients_of_float16_weights_are_unscaled_by_an_inverse_float16_cannot_hold(scale: float):
    net, (x, y) = nn.Linear(4, 3), vector_batch(8)

    def objective(model: Any, batch: Any) -> ps.Loss:
        return ps.Loss(nn.functional.cross_entropy(model(batch[0]).float(), batch[1]) / 1000, len(batch[0]), {})

    chosen = ps.program(net, objective, optim.sgd(1000.0), precision="16-true", scaler=scaler.dynamic(scale))
    new, metrics = chosen.train_step(chosen.init(device="cpu"), (x, y))
    plain = ps.program(net, ps.supervised(nn.CrossEntropyLoss()), optim.sgd(1.0))
    expected, told = plain.train_step(plain.init(device="cpu"), (x, y))
    assert float(metrics["grad_norm"]) * 1000 == pytest.approx(float(told["grad_norm"]), rel=2e-2)
    assert_trees_close({n: p.float() for n, p in new.params.items()}, expected.params, rtol=1e-2, atol=1e-2)


@pytest.mark.row("0.11", "B7")
def test_an_overflow_halves_the_scale_and_leaves_everything_else():
    chosen = half_program(scaler.dynamic(), ema=0.9)
    state, _ = chosen.train_step(chosen.init(device="cpu"), vector_batch(8))
    x, y = vector_batch(8)
    new, metrics = chosen.train_step(state, (x * INF, y))
    for name in ("params", "opt_state", "ema", "updates", "halted"):
        assert_trees_close(getattr(new, name), getattr(state, name), exact=True)
    assert numbers(new.scaler) == (2.0**15, 0)
    assert (int(new.step), int(new.halted)) == (2, 0)
    assert float(metrics["applied"]) == 0.0


def test_below_the_smallest_scale_the_state_halts():
    chosen = half_program(scaler.dynamic(4.0, min_scale=1.0))
    state = chosen.init(device="cpu")
    x, y = vector_batch(8)
    halted = []
    for _ in range(5):
        state, _ = chosen.train_step(state, (x * INF, y))
        halted.append(int(state.halted))
    assert halted == [0, 0, 3, 3, 3]
    assert numbers(state.scaler) == (0.5, 0)


def test_with_skip_it_goes_on_just_below_the_smallest_scale():
    chosen = half_program(scaler.dynamic(4.0, min_scale=1.0), nonfinite="skip")
    state = chosen.init(device="cpu")
    x, y = vector_batch(8)
    for _ in range(5):
        state, _ = chosen.train_step(state, (x * INF, y))
    assert state.halted == Empty()
    assert state.scaler.scale.item() == 0.5
    _, metrics = chosen.train_step(state, (x, y))
    assert float(metrics["applied"]) == 1.0


def test_a_window_counts_once():
    """With accumulation the scale grows by windows, not by micro-batches, and an empty window does not count."""
    chosen = half_program(scaler.dynamic(8.0, growth_interval=2), accumulate=2)
    state = chosen.init(device="cpu")
    seen = []
    for index in range(8):
        state, _ = chosen.train_step(state, vector_batch(8, index))
        seen.append(numbers(state.scaler))
    assert seen == [(8, 0), (8, 1), (8, 1), (16, 0), (16, 0), (16, 1), (16, 1), (32, 0)]
    flushed, _ = chosen.flush(state)
    assert numbers(flushed.scaler) == (32, 0)
