"""The order of a sampler of the user's own: a function of seed and epoch, whatever the sampler keeps to itself."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, cast

from torch.utils.data import DataLoader

from ..rng import mix
from . import random_state
from .attribute_state import Attributes
from .equality import same

_CHUNK = 32  # batches of indices drawn at once: scoping the draws takes 20 us
_FEW = 64  # batches of indices that are drawn twice and compared
_log = logging.getLogger("purestep")

Ends = Callable[[int], int | None]
"""Of an epoch, after how many batches it is left; None where it is run to its end."""


class OwnOrder:
    """Batches of indices by epoch.

    A sampler may go from epoch to epoch by itself: shuffle its own list in place, count its epochs. So an epoch is
    entered by drawing the orders of the epochs before, unless they change nothing about the sampler, and one that was
    entered already by putting back what the sampler's attributes were at first.

    Args:
        loader: its batch sampler or sampler is drawn from.
        name: of the loader, for messages.
        seed: of all epochs.
    """

    def __init__(self, loader: DataLoader[Any], *, name: str, seed: int) -> None:
        self._loader = loader
        self._name = name
        self._seed = seed
        self._source: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        parts = [self._source, getattr(self._source, "sampler", None), loader.sampler]
        self._parts: list[Any] = list({id(part): part for part in parts}.values())
        self._first = self._attributes()
        self._begun = self._first  # as the epoch that runs began
        self._next = 0  # the epoch that the sampler stands before
        self._counts: dict[int, int | None] = {}
        self._is_iterator = any(isinstance(part, Iterator) for part in self._parts)
        self._is_hidden = self._is_iterator or not self._repeats()

    def epoch(self, epoch: int, ends: Ends) -> Iterator[Any]:
        """The order of an epoch."""
        if epoch < self._next and self._is_iterator:
            _log.warning(
                "%s: its sampler is an iterator, so this pass goes on where the last one stopped, over other items "
                "(cure: a sampler whose __iter__ begins again)",
                self._name,
            )
            self._next = epoch
        self._stand_before(epoch, ends)
        self._next = epoch + 1
        self._begun = self._attributes()
        return self._drawn(epoch, ends(epoch))

    def count(self, epoch: int, ends: Ends, *, most: int) -> int | None:
        """How many batches an epoch has; None where that cannot be known before, or they are more than ``most``."""
        if self._is_hidden:
            return None
        if epoch not in self._counts:
            now = self._attributes()
            if epoch == self._next - 1:
                self._begun.put_back()
            else:
                self._stand_before(epoch, ends)
                now = self._attributes()
            found = sum(1 for _ in self._drawn(epoch, most + 1))
            now.put_back()
            self._counts = {epoch: found if found <= most else None}
        return self._counts[epoch]

    def put_back(self) -> None:
        """Leave the sampler as it was found."""
        self._first.put_back()
        self._next = 0

    def _attributes(self) -> Attributes:
        return Attributes(self._source, but=(self._loader.dataset,))

    def _stand_before(self, epoch: int, ends: Ends) -> None:
        if epoch < self._next:
            self.put_back()
        for earlier in range(self._next, epoch):
            self._announce(earlier)
            before = self._attributes()
            deque(self._drawn(earlier, ends(earlier)), maxlen=0)
            if not (self._is_hidden or before.changed()):
                break  # nor will another pass change anything
        self._next = epoch

    def _announce(self, epoch: int) -> None:
        for part in self._parts:
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(epoch)

    def _drawn(self, epoch: int, stop: int | None) -> Iterator[Any]:
        seed = mix(self._seed, "order", epoch)
        own = random_state.own(self._source)
        with random_state.scoped(seed, own):  # in which no other thread gives a shared sampler another epoch
            self._announce(epoch)
            iterator = iter(self._source)
        for count in itertools.count():
            size = _CHUNK if stop is None else max(0, min(_CHUNK, stop - count * _CHUNK))
            with random_state.scoped(mix(seed, count), own):
                chunk = [_copied(indices) for indices in islice(iterator, size)]
            if not chunk:
                return
            yield from chunk

    def _repeats(self) -> bool:
        """Whether two orders drawn from one seed are the same, once the attributes are put back in between."""
        try:
            orders: list[Any] = []
            for _ in range(2):
                orders.append(list(self._drawn(0, _FEW)))
                self._first.put_back()
        except Exception:  # which is raised again where the order is needed, with its place
            self._first.put_back()
            return True
        if same(*orders):
            return True
        _log.warning(
            "%s: the %s gives two orders from one seed, since it keeps a state where it cannot be seen: a resumed run "
            "will not be the same bit for bit, and evaluations will not see the same items (cure: keep that state in "
            "attributes of the sampler, and draw from torch's, numpy's or Python's global generator)",
            *(self._name, type(self._source if self._source is not None else self._loader).__name__),
        )
        return False


def _copied(indices: Any) -> Any:
    """A sampler may fill one list again and again."""
    return list(cast("list[Any]", indices)) if isinstance(indices, list) else indices
