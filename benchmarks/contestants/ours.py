"""purestep: the step in eager, compiled, compiled and donated, and inside `fit`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import purestep as ps
from purestep import optim

from .. import works
from ..works import Work
from .base import Contestant, Entry, Gate, Gated, Stepping, settle

EAGER = "purestep, eager"
COMPILED = "purestep, compiled"
DONATED = "purestep, donated"
UNRECORDED = "purestep, donated, no CUDA graph"
FIT = "purestep, fit"


def program(work: Work, **options: Any) -> ps.Program:
    """The work's recipe as a program."""
    recipe, model = work.recipe, works.seeded_model(work)  # on the CPU: no second copy on the device
    tx = optim.chain(
        optim.clip_by_global_norm(recipe.clip),
        optim.adamw(
            recipe.learning_rate,
            recipe.b1,
            recipe.b2,
            eps=recipe.eps,
            weight_decay=recipe.weight_decay,
            mask=optim.decay_mask(model),
        ),
    )
    precision = "bf16-mixed" if work.bf16 else "32-true"
    return ps.program(model, ps.supervised(works.loss), tx, precision=precision, ema=recipe.ema, **options)


def read(metrics: ps.Metrics) -> float:
    return float(metrics["loss"])


def stepping(name: str, work: Work, device: torch.device, made: ps.Program, step: Callable[..., Any]) -> Contestant:
    assert made.init is not None
    state = made.init(seed=0, device=device)

    def one(batch: works.Batch) -> ps.Metrics:
        nonlocal state
        state, metrics = step(state, batch)
        return metrics

    return Stepping(
        name,
        one,
        works.batches(work, device),
        weights=lambda: dict(state.params),
        shadow=lambda: dict(state.ema.params),
        wait=lambda: settle(device),
        read=read,
    )


def _eager(work: Work, device: torch.device) -> Contestant:
    made = program(work)
    return stepping(EAGER, work, device, made, made.train_step)


def _compiled(work: Work, device: torch.device) -> Contestant:
    made = program(work)
    return stepping(COMPILED, work, device, made, ps.compile_step(made.train_step, donate=False))


def _donated(work: Work, device: torch.device) -> Contestant:
    made = program(work)
    return stepping(DONATED, work, device, made, ps.compile_step(made.train_step, donate=True))


def _unrecorded(work: Work, device: torch.device) -> Contestant:
    made = program(work)
    return stepping(UNRECORDED, work, device, made, ps.compile_step(made.train_step, donate=True, cuda_graph=False))


class _Endless(Sequence[works.Batch]):
    """The batches in turn, again and again: a sequence, for which `fit` seeds no generators, as a loop by hand."""

    def __init__(self, batches: Sequence[works.Batch]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: Any) -> Any:
        return self._batches[index % len(self._batches)]


def _fit(work: Work, device: torch.device) -> Gated:
    """`fit`, held at the end of each step by a callback."""
    made = program(work)
    assert made.init is not None
    state = made.init(seed=0, device=device)
    last: dict[str, ps.TrainState] = {"state": state}
    batches = works.batches(work, device)

    def fit(gate: Gate) -> None:
        def on(event: Any) -> Any:
            if isinstance(event, ps.events.StepEnd):
                last["state"] = event.state
                gate.passed(event.metrics)
            return ps.events.Stop("closed") if gate.closed else None

        ps.fit(
            state, {"train": _Endless(batches)}, made, epochs=1, compile=True, callbacks=[on], sinks=[], progress=False
        )

    return Gated(
        FIT,
        fit,
        Gate(batches, device),
        weights=lambda: dict(last["state"].params),
        shadow=lambda: dict(last["state"].ema.params),
        read=read,
    )


ENTRIES = (
    Entry(EAGER, (), _eager),
    Entry(COMPILED, (), _compiled),
    Entry(DONATED, (), _donated),
    Entry(UNRECORDED, (), _unrecorded, lambda work, device: device.type == "cuda"),
    Entry(FIT, (), _fit),
)
