"""Arithmetic that keeps dtypes: scalars of any dtype never promote a leaf, 16-bit leaves are computed in float32."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from .. import tracing
from ..errors import PurestepError, StepContractError
from ..types import Empty, Missed, Params, Tree

Scalar: TypeAlias = float | Tensor
"""A Python number, which stays a constant in a compiled graph, or a 0-d tensor, which may change from call to call."""

Schedule: TypeAlias = Callable[[Tensor], Tensor]
"""Count of updates done, shape=() int64, to a value, shape=()."""
Rate: TypeAlias = float | Tensor | Schedule

_LOW_PRECISION = (torch.bfloat16, torch.float16)


def scalar_dtype(tree: Params) -> torch.dtype:
    """What scalars that multiply these tensors are computed in: float64 where one of them is float64, else float32."""
    return torch.float64 if any(leaf.dtype == torch.float64 for leaf in tree.values()) else torch.float32


def exact_dtype(tree: Params) -> torch.dtype:
    """Float64 for scalars that cancel, as torch computes them in Python; float32 where the device has no float64."""
    return torch.float32 if any(leaf.device.type == "mps" for leaf in tree.values()) else torch.float64


def wide(leaf: Tensor) -> Tensor:
    """The leaf in the dtype to compute in: float32 for the 16-bit ones, else as it is."""
    return leaf.float() if leaf.dtype in _LOW_PRECISION else leaf


def wide_dtype(leaf: Tensor) -> torch.dtype:
    """The dtype that `wide` gives this leaf."""
    return torch.float32 if leaf.dtype in _LOW_PRECISION else leaf.dtype


def times(leaf: Tensor, factor: Scalar) -> Tensor:
    """``leaf * factor`` in the leaf's dtype: a 0-d float64 factor promotes nothing, and is not rounded to 16 bits.

    Args:
        leaf: P, floating.
        factor: a number or a tensor, shape=().

    Example:
        >>> times(torch.ones((), dtype=torch.float32), torch.tensor(0.1, dtype=torch.float64)).dtype
        torch.float32
    """
    if not isinstance(factor, Tensor) or (factor.dtype == leaf.dtype and leaf.dtype not in _LOW_PRECISION):
        return leaf * factor
    value = wide(leaf)
    return (value * factor.to(value.dtype)).to(leaf.dtype)


def lerp(old: Tensor, new: Tensor, weight: Scalar) -> Tensor:
    """``old + weight * (new - old)``, computed in the wider dtype of the two and kept in that of ``old``."""
    start, end = _promoted(old, new)
    if isinstance(weight, Tensor):
        return (start + times(end - start, weight)).to(old.dtype)
    return torch.lerp(start, end, weight).to(old.dtype)


def _promoted(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the wider dtype of the two."""
    if one.dtype == other.dtype:
        return one, other
    dtype = torch.promote_types(one.dtype, other.dtype)
    return one.to(dtype), other.to(dtype)


def complement_power(base: Scalar, count: Tensor, dtype: torch.dtype) -> Tensor:
    """``1 - base ** count`` without cancellation: ``-expm1(count * log(base))``. shape=()."""
    if isinstance(base, Tensor):
        return -torch.expm1(count.to(dtype) * torch.log(base.to(dtype)))
    return -torch.expm1(count.to(dtype) * (math.log(base) if base else -math.inf))


def zero_count(params: Params) -> Tensor:
    """A counter at 0 on the parameters' device. shape=(), dtype=int64."""
    device = next(iter(params.values())).device if params else None
    return torch.zeros((), dtype=torch.int64, device=device)


def none_missed(params: Params) -> Missed:
    """No parameter has missed an update."""
    count = zero_count(params)
    return Missed(dict.fromkeys(params, Empty()), count.expand(len(params)).clone())


def own_count(step: Tensor, missed: Tree, names: Collection[str]) -> Tensor:
    """Updates of each parameter: those that it had a gradient in.

    Args:
        step: shape=(), int64: updates so far.
        missed: how many of them each parameter has missed; Empty for none.
        names: of parameters, or of flat buffers of such as have missed as many.

    Returns:
        shape=() where it is the same for all names, else shape=(n,), for `each`.

    Example:
        >>> missed = none_missed({"a": torch.ones(2), "b": torch.ones(2)})
        >>> each(own_count(torch.tensor(3), missed, ["a", "b"]), ["a", "b"])
        {'a': tensor(3), 'b': tensor(3)}
        >>> own_count(torch.tensor(3), missed._replace(counts=torch.tensor([0, 2])), ["a", "b"]).tolist()
        [3, 1]
    """
    if not isinstance(missed, Missed) or not names:
        return step
    counts = missed.counts
    if counts.device.type == "cpu" and tracing.may_read(counts) and not bool(counts.any()):
        return step  # one scalar for all, as long as no parameter lags behind
    if len(names) < len(missed.names):
        places = {name: place for place, name in enumerate(sorted(missed.names))}
        picked = [counts[places[name]] for name in sorted(names)]
        return step - (picked[0] if len(picked) == 1 else torch.stack(picked))
    return step - (counts[0] if len(names) == 1 else counts)


def each(value: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
    """A scalar of every name, from what was computed from an `own_count`.

    Example:
        >>> {name: value.item() for name, value in each(torch.tensor([1, 2]), ["b", "a"]).items()}
        {'a': 1, 'b': 2}
    """
    if value.dim() == 0:
        return dict.fromkeys(names, value)
    return dict(zip(sorted(names), value.unbind(), strict=True))


def zeros_like(params: Params, dtype: torch.dtype | None = None) -> Params:
    """Zeros of the parameters' shapes and memory layout, in ``dtype`` or each in its parameter's."""
    return {name: torch.zeros_like(param, dtype=dtype, requires_grad=False) for name, param in params.items()}


def zeros_like_squares(params: Params, dtype: torch.dtype | None = None) -> Params:
    """Zeros for means of squares: as `zeros_like`, but float32 where the parameter is float16.

    There the square of anything below 2e-4 is 0, and torch's own optimizers divide by 0.
    """
    default = {torch.float16: torch.float32}
    return {
        name: torch.zeros_like(param, dtype=dtype or default.get(param.dtype), requires_grad=False)
        for name, param in params.items()
    }


def rate_at(rate: Rate, step: Tensor) -> Scalar:
    """The rate of the update after ``step`` updates.

    Raises:
        StepContractError: a schedule that fails, or gives something else than a real number. What the number is stays
            on the device: the step refuses an update whose rate is not in [0, inf).
    """
    if not callable(rate):
        return rate
    # `init` has asked the same schedule outside of any graph.
    return rate(step) if torch.compiler.is_dynamo_compiling() else _checked_rate(rate, step)


def on_count(schedule: Rate, count: Tensor) -> Tensor:
    """A schedule's scalar at a count of updates, float32, on the device of the count.

    Example:
        >>> on_count(lambda count: count * 0.5, torch.tensor(3)).item()
        1.5
    """
    found = rate_at(schedule, count)
    if isinstance(found, Tensor):
        return found.to(device=count.device, dtype=torch.float32)
    return torch.full((), found, dtype=torch.float32, device=count.device)


def _checked_rate(schedule: Schedule, step: Tensor) -> Scalar:
    try:
        found: Any = schedule(step)
    except PurestepError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise _no_rate(schedule, step, f"raised {type(error).__name__}: {error}") from error
    if isinstance(found, Tensor):
        if found.is_nested or found.dim() or found.is_complex():
            shape = "that is nested" if found.is_nested else f"of shape {list(found.shape)}"
            raise _no_rate(schedule, step, f"gave a {found.dtype} tensor {shape}")
    elif not isinstance(found, int | float):
        raise _no_rate(schedule, step, f"gave a {type(found).__name__}")
    return found


def _no_rate(schedule: Schedule, step: Tensor, found: str) -> StepContractError:
    name = getattr(schedule, "__qualname__", type(schedule).__name__)
    return StepContractError(
        f"the schedule {found} for count {int(step)}",
        where=f"schedule {name}",
        hint="a 0-d tensor or a number for every count of updates: schedules.warmup_cosine(...)",
    )


def is_on(scalar: Scalar) -> bool:
    """Whether the part that this scalar switches is there: a tensor may be anything later, so it is."""
    return isinstance(scalar, Tensor) or scalar != 0


def decay_square(nu: Tensor, update: Tensor, decay: Scalar) -> Tensor:
    """``decay * nu + (1 - decay) * update ** 2`` in the dtype of ``nu``."""
    old, new = _promoted(nu, update)
    if isinstance(decay, Tensor):
        return (times(old, decay) + times(new * new, 1 - decay)).to(nu.dtype)
    return torch.addcmul(old * decay, new, new, value=1 - decay).to(nu.dtype)


def root(square: Tensor) -> Tensor:
    """The root in at least float32, with a derivative of 0 at 0: autograd's is inf there, times a gradient of 0 nan.

    In a graph it is the plain root: nobody differentiates through a compiled step.
    """
    value = wide(square)
    if tracing.in_graph() or not tracing.followed([value]):
        return value.sqrt()
    zero = value == 0
    return torch.where(zero, value, torch.where(zero, 1.0, value).sqrt())


class _Correction(NamedTuple):
    """What Adam's quotient is corrected by, in the dtype that it is computed in."""

    inverse: Scalar  # of the weight of the root
    eps: Scalar
    weight: Scalar  # of the mean


def adam_ratios(
    updates: Params, mu: Params, nu: Params, mean_weight: Tensor, root_weight: Tensor, eps: Scalar
) -> Params:
    """``mu / mean_weight / (sqrt(nu) / root_weight + eps)`` of every name, computed in at least float32 and rounded to
    the dtype of its update; both weights are one for all, or one a name (`each`)."""
    scalars = [scalar for scalar in (mean_weight, root_weight, eps) if isinstance(scalar, Tensor)]
    ratio = _ratio_in_place if tracing.may_overwrite([*mu.values(), *nu.values(), *scalars]) else _ratio
    inverse = 1 / root_weight
    corrections = {  # once, not once a leaf
        dtype: _corrections(updates, inverse.to(dtype), in_dtype(eps, dtype), mean_weight.to(dtype))
        for dtype in dict.fromkeys(wide_dtype(leaf) for leaf in nu.values())
    }
    return {
        name: ratio(wide(mu[name]), wide(nu[name]), corrections[wide_dtype(nu[name])][name]).to(update.dtype)
        for name, update in updates.items()
    }


def _corrections(names: Iterable[str], inverse: Tensor, eps: Scalar, weight: Tensor) -> dict[str, _Correction]:
    if inverse.dim() == 0:
        return dict.fromkeys(names, _Correction(inverse, eps, weight))
    inverses, weights = each(inverse, names), each(weight, names)
    return {name: _Correction(inverses[name], eps, weights[name]) for name in names}


def _ratio(mean: Tensor, square: Tensor, by: _Correction) -> Tensor:
    # Times the inverse: of a large update, divisions and roots are the larger part of the arithmetic.
    return mean / ((root(square) * by.inverse + by.eps) * by.weight)


def _ratio_in_place(mean: Tensor, square: Tensor, by: _Correction) -> Tensor:
    # The same: in eager mode fresh memory costs more than the arithmetic.
    spread = square.sqrt().mul_(by.inverse).add_(by.eps).mul_(by.weight)
    return torch.div(mean, spread, out=spread) if mean.dtype == spread.dtype else mean / spread


def divided(leaf: Tensor, divisor: Scalar) -> Tensor:
    """``leaf / divisor`` without promotion by a 0-d divisor."""
    return leaf / in_dtype(divisor, leaf.dtype)


def in_dtype(scalar: Scalar, dtype: torch.dtype) -> Scalar:
    """The scalar in a leaf's dtype, so that it promotes nothing."""
    return scalar.to(dtype) if isinstance(scalar, Tensor) else scalar
