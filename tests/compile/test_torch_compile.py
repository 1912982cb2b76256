"""A user's own `torch.compile` of the eager step, which also takes models that a trace refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import assert_trees_close, image_batch, tiny_convnet, tiny_mlp, vector_batch
from torch import Tensor, nn

import purestep as ps
from purestep import optim
from purestep.errors import StepContractError

pytestmark = [
    pytest.mark.compile,
    # Raised by Dynamo itself.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]

TX = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))
ENTROPY = ps.supervised(nn.CrossEntropyLoss(), metrics={"accuracy": ps.metrics.accuracy})


def trained(step: Any, state: ps.TrainState, batches: list[Any]) -> tuple[ps.TrainState, list[Any]]:
    metrics = []
    for batch in batches:
        state, found = step(state, batch)
        metrics.append(found)
    return state, metrics


def test_batch_norm_autocast_clipping_adamw_and_an_average() -> None:
    program = ps.program(tiny_convnet(dropout=0.0), ENTROPY, TX, precision="bf16-mixed", ema=0.9)
    step = torch.compile(program.train_step, backend="eager", fullgraph=True)
    batches = [image_batch(8, seed) for seed in range(3)]
    found, metrics = trained(step, program.init(), batches)
    expected, wanted = trained(program.train_step, program.init(), batches)
    assert_trees_close(found._replace(key=expected.key), expected, rtol=1e-4, atol=1e-5)
    assert_trees_close(metrics, wanted, rtol=1e-4, atol=1e-5)


def test_a_loss_scale_and_windows() -> None:
    program = ps.program(tiny_mlp(), ENTROPY, TX, precision="16-mixed", accumulate=2)
    step = torch.compile(program.train_step, backend="eager", fullgraph=True)
    batches = [vector_batch(8, seed) for seed in range(4)]
    found, _ = trained(step, program.init(), batches)
    expected, _ = trained(program.train_step, program.init(), batches)
    assert_trees_close(found._replace(key=expected.key), expected, rtol=1e-4, atol=1e-5)


def test_dropout_draws_from_torchs_generator() -> None:
    """The seed of a step is not captured: the state's key stays where it is."""
    program = ps.program(tiny_convnet(dropout=0.5), ENTROPY, TX)
    step, batch = torch.compile(program.train_step, backend="eager", fullgraph=True), image_batch(8)
    losses = list[float]()
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        state, metrics = step(program.init(), batch)
        losses.append(float(metrics["loss"]))
    assert losses[0] == losses[1] != losses[2]
    assert state.key.tolist() == [0, 0]


class Reads(nn.Linear):
    """A branch on a value, as in the routers of some mixtures of experts."""

    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        return 2 * found if found.sum().item() > 0 else found


def test_a_model_that_reads_a_value_is_refused_by_a_trace_which_names_this_way() -> None:
    program = ps.program(Reads(4, 3), ENTROPY, TX)
    with pytest.raises(StepContractError, match=r"reads the value .*or torch\.compile\(program\.train_step\)"):
        ps.compile_step(program.train_step)(program.init(), vector_batch(8))


def test_what_a_trace_refuses_trains_by_the_users_own_torch_compile() -> None:
    program = ps.program(Reads(4, 3), ENTROPY, TX)
    batches = [vector_batch(8, seed) for seed in range(3)]
    found, _ = trained(torch.compile(program.train_step, backend="eager"), program.init(), batches)
    expected, _ = trained(program.train_step, program.init(), batches)
    assert_trees_close(found._replace(key=expected.key), expected, rtol=1e-4, atol=1e-5)


class Unused(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 3)
        self.spare = nn.Parameter(torch.ones(2))


def test_a_parameter_that_no_loss_reached_in_an_eager_call_stays() -> None:
    """Dynamo does not see autograd's graph: what the loss reaches is known from the last call without it."""
    program = ps.program(Unused(), ENTROPY, optim.adamw(1e-2, weight_decay=0.1))
    program.train_step(program.init(), vector_batch())
    state, _ = torch.compile(program.train_step, backend="eager", fullgraph=True)(program.init(), vector_batch())
    assert state.params["spare"].tolist() == [1, 1]
