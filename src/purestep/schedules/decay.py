"""Curves: each value follows from the count by one formula."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..errors import ConfigError
from ..pickling import recipe
from ..validation import check_count, check_finite, check_positive
from .interpolate import Count, Schedule, clock, half_wave, line, share


@recipe
def constant(value: float) -> Schedule:
    """``value`` at every count.

    Args:
        value: finite.

    Raises:
        ConfigError: for numbers out of range.

    Example:
        >>> float(constant(0.1)(7))
        0.1
    """
    check_finite("constant", value=value)
    return lambda count: torch.full_like(clock(count), value)


@recipe
def linear(init_value: float, end_value: float, *, transition_steps: int) -> Schedule:
    r""":math:`a + (b - a) \, t / T`: a straight line. torch's `LinearLR` with ``total_iters=transition_steps``.

    Args:
        init_value: a, finite.
        end_value: b, finite.
        transition_steps: T, updates, at least 1.

    Raises:
        ConfigError: for numbers out of range.

    Example:
        >>> [float(linear(0.0, 1.0, transition_steps=4)(t)) for t in (0, 1, 4, 9)]
        [0.0, 0.25, 1.0, 1.0]
    """
    check_finite("linear", init_value=init_value, end_value=end_value)
    check_count("linear", least=1, transition_steps=transition_steps)
    return lambda count: line(init_value, end_value, share(clock(count), transition_steps))


@recipe
def polynomial(init_value: float, end_value: float, *, transition_steps: int, power: float = 1.0) -> Schedule:
    r""":math:`b + (a - b) (1 - t / T)^p`. torch's `PolynomialLR` has b = 0.

    Args:
        init_value: a, finite.
        end_value: b, finite.
        transition_steps: T, updates, at least 1.
        power: p > 0.

    Raises:
        ConfigError: for numbers out of range.

    Example:
        >>> [float(polynomial(1.0, 0.0, transition_steps=4, power=2.0)(t)) for t in (0, 2, 4)]
        [1.0, 0.25, 0.0]
    """
    check_finite("polynomial", init_value=init_value, end_value=end_value)
    check_count("polynomial", least=1, transition_steps=transition_steps)
    check_positive("polynomial", power=power)
    return lambda count: line(end_value, init_value, (1.0 - share(clock(count), transition_steps)) ** power)


@recipe
def cosine(init_value: float, decay_steps: int, *, end_value: float = 0.0) -> Schedule:
    r""":math:`b + (a - b) (1 + \cos(\pi t / T)) / 2`: half a wave.

    torch's `CosineAnnealingLR` is the same up to ``T_max=decay_steps`` and climbs again after it; this stays.

    Args:
        init_value: a, finite.
        decay_steps: T, updates, at least 1.
        end_value: b, finite.

    Raises:
        ConfigError: for numbers out of range.

    References:
        Loshchilov and Hutter, 2017, SGDR (without the restarts).

    Example:
        >>> [round(float(cosine(1.0, 4)(t)), 4) for t in (0, 2, 4, 9)]
        [1.0, 0.5, 0.0, 0.0]
    """
    check_finite("cosine", init_value=init_value, end_value=end_value)
    check_count("cosine", least=1, decay_steps=decay_steps)
    return lambda count: half_wave(init_value, end_value, share(clock(count), decay_steps))


@recipe
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
        staircase: whether the exponent is rounded down.
        end_value: where it stops: a lower bound for gamma < 1, else an upper one. None: it goes on.

    Raises:
        ConfigError: for numbers out of range.

    Example:
        >>> [float(exponential(1.0, 0.5, end_value=0.2)(t)) for t in (0, 1, 2, 3)]
        [1.0, 0.5, 0.25, 0.2]
    """
    check_finite("exponential", init_value=init_value, end_value=0.0 if end_value is None else end_value)
    check_positive("exponential", gamma=gamma)
    check_count("exponential", least=1, transition_steps=transition_steps)

    def schedule(count: Count) -> Tensor:
        exponent = clock(count) / transition_steps
        value = init_value * gamma ** (torch.floor(exponent) if staircase else exponent)
        if end_value is None:
            return value
        return value.clamp(min=end_value) if gamma < 1.0 else value.clamp(max=end_value)

    return schedule


@recipe
def warmup_cosine(peak: float, warmup: int, *, total: int, end: float = 0.0, start: float = 0.0) -> Schedule:
    """A straight line from ``start`` to ``peak`` over ``warmup`` updates, then half a cosine to ``end`` at ``total``.

    The first update is made with ``start``, as in optax and Hugging Face.

    Args:
        peak: finite.
        warmup: updates, in [0, total).
        total: updates of both parts together, at least 1.
        end: finite.
        start: finite.

    Raises:
        ConfigError: for numbers out of range, such as a warm-up that does not end before ``total``.

    Example:
        >>> [round(float(warmup_cosine(1.0, 2, total=6)(t)), 4) for t in (0, 1, 2, 4, 6)]
        [0.0, 0.5, 1.0, 0.5, 0.0]
    """
    check_finite("warmup_cosine", peak=peak, end=end, start=start)
    check_count("warmup_cosine", least=0, warmup=warmup)
    check_count("warmup_cosine", least=1, total=total)
    if warmup >= total:
        raise ConfigError(
            f"warmup={warmup} leaves nothing of total={total} to decay over",
            where="warmup_cosine",
            hint=f"warmup={total // 10}, total={total}",
        )

    def schedule(count: Count) -> Tensor:
        t = clock(count)
        down = half_wave(peak, end, share(t - warmup, total - warmup))
        return torch.where(t < warmup, line(start, peak, share(t, max(warmup, 1))), down)

    return schedule


@recipe
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
    """Up over ``warmup`` updates, level, and down over the last ``decay`` of ``total``.

    The level part does not depend on ``total``, so a run can be prolonged from a snapshot taken in it.

    Args:
        peak: finite.
        warmup: updates, at least 0.
        decay: updates, at least 1.
        total: updates of the three parts together, at least ``warmup + decay``.
        end: finite.
        start: finite.
        shape: how it goes down, as a function of the share s of the decay that is over: ``"linear"`` 1 - s,
            ``"cosine"`` half a wave, ``"sqrt"`` 1 - sqrt(s).

    Raises:
        ConfigError: for numbers out of range, parts that do not fit into ``total``, or no such shape.

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
    if shape not in ("linear", "cosine", "sqrt"):
        raise ConfigError(f"shape={shape!r}", where="warmup_stable_decay", hint='"linear", "cosine" or "sqrt"')

    def schedule(count: Count) -> Tensor:
        t = clock(count)
        over = share(t - (total - decay), decay)
        down = (
            half_wave(peak, end, over) if shape == "cosine" else line(peak, end, over**0.5 if shape == "sqrt" else over)
        )
        return torch.where(t < warmup, line(start, peak, share(t, max(warmup, 1))), down)

    return schedule
