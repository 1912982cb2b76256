"""Which loaders a resumed run continues exactly: the table of the guide on data, with the libraries themselves."""

from __future__ import annotations

import functools
import io
import itertools
import json
import random
import tarfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

import purestep as ps
from purestep.data import Feed, open_feed

ROWS = 48


def numbers(batch: Any) -> list[float]:
    while isinstance(batch, dict | list | tuple):
        batch = batch["x"] if isinstance(batch, dict) else batch[0]
    return torch.as_tensor(batch).flatten().tolist()


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelname == "WARNING" and record.name == "purestep"]


# --- set_epoch before the order ---------------------------------------------------------------------------------------


class Growing(Dataset[Tensor]):
    """A curriculum: it is longer in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 16 * (self.epoch + 1)

    def __getitem__(self, index: int) -> Tensor:
        assert index < len(self)
        return torch.ones(1) * index


class Backwards:
    """A sampler of the user over a dataset whose length it reads."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self.dataset) - 1, -1, -1))


WORKERS: dict[str, dict[str, Any]] = {
    "none": {},
    "two": {"num_workers": 2},
    "living on": {"num_workers": 1, "persistent_workers": True},
}


def growing(how: str, **workers: Any) -> DataLoader[Any]:
    dataset = Growing()
    sampler: Any = Backwards(dataset) if how == "sampler" else None
    return DataLoader(dataset, 4, shuffle=how == "shuffled", sampler=sampler, **workers)


@pytest.mark.parametrize("workers", WORKERS.values(), ids=WORKERS)
@pytest.mark.parametrize("how", ["in order", "shuffled", "sampler"])
def test_a_dataset_that_grows_is_told_the_epoch_before_its_order_is_drawn(how: str, workers: dict[str, Any]) -> None:
    feed = open_feed(growing(how, **workers), seed=2)
    whole = [[numbers(batch) for batch in feed.epoch(epoch)] for epoch in range(3)]
    assert [len(batches) for batches in whole] == [4, 8, 12]
    for epoch, batches in enumerate(whole):
        assert sorted(itertools.chain(*batches)) == list(range(16 * (epoch + 1)))
    stored = json.loads(json.dumps(feed.position(2, 9)))
    feed.close()
    again = open_feed(growing(how, **workers), seed=2)
    again.restore(stored)
    assert [numbers(batch) for batch in again.epoch(2, 9)] == whole[2][9:]
    again.close()


def test_a_dataset_that_shrinks_is_never_indexed_behind_its_end() -> None:
    class Shrinking(Growing):
        def __len__(self) -> int:
            return 16 * (3 - self.epoch)

    feed = open_feed(DataLoader(Shrinking(), 4, shuffle=True))
    assert [len(list(feed.epoch(epoch))) for epoch in range(3)] == [12, 8, 4]
    assert [feed.count(epoch) for epoch in (2, 0)] == [4, 12]
    assert feed.cut(5).count(2) == 4


def test_a_dataset_that_has_served_another_run_begins_with_the_first_epoch() -> None:
    loader = growing("in order")
    stored = open_feed(loader).position(0, 0)
    list(open_feed(loader).epoch(2))
    again = open_feed(loader)
    again.restore(stored)  # compares the number of items
    assert (again.length, len(list(again.epoch(0)))) == (4, 4)


def test_a_run_over_a_curriculum_resumes_inside_an_epoch(tmp_path: Path) -> None:
    class Pairs(Growing):
        def __getitem__(self, index: int) -> Any:
            return torch.ones(1) * index / 50, torch.ones(1)

    program = ps.program(torch.nn.Linear(1, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1, momentum=0.9))

    def run(**settings: Any) -> ps.FitResult:
        loader = DataLoader(Pairs(), 4, shuffle=True)
        return ps.fit(program.init(), loader, program, epochs=3, progress=False, **settings)

    whole = run()
    assert whole.history["step"] == [4, 12, 24]

    def stop(event: Any) -> Any:
        return ps.Stop("here") if isinstance(event, ps.events.StepEnd) and event.updates == 17 else None

    assert run(snapshots=tmp_path, callbacks=[stop]).epochs == 2
    again = run(snapshots=tmp_path)
    assert again.history == whole.history
    assert torch.equal(again.state.params["weight"], whole.state.params["weight"])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [Dataset, IterableDataset])
def test_what_set_epoch_draws_follows_the_epoch(kind: Any, workers: int) -> None:
    class Drawing(kind):  # pyright: ignore[reportGeneralTypeIssues, reportUntypedBaseClass]
        def set_epoch(self, epoch: int) -> None:
            self.drawn = [torch.rand(()).item(), random.random(), float(np.random.rand())]

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Any:
            return torch.tensor(self.drawn)

        def __iter__(self) -> Any:
            return iter([torch.tensor(self.drawn)])

    def drawn() -> list[Any]:
        feed = open_feed(DataLoader(Drawing(), 2, num_workers=workers), seed=1)
        found = [[batch.tolist() for batch in feed.epoch(epoch)] for epoch in (0, 1)]
        feed.close()
        return found

    first = drawn()
    assert first == drawn()
    assert first[0] != first[1]
    for epoch in first:
        assert len({tuple(row) for batch in epoch for row in batch}) == 1


# --- streams that seed themselves -------------------------------------------------------------------------------------


def by_clock() -> Any:
    return random.Random(time.time_ns())


class Stream(IterableDataset[Tensor]):
    def __init__(self, generator: Callable[[], Any], rows: int = ROWS) -> None:
        self.generator, self.rows = generator, rows

    def __iter__(self) -> Iterator[Tensor]:
        rows = [float(row) for row in range(self.rows)]
        self.generator().shuffle(rows)
        yield from map(torch.tensor, rows)


CLOCKS: dict[str, Callable[[], Any]] = {
    "clock": by_clock,
    "Random()": random.Random,
    "SystemRandom": random.SystemRandom,
    "default_rng()": np.random.default_rng,
}
SEEDED: dict[str, Callable[[], Any]] = {
    "Random(3)": lambda: random.Random(3),
    "random": lambda: random,
    "numpy": lambda: np.random,
    "from the seed": lambda: random.Random(int(torch.randint(0, 1 << 30, ()))),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", [*CLOCKS, *SEEDED])
def test_a_stream_that_seeds_itself_is_told_in_a_resumed_run(
    name: str, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    def opened() -> Feed:
        return open_feed(DataLoader(Stream((CLOCKS | SEEDED)[name]), 8, num_workers=workers), name="mine", seed=1)

    feed = opened()
    whole = [[numbers(batch) for batch in feed.epoch(epoch)] for epoch in range(2)]
    feed.close()
    assert not told(caplog)
    again = opened()
    again.restore(json.loads(json.dumps(feed.position(1, 2))))
    found = [numbers(batch) for batch in again.epoch(1, 2)]
    again.close()
    assert len(told(caplog)) == (name in CLOCKS)
    for message in told(caplog):
        assert message.startswith("mine: epoch 2 begins with another batch than in the interrupted run")
        assert "(cure: " in message
    if name in SEEDED:
        assert found == whole[1][2:]


@pytest.mark.parametrize("name", [*CLOCKS, *SEEDED])
def test_an_iterator_that_seeds_itself_is_told_in_a_resumed_run(name: str, caplog: pytest.LogCaptureFixture) -> None:
    def opened() -> Feed:
        # So many rows that two orders hardly begin with the same one.
        rows = iter(Stream((CLOCKS | SEEDED)[name], 100_000))
        return open_feed(map(torch.as_tensor, rows), name="mine", seed=1, first=4)

    feed = opened()
    whole = [[float(batch) for batch in feed.epoch(epoch)] for epoch in range(2)]
    again, once_more = opened(), opened()
    again.restore(json.loads(json.dumps(feed.position(1, 2))))
    once_more.restore(json.loads(json.dumps(again.position(1, 2))))  # saved again before the first batch
    found = [float(batch) for batch in once_more.epoch(1, 2)]
    assert len(told(caplog)) == (name in CLOCKS)
    for message in told(caplog):
        assert message.startswith("mine: epoch 1 begins with another batch than in the interrupted run")
    if name in SEEDED:
        assert found == whole[1][2:]


def test_a_stream_that_others_feed_loses_no_row() -> None:
    """Its rows come from a queue of the module: who starts it twice takes rows away."""
    rows = list(map(torch.tensor, range(20)))

    class Queue(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            while rows:
                yield rows.pop(0)

    batches = [numbers(batch) for batch in open_feed(DataLoader(Queue(), 4), name="mine").epoch(0)]
    assert [row for batch in batches for row in batch] == [*range(20)]


def test_a_stream_begins_once() -> None:
    class Once(IterableDataset[Tensor]):
        def __init__(self) -> None:
            self.rows = (torch.tensor(float(row)) for row in range(4))
            self.begun = 0

        def __iter__(self) -> Iterator[Tensor]:
            self.begun += 1
            return self.rows

    stream = Once()
    assert [numbers(batch) for batch in open_feed(DataLoader(stream, 2)).epoch(0)] == [[0.0, 1.0], [2.0, 3.0]]
    assert stream.begun == 1


# --- a state that is not the whole place ------------------------------------------------------------------------------


class Lossy(IterableDataset[Tensor]):
    """A stream with a shuffle buffer that its state does not hold, as Hugging Face's."""

    def __init__(self) -> None:
        self.at = self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator[Tensor]:
        generator, buffer = random.Random(self.epoch), list[int]()
        while self.at < ROWS or buffer:
            while self.at < ROWS and len(buffer) < 16:
                buffer.append(self.at)
                self.at += 1
            yield torch.tensor(float(buffer.pop(generator.randrange(len(buffer)))))
        self.at = 0


def resumed(make: Callable[[], Any], epoch: int, start: int, **settings: Any) -> tuple[list[Any], list[Any]]:
    """The batches from a place on: of the run that came there, and of one that was resumed there."""
    feed = open_feed(make(), name="mine", seed=3, **settings)
    for before in range(epoch):
        list(feed.epoch(before))
    whole, place = list[Any](), ""
    for batch in feed.epoch(epoch):
        whole.append(numbers(batch))
        if len(whole) == start:
            place = json.dumps(feed.position(epoch, start))
    feed.close()
    again = open_feed(make(), name="mine", seed=3, **settings)
    again.restore(json.loads(place))
    found = [numbers(batch) for batch in again.epoch(epoch, start)]
    again.close()
    return whole[start:], found


@pytest.mark.parametrize("start", [2, 5])
def test_a_state_that_loses_rows_is_told_in_the_resumed_run(start: int, caplog: pytest.LogCaptureFixture) -> None:
    expected, found = resumed(lambda: DataLoader(Lossy(), 8), 1, start)
    assert found != expected
    (message,) = told(caplog)
    assert message.startswith("mine: after load_state_dict the loader goes on with another batch")
    assert "(cure: pass ps.open_feed(loader, replay=True)" in message


def test_a_replayed_stream_is_exact(caplog: pytest.LogCaptureFixture) -> None:
    for start in (2, 5):
        expected, found = resumed(lambda: DataLoader(Lossy(), 8), 1, start, replay=True)
        assert found == expected
    assert not told(caplog)


def test_fit_takes_a_feed_that_replays(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    program = ps.program(torch.nn.Linear(1, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(1e-4, momentum=0.9))

    def collate(rows: list[Tensor]) -> Any:
        x = torch.stack(rows)[:, None]
        return x, 2 * x

    def run(**settings: Any) -> ps.FitResult:
        feed = open_feed(DataLoader(Lossy(), 8, collate_fn=collate), replay=True)
        return ps.fit(program.init(), feed, program, epochs=2, progress=False, **settings)

    def stop(event: Any) -> Any:
        return ps.Stop("here") if isinstance(event, ps.events.StepEnd) and event.updates == 8 else None

    whole = run()
    run(snapshots=tmp_path, callbacks=[stop])
    again = run(snapshots=tmp_path)
    assert torch.equal(again.state.params["weight"], whole.state.params["weight"])
    assert not told(caplog)


# --- the table of the guide -------------------------------------------------------------------------------------------


class Plain(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        order = torch.randperm(ROWS)
        info = torch.utils.data.get_worker_info()
        yield from order.float() if info is None else torch.arange(ROWS).float()[info.id :: info.num_workers]


class Indexed(Dataset[Tensor]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([float(index), torch.rand(()).item()])


def hugging_face(*, streams: bool, shuffled: bool = False, workers: int = 0) -> Any:
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_dict({"x": [float(row) for row in range(ROWS)]})
    if not streams:
        return DataLoader(rows.with_format("torch"), 4, shuffle=True, num_workers=workers)
    stream = rows.to_iterable_dataset(num_shards=4).with_format("torch")
    return DataLoader(stream.shuffle(seed=1, buffer_size=16) if shuffled else stream, 4, num_workers=workers)


def torchdata(dataset: Any, workers: int = 0) -> Any:
    loader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
    return loader(dataset, 4, shuffle=not isinstance(dataset, IterableDataset), num_workers=workers)


def webdataset(folder: Path, generator: Any, workers: int = 0) -> Any:
    wds = pytest.importorskip("webdataset")
    for shard in range(2):
        path = folder / f"{shard}.tar"
        if not path.exists():
            with tarfile.open(path, "w") as file:
                for row in range(shard, ROWS, 2):
                    text = str(float(row)).encode()
                    entry = tarfile.TarInfo(f"{row:04}.txt")
                    entry.size = len(text)
                    file.addfile(entry, io.BytesIO(text))
    shards = [str(folder / f"{shard}.tar") for shard in range(2)]
    dataset = wds.WebDataset(shards, shardshuffle=False, empty_check=False).shuffle(16, initial=16, rng=generator)
    return DataLoader(dataset.map(_parsed), 4, num_workers=workers)


def _parsed(sample: Any) -> Tensor:
    return torch.tensor(float(sample["txt"]))


EXACT: dict[str, Callable[[Path], Any]] = {
    "indices": lambda folder: DataLoader(Indexed(), 4, shuffle=True),
    "indices, workers": lambda folder: DataLoader(Indexed(), 4, shuffle=True, num_workers=2),
    "stream": lambda folder: DataLoader(Plain(), 4),
    "stream, workers": lambda folder: DataLoader(Plain(), 4, num_workers=2),
    "torchdata, indices": lambda folder: torchdata(Indexed()),
    "torchdata, indices, workers": lambda folder: torchdata(Indexed(), 2),
    "torchdata, stream": lambda folder: torchdata(Ordered()),
    "torchdata, stream, workers": lambda folder: torchdata(Ordered(), 2),
    "Hugging Face, indices": lambda folder: hugging_face(streams=False),
    "Hugging Face, stream": lambda folder: hugging_face(streams=True),
    "Hugging Face, stream, workers": lambda folder: hugging_face(streams=True, workers=2),
    "Hugging Face, shuffled, workers": lambda folder: hugging_face(streams=True, shuffled=True, workers=2),
    "webdataset, random": lambda folder: webdataset(folder, random),
    "webdataset, random, workers": lambda folder: webdataset(folder, random, 2),
}
INEXACT: dict[str, tuple[Callable[[Path], Any], str]] = {
    "Hugging Face, shuffled": (lambda folder: hugging_face(streams=True, shuffled=True), "after load_state_dict"),
    "webdataset": (lambda folder: webdataset(folder, None), "begins with another batch"),
    "webdataset, workers": (lambda folder: webdataset(folder, None, 2), "begins with another batch"),
}


class Ordered(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        info = torch.utils.data.get_worker_info()
        yield from (
            torch.arange(ROWS).float() if info is None else torch.arange(ROWS).float()[info.id :: info.num_workers]
        )


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore:'set_vital':UserWarning", "ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("name", EXACT)
def test_a_loader_that_the_guide_calls_exact(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for epoch, start in ((0, 5), (1, 3)):
        expected, found = resumed(lambda: EXACT[name](tmp_path), epoch, start)
        assert found == expected
    assert not told(caplog)


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("name", INEXACT)
def test_a_loader_that_the_guide_calls_inexact_is_told(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make, said = INEXACT[name]
    expected, found = resumed(lambda: make(tmp_path), 1, 3)
    assert found != expected
    assert any(said in message for message in told(caplog))


@pytest.mark.peer
def test_a_shuffled_stream_of_hugging_face_that_is_replayed_is_exact(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make = functools.partial(INEXACT["Hugging Face, shuffled"][0], tmp_path)
    for epoch, start in ((0, 5), (1, 3)):
        expected, found = resumed(make, epoch, start, replay=True)
        assert found == expected
    assert not told(caplog)
