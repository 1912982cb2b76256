"""What the loop trains from: batches by (epoch, start), a position that can be stored, errors that name the place."""

from __future__ import annotations

import copy
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping
from itertools import islice
from typing import Any, Literal, TypeAlias

from ..errors import ConfigError, DataError, Mismatch, PurestepError
from ..types import Batch
from ..validation import is_number, whole
from .equality import same

Resume: TypeAlias = Literal["skip", "state", "replay", "none"]
"""How an epoch is entered in the middle: by skipping indices, by the loader's own state, by loading batches and
dropping them, or not at all."""

_log = logging.getLogger("purestep")
_SHOWN = 16  # indices shown in a message


class Feed(ABC):
    """One loader, owned: its order depends on (seed, epoch) alone, and any epoch can be entered at any batch.

    Args:
        name: the loader's name, for messages.
        length: batches an epoch, as far as the loader says; None where it does not. A hint: it may be wrong, and only
            the end of the batches ends an epoch.
        resume: how an epoch is entered in the middle.
        facts: what must be the same when a stored position is restored: name -> number or text.
        exact: ``length`` is no hint: every epoch has so many batches.
    """

    ends: Callable[[int], int | None] = staticmethod(lambda epoch: None)
    """Batches after which an epoch is left (see `limit`); None where it is run to its end."""

    repeats: bool = False
    """Every pass over an epoch begins at the same place: what is evaluated."""

    _begun_with: Any = None  # the first batch of the first pass, where it repeats

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
        """The batches of an epoch from ``start`` on, errors as the loader raises them."""

    def count(self, epoch: int) -> int | None:
        """How many batches an epoch has, where that is known for sure before its end."""
        del epoch
        return self.length if self.exact else None

    def epoch(self, epoch: int, start: int = 0) -> Generator[Batch]:
        """The batches of one epoch.

        Args:
            epoch: 0-based.
            start: batches of that epoch that were consumed before, >= 0.

        Raises:
            DataError: the loader is empty, exhausted, raises, or cannot be entered in the middle. Epochs and batches
                are counted from 1 in messages.
            Mismatch: ``start`` lies behind the end of the epoch.
            ConfigError: a negative number.
        """
        if epoch < 0 or start < 0:
            raise ConfigError(f"epoch={epoch}, start={start}: both are at least 0", where=self.name)
        if start:
            self.require_resume()
        if self.exact:
            self._check_start(epoch, start, self.length or 0)
        return self._named(epoch, start)

    def _check_start(self, epoch: int, start: int, found: int) -> None:
        """Raise `Mismatch` for a start behind the end of an epoch that has ``found`` batches."""
        if start > found:
            raise Mismatch(
                f"{start} batches of epoch {epoch + 1} are done, but the loader has only {found} an epoch",
                where=self.name,
                hint="resume with the loader that the run was started with",
            )

    def _after(self, batches: Iterator[Any], epoch: int, start: int) -> Iterator[Any]:
        """What follows the first ``start`` of an epoch's batches, or of their indices.

        Raises:
            Mismatch: there are not so many.
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
                    self._check_begin(batch)
                number += 1
                yield batch
        finally:
            close = getattr(batches, "close", None)
            if close is not None:
                close()
        if number == 0:
            raise self._nothing(epoch)

    def _check_begin(self, batch: Batch) -> None:
        """Warn of a pass that begins with another batch than the first one did, once."""
        if self._begun_with is None:
            try:
                self._begun_with = (copy.deepcopy(batch),)
            except Exception:  # of an object that cannot be copied nothing is known
                self._begun_with = ()
        elif self._begun_with and not same(self._begun_with[0], batch):
            self._begun_with = ()
            _log.warning(
                "%s: this pass begins with another batch than the first one did, so that the values of the two are not "
                "of the same data (cure: an __iter__ that begins again, or state_dict() and load_state_dict(); a "
                "dataset that draws from torch's, numpy's or Python's global generator)",
                self.name,
            )

    def indices(self, epoch: int, batch: int) -> list[Any] | None:
        """The dataset's indices in a recent batch (both 0-based); None where they are not known."""
        del epoch, batch  # Only feeds over a dataset with indices know.
        return None

    def position(self, epoch: int, consumed: int) -> dict[str, Any]:
        """Where the run is, as JSON: what `restore` needs to go on after ``consumed`` batches of ``epoch``.

        Example:
            >>> from purestep.data import open_feed
            >>> open_feed([1, 2, 3]).position(0, 2)
            {'facts': {'kind': 'sequence', 'batches': 3}}
        """
        del epoch, consumed  # The order follows from (seed, epoch, start), which the caller keeps.
        return {"facts": self.facts}

    def restore(self, position: Mapping[str, Any]) -> None:
        """Check a stored position against this loader, and take over what is in it.

        Raises:
            Mismatch: with both values, where the loader is another one: batch size, number of items, order.
        """
        stored = dict(position.get("facts", {}))
        if "batches" not in self.facts:
            stored.pop("batches", None)  # an earlier version took a hint for a fact
        differing = [key for key in {**stored, **self.facts} if stored.get(key) != self.facts.get(key)]
        if differing:
            told = ", ".join(f"{key} was {stored.get(key)!r} and is {self.facts.get(key)!r}" for key in differing)
            raise Mismatch(
                f"the loader is not the one of the interrupted run: {told}",
                where=self.name,
                hint="resume with the same loader, or start a new run from the restored state: "
                "fit(snapshots.restore(state).state, ..., resume=None)",
            )

    def require_resume(self) -> None:
        """Raise `DataError` where an epoch cannot be entered in the middle."""
        if self.resume == "none":
            raise DataError(
                "cannot be entered in the middle of an epoch: it has neither indices nor state_dict()",
                where=self.name,
                hint="give the loader state_dict() and load_state_dict(), use a map-style dataset, or pass "
                "purestep.data.open_feed(loader, replay=True): on resuming, the consumed batches of that epoch are "
                "loaded again and dropped",
            )

    def left(self, epoch: int, consumed: int) -> None:
        """An epoch has been ended after so many batches, with more to come; the next one is asked for next."""
        return

    def close(self) -> None:
        """Stop what runs for this feed; it can be used again afterwards."""
        return

    def _failure(self, error: Exception, epoch: int, number: int) -> DataError:
        found = self.indices(epoch, number)
        items = ""
        if found is not None:
            more = f", ... ({len(found)} in all)" if len(found) > _SHOWN else ""
            items = f", items [{', '.join(str(i) for i in found[:_SHOWN])}{more}]"
        # An error in a worker comes with its whole traceback as its message, and is the cause of this one anyway.
        said = str(error).strip().splitlines()[-1:] or [""]
        notes = [f"; {note}" for note in getattr(error, "__notes__", ())]
        return DataError(
            f"{type(error).__name__}: {said[0]}{''.join(notes)}",
            where=f"{self.name}, epoch {epoch + 1}, batch {number + 1}{items}",
            hint=_cure(f"{error}{notes}"),
        )

    def _nothing(self, epoch: int) -> DataError:
        return DataError(
            f"no batch in epoch {epoch + 1}: the loader is empty",
            where=self.name,
            hint="check the dataset's length, and batch_size where drop_last=True",
        )


def _cure(message: str) -> str:
    if "DataLoader worker" in message or "ended by SIG" in message:
        return "a worker died, mostly for lack of memory or of /dev/shm: fewer workers, smaller batches, more shm"
    if "timed out" in message:
        return "an item takes longer than the timeout or a worker hangs: DataLoader(..., timeout=seconds)"
    return ""


class _Limited(Feed):
    def __init__(self, feed: Feed, amount: int | float) -> None:
        whole = feed.length
        first = amount if isinstance(amount, int) else share(amount, whole or 1)
        length = first if whole is None else min(first, whole)
        facts = {**feed.facts, "limit": first if feed.exact else amount}
        super().__init__(name=feed.name, length=length, resume=feed.resume, facts=facts, exact=feed.exact)
        self._feed = feed
        self._amount = amount
        feed.ends = self._last

    def count(self, epoch: int) -> int | None:
        whole = self._feed.count(epoch)
        return None if whole is None else min(self._last(epoch), whole)

    def _last(self, epoch: int) -> int:
        """Batches of an epoch: of a share as many as the loader has for sure, else as it says."""
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
                "%s: %g of an epoch was to be %d batches, and it ended after %d: len(loader) is wrong (cure: "
                "limit_batches=%d, a number of batches)",
                *(self.name, self._amount, last, consumed, consumed),
            )

    def indices(self, epoch: int, batch: int) -> list[Any] | None:
        return self._feed.indices(epoch, batch)

    def position(self, epoch: int, consumed: int) -> dict[str, Any]:
        return {**self._feed.position(epoch, consumed), "facts": self.facts}

    def restore(self, position: Mapping[str, Any]) -> None:
        super().restore(position)
        self._feed.restore({**position, "facts": self._feed.facts})

    def close(self) -> None:
        self._feed.close()


def limit(feed: Feed, amount: int | float) -> Feed:
    """The first batches of every epoch.

    Args:
        feed: what to shorten.
        amount: a number of batches (int, >= 1) or a share of the epoch (float in (0, 1]; at least one batch): of the
            epoch's batches where the feed can count them without loading any, else of its length at the start.

    Raises:
        ConfigError: another amount, or a share of a loader without length.

    Example:
        >>> from purestep.data import open_feed
        >>> list(limit(open_feed([1, 2, 3, 4]), 0.5).epoch(0))
        [1, 2]
    """
    if not is_number(amount) or amount <= 0 or (isinstance(amount, float) and not amount <= 1):
        raise ConfigError(f"{amount!r} batches", where=feed.name, hint="100 (batches) or 0.25 (a quarter of the epoch)")
    if isinstance(amount, float) and not feed.length:
        raise ConfigError(f"{amount} of a loader without length", where=feed.name, hint="a number of batches: 100")
    return feed if amount == 1.0 and isinstance(amount, float) else _Limited(feed, amount)


def share(amount: float, count: int) -> int:
    """A share of so many batches, rounded down, and one at least.

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
    """The first ``count`` batches of the first epoch, loaded once and the same in every epoch.

    Raises:
        ConfigError: a ``count`` below 1.
    """
    if count < 1:
        raise ConfigError(f"{count} batches to overfit", where=feed.name, hint="overfit_batches=1")
    return _Fixed(feed, count)
