"""How long one waits: for the first step, compiled from nothing or from a cache, and for an import."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from . import alone, contestants, works
from .contestants import byhand, jaxes, ours

WHO = [ours.DONATED, ours.COMPILED, byhand.COMPILED, byhand.ALL_COMPILED, jaxes.DONATED]


def table(work: str, device: str = "cpu", only: list[str] | None = None, repeats: int = 3) -> dict[str, Any]:
    """From the model to the first loss, imports apart: with an empty cache on disk, then with what that left.

    Contestants take turns, as in a table of steps: a machine that is slow for a minute is slow for all of them.
    """
    lacking = {name: contestants.lacking(contestants.ENTRIES[name]) for name in only or WHO}
    absent = [
        {"name": name, "why": f"not installed: {', '.join(missing)}"} for name, missing in lacking.items() if missing
    ]
    present = [name for name, missing in lacking.items() if not missing]
    rounds = [{name: cold_and_warm(work, name, device) for name in present} for _ in range(repeats)]
    rows = [
        {"name": f"{name}, {state}", "unit": "s", "values": [found[name][index] for found in rounds]}
        for name in present
        for index, state in enumerate(("cold", "warm"))
    ]
    note = "A process each; imports are not counted, what the compiler loads itself is."
    title = works.WORKS[work].about
    return {"title": title, "threads": torch.get_num_threads(), "rows": rows, "absent": absent, "note": note}


def cold_and_warm(work: str, name: str, device: str, **variables: str) -> tuple[float, float]:
    """Seconds to the first step of a contestant in two processes, which share a cache that begins empty. ``variables``
    are added to their environment."""
    with tempfile.TemporaryDirectory() as directory:
        environment = {
            "TORCHINDUCTOR_CACHE_DIR": str(Path(directory) / "inductor"),
            "TRITON_CACHE_DIR": str(Path(directory) / "triton"),
            "JAX_COMPILATION_CACHE_DIR": str(Path(directory) / "jax"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            **variables,
        }
        arguments = {"work": work, "name": name, "device": device}
        target = "benchmarks.start:first_step"
        cold, warm = (alone.call(target, arguments, environment=environment) for _ in range(2))
        return cold, warm


def first_step(work: str, name: str, device: str) -> float:
    """Seconds."""
    place = torch.device(device)
    if name == jaxes.DONATED:
        import flax.linen
        import optax

        del flax, optax  # their import is not what is measured
    works.seeded_model(works.WORKS[work], place)  # the device's own start is not either
    start = time.perf_counter()
    made = contestants.ENTRIES[name].make(works.WORKS[work], place)
    (loss,) = made.turn(1).losses
    made.read(loss)
    return time.perf_counter() - start


def importing(device: str = "cpu", repeats: int = 5) -> dict[str, Any]:
    """Seconds that an import takes: of torch, and then of purestep."""
    del device  # nothing is computed
    code = (
        "import time; a = time.perf_counter(); import torch; b = time.perf_counter(); import purestep; "
        "print(b - a, time.perf_counter() - b)"
    )
    pairs = [_printed(code) for _ in range(repeats + 1)][1:]  # the first reads the files
    rows = [
        {"name": name, "unit": "s", "values": list(values)}
        for name, values in zip(("torch", "purestep"), zip(*pairs, strict=True), strict=True)
    ]
    return {"title": "import torch, then purestep", "rows": rows}


def _printed(code: str) -> list[float]:
    done = subprocess.run([sys.executable, "-c", code], cwd=alone.ROOT, capture_output=True, text=True, check=True)
    return [float(word) for word in done.stdout.split()]
