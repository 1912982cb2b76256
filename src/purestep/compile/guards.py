"""Guards on the inputs of a graph: what it depends on, the comparison at a call, and inputs that no graph takes."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from ..errors import StepContractError
from ..torch_ext import tensor_layout, tracing
from ..types import TrainState
from . import capture, live_state


def check_untransformed() -> None:
    """Raise StepContractError inside `torch.func.vmap`, `grad` and the like: compiled code cannot read such tensors."""
    if tracing.transformed():
        raise StepContractError(
            "a compiled step is called inside torch.func.vmap, grad or another transform",
            where="compile_step",
            hint="call it outside of the transform; a step that uses transforms internally can be compiled",
        )


def check_unfollowed(state: Any) -> None:
    """Raise StepContractError if autograd follows the parameters: a graph returns no derivatives through the step."""
    if isinstance(state, TrainState) and not isinstance(state, live_state.LiveState):
        followed = [name for name, weight in state.params.items() if weight.requires_grad]
        if followed and torch.is_grad_enabled():
            raise StepContractError(
                "the parameter requires a gradient, and a compiled step has no derivative",
                where=f"state/params/{followed[0]}",
                hint="call program.train_step, the eager step, to differentiate through it; or pass ps.clone(state), "
                "or call the step inside torch.no_grad()",
            )


def leaf_name(path: str) -> str:
    """The name of a leaf by its path in the arguments of a step behind the state.

    Example:
        >>> leaf_name("0/x"), leaf_name("2"), leaf_name("0")
        ('batch/x', 'context/1', 'batch')
    """
    first, _, rest = path.partition("/")
    return "/".join(filter(None, ("batch" if first == "0" else f"context/{int(first) - 1}", rest)))


class Unreadable:
    """Placeholder inside a graph for a value that it cannot hold: any use raises Uncaptured."""

    def __init__(self, what: str, where: str, hint: str) -> None:
        self._said = what, where, hint

    def _refuse(self, *_: Any) -> NoReturn:
        what, where, hint = self._said
        raise capture.Uncaptured(what, where=where, hint=hint)

    __len__ = __iter__ = __getitem__ = __contains__ = __add__ = __str__ = __bool__ = __getattr__ = _refuse
    __float__ = __int__ = __index__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __mod__ = __floordiv__ = (
        _refuse
    )
    __eq__ = __ne__ = __hash__ = _refuse  # sets and dicts compare too


TEXT = Unreadable(
    "the step reads text of the batch, which no compiled graph can hold",
    "batch",
    "convert it to tensors in the loader, or remove it: ps.supervised(..., prepare=...)",
)
INDEX = Unreadable(
    "the eval_step reads the number of the batch, of which a graph would hold one",
    "eval_step",
    "put it into the batch as a tensor, or evaluate in eager mode (in fit: compile=False)",
)


def without_text(leaves: list[Any]) -> list[Any]:
    """Replace text in the leaves of a batch: its value must not select a graph."""
    if any(isinstance(leaf, str | bytes) for leaf in leaves):
        return [TEXT if isinstance(leaf, str | bytes) else leaf for leaf in leaves]
    return leaves


def resolved(leaf: Any) -> Any:
    """Materialize lazy conj and neg views: compiled code reads raw memory."""
    if isinstance(leaf, Tensor) and (leaf.is_neg() or leaf.is_conj()):
        return leaf.resolve_conj().resolve_neg()
    return leaf


def signature(leaves: list[Any]) -> tuple[Any, ...]:
    """Return what a compiled graph depends on: shape, strides, dtype and device of tensors, the value of anything else.

    Raises:
        Uncaptured: a leaf is a sparse or nested tensor, or an object that no graph can hold.
    """
    try:
        return tuple((x.shape, x.stride(), x.dtype, x.device) if isinstance(x, Tensor) else constant(x) for x in leaves)
    except RuntimeError:  # a sparse tensor has no strides, a nested one no shape
        check_layouts(leaves)
        raise


def ranks(leaves: list[Any]) -> tuple[Any, ...]:
    """The same without sizes and strides."""
    return tuple((x.dtype, x.device, x.dim()) if isinstance(x, Tensor) else constant(x) for x in leaves)


def check_layouts(leaves: list[Any]) -> None:
    """Check that all tensors are dense.

    Raises:
        Uncaptured: one is sparse, nested or quantized.
    """
    for leaf in leaves:
        if isinstance(leaf, Tensor) and not tensor_layout.is_dense(leaf):
            cure = "torch.nested.to_padded_tensor(x, 0.0)" if leaf.is_nested else "x.to_dense()"
            raise capture.Uncaptured(
                f"a {tensor_layout.layout_name(leaf)} tensor in the batch, which no compiled graph takes",
                where="batch",
                hint=f"call {cure} in the loader, or run the step in eager mode (compile=False)",
            )


def constant(value: Any) -> Any:
    """A key that distinguishes values: 1, 1.0 and True are equal, as are 0.0 and -0.0, but give different results."""
    if value is TEXT:
        return Unreadable  # TEXT itself cannot be hashed or compared
    if isinstance(value, float | complex):
        return type(value), repr(value)
    try:
        hash(value)
    except TypeError as error:
        raise _not_constant(value) from error
    if type(value).__hash__ is object.__hash__ and not callable(value) and hasattr(value, "__dict__"):
        # The object would be a constant of the graph, so that each batch would compile a new graph.
        raise _not_constant(value)
    return type(value), value


def _not_constant(value: Any) -> capture.Uncaptured:
    hint = "make a dict of its tensors in the loader's collate_fn"
    if isinstance(value, np.ndarray):
        hint = "call torch.as_tensor(array), or array.tolist() for text, in the loader"
    elif hasattr(value, "to_dict"):
        hint += ": batch.to_dict()"
    return capture.Uncaptured(
        f"the batch has a {type(value).__name__}, which no compiled graph can hold",
        where="batch",
        hint=f"{hint}; or run the step in eager mode (compile=False)",
    )


class TorchSettings:
    """Settings of torch that a graph depends on: autocast, default dtype, determinism, matmul precision. Dynamo's guard
    checks in 0.2 us whether they have changed.
    """

    _FREE = re.compile(r'"(grad_mode|num_threads|torch_function\w*)":\w+')

    def __init__(self) -> None:
        self._last: tuple[Callable[[], bool], str] = (lambda: False), ""

    def __call__(self) -> str:
        """The settings as text; the same object until one changes."""
        same, text = self._last  # one read: another thread may have other settings
        if same():
            return text
        guard: Any = importlib.import_module("torch._C._dynamo.guards").GlobalStateGuard()
        text = self._FREE.sub("", guard.__getstate__())
        self._last = guard.check, text
        return text
