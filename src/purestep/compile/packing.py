"""Which parameters share a flat buffer in a compiled step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import packed, tree
from ..types import Labels, Params, TrainState


class Layouts:
    """The layouts of a program's states, for all compiled steps of it.

    Parameters share a buffer that the transform treats alike, and of which in every step so far, and in the updates
    that the state has behind it, either all have had a gradient or none has.
    """

    def __init__(self, labels: Callable[[Params], Labels] | None) -> None:
        self._labels = labels  # None: states keep their tree
        self._apart: list[frozenset[str]] = []
        self._known: dict[Any, packed.Layout | None] = {}

    def of(self, state: Any) -> packed.Layout | None:
        """The layout of a state; None where it keeps its tree."""
        if self._labels is None or not isinstance(state, TrainState):
            return None
        missed = packed.missed(state)
        key = tree.signature(state.params), tuple(sorted(missed.items()))
        if key not in self._known:
            labels = self._labels(state.params)
            own: Labels = {
                n: (label, missed.get(n), tuple(n in part for part in self._apart)) for n, label in labels.items()
            }
            found = packed.layout(state.params, own)
            self._known[key] = found if packed.pack(found, state) is not None else None
        return self._known[key]

    def split(self, names: frozenset[str]) -> bool:
        """Keep these parameters in buffers of their own; False where they have been."""
        if names in self._apart:
            return False
        self._apart.append(names)
        self._known.clear()
        return True

    def known(self, layout: packed.Layout | None) -> bool:
        """Whether a state lies in one of these layouts."""
        return any(layout is found for found in self._known.values())
