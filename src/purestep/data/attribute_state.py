"""What a loader keeps in attributes of its own: taken down, compared, put back.

A sampler that shuffles its own list, an iterable that counts its epochs: where they stand is in no training state. So
the attributes of an object, and of what it iterates in turn, are taken down before it is iterated.
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

from .random_state import KINDS, outside

_SCALARS = (type(None), bool, int, float, complex, str, bytes, np.generic)
_PLAIN = (type(None), bool, int, float, str, bytes)
_SEVERAL = (list, dict, deque, set)
_LONG = 1 << 24  # numbers in a row; more are data
_FEW = 64  # entries of a list whose objects are looked into one by one, as transforms are
_MOST = 100_000  # containers that are looked into: a list of so many records is data


class Attributes:
    """The attributes of these objects as they are now, and of the objects that they hold.

    Lists, dicts, deques, sets and tensors or arrays of one dimension are copied (what is in them is not, unless it is
    one of these too); what has more dimensions is data, and remembered as the object that it is. Generators are left
    out: they are seeded.

    Args:
        owners: samplers, iterables, datasets, collate functions.
        but: objects that are not looked into.

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
        >>> before.put_back()
        >>> sampler.order, sampler.epoch
        ([1, 2, 3], 0)
    """

    def __init__(self, *owners: Any, but: Collection[Any] = ()) -> None:
        self._owners = owners
        self._taken = {id(part): _Taken(path, part, _content(part)) for path, part in _parts(owners, but)}

    def changed(self) -> list[str]:
        """The paths of what is not as it was."""
        return [path for path, _ in self._changes()]

    def iterators(self) -> list[str]:
        """The paths of the iterators that have come since: where they are, nobody can say."""
        return [path for path, value in self._changes() if isinstance(value, Iterator)]

    def values(self) -> dict[str, Any]:
        """What `write` needs to bring an object that is as this one was to where this one is now. A list in another
        order is told by the places of its items."""
        found: dict[str, Any] = {}
        for path, value in self._changes():
            places = self._places(path, value)
            if places is not None:
                found[path] = {"places": places}
            elif _is_plain(value):
                found[path] = {"value": _stored(value)}
        return found

    def put_back(self) -> None:
        """Make everything as it was: the same objects, with what was in them. Files, threads and the like that have
        come since stay; an iterator does not."""
        for _, part, content in self._taken.values():
            if isinstance(part, _SEVERAL) or not isinstance(content, dict):
                if not self._same_content(_content(part), content):
                    _fill(part, content)
                continue
            now, held = _content(part), vars(part)
            for name, value in now.items():
                if name in content and value is content[name]:
                    continue
                if _is_plain(value) or isinstance(value, Iterator):
                    held.pop(name)
            held.update((name, value) for name, value in content.items() if name not in held)

    def _changes(self) -> Iterator[tuple[str, Any]]:
        """The path and the present value of what is not as it was."""
        gone: set[str] = set()  # where there is another object by now
        for path, part, content in self._taken.values():
            now = _content(part)
            if isinstance(part, _SEVERAL) or not isinstance(now, dict):
                if not gone.intersection(_above(path)) and not self._same_content(now, content):
                    yield path, part
                continue
            for name in {**content, **now}:
                if name not in content or name not in now or not self._same(now[name], content[name]):
                    gone.add(_joined(path, name))
                    yield _joined(path, name), now.get(name)

    def _same(self, now: Any, then: Any) -> bool:
        """Whether an attribute has the value that it had. What is still the same object is compared by itself."""
        if now is then:
            return True
        if type(now) is not type(then):
            return False
        if isinstance(now, _SCALARS):
            return bool(now == then) or now != now
        if isinstance(now, tuple):
            return self._same_content(now, then)
        known = self._taken.get(id(then))
        if known is not None and (isinstance(now, _SEVERAL) or _is_row(now)):
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
        """Where the items of a list were in it; None where some were not."""
        then = next((t.content for t in self._taken.values() if t.path == path and isinstance(t.part, list)), None)
        if not isinstance(value, list) or then is None:
            return None
        where = {id(item): place for place, item in enumerate(then)}
        found = [where.get(id(item)) for item in cast(list[Any], value)]
        return None if None in found else cast(list[int], found)


def write(owners: Iterable[Any], values: Mapping[str, Any], but: Collection[Any] = ()) -> None:
    """Bring objects to where others of their kind were: see `Attributes.values`.

    Example:
        >>> one, other = types.SimpleNamespace(order=[5, 6]), types.SimpleNamespace(order=[7, 8])
        >>> before = Attributes(one)
        >>> one.order.reverse()
        >>> write([other], before.values())
        >>> other.order
        [8, 7]
    """
    parts = dict(_parts(tuple(owners), but))
    for path, told in values.items():
        part = parts.get(path)
        if "places" in told and isinstance(part, list):
            items = list(cast(list[Any], part))
            part[:] = [items[place] for place in told["places"]]
            continue
        value = told.get("value")
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
    """The random generators that objects hold, and what they hold in turn, by the path to them; those in closures and
    globals of their methods too.

    Args:
        owners: datasets, transforms, collate objects and functions.

    Example:
        >>> import random
        >>> generators(types.SimpleNamespace(rng=random.Random(), size=3))
        {'rng': <random.Random object at ...>}
    """
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


class _Taken(NamedTuple):
    path: str
    part: Any
    content: Any


def _parts(owners: tuple[Any, ...], but: Collection[Any]) -> Iterator[tuple[str, Any]]:
    """Objects with attributes and containers, those first that hold the others."""
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
            if not any(_goes_on(value, home) for value in (items[:1] if len(items) > _FEW else items)):
                continue  # as with the first of many, so with the others
        content = _content(part)
        held = content.items() if isinstance(content, dict) else () if not _is_listed(part) else enumerate(content)
        if isinstance(part, DataLoader):
            held = [(name, getattr(part, name, None)) for name in ("dataset", "sampler", "batch_sampler", "collate_fn")]
        waiting.extend((_joined(path, name), value, home) for name, value in held if _goes_on(value, home))


def _joined(path: str, name: Any) -> str:
    return f"{path}/{name}" if path else str(name)


def _above(path: str) -> Iterator[str]:
    """A path and those of what holds it."""
    while path:
        yield path
        path = path.rpartition("/")[0]


def _is_listed(part: Any) -> bool:
    return isinstance(part, list | deque)


def _goes_on(value: Any, home: str) -> bool:
    """Whether a value may change by itself, in an object of the module ``home``."""
    if type(value) in _SEVERAL or isinstance(value, _SEVERAL) or _is_row(value):
        return True
    if not has_attributes(value):
        return False
    # Of other objects, one of the user's own beside the class that holds it.
    return isinstance(value, Dataset | Iterable) or type(value).__module__ == home


def has_attributes(value: Any) -> bool:
    """Whether this is an object that may keep something: no class, function, module or tensor."""
    others = (type, types.ModuleType, types.FunctionType, types.MethodType, nn.Module, Tensor, np.ndarray)
    return hasattr(value, "__dict__") and not isinstance(value, others + KINDS)


def _is_row(value: Any) -> bool:
    if isinstance(value, Tensor):
        plain = value.layout is torch.strided and not (value.is_nested or value.is_quantized or value.requires_grad)
        return plain and value.dim() == 1 and value.device.type == "cpu" and value.numel() < _LONG
    return type(value) is np.ndarray and value.ndim == 1 and value.dtype.kind in "biuf" and value.size < _LONG


def _content(part: Any) -> Any:
    """A copy of what may change: of an object its attributes."""
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
    hidden = isinstance(part, DataLoader)  # whose machinery is torch's business
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
    """Whether there are but numbers, text and tensors in it."""
    if type(value) in _PLAIN or isinstance(value, np.bool_ | np.integer | np.floating | Tensor):
        return True
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "biufc"
    if isinstance(value, dict):
        mapping = cast("dict[Any, Any]", value)
        return all(map(_is_plain, mapping)) and all(map(_is_plain, mapping.values()))
    return type(value) in (list, tuple, deque, set) and all(map(_is_plain, cast("list[Any]", value)))


def _stored(value: Any) -> Any:
    """A plain value with lists for sets and deques, as a manifest can hold it."""
    if isinstance(value, dict):
        return {key: _stored(part) for key, part in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | deque | set):
        return [_stored(part) for part in cast("list[Any]", value)]
    return tuple(map(_stored, cast("tuple[Any, ...]", value))) if isinstance(value, tuple) else value
