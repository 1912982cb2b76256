"""How long, how often and on how much: everything of a Trainer that is a `FitConfig` here."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from ...errors import ConfigError
from .. import values
from ..fit import FitConfig
from .signature import EXAMPLES, HERE, checked


def read_accumulate(args: Mapping[str, Any]) -> int:
    """Micro-batches an update."""
    return checked("accumulate_grad_batches", args["accumulate_grad_batches"], values.count)


def read_fit(args: Mapping[str, Any], device: str | None) -> FitConfig:
    """The settings of the run. A debugging mode replaces the limits and intervals that it overrides in Lightning.

    Raises:
        ConfigError: a value out of its range, or two that contradict each other.
    """
    dev_run = checked("fast_dev_run", args["fast_dev_run"], _batches_of_dev_run)
    overfit = checked("overfit_batches", args["overfit_batches"], values.share)
    fields: dict[str, Any] = {
        **_limits(args, dev_run),
        "log_every": 50 if args["log_every_n_steps"] is None else _least("log_every_n_steps", args),
        "deterministic": args["deterministic"] or False,
        "cudnn_benchmark": args["benchmark"],
        "detect_anomaly": args["detect_anomaly"],
        "fast_dev_run": dev_run,
        "overfit_batches": overfit,
        "progress": args["enable_progress_bar"] is not False,
        "device": device,
    }
    every, limits = _interval(args), _batch_limits(args)
    if not dev_run:
        fields["evaluate_every"] = every
    if not dev_run and not overfit:
        fields["limit_batches"] = limits
    try:
        return FitConfig(**fields)
    except ConfigError as error:
        raise ConfigError(error.what, where=HERE, hint=error.hint) from None


def _batches_of_dev_run(value: Any) -> int:
    return int(value) if isinstance(value, bool) else values.count(value, least=0)


def _least(name: str, args: Mapping[str, Any]) -> int:
    return 0 if args[name] is None else checked(name, args[name], lambda value: values.count(value, least=0))


def _limits(args: Mapping[str, Any], dev_run: int) -> dict[str, Any]:
    epochs, steps, duration = args["max_epochs"], args["max_steps"], args["max_time"]
    if epochs is None and steps in (None, -1) and duration is None and not dev_run:
        raise ConfigError(
            f"max_epochs=None and max_steps={steps}: nothing limits the run (Lightning trains 1000 epochs then)",
            where=HERE,
            hint="max_epochs=10, or max_epochs=-1 to go on until it is stopped",
        )
    return {
        "epochs": None if epochs is None else checked("max_epochs", epochs, lambda v: values.count(v, infinite=True)),
        "steps": None if steps in (None, -1) else checked("max_steps", steps, values.count),
        "max_time": None if duration is None else checked("max_time", duration, values.seconds),
        "min_epochs": _least("min_epochs", args) or None,
        "min_steps": _least("min_steps", args) or None,
    }


def _batch_limits(args: Mapping[str, Any]) -> dict[str, int | float] | None:
    found: dict[str, int | float] = {}
    for loader in ("train", "val"):
        name = f"limit_{loader}_batches"
        if args[name] is not None:
            limit = checked(name, args[name], values.share)
            if not (isinstance(limit, float) and limit == 1.0):
                found[loader] = limit
    return found or None


def _interval(args: Mapping[str, Any]) -> int | float:
    """``val_check_interval`` and ``check_val_every_n_epoch`` in updates (an int) or epochs (a float)."""
    interval, epochs = args["val_check_interval"], args["check_val_every_n_epoch"]
    if isinstance(interval, str | Mapping | timedelta):
        raise ConfigError(
            f"val_check_interval={interval!r}: evaluation goes by batches or epochs, not by the clock",
            where=HERE,
            hint=EXAMPLES["val_check_interval"],
        )
    found = 1.0 if interval is None else checked("val_check_interval", interval, lambda v: values.share(v, least=1))
    every = None if epochs is None else checked("check_val_every_n_epoch", epochs, values.count)
    if isinstance(found, float) and every is None:
        raise ConfigError(
            f"check_val_every_n_epoch=None counts batches, and val_check_interval={found} is a share of an epoch",
            where=HERE,
            hint="val_check_interval=100, or check_val_every_n_epoch=1",
        )
    whole_epochs = isinstance(found, float) and found == 1.0
    if every is not None and every > 1 and not whole_epochs:
        raise ConfigError(
            f"val_check_interval={found!r} within one of {every} epochs cannot be had",
            where=HERE,
            hint=f"check_val_every_n_epoch={every} alone, or val_check_interval={found!r} alone",
        )
    return found * (every or 1) if isinstance(found, float) else _updates(found, every, read_accumulate(args))


def _updates(batches: int, every: int | None, micro: int) -> int:
    if batches > 1 and every is not None:
        warnings.warn(
            f"{HERE}: val_check_interval={batches} is counted over the whole run, where Lightning would start anew "
            "each epoch; say so with check_val_every_n_epoch=None, or give a share of an epoch such as 0.25",
            UserWarning,
            stacklevel=5,
        )
    if batches % micro:
        raise ConfigError(
            f"val_check_interval={batches} batches is no whole number of updates of accumulate_grad_batches={micro}",
            where=HERE,
            hint=f"val_check_interval={micro * max(1, batches // micro)}",
        )
    return batches // micro
