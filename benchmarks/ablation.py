"""The parts of `compile/cpu`, switched off one by one: time of a donated step, and processor time of the first one."""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from . import contestants, measure, works
from .contestants import Contestant, ours

PARTS = ("gemm", "attention", "embedding_grad", "workspace", "outline", "offset_pointers", "code_cache")
VARIANTS = {"all": "", **{f"without {part}": f"-{part}" for part in PARTS}, "without compile/cpu": "0"}
WORKS = ("mlp", "toy32", "gpt-small", "convnet", "vit")


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
    note = (
        "Time of a donated step without the part over that with all parts, round by round; and processor time of the "
        "first step, g++ included, over the same (one sample): from an empty cache, in a process that has compiled "
        "before."
    )
    return {
        "title": "compile/cpu without each of its parts",
        "threads": torch.get_num_threads(),
        "rows": rows,
        "note": note,
    }


def _of_work(name: str, device: torch.device, seconds: float) -> Iterator[dict[str, Any]]:
    work = works.WORKS[name]
    with _cache("0"):  # loads the compiler, which the first variant would pay for
        contestants.ENTRIES[ours.DONATED].make(works.WORKS["mlp"], device).turn(1)
    made: list[Contestant] = []
    first: dict[str, float] = {}
    for variant, setting in VARIANTS.items():
        with _cache(setting):
            start = _processor_time()
            contestant = contestants.ENTRIES[ours.DONATED].make(work, device)
            contestant.turn(1)
            first[variant] = _processor_time() - start
            contestant.turn(3)  # with graphs for what comes later
        contestant.name = variant
        made.append(contestant)
    spent = measure.interleave(made, measure.Plan(seconds=seconds, rounds=60, pause=0.0))
    for variant, values in spent.items():
        ratios = [value / whole for value, whole in zip(values, spent["all"], strict=True)]
        yield {"name": f"{name}, {variant}", "unit": "x", "values": ratios}
    for variant, value in first.items():
        yield {"name": f"{name}, {variant}: first step", "unit": "x", "values": [value / first["all"]]}


def _processor_time() -> float:
    """Seconds of this process and of those that it has waited for. Other work on the machine does not count."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


@contextmanager
def _cache(setting: str) -> Iterator[None]:
    """An empty cache directory, and the plug-in with this setting, while a step is compiled."""
    with tempfile.TemporaryDirectory() as directory:
        variables = {"TORCHINDUCTOR_CACHE_DIR": directory, "PURESTEP_CPU": setting}
        with mock.patch.dict(os.environ, variables):
            yield
