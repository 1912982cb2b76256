"""`init`: the state before the first step."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .. import rng
from ..errors import StateError
from ..model import functional
from ..precision import Policy
from ..state import usable_device
from ..types import Empty, Params, TrainState, Tree
from .spec import Accum, Spec, wide


def init_of(spec: Spec, module: nn.Module, own: nn.Module | None) -> Callable[..., TrainState]:
    """Build a program's ``init``."""

    def init(seed: int = 0, device: torch.device | str | None = None) -> TrainState:
        """Return the state before the first step: the module's current weights, on ``device``.

        The parameters that required a gradient when the program was built are trained, whatever they require now.

        Args:
            seed: of dropout and data order, an int in [-2**63, 2**63); the weights do not depend on it.
            device: None means the module's; `fit` moves a state from the CPU to the best device.

        Raises:
            ConfigError: an invalid seed or device, or the device does not support the program's precision.
            StateError: the module has got or lost tensors since the program was built.
        """
        names = spec.template.names
        found = {name: tensor for named in functional.tensors(module, objective=own) for name, tensor in named.items()}
        _check_names(names, set(found))
        target = _target(module, device)
        if target.type != "meta":
            spec.policy.check(target)
        # By the names of the program, not by the module's `requires_grad` of today: another program may have set that.
        params, frozen, buffers = (
            _place({name: found[name] for name in of}, target, spec.policy)
            for of in (names.params, names.frozen, names.buffers)
        )
        return TrainState(
            step=_count(target),
            updates=_count(target),
            params=params,
            frozen=frozen,
            buffers=buffers,
            opt_state=spec.tx.init(params),
            ema=spec.average.init(params, buffers),
            scaler=spec.scaler.init(target),
            accum=_open_window(spec, params, target),
            halted=_count(target) if spec.halts else Empty(),
            key=rng.key(seed),
        )

    return init


def _check_names(names: functional.Names, found: set[str]) -> None:
    known = {*names.params, *names.frozen, *names.buffers}
    changes = [f"{name} is {what}" for what, some in (("new", found - known), ("gone", known - found)) for name in some]
    if changes:
        raise StateError(
            f"the module has other tensors than ps.program has seen: {', '.join(sorted(changes)[:3])}"
            + (f" and {len(changes) - 3} more" if len(changes) > 3 else ""),
            where="program.init",
            hint="call ps.program(model, ...) when the model has all of its layers, ties and buffers",
        )


def _target(module: nn.Module, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return usable_device(device)
    found = {parameter.device for parameter in module.parameters()}
    if len(found) > 1:
        raise StateError(
            f"parameters are on several devices: {sorted(map(str, found))}",
            where=type(module).__name__,
            hint='call program.init(device="cuda")',
        )
    return found.pop()


def _place(named: Params, device: torch.device, policy: Policy) -> Params:
    def leaf(name: str, value: Tensor) -> Tensor:
        if value.device.type == "meta":
            raise StateError(
                "the tensor is on the meta device and has no values", where=name, hint="load weights before init"
            )
        # Always copy: the module belongs to the user. The copy keeps dense layouts (channels_last).
        return policy.cast(value.to(device=device, copy=True))

    return {name: leaf(name, value) for name, value in named.items()}


def _count(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=device)


def _open_window(spec: Spec, params: Params, device: torch.device) -> Tree:
    if spec.accumulate == 1:
        return Empty()
    grads = {name: torch.zeros_like(p, dtype=wide(p.dtype)) for name, p in params.items()}
    left = torch.full((), spec.accumulate, dtype=torch.int64, device=device)
    return Accum(left, torch.zeros((), dtype=torch.float32, device=device), grads)
