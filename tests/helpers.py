"""What several tests share: comparing trees, counting graphs, and small problems with known answers."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import dataloader

from purestep import optim, tree


def assert_trees_close(
    actual: Any, expected: Any, *, rtol: float | None = None, atol: float | None = None, exact: bool = False
) -> None:
    """Structure first, then dtype, shape and device of every leaf, then the values.

    Args:
        actual: what the code made.
        expected: what it should be.
        rtol: relative tolerance; with ``atol`` None, that of `torch.testing.assert_close` for the dtype.
        atol: absolute tolerance; given with ``rtol`` or not at all.
        exact: every number equal; nan equals nan.
    """
    if exact:
        rtol = atol = 0.0
    found, wanted = tree.with_paths(actual), tree.with_paths(expected)
    extra, missing = _only_in(found, wanted), _only_in(wanted, found)
    assert not extra, f"leaves that should not be there: {extra}"
    assert not missing, f"leaves that are missing: {missing}"
    assert tree.flatten(actual)[1] == tree.flatten(expected)[1], "the same leaves in containers of other types"
    for (path, a), (_, e) in zip(found, wanted, strict=True):
        assert type(a) is type(e), f"{path}: {type(a).__name__}, expected {type(e).__name__}"
        if not isinstance(a, Tensor):
            assert a == e, f"{path}: {a!r}, expected {e!r}"
            continue
        for what in ("dtype", "shape", "device"):
            assert getattr(a, what) == getattr(e, what), f"{path}: {what} {getattr(a, what)}, not {getattr(e, what)}"
        torch.testing.assert_close(a, e, rtol=rtol, atol=atol, equal_nan=True, msg=lambda text, p=path: f"{p}: {text}")


def _only_in(these: list[tuple[str, Any]], those: list[tuple[str, Any]]) -> list[str]:
    return sorted({path for path, _ in these} - {path for path, _ in those})


@contextmanager
def count_graphs() -> Iterator[Callable[[], int]]:
    """A function that tells how many graphs Dynamo has captured since: ``assert graphs() == 1``."""
    from torch._dynamo.utils import counters

    before = counters["stats"]["unique_graphs"]
    yield lambda: counters["stats"]["unique_graphs"] - before


def optimizers_left_out(rows: Iterable[Callable[[], Any]]) -> list[str]:
    """Functions of `optim` that make a transform, and that no row of a table calls, itself or by a function in the row.

    Each table of laws and of numbers of all optimizers has a test that finds none.
    """
    makers = {name: make for name, make in vars(optim).items() if inspect.isfunction(make)}
    called: set[str] = set()
    left: list[Callable[..., Any]] = list(rows)
    while left:
        make = inspect.unwrap(left.pop())
        found = set(make.__code__.co_names) - called
        called |= found
        known = {**vars(inspect.getmodule(make)), **makers}
        left += [known[name] for name in found if inspect.isfunction(known.get(name))]
    return sorted(
        name
        for name, make in makers.items()
        if name not in called and inspect.signature(make).return_annotation in ("Transform", optim.Transform)
    )


class Problem(NamedTuple):
    """Something to minimize, and where its minimum is."""

    params: dict[str, Tensor]
    loss: Callable[[dict[str, Tensor]], Tensor]
    minimum: dict[str, Tensor]

    def gradient(self, params: dict[str, Tensor]) -> dict[str, Tensor]:
        return torch.func.grad(self.loss)(params)


def quadratic(dtype: torch.dtype = torch.float64) -> Problem:
    """``sum(curvature * (w - target)^2) / 2``: two tensors, condition number 10."""
    target = {
        "bias": torch.tensor([0.5, -1.0], dtype=dtype),
        "weight": torch.linspace(-1, 1, 6, dtype=dtype).view(2, 3),
    }
    curvature = torch.linspace(1, 10, 3, dtype=dtype)

    def loss(params: dict[str, Tensor]) -> Tensor:
        weight = (curvature * (params["weight"] - target["weight"]).square()).sum()
        return (weight + (params["bias"] - target["bias"]).square().sum()) / 2

    return Problem({name: torch.zeros_like(t) for name, t in target.items()}, loss, target)


def rosenbrock(dtype: torch.dtype = torch.float64) -> Problem:
    """``(1 - x)^2 + 100 (y - x^2)^2`` from (-1.2, 1): a narrow curved valley that ends at (1, 1)."""

    def loss(params: dict[str, Tensor]) -> Tensor:
        x, y = params["w"]
        return (1 - x).square() + 100 * (y - x.square()).square()

    return Problem({"w": torch.tensor([-1.2, 1.0], dtype=dtype)}, loss, {"w": torch.ones(2, dtype=dtype)})


class LeastSquares(NamedTuple):
    """A linear model, its data, and the exact solution of the normal equations."""

    module: nn.Linear
    batch: tuple[Tensor, Tensor]  # inputs [rows, features], targets [rows, 1]
    solution: dict[str, Tensor]  # "weight" [1, features], "bias" [1]


def least_squares(rows: int = 32, features: int = 3, dtype: torch.dtype = torch.float64) -> LeastSquares:
    """Noisy linear data with a closed form."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, features, generator=generator, dtype=dtype)
    noise = torch.randn(rows, 1, generator=generator, dtype=dtype)
    y = x.sum(dim=1, keepdim=True) - 2 + 0.1 * noise
    exact = torch.linalg.lstsq(torch.cat([x, torch.ones_like(y)], dim=1), y).solution
    solution = {"weight": exact[:-1].T.contiguous(), "bias": exact[-1]}
    return LeastSquares(nn.Linear(features, 1, dtype=dtype), (x, y), solution)


class Recurrent(nn.Module):
    """A recurrent layer with 8 outputs over [B, T, 4], and a head on their mean: [B, 3]."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x)[0].mean(1))


def tiny_mlp(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    """4 -> 8 -> 3 with a tanh between: 67 numbers in four tensors."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def tiny_convnet(seed: int = 0, dropout: float = 0.5) -> nn.Sequential:
    """8x8 grey images -> 3 classes, with BatchNorm's buffers and dropout's random numbers to keep pure."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(16, 3),
        )


def vector_batch(rows: int = 16, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Inputs [rows, 4] and classes [rows] for `tiny_mlp`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 4, generator=generator, dtype=dtype)
    return x, x[:, :3].argmax(dim=1)


def image_batch(rows: int = 16, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Inputs [rows, 1, 8, 8] and classes [rows] for `tiny_convnet`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 1, 8, 8, generator=generator)
    return x, x.mean(dim=(1, 2, 3)).mul(20).round().long() % 3


class Placed:
    """A loader with a state, the number of batches so far; ``make(number)`` returns a batch."""

    def __init__(self, make: Callable[[int], Any], length: int) -> None:
        self.make, self.length, self.at = make, length, 0

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.length):
            self.at += 1
            yield self.make(self.at)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Inside, what waits for the CUDA device raises a RuntimeError."""
    with warnings.catch_warnings(action="ignore"):  # torch says that it does not see every kind
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


worker_dies = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
"""torch looks for the limit of descriptors then, with files that its own SIGCHLD handler may keep it from closing."""


@contextmanager
def timed_out_after(hangs: Path) -> Iterator[None]:
    """The time-out of a DataLoader counts from this file on, made by a worker that hangs: it may be slow to start."""
    get = dataloader._MultiProcessingDataLoaderIter._try_get_data

    def patient(self: Any, timeout: float = 5.0) -> tuple[bool, Any]:
        while not hangs.exists():
            found = get(self, 0.02)
            if found[0]:
                return found
        return get(self, timeout)

    dataloader._MultiProcessingDataLoaderIter._try_get_data = patient  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        dataloader._MultiProcessingDataLoaderIter._try_get_data = get
