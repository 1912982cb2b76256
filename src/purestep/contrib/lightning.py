"""The arguments of a Lightning Trainer (2.6) as purestep's own settings; Lightning itself is not needed.

Each argument is honoured, or refused with the cure; none is dropped. Where Lightning is ambiguous or surprising,
`from_lightning` states the difference.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch

from ..config import FitConfig, fields, sources
from ..errors import ConfigError, RankError
from ..optim import Transform, clip_by_global_norm, clip_by_value, identity
from ..validation import is_number

HERE = "from_lightning"

DEFAULTS: dict[str, Any] = {
    "accelerator": "auto",
    "strategy": "auto",
    "devices": "auto",
    "num_nodes": 1,
    "precision": None,
    "logger": None,
    "callbacks": None,
    "fast_dev_run": False,
    "max_epochs": None,
    "min_epochs": None,
    "max_steps": -1,
    "min_steps": None,
    "max_time": None,
    "limit_train_batches": None,
    "limit_val_batches": None,
    "limit_test_batches": None,
    "limit_predict_batches": None,
    "overfit_batches": 0.0,
    "val_check_interval": None,
    "check_val_every_n_epoch": 1,
    "num_sanity_val_steps": None,
    "log_every_n_steps": None,
    "enable_checkpointing": None,
    "enable_progress_bar": None,
    "enable_model_summary": None,
    "accumulate_grad_batches": 1,
    "gradient_clip_val": None,
    "gradient_clip_algorithm": None,
    "deterministic": None,
    "benchmark": None,
    "inference_mode": True,
    "use_distributed_sampler": True,
    "profiler": None,
    "detect_anomaly": False,
    "barebones": False,
    "plugins": None,
    "sync_batchnorm": False,
    "reload_dataloaders_every_n_epochs": 0,
    "default_root_dir": None,
    "enable_autolog_hparams": True,
    "model_registry": None,
}
"""The signature of Lightning 2.6."""

EXAMPLES = {
    "accumulate_grad_batches": "accumulate_grad_batches=4",
    "check_val_every_n_epoch": "check_val_every_n_epoch=1",
    "fast_dev_run": "fast_dev_run=True",
    "limit_train_batches": "limit_train_batches=0.1, or 10",
    "limit_val_batches": "limit_val_batches=0.1, or 10",
    "log_every_n_steps": "log_every_n_steps=50",
    "max_epochs": "max_epochs=10",
    "max_steps": "max_steps=1000",
    "max_time": 'max_time="00:08:00:00"',
    "min_epochs": "min_epochs=1",
    "min_steps": "min_steps=1",
    "overfit_batches": "overfit_batches=10",
    "val_check_interval": "val_check_interval=1.0 for each epoch, 100 for every 100 batches",
}


def checked(name: str, value: Any, check: Callable[[Any], Any]) -> Any:
    """``check(value)``, its complaint with the argument's name and an example.

    Raises:
        ConfigError: what ``check`` raised as a ValueError.
    """
    try:
        return check(value)
    except ValueError as error:
        raise ConfigError(f"{name}={value!r}: {error}", where=HERE, hint=EXAMPLES.get(name, f"{name}=True")) from None


def check_one_process(args: Mapping[str, Any]) -> None:
    """A strategy or number of nodes that means several processes is refused.

    Raises:
        RankError: several processes.
        ConfigError: no such strategy, or no number of nodes.
    """
    strategy, nodes = args["strategy"], args["num_nodes"]
    several = ("ddp", "fsdp", "deepspeed", "dp", "model_parallel", "xla", "horovod")
    if isinstance(strategy, str) and strategy.startswith(several):
        raise RankError(
            f"strategy={strategy!r}: several processes are not supported yet", where=HERE, hint='strategy="auto"'
        )
    if strategy not in ("auto", "single_device"):
        raise ConfigError(f"strategy={strategy!r} is not known", where=HERE, hint='strategy="auto"')
    if checked("num_nodes", nodes, fields.count) > 1:
        raise RankError(f"num_nodes={nodes}: several processes are not supported yet", where=HERE, hint="num_nodes=1")


def read_device(args: Mapping[str, Any]) -> str | None:
    """A torch device, or None where Lightning would choose one itself.

    Raises:
        ConfigError: no such accelerator or device.
        RankError: more than one device.
    """
    accelerator = args["accelerator"]
    kinds: dict[Any, str | None] = {"auto": None, "cpu": "cpu", "cuda": "cuda", "gpu": _gpu(), "mps": "mps"}
    if not isinstance(accelerator, str) or accelerator not in kinds:
        raise ConfigError(
            f"accelerator={accelerator!r} is not supported; there are {', '.join(kinds)}",
            where=HERE,
            hint='accelerator="auto"',
        )
    kind, index = kinds[accelerator], _index(args["devices"], accelerator)
    if index is None:
        return kind
    if kind == "cpu":
        raise ConfigError(f"devices={args['devices']!r}: a CPU has no index", where=HERE, hint="devices=1")
    return f"{kind or _gpu()}:{index}"


def _gpu() -> str:
    return "mps" if torch.backends.mps.is_available() and not torch.cuda.is_available() else "cuda"


def _index(devices: Any, accelerator: str) -> int | None:
    """The index of the one device, None where any will do."""
    if devices == "auto":
        return None
    chosen = devices.split(",") if isinstance(devices, str) and "," in devices else devices
    try:
        if isinstance(chosen, list | tuple):
            indices = [fields.count(one, least=0) for one in chosen if one != ""]
            number = len(indices)
        else:
            indices, number = [], fields.count(chosen, infinite=True)
    except ValueError:
        indices, number = [], 0
    if number == -1:
        number = 1 if accelerator in ("cpu", "mps") else max(1, torch.cuda.device_count())
    if number == 0:
        raise ConfigError(f"devices={devices!r} names no device", where=HERE, hint='devices=1, or "auto"')
    if number > 1:
        raise RankError(
            f"devices={devices!r} is {number} devices: several processes are not supported yet",
            where=HERE,
            hint="devices=1",
        )
    return indices[0] if indices else None


def read_precision(value: Any) -> str:
    """The precision by the name that it has here, from any of Lightning's spellings.

    Raises:
        ConfigError: none that there is here.
    """
    names = {
        "None": "32-true",
        "64": "64-true",
        "32": "32-true",
        "16": "16-mixed",
        "bf16": "bf16-mixed",
    }
    known = ("64-true", "32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed")
    found = names.get(str(value), str(value))
    if found in known:
        return found
    raise ConfigError(
        f"precision={value!r} is not supported; there are {', '.join(known)}", where=HERE, hint='precision="bf16-mixed"'
    )


def read_accumulate(args: Mapping[str, Any]) -> int:
    """Micro-batches an update."""
    return checked("accumulate_grad_batches", args["accumulate_grad_batches"], fields.count)


def read_fit(args: Mapping[str, Any], device: str | None) -> FitConfig:
    """The settings of the run. A debugging mode replaces the limits and intervals that it overrides in Lightning.

    Raises:
        ConfigError: a value out of its range, or two that contradict each other.
    """
    dev_run = checked("fast_dev_run", args["fast_dev_run"], _batches_of_dev_run)
    overfit = checked("overfit_batches", args["overfit_batches"], fields.share)
    settings: dict[str, Any] = {
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
        settings["evaluate_every"] = every
    if not dev_run and not overfit:
        settings["limit_batches"] = limits
    try:
        return FitConfig(**settings)
    except ConfigError as error:
        raise ConfigError(error.what, where=HERE, hint=error.hint) from None


def _batches_of_dev_run(value: Any) -> int:
    return int(value) if isinstance(value, bool) else fields.count(value, least=0)


def _least(name: str, args: Mapping[str, Any]) -> int:
    return 0 if args[name] is None else checked(name, args[name], lambda value: fields.count(value, least=0))


def _limits(args: Mapping[str, Any], dev_run: int) -> dict[str, Any]:
    epochs, steps, duration = args["max_epochs"], args["max_steps"], args["max_time"]
    if epochs is None and steps in (None, -1) and duration is None and not dev_run:
        raise ConfigError(
            f"max_epochs=None and max_steps={steps}: nothing limits the run (Lightning trains 1000 epochs then)",
            where=HERE,
            hint="max_epochs=10, or max_epochs=-1 to go on until it is stopped",
        )
    return {
        "epochs": None if epochs is None else checked("max_epochs", epochs, lambda v: fields.count(v, infinite=True)),
        "steps": None if steps in (None, -1) else checked("max_steps", steps, fields.count),
        "max_time": None if duration is None else checked("max_time", duration, fields.seconds),
        "min_epochs": _least("min_epochs", args) or None,
        "min_steps": _least("min_steps", args) or None,
    }


def _batch_limits(args: Mapping[str, Any]) -> dict[str, int | float] | None:
    found: dict[str, int | float] = {}
    for loader in ("train", "val"):
        name = f"limit_{loader}_batches"
        if args[name] is not None:
            limit = checked(name, args[name], fields.share)
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
    found = 1.0 if interval is None else checked("val_check_interval", interval, lambda v: fields.share(v, least=1))
    every = None if epochs is None else checked("check_val_every_n_epoch", epochs, fields.count)
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


class Plan(NamedTuple):
    """What a Trainer's arguments say, by the builder that takes it.

    Example:
        >>> plan = from_lightning({"max_epochs": 3, "precision": "bf16-mixed", "gradient_clip_val": 1.0})
        >>> plan.program, plan.fit.epochs, plan.device
        ({'precision': 'bf16-mixed', 'accumulate': 1}, 3, None)
    """

    program: dict[str, Any]  # program(model, objective, tx, **plan.program)
    clip: Transform  # tx = optim.chain(plan.clip, optim.adamw(...)); the identity where clipping is off
    fit: FitConfig  # fit(state, loaders, program, plan.fit, **plan.run)
    device: str | None  # that of plan.fit, for a loop of your own; None: fit takes cuda, mps, cpu, in that order
    run: dict[str, Any]  # the other arguments of fit that were given: snapshots, sinks, callbacks


def from_lightning(settings: object, *, strict: bool = False) -> Plan:
    """Read every argument of ``lightning.pytorch.Trainer``.

    Args:
        settings: a mapping, an object with attributes, or the path of a JSON or TOML file. Numbers may be text
            (``"1"`` is an int, ``"1.0"`` a float).
        strict: whether an unknown key is an error instead of a warning.

    Differences from Lightning:

    - One of ``max_epochs``, ``max_steps`` and ``max_time`` is required (Lightning then trains 1000 epochs);
      ``max_epochs=-1`` trains without end.
    - ``val_check_interval`` goes by type: 1.0 is an epoch, 1 a batch; 2.0, which Lightning takes for 2 batches, is
      refused. An int is counted over the whole run, as with ``check_val_every_n_epoch=None``; with the default of 1,
      where Lightning starts to count anew each epoch, that is said in a warning.
    - ``devices="auto"`` is one device. More devices or nodes are refused.
    - ``limit_val_batches`` is the limit of the loader ``"val"``.
    - ``default_root_dir`` is where snapshots go; without it there are none. A run found there is resumed.
    - ``gradient_clip_val=0`` is off, as in Lightning; ``max_steps`` counts the updates of the program's one optimizer.

    Raises:
        ConfigError: a value out of its range, a contradiction, or something that has another place here (the cure
            says which).
        RankError: more than one process.

    Warns:
        UserWarning: an unknown key, with the nearest name; an interval that Lightning counts differently.

    Example:
        >>> from_lightning({"max_epochs": "5", "val_check_interval": "1"}).fit.evaluate_every
        1
    """
    given = _known(sources.as_mapping(settings, where=HERE), strict=strict)
    for name, value in given.items():
        if name in _REFUSED and not _REFUSED[name].accepts(value):
            refusal = _REFUSED[name]
            raise ConfigError(f"{name}={value!r}: {refusal.finding}", where=HERE, hint=refusal.cure)
        if name in _FLAGS:
            checked(name, value, fields.flag)
    args = DEFAULTS | _barebones(given)
    check_one_process(args)
    device = read_device(args)
    return Plan(
        program={"precision": read_precision(args["precision"]), "accumulate": read_accumulate(args)},
        clip=_clip(args),
        fit=read_fit(args, device),
        device=device,
        run=_run(args),
    )


# Those of the second row change nothing here: one process, evaluation without gradients, no record of hyperparameters.
_FLAGS = (
    *("enable_checkpointing", "enable_progress_bar", "detect_anomaly", "barebones", "benchmark"),
    *("inference_mode", "use_distributed_sampler", "sync_batchnorm", "enable_autolog_hparams"),
)
_TEXT = ("precision", "devices", "default_root_dir", "model_registry")


class _Refusal(NamedTuple):
    accepts: Callable[[Any], bool]
    finding: str
    cure: str


def _only(*accepted: Any) -> Callable[[Any], bool]:
    """These values, by type too: 1 is not 1.0."""
    return lambda value: any(type(value) is type(one) and value == one for one in accepted)


_REFUSED = {
    "enable_model_summary": _Refusal(_only(False), "fit prints no summary of the model", "print(state)"),
    "limit_predict_batches": _Refusal(
        _only(1.0), "fit does not predict", "program.bind(state) over itertools.islice(loader, 10)"
    ),
    "limit_test_batches": _Refusal(
        _only(1.0), "fit does not test", "ps.evaluate(state, itertools.islice(test, 10), program.eval_step)"
    ),
    "model_registry": _Refusal(_only(), "nothing is uploaded", "export_weights(path, program, state)"),
    "num_sanity_val_steps": _Refusal(
        _only(0), "nothing is evaluated before training", "a run with fast_dev_run=2 first, or 0 here"
    ),
    "plugins": _Refusal(_only([]), "there are no plugins", "precision=..., or a step of your own"),
    "profiler": _Refusal(_only(), "fit profiles nothing", "with torch.profiler.profile(): ps.fit(...)"),
    "reload_dataloaders_every_n_epochs": _Refusal(
        _only(0),
        "loaders are given once",
        "a loader whose __iter__ opens the data anew: it is called each epoch",
    ),
}


def _known(given: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    for name in given:
        if name in DEFAULTS:
            continue
        close = fields.nearest(name, DEFAULTS)
        what = f"{name!r} is not an argument of Lightning's Trainer"
        if strict:
            raise ConfigError(what, where=HERE, hint=close or f"one of {', '.join(DEFAULTS)}")
        meant = f"; did you mean {close!r}?" if close else ""
        warnings.warn(f"{HERE}: {what} and is not used{meant}", UserWarning, stacklevel=3)
    found = {
        name: value if name in _TEXT else fields.literal(value) for name, value in given.items() if name in DEFAULTS
    }
    # None is "not given" for all but this one, where it means: across epochs.
    return {name: v for name, v in found.items() if v is not None or name == "check_val_every_n_epoch"}


def _barebones(given: dict[str, Any]) -> dict[str, Any]:
    """``barebones=True`` switches off what it names, and contradicts a setting that switches it on."""
    if not given.get("barebones"):
        return given
    off: dict[str, Any] = {
        "enable_checkpointing": False,
        "logger": False,
        "enable_progress_bar": False,
        "log_every_n_steps": 0,
        "fast_dev_run": False,
        "detect_anomaly": False,
    }
    for name in off:
        if given.get(name):
            raise ConfigError(f"barebones=True and {name}={given[name]!r}", where=HERE, hint=f"leave {name} out")
    return given | off


def _clip(args: Mapping[str, Any]) -> Transform:
    limit, algorithm = args["gradient_clip_val"], args["gradient_clip_algorithm"]
    kinds = {"norm": clip_by_global_norm, "value": clip_by_value}
    name = "norm" if algorithm is None else str(algorithm).lower()
    if name not in kinds:
        raise ConfigError(f"gradient_clip_algorithm={algorithm!r} is not known", where=HERE, hint='"norm" or "value"')
    if limit is None:
        return identity()
    if not is_number(limit) or not 0 <= limit < float("inf"):
        raise ConfigError(
            f"gradient_clip_val={limit!r} is no number of at least 0", where=HERE, hint="gradient_clip_val=1.0"
        )
    return kinds[name](float(limit)) if limit else identity()


def _run(args: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if (directory := _snapshots(args)) is not None:
        found["snapshots"] = directory
    logger = args["logger"]
    if logger is False or (isinstance(logger, list | tuple) and not logger):
        found["sinks"] = ()
    elif logger not in (None, True):
        found["sinks"] = _callables("logger", logger, "sinks: CSV, JSONL, TensorBoard, or any f(event)")
    if args["callbacks"]:
        found["callbacks"] = _callables("callbacks", args["callbacks"], "fit(..., callbacks=[f]) with any f(event)")
    return found


def _snapshots(args: Mapping[str, Any]) -> str | None:
    wanted, directory = args["enable_checkpointing"], args["default_root_dir"]
    if wanted and directory is None:
        raise ConfigError(
            "enable_checkpointing=True and no default_root_dir: nothing says where",
            where=HERE,
            hint='default_root_dir="runs/name"',
        )
    if directory is not None and "://" in str(directory):
        raise ConfigError(f"default_root_dir={directory!r} is not on this machine", where=HERE, hint='"runs/name"')
    return None if directory is None or wanted is False else str(directory)


def _callables(name: str, value: Any, cure: str) -> list[Any]:
    found = list(value) if isinstance(value, list | tuple) else [value]
    for one in found:
        if not callable(one):
            raise ConfigError(
                f"{name} holds a {type(one).__name__}, which cannot be called with an event",
                where=HERE,
                hint=_CURES.get(type(one).__name__, cure),
            )
    return found


_CURES = {
    "EarlyStopping": "fit(..., monitor=..., early_stopping=10)",
    "ModelCheckpoint": 'fit(..., snapshots=Snapshots("runs/name", keep=3, keep_best=1))',
    "StochasticWeightAveraging": "program(..., ema=0.999)",
    "LearningRateMonitor": "nothing: every update reports lr",
    "GradientAccumulationScheduler": "program(..., accumulate=4)",
}
