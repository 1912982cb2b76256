"""Calls of a step: errors get the place in the data, and in the anomaly mode the leaf that is to blame; a state that
changes its kind is found."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..errors import NonFiniteError, PurestepError, StepContractError
from ..types import Metrics, TrainStep, Tree
from .ledger import halts
from .pieces import check_pair
from .record import Record

_EVERY = 64  # calls between two looks at the kind of the state, which take a microsecond a leaf


class Caller:
    """``caller(state, batch, record)`` calls a train step.

    Args:
        step: ``(state, batch) -> (state, metrics)``.
        state: whose structure, shapes and dtypes stay what they are.
        anomalies: look at every result at once, and name what is not finite.
        compiled: the step compares states itself, and makes them live ones.
    """

    def __init__(self, step: TrainStep, state: Tree, *, anomalies: bool, compiled: bool) -> None:
        self._step = step
        self._anomalies = anomalies
        self._kind = None if compiled else tree.signature(state)
        self._leaves = _described(state)
        self._calls = 0

    def __call__(self, state: Tree, batch: Any, record: Record) -> tuple[Tree, Metrics]:
        """``step(state, batch)``, the next batch of this record.

        Raises:
            StepContractError: it returned something else than a state of the same kind and metrics.
            NonFiniteError: with ``anomalies``, a loss or gradient that is not finite.
        """
        place = f"epoch {record.epoch + 1}, batch {record.batch + 1}"
        try:
            new, metrics = check_pair(self._step(state, batch))
        except PurestepError:
            raise
        except Exception as error:
            if self._anomalies and "returned nan values" in str(error):  # torch's word for it
                raise _named(f"{error} (its forward call is in the warning above)", state, batch, place) from error
            error.add_note(f"in train_step, {place}")
            raise
        if self._anomalies and halts(new):
            raise _named("the loss or a gradient is not finite", state, batch, place)
        self._calls += 1
        if self._calls % _EVERY == 0 or self._calls & (self._calls - 1) == 0:
            self._compare(new, place)
        return new, metrics

    def _compare(self, new: Tree, place: str) -> None:
        if self._kind is None or tree.signature(new) == self._kind:
            return
        before, after = self._leaves, _described(new)
        path = next((path for path in {**before, **after} if before.get(path) != after.get(path)), "")
        what = f"{before.get(path, 'nothing')} became {after.get(path, 'nothing')}" if path else "other node types"
        raise StepContractError(
            f"the step changes its state: {path or 'state'}: {what}",
            where=f"train_step, up to {place}",
            hint="return a state of the structure, shapes and dtypes that went in (.to(old.dtype))",
        )


def _described(state: Tree) -> dict[str, str]:
    return {
        path: f"{'nested' if leaf.is_nested else list(leaf.shape)} {leaf.dtype}"
        if isinstance(leaf, Tensor)
        else type(leaf).__name__
        for path, leaf in tree.with_paths(state)
    }


def _named(found: str, state: Tree, batch: Any, place: str) -> NonFiniteError:
    leaves = [(f"batch/{path}", leaf) for path, leaf in tree.with_paths(batch)] + tree.with_paths(state)
    blamed = next((path.rstrip("/") for path, leaf in leaves if _is_bad(leaf)), None)
    what = "every leaf of batch and state is finite" if blamed is None else f"{blamed} is not finite"
    return NonFiniteError(
        f"{what}; {found}", where=place, hint='ps.program(..., nonfinite="skip"), or mend what is named'
    )


def _is_bad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and not bool(torch.isfinite(leaf).all())
