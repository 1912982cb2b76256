"""`refresh_batchnorm`: the statistics of BatchNorm for the weights of a state."""

from __future__ import annotations

from typing import Any

from .. import data
from ..errors import ConfigError
from ..loop import ranks
from ..state import stacked
from ..types import Program, TrainState


def refresh_batchnorm(
    program: Program, state: TrainState, loader: Any, *, view: str | None = None, name: str = "train"
) -> TrainState:
    """Return the state with the BatchNorm statistics of its weights, as `torch.optim.swa_utils.update_bn`.

    Example:
        >>> import torch, purestep as ps
        >>> net = torch.nn.Sequential(torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1))
        >>> program = ps.program(net, ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1), ema=ps.ema.swa(10))
        >>> batches = [(torch.full((4, 2), value), torch.ones(4, 1)) for value in (1.0, 3.0)]
        >>> refresh_batchnorm(program, program.init(), batches).buffers["0.running_mean"]
        tensor([2., 2.])

    Averaged weights (`ema.swa`, `ema.average`) have other activations than the weights of training, whose statistics
    the buffers hold. This runs the objective on every batch in train mode without gradients, and averages the means and
    variances of the batches with equal shares. The result is for evaluation and export: training on it would go on with
    these statistics. The given state does not change.

    With a distributed program every process calls this with the whole loader, as `evaluate`. With ``batchnorm="sync"``
    the statistics are those of the whole batches; otherwise those of the processes' rows, averaged as in training.

    Layers that `keep_eval` holds in eval mode, and buffers of other layers, keep their values. Without BatchNorm the
    state is returned as it is, and the loader is not read.

    Args:
        program: from `program`.
        state: of this program; batches move to its device.
        loader: of training batches, as for `fit`; one epoch is read.
        view: "params" or "ema". None: "ema" if the state has an average. Of a state whose average has buffers
            (``buffers="average"``) these get the statistics, else ``state.buffers`` do.
        name: of the loader, for messages.

    Raises:
        ConfigError: the program is not from `program`, or is an ensemble; or ``view`` has another value.
        DataError: an empty loader, or a batch that the objective cannot read.
        RankError: several processes without a distributed state and program; a loader that cannot be divided among
            them.
        StateError: the state is no TrainState of one model, or has no average for the view "ema".
    """
    where = "refresh_batchnorm"
    stacked.check_train_state(state, where=where)
    if program.static is None or program.static.made.statistics is None:
        raise ConfigError(
            "the program has no model", where=where, hint="pass the program that ps.program(...) returned"
        )
    if program.static.members:
        raise ConfigError(
            f"the program is an ensemble of {program.static.members} members",
            where=where,
            hint="call it for each member, with the program that ps.ensemble got: ps.stack([ps.refresh_batchnorm("
            "program, ps.member(state, i), loader) for i in range(members)])",
        )
    stacked.check_plain(state, where=where, pieces=True)
    found = program.static.made.statistics(state, view)
    if not found.names:
        return state
    how: dict[str, Any] = {"program": program, "seed": int(state.key[0]), "repeats": True}
    with ranks.opened(loader, state, where=where, name=name, **how) as feed:
        for index, batch in enumerate(data.Prefetched(feed.epoch(0), data.device_of(state), name=name)):
            try:
                found.add(batch, index)
            except Exception as error:
                error.add_note(f"in {where}, {name}, batch {index + 1}")
                raise
    return found.state()
