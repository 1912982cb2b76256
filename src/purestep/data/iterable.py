"""Feeds of loaders without indices: sequences of batches, iterables, iterators, and loaders with ``state_dict``."""

from __future__ import annotations

import copy
import itertools
import logging
import zlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
from torch import Tensor

from ..errors import DataError
from ..rng import mix
from ..types import Batch
from . import random_state, state_json
from .feed import Feed, announce, fingerprint

_log = logging.getLogger("purestep")
_REMEMBERED = 8  # stored states: more than any prefetching depth
_SHOWN = 8  # names in a message
_END: Any = object()


class SequenceFeed(Feed):
    """A list or tuple of batches, in the same order in every epoch.

    Args:
        batches: the batches.
        name: as in `open_feed`.
        facts: as in `Feed`.
    """

    def __init__(self, batches: Sequence[Batch], *, name: str, facts: Mapping[str, Any] | None = None) -> None:
        facts = {"kind": "sequence", "batches": len(batches)} if facts is None else facts
        super().__init__(name=name, length=len(batches), facts=facts, exact=True)
        self._source = batches

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        return (self._source[index] for index in range(start, len(self._source)))


def held(feed: Feed, first: int | float) -> Feed:
    """Load the first batches of the first epoch, without shuffling, and return a feed that has them in every epoch.

    Raises:
        ConfigError: as `Feed.cut`.
    """
    ordered = feed.in_order()
    batches = list(ordered.cut(first).epoch(0))
    ordered.close()
    found = SequenceFeed(batches, name=feed.name, facts={**ordered.facts, "overfit": len(batches)})
    found.is_divided = feed.is_divided
    return found


class IterableFeed(Feed):
    """An iterable that is iterated once per epoch. To start inside an epoch, it loads and drops batches.

    Args:
        source: ``source(epoch, seed)`` returns the iterator of an epoch; it runs under the random seed of that epoch.
        owners: the iterated object, whose generators are seeded, and the objects that it calls in this process.
        name, seed: as in `open_feed`.
        length: as in `Feed`.
        parts: ``set_epoch`` of those that have it is called before an epoch starts.
        replay: the caller says that an epoch can be loaded again, whatever attributes it changes.
    """

    def __init__(
        self,
        source: Callable[[int, int], Iterator[Batch]],
        owners: Sequence[Any],
        *,
        name: str,
        seed: int,
        length: int | None,
        parts: Sequence[Any],
        replay: bool = False,
    ) -> None:
        super().__init__(name=name, length=length, facts={"kind": "iterable", "seed": seed})
        self._source = source
        self._owners = owners
        self._seed = seed
        self._parts = parts
        self._entered: dict[str, Any] | None = None  # what the first epoch may change, as it was at its start
        self._is_checked = replay

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        log_dropped(self.name, epoch, start)
        seed, own = mix(self._seed, "order", epoch), random_state.own(*self._owners[:1])
        iterator = self._enter(epoch, seed, own)
        try:
            yield from self._after(self._compared(scoped(iterator, seed, own=own), epoch), epoch, start)
        finally:
            close = getattr(iterator, "close", None)
            if callable(close):
                close()

    def _enter(self, epoch: int, seed: int, own: Mapping[str, Any]) -> Iterator[Batch]:
        """Start an epoch. Warn before the second one if the first one has changed the loader."""
        before = self._changing()
        with random_state.scoped(mix(seed, "epoch")):
            announce(epoch, *self._parts)
        announced = {path for path, value in self._changing().items() if before.get(path) != value}
        with random_state.scoped(seed, own):
            iterator = self._source(epoch, self._seed)
        then, self._entered = self._entered, self._changing()
        if then is not None:
            self._is_checked, changed = True, list[str]()
            for path, value in self._entered.items():
                # A new iterator in each epoch is no change; one that outlives an epoch is.
                is_other = (then.get(path) is value) if isinstance(value, Iterator) else (then.get(path) != value)
                if is_other and path not in announced and path.rpartition("/")[0] not in changed:
                    changed.append(path)
            if changed:
                _log.warning(
                    "%s: an epoch changes %s, which a snapshot does not store: if the next epoch depends on it, a "
                    "resumed run will not load the same batches (cure: define state_dict() and load_state_dict(); or "
                    "restart in __iter__, and keep no state from epoch to epoch but the number that set_epoch gives)",
                    *(self.name, ", ".join(changed[:_SHOWN]) + (", ..." if len(changed) > _SHOWN else "")),
                )
        return iterator

    def _changing(self) -> dict[str, Any]:
        """Numbers, texts, iterators, short arrays and the order of lists in the attributes of the owners."""
        found = () if self._is_checked or self.repeats else random_state.attributes(*self._owners)
        return {path: _summary(value) for path, value in found if not isinstance(value, random_state.KINDS)}

    def _nothing(self, epoch: int) -> DataError:
        return super()._nothing(epoch) if self._begun is None else _used_up(self.name, epoch)


def _summary(value: Any) -> Any:
    """A value to compare: what an epoch may change in place, or the type of an object that it does not count."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value if value == value else "nan"
    if isinstance(value, list | deque):
        return zlib.crc32(array("q", map(id, cast("list[Any]", value))))
    if isinstance(value, Tensor | np.ndarray) and value.ndim <= 1 and value.shape[0:1] < (1 << 24,):
        return fingerprint(value)
    return value if isinstance(value, Iterator) else type(value)


class IteratorFeed(Feed):
    """An iterator, such as a generator: one epoch, or an endless one that ``first`` cuts into epochs.

    A resumed run loads all batches since its beginning and drops them.

    Args:
        iterator: the iterator.
        name, seed: as in `open_feed`.
    """

    restarts = False

    def __init__(self, iterator: Iterator[Batch], *, name: str, seed: int) -> None:
        super().__init__(name=name, length=None, facts={"kind": "iterator", "seed": seed})
        self._iterator = iterator
        self._seed = seed
        self._given = 0  # batches since the beginning
        self._starts: dict[int, int] = {}  # epoch -> batches before it
        self._restored: int | None = None  # batches of the interrupted run

    def position(self, epoch: int, consumed: int) -> dict[str, Any]:
        given = self._starts.get(epoch, self._given) + consumed if self._restored is None else self._restored
        return {**super().position(0, consumed), "given": given}  # a resumed run loads the first batch of all again

    def restore(self, stored: Mapping[str, Any]) -> None:
        super().restore(stored)
        self._restored = stored["given"]

    def _copied(self) -> Feed:
        return self  # it counts the batches of the one iterator

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        restored, self._restored = self._restored, None
        if self._given and self.repeats:
            raise self._nothing(epoch)
        if restored is None and (start if self._given else epoch):
            raise DataError(
                f"the iterator cannot return to batch {start + 1} of epoch {epoch + 1}",
                where=self.name,
                hint="pass a loader that can be iterated again: a DataLoader, a list, a class with __iter__",
            )
        dropped = start if restored is None else restored
        log_dropped(self.name, epoch, dropped)
        seed = mix(self._seed, "order", 0)
        rest = scoped(self._iterator, seed, self._given, random_state.own(self._iterator))
        rest = rest if self._given else self._compared(rest, 0)
        self._given += dropped
        self._starts = {epoch: self._given - start}
        for batch in self._after(rest, epoch, dropped):
            self._given += 1
            yield batch

    def _nothing(self, epoch: int) -> DataError:
        return _used_up(self.name, epoch) if self._given else super()._nothing(epoch)


def _used_up(name: str, epoch: int) -> DataError:
    return DataError(
        f"no batch is left for epoch {epoch + 1}: the iterator can run only one epoch",
        where=name,
        hint="pass the loader itself instead of iter(loader), or list(batches)",
    )


def scoped(
    iterator: Iterator[Batch], seed: int, start: int = 0, own: Mapping[str, Any] = random_state.NONE
) -> Iterator[Batch]:
    """Load each batch under its own seed, so that resuming inside an epoch needs no state of a random generator."""
    for number in itertools.count(start):
        with random_state.scoped(mix(seed, number), own):
            try:
                batch = next(iterator)
            except StopIteration:
                return
        yield batch


def log_dropped(name: str, epoch: int, count: int) -> None:
    """Log the number of batches that are loaded and dropped."""
    if count:
        _log.info("%s: loads and drops %d batches to resume inside epoch %d", name, count, epoch + 1)


class _Place(NamedTuple):
    """A place between two batches of a loader with a state."""

    state: Any  # of the loader, or None at its first start
    ended: bool = False  # the epoch ends here; the state may not show it
    is_cut: bool = False  # the epoch before stopped early, and the next one starts here


class StatefulFeed(Feed):
    """A loader with a state: calls ``state_dict()`` after every batch, and ``load_state_dict`` on resuming.

    Args:
        source: ``source(epoch, seed)`` returns the iterator of an epoch.
        owner: the object with the two methods: the loader or its dataset.
        name, seed: as in `open_feed`.
        length: as in `Feed`.
        parts: ``set_epoch`` of those that have it is called before an epoch starts.
    """

    def __init__(
        self,
        source: Callable[[int, int], Iterator[Batch]],
        owner: Any,
        *,
        name: str,
        seed: int,
        length: int | None,
        parts: Sequence[Any],
    ) -> None:
        super().__init__(name=name, length=length, facts={"kind": "state"})
        self._source = source
        self._owner = owner
        self._seed = seed
        self._parts = parts
        self._places: OrderedDict[tuple[int, int], _Place] = OrderedDict()
        self._restored: _Place | None = None  # the place to start from
        self._running: Iterator[Batch] = iter(())  # the epoch that is running
        self._read_ahead: list[Any] = []  # its next batch, error or end, which `position` has read
        self._yielded = (-1, -1)  # the epoch and the number of batches yielded from it
        self._initial: Any = None  # the state at the start of every pass, if `repeats`
        self._next: int | None = None  # a hash of the batch with which the interrupted run went on

    def position(self, epoch: int, consumed: int) -> dict[str, Any]:
        """As `Feed.position`, with the loader's state. Reads one batch ahead, because a state need not show whether the
        epoch ends here.

        Raises:
            DataError: the state at this position is no longer stored, or cannot be stored as JSON.
        """
        if self._yielded == (epoch, consumed) and not self._read_ahead:
            try:
                self._read_ahead.append(next(self._running, _END))
            except Exception as error:  # raised in place of its batch, if the run comes to it
                self._read_ahead.append(error)
        place = self._places.get((epoch, consumed), self._restored or (None if consumed else _Place(None)))
        if place is None:
            raise DataError(
                f"the state after batch {consumed} of epoch {epoch + 1} is no longer stored",
                where=self.name,
                hint="store the position of a recent batch",
            )
        found = {**super().position(epoch, consumed), "state": state_json.encode(place.state, where=self.name)}
        ahead = self._read_ahead[0] if self._yielded == (epoch, consumed) else _END
        if ahead is not _END and not isinstance(ahead, Exception):
            found["next"] = fingerprint(ahead)
        elif self._next is not None:  # no batch has been loaded since the restore
            found["next"] = self._next
        return found | {"ended": place.ended, "left": place.is_cut}

    def restore(self, stored: Mapping[str, Any]) -> None:
        super().restore(stored)
        self._places.clear()
        self._restored = _Place(state_json.decode(stored["state"], where=self.name), stored["ended"], stored["left"])
        self._next = stored.get("next")

    def stopped_early(self, epoch: int, consumed: int) -> None:
        place = self._places.get((epoch, consumed), self._restored)
        if place is not None and not self.repeats:
            self._restored = None
            self._keep(epoch + 1, 0, _Place(place.state, is_cut=True))

    def close(self) -> None:
        if self._initial is not None and self.repeats:
            self._owner.load_state_dict(copy.deepcopy(self._initial[0]))

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        place = self._places.get((epoch, start), self._restored)
        if start and place is not None and place.ended:
            self._restored = _Place(place.state)  # for the next epoch
            self._keep(epoch, start, place)
            return
        self._running, self._read_ahead = self._read(epoch, start), []
        try:
            for number in itertools.count(start + 1):
                batch = self._read_ahead.pop() if self._read_ahead else next(self._running, _END)
                if batch is _END:
                    return
                if isinstance(batch, Exception):
                    raise batch
                self._yielded = epoch, number
                yield batch
        finally:
            self._running = iter(())
            self._yielded = (-1, -1)  # an interrupted epoch has not ended

    def _read(self, epoch: int, start: int) -> Iterator[Batch]:
        place, seed = self._load(epoch, start), mix(self._seed, "order", epoch)
        if place is not None and place.is_cut:
            with random_state.scoped(seed):
                self._source(epoch, self._seed)  # some loaders first continue the epoch that stopped early; drop that
        number = start
        # A loader with the restored state of an ended epoch may have to run out before it restarts.
        for _ in range(2 if place is not None and not start else 1):
            with random_state.scoped(seed):
                iterator = self._source(epoch, self._seed)
            for number, batch in enumerate(scoped(iterator, seed, start), start + 1):
                self._check_next(batch)
                self._keep(epoch, number)
                yield batch
            if number > start:
                break
        self._check_next(None)
        if (epoch, number) in self._places:
            self._places[epoch, number] = self._places[epoch, number]._replace(ended=True)
        self._keep(epoch + 1, 0)

    def _check_next(self, batch: Batch) -> None:
        """Warn if a resumed run goes on with another batch than the interrupted one did, or with none."""
        expected, self._next = self._next, None
        if expected is not None and fingerprint(batch) != expected:
            _log.warning(
                "%s: after load_state_dict the loader goes on with another batch than in the interrupted run, so rows "
                "are lost or come twice: its state is not its whole place, as with a shuffle buffer (cure: pass "
                "ps.open_feed(loader, replay=True), which loads the batches of the epoch again and drops them)",
                self.name,
            )

    def _load(self, epoch: int, start: int) -> _Place | None:
        """Load the state to start from. None: the loader goes on as it is."""
        with random_state.scoped(mix(self._seed, "order", epoch)):
            announce(epoch, *self._parts)
        if self.repeats:
            if self._initial is None:
                # torchdata's loader starts to load when state_dict is called.
                with random_state.scoped(mix(self._seed, "order", 0)):
                    self._initial = (copy.deepcopy(self._owner.state_dict()),)
            self._owner.load_state_dict(copy.deepcopy(self._initial[0]))
            return _Place(self._initial[0])
        place, self._restored = self._restored, None
        if place is None:
            known = self._places.get((epoch, start))
            # After an epoch that stopped early, load the state in any case, as a run that is resumed there does.
            place = known if known is not None and (start or known.is_cut) else None
        if start and place is None:
            raise DataError(f"no state of batch {start} was restored", where=self.name, hint="feed.restore(position)")
        if place is None or place.state is None:
            return None
        self._owner.load_state_dict(copy.deepcopy(place.state))
        self._keep(epoch, start, place)
        return place

    def _keep(self, epoch: int, consumed: int, place: _Place | None = None) -> None:
        if not self.repeats:
            self._places[epoch, consumed] = place or _Place(copy.deepcopy(self._owner.state_dict()))
            if len(self._places) > _REMEMBERED:
                self._places.popitem(last=False)
