"""Schedules along a curve: linear, polynomial, cosine with and without restarts, exponential, warm-up and decay."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from ..errors import ConfigError
from ..state import check_choice, check_count, check_finite, check_positive, known_keywords
from .interpolate import Count, Schedule, count_as_float, half_cosine, line, progress


@known_keywords
def constant(value: float) -> Schedule:
    """Return ``value`` at every count.

    Args:
        value: finite.

    Raises:
        ConfigError: a number is out of range.

    Example:
        >>> float(constant(0.1)(7))
        0.1
    """
    check_finite("constant", value=value)
    return lambda count: torch.full_like(count_as_float(count), value)


@known_keywords
def linear(init_value: float, end_value: float, *, transition_steps: int) -> Schedule:
    r""":math:`a + (b - a) \, t / T`: a straight line. torch's `LinearLR` with ``total_iters=transition_steps``.

    Args:
        init_value: a, finite.
        end_value: b, finite.
        transition_steps: T, updates, at least 1.

    Raises:
        ConfigError: a number is out of range.

    Example:
        >>> [float(linear(0.0, 1.0, transition_steps=4)(t)) for t in (0, 1, 4, 9)]
        [0.0, 0.25, 1.0, 1.0]
    """
    check_finite("linear", init_value=init_value, end_value=end_value)
    check_count("linear", least=1, transition_steps=transition_steps)
    return lambda count: line(init_value, end_value, progress(count_as_float(count), transition_steps))


@known_keywords
def polynomial(init_value: float, end_value: float, *, transition_steps: int, power: float = 1.0) -> Schedule:
    r""":math:`b + (a - b) (1 - t / T)^p`. torch's `PolynomialLR` has b = 0.

    Args:
        init_value: a, finite.
        end_value: b, finite.
        transition_steps: T, updates, at least 1.
        power: p > 0.

    Raises:
        ConfigError: a number is out of range.

    Example:
        >>> [float(polynomial(1.0, 0.0, transition_steps=4, power=2.0)(t)) for t in (0, 2, 4)]
        [1.0, 0.25, 0.0]
    """
    check_finite("polynomial", init_value=init_value, end_value=end_value)
    check_count("polynomial", least=1, transition_steps=transition_steps)
    check_positive("polynomial", power=power)
    return lambda count: line(end_value, init_value, (1.0 - progress(count_as_float(count), transition_steps)) ** power)


@known_keywords
def cosine(init_value: float, decay_steps: int, *, end_value: float = 0.0) -> Schedule:
    r""":math:`b + (a - b) (1 + \cos(\pi t / T)) / 2`: half a wave.

    torch's `CosineAnnealingLR` is equal up to ``T_max=decay_steps`` and rises afterwards; this one stays at b.

    Args:
        init_value: a, finite.
        decay_steps: T, updates, at least 1.
        end_value: b, finite.

    Raises:
        ConfigError: a number is out of range.

    References:
        Loshchilov and Hutter, 2017, SGDR (without the restarts).

    Example:
        >>> [round(float(cosine(1.0, 4)(t)), 4) for t in (0, 2, 4, 9)]
        [1.0, 0.5, 0.0, 0.0]
    """
    check_finite("cosine", init_value=init_value, end_value=end_value)
    check_count("cosine", least=1, decay_steps=decay_steps)
    return lambda count: half_cosine(init_value, end_value, progress(count_as_float(count), decay_steps))


@known_keywords
def warm_restarts(init_value: float, T_0: int, *, T_mult: int = 1, eta_min: float = 0.0) -> Schedule:
    r"""Repeat half a cosine from ``init_value`` to ``eta_min``. torch's `CosineAnnealingWarmRestarts`.

    Cycle n has :math:`T_0 \, m^n` updates; each starts at ``init_value``. A warm-up is a `join` with a `linear`.

    Args:
        init_value: finite.
        T_0: updates of the first cycle, at least 1.
        T_mult: m, a whole number of at least 1: the length of a cycle divided by that of the cycle before.
        eta_min: finite; the value that a cycle falls to, which the next one replaces by ``init_value``.

    Raises:
        ConfigError: a number is out of range.

    References:
        Loshchilov and Hutter, 2017, SGDR: Stochastic Gradient Descent with Warm Restarts.

    Example:
        >>> [round(float(warm_restarts(1.0, 2, T_mult=2)(t)), 4) for t in (0, 1, 2, 4, 6)]
        [1.0, 0.5, 1.0, 0.5, 1.0]
    """
    check_finite("warm_restarts", init_value=init_value, eta_min=eta_min)
    check_count("warm_restarts", least=1, T_0=T_0, T_mult=T_mult)

    def schedule(count: Count) -> Tensor:
        t = count_as_float(count)
        if T_mult == 1:
            return half_cosine(init_value, eta_min, torch.remainder(t, T_0) / T_0)
        # Cycle n begins at T_0 (m^n - 1) / (m - 1). The logarithm may be rounded across a begin, hence the corrections.
        n = torch.floor(torch.log1p(t * (T_mult - 1) / T_0) / math.log(T_mult) + 0.5)
        n = torch.where(_cycle_begin(n, T_0, T_mult) > t, n - 1, n)
        begin = _cycle_begin(n, T_0, T_mult)
        return half_cosine(init_value, eta_min, (t - begin) / (T_0 * T_mult**n))

    return schedule


def _cycle_begin(n: Tensor, first: int, factor: int) -> Tensor:
    return torch.round(first * (factor**n - 1) / (factor - 1))


@known_keywords
def exponential(
    init_value: float,
    gamma: float,
    *,
    transition_steps: int = 1,
    staircase: bool = False,
    end_value: float | None = None,
) -> Schedule:
    r""":math:`a \, \gamma^{t / T}`. torch's `ExponentialLR` has T = 1.

    Args:
        init_value: a, finite.
        gamma: > 0 (optax's ``decay_rate``).
        transition_steps: T, updates, at least 1.
        staircase: round the exponent down.
        end_value: a lower bound for gamma < 1, else an upper bound. None: no bound.

    Raises:
        ConfigError: a number is out of range.

    Example:
        >>> [float(exponential(1.0, 0.5, end_value=0.2)(t)) for t in (0, 1, 2, 3)]
        [1.0, 0.5, 0.25, 0.2]
    """
    check_finite("exponential", init_value=init_value, end_value=0.0 if end_value is None else end_value)
    check_positive("exponential", gamma=gamma)
    check_count("exponential", least=1, transition_steps=transition_steps)

    def schedule(count: Count) -> Tensor:
        exponent = count_as_float(count) / transition_steps
        value = init_value * gamma ** (torch.floor(exponent) if staircase else exponent)
        if end_value is None:
            return value
        return value.clamp(min=end_value) if gamma < 1.0 else value.clamp(max=end_value)

    return schedule


@known_keywords
def warmup_cosine(peak: float, warmup: int, *, total: int, end: float = 0.0, start: float = 0.0) -> Schedule:
    """Linear warm-up from ``start`` to ``peak`` over ``warmup`` updates, then half a cosine to ``end`` at ``total``.

    The first update uses ``start``, as in optax and Hugging Face.

    Args:
        peak: finite.
        warmup: updates, in [0, total).
        total: updates of warm-up and decay together, at least 1.
        end: finite.
        start: finite.

    Raises:
        ConfigError: a number is out of range, or the warm-up does not end before ``total``.

    Example:
        >>> [round(float(warmup_cosine(1.0, 2, total=6)(t)), 4) for t in (0, 1, 2, 4, 6)]
        [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    check_finite("warmup_cosine", peak=peak, end=end, start=start)
    check_count("warmup_cosine", least=0, warmup=warmup)
    check_count("warmup_cosine", least=1, total=total)
    if warmup >= total:
        raise ConfigError(
            f"warmup={warmup} leaves no updates of total={total} for the decay",
            where="warmup_cosine",
            hint=f"warmup={total // 10}, total={total}",
        )

    def schedule(count: Count) -> Tensor:
        t = count_as_float(count)
        down = half_cosine(peak, end, progress(t - warmup, total - warmup))
        return torch.where(t < warmup, line(start, peak, progress(t, max(warmup, 1))), down)

    return schedule


@known_keywords
def warmup_stable_decay(
    peak: float,
    warmup: int,
    *,
    decay: int,
    total: int,
    end: float = 0.0,
    start: float = 0.0,
    shape: Literal["linear", "cosine", "sqrt"] = "linear",
) -> Schedule:
    """Linear warm-up over ``warmup`` updates, a constant phase, and a decay over the last ``decay`` of ``total``.

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
        ConfigError: a number is out of range, the phases do not fit into ``total``, or the shape is unknown.

    References:
        Hu et al., 2024, MiniCPM; ``"sqrt"``: Hägele et al., 2024, Scaling laws and compute-optimal training beyond
        fixed training durations.

    Example:
        >>> [float(warmup_stable_decay(1.0, 2, decay=2, total=8)(t)) for t in (1, 2, 6, 7, 8)]
        [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    check_finite("warmup_stable_decay", peak=peak, end=end, start=start)
    check_count("warmup_stable_decay", least=0, warmup=warmup)
    check_count("warmup_stable_decay", least=1, decay=decay, total=total)
    if warmup + decay > total:
        raise ConfigError(
            f"warmup={warmup} and decay={decay} are more than total={total}",
            where="warmup_stable_decay",
            hint=f"total={warmup + decay}",
        )
    check_choice("warmup_stable_decay", ("linear", "cosine", "sqrt"), shape=shape)

    def schedule(count: Count) -> Tensor:
        t = count_as_float(count)
        over = progress(t - (total - decay), decay)
        down = (
            half_cosine(peak, end, over)
            if shape == "cosine"
            else line(peak, end, over**0.5 if shape == "sqrt" else over)
        )
        return torch.where(t < warmup, line(start, peak, progress(t, max(warmup, 1))), down)

    return schedule
