"""What a masked autoencoder did not see, and how well it guessed it."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor

from ..errors import ConfigError, DataError, StepContractError
from ..pickling import recipe
from ..types import Loss, Objective
from .measure import describe


@recipe
def masked_reconstruction(
    loss: Literal["mse", "sse"] = "mse", reduction: Literal["mean", "sum", "batch_mean"] | None = None
) -> Objective:
    """Squared error on what a masked autoencoder did not see.

    The model returns ``(reconstruction, latent, visible)``; the loss runs over ``~visible``. Batches are ``x`` or
    ``(x, meta)``.

    Args:
        loss: "mse" and "sse" compute the same and differ in the default reduction: "mean" and "batch_mean".
        reduction: "mean" over masked elements, "sum", or "batch_mean" (the sum over the batch size, which keeps the
            weight of an example when masks differ in size).

    Raises:
        ConfigError: no such loss or reduction.
        DataError: when called: a batch whose input is no tensor.
        StepContractError: when called: the model returns something else; reconstruction, input and mask of different
            shapes, or a mask that is not boolean.

    Example:
        >>> import torch, purestep as ps
        >>> model = lambda x: (torch.zeros_like(x), None, x > 0)  # sees what is positive
        >>> loss = ps.masked_reconstruction()(model, torch.tensor([[1.0, -2.0, -4.0]]))
        >>> loss.mean.item(), loss.weight.item()
        (10.0, 2.0)
    """
    if loss not in ("mse", "sse"):
        raise ConfigError(f"{loss!r} is no loss", where="masked_reconstruction", hint='"mse" or "sse"')
    chosen = reduction or ("mean" if loss == "mse" else "batch_mean")
    _check_reduction(chosen)

    def objective(model: Any, batch: Any, /, *context: Any) -> Loss:
        del context  # the masks are drawn by the model
        x = batch[0] if isinstance(batch, tuple | list) and batch else batch
        if not isinstance(x, Tensor):
            raise DataError(f"the input is a {type(x).__name__}, not a tensor", where="batch", hint="x, or (x, meta)")
        recon, visible = _reconstructed(model(x))
        mask = ~visible if visible.dtype == torch.bool else visible
        mean = masked_sse(recon, x, mask, reduction=chosen)
        masked = mask.sum().to(torch.float32)
        weight = {"mean": masked, "sum": torch.ones_like(masked), "batch_mean": torch.full_like(masked, len(x))}
        return Loss(mean, weight[chosen], {})

    return objective


def _reconstructed(output: Any) -> tuple[Tensor, Tensor]:
    parts = cast("list[Any]", list(output)) if isinstance(output, tuple | list) else [output]
    if len(parts) == 3 and isinstance(parts[0], Tensor) and isinstance(parts[2], Tensor):
        return parts[0], parts[2]
    raise StepContractError(
        f"the model returned {describe(output)}" + (f" of {len(parts)}" if len(parts) != 1 else ""),
        where="masked_reconstruction",
        hint="return (reconstruction, latent, visible), all of it tensors but the latent, visible of dtype bool",
    )


def masked_mse(x_recon: Tensor, x: Tensor, mask: Tensor, *, reduction: str = "mean") -> Tensor:
    """Squared error over masked elements, computed in at least float32; 0 for an empty mask.

    Args:
        x_recon: any shape, floating.
        x: the same shape. What is not masked may be nan.
        mask: the same shape, dtype=bool; True where the error counts.
        reduction: "mean" over masked elements, "sum", or "batch_mean": the sum over the leading dimension.

    Returns:
        shape=(), differentiable.

    Raises:
        ConfigError: no such reduction.
        StepContractError: different shapes, or a mask of another dtype.

    Example:
        >>> import torch
        >>> masked_mse(torch.ones(1, 2), torch.zeros(1, 2), torch.tensor([[True, False]])).item()
        1.0
    """
    return masked_sse(x_recon, x, mask, reduction=reduction)


def masked_sse(x_recon: Tensor, x: Tensor, mask: Tensor, *, reduction: str = "batch_mean") -> Tensor:
    """As `masked_mse`, arguments and errors too, but by default the summed error over the batch size.

    Example:
        >>> import torch
        >>> masked_sse(torch.ones(2, 2), torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool)).item()
        2.0

    Raises:
        ConfigError: no such reduction.
        StepContractError: different shapes, or a mask of another dtype.
    """
    _check_reduction(reduction)
    if mask.dtype != torch.bool or not x_recon.shape == x.shape == mask.shape:
        raise StepContractError(
            f"reconstruction {list(x_recon.shape)}, input {list(x.shape)} and mask {list(mask.shape)} ({mask.dtype})",
            where="masked_reconstruction",
            hint="three tensors of one shape, the mask of dtype bool",
        )
    # No boolean indexing: its result has a shape that depends on the data, which no graph can hold. No product with
    # the mask: nan x 0 is nan, and what is not scored may be missing.
    # In at least float32: of squares in float16, a few thousand add up to infinity.
    error = x_recon.to(torch.promote_types(x_recon.dtype, torch.float32)) - x
    total = torch.where(mask, error, torch.zeros_like(error)).square().sum()
    if reduction == "sum":
        return total
    return total / (mask.sum().clamp(min=1) if reduction == "mean" else len(x))


def _check_reduction(reduction: str) -> None:
    if reduction not in ("mean", "sum", "batch_mean"):
        raise ConfigError(f"{reduction!r}", where="reduction", hint='"mean", "sum" or "batch_mean"')
