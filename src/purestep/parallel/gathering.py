"""`gather`: the rows of all processes, with their gradient, for losses that compare the rows of a batch."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor, library

from ..errors import ConfigError, RankError
from ..torch_ext import tracing
from . import collectives, passes, processes
from . import mesh as meshes

_WHERE = "parallel.gather"


def gather(x: Tensor) -> Tensor:
    """Return the rows of all processes, in the order of the whole batch.

    Example:
        >>> import torch, purestep as ps
        >>> def contrastive(model, batch):
        ...     a, b = (ps.parallel.gather(model(part)) for part in batch)
        ...     loss = torch.nn.functional.cross_entropy(a @ b.T, torch.arange(len(a)))
        ...     return ps.Loss(loss, len(batch[0]), {})
        >>> program = ps.program(torch.nn.Linear(2, 3), contrastive, ps.optim.sgd(0.1))
        >>> state, metrics = program.train_step(program.init(seed=0), (torch.ones(4, 2), torch.ones(4, 2)))
        >>> round(float(metrics["loss"]), 4)  # of four candidates alike
        1.3863

    In an objective, for losses that compare the rows of a batch (CLIP, SimCLR, supervised contrastive losses): each
    process computes the loss of all N rows, so that the step equals that of one process. The gradient of each row is
    the sum of those of all processes, weighted by the weights of their losses. In one process it returns ``x``. Every
    process makes the same calls.

    With ``microbatches`` the rows are those of one micro-batch of each process: other ones than in one process. A
    compiled step needs the same number of rows in every process; in eager mode the numbers may differ, and a row that
    stands in for an empty share is left out. The numbers are compared in every call, by one exchange on the host.

    Args:
        x: (n, ...), one row for each row of the batch; all other dimensions are the same in every process.

    Returns:
        (N, ...), on every process.

    Raises:
        ConfigError: ``x`` has no rows, it is 0-d.
        RankError: rows have other shapes or dtypes in another process; in a compiled step, numbers of rows differ.
    """
    if not x.dim():
        raise ConfigError("the tensor is 0-d, without rows", where=_WHERE, hint="gather outputs, not their mean")
    if meshes.here().batch_size == 1:
        return x
    current = passes.current()
    current.mixes = True
    passes.meet("ps.parallel.gather")
    if tracing.in_graph():
        _check_rows(x.detach(), current.counts)
        return collectives.gathered(x, "batch")
    sizes = _sizes(x, current.counts)
    most = max(sizes)
    padded = x[: sizes[meshes.here().batch_rank]]
    if len(padded) < most:
        padded = torch.cat([padded, padded.new_zeros((most - len(padded), *x.shape[1:]))])
    whole = collectives.gathered(padded, "batch")
    parts = whole.split(most) if most else [whole]
    return whole if min(sizes) == most else torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])


def _sizes(x: Tensor, counts: Tensor | None) -> list[int]:
    """The number of rows of each process of the axis "batch", 0 of rows that only stand in.

    Raises:
        RankError: rows differ in shape or dtype.
    """
    mesh = meshes.here()
    rows = x.shape[0] if counts is None or bool(counts > 0) else 0
    row = f"{x.dtype} {list(x.shape[1:])}"
    kind = zlib.crc32(row.encode())
    numbers = [rows if rank == mesh.rank else 0 for rank in range(mesh.size)]
    *sizes, largest, smallest = processes.largest([*numbers, kind, -kind])
    if largest != -smallest:
        hint = "one dtype, and one length for all rows of a batch: pad to a fixed length"
        processes.check_same({"a row": row}, where=_WHERE, hint=hint)
    return sizes[mesh.coordinate("tensor") :: mesh.tensor]


@library.custom_op("purestep::check_rows", mutates_args=())
def _check_rows(value: Tensor, counts: Tensor | None, after: Tensor | None = None) -> Tensor:
    """Check in a graph that each process has as many rows. Returns a number that only gives the next collective its
    place."""
    del after
    sizes = _sizes(value, counts)
    if min(sizes) < max(sizes):
        raise RankError(
            f"the numbers of rows differ in a compiled step: {sizes}, by process",
            where=_WHERE,
            hint="a batch size that the number of processes divides, with drop_last=True; or compile=False",
        )
    return value.new_zeros(())


@_check_rows.register_fake
def _(value: Tensor, counts: Tensor | None, after: Tensor | None = None) -> Tensor:
    del counts, after
    return value.new_zeros(())
