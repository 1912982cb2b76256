"""Arithmetic for updates that keeps dtypes: a scalar never promotes a leaf, and 16-bit leaves compute in float32."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import PurestepError, StepContractError
from ..torch_ext import tracing
from ..types import Params
from .arguments import Rate, Scalar, Schedule

_DOUBLE = (torch.float64, torch.complex128)
_LOW_PRECISION = (torch.bfloat16, torch.float16)


def scalar_dtype(tree: Params) -> torch.dtype:
    """Dtype for scalars that multiply these tensors: float64 if any of them is float64 or complex128, else float32."""
    return torch.float64 if any(leaf.dtype in _DOUBLE for leaf in tree.values()) else torch.float32


def exact_dtype(tree: Params) -> torch.dtype:
    """Dtype for scalars that suffer cancellation: float64, as in torch's Python code; float32 on mps (no float64)."""
    return torch.float32 if any(leaf.device.type == "mps" for leaf in tree.values()) else torch.float64


def upcast(leaf: Tensor) -> Tensor:
    """Return the leaf in its compute dtype: float32 for 16-bit leaves, else unchanged."""
    return leaf.float() if leaf.dtype in _LOW_PRECISION else leaf


def upcast_dtype(leaf: Tensor) -> torch.dtype:
    """The dtype that `upcast` returns for this leaf."""
    return torch.float32 if leaf.dtype in _LOW_PRECISION else leaf.dtype


def multiply(leaf: Tensor, factor: Scalar) -> Tensor:
    """Return ``leaf * factor`` in the leaf's dtype: the factor promotes nothing and is not rounded to 16 bits.

    Example:
        >>> multiply(torch.ones((), dtype=torch.float32), torch.tensor(0.1, dtype=torch.float64)).dtype
        torch.float32

    Args:
        leaf: P, floating.
        factor: a number or a tensor, shape=().
    """
    if not isinstance(factor, Tensor) or (factor.dtype == leaf.dtype and leaf.dtype not in _LOW_PRECISION):
        return leaf * factor
    value = upcast(leaf)
    return (value * factor.to(value.dtype)).to(leaf.dtype)


def add_scaled(update: Tensor, param: Tensor, factor: Scalar) -> Tensor:
    """Return ``update + factor * param`` in the dtype of the update."""
    if isinstance(factor, Tensor):
        return (upcast(update) + multiply(upcast(param), factor)).to(update.dtype)
    return torch.add(update, param, alpha=factor).to(update.dtype)


def lerp(old: Tensor, new: Tensor, weight: Scalar) -> Tensor:
    """Return ``old + weight * (new - old)``, computed in the wider dtype of the two, in the dtype of ``old``."""
    start, end = _promoted(old, new)
    if isinstance(weight, Tensor):
        return (start + multiply(end - start, weight)).to(old.dtype)
    return torch.lerp(start, end, weight).to(old.dtype)


def _promoted(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Convert both to the wider dtype of the two."""
    if one.dtype == other.dtype:
        return one, other
    dtype = torch.promote_types(one.dtype, other.dtype)
    return one.to(dtype), other.to(dtype)


def complement_power(base: Scalar, count: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``1 - base ** count`` without cancellation: ``-expm1(count * log(base))``. shape=()."""
    if isinstance(base, Tensor):
        return -torch.expm1(count.to(dtype) * torch.log(base.to(dtype)))
    return -torch.expm1(count.to(dtype) * (math.log(base) if base else -math.inf))


def by_name(value: Tensor, names: Iterable[str]) -> dict[str, Tensor]:
    """Split a tensor with a number for each name, in sorted order, or with one for all, into a scalar for each.

    Example:
        >>> {name: value.item() for name, value in by_name(torch.tensor([1, 2]), ["b", "a"]).items()}
        {'a': 1, 'b': 2}
    """
    if value.dim() == 0:
        return dict.fromkeys(names, value)
    return dict(zip(sorted(names), value.unbind(), strict=True))


def zeros_like(params: Params, dtype: torch.dtype | None = None) -> Params:
    """Return zeros with the shapes and memory layouts of the parameters, in ``dtype`` or in each parameter's dtype."""
    return {name: torch.zeros_like(param, dtype=dtype, requires_grad=False) for name, param in params.items()}


def zeros_like_squares(params: Params, dtype: torch.dtype | None = None) -> Params:
    """Return zeros for means of squares: as `zeros_like`, but float32 for float16 parameters.

    In float16 the square of any number below 2e-4 is 0, and torch's own optimizers then divide by 0.
    """
    default = {torch.float16: torch.float32}
    return {
        name: torch.zeros_like(param, dtype=dtype or default.get(param.dtype), requires_grad=False)
        for name, param in params.items()
    }


def rate_at(rate: Rate, step: Tensor) -> Scalar:
    """Return the rate of the update after ``step`` updates.

    The value itself is not read from the device: the train step refuses an update whose rate is not in [0, inf).

    Raises:
        StepContractError: the schedule fails, or returns something other than a real number.
    """
    if not callable(rate):
        return rate
    # Dynamo cannot trace the checks; `init` has run them on the same schedule outside of any graph.
    return rate(step) if torch.compiler.is_dynamo_compiling() else _checked_rate(rate, step)


def on_count(schedule: Rate, count: Tensor) -> Tensor:
    """Return a schedule's value at a count of updates as a float32 scalar on the device of the count.

    Example:
        >>> on_count(lambda count: count * 0.5, torch.tensor(3)).item()
        1.5
    """
    value = rate_at(schedule, count)
    if isinstance(value, Tensor):
        return value.to(device=count.device, dtype=torch.float32)
    return torch.full((), value, dtype=torch.float32, device=count.device)


def _checked_rate(schedule: Schedule, step: Tensor) -> Scalar:
    try:
        value: Any = schedule(step)
    except PurestepError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise _schedule_error(schedule, step, f"raised {type(error).__name__}: {error}") from error
    if isinstance(value, Tensor):
        if value.is_nested or value.dim() or value.is_complex():
            shape = "that is nested" if value.is_nested else f"of shape {list(value.shape)}"
            raise _schedule_error(schedule, step, f"returned a {value.dtype} tensor {shape}")
    elif not isinstance(value, int | float):
        raise _schedule_error(schedule, step, f"returned a {type(value).__name__}")
    elif torch.finfo(torch.float32).max < abs(value) < math.inf:
        raise _schedule_error(schedule, step, "returned a number that float32 cannot hold")
    else:
        return float(value)
    return value


def _schedule_error(schedule: Schedule, step: Tensor, problem: str) -> StepContractError:
    name = getattr(schedule, "__qualname__", type(schedule).__name__)
    return StepContractError(
        f"the schedule {problem} for count {int(step)}",
        where=f"schedule {name}",
        hint="return a number or a 0-d tensor for every count of updates, as schedules.warmup_cosine(...) does",
    )


def is_enabled(scalar: Scalar) -> bool:
    """Return True unless the scalar is the number 0. A tensor enables its part, since its value may change later."""
    return isinstance(scalar, Tensor) or scalar != 0


def decay_square(nu: Tensor, update: Tensor, decay: Scalar) -> Tensor:
    """Return ``decay * nu + (1 - decay) * update ** 2`` in the dtype of ``nu``."""
    old, new = _promoted(nu, update)
    if isinstance(decay, Tensor):
        return (multiply(old, decay) + multiply(new * new, 1 - decay)).to(nu.dtype)
    return torch.addcmul(old * decay, new, new, value=1 - decay).to(nu.dtype)


def safe_sqrt(square: Tensor) -> Tensor:
    """Return the square root in at least float32, with derivative 0 at 0.

    Autograd's derivative is inf at 0, and inf times a gradient of 0 is nan. In a graph this is the plain root, since a
    compiled step is not differentiated.
    """
    value = upcast(square)
    if tracing.in_graph() or not tracing.followed([value]):
        return value.sqrt()
    is_zero = value == 0
    return torch.where(is_zero, value, torch.where(is_zero, 1.0, value).sqrt())


class _Correction(NamedTuple):
    """The bias corrections of Adam's quotient, in its compute dtype."""

    inverse: Scalar  # 1 / root_weight
    eps: Scalar
    weight: Scalar  # mean_weight


def adam_quotients(
    updates: Params, mu: Params, nu: Params, mean_weight: Tensor, root_weight: Tensor, eps: Scalar
) -> Params:
    """Return ``mu / mean_weight / (sqrt(nu) / root_weight + eps)`` for every name.

    Each quotient is computed in at least float32 and rounded to the dtype of its update. Both weights have shape=(), or
    shape=(n,) with one weight per name (`by_name`).
    """
    scalars = [scalar for scalar in (mean_weight, root_weight, eps) if isinstance(scalar, Tensor)]
    quotient = _quotient_in_place if tracing.may_overwrite([*mu.values(), *nu.values(), *scalars]) else _quotient
    inverse = 1 / root_weight
    corrections = {  # Once per dtype, not once per leaf.
        dtype: _corrections(updates, inverse.to(dtype), in_dtype(eps, dtype), mean_weight.to(dtype))
        for dtype in dict.fromkeys(upcast_dtype(leaf) for leaf in nu.values())
    }
    return {
        name: quotient(upcast(mu[name]), upcast(nu[name]), corrections[upcast_dtype(nu[name])][name]).to(update.dtype)
        for name, update in updates.items()
    }


def _corrections(names: Iterable[str], inverse: Tensor, eps: Scalar, weight: Tensor) -> dict[str, _Correction]:
    if inverse.dim() == 0:
        return dict.fromkeys(names, _Correction(inverse, eps, weight))
    inverses, weights = by_name(inverse, names), by_name(weight, names)
    return {name: _Correction(inverses[name], eps, weights[name]) for name in names}


def _quotient(mean: Tensor, square: Tensor, by: _Correction) -> Tensor:
    # Multiplying by the inverse is faster: in a large update most of the time goes to divisions and roots.
    return mean / ((safe_sqrt(square) * by.inverse + by.eps) * by.weight)


def _quotient_in_place(mean: Tensor, square: Tensor, by: _Correction) -> Tensor:
    # The same values; in eager mode allocating memory costs more than the arithmetic.
    divisor = square.sqrt().mul_(by.inverse).add_(by.eps).mul_(by.weight)
    return torch.div(mean, divisor, out=divisor) if mean.dtype == divisor.dtype else mean / divisor


def divide(leaf: Tensor, divisor: Scalar) -> Tensor:
    """Return ``leaf / divisor`` in the leaf's dtype."""
    return leaf / in_dtype(divisor, leaf.dtype)


def in_dtype(scalar: Scalar, dtype: torch.dtype) -> Scalar:
    """Convert a tensor scalar to a leaf's dtype, so that it promotes nothing; return a number unchanged."""
    return scalar.to(dtype) if isinstance(scalar, Tensor) else scalar
