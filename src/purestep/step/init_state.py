"""`init`: the state before the first step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import rng
from ..errors import ConfigError, StateError
from ..model import functional
from ..precision import Policy
from ..state import usable_device
from ..types import Empty, Params, TrainState, Tree
from .spec import Accum, Spec, wide


def kept_whole(name: str, value: Tensor) -> Tensor:
    """The tensor."""
    del name
    return value


def init_of(
    spec: Spec,
    module: nn.Module,
    own: nn.Module | None,
    keep: Callable[[str, Tensor], Tensor] = kept_whole,
) -> Callable[..., TrainState]:
    """Build a program's ``init``. ``keep``: (name, tensor) -> the part of it that the state holds, called with one
    tensor after another: only one is whole at a time."""

    def init(
        seed: int = 0,
        device: torch.device | str | None = None,
        weights: Callable[[str], Tensor] | None = None,
    ) -> TrainState:
        """Return the state before the first step: the module's current weights, on ``device``.

        The parameters that required a gradient when the program was built are trained, whatever they require now.
        The module may be built on the meta device (``with torch.device("meta"):``), which takes no memory. Then
        ``weights`` draws or loads its tensors one by one; each process of a mesh keeps its pieces.

        Args:
            seed: of dropout and data order, an int in [-2**63, 2**63); the weights do not depend on it.
            device: None means the module's, and the CPU for one on the meta device; `fit` moves a state from the CPU to
                the best device.
            weights: name of a parameter or buffer on the meta device -> its values, of the shape in the module, in any
                dtype: ``file.get_tensor`` of ``safetensors.safe_open``, or a function that draws, alike in every
                process.

        Raises:
            ConfigError: an invalid seed or device, or the device does not support the program's precision; ``weights``
                are given, and the module is not on the meta device.
            StateError: the module has got or lost tensors since the program was built; it is on the meta device, and
                ``weights`` returns no tensor of the right shape.
        """
        names = spec.template.names
        found = {name: tensor for named in functional.tensors(module, objective=own) for name, tensor in named.items()}
        _check_names(names, set(found))
        if weights is not None:
            _check_empty(found)
        target = _target(module, device)
        if target.type != "meta":
            spec.policy.check(target)
        # By the names of the program, not by the module's `requires_grad` of today: another program may have set that.
        params, frozen, buffers = (
            {name: keep(name, _placed(name, found[name], target, spec.policy, weights)) for name in of}
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


def _check_empty(found: Params) -> None:
    if not any(tensor.is_meta for tensor in found.values()):
        what = "weights= fills a module on the meta device, and this module has values"
        raise ConfigError(what, where="program.init", hint='build it `with torch.device("meta"):`, or omit weights')


def _target(module: nn.Module, device: torch.device | str | None) -> torch.device:
    if device is not None:
        return usable_device(device)
    found = {parameter.device for parameter in module.parameters() if not parameter.is_meta} or {torch.device("cpu")}
    if len(found) > 1:
        raise StateError(
            f"parameters are on several devices: {sorted(map(str, found))}",
            where=type(module).__name__,
            hint='call program.init(device="cuda")',
        )
    return found.pop()


def _placed(
    name: str, value: Tensor, device: torch.device, policy: Policy, weights: Callable[[str], Tensor] | None
) -> Tensor:
    if value.is_meta and device.type != "meta":
        value = _filled(name, value, weights)
    # Always copy: the module belongs to the user. The copy keeps dense layouts (channels_last).
    return policy.cast(value.to(device=device, copy=True))


def _filled(name: str, value: Tensor, weights: Callable[[str], Tensor] | None) -> Tensor:
    """The values of a tensor on the meta device."""
    if weights is None:
        raise StateError(
            "the tensor is on the meta device and has no values",
            where=name,
            hint="load weights before init, or pass init(weights=file.get_tensor) with `safetensors.safe_open`",
        )
    try:
        found: Any = weights(name)
    except Exception as error:
        what = f"weights({name!r}) raised {type(error).__name__}: {error}"
        hint = "pass a function that returns the values of every tensor on the meta device, also of buffers"
        raise StateError(what, where=name, hint=hint) from error
    if not isinstance(found, Tensor) or found.is_meta or found.shape != value.shape:
        got = f"{list(found.shape)} on {found.device}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        what = f"weights({name!r}) returned {got}, and the tensor is {list(value.shape)}"
        raise StateError(what, where=name, hint="return the values of the whole tensor")
    return found.detach().to(value.dtype)


def _count(device: torch.device) -> Tensor:
    return torch.zeros((), dtype=torch.int64, device=device)


def _open_window(spec: Spec, params: Params, device: torch.device) -> Tree:
    if spec.accumulate == 1:
        return Empty()
    grads = {name: torch.zeros_like(p, dtype=wide(p.dtype)) for name, p in params.items()}
    left = torch.full((), spec.accumulate, dtype=torch.int64, device=device)
    return Accum(left, torch.zeros((), dtype=torch.float32, device=device), grads)
