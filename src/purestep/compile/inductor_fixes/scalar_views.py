"""Computed scalars, materialized before larger tensors read them.

Inductor recomputes a 0-d expression in each kernel that reads it: a bias correction once for every few parameters. A
strided view needs memory, so it makes inductor compute the scalar once (torch 2.13 and 2.14). With torch 2.11 nothing
is changed: its inductor folds ``1 * view`` and loses the view's offset if another view is taken of it.

Test: `test_inductor_fixes.py`, ``test_a_scalar_is_computed_once``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

if TYPE_CHECKING:
    from torch.fx import Graph

_OFFSETS_STAY = TorchVersion(torch.__version__) >= TorchVersion("2.13")


def fix(graph: Graph) -> None:
    """Materialize every computed scalar on the CPU that larger tensors read.

    Args:
        graph: changed.
    """
    for node in list(graph.nodes) if _OFFSETS_STAY else ():
        if not _is_computed(node) or not _is_scalar(node):
            continue
        readers = [user for user in node.users if isinstance(user.meta.get("val"), Tensor) and not _is_scalar(user)]
        if not readers:
            continue
        with graph.inserting_after(node):
            view = graph.call_function(torch.ops.aten.as_strided.default, (node, [], []))
        view.meta.update(node.meta)
        for reader in readers:
            reader.replace_input_with(node, view)


def _is_computed(node: Any) -> bool:
    """True if a node computes a new tensor; a view has an offset that a second view would lose.

    Copies do not count: inductor reads the original instead.
    """
    copied = node.target in (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)
    return not copied and not getattr(node.target, "is_view", True)  # getitem has no is_view


def _is_scalar(node: Any) -> bool:
    value = node.meta.get("val")
    # On a GPU computing a scalar in every thread is cheaper than a separate kernel.
    return isinstance(value, Tensor) and value.dim() == 0 and value.device.type == "cpu"
