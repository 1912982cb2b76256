"""Whether a step is a pure function of its arguments: what `fit` looks at on the first calls, and unit tests at any.

`observe` makes the call that is wanted and a second one on the same arguments, and holds them against each other and
against what there was before. Versions of tensors alone do not do: they miss writes through ``.data`` and numpy, so
what is in the tensors is fingerprinted as well.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from .. import global_rng, tensor_layout, tree
from ..errors import StepContractError
from ..types import Metrics, Tree

_CHUNK = 1 << 20  # numbers fingerprinted at a time, which bounds the memory it takes
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ODD = 0x1E3779B97F4A7C15
_NOISE = 1e-2  # relative; what kernels that add in any order may do to a mean

Pair = tuple[Tree, Metrics]


class Impure(StepContractError):
    """What `observe` found; whoever called it says where in the run that was."""


# --- the arguments ----------------------------------------------------------------------------------------------------


class _Leaf(NamedTuple):
    version: int
    content: Tensor | None  # shape=(), dtype=int64
    value: Any  # of what is no tensor


class Untouched:
    """What goes into a call, as it was before it.

    Args:
        content: also what is in the tensors, which costs a pass over them.
        parts: name -> tree.
    """

    def __init__(self, *, content: bool = True, **parts: Tree) -> None:
        self._parts = parts
        self._before = {name: _leaves(part, content=content) for name, part in parts.items()}

    def check(self, *, content: bool = True) -> None:
        """Raise `Impure` for the first leaf that was written since, or for one that has come or gone."""
        for name, part in self._parts.items():
            before, after = self._before[name], _leaves(part, content=content)
            for path in (*before, *after):
                how = _written(before.get(path), after.get(path))
                if how:
                    where, hint = _join(name, path), "x + 1, not x.add_(1)"
                    if where.startswith(("state/params/", "state/frozen/")):
                        hint += "; for what a forward pass does to its weights, torch.nn.utils.parametrize"
                    raise Impure(f"the step writes what it was given{how}", where=where, hint=hint)


def _leaves(part: Tree, *, content: bool) -> dict[str, _Leaf]:
    weights: dict[torch.device, Tensor] = {}

    def leaf(found: Any) -> _Leaf:
        if not isinstance(found, Tensor):
            return _Leaf(0, None, found)
        return _Leaf(version(found), fingerprint(found, weights) if content else None, None)

    return {path: leaf(found) for path, found in tree.with_paths(tree.dicts(part))}


def _written(before: _Leaf | None, after: _Leaf | None) -> str:
    """How a leaf was written; "" where it was not."""
    if before is None or after is None:
        return ": a leaf was added" if before is None else ": a leaf is gone"
    if before.version != after.version or before.value is not after.value:
        return ", in place"
    if before.content is None or after.content is None or bool(before.content == after.content):
        return ""
    return ", past autograd (through .data, numpy or code in C)"


def version(leaf: Any) -> int:
    """How often a tensor was written in place; 0 for what does not count that."""
    if not isinstance(leaf, Tensor) or leaf.is_inference():
        return 0
    return leaf._version  # pyright: ignore[reportPrivateUsage]  # torch has no other


def fingerprint(leaf: Tensor, weights: dict[torch.device, Tensor]) -> Tensor | None:
    """A number that depends on every bit of the leaf and on its place, shape=(), dtype=int64, on its device. Of a
    sparse or nested tensor, on its parts.

    `torch.hash_tensor` is a plain XOR: it sees neither swapped numbers nor an even number of equal ones replaced.

    Args:
        leaf: of any dtype; None is the answer for what has no dense memory.
        weights: the multipliers by device, made here.
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
    """The states of the generators that belong to the caller."""
    return {
        "torch's": tuple(state.numpy().tobytes() for state in global_rng.torch_states()),
        **global_rng.host_states(),
    }


# --- the result -------------------------------------------------------------------------------------------------------


class Kind:
    """Structure, shapes, dtypes and devices of a state, which every step has to keep.

    Args:
        state: the one that goes in.
    """

    def __init__(self, state: Tree) -> None:
        self._signature = tree.signature(state)
        self._leaves = _described(state)

    def check(self, new: Tree) -> None:
        """Raise `Impure` with the first leaf that became something else."""
        if tree.signature(new) == self._signature:
            return
        before, after = self._leaves, _described(new)
        path = next((path for path in {**before, **after} if before.get(path) != after.get(path)), None)
        found = "" if path is None else f"{before.get(path, 'nothing')} became {after.get(path, 'nothing')}"
        raise Impure(
            f"the step changes its state: {found or 'other node types'}",
            where=_join("state", path or ""),
            hint="return a state of the structure, shapes, dtypes and devices that went in (.to(old.dtype))",
        )


def _described(state: Tree) -> dict[str, str]:
    def text(leaf: Any) -> str:
        if not isinstance(leaf, Tensor):
            return f"{type(leaf).__name__} {leaf!r}"[:80]
        return f"{list(leaf.shape)} {leaf.dtype}" + ("" if leaf.device.type == "cpu" else f" on {leaf.device}")

    return {path: text(leaf) for path, leaf in tree.with_paths(state)}


def _check_detached(pair: Pair, given: Tree) -> None:
    known = {id(leaf) for leaf in tree.leaves(given)}  # a parameter that was handed in may come out again
    for name, part in zip(("state", "metrics"), pair, strict=True):
        for path, leaf in tree.with_paths(part):
            if isinstance(leaf, Tensor) and leaf.requires_grad and (leaf.grad_fn is not None or id(leaf) not in known):
                raise Impure(
                    "carries a graph, which keeps its whole step in memory", where=_join(name, path), hint=".detach()"
                )


def check_repeated(first: Pair, second: Pair) -> None:
    """Raise `Impure` where two results of one input differ.

    On the CPU to the bit. Kernels on other devices may add in any order, unless they are told not to
    (`torch.use_deterministic_algorithms`): there metrics may differ by a hundredth, and floating leaves of the state by
    anything, since an optimizer makes whole steps of rounding errors.
    """
    hint = "everything a step reads must be in its arguments: no counters, clocks, caches or global generators"
    if tree.paths(first) != tree.paths(second):
        raise Impure("the second call on the same state and batch gives another structure", where="step", hint=hint)
    for name, one, other in zip(("state", "metrics"), first, second, strict=True):
        for (path, left), (_, right) in zip(tree.with_paths(one), tree.with_paths(other), strict=True):
            if not _equal(left, right, ordered=name == "metrics"):
                raise Impure(
                    "the second call on the same state and batch gives another value",
                    where=_join(name, path),
                    hint=hint,
                )


def _equal(left: Any, right: Any, *, ordered: bool) -> bool:
    """Whether two leaves are the same; ``ordered`` False: a floating one need not be, where sums have no order."""
    if not isinstance(left, Tensor) or not isinstance(right, Tensor):
        return type(left) is type(right) and left == right
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.is_floating_point() and left.itemsize == 1:  # torch does not compare these
        return torch.equal(left.view(torch.uint8), right.view(torch.uint8))
    if torch.equal(left, right) or bool(((left == right) | (left.isnan() & right.isnan())).all()):
        return True
    exact = left.device.type in ("cpu", "meta") or torch.are_deterministic_algorithms_enabled()
    if exact or not left.is_floating_point():
        return False
    return not ordered or torch.allclose(left, right, rtol=_NOISE, atol=_NOISE, equal_nan=True)


# --- what stays behind ------------------------------------------------------------------------------------------------


class _Births(TorchFunctionMode):
    """Weak references to the tensors that torch makes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[weakref.ref[Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id(arg) for arg in args}
        several = isinstance(result, tuple | list)
        for found in cast("list[Any]", result) if several else [result]:
            if isinstance(found, Tensor) and id(found) not in given:
                self.made.append(weakref.ref(found))
        return result

    def alive(self) -> list[Tensor]:
        """Those that still exist."""
        return [found for made in self.made if (found := made()) is not None]


def check_forgets(call: Callable[[], Any]) -> None:
    """Raise `Impure` where every call leaves tensors behind, as a list does that they are appended to.

    Args:
        call: made once; twice where the first leaves something, which may be a cache.
    """
    first = _traces(call)
    if first is None or not first.alive():
        return
    second = _traces(call)
    older, newer = first.alive(), second.alive() if second is not None else []
    if older and newer:
        kept = next((found for found in newer if found.grad_fn is not None), newer[0])
        graph = " with its graph" if kept.grad_fn is not None else ""
        raise Impure(
            f"every call keeps {len(newer)} tensors alive, one of them {list(kept.shape)} {kept.dtype}{graph}",
            where="step",
            hint="return what is to be kept as a metric; .item() or .detach() of what is only looked at",
        )


def _traces(call: Callable[[], Any]) -> _Births | None:
    births = _Births()
    try:
        with _uncompiled(), births:
            call()
    except Exception:  # no memory, code that such a mode stops: the call has been made before and has worked
        return None
    if births.alive():
        gc.collect()  # cycles are no leak
    return births


def _uncompiled() -> AbstractContextManager[Any]:
    # A module that is compiled on its own would be compiled anew under a mode.
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


# --- all of it --------------------------------------------------------------------------------------------------------


def observe(
    call: Callable[[], Pair],
    parts: dict[str, Tree],
    *,
    again: Callable[[], Pair] | None = None,
    leaks: bool = True,
) -> Pair:
    """The result of a call of a step, which must be a function of its arguments and of nothing else.

    Args:
        call: the step on its arguments.
        parts: those arguments: "state", and others by any name.
        again: the second call; ``call`` unless given.
        leaks: look for tensors that stay alive as well, by a third call.

    Raises:
        Impure: naming the kind of impurity and the leaf.
        Exception: what the first call raises.
    """
    with global_rng.locked():  # else another thread's draws would be this step's
        return _observed(call, parts, again or call, leaks=leaks)


def _observed(call: Callable[[], Pair], parts: dict[str, Tree], again: Callable[[], Pair], *, leaks: bool) -> Pair:
    watched, kind, drawn = Untouched(**parts), Kind(parts["state"]), _generators()
    first = call()
    watched.check()
    _check_generators(drawn)
    kind.check(first[0])
    _check_detached(first, parts["state"])
    # What a step hands out of its own memory would be overwritten by the second call.
    handed = Untouched(content=False, state=first[0], metrics=first[1])
    second = again()
    watched.check(content=False)
    _check_kept(handed)
    check_repeated(first, second)
    del second
    if leaks:
        check_forgets(again)
    return first


_SCOPED = "with rng.scoped(seed): ... (in eager mode alone), or a torch.Generator of its own"
_IN_TORCH = "draw with torch (torch.rand), which the key of the state seeds, or in the loader: as a mask in the batch"


def _check_generators(before: dict[str, Any]) -> None:
    for name, state in _generators().items():
        if state != before[name]:
            raise Impure(
                f"the step draws from {name} global generator",
                where="step",
                hint=_SCOPED if name == "torch's" else _IN_TORCH,
            )


def _check_kept(handed: Untouched) -> None:
    try:
        handed.check(content=False)
    except Impure as error:
        raise Impure(
            "the next call writes into what this one returned",
            where=error.where,
            hint="return tensors of its own: x.clone(), not a buffer that the step keeps",
        ) from None


def _join(*parts: str) -> str:
    return "/".join(filter(None, parts))
