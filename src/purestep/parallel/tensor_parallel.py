"""Tensor parallel by torch's own styles: parameters are parts at rest, and DTensors only inside of a step."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from torch import nn

from ..errors import ConfigError
from ..types import Params
from . import mesh as meshes

Plan = Mapping[str, Any]
_WHERE = "distribute"


class Split(NamedTuple):
    """A parameter that is a DTensor inside of a step."""

    placement: Any  # torch.distributed.tensor.Shard or Replicate
    shape: Any  # of the whole
    stride: tuple[int, ...]

    @property
    def dim(self) -> int:
        """The dimension that is cut; -1: none."""
        return self.placement.dim if self.placement.is_shard() else -1


def check(plan: Any, module: nn.Module) -> None:
    """Check that a plan maps names of layers to torch's styles.

    Raises:
        ConfigError: it does not, or a name matches no layer.
    """
    from torch.distributed.tensor.parallel import ParallelStyle

    cure = 'tensor={"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}'
    if not isinstance(plan, Mapping) or not all(isinstance(style, ParallelStyle) for style in plan.values()):
        raise ConfigError(f"tensor={plan!r} must map names of layers to styles", where=_WHERE, hint=cure)
    names = [name for name, _ in module.named_modules() if name]
    for pattern in plan:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"tensor has {pattern!r}, which matches no layer", where=_WHERE, hint=f"names are like {names[:3]}"
            )


def parallelized(plan: Plan, device_mesh: Any) -> Callable[[nn.Module], None]:
    """Return a function that applies a plan to a weightless module, in place."""

    def change(module: nn.Module) -> None:
        from torch.distributed.tensor.parallel import parallelize_module

        names = [name for name, _ in module.named_modules() if name]
        for pattern, style in plan.items():
            for name in names:
                if fnmatch.fnmatchcase(name, pattern):
                    # The weights are on the meta device: nothing is sent.
                    parallelize_module(module.get_submodule(name), device_mesh, style, src_data_rank=None)

    return change


def splits(
    module: nn.Module, count: int, frozen: Collection[str], ties: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Split]:
    """The parameters of a parallelized module that are DTensors, by name.

    Args:
        module: in which a plan was applied.
        count: processes of the axis "tensor".
        frozen: parameters that are not trained, which every process holds whole.
        ties: alias -> name of a parameter.

    Raises:
        ConfigError: a parameter is frozen, or a dimension cannot be divided into ``count`` equal parts; or two layers
            have one weight, and the plan does not cut it alike in both.
    """
    from torch.distributed.tensor import DTensor

    named = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    for alias, name in ties.items():
        if not {alias, name} <= named:  # of the objective's module
            continue
        parts = [_placement(module, each) for each in (name, alias)]
        if parts[0] != parts[1]:
            layers = [each.rpartition(".")[0] for each in (name, alias)]
            raise ConfigError(
                f"{name} and {alias} are one weight, and the plan cuts it as {parts[0]} in {layers[0]} and {parts[1]} "
                f"in {layers[1]}",
                where=_WHERE,
                hint=f"name both layers, {layers[0]} and {layers[1]}, with styles that cut the same dimension "
                "(RowwiseParallel for an embedding, ColwiseParallel for a head), or neither",
            )
    found: dict[str, Split] = {}
    for name, value in module.named_parameters():
        if not isinstance(value, DTensor):
            continue
        if name in frozen:
            raise ConfigError(
                f"{name} is frozen, and a layer of the plan has it",
                where=_WHERE,
                hint="leave the layer out of tensor={...}; or train it with updates of 0, by optim.chain(tx, "
                "optim.freeze(...)), in place of requires_grad_(False)",
            )
        split = Split(value.placements[0], value.shape, tuple(value.stride()))
        if split.dim >= 0 and value.shape[split.dim] % count:
            raise ConfigError(
                f"dimension {split.dim} of {name} has {value.shape[split.dim]} entries, which {count} processes "
                "cannot divide into equal parts",
                where=_WHERE,
                hint="choose a size that the axis tensor divides, or leave the layer out of the plan",
            )
        found[name] = split
    return found


def _placement(module: nn.Module, name: str) -> str:
    layer, _, attribute = name.rpartition(".")
    placements = getattr(getattr(module.get_submodule(layer), attribute), "placements", None)
    return "whole" if placements is None else str(placements[0])


def as_dtensors(named: Params, splits: Mapping[str, Split]) -> Params:
    """DTensors of parts, without communication; other tensors are returned as they are."""
    if not splits:
        return named
    from torch.distributed.tensor import DTensor

    device_mesh, found = meshes.axis_mesh("tensor"), dict(named)
    for name in named.keys() & splits.keys():
        split = splits[name]
        how: dict[str, Any] = {"run_check": False, "shape": split.shape, "stride": split.stride}
        found[name] = DTensor.from_local(named[name], device_mesh, [split.placement], **how)
    return found


def as_parts(grads: Params, splits: Mapping[str, Split]) -> Params:
    """The parts of gradients, placed as their parameters."""
    if not splits:
        return grads
    from torch.distributed.tensor import DTensor

    found = dict(grads)
    for name, grad in grads.items():
        if isinstance(grad, DTensor):
            found[name] = grad.redistribute(placements=[splits[name].placement]).to_local()
    return found
