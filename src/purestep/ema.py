"""Exponential moving average of the weights, as a tree beside them: nothing is swapped in or out of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .errors import ConfigError, StateError
from .pickling import recipe
from .types import Empty, Params, TrainState, Tree


class EmaState(NamedTuple):
    """The shadow. At least float32: in bfloat16 a decay of 0.999 rounds every change away."""

    params: Params  # name -> P, float32 or float64
    buffers: Params | Empty  # averaged float buffers, or Empty where evaluation uses the buffers as they are


class Average(NamedTuple):
    """``init(params, buffers) -> state`` and ``update(state, params, buffers, updates) -> state``."""

    init: Callable[[Params, Params], Tree]
    update: Callable[[Tree, Params, Params, Tensor], Tree]


@recipe
def none() -> Average:
    """No average: an Empty state.

    Example:
        >>> none().init({"w": torch.zeros(1)}, {})
        Empty()
    """

    def init(params: Params, buffers: Params) -> Empty:
        del params, buffers  # nothing to keep
        return Empty()

    def update(state: Empty, params: Params, buffers: Params, updates: Tensor) -> Empty:
        del params, buffers, updates  # nothing to keep
        return state

    return Average(init, update)


@recipe
def average(decay: float, *, warmup: bool = False, buffers: Literal["copy", "average"] = "copy") -> Average:
    r"""Exponential moving average of the parameters, frozen ones left out.

    :math:`s_1 = p_1`, then :math:`s_t = d_t s_{t-1} + (1 - d_t) p_t`, as `torch.optim.swa_utils.AveragedModel` with
    `get_ema_multi_avg_fn`: the first update copies.

    Args:
        decay: :math:`d` in [0, 1).
        warmup: :math:`d_t = \min(d, (1 + t) / (10 + t))` with t the updates before this one, so that a short run is not
            scored on its first weights.
        buffers: "copy" evaluates with the buffers as they are; "average" averages the float ones as the parameters
            (integers are copied).

    Raises:
        ConfigError: a decay outside [0, 1), or another word for the buffers.

    Example:
        >>> import torch
        >>> ema = average(0.5)
        >>> state = ema.init({"w": torch.zeros(1)}, {})
        >>> state = ema.update(state, {"w": torch.ones(1)}, {}, torch.tensor(0))
        >>> state = ema.update(state, {"w": torch.zeros(1)}, {}, torch.tensor(1))
        >>> state.params["w"].item()
        0.5
    """
    if not 0 <= decay < 1:
        raise ConfigError(f"decay is {decay}", where="ema", hint="0.999, in [0, 1)")
    if buffers not in ("copy", "average"):
        raise ConfigError(f"buffers={buffers!r}", where="ema", hint='"copy" or "average"')
    keep_buffers = buffers == "average"

    def init(params: Params, buffers: Params) -> EmaState:
        shadow = {name: _wide(p).clone() for name, p in params.items()}
        kept = {name: _wide(b).clone() for name, b in buffers.items()}
        return EmaState(shadow, kept if keep_buffers else Empty())

    def update(state: EmaState, params: Params, buffers: Params, updates: Tensor) -> EmaState:
        weight = _weight(updates, decay, warmup)
        shadow = _lerp_all(state.params, params, weight)
        if isinstance(state.buffers, Empty):
            return EmaState(shadow, state.buffers)
        return EmaState(shadow, _lerp_all(state.buffers, buffers, weight))

    return Average(init, update)


def view(state: TrainState, view: str = "params") -> TrainState:
    """The state to evaluate, bind or export: the same one, or one whose parameters are the averaged weights.

    Args:
        state: with ``ema`` on for "ema".
        view: "params" or "ema".

    Returns:
        A state of the same structure and dtypes; nothing is copied for float32 weights.

    Raises:
        StateError: "ema" of a state without one; what is no TrainState.
        ConfigError: another name.

    Example:
        >>> import torch, purestep as ps
        >>> net = torch.nn.Linear(2, 1)
        >>> program = ps.program(net, ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1), ema=0.9)
        >>> state, batch = program.init(), (torch.ones(4, 2), torch.ones(4, 1))
        >>> for _ in range(2):
        ...     state, _ = program.train_step(state, batch)
        >>> torch.equal(ps.view(state, "ema").params["bias"], state.ema.params["bias"])
        True
    """
    given: Any = state
    if not isinstance(given, TrainState):
        raise StateError(f"a {type(given).__name__} is no TrainState", where="view", hint="program.init()")
    if view == "params":
        return TrainState(*state)
    if view != "ema":
        raise ConfigError(f"{view!r} is no view", where="view", hint='"params" or "ema"')
    if isinstance(state.ema, Empty):
        raise StateError("this state has no average", where="ema", hint="ps.program(..., ema=0.999)")
    # The shadow may be flat (see packed.py) only inside a compiled step, and nobody asks for a view there.
    params = {key: state.ema.params[key].to(value.dtype) for key, value in state.params.items()}
    buffers = state.buffers
    if not isinstance(state.ema.buffers, Empty):
        buffers = {key: state.ema.buffers[key].to(value.dtype) for key, value in buffers.items()}
    return TrainState(*state)._replace(params=params, buffers=buffers)


def _wide(value: Tensor) -> Tensor:
    narrow = value.is_floating_point() and value.dtype.itemsize < torch.float32.itemsize
    return value.detach().float() if narrow else value.detach()


def _weight(updates: Tensor, decay: float, warmup: bool) -> Tensor:
    """1 - d_t, shape=(); 1 at the first update."""
    dtype = torch.float32 if updates.device.type == "mps" else torch.float64
    count = updates.to(dtype)
    weight = torch.full_like(count, 1 - decay)
    if warmup:
        weight = torch.maximum(weight, 1 - (1 + count) / (10 + count))
    return torch.where(updates == 0, torch.ones_like(weight), weight)


def _lerp_all(olds: Params, news: Params, weight: Tensor) -> Params:
    dtypes = dict.fromkeys(old.dtype for old in olds.values() if old.is_floating_point())
    weights = {dtype: weight.to(dtype) for dtype in dtypes}  # once, not once a leaf
    return {name: _lerp(old, news[name], weights) for name, old in olds.items()}


def _lerp(old: Tensor, new: Tensor, weights: Mapping[torch.dtype, Tensor]) -> Tensor:
    if not old.is_floating_point():
        return new.clone()
    return torch.lerp(old, new.to(old.dtype), weights[old.dtype])
