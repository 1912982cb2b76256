"""What torch does with tensors besides computing them: what may be read or overwritten depends on it.

A step is a function, so it can be mapped (`torch.func.vmap`) and differentiated like any other, gradients and update
included. Eager code that looks at a value, or writes over a temporary one to save memory, asks here before.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_functorch: Any = importlib.import_module("torch._C._functorch")  # no public name says whether a transform is at work


def transformed() -> bool:
    """Whether `torch.func.vmap`, `grad` or another transform is at work: a tensor may then stand for many. 40 ns.

    Example:
        >>> import torch
        >>> transformed(), torch.func.vmap(lambda x: x * transformed())(torch.ones(2)).tolist()
        (False, [1.0, 1.0])
    """
    return _functorch.maybe_current_level() is not None


def followed(leaves: Iterable[Tensor]) -> bool:
    """Whether a transform or autograd keeps what is computed from these tensors.

    Example:
        >>> import torch
        >>> weight = torch.ones(2, requires_grad=True)
        >>> followed([weight]), followed([weight.detach()])
        (True, False)
    """
    return transformed() or (torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves))
