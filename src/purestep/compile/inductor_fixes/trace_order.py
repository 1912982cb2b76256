"""Draws in the order of the trace.

Inductor moves each operation of a graph for inference, as which it takes a whole step, next to its first reader, draws
too: two draws have each other's numbers (torch 2.11, https://github.com/pytorch/pytorch/issues/175156). From torch 2.13
on draws stay, and the option would only cost memory: 20.1 in place of 17.3 MiB for four layers with LayerNorm.

Test: `test_inductor_fixes.py`, ``test_draws_are_in_the_order_of_the_step``.
"""

import torch
from torch.torch_version import TorchVersion

OPTIONS = {"reorder_for_locality": False} if TorchVersion(torch.__version__) < TorchVersion("2.13") else {}
"""Options of inductor."""
