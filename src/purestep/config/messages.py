"""Error messages for settings: convert pydantic's errors to one `ConfigError` with the cure."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from ..errors import ConfigError
from . import fields

ELSEWHERE = {
    "accumulate": "program(..., accumulate=4)",
    "accumulate_grad_batches": "program(..., accumulate=4)",
    "accumulation": "program(..., accumulate=4)",
    "batch_size": "set it in the loaders",
    "callbacks": "fit(..., callbacks=[f])",
    "criterion": "ps.supervised(criterion)",
    "d_lr": "build one program for each model: optim.adamw(d_lr)",
    "ema": "program(..., ema=0.999)",
    "g_lr": "build one program for each model: optim.adamw(g_lr)",
    "gradient_accumulation_steps": "program(..., accumulate=4)",
    "gradient_clip_norm": "optim.chain(optim.clip_by_global_norm(1.0), ...)",
    "gradient_clip_val": "optim.chain(optim.clip_by_global_norm(1.0), ...)",
    "learning_rate": "optim.adamw(learning_rate)",
    "logger": "fit(..., sinks=[f]) with your function f(event), or ps.sinks.tensorboard(directory)",
    "loggers": "fit(..., sinks=[f, g])",
    "loss_fn": "ps.supervised(loss_fn)",
    "lr": "optim.adamw(lr)",
    "max_grad_norm": "optim.chain(optim.clip_by_global_norm(1.0), ...)",
    "nonfinite": 'program(..., nonfinite="skip")',
    "optimizer": "ps.program(model, objective, optim.adamw(1e-3))",
    "num_workers": "set it in the loaders",
    "patience": "fit(..., early_stopping=5)",
    "precision": 'program(..., precision="bf16-mixed")',
    "save_dir": 'fit(..., snapshots="runs/name")',
    "save_freq": 'fit(..., snapshots=Snapshots("runs/name", every_epochs=1))',
    "scheduler": "optim.adamw(schedules.warmup_cosine(...))",
    "scheduler_step_per_batch": "schedules.per_epoch(schedule, updates_per_epoch=100), or the schedule itself",
    "seed": "program.init(seed=0)",
    "sinks": "fit(..., sinks=[...])",
    "snapshots": 'fit(..., snapshots="runs/name")',
    "train_batch_size": "set it in the loaders",
    "train_data_dir": "set it in the loaders",
    "val_batch_size": "set it in the loaders",
    "val_data_dir": "set it in the loaders",
    "weight_decay": "optim.adamw(..., weight_decay=0.1)",
}
"""Settings that belong to other functions. `fit` would ignore their values."""

_EXAMPLES = {
    "check_every": "check_every=100",
    "compile": "compile=True",
    "deterministic": "deterministic=True",
    "device": 'device="cuda"',
    "donate": "donate=True",
    "early_stopping": "early_stopping=10",
    "epochs": "epochs=10",
    "evaluate_every": "evaluate_every=1.0",
    "evaluate_on": 'evaluate_on="params"',
    "fast_dev_run": "fast_dev_run=True",
    "histograms": "histograms=500",
    "limit_batches": 'limit_batches={"train": 0.1, "val": 10}',
    "log_every": "log_every=50",
    "max_time": 'max_time="00:08:00:00"',
    "min_epochs": "min_epochs=1",
    "min_steps": "min_steps=1",
    "mode": 'mode="max"',
    "monitor": 'monitor="val_loss"',
    "overfit_batches": "overfit_batches=10",
    "profile": "profile=(10, 13)",
    "record": "record=10",
    "resume": 'resume="auto"',
    "steps": "steps=1000",
}


ALIASES = {
    "load_best_model_at_end": "restore_best",
    "restore_best_weights": "restore_best",
    "best_model_metric": "monitor",
    "compile_model": "compile",
    "early_stop_patience": "early_stopping",
    "early_stopping_patience": "early_stopping",
    "enable_tf32": "tf32",
    "max_epochs": "epochs",
    "max_steps": "steps",
    "n_epochs": "epochs",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "resume_from": "resume",
}
"""Names that other trainers use. Valid in a mapping, an object or a file, but not as a keyword argument of `fit`."""


def explain(error: ValidationError, *, known: tuple[str, ...]) -> ConfigError:
    """Combine all errors of pydantic into one `ConfigError`, with the cure of the first."""
    findings = [_finding(detail, known) for detail in error.errors()]
    return ConfigError("; ".join(what for what, _ in findings), where="fit", hint=findings[0][1])


def _finding(detail: Any, known: tuple[str, ...]) -> tuple[str, str]:
    cause = detail.get("ctx", {}).get("error")
    if not detail["loc"]:
        return (cause.what, cause.hint) if isinstance(cause, ConfigError) else (str(detail["msg"]), "")
    name = str(detail["loc"][0])
    if detail["type"] == "extra_forbidden":
        return _unknown(name, known)
    if isinstance(cause, ConfigError):
        return f"{name}: {cause.what}", cause.hint
    reason = str(cause) if cause is not None else str(detail["msg"])[:1].lower() + str(detail["msg"])[1:]
    given = detail["input"]
    is_empty = isinstance(given, str | int) and not given  # a tensor may have no truth value
    cure = "resume=None" if name == "resume" and is_empty else _EXAMPLES.get(name, f"{name}=True")
    return f"{name}={given!r}: {reason}", cure


def _unknown(name: str, known: tuple[str, ...]) -> tuple[str, str]:
    if name in ELSEWHERE:
        return f"{name!r} is not a setting of fit", ELSEWHERE[name]
    close = ALIASES.get(name) or fields.nearest(name, known)
    text = f"{name!r} is not a setting of fit; the settings are {', '.join(known)}"
    return text, close or "use one of these"
