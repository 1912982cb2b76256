"""`sharded`: how the batches of a loader without indices are divided among processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

WHOLE = (
    "a loader is the whole one, and each batch is divided among the processes; one of this process's own part, as for "
    "DistributedDataParallel, goes into ps.parallel.sharded(loader); random splits and samplers need one seed in every "
    "process, torch.manual_seed(0), and lists of files one order, sorted(files)"
)
"""The cure for loaders that differ between processes."""


@dataclass(frozen=True)
class Sharded:
    """A loader whose batches are divided as `sharded` says. No tuple: a pair of loaders is (train, val)."""

    loader: Any
    rows: bool


def sharded(loader: Any, *, rows: bool = False) -> Sharded:
    """Say how the batches of a loader are divided among the processes of a run.

    Example:
        >>> import purestep as ps
        >>> files = ["a.bin", "b.bin", "c.bin"]
        >>> with ps.parallel.start() as mesh:
        ...     own = files[mesh.batch_rank :: mesh.batch_size]  # an IterableDataset over these
        ...     loaders = {"train": ps.parallel.sharded(own)}
        >>> len(loaders["train"].loader)
        3

    `fit`, `evaluate`, `run_epoch`, `predict`, `find_learning_rate` and `refresh_batchnorm` need it for iterables, which
    have no indices to divide: a DataLoader over an IterableDataset, a StatefulDataLoader over one, a generator.
    DataLoaders over datasets with indices and lists of batches need none, since every process draws the same order and
    loads its rows alone.

    Args:
        loader: any loader.
        rows: False: the batches of each process are its own shares, which together are the whole batches. Processes of
            one ``mesh.batch_rank`` load the same. The numbers of batches may differ: an epoch ends with the last batch
            of any process, and one that has no batch left goes on with a batch that counts nothing. True: every process
            loads the same whole batches, and takes its rows of each.

    A snapshot stores the position of each process: with ``rows=False`` a run goes on with as many processes, with
    ``rows=True`` with any number.
    """
    return Sharded(loader, rows)
