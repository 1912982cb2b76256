"""The text of a traced graph, the key of its compiled code.

The graph is the trace before inductor's decompositions, so a hit in `code_cache` needs neither them nor inductor's
passes.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:  # loading torch.fx's tracing doubles the time of `import purestep`
    from torch.fx import GraphModule

_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Types whose text distinguishes all of their values."""


class Unnamed(Exception):
    """A value that text cannot identify."""


def lines(graph: GraphModule) -> list[str]:
    """The operations of a graph as text. Values of constants are not part of it: they are inputs of the code.

    Raises:
        Unnamed: text cannot identify an operation.
    """
    found, numbers = list[str](), dict[Any, int]()
    for node in graph.graph.nodes:
        operation = getattr(node.target, "_schema", node.target) if node.op == "call_function" else node.op
        constant = getattr(graph, node.target) if node.op == "get_attr" else None
        given, made = text((node.args, node.kwargs), numbers), _layout((node.meta.get("val"), constant))
        found.append(f"{operation} {given} {made}")
        numbers[node] = len(numbers)
    return found


def text(value: Any, numbers: Mapping[Any, int] = MappingProxyType({})) -> str:
    """A value as text, which distinguishes 1, 1.0 and True.

    Args:
        value: a number, string, dtype or the like, or a list or dict of such.
        numbers: of the nodes that it may have.

    Raises:
        Unnamed: the value is another one.
    """
    from torch.fx import Node

    if type(value) in _PLAIN:
        return repr(value)
    if isinstance(value, list | tuple):
        return f"({', '.join(text(item, numbers) for item in value)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{text(key)}: {text(item, numbers)}' for key, item in value.items())}}}"
    if not isinstance(value, Node):
        raise Unnamed(f"a {type(value).__name__}")
    return f"%{numbers[value]}"


def _layout(value: Any) -> str:
    """Dtype, shape, strides and offset of a tensor, or of tensors. Not the device, which is that of the inputs or an
    argument."""
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_layout, value))})"
    if not isinstance(value, Tensor):
        return text(value)  # a size that is not known is a symbol, without a text
    if value.layout is not torch.strided or value.is_conj() or value.is_neg():
        raise Unnamed("a tensor that is not memory alone")
    return text((value.dtype, tuple(value.shape), value.stride(), value.storage_offset()))
