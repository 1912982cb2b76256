"""The DataLoader that loads the batches: the user's settings, our seeds, and workers that end in time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader, get_worker_info

from ..torch_ext import hidden


class Engine:
    """Runs a DataLoader with the user's settings, our seeds and our signal handling, and ends its workers.

    Args:
        dataset: the dataset to load from.
        like: the user's DataLoader, for workers, pinning and timeout.
        timeout: seconds to wait for a worker if ``like`` sets none.
        persistent: workers and their datasets may stay alive from pass to pass.
        how: further arguments of the DataLoader: batch_size, sampler, collate_fn, drop_last.
    """

    def __init__(
        self, dataset: Any, *, like: DataLoader[Any], timeout: float, persistent: bool = True, **how: Any
    ) -> None:
        self._dataset = dataset
        self._like = like
        self._timeout = timeout
        self._persistent = persistent and like.persistent_workers
        self._how = how
        self._generator = torch.Generator()  # else iter(DataLoader) draws from the caller's generator
        self._loader: DataLoader[Any] | None = None
        self._workers: list[Any] = []
        self.starting = False  # workers are starting

    def run(self, seed: int) -> Generator[Any]:
        """Run one pass; ``seed`` seeds the workers."""
        if self._loader is None:
            self._loader = self._build()
        return self._passed(self._loader, seed)

    def _passed(self, loader: DataLoader[Any], seed: int) -> Generator[Any]:
        self._generator.manual_seed(seed)
        try:
            if not loader.num_workers:
                yield from loader
                return
            if not loader.persistent_workers:
                self._workers = []
            self.starting = not self._workers  # the first wait checks which workers have died
            with _worker_deaths.waits(self):
                iterator = iter(loader)
                self._workers = hidden.loader_workers(iterator)
                self.starting = False
            while True:
                with _worker_deaths.waits(self):
                    try:
                        batch = next(iterator)
                    except StopIteration:
                        return
                yield batch
        except GeneratorExit:
            if not self._persistent:
                self.close()  # else torch waits five seconds for each busy worker
            raise
        except BaseException as error:
            for worker in self._workers:
                if isinstance(error, ConnectionError | EOFError):
                    worker.join(0.5)  # the broken pipe shows before the exit code
                if worker.exitcode:
                    error.add_note(f"worker {worker.pid} ended by {_ending(worker.exitcode)}")
            self.close()
            raise

    def dead(self) -> list[Any]:
        """The workers that ended with an error."""
        return [worker for worker in self._workers if worker.exitcode]

    def close(self) -> None:
        """End the workers with SIGTERM, which Python code obeys; after a second with SIGKILL."""
        workers, self._workers, self._loader = self._workers, [], None
        self.starting = False
        with _children_unwatched():
            for end in ("terminate", "kill"):
                alive = [worker for worker in workers if worker.is_alive()]
                for worker in alive:
                    getattr(worker, end)()
                deadline = time.monotonic() + 1.0
                for worker in alive:
                    worker.join(max(0.0, deadline - time.monotonic()))

    def _build(self) -> DataLoader[Any]:
        like = self._like
        return DataLoader(
            self._dataset,
            num_workers=like.num_workers,
            pin_memory=like.pin_memory and torch.accelerator.is_available(),
            timeout=(like.timeout or self._timeout) if like.num_workers else 0,
            worker_init_fn=_WorkerStart(like.worker_init_fn, like.multiprocessing_context),
            multiprocessing_context=like.multiprocessing_context,
            generator=self._generator,
            prefetch_factor=like.prefetch_factor,
            persistent_workers=self._persistent,
            **self._how,
        )


class _WorkerDeaths:
    """Limits torch's SIGCHLD handler, which raises anywhere in the main process, to waits for a worker.

    If a worker dies during a step or a snapshot, the next wait for one of its batches raises.
    """

    def __init__(self) -> None:
        self._raises: Callable[[int, Any], Any] | None = None
        self._engines: weakref.WeakSet[Engine] = weakref.WeakSet()
        self._waiting: Engine | None = None

    @contextmanager
    def waits(self, engine: Engine) -> Generator[None]:
        """Enter this block to wait for a worker of the engine."""
        here = threading.current_thread() is threading.main_thread()
        if not here or not hasattr(signal, "SIGCHLD"):
            yield
            return
        self._set()
        self._engines.add(engine)
        before, self._waiting = self._waiting, engine
        try:
            for worker in engine.dead():
                raise RuntimeError(f"DataLoader worker (pid {worker.pid}) has died")
            yield
        finally:
            self._waiting = before

    def _set(self) -> None:
        home = hidden.set_worker_handler()  # once per process, as iter(DataLoader) would
        found = signal.getsignal(signal.SIGCHLD)
        if callable(found) and getattr(found, "__module__", "") == home:
            self._raises = found
            signal.signal(signal.SIGCHLD, self._handle)

    def _handle(self, number: int, frame: Any) -> None:
        assert self._raises is not None
        try:
            self._raises(number, frame)
        except RuntimeError:
            ours = [engine for engine in self._engines if engine.starting or engine.dead()]
            if not ours or (self._waiting in ours and not self._waiting.starting):
                raise


_worker_deaths = _WorkerDeaths()


@contextmanager
def _children_unwatched() -> Generator[None]:
    """Keep torch's SIGCHLD handler from raising for workers that `Engine.close` ends."""
    number = getattr(signal, "SIGCHLD", None)  # not on Windows
    previous = None if number is None else signal.getsignal(number)
    if number is None or previous is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(number, previous)


def _ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit status {code}"


class _WorkerStart:
    """Runs first in a worker: ignore signals that the main process handles, and exit with status 0 on SIGTERM.

    A worker that dies of a signal makes torch raise in the main process, even during a snapshot; exit status 0 does
    not. So a scheduler may signal the whole process group.
    """

    def __init__(self, then: Callable[[int], None] | None, context: Any) -> None:
        self.then = then
        self.of_a_server = (context or multiprocessing).get_start_method() == "forkserver"

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGTERM, _leave)
        for name in ("SIGINT", "SIGUSR1"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), signal.SIG_IGN)
        # If the trainer was killed before this line, `getppid` returns another process. `parent_process` is the one
        # that started this worker; for the worker of a fork server it is not the parent.
        told = None if self.of_a_server else multiprocessing.parent_process()
        parent = os.getppid() if told is None or told.pid is None else told.pid
        threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
        info: Any = get_worker_info()  # frozen
        object.__setattr__(info, "dataset", getattr(info.dataset, "users_dataset", info.dataset))  # ours has batches
        if self.then is not None:
            self.then(worker)


def _exit_with_parent(parent: int) -> None:
    """Exit when the parent was killed: torch checks this only between two batches."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _leave(signum: int, frame: Any) -> None:
    del signum, frame
    os._exit(0)
