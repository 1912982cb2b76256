"""Lookahead: slow weights that follow the weights of another optimizer."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ConfigError
from ..state import at_least, known_keywords
from ..types import Params, Tree
from .arguments import Scalar, within
from .base import Norms, Transform, described, updated
from .counts import zero_count
from .numerics import lerp, upcast


class LookaheadState(NamedTuple):
    """State of `lookahead`."""

    step: Tensor  # shape=(), dtype=int64: updates done
    slow: Params  # name -> P, at least float32: the slow weights
    inner: Tree


@known_keywords
def lookahead(
    inner: Transform,
    sync_period: Annotated[int, at_least(1)] = 5,
    slow_step_size: Annotated[Scalar, within(0.0, 1.0, "[]")] = 0.5,
) -> Transform:
    r"""Let slow weights follow a whole optimizer, as `optax.lookahead`: k steps forward, 1 step back.

    Example:
        >>> from purestep.optim import sgd
        >>> tx, params = lookahead(sgd(1.0), sync_period=2), {"w": torch.zeros(1)}
        >>> state, seen = tx.init(params), []
        >>> for _ in range(4):
        ...     updates, state = tx.update({"w": -torch.ones(1)}, state, params)
        ...     params = {"w": params["w"] + updates["w"]}
        ...     seen.append(params["w"].item())
        >>> seen
        [1.0, 1.0, 2.0, 2.0]

    ``inner`` updates the weights. After every ``sync_period`` updates, the slow weights :math:`\phi` move towards them,
    and the weights continue from there: :math:`\phi \leftarrow \phi + \alpha (\theta - \phi)`,
    :math:`\theta \leftarrow \phi`. The parameters in a state are the fast weights; they equal the slow ones after a
    multiple of ``sync_period`` updates, which is a good time to evaluate.

    Args:
        inner: a complete optimizer, such as ``optim.adamw(1e-3)``; its state continues over a synchronization.
        sync_period: k >= 1.
        slow_step_size: :math:`\alpha` in [0, 1].

    Raises:
        ConfigError: ``inner`` is no transform.

    References:
        Zhang et al., 2019, Lookahead Optimizer: k steps forward, 1 step back.
    """
    value: Any = inner
    if not isinstance(value, Transform):
        raise ConfigError(
            f"inner is a {type(value).__name__}, not a Transform", where="lookahead", hint="optim.adamw(1e-3)"
        )

    def init(params: Params) -> LookaheadState:
        slow = {name: upcast(param.detach()).clone() for name, param in params.items()}
        return LookaheadState(zero_count(params), slow, inner.init(params))

    def update(
        updates: Params, state: LookaheadState, params: Params, norms: Norms | None = None
    ) -> tuple[Params, LookaheadState]:
        updates, new_inner = updated(inner, updates, state.inner, params, norms)
        step = state.step + 1
        is_due = step % sync_period == 0
        slow: Params = {}
        new: Params = {}
        for name, u in updates.items():
            old, param = state.slow[name], params[name].to(state.slow[name].dtype)
            slow[name] = torch.where(is_due, lerp(old, param + u, slow_step_size), old)
            new[name] = torch.where(is_due, (slow[name] - param).to(u.dtype), u)
        return new, LookaheadState(step, slow, new_inner)

    return described(Transform(init, update, inner.elementwise, inner.labels), "lookahead", takes_norms=True)
