"""Feeds of loaders without indices: sequences of batches, iterables, and loaders with ``state_dict``."""

from __future__ import annotations

import copy
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from ..errors import DataError
from ..rng import mix
from ..types import Batch
from . import random_state
from . import state_json as position
from .attribute_state import Attributes, closed_over, write
from .feed import Feed, Resume
from .peeking import Ahead

_log = logging.getLogger("purestep")
_REMEMBERED = 64  # stored states: more than any prefetching depth


class SequenceFeed(Feed):
    """A list or tuple of batches, in the same order in every epoch."""

    def __init__(self, batches: Sequence[Batch], *, name: str) -> None:
        super().__init__(
            name=name,
            length=len(batches),
            resume="skip",
            facts={"kind": "sequence", "batches": len(batches)},
            exact=True,
        )
        self._source = batches

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        return (self._source[index] for index in range(start, len(self._source)))


class EpochState:
    """Attributes of a loader that change from epoch to epoch. They are part of the position, and are restored when an
    epoch is repeated.

    Args:
        owners: the objects that are iterated or called in an epoch.
        name: the name of the loader, for messages.
    """

    def __init__(self, owners: Sequence[Any], *, name: str) -> None:
        self._owners = owners
        self._name = name
        self._first = self._begun = Attributes(*owners)
        self._closed_over = SimpleNamespace(**closed_over(*owners))
        self._in_closures = Attributes(self._closed_over)
        self._entered = -1
        self._kept: Any = None  # JSON of the attributes at the start of the last epoch; None: unchanged
        self._restored: list[Any] | None = None  # [epoch, its attributes as JSON]
        self._has_warned = False

    def position(self, epoch: int) -> dict[str, Any]:
        """The attributes as part of a position."""
        if self._restored is not None:  # saved again before the first batch
            return {"attributes": self._restored}
        kept = self._kept if epoch == self._entered else self._encoded()
        return {} if kept is None else {"attributes": [epoch, kept]}

    def restore(self, found: Mapping[str, Any]) -> None:
        """Restore this part of a position."""
        self._restored = found.get("attributes")

    def enter(self, epoch: int, *, warn: bool) -> None:
        """Restore the attributes at the start of this epoch, or record them if the epoch is new.

        Args:
            epoch: 0-based.
            warn: warn of state that no position can store: an iterator, or what an earlier epoch changed in a closure.
        """
        restored, self._restored = self._restored, None
        if restored is not None:
            write(self._owners, position.decode(restored[1]))
        elif epoch <= self._entered:
            (self._begun if epoch == self._entered else self._first).restore()
        self._entered = epoch
        self._begun, self._kept = Attributes(*self._owners), self._encoded()
        if warn and not self._has_warned:
            self._warn_of_lost()

    def _warn_of_lost(self) -> None:
        """Warn once of state that no position can store."""
        found = [each for owner in self._owners for each in random_state.outside(owner).items()]
        iterators = [name for name, value in found if _is_iterator(value)] + self._first.iterators()
        vars(self._closed_over).update(closed_over(*self._owners))
        changed = [name for name in self._in_closures.changed() if name not in iterators]
        self._has_warned = bool(iterators or changed)
        if iterators:
            _log.warning(
                "%s: the iterator %s outlives an epoch, and a snapshot cannot store it: a resumed run will not load "
                "the same batches (cure: create it in __iter__, or define state_dict() and load_state_dict())",
                *(self._name, ", ".join(iterators)),
            )
        elif changed:
            _log.warning(
                "%s: an epoch changes %s in a closure, and a snapshot cannot store it: if batches depend on it, a "
                "resumed run will not load the same ones (cure: keep it in attributes)",
                *(self._name, ", ".join(changed)),
            )

    def _encoded(self) -> Any:
        values = self._first.values()
        return position.encode(values, where=self._name, path="attributes") if values else None


def _is_iterator(value: Any) -> bool:
    return not isinstance(value, random_state.KINDS)


class IterableFeed(Feed):
    """An iterable that is iterated once per epoch. To start inside an epoch, it loads and drops batches.

    Args:
        source: ``source(epoch)`` returns the iterator of an epoch; it runs under the random seed of that epoch.
        owners: the iterated object, whose generators are seeded, and the objects that it calls.
        name, seed: as in `open_feed`.
        length, resume: as in `Feed`.
        announce: called with the epoch before it starts.
    """

    def __init__(
        self,
        source: Callable[[int], Iterator[Batch]],
        owners: Sequence[Any],
        *,
        name: str,
        seed: int,
        length: int | None,
        resume: Resume,
        announce: Callable[[int], None],
    ) -> None:
        super().__init__(name=name, length=length, resume=resume, facts={"kind": "iterable", "seed": seed})
        self._source = source
        self._owner = owners[0]
        self._seed = seed
        self._announce = announce
        self._epoch_state = EpochState(owners, name=name)

    def position(self, epoch: int, consumed: int) -> dict[str, Any]:
        """As `Feed.position`, with the attributes that have changed, as they were at the start of the epoch."""
        return {**super().position(epoch, consumed), **self._epoch_state.position(epoch)}

    def restore(self, position: Mapping[str, Any]) -> None:
        super().restore(position)
        self._epoch_state.restore(position)

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        self._epoch_state.enter(epoch, warn=self.resume != "none" and not self.repeats)
        self._announce(epoch)
        seed = mix(self._seed, "order", epoch)
        log_dropped(self.name, epoch, start)
        own = random_state.own(self._owner)
        with random_state.scoped(seed, own):
            iterator = self._source(epoch)
        try:
            yield from self._after(scoped(iterator, seed, own=own), epoch, start)
        finally:
            close = getattr(iterator, "close", None)
            if callable(close):
                close()


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


def log_dropped(name: str, epoch: int, start: int) -> None:
    """Log the number of batches that are loaded and dropped."""
    if start:
        _log.info("%s: loads and drops %d batches to resume inside epoch %d", name, start, epoch + 1)


class StatefulFeed(Feed):
    """A loader with a state: calls ``state_dict()`` after every batch, and ``load_state_dict`` on resuming.

    Args:
        source: ``source(epoch)`` returns the iterator of an epoch.
        owner: the object with the two methods: the loader or its dataset.
        others: objects that are read meanwhile and are not part of that state.
        name, seed: as in `open_feed`.
        length: as in `Feed`.
        announce: called with the epoch before it starts.
    """

    def __init__(
        self,
        source: Callable[[int], Iterator[Batch]],
        owner: Any,
        others: Sequence[Any] = (),
        *,
        name: str,
        seed: int,
        length: int | None,
        announce: Callable[[int], None],
    ) -> None:
        super().__init__(name=name, length=length, resume="state", facts={"kind": "state"})
        self._source = source
        self._owner = owner
        self._seed = seed
        self._announce = announce
        self._others = others
        self._epoch_state = EpochState(others, name=name)
        self._states: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._restored: Any = None
        self._after_left: int | None = None  # an epoch whose predecessor stopped early
        self._ended: tuple[int, int] | None = None  # where an epoch ended; its state may not show it
        self._running: Ahead[Batch] | None = None  # the epoch that is running
        self._yielded = (-1, -1)  # the epoch and the number of batches yielded from it
        self._initial: Any = None  # the state at the start of every pass, if `repeats`

    def position(self, epoch: int, consumed: int) -> dict[str, Any]:
        """As `Feed.position`, with the loader's state. Reads one batch ahead, because a state need not show whether the
        epoch ends here.

        Raises:
            DataError: the state at this position is no longer stored, or cannot be stored as JSON.
        """
        if self._running is not None and self._yielded == (epoch, consumed) and not self._running.more():
            self._ended = epoch, consumed
        stored = self._states.get((epoch, consumed))
        if stored is None and self._restored is not None:  # saved again before the first batch
            stored = position.decode(self._restored)
        if stored is None and consumed:
            raise DataError(
                f"the state after batch {consumed} of epoch {epoch + 1} is no longer stored", where=self.name
            )
        found = {**super().position(epoch, consumed), "state": position.encode(stored, where=self.name)}
        found.update(self._epoch_state.position(epoch))
        if self._ended == (epoch, consumed):
            found["ended"] = [epoch, consumed]
        return found if self._after_left is None else {**found, "after_left": self._after_left}

    def restore(self, position: Mapping[str, Any]) -> None:
        super().restore(position)
        self._restored = position.get("state")
        self._epoch_state.restore(position)
        self._after_left = position.get("after_left")
        self._ended = None if (ended := position.get("ended")) is None else (ended[0], ended[1])

    def left(self, epoch: int, consumed: int) -> None:
        if self.repeats:
            return
        if self._restored is not None:  # the epoch stops where it started: the state was not loaded yet
            self._keep(epoch, consumed, position.decode(self._restored))
        self._keep(epoch + 1, 0, self._states.get((epoch, consumed)))
        self._after_left = epoch + 1

    def close(self) -> None:
        if self._initial is not None:
            self._owner.load_state_dict(copy.deepcopy(self._initial[0]))

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        if start and (epoch, start) == self._ended:
            # The state is that of an ended epoch: the next epoch loads it, and `position` may need it before.
            if self._restored is not None:
                ended = position.decode(self._restored)
                self._keep(epoch, start, ended)
                self._keep(epoch + 1, 0, ended)
            return
        try:
            self._running = Ahead(self._read(epoch, start))
            for number, batch in enumerate(self._running, start + 1):
                self._yielded = epoch, number
                yield batch
        finally:
            self._running = None  # an interrupted epoch has not ended

    def _read(self, epoch: int, start: int) -> Iterator[Batch]:
        state = self._load(epoch, start)
        seed = mix(self._seed, "order", epoch)
        if self._is_after_left(epoch, start):
            with random_state.scoped(seed):
                self._source(epoch)  # some loaders first continue the epoch that stopped early; drop that
        number = start
        # A loader with the restored state of an ended epoch may have to run out before it restarts.
        for _ in range(2 if state is not None and not start else 1):
            with random_state.scoped(seed):
                iterator = self._source(epoch)
            for number, batch in enumerate(scoped(iterator, seed, start), start + 1):
                if not self.repeats:
                    self._keep(epoch, number, copy.deepcopy(self._owner.state_dict()))
                yield batch
            if number > start:
                break
        if not self.repeats:
            self._ended = epoch, number
            self._keep(epoch + 1, 0, copy.deepcopy(self._owner.state_dict()))

    def _load(self, epoch: int, start: int) -> Any:
        held, self._restored = self._restored, None
        self._epoch_state.enter(epoch, warn=not self.repeats)
        self._announce(epoch)
        if self.repeats:
            return self._rewound()
        # After an epoch that stopped early, load the state in any case, as a run that is resumed there does.
        is_known = start or self._is_after_left(epoch, start)
        if self._others and not is_known:
            self._keep(epoch, start, None if held is None else position.decode(held))
            return None  # loading the state of an ended epoch would start one more, which the others would count
        state = position.decode(held) if held is not None else self._states.get((epoch, start)) if is_known else None
        if start and state is None:
            raise DataError(f"no state of batch {start} was restored", where=self.name, hint="feed.restore(position)")
        if state is not None:
            self._owner.load_state_dict(copy.deepcopy(state))
            self._keep(epoch, start, state)
        return state

    def _rewound(self) -> Any:
        """Load and return the state at the start of the first pass."""
        if self._initial is None:
            # torchdata's loader starts to load when state_dict is called.
            with random_state.scoped(mix(self._seed, "order", 0)):
                self._initial = (copy.deepcopy(self._owner.state_dict()),)
        self._owner.load_state_dict(copy.deepcopy(self._initial[0]))
        return self._initial[0]

    def _is_after_left(self, epoch: int, start: int) -> bool:
        return not start and self._after_left == epoch

    def _keep(self, epoch: int, consumed: int, state: Any) -> None:
        self._states[epoch, consumed] = state
        if len(self._states) > _REMEMBERED:
            self._states.popitem(last=False)
