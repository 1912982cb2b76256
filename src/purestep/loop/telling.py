"""Who is told what happens: sinks and callbacks, and what callbacks answer."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from .. import events, purity, tree
from ..errors import StateError
from ..types import Metrics, Tree
from .pieces import Watch

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

    @property
    def listens(self) -> bool:
        """Whether there are callbacks: only they see the events of single steps."""
        return bool(self._callbacks)

    def tell(self, event: events.Event) -> Iterator[Any]:
        """Tell everybody; what callbacks answer, one after the other, unless it is None."""
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

    def watching(self, state: Tree, loader: str) -> Watch | None:
        """Tells the callbacks of the batches of an evaluation, which they cannot steer; None where there are none."""

        def watch(batch: Any, metrics: Metrics, index: int) -> None:
            for _ in self.ask(events.EvalStepEnd(state, loader, metrics, batch, index)):
                pass

        return watch if self.listens else None

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
    before = _versions(event)
    try:
        answer = callback(event)
        _check_untouched(before, event)
    except Exception as error:
        error.add_note(f"in callback {_name(callback)} at {type(event).__name__}")
        raise
    return answer


def _versions(event: Any) -> list[int]:
    """How often each leaf of the event's state was written in place."""
    return [purity.version(leaf) for leaf in tree.leaves(getattr(event, "state", ()))]


def _check_untouched(before: list[int], event: Any) -> None:
    after = _versions(event)
    if after != before:
        paths = zip(tree.paths(event.state), before, after, strict=True)
        raise StateError(
            "a callback wrote into the state that it was shown",
            where=next(path for path, old, new in paths if old != new),
            hint="return a new one: event.state._replace(params={...})",
        )


def _name(callback: Any) -> str:
    return getattr(callback, "__qualname__", type(callback).__qualname__)
