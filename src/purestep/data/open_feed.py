"""Which kind of loader this is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from ..errors import DataError
from ..rng import mix
from ..types import Batch
from .feed import Feed, Resume, hold
from .iterable import IterableFeed, SequenceFeed, StatefulFeed
from .iterator import OneShotFeed
from .map_style import IndexedFeed, length_of
from .workers import Engine


def open_feed(
    loader: Any,
    *,
    name: str = "train",
    seed: int = 0,
    replay: bool = False,
    timeout: float = 300.0,
    repeats: bool = False,
) -> Feed:
    """Take over a loader: its order from (seed, epoch), its place as (epoch, batches consumed).

    ============================================  ==============================================================
    loader                                        order; how an epoch is entered in the middle
    ============================================  ==============================================================
    DataLoader over a dataset with indices        a permutation of (seed, epoch) where it shuffles, a sampler of
                                                  the user's drawn under (seed, epoch); by skipping indices
    ``state_dict`` and ``load_state_dict``        its own; by its state
    list or tuple of batches                      its own; by index
    any other iterable                            drawn under (seed, epoch); by loading and dropping
    iterator that its ``__iter__`` puts back      the same
    DataLoader over an IterableDataset, iterator  the same, only with ``replay=True``
    ============================================  ==============================================================

    The loader's settings are kept (workers, batch size, collation, pinning, time-out, ``worker_init_fn``); its
    ``generator`` and ``in_order=False`` are not used. Items are loaded under seeds of (seed, epoch, index) where the
    dataset draws from torch's, numpy's or Python's global generator, with or without workers. The caller's generators
    are left as they were; those that a sampler, an iterable, a dataset, its transforms or a collate object hold in an
    attribute, a closure or a global are seeded too, whenever something is drawn.

    A loader with a state of its own is in charge of what its workers draw.

    ``len(loader)`` is shown and believed nowhere: an epoch ends where the loader does. What a sampler or an iterable
    keeps in attributes from epoch to epoch (a list that it shuffles in place, a count) is where it was when a run goes
    on: the orders of earlier epochs are drawn again, or the attributes of an iterable are part of the position.
    ``set_epoch`` of the loader, its samplers and its dataset is called before an epoch. What cannot be repeated is
    logged at the start: a sampler that gives two orders from one seed, a dataset that gives two items for one index, a
    collate function that makes two batches of the same items (the first batch is loaded again to see), an iterator in
    a closure of an iterable. A list or number in the closure of an iterable is not seen. Workers of an IterableDataset
    end with their epoch, whatever ``persistent_workers`` says.

    Args:
        loader: see the table.
        name: for messages and for stored positions.
        seed: in [0, 2**63).
        replay: allow to enter an epoch in the middle by loading and dropping the batches before.
        timeout: seconds to wait for a batch from workers, > 0, where the loader's own is 0.
        repeats: every pass over an epoch begins at the same place, as an evaluation has to.

    Raises:
        DataError: not a loader, or an empty one.

    Example:
        >>> import torch
        >>> feed = open_feed(DataLoader(torch.arange(6), batch_size=2, shuffle=True), seed=1)
        >>> whole = torch.cat(list(feed.epoch(0)))
        >>> bool((torch.cat(list(feed.epoch(0, start=1))) == whole[2:]).all())
        True
    """
    if isinstance(loader, Feed):
        return loader
    feed = _opened(loader, name=name, seed=seed, replay=replay, timeout=timeout)
    feed.repeats = repeats
    if feed.length == 0 and feed.exact:
        raise DataError(
            "no batch in it: the loader is empty",
            where=name,
            hint="check the dataset's length, and batch_size where drop_last=True",
        )
    return feed


def overfit(feed: Feed, count: int) -> Feed:
    """The first batches without shuffling, loaded once and the same in every epoch.

    Args:
        feed: where they come from.
        count: batches, >= 1.

    Example:
        >>> list(overfit(open_feed([1, 2, 3, 4]), 2).epoch(7))
        [1, 2]
    """
    return hold(feed.unshuffled() if isinstance(feed, IndexedFeed) else feed, count)


def _opened(loader: Any, *, name: str, seed: int, replay: bool, timeout: float) -> Feed:
    if isinstance(loader, (str, bytes, Mapping, Tensor, nn.Module)) or not _iterable(loader):
        raise _no_loader(loader, name)
    only_replay: Resume = "replay" if replay else "none"
    if isinstance(loader, DataLoader) and _by_indices(loader):
        return IndexedFeed(loader, name=name, seed=seed, timeout=timeout)
    if _stateful(loader):
        # torchdata's loader knows how many batches it gave, and not what a dataset without a state has kept.
        alone = isinstance(loader, DataLoader) and not _stateful(loader.dataset)
        others = (loader.dataset, loader.collate_fn) if alone else ()
        return StatefulFeed(_iterate(loader), loader, others, **_described(loader, name, seed))
    if isinstance(loader, DataLoader) and type(loader).__iter__ is DataLoader.__iter__:
        source = _streamed(loader, seed, timeout)
        if _stateful(loader.dataset) and loader.num_workers == 0:
            return StatefulFeed(source, loader.dataset, **_described(loader, name, seed))
        owners = (loader.dataset, loader.collate_fn)
        return IterableFeed(source, owners, resume=only_replay, **_described(loader, name, seed))
    if isinstance(loader, Sequence):
        return SequenceFeed(cast(Sequence[Batch], loader), name=name)
    if isinstance(loader, Iterator):
        one_shot = cast(Iterator[Batch], loader)
        return OneShotFeed(one_shot, name=name, seed=seed, replay=replay, announce=_announcer(loader))
    return IterableFeed(_iterate(loader), (loader,), resume="replay", **_described(loader, name, seed))


def _iterable(loader: Any) -> bool:
    # torch's Dataset says nothing of __iter__, yet Python would iterate it through __getitem__, item by item.
    return isinstance(loader, (Iterable, Sequence)) or hasattr(loader, "__iter__")


def _by_indices(loader: DataLoader[Any]) -> bool:
    """Whether the place in this loader is an index and nothing else. torchdata's StatefulDataLoader is one of these
    unless its dataset or sampler has a state: by indices the draws of its workers are resumed too."""
    kind = type(loader)
    known = kind.__iter__ is DataLoader.__iter__ or kind.__module__.startswith("torchdata.stateful_dataloader")
    parts: list[Any] = [loader.dataset, loader.sampler, loader.batch_sampler]
    alone = known and kind is not DataLoader and any(map(_stateful, parts))
    return known and not alone and not isinstance(loader.dataset, IterableDataset)


def _stateful(owner: Any) -> bool:
    return callable(getattr(owner, "state_dict", None)) and callable(getattr(owner, "load_state_dict", None))


def _described(loader: Any, name: str, seed: int) -> dict[str, Any]:
    return {"name": name, "seed": seed, "length": length_of(loader), "announce": _announcer(loader)}


def _announcer(loader: Any) -> Callable[[int], None]:
    parts: list[Any] = [loader, *(getattr(loader, name, None) for name in ("dataset", "sampler", "batch_sampler"))]

    def announce(epoch: int) -> None:
        for part in parts:
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(epoch)

    return announce


def _iterate(loader: Iterable[Batch]) -> Callable[[int], Iterator[Batch]]:
    return lambda epoch: iter(loader)


def _streamed(loader: DataLoader[Any], seed: int, timeout: float) -> Callable[[int], Iterator[Batch]]:
    how = {"batch_size": loader.batch_size, "drop_last": loader.drop_last, "collate_fn": loader.collate_fn}
    # Where a stream is in a worker that lives on, and which epoch it was told, no other run can know.
    engine = Engine(loader.dataset, like=loader, timeout=timeout, persistent=False, **how)
    return lambda epoch: engine.run(mix(seed, "workers", epoch))


def _no_loader(loader: Any, name: str) -> DataError:
    if isinstance(loader, Dataset):
        return DataError(
            "a dataset, which gives single items, not batches",
            where=name,
            hint=f"DataLoader({type(loader).__name__.lower()}, batch_size=32, shuffle=True)",
        )
    return DataError(
        f"a {type(loader).__name__} is no loader",
        where=name,
        hint="a DataLoader, a list of batches, or any object with __iter__ that gives batches",
    )
