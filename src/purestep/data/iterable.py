"""Loaders without indices: sequences of batches, iterables, loaders with a state of their own."""

from __future__ import annotations

import copy
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..errors import DataError
from ..rng import mix
from ..types import Batch
from . import random_state
from . import state_json as position
from .attribute_state import Attributes, write
from .feed import Feed, Resume
from .lookahead import Ahead

_log = logging.getLogger("purestep")
_REMEMBERED = 64  # states kept: more than any prefetching runs ahead


class SequenceFeed(Feed):
    """A list or tuple of batches, in its order in every epoch."""

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


class Outlasting:
    """What loaders keep in attributes from epoch to epoch: put back where an epoch is entered again, and a part of the
    position.

    Args:
        owners: what is iterated, and what is called meanwhile.
        name: of the loader, for messages.
    """

    def __init__(self, owners: Sequence[Any], *, name: str) -> None:
        self._owners = owners
        self._name = name
        self._first = self._begun = Attributes(*owners)
        self._entered = -1
        self._kept: Any = None  # attributes, as JSON, as the epoch that was entered last began; None: as they were
        self._restored: list[Any] | None = None  # the epoch that begins with them, and they
        self._is_told = False

    def position(self, epoch: int) -> dict[str, Any]:
        """The part of a position."""
        if self._restored is not None:  # saved again before a batch was asked for
            return {"attributes": self._restored}
        kept = self._kept if epoch == self._entered else self._encoded()
        return {} if kept is None else {"attributes": [epoch, kept]}

    def restore(self, found: Mapping[str, Any]) -> None:
        """Take over that part of a position."""
        self._restored = found.get("attributes")

    def enter(self, epoch: int, *, tell: bool) -> None:
        """Bring the attributes to where they were when this epoch began, or take down where that is.

        Args:
            epoch: 0-based.
            tell: warn of what no position can hold.
        """
        restored, self._restored = self._restored, None
        if restored is not None:
            write(self._owners, position.decode(restored[1]))
        elif epoch <= self._entered:
            (self._begun if epoch == self._entered else self._first).put_back()
        self._entered = epoch
        self._begun, self._kept = Attributes(*self._owners), self._encoded()
        outside = [each for owner in self._owners for each in random_state.outside(owner).items()]
        hidden = [name for name, found in outside if _is_iterator(found)]
        lost = [*hidden, *self._first.iterators()] if tell and not self._is_told else []
        if lost:
            self._is_told = True
            _log.warning(
                "%s: %s outlasts an epoch, and no snapshot can hold an iterator: a resumed run will not load the same "
                "batches (cure: make it anew in __iter__, or state_dict() and load_state_dict())",
                *(self._name, ", ".join(lost)),
            )

    def _encoded(self) -> Any:
        values = self._first.values()
        return position.encode(values, where=self._name, path="attributes") if values else None


def _is_iterator(value: Any) -> bool:
    return not isinstance(value, random_state.KINDS)


class IterableFeed(Feed):
    """Anything that can be iterated once an epoch, entered in the middle by dropping batches.

    Args:
        source: gives the iterator of an epoch; called inside the random stream of that epoch.
        owners: what is iterated, which may hold generators for itself, and what is called meanwhile.
        name, seed: as in `open_feed`.
        length, resume: as in `Feed`.
        announce: told the epoch before it begins.
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
        self._outlasting = Outlasting(owners, name=name)

    def position(self, epoch: int, consumed: int) -> dict[str, Any]:
        """As of any feed, with the attributes that have changed, as they were when the epoch began."""
        return {**super().position(epoch, consumed), **self._outlasting.position(epoch)}

    def restore(self, position: Mapping[str, Any]) -> None:
        super().restore(position)
        self._outlasting.restore(position)

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        self._outlasting.enter(epoch, tell=self.resume != "none" and not self.repeats)
        self._announce(epoch)
        seed = mix(self._seed, "order", epoch)
        tell_cost(self.name, epoch, start)
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
    """Each batch is drawn under a seed of its own: where an epoch is entered, no random stream has to be put back."""
    for number in itertools.count(start):
        with random_state.scoped(mix(seed, number), own):
            try:
                batch = next(iterator)
            except StopIteration:
                return
        yield batch


def tell_cost(name: str, epoch: int, start: int) -> None:
    """Log how many batches are loaded for nothing."""
    if start:
        _log.info("%s: loads and drops %d batches to go on inside epoch %d", name, start, epoch + 1)


class StatefulFeed(Feed):
    """A loader that knows its own place: ``state_dict()`` after every batch, ``load_state_dict`` on resuming.

    Args:
        source: gives the iterator of an epoch.
        owner: what has the two methods: the loader, or its dataset.
        others: what is read meanwhile and is not in that state.
        name, seed: as in `open_feed`.
        length: as in `Feed`.
        announce: told the epoch before it begins.
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
        self._outlasting = Outlasting(others, name=name)
        self._states: OrderedDict[tuple[int, int], Any] = OrderedDict()
        self._restored: Any = None
        self._after_left: int | None = None  # an epoch that follows one which was not run to its end
        self._ended: tuple[int, int] | None = None  # where an epoch was seen to end: its state may not say so
        self._running: Ahead[Batch] | None = None  # the epoch that is being read
        self._given = (-1, -1)  # the epoch and the batches of it that were given
        self._initial: Any = None  # the state that every pass begins with, where it repeats

    def position(self, epoch: int, consumed: int) -> dict[str, Any]:
        """As of any feed, with the loader's own state. Whether the epoch ends here, a state need not say, so the loader
        is asked for one batch more.

        Raises:
            DataError: of a place whose state is not kept, or cannot be stored.
        """
        if self._running is not None and self._given == (epoch, consumed) and not self._running.more():
            self._ended = epoch, consumed
        stored = self._states.get((epoch, consumed))
        if stored is None and self._restored is not None:  # saved again before a batch was asked for
            stored = position.decode(self._restored)
        if stored is None and consumed:
            raise DataError(f"no state is kept of batch {consumed} of epoch {epoch + 1}", where=self.name)
        found = {**super().position(epoch, consumed), "state": position.encode(stored, where=self.name)}
        found.update(self._outlasting.position(epoch))
        if self._ended == (epoch, consumed):
            found["ended"] = [epoch, consumed]
        return found if self._after_left is None else {**found, "after_left": self._after_left}

    def restore(self, position: Mapping[str, Any]) -> None:
        super().restore(position)
        self._restored = position.get("state")
        self._outlasting.restore(position)
        self._after_left = position.get("after_left")
        self._ended = None if (ended := position.get("ended")) is None else (ended[0], ended[1])

    def left(self, epoch: int, consumed: int) -> None:
        if self.repeats:
            return
        if self._restored is not None:  # the epoch was entered where it is left: nobody has loaded the state
            self._keep(epoch, consumed, position.decode(self._restored))
        self._keep(epoch + 1, 0, self._states.get((epoch, consumed)))
        self._after_left = epoch + 1

    def close(self) -> None:
        if self._initial is not None:
            self._owner.load_state_dict(copy.deepcopy(self._initial[0]))

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        if start and (epoch, start) == self._ended:
            # The state is that of an end: it is loaded where the next epoch begins, and may be asked for before.
            if self._restored is not None:
                ended = position.decode(self._restored)
                self._keep(epoch, start, ended)
                self._keep(epoch + 1, 0, ended)
            return
        try:
            self._running = Ahead(self._read(epoch, start))
            for number, batch in enumerate(self._running, start + 1):
                self._given = epoch, number
                yield batch
        finally:
            self._running = None  # what was broken off is not at its end

    def _read(self, epoch: int, start: int) -> Iterator[Batch]:
        state = self._load(epoch, start)
        seed = mix(self._seed, "order", epoch)
        if self._is_after_left(epoch, start):
            with random_state.scoped(seed):
                self._source(epoch)  # what goes on with the epoch that was left, where a loader does so; dropped
        number = start
        # A loader whose restored state is that of an end may have to run out before it begins anew.
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
        self._outlasting.enter(epoch, tell=not self.repeats)
        self._announce(epoch)
        if self.repeats:
            return self._put_back()
        # After an epoch that was left the state is loaded in any case: so does a run that is resumed there.
        is_known = start or self._is_after_left(epoch, start)
        if self._others and not is_known:
            self._keep(epoch, start, None if held is None else position.decode(held))
            return None  # the state of an end would have it begin an epoch more, which the others would count
        state = position.decode(held) if held is not None else self._states.get((epoch, start)) if is_known else None
        if start and state is None:
            raise DataError(f"no state of batch {start} was restored", where=self.name, hint="feed.restore(position)")
        if state is not None:
            self._owner.load_state_dict(copy.deepcopy(state))
            self._keep(epoch, start, state)
        return state

    def _put_back(self) -> Any:
        """The loader at the place where its first pass began."""
        if self._initial is None:
            with random_state.scoped(
                mix(self._seed, "order", 0)
            ):  # torchdata's begins to load where it is asked for a state
                self._initial = (copy.deepcopy(self._owner.state_dict()),)
        self._owner.load_state_dict(copy.deepcopy(self._initial[0]))
        return self._initial[0]

    def _is_after_left(self, epoch: int, start: int) -> bool:
        return not start and self._after_left == epoch

    def _keep(self, epoch: int, consumed: int, state: Any) -> None:
        self._states[epoch, consumed] = state
        if len(self._states) > _REMEMBERED:
            self._states.popitem(last=False)
