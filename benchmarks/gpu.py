"""What has to be seen on a GPU first: capture, random numbers and the loss scale inside the graph, GPT-2's rate.

The first three also run on the CPU, where there is nothing to capture but the graph of the compiler.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import purestep as ps

from . import guard, models, steps, works
from .contestants import byhand, ours
from .contestants.base import settle
from .update import matmul_rate
from .works import Work

PEAK = 989e12
"""Floating-point operations a second of an H100 SXM in bfloat16, dense, as NVIDIA's data sheet has them."""

Check = tuple[str, bool, str]  # what, whether it holds, what was seen


def _result(title: str, checks: list[Check], rows: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Checks as rows; what failed also as a line."""
    found = [{"name": what, "unit": "holds", "values": [float(holds)]} for what, holds, _ in checks]
    failed = [{"name": what, "why": f"FAILED: {seen}"} for what, holds, seen in checks if not holds]
    note = "; ".join(f"{what}: {seen}" for what, _, seen in checks if seen)
    return {"title": title, "rows": [*found, *(rows or [])], "absent": failed, "note": note}


def capture(device: str = "cuda", work: str = "mlp", calls: int = 20) -> dict[str, Any]:
    """The donated step against eager: the same numbers, one graph, the first state unharmed, and how long a call is."""
    place, chosen = torch.device(device), works.WORKS[work]
    program = ours.program(chosen)
    assert program.init is not None
    state = program.init(seed=0, device=place)
    begun = guard.copied(state.params)
    step = ps.compile_step(program.train_step, donate=True, cuda_graph=True)  # on the CPU a plain donated step
    eager, eager_losses = _run(program.train_step, state, chosen, place, calls)
    live, losses = _run(step, state, chosen, place, calls)
    off = guard.distance(guard.copied(live.params), guard.copied(eager.params))
    way = guard.distance(guard.copied(eager.params), begun)
    unharmed = guard.distance(guard.copied(state.params), begun)
    checks = [
        ("losses as in eager", _close(losses, eager_losses, chosen.tolerance), f"last {losses[-1]:.6g}"),
        ("weights as in eager", off < chosen.drift * way, f"{off / way:.2g} of their way off"),
        ("one graph", step.graphs == 1, f"{step.graphs}"),
        ("the first state stays valid", unharmed == 0.0, ""),
        ("the last state is counted", int(live.updates) == calls, f"{int(live.updates)} updates"),
    ]
    who = [ours.EAGER, ours.DONATED, ours.UNRECORDED, byhand.REDUCED] if device == "cuda" else [ours.DONATED]
    timed = steps.measured(chosen, device, who, seconds=10)
    result = _result("a donated step, captured whole", checks, timed["rows"])
    return result | {"absent": [*result["absent"], *timed["absent"]]}


def _run(step: Callable[..., Any], state: Any, work: Work, device: torch.device, calls: int) -> tuple[Any, list[float]]:
    seen: list[ps.Metrics] = []
    for batch in itertools.islice(itertools.cycle(works.batches(work, device)), calls):
        state, metrics = step(state, batch)
        seen.append(metrics)
    return state, [float(metrics["loss"]) for metrics in seen]


def _close(left: list[float], right: list[float], tolerance: float) -> bool:
    return all(abs(a - b) <= tolerance * abs(b) for a, b in zip(left, right, strict=True))


def _noisy() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Dropout(0.5), nn.Linear(128, 10))


def randomness(device: str = "cuda", calls: int = 6) -> dict[str, Any]:
    """Dropout on one batch with weights that stand still: every step draws anew, and the same key draws the same."""
    place = torch.device(device)
    still = works.Recipe(learning_rate=0.0)
    work = Work("dropout", "dropout", _noisy, works.vectors(64, 64, 10), count=1, recipe=still)
    program = ours.program(work)
    assert program.init is not None
    step = ps.compile_step(program.train_step, donate=True, cuda_graph=True)
    first = _run(step, program.init(seed=0, device=place), work, place, calls)[1]
    torch.randn(7, device=place)  # somebody else draws
    again = _run(step, program.init(seed=0, device=place), work, place, calls)[1]
    other = _run(step, program.init(seed=1, device=place), work, place, calls)[1]
    state = torch.random.get_rng_state()
    _run(step, program.init(seed=2, device=place), work, place, 2)
    checks = [
        ("every step draws anew", len(set(first)) == calls, f"{len(set(first))} losses of {calls}"),
        ("the same key draws the same", first == again, ""),
        ("another key draws others", not set(first) & set(other), ""),
        ("the caller's generator stays", torch.equal(state, torch.random.get_rng_state()), ""),
        ("one graph", step.graphs == 1, f"{step.graphs}"),
    ]
    return _result("dropout inside the graph", checks)


def scaling(device: str = "cuda") -> dict[str, Any]:
    """float16: a gradient that overflows skips the update and halves the scale; the next one is applied."""
    place = torch.device(device)
    made = models.mlp([64, 10]).to(place)  # a tanh would saturate and hide the overflow
    tx = ps.optim.adamw(1e-3)
    objective = ps.supervised(works.loss)
    program = ps.program(made, objective, tx, precision="16-mixed", nonfinite="skip", ema=0.999)
    assert program.init is not None
    step = ps.compile_step(program.train_step, donate=True, cuda_graph=True)
    inputs, classes = works.vectors(64, 64, 10)(torch.Generator().manual_seed(0))
    good = inputs.to(place), classes.to(place)
    bad = torch.full_like(good[0], 6e4), good[1]  # finite in float16; its products are not
    state, seen = program.init(seed=0, device=place), []
    weights: list[Tensor] = []
    for batch in (good, good, good, bad, good):  # the first two warm up, the third is recorded
        state, metrics = step(state, batch)
        seen.append((float(metrics["applied"]), float(state.scaler.scale), int(state.updates)))
        weights.append(next(iter(state.params.values())).detach().clone())
    applied, scales, updates = zip(*seen, strict=True)
    checks = [
        ("overflow skips the update", applied == (1.0, 1.0, 1.0, 0.0, 1.0), f"applied {applied}"),
        ("overflow halves the scale", scales[3] == scales[2] / 2, f"scales {scales}"),
        ("a skipped update changes no weight", torch.equal(weights[2], weights[3]), ""),
        ("the next one is applied", updates == (1, 2, 3, 3, 4), f"{updates}"),
        ("and changes weights", not torch.equal(weights[3], weights[4]), ""),
        ("one graph", step.graphs == 1, f"{step.graphs}"),
    ]
    return _result("the loss scale inside the graph", checks)


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
