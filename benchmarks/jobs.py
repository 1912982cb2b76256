"""What there is to measure, by name: each job runs in a process of its own and returns rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from . import alone
from .contestants import byhand, jaxes, ours

CORE = [byhand.COMPILED, ours.DONATED, jaxes.DONATED]  # what --quick compares
GPT_RUNS = {"work": "gpt-small", "steps": 60, "rounds": 5}


class Job(NamedTuple):
    """A function in a process of its own."""

    about: str
    target: str  # "module:function", taking `device` and these
    arguments: dict[str, Any]
    quick: dict[str, Any] | None = None  # what --quick changes; None: left out there
    threads: int | None = None  # None: as many as there are cores
    limit: float | None = None  # s, of the quick form

    def run(self, device: str, *, quick: bool) -> Any:
        """What the function returns.

        Raises:
            Failed: it did not return.
        """
        arguments = {"device": device} | self.arguments | ((self.quick or {}) if quick else {})
        environment = alone.threads_environment(self.threads)
        return alone.call(self.target, arguments, environment=environment, limit=self.limit if quick else None)


def _table(work: str, about: str, *, threads: int | None = None, quick: dict[str, Any] | None = None) -> Job:
    return Job(f"one step: {about}", "benchmarks.steps:table", {"work": work}, quick, threads)


def _on_cpu() -> dict[str, Job]:
    short = {"seconds": 8}
    return {
        "mlp-1": _table("mlp", "MLP, one thread", threads=1, quick=short),
        "mlp": _table("mlp", "MLP", quick=short),
        "toy32-1": _table("toy32", "32 small layers, one thread", threads=1, quick=short | {"only": CORE}),
        "toy32": _table("toy32", "32 small layers"),
        "convnet": _table("convnet", "convolutions with BatchNorm"),
        "gpt-small": _table("gpt-small", "GPT of 0.9 M", quick={"seconds": 20, "only": [*CORE, ours.FIT]}),
        "gpt-medium": _table("gpt-medium", "GPT of 34 M", quick={"seconds": 60, "only": [*CORE, byhand.ALL_COMPILED]}),
        "vit": _table("vit", "ViT"),
        "fit-mlp-1": Job("whole runs, MLP, one thread", "benchmarks.fitting:table", {}, {"rounds": 4}, 1),
        "fit-mlp": Job("whole runs, MLP", "benchmarks.fitting:table", {}),
        "fit-gpt": Job("whole runs, GPT of 0.9 M", "benchmarks.fitting:table", GPT_RUNS),
        "memory": Job("peak memory, GPT of 34 M", "benchmarks.memory:table", {"work": "gpt-medium"}),
        "start": Job("time to the first step, GPT of 0.9 M", "benchmarks.start:table", {"work": "gpt-small"}),
        "parallel-1": _parallel(1),
        "parallel-2": _parallel(2),
        "import": Job("import", "benchmarks.start:importing", {}, {}),
        "save-1.2GB": _save("1.2 GB", 30, 10_000_000),
        "save-100MB": _save("100 MB", 10, 2_500_000),
        "save-leaves": _save("1,000 leaves of 4 KB", 1000, 1000),
    }


def _parallel(world: int, work: str = "gpt-small") -> Job:
    return Job(f"{world} processes", "benchmarks.parallel:table", {"world": world, "work": work}, threads=None)


def _save(about: str, leaves: int, size: int) -> Job:
    arguments = {"leaves": leaves, "size": size}
    return Job(f"saving and restoring {about}", "benchmarks.saving:table", arguments, {"rounds": 3})


def _on_cuda() -> dict[str, Job]:
    gpt2 = {"seconds": 40, "only": CORE}
    return {
        "gpt2": Job("GPT-2 124 M, bfloat16", "benchmarks.gpu:gpt2", {}, gpt2, limit=350),
        "mlp": _table("mlp", "MLP"),
        "toy32": _table("toy32", "32 small layers"),
        "gpt-small": _table("gpt-small", "GPT of 0.9 M"),
        "convnet": _table("convnet", "convolutions with BatchNorm"),
        "vit": _table("vit", "ViT"),
        "resnet50": _table("resnet50", "ResNet-50, bfloat16"),
        "parallel": _parallel(torch.cuda.device_count() or 1, "gpt2"),
        "memory": Job("peak memory, GPT-2 124 M", "benchmarks.memory:table", {"work": "gpt2"}),
    }


def all_jobs(device: str) -> dict[str, Job]:
    """In the order in which they run."""
    return _on_cuda() if device == "cuda" else _on_cpu()


def chosen(device: str, only: list[str], *, quick: bool) -> dict[str, Job]:
    """Those that were asked for.

    Raises:
        SystemExit: a name that no job has.
    """
    found = all_jobs(device)
    for name in only:
        if not any(job.startswith(name) for job in found):
            raise SystemExit(f"no job {name!r}; there are {', '.join(found)}")
    # An exact name is that job alone; else all whose names begin so.
    if only:
        named = {job for name in only for job in found if job == name or (name not in found and job.startswith(name))}
        return {job: found[job] for job in found if job in named}
    return {name: job for name, job in found.items() if not quick or job.quick is not None}
