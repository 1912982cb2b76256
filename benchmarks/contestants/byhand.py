"""What a user writes by hand today: a module, AdamW, clipping and an average, compiled as far as one likes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import works
from ..works import Batch, Recipe, Work
from .base import Contestant, Entry, Named, Stepping, settle

EAGER = "by hand, eager + fused"
COMPILED = "by hand, compiled + fused"
ALL_COMPILED = "by hand, compiled, optimizer too"
REDUCED = "by hand, reduce-overhead + fused"


class Shadow:
    """An average by hand: the first update copies, every other one is a foreach lerp."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._names = [name for name, _ in model.named_parameters()]
        self._source = [p.detach() for p in model.parameters()]
        self._tensors = [p.clone() for p in self._source]
        self._weight = 1 - decay
        self._begun = False

    def update(self) -> None:
        if self._begun:
            torch._foreach_lerp_(self._tensors, self._source, self._weight)
        else:
            torch._foreach_copy_(self._tensors, self._source)
            self._begun = True

    def named(self) -> Named:
        return dict(zip(self._names, self._tensors, strict=True))


def groups(model: nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    """Parameters that decay and those that do not."""
    parameters = list(model.parameters())
    return [
        {"params": [p for p in parameters if works.decays(p)], "weight_decay": recipe.weight_decay},
        {"params": [p for p in parameters if not works.decays(p)], "weight_decay": 0.0},
    ]


def adamw(model: nn.Module, recipe: Recipe, **options: Any) -> torch.optim.AdamW:
    betas = (recipe.b1, recipe.b2)
    return torch.optim.AdamW(groups(model, recipe), lr=recipe.learning_rate, betas=betas, eps=recipe.eps, **options)


def weights(model: nn.Module) -> Named:
    return {name: p.detach() for name, p in model.named_parameters()}


class Loop(NamedTuple):
    """The pieces of a loop by hand."""

    model: nn.Module
    loss: Callable[[Tensor, Tensor], Tensor]  # of the model, (inputs, classes) -> shape=(); both compiled or not
    optimizer: torch.optim.Optimizer
    shadow: Shadow
    update: Callable[[], None]  # clip, step, average


def loop(work: Work, device: torch.device, **compiling: Any) -> Loop:
    """Eager, or with the model and its loss in one ``torch.compile(loss, **compiling)``; the optimizer is fused."""
    model = works.seeded_model(work, device).train()
    optimizer = adamw(model, work.recipe, fused=True)
    shadow = Shadow(model, work.recipe.ema)
    parameters = list(model.parameters())

    def update() -> None:
        nn.utils.clip_grad_norm_(parameters, work.recipe.clip)
        optimizer.step()
        shadow.update()

    def loss(inputs: Tensor, classes: Tensor) -> Tensor:
        return works.loss(model(inputs), classes)

    return Loop(model, torch.compile(loss, **compiling) if compiling else loss, optimizer, shadow, update)


def stepping(name: str, work: Work, device: torch.device, made: Loop) -> Stepping:
    """The usual five lines round those pieces."""
    model, of_batch, optimizer, shadow, update = made

    def step(batch: Batch) -> Tensor:
        inputs, classes = batch
        with torch.autocast(device.type, torch.bfloat16, enabled=work.bf16):
            loss = of_batch(inputs, classes)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        update()
        return loss.detach().clone()  # a CUDA graph of `reduce-overhead` writes the next loss there

    return Stepping(
        name,
        step,
        works.batches(work, device),
        weights=lambda: weights(model),
        shadow=shadow.named,
        wait=lambda: settle(device),
    )


def _eager(work: Work, device: torch.device) -> Contestant:
    return stepping(EAGER, work, device, loop(work, device))


def _compiled(work: Work, device: torch.device) -> Contestant:
    return stepping(COMPILED, work, device, loop(work, device, dynamic=False))


def _reduced(work: Work, device: torch.device) -> Contestant:
    return stepping(REDUCED, work, device, loop(work, device, mode="reduce-overhead"))


def _all_compiled(work: Work, device: torch.device) -> Contestant:
    made = loop(work, device, dynamic=False)
    # Under the compiler the plain formulas are fused anyway; a fused kernel would be a stone in its way.
    optimizer = adamw(made.model, work.recipe, foreach=True, capturable=device.type == "cuda")
    parameters, shadow = list(made.model.parameters()), made.shadow

    @torch.compile(dynamic=False)
    def update() -> None:
        nn.utils.clip_grad_norm_(parameters, work.recipe.clip, foreach=True)
        optimizer.step()
        shadow.update()

    return stepping(ALL_COMPILED, work, device, made._replace(optimizer=optimizer, update=update))


ENTRIES = (
    Entry(EAGER, (), _eager),
    Entry(COMPILED, (), _compiled),
    Entry(ALL_COMPILED, (), _all_compiled),
    Entry(REDUCED, (), _reduced, lambda work, device: device.type == "cuda"),
)
