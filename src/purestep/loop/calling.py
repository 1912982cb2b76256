"""Calls of a step: errors get the place in the data, and in the anomaly mode the leaf that is to blame; a state that
changes its kind is found."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import purity, tree
from ..errors import NonFiniteError, PurestepError, StepContractError
from ..types import Metrics, TrainStep, Tree
from .ledger import halts
from .looks import Looks
from .pieces import check_pair
from .record import Record

_EVERY = 64  # calls between two looks at the kind of the state, which take a microsecond a leaf


class Caller:
    """``caller(state, batch, record)`` calls a train step.

    Args:
        step: ``(state, batch) -> (state, metrics)``.
        state: whose structure, shapes and dtypes stay what they are.
        looks: at the first calls.
        anomalies: look at every result at once, and name what is not finite.
        compiled: the step compares states itself, and makes them live ones.
    """

    def __init__(self, step: TrainStep, state: Tree, looks: Looks, *, anomalies: bool, compiled: bool) -> None:
        self._step = step
        self._looks = looks
        self._anomalies = anomalies
        self._compiled = compiled
        self._kind = purity.Kind(state)
        self._calls = 0
        self._stop_at = 1  # the next call that is more than a call

    def __call__(self, state: Tree, batch: Any, record: Record) -> tuple[Tree, Metrics]:
        """``step(state, batch)``, the next batch of this record.

        Raises:
            StepContractError: it returned something else than a state of the same kind and metrics, or is not pure.
            NonFiniteError: with ``anomalies``, a loss or gradient that is not finite.
        """
        self._calls += 1
        try:
            if self._calls == self._stop_at:
                new, metrics = self._looked(state, batch, _place(record))
            else:
                new, metrics = check_pair(self._step(state, batch))
        except PurestepError:
            raise
        except Exception as error:
            if self._anomalies and "returned nan values" in str(error):  # torch's word for it
                raise _named(f"{error} (its forward call is in the warning above)", state, batch, record) from error
            error.add_note(f"in train_step, {_place(record)}")
            raise
        if self._anomalies and halts(new):
            raise _named("the loss or a gradient is not finite", state, batch, record)
        return new, metrics

    def _looked(self, state: Tree, batch: Any, place: str) -> tuple[Tree, Metrics]:
        calls = self._calls
        found = self._looks(state, batch, place) if calls == self._looks.due else None
        if found is None or self._compiled:
            found = check_pair(self._step(state, batch))
        if not self._compiled:
            self._compare(found[0], place)
        self._stop_at = min(self._looks.due, calls * 2 if calls < _EVERY else calls + _EVERY)
        return found

    def _compare(self, new: Tree, place: str) -> None:
        try:
            self._kind.check(new)
        except purity.Impure as error:
            where = f"train_step, up to {place}, {error.where}"
            raise StepContractError(error.what, where=where, hint=error.hint) from None


def _place(record: Record) -> str:
    return f"epoch {record.epoch + 1}, batch {record.batch + 1}"


def _named(found: str, state: Tree, batch: Any, record: Record) -> NonFiniteError:
    leaves = [(f"batch/{path}", leaf) for path, leaf in tree.with_paths(batch)] + tree.with_paths(state)
    blamed = tuple(path.rstrip("/") for path, leaf in leaves if _is_bad(leaf))
    what = f"{blamed[0]} is not finite" if blamed else "every leaf of batch and state is finite"
    error = NonFiniteError(
        f"{what}; {found}", where=_place(record), hint='ps.program(..., nonfinite="skip"), or mend what is named'
    )
    error.step, error.leaves, error.state, error.batch = record.calls + 1, blamed, state, batch
    return error


def _is_bad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and not bool(torch.isfinite(leaf).all())
