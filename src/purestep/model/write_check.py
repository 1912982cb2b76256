"""What a forward pass must not write: the weights of the state that was given, and what no state would keep."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import tracing
from ..errors import StepContractError
from ..types import Params

Mark = tuple[int, int]
"""Of a tensor: its memory, and how often it was written."""

_COMPUTED = (
    "w = weight.clamp(-1, 1) and compute with w, or torch.nn.utils.parametrize; "
    "for weights that stay in bounds, optim.stateless(f) as the last part of the chain"
)

_SIZED = (
    "register the buffer at its full size and write rows of it; where the first forward pass gives it its size (fake "
    "quantization, a lazy statistic), call model(x) once in train mode before ps.program"
)


def marks(tensors: Params) -> dict[str, Mark]:
    """What is looked at before and after a forward pass; in a graph nothing: that is looked at while it is made."""
    if torch.compiler.is_dynamo_compiling():
        return {}
    if tracing.transformed():
        tensors = {name: tracing.unwrapped(tensor) for name, tensor in tensors.items()}
    return {name: _mark(tensor) for name, tensor in tensors.items()}


def _mark(tensor: Tensor) -> Mark:
    try:
        version = tensor._version  # pyright: ignore[reportPrivateUsage]  # torch has no other
        if type(tensor) in (Tensor, nn.Parameter):
            return tensor.data_ptr(), version
        # Fake tensors, with which a graph is made, have no address.
        return tensor.untyped_storage()._cdata, version  # pyright: ignore[reportPrivateUsage]
    except RuntimeError:  # without memory, or not counted
        return 0, 0


def check_weights(before: dict[str, Mark], weights: Params) -> None:
    """Raise StepContractError for a weight that was written. Writes through ``weight.data`` are not counted by torch:
    `purestep.testing.assert_pure` and fit's first batches look at the numbers."""
    for name, after in (marks(weights) if before else {}).items():
        if after != before[name]:
            raise _written(name, "gives other memory to" if after[0] != before[name][0] else "writes in place")


def assigned(name: str) -> StepContractError:
    """The error of a weight that is another one after the forward pass."""
    return _written(name, "assigns another parameter to")


def check_apart(before: dict[str, Mark], given: Params, found: Params) -> None:
    """Raise StepContractError for a buffer that was written in place and, in the module, is a view of another."""
    for name, after in (marks({name: found[name] for name in before}) if before else {}).items():
        if found[name] is given[name] and after != before[name]:
            raise StepContractError(
                "the forward pass writes this buffer, which lies in the memory of another tensor: "
                "in a state they are two, and only one would change",
                where=name,
                hint="one buffer, and a property that makes the view of it",
            )


def check_sizes(before: Params, after: Params) -> None:
    """Raise StepContractError for a buffer that the forward pass has given another shape or dtype, or made None."""
    for name, old in before.items():
        found: Any = after[name]
        if isinstance(found, Tensor) and found.shape == old.shape and found.dtype == old.dtype:
            continue
        new = f"{list(found.shape)} {found.dtype}" if isinstance(found, Tensor) else f"a {type(found).__name__}"
        resized = isinstance(found, Tensor) and found.shape != old.shape
        cure = (
            _SIZED if resized else f"assign it as {old.dtype}: self.{name.rpartition('.')[2]} = value.to({old.dtype})"
        )
        raise StepContractError(
            f"the forward pass turns this buffer, {list(old.shape)} {old.dtype}, into {new}: a state keeps the shape "
            "and the dtype of every tensor",
            where=name,
            hint=cure,
        )


def check_empty(places: dict[str, tuple[nn.Module, str]]) -> None:
    """Raise StepContractError for a buffer that was None and is none no more; ``places``: name -> owner, attribute."""
    for name, (owner, attribute) in places.items():
        found = getattr(owner, attribute, None)
        if found is not None:
            setattr(owner, attribute, None)  # so that the next call finds what this one has found
            raise StepContractError(
                "the forward pass fills this buffer, registered as None: no state has it, so it would be lost",
                where=name,
                hint=f"register_buffer({attribute!r}, torch.zeros({tuple(found.shape)})); "
                "persistent=False for what every call would fill with the same",
            )


def _written(name: str, how: str) -> StepContractError:
    return StepContractError(
        f"the forward pass {how} this weight, which is of the state that was given and stays what it is",
        where=name.removeprefix("model."),
        hint=_COMPUTED,
    )
