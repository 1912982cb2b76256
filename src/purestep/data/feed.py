"""`Feed`: the batches of a loader from any (epoch, start), what a snapshot stores, and errors that name the batch."""

from __future__ import annotations

import copy
import logging
import zlib
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping
from itertools import islice
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from .. import tree as trees
from ..errors import ConfigError, DataError, Mismatch, PurestepError
from ..state import check_count, is_number, whole
from ..torch_ext import tensor_layout
from ..types import Batch

_log = logging.getLogger("purestep")
_SHOWN = 16  # indices shown in a message

T = TypeVar("T")


class Feed(ABC):
    """The batches of one loader. Their order depends only on (seed, epoch), and an epoch can start at any batch.

    Args:
        name: the name of the loader, for messages.
        length: ``len(loader)``, or None. It may be wrong; an epoch ends when the batches end.
        facts: name -> number or text; what is restored must have the same facts.
        exact: True if every epoch has exactly ``length`` batches.
    """

    repeats: bool = False
    """True if every pass over an epoch starts at the same place, for evaluation."""

    is_divided: bool = False
    """True if the batches are the shares of one of several processes."""

    restarts: bool = True
    """False if the batches can be loaded once only."""

    has_seed: bool = True
    """False if the feed was opened without a seed: it has that of the run that uses it."""

    _seed: int = 0
    _first: int | None = None  # an epoch stops after this number of batches
    _share: float | None = None  # of the length, if `_first` is that
    _first_pass: int | None = None  # hash of the first batch of the first pass, if `repeats`
    _begun: tuple[int, int] | None = None  # the epoch that began last, and the hash of its first batch
    _expected: tuple[int, int] | None = None  # the same of an interrupted run
    _has_warned: bool = False

    def __init__(self, *, name: str, length: int | None, facts: Mapping[str, Any], exact: bool = False) -> None:
        self.name = name
        self.length = length
        self.exact = exact and length is not None
        self.facts = dict(facts)

    @abstractmethod
    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """The batches of an epoch from ``start`` on, with the loader's own errors."""

    def cut(self, first: int | float) -> Feed:
        """A feed of the same loader with the first batches of each epoch alone; see `open_feed`.

        Raises:
            ConfigError: ``first`` is no number of batches, or it is a share and the loader has no length.
        """
        if not is_number(first) or first <= 0 or (isinstance(first, float) and not first <= 1):
            hint = "pass 100 (batches) or 0.25 (a quarter of the epoch)"
            raise ConfigError(f"{first!r} batches", where=self.name, hint=hint)
        if isinstance(first, float) and not self.length:
            raise ConfigError(
                f"{first}, a share of the batches, needs len(loader), and the loader has none",
                where=self.name,
                hint=f'pass a number of batches: limit_batches={{"{self.name}": 100}}, or overfit_batches=100',
            )
        if first == 1.0 and isinstance(first, float):
            return self
        found = copy.copy(self)
        found._share = first if isinstance(first, float) else None
        count = max(1, whole(first * (self.length or 1))) if isinstance(first, float) else first
        found._first = count if found._first is None else min(count, found._first)
        found.length = found._first if found.length is None else min(found._first, found.length)
        found.facts = {**found.facts, "limit": first if found._share and not found.exact else count}
        return found

    def reused(self, *, name: str, repeats: bool, seed: int | None) -> Feed:
        """This feed as the loader of a run: a copy, if ``repeats`` or the seed differs.

        Args:
            name: of the loader in the run.
            repeats: as the attribute.
            seed: of the run, for a feed that was opened without one; None: 0.
        """
        seed = self._seed if self.has_seed else seed or 0
        found = self if (repeats, seed) == (self.repeats, self._seed) else self._copied()
        found.name, found.repeats, found._seed = name, repeats, seed
        if "seed" in found.facts:
            found.facts = {**found.facts, "seed": seed}
        return found

    def _copied(self) -> Feed:
        """A copy whose epochs run apart from those of this feed."""
        return copy.copy(self)

    def count(self, epoch: int) -> int | None:
        """The number of batches of an epoch, or None if it is uncertain."""
        del epoch
        return self.length if self.exact else None

    def in_order(self) -> Feed:
        """The same batches in the dataset's order, if a DataLoader shuffles them; else the feed itself.

        Example:
            >>> import torch
            >>> from torch.utils.data import DataLoader
            >>> from purestep.data import open_feed
            >>> feed = open_feed(DataLoader(torch.arange(6), batch_size=3, shuffle=True)).in_order()
            >>> [batch.tolist() for batch in feed.epoch(0)]
            [[0, 1, 2], [3, 4, 5]]

        A sampler of the user, or one that draws with replacement or a part, decides which items there are, so it stays.
        """
        return self

    def epoch(self, epoch: int, start: int = 0) -> Generator[Batch]:
        """The batches of one epoch.

        Args:
            epoch: 0-based.
            start: the number of batches of this epoch to skip, >= 0.

        Raises:
            DataError: the loader is empty, exhausted or raises. Messages count epochs and batches from 1.
            Mismatch: ``start`` is after the end of the epoch.
            ConfigError: a number is negative.
        """
        check_count(self.name, least=0, epoch=epoch, start=start)
        most = self.count(epoch) if self.exact else self._first
        if most is not None:
            self._check_start(epoch, start, most)
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
        number, first = start, self._first
        batches = self._batches(epoch, start)
        try:
            while first is None or number < first:
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                except PurestepError:
                    raise
                except Exception as error:
                    raise self._failure(error, epoch, number) from error
                if number == 0 and self.repeats:
                    self._check_pass(batch)
                number += 1
                yield batch
        finally:
            close = getattr(batches, "close", None)
            if close is not None:
                close()
        if number == first:
            self.stopped_early(epoch, number)
        elif number == 0:
            raise self._nothing(epoch)
        elif self._share is not None:
            _log.warning(
                "%s: %g of an epoch was %d batches, but the epoch ended after %d: len(loader) is wrong (cure: pass "
                "limit_batches=%d, a number of batches)",
                *(self.name, self._share, first, number, number),
            )

    def _check_pass(self, batch: Batch) -> None:
        """Warn once if a pass starts with another batch than the first pass."""
        found = fingerprint(batch)
        if self._first_pass is None:
            self._first_pass = found
        elif self._first_pass != found and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "%s: this pass starts with another batch than the first pass, so its metrics are not of the same data "
                "(cure: restart in __iter__, or define state_dict() and load_state_dict(); draw from torch's, numpy's "
                "or Python's global generator)",
                self.name,
            )

    def _compared(self, batches: Iterator[T], epoch: int) -> Iterator[T]:
        """Batches, or index batches, of a whole epoch. Warn if the first one is not that of the interrupted run."""
        for number, batch in enumerate(batches):
            if not number and not self.repeats:
                self._check_begun(epoch, fingerprint(batch))
            yield batch

    def _check_begun(self, epoch: int, found: int) -> None:
        expected, self._expected, self._begun = self._expected, None, (epoch, found)
        if expected is not None and expected[0] == epoch and expected[1] != found:
            _log.warning(
                "%s: epoch %d begins with another batch than in the interrupted run, so the resumed run is not the "
                "same bit for bit: the order is not a function of seed and epoch (cure: define state_dict() and "
                "load_state_dict(); or draw from torch's, numpy's or Python's global generator in set_epoch and "
                "__iter__)",
                *(self.name, epoch + 1),
            )

    def indices(self, epoch: int, batch: int) -> list[Any] | None:
        """The dataset's indices of a recent batch (both 0-based), or None if they are unknown."""
        del epoch, batch  # Only `IndexedFeed` has indices.
        return None

    def order(self, epoch: int, batch: int) -> int:
        """A hash that is equal in processes with one order of the data: of the rows of a recent batch (both 0-based) of
        all processes, else of the first batch of the epoch. 0 if it is unknown."""
        del batch
        return self._begun[1] if self._begun is not None and self._begun[0] == epoch else 0

    def position(self, epoch: int, consumed: int) -> dict[str, Any]:
        """The facts that a snapshot stores after ``consumed`` batches of ``epoch``, as JSON, for `restore`.

        Example:
            >>> from purestep.data import open_feed
            >>> open_feed([1, 2, 3]).position(0, 2)
            {'facts': {'kind': 'sequence', 'batches': 3}}
        """
        del consumed  # The order follows from (seed, epoch, start), which the caller stores.
        begun = self._expected or self._begun
        begun = None if begun is None or begun[0] != epoch else begun
        return {"facts": self.facts} if begun is None else {"facts": self.facts, "begun": list(begun)}

    def restore(self, stored: Mapping[str, Any]) -> None:
        """Check what `position` returned against this loader and restore it.

        Raises:
            Mismatch: batch size, number of items or order differ; the message has both values.
        """
        facts = dict(stored.get("facts", {}))
        if "batches" not in self.facts:
            facts.pop("batches", None)  # an earlier version stored this hint as a fact
        begun = stored.get("begun")
        self._expected = None if begun is None else (int(begun[0]), int(begun[1]))
        differing = [key for key in {**facts, **self.facts} if facts.get(key) != self.facts.get(key)]
        if differing:
            changes = ", ".join(f"{key} was {facts.get(key)!r} and is {self.facts.get(key)!r}" for key in differing)
            hint = "resume with the same loader, or start a new run from the restored state: fit(snapshots.restore("
            hint += "state).state, ..., resume=None)"
            if differing == ["seed"]:
                hint = f"program.init(seed={facts.get('seed')}); for a separate run, another directory or resume=None"
            raise Mismatch(f"the loader is not the one of the interrupted run: {changes}", where=self.name, hint=hint)

    def stopped_early(self, epoch: int, consumed: int) -> None:
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


def announce(epoch: int, *parts: Any) -> None:
    """Call ``set_epoch`` on each part that has it; once if a part is given twice."""
    for part in {id(part): part for part in parts}.values():
        if callable(getattr(part, "set_epoch", None)):
            part.set_epoch(epoch)


def _cure(message: str) -> str:
    # torch's text where a worker dies; an exception in a worker is "Caught ... in DataLoader worker process".
    if "DataLoader worker (pid" in message or "ended by SIG" in message:
        return "a worker died, usually for lack of memory or /dev/shm: use fewer workers, smaller batches or more shm"
    if "timed out" in message:
        return "an item took longer than the timeout, or a worker hangs: pass DataLoader(..., timeout=seconds)"
    return ""


def fingerprint(batch: Any) -> int:
    """A hash of the tensors, arrays, numbers and texts of a batch, or of indices. Objects of other types do not count;
    a batch that contains itself, which `fit` refuses, is 0.

    Example:
        >>> import torch
        >>> fingerprint([torch.tensor([1]), "a"]) == fingerprint([torch.tensor([1]), "b"])
        False
    """
    found = 0
    try:
        leaves = trees.leaves(trees.dicts(batch, where=None))
    except RecursionError:
        return found
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            if not tensor_layout.is_dense(leaf) or leaf.device.type == "meta":
                continue
            raw = tensor_layout.as_bytes(leaf).cpu().numpy().tobytes()
        elif isinstance(leaf, np.ndarray):
            raw = leaf.tobytes() if leaf.dtype.kind in "biufc" else b""
        else:
            raw = repr(leaf).encode() if isinstance(leaf, bool | int | float | str | bytes) else b""
        found = zlib.crc32(raw, found)
    return found
