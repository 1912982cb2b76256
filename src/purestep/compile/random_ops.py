"""Random numbers of a compiled step on the CPU: those of the eager step, in its layouts, in its order.

Torch fills a tensor in the order of its memory, so the layout is part of what is drawn. Inductor lays tensors out as
their readers like it, leaves out what nobody reads, writes some draws as other arithmetic, and may read a tensor that
is filled in place before it is filled. Here a dispatch mode replaces each draw of a trace by an operator of purestep,
which writes nothing in place, names its strides, and is never dropped:

- ``drawn``: a new tensor, filled by one of torch's in-place operators with numbers for arguments.
- ``coins``: the same with a tensor of chances.
- ``multinomial``, ``poisson`` and the like: torch's own, which inductor calls as they are.
- ``laid``: what they are given, in eager mode's layout.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, library
from torch.utils._pytree import tree_map_only

from . import formats
from .control_flow import Mode

_aten: Any = torch.ops.aten
_own: Any = torch.ops.purestep
_SEEDED = torch.Tag.nondeterministic_seeded


# --- operators --------------------------------------------------------------------------------------------------------

_LIBRARY = library.Library("purestep", "FRAGMENT")
_LIBRARY.define(
    "drawn(str fill, SymInt[] size, SymInt[] stride, ScalarType dtype, Scalar[] numbers) -> Tensor", tags=(_SEEDED,)
)
_LIBRARY.define("coins(Tensor chances, SymInt[] size, SymInt[] stride, ScalarType dtype) -> Tensor", tags=(_SEEDED,))
_LIBRARY.define("laid(Tensor value, SymInt[] stride) -> Tensor")

_FILLS = {
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
        getattr(_aten.random_, "from"),
    )
}
"""Operators that fill a tensor, with numbers for arguments."""


def _like_first(value: Tensor, *_: Any, **__: Any) -> Tensor:
    """Contiguous: torch's own word for some of them says otherwise."""
    return torch.empty(value.shape, dtype=value.dtype, device=value.device)


def _rectified_like(value: Tensor, noise: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(value), torch.empty_like(noise)


_SAMPLERS: dict[Any, Any] = {
    _aten.multinomial.default: _aten.multinomial.default,
    _aten.poisson.default: _like_first,
    _aten.binomial.default: _like_first,
    _aten._standard_gamma.default: _like_first,
    _aten._sample_dirichlet.default: _like_first,
    _aten.rrelu_with_noise_functional.default: _rectified_like,
    _aten.randperm.default: _aten.randperm.default,
}
"""Operators that draw by tensors, or one permutation -> what they make, without numbers."""


def _filled(
    fill: str, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, numbers: Sequence[Any]
) -> Tensor:
    return _FILLS[fill](torch.empty_strided(size, stride, dtype=dtype, device="cpu"), *numbers)


def _empty(fill: str, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, numbers: Sequence[Any]) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cpu")


def _tossed(chances: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=chances.device).bernoulli_(chances)


def _untossed(chances: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=chances.device)


def _laid(value: Tensor, stride: Sequence[int]) -> Tensor:
    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(value)


def _laid_empty(value: Tensor, stride: Sequence[int]) -> Tensor:
    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device)


def _define(name: str, does: Callable[..., Any], makes: Callable[..., Any]) -> None:
    _LIBRARY.impl(name, does, "CompositeExplicitAutograd")
    library.register_fake(f"purestep::{name}", makes, lib=_LIBRARY)


_define("drawn", _filled, _empty)
_define("coins", _tossed, _untossed)
_define("laid", _laid, _laid_empty)

_MIRRORS: dict[Any, Any] = {}
"""Operators of torch -> purestep's."""

for _operator, _makes in _SAMPLERS.items():
    _name = _operator._schema.name.removeprefix("aten::")
    _overload = _operator._schema.overload_name
    _full = f"{_name}.{_overload}" if _overload else _name
    _LIBRARY.define(str(_operator._schema).removeprefix("aten::"), tags=(_SEEDED,))
    _define(_full, _operator, _makes)
    _MIRRORS[_operator] = getattr(getattr(_own, _name), _overload or "default")

for _operator in (_own.drawn.default, _own.coins.default, *_MIRRORS.values()):
    torch.fx.has_side_effect(_operator)  # the generator moves, whether or not its numbers are read


# --- in a trace -------------------------------------------------------------------------------------------------------


class AsInEager(Mode):
    """Replaces draws on the CPU by operators that inductor leaves as they are. Others, and draws from a generator of
    the caller's, are left alone."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        if rule is None or kwargs.get("generator") is not None or not _on_cpu(args, kwargs):
            return func(*args, **kwargs)
        return rule(func, args, kwargs)


def _on_cpu(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    devices = {leaf.device.type for leaf in args if isinstance(leaf, Tensor)}
    if kwargs.get("device") is not None:
        devices = {torch.device(kwargs["device"]).type}
    return devices <= {"cpu"} and not kwargs.get("pin_memory")


def _numbers(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
    """A fill's arguments after the tensor; None where one is left open."""
    found = list[Any]()
    for at, argument in enumerate(func._schema.arguments[1:], 1):
        if argument.name != "generator":
            found.append(args[at] if at < len(args) else kwargs.get(argument.name, argument.default_value))
    return None if None in found else found


def _fill(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    filled, numbers = args[0], _numbers(func, args, kwargs)
    if numbers is None:
        return func(*args, **kwargs)
    return filled.copy_(_drawn(func, filled, numbers))


def _drawn(fill: Any, like: Tensor, numbers: Sequence[Any]) -> Tensor:
    return _own.drawn(str(fill), like.shape, like.stride(), like.dtype, numbers)


def _new(empty: Any, fill: Any, numbers: Callable[..., Sequence[Any]], given: int) -> Callable[..., Any]:
    """A rule for an operator that makes a tensor, then fills it.

    Args:
        empty: makes the tensor, of the arguments at the end and those by name.
        fill: fills it.
        numbers: what with, of the others.
        given: how many of those there are; the tensor to be like comes before.
    """

    def rule(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        first = 1 if empty is torch.empty_like else 0
        made = empty(*(args[:1] if first else args[given:]), **kwargs)
        return _drawn(fill, made, numbers(*args[first : first + given]))

    return rule


def _sampled(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return _MIRRORS[func](*tree_map_only(Tensor, _as_laid_out, tuple(args)), **kwargs)


def _as_laid_out(value: Tensor) -> Tensor:
    return _own.laid(value, value.stride())


def _coins(like: Tensor, chances: Tensor) -> Tensor:
    return _own.coins(_as_laid_out(chances), like.shape, like.stride(), like.dtype)


def _normal(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Of a mean or a deviation that is a tensor: contiguous, whatever that is."""
    mean, deviation = (*args, *(argument.default_value for argument in func._schema.arguments[len(args) : 2]))
    tensors = [leaf for leaf in (mean, deviation) if isinstance(leaf, Tensor)]
    like = torch.empty(torch.broadcast_shapes(*(leaf.shape for leaf in tensors)), dtype=tensors[0].dtype, device="cpu")
    if not isinstance(deviation, Tensor):
        return _drawn(_aten.normal_.default, like, (0.0, deviation)) + mean
    return _drawn(_aten.normal_.default, like, (0.0, 1.0)) * deviation + mean


def _contiguous(value: Tensor) -> Tensor:
    return torch.empty_like(value, memory_format=torch.contiguous_format)


def _rectified(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    given = [argument.default_value for argument in func._schema.arguments[:5]]
    given[: len(args)] = args[:5]
    value, noise, lower, upper, training = given
    if not training:
        return func(*args, **kwargs)
    made, drawn = _sampled(_aten.rrelu_with_noise_functional.default, (value, noise, lower, upper, True), {})
    noise.copy_(drawn)
    # The operator that returns its noise lays the result out like the input; this one makes it contiguous.
    return value.copy_(made) if func is _aten.rrelu_with_noise_.default else made.contiguous()


def _native_dropout(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Of torch's decompositions: eager mode has another operator on the CPU."""
    value, rate, training = args
    if not training or rate == 0 or rate == 1:
        return func(*args, **kwargs)
    kept = _drawn(_aten.bernoulli_.float, torch.empty_like(value), [1 - rate])
    return value * (kept / (1 - rate)), kept.to(torch.bool)


_RANDOM = getattr(_aten.random_, "from")

_RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_FILLS.values(), _fill),
    **dict.fromkeys(_SAMPLERS, _sampled),
    _aten.bernoulli_.Tensor: lambda func, args, kwargs: args[0].copy_(_coins(args[0], args[1])),
    _aten.bernoulli.default: lambda func, args, kwargs: _coins(_contiguous(args[0]), args[0]),
    _aten.bernoulli.p: lambda func, args, kwargs: _drawn(_aten.bernoulli_.float, _contiguous(args[0]), args[1:]),
    _aten.rand.default: _new(torch.empty, _aten.uniform_.default, lambda: (0.0, 1.0), 0),
    _aten.randn.default: _new(torch.empty, _aten.normal_.default, lambda: (0.0, 1.0), 0),
    **dict.fromkeys((_aten.normal.Tensor_float, _aten.normal.float_Tensor, _aten.normal.Tensor_Tensor), _normal),
    _aten.normal.float_float: _new(torch.empty, _aten.normal_.default, lambda mean, std: (mean, std), 2),
    _aten.randint.default: _new(torch.empty, _RANDOM, lambda high: (0, high), 1),
    _aten.randint.low: _new(torch.empty, _RANDOM, lambda low, high: (low, high), 2),
    _aten.rand_like.default: _new(torch.empty_like, _aten.uniform_.default, lambda: (0.0, 1.0), 0),
    _aten.randn_like.default: _new(torch.empty_like, _aten.normal_.default, lambda: (0.0, 1.0), 0),
    _aten.randint_like.default: _new(torch.empty_like, _RANDOM, lambda high: (0, high), 1),
    _aten.randint_like.low_dtype: _new(torch.empty_like, _RANDOM, lambda low, high: (low, high), 2),
    _aten.rrelu_with_noise.default: _rectified,
    _aten.rrelu_with_noise_.default: _rectified,
    _aten.native_dropout.default: _native_dropout,
    **formats.RESULTS,
}


# --- in inductor ------------------------------------------------------------------------------------------------------


@functools.cache
def register() -> None:
    """Let inductor call these operators. Loads it."""
    from torch._inductor import ir, lowering

    kinds, lowerings = ir, lowering
    call, kept = _call_class(), _kept_class()

    def drawn(fill: str, size: Any, stride: Any, dtype: torch.dtype, numbers: Any) -> Any:
        layout: Any = kinds.FixedLayout(torch.device("cpu"), dtype, list(size), list(stride))
        made = call(layout, [], constant_args=tuple(numbers), op_overload=_FILLS[fill])
        return kinds.TensorBox.create(made)

    def coins(chances: Any, size: Any, stride: Any, dtype: torch.dtype) -> Any:
        layout: Any = kinds.FixedLayout(torch.device("cpu"), dtype, list(size), list(stride))
        given = [kinds.ExternKernel.realize_input(chances)]
        return kinds.TensorBox.create(call(layout, given, op_overload=_aten.bernoulli_.Tensor))

    def laid(value: Any, stride: Any) -> Any:
        return kinds.ExternKernel.require_exact_strides(kinds.ExternKernel.copy_input(value), list(stride))

    def sampler(operator: Any) -> Callable[..., Any]:
        def lowered(*args: Any, **kwargs: Any) -> Any:
            made = kept.create(operator, *args, **kwargs)
            results = list(made) if isinstance(made, list | tuple) else [made]
            for result in results:  # the next draw waits for it: without it, it would not wait
                result.has_side_effects = lambda: True
            boxes = tuple(map(kinds.TensorBox.create, results))
            return boxes if isinstance(made, list | tuple) else boxes[0]

        return lowered

    table: Any = lowerings.register_lowering
    table(_own.drawn.default, type_promotion_kind=None)(drawn)
    table(_own.coins.default, type_promotion_kind=None)(coins)
    table(_own.laid.default, type_promotion_kind=None)(laid)
    for operator, mirror in _MIRRORS.items():
        # Where torch's own word of a layout is wrong, inductor would check results by it.
        called = operator if _SAMPLERS[operator] is operator else mirror
        table(mirror, type_promotion_kind=None)(sampler(called))


@functools.cache
def _kept_class() -> Any:
    from torch._inductor import ir

    base: Any = ir.FallbackKernel

    class Kept(base):
        """A call of torch's operator, whether or not its results are read."""

        def has_side_effects(self) -> bool:
            return True

    return Kept


@functools.cache
def _call_class() -> Any:
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    base: Any = ir.ExternKernelOut

    class Fill(base):
        """A new buffer, filled by an operator of torch's."""

        def codegen(self, wrapper: Any) -> None:
            name, fill, numbers = self.get_name(), self.op_overload, self.constant_args
            graph: Any = V.graph
            is_unread = name in graph.removed_buffers  # whose memory inductor has left out
            if is_unread:
                graph.removed_buffers.discard(name)
                wrapper.codegen_allocation(self)
            given = [each.codegen_reference() for each in self.inputs]
            if graph.cpp_wrapper:
                for line in _in_cpp(name, fill, given, numbers):
                    wrapper.writeline(line)
            else:
                packet, _, overload = str(fill).removeprefix("aten.").partition(".")
                arguments = ", ".join(map(str, (name, *given, *numbers)))
                wrapper.writeline(f'getattr(torch.ops.aten.{packet}, "{overload}")({arguments})')
            if is_unread:
                wrapper.codegen_free(self)

        def has_side_effects(self) -> bool:
            return True

    return Fill


def _in_cpp(name: str, fill: Any, given: Sequence[str], numbers: Sequence[Any]) -> list[str]:
    """A call of the operator. Only those for coins have a function in inductor's C interface; others are looked up by
    name, with arguments in words of 64 bits."""
    if fill in (_aten.bernoulli_.float, _aten.bernoulli_.Tensor):
        function = f"aoti_torch_cpu_bernoulli__{fill._schema.overload_name}"
        (chance,) = given or [repr(float(numbers[0]))]
        return [f"AOTI_TORCH_ERROR_CODE_CHECK({function}({name}, {chance}, nullptr));"]
    stack, waiting = [f"(StableIValue){name}_taken"], list(numbers)
    for argument in fill._schema.arguments[1:]:
        kind = str(argument.type)
        if argument.name == "generator":
            stack.append("0")
        elif kind == "float":
            stack.append(f"{struct.unpack('<Q', struct.pack('<d', waiting.pop(0)))[0]}ULL")
        elif kind.startswith("Optional"):
            stack.append(f"(StableIValue)new StableIValue((StableIValue){waiting.pop(0)}LL)")  # the callee deletes it
        else:
            stack.append(f"(StableIValue){waiting.pop(0)}LL")
    operator, _, overload = str(fill).removeprefix("aten.").partition(".")
    overload = "" if overload == "default" else overload
    return [
        f"AtenTensorHandle {name}_taken;",
        f"AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle({name}, &{name}_taken));",
        f"StableIValue {name}_stack[] = {{{', '.join(stack)}}};",
        f'AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_call_dispatcher("aten::{operator}", "{overload}", {name}_stack));',
        f"AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_delete_tensor_object((AtenTensorHandle){name}_stack[0]));",
    ]
