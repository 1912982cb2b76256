"""Precision policies: the dtype of the weights, the dtype of the forward pass, and the devices that support them."""

# pyright: reportUnnecessaryIsInstance=false
# The arguments come from users and may have any type.

from __future__ import annotations

import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch

from . import tree
from .errors import ConfigError
from .state import check_choice
from .types import Tree


class Policy(NamedTuple):
    """A precision."""

    name: str
    weights: torch.dtype | None  # None: the dtypes of the module
    compute: torch.dtype | None  # None: no autocast
    scaled: bool  # True: the loss is scaled, see scaler.py

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context for the forward pass: `torch.autocast` for a ``-mixed`` precision, else a null context."""
        return nullcontext() if self.compute is None else torch.amp.autocast(device.type, dtype=self.compute)

    def cast(self, batch: Tree) -> Tree:
        """Cast floating tensors to the dtype of the weights, for ``-true`` precisions; leave other leaves unchanged.
        The parts of a complex tensor are then of at least float32.

        Example:
            >>> [leaf.dtype for leaf in policy("bf16-true").cast((torch.ones(2), torch.arange(2)))]
            [torch.bfloat16, torch.int64]
        """
        if self.weights is None:
            return batch
        dtype = self.weights

        def leaf(value: Any) -> Any:
            if isinstance(value, torch.Tensor) and value.is_complex():
                return value.to(torch.complex128 if dtype == torch.float64 else torch.complex64)
            floating = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.to(dtype) if floating else value

        return tree.map(leaf, batch)

    def check(self, device: torch.device) -> None:
        """Check that a device supports this precision, by multiplying two small matrices in it.

        Raises:
            ConfigError: the device cannot compute in this precision.
        """
        if self.weights is None and self.compute is None:
            return
        dtype = self.weights or torch.float32
        try:
            emulated = device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False)
            if emulated and torch.bfloat16 in (self.weights, self.compute):
                raise RuntimeError("this GPU has no bfloat16 arithmetic")
            one = torch.ones(2, 2, dtype=dtype, device=device)
            # For an unsupported dtype autocast only warns and is then disabled.
            with warnings.catch_warnings(action="ignore"), self.autocast(device):
                product = one @ one
            if product.dtype != (self.compute or dtype):
                raise RuntimeError(f"autocast computes in {product.dtype}")
        except (RuntimeError, TypeError) as error:
            raise ConfigError(
                f"{device.type} does not support {self.name}: {error}", where="precision", hint='precision="32-true"'
            ) from error


_WEIGHTS = {"64-true": torch.float64, "32-true": None, "bf16-true": torch.bfloat16, "16-true": torch.float16}
_COMPUTE = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def policy(name: str | Policy) -> Policy:
    """Return the precision of that name.

    Example:
        >>> policy("bf16-mixed").compute
        torch.bfloat16

    ``"32-true"`` computes in the dtype of the module (usually float32). ``"64-true"``, ``"bf16-true"`` and
    ``"16-true"`` cast weights and floating inputs. ``"bf16-mixed"`` and ``"16-mixed"`` keep float32 weights and run the
    forward pass under `torch.amp.autocast`. Only ``"16-mixed"`` scales the loss.

    Args:
        name: one of these names, or a policy, which is returned unchanged.

    Raises:
        ConfigError: the name is unknown.
    """
    if isinstance(name, Policy):
        return name
    check_choice("program", (*_WEIGHTS, *_COMPUTE), precision=name)
    if name in _COMPUTE:
        return Policy(name, None, _COMPUTE[name], scaled=name == "16-mixed")
    return Policy(name, _WEIGHTS[name], None, scaled=False)


def auto_device() -> torch.device:
    """Return the default device of `fit`: cuda if available, else mps, else cpu.

    Example:
        >>> auto_device().type in ("cuda", "mps", "cpu")
        True
    """
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")
