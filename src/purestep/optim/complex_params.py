"""Complex parameters, whose gradients are torch's: the derivative by the real part plus i times that by the imaginary
part.

Linear parts (momentum, weight decay, the norm of all numbers) take complex tensors as they are. An optimizer that
torch defines for them sees real and imaginary parts as two numbers: `on_pairs`. Every other one refuses: `real_only`.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import tree
from ..errors import ConfigError
from ..torch_ext import complex_numbers
from ..types import Params, Tree
from .base import Transform


def on_pairs(tx: Transform) -> Transform:
    """The transform for which each complex tensor is two real ones, as `torch.view_as_real` shows it. Its state has
    complex tensors in the shape of the parameters."""

    def update(updates: Params, state: Tree, params: Params) -> tuple[Params, Tree]:
        if not any(update.is_complex() for update in updates.values()):
            return tx.update(updates, state, params)
        found, new = tx.update(
            tree.map(complex_numbers.as_real, updates),
            tree.map(_real, state),
            tree.map(complex_numbers.as_real, params),
        )
        return {name: complex_numbers.like(found[name], update) for name, update in updates.items()}, tree.map(
            _like, new, state
        )

    return tx._replace(update=update)


def real_only(tx: Transform, where: str) -> Transform:
    """The transform, whose ``init`` raises a ConfigError for a complex parameter."""

    def init(params: Params) -> Tree:
        found = [name for name, param in params.items() if param.is_complex()]
        if found:
            raise ConfigError(
                f"the transform is not defined for complex parameters: {found[0]} is one"
                + (f", and {len(found) - 1} more" if len(found) > 1 else ""),
                where=where,
                hint="use an optimizer that torch defines for them: optim.adamw(1e-3), optim.sgd(0.1); for these "
                "parameters alone, by optim.partition",
            )
        return tx.init(params)

    return tx._replace(init=init)


def _real(leaf: Any) -> Any:
    return complex_numbers.as_real(leaf) if isinstance(leaf, Tensor) else leaf


def _like(pairs: Any, leaf: Any) -> Any:
    return complex_numbers.like(pairs, leaf) if isinstance(leaf, Tensor) else pairs
