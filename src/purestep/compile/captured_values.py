"""Values that a step reads besides its arguments: numbers, strings and tensors, constants of a traced graph.

They are collected from the step's functions without running them: closure cells, defaults, globals that the code names,
attributes of objects, classes and modules, items of dicts and lists. Library code is not read. Each call compares the
values with the previous ones by identity, at 20 to 30 ns for each.
"""

from __future__ import annotations

import dis
import functools
import importlib
import logging
import re
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import numpy as np
from torch import Tensor, nn

from ..errors import StepContractError
from ..model import Template

_log = logging.getLogger("purestep")
_SCALARS = (bool, int, float, complex, str, bytes, type(None))
_LIBRARIES = (
    *{sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")},
    __file__.rpartition("compile")[0],
)
_MAX_PLACES = 300  # values to compare: less than 10 us a call
_MAX_ITEMS = 32  # items of one dict or list
_MAX_CHANGES = 16  # changes of values, each of which compiles a graph, before an error
_CURE = (
    "pass a number that changes as a tensor: a schedule in ps.program(values={...}), read as model.values[...]; "
    "or the step's context, a buffer of the state, the batch, optim.inject"
)


class _Place(NamedTuple):
    name: str
    value: Any


class _Watch:
    """The places of captured values, by kind: subscripts and attributes are compared without a function call."""

    def __init__(self) -> None:
        self._items: list[tuple[Any, Any, Any]] = []  # mapping or list, key, value
        self._attributes: list[tuple[Any, str, Any]] = []
        self._empty: list[Any] = []  # cells
        self._seen: set[tuple[int, Any]] = set()

    def item(self, holder: Any, key: Any, value: Any) -> None:
        """Watch ``holder[key] is value``."""
        if (id(holder), key) not in self._seen:
            self._seen.add((id(holder), key))
            self._items.append((holder, key, value))

    def attribute(self, holder: Any, name: str, value: Any) -> None:
        """Watch ``getattr(holder, name) is value``."""
        if (id(holder), name) not in self._seen:
            self._seen.add((id(holder), name))
            self._attributes.append((holder, name, value))

    def cell(self, cell: Any) -> None:
        """Watch the contents of a cell, or that it is empty."""
        try:
            self.attribute(cell, "cell_contents", cell.cell_contents)
        except ValueError:
            self._empty.append(cell)

    def is_same(self) -> bool:
        """True if every place still holds the same object."""
        try:
            for holder, key, value in self._items:
                if holder[key] is not value:
                    return False
            for holder, name, value in self._attributes:
                if getattr(holder, name) is not value:
                    return False
        except (LookupError, AttributeError, ValueError):  # gone
            return False
        return all(_cell(cell) is None for cell in self._empty)


class TorchSettings:
    """Settings of torch that a graph depends on: autocast, default dtype, determinism, matmul precision. Dynamo's guard
    checks in 0.2 us whether they have changed.
    """

    _FREE = re.compile(r'"(grad_mode|num_threads|torch_function\w*)":\w+')

    def __init__(self) -> None:
        self._last: tuple[Callable[[], bool], str] = (lambda: False), ""

    def __call__(self) -> str:
        """The settings as text; the same object until one changes."""
        same, text = self._last  # one read: another thread may have other settings
        if same():
            return text
        guard: Any = importlib.import_module("torch._C._dynamo.guards").GlobalStateGuard()
        text = self._FREE.sub("", guard.__getstate__())
        self._last = guard.check, text
        return text


class CapturedValues:
    """The captured values of a step as text, a part of the key of a graph."""

    def __init__(self, step: Callable[..., Any]) -> None:
        self._step = step
        self._places: list[_Place] | None = None
        self._watch = _Watch()
        self._text = ""
        self._changes = 0
        self._ignored: set[str] = set()  # names that the step itself changes while it is traced

    def __call__(self) -> str:
        """The text; the same object until a value changes.

        Raises:
            StepContractError: values changed too often, and each change would compile a graph.
        """
        if self._places is not None and self._watch.is_same():
            return self._text
        return self._collect()

    def _collect(self) -> str:
        before = self._places
        self._places, self._watch = _places(self._step)
        found = {place.name: _fingerprint(place.value) for place in self._places if place.name not in self._ignored}
        text = repr({name: value for name, value in found.items() if value})
        if before is not None and text != self._text:
            self._report_change(before)
        self._text = text if text != self._text else self._text
        return self._text

    def mark_compiled(self) -> None:
        """Ignore the changes that a trace itself has made."""
        was = {place.name: _fingerprint(place.value) for place in self._places or ()}
        self._places, self._watch = _places(self._step)
        now = {place.name: _fingerprint(place.value) for place in self._places}
        self._ignored |= {name for name in was.keys() | now.keys() if was.get(name) != now.get(name)}

    def _report_change(self, before: list[_Place]) -> None:
        self._changes += 1
        was = {place.name: place.value for place in before}
        places = [place for place in self._places or () if place.name not in self._ignored]
        new = [place for place in places if _fingerprint(was.get(place.name)) != _fingerprint(place.value)]
        name = new[0].name if new else "a value"
        if self._changes > _MAX_CHANGES:
            raise StepContractError(
                f"has changed {self._changes} times; each value would compile a graph",
                where=name,
                hint=_CURE,
            )
        if self._changes == 1 and new:
            change = f"was {_short(was.get(name))}, is {_short(new[0].value)}"
            _log.warning(
                "%s %s: a graph holds it as a constant, so the step is recompiled (cure: %s)", name, change, _CURE
            )


def _short(value: Any) -> str:
    return repr(value) if isinstance(value, _SCALARS) else f"another {type(value).__name__}"


def _fingerprint(value: Any) -> str:
    """The value of a scalar, the id of a tensor or array; empty for containers and other objects."""
    if isinstance(value, _SCALARS):
        return f"{type(value).__name__} {value!r}"
    return str(id(value)) if isinstance(value, Tensor | np.ndarray) else ""


def _places(step: Callable[..., Any]) -> tuple[list[_Place], _Watch]:
    walk = _Walk()
    walk.visit(step, "")
    return walk.places, walk.watch


class _Walk:
    def __init__(self) -> None:
        self.places: list[_Place] = []
        self.watch = _Watch()
        self._seen: set[Any] = set()
        self._kept: list[Any] = []  # keeps objects alive: an id must stay unique

    def visit(self, value: Any, path: str) -> None:
        """Collect everything that a value refers to."""
        if isinstance(value, (*_SCALARS, Tensor, np.ndarray, np.generic)) or id(value) in self._seen:
            return
        if len(self._seen) > 20 * _MAX_PLACES or len(self.places) > _MAX_PLACES:
            return
        self._seen.add(id(value))
        self._kept.append(value)
        if isinstance(value, types.FunctionType):
            self._function(value, path)
        elif isinstance(value, types.MethodType):
            self.visit(value.__func__, path)
            self._object(value.__self__, _names(value.__func__), path)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self.visit(part, path)
        elif isinstance(value, Template):
            for kind in dict.fromkeys(type(module) for module in value.train.modules()):
                self._class(kind, path)
        elif isinstance(value, dict):
            self._items(cast(dict[Any, Any], value), path)
        elif isinstance(value, list | tuple):
            for index, item in enumerate(cast(list[Any], value)[:_MAX_ITEMS]):
                inner = f"{path}[{index}]"
                if isinstance(value, list):
                    self._item(inner, value, index, item)
                self.visit(item, inner)
        elif isinstance(value, type):
            self._class(value, path)
        elif not isinstance(value, types.ModuleType) and callable(value):
            self._object(value, frozenset(), path)

    def _function(self, function: types.FunctionType, path: str) -> None:
        own = not _is_library(function.__code__.co_filename)
        here = function.__qualname__
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            value = _cell(cell)
            if own and self._place(f"{here}: {name}", value):
                self.watch.cell(cell)
            self._within(value, _names(function) if own else frozenset(), f"{here}: {name}")
        if not own:
            return
        names, space = _names(function), function.__globals__
        self.watch.attribute(function, "__defaults__", function.__defaults__)
        for index, value in enumerate(function.__defaults__ or ()):
            self._place(f"{here}: default {index}", value)
            self._within(value, names, f"{here}: default {index}")
        keywords = function.__kwdefaults__ or {}
        for name, value in keywords.items():
            self._item(f"{here}: {name}", keywords, name, value)
        for name in sorted(_code_globals(function.__code__) & space.keys()):
            self._item(name, space, name, space[name])
            self._within(space[name], names, name)

    def _within(self, value: Any, names: frozenset[str], path: str) -> None:
        """Visit a value that code with these names uses."""
        if isinstance(
            value, types.FunctionType | types.MethodType | functools.partial | dict | list | tuple | Template
        ):
            self.visit(value, path)
        elif not isinstance(value, (*_SCALARS, Tensor, np.ndarray)):
            self._object(value, names, path)

    def _object(self, value: Any, names: frozenset[str], path: str) -> None:
        """Collect attributes with these names from an object, class or module, and visit its methods."""
        if isinstance(value, nn.Module):
            names |= _settings(value)
            for name, child in list(value.named_modules())[1:_MAX_ITEMS]:
                self._attributes(child, _settings(child), f"{path}.{name}")
            self._attributes(value, names, path)
        if isinstance(value, types.ModuleType):
            if _is_library(getattr(value, "__file__", None) or ""):
                return
        elif _is_library(_file(value if isinstance(value, type) else type(value))) and not _is_plain(value):
            return
        kind = value if isinstance(value, type) else type(value)
        if not isinstance(value, types.ModuleType):
            for method in _methods(kind):
                names |= _names(method)
            if not isinstance(value, type):
                self._class(kind, kind.__name__)
        if isinstance(value, type):
            self._class(value, path, names)
            return
        self._attributes(value, names, path)

    def _attributes(self, value: Any, names: frozenset[str], path: str) -> None:
        space: Any = getattr(value, "__dict__", None)
        if not isinstance(space, dict) or (id(value), names) in self._seen:
            return
        self._seen.add((id(value), names))
        for name in sorted(names & space.keys()):
            if name == "training" and isinstance(value, nn.Module):
                continue
            self._item(f"{path}.{name}", space, name, space[name])
            self._within(space[name], names, f"{path}.{name}")

    def _class(self, kind: type, path: str, names: frozenset[str] = frozenset()) -> None:
        own = [part for part in kind.__mro__ if not _is_library(_file(part))]
        methods = [method for part in own for method in _methods(part)]
        names = names.union(*map(_names, methods))
        for part in own:
            for name in sorted(names & vars(part).keys()):
                if isinstance(value := vars(part)[name], (*_SCALARS, Tensor, list, dict)):
                    self._item(f"{part.__name__}.{name}", vars(part), name, value)
                    self.visit(value, f"{part.__name__}.{name}")
        for method in methods:
            self.visit(method, path)

    def _items(self, space: dict[Any, Any], path: str) -> None:
        for key in list(space)[:_MAX_ITEMS]:
            self._item(f"{path}[{key!r}]", space, key, space[key])
            self.visit(space[key], f"{path}[{key!r}]")

    def _item(self, name: str, holder: Any, key: Any, value: Any) -> None:
        if self._place(name, value):
            self.watch.item(holder, key, value)

    def _place(self, name: str, value: Any) -> bool:
        """Record a value unless it is a module or builtin, and say whether it was recorded."""
        if len(self.places) >= _MAX_PLACES or isinstance(value, types.ModuleType | types.BuiltinFunctionType):
            return False
        self.places.append(_Place(name, value))
        return True


def _settings(module: nn.Module) -> frozenset[str]:
    """Names of a module's scalar attributes, such as the label smoothing of a criterion."""
    names = {name for name, value in vars(module).items() if isinstance(value, _SCALARS)}
    return frozenset(name for name in names - {"training"} if not name.startswith("_"))


def _is_plain(value: Any) -> bool:
    return type(value).__name__ in ("Namespace", "SimpleNamespace")


def _is_library(file: str) -> bool:
    # Packages are also in a user's site-packages, and in those of the Python that an environment is built on.
    return (
        not file or file.startswith(("<frozen", *_LIBRARIES)) or "/site-packages/" in file or "/dist-packages/" in file
    )


def _file(kind: type) -> str:
    """The file of a class, from its methods or else from its module."""
    method = next(_methods(kind), None)
    if method is not None:
        return method.__code__.co_filename
    module = sys.modules.get(kind.__module__)
    return getattr(module, "__file__", None) or ("" if kind.__module__ == "builtins" else kind.__module__)


def _methods(kind: type) -> Iterator[types.FunctionType]:
    for value in vars(kind).values():
        found = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
        if isinstance(found, types.FunctionType):
            yield found


def _names(function: Any) -> frozenset[str]:
    code = getattr(function, "__code__", None)
    return frozenset() if code is None else _code_names(code)


@functools.lru_cache(maxsize=4096)
def _code_names(code: types.CodeType) -> frozenset[str]:
    inner = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return frozenset(code.co_names).union(*map(_code_names, inner))


@functools.lru_cache(maxsize=4096)
def _code_globals(code: types.CodeType) -> frozenset[str]:
    """Names that code reads as globals, without attributes of the same names."""
    own = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    inner = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    return frozenset(own).union(*map(_code_globals, inner))


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None
