"""`per_example`: the gradient of every example of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import torch
from torch import Tensor

from ..errors import DataError
from ..state import at_least, known_keywords, stacked
from ..step import check_divisible, drawn_in_step, parts_for
from ..types import Params, Program, TrainState
from .examples import chunks


class PerExample(NamedTuple):
    """Gradients of the n examples of a batch, detached.

    The gradient of the batch in a train step is ``sum(weights * grads) / sum(weights)`` over the examples.
    """

    grads: Params  # name -> shape=(n, *P), dtype of the parameter; {} with norms_only
    norms: Tensor  # shape=(n,), at least float32: the 2-norm of all gradients of an example together
    losses: Tensor  # shape=(n,), at least float32; 0 where the weight is 0
    weights: Tensor  # shape=(n,), dtype=float32: the objective's weights


@known_keywords
def per_example(
    program: Program,
    *,
    chunk_size: Annotated[int, at_least(1)] | None = None,
    norms_only: bool = False,
    train: bool = True,
) -> Callable[..., PerExample]:
    """Return a function that computes the gradient of every example of a batch by the program's own objective.

    Example:
        >>> import torch, purestep as ps
        >>> program = ps.program(torch.nn.Linear(2, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1))
        >>> found = ps.per_example(program)(program.init(device="cpu"), (torch.randn(8, 2), torch.randn(8, 1)))
        >>> found.grads["weight"].shape, found.norms.shape
        (torch.Size([8, 1, 2]), torch.Size([8]))

    Each row is a batch of one example for the objective: row i of a gradient is the gradient of
    ``objective(model, batch[i:i + 1]).mean``, computed by `torch.func.vmap` over `torch.func.grad`. Frozen parameters
    have no gradients. Accumulation, loss scale and clipping of the program are not applied. An example of weight 0 has
    a gradient of zeros. Buffers that the forward pass writes are dropped.

    The function has no state: it may be given to `torch.compile`. In eager mode the state's key seeds dropout, as in
    the next step; each example draws its own mask, and a second call draws the same. A compiled function draws from
    torch's global generator.

    BatchNorm in train mode mixes the examples of a batch and raises an error: keep it in eval mode with
    ``ps.program(..., keep_eval=...)``, or pass ``train=False``. Activation checkpointing, nested and sparse tensors,
    and code that reads a tensor's value cannot be mapped.

    Args:
        program: from `program`, not distributed.
        chunk_size: number of examples that are computed together, >= 1. None: as many as have gradients of 256 MiB
            together. Memory for activations and, with ``norms_only``, for gradients grows with it.
        norms_only: return no gradients, so that those of one chunk exist at a time.
        train: run the module in train mode. False: eval mode, with running statistics and without dropout.

    Returns:
        ``(state, batch, *context) -> PerExample``. All tensors of the batch have one row for each of the n examples;
        numbers, text and 0-d tensors go to every example, and so does the context.

    Raises:
        ConfigError: ``chunk_size`` is less than 1, or the program has no objective or is distributed, or its loss has
            ``reduction="sum"``.
        StateError: from the function: the state is not a TrainState of one process.
        DataError: from the function: the batch has no rows, or different numbers of rows.
        StepContractError: from the function: torch cannot map the model, or a BatchNorm is in train mode.
    """
    parts = parts_for(program, "per_example")
    check_divisible(parts, "per_example")

    def gradients(state: TrainState, batch: Any, *context: Any) -> PerExample:
        """``(state, batch, *context) -> PerExample``."""
        stacked.check_plain(state, where="state")

        def run() -> PerExample:
            found = [
                PerExample({} if norms_only else chunk.grads, chunk.norms, chunk.losses, chunk.weights)
                for chunk in chunks(
                    parts, state, batch, context, chunk_size=chunk_size, train=train, where="per_example"
                )
            ]
            if not found:
                raise DataError("the batch has no rows", where="batch", hint="pass a batch of at least one row")
            if len(found) == 1:
                return found[0]
            norms, losses, weights = (torch.cat(column) for column in list(zip(*found, strict=True))[1:])
            # One by one, so that the parts of a gradient are freed before the next is joined.
            grads = {name: torch.cat([each.grads.pop(name) for each in found]) for name in list(found[0].grads)}
            return PerExample(grads, norms, losses, weights)

        return drawn_in_step(state, run)

    return gradients
