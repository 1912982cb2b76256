"""Where and with what a measurement was taken."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

from .alone import ROOT

PACKAGES = (
    "torch",
    "optree",
    "orbax-checkpoint",
    "numpy",
    "triton",
    "lightning",
    "accelerate",
    "transformers",
    "torchopt",
    "jax",
    "flax",
    "optax",
)


def describe(device: str) -> dict[str, Any]:
    """Machine, versions and commit."""
    found: dict[str, Any] = {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch threads": torch.get_num_threads(),
        "commit": commit(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "absent": [name for name in PACKAGES if not _version(name)],
    }
    if device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
        found["cuda"] = torch.version.cuda
    return found


def commit() -> str:
    """The commit that is checked out, with a word where files differ from it."""
    try:
        name = _git("rev-parse", "--short=12", "HEAD")
        changed = _git(
            "status", "--porcelain", "--untracked-files=no", "--", "src", "benchmarks", ":!benchmarks/results"
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name}, with changes" if changed else name


def now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = (line for line in info.read_text().splitlines() if line.startswith("model name"))
        return next(lines, "").partition(":")[2].strip() or platform.machine()
    return platform.processor() or platform.machine()
