"""`Feed`: the batches of a loader from any (epoch, start), a position to store, and errors that name the batch."""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from itertools import islice
from typing import Any, Literal, TypeAlias

from ..errors import ConfigError, DataError, Mismatch, PurestepError
from ..state import is_number, whole
from ..types import Batch
from .equality import same

Resume: TypeAlias = Literal["skip", "state", "replay", "none"]
"""How to resume inside an epoch: skip indices, load the loader's state, load and drop batches, or not at all."""

_log = logging.getLogger("purestep")
_SHOWN = 16  # indices shown in a message


class Feed(ABC):
    """The batches of one loader. Their order depends only on (seed, epoch), and an epoch can start at any batch.

    Args:
        name: the name of the loader, for messages.
        length: ``len(loader)``, or None. It may be wrong; an epoch ends when the batches end.
        resume: how to resume inside an epoch.
        facts: name -> number or text; a restored position must have the same facts.
        exact: True if every epoch has exactly ``length`` batches.
    """

    ends: Callable[[int], int | None] = staticmethod(lambda epoch: None)
    """``ends(epoch)`` is the number of batches after which an epoch stops early (see `limit`), or None."""

    repeats: bool = False
    """True if every pass over an epoch starts at the same place, for evaluation."""

    is_divided: bool = False
    """True if the batches are the shares of one of several processes."""

    _first_batch: Any = None  # of the first pass, in a tuple, if `repeats`

    def __init__(
        self, *, name: str, length: int | None, resume: Resume, facts: Mapping[str, Any], exact: bool = False
    ) -> None:
        self.name = name
        self.length = length
        self.exact = exact and length is not None
        self.resume: Resume = resume
        self.facts = dict(facts)

    @abstractmethod
    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """The batches of an epoch from ``start`` on, with the loader's own errors."""

    def count(self, epoch: int) -> int | None:
        """The number of batches of an epoch, or None if it is uncertain."""
        del epoch
        return self.length if self.exact else None

    def in_order(self) -> Feed:
        """The same batches in the dataset's order, if a DataLoader shuffles them; else the feed itself.

        A sampler of the user, or one that draws with replacement or a part, decides which items there are, so it stays.

        Example:
            >>> import torch
            >>> from torch.utils.data import DataLoader
            >>> from purestep.data import open_feed
            >>> feed = open_feed(DataLoader(torch.arange(6), batch_size=3, shuffle=True)).in_order()
            >>> [batch.tolist() for batch in feed.epoch(0)]
            [[0, 1, 2], [3, 4, 5]]
        """
        ordered = self._ordered()
        ordered.repeats = self.repeats
        return ordered

    def _ordered(self) -> Feed:
        """A feed of the same batches in the dataset's order, or this one."""
        return self

    def epoch(self, epoch: int, start: int = 0) -> Generator[Batch]:
        """The batches of one epoch.

        Args:
            epoch: 0-based.
            start: the number of batches of this epoch to skip, >= 0.

        Raises:
            DataError: the loader is empty, exhausted or raises, or it cannot start inside an epoch. Messages count
                epochs and batches from 1.
            Mismatch: ``start`` is after the end of the epoch.
            ConfigError: a number is negative.
        """
        if epoch < 0 or start < 0:
            raise ConfigError(f"epoch={epoch}, start={start}: both must be at least 0", where=self.name)
        if start:
            self.require_resume()
        if self.exact:
            self._check_start(epoch, start, self.length or 0)
        return self._named(epoch, start)

    def _check_start(self, epoch: int, start: int, found: int) -> None:
        """Raise `Mismatch` if the start is after the end of an epoch of ``found`` batches."""
        if start > found:
            raise Mismatch(
                f"{start} batches of epoch {epoch + 1} are done, but the loader has only {found} per epoch",
                where=self.name,
                hint="resume with the loader of the interrupted run",
            )

    def _after(self, batches: Iterator[Any], epoch: int, start: int) -> Iterator[Any]:
        """Skip the first ``start`` batches, or index batches, of an epoch.

        Raises:
            Mismatch: there are fewer.
        """
        self._check_start(epoch, start, sum(1 for _ in islice(batches, start)))
        return batches

    def _named(self, epoch: int, start: int) -> Generator[Batch]:
        number = start
        batches = self._batches(epoch, start)
        try:
            while True:
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                except PurestepError:
                    raise
                except Exception as error:
                    raise self._failure(error, epoch, number) from error
                if number == 0 and self.repeats:
                    self._check_first(batch)
                number += 1
                yield batch
        finally:
            close = getattr(batches, "close", None)
            if close is not None:
                close()
        if number == 0:
            raise self._nothing(epoch)

    def _check_first(self, batch: Batch) -> None:
        """Warn once if a pass starts with another batch than the first pass."""
        if self._first_batch is None:
            try:
                self._first_batch = (copy.deepcopy(batch),)
            except Exception:  # an object that cannot be copied is not compared
                self._first_batch = ()
        elif self._first_batch and not same(self._first_batch[0], batch):
            self._first_batch = ()
            _log.warning(
                "%s: this pass starts with another batch than the first pass, so its metrics are not of the same data "
                "(cure: restart in __iter__, or define state_dict() and load_state_dict(); draw from torch's, numpy's "
                "or Python's global generator)",
                self.name,
            )

    def indices(self, epoch: int, batch: int) -> list[Any] | None:
        """The dataset's indices of a recent batch (both 0-based), or None if they are unknown."""
        del epoch, batch  # Only `IndexedFeed` has indices.
        return None

    def order(self, epoch: int, batch: int) -> int:
        """A hash of the indices of a recent batch (both 0-based) of all processes; 0 if they are unknown."""
        del epoch, batch  # Only `IndexedFeed` has indices.
        return 0

    def position(self, epoch: int, consumed: int) -> dict[str, Any]:
        """The position after ``consumed`` batches of ``epoch`` as JSON, for `restore`.

        Example:
            >>> from purestep.data import open_feed
            >>> open_feed([1, 2, 3]).position(0, 2)
            {'facts': {'kind': 'sequence', 'batches': 3}}
        """
        del epoch, consumed  # The order follows from (seed, epoch, start), which the caller stores.
        return {"facts": self.facts}

    def restore(self, position: Mapping[str, Any]) -> None:
        """Check a stored position against this loader and restore it.

        Raises:
            Mismatch: batch size, number of items or order differ; the message has both values.
        """
        stored = dict(position.get("facts", {}))
        if "batches" not in self.facts:
            stored.pop("batches", None)  # an earlier version stored this hint as a fact
        differing = [key for key in {**stored, **self.facts} if stored.get(key) != self.facts.get(key)]
        if differing:
            changes = ", ".join(f"{key} was {stored.get(key)!r} and is {self.facts.get(key)!r}" for key in differing)
            raise Mismatch(
                f"the loader is not the one of the interrupted run: {changes}",
                where=self.name,
                hint="resume with the same loader, or start a new run from the restored state: "
                "fit(snapshots.restore(state).state, ..., resume=None)",
            )

    def require_resume(self) -> None:
        """Raise `DataError` if the loader cannot start inside an epoch."""
        if self.resume == "none":
            raise DataError(
                "cannot start inside an epoch: the loader has neither indices nor state_dict()",
                where=self.name,
                hint="give the loader state_dict() and load_state_dict(), use a map-style dataset, or pass "
                "ps.open_feed(loader, replay=True), which loads the consumed batches again and drops them",
            )

    def left(self, epoch: int, consumed: int) -> None:
        """Called after an epoch stopped early, after ``consumed`` batches."""
        return

    def close(self) -> None:
        """Stop workers and release iterators. The feed can be used again."""
        return

    def _failure(self, error: Exception, epoch: int, number: int) -> DataError:
        found = self.indices(epoch, number)
        items = ""
        if found is not None:
            more = f", ... ({len(found)} in all)" if len(found) > _SHOWN else ""
            items = f", items [{', '.join(str(i) for i in found[:_SHOWN])}{more}]"
        # The message of a worker's error is its whole traceback; it stays visible as the cause of this error.
        last = next(reversed(str(error).strip().splitlines()), "")
        kind = type(error).__name__
        notes = [f"; {note}" for note in getattr(error, "__notes__", ())]
        return DataError(
            f"{last if last.startswith(f'{kind}: ') else f'{kind}: {last}'}{''.join(notes)}",
            where=f"{self.name}, epoch {epoch + 1}, batch {number + 1}{items}",
            hint=_cure(f"{error}{notes}"),
        )

    def _nothing(self, epoch: int) -> DataError:
        return DataError(
            f"no batch in epoch {epoch + 1}: the loader is empty",
            where=self.name,
            hint="check the dataset's length, and batch_size if drop_last=True",
        )


def _cure(message: str) -> str:
    # torch's text where a worker dies; an exception in a worker is "Caught ... in DataLoader worker process".
    if "DataLoader worker (pid" in message or "ended by SIG" in message:
        return "a worker died, usually for lack of memory or /dev/shm: use fewer workers, smaller batches or more shm"
    if "timed out" in message:
        return "an item took longer than the timeout, or a worker hangs: pass DataLoader(..., timeout=seconds)"
    return ""


class _Limited(Feed):
    def __init__(self, feed: Feed, amount: int | float) -> None:
        whole = feed.length
        first = amount if isinstance(amount, int) else share(amount, whole or 1)
        length = first if whole is None else min(first, whole)
        facts = {**feed.facts, "limit": first if feed.exact else amount}
        super().__init__(name=feed.name, length=length, resume=feed.resume, facts=facts, exact=feed.exact)
        self._feed = feed
        self.is_divided = feed.is_divided
        self._amount = amount
        feed.ends = self._last

    def count(self, epoch: int) -> int | None:
        whole = self._feed.count(epoch)
        return None if whole is None else min(self._last(epoch), whole)

    def _last(self, epoch: int) -> int:
        """The number of batches; a share is of the exact number of batches if that is known, else of ``length``."""
        if isinstance(self._amount, int):
            return self._amount
        return share(self._amount, self._feed.count(epoch) or self._feed.length or 1)

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        last = self._last(epoch)
        self._check_start(epoch, start, last)
        consumed = start
        if start < last:
            for batch in islice(self._feed.epoch(epoch, start), last - start):
                consumed += 1
                yield batch
        if consumed == last:
            self._feed.left(epoch, consumed)
        elif not isinstance(self._amount, int):
            _log.warning(
                "%s: %g of an epoch was %d batches, but the epoch ended after %d: len(loader) is wrong (cure: pass "
                "limit_batches=%d, a number of batches)",
                *(self.name, self._amount, last, consumed, consumed),
            )

    def indices(self, epoch: int, batch: int) -> list[Any] | None:
        return self._feed.indices(epoch, batch)

    def order(self, epoch: int, batch: int) -> int:
        return self._feed.order(epoch, batch)

    def position(self, epoch: int, consumed: int) -> dict[str, Any]:
        return {**self._feed.position(epoch, consumed), "facts": self.facts}

    def restore(self, position: Mapping[str, Any]) -> None:
        super().restore(position)
        self._feed.restore({**position, "facts": self._feed.facts})

    def close(self) -> None:
        self._feed.close()


def limit(feed: Feed, amount: int | float) -> Feed:
    """Limit every epoch of a feed to its first batches.

    Args:
        feed: the feed to limit.
        amount: a number of batches (int, >= 1) or a share of the epoch (float in (0, 1]; at least one batch). The share
            is of the epoch's batches if the feed can count them without loading, else of its length.

    Raises:
        ConfigError: the amount is no such number, or it is a share and the loader has no length.

    Example:
        >>> from purestep.data import open_feed
        >>> list(limit(open_feed([1, 2, 3, 4]), 0.5).epoch(0))
        [1, 2]
    """
    if not is_number(amount) or amount <= 0 or (isinstance(amount, float) and not amount <= 1):
        hint = "pass 100 (batches) or 0.25 (a quarter of the epoch)"
        raise ConfigError(f"{amount!r} batches", where=feed.name, hint=hint)
    if isinstance(amount, float) and not feed.length:
        what = f'limit_batches={{"{feed.name}": {amount}}} needs len(loader), and the loader {feed.name!r} has none'
        raise ConfigError(what, where="fit", hint=f'pass a number of batches: limit_batches={{"{feed.name}": 100}}')
    return feed if amount == 1.0 and isinstance(amount, float) else _Limited(feed, amount)


def share(amount: float, count: int) -> int:
    """A share of ``count`` batches, rounded down, at least 1.

    Example:
        >>> share(0.29, 100), share(0.01, 3)
        (29, 1)
    """
    return max(1, whole(amount * count))


class _Fixed(Feed):
    def __init__(self, feed: Feed, count: int) -> None:
        length = count if feed.length is None else min(count, feed.length)
        super().__init__(name=feed.name, length=length, resume="skip", facts={**feed.facts, "overfit": count})
        self._feed = feed
        self.is_divided = feed.is_divided
        self._count = count
        self._held: list[Batch] | None = None
        feed.ends = lambda epoch: count

    def count(self, epoch: int) -> int | None:
        return len(self._batches_held())

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        held = self._batches_held()
        self._check_start(epoch, start, len(held))
        return iter(held[start:])

    def _batches_held(self) -> list[Batch]:
        if self._held is None:
            self._held = list(islice(self._feed.epoch(0), self._count))
            self._feed.close()
        return self._held

    def indices(self, epoch: int, batch: int) -> list[Any] | None:
        return self._feed.indices(0, batch)

    def close(self) -> None:
        self._feed.close()


def hold(feed: Feed, count: int) -> Feed:
    """The first ``count`` batches of the first epoch, loaded once, for every epoch.

    Raises:
        ConfigError: ``count`` is less than 1.
    """
    if count < 1:
        raise ConfigError(f"{count} batches to overfit", where=feed.name, hint="overfit_batches=1")
    return _Fixed(feed, count)
