"""Runs in several threads of one process: each gives the numbers that it gives alone, or is refused."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

import purestep as ps
from purestep import rng
from purestep.data import random_state
from purestep.errors import ConfigError, PurestepError, StepContractError
from purestep.loop import environment
from purestep.torch_ext import global_rng

Job = Callable[[int], Any]
DATA = TensorDataset(*(torch.linspace(-1, 1, 64 * 4).reshape(64, 4)[:, :n] for n in (4, 1)))


class Noisy(Dataset[Any]):
    """Draws from all three generators."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.rand(4) + float(np.random.rand()) + random.random()
        return x, x[:1]


def net() -> torch.nn.Module:
    with rng.scoped(1):
        return torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Dropout(0.5), torch.nn.Linear(32, 1))


def dropping(**kwargs: Any) -> ps.Program:
    return ps.program(net(), ps.supervised(torch.nn.MSELoss()), ps.optim.adam(1e-2), **kwargs)


def in_threads(job: Job, count: int = 2) -> list[Any]:
    """What the job returns, or the error, of every number below the count."""
    found: list[Any] = [None] * count
    start = threading.Barrier(count)

    def run(number: int) -> None:
        start.wait(10)
        try:
            found[number] = job(number)
        except PurestepError as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=(number,), name=f"run {number}") for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return found


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """The caller's generators and torch's switches are what they were."""
    numpys, pythons, torchs = np.random.get_state()[1].copy(), random.getstate(), torch.get_rng_state()
    dtype, deterministic = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    yield
    assert (np.random.get_state()[1] == numpys).all()
    assert random.getstate() == pythons
    assert torch.equal(torch.get_rng_state(), torchs)
    assert (torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()) == (dtype, deterministic)
    assert not torch.is_anomaly_enabled()
    assert not environment._ACTIVE
    assert not environment._BACK


def weights(state: Any) -> list[float]:
    return torch.cat([leaf.reshape(-1) for leaf in state.params.values()]).tolist()


def fitted(loader: Callable[[], Any], program: Callable[[], ps.Program] = dropping, **fields: Any) -> Job:
    def job(number: int) -> Any:
        mine = program()
        loaders = {"train": loader(), "val": loader()}
        result = ps.fit(mine.init(seed=number), loaders, mine, epochs=3, progress=False, **fields)
        return weights(result.state), result.history["val_loss"]

    return job


def shuffled() -> Any:
    return DataLoader(DATA, batch_size=8, shuffle=True)


def noisy() -> Any:
    return DataLoader(Noisy(), batch_size=8, shuffle=True)


def collated() -> Any:
    return DataLoader(
        DATA, batch_size=8, collate_fn=lambda items: (torch.rand(len(items), 4), torch.rand(len(items), 1))
    )


class Drawn:
    """An iterable that draws while it is iterated."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(6):
            yield torch.rand(8, 4), torch.from_numpy(np.random.rand(8, 1)).float()


AOT = {"backend": "aot_eager"}
JOBS: dict[str, Job] = {
    "dropout and shuffling": fitted(shuffled),
    "a dataset that draws": fitted(noisy),
    "a collate function that draws": fitted(collated),
    "an iterable that draws": fitted(Drawn),
    "compiled": fitted(shuffled, compile=AOT),
    "donated": fitted(shuffled, compile=AOT, donate=True),
    "accumulated": fitted(shuffled, lambda: dropping(accumulate=2, microbatches=2)),
    "every step looked at": fitted(shuffled, check_every=1),
    "deterministic in both": fitted(shuffled, deterministic=True),
    "anomalies looked for in both": fitted(shuffled, detect_anomaly=True),
}


@pytest.mark.parametrize("job", JOBS.values(), ids=JOBS)
def test_runs_together_give_what_they_give_alone(job: Job) -> None:
    alone = [job(number) for number in range(2)]
    assert in_threads(job) == alone
    assert alone[0] != alone[1]


def test_compiled_and_eager_runs_do_not_meet() -> None:
    """What a capture patches in torch, a step in eager would run into."""
    jobs = [JOBS["dropout and shuffling"], JOBS["compiled"], JOBS["a dataset that draws"]]

    def job(number: int) -> Any:
        return jobs[number](number)

    assert in_threads(job, 3) == [job(number) for number in range(3)]


@pytest.mark.compile
@pytest.mark.slow
def test_so_do_runs_by_inductor() -> None:
    job = fitted(shuffled, compile=True)
    assert in_threads(job) == [job(number) for number in range(2)]


@pytest.mark.slow
def test_so_do_loaders_with_workers() -> None:
    """Forked while another thread draws: its lock is not taken along."""

    def job(number: int) -> Any:
        loaders = [lambda: DataLoader(Noisy(), batch_size=8, num_workers=1), noisy]
        return fitted(loaders[number])(number)

    assert in_threads(job) == [job(number) for number in range(2)]


def test_threads_may_share_a_program_and_its_data() -> None:
    program, loader = dropping(), shuffled()

    def job(number: int) -> Any:
        return weights(ps.fit(program.init(seed=number), loader, program, epochs=3, progress=False).state)

    alone = [job(number) for number in range(3)]
    assert in_threads(job, 3) == alone


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_bare_steps_take_turns(compiled: bool) -> None:
    program = dropping()
    step = ps.compile_step(program.train_step, backend="aot_eager") if compiled else program.train_step
    batches = [(x[None].repeat(4, 1), y[None].repeat(4, 1)) for x, y in list(DATA)[:30]]

    def job(number: int) -> Any:
        state, scores = program.init(seed=number), []
        for batch in batches:
            state, _ = step(state, batch)
            scores.append(float(program.eval_step(state, batch)["loss"]))
        return weights(state), scores

    alone = [job(number) for number in range(2)]
    assert in_threads(job) == alone


def test_a_run_beside_run_epoch_and_evaluate() -> None:
    program, fit = dropping(), JOBS["a dataset that draws"]

    def job(number: int) -> Any:
        if number:
            return fit(number)
        state, _ = ps.run_epoch(program.init(seed=7), noisy(), program.train_step)
        return weights(state), ps.evaluate(state, noisy(), program.eval_step)

    assert in_threads(job) == [job(number) for number in range(2)]


# --- what is refused --------------------------------------------------------------------------------------------------


def beside(job: Callable[[], Any], **fields: Any) -> Any:
    """The job, or its error, while a run of another thread waits in a callback."""
    inside, done = threading.Event(), threading.Event()

    def wait(event: Any) -> None:
        if isinstance(event, ps.events.EpochEnd):
            inside.set()
            assert done.wait(60)

    program = dropping()
    other = threading.Thread(
        target=lambda: ps.fit(
            program.init(), shuffled(), program, epochs=1, progress=False, callbacks=[wait], **fields
        ),
        name="the other one",
    )
    other.start()
    try:
        assert inside.wait(60)
        return job()
    finally:
        done.set()
        other.join(60)


SWITCHES: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "deterministic in the second": ({}, {"deterministic": True}, "deterministic is True, and False in the run of"),
    "deterministic in the first": ({"deterministic": True}, {}, "deterministic is False, and True"),
    "a warning only": ({"deterministic": True}, {"deterministic": "warn"}, "deterministic is warn, and True"),
    "tf32": ({"tf32": True}, {"tf32": False}, r"tf32 is \(False, False\), and \(True, True\)"),
    "cudnn": ({}, {"cudnn_benchmark": True}, "cudnn_benchmark is True, and False"),
    "anomalies": ({"detect_anomaly": True}, {}, "detect_anomaly is False, and True"),
}


@pytest.mark.parametrize(("first", "second", "told"), SWITCHES.values(), ids=SWITCHES)
def test_switches_of_the_process_are_the_same_in_all_runs(
    first: dict[str, Any], second: dict[str, Any], told: str
) -> None:
    with pytest.raises(
        ConfigError, match=rf"^fit: {told}.*thread 'the other one'.*cure: set the same .* in a process\)"
    ):
        beside(lambda: fitted(shuffled, **second)(0), **first)
    fitted(shuffled, **second)(0)  # alone it may


def test_another_default_dtype_is_refused() -> None:
    def job() -> Any:
        torch.set_default_dtype(torch.float64)
        try:
            return fitted(shuffled)(0)
        finally:
            torch.set_default_dtype(torch.float32)

    with pytest.raises(ConfigError, match=r"default_dtype is torch.float64, and torch.float32 in the run of thread"):
        beside(job)


def test_a_run_inside_of_a_callback_may_be_set_otherwise() -> None:
    def inner(event: Any) -> None:
        if isinstance(event, ps.events.FitEnd):
            fitted(shuffled, deterministic=True)(0)
            assert not torch.are_deterministic_algorithms_enabled()

    fitted(shuffled, callbacks=[inner])(0)


def test_the_first_to_end_leaves_the_switches_to_the_second() -> None:
    seen: list[bool] = []

    def look(event: Any) -> None:
        if isinstance(event, ps.events.FitEnd):
            seen.append(torch.are_deterministic_algorithms_enabled())

    def job() -> None:
        fitted(shuffled, deterministic=True, callbacks=[look])(0)
        seen.append(torch.are_deterministic_algorithms_enabled())

    beside(job, deterministic=True)
    assert seen == [True, True]


@pytest.mark.parametrize(
    ("draw", "whose"),
    [(lambda: torch.rand(1), "torch's"), (np.random.rand, "numpy's"), (random.random, "Python's")],
    ids=["torch", "numpy", "python"],
)
def test_a_callback_that_draws_is_refused_beside_another_run(draw: Callable[[], Any], whose: str) -> None:
    job = fitted(shuffled, callbacks=[lambda event: draw() and None])
    told = rf"^callback .*: draws from {whose} global generator.*rng\.scoped"
    numpys, pythons = np.random.get_state(), random.getstate()
    try:
        with pytest.raises(StepContractError, match=told):
            beside(lambda: job(0))
    finally:  # what a callback draws from these two is the caller's business
        np.random.set_state(numpys)
        random.setstate(pythons)
    if whose == "torch's":  # alone it may, and leaves no trace
        job(0)


def test_a_callback_that_draws_in_a_scope_is_not() -> None:
    def draw(event: Any) -> None:
        with ps.rng.scoped(3):
            torch.rand(1)

    job = fitted(shuffled, callbacks=[draw])
    assert beside(lambda: job(0)) == job(0)


def test_an_evaluation_of_ones_own_that_draws_is_refused_too() -> None:
    def noise(state: Any, batch: Any) -> Any:
        return {"loss": ps.Mean(torch.rand(()), torch.ones(()))}

    job = fitted(shuffled, lambda: dropping()._replace(eval_step=noise))
    with pytest.raises(StepContractError, match=r"^eval_step, val: draws from torch's global generator"):
        beside(lambda: job(0))


# --- the lock ---------------------------------------------------------------------------------------------------------


def test_a_run_that_only_waits_stops_nobody() -> None:
    """No lock is held for the length of a run."""
    assert beside(lambda: fitted(shuffled)(0)) == fitted(shuffled)(0)


@pytest.mark.parametrize("scope", [global_rng.locked, lambda: rng.scoped(1), lambda: random_state.scoped(1)])
def test_a_scope_keeps_other_threads_out_of_theirs(scope: Callable[[], Any]) -> None:
    order: list[str] = []

    def other() -> None:
        with rng.scoped(2):
            order.append("other")

    with scope(), scope():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.2)
        order.append("first")
    thread.join(10)
    assert order == ["first", "other"]


def test_a_thread_that_waits_long_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(global_rng, "WARN_AFTER", 0.05)
    told: list[str] = []

    def other() -> None:
        waited = r"waited 0 seconds for the global random generators.*cure:"
        with pytest.warns(RuntimeWarning, match=waited) as found, rng.scoped(2):
            told.extend(str(each.message) for each in found)

    with global_rng.locked():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.3)
    thread.join(10)
    assert told


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_does_not_wait_for_a_thread_that_it_has_not() -> None:
    inside, done = threading.Event(), threading.Event()

    def other() -> None:
        with rng.scoped(1):
            inside.set()
            done.wait(30)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(10)
    read, write = os.pipe()
    child = os.fork()
    if not child:
        with random_state.scoped(3):
            os.write(write, b"drawn")
        os._exit(0)
    os.close(write)
    os.set_blocking(read, True)
    try:
        assert os.read(read, 5) == b"drawn"
    finally:
        done.set()
        thread.join(10)
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(read)
