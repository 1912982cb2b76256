"""Dropout with the same masks under `torch.func` as in eager mode.

Torch's dropout allocates its mask in the input's layout and fills it in memory order. Under a transform of `torch.func`
the mask is contiguous, so for a transposed input other elements are dropped, and the gradient of `torch.func.grad`
differs from that of `torch.autograd.grad`. The seed of the masks is the step's: see `step.random_draws`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..torch_ext import tracing

_ALPHA = 1.7580993408473766


class EagerMasks(TorchFunctionMode):
    """Mode in which dropout on the CPU allocates its mask in the input's layout under transforms too, except vmap.

    Args:
        mapped: under vmap too, where the mask gets the layout of one mapped index.

    Example:
        >>> def dropped(x):
        ...     return torch.nn.functional.dropout(x.t()).sum()
        >>> x = torch.arange(12.0).view(3, 4).requires_grad_()
        >>> _ = torch.manual_seed(0)
        >>> expected, = torch.autograd.grad(dropped(x), x)
        >>> _ = torch.manual_seed(0)
        >>> with EagerMasks():
        ...     bool((torch.func.grad(dropped)(x) == expected).all())
        True
    """

    def __init__(self, *, mapped: bool = False) -> None:
        super().__init__()
        self._mapped = mapped

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_dynamo_compiling():  # some of its stand-ins for functions cannot be hashed
            rule = next((rule for known, rule in _RULES.items() if func is known), None)
        else:
            rule = _RULES.get(func)
        return func(*args, **kwargs) if rule is None else rule(func, self._mapped, *args, **kwargs)


def _rule(drop: Callable[[Tensor, Tensor, float], Tensor], training: bool = True, written: bool = False) -> Any:
    """Return a replacement for a dropout function of torch, with the same parameter names."""

    def rule(
        func: Any,
        mapped: bool,
        input: Tensor,
        p: float = 0.5,
        training: bool | None = training,
        inplace: bool = written,
        **more: Any,
    ) -> Tensor:
        train = bool(more.get("train", training))
        if not train or not _is_replaced(input, p, mapped):
            given = {} if func in _PLAIN else {"inplace": inplace}
            return func(input, p, train, **given)
        dropped = drop(input, _kept(input, p, mapped), p)
        return input.copy_(dropped) if inplace else dropped

    return rule


def _is_replaced(value: Any, rate: Any, mapped: bool) -> bool:
    plain = isinstance(value, Tensor) and isinstance(rate, float) and 0 < rate < 1
    if not plain or value.device.type != "cpu" or 0 in value.shape:
        return False
    return mapped or torch.compiler.is_compiling() or not tracing.is_mapped(value)  # Dynamo cannot trace `mapped`


def _kept(value: Tensor, rate: float, mapped: bool) -> Tensor:
    """The mask: 1 for what is kept, drawn in the memory order of the value."""
    mask = torch.empty_like(value)
    if not mapped or tracing.is_mapped(value):
        return mask.bernoulli_(1 - rate)
    # `vmap` cannot fill a tensor that all mapped indices share, such as one of a shared batch.
    order = sorted(range(mask.dim()), key=mask.stride, reverse=True)
    drawn = torch.bernoulli(mask.permute(order), 1 - rate)
    return drawn.permute(sorted(range(mask.dim()), key=order.__getitem__))


def _dropped(value: Tensor, kept: Tensor, rate: float) -> Tensor:
    """The formula of `at::dropout`."""
    return value * kept.div_(1 - rate)


def _alpha_dropped(value: Tensor, kept: Tensor, rate: float) -> Tensor:
    """The formula of `at::alpha_dropout`."""
    scale = 1 / math.sqrt((_ALPHA**2 * rate + 1) * (1 - rate))
    shift = kept.add(-1).mul_(_ALPHA * scale).add_(_ALPHA * scale * rate)
    return (value * kept.mul_(scale)).add_(shift)


_torch: Any = torch  # its stubs lack some of these functions
_PLAIN = (_torch.dropout, _torch.dropout_, _torch.alpha_dropout, _torch.alpha_dropout_)

_RULES: dict[Any, Callable[..., Tensor]] = {
    torch.nn.functional.dropout: _rule(_dropped),
    torch.nn.functional.alpha_dropout: _rule(_alpha_dropped, training=False),
    _torch.dropout: _rule(_dropped),
    _torch.dropout_: _rule(_dropped, written=True),
    _torch.alpha_dropout: _rule(_alpha_dropped),
    _torch.alpha_dropout_: _rule(_alpha_dropped, written=True),
}
