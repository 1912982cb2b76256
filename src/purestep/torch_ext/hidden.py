"""Facts about modules, tensors and torch's services that torch gives no public name.

Outside of this room, `compile` and `parallel`, no file uses a private name of another library; `tests/laws` checks it.

Private names: those of `nn.Module` (``_buffers``, ``_apply`` and the like), the base classes of norms, ``_version`` and
``_cdata`` of tensors, the DataLoader's workers and its SIGCHLD handler.
"""

from __future__ import annotations

import operator
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import batchnorm, instancenorm

REGISTERED = frozenset({"_parameters", "_buffers", "_modules"})
"""Attributes in which a module holds its parameters, buffers and submodules."""

FLAT_WEIGHTS = "_flat_weights"
"""The attribute in which a recurrent layer holds its weights a second time."""


def saved_buffers(module: nn.Module) -> set[str]:
    """Names of a module's own buffers that its state_dict contains; unlike ``state_dict`` this runs no hooks.

    Example:
        >>> sorted(saved_buffers(nn.BatchNorm1d(2)))
        ['num_batches_tracked', 'running_mean', 'running_var']
    """
    kept: dict[str, Any] = {}
    nn.Module._save_to_state_dict(module, kept, "", keep_vars=True)  # pyright: ignore[reportPrivateUsage]
    return set(kept) & {name for name, _ in module.named_buffers(recurse=False, remove_duplicate=False)}


def unset_buffers(module: nn.Module) -> list[str]:
    """Names of a module's own persistent buffers that are None, which ``named_buffers`` skips.

    Example:
        >>> unset_buffers(nn.BatchNorm1d(2, track_running_stats=False))
        ['running_mean', 'running_var', 'num_batches_tracked']
    """
    own, passing = module._buffers, module._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
    return [name for name, buffer in own.items() if buffer is None and name not in passing]


def set_apply(module: nn.Module, apply: Callable[..., nn.Module]) -> None:
    """Replace the method behind ``.to``, ``.half``, ``.cuda`` and the like, in this module alone."""
    module._apply = apply  # pyright: ignore[reportPrivateUsage]


def compiled_module(module: nn.Module) -> nn.Module | None:
    """The module inside the wrapper of `torch.compile`; None for any other module.

    Example:
        >>> compiled_module(nn.Linear(1, 1)) is None
        True
    """
    inner = getattr(module, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else None


def state_dict_version(module: nn.Module) -> int | None:
    """The version of a module's state_dict format, which `load_state_dict` compares; None if the class has none.

    Example:
        >>> state_dict_version(nn.BatchNorm1d(2))
        2
    """
    return getattr(module, "_version", None)


def state_dict(tensors: Mapping[str, Tensor], versions: Mapping[str, int | None]) -> dict[str, Tensor]:
    """The tensors with the versions of the submodules, as ``module.state_dict()`` has them: a module reads the version
    of its weights before it loads them.

    Example:
        >>> import torch
        >>> state_dict({"weight": torch.ones(1)}, {"": 2})["weight"]
        tensor([1.])
    """
    found: Any = OrderedDict(tensors)
    found._metadata = OrderedDict((name, {"version": version}) for name, version in versions.items())
    return found


def is_batch_norm(module: nn.Module) -> bool:
    """True for a BatchNorm of any number of dimensions, synchronized, lazy, or of a library that extends torch's base.

    Example:
        >>> is_batch_norm(nn.SyncBatchNorm(2)), is_batch_norm(nn.InstanceNorm1d(2))
        (True, False)
    """
    return isinstance(module, batchnorm._BatchNorm)  # pyright: ignore[reportPrivateUsage]


def is_instance_norm(module: nn.Module) -> bool:
    """True for an InstanceNorm of any number of dimensions.

    Example:
        >>> is_instance_norm(nn.InstanceNorm2d(2))
        True
    """
    return isinstance(module, instancenorm._InstanceNorm)  # pyright: ignore[reportPrivateUsage]


version: Callable[[Tensor], int] = operator.attrgetter("_version")
"""The number of in-place writes to a tensor, which autograd counts; writes through ``.data`` are none. An inference
tensor has no counter: RuntimeError. Eager steps read it twice for each weight, so it costs no Python call."""


def storage_address(tensor: Tensor) -> int:
    """The address of a tensor's storage object, which a fake tensor has too; the memory may lie anywhere."""
    return tensor.untyped_storage()._cdata  # pyright: ignore[reportPrivateUsage]


def has_gradient_hook(tensor: Tensor) -> bool:
    """True if a hook waits for a tensor's gradient, before or after its accumulation.

    Example:
        >>> import torch
        >>> has_gradient_hook(torch.ones(1, requires_grad=True))
        False
    """
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def loader_workers(iterator: Any) -> list[Any]:
    """The processes of a DataLoader's iterator: their exit codes tell which has died.

    Example:
        >>> loader_workers(iter([]))
        []
    """
    return list(getattr(iterator, "_workers", ()))


def set_worker_handler() -> str:
    """Install torch's SIGCHLD handler, as the first DataLoader with workers does; return the module that defines it."""
    from torch.utils.data._utils import signal_handling

    signal_handling._set_SIGCHLD_handler()  # pyright: ignore[reportPrivateUsage]
    return signal_handling.__name__
