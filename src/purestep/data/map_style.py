"""Loaders over a dataset with indices: one DataLoader for the run, fed with our own order.

The unit that travels to a worker is a `Ticket`: the indices of one batch and the seed of its epoch. The worker seeds
the generators from (seed, epoch, index) where the dataset draws, so that a batch depends neither on the worker that
loads it nor on what was loaded before.
"""

from __future__ import annotations

import copy
import logging
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from ..rng import mix
from ..types import Batch
from . import random_state
from .attribute_state import Attributes, generators, has_attributes
from .equality import same
from .feed import Feed
from .sampler_order import OwnOrder
from .workers import Engine

_AGAIN = 6  # more loads of a batch, where something keeps count
_REMEMBERED = 256  # batches whose indices are kept for messages
_log = logging.getLogger("purestep")


class Ticket(NamedTuple):
    """One batch to load."""

    number: int  # within the epoch, 0-based
    epoch: int  # 0-based
    seed: int  # of the epoch
    indices: Any  # what the sampler gave: a list of indices, or one index where the loader does not batch
    probe: bool  # load again and compare


class Loaded(NamedTuple):
    """One batch, and what the probe found that cannot be loaded again as it was; "" for nothing."""

    batch: Batch
    inexact: str


class Batches(Dataset[Loaded]):
    """The user's dataset and collate function behind one index: ``batches[ticket]`` is a whole batch.

    Attributes are the dataset's, so that a ``worker_init_fn`` that sets some of ``get_worker_info().dataset`` works.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], *, batched: bool) -> None:
        own = {"_dataset": dataset, "_collate": collate, "_batched": batched, "_drawn_from": frozenset[str]()}
        self.__dict__.update(own, _epoch=None, _generators=None)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_dataset" not in self.__dict__:  # unpickling asks before there is a dataset
            raise AttributeError(name)
        return getattr(self.__dict__["_dataset"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.__dict__["_dataset"], name, value)

    def __getitem__(self, index: Ticket) -> Loaded:
        if index.epoch != self.__dict__["_epoch"]:
            self.__dict__["_epoch"] = index.epoch
            if callable(getattr(self._dataset, "set_epoch", None)):
                self._dataset.set_epoch(index.epoch)
        tensors = self._tensors()
        if tensors is not None:
            return Loaded(_gather(self._dataset, tensors, index.indices), inexact="")
        if self._generators is None:  # once in each process: a `worker_init_fn` may set some
            self.__dict__["_generators"] = generators(self._dataset, _owner(self._collate))
        try:
            with random_state.scoped(mix(index.seed, index.number)):
                batch = self._load(index, random_state.watch())
                return Loaded(batch, self._probed(index) if index.probe else "")
        except StopIteration as error:  # would end the epoch without a word
            raise RuntimeError("the dataset raised StopIteration") from error

    def _load(self, ticket: Ticket, watch: random_state.Watch) -> Batch:
        while True:  # again at most once for each generator
            try:
                is_seeded = self._drawn_from or self._generators
                batch = self._seeded(ticket) if is_seeded else self._collate(self._items(ticket.indices))
            except Exception:  # which may hang on a draw, so it counts once the draws are seeded
                if not self._learns(watch):
                    raise
            else:
                if not self._learns(watch):
                    return batch

    def _learns(self, watch: random_state.Watch) -> bool:
        """Whether the batch drew from a generator that its items were not seeded from. From now on they are."""
        new = watch.drawn() - self._drawn_from
        self.__dict__["_drawn_from"] |= new
        return bool(new)

    def _seeded(self, ticket: Ticket) -> Batch:
        if not self._batched:
            return self._collate(self._item(ticket, ticket.indices))
        items = [self._item(ticket, index) for index in ticket.indices]
        self._seed(mix(ticket.seed, "collate", ticket.number))
        return self._collate(items)

    def _items(self, indices: Any) -> Any:
        if not self._batched:
            return self._dataset[indices]
        several = getattr(self._dataset, "__getitems__", None)
        return several(indices) if several else [self._dataset[index] for index in indices]

    def _item(self, ticket: Ticket, index: Any) -> Any:
        self._seed(mix(ticket.seed, "item", _number(index)))
        return self._items([index])[0] if self._batched else self._items(index)

    def _seed(self, number: int) -> None:
        random_state.seed(number, self._drawn_from)
        random_state.seed_own(number, self._generators)

    def _probed(self, ticket: Ticket) -> str:
        """What cannot be loaded again as it was. What is found to keep something is left as it was found."""
        index = ticket.indices[0] if self._batched and ticket.indices else ticket.indices
        collate = _owner(self._collate)
        before = Attributes(self._dataset, collate)
        found = ""
        item = self._item(ticket, index)
        # What counts its loads or calls may give something else only at some of them.
        if not self._repeats(before, item, lambda: self._item(ticket, index)):
            found = "loading an item twice gave two different items"
        elif not _is_torchs(collate):
            try:
                repeats = self._repeats(before, self._seeded(ticket), lambda: self._seeded(ticket))
            except Exception:  # which comes again, with its place, where it is one of a batch of the run
                repeats = True
            if not repeats:
                name = getattr(collate, "__qualname__", type(collate).__name__)
                found = f"{name}, which collates, made different batches of the same items"
        if found or has_attributes(collate):
            before.put_back()
        return found

    def _repeats(self, before: Attributes, first: Any, again: Callable[[], Any]) -> bool:
        return same(first, again()) and not (before.changed() and not all(same(first, again()) for _ in range(_AGAIN)))

    def _tensors(self) -> tuple[Tensor, ...] | None:
        """The tensors of a plain TensorDataset with the default collation: gathered at once, nothing can be drawn."""
        dataset = self._dataset
        while type(dataset) is Subset:
            dataset = dataset.dataset
        if type(dataset) is not TensorDataset or self._collate is not default_collate or not self._batched:
            return None
        plain = all(type(found) is Tensor and found.layout is torch.strided for found in dataset.tensors)
        return dataset.tensors if plain else None


def _owner(collate: Any) -> Any:
    """The object whose method collates, or what collates."""
    return getattr(collate, "__self__", collate)


def _is_torchs(collate: Any) -> bool:
    return str(getattr(collate, "__module__", "")).startswith(("torch.utils.data.", "torchdata."))


def _gather(dataset: Any, tensors: tuple[Tensor, ...], indices: Sequence[int]) -> list[Tensor]:
    while type(dataset) is Subset:
        indices, dataset = [dataset.indices[index] for index in indices], dataset.dataset
    rows = torch.tensor(indices)
    return [found[rows] for found in tensors]


def _number(index: Any) -> int | str:
    try:
        return operator.index(index)
    except TypeError:
        return repr(index)


def _same_batch(batch: Any) -> Any:
    """A collate function that does nothing."""
    return batch


class _Tickets(Sampler[Ticket]):
    """The sampler of the one DataLoader: whatever was put in last."""

    def __init__(self) -> None:
        self.source: Iterable[Ticket] = ()

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self.source)


class IndexedFeed(Feed):
    """A DataLoader over a dataset with indices.

    Args:
        loader: its dataset, sampler and settings are used; it is never iterated itself.
        name, seed: as in `open_feed`.
        timeout: seconds to wait for a worker where the loader sets none.
        shuffle: False takes the items in the dataset's order whatever the sampler says.
    """

    def __init__(self, loader: DataLoader[Any], *, name: str, seed: int, timeout: float, shuffle: bool = True) -> None:
        self._source = loader
        self._seed = seed
        self._timeout = timeout
        self._shuffle = shuffle
        self._sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
        self._batch_size: Any = getattr(loader.batch_sampler, "batch_size", loader.batch_size)
        self._drop_last = getattr(loader.batch_sampler, "drop_last", loader.drop_last)
        ready = self._is_ready()
        super().__init__(name=name, length=length_of(loader), resume="skip", facts=self._facts(), exact=ready)
        self._own = None if ready else OwnOrder(loader, name=name, seed=seed)
        self._tickets = _Tickets()
        batches = Batches(loader.dataset, loader.collate_fn, batched=loader.batch_sampler is not None)
        how: dict[str, Any] = {"batch_size": None, "sampler": self._tickets, "collate_fn": _same_batch}
        self._engine = Engine(batches, like=loader, timeout=timeout, **how)
        self._recent: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._probed = False
        self._begun: Attributes | None = None  # dataset and collation as they were at first, where passes repeat
        self._inexact = False

    def _facts(self) -> dict[str, Any]:
        size = self._batch_size if isinstance(self._batch_size, int) else None
        whole = self._source.batch_sampler
        order = type(self._sampler if self._is_ready() or whole is None else whole).__name__
        facts = {"kind": "indices", "seed": self._seed, "items": length_of(self._source.dataset), "batch_size": size}
        return facts | {"drop_last": bool(self._drop_last), "order": order}

    def unshuffled(self) -> IndexedFeed:
        """The same loader in the dataset's order."""
        return IndexedFeed(self._source, name=self.name, seed=self._seed, timeout=self._timeout, shuffle=False)

    def indices(self, epoch: int, batch: int) -> list[Any] | None:
        found = self._recent.get((epoch, batch))
        return found if found is None or isinstance(found, list) else [found]

    def count(self, epoch: int) -> int | None:
        if self._own is None:
            return super().count(epoch)
        # One that says nothing of its length may have no end.
        return None if self.length is None else self._own.count(epoch, self.ends, most=16 * self.length + 1000)

    def close(self) -> None:
        self._engine.close()
        if self._own is not None:
            self._own.put_back()

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        if self.repeats:
            self._put_back()
        self._tickets.source = self._order(epoch, start)
        loaded = self._engine.run(mix(self._seed, "workers", epoch))
        try:
            for batch, inexact in loaded:
                if inexact:
                    self._tell(inexact)
                yield batch
        finally:
            loaded.close()

    def _order(self, epoch: int, start: int) -> Iterator[Ticket]:
        seed = mix(self._seed, "items", epoch)
        for number, indices in enumerate(self._after(self._index_batches(epoch), epoch, start), start):
            self._recent[epoch, number] = indices
            if len(self._recent) > _REMEMBERED:
                self._recent.popitem(last=False)
            probe, self._probed = not self._probed, True
            yield Ticket(number, epoch, seed, indices, probe)

    def _index_batches(self, epoch: int) -> Iterator[Any]:
        if self._own is not None:
            return self._own.epoch(epoch, self.ends)
        number = mix(self._seed, "order", epoch)
        if self._source.batch_sampler is None:
            return iter(self._ready_sampler(number))
        return iter(BatchSampler(self._ready_sampler(number), int(self._batch_size), bool(self._drop_last)))

    def _is_ready(self) -> bool:
        """Whether the order is torch's own, random or sequential, and can be made again from a seed."""
        batched = self._source.batch_sampler is None or _is_sampler(self._source.batch_sampler, "BatchSampler")
        return batched and (not self._shuffle or _is_sampler(self._sampler, "RandomSampler", "SequentialSampler"))

    def _ready_sampler(self, number: int) -> Any:
        if not self._shuffle:
            return SequentialSampler(self._source.dataset)  # pyright: ignore[reportArgumentType]  # sized, or torch says
        sampler = self._sampler
        if not _is_sampler(sampler, "RandomSampler"):
            return sampler
        own = torch.Generator().manual_seed(number)
        count = None if sampler.num_samples == len(sampler.data_source) else sampler.num_samples
        return RandomSampler(sampler.data_source, sampler.replacement, count, own)

    def _put_back(self) -> None:
        """Dataset and collation, where batches hang on what they keep, as they were before the first pass."""
        if self._begun is None:
            self._begun = Attributes(self._source.dataset, _owner(self._source.collate_fn))
        elif self._inexact:
            self._engine.close()  # workers have what they keep to themselves
            self._begun.put_back()

    def _tell(self, found: str) -> None:
        self._inexact = True
        if self._begun is not None and self._begun.changed():
            return  # every pass begins with what it was
        _log.warning(
            "%s: %s, so a resumed run will not be the same bit for bit (cure: draw from torch's, numpy's or Python's "
            "global generator, or from one in an attribute, which are seeded per item; keep nothing from item to item "
            "or batch to batch)",
            self.name,
            found,
        )


def _is_sampler(sampler: Any, *names: str) -> bool:
    """Whether a sampler is one of these of torch's, or torchdata's copy of it; not a class derived from one."""
    kind = type(sampler)
    return kind.__name__ in names and kind.__module__.startswith(("torch.utils.data.", "torchdata."))


def length_of(sized: Any) -> int | None:
    """``len``, or None where there is none. A loader's is a hint."""
    # torch's loader remembers that it was asked, and warns of every batch that is more.
    asked = copy.copy(sized) if isinstance(sized, DataLoader) else sized
    try:
        return len(asked)
    except Exception:
        return None
