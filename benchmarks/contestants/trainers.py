"""Trainers that others wrote, and torchopt's functional loop; each with its fast settings and nothing but training."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .. import works
from ..works import Batch, Work
from . import byhand
from .base import Contestant, Entry, Gate, Gated, Stepping, settle

LIGHTNING = "Lightning, fit"
ACCELERATE = "Accelerate"
HF = "HF Trainer"
TORCHOPT = "torchopt"


# --- Lightning --------------------------------------------------------------------------------------------------------


def _lightning(work: Work, device: torch.device) -> Contestant:
    from lightning import pytorch as pl

    model = works.seeded_model(work, device)
    shadow = byhand.Shadow(model, work.recipe.ema)
    gate = Gate(works.batches(work, device), device)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Batch, index: int) -> Tensor:
            del index  # batches come in order
            return works.loss(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return byhand.adamw(model, work.recipe, fused=True)

    class Turns(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, index: int) -> None:
            shadow.update()
            gate.passed(outputs["loss"])

    def fit(gate: Gate) -> None:
        trainer = pl.Trainer(
            accelerator="gpu" if device.type == "cuda" else "cpu",
            devices=1,
            precision="bf16-mixed" if work.bf16 else "32-true",
            gradient_clip_val=work.recipe.clip,
            max_epochs=1,
            callbacks=[Turns()],
            barebones=True,  # no logger, progress bar or checkpoints
        )
        trainer.fit(Module(), gate)

    return Gated(LIGHTNING, fit, gate, weights=lambda: byhand.weights(model), shadow=shadow.named)


# --- Hugging Face -----------------------------------------------------------------------------------------------------


def _accelerate(work: Work, device: torch.device) -> Contestant:
    from accelerate import Accelerator

    plain = works.seeded_model(work, device).train()
    accelerator: Any = Accelerator(cpu=device.type == "cpu", mixed_precision="bf16" if work.bf16 else "no")
    model, optimizer = accelerator.prepare(plain, byhand.adamw(plain, work.recipe, fused=True))
    shadow = byhand.Shadow(plain, work.recipe.ema)

    def step(batch: Batch) -> Tensor:
        loss = works.loss(model(batch[0]), batch[1])
        optimizer.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), work.recipe.clip)
        optimizer.step()
        shadow.update()
        return loss.detach()

    return Stepping(
        ACCELERATE,
        step,
        works.batches(work, device),
        weights=lambda: byhand.weights(plain),
        shadow=shadow.named,
        wait=lambda: settle(device),
    )


class _Mappings(torch.utils.data.IterableDataset[dict[str, Tensor]]):
    """The gate's batches as the Trainer takes them."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return ({"inputs": inputs, "labels": classes} for inputs, classes in self._gate)


def _hf(work: Work, device: torch.device) -> Contestant:
    import transformers

    model = works.seeded_model(work, device)
    shadow = byhand.Shadow(model, work.recipe.ema)
    gate = Gate(works.batches(work, device), device)
    losses: list[Tensor] = []

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(_Mappings(gate), batch_size=None)

        def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **named: Any) -> Any:
            loss = works.loss(model(inputs["inputs"]), inputs["labels"])
            losses[:] = [loss.detach()]
            return loss

    class Turns(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            shadow.update()
            gate.passed(losses[0])

    def fit(gate: Gate) -> None:
        optimizer = byhand.adamw(model, work.recipe, fused=True)
        constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        with tempfile.TemporaryDirectory() as directory:
            arguments = transformers.TrainingArguments(
                output_dir=directory,
                max_steps=1 << 40,
                max_grad_norm=work.recipe.clip,
                bf16=work.bf16,
                use_cpu=device.type == "cpu",
                logging_strategy="no",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            )
            Trainer(model, arguments, optimizers=(optimizer, constant), callbacks=[Turns()]).train()

    return Gated(HF, fit, gate, weights=lambda: byhand.weights(model), shadow=shadow.named)


# --- torchopt ---------------------------------------------------------------------------------------------------------


def _torchopt(work: Work, device: torch.device) -> Contestant:
    import torchopt

    recipe, model = work.recipe, works.seeded_model(work, device).train()
    params = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    optimizer = torchopt.combine.chain(
        torchopt.clip.clip_grad_norm(recipe.clip),
        torchopt.adamw(
            recipe.learning_rate,
            (recipe.b1, recipe.b2),
            recipe.eps,
            recipe.weight_decay,
            mask={name: works.decays(p) for name, p in params.items()},
        ),
    )
    state = optimizer.init(params)
    shadow, counter = [p.detach().clone() for p in params.values()], itertools.count()

    def step(batch: Batch) -> Tensor:
        nonlocal params, state
        with torch.autocast(device.type, torch.bfloat16, enabled=work.bf16):
            loss = works.loss(torch.func.functional_call(model, params, (batch[0],)), batch[1])
        gradients = dict(zip(params, torch.autograd.grad(loss, list(params.values())), strict=True))
        updates, state = optimizer.update(gradients, state, params=params, inplace=True)
        params = torchopt.apply_updates(params, updates, inplace=True)
        source = [p.detach() for p in params.values()]
        if next(counter):
            torch._foreach_lerp_(shadow, source, 1 - recipe.ema)
        else:
            torch._foreach_copy_(shadow, source)
        return loss.detach()

    return Stepping(
        TORCHOPT,
        step,
        works.batches(work, device),
        weights=lambda: params,
        shadow=lambda: dict(zip(params, shadow, strict=True)),
        wait=lambda: settle(device),
    )


ENTRIES = (
    Entry(LIGHTNING, ("lightning",), _lightning),
    Entry(ACCELERATE, ("accelerate",), _accelerate),
    Entry(HF, ("transformers", "accelerate"), _hf),
    Entry(TORCHOPT, ("torchopt",), _torchopt),
)
