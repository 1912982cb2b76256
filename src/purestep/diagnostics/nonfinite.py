"""Find where the first value that is not finite appears in a step: module, operation, line."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.modules import module as hooks
from torch.overrides import TorchFunctionMode

from .. import tree
from ..torch_ext import tensor_layout, tracing
from ..types import Empty, TrainState, Tree

# The values of new memory are undefined.
_UNDEFINED = frozenset("empty empty_like empty_strided empty_permuted new_empty new_empty_strided".split())
# These operations write infinities on purpose, for masks.
_MASKING = frozenset(
    "full full_like new_full fill_ masked_fill masked_fill_ where tensor as_tensor __setitem__".split()
)


def not_finite(leaf: Any) -> int:
    """The number of values of a leaf that are not finite; 0 if it is no floating or complex tensor."""
    if not isinstance(leaf, Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
        return 0
    if not tensor_layout.is_dense(leaf):
        return sum(map(not_finite, tensor_layout.dense_parts(leaf)))
    return leaf.numel() - int(torch.isfinite(leaf).sum())


def bad_leaves(named: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (path, "count of all") of the leaves of these trees that are not finite."""
    pairs = [pair for name, one in named.items() for pair in tree.with_paths({name: tree.dicts(one)})]
    counts = [(path, leaf, not_finite(leaf)) for path, leaf in pairs]
    return [(path, f"{count} of {leaf.numel()}") for path, leaf, count in counts if count]


class Repeated(NamedTuple):
    """A step, repeated in eager mode."""

    result: Any  # of the step
    loss: float | None  # without its scale; None if nothing was differentiated
    leaves: list[tuple[str, str]]  # (path, "count of all") of the leaves of batch and state that are not finite
    first: str | None  # where the first number that is not finite appears
    module: str
    operation: str  # "" if it is in a leaf


def repeated(step: Callable[[Tree, Any], Any], state: Tree, batch: Any) -> Repeated:
    """Call a step, once or twice, and find where the first number that is not finite appears: in the batch or the
    state, in its forward pass, or in its backward pass (only NaN)."""
    named, scale = {"batch": batch}, 1.0
    if isinstance(state, TrainState):
        named |= {name: getattr(state, name) for name in ("params", "frozen", "buffers")}
        scale = 1.0 if isinstance(state.scaler, Empty) else float(state.scaler.scale)
    leaves, first, module, operation = bad_leaves(named), None, "", ""
    found = FirstNonFinite()
    with found:
        result = step(state, batch)
    if leaves:
        first = f"{leaves[0][0]}: {leaves[0][1]} numbers are not finite"
    elif found.first is not None:
        first, module, operation = found.first
    else:
        first, operation = backward(lambda: step(state, batch))
    return Repeated(result, None if found.loss is None else found.loss / scale, leaves, first, module, operation)


def differentiates(function: Any) -> bool:
    """True for `torch.Tensor.backward` and `torch.autograd.grad`, the end of a forward pass."""
    if function is torch.Tensor.backward:
        return True
    return getattr(function, "__name__", "") == "grad" and getattr(function, "__module__", "") == "torch.autograd"


class FirstNonFinite(TorchFunctionMode):
    """Checks the result of every operation of a forward pass.

    ``first`` is (text, module, operation) of the first operation with finite arguments and a result that is not finite,
    ``loss`` the value that is differentiated first, with its scale.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first: tuple[str, str, str] | None = None
        self.loss: float | None = None
        self._forward = True
        self._inside: list[nn.Module] = []
        self._names: dict[nn.Module, str] = {}
        self._hooks = ExitStack()

    def __enter__(self) -> FirstNonFinite:
        for hook in (
            hooks.register_module_forward_pre_hook(self._entered),
            hooks.register_module_forward_hook(self._exited, always_call=True),
        ):
            self._hooks.callback(hook.remove)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.close()
        super().__exit__(*error)

    def _entered(self, module: nn.Module, inputs: Any) -> None:
        if not self._inside:
            self._names = {found: name for name, found in module.named_modules()}
        self._inside.append(module)

    def _exited(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._inside.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # The step's own arithmetic after the forward pass handles such values.
        if self._forward and args and differentiates(func):
            self._forward = False
            loss = tracing.unwrapped((args[0] if isinstance(args[0], Tensor) else args[0][0]).detach())
            self.loss = float(loss) if loss.numel() == 1 else None
        result = func(*args, **(kwargs or {}))
        if self._forward and self.first is None:
            self._check(getattr(func, "__name__", str(func)), [*args, *(kwargs or {}).values()], result)
        return result

    def _check(self, name: str, inputs: list[Any], result: Any) -> None:
        counts = [] if name in _UNDEFINED else [not_finite(leaf) for leaf in _tensors(result)]
        if not any(counts) or any(not_finite(leaf) for leaf in _tensors(inputs)):
            return
        if name in _MASKING and not any(bool(leaf.isnan().any()) for leaf in _tensors(result)):
            return
        total = sum(leaf.numel() for leaf in _tensors(result))
        module = self._inside[-1] if self._inside else None
        path = "" if module is None else _inner(self._names.get(module, ""))
        place = "" if module is None else f" in {path or 'the model'} ({type(module).__name__})"
        self.first = f"{name}{place}: {sum(counts)} of {total} numbers are not finite", path, name


def _tensors(found: Any) -> list[Tensor]:
    if isinstance(found, Tensor):
        found = tracing.unwrapped(found)  # of an ensemble, the numbers of all members
        return [found] if found.is_floating_point() or found.is_complex() else []
    if isinstance(found, list | tuple):
        return [leaf for item in cast("list[Any]", found) for leaf in _tensors(item)]
    return []


def _inner(name: str) -> str:
    # Steps run a copy that contains the model and the objective's module.
    return name.removeprefix("model.").removeprefix("model")


def backward(step: Callable[[], Any]) -> tuple[str | None, str]:
    """Find the backward function that returns the first nan: (text with the line of its forward call, its name).

    Returns (None, "") if no function returns nan.
    """
    with warnings.catch_warnings(record=True) as caught, torch.autograd.set_detect_anomaly(True):
        warnings.simplefilter("always")
        try:
            step()
        except RuntimeError as error:
            found = re.search(r"Function '(\w+)' returned nan values", str(error))
            if found is None:
                raise
            return f"{found[1]}, in the backward pass of {_forward_line(caught)}", found[1]
    return None, ""


def _forward_line(caught: list[warnings.WarningMessage]) -> str:
    """The last line of the user's code in the traceback of torch's warning."""
    text = "".join(str(warning.message) for warning in caught if "Traceback of forward call" in str(warning.message))
    frames = re.findall(r'File "([^"]+)", line (\d+), in \w+\n\s+(.*)', text)
    own = [frame for frame in frames if not frame[0].startswith(tracing.LIBRARIES)]
    return f"{own[-1][2]} ({own[-1][0]}:{own[-1][1]})" if own else "an operation of torch's own"
