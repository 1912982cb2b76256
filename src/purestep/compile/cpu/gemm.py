"""Matrix products of a compiled step, in C++.

Buys: a call of torch's product has an overhead of 1.2 to 2.5 us, and MKL's kernels are slow for small matrices and on
processors that are not Intel's. Sizes and strides are known when a step is compiled, so its products become plain calls
in inductor's code, for any strides, with bias and activation in the adjacent loops.

The kernel follows Goto and van de Geijn (Anatomy of High-Performance Matrix Multiplication, ACM TOMS 2008): as many
rows on the left as the L2 cache holds, panels of two vectors of columns on the right, packed if they are not
contiguous, blocks of rows in registers. Each element is summed in one order, whatever the number of threads.

Private names: those of `cpp_kernel`. Without: torch's products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, library

from . import cpp_kernel, csrc

if TYPE_CHECKING:
    from torch.fx import GraphModule, Node

_SOURCE = csrc.text("gemm.cpp")


def _layout(a: Sequence[Any], b: Sequence[Any], form: str, version: int) -> tuple[Sequence[Any], Sequence[Any]]:
    size = [*a[:-1], b[-1]]
    if form == "heads inside":
        _, h, m, n = size
        return size, [h * m * n, n, h * n, 1]
    if form == "flat":
        return [size[0] * size[1]], [1]
    return size, cpp_kernel.contiguous(size)


def _plan(a: Any, b: Any, made: Any) -> list[Any]:
    """The fields of `Plan` in C++: sizes, then strides, with missing batch dimensions of size one."""
    strides = [[0, 0, *strides][-4:] for _, strides in (a, b, made)]
    rows = [0, 0, b[0][-1]] if len(made[0]) == 1 else strides[2][:-1]
    return [*[1, 1, *a[0][:-1]][-3:], b[0][-1], a[0][-1], *strides[0], *strides[1], *rows]


KERNEL = cpp_kernel.Kernel("product", _SOURCE, _layout, _plan)
VERSION = KERNEL.version


@library.custom_op("purestep::product", mutates_args=(), schema="(Tensor a, Tensor b, str form, int version) -> Tensor")
def product(a: Tensor, b: Tensor, form: str, version: int) -> Tensor:
    """``a @ b`` of two matrices, or of batches of them with one or two batch dimensions.

    Args:
        a: shape ``(..., m, k)``, float32, any strides.
        b: shape ``(..., k, n)``, the same.
        form: "plain"; "heads inside": a result ``(b, h, m, n)`` with the memory order ``(b, m, h, n)``; "flat": a
            matrix as a vector of its rows, which inductor can place in a longer vector.
        version: of the kernel.
    """
    made = torch.matmul(a, b)
    return made.reshape(-1) if form == "flat" else torch.empty_strided(*_layout(a.shape, b.shape, form, 0)).copy_(made)


@product.register_fake
def _(a: Tensor, b: Tensor, form: str, version: int) -> Tensor:
    return a.new_empty_strided(*_layout(a.shape, b.shape, form, version))


def placed(graph: GraphModule) -> GraphModule:
    """Replace the float32 products of a graph by calls of the kernel."""
    if not cpp_kernel.possible():
        return graph
    cpp_kernel.register(KERNEL)
    for node in list(graph.graph.nodes):
        parts = _parts(node)
        if parts is not None:
            _replace(graph, node, *parts)
    graph.graph.lint()
    graph.recompile()
    return graph


def _parts(node: Node) -> tuple[Any, Any, Any] | None:
    """Bias (or None), left and right operand of a product that the kernel supports; None for other nodes."""
    aten = torch.ops.aten
    if node.target in (aten.mm.default, aten.bmm.default) and not node.kwargs:
        bias, (left, right) = None, node.args
    elif node.target is aten.addmm.default and not node.kwargs:
        bias, left, right = node.args
    else:
        return None
    values: list[Any] = [node.meta["val"], *(source.meta["val"] for source in (left, right))]  # type: ignore[union-attr]
    is_supported = all(type(v.numel()) is int and v.numel() and v.dtype == torch.float32 for v in values)
    return (bias, left, right) if is_supported else None


def _replace(graph: GraphModule, node: Node, bias: Any, left: Any, right: Any) -> None:
    flat: Any = _flattened(node) if bias is None else None
    with graph.graph.inserting_before(node):
        form = "plain" if flat is None else "flat"
        made = graph.graph.call_function(torch.ops.purestep.product.default, (left, right, form, VERSION))
        made.meta.update((flat or node).meta)
        whole = made
        if bias is not None:
            whole = graph.graph.call_function(torch.ops.aten.add.Tensor, (made, bias))
            whole.meta.update(node.meta)
    (flat or node).replace_all_uses_with(whole)
    while flat is not None and flat is not node:
        flat, unused = flat.args[0], flat
        graph.graph.erase_node(unused)
    graph.graph.erase_node(node)


def _flattened(node: Node) -> Node | None:
    """The flattened result, if its only use is as a part of a longer vector, like a packed state's gradients."""
    aten, last, (m, n) = torch.ops.aten, node, node.meta["val"].shape[-2:]
    while len(last.users) == 1 and node.meta["val"].dim() == 2:
        user = next(iter(last.users))
        if user.target is aten.cat.default and last.meta["val"].shape == (m * n,):
            return last
        same = user.target is aten.permute.default and list(user.args[1]) == [0, 1]  # type: ignore[arg-type]
        if not same and user.target not in (aten.view.default, aten.reshape.default):
            return None
        last = user
    return None
