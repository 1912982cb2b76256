"""Rows 27 to 35 and (a) of the fault matrix: order, position and the loaders that fail. Each guard has a control."""

from __future__ import annotations

import inspect
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import timed_out_after, vector_batch, worker_dies
from rigs.faults import resuming
from rigs.faults.runs import RUN, batches, fails, fit, mlp, refused, same
from torch import Tensor, nn
from torch.utils._pytree import register_dataclass
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import purestep as ps
from purestep import events
from purestep.compile import CompiledStep, graphs
from purestep.data import feed as feed_
from purestep.data import iterable, map_style, open_feed, workers
from purestep.errors import DataError, Mismatch
from purestep.files import lock
from purestep.loop import metric_queue, resume, train_call

NO_WORKERS, WORKERS = {}, {"num_workers": 1}


class Items(Dataset[Any]):
    """What `vector_batch` gives, row by row, and a fault at one of them."""

    def __init__(self, count: int = 28, fault: Callable[[], Any] | None = None, at: int = 25) -> None:
        self.rows = vector_batch(count)
        self.fault, self.at = fault, at

    def __len__(self) -> int:
        return len(self.rows[0])

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.fault is not None and index == self.at:
            self.fault()
        return self.rows[0][index], self.rows[1][index]


def stop_at(update: int) -> Callable[[Any], None]:
    """A callback that asks for the end of the run."""

    def callback(event: Any) -> None:
        if isinstance(event, events.StepEnd) and event.updates == update:
            signal.raise_signal(signal.SIGINT)

    return callback


def stopped(make: Callable[[], Any], folder: Path, *updates: int) -> Any:
    """A run over ``make()`` that was interrupted after each of these updates, and has gone on to its end."""
    program = mlp()
    for update in updates:
        with pytest.raises(KeyboardInterrupt):
            fit(program.init(3), make(), program, epochs=2, snapshots=folder, callbacks=[stop_at(update)])
    return fit(program.init(3), make(), program, epochs=2, snapshots=folder)


def whole(loader: Any) -> Any:
    program = mlp()
    return fit(program.init(3), loader, program, epochs=2)


# --- row 27 -----------------------------------------------------------------------------------------------------------


@pytest.mark.row("F27")
@pytest.mark.filterwarnings("ignore:'set_vital':UserWarning")  # torchdata's own
@pytest.mark.parametrize("number", resuming.REPRESENTATIVE)
def test_row_27_resumed_again_and_again(number: int, tmp_path: Path) -> None:
    assert resuming.trial(number, tmp_path) is None


def test_row_27_fails_where_the_place_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = resume.from_json
    monkeypatch.setattr(resume, "from_json", lambda *found: real(*found)._replace(batch=0))
    assert resuming.trial(0, tmp_path) is not None


# --- row 28 -----------------------------------------------------------------------------------------------------------


class Augmented(Items):
    """Items with noise from all three generators."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        import random

        import numpy as np

        x, y = super().__getitem__(index)
        return x + torch.randn(4) + random.random() + float(np.random.rand()), y


class OwnNoise(Items):
    """Noise that nobody can seed from outside."""

    generator = torch.Generator()

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        return x + torch.randn(4, generator=self.generator), y


@pytest.mark.row("F28")
def test_row_28_random_augmentation_in_workers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kinds = iter([2, 0, 2])  # workers of the three runs

    def make() -> Any:
        return DataLoader(Augmented(), batch_size=4, shuffle=True, num_workers=next(kinds))

    same(stopped(make, tmp_path, 3, 9), whole(DataLoader(Augmented(), batch_size=4, shuffle=True)))
    assert "loading an item twice" not in caplog.text
    whole(DataLoader(OwnNoise(), batch_size=4))
    assert "train: loading an item twice returned two different items" in caplog.text


def test_row_28_fails_without_seeds_of_the_items(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(map_style.Batches, "_item", lambda self, ticket, index: self.users_dataset[index])
    fails(lambda: test_row_28_random_augmentation_in_workers(tmp_path, caplog))


def test_row_28_fails_without_the_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(map_style.Batches, "_probed", lambda self, ticket: ("", None))
    fails(lambda: test_row_28_random_augmentation_in_workers(tmp_path, caplog))


# --- row 29 -----------------------------------------------------------------------------------------------------------


class Stream:
    """Batches without indices and without length, drawn anew each epoch."""

    def __iter__(self) -> Iterator[Any]:
        return (vector_batch(8, int(torch.randint(0, 10**6, ()))) for _ in range(5))


class Generated(IterableDataset[Any]):
    """Items without indices."""

    def __iter__(self) -> Iterator[Any]:
        return iter(Items(20))


STREAMS: dict[str, Callable[[], Any]] = {
    "iterable": Stream,
    "DataLoader": lambda: DataLoader(Generated(), batch_size=4),
    "DataLoader with workers": lambda: DataLoader(Generated(), batch_size=4, num_workers=1),
}


@pytest.mark.row("F29")
@pytest.mark.parametrize("kind", STREAMS)
def test_row_29_an_iterable_without_state_is_replayed_at_a_stated_cost(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make = STREAMS[kind]
    with caplog.at_level(logging.INFO, "purestep"):
        same(stopped(make, tmp_path, 3, 7), whole(make()))
    assert "train: loads and drops 3 batches to resume inside epoch 1" in caplog.text
    assert "train: loads and drops 2 batches to resume inside epoch 2" in caplog.text


@pytest.mark.row("F29")
def test_row_29_or_an_order_that_is_another_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seeds = iter(range(100))

    class Hidden:
        def __iter__(self) -> Iterator[Any]:
            return (vector_batch(8, next(seeds)) for _ in range(5))

    stopped(Hidden, tmp_path, 3)
    assert "train: epoch 1 begins with another batch than in the interrupted run" in caplog.text


def test_row_29_fails_where_batches_are_not_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = iterable.IterableFeed._batches
    monkeypatch.setattr(iterable.IterableFeed, "_batches", lambda self, epoch, start: real(self, epoch, 0))
    fails(lambda: test_row_29_an_iterable_without_state_is_replayed_at_a_stated_cost("iterable", tmp_path, caplog))


# --- row 30 -----------------------------------------------------------------------------------------------------------


@pytest.mark.row("F30")
def test_row_30_changed_workers_batch_size_and_length(tmp_path: Path) -> None:
    program, loader = mlp(), DataLoader(Items(), 4, shuffle=True)
    with pytest.raises(KeyboardInterrupt):
        fit(program.init(3), loader, program, epochs=2, snapshots=tmp_path, callbacks=[stop_at(3)])
    for other, told in (
        (DataLoader(Items(), 7, shuffle=True), "batch_size was 4 and is 7"),
        (DataLoader(Items(32), 4, shuffle=True), "items was 28 and is 32"),
        (DataLoader(Items(), 4), "order was 'RandomSampler' and is 'SequentialSampler'"),
    ):
        run = lambda other=other: fit(program.init(3), other, program, epochs=2, snapshots=tmp_path)  # noqa: E731
        refused(Mismatch, f"^train: .*{told}", run)
    resumed = fit(
        program.init(3),
        DataLoader(Items(), 4, shuffle=True, num_workers=1),
        program,
        epochs=2,
        snapshots=tmp_path,
    )
    same(resumed, whole(DataLoader(Items(), 4, shuffle=True)))


def test_row_30_fails_where_facts_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_.Feed, "restore", lambda self, position: None)
    fails(lambda: test_row_30_changed_workers_batch_size_and_length(tmp_path))


# --- row 31 -----------------------------------------------------------------------------------------------------------


def damaged() -> None:
    raise OSError("truncated image")


@pytest.mark.row("F31")
@pytest.mark.parametrize("how", [NO_WORKERS, WORKERS], ids=["here", "in a worker"])
def test_row_31_loader_raises_at_batch_7(how: Any, tmp_path: Path) -> None:
    program, data = mlp(), Items(32, fault=damaged)
    run = lambda: fit(program.init(3), DataLoader(data, 4, **how), program, epochs=2, snapshots=tmp_path)  # noqa: E731
    message = r"^train, epoch 1, batch 7, items \[24, 25, 26, 27\]: OSError: .*truncated image"
    error = refused(DataError, message, run)
    assert isinstance(error.__cause__, OSError)
    found = ps.Snapshots(tmp_path, writer=False, strict=True).restore(program.init(3))
    assert (found.step, int(found.state.updates)) == (6, 6)
    data.fault = None
    same(run(), whole(DataLoader(Items(32), 4)))


def test_row_31_fails_where_nothing_is_saved_on_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RUN, "_save_on_error", lambda run, error: None)
    fails(lambda: test_row_31_loader_raises_at_batch_7(NO_WORKERS, tmp_path), ps.errors.NotFound)


# --- row 32 -----------------------------------------------------------------------------------------------------------


def killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def no_orphans() -> None:
    assert torch.multiprocessing.active_children() == []


@worker_dies
@pytest.mark.row("F32")
def test_row_32_a_worker_is_killed(tmp_path: Path) -> None:
    program = mlp()
    loader = DataLoader(Items(fault=killed), 4, num_workers=1)
    message = r"^train, epoch 1, batch \d.*worker \d+ ended by SIGKILL.*memory.*shm"
    refused(DataError, message, lambda: fit(program.init(), loader, program, epochs=1, snapshots=tmp_path))
    no_orphans()
    found = ps.Snapshots(tmp_path, writer=False, strict=True).restore(program.init())
    assert found.step == int(found.state.updates) > 0


@pytest.mark.row("F32")
def test_row_32_a_worker_hangs(tmp_path: Path) -> None:
    assert 0 < inspect.signature(open_feed).parameters["timeout"].default < 3600
    program, hangs = mlp(), tmp_path / "hangs"

    def hang() -> None:
        hangs.touch()
        time.sleep(60)

    loader = open_feed(DataLoader(Items(fault=hang), 4, num_workers=1), timeout=0.5)
    message = r"^train, epoch 1, batch 7.*timed out after 0\.5 seconds.*timeout=seconds"
    with timed_out_after(hangs):
        refused(DataError, message, lambda: fit(program.init(), loader, program, epochs=1))
    no_orphans()


def test_row_32_fails_where_workers_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers.Engine, "close", lambda self: None)
    fails(lambda: test_row_32_a_worker_hangs(tmp_path))
    monkeypatch.undo()
    for child in torch.multiprocessing.active_children():
        child.kill()
        child.join()


# --- row 33 -----------------------------------------------------------------------------------------------------------


class Empty:
    """Iterable, and nothing in it."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


EMPTY = {
    "list": [],
    "tuple": (),
    "iterable": Empty(),
    "drop_last": DataLoader(TensorDataset(torch.zeros(2, 4), torch.zeros(2)), batch_size=4, drop_last=True),
}


@pytest.mark.row("F33", "B6")
@pytest.mark.parametrize("kind", EMPTY)
@pytest.mark.parametrize("name", ["train", "val"])
def test_row_33_an_empty_loader(name: str, kind: str) -> None:
    program, stepped = mlp(), []

    def watch(event: Any) -> None:
        stepped.extend([event] if isinstance(event, events.StepEnd) else [])

    loaders = {"train": batches(1), name: EMPTY[kind]}
    run = lambda: fit(program.init(), loaders, program, epochs=1, callbacks=[watch])  # noqa: E731
    refused(DataError, f"^{name}: (the|no batch in.*) loader is empty", run)
    if name == "train" or kind != "iterable":  # an iterable for evaluation shows it when it is first asked
        assert not stepped


@pytest.mark.row("F33")
def test_row_33_a_one_shot_iterator_for_two_epochs() -> None:
    program = mlp()
    result = fit(program.init(), iter(batches(3)), program, epochs=1)
    assert int(result.state.updates) == 3
    message = r"^train: no batch is left for epoch 2: the iterator can run only one epoch.*list\(batches\)"
    refused(DataError, message, lambda: fit(program.init(), iter(batches(3)), program, epochs=2))
    loaders = {"train": batches(2), "val": iter(batches(1))}
    refused(DataError, "^val: .*can run only one epoch", lambda: fit(program.init(), loaders, program, epochs=2))


def test_row_33_fails_where_epochs_without_batches_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed_.Feed, "_named", lambda self, epoch, start: self._batches(epoch, start))
    fails(lambda: test_row_33_an_empty_loader("train", "iterable"))
    fails(test_row_33_a_one_shot_iterator_for_two_epochs)


# --- row 34 -----------------------------------------------------------------------------------------------------------


def still() -> Any:
    """A program that does not learn, so that every batch is measured with the same weights."""
    return mlp(ps.optim.sgd(0.0))


@pytest.mark.row("F34")
def test_row_34_a_ragged_last_batch_is_weighted_by_its_size() -> None:
    program, (x, y) = still(), vector_batch(10)
    ragged = DataLoader(TensorDataset(x, y), batch_size=4)
    result = fit(program.init(), {"train": ragged, "val": ragged}, program, epochs=1)
    expected = nn.functional.cross_entropy(program.bind(program.init())(x), y).item()
    assert int(result.state.updates) == 3
    assert result.history["train_loss"] == pytest.approx([expected], rel=1e-6)
    assert result.history["val_loss"] == pytest.approx([expected], rel=1e-6)


@pytest.mark.compile
@pytest.mark.row("F34")
def test_row_34_a_ragged_last_batch_is_one_more_graph() -> None:
    program = ps.compile_program(mlp(), backend="aot_eager")
    loader = DataLoader(TensorDataset(*vector_batch(10)), batch_size=4)
    result = fit(program.init(), loader, program, epochs=3, compile=False)
    assert int(result.state.updates) == 9
    assert program.train_step.graphs <= 2


def test_row_34_fails_where_every_call_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "signature", lambda leaves: object())
    fails(test_row_34_a_ragged_last_batch_is_one_more_graph)


def test_row_34_fails_where_every_batch_counts_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    real = metric_queue.add_to

    def alike(sums: Any, rows: metric_queue.CallMetrics) -> None:
        means = [
            [number for _, t, w in rows.columns for number in (row[t] / (row[w] or 1.0), 1.0)] for row in rows.numbers
        ]
        real(sums, rows._replace(numbers=means))

    monkeypatch.setattr(metric_queue, "add_to", alike)
    fails(test_row_34_a_ragged_last_batch_is_weighted_by_its_size)


# --- row 35 -----------------------------------------------------------------------------------------------------------

X, Y = torch.zeros(8, 4), torch.zeros(8, dtype=torch.int64)
OTHER: dict[str, tuple[Any, str]] = {
    "None": (None, "batch is None; batch 1 had a tuple of 2"),
    "a scalar": (3.0, "batch is a float; batch 1 had a tuple of 2"),
    "text": ("words", "batch is a str; batch 1 had a tuple of 2"),
    "one missing": ((X,), "batch has 1 items; batch 1 had 2"),
    "one that is None": ((X, None), "batch/1 is None; batch 1 had an int64 tensor of rank 1"),
    "a dict": ({"x": X}, "batch is a dict of 1; batch 1 had a tuple of 2"),
    "a rank": ((X[..., None], Y), "batch/0 is a float32 tensor of rank 3; batch 1 had a float32 tensor of rank 2"),
    "a dtype": ((X.double(), Y), "batch/0 is a float64 tensor of rank 2; batch 1 had a float32 tensor of rank 2"),
    "text inside": (("a", Y), "batch/0 is a str; batch 1 had a float32 tensor of rank 2"),
}
FIRST: dict[str, tuple[Any, str]] = {
    "None": (None, "batch is None without a tensor"),
    "a scalar": (3, "batch is an int without a tensor"),
    "text": ("words", "batch is a str without a tensor"),
    "texts": (("a", "b"), "batch is a tuple of text without a tensor"),
    "a dict of None": ({"x": None}, "batch is a dict of 1 without a tensor"),
    "two devices": ((X, Y.to("meta")), "^train, batch/1: a Tensor cannot be moved"),
}


@pytest.mark.row("F35")
@pytest.mark.parametrize("compile", [False, pytest.param({"backend": "aot_eager"}, marks=pytest.mark.compile)])
@pytest.mark.parametrize("fault", OTHER)
def test_row_35_another_structure_at_batch_5(fault: str, compile: Any) -> None:
    other, message = OTHER[fault]
    program = mlp()
    train = [*batches(4), other, *batches(1)]
    refused(
        DataError,
        f"^train, epoch 1, batch 5: {message}",
        lambda: fit(program.init(), train, program, epochs=1, compile=compile),
    )


@pytest.mark.row("F35")
@pytest.mark.parametrize("fault", FIRST)
def test_row_35_a_first_batch_that_cannot_be_trained_on(fault: str) -> None:
    batch, message = FIRST[fault]
    program = mlp()
    refused(DataError, message, lambda: fit(program.init(), [batch], program, epochs=1))


@pytest.mark.row("F35")
def test_row_35_a_key_that_holds_none_at_batch_5() -> None:
    def objective(model: Any, batch: Any) -> ps.Loss:
        return ps.Loss(nn.functional.cross_entropy(model(batch["x"]), batch["y"]), torch.ones(()), {})

    program = mlp(objective=objective)
    train = [{"x": X, "y": Y, "extra": X}] * 4 + [{"x": X, "y": Y, "extra": None}]
    message = "^train, epoch 1, batch 5: batch/extra is None; batch 1 had a float32 tensor of rank 2"
    refused(DataError, message, lambda: fit(program.init(), train, program, epochs=1))


@dataclass
class Pair:
    """A batch that is no node to anybody."""

    x: Tensor
    y: Tensor


@dataclass
class Registered(Pair):
    """One that torch knows."""


register_dataclass(Registered)


@pytest.mark.row("F35")
@pytest.mark.parametrize("kind", [Pair, Registered])
def test_row_35_a_dataclass_of_another_dtype_at_batch_7(kind: Any) -> None:
    def objective(model: Any, batch: Any) -> ps.Loss:
        return ps.Loss(nn.functional.cross_entropy(model(batch.x.float()), batch.y), torch.ones(()), {})

    program = mlp(objective=objective)
    train = [*[kind(X, Y)] * 6, kind(X.double(), Y)]
    message = "^train, epoch 1, batch 7: batch/x is a float64 tensor of rank 2; batch 1 had a float32 tensor of rank 2"
    refused(DataError, message, lambda: fit(program.init(), train, program, epochs=1))


def test_row_35_fails_where_nobody_looks_at_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_call, "BatchCheck", lambda: lambda batch, epoch, index: None)
    for fault in ("None", "a rank", "one missing"):
        raw = (TypeError, ValueError, RuntimeError, AttributeError, IndexError)
        fails(lambda fault=fault: test_row_35_another_structure_at_batch_5(fault, False), *raw)


@pytest.mark.compile
def test_row_35_fails_where_a_compiled_step_tells_nobody_of_other_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    call = CompiledStep.call
    monkeypatch.setattr(CompiledStep, "call", lambda self, *given, unlike=None: call(self, *given))
    for fault in ("a rank", "one missing"):
        fails(
            lambda fault=fault: test_row_35_another_structure_at_batch_5(fault, {"backend": "aot_eager"}),
            TypeError,
            ValueError,
            RuntimeError,
            AttributeError,
            IndexError,
        )


# --- row (a) ----------------------------------------------------------------------------------------------------------


class Threads(Items):
    """Tells of a worker how many of the writer's threads live in it."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        alive = [thread for thread in threading.enumerate() if "purestep" in thread.name]
        return torch.full((4,), float(len(alive))), super().__getitem__(index)[1]


@pytest.mark.row("F0")
def test_row_a_workers_forked_while_a_save_is_in_flight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, state = tmp_path / "go", mlp().init()
    monkeypatch.setenv("PURESTEP_FAILPOINT", f"snapshot.stage=wait:{go}")
    loader = open_feed(DataLoader(Threads(), 4, num_workers=2, persistent_workers=True), timeout=60)
    with ps.Snapshots(tmp_path / "run") as snapshots:
        snapshots.save(1, state)
        deadline = time.monotonic() + 60
        while not Path(f"{go}.reached").exists() and time.monotonic() < deadline:
            time.sleep(0.002)
        loaded = list(loader.epoch(0))  # forked with the writer in the middle of its work
        assert len(loaded) == 7
        assert all(not x.any() for x, _ in loaded)  # no writer's thread in a worker
        go.touch()
        snapshots.wait()
        assert snapshots.steps() == [1]
    assert len(torch.multiprocessing.active_children()) == 2  # the workers are still there, and hold no lock
    with ps.Snapshots(tmp_path / "run") as snapshots:
        snapshots.save(2, snapshots.restore(state).state)
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [".lock", "1", "2"]
    loader.close()


def test_row_a_fails_where_a_worker_keeps_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, acquire = dict[int, int](), lock.DirectoryLock.acquire

    def acquire_twice(self: Any, **patience: float) -> None:
        if not self.held:
            acquire(self, **patience)
            kept[id(self)] = os.dup(self._lock._context.lock_file_fd)  # the workers inherit it

    def close_alone(self: Any) -> None:
        if id(self) in kept:
            os.close(kept.pop(id(self)))
            os.close(self._lock._context.lock_file_fd)
            self._lock._context.lock_file_fd = None

    monkeypatch.setattr(lock.DirectoryLock, "acquire", acquire_twice)
    monkeypatch.setattr(lock.DirectoryLock, "release", close_alone)
    fails(lambda: test_row_a_workers_forked_while_a_save_is_in_flight(tmp_path, monkeypatch), ps.errors.Locked)
    for child in torch.multiprocessing.active_children():
        child.kill()
        child.join()
