"""Loaders that are iterators: those whose class restarts them in ``__iter__``, and those that cannot restart."""

from __future__ import annotations

import itertools
import json
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import purestep as ps
from purestep.data import Feed, open_feed
from purestep.errors import DataError

Batch = tuple[Tensor, Tensor]
COUNT = 5


def batch(number: int, pad: float = 0.0) -> Batch:
    return torch.tensor([[number + 1.0 + pad], [1.0]]), torch.zeros(2, 1)


class Resets:
    """As a reader with a cursor."""

    def __init__(self) -> None:
        self.at = 0

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Resets:
        self.at = 0
        return self

    def __next__(self) -> Batch:
        if self.at == COUNT:
            raise StopIteration
        self.at += 1
        return batch(self.at)


class ResetsItself(Resets):
    """As DALI's with ``auto_reset``: at its end, and not in the middle."""

    def __iter__(self) -> ResetsItself:
        return self

    def __next__(self) -> Batch:
        if self.at == COUNT:
            self.at = 0
            raise StopIteration
        self.at += 1
        return batch(self.at)


class ResetsInside(Resets):
    """The cursor lies in a dict."""

    def __init__(self) -> None:
        self.state = {"at": 0}

    def __iter__(self) -> ResetsInside:
        self.state["at"] = 0
        return self

    def __next__(self) -> Batch:
        if self.state["at"] == COUNT:
            raise StopIteration
        self.state["at"] += 1
        return batch(self.state["at"])


class Prefetcher:
    """A thread fills a queue; ``iter`` starts a fresh one."""

    def __init__(self) -> None:
        self.queue: queue.Queue[Batch | None] | None = None

    def __iter__(self) -> Prefetcher:
        self.queue = queue.Queue(COUNT + 1)
        threading.Thread(target=self._fill, args=(self.queue,), daemon=True).start()
        return self

    def _fill(self, out: queue.Queue[Batch | None]) -> None:
        for number in range(COUNT):
            out.put(batch(number))
        out.put(None)

    def __next__(self) -> Batch:
        assert self.queue is not None, "iter was not called"
        found = self.queue.get()
        if found is None:
            raise StopIteration
        return found


class Draws(Resets):
    """Draws its batches from torch's generator, and its start too."""

    def __iter__(self) -> Draws:
        self.at, self.offset = 0, float(torch.rand(()))
        return self

    def __next__(self) -> Batch:
        x, y = super().__next__()
        return x + self.offset + torch.rand(()), y


KINDS: dict[str, Any] = {found.__name__: found for found in (Resets, ResetsItself, ResetsInside, Prefetcher, Draws)}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def linear() -> ps.Program:
    torch.manual_seed(0)
    return ps.program(torch.nn.Linear(1, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.01))


def fit(loaders: Any, **fields: Any) -> ps.FitResult:
    program = linear()
    return ps.fit(program.init(), loaders, program, progress=False, **fields)


def weights(result: ps.FitResult) -> list[float]:
    return torch.cat([leaf.reshape(-1) for leaf in result.state.params.values()]).tolist()


@kinds
def test_every_epoch_begins_at_the_start(kind: Any) -> None:
    found = fit(kind(), epochs=3)
    assert found.history["step"] == [COUNT, 2 * COUNT, 3 * COUNT]
    if kind is not Draws:
        assert weights(found) == weights(fit([batch(number) for number in range(COUNT)], epochs=3)) or kind in RESHIFTED


RESHIFTED = (Resets, ResetsItself, ResetsInside)  # their numbers begin at 1


@kinds
def test_every_evaluation_begins_at_the_start(kind: Any) -> None:
    found = fit({"train": [batch(0)], "val": kind()}, epochs=3)
    whole = linear()
    scores = [ps.evaluate(state, kind(), whole.eval_step)["loss"] for state in states(3)]
    if kind is not Draws:
        assert found.history["val_loss"] == pytest.approx(scores)


def states(epochs: int) -> Iterator[Any]:
    program = linear()
    state = program.init()
    for _ in range(epochs):
        state, _ = program.train_step(state, batch(0))
        yield state


@kinds
def test_overfitting_holds_the_first_batches(kind: Any) -> None:
    found = fit({"train": kind(), "val": kind()}, epochs=2, overfit_batches=2)
    assert found.history["step"] == [2, 4]


@pytest.mark.parametrize("kind", [Resets, Prefetcher])
def test_a_run_that_goes_on_is_the_whole_one(kind: Any, tmp_path: Path) -> None:
    whole = weights(fit(kind(), epochs=2))
    fit(kind(), epochs=2, steps=COUNT + 2, snapshots=tmp_path)
    found = fit(kind(), epochs=2, steps=-1, snapshots=tmp_path)
    assert weights(found) == whole
    assert found.epochs == 2


def opened(kind: Any, cut: int | None) -> Feed:
    return open_feed(kind(), seed=5, first=cut)


def numbers(batches: Iterator[Batch]) -> list[float]:
    return [float(x[0]) for x, _ in batches]


def interrupted(kind: Any, cut: int | None, epoch: int, start: int) -> dict[str, Any]:
    """The position of a run that was left there."""
    feed = opened(kind, cut)
    for before in range(epoch):
        list(feed.epoch(before))
    if start:
        batches = feed.epoch(epoch)
        for _ in range(start):
            next(batches)
    return json.loads(json.dumps(feed.position(epoch, start)))


PLACES = [(0, 0), (0, 2), (1, 0), (1, 1), (2, 0), (2, 2)]


@kinds
@pytest.mark.parametrize("cut", [None, 3], ids=["whole epochs", "cut epochs"])
@pytest.mark.parametrize(("epoch", "start"), PLACES)
def test_from_any_place_the_same_batches_come(
    kind: Any, cut: int | None, epoch: int, start: int, caplog: pytest.LogCaptureFixture
) -> None:
    whole = opened(kind, cut)
    expected = [numbers(whole.epoch(number)) for number in range(epoch + 2)]
    if kind is ResetsItself and cut is not None:  # its epochs go on where the one before was cut
        assert "train: an epoch changes at, which a snapshot does not store" in caplog.text
        return
    feed = opened(kind, cut)
    feed.restore(interrupted(kind, cut, epoch, start))
    assert numbers(feed.epoch(epoch, start)) == expected[epoch][start:]
    assert numbers(feed.epoch(epoch + 1)) == expected[epoch + 1]
    # What `__iter__` draws and stores cannot be told from what an epoch leaves behind.
    assert ("an epoch changes offset" in caplog.text) == (kind is Draws)
    assert ("an epoch changes" in caplog.text) == (kind is Draws)


@pytest.mark.parametrize(
    "one_shot",
    [
        lambda: iter([batch(0), batch(1)]),
        lambda: (batch(number) for number in range(2)),
        lambda: map(batch, range(2)),
        lambda: iter(torch.utils.data.DataLoader([torch.ones(1), torch.ones(1)], batch_size=None)),
    ],
    ids=["list", "generator", "map", "DataLoader"],
)
def test_what_is_gone_stays_gone(one_shot: Any) -> None:
    feed = open_feed(one_shot())
    assert len(list(feed.epoch(0))) == 2
    with pytest.raises(DataError, match=r"no batch is left for epoch 2: the iterator can run only one epoch"):
        list(feed.epoch(1))
    assert len(list(open_feed(one_shot()).epoch(0, start=1))) == 1


def test_a_class_that_begins_nowhere_is_one_shot_too() -> None:
    class Once(Resets):
        def __iter__(self) -> Once:
            return self

    feed = open_feed(Once())
    assert len(list(feed.epoch(0))) == COUNT
    with pytest.raises(DataError, match="no batch is left for epoch 2"):
        list(feed.epoch(1))


def test_an_endless_one_goes_on_over_its_epochs() -> None:
    def endless() -> Iterator[Batch]:
        return map(batch, itertools.count())

    feed = open_feed(endless(), first=2)
    assert [numbers(feed.epoch(epoch)) for epoch in range(3)] == [[1, 2], [3, 4], [5, 6]]
    resumed, again = open_feed(endless(), first=2), open_feed(endless(), first=2)
    resumed.restore(feed.position(2, 1))
    again.restore(resumed.position(2, 1))  # saved again before the first batch
    assert numbers(resumed.epoch(2, 1)) == numbers(again.epoch(2, 1)) == [6]
    assert numbers(resumed.epoch(3)) == [7, 8]


def test_the_order_is_drawn_from_seed_and_epoch() -> None:
    def drawn(epoch: int) -> list[float]:
        feed = open_feed(Draws(), seed=3)
        for before in range(epoch):
            list(feed.epoch(before))
        return [float(x[0]) for x, _ in feed.epoch(epoch)]

    assert drawn(0) == drawn(0)
    assert drawn(1) == drawn(1) != drawn(0)
