"""The environment of a run: torch's switches and global generators, which all threads of a process share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..data import random_state
from ..errors import ConfigError, StepContractError
from ..torch_ext import global_rng

if TYPE_CHECKING:  # loads pydantic, which takes half as long as the rest of `import purestep`
    from ..config import FitConfig


class _Switches(NamedTuple):
    """Torch's switches during a run, under the names of the settings."""

    deterministic: bool | str
    cudnn_benchmark: bool
    tf32: Any  # of matrix products and of cuDNN; None if torch does not tell
    detect_anomaly: bool
    default_dtype: torch.dtype


class _Active(NamedTuple):
    """A run in progress."""

    thread: int
    name: str  # of the thread
    switches: _Switches


_ACTIVE: list[_Active] = []
_BACK: list[ExitStack] = []
"""Restores the switches of before the first run. A run that ends while others go on leaves it to the last one."""
_BASE: list[_Switches] = []
"""The switches of before the first of the active runs."""


@contextmanager
def applied(config: FitConfig, device: torch.device) -> Generator[None]:
    """Set the switches of a run, and restore them. Random numbers drawn outside of steps leave no trace.

    Raises:
        ConfigError: a run in another thread has set a switch differently.
    """
    back = ExitStack()
    thread = threading.current_thread()
    with global_rng.locked():
        wanted = _wanted(config)
        others = [run for run in _ACTIVE if run.thread != thread.ident]
        for other in others:
            _check_same(wanted, other)
        own = _Active(thread.ident or 0, thread.name, wanted)
        if not others:
            with ExitStack() as failed:
                failed.callback(global_rng.seed_with_restore(0, device))
                _set(config, failed)
                back = failed.pop_all()
        _ACTIVE.append(own)
    try:
        yield
    finally:
        with global_rng.locked():
            del _ACTIVE[next(at for at, run in enumerate(_ACTIVE) if run is own)]
            if any(run.thread != own.thread for run in _ACTIVE):
                _BACK.append(back)
            else:
                back.close()
                while not _ACTIVE and _BACK:
                    _BACK.pop().close()


def check_draws(call: Callable[[], Any], name: str) -> Any:
    """Call a function of the user's. It may draw from global generators only while no other thread trains.

    Raises:
        StepContractError: it draws while another thread trains.
    """
    if not _other_threads_train():
        return call()
    with global_rng.locked():
        before = random_state.watch()
    result = call()
    with global_rng.locked():
        drawn = before.drawn()
    if drawn:
        owners = " and ".join(f"{each}'s" for each in sorted(drawn)).replace("python's", "Python's")
        raise StepContractError(
            f"draws from {owners} global generator while another thread of this process trains, so the numbers depend "
            "on that thread",
            where=name,
            hint="draw inside `with ps.rng.scoped(seed):`, or from a separate generator; or run each fit in a process",
        )
    return result


def _other_threads_train() -> bool:
    return len(_ACTIVE) > 1 and any(run.thread != threading.get_ident() for run in _ACTIVE)


def _check_same(wanted: _Switches, other: _Active) -> None:
    for field, ours, theirs in zip(_Switches._fields, wanted, other.switches, strict=True):
        if ours != theirs:
            raise ConfigError(
                f"{field} is {ours}, and {theirs} in the run of thread {other.name!r} of this process: torch has one "
                "for all threads",
                where="fit",
                hint=f"set the same {field} in both, run them one after the other, or each in a process",
            )


def _wanted(config: FitConfig) -> _Switches:
    """Return the switches that the config asks for; the others as they were before the first run."""
    if _ACTIVE and not all(run.thread == threading.get_ident() for run in _ACTIVE):
        switches = _BASE[0]._replace(default_dtype=torch.get_default_dtype())
    else:
        switches = _current()
        if not _ACTIVE:
            _BASE[:] = [switches]
    if config.deterministic:
        switches = switches._replace(deterministic=config.deterministic, cudnn_benchmark=False)
    if config.cudnn_benchmark is not None:
        switches = switches._replace(cudnn_benchmark=config.cudnn_benchmark)
    if config.tf32 is not None:
        switches = switches._replace(tf32=(config.tf32, config.tf32))
    return switches._replace(detect_anomaly=config.detect_anomaly or switches.detect_anomaly)


def _current() -> _Switches:
    deterministic: bool | str = torch.are_deterministic_algorithms_enabled()
    if deterministic and torch.is_deterministic_algorithms_warn_only_enabled():
        deterministic = "warn"
    try:
        tf32: Any = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    except RuntimeError:  # see `_tf32`
        tf32 = None
    anomaly = torch.is_anomaly_enabled()
    return _Switches(deterministic, torch.backends.cudnn.benchmark, tf32, anomaly, torch.get_default_dtype())


def _set(config: FitConfig, back: ExitStack) -> None:
    if config.deterministic:
        back.enter_context(_deterministic(warn_only=config.deterministic == "warn"))
    if config.cudnn_benchmark is not None:
        back.enter_context(_cudnn_benchmark(config.cudnn_benchmark))
    if config.tf32 is not None:
        back.enter_context(_tf32(config.tf32))
    if config.detect_anomaly:
        back.enter_context(torch.autograd.set_detect_anomaly(True))


@contextmanager
def _deterministic(*, warn_only: bool) -> Generator[None]:
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        with _cudnn_benchmark(False):
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)


@contextmanager
def _cudnn_benchmark(wanted: bool) -> Generator[None]:
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = wanted
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextmanager
def _tf32(allowed: bool) -> Generator[None]:
    try:
        matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    except RuntimeError as error:  # set by `fp32_precision`: torch refuses to be asked in both ways
        reason = str(error).splitlines()[0]
        hint = "leave tf32 out, since torch.backends.fp32_precision is set already"
        raise ConfigError(
            f"tf32={allowed}, and torch does not tell its present value: {reason}",
            where="fit",
            hint=hint,
        ) from error
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn
