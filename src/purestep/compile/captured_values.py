"""Values that a step reads besides its arguments, where a change recompiles it.

These are the names that the code of the objective, of a user-defined step and of schedules reads (closure, globals),
and what lies one level below them and below defaults: items of dicts and lists, attributes of objects that the code or
the methods it calls name, and of modules the tensors, the children and the numbers. Whatever lies deeper is a constant
of the graph. Each call compares these places with what they held before by identity, at 20 to 30 ns for each.
"""

from __future__ import annotations

import dis
import functools
import logging
import types
from collections.abc import Callable, Iterable
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
_MAX_ITEMS = 256  # of one dict or list; of a longer one only the identity is compared
_MAX_CHANGES = 16  # changes of numbers, each of which compiles a graph, before an error
_OWN = __file__.rpartition("compile")[0]
_NOTHING = object()
_EMPTY = types.CellType()  # of a variable without a value
_NUMBER_CURE = (
    "pass a number that changes as a tensor: a schedule in ps.program(values={...}), read as model.values[...]; "
    "or the step's context, a buffer of the state, the batch, optim.inject"
)
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
            if self._places is not None and (changed := _changed(self._places, places) - self._ignored):
                self._report(sorted(changed), self._places, places)
            self._take(places)  # after an error the old ones stay, and the next call raises too
        return self._text

    def take_out(self) -> list[str]:
        """Take out the tensors that a trace, which may have failed, has stored, and return the names of their places.
        They have no values, and every later call would read them."""
        assert self._places is not None
        return _Places(self._step).take_out(self._places)

    def mark_compiled(self) -> None:
        """Ignore the changes that a trace itself has made."""
        assert self._places is not None
        before, after = self._places, _Places(self._step)
        changed = _changed(before, after)
        for name in sorted(changed - self._ignored):
            was, now = before.values.get(name), after.values.get(name)
            if type(was) in (int, float) and type(now) in (int, float):
                text = "%s: the step itself changes this number (%s -> %s), but Python runs once for a graph, which "
                _log.warning(text + "holds one value of it (cure: %s)", name, was, now, _NUMBER_CURE)
                break
        self._ignored |= changed
        self._take(after)

    def _take(self, places: _Places) -> None:
        self._places = places
        self._text = repr({name: key for name, key in places.keys.items() if name not in self._ignored})

    def _report(self, changed: list[str], before: _Places, after: _Places) -> None:
        values = {name: (before.values.get(name, _NOTHING), after.values.get(name, _NOTHING)) for name in changed}
        numbers = [name for name, pair in values.items() if all(isinstance(value, _SCALARS) for value in pair)]
        if numbers and self._changes == _MAX_CHANGES:
            what = f"the value has changed {_MAX_CHANGES + 1} times; each value would compile a graph"
            raise capture.Uncaptured(what, where=numbers[0], hint=_NUMBER_CURE)
        if not self._changes and not self.objects:
            name, (was, now) = next(iter(values.items()))
            change = f"was {_short(was)}, is {_short(now)}"
            cure = _NUMBER_CURE if name in numbers else _OBJECT_CURE
            _log.warning("%s %s: a graph holds it, so the step is recompiled (cure: %s)", name, change, cure)
        self.objects += len(numbers) < len(changed)
        self._changes += bool(numbers)


def _changed(before: _Places, after: _Places) -> set[str]:
    return {name for name, _ in before.keys.items() ^ after.keys.items()}


def _short(value: Any) -> str:
    if value is _NOTHING:
        return "not there"
    return repr(value) if isinstance(value, _SCALARS) else f"another {type(value).__name__}"


class _Places:
    """The values that a step reads by name, their keys, which differ if the values do, and where each is read again."""

    def __init__(self, step: Any) -> None:
        self.values: dict[str, Any] = {}  # keeps the objects alive, so that an id stays unique
        self.keys: dict[str, str] = {}
        self._items: list[tuple[Any, Any, Any]] = []  # list, dict or the __dict__ of an object; key; value
        self._slots: list[tuple[Any, str, Any]] = []  # object of a class with `__slots__`; name; value
        self._cells: list[tuple[types.CellType, Any]] = []
        self._lengths: list[tuple[Any, int]] = []
        self._seen: dict[int, Any] = {}  # functions and callable objects; keeps them alive as well
        self._modules: set[int] = set()
        self._add_functions(step)

    def is_same(self) -> bool:
        """True if every place still holds the same object."""
        try:
            for holder, key, value in self._items:
                if holder[key] is not value:
                    return False
            for holder, name, value in self._slots:
                if getattr(holder, name) is not value:
                    return False
            for cell, value in self._cells:
                if cell.cell_contents is not value:
                    return False
        except (LookupError, ValueError, AttributeError):  # gone
            return False
        return all(len(holder) == length for holder, length in self._lengths)

    def take_out(self, before: _Places) -> list[str]:
        """Put back what ``before`` held if a trace has stored its tensors since; return their names."""
        from torch._subclasses.fake_tensor import FakeTensor

        given = {id(value) for value in before.values.values()}
        stored = {id(value): name for name, value in self.values.items() if isinstance(value, FakeTensor)}
        if not (names := [name for value, name in stored.items() if value not in given]):
            return []
        before._restore()
        for holder, key, value in self._items:  # now those that were not there
            if id(value) in stored and isinstance(holder, dict) and holder.get(key) is value:
                del holder[key]
        for holder, name, value in self._slots:
            if id(value) in stored and getattr(holder, name, None) is value:
                delattr(holder, name)
        for cell, value in self._cells:
            if id(value) in stored and cell != _EMPTY and cell.cell_contents is value:
                del cell.cell_contents
        return sorted(names)

    def _restore(self) -> None:
        lists = {id(holder): holder for holder, _ in self._lengths if isinstance(holder, list)}
        for holder in lists.values():
            holder[:] = [value for each, _, value in self._items if each is holder][: self._length(holder)]
        for holder, key, value in self._items:
            if isinstance(holder, dict):  # else a list, a tuple or a class
                holder[key] = value
        for holder, name, value in self._slots:
            setattr(holder, name, value)
        for cell, value in self._cells:
            cell.cell_contents = value

    def _length(self, holder: Any) -> int:
        return next(length for each, length in self._lengths if each is holder)

    def _add_functions(self, value: Any) -> None:
        """Add what the user's functions read that a step holds, or a function of purestep."""
        if isinstance(value, (*_CLOSED, type)) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        if (parts := _parts(value)) is not None:
            for part in parts:
                self._add_functions(part)
        elif isinstance(value, types.FunctionType):
            self._add_read(value)
        elif isinstance(value, types.MethodType):
            self._add_read(value.__func__, value.__self__)
        elif callable(value):
            kind: Any = type(value)
            self._add_read(kind.forward if isinstance(value, nn.Module) else kind.__call__, value)

    def _add_read(self, function: Any, owner: Any = None) -> None:
        """Add what the code of a function reads; ``owner`` is the object of a method."""
        if not isinstance(function, types.FunctionType):  # written in C
            return
        code, here, space = function.__code__, function.__qualname__, function.__globals__
        self._add_below(type(owner).__name__, owner, code)
        variables = [(f"{here}: default", value) for value in function.__defaults__ or ()]
        variables += [(f"{here}: {name}", value) for name, value in (function.__kwdefaults__ or {}).items()]
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if cell != _EMPTY:
                self._cells.append((cell, cell.cell_contents))
                variables.append((f"{here}: {name}", cell.cell_contents))
        for name in sorted(_global_names(code) & space.keys()):
            if not isinstance(space[name], types.ModuleType):
                self._items.append((space, name, space[name]))
            variables.append((name, space[name]))
        for path, value in variables:
            self._add_value(path, value)
            self._add_below(path, value, code)

    def _add_below(self, path: str, value: Any, code: types.CodeType) -> None:
        """Add what lies one level below a variable that the code reads."""
        if isinstance(value, dict | list | tuple):
            held = cast(Any, value)
            if len(held) <= _MAX_ITEMS:
                self._lengths.append((held, len(held)))
                for key in list(held) if isinstance(value, dict) else range(len(held)):
                    self._add_item(f"{path}[{key!r}]", held, key)
        elif not isinstance(value, (*_CLOSED, types.FunctionType, types.BuiltinFunctionType)):
            kind = value if isinstance(value, type) else type(value)
            if isinstance(value, nn.Module):
                self._add_module(path, value)
                numbers = {name for name, held in vars(value).items() if isinstance(held, (*_SCALARS, Tensor))}
                names = (_names(code) | {name for name in numbers if name[0] != "_"}) - {"training"}
            else:
                names = _names(code, kind)
            for part in kind.__mro__ if value is kind else (value, *kind.__mro__):
                space, is_space = getattr(part, "__dict__", {}), isinstance(part, type | types.ModuleType)
                for name in sorted(names & space.keys()):
                    if (
                        isinstance(space[name], types.MemberDescriptorType)
                        and value is not kind
                        and hasattr(value, name)
                    ):
                        self._slots.append((value, name, getattr(value, name)))
                        self._add_value(f"{path}.{name}", getattr(value, name))
                    elif not is_space or not _is_code(space[name]):
                        self._add_item(f"{path if part is value else part.__name__}.{name}", space, name)

    def _add_module(self, path: str, value: nn.Module) -> None:
        """Add the tensors and children of a module, and whether its parts are in train mode."""
        for name, part in value.named_modules(prefix=path):
            if id(part) not in self._modules:
                self._modules.add(id(part))
                self._add_item(f"{name}.training", vars(part), "training")
                for held in (part._parameters, part._buffers, part._modules):  # pyright: ignore[reportPrivateUsage]
                    for key in held:
                        self._add_item(f"{name}.{key}", held, key)

    def _add_item(self, name: str, holder: Any, key: Any) -> None:
        self._items.append((holder, key, holder[key]))
        self._add_value(name, holder[key])

    def _add_value(self, name: str, value: Any) -> None:
        while name in self.values:  # of another function of this name
            name += "'"
        self.values[name] = value
        self.keys[name] = f"{type(value).__name__} {value!r}" if isinstance(value, _SCALARS) else str(id(value))
        if isinstance(value, nn.Module):
            self._add_module(name, value)
        elif _is_own(value):
            self._add_functions(value)


def _parts(value: Any) -> Iterable[Any] | None:
    """The parts of a container or of a function of purestep, which hold functions of the user."""
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, tuple | list | dict):
        return list(cast(dict[Any, Any], value).values()) if isinstance(value, dict) else cast(Any, value)
    if not _is_own(value):
        return None
    if isinstance(value, types.FunctionType):
        return [cell.cell_contents for cell in value.__closure__ or () if cell != _EMPTY]
    return (getattr(value, "eager", None),)  # of a compiled or donated step


def _is_own(value: Any) -> bool:
    """True for functions and objects of purestep."""
    if isinstance(value, types.FunctionType):
        return value.__code__.co_filename.startswith(_OWN)
    return type(value).__module__.partition(".")[0] == "purestep"


def _is_code(value: Any) -> bool:
    return callable(value) or isinstance(value, types.ModuleType) or hasattr(value, "__get__")


def _names(code: types.CodeType, kind: type = object) -> set[str]:
    """Names in code, and in the methods of a class that it calls."""
    names, waiting = set[str](), [code]
    while waiting:
        code = waiting.pop()
        new = set(code.co_names) - names
        found = [getattr(kind, name, None) for name in new]
        methods = [each.fget if isinstance(each, property) else each for each in found]
        waiting += [method.__code__ for method in methods if isinstance(method, types.FunctionType)]
        waiting += [part for part in code.co_consts if isinstance(part, types.CodeType)]
        names |= new
    return names


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> frozenset[str]:
    """Names that code reads as globals, without attributes of the same names."""
    own = {step.argval for step in dis.get_instructions(code) if step.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    return frozenset(own.union(*(_global_names(part) for part in code.co_consts if isinstance(part, types.CodeType))))
