"""Products with the Hessian of a program's loss; eigenvalues and the trace of a matrix from its products with vectors.

No matrix is stored: a product costs about two gradients.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from . import rng
from .analysis import explained, plain_functions
from .errors import ConfigError, StateError
from .state import at_least, check_range, known_keywords, stacked
from .step import drawn_in_step, parts_for, wide
from .types import Params, Program, TrainState

_vjp: Any = torch.func.vjp  # the length of its result depends on has_aux
_CURE = "use operations that torch.func differentiates twice"
_Product = Callable[[Params], Params]
"""``vector -> matrix @ vector``, both with the names and shapes of the parameters."""


class Eigenvalues(NamedTuple):
    """Eigenvalues of a symmetric matrix, in descending order, with one eigenvector each."""

    values: Tensor  # shape=(k,), dtype of the parameters, at least float32; CPU
    vectors: Params  # name -> shape=(k, *P), unit 2-norm over all names together; the parameter's dtype and device


class Trace(NamedTuple):
    """An estimate of a trace."""

    mean: Tensor  # shape=(), at least float32
    standard_error: Tensor  # shape=(): of the mean; nan for a single sample


def hessian(program: Program, *, train: bool = True) -> Callable[..., Params]:
    r"""Return a function that multiplies the Hessian of the loss of a batch by a vector: :math:`\nabla^2 L(\theta) v`.

    The loss is the ``mean`` of the program's objective on the whole batch, as a function of ``state.params``; frozen
    parameters and buffers are constants. Two backward passes (Pearlmutter, 1994). The function has no state: it can be
    mapped over vectors by `torch.func.vmap` and compiled by `torch.compile`. In eager mode the state's key seeds
    dropout: all products with one state use one mask. Attention runs without fused kernels, which have no second
    derivative.

    Args:
        program: from `program`, not distributed.
        train: run the module in train mode. False: eval mode, with running statistics and without dropout.

    Returns:
        ``(state, batch, vector, *context) -> product``. ``vector`` and product have the names, shapes and dtypes of
        ``state.params``.

    Raises:
        ConfigError: the program has no objective or is distributed.
        StateError: from the function: the state is not a TrainState of one process, or the vector has other names or
            shapes than the parameters.
        StepContractError: from the function: torch.func does not accept the model, as with activation checkpointing.

    Example:
        >>> import torch, purestep as ps
        >>> net = torch.nn.Linear(2, 1, bias=False)
        >>> program = ps.program(net, ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1))
        >>> product = ps.curvature.hessian(program)
        >>> batch = torch.eye(2), torch.zeros(2, 1)  # the loss is |w|^2 / 2
        >>> product(program.init(device="cpu"), batch, {"weight": torch.tensor([[3.0, 4.0]])})
        {'weight': tensor([[3., 4.]])}
    """
    parts = parts_for(program, "curvature.hessian")

    def product(state: TrainState, batch: Any, vector: Params, *context: Any) -> Params:
        """``(state, batch, vector, *context) -> product``."""
        stacked.check_plain(state, where="state")
        vector = _named("vector", vector, state.params, "pass a dict with the names and shapes of state.params")

        def mean(params: Params) -> Tensor:
            return parts.loss(params, state, batch, context, train=train).mean

        def run() -> Params:
            with explained("curvature.hessian", _CURE), plain_functions.differentiable():
                _, multiply = _vjp(torch.func.grad(mean), state.params)
                return multiply(vector)[0]

        return drawn_in_step(state, run)

    return product


def _named(what: str, found: Any, like: Params, hint: str) -> Params:
    """Return the vectors in the order of ``like``; ``what`` names them in errors.

    Raises:
        StateError: names or shapes differ.
    """
    shapes = {name: p.shape for name, p in like.items()}
    others = {name: getattr(v, "shape", None) for name, v in found.items()} if isinstance(found, dict) else {}
    for name in {**shapes, **others}:
        if others.get(name) != shapes.get(name):
            raise StateError(
                f"the vector has shape {others.get(name)}, the parameter {shapes.get(name)}",
                where=f"{what}/{name}",
                hint=hint,
            )
    return {name: found[name] for name in like}


def _product(product: _Product, vector: Params, like: Params) -> Params:
    return _named("product", product(vector), like, "return a dict with the names and shapes of the vector")


@known_keywords
def eigenvalues(
    product: _Product,
    like: Params,
    *,
    k: Annotated[int, at_least(1)] = 1,
    which: Literal["LA", "SA", "LM", "BE"] = "LA",
    tol: float = 1e-4,
    max_iterations: int | None = None,
    seed: int = 0,
) -> Eigenvalues:
    """Compute extreme eigenvalues of a symmetric matrix from products with vectors, by Lanczos' method with restarts.

    Runs `scipy.sparse.linalg.eigsh` on the CPU; the products run where the parameters are. Needs SciPy.

    Args:
        product: ``vector -> matrix @ vector``, such as ``lambda v: hessian_product(state, batch, v)``, or the mean of
            such products over several batches.
        like: a tree with the names, shapes and devices of the vectors: ``state.params``.
        k: number of eigenvalues, at least 1 and less than the number of parameters.
        which: "LA": largest, "SA": smallest, "LM": largest in magnitude, "BE": both ends.
        tol: relative accuracy of the eigenvalues, at least 0; 0 is machine precision.
        max_iterations: restarts at most; None: 10 for each parameter.
        seed: of the first vector.

    Raises:
        ConfigError: ``k`` or ``which`` is out of range; SciPy is not installed; no convergence within
            ``max_iterations``; a product is not finite.
        StateError: a product has other names or shapes than ``like``. Their order does not matter.

    Example:
        >>> import torch, purestep as ps
        >>> matrix = torch.diag(torch.tensor([1.0, 5.0, 3.0, 2.0]))
        >>> found = eigenvalues(lambda v: {"w": matrix @ v["w"]}, {"w": torch.zeros(4)}, k=2)
        >>> [round(value, 3) for value in found.values.tolist()]
        [5.0, 3.0]
    """
    try:
        linalg: Any = importlib.import_module("scipy.sparse.linalg")
    except ImportError as error:
        raise ConfigError("SciPy is not installed", where="curvature", hint="pip install scipy") from error
    size = sum(p.numel() for p in like.values())
    check_range("curvature.eigenvalues", 1, size, cure=f"k={max(1, size - 1)}, below the number of weights", k=k)
    dtype = torch.float64 if any(p.dtype == torch.float64 for p in like.values()) else torch.float32

    def multiply(flat: Any) -> Any:
        vector = _shaped(torch.as_tensor(flat, dtype=dtype).reshape(-1), like)
        result = _flat(_product(product, vector, like), dtype)
        if not bool(result.isfinite().all()):
            raise ConfigError(
                "the product has numbers that are not finite",
                where="curvature.eigenvalues",
                hint='pass a state and a batch with a finite loss, or a program with precision="64-true"',
            )
        return result.numpy()

    first = torch.randn(size, generator=rng.generator(rng.key(seed), "lanczos"), dtype=dtype).numpy()
    operator = linalg.LinearOperator((size, size), matvec=multiply, dtype=first.dtype)
    try:
        values, vectors = linalg.eigsh(operator, k=k, which=which, tol=tol, maxiter=max_iterations, v0=first)
    except linalg.ArpackNoConvergence as error:
        raise ConfigError(
            f"{len(error.eigenvalues)} of {k} eigenvalues converged",
            where="curvature.eigenvalues",
            hint=f"pass max_iterations of more than {max_iterations or 10 * size}, or a larger tol={10 * tol:g}",
        ) from None
    except linalg.ArpackError as error:
        if multiply(first).any():
            text = f"Lanczos' method failed: {error}"
            raise ConfigError(text, where="curvature.eigenvalues", hint="pass seed=1, or tol=1e-4") from error
        values, vectors = np.zeros(k, first.dtype), np.eye(size, k, dtype=first.dtype)  # of the matrix 0
    order = values.argsort()[::-1]
    rows = [_shaped(torch.as_tensor(vectors[:, at].copy()), like) for at in order]
    stacked = {name: torch.stack([row[name] for row in rows]) for name in like}
    return Eigenvalues(torch.as_tensor(values[order].copy()), stacked)


@known_keywords
def trace(product: _Product, like: Params, *, samples: Annotated[int, at_least(1)] = 10, seed: int = 0) -> Trace:
    r"""Estimate the trace of a matrix from products with random signs (Hutchinson, 1990).

    The mean of :math:`v^\top A v` over vectors of independent signs. Its expectation is the trace; the variance of one
    sample is twice the sum of squares off the diagonal of a symmetric A.

    Args:
        product: as for `eigenvalues`.
        like: as for `eigenvalues`.
        samples: number of products, at least 1.
        seed: of the signs.

    Raises:
        ConfigError: ``samples`` is less than 1.
        StateError: as for `eigenvalues`.

    Example:
        >>> import torch, purestep as ps
        >>> found = trace(lambda v: {"w": torch.tensor([1.0, 5.0]) * v["w"]}, {"w": torch.zeros(2)}, samples=3)
        >>> found
        Trace(mean=tensor(6.), standard_error=tensor(0.))
    """
    generator = rng.generator(rng.key(seed), "hutchinson")
    size = sum(p.numel() for p in like.values())
    found: list[Tensor] = []
    for _ in range(samples):
        signs = torch.randint(2, (size,), generator=generator).mul_(2).sub_(1).float()
        vector = _shaped(signs, like)
        result = _product(product, vector, like)
        terms = [(vector[name].to(wide(p.dtype)) * result[name].to(wide(p.dtype))).sum() for name, p in like.items()]
        found.append(torch.stack(terms).sum())
    values = torch.stack(found)
    error = values.std() / math.sqrt(samples) if samples > 1 else torch.full_like(values[0], torch.nan)
    return Trace(values.mean(), error)


def _flat(params: Params, dtype: torch.dtype) -> Tensor:
    return torch.cat([p.detach().to("cpu", dtype).reshape(-1) for p in params.values()])


def _shaped(flat: Tensor, like: Params) -> Params:
    parts = flat.split([p.numel() for p in like.values()])
    return {name: part.view(p.shape).to(p.device, p.dtype) for (name, p), part in zip(like.items(), parts, strict=True)}
