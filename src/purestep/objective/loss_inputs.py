"""Check outputs and targets before one of torch's losses, which would broadcast them or fail in its own words."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import StepContractError

ELEMENTWISE = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss)
ELEMENTWISE_FUNCTIONS = (
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
)
_FLOATS_ONLY = (nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss)
_FLOATS_ONLY_FUNCTIONS = ELEMENTWISE_FUNCTIONS[3:]
_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss)
_CLASSES_FUNCTIONS = (functional.cross_entropy, functional.nll_loss)


def called(criterion: Any) -> Any:
    """Return the loss under a `functools.partial` of keyword arguments; any other criterion itself."""
    # A partial with positional arguments is not called with (outputs, targets).
    return criterion.func if isinstance(criterion, functools.partial) and not criterion.args else criterion


def is_elementwise(loss: Any) -> bool:
    """True if a loss compares each output with the target at its place."""
    return isinstance(loss, ELEMENTWISE) or loss in ELEMENTWISE_FUNCTIONS


def is_from_torch(loss: Any) -> bool:
    """True for a loss of torch, a module or a function."""
    named = loss if isinstance(loss, types.FunctionType | types.BuiltinFunctionType) else type(loss)
    return (named.__module__ or "").startswith("torch.")


def check_of(criterion: Any) -> Callable[[Any, Any], None] | None:
    """Return the check of outputs and targets for one of torch's losses, which raises StepContractError if they are no
    tensors, or if their shapes or dtypes do not fit. None for any other criterion, which may take what it likes."""
    loss = called(criterion)
    if not is_from_torch(loss):
        return None
    name = str(getattr(loss, "__name__", type(loss).__name__))
    if isinstance(loss, _CLASSES) or loss in _CLASSES_FUNCTIONS:

        def check_classes(outputs: Any, targets: Any) -> None:
            _check_outputs(name, outputs)
            _check_tensor(name, targets)
            if not _are_logits_and_indices(outputs, targets):
                _check_classes(name, outputs, targets)

        return check_classes
    if is_elementwise(loss):
        floats = isinstance(loss, _FLOATS_ONLY) or loss in _FLOATS_ONLY_FUNCTIONS

        def check_elements(outputs: Any, targets: Any) -> None:
            _check_outputs(name, outputs)
            _check_tensor(name, targets)
            _check_elements(name, outputs, targets, floats=floats)

        return check_elements
    return lambda outputs, _: _check_outputs(name, outputs)


def _are_logits_and_indices(outputs: Tensor, targets: Tensor) -> bool:
    """True in the usual case, which needs no further check: [N, C] of two or more classes, and int64 [N]."""
    shape = outputs.shape
    return len(shape) == 2 and shape[1] > 1 and targets.dtype is torch.int64 and targets.shape == shape[:1]


def _check_outputs(name: str, outputs: Any) -> None:
    if isinstance(outputs, Tensor):
        return
    if isinstance(outputs, Mapping):
        keys = [str(key) for key, value in cast(Mapping[Any, Any], outputs).items() if isinstance(value, Tensor)]
        chosen = "logits" if "logits" in keys else next(iter(keys), "name")
        found, part = f"a {type(outputs).__name__} with {', '.join(keys) or 'no tensor'}", f'["{chosen}"]'
    elif isinstance(outputs, tuple | list):
        found, part = f"a {type(outputs).__name__} of {len(cast(tuple[Any, ...], outputs))}", "[0]"
    else:
        found, part = f"a {type(outputs).__name__}", ".logits"
    raise StepContractError(
        f"the model returns {found}, and the loss needs one tensor",
        where=name,
        hint=f"ps.supervised(..., forward=lambda model, x: model(x){part}), or model(**x){part} if x is a mapping; for "
        "several terms write an objective (model, batch) -> ps.Loss",
    )


def _check_tensor(name: str, targets: Any) -> None:
    if not isinstance(targets, Tensor):
        part = '["name"]' if isinstance(targets, Mapping) else "[0]"
        raise StepContractError(
            f"the targets are a {type(targets).__name__}, and the loss needs one tensor",
            where=name,
            hint=f"ps.supervised(..., prepare=lambda batch: (batch[0], batch[1]{part}))",
        )


def _error(name: str, outputs: Tensor, targets: Tensor, problem: str, hint: str) -> StepContractError:
    return StepContractError(
        f"outputs {list(outputs.shape)} {outputs.dtype} and targets {list(targets.shape)} {targets.dtype}: {problem}",
        where=name,
        hint=hint,
    )


def _of_targets(change: str) -> str:
    return f"ps.supervised(..., prepare=lambda batch: (batch[0], batch[1]{change}))"


def _of_outputs(change: str) -> str:
    return f"ps.supervised(..., forward=lambda model, x: model(x){change})"


def _check_elements(name: str, outputs: Tensor, targets: Tensor, *, floats: bool) -> None:
    if outputs.shape != targets.shape:
        if outputs.shape == (*targets.shape, 1):
            hint = _of_outputs(".squeeze(-1)")
        elif targets.shape == (*outputs.shape, 1):
            hint = _of_targets(".squeeze(-1)")
        elif name.lower().startswith(("bce", "binary")) and outputs.shape[:1] == targets.shape and outputs.dim() == 2:
            hint = "nn.CrossEntropyLoss() for one class per row, or a row of 0.0 and 1.0 per target for several"
        elif outputs.numel() == targets.numel():
            hint = _of_outputs(f".reshape({', '.join(['len(x)', *map(str, targets.shape[1:])])})")
        else:
            hint = "give both the same shape; targets.expand_as(outputs) in `prepare` if one target counts for many"
        problem = "the loss would compare each output with other rows' targets, not with its own"
        raise _error(name, outputs, targets, problem, hint)
    if floats and not targets.is_floating_point():
        raise _error(name, outputs, targets, "the loss needs floating targets", _of_targets(".float()"))


def _check_classes(name: str, outputs: Tensor, targets: Tensor) -> None:
    if outputs.dim() == 0:
        raise _error(name, outputs, targets, "the loss needs one output per class", _of_outputs(".unsqueeze(0)"))
    classes = outputs.shape[min(1, outputs.dim() - 1)]
    if targets.is_floating_point():
        if targets.shape == outputs.shape and name not in ("NLLLoss", "nll_loss"):
            return  # class probabilities
        change = ".argmax(1)" if targets.shape == outputs.shape else ".long()"
        problem = "floating targets must be probabilities, one per class, and class indices are int64"
        raise _error(name, outputs, targets, problem, _of_targets(change))
    sizes = list(outputs.shape)
    expected = tuple(sizes[:1] + sizes[2:]) if outputs.dim() > 1 else ()
    if targets.shape != expected:
        if outputs.dim() > 1 and targets.shape == (*sizes[:1], 1, *sizes[2:]):
            hint = _of_targets(".squeeze(1)")
        elif outputs.dim() > 2 and targets.shape == outputs.shape[:-1]:
            hint = _of_outputs(".movedim(-1, 1)")
        elif targets.shape == outputs.shape:
            hint = _of_targets(".float()") if outputs.dim() > 1 else "nn.BCEWithLogitsLoss() for one output per target"
        else:
            hint = "outputs [N, C] and targets [N], or [N, C, d...] and [N, d...]"
        raise _error(name, outputs, targets, f"the targets should have the shape {list(expected)}", hint)
    if classes == 1 and outputs.dim() > 1:
        hint = "nn.BCEWithLogitsLoss() with outputs and floating targets of one shape, or a last layer with 2 outputs"
        raise _error(name, outputs, targets, "the loss of a single class is always 0", hint)
    if targets.dtype not in (torch.int64, torch.uint8):
        raise _error(name, outputs, targets, "class indices are int64", _of_targets(".long()"))
