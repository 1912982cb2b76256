"""The operations of a function as text, the key of its compiled code: every operator below autograd, on fake tensors.

Buys: `code_cache` finds the code of an earlier run before anything is compiled. The function's Python runs only once,
here, and the graph is built from the recorded operations, so Python code that counts its calls or draws numbers cannot
lead to a graph that differs from the key.

Private names: ``torch._subclasses`` (fake tensors), ``torch._ops.OpOverload``, the stacks of modes in
``torch.overrides`` and ``torch.utils._python_dispatch``, the tracing flag of ``torch.fx``.

Without: the function is traced again by `make_fx`, and its code is not stored.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses import FakeTensor, FakeTensorMode, fake_tensor
from torch.overrides import TorchFunctionMode

from ...errors import PurestepError, StepContractError
from ...torch_ext import tensor_layout, tracing
from ..capture import autocast_disabled
from ..control_flow import Mode

_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)

_MEMORY = (Tensor, torch.nn.Parameter)
"""Tensor classes without further content."""

_NAMESPACES = ("aten", "prims", "purestep")
"""Namespaces of operators whose code depends only on the versions of torch and purestep."""


class Unkeyable(Exception):
    """A value that text cannot identify."""


class Record(NamedTuple):
    """The operations of a function on tensors like these."""

    function: Callable[..., Any]
    """repeats the operations: takes tensors, returns a list of tensors"""
    inputs: Sequence[Tensor]
    lines: list[str] | None
    """the operations as text; None if text cannot identify them"""


def record(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Record:
    """Run a function once on fake tensors and record its operations.

    If they cannot be recorded (sizes that depend on values, higher-order operators, tensor subclasses, a dispatch mode
    of the caller), the record has the function itself, which then runs again to be traced.

    Args:
        function: takes tensors, returns a list of tensors.
        inputs: examples, which are not read or written.

    Raises:
        StepContractError: the function uses a fake tensor that it stored during an earlier capture.
    """
    itself = Record(_checked(function), inputs, None)
    try:
        lines = [_input(leaf) for leaf in inputs]
    except Unkeyable:
        return itself
    if _in_modes():
        return itself
    # No ShapeEnv: sizes that depend on values raise.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fakes = [_like(leaf).requires_grad_(leaf.requires_grad) for leaf in inputs]
    recorder = _Recorder(fakes)
    try:
        with mode, _as_traced(), recorder:
            outputs = function(*fakes)
        lines += [*recorder.lines, f"output {recorder.text(outputs)}"]
    except Exception as error:  # the function's own errors are raised again by the trace
        # The caller has converted torch's error about a data-dependent size to a StepContractError; a trace with
        # symbolic sizes may still succeed.
        if isinstance(error, PurestepError) and not recorder.is_sized:
            raise
        return itself
    again = recorder.replay(outputs)
    if recorder.has_others:
        return itself
    return Record(again, inputs, None if recorder.unkeyable else lines)


def _like(leaf: Tensor) -> Tensor:
    """A tensor of the same layout in the active fake mode."""
    shape, strides, start = leaf.shape, leaf.stride(), leaf.storage_offset()
    if not start:
        return torch.empty_strided(shape, strides, dtype=leaf.dtype, device=leaf.device)
    whole = torch.empty(start + tensor_layout.extent(leaf), dtype=leaf.dtype, device=leaf.device)
    return whole.as_strided(shape, strides, start)


def _in_modes() -> bool:
    """True if the caller has an active function or dispatch mode, which a replay would call too."""
    from torch.utils._device import DeviceContext

    functions: Any = importlib.import_module("torch.overrides")
    operators: Any = importlib.import_module("torch.utils._python_dispatch")
    # A default device does not matter: recorded operations name their devices.
    others = [mode for mode in functions._get_current_function_mode_stack() if not isinstance(mode, DeviceContext)]
    return bool(others or operators._get_current_dispatch_mode_stack())


@contextmanager
def _as_traced() -> Generator[None]:
    """The conditions of a trace by `make_fx` that Python code can detect: a function mode (torch's layers then skip
    fused kernels), the tracing flag of torch.fx, and autocast without its cache."""
    flags: Any = importlib.import_module("torch.fx._symbolic_trace")
    owner, flag = flags, "_is_fx_tracing_flag"
    if hasattr(flags, "_is_fx_tracing_tls"):  # torch 2.14
        owner, flag = flags._is_fx_tracing_tls, "flag"
    cached, traced = torch.is_autocast_cache_enabled(), getattr(owner, flag, False)
    torch.set_autocast_cache_enabled(False)
    setattr(owner, flag, True)
    try:
        with _Functions():
            yield
    finally:
        torch.set_autocast_cache_enabled(cached)
        setattr(owner, flag, traced)


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with a check for fake tensors of an earlier capture."""

    def call(*inputs: Tensor) -> Any:
        with _Recorder(list(inputs), watching=True):
            return function(*inputs)

    return call


class _Place(NamedTuple):
    """Placeholder of a tensor, numbered in order of occurrence."""

    number: int


class _Operation(NamedTuple):
    """A recorded operation with placeholders for tensors."""

    operator: Any
    args: Any
    kwargs: Any
    made: Any
    strides: tuple[int, ...] | None
    """of the first argument, if the result depends on them"""


class _Recorder(Mode):
    def __init__(self, inputs: list[Tensor], *, watching: bool = False) -> None:
        super().__init__()
        self._watching = watching  # only checks; the record is not used
        self.lines: list[str] = []
        self.unkeyable = ""
        self.is_sized = False  # a size depends on values
        self.has_others = False  # a captured tensor is of a subclass
        self._operations: list[_Operation] = []
        self._tensors: list[Tensor] = []  # kept alive, so that ids stay unique
        self._places: dict[int, _Place] = {}
        for leaf in inputs:
            self._place(leaf)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if tracing.has_parts(types):
            return NotImplemented
        kwargs = kwargs or {}
        if not self._watching and not isinstance(func, OpOverload):  # a higher-order operator
            raise Unkeyable(str(func))
        if func.namespace == "prim":  # a query such as the device, not a part of a graph
            return func(*args, **kwargs)
        if not known(func):
            self.unkeyable = str(func)
        asked = f"{self.text(args)} {self.text(kwargs)}"
        taken = self._to_places(args), self._to_places(kwargs)
        try:
            made = func(*args, **kwargs)
        except fake_tensor.DynamicOutputShapeException:
            self.is_sized = True
            raise
        self._place(made)
        strides = args[0].stride() if str(func) in _BY_LAYOUT else None
        self._operations.append(_Operation(func, *taken, self._to_places(made), strides))
        self.lines.append(f"{func} {asked} {self._text(made, _layout)}")
        return made

    def replay(self, outputs: Any) -> Callable[..., Any]:
        """Return a function of the inputs that repeats the operations."""
        operations, wanted = self._operations, self._to_places(outputs)

        def call(*inputs: Tensor) -> Any:
            found = dict(zip(map(_Place, range(len(inputs))), inputs, strict=True))
            with autocast_disabled():  # the record contains its casts
                for function, args, kwargs, places, strides in operations:
                    if strides is not None:
                        _restore_strides(args[0], strides, found)
                    _bind(places, function(*_substitute(args, found), **_substitute(kwargs, found)), found)
            return _substitute(wanted, found)

        return call

    def text(self, value: Any) -> str:
        """A value as text, with numbers for tensors."""
        return self._text(value, self._number)

    def _number(self, leaf: Tensor) -> str:
        place = self._places.get(id(leaf))
        if place is not None:
            return f"%{place.number}"
        _check_real(leaf)
        raise Unkeyable(f"a tensor {list(leaf.shape)} from elsewhere")

    def _text(self, value: Any, tensor: Callable[[Tensor], str]) -> str:
        try:
            return plain(value, tensor)
        except Unkeyable as error:  # do not raise: the function might catch it
            self.unkeyable = self.unkeyable or str(error)
            return ""

    def _place(self, made: Any) -> None:
        if isinstance(made, list | tuple):
            for item in made:
                self._place(item)
        elif isinstance(made, Tensor) and id(made) not in self._places:
            self._places[id(made)] = _Place(len(self._tensors))
            self._tensors.append(made)

    def _to_places(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self.has_others |= id(value) not in self._places and type(value) not in _MEMORY
            return self._places.get(id(value), value)
        if isinstance(value, list | tuple):
            return [self._to_places(item) for item in value]
        return {key: self._to_places(item) for key, item in value.items()} if isinstance(value, dict) else value


_BY_LAYOUT = (
    *("aten.view.default", "aten._unsafe_view.default", "aten.view.dtype"),
    *("aten.as_strided.default", "aten.as_strided_scatter.default"),
)
"""Operators whose result depends on the strides of their input."""


def _restore_strides(place: Any, strides: tuple[int, ...], found: dict[_Place, Any]) -> None:
    """Give a tensor its recorded strides. A trace decomposes operations, and the result may have other strides, such
    as channels last in a batch of one."""
    given = found.get(place)
    if given is None:
        return
    lies = zip(given.shape, given.stride(), strides, strict=True)
    if all(size < 2 or found_at == recorded for size, found_at, recorded in lies):
        return
    found[place] = given.new_empty_strided(given.shape, strides).copy_(given)


def _substitute(value: Any, found: dict[_Place, Any]) -> Any:
    if type(value) is _Place:
        return found[value]
    if type(value) is list:
        return [_substitute(item, found) for item in value]
    return {key: _substitute(item, found) for key, item in value.items()} if type(value) is dict else value


def _bind(places: Any, made: Any, found: dict[_Place, Any]) -> None:
    if type(places) is _Place:
        found[places] = made
    elif type(places) is list:
        for place, item in zip(places, made, strict=True):
            _bind(place, item, found)


def _check_real(leaf: Tensor) -> None:
    if isinstance(leaf, FakeTensor):
        raise StepContractError(
            f"a tensor {list(leaf.shape)} without values, which the step stored during an earlier capture",
            where="step",
            hint="create tensors that a module or a cache stores in __init__, or compute them in every call",
        )


def known(target: Any) -> bool:
    """True if this is an operator of torch or purestep."""
    return target is operator.getitem or (isinstance(target, OpOverload) and target.namespace in _NAMESPACES)


def _reject(leaf: Tensor) -> str:
    raise Unkeyable(f"a {type(leaf).__name__}")


def plain(value: Any, tensor: Callable[[Tensor], str] = _reject) -> str:
    """Convert a plain value to text that distinguishes 1, 1.0 and True.

    Args:
        value: a number, string, dtype or the like, or a list or dict of such.
        tensor: converts a tensor.

    Raises:
        Unkeyable: the value is of another type.
    """
    if type(value) in _PLAIN:
        return repr(value)
    if isinstance(value, Tensor):
        return tensor(value)
    if isinstance(value, list | tuple):
        return f"({', '.join(plain(item, tensor) for item in value)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{plain(key)}: {plain(item, tensor)}' for key, item in value.items())}}}"
    raise Unkeyable(f"a {type(value).__name__}")


def _input(leaf: Tensor) -> str:
    plain_ = type(leaf) in _MEMORY and leaf.layout is torch.strided
    if not plain_ or leaf.is_conj() or leaf.is_neg():
        raise Unkeyable(f"a {type(leaf).__name__} that is not memory alone")
    return _layout(leaf)


def _layout(value: Tensor) -> str:
    """Dtype, shape, strides and offset. Not the device, which is that of the inputs or an argument."""
    if not all(type(size) is int for size in (*value.shape, *value.stride(), value.storage_offset())):
        raise Unkeyable("a size that is not known")
    return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.storage_offset()}"
