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


EAGER = [byhand.EAGER, ours.EAGER, ours.EAGER_DONATED, ours.EAGER_FIT]
EAGER_WORKS = {
    "mlp": "MLP",
    "toy32": "32 small layers",
    "convnet": "convolutions with BatchNorm",
    "gpt-small": "GPT of 0.9 M",
    "gpt-medium": "GPT of 34 M",
    "vit": "ViT",
}


def _eager() -> dict[str, Job]:
    return {
        f"eager-{work}": Job(
            f"one eager step: {about}, one thread",
            "benchmarks.steps:table",
            {"work": work, "only": EAGER, "seconds": 30},
            {"seconds": 12},
            1,
        )
        for work, about in EAGER_WORKS.items()
    } | {
        "memory-eager": Job(
            "peak memory of eager steps, GPT of 34 M",
            "benchmarks.memory:table",
            {"work": "gpt-medium", "only": [*EAGER, ours.EAGER_FREED]},
        )
    }


def _on_cpu() -> dict[str, Job]:
    short = {"seconds": 8}
    return _eager() | {
        "mlp-1": _table("mlp", "MLP, one thread", threads=1, quick=short),
        "mlp": _table("mlp", "MLP", quick=short),
        "toy32-1": _table("toy32", "32 small layers, one thread", threads=1, quick=short | {"only": CORE}),
        "toy32": _table("toy32", "32 small layers"),
        "convnet": _table("convnet", "convolutions with BatchNorm"),
        "gpt-small": _table("gpt-small", "GPT of 0.9 M", quick={"seconds": 20, "only": [*CORE, ours.FIT]}),
        "gpt-medium": _table("gpt-medium", "GPT of 34 M", quick={"seconds": 60, "only": [*CORE, byhand.ALL_COMPILED]}),
        "vit": _table("vit", "ViT"),
        "ensemble-1": _ensemble(8, threads=1),
        "ensemble": _ensemble(8),
        "ensemble-32": _ensemble(32, "tabular"),
        "ensemble-sweep": _ensemble(16, "tabular"),
        "fit-mlp-1": Job("whole runs, MLP, one thread", "benchmarks.fitting:table", {}, {"rounds": 4}, 1),
        "fit-mlp": Job("whole runs, MLP", "benchmarks.fitting:table", {}),
        "fit-gpt": Job("whole runs, GPT of 0.9 M", "benchmarks.fitting:table", GPT_RUNS),
        "products": Job("matrix products of a block", "benchmarks.products:table", {}, {"seconds": 5}),
        "products-wide": Job(
            "matrix products of a wide block", "benchmarks.products:table", {"tokens": 256, "width": 512}
        ),
        "update": Job("AdamW + EMA of 32 M numbers", "benchmarks.update:table", {}, {"seconds": 5}),
        "accumulation": Job("4 micro-batches to an update, and 1", "benchmarks.curves:four_and_one", {}),
        "memory": Job("peak memory, GPT of 34 M", "benchmarks.memory:table", {"work": "gpt-medium"}),
        "start": Job("time to the first step, GPT of 0.9 M", "benchmarks.start:table", {"work": "gpt-small"}),
        "ablation": Job("compile/cpu without each of its parts", "benchmarks.ablation:table", {}),
        "ablation-start": Job("a start without each part of compile/cpu", "benchmarks.ablation:starts", {}),
        "contention": Job("steps beside other work", "benchmarks.contention:table", {}),
        "parallel-1": _parallel(1),
        "parallel-2": _parallel(2),
        "import": Job("import", "benchmarks.start:importing", {}, {}),
        "save-1.2GB": _save("1.2 GB", 30, 10_000_000),
        "save-100MB": _save("100 MB", 10, 2_500_000),
        "save-leaves": _save("1,000 leaves of 4 KB", 1000, 1000),
        "snapshots": Job("steps of fit with snapshots", "benchmarks.saving:steps", {}),
        "curve-leaves": Job("number of leaves", "benchmarks.curves:leaves", {}),
        "curve-parameters": Job("number of parameters", "benchmarks.curves:parameters", {}),
        "curve-accumulation": Job("micro-batches to an update", "benchmarks.curves:accumulation", {}),
        "curve-unroll": Job("steps to a call, MLP, one thread", "benchmarks.curves:unrolled", {}, threads=1),
    }


def _ensemble(members: int, work: str = "mlp", threads: int | None = None) -> Job:
    arguments = {"work": work, "members": members}
    return Job(f"{members} models in one step", "benchmarks.ensemble:table", arguments, {"seconds": 10}, threads)


def _parallel(world: int, work: str = "gpt-small") -> Job:
    return Job(f"{world} processes", "benchmarks.parallel:table", {"world": world, "work": work}, threads=None)


def _save(about: str, leaves: int, size: int) -> Job:
    arguments = {"leaves": leaves, "size": size}
    return Job(f"saving and restoring {about}", "benchmarks.saving:table", arguments, {"rounds": 3})


def _on_cuda() -> dict[str, Job]:
    gpt2 = {"seconds": 40, "only": CORE}
    # The limits of the first four make up less than ten minutes.
    return {
        "capture": Job("a donated step is captured and equal to eager", "benchmarks.gpu:capture", {}, {}, limit=100),
        "rng": Job("dropout inside the graph", "benchmarks.gpu:randomness", {}, {}, limit=60),
        "fp16": Job("the loss scale inside the graph", "benchmarks.gpu:scaling", {}, {}, limit=60),
        "gpt2": Job("GPT-2 124 M, bfloat16", "benchmarks.gpu:gpt2", {}, gpt2, limit=350),
        "mlp": _table("mlp", "MLP"),
        "toy32": _table("toy32", "32 small layers"),
        "gpt-small": _table("gpt-small", "GPT of 0.9 M"),
        "convnet": _table("convnet", "convolutions with BatchNorm"),
        "vit": _table("vit", "ViT"),
        "resnet50": _table("resnet50", "ResNet-50, bfloat16"),
        "curve-unroll": Job("steps to a call, MLP", "benchmarks.curves:unrolled", {}),
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
