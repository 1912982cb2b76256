"""The settings of a run: one frozen record, checked when it is made."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from .. import stopping
from ..errors import ConfigError
from . import fields, messages


class FitConfig(BaseModel):
    """What `fit` is told besides the state, the loaders and the program.

    A step is an optimizer update, however many micro-batches it took (`TrainState.step`, by which snapshots are named,
    counts calls). Every field may be given as text as well (``"1"`` is an int, ``"1.0"`` a float). At least one limit
    is required: ``epochs``, ``steps`` or ``max_time``; -1 says that none is wanted.

    Raises:
        ConfigError: a field that does not exist (with the nearest name), a value out of its range, or two fields that
            contradict each other.

    Example:
        >>> FitConfig(epochs=10, evaluate_every=1.0, early_stopping=5).early_stopping
        EarlyStopping(patience=5, min_delta=0.0, start_ratio=0.0)
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    epochs: fields.Limit = None
    """Epochs in all, counting those before a resume: at least 1; -1 without end; None: another limit."""

    steps: fields.Limit = None
    """Optimizer updates in all, counting those before a resume: at least 1; -1 without end."""

    min_epochs: fields.Minimum = None
    """Early stopping and callbacks cannot end the run before this many epochs: at least 1."""

    min_steps: fields.Minimum = None
    """Early stopping and callbacks cannot end the run before this many updates: at least 1."""

    max_time: fields.Seconds = None
    """Wall-clock limit, seconds > 0, counted anew after a resume. Also a timedelta, its keywords, ``"DD:HH:MM:SS"``."""

    evaluate_every: fields.Intervals = None
    """By type: an int is a number of updates, counted over the whole run; a float is a number of epochs (0.25 four
    times an epoch, 1.0 once, 2.0 every other one). A mapping sets it per evaluation loader. None: every epoch. Marks
    inside an epoch are placed by the number of its batches where that is known, else by ``len(loader)``, and where that
    was wrong, by the batches of the epoch before; an epoch ends where the loader does."""

    evaluate_on: fields.View = None
    """The weights to evaluate. None: the EMA where the state has one, else the parameters."""

    monitor: fields.Metric = None
    """The metric that decides what is best, by its name in the history (``"val_loss"``, ``"train_loss"``). None:
    ``"val_loss"`` where a loader ``"val"`` is evaluated, else nothing."""

    mode: fields.Direction = None
    """Whether small or large values of ``monitor`` are good. None: small for a loss, error or perplexity; any other
    metric has to say."""

    early_stopping: fields.Patience = None
    """An `EarlyStopping`, its fields as a mapping, or its patience: evaluations in a row without improvement
    (epochs, where each is evaluated once), at least 1. None: off."""

    log_every: fields.AtLeast0 = 50
    """Updates between two lines of the log, at least 0; 0: only at the end of an epoch."""

    resume: fields.Resume = "auto"
    """``"auto"``: go on from the newest whole snapshot in the run's directory, if there is one. A path: from there; or,
    once a run that began there has snapshots of its own, from those. None: start afresh. Of another run, the steps in
    the run's directory are set aside."""

    compile: fields.Compile = "auto"
    """``"auto"``: on CUDA, and with a warning in eager where a model cannot be captured. True: always, or an error.
    False: eager. A mapping: True with these options of `compile_step`."""

    donate: fields.Donate = True
    """True: a compiled step reuses the memory of the states that the loop itself made. ``"init"``: also of the state
    that was passed in, which cannot be read afterwards. False: never."""

    device: fields.Device = None
    """Where to train, as a torch device (``"cuda:1"``). None: where the state is, but a state on the CPU is copied to
    the best device there is (cuda, then mps). ``"cpu"`` stays there."""

    deterministic: fields.Deterministic = False
    """Deterministic algorithms only, during the run: True: what has none is an error; ``"warn"``: a warning."""

    cudnn_benchmark: fields.Choice = None
    """Whether cuDNN may time its algorithms for each shape of input and take the fastest, during the run. None: as the
    process is set."""

    tf32: fields.Choice = None
    """Whether float32 matrix products and convolutions on CUDA may use TensorFloat-32, during the run. None: as the
    process is set."""

    check_every: fields.Checks = 0
    """The first two calls of the step are looked at in every run: whether it writes what it was given, draws from a
    global generator, gives the same bits when it is called again, changes the kind of its state, keeps tensors alive,
    and lets gradients reach the parameters. That takes two or three more calls in eager each (a compiled run too: its
    first look needs the memory of a step in eager and of a second state, or on CUDA is left out where there is none).
    After them a look at every so many calls, for debugging, at least 0; 0: no more. None: not even the first two."""

    detect_anomaly: fields.Flag = False
    """Debugging: eager, with the autograd anomaly mode, and the first leaf that is not finite named. Slow."""

    fast_dev_run: fields.DevRun = 0
    """Debugging: this many batches of training and of each evaluation, on a copy of the state, and no file is
    written. True is 1; 0: off."""

    overfit_batches: fields.Overfit = 0
    """Debugging: train and evaluate on the first batches of ``"train"`` alone, in a fixed order: an int is their
    number, a float their share in (0, 1]; 0: off."""

    limit_batches: fields.Limits = None
    """Batches used of a loader each epoch: an int is their number, a float their share in (0, 1]: of the
    batches where their number is known, else of ``len(loader)``. A mapping sets it per loader, where 0 leaves an
    evaluation loader out. None: all."""

    rollback: fields.AtLeast0 = 0
    """How often a run may go back to its last good state (kept in memory at the start and after every evaluation) after
    a loss or gradient that is not finite, and go on behind the batches between, before `NonFiniteError` is raised: at
    least 0. A run that was resumed begins to keep where it was resumed, so it may go back less far than a whole one."""

    progress: fields.Flag = True
    """A progress bar on a terminal and plain lines elsewhere. False: silence. A run with ``sinks=[...]`` has it where
    ``ps.sinks.progress()`` is one of them."""

    if not TYPE_CHECKING:  # Type checkers keep the signature that pydantic makes from the fields.

        def __init__(self, **fields: Any) -> None:
            try:
                super().__init__(**fields)
            except ValidationError as error:
                raise messages.explain(error, known=tuple(type(self).model_fields)) from None

    @model_validator(mode="after")
    def _agree(self) -> FitConfig:
        if self.epochs is None and self.steps is None and self.max_time is None and not self.fast_dev_run:
            raise ConfigError(
                "nothing limits the run: epochs, steps and max_time are all None",
                hint="epochs=10, or epochs=-1 to go on until it is stopped",
            )
        for name, least in (("epochs", self.min_epochs), ("steps", self.min_steps)):
            most = getattr(self, name)
            if least is not None and most not in (None, -1) and least > most:
                raise ConfigError(f"min_{name}={least} is more than {name}={most}", hint=f"min_{name}={most}")
        if self.monitor is None and self.mode is not None:
            raise ConfigError(f"mode={self.mode!r} without a metric", hint=f'monitor="val_loss", mode={self.mode!r}')
        if isinstance(self.limit_batches, dict) and self.limit_batches.get("train") in (0, 0.0):
            raise ConfigError("limit_batches leaves nothing to train on", hint='limit_batches={"train": 1}')
        if self.overfit_batches and self.limit_batches is not None:
            raise ConfigError(
                "overfit_batches already says which batches are used; limit_batches contradicts it",
                hint="limit_batches=None",
            )
        if self.deterministic and self.cudnn_benchmark:
            raise ConfigError(
                "cudnn_benchmark picks algorithms by timing them, which deterministic=True forbids",
                hint="cudnn_benchmark=None",
            )
        if self.detect_anomaly and self.compile not in ("auto", False):
            raise ConfigError("anomalies are detected in eager mode only", hint='compile=False, or compile="auto"')
        if self.monitor is not None and self.mode is None:
            stopping.default_mode(self.monitor)
        planned = [limit for limit in (self.epochs, self.steps) if limit not in (None, -1)]
        stopping.start_epoch(self.early_stopping, planned[0] if planned else None)
        return self

    def interval(self, loader: str) -> int | float:
        """``evaluate_every`` of one evaluation loader: an int is updates, a float is epochs.

        Example:
            >>> FitConfig(epochs=1, evaluate_every={"val": 100}).interval("test")
            1.0
        """
        every = self.evaluate_every.get(loader) if isinstance(self.evaluate_every, dict) else self.evaluate_every
        return 1.0 if every is None else every

    def limit(self, loader: str) -> int | float | None:
        """``limit_batches`` of one loader: an int is batches, a float a share, None is all of it.

        Example:
            >>> FitConfig(epochs=1, limit_batches={"val": 0.5}).limit("val")
            0.5
        """
        return self.limit_batches.get(loader) if isinstance(self.limit_batches, dict) else self.limit_batches

    def to_dict(self) -> dict[str, Any]:
        """Every field in what JSON can hold (the options of ``compile`` as they were given).

        Example:
            >>> config = FitConfig(epochs=3, max_time="00:01:00:00")
            >>> FitConfig.from_dict(config.to_dict()) == config
            True
        """
        return self.model_dump()

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> FitConfig:
        """The way back from `to_dict`.

        Raises:
            ConfigError: as the constructor does.
        """
        return cls(**{str(name): value for name, value in fields.items()})


def _described() -> str:
    """The fields with their defaults and texts, for `help`, which shows no text below an attribute."""
    fields = FitConfig.model_fields.items()
    lines = [f"    {name} = {field.default!r}: {' '.join((field.description or '').split())}" for name, field in fields]
    return "\n".join(textwrap.fill(line, 118, subsequent_indent=" " * 8) for line in lines)


FitConfig.__doc__ = f"{inspect.cleandoc(FitConfig.__doc__ or '')}\n\nFields:\n{_described()}\n"
