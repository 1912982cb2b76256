"""Buffers that a forward pass writes: how those of several processes become one."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..errors import ConfigError
from ..model import write_check
from ..state import check_choice
from ..torch_ext import hidden
from ..types import Params
from . import collectives, placement

WAYS = ("sum", "mean", "local")
_GREATEST = "greatest"  # of a normalization's count of batches: a share without rows counts none
_WHERE = "distribute"


def ways_of(module: nn.Module, buffers: Params, given: Any) -> dict[str, str]:
    """Name of a buffer -> the way by which it is joined: by the patterns that are given, and for torch's layers.

    Args:
        module: in train mode.
        buffers: of the state; they may be on the meta device.
        given: patterns of names -> "sum", "mean" or "local".

    Raises:
        ConfigError: a pattern matches no buffer, or a way is unknown, or does not fit the buffer's dtype.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(
            f"buffers={given!r} is not a mapping", where=_WHERE, hint='buffers={"codebook.counts": "sum"}'
        )
    found = {name: way for name, way in _known(module).items() if name in buffers}
    for pattern, way in cast("Mapping[Any, Any]", given).items():
        check_choice(_WHERE, WAYS, **{f"buffers[{pattern!r}]": way})
        names = fnmatch.filter(buffers, str(pattern))
        if not names:
            hint = f"names are like {list(buffers)[:3]}"
            raise ConfigError(f"buffers has {pattern!r}, which matches no buffer", where=_WHERE, hint=hint)
        for name in names:
            dtype = buffers[name].dtype
            is_whole = not (dtype.is_floating_point or dtype.is_complex)
            if (way == "mean" and is_whole) or (way == "sum" and dtype == torch.bool):
                what = f'the buffer {name} is {dtype}, which has no "{way}"'
                raise ConfigError(what, where=_WHERE, hint='"sum" for counts, or "local"')
            found[name] = way
    return found


def _known(module: nn.Module) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, layer in module.named_modules():
        prefix = f"{name}." if name else ""
        if hidden.is_batch_norm(layer) or hidden.is_instance_norm(layer):
            found |= {f"{prefix}running_mean": "mean", f"{prefix}running_var": "mean"}
            found[f"{prefix}num_batches_tracked"] = _GREATEST
        elif type(layer).__name__ == "_SpectralNorm":  # of the weights alone
            found |= {f"{prefix}_u": "local", f"{prefix}_v": "local"}
    return found


def watched(ways: Mapping[str, str], buffers: Params) -> Callable[[Params], None]:
    """Return a function that takes the buffers after a forward pass, and refuses one that was written without a way.

    Args:
        ways: from `ways_of`.
        buffers: before the pass, which writes into them.

    Raises:
        ConfigError: from the returned function, with the name of the buffer and the three ways.
    """
    given = {name: value for name, value in buffers.items() if name not in ways}
    before = write_check.marks(given)

    def check(after: Params) -> None:
        now = write_check.marks(given)
        for name, value in given.items():
            if after[name] is not value or before.get(name) != now.get(name):
                raise ConfigError(
                    f"the forward pass writes the buffer {name}, and each process has a part of the rows",
                    where=_WHERE,
                    hint=f'ps.distribute(..., buffers={{{name!r}: "sum"}}) for what adds up over the rows (counts), '
                    '"mean" for a running mean over rows, "local" for what every process computes alike (calls)',
                )

    return check


def joined(ways: Mapping[str, str], before: Params, after: Params, weight: Tensor) -> Params:
    """The buffers of all processes: a collective.

    Args:
        ways: from `ways_of`.
        before: the forward pass.
        after: the forward pass of this process.
        weight: shape=(): of this process's rows; 0: they do not count.
    """
    means = [name for name in after if ways.get(name) == "mean"]
    sums = [name for name in after if ways.get(name) == "sum"]
    found = dict(after)
    if means or sums:
        share = weight.double().clamp(min=0.0)
        parts = [_wide(after[name]) * share for name in means]
        parts += [_wide(after[name]) - _wide(before[name]) for name in sums]
        parts = [torch.where(weight != 0, part, torch.zeros_like(part)) for part in parts]
        total, *parts = placement.all_reduced([share, *parts], "batch")
        divisor = torch.where(total > 0, total, torch.ones_like(total))
        for name, part in zip([*means, *sums], parts, strict=True):
            old = _wide(before[name])
            new = torch.where(total > 0, part / divisor, old) if ways[name] == "mean" else old + part
            found[name] = (torch.view_as_complex(new) if after[name].is_complex() else new).to(after[name].dtype)
    counts = {name: value for name, value in after.items() if ways.get(name) == _GREATEST}
    if counts:
        greatest = collectives.all_reduce(torch.stack(list(counts.values())), "batch", "max")
        found |= dict(zip(counts, greatest.unbind(), strict=True))
    return found


def _wide(value: Tensor) -> Tensor:
    """Float64 of real and complex numbers, int64 of whole ones."""
    if value.is_complex():
        return torch.view_as_real(value).double()
    return value.double() if value.is_floating_point() else value.long()
