"""One model trained in four ways, and what differs between them.

The measure is a loop by hand: plain torch in float64, with the same random numbers. Each tensor's difference is divided
by the distance that it moved in training, so that a gradient that is wrong by a thousandth counts as 1e-3 whatever the
size of the weight is.
"""

from __future__ import annotations

import contextlib
import copy
import math
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import purestep as ps
from purestep.compile import capture

SEED = 5
EQUAL = 1e-9
"""A difference that is smaller is that of float64's rounding."""
ROUNDING = 1e-3
"""A larger one is none of rounding: an objective that computes in float32 is off by some 1e-6."""
AMPLIFIED = 0.3
"""Up to here it may be rounding that BatchNorm over few values, in float32, has made larger: torch.compile by hand
tells."""
_STILL = 1e-3
"""A tensor that moves less than this part of what the others move is compared with those: its gradient is noise."""

Loss = Callable[[Any, Any], Tensor]


class Entry(NamedTuple):
    """A model, its batches and its loss.

    ``make`` returns the module. ``batch`` returns a batch of so many rows, with floats in float32. ``loss`` is for the
    loop by hand, ``objective`` for the program.
    """

    name: str
    package: str
    make: Callable[[], nn.Module]
    batch: Callable[[int, torch.Generator], Any]
    loss: Loss
    objective: Any


class Row(NamedTuple):
    """What one line of the table says."""

    name: str
    package: str
    parameters: int
    ways: dict[str, str]
    notes: tuple[str, ...] = ()

    @property
    def wrong(self) -> bool:
        """Whether a way differs silently, or a check beside the numbers failed."""
        return bool(self.notes) or any(told.startswith("DIFFERENT") for told in self.ways.values())


class _Trained(NamedTuple):
    losses: list[float]
    params: dict[str, Tensor]
    buffers: dict[str, Tensor]


WAYS: dict[str, dict[str, Any] | None] = {"eager": None, "compiled": {}, "donated": {"donate": True}}


def compared(entry: Entry, *, backend: str = "inductor", ways: tuple[str, ...] = tuple(WAYS)) -> Row:
    """Train the entry in every way.

    Args:
        entry: from `models`, `families` or `libraries`.
        backend: of `compile_step`.
        ways: of `WAYS`.

    Returns:
        The row. A model that the loop by hand cannot train has a row that says why.
    """
    torch.manual_seed(SEED)
    try:
        model = entry.make().train()
    except Exception as error:
        return Row(entry.name, entry.package, 0, dict.fromkeys(ways, f"not built: {_told(error)}"))
    size = sum(leaf.numel() for leaf in model.parameters())
    given, last, hand, double, error = _batches_that_train(entry, model)
    if hand is None:
        return Row(entry.name, entry.package, size, dict.fromkeys(ways, f"not trained by hand: {_told(error)}"))
    if not all(map(math.isfinite, hand.losses)):
        return Row(entry.name, entry.package, size, dict.fromkeys(ways, f"not finite by hand: losses {hand.losses}"))
    notes, name = list[str](), entry.name if double else f"{entry.name} (float32)"
    if last > 1:
        name += " (last batch of two)"
    kept_batches, kept = copy.deepcopy(given), copy.deepcopy(dict(_state(model)))
    precision = "64-true" if double else "32-true"
    program = ps.program(model, entry.objective, _transform(), precision=precision)
    told, start = dict[str, str](), dict(model.named_parameters())
    for way in ways:
        options = WAYS[way]
        step = program.train_step
        if options is not None:
            step = ps.compile_step(step, backend=backend, **options)
        given_up: list[str] = []
        try:
            with _noticed(given_up):
                found, state = _stepped(program, step, given)
        except ps.errors.PurestepError as error:
            told[way] = f"refused: {_told(error)}"
            continue
        except Exception as error:
            told[way] = f"DIFFERENT: {type(error).__name__}: {_told(error)}"
            continue
        told[way] = _judged(found, hand, start, lambda: _torch_compiled(entry, model, given, double, backend, hand))
        notes += [f"{way}: {note}" for note in [*given_up, *_exported(program, state, model, double)]]
        notes += [] if _same(given, kept_batches) else [f"{way}: the batch has been written to"]
        notes += [] if _same(dict(_state(model)), kept) else [f"{way}: the module has been written to"]
    return Row(name, entry.package, size, told, tuple(notes))


def _batches_that_train(entry: Entry, model: nn.Module) -> tuple[list[Any], int, Any, bool, Any]:
    """The batches, the rows of the last one, the loop by hand's result, whether it computed in float64, and its error.

    The last batch has one row, or two where the model itself cannot train on one.
    """
    failed: Exception | None = None
    for double in (True, False):
        for last in (1, 2):
            generator = torch.Generator().manual_seed(1)
            given = [entry.batch(count, generator) for count in (3, 3, last)]
            try:
                return given, last, by_hand(entry, model, given, double=double), double, None
            except Exception as error:
                failed = failed or error
    return [], 0, None, False, failed


def by_hand(
    entry: Entry, model: nn.Module, given: list[Any], *, double: bool, through: Callable[[Any], Any] | None = None
) -> _Trained:
    """A plain loop over a copy of the module.

    Args:
        entry, model, given: what is trained; none of them is changed.
        double: compute in float64.
        through: applied to the loss function: `torch.compile`.
    """
    net, batches = copy.deepcopy(model), copy.deepcopy(given)
    net = net.double() if double else net
    optimizer = torch.optim.AdamW(net.parameters(), 0.01, eps=1e-2, weight_decay=0.1)
    loss_of = entry.loss if through is None else through(entry.loss)
    losses = list[float]()
    for at, batch in enumerate(batches):
        _seeded(at)
        torch.manual_seed(ps.rng.mix(SEED, at, "step"))
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(net, _cast(batch) if double else batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    params = {name: leaf.detach() for name, leaf in net.named_parameters()}
    return _Trained(losses, params, dict(net.named_buffers()))


def _transform() -> Any:
    return ps.optim.adamw(0.01, eps=1e-2, weight_decay=0.1)


def _seeded(at: int) -> None:
    """What draws from numpy or Python on the host gets the numbers that an eager step gives it."""
    number = ps.rng.mix(SEED, at, "step")
    np.random.seed(number & 0xFFFFFFFF)
    random.seed(number)


@contextlib.contextmanager
def _noticed(found: list[str]) -> Iterator[None]:
    """Note where a step is compiled without native code."""

    def slow(*given: Any) -> None:
        found.append(f"native code given up: {_told(given[-1])}")

    with mock.patch.object(capture, "warn_fallback", slow):
        yield


def _stepped(program: Any, step: Any, given: list[Any]) -> tuple[_Trained, Any]:
    state, losses = program.init(seed=SEED), list[float]()
    for batch in given:
        state, metrics = step(state, batch)
        mean = metrics["loss"]
        losses.append(float(mean.total / mean.weight))
    plain = ps.clone(state)
    return _Trained(losses, {**plain.params, **plain.frozen}, plain.buffers), plain


def _torch_compiled(
    entry: Entry, model: nn.Module, given: list[Any], double: bool, backend: str, hand: _Trained
) -> float:
    """The difference of torch.compile's own step from the loop by hand."""
    try:
        found = by_hand(
            entry,
            model,
            given,
            double=double,
            through=lambda loss: torch.compile(loss, backend=backend),
        )
    except Exception:  # then nothing is known of it, and the difference counts
        return 0.0
    return max((off for _, off in _differences(found, hand, dict(model.named_parameters()))), default=0.0)


def _judged(found: _Trained, hand: _Trained, start: Mapping[str, Tensor], torchs: Callable[[], float]) -> str:
    if missing := found.params.keys() ^ hand.params.keys():
        return f"DIFFERENT: parameters {sorted(missing)[:3]}"
    if missing := hand.buffers.keys() ^ found.buffers.keys():
        return f"DIFFERENT: buffers {sorted(missing)[:3]}"
    worst, off = max(_differences(found, hand, start), key=lambda pair: pair[1], default=("", 0.0))
    if off <= EQUAL:
        return "equal"
    if off <= ROUNDING:
        return f"rounding ({off:.0e})"
    own = torchs() if off <= AMPLIFIED else 0.0
    if off <= 2 * own:
        return f"rounding ({off:.0e}; torch.compile by hand {own:.0e})"
    return f"DIFFERENT: {worst} by {off:.1e}"


def _differences(found: _Trained, hand: _Trained, start: Mapping[str, Tensor]) -> Iterator[tuple[str, float]]:
    """(name, difference as a part of how far the tensor has moved); nan counts as infinite."""
    for at, (a, b) in enumerate(zip(found.losses, hand.losses, strict=True)):
        off = abs(a - b) / max(abs(b), 1e-3)
        yield f"loss {at}", 0.0 if off < 1e-6 else _finite(off)  # a loss is float32 in the metrics
    moved = {name: _largest(leaf.double() - start[name].detach().double()) for name, leaf in hand.params.items()}
    least = _STILL * max(moved.values(), default=0.0)
    for name, leaf in hand.params.items():
        yield name, _off(found.params[name], leaf, max(moved[name], least))
    for name, leaf in hand.buffers.items():
        yield (
            name,
            _off(
                found.buffers[name], leaf, max(_largest(leaf.double()), 1e-3) if leaf.dtype.is_floating_point else 1e-3
            ),
        )


def _off(a: Tensor, b: Tensor, scale: float) -> float:
    if a.shape != b.shape:
        return float("inf")
    wide = torch.complex128 if b.is_complex() else torch.float64
    a, b = a.detach().to(wide), b.detach().to(wide)
    if torch.equal(a, b):
        return 0.0
    same = (a == b) | (a.isnan() & b.isnan())
    return _finite(_largest(torch.where(same, torch.zeros_like(a), a - b)) / max(scale, 1e-30))


def _finite(off: float) -> float:
    return float("inf") if math.isnan(off) else off


def _largest(value: Tensor) -> float:
    return float(value.abs().max()) if value.numel() else 0.0


def _exported(program: Any, state: Any, model: nn.Module, double: bool) -> Iterator[str]:
    """Both formats, loaded strictly into a fresh module, against the state."""
    fresh = copy.deepcopy(model).double() if double else copy.deepcopy(model)
    ps.load_into(fresh, state)
    wanted = {name: value for name, value in fresh.state_dict().items() if isinstance(value, Tensor)}
    with tempfile.TemporaryDirectory() as folder:
        for suffix, load in ((".pt", _load_pt), (".safetensors", load_file)):
            path = Path(folder) / f"weights{suffix}"
            other = copy.deepcopy(model).double() if double else copy.deepcopy(model)
            try:
                ps.export_weights(path, program, state)
                other.load_state_dict(load(path), strict=True)
            except Exception as error:
                yield f"{suffix}: {type(error).__name__}: {_told(error)}"
                continue
            loaded = other.state_dict()
            unlike = [name for name, value in wanted.items() if _off(loaded[name], value, 1.0)]
            if unlike:
                yield f"{suffix}: {unlike[:3]} are not those of the state"


def _load_pt(path: Path) -> Any:
    return torch.load(path, weights_only=True)


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _cast(batch: Any) -> Any:
    """Floats as float64."""
    if isinstance(batch, Tensor):
        return batch.double() if batch.is_floating_point() else batch
    if isinstance(batch, Mapping):
        return {name: _cast(value) for name, value in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch)(_cast(value) for value in batch)
    return batch


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return one.shape == other.shape and _off(one, other, 1.0) == 0.0
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(_same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


def _told(error: BaseException | None) -> str:
    """The first line of an error, without the paths of this machine."""
    words = (str(error).strip() or type(error).__name__).splitlines()[0]
    return " ".join(word.rsplit("/", 1)[-1] if word.startswith("/") else word for word in words.split())[:300]
