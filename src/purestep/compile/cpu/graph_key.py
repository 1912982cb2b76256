"""The operations of a function as text: every operator below autograd, in order, on tensors without memory.

Buys: the text names the graph, so that `code_cache` finds the code of an earlier run before anything is compiled. The
function's Python runs once, here, and the graph is made of the recorded operations: Python that counts its calls, or
draws numbers, cannot make another graph than the one that is named.

Private names: ``torch._subclasses`` (fake tensors), ``torch._ops.OpOverload``, the stacks of modes in
``torch.overrides`` and ``torch.utils._python_dispatch``, the tracing flag of ``torch.fx``.

Without: the function is traced again by `make_fx`, and its code is not kept.
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

from ... import tensor_layout
from ...errors import PurestepError, StepContractError
from ..capture import autocast_disabled
from ..control_flow import Mode

_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)

_MEMORY = (Tensor, torch.nn.Parameter)
"""Tensors that are their memory and nothing else."""

_NAMESPACES = ("aten", "prims", "purestep")
"""Operators whose code changes with torch and with purestep, and with nothing else."""


class Untold(Exception):
    """Text does not tell this apart from something else."""


class Record(NamedTuple):
    """What a function does with tensors like these."""

    function: Callable[..., Any]
    """does it again: flat in, list of tensors out"""
    inputs: Sequence[Tensor]
    lines: list[str] | None
    """the same as text; None where text does not tell it"""


def record(function: Callable[..., Any], inputs: Sequence[Tensor]) -> Record:
    """Run a function once on tensors without memory.

    What cannot be written down (sizes that are values of tensors, operators that take functions, tensors that are more
    than memory, what a mode of the caller's does to operators) is left to the function itself, which runs again where
    its graph is made.

    Args:
        function: flat in, list of tensors out.
        inputs: tensors that are only looked at.

    Raises:
        StepContractError: the function uses a tensor that an earlier run on tensors without memory has left behind.
    """
    itself = Record(_watched(function), inputs, None)
    try:
        lines = [_input(leaf) for leaf in inputs]
    except Untold:
        return itself
    if _in_modes():
        return itself
    # No ShapeEnv: sizes that are values of tensors are refused.
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        fakes = [_like(leaf).requires_grad_(leaf.requires_grad) for leaf in inputs]
    recorder = _Recorder(fakes)
    try:
        with mode, _as_traced(), recorder:
            outputs = function(*fakes)
        lines += [*recorder.lines, f"output {recorder.text(outputs)}"]
    except Exception as error:  # the function's own errors come again
        # Of an operator whose result has as many numbers as it finds, torch's refusal has been made a
        # StepContractError by the caller; where sizes can be symbols, a graph is made of it all the same.
        if isinstance(error, PurestepError) and not recorder.is_sized:
            raise
        return itself
    again = recorder.replay(outputs)
    if recorder.has_others:
        return itself
    return Record(again, inputs, None if recorder.untold else lines)


def _like(leaf: Tensor) -> Tensor:
    """A tensor of the same layout, in the fake mode that is on."""
    shape, strides, start = leaf.shape, leaf.stride(), leaf.storage_offset()
    if not start:
        return torch.empty_strided(shape, strides, dtype=leaf.dtype, device=leaf.device)
    whole = torch.empty(start + tensor_layout.extent(leaf), dtype=leaf.dtype, device=leaf.device)
    return whole.as_strided(shape, strides, start)


def _in_modes() -> bool:
    """Whether the caller has put something between functions and operators, which would see a replay too."""
    from torch.utils._device import DeviceContext

    functions: Any = importlib.import_module("torch.overrides")
    operators: Any = importlib.import_module("torch.utils._python_dispatch")
    # A default device, which a replay names anyway.
    others = [mode for mode in functions._get_current_function_mode_stack() if not isinstance(mode, DeviceContext)]
    return bool(others or operators._get_current_dispatch_mode_stack())


@contextmanager
def _as_traced() -> Generator[None]:
    """What Python can see of a trace by `make_fx`: a mode for functions, for which torch's layers leave out their
    kernels for whole layers; the flag of torch.fx; and casts under autocast that are made anew each time."""
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


def _watched(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function itself, which must not use what an earlier capture has left behind either."""

    def call(*inputs: Tensor) -> Any:
        with _Recorder(list(inputs), watching=True):
            return function(*inputs)

    return call


class _Place(NamedTuple):
    """Stands for a tensor, by the order that they came in."""

    number: int


class _Operation(NamedTuple):
    """One of those that a function consists of, places for tensors in it."""

    operator: Any
    args: Any
    kwargs: Any
    made: Any
    strides: tuple[int, ...] | None
    """of the first argument, where the result depends on how that lies in memory"""


class _Recorder(Mode):
    def __init__(self, inputs: list[Tensor], *, watching: bool = False) -> None:
        super().__init__()
        self._watching = watching  # what is recorded is not read
        self.lines: list[str] = []
        self.untold = ""
        self.is_sized = False  # sizes are values of tensors
        self.has_others = False  # tensors of a class of their own, made on the way
        self._operations: list[_Operation] = []
        self._tensors: list[Tensor] = []  # kept: another tensor must not get the id of one that is gone
        self._places: dict[int, _Place] = {}
        for leaf in inputs:
            self._place(leaf)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._watching and not isinstance(func, OpOverload):  # takes functions, which have other tensors in them
            raise Untold(str(func))
        if func.namespace == "prim":  # on which device a tensor is: nothing that a graph holds
            return func(*args, **kwargs)
        if not known(func):
            self.untold = str(func)
        asked = f"{self.text(args)} {self.text(kwargs)}"
        taken = self._put(args), self._put(kwargs)
        try:
            made = func(*args, **kwargs)
        except fake_tensor.DynamicOutputShapeException:
            self.is_sized = True
            raise
        self._place(made)
        strides = args[0].stride() if str(func) in _BY_LAYOUT else None
        self._operations.append(_Operation(func, *taken, self._put(made), strides))
        self.lines.append(f"{func} {asked} {self._told(made, _layout)}")
        return made

    def replay(self, outputs: Any) -> Callable[..., Any]:
        """The same operations on other tensors, as a function of the inputs."""
        operations, wanted = self._operations, self._put(outputs)

        def call(*inputs: Tensor) -> Any:
            found = dict(zip(map(_Place, range(len(inputs))), inputs, strict=True))
            with autocast_disabled():  # its casts are among the operations
                for function, args, kwargs, places, strides in operations:
                    if strides is not None:
                        _lay(args[0], strides, found)
                    _found(places, function(*_filled(args, found), **_filled(kwargs, found)), found)
            return _filled(wanted, found)

        return call

    def text(self, value: Any) -> str:
        """Tensors by the order that they came in."""
        return self._told(value, self._number)

    def _number(self, leaf: Tensor) -> str:
        place = self._places.get(id(leaf))
        if place is not None:
            return f"%{place.number}"
        _check_real(leaf)
        raise Untold(f"a tensor {list(leaf.shape)} from elsewhere")

    def _told(self, value: Any, tensor: Callable[[Tensor], str]) -> str:
        try:
            return plain(value, tensor)
        except Untold as error:  # the function goes on: it may have a way of its own with errors
            self.untold = self.untold or str(error)
            return ""

    def _place(self, made: Any) -> None:
        if isinstance(made, list | tuple):
            for item in made:
                self._place(item)
        elif isinstance(made, Tensor) and id(made) not in self._places:
            self._places[id(made)] = _Place(len(self._tensors))
            self._tensors.append(made)

    def _put(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            self.has_others |= id(value) not in self._places and type(value) not in _MEMORY
            return self._places.get(id(value), value)
        if isinstance(value, list | tuple):
            return [self._put(item) for item in value]
        return {key: self._put(item) for key, item in value.items()} if isinstance(value, dict) else value


_BY_LAYOUT = (
    *("aten.view.default", "aten._unsafe_view.default", "aten.view.dtype"),
    *("aten.as_strided.default", "aten.as_strided_scatter.default"),
)
"""What means another thing, or fails, where the numbers of a tensor lie in another order."""


def _lay(place: Any, strides: tuple[int, ...], found: dict[_Place, Any]) -> None:
    """Have a tensor lie as it did when it was recorded. A trace takes operations apart, and what it makes of one may
    lie otherwise: channels last where a batch of one may be either."""
    given = found.get(place)
    if given is None:
        return
    lies = zip(given.shape, given.stride(), strides, strict=True)
    if all(size < 2 or found_at == recorded for size, found_at, recorded in lies):
        return
    found[place] = given.new_empty_strided(given.shape, strides).copy_(given)


def _filled(value: Any, found: dict[_Place, Any]) -> Any:
    if type(value) is _Place:
        return found[value]
    if type(value) is list:
        return [_filled(item, found) for item in value]
    return {key: _filled(item, found) for key, item in value.items()} if type(value) is dict else value


def _found(places: Any, made: Any, found: dict[_Place, Any]) -> None:
    if type(places) is _Place:
        found[places] = made
    elif type(places) is list:
        for place, item in zip(places, made, strict=True):
            _found(place, item, found)


def _check_real(leaf: Tensor) -> None:
    if isinstance(leaf, FakeTensor):
        raise StepContractError(
            f"a tensor {list(leaf.shape)} that an earlier capture of the step has left behind, and that has no values",
            where="step",
            hint="what a module or a cache keeps has to be made before, as in __init__, or in every call",
        )


def known(target: Any) -> bool:
    """Whether this is an operator of torch's or of purestep's own."""
    return target is operator.getitem or (isinstance(target, OpOverload) and target.namespace in _NAMESPACES)


def _refused(leaf: Tensor) -> str:
    raise Untold(f"a {type(leaf).__name__}")


def plain(value: Any, tensor: Callable[[Tensor], str] = _refused) -> str:
    """A number, a word, a dtype, or several, as text that tells 1, 1.0 and True apart.

    Args:
        value: also lists and dicts of such.
        tensor: what a tensor is called.

    Raises:
        Untold: anything else.
    """
    if type(value) in _PLAIN:
        return repr(value)
    if isinstance(value, Tensor):
        return tensor(value)
    if isinstance(value, list | tuple):
        return f"({', '.join(plain(item, tensor) for item in value)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{plain(key)}: {plain(item, tensor)}' for key, item in value.items())}}}"
    raise Untold(f"a {type(value).__name__}")


def _input(leaf: Tensor) -> str:
    plain_ = type(leaf) in _MEMORY and leaf.layout is torch.strided
    if not plain_ or leaf.is_conj() or leaf.is_neg():
        raise Untold(f"a {type(leaf).__name__} that is not memory alone")
    return _layout(leaf)


def _layout(value: Tensor) -> str:
    """Dtype, shape, and where its numbers lie. Not the device, which is that of the inputs or named."""
    if not all(type(size) is int for size in (*value.shape, *value.stride(), value.storage_offset())):
        raise Untold("a size that is not known")
    return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.storage_offset()}"
