"""A case trained in every way, and what differs."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import purestep as ps
from purestep.compile.cpu import backend as cpu_backend

from .cases import Case, Net, batches

STEPS = 3
"""Updates; with accumulation, twice as many calls."""

_RATE = 0.05
_TOLERANCE = {"64-true": 1e-8, "32-true": 2e-3, "bf16-mixed": 1e-1}
"""Of the largest number of a tensor. Rounding grows through three updates; another mask is off by some tens of it."""


def _transforms(name: str) -> Any:
    return {
        "sgd": lambda: ps.optim.sgd(_RATE),
        "momentum": lambda: ps.optim.sgd(_RATE, momentum=0.9),
        "adamw": lambda: ps.optim.adamw(_RATE, eps=1e-2, weight_decay=0.1),
        "rmsprop": lambda: ps.optim.rmsprop(_RATE, eps=1e-1),
    }[name]()


def _torchs(name: str, params: list[Tensor]) -> torch.optim.Optimizer:
    return {
        "sgd": lambda: torch.optim.SGD(params, _RATE),
        "momentum": lambda: torch.optim.SGD(params, _RATE, momentum=0.9),
        "adamw": lambda: torch.optim.AdamW(params, _RATE, eps=1e-2, weight_decay=0.1),
        "rmsprop": lambda: torch.optim.RMSprop(params, _RATE, eps=1e-1),
    }[name]()


class OneLayout(TorchDispatchMode):
    """Contiguous tensors for the backward pass of batch_norm, which is wrong on the CPU for some pairs of layouts.

    See `tests/compile/test_norms.py`.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.native_batch_norm_backward.default:
            args = (args[0].contiguous(), args[1].contiguous(), *args[2:])
        return func(*args, **(kwargs or {}))


def mismatches(case: Case, device: str = "cpu") -> list[str]:
    """What differs from the loop by hand, a line each: the seed, the way, the leaf. None where all is well."""
    torch.backends.cudnn.allow_tf32 = False
    given = [(x.to(device), y.to(device)) for x, y in batches(case, STEPS * case.accumulate)]
    program = ps.program(
        Net(case),
        ps.supervised(nn.MSELoss()),
        _transforms(case.optimizer),
        precision=case.precision,
        ema=case.ema,
        accumulate=case.accumulate,
    )
    with OneLayout():
        wanted = by_hand(case, given, device)
    found = list[str]()
    steps = {"eager": program.train_step}
    backend = case.way.replace("front", "inductor")
    with (
        mock.patch.object(cpu_backend, "suits", return_value=False) if case.way == "front" else contextlib.nullcontext()
    ):
        steps["compiled"] = ps.compile_step(program.train_step, donate=case.donate, backend=backend)
        for way, step in steps.items():
            state, kept = program.init(seed=case.seed, device=device), copy.deepcopy(given)
            trained = dict[str, Tensor]()
            for at, batch in enumerate(given):
                with OneLayout() if "eager" in (way, backend.removeprefix("aot_")) else contextlib.nullcontext():
                    state, metrics = step(state, batch)
                trained[f"loss {at}"] = metrics["loss"].total / metrics["loss"].weight
                if at == case.accumulate - 1:  # the first update: with plain descent, the gradients
                    trained |= {f"first {name}": leaf.clone() for name, leaf in state.params.items()}
            plain = ps.clone(state)
            trained |= plain.params | plain.buffers
            if case.ema is not None:
                trained |= {f"ema {name}": leaf for name, leaf in plain.ema.params.items()}
            found += [f"{case}: {way}: {told}" for told in _unlike(trained, wanted, _tolerance(case, device))]
            if not all(
                torch.equal(a, b)
                for one, other in zip(given, kept, strict=True)
                for a, b in zip(one, other, strict=True)
            ):
                found.append(f"{case}: {way}: the batch has been written to")
    return found


def _tolerance(case: Case, device: str) -> float:
    if case.precision == "64-true" and device == "cuda" and "rms" in case.layers:
        return 1e-6  # torch's own RMSNorm of float64 numbers on CUDA and its decomposition are 1.5e-8 apart
    return _TOLERANCE[case.precision]


def by_hand(case: Case, given: list[Any], device: str = "cpu") -> dict[str, Tensor]:
    """The losses, the weights after the first update, and all that is trained at the end, from a plain loop."""
    dtype = torch.float64 if case.precision == "64-true" else torch.float32
    net = Net(case).to(device, dtype)
    params = {name: leaf for name, leaf in net.named_parameters() if leaf.requires_grad}
    optimizer = _torchs(case.optimizer, list(params.values()))
    average, trained = dict[str, Tensor](), dict[str, Tensor]()
    for at, (x, y) in enumerate(given):
        torch.manual_seed(ps.rng.mix(case.seed, at, "step"))
        with torch.autocast(device, torch.bfloat16, enabled=case.precision == "bf16-mixed"):
            loss = nn.functional.mse_loss(net(x.to(dtype)), y.to(dtype))
        (loss / case.accumulate).backward()
        trained[f"loss {at}"] = loss.detach()
        if (at + 1) % case.accumulate:
            continue
        optimizer.step()
        optimizer.zero_grad()
        for name, leaf in params.items():
            old = average.get(name, leaf.detach().clone())
            average[name] = old.lerp(leaf.detach(), 1 - (case.ema or 0))
        if at == case.accumulate - 1:
            trained |= {f"first {name}": leaf.detach().clone() for name, leaf in params.items()}
    trained |= {name: leaf.detach() for name, leaf in params.items()} | dict(net.named_buffers())
    return trained | ({f"ema {name}": leaf for name, leaf in average.items()} if case.ema is not None else {})


def _unlike(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> Iterator[str]:
    if found.keys() != wanted.keys():
        yield f"leaves {sorted(found.keys() ^ wanted.keys())}"
        return
    for name, leaf in wanted.items():
        a, b = found[name].double().cpu(), leaf.double().cpu()
        loose = max(tolerance, 1e-5) if name.startswith("loss") else tolerance  # losses are float32
        off = float((a - b).abs().max() / b.abs().max().clamp(min=0.1)) if b.numel() else 0.0
        if not off <= loose:
            yield f"{name} is off by {off:.2g} of its largest number"
