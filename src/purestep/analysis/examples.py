"""Gradients of single examples: `torch.func.vmap` over `torch.func.grad`, in chunks of a batch."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from functools import reduce
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from .. import tree
from ..errors import DataError, StepContractError
from ..metrics import mean as means
from ..step import Parts, wide
from ..torch_ext import hidden, tensor_layout, tracing
from ..types import Mean, Metrics, Params, TrainState
from . import plain_functions

_MAPPED = "use operations that torch.func maps, or call program.train_step on single rows"
CHUNK_BYTES = 256 * 2**20
"""Gradients of one chunk take about this much memory if the caller sets no ``chunk_size``."""


class Chunk(NamedTuple):
    """Gradients of m examples; those of an example of weight 0 are zeros."""

    grads: Params  # name -> shape=(m, *P)
    losses: Tensor  # shape=(m,), at least float32; 0 where the weight is 0
    weights: Tensor  # shape=(m,), dtype=float32
    norms: Tensor  # shape=(m,), at least float32: the 2-norm of all gradients of an example together
    metrics: Metrics  # the objective's own, summed over the examples


def chunks(
    parts: Parts,
    state: TrainState,
    batch: Any,
    context: tuple[Any, ...],
    *,
    chunk_size: int | None,
    train: bool,
    where: str,
) -> Iterator[Chunk]:
    """Gradients of the rows of a batch, chunk by chunk. Every row is a batch of one example for the objective.

    Args:
        parts: of the program.
        state: of the program.
        batch: tensors and arrays with one row for each example, in any nesting; other values go to every example.
        context: the further arguments of the objective, the same for every example.
        chunk_size: the number of examples that are computed together; None: as many as have gradients of
            `CHUNK_BYTES`.
        train: run the module in train mode.
        where: the function that is called, for errors.

    Raises:
        DataError: the batch has no rows, or tensors of different length.
        StepContractError: torch cannot map the model.
    """
    if train:
        _check_modules(parts.spec.template.train.model, where)
    leaves, treedef = tree.flatten(tree.dicts(batch))
    leaves, rows = _rows(leaves, state.step.device)
    chunk_size = chunk_size or max(1, CHUNK_BYTES // max(1, sum(p.nbytes for p in state.params.values())))
    kinds: dict[str, Any] = {}

    def one(params: Params, given: list[Any]) -> tuple[Params, tuple[Tensor, Tensor, dict[str, Any]]]:
        def mean(params: Params) -> tuple[Tensor, Any]:
            found = parts.loss(params, state, tree.unflatten(treedef, given), context, train=train)
            kinds.update({name: m for name, m in found.metrics.items() if type(m) is not Mean})
            sums = {name: (m.total, m.weight) for name, m in found.metrics.items()}
            return found.mean, (found.mean.detach(), found.weight, sums)

        grads, (loss, weight, sums) = torch.func.grad(mean, has_aux=True)(params)
        counts = weight > 0
        for name in grads:  # one by one: the memory of one more gradient, not of all
            grads[name] = grads[name].masked_fill(~counts, 0.0)
        return grads, (torch.where(counts, loss, torch.zeros_like(loss)), weight, sums)

    is_mapped = [isinstance(leaf, Tensor) and leaf.dim() > 0 for leaf in leaves]
    # Recurrent layers add to a hidden state in place, which vmap allows only if the result of the operation before it
    # was mapped too: the parameters are mapped as views with one row for each example.
    copied = any(
        isinstance(module, nn.RNNBase | nn.RNNCellBase) for module in parts.spec.template.train.model.modules()
    )
    in_dims = (0 if copied else None, [0 if each else None for each in is_mapped])
    mapped = torch.func.vmap(one, in_dims=in_dims, randomness="different")
    for start in range(0, rows, chunk_size):
        # One more dimension: for the objective an example is a batch of one row.
        given = [
            leaf[start : start + chunk_size].unsqueeze(1) if each else leaf
            for leaf, each in zip(leaves, is_mapped, strict=True)
        ]
        # The fused kernel of the CPU has no rule for vmap, which would loop over the examples and warn.
        with (
            explained(where, _MAPPED),
            plain_functions.differentiable() if state.step.device.type == "cpu" else nullcontext(),
        ):
            params, count = state.params, min(chunk_size, rows - start)
            if copied:
                params = {name: p.expand(count, *p.shape) for name, p in params.items()}
            grads, (losses, weights, sums) = mapped(params, given)
        metrics = {
            name: means.with_sums(kinds[name], total.sum(0), weight.sum(0))
            if name in kinds
            else Mean(total.sum(0), weight.sum(0))
            for name, (total, weight) in sums.items()
        }
        squares = (grad.to(wide(grad.dtype)).flatten(1).square().sum(1) for grad in grads.values())
        yield Chunk(grads, losses, weights, reduce(torch.add, squares).sqrt(), metrics)


def _rows(leaves: list[Any], device: torch.device) -> tuple[list[Any], int]:
    """The leaves with arrays as tensors, and the number of rows."""
    leaves = [torch.as_tensor(leaf, device=device) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
    found = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() > 0]
    for leaf in found:
        if not tensor_layout.is_dense(leaf):
            raise DataError(
                f"the batch holds a {tensor_layout.layout_name(leaf)} tensor, which torch.func.vmap does not map",
                where="batch",
                hint="call x.to_dense(), or pad the tensor in the loader",
            )
    sizes = sorted({leaf.shape[0] for leaf in found})
    if not sizes:
        raise DataError(
            "the batch has no tensor with rows", where="batch", hint="pass tensors with one row for each example"
        )
    if len(sizes) > 1:
        raise DataError(
            f"the batch has tensors of {' and '.join(map(str, sizes))} rows",
            where="batch",
            hint="pass tensors with one row for each example, and other tensors as context",
        )
    return leaves, sizes[0]


def _check_modules(root: nn.Module, where: str) -> None:
    """Raise StepContractError for a layer that computes statistics of the batch."""
    for name, module in root.named_modules():
        tracks = hidden.is_instance_norm(module) and module.track_running_stats
        if module.training and (hidden.is_batch_norm(module) or tracks):
            raise StepContractError(
                f"a {type(module).__name__} in train mode uses statistics of the whole batch, so a single "
                "example has no gradient",
                where=f"{where}: {name or type(module).__name__}",
                hint=f'pass ps.program(..., keep_eval=("{name}",)), or a GroupNorm; per_example(program, train=False) '
                "uses the running statistics",
            )


@contextmanager
def explained(where: str, cure: str) -> Generator[None]:
    """Raise errors of a transform of `torch.func` that does not accept the model as StepContractError."""
    try:
        yield
    except (RuntimeError, NotImplementedError) as error:
        failed = refused(where, error, cure)
        if failed is None:
            raise
        raise failed from error


def refused(where: str, error: Exception, cure: str) -> StepContractError | None:
    """The error for a model that a transform of `torch.func` does not accept; None if ``error`` is the model's own."""
    text = str(error).strip()
    found = text.partition("\n")[0][:200]
    if "saved tensor hooks" in text:
        found = "activation checkpointing and other hooks of saved tensors have no rule for it"
        cure = (
            "pass a program of the model without torch.utils.checkpoint (gradient_checkpointing_disable() of Hugging "
            "Face's models); its weights have the same names"
        )
    elif "doesn't have storage" in text:  # said of a mapped tensor
        found = "an operation needs a tensor's own memory (as of packed sequences)"
    elif "mutate a captured Tensor" in text:
        found = "it writes a tensor that is not in the state, as BatchNorm does in train mode"
        cure = "call .eval() on the module that holds it, or hold it in a buffer of the model"
    elif "inplace randomness" in text:
        found = "it fills a tensor with random numbers that belongs to no member"
        cure = "call torch.rand, torch.randn or rand_like(x), not x.normal_()"
    elif not any(word in text for word in ("vmap", "functorch", "atching rule", "setup_context", "torch.func")):
        return None
    elif ".item()" in found:
        found = "it reads the value of a tensor (.item(), or a branch), which differs between examples and members"
    place = ", ".join(filter(None, (where, tracing.user_line(error))))
    return StepContractError(f"torch.func cannot map this model: {found}", where=place, hint=cure)
