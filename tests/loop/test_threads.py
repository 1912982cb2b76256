"""One run at a time in a process; bare steps and scopes of several threads take turns."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import purestep as ps
from purestep import rng
from purestep.data import random_state
from purestep.errors import ConfigError
from purestep.loop import environment
from purestep.torch_ext import global_rng

DATA = TensorDataset(*(torch.linspace(-1, 1, 64 * 4).reshape(64, 4)[:, :n] for n in (4, 1)))


def dropping() -> ps.Program:
    with rng.scoped(1):
        net = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.Dropout(0.5), torch.nn.Linear(32, 1))
    return ps.program(net, ps.supervised(torch.nn.MSELoss()), ps.optim.adam(1e-2))


def weights(state: Any) -> list[float]:
    return torch.cat([leaf.reshape(-1) for leaf in state.params.values()]).tolist()


def fitted(**fields: Any) -> list[float]:
    program = dropping()
    loader = DataLoader(DATA, batch_size=8, shuffle=True)
    return weights(ps.fit(program.init(), loader, program, epochs=2, progress=False, **fields).state)


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """The caller's generator and torch's switches are what they were."""
    state, deterministic = torch.get_rng_state(), torch.are_deterministic_algorithms_enabled()
    yield
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.are_deterministic_algorithms_enabled() == deterministic
    assert not environment._RUNNING


def during(job: Callable[[], Any]) -> Any:
    """The job, or its error, while a run of another thread waits in a callback; that run then ends as if alone."""
    inside, done, found = threading.Event(), threading.Event(), []

    def wait(event: Any) -> None:
        if isinstance(event, ps.events.EpochEnd):
            inside.set()
            assert done.wait(60)

    other = threading.Thread(target=lambda: found.append(fitted(callbacks=[wait])), name="the other one")
    other.start()
    try:
        assert inside.wait(60)
        return job()
    finally:
        done.set()
        other.join(60)
        assert found == [fitted()]


def test_a_second_run_in_another_thread_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^fit: thread 'the other one' .*cure: .* one after the other, or each in a"):
        during(fitted)
    fitted()  # alone it may


def test_a_run_inside_a_callback_may_have_other_switches() -> None:
    def inner(event: Any) -> None:
        if isinstance(event, ps.events.FitEnd):
            fitted(deterministic=True)
            assert not torch.are_deterministic_algorithms_enabled()

    assert fitted(callbacks=[inner]) == fitted()


def test_a_run_that_failed_leaves_the_process_free() -> None:
    def fail(event: Any) -> None:
        raise ValueError("of the callback")

    with pytest.raises(ValueError, match="of the callback"):
        fitted(callbacks=[fail])
    fitted()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_may_run_where_the_parents_other_thread_does() -> None:
    def job() -> int:
        child = os.fork()
        if not child:
            status = 1
            try:
                torch.set_num_threads(1)  # OpenMP's other threads are not there either
                status = 0 if fitted() else 2
            finally:
                os._exit(status)
        return os.waitpid(child, 0)[1]

    assert during(job) == 0


# --- steps and scopes -------------------------------------------------------------------------------------------------


def in_threads(job: Callable[[int], Any], count: int = 2) -> list[Any]:
    """The results of the job for all numbers below the count."""
    found: list[Any] = [None] * count
    start = threading.Barrier(count)

    def run(number: int) -> None:
        start.wait(10)
        found[number] = job(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return found


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


class Slow(torch.nn.Linear):
    """Another thread has time to put its weights into the module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.05)
        return super().forward(x)


def test_calls_of_bound_modules_take_turns() -> None:
    with rng.scoped(1):
        net = Slow(1, 1, bias=False)
    program = ps.program(net, ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1))
    state = program.init()

    def job(number: int) -> list[float]:
        predict = program.bind(state._replace(params={"weight": torch.full((1, 1), float(number))}))
        return [float(predict(torch.ones(1, 1))) for _ in range(3)]

    assert in_threads(job) == [[0.0] * 3, [1.0] * 3]


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
