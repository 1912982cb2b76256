"""Programs and runs of `test_situations`: what people do with several processes, against one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import purestep as ps
from purestep import optim, schedules

from . import cases, fitting
from .processes import DEVICE

IGNORED = -100


# --- programs of `cases.steps` ----------------------------------------------------------------------------------------


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids)).transpose(1, 2)  # (rows, classes, tokens)


def words(tx: str = "plain", **options: Any) -> ps.Program:
    """Token means; with "weighted" those of class weights."""
    torch.manual_seed(0)
    weight = torch.linspace(0.5, 2.0, 11, dtype=torch.float64, device=DEVICE) if tx == "weighted" else None
    criterion = nn.CrossEntropyLoss(weight, ignore_index=IGNORED)
    rule = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2))
    return ps.program(Words().double().to(DEVICE), ps.supervised(criterion), rule, precision="64-true", **options)


def texts() -> list[Any]:
    """Rows with different numbers of tokens; the second batch has none in its last rows, the third has none at all."""
    random = torch.Generator().manual_seed(5)
    found: list[Any] = []
    for number in range(5):
        ids, labels = (torch.randint(0, 11, (6, 5), generator=random) for _ in range(2))
        for row in range(6):
            labels[row, 5 - row % 4 :] = IGNORED
        labels[3 if number == 1 else 0 if number == 2 else 6 :] = IGNORED
        found.append([ids, labels])
    return cases.placed(found)


class Routed(nn.Module):
    """Each row goes to one of two experts; one that gets no row does not run."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.shift = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = ((x[:, 0, 0] > 0).long() == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]))
        return out + self.shift


def routed(tx: str = "adamw", **options: Any) -> ps.Program:
    del tx
    torch.manual_seed(0)
    rule = optim.chain(optim.clip_by_global_norm(0.2), optim.adamw(1e-2))
    return ps.program(Routed().double().to(DEVICE), ps.supervised(nn.MSELoss()), rule, precision="64-true", **options)


def sorted_vectors() -> list[Any]:
    """`cases.vectors`, of which the first rows go to one expert and the last to the other."""
    found = cases.vectors()
    for x, _ in found:
        x[:3, 0, 0], x[3:, 0, 0] = x[:3, 0, 0].abs() + 1, -x[3:, 0, 0].abs()
    return found


RULES: dict[str, Callable[[], optim.Transform]] = {
    "clipped by value": lambda: optim.chain(optim.clip_by_value(1e-3), optim.sgd(0.1, momentum=0.9)),
    "clipped by unit": lambda: optim.chain(optim.adaptive_grad_clip(0.01), optim.sgd(0.1)),
    "scheduled": lambda: optim.adamw(schedules.warmup_cosine(1e-2, 2, total=8), mask=optim.decay_mask(cases.net(2))),
    "torch": lambda: optim.from_torch(torch.optim.NAdam, lr=1e-2),
    "adafactor": lambda: optim.adafactor(1e-2),
}


def ruled(tx: str, **options: Any) -> ps.Program:
    objective = ps.supervised(nn.CrossEntropyLoss())
    return ps.program(cases.net(2), objective, RULES[tx](), precision="64-true", ema=0.9, **options)


def penalized(tx: str = "adam", **options: Any) -> ps.Program:
    """A critic whose gradient at its inputs is part of its loss."""
    del tx
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 1)).double().to(DEVICE)

    def objective(model: Any, batch: Any) -> ps.Loss:
        x = batch[0].mean(1).detach().requires_grad_()
        found = model(x)
        (slope,) = torch.autograd.grad(found.sum(), x, create_graph=True)
        mean = found.mean() - model(batch[1].mean(1)).mean() + (slope.norm(dim=1) - 1).square().mean()
        return ps.Loss(mean, len(x), {})

    return ps.program(net, objective, optim.adam(1e-2), precision="64-true", **options)


# --- runs of `fit` ----------------------------------------------------------------------------------------------------


def runs() -> dict[str, list[float]]:
    """(difference of the states, difference of epochs) of runs of these processes and of one."""
    x, y = fitting.dataset().tensors

    def few() -> Any:
        return DataLoader(TensorDataset(x[:9], y[:9]), 4)  # the last batch has one row

    def both() -> dict[str, Any]:
        return {"train": fitting.loader(), "val": DataLoader(fitting.dataset(5), 4)}

    how: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
        "a batch with fewer rows than processes": (few, {}),
        "the last batch is dropped": (lambda: fitting.loader(drop_last=True), {}),
        "a sampler with replacement": (
            lambda: fitting.loader(shuffle=False, sampler=torch.utils.data.RandomSampler(x, replacement=True)),
            {},
        ),
        "early stopping": (both, {"epochs": 30, "monitor": "val_loss", "early_stopping": 1}),
        "a limit of updates": (both, {"epochs": None, "steps": 7}),
    }
    found: dict[str, list[float]] = {}
    with ps.parallel.start(timeout=60, shard=2) as mesh:
        program = ps.distribute(fitting.program(), mesh, params="shard")
        for name, (data, options) in how.items():
            result = fitting.fit(program, data(), **options)
            found[name] = [ps.full(result.state), result.epochs]
    with fitting.alone():
        for name, (data, options) in how.items():
            wanted = fitting.fit(fitting.program(), data(), **options)
            state, epochs = found[name]
            found[name] = [fitting.distance(wanted.state, state), float(abs(wanted.epochs - epochs))]
    return found
