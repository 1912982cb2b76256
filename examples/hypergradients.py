"""Learning rates by gradients: the derivative of the validation loss through k steps tunes the rate of each layer.

    python examples/hypergradients.py                     # half a minute on one CPU core
    python examples/hypergradients.py --no-checkpoint     # the same numbers, the memory of all k steps

The digits of scikit-learn. A train step is a pure function, so k of them are one too, and `torch.autograd` gives the
derivative of the loss of held-out digits by the rates that the k steps used. The outer step is user-defined: its
state has the inner TrainState, the logarithms of the rates and their Adam, and `fit` trains, saves and resumes it like
any other. `torch.utils.checkpoint` keeps one state per inner step instead of its graph. The rates start far too small:
expect about 97 % of the test digits right, and under 80 % with `--no-tune`.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

import purestep as ps
from purestep import metrics, optim

Batch = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Config:
    runs: Path = Path("runs/hypergradients")
    fresh: bool = False
    seed: int = 0
    windows: int = 80
    inner_steps: int = 8
    batch_size: int = 32
    width: int = 64
    learning_rate: float = 1e-3
    meta_learning_rate: float = 0.2
    tune: bool = True
    checkpoint: bool = True


class Outer(NamedTuple):
    inner: ps.TrainState
    log_rates: dict[str, Tensor]  # layer -> shape=()
    meta: Any  # the state of the optimizer of the rates


class Windows:
    """Items of k training batches, x [k, batch, 64] and y [k, batch], and the validation digits, [180, 64], [180]."""

    def __init__(self, config: Config, data: dict[str, tuple[Tensor, Tensor]]) -> None:
        self.config, self.data = config, data

    def __len__(self) -> int:
        return self.config.windows

    def __iter__(self) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(self.config.seed)
        x, y = self.data["train"]
        for _ in range(self.config.windows):
            rows = torch.randint(len(x), (self.config.inner_steps, self.config.batch_size), generator=generator)
            yield x[rows], y[rows], *self.data["val"]


def digits() -> dict[str, tuple[Tensor, Tensor]]:
    """1,257 digits to train on, 180 to tune the rates with, 360 held out."""
    found = load_digits()
    x, y = torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0)).split([1257, 180, 360])
    return {name: (x[rows], y[rows]) for name, rows in zip(("train", "val", "test"), order, strict=True)}


def inner_program(config: Config) -> ps.Program:
    """A perceptron of three layers; the rate of each is a leaf of the state."""
    width = config.width
    net = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10))
    layers = {f"layer{i}": optim.inject(optim.sgd)(learning_rate=config.learning_rate, momentum=0.9) for i in (0, 2, 4)}
    tx = optim.partition(layers, [(rf"^{name[5:]}\.", name) for name in layers])
    return ps.program(net, ps.supervised(nn.CrossEntropyLoss(), metrics={"accuracy": metrics.accuracy}), tx)


def recomputed(step: Any) -> Any:
    """The step without a graph; the backward pass computes it again, one step at a time.

    Not ``use_reentrant=False``: the step differentiates inside, which recomputes, and keeps, what should be freed.
    """

    def call(state: ps.TrainState, rows: Any) -> tuple[ps.TrainState, ps.Metrics]:
        leaves, structure = ps.tree.flatten(state)
        results: list[Any] = []

        def flat(*leaves: Tensor) -> tuple[Tensor, ...]:
            found, treedef = ps.tree.flatten(step(ps.tree.unflatten(structure, leaves), rows))
            results[:] = [treedef]
            return tuple(found)

        found = checkpoint(flat, *leaves, use_reentrant=True)
        return ps.tree.unflatten(results[0], found)

    return call


def through(program: ps.Program, config: Config, state: Outer, log_rates: dict[str, Tensor], batch: Batch) -> Any:
    """The loss of the validation digits after k steps with these rates, as a function of them; the state then."""
    rates = {f"{layer}/learning_rate": rate.exp() for layer, rate in log_rates.items()}
    inner = state.inner._replace(opt_state=optim.set_hyperparams(state.inner.opt_state, **rates))
    total: ps.Metrics = {}
    step = recomputed(program.train_step) if config.checkpoint and config.tune else program.train_step
    for rows in zip(batch[0], batch[1], strict=True):
        inner, found = step(inner, rows)
        total = metrics.merge(total, found)
    return cross_entropy(program.bind(inner, train=True)(batch[2]), batch[3]), inner, total


def outer_program(config: Config) -> ps.Program:
    """A program whose state is `Outer` and whose batch is a window of k batches."""
    torch.manual_seed(config.seed)
    program, adam = inner_program(config), optim.adam(config.meta_learning_rate)

    def train_step(state: Outer, batch: Batch) -> tuple[Outer, ps.Metrics]:
        with torch.enable_grad():
            leaves = {layer: rate.detach().requires_grad_(config.tune) for layer, rate in state.log_rates.items()}
            loss, inner, total = through(program, config, state, leaves, batch)
            inner = ps.tree.detach(inner)
        log_rates, meta = state.log_rates, state.meta
        if config.tune:
            loss.backward()  # the leaves are this call's own; checkpoints do not take torch.autograd.grad
            updates, meta = adam.update({layer: rate.grad for layer, rate in leaves.items()}, meta, log_rates)
            log_rates = optim.apply_updates(log_rates, updates)
        shown = {f"rate_{layer}": metrics.as_mean(rate.exp(), 1) for layer, rate in log_rates.items()}
        own = {"loss": total["loss"], "applied": total["applied"], "after": metrics.as_mean(loss.detach(), 1), **shown}
        return Outer(inner, log_rates, meta), ps.tree.detach(own)

    def eval_step(state: Outer, batch: tuple[Tensor, Tensor], index: int = 0) -> ps.Metrics:
        return program.eval_step(state.inner, batch, index=index)

    def init(seed: int = 0, device: torch.device | str | None = None) -> Outer:
        inner = program.init(seed, device)
        log_rates = {f"layer{i}": torch.full_like(inner.step, 0, dtype=torch.float32) for i in (0, 2, 4)}
        log_rates = {layer: rate + math.log(config.learning_rate) for layer, rate in log_rates.items()}
        return Outer(inner, log_rates, adam.init(log_rates))

    return ps.Program(train_step=train_step, eval_step=eval_step, init=init)


def main(config: Config) -> float:
    """Train with tuned rates, and return the share of test digits that are right, in [0, 1]."""
    if config.fresh:
        shutil.rmtree(config.runs, ignore_errors=True)
    program, data = outer_program(config), digits()
    loaders = {"train": Windows(config, data), "val": [data["val"]]}
    result = ps.fit(program.init(config.seed), loaders, program, epochs=1, device="cpu", snapshots=config.runs)
    rates = ", ".join(f"{layer} {rate.exp():.3g}" for layer, rate in result.state.log_rates.items())
    accuracy = ps.evaluate(result.state, [data["test"]], program.eval_step)["accuracy"]
    print(f"rates: {rates}\ntest accuracy {100 * accuracy:.1f} %")
    return accuracy


if __name__ == "__main__":
    torch.set_num_threads(1)  # kernels this small gain little from a second one, and lose much on a busy machine
    main(ps.config.cli(Config, description=str(__doc__).splitlines()[0]))
