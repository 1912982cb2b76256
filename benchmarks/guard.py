"""Nobody wins by doing less: the first losses, the weights and the average after them have to agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

STEPS = 6  # that are compared


class Seen(NamedTuple):
    """What a contestant showed after the first steps."""

    losses: Sequence[float]
    weights: Mapping[str, Tensor]
    shadow: Mapping[str, Tensor]


def copied(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, in memory of its own."""
    return {name: value.detach().to("cpu", torch.float32, copy=True) for name, value in named.items()}


def disagreement(
    seen: Seen, reference: Seen, start: Mapping[str, Tensor], *, tolerance: float, drift: float
) -> str | None:
    """In what a contestant differs from the reference; None where it does not.

    Args:
        seen: of the contestant.
        reference: of the one that the others are compared with.
        start: the weights that both began with.
        tolerance: of losses, relative.
        drift: of weights and average, as a share of the way that the weights have come.
    """
    for step, (found, expected) in enumerate(zip(seen.losses, reference.losses, strict=True), 1):
        if not abs(found - expected) <= tolerance * max(abs(expected), 1e-6):  # also where one is not a number
            return f"loss of step {step} is {found:.6g}, not {expected:.6g}"
    way = distance(reference.weights, start)
    for what, left, right in (
        ("weights", seen.weights, reference.weights),
        ("average", seen.shadow, reference.shadow),
    ):
        if set(left) != set(right):
            return f"{what} have other names: {sorted(set(left) ^ set(right))[:4]}"
        off = distance(left, right)
        if not off <= drift * way:
            return f"{what} are {off / way:.2g} of their way off after {len(seen.losses)} steps"
    return None


def distance(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """The 2-norm of the difference of all numbers together."""
    squares = [float((left[name].double() - right[name].double()).square().sum()) for name in right]
    return sum(squares) ** 0.5
