"""The statistics of BatchNorm for given weights, as `torch.optim.swa_utils.update_bn` computes them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import nn

from .. import rng, tree
from ..model import functional
from ..state import views
from ..torch_ext import hidden
from ..types import Batch, Empty, Exchange, Params, TrainState
from .loss_checks import rows_of
from .random_draws import drawn
from .spec import Spec


class Statistics:
    """Passes over data that average the statistics of each layer with equal shares.

    Args:
        spec: of a program.
        state: of this program; its weights of ``view`` are used.
        view: as in `purestep.view`.
        exchange: of a step on several processes, each of which passes its rows; None: one process.
        whole: (state) -> the state with whole weights.
    """

    def __init__(
        self,
        spec: Spec,
        state: TrainState,
        view: str | None,
        exchange: Exchange | None = None,
        whole: Callable[[TrainState], TrainState] = lambda state: state,
    ) -> None:
        self._spec = spec
        self._state = state
        self._exchange = exchange
        self._view = views.default_view(state) if view is None else view
        self._chosen = whole(views.view(state, self._view))
        self._template = functional.rewritten(spec.template, _average_equally)
        found = (name for layer in _layers(self._template.train.model) for name in _buffers(*layer))
        self.names = tuple(name for name in found if name in self._chosen.buffers)
        """Names of the buffers that hold statistics; none without BatchNorm in train mode."""
        self.buffers: Params = {
            name: _reset(name, value) if name in self.names else value for name, value in self._chosen.buffers.items()
        }

    def add(self, batch: Batch, index: int) -> None:
        """Run the objective on a batch in train mode, without gradients."""
        spec, chosen, exchange = self._spec, self._chosen, self._exchange
        rows, counts = rows_of(batch)

        def forward() -> Params:
            bound = functional.bind(self._template, chosen.params, chosen.frozen, self.buffers, train=True)
            bound.values = spec.values_at(chosen)
            with spec.policy.autocast(chosen.step.device):
                spec.objective(bound, spec.policy.cast(tree.dicts(rows)))
            return bound.buffers

        stream = () if exchange is None else exchange.stream
        number = rng.mix(int(chosen.key[0]), "statistics", index, *stream)
        with torch.no_grad(), nullcontext() if exchange is None else exchange.call(counts):
            found = drawn(forward, number, chosen.step.device)
        after = {name: found[name].detach() for name in self.names}
        if exchange is not None:
            held = torch.ones((), device=chosen.step.device) if counts is None else counts.to(chosen.step.device)
            after = exchange.buffers({name: self.buffers[name] for name in self.names}, after, held)
        self.buffers = self.buffers | after

    def state(self) -> TrainState:
        """Return the state with the statistics in the buffers of its view."""
        found, state = {name: self.buffers[name] for name in self.names}, TrainState(*self._state)
        if self._view == "ema" and not isinstance(state.ema.buffers, Empty):
            old = state.ema.buffers
            return state._replace(
                ema=state.ema._replace(buffers={**old, **{n: found[n].to(old[n].dtype) for n in found}})
            )
        return state._replace(buffers={**state.buffers, **found})


def _layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    return [(name, part) for name, part in model.named_modules() if hidden.is_batch_norm(part) and part.training]


def _buffers(name: str, layer: nn.Module) -> list[str]:
    own = ("running_mean", "running_var", "num_batches_tracked")
    return [f"{name}.{part}" if name else part for part in own if getattr(layer, part, None) is not None]


def _average_equally(model: nn.Module) -> None:
    """With ``momentum=None`` torch divides by the number of batches so far."""
    for _, layer in _layers(model):
        vars(layer)["momentum"] = None


def _reset(name: str, value: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(value) if name.endswith("running_var") else torch.zeros_like(value)
