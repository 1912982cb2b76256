"""Values that nobody should hand to a training library, each made anew."""

from __future__ import annotations

import datetime
import decimal
import fractions
import math
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn


class Tagged(torch.Tensor):
    """A subclass."""


class Rude:
    """Raises whatever one asks it."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"no {name} here")

    def __len__(self) -> int:
        raise TypeError("no length here")


def _cycle(kind: type) -> Any:
    node: Any = kind()
    node.update(again=node) if kind is dict else node.append(node)
    return node


def _quietly(make: Callable[[], Any]) -> Any:
    with warnings.catch_warnings(action="ignore"):  # torch's, about kinds that it still works on
        return make()


VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "0": lambda: 0,
    "-1": lambda: -1,
    "2**70": lambda: 2**70,
    "-0.5": lambda: -0.5,
    "1.5": lambda: 1.5,
    "nan": lambda: math.nan,
    "inf": lambda: math.inf,
    "complex": lambda: 1j,
    "decimal": lambda: decimal.Decimal("0.1"),
    "fraction": lambda: fractions.Fraction(1, 3),
    "empty text": lambda: "",
    "text": lambda: "words",
    "a path up": lambda: "../../x",
    "nul": lambda: "a\0b",
    "long text": lambda: "x" * 300,
    "bytes": lambda: b"bytes",
    "object": object,
    "rude": Rude,
    "function": lambda: lambda *args: None,
    "class": lambda: int,
    "module": lambda: nn.Linear(2, 2),
    "set": lambda: {1, 2},
    "generator": lambda: (i for i in range(2)),
    "empty list": list,
    "empty tuple": tuple,
    "empty dict": dict,
    "list of text": lambda: ["a", "b"],
    "dict in itself": lambda: _cycle(dict),
    "list in itself": lambda: _cycle(list),
    "nan as a key": lambda: {math.nan: torch.ones(1)},
    "keys of two kinds": lambda: {1: torch.ones(1), "a": torch.ones(1)},
    "array": lambda: np.ones(3),
    "array of objects": lambda: np.array([object()]),
    "number of numpy's": lambda: np.float32(0.5),
    "path": lambda: pathlib.PurePath("x"),
    "date": lambda: datetime.date(2020, 1, 1),
    "error": lambda: ValueError("an error as a value"),
    "dtype": lambda: torch.float32,
    "random generator": torch.Generator,
    "tensor of nan": lambda: torch.full((3,), torch.nan),
    "0-d tensor": lambda: torch.tensor(1.5),
    "0-d nan": lambda: torch.tensor(torch.nan),
    "no elements": lambda: torch.ones(0),
    "five dimensions": lambda: torch.ones(1, 1, 1, 1, 2),
    "int64 tensor": lambda: torch.arange(3),
    "bool tensor": lambda: torch.tensor([True, False]),
    "complex tensor": lambda: torch.ones(2, dtype=torch.complex64),
    "float64 tensor": lambda: torch.ones(2, dtype=torch.float64),
    "fp8 tensor": lambda: torch.ones(2).to(torch.float8_e4m3fn),
    "meta tensor": lambda: torch.ones(2, device="meta"),
    "sparse tensor": lambda: torch.eye(2).to_sparse(),
    "expanded tensor": lambda: torch.ones(1).expand(8),
    "quantized tensor": lambda: _quietly(lambda: torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)),
    "nested tensor": lambda: _quietly(lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
    "subclass": lambda: torch.ones(2).as_subclass(Tagged),
    "tensor with a graph": lambda: torch.ones(2, requires_grad=True) * 2,
}
