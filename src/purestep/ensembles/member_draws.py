"""Random numbers of a mapped step: every member draws the numbers that it would draw alone.

`torch.func.vmap` draws the numbers of all members with one call of a random operator on a stacked tensor. The mode here
replaces such a call by one call for each member, with a generator of the member. A graph holds no generator, so that a
captured call is an operator of purestep, which takes the generators from `scoped`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, library
from torch.utils._python_dispatch import TorchDispatchMode

from .. import rng
from ..torch_ext import global_rng, tracing

_aten: Any = torch.ops.aten
_SEEDED = (torch.Tag.nondeterministic_seeded,)
_generators: ContextVar[Sequence[torch.Generator]] = ContextVar("member_generators", default=())


@contextmanager
def scoped(numbers: Sequence[int], device: torch.device, *, together: int | None = None) -> Generator[None]:
    """Give each member a generator inside the block, and seed the global generators for draws that belong to no member.

    Args:
        numbers: a seed in [0, 2**63) for each member.
        device: of the draws.
        together: the seed of the global generators; by default from all numbers.

    Example:
        >>> with scoped([1, 2], torch.device("cpu")):
        ...     both = drawn_each("aten.uniform_.default", (2, 3), (3, 1), torch.float32, [0.0, 1.0])
        >>> bool((both[1] == torch.rand(3, generator=torch.Generator().manual_seed(2))).all())
        True
    """
    token = _generators.set([torch.Generator(device=device).manual_seed(number) for number in numbers])
    try:
        with global_rng.seeded(rng.mix(*numbers) if together is None else together, device):
            yield
    finally:
        _generators.reset(token)


# --- operators --------------------------------------------------------------------------------------------------------

_RANDOM_FROM = getattr(_aten.random_, "from")

FILLS: dict[str, Any] = {
    str(fill): fill
    for fill in (
        _aten.bernoulli_.float,
        _aten.uniform_.default,
        _aten.normal_.default,
        _aten.exponential_.default,
        _aten.geometric_.default,
        _aten.cauchy_.default,
        _aten.log_normal_.default,
        _aten.random_.default,
        _aten.random_.to,
        _RANDOM_FROM,
    )
}
"""In-place operators of torch that fill a tensor, with numeric arguments."""

ALLOCATING: dict[Any, tuple[Callable[..., Tensor], Any, Callable[..., Sequence[Any]], int]] = {
    _aten.rand.default: (torch.empty, _aten.uniform_.default, lambda: (0.0, 1.0), 0),
    _aten.randn.default: (torch.empty, _aten.normal_.default, lambda: (0.0, 1.0), 0),
    _aten.normal.float_float: (torch.empty, _aten.normal_.default, lambda mean, std: (mean, std), 2),
    _aten.randint.default: (torch.empty, _RANDOM_FROM, lambda high: (0, high), 1),
    _aten.randint.low: (torch.empty, _RANDOM_FROM, lambda low, high: (low, high), 2),
    _aten.rand_like.default: (torch.empty_like, _aten.uniform_.default, lambda: (0.0, 1.0), 0),
    _aten.randn_like.default: (torch.empty_like, _aten.normal_.default, lambda: (0.0, 1.0), 0),
    _aten.randint_like.default: (torch.empty_like, _RANDOM_FROM, lambda high: (0, high), 1),
    _aten.randint_like.low_dtype: (torch.empty_like, _RANDOM_FROM, lambda low, high: (low, high), 2),
}
"""Operators that allocate a tensor and fill it -> (how it is allocated, the in-place operator, from the operator's
numeric arguments to those of the in-place one, how many those are)."""


def drawn_each(
    fill: str, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, numbers: Sequence[Any]
) -> Tensor:
    """Return a new tensor whose part ``[i]`` is filled by the generator of member i.

    Args:
        fill: a key of `FILLS`.
        size: its first entry is the number of members.
        stride: of the result.
        dtype: of the result.
        numbers: arguments of the operator.
    """
    made, generators = _empty(size, stride, dtype)
    for part, generator in zip(made.unbind(), generators, strict=True):
        FILLS[fill](part, *numbers, generator=generator)
    return made


def coins_each(chances: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """As `drawn_each`, with Bernoulli draws of these probabilities, shape=size."""
    made, generators = _empty(size, stride, dtype)
    for part, chance, generator in zip(made.unbind(), chances.unbind(), generators, strict=True):
        part.bernoulli_(chance, generator=generator)
    return made


def _empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> tuple[Tensor, Sequence[torch.Generator]]:
    # While a compiler tries an operator there is no scope: any numbers will do.
    generators = _generators.get() or [torch.Generator()] * size[0]
    return torch.empty_strided(size, stride, dtype=dtype, device=generators[0].device), generators


def _fake(like: Any, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, *_: Any) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cpu")


_LIBRARY = library.Library("purestep", "FRAGMENT")


@functools.cache
def operators() -> tuple[Any, Any]:
    """Define the operators that a graph calls; return ``purestep::drawn_each`` and ``purestep::coins_each``."""
    where = "SymInt[] size, SymInt[] stride, ScalarType dtype"
    for name, schema, function in (
        ("drawn_each", f"(str fill, {where}, Scalar[] numbers) -> Tensor", drawn_each),
        ("coins_each", f"(Tensor chances, {where}) -> Tensor", coins_each),
    ):
        _LIBRARY.define(f"{name}{schema}", tags=_SEEDED)
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        library.register_fake(f"purestep::{name}", _fake, lib=_LIBRARY)
    found = torch.ops.purestep.drawn_each.default, torch.ops.purestep.coins_each.default
    for operator in found:
        torch.fx.has_side_effect(operator)  # the generators advance even if the numbers are unread
    return found


# --- the mode ---------------------------------------------------------------------------------------------------------


class MemberDraws(TorchDispatchMode):
    """Mode around a mapped call in which every member draws with its own generator.

    In eager mode it replaces every random operator that takes a generator. In a graph it replaces fills with numbers
    and normal and Bernoulli draws on the CPU; other draws use the global generator, and differ from those of the member
    alone.

    Args:
        members: the number of members, the leading dimension of the tensors under `vmap`.

    Example:
        >>> def noisy(x):
        ...     return x + torch.rand(3)
        >>> with scoped([1, 2], torch.device("cpu")), MemberDraws(2):
        ...     both = torch.func.vmap(noisy, randomness="different")(torch.zeros(2, 3))
        >>> bool((both[1] == torch.rand(3, generator=torch.Generator().manual_seed(2))).all())
        True
    """

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True: as for `tracing.replaying`, Dynamo must not skip frames under this mode."""
        return True

    def __init__(self, members: int) -> None:
        super().__init__()
        self._members = members
        self._single = 0  # draws that vmap makes member by member

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None or not tracing.is_random(func, args, kwargs):
            return func(*args, **kwargs)
        if tracing.in_graph():
            return self._captured(func, args, kwargs)
        rule = _RULES.get(func)
        made = NotImplemented if rule is None else rule(self._members, drawn_each, coins_each, func, args, kwargs)
        return self._sampled(func, args, kwargs) if made is NotImplemented else made

    def _captured(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        rule = _RULES.get(func) if _on_cpu(args, kwargs) else None
        made = NotImplemented if rule is None else rule(self._members, *operators(), func, args, kwargs)
        return func(*args, **kwargs) if made is NotImplemented else made

    def _sampled(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Call an operator once for each member, on its part of the tensors."""
        generators = _generators.get()
        func = _SEEDABLE.get(func, func)
        if not any(argument.name == "generator" for argument in func._schema.arguments):
            return func(*args, **kwargs)
        tensors = [leaf for leaf in args if isinstance(leaf, Tensor)]
        most = max((leaf.dim() for leaf in tensors), default=0)  # a tensor of fewer dimensions is not mapped
        rows = {leaf.shape[0] if most else 1 for leaf in tensors if leaf.dim() == most}
        if not tensors:  # `randperm`: vmap calls it for one member after another
            self._single += 1
            return func(*args, **{**kwargs, "generator": generators[(self._single - 1) % self._members]})
        if len(rows) != 1 or next(iter(rows)) % self._members:
            return func(*args, **kwargs)
        count = next(iter(rows)) // self._members
        made = list[Tensor]()
        for index, generator in enumerate(generators):
            part = slice(index * count, (index + 1) * count)
            own = [leaf[part] if isinstance(leaf, Tensor) and leaf.dim() == most else leaf for leaf in args]
            made.append(func(*own, **{**kwargs, "generator": generator}))
        return args[0] if func._schema.is_mutable else torch.cat(made)


def _on_cpu(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    devices = {leaf.device.type for leaf in args if isinstance(leaf, Tensor)}
    if kwargs.get("device") is not None:
        devices = {torch.device(kwargs["device"]).type}
    return devices <= {"cpu"} and not kwargs.get("pin_memory")


def _drawn(members: int, drawn: Any, fill: Any, like: Tensor, numbers: Sequence[Any]) -> Any:
    if not like.dim() or like.shape[0] != members:
        return NotImplemented
    return drawn(str(fill), list(like.shape), list(like.stride()), like.dtype, list(numbers))


def _fill(members: int, drawn: Any, coins: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    numbers = [
        args[at] if at < len(args) else kwargs.get(argument.name, argument.default_value)
        for at, argument in enumerate(func._schema.arguments[1:], 1)
        if argument.name != "generator"
    ]
    made = NotImplemented if None in numbers else _drawn(members, drawn, func, args[0], numbers)
    return made if made is NotImplemented else args[0].copy_(made)


def _new(empty: Callable[..., Tensor], fill: Any, numbers: Callable[..., Sequence[Any]], given: int) -> Any:
    """Return a rule for an operator that allocates a tensor and fills it.

    Args:
        empty: allocates the tensor from the last arguments and the keyword arguments.
        fill: the in-place operator.
        numbers: converts the operator's numeric arguments to those of ``fill``.
        given: the number of numeric arguments; for ``empty_like`` the tensor comes before them.
    """

    def rule(members: int, drawn: Any, coins: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        first = 1 if empty is torch.empty_like else 0
        like = empty(*(args[:1] if first else args[given:]), **kwargs)
        return _drawn(members, drawn, fill, like, numbers(*args[first : first + given]))

    return rule


def _bernoulli(members: int, drawn: Any, coins: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    like = torch.empty_like(args[0], memory_format=torch.contiguous_format)
    return _drawn(members, drawn, _aten.bernoulli_.float, like, args[1:])


def _coins(members: int, drawn: Any, coins: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    chances = args[-1]
    like = (
        args[0] if func is _aten.bernoulli_.Tensor else torch.empty_like(chances, memory_format=torch.contiguous_format)
    )
    if not like.dim() or like.shape[0] != members or like.shape != chances.shape:
        return NotImplemented
    made = coins(chances, list(like.shape), list(like.stride()), like.dtype)
    return like.copy_(made) if func is _aten.bernoulli_.Tensor else made


def _normal(members: int, drawn: Any, coins: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    mean, std = args[0], args[1] if len(args) > 1 else kwargs.get("std", 1.0)
    given = [leaf for leaf in (mean, std) if isinstance(leaf, Tensor)]
    like = max(given, key=Tensor.dim)
    if torch.broadcast_shapes(*(leaf.shape for leaf in given)) != like.shape:
        return NotImplemented
    spread = 1.0 if isinstance(std, Tensor) else std
    like = torch.empty_like(like, memory_format=torch.contiguous_format)
    made = _drawn(members, drawn, _aten.normal_.default, like, (0.0, spread))
    if made is NotImplemented:
        return made
    return (made.mul_(std) if isinstance(std, Tensor) else made).add_(mean)


_SEEDABLE: dict[Any, Any] = {_aten.randperm.default: _aten.randperm.generator}
"""Operators without a generator -> their overloads with one."""

_RULES: dict[Any, Any] = {
    **dict.fromkeys(FILLS.values(), _fill),
    _aten.bernoulli.p: _bernoulli,
    _aten.bernoulli.default: _coins,
    _aten.bernoulli_.Tensor: _coins,
    **dict.fromkeys((_aten.normal.Tensor_float, _aten.normal.float_Tensor, _aten.normal.Tensor_Tensor), _normal),
    **{operator: _new(*how) for operator, how in ALLOCATING.items()},
}
