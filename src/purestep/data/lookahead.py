"""One element ahead: whether an iterator has more, which only the iterator itself can say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

T = TypeVar("T")


class Ahead(Iterator[T]):
    """An iterator that can be asked whether there is more, for which it takes one element ahead.

    An error that the source raises meanwhile is raised where its element would have come, since a run that ends here
    does not need that element.

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
            raise self._failed
        return next(self._source)

    def more(self) -> bool:
        """Whether there is another element, or an error in its place."""
        if not self._held and self._failed is None:
            try:
                self._held.append(next(self._source))
            except StopIteration:
                return False
            except Exception as error:
                self._failed = error
        return True

    def close(self) -> None:
        """End the source, whoever still holds it."""
        close = getattr(self._source, "close", None)
        if close is not None:
            close()
