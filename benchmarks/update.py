"""The update alone: AdamW and EMA of 32 M numbers, beside what memory can do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import purestep as ps
from purestep import optim

from . import guard, measure
from .contestants.base import settle
from .works import Recipe

PASSES = 9  # over the numbers: gradient, parameter, two moments and average are read, all but the first written


def table(device: str = "cpu", seconds: float = 30.0, matrices: int = 32, size: int = 1024) -> dict[str, Any]:
    """purestep's update against torch's fused AdamW with a foreach lerp; no clipping in either."""
    place, recipe = torch.device(device), Recipe()
    generator = torch.Generator().manual_seed(0)
    start = {f"w{i}": torch.randn(size, size, generator=generator).to(place) for i in range(matrices)}
    gradients = {name: 0.1 * torch.randn(size, size, generator=generator).to(place) for name in start}
    theirs, their_weights = _torch(start, gradients, recipe)
    ours, our_weights = _purestep(start, gradients, recipe)
    for _ in range(3):
        theirs()
        ours()
    off = guard.distance(our_weights(), their_weights()) / guard.distance(their_weights(), start)
    if not off < 1e-3:
        raise AssertionError(f"the two updates differ by {off:.3g} of their way")
    source = torch.ones(matrices * size * size, device=place)
    target = torch.empty_like(source)
    named: list[tuple[str, Callable[[], Any]]] = [
        ("torch", theirs),
        ("purestep", ours),
        ("copy", lambda: target.copy_(source)),
        ("scale in place", lambda: source.mul_(1.0)),
    ]
    runners = [measure.Function(name, call, lambda: settle(place)) for name, call in named]
    spent = measure.interleave(runners, measure.Plan(seconds=seconds))
    rows = [{"name": name, "unit": "s", "values": found} for name, found in spent.items()]
    shares = {
        f"share of {name}": [
            PASSES / 2 * plain / update for plain, update in zip(found, spent["purestep"], strict=True)
        ]
        for name, found in spent.items()
        if name in ("copy", "scale in place")
    }
    rate = [2 * source.numel() * 4 / value / 1e9 for value in spent["copy"]]
    rows += [{"name": name, "unit": "", "values": found} for name, found in shares.items()]
    rows.append({"name": "copy bandwidth", "unit": "GB/s", "values": rate})
    count = f"{matrices * size * size / 1e6:.0f} M numbers in {matrices} tensors"
    note = (
        f"Shares: {PASSES} passes over the numbers in the time of the update, against 2 in that of a copy or of a "
        "scaling in place. A copy first reads what it writes over, which nobody counts; the other two do not."
    )
    return {"title": count, "threads": torch.get_num_threads(), "rows": rows, "note": note}


def _torch(start: dict[str, Tensor], gradients: dict[str, Tensor], recipe: Recipe) -> tuple[Any, Any]:
    params = {name: value.clone().requires_grad_() for name, value in start.items()}
    for name, value in params.items():
        value.grad = gradients[name].clone()
    flat = list(params.values())
    optimizer = torch.optim.AdamW(
        flat,
        lr=recipe.learning_rate,
        betas=(recipe.b1, recipe.b2),
        eps=recipe.eps,
        weight_decay=recipe.weight_decay,
        fused=True,
    )
    shadow, source = [p.detach().clone() for p in flat], [p.detach() for p in flat]

    def update() -> None:
        optimizer.step()
        torch._foreach_lerp_(shadow, source, 1 - recipe.ema)

    return update, lambda: {name: p.detach() for name, p in params.items()}


def _purestep(start: dict[str, Tensor], gradients: dict[str, Tensor], recipe: Recipe) -> tuple[Any, Any]:
    tx = optim.adamw(recipe.learning_rate, recipe.b1, recipe.b2, eps=recipe.eps, weight_decay=recipe.weight_decay)
    average = ps.ema.average(recipe.ema)

    def step(state: ps.TrainState, gradients: dict[str, Tensor]) -> tuple[ps.TrainState, ps.Metrics]:
        updates, opt_state = tx.update(gradients, state.opt_state, state.params)
        params = optim.apply_updates(state.params, updates)
        shadow = average.update(state.ema, params, {}, state.updates)
        return state._replace(params=params, opt_state=opt_state, ema=shadow, updates=state.updates + 1), {}

    holder = torch.nn.ParameterDict(start)
    state = ps.program(holder, ps.supervised(torch.nn.MSELoss()), tx, ema=recipe.ema).init()
    compiled = ps.compile_step(step, donate=True)

    def update() -> None:
        nonlocal state
        state, _ = compiled(state, gradients)

    return update, lambda: dict(state.params)


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
