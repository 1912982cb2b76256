"""A random permutation as an index.

Inductor's pattern for ``x[torch.randperm(n)]`` fails ("Not all inputs to pattern found"; up to torch 2.13,
https://github.com/pytorch/pytorch/issues/183988, right in torch 2.14), as does `torch.compile` of the line alone. Here
a copy that inductor does not remove hides the permutation from the pattern. On the CPU `torch_ext.draws` has replaced
it already.

Test: `test_inductor_fixes.py`, ``test_a_random_permutation_is_an_index``.
"""

from __future__ import annotations

import functools
import operator
from typing import TYPE_CHECKING

import torch

from .. import fx_passes

if TYPE_CHECKING:
    from torch.fx import Graph


def fix(graph: Graph) -> None:
    """Insert a copy after `torch.randperm`.

    Args:
        graph: changed.
    """
    for node in list(graph.nodes):
        if fx_passes.name_of(node) != "randperm":
            continue
        with graph.inserting_after(node):
            made = graph.call_function(torch.ops.purestep.own_copy.default, (node,))
        made.meta.update(node.meta)
        node.replace_all_uses_with(made, delete_user_cb=functools.partial(operator.is_not, made))
