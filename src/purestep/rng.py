"""Random numbers from one key in the state: the only file that touches the global generators.

A key is an int64 tensor ``[seed, calls]`` on the CPU. Streams are folded from it by hashing, so that what one consumer
draws never moves another: dropout from (seed, calls), data order from (seed, epoch), worker items from (seed, epoch,
index), evaluation from a fixed stream with the batch index.
"""

from __future__ import annotations

import random
import warnings
import zlib
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from threading import RLock
from typing import Any, SupportsIndex

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from .errors import ConfigError, StepContractError

_MASK = (1 << 64) - 1


def key(seed: int) -> Tensor:
    """A fresh key. shape=(2,), dtype=int64, CPU.

    Args:
        seed: an int in [-2**63, 2**63).

    Raises:
        ConfigError: another seed.

    Example:
        >>> key(7).tolist()
        [7, 0]
    """
    given: Any = seed
    if not isinstance(given, SupportsIndex) or not -(2**63) <= given.__index__() < 2**63:
        raise ConfigError(f"seed is {seed!r}, no int in [-2**63, 2**63)", where="rng.key", hint="seed=0")
    return torch.tensor([given.__index__(), 0], dtype=torch.int64)


def advance(key: Tensor, calls: int = 1) -> Tensor:
    """The key after ``calls`` more calls.

    Example:
        >>> advance(key(7), 3).tolist()
        [7, 3]
    """
    return key.cpu() + torch.tensor([0, calls], dtype=torch.int64, device="cpu")


def fold_in(key: Tensor, data: int | str) -> Tensor:
    """A key of its own for ``data``: the same for the same (key, data), unrelated to every other.

    Args:
        key: shape=(2,), dtype=int64.
        data: an index or the name of a stream.

    Example:
        >>> bool((fold_in(key(0), 1) == fold_in(key(0), 1)).all()), bool((fold_in(key(0), 1) == key(0)).all())
        (True, False)
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


def mix(*parts: int | str) -> int:
    """A hash of the parts in [0, 2**63): splitmix64 (Steele et al., 2014) applied once a part.

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


_capturing: ContextVar[bool] = ContextVar("capturing", default=False)


def in_graph() -> bool:
    """Whether a graph is being captured: then the host has seeded for all of it, and nothing here may.

    Seeding inside a graph is not capturable, and several seeds in one graph would be constants of it.

    Example:
        >>> in_graph()
        False
    """
    return torch.compiler.is_dynamo_compiling() or _capturing.get()


@contextmanager
def capturing() -> Generator[None]:
    """Mark the code inside as run to be traced into a graph.

    Example:
        >>> with capturing():
        ...     in_graph()
        True
    """
    token = _capturing.set(True)
    try:
        yield
    finally:
        _capturing.reset(token)


_TURN = [RLock()]  # one lock; another one in a forked child
_PATIENCE = 60.0  # seconds after which a thread that waits says so


@contextmanager
def held() -> Generator[None]:
    """Let no other thread of this process into `scoped` or `held`: torch's, numpy's and Python's global generators are
    one for all threads, and what is traced or run on a module's hollow copy is as well.

    A thread that waits for another one while it holds them (a loader whose batches come from a thread that trains)
    waits for ever; after a minute a warning says which thread holds them.

    Example:
        >>> with held(), held():
        ...     print(in_graph())
        False
    """
    turn = _taken()
    try:
        yield
    finally:
        turn.release()


def _taken() -> Any:
    """The lock, taken. It is given back by itself: a child that is forked meanwhile has another one."""
    turn = _TURN[0]
    while not turn.acquire(timeout=_PATIENCE):
        warnings.warn(
            f"a thread has waited {_PATIENCE:.0f} seconds for the global random generators: {turn!r} (cure: a dataset, "
            "a loader and a step wait for no thread that trains or evaluates)",
            RuntimeWarning,
            stacklevel=4,
        )
    return turn


def renew_turn() -> None:
    """In a forked child: a thread that held the generators is not there any more.

    Example:
        >>> renew_turn()
        >>> with held():
        ...     print(in_graph())
        False
    """
    _TURN[0] = RLock()


@contextmanager
def scoped(seed: int, device: torch.device | None = None) -> Generator[None]:
    """Draw from ``seed`` inside, and leave the caller's generators as they were. Threads take turns: see `held`.

    A thread of the user's that draws by itself, outside of `scoped`, draws from whatever runs at that moment, and moves
    it: ``with ps.rng.scoped(seed): model = Net()``.

    Args:
        seed: from `mix`.
        device: the device whose generator is seeded besides the CPU's; None or the CPU: the CPU's alone.

    Example:
        >>> def draw():
        ...     with scoped(mix(7, "noise")):
        ...         return torch.rand(())
        >>> bool(draw() == draw())
        True
    """
    turn = _taken()
    try:
        generators = [torch.default_generator, *_device_generators(device)]
        states = [_saved(found) for found in generators]
        try:
            try:
                for found in generators:
                    found.manual_seed(seed)
                yield
            finally:
                _put_back(generators, states)
        except BaseException:  # of the code inside, or Ctrl-C while they are put back
            _put_back(generators, states)
            raise
    finally:
        turn.release()


def aside(seed: int, device: torch.device | None = None) -> Callable[[], None]:
    """Seed the generators for a long time, in which threads take turns, and return what puts them back.

    Args:
        seed, device: as of `scoped`.

    Example:
        >>> before = position()
        >>> back = aside(3)
        >>> _ = torch.rand(())
        >>> back()
        >>> position() == before
        True
    """
    with held():
        generators = [torch.default_generator, *_device_generators(device)]
        states = [_saved(found) for found in generators]
        for found in generators:
            found.manual_seed(seed)

    def back() -> None:
        with held():
            _put_back(generators, states)

    return back


def seed(number: int) -> None:
    """Inside `scoped`: draw from another seed on the CPU.

    Args:
        number: from `mix`.

    Example:
        >>> with scoped(7):
        ...     first = torch.rand(())
        ...     seed(7)
        ...     bool(torch.rand(()) == first)
        True
    """
    torch.default_generator.manual_seed(number)


def position() -> bytes:
    """Where the CPU's generator stands, as bytes: what every draw changes, and seeding.

    Example:
        >>> before = position()
        >>> with scoped(7):
        ...     _ = torch.rand(())
        >>> position() == before
        True
    """
    return torch.default_generator.get_state().numpy().tobytes()  # compared in a third of torch.equal's time


def _saved(found: torch.Generator) -> Any:
    """What a generator goes on from: of CUDA's a seed and an offset, which are all of it, else a tensor."""
    return (found.initial_seed(), found.get_offset()) if found.device.type == "cuda" else found.get_state()


def _put_back(generators: list[torch.Generator], states: list[Any]) -> None:
    for found, state in zip(generators, states, strict=True):
        if isinstance(state, tuple):
            number, offset = state
            found.manual_seed(number)
            found.set_offset(offset)
        else:
            found.set_state(state)


def replaying() -> AbstractContextManager[Any]:
    """While a graph is captured: a draw from a position that was drawn from before gives what it gave then.

    Activation checkpointing runs code twice on one mask by putting the generator back. A graph records draws, not
    generators, so the second run would draw anew. The seed of the generator serves as the position here; checkpointing
    saves and restores it as it would in eager.

    Raises:
        StepContractError: at a draw after the generator was seeded inside.

    Example:
        >>> with scoped(7), replaying():
        ...     before = torch.get_rng_state()
        ...     first = torch.rand(())
        ...     torch.set_rng_state(before)
        ...     bool(torch.rand(()) == first)
        True
    """
    return _Replaying()


def is_draw(operator: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of torch's operator draws random numbers; attention that drops nothing out does not.

    Example:
        >>> aten = torch.ops.aten
        >>> is_draw(aten.rand.default, ([2],), {}), is_draw(aten.add.Tensor, (1, 2), {})
        (True, False)
    """
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):  # torch.cond and its kind have none
        return False
    for at, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            rate = args[at] if at < len(args) else kwargs.get("dropout_p", argument.default_value)
            return rate != 0
    return True


class _Replaying(TorchDispatchMode):
    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Dynamo, which `torch.cond` and its kind call in eager mode too, skips their frames in modes that are not:
        then, and for the rest of the process."""
        return True

    def __init__(self) -> None:
        super().__init__()
        self._drawn: dict[int, Any] = {}
        self._known = {torch.default_generator.initial_seed()}  # positions that the generator was left at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_draw(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        position = torch.default_generator.initial_seed()
        if position not in self._known:
            raise StepContractError(
                f"the step seeds torch's generator itself, with {position}, which no graph can hold",
                where="step",
                hint="no torch.manual_seed, no rng.scoped inside: the key of the state seeds each call; numbers that "
                "never change are drawn before, with ps.rng.generator(ps.rng.key(0), 'name'), and kept in a buffer",
            )
        torch.default_generator.manual_seed(position + 1)
        self._known.add(position + 1)
        if position in self._drawn:
            kept = self._drawn[position]
            # A draw that fills a tensor has to fill this one too.
            return args[0].copy_(kept) if func._schema.is_mutable else tree_map_only(Tensor, torch.clone, kept)
        drawn = func(*args, **(kwargs or {}))
        self._drawn[position] = tree_map_only(Tensor, torch.clone, drawn)
        return drawn


def states() -> list[Tensor]:
    """The states of the global generators of the CPU and of every CUDA device, to compare.

    Example:
        >>> states()[0].dtype
        torch.uint8
    """
    found = [torch.default_generator.get_state()]
    return found + (list(torch.cuda.get_rng_state_all()) if torch.cuda.is_initialized() else [])


def host_states() -> dict[str, Any]:
    """The states of numpy's and Python's global generators, to compare: a step leaves both as they were.

    Example:
        >>> host_states() == host_states()
        True
    """
    kind, keys, *rest = np.random.get_state()  # the legacy one is the one that is global
    return {"numpy's": (kind, np.asarray(keys).tobytes(), *rest), "Python's": random.getstate()}


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
