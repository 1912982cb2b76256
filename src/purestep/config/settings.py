"""Settings of a run: `FitConfig`, a frozen pydantic model that checks its values."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from .. import stopping
from ..errors import ConfigError
from . import fields, messages


class FitConfig(BaseModel):
    """Settings of `fit`.

    Example:
        >>> FitConfig(epochs=10, evaluate_every=1.0, early_stopping=5).early_stopping
        EarlyStopping(patience=5, min_delta=0.0, start_ratio=0.0)

    A step is an optimizer update, whatever its number of micro-batches. (The name of a snapshot counts the calls of
    the step in this run, resumed parts included. `TrainState.step` counts the calls of earlier runs too.) Every field
    accepts text too (``"1"`` is an int, ``"1.0"`` a float). At least one limit is required: ``epochs``, ``steps`` or
    ``max_time``; -1 means no limit.

    Raises:
        ConfigError: a field does not exist (the message has the nearest name), a value is out of its range, or two
            fields contradict each other.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    epochs: fields.Limit = Field(default=None, examples=[10])
    """Total epochs, including those before a resume: at least 1. -1: no limit. None: another field limits the run."""

    steps: fields.Limit = Field(default=None, examples=[1000])
    """Total optimizer updates, including those before a resume: at least 1. -1: no limit."""

    min_epochs: fields.Minimum = Field(default=None, examples=[1])
    """Early stopping and callbacks cannot end the run before this many epochs: at least 1."""

    min_steps: fields.Minimum = Field(default=None, examples=[1])
    """Early stopping and callbacks cannot end the run before this many updates: at least 1."""

    max_time: fields.Seconds = Field(default=None, examples=["00:08:00:00"])
    """Wall-clock limit in seconds > 0; a resume starts at 0. Also a timedelta, its keywords, or ``"DD:HH:MM:SS"``."""

    evaluate_every: fields.Intervals = Field(default=None, examples=[1.0])
    """The interval between evaluations. An int is a number of updates, counted over the whole run; a float is a number
    of epochs (0.25: every quarter of one, 1.0: once an epoch, 2.0: every other one). A mapping sets it for each
    evaluation loader. None: every epoch. A run that ends by ``epochs`` is evaluated at its end only if that falls on
    the interval; otherwise the last row of the history has None: score the last state with ``ps.evaluate(result.state,
    loader, program.eval_step)``. A fraction is a number of batches, rounded up, for the whole run: 0.25 of 10 batches
    is every 3 batches, and the end of the epoch."""

    evaluate_on: fields.View = Field(default=None, examples=["params"])
    """The weights to evaluate. None: the EMA if the state has one, else the parameters. After ``"params"`` of a state
    with an EMA, pass ``view="params"`` to ``bind``, `evaluate`, `export_weights` and `load_into` too."""

    monitor: fields.Metric = Field(default=None, examples=["val_loss"])
    """The metric that decides which epoch is best, by its name in the history (``"val_loss"``, ``"train_loss"``). None:
    ``"val_loss"`` if there is a loader ``"val"``, else no metric."""

    mode: fields.Direction = Field(default=None, examples=["max"])
    """Which values of ``monitor`` are better. None: ``"min"`` for a loss, error or perplexity; other metrics need a
    mode."""

    early_stopping: fields.Patience = Field(default=None, examples=[10])
    """An `EarlyStopping`, its fields as a mapping, or its patience: consecutive evaluations without improvement
    (epochs, if each is evaluated once), at least 1. None: off."""

    log_every: fields.AtLeast0 = Field(default=50, examples=[50])
    """Updates between two lines of the log, at least 0. 0: log only at the end of an epoch."""

    resume: fields.Resume = Field(default="auto", examples=["auto", None])
    """``"auto"``: continue from the newest intact snapshot in the run's directory, if there is one. A path: continue
    from this snapshot, or from the run's newest one if the run started from this path and has snapshots. None: start
    from the initial state. Snapshots of another run in the run's directory are moved to an archive."""

    compile: fields.Compile = Field(default="auto", examples=[True])
    """``"auto"``: compile on CUDA; if a model cannot be captured, warn and run in eager mode. True: compile, or raise
    an error. False: run in eager mode. A mapping: as True, with these options of `compile_step`."""

    donate: fields.Donate = Field(default=True, examples=[True])
    """True: a step of `program`, compiled or not, reuses the memory of the states that the loop created: a callback
    that keeps a state keeps ``ps.clone(event.state)``. ``"init"``: a compiled step also reuses the memory of
    the initial state, which cannot be read afterwards. False: it reuses none."""

    device: fields.Device = Field(default=None, examples=["cuda"])
    """The torch device to train on (``"cuda:1"``). None: the device of the state, but a state on the CPU is copied to
    the best device (cuda, then mps). ``"cpu"``: the CPU."""

    deterministic: fields.Deterministic = Field(default=False, examples=[True])
    """Use only deterministic algorithms during the run. An operation without one raises (True) or warns
    (``"warn"``)."""

    cudnn_benchmark: fields.Choice = None
    """Let cuDNN time its algorithms for each input shape and use the fastest, during the run. None: keep the setting of
    the process."""

    tf32: fields.Choice = None
    """Let float32 matrix products and convolutions on CUDA use TensorFloat-32, during the run. None: keep the setting
    of the process."""

    check_every: fields.Checks = Field(default=0, examples=[100])
    """`fit` checks the first two calls of the step in every run: the step must not write its arguments, draw from a
    global generator, return other bits when it is repeated, change the structure or dtypes of its state, or keep
    tensors alive, and gradients must reach the parameters. Each check takes two or three more calls in eager mode, also
    in a compiled run: the first one needs the memory of an eager step and of a second state, and is skipped on CUDA if
    that does not fit. For debugging, ``check_every=n`` also checks every n-th call, n >= 0; 0: no more than the first
    two. None: no checks."""

    detect_anomaly: fields.Flag = False
    """Debugging: run in eager mode with autograd's anomaly mode, and name the first leaf that is not finite. Slow."""

    fast_dev_run: fields.DevRun = Field(default=0, examples=[True])
    """Debugging: run this many batches of training and of each evaluation, on a copy of the state, and write no files.
    True: 1. 0: off."""

    overfit_batches: fields.ShareOrNone = Field(default=0, examples=[10])
    """Debugging: train and evaluate only on the first batches of ``"train"``, in a fixed order. An int is their number,
    a float their share in (0, 1], at least one batch. 0: off."""

    limit_batches: fields.Limits = Field(default=None, examples=[{"train": 0.1, "val": 10}])
    """Batches of a loader to use in each epoch. An int is their number, a float their share in (0, 1] of the batches if
    their number is known, else of ``len(loader)``. A mapping sets it for each loader; 0 skips an evaluation loader.
    None: all."""

    progress: fields.Flag = True
    """Show a progress bar on a terminal and print plain lines elsewhere. False: print nothing. With ``sinks=[...]``,
    add ``ps.sinks.progress()`` to the list."""

    if not TYPE_CHECKING:  # Type checkers keep the signature that pydantic derives from the fields.

        def __init__(self, **fields: Any) -> None:
            try:
                super().__init__(**fields)
            except ValidationError as error:
                raise messages.explain(error, type(self).model_fields, fields) from None

    @model_validator(mode="after")
    def _agree(self) -> FitConfig:
        if self.epochs is None and self.steps is None and self.max_time is None and not self.fast_dev_run:
            raise ConfigError(
                "nothing limits the run: epochs, steps and max_time are all None",
                hint="pass epochs=10, or epochs=-1 to train until you stop the run",
            )
        for name, least in (("epochs", self.min_epochs), ("steps", self.min_steps)):
            most = getattr(self, name)
            if least is not None and most not in (None, -1) and least > most:
                raise ConfigError(f"min_{name}={least} is more than {name}={most}", hint=f"min_{name}={most}")
        if self.monitor is None and self.mode is not None:
            raise ConfigError(f"mode={self.mode!r} without a metric", hint=f'monitor="val_loss", mode={self.mode!r}')
        if isinstance(self.limit_batches, dict) and self.limit_batches.get("train") in (0, 0.0):
            raise ConfigError("limit_batches leaves no batch to train on", hint='limit_batches={"train": 1}')
        if self.overfit_batches and self.limit_batches is not None:
            raise ConfigError(
                "overfit_batches already sets the batches to use; limit_batches contradicts it",
                hint="limit_batches=None",
            )
        if self.deterministic and self.cudnn_benchmark:
            raise ConfigError(
                "cudnn_benchmark picks algorithms by timing them, which deterministic=True forbids",
                hint="cudnn_benchmark=None",
            )
        if self.detect_anomaly and self.compile not in ("auto", False):
            raise ConfigError("detect_anomaly works only in eager mode", hint='compile=False, or compile="auto"')
        if self.monitor is not None and self.mode is None:
            stopping.default_mode(self.monitor)
        planned = [limit for limit in (self.epochs, self.steps) if limit not in (None, -1)]
        if self.early_stopping is not None:
            self.early_stopping.start(planned[0] if planned else None)
        return self

    def interval(self, loader: str) -> int | float:
        """``evaluate_every`` of one evaluation loader: an int is a number of updates, a float of epochs.

        Example:
            >>> FitConfig(epochs=1, evaluate_every={"val": 100}).interval("test")
            1.0
        """
        every = self.evaluate_every.get(loader) if isinstance(self.evaluate_every, dict) else self.evaluate_every
        return 1.0 if every is None else every

    def limit(self, loader: str) -> int | float | None:
        """``limit_batches`` of one loader: an int is a number of batches, a float a share, None means all.

        Example:
            >>> FitConfig(epochs=1, limit_batches={"val": 0.5}).limit("val")
            0.5
        """
        return self.limit_batches.get(loader) if isinstance(self.limit_batches, dict) else self.limit_batches

    def to_dict(self) -> dict[str, Any]:
        """All fields as JSON values (the options of ``compile`` are not converted).

        Example:
            >>> config = FitConfig(epochs=3, max_time="00:01:00:00")
            >>> FitConfig.from_dict(config.to_dict()) == config
            True
        """
        return self.model_dump()

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> FitConfig:
        """The inverse of `to_dict`.

        Raises:
            ConfigError: as the constructor.
        """
        return cls(**{str(name): value for name, value in fields.items()})


def _described() -> str:
    """The fields with their defaults and docstrings, for `help`, which does not show docstrings of attributes."""
    lines = [
        f"    {name} (default {field.default!r}): {' '.join((field.description or '').split())}"
        for name, field in FitConfig.model_fields.items()
    ]
    return "\n".join(textwrap.fill(line, 118, subsequent_indent=" " * 8) for line in lines)


FitConfig.__doc__ = f"{inspect.cleandoc(FitConfig.__doc__ or '')}\n\nFields:\n{_described()}\n"
