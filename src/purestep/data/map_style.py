"""The feed of a DataLoader over a dataset with indices: one DataLoader for the whole run, with our order.

A worker receives a `Ticket`: the indices of one batch and the seed of its epoch. If the dataset draws random numbers,
the worker seeds the generators from (seed, epoch, index), so that a batch depends neither on its worker nor on earlier
batches.
"""

from __future__ import annotations

import copy
import logging
import operator
import zlib
from collections import OrderedDict, deque
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

from ..parallel import Mesh
from ..rng import mix
from ..types import Batch, Share
from . import random_state
from .attribute_state import Attributes, generators, has_attributes
from .equality import same
from .feed import Feed
from .sampler_order import SamplerOrder
from .workers import Engine

_AGAIN = 6  # further loads to compare, if attributes change at each load
_REMEMBERED = 256  # batches whose indices are stored for messages
_log = logging.getLogger("purestep")


class Ticket(NamedTuple):
    """One batch to load."""

    number: int  # within the epoch, 0-based
    epoch: int  # 0-based
    seed: int  # of the epoch
    indices: Any  # from the sampler: a list of indices, or one index if the loader does not batch
    probe: bool  # load twice and compare


class Loaded(NamedTuple):
    """One batch, and the probe's description of what differs at a second load, or ""."""

    batch: Batch
    inexact: str


class Batches(Dataset[Loaded]):
    """The user's dataset and collate function: ``batches[ticket]`` is a whole batch.

    Attribute access goes to the dataset, so that ``worker_init_fn`` can set attributes of
    ``get_worker_info().dataset``.
    """

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], *, batched: bool) -> None:
        own = {"_dataset": dataset, "_collate": collate, "_batched": batched, "_drawn_from": frozenset[str]()}
        self.__dict__.update(own, _epoch=None, _generators=None)

    def __getattr__(self, name: str) -> Any:
        # Unpickling reads attributes before the dataset is set.
        if name.startswith("__") or "_dataset" not in self.__dict__:
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
        if self._generators is None:  # once per process: a `worker_init_fn` may set some
            self.__dict__["_generators"] = generators(self._dataset, _owner(self._collate))
        try:
            with random_state.scoped(mix(index.seed, index.number)):
                batch = self._load(index, random_state.watch())
                return Loaded(batch, self._probed(index) if index.probe else "")
        except StopIteration as error:  # it would silently end the epoch
            raise RuntimeError("the dataset raised StopIteration") from error

    def _load(self, ticket: Ticket, watch: random_state.Watch) -> Batch:
        while True:  # repeats at most once for each generator
            try:
                is_seeded = self._drawn_from or self._generators
                batch = self._seeded(ticket) if is_seeded else self._collate(self._items(ticket.indices))
            except Exception:  # it may depend on a draw, so it is raised only after the draws are seeded
                if not self._found_generators(watch):
                    raise
            else:
                if not self._found_generators(watch):
                    return batch

    def _found_generators(self, watch: random_state.Watch) -> bool:
        """True if the batch drew from a global generator that was not seeded. It is seeded from now on."""
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
        """Describe what differs at a second load. Attributes that the loads changed are restored."""
        index = ticket.indices[0] if self._batched and ticket.indices else ticket.indices
        collate = _owner(self._collate)
        before = Attributes(self._dataset, collate)
        found = ""
        item = self._item(ticket, index)
        # A dataset that counts its loads may return something else only at some of them.
        if not self._repeats(before, item, lambda: self._item(ticket, index)):
            found = "loading an item twice returned two different items"
        elif not _is_torchs(collate):
            try:
                repeats = self._repeats(before, self._seeded(ticket), lambda: self._seeded(ticket))
            except Exception:  # raised again, with the place, if a batch of the run raises it
                repeats = True
            if not repeats:
                name = getattr(collate, "__qualname__", type(collate).__name__)
                found = f"the collate function {name} returned two different batches of the same items"
        if found or has_attributes(collate):
            before.restore()
        return found

    def _repeats(self, before: Attributes, first: Any, again: Callable[[], Any]) -> bool:
        return same(first, again()) and not (before.changed() and not all(same(first, again()) for _ in range(_AGAIN)))

    def _tensors(self) -> tuple[Tensor, ...] | None:
        """The tensors of a TensorDataset with the default collation: index them directly, since nothing draws."""
        dataset = self._dataset
        while type(dataset) is Subset:
            dataset = dataset.dataset
        if type(dataset) is not TensorDataset or self._collate is not default_collate or not self._batched:
            return None
        plain = all(type(found) is Tensor and found.layout is torch.strided for found in dataset.tensors)
        return dataset.tensors if plain else None


def _owner(collate: Any) -> Any:
    """The object of a bound collate method, or the collate function itself."""
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
    """Return the batch: a collate function for items that are batches already."""
    return batch


class _Tickets(Sampler[Ticket]):
    """The sampler of the DataLoader: iterates ``source``, which each pass replaces."""

    def __init__(self) -> None:
        self.source: Iterable[Ticket] = ()

    def __iter__(self) -> Iterator[Ticket]:
        return iter(self.source)


class IndexedFeed(Feed):
    """A DataLoader over a dataset with indices.

    Args:
        loader: a loader; its dataset, sampler and settings are used, but it is never iterated.
        name, seed: as in `open_feed`.
        timeout: seconds to wait for a worker if the loader sets none.
        shuffle: False: load the items in the dataset's order, whatever the sampler.
        mesh: of several processes: every process draws the same order, and loads its rows of each batch as a `Share`.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        name: str,
        seed: int,
        timeout: float,
        shuffle: bool = True,
        mesh: Mesh | None = None,
    ) -> None:
        self._source = loader
        is_batched = loader.batch_sampler is not None
        self._mesh = mesh if is_batched else None  # `RowsFeed` cuts batches that the dataset returns
        self._seed = seed
        self._timeout = timeout
        self._shuffle = shuffle
        self._sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
        self._batch_size: Any = getattr(loader.batch_sampler, "batch_size", loader.batch_size)
        self._drop_last = getattr(loader.batch_sampler, "drop_last", loader.drop_last)
        ready = self._is_ready()
        super().__init__(name=name, length=length_of(loader), resume="skip", facts=self._facts(), exact=ready)
        self.is_divided = self._mesh is not None
        self._sampler_order = None if ready else SamplerOrder(loader, name=name, seed=seed)
        self._tickets = _Tickets()
        batches = Batches(loader.dataset, loader.collate_fn, batched=is_batched)
        how: dict[str, Any] = {"batch_size": None, "sampler": self._tickets, "collate_fn": _same_batch}
        self._engine = Engine(batches, like=loader, timeout=timeout, **how)
        self._recent: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._orders: dict[tuple[int, int], int] = {}  # hashes of all processes' indices of the same batches
        self._probed = False
        self._begun: Attributes | None = None  # initial attributes of dataset and collation, if `repeats`
        self._inexact = False

    def _facts(self) -> dict[str, Any]:
        size = self._batch_size if isinstance(self._batch_size, int) else None
        whole = self._source.batch_sampler
        order = type(self._sampler if self._is_ready() or whole is None else whole).__name__
        facts = {"kind": "indices", "seed": self._seed, "items": length_of(self._source.dataset), "batch_size": size}
        return facts | {"drop_last": bool(self._drop_last), "order": order}

    @property
    def is_shuffled(self) -> bool:
        """True if torch's random sampler permutes all items of the dataset."""
        one = self._sampler
        ready = self._shuffle and self._is_ready() and _is_sampler(one, "RandomSampler")
        return bool(ready and not one.replacement and one.num_samples == length_of(self._source.dataset))

    def _ordered(self) -> Feed:
        return self.unshuffled() if self.is_shuffled else self

    def unshuffled(self) -> IndexedFeed:
        """A feed of the same loader in the dataset's order."""
        how: dict[str, Any] = {"name": self.name, "seed": self._seed, "timeout": self._timeout, "mesh": self._mesh}
        return IndexedFeed(self._source, shuffle=False, **how)

    def indices(self, epoch: int, batch: int) -> list[Any] | None:
        found = self._recent.get((epoch, batch))
        return found if found is None or isinstance(found, list) else [found]

    def order(self, epoch: int, batch: int) -> int:
        return self._orders.get((epoch, batch), 0)

    def count(self, epoch: int) -> int | None:
        if self._sampler_order is None:
            return super().count(epoch)
        # A sampler without a length may be endless.
        return (
            None if self.length is None else self._sampler_order.count(epoch, self.ends, most=16 * self.length + 1000)
        )

    def close(self) -> None:
        self._engine.close()
        if self._sampler_order is not None:
            self._sampler_order.restore()

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        if self.repeats:
            self._restore_attributes()
        counts: deque[bool] = deque()  # of the batches that are loaded: False for a row that stands in
        self._tickets.source = self._order(epoch, start, counts)
        loaded = self._engine.run(mix(self._seed, "workers", epoch))
        try:
            for batch, inexact in loaded:
                if inexact:
                    self._warn(inexact)
                yield batch if self._mesh is None else Share(batch, torch.tensor(float(counts.popleft())))
        finally:
            loaded.close()

    def _order(self, epoch: int, start: int, counts: deque[bool]) -> Iterator[Ticket]:
        seed = mix(self._seed, "items", epoch)
        for number, whole in enumerate(self._after(self._index_batches(epoch), epoch, start), start):
            indices = whole
            if self._mesh is not None:
                self._orders[epoch, number] = zlib.crc32(repr(whole).encode())
                indices, has_rows = _share(whole, self._mesh)
                counts.append(has_rows)
            self._recent[epoch, number] = indices
            if len(self._recent) > _REMEMBERED:
                self._orders.pop(self._recent.popitem(last=False)[0], None)
            probe, self._probed = not self._probed, True
            yield Ticket(number, epoch, seed, indices, probe)

    def _index_batches(self, epoch: int) -> Iterator[Any]:
        if self._sampler_order is not None:
            return self._sampler_order.epoch(epoch, self.ends)
        number = mix(self._seed, "order", epoch)
        if self._source.batch_sampler is None:
            return iter(self._ready_sampler(number))
        return iter(BatchSampler(self._ready_sampler(number), int(self._batch_size), bool(self._drop_last)))

    def _is_ready(self) -> bool:
        """True if the order is that of torch's random or sequential sampler, which a seed reproduces."""
        batched = self._source.batch_sampler is None or _is_sampler(self._source.batch_sampler, "BatchSampler")
        return batched and (not self._shuffle or _is_sampler(self._sampler, "RandomSampler", "SequentialSampler"))

    def _ready_sampler(self, number: int) -> Any:
        if not self._shuffle:
            return SequentialSampler(self._source.dataset)  # pyright: ignore[reportArgumentType]  # torch checks
        sampler = self._sampler
        if not _is_sampler(sampler, "RandomSampler"):
            return sampler
        own = torch.Generator().manual_seed(number)
        count = None if sampler.num_samples == len(sampler.data_source) else sampler.num_samples
        return RandomSampler(sampler.data_source, sampler.replacement, count, own)

    def _restore_attributes(self) -> None:
        """Restore the initial attributes of dataset and collation, if batches depend on them."""
        if self._begun is None:
            self._begun = Attributes(self._source.dataset, _owner(self._source.collate_fn))
        elif self._inexact:
            self._engine.close()  # workers have copies of the attributes
            self._begun.restore()

    def _warn(self, found: str) -> None:
        self._inexact = True
        if self._begun is not None and self._begun.changed():
            return  # every pass restores the attributes
        _log.warning(
            "%s: %s, so a resumed run will not be the same bit for bit (cure: draw from torch's, numpy's or Python's "
            "global generator, or from one in an attribute, which are seeded per item; keep no state between items or "
            "batches)",
            self.name,
            found,
        )


def _share(indices: Any, mesh: Mesh) -> tuple[Any, bool]:
    """This process's indices of a batch. Without any, the first one stands in, and the flag is False."""
    count, at, width = len(indices), mesh.batch_rank, mesh.batch_size
    own = indices[count * at // width : count * (at + 1) // width]
    return (own, True) if len(own) else (indices[:1], False)


def _is_sampler(sampler: Any, *names: str) -> bool:
    """True if a sampler is of one of these classes of torch or torchdata, but of no subclass."""
    kind = type(sampler)
    return kind.__name__ in names and kind.__module__.startswith(("torch.utils.data.", "torchdata."))


def length_of(sized: Any) -> int | None:
    """``len``, or None if there is none. That of a loader may be wrong."""
    # torch's loader remembers its length when it is read, and warns at every further batch. A copy does not matter.
    asked = copy.copy(sized) if isinstance(sized, DataLoader) else sized
    try:
        return len(asked)
    except Exception:
        return None
