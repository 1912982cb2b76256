"""States and disks for tests that write snapshots and files."""

from __future__ import annotations

import math
import os
import signal
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from purestep import tree


def small(value: float = 0.0) -> dict[str, Tensor]:
    return {"w": torch.arange(6.0).reshape(2, 3) + value, "b": torch.full((2,), float(value))}


def bits(tensor: Tensor) -> bytes:
    """The values' bytes in C order: NaN equals NaN, -0 differs from 0."""
    plain = tensor.detach().cpu().resolve_conj().resolve_neg()
    if plain.dtype == torch.complex128:
        plain = torch.view_as_real(plain)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return plain.view(integers[plain.dtype.itemsize]).numpy().tobytes()


def assert_same(found: Any, expected: Any) -> None:
    assert tree.flatten(found)[1] == tree.flatten(expected)[1]
    for (path, a), (_, b) in zip(tree.with_paths(found), tree.with_paths(expected), strict=True):
        if isinstance(b, Tensor):
            assert (a.shape, a.dtype, a.device) == (b.shape, b.dtype, b.device), path
            assert bits(a) == bits(b), path
        else:
            assert type(a) is type(b), path
            assert a == b or (a != a and b != b), path


GOLDEN = Path(__file__).parent / "golden" / "snapshot-format-1"


def golden_state() -> dict[str, Any]:
    return {
        "params": {"layers.0.weight": torch.arange(6.0).reshape(2, 3), "layers.0.bias": torch.tensor([0.5, -0.0])},
        "half": torch.tensor([1.5, math.inf]).bfloat16(),
        "eight": torch.tensor([0.25, 448.0]).to(torch.float8_e4m3fn),
        "count": torch.tensor(2**40),
        "empty": torch.zeros(0, 2),
        "python": {"rate": 0.1, "name": "adamw", "on": True, "epoch": 3},
    }


@contextmanager
def file_size_limit(size: int):
    """A disk that takes no file larger than so many bytes."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def record_calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What reaches the kernel, in order: (call, path)."""
    calls: list[tuple[str, str]] = []
    real = {name: getattr(os, name) for name in ("fsync", "rename", "replace")}

    def fsync(descriptor: int) -> None:
        calls.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        real["fsync"](descriptor)

    def rename(source, target) -> None:
        calls.append(("rename", f"{source} -> {target}"))
        real["rename"](source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    monkeypatch.setattr(os, "replace", rename)
    return calls
