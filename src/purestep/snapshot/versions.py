"""The environment that exact repetition depends on; each snapshot stores it."""

from __future__ import annotations

import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch


def environment(device: torch.device) -> dict[str, Any]:
    """Versions of the packages, the number of threads, and the name of the device."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return _versions() | {"threads": torch.get_num_threads(), "device": name}


@cache
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("purestep", "torch", "numpy", "orbax-checkpoint", "jax"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # run from a source tree without installation
            found[name] = "unknown"
    return found
