"""What the loop trains from: batches by (epoch, start), a position that can be stored, errors that name the place."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, Literal, TypeAlias

from ..arguments import is_number, whole
from ..errors import ConfigError, DataError, Mismatch, PurestepError
from ..types import Batch

Resume: TypeAlias = Literal["skip", "state", "replay", "none"]
"""How an epoch is entered in the middle: by skipping indices, by the loader's own state, by loading batches and
dropping them, or not at all."""

_SHOWN = 16  # indices shown in a message


class Feed(ABC):
    """One loader, owned: its order depends on (seed, epoch) alone, and any epoch can be entered at any batch.

    Args:
        name: the loader's name, for messages.
        length: batches an epoch; None where the loader cannot say.
        resume: how an epoch is entered in the middle.
        facts: what must be the same when a stored position is restored: name -> number or text.
    """

    def __init__(self, *, name: str, length: int | None, resume: Resume, facts: Mapping[str, Any]) -> None:
        self.name = name
        self.length = length
        self.resume: Resume = resume
        self.facts = dict(facts)

    @abstractmethod
    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """The batches of an epoch from ``start`` on, errors as the loader raises them."""

    def epoch(self, epoch: int, start: int = 0) -> Iterator[Batch]:
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
        if self.length is not None and start > self.length:
            raise Mismatch(
                f"{start} batches of epoch {epoch + 1} are done, but the loader has only {self.length} an epoch",
                where=self.name,
                hint="resume with the loader that the run was started with",
            )
        return self._named(epoch, start)

    def _named(self, epoch: int, start: int) -> Iterator[Batch]:
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
                number += 1
                yield batch
        finally:
            close = getattr(batches, "close", None)
            if close is not None:
                close()
        if number == 0:
            raise self._nothing(epoch)

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
    def __init__(self, feed: Feed, count: int) -> None:
        length = count if feed.length is None else min(count, feed.length)
        super().__init__(name=feed.name, length=length, resume=feed.resume, facts={**feed.facts, "limit": count})
        self._feed = feed

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        assert self.length is not None
        if self.length == self._feed.length:
            yield from self._feed.epoch(epoch, start)  # to its end, where a loader may do something
            return
        consumed = start
        if start < self.length:
            for batch in islice(self._feed.epoch(epoch, start), self.length - start):
                consumed += 1
                yield batch
        if consumed == self.length:
            self._feed.left(epoch, consumed)

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
        amount: a number of batches (int, >= 1) or a share of the epoch (float in (0, 1]; at least one batch).

    Raises:
        ConfigError: another amount, or a share of a loader without length.

    Example:
        >>> from purestep.data import open_feed
        >>> list(limit(open_feed([1, 2, 3, 4]), 0.5).epoch(0))
        [1, 2]
    """
    if not is_number(amount) or amount <= 0 or (isinstance(amount, float) and not amount <= 1):
        raise ConfigError(f"{amount!r} batches", where=feed.name, hint="100 (batches) or 0.25 (a quarter of the epoch)")
    if isinstance(amount, int):
        return _Limited(feed, amount)
    if feed.length is None:
        raise ConfigError(f"{amount} of a loader without length", where=feed.name, hint="a number of batches: 100")
    return _Limited(feed, max(1, whole(amount * feed.length)))


class _Fixed(Feed):
    def __init__(self, feed: Feed, count: int) -> None:
        length = count if feed.length is None else min(count, feed.length)
        super().__init__(name=feed.name, length=length, resume="skip", facts={**feed.facts, "overfit": count})
        self._feed = feed
        self._held: list[Batch] | None = None

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        if self._held is None:
            self._held = list(islice(self._feed.epoch(0), self.length))
            self._feed.close()
        return iter(self._held[start:])

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
