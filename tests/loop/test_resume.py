"""A run that was stopped and went on is the run that was never stopped: state, history and best, bit for bit."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import signal
from functools import partial, reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_trees_close, image_batch, tiny_convnet
from rigs import forkserver
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import purestep as ps
from purestep import events, metrics, optim, schedules
from purestep.compile import capture
from purestep.compile.graphs import Graphs
from purestep.errors import Mismatch
from purestep.types import Program

fit = partial(ps.fit, progress=False)
BATCHES, EPOCHS, CALLS = 7, 3, 8  # batches an epoch; calls an epoch: seven and the flush of the last, short window


def program(tail: Any = "step") -> Program:
    """Everything that a state can hold: BatchNorm, dropout, moments, schedule, average, fp16 scale, an open window."""
    objective = ps.supervised(nn.CrossEntropyLoss(), metrics={"accuracy": metrics.accuracy})
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(schedules.warmup_cosine(peak=0.01, warmup=2, total=9)))
    return ps.program(tiny_convnet(), objective, tx, precision="16-mixed", ema=0.9, accumulate=3, tail=tail)


def loaders(stop: Stop | None = None) -> dict[str, Any]:
    data: Any = TensorDataset(*image_batch(4 * BATCHES))
    if stop is not None:
        data = Stopping(data, stop)
    return {"train": DataLoader(data, batch_size=4, shuffle=True), "val": [image_batch(6, 9), image_batch(3, 10)]}


class Stop:
    """Counts batches, and asks for the end as the n-th is loaded: exactly n-1 are done then."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self) -> None:
        self.left -= 1
        if self.left == -1:
            signal.raise_signal(signal.SIGINT)


class Stopping(Dataset[Any]):
    """A dataset that tells when a batch is loaded."""

    def __init__(self, data: TensorDataset, stop: Stop) -> None:
        self.data, self.stop = data, stop

    def __len__(self) -> int:
        return len(self.data)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if len(indices) > 1:  # else a probe, which loads one item twice
            self.stop()
        return [self.data[index] for index in indices]

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


# The fixture of the module is made before a test keeps `fit` on the CPU.
SETTINGS: dict[str, Any] = {"epochs": EPOCHS, "early_stopping": 2, "log_every": 2, "device": "cpu"}


def run(directory: Path | None, *, stop: Stop | None = None, tail: Any = "step", **fields: Any) -> Any:
    made = program(tail)
    return fit(made.init(seed=5), loaders(stop), made, snapshots=directory, **{**SETTINGS, **fields})


def interrupted(directory: Path, after: int, **fields: Any) -> Any:
    """A run that ends after that many further batches, or one that is over before."""
    try:
        return run(directory, stop=Stop(after), **fields)
    except KeyboardInterrupt as error:
        return error.result  # type: ignore[attr-defined]


def same(found: Any, expected: Any) -> None:
    """Every bit of the state, every number of the history, the best epoch and why it ended."""
    assert_trees_close(ps.clone(found.state), ps.clone(expected.state), exact=True)
    assert found.history == expected.history
    assert (found.best, found.epochs, found.stop_reason) == (expected.best, expected.epochs, expected.stop_reason)


@pytest.fixture(scope="module")
def whole() -> Any:
    return run(None)


def test_the_whole_run_has_everything_in_it(whole: Any) -> None:
    """What the tests below rest on."""
    assert int(whole.state.step) == EPOCHS * CALLS
    assert whole.state.scaler.scale.item() == 2.0**16
    assert whole.history["step"] == [3, 6, 9]
    assert len({*whole.history["train_loss"]}) == len({*whole.history["val_loss"]}) == EPOCHS


@pytest.mark.parametrize("batch", range(BATCHES + 1))
def test_stopped_at_any_batch_of_an_epoch_it_ends_in_the_same_bits(batch: int, whole: Any, tmp_path: Path) -> None:
    after = BATCHES + batch  # in the second epoch
    part = interrupted(tmp_path, after)
    assert part.stop_reason == "interrupted"
    assert int(part.state.step) == CALLS + batch + (batch == BATCHES)
    same(run(tmp_path), whole)


def test_a_resumed_run_can_be_resumed_again_and_again(whole: Any, tmp_path: Path) -> None:
    done = [int(interrupted(tmp_path, after).state.step) for after in (2, 1, 5, 3, 1, 4)]
    assert done == [2, 3, 9, 12, 13, 18]
    same(run(tmp_path), whole)
    same(run(tmp_path), whole)  # and one that is over stays so


def test_what_a_step_remembers_outside_its_state_is_noticed(tmp_path: Path) -> None:
    """The law of this file, on a step that counts for itself."""

    def forgetful() -> Program:
        made, calls = program(), [0]

        def train_step(state: Any, batch: Any) -> Any:
            calls[0] += 1
            return made.train_step(state, (batch[0] + 0.001 * calls[0], batch[1]))

        return made._replace(train_step=train_step)

    def go(directory: Path | None, stop: Stop | None = None) -> Any:
        made = forgetful()
        return fit(made.init(seed=5), loaders(stop), made, epochs=2, snapshots=directory, check_every=None)

    with pytest.raises(KeyboardInterrupt):
        go(tmp_path, Stop(3))
    with pytest.raises(AssertionError, match="params"):
        same(go(tmp_path), go(None))


@pytest.mark.parametrize("tail", ["carry", "drop"])
def test_the_other_tails_are_resumed_too(tail: Any, tmp_path: Path) -> None:
    for after in (8, 5):
        interrupted(tmp_path, after, tail=tail)
    same(run(tmp_path, tail=tail), run(None, tail=tail))


def accumulating(directory: Path, over: int, batches: int, **fields: Any) -> Any:
    made = ps.program(
        tiny_convnet(dropout=0), ps.supervised(nn.CrossEntropyLoss()), optim.sgd(0.1), accumulate=over, tail="carry"
    )
    return fit(
        made.init(seed=5), [image_batch(4, seed) for seed in range(batches)], made, snapshots=directory, **fields
    )


@pytest.mark.parametrize("count", [7, 8])
@pytest.mark.parametrize("then", [2, 6])
def test_a_run_keeps_its_accumulate(then: int, count: int, tmp_path: Path) -> None:
    """3 of 4 batches are in the window after an epoch of 7, none after one of 8."""
    accumulating(tmp_path, 4, count, epochs=1)
    with pytest.raises(Mismatch, match=rf"accumulate was 4 and is {then} \(cure: .*accumulate=4"):
        accumulating(tmp_path, then, count, epochs=2)
    assert int(accumulating(tmp_path, 4, count, epochs=2).state.updates) == 2 * count // 4


def test_a_state_of_a_program_with_a_larger_window_is_refused() -> None:
    two, four = (
        ps.program(tiny_convnet(), ps.supervised(nn.CrossEntropyLoss()), optim.sgd(0.1), accumulate=n) for n in (2, 4)
    )
    with pytest.raises(Mismatch, match="accumulate was 4 and is 2"):
        fit(four.init(), [image_batch(4)] * 4, two, epochs=1)


def test_early_stopping_keeps_its_patience(tmp_path: Path) -> None:
    """A monitor that never improves after the first epoch: the run must end where the whole one does."""
    fields: dict[str, Any] = {"epochs": 9, "monitor": "lr", "mode": "max", "early_stopping": 3}
    expected = run(None, **fields)
    assert (expected.stop_reason, expected.epochs) == ("early_stopping", 4)
    for after in (BATCHES + 2, BATCHES, 3):
        interrupted(tmp_path, after, **fields)
    same(run(tmp_path, **fields), expected)


def test_a_run_that_is_stopped_inside_epochs_has_the_rows_of_the_whole_run(tmp_path: Path) -> None:
    """A stopped call evaluates: its own result has that row, and the run that goes on does not count it."""
    data = {"train": [image_batch(4, seed) for seed in range(8)], "val": [image_batch(9, 9)]}
    objective = ps.supervised(nn.CrossEntropyLoss(), metrics={"accuracy": metrics.accuracy})
    program = ps.program(tiny_convnet().eval(), objective, optim.sgd(0.002))
    fields: dict[str, Any] = {"epochs": 8, "monitor": "val_accuracy", "mode": "max", "early_stopping": 3}
    expected = fit(program.init(), data, program, **fields)
    assert expected.stop_reason == "early_stopping"
    for number in range(30):
        steps = 0

        def stop(event: Any, number: int = number) -> Any:
            nonlocal steps
            steps += isinstance(event, events.StepEnd)
            return ps.Stop("the slot is over") if steps == 3 + number % 3 else None

        found = fit(program.init(), data, program, snapshots=tmp_path, callbacks=[stop], **fields)
        if found.stop_reason == "early_stopping":
            break
        assert found.history["step"][-1] == int(found.state.updates)
    same(found, expected)


def lines(directory: Path | None, after: int | None = None, **fields: Any) -> dict[int, events.Logged]:
    """The lines of the log by their updates, but for the clock, of a run that ends after that many batches."""
    found: dict[int, events.Logged] = {}

    def keep(event: Any) -> None:
        if isinstance(event, events.Logged):
            found[event.updates] = dataclasses.replace(event, steps_per_second=0.0, wait_fraction=0.0)

    stop = None if after is None else Stop(after)
    with contextlib.suppress(KeyboardInterrupt):
        run(directory, stop=stop, sinks=[keep], **fields)
    return found


@pytest.mark.parametrize("fields", [{}, {"log_every": 4}, {"log_every": 3, "evaluate_every": 0.3, "tail": "carry"}])
def test_lines_of_the_log_are_those_of_the_whole_run(fields: Any, tmp_path: Path) -> None:
    expected = lines(None, **fields)
    assert len(expected) == 9 // fields.get("log_every", 2) - (fields.get("tail") == "carry")
    often = [lines(tmp_path / "often", after, **fields) for after in (2, 1, 5, 3, 1, 7)]
    assert {**reduce(operator.or_, often), **lines(tmp_path / "often", **fields)} == expected


@pytest.mark.parametrize(("every", "tail"), [(0.3, "step"), (0.6, "step"), (0.3, "carry"), (2, "step")])
def test_intervals_inside_an_epoch_are_resumed(every: Any, tail: Any, tmp_path: Path) -> None:
    expected = run(None, evaluate_every=every, tail=tail)
    assert len(expected.history["epoch"]) > EPOCHS
    for after in (3, 1, 5, 4, 2):
        interrupted(tmp_path, after, evaluate_every=every, tail=tail)
    same(run(tmp_path, evaluate_every=every, tail=tail), expected)


def test_a_run_may_be_made_longer(tmp_path: Path) -> None:
    run(tmp_path, epochs=1)
    run(tmp_path, epochs=2)
    same(run(tmp_path), run(None))


def test_a_crash_costs_the_batches_since_the_last_snapshot_and_nothing_else(whole: Any, tmp_path: Path) -> None:
    class Crash(Stop):
        def __call__(self) -> None:
            self.left -= 1
            if self.left == -1:
                raise MemoryError("gone")

    made = program()
    for after in (5, 9):
        with ps.Snapshots(tmp_path, every_steps=1) as snapshots, pytest.raises(Exception, match="gone"):
            fit(made.init(seed=5), loaders(Crash(after)), made, snapshots=snapshots, **SETTINGS)
    same(run(tmp_path), whole)


def test_a_skipped_update_is_resumed_with_its_scale(tmp_path: Path) -> None:
    """An overflow in the first epoch halves the scale; the resumed run must know."""

    def scaled(stop: Stop | None) -> dict[str, Any]:
        found = loaders(stop)
        x, y = image_batch(4 * BATCHES)
        x[5] = torch.inf
        data: Any = TensorDataset(x, y)
        found["train"] = DataLoader(data if stop is None else Stopping(data, stop), batch_size=4, shuffle=True)
        return found

    made = program()
    expected = fit(made.init(seed=5), scaled(None), made, **SETTINGS)
    assert expected.state.scaler.scale.item() < 2.0**16
    assert int(expected.state.updates) < 9
    for after in (8, 4):
        with pytest.raises(KeyboardInterrupt):
            fit(made.init(seed=5), scaled(Stop(after)), made, snapshots=tmp_path, **SETTINGS)
    same(fit(made.init(seed=5), scaled(None), made, snapshots=tmp_path, **SETTINGS), expected)


def test_a_snapshot_is_good_for_another_directory(whole: Any, tmp_path: Path) -> None:
    interrupted(tmp_path / "a", 10)
    same(run(tmp_path / "b", resume=str(tmp_path / "a")), whole)
    same(run(tmp_path / "b"), whole)


def test_the_same_command_goes_on_where_it_was(whole: Any, tmp_path: Path) -> None:
    """A job that began from another run's snapshots, was preempted twice and is started again as it was."""
    interrupted(tmp_path / "old", 4)
    command = {"resume": str(tmp_path / "old")}
    for after in (3, 7):
        interrupted(tmp_path / "new", after, **command)
    interrupted(tmp_path / "new", 2)  # and once without the path
    same(run(tmp_path / "new", stop=(rest := Stop(99)), **command), whole)
    assert 99 - rest.left == EPOCHS * BATCHES - (4 + 3 + 7 + 2)  # no batch twice
    assert not list((tmp_path / "new").glob("*.archived"))


def test_a_run_goes_on_from_its_own_directory_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "b"):
        interrupted(tmp_path / name, 4)
    interrupted(tmp_path / "new", 3, resume=str(tmp_path / "a"))
    before = ps.Snapshots(tmp_path / "new", writer=False).latest()
    interrupted(tmp_path / "new", 2, resume=str(tmp_path / "b"))
    assert ps.Snapshots(tmp_path / "new", writer=False).latest() == (before or 0) + 2
    assert f"the run goes on from {tmp_path / 'new'}, which has snapshots: resume=" in caplog.text


def test_a_snapshot_saved_by_hand_is_a_state_without_a_place(tmp_path: Path) -> None:
    made = program()
    first = fit(made.init(seed=5), loaders(), made, epochs=1)
    with ps.Snapshots(tmp_path) as snapshots:
        snapshots.save(int(first.state.step), first.state)
    expected = fit(first.state, loaders(), made, epochs=1)
    for where in ({"resume": str(tmp_path)}, {"snapshots": tmp_path}):
        found = fit(made.init(seed=5), loaders(), made, epochs=1, **where)
        assert_trees_close(found.state, expected.state, exact=True)
        assert found.history == expected.history
    assert ps.Snapshots(tmp_path, writer=False).latest() == 2 * CALLS


def test_a_state_that_was_saved_by_hand_as_step_0_is_not_saved_again(tmp_path: Path) -> None:
    made = program()
    with ps.Snapshots(tmp_path) as snapshots:
        snapshots.save(0, made.init(seed=5))
    before = (tmp_path / "0").stat().st_ino

    def stops(event: Any) -> Any:
        return events.Stop() if isinstance(event, events.FitStart) else None

    result = fit(made.init(seed=5), loaders(), made, snapshots=tmp_path, callbacks=[stops], epochs=1)
    assert (int(result.state.step), (tmp_path / "0").stat().st_ino) == (0, before)


def test_another_seed_of_a_loader_that_shuffles_is_named_with_its_cure(tmp_path: Path) -> None:
    made = program()
    fit(made.init(seed=5), loaders(), made, snapshots=tmp_path, epochs=1)
    with pytest.raises(Mismatch, match=r"seed was 5 and is 6 .*\(cure: program.init\(seed=5\); for a separate run"):
        fit(made.init(seed=6), loaders(), made, snapshots=tmp_path, epochs=2)


class Root(ps.Mean):
    """A metric that computes itself."""

    def compute(self) -> Any:
        return (self.total.sum() / self.weight.sum()).sqrt()


def test_a_metric_of_a_class_survives_a_signal_in_the_evaluation_of_an_epoch(tmp_path: Path) -> None:
    """The run goes on with the row of the epoch, before any call that could say what class the metric has."""

    def objective(model: Any, batch: Any) -> ps.Loss:
        loss, rows = (model(batch[0]) - batch[1]).square(), torch.tensor(float(len(batch[0])))
        return ps.Loss(loss.mean(), rows, {"rmse": Root(torch.stack([loss.sum(), rows]), torch.stack([rows, rows]))})

    def go(directory: Path | None, *, ends: bool) -> Any:
        def end(event: Any) -> None:
            if ends and isinstance(event, events.EvalStepEnd):
                signal.raise_signal(signal.SIGINT)

        torch.manual_seed(0)
        made = ps.program(nn.Linear(2, 1), objective, optim.sgd(0.1))
        data = [(torch.full((3, 2), float(number)), torch.ones(3, 1)) for number in range(4)]
        return fit(made.init(), (data, data), made, epochs=2, snapshots=directory, callbacks=[end])

    with pytest.raises(KeyboardInterrupt):
        go(tmp_path, ends=True)
    same(go(tmp_path, ends=False), go(None, ends=False))


@pytest.mark.compile
def test_a_compiled_run_is_resumed(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"compile": {"backend": "aot_eager"}}
    expected = run(None, **fields)
    for after in (4, 7):
        interrupted(tmp_path, after, **fields)
    same(run(tmp_path, **fields), expected)


@pytest.mark.compile
def test_a_run_may_be_resumed_compiled_or_not(tmp_path: Path) -> None:
    """The packed sum of squares of the gradient, by which the norm is clipped, is rounded otherwise."""
    interrupted(tmp_path, 9, compile={"backend": "aot_eager"})
    found, expected = run(tmp_path), run(None)
    assert_trees_close(found.state, expected.state, rtol=1e-4, atol=1e-5)
    assert found.history["step"] == expected.history["step"]


@pytest.mark.parametrize("every", [1.0, 1])
@pytest.mark.parametrize("place", [events.EvalEnd, events.EpochEnd])
@pytest.mark.parametrize("by", ["signal", "error"])
def test_what_callbacks_answer_at_a_boundary_counts_once(every: Any, place: Any, by: str, tmp_path: Path) -> None:
    """One of them ends the run there: all of them are asked again, or none of them is."""

    def go(directory: Path | None, stops: int) -> Any:
        shown: list[Any] = []

        def answers(event: Any) -> Any:
            shown.extend([event.state] if hasattr(event, "state") else [])
            if not isinstance(event, events.EvalEnd | events.EpochEnd):
                return None
            return shown[-1]._replace(params={name: 0.9 * leaf for name, leaf in shown[-1].params.items()})

        def ends(event: Any) -> None:
            nonlocal stops
            stops -= isinstance(event, place)
            if stops == 0 and isinstance(event, place):
                if by == "error":
                    raise ValueError("mine")
                signal.raise_signal(signal.SIGINT)

        made, more = program(), {"test": [image_batch(4, 11)]}
        fields: dict[str, Any] = {"snapshots": directory, "evaluate_every": every, "evaluate_on": "params"}
        return fit(made.init(seed=5), loaders() | more, made, callbacks=[ends, answers], epochs=2, **fields)

    expected = go(None, 0)
    for _ in range(2):
        with pytest.raises((KeyboardInterrupt, ValueError)):
            go(tmp_path, 2 if place is events.EvalEnd else 1)
    same(go(tmp_path, 0), expected)


SCRIPT = f"""
import sys
from pathlib import Path
sys.path[:0] = [{str(Path(__file__).parent)!r}]
from test_resume import interrupted
part = interrupted(Path({{!r}}), {{}})
print(int(part.state.step), part.stop_reason)
"""


@pytest.mark.slow
def test_another_process_goes_on_to_the_same_bits(whole: Any, tmp_path: Path) -> None:
    for after, told in ((4, "4 interrupted"), (6, "11 interrupted")):
        done = forkserver.shared().run(SCRIPT.format(str(tmp_path), after), quick=True)
        assert done.out.strip() == told, done.err
    same(run(tmp_path), whole)


def injecting(rate: Any, **fixed: Any) -> Program:
    torch.manual_seed(0)
    net = nn.Linear(2, 1)
    return ps.program(net, ps.supervised(nn.MSELoss()), optim.inject(optim.sgd)(learning_rate=rate, **fixed))


def stages(directory: Path, *made: Any, caplog: pytest.LogCaptureFixture, **fields: Any) -> list[tuple[float, bool]]:
    """Of each run after another, one epoch longer: its learning rate, and whether it says that it keeps one."""
    batches = [(torch.full((4, 2), float(n)), torch.ones(4, 1)) for n in range(2)]
    found = []
    for epochs, one in enumerate(made, 1):
        caplog.clear()
        fields = {"sinks": [], "snapshots": directory, "compile": False, "device": "cpu", **fields}
        result = ps.fit(one.init(), {"train": batches}, one, epochs=epochs, **fields)
        rate = float(optim.hyperparams(result.state.opt_state)["learning_rate"])
        found.append((round(rate, 6), "optim.inject is called with" in caplog.text))
    return found


def test_a_hyperparameter_given_anew_is_named_and_the_stored_one_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = (injecting(0.1), injecting(0.1), injecting(0.05), injecting(0.05), injecting(0.1))
    found = stages(tmp_path, *made, caplog=caplog)
    # Once for each change of the call, and not where the call says again what the run has.
    assert found == [(0.1, False), (0.1, False), (0.1, True), (0.1, False), (0.1, False)]


def test_the_warning_names_the_argument_both_values_and_a_cure_that_works(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stages(tmp_path, injecting(0.1), caplog=caplog)

    def cure(event: events.Event) -> Any:
        if isinstance(event, events.FitStart):
            return event.state._replace(opt_state=optim.set_hyperparams(event.state.opt_state, learning_rate=0.05))
        return None

    one = injecting(0.05)
    found = stages(tmp_path, one, one, caplog=caplog, callbacks=[cure])
    assert found[-1][0] == 0.05
    caplog.clear()
    stages(tmp_path / "other", injecting(0.1), injecting(0.2), caplog=caplog)
    assert (
        "called with learning_rate=0.2, and the run that goes on has learning_rate=0.1, which it keeps" in caplog.text
    )
    assert "set_hyperparams(event.state.opt_state, name=value)" in caplog.text


def test_a_scheduled_hyperparameter_and_a_value_set_by_a_callback_are_no_other_call(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rates = [schedules.constant(0.1), schedules.constant(0.05)]
    found = stages(tmp_path / "1", *map(injecting, rates), caplog=caplog)
    assert [says for _, says in found] == [False, False]  # a schedule is followed as it is now
    assert found[1][0] == 0.05

    def lower(event: events.Event) -> Any:
        if isinstance(event, events.FitStart):
            return event.state._replace(opt_state=optim.set_hyperparams(event.state.opt_state, learning_rate=0.01))
        return None

    found = stages(tmp_path / "2", injecting(0.1), caplog=caplog, callbacks=[lower])
    assert found == [(0.01, False)]
    again = stages(tmp_path / "2", injecting(0.1), injecting(0.1), caplog=caplog)
    assert again[-1] == (0.01, False)


def many_sizes(directory: Path | None, *, stop: int = 0, **fields: Any) -> Any:
    """A run over batches of many sizes, interrupted after an update if ``stop`` is not 0."""
    torch.manual_seed(0)
    train = [(torch.randn(n, 4), torch.randn(n, 1)) for n in (6, 9, 8, 5)]
    net = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1))
    made = ps.program(net, ps.supervised(nn.MSELoss()), optim.adamw(1e-2))

    def stops(event: events.Event) -> None:
        if isinstance(event, events.StepEnd) and int(event.state.step) == stop:
            raise KeyboardInterrupt

    return fit(
        made.init(),
        {"train": train, "val": train[:2]},
        made,
        epochs=2,
        snapshots=directory,
        callbacks=[stops],
        **fields,
    )


def cut(directory: Path, **fields: Any) -> Any:
    with pytest.raises(KeyboardInterrupt):
        many_sizes(directory, stop=3, **fields)
    return many_sizes(directory, **fields)


@pytest.mark.compile
def test_a_compiled_run_with_batches_of_many_sizes_is_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which graph serves a size follows from the sizes that the run has met, not from those of the process.

    A graph for many sizes rounds otherwise than that of one size, as those of inductor do.
    """
    true, gelu = capture._by_public_entry, torch.ops.aten.gelu.default

    def lower(graph: Any, inputs: Any, *given: Any, **options: Any) -> Any:
        sized = options.get("shapes") == "from_tracing_context"
        for node in [node for node in graph.graph.nodes if sized and node.target is gelu]:
            with graph.graph.inserting_after(node):
                other = graph.graph.call_function(torch.ops.aten.mul.Scalar, (node, 1 + 2.0**-20))
            node.replace_all_uses_with(other, delete_user_cb=lambda user, other=other: user is not other)
        graph.recompile()
        return true(graph, inputs, *given, **options)

    monkeypatch.setattr(capture, "_by_public_entry", lower)
    fields: dict[str, Any] = {"compile": {"backend": "aot_eager"}}
    whole = many_sizes(tmp_path / "whole", **fields)
    same(cut(tmp_path / "cut", **fields), whole)

    def stored(name: str) -> Any:
        with ps.Snapshots(tmp_path / name, writer=False) as snapshots:
            return snapshots.restore(whole.state).loop["sizes"]

    assert stored("cut") == stored("whole")
    ((kind, met),) = stored("cut")[0]["train_step"].items()
    assert (kind, [batch[0][0][0] for batch in met]) == ("float32 2, float32 2", [6, 9, 8])
    monkeypatch.setattr(Graphs, "begin", lambda self, met: None)  # a run that forgets them
    with pytest.raises(AssertionError):
        same(cut(tmp_path / "forgets", **fields), whole)


@pytest.mark.optimized
@pytest.mark.soak
@pytest.mark.compile
def test_a_run_that_inductor_compiles_with_batches_of_many_sizes_is_resumed(tmp_path: Path) -> None:
    same(cut(tmp_path, compile=True), many_sizes(None, compile=True))


@pytest.mark.parametrize("compiled", [False, {"backend": "aot_eager"}])
def test_a_resumed_flush_leaves_out_the_parameters_that_no_gradient_has_reached(tmp_path: Path, compiled: Any):
    """A signal after the last batch of an epoch: the first call of the next process is the flush of its window."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.used, self.unused = nn.Linear(2, 1), nn.Linear(2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    class Loader:
        def __init__(self, *, is_stopped: bool) -> None:
            self.is_stopped = is_stopped

        def __iter__(self) -> Any:
            yield from [(torch.ones(4, 2), torch.zeros(4, 1))] * 4
            if self.is_stopped:
                signal.raise_signal(signal.SIGTERM)

    def train(directory: Path | None = None, *, is_stopped: bool = False) -> Any:
        tx = optim.sgd(0.1, weight_decay=0.5)
        made = ps.program(Heads(), ps.supervised(nn.MSELoss()), tx, accumulate=3, tail="step")
        return fit(
            *(made.init(), {"train": Loader(is_stopped=is_stopped)}, made),
            **{"epochs": 1, "device": "cpu", "compile": compiled, "snapshots": directory},
        )

    with pytest.raises(SystemExit):
        train(tmp_path, is_stopped=True)
    resumed, whole = train(tmp_path).state, train().state
    assert_trees_close(resumed.params, whole.params, exact=True)
    torch.testing.assert_close(resumed.params["unused.bias"], Heads().unused.bias.detach(), rtol=0, atol=0)
