"""Going back: a good state is kept, and taken up again when a loss or gradient is not finite."""

from __future__ import annotations

from typing import Any

import torch

from .. import rng, tree
from ..compile import live
from ..types import Tree
from .record import Record


class Keeper:
    """The last good state and its record, where a run may go back; nothing is kept where it may not.

    Args:
        allowed: how often, in one run, >= 0.
    """

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed
        self.kept: tuple[Tree, Record] | None = None

    def keep(self, state: Tree, record: Record) -> None:
        """This is a good state: everything known about it has arrived and is finite."""
        if self._allowed and live.states(state):
            self.kept = tree.clone(state), record

    def back(self, state: Tree, record: Record) -> tuple[Tree, Record] | None:
        """The kept state with the counters of the present one, and a record that goes on behind the batches between.

        Calls, key and place in the data go on: what led to the bad step is not repeated. None where there is nothing
        to go back to, or it has been done as often as it may be.
        """
        if self.kept is None or record.rollbacks >= self._allowed:
            return None
        good, then = self.kept
        present = iter(live.states(state))

        def one(node: Any) -> Any:
            if not live.is_state(node):
                return node
            key = next(present).key
            return node._replace(step=torch.full_like(node.step, int(key[1])), key=key.clone())

        return tree.map(one, tree.clone(good), is_leaf=live.is_state), record._replace(
            updates=then.updates,
            interval=then.interval,
            line=then.line,
            last=then.last,
            rollbacks=record.rollbacks + 1,
        )


def past(state: Tree) -> Tree:
    """The tree with its keys behind a call that came to nothing, so that its random numbers are not drawn again."""
    return tree.map(
        lambda node: node._replace(key=rng.advance(node.key)) if live.is_state(node) else node,
        state,
        is_leaf=live.is_state,
    )
