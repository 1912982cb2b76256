"""Views of a state: the weights to evaluate, bind or export, which are those of training or their average."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import StateError
from ..types import Empty, TrainState, Tree
from .validation import check_choice

_EMA = TrainState._fields.index("ema")


def default_view(state: TrainState) -> str:
    """The view that all but training uses by default: "ema" if the state has an average, else "params"."""
    # Without the reader of a live state, which would then copy its buffers at the next step.
    average = tuple.__getitem__(state, _EMA)
    return "params" if isinstance(average, Empty) else "ema"


def to_evaluate(state: Tree, view: str | None = None) -> Tree:
    """Return the state that an evaluation gets: `view` of a TrainState with an average, any other state itself.

    Example:
        >>> to_evaluate({"w": 1})
        {'w': 1}

    Args:
        state: any state; a tree of several TrainStates is returned unchanged.
        view: as in `view`.

    Raises:
        StateError, ConfigError: as `view`.
    """
    if view is None and not isinstance(state, TrainState):
        return state
    if view in (None, "params") and isinstance(state, TrainState) and default_view(state) == "params":
        return state
    return _viewed(state, view)


def for_evaluation(state: TrainState) -> TrainState:
    """The state without the fields that evaluation does not read, so that they are no inputs of a graph or a map."""
    return state._replace(opt_state=Empty(), ema=Empty(), scaler=Empty(), accum=Empty(), halted=Empty())


def view(state: TrainState, view: str | None = None) -> TrainState:
    """Return the state to evaluate, bind or export, with the weights of the view as its parameters.

    Example:
        >>> import torch, purestep as ps
        >>> net = torch.nn.Linear(2, 1)
        >>> program = ps.program(net, ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1), ema=0.9)
        >>> state, batch = program.init(), (torch.ones(4, 2), torch.ones(4, 1))
        >>> for _ in range(2):
        ...     state, _ = program.train_step(state, batch)
        >>> torch.equal(ps.view(state).params["bias"], state.ema.params["bias"])
        True
        >>> torch.equal(ps.view(state, "params").params["bias"], state.params["bias"])
        True

    `fit`, `evaluate`, ``program.eval_step``, ``program.bind``, `export_weights` and `load_into` all use the view "ema"
    of a state that has an average, unless ``view="params"`` says otherwise. They return the same for a view of a state
    as for the state and that ``view``: its average is replaced too.

    Args:
        state: for "ema", a state with an average.
        view: "params" or "ema"; None: "ema" if the state has an average, else "params".

    Returns:
        A state of the same structure and dtypes; float32 weights are not copied. Train on the state, not on its view.

    Raises:
        StateError: the state has no average, or is not a TrainState.
        ConfigError: ``view`` has another value.
    """
    value: Any = state
    if not isinstance(value, TrainState):
        hint = 'result.state; `result.best_state` is None without a "val" loader or monitor'
        hint = hint if value is None else "program.init()"
        raise StateError(f"the state is a {type(value).__name__}, not a TrainState", where="view", hint=hint)
    chosen = default_view(state) if view is None else view
    check_choice("view", ("params", "ema"), view=chosen)
    plain = TrainState(*state)
    average: Any = plain.ema
    if isinstance(average, Empty):
        if chosen == "ema":
            raise StateError("this state has no average", where="ema", hint="ps.program(..., ema=0.999)")
        return plain
    # The average has flat buffers (`packed`) only inside of a compiled step, which does not call `view`.
    averages_buffers = not isinstance(average.buffers, Empty)
    if chosen == "params":
        params = {name: upcast(value) for name, value in plain.params.items()}
        buffers = {name: upcast(value) for name, value in plain.buffers.items()} if averages_buffers else Empty()
        return plain._replace(ema=average._replace(params=params, buffers=buffers))
    params = {name: average.params[name].to(value.dtype) for name, value in plain.params.items()}
    buffers = plain.buffers
    if averages_buffers:
        buffers = {name: average.buffers[name].to(value.dtype) for name, value in buffers.items()}
    return plain._replace(params=params, buffers=buffers)


_viewed = view  # for functions with an argument of that name


def upcast(value: Tensor) -> Tensor:
    """The value as the average holds it: in at least float32, detached."""
    narrow = value.is_floating_point() and value.dtype.itemsize < torch.float32.itemsize
    return value.detach().float() if narrow else value.detach()
