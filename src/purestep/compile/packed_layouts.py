"""Assignment of parameters to flat buffers in a compiled step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import tree
from ..state import packed, stacked
from ..types import Labels, Params, TrainState


class Layouts:
    """The layouts of a program's states, shared by all of its compiled steps.

    Parameters share a buffer if the transform treats them alike and if, in every step so far and in the updates that
    the state records, either all of them had a gradient or none.
    """

    def __init__(self, labels: Callable[[Params], Labels] | None) -> None:
        self._labels = labels  # None: states keep their tree
        self._split: list[frozenset[str]] = []
        self._known: dict[Any, packed.Layout | None] = {}

    def of(self, state: Any) -> packed.Layout | None:
        """The layout of a state; None if it keeps its tree."""
        if self._labels is None or not isinstance(state, TrainState):
            return None
        missed = packed.missed(state)
        key = tree.signature(state.params), tuple(sorted(missed.items()))
        if key not in self._known:
            many = stacked.size(state)
            params = {name: value[0] for name, value in state.params.items()} if many else state.params
            labels = self._labels(params)
            own: Labels = {
                n: (label, missed.get(n), tuple(n in part for part in self._split)) for n, label in labels.items()
            }
            found = packed.layout(params, own)
            self._known[key] = found if packed.pack(found, state) is not None else None
        return self._known[key]

    def split(self, names: frozenset[str]) -> bool:
        """Put these parameters into separate buffers; return False if they already are."""
        if names in self._split:
            return False
        self._split.append(names)
        self._known.clear()
        return True

    def known(self, layout: packed.Layout | None) -> bool:
        """True if a layout is one of these."""
        return any(layout is found for found in self._known.values())
