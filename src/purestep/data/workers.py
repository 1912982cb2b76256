"""The DataLoader that loads the batches: the user's settings, our seeds, and workers that end in time."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Generator
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, get_worker_info

from ..torch_ext import hidden

T = TypeVar("T")

_END: Any = object()


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
        self.waiting = False  # for a batch, or for workers
        _engines.add(self)

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
            _catch_deaths()
            self.starting = not self._workers  # the next wait checks which workers have died
            iterator = self._wait(lambda: iter(loader))
            self._workers = hidden.loader_workers(iterator)
            self.starting = False
            while (batch := self._wait(lambda: next(iterator, _END))) is not _END:
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

    def _wait(self, call: Callable[[], T]) -> T:
        """Call a function that waits for workers: it raises if one has died."""
        self.waiting = threading.current_thread() is threading.main_thread()  # where the handler of a death raises
        try:
            for worker in self.dead():
                raise RuntimeError(f"DataLoader worker (pid {worker.pid}) has died")
            return call()
        finally:
            self.waiting = False

    def dead(self) -> list[Any]:
        """The workers that ended with an error."""
        return [worker for worker in self._workers if worker.exitcode]

    def close(self) -> None:
        """End the workers with SIGTERM, which Python code obeys; after a second with SIGKILL."""
        self._loader, self.starting = None, False
        for end in ("terminate", "kill"):
            alive = [worker for worker in self._workers if worker.is_alive()]
            for worker in alive:
                getattr(worker, end)()
            deadline = time.monotonic() + 1.0
            for worker in alive:
                worker.join(max(0.0, deadline - time.monotonic()))
        self._workers = []

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


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _catch_deaths() -> None:
    """Limit torch's SIGCHLD handler, which raises anywhere in the main thread, to the engines' waits for workers.

    If a worker dies during a step or a snapshot, the next wait for one of its batches raises.
    """
    number = getattr(signal, "SIGCHLD", None)  # not on Windows
    if number is None or threading.current_thread() is not threading.main_thread():
        return
    home = hidden.set_worker_handler()  # once per process, as iter(DataLoader) would
    found = signal.getsignal(number)
    if not callable(found) or getattr(found, "__module__", "") != home:
        return

    def handle(number: int, frame: Any) -> None:
        try:
            found(number, frame)
        except RuntimeError:
            ours = [engine for engine in _engines if engine.starting or engine.dead()]
            if not ours or any(engine.waiting and not engine.starting for engine in ours):
                raise

    signal.signal(number, handle)


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
