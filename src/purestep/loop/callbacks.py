"""Who is told what happens: sinks and callbacks, and what callbacks answer."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import events, tree
from ..compile import live_state
from ..diagnostics import purity
from ..errors import StateError
from ..types import Metrics, Tree
from . import environment
from .evaluate import Watch
from .loop_state import Record

_log = logging.getLogger("purestep")


class Audience:
    """Sinks, which are told first, and callbacks, whose answers count.

    Args:
        callbacks: in the order in which they are called.
        sinks: guarded, so that none of them raises.
    """

    def __init__(self, callbacks: Iterable[events.Callback], sinks: Iterable[Any]) -> None:
        self._callbacks = tuple(callbacks)
        self._sinks = tuple(sinks)
        self._evaluation: events.Position | None = None  # where the run is, while it evaluates

    @property
    def listens(self) -> bool:
        """Whether there are callbacks: only they see the events of single steps."""
        return bool(self._callbacks)

    def tell(self, event: events.Event) -> Iterator[Any]:
        """Tell everybody; what callbacks answer, one after the other, unless it is None."""
        if isinstance(event, events.EvalEnd):
            self._evaluation = None
        for sink in self._sinks:
            sink(event)
        return self.ask(event)

    def ask(self, event: events.Event) -> Iterator[Any]:
        """Tell the callbacks alone; each one sees what the answer of the one before led to only in later events.

        Raises:
            StateError: a callback wrote into the state that it was shown.
        """
        for callback in self._callbacks:
            answer = _answer(callback, event)
            if answer is not None:
                yield answer

    def position(self, record: Record) -> events.Position:
        """Where the run is, with that record."""
        return self._evaluation or events.Position("train", record.epoch, record.batch)

    def watching(self, state: Tree, loader: str, epoch: int) -> Watch:
        """Tells the callbacks of the batches of an evaluation, which they cannot steer."""

        def watch(batch: Any, metrics: Metrics, index: int) -> None:
            self._evaluation = events.Position(loader, epoch, index + 1)
            if self.listens:
                for _ in self.ask(events.EvalStepEnd(state, loader, metrics, batch, index)):
                    pass

        return watch

    def end(self, event: events.FitEnd) -> None:
        """Tell everybody the end, and close the sinks.

        Every callback hears it, whatever another one raises. What they raise does not hide the error that ended the
        run: it is a note on it.

        Raises:
            Exception: that of a callback, where the run itself has ended well; an ExceptionGroup of several.
        """
        for sink in self._sinks:
            sink(event)
            close = getattr(sink, "close", None)
            if close is not None:
                close()
        failed: list[Exception] = []
        for callback in self._callbacks:
            try:
                _answer(callback, event)
            except Exception as error:
                failed.append(error)
        if event.error is None and failed:
            raise failed[0] if len(failed) == 1 else ExceptionGroup("callbacks failed at FitEnd", failed)
        for error in failed:
            assert event.error is not None
            event.error.add_note(f"a callback failed at FitEnd: {type(error).__name__}: {error}")
            _log.warning("a callback failed at FitEnd: %s: %s (%s)", type(error).__name__, error, error.__notes__[-1])


def _answer(callback: events.Callback, event: events.Event) -> Any:
    shown = getattr(event, "state", ())
    memory = live_state.memory(shown)
    before = [purity.version(part) for part in memory]
    try:
        answer = environment.watched(lambda: callback(event), f"callback {_name(callback)} at {type(event).__name__}")
        _check_untouched(shown, memory, before)
    except Exception as error:
        error.add_note(f"in callback {_name(callback)} at {type(event).__name__}")
        raise
    return answer


def _check_untouched(state: Tree, memory: list[Any], before: list[int]) -> None:
    if not memory:
        return  # it was dead before the callback: FitEnd after a failure
    live_state.check_alive(state)  # a callback may have given it away
    written = [part for part, count in zip(memory, before, strict=True) if purity.version(part) != count]
    if not written:
        return
    # Leaves may lie together in one tensor, whose writes torch counts as one.
    paths = [path for path, leaf in tree.with_paths(state) if leaf is written[0] or _is_in(leaf, written[0])]
    others = f" (or one of {len(paths) - 1} more that lie in one tensor with it)" if len(paths) > 1 else ""
    raise StateError(
        f"a callback wrote into the state that it was shown{others}",
        where=paths[0],
        hint="return a new one: event.state._replace(params={...})",
    )


def _is_in(leaf: Any, memory: Any) -> bool:
    tensors = isinstance(leaf, Tensor) and isinstance(memory, Tensor)
    if not tensors or not leaf.layout is memory.layout is torch.strided or not leaf.numel():
        return False
    return leaf.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()


def _name(callback: Any) -> str:
    return getattr(callback, "__qualname__", type(callback).__qualname__)
