"""Averages of the weights, as a second tree in the state: exponential or equal. A model's weights are never swapped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Literal, NamedTuple

import torch
from torch import Tensor

from .state import at_least, check_choice, in_range, known_keywords, views
from .torch_ext import Value, complex_numbers, foreach, read, tracing
from .types import Empty, Params, Tree


class EmaState(NamedTuple):
    """The averaged weights, in at least float32: in bfloat16 a decay of 0.999 rounds every change to 0."""

    params: Params  # name -> P, float32 or float64
    buffers: Params | Empty  # averaged float buffers; Empty if evaluation uses the current buffers


class Average(NamedTuple):
    """An average of the weights as pure functions.

    ``init(params, buffers) -> state`` and ``update(state, params, buffers, updates) -> state``.

    ``first(n)`` is the share that the weights of the first update still have in the average after n updates; None if it
    is unknown. ``where(state, params, buffers, updates, applied, in_place)`` is ``update`` where ``applied`` (shape=(),
    bool), and the state elsewhere, in a few launches for all tensors; with ``in_place`` in the memory of the state. It
    returns None for tensors that it cannot take.
    """

    init: Callable[[Params, Params], Tree]
    update: Callable[[Tree, Params, Params, Tensor], Tree]
    first: Callable[[int], float] | None = None
    where: Callable[[Tree, Params, Params, Tensor, Tensor, bool], Tree | None] | None = None


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


@known_keywords
def average(
    decay: Annotated[float, in_range(0.0, 1.0, "[)")],
    *,
    warmup: bool = False,
    initial: bool = False,
    every: Annotated[int, at_least(1)] = 1,
    buffers: Literal["copy", "average"] = "copy",
) -> Average:
    r"""Exponential moving average of the trained parameters.

    Example:
        >>> import torch
        >>> ema = average(0.5)
        >>> state = ema.init({"w": torch.zeros(1)}, {})
        >>> state = ema.update(state, {"w": torch.ones(1)}, {}, torch.tensor(0))
        >>> state = ema.update(state, {"w": torch.zeros(1)}, {}, torch.tensor(1))
        >>> state.params["w"].item()
        0.5

    :math:`s_1 = p_1`, then :math:`s_t = d_t s_{t-1} + (1 - d_t) p_t`, as `torch.optim.swa_utils.AveragedModel` with
    `get_ema_multi_avg_fn`, ``EMAModel`` of diffusers and ``EMA`` of ema-pytorch: the first update copies. After n
    updates these first weights still have a share of :math:`d^{n-1}`, so a run should have several times
    :math:`1 / (1 - d)` updates, or a warm-up. `fit` warns of one that has not.

    Args:
        decay: :math:`d` in [0, 1).
        warmup: :math:`d_t = \min(d, (1 + t) / (10 + t))`, where t is the number of updates before this one, so that the
            average of a short run does not stay close to the initial weights.
        initial: begin with the initial weights: :math:`s_0 = p_0`, and the first update does not copy, as in
            ``ModelEmaV2`` of timm, in BYOL and in mean teachers, which begin as a copy of the model.
        every: updates between two that count, at least 1: of the updates 1, 1 + every, 1 + 2 * every, ... alone the
            weights enter the average (``update_every`` of ema-pytorch, whose default is 10).
        buffers: "copy": evaluate with the current buffers; "average": average float buffers like the parameters, and
            copy integer buffers.

    Raises:
        ConfigError: a number is out of its range, or ``initial`` or ``buffers`` has another value.
    """
    check_choice("average", (True, False), warmup=warmup, initial=initial)

    def first(updates: int) -> float:
        share = 1.0
        for count in range(0 if initial else every, updates, every):
            share *= min(decay, (1 + count) / (10 + count)) if warmup else decay
            if share < 1e-6:
                break
        return share

    def weight(updates: Tensor) -> Value:
        return _weight(updates, decay, warmup=warmup, copies=not initial, every=every)

    return _averaging(weight, buffers == "average", first)


@known_keywords
def swa(
    start: Annotated[int, at_least(1)],
    *,
    every: Annotated[int, at_least(1)] = 1,
    buffers: Literal["copy", "average"] = "copy",
) -> Average:
    r"""Equal average of the weights from an update on: stochastic weight averaging, as torch's `AveragedModel`.

    Example:
        >>> import torch
        >>> mean = swa(2, every=2)
        >>> state, seen = mean.init({"w": torch.zeros(1)}, {}), []
        >>> for count in range(5):  # updates 2 and 4 count
        ...     state = mean.update(state, {"w": torch.full((1,), count + 1.0)}, {}, torch.tensor(count))
        ...     seen.append(state.params["w"].item())
        >>> seen
        [1.0, 2.0, 2.0, 3.0, 3.0]

    The weights after the updates ``start``, ``start + every``, ``start + 2 * every``, ... (counted from 1) are averaged
    with equal shares. Before ``start`` the average is a copy of the weights. It goes with a learning rate that stays
    high: ``schedules.join([schedules.cosine(...), schedules.constant(...)], [start])``, or warm restarts by
    `schedules.from_torch_scheduler` with ``every`` equal to the length of a cycle.

    The statistics of BatchNorm belong to the weights of training. Compute those of the averaged weights behind the
    run: ``state = ps.refresh_batchnorm(program, result.state, train)``.

    Args:
        start: the first update whose weights count, at least 1.
        every: updates between two that count, at least 1; the updates of an epoch for one a epoch, as is usual.
        buffers: as for `average`.

    Raises:
        ConfigError: a number is out of range, or ``buffers`` has another value.

    References:
        Izmailov et al., 2018, Averaging Weights Leads to Wider Optima and Better Generalization.
    """

    def weight(updates: Tensor) -> Tensor:
        """1 / n for the n-th weights that count, 0 for those that do not, 1 before the start."""
        since = updates + 1 - start
        share = 1 / (torch.div(since, every, rounding_mode="floor") + 1).to(_widest(updates))
        counts = torch.where(since % every == 0, share, torch.zeros_like(share))
        return torch.where(since <= 0, torch.ones_like(share), counts)

    return _averaging(weight, buffers == "average", None)


def _averaging(
    weight: Callable[[Tensor], Value], average_buffers: bool, first: Callable[[int], float] | None
) -> Average:
    """The average to which new weights contribute by ``weight(updates before this one)``, shape=(), in [0, 1]."""

    def init(params: Params, buffers: Params) -> EmaState:
        shadow = {name: views.upcast(p).clone() for name, p in params.items()}
        averaged = {name: views.upcast(b).clone() for name, b in buffers.items()}
        return EmaState(shadow, averaged if average_buffers else Empty())

    def update(state: EmaState, params: Params, buffers: Params, updates: Tensor) -> EmaState:
        share = weight(updates)
        share = read(share) if isinstance(share, Tensor) else share
        shadow = _lerp_all(state.params, params, share)
        if isinstance(state.buffers, Empty):
            return EmaState(shadow, state.buffers)
        return EmaState(shadow, _lerp_all(state.buffers, buffers, share))

    def where(
        state: EmaState, params: Params, buffers: Params, updates: Tensor, applied: Tensor, in_place: bool
    ) -> EmaState | None:
        share = weight(updates) * read(applied)
        share = read(share) if isinstance(share, Tensor) else share
        if in_place and not isinstance(share, Tensor) and share == 0.0 and isinstance(state.buffers, Empty):
            return state
        averaged = [(state.params, params)] + ([] if isinstance(state.buffers, Empty) else [(state.buffers, buffers)])
        if not all(_of_one_kind([*old.values(), *(new[name] for name in old)]) for old, new in averaged if old):
            return None
        if not isinstance(state.buffers, Empty) and state.buffers:  # of a batch that is skipped, they may be nan
            names, old = list(state.buffers), list(state.buffers.values())
            chosen = foreach.where(applied, [buffers[name] for name in names], old)
            averaged[1] = state.buffers, dict(zip(names, chosen, strict=True))
        shadow, *rest = [_average_all(old, new, share, in_place) for old, new in averaged]
        return EmaState(shadow, rest[0] if rest else state.buffers)

    return Average(init, update, first, where)


def _weight(updates: Tensor, decay: float, *, warmup: bool, copies: bool, every: int) -> Value:
    """Return 1 - d_t, shape=(); 1 at the first update if it copies, 0 at one that does not count."""
    if not warmup and not isinstance(count := read(updates), Tensor):
        return 0.0 if count % every else 1 - decay if count or not copies else 1.0
    wide = _widest(updates)
    first = (updates == 0).to(wide) if copies else torch.zeros_like(updates, dtype=wide)
    share = first.clamp(min=1 - decay)
    if warmup:
        count = updates.to(wide)
        share = torch.maximum(share, 1 - (1 + count) / (10 + count))
    return share if every == 1 else torch.where(updates % every == 0, share, torch.zeros_like(share))


def _widest(updates: Tensor) -> torch.dtype:
    return torch.float32 if updates.device.type == "mps" else torch.float64


def _lerp_all(olds: Params, news: Params, weight: Value) -> Params:
    old, new = list(olds.values()), [news[name] for name in olds]
    if len(old) > 0 and not isinstance(weight, Tensor) and _of_one_kind(old + new):  # torch 2.11: no bool of a list
        return dict(zip(olds, foreach.lerp(old, new, weight, in_place=False), strict=True))
    dtypes = dict.fromkeys(leaf.dtype for leaf in map(complex_numbers.as_real, old) if leaf.is_floating_point())
    # Once per dtype, not once per leaf.
    weights = {dtype: weight.to(dtype) if isinstance(weight, Tensor) else weight for dtype in dtypes}
    return {name: _lerp(old, news[name], weights) for name, old in olds.items()}


def _average_all(olds: Params, news: Params, weight: Value, in_place: bool) -> Params:
    old, new = list(olds.values()), [news[name] for name in olds]
    if not old:
        return {}
    if isinstance(weight, Tensor):
        made = foreach.average(old, new, weight.to(old[0].dtype), in_place=in_place)
    else:
        made = foreach.lerp(old, new, weight, in_place=in_place)
    return dict(zip(olds, made, strict=True))


def _of_one_kind(leaves: list[Tensor]) -> bool:
    """True if one call may write all leaves."""
    if not tracing.may_overwrite(leaves):
        return False
    of_one_kind = {leaf.dtype for leaf in leaves} == {leaves[0].dtype} and leaves[0].is_floating_point()
    return of_one_kind and {type(leaf) for leaf in leaves} == {Tensor}


def _lerp(old: Tensor, new: Tensor, weights: Mapping[torch.dtype, Value]) -> Tensor:
    if old.is_complex():
        parts = [complex_numbers.as_real(leaf) for leaf in (old, new.to(old.dtype))]
        return complex_numbers.like(_lerp(parts[0], parts[1], weights), old)
    if not old.is_floating_point():
        return new.clone()
    return torch.lerp(old, new.to(old.dtype), weights[old.dtype])
