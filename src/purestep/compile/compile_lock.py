"""A lock for compilation: one thread compiles at a time, and none runs an eager step meanwhile."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

from ..torch_ext import global_rng


@contextmanager
def exclusive() -> Generator[None]:
    """Hold the lock: tracing patches torch and swaps tensors in the module, so two traces would corrupt each other.
    Eager steps and draws of other threads wait too. Once Dynamo is loaded, its lock is held as well.

    Garbage collection is off inside, since most objects live until the end, and so is torch's log of shape mismatches,
    which the error repeats.
    """
    log: Any = importlib.import_module("torch._subclasses.fake_tensor").log
    with global_rng.locked(), ExitStack() as stack:
        was_on, was_quiet = gc.isenabled(), log.disabled
        gc.disable()
        log.disabled = True
        try:
            if "torch._dynamo.convert_frame" in sys.modules:
                stack.enter_context(_dynamo_lock())
            _age_objects()
            yield
        finally:
            log.disabled = was_quiet
            if was_on:
                gc.enable()


@contextmanager
def with_compiler() -> Generator[None]:
    """Inside `exclusive`: load Dynamo and hold its lock, so that no other `torch.compile` runs."""
    with _dynamo_lock():
        _age_objects()
        yield


def _dynamo_lock() -> Any:
    """Dynamo's lock, always acquired after ours: a thread that holds only Dynamo's never acquires ours."""
    return importlib.import_module("torch._dynamo.convert_frame").compile_lock


def _age_objects() -> None:
    """Move all objects to the oldest generation of the garbage collector without a scan: loaded modules stay alive."""
    if gc.get_freeze_count() == 0:
        gc.freeze()
        gc.unfreeze()


_age_objects()  # at import: the objects of the next modules would trigger a full collection of torch's
