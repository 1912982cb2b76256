"""What exact repetition depends on beyond the state: a record that each snapshot keeps."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch


def environment(device: torch.device) -> dict[str, Any]:
    """What exact repetition depends on beyond the state: versions, threads, and the `device` of its leaves."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return _versions() | {"threads": torch.get_num_threads(), "device": name}


@cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("purestep", "torch", "numpy", "orbax-checkpoint", "jax"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from a source tree that was never installed
            found[name] = "unknown"
    return found
