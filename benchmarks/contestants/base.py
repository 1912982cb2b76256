"""What a contestant is: it takes turns, and shows its losses, weights and average afterwards."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..measure import Turn
from ..works import Batch, Work

Named = Mapping[str, Tensor]


class Contestant(Protocol):
    """One way to train a work."""

    name: str

    def turn(self, calls: int) -> Turn: ...

    def read(self, loss: Any) -> float: ...

    def weights(self) -> Named: ...

    def shadow(self) -> Named: ...

    def close(self) -> None: ...


class Entry(NamedTuple):
    """A contestant that can be made."""

    name: str
    needs: tuple[str, ...]  # packages
    make: Callable[[Work, torch.device], Contestant]
    fits: Callable[[Work, torch.device], bool] = lambda work, device: True  # whether it is written for that work


def settle(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Stepping:
    """A contestant that is a function of a batch.

    Args:
        name: in the tables.
        step: one training step; returns a loss that nobody has waited for.
        batches: taken in turn.
        weights: name -> tensor, as the module names them.
        shadow: the same of the average.
        wait: for everything that has been started.
        read: a loss as a number.
    """

    def __init__(
        self,
        name: str,
        step: Callable[[Batch], Any],
        batches: Sequence[Any],
        *,
        weights: Callable[[], Named],
        shadow: Callable[[], Named],
        wait: Callable[[], None],
        read: Callable[[Any], float] = float,
    ) -> None:
        self.name = name
        self.read = read
        self.weights = weights
        self.shadow = shadow
        self.step = step
        self._wait = wait
        self._batches = itertools.cycle(batches)

    def turn(self, calls: int) -> Turn:
        batches = list(itertools.islice(self._batches, calls))
        step = self.step
        self._wait()
        start = time.perf_counter()
        losses = [step(batch) for batch in batches]
        self._wait()
        return Turn(time.perf_counter() - start, losses)

    def close(self) -> None:
        """Nothing is open."""


class Gate:
    """Holds a trainer that owns its loop: between turns it waits at the end of a step."""

    def __init__(self, batches: Sequence[Batch], device: torch.device) -> None:
        self._batches = batches
        self._device = device
        self._go, self._done = threading.Event(), threading.Event()
        self._left = 0
        self._begun = 0.0
        self._closed = False
        self._losses: list[Any] = []
        self._seconds = 0.0
        self.failure: BaseException | None = None

    def __iter__(self) -> Iterator[Batch]:
        """Batches for the trainer, until the gate is closed."""
        for batch in itertools.cycle(self._batches):
            if self._closed:
                return
            yield batch

    def passed(self, loss: Any) -> None:
        """Called by the trainer at the end of each step."""
        self._losses.append(loss)
        self._left -= 1
        if self._left <= 0 and not self._closed:
            settle(self._device)
            self._seconds = time.perf_counter() - self._begun
            self._done.set()
            self.wait()

    def wait(self) -> None:
        """Until the next turn. Others may seed the global generators meanwhile; each trainer finds its own again."""
        mine = torch.get_rng_state(), np.random.get_state(), random.getstate()
        self._go.wait()
        self._go.clear()
        torch.set_rng_state(mine[0])
        np.random.set_state(mine[1])
        random.setstate(mine[2])
        settle(self._device)
        self._begun = time.perf_counter()

    def turn(self, calls: int) -> Turn:
        if self.failure is None:
            self._left, self._losses = calls, []
            self._done.clear()
            self._go.set()
            self._done.wait()
        if self.failure is not None:
            raise RuntimeError("the trainer ended") from self.failure
        return Turn(self._seconds, self._losses)

    def ended(self, failure: BaseException) -> None:
        self.failure = failure
        self._done.set()

    def close(self) -> None:
        self._closed = True
        self._left = 1 << 40
        self._go.set()

    @property
    def closed(self) -> bool:
        return self._closed


class Gated:
    """A contestant that is a trainer with a loop of its own, run in a thread.

    Args:
        name: in the tables.
        fit: trains on the gate's batches and calls ``gate.passed(loss)`` at the end of every step.
        gate: of this trainer.
        weights, shadow, read: as of `Stepping`.
    """

    def __init__(
        self,
        name: str,
        fit: Callable[[Gate], Any],
        gate: Gate,
        *,
        weights: Callable[[], Named],
        shadow: Callable[[], Named],
        read: Callable[[Any], float] = float,
    ) -> None:
        self.name = name
        self.read = read
        self.weights = weights
        self.shadow = shadow
        self._gate = gate
        self._fit = fit
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            torch.set_num_threads(self._threads)  # a setting of each thread
            self._gate.wait()
            if not self._gate.closed:
                self._fit(self._gate)
            raise EOFError("out of batches")
        except BaseException as error:
            self._gate.ended(error)

    def turn(self, calls: int) -> Turn:
        return self._gate.turn(calls)

    def close(self) -> None:
        self._gate.close()
        self._thread.join(timeout=60)
