"""Exponential moving average of the weights, as a second tree in the state; a model's weights are never swapped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from .errors import ConfigError, StateError
from .pickling import recipe
from .types import Empty, Params, TrainState, Tree


class EmaState(NamedTuple):
    """The averaged weights, in at least float32: in bfloat16 a decay of 0.999 rounds every change to 0."""

    params: Params  # name -> P, float32 or float64
    buffers: Params | Empty  # averaged float buffers; Empty if evaluation uses the current buffers


class Average(NamedTuple):
    """``init(params, buffers) -> state`` and ``update(state, params, buffers, updates) -> state``."""

    init: Callable[[Params, Params], Tree]
    update: Callable[[Tree, Params, Params, Tensor], Tree]


@recipe
def none() -> Average:
    """Disable averaging; the state is Empty.

    Example:
        >>> none().init({"w": torch.zeros(1)}, {})
        Empty()
    """

    def init(params: Params, buffers: Params) -> Empty:
        del params, buffers  # No state.
        return Empty()

    def update(state: Empty, params: Params, buffers: Params, updates: Tensor) -> Empty:
        del params, buffers, updates  # No state.
        return state

    return Average(init, update)


@recipe
def average(decay: float, *, warmup: bool = False, buffers: Literal["copy", "average"] = "copy") -> Average:
    r"""Exponential moving average of the trained parameters.

    :math:`s_1 = p_1`, then :math:`s_t = d_t s_{t-1} + (1 - d_t) p_t`, as `torch.optim.swa_utils.AveragedModel` with
    `get_ema_multi_avg_fn`: the first update copies.

    Args:
        decay: :math:`d` in [0, 1).
        warmup: :math:`d_t = \min(d, (1 + t) / (10 + t))`, where t is the number of updates before this one, so that the
            average of a short run does not stay close to the initial weights.
        buffers: "copy": evaluate with the current buffers; "average": average float buffers like the parameters, and
            copy integer buffers.

    Raises:
        ConfigError: the decay is outside [0, 1), or ``buffers`` has another value.

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
        raise ConfigError(f"decay is {decay}, outside [0, 1)", where="ema", hint="decay=0.999")
    if buffers not in ("copy", "average"):
        raise ConfigError(f"buffers={buffers!r}", where="ema", hint='"copy" or "average"')
    average_buffers = buffers == "average"

    def init(params: Params, buffers: Params) -> EmaState:
        shadow = {name: _upcast(p).clone() for name, p in params.items()}
        averaged = {name: _upcast(b).clone() for name, b in buffers.items()}
        return EmaState(shadow, averaged if average_buffers else Empty())

    def update(state: EmaState, params: Params, buffers: Params, updates: Tensor) -> EmaState:
        weight = _weight(updates, decay, warmup)
        shadow = _lerp_all(state.params, params, weight)
        if isinstance(state.buffers, Empty):
            return EmaState(shadow, state.buffers)
        return EmaState(shadow, _lerp_all(state.buffers, buffers, weight))

    return Average(init, update)


def view(state: TrainState, view: str = "params") -> TrainState:
    """Return the state to evaluate, bind or export: the state itself, or one with the averaged weights as parameters.

    Args:
        state: for "ema", a state with an average.
        view: "params" or "ema".

    Returns:
        A state of the same structure and dtypes; float32 weights are not copied.

    Raises:
        StateError: the state has no average, or is not a TrainState.
        ConfigError: ``view`` has another value.

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
    value: Any = state
    if not isinstance(value, TrainState):
        raise StateError(
            f"the state is a {type(value).__name__}, not a TrainState", where="view", hint="program.init()"
        )
    if view == "params":
        return TrainState(*state)
    if view != "ema":
        raise ConfigError(f"view is {view!r}", where="view", hint='"params" or "ema"')
    if isinstance(state.ema, Empty):
        raise StateError("this state has no average", where="ema", hint="ps.program(..., ema=0.999)")
    # The average has flat buffers (see packed.py) only inside of a compiled step, which does not call `view`.
    params = {key: state.ema.params[key].to(value.dtype) for key, value in state.params.items()}
    buffers = state.buffers
    if not isinstance(state.ema.buffers, Empty):
        buffers = {key: state.ema.buffers[key].to(value.dtype) for key, value in buffers.items()}
    return TrainState(*state)._replace(params=params, buffers=buffers)


def _upcast(value: Tensor) -> Tensor:
    narrow = value.is_floating_point() and value.dtype.itemsize < torch.float32.itemsize
    return value.detach().float() if narrow else value.detach()


def _weight(updates: Tensor, decay: float, warmup: bool) -> Tensor:
    """Return 1 - d_t, shape=(); 1 at the first update."""
    dtype = torch.float32 if updates.device.type == "mps" else torch.float64
    count = updates.to(dtype)
    weight = torch.full_like(count, 1 - decay)
    if warmup:
        weight = torch.maximum(weight, 1 - (1 + count) / (10 + count))
    return torch.where(updates == 0, torch.ones_like(weight), weight)


def _lerp_all(olds: Params, news: Params, weight: Tensor) -> Params:
    dtypes = dict.fromkeys(old.dtype for old in olds.values() if old.is_floating_point())
    weights = {dtype: weight.to(dtype) for dtype in dtypes}  # Once per dtype, not once per leaf.
    return {name: _lerp(old, news[name], weights) for name, old in olds.items()}


def _lerp(old: Tensor, new: Tensor, weights: Mapping[torch.dtype, Tensor]) -> Tensor:
    if not old.is_floating_point():
        return new.clone()
    return torch.lerp(old, new.to(old.dtype), weights[old.dtype])
