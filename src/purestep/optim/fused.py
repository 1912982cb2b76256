"""torch's fused optimizer kernels: an update in one pass over the memory, where separate operations take twenty.

`plan` reads the kinds of a transform's parts (`base.Kind`). Kernels compute chains that end in

    adam, decay, learning_rate      torch.optim.AdamW
    decay, adam, learning_rate      torch.optim.Adam
    decay, trace, learning_rate     torch.optim.SGD

where the decay and the trace may be absent, after any number of `clip_by_global_norm` and `scale`, and inside of
`partition` and `inject`. Any other transform has no plan.

A kernel writes into the memory of weights and moments. So it serves eager steps only: a graph, a transform of
`torch.func` and a derivative through the step use ``Transform.update``, which gives the same numbers within rounding.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..torch_ext import foreach, read, tensor_layout, tracing
from ..types import Params, Tree
from .arguments import Scalar
from .base import Transform, global_norm, kind_of
from .counts import update_counts
from .numerics import by_name, in_dtype, rate_at
from .scale import rate_leaf

_DTYPES = (torch.float32, torch.float64)
_OPTIMIZERS: dict[tuple[str, ...], str] = {
    ("adam", "decay", "learning_rate"): "adamw",
    ("decay", "adam", "learning_rate"): "adam",
    ("adam", "learning_rate"): "adam",
    ("decay", "trace", "learning_rate"): "sgd",
    ("trace", "learning_rate"): "sgd",
    ("decay", "learning_rate"): "sgd",
    ("learning_rate",): "sgd",
}
"""The last kinds of a chain, longest first, and the kernel that computes them."""
_NESTED = (("partition",), ("inject",))
"""The last kinds of a chain that have transforms inside."""


class Change(NamedTuple):
    """Updates to clip or to scale in place."""

    kind: str  # "clip", "scale"
    options: dict[str, Any]
    names: list[str]


class Call(NamedTuple):
    """A call of a kernel, for parameters with one weight decay."""

    kernel: str  # "adam", "adamw", "sgd"
    names: list[str]
    moments: list[Params]  # name -> P each, which the kernel writes
    counts: dict[str, Tensor]  # name -> shape=(), float32: updates with this one; for Adam
    options: dict[str, Any]


class Plan(NamedTuple):
    """One update by kernels. Nothing is written yet."""

    work: list[Change | Call]  # in this order
    rates: list[Tensor]  # the learning rates that are tensors, shape=() each; numbers are in [0, inf)
    state: Tree  # the transform's state after the update, with the moments of before


def plan(tx: Transform, updates: Params, state: Tree, params: Params) -> Plan | None:
    """Plan an update by kernels; None if they do not compute this transform or do not take these tensors.

    Args:
        tx: of the state.
        updates: name -> P: gradients.
        state: of the transform, before the update.
        params: name -> P.
    """
    work: list[Change | Call] = []
    found = _found(tx, state)
    new = None if found is None else _planned(work, found, updates, params)
    if new is None:
        return None
    rates = [call.options["lr"] for call in work if isinstance(call, Call)]
    return Plan(work, [rate for rate in rates if isinstance(rate, Tensor)], new)


def run(
    plan: Plan,
    updates: Params,
    params: Params,
    *,
    norm: Tensor,
    ready: Tensor,
    owned: bool,
    unused: Collection[str],
) -> tuple[Params, Tree]:
    """Do the work of a plan: that of ``Transform.update`` and of `apply_updates`. It writes into the updates.

    Args:
        plan: of these updates and parameters.
        updates: name -> P: gradients.
        params: name -> P.
        norm: of the updates, shape=().
        ready: shape=(), bool: where it is False, floating tensors with dimensions keep their values; the caller keeps
            the old ones of others.
        owned: write into the memory of parameters and moments; else into copies.
        unused: parameters that keep their values, and those of their moments.

    Returns:
        The parameters and the state after the update.
    """
    state, work = plan.state, plan.work
    if not owned:
        params, state, work = _on_copies(plan, params)
    refused, updates = (~ready).float(), dict(updates)
    for index, each in enumerate(work):
        if isinstance(each, Change):
            is_whole = index == 0 and len(each.names) == len(updates)
            given = {name: updates[name] for name in each.names}
            updates |= _changed(each, given, norm if is_whole else None)
            continue
        names = [name for name in each.names if name not in unused]
        if names:
            lists = [[named[name] for name in names] for named in (params, updates, *each.moments)]
            counts = [each.counts[name] for name in names] if each.counts else []
            foreach.fused_(each.kernel, lists, counts, {**each.options, "found_inf": refused})
    return params, state


# --- which kernel ---------------------------------------------------------------------------------------------------


class _Part(NamedTuple):
    """A part of a chain."""

    name: str  # of its kind; a masked decay is a decay
    options: dict[str, Any]
    state: Tree


class _Found(NamedTuple):
    """A transform whose last parts have a kernel, or have transforms inside."""

    tx: Transform
    changes: list[_Part]  # clipping and scaling
    tail: tuple[str, ...]  # the kinds of the last parts, of `_OPTIMIZERS` or `_NESTED`
    last: list[_Part]


def _found(tx: Transform, state: Tree) -> _Found | None:
    """The parts of a transform; None if there is no kernel for them."""
    parts = _parts(tx, state)
    names = tuple(part.name for part in parts)
    tail = next((known for known in (*_OPTIMIZERS, *_NESTED) if names[-len(known) :] == known), None)
    if tail is None or any(name not in ("clip", "scale") for name in names[: -len(tail)]):
        return None
    return _Found(tx, parts[: -len(tail)], tail, parts[-len(tail) :])


def _planned(work: list[Change | Call], found: _Found, updates: Params, params: Params) -> Tree | None:
    """Append the work of a transform; return its state after the update, or None if it has no plan."""
    _, changes, tail, last = found
    work += [Change(part.name, part.options, list(updates)) for part in changes]
    if tail in _NESTED:
        inner = (_partition if tail == ("partition",) else _inject)(work, last[0], updates, params)
        new = None if inner is None else [inner]
    else:
        new = _optimizer(work, tail, last, updates, params)
    return None if new is None else _nested(found.tx, iter([*(part.state for part in changes), *new]))


def _parts(tx: Transform, state: Tree) -> list[_Part]:
    """The parts of nested chains, in order."""
    kind = kind_of(tx)
    if kind is None:
        return [_Part("", {}, state)]
    if kind.name == "chain" and len(state) == len(kind.options["transforms"]):
        pairs = zip(kind.options["transforms"], state, strict=True)
        return [part for inner, own in pairs for part in _parts(inner, own)]
    inner = kind_of(kind.options["inner"]) if kind.name == "masked" else None
    if inner is not None and inner.name == "decay":
        return [_Part("decay", {**inner.options, "is_masked": True}, state)]
    return [_Part(kind.name, kind.options, state)]


def _nested(tx: Transform, states: Iterator[Tree]) -> Tree:
    """The inverse of `_parts`: the state of nested chains."""
    kind = kind_of(tx)
    if kind is None or kind.name != "chain":
        return next(states)
    return tuple([_nested(inner, states) for inner in kind.options["transforms"]])


def _partition(work: list[Change | Call], part: _Part, updates: Params, params: Params) -> Tree | None:
    groups, transforms = dict(part.state.groups), part.options["transforms"]
    used = {label: _found(transforms[label], group.inner) for label, group in groups.items() if group.selected}
    if None in used.values():  # before a rate is computed
        return None
    for label, found in used.items():
        selected = groups[label].selected
        if found is None or any(name not in updates for name in selected):
            return None  # `update` raises the error
        own = [{name: p for name, p in named.items() if name in selected} for named in (updates, params)]
        inner = _planned(work, found, own[0], own[1])
        if inner is None:
            return None
        groups[label] = groups[label]._replace(inner=inner)
    return part.state._replace(groups=groups)


def _inject(work: list[Change | Call], part: _Part, updates: Params, params: Params) -> Tree | None:
    tx, new = part.options["build"](part.state)
    found = _found(tx, part.state.inner)
    inner = None if found is None else _planned(work, found, updates, params)
    return None if inner is None else new._replace(inner=inner)


def _optimizer(
    work: list[Change | Call], tail: tuple[str, ...], last: list[_Part], updates: Params, params: Params
) -> list[Tree] | None:
    """Append the calls for the last parts of a chain; return their states after the update."""
    parts, states = dict(zip(tail, last, strict=True)), dict(zip(tail, [part.state for part in last], strict=True))
    adam, trace, moments = parts.get("adam"), parts.get("trace"), list[Params]()
    options: dict[str, Any] = {"momentum": 0.0, "nesterov": False}
    if adam is not None:
        options, moments = adam.options, [adam.state.mu, adam.state.nu]
    elif trace is not None:
        options, moments = trace.options, [trace.state.trace]
    decay = parts.get("decay")
    if decay is not None and "is_masked" in decay.options and any(name not in updates for name in decay.state.selected):
        return None  # `update` raises the error
    decays = [(list(updates), 0.0)] if decay is None else _decays(decay, updates)
    numbers = [*options.values(), *(decay for _, decay in decays)]
    if any(isinstance(number, Tensor) for number in numbers) or not _fit(params, updates, *moments):
        return None
    rate, scaled = _rate(parts["learning_rate"]), states["learning_rate"]
    if rate is None:
        return None
    states["learning_rate"] = scaled._replace(step=scaled.step + 1, learning_rate=rate_leaf(rate, scaled.step))
    counts: dict[str, Tensor] = {}
    if adam is not None:
        counts = by_name((update_counts(adam.state, updates) + 1).float(), updates)
        states["adam"] = adam.state._replace(step=adam.state.step + 1)
    for names, decay in decays:
        given = {**options, "lr": rate, "weight_decay": decay}
        work.append(Call(_OPTIMIZERS[tail], names, moments, counts, given))
    return list(states.values())


def _rate(part: _Part) -> Scalar | None:
    """The learning rate of this update; None for one that a kernel does not take."""
    step = part.state.step
    rate = rate_at(part.options["learning_rate"], step)
    if not isinstance(rate, Tensor):
        return rate if 0 <= rate < math.inf else None  # the step refuses it after `Transform.update`
    if tracing.followed([rate]):
        return None
    rate = rate.detach().to(step.device)
    return rate if rate.device.type == "cpu" else rate.float()  # the kernels on a GPU read a float32


def _decays(part: _Part, updates: Params) -> list[tuple[list[str], Scalar]]:
    """The parameters that decay, and those that do not, each with its weight decay."""
    selected = part.state.selected if "is_masked" in part.options else updates
    decaying, others = [name for name in updates if name in selected], [n for n in updates if n not in selected]
    groups = [(decaying, part.options["weight_decay"]), (others, 0.0)]
    return [(names, decay) for names, decay in groups if names]


def _fit(params: Params, *others: Params) -> bool:
    """True if a kernel may write into these tensors: plain ones, of one dtype and layout for each parameter."""
    for name, param in params.items():
        dtype, flat = param.dtype, param.is_contiguous()
        if dtype not in _DTYPES or param.device.type not in ("cpu", "cuda") or not (flat or _is_dense(param)):
            return False
        for other in others:
            leaf = other[name]
            if type(leaf) is not Tensor or leaf.dtype is not dtype or leaf.layout is not torch.strided:
                return False
            if not (leaf.is_contiguous() if flat else leaf.stride() == param.stride()):
                return False
    return tracing.may_overwrite(leaf for named in (params, *others) for leaf in named.values())


def _is_dense(leaf: Tensor) -> bool:
    """True if the elements fill a block of memory, each once."""
    return tensor_layout.extent(leaf) == leaf.numel() and not tensor_layout.overlaps(leaf)


# --- the work -------------------------------------------------------------------------------------------------------


def _on_copies(plan: Plan, params: Params) -> tuple[Params, Tree, list[Change | Call]]:
    """The parameters, the state and the work, with copies of what the kernels write."""
    moments = [named for each in plan.work if isinstance(each, Call) for named in each.moments]
    written = {id(named): named for named in (params, *moments)}
    leaves = [leaf for named in written.values() for leaf in named.values()]
    copies = iter(foreach.clone(leaves))  # by few launches on a GPU
    new = {key: dict(zip(named, copies, strict=False)) for key, named in written.items()}
    work = [
        each._replace(moments=[new[id(named)] for named in each.moments]) if isinstance(each, Call) else each
        for each in plan.work
    ]
    return new[id(params)], _with(new, plan.state), work


def _with(new: dict[int, Params], node: Tree) -> Tree:
    """A state with the new trees in the place of those with these ids."""
    if id(node) in new:
        return new[id(node)]
    if isinstance(node, dict):
        return {key: _with(new, value) for key, value in node.items()}
    if isinstance(node, tuple) and node:
        parts = [_with(new, part) for part in node]
        return type(node)(*parts) if hasattr(node, "_fields") else tuple(parts)
    return node


def _changed(change: Change, updates: Params, norm: Tensor | None) -> Params:
    """Scale or clip updates of at least 32 bits in place. The norm is that of the updates, if it is known."""
    if change.kind == "scale":
        return _scaled(updates, change.options["factor"])
    norm = global_norm(updates) if norm is None else norm
    max_norm, number = change.options["max_norm"], read(norm)
    if not isinstance(number, Tensor) and number + 2e-6 < 0.999 * max_norm:
        return updates  # the factor is 1, also when it is rounded
    return _scaled(updates, torch.clamp(max_norm / (norm + 1e-6), max=1.0))


def _scaled(updates: Params, factor: Scalar) -> Params:
    leaves = list(updates.values())
    for places in foreach.by_dtype(leaves):
        same = [leaves[index] for index in places]
        foreach.scale_(same, in_dtype(factor, same[0].dtype))
    return updates
