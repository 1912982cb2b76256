"""Steps on a machine whose cores others use too: how OpenMP's threads wait decides, for every loop.

A parallel region of torch ends when its last thread does. The threads of GNU's OpenMP wait for that in a loop that
holds their core (``OMP_WAIT_POLICY=active``, torch's default on Linux), also where the thread they wait for has no core
to run on: a region of microseconds then takes a time slice of the system.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from . import alone, contestants, works
from .contestants import byhand, ours

NAMES = (byhand.EAGER, ours.EAGER, ours.EAGER_DONATED, ours.DONATED)


def table(device: str = "cpu", work: str = "mlp", seconds: float = 3.0) -> dict[str, Any]:
    """Time of a step alone and beside busy processes, twice as many as there are cores, by the policy of waiting.

    Args:
        device: "cpu".
        work: its name in `works.WORKS`.
        seconds: to measure each cell for.
    """
    cores = multiprocessing.cpu_count()
    rows: list[dict[str, Any]] = []
    for busy in (0, 2 * cores):
        with _busy(busy):
            for policy in ("active", "passive"):
                environment = alone.threads_environment(None) | {"OMP_WAIT_POLICY": policy}
                arguments = {"work": work, "device": device, "seconds": seconds}
                times = alone.call("benchmarks.contention:times", arguments, environment=environment)
                rows += [
                    {"name": f"{busy} busy processes, {policy}: {name}", "unit": "s", "values": values}
                    for name, values in times.items()
                ]
    note = "One process for each policy, its contestants in turns. The policy is OMP_WAIT_POLICY."
    return {"title": f"steps beside other work ({work})", "threads": cores, "rows": rows, "note": note}


def times(work: str, device: str, seconds: float) -> dict[str, list[float]]:
    """Seconds of single steps of each contestant, in turns."""
    chosen, place = works.WORKS[work], torch.device(device)
    made = [contestants.ENTRIES[name].make(chosen, place) for name in NAMES]
    for each in made:
        each.turn(2)
    spent: dict[str, list[float]] = {each.name: [] for each in made}
    end = time.monotonic() + seconds * len(made)
    while time.monotonic() < end:
        for each in made:
            start = time.perf_counter()
            each.turn(5)
            spent[each.name].append((time.perf_counter() - start) / 5)
    return spent


@contextmanager
def _busy(count: int) -> Iterator[None]:
    """That many processes that compute all the time."""
    context = multiprocessing.get_context("spawn")
    found = [context.Process(target=_spin, daemon=True) for _ in range(count)]
    for process in found:
        process.start()
    try:
        yield
    finally:
        for process in found:
            process.terminate()


def _spin() -> None:
    while True:
        pass
