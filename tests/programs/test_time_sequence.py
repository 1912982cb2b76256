"""pytorch/examples' time_sequence_prediction: two LSTM cells learn sine waves by L-BFGS without a line search."""

from __future__ import annotations

import torch
from helpers import assert_trees_close
from torch import Tensor, nn

import purestep as ps
from purestep import optim

STEPS, HIDDEN = 3, 11


class Sequence(nn.Module):
    """[waves, steps] -> the next value after each."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm1, self.lstm2, self.linear = nn.LSTMCell(1, HIDDEN), nn.LSTMCell(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 1)

    def forward(self, waves: Tensor) -> Tensor:
        h1, c1, h2, c2 = (torch.zeros(len(waves), HIDDEN, dtype=waves.dtype) for _ in range(4))
        outputs = []
        for value in waves.split(1, dim=1):
            h1, c1 = self.lstm1(value, (h1, c1))
            h2, c2 = self.lstm2(h1, (h2, c2))
            outputs.append(self.linear(h2))
        return torch.cat(outputs, dim=1)


def network() -> nn.Module:
    torch.manual_seed(0)
    return Sequence().double()


def waves() -> tuple[Tensor, Tensor]:
    start = torch.randint(-80, 80, (8, 1), generator=torch.Generator().manual_seed(1))
    values = ((start + torch.arange(25)) / 4.0).sin().double()
    return values[:, :-1], values[:, 1:]


def loop() -> nn.Module:
    module, (inputs, targets) = network(), waves()
    optimizer = torch.optim.LBFGS(module.parameters(), lr=0.8)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(module(inputs), targets)
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(closure)
    return module


def test_it_ends_where_the_plain_loop_does_to_the_bit() -> None:
    program = ps.program(network(), ps.supervised(nn.MSELoss()), optim.lbfgs(0.8, line_search_fn=None))
    result = ps.fit(program.init(), [waves()], program, epochs=STEPS, progress=False, device="cpu")
    assert_trees_close(result.state.params, {name: p.detach() for name, p in loop().named_parameters()}, exact=True)
    assert result.history["train_loss"][-1] < 0.1 * result.history["train_loss"][0]
