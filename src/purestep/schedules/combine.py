"""Combined and converted schedules: a sequence of schedules, schedules by epoch, and torch's schedulers."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import SGD
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..errors import ConfigError
from ..state import check_callable, check_choice, check_count, check_finite, is_number, known_keywords, listed
from .interpolate import Count, Schedule

AnySchedule: TypeAlias = Callable[[Tensor], Tensor]
"""A schedule, or a user's function of the count, which need not accept a Python int."""


@known_keywords
def join(schedules: Sequence[AnySchedule], boundaries: Sequence[int]) -> Schedule:
    """Run schedules one after another; each counts from its own begin. torch's `SequentialLR`.

    Args:
        schedules: at least one.
        boundaries: rising counts at which the second and each later schedule begins, one fewer than schedules.

    Raises:
        ConfigError: the boundaries are not rising counts of at least 1, or their number is wrong; an entry of
            ``schedules`` is not a function.

    Example:
        >>> from purestep.schedules import constant, linear
        >>> warm = join([linear(0.0, 1.0, transition_steps=2), constant(0.5)], [3])
        >>> [float(warm(t)) for t in (1, 2, 3)]
        [0.5, 1.0, 0.5]
    """
    cure = "join([warmup, decay], [100])"
    parts, begins = listed("join", cure, schedules=schedules), listed("join", cure, boundaries=boundaries)
    for index, part in enumerate(parts):
        hint = f"schedules.constant({part!r})" if is_number(part) else cure
        check_callable("join", hint, **{f"schedules[{index}]": part})
    for boundary in begins:
        check_count("join", least=1, boundaries=boundary)
    if len(parts) != len(begins) + 1 or any(later <= sooner for sooner, later in pairwise(begins)):
        raise ConfigError(
            f"{len(parts)} schedules and the boundaries {begins}",
            where="join",
            hint=f"pass rising boundaries, one fewer than schedules: {cure}",
        )

    def schedule(count: Count) -> Tensor:
        t = torch.as_tensor(count)
        value = parts[0](t)
        for begin, part in zip(begins, parts[1:], strict=True):
            # Before its begin a schedule is evaluated at 0, never at a negative count.
            value = torch.where(t < begin, value, part((t - begin).clamp(min=0)))
        return value

    return schedule


@known_keywords
def per_epoch(schedule: AnySchedule, *, updates_per_epoch: int) -> Schedule:
    """Convert a schedule by epoch to a schedule by update: the value is constant within an epoch.

    Args:
        schedule: a function of the count of epochs.
        updates_per_epoch: at least 1; with accumulation, the number of accumulation windows per epoch.

    Raises:
        ConfigError: a number is out of range, or ``schedule`` is not a function.

    Example:
        >>> from purestep.schedules import step
        >>> by_epoch = per_epoch(step(1.0, 1, gamma=0.5), updates_per_epoch=10)
        >>> [float(by_epoch(t)) for t in (9, 10, 20)]
        [1.0, 0.5, 0.25]
    """
    check_callable("per_epoch", "per_epoch(schedules.step(0.1, 30), updates_per_epoch=100)", schedule=schedule)
    check_count("per_epoch", least=1, updates_per_epoch=updates_per_epoch)
    return lambda count: schedule(torch.div(torch.as_tensor(count), updates_per_epoch, rounding_mode="floor"))


def from_torch_scheduler(
    scheduler: Callable[..., LRScheduler], learning_rate: float, *, steps: int, key: str = "lr", **kwargs: Any
) -> Schedule:
    """Tabulate the learning rates of one of torch's schedulers.

    `OneCycleLR` and `CyclicLR` also cycle the momentum, unless ``cycle_momentum=False`` is passed. A table holds one
    hyperparameter: ``key="momentum"`` tabulates the momentum, for an optimizer with both injected:
    ``optim.inject(optim.sgd)(learning_rate=rates, momentum=momenta)``, or ``b1=momenta`` for ``optim.adamw``.

    Args:
        scheduler: a class of `torch.optim.lr_scheduler` or a subclass, or a function ``optimizer -> scheduler`` (for
            `SequentialLR` and `ChainedScheduler`).
        learning_rate: the initial learning rate of the optimizer, finite.
        steps: length of the table, at least 1; its last value holds afterwards. Inside `per_epoch`, in epochs.
        key: the entry of the optimizer's parameter group: "lr" or "momentum".
        **kwargs: further arguments of the scheduler.

    Raises:
        ConfigError: the scheduler is `ReduceLROnPlateau`, which depends on a metric, or is an instance; a value is not
            finite; ``key`` has another value.

    Warns:
        UserWarning: the scheduler cycles the momentum, and the table holds the learning rate only.

    Example:
        >>> from torch.optim.lr_scheduler import LambdaLR
        >>> halving = from_torch_scheduler(LambdaLR, 1.0, steps=10, lr_lambda=lambda t: 0.5**t)
        >>> [float(halving(t)) for t in (0, 2, 100)]
        [1.0, 0.25, 0.001953125]
    """
    check_finite("from_torch_scheduler", learning_rate=learning_rate)
    check_count("from_torch_scheduler", least=1, steps=steps)
    check_choice("from_torch_scheduler", ("lr", "momentum"), key=key)
    table = torch.tensor(_tabulate(scheduler, learning_rate, steps, key, kwargs), dtype=torch.float64)

    tables: dict[torch.device, Tensor] = {}

    def schedule(count: Count) -> Tensor:
        t = torch.as_tensor(count)
        dtype = torch.float32 if t.device.type == "mps" else torch.float64
        # A graph must not copy from the host, so an eager call (such as in `init`) copies the table to its device.
        is_eager = type(t) is Tensor and not torch.compiler.is_dynamo_compiling()
        if is_eager and t.device != table.device and t.device not in tables:
            tables[t.device] = table.to(dtype=dtype).to(t.device)  # Once: a copy from the host waits for the device.
        values = tables[t.device] if t.device in tables else table.to(dtype=dtype).to(t.device, non_blocking=True)
        # Not table[t]: indexing with a 0-d tensor reads it back to the host.
        return values.index_select(0, t.clamp(0, steps - 1).reshape(1)).reshape(())

    return schedule


def _tabulate(
    scheduler: Callable[..., LRScheduler], learning_rate: float, steps: int, key: str, kwargs: dict[str, Any]
) -> list[float]:
    _check_scheduler(scheduler)
    optimizer = SGD([torch.zeros(1)], lr=learning_rate, momentum=0.9)  # Cyclic schedulers require momentum.
    built: Any = scheduler(optimizer, **kwargs)  # A user's function may return anything.
    _check_scheduler(type(built) if isinstance(built, LRScheduler) else built)
    group = optimizer.param_groups[0]
    values, momenta = [float(group[key])], {float(group["momentum"])}
    for _ in range(steps - 1):
        optimizer.step()
        built.step()
        values.append(float(group[key]))
        momenta.add(float(group["momentum"]))
    if key == "momentum" and len(momenta) == 1:
        name = type(built).__name__
        raise ConfigError(f"{name} does not cycle the momentum", where="from_torch_scheduler", hint='key="lr"')
    if key == "lr" and len(momenta) > 1:
        name = type(built).__name__
        warnings.warn(
            f"{name} cycles the momentum between {min(momenta):g} and {max(momenta):g}, but this schedule holds the "
            "learning rate only (cure: pass cycle_momentum=False; or call "
            f'from_torch_scheduler({name}, ..., key="momentum") and pass both to '
            "optim.inject(optim.sgd)(learning_rate=..., momentum=...))",
            UserWarning,
            stacklevel=4,
        )
    for index, value in enumerate(values):
        if not math.isfinite(value):
            raise ConfigError(
                f"the {'learning rate' if key == 'lr' else key} of step {index} is {value}",
                where="from_torch_scheduler",
                hint=f"steps={index}",
            )
    return values


def _check_scheduler(scheduler: Any) -> None:
    kind = scheduler if inspect.isclass(scheduler) else type(scheduler)
    if issubclass(kind, ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau depends on a metric, but a schedule depends only on the count of updates",
            where="from_torch_scheduler",
            hint="ps.fit(..., callbacks=[ps.reduce_on_plateau('val_loss')]), with optim.inject around the optimizer",
        )
    if isinstance(scheduler, LRScheduler) or not callable(scheduler):
        raise ConfigError(
            f"the scheduler is a {type(scheduler).__name__}, not a class",
            where="from_torch_scheduler",
            hint="pass the class and its arguments: from_torch_scheduler(StepLR, 0.1, steps=100, step_size=30)",
        )
