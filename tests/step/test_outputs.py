"""`Loss.outputs`: tensors that a train step hands out besides its metrics."""

from __future__ import annotations

import collections
from typing import Any

import pytest
import torch
from helpers import assert_trees_close
from torch import Tensor, nn

import purestep as ps
from purestep import metrics, optim
from purestep.errors import StepContractError


def objective(model: Any, batch: Any) -> ps.Loss:
    x, y = batch
    errors = model(x) - y
    handed_out = {"errors": errors, "deep": [x * 2, {"weight": model.params["weight"].expand(len(x), 3)}]}
    return ps.Loss(errors.square().mean(), len(x), {"mae": metrics.as_mean(errors.abs().mean(), len(x))}, handed_out)


def data(rows: int = 7, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 3, generator=generator), torch.randn(rows, 1, generator=generator)


def made(loss: Any = objective, **settings: Any) -> ps.Program:
    torch.manual_seed(0)
    return ps.program(nn.Linear(3, 1), loss, optim.sgd(0.1), **settings)


def test_a_step_returns_them_beside_its_metrics() -> None:
    program, (x, y) = made(), data()
    state = program.init()
    _, found = program.train_step(state, (x, y))
    handed_out = found["outputs"]
    errors = nn.functional.linear(x, state.params["weight"], state.params["bias"]) - y
    assert torch.equal(handed_out["errors"], errors)
    assert torch.equal(handed_out["deep"][0], 2 * x)
    assert not any(leaf.requires_grad for leaf in ps.tree.leaves(handed_out))
    assert metrics.outputs(found) == handed_out
    assert metrics.outputs(metrics.merge(found, found)) == {}
    assert sorted(metrics.compute(found)) == sorted({*found} - {"outputs"})


def test_a_step_of_a_user_may_return_any_mapping_with_them() -> None:
    program, met = made(), list[list[str]]()

    def step(state: Any, batch: Any) -> Any:
        state, found = program.train_step(state, batch)
        return state, collections.OrderedDict(found)

    def look(event: Any) -> None:
        if isinstance(event, ps.events.StepEnd):
            met.append(sorted(event.outputs))

    own = ps.types.Program(step)
    result = ps.fit(program.init(), [data()] * 2, own, epochs=1, progress=False, callbacks=[look])
    assert "train_mae" in result.history
    assert met == [["deep", "errors"]] * 2


def test_a_step_without_them_has_no_entry() -> None:
    program = made(ps.supervised(nn.MSELoss()))
    _, found = program.train_step(program.init(), data())
    assert "outputs" not in found
    assert metrics.outputs(found) == {}


def test_a_metric_may_be_called_outputs() -> None:
    one = {"outputs": metrics.as_mean(2.0)}
    assert metrics.compute(metrics.merge(one, one)) == {"outputs": 2.0}
    assert metrics.outputs(one) == {}


@pytest.mark.parametrize("compiled", [False, True])
def test_they_are_copies_that_a_donated_step_does_not_write(compiled: bool) -> None:
    program = made()
    if compiled:
        step = ps.compile_step(program.train_step, donate=True, backend="aot_eager")
    else:
        step = ps.donate(program).train_step
    before = program.init().params["weight"]
    state, found = step(program.init(), data())
    kept = found["outputs"]["deep"][1]["weight"]
    assert torch.equal(kept[0], before[0])
    for _ in range(3):
        state, _ = step(state, data())
    assert torch.equal(kept[0], before[0])


def test_a_compiled_step_returns_those_of_the_eager_one() -> None:
    program = made()
    step = ps.compile_step(program.train_step, backend="aot_eager")
    (_, found), (_, expected) = (run(program.init(), data()) for run in (step, program.train_step))
    assert_trees_close(found["outputs"], expected["outputs"])
    assert sorted(found) == sorted(expected)


def test_micro_batches_join_their_rows() -> None:
    (_, whole), (_, parts) = (p.train_step(p.init(), data()) for p in (made(), made(microbatches=3)))
    assert_trees_close(parts["outputs"], whole["outputs"])


def scalar(model: Any, batch: Any) -> ps.Loss:
    loss = (model(batch[0]) - batch[1]).square().mean()
    return ps.Loss(loss, len(batch[0]), outputs={"loss": loss})


def columns(model: Any, batch: Any) -> ps.Loss:
    return ps.Loss(model(batch[0]).mean(), len(batch[0]), outputs={"columns": batch[0].T})


def changing(model: Any, batch: Any) -> ps.Loss:
    more = {"more": batch[0]} if len(batch[0]) == 3 else {}
    return ps.Loss(model(batch[0]).mean(), len(batch[0]), outputs={"x": batch[0], **more})


@pytest.mark.parametrize(
    ("loss", "text"),
    [
        (scalar, "outputs/loss.*rows.*microbatches=1"),
        (columns, "outputs/columns.*rows.*microbatches=1"),
        (changing, "outputs differ between.*microbatches=1"),
    ],
)
def test_micro_batches_refuse_what_cannot_be_joined(loss: Any, text: str) -> None:
    program = made(loss, microbatches=2)
    with pytest.raises(StepContractError, match=text):
        program.train_step(program.init(), data())
    alone = made(loss)
    assert alone.train_step(alone.init(), data())[1]["outputs"]


def test_each_call_of_a_window_has_its_own() -> None:
    program = made(accumulate=2)
    state, first = program.train_step(program.init(), data(4))
    _, second = program.train_step(state, data(3))
    assert [len(found["outputs"]["errors"]) for found in (first, second)] == [4, 3]


def test_those_of_sam_are_of_the_first_pass() -> None:
    (_, plain), (_, sharp) = (p.train_step(p.init(), data()) for p in (made(), made(sam=0.5)))
    assert_trees_close(sharp["outputs"], plain["outputs"], exact=True)


def test_an_ensemble_returns_those_of_each_member() -> None:
    both = ps.ensemble(made(), 2)
    _, found = both.train_step(both.init(seeds=[0, 1]), data())
    assert found["outputs"]["errors"].shape == (2, 7, 1)


@pytest.mark.parametrize("compile_", [False, {"backend": "aot_eager"}])
def test_fit_gives_them_to_callbacks_and_keeps_none(compile_: Any) -> None:
    seen: list[Any] = []

    def keep(event: Any) -> None:
        if isinstance(event, ps.events.StepEnd):
            seen.append((event.outputs["errors"], sorted(event.metrics), event.batch))

    program = made()
    batches = [data(7, seed) for seed in range(3)]
    result = ps.fit(
        program.init(), {"train": batches, "val": batches}, program, epochs=1, callbacks=[keep], compile=compile_,
        progress=False, device="cpu",
    )  # fmt: skip
    state = program.init()
    for (errors, names, batch), given in zip(seen, batches, strict=True):
        state, expected = program.train_step(state, given)
        assert_trees_close(errors, expected["outputs"]["errors"])
        assert names == sorted({*expected} - {"outputs"})
        assert torch.equal(batch[0], given[0])
    assert not [name for name in result.history if "outputs" in name or "errors" in name]
    assert "train_mae" in result.history
    assert "val_mae" in result.history


def test_fit_hands_out_those_of_the_last_call_of_a_window() -> None:
    sizes: list[int] = []

    def keep(event: Any) -> None:
        if isinstance(event, ps.events.StepEnd):
            sizes.append(len(event.outputs["errors"]))
            assert len(event.batch[0]) == sizes[-1]

    program = made(accumulate=2)
    ps.fit(program.init(), [data(4), data(3)] * 2, program, epochs=1, callbacks=[keep], progress=False, device="cpu")
    assert sizes == [3, 3]


def test_run_epoch_and_evaluate_take_the_metrics_alone() -> None:
    program = made()
    _, found = ps.run_epoch(program.init(), [data()] * 2, program.train_step)
    assert "outputs" not in found
    assert sorted(ps.evaluate(program.init(), [data()], program.eval_step)) == ["loss", "mae"]  # type: ignore[arg-type]


def test_a_step_of_the_users_own_may_return_them() -> None:
    seen: list[Any] = []

    def train_step(state: Any, batch: Tensor) -> Any:
        return {"w": state["w"] + batch}, {"loss": metrics.as_mean(batch), "outputs": {"w": state["w"]}}

    def keep(event: Any) -> None:
        if isinstance(event, ps.events.StepEnd):
            seen.append(event.outputs["w"].item())

    batches = [torch.tensor(1.0)] * 3
    ps.fit({"w": torch.zeros(())}, batches, ps.Program(train_step), epochs=1, callbacks=[keep], progress=False,
           device="cpu")  # fmt: skip
    assert seen == [0.0, 1.0, 2.0]


def wrong(handed_out: Any) -> Any:
    def loss(model: Any, batch: Any) -> ps.Loss:
        return ps.Loss(model(batch[0]).mean(), 1, {}, handed_out)

    return loss


@pytest.mark.parametrize(
    ("handed_out", "text"),
    [
        (torch.ones(2), "outputs: the outputs are a Tensor, not a mapping"),
        ({"count": 3}, "outputs/count: the output is a int, not a tensor.*metric"),
        ({"names": ["a"]}, "outputs/names/0: the output is a str"),
    ],
)
def test_what_is_no_tensor_is_refused(handed_out: Any, text: str) -> None:
    program = made(wrong(handed_out))
    with pytest.raises(StepContractError, match=text):
        program.train_step(program.init(), data())
