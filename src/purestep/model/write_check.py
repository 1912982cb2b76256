"""Checks that a forward pass does not write weights, nor buffers in a way that a state cannot store, and that it counts
in no Python attribute."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from ..errors import StepContractError
from ..torch_ext import hidden, tracing
from ..types import Params

K = TypeVar("K")

Mark = tuple[int, int]
"""(address, version counter) of a tensor."""

_COMPUTED = (
    "set w = weight.clamp(-1, 1) and compute with w, or use torch.nn.utils.parametrize; "
    "to keep weights in bounds, add optim.stateless(f) as the last part of the chain"
)

_SIZED = (
    "register the buffer at its full size and write rows of it; if the first forward pass sets its size (fake "
    "quantization, a lazy statistic), call model(x) once in train mode before ps.program"
)


def marks(tensors: Mapping[K, Tensor]) -> dict[K, Mark]:
    """Marks to compare before and after a forward pass; empty in a user's `torch.compile`, which cannot read them."""
    if torch.compiler.is_dynamo_compiling():
        return {}
    if tracing.transformed():
        tensors = {name: tracing.unwrapped(tensor) for name, tensor in tensors.items()}
    if all(type(tensor) in (Tensor, nn.Parameter) for tensor in tensors.values()):
        try:
            return {name: (tensor.data_ptr(), hidden.version(tensor)) for name, tensor in tensors.items()}
        except RuntimeError:  # one has no memory, or no version counter
            pass
    return {name: _mark(tensor) for name, tensor in tensors.items()}


def _mark(tensor: Tensor) -> Mark:
    try:
        version = hidden.version(tensor)
        if type(tensor) in (Tensor, nn.Parameter):
            return tensor.data_ptr(), version
        # Fake tensors, in a trace, have no address.
        return hidden.storage_address(tensor), version
    except RuntimeError:  # no memory, or no version counter
        return 0, 0


def check_weights(before: dict[str, Mark], weights: Params) -> None:
    """Raise StepContractError for a weight that was written. Torch does not count writes through ``weight.data``:
    `purestep.testing.assert_pure` and the first batches of `fit` compare values."""
    for name, after in (marks(weights) if before else {}).items():
        if after != before[name]:
            raise _written(name, "moves the memory of" if after[0] != before[name][0] else "writes in place")


def assigned(name: str) -> StepContractError:
    """The error for a weight that the forward pass replaced by another tensor."""
    return _written(name, "assigns another parameter to")


def check_aliased_buffers(before: dict[str, Mark], given: Params, found: Params) -> None:
    """Raise StepContractError for a buffer that was written in place and shares memory with another in the module."""
    for name, after in (marks({name: found[name] for name in before}) if before else {}).items():
        if found[name] is given[name] and after != before[name]:
            raise StepContractError(
                "the forward pass writes this buffer, which shares memory with another tensor: "
                "a state holds them separately, and only one would change",
                where=name,
                hint="register one buffer, and compute its view in a property",
            )


def check_sizes(before: Params, after: Params) -> None:
    """Raise StepContractError for a buffer that changed its shape or dtype or became None."""
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
            f"the forward pass turns this buffer, {list(old.shape)} {old.dtype}, into {new}: shapes and dtypes of a "
            "state must not change",
            where=name,
            hint=cure,
        )


def check_none_buffers(places: dict[str, tuple[nn.Module, str]]) -> None:
    """Raise StepContractError for a None buffer that the forward pass filled; places: name -> (owner, attribute)."""
    for name, (owner, attribute) in places.items():
        found = getattr(owner, attribute, None)
        if found is not None:
            setattr(owner, attribute, None)  # so that the next call starts from the same module
            raise StepContractError(
                "the forward pass fills this buffer, registered as None: no state holds it, so its value would be lost",
                where=name,
                hint=f"call register_buffer({attribute!r}, torch.zeros({tuple(found.shape)})); "
                "pass persistent=False if every call fills it with the same values",
            )


class Numbers:
    """Watches numbers of Python among the attributes of a module, in its first forward passes; in a capture tensors,
    too, that are not buffers. It looks one level below: an item of a dict or list, an attribute of an object or class.

    A number that two passes change is a counter: no state holds it, and a graph would hold one value of it. A capture
    refuses the first change of a tensor.

    Args:
        module: weightless; its attributes stay from call to call.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._changed: set[str] = set()
        self._calls = 2
        """Calls to watch."""

    def read(self) -> dict[str, Any] | None:
        """The values before a call, by path; None after the first calls."""
        if torch.compiler.is_dynamo_compiling():  # first: it would guard on the count
            return None
        return self._numbers() if self._calls else None

    def _numbers(self) -> dict[str, Any]:
        return {
            f"{path}.{name}" if path else name: value
            for path, part in self._module.named_modules()
            for name, value in _values_of(part)
        }

    def check(self, before: dict[str, Any] | None) -> None:
        """Raise StepContractError for a number that this call and one before have changed; in a capture, which makes
        one call, for a number that this call has changed."""
        if before is None:
            return
        self._calls -= 1
        after = self._numbers()
        changed = {path for path, value in before.items() if path in after and _differ(value, after[path])}
        for path in changed if tracing.in_graph() else changed & self._changed:
            name = "".join(char for char in path.rpartition(".")[2] if char.isalnum() or char == "_")
            self._calls = 2  # the next call starts over
            if isinstance(before[path], Tensor):
                raise StepContractError(
                    "the forward pass assigns another tensor to this attribute, which no state holds",
                    where=path.removeprefix("model."),
                    hint=f"self.register_buffer({name!r}, ...) in __init__; None there, if no call reads it",
                )
            raise StepContractError(
                f"the forward pass changes this Python number ({before[path]} -> {after[path]}), which no state holds",
                where=path.removeprefix("model."),
                hint=f"count in a buffer: self.register_buffer({name!r}, torch.tensor(0)) in __init__, and in forward "
                f"self.{name} = self.{name} + 1; or read a schedule, ps.program(..., values={{{name!r}: schedule}})",
            )
        self._changed |= changed


_MAX_ITEMS = 64  # of a dict or list; a longer one is data


def _values_of(part: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(part).items():
        if _is_watched(value):
            yield name, value
        elif name not in _TORCHS:
            yield from ((name + inner, found) for inner, found in _below(value) if _is_watched(found))
    for kind in type(part).__mro__:
        if not kind.__module__.startswith("torch."):
            held = vars(kind).items()
            yield from ((f"{kind.__name__}.{name}", value) for name, value in held if _is_number(value))


def _below(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list):
        held = cast(Any, value)
        keys = () if len(held) > _MAX_ITEMS else list(held) if isinstance(value, dict) else range(len(held))
        yield from ((f"[{key!r}]", held[key]) for key in keys)
    elif hasattr(value, "__dict__") and not isinstance(value, type | types.ModuleType | nn.Module | Tensor | Numbers):
        yield from ((f".{name}", number) for name, number in vars(value).items())


def _is_watched(value: Any) -> bool:
    return _is_number(value) or (isinstance(value, Tensor) and tracing.in_graph())


def _differ(old: Any, new: Any) -> bool:
    if isinstance(old, Tensor):  # one without values is of an earlier capture, and was never read
        return new is not old and type(old) in (Tensor, nn.Parameter)
    return new is not old and (isinstance(new, Tensor) or old != new)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_TORCHS = frozenset(vars(nn.Module())) | {hidden.FLAT_WEIGHTS}
"""Attributes of every module, and the weights of recurrent layers, which follow those of the state."""


def _written(name: str, how: str) -> StepContractError:
    return StepContractError(
        f"the forward pass {how} this weight, but the weights of the input state must not change",
        where=name.removeprefix("model."),
        hint=_COMPUTED,
    )
