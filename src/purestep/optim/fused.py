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

from .. import tree
from ..torch_ext import foreach, read, tensor_layout, tracing
from ..types import Params, Tree
from .arguments import Scalar
from .base import Kind, Transform, global_norm, kind_of
from .counts import update_counts
from .numerics import by_name, in_dtype, rate_at
from .scale import rate_leaf

_torch: Any = torch  # torch's stubs do not export the kernels
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


class Change(NamedTuple):
    """Updates to clip or to scale in place."""

    kind: Kind
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
    new = _planned(work, tx, updates, state, params)
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
    ready: Tensor | None = None,
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
            the old ones of others. None: True.
        owned: write into the memory of parameters and moments; else into copies.
        unused: parameters that keep their values, and those of their moments.

    Returns:
        The parameters and the state after the update.
    """
    state, work = plan.state, plan.work
    if not owned:
        params, state, work = _on_copies(plan, params)
    refused, updates = None if ready is None else (~ready).float(), dict(updates)
    for index, each in enumerate(work):
        if isinstance(each, Change):
            is_whole = index == 0 and len(each.names) == len(updates)
            given = {name: updates[name] for name in each.names}
            updates |= _changed(each.kind, given, norm if is_whole else None)
            continue
        names = [name for name in each.names if name not in unused]
        if names:
            lists = [[named[name] for name in names] for named in (params, updates, *each.moments)]
            counts = [each.counts[name] for name in names] if each.counts else []
            launch(each.kernel, lists, counts, {**each.options, "found_inf": refused})
    return params, state


# --- which kernel ---------------------------------------------------------------------------------------------------


def _planned(work: list[Change | Call], tx: Transform, updates: Params, state: Tree, params: Params) -> Tree | None:
    """Append the work of a transform; return its state after the update, or None if it has no plan."""
    kind = kind_of(tx)
    if kind is None:
        return None
    if kind.name == "partition":
        groups = dict(state.groups)
        for label, group in state.groups.items():
            if any(name not in updates for name in group.selected):
                return None  # `update` raises the error
            if group.selected:
                own = [{name: p for name, p in named.items() if name in group.selected} for named in (updates, params)]
                inner = _planned(work, kind.options["transforms"][label], own[0], group.inner, own[1])
                if inner is None:
                    return None
                groups[label] = group._replace(inner=inner)
        return state._replace(groups=groups)
    if kind.name == "inject":
        built, new = kind.options["build"](state)
        inner = _planned(work, built, updates, state.inner, params)
        return None if inner is None else new._replace(inner=inner)
    return _planned_chain(work, tx, updates, state, params)


class _Part(NamedTuple):
    """A part of a chain."""

    tx: Transform
    state: Tree


def _planned_chain(
    work: list[Change | Call], tx: Transform, updates: Params, state: Tree, params: Params
) -> Tree | None:
    parts = _parts(tx, state)
    names = tuple(_name(part.tx) for part in parts)
    if not names:
        return None
    if names[-1] in ("partition", "inject"):
        tail = names[-1:]
    else:
        tail = next((known for known in _OPTIMIZERS if names[-len(known) :] == known), None)
    if tail is None or any(name not in ("clip", "scale") for name in names[: -len(tail)]):
        return None
    states = [part.state for part in parts]
    for part in parts[: -len(tail)]:
        kind = kind_of(part.tx)
        assert kind is not None
        work.append(Change(kind, list(updates)))
    if tail in _OPTIMIZERS:
        found = _optimizer(work, dict(zip(tail, parts[-len(tail) :], strict=True)), tail, updates, params)
        if found is None:
            return None
        states[-len(tail) :] = found
    else:
        states[-1] = _planned(work, parts[-1].tx, updates, states[-1], params)
        if states[-1] is None:
            return None
    return _nested(tx, iter(states))


def _parts(tx: Transform, state: Tree) -> list[_Part]:
    """The parts of nested chains, in order."""
    kind = kind_of(tx)
    if kind is None or kind.name != "chain" or len(state) != len(kind.options["transforms"]):
        return [_Part(tx, state)]
    pairs = zip(kind.options["transforms"], state, strict=True)
    return [part for inner, own in pairs for part in _parts(inner, own)]


def _nested(tx: Transform, states: Iterator[Tree]) -> Tree:
    """The inverse of `_parts`: the state of nested chains."""
    kind = kind_of(tx)
    if kind is None or kind.name != "chain":
        return next(states)
    return tuple([_nested(inner, states) for inner in kind.options["transforms"]])


def _name(tx: Transform) -> str:
    """The name of a part's kind; a masked decay is a decay."""
    kind = kind_of(tx)
    if kind is None:
        return ""
    return "decay" if kind.name == "masked" and _name(kind.options["inner"]) == "decay" else kind.name


def _optimizer(
    work: list[Change | Call], parts: dict[str, _Part], tail: tuple[str, ...], updates: Params, params: Params
) -> list[Tree] | None:
    """Append the calls for an optimizer; return the states of its parts after the update."""
    options: dict[str, Any] = {}
    moments: list[Params] = []
    counts: dict[str, Tensor] = {}
    states = {name: part.state for name, part in parts.items()}
    for name in ("adam", "trace"):
        kind = kind_of(parts[name].tx) if name in parts else None
        options |= {} if kind is None else kind.options
    if "adam" in parts:
        own = states["adam"]
        moments = [own.mu, own.nu]
    elif "trace" in parts:
        moments = [states["trace"].trace]
    else:
        options = {"momentum": 0.0, "nesterov": False}
    groups = _decays(parts["decay"], updates) if "decay" in parts else [(list(updates), 0.0)]
    numbers = [*options.values(), *(amount for _, amount in groups)]
    if any(isinstance(number, Tensor) for number in numbers) or not _fit(params, updates, *moments):
        return None
    scaled = states["learning_rate"]
    rate = _rate(parts["learning_rate"])
    if rate is None:
        return None
    if "adam" in parts:
        own = states["adam"]
        counts = by_name((update_counts(own, updates) + 1).float(), updates)
        states["adam"] = own._replace(step=own.step + 1)
    states["learning_rate"] = scaled._replace(step=scaled.step + 1, learning_rate=rate_leaf(rate, scaled.step))
    for names, amount in groups:
        given = {**options, "lr": rate, "weight_decay": amount}
        work.append(Call(_OPTIMIZERS[tail], names, moments, counts, given))
    return list(states.values())


def _rate(part: _Part) -> Scalar | None:
    """The learning rate of this update; None for one that a kernel does not take."""
    kind, step = kind_of(part.tx), part.state.step
    assert kind is not None
    rate = rate_at(kind.options["learning_rate"], step)
    if isinstance(rate, Tensor):
        if tracing.followed([rate]):
            return None
        rate = rate.detach().to(step.device)
        return rate if rate.device.type == "cpu" else rate.float()  # the kernels on a GPU read a float32
    return rate if 0 <= rate < math.inf else None  # `update` gives the step a number to refuse


def _decays(part: _Part, updates: Params) -> list[tuple[list[str], Scalar]]:
    """The parameters that decay, and those that do not, each with its weight decay."""
    kind = kind_of(part.tx)
    assert kind is not None
    selected = updates
    if kind.name == "masked":
        selected, kind = part.state.selected, kind_of(kind.options["inner"])
        assert kind is not None
    amount = kind.options["weight_decay"]
    others = [name for name in updates if name not in selected]
    groups = [([name for name in updates if name in selected], amount), (others, 0.0)]
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


def copied(named: Params) -> Params:
    """Copies of plain tensors with their strides, by few launches on a GPU."""
    return dict(zip(named, foreach.clone(list(named.values())), strict=True))


def _on_copies(plan: Plan, params: Params) -> tuple[Params, Tree, list[Change | Call]]:
    """The parameters, the state and the work, with copies of what the kernels write."""
    calls = {id(each): each for each in plan.work if isinstance(each, Call)}
    moments = {id(named): named for call in calls.values() for named in call.moments}
    copies = {key: copied(named) for key, named in moments.items()}
    new = {id(leaf): copies[key][name] for key, named in moments.items() for name, leaf in named.items()}
    work = [
        each._replace(moments=[copies[id(named)] for named in each.moments]) if isinstance(each, Call) else each
        for each in plan.work
    ]
    return copied(params), tree.map(lambda leaf: new.get(id(leaf), leaf), plan.state), work


def _changed(kind: Kind, updates: Params, norm: Tensor | None) -> Params:
    """Scale or clip updates of at least 32 bits in place. The norm is that of the updates, if it is known."""
    if kind.name == "scale":
        return _scaled(updates, kind.options["factor"])
    norm = global_norm(updates) if norm is None else norm
    max_norm, number = kind.options["max_norm"], read(norm)
    if not isinstance(number, Tensor) and number < 0.999 * max_norm:
        return updates  # the factor is 1
    return _scaled(updates, torch.clamp(max_norm / (norm + 1e-6), max=1.0))


def _scaled(updates: Params, factor: Scalar) -> Params:
    leaves = list(updates.values())
    for places in foreach.by_dtype(leaves):
        same = [leaves[index] for index in places]
        foreach.scale_(same, in_dtype(factor, same[0].dtype))
    return updates


def launch(kernel: str, lists: list[list[Tensor]], counts: list[Tensor], options: dict[str, Any]) -> None:
    """Call a kernel of torch, once for each dtype.

    Args:
        kernel: "adam", "adamw" or "sgd".
        lists: parameters, updates, and the moments; float32 or float64, of one dtype for each parameter. The kernel
            writes into the first and the last, and may write temporaries into the updates.
        counts: for Adam, shape=() each, float32: updates with this one. One tensor may stand for several parameters.
        options: ``lr``, ``weight_decay``, the optimizer's numbers, and ``found_inf``: shape=(), float32, 1 leaves
            everything as it was; or None.

    Example:
        >>> w, fixed = [torch.ones(1)], {"lr": 0.5, "momentum": 0.0, "nesterov": False, "weight_decay": 0.0}
        >>> launch("sgd", [w, [torch.ones(1)]], [], fixed)
        >>> w
        [tensor([0.5000])]
    """
    for places in foreach.by_dtype(lists[0]):
        params, updates, *moments = [[each[index] for index in places] for each in lists]
        if kernel == "sgd":
            sums = moments[0] if moments else []
            fixed = {"dampening": 0.0, "maximize": False, "is_first_step": False}
            _torch._fused_sgd_(params, updates, sums, **fixed, **options)
        else:
            call = _torch._fused_adamw_ if kernel == "adamw" else _torch._fused_adam_
            steps = [counts[index] for index in places]
            call(params, updates, *moments, [], steps, amsgrad=False, maximize=False, **options)
