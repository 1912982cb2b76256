"""Values that a step hands out besides its metrics: `Loss.outputs`, in the entry "outputs" of the metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from ..types import Metrics

_NAME = "outputs"


def outputs(metrics: Metrics) -> dict[str, Any]:
    """Return the outputs that a train step handed out with its metrics; none: {}. See `Loss`.

    Example:
        >>> import torch, purestep as ps
        >>> def objective(model, batch):
        ...     errors = (model(batch) - 1).square()
        ...     return ps.Loss(errors.mean(), len(batch), outputs={"errors": errors})
        >>> program = ps.program(torch.nn.Linear(2, 1), objective, ps.optim.sgd(0.1))
        >>> _, found = program.train_step(program.init(), torch.ones(4, 2))
        >>> sorted(found), outputs(found)["errors"].shape
        (['applied', 'grad_norm', 'loss', 'lr', 'outputs'], torch.Size([4, 1]))
    """
    found: Any = metrics.get(_NAME)
    return dict(cast(Mapping[str, Any], found)) if isinstance(found, Mapping) else {}


def measured(metrics: Metrics) -> Metrics:
    """Return the metrics without the outputs."""
    if not isinstance(metrics.get(_NAME), Mapping):
        return metrics
    return {name: mean for name, mean in metrics.items() if name != _NAME}


def with_outputs(metrics: Metrics, handed_out: Mapping[str, Any]) -> Metrics:
    """Return the metrics with outputs, if there are any."""
    added: Any = {_NAME: dict(handed_out)}
    return {**metrics, **added} if handed_out else metrics
