"""The parts of `compile/cpu`, switched off one by one: time of a donated step, and of a start."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from . import contestants, measure, start, works
from .contestants import Contestant, ours

PARTS = ("fast",)
VARIANTS = {"all": "", **{f"without {part}": f"-{part}" for part in PARTS}, "without compile/cpu": "0"}
WORKS = ("mlp", "toy32", "gpt-small", "convnet", "vit")
STARTED = ("toy32", "gpt-small", "vit")


def table(device: str = "cpu", seconds: float = 20.0, only: tuple[str, ...] = WORKS) -> dict[str, Any]:
    """Ratios to the step with all parts: above 1 where a part saves time.

    Args:
        device: "cpu".
        seconds: to measure each work for.
        only: names of works.
    """
    rows: list[dict[str, Any]] = []
    for name in only:
        rows += _of_work(name, torch.device(device), seconds)
    note = "Time of a donated step without the part over that with all parts, round by round."
    return {
        "title": "compile/cpu without each of its parts",
        "threads": torch.get_num_threads(),
        "rows": rows,
        "note": note,
    }


def starts(device: str = "cpu", only: tuple[str, ...] = STARTED, repeats: int = 1) -> dict[str, Any]:
    """Time to the first step without a part, divided by the time with all parts. A cold start has an empty cache; the
    warm start after it finds the cache that the cold one left. Each runs in its own process; imports do not count.

    Args:
        device: "cpu".
        only: names of works.
        repeats: starts of each kind.
    """
    rows: list[dict[str, Any]] = []
    for name in only:
        rounds = [
            {
                variant: start.cold_and_warm(name, ours.DONATED, device, PURESTEP_CPU=setting)
                for variant, setting in VARIANTS.items()
            }
            for _ in range(repeats)
        ]
        rows += [
            {
                "name": f"{name}, {variant}, {state}",
                "unit": "x",
                "values": [found[variant][index] / found["all"][index] for found in rounds],
            }
            for variant in VARIANTS
            for index, state in enumerate(("cold", "warm"))
        ]
    return {"title": "a start without each part of compile/cpu", "threads": torch.get_num_threads(), "rows": rows}


def _of_work(name: str, device: torch.device, seconds: float) -> Iterator[dict[str, Any]]:
    work = works.WORKS[name]
    made: list[Contestant] = []
    for variant, setting in VARIANTS.items():
        with _cache(setting):
            contestant = contestants.ENTRIES[ours.DONATED].make(work, device)
            contestant.turn(4)  # with graphs for what comes later
        contestant.name = variant
        made.append(contestant)
    spent = measure.interleave(made, measure.Plan(seconds=seconds, rounds=60, pause=0.0))
    for variant, values in spent.items():
        ratios = [value / whole for value, whole in zip(values, spent["all"], strict=True)]
        yield {"name": f"{name}, {variant}", "unit": "x", "values": ratios}


@contextmanager
def _cache(setting: str) -> Iterator[None]:
    """An empty cache directory, and the plug-in with this setting, while a step is compiled."""
    with tempfile.TemporaryDirectory() as directory:
        variables = {"TORCHINDUCTOR_CACHE_DIR": directory, "PURESTEP_CPU": setting}
        with mock.patch.dict(os.environ, variables):
            yield
