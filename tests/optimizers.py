"""The optimizers of `purestep.optim`, for all tests of optimizers: a new one is a row of `ROWS`, and of `TWINS` or
`OPTAX` if torch or optax has it. `optim/test_optim.py` fails until it is there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from purestep import optim
from purestep.optim import Transform

T = torch.optim
Make = Callable[[], Transform]


def of_matrices(params: dict[str, Tensor]) -> dict[str, str]:
    return {name: "muon" if param.ndim == 2 else "adamw" for name, param in params.items()}


ROWS: dict[str, Make] = {  # for parameters of any names; golden/optimizers.json has their first steps
    "sgd": lambda: optim.sgd(0.1),
    "adam": lambda: optim.adam(0.1),
    "adamw": lambda: optim.adamw(0.1),
    "nadam": lambda: optim.nadam(0.1),
    "radam": lambda: optim.radam(0.1),
    "adamax": lambda: optim.adamax(0.1),
    "rmsprop": lambda: optim.rmsprop(0.1),
    "adagrad": lambda: optim.adagrad(0.1),
    "adadelta": lambda: optim.adadelta(1.0),
    "adafactor": lambda: optim.adafactor(0.1),
    "lion": lambda: optim.lion(0.1),
    "lamb": lambda: optim.lamb(0.1),
    "muon": lambda: optim.partition({"muon": optim.muon(0.1), "adamw": optim.adamw(0.1)}, of_matrices),
    "ademamix": lambda: optim.ademamix(0.1, weight_decay=0.01),
    "schedule_free_adamw": lambda: optim.schedule_free_adamw(0.1, weight_decay=0.01),
    "schedule_free_sgd": lambda: optim.schedule_free_sgd(0.1),
    "lookahead": lambda: optim.lookahead(optim.adamw(0.1), sync_period=2),
    "prodigy": lambda: optim.prodigy(estim_lr0=0.1),
    # Of the other side some eigenvalues are zero: their eigenvectors depend on the processor.
    "soap": lambda: optim.soap(0.1, precondition_frequency=1, max_precond_dim=2),
}


def factories() -> dict[str, Callable[..., Transform]]:
    """The functions of `optim` with a learning rate and weight decay."""
    made = {name: value for name, value in vars(optim).items() if inspect.isfunction(value)}
    needed = {"learning_rate", "weight_decay"}
    return {name: make for name, make in made.items() if needed <= {*inspect.signature(make).parameters}}


SHAPES: dict[str, tuple[int, ...]] = {"matrix": (4, 3), "vector": (5,), "scalar": ()}


class Twin(NamedTuple):
    """An optimizer of torch with the numbers of ours."""

    optimizer: type[T.Optimizer]
    grid: dict[str, tuple[Any, ...]]  # every combination of these is compared
    names: Mapping[str, str] = MappingProxyType({})  # our argument -> torch's, where they differ
    shapes: dict[str, tuple[int, ...]] = SHAPES
    # Powers of two, so that torch's 1 - lr * weight_decay is exact: rounded to float32 it is up to 3e-8 off at every
    # step, 1.5e-6 after 50. Ours adds the decay to the direction and does not round it.
    rate: float = 2**-7


DECAY = (0.0, 0.125)
TWINS: dict[str, Twin] = {
    "sgd": Twin(
        T.SGD, {"momentum": (0.0, 0.9), "dampening": (0.0, 0.3), "nesterov": (False, True), "weight_decay": DECAY}
    ),
    "adam": Twin(T.Adam, {"b1": (0.0, 0.9), "b2": (0.999, 0.9), "weight_decay": DECAY, "amsgrad": (False, True)}),
    "adamw": Twin(T.AdamW, {"b1": (0.9, 0.5), "eps": (1e-8, 1e-3), "weight_decay": DECAY, "amsgrad": (False, True)}),
    "nadam": Twin(
        T.NAdam, {"momentum_decay": (4e-3, 0.1), "weight_decay": DECAY, "decoupled_weight_decay": (False, True)}
    ),
    "radam": Twin(T.RAdam, {"b2": (0.999, 0.9, 0.99), "weight_decay": DECAY, "decoupled_weight_decay": (False, True)}),
    "adamax": Twin(T.Adamax, {"b1": (0.9, 0.5), "b2": (0.999, 0.9), "eps": (1e-8, 0.1), "weight_decay": DECAY}),
    "rmsprop": Twin(
        T.RMSprop,
        {"decay": (0.99, 0.5), "momentum": (0.0, 0.9), "centered": (False, True), "weight_decay": DECAY},
        {"decay": "alpha"},
    ),
    "adagrad": Twin(
        T.Adagrad, {"lr_decay": (0.0, 0.1), "initial_accumulator_value": (0.0, 0.5), "weight_decay": DECAY}
    ),
    "adadelta": Twin(T.Adadelta, {"rho": (0.9, 0.5), "eps": (1e-6, 0.1), "weight_decay": DECAY}, rate=1.0),
    "adafactor": Twin(
        T.Adafactor,
        {
            "decay_rate": (0.8, 0.5),
            "eps": ((None, 1e-3), (1e-2, 0.5)),
            "clipping_threshold": (1.0, 1.2),
            "weight_decay": DECAY,
        },
        {"decay_rate": "beta2_decay", "clipping_threshold": "d"},
        {**SHAPES, "kernel": (2, 3, 4, 2)},
        2**-3,
    ),
    "muon": Twin(
        T.Muon,
        {"nesterov": (True, False), "weight_decay": (0.125,), "adjust": ("original", "match_rms_adamw")},
        {"adjust": "adjust_lr_fn"},
        {"tall": (6, 3), "wide": (3, 5)},
        2**-6,
    ),
}
OPTAX: dict[str, list[dict[str, float]]] = {  # options of an optimizer of the same name; weight decay is added
    "lion": [{}, {"b1": 0.5, "b2": 0.9}],
    "lamb": [{}, {"b1": 0.5, "b2": 0.9, "eps": 1e-3}],
}
