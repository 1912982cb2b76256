"""Time of a step: median and spread over interleaved blocks, and the largest batch that fits into memory."""

from __future__ import annotations

import importlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import torch

from .. import data, tree
from ..errors import ConfigError, DataError
from ..state import at_least, known_keywords
from ..step import microbatch
from ..types import Tree


class Timing(NamedTuple):
    """Seconds per call."""

    name: str
    median: float  # s
    low: float  # s, first decile over blocks
    high: float  # s, last decile over blocks


class Report(NamedTuple):
    """The result of `benchmark`; ``str`` returns a table."""

    timings: list[Timing]
    graphs: int | None  # compiled graphs of the step; None if it is not compiled
    recompiles: int | None  # graphs compiled after the first block
    peak_bytes: int  # of the process (CPU; 0 on Windows) or of the device's allocator (CUDA)
    device: str

    @property
    def ratio(self) -> float | None:
        """Median of the other step / median of this one. Above 1, this step is faster."""
        return None if len(self.timings) < 2 else self.timings[1].median / self.timings[0].median

    def __str__(self) -> str:
        lines = [f"{'step':<24} {'median':>10} {'10 %':>10} {'90 %':>10}"]
        lines += [f"{t.name:<24} {_text(t.median):>10} {_text(t.low):>10} {_text(t.high):>10}" for t in self.timings]
        if self.ratio is not None:
            lines.append(f"{self.timings[0].name} is {self.ratio:.2f} times as fast")
        if self.graphs is not None:
            lines.append(f"graphs {self.graphs}, recompiles {self.recompiles}")
        lines.append(f"peak memory {self.peak_bytes / 2**20:.0f} MiB on {self.device}")
        return "\n".join(lines)


@known_keywords
def benchmark(
    step: Callable[..., Any],
    state: Tree,
    batch: Any,
    *,
    against: Callable[..., Any] | None = None,
    calls: Annotated[int, at_least(1)] = 10,
    blocks: Annotated[int, at_least(2)] = 20,
) -> Report:
    """Time one step, or two steps in alternation.

    Example:
        >>> import torch
        >>> report = benchmark(lambda s, b: (s + b, {}), torch.zeros(()), torch.ones(()), calls=2, blocks=2)
        >>> len(report.timings)
        1

    Two steps take turns of ``calls`` calls, so that changes in the speed of the machine affect both. The one that was
    second begins the next round. Each turn starts with one more call that is not timed, since caches hold the other
    step's memory; on a CPU with several threads it starts with 20 ms of rest, since the threads of a step spin for
    some time after it. Each step continues from its own last state, as in training. The state that is passed in is
    copied and stays valid.

    Args:
        step: ``(state, batch) -> (state, metrics)``, compiled or not.
        state: the initial state of both.
        batch: the batch of every call.
        against: another step of the same signature.
        calls: calls per turn, >= 1.
        blocks: turns of each step, >= 2. One more turn runs first and is not counted.

    Returns:
        The times by the name of each function; with ``against``, equal names are followed by ``(step)`` and
        ``(against)``.

    Raises:
        ConfigError: ``calls`` or ``blocks`` is too small.
    """
    device = data.device_of(state)
    contestants = [_Contestant(each, state, batch) for each in (step, against) if each is not None]
    lead = len(contestants) - 1
    rest = _REST if lead and device.type == "cpu" and torch.get_num_threads() > 1 else 0.0
    for contestant in contestants:
        contestant.turn(calls, device, lead, rest)
    graphs = getattr(step, "graphs", None)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    for block in range(blocks):
        for contestant in contestants if block % 2 == 0 else contestants[::-1]:
            contestant.times.append(contestant.turn(calls, device, lead, rest))
    names = [contestant.name for contestant in contestants]
    if lead and names[0] == names[1]:
        names = [f"{names[0]} (step)", f"{names[1]} (against)"]
    timings = [_timing(name, contestant.times) for name, contestant in zip(names, contestants, strict=True)]
    after = getattr(step, "graphs", None)
    made = None if graphs is None or after is None else after - graphs
    return Report(timings, after, made, _peak(device), str(device))


_REST = 0.02  # s: longer than threads of OpenMP spin before they sleep


class _Contestant:
    def __init__(self, step: Callable[..., Any], state: Tree, batch: Any) -> None:
        self.name = getattr(step, "__name__", type(step).__name__)
        self._step = step
        self._state = tree.clone(state)
        self._batch = batch
        self.times: list[float] = []

    def turn(self, calls: int, device: torch.device, lead: int, rest: float) -> float:
        """Rest, run ``lead`` calls, then ``calls`` calls, and return the seconds per call of these."""
        if rest:
            time.sleep(rest)
        for _ in range(lead):
            self._state, _ = self._step(self._state, self._batch)
        _synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            self._state, _ = self._step(self._state, self._batch)
        _synchronize(device)
        return (time.perf_counter() - start) / calls


def find_batch_size(step: Callable[..., Any], state: Tree, batch: Any, *, most: int = 2**16) -> int:
    """Double the batch until the step runs out of memory, and return the last size that fits.

    Example:
        >>> import torch
        >>> def step(state, batch):
        ...     if len(batch) > 100:
        ...         raise torch.OutOfMemoryError("out of memory")
        ...     return state, {}
        >>> find_batch_size(step, torch.zeros(()), torch.ones(16, 2))
        64

    Each attempt calls the step twice, from a copy of the state. The second call holds the optimizer's temporary memory
    and two states, as in training. The state that is passed in is not changed.

    Args:
        step: ``(state, batch) -> (state, metrics)``, compiled or not, without donation.
        state: the initial state.
        batch: a batch of any size. Its rows are repeated for larger batches, those that ``microbatches`` of `program`
            splits; leaves without rows stay as they are.
        most: the largest number of rows to try, at least the rows of ``batch``.

    Returns:
        The number of rows.

    Raises:
        DataError: the leaves have different numbers of rows, or none; or a list is ambiguous.
        ConfigError: ``most`` is smaller than the rows of ``batch``.
        MemoryError: even ``batch`` does not fit (`torch.OutOfMemoryError` on CUDA), as the step raised it.
    """
    batch = tree.dicts(batch)
    rows = microbatch.count_rows(batch)
    if not rows:
        raise DataError("the batch has no rows", where="batch", hint="pass a batch with one row or more")
    if most < rows:
        raise ConfigError(
            f"most is {most}, but the batch has {rows} rows", where="find_batch_size", hint=f"pass most={rows} or more"
        )
    _attempt(step, state, batch)
    while 2 * rows <= most:
        try:
            _attempt(step, state, microbatch.repeated(batch, 2 * rows))
        except Exception as error:
            if not _is_out_of_memory(error):
                raise
            break
        rows *= 2
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return rows


def _attempt(step: Callable[..., Any], state: Tree, batch: Any) -> None:
    device = data.device_of(state)
    new, _ = step(tree.clone(state), batch)
    step(new, batch)
    _synchronize(device)


def _is_out_of_memory(error: Exception) -> bool:
    # On the CPU torch raises a plain RuntimeError.
    is_cpu = isinstance(error, RuntimeError) and (
        "can't allocate memory" in str(error) or "not enough memory" in str(error)
    )
    return is_cpu or isinstance(error, MemoryError | torch.OutOfMemoryError)


def _synchronize(device: torch.device) -> None:
    if torch.cuda.is_initialized():  # the other step may run there, whatever this state's device is
        torch.cuda.synchronize(device if device.type == "cuda" else None)
    elif device.type == "mps":
        torch.mps.synchronize()


def _timing(name: str, times: list[float]) -> Timing:
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    return Timing(name, statistics.median(times), deciles[0], deciles[-1])


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if sys.platform == "win32":
        return 0
    resource: Any = importlib.import_module("resource")  # missing on Windows
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _text(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.2f} {unit}"
    return f"{seconds * 1e6:.1f} us"
