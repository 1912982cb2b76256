"""``len(loader)`` is a hint: a run is the same whatever it says, and the loader's end alone ends an epoch."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_trees_close
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import purestep as ps
from purestep import events
from purestep.data import Prefetched, open_feed
from purestep.errors import ConfigError, DataError, Mismatch

BATCHES = 5
ROWS = torch.arange(2.0 * BATCHES)[:, None] / 10
DATA = TensorDataset(ROWS, ROWS * 3)
GIVEN = [(x, 3 * x) for x in ROWS.split(2)]
PROGRAM = ps.program(torch.nn.Linear(1, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.01, momentum=0.9))
WINDOWS = ps.program(torch.nn.Linear(1, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.01), accumulate=2)


class Claims:
    """Something that says how long it is, as it is told to; and, where it counts epochs, another number in each."""

    epoch = 0

    def __init__(self, says: Any) -> None:
        self.says = says

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        if isinstance(self.says, Exception):
            raise self.says
        return self.says + 2 * self.epoch if self.says == 3 else self.says


class Plain(Claims):
    def __iter__(self) -> Iterator[Any]:
        return iter(GIVEN)


class Chosen(Claims):
    """A batch sampler."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter([[2 * i, 2 * i + 1] for i in range(BATCHES)])


class Placed(Claims):
    """A loader with a state, which after its last batch is the one of its beginning."""

    place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]

    def __iter__(self) -> Iterator[Any]:
        for index in range(self.place, BATCHES):
            self.place = (index + 1) % BATCHES
            yield GIVEN[index]


class Unsized:
    def __iter__(self) -> Iterator[Any]:
        return iter(GIVEN)


KINDS: dict[str, Callable[[Any], Any]] = {
    "plain": Plain,
    "batch sampler": lambda says: DataLoader(DATA, batch_sampler=Chosen(says)),
    "stateful": Placed,
}
SAYS = {
    "right": 5,
    "too small": 1,
    "another in each epoch": 3,
    "too large": 40,
    "nothing in it": 0,
    "error": TypeError(),
}


@pytest.fixture(scope="module")
def whole() -> Callable[..., Any]:
    """Runs over the list itself, whose length is right."""
    made: dict[str, Any] = {}

    def run(**fields: Any) -> Any:
        return made.setdefault(repr(fields), fit(GIVEN, **fields))

    return run


def fit(train: Any, *, program: Any = PROGRAM, **fields: Any) -> Any:
    loaders = {"train": train, "val": GIVEN[:1]}
    return ps.fit(program.init(), loaders, program, **({"epochs": 2, "progress": False, "check_every": None} | fields))


def same(found: Any, wanted: Any) -> None:
    assert (found.history, found.epochs, found.stop_reason) == (wanted.history, wanted.epochs, wanted.stop_reason)
    assert found.best == wanted.best
    assert_trees_close(found.state, wanted.state, exact=True)


def at(updates: int, act: Callable[[], Any]) -> Callable[[Any], Any]:
    return lambda event: act() if isinstance(event, events.StepEnd) and event.updates == updates else None


@pytest.mark.parametrize("says", SAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_the_same_whatever_the_length_says(kind: str, says: str, whole: Any) -> None:
    for fields in ({"steps": 7}, {"evaluate_every": 2}, {"program": WINDOWS, "evaluate_every": 1}):
        same(fit(KINDS[kind](SAYS[says]), **fields), whole(**fields))
    for updates in (1, 3, 5, 8):
        stop = at(updates, lambda: ps.Stop("enough"))
        result = fit(KINDS[kind](SAYS[says]), callbacks=[stop])
        assert (int(result.state.updates), result.epochs) == (updates, updates // BATCHES)


@pytest.mark.parametrize("says", ["too small", "another in each epoch", "too large"])
@pytest.mark.parametrize("kind", KINDS)
def test_ended_anywhere_it_goes_on_to_the_same_bits(kind: str, says: str, whole: Any, tmp_path: Path) -> None:
    fields = {"evaluate_every": 2, "epochs": 2}
    for updates in (3, 10) if kind == "plain" else (5, 10):
        place, kill = tmp_path / str(updates), at(updates, lambda: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(SystemExit):
            fit(KINDS[kind](SAYS[says]), snapshots=place, callbacks=[kill], **fields)
        found = fit(KINDS[kind](SAYS[says]), snapshots=place, **fields)
        same(found._replace(best=None), whole(**fields)._replace(best=None))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("says", [3, 40])
def test_a_snapshot_is_saved_where_it_is_due(kind: str, says: int, tmp_path: Path) -> None:
    snapshots = ps.Snapshots(tmp_path, every_steps=3, every_epochs=None, keep=None, keep_best=0)
    heard: list[int] = []
    with snapshots:
        fit(
            KINDS[kind](says),
            snapshots=snapshots,
            monitor="lr",
            mode="min",
            callbacks=[lambda event: heard.append(event.step) if isinstance(event, events.Saved) else None],
        )
    assert heard == [3, 5, 6, 9, 10]  # 5: the best row


def test_a_snapshot_that_is_due_at_the_end_of_an_epoch_is_that_of_its_boundary(tmp_path: Path) -> None:
    with ps.Snapshots(tmp_path, every_steps=5, every_epochs=None, keep=None) as snapshots:
        heard: list[Any] = []
        fit(Plain(3), snapshots=snapshots, callbacks=[heard.append], monitor="lr", mode="min")
    order = [type(event) for event in heard if isinstance(event, events.EpochEnd | events.Saved)]
    assert order == [events.EpochEnd, events.Saved] * 2


# --- fractions and shares ---------------------------------------------------------------------------------------------


class Growing(Chosen):
    """3, 5 and 7 batches."""

    def __len__(self) -> int:
        return 3  # right for the first

    def __iter__(self) -> Iterator[list[int]]:
        return ([i % 10] for i in range(3 + 2 * self.epoch))


@pytest.mark.parametrize(
    ("says", "steps"),
    [(5, [3, 5, 8, 10, 13, 15]), (2, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15]), (40, [5, 10, 15])],
)
def test_a_fraction_is_of_the_length_that_the_loader_says(says: int, steps: list[int], tmp_path: Path) -> None:
    fields = {"epochs": 3, "evaluate_every": 0.5}
    result = fit(Plain(says), **fields)
    assert result.history["step"] == steps
    for updates in (4, 5, 9):
        place, kill = tmp_path / str(updates), at(updates, lambda: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(SystemExit):
            fit(Plain(says), snapshots=place, callbacks=[kill], **fields)
        assert fit(Plain(says), snapshots=place, **fields).history == result.history


def test_a_fraction_without_a_length_is_refused_before_the_first_batch() -> None:
    with pytest.raises(ConfigError, match=r"evaluate_every=0\.5 of a loader without length"):
        fit(Unsized(), evaluate_every=0.5, callbacks=[at(1, lambda: pytest.fail("a step was made"))])


def test_shares_are_of_the_batches_that_there_are(caplog: pytest.LogCaptureFixture) -> None:
    def counts(loader: Any, amount: Any, epochs: int = 3) -> list[int]:
        feed = open_feed(loader, first=amount)
        return [sum(1 for _ in feed.epoch(epoch)) for epoch in range(epochs)]

    assert counts(DataLoader(DATA, batch_sampler=Growing(3)), 0.7) == [2, 2, 2]  # a number for the whole run
    assert counts(Plain(2), 4) == counts(Plain(40), 4) == counts(Plain(TypeError()), 4) == [4, 4, 4]
    assert counts(Plain(2), 1.0) == [5, 5, 5]
    assert counts([0] * 100, 0.29, 1) == [29]
    assert not caplog.records
    assert counts(Plain(40), 0.5, 1) == [5]  # of a stream only its length can be asked
    assert "0.5 of an epoch was 20 batches, but the epoch ended after 5" in caplog.text


def test_limited_epochs_are_those_of_the_limit_and_go_on(tmp_path: Path) -> None:
    for number, (kind, says) in enumerate((kind, says) for kind in KINDS for says in (3, 40)):
        wanted = fit(KINDS[kind](5), limit_batches={"train": 4})
        kill, place = at(4, lambda: signal.raise_signal(signal.SIGTERM)), tmp_path / str(number)
        with pytest.raises(SystemExit):
            fit(KINDS[kind](says), limit_batches={"train": 4}, snapshots=place, callbacks=[kill])
        found = fit(KINDS[kind](says), limit_batches={"train": 4}, snapshots=place)
        assert int(found.state.updates) == (5 if kind == "stateful" else 8)  # which goes on where it was left
        same(found._replace(best=None), wanted._replace(best=None))


# --- the feed ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "batch sampler"])
def test_a_start_behind_the_true_end_is_a_mismatch(kind: str) -> None:
    feed = open_feed(KINDS[kind](1))
    assert len(list(feed.epoch(0, 4))) == 1
    assert list(open_feed(KINDS[kind](1)).epoch(0, 5)) == []
    with pytest.raises(Mismatch, match="7 batches of epoch 1 are done, but the loader has only 5"):
        list(open_feed(KINDS[kind](40)).epoch(0, 7))


@pytest.mark.parametrize("kind", KINDS)
def test_another_length_is_no_other_loader(kind: str) -> None:
    position = open_feed(KINDS[kind](3)).position(0, 0)
    open_feed(KINDS[kind](40)).restore(position)
    earlier = {**position, "facts": {**position["facts"], "batches": 3}}
    if kind != "batch sampler":
        open_feed(KINDS[kind](40)).restore(earlier)


def test_a_loader_that_says_it_is_empty_is_asked_for_a_batch() -> None:
    assert len(list(open_feed(Plain(0)).epoch(0))) == 5
    with pytest.raises(DataError, match="it has no batch"):
        open_feed([])


def test_an_error_is_raised_where_its_batch_would_have_come() -> None:
    def letters() -> Iterator[str]:
        yield "a"
        raise ZeroDivisionError

    ahead = Prefetched(letters(), torch.device("cpu"))
    assert (next(ahead), ahead.more(), ahead.more()) == ("a", True, True)
    with pytest.raises(ZeroDivisionError):
        next(ahead)


def test_a_batch_that_fails_behind_the_end_of_the_run_does_not_matter() -> None:
    class Fails(Plain):
        def __iter__(self) -> Iterator[Any]:
            yield from GIVEN[:3]
            raise ZeroDivisionError

    assert int(fit(Fails(5), steps=3, epochs=-1).state.updates) == 3
    with pytest.raises(DataError, match="epoch 1, batch 4"):
        fit(Fails(5), steps=4, epochs=-1)


# --- torchdata --------------------------------------------------------------------------------------------------------


class Split(IterableDataset[Any]):
    """Says 10, which in batches of 4 by two workers are not 3 but 4."""

    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        worker = torch.utils.data.get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        return ((ROWS[i], 3 * ROWS[i]) for i in range(first, 10, step))


@pytest.mark.filterwarnings("ignore:'set_vital':UserWarning")  # torchdata's own
@pytest.mark.parametrize(("workers", "updates"), [(2, 3), (2, 4), (0, 3)])
def test_a_stream_in_workers_loses_no_batch(workers: int, updates: int, tmp_path: Path) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader

    def run(**fields: Any) -> Any:
        return fit(stateful(Split(), batch_size=4, num_workers=workers), epochs=1, **fields)

    wanted = run()
    assert int(wanted.state.updates) == (4 if workers else 3)
    with pytest.raises(SystemExit):
        run(snapshots=tmp_path, callbacks=[at(updates, lambda: signal.raise_signal(signal.SIGTERM))])
    same(run(snapshots=tmp_path)._replace(best=None), wanted._replace(best=None))
