"""`reduce_on_plateau`: a callback of `fit` that lowers the learning rate when a metric stops improving."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau

from .. import stopping
from ..compile import states
from ..errors import ConfigError, StateError
from ..events import EpochEnd, Event, FitEnd, FitStart
from ..optim import hyperparameters
from ..state import at_least, entry_place, in_range, known_keywords, nearest, stacked
from ..types import TrainState

_log = logging.getLogger("purestep")
_Row = tuple[Any, Any, float | None]  # epoch, step, value


@known_keywords
def reduce_on_plateau(
    monitor: str = "val_loss",
    *,
    factor: Annotated[float, in_range(0.0, 1.0)] = 0.1,
    patience: Annotated[int, at_least(0)] = 10,
    mode: stopping.Mode | None = None,
    threshold: Annotated[float, in_range(0.0, ends="[)")] = 1e-4,
    threshold_mode: Literal["rel", "abs"] = "rel",
    cooldown: Annotated[int, at_least(0)] = 0,
    min_scale: Annotated[float, in_range(0.0, 1.0, "[]")] = 0.0,
    leaf: str = "learning_rate",
) -> ReduceOnPlateau:
    """Return a callback that lowers the learning rate when a metric stops improving: torch's `ReduceLROnPlateau`.

    Example:
        >>> import torch, purestep as ps
        >>> tx = ps.optim.inject(ps.optim.sgd)(learning_rate=0.5)
        >>> program = ps.program(torch.nn.Linear(2, 1), ps.supervised(torch.nn.MSELoss()), tx)
        >>> batches = [(torch.zeros(4, 2), torch.zeros(4, 1))]  # nothing left to learn after the first update
        >>> plateau = reduce_on_plateau("train_loss", factor=0.5, patience=1)
        >>> ps.fit(program.init(), batches, program, epochs=6, callbacks=[plateau], progress=False).history["lr"]
        [0.5, 0.5, 0.5, 0.5, 0.25, 0.25]

    The learning rate is a leaf of the state, by `optim.inject`, which the callback multiplies by ``factor``. A compiled
    step uses the new value without recompiling. The callback stores nothing itself: a resumed run finds the learning
    rate in the state, and the rest follows from the history. One object is for one run at a time.

    Rows without a finite value of the metric are ignored: with ``evaluate_every`` not every row has one.

    For an `ensemble`, the metric of a member (``val_loss[1]``) lowers the rate of this member, and a metric of all of
    them (``val_loss``, ``val_loss[best]``) that of all.

    Args:
        monitor: a metric by its name in the history.
        factor: each reduction multiplies the rate by it, in (0, 1).
        patience: rows without improvement before a reduction; the next such row reduces the rate.
        mode: which values are better. None: "min" for a loss, error or perplexity; other metrics need a mode.
        threshold: the least improvement that counts, at least 0.
        threshold_mode: "rel": better than ``best * (1 -/+ threshold)``; "abs": than ``best -/+ threshold``.
        cooldown: rows after a reduction that do not count, at least 0.
        min_scale: lower bound of the learning rate, as a share of the first one (torch's ``min_lr`` over ``lr``).
        leaf: the leaf to change, by the names of `optim.hyperparams`. In a `partition`, "learning_rate" means that of
            all groups, and ``"head/learning_rate"`` that of one.

    Raises:
        ConfigError: a number is out of range; the metric needs a mode. From `fit`: there is no such metric, or no such
            leaf, or it follows a schedule.
        StateError: from `fit`: the state is no TrainState.
    """
    chosen = mode or stopping.default_mode(monitor)
    options: dict[str, Any] = {"factor": factor, "patience": patience, "threshold": threshold, "cooldown": cooldown}
    options |= {"threshold_mode": threshold_mode, "min_lr": min_scale, "eps": 0.0}
    return ReduceOnPlateau(monitor, lambda rate: ReduceLROnPlateau(rate, chosen, **options), leaf)


class ReduceOnPlateau:
    """The callback; see `reduce_on_plateau`."""

    def __init__(
        self, monitor: str, scheduler: Callable[[torch.optim.Optimizer], ReduceLROnPlateau], leaf: str
    ) -> None:
        self.monitor = monitor
        self.leaf = leaf
        self._made = scheduler
        self._begin()

    def _begin(self) -> None:
        self._rate = torch.optim.SGD([torch.zeros(1)], lr=1.0)  # torch's scheduler lowers its learning rate
        self._scheduler = self._made(self._rate)
        self._last: tuple[Any, Any] | None = None  # epoch and step of the last row that counted

    @property
    def _scale(self) -> float:
        """The factor for the learning rate that the run began with, in [0, 1]."""
        return float(self._rate.param_groups[0]["lr"])

    def __call__(self, event: Event) -> TrainState | None:
        if isinstance(event, FitStart):
            self._begin()
            self._names(event.state)
            self._observe(_rows(event, self.monitor))
        elif isinstance(event, EpochEnd):
            self._check_metric(event)
            row = event.record
            before = self._scale
            self._observe([(row.get("epoch"), row.get("step"), row.get(self.monitor))])
            if self._scale != before:
                return self._reduced(event.state, self._scale / before)
        elif isinstance(event, FitEnd) and self._last is None and event.error is None and event.history:
            _log.warning("reduce_on_plateau: %s has had no value in this run", self.monitor)
        return None

    def _observe(self, rows: Iterable[_Row]) -> None:
        for epoch, step, value in rows:
            if value is None or (epoch, step) == self._last:  # an epoch may end right behind an evaluation inside it
                continue
            self._last = epoch, step
            self._scheduler.step(value)

    def _check_metric(self, event: EpochEnd) -> None:
        """Raise if the loader of the metric has been evaluated, and the metric is not among its values."""
        known = [name for name in event.record if name not in ("epoch", "step")]
        loader = self.monitor.partition("_")[0]
        if self._last is None and self.monitor not in known and any(name.startswith(f"{loader}_") for name in known):
            near = nearest(self.monitor, known, likeness=0.0)
            raise ConfigError(
                f"monitor={self.monitor!r} is not among the metrics: {sorted(known)}",
                where="reduce_on_plateau",
                hint=f"reduce_on_plateau({near!r})",
            )

    def _reduced(self, state: TrainState, ratio: float) -> TrainState:
        found = hyperparameters.injected(state.opt_state)
        place = entry_place(self.monitor)
        member = place[0] if place and stacked.size(state) else None
        values = {name: _scaled(found[name], ratio, member) for name in self._names(state)}
        told = (
            f"{name} is now {', '.join(f'{n:g}' for n in new.reshape(-1).tolist())}" for name, new in values.items()
        )
        _log.info("reduce_on_plateau: %s", "; ".join(told))
        return state._replace(opt_state=hyperparameters.set_hyperparams(state.opt_state, **values))

    def _names(self, state: Any) -> list[str]:
        """The full names of the leaves to change."""
        if not isinstance(state, TrainState):
            count = len(states(state))
            raise StateError(
                f"the state is a {type(state).__name__} of {count} TrainStates, so its learning rate is ambiguous",
                where="reduce_on_plateau",
                hint="write a callback with torch's ReduceLROnPlateau and optim.set_hyperparams",
            )
        found = hyperparameters.injected(state.opt_state)
        names = [name for name in found if self.leaf in (name, name.rpartition("/")[2])]
        if not names:
            follows = self.leaf in hyperparameters.hyperparams(state.opt_state)
            what = "follows a schedule, or is no leaf of inject" if follows else "is not a leaf of this state"
            raise ConfigError(
                f"{self.leaf} {what}",
                where="reduce_on_plateau",
                hint="tx = ps.optim.inject(ps.optim.adamw)(learning_rate=1e-3), with a number",
            )
        return names


def _scaled(value: Tensor, ratio: float, member: int | None) -> Tensor:
    """The hyperparameter times the ratio, for one member of an ensemble or for all."""
    new = value.detach().cpu().double()
    if member is None:
        return new * ratio
    new[member] *= ratio
    return new


def _rows(event: FitStart, monitor: str) -> list[_Row]:
    """The rows of the history so far."""
    values = event.history.get(monitor, [])
    columns = (event.history.get(name, [None] * len(values)) for name in ("epoch", "step"))
    return list(zip(*columns, values, strict=True))
