"""The inputs of a graph: which it depends on, how they are compared at a call, and what none may be."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor

from .. import tensor_layout, tracing
from ..errors import StepContractError
from . import capture


def check_untransformed() -> None:
    """Raise StepContractError inside `torch.func.vmap`, `grad` and the like: compiled code cannot read such tensors."""
    if tracing.transformed():
        raise StepContractError(
            "a compiled step is called inside torch.func.vmap, grad or another transform",
            where="compile_step",
            hint="outside of it; a step of one's own that uses transforms inside itself can be compiled",
        )


class Text:
    """Stands for text of a batch inside a graph, which cannot hold it: using it is an error."""

    def _refuse(self, *_: Any) -> NoReturn:
        raise StepContractError(
            "the step reads text of the batch, which no compiled graph can hold",
            where="batch",
            hint="turn it into tensors in the loader, or leave it out: ps.supervised(..., prepare=...)",
        )

    __len__ = __iter__ = __getitem__ = __contains__ = __add__ = __str__ = __bool__ = __getattr__ = _refuse
    __eq__ = __ne__ = __hash__ = _refuse  # sets and dicts compare too


TEXT = Text()


def without_text(leaves: list[Any]) -> list[Any]:
    """The leaves of a batch with text replaced: its value must not select a graph."""
    if any(isinstance(leaf, str | bytes) for leaf in leaves):
        return [TEXT if isinstance(leaf, str | bytes) else leaf for leaf in leaves]
    return leaves


def resolved(leaf: Any) -> Any:
    """The leaf with a conjugation or negation that torch has put off: compiled code reads memory as it is."""
    if isinstance(leaf, Tensor) and (leaf.is_neg() or leaf.is_conj()):
        return leaf.resolve_conj().resolve_neg()
    return leaf


def kinds(leaves: list[Any]) -> tuple[Any, ...]:
    """What a compiled graph depends on: layout, dtype and device of tensors, the value of anything else.

    Raises:
        Uncaptured: a sparse or nested tensor, which no graph takes.
        StepContractError: an object that no graph can hold.
    """
    try:
        return tuple(
            (x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else _constant(x) for x in leaves
        )
    except RuntimeError:  # a sparse tensor has no strides, a nested one no shape
        check_layouts(leaves)
        raise


def ranks(leaves: list[Any]) -> tuple[Any, ...]:
    """The same with every size left open."""
    return tuple((x.dtype, x.device, x.dim()) if isinstance(x, Tensor) else _constant(x) for x in leaves)


def check_layouts(leaves: list[Any]) -> None:
    """Nothing, where all tensors are dense.

    Raises:
        Uncaptured: a sparse, nested or quantized one.
    """
    for leaf in leaves:
        if isinstance(leaf, Tensor) and not tensor_layout.is_dense(leaf):
            cure = "torch.nested.to_padded_tensor(x, 0.0)" if leaf.is_nested else "x.to_dense()"
            raise capture.Uncaptured(
                f"a {tensor_layout.layout_name(leaf)} tensor in the batch, which no compiled graph takes",
                where="batch",
                hint=f"{cure} in the loader, or the step in eager mode (compile=False)",
            )


def _constant(value: Any) -> Any:
    """What tells one value from another: 1, 1.0 and True are equal, as are 0.0 and -0.0, and give other results."""
    if value is TEXT:
        return Text  # which can neither be hashed nor compared
    if isinstance(value, float | complex):
        return type(value), repr(value)
    try:
        hash(value)
    except TypeError as error:
        hint = "tensors: torch.as_tensor(array), or ps.to_device(batch, state)"
        raise _unheld(value, hint) from error
    if type(value).__hash__ is object.__hash__ and not callable(value) and hasattr(value, "__dict__"):
        # One batch's object would be a constant of the graph, and each batch have a graph.
        raise _unheld(value, "a dataclass, a namespace or an object of tensors and numbers alone, or the step in eager")
    return type(value), value


def _unheld(value: Any, hint: str) -> capture.Uncaptured:
    found = f"a {type(value).__name__} in the batch, which no compiled graph can hold"
    return capture.Uncaptured(found, where="batch", hint=hint)


def alike(leaves: list[Any]) -> Callable[..., bool]:
    """Asks of as many other leaves, one argument each, whether they are tensors of the same `kinds`; for every step.

    `tensor_layout.layout_guard` also distinguishes tensors that `kinds` does not: those that require gradients or are
    in inference mode. The caller then looks for a graph by `kinds`.
    """
    return tensor_layout.layout_guard(leaves) or functools.partial(_same_kinds, kinds(leaves))


def _same_kinds(known: tuple[Any, ...], *leaves: Any) -> bool:
    for kind, leaf in zip(known, leaves, strict=True):
        if type(leaf) is not Tensor or leaf.is_neg() or leaf.is_conj():
            return False
        if leaf.shape != kind[0] or leaf.stride() != kind[1] or leaf.dtype is not kind[2] or leaf.device != kind[3]:
            return False
    return True
