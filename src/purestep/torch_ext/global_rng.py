"""torch's global random generators, which no other file seeds or restores; `host_generators` has numpy's and Python's.

All threads share them, so a lock lets one thread at a time use them. Users call `rng.scoped`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch
from torch import Tensor

WARN_AFTER = 60.0  # seconds that a thread waits for the lock before it warns
_LOCK: list[Any] = [RLock()]  # a list, so that a forked child can replace the lock


@contextmanager
def locked() -> Generator[None]:
    """Keep the other threads of this process out of `locked` and `seeded`. The lock is reentrant.

    The lock also protects the weightless copy of a module while it is traced or called. A thread that holds the lock
    and waits for a thread that needs it (a loader whose batches come from a thread that trains) waits for ever; after a
    minute the waiting thread warns and names the holder.
    """
    lock = _LOCK[0]  # a child forked meanwhile has another one
    while not lock.acquire(timeout=WARN_AFTER):
        warnings.warn(
            f"a thread has waited {WARN_AFTER:.0f} seconds for the global random generators: {lock!r} (cure: "
            "let no dataset, loader or step wait for a thread that trains or evaluates)",
            RuntimeWarning,
            stacklevel=3,
        )
    try:
        yield
    finally:
        lock.release()


def replace_lock() -> None:
    """Call this in a forked child: the thread that held the lock does not exist there."""
    _LOCK[0] = RLock()


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Generator[None]:
    """Seed torch's generators inside the block and restore them after it; see `rng.scoped`.

    Args:
        seed: an int in [0, 2**63).
        device: also seed this device's generator. None or the CPU: seed the CPU's alone.
    """
    with locked():
        restore = _seed(seed, device)
        try:
            yield
        finally:
            restore()


def seed_with_restore(seed: int, device: torch.device | None = None) -> Callable[[], None]:
    """As `seeded`, and return a function that restores the generators. The lock is free in between."""
    with locked():
        restore = _seed(seed, device)

    def with_lock() -> None:
        with locked():
            restore()

    return with_lock


def _seed(seed: int, device: torch.device | None) -> Callable[[], None]:
    generators = [torch.default_generator, *_device_generators(device)]
    states = [_state(generator) for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    return lambda: _restore(generators, states)


def seed_cpu(number: int) -> None:
    """Seed the CPU's generator. Call it inside `seeded`, which restores it."""
    torch.default_generator.manual_seed(number)


def cpu_seed() -> int:
    """The number that the CPU's generator was last seeded with."""
    return torch.default_generator.initial_seed()


def cpu_state() -> bytes:
    """The state of the CPU's generator; every draw and every seeding changes it."""
    return torch.default_generator.get_state().numpy().tobytes()  # bytes compare in a third of torch.equal's time


def torch_states() -> list[Tensor]:
    """The states of torch's generators: the CPU's and every CUDA device's."""
    states = [torch.default_generator.get_state()]
    return states + (list(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else [])


def _state(generator: torch.Generator) -> Any:
    """The state of a generator: (seed, offset) on CUDA, which is complete and needs no copy; else a tensor."""
    if generator.device.type == "cuda":
        return generator.initial_seed(), generator.get_offset()
    return generator.get_state()


def _restore(generators: list[torch.Generator], states: list[Any]) -> None:
    for generator, state in zip(generators, states, strict=True):
        if isinstance(state, tuple):
            number, offset = state
            generator.manual_seed(number)
            generator.set_offset(offset)
        else:
            generator.set_state(state)


def _device_generators(device: torch.device | None) -> list[Any]:
    if device is None or device.type == "cpu":
        return []
    if device.type == "cuda":
        torch.cuda.init()
        index = int(str(device).partition(":")[2] or torch.cuda.current_device())
        return [torch.cuda.default_generators[index]]
    if device.type == "mps":
        return [torch.mps._get_default_mps_generator()]  # pyright: ignore[reportPrivateUsage]  # no public accessor
    return []
