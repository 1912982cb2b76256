"""The gradient noise scale: how large a batch must be for its gradient to be more signal than noise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from .. import tree
from ..errors import ConfigError
from ..optim import global_norm
from ..state import at_least, known_keywords, stacked
from ..step import check_divisible, drawn_in_step, microbatch, parts_for
from ..types import Program, TrainState
from .examples import chunks


class NoiseScale(NamedTuple):
    """Estimates from one or more batches. Average ``trace`` and ``squared_norm`` over steps before dividing them."""

    noise_scale: Tensor  # shape=(): trace / squared_norm, in examples; not positive if squared_norm is not
    trace: Tensor  # shape=(): of the covariance of the gradients of single examples
    squared_norm: Tensor  # shape=(): of the true gradient; may be negative, since the estimate is unbiased


@known_keywords
def gradient_noise_scale(
    program: Program, *, chunk_size: Annotated[int, at_least(1)] | None = None, train: bool = True
) -> Callable[..., NoiseScale]:
    r"""Return a function that estimates the simple noise scale of McCandlish et al. (2018).

    Example:
        >>> import torch, purestep as ps
        >>> program = ps.program(torch.nn.Linear(2, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1))
        >>> state = program.init(device="cpu")
        >>> batches = [(x := torch.randn(64, 2), x.sum(1, keepdim=True) + 3 + torch.randn(64, 1)) for _ in range(4)]
        >>> found = ps.gradient_noise_scale(program)(state, *batches)
        >>> bool((found.noise_scale > 0) & (found.trace > 0))
        True

    :math:`B_{simple} = tr(\Sigma) / |G|^2`, with the gradient :math:`G` of the whole distribution and the covariance
    :math:`\Sigma` of gradients of single examples. Batches much smaller than this are mostly noise; batches much larger
    waste examples. The estimates from n gradients :math:`g_i` with the mean :math:`\bar g` are unbiased:
    :math:`tr(\Sigma) \approx (\sum |g_i|^2 - n |\bar g|^2) / (n - 1)` and
    :math:`|G|^2 \approx |\bar g|^2 - tr(\Sigma) / n`. Of several batches, both are averaged over the batches before the
    division. Weights of the objective count: :math:`\bar g` is the gradient of a train step. A batch with fewer than
    two gradients of positive weight is left out; if all are, the estimates are nan. Dropout is part of the noise.

    Args:
        program: from `program`, not distributed; `per_example` says which models have gradients of single examples.
        chunk_size: as for `per_example`.
        train: run the module in train mode.

    Returns:
        ``(state, *batches, context=()) -> NoiseScale``, without a wait for the device.

    Raises:
        ConfigError: the program has no objective or is distributed, or its loss has ``reduction="sum"``.
        StateError, DataError, StepContractError: from the function: as `per_example`; a batch has fewer than 2 rows.
    """
    where = "gradient_noise_scale"
    parts = parts_for(program, where)
    check_divisible(parts, where)

    def estimate(state: TrainState, *batches: Any, context: tuple[Any, ...] = ()) -> NoiseScale:
        """``(state, *batches, context=()) -> NoiseScale``."""
        stacked.check_plain(state, where="state")
        if not batches:
            raise ConfigError("there is no batch", where=where, hint="pass (state, batch)")

        def of_batch(batch: Any) -> tuple[Tensor, Tensor, Tensor]:
            """The trace, the squared norm, and True if they are defined: two gradients have a weight."""
            if microbatch.count_rows(tree.dicts(batch)) < 2:
                raise ConfigError("a batch of one row has no spread", where=where, hint="pass more rows")
            total: Any = None  # sums of w * g, of w^2 * |g|^2, of the weights w, and of the examples that have one
            for chunk in chunks(parts, state, batch, context, chunk_size=chunk_size, train=train, where=where):
                weights = chunk.weights.to(chunk.norms.dtype)
                grads = {name: torch.einsum("n,n...->...", weights.to(g.dtype), g) for name, g in chunk.grads.items()}
                sums = grads, (weights * chunk.norms).square().sum(), weights.sum(), (weights > 0).sum()
                total = sums if total is None else tree.map(torch.add, total, sums)
            grads, squares, weight, number = total
            mean = global_norm(grads) / weight
            variance = (squares * (number / weight).square() - number * mean.square()) / (number - 1)
            return variance, mean.square() - variance / number, number > 1

        def run() -> NoiseScale:
            *columns, counts = (torch.stack(column) for column in zip(*(of_batch(b) for b in batches), strict=True))
            trace, squared = (torch.where(counts, column, 0).sum() / counts.sum() for column in columns)
            return NoiseScale(trace / squared, trace, squared)

        return drawn_in_step(state, run)

    return estimate
