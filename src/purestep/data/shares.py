"""Feeds of one of several processes, for loaders without indices: its rows of each batch, or its separate batches."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import torch

from .. import parallel
from ..errors import RankError
from ..parallel import loaders, processes
from ..types import Batch, Share
from .feed import Feed, fingerprint
from .iterable import SequenceFeed

_END: Any = object()
_COUNTS, _STANDS_IN = 1.0, 0.0
_ORDER = (
    "the same dataset, sampler and seed in every process, and no sampler that draws from torch's, numpy's or Python's "
    f"global generator; {loaders.WHOLE}"
)


def check_rows(name: str, order: int, row: int | None) -> None:
    """Check that all processes load the same data: a collective.

    Args:
        name: of the loader.
        order: hash of the indices of a batch, 0 if they are unknown.
        row: hash of a row of this batch; None if this process cannot load it twice alike.

    Raises:
        RankError: they differ.
    """
    processes.check_same({"the order of the data": order}, where=name, hint=_ORDER)
    rows = processes.gathered(row)
    known = [rank for rank, found in enumerate(rows) if found is not None]
    other = next((rank for rank in known if rows[rank] != rows[known[0]]), None)
    if other is not None:
        what = f"its first row in process {known[0]} has other values than in process {other}"
        raise RankError(what, where=name, hint=loaders.WHOLE)


_Divided = TypeVar("_Divided", "RowsFeed", "OwnFeed")


def _around(divided: _Divided, feed: Feed) -> _Divided:
    """The same shares of another feed of the loader."""
    found = divided if feed is divided._feed else copy.copy(divided)  # pyright: ignore[reportPrivateUsage]
    found._feed, found.name = feed, feed.name  # pyright: ignore[reportPrivateUsage]
    found.facts = {key: feed.facts.get(key, value) if key == "seed" else value for key, value in divided.facts.items()}
    return found


class RowsFeed(Feed):
    """This process's rows of the batches of a feed, which every process loads.

    Args:
        feed: of the whole batches.
        mesh: of several processes.
        checks_end: compare before each batch whether all processes have one: of a loader whose length is not known.
    """

    def __init__(self, feed: Feed, mesh: parallel.Mesh, *, checks_end: bool) -> None:
        super().__init__(name=feed.name, length=feed.length, facts=feed.facts, exact=feed.exact)
        self._feed = feed
        self.is_divided = True
        self.restarts = feed.restarts
        self._mesh = mesh
        self._checks_end = checks_end
        self._checks_rows = isinstance(feed, SequenceFeed)  # seeds of a stream may differ

    def count(self, epoch: int) -> int | None:
        found = self._feed.count(epoch)
        return found if found is None or self._first is None else min(found, self._first)

    def in_order(self) -> Feed:
        return _around(self, self._feed.in_order())

    def reused(self, *, name: str, repeats: bool, seed: int | None) -> Feed:
        return _around(self, self._feed.reused(name=name, repeats=repeats, seed=seed))

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        batches = self._feed.epoch(epoch, start)
        number = start
        try:
            while True:
                batch = next(batches, _END)
                if self._checks_end:
                    self._check_end(epoch, number, has_one=batch is not _END)
                if batch is _END:
                    return
                if self._checks_rows:
                    self._checks_rows = False
                    check_rows(self.name, 0, fingerprint(batch))
                number += 1
                yield parallel.share(batch, self._mesh)
        finally:
            batches.close()

    def _check_end(self, epoch: int, number: int, *, has_one: bool) -> None:
        flags = processes.by_process(int(has_one))
        if len(set(flags)) > 1:
            raise RankError(
                f"process {flags.index(1)} has another batch, and process {flags.index(0)} has none",
                where=f"{self.name}, epoch {epoch + 1}, batch {number + 1}",
                hint="with parallel.sharded(loader, rows=True) every process loads the same batches; if each loads "
                "its own: parallel.sharded(loader)",
            )

    def position(self, epoch: int, consumed: int) -> dict[str, Any]:
        return {**self._feed.position(epoch, consumed), "facts": self.facts}  # with a limit, which is this feed's

    def restore(self, stored: Mapping[str, Any]) -> None:
        super().restore(stored)
        self._feed.restore({**stored, "facts": self._feed.facts})

    def indices(self, epoch: int, batch: int) -> list[Any] | None:
        return self._feed.indices(epoch, batch)

    def order(self, epoch: int, batch: int) -> int:
        return self._feed.order(epoch, batch)

    def stopped_early(self, epoch: int, consumed: int) -> None:
        self._feed.stopped_early(epoch, consumed)

    def close(self) -> None:
        self._feed.close()


class OwnFeed(Feed):
    """Batches of which each process has its own; see `parallel.sharded`.

    Args:
        feed: of this process.
        mesh: of several processes.
    """

    def __init__(self, feed: Feed, mesh: parallel.Mesh) -> None:
        lengths = processes.gathered(feed.length)
        known = [length for length in lengths if length is not None]
        length = max(known) if len(known) == len(lengths) else None
        facts = {"kind": feed.facts["kind"], "sharded": "own", "processes": mesh.size}
        super().__init__(name=feed.name, length=length, facts=facts)
        self._feed = feed
        self.is_divided = True
        self.restarts = feed.restarts
        self._mesh = mesh
        self._own: dict[int, int] = {}  # epoch -> this process's number of batches, once it has ended
        self._restored: int | None = None  # batches of this process that are done
        self._last: Batch | None = None

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        restored, self._restored = self._restored, None
        own = start if restored is None or not start else restored
        batches = self._feed.epoch(epoch, own)
        try:
            while True:
                batch = next(batches, _END) if epoch not in self._own or own < self._own[epoch] else _END
                if batch is not _END:
                    own, self._last = own + 1, batch
                else:
                    self._own[epoch] = own
                share = self._agreed(batch)
                if share is None:
                    return
                yield share
        finally:
            batches.close()

    def _agreed(self, batch: Batch) -> Share | None:
        """The batch, one that stands in for it, or None at the end of all processes."""
        has_one, has_last = batch is not _END, self._last is not None
        flags = processes.by_process(1 if has_one else 0 if has_last else 2)
        if 1 not in flags:
            return None
        if 2 in flags:  # resumed behind its last batch
            sent = processes.from_process(self._last, flags.index(1))
            self._last = self._last if has_last else sent
        if has_one:
            return Share(batch, torch.tensor(_COUNTS))
        return Share(self._last, torch.tensor(_STANDS_IN))

    def in_order(self) -> Feed:
        return _around(self, self._feed.in_order())

    def reused(self, *, name: str, repeats: bool, seed: int | None) -> Feed:
        return _around(self, self._feed.reused(name=name, repeats=repeats, seed=seed))

    def position(self, epoch: int, consumed: int) -> dict[str, Any]:
        """As `Feed.position`, of all processes: every process calls it."""
        own = self._done(epoch, consumed)
        return {"facts": self.facts, "own": processes.gathered([own, self._feed.position(epoch, own)])}

    def restore(self, stored: Mapping[str, Any]) -> None:
        super().restore(stored)
        self._restored, own = stored["own"][self._mesh.rank]
        self._feed.restore(own)

    def stopped_early(self, epoch: int, consumed: int) -> None:
        self._feed.stopped_early(epoch, self._done(epoch, consumed))

    def _done(self, epoch: int, consumed: int) -> int:
        """The batches of this process among those that are consumed."""
        if self._restored is not None and consumed:  # no batch has been loaded since the restore
            return self._restored
        return min(consumed, self._own.get(epoch, consumed))

    def close(self) -> None:
        self._feed.close()
