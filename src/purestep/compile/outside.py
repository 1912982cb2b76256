"""Tensors that a step reads besides its state and its batch: a teacher in the objective's closure, class weights.

They become inputs of its graph, so every call reads them: writes in place, ``load_state_dict`` and ``.data.copy_``
count.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload

from ..errors import StepContractError
from ..torch_ext import tracing

if TYPE_CHECKING:  # loading torch.fx's tracing doubles the time of `import purestep`
    from torch.fx import GraphModule


def lifted(graph: GraphModule) -> tuple[GraphModule, list[Tensor]]:
    """Make the tensors that a trace met besides its inputs further inputs; return the graph and these tensors.

    Constants that the step itself creates stay constants, as do sparse tensors and tensor subclasses.

    Raises:
        StepContractError: such a tensor has no values.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    outside, made = dict[int, Tensor](), dict[int, Any]()
    inputs = graph.graph.find_nodes(op="placeholder")
    mode = inputs[0].meta["val"].fake_mode
    for node in graph.graph.find_nodes(op="get_attr"):
        leaf = getattr(graph, node.target)
        if isinstance(leaf, FakeTensor):
            raise StepContractError(
                f"a tensor {list(leaf.shape)} without values, which the step stored during an earlier capture",
                where="step",
                hint="create tensors that a module or a cache stores in __init__, or compute them in every call",
            )
        if not _is_memory(leaf) or all(user.target in _LITERALS for user in node.users):
            continue
        if id(leaf) not in outside:
            with graph.graph.inserting_after([*inputs, *made.values()][-1]):
                made[id(leaf)] = graph.graph.placeholder(f"outside_{len(made)}")
            made[id(leaf)].meta["val"] = mode.from_tensor(leaf, static_shapes=True)
            outside[id(leaf)] = leaf
        node.replace_all_uses_with(made[id(leaf)])
        graph.graph.erase_node(node)
    if outside:
        graph.recompile()
    return graph, list(outside.values())


_LITERALS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)
"""Called with a constant that `torch.tensor` has just created."""


def _is_memory(leaf: Any) -> bool:
    is_plain = type(leaf) in (Tensor, nn.Parameter) and leaf.layout is torch.strided
    return is_plain and not (leaf.is_quantized or leaf.is_conj() or leaf.is_neg())


class Unwritten(tracing.Mode):
    """Mode of a trace that refuses writes of tensors besides the function's own, and reads of their values: a graph
    would hold one number.

    Raises:
        StepContractError: from the line that writes one.
        DataDependentOutputException: from the line that reads one.
    """

    def __init__(self) -> None:
        super().__init__()
        self._views: dict[int, Tensor] = {}  # of tensors outside, by their storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if tracing.has_parts(types):
            return NotImplemented
        if func is torch.ops.aten._local_scalar_dense.default and self._is_outside(args[0]):
            from torch._subclasses import fake_tensor

            raise fake_tensor.DataDependentOutputException(func)
        changed, viewed = _arguments(func, args, kwargs or {})
        for leaf in filter(self._is_outside, changed):
            what, where, hint = written(leaf)
            raise StepContractError(f"the step {what}", where=where, hint=hint)
        made = func(*args, **(kwargs or {}))
        if any(map(self._is_outside, viewed)):
            self._views |= {_storage(view): view for view in _listed(made) if isinstance(view, Tensor)}
        return made

    def _is_outside(self, value: Any) -> bool:
        return _is_memory(value) or (isinstance(value, Tensor) and _storage(value) in self._views)


class Writes(tracing.Mode):
    """Mode of an eager call that collects its writes of tensors that were there before."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, tuple[Tensor, tuple[str, str, str]]] = {}
        """by storage: the tensor, which keeps it alive, and the result of `written`"""
        self._own: set[int] = {0}  # storages that the call has allocated

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if tracing.has_parts(types):
            return NotImplemented
        changed, viewed = _arguments(func, args, kwargs or {})
        for leaf in changed:
            if isinstance(leaf, Tensor) and _storage(leaf) not in self._own:
                self.found.setdefault(_storage(leaf), (leaf, written(leaf)))
        made = func(*args, **(kwargs or {}))
        there = set() if func in _LITERALS else {_storage(leaf) for leaf in viewed if isinstance(leaf, Tensor)}
        self._own |= {_storage(leaf) for leaf in _listed(made) if isinstance(leaf, Tensor)} - there
        return made


def _arguments(func: Any, args: Any, kwargs: Any) -> tuple[list[Any], list[Any]]:
    """The arguments that an operator writes, and those of which its results may be views."""
    if not isinstance(func, OpOverload):  # a higher-order operator
        return [], []
    schema: Any = func._schema  # pyright: ignore[reportPrivateUsage]
    given = dict(zip((each.name for each in schema.arguments), args, strict=False)) | kwargs
    is_training = given.get("training", True)  # else statistics are read
    changed, viewed = list[Any](), list[Any]()
    for argument in schema.arguments:
        alias, leaves = argument.alias_info, _listed(given.get(argument.name))
        if is_training and (argument.name in _STATISTICS or (alias is not None and alias.is_write)):
            changed += leaves
        if alias is not None:
            viewed += leaves
    return changed, viewed


def _listed(value: Any) -> Sequence[Any]:
    """An argument or a result of an operator, which may be a list of tensors."""
    return cast(Sequence[Any], value) if isinstance(value, list | tuple) else [value]


def _storage(value: Tensor) -> int:
    if value.layout is not torch.strided:
        return 0
    memory: Any = value.untyped_storage()
    return memory._cdata


_STATISTICS = ("running_mean", "running_var")
"""Arguments that batch normalization writes in training, which not all of its schemas say."""


def written(leaf: Tensor) -> tuple[str, str, str]:
    """The parts of a message for a write of a tensor outside: the problem, the line, the cure."""
    frame = sys._getframe()  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and frame.f_code.co_filename.startswith(tracing.LIBRARIES):
        frame = frame.f_back
    return (
        f"writes a tensor {list(leaf.shape)} {leaf.dtype} that is not in the state, as BatchNorm does in train mode",
        f"{frame.f_code.co_filename}:{frame.f_lineno}",
        "call .eval() on the module that holds it, hold its buffers in the state, or write it between the calls",
    )
