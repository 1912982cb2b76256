"""The order of a user-defined sampler, as a function of seed and epoch, whatever state the sampler has."""

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

_CHUNK = 32  # index batches to draw at once, because each `scoped` block takes 20 us
_FEW = 64  # index batches to draw twice and compare
_log = logging.getLogger("purestep")

Ends = Callable[[int], int | None]
"""``ends(epoch)`` is the number of batches after which an epoch stops early, or None."""


class SamplerOrder:
    """The index batches of each epoch.

    A sampler may change from epoch to epoch: it may shuffle its own list in place or count its epochs. So before an
    epoch, the orders of all earlier epochs are drawn, unless they do not change the sampler. Before an epoch that has
    started already, the sampler's initial attributes are restored first.

    Args:
        loader: the loader with the batch sampler or sampler.
        name: the name of the loader, for messages.
        seed: the seed of the loader.
    """

    def __init__(self, loader: DataLoader[Any], *, name: str, seed: int) -> None:
        self._loader = loader
        self._name = name
        self._seed = seed
        self._source: Any = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        parts = [self._source, getattr(self._source, "sampler", None), loader.sampler]
        self._parts: list[Any] = list({id(part): part for part in parts}.values())
        self._first = self._attributes()
        self._at_start = self._first  # at the start of the epoch that runs
        self._next = 0  # the next epoch of the sampler
        self._counts: dict[int, int | None] = {}
        self._is_iterator = any(isinstance(part, Iterator) for part in self._parts)
        self._is_hidden = self._is_iterator or not self._repeats()

    def epoch(self, epoch: int, ends: Ends) -> Iterator[Any]:
        """The order of an epoch."""
        if epoch < self._next and self._is_iterator:
            _log.warning(
                "%s: its sampler is an iterator, so this pass continues where the last one stopped, with other items "
                "(cure: pass a sampler whose __iter__ restarts)",
                self._name,
            )
            self._next = epoch
        self._advance_to(epoch, ends)
        self._next = epoch + 1
        self._at_start = self._attributes()
        return self._drawn(epoch, ends(epoch))

    def count(self, epoch: int, ends: Ends, *, most: int) -> int | None:
        """The number of batches of an epoch; None if it is unknown in advance or larger than ``most``."""
        if self._is_hidden:
            return None
        if epoch not in self._counts:
            now = self._attributes()
            if epoch == self._next - 1:
                self._at_start.restore()
            else:
                self._advance_to(epoch, ends)
                now = self._attributes()
            found = sum(1 for _ in self._drawn(epoch, most + 1))
            now.restore()
            self._counts = {epoch: found if found <= most else None}
        return self._counts[epoch]

    def restore(self) -> None:
        """Restore the sampler's initial attributes."""
        self._first.restore()
        self._next = 0

    def _attributes(self) -> Attributes:
        return Attributes(self._source, but=(self._loader.dataset,))

    def _advance_to(self, epoch: int, ends: Ends) -> None:
        if epoch < self._next:
            self.restore()
        for earlier in range(self._next, epoch):
            self._announce(earlier)
            before = self._attributes()
            deque(self._drawn(earlier, ends(earlier)), maxlen=0)
            if not (self._is_hidden or before.changed()):
                break  # another pass would change nothing either
        self._next = epoch

    def _announce(self, epoch: int) -> None:
        for part in self._parts:
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(epoch)

    def _drawn(self, epoch: int, stop: int | None) -> Iterator[Any]:
        seed = mix(self._seed, "order", epoch)
        own = random_state.own(self._source)
        with random_state.scoped(seed, own):  # the lock keeps other threads from setting the epoch of a shared sampler
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
        """True if two orders drawn from one seed are equal, with the attributes restored in between."""
        try:
            orders: list[Any] = []
            for _ in range(2):
                orders.append(list(self._drawn(0, _FEW)))
                self._first.restore()
        except Exception:  # raised again, with the epoch and batch, when the order is needed
            self._first.restore()
            return True
        if same(*orders):
            return True
        _log.warning(
            "%s: the %s returns two orders for one seed, because it has hidden state: a resumed run will not be the "
            "same bit for bit, and evaluations will not see the same items (cure: store that state in attributes of "
            "the sampler, and draw from torch's, numpy's or Python's global generator)",
            *(self._name, type(self._source if self._source is not None else self._loader).__name__),
        )
        return False


def _copied(indices: Any) -> Any:
    """Copy a list, because a sampler may reuse it for the next batch."""
    return list(cast("list[Any]", indices)) if isinstance(indices, list) else indices
