"""The decisions between two calls: of a run of one process, and those that several processes take together.

A signal, the end of `max_time`, a snapshot that is due by the clock, an error of the writer and a callback's `Stop` may
reach one process only. At each boundary, before each snapshot, and at every `EVERY`-th call of the step or batch of an
evaluation between them, the processes exchange a few integers over the host group; each waits for the others, and all
act on the largest of each number at that place. An exchange takes some tenths of a millisecond on one host (0.45 ms for
two processes on two busy cores) and waits for no device. Limits and snapshots that are counted in updates or epochs
follow from `LoopState`, which is the same everywhere: they need no exchange, and are not late.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from .. import data, parallel, tree
from ..compile import plain, states
from ..parallel import loaders, passes, placement, processes
from ..types import Program, Tree
from .inputs import Feeds
from .loop_state import LoopState
from .saving import Checkpointer
from .signals import Pending, Signals

if TYPE_CHECKING:  # loads pydantic, which takes half as long as the rest of `import purestep`
    from ..config import FitConfig

T = TypeVar("T")

_SAME = "run the same script with the same arguments and data in every process"
_SAME_PLACE = (
    "the same dataset, sampler and seed in every process, no sampler that draws from torch's, numpy's or Python's "
    "global generator, and callbacks that return states by the same rule"
)
_SIGNALS: tuple[Pending | None, ...] = (None, "snapshot", "interrupt", "terminate")

EVERY = 4
"""Calls, or batches of an evaluation, between two exchanges: what one process alone sees is acted on so much later."""


# --- decisions --------------------------------------------------------------------------------------------------------


class Decisions:
    """The decisions of a run of one process."""

    rank = 0
    size = 1

    def __init__(self, signals: Signals, checkpointer: Checkpointer, max_time: float | None) -> None:
        self._signals = signals
        self._checkpointer = checkpointer
        self._max_time = max_time
        self._begun = time.monotonic()

    @property
    def signal(self) -> Pending | None:
        """The signal to act on."""
        return self._signals.pending

    @property
    def leaving(self) -> bool:
        """True if a signal ends the run."""
        return self.signal in ("terminate", "interrupt")

    def clear_request(self) -> None:
        """Clear a request to save, which has been met."""
        self._signals.saved()

    def is_over(self) -> bool:
        """True if `max_time` has passed."""
        return self._max_time is not None and time.monotonic() - self._begun >= self._max_time

    def is_snapshot_due(self, loop: LoopState) -> bool:
        """True if a snapshot is due."""
        return bool(self._checkpointer.due(loop))

    def stop(self, loop: LoopState, reason: str) -> LoopState:
        """Return the state after a callback's `Stop`."""
        return loop.stopped(reason)

    def count_answer(self) -> None:
        """Note that a callback returned a state."""

    def take(self, loop: LoopState, *, inside: bool = False) -> LoopState:
        """Take the decisions of this place, and return the state after them.

        Args:
            loop: after a call of the step.
            inside: the place lies between two boundaries.

        Raises:
            WriteFailed: the writer has failed.
        """
        del inside
        self._checkpointer.check()
        return loop

    def compare(self, loop: LoopState, state: Tree) -> LoopState:
        """Take the decisions of this place, behind an event, and compare the states of all processes.

        Raises:
            RankError: a leaf that all processes hold alike has other values in one of them.
        """
        del state
        return loop

    def training(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield training batches, up to a signal that ends the run."""
        return self._signals.until_signal(batches)

    def evaluation(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches of an evaluation, up to a signal that ends the run."""
        return self._signals.until_signal(batches)


class _Numbers(NamedTuple):
    """The numbers that a process sends. The largest of each, of all processes, counts."""

    signal: int  # index in _SIGNALS
    stop: int  # a callback returned Stop
    failed: int  # the writer has failed
    over: int  # max_time has passed
    snapshot: int  # one is due by the clock of the first process
    place: int  # hash of what must be the same here
    place_negated: int  # the largest is the smallest place, negated


class JointDecisions(Decisions):
    """The decisions of a run of several processes; see the module's docstring."""

    def __init__(
        self,
        signals: Signals,
        checkpointer: Checkpointer,
        max_time: float | None,
        mesh: parallel.Mesh,
        feed: data.Feed,
    ) -> None:
        super().__init__(signals, checkpointer, max_time)
        self.rank, self.size = mesh.rank, mesh.size
        self._feed = feed
        self._loop = LoopState()
        self._joint = _Numbers(*[0] * len(_Numbers._fields))
        self._stop: str | None = None  # the reason of a callback in this process
        self._failure: Exception | None = None
        self._answers = 0
        self._is_first_batch = True
        passes.taken()  # those of steps before this run

    @property
    def signal(self) -> Pending | None:
        return _SIGNALS[self._joint.signal]

    def clear_request(self) -> None:
        if self.signal == "snapshot":
            self._joint = self._joint._replace(signal=0)

    def is_over(self) -> bool:
        return bool(self._joint.over)

    def is_snapshot_due(self, loop: LoopState) -> bool:
        by_clock = self._joint.snapshot and not self._checkpointer.is_saved(loop)
        return bool(by_clock) or self._is_due_by_count(loop)

    def _is_due_by_count(self, loop: LoopState) -> bool:
        return any(name != "every_seconds" for name in self._checkpointer.due(loop))

    def stop(self, loop: LoopState, reason: str) -> LoopState:
        self._stop = self._stop or reason
        return loop

    def count_answer(self) -> None:
        self._answers += 1

    def take(self, loop: LoopState, *, inside: bool = False) -> LoopState:
        """As `Decisions.take`: a collective; inside an epoch at every `EVERY`-th call and before a snapshot.

        Raises:
            WriteFailed: the writer has failed, in every process.
            RankError: the processes are at different places in the data, or callbacks returned states in some of them.
        """
        self._loop = loop
        if inside and loop.calls % EVERY and not self._is_due_by_count(loop):
            self._joint = self._joint._replace(snapshot=0)  # it was saved at the place of the exchange
            return loop
        self._exchange()
        if not self._joint.stop:
            return loop
        reasons = processes.gathered(self._stop)
        self._stop = None
        return loop.stopped(next(reason for reason in reasons if reason is not None))

    def compare(self, loop: LoopState, state: Tree) -> LoopState:
        loop = self.take(loop)
        processes.check_same(
            _values(plain(state)),
            where=f"the state after {loop.calls} calls",
            hint="a callback that returns another state in each process, a step with draws of its own, a faulty device",
        )
        return loop

    def training(self, batches: Iterable[T]) -> Iterator[T]:
        for batch in batches:
            if self._is_first_batch:
                self._is_first_batch = False
                self._check_batch(batch)
            yield batch

    def evaluation(self, batches: Iterable[T]) -> Iterator[T]:
        for index, batch in enumerate(batches):
            if index % EVERY == 0:
                self._exchange()
            if self.leaving:
                return
            yield batch

    def _exchange(self) -> None:
        pending = self._signals.pending
        self._signals.saved()  # a request to save is sent once
        try:
            self._checkpointer.check()
        except Exception as error:
            self._failure = error
        loop = self._loop
        same = {
            "the epoch": loop.epoch + 1,
            "the number of batches": loop.batch,
            "the number of calls": loop.calls,
            "the order of the data": self._feed.order(loop.epoch, loop.batch - 1),
            "the number of states that callbacks returned": self._answers,
        }
        order = passes.taken()
        place = zlib.crc32(repr((same, order)).encode())
        joint = _Numbers(
            signal=max(_SIGNALS.index(pending), self._joint.signal),
            stop=self._stop is not None,
            failed=self._failure is not None,
            over=super().is_over(),
            snapshot=self.rank == 0 and "every_seconds" in self._checkpointer.due(loop),
            place=place,
            place_negated=-place,
        )
        joint = self._joint = _Numbers(*processes.largest(joint))
        if joint.place != -joint.place_negated:
            passes.check_order(order)
            processes.check_same(same, where="train", hint=_SAME_PLACE)
        if joint.failed:
            processes.together(self._raise_failure)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _check_batch(self, batch: Any) -> None:
        """Compare the structure of the first batch of all processes."""
        spec = data.check_batch(batch, where="train, first batch")
        processes.check_same({"a batch": _text(spec)}, where="train, first batch", hint=_SAME)


def _text(spec: Any, *, is_batch: bool = False) -> str:
    """The structure of a batch in one line, with its keys. Entries that are all alike, one per example, are not
    counted: the processes may have different numbers of examples."""
    children = getattr(spec, "children", None)
    if children is None:
        return spec.kind
    texts = [_text(child, is_batch=spec.kind == "Share") for child in children]
    if spec.kind not in ("list", "tuple"):
        named = zip(spec.keys, texts, strict=True)
        texts = [text if isinstance(key, int) else f"{key}: {text}" for key, text in named]
    elif len(set(texts)) == 1 and not (is_batch and "(" not in texts[0]):  # a batch of tensors has inputs and targets
        texts = [texts[0], "..."]
    return f"{spec.kind}({', '.join(texts)})"


# --- the same in all processes ----------------------------------------------------------------------------------------


def check_alike(mesh: parallel.Mesh | None, facts: Callable[[], Mapping[str, Any]]) -> None:
    """Check that all processes have begun the same run.

    Args:
        mesh: None: one process, nothing is compared.
        facts: name -> text or number.

    Raises:
        RankError: with the names that differ.
    """
    if mesh is not None:
        hint = f"{_SAME}; for weights, torch.manual_seed(0) before the model is built; for loaders, {loaders.WHOLE}"
        processes.check_same(facts(), where="fit", hint=hint)


def facts_of(state: Tree, program: Program, config: FitConfig, feeds: Feeds) -> dict[str, Any]:
    """Return what must be the same in all processes when a run begins. The order of the data and a row are compared
    with the first batch of each loader."""
    facts: dict[str, Any] = {f"config {name}": repr(value) for name, value in config.model_dump().items()}
    static = program.static
    if static is not None:
        facts |= {f"program {key}": getattr(static, key) for key in ("accumulate", "tail", "has_ema")}
        facts["program elementwise"] = static.tx.elementwise
    for name, feed in {"train": feeds.train, **feeds.evaluation}.items():
        facts |= {f"loader {name}, {key}": value for key, value in {**feed.facts, "length": feed.length}.items()}
    for part in states(state):
        facts["placement"] = repr(part.placement)
    for path, leaf in tree.with_paths(state):
        facts[f"state {path}"] = f"{leaf.dtype} {list(leaf.shape)}"
    return facts | _values(state)


def _values(state: Tree) -> dict[str, Any]:
    """Checksums of the leaves that all processes hold alike: not of pieces, and not of parts of a sum."""
    apart: set[str] = set()
    for part in states(state):
        if isinstance(part.placement, placement.Placement):
            sharding = part.placement.sharding
            apart |= {*(path for path, _ in sharding.paths), *sharding.summands}
    leaves = [(path, leaf) for path, leaf in tree.with_paths(state) if not path.endswith(tuple(apart))]
    return {f"checksum of {path}": processes.checksum(leaf) for path, leaf in leaves}
