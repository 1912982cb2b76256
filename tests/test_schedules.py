from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers import count_graphs, no_waiting
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import lr_scheduler as torch_schedulers

from purestep import optim, schedules
from purestep.errors import ConfigError
from purestep.schedules import Schedule

BASE = 0.3


def values(schedule: Schedule, steps: int) -> list[float]:
    return [float(schedule(torch.tensor(count))) for count in range(steps)]


def torch_values(make: Callable[[torch.optim.Optimizer], Any], steps: int) -> list[float]:
    """What the scheduler itself does to an optimizer over a run."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=BASE)
    scheduler, found = make(optimizer), []
    for _ in range(steps):
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return found


TORCH: dict[str, tuple[Schedule, Callable[[Any], Any], int]] = {
    "constant": (
        schedules.constant(BASE),
        partial(torch_schedulers.ConstantLR, factor=1.0),
        20,
    ),
    "linear": (
        schedules.linear(BASE * 0.25, BASE, transition_steps=13),
        partial(torch_schedulers.LinearLR, start_factor=0.25, total_iters=13),
        30,
    ),
    "cosine": (
        schedules.cosine(BASE, 40, end_value=0.01),
        partial(torch_schedulers.CosineAnnealingLR, T_max=40, eta_min=0.01),
        41,
    ),
    "step": (
        schedules.step(BASE, 7, gamma=0.5),
        partial(torch_schedulers.StepLR, step_size=7, gamma=0.5),
        40,
    ),
    "multistep": (
        schedules.multistep(BASE, [20, 5, 9, 9]),
        partial(torch_schedulers.MultiStepLR, milestones=[20, 5, 9, 9]),
        30,
    ),
    "exponential": (
        schedules.exponential(BASE, 0.93),
        partial(torch_schedulers.ExponentialLR, gamma=0.93),
        60,
    ),
    "polynomial": (
        schedules.polynomial(BASE, 0.0, transition_steps=20, power=1.7),
        partial(torch_schedulers.PolynomialLR, total_iters=20, power=1.7),
        30,
    ),
    "one_cycle": (
        schedules.one_cycle(0.5, 50),
        partial(torch_schedulers.OneCycleLR, max_lr=0.5, total_steps=50, cycle_momentum=False),
        50,
    ),
    "one_cycle_in_lines": (
        schedules.one_cycle(0.5, 33, pct_start=0.4, anneal_strategy="linear", div_factor=5.0, final_div_factor=10.0),
        partial(
            torch_schedulers.OneCycleLR,
            max_lr=0.5,
            total_steps=33,
            pct_start=0.4,
            anneal_strategy="linear",
            div_factor=5.0,
            final_div_factor=10.0,
            cycle_momentum=False,
        ),
        33,
    ),
    "one_cycle_of_three": (
        schedules.one_cycle(0.5, 50, three_phase=True),
        partial(torch_schedulers.OneCycleLR, max_lr=0.5, total_steps=50, three_phase=True, cycle_momentum=False),
        50,
    ),
    "piecewise": (
        schedules.piecewise(BASE * 0.5, {11: 2.0}),
        partial(torch_schedulers.ConstantLR, factor=0.5, total_iters=11),
        20,
    ),
    "warmup_cosine": (
        schedules.warmup_cosine(BASE, 10, total=50, end=BASE * 0.1),
        lambda optimizer: torch_schedulers.LambdaLR(
            optimizer,
            lambda t: t / 10 if t < 10 else 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, (t - 10) / 40))),
        ),
        70,
    ),
    "per_epoch": (
        schedules.per_epoch(schedules.step(BASE, 2), updates_per_epoch=5),
        lambda optimizer: torch_schedulers.LambdaLR(optimizer, lambda t: 0.1 ** (t // 5 // 2)),
        50,
    ),
}


@pytest.mark.peer
@pytest.mark.parametrize("name", TORCH)
def test_a_schedule_is_torchs_over_a_whole_run(name: str):
    ours, theirs, steps = TORCH[name]
    assert values(ours, steps) == pytest.approx(torch_values(theirs, steps), rel=1e-10, abs=1e-15)


@pytest.mark.peer
def test_joined_schedules_are_torchs_sequential():
    def sequential(optimizer: torch.optim.Optimizer) -> Any:
        parts = [
            torch_schedulers.LinearLR(optimizer, start_factor=0.1, total_iters=10),
            torch_schedulers.CosineAnnealingLR(optimizer, T_max=30),
        ]
        return torch_schedulers.SequentialLR(optimizer, parts, milestones=[10])

    ours = schedules.join([schedules.linear(BASE * 0.1, BASE, transition_steps=10), schedules.cosine(BASE, 30)], [10])
    tabulated = schedules.from_torch_scheduler(sequential, BASE, steps=41)
    assert values(ours, 40) == pytest.approx(torch_values(sequential, 40), rel=1e-10, abs=1e-15)
    assert values(tabulated, 40) == pytest.approx(values(ours, 40), rel=1e-10, abs=1e-15)


@pytest.mark.peer
def test_a_schedule_that_is_one_update_off_is_caught_by_the_comparison():
    ours, theirs, steps = TORCH["step"]
    late = schedules.join([schedules.constant(BASE), ours], [1])
    assert values(late, steps) != pytest.approx(torch_values(theirs, steps), rel=1e-10)


OPTAX: dict[str, tuple[Schedule, Callable[[Any], Any]]] = {
    "warmup_cosine": (
        schedules.warmup_cosine(1.0, 5, total=30, end=0.1, start=0.2),
        lambda s: s.warmup_cosine_decay_schedule(0.2, 1.0, 5, 30, 0.1),
    ),
    "polynomial": (
        schedules.polynomial(1.0, 0.1, transition_steps=20, power=3.0),
        lambda s: s.polynomial_schedule(1.0, 0.1, 3.0, 20),
    ),
    "exponential": (
        schedules.exponential(1.0, 0.5, transition_steps=7, staircase=True, end_value=0.1),
        lambda s: s.exponential_decay(1.0, 7, 0.5, staircase=True, end_value=0.1),
    ),
    "piecewise": (
        schedules.piecewise(1.0, {5: 0.5, 20: 0.1}),
        lambda s: s.piecewise_constant_schedule(1.0, {5: 0.5, 20: 0.1}),
    ),
    "piecewise_linear": (
        schedules.piecewise(1.0, {5: 0.5, 20: 3.0}, interpolate_type="linear"),
        lambda s: s.piecewise_interpolate_schedule("linear", 1.0, {5: 0.5, 20: 3.0}),
    ),
    "piecewise_cosine": (
        schedules.piecewise(1.0, {5: 0.5, 20: 3.0}, interpolate_type="cosine"),
        lambda s: s.piecewise_interpolate_schedule("cosine", 1.0, {5: 0.5, 20: 3.0}),
    ),
}


@pytest.mark.peer
@pytest.mark.parametrize("name", OPTAX)
def test_a_schedule_is_optaxs(name: str):
    optax = pytest.importorskip("optax", reason="optax is not installed")
    ours, theirs = OPTAX[name]
    expected = [float(theirs(optax.schedules)(count)) for count in range(40)]
    assert values(ours, 40) == pytest.approx(expected, rel=2e-6, abs=2e-6)  # optax computes in float32


@pytest.mark.parametrize(
    ("shape", "way_down"),
    [("linear", [1.0, 0.75, 0.5, 0.25, 0.0]), ("sqrt", [1.0, 0.5, 1 - 0.5**0.5, 1 - 0.75**0.5, 0.0])],
)
def test_warmup_stable_decay_by_hand(shape: Any, way_down: list[float]):
    found = values(schedules.warmup_stable_decay(1.0, 2, decay=4, total=10, shape=shape), 13)
    assert found == pytest.approx([0.0, 0.5, 1.0, 1.0, 1.0, 1.0, *way_down, 0.0, 0.0])


def test_the_level_part_does_not_depend_on_the_total():
    short, long = (schedules.warmup_stable_decay(1.0, 3, decay=2, total=total) for total in (10, 100))
    assert values(short, 9) == values(long, 9)


ENDLESS = {"exponential", "step", "table"}
MANY: dict[str, Schedule] = {
    **{name: ours for name, (ours, _, _) in TORCH.items()},
    "wsd": schedules.warmup_stable_decay(BASE, 5, decay=10, total=30, shape="cosine"),
    "no_warmup": schedules.warmup_cosine(BASE, 0, total=30),
    "join": schedules.join([schedules.linear(0.0, BASE, transition_steps=5), schedules.cosine(BASE, 20)], [5]),
    "table": schedules.from_torch_scheduler(torch_schedulers.CosineAnnealingWarmRestarts, BASE, steps=30, T_0=7),
}


@pytest.mark.parametrize("name", MANY)
def test_a_schedule_gives_a_0d_float64_and_leaves_the_count_as_it_was(name: str):
    count = torch.tensor(3)
    value = MANY[name](count)
    assert (value.shape, value.dtype, value.device) == (torch.Size([]), torch.float64, count.device)
    assert count == 3
    assert float(MANY[name](3)) == float(value)
    assert (torch.ones(2) * value).dtype == torch.float32


@pytest.mark.parametrize("name", [name for name in MANY if name not in ENDLESS])
def test_past_its_end_a_schedule_stays(name: str):
    assert float(MANY[name](10_000)) == float(MANY[name](1_000_000_000_000))


def test_past_its_table_a_torch_scheduler_stays_at_its_last_value():
    table = schedules.from_torch_scheduler(torch_schedulers.ExponentialLR, 1.0, steps=4, gamma=0.5)
    assert values(table, 6) == [1.0, 0.5, 0.25, 0.125, 0.125, 0.125]


@pytest.mark.compile
def test_a_whole_run_of_every_schedule_is_one_graph():
    def every(count: Tensor) -> list[Tensor]:
        return [schedule(count) for schedule in MANY.values()]

    with count_graphs() as graphs:
        compiled = torch.compile(every, backend="aot_eager", fullgraph=True)
        for count in map(torch.tensor, range(0, 60, 6)):
            torch.testing.assert_close(compiled(count), every(count), rtol=1e-12, atol=0.0)
    assert graphs() == 1


@pytest.mark.compile
@pytest.mark.parametrize("name", MANY)
def test_a_schedule_can_be_traced_so_it_never_looks_at_the_count(name: str):
    graph = make_fx(MANY[name], tracing_mode="fake", _allow_non_fake_inputs=True)(torch.tensor(0))
    for count in (0, 9, 31, 99):
        torch.testing.assert_close(graph(torch.tensor(count)), MANY[name](torch.tensor(count)), rtol=0.0, atol=0.0)


@pytest.mark.compile
def test_a_schedule_that_looks_at_the_count_is_caught_by_the_trace():
    def looks(count: Tensor) -> Tensor:
        return torch.ones(()) if count > 3 else torch.zeros(())

    with pytest.raises(RuntimeError, match=r"data|symbolic|Tensor"):
        make_fx(looks, tracing_mode="fake")(torch.tensor(0))


SMOOTH = st.one_of(
    st.builds(
        lambda peak, warmup, rest, end, start: (
            schedules.warmup_cosine(peak, warmup, total=warmup + rest, end=end, start=start),
            math.pi * max(abs(peak - start) / max(warmup, 1), abs(peak - end) / rest),
        ),
        *(st.floats(0, 1), st.integers(1, 20), st.integers(1, 20), st.floats(0, 1), st.floats(0, 1)),
    ),
    st.builds(
        lambda peak, warmup, decay, level, shape: (
            schedules.warmup_stable_decay(peak, warmup, decay=decay, total=warmup + decay + level, shape=shape),
            math.pi * peak / min(warmup, decay),
        ),
        *(st.floats(0, 1), st.integers(1, 9), st.integers(1, 9), st.integers(0, 9)),
        st.sampled_from(["linear", "cosine"]),
    ),
    st.builds(
        lambda a, b, n, power: (
            schedules.polynomial(a, b, transition_steps=n, power=power),
            power * abs(a - b) / n,
        ),
        *(st.floats(-1, 1), st.floats(-1, 1), st.integers(1, 40), st.floats(1, 3)),
    ),
)


@settings(deadline=None, max_examples=60)
@given(case=SMOOTH)
def test_a_curve_never_moves_further_in_one_update_than_its_slope_allows(case: tuple[Schedule, float]):
    schedule, slope = case
    found = values(schedule, 45)
    assert all(abs(b - a) <= slope + 1e-12 for a, b in pairwise(found))


def test_a_jump_is_caught_by_that_law():
    jumping = values(schedules.piecewise(1.0, {20: 0.1}), 45)
    assert not all(abs(b - a) <= 1.0 / 45 for a, b in pairwise(jumping))


@settings(deadline=None, max_examples=60)
@given(a=st.floats(-1, 1), b=st.floats(-1, 1), n=st.integers(1, 50))
def test_the_ends_are_exact(a: float, b: float, n: int):
    for schedule in (
        schedules.linear(a, b, transition_steps=n),
        schedules.polynomial(a, b, transition_steps=n, power=2.0),
        schedules.piecewise(a, {n: 0.5}, interpolate_type="linear"),
    ):
        assert float(schedule(0)) == a
    assert float(schedules.linear(a, b, transition_steps=n)(n)) == b
    assert float(schedules.cosine(a, n, end_value=b)(n)) == b


def test_a_schedule_that_has_not_begun_is_not_asked_about_the_past():
    asked: list[int] = []

    def own(count: Tensor) -> Tensor:
        asked.append(int(count))
        return count.double().log1p()

    schedules.join([schedules.constant(1.0), own], [10])(torch.tensor(3))
    assert asked == [0]


def test_a_torch_scheduler_of_epochs():
    by_epoch = schedules.per_epoch(
        schedules.from_torch_scheduler(torch_schedulers.StepLR, 1.0, steps=3, step_size=1, gamma=0.5),
        updates_per_epoch=2,
    )
    assert values(by_epoch, 8) == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.25, 0.25]


def test_a_cyclic_scheduler_finds_the_momentum_it_asks_for():
    cyclic = schedules.from_torch_scheduler(
        torch_schedulers.CyclicLR, 0.1, steps=9, base_lr=0.1, max_lr=0.5, step_size_up=2, cycle_momentum=False
    )
    assert values(cyclic, 5) == pytest.approx([0.1, 0.3, 0.5, 0.3, 0.1])


CYCLES = [
    (torch_schedulers.OneCycleLR, {"max_lr": 0.5, "total_steps": 12}),
    (torch_schedulers.OneCycleLR, {"max_lr": 0.5, "total_steps": 12, "three_phase": True, "base_momentum": 0.5}),
    (torch_schedulers.CyclicLR, {"base_lr": 0.1, "max_lr": 0.5, "step_size_up": 2}),
]


@pytest.mark.parametrize(("kind", "kwargs"), CYCLES)
def test_a_momentum_that_is_cycled_is_told_and_can_be_had(kind: Any, kwargs: dict[str, Any]):
    told = rf"{kind.__name__} cycles the momentum between 0\.\d+ and 0\.\d+.*cure: pass cycle_momentum=False; or call"
    with pytest.warns(UserWarning, match=told):
        rates = schedules.from_torch_scheduler(kind, 0.1, steps=12, **kwargs)
    momenta = schedules.from_torch_scheduler(kind, 0.1, steps=12, key="momentum", **kwargs)
    torch.manual_seed(0)
    param, target = torch.nn.Parameter(torch.randn(4, dtype=torch.float64)), torch.randn(4, dtype=torch.float64)
    tx = optim.inject(optim.sgd)(learning_rate=rates, momentum=momenta)
    params = {"w": param.detach().clone()}
    state = tx.init(params)
    theirs = torch.optim.SGD([param], 0.1, momentum=0.9)
    scheduler = kind(theirs, **kwargs)
    for index in range(12):
        theirs.zero_grad()
        (param - target).square().sum().backward()
        theirs.step()
        updates, state = tx.update({"w": 2 * (params["w"] - target)}, state, params)
        params = optim.apply_updates(params, updates)
        if index < 11:
            scheduler.step()
    assert torch.allclose(params["w"], param.detach(), rtol=0, atol=1e-6)


def test_a_momentum_that_is_not_cycled_is_no_table():
    with pytest.raises(ConfigError, match=r"StepLR does not cycle the momentum \(cure: key=\"lr\"\)"):
        schedules.from_torch_scheduler(torch_schedulers.StepLR, 0.1, steps=3, key="momentum", step_size=1)
    with pytest.raises(ConfigError, match="key='betas'"):
        schedules.from_torch_scheduler(torch_schedulers.StepLR, 0.1, steps=3, key="betas", step_size=1)


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    return torch_schedulers.ReduceLROnPlateau(optimizer)


def built() -> Any:
    return torch_schedulers.StepLR(torch.optim.SGD([torch.zeros(1)], lr=0.1), 3)


BAD: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: schedules.constant(math.nan),
        r"constant: value=nan must be a finite number \(cure: pass a finite number\)",
    ),
    (lambda: schedules.constant("0.3"), r"constant: value='0\.3' is a str, not a number \(cure: value=0\.3\)"),  # pyright: ignore[reportArgumentType]  # the point of the test
    (lambda: schedules.linear(1.0, math.inf, transition_steps=3), r"linear: end_value=inf must be a finite number"),
    (lambda: schedules.linear(1.0, 0.0, transition_steps=0), r"transition_steps=0 must be an int of at least 1"),
    (lambda: schedules.linear(True, 0.0, transition_steps=1), r"init_value=True is a bool, not a number"),
    (
        lambda: schedules.polynomial(1.0, 0.0, transition_steps=3, power=0.0),
        r"polynomial: power=0\.0 must be a finite number greater than 0",
    ),
    (lambda: schedules.cosine(1.0, 10.0), r"decay_steps=10\.0 must be an int of"),  # pyright: ignore[reportArgumentType]  # the point of the test
    (
        lambda: schedules.warmup_cosine(1.0, 10, total=10),
        r"warmup=10 leaves no updates of total=10.*cure: warmup=1, total",
    ),
    (lambda: schedules.warmup_cosine(1.0, 200, total=100), r"warmup_cosine: warmup=200 leaves no updates of total=100"),
    (lambda: schedules.warmup_cosine(1.0, -1, total=100), r"warmup=-1 must be an int of at least 0"),
    (
        lambda: schedules.warmup_stable_decay(1.0, 6, decay=5, total=10),
        r"warmup=6 and decay=5 are more than total=10 \(cure: total=11",
    ),
    (lambda: schedules.warmup_stable_decay(1.0, 0, decay=1, total=9, shape="cubic"), r"shape='cubic'"),  # pyright: ignore[reportArgumentType]  # the point of the test
    (lambda: schedules.step(1.0, 0), r"step: step_size=0 must be an int of"),
    (lambda: schedules.step(1.0, 1, gamma=-0.1), r"gamma=-0\.1 must be a finite number greater than 0"),
    (lambda: schedules.multistep(1.0, [3, 0]), r"multistep: milestones=0 must be an int of at least 1"),
    (lambda: schedules.exponential(1.0, 0.0), r"exponential: gamma=0\.0 must be a finite number greater than 0"),
    (lambda: schedules.exponential(1.0, 0.9, end_value=math.nan), r"end_value=nan must be a finite number"),
    (lambda: schedules.one_cycle(1.0, 3), r"pct_start=0\.3 of total_steps=3 leaves a phase without an update"),
    (lambda: schedules.one_cycle(1.0, 100, pct_start=1.0), r"pct_start=1\.0 of total_steps=100 leaves a phase"),
    (lambda: schedules.one_cycle(1.0, 100, pct_start=0.6, three_phase=True), r"leaves a phase without an update"),
    (lambda: schedules.one_cycle(1.0, 100, anneal_strategy="exp"), r"anneal_strategy='exp'"),  # pyright: ignore[reportArgumentType]  # the point of the test
    (lambda: schedules.piecewise(1.0, {0: 0.1}), r"boundaries_and_scales=0 must be an int of at least 1"),
    (
        lambda: schedules.piecewise(1.0, {5: -0.1}),
        r"boundaries_and_scales\[5\]=-0\.1 must be .*cure: boundaries_and_scales\[5\]=0\.1",
    ),
    (lambda: schedules.piecewise(1.0, {}, interpolate_type="cubic"), r"interpolate_type='cubic'"),  # pyright: ignore[reportArgumentType]  # the point of the test
    (lambda: schedules.join([], []), r"join: 0 schedules and the boundaries \[\]"),
    (lambda: schedules.join([schedules.constant(1.0)] * 2, [1, 2]), r"2 schedules and the boundaries \[1, 2\]"),
    (lambda: schedules.join([schedules.constant(1.0)] * 3, [5, 5]), r"3 schedules and the boundaries \[5, 5\]"),
    (lambda: schedules.multistep(1.0, 0.1), r"multistep: milestones=0\.1 must be a list \(cure: milestones=\[0\.1"),  # pyright: ignore[reportArgumentType]  # the point of the test
    (lambda: schedules.multistep(1.0, torch.tensor(3)), r"milestones=tensor\(3\) must be a list"),  # pyright: ignore[reportArgumentType]  # the point of the test
    (
        lambda: schedules.piecewise(1.0, 0.1),
        r"piecewise: boundaries_and_scales=0\.1 is not a mapping \(cure: pass \{update",
    ),  # pyright: ignore[reportArgumentType]  # the point of the test
    (lambda: schedules.piecewise(1.0, {"a": 0.1, 3: 0.1}), r"boundaries_and_scales='a' must be an int of"),  # pyright: ignore[reportArgumentType]  # the point of the test
    (lambda: schedules.join(0.1, [3]), r"join: schedules=0\.1 must be a list \(cure: schedules=\[0\.1\]"),  # pyright: ignore[reportArgumentType]  # the point of the test
    (lambda: schedules.join([schedules.constant(1.0)] * 2, 3), r"join: boundaries=3 must be a list"),  # pyright: ignore[reportArgumentType]  # the point of the test
    (
        lambda: schedules.join([schedules.constant(1.0), 0.1], [3]),  # pyright: ignore[reportArgumentType]  # the point of the test
        r"schedules\[1\]=0\.1 must be a function \(cure: schedules\.constant\(0\.1\)\)",
    ),
    (
        lambda: schedules.per_epoch(0.1, updates_per_epoch=9),
        r"per_epoch: schedule=0\.1 must be a function \(cure: schedules\.constant\(0\.1\)\)",
    ),  # pyright: ignore[reportArgumentType]  # the point of the test
    (lambda: schedules.per_epoch(schedules.constant(1.0), updates_per_epoch=0), r"updates_per_epoch=0 must be an int"),
    (
        lambda: schedules.from_torch_scheduler(torch_schedulers.ReduceLROnPlateau, 0.1, steps=3),
        r"ReduceLROnPlateau depends on a metric.*cure: ps\.fit\(\.\.\., callbacks=\[ps\.reduce_on_plateau",
    ),
    (lambda: schedules.from_torch_scheduler(plateau, 0.1, steps=3), r"ReduceLROnPlateau depends on a metric"),
    (
        lambda: schedules.from_torch_scheduler(built(), 0.1, steps=3),
        r"the scheduler is a StepLR, not a class \(cure: .*\(StepLR, 0\.1, steps=3, ",
    ),
    (
        lambda: schedules.from_torch_scheduler(lambda optimizer: None, 0.1, steps=3),
        r"is a NoneType, not a class",
    ),  # pyright: ignore[reportArgumentType]  # the point of the test
    (lambda: schedules.from_torch_scheduler(torch_schedulers.ExponentialLR, 0.1, steps=0, gamma=1), r"steps=0 must be"),
    (
        lambda: schedules.from_torch_scheduler(
            torch_schedulers.LambdaLR, 0.1, steps=9, lr_lambda=lambda t: math.inf if t == 4 else 1.0
        ),
        r"the learning rate of step 4 is inf \(cure: steps=4\)",
    ),
]


@pytest.mark.parametrize(("make", "message"), BAD)
def test_arguments_that_make_no_schedule_are_refused(make: Callable[[], Any], message: str):
    with pytest.raises(ConfigError, match=message) as caught:
        make()
    assert caught.value.hint


@pytest.mark.cuda
def test_on_cuda_no_schedule_waits_for_the_device():
    count = torch.tensor(3).cuda()
    for schedule in MANY.values():
        schedule(count)
    with no_waiting():
        found = {name: schedule(count) for name, schedule in MANY.items()}
    assert {name: float(value) for name, value in found.items()} == pytest.approx(
        {name: float(schedule(3)) for name, schedule in MANY.items()}
    )


def test_a_table_of_torchs_is_copied_to_the_device_once() -> None:
    """Inside of a graph it could not be: a CUDA graph takes no copies from the host."""
    table = schedules.from_torch_scheduler(torch_schedulers.StepLR, 1.0, steps=3, step_size=1, gamma=0.5)

    def copies() -> int:
        graph = make_fx(table, tracing_mode="fake", _allow_non_fake_inputs=True)(torch.empty((), device="meta")).graph
        return sum(node.target is torch.ops.aten._to_copy.default for node in graph.nodes)

    count = torch.empty((), dtype=torch.int64, device="meta")
    assert copies() == 1
    assert table(count).device.type == "meta"  # as `init` asks
    assert copies() == 0
    assert float(table(2)) == 0.25
