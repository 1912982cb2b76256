"""Time by turns, and what is said about it: medians and their spread.

Contestants take turns of about ten calls, so that a machine that drifts drifts for all of them; a ratio is taken round
by round, between neighbours in time, and has a spread of its own.
"""

from __future__ import annotations

import gc
import importlib
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

PAUSE = 0.02  # s: longer than threads of OpenMP spin before they sleep


class Spread(NamedTuple):
    """A median and the deciles round it."""

    median: float
    low: float  # first decile
    high: float  # last decile


class Turn(NamedTuple):
    """What a contestant did in one turn."""

    seconds: float  # of all its calls
    losses: list[Any]  # as the contestant holds them


class Runner(Protocol):
    """Whatever can be timed."""

    name: str

    def turn(self, calls: int) -> Turn: ...


def spread(values: Sequence[float]) -> Spread:
    """Median, first and last decile (interpolated); of one value, that value."""
    if len(values) < 2:
        return Spread(values[0], values[0], values[0])
    deciles = statistics.quantiles(values, n=10, method="inclusive")
    return Spread(statistics.median(values), deciles[0], deciles[-1])


def ratio(over: Sequence[float], under: Sequence[float]) -> Spread:
    """Of ``over / under``, round by round."""
    return spread([a / b for a, b in zip(over, under, strict=True)])


def difference(left: Sequence[float], right: Sequence[float]) -> Spread:
    """Of ``left - right``, round by round."""
    return spread([a - b for a, b in zip(left, right, strict=True)])


class Plan(NamedTuple):
    """How long to measure."""

    seconds: float = 60.0  # in all, about
    calls: int = 10  # of a turn, at most; at least 2
    rounds: int = 60  # at most
    least: int = 5  # rounds, at least, where `rounds` allows
    lead: int = 1  # calls at the start of a turn that are not timed: caches and threads are another's
    pause: float = 0.0  # s before each turn


def interleave(runners: Sequence[Runner], plan: Plan) -> dict[str, list[float]]:
    """Seconds a call, one number a round, of every contestant.

    Each round begins with another contestant. The first round is not counted.
    """
    first = [runner.turn(2).seconds / 2 for runner in runners]
    slowest = max(first)
    calls = max(2, min(plan.calls, int(plan.seconds / plan.least / max(sum(first), 1e-9)), int(2.0 / slowest)))
    cost = sum(first) * (calls + plan.lead) + plan.pause * len(runners)
    rounds = min(plan.rounds, max(plan.least, int(plan.seconds / max(cost, 1e-9))))
    spent: dict[str, list[float]] = {runner.name: [] for runner in runners}
    for number in range(-1, rounds):
        start = number % len(runners)
        for runner in (*runners[start:], *runners[:start]):
            seconds = _turn(runner, calls, plan)
            if number >= 0:
                spent[runner.name].append(seconds)
    return spent


def _turn(runner: Runner, calls: int, plan: Plan) -> float:
    if plan.pause:
        time.sleep(plan.pause)
    if plan.lead:
        runner.turn(plan.lead)
    gc.collect(0)
    return runner.turn(calls).seconds / calls


class Function:
    """Anything that can be called, as a contestant of `interleave`."""

    def __init__(self, name: str, call: Callable[[], Any], settle: Callable[[], None] = lambda: None) -> None:
        self.name = name
        self._call = call
        self._settle = settle

    def turn(self, calls: int) -> Turn:
        self._settle()
        start = time.perf_counter()
        for _ in range(calls):
            self._call()
        self._settle()
        return Turn(time.perf_counter() - start, [])


# --- memory -----------------------------------------------------------------------------------------------------------


def forget_peak() -> None:
    """Let the high-water mark of this process's memory start anew (Linux); garbage is given back first."""
    gc.collect()
    if sys.platform == "linux":
        ctypes: Any = importlib.import_module("ctypes")
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes() -> int:
    """The most memory that this process has had resident since `forget_peak`."""
    if sys.platform == "linux":
        return _status("VmHWM")
    resource: Any = importlib.import_module("resource")  # not on Windows
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_bytes() -> int:
    """The memory that this process has resident now; 0 where the system does not tell."""
    return _status("VmRSS") if sys.platform == "linux" else 0


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
