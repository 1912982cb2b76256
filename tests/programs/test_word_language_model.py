"""A word language model whose hidden state goes from batch to batch, as in torch's example: each number equals that of
a loop by hand, eager and compiled, whole and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purestep as ps

WORDS, SIDE, LENGTH, EPOCHS, RATE = 13, 4, 7, 3, 0.5
TEXT = torch.randint(0, WORDS, (6 * LENGTH + 1, SIDE), generator=torch.Generator().manual_seed(1))
HELD = torch.randint(0, WORDS, (3 * LENGTH + 1, SIDE), generator=torch.Generator().manual_seed(2))


def pieces(text: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(text[i : i + LENGTH], text[i + 1 : i + LENGTH + 1].flatten()) for i in range(0, len(text) - 1, LENGTH)]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.rnn, self.out = nn.Embedding(WORDS, 6), nn.RNN(6, 8), nn.Linear(8, WORDS)
        self.register_buffer("hidden", torch.zeros(1, SIDE, 8), persistent=False)
        self.hidden: Tensor

    def forward(self, words: Tensor) -> Tensor:
        found, hidden = self.rnn(self.embed(words), self.hidden)
        self.hidden = hidden.detach()
        return self.out(found).flatten(0, 1)


def model() -> Model:
    torch.manual_seed(0)
    return Model()


def by_hand() -> tuple[list[float], list[float]]:
    net, criterion = model(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    train, val = list[float](), list[float]()
    for _ in range(EPOCHS):
        net.train().hidden.zero_()
        losses = list[float]()
        for words, targets in pieces(TEXT):
            optimizer.zero_grad()
            loss = criterion(net(words), targets)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.25)
            optimizer.step()
            losses.append(loss.item())
        train.append(sum(losses) / len(losses))
        net.eval().hidden.zero_()
        with torch.no_grad():
            val.append(sum(criterion(net(words), targets).item() for words, targets in pieces(HELD)) / 3)
    return train, val


def program(**settings: Any) -> ps.Program:
    tx = ps.optim.chain(ps.optim.clip_by_global_norm(0.25), ps.optim.sgd(RATE))
    return ps.program(model(), ps.supervised(nn.CrossEntropyLoss()), tx, **{"carry": ("hidden",), **settings})


def fitted(**settings: Any) -> ps.FitResult:
    made = program()
    settings = {"epochs": EPOCHS, "progress": False, "device": "cpu", **settings}
    return ps.fit(made.init(), (pieces(TEXT), pieces(HELD)), made, **settings)


COMPILED = pytest.param({"backend": "aot_eager"}, marks=pytest.mark.compile, id="compiled")


@pytest.mark.parametrize("compiled", [pytest.param(False, id="eager"), COMPILED])
def test_a_run_is_the_loop_by_hand(compiled: Any) -> None:
    train, val = by_hand()
    found = fitted(compile=compiled)
    assert found.history["train_loss"] == pytest.approx(train, rel=1e-5)
    assert found.history["val_loss"] == pytest.approx(val, rel=1e-5)


def test_evaluations_inside_an_epoch_leave_the_hidden_state_of_training() -> None:
    whole, often = fitted(), fitted(evaluate_every=2)
    assert often.history["val_loss"][2::3] == whole.history["val_loss"]
    assert torch.equal(often.state.params["out.weight"], whole.state.params["out.weight"])


@pytest.mark.parametrize("at", [4, 6, 8])
def test_a_resumed_run_has_the_hidden_state(at: int, tmp_path: Path) -> None:
    def stop(event: Any) -> Any:
        return ps.Stop("here") if isinstance(event, ps.events.StepEnd) and event.updates == at else None

    fitted(snapshots=tmp_path, callbacks=[stop])
    again, whole = fitted(snapshots=tmp_path), fitted()
    assert again.history == whole.history
    for name, weight in whole.state.params.items():
        assert torch.equal(again.state.params[name], weight)


def test_a_loop_of_ones_own() -> None:
    train, val = by_hand()
    made = program()
    state, losses = made.init(), list[float]()
    for epoch in range(EPOCHS):
        if epoch % 2:
            state, metrics = ps.run_epoch(state, pieces(TEXT), made.train_step)
            losses.append(float(metrics["loss"]))
        else:
            state, found = made.begin(state), list[float]()
            for batch in pieces(TEXT):
                state, metrics = made.train_step(state, batch)
                found.append(float(metrics["loss"]))
            losses.append(sum(found) / len(found))
    assert losses == pytest.approx(train, rel=1e-5)
    assert ps.evaluate(state, pieces(HELD), made.eval_step)["loss"] == pytest.approx(val[-1], rel=1e-5)


def test_an_average_is_evaluated_with_its_own_hidden_state() -> None:
    made = program(ema=0.5)
    state, _ = ps.run_epoch(made.init(), pieces(TEXT), made.train_step)
    plain = program()
    view = ps.view(state)._replace(ema=plain.init().ema)
    expected = ps.evaluate(view, pieces(HELD), plain.eval_step)
    assert ps.evaluate(state, pieces(HELD), made.eval_step) == expected


def test_bind_begins_with_the_hidden_state_of_the_module() -> None:
    made, words = program(), pieces(HELD)[0][0]
    state, _ = ps.run_epoch(made.init(), pieces(TEXT), made.train_step)
    net = model()
    ps.load_into(net, state)
    net.hidden.zero_()
    assert torch.allclose(made.bind(state)(words), net(words), atol=1e-6)


def test_a_hidden_state_that_is_not_carried_is_said_once() -> None:
    made = program(carry=())
    state, _ = ps.run_epoch(made.init(), pieces(TEXT), made.train_step)
    with pytest.warns(UserWarning, match=r"writes the buffer hidden in eval mode.*cure: .*carry=\('hidden',\)"):
        first = ps.evaluate(state, pieces(HELD), made.eval_step)
    assert ps.evaluate(state, pieces(HELD), made.eval_step) == first  # a second warning would be an error


def test_a_name_that_matches_no_buffer_is_refused() -> None:
    with pytest.raises(ps.errors.ConfigError, match="carry: 'hiden' matches no buffer .*hidden"):
        program(carry=("hiden",))
    with pytest.raises(ps.errors.ConfigError, match=r"carry=3 is not a tuple of names"):
        program(carry=3)
    with pytest.raises(ps.errors.ConfigError, match="ensemble: the program carries buffers"):
        ps.ensemble(program(), 2)
