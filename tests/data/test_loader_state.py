"""State outside of the training state: what samplers, iterables, datasets and collate objects keep to themselves."""

from __future__ import annotations

import itertools
import json
import random
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_trees_close
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset, default_collate

import purestep as ps
from purestep import events
from purestep.data import Feed, limit, open_feed
from purestep.data.attribute_state import Attributes, write
from purestep.errors import DataError

DATA = TensorDataset(torch.arange(12.0)[:, None])


def order(feed: Feed, epoch: int = 0, start: int = 0) -> list[Any]:
    return [
        torch.as_tensor(batch[0] if isinstance(batch, list) else batch).flatten().tolist()
        for batch in feed.epoch(epoch, start)
    ]


# --- samplers ---------------------------------------------------------------------------------------------------------


class InPlace:
    def __init__(self) -> None:
        self.order = list(range(12))

    def __len__(self) -> int:
        return 12

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.order)
        return iter(list(self.order))


class Numbers(InPlace):
    """The same of an array."""

    def __init__(self) -> None:
        self.order = np.arange(12)  # pyright: ignore[reportAttributeAccessIssue]

    def __iter__(self) -> Iterator[int]:
        np.random.shuffle(self.order)
        return iter(self.order.tolist())  # pyright: ignore[reportAttributeAccessIssue]


class CountsFirst(InPlace):
    epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(random.Random(self.epoch).sample(range(12), 12))


class CountsLast(CountsFirst):
    """Counts an epoch where it has been run to its end, and is harder from the third on."""

    def __iter__(self) -> Iterator[int]:
        yield from (range(12) if self.epoch < 2 else range(6, 12))
        self.epoch += 1


class Buckets(InPlace):
    """Batches, shuffled in place, and in each of them its items."""

    def __init__(self) -> None:
        self.order = [list(range(i, i + 3)) for i in range(0, 12, 3)]  # pyright: ignore[reportAttributeAccessIssue]

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Any]:
        random.shuffle(self.order)
        for bucket in self.order:
            random.shuffle(bucket)  # pyright: ignore[reportArgumentType]
            yield bucket


class Inner(InPlace):
    """What it counts is in an object of its own."""

    def __init__(self) -> None:
        self.state = Count()

    def __iter__(self) -> Iterator[int]:
        self.state.count += 5
        return ((i + self.state.count) % 12 for i in range(12))


class Count:
    count = 0


class Pointer(InPlace):
    """Without end: goes on where it was left."""

    at = -1

    def __iter__(self) -> Iterator[int]:
        while True:
            self.at += 1
            yield self.at % 12


SAMPLERS: dict[str, Callable[[], Any]] = {
    "in place": lambda: DataLoader(DATA, 2, sampler=InPlace()),
    "an array in place": lambda: DataLoader(DATA, 2, sampler=Numbers()),
    "counts first": lambda: DataLoader(DATA, 2, sampler=CountsFirst()),
    "counts last": lambda: DataLoader(DATA, 2, sampler=CountsLast()),
    "buckets": lambda: DataLoader(DATA, batch_sampler=Buckets()),
    "within a batch sampler": lambda: DataLoader(DATA, batch_sampler=BatchSampler(InPlace(), 2, False)),
    "within an object": lambda: DataLoader(DATA, 2, sampler=Inner()),
    "closure": lambda: DataLoader(DATA, 2, sampler=hidden()),
}


def hidden() -> Any:
    items = list(range(12))

    class Hidden(InPlace):
        def __init__(self) -> None:
            pass

        def __iter__(self) -> Iterator[int]:
            random.shuffle(items)
            return iter(list(items))

    return Hidden()


@pytest.mark.parametrize("count", [None, 2])
@pytest.mark.parametrize("name", SAMPLERS)
def test_an_order_hangs_on_seed_and_epoch_alone(name: str, count: int | None) -> None:
    def opened() -> Feed:
        feed = open_feed(SAMPLERS[name](), seed=3)
        return feed if count is None else limit(feed, count)

    feed = opened()
    whole = [order(feed, epoch) for epoch in range(4)]
    if count is None and name != "counts last":
        assert all(sorted(itertools.chain(*epoch)) == list(range(12)) for epoch in whole)
    assert len({str(epoch) for epoch in whole}) > 1 or (name == "counts last")
    for epoch, start in ((0, 1), (1, 0), (2, 1), (3, 2)):
        assert order(opened(), epoch, start) == whole[epoch][start:]
    if name != "closure":  # which cannot be put back
        assert order(feed, 1) == whole[1]
        feed.close()
        assert order(open_feed(feed), 2) == whole[2]


def test_a_loader_may_be_used_by_one_run_after_the_other() -> None:
    loader = SAMPLERS["in place"]()
    runs: list[Any] = []
    for _ in range(2):
        feed = open_feed(loader, seed=1)
        runs.append([order(feed, epoch) for epoch in range(2)])
        feed.close()
    assert runs[0] == runs[1]


def test_a_sampler_that_was_left_goes_on_behind_what_was_used() -> None:
    feed = limit(open_feed(DataLoader(DATA, 2, sampler=Pointer())), 2)
    whole = [order(feed, epoch) for epoch in range(3)]
    assert whole == [[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[8, 9], [10, 11]]]  # however many were drawn at once
    assert order(limit(open_feed(DataLoader(DATA, 2, sampler=Pointer())), 2), 2, 1) == whole[2][1:]


def test_a_sampler_without_a_state_is_not_drawn_for_epochs_that_are_done() -> None:
    drawn: list[int] = []

    class Plain(InPlace):
        def __iter__(self) -> Iterator[int]:
            drawn.append(1)
            return iter(random.sample(range(12), 12))

    feed = open_feed(DataLoader(DATA, 2, sampler=Plain()))
    drawn.clear()
    order(feed, 50)
    assert len(drawn) == 2  # that of the first epoch, which changed nothing, and this one's


def test_an_order_that_cannot_be_repeated_is_told_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    open_feed(SAMPLERS["in place"](), name="mine")
    open_feed(SAMPLERS["counts first"](), name="mine")
    assert not caplog.records
    open_feed(SAMPLERS["closure"](), name="mine")
    assert "mine: the Hidden returns two orders for one seed" in caplog.text or "two orders for one seed" in caplog.text


def test_what_a_callback_writes_into_a_sampler_counts() -> None:
    sampler = InPlace()
    feed = open_feed(DataLoader(DATA, 2, sampler=sampler))
    order(feed, 0)
    sampler.order = [7, 7]
    assert order(feed, 1) == [[7, 7]]


# --- iterables --------------------------------------------------------------------------------------------------------


class Shuffles:
    def __init__(self) -> None:
        self.batches = [torch.tensor([float(i)]) for i in range(6)]

    def __iter__(self) -> Iterator[Tensor]:
        random.shuffle(self.batches)
        yield from list(self.batches)


class Epochs:
    epoch = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.epoch += 1
        return (torch.tensor([float(10 * self.epoch + i)]) for i in range(4))


class Leftover:
    """Gives three of four, and the rest first in the next epoch."""

    def __init__(self) -> None:
        self.rest: list[int] = []
        self.next = 0

    def __iter__(self) -> Iterator[Tensor]:
        self.rest += range(self.next, self.next + 4)
        self.next += 4
        for _ in range(3):
            yield torch.tensor([float(self.rest.pop(0))])


class Files:
    """Names in an array, and what it iterates counts too."""

    def __init__(self) -> None:
        self.names = np.arange(4)
        self.inner = Epochs()

    def __iter__(self) -> Iterator[Tensor]:
        np.random.shuffle(self.names)
        return (batch + 100 * name for batch, name in zip(self.inner, self.names.tolist(), strict=True))


class Told(Epochs):
    def set_epoch(self, epoch: int) -> None:
        self.told = epoch

    def __iter__(self) -> Iterator[Tensor]:
        return (batch + 100 * self.told for batch in super().__iter__())


class Streamed(Epochs, IterableDataset[Any]):
    pass


ITERABLES: dict[str, Callable[[], Any]] = {
    "shuffles": Shuffles,
    "counts": Epochs,
    "leftover": Leftover,
    "nested": Files,
    "told": Told,
    "dataset": lambda: DataLoader(Streamed(), 2),
    "torchdata": lambda: stateful(Streamed()),
    "dataset in workers": lambda: DataLoader(Streamed(), 2, num_workers=1),
}


@pytest.mark.filterwarnings("ignore:'set_vital':UserWarning")  # torchdata's own
@pytest.mark.parametrize("name", ITERABLES)
def test_an_iterable_goes_on_with_what_it_kept(name: str) -> None:
    def opened() -> Feed:
        return open_feed(ITERABLES[name](), seed=3, replay=True)

    feed, places = opened(), dict[tuple[int, int], str]()
    whole: list[Any] = []
    for epoch in range(3):
        places[epoch, 0] = json.dumps(feed.position(epoch, 0))
        whole.append([])
        for batch in feed.epoch(epoch):
            whole[-1].append(batch.flatten().tolist())
            places[epoch, len(whole[-1])] = json.dumps(feed.position(epoch, len(whole[-1])))
    assert (len({str(epoch) for epoch in whole}) > 1) == (name != "dataset in workers")
    for (epoch, start), stored in places.items():
        if start < len(whole[epoch]):
            again, twice = opened(), opened()
            again.restore(json.loads(stored))
            twice.restore(json.loads(json.dumps(again.position(epoch, start))))
            assert order(twice, epoch, start) == order(again, epoch, start) == whole[epoch][start:]
            if epoch < 2:
                assert order(again, epoch + 1) == whole[epoch + 1]


def test_an_iterator_that_outlasts_an_epoch_is_told(caplog: pytest.LogCaptureFixture) -> None:
    class Keeps:
        def __iter__(self) -> Iterator[Tensor]:
            if not hasattr(self, "source"):
                self.source = (torch.tensor([i]) for i in itertools.count())
            return itertools.islice(self.source, 3)

    feed = open_feed(Keeps(), name="mine")
    order(feed, 0)
    assert not caplog.records
    order(feed, 1)
    order(feed, 2)
    assert [record.message[:44] for record in caplog.records] == ["mine: the iterator source outlives an epoch,"]


def test_a_generator_in_the_closure_of_an_iterable_is_seeded() -> None:
    def opened() -> Feed:
        rng = np.random.default_rng()

        class Draws:
            def __iter__(self) -> Iterator[Tensor]:
                return (torch.tensor([rng.random()]) for _ in range(3))

        return open_feed(Draws(), seed=3)

    feed = opened()
    whole = [order(feed, epoch) for epoch in range(2)]
    assert whole[0] != whole[1]
    assert order(opened(), 1, 1) == whole[1][1:]


def test_an_iterator_in_the_closure_of_an_iterable_is_told_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    numbers = itertools.count()

    class Counts:
        def __iter__(self) -> Iterator[Tensor]:
            return (torch.tensor([next(numbers)]) for _ in range(3))

    class Reads:
        def __iter__(self) -> Iterator[Tensor]:
            for number in itertools.islice(numbers, 2):
                yield torch.tensor([number])

    for kind in (Counts, Reads):
        caplog.clear()
        feed = open_feed(kind(), name="mine")
        next(feed.epoch(0))
        order(feed, 1)
        assert [record.message[:46] for record in caplog.records] == ["mine: the iterator numbers outlives an epoch, "]


def _shuffled_in_a_closure() -> Any:
    numbers = [1, 2, 3]

    class Shuffled:
        def __iter__(self) -> Iterator[Tensor]:
            random.shuffle(numbers)
            return iter([torch.tensor([number]) for number in numbers])

    return Shuffled()


def _counted_in_a_closure() -> Any:
    passes = 0

    class Counted:
        def __iter__(self) -> Iterator[Tensor]:
            nonlocal passes
            passes += 1
            yield torch.tensor([passes])

    return Counted()


def _seen_in_a_closure_of_a_dataset() -> Any:
    seen: dict[str, int] = {}

    class Seen(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            seen["passes"] = seen.get("passes", 0) + 1
            yield torch.tensor(seen["passes"])

    return DataLoader(Seen(), 1)


def _collated_with_a_closure() -> Any:
    rows = torch.zeros(3)

    def collate(items: list[Tensor]) -> Tensor:
        rows[0] += 1
        return torch.stack(items) + rows

    return DataLoader(Stream(), 2, collate_fn=collate)


def _constant_in_a_closure() -> Any:
    numbers, scale = [1, 2, 3], 2

    class Constant:
        def __iter__(self) -> Iterator[Tensor]:
            return iter([torch.tensor([number * scale]) for number in numbers])

    return Constant()


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.ones(4, 3))


CHANGED = {
    "numbers": _shuffled_in_a_closure,
    "passes": _counted_in_a_closure,
    "seen": _seen_in_a_closure_of_a_dataset,
    "rows": _collated_with_a_closure,
    "": _constant_in_a_closure,
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_an_epoch_changes_in_a_closure_is_told_before_the_next(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    feed = open_feed(CHANGED[name](), name="mine", replay=True)
    order(feed, 0)
    assert not caplog.records
    order(feed, 1)
    order(feed, 2)
    told = [record.message for record in caplog.records]
    assert len(told) == bool(name)
    assert not name or re.match(rf"mine: an epoch changes (\[\d\]/)?{name} in a closure, .*\(cure: keep", told[0])


class EpochInWorkers(IterableDataset[Tensor]):
    epoch = -1
    begun = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        self.begun += 1
        return iter([torch.tensor([float(self.epoch), float(self.begun)])])


class Mapped(Dataset[Tensor]):
    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(self.epoch), float(index)])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("dataset", "expected"), [(EpochInWorkers, [0.0, 1.0, 2.0, 1.0]), (Mapped, [0.0, 0.0, 2.0, 0.0])]
)
def test_datasets_are_told_the_epoch_also_in_workers_that_live_on(workers: int, dataset: Any, expected: Any) -> None:
    persistent = {"num_workers": 1, "persistent_workers": True} if workers else {}
    feed = open_feed(DataLoader(dataset(), batch_size=None, **persistent))
    found = [batch for epoch in (0, 2) for batch in order(feed, epoch)[0]]
    if dataset is EpochInWorkers and not workers:
        expected = [0.0, 1.0, 2.0, 2.0]  # in one process it keeps what it counts, as part of the position
    assert found == expected
    feed.close()


# --- evaluation -------------------------------------------------------------------------------------------------------


class At(IterableDataset[Any]):
    """Goes on where it was, with a state or without."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            self.at += 1
            yield torch.tensor([float(self.at)])


class AtWithState(At):
    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Plus(Dataset[Tensor]):
    """Items that hang on how many were loaded."""

    def __init__(self) -> None:
        self.loads = 0

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        self.loads += 1
        return torch.tensor([float(index + 10 * self.loads)])


class Third:
    """A collate object that makes another batch at every third call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, items: list[Any]) -> Any:
        self.calls += 1
        return default_collate(items) * (1 + (self.calls % 3 == 0))


class Six(Dataset[Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])


def stateful(dataset: Any) -> Any:
    return pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader(dataset, 1)


EVALUATED: dict[str, Callable[[], Any]] = {
    **SAMPLERS,
    **ITERABLES,
    "stream": lambda: DataLoader(At(), 1),
    "stream with a state": lambda: DataLoader(AtWithState(), 1),
    "iterable with a state": AtWithState,
    "torchdata": lambda: stateful(AtWithState()),
    "torchdata, without a state": lambda: stateful(At()),
    "dataset that counts": lambda: DataLoader(Plus(), 2),
    "dataset that counts in a worker": lambda: DataLoader(Plus(), 2, num_workers=1, persistent_workers=True),
    "collate that counts": lambda: DataLoader(Six(), 2, collate_fn=Third()),
    "sampler without end": lambda: DataLoader(DATA, 2, sampler=Pointer()),
}
EVALUATED.pop("closure")


@pytest.mark.filterwarnings("ignore:'set_vital':UserWarning")  # torchdata's own
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", EVALUATED)
def test_every_pass_of_an_evaluation_begins_at_the_same_place(
    name: str, count: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING")
    feed = limit(open_feed(EVALUATED[name](), name="val", repeats=True), count)
    first = order(feed)
    assert [order(feed) for _ in range(3)] == [first] * 3
    fresh = limit(open_feed(EVALUATED[name](), name="val", repeats=True), count)
    assert order(fresh) == first
    if "worker" not in name:  # where what is kept cannot be seen
        assert not caplog.records
    feed.close(), fresh.close()


def test_a_pass_that_begins_elsewhere_is_told(caplog: pytest.LogCaptureFixture) -> None:
    at = itertools.count()

    class Elsewhere:
        def __iter__(self) -> Iterator[Tensor]:
            return (torch.tensor([next(at)]) for _ in range(3))

    feed = open_feed(Elsewhere(), name="val", repeats=True)
    order(feed), order(feed), order(feed)
    assert [record.message[:37] for record in caplog.records] == ["val: this pass starts with another ba"]


def test_an_iterator_is_good_for_one_evaluation() -> None:
    feed = limit(open_feed(iter(At()), name="val", repeats=True), 2)
    assert order(feed) == [[1.0], [2.0]]
    with pytest.raises(DataError, match=r"val: the iterator cannot restart.*list\(batches\)"):
        order(feed)


def test_a_collate_object_that_keeps_something_is_told_at_the_first_batch(caplog: pytest.LogCaptureFixture) -> None:
    next(iter(open_feed(DataLoader(Six(), 2, collate_fn=default_collate), name="mine").epoch(0)))
    assert not caplog.records
    third = Third()
    batches = list(open_feed(DataLoader(Six(), 2, collate_fn=third), name="mine").epoch(0))
    assert "mine: the collate function Third returned two different batches of the same items" in caplog.text
    assert third.calls == 3  # the look at it left no trace
    assert [batch.flatten().tolist() for batch in batches] == [[0, 1], [2, 3], [8, 10]]


# --- generators and states of datasets and collations -----------------------------------------------------------------


class Augmented(Six):
    """Draws from a generator that it holds, or that its transform holds."""

    def __init__(self, rng: Any, *, inside: bool = False) -> None:
        self.rng = None if inside else rng
        self.transforms = [SimpleNamespace(), Noise(rng)] if inside else []

    def __getitem__(self, index: int) -> Tensor:
        drawn = self.transforms[1].rng if self.rng is None else self.rng
        return super().__getitem__(index) + _drawn_by(drawn)


class Noise:
    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __call__(self, items: list[Any]) -> Any:
        return default_collate(items) + _drawn_by(self.rng)


def _drawn_by(rng: Any) -> float:
    return float(torch.rand((), generator=rng)) if isinstance(rng, torch.Generator) else float(rng.random())


def _closed_over(rng: Any) -> Any:
    return lambda items: default_collate(items) + rng.random()  # pyright: ignore[reportUnknownLambdaType]


GLOBAL = np.random.default_rng()


class FromGlobal(Six):
    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + GLOBAL.random()


HOLDERS: dict[str, Callable[[], Any]] = {
    "numpy's": lambda: DataLoader(Augmented(np.random.default_rng()), 2, shuffle=True),
    "Python's": lambda: DataLoader(Augmented(random.Random()), 2, shuffle=True),
    "torch's": lambda: DataLoader(Augmented(torch.Generator()), 2),
    "in a transform": lambda: DataLoader(Augmented(np.random.default_rng(), inside=True), 2),
    "in a worker": lambda: DataLoader(Augmented(np.random.default_rng()), 2, num_workers=1),
    "a collate object's": lambda: DataLoader(Six(), 2, collate_fn=Noise(np.random.default_rng())),
    "a closure's": lambda: DataLoader(Six(), 2, collate_fn=_closed_over(np.random.default_rng())),
    "a global": lambda: DataLoader(FromGlobal(), 2),
    "a collate method's": lambda: DataLoader(Six(), 2, collate_fn=Noise(random.Random()).__call__),
}


@pytest.mark.parametrize("name", HOLDERS)
def test_generators_that_datasets_and_collations_hold_are_seeded(name: str, caplog: pytest.LogCaptureFixture) -> None:
    def opened() -> Feed:
        return open_feed(HOLDERS[name](), seed=3)

    feed = opened()
    whole = [order(feed, epoch) for epoch in range(2)]
    assert whole[0] != whole[1]
    assert len({value % 1 for batch in whole[0] for value in batch}) >= 3
    assert order(opened(), 1, 1) == whole[1][1:]
    assert not caplog.records
    feed.close()


def _hidden_generator() -> Any:
    rngs = [np.random.default_rng()]
    return lambda items: default_collate(items) + rngs[0].random()  # pyright: ignore[reportUnknownLambdaType]


def _hidden_count() -> Any:
    calls = itertools.count()

    def counts(items: list[Any]) -> Any:
        return default_collate(items) + next(calls)

    return counts


class Wears(Six):
    """Every fourth item that it gives is another one."""

    loads = 0

    def __getitem__(self, index: int) -> Tensor:
        self.loads += 1
        return super().__getitem__(index) + (self.loads % 4 == 0)


UNREPEATABLE: dict[str, Callable[[], Any]] = {
    "a generator in a list": lambda: DataLoader(Six(), 2, collate_fn=_hidden_generator()),
    "a count in a closure": lambda: DataLoader(Six(), 2, collate_fn=_hidden_count()),
    "a dataset that counts": lambda: DataLoader(Plus(), 2),
    "a dataset that counts to four": lambda: DataLoader(Wears(), 2),
}


@pytest.mark.parametrize("name", UNREPEATABLE)
def test_what_cannot_be_repeated_is_told_once_at_the_first_batch(name: str, caplog: pytest.LogCaptureFixture) -> None:
    feed = open_feed(UNREPEATABLE[name](), name="mine")
    batches = feed.epoch(0)
    next(batches)
    assert [record.message[:6] for record in caplog.records] == ["mine: "]
    assert "will not be the same bit for bit" in caplog.text
    list(batches), order(feed, 1)
    assert len(caplog.records) == 1


def test_a_collation_that_uses_its_items_up_is_none_of_these(caplog: pytest.LogCaptureFixture) -> None:
    def uses_up(items: list[Tensor]) -> Tensor:
        return torch.cat([items.pop() for _ in range(len(items))])

    feed = open_feed(DataLoader(Six(), 2, collate_fn=uses_up), name="mine")
    assert order(feed) == [[1.0, 0.0], [3.0, 2.0], [5.0, 4.0]]
    assert not caplog.records


# --- runs -------------------------------------------------------------------------------------------------------------

PROGRAM = ps.program(torch.nn.Linear(1, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.001))


def target(batch: Any) -> Any:
    found = batch[0] if isinstance(batch, list) else batch
    return found, 2 * found


class Paired:
    """Another loader's batches with targets."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        return map(target, self.loader)


PAIRS = TensorDataset(torch.arange(12.0)[:, None] / 10, torch.arange(12.0)[:, None])
TRAINED: dict[str, Callable[[], Any]] = {
    "in place": lambda: DataLoader(PAIRS, 2, sampler=InPlace()),
    "counts": lambda: DataLoader(PAIRS, 2, sampler=CountsFirst()),
    "buckets": lambda: DataLoader(PAIRS, batch_sampler=Buckets()),
    "iterable": lambda: Paired(Shuffles()),
    "counting iterable": lambda: Paired(Epochs()),
}


@pytest.mark.parametrize("name", TRAINED)
def test_a_run_that_goes_on_is_the_whole_one(name: str, tmp_path: Path) -> None:
    def run(directory: Path | None = None, kill: int = 0, train: Any = None) -> Any:
        def stop(event: Any) -> None:
            if isinstance(event, events.StepEnd) and event.updates == kill:
                signal.raise_signal(signal.SIGTERM)

        loaders = {"train": train or TRAINED[name](), "val": Paired(At())}
        limits = {"val": 2}
        settings: dict[str, Any] = {"epochs": 3, "check_every": None, "progress": False, "limit_batches": limits}
        return ps.fit(PROGRAM.init(), loaders, PROGRAM, callbacks=[stop], snapshots=directory, **settings)

    whole = run()
    for kill in (3, 6, 9):
        with pytest.raises(SystemExit):
            run(tmp_path / str(kill), kill)
        found = run(tmp_path / str(kill))
        assert found.history == whole.history
        assert_trees_close(found.state, whole.state, exact=True)


# --- attributes -------------------------------------------------------------------------------------------------------


def test_attributes_are_put_back_as_the_objects_that_they_were() -> None:
    held = SimpleNamespace(order=[3, 1], seen={1}, rows=torch.arange(3), name="a", table={"x": [1]}, both=None)
    held.both = held.order
    before = Attributes(held)
    order, rows = held.order, held.rows
    assert before.changed() == []
    held.order.append(4)
    held.seen.add(2)
    held.rows.mul_(2)
    held.table["x"].append(2)
    held.name, held.new, held.source = "b", 1, iter([])
    assert sorted(before.changed()) == ["name", "new", "order", "rows", "seen", "source", "table/x"]
    assert before.iterators() == ["source"]
    before.restore()
    assert before.changed() == []
    assert held.order is held.both is order
    assert held.rows is rows
    assert rows.tolist() == [0, 1, 2]
    assert (order, held.seen, held.table, held.name) == ([3, 1], {1}, {"x": [1]}, "a")
    assert not hasattr(held, "new")
    assert not hasattr(held, "source")


def test_attributes_are_written_by_value_and_lists_by_place() -> None:
    items = [object() for _ in range(4)]
    one, other = (SimpleNamespace(items=list(items), sizes=np.arange(2), count=0) for _ in range(2))
    before = Attributes(one)
    one.items.reverse()
    one.items = one.items[:3]
    one.sizes[0] = 7
    one.count = 5
    write([other], json.loads(json.dumps({k: v for k, v in before.values().items() if k != "sizes"})))
    assert other.items == items[:0:-1]
    assert other.count == 5
    assert before.values()["sizes"]["value"].tolist() == [7, 1]
