"""The most memory that a training takes, each contestant in a process of its own."""

from __future__ import annotations

from typing import Any

import torch

from . import alone, contestants, measure, works
from .contestants import byhand, jaxes, ours

WHO = [byhand.EAGER, byhand.COMPILED, byhand.ALL_COMPILED, ours.COMPILED, ours.DONATED, jaxes.DONATED]


def table(work: str, device: str = "cpu", only: list[str] | None = None, repeats: int = 2) -> dict[str, Any]:
    """Peaks of several processes each; one more is run first, so that all compile from a warm cache."""
    chosen = works.WORKS[work]
    rows: list[dict[str, Any]] = []
    absent: list[dict[str, str]] = []
    for name in only or WHO:
        entry = contestants.ENTRIES[name]
        missing = contestants.lacking(entry)
        if missing:
            absent.append({"name": name, "why": f"not installed: {', '.join(missing)}"})
            continue
        arguments = {"work": work, "name": name, "device": device}
        try:
            found = [alone.call("benchmarks.memory:peak", arguments) for _ in range(repeats + 1)][1:]
        except alone.Failed as error:
            absent.append({"name": name, "why": str(error).splitlines()[-1]})
            continue
        rows.append({"name": name, "unit": "B", "values": found})
    what = "reserved on the device" if device == "cuda" else "resident, libraries and all"
    note = f"High-water mark over three steps after three others, {what}; one process each."
    if device == "cuda":
        note += " JAX's is of the whole process: it cannot be put back."
    return {"title": chosen.about, "threads": torch.get_num_threads(), "rows": rows, "absent": absent, "note": note}


def peak(work: str, name: str, device: str, steps: int = 3) -> int:
    """Bytes."""
    place = torch.device(device)
    made = contestants.ENTRIES[name].make(works.WORKS[work], place)
    made.turn(steps)
    if place.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        made.turn(steps)
        # What the device is short of, pools of CUDA graphs included. JAX reserves on its own.
        return torch.cuda.max_memory_reserved() if name != jaxes.DONATED else _jax_peak()
    measure.forget_peak()
    made.turn(steps)
    return measure.peak_bytes()


def _jax_peak() -> int:
    import jax

    stats = jax.devices("gpu")[0].memory_stats()
    return stats.get("peak_pool_bytes", stats["peak_bytes_in_use"])
