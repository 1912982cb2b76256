"""Check that a step is a pure function of its arguments, in `fit` at the first calls, and in unit tests.

`observe` calls the step twice with the same arguments. It compares the two results, and the arguments before and after.
Version counters of tensors miss writes through ``.data`` and numpy, so the contents are fingerprinted too.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .. import tree
from ..compile import Writes
from ..errors import StateError, StepContractError
from ..torch_ext import global_rng, hidden, host_generators, tensor_layout
from ..types import Metrics, Tree

_CHUNK = 1 << 20  # elements to fingerprint at a time, to bound the memory
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x1E3779B97F4A7C15
_NOISE = 1e-2  # relative; the error of a mean from kernels without a fixed order of addition

Pair = tuple[Tree, Metrics]


class Impure(StepContractError):
    """The step is not pure. The caller of `observe` adds the place in the run."""


# --- the arguments ----------------------------------------------------------------------------------------------------


class _Leaf(NamedTuple):
    version: int
    content: Tensor | None  # shape=(), dtype=int64
    value: Any  # of a leaf that is no tensor


class Unchanged:
    """A record of trees before a call, to check that the call does not change them.

    Args:
        content: also fingerprint the values, which takes a pass over them.
        parts: name -> tree.
    """

    def __init__(self, *, content: bool = True, **parts: Tree) -> None:
        self._parts = parts
        self._before = {name: _leaves(name, part, content=content) for name, part in parts.items()}

    def check(self, *, content: bool = True) -> None:
        """Raise `Impure` for the first leaf that was written, added or removed since."""
        for name, part in self._parts.items():
            before, after = self._before[name], _leaves(name, part, content=content)
            for path in (*before, *after):
                how = _written(before.get(path), after.get(path))
                if how:
                    where, hint = _join(name, path), "write x + 1, not x.add_(1)"
                    if where.startswith(("state/params/", "state/frozen/")):
                        hint += "; use torch.nn.utils.parametrize for weights that a forward pass computes"
                    raise Impure(f"the step writes its arguments{how}", where=where, hint=hint)


def _leaves(name: str, part: Tree, *, content: bool) -> dict[str, _Leaf]:
    weights: dict[torch.device, Tensor] = {}

    def leaf(found: Any) -> _Leaf:
        if not isinstance(found, Tensor):
            return _Leaf(0, None, found)
        return _Leaf(version(found), fingerprint(found, weights) if content else None, None)

    try:
        return {path: leaf(found) for path, found in tree.with_paths(tree.dicts(part))}
    except StateError as error:  # a key, or the depth
        raise StateError(error.what, where=name, hint=error.hint) from error


def _written(before: _Leaf | None, after: _Leaf | None) -> str:
    """Describe how a leaf was changed; "" if it was not."""
    if before is None or after is None:
        return ": a leaf was added" if before is None else ": a leaf was removed"
    if before.version != after.version or before.value is not after.value:
        return ", in place"
    if before.content is None or after.content is None or bool(before.content == after.content):
        return ""
    return ", past autograd (through .data, numpy or code in C)"


def version(leaf: Any) -> int:
    """The number of in-place writes to a tensor; 0 for a leaf that does not count them."""
    if not isinstance(leaf, Tensor) or leaf.is_inference():
        return 0
    return hidden.version(leaf)


def fingerprint(leaf: Tensor, weights: dict[torch.device, Tensor]) -> Tensor | None:
    """A hash of every bit of the tensor and its position, shape=(), dtype=int64, on its device.

    For a sparse or nested tensor, a hash of its parts. `torch.hash_tensor` is a plain XOR, which misses swapped values
    and an even number of equal replacements.

    Args:
        leaf: a tensor of any dtype. The result is None if its values cannot be read.
        weights: a cache of multipliers by device.
    """
    if leaf.device.type == "meta" or leaf.is_quantized:
        return None
    if not tensor_layout.is_dense(leaf):
        found = [fingerprint(part, weights) for part in tensor_layout.dense_parts(leaf)]
        total = torch.zeros((), dtype=torch.int64, device=leaf.device)
        return sum((part * (2 * at + 1) for at, part in enumerate(found) if part is not None), total)
    found = leaf.detach().resolve_conj().resolve_neg()
    if type(found) is not Tensor and type(found) is not torch.nn.Parameter:
        return None
    words = (torch.view_as_real(found) if found.is_complex() else found).contiguous().view(-1)
    words = words.view(_WORDS[words.itemsize])
    if words.device not in weights or weights[words.device].numel() < min(words.numel(), _CHUNK):
        count = torch.arange(1, min(words.numel(), _CHUNK) + 1, device=words.device)
        weights[words.device] = count * _ODD | 1
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for index, chunk in enumerate(words.split(_CHUNK)):
        total += (chunk.to(torch.int64) * weights[words.device][: chunk.numel()]).sum() * (2 * index + 1)
    return total


def _generators() -> dict[str, Any]:
    """The states of the caller's global generators."""
    numpys, pythons = host_generators.states()
    torchs = tuple(state.numpy().tobytes() for state in global_rng.torch_states())
    return {"torch's": torchs, "numpy's": numpys, "Python's": pythons}


# --- the result -------------------------------------------------------------------------------------------------------


class Kind:
    """Structure, shapes, dtypes and devices of a state, which every step must keep.

    Args:
        state: the state before the step.
    """

    def __init__(self, state: Tree) -> None:
        self._signature = tree.signature(state)
        self._leaves = _described(state)

    def check(self, new: Tree) -> None:
        """Raise `Impure` for the first leaf that differs."""
        if tree.signature(new) == self._signature:
            return
        before, after = self._leaves, _described(new)
        path = next((path for path in {**before, **after} if before.get(path) != after.get(path)), None)
        found = "" if path is None else f"{before.get(path, 'nothing')} became {after.get(path, 'nothing')}"
        raise Impure(
            f"the step changes its state: {found or 'other node types'}",
            where=_join("state", path or ""),
            hint="return a state with the structure, shapes, dtypes and devices of the old one (.to(old.dtype))",
        )


def _described(state: Tree) -> dict[str, str]:
    def text(leaf: Any) -> str:
        if not isinstance(leaf, Tensor):
            return f"{type(leaf).__name__} {leaf!r}"[:80]
        return f"{list(leaf.shape)} {leaf.dtype}" + ("" if leaf.device.type == "cpu" else f" on {leaf.device}")

    return {path: text(leaf) for path, leaf in tree.with_paths(state)}


def _check_detached(pair: Pair, given: Tree) -> None:
    known = {id(leaf) for leaf in tree.leaves(given)}  # the step may return an argument
    for name, part in zip(("state", "metrics"), pair, strict=True):
        for path, leaf in tree.with_paths(part):
            if isinstance(leaf, Tensor) and leaf.requires_grad and (leaf.grad_fn is not None or id(leaf) not in known):
                raise Impure(
                    "has an autograd graph, which keeps the whole step in memory",
                    where=_join(name, path),
                    hint="call .detach()",
                )


def check_repeated(first: Pair, second: Pair) -> None:
    """Raise `Impure` if two results for the same arguments differ.

    On the CPU all bits must be equal. On other devices kernels may add in any order, unless
    `torch.use_deterministic_algorithms` is set: metrics may then differ by 1 %, and floating leaves of the state by any
    amount, because an optimizer can turn a rounding error into a whole step.
    """
    hint = (
        "pass everything that the step reads as an argument: no counters, clocks, caches or generators (torch.randn "
        "without generator= draws from the state's key)"
    )
    if tree.paths(first) != tree.paths(second):
        raise Impure("the second call with the same state and batch returns another structure", where="step", hint=hint)
    for name, one, other in zip(("state", "metrics"), first, second, strict=True):
        for (path, left), (_, right) in zip(tree.with_paths(one), tree.with_paths(other), strict=True):
            if not _equal(left, right, ordered=name == "metrics"):
                raise Impure(
                    "the second call with the same state and batch returns another value",
                    where=_join(name, path),
                    hint=hint,
                )


def _equal(left: Any, right: Any, *, ordered: bool) -> bool:
    """True if two leaves are equal. With ``ordered=False``, floating leaves may differ if sums have no order."""
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return type(left) is type(right) and left == right
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.is_floating_point() and left.itemsize == 1:  # torch cannot compare these
        return torch.equal(left.view(torch.uint8), right.view(torch.uint8))
    if torch.equal(left, right) or bool(((left == right) | (left.isnan() & right.isnan())).all()):
        return True
    exact = left.device.type in ("cpu", "meta") or torch.are_deterministic_algorithms_enabled()
    if exact or not left.is_floating_point():
        return False
    return not ordered or torch.allclose(left, right, rtol=_NOISE, atol=_NOISE, equal_nan=True)


# --- writes and leaks --------------------------------------------------------------------------------------


class _Births(TorchFunctionMode):
    """Collects weak references to the tensors that torch operations create."""

    def __init__(self) -> None:
        super().__init__()
        self.created: list[weakref.ref[Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {id(arg) for arg in args}
        several = isinstance(result, tuple | list)
        for found in cast("list[Any]", result) if several else [result]:
            if isinstance(found, Tensor) and id(found) not in inputs:
                self.created.append(weakref.ref(found))
        return result

    def alive(self) -> list[Tensor]:
        """The tensors that still exist."""
        return [found for reference in self.created if (found := reference()) is not None]


def check_outside(call: Callable[[], Any]) -> None:
    """Raise `Impure` if every call writes a tensor that was there before, such as the statistics of a teacher, or keeps
    tensors alive, for example in a list.

    Args:
        call: the step. It is called once, and again if the first call writes or keeps a tensor, which may be a cache.
    """
    first = _traces(call)
    if first is None or not (first[0].alive() or first[1].found):
        return
    second = _traces(call)
    if second is None:
        return
    for memory, (_, how) in second[1].found.items():
        if memory in first[1].found:
            raise Impure(f"the step {how[0]}", where=how[1], hint=how[2])
    older, newer = first[0].alive(), second[0].alive()
    if older and newer:
        kept = next((found for found in newer if found.grad_fn is not None), newer[0])
        graph = " with its graph" if kept.grad_fn is not None else ""
        raise Impure(
            f"every call keeps {len(newer)} tensors alive, one of them {list(kept.shape)} {kept.dtype}{graph}",
            where="step",
            hint="return values to keep as metrics; call .item() or .detach() on values to inspect",
        )


def _traces(call: Callable[[], Any]) -> tuple[_Births, Writes] | None:
    births, writes = _Births(), Writes()
    try:
        # A module with its own torch.compile would be recompiled under a mode.
        eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
        with eager, births, writes:
            call()
    except Exception:  # out of memory, or the mode breaks the code: the call worked before
        return None
    if births.alive():
        gc.collect()  # reference cycles are no leak
    return births, writes


# --- the whole check --------------------------------------------------------------------------------------------------


def observe(
    call: Callable[[], Pair],
    parts: dict[str, Tree],
    *,
    again: Callable[[], Pair] | None = None,
    leaks: bool = True,
) -> Pair:
    """Call a step, check that it is pure, and return its result.

    Args:
        call: calls the step.
        parts: the arguments of the step: "state", and others by any name.
        again: the second call; by default ``call``.
        leaks: also check for tensors that stay alive, and for writes of tensors that are no arguments, with a third
            call.

    Raises:
        Impure: the step is not pure; the message has the reason and the leaf.
        Exception: the error of the first call.
    """
    again = again or call
    with global_rng.locked():  # else draws of another thread would count as this step's
        watched = Unchanged(**parts)
        kind, drawn = Kind(parts["state"]), _generators()
        first = call()
        watched.check()
        for name, state in _generators().items():
            if state != drawn[name]:
                cure = _SCOPED if name == "torch's" else _IN_TORCH
                raise Impure(f"the step draws from {name} global generator", where="step", hint=cure)
        kind.check(first[0])
        _check_detached(first, parts["state"])
        # If the step returns its own memory, the second call overwrites it.
        returned = Unchanged(content=False, state=first[0], metrics=first[1])
        second = again()
        watched.check(content=False)
        try:
            returned.check(content=False)
        except Impure as error:
            raise Impure(
                "the next call overwrites the result of this one",
                where=error.where,
                hint="return new tensors: x.clone(), not a buffer that the step keeps",
            ) from None
        check_repeated(first, second)
        del second
        if leaks:
            check_outside(again)
        return first


_SCOPED = "draw inside rng.scoped(seed) (only in eager mode), or from your own torch.Generator"
_IN_TORCH = "draw with torch (torch.rand), which the state's key seeds, or in the loader, as a mask in the batch"


def _join(*parts: str) -> str:
    return "/".join(filter(None, parts))
