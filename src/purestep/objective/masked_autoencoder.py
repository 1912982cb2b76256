"""Reconstruction losses over the masked elements of a masked autoencoder."""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor

from ..errors import DataError, StepContractError
from ..state import check_choice, known_keywords
from ..types import Loss, Objective
from .measure import describe


@known_keywords
def masked_reconstruction(
    loss: Literal["mse", "sse"] = "mse", reduction: Literal["mean", "sum", "batch_mean"] | None = None
) -> Objective:
    """Build the objective of a masked autoencoder: the squared error over the masked elements.

    Example:
        >>> import torch, purestep as ps
        >>> model = lambda x: (torch.zeros_like(x), None, x > 0)  # positive numbers are visible
        >>> loss = ps.masked_reconstruction()(model, torch.tensor([[1.0, -2.0, -4.0]]))
        >>> loss.mean.item(), loss.weight.item()
        (10.0, 2.0)

    The model returns ``(reconstruction, latent, visible)``; the loss covers ``~visible``. A batch is ``x`` or
    ``(x, meta)``.

    Args:
        loss: "mse" or "sse"; they differ only in the default reduction, "mean" and "batch_mean".
        reduction: "mean" over masked elements, "sum", or "batch_mean": the sum divided by the batch size, which keeps
            the weight of an example if masks differ in size. "sum" goes with neither ``accumulate`` nor
            ``microbatches`` nor several processes.

    Raises:
        ConfigError: the loss or reduction is unknown.
        DataError: when called, if the input is not a tensor.
        StepContractError: when called, if the model returns something else, if the shapes of reconstruction, input and
            mask differ, or if the mask is not boolean.
    """
    chosen = reduction or ("mean" if loss == "mse" else "batch_mean")

    def objective(model: Any, batch: Any, /, *context: Any) -> Loss:
        del context  # The model draws the masks.
        x = batch[0] if isinstance(batch, tuple | list) and batch else batch
        if not isinstance(x, Tensor):
            hint = "pass x, or (x, meta)"
            raise DataError(f"the input is a {type(x).__name__}, not a tensor", where="batch", hint=hint)
        recon, visible = _reconstructed(model(x))
        mask = ~visible if visible.dtype == torch.bool else visible
        mean = masked_sse(recon, x, mask, reduction=chosen)
        masked = mask.sum().to(torch.float32)
        weight = {"mean": masked, "sum": torch.ones_like(masked), "batch_mean": torch.full_like(masked, len(x))}
        return Loss(mean, weight[chosen], {})

    objective.is_sum = chosen == "sum"  # pyright: ignore[reportFunctionMemberAccess]  # as of `supervised`
    return objective


def _reconstructed(output: Any) -> tuple[Tensor, Tensor]:
    parts = cast("list[Any]", list(output)) if isinstance(output, tuple | list) else [output]
    if len(parts) == 3 and isinstance(parts[0], Tensor) and isinstance(parts[2], Tensor):
        return parts[0], parts[2]
    raise StepContractError(
        f"the model returned {describe(output)}" + (f" of {len(parts)}" if len(parts) != 1 else ""),
        where="masked_reconstruction",
        hint="return (reconstruction, latent, visible) with tensors, visible of dtype bool; latent may be anything",
    )


def masked_mse(x_recon: Tensor, x: Tensor, mask: Tensor, *, reduction: str = "mean") -> Tensor:
    """Squared error over masked elements, computed in at least float32; 0 for an empty mask.

    Example:
        >>> import torch
        >>> masked_mse(torch.ones(1, 2), torch.zeros(1, 2), torch.tensor([[True, False]])).item()
        1.0

    Args:
        x_recon: any shape, floating.
        x: the same shape. Elements that are not masked may be nan.
        mask: the same shape, dtype=bool; True for the elements whose error counts.
        reduction: "mean" over masked elements, "sum", or "batch_mean": the sum over the leading dimension.

    Returns:
        shape=(), differentiable.

    Raises:
        ConfigError: the reduction is unknown.
        StepContractError: the shapes differ, or the mask is not boolean.
    """
    return masked_sse(x_recon, x, mask, reduction=reduction)


def masked_sse(x_recon: Tensor, x: Tensor, mask: Tensor, *, reduction: str = "batch_mean") -> Tensor:
    """Squared error as in `masked_mse`, by default the sum divided by the batch size.

    Example:
        >>> import torch
        >>> masked_sse(torch.ones(2, 2), torch.zeros(2, 2), torch.ones(2, 2, dtype=torch.bool)).item()
        2.0

    Raises:
        ConfigError: the reduction is unknown.
        StepContractError: the shapes differ, or the mask is not boolean.
    """
    check_choice("masked_reconstruction", ("mean", "sum", "batch_mean"), reduction=reduction)
    if mask.dtype != torch.bool or not x_recon.shape == x.shape == mask.shape:
        raise StepContractError(
            f"reconstruction {list(x_recon.shape)}, input {list(x.shape)} and mask {list(mask.shape)} ({mask.dtype}) "
            "do not fit together",
            where="masked_reconstruction",
            hint="pass three tensors of one shape, the mask of dtype bool",
        )
    # Not boolean indexing, whose shape depends on the data; not a product with the mask, since nan x 0 is nan.
    # In at least float32: the sum of a few thousand squares in float16 is inf.
    error = x_recon.to(torch.promote_types(x_recon.dtype, torch.float32)) - x
    total = torch.where(mask, error, torch.zeros_like(error)).square().sum()
    if reduction == "sum":
        return total
    return total / (mask.sum().clamp(min=1) if reduction == "mean" else len(x))
