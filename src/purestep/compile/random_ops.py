"""Random numbers of a compiled step on the CPU: the same as in eager mode, in layout and order.

Torch fills a tensor in memory order, so the numbers depend on its layout. Inductor chooses layouts for the readers,
removes unread tensors, rewrites some random operators, and may read a tensor before it is filled in place. Here a
dispatch mode replaces each random operator of a trace by one of purestep, which writes nothing in place, has explicit
strides, and is never removed:

- ``drawn``: a new tensor, filled by an in-place operator of torch with numeric arguments.
- ``coins``: a new tensor, filled by Bernoulli draws with a tensor of probabilities.
- ``multinomial``, ``poisson`` and the like: torch's operators, which inductor calls directly.
- ``laid``: a copy of their arguments in eager mode's layout.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, library
from torch.torch_version import TorchVersion
from torch.utils._pytree import tree_map_only

from ..ensembles import member_draws
from ..torch_ext import tracing
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


def _like_first(value: Tensor, *_: Any, **__: Any) -> Tensor:
    """A contiguous result; torch's fake result has another layout for some operators."""
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
"""Random operators with tensor arguments, and `randperm` -> their fake implementation."""


def _drawn_impl(
    fill: str, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, numbers: Sequence[Any]
) -> Tensor:
    return member_draws.FILLS[fill](torch.empty_strided(size, stride, dtype=dtype, device="cpu"), *numbers)


def _drawn_fake(
    fill: str, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, numbers: Sequence[Any]
) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cpu")


def _coins_impl(chances: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=chances.device).bernoulli_(chances)


def _coins_fake(chances: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=chances.device)


def _laid_impl(value: Tensor, stride: Sequence[int]) -> Tensor:
    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(value)


def _laid_fake(value: Tensor, stride: Sequence[int]) -> Tensor:
    return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device)


def _define(name: str, impl: Callable[..., Any], fake: Callable[..., Any]) -> None:
    _LIBRARY.impl(name, impl, "CompositeExplicitAutograd")
    library.register_fake(f"purestep::{name}", fake, lib=_LIBRARY)


_define("drawn", _drawn_impl, _drawn_fake)
_define("coins", _coins_impl, _coins_fake)
_define("laid", _laid_impl, _laid_fake)

_MIRRORS: dict[Any, Any] = {}
"""Operators of torch -> those of purestep."""

for _operator, _makes in _SAMPLERS.items():
    _name = _operator._schema.name.removeprefix("aten::")
    _overload = _operator._schema.overload_name
    _full = f"{_name}.{_overload}" if _overload else _name
    _LIBRARY.define(str(_operator._schema).removeprefix("aten::"), tags=(_SEEDED,))
    _define(_full, _operator, _makes)
    _MIRRORS[_operator] = getattr(getattr(_own, _name), _overload or "default")

for _operator in (_own.drawn.default, _own.coins.default, *_MIRRORS.values()):
    torch.fx.has_side_effect(_operator)  # the generator advances even if the numbers are unread


# --- in a trace -------------------------------------------------------------------------------------------------------


class AsInEager(Mode):
    """Mode that replaces random operators on the CPU by operators that inductor does not change, and corrects the
    strides of fake tensors, on which draws depend. Draws on other devices or from an explicit generator are unchanged.
    """

    def __init__(self) -> None:
        super().__init__()
        self._strides = formats.Strides()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if tracing.has_parts(types):
            return NotImplemented
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        if not _on_cpu(args, kwargs):
            return func(*args, **kwargs)
        if rule is not None and kwargs.get("generator") is None:
            return rule(func, args, kwargs)
        made = func(*args, **kwargs)
        self._strides.correct(func, args, kwargs, made)
        return made


def _on_cpu(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    devices = {leaf.device.type for leaf in args if isinstance(leaf, Tensor)}
    if kwargs.get("device") is not None:
        devices = {torch.device(kwargs["device"]).type}
    return devices <= {"cpu"} and not kwargs.get("pin_memory")


def _numbers(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
    """The arguments of an in-place fill after the tensor; None if one has no value."""
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
    """Return a rule for an operator that allocates a tensor and fills it.

    Args:
        empty: allocates the tensor from the last arguments and the keyword arguments.
        fill: the in-place operator.
        numbers: converts the operator's numeric arguments to those of ``fill``.
        given: the number of numeric arguments; for ``empty_like`` the tensor comes before them.
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
    """The rule for a tensor as mean or deviation: the result is contiguous whatever their layouts."""
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
    # The functional operator keeps the input's layout; this one returns a contiguous result.
    return value.copy_(made) if func is _aten.rrelu_with_noise_.default else made.contiguous()


def _native_dropout(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The rule for an operator that only torch's decompositions use on the CPU."""
    value, rate, training = args
    if not training or rate == 0 or rate == 1:
        return func(*args, **kwargs)
    kept = _drawn(_aten.bernoulli_.float, torch.empty_like(value), [1 - rate])
    return value * (kept / (1 - rate)), kept.to(torch.bool)


_RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(member_draws.FILLS.values(), _fill),
    **dict.fromkeys(_SAMPLERS, _sampled),
    _aten.bernoulli_.Tensor: lambda func, args, kwargs: args[0].copy_(_coins(args[0], args[1])),
    _aten.bernoulli.default: lambda func, args, kwargs: _coins(_contiguous(args[0]), args[0]),
    _aten.bernoulli.p: lambda func, args, kwargs: _drawn(_aten.bernoulli_.float, _contiguous(args[0]), args[1:]),
    **{operator: _new(*how) for operator, how in member_draws.ALLOCATING.items()},
    **dict.fromkeys((_aten.normal.Tensor_float, _aten.normal.float_Tensor, _aten.normal.Tensor_Tensor), _normal),
    _aten.rrelu_with_noise.default: _rectified,
    _aten.rrelu_with_noise_.default: _rectified,
    _aten.native_dropout.default: _native_dropout,
}


# --- in inductor ------------------------------------------------------------------------------------------------------

_IN_ORDER = TorchVersion(torch.__version__) >= TorchVersion("2.13")
"""True if inductor keeps the order of draws. Before torch 2.13 it moves an unread draw behind later ones."""


@functools.cache
def register() -> None:
    """Register the lowerings of these operators. Loads inductor."""
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V

    kinds, lowerings = ir, lowering
    call, kept = _call_class(), _kept_class()

    def drawn(fill: str, size: Any, stride: Any, dtype: torch.dtype, numbers: Any) -> Any:
        layout: Any = kinds.FixedLayout(torch.device("cpu"), dtype, list(size), list(stride))
        made = call(layout, [], constant_args=tuple(numbers), op_overload=member_draws.FILLS[fill])
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
            for result in results:  # orders the next draw after this one
                result.has_side_effects = lambda: True
            boxes = tuple(map(kinds.TensorBox.create, results))
            return boxes if isinstance(made, list | tuple) else boxes[0]

        return lowered

    def in_order(lower: Callable[..., Any]) -> Callable[..., Any]:
        def lowered(*args: Any, **kwargs: Any) -> Any:
            graph: Any = V.graph
            known = len(graph.operations)
            made = lower(*args, **kwargs)
            last = next((each for each in reversed(graph.operations[:known]) if isinstance(each, call | kept)), None)
            for each in graph.operations[known:]:
                if last is not None and isinstance(each, call | kept):
                    graph.additional_buffer_deps[each.get_operation_name()].add(last.get_name())
            return made

        return lower if _IN_ORDER else lowered

    table: Any = lowerings.register_lowering
    table(_own.drawn.default, type_promotion_kind=None)(in_order(drawn))
    table(_own.coins.default, type_promotion_kind=None)(in_order(coins))
    table(_own.laid.default, type_promotion_kind=None)(laid)
    for operator, mirror in _MIRRORS.items():
        # Call our operator if torch's fake layout is wrong: inductor checks results against it.
        called = operator if _SAMPLERS[operator] is operator else mirror
        table(mirror, type_promotion_kind=None)(in_order(sampler(called)))
    for operator in member_draws.operators():
        table(operator, type_promotion_kind=None)(in_order(sampler(operator)))


@functools.cache
def _kept_class() -> Any:
    from torch._inductor import ir

    base: Any = ir.FallbackKernel

    class Kept(base):
        """A call of torch's operator that inductor keeps even if its results are unread."""

        def has_side_effects(self) -> bool:
            return True

    return Kept


@functools.cache
def _call_class() -> Any:
    from torch._inductor import ir
    from torch._inductor.virtualized import V

    base: Any = ir.ExternKernelOut

    class Fill(base):
        """A new buffer, filled by an operator of torch."""

        def codegen(self, wrapper: Any) -> None:
            name, fill, numbers = self.get_name(), self.op_overload, self.constant_args
            graph: Any = V.graph
            is_unread = name in graph.removed_buffers  # inductor has removed its allocation
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
    """C++ lines that call the operator. Only the Bernoulli operators have a function in inductor's C interface; others
    go through the dispatcher by name, with arguments as 64-bit words."""
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
