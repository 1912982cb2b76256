"""`Transform`, a pair of functions; the composition of transforms; and the norm of all numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import ConfigError, StateError
from ..state import known_keywords
from ..torch_ext import complex_numbers, foreach, tracing
from ..types import Empty, Labels, Params, Tree
from .numerics import scalar_dtype

# Large leaves are reduced row by row: on a CPU one running float32 sum over 34 million numbers is wrong by 0.2 %.
_NORM_ROW = 1024
_LARGE = 64 * _NORM_ROW


def _one_label(params: Params) -> Labels:
    return dict.fromkeys(params, ())


class Kind(NamedTuple):
    """The computation of a transform of this package, as data.

    Args:
        name: of the computation.
        options: its numbers and the transforms inside of it.
        update: the function that this describes: if a transform has another one (`_replace`), it has no kind.
        takes_norms: the function has a private keyword argument ``norms``, see `Norms`.
    """

    name: str
    options: dict[str, Any]
    update: Callable[..., Any]
    takes_norms: bool = False


class Transform(NamedTuple):
    """A gradient transformation: two pure functions, and facts about them, for packing (`state.packed`).

    Example:
        >>> double = Transform(lambda params: Empty(), lambda updates, state, params: (
        ...     {name: 2 * u for name, u in updates.items()}, state))
        >>> params = {"w": torch.ones(2)}
        >>> double.update(params, double.init(params), params)[0]["w"].tolist()
        [2.0, 2.0]

    Args:
        init: ``params -> state``. Creates every tensor of the state; scalars are 0-d int64 or float32. Masks are
            resolved here, on the named tree, and stored in the structure of the state.
        update: ``(updates, state, params) -> (updates, state)``. A chain receives gradients; its result is added to
            the parameters. ``update`` does not modify its inputs, and keeps structure and dtypes.
        elementwise: True if each number of the update depends only on the same number of the inputs, on scalars, and
            on reductions over all values. ``update`` may then receive flat buffers instead of the named tensors. Where
            several processes hold pieces of the parameters, a user's transform that reduces needs False.
        labels: ``params -> {name: label}``. Parameters with equal labels and dtypes are treated alike and may share a
            buffer.
        kind: private; see `Kind`.
        evaluates: True if ``update`` evaluates the loss again: ``(gradients, state, params, *, value_and_grad) ->
            (the accepted parameters, state)``. ``value_and_grad(params)`` returns the loss of the same batch at other
            parameters, shape=(), and its gradients by name: with the same random numbers, and the buffers of before
            the step. At the parameters of the step it returns what the step has computed. Such a transform is a
            program's whole ``tx``, as `lbfgs`: no part of a chain, in eager mode, with one batch a step.
    """

    init: Callable[[Params], Tree]
    update: Callable[..., tuple[Params, Tree]]
    elementwise: bool = True
    labels: Callable[[Params], Labels] = _one_label
    kind: Kind | None = None
    evaluates: bool = False


ValueAndGrad = Callable[[Params], tuple[Tensor, Params]]
"""Parameters -> the loss of the step's batch, shape=(), and its gradients by name."""


def described(tx: Transform, name: str, *, takes_norms: bool = False, **options: Any) -> Transform:
    """The transform with a `Kind` for its ``update``."""
    return tx._replace(kind=Kind(name, options, tx.update, takes_norms))


def kind_of(tx: Transform) -> Kind | None:
    """The kind of a transform, if it describes the ``update`` that the transform has."""
    return tx.kind if tx.kind is not None and tx.kind.update is tx.update else None


def identity() -> Transform:
    """Return the updates unchanged.

    Example:
        >>> identity().init({"w": torch.ones(2)})
        Empty()
    """
    return stateless(lambda updates, params: updates, elementwise=True)


@known_keywords
def stateless(fn: Callable[[Params, Params], Params], *, elementwise: bool = False) -> Transform:
    """Build a transform without state from ``fn(updates, params) -> updates``.

    Example:
        >>> halve = stateless(lambda updates, params: {name: u / 2 for name, u in updates.items()})
        >>> halve.update({"w": torch.ones(1)}, Empty(), {})[0]["w"].item()
        0.5

    Args:
        fn: a pure function of the updates and the parameters.
        elementwise: see `Transform`. True makes compiled steps smaller; it is wrong if ``fn`` depends on names or on
            whole tensors.
    """

    def init(params: Params) -> Empty:
        del params  # No state.
        return Empty()

    def update(updates: Params, state: Empty, params: Params) -> tuple[Params, Empty]:
        return fn(updates, params), state

    return Transform(init, update, elementwise)


@known_keywords
def chain(*transforms: Transform) -> Transform:
    """Apply transforms one after another; the state is the tuple of their states.

    Example:
        >>> from purestep.optim import adamw, clip_by_global_norm, freeze
        >>> tx = chain(clip_by_global_norm(1.0), adamw(1e-3, weight_decay=0.1), freeze("encoder"))
        >>> params = {"encoder.weight": torch.ones(1), "head.weight": torch.ones(1)}
        >>> updates, state = tx.update(params, tx.init(params), params)
        >>> [f"{update.item():.4f}" for update in updates.values()]
        ['0.0000', '-0.0011']

    The order matters:

    1. Clipping comes first: it measures gradients.
    2. The optimizer is next. `adamw` adds the weight decay after Adam's scaling and before the learning rate.
    3. `freeze` comes last: it also removes the weight decay of its group.

    Args:
        transforms: applied from left to right. Chains nest.

    Raises:
        ConfigError: a part is not a `Transform`.
        StateError: at update, if the state has another number of parts.
    """
    parts: tuple[Any, ...] = transforms
    for number, part in enumerate(parts):
        if not isinstance(part, Transform):
            many = isinstance(part, list | tuple)
            raise ConfigError(
                f"part {number} is a {type(part).__name__}, not a Transform",
                where="chain",
                hint="pass the parts one by one: optim.chain(first, second)"
                if many
                else "call the factory: optim.adamw(1e-3)",
            )

    def init(params: Params) -> tuple[Tree, ...]:
        return tuple(tx.init(params) for tx in transforms)

    def update(
        updates: Params, state: tuple[Tree, ...], params: Params, norms: Norms | None = None
    ) -> tuple[Params, tuple[Tree, ...]]:
        if len(state) != len(transforms):
            raise StateError(
                f"the chain has {len(transforms)} transforms, the state {len(state)} parts",
                where="opt_state",
                hint="opt_state = tx.init(params)",
            )
        new_state: list[Tree] = []
        for tx, part in zip(transforms, state, strict=True):
            updates, new_part = updated(tx, updates, part, params, norms)
            new_state.append(new_part)
            norms = unknown(norms)
        return updates, tuple(new_state)

    def labels(params: Params) -> Labels:
        parts = [tx.labels(params) for tx in transforms]
        return {name: tuple(part[name] for part in parts) for name in params}

    whole = Transform(init, update, all(tx.elementwise for tx in transforms), labels)
    return described(whole, "chain", takes_norms=True, transforms=transforms)


def apply_updates(params: Params, updates: Params) -> Params:
    """Return ``params + updates``, rounded once to each parameter's dtype.

    Example:
        >>> apply_updates({"w": torch.ones(2)}, {"w": torch.full((2,), -0.5)})["w"].tolist()
        [0.5, 0.5]

    Args:
        params: name -> P.
        updates: name -> P, in the parameter's dtype or a wider one.
    """
    return {name: (param + updates[name]).to(param.dtype) for name, param in params.items()}


def global_norm(updates: Params) -> Tensor:
    """Return the 2-norm of all numbers together, accumulated in at least float32.

    Example:
        >>> global_norm({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}).item()
        5.0

    Args:
        updates: name -> P, on one device; may be empty (norm 0), or complex.

    Returns:
        shape=(); float64 if any leaf is float64, else float32.
    """
    if not updates:
        return torch.zeros(())
    dtype = scalar_dtype(updates)
    norms = _leaf_norms(list(map(complex_numbers.as_real, updates.values())), dtype)
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


class Norms(NamedTuple):
    """The norms of one step's updates.

    Args:
        compute: `global_norm`; on several processes, the norm of the whole parameters from this process's pieces.
        known: the norm of the present updates, shape=(); None: not computed yet.
    """

    compute: Callable[[Params], Tensor] = global_norm
    known: Tensor | None = None


def norm_of(updates: Params, norms: Norms | None) -> Tensor:
    """The norm of updates, shape=(); computed if it is not known."""
    if norms is None:
        return global_norm(updates)
    return norms.compute(updates) if norms.known is None else norms.known


def unknown(norms: Norms | None) -> Norms | None:
    """The same for other updates, whose norm is not known."""
    return None if norms is None else norms._replace(known=None)


def updated(
    tx: Transform,
    updates: Params,
    state: Tree,
    params: Params,
    norms: Norms | None,
    value_and_grad: ValueAndGrad | None = None,
) -> Any:
    """The result of ``tx.update``, which gets the norms, or the loss as a function, if it takes them.

    Raises:
        ConfigError: the transform evaluates the loss again, and is a part of another one.
    """
    if tx.evaluates:
        if value_and_grad is None:
            raise ConfigError(
                "a part of the transform evaluates the loss again, where the other parts would not apply",
                where="tx",
                hint="pass it alone: ps.program(model, objective, optim.lbfgs(1.0)); for weights that stay as they are "
                "call requires_grad_(False)",
            )
        return tx.update(updates, state, params, value_and_grad=value_and_grad)
    kind = kind_of(tx)
    if norms is None or kind is None or not kind.takes_norms:
        return tx.update(updates, state, params)
    return kind.update(updates, state, params, norms=norms)


def _leaf_norms(leaves: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    # On the CPU `leaf_norm` reduces a large leaf in memory order, so that plain and packed states get equal bits. On a
    # GPU packed states are those of compiled steps, whose bits may differ.
    listed = [
        leaf
        for leaf in leaves
        if type(leaf) is Tensor and leaf.dtype is dtype and (leaf.numel() < _LARGE or leaf.is_cuda)
    ]
    if len(listed) < 2 or not tracing.may_overwrite(listed):
        return [leaf_norm(leaf, dtype) for leaf in leaves]
    together = dict(zip(map(id, listed), foreach.norm(listed), strict=True))
    return [together[id(leaf)] if id(leaf) in together else leaf_norm(leaf, dtype) for leaf in leaves]


def leaf_norm(leaf: Tensor, dtype: torch.dtype) -> Tensor:
    """The 2-norm of one tensor, shape=(), accumulated in ``dtype``."""
    if leaf.numel() < _LARGE:
        return torch.linalg.vector_norm(leaf, dtype=dtype)
    # In memory order, so that a transposed weight has the same norm as in a packed state, bit for bit.
    flat = leaf.permute(sorted(range(leaf.dim()), key=lambda dim: -leaf.stride(dim))).flatten()
    rows, rest = flat.split([flat.numel() // _NORM_ROW * _NORM_ROW, flat.numel() % _NORM_ROW])
    norms = torch.linalg.vector_norm(rows.view(-1, _NORM_ROW), dim=1, dtype=dtype)
    return torch.linalg.vector_norm(
        torch.stack([torch.linalg.vector_norm(part, dtype=dtype) for part in (norms, rest)])
    )
