"""One call of a step: its errors get the place in the data, and in the anomaly mode the leaf that is to blame."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import tree
from ..errors import NonFiniteError, PurestepError
from ..types import Metrics, TrainStep, Tree
from .ledger import halts
from .pieces import check_pair
from .record import Record


def called(step: TrainStep, state: Tree, batch: Any, record: Record, *, anomalies: bool) -> tuple[Tree, Metrics]:
    """``step(state, batch)``.

    Args:
        step: a train step.
        state: what it takes.
        batch: the next one of this record.
        record: for the place in messages.
        anomalies: look at the result at once, and name what is not finite.

    Raises:
        StepContractError: it returned something else than a state and metrics.
        NonFiniteError: with ``anomalies``, a loss or gradient that is not finite.
    """
    place = f"epoch {record.epoch + 1}, batch {record.batch + 1}"
    try:
        new, metrics = check_pair(step(state, batch))
    except PurestepError:
        raise
    except Exception as error:
        if anomalies and "returned nan values" in str(error):  # torch's word for it
            raise _named(f"{error} (its forward call is in the warning above)", state, batch, place) from error
        error.add_note(f"in train_step, {place}")
        raise
    if anomalies and halts(new):
        raise _named("the loss or a gradient is not finite", state, batch, place)
    return new, metrics


def _named(found: str, state: Tree, batch: Any, place: str) -> NonFiniteError:
    leaves = [(f"batch/{path}", leaf) for path, leaf in tree.with_paths(batch)] + tree.with_paths(state)
    blamed = next((path.rstrip("/") for path, leaf in leaves if _is_bad(leaf)), None)
    what = "every leaf of batch and state is finite" if blamed is None else f"{blamed} is not finite"
    return NonFiniteError(
        f"{what}; {found}", where=place, hint='ps.program(..., nonfinite="skip"), or mend what is named'
    )


def _is_bad(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and not bool(torch.isfinite(leaf).all())
