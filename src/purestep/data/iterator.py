"""The feed of an iterator, which cannot restart unless its ``__iter__`` restarts it."""

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
from .iterable import log_dropped, scoped


class OneShotFeed(Feed):
    """The feed of an iterator. Some iterators, such as prefetchers, restart in ``__iter__``; others cannot restart.

    Every epoch after the first calls ``iter(iterator)``. It has restarted if it had ended before, if ``iter`` returns
    another object, or if its attributes have changed. Use `limit` to cut an endless iterator into epochs.

    Args:
        iterator: the iterator.
        name, seed, announce: as in `IterableFeed`.
        replay: the user allows loading and dropping batches. Not needed if the class defines ``__iter__``, as for other
            iterables.
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
        self._since: int | None = None  # the epoch that started at the iterator's start; None: no epoch has started
        self._yielded = 0  # batches since then
        self._any = False  # True after the first batch
        self._ended = False
        self._rewinds = False  # True after a restart was detected
        self._continues = False  # True after an epoch started where the previous one stopped
        self._yielded_before: dict[int, int] = {}  # epoch that runs -> batches before it
        self._restored: list[Any] | None = None  # "place" of `position`

    def position(self, epoch: int, consumed: int) -> dict[str, Any]:
        given = self._yielded_before.get(epoch, self._yielded) + consumed
        place = [epoch, consumed, given, self._since or 0, self._continues, self._ended]
        if self._restored is not None and self._since is None and self._restored[:2] == place[:2]:
            place = self._restored  # saved again before the first batch
        elif self._rewinds and not consumed and epoch not in self._yielded_before:
            place = [epoch, 0, 0, epoch, False, False]
        return {**super().position(epoch, consumed), "place": place}

    def restore(self, position: Mapping[str, Any]) -> None:
        super().restore(position)
        place = position.get("place")
        self._restored = None if place is None else [*place, *(0, True, False)[len(place) - 3 :]]

    def left(self, epoch: int, consumed: int) -> None:
        if self._since is None and self._restored is not None:  # the epoch stops where it started
            self._restored = [epoch + 1, 0, *self._restored[2:]]

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        self._announce(epoch)
        if self._since is None:
            since, given, ended = self._place(epoch, start)
            log_dropped(self.name, epoch, given)
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
            raise self._unreachable(epoch, start)
        self._yielded_before = {epoch: self._yielded - start}
        yield from self._rest()

    def _place(self, epoch: int, start: int) -> tuple[int, int, bool]:
        """The epoch that started at the iterator's start, the number of batches since then, and if it had ended."""
        if self._restored is None or self._restored[:2] != [epoch, start]:
            if epoch and not self._own_start:
                raise self._unreachable(epoch, start)
            return epoch, start, False
        given, since, continues, ended = self._restored[2:]
        if given:
            self.require_resume()
        if continues and given > start and not self._replay:
            raise DataError(
                f"{given} batches were loaded before batch {start + 1} of epoch {epoch + 1}; it is unknown if an epoch "
                "continues where the previous one stopped",
                where=self.name,
                hint="give the loader state_dict() and load_state_dict(), or pass ps.open_feed(loader, "
                "replay=True) if it continues",
            )
        self._continues = continues
        return since, given, ended

    def _drop(self, count: int) -> None:
        for _ in islice(self._rest(), count):
            pass

    def _restart(self, epoch: int) -> None:
        """Start an epoch on a used iterator."""
        before, known = _inside(self._owner) if self._own_start else None, self._iterator
        self._begin(epoch)
        is_other = self._iterator is not known or (self._own_start and not _is_same(before, _inside(self._owner)))
        if self._ended or is_other:
            self._rewinds = self._rewinds or is_other  # after an end, the next batch decides
            self._since, self._yielded = epoch, 0
        elif self.repeats and self._any:
            raise DataError(
                "the iterator cannot restart: the previous evaluation consumed its batches",
                where=self.name,
                hint="pass the loader itself instead of iter(loader), or list(batches)",
            )
        else:
            self._continues = True

    def _begin(self, epoch: int) -> None:
        with random_state.scoped(mix(self._seed, "order", epoch), random_state.own(self._owner)):
            self._iterator = iter(self._owner)

    def _rest(self) -> Iterator[Batch]:
        own = random_state.own(self._owner)
        for batch in scoped(self._iterator, mix(self._seed, "order", self._since or 0), self._yielded, own):
            self._rewinds, self._ended = self._rewinds or self._ended, False
            self._yielded += 1
            self._any = True
            yield batch
        self._ended = True

    def _unreachable(self, epoch: int, start: int) -> DataError:
        return DataError(
            f"the iterator cannot return to batch {start + 1} of epoch {epoch + 1}",
            where=self.name,
            hint="pass a loader that can be iterated again: a DataLoader, a list, a class with __iter__",
        )

    def _nothing(self, epoch: int) -> DataError:
        if not self._any:
            return super()._nothing(epoch)
        return DataError(
            f"no batch is left for epoch {epoch + 1}: the iterator can run only one epoch",
            where=self.name,
            hint="pass the loader itself instead of iter(loader), or list(batches)",
        )


_NESTED = 4  # levels of attributes and containers to search
_LONGEST = 1000  # entries of a container to search


def _has_own_start(iterator: Any) -> bool:
    """True if the class defines ``__iter__`` in Python, so that it may restart the iterator; torch's do not."""
    found = inspect.getattr_static(type(iterator), "__iter__", None)
    return isinstance(found, types.FunctionType) and not found.__module__.startswith(("torch.", "collections.abc"))


def _inside(node: Any, level: int = 0) -> Any:
    """A copy of the attributes and containers of an object; the leaves are not copied."""
    if isinstance(node, dict) or (level < _NESTED and hasattr(node, "__dict__") and not isinstance(node, type)):
        values: dict[Any, Any] = cast(Any, node) if isinstance(node, dict) else vars(node)
        if level < _NESTED and len(values) <= _LONGEST:
            return {key: _inside(child, level + 1) for key, child in values.items()}
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
