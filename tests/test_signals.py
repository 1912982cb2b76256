"""Signals as flags, the wait for a loader that they break off, and everybody else's handlers."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from purestep.data import open_feed
from purestep.loop.signals import Preempted, Signals, interrupted

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="no SIGUSR1 on Windows")

ALL = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]


@pytest.fixture(autouse=True)
def handlers_are_put_back() -> Iterator[None]:
    before = [signal.getsignal(number) for number in ALL]
    yield
    assert [signal.getsignal(number) for number in ALL] == before


def soon(number: int) -> threading.Timer:
    timer = threading.Timer(0.2, os.kill, (os.getpid(), number))
    timer.start()
    return timer


def sent_after_the_first(number: int, batches: Iterator[Any]) -> int:
    """How many batches came, where the signal is sent a little after the first: while the second is waited for."""
    count, timer = 0, None
    for count, _ in enumerate(batches, 1):  # noqa: B007
        timer = timer or soon(number)
    assert timer is not None
    timer.join()
    return count


@pytest.mark.parametrize(
    ("number", "pending"),
    [(signal.SIGTERM, "terminate"), (signal.SIGINT, "interrupt"), (signal.SIGUSR1, "snapshot")],
)
def test_the_first_signal_sets_a_flag(number: int, pending: str):
    with Signals() as signals:
        assert signals.pending is None
        os.kill(os.getpid(), number)
        assert signals.pending == pending
        signals.saved()
        assert signals.pending == (None if pending == "snapshot" else pending)


@pytest.mark.parametrize(
    ("numbers", "raised"),
    [
        ([signal.SIGTERM, signal.SIGTERM], Preempted),
        ([signal.SIGINT, signal.SIGINT], KeyboardInterrupt),
        ([signal.SIGTERM, signal.SIGINT], KeyboardInterrupt),
        ([signal.SIGINT, signal.SIGTERM, signal.SIGTERM], Preempted),
        ([signal.SIGUSR1, signal.SIGINT, signal.SIGUSR1, signal.SIGINT], KeyboardInterrupt),
    ],
)
def test_the_second_wish_to_end_ends_at_once(numbers: list[int], raised: type[BaseException]):
    with Signals() as signals:
        for number in numbers[:-1]:
            signal.raise_signal(number)
        assert signals.pending in ("terminate", "interrupt")
        with pytest.raises(raised):
            signal.raise_signal(numbers[-1])


def test_wishes_to_save_never_end_anything():
    with Signals() as signals:
        for _ in range(3):
            signal.raise_signal(signal.SIGUSR1)
        assert signals.pending == "snapshot"
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR1)
        assert signals.pending == "terminate"


# A loop that waits for its loader.


def sleeping() -> Iterator[int]:
    yield 1
    time.sleep(60)
    yield 2


class Slow(Dataset[Any]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(60 if index == 1 else 0)
        return torch.rand(()) + random.random()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    "loader",
    [sleeping, lambda: open_feed(DataLoader(Slow())).epoch(0), lambda: open_feed(sleeping()).epoch(0)],
    ids=["iterator", "dataset", "feed of an iterator"],
)
def test_a_blocked_loader_does_not_keep_a_run_from_ending(number: int, loader: Callable[[], Iterator[Any]]):
    before, began = (torch.get_rng_state().tolist(), random.getstate()), time.monotonic()
    with Signals() as signals:
        assert sent_after_the_first(number, signals.until_signal(loader())) == 1
        assert signals.pending in ("terminate", "interrupt")
    assert time.monotonic() - began < 30  # against the 60 that the loader sleeps
    assert (torch.get_rng_state().tolist(), random.getstate()) == before


def test_workers_that_sleep_end_with_the_run():
    began = time.monotonic()
    with Signals() as signals:
        feed = open_feed(DataLoader(Slow(), num_workers=2, timeout=50))
        assert sent_after_the_first(signal.SIGTERM, signals.until_signal(feed.epoch(0))) == 1
        feed.close()
    assert time.monotonic() - began < 30
    assert torch.multiprocessing.active_children() == []


def test_a_wish_to_save_does_not_break_a_wait_off():
    def slow() -> Iterator[int]:
        timer = soon(signal.SIGUSR1)
        timer.join()
        yield 1

    with Signals() as signals:
        assert list(signals.until_signal(slow())) == [1]
        assert signals.pending == "snapshot"


def test_between_two_batches_a_signal_only_sets_the_flag():
    """Planted fault: a handler that always raises would break into the step."""
    done: list[int] = []
    with Signals() as signals:
        for batch in signals.until_signal(iter([1, 2, 3])):
            signal.raise_signal(signal.SIGTERM) if batch == 2 else None
            done.append(batch)  # the step is finished
        assert done == [1, 2]


def test_without_a_signal_watching_changes_nothing():
    assert list(Signals().until_signal(range(4))) == [0, 1, 2, 3]

    def failing() -> Iterator[int]:
        yield 1
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        list(Signals().until_signal(failing()))


# Everybody else's handlers.


def test_what_is_ignored_stays_ignored():
    original = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Signals() as signals:
            signal.raise_signal(signal.SIGINT)
            assert signals.pending is None
    finally:
        signal.signal(signal.SIGINT, original)


def test_a_handler_that_is_set_meanwhile_stays():
    original = signal.getsignal(signal.SIGUSR1)
    try:
        with Signals():
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, original)


def test_a_run_inside_a_run_passes_signals_on():
    with Signals() as outer:
        with Signals() as inner:
            signal.raise_signal(signal.SIGTERM)
        assert (outer.pending, inner.pending) == ("terminate", "terminate")


# How a script ends.


@pytest.mark.parametrize(("error", "status"), [("Preempted(1)", 143), ("interrupted(1)", -signal.SIGINT)])
def test_the_status_of_a_script(error: str, status: int):
    code = f"from purestep.loop.signals import Preempted, interrupted\nraise {error}"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
    assert done.returncode == status  # -2 is what a shell calls 130


def test_the_result_so_far_is_on_the_exception():
    assert Preempted("so far").result == "so far"
    assert Preempted().code == 143
    error = interrupted("so far")
    assert type(error) is KeyboardInterrupt
    assert vars(error)["result"] == "so far"
