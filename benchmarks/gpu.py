"""GPT-2's tokens a second as a share of what the GPU can do."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

from . import models, steps, works
from .contestants import ours
from .contestants.base import settle

PEAK = 989e12
"""Floating-point operations a second of an H100 SXM in bfloat16, dense, as NVIDIA's data sheet has them."""


def gpt2(
    device: str = "cuda", only: list[str] | None = None, seconds: float = 120.0, work: str = "gpt2"
) -> dict[str, Any]:
    """Tokens a second, and what share that is of the rate of a plain matrix product and, on CUDA, of an H100's peak."""
    place, chosen = torch.device(device), works.WORKS[work]
    result = steps.measured(chosen, device, only, seconds=seconds)
    dtype = torch.bfloat16 if chosen.bf16 else torch.float32
    size = 8192 if place.type == "cuda" else 1024
    rate = matmul_rate(place, dtype, size)
    settle(place)
    count = flops_a_token(works.seeded_model(chosen))
    rows: list[dict[str, Any]] = []
    for row in result["rows"]:
        share = [chosen.tokens * count / value / rate for value in row["values"]]
        name = "share of matmul" if row["name"] == ours.DONATED else f"share of matmul, {row['name']}"
        rows.append({"name": name, "unit": "", "values": share})
        if place.type == "cuda":
            of_peak = [each * rate / PEAK for each in share]
            rows.append({"name": name.replace("matmul", "989 TFLOP/s"), "unit": "", "values": of_peak})
    rows.append({"name": f"matmul of {size} x {size}", "unit": "TFLOP/s", "values": [rate / 1e12]})
    note = f"{count / 1e9:.3g} GFLOP a token: 6 a weight in a product, 12 a layer, width and position of the context."
    return result | {"rows": [*result["rows"], *rows], "note": note}


def flops_a_token(model: nn.Module) -> float:
    """As nanoGPT counts: attention whole, though half of it is masked; the tied embedding once, as the head."""
    assert isinstance(model, models.GPT)
    size = model.size
    weights = sum(p.numel() for p in model.parameters()) - model.position.weight.numel()
    return 6 * weights + 12 * size.layers * size.width * size.context


def matmul_rate(device: torch.device, dtype: torch.dtype, size: int = 8192, calls: int = 20) -> float:
    """Floating-point operations a second in the product of two square matrices."""
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    for _ in range(3):
        left @ right
    settle(device)
    start = time.perf_counter()
    for _ in range(calls):
        left @ right
    settle(device)
    return 2 * size**3 * calls / (time.perf_counter() - start)
