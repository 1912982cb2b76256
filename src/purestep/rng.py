"""Random numbers from one key in the state.

A key is an int64 tensor ``[seed, calls]`` on the CPU. Each consumer hashes it into a stream that no other consumer's
draws can move: dropout uses (seed, calls), data order (seed, epoch), worker items (seed, epoch, index), and evaluation
a fixed stream with the batch index.
"""

from __future__ import annotations

import zlib
from contextlib import AbstractContextManager
from typing import Any, SupportsIndex

import torch
from torch import Tensor

from .errors import ConfigError
from .torch_ext import global_rng

_MASK = (1 << 64) - 1
_ONE_CALL = torch.tensor([0, 1], dtype=torch.int64, device="cpu")


def key(seed: int) -> Tensor:
    """A new key. shape=(2,), dtype=int64, CPU.

    Example:
        >>> key(7).tolist()
        [7, 0]

    Args:
        seed: an int in [-2**63, 2**63).

    Raises:
        ConfigError: ``seed`` is no such int.
    """
    given: Any = seed
    if not isinstance(given, SupportsIndex) or not -(2**63) <= given.__index__() < 2**63:
        raise ConfigError(f"seed={seed!r} must be an int in [-2**63, 2**63)", where="rng.key", hint="pass seed=0")
    return torch.tensor([given.__index__(), 0], dtype=torch.int64)


def advance(key: Tensor, calls: int = 1) -> Tensor:
    """The key after ``calls`` more calls.

    Example:
        >>> advance(key(7), 3).tolist()
        [7, 3]
    """
    return key.cpu() + (_ONE_CALL if calls == 1 else torch.tensor([0, calls], dtype=torch.int64, device="cpu"))


def fold_in(key: Tensor, data: int | str) -> Tensor:
    """A new key from ``key`` and ``data``. Equal arguments give equal keys; others give unrelated keys.

    Example:
        >>> bool((fold_in(key(0), 1) == fold_in(key(0), 1)).all()), bool((fold_in(key(0), 1) == key(0)).all())
        (True, False)

    Args:
        key: shape=(2,), dtype=int64.
        data: an index or the name of a stream.
    """
    return torch.tensor([mix(*key.tolist(), data), 0], dtype=torch.int64)


def generator(key: Tensor, stream: int | str, device: torch.device | str = "cpu") -> torch.Generator:
    """A `torch.Generator` on ``device``, seeded from (key, stream).

    Example:
        >>> torch.randn(2, generator=generator(key(0), "masks")).shape
        torch.Size([2])
    """
    found = torch.Generator(device=device)
    found.manual_seed(mix(*key.tolist(), stream))
    return found


def scoped(seed: int, device: torch.device | None = None) -> AbstractContextManager[None]:
    """Seed torch's global generators inside the ``with`` block and restore them after it.

    Example:
        >>> def draw():
        ...     with scoped(mix(7, "noise")):
        ...         return torch.rand(())
        >>> bool(draw() == draw())
        True

    One thread at a time runs such a block. A thread that draws from the global generators without `scoped` disturbs
    the thread inside, and draws from its stream; write ``with ps.rng.scoped(seed): model = Net()``.

    Args:
        seed: an int in [0, 2**63); `mix` makes one.
        device: also seed this device's generator. None or the CPU: seed the CPU's alone.
    """
    return global_rng.seeded(seed, device)


def mix(*parts: int | str) -> int:
    """A hash of the parts in [0, 2**63): splitmix64 (Steele et al., 2014), applied once for each part.

    Example:
        >>> mix(7, 0, "step") == mix(7, 0, "step"), mix(7, 0, "step") == mix(7, 1, "step")
        (True, False)
    """
    state = 0x9E3779B97F4A7C15
    for part in parts:
        number = zlib.crc32(part.encode()) if isinstance(part, str) else part
        state = _splitmix64((state ^ (number & _MASK)) + 0x9E3779B97F4A7C15)
    return state >> 1


def _splitmix64(number: int) -> int:
    number &= _MASK
    number = ((number ^ (number >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    number = ((number ^ (number >> 27)) * 0x94D049BB133111EB) & _MASK
    return number ^ (number >> 31)
