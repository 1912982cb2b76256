"""One thread at a time makes a graph, and none runs a step in eager meanwhile."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from typing import Any

from .. import global_rng


@contextmanager
def alone() -> Generator[None]:
    """One thread at a time: tracing patches torch and swaps tensors in the module, so that two spoil each other's
    graphs and whatever is traced after. Steps in eager and draws of other threads wait too. Once Dynamo is loaded, its
    own lock is held as well.

    No garbage is collected inside, loading the compiler included: what is made lives until the end. And torch's log of
    every shape that does not fit is off: the error says it.
    """
    log: Any = importlib.import_module("torch._subclasses.fake_tensor").log
    with global_rng.locked(), ExitStack() as stack:
        was_on, was_quiet = gc.isenabled(), log.disabled
        gc.disable()
        log.disabled = True
        try:
            if "torch._dynamo.convert_frame" in sys.modules:
                stack.enter_context(_dynamos())
            _old()
            yield
        finally:
            log.disabled = was_quiet
            if was_on:
                gc.enable()


@contextmanager
def with_compiler() -> Generator[None]:
    """Inside `alone`: Dynamo is loaded, and nobody else's `torch.compile` runs."""
    with _dynamos():
        _old()
        yield


def _dynamos() -> Any:
    """Dynamo's lock. It is always taken after ours: whoever holds it without ours never asks for ours."""
    return importlib.import_module("torch._dynamo.convert_frame").compile_lock


def _old() -> None:
    """What has been loaded is no garbage: straight to the oldest generation, without a look at each object."""
    if gc.get_freeze_count() == 0:
        gc.freeze()
        gc.unfreeze()


_old()  # now: objects of the modules below would set off a collection of all that torch has loaded
