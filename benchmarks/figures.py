"""What is aimed at, and whether it was reached: every figure by its name, from the rows of the jobs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from . import measure
from .contestants import byhand, jaxes, ours, trainers
from .measure import Spread

Jobs = Mapping[str, Any]  # name -> what the job returned


class Missing(Exception):
    """A row that the figure needs is not there."""


class Figure(NamedTuple):
    """One line of the table."""

    name: str
    aim: float
    better: Literal["more", "less"]
    unit: str  # "x", "us", "s"
    of: Callable[[Jobs], Spread]
    device: str = "cpu"


class Reading(NamedTuple):
    """A figure as it was measured."""

    name: str
    aim: str
    measured: str
    spread: str
    verdict: str  # "met", "missed", "not measured"


def values(jobs: Jobs, job: str, row: str) -> list[float]:
    """The numbers of one row, one a round."""
    for found in jobs.get(job, {}).get("rows", ()):
        if found["name"] == row:
            return found["values"]
    raise Missing(f"{job}: {row}")


def _times(job: str, other: str | Sequence[str], row: str = ours.DONATED) -> Callable[[Jobs], Spread]:
    """How many times as fast ``row`` is as the fastest of the others."""

    def of(jobs: Jobs) -> Spread:
        names = [other] if isinstance(other, str) else [name for name in other if _has(jobs, job, name)]
        if not names:
            raise Missing(f"{job}: by hand")
        best = min((values(jobs, job, name) for name in names), key=lambda found: measure.spread(found).median)
        return measure.ratio(best, values(jobs, job, row))

    return of


def _has(jobs: Jobs, job: str, row: str) -> bool:
    return any(found["name"] == row for found in jobs.get(job, {}).get("rows", ()))


def _share(job: str, row: str, other: str) -> Callable[[Jobs], Spread]:
    """``row`` over ``other``."""
    return lambda jobs: measure.ratio(values(jobs, job, row), values(jobs, job, other))


def _value(job: str, row: str, scale: float = 1.0) -> Callable[[Jobs], Spread]:
    return lambda jobs: measure.spread([scale * value for value in values(jobs, job, row)])


def _more(job: str, row: str, other: str) -> Callable[[Jobs], Spread]:
    """Microseconds that ``row`` takes on top of ``other``."""

    def of(jobs: Jobs) -> Spread:
        pair = values(jobs, job, row), values(jobs, job, other)
        return measure.difference(*([1e6 * value for value in found] for found in pair))

    return of


def _leanest(jobs: Jobs) -> Spread:
    loops = [name for name in (byhand.COMPILED, byhand.ALL_COMPILED) if _has(jobs, "memory", name)]
    if not loops:
        raise Missing("memory: by hand")
    least = min(values(jobs, "memory", name)[0] for name in loops)
    return measure.spread([value / least for value in values(jobs, "memory", ours.DONATED)])


BY_HAND = (byhand.EAGER, byhand.COMPILED, byhand.ALL_COMPILED, byhand.REDUCED)


def _figures() -> list[Figure]:
    found: list[Figure] = []
    for job, label in (("mlp-1", "one thread"), ("mlp", "all threads")):
        found += [
            Figure(f"MLP step against eager + fused, {label}", 5.0, "more", "x", _times(job, byhand.EAGER)),
            Figure(f"MLP step against compiled + fused, {label}", 7.0, "more", "x", _times(job, byhand.COMPILED)),
            Figure(f"MLP step against JAX with donation, {label}", 2.0, "more", "x", _times(job, jaxes.DONATED)),
        ]
    found += [
        Figure("GPT 0.9 M step against the best by hand", 1.15, "more", "x", _times("gpt-small", BY_HAND)),
        Figure("GPT 0.9 M step against JAX", 1.6, "more", "x", _times("gpt-small", jaxes.DONATED)),
        Figure("peak memory, GPT 34 M, against the compiled loop by hand", 1.0, "less", "x", _leanest),
        Figure("GPT 34 M step against the best by hand", 1.03, "more", "x", _times("gpt-medium", BY_HAND)),
        Figure("32-layer toy, compiled call, one thread", 80.0, "less", "us", _value("toy32-1", ours.DONATED, 1e6)),
        Figure("32-layer toy, compiled call, all threads", 80.0, "less", "us", _value("toy32", ours.DONATED, 1e6)),
        Figure("cold time to the first step, GPT 0.9 M", 8.0, "less", "s", _value("start", f"{ours.DONATED}, cold")),
        Figure("warm time to the first step, GPT 0.9 M", 1.5, "less", "s", _value("start", f"{ours.DONATED}, warm")),
    ]
    for job, label in (("fit-mlp-1", "one thread"), ("fit-mlp", "all threads")):
        found += [
            Figure(
                f"fit on the MLP against Lightning, {label}",
                4.0,
                "more",
                "x",
                _times(job, trainers.LIGHTNING, ours.FIT),
            ),
            Figure(
                f"fit on top of the bare step, MLP, {label}", 10.0, "less", "us", _more(job, ours.FIT, ours.DONATED)
            ),
        ]
    found += [
        Figure("fit on the GPT, rate over its bare step", 0.99, "more", "x", _share("fit-gpt", ours.DONATED, ours.FIT)),
        Figure("import purestep, on top of torch", 0.15, "less", "s", _value("import", "purestep")),
    ]
    for job, label in (("save-1.2GB", "1.2 GB"), ("save-100MB", "100 MB"), ("save-leaves", "1,000 leaves of 4 KB")):
        save = _share(job, "save, blocking", "torch.save + fsync")
        restore = _share(job, "restore, verified", "torch.load + clone")
        found += [
            Figure(f"save blocks, against torch.save + fsync, {label}", 0.1, "less", "x", save),
            Figure(f"restore against torch.load + clone, {label}", 1.2, "less", "x", restore),
        ]
    return found + _on_cuda()


def _on_cuda() -> list[Figure]:
    found: list[Figure] = []
    for job, label in (("mlp", "MLP"), ("gpt-small", "GPT 0.9 M")):
        found += [
            Figure(
                f"{label} step against eager + fused", 8.0, "more", "x", _times(job, byhand.EAGER, ours.DONATED), "cuda"
            ),
            Figure(
                f"{label} step against reduce-overhead",
                1.5,
                "more",
                "x",
                _times(job, byhand.REDUCED, ours.DONATED),
                "cuda",
            ),
        ]
    return [
        *found,
        Figure("GPT-2 124 M, share of the matmul rate", 0.55, "more", "x", _value("gpt2", "share of matmul"), "cuda"),
        Figure("GPT-2 124 M against compiled + fused", 1.05, "more", "x", _times("gpt2", byhand.COMPILED), "cuda"),
        Figure("GPT-2 124 M against JAX", 1.0, "more", "x", _times("gpt2", jaxes.DONATED), "cuda"),
        Figure("peak memory against the compiled loop by hand", 1.0, "less", "x", _leanest, "cuda"),
    ]


FIGURES = _figures()


def read(jobs: Jobs, device: str) -> list[Reading]:
    """Every figure of that device."""
    return [_read(figure, jobs) for figure in FIGURES if figure.device == device]


def _read(figure: Figure, jobs: Jobs) -> Reading:
    sign = ">=" if figure.better == "more" else "<="
    aim = f"{sign} {_text(figure.aim, figure.unit)}"
    try:
        found = figure.of(jobs)
    except Missing as error:
        return Reading(figure.name, aim, "-", "-", f"not measured: {error}")
    met = found.median >= figure.aim if figure.better == "more" else found.median <= figure.aim
    around = f"{_text(found.low, figure.unit)} to {_text(found.high, figure.unit)}"
    return Reading(figure.name, aim, _text(found.median, figure.unit), around, "met" if met else "missed")


def _text(value: float, unit: str) -> str:
    return f"{value:.1f} {unit}" if unit == "us" else f"{value:.3g} {unit}"
