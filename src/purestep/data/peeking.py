"""An iterator that can say whether it has another element."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


class Ahead(Iterator[T]):
    """An iterator with `more`, which reads one element ahead.

    If the source raises while it reads ahead, ``next`` raises this error in place of the element: a run that ends here
    does not need the element.

    Example:
        >>> letters = Ahead(iter("ab"))
        >>> letters.more(), list(letters), letters.more()
        (True, ['a', 'b'], False)
    """

    def __init__(self, source: Iterator[T]) -> None:
        self._source = source
        self._held: list[T] = []
        self._failed: Exception | None = None

    def __next__(self) -> T:
        if self._held:
            return self._held.pop()
        if self._failed is not None:
            try:
                raise self._failed
            finally:
                self._failed = None  # its traceback holds this object
        return next(self._source)

    def more(self) -> bool:
        """True if there is another element, or an error in its place."""
        if not self._held and self._failed is None:
            try:
                self._held.append(next(self._source))
            except StopIteration:
                return False
            except Exception as error:
                self._failed = error
        return True

    def close(self) -> None:
        """Close the source."""
        close = getattr(self._source, "close", None)
        if close is not None:
            close()
