"""Error messages for settings: convert pydantic's errors to one `ConfigError` with the cure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from ..errors import ConfigError
from ..state import nearest

_BEST = "result.best_state, which fit returns"
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
    "load_best_model_at_end": _BEST,
    "loss_fn": "ps.supervised(loss_fn)",
    "lr": "optim.adamw(lr)",
    "max_grad_norm": "optim.chain(optim.clip_by_global_norm(1.0), ...)",
    "nonfinite": 'program(..., nonfinite="skip")',
    "optimizer": "ps.program(model, objective, optim.adamw(1e-3))",
    "num_workers": "set it in the loaders",
    "patience": "fit(..., early_stopping=5)",
    "precision": 'program(..., precision="bf16-mixed")',
    "restore_best": _BEST,
    "restore_best_weights": _BEST,
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

ALIASES = {
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


def explain(error: ValidationError, fields: Mapping[str, FieldInfo], given: Mapping[str, Any]) -> ConfigError:
    """Combine all errors of pydantic into one `ConfigError`, with the cure of the first field.

    Args:
        error: of the model.
        fields: of the model.
        given: the values that it got.
    """
    by_field: dict[str, list[Any]] = {}
    for detail in error.errors():
        by_field.setdefault(str(detail["loc"][0]) if detail["loc"] else "", []).append(detail)
    findings = [_finding(name, details, fields, given.get(name)) for name, details in by_field.items()]
    return ConfigError("; ".join(what for what, _ in findings), where="fit", hint=findings[0][1])


def _finding(name: str, details: list[Any], fields: Mapping[str, FieldInfo], given: Any) -> tuple[str, str]:
    if details[0]["type"] == "extra_forbidden":
        return _unknown(name, tuple(fields))
    cause = details[0].get("ctx", {}).get("error")
    if not name:  # two fields contradict each other
        return (cause.what, cause.hint) if isinstance(cause, ConfigError) else (str(details[0]["msg"]), "")
    if isinstance(cause, ConfigError):
        return f"{name}={given!r}: {cause.what}", cause.hint
    inner = [each for each in details if len(each["loc"]) > 2]  # of an entry of a mapping
    examples = fields[name].examples or [True]
    example = examples[-1] if given is False else examples[0]  # the last one switches it off
    return f"{name}={given!r}: {reason(inner or details)}", f"{name}={example!r}"


def read(kind: Any, value: Any) -> Any:
    """Read a value as a type of `fields`.

    Raises:
        ValueError: it is none; the message says what it must be.
    """
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise ValueError(reason(error.errors())) from None


def reason(details: list[Any]) -> str:
    """Say what a value must be, from pydantic's errors of the members of its type."""
    causes = [str(each["ctx"]["error"]) for each in details if "error" in each.get("ctx", {})]
    if causes:
        return causes[0]
    texts = [_sentence(each) for each in details]
    return " or ".join(dict.fromkeys(texts)).replace(" or must be ", " or ")


def _sentence(detail: Any) -> str:
    """The text of an error of pydantic, as the part of a sentence behind the value."""
    if detail["type"] == "bool_type":
        return "must be True or False"
    text = str(detail["msg"]).replace("Input should", "must")
    return text[:1].lower() + text[1:]


def _unknown(name: str, known: tuple[str, ...]) -> tuple[str, str]:
    if name in ELSEWHERE:
        return f"{name!r} is not a setting of fit", ELSEWHERE[name]
    close = ALIASES.get(name) or nearest(name, known)
    text = f"{name!r} is not a setting of fit; the settings are {', '.join(known)}"
    return text, close or "use one of these"
