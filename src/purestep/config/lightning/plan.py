"""The public function, what comes out of it, and the arguments that are refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ...arguments import is_number
from ...errors import ConfigError
from ...transform import Transform, clip_by_global_norm, clip_by_value, identity
from .. import values
from ..fit import FitConfig
from ..source import as_mapping
from .hardware import check_one_process, read_device, read_precision
from .limits import read_accumulate, read_fit
from .signature import DEFAULTS, HERE, checked


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
    given = _known(as_mapping(settings, where=HERE), strict=strict)
    for name, value in given.items():
        if name in _REFUSED and not _REFUSED[name].accepts(value):
            refusal = _REFUSED[name]
            raise ConfigError(f"{name}={value!r}: {refusal.finding}", where=HERE, hint=refusal.cure)
        if name in _FLAGS:
            checked(name, value, values.flag)
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
        close = values.nearest(name, DEFAULTS)
        what = f"{name!r} is not an argument of Lightning's Trainer"
        if strict:
            raise ConfigError(what, where=HERE, hint=close or f"one of {', '.join(DEFAULTS)}")
        meant = f"; did you mean {close!r}?" if close else ""
        warnings.warn(f"{HERE}: {what} and is not used{meant}", UserWarning, stacklevel=3)
    found = {
        name: value if name in _TEXT else values.literal(value) for name, value in given.items() if name in DEFAULTS
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
