"""A DataLoader of our own with the settings of the user's, whose workers obey and end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.data import DataLoader


class Engine:
    """A DataLoader of our own with the settings of the user's: our seeds, our handling of signals, workers that end.

    Args:
        dataset: what it loads from.
        like: where workers, pinning and time-out are taken from.
        timeout: seconds to wait for a worker where ``like`` sets none.
        how: further arguments of the DataLoader: batch_size, sampler, collate_fn, drop_last.
    """

    def __init__(self, dataset: Any, *, like: DataLoader[Any], timeout: float, **how: Any) -> None:
        self._dataset = dataset
        self._like = like
        self._timeout = timeout
        self._how = how
        self._generator = torch.Generator()  # else iter(DataLoader) draws from the caller's generator
        self._loader: DataLoader[Any] | None = None
        self._workers: list[Any] = []

    def run(self, seed: int) -> Generator[Any]:
        """One pass, with ``seed`` for the workers."""
        self._generator.manual_seed(seed)
        if self._loader is None:
            self._loader = self._build()
        iterator = iter(self._loader)
        self._workers = list(getattr(iterator, "_workers", ()))  # torch has no public way to them
        return self._passed(iterator)

    def _passed(self, iterator: Iterator[Any]) -> Generator[Any]:
        try:
            yield from iterator
        except GeneratorExit:
            if not self._like.persistent_workers:
                self.close()  # else torch waits five seconds for each worker that is busy
            raise
        except BaseException as error:
            for worker in self._workers:
                if isinstance(error, ConnectionError | EOFError):
                    worker.join(0.5)  # a pipe that broke is seen before the end of its worker
                if worker.exitcode:
                    error.add_note(f"worker {worker.pid} ended by {_ending(worker.exitcode)}")
            self.close()
            raise

    def close(self) -> None:
        """End the workers: by SIGTERM, which they obey in Python code, else by SIGKILL."""
        workers, self._workers, self._loader = self._workers, [], None
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
            worker_init_fn=_WorkerStart(like.worker_init_fn),
            multiprocessing_context=like.multiprocessing_context,
            generator=self._generator,
            prefetch_factor=like.prefetch_factor,
            persistent_workers=like.persistent_workers,
            **self._how,
        )


@contextmanager
def _children_unwatched() -> Generator[None]:
    """Keep torch's SIGCHLD handler from raising for workers that are ended on purpose."""
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
    """Runs first in a worker: signals are the main process's business, and SIGTERM ends a worker without an error.

    A worker that dies of a signal makes torch raise in the main process, wherever that is at the moment (a snapshot,
    say); exit status 0 does not. A scheduler that signals the whole group must not have that effect.
    """

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self.then = then

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGTERM, _leave)
        for name in ("SIGINT", "SIGUSR1"):
            if hasattr(signal, name):
                signal.signal(getattr(signal, name), signal.SIG_IGN)
        threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()
        if self.then is not None:
            self.then(worker)


def _follow(parent: int) -> None:
    """End with the parent, were it killed: torch looks for it only between two batches."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _leave(signum: int, frame: Any) -> None:
    del signum, frame
    os._exit(0)
