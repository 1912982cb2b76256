"""Steps and phases: values that hold between the counts at which they change, or that lead from one to the next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import ConfigError
from ..pickling import recipe
from ..validation import check_count, check_finite, check_positive, listed
from .interpolate import Count, Schedule, clock, half_wave, jump, line, through


@recipe
def step(init_value: float, step_size: int, *, gamma: float = 0.1) -> Schedule:
    r""":math:`a \, \gamma^{\lfloor t / n \rfloor}`. torch's `StepLR`.

    Args:
        init_value: a, finite.
        step_size: n, updates, at least 1.
        gamma: > 0.

    Raises:
        ConfigError: for numbers out of range.

    Example:
        >>> [round(float(step(1.0, 10)(t)), 4) for t in (9, 10, 20)]
        [1.0, 0.1, 0.01]
    """
    check_finite("step", init_value=init_value)
    check_count("step", least=1, step_size=step_size)
    check_positive("step", gamma=gamma)
    return lambda count: init_value * gamma ** torch.floor(clock(count) / step_size)


@recipe
def multistep(init_value: float, milestones: Iterable[int], *, gamma: float = 0.1) -> Schedule:
    r""":math:`a \, \gamma^{n}`, n the number of milestones reached. torch's `MultiStepLR`.

    Args:
        init_value: a, finite.
        milestones: updates, each at least 1; one that is there twice counts twice.
        gamma: > 0.

    Raises:
        ConfigError: for numbers out of range.

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
        t = clock(count)
        reached = torch.zeros_like(t)
        for milestone in points:
            reached = reached + (t >= milestone)
        return init_value * gamma**reached

    return schedule


@recipe
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
    """From ``max_lr / div_factor`` up to ``max_lr``, down to the first over ``final_div_factor``: torch's `OneCycleLR`.

    The momentum is left alone (torch cycles it too unless told ``cycle_momentum=False``).

    Args:
        max_lr: finite.
        total_steps: updates, at least 2; the last value is that of update ``total_steps - 1``, as in torch.
        pct_start: the share spent going up, in (0, 1), with ``three_phase`` in (0, 0.5); more than one update.
        anneal_strategy: half waves or straight lines.
        div_factor: > 0.
        final_div_factor: > 0.
        three_phase: down to the first value in the time that it took to go up, and only then to the last.

    Raises:
        ConfigError: for numbers out of range, a phase without an update, or no such strategy.

    References:
        Smith and Topin, 2017, Super-convergence.

    Example:
        >>> [round(float(one_cycle(1.0, 10)(t)), 4) for t in (0, 2, 9)]
        [0.04, 1.0, 0.0]
    """
    check_finite("one_cycle", max_lr=max_lr)
    check_count("one_cycle", least=2, total_steps=total_steps)
    check_positive("one_cycle", pct_start=pct_start, div_factor=div_factor, final_div_factor=final_div_factor)
    if anneal_strategy not in ("cos", "linear"):
        raise ConfigError(f"anneal_strategy={anneal_strategy!r}", where="one_cycle", hint='"cos" or "linear"')
    first, up = max_lr / div_factor, pct_start * total_steps - 1
    back = [(2 * pct_start * total_steps - 2, first)] if three_phase else []
    points = [(0.0, first), (up, max_lr), *back, (float(total_steps - 1), first / final_div_factor)]
    if any(later <= sooner for (sooner, _), (later, _) in pairwise(points)):
        raise ConfigError(
            f"pct_start={pct_start} of total_steps={total_steps} leaves a phase without an update",
            where="one_cycle",
            hint="pct_start=0.3, total_steps=100",
        )
    return lambda count: through(clock(count), points, half_wave if anneal_strategy == "cos" else line)


@recipe
def piecewise(
    init_value: float,
    boundaries_and_scales: Mapping[int, float],
    *,
    interpolate_type: Literal["linear", "cosine"] | None = None,
) -> Schedule:
    """``init_value`` times every scale whose boundary has been reached, in jumps or interpolated.

    Args:
        init_value: finite.
        boundaries_and_scales: update -> factor >= 0; updates of at least 1.
        interpolate_type: how it goes from one boundary's value to the next one's. None: it jumps at the boundary.

    Raises:
        ConfigError: for numbers out of range, what is no mapping, or no such interpolation.

    Example:
        >>> [float(piecewise(1.0, {10: 0.5, 20: 0.5})(t)) for t in (9, 10, 20)]
        [1.0, 0.5, 0.25]
        >>> float(piecewise(1.0, {10: 0.5}, interpolate_type="linear")(5))
        0.75
    """
    check_finite("piecewise", init_value=init_value)
    given: Any = boundaries_and_scales
    if not isinstance(given, Mapping):
        found = f"boundaries_and_scales={given!r} is no mapping"
        raise ConfigError(found, where="piecewise", hint="{30: 0.1, 60: 0.1}")
    for boundary in boundaries_and_scales:
        check_count("piecewise", least=1, boundaries_and_scales=boundary)
    points = [(0.0, init_value)]
    for boundary, scale in sorted(boundaries_and_scales.items()):
        check_finite("piecewise", boundaries_and_scales=scale)
        if scale < 0:
            raise ConfigError(f"a scale of {scale} at {boundary}", where="piecewise", hint=f"{{{boundary}: 0.1}}")
        points.append((float(boundary), points[-1][1] * scale))
    ways = {None: jump, "linear": line, "cosine": half_wave}
    if interpolate_type not in ways:
        raise ConfigError(f"interpolate_type={interpolate_type!r}", where="piecewise", hint='"linear" or "cosine"')
    return lambda count: through(clock(count), points, ways[interpolate_type])
