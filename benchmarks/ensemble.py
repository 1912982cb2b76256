"""Many models in one step, beside a step for each of them in turn.

Every contestant trains the same models on the same batches by the recipe of `works`, so that one number is the time in
which each of the models has taken one step. The losses, weights and averages of all models must agree after the first
steps, as in `steps`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import purestep as ps

from . import contestants, guard, measure, works
from .contestants import Contestant, Entry, Stepping, byhand, jaxes, ours
from .contestants.base import Named, settle
from .works import Batch, Work

ENSEMBLE = "purestep, ensemble, donated"
EAGER_ENSEMBLE = "purestep, ensemble, eager"
IN_TURN = "purestep, donated, in turn"
BY_HAND = "by hand, eager + fused, in turn"
JAX = "JAX, vmap, donated"
ONE = "purestep, donated, one model"
"""A step of a single model, which trains less than the others and is no part of the comparison of results."""


def table(
    work: str = "mlp", members: int = 8, device: str = "cpu", only: list[str] | None = None, seconds: float = 40.0
) -> dict[str, Any]:
    """One table.

    Args:
        work: its name in `works.WORKS`.
        members: the number of models.
        device: "cpu" or "cuda".
        only: names of contestants; None: all. The loop by hand always takes part.
        seconds: to measure for.
    """
    place, chosen = torch.device(device), works.WORKS[work]
    each = models(chosen, members)
    start = _by_member([dict(works.seeded_model(one).named_parameters()) for one in each])
    start = guard.copied(start)
    entered: list[Contestant] = []
    absent: list[dict[str, str]] = []
    reference: guard.Seen | None = None
    for entry in _entries(each):
        if only is not None and entry.name not in (*only, BY_HAND):
            continue
        missing = contestants.lacking(entry)
        if missing:
            absent.append({"name": entry.name, "why": f"not installed: {', '.join(missing)}"})
            continue
        made = entry.make(chosen, place)
        losses = [made.read(loss) for loss in made.turn(guard.STEPS).losses]
        seen = guard.Seen(losses, guard.copied(made.weights()), guard.copied(made.shadow()))
        reference = reference or seen
        bounds = {"tolerance": chosen.tolerance, "drift": chosen.drift}
        trouble = entry.name != ONE and guard.disagreement(seen, reference, start, **bounds)
        if trouble:
            absent.append({"name": entry.name, "why": f"error: does other work: {trouble}"})
        else:
            entered.append(made)
    pause = measure.PAUSE if place.type == "cpu" and torch.get_num_threads() > 1 else 0.0
    spent = measure.interleave(entered, measure.Plan(seconds=seconds, pause=pause))
    return {
        "title": f"{members} models of {chosen.about}, a step of each",
        "threads": torch.get_num_threads() if place.type == "cpu" else None,
        "tokens": 0,
        "rows": [{"name": name, "unit": "s", "values": values} for name, values in spent.items()],
        "absent": absent,
    }


def models(work: Work, members: int) -> list[Work]:
    """The work for each of several models, which differ in their first weights."""
    return [work._replace(model=functools.partial(_seeded, work.model, index)) for index in range(members)]


def _seeded(model: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)  # `works.seeded_model` restores the generator
    return model()


def _by_member(parts: list[Named]) -> dict[str, Tensor]:
    return {f"{index}.{name}": value for index, part in enumerate(parts) for name, value in part.items()}


def _entries(each: list[Work]) -> list[Entry]:
    def entry(name: str, make: Callable[..., Contestant], *needs: str) -> Entry:
        return Entry(name, needs, lambda _, device: make(name, each, device))

    return [
        entry(BY_HAND, _by_hand),
        entry(ENSEMBLE, _ensemble),
        entry(EAGER_ENSEMBLE, _ensemble),
        entry(IN_TURN, _in_turn),
        entry(JAX, _jax, "jax", "flax", "optax"),
        entry(ONE, _in_turn),
    ]


def _by_hand(name: str, each: list[Work], device: torch.device) -> Contestant:
    loops = [byhand.loop(work, device) for work in each]
    steps = [byhand.stepping(name, work, device, loop) for work, loop in zip(each, loops, strict=True)]

    def step(batch: Batch) -> Tensor:
        return torch.stack([one.step(batch) for one in steps])

    return Stepping(
        name,
        step,
        works.batches(each[0], device),
        weights=lambda: _by_member([byhand.weights(loop.model) for loop in loops]),
        shadow=lambda: _by_member([loop.shadow.named() for loop in loops]),
        wait=lambda: settle(device),
        read=lambda losses: float(losses.mean()),
    )


def _started(each: list[Work], device: torch.device) -> tuple[ps.Program, ps.Program, ps.TrainState]:
    program = ours.program(each[0])
    several = ps.ensemble(program, len(each))
    assert several.init is not None
    return program, several, several.init(device=device, models=[works.seeded_model(work) for work in each])


def _ensemble(name: str, each: list[Work], device: torch.device) -> Contestant:
    _, several, state = _started(each, device)
    step = several.train_step if name == EAGER_ENSEMBLE else ps.compile_step(several.train_step, donate=True)

    def one(batch: Batch) -> ps.Metrics:
        nonlocal state
        state, metrics = step(state, batch)
        return metrics

    def parts(named: Named) -> Named:
        return _by_member([{key: value[index] for key, value in named.items()} for index in range(len(each))])

    return Stepping(
        name,
        one,
        works.batches(each[0], device),
        weights=lambda: parts(state.params),
        shadow=lambda: parts(state.ema.params),
        wait=lambda: settle(device),
        read=lambda metrics: float(metrics["loss"]),
    )


def _in_turn(name: str, each: list[Work], device: torch.device) -> Contestant:
    program, _, state = _started(each, device)
    step = ps.compile_step(program.train_step, donate=True)
    count = 1 if name == ONE else len(each)
    states: list[Any] = [ps.member(state, index) for index in range(count)]

    def one(batch: Batch) -> list[ps.Metrics]:
        found: list[ps.Metrics] = []
        for index in range(count):
            states[index], metrics = step(states[index], batch)
            found.append(metrics)
        return found

    return Stepping(
        name,
        one,
        works.batches(each[0], device),
        weights=lambda: _by_member([dict(state.params) for state in states]),
        shadow=lambda: _by_member([dict(state.ema.params) for state in states]),
        wait=lambda: settle(device),
        read=lambda found: sum(float(metrics["loss"]) for metrics in found) / count,
    )


def _jax(name: str, each: list[Work], device: torch.device) -> Contestant:
    jax, jnp = (importlib.import_module(module) for module in ("jax", "jax.numpy"))
    parts = [jaxes.prepared(work, device) for work in each]
    step = jax.jit(jax.vmap(parts[0].step, in_axes=(0, None, None)), donate_argnums=0)
    state = jax.tree.map(lambda *leaves: jnp.stack(leaves), *(part.state for part in parts))

    def one(batch: Any) -> Any:
        nonlocal state
        state, losses = step(state, *batch)
        return losses

    def named(at: int) -> Named:
        members = [jax.tree.map(lambda leaf, i=index: leaf[i], state[at]) for index in range(len(each))]
        return _by_member([part.to_torch(member) for part, member in zip(parts, members, strict=True)])

    return Stepping(
        name,
        one,
        parts[0].batches,
        weights=lambda: named(0),
        shadow=lambda: named(3),
        wait=lambda: jax.block_until_ready(state),
        read=lambda losses: float(losses.mean()),
    )
