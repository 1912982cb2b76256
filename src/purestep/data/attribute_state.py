"""Record, compare and restore the attributes of loaders.

A sampler may shuffle its own list, and an iterable may count its epochs. No training state contains that. So the
attributes of an object, and of the objects that it iterates, are recorded before it is iterated.
"""

from __future__ import annotations

import operator
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from .random_state import KINDS, closures, outside

_SCALARS = (type(None), bool, int, float, complex, str, bytes, np.generic)
_PLAIN = (type(None), bool, int, float, str, bytes)
_SEVERAL = (list, dict, deque, set)
_LONG = 1 << 24  # elements of a vector; a longer one is data
_FEW = 64  # entries of a list whose objects are searched one by one, such as a list of transforms
_MOST = 100_000  # containers to search; a list of more records is data


class Attributes:
    """A record of the attributes of objects and of the objects in these attributes.

    Copies lists, dicts, deques, sets, and tensors and arrays of one dimension. Their elements are copied only if they
    are such containers too. Tensors and arrays of more dimensions are data: only their identity is recorded. Random
    generators are omitted, because they are seeded.

    Args:
        owners: samplers, iterables, datasets, collate functions.
        but: objects to skip.

    Example:
        >>> class Sampler:
        ...     def __init__(self):
        ...         self.order, self.epoch = [1, 2, 3], 0
        >>> sampler = Sampler()
        >>> before = Attributes(sampler)
        >>> sampler.order.reverse()
        >>> sampler.epoch += 1
        >>> before.changed()
        ['epoch', 'order']
        >>> before.restore()
        >>> sampler.order, sampler.epoch
        ([1, 2, 3], 0)
    """

    def __init__(self, *owners: Any, but: Collection[Any] = ()) -> None:
        self._owners = owners
        self._records = {id(part): _Record(path, part, _content(part)) for path, part in _parts(owners, but)}

    def changed(self) -> list[str]:
        """The paths of the attributes that changed."""
        return [path for path, _ in self._changes()]

    def iterators(self) -> list[str]:
        """The paths of new iterators. Their position cannot be stored."""
        return [path for path, value in self._changes() if isinstance(value, Iterator)]

    def values(self) -> dict[str, Any]:
        """The changed attributes, for `write`. A permuted list is stored as the old indices of its items."""
        found: dict[str, Any] = {}
        for path, value in self._changes():
            places = self._places(path, value)
            if places is not None:
                found[path] = {"places": places}
            elif _is_plain(value):
                found[path] = {"value": _stored(value)}
        return found

    def restore(self) -> None:
        """Restore the recorded objects and their contents. New files, threads and the like stay; new iterators are
        removed."""
        for _, part, content in self._records.values():
            if isinstance(part, _SEVERAL) or not isinstance(content, dict):
                if not self._same_content(_content(part), content):
                    _fill(part, content)
                continue
            now, attributes = _content(part), vars(part)
            for name, value in now.items():
                if name in content and value is content[name]:
                    continue
                if _is_plain(value) or isinstance(value, Iterator):
                    attributes.pop(name)
            attributes.update((name, value) for name, value in content.items() if name not in attributes)

    def _changes(self) -> Iterator[tuple[str, Any]]:
        """The path and the current value of each attribute that changed."""
        replaced: set[str] = set()  # paths of replaced objects
        for path, part, content in self._records.values():
            now = _content(part)
            if isinstance(part, _SEVERAL) or not isinstance(now, dict):
                if not replaced.intersection(_above(path)) and not self._same_content(now, content):
                    yield path, part
                continue
            for name in {**content, **now}:
                if name not in content or name not in now or not self._same(now[name], content[name]):
                    replaced.add(_joined(path, name))
                    yield _joined(path, name), now.get(name)

    def _same(self, now: Any, then: Any) -> bool:
        """True if an attribute has its old value. The contents of an unchanged object are compared separately."""
        if now is then:
            return True
        if type(now) is not type(then):
            return False
        if isinstance(now, _SCALARS):
            return bool(now == then) or now != now
        if isinstance(now, tuple):
            return self._same_content(now, then)
        known = self._records.get(id(then))
        if known is not None and (isinstance(now, _SEVERAL) or _is_vector(now)):
            return self._same_content(_content(now), known.content)
        return isinstance(now, Tensor | np.ndarray) and now.shape == then.shape and bool((now == then).all())

    def _same_content(self, now: Any, then: Any) -> bool:
        if isinstance(now, Tensor | np.ndarray):
            return now.shape == then.shape and now.dtype == then.dtype and bool(((now == then) | (now != now)).all())
        if len(now) != len(then):
            return False
        if isinstance(now, set):
            return now == then
        if isinstance(now, dict):
            return list(now) == list(then) and all(self._same(now[key], then[key]) for key in now)
        return all(map(operator.is_, now, then)) or all(map(self._same, now, then))

    def _places(self, path: str, value: Any) -> list[int] | None:
        """The old indices of the items of a list, or None if there are new items."""
        then = next((t.content for t in self._records.values() if t.path == path and isinstance(t.part, list)), None)
        if not isinstance(value, list) or then is None:
            return None
        where = {id(item): place for place, item in enumerate(then)}
        found = [where.get(id(item)) for item in cast(list[Any], value)]
        return None if None in found else cast(list[int], found)


def write(owners: Iterable[Any], values: Mapping[str, Any], but: Collection[Any] = ()) -> None:
    """Write the result of `Attributes.values` into the attributes of other objects of the same kind.

    Example:
        >>> one, other = types.SimpleNamespace(order=[5, 6]), types.SimpleNamespace(order=[7, 8])
        >>> before = Attributes(one)
        >>> one.order.reverse()
        >>> write([other], before.values())
        >>> other.order
        [8, 7]
    """
    parts = dict(_parts(tuple(owners), but))
    for path, stored in values.items():
        part = parts.get(path)
        if "places" in stored and isinstance(part, list):
            items = list(cast(list[Any], part))
            part[:] = [items[place] for place in stored["places"]]
            continue
        value = stored.get("value")
        if part is not None and isinstance(value, _SEVERAL):
            _fill(part, value)
            continue
        above, _, name = path.rpartition("/")
        holder = parts.get(above)
        if hasattr(holder, "__dict__"):
            vars(holder)[name] = value
        elif isinstance(holder, dict):
            next_key = next((key for key in holder if str(key) == name), name)
            holder[next_key] = value


def generators(*owners: Any) -> dict[str, Any]:
    """The random generators in the attributes of objects, recursively, by path; also in closures and globals of their
    methods.

    Args:
        owners: datasets, transforms, collate objects and functions.

    Example:
        >>> import random
        >>> generators(types.SimpleNamespace(rng=random.Random(), size=3))
        {'rng': <random.Random object at ...>}
    """
    # Not `random_state.own`, which finds generators for whole epochs: it searches no lists, but objects of any module
    # and properties of samplers. A seed is derived from the path, so one search for both would change seeds.
    found: dict[str, Any] = {}
    seen: set[int] = set()
    functions = [("", owner) for owner in owners if isinstance(owner, types.FunctionType)]
    for path, part in (*_parts(owners, ()), *functions):
        held: Any = part if isinstance(part, dict) else outside(part) | getattr(part, "__dict__", {})
        held = enumerate(cast("list[Any]", part)) if isinstance(part, list) and len(part) <= _FEW else held.items()
        for name, value in held:
            if isinstance(value, KINDS) and id(value) not in seen:
                seen.add(id(value))
                found[_joined(path, name)] = value
    return found


def closed_over(*owners: Any) -> dict[str, Any]:
    """The values in closures of functions and of methods of objects, recursively, by path. Random generators are
    omitted, because they are seeded.

    Args:
        owners: iterables, datasets, collate objects and functions.

    Example:
        >>> def source(order):
        ...     return lambda: iter(order)
        >>> closed_over(source([1, 2]))
        {'order': [1, 2]}
    """
    functions = [("", owner) for owner in owners if isinstance(owner, types.FunctionType)]
    parts = ((path, part) for path, part in _parts(owners, ()) if not isinstance(part, (*_SEVERAL, Tensor, np.ndarray)))
    return {
        _joined(path, name): value
        for path, part in (*parts, *functions)
        for name, value in closures(part).items()
        if not isinstance(value, KINDS)
    }


class _Record(NamedTuple):
    path: str
    part: Any
    content: Any


def _parts(owners: tuple[Any, ...], but: Collection[Any]) -> Iterator[tuple[str, Any]]:
    """Objects with attributes and containers, in breadth-first order."""
    seen = {id(part) for part in but}
    waiting: deque[tuple[str, Any, str]] = deque()  # the path, the part, the module of the object that holds it
    for number, owner in enumerate(owners):
        if has_attributes(owner):
            waiting.append(("" if len(owners) == 1 else f"[{number}]", owner, ""))
    count = 0
    while waiting and count < _MOST:
        path, part, home = waiting.popleft()
        if id(part) in seen:
            continue
        seen.add(id(part))
        count += 1
        yield path, part
        home = home if isinstance(part, _SEVERAL) else type(part).__module__
        if isinstance(part, list | deque):
            items = cast("list[Any]", part)
            home = "" if len(items) > _FEW else home
            if not any(_is_searched(value, home) for value in (items[:1] if len(items) > _FEW else items)):
                continue  # assume that the others are like the first
        content = _content(part)
        held = content.items() if isinstance(content, dict) else () if not _is_listed(part) else enumerate(content)
        if isinstance(part, DataLoader):
            held = [(name, getattr(part, name, None)) for name in ("dataset", "sampler", "batch_sampler", "collate_fn")]
        waiting.extend((_joined(path, name), value, home) for name, value in held if _is_searched(value, home))


def _joined(path: str, name: Any) -> str:
    return f"{path}/{name}" if path else str(name)


def _above(path: str) -> Iterator[str]:
    """A path and its parents."""
    while path:
        yield path
        path = path.rpartition("/")[0]


def _is_listed(part: Any) -> bool:
    return isinstance(part, list | deque)


def _is_searched(value: Any, home: str) -> bool:
    """True if a value in an object of the module ``home`` may have state that changes."""
    if type(value) in _SEVERAL or isinstance(value, _SEVERAL) or _is_vector(value):
        return True
    if not has_attributes(value):
        return False
    # Other objects count if their class is in the same module as the holder's: the user wrote both.
    return isinstance(value, Dataset | Iterable) or type(value).__module__ == home


def has_attributes(value: Any) -> bool:
    """True for an object with attributes that is no class, function, module or tensor."""
    others = (type, types.ModuleType, types.FunctionType, types.MethodType, nn.Module, Tensor, np.ndarray)
    return hasattr(value, "__dict__") and not isinstance(value, others + KINDS)


def _is_vector(value: Any) -> bool:
    if isinstance(value, Tensor):
        plain = value.layout is torch.strided and not (value.is_nested or value.is_quantized or value.requires_grad)
        return plain and value.dim() == 1 and value.device.type == "cpu" and value.numel() < _LONG
    return type(value) is np.ndarray and value.ndim == 1 and value.dtype.kind in "biuf" and value.size < _LONG


def _content(part: Any) -> Any:
    """A copy of a container, or of the attributes of an object."""
    if isinstance(part, Tensor):
        return part.detach().clone()
    if isinstance(part, np.ndarray):
        return part.copy()
    if isinstance(part, list | deque):
        return list(cast("list[Any]", part))
    if isinstance(part, dict):
        return dict(cast("dict[Any, Any]", part))
    if isinstance(part, set):
        return set(cast("set[Any]", part))
    hidden = isinstance(part, DataLoader)  # torch manages its private attributes
    return {k: v for k, v in vars(part).items() if not isinstance(v, KINDS) and not (hidden and k.startswith("_"))}


def _fill(part: Any, content: Any) -> None:
    if isinstance(part, Tensor):
        with torch.no_grad():
            part.resize_(content.shape).copy_(content) if part.shape != content.shape else part.copy_(content)
    elif isinstance(part, np.ndarray):
        if part.shape == content.shape and part.flags.writeable:
            part[...] = content
    elif isinstance(part, list):
        part[:] = content
    else:
        part.clear()
        add: Callable[[Any], None] = part.extend if isinstance(part, deque) else part.update
        add(content)


def _is_plain(value: Any) -> bool:
    """True if a value contains only numbers, text and tensors."""
    if type(value) in _PLAIN or isinstance(value, np.bool_ | np.integer | np.floating | Tensor):
        return True
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biufc"
    if isinstance(value, dict):
        mapping = cast("dict[Any, Any]", value)
        return all(map(_is_plain, mapping)) and all(map(_is_plain, mapping.values()))
    return type(value) in (list, tuple, deque, set) and all(map(_is_plain, cast("list[Any]", value)))


def _stored(value: Any) -> Any:
    """Convert sets and deques to lists, for JSON."""
    if isinstance(value, dict):
        return {key: _stored(part) for key, part in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | deque | set):
        return [_stored(part) for part in cast("list[Any]", value)]
    return tuple(map(_stored, cast("tuple[Any, ...]", value))) if isinstance(value, tuple) else value
