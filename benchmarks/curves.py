"""The cost of a step against the number of leaves, of parameters, of micro-batches to an update, of steps to a call."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

import purestep as ps

from . import measure, models, steps, works
from .contestants import byhand, ours
from .contestants.base import settle
from .works import Work

WHO = [byhand.COMPILED, ours.DONATED]  # and the eager loop that they are compared with
PER_PARAMETER = 4  # leaves: the parameter, two moments, the average


def leaves(device: str = "cpu", sizes: Sequence[int] = (8, 64, 512, 4096), seconds: float = 15.0) -> dict[str, Any]:
    """Vectors of 16 numbers: nothing but calls."""

    def work(count: int) -> Work:
        vectors = count // PER_PARAMETER
        batch = works.vectors(8, 16 * vectors, 2)
        return Work(f"leaves-{count}", "", lambda: models.Vectors(vectors, 16), batch, seconds=seconds)

    return _curve("leaves", "leaves of the state", sizes, work, device)


def parameters(
    device: str = "cpu", sizes: Sequence[int] = (1, 4, 16, 64, 100), seconds: float = 30.0
) -> dict[str, Any]:
    """Millions of parameters in four square layers, a batch of 8: nothing but memory."""

    def work(millions: int) -> Work:
        width = int((millions * 1e6 / 4) ** 0.5)
        batch = works.vectors(8, width, width)
        return Work(f"parameters-{millions}", "", lambda: models.mlp([width] * 5), batch, seconds=seconds)

    return _curve("millions of parameters", "parameters", sizes, work, device)


def _curve(x: str, title: str, sizes: Sequence[int], work: Callable[[int], Work], device: str) -> dict[str, Any]:
    points: list[dict[str, Any]] = []
    absent: list[dict[str, str]] = []
    for size in sizes:
        found = steps.measured(work(size), device, WHO)
        absent += [one | {"name": f"{one['name']}, {size}"} for one in found["absent"]]
        points.append({"x": size, "rows": found["rows"]})
    return {"title": title, "x": x, "threads": torch.get_num_threads(), "points": points, "absent": absent}


def accumulation(
    device: str = "cpu", windows: Sequence[int] = (1, 2, 4, 8, 16), seconds: float = 120.0, work: str = "gpt-small"
) -> dict[str, Any]:
    """Seconds a micro-batch, of the donated step."""
    spent = _micro_batches(works.WORKS[work], device, windows, seconds)
    points = [
        {"x": window, "rows": [{"name": ours.DONATED, "unit": "s", "values": found}]} for window, found in spent.items()
    ]
    title = f"micro-batches to an update, {works.WORKS[work].about}"
    return {"title": title, "x": "micro-batches", "threads": torch.get_num_threads(), "points": points}


def four_and_one(device: str = "cpu", seconds: float = 60.0, work: str = "gpt-small") -> dict[str, Any]:
    """Seconds a micro-batch with an update every fourth one, and with one every time."""
    spent = _micro_batches(works.WORKS[work], device, (1, 4), seconds)
    rows = [{"name": str(window), "unit": "s", "values": found} for window, found in spent.items()]
    title = f"per micro-batch, {works.WORKS[work].about}"
    return {"title": title, "threads": torch.get_num_threads(), "rows": rows}


def unrolled(
    device: str = "cpu", sizes: Sequence[int] = (1, 2, 4, 8, 16), seconds: float = 40.0, work: str = "mlp"
) -> dict[str, Any]:
    """Seconds a step, of the donated step that makes so many in a call."""
    chosen, place, each = works.WORKS[work], torch.device(device), max(sizes)
    spent = _apiece({size: _launches(chosen, place, size, each) for size in sizes}, place, each, seconds)
    points = [
        {"x": size, "rows": [{"name": ours.DONATED, "unit": "s", "values": found}]} for size, found in spent.items()
    ]
    threads = torch.get_num_threads()
    return {"title": f"steps to a call, {chosen.about}", "x": "steps to a call", "threads": threads, "points": points}


def _micro_batches(work: Work, device: str, windows: Sequence[int], seconds: float) -> dict[int, list[float]]:
    place, each = torch.device(device), max(windows)
    return _apiece({window: _window(work, place, window, each) for window in windows}, place, each, seconds)


def _apiece(
    calls: Mapping[int, Callable[[], None]], device: torch.device, each: int, seconds: float
) -> dict[int, list[float]]:
    """Seconds that one of ``each`` takes, by contestant."""
    runners = [measure.Function(str(size), call, lambda: settle(device)) for size, call in calls.items()]
    for runner in runners:
        runner.turn(1)
    spent = measure.interleave(runners, measure.Plan(seconds=seconds, calls=max(2, 8 // each)))
    return {size: [value / each for value in spent[str(size)]] for size in calls}


def _window(work: Work, device: torch.device, window: int, each: int) -> Callable[[], None]:
    """``each`` micro-batches: as many whole windows as fit."""
    program = ours.program(work, accumulate=window)
    batches = itertools.cycle(works.batches(work, device))
    return _calls(program, ps.compile_step(program.train_step, donate=True), batches, each, device)


def _launches(work: Work, device: torch.device, size: int, each: int) -> Callable[[], None]:
    """``each`` steps, ``size`` of them to a call."""
    program = ours.program(work)
    step = ps.compile_step(program.train_step, donate=True, unroll=size, cuda_graph=device.type == "cuda")
    batches = itertools.cycle(works.batches(work, device))
    given = batches if size == 1 else iter(lambda: list(itertools.islice(batches, size)), [])
    return _calls(program, step, given, each // size, device)


def _calls(
    program: ps.Program, step: Callable[..., Any], batches: Iterator[Any], count: int, device: torch.device
) -> Callable[[], None]:
    assert program.init is not None
    state = program.init(seed=0, device=device)

    def call() -> None:
        nonlocal state
        for _ in range(count):
            state, _ = step(state, next(batches))

    return call
