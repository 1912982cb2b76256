"""Convert the arguments of a Lightning Trainer (2.6) to purestep's settings. Lightning need not be installed.

Each argument is used, or refused with the cure; none is dropped silently. The docstring of `from_lightning` lists the
differences from Lightning.

Reading order: `Plan` and `from_lightning`; then the table of arguments; then one part for each field
of the plan: the device, the program, the run.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from ..errors import ConfigError, RankError
from ..optim import Transform, clip_by_global_norm, clip_by_value, identity
from ..state import check_choice, check_range, nearest
from . import fields, messages, sources
from .settings import FitConfig

_WHERE = "from_lightning"


class Plan(NamedTuple):
    """The arguments of a Lightning Trainer, sorted by the purestep function that takes them.

    Example:
        >>> plan = from_lightning({"max_epochs": 3, "precision": "bf16-mixed", "gradient_clip_val": 1.0})
        >>> plan.program, plan.fit.epochs, plan.device
        ({'precision': 'bf16-mixed', 'accumulate': 1}, 3, None)
    """

    program: dict[str, Any]  # program(model, objective, tx, **plan.program)
    clip: Transform  # tx = optim.chain(plan.clip, optim.adamw(...)); the identity if clipping is off
    fit: FitConfig  # fit(state, loaders, program, plan.fit, **plan.run)
    device: str | None  # as in plan.fit, for your own loop; None: fit takes cuda, mps, cpu, in that order
    run: dict[str, Any]  # other arguments of fit, if set: snapshots, sinks, callbacks
    mesh: Mapping[str, int] = MappingProxyType({})  # with parallel.start(**plan.mesh) as mesh:
    distribute: Mapping[str, str] = MappingProxyType({})  # if not empty: distribute(program, mesh, **plan.distribute)


def from_lightning(settings: object, *, strict: bool = False) -> Plan:
    """Read every argument of ``lightning.pytorch.Trainer``.

    Example:
        >>> from_lightning({"max_epochs": "5", "val_check_interval": "1"}).fit.evaluate_every
        1

    Args:
        settings: a mapping, an object with attributes, or the path of a JSON or TOML file. Numbers may be text
            (``"1"`` is an int, ``"1.0"`` a float).
        strict: True: an unknown key is an error. False: a warning.

    Differences from Lightning:

    - One of ``max_epochs``, ``max_steps`` and ``max_time`` is required (Lightning would train 1000 epochs);
      ``max_epochs=-1`` has no limit.
    - The type of ``val_check_interval`` decides: 1.0 is an epoch, 1 is a batch. 2.0, which means 2 batches in
      Lightning, is refused. An int is counted over the whole run, as with ``check_val_every_n_epoch=None``. With the
      default of 1, Lightning restarts the count in each epoch, so `from_lightning` warns.
    - ``devices="auto"`` is one device, or with a strategy of several processes all that torchrun has started. Several
      devices, nodes, or such a strategy fill ``plan.mesh`` and ``plan.distribute``; torchrun starts the processes.
    - "ddp" holds the whole state in every process; "fsdp" and "deepspeed_stage_1" to "_3" hold pieces of all of it
      (ZeRO-2, which holds no less at rest than stage 3). ``sync_batchnorm=False`` averages the statistics of BatchNorm.
      A strategy is a name: an object of Lightning is refused.
    - ``limit_val_batches`` limits the loader ``"val"``.
    - ``default_root_dir`` is the directory of the snapshots; without it there are none. A run in it is resumed.
    - ``gradient_clip_val=0`` turns clipping off, as in Lightning; ``max_steps`` counts optimizer updates.

    Raises:
        ConfigError: a value is out of its range, two contradict each other, or a setting belongs to another function
            (the cure says which).
        RankError: a strategy that has no equal here (the cure says what has).

    Warns:
        UserWarning: an unknown key, with the nearest name; an interval that Lightning counts differently.
    """
    given = _known(sources.as_mapping(settings, where=_WHERE), strict=strict)
    args = DEFAULTS | {name: _checked(name, value) for name, value in given.items()}
    devices = _read_devices(args["devices"], args["accelerator"])
    processes = _read_processes(args, devices.number)
    device = _read_device(args, None if processes.distribute else devices.first)
    return Plan(
        program={"precision": _read_precision(args["precision"]), "accumulate": args["accumulate_grad_batches"]},
        clip=_clip(args),
        fit=_read_fit(args, device),
        device=device,
        run=_run(args),
        mesh=processes.mesh,
        distribute=processes.distribute,
    )


# --- the arguments ----------------------------------------------------------------------------------------------------


class _Argument(NamedTuple):
    """An argument of a Trainer: what `from_lightning` makes of it before it is read below."""

    default: Any = None  # in Lightning 2.6; None is "not set" there too
    kind: Any = None  # a type of `fields`; None: read below
    example: str = ""  # the cure for a value of another type
    finding: str = ""  # purestep has no such thing: only values of `only` are accepted, and None
    cure: str = ""
    only: tuple[Any, ...] = ()


_BATCHES = "0.1, or 10"
_INTERVAL = "val_check_interval=1.0 for each epoch, 100 for every 100 batches"
ARGUMENTS: dict[str, _Argument] = {
    "accelerator": _Argument("auto"),
    "strategy": _Argument("auto"),
    "devices": _Argument("auto"),
    "num_nodes": _Argument(1, fields.Count, "num_nodes=1"),
    "precision": _Argument(),
    "logger": _Argument(),
    "callbacks": _Argument(),
    "fast_dev_run": _Argument(False, fields.DevRun),
    "max_epochs": _Argument(None, fields.Limit, "max_epochs=10"),
    "min_epochs": _Argument(None, fields.AtLeast0, "min_epochs=1"),
    "max_steps": _Argument(-1, fields.Limit, "max_steps=1000"),
    "min_steps": _Argument(None, fields.AtLeast0, "min_steps=1"),
    "max_time": _Argument(None, fields.Seconds, 'max_time="00:08:00:00"'),
    "limit_train_batches": _Argument(None, fields.ShareOrNone, f"limit_train_batches={_BATCHES}"),
    "limit_val_batches": _Argument(None, fields.ShareOrNone, f"limit_val_batches={_BATCHES}"),
    "limit_test_batches": _Argument(
        finding="fit does not test",
        cure="ps.evaluate(state, itertools.islice(test, 10), program.eval_step)",
        only=(1.0,),
    ),
    "limit_predict_batches": _Argument(
        finding="fit does not predict", cure="ps.predict(program, state, itertools.islice(loader, 10))", only=(1.0,)
    ),
    "overfit_batches": _Argument(0.0, fields.ShareOrNone, "overfit_batches=10"),
    "val_check_interval": _Argument(None, fields.Share, _INTERVAL),
    "check_val_every_n_epoch": _Argument(1, fields.Minimum, "check_val_every_n_epoch=1"),
    "num_sanity_val_steps": _Argument(
        finding="fit evaluates nothing before training", cure="run with fast_dev_run=2 first, or pass 0", only=(0,)
    ),
    "log_every_n_steps": _Argument(None, fields.AtLeast0, "log_every_n_steps=50"),
    "enable_checkpointing": _Argument(None, fields.Flag),
    "enable_progress_bar": _Argument(None, fields.Flag),
    "enable_model_summary": _Argument(
        finding="fit prints no summary of the model", cure="print(ps.summary(program, state, batch))", only=(False,)
    ),
    "accumulate_grad_batches": _Argument(1, fields.Count, "accumulate_grad_batches=4"),
    "gradient_clip_val": _Argument(),
    "gradient_clip_algorithm": _Argument(),
    "deterministic": _Argument(),
    "benchmark": _Argument(None, fields.Flag),
    "inference_mode": _Argument(True, fields.Flag),  # changes nothing: purestep evaluates without gradients
    "use_distributed_sampler": _Argument(True, fields.Flag),
    "profiler": _Argument(
        finding="fit has no profiler", cure="with torch.profiler.profile() as profiler: result = ps.fit(...)"
    ),
    "detect_anomaly": _Argument(False, fields.Flag),
    "barebones": _Argument(
        False,
        finding="fit has no switch for all that it reports",
        cure="logger=False, enable_progress_bar=False, log_every_n_steps=0",
        only=(False,),
    ),
    "plugins": _Argument(
        finding="purestep has no plugins", cure="pass precision=..., or write your own step", only=([],)
    ),
    "sync_batchnorm": _Argument(False, fields.Flag),
    "reload_dataloaders_every_n_epochs": _Argument(
        0,
        finding="fit gets its loaders once",
        cure="pass a loader whose __iter__ reopens the data: it is called in each epoch",
        only=(0,),
    ),
    "default_root_dir": _Argument(),
    "enable_autolog_hparams": _Argument(True, fields.Flag),  # changes nothing: purestep logs no settings
    "model_registry": _Argument(finding="purestep uploads nothing", cure="ps.export_weights(path, program, state)"),
}
"""The signature of Lightning 2.6."""
DEFAULTS = {name: argument.default for name, argument in ARGUMENTS.items()}
_TEXT = ("precision", "devices", "default_root_dir", "model_registry")


def _only(value: Any, *accepted: Any) -> bool:
    """True for these values. Types count: 1 is not 1.0."""
    return any(type(value) is type(one) and value == one for one in accepted)


def _known(given: Mapping[str, Any], *, strict: bool) -> dict[str, Any]:
    for name in given:
        if name in DEFAULTS:
            continue
        close = nearest(name, DEFAULTS)
        what = f"{name!r} is not an argument of Lightning's Trainer"
        if strict:
            raise ConfigError(what, where=_WHERE, hint=close or f"use one of {', '.join(DEFAULTS)}")
        meant = f"; did you mean {close!r}?" if close else ""
        warnings.warn(f"{_WHERE}: {what} and is ignored{meant}", UserWarning, stacklevel=3)
    found = {
        name: value if name in _TEXT else fields.literal(value) for name, value in given.items() if name in DEFAULTS
    }
    # None means "not set", except for check_val_every_n_epoch: count across epochs.
    return {name: v for name, v in found.items() if v is not None or name == "check_val_every_n_epoch"}


def _checked(name: str, value: Any) -> Any:
    """The value of an argument, read as its type.

    Raises:
        ConfigError: it is none of this type, or purestep has no such thing.
    """
    argument = ARGUMENTS[name]
    if argument.finding and not _only(value, *argument.only):
        raise ConfigError(f"{name}={value!r}: {argument.finding}", where=_WHERE, hint=argument.cure)
    if name == "val_check_interval" and isinstance(value, str | Mapping | timedelta):
        what = f"{name}={value!r}: evaluation is counted in batches or epochs, not in time"
        raise ConfigError(what, where=_WHERE, hint=_INTERVAL)
    if argument.kind is None:
        return value
    try:
        return messages.read(argument.kind, value)
    except ValueError as error:
        hint = argument.example or f"{name}=True"
        raise ConfigError(f"{name}={value!r}: {error}", where=_WHERE, hint=hint) from None


# --- the device -------------------------------------------------------------------------------------------------------


class _Processes(NamedTuple):
    """The mesh and the placement that the arguments ask for."""

    mesh: dict[str, int]  # parallel.start(**mesh); empty: one process
    distribute: dict[str, str]  # distribute(program, mesh, **distribute)


_REPLICATED = ("ddp", "ddp_find_unused_parameters_true", "ddp_find_unused_parameters_false")
_SHARDED = ("fsdp", "deepspeed", "deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3")


def _read_processes(args: Mapping[str, Any], count: int | None) -> _Processes:
    """The mesh and the placement of a strategy with so many devices, or empty ones.

    Raises:
        RankError: the strategy has no equal here, or the devices are no count.
        ConfigError: the strategy is unknown.
    """
    strategy, nodes = _strategy(args["strategy"]), args["num_nodes"]
    several = strategy in (*_REPLICATED, *_SHARDED)
    if not several and (count or 1) * nodes == 1:
        return _Processes({}, {})
    if strategy == "single_device":
        raise ConfigError(
            f"strategy='single_device', devices={args['devices']!r} and num_nodes={nodes}",
            where=_WHERE,
            hint='strategy="ddp", or devices=1 and num_nodes=1',
        )
    if not args["use_distributed_sampler"]:
        raise RankError(
            "use_distributed_sampler=False: fit gives every process its rows of each batch of one order",
            where=_WHERE,
            hint="leave it out, and pass the loader of one process; or mark loaders that are cut already: "
            "ps.parallel.sharded(loader)",
        )
    batchnorm = {"batchnorm": "sync" if args["sync_batchnorm"] else "average"}
    if strategy not in _SHARDED:
        return _Processes({} if count is None else {"data": count * nodes}, {"params": "replicate", **batchnorm})
    if count is None:
        raise RankError(f"strategy={strategy!r} and devices='auto'", where=_WHERE, hint="devices=8: those of a node")
    return _Processes({"data": 1, "shard": count * nodes}, {"params": "shard", **batchnorm})


def _strategy(value: Any) -> str:
    """The strategy's name.

    Raises:
        RankError: it has no equal here.
        ConfigError: it is unknown.
    """
    if value in ("auto", "single_device", *_REPLICATED, *_SHARDED):
        return value
    cures = {
        ("ddp_spawn", "ddp_fork", "ddp_notebook"): "it starts the processes itself: start them with torchrun and set "
        'strategy="ddp"',
        ("deepspeed",): 'offloading is not there: strategy="deepspeed_stage_3"',
        ("model_parallel",): "ps.distribute(program, mesh, tensor={...})",
        ("dp", "xla", "horovod"): 'strategy="ddp"',
    }
    for starts, cure in cures.items():
        if str(value).startswith(starts):
            raise RankError(f"strategy={value!r} has no equal here", where=_WHERE, hint=cure)
    hint = 'strategy="auto"'
    if not isinstance(value, str):
        hint = 'strategy="ddp" or "fsdp"; pieces inside of a node: ps.parallel.start(data=nodes, shard=devices)'
    raise ConfigError(f"strategy={value!r} is unknown", where=_WHERE, hint=hint)


def _read_device(args: Mapping[str, Any], index: int | None) -> str | None:
    """The torch device, or None for "auto".

    Raises:
        ConfigError: the accelerator or the device is unknown.
    """
    accelerator = args["accelerator"]
    kinds: dict[Any, str | None] = {"auto": None, "cpu": "cpu", "cuda": "cuda", "gpu": _gpu(), "mps": "mps"}
    if not isinstance(accelerator, str) or accelerator not in kinds:
        raise ConfigError(
            f"accelerator={accelerator!r} is not supported; there are {', '.join(kinds)}",
            where=_WHERE,
            hint='accelerator="auto"',
        )
    kind = kinds[accelerator]
    if index is None:
        return kind
    if kind == "cpu":
        raise ConfigError(f"devices={args['devices']!r}: a CPU has no index", where=_WHERE, hint="devices=1")
    return f"{kind or _gpu()}:{index}"


def _gpu() -> str:
    return "mps" if torch.backends.mps.is_available() and not torch.cuda.is_available() else "cuda"


class _Devices(NamedTuple):
    """The number of devices, and the index of the first one; None: any."""

    number: int | None = None
    first: int | None = None


def _read_devices(given: Any, accelerator: Any) -> _Devices:
    """The devices that a number, a list of indices, or a text of either names; any for "auto".

    Raises:
        ConfigError: none is named.
    """
    if given == "auto":
        return _Devices()
    chosen = given.split(",") if isinstance(given, str) and "," in given else given
    count = index = None
    with suppress(ValueError):
        if isinstance(chosen, list | tuple):
            indices: list[int] = [messages.read(fields.AtLeast0, one) for one in chosen if one != ""]
            count, index = len(indices), indices[0] if indices else None
        else:
            count = messages.read(fields.Limit, chosen)
    if count == -1:
        count = 1 if accelerator in ("cpu", "mps") else max(1, torch.cuda.device_count())
    if not count:  # 0, or None of "none"
        raise ConfigError(f"devices={given!r} names no device", where=_WHERE, hint='devices=1, or "auto"')
    return _Devices(count, index)


# --- the program ------------------------------------------------------------------------------------------------------


def _read_precision(value: Any) -> str:
    """The name of the precision in purestep, from any of Lightning's spellings.

    Raises:
        ConfigError: the precision is unknown.
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
    check_choice(_WHERE, known, precision=found)
    return found


def _clip(args: Mapping[str, Any]) -> Transform:
    limit, algorithm = args["gradient_clip_val"], args["gradient_clip_algorithm"]
    kinds = {"norm": clip_by_global_norm, "value": clip_by_value}
    name = "norm" if algorithm is None else str(algorithm).lower()
    check_choice(_WHERE, kinds, gradient_clip_algorithm=name)
    if limit is None:
        return identity()
    check_range(_WHERE, 0, gradient_clip_val=limit)
    return kinds[name](float(limit)) if limit else identity()


# --- the run ----------------------------------------------------------------------------------------------------------


def _read_fit(args: Mapping[str, Any], device: str | None) -> FitConfig:
    """The `FitConfig`. A debugging mode overrides the same limits and intervals as in Lightning.

    Raises:
        ConfigError: a value is out of its range, or two contradict each other.
    """
    dev_run, overfit = args["fast_dev_run"], args["overfit_batches"]
    settings: dict[str, Any] = {
        **_limits(args),
        "log_every": 50 if args["log_every_n_steps"] is None else args["log_every_n_steps"],
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
        raise ConfigError(error.what, where=_WHERE, hint=error.hint) from None


def _limits(args: Mapping[str, Any]) -> dict[str, Any]:
    epochs, steps, duration = args["max_epochs"], args["max_steps"], args["max_time"]
    if epochs is None and steps in (None, -1) and duration is None and not args["fast_dev_run"]:
        raise ConfigError(
            f"max_epochs=None and max_steps={steps}: nothing limits the run (Lightning would train 1000 epochs)",
            where=_WHERE,
            hint="pass max_epochs=10, or max_epochs=-1 to train until you stop the run",
        )
    return {
        "epochs": epochs,
        "steps": None if steps == -1 else steps,
        "max_time": duration,
        "min_epochs": args["min_epochs"] or None,
        "min_steps": args["min_steps"] or None,
    }


def _batch_limits(args: Mapping[str, Any]) -> dict[str, int | float] | None:
    found = {loader: args[f"limit_{loader}_batches"] for loader in ("train", "val")}
    kept = {loader: limit for loader, limit in found.items() if limit is not None and not _only(limit, 1.0)}
    return kept or None


def _interval(args: Mapping[str, Any]) -> int | float:
    """``val_check_interval`` and ``check_val_every_n_epoch`` in updates (an int) or epochs (a float)."""
    found = 1.0 if args["val_check_interval"] is None else args["val_check_interval"]
    every = args["check_val_every_n_epoch"]
    if isinstance(found, float) and every is None:
        raise ConfigError(
            f"check_val_every_n_epoch=None counts batches, and val_check_interval={found} is a share of an epoch",
            where=_WHERE,
            hint="val_check_interval=100, or check_val_every_n_epoch=1",
        )
    whole_epochs = isinstance(found, float) and found == 1.0
    if every is not None and every > 1 and not whole_epochs:
        raise ConfigError(
            f"val_check_interval={found!r} inside one of {every} epochs is not supported",
            where=_WHERE,
            hint=f"check_val_every_n_epoch={every} alone, or val_check_interval={found!r} alone",
        )
    return found * (every or 1) if isinstance(found, float) else _updates(found, every, args["accumulate_grad_batches"])


def _updates(batches: int, every: int | None, micro: int) -> int:
    if batches > 1 and every is not None:
        warnings.warn(
            f"{_WHERE}: val_check_interval={batches} is counted over the whole run; Lightning would restart the "
            "count in each epoch (cure: set check_val_every_n_epoch=None, or pass a share of an epoch such as 0.25)",
            UserWarning,
            stacklevel=5,
        )
    if batches % micro:
        raise ConfigError(
            f"val_check_interval={batches} must be a multiple of accumulate_grad_batches={micro}",
            where=_WHERE,
            hint=f"val_check_interval={micro * max(1, batches // micro)}",
        )
    return batches // micro


def _run(args: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if (directory := _snapshots(args)) is not None:
        found["snapshots"] = directory
    logger = args["logger"]
    if logger is False or (isinstance(logger, list | tuple) and not logger):
        found["sinks"] = ()
    elif logger not in (None, True):
        found["sinks"] = _callables("logger", logger, "pass sinks: CSV, JSONL, TensorBoard, or any f(event)")
    if args["callbacks"]:
        found["callbacks"] = _callables("callbacks", args["callbacks"], "fit(..., callbacks=[f]) with any f(event)")
    return found


def _snapshots(args: Mapping[str, Any]) -> str | None:
    wanted, directory = args["enable_checkpointing"], args["default_root_dir"]
    if wanted and directory is None:
        raise ConfigError(
            "enable_checkpointing=True without default_root_dir",
            where=_WHERE,
            hint='default_root_dir="runs/name"',
        )
    if directory is not None and "://" in str(directory):
        raise ConfigError(
            f"default_root_dir={directory!r} is not on this machine", where=_WHERE, hint='pass "runs/name"'
        )
    return None if directory is None or wanted is False else str(directory)


def _callables(name: str, value: Any, cure: str) -> list[Any]:
    found = list(value) if isinstance(value, list | tuple) else [value]
    for one in found:
        if not callable(one):
            raise ConfigError(
                f"{name} holds a {type(one).__name__}, which cannot be called with an event",
                where=_WHERE,
                hint=_CURES.get(type(one).__name__, cure),
            )
    return found


_CURES = {
    "EarlyStopping": "fit(..., monitor=..., early_stopping=10)",
    "ModelCheckpoint": 'fit(..., snapshots=Snapshots("runs/name", keep=3, keep_best=1))',
    "StochasticWeightAveraging": "program(..., ema=0.999)",
    "LearningRateMonitor": "remove it: every update reports lr",
    "GradientAccumulationScheduler": "program(..., accumulate=4)",
}
