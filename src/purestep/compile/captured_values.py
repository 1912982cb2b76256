"""Values that a step reads besides its arguments, where a change recompiles it.

These are the names that the code of the objective, of a user-defined step and of schedules reads (closure, globals,
defaults), and what lies one level below: items of dicts and lists, attributes of objects that the code names, and of
modules the tensors, the children and the numbers. Whatever lies deeper is a constant of the graph. Each call compares
these places with what they held before by identity, at 20 to 30 ns for each.
"""

from __future__ import annotations

import dis
import functools
import logging
import types
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
from torch import Tensor, nn

from ..model import Template
from ..types import TrainState
from . import capture

_log = logging.getLogger("purestep")

_SCALARS = (bool, int, float, complex, str, bytes, type(None), np.generic)
_CLOSED = (*_SCALARS, Tensor, np.ndarray, Template, TrainState)
"""Values that are compared as a whole."""
_MAX_ITEMS = 256  # of one dict or list; of a longer one only the identity and the length are compared
_MAX_CHANGES = 16  # changes of numbers, each of which compiles a graph, before an error
_OWN = __file__.rpartition("compile")[0]
_NOTHING = object()
_NUMBER_CURE = (
    "pass a number that changes as a tensor: a schedule in ps.program(values={...}), read as model.values[...]; "
    "or the step's context, a buffer of the state, the batch, optim.inject"
)
_STORED_CURE = "return it as a metric or in Loss(..., outputs={...}), or hold it in a buffer of the model"
_OBJECT_CURE = "write into the tensors that are there, which every call reads: load_state_dict(...), tensor.copy_(...)"


class CapturedValues:
    """The captured values of a step as text, a part of the key of a graph.

    ``objects`` counts how often another object was assigned.
    """

    def __init__(self, step: Callable[..., Any]) -> None:
        self.objects = 0
        self._step = step
        self._places: _Places | None = None
        self._text = ""
        self._changes = 0
        self._ignored: set[str] = set()  # names that the step itself changes while it is traced

    def __call__(self) -> str:
        """The text; the same object until a value changes.

        Raises:
            Uncaptured: numbers changed too often, and each change would compile a graph.
        """
        if self._places is None or not self._places.is_same():
            places = _Places(self._step)
            if (text := self._text_of(places)) != self._text and self._places is not None:
                self._report(self._places.values, places.values)
            self._places, self._text = places, text  # after an error the old ones stay, and the next call raises too
        return self._text

    def mark_compiled(self) -> None:
        """Ignore the changes that a trace itself has made.

        Raises:
            Uncaptured: the step stores a tensor, of which every call would read the first value; it is taken out again.
        """
        from torch._subclasses.fake_tensor import FakeTensor

        before, places = self._places, _Places(self._step)
        if before is not None:
            was, now = before.values, places.values
            stored = [name for name in now if isinstance(now[name], FakeTensor) and was.get(name) is not now[name]]
            if stored:
                before.restore()
                what = "the step stores a tensor here, but Python runs once for a graph, and no later call writes it"
                raise capture.Uncaptured(what, where=stored[0], hint=_STORED_CURE)
            changed = _changed(was, now) - self._ignored
            self._ignored |= changed
            counted = [name for name in sorted(changed) if _is_count(was.get(name)) and _is_count(now.get(name))]
            if counted:
                _log.warning(
                    "%s: the step itself changes this number (%s -> %s), but Python runs once for a graph, which holds "
                    "one value of it (cure: %s)",
                    *(counted[0], was[counted[0]], now[counted[0]], _NUMBER_CURE),
                )
        self._places, self._text = places, self._text_of(places)

    def _text_of(self, places: _Places) -> str:
        known = places.values.items()
        return repr({name: _fingerprint(value) for name, value in known if name not in self._ignored})

    def _report(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        name = min(_changed(before, after) - self._ignored)
        was, now = before.get(name, _NOTHING), after.get(name, _NOTHING)
        is_number = isinstance(was, _SCALARS) and isinstance(now, _SCALARS)
        if is_number and self._changes == _MAX_CHANGES:
            what = f"the value has changed {_MAX_CHANGES + 1} times; each value would compile a graph"
            raise capture.Uncaptured(what, where=name, hint=_NUMBER_CURE)
        self.objects += not is_number
        self._changes += is_number
        if self._changes + self.objects == 1:
            change = f"was {_short(was)}, is {_short(now)}"
            cure = _NUMBER_CURE if is_number else _OBJECT_CURE
            _log.warning("%s %s: a graph holds it, so the step is recompiled (cure: %s)", name, change, cure)


def _changed(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    def key(values: dict[str, Any], name: str) -> str:
        return _fingerprint(values.get(name, _NOTHING))

    return {name for name in before.keys() | after.keys() if key(before, name) != key(after, name)}


def _fingerprint(value: Any) -> str:
    return f"{type(value).__name__} {value!r}" if isinstance(value, _SCALARS) else str(id(value))


def _is_count(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: Any) -> str:
    if value is _NOTHING:
        return "not there"
    return repr(value) if isinstance(value, _SCALARS) else f"another {type(value).__name__}"


class _Places:
    """The values that a step reads: ``values`` by name, and where each is read again."""

    def __init__(self, step: Any) -> None:
        self.values: dict[str, Any] = {}  # keeps the objects alive, so that an id stays unique
        self._items: list[tuple[Any, Any, Any]] = []  # mapping or list, key, value
        self._attributes: list[tuple[Any, str, Any]] = []
        self._lengths: list[tuple[Any, int]] = []
        self._seen: dict[int, Any] = {}  # keeps the objects alive, so that an id stays unique
        self._modules: set[int] = set()
        self._find(step)

    def is_same(self) -> bool:
        """True if every place still holds the same object."""
        try:
            for holder, key, value in self._items:
                if holder[key] is not value:
                    return False
        except LookupError:  # gone
            return False
        for holder, name, value in self._attributes:
            if _attribute(holder, name) is not value:
                return False
        return all(len(holder) == length for holder, length in self._lengths)

    def restore(self) -> None:
        """Put the values back to their places."""
        for holder, key, value in self._items:
            if not isinstance(holder, tuple):
                holder[key] = value
        for holder, name, value in self._attributes:
            if value is not _NOTHING and _attribute(holder, name) is not value:
                setattr(holder, name, value)

    def _find(self, value: Any) -> None:
        """Find the user's functions and callable objects behind a step, which functions of purestep hold."""
        if isinstance(value, (*_CLOSED, type)) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if isinstance(value, functools.partial):
            self._find((value.func, *value.args, *value.keywords.values()))
        elif isinstance(value, types.MethodType):
            self._function(value.__func__, value.__self__)
        elif isinstance(value, types.FunctionType):
            if _is_own(value):
                self._find([_attribute(cell, "cell_contents") for cell in value.__closure__ or ()])
            else:
                self._function(value)
        elif isinstance(value, tuple | list | dict):
            for item in list(cast(dict[Any, Any], value).values()) if isinstance(value, dict) else cast(Any, value):
                self._find(item)
        elif _is_own(value):
            self._find(getattr(value, "eager", None))  # of a compiled or donated step
        elif callable(value):
            kind: Any = type(value)
            self._function(kind.forward if isinstance(value, nn.Module) else kind.__call__, value)

    def _function(self, function: Any, owner: Any = None) -> None:
        """Add what the code of a function reads; ``owner`` is the object of a method."""
        code = getattr(function, "__code__", None)
        names = _names(code) if code else frozenset[str]()
        if owner is not None:
            self._below(type(owner).__name__, owner, names)
        if isinstance(owner, nn.Module):
            self._module(type(owner).__name__, owner)
        if not isinstance(function, types.FunctionType):
            return
        here, space = function.__qualname__, function.__globals__
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            self._below(f"{here}: {name}", self._attribute(f"{here}: {name}", cell, "cell_contents"), names)
        for name in sorted(_global_names(function.__code__) & space.keys()):
            value = space[name] if isinstance(space[name], types.ModuleType) else self._item(name, space, name)
            self._below(name, value, names)
        for name in ("__defaults__", "__kwdefaults__"):
            if getattr(function, name):
                self._below(f"{here}: default", self._attribute(f"{here}: {name}", function, name), names)

    def _below(self, path: str, value: Any, names: frozenset[str]) -> None:
        """Add what lies one level below a variable. ``names`` are those in the code that reads it."""
        if isinstance(value, _CLOSED):
            return
        if isinstance(value, dict | list | tuple):
            held = cast(Any, value)
            self._lengths.append((held, len(held)))
            keys = list(held) if isinstance(value, dict) else range(len(held))
            for key in keys if len(held) <= _MAX_ITEMS else ():
                self._item(f"{path}[{key!r}]", held, key)
        elif isinstance(value, nn.Module):
            plain = {
                name for name, held in vars(value).items() if isinstance(held, (*_SCALARS, Tensor)) and name[0] != "_"
            }
            self._named(path, value, (names | plain) - {"training"})
        elif not isinstance(value, types.FunctionType | types.BuiltinFunctionType):
            self._named(path, value, _with_methods(value, names))

    def _named(self, path: str, value: Any, names: frozenset[str]) -> None:
        """Add the attributes of an object, module or class that have these names."""
        for name in sorted(names & getattr(value, "__dict__", {}).keys()):
            if not isinstance(value, types.ModuleType) or not _is_code(vars(value)[name]):
                self._attribute(f"{path}.{name}", value, name)
        for part in (value if isinstance(value, type) else type(value)).__mro__:
            for name in sorted(names & vars(part).keys()):
                if isinstance(vars(part)[name], (*_SCALARS, Tensor)):
                    self._attribute(f"{part.__name__}.{name}", part, name)

    def _module(self, path: str, value: nn.Module) -> None:
        """Add the tensors and children of a module, and whether its parts are in train mode."""
        for name, part in value.named_modules(prefix=path):
            if id(part) in self._modules:
                continue
            self._modules.add(id(part))
            self._attribute(f"{name}.training", part, "training")
            for held in (part._parameters, part._buffers, part._modules):  # pyright: ignore[reportPrivateUsage]
                for key in held:
                    self._item(f"{name}.{key}", held, key)

    def _item(self, name: str, holder: Any, key: Any) -> Any:
        self._items.append((holder, key, holder[key]))
        return self._added(name, holder[key])

    def _attribute(self, name: str, holder: Any, attribute: str) -> Any:
        value = _attribute(holder, attribute)
        self._attributes.append((holder, attribute, value))
        return self._added(name, value)

    def _added(self, name: str, value: Any) -> Any:
        while name in self.values:  # of another function of this name
            name += "'"
        self.values[name] = value
        if isinstance(value, nn.Module):
            self._module(name, value)
        elif _is_own(value):
            self._find(value)
        return value


def _attribute(holder: Any, name: str) -> Any:
    try:
        return getattr(holder, name)
    except (AttributeError, ValueError):  # gone; an empty cell
        return _NOTHING


def _is_code(value: Any) -> bool:
    return callable(value) or isinstance(value, types.ModuleType)


def _is_own(value: Any) -> bool:
    """True for functions and objects of purestep, which hold those of the user."""
    if isinstance(value, types.FunctionType):
        return value.__code__.co_filename.startswith(_OWN)
    return type(value).__module__.partition(".")[0] == "purestep"


def _with_methods(value: Any, names: frozenset[str]) -> frozenset[str]:
    """The names, and those in the code of the object's methods that are among them."""
    waiting = list(names)
    while waiting:
        method = _attribute(type(value), waiting.pop())
        if isinstance(method, types.FunctionType):
            new = _names(method.__code__) - names
            names, waiting = names | new, [*waiting, *new]
    return names


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from _codes(part)


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> frozenset[str]:
    return frozenset(name for part in _codes(code) for name in part.co_names)


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> frozenset[str]:
    """Names that code reads as globals, without attributes of the same names."""
    steps = (step for part in _codes(code) for step in dis.get_instructions(part))
    return frozenset(step.argval for step in steps if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
