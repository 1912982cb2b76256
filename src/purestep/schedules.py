r"""Schedules: pure functions without state from the count of updates to a 0-d tensor.

The count :math:`t` is the number of updates applied so far, 0 at the first update; a skipped update does not advance a
schedule. Past its end a schedule keeps its last value. The result is float64 (float32 on mps, which has no float64),
and a 0-d tensor does not promote the tensors that it multiplies. Argument names are those of optax or, for schedules
that optax does not have, of `torch.optim.lr_scheduler`.

A factory raises a ConfigError if a number is out of the range in the argument's type. A schedule reads no value back to
the host, so one graph contains the whole warm-up and decay.

Reading order: along a curve; constant or interpolated values between given counts; a sequence of schedules, schedules
by epoch, torch's schedulers; interpolation between two values.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.optim import SGD
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from .errors import ConfigError
from .state import (
    at_least,
    check_callable,
    check_choice,
    check_count,
    check_range,
    in_range,
    is_number,
    known_keywords,
    listed,
)

_Count: TypeAlias = Tensor | int
"""Updates so far, shape=(), dtype=int64, on any device; a Python int in a plot or a test."""
Schedule: TypeAlias = Callable[[_Count], Tensor]
"""Count of updates -> value, shape=()."""
_AnySchedule: TypeAlias = Callable[[Tensor], Tensor]
"""A schedule, or a user's function of the count, which need not accept a Python int."""
_Finite: TypeAlias = Annotated[float, in_range()]
_Positive: TypeAlias = Annotated[float, in_range(0.0)]
_Updates: TypeAlias = Annotated[int, at_least(1)]


# --- along a curve ----------------------------------------------------------------------------------------------------


@known_keywords
def constant(value: _Finite) -> Schedule:
    """Return ``value`` at every count.

    Example:
        >>> float(constant(0.1)(7))
        0.1

    Args:
        value: finite.
    """
    return lambda count: torch.full_like(_count_as_float(count), value)


@known_keywords
def linear(init_value: _Finite, end_value: _Finite, *, transition_steps: _Updates) -> Schedule:
    r"""A straight line from a to b, :math:`a + (b - a) \, t / T`. torch's `LinearLR`: T is its total_iters.

    Example:
        >>> [float(linear(0.0, 1.0, transition_steps=4)(t)) for t in (0, 1, 4, 9)]
        [0.0, 0.25, 1.0, 1.0]

    Args:
        init_value: a, finite.
        end_value: b, finite.
        transition_steps: T, updates, at least 1.
    """
    return lambda count: _line(init_value, end_value, _progress(_count_as_float(count), transition_steps))


@known_keywords
def polynomial(
    init_value: _Finite, end_value: _Finite, *, transition_steps: _Updates, power: _Positive = 1.0
) -> Schedule:
    r"""A power of the remaining share, :math:`b + (a - b) (1 - t / T)^p`. torch's `PolynomialLR` has b = 0.

    Example:
        >>> [float(polynomial(1.0, 0.0, transition_steps=4, power=2.0)(t)) for t in (0, 2, 4)]
        [1.0, 0.25, 0.0]

    Args:
        init_value: a, finite.
        end_value: b, finite.
        transition_steps: T, updates, at least 1.
        power: p > 0.
    """
    return lambda count: _line(
        end_value, init_value, (1.0 - _progress(_count_as_float(count), transition_steps)) ** power
    )


@known_keywords
def cosine(init_value: _Finite, decay_steps: _Updates, *, end_value: _Finite = 0.0) -> Schedule:
    r"""Half a cosine from a to b, :math:`b + (a - b) (1 + \cos(\pi t / T)) / 2`.

    Example:
        >>> [round(float(cosine(1.0, 4)(t)), 4) for t in (0, 2, 4, 9)]
        [1.0, 0.5, 0.0, 0.0]

    torch's `CosineAnnealingLR` is equal up to ``T_max=decay_steps`` and rises afterwards; this one stays at b.

    Args:
        init_value: a, finite.
        decay_steps: T, updates, at least 1.
        end_value: b, finite.

    References:
        Loshchilov and Hutter, 2017, SGDR (without the restarts).
    """
    return lambda count: _half_cosine(init_value, end_value, _progress(_count_as_float(count), decay_steps))


@known_keywords
def exponential(
    init_value: _Finite,
    gamma: _Positive,
    *,
    transition_steps: _Updates = 1,
    staircase: bool = False,
    end_value: _Finite | None = None,
) -> Schedule:
    r"""Exponential decay, :math:`a \, \gamma^{t / T}`. torch's `ExponentialLR` has T = 1.

    Example:
        >>> [float(exponential(1.0, 0.5, end_value=0.2)(t)) for t in (0, 1, 2, 3)]
        [1.0, 0.5, 0.25, 0.2]

    Args:
        init_value: a, finite.
        gamma: > 0 (optax's ``decay_rate``).
        transition_steps: T, updates, at least 1.
        staircase: round the exponent down.
        end_value: a lower bound for gamma < 1, else an upper bound. None: no bound.
    """

    def schedule(count: _Count) -> Tensor:
        exponent = _count_as_float(count) / transition_steps
        value = init_value * gamma ** (torch.floor(exponent) if staircase else exponent)
        if end_value is None:
            return value
        return value.clamp(min=end_value) if gamma < 1.0 else value.clamp(max=end_value)

    return schedule


@known_keywords
def warmup_cosine(
    peak: _Finite, warmup: Annotated[int, at_least(0)], *, total: _Updates, end: _Finite = 0.0, start: _Finite = 0.0
) -> Schedule:
    """Linear warm-up from ``start`` to ``peak`` over ``warmup`` updates, then half a cosine to ``end`` at ``total``.

    Example:
        >>> [round(float(warmup_cosine(1.0, 2, total=6)(t)), 4) for t in (0, 1, 2, 4, 6)]
        [0.0, 0.5, 1.0, 0.5, 0.0]

    The first update uses ``start``, as in optax and Hugging Face.

    Args:
        peak: finite.
        warmup: updates, in [0, total).
        total: updates of warm-up and decay together, at least 1.
        end: finite.
        start: finite.

    Raises:
        ConfigError: the warm-up does not end before ``total``.
    """
    if warmup >= total:
        raise ConfigError(
            f"warmup={warmup} leaves no updates of total={total} for the decay",
            where="warmup_cosine",
            hint=f"warmup={total // 10}, total={total}",
        )
    return warmup_stable_decay(peak, warmup, decay=total - warmup, total=total, end=end, start=start, shape="cosine")


@known_keywords
def warmup_stable_decay(
    peak: _Finite,
    warmup: Annotated[int, at_least(0)],
    *,
    decay: _Updates,
    total: _Updates,
    end: _Finite = 0.0,
    start: _Finite = 0.0,
    shape: Literal["linear", "cosine", "sqrt"] = "linear",
) -> Schedule:
    """Linear warm-up over ``warmup`` updates, a constant phase, and a decay over the last ``decay`` of ``total``.

    Example:
        >>> [float(warmup_stable_decay(1.0, 2, decay=2, total=8)(t)) for t in (1, 2, 6, 7, 8)]
        [0.5, 1.0, 1.0, 0.5, 0.0]

    The constant phase does not depend on ``total``, so a run can be extended from a snapshot taken in it.

    Args:
        peak: finite.
        warmup: updates, at least 0.
        decay: updates, at least 1.
        total: updates of the three phases together, at least ``warmup + decay``.
        end: finite.
        start: finite.
        shape: of the decay, as a function of its progress s in [0, 1]: ``"linear"`` 1 - s, ``"cosine"`` half a cosine,
            ``"sqrt"`` 1 - sqrt(s).

    Raises:
        ConfigError: the phases do not fit into ``total``, or the shape is unknown.

    References:
        Hu et al., 2024, MiniCPM; ``"sqrt"``: Hägele et al., 2024, Scaling laws and compute-optimal training beyond
        fixed training durations.
    """
    if warmup + decay > total:
        raise ConfigError(
            f"warmup={warmup} and decay={decay} are more than total={total}",
            where="warmup_stable_decay",
            hint=f"total={warmup + decay}",
        )

    def schedule(count: _Count) -> Tensor:
        t = _count_as_float(count)
        over = _progress(t - (total - decay), decay)
        down = (
            _half_cosine(peak, end, over)
            if shape == "cosine"
            else _line(peak, end, over**0.5 if shape == "sqrt" else over)
        )
        return torch.where(t < warmup, _line(start, peak, _progress(t, max(warmup, 1))), down)

    return schedule


# --- between given counts ---------------------------------------------------------------------------------------------


@known_keywords
def step(init_value: _Finite, step_size: _Updates, *, gamma: _Positive = 0.1) -> Schedule:
    r"""A factor every n updates, :math:`a \, \gamma^{\lfloor t / n \rfloor}`. torch's `StepLR`.

    Example:
        >>> [round(float(step(1.0, 10)(t)), 4) for t in (9, 10, 20)]
        [1.0, 0.1, 0.01]

    Args:
        init_value: a, finite.
        step_size: n, updates, at least 1.
        gamma: > 0.
    """
    return lambda count: init_value * gamma ** torch.floor(_count_as_float(count) / step_size)


@known_keywords
def multistep(init_value: _Finite, milestones: Iterable[int], *, gamma: _Positive = 0.1) -> Schedule:
    r"""A factor at each milestone, :math:`a \, \gamma^{n}` after n of them. torch's `MultiStepLR`.

    Example:
        >>> [round(float(multistep(1.0, [10, 15])(t)), 4) for t in (9, 10, 15)]
        [1.0, 0.1, 0.01]

    Args:
        init_value: a, finite.
        milestones: updates, each at least 1; a repeated milestone counts twice.
        gamma: > 0.

    Raises:
        ConfigError: the milestones are not a list, or one is out of range.
    """
    points = listed("multistep", milestones=milestones)
    for milestone in points:
        check_count("multistep", least=1, milestones=milestone)

    def schedule(count: _Count) -> Tensor:
        t = _count_as_float(count)
        reached = torch.zeros_like(t)
        for milestone in points:
            reached = reached + (t >= milestone)
        return init_value * gamma**reached

    return schedule


@known_keywords
def one_cycle(
    max_lr: _Finite,
    total_steps: Annotated[int, at_least(2)],
    *,
    pct_start: _Positive = 0.3,
    anneal_strategy: Literal["cos", "linear"] = "cos",
    div_factor: _Positive = 25.0,
    final_div_factor: _Positive = 1e4,
    three_phase: bool = False,
) -> Schedule:
    """Rise from ``max_lr / div_factor`` to ``max_lr``, fall to the initial value over ``final_div_factor``.

    Example:
        >>> [round(float(one_cycle(1.0, 10)(t)), 4) for t in (0, 2, 9)]
        [0.04, 1.0, 0.0]

    torch's `OneCycleLR`, without the cycled momentum: torch cycles the momentum unless ``cycle_momentum=False``.

    Args:
        max_lr: finite.
        total_steps: updates, at least 2; the last value is that of update ``total_steps - 1``, as in torch.
        pct_start: the rising share of the cycle, in (0, 1), with ``three_phase`` in (0, 0.5); more than one update.
        anneal_strategy: half cosines or straight lines.
        div_factor: > 0.
        final_div_factor: > 0.
        three_phase: fall to the initial value in as many updates as the rise took, and then to the last value.

    Raises:
        ConfigError: a phase has no update, or the strategy is unknown.

    References:
        Smith and Topin, 2017, Super-convergence.
    """
    initial, top = max_lr / div_factor, pct_start * total_steps - 1
    middle = [(2 * pct_start * total_steps - 2, initial)] if three_phase else []
    points = [(0.0, initial), (top, max_lr), *middle, (float(total_steps - 1), initial / final_div_factor)]
    if any(later <= sooner for (sooner, _), (later, _) in pairwise(points)):
        raise ConfigError(
            f"pct_start={pct_start} of total_steps={total_steps} leaves a phase without an update",
            where="one_cycle",
            hint=f"pass a larger total_steps, or a pct_start in (0, {0.5 if three_phase else 1})",
        )
    return lambda count: _interpolate_points(
        _count_as_float(count), points, _half_cosine if anneal_strategy == "cos" else _line
    )


@known_keywords
def piecewise(
    init_value: _Finite,
    boundaries_and_scales: Mapping[int, float],
    *,
    interpolate_type: Literal["linear", "cosine"] | None = None,
) -> Schedule:
    """Multiply ``init_value`` by the scale of every boundary reached, in steps or interpolated.

    Example:
        >>> [float(piecewise(1.0, {10: 0.5, 20: 0.5})(t)) for t in (9, 10, 20)]
        [1.0, 0.5, 0.25]
        >>> float(piecewise(1.0, {10: 0.5}, interpolate_type="linear")(5))
        0.75

    Args:
        init_value: finite.
        boundaries_and_scales: update -> factor >= 0; updates of at least 1.
        interpolate_type: interpolation between the values of two boundaries. None: a step at each boundary.

    Raises:
        ConfigError: the boundaries are not a mapping, or the interpolation is unknown.
    """
    mapping: Any = boundaries_and_scales
    if not isinstance(mapping, Mapping):
        problem = f"boundaries_and_scales={mapping!r} is not a mapping"
        raise ConfigError(problem, where="piecewise", hint="pass {update: factor, ...}")
    for boundary in boundaries_and_scales:
        check_count("piecewise", least=1, boundaries_and_scales=boundary)
    points = [(0.0, init_value)]
    for boundary, scale in sorted(boundaries_and_scales.items()):
        factor: dict[str, Any] = {f"boundaries_and_scales[{boundary}]": scale}
        check_range("piecewise", 0.0, **factor)
        points.append((float(boundary), points[-1][1] * scale))
    interpolations = {None: _hold, "linear": _line, "cosine": _half_cosine}
    return lambda count: _interpolate_points(_count_as_float(count), points, interpolations[interpolate_type])


# --- combined and converted -------------------------------------------------------------------------------------------


@known_keywords
def join(schedules: Sequence[_AnySchedule], boundaries: Sequence[int]) -> Schedule:
    """Run schedules one after another; each counts from its own begin. torch's `SequentialLR`.

    Example:
        >>> from purestep.schedules import constant, linear
        >>> warm = join([linear(0.0, 1.0, transition_steps=2), constant(0.5)], [3])
        >>> [float(warm(t)) for t in (1, 2, 3)]
        [0.5, 1.0, 0.5]

    Args:
        schedules: at least one.
        boundaries: rising counts at which the second and each later schedule begins, one fewer than schedules.

    Raises:
        ConfigError: the boundaries are not rising counts of at least 1, or their number is wrong; an entry of
            ``schedules`` is not a function.
    """
    parts, begins = listed("join", schedules=schedules), listed("join", boundaries=boundaries)
    for index, part in enumerate(parts):
        check_callable("join", _as_schedule(part), **{f"schedules[{index}]": part})
    for boundary in begins:
        check_count("join", least=1, boundaries=boundary)
    if len(parts) != len(begins) + 1 or any(later <= sooner for sooner, later in pairwise(begins)):
        raise ConfigError(
            f"{len(parts)} schedules and the boundaries {begins}",
            where="join",
            hint="pass rising boundaries, one fewer than schedules",
        )

    def schedule(count: _Count) -> Tensor:
        t = torch.as_tensor(count)
        value = parts[0](t)
        for begin, part in zip(begins, parts[1:], strict=True):
            # Before its begin a schedule is evaluated at 0, never at a negative count.
            value = torch.where(t < begin, value, part((t - begin).clamp(min=0)))
        return value

    return schedule


@known_keywords
def per_epoch(schedule: _AnySchedule, *, updates_per_epoch: _Updates) -> Schedule:
    """Convert a schedule by epoch to a schedule by update: the value is constant within an epoch.

    Example:
        >>> from purestep.schedules import step
        >>> by_epoch = per_epoch(step(1.0, 1, gamma=0.5), updates_per_epoch=10)
        >>> [float(by_epoch(t)) for t in (9, 10, 20)]
        [1.0, 0.5, 0.25]

    Args:
        schedule: a function of the count of epochs.
        updates_per_epoch: at least 1; with accumulation, the number of accumulation windows per epoch.

    Raises:
        ConfigError: ``schedule`` is not a function.
    """
    check_callable("per_epoch", _as_schedule(schedule), schedule=schedule)
    return lambda count: schedule(torch.div(torch.as_tensor(count), updates_per_epoch, rounding_mode="floor"))


def _as_schedule(value: Any) -> str:
    """The cure for a value in the place of a schedule."""
    return f"schedules.constant({value!r})" if is_number(value) else "pass a function of the count"


def from_torch_scheduler(
    scheduler: Callable[..., LRScheduler], learning_rate: float, *, steps: int, key: str = "lr", **kwargs: Any
) -> Schedule:
    """Tabulate the learning rates of one of torch's schedulers.

    Example:
        >>> from torch.optim.lr_scheduler import LambdaLR
        >>> halving = from_torch_scheduler(LambdaLR, 1.0, steps=10, lr_lambda=lambda t: 0.5**t)
        >>> [float(halving(t)) for t in (0, 2, 100)]
        [1.0, 0.25, 0.001953125]

    `OneCycleLR` and `CyclicLR` also cycle the momentum, unless ``cycle_momentum=False`` is passed. A table holds one
    hyperparameter: ``key="momentum"`` tabulates the momentum, for an optimizer with both injected:
    ``optim.inject(optim.sgd)(learning_rate=rates, momentum=momenta)``, or ``b1=momenta`` for ``optim.adamw``.

    Args:
        scheduler: a class of `torch.optim.lr_scheduler` or a subclass, or a function ``optimizer -> scheduler`` (for
            `SequentialLR` and `ChainedScheduler`).
        learning_rate: the initial learning rate of the optimizer, finite.
        steps: length of the table, at least 1; its last value holds afterwards. Inside `per_epoch`, in epochs.
        key: the entry of the optimizer's parameter group: "lr" or "momentum".
        **kwargs: further arguments of the scheduler.

    Raises:
        ConfigError: the scheduler is `ReduceLROnPlateau`, which depends on a metric, or is an instance; a value is not
            finite; ``key`` has another value.

    Warns:
        UserWarning: the scheduler cycles the momentum, and the table holds the learning rate only.
    """
    check_range("from_torch_scheduler", -math.inf, ends="()", learning_rate=learning_rate)
    check_count("from_torch_scheduler", least=1, steps=steps)
    check_choice("from_torch_scheduler", ("lr", "momentum"), key=key)
    table = torch.tensor(_tabulate(scheduler, learning_rate, steps, key, kwargs), dtype=torch.float64)

    tables: dict[torch.device, Tensor] = {}

    def schedule(count: _Count) -> Tensor:
        t = torch.as_tensor(count)
        dtype = torch.float32 if t.device.type == "mps" else torch.float64
        # A graph must not copy from the host, so an eager call (such as in `init`) copies the table to its device.
        is_eager = type(t) is Tensor and not torch.compiler.is_dynamo_compiling()
        if is_eager and t.device != table.device and t.device not in tables:
            tables[t.device] = table.to(dtype=dtype).to(t.device)  # Once: a copy from the host waits for the device.
        values = tables[t.device] if t.device in tables else table.to(dtype=dtype).to(t.device, non_blocking=True)
        # Not table[t]: indexing with a 0-d tensor reads it back to the host.
        return values.index_select(0, t.clamp(0, steps - 1).reshape(1)).reshape(())

    return schedule


def _tabulate(
    scheduler: Callable[..., LRScheduler], learning_rate: float, steps: int, key: str, kwargs: dict[str, Any]
) -> list[float]:
    _check_scheduler(scheduler, learning_rate, steps)
    optimizer = SGD([torch.zeros(1)], lr=learning_rate, momentum=0.9)  # Cyclic schedulers require momentum.
    built: Any = scheduler(optimizer, **kwargs)  # A user's function may return anything.
    _check_scheduler(type(built) if isinstance(built, LRScheduler) else built, learning_rate, steps)
    group = optimizer.param_groups[0]
    values, momenta = [float(group[key])], {float(group["momentum"])}
    for _ in range(steps - 1):
        optimizer.step()
        built.step()
        values.append(float(group[key]))
        momenta.add(float(group["momentum"]))
    if key == "momentum" and len(momenta) == 1:
        name = type(built).__name__
        raise ConfigError(f"{name} does not cycle the momentum", where="from_torch_scheduler", hint='key="lr"')
    if key == "lr" and len(momenta) > 1:
        name = type(built).__name__
        warnings.warn(
            f"{name} cycles the momentum between {min(momenta):g} and {max(momenta):g}, but this schedule holds the "
            "learning rate only (cure: pass cycle_momentum=False; or call "
            f'from_torch_scheduler({name}, ..., key="momentum") and pass both to '
            "optim.inject(optim.sgd)(learning_rate=..., momentum=...))",
            UserWarning,
            stacklevel=4,
        )
    for index, value in enumerate(values):
        if not math.isfinite(value):
            raise ConfigError(
                f"the {'learning rate' if key == 'lr' else key} of step {index} is {value}",
                where="from_torch_scheduler",
                hint=f"steps={index}",
            )
    return values


def _check_scheduler(scheduler: Any, learning_rate: float, steps: int) -> None:
    kind = scheduler if inspect.isclass(scheduler) else type(scheduler)
    if issubclass(kind, ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau depends on a metric, but a schedule depends only on the count of updates",
            where="from_torch_scheduler",
            hint="ps.fit(..., callbacks=[ps.reduce_on_plateau('val_loss')]), with optim.inject around the optimizer",
        )
    if isinstance(scheduler, LRScheduler) or not callable(scheduler):
        raise ConfigError(
            f"the scheduler is a {type(scheduler).__name__}, not a class",
            where="from_torch_scheduler",
            hint=f"pass the class and its arguments: from_torch_scheduler(StepLR, {learning_rate}, steps={steps}, ...)",
        )


# --- interpolation ----------------------------------------------------------------------------------------------------


def _count_as_float(count: _Count) -> Tensor:
    """Convert a count to the widest float dtype of its device. shape=()."""
    tensor = torch.as_tensor(count)
    return tensor.to(torch.float32 if tensor.device.type == "mps" else torch.float64)


def _progress(t: Tensor, steps: float) -> Tensor:
    """Return ``t / steps``, clamped to [0, 1]."""
    return (t / steps).clamp(0.0, 1.0)


def _line(a: float, b: float, s: Tensor) -> Tensor:
    """Interpolate linearly from a to b. Exact at both ends, unlike ``a + (b - a) * s``."""
    return a * (1.0 - s) + b * s


def _half_cosine(a: float, b: float, s: Tensor) -> Tensor:
    """Interpolate from a to b along half a cosine."""
    return b + (a - b) * (1.0 + torch.cos(math.pi * s)) / 2.0


def _hold(a: float, b: float, s: Tensor) -> Tensor:
    """Return a for s < 1, b at s = 1."""
    return torch.where(s < 1.0, torch.full_like(s, a), b)


def _interpolate_points(
    t: Tensor, points: list[tuple[float, float]], between: Callable[[float, float, Tensor], Tensor]
) -> Tensor:
    """Interpolate between (count, value) points with rising counts; past the last point, return its value."""
    value = torch.full_like(t, points[0][1])
    for (begin, a), (end, b) in pairwise(points):
        value = torch.where(t >= begin, between(a, b, _progress(t - begin, end - begin)), value)
    return value
