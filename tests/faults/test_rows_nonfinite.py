"""Row 36 of the fault matrix: a loss or gradient that is not finite costs no state, is named, is written down to the
bit, can be skipped, and can be left behind."""

from __future__ import annotations

import json
import logging
import math
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from helpers import assert_trees_close, image_batch, tiny_convnet, tiny_mlp, vector_batch
from rigs.faults.runs import batches, fit, mlp, poisoned
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import purestep as ps
from purestep import events, optim, testing
from purestep.diagnostics import replay
from purestep.errors import (
    ConfigError,
    Corrupt,
    Mismatch,
    NonFiniteError,
    NotFound,
    StateError,
    WriteFailed,
)
from purestep.events import Logged
from purestep.loop import metric_queue
from purestep.loop.accounting import Accounting
from purestep.loop.loop_state import Call, LoopState
from purestep.types import Program, TrainState

CRITERION = nn.CrossEntropyLoss()
AOT = {"backend": "aot_eager"}


# --- the end of a run -------------------------------------------------------------------------------------------------


@pytest.mark.row("F36", "B5", "1.27")
@pytest.mark.parametrize("log_every", [0, 1, 50])
@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_loss_that_is_not_finite_ends_the_run_with_the_state_before_it(place: int, log_every: int) -> None:
    program, told = mlp(ema=0.9), []
    with pytest.raises(
        NonFiniteError, match=rf"epoch 1, batch {place + 1}: .*not finite.*nonfinite=\"skip\""
    ) as caught:
        fit(program.init(), poisoned(5, place), program, epochs=2, log_every=log_every, sinks=[told.append])
    expected = program.init()
    for batch in batches(5)[:place]:
        expected, _ = program.train_step(expected, batch)
    result = caught.value.result
    assert_trees_close(result.state, expected, exact=True)
    assert (result.epochs, result.stop_reason) == (0, "error")
    state, measured = program.train_step(result.state, vector_batch())  # and it can go on
    assert float(measured["applied"]) == 1.0
    assert int(state.updates) == place + 1


@pytest.mark.parametrize("place", [0, 1, 3, 6])
def test_the_place_is_right_inside_an_accumulation_window(place: int) -> None:
    program = mlp(accumulate=3)
    with pytest.raises(NonFiniteError, match="epoch 1, batch") as caught:
        fit(program.init(), poisoned(7, place), program, epochs=1)
    assert int(caught.value.result.state.updates) == place // 3


@pytest.mark.parametrize("compiled", [False, True])
def test_a_window_that_an_epoch_leaves_open_is_not_kept_with_what_is_not_finite(compiled: bool, tmp_path: Path) -> None:
    """A run that goes on from it would blame the batches of another epoch, at every attempt."""
    program = mlp(accumulate=4, tail="carry")
    settings: dict[str, Any] = {"epochs": 2, "compile": AOT if compiled else False}
    with pytest.raises(NonFiniteError, match=r"epoch 1, batch 6: .*batch/0 .*not finite") as caught:
        fit(program.init(), poisoned(7, 5), program, snapshots=tmp_path, **settings)
    assert ps.Snapshots(tmp_path, writer=False).steps() == []
    state = caught.value.result.state
    assert (int(state.updates), int(state.step), int(state.key[1]), int(state.halted)) == (1, 6, 6, 0)
    assert float(program.train_step(state, vector_batch())[1]["loss"]) > 0
    assert not torch.isfinite(replay.read(caught.value.path, program.init()).batch[0]).any()


def test_a_window_that_is_dropped_is_judged_before(tmp_path: Path) -> None:
    """The step itself drops it unseen: the loop has to look before the flush."""
    program = mlp(accumulate=4, tail="drop")
    with pytest.raises(NonFiniteError, match=r"epoch 1, batch 6: .*batch/0 .*not finite") as caught:
        fit(program.init(), poisoned(7, 5), program, epochs=2, snapshots=tmp_path)
    assert int(caught.value.result.state.updates) == 1
    skipping = mlp(accumulate=4, tail="drop", nonfinite="skip")
    assert int(fit(skipping.init(), poisoned(7, 5), skipping, epochs=1).state.updates) == 1


def test_log_lines_before_a_call_that_is_not_finite_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """The metrics of all calls arrive together, as they do from a device that is slower than the host."""
    on_its_way = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(metric_queue, "_to_host", lambda numbers: (numbers, on_its_way))
    program, found = mlp(), list[int]()

    def note(event: Any) -> None:
        found.extend([event.updates] if isinstance(event, events.Logged) else [])

    with pytest.raises(NonFiniteError, match="epoch 1, batch 6"):
        fit(program.init(), poisoned(7, 5), program, epochs=1, log_every=1, callbacks=[note])
    assert found == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("options", [{"nonfinite": "skip"}, {"precision": "16-mixed"}])
def test_an_open_window_may_hold_what_a_run_would_go_on_from(options: Any, tmp_path: Path) -> None:
    program = mlp(accumulate=4, tail="carry", **options)
    given, settings = Later(poisoned(7, 5), epoch=0), {"snapshots": tmp_path}
    fit(program.init(), given, program, epochs=1, **settings)
    assert int(fit(program.init(), given, program, epochs=2, **settings).state.updates) == 2


def test_the_place_is_right_in_a_run_that_goes_on_from_a_trained_state() -> None:
    program = mlp()
    first = fit(program.init(), batches(4), program, epochs=2)
    with pytest.raises(NonFiniteError, match="epoch 2, batch 2") as caught:
        fit(first.state, Later(poisoned(3, 1), epoch=1), program, epochs=3)
    assert int(caught.value.result.state.updates) == 8 + 3 + 1


def test_a_state_that_goes_on_after_a_halt_halts_at_the_right_place_again() -> None:
    """The key counts the calls that a halted state has refused; its step does not."""
    program = mlp(ema=0.9)
    state = program.init()
    for batch in poisoned(5, 2):
        state, _ = program.train_step(state, batch)
    assert int(state.key[1]) - int(state.step) == 2
    state = state._replace(halted=torch.zeros_like(state.halted))
    expected = state
    for batch in batches(3):
        expected, _ = program.train_step(expected, batch)
    with pytest.raises(NonFiniteError, match=r"epoch 1, batch 4.*at call 4: batch/0") as caught:
        fit(state, poisoned(6, 3), program, epochs=1)
    assert_trees_close(caught.value.state, expected, exact=True)
    assert_trees_close(caught.value.result.state, expected, exact=True)


def test_an_error_of_the_last_save_does_not_hide_that_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PURESTEP_FAILPOINT", "snapshot.manifest=raise:EIO,snapshot.stage=sleep:0.3")
    program = mlp()
    with pytest.raises(NonFiniteError, match="epoch 2, batch 1") as caught:
        fit(program.init(), Later(poisoned(3, 0), epoch=1), program, epochs=2, snapshots=tmp_path, log_every=1)
    assert "the last save failed too: " in " ".join(caught.value.__notes__)


class Later:
    """Batches of which those of one epoch are replaced."""

    def __init__(self, other: list[Any], *, epoch: int) -> None:
        self.other = other
        self.epoch = epoch
        self.now = 0

    def set_epoch(self, epoch: int) -> None:
        self.now = epoch

    def __len__(self) -> int:
        return len(self.other)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.other if self.now == self.epoch else batches(len(self.other)))


def test_the_state_of_a_program_inside_a_tree_is_looked_at_too() -> None:
    """A step of one's own need not report whether an update was applied."""

    class Both(NamedTuple):
        left: TrainState
        right: TrainState

    one = mlp()

    def train_step(state: Both, batch: Any) -> Any:
        right, measured = one.train_step(state.right, batch)
        return Both(state.left, right), {"loss": measured["loss"]}

    with pytest.raises(NonFiniteError, match="^right: .*not finite at call 3") as caught:
        fit(Both(one.init(), one.init()), poisoned(4, 2), Program(train_step), epochs=5)
    state = caught.value.result.state
    assert (int(state.right.updates), int(state.right.halted), state.right.key.tolist()) == (2, 0, [0, 2])


def test_anomalies_are_found_at_once_and_named() -> None:
    program = mlp()
    message = r"epoch 1, batch 3: batch/0 is not finite; .*returned nan values"
    with pytest.warns(UserWarning, match="Traceback"), pytest.raises(NonFiniteError, match=message) as caught:
        fit(program.init(), poisoned(4, 2), program, epochs=1, detect_anomaly=True)

    assert 'nonfinite="skip"' in str(caught.value)
    skipping = mlp(nonfinite="skip")  # which is no cure where it is on
    with pytest.warns(UserWarning, match="Traceback"), pytest.raises(NonFiniteError, match=message) as caught:
        fit(skipping.init(), poisoned(4, 2), skipping, epochs=1, detect_anomaly=True)
    assert "correct the value that is named, or detect_anomaly=False, which skips this update" in str(caught.value)

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return (x @ self.w).sqrt()  # infinite slope at 0

    rooted = ps.program(Root(), ps.supervised(nn.MSELoss()), optim.sgd(0.1))
    batch = (torch.ones(2, 4), torch.ones(2, 3))
    message = "epoch 1, batch 1: every leaf of batch and state is finite; .*gradient is not finite"
    with pytest.raises(NonFiniteError, match=message):
        fit(rooted.init(), [batch], rooted, epochs=1, detect_anomaly=True)


# --- skipping and going back ------------------------------------------------------------------------------------------


@pytest.mark.row("B5", "1.27")
def test_skipping_goes_on_as_if_the_batch_had_not_been_there() -> None:
    program = mlp(nonfinite="skip", ema=0.9)
    result = fit(program.init(), poisoned(4, 1), program, epochs=1)
    expected = program.init()
    for batch in (batches(4)[0], *batches(4)[2:]):
        expected, _ = program.train_step(expected, batch)
    assert_trees_close(result.state.params, expected.params, exact=True)
    assert_trees_close(result.state.ema, expected.ema, exact=True)
    assert (int(result.state.updates), int(result.state.step)) == (3, 4)
    assert result.history["train_loss"][0] is not None  # a NaN poisons no mean


@pytest.mark.parametrize("log_every", [1, 2])
def test_a_skipped_update_is_no_line_of_the_log(log_every: int) -> None:
    program, told = mlp(nonfinite="skip"), []
    fit(program.init(), poisoned(6, 0, 1, 4), program, epochs=1, log_every=log_every, sinks=[told.append])
    lines = [event for event in told if isinstance(event, Logged)]
    assert [line.updates for line in lines] == [updates for updates in (1, 2, 3) if updates % log_every == 0]
    assert all(math.isfinite(value) for line in lines for value in line.values.values())


# --- what is said -----------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Dropout, and a fault in the forward or the backward pass."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault
        self.last = tiny_mlp()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), Faulty(self))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(x))


class Faulty(nn.Module):
    def __init__(self, net: Net) -> None:
        super().__init__()
        self.fault = net.fault

    def forward(self, x: Tensor) -> Tensor:
        if self.fault == "log":
            return torch.log(-x.abs() - 1)
        if self.fault == "overflow":
            return x * 1e30 * 1e30
        return (x * 0).sqrt() if self.fault == "sqrt" else x


def net(fault: str = "", **options: Any) -> Program:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ps.program(Net(fault), ps.supervised(CRITERION), optim.sgd(0.1), **options)


def halted(program: Program, train: Any, **fields: Any) -> NonFiniteError:
    with pytest.raises(NonFiniteError, match="not finite at call") as caught:
        fit(program.init(), train, program, epochs=2, **fields)
    return caught.value


def weighted(weight: Callable[[Any], Any], **options: Any) -> Program:
    def objective(model: Any, batch: Any) -> ps.Loss:
        return ps.Loss(CRITERION(model(batch[0]), batch[1]), weight(batch), {})

    module = tiny_mlp()
    module.register_buffer("mask", torch.full((2,), -torch.inf))
    return ps.program(module, objective, optim.sgd(0.1), **options)


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"microbatches": 2}])
@pytest.mark.parametrize("weight", [math.nan, math.inf])
def test_a_weight_that_is_not_finite_is_named(weight: float, options: Any, tmp_path: Path) -> None:
    """The weight of the second batch is not finite; the loss and the gradients of every batch are."""
    second = batches(4)[1][0][0, 0]
    program = weighted(lambda batch: torch.where(batch[0][0, 0] == second, weight, 8.0), **options)
    message = (
        r"^epoch 1, batch 2: the norm of finite gradients, or the weight of the loss, is not finite at call 2: "
        r"gradient of \d\.\w+ \(up to .*; loss 1"
    )
    error = halted(program, batches(4), snapshots=tmp_path)
    assert re.search(message, str(error)), error
    assert "return the count that `mean` was divided by" in error.hint
    assert "learning rate" not in error.hint
    assert len(error.leaves) == 4
    assert replay.read(error.path, program.init()).notes["leaves"] == list(error.leaves)


def test_weights_whose_sum_overflows_are_refused() -> None:
    program = weighted(lambda batch: 3e38, accumulate=2)
    message = r"the norm of finite gradients, or the weight of the loss, is not finite at call 2: .*; loss 1"
    with pytest.raises(NonFiniteError, match=message) as caught:
        fit(program.init(), batches(4), program, epochs=1)
    assert "ps.Loss" in caught.value.hint


WEIGHTS = ("last.0.weight", "last.0.bias", "last.2.weight", "last.2.bias", "body.0.weight", "body.0.bias")
SAID: dict[str, tuple[str, str, str]] = {
    # fault -> in the message, module and operation of the replay
    "log": (
        r"log in body.2 \(Faulty\): 32 of 32 numbers are not finite; gradient of last.0.weight \(32 of 32 not finite\)"
        r", .* and 2 more; loss nan; ",
        "body.2",
        "log",
    ),
    "overflow": (
        r"mul in body.2 \(Faulty\): .*; gradient of last.0.weight \(32 of 32 not finite\).*; loss nan; ",
        "body.2",
        "mul",
    ),
    "sqrt": (
        r"MulBackward0, in the backward pass of .*; gradient of body.0.weight \(16 of 16 not finite\), gradient of "
        r"body.0.bias .*; loss 1\.\d+; ",
        "",
        "",
    ),
}


@pytest.mark.row("F36")
@pytest.mark.parametrize("fault", SAID)
@pytest.mark.parametrize("compiled", [False, pytest.param(AOT, marks=pytest.mark.compile)])
def test_row_36_not_finite_numbers_are_named_written_down_and_replayed(
    fault: str, compiled: Any, tmp_path: Path
) -> None:
    message, module, operation = SAID[fault]
    program = net(fault)
    error = halted(program, batches(3), compile=compiled, snapshots=tmp_path)
    path = tmp_path / "nonfinite" / "1.safetensors"
    with pytest.raises(NonFiniteError, match=rf"^epoch 1, batch 1: .* at call 1: {message}.*{path}.*testing.replay"):
        raise error
    assert (error.step, error.path) == (1, path)
    assert error.loss is not None
    assert math.isfinite(error.loss) == (fault == "sqrt")
    assert set(error.leaves) <= {f"gradient of {name}" for name in WEIGHTS}
    found = testing.replay(path, program)
    assert (found.notes["step"], found.notes["where"]) == (1, "epoch 1, batch 1")
    if operation:
        assert (found.module, found.operation) == (module, operation)
        assert re.fullmatch(rf"{operation} in {module} \(Faulty\): \d+ of 32 numbers are not finite", str(found.first))
    else:
        assert found.first is not None
        assert found.first.startswith("MulBackward0, in the backward pass of return (x * 0).sqrt()")
        assert __file__ in found.first


def test_row_36_a_batch_that_is_not_finite_is_named_with_its_items(tmp_path: Path) -> None:
    x, y = vector_batch(12)
    x[7, 2] = torch.inf
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    error = halted(mlp(), loader, snapshots=tmp_path)
    assert error.where == "epoch 1, batch 2, items [4, 5, 6, 7]"
    assert error.items == [4, 5, 6, 7]
    assert error.leaves[0] == "batch/0"
    assert "call 2: batch/0 (1 of 16 not finite), gradient of" in str(error)
    assert testing.replay(error.path, mlp()).first == "batch/0: 1 of 16 numbers are not finite"


def test_row_36_finite_gradients_with_a_norm_that_is_not_are_named_by_size() -> None:
    def objective(model: Any, batch: Any) -> ps.Loss:
        return ps.Loss(model(batch[0]).sum() * 1e30, 8, {})

    program = ps.program(tiny_mlp(), objective, optim.sgd(0.1))
    message = (
        r"the norm of finite gradients, or the .*, is not finite at call 1: gradient of \d\.\w+ \(up to \de\+3\d\), "
    )
    with pytest.raises(NonFiniteError, match=message) as caught:
        fit(program.init(), batches(2), program, epochs=1)
    assert caught.value.leaves[0] == "gradient of 2.bias"
    assert "divide the inputs or the loss by a constant" in caught.value.hint
    assert "is no cure, since it needs the norm" in caught.value.hint


@pytest.mark.parametrize("place", [0, 1, 2, 4, 6])
def test_row_36_the_micro_batch_that_spoilt_its_window_is_the_one_that_is_named(place: int, tmp_path: Path) -> None:
    """Of a window of 3, the last one of which the end of the epoch closes."""
    program = mlp(accumulate=3)
    error = halted(program, poisoned(7, place), snapshots=tmp_path)
    assert error.where == f"epoch 1, batch {place + 1}"
    assert error.leaves[0] == "batch/0"
    found = replay.read(error.path, program.init())
    assert found.state.key.tolist() == [0, place]
    assert (int(found.state.accum.left), float(found.state.accum.weight)) == (3 - place % 3, 8.0 * (place % 3))
    assert_trees_close(found.batch, poisoned(7, place)[place], exact=True)


# --- what is written down ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, pytest.param(AOT, marks=pytest.mark.compile)])
def test_row_36_the_file_holds_state_and_batch_to_the_bit(compiled: Any, tmp_path: Path) -> None:
    program = net()
    expected = program.init()
    for batch in batches(4)[:3]:
        expected, _ = program.train_step(expected, batch)
    if compiled:  # whose kernels may round otherwise
        step = ps.compile_step(program.train_step, **AOT)
        expected = program.init()
        for batch in batches(4)[:3]:
            expected, _ = step(expected, batch)
    error = halted(program, poisoned(4, 3), compile=compiled, snapshots=tmp_path)
    found = replay.read(error.path, program.init())
    assert_trees_close(found.state, expected, exact=True)
    assert_trees_close(error.result.state, expected, exact=True)
    assert_trees_close(found.batch, poisoned(4, 3)[3], exact=True)
    ps.Snapshots(tmp_path, writer=False).steps()  # which the file does not disturb


def test_row_36_a_replay_gives_the_bits_of_the_step_with_dropout(tmp_path: Path) -> None:
    program = ps.program(tiny_convnet(), ps.supervised(CRITERION), optim.adamw(0.01), ema=0.9)
    state, batch = program.init(seed=3), image_batch()
    state = fit(state, [batch] * 3, program, epochs=1).state
    path = testing.record(tmp_path / "step.safetensors", state, batch)
    found = testing.replay(path, program)
    new, metrics = program.train_step(state, batch)
    assert_trees_close((found.state, found.metrics), (new, metrics), exact=True)
    assert (found.first, found.module, found.operation) == (None, "", "")
    testing.record(path, state._replace(key=torch.tensor([3, 9])), batch)  # another mask
    other = testing.replay(path, program).state
    assert any(
        not torch.equal(left, right) for left, right in zip(other.params.values(), new.params.values(), strict=True)
    )


class Pair(NamedTuple):
    x: Any
    y: Any


def odd_batch() -> Any:
    strided = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    return {
        "pair": Pair(strided, [torch.tensor(True), None, "text", 3, 0.5]),
        "a/b": torch.ones(2, dtype=torch.bfloat16),
        "a": {"b": torch.zeros(0, 3), 7: torch.tensor(1 + 2j)},
    }


def test_row_36_batches_of_any_structure_come_back(tmp_path: Path) -> None:
    program, given = mlp(), odd_batch()
    path = testing.record(tmp_path / "step.safetensors", program.init(), given)
    found = replay.read(path, program.init()).batch
    assert (found["pair"]._fields, found["pair"].y[1:]) == (("x", "y"), [None, "text", 3, 0.5])
    assert found["pair"].x.stride() == given["pair"].x.stride()
    for left, right in (
        (found["pair"].x, given["pair"].x),
        (found["a/b"], given["a/b"]),
        (found["a"][7], given["a"][7]),
    ):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    assert (found["a"]["b"].shape, bool(found["pair"].y[0])) == ((0, 3), True)


def test_row_36_what_cannot_be_written_down_is_said_and_hides_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = mlp()
    with pytest.raises(StateError, match="batch/1: a builtins.set cannot be stored"):
        testing.record(tmp_path / "a", program.init(), (torch.ones(1), {1}))
    (tmp_path / "nonfinite").write_text("in the way")
    with caplog.at_level(logging.WARNING, "purestep"):
        error = halted(program, poisoned(2, 1), snapshots=tmp_path)
    assert error.path is None
    assert "state and batch were not written down" in caplog.text
    with pytest.raises(WriteFailed):
        testing.record(tmp_path / "nonfinite" / "a", error.state, error.batch)
    assert testing.replay(testing.record(tmp_path / "b", error.state, error.batch), program).first is not None


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "a stride": ({"stride": [1 << 40, 1]}, "strides"),
    "an overlap": ({"stride": [0, 1]}, "strides"),
    "a shape": ({"shape": [1 << 40, 2]}, "bytes for a tensor of"),
    "a negative shape": ({"shape": [-1, 2]}, "a tensor of dtype"),
    "a function": ({"dtype": "torch.load"}, "a tensor of dtype 'torch.load'"),
    "a quantized dtype": ({"dtype": "torch.quint8", "shape": [16, 2]}, "a tensor of dtype"),
    "a bool": ({"dtype": "torch.bool", "shape": [16, 2]}, "neither 0 nor 1"),
    "no name": ({"name": None}, "damaged"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_row_36_a_file_that_lies_about_a_tensor_is_refused(change: str, tmp_path: Path) -> None:
    program, (changes, text) = mlp(), CHANGES[change]
    path = testing.record(tmp_path / "a", program.init(), {"x": torch.ones(4, 2)})
    with safe_open(path, framework="pt") as opened:
        about = json.loads(opened.metadata()["about"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    dict(about["batch"]["dict"])["x"]["tensor"].update(changes)
    lie = json.dumps(about)
    save_file(tensors, path, metadata={"about": lie, "crc32": str(zlib.crc32(lie.encode()))})
    with pytest.raises(Corrupt, match=text):
        replay.read(path, program.init())


def test_row_36_a_damaged_file_or_another_programs_is_refused(tmp_path: Path) -> None:
    program = mlp()
    path = testing.record(tmp_path / "a", program.init(), batches(1)[0])
    whole = path.read_bytes()
    for place in (9, len(whole) // 3, len(whole) - 5):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(Corrupt, match=str(path)):
            testing.replay(path, program)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(Corrupt, match=str(path)):
        testing.replay(path, program)
    path.write_bytes(whole)
    with pytest.raises(Mismatch, match=r"ema/params/0.bias is missing, but .* in the program's state"):
        testing.replay(path, mlp(ema=0.9))
    with pytest.raises(NotFound, match="no such file"):
        testing.replay(tmp_path / "b", program)
    with pytest.raises(ConfigError, match="no init"):
        testing.replay(path, Program(program.train_step))
    assert testing.replay(path, Program(program.train_step), like=program.init()).first is None


def test_row_36_no_batch_is_held_longer_than_its_metrics_are_on_their_way() -> None:
    """Nor for a state that cannot halt."""
    for options, expected in (({}, 1), ({"nonfinite": "skip"}, 0)):
        program = mlp(**options)
        state, loop = program.init(), LoopState()
        progress = Accounting(0, state, loop)
        for call in range(1, 2 * metric_queue.EVERY + 1):
            _, metrics = program.train_step(state, vector_batch())
            progress.add(Call(call, 0, call - 1, True), metrics, loop, vector_batch())
            assert len(progress.window(call)) == expected
            loop = progress.settle(loop, state, wait=False)
            assert bool(progress.window(call)) == bool(expected and call % metric_queue.EVERY)
