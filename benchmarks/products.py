"""The matrix products of a transformer's block alone, forward and backward: a compiled step's kernel beside torch's."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from purestep.compile.cpu import backend, graph_key

from . import measure
from .contestants.base import settle


def table(device: str = "cpu", seconds: float = 20.0, tokens: int = 1024, width: int = 128) -> dict[str, Any]:
    """All products of a block's four linear layers: outputs, gradients of inputs, gradients of weights.

    Args:
        device: where.
        seconds: to measure for.
        tokens: rows of the batch, T.
        width: of the model, D.
    """
    _keep_freed_memory()
    place = torch.device(device)
    generator = torch.Generator().manual_seed(0)
    operands: list[Tensor] = []
    for inside, outside in ((width, 3 * width), (width, width), (width, 4 * width), (4 * width, width)):
        sizes = ((tokens, inside), (outside, inside), (tokens, outside))
        operands += [torch.randn(*size, generator=generator).to(place) for size in sizes]
    with torch.no_grad():
        ours, _ = backend.compiled(graph_key.record(_products, operands), options=None)
        torch.testing.assert_close(list(ours(list(operands))), _products(*operands), rtol=1e-4, atol=1e-3)
        calls = [("torch", lambda: _products(*operands)), ("purestep", lambda: ours(list(operands)))]
        runners = [measure.Function(name, call, lambda: settle(place)) for name, call in calls]
        spent = measure.interleave(runners, measure.Plan(seconds=seconds))
    rows = [{"name": name, "unit": "s", "values": values} for name, values in spent.items()]
    title = f"three products of each of the four layers of a block, {tokens} x {width}"
    note = f"{3 * 2 * tokens * 12 * width * width / 1e9:.2f} GFLOP."
    return {"title": title, "threads": torch.get_num_threads(), "rows": rows, "note": note}


def _keep_freed_memory() -> None:
    """No page faults for results: a step's are written into its state, or into memory that it keeps (glibc)."""
    limit = getattr(ctypes.CDLL(None), "mallopt", None)
    if limit is not None:
        for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
            limit(option, 1 << 30)


def _products(*operands: Tensor) -> list[Tensor]:
    """``x_TI @ w_OI.T``, ``g_TO @ w_OI`` and ``g_TO.T @ x_TI`` of each layer."""
    layers = zip(operands[::3], operands[1::3], operands[2::3], strict=True)
    return [product for x, w, g in layers for product in (x @ w.t(), g @ w, g.t() @ x)]
