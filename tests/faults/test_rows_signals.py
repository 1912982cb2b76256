"""Rows 22 to 26 of the fault matrix, row (b), and what a long life leaves behind."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_trees_close, tiny_mlp, vector_batch
from rigs import forkserver
from rigs.faults import leaking, preempting, running
from rigs.faults.trials import ended, fails_without, finished, wait_for, whole_run
from torch import nn

import purestep as ps
from purestep import events
from purestep.loop.signals import Preempted
from purestep.snapshot import Snapshots

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no SIGUSR1 on Windows")

ALL = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
BATCHES = [vector_batch(8, seed) for seed in range(3)]


def fit(folder: Path | None, tell: Callable[[Any], Any] | None = None, **fields: Any) -> ps.FitResult:
    """Two epochs of three steps."""
    program = ps.program(tiny_mlp(), ps.supervised(nn.CrossEntropyLoss()), ps.optim.sgd(0.1, momentum=0.9))
    loaders = fields.pop("loaders", BATCHES)
    settings: dict[str, Any] = {"epochs": 2, "compile": False, "progress": False, "snapshots": folder}
    return ps.fit(program.init(), loaders, program, callbacks=[tell] if tell else (), **settings | fields)


def send(number: int, kind: type, count: int = 1, times: int = 1) -> Callable[[Any], None]:
    """A callback that sends this process a signal at the n-th event of a kind."""
    seen: list[Any] = []

    def tell(event: Any) -> None:
        if isinstance(event, kind):
            seen.append(event)
            for _ in range(times if len(seen) == count else 0):
                signal.raise_signal(number)

    return tell


def equal(found: ps.FitResult, expected: ps.FitResult) -> bool:
    assert_trees_close(found.state, expected.state, exact=True)
    return (found.history, found.epochs, found.stop_reason) == (expected.history, expected.epochs, expected.stop_reason)


# --- 22, 23: SIGTERM --------------------------------------------------------------------------------------------------


def test_row_22_terminated_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """The step is finished, the state saved, the status 143, and the resumed run ends in the same bits."""
    assert preempting.trial(0, tmp_path / "on") is None
    assert preempting.trial(0, tmp_path / "off", off="purestep.loop.fit:_Run._save") is not None


@pytest.mark.parametrize("number", range(1, 5), ids=preempting.MOMENTS[1:])
def test_row_23_terminated_in_an_evaluation_a_save_a_load(number: int, tmp_path: Path) -> None:
    assert preempting.trial(number, tmp_path) is None


@pytest.mark.parametrize("kind", [events.FitStart, events.StepEnd, events.EvalStepEnd, events.EpochEnd, events.Saved])
def test_row_23_terminated_in_a_callback(kind: type, tmp_path: Path) -> None:
    loaders = {"train": BATCHES, "val": BATCHES}
    with pytest.raises(Preempted) as caught:
        fit(tmp_path, send(signal.SIGTERM, kind), loaders=loaders)
    done = int(caught.value.result.state.step)
    assert done <= 3
    assert (Snapshots(tmp_path, writer=False).latest() or 0) == done
    assert equal(fit(tmp_path, loaders=loaders), fit(None, loaders=loaders))


def test_row_23_an_evaluation_ends_at_the_next_batch(tmp_path: Path) -> None:
    def check(folder: Path) -> None:
        heard: list[Any] = []
        terminate = send(signal.SIGTERM, events.EvalStepEnd, 2)

        def tell(event: Any) -> None:
            heard.append(event)
            terminate(event)

        with pytest.raises(Preempted):
            fit(folder, tell, loaders={"train": BATCHES, "val": BATCHES * 3})
        assert sum(isinstance(event, events.EvalStepEnd) for event in heard) <= 3

    check(tmp_path / "on")
    with fails_without("purestep.loop.signals.Signals.until_signal", lambda self, batches: iter(batches)):
        check(tmp_path / "off")


def test_row_23_a_loader_that_hangs_is_not_waited_for(tmp_path: Path) -> None:
    class Hanging:
        woke = False

        def __iter__(self) -> Iterator[Any]:
            yield BATCHES[0]
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
            for _ in range(100):
                time.sleep(0.02)
            self.woke = True
            yield BATCHES[1]

    def check(folder: Path) -> None:
        loader = Hanging()
        with pytest.raises(Preempted) as caught:
            fit(folder, loaders=loader)
        assert int(caught.value.result.state.step) == Snapshots(folder, writer=False).latest()
        assert not loader.woke

    check(tmp_path / "on")
    with fails_without("purestep.loop.signals.Signals.until_signal", lambda self, batches: iter(batches)):
        check(tmp_path / "off")


@pytest.mark.compile
def test_row_23_terminated_in_the_first_compile(tmp_path: Path) -> None:
    sent: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        if not sent:
            sent.append(1)
            signal.raise_signal(signal.SIGTERM)
        return graph

    with pytest.raises(Preempted) as caught:
        fit(tmp_path, compile={"backend": backend})
    assert sent
    assert int(caught.value.result.state.step) <= 1
    assert (Snapshots(tmp_path, writer=False).latest() or 0) == int(caught.value.result.state.step)


@pytest.mark.parametrize(
    "test",
    [
        lambda folder: test_row_23_terminated_in_a_callback(events.StepEnd, folder),
        test_row_23_terminated_in_the_first_compile,
    ],
    ids=["in a callback", "in the first compile"],
)
def test_row_23_fails_where_nobody_heeds_the_signal(test: Callable[[Path], None], tmp_path: Path) -> None:
    with fails_without("purestep.loop.signals.Signals._handle"):
        test(tmp_path)


# --- 24, 25: no time left, Ctrl-C -------------------------------------------------------------------------------------


@pytest.mark.parametrize("second", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_row_24_a_grace_too_short(second: signal.Signals, tmp_path: Path) -> None:
    """The last save is slow, and is broken off: the one before is whole, and the run goes on from it."""
    child = forkserver.shared().start(
        running.child("train", str(tmp_path), 2, 0.0, running.CALLS),  # it does not end before the signal
        quick=True,
        PURESTEP_FAILPOINT="snapshot.manifest=sleep:0.4",
    )
    wait_for(child, "saving", 2)
    child.terminate()
    time.sleep(0.1)
    os.kill(child.pid, second)
    done = ended(child)
    assert done.status != 0
    assert Snapshots(tmp_path, writer=False).latest() is not None
    assert finished(tmp_path) == whole_run()


@pytest.mark.parametrize(("number", "error"), [(signal.SIGTERM, Preempted), (signal.SIGINT, KeyboardInterrupt)])
def test_row_24_the_second_signal_stops_now(number: int, error: type[BaseException], tmp_path: Path) -> None:
    def check(folder: Path) -> None:
        with pytest.raises(error) as caught:
            fit(folder, send(number, events.StepEnd, 2, times=2))
        assert getattr(caught.value, "result", None) is None  # nobody waited for a snapshot
        assert Snapshots(folder, writer=False).latest() is None

    def only_a_flag(self: Any, sent: int, frame: Any) -> None:
        self.pending = "terminate" if sent == signal.SIGTERM else "interrupt"

    check(tmp_path / "on")
    assert equal(fit(tmp_path / "on"), fit(None))
    with fails_without("purestep.loop.signals.Signals._handle", only_a_flag):
        check(tmp_path / "off")


def test_row_25_ctrl_c_once(tmp_path: Path) -> None:
    """In a notebook: the state is on the exception."""

    def check(folder: Path) -> None:
        with pytest.raises(KeyboardInterrupt) as caught:
            fit(folder, send(signal.SIGINT, events.StepEnd, 4))
        result = vars(caught.value)["result"]
        assert (int(result.state.step), result.stop_reason) == (4, "interrupted")
        assert Snapshots(folder, writer=False).latest() == 4
        assert torch.multiprocessing.active_children() == []

    check(tmp_path / "on")
    assert equal(fit(tmp_path / "on"), fit(None))
    with fails_without("purestep.loop.fit:_Run._save"):
        check(tmp_path / "off")


def test_row_25_ctrl_c_in_a_script_exits_with_130(tmp_path: Path) -> None:
    # The last load hangs: the run does not end before the signal.
    child = forkserver.shared().start(running.child("train", str(tmp_path), 4, 0.005, running.CALLS))
    wait_for(child, "did", 5)
    os.kill(child.pid, signal.SIGINT)
    done = child.wait()
    assert done.status == -signal.SIGINT  # what a shell calls 130
    assert Snapshots(tmp_path, writer=False).latest() == running.last(done.out, "did")
    assert finished(tmp_path) == whole_run()


# --- 26: everybody else's wishes --------------------------------------------------------------------------------------


def test_row_26_save_and_go_on(tmp_path: Path) -> None:
    saved: list[int] = []
    ask = send(signal.SIGUSR1, events.StepEnd, 2, times=3)

    def tell(event: Any) -> None:
        ask(event)
        if isinstance(event, events.Saved):
            saved.append(event.step)

    assert equal(fit(tmp_path, tell), fit(None))
    assert saved == [2, 3, 6]


def test_row_26_a_users_handler_is_called_too_and_put_back(tmp_path: Path) -> None:
    calls: list[int] = []

    def mine(number: int, frame: Any) -> None:
        calls.append(number)

    def check(folder: Path) -> None:
        for number, raised in ((signal.SIGUSR1, None), (signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Preempted)):
            calls.clear()
            with pytest.raises(raised) if raised else contextlib.nullcontext():
                fit(folder / str(number), send(number, events.StepEnd))
            assert calls == [number]
        assert [signal.getsignal(number) for number in ALL] == [mine] * 3

    before = [signal.signal(number, mine) for number in ALL]
    try:
        check(tmp_path / "on")
        with fails_without("purestep.loop.signals.Signals.__exit__"):
            check(tmp_path / "off")
    finally:
        for number, handler in zip(ALL, before, strict=True):
            signal.signal(number, handler)


def test_row_26_off_the_main_thread(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "purestep")
    handlers = [signal.getsignal(number) for number in ALL]
    found: list[Any] = []

    def run() -> None:
        found.append(fit(tmp_path, lambda event: found.append([signal.getsignal(number) for number in ALL])))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    assert equal(found.pop(), fit(None))
    assert all(seen == handlers for seen in found)
    told = [record.getMessage() for record in caplog.records if "not on the main thread" in record.getMessage()]
    assert len(told) == 1


# --- (b), and a long life ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("off", ["", "workers_that_do_not_look"])
def test_row_b_a_killed_trainer_leaves_no_worker(off: str, tmp_path: Path) -> None:
    """Ten seconds are the limit; this waits for as many, and the control, in which nobody looks, for two."""
    child = forkserver.shared().start(running.child("train_with_workers", str(tmp_path), off=off))
    wait_for(child, "did", 2)
    workers = [int(pid) for pid in next(running.told(child.out(), "workers"))]
    assert len(workers) == 2
    child.kill()
    child.wait()
    looks = 400 if off else 2000
    while looks and any(map(forkserver.lives, workers)):
        time.sleep(0.005)
        looks -= 1
    left = [pid for pid in workers if forkserver.lives(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert bool(left) == bool(off)


@pytest.mark.slow
def test_a_long_life_leaves_nothing_behind(tmp_path: Path) -> None:
    assert leaking.grown(tmp_path / "on", 200, 5, 2) is None
    assert "descriptors" in str(leaking.grown(tmp_path / "off", 20, 1, 1, off="keep_every_lock"))
