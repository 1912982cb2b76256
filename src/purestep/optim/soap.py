"""SOAP: Adam in the eigenbasis of Shampoo's preconditioner."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Annotated, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..state import at_least, known_keywords
from ..torch_ext import tracing
from ..types import Empty, Params, Tree
from .arguments import Decay, NonNegative, Rate
from .base import Transform, chain
from .complex_params import real_only
from .counts import no_updates, update_counts
from .numerics import (
    by_name,
    complement_power,
    decay_square,
    in_dtype,
    lerp,
    safe_sqrt,
    scalar_dtype,
    upcast,
    upcast_dtype,
    zeros_like,
    zeros_like_squares,
)
from .scale import decay_parts, scale_by_learning_rate
from .wrappers import Mask

Matrices: TypeAlias = dict[str, tuple[Tensor, ...]]
"""name -> one [n, n] for each preconditioned dimension of size n, at least float32."""


class ScaleBySoapState(NamedTuple):
    """State of `scale_by_soap`."""

    step: Tensor  # shape=(), dtype=int64: updates done
    mu: Params  # name -> P: mean of gradients
    nu: Params  # name -> P: mean of squared gradients, in the eigenbasis
    gram: Matrices  # mean of the gradient's products with itself
    basis: Matrices  # eigenvectors of `gram` as columns, by falling eigenvalue
    missed: Tree = Empty()  # see `counts`


@known_keywords
def scale_by_soap(
    b1: Decay = 0.95,
    b2: Decay = 0.95,
    eps: NonNegative = 1e-8,
    *,
    shampoo_beta: Decay | None = None,
    precondition_frequency: Annotated[int, at_least(1)] = 10,
    max_precond_dim: Annotated[int, at_least(1)] = 10_000,
) -> Transform:
    r"""Adam's direction in the eigenbasis of Shampoo's preconditioner.

    Example:
        >>> tx, params = scale_by_soap(), {"w": torch.tensor([[2.0, 0.0], [0.0, 1.0]])}
        >>> first, state = tx.update(params, tx.init(params), params)
        >>> second, state = tx.update(params, state, params)
        >>> [[round(value, 4) for value in u["w"].diagonal().tolist()] for u in (first, second)]
        [[0.0, 0.0], [1.0, 1.0]]

    A gradient :math:`G` is rotated to :math:`Q_L^\top G Q_R`, Adam's quotient of its means is rotated back. The bases
    are those of the running means of :math:`G G^\top` and :math:`G^\top G` (for each dimension of a kernel, with the
    others flattened). They are computed by `torch.linalg.eigh` at the first update, which otherwise changes nothing,
    and improved after every ``precondition_frequency`` updates by a power iteration and `torch.linalg.qr`.

    Vectors and scalars have no basis: this is Adam for them.

    The arguments are those of `soap`.

    References:
        Vyas et al., 2024, SOAP: Improving and Stabilizing Shampoo using Adam.
    """
    beta = b2 if shampoo_beta is None else shampoo_beta

    def init(params: Params) -> ScaleBySoapState:
        zeros = {name: _zeros(param, max_precond_dim) for name, param in params.items()}
        bases = {name: tuple(map(_identity_like, each)) for name, each in zeros.items()}
        mu, nu = zeros_like(params), zeros_like_squares(params)
        return ScaleBySoapState(**no_updates(params), mu=mu, nu=nu, gram=zeros, basis=bases)

    def update(updates: Params, state: ScaleBySoapState, params: Params) -> tuple[Params, ScaleBySoapState]:
        del params  # Not needed.
        dtype = scalar_dtype(updates)
        count = update_counts(state, updates)  # without this one, as the first one changes nothing
        begun, rank = by_name(count > 0, updates), {name: _dims(u, max_precond_dim) for name, u in updates.items()}
        correction = complement_power(b2, count, dtype).sqrt() / complement_power(b1, count, dtype)
        factors = by_name(torch.where(count > 0, correction, torch.zeros_like(correction)), updates)
        mu: Params = {}
        nu: Params = {}
        gram: Matrices = {}
        new: Params = {}
        for name, g in updates.items():
            basis, dims, wide = state.basis[name], rank[name], upcast(g)
            mu[name] = torch.where(begun[name], lerp(state.mu[name], g, 1 - b1), state.mu[name])
            squares = decay_square(state.nu[name], _rotated(wide, basis, dims), b2)
            nu[name] = torch.where(begun[name], squares, state.nu[name])
            mean, factor = _rotated(upcast(mu[name]), basis, dims), factors[name].to(wide.dtype)
            divisor = (safe_sqrt(nu[name]) + in_dtype(eps, wide.dtype)).to(wide.dtype)
            quotient = mean * factor / torch.where(begun[name], divisor, torch.ones_like(divisor))
            new[name] = _rotated(quotient, basis, dims, back=True).to(g.dtype)
            products = (_product(wide, dim) for dim in dims)
            gram[name] = tuple(
                lerp(old, product.to(old.dtype), 1 - beta)
                for old, product in zip(state.gram[name], products, strict=True)
            )
        basis, nu = _refreshed(gram, state.basis, nu, rank, by_name(count, updates), precondition_frequency)
        return new, state._replace(step=state.step + 1, mu=mu, nu=nu, gram=gram, basis=basis)

    return real_only(Transform(init, update, elementwise=False), "soap")


@known_keywords
def soap(
    learning_rate: Rate = 3e-3,
    b1: Decay = 0.95,
    b2: Decay = 0.95,
    eps: NonNegative = 1e-8,
    *,
    weight_decay: NonNegative = 0.01,
    mask: Mask | None = None,
    shampoo_beta: Decay | None = None,
    precondition_frequency: Annotated[int, at_least(1)] = 10,
    max_precond_dim: Annotated[int, at_least(1)] = 10_000,
) -> Transform:
    """SOAP, as its authors' code: Adam in the eigenbasis of Shampoo's preconditioner.

    Example:
        >>> tx, params = soap(0.5, weight_decay=0.0), {"w": torch.eye(2)}
        >>> state, seen = tx.init(params), []
        >>> for _ in range(2):
        ...     updates, state = tx.update(params, state, params)
        ...     seen.append(round(updates["w"][0, 0].item(), 4) + 0.0)
        >>> seen
        [0.0, -0.5]

    The parts are `scale_by_soap`, `add_decayed_weights` and `scale_by_learning_rate`. Weight decay is that of AdamW, as
    everywhere here: the authors' code decays the new weights rather than the old ones, and not at the first update.

    A matrix of m x n numbers has four more matrices in the state, of m x m and n x n numbers each, and every update has
    six more matrix products. In eager mode on a GPU the host waits for the device in every update, to see if the bases
    are due. A compiled step has two `torch.cond` instead: it is compiled by torch alone, also on a CPU, and slowly.

    Where the products have several eigenvalues near 0, their eigenvectors depend on rounding: a compiled step, or one
    on several processes, then trains as well, but not to the same numbers.

    Args:
        learning_rate: in [0, inf), or a schedule.
        b1: decay of the mean of gradients, in [0, 1).
        b2: decay of the mean of their squares, in [0, 1).
        eps: in [0, inf), outside the root, before Adam's correction of the bias.
        weight_decay: in [0, inf), decoupled.
        mask: the parameters that decay, as in `masked`; None: all.
        shampoo_beta: decay of the means of products, in [0, 1); None: ``b2``.
        precondition_frequency: updates between two computations of the bases, at least 1.
        max_precond_dim: a larger dimension (a vocabulary) is not rotated, at least 1.

    References:
        Vyas et al., 2024, SOAP: Improving and Stabilizing Shampoo using Adam.
    """
    direction = scale_by_soap(
        b1,
        b2,
        eps,
        shampoo_beta=shampoo_beta,
        precondition_frequency=precondition_frequency,
        max_precond_dim=max_precond_dim,
    )
    return chain(direction, *decay_parts(weight_decay, mask), scale_by_learning_rate(learning_rate))


def _dims(param: Tensor, most: int) -> tuple[int, ...]:
    """The dimensions that are rotated."""
    return tuple(dim for dim, size in enumerate(param.shape) if size <= most) if param.ndim > 1 else ()


def _zeros(param: Tensor, most: int) -> tuple[Tensor, ...]:
    sizes = [param.shape[dim] for dim in _dims(param, most)]
    return tuple(torch.zeros(n, n, dtype=upcast_dtype(param), device=param.device) for n in sizes)


def _identity_like(square: Tensor) -> Tensor:
    return torch.eye(square.shape[0], dtype=square.dtype, device=square.device)


def _rotated(x: Tensor, basis: Iterable[Tensor], dims: tuple[int, ...], *, back: bool = False) -> Tensor:
    """Multiply every rotated dimension by its basis, or by the inverse."""
    for dim, matrix in zip(dims, basis, strict=True):
        rotation = matrix.to(x.dtype) if back else matrix.to(x.dtype).mT
        rows = torch.movedim(x, dim, 0)
        x = torch.movedim((rotation @ rows.flatten(1)).reshape(rows.shape), 0, dim)
    return x


def _product(g: Tensor, dim: int) -> Tensor:
    """The products of the slices along a dimension. P -> [n, n]."""
    rows = torch.movedim(g, dim, 0).flatten(1)
    return rows @ rows.mT


# --- the bases --------------------------------------------------------------------------------------------------------


def _refreshed(
    gram: Matrices,
    basis: Matrices,
    nu: Params,
    dims: dict[str, tuple[int, ...]],
    counts: dict[str, Tensor],
    frequency: int,
) -> tuple[Matrices, Params]:
    """The bases and the squares in them, for the next update.

    Args:
        gram: of this update.
        basis: of this update.
        nu: of this update.
        dims: name -> the rotated dimensions.
        counts: name -> updates done with a basis, shape=().
        frequency: updates between two computations.
    """
    names = [name for name, rotated in dims.items() if rotated]
    if not names:
        return basis, nu
    parts = [_Part(basis[name], nu[name], gram[name]) for name in names]
    parts = _if_any([counts[name] == 0 for name in names], _begun, parts)
    due = [(counts[name] > 0) & (counts[name] % frequency == 0) for name in names]
    rotated = [dims[name] for name in names]
    parts = _if_any(due, lambda parts: [_improved(*each) for each in zip(parts, rotated, strict=True)], parts)
    new = dict(zip(names, parts, strict=True))
    bases = {name: new[name].basis if name in new else old for name, old in basis.items()}
    return bases, {name: new[name].nu if name in new else old for name, old in nu.items()}


class _Part(NamedTuple):
    """One parameter's basis, the squares in it, and the matrices that it belongs to."""

    basis: tuple[Tensor, ...]
    nu: Tensor
    gram: tuple[Tensor, ...]


def _if_any(flags: list[Tensor], change: Callable[[list[_Part]], list[_Part]], parts: list[_Part]) -> list[_Part]:
    """The changed parts where their flag is True. Nothing is computed if none is."""
    any_flag = torch.stack(flags).any()
    if tracing.may_read(any_flag) and not bool(any_flag):
        return parts
    if not tracing.in_graph():
        return _chosen(flags, change(parts), parts)

    # Plain tuples are what `torch.cond` takes.
    def changed(flags: tuple[Tensor, ...], *given: Any) -> Any:
        old = [_Part(*each) for each in given]
        found = _chosen(list(flags), change(old), old)
        return tuple([(tuple([each.contiguous() for each in part.basis]), part.nu.contiguous()) for part in found])

    def kept(flags: tuple[Tensor, ...], *given: Any) -> Any:
        del flags  # No part changes.
        copy = functools.partial(torch.clone, memory_format=torch.contiguous_format)
        return tuple([(tuple(map(copy, basis)), copy(nu)) for basis, nu, _ in given])

    found = torch.cond(any_flag, changed, kept, (tuple(flags), *map(tuple, parts)))
    return [part._replace(basis=basis, nu=nu) for part, (basis, nu) in zip(parts, found, strict=True)]


def _chosen(flags: list[Tensor], new: list[_Part], old: list[_Part]) -> list[_Part]:
    found: list[_Part] = []
    for flag, one, other in zip(flags, new, old, strict=True):
        pairs = zip(one.basis, other.basis, strict=True)
        basis = tuple([torch.where(flag, first, second) for first, second in pairs])
        found.append(_Part(basis, torch.where(flag, one.nu, other.nu), other.gram))
    return found


def _begun(parts: list[_Part]) -> list[_Part]:
    return [_Part(tuple([_eigenvectors(square) for square in part.gram]), part.nu, part.gram) for part in parts]


def _improved(part: _Part, dims: tuple[int, ...]) -> _Part:
    """One power iteration, with the columns sorted by their present eigenvalues."""
    found: list[Tensor] = []
    nu = part.nu
    for dim, square, old in zip(dims, part.gram, part.basis, strict=True):
        sizes = (old * (square @ old)).sum(0)
        order = sizes.argsort(descending=True)
        nu, sorted_basis = nu.index_select(dim, order), old.index_select(1, order)
        found.append(torch.linalg.qr(square @ sorted_basis)[0].contiguous())
    return _Part(tuple(found), nu, part.gram)


def _eigenvectors(gram: Tensor) -> Tensor:
    """Columns by falling eigenvalue. Numbers that are not finite would raise; the step refuses such an update."""
    usable = torch.isfinite(gram).all()
    vectors = torch.linalg.eigh(torch.where(usable, gram, _identity_like(gram)))[1]
    return vectors.flip(1).contiguous()  # the layout of the basis before it: a graph serves a whole run
