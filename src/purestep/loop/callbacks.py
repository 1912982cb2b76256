"""Dispatch events to sinks and callbacks, and check that callbacks leave the state as it is."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import events, tree
from ..compile import live_state, states
from ..diagnostics import purity
from ..errors import StateError
from ..types import Metrics, TrainState, Tree
from .evaluate import Watch
from .loop_state import LoopState

_log = logging.getLogger("purestep")


class Callbacks:
    """The sinks of a run, which get each event first, and its callbacks, whose answers steer the run.

    Args:
        callbacks: in the order of calls.
        sinks: guarded, so that none of them raises.
    """

    def __init__(self, callbacks: Iterable[events.Callback], sinks: Iterable[Any]) -> None:
        self._callbacks = tuple(callbacks)
        self._sinks = tuple(sinks)
        self._evaluation: events.Position | None = None  # while the run evaluates

    @property
    def has_callbacks(self) -> bool:
        """True if there are callbacks: sinks do not get the events of single steps."""
        return bool(self._callbacks)

    def dispatch(self, event: events.Event) -> Iterator[Any]:
        """Call the sinks, then the callbacks: see `ask`."""
        if isinstance(event, events.EvalEnd):
            self._evaluation = None
        for sink in self._sinks:
            sink(event)
        return self.ask(event)

    def ask(self, event: events.Event) -> Iterator[Any]:
        """Call the callbacks and yield their answers that are not None.

        All of them get the same event: the result of an answer shows only in later events.

        Raises:
            StateError: a callback wrote into the state of the event.
        """
        for callback in self._callbacks:
            answer = _answer(callback, event)
            if answer is not None:
                yield answer

    def position(self, loop: LoopState) -> events.Position:
        """Return the position of the run."""
        here = events.Position("train", loop.epoch, loop.batch) if self._evaluation is None else self._evaluation
        return here._replace(updates=loop.updates_at_most)

    def watch(self, state: Tree, loader: str, epoch: int) -> Watch:
        """Return a function that dispatches the batches of an evaluation. Answers are ignored."""

        def watch(batch: Any, metrics: Metrics, index: int) -> None:
            self._evaluation = events.Position(loader, epoch, index + 1)
            if self.has_callbacks:
                for _ in self.ask(events.EvalStepEnd(state, loader, metrics, batch, index)):
                    pass

        return watch

    def end(self, event: events.FitEnd) -> None:
        """Dispatch the end of the run to every sink and callback, and close the sinks.

        An error of a callback does not keep the event from the next one. It does not hide the error that ended the
        run: it becomes a note on it.

        Raises:
            Exception: of a callback, if the run itself has ended well; an ExceptionGroup of several.
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
    """Call the callback, and check that it leaves the state of the event as it is: writes of its dicts and tensors."""
    state = getattr(event, "state", ())
    memory = live_state.memory(state)
    before = [purity.version(part) for part in memory]
    # A live state is not marked as read by this.
    parts = [state] if isinstance(state, TrainState) else states(state)
    nodes = [(name, tuple.__getitem__(part, index)) for part in parts for index, name in _DICTS]
    dicts = [(name, node, dict(node)) for name, node in nodes if type(node) is dict]
    try:
        answer = callback(event)
        for name, node, entries in dicts:
            _check_entries(name, node, entries)
        if memory:  # else it was donated before the callback: FitEnd after a failure
            live_state.check_alive(state)  # the callback may have donated it
            for part, count in zip(memory, before, strict=True):
                if purity.version(part) != count:
                    raise StateError(
                        "a callback wrote into the state of its event",
                        where=_places(state, part),
                        hint="return a new one: event.state._replace(params={...})",
                    )
    except Exception as error:
        name = getattr(callback, "__qualname__", type(callback).__qualname__)
        error.add_note(f"in callback {name} at {type(event).__name__}")
        raise
    return answer


_DICTS = tuple((TrainState._fields.index(name), name) for name in ("params", "frozen", "buffers"))


def _check_entries(name: str, node: dict[str, Any], before: dict[str, Any]) -> None:
    if len(node) == len(before) and all(node.get(key) is value for key, value in before.items()):
        return
    key = next((key for key in {**node, **before} if node.get(key) is not before.get(key)), "")
    node.clear()
    node.update(before)
    raise StateError(
        "a callback assigned an entry of the state of its event",
        where=f"{name}/{key}",
        hint=f"return a new state: event.state._replace({name}={{**event.state.{name}, {key!r}: value}})",
    )


def _places(state: Tree, memory: Any) -> str:
    """The leaves in a tensor, for which torch counts writes: a buffer of a compiled step has several."""
    paths = [path for path, leaf in tree.with_paths(state) if leaf is memory or _is_inside(leaf, memory)]
    return paths[0] + (f" or one of {len(paths) - 1} more" if len(paths) > 1 else "")


def _is_inside(leaf: Any, memory: Any) -> bool:
    if not all(isinstance(one, Tensor) and one.layout is torch.strided for one in (leaf, memory)):
        return False
    return leaf.numel() > 0 and leaf.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr()
