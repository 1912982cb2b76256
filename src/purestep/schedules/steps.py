"""Schedules in steps and phases: constant or interpolated values between given counts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import ConfigError
from ..state import check_choice, check_count, check_finite, check_positive, known_keywords, listed
from .interpolate import Count, Schedule, count_as_float, half_cosine, hold, interpolate_points, line


@known_keywords
def step(init_value: float, step_size: int, *, gamma: float = 0.1) -> Schedule:
    r""":math:`a \, \gamma^{\lfloor t / n \rfloor}`. torch's `StepLR`.

    Args:
        init_value: a, finite.
        step_size: n, updates, at least 1.
        gamma: > 0.

    Raises:
        ConfigError: a number is out of range.

    Example:
        >>> [round(float(step(1.0, 10)(t)), 4) for t in (9, 10, 20)]
        [1.0, 0.1, 0.01]
    """
    check_finite("step", init_value=init_value)
    check_count("step", least=1, step_size=step_size)
    check_positive("step", gamma=gamma)
    return lambda count: init_value * gamma ** torch.floor(count_as_float(count) / step_size)


@known_keywords
def multistep(init_value: float, milestones: Iterable[int], *, gamma: float = 0.1) -> Schedule:
    r""":math:`a \, \gamma^{n}`, n the number of milestones reached. torch's `MultiStepLR`.

    Args:
        init_value: a, finite.
        milestones: updates, each at least 1; a repeated milestone counts twice.
        gamma: > 0.

    Raises:
        ConfigError: a number is out of range.

    Example:
        >>> [round(float(multistep(1.0, [10, 15])(t)), 4) for t in (9, 10, 15)]
        [1.0, 0.1, 0.01]
    """
    points = listed("multistep", "milestones=[30, 60]", milestones=milestones)
    check_finite("multistep", init_value=init_value)
    for milestone in points:
        check_count("multistep", least=1, milestones=milestone)
    check_positive("multistep", gamma=gamma)

    def schedule(count: Count) -> Tensor:
        t = count_as_float(count)
        reached = torch.zeros_like(t)
        for milestone in points:
            reached = reached + (t >= milestone)
        return init_value * gamma**reached

    return schedule


@known_keywords
def one_cycle(
    max_lr: float,
    total_steps: int,
    *,
    pct_start: float = 0.3,
    anneal_strategy: Literal["cos", "linear"] = "cos",
    div_factor: float = 25.0,
    final_div_factor: float = 1e4,
    three_phase: bool = False,
) -> Schedule:
    """Rise from ``max_lr / div_factor`` to ``max_lr``, fall to the initial value over ``final_div_factor``.

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
        ConfigError: a number is out of range, a phase has no update, or the strategy is unknown.

    References:
        Smith and Topin, 2017, Super-convergence.

    Example:
        >>> [round(float(one_cycle(1.0, 10)(t)), 4) for t in (0, 2, 9)]
        [0.04, 1.0, 0.0]
    """
    check_finite("one_cycle", max_lr=max_lr)
    check_count("one_cycle", least=2, total_steps=total_steps)
    check_positive("one_cycle", pct_start=pct_start, div_factor=div_factor, final_div_factor=final_div_factor)
    check_choice("one_cycle", ("cos", "linear"), anneal_strategy=anneal_strategy)
    initial, top = max_lr / div_factor, pct_start * total_steps - 1
    middle = [(2 * pct_start * total_steps - 2, initial)] if three_phase else []
    points = [(0.0, initial), (top, max_lr), *middle, (float(total_steps - 1), initial / final_div_factor)]
    if any(later <= sooner for (sooner, _), (later, _) in pairwise(points)):
        raise ConfigError(
            f"pct_start={pct_start} of total_steps={total_steps} leaves a phase without an update",
            where="one_cycle",
            hint="pct_start=0.3, total_steps=100",
        )
    return lambda count: interpolate_points(
        count_as_float(count), points, half_cosine if anneal_strategy == "cos" else line
    )


@known_keywords
def piecewise(
    init_value: float,
    boundaries_and_scales: Mapping[int, float],
    *,
    interpolate_type: Literal["linear", "cosine"] | None = None,
) -> Schedule:
    """Multiply ``init_value`` by the scale of every boundary reached, in steps or interpolated.

    Args:
        init_value: finite.
        boundaries_and_scales: update -> factor >= 0; updates of at least 1.
        interpolate_type: interpolation between the values of two boundaries. None: a step at each boundary.

    Raises:
        ConfigError: a number is out of range, the boundaries are not a mapping, or the interpolation is unknown.

    Example:
        >>> [float(piecewise(1.0, {10: 0.5, 20: 0.5})(t)) for t in (9, 10, 20)]
        [1.0, 0.5, 0.25]
        >>> float(piecewise(1.0, {10: 0.5}, interpolate_type="linear")(5))
        0.75
    """
    check_finite("piecewise", init_value=init_value)
    mapping: Any = boundaries_and_scales
    if not isinstance(mapping, Mapping):
        problem = f"boundaries_and_scales={mapping!r} is not a mapping"
        raise ConfigError(problem, where="piecewise", hint="{30: 0.1, 60: 0.1}")
    for boundary in boundaries_and_scales:
        check_count("piecewise", least=1, boundaries_and_scales=boundary)
    points = [(0.0, init_value)]
    for boundary, scale in sorted(boundaries_and_scales.items()):
        check_finite("piecewise", boundaries_and_scales=scale)
        if scale < 0:
            raise ConfigError(
                f"the scale {scale} at {boundary} is negative", where="piecewise", hint=f"{{{boundary}: 0.1}}"
            )
        points.append((float(boundary), points[-1][1] * scale))
    interpolations = {None: hold, "linear": line, "cosine": half_cosine}
    check_choice("piecewise", interpolations, interpolate_type=interpolate_type)
    return lambda count: interpolate_points(count_as_float(count), points, interpolations[interpolate_type])
