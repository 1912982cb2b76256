"""L-BFGS: steps along a direction from the last gradients, which evaluate the loss of one batch several times."""

from __future__ import annotations

import functools
import math
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor

from ..errors import StepContractError
from ..state import at_least, known_keywords
from ..torch_ext import complex_numbers, tracing
from ..types import Params
from .arguments import NonNegativeFloat, Rate
from .base import Transform, ValueAndGrad
from .counts import zero_count
from .numerics import rate_at
from .scale import rate_leaf


class LbfgsState(NamedTuple):
    """State of `lbfgs`. ``n`` counts the real numbers of all parameters, ``h`` is ``history_size``."""

    step: Tensor  # shape=(), dtype=int64: updates done
    learning_rate: Tensor  # shape=(), dtype=float32: of the last update
    iterations: Tensor  # shape=(), dtype=int64: of all updates
    evaluations: Tensor  # shape=(), dtype=int64: of the loss, in all updates
    stored: Tensor  # shape=(), dtype=int64: rows of the history in use, the oldest first
    gradient: Tensor  # shape=(n,): of the last iteration
    direction: Tensor  # shape=(n,): of the last iteration
    gradient_changes: Tensor  # shape=(h, n)
    param_changes: Tensor  # shape=(h, n)
    curvatures: Tensor  # shape=(h,): 1 / (gradient change . parameter change)
    sizes: Tensor  # shape=(2,): the size of the last step, and the scale of the initial inverse Hessian


@known_keywords
def lbfgs(
    learning_rate: Rate = 1.0,
    *,
    max_iter: Annotated[int, at_least(1)] = 20,
    max_eval: Annotated[int, at_least(1)] | None = None,
    tolerance_grad: NonNegativeFloat = 1e-7,
    tolerance_change: NonNegativeFloat = 1e-9,
    history_size: Annotated[int, at_least(1)] = 100,
    line_search_fn: Literal["strong_wolfe"] | None = "strong_wolfe",
) -> Transform:
    """L-BFGS, by `torch.optim.LBFGS` itself: one update does up to ``max_iter`` iterations on one batch.

    Example:
        >>> tx = lbfgs()
        >>> params = {"w": torch.tensor([3.0, -1.0])}
        >>> def value_and_grad(params):  # a step passes the loss of its batch
        ...     return params["w"].square().sum(), {"w": 2 * params["w"]}
        >>> _, grads = value_and_grad(params)
        >>> params, state = tx.update(grads, tx.init(params), params, value_and_grad=value_and_grad)
        >>> params["w"].abs().max().item() < 1e-6
        True

    Each iteration evaluates the loss of the batch once, or several times in the line search, with the random numbers
    of the step and the buffers of before it. The buffers after the step are those of one more pass at the accepted
    parameters. Metrics are those of the first evaluation. It suits small, full-batch problems (physics-informed
    networks, style transfer): the state holds ``2 * history_size + 2`` times the parameters.

    It is a program's whole ``tx``, with one batch a step, in eager mode (`Transform.evaluates`): in a `chain`, with
    ``accumulate``, ``sam``, a loss scale, several processes, or compiled it is refused. With ``microbatches`` each
    evaluation runs over the parts of the batch. The host reads the loss of each evaluation, and so waits for a GPU.
    If the accepted parameters are not finite, the step is not applied.

    Args:
        learning_rate: in [0, inf): the size of a step, in a line search of the first trial; or a schedule.
        max_iter: iterations of one update, at least 1.
        max_eval: evaluations of one update, at least 1; None: ``max_iter * 5 // 4``.
        tolerance_grad: an update ends if no entry of the gradient is larger.
        tolerance_change: an update ends if the parameters or the loss change by less.
        history_size: gradients that the direction depends on, at least 1.
        line_search_fn: "strong_wolfe", or None for steps of a fixed size, which is torch's default.

    Raises:
        ConfigError: an argument is out of range; from a step: it is a part of a chain or of another transform.
        StepContractError: from a step: it is compiled, or a derivative is taken through it.

    References:
        Nocedal and Wright, 2006, Numerical Optimization, algorithms 3.5, 3.6 and 7.5.
    """
    options: dict[str, Any] = {
        "max_iter": max_iter,
        "max_eval": max_eval,
        "tolerance_grad": tolerance_grad,
        "tolerance_change": tolerance_change,
        "history_size": history_size,
        "line_search_fn": line_search_fn,
    }

    def init(params: Params) -> LbfgsState:
        count = zero_count(params)
        dtype = functools.reduce(
            torch.promote_types, [complex_numbers.as_real(param).dtype for param in params.values()]
        )
        size = sum(complex_numbers.as_real(param).numel() for param in params.values())

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=count.device)

        return LbfgsState(
            step=count,
            learning_rate=rate_leaf(rate_at(learning_rate, count), count),
            iterations=count.clone(),
            evaluations=count.clone(),
            stored=count.clone(),
            gradient=zeros(size),
            direction=zeros(size),
            gradient_changes=zeros(history_size, size),
            param_changes=zeros(history_size, size),
            curvatures=zeros(history_size),
            sizes=zeros(2),
        )

    def update(
        updates: Params, state: LbfgsState, params: Params, *, value_and_grad: ValueAndGrad
    ) -> tuple[Params, LbfgsState]:
        if tracing.followed([*params.values(), *updates.values()]):
            raise StepContractError(
                "a derivative through its line search is not defined",
                where="lbfgs",
                hint="use an optimizer of purestep.optim: optim.adamw(1e-3)",
            )
        rate = float(rate_at(learning_rate, state.step))
        new = state._replace(step=state.step + 1, learning_rate=rate_leaf(rate, state.step))
        if not 0 <= rate < math.inf:
            return params, new  # the step refuses the rate
        leaves = {
            name: param.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
            for name, param in params.items()
        }
        optimizer = torch.optim.LBFGS(list(leaves.values()), lr=rate, **options)
        memory: dict[str, Any] = optimizer.state[next(iter(leaves.values()))]
        memory |= _to_torch(state)
        evaluations = 0

        def closure() -> Tensor:
            nonlocal evaluations
            evaluations += 1
            # The first evaluation is at the parameters of the step.
            at = params if evaluations == 1 else {name: leaf.detach() for name, leaf in leaves.items()}
            value, grads = value_and_grad(at)
            for name, leaf in leaves.items():
                leaf.grad = grads[name].detach().to(leaf.dtype).resolve_conj().contiguous()
            return value.detach()

        step: Any = optimizer.step
        step(closure)
        accepted = {name: leaf.detach().clone(memory_format=torch.preserve_format) for name, leaf in leaves.items()}
        return accepted, _from_torch(memory, new)

    return Transform(init, update, elementwise=False, evaluates=True)


def _to_torch(state: LbfgsState) -> dict[str, Any]:
    """The state under the keys of `torch.optim.LBFGS`, which writes into the gradient."""
    if not int(state.iterations):
        return {"func_evals": int(state.evaluations)}
    stored = int(state.stored)
    size, scale = state.sizes.unbind()

    def rows(history: Tensor) -> list[Tensor]:
        # A sum of products may depend on where its memory begins: each row is a separate tensor, as in torch.
        return [row.clone() for row in history[:stored]]

    return {
        "n_iter": int(state.iterations),
        "func_evals": int(state.evaluations),
        "d": state.direction,
        "t": size,
        "old_dirs": rows(state.gradient_changes),
        "old_stps": rows(state.param_changes),
        "ro": list(state.curvatures[:stored].unbind()),
        "H_diag": scale,
        "prev_flat_grad": state.gradient.clone(),
    }


def _from_torch(memory: dict[str, Any], old: LbfgsState) -> LbfgsState:
    """The inverse of `_to_torch`. Before the first iteration, where the gradient is small enough, there is nothing."""
    old = old._replace(evaluations=torch.full_like(old.evaluations, memory["func_evals"]))
    if not memory.get("n_iter") or "d" not in memory:
        return old
    like, stored = old.gradient, len(memory["old_dirs"])

    def rows(listed: list[Tensor], into: Tensor) -> Tensor:
        new = torch.zeros_like(into)
        if listed:
            torch.stack(listed, out=new[:stored])
        return new

    sizes = [torch.as_tensor(memory[key], dtype=like.dtype, device=like.device) for key in ("t", "H_diag")]
    return old._replace(
        iterations=torch.full_like(old.iterations, memory["n_iter"]),
        stored=torch.full_like(old.stored, stored),
        gradient=memory["prev_flat_grad"],
        direction=memory["d"],
        gradient_changes=rows(memory["old_dirs"], old.gradient_changes),
        param_changes=rows(memory["old_stps"], old.param_changes),
        curvatures=rows(memory["ro"], old.curvatures),
        sizes=torch.stack(sizes),
    )
