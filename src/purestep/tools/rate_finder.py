"""`find_learning_rate`: the learning rate range test."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Annotated, Any, NamedTuple

import numpy as np

from .. import data, optim, tree
from .. import metrics as metrics_
from ..errors import ConfigError, DataError, StateError, StepContractError
from ..loop import check_pair, inputs, ranks
from ..parallel import processes
from ..state import at_least, check_range, in_range, known_keywords, stacked
from ..types import Device, Empty, Metrics, Program, TrainState

_SKIPPED = (10, 1)  # first and last points that the suggestion ignores, as in Lightning
_LINE = "tx = ps.optim.inject(ps.optim.adamw)(learning_rate=1e-3)"


class RateSweep(NamedTuple):
    """The result of `find_learning_rate`. ``str`` is one line."""

    rates: list[float]  # ascending
    losses: list[float]  # of the same length: smoothed training losses
    suggestion: float | None  # where the loss falls fastest; None if it never falls
    diverged: float | None  # the learning rate at which the sweep stopped early; None if it reached `high`

    def __str__(self) -> str:
        found = "no suggestion" if self.suggestion is None else f"suggestion {self.suggestion:.2e}"
        end = "" if self.diverged is None else f", diverged at {self.diverged:.2e}"
        between = f"{self.rates[0]:.1e} to {self.rates[-1]:.1e}" if self.rates else "none"
        return f"{found}; {len(self.rates)} learning rates, {between}{end}"


@known_keywords
def find_learning_rate(
    program: Program,
    state: TrainState,
    loader: Any,
    *,
    low: Annotated[float, in_range(0.0)] = 1e-7,
    high: float = 1.0,
    steps: Annotated[int, at_least(2)] = 100,
    smoothing: Annotated[float, in_range(0.0, 1.0, "[)")] = 0.98,
    divergence: Annotated[float, in_range(1.0)] | None = 4.0,
    leaf: str = "learning_rate",
    name: str = "train",
) -> RateSweep:
    r"""Train a copy of the state while the learning rate grows, and return the losses: the learning rate range test.

    Example:
        >>> import torch, purestep as ps
        >>> tx = ps.optim.inject(ps.optim.sgd)(learning_rate=0.1)
        >>> program = ps.program(torch.nn.Linear(2, 1), ps.supervised(torch.nn.MSELoss()), tx)
        >>> batches = [(torch.ones(4, 2), torch.ones(4, 1))]
        >>> sweep = find_learning_rate(program, program.init(), batches, low=1e-3, high=10.0, steps=20)
        >>> len(sweep.rates) == len(sweep.losses), sweep.diverged is not None
        (True, True)

    Update i of n uses the learning rate :math:`low \cdot (high / low)^{i / (n - 1)}`. The losses are smoothed as in
    Lightning and fastai: :math:`s_i = a_i / (1 - \beta^i)` with :math:`a_i = \beta a_{i-1} + (1 - \beta) l_i`. The
    suggestion is the learning rate at which they fall fastest over its logarithm; like Lightning's it ignores the first
    10 points and the last. Take it as the order of magnitude of a peak rate, and look at the curve.

    The state is only read. A DataLoader's order depends on seed and epoch, and a loader with ``state_dict`` ends where
    it was; what another loader keeps from epoch to epoch is not restored. A loader with too few batches repeats the
    same epoch.

    Args:
        program: its transform has the learning rate as a leaf, by `optim.inject`; with accumulation, each learning
            rate lasts for one window.
        state: of this program; batches move to its device. With a distributed program every process calls this with
            the whole loader, and gets the same result.
        loader: as for `fit`, but no generator or other iterator that runs once.
        low: the first learning rate, > 0.
        high: the last one, > low.
        steps: the number of learning rates, >= 2.
        smoothing: :math:`\beta` in [0, 1); 0 returns the losses as they are.
        divergence: stop where the smoothed loss exceeds this multiple, > 1, of its minimum, and at a loss that is not
            finite; None: only at the latter.
        leaf: the leaf to change, by the names of `optim.hyperparams`. Inside a `partition`, "learning_rate" sets the
            rate of all groups, and ``"head/learning_rate"`` that of one.
        name: of the loader, for messages.

    Raises:
        ConfigError: a number is out of range; or the learning rate is no leaf, or follows a schedule.
        DataError: the loader is empty, or an iterator.
        RankError: several processes without a distributed state and program; a loader that cannot be divided among
            them.
        StateError: the state is no TrainState, or halted.
        StepContractError: the step returns no ``loss``.

    References:
        Smith, 2017, Cyclical Learning Rates for Training Neural Networks.
    """
    check_range("find_learning_rate", low, ends="()", cure="high=1.0, which exceeds low", high=high)
    stacked.check_plain(state, where="find_learning_rate", pieces=True)
    state = _checked(state, leaf, low)
    window = program.static.accumulate if program.static is not None else 1
    rates, losses, smooth = list[float](), list[float](), 0.0
    how: dict[str, Any] = {"program": program, "seed": int(state.key[0]), "repeats": True}
    with (
        ranks.opened(loader, state, where="find_learning_rate", name=name, **how) as feed,
        closing(_endless(feed, data.device_of(state), name)) as batches,
    ):
        if not feed.restarts:
            raise DataError(
                "the loader is an iterator, whose batches can be loaded once only",
                where=name,
                hint="pass the loader itself instead of iter(loader), or list(batches)",
            )
        for index in range(steps):
            rate = low * (high / low) ** (index / (steps - 1))
            state, loss = _update(program, _with_rate(state, leaf, rate), batches, window)
            loss = processes.from_process(loss, 0)  # all processes end at one rate
            if not math.isfinite(loss) or _is_halted(state):
                return _result(rates, losses, rate)
            smooth = smoothing * smooth + (1 - smoothing) * loss
            rates.append(rate)
            losses.append(smooth / (1 - smoothing ** (index + 1)))
            if divergence is not None and index > 0 and losses[-1] > divergence * min(losses):
                return _result(rates, losses, rate)
    return _result(rates, losses, None)


def _checked(state: TrainState, leaf: str, rate: float) -> TrainState:
    """Return a copy of a state that can train and whose learning rate can change."""
    where = "find_learning_rate"
    if _is_halted(state):
        raise StateError("the state halted, so a step would do nothing", where=where, hint="program.init()")
    try:
        _with_rate(state, leaf, rate)
    except ConfigError as error:
        raise ConfigError(
            f"{leaf} cannot change between steps: {error}", where=where, hint=f"{_LINE}, with a number"
        ) from error
    return tree.clone(state)


def _with_rate(state: TrainState, leaf: str, rate: float) -> TrainState:
    return state._replace(opt_state=optim.set_hyperparams(state.opt_state, **{leaf: rate}))


def _is_halted(state: TrainState) -> bool:
    return not isinstance(state.halted, Empty) and bool(int(state.halted))


def _endless(feed: data.Feed, device: Device, name: str) -> Generator[Any]:
    while True:  # the same epoch: a feed that repeats warns of another order
        yield from data.Prefetched(feed.epoch(0), device, name=name)


def _update(program: Program, state: TrainState, batches: Iterator[Any], window: int) -> tuple[TrainState, float]:
    """Run the steps of one optimizer update; return the state and the loss over them."""
    total: Metrics = metrics_.empty()
    for _ in range(inputs.window_left(state, window)):
        state, found = check_pair(program.train_step(state, next(batches)))
        total = metrics_.merge(total, found)
    if "loss" not in total:
        raise StepContractError(
            "the metrics have no loss", where="train_step", hint='{"loss": ps.Mean(total, weight), ...}'
        )
    return state, float(total["loss"])


def _result(rates: list[float], losses: list[float], diverged: float | None) -> RateSweep:
    skipped, last = _SKIPPED
    # A short sweep keeps its first points: the gradient needs two.
    first = skipped if len(losses) > 2 * skipped else 0
    points = losses[first : len(losses) - last]
    suggestion = None
    if len(points) > 1:
        # The rates are equidistant on the logarithmic axis, so differences of the losses are slopes up to a factor.
        slopes = np.gradient(points)
        steepest = int(slopes.argmin())
        suggestion = rates[first + steepest] if slopes[steepest] < 0 else None
    return RateSweep(rates, losses, suggestion, diverged)
