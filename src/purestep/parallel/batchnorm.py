"""Batch normalization with the statistics of all processes' rows."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..torch_ext import tracing
from . import collectives, passes

_FORWARDS = {kind.forward for kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)}


def trained(module: nn.Module) -> list[str]:
    """The names of the layers that normalize by the statistics of a batch while they train."""
    layers = module.named_modules()
    return [name for name, part in layers if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training]  # pyright: ignore[reportPrivateUsage]  # the base class has no public name


def synchronize(module: nn.Module) -> None:
    """Let these layers use the statistics of all processes.

    Args:
        module: changed.

    Raises:
        ConfigError: a layer overrides torch's forward method.
    """
    for name in trained(module):
        layer: Any = module.get_submodule(name)
        if type(layer).forward not in _FORWARDS:
            raise ConfigError(
                f"the layer {name} is a {type(layer).__name__}, whose own forward method cannot be synchronized",
                where="distribute",
                hint='batchnorm="average", or use torch.nn.BatchNorm2d and its kind',
            )
        layer.forward = types.MethodType(_forward, layer)


def _forward(layer: Any, x: Tensor) -> Tensor:
    """`F.batch_norm` in train mode, over the rows of all processes that count. (N, C, ...) -> the same."""
    if x.dim() < 2:
        raise ValueError(f"{type(layer).__name__} expects (N, C, ...), not {list(x.shape)}")
    current = passes.current()
    passes.meet(f"the statistics of a {type(layer).__name__}")
    values = x.double() if x.dtype == torch.float64 else x.float()
    mean, variance, count = _statistics(values, current.counts)
    if x.numel() == x.shape[1]:
        mean = _of_several(mean, count, x)
    _track(layer, mean.detach(), variance.detach(), count)
    shape = [1, -1, *[1] * (x.dim() - 2)]
    result = (values - mean.view(shape)) * (variance + layer.eps).rsqrt().view(shape)
    if layer.weight is not None:
        result = result * layer.weight.to(values.dtype).view(shape)
    if layer.bias is not None:
        result = result + layer.bias.to(values.dtype).view(shape)
    return _of_counted(result.to(x.dtype), current)


def _statistics(x: Tensor, counts: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance of each channel, (C,), and the number of values of a channel, (): one small collective."""
    dims = [0, *range(2, x.dim())]
    size = x.numel() // max(x.shape[1], 1)
    own = x.new_full((1,), float(size)) if counts is None else (counts > 0).to(x.dtype).reshape(1) * size
    center = x.mean(dims)
    squares = (x - center.view([1, -1, *[1] * (x.dim() - 2)])).square().sum(dims)
    rows = collectives.gathered(torch.cat([center, squares, own]).unsqueeze(0), "batch")
    centers, sums, numbers = rows.split([x.shape[1], x.shape[1], 1], dim=1)
    held = numbers > 0
    count = numbers.sum()
    total = count.clamp(min=1.0)
    mean = (torch.where(held, centers, torch.zeros_like(centers)) * (numbers / total)).sum(0)
    spread = torch.where(held, sums + numbers * (centers - mean).square(), torch.zeros_like(sums))
    return mean, spread.sum(0) / total, count


def _of_several(mean: Tensor, count: Tensor, x: Tensor) -> Tensor:
    """The mean of a channel, if it has more than one value in all processes together; in a graph, nan if it has one.

    Raises:
        ValueError: as torch's, in every process.
    """
    if not tracing.may_read(count):
        return torch.where(count == 1, torch.full_like(mean, torch.nan), mean)
    if float(count.detach()) == 1:
        raise ValueError(f"Expected more than 1 value per channel when training, got input size {list(x.shape)}")
    return mean


def _track(layer: Any, mean: Tensor, variance: Tensor, count: Tensor) -> None:
    """Update the running statistics as torch does: with the unbiased variance."""
    if not layer.track_running_stats or layer.running_mean is None:
        return
    factor: Any = layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        if factor is None:
            factor = 1.0 / layer.num_batches_tracked.to(mean.dtype)
    unbiased = variance * (count / (count - 1).clamp(min=1.0))
    for running, found in ((layer.running_mean, mean), (layer.running_var, unbiased)):
        running.copy_((1 - factor) * running + factor * found.to(running.dtype))


def _of_counted(value: Tensor, current: passes.Pass) -> Tensor:
    """The value. A loss of weight 0 is 0/0: its gradient, which would reach all processes, is dropped."""
    return _Counted.apply(value, current)  # pyright: ignore[reportReturnType]


class _Counted(torch.autograd.Function):
    @staticmethod
    def forward(value: Tensor, current: passes.Pass) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.current = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad, weight = grads[0], ctx.current.weight
        if weight is None:
            return grad, None
        # Other processes' losses reach this layer through a later one: they are finite, and stay.
        return torch.where((weight > 0) | (grad.abs() < torch.inf), grad, torch.zeros_like(grad)), None
