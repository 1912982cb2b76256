"""Order and position of every kind of loader, the caller's generators, and batches that cannot be trained on."""

from __future__ import annotations

import collections
import dataclasses
import inspect
import itertools
import json
import multiprocessing
import os
import random
import select
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers import Placed, timed_out_after, worker_dies
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

import purestep as ps
from purestep import tree
from purestep.data import (
    Prefetched,
    check_batch,
    held,
    open_feed,
    random_state,
    shares,
    state_json,
    to_device,
    workers,
)
from purestep.data.device import _pinned  # pyright: ignore[reportPrivateUsage]
from purestep.data.feed import Feed
from purestep.errors import ConfigError, DataError, Mismatch
from purestep.types import Share


class Plain(Dataset[Tensor]):
    """Item i is the number i; remembers what was loaded in this process."""

    def __init__(self, count: int = 10) -> None:
        self.count = count
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        self.loaded.append(index)
        return torch.tensor(float(index))


class Augmented(Plain):
    """Draws from all three generators, but only for every third item."""

    def __getitem__(self, index: int) -> Tensor:
        item = super().__getitem__(index)
        if index % 3 == 1:
            item = item + torch.rand(()) + random.random() + float(np.random.rand())
        return item


class Broken(Plain):
    def __getitem__(self, index: int) -> Tensor:
        if index == 7:
            raise KeyError("seven")
        return super().__getitem__(index)


def noisy_collate(items: list[Tensor]) -> Tensor:
    return torch.stack(items) + torch.rand(len(items))


def values(feed: Feed, epoch: int = 0, start: int = 0) -> list[Any]:
    return [batch.tolist() if isinstance(batch, Tensor) else batch for batch in feed.epoch(epoch, start)]


def generators() -> tuple[Any, ...]:
    numpys = np.random.get_state(legacy=False)
    return (
        torch.get_rng_state().tolist(), random.getstate(),
        numpys["state"]["key"].tolist(), numpys["state"]["pos"], numpys["has_gauss"], numpys["gauss"],
    )  # fmt: skip


# Order and position: datasets with indices.


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("dataset", [Plain, Augmented])
def test_an_epoch_entered_anywhere_goes_on_as_it_would_have(dataset: Any, shuffle: bool, drop_last: bool):
    def opened() -> Feed:
        return open_feed(DataLoader(dataset(11), batch_size=4, shuffle=shuffle, drop_last=drop_last), seed=5)

    feed = opened()
    whole = [values(feed, epoch) for epoch in range(3)]
    assert [len(epoch) for epoch in whole] == [feed.length] * 3 == [2 if drop_last else 3] * 3
    assert (whole[0] != whole[1]) == (shuffle or dataset is Augmented)
    for epoch, start in itertools.product(range(3), range(feed.length + 1)):
        assert values(opened(), epoch, start) == whole[epoch][start:]


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_change_nothing(persistent: bool):
    def loader(workers: int) -> DataLoader[Tensor]:
        keep = persistent and workers > 0
        return DataLoader(
            Augmented(11), 4, shuffle=True, num_workers=workers, persistent_workers=keep, collate_fn=noisy_collate
        )

    alone, several = open_feed(loader(0), seed=2), open_feed(loader(2), seed=2)
    expected = [values(alone, epoch) for epoch in range(3)]
    assert [values(several, epoch) for epoch in range(3)] == expected
    assert values(several, 1, 2) == expected[1][2:]
    batches = several.epoch(0)  # left in the middle, as a stopped run leaves it
    next(batches)
    batches.close()  # pyright: ignore[reportAttributeAccessIssue]  # a generator
    assert values(several, 2) == expected[2]
    several.close()


def test_the_order_comes_from_seed_and_epoch_alone():
    def order(seed: int, epoch: int, torch_seed: int) -> list[Any]:
        torch.manual_seed(torch_seed)
        return values(open_feed(DataLoader(Plain(), 5, shuffle=True), seed=seed), epoch)

    assert order(0, 0, 1) == order(0, 0, 2)
    assert len({str(order(seed, epoch, 0)) for seed in range(3) for epoch in range(3)}) == 9
    assert sorted(itertools.chain(*order(0, 4, 0))) == list(range(10))


def test_resuming_skips_indices_and_loads_nothing_before():
    dataset = Plain(10)
    feed = open_feed(DataLoader(dataset, batch_size=2))
    assert values(feed, 0, 4) == [[8.0, 9.0]]
    assert set(dataset.loaded) == {8, 9}


def test_the_seeds_of_items_do_not_depend_on_the_rest_of_the_batch():
    """Planted fault: seeding once a batch instead of once an item would give item 1 other numbers in other company."""
    by_four = itertools.chain(*values(open_feed(DataLoader(Augmented(8), batch_size=4))))
    by_two = itertools.chain(*values(open_feed(DataLoader(Augmented(8), batch_size=2))))
    assert list(by_four) == list(by_two)


def test_a_tensor_dataset_is_gathered_to_what_collating_gives():
    dataset = TensorDataset(torch.randn(10, 3), torch.arange(10), torch.rand(10) > 0.5)
    for source in (dataset, Subset(Subset(dataset, [1, 3, 5, 7, 9]), [4, 0, 2])):
        actual = list(open_feed(DataLoader(source, batch_size=2)).epoch(0))
        expected = list(DataLoader(source, batch_size=2))
        assert tree.signature(actual) == tree.signature(expected)
        assert all(torch.equal(a, b) for a, b in zip(tree.leaves(actual), tree.leaves(expected), strict=True))


def test_settings_of_random_samplers_are_kept():
    sampler = RandomSampler(range(5), replacement=True, num_samples=12)
    drawn = list(itertools.chain(*values(open_feed(DataLoader(Plain(5), 4, sampler=sampler)))))
    assert len(drawn) == 12
    assert len(set(drawn)) < 6
    batches = BatchSampler(RandomSampler(Plain(7)), 3, drop_last=True)
    feed = open_feed(DataLoader(Plain(7), batch_sampler=batches))
    assert [len(batch) for batch in values(feed)] == [3, 3]
    assert values(feed, 0) != values(feed, 1)


class Shuffled:
    """A sampler of a user's own that draws from the global generators and is told the epoch."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[list[int]]:
        one: list[int] = []
        for index in random.sample(range(10), 10):
            one.append(index)
            if len(one) == 2:
                yield one
                one.clear()  # one list for all, as some samplers do


def test_a_sampler_of_the_users_own_is_drawn_under_the_seed():
    def opened() -> tuple[Feed, Shuffled]:
        sampler = Shuffled()
        return open_feed(DataLoader(Plain(), batch_sampler=sampler), seed=1), sampler

    feed, sampler = opened()
    whole = [values(feed, epoch) for epoch in range(2)]
    assert sampler.epochs == [0, 1]
    assert whole[0] != whole[1]
    assert sorted(itertools.chain(*whole[0])) == list(range(10))
    assert values(opened()[0], 1, 3) == whole[1][3:]


class Own:
    """Draws indices, or batches, from a generator of its own."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self.rng, torch.Generator):
            return iter(torch.randperm(10, generator=self.rng).tolist())
        return iter(
            random.Random.sample(self.rng, range(10), 10)
            if isinstance(self.rng, random.Random)
            else self.rng.permutation(10).tolist()
        )


OWN = {
    "torch": lambda: torch.Generator().manual_seed(3),
    "numpy": lambda: np.random.default_rng(3),
    "numpy of old": lambda: np.random.RandomState(3),
    "numpy of old, with another algorithm": lambda: np.random.RandomState(np.random.PCG64(3)),
    "python": lambda: random.Random(3),
}
HOLDERS: dict[str, Callable[[Any], Any]] = {
    "sampler": lambda rng: DataLoader(Plain(), 2, sampler=Own(rng)),
    "batch sampler": lambda rng: DataLoader(Plain(), batch_sampler=BatchSampler(Own(rng), 2, drop_last=False)),
    "iterable": Own,
    "loader in an iterable": lambda rng: Around(DataLoader(Plain(), 2, sampler=Own(rng))),
    "dataset of an iterable loader": lambda rng: open_feed(DataLoader(OwnStream(rng), 2), seed=1),
}


class Around:
    """Iterates another loader."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        yield from self.loader


class OwnStream(Own, IterableDataset[Any]):
    pass


@pytest.mark.parametrize("rng", OWN)
@pytest.mark.parametrize("holder", HOLDERS)
def test_a_generator_of_a_samplers_own_is_seeded_at_every_epoch(holder: str, rng: str):
    """A run that goes on has not drawn from it what the epochs before did."""

    def opened() -> Feed:
        return open_feed(HOLDERS[holder](OWN[rng]()), seed=1)

    def order(feed: Feed, epoch: int, start: int = 0) -> list[str]:
        return [str(batch) for batch in feed.epoch(epoch, start)]

    feed = opened()
    whole = [order(feed, epoch) for epoch in range(3)]
    assert whole[0] != whole[1]
    assert order(opened(), 2, 3) == whole[2][3:]


class Lazy(Own):
    """Draws as it goes."""

    def __iter__(self) -> Iterator[Any]:
        return (float(self.rng.random()) for _ in range(10))


def test_a_generator_that_two_loaders_share_is_resumed_in_each():
    def opened() -> tuple[Feed, Feed]:
        shared = np.random.default_rng(3)
        return open_feed(Lazy(shared), seed=1), open_feed(Lazy(shared), seed=1, name="val")

    train, val = opened()
    batches = train.epoch(1)
    whole = [*itertools.islice(batches, 3), list(val.epoch(0)), *batches][-7:]
    assert list(opened()[0].epoch(1, 3)) == whole


def test_two_generators_of_one_sampler_do_not_draw_the_same():
    class Two(Lazy):
        def __init__(self) -> None:
            super().__init__(np.random.default_rng(3))
            self.other = np.random.default_rng(4)

        def __iter__(self) -> Iterator[Any]:
            return ((float(self.rng.random()), float(self.other.random())) for _ in range(10))

    feed = open_feed(Two())
    assert all(first != second for first, second in feed.epoch(0))


@pytest.mark.parametrize(
    "sampler",
    [
        lambda: WeightedRandomSampler([1.0] * 9 + [50.0], 10),
        lambda: WeightedRandomSampler([1.0] * 10, 10, generator=torch.Generator()),
        lambda: DistributedSampler(Plain(), num_replicas=2, rank=1, seed=3),
    ],
)
def test_samplers_of_torch_are_drawn_under_the_seed(sampler: Any):
    def opened() -> Feed:
        return open_feed(DataLoader(Plain(), 2, sampler=sampler()), seed=1)

    feed = opened()
    whole = [values(feed, epoch) for epoch in range(2)]
    assert whole[0] != whole[1]
    assert values(opened(), 1, 1) == whole[1][1:]


def test_an_endless_sampler_is_not_drained():
    feed = open_feed(DataLoader(Plain(), batch_size=2, sampler=itertools.cycle([3, 4])))
    assert list(itertools.islice(values_of(feed), 100)) == [[3.0, 4.0]] * 100


def values_of(feed: Feed) -> Iterator[Any]:
    return (batch.tolist() for batch in feed.epoch(0))


def test_a_loader_without_batching_gives_items():
    feed = open_feed(DataLoader(Augmented(4), batch_size=None, shuffle=True), seed=1)
    assert len(values(feed)) == 4
    assert values(feed, 0, 2) == values(feed)[2:]
    lists = BatchSampler(RandomSampler(range(6)), 2, False)
    whole = open_feed(DataLoader(TensorDataset(torch.arange(6)), batch_size=None, sampler=lists))
    assert sorted(itertools.chain(*(batch[0].tolist() for batch in whole.epoch(0)))) == list(range(6))


def test_worker_init_reaches_the_dataset_behind_the_wrapper():
    feed = open_feed(DataLoader(Plain(2), batch_size=2, num_workers=1, worker_init_fn=set_count, collate_fn=total))
    assert list(feed.epoch(0)) == [77]


def set_count(worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    info.dataset.count = 77 + worker  # pyright: ignore[reportAttributeAccessIssue]  # the user's own


def total(items: list[Tensor]) -> int:
    del items
    info = torch.utils.data.get_worker_info()
    assert info is not None
    return info.dataset.count  # pyright: ignore[reportAttributeAccessIssue]  # the user's own


class OwnGenerator(Plain):
    generator = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Tensor:
        return super().__getitem__(index) + float(self.generator.random())


def test_a_dataset_that_cannot_be_loaded_again_is_flagged_once(caplog: pytest.LogCaptureFixture):
    feed = open_feed(DataLoader(OwnGenerator(6), batch_size=2), name="mine")
    values(feed, 0)
    values(feed, 1)
    assert [record.message for record in caplog.records if "mine: loading an item twice" in record.message] != []
    assert len(caplog.records) == 1
    values(open_feed(DataLoader(Augmented(6), batch_size=2)))
    assert len(caplog.records) == 1


DRAWS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(()),
    "numpy": np.random.rand,
    "numpy, a pair": np.random.randn,
    "python": random.random,
    "python, a pair": lambda: random.gauss(0, 1),
}


class DrawsLate(Plain):
    """Draws from one generator after another, each from another item on."""

    def __init__(self, names: list[str], fails: bool = False) -> None:
        super().__init__(24)
        self.draws, self.fails = [DRAWS[name] for name in names], fails

    def __getitem__(self, index: int) -> Tensor:
        drawn = [float(draw()) for number, draw in enumerate(self.draws) if index >= 6 * number + 3]
        if self.fails and drawn and drawn[0] > 0.2:
            raise ValueError(f"drew {drawn[0]}")
        return super().__getitem__(index) + sum(drawn)


@pytest.mark.parametrize("names", [[name] for name in DRAWS] + [["python", "torch", "numpy"]], ids="-".join)
def test_items_depend_on_their_seeds_from_whichever_generator_they_draw(names: list[str]):
    runs: list[Any] = []
    for seed, size, start in ((1, 3, 0), (2, 1, 0), (3, 3, 4)):
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        random.gauss(0, 1), np.random.randn()  # halves of pairs lie ready
        before = generators()
        runs.append(values(open_feed(DataLoader(DrawsLate(names), batch_size=size)), 0, start))
        assert generators() == before
    flat = [list(itertools.chain(*run)) for run in runs]
    assert flat[0] == flat[1]
    assert flat[0][12:] == flat[2]
    assert len({value % 1 for value in flat[0]}) > 20  # of 24, where an item draws


class Together(Augmented):
    """Loads a batch in one call, as Hugging Face's datasets do."""

    def __init__(self, count: int = 10) -> None:
        super().__init__(count)
        self.calls: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        self.calls.append(indices)
        return [self[index] for index in indices]


class DryTogether(Together):
    def __getitem__(self, index: int) -> Tensor:
        return Plain.__getitem__(self, index)


def test_a_dataset_with_getitems_is_loaded_in_one_call_until_it_draws():
    """One call for each item takes twelve times as long with Hugging Face's datasets."""
    dry, drawing = DryTogether(8), Together(8)
    assert values(open_feed(DataLoader(dry, 4))) == values(open_feed(DataLoader(Plain(8), 4)))
    assert [len(call) for call in dry.calls if len(call) > 1] == [4, 4]
    assert values(open_feed(DataLoader(drawing, 4))) == values(open_feed(DataLoader(Augmented(8), 4)))
    assert [len(call) for call in drawing.calls if len(call) > 1] == [4]


def test_a_dataset_with_getitems_draws_otherwise_where_nobody_looks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(random_state, "states", lambda: ())
    with pytest.raises(AssertionError):
        test_a_dataset_with_getitems_is_loaded_in_one_call_until_it_draws()


class Isolated(Plain):
    """Draws where nobody sees it: what it draws from is put back."""

    def __getitem__(self, index: int) -> Tensor:
        before = torch.get_rng_state(), np.random.get_state(), random.getstate()
        drawn = float(torch.rand(())) + float(np.random.randn()) + random.gauss(0, 1)
        torch.set_rng_state(before[0]), np.random.set_state(before[1]), random.setstate(before[2])
        return super().__getitem__(index) + drawn


def test_draws_that_nobody_sees_come_from_the_seeds_of_the_items():
    runs: list[Any] = []
    for seed in (1, 2):
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        random.gauss(0, 1), np.random.randn()
        runs.append(values(open_feed(DataLoader(Isolated(6), batch_size=2))))
    assert runs[0] == runs[1]
    assert len({value % 1 for batch in runs[0] for value in batch}) == 6


class Exchanges(Plain):
    """Puts a generator of another kind in the place of numpy's."""

    def __getitem__(self, index: int) -> Tensor:
        np.random.set_bit_generator(np.random.PCG64(index))  # pyright: ignore[reportAttributeAccessIssue]
        return super().__getitem__(index) + float(np.random.rand())


def test_a_dataset_that_exchanges_numpys_generator():
    before = generators()
    runs = [values(open_feed(DataLoader(Exchanges(6), batch_size=size))) for size in (2, 3)]
    assert list(itertools.chain(*runs[0])) == list(itertools.chain(*runs[1]))
    assert generators() == before


def test_an_error_that_hangs_on_a_draw_is_that_of_the_seeded_item():
    found = []
    for seed in (1, 2):
        random.seed(seed)
        with pytest.raises(DataError, match="ValueError: drew") as caught:
            values(open_feed(DataLoader(DrawsLate(["python"], fails=True), batch_size=3)))
        found.append(str(caught.value))
    assert found[0] == found[1]


# The caller's generators.


@pytest.mark.parametrize(
    "loader",
    [
        lambda: DataLoader(Augmented(), 4, shuffle=True, collate_fn=noisy_collate),
        lambda: DataLoader(Augmented(), 4, shuffle=True, num_workers=1),
        lambda: DataLoader(Augmented(), batch_sampler=Shuffled()),
        lambda: DataLoader(Stream(), batch_size=2),
        lambda: Reiterable(),
        lambda: iter(Reiterable()),
        lambda: Stateful(),
        lambda: DataLoader(Broken(), batch_size=4),
    ],
)
def test_the_callers_generators_are_left_as_they_were(loader: Any):
    np.random.seed(3)
    before = generators()
    feed = open_feed(loader())
    try:
        for number, _ in enumerate(feed.epoch(0)):
            assert generators() == before
            for _ in range(number % 3):
                np.random.randn()  # one leaves half of a pair behind, two do not
            random.random(), torch.rand(1)
            before = generators()
    except DataError:
        pass
    feed.close()
    assert generators() == before


def test_scoped_puts_generators_back_though_it_is_interrupted():
    np.random.seed(3)
    np.random.randn()  # leaves half of a pair behind
    before = generators()

    def drawn() -> None:
        torch.rand(1), np.random.rand(), random.random()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), random_state.scoped(1):
        drawn()
    assert generators() == before


def test_half_of_a_pair_is_kept_whatever_was_there_before():
    """The words of a generator are the same with half of a pair and without."""
    np.random.seed(0)
    first, second = np.random.normal(size=2)
    with random_state.scoped(1):
        pass
    np.random.seed(0)
    assert np.random.normal() == first
    with random_state.scoped(1):
        np.random.normal()
    assert np.random.normal() == second


def test_half_of_a_pair_is_lost_where_nobody_looks_for_it(monkeypatch: pytest.MonkeyPatch):
    true = np.random.get_state
    monkeypatch.setattr(np.random, "get_state", lambda legacy: true(legacy=legacy) | {"has_gauss": 0})
    with pytest.raises(AssertionError):
        test_half_of_a_pair_is_kept_whatever_was_there_before()


def test_scopes_in_one_another_draw_from_generators_of_their_own():
    def drawn() -> tuple[float, ...]:
        return float(np.random.randn()), random.random(), float(torch.rand(()))

    with random_state.scoped(1):
        expected = [drawn() for _ in range(3)]
    np.random.seed(3)
    before = generators()
    found = []
    with random_state.scoped(1):
        for _ in range(3):
            found.append(drawn())
            with random_state.scoped(2):
                drawn()
    assert found == expected
    assert generators() == before


def test_another_generator_of_numpys_stays_in_its_place():
    mine, theirs = np.random.PCG64(5), np.random.get_bit_generator()
    np.random.set_bit_generator(mine)
    try:
        np.random.rand()
        before = mine.state
        for _ in range(2):
            with random_state.scoped(1):
                first = np.random.rand()
            assert np.random.get_bit_generator() is mine
            assert mine.state == before
    finally:
        np.random.set_bit_generator(theirs)
    with random_state.scoped(1):
        assert np.random.rand() == first


# Everything else that can be iterated.


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor(i + float(torch.rand(()))) for i in range(6))


class Reiterable:
    def __iter__(self) -> Iterator[Tensor]:
        return (torch.tensor([i, float(torch.rand(())) + random.random() + np.random.rand()]) for i in range(4))


class Stateful:
    """Counts epochs and its place in them, as loaders with a state of their own do."""

    def __init__(self) -> None:
        self.epoch = -1
        self.place = 0
        self.resumed = False

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "place": self.place, "rng": torch.tensor([self.epoch]), 3: (b"raw", None)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert torch.equal(state["rng"], torch.tensor([state["epoch"]]))
        assert state[3] == (b"raw", None)
        self.epoch, self.place, self.resumed = state["epoch"], state["place"], True

    def __iter__(self) -> Iterator[Tensor]:
        if not (self.resumed and self.place < 4):
            self.epoch, self.place = self.epoch + 1, 0
        self.resumed = False
        while self.place < 4:
            self.place += 1
            yield torch.tensor([self.epoch, self.place, float(torch.rand(()))])


def test_batches_in_a_list_are_taken_by_index():
    feed = open_feed([(1, 2), (3, 4), (5, 6)])
    assert feed.length == 3
    assert values(feed, 7, 1) == [(3, 4), (5, 6)]


@pytest.mark.parametrize("make", [Reiterable, lambda: DataLoader(Stream(), batch_size=2)])
def test_an_iterable_is_entered_by_loading_and_dropping(make: Any):
    feed = open_feed(make(), seed=3)
    whole = [values(feed, epoch) for epoch in range(2)]
    assert whole[0] != whole[1]
    assert values(open_feed(make(), seed=3), 1, 2) == whole[1][2:]


def test_an_iterable_dataset_runs_in_workers_under_the_seed():
    def opened() -> Feed:
        return open_feed(DataLoader(Stream(), batch_size=2, num_workers=2), seed=3)

    assert values(opened(), 1) == values(opened(), 1) != values(opened(), 0)
    assert len(values(opened())) == 6


@pytest.mark.parametrize("loader", [lambda: DataLoader(Stream(), batch_size=2), lambda: iter([1, 2, 3])])
def test_what_is_loaded_again_and_dropped_is_told(loader: Any, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "purestep")
    assert len(values(open_feed(loader()), 0, 1)) == 2
    assert "train: loads and drops 1 batches to resume inside epoch 1" in caplog.text


def test_a_loader_with_a_state_of_its_own_is_resumed_by_it():
    feed = open_feed(Stateful())
    whole, stored = [], {}
    for epoch in range(3):
        whole.append([])
        for consumed, batch in enumerate(feed.epoch(epoch), 1):
            whole[-1].append(batch.tolist())
            stored[epoch, consumed] = json.loads(json.dumps(feed.position(epoch, consumed)))
        stored[epoch + 1, 0] = json.loads(json.dumps(feed.position(epoch + 1, 0)))
    for (epoch, start), place in stored.items():
        if epoch == 3 or start == 4:
            continue
        again = open_feed(Stateful())
        again.restore(place)
        assert values(again, epoch, start) == whole[epoch][start:]
        if start:
            assert again.position(epoch, start)["state"] == place["state"]
    with pytest.raises(DataError, match="no state of batch 1 was restored"):
        values(open_feed(Stateful()), 1, 1)


def test_a_position_survives_prefetching():
    feed = open_feed(Stateful())
    batches = feed.epoch(0)
    for _ in range(4):
        next(batches)
    assert state_json.decode(feed.position(0, 2)["state"], where="train")["place"] == 2
    with pytest.raises(DataError, match="the state after batch 9 of epoch 1"):
        feed.position(0, 9)


class Counted(Stateful):
    def __len__(self) -> int:
        return 4


@pytest.mark.parametrize("counted", [True, False])
def test_a_state_of_the_very_end_is_that_of_the_next_beginning(counted: bool):
    """What follows an epoch, an evaluation say, may be broken off: a loader without length was seen to end there."""
    make = Counted if counted else Stateful
    feed = open_feed(make())
    whole = [values(feed, epoch) for epoch in range(2)]
    place = feed.position(1, 4)
    whole.append(values(feed, 2))
    again, twice = open_feed(make()), open_feed(make())
    again.restore(place)
    assert values(again, 1, 4) == []
    twice.restore(again.position(1, 4))
    for one in (again, twice):
        assert values(one, 1, 4) == []
        assert values(one, 2) == whole[2]


class RunsOut(Stateful):
    """Restored to an end, it ends at once, and begins anew the time after."""

    def __iter__(self) -> Iterator[Tensor]:
        if not self.resumed:
            self.epoch, self.place = self.epoch + 1, 0
        self.resumed = False
        while self.place < 4:
            self.place += 1
            yield torch.tensor([self.epoch, self.place])


def test_a_restored_end_runs_out_first():
    feed = open_feed(RunsOut())
    assert values(feed, 0)[-1] == [0, 4]
    again = open_feed(RunsOut())
    again.restore(feed.position(1, 0))
    assert values(again, 1) == [[1, place] for place in range(1, 5)]


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore:'set_vital':UserWarning")  # torchdata's own
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_loader_is_resumed_with_its_draws(workers: int):
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def opened() -> Feed:
        return open_feed(stateful(Augmented(11), 4, shuffle=True, num_workers=workers), seed=1)

    feed = opened()
    whole = [values(feed, epoch) for epoch in range(2)]
    assert whole[0] != whole[1]
    again = opened()
    again.restore(feed.position(1, 2))
    assert values(again, 1, 2) == whole[1][2:]


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore:'set_vital':UserWarning")  # torchdata's own
def test_torchdatas_loader_over_a_stream_is_resumed_by_its_state():
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    feed = open_feed(stateful(StatefulStream(), batch_size=2))
    assert feed.facts == {"kind": "state"}
    assert [values(feed, 0), values(feed, 1)] == [[[1, 2], [3, 4], [5, 6]]] * 2
    again = open_feed(stateful(StatefulStream(), batch_size=2))
    again.restore(json.loads(json.dumps(feed.position(0, 1))))
    assert values(again, 0, 1) == [[3, 4], [5, 6]]


class StatefulStream(IterableDataset[Tensor]):
    def __init__(self) -> None:
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]

    def __iter__(self) -> Iterator[Tensor]:
        while self.place < 6:
            self.place += 1
            yield torch.tensor(self.place)
        self.place = 0


def test_an_iterable_dataset_with_a_state_is_resumed_by_it():
    feed = open_feed(DataLoader(StatefulStream(), batch_size=2))
    assert [values(feed, 0), values(feed, 1)] == [[[1, 2], [3, 4], [5, 6]]] * 2
    again = open_feed(DataLoader(StatefulStream(), batch_size=2))
    again.restore(feed.position(0, 1))
    assert values(again, 0, 1) == [[3, 4], [5, 6]]


@pytest.mark.parametrize(
    "value",
    [
        {"a": [1, 2.5, "x", None, True], (1, 2): b"\x00\xff"},
        (torch.arange(6).reshape(2, 3), torch.tensor(1.5, dtype=torch.bfloat16), torch.zeros(0, 2)),
        [np.arange(4.0), np.array(3, dtype=np.uint8)],
    ],
)
def test_a_state_survives_json(value: Any):
    again = state_json.decode(json.loads(json.dumps(state_json.encode(value))), where="train")
    assert str(again) == str(value)
    assert type(again) is type(value)


def test_a_state_that_is_no_json_is_refused_with_its_path():
    with pytest.raises(DataError, match=r"val: state_dict\(\)\['workers'\]\[1\] is a object, which cannot be stored"):
        state_json.encode({"workers": [1, object()]}, where="val")


TENSOR = state_json.encode(torch.ones(2))


@pytest.mark.parametrize(
    "value",
    [
        *({}, {"__purestep__": "call"}, {"__purestep__": "tuple"}, {"__purestep__": "dict", "items": [[[], 1]]}),
        *(
            TENSOR | {"dtype": "load"},
            TENSOR | {"shape": [1 << 40]},
            TENSOR | {"data": "%"},
            TENSOR | {"dtype": "quint8"},
        ),
        {**TENSOR, "__purestep__": "array", "dtype": "O"},
    ],
    ids=str,
)
def test_a_stored_state_that_is_damaged_is_named(value: Any):
    with pytest.raises(DataError, match="train: the stored state of the loader is damaged"):
        state_json.decode(value, where="train")


def test_a_one_shot_iterator_is_good_for_one_epoch():
    feed = open_feed(iter([1, 2]))
    assert values(feed, 0) == [1, 2]
    with pytest.raises(
        DataError, match=r"no batch is left for epoch 2: the iterator can run only one epoch.*instead of iter\(loader\)"
    ):
        values(feed, 1)
    endless = open_feed(itertools.count(), first=3)
    assert [values(endless, 0), values(endless, 1)] == [[0, 1, 2], [3, 4, 5]]


def test_set_epoch_is_called_where_there_is_one():
    epochs = []

    class Told(Reiterable):
        def set_epoch(self, epoch: int) -> None:
            epochs.append(epoch)

    values(open_feed(Told()), 4)
    assert epochs == [4]


# Bad loaders.


@pytest.mark.parametrize(
    "loader", [[], (), DataLoader(Plain(3), batch_size=4, drop_last=True), DataLoader(TensorDataset(torch.zeros(0, 2)))]
)
def test_an_empty_loader_is_found_before_the_first_step(loader: Any):
    with pytest.raises(DataError, match=r"val: the loader is empty: it has no batch \(cure: .*drop_last"):
        open_feed(loader, name="val")


def test_an_empty_loader_without_a_length_is_no_silent_epoch():
    with pytest.raises(DataError, match="train: no batch in epoch 1: the loader is empty"):
        values(open_feed(iter([])))


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        (None, "the loader is a NoneType"),
        ("train", "the loader is a str"),
        ({"x": torch.zeros(2)}, "the loader is a dict"),
        (torch.zeros(3, 2), "the loader is a Tensor"),
        (Plain(), r"a dataset returns single items.*cure: pass DataLoader\(plain, batch_size=32, shuffle=True\)"),
    ],
)
def test_what_is_no_loader_is_named(loader: Any, said: str):
    with pytest.raises(DataError, match=f"train: {said}"):
        open_feed(loader)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_dataset_names_the_place(workers: int):
    feed = open_feed(DataLoader(Broken(), batch_size=2, num_workers=workers), name="val")
    batches = feed.epoch(1)
    assert [next(batches).tolist() for _ in range(3)] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(DataError, match=r"val, epoch 2, batch 4, items \[6, 7\]: KeyError: 'seven'$") as caught:
        next(batches)
    assert isinstance(caught.value.__cause__, KeyError)
    assert feed.indices(1, 3) == [6, 7]


def test_stop_iteration_in_a_dataset_does_not_end_the_epoch():
    class Stops(Plain):
        def __getitem__(self, index: int) -> Tensor:
            raise StopIteration

    with pytest.raises(DataError, match=r"batch 1, items .* the dataset raised StopIteration"):
        values(open_feed(DataLoader(Stops())))


class Deadly(Plain):
    def __getitem__(self, index: int) -> Tensor:
        if index == 2 and torch.utils.data.get_worker_info():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


@worker_dies
def test_a_killed_worker_is_named():
    feed = open_feed(DataLoader(Deadly(4), batch_size=2, num_workers=1))
    with pytest.raises(DataError, match=r"batch \d, items .*worker \d+ ended by SIGKILL.*memory"):
        values(feed)


class DeadlyWhenTold(Deadly):
    go: Path

    def __getitem__(self, index: int) -> Tensor:
        while index == 2 and not self.go.exists():
            time.sleep(0.002)
        return super().__getitem__(index)


@worker_dies
def test_a_worker_that_dies_during_a_step_is_told_at_the_next_batch(tmp_path: Path):
    """torch raises at once, wherever the main process is: an error of the step then, which it leaves half done."""
    data = DeadlyWhenTold(8)
    data.go = tmp_path / "go"
    batches = open_feed(DataLoader(data, num_workers=1)).epoch(0)
    assert next(batches).tolist() == [0.0]
    data.go.touch()
    while torch.multiprocessing.active_children():  # the step
        time.sleep(0.002)
    with pytest.raises(DataError, match=r"batch \d, items .*worker \d+ ended by SIGKILL.*memory"):
        list(batches)


class Slow(Plain):
    hangs: Path | None = None  # is made then

    def __getitem__(self, index: int) -> Tensor:
        if index == 2:
            if self.hangs is not None:
                self.hangs.touch()
            time.sleep(60)
        return super().__getitem__(index)


@pytest.mark.parametrize("whose", ["the loader's", "ours"])
def test_a_hanging_worker_is_found_and_ended(whose: str, tmp_path: Path):
    timeout = {"timeout": 0.3}
    mine, default = (timeout, {}) if whose == "the loader's" else ({}, timeout)
    data = Slow(4)
    data.hangs = tmp_path / "hangs"
    feed = open_feed(DataLoader(data, batch_size=2, num_workers=1, **mine), **default)
    began = time.monotonic()
    message = r"batch 2.*timed out after 0\.3 seconds.*timeout=seconds"
    with timed_out_after(data.hangs), pytest.raises(DataError, match=message):
        values(feed)
    assert time.monotonic() - began < 20  # against the 60 that the worker would sleep
    assert torch.multiprocessing.active_children() == []


def test_workers_leave_signals_to_the_main_process():
    feed = open_feed(DataLoader(Handlers(1), num_workers=1, collate_fn=default_collate))
    assert next(feed.epoch(0)).tolist() == [[False, True, True]]


class Handlers(Plain):
    def __getitem__(self, index: int) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        term, *others = (signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1))
        return torch.tensor([term is signal.SIG_IGN, *(other is signal.SIG_IGN for other in others)])


def test_workers_left_in_the_middle_end_at_once():
    assert inspect.signature(open_feed).parameters["timeout"].default > 0
    feed = open_feed(DataLoader(Slow(4), batch_size=2, num_workers=2))
    batches = feed.epoch(0)
    next(batches)
    began = time.monotonic()
    batches.close()  # pyright: ignore[reportAttributeAccessIssue]  # a generator
    assert time.monotonic() - began < 20
    assert torch.multiprocessing.active_children() == []


class Deaf(Plain):
    def __getitem__(self, index: int) -> Tensor:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return super().__getitem__(index)


@worker_dies
def test_a_worker_that_does_not_obey_is_killed_without_an_error():
    feed = open_feed(DataLoader(Deaf(8), batch_size=1, num_workers=2))
    batches = feed.epoch(0)
    assert next(batches) == 0.0
    batches.close()  # pyright: ignore[reportAttributeAccessIssue]  # a generator
    time.sleep(0.01)  # where torch would raise: "DataLoader worker is killed by signal"
    assert torch.multiprocessing.active_children() == []
    assert values(open_feed(DataLoader(Plain(2), num_workers=1))) == [[0.0], [1.0]]


def trainer(reading: int, writing: int, late: bool) -> None:
    os.close(reading)
    begin = workers._WorkerStart.__call__
    if late:  # as on a busy machine: the second worker begins when its trainer is gone

        def begin_late(start: Any, worker: int) -> None:
            while worker and os.getppid() == mine:
                time.sleep(0.01)
            begin(start, worker)

        mine = os.getpid()
        workers._WorkerStart.__call__ = begin_late  # type: ignore[method-assign]  # in this process alone
    batches = open_feed(DataLoader(Slow(4), num_workers=2)).epoch(0)
    next(batches)
    os.write(writing, b"!")
    time.sleep(60)
    batches.close()  # pyright: ignore[reportAttributeAccessIssue]  # not reached; until here the workers are held


@pytest.mark.parametrize("late", [False, True], ids=["at work", "not begun"])
def test_a_killed_trainer_leaves_no_worker_behind(late: bool):
    reading, writing = os.pipe()
    process = multiprocessing.get_context("fork").Process(target=trainer, args=(reading, writing, late))
    process.start()
    os.close(writing)
    assert os.read(reading, 1) == b"!"
    process.kill()
    # When nobody holds the other end any more, the workers are gone, one of them asleep; it would sleep 60 s.
    assert select.select([reading], [], [], 30.0)[0]
    assert os.read(reading, 1) == b""
    os.close(reading)
    process.join()


# Positions of another loader.


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (lambda: open_feed(DataLoader(Plain(10), 5)), "batch_size was 2 and is 5"),
        (lambda: open_feed(DataLoader(Plain(12), 2)), "items was 10 and is 12"),
        (lambda: open_feed(DataLoader(Plain(10), 2, shuffle=True)), "order was 'SequentialSampler' and is 'RandomS"),
        (lambda: open_feed(DataLoader(Plain(10), 2), seed=1), "seed was 0 and is 1"),
        (lambda: open_feed([1, 2]), "kind was 'indices' and is 'sequence'"),
        (lambda: open_feed(DataLoader(Plain(10), 2), first=3), "limit was None and is 3"),
    ],
)
def test_a_position_of_another_loader_is_a_mismatch(other: Any, said: str):
    stored = json.loads(json.dumps(open_feed(DataLoader(Plain(10), 2)).position(0, 3)))
    with pytest.raises(Mismatch, match=f"train: .*{said}"):
        other().restore(stored)


def test_a_position_of_the_same_loader_fits_whatever_the_workers():
    stored = json.loads(json.dumps(open_feed(DataLoader(Plain(10), 2), first=3).position(0, 3)))
    open_feed(DataLoader(Plain(10), 2, num_workers=2), first=3).restore(stored)


def test_a_start_behind_the_end_is_a_mismatch():
    with pytest.raises(Mismatch, match="7 batches of epoch 2 are done, but the loader has only 5 per epoch"):
        open_feed(DataLoader(Plain(10), 2)).epoch(1, 7)
    with pytest.raises(ConfigError, match="must be an int of at least 0"):
        open_feed([1]).epoch(0, -1)


# Limits.


def test_limit_cuts_every_epoch():
    feed = open_feed(DataLoader(Plain(10), 2, shuffle=True), first=3)
    whole = open_feed(DataLoader(Plain(10), 2, shuffle=True))
    assert feed.length == 3
    for epoch, start in itertools.product(range(2), range(4)):
        assert values(feed, epoch, start) == values(whole, epoch)[start:3]
    assert open_feed([1, 2, 3], first=9).length == 3
    assert open_feed([1, 2, 3], first=0.01).length == 1
    assert values(open_feed([1, 2, 3], first=1.0)) == [1, 2, 3]


class Eager(Stateful):
    """Takes its state up as soon as it is asked for an iterator, and begins anew without one."""

    def __iter__(self) -> Iterator[Tensor]:
        self.epoch, self.place = (self.epoch, self.place) if self.resumed else (self.epoch + 1, 0)
        self.resumed = False
        return self.batches()

    def batches(self) -> Iterator[Tensor]:
        while self.place < 4:
            self.place += 1
            yield torch.tensor([self.epoch, self.place, float(torch.rand(()))])


class Endless(StatefulStream):
    def __iter__(self) -> Iterator[Tensor]:
        while True:
            self.place += 1
            yield torch.tensor(self.place)


LIMITED: dict[str, Callable[[], Any]] = {
    "stateful": Stateful,
    "of known length": Counted,
    "runs out": RunsOut,
    "eager": Eager,
    "endless": Endless,
    "dataset": lambda: DataLoader(StatefulStream(), batch_size=2),
    "iterator": lambda: iter(Endless()),
    "iterable": Reiterable,
}


@pytest.mark.parametrize("count", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("name", LIMITED)
def test_limited_epochs_are_resumed_at_their_borders(name: str, count: int):
    """Whatever a loader does after an epoch that was not run to its end, it does the same after a restart."""

    def opened() -> Feed:
        return open_feed(LIMITED[name](), first=count)

    feed = opened()
    whole: list[list[Any]] = []
    places: list[tuple[int, int, str]] = []
    for epoch in range(4):
        places.append((epoch, 0, json.dumps(feed.position(epoch, 0))))
        whole.append(values(feed, epoch))
        if len(whole[epoch]) == count:  # else nobody knows there that it is the end
            places.append((epoch, count, json.dumps(feed.position(epoch, count))))
    for epoch, start, stored in places:
        again = opened()
        again.restore(json.loads(stored))
        twice = opened()
        twice.restore(again.position(epoch, start) if start else json.loads(stored))
        assert values(twice, epoch, start) == values(again, epoch, start) == whole[epoch][start:]
        twice = opened()
        twice.restore(again.position(epoch + 1, 0))
        if epoch < 3:
            assert values(twice, epoch + 1) == values(again, epoch + 1) == whole[epoch + 1]


def test_an_iterator_whose_place_is_not_known_is_not_begun_anew():
    feed = open_feed(iter(Endless()), first=3)
    with pytest.raises(DataError, match="the iterator cannot return to batch 1 of epoch 2"):
        values(feed, 1)
    values(feed, 0)
    other = open_feed(iter(Endless()), first=3)
    other.restore(feed.position(1, 0))
    assert values(other, 1) == values(feed, 1)


@pytest.mark.parametrize("amount", [0, -1, 0.0, 1.5, True])
def test_limit_refuses_other_amounts(amount: Any):
    with pytest.raises(ConfigError, match=f"train: {amount} batches"):
        open_feed([1, 2], first=amount)


def test_a_share_needs_a_length():
    found = r"train: 0\.5, a share of the batches, needs len\(loader\), and the loader has none"
    with pytest.raises(ConfigError, match=found + r""".*\(cure: .*limit_batches=\{"train": 100\}, or ov"""):
        open_feed(itertools.count(), first=0.5)
    with pytest.raises(ConfigError, match=found):
        held(open_feed(itertools.count()), 0.5)


@pytest.mark.parametrize(("first", "count"), [(0.1, 1), (0.5, 3), (1.0, 7), (10, 7)])
def test_a_share_of_the_batches_is_held(first: Any, count: int):
    feed = held(open_feed(list(range(7))), first)
    assert (list(feed.epoch(3)), feed.facts["overfit"]) == (list(range(count)), count)


def test_overfit_holds_the_first_batches_unshuffled():
    dataset = Augmented(10)
    feed = held(open_feed(DataLoader(dataset, 2, shuffle=True)), 2)
    first = values(feed, 0)
    assert [[int(item) for item in batch] for batch in first] == [[0, 1], [2, 3]] or first[0][0] == 0
    loaded = len(dataset.loaded)
    assert values(feed, 5) == first
    assert values(feed, 1, 1) == first[1:]
    assert len(dataset.loaded) == loaded


def numbers(feed: Any, epoch: int, start: int = 0) -> list[int]:
    return [int(batch.rows if isinstance(batch, Share) else batch) for batch in feed.epoch(epoch, start)]


def listed() -> list[Tensor]:
    return list(torch.arange(1, 6).view(5, 1))


def counting() -> Placed:
    return Placed(lambda at: torch.tensor([at]), 5)


@pytest.mark.parametrize("make", [counting, lambda: iter(listed())])
def test_held_batches_are_those_of_the_beginning_after_a_resume(make: Callable[[], Any]):
    first, again = (held(open_feed(make()), 2) for _ in range(2))
    assert numbers(first, 0) == numbers(first, 1) == [1, 2]
    again.restore(first.position(1, 1))
    assert (numbers(again, 1, 1), numbers(again, 2)) == ([2], [1, 2])


@pytest.mark.parametrize("make", [counting, listed])
@pytest.mark.parametrize("kind", ["own", "rows"])
def test_a_limit_of_a_divided_loader_loses_no_batch_after_a_resume(kind: str, make: Callable[[], Any]):
    """The run has ended at the limit of its first epoch, before the second one began."""

    def divided() -> Any:
        feed, mesh = open_feed(make()), ps.parallel.Mesh(data=1, rank=0)
        made = shares.OwnFeed(feed, mesh) if kind == "own" else shares.RowsFeed(feed, mesh, checks_end=False)
        return made.cut(3)

    whole, first, again = divided(), divided(), divided()
    expected = [numbers(whole, epoch) for epoch in range(3)]
    assert [numbers(first, 0)] == expected[:1]
    again.restore(json.loads(json.dumps(first.position(0, 3))))
    assert numbers(again, 0, 3) == []
    assert [numbers(again, epoch) for epoch in (1, 2)] == expected[1:]
    if kind == "rows":
        with pytest.raises(Mismatch, match="limit was 3 and is None"):
            open_feed(make()).restore(first.position(0, 3))


# Batches to a device.


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Graph:
    nodes: Tensor
    name: str = "g"


class Encoding(collections.UserDict[str, Any]):
    """As Hugging Face's BatchEncoding: a UserDict with more in it than its data."""

    def __init__(self, data: dict[str, Any], encodings: str = "") -> None:
        super().__init__(data)
        self.encodings = encodings


class Sealed(collections.abc.Mapping[str, Any]):
    def __init__(self, data: dict[str, Any]) -> None:
        self._data = data

    def __getitem__(self, key: str) -> Any:
        return self._data[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._data)

    def __len__(self) -> int:
        return len(self._data)


ONE = torch.ones(2)
NESTED = [
    ONE,
    (ONE, [ONE, {"a": ONE, "names": ["x"], "none": None, "n": 3}]),
    Pair(ONE, {"y": ONE}),
    collections.OrderedDict(b=ONE, a=ONE),
    collections.defaultdict(list, a=ONE),
    Encoding({"ids": ONE, "text": "abc"}, encodings="kept"),
    Graph(ONE),
    torch.nn.utils.rnn.pack_sequence([ONE, ONE[:1]]),
]


@pytest.mark.parametrize("batch", NESTED, ids=lambda batch: type(batch).__name__)
def test_a_batch_keeps_its_classes_on_the_way(batch: Any):
    assert to_device(batch, "cpu") is batch
    moved = to_device(batch, torch.zeros(1, device="meta"))
    assert type(moved) is type(batch)
    assert moved is not batch
    if isinstance(batch, Encoding):
        assert (moved["ids"].device.type, batch["ids"].device.type) == ("meta", "cpu")
        assert moved.encodings == "kept"
    if isinstance(batch, Graph):
        assert (moved.nodes.device.type, moved.name) == ("meta", "g")
    if isinstance(batch, Pair):
        assert moved.y["y"].device.type == "meta"
    if isinstance(batch, collections.defaultdict):
        assert moved.default_factory is list
    if isinstance(batch, collections.OrderedDict):
        assert list(moved) == ["b", "a"]


def test_a_device_that_is_not_there_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"device: no device 'nope' here"):
        to_device([ONE], "nope")


def test_an_immutable_mapping_becomes_a_dict():
    moved = to_device(Sealed({"x": ONE}), "meta")
    assert type(moved) is dict
    assert moved["x"].device.type == "meta"


def test_arrays_of_numbers_become_tensors():
    frozen = np.arange(3.0)
    frozen.flags.writeable = False
    batch = to_device({"a": np.zeros(2, dtype=np.int32), "b": frozen, "names": np.array(["x"])}, "cpu")
    assert (batch["a"].dtype, batch["b"].tolist()) == (torch.int32, [0.0, 1.0, 2.0])
    assert isinstance(batch["names"], np.ndarray)


def test_what_cannot_be_moved_is_named():
    with pytest.raises(DataError, match=r"batch/1/x: a Tensor cannot be moved: .*meta"):
        to_device((ONE, {"x": torch.zeros(2, device="meta")}), "cpu")


def test_a_state_is_moved_without_its_key():
    program = ps.program(torch.nn.Linear(2, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1))
    moved = to_device(program.init(seed=3), "meta")
    assert {leaf.device.type for leaf in ps.tree.leaves(moved._replace(key=moved.step))} == {"meta"}
    assert moved.key.tolist() == [3, 0]
    assert to_device(moved, "meta") is moved


def test_what_cannot_be_pinned_is_left_to_the_move(monkeypatch: pytest.MonkeyPatch):
    """As torch has it on CUDA: only dense memory is pinned, and that of an expanded tensor cannot be filled."""
    pinned: list[Tensor] = []

    def pin(leaf: Tensor) -> Tensor:
        assert leaf.layout is torch.strided
        assert leaf.is_contiguous()
        pinned.append(leaf)
        return leaf

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    monkeypatch.setattr(Tensor, "is_pinned", lambda leaf: False)
    sparse = torch.eye(2).to_sparse()
    assert _pinned(sparse) is sparse
    mask = torch.ones(1, 3).expand(2, 3)
    assert torch.equal(_pinned(mask), mask)
    assert len(pinned) == 1


def test_the_device_of_a_tree_is_not_that_of_its_key():
    state = {"key": torch.zeros(2), "w": torch.zeros(2, device="meta")}
    assert to_device(ONE, state).device.type == "meta"
    assert to_device(ONE, {"key": ONE}) is ONE


def test_prefetching_changes_no_batch(device: torch.device):
    batches = [{"x": torch.full((3,), float(i)), "n": i, "a": np.arange(2)} for i in range(7)]
    moved = list(Prefetched(iter(batches), device, depth=3))
    assert [batch["n"] for batch in moved] == list(range(7))
    assert [batch["x"].tolist() for batch in moved] == [[float(i)] * 3 for i in range(7)]
    assert {batch["x"].device.type for batch in moved} == {device.type}


def test_prefetching_raises_where_the_batch_would_have_come(device: torch.device):
    def failing() -> Iterator[Tensor]:
        yield torch.zeros(1)
        yield torch.ones(1)
        raise DataError("third")

    seen: list[float] = []
    with pytest.raises(DataError, match="third"):
        seen.extend(float(batch) for batch in Prefetched(failing(), device, depth=2))
    assert seen == [0.0, 1.0]


# Batches that are not like the first.


FIRST = {"x": torch.zeros(4, 3), "y": (torch.zeros(4, dtype=torch.int64), None), "names": ["a", "b"], "n": 1}


def changed(**new: Any) -> dict[str, Any]:
    return {**FIRST, **new}


def test_sizes_may_differ_from_batch_to_batch():
    first = check_batch(FIRST)
    ragged = changed(x=torch.zeros(2, 9), y=(torch.zeros(2, dtype=torch.int64), None), names=["a"], n=7)
    assert check_batch(ragged, first) == first
    assert check_batch(dict(reversed(FIRST.items())), first) == first


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (None, "batch is None; batch 1 had a dict of 4"),
        (3.0, "batch is a float; batch 1 had a dict of 4"),
        ("text", "batch is a str; batch 1 had a dict of 4"),
        (changed(x=None), "batch/x is None; batch 1 had a float32 tensor of rank 2"),
        (changed(x=torch.zeros(4, 3).double()), "batch/x is a float64 tensor of rank 2; batch 1 had a float32 tensor"),
        (changed(x=torch.zeros(4)), "batch/x is a float32 tensor of rank 1; batch 1 had a float32 tensor of rank 2"),
        (changed(y=(torch.zeros(4, dtype=torch.int64),)), "batch/y has 1 items; batch 1 had 2"),
        (changed(y=[1, 2]), "batch/y is a list of 2; batch 1 had a tuple of 2"),
        ({"x": FIRST["x"]}, r"batch misses \['n', 'names', 'y'\]; batch 1 had \['n', 'names', 'x', 'y'\]"),
        (changed(z=1), r"batch has the new \['z'\]; batch 1 had"),
        (changed(n="1"), "batch/n is a str; batch 1 had an int"),
    ],
)
def test_a_batch_of_another_structure_is_named_with_its_path(batch: Any, said: str):
    first = check_batch(FIRST)
    with pytest.raises(DataError, match=f"train, epoch 1, batch 5: {said}"):
        check_batch(batch, first, where="train, epoch 1, batch 5")


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (None, "batch is None without a tensor"),
        (1.5, "batch is a float without a tensor"),
        ({"x": None}, "batch is a dict of 1 without a tensor"),
        ((torch.zeros(1), torch.zeros(1, device="meta")), "tensors on 2 devices: batch/0 on cpu, batch/1 on meta"),
        ([torch.zeros(1, device="meta")], "batch/0 is on the meta device"),
    ],
)
def test_a_first_batch_that_cannot_be_trained_on_is_named(batch: Any, said: str):
    with pytest.raises(DataError, match=f"batch: {said}"):
        check_batch(batch)


def test_dataclasses_and_arrays_are_looked_into():
    first = check_batch(Graph(torch.zeros(3)))
    assert check_batch(Graph(torch.zeros(5), "other"), first) == first
    with pytest.raises(DataError, match="batch/nodes is None"):
        check_batch(Graph(None), first)  # pyright: ignore[reportArgumentType]  # the fault
    with pytest.raises(DataError, match="batch/1 is an int64 array of rank 1; batch 1 had a float64 array"):
        check_batch((ONE, np.arange(3)), check_batch((ONE, np.zeros(3))))
