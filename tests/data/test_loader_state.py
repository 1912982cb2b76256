"""Loaders whose batches depend on more than seed and epoch: a run warns of each once, and refuses none."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Subset, TensorDataset, default_collate

import purestep as ps
from purestep.data import Feed, open_feed, random_state
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


SAMPLERS |= {
    "without end": lambda: DataLoader(DATA, 2, sampler=Pointer()),
    "an iterator": lambda: DataLoader(DATA, 2, sampler=itertools.cycle([3, 4])),
}
SEEN_LATER = ("counts last",)  # its two first orders are alike


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelname == "WARNING"]


@pytest.mark.parametrize("name", SAMPLERS)
def test_an_order_that_two_draws_change_is_told_at_the_start(name: str, caplog: pytest.LogCaptureFixture) -> None:
    open_feed(SAMPLERS[name](), name="mine")
    assert len(told(caplog)) == (name not in SEEN_LATER)
    for message in told(caplog):
        assert "is not a function of seed and epoch" in message
        assert "(cure: " in message
        assert message.endswith("or give the loader state_dict() and load_state_dict())")


def test_the_two_draws_do_not_change_the_sampler() -> None:
    sampler = CountsFirst()
    feed = open_feed(DataLoader(DATA, 2, sampler=sampler))
    assert sampler.epoch == 0
    order(feed, 0)
    assert sampler.epoch == 1


class Heavy(Dataset[Tensor]):
    """Not to be copied."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index)])

    def __deepcopy__(self, memo: Any) -> Any:
        raise AssertionError("a dataset is not copied")


class Halved(InPlace):
    """Holds the whole dataset, of which the loader has a part."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.whole = whole


def test_the_draws_copy_no_dataset_that_the_sampler_holds(caplog: pytest.LogCaptureFixture) -> None:
    whole = Heavy()
    open_feed(DataLoader(Subset(Subset(whole, range(12)), range(12)), 2, sampler=Halved(whole)))
    assert len(told(caplog)) == 1  # the draws were made


def test_a_sampler_that_draws_from_the_seed_or_follows_set_epoch_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    class Draws(InPlace):
        def __iter__(self) -> Iterator[int]:
            return iter(random.sample(range(12), 12))

    class Follows(Draws):
        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

        def __iter__(self) -> Iterator[int]:
            return iter([(i + self.epoch) % 12 for i in range(12)])

    for kind in (Draws, Follows):
        feed = open_feed(DataLoader(DATA, 2, sampler=kind()), seed=3)
        whole = [order(feed, epoch) for epoch in range(3)]
        assert whole[0] != whole[1]
        assert order(open_feed(DataLoader(DATA, 2, sampler=kind()), seed=3), 2, 1) == whole[2][1:]
    assert not told(caplog)


def begun(make: Callable[[], Any], epoch: int, start: int) -> tuple[Feed, Any]:
    """A feed of another loader, at the place of a run that was left there, and the batches that run would have had."""
    feed, other = open_feed(make(), seed=3, name="mine"), open_feed(make(), seed=3, name="mine")
    for before in range(epoch):
        order(feed, before)
    whole = order(feed, epoch)
    other.restore(json.loads(json.dumps(feed.position(epoch, start))))
    return other, whole


def test_an_epoch_that_begins_otherwise_in_a_resumed_run_is_told(caplog: pytest.LogCaptureFixture) -> None:
    other, whole = begun(SAMPLERS["counts last"], 2, 1)
    assert not told(caplog)
    assert order(other, 2, 1) != whole[1:]
    order(other, 3)
    assert [message[:71] for message in told(caplog)] == [
        "mine: epoch 3 begins with another batch than in the interrupted run, so"
    ]


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


class Streamed(Epochs, IterableDataset[Any]):
    pass


class Keeps:
    """Holds an iterator from epoch to epoch."""

    def __iter__(self) -> Iterator[Tensor]:
        if not hasattr(self, "source"):
            self.source = (torch.tensor([i]) for i in itertools.count())
        return itertools.islice(self.source, 3)


ITERABLES: dict[str, tuple[Callable[[], Any], str]] = {
    "shuffles": (Shuffles, "batches"),
    "counts": (Epochs, "epoch"),
    "leftover": (Leftover, "rest, next"),
    "nested": (Files, "names, inner/epoch"),
    "an iterator": (Keeps, "source"),
    "dataset": (lambda: DataLoader(Streamed(), 2), "[0]/epoch"),
    "told the epoch": (lambda: Follower(), ""),
    "dataset in workers": (lambda: DataLoader(Streamed(), 2, num_workers=1), ""),  # which end with their epoch
}


class Follower:
    """Its batches follow from `set_epoch`."""

    def set_epoch(self, epoch: int) -> None:
        self.told = epoch

    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([float(10 * self.told + i)]) for i in range(4))


@pytest.mark.parametrize("name", ITERABLES)
def test_an_iterable_that_the_first_epoch_changed_is_told_before_the_second(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, changed = ITERABLES[name]
    feed = open_feed(make(), name="mine")
    order(feed, 0)
    assert not told(caplog)
    next(feed.epoch(1))
    assert len(told(caplog)) == bool(changed)
    for message in told(caplog):
        found = message.removeprefix("mine: an epoch changes ").partition(", which a snapshot does not store")[0]
        assert set(found.split(", ")) == set(changed.split(", "))
        assert "(cure: define state_dict() and load_state_dict()" in message
    order(feed, 2)
    assert len(told(caplog)) == bool(changed)


def test_a_change_that_attributes_do_not_show_is_told_in_the_resumed_run(caplog: pytest.LogCaptureFixture) -> None:
    def make() -> Any:
        passes = itertools.count()

        class Counts:
            def __iter__(self) -> Iterator[Tensor]:
                epoch = next(passes)
                return (torch.tensor([10.0 * epoch + i]) for i in range(3))

        return Counts()

    other, whole = begun(make, 1, 1)
    assert not told(caplog)
    assert order(other, 1, 1) != whole[1:]
    assert len(told(caplog)) == 1
    assert "mine: epoch 2 begins with another batch than in the interrupted run" in caplog.text
    caplog.clear()
    other, whole = begun(Follower, 1, 1)
    assert order(other, 1, 1) == whole[1:]
    assert not told(caplog)


def test_a_changed_loader_is_not_told_where_nobody_looks(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(random_state, "attributes", lambda *owners: iter(()))
    monkeypatch.setattr(Feed, "_check_begun", lambda self, epoch, found: None)
    with pytest.raises(AssertionError):
        test_an_iterable_that_the_first_epoch_changed_is_told_before_the_second("counts", caplog)
    with pytest.raises(AssertionError):
        test_an_epoch_that_begins_otherwise_in_a_resumed_run_is_told(caplog)


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
        expected = [0.0, 1.0, 2.0, 2.0]  # in one process it keeps what it counts
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
    "stream with a state": lambda: DataLoader(AtWithState(), 1),
    "iterable with a state": AtWithState,
    "torchdata": lambda: stateful(AtWithState()),
    "torchdata, without a state": lambda: stateful(At()),
    "shuffled": lambda: DataLoader(DATA, 2, shuffle=True),
    "in workers": lambda: DataLoader(Streamed(), 2, num_workers=1),
    "told the epoch": Follower,
}


@pytest.mark.filterwarnings("ignore:'set_vital':UserWarning")  # torchdata's own
@pytest.mark.parametrize("given", [lambda loader: loader, open_feed], ids=["loader", "feed"])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("name", EVALUATED)
def test_every_pass_of_an_evaluation_begins_at_the_same_place(
    name: str, count: int, given: Any, caplog: pytest.LogCaptureFixture
) -> None:
    feed = open_feed(given(EVALUATED[name]()), name="val", repeats=True, first=count)
    first = order(feed)
    again = [order(feed) for _ in range(3)]
    if name == "torchdata, without a state":  # its state counts batches, and lacks what the dataset keeps
        assert len(told(caplog)) == 1
    else:
        assert again == [first] * 3
        assert not told(caplog)
    feed.close()


ELSEWHERE: dict[str, Callable[[], Any]] = {
    "stream": lambda: DataLoader(At(), 1),
    "iterable": At,
    "in place": SAMPLERS["in place"],
    "closure": SAMPLERS["closure"],
    "dataset that counts": lambda: DataLoader(Plus(), 2),
}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_pass_that_begins_elsewhere_is_told(name: str, caplog: pytest.LogCaptureFixture) -> None:
    feed = open_feed(ELSEWHERE[name](), name="val", repeats=True, first=2)
    order(feed), order(feed), order(feed)
    assert len([message for message in told(caplog) if message.startswith("val: this pass starts with another")]) == 1


def test_an_iterator_is_good_for_one_evaluation() -> None:
    feed = open_feed(iter(At()), name="val", repeats=True, first=2)
    assert order(feed) == [[1.0], [2.0]]
    with pytest.raises(DataError, match=r"val: .*the iterator can run only one epoch.*list\(batches\)"):
        order(feed)
    given = open_feed(iter(At()), first=2)
    assert order(open_feed(given, repeats=True)) == [[1.0], [2.0]]
    with pytest.raises(DataError, match=r"val: .*the iterator can run only one epoch"):
        order(open_feed(given, name="val", repeats=True))


@pytest.mark.parametrize("name", ["shuffled", "in workers", "told the epoch"])
def test_a_feed_without_a_seed_takes_that_of_the_run(name: str) -> None:
    given, own = open_feed(EVALUATED[name]()), open_feed(EVALUATED[name](), seed=1)
    for seed in (3, 4):
        used, wanted = open_feed(given, seed=seed, first=2), open_feed(EVALUATED[name](), seed=seed, first=2)
        assert used.facts == wanted.facts
        assert [order(used), order(used)] == [order(wanted), order(wanted)]
        assert open_feed(own, seed=seed) is own
    given.close(), own.close()


def test_evaluations_of_one_feed_begin_at_the_same_place() -> None:
    loader = AtWithState()
    feed = open_feed(loader)
    for _ in range(2):
        assert ps.evaluate(torch.zeros(()), open_feed(feed, first=2), at_mean)["loss"] == 1.5
    assert loader.at == 0


def at_mean(state: Any, batch: Any) -> Any:
    return {"loss": ps.Mean(state + batch.sum(), torch.ones(()))}


def test_a_collate_object_that_keeps_something_is_told_at_the_first_batch(caplog: pytest.LogCaptureFixture) -> None:
    next(iter(open_feed(DataLoader(Six(), 2, collate_fn=default_collate), name="mine").epoch(0)))
    assert not caplog.records
    third = Third()
    list(open_feed(DataLoader(Six(), 2, collate_fn=third), name="mine").epoch(0))
    assert "mine: the collate function Third returned two different batches of the same items" in caplog.text


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


def _hidden_count() -> Any:
    calls = itertools.count()

    def counts(items: list[Any]) -> Any:
        return default_collate(items) + next(calls)

    return counts


UNREPEATABLE: dict[str, Callable[[], Any]] = {
    "a generator in a closure": lambda: DataLoader(Six(), 2, collate_fn=_closed_over(np.random.default_rng())),
    "a global generator": lambda: DataLoader(FromGlobal(), 2),
    "a count in a closure": lambda: DataLoader(Six(), 2, collate_fn=_hidden_count()),
    "a dataset that counts": lambda: DataLoader(Plus(), 2),
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


PAIRS = TensorDataset(torch.arange(12.0)[:, None] / 10, torch.arange(12.0)[:, None])


class Counting:
    """Another loader's batches, and a count of its epochs."""

    epochs = 0

    def __iter__(self) -> Iterator[Any]:
        self.epochs += 1
        return iter([target(torch.full((2, 1), self.epochs + i / 10)) for i in range(4)])


@pytest.mark.parametrize("train", [lambda: DataLoader(PAIRS, 2, sampler=InPlace()), Counting])
def test_a_run_is_told_and_never_refused(train: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings: dict[str, Any] = {"epochs": 3, "check_every": None, "progress": False}
    found = [
        ps.fit(PROGRAM.init(), train(), PROGRAM, snapshots=directory, **settings) for directory in (None, tmp_path)
    ]
    assert found[0].history == found[1].history
    assert len(told(caplog)) == 2  # once in each run


class Remembering(Counting):
    """Its state cannot be stored as JSON."""

    def state_dict(self) -> dict[str, Any]:
        return {"seen": {self.epochs}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        (self.epochs,) = state["seen"]


def test_a_state_that_cannot_be_stored_is_refused_at_the_first_call(tmp_path: Path) -> None:
    calls: list[int] = []

    def count(event: Any) -> None:
        calls.extend([event.updates] if isinstance(event, ps.events.StepEnd) else [])

    settings: dict[str, Any] = {"epochs": 2, "callbacks": [count], "progress": False}
    with pytest.raises(DataError, match=r"train: state_dict\(\)\['seen'\] is a set, which cannot be stored"):
        ps.fit(PROGRAM.init(), Remembering(), PROGRAM, snapshots=tmp_path, **settings)
    assert len(calls) == 1
    ps.fit(PROGRAM.init(), Remembering(), PROGRAM, **settings)  # which stores nothing


@pytest.mark.peer
@pytest.mark.parametrize("batched", [False, True], ids=["the dataset", "a DataLoader"])
def test_a_stream_of_hugging_face_is_resumed_by_its_state(batched: bool) -> None:
    datasets = pytest.importorskip("datasets")

    def opened() -> Feed:
        rows = datasets.Dataset.from_dict({"x": [[float(i)] for i in range(12)]}).to_iterable_dataset(num_shards=3)
        stream = rows.with_format("torch") if batched else rows.with_format("torch").batch(2)
        return open_feed(DataLoader(stream, 2) if batched else stream)

    def numbers(feed: Feed, epoch: int, start: int = 0) -> list[Any]:
        return [torch.as_tensor(batch["x"]).flatten().tolist() for batch in feed.epoch(epoch, start)]

    feed, places = opened(), dict[tuple[int, int], str]()
    whole: list[Any] = []
    for epoch in range(2):
        whole.append([])
        for batch in feed.epoch(epoch):
            whole[-1].append(torch.as_tensor(batch["x"]).flatten().tolist())
            places[epoch, len(whole[-1])] = json.dumps(feed.position(epoch, len(whole[-1])))
    assert len(places) == 12
    for (epoch, start), stored in places.items():
        again = opened()
        again.restore(json.loads(stored))
        assert numbers(again, epoch, start) == whole[epoch][start:]
        if epoch == 0:
            assert numbers(again, 1) == whole[1]
