"""The loss of a program as a function of its parameters, from which other derivatives than a step's are built."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .. import tree
from ..errors import ConfigError
from ..model import check_real, functional
from ..types import Loss, Params, Program, TrainState
from .loss_checks import check_loss
from .spec import Micro, Spec, sum_is_divided


class Parts(NamedTuple):
    """The parts of a program that derivatives are built from.

    Args:
        spec: of the program.
        loss: ``(params, state, batch, context, *, train) -> Loss``: the objective on the whole batch
            with these parameters and the other tensors of the state; ``mean`` is connected to ``params``. Metrics are
            detached; outputs are left out.
        with_gradients: ``(parts, form, state, batch, context) -> Micro`` in place of `gradient.gradients` -> the
            program that updates by it.
    """

    spec: Spec
    loss: Callable[..., Loss]
    with_gradients: Callable[[Callable[..., Micro]], Program]


def parts_of(spec: Spec, with_gradients: Callable[[Callable[..., Micro]], Program]) -> Parts:
    """Build the parts of a program.

    Args:
        spec: of the program.
        with_gradients: ``(spec, form, state, batch, context) -> Micro`` -> the program with this `Spec.gradients`.
    """

    def loss(
        params: Params,
        state: TrainState,
        batch: Any,
        context: tuple[Any, ...],
        *,
        train: bool,
    ) -> Loss:
        device = state.step.device
        bound = functional.bind(spec.template, params, state.frozen, state.buffers, train=train)
        bound.values = spec.values_at(state)
        with spec.policy.autocast(device):
            found = spec.objective(bound, spec.policy.cast(tree.dicts(batch)), *context)
        found = check_loss(found, device, train=True)
        return found._replace(weight=found.weight.detach(), metrics=tree.detach(found.metrics), outputs={})

    def replaced(compute: Callable[..., Micro]) -> Program:
        return with_gradients(lambda spec, *args: compute(parts_of(spec, _not_nested), *args))

    return Parts(spec, loss, replaced)


def _not_nested(gradients: Callable[..., Micro]) -> Program:
    raise AssertionError("a gradient function builds no program")


def parts_for(program: Program, where: str) -> Parts:
    """The parts of a program of `program`.

    Args:
        program: not distributed.
        where: the function that needs them, for the error.

    Raises:
        ConfigError: the program is a step of the user's own or an ensemble, runs on several processes, or has complex
            parameters.
    """
    static = program.static
    if static is None or static.made.parts is None:
        raise ConfigError("the program has no objective to differentiate", where=where, hint="pass a ps.program(...)")
    if static.members:
        raise ConfigError(
            f"the program is an ensemble of {static.members} members",
            where=where,
            hint="pass the program that ps.ensemble got, and the state of ps.member(state, 0)",
        )
    if static.stream:
        raise ConfigError(
            "the program runs on several processes",
            where=where,
            hint="pass the program that ps.distribute got, and the state of ps.full(state)",
        )
    check_real(static.made.parts.spec.template.train.model, where)
    return static.made.parts


def check_divisible(parts: Parts, where: str) -> None:
    """Check that the gradient of a batch is the weighted mean of those of its parts.

    Raises:
        ConfigError: the loss is a sum over the batch.
    """
    if parts.spec.is_sum:
        raise sum_is_divided("the gradient of a batch would not be the mean over its examples", where=where)
