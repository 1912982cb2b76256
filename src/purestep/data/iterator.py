"""Iterators: what they gave is gone, unless ``iter`` puts them back to their start."""

from __future__ import annotations

import inspect
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any, cast

from ..errors import DataError
from ..rng import mix
from ..types import Batch
from . import random_state
from .feed import Feed, Resume
from .iterable import scoped, tell_cost


class OneShotFeed(Feed):
    """An iterator: what it gave is gone, unless its ``__iter__`` puts it back to its start and returns it, as that of a
    prefetcher does. An endless one may be cut into epochs with `limit`.

    Every epoch after the first begins with ``iter(iterator)``. Whether that has put it back shows: it had ended,
    another object is returned, or its attributes have changed.

    Args:
        iterator: what is iterated.
        name, seed, announce: as of an `IterableFeed`.
        replay: whether the user has allowed to load batches again and to drop them. Not asked of an iterator whose
            class has an ``__iter__`` of its own, as it is not asked of other iterables.
    """

    def __init__(
        self, iterator: Iterator[Batch], *, name: str, seed: int, replay: bool, announce: Callable[[int], None]
    ) -> None:
        self._own_start = _has_own_start(iterator)
        resume: Resume = "replay" if replay or self._own_start else "none"
        super().__init__(name=name, length=None, resume=resume, facts={"kind": "iterator", "seed": seed})
        self._owner = self._iterator = iterator
        self._seed = seed
        self._replay = replay
        self._announce = announce
        self._since: int | None = None  # the epoch that began at the iterator's start; None: none has begun
        self._given = 0  # batches since then
        self._any = False  # a batch was given
        self._ended = False
        self._rewinds = False  # it has been seen to begin again
        self._goes_on = False  # an epoch has begun where the one before was left, as far as could be seen
        self._given_before: dict[int, int] = {}  # before the epoch that runs
        self._restored: list[Any] | None = None  # a place as `position` gives it

    def position(self, epoch: int, consumed: int) -> dict[str, Any]:
        given = self._given_before.get(epoch, self._given) + consumed
        place = [epoch, consumed, given, self._since or 0, self._goes_on, self._ended]
        if self._restored is not None and self._since is None and self._restored[:2] == place[:2]:
            place = self._restored  # saved again before a batch was asked for
        elif self._rewinds and not consumed and epoch not in self._given_before:
            place = [epoch, 0, 0, epoch, False, False]
        return {**super().position(epoch, consumed), "place": place}

    def restore(self, position: Mapping[str, Any]) -> None:
        super().restore(position)
        place = position.get("place")
        self._restored = None if place is None else [*place, *(0, True, False)[len(place) - 3 :]]

    def left(self, epoch: int, consumed: int) -> None:
        if self._since is None and self._restored is not None:  # the epoch was entered where it is left
            self._restored = [epoch + 1, 0, *self._restored[2:]]

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        self._announce(epoch)
        if self._since is None:
            since, given, ended = self._place(epoch, start)
            tell_cost(self.name, epoch, given)
            self._since = since
            self._begin(since)
            self._drop(given)
            self._ended = ended and next(self._rest(), None) is None
            if not start and given:
                self._restart(epoch)
        elif not start or self._rewinds:
            self._restart(epoch)
            self._drop(start)
        else:
            raise self._not_there(epoch, start)
        self._given_before = {epoch: self._given - start}
        yield from self._rest()

    def _place(self, epoch: int, start: int) -> tuple[int, int, bool]:
        """The epoch that began at the start of the iterator, how many batches it had given since then, and whether it
        had ended."""
        if self._restored is None or self._restored[:2] != [epoch, start]:
            if epoch and not self._own_start:
                raise self._not_there(epoch, start)
            return epoch, start, False
        given, since, goes_on, ended = self._restored[2:]
        if given:
            self.require_resume()
        if goes_on and given > start and not self._replay:
            raise DataError(
                f"{given} batches were given before batch {start + 1} of epoch {epoch + 1}, and whether an epoch goes "
                "on where the one before was left cannot be seen",
                where=self.name,
                hint="give the loader state_dict() and load_state_dict(), or pass purestep.data.open_feed(loader, "
                "replay=True) if it goes on",
            )
        self._goes_on = goes_on
        return since, given, ended

    def _drop(self, count: int) -> None:
        for _ in islice(self._rest(), count):
            pass

    def _restart(self, epoch: int) -> None:
        """Begin an epoch on an iterator that has been used."""
        before, known = _inside(self._owner) if self._own_start else None, self._iterator
        self._begin(epoch)
        is_other = self._iterator is not known or (self._own_start and not _is_same(before, _inside(self._owner)))
        if self._ended or is_other:
            self._rewinds = self._rewinds or is_other  # after an end, the next batch will tell
            self._since, self._given = epoch, 0
        elif self.repeats and self._any:
            raise DataError(
                "an iterator cannot begin again: the batches that it gave to the evaluation before are gone",
                where=self.name,
                hint="pass the loader itself instead of iter(loader), or list(batches)",
            )
        else:
            self._goes_on = True

    def _begin(self, epoch: int) -> None:
        with random_state.scoped(mix(self._seed, "order", epoch), random_state.own(self._owner)):
            self._iterator = iter(self._owner)

    def _rest(self) -> Iterator[Batch]:
        own = random_state.own(self._owner)
        for batch in scoped(self._iterator, mix(self._seed, "order", self._since or 0), self._given, own):
            self._rewinds, self._ended = self._rewinds or self._ended, False
            self._given += 1
            self._any = True
            yield batch
        self._ended = True

    def _not_there(self, epoch: int, start: int) -> DataError:
        return DataError(
            f"an iterator cannot be put back to batch {start + 1} of epoch {epoch + 1}",
            where=self.name,
            hint="pass a loader that can be iterated again: a DataLoader, a list, a class with __iter__",
        )

    def _nothing(self, epoch: int) -> DataError:
        if not self._any:
            return super()._nothing(epoch)
        return DataError(
            f"no batch left for epoch {epoch + 1}: a one-shot iterator is good for one epoch",
            where=self.name,
            hint="pass the loader itself instead of iter(loader), or list(batches)",
        )


_NESTED = 4  # levels of attributes and containers that are looked into
_LONGEST = 1000  # entries of a container that is looked into


def _has_own_start(iterator: Any) -> bool:
    """Whether the class has an ``__iter__`` in Python that may do more than return the iterator; torch's do not."""
    found = inspect.getattr_static(type(iterator), "__iter__", None)
    return isinstance(found, types.FunctionType) and not found.__module__.startswith(("torch.", "collections.abc"))


def _inside(node: Any, level: int = 0) -> Any:
    """A copy of attributes and containers, whose leaves are the objects themselves."""
    if isinstance(node, dict) or (level < _NESTED and hasattr(node, "__dict__") and not isinstance(node, type)):
        held: dict[Any, Any] = cast(Any, node) if isinstance(node, dict) else vars(node)
        if level < _NESTED and len(held) <= _LONGEST:
            return {key: _inside(child, level + 1) for key, child in held.items()}
    if isinstance(node, list | tuple | deque) and level < _NESTED and len(cast(Any, node)) <= _LONGEST:
        return [_inside(child, level + 1) for child in cast("list[Any]", node)]
    return node


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(cast(Any, one)) == len(other) and all(map(_is_same, one, other))
    return one is other or (isinstance(one, bool | int | float | str | bytes) and one == other)
