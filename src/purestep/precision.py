"""What dtype weights are kept in and what dtype a forward pass computes in, on which device."""

# pyright: reportUnnecessaryIsInstance=false
# What is handed in here may be anything, whatever the annotations say.

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from . import tree
from .errors import ConfigError
from .types import Tree


class Policy(NamedTuple):
    """One precision. ``weights`` None keeps the module's own dtype; ``compute`` None means no autocast."""

    name: str
    weights: torch.dtype | None
    compute: torch.dtype | None
    scaled: bool  # whether the loss is scaled, see scaler.py


_WEIGHTS = {"64-true": torch.float64, "32-true": None, "bf16-true": torch.bfloat16, "16-true": torch.float16}
_COMPUTE = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def policy(name: str | Policy) -> Policy:
    """The precision of that name.

    ``"32-true"`` computes in the module's own dtype (float32 as a rule); ``"64-true"``, ``"bf16-true"`` and
    ``"16-true"`` cast weights and floating inputs; ``"bf16-mixed"`` and ``"16-mixed"`` keep float32 weights and run the
    forward pass under `torch.amp.autocast`. Only ``"16-mixed"`` brings a loss scaler.

    Args:
        name: one of those, or a policy, which is returned as it is.

    Raises:
        ConfigError: no such precision.

    Example:
        >>> policy("bf16-mixed").compute
        torch.bfloat16
    """
    if isinstance(name, Policy):
        return name
    if isinstance(name, str) and name in _COMPUTE:
        return Policy(name, None, _COMPUTE[name], scaled=name == "16-mixed")
    if isinstance(name, str) and name in _WEIGHTS:
        return Policy(name, _WEIGHTS[name], None, scaled=False)
    known = ", ".join(repr(key) for key in (*_WEIGHTS, *_COMPUTE))
    raise ConfigError(f"{name!r} is no precision", where="precision", hint=f"one of {known}")


def autocast(policy: Policy, device: torch.device) -> AbstractContextManager[Any]:
    """The context that a forward pass runs in: `torch.autocast` for a ``-mixed`` precision, else one without effect.

    Example:
        >>> with autocast(policy("bf16-mixed"), torch.device("cpu")):
        ...     (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
        torch.bfloat16
    """
    if policy.compute is None:
        return nullcontext()
    return torch.amp.autocast(device.type, dtype=policy.compute)


def cast(policy: Policy, batch: Tree) -> Tree:
    """Floating tensors in the dtype of the weights, for the ``-true`` precisions; others as they are.

    Example:
        >>> [leaf.dtype for leaf in cast(policy("bf16-true"), (torch.ones(2), torch.arange(2)))]
        [torch.bfloat16, torch.int64]
    """
    if policy.weights is None:
        return batch
    dtype = policy.weights

    def leaf(value: Any) -> Any:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if floating else value

    return tree.map(leaf, batch)


def usable(name: str | torch.device) -> torch.device:
    """The device of that name, if this machine has it.

    Raises:
        ConfigError: it has not.

    Example:
        >>> usable("cpu")
        device(type='cpu')
    """
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # an AssertionError where torch was built without CUDA
        words = str(error).partition(". ")[0]  # torch goes on to list every backend it knows
        raise ConfigError(f"no device {str(name)!r} here: {words}", where="device", hint='device="cpu"') from error
    return device


def check(policy: Policy, device: torch.device) -> None:
    """Run a product of two small matrices as a step would.

    Raises:
        ConfigError: this device cannot compute in this precision.

    Example:
        >>> check(policy("bf16-mixed"), torch.device("cpu"))
    """
    if policy.weights is None and policy.compute is None:
        return
    dtype = policy.weights or torch.float32
    try:
        emulated = device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
        if emulated and torch.bfloat16 in (policy.weights, policy.compute):
            raise RuntimeError("this GPU has no bfloat16 arithmetic")
        one = torch.ones(2, 2, dtype=dtype, device=device)
        # What autocast cannot do it announces in a warning, and goes on without.
        with warnings.catch_warnings(action="ignore"), autocast(policy, device):
            product = one @ one
        if product.dtype != (policy.compute or dtype):
            raise RuntimeError(f"autocast computes in {product.dtype}")
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"{device.type} cannot do {policy.name}: {error}", where="precision", hint='precision="32-true"'
        ) from error


def auto_device() -> torch.device:
    """The device that `fit` takes when none is named: cuda, then mps, then cpu.

    Example:
        >>> auto_device().type in ("cuda", "mps", "cpu")
        True
    """
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")
