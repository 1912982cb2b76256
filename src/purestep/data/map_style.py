"""The feed of a DataLoader over a dataset with indices: one DataLoader for the whole run, with our order.

A worker receives a `Ticket`: the indices of one batch and the seed of its epoch. It seeds the generators from
(seed, epoch, index) before each item, so that a batch depends neither on its worker nor on earlier batches.
"""

from __future__ import annotations

import copy
import itertools
import logging
import operator
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
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
from .feed import Feed, announce, fingerprint
from .shares import check_rows
from .workers import Engine

_CHUNK = 32  # index batches of a sampler of the user to draw at once, because each `scoped` block takes 20 us
_FEW = 64  # index batches to draw twice and compare
_REMEMBERED = 256  # batches whose indices are stored for messages
_log = logging.getLogger("purestep")


class Ticket(NamedTuple):
    """One batch to load."""

    number: int  # within the epoch, 0-based
    epoch: int  # 0-based
    seed: int  # of the epoch
    indices: Any  # from the sampler: a list of indices, or one index if the loader does not batch
    probe: tuple[Any, ...]  # the index of an item to load twice and compare, or none


class Loaded(NamedTuple):
    """One batch, and the result of the probe."""

    batch: Batch
    inexact: str = ""  # what differs at a second load
    row: int | None = None  # hash of the item, if both loads return the same


class Batches(Dataset[Loaded]):
    """The user's dataset and collate function: ``batches[ticket]`` is a whole batch."""

    def __init__(self, dataset: Any, collate: Callable[[Any], Any], *, batched: bool) -> None:
        self.users_dataset = dataset
        self._collate = collate
        self._batched = batched
        self._draws = False
        self._begun: tuple[int, int] | None = None  # the epoch, and its seed
        self._generators: dict[str, Any] | None = None

    def begin(self, epoch: int, seed: int) -> None:
        """Call ``set_epoch`` of the dataset, once for each epoch in each process, under the seed of the epoch."""
        if (epoch, seed) != self._begun:
            self._begun = epoch, seed
            with random_state.scoped(mix(seed, "epoch")):
                announce(epoch, self.users_dataset)

    def __getitem__(self, index: Ticket) -> Loaded:
        self.begin(index.epoch, index.seed)  # a worker that lives on has the epoch before
        tensors = self._tensors()
        if tensors is not None:
            row = fingerprint(_gather(self.users_dataset, tensors, index.probe)) if index.probe else None
            return Loaded(_gather(self.users_dataset, tensors, index.indices), row=row)
        if self._generators is None:  # once per process: a `worker_init_fn` may set some
            self._generators = random_state.own(self.users_dataset, _owner(self._collate))
        try:
            with random_state.scoped(mix(index.seed, index.number)):
                batch = self._collated(index, self._items(index))
                inexact, row = self._probed(index) if index.probe else ("", None)
                return Loaded(batch, inexact, row)
        except StopIteration as error:  # it would silently end the epoch
            raise RuntimeError("the dataset raised StopIteration") from error

    def _items(self, ticket: Ticket) -> Any:
        if not self._batched:
            return self._item(ticket, ticket.indices)
        several = getattr(self.users_dataset, "__getitems__", None)
        if several is not None and not (self._draws or self._generators):
            # One call for all items is many times faster, but cannot seed each of them.
            before = random_state.states()
            items = several(ticket.indices)
            if random_state.states() == before:
                return items
            self._draws = True
        return [self._item(ticket, index) for index in ticket.indices]

    def _item(self, ticket: Ticket, index: Any) -> Any:
        random_state.seed(mix(ticket.seed, "item", _number(index)), self._generators or random_state.NONE)
        several = getattr(self.users_dataset, "__getitems__", None) if self._batched else None
        return self.users_dataset[index] if several is None else several([index])[0]

    def _collated(self, ticket: Ticket, items: Any) -> Batch:
        if self._batched:
            random_state.seed(mix(ticket.seed, "collate", ticket.number), self._generators or random_state.NONE)
        return self._collate(items)

    def _probed(self, ticket: Ticket) -> tuple[str, int | None]:
        """Describe what differs at a second load, and return the hash of the item."""
        row, other = (fingerprint(self._item(ticket, ticket.probe[0])) for _ in range(2))
        if row != other:
            return "loading an item twice returned two different items", None
        collate = _owner(self._collate)
        if str(getattr(collate, "__module__", "")).startswith(("torch.utils.data.", "torchdata.")):
            return "", row
        again = [fingerprint(self._collated(ticket, self._items(ticket))) for _ in range(2)]
        name = getattr(collate, "__qualname__", type(collate).__name__)
        same = again[0] == again[1]
        return "" if same else f"the collate function {name} returned two different batches of the same items", row

    def _tensors(self) -> tuple[Tensor, ...] | None:
        """The tensors of a TensorDataset with the default collation: index them directly, since nothing draws."""
        dataset = self.users_dataset
        while type(dataset) is Subset:
            dataset = dataset.dataset
        if type(dataset) is not TensorDataset or self._collate is not default_collate or not self._batched:
            return None
        plain = all(type(found) is Tensor and found.layout is torch.strided for found in dataset.tensors)
        return dataset.tensors if plain else None


def _owner(collate: Any) -> Any:
    """The object of a bound collate method, or the collate function itself."""
    return getattr(collate, "__self__", collate)


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
        mesh: of several processes: every process draws the same order, and loads its rows of each batch as a `Share`.
    """

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        name: str,
        seed: int,
        timeout: float,
        mesh: Mesh | None = None,
    ) -> None:
        self._source = loader
        is_batched = loader.batch_sampler is not None
        self._mesh = mesh if is_batched else None  # `RowsFeed` cuts batches that the dataset returns
        self._seed = seed
        self._timeout = timeout
        self._shuffle = True
        self._sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
        self._batch_size: Any = getattr(loader.batch_sampler, "batch_size", loader.batch_size)
        self._drop_last = getattr(loader.batch_sampler, "drop_last", loader.drop_last)
        ready = self._is_ready()
        batches = Batches(loader.dataset, loader.collate_fn, batched=is_batched)
        self._loaded = batches
        self._begin(0)  # the facts are those of the first epoch, also if the dataset has served another run
        super().__init__(name=name, length=length_of(loader), facts=self._facts(), exact=ready)
        self.is_divided = self._mesh is not None
        self._start()
        self._probed = False
        self._checks_rows = self._mesh is not None
        if not ready:
            self._check_sampler()

    def _start(self) -> None:
        self._tickets = _Tickets()
        how: dict[str, Any] = {"batch_size": None, "sampler": self._tickets, "collate_fn": _same_batch}
        self._engine = Engine(self._loaded, like=self._source, timeout=self._timeout, **how)
        self._recent: OrderedDict[tuple[int, int], tuple[Any, Any]] = OrderedDict()  # indices of this process, of all

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

    def in_order(self) -> Feed:
        if not self.is_shuffled:
            return self
        ordered = self._copied()
        ordered._shuffle = False
        return ordered

    def _copied(self) -> IndexedFeed:
        found = copy.copy(self)
        found._start()
        return found

    def _begin(self, epoch: int) -> None:
        """Call ``set_epoch`` of the dataset, on which its length and so the order may depend."""
        self._loaded.begin(epoch, mix(self._seed, "items", epoch))

    def count(self, epoch: int) -> int | None:
        if not self.exact or not hasattr(self._source.dataset, "set_epoch"):
            return super().count(epoch)
        self._begin(epoch)
        found = length_of(self._source)
        return found if found is None or self._first is None else min(found, self._first)

    def indices(self, epoch: int, batch: int) -> list[Any] | None:
        found, _ = self._recent.get((epoch, batch), (None, None))
        return found if found is None or isinstance(found, list) else [found]

    def order(self, epoch: int, batch: int) -> int:
        _, found = self._recent.get((epoch, batch), (None, None))
        if found is None:
            return 0
        rows, dataset = [found] if self._source.batch_sampler is None else found, self._source.dataset
        while type(dataset) is Subset:  # a random split may differ between processes
            rows, dataset = [dataset.indices[row] for row in rows], dataset.dataset
        return zlib.crc32(repr([_number(row) for row in rows]).encode())

    def close(self) -> None:
        self._engine.close()

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        self._begin(epoch)
        counts: deque[bool] = deque()  # of the batches that are loaded: False for a row that stands in
        self._tickets.source = self._order(epoch, start, counts)
        loaded = self._engine.run(mix(self._seed, "workers", epoch))
        try:
            for batch, inexact, row in loaded:
                if inexact:
                    self._warn(inexact)
                if self._checks_rows:
                    self._checks_rows = False
                    check_rows(self.name, self.order(epoch, start), row)
                yield batch if self._mesh is None else Share(batch, torch.tensor(float(counts.popleft())))
        finally:
            loaded.close()

    def _order(self, epoch: int, start: int, counts: deque[bool]) -> Iterator[Ticket]:
        seed = mix(self._seed, "items", epoch)
        for number, whole in enumerate(self._after(self._index_batches(epoch), epoch, start), start):
            indices = whole
            if self._mesh is not None:
                indices, has_rows = _share(whole, self._mesh)
                counts.append(has_rows)
            self._recent[epoch, number] = indices, whole
            if len(self._recent) > _REMEMBERED:
                self._recent.popitem(last=False)
            item = (whole,) if self._source.batch_sampler is None else (*whole[:1],)
            probe, self._probed = () if self._probed else item, True
            yield Ticket(number, epoch, seed, indices, probe)

    def _index_batches(self, epoch: int) -> Iterator[Any]:
        number = mix(self._seed, "order", epoch)
        if not self._is_ready():
            return self._compared(self._drawn(self._own_sampler(), epoch), epoch)
        if self._source.batch_sampler is None:
            return iter(self._ready_sampler(number))
        return iter(BatchSampler(self._ready_sampler(number), int(self._batch_size), bool(self._drop_last)))

    def _own_sampler(self) -> Any:
        """The sampler or batch sampler of the user."""
        return self._source.batch_sampler if self._source.batch_sampler is not None else self._source.sampler

    def _drawn(self, sampler: Any, epoch: int) -> Iterator[Any]:
        """The index batches of a sampler of the user, drawn under the seed of the epoch."""
        seed, own = mix(self._seed, "order", epoch), random_state.own(sampler)
        with random_state.scoped(seed, own):  # the lock keeps other threads from setting the epoch of a shared sampler
            announce(epoch, sampler, getattr(sampler, "sampler", None), self._source.sampler)
            iterator = iter(sampler)
        for count in itertools.count():
            with random_state.scoped(mix(seed, count), own):
                # Lists are copied, because a sampler may reuse one for the next batch.
                chunk = [list(one) if isinstance(one, list) else one for one in islice(iterator, _CHUNK)]  # pyright: ignore
            if not chunk:
                return
            yield from chunk

    def _check_sampler(self) -> None:
        """Warn of a sampler of the user whose order is not a function of seed and epoch. A copy of it is drawn."""
        sampler = self._own_sampler()
        parts = [sampler, getattr(sampler, "sampler", sampler)]
        own = [part for part in parts if not type(part).__module__.startswith(("torch.utils.data.", "torchdata."))]
        if not own:
            return
        orders: list[int] = []
        if not any(isinstance(part, Iterator) for part in parts):
            try:
                one = copy.deepcopy(sampler, self._datasets())
                orders = [fingerprint(list(islice(self._drawn(one, 0), _FEW))) for _ in range(2)]
            except Exception:  # it cannot be copied, or raises: then with the epoch and batch, when the order is needed
                return
        if len(set(orders)) != 1:
            _log.warning(
                "%s: the order of the %s is not a function of seed and epoch: two draws under one seed differ, so a "
                "resumed run will not be the same bit for bit, and evaluations will not see the same items (cure: keep "
                "no state from epoch to epoch but the number that set_epoch gives, and draw from torch's, numpy's or "
                "Python's global generator; or give the loader state_dict() and load_state_dict())",
                *(self.name, type(own[-1]).__name__),
            )

    def _datasets(self) -> dict[int, Any]:
        """The dataset and those that it wraps, by id: the copy of a sampler shares them."""
        found: dict[int, Any] = {}
        dataset: Any = self._source.dataset
        while dataset is not None and id(dataset) not in found:
            found[id(dataset)] = dataset
            dataset = getattr(dataset, "dataset", None)
        return found

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

    def _warn(self, found: str) -> None:
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
