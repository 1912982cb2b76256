"""Choose the `Feed` for a loader."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ..errors import DataError, RankError
from ..parallel import Mesh, loaders
from ..rng import mix
from ..types import Batch
from .feed import Feed
from .iterable import IterableFeed, IteratorFeed, SequenceFeed, StatefulFeed
from .map_style import IndexedFeed, length_of
from .shares import OwnFeed, RowsFeed
from .workers import Engine


def open_feed(
    loader: Any,
    *,
    name: str = "train",
    seed: int | None = None,
    timeout: float = 300.0,
    repeats: bool = False,
    first: int | float | None = None,
    mesh: Mesh | None = None,
    replay: bool = False,
) -> Feed:
    """Build the `Feed` of a loader: its order depends on (seed, epoch), its position is (epoch, batches consumed).

    Example:
        >>> import torch
        >>> feed = open_feed(DataLoader(torch.arange(6), batch_size=2, shuffle=True), seed=1)
        >>> whole = torch.cat(list(feed.epoch(0)))
        >>> bool((torch.cat(list(feed.epoch(0, start=1))) == whole[2:]).all())
        True
        >>> list(open_feed([1, 2, 3, 4], first=0.5).epoch(7))
        [1, 2]

    ============================================  ==============================================================
    loader                                        order; how an epoch is entered in the middle
    ============================================  ==============================================================
    DataLoader over a dataset with indices        shuffled by (seed, epoch), or a user's sampler run under
                                                  (seed, epoch); by skipping indices
    ``state_dict`` and ``load_state_dict``        its own; by its state
    list or tuple of batches                      its own; by index
    any other iterable                            run under (seed, epoch); by loading and dropping
    iterator: one epoch, or endless               the same, from its beginning
    ============================================  ==============================================================

    The feed keeps the loader's workers, batch size, collation, pinning, timeout and ``worker_init_fn``. It ignores its
    ``generator`` and ``in_order=False``. Each item is loaded under a seed of (seed, epoch, index) for torch's, numpy's
    and Python's global generators, with or without workers; so are generators in attributes of the dataset, its
    transforms or a collate object, and at each epoch those in attributes of a sampler or an iterable. The caller's
    global generators do not change. A loader with ``state_dict`` seeds its workers itself.

    An epoch ends when the loader ends; ``len(loader)`` is only displayed. ``set_epoch`` of the loader, its samplers and
    its dataset is called before the order of each epoch is drawn. Workers of an IterableDataset end with their epoch,
    whatever ``persistent_workers`` says.

    A loader whose batches depend on more than seed and epoch, without ``state_dict``, trains, but a resumed run loads
    other batches. The feed warns at the start if two draws under one seed differ: the order of a sampler, an item or a
    collated batch. It warns before the second epoch if the first one has changed numbers or lists in attributes of an
    iterable, and in a resumed run if an epoch begins with another batch than before (a stream that seeds a generator
    from the clock), or a loader with ``state_dict`` goes on with another one.

    Args:
        loader: a loader as in the table, or a `Feed`: the result is that feed, or a copy if ``repeats`` or the seed
            differs.
        name: the name for messages and stored positions.
        seed: in [0, 2**63). None: that of the run to which the feed is passed, 0 without one.
        timeout: seconds > 0 to wait for a batch from workers, if the loader sets none.
        repeats: every pass over an epoch starts at the same place, as an evaluation needs.
        first: the batches of an epoch: a number (int, >= 1), or a share of ``len(loader)`` (float in (0, 1]; at least
            one batch). None: all.
        mesh: of several processes, each of which calls this function: the batches are this process's shares. None: one
            process.
        replay: enter an epoch by loading and dropping also if the loader or its dataset has ``state_dict``. For one
            whose state is not its whole place: the streams of Hugging Face lose the rows of their shuffle buffer. Pass
            the feed to `fit` in place of the loader.

    Raises:
        DataError: the object is no loader, or the loader is empty.
        ConfigError: ``first`` is no such number, or it is a share and the loader has no length.
        RankError: with a mesh, a loader without indices that `parallel.sharded` does not describe.
    """
    division = loader if isinstance(loader, loaders.Sharded) else None
    loader = loader.loader if isinstance(loader, loaders.Sharded) else loader
    if isinstance(loader, Feed):
        feed = loader.reused(name=name, repeats=repeats, seed=seed)
    else:
        cut = mesh if division is None else None
        feed = _opened(loader, name=name, seed=seed or 0, timeout=timeout, mesh=cut, replay=replay)
        feed.repeats, feed.has_seed = repeats, seed is not None
        if feed.length == 0 and feed.exact:
            raise DataError(
                "the loader is empty: it has no batch",
                where=name,
                hint="check the dataset's length, and batch_size if drop_last=True",
            )
    feed = feed if mesh is None else _divided(feed, division, mesh)
    return feed if first is None else feed.cut(first)


def _divided(feed: Feed, division: loaders.Sharded | None, mesh: Mesh) -> Feed:
    """The feed of one of several processes.

    Raises:
        RankError: it is not known how to divide the batches.
    """
    if feed.is_divided:
        return feed
    if division is not None:
        return RowsFeed(feed, mesh, checks_end=True) if division.rows else OwnFeed(feed, mesh)
    if isinstance(feed, SequenceFeed | IndexedFeed):
        return RowsFeed(feed, mesh, checks_end=False)
    raise RankError(
        f"a loader without indices cannot be divided among {mesh.size} processes",
        where=feed.name,
        hint="ps.parallel.sharded(loader) if each process loads its own batches (files[mesh.batch_rank :: "
        "mesh.batch_size]), ps.parallel.sharded(loader, rows=True) if each loads all of them",
    )


def _opened(
    loader: Any, *, name: str, seed: int, timeout: float, mesh: Mesh | None = None, replay: bool = False
) -> Feed:
    if isinstance(loader, (str, bytes, Mapping, Tensor, nn.Module)) or not _iterable(loader):
        raise _no_loader(loader, name)
    if isinstance(loader, DataLoader) and _by_indices(loader):
        return IndexedFeed(loader, name=name, seed=seed, timeout=timeout, mesh=mesh)
    if _stateful(loader) and not replay:
        return StatefulFeed(lambda epoch, seed: iter(loader), loader, **_described(loader, name, seed))
    if isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__:
        source = _streamed(loader.dataset, loader, timeout)
        if _stateful(loader.dataset) and loader.num_workers == 0 and not replay:
            return StatefulFeed(source, loader.dataset, **_described(loader, name, seed))
        owners = () if loader.num_workers else (loader.dataset, loader.collate_fn)  # workers end with their epoch
        return IterableFeed(source, owners, replay=replay, **_described(loader, name, seed))
    if isinstance(loader, Sequence):
        return SequenceFeed(cast(Sequence[Batch], loader), name=name)
    if isinstance(loader, Iterator) and not _restarts(loader):
        return IteratorFeed(cast("Iterator[Batch]", loader), name=name, seed=seed)
    return IterableFeed(lambda epoch, seed: iter(loader), (loader,), replay=replay, **_described(loader, name, seed))


def _restarts(iterator: Any) -> bool:
    """True if the class defines ``__iter__`` in Python, which then begins an epoch; torch's do not."""
    found = inspect.getattr_static(type(iterator), "__iter__", None)
    return isinstance(found, types.FunctionType) and not found.__module__.startswith(("torch.", "collections.abc"))


def _iterable(loader: Any) -> bool:
    # torch's Dataset has no __iter__; Python would iterate it through __getitem__, item by item.
    return isinstance(loader, (Iterable, Sequence)) or hasattr(loader, "__iter__")


def _by_indices(loader: DataLoader[Any]) -> bool:
    """True if an index fully describes the position in this loader.

    This includes torchdata's StatefulDataLoader unless its dataset or sampler has a state: with indices, the draws of
    its workers are resumed too.
    """
    kind = type(loader)
    known = kind.__iter__ is DataLoader.__iter__ or kind.__module__.startswith("torchdata.stateful_dataloader")
    parts: list[Any] = [loader.dataset, loader.sampler, loader.batch_sampler]
    alone = known and kind is not DataLoader and any(map(_stateful, parts))
    return known and not alone and not isinstance(loader.dataset, IterableDataset)


def _stateful(owner: Any) -> bool:
    return callable(getattr(owner, "state_dict", None)) and callable(getattr(owner, "load_state_dict", None))


def _described(loader: Any, name: str, seed: int) -> dict[str, Any]:
    parts: list[Any] = [loader, *(getattr(loader, part, None) for part in ("dataset", "sampler", "batch_sampler"))]
    return {"name": name, "seed": seed, "length": length_of(loader), "parts": parts}


def _streamed(dataset: Any, loader: DataLoader[Any], timeout: float) -> Callable[[int, int], Iterator[Batch]]:
    how = {"batch_size": loader.batch_size, "drop_last": loader.drop_last, "collate_fn": loader.collate_fn}
    # Another run cannot restore the position of a stream in a persistent worker.
    engine = Engine(dataset, like=loader, timeout=timeout, persistent=False, **how)
    return lambda epoch, seed: engine.run(mix(seed, "workers", epoch))


def _no_loader(loader: Any, name: str) -> DataError:
    if isinstance(loader, Dataset):
        return DataError(
            "a dataset returns single items, not batches",
            where=name,
            hint=f"pass DataLoader({type(loader).__name__.lower()}, batch_size=32, shuffle=True)",
        )
    return DataError(
        f"the loader is a {type(loader).__name__}, which gives no batches",
        where=name,
        hint="pass a DataLoader, a list of batches, or an object whose __iter__ yields batches",
    )
