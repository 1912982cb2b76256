"""What a loop costs on top of its step: whole runs of `fit` and of Lightning's, beside the bare compiled step.

A loader notes the time at which batches are asked for, so that nothing is added to a step and neither start nor end of
a run is counted.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

import purestep as ps

from . import works
from .contestants import byhand, ours, trainers
from .contestants.base import settle
from .works import Batch, Work


class Clocked(Sequence[Batch]):
    """Batches over and over, and the seconds a step from the ``warm``-th on."""

    def __init__(self, batches: list[Batch], steps: int, warm: int) -> None:
        self.seconds = float("nan")
        self._batches, self._steps, self._warm = batches, steps, warm
        self._begun = 0.0

    def __len__(self) -> int:
        return self._steps

    def __getitem__(self, index: Any) -> Any:
        if index == self._warm:
            self._begun = time.perf_counter()
        if index == self._steps - 1:
            self.seconds = (time.perf_counter() - self._begun) / (self._steps - 1 - self._warm)
        if index >= self._steps:
            raise IndexError(index)
        return self._batches[index % len(self._batches)]


def table(device: str = "cpu", work: str = "mlp", steps: int = 8000, rounds: int = 7) -> dict[str, Any]:
    """Seconds a step of each loop, in rounds of one run each."""
    place, chosen = torch.device(device), works.WORKS[work]
    given = works.batches(chosen, place)
    loops: dict[str, Callable[[Clocked], None]] = {
        trainers.LIGHTNING: _lightning(chosen, place),
        ours.FIT: _fit(chosen, place),
        ours.DONATED: _bare(chosen, place),
    }
    spent: dict[str, list[float]] = {name: [] for name in loops}
    for number in range(rounds + 1):
        first = number % len(loops)  # another one begins each round: what runs after a loop finds what that left behind
        for name in [*loops, *loops][first : first + len(loops)]:
            clock = Clocked(given, steps, warm=steps // 4)
            loops[name](clock)
            if number:  # the first round warms up
                spent[name].append(clock.seconds)
    rows = [{"name": name, "unit": "s", "values": found} for name, found in spent.items()]
    title = f"{chosen.about}: runs of {steps} steps"
    return {"title": title, "threads": torch.get_num_threads(), "rows": rows}


def _bare(work: Work, device: torch.device) -> Callable[[Clocked], None]:
    program = ours.program(work)
    assert program.init is not None
    step, state = ps.compile_step(program.train_step, donate=True), program.init(seed=0, device=device)

    def run(clock: Clocked) -> None:
        nonlocal state
        for batch in clock:
            state, _ = step(state, batch)
        settle(device)

    return run


def _fit(work: Work, device: torch.device) -> Callable[[Clocked], None]:
    program = ours.program(work)
    assert program.init is not None
    state = program.init(seed=0, device=device)

    def run(clock: Clocked) -> None:
        ps.fit(state, {"train": clock}, program, epochs=1, compile=True, sinks=[], progress=False)

    return run


def _lightning(work: Work, device: torch.device) -> Callable[[Clocked], None]:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    def run(clock: Clocked) -> None:
        model = works.seeded_model(work, device)
        shadow = byhand.Shadow(model, work.recipe.ema)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about workers and logging
            trainers.lightning(work, device, model, clock, lambda _: shadow.update())

    return run
