"""The state at the entry of a run: what cannot be trained or stored is found before the first step, all in one message.

One tensor at two paths is refused as well: a step that writes into donated memory would change both, and a snapshot
would untie them. Weights that a module ties are no such case, since a state holds them once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor

from .. import tree
from ..compile.live import overlaps, plain
from ..errors import StateError
from ..types import Empty, Program, TrainState, Tree

_CURE = "program.init(seed=0), or a tree of dicts, lists, tuples and dense tensors"


def checked_state(state: Tree) -> Tree:
    """The state, plain, if it is a tree of dense tensors on one device (a key may stay on the CPU).

    Raises:
        StateError: every leaf that is not, in one message; or a donated state.
    """
    _check_nodes(state)
    state = plain(state)
    leaves = tree.with_paths(state)
    wrong = _wrong(leaves)
    if wrong or not leaves:
        raise StateError("; ".join(wrong) or "there is no tensor in it", where="init_state", hint=_CURE)
    _check_counters(state)
    _check_devices(leaves)
    _check_ties(leaves)
    return state


def check_fits(state: Tree, program: Program) -> None:
    """Raise StateError for a TrainState that another program has made: its fields say which weights are trained,
    whether there is an average, and whether windows are counted."""
    static = program.static
    if static is None or not isinstance(state, TrainState):
        return
    has_window, has_ema = (not isinstance(part, Empty) for part in (state.accum, state.ema))
    wrong = [f"{name} is trained in one of them only" for name in sorted({*state.params} ^ {*static.trained})[:3]]
    if has_ema != static.has_ema:
        wrong.append(f"{'the state' if has_ema else 'the program'} alone has an average")
    if has_window != (static.accumulate > 1):
        wrong.append(f"accumulate={static.accumulate}, and the state has {'a' if has_window else 'no'} window")
    if wrong:
        raise StateError(
            f"of another program: {'; '.join(wrong)}",
            where="init_state",
            hint="program.init(); ps.load_into(model, state) before it takes weights over",
        )


def is_key(path: str, leaf: Tensor) -> bool:
    """Whether a leaf is a random key."""
    # A parameter may be called "key" as well.
    return path.rpartition("/")[2] == "key" and leaf.dtype == torch.int64 and leaf.shape == (2,)


def _check_nodes(state: Tree) -> None:
    """Flattening a tree that contains itself would not end."""
    odd: list[str] = []
    try:
        leaves = list(_walk(state, "", (), odd))
    except RecursionError as error:
        raise StateError("nodes within nodes without end", where="init_state", hint=_CURE) from error
    if odd:
        odd += _wrong(leaves)
        raise StateError("; ".join(odd), where="init_state", hint=_CURE)


def _walk(node: Any, path: str, above: tuple[int, ...], odd: list[str]) -> Iterator[tuple[str, Any]]:
    """The leaves; into ``odd`` go nodes that contain themselves, and keys that are not equal to themselves."""
    if not isinstance(node, dict | list | tuple) or (isinstance(node, TrainState) and type(node) is not TrainState):
        if node is not None:
            yield path, node
        return
    if id(node) in above:
        odd.append(f"{path}: a {type(node).__name__} that contains itself")
        return
    names = getattr(type(node), "_fields", None) or range(len(node))
    items = cast("Mapping[Any, Any]", node).items() if isinstance(node, dict) else zip(names, node, strict=True)
    for key, child in items:
        below = f"{path}/{key}" if path else str(key)
        if key != key:
            odd.append(f"{below}: the key {key!r}, which is not equal to itself")
        yield from _walk(child, below, (*above, id(node)), odd)


def _wrong(leaves: Iterable[tuple[str, Any]]) -> list[str]:
    found = [(path, _unfit(leaf)) for path, leaf in leaves]
    return [f"{path}: {text}" if path else text for path, text in found if text]


def _unfit(leaf: Any) -> str:
    """What is wrong with a leaf, or nothing."""
    if not isinstance(leaf, Tensor):
        return f"a {type(leaf).__name__}"
    if leaf.is_nested or leaf.is_quantized or leaf.layout != torch.strided:
        kind = "nested" if leaf.is_nested else "quantized" if leaf.is_quantized else str(leaf.layout)[6:]
        return f"a {kind} tensor; dense ones are needed"
    if overlaps(leaf):
        return f"several of its numbers share memory (strides {list(leaf.stride())}); .clone() makes it whole"
    return ""


def _check_counters(state: Tree) -> None:
    """What the host itself reads of a TrainState."""
    shapes = {"step": (), "updates": (), "key": (2,)} if isinstance(state, TrainState) else {}
    for name, shape in shapes.items():
        leaf = getattr(state, name)
        if not isinstance(leaf, Tensor) or leaf.dtype != torch.int64 or leaf.shape != shape:
            raise StateError(f"is no int64 tensor of shape {list(shape)}", where=name, hint="program.init(seed=0)")


def _check_devices(leaves: list[tuple[str, Tensor]]) -> None:
    devices: dict[str, str] = {}
    for path, leaf in leaves:
        if not is_key(path, leaf):
            devices.setdefault(str(leaf.device), path)
    if len(devices) > 1:
        raise StateError(
            f"leaves are on several devices: {', '.join(f'{path} on {device}' for device, path in devices.items())}",
            where="init_state",
            hint='program.init(seed=0, device="cuda")',
        )
    if "meta" in devices:
        raise StateError("is on the meta device and has no values", where=devices["meta"], hint=_CURE)


def _check_ties(leaves: list[tuple[str, Tensor]]) -> None:
    paths: set[str] = set()
    owners: dict[tuple[str, int], str] = {}
    wrong: list[str] = []
    for path, leaf in leaves:
        if path in paths:
            wrong.append(f"two leaves have the path {path}")
        paths.add(path)
        if leaf.numel():
            owner = owners.setdefault((str(leaf.device), leaf.data_ptr()), path)
            if owner != path:
                wrong.append(f"{path} and {owner} are one tensor")
    if wrong:
        raise StateError("; ".join(wrong), where="init_state", hint="ps.clone(value) for one of them; keys without '/'")
