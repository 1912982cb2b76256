"""The environment of a run: torch's switches and global generators. A process has one of each, so one run at a time."""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ConfigError
from ..torch_ext import global_rng

if TYPE_CHECKING:  # loads pydantic, which takes half as long as the rest of `import purestep`
    from ..config import FitConfig


_RUNNING: list[threading.Thread] = []
"""The thread of each run in progress: one thread, several times if a callback calls `fit`."""


@contextmanager
def applied(config: FitConfig, device: torch.device) -> Generator[None]:
    """Set the switches of a run, and restore them. Random numbers drawn outside of steps leave no trace.

    Raises:
        ConfigError: another thread of this process runs `fit`.
    """
    thread = threading.current_thread()
    _RUNNING.append(thread)
    try:
        first = next(run for run in _RUNNING if run.is_alive())  # a forked child does not have the other threads
        if first is not thread:
            raise ConfigError(
                f"thread {first.name!r} of this process is in fit: torch's switches and generators are for one run",
                where="fit",
                hint="call them one after the other, or each in a process",
            )
        with ExitStack() as back:
            back.callback(global_rng.seed_with_restore(0, device))
            _set(config, back)
            yield
    finally:
        _RUNNING.remove(thread)


def _set(config: FitConfig, back: ExitStack) -> None:
    cudnn: Any = torch.backends.cudnn
    matmul: Any = torch.backends.cuda.matmul
    benchmark = config.cudnn_benchmark
    if config.deterministic:
        warned = torch.is_deterministic_algorithms_warn_only_enabled()
        before = torch.are_deterministic_algorithms_enabled()
        back.callback(torch.use_deterministic_algorithms, before, warn_only=warned)
        torch.use_deterministic_algorithms(True, warn_only=config.deterministic == "warn")
        benchmark = bool(benchmark)
    if benchmark is not None:
        back.callback(setattr, cudnn, "benchmark", cudnn.benchmark)
        cudnn.benchmark = benchmark
    if config.tf32 is not None:
        for backend, allowed in ((matmul, _tf32(matmul, config.tf32)), (cudnn, _tf32(cudnn, config.tf32))):
            back.callback(setattr, backend, "allow_tf32", allowed)
            backend.allow_tf32 = config.tf32
    if config.detect_anomaly:
        back.enter_context(torch.autograd.set_detect_anomaly(True))


def _tf32(backend: Any, wanted: bool) -> bool:
    try:
        return backend.allow_tf32
    except RuntimeError as error:  # set by `fp32_precision`: torch refuses to be asked in both ways
        raise ConfigError(
            f"tf32={wanted}, and torch does not return its present value: {str(error).splitlines()[0]}",
            where="fit",
            hint="leave tf32 out, since torch.backends.fp32_precision is set already",
        ) from error
