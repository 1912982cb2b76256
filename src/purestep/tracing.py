"""Whether eager code may read a value, or write over a temporary tensor.

A step is a function, so it can be mapped (`torch.func.vmap`) and differentiated like any other, its gradients and its
update included. A mapped value is one of many, a traced one is none, and autograd keeps what it has seen: whoever saves
time or memory by looking or by writing in place asks here before.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from . import rng

# No public names say which transforms and modes are at work.
_C: Any = importlib.import_module("torch._C")
_functorch: Any = importlib.import_module("torch._C._functorch")
_forward: Any = importlib.import_module("torch.autograd.forward_ad")


def transformed() -> bool:
    """Whether a transform of `torch.func`, or forward mode, is at work: a tensor may then stand for many. 0.15 us.

    Example:
        >>> import torch
        >>> def inside(x):
        ...     return x + transformed()
        >>> inside(torch.zeros(2)).tolist(), torch.func.vmap(inside)(torch.zeros(2)).tolist()
        ([0.0, 0.0], [1.0, 1.0])
    """
    if torch.compiler.is_dynamo_compiling():  # Dynamo cannot ask, and captures what a transform inside it does
        return False
    return _functorch.maybe_current_level() is not None or _forward._current_level >= 0


def followed(leaves: Iterable[Tensor]) -> bool:
    """Whether a derivative may be taken through what is computed from these tensors, or they stand for many.

    Example:
        >>> import torch
        >>> weight = torch.ones(2, requires_grad=True)
        >>> followed([weight]), followed([weight.detach()])
        (True, False)
    """
    return transformed() or (torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves))


def may_read(value: Tensor) -> bool:
    """Whether a tensor has a value that Python can branch on: no graph is captured, nothing is mapped, no mode sees
    operations instead of numbers."""
    if rng.in_graph() or transformed():
        return False
    return type(value) is Tensor and not _C._len_torch_dispatch_stack()


def may_overwrite(leaves: Iterable[Tensor]) -> bool:
    """Whether a temporary that was computed from these tensors is nobody else's."""
    return not rng.in_graph() and not followed(leaves)


def behind(mapped: Tensor) -> Tensor:
    """What a transform has wrapped: of a mapped tensor the values for all, in one tensor.

    Example:
        >>> import torch
        >>> seen = []
        >>> _ = torch.func.vmap(lambda x: (seen.append(behind(x).tolist()), x)[1])(torch.arange(3))
        >>> seen
        [[0, 1, 2]]
    """
    while _functorch.is_functorch_wrapped_tensor(mapped):
        mapped = _functorch.get_unwrapped(mapped)
    return mapped


def mapped(value: Tensor) -> bool:
    """Whether a tensor stands for many, in one transform or another of those at work.

    Example:
        >>> import torch
        >>> seen = []
        >>> _ = torch.func.vmap(lambda x: (seen.append(mapped(x)), x)[1])(torch.arange(3))
        >>> seen, mapped(torch.zeros(3))
        ([True], False)
    """
    while _functorch.is_functorch_wrapped_tensor(value):
        if _functorch.is_batchedtensor(value):
            return True
        value = _functorch.get_unwrapped(value)
    return False
