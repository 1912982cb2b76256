"""What a compiled step reads besides its arguments is never stale."""

from __future__ import annotations

import dataclasses
import logging
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, library, nn

import purestep as ps
from purestep.compile.captured_values import CapturedValues

pytestmark = pytest.mark.compile

WEIGHT = 0.0
TABLE = {"weight": 0.0}
BOX = [0.0]
SPACE = types.SimpleNamespace(weight=0.0)
TENSOR = torch.tensor(0.0)


@dataclasses.dataclass
class Config:
    weight: float = 0.0


CONFIG = Config()


def weighed(model: Any, batch: Any, weight: Any) -> ps.Loss:
    y = model(batch[0])
    return ps.Loss((y - batch[1]).square().mean() + weight * y.square().mean(), torch.tensor(4.0), {})


class Own:
    def __init__(self) -> None:
        self.weight = 0.0

    def __call__(self, model: Any, batch: Any) -> ps.Loss:
        return weighed(model, batch, self.weight)


class Helped(Own):
    def __call__(self, model: Any, batch: Any) -> ps.Loss:
        return self.loss(model, batch)

    def loss(self, model: Any, batch: Any) -> ps.Loss:
        return weighed(model, batch, self.weight)


class Warm(nn.Linear):
    temperature = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + type(self).temperature + Warm.temperature)


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = 0.0

    def forward(self, y: Tensor, target: Tensor) -> Tensor:
        return (y - target).square().mean() + self.weight * y.square().mean()


def _global_number() -> Any:
    return lambda model, batch: weighed(model, batch, WEIGHT), lambda: globals().update(WEIGHT=5.0)


def _global_tensor() -> Any:
    return lambda model, batch: weighed(model, batch, TENSOR), lambda: globals().update(TENSOR=torch.tensor(5.0))


def _dataclass() -> Any:
    return lambda model, batch: weighed(model, batch, CONFIG.weight), lambda: setattr(CONFIG, "weight", 5.0)


def _item() -> Any:
    return lambda model, batch: weighed(model, batch, TABLE["weight"]), lambda: TABLE.update(weight=5.0)


def _list() -> Any:
    return lambda model, batch: weighed(model, batch, BOX[0]), lambda: BOX.__setitem__(0, 5.0)


def _namespace() -> Any:
    return lambda model, batch: weighed(model, batch, SPACE.weight), lambda: setattr(SPACE, "weight", 5.0)


def _closure() -> Any:
    weight = 0.0

    def change() -> None:
        nonlocal weight
        weight = 5.0

    return lambda model, batch: weighed(model, batch, weight), change


def _default() -> Any:
    def objective(model: Any, batch: Any, config: Config = CONFIG) -> ps.Loss:
        return weighed(model, batch, config.weight)

    return objective, lambda: setattr(CONFIG, "weight", 5.0)


def _method_called() -> Any:
    own = Helped()
    return own, lambda: setattr(own, "weight", 5.0)


def _class_attribute() -> Any:
    return lambda model, batch: weighed(model, batch, Config.weight), lambda: setattr(Config, "weight", 5.0)


def _attribute() -> Any:
    own = Own()
    return own, lambda: setattr(own, "weight", 5.0)


def _method() -> Any:
    own = Own()
    return own.__call__, lambda: setattr(own, "weight", 5.0)


def _criterion() -> Any:
    criterion = Criterion()
    return ps.supervised(criterion), lambda: setattr(criterion, "weight", 5.0)


def _smoothing() -> Any:
    criterion = nn.HuberLoss(delta=1.0)
    return ps.supervised(criterion), lambda: setattr(criterion, "delta", 0.01)


PLACES = [
    _global_number, _global_tensor, _dataclass, _item, _list, _namespace, _closure, _default, _attribute, _method,
    _criterion, _smoothing, _method_called, _class_attribute,
]  # fmt: skip


@pytest.fixture(autouse=True)
def _as_it_was() -> Any:  # pyright: ignore[reportUnusedFunction]
    yield
    globals().update(WEIGHT=0.0, TENSOR=torch.tensor(0.0))
    Config.weight = CONFIG.weight = TABLE["weight"] = BOX[0] = SPACE.weight = Warm.temperature = 0.0


def batch() -> Any:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(4, 2, generator=generator), torch.randn(4, 1, generator=generator)


def warm() -> Warm:
    torch.manual_seed(0)
    return Warm(2, 1)


@pytest.mark.parametrize("make", PLACES)
def test_a_changed_value_makes_the_graph_anew(make: Callable[[], Any], caplog: pytest.LogCaptureFixture):
    objective, change = make()
    program = ps.program(warm(), objective, ps.optim.sgd(0.1))
    step = ps.compile_step(program.train_step, backend="aot_eager")
    state = program.init()
    step(state, batch())
    step(state, batch())
    assert step.graphs == 1
    assert not caplog.records
    before = program.train_step(state, batch())[0].params["weight"]
    change()
    wanted = program.train_step(state, batch())[0].params["weight"]
    assert not torch.allclose(before, wanted)
    for _ in range(2):
        torch.testing.assert_close(step(state, batch())[0].params["weight"], wanted)
    assert step.graphs == 2
    told = [record for record in caplog.records if "recompiled" in record.getMessage()]
    assert len(told) == 1


@pytest.mark.parametrize("donate", [True, False])
def test_fit_compiled_follows_a_callback(donate: bool):
    def anneal(event: Any) -> None:
        if isinstance(event, ps.events.EpochEnd):
            CONFIG.weight = 5.0

    found = []
    for compiled in (False, {"backend": "aot_eager"}):
        CONFIG.weight = 0.0
        program = ps.program(warm(), _dataclass()[0], ps.optim.sgd(0.05))
        loaders, settings = {"train": [batch()] * 3}, {"epochs": 3, "compile": compiled, "donate": donate, "sinks": []}
        result = ps.fit(program.init(), loaders, program, callbacks=[anneal], **settings)
        found.append(result.state.params["weight"])
    torch.testing.assert_close(*found)


def test_evaluation_follows_as_well():
    objective, change = _global_number()
    program = ps.program(warm(), objective, ps.optim.sgd(0.1))
    evaluate, state = ps.compile_program(program, backend="aot_eager").eval_step, program.init()
    assert evaluate is not None
    evaluate(state, batch())
    change()
    assert program.eval_step is not None
    wanted = float(program.eval_step(state, batch())["loss"])
    assert float(evaluate(state, batch())["loss"]) == pytest.approx(wanted)


def test_what_the_step_counts_itself_is_said_once_and_no_change(caplog: pytest.LogCaptureFixture):
    calls = 0
    seen: list[int] = []

    def objective(model: Any, batch: Any) -> ps.Loss:
        nonlocal calls
        calls += 1
        seen.append(calls)
        return weighed(model, batch, 0.0)

    program = ps.program(warm(), objective, ps.optim.sgd(0.1))
    step = ps.compile_step(program.train_step, backend="aot_eager")
    state = program.init()
    for _ in range(3):
        state, _ = step(state, batch())
    assert step.graphs == 1
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "calls: the step itself changes this number (0 -> 1), but Python runs once" in record.getMessage()


def test_a_value_of_every_call_is_an_error():
    objective, _ = _dataclass()
    watched = CapturedValues(ps.program(warm(), objective, ps.optim.sgd(0.1)).train_step)
    watched()
    for value in range(1, 17):
        CONFIG.weight = float(value)
        watched()
    CONFIG.weight = 17.0
    for _ in range(2):  # the second call would take the graph of the last value
        with pytest.raises(ps.errors.StepContractError, match="CONFIG.weight: the value has changed 17 times"):
            watched()
    CONFIG.weight = 16.0
    watched()


def test_an_object_that_changes_with_a_number_counts_as_another_object():
    """Graphs of a function that is gone are forgotten: another may get its id."""
    alpha, scale = 0.1, lambda x: x

    def objective(model: Any, batch: Any) -> ps.Loss:
        return weighed(model, batch, scale(alpha))

    watched = CapturedValues(ps.program(warm(), objective, ps.optim.sgd(0.1)).train_step)
    watched()
    alpha, scale = 0.2, lambda x: 2 * x
    watched()
    assert watched.objects == 1


@dataclasses.dataclass(slots=True)
class Slotted:
    weight: float = 0.0


@pytest.mark.parametrize("name", ["weight", "doubled"])
def test_attributes_without_a_dict_and_behind_a_property_are_watched(name: str):
    class Property(types.SimpleNamespace):
        @property
        def doubled(self) -> float:
            return 2 * self.weight

    config = Slotted() if name == "weight" else Property(weight=0.0)
    if name == "weight":

        def objective(model: Any, batch: Any) -> ps.Loss:
            return weighed(model, batch, config.weight)
    else:

        def objective(model: Any, batch: Any) -> ps.Loss:
            return weighed(model, batch, config.doubled)

    program = ps.program(warm(), objective, ps.optim.sgd(0.1))
    step, state = ps.compile_step(program.train_step, backend="aot_eager"), program.init()
    step(state, batch())
    config.weight = 5.0
    assert float(step(state, batch())[1]["loss"]) == pytest.approx(float(program.train_step(state, batch())[1]["loss"]))


def test_a_step_that_counts_its_traces_has_one_graph_for_a_size():
    calls = 0

    def objective(model: Any, batch: Any) -> ps.Loss:
        nonlocal calls
        calls += 1
        return weighed(model, batch, 0.0)

    program = ps.compile_program(ps.program(warm(), objective, ps.optim.sgd(0.1)), backend="aot_eager")
    state, long = program.init(), (torch.ones(6, 2), torch.ones(6, 1))
    assert program.eval_step is not None
    for _ in range(2):
        for each in (batch(), long):
            program.eval_step(state, each)
            state, _ = program.train_step(state, each)
    assert (program.train_step.graphs, program.eval_step.graphs) == (2, 2)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor, skips: bool) -> Tensor:
        return self.last(x if skips else self.first(x))


def test_a_state_lives_on_where_the_trace_of_another_packing_fails():
    """Parameters without a gradient are packed in another way, and the step is traced again."""
    calls, skips = 0, False

    def objective(model: Any, batch: Any) -> ps.Loss:
        nonlocal calls
        calls += 1
        y = model(batch[0], skips)
        if calls == 3:
            float(y.sum())
        return ps.Loss(y.square().mean(), 4, {})

    program = ps.program(Two(), objective, ps.optim.adamw(0.1))
    step = ps.compile_step(program.train_step, donate=True, backend="aot_eager")
    state, _ = step(program.init(), batch())
    skips = True
    with pytest.raises(ps.errors.StepContractError, match="reads the value"):
        step(state, batch())
    assert calls == 3
    program.train_step(state, batch())


@pytest.mark.parametrize("fails", [False, True])
def test_a_tensor_that_a_trace_stores_under_a_new_name_is_taken_out(fails: bool):
    held: dict[str, Tensor] = {}
    listed: list[Any] = [1.0, 2.0]
    last: Any = None

    def look() -> int:  # a second function that reads them
        return len(held) + len(listed)

    def objective(model: Any, batch: Any) -> ps.Loss:
        nonlocal last
        look()
        held["mask"] = batch[0] > 0
        listed.pop(0)
        listed.append(batch[0])
        last = (1, batch[0])
        if fails and held["mask"].any():
            raise AssertionError
        return weighed(model, batch, 0.0)

    step = ps.compile_step(ps.program(warm(), objective, ps.optim.sgd(0.1)).train_step, backend="aot_eager")
    with pytest.raises(ps.errors.StepContractError, match="reads the value" if fails else "stores a tensor"):
        step(ps.program(warm(), objective, ps.optim.sgd(0.1)).init(), batch())
    assert not held
    assert listed == [1.0, 2.0]
    assert last is None


def _watched(objective: Any) -> tuple[CapturedValues, list[int]]:
    """What watches a step that has been called, and a list that grows when it looks for places again."""
    watched = CapturedValues(ps.program(warm(), objective, ps.optim.sgd(0.1)).train_step)
    watched()
    looks = list[int]()
    look = watched._take
    watched._take = lambda places: (looks.append(1), look(places))[1]  # pyright: ignore[reportAttributeAccessIssue]
    return watched, looks


def test_a_global_named_like_an_attribute_is_not_watched():
    """`state` of a loop by hand is another object at every call."""
    globals().update(state=0, training=0)
    watched, looks = _watched(lambda model, batch: weighed(model, batch, 0.0 * model.training + len(model.state)))
    globals().update(state=1, training=1)
    watched()
    globals().pop("state")
    watched()
    globals().pop("training")
    watched()
    assert not looks


def test_what_is_gone_and_what_comes_is_a_change():
    table, space, holder = {"a": 1.0, "b": 2.0}, [3.0, 4.0], types.SimpleNamespace(weight=5.0)

    def objective(model: Any, batch: Any) -> ps.Loss:
        return weighed(model, batch, table["a"] + space[1] + holder.weight)

    watched, looks = _watched(objective)
    text = watched()
    for change in (
        lambda: table.pop("a"),
        lambda: space.pop(),
        lambda: delattr(holder, "weight"),
        lambda: table.update(c=6.0),
    ):
        assert watched() is text
        change()
        assert watched() != text
        text = watched()
    assert len(looks) == 4


@pytest.mark.parametrize("times", [1, 17])
def test_the_cure_of_a_changing_number_is_a_schedule(times: int, caplog: pytest.LogCaptureFixture):
    watched, _ = _watched(_dataclass()[0])
    told = ""
    for value in range(1, times + 1):
        CONFIG.weight = float(value)
        try:
            watched()
        except ps.errors.StepContractError as error:
            told = str(error)
    assert "ps.program(values={...})" in (told if times > 1 else caplog.text)


def test_scheduled_values_reach_the_objective_as_tensors(caplog: pytest.LogCaptureFixture):
    """They follow the state's count of updates: compiled once, in the history, the same after a restart."""
    caplog.set_level(logging.WARNING)

    def objective(model: Any, batch: Any) -> ps.Loss:
        assert model.values["kl"].shape == ()
        return weighed(model, batch, model.values["kl"])

    values = {"kl": ps.schedules.linear(0.0, 1.0, transition_steps=4)}
    program = ps.program(warm(), objective, ps.optim.sgd(0.1), values=values)
    step = ps.compile_step(program.train_step, backend="aot_eager")
    eager, state, told = program.init(), program.init(), []
    for _ in range(4):
        eager, _ = program.train_step(eager, batch())
        state, metrics = step(state, batch())
        told.append(float(metrics["kl"]))
    assert told == [0.0, 0.25, 0.5, 0.75]
    assert step.graphs == 1
    torch.testing.assert_close(state.params["weight"], eager.params["weight"])
    history = ps.fit(program.init(), {"train": [batch()] * 2}, program, epochs=2, sinks=[]).history
    assert history["train_kl"] == [0.125, 0.625]


@pytest.mark.parametrize("values", [{"loss": ps.schedules.constant(1.0)}, {"kl": 0.5}])
def test_values_are_schedules_under_names_of_their_own(values: Any):
    with pytest.raises(ps.errors.ConfigError, match="values has"):
        ps.program(warm(), ps.supervised(nn.MSELoss()), ps.optim.sgd(0.1), values=values)


class Experts(nn.Module):
    """Takes another way where it is told that it is compiled, as mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(3, 8, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return torch.bmm(x.view(3, 2, 8), self.weight).view(6, 8)
        return torch.cat([part @ weight for part, weight in zip(x.split(2), self.weight, strict=True)]) + 0 * EAGER[0]


EAGER = [1.0]


def test_a_step_knows_that_it_is_compiled(monkeypatch: pytest.MonkeyPatch):
    seen: list[bool] = []
    program = ps.program(Experts(), ps.supervised(nn.MSELoss()), ps.optim.sgd(0.1))
    pair = torch.ones(6, 8), torch.zeros(6, 8)
    wanted = program.train_step(program.init(), pair)[0].params["weight"]
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *args: (seen.append(torch.compiler.is_compiling()), bmm(*args))[1])
    step = ps.compile_step(program.train_step, backend="aot_eager")
    torch.testing.assert_close(step(program.init(), pair)[0].params["weight"], wanted)
    assert seen
    assert all(seen)
    assert not torch.compiler.is_compiling()


def test_an_operator_with_a_gradient_of_its_own_hears_it_too():
    heard: set[tuple[str, bool]] = set()

    @library.custom_op("purestep_tests::squared", mutates_args=())
    def squared(x: Tensor) -> Tensor:
        return x * x

    @squared.register_fake
    def _(x: Tensor) -> Tensor:
        return torch.empty_like(x)

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        heard.add(("setup", torch.compiler.is_compiling()))
        ctx.save_for_backward(inputs[0])

    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        heard.add(("backward", torch.compiler.is_compiling()))
        return 2 * ctx.saved_tensors[0] * gradient

    squared.register_autograd(backward, setup_context=setup)
    objective = lambda model, batch: ps.Loss(squared(model(batch[0]) - batch[1]).mean(), 4, {})  # noqa: E731
    program = ps.program(warm(), objective, ps.optim.sgd(0.1))
    wanted = program.train_step(program.init(), batch())[0].params["weight"]
    assert heard == {("setup", False), ("backward", False)}
    heard.clear()
    step = ps.compile_step(program.train_step, backend="aot_eager")
    torch.testing.assert_close(step(program.init(), batch())[0].params["weight"], wanted)
    assert heard == {("setup", True), ("backward", True)}


# --- numbers of the batch ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["batch", "context"])
def test_a_number_of_the_batch_that_changes_is_said_once_and_then_an_error(
    place: str, caplog: pytest.LogCaptureFixture
) -> None:
    def objective(model: Any, batch: Any, *context: Any) -> ps.Loss:
        scale = context[0] if context else batch["scale"]
        return ps.Loss((model(batch["x"]) * scale).square().mean(), 4, {})

    program = ps.program(nn.Linear(2, 1), objective, ps.optim.sgd(0.1))
    step, state = ps.compile_step(program.train_step, backend="aot_eager"), program.init()

    def call(number: float, rows: int = 4) -> None:
        x = {"x": torch.ones(rows, 2)}
        step(state, x, number) if place == "context" else step(state, {**x, "scale": number})

    for number in (0.0, *range(1, 9), 0.0, *map(float, range(9, 17))):  # 0.0 again compiles nothing
        call(number)
    call(3, rows=5)  # a size is no number
    name = "context/0" if place == "context" else "batch/scale"
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == [
        f"{name} was 0.0, is 1: a graph holds it, so the step is recompiled"
    ]
    for _ in range(2):
        with pytest.raises(ps.errors.StepContractError, match=f"{name}: the value has changed 17 times.*as a tensor"):
            call(17.5)
    assert step.graphs == 18


def test_a_number_of_the_batch_that_does_not_change_is_not_spoken_of(caplog: pytest.LogCaptureFixture) -> None:
    def objective(model: Any, batch: Any) -> ps.Loss:
        return ps.Loss((model(batch[0]) * batch[1]).square().mean(), 4, {})

    program = ps.program(nn.Linear(2, 1), objective, ps.optim.sgd(0.1))
    step, state = ps.compile_step(program.train_step, backend="aot_eager"), program.init()
    for rows in (4, 3, 2, 4):
        state, _ = step(state, (torch.ones(rows, 2), 0.5))
    assert not caplog.records
