"""Finding the logits in what a model returned, and the classes in the logits. Shapes are known when a graph is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from ..errors import StepContractError


def logits_of(where: str, outputs: Any) -> Tensor:
    """The tensor itself, or ``.logits`` or ``["logits"]`` of a model output.

    Raises:
        StepContractError: there is no such tensor.
    """
    found = outputs
    if isinstance(outputs, Mapping):
        found = cast(Mapping[str, Any], outputs).get("logits")
    elif not isinstance(outputs, Tensor):
        found = getattr(outputs, "logits", None)
    if isinstance(found, Tensor):
        return found.detach()
    raise StepContractError(
        f"the outputs are a {type(outputs).__name__} without logits",
        where=f"metrics.{where}",
        hint=f"lambda outputs, targets: metrics.{where}(outputs[0], targets)",
    )


def aligned(where: str, outputs: Any, targets: Tensor, *, shift: bool) -> tuple[Tensor, Tensor]:
    """Logits and targets; with ``shift`` the last output and the first target of each sequence are left out.

    Args:
        where: the metric's name, for errors.
        outputs: [N, d..., C] or any other shape without ``shift``.
        targets: [N, d...].
        shift: whether output t predicts target t + 1.

    Raises:
        StepContractError: no logits, or with ``shift`` other shapes than [N, T, C] and [N, T].
    """
    logits = logits_of(where, outputs)
    if not shift:
        return logits, targets.detach()
    if logits.dim() != 3 or logits.shape[:2] != targets.shape:
        raise StepContractError(
            f"logits {list(logits.shape)} and targets {list(targets.shape)}",
            where=f"metrics.{where}",
            hint="shift=True is for logits [N, T, C] and targets [N, T]",
        )
    return logits[:, :-1], targets[:, 1:].detach()


def classes_last(where: str, logits: Tensor, targets: Tensor, class_dim: int | None) -> Tensor:
    """Logits as [N, d..., C].

    Args:
        where: the metric's name, for errors.
        logits: [N, C, d...] or [N, d..., C].
        targets: [N, d...].
        class_dim: 1 or -1; None: whichever fits.

    Raises:
        StepContractError: both places fit, or neither does.
    """
    last = logits.movedim(class_dim, -1) if class_dim is not None else logits
    second = logits.movedim(1, -1) if logits.dim() > 1 else logits
    fits_last, fits_second = last.shape[:-1] == targets.shape, second.shape[:-1] == targets.shape
    if class_dim is None and logits.dim() > 2 and fits_last and fits_second:
        raise StepContractError(
            f"logits {list(logits.shape)} fit targets {list(targets.shape)} with the classes second and last",
            where=f"metrics.{where}",
            hint=f"functools.partial(metrics.{where}, class_dim=1)",
        )
    found = last if fits_last else second
    if logits.dim() < 2 or found.shape[:-1] != targets.shape or found.shape[-1] < 2 or targets.is_floating_point():
        raise StepContractError(
            f"outputs {list(logits.shape)} and targets {list(targets.shape)} ({targets.dtype}) are not logits over two "
            "or more classes and class indices",
            where=f"metrics.{where}",
            hint=f"functools.partial(metrics.{where}, threshold=0.0) for one logit a target",
        )
    return found


def one_a_target(where: str, logits: Tensor, targets: Tensor) -> Tensor:
    """Logits in the targets' shape, where there is one for each.

    Raises:
        StepContractError: there is not.
    """
    if logits.shape == targets.shape:
        return logits
    if logits.shape == (*targets.shape, 1):
        return logits.squeeze(-1)
    raise StepContractError(
        f"outputs {list(logits.shape)} and targets {list(targets.shape)}; a threshold needs one output a target",
        where=f"metrics.{where}",
        hint=f"metrics.{where} without a threshold, for one output a class",
    )
