"""What belongs to the process and a run sets for itself: torch's switches and global generators. Runs in several
threads of one process share them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .. import global_rng
from ..data import random_state
from ..errors import ConfigError, StepContractError

if TYPE_CHECKING:  # pydantic, which settings are made of, is half of `import purestep`
    from ..config import FitConfig


class _Switches(NamedTuple):
    """How torch is set while a run lasts, by the names of the settings that set it."""

    deterministic: bool | str
    cudnn_benchmark: bool
    tf32: Any  # of products and of cuDNN; what torch says where it does not tell
    detect_anomaly: bool
    default_dtype: torch.dtype


class _Active(NamedTuple):
    """A run that has begun and not ended."""

    thread: int
    name: str  # of the thread
    switches: _Switches


_ACTIVE: list[_Active] = []
_BACK: list[ExitStack] = []
"""What runs that have ended leave to the last one: to set everything as it was before the first."""


@contextmanager
def surroundings(config: FitConfig, device: torch.device) -> Generator[None]:
    """Process-wide switches of a run, as they were afterwards. What is drawn outside of steps leaves no trace.

    Raises:
        ConfigError: a run in another thread has them set otherwise.
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


def several() -> bool:
    """Whether runs of other threads are at work."""
    return len(_ACTIVE) > 1 and any(run.thread != threading.get_ident() for run in _ACTIVE)


def watched(call: Callable[[], Any], name: str) -> Any:
    """What a call of the user's returns, which draws from the global generators where it likes while a run is alone.

    Raises:
        StepContractError: it draws while runs of other threads are at work.
    """
    if not several():
        return call()
    with global_rng.locked():
        before = random_state.watch()
    found = call()
    with global_rng.locked():
        drawn = before.drawn()
    if drawn:
        told = " and ".join(f"{each}'s" for each in sorted(drawn)).replace("python's", "Python's")
        raise StepContractError(
            f"draws from {told} global generator while another thread of this process trains: the numbers depend on "
            "that thread",
            where=name,
            hint="draw inside of `with ps.rng.scoped(seed):`, or from a generator of its own; or run each fit in a "
            "process",
        )
    return found


def _check_same(wanted: _Switches, other: _Active) -> None:
    for field, ours, theirs in zip(_Switches._fields, wanted, other.switches, strict=True):
        if ours != theirs:
            raise ConfigError(
                f"{field} is {ours}, and {theirs} in the run of thread {other.name!r} of this process: torch has one "
                "for all threads",
                where="fit",
                hint=f"the same {field} in both, one run after the other, or each run in a process",
            )


def _wanted(config: FitConfig) -> _Switches:
    """How torch is to be set: as the config says, else as it was before the first run began."""
    if _ACTIVE and not all(run.thread == threading.get_ident() for run in _ACTIVE):
        found = _BASE[0]._replace(default_dtype=torch.get_default_dtype())
    else:
        found = _found()
        if not _ACTIVE:
            _BASE[:] = [found]
    if config.deterministic:
        found = found._replace(deterministic=config.deterministic, cudnn_benchmark=False)
    if config.cudnn_benchmark is not None:
        found = found._replace(cudnn_benchmark=config.cudnn_benchmark)
    if config.tf32 is not None:
        found = found._replace(tf32=(config.tf32, config.tf32))
    return found._replace(detect_anomaly=config.detect_anomaly or found.detect_anomaly)


_BASE: list[_Switches] = []
"""How torch was set when the first of the runs that are at work began."""


def _found() -> _Switches:
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
    except RuntimeError as error:  # set by `fp32_precision`, of which torch lets nobody ask in both ways
        found = str(error).splitlines()[0]
        hint = "leave tf32 out: torch.backends.fp32_precision, which is set already, says it"
        raise ConfigError(
            f"tf32={allowed}, and torch does not tell what it is: {found}", where="fit", hint=hint
        ) from error
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn
