"""Schedule-free learning: averaging and interpolation in the place of momentum and of a decaying learning rate."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .. import tree
from ..errors import StateError
from ..state import known_keywords
from ..types import Empty, Params, TrainState, Tree
from .arguments import Decay, NonNegative, Rate, Scalar, within
from .base import Norms, Transform, chain, described, identity, updated
from .complex_params import real_only
from .counts import bias_corrections, no_updates, zero_count
from .numerics import adam_quotients, decay_square, multiply, rate_at, scalar_dtype, upcast, zeros_like_squares
from .scale import decay_parts, rate_leaf
from .wrappers import Mask

_B1: TypeAlias = Annotated[Scalar, within(0.0, 1.0, "()")]


class ScheduleFreeState(NamedTuple):
    """State of `schedule_free`."""

    step: Tensor  # shape=(), dtype=int64: updates done
    learning_rate: Tensor  # shape=(), dtype=float32: of the last update; at init of the first update
    max_rate: Tensor  # shape=(), dtype=float32: the largest learning rate so far
    weight_sum: Tensor  # shape=(), dtype=float32: of the weights in the average
    b1: Tensor  # shape=(), dtype=float32: for `schedule_free_view`
    z: Params  # name -> P, at least float32: the weights that the steps move
    inner: Tree


@known_keywords
def schedule_free(
    inner: Transform, learning_rate: Rate, b1: _B1 = 0.9, *, weight_lr_power: NonNegative = 2.0
) -> Transform:
    r"""Make a direction without momentum schedule-free, as `optax.contrib.schedule_free`.

    Example:
        >>> from purestep.optim import identity
        >>> tx, params = schedule_free(identity(), 1.0, b1=0.5), {"w": torch.zeros(1)}
        >>> updates, state = tx.update({"w": -torch.ones(1)}, tx.init(params), params)
        >>> state.z["w"].item(), updates["w"].item()
        (1.0, 1.0)

    Gradients are taken at :math:`y`, the parameters in the state; steps move :math:`z`; their average :math:`x` is the
    model to evaluate and to ship, see `schedule_free_view`:

    .. math:: z_{t+1} = z_t - \gamma d_t, \quad x_{t+1} = (1 - c) x_t + c z_{t+1}, \quad
        y_{t+1} = \beta_1 x_{t+1} + (1 - \beta_1) z_{t+1}

    where :math:`d_t` is the direction of ``inner`` at :math:`y_t`, and :math:`c` is the share of
    :math:`\gamma_{max}^p` in the sum of these weights so far.

    Args:
        inner: a direction without learning rate and without momentum. Weight decay in it acts at :math:`y`.
        learning_rate: :math:`\gamma` in [0, inf), or a schedule that warms up and then stays constant.
        b1: :math:`\beta_1` in (0, 1).
        weight_lr_power: p in [0, inf).

    References:
        Defazio et al., 2024, The Road Less Scheduled.
    """

    def init(params: Params) -> ScheduleFreeState:
        step = zero_count(params)
        zero = rate_leaf(0.0, step)
        z = {name: upcast(param.detach()).clone() for name, param in params.items()}
        rate = rate_leaf(rate_at(learning_rate, step), step)
        return ScheduleFreeState(step, rate, zero, zero.clone(), rate_leaf(b1, step), z, inner.init(params))

    def update(
        updates: Params, state: ScheduleFreeState, params: Params, norms: Norms | None = None
    ) -> tuple[Params, ScheduleFreeState]:
        directions, new_inner = updated(inner, updates, state.inner, params, norms)
        rate = rate_at(learning_rate, state.step)
        leaf = rate_leaf(rate, state.step)
        max_rate = torch.maximum(state.max_rate, leaf)
        weight = max_rate**weight_lr_power
        weight_sum = state.weight_sum + weight
        dtype = scalar_dtype(updates)
        # A warm-up starts at a learning rate of 0, and then nothing is averaged.
        divisor = torch.where(weight_sum > 0, weight_sum, torch.ones_like(weight_sum))
        share = weight.to(dtype) / divisor.to(dtype)
        factor = (b1 * (1 - share) - 1) * rate  # in the dtype of the scalars
        new: Params = {}
        z: Params = {}
        for name, direction in directions.items():
            old = state.z[name]
            d, y = direction.to(old.dtype), params[name].to(old.dtype)
            z[name] = old - multiply(d, rate)
            new[name] = (multiply(old - y, share) + multiply(d, factor)).to(direction.dtype)
        step = state.step + 1
        return new, ScheduleFreeState(step, leaf, max_rate, weight_sum, rate_leaf(b1, step), z, new_inner)

    whole = Transform(init, update, inner.elementwise, inner.labels)
    return described(real_only(whole, "schedule_free"), "schedule_free", takes_norms=True)


class ScaleByCorrectedRmsState(NamedTuple):
    """State of Adam's direction without momentum."""

    step: Tensor  # shape=(), dtype=int64: updates done
    nu: Params  # name -> P: running mean of squared gradients
    missed: Tree = Empty()  # see `counts`


def _scale_by_corrected_rms(b2: Decay, eps: NonNegative) -> Transform:
    """Adam's direction with ``b1=0``, which stores no mean of gradients."""

    def init(params: Params) -> ScaleByCorrectedRmsState:
        return ScaleByCorrectedRmsState(**no_updates(params), nu=zeros_like_squares(params))

    def update(
        updates: Params, state: ScaleByCorrectedRmsState, params: Params
    ) -> tuple[Params, ScaleByCorrectedRmsState]:
        del params  # Depends on the gradients only.
        state = state._replace(step=state.step + 1)
        nu = {name: decay_square(state.nu[name], g, b2) for name, g in updates.items()}
        root_weight = bias_corrections(state, updates, b2)[0].sqrt()
        new = adam_quotients(updates, updates, nu, torch.ones_like(root_weight), root_weight, eps)
        return new, state._replace(nu=nu)

    return Transform(init, update)


@known_keywords
def schedule_free_sgd(
    learning_rate: Rate = 1.0,
    b1: _B1 = 0.9,
    *,
    weight_decay: NonNegative = 0.0,
    mask: Mask | None = None,
    weight_lr_power: NonNegative = 2.0,
) -> Transform:
    r"""SGD without a schedule, as `optax.contrib.schedule_free_sgd`; evaluate `schedule_free_view`.

    Example:
        >>> tx, params = schedule_free_sgd(0.5), {"w": torch.ones(1)}
        >>> tx.update({"w": torch.ones(1)}, tx.init(params), params)[0]["w"].item()
        -0.5

    Args:
        learning_rate: in [0, inf), or a schedule that warms up and then stays constant; usually 10 to 50 times that of
            SGD with momentum.
        b1: in (0, 1), in the place of momentum.
        weight_decay: in [0, inf), times the parameters at which gradients are taken.
        mask: the parameters that decay, as in `masked`; None: all.
        weight_lr_power: see `schedule_free`.

    References:
        Defazio et al., 2024, The Road Less Scheduled.
    """
    inner = chain(identity(), *decay_parts(weight_decay, mask))
    return schedule_free(inner, learning_rate, b1, weight_lr_power=weight_lr_power)


@known_keywords
def schedule_free_adamw(
    learning_rate: Rate = 2.5e-3,
    b1: _B1 = 0.9,
    b2: Decay = 0.999,
    eps: NonNegative = 1e-8,
    *,
    weight_decay: NonNegative = 0.0,
    mask: Mask | None = None,
    weight_lr_power: NonNegative = 2.0,
) -> Transform:
    r"""AdamW without a schedule, as `optax.contrib.schedule_free_adamw`; evaluate `schedule_free_view`.

    Example:
        >>> tx, params = schedule_free_adamw(0.1), {"w": torch.ones(1)}
        >>> round(tx.update(params, tx.init(params), params)[0]["w"].item(), 4)
        -0.1

    The optimizer needs as much memory as AdamW. Batch normalization has the statistics of :math:`y`, see
    `schedule_free`; run some training batches through the view in train mode before an evaluation if the two differ
    much.

    Args:
        learning_rate: in [0, inf), or a schedule that warms up and then stays constant; usually 1 to 10 times AdamW's.
        b1: in (0, 1), in the place of momentum.
        b2: decay of the mean of squares, in [0, 1).
        eps: in [0, inf), outside the root.
        weight_decay: in [0, inf), decoupled, times the parameters at which gradients are taken.
        mask: the parameters that decay, as in `masked`; None: all.
        weight_lr_power: see `schedule_free`.

    References:
        Defazio et al., 2024, The Road Less Scheduled.
    """
    inner = chain(_scale_by_corrected_rms(b2, eps), *decay_parts(weight_decay, mask))
    return schedule_free(inner, learning_rate, b1, weight_lr_power=weight_lr_power)


def schedule_free_view(state: TrainState) -> TrainState:
    r"""Return the state with the averaged weights of `schedule_free`, :math:`x = (y - (1 - \beta_1) z) / \beta_1`.

    Example:
        >>> import purestep as ps
        >>> program = ps.program(torch.nn.Linear(2, 1), ps.supervised(torch.nn.MSELoss()), schedule_free_adamw(0.1))
        >>> state, batch = program.init(), (torch.ones(4, 2), torch.ones(4, 1))
        >>> for _ in range(3):
        ...     state, _ = program.train_step(state, batch)
        >>> sorted(ps.evaluate(schedule_free_view(state), [batch], program.eval_step))
        ['loss']

    Evaluate, bind and export this state; train on the other. In `fit`, evaluate it by
    ``program._replace(eval_step=lambda state, batch, *, index=0: program.eval_step(schedule_free_view(state), batch,
    index=index))``.

    Args:
        state: of a program whose transform contains a `schedule_free`, without ``ema=``.

    Returns:
        A state of the same structure and dtypes. Parameters of other transforms are unchanged.

    Raises:
        StateError: the state is no TrainState, has an `ema` average, or its optimizer is not schedule-free.
    """
    value: Any = state
    if not isinstance(value, TrainState):
        raise StateError(
            f"the state is a {type(value).__name__}, not a TrainState",
            where="schedule_free_view",
            hint="program.init()",
        )
    state = TrainState(*state)
    if not isinstance(state.ema, Empty):
        raise StateError(
            "the state has a second average, which evaluation would use",
            where="ema",
            hint="ps.program(...) without ema=",
        )
    nodes = tree.flatten(state.opt_state, is_leaf=lambda node: isinstance(node, ScheduleFreeState))[0]
    found = [node for node in nodes if isinstance(node, ScheduleFreeState)]
    if not found:
        raise StateError("the optimizer is not schedule-free", where="opt_state", hint="optim.schedule_free_adamw(...)")
    params = dict(state.params)
    for node in found:
        for name, z in node.z.items():
            y = params[name].detach().to(z.dtype)
            b1 = node.b1.to(z.dtype)
            params[name] = (z + (y - z) / b1).to(params[name].dtype)
    return state._replace(params=params)
