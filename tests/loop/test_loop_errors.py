"""Bad input to fit: an error of ours that says where, what and the cure, and nothing is lost."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_trees_close, tiny_mlp, vector_batch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.utils.data import DataLoader, TensorDataset

import purestep as ps
from purestep import optim
from purestep.errors import (
    ConfigError,
    Corrupt,
    DataError,
    Locked,
    Mismatch,
    NonFiniteError,
    NotFound,
    PurestepError,
    StateError,
    StepContractError,
)
from purestep.types import Mean, Program

CRITERION = nn.CrossEntropyLoss()
fit = partial(ps.fit, progress=False)


def mlp(objective: Any = None, module: nn.Module | None = None, **options: Any) -> Program:
    return ps.program(module or tiny_mlp(), objective or ps.supervised(CRITERION), optim.sgd(0.1), **options)


def batches(count: int, rows: int = 8) -> list[Any]:
    return [vector_batch(rows, seed) for seed in range(count)]


def refused(kind: type[PurestepError], match: str, run: Callable[[], Any]) -> PurestepError:
    """The error, which has a place and a cure and is of our own family."""
    with pytest.raises(kind, match=match) as caught:
        run()
    assert caught.value.where or caught.value.hint
    return caught.value


# --- the loss ---------------------------------------------------------------------------------------------------------

LOSSES: dict[str, tuple[type[PurestepError], str, Callable[[Any, Any], Any]]] = {
    "not a scalar": (
        StepContractError,
        r"objective: the loss has shape \[8, 3\] .*floating scalar.*loss.mean\(\)",
        lambda model, batch: ps.Loss(model(batch[0]), torch.tensor(8.0), {}),
    ),
    "complex": (
        StepContractError,
        r"dtype torch.complex64.*loss.real",
        lambda model, batch: ps.Loss(model(batch[0]).mean().to(torch.complex64), torch.tensor(8.0), {}),
    ),
    "no Loss": (StepContractError, r"returned a \w*Tensor, not a Loss", lambda model, batch: model(batch[0]).mean()),
    "detached": (
        StepContractError,
        r"does not depend on the parameters.*remove .detach\(\)",
        lambda model, batch: ps.Loss(model(batch[0]).mean().detach(), torch.tensor(8.0), {}),
    ),
    "without gradients": (
        StepContractError,
        r"does not depend on the parameters",
        torch.no_grad()(lambda model, batch: ps.Loss(model(batch[0]).mean(), torch.tensor(8.0), {})),
    ),
    "of something else": (
        StepContractError,
        r"does not depend on the parameters",
        lambda model, batch: ps.Loss(batch[0].square().mean(), torch.tensor(8.0), {}),
    ),
    "nan": (
        NonFiniteError,
        r"epoch 1, batch 1: .*not finite",
        lambda model, batch: ps.Loss(model(batch[0]).mean() * torch.nan, torch.tensor(8.0), {}),
    ),
    "infinite": (
        NonFiniteError,
        r"epoch 1, batch 1: .*not finite",
        lambda model, batch: ps.Loss(model(batch[0]).mean() / 0, torch.tensor(8.0), {}),
    ),
}


@pytest.mark.parametrize("loss", ["detached", "without gradients", "of something else", "nan", "infinite"])
def test_a_loss_that_cannot_be_trained_on(loss: str) -> None:
    kind, message, objective = LOSSES[loss]
    program = mlp(objective)
    state = program.init()
    before = ps.clone(state)
    refused(kind, message, lambda: fit(state, batches(2), program, epochs=1))
    assert_trees_close(state, before, exact=True)


@pytest.mark.compile
@pytest.mark.parametrize("loss", ["not a scalar", "complex", "detached", "no Loss"])
def test_a_loss_that_cannot_be_trained_on_is_named_when_compiled_too(loss: str) -> None:
    kind, message, objective = LOSSES[loss]
    program = mlp(objective)
    options = {"backend": "aot_eager"}
    refused(kind, message, lambda: fit(program.init(), batches(2), program, epochs=1, compile=options))


# --- loaders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loader", [None, 3, tiny_mlp(), torch.zeros(3), TensorDataset(torch.zeros(4, 4))])
def test_something_else_than_a_loader_is_named(loader: Any) -> None:
    program = mlp()
    refused(DataError, "^train: (the loader is )?a", lambda: fit(program.init(), {"train": loader}, program, epochs=1))


def test_loaders_in_a_list_are_refused_by_name() -> None:
    loader, program = DataLoader(batches(1), batch_size=None), mlp()  # pyright: ignore[reportArgumentType]
    refused(ConfigError, "loaders are a list", lambda: fit(program.init(), [loader, loader], program, epochs=1))


@pytest.mark.parametrize("loaders", [{}, {"val": batches(1)}, (None, batches(1))])
def test_a_training_loader_is_needed(loaders: Any) -> None:
    program = mlp()
    refused(ConfigError, "none is called 'train'", lambda: fit(program.init(), loaders, program, epochs=1))


# --- states -----------------------------------------------------------------------------------------------------------


def test_a_donated_state_cannot_be_trained_on() -> None:
    program = mlp()
    step = ps.compile_step(program.train_step, donate=True, backend="aot_eager")
    first, _ = step(program.init(), vector_batch())
    step(first, vector_batch())
    refused(StateError, "this state in call 2", lambda: fit(first, batches(1), program, epochs=1))


# --- steps and programs -----------------------------------------------------------------------------------------------


def test_fit_needs_a_program() -> None:
    program = mlp()
    refused(ConfigError, r"no program was given.*ps.program\(model", lambda: fit(program.init(), batches(1), epochs=1))
    for other in (tiny_mlp(), program.train_step, 3):
        refused(ConfigError, r"not a Program.*ps.Program\(train_step\)", lambda o=other: fit({}, [], o, epochs=1))


def test_what_an_eval_step_must_return() -> None:
    with FakeTensorMode():
        torn = {"hits": Mean(torch.ones((), device="cuda"), torch.ones(()))}
    for answer, message in (
        (None, "returned a NoneType"),
        ({"loss": 1.0}, "metric 'loss' is a float"),
        (torn, "metrics are on several devices: the total of 'hits' on cuda:0, the weight of 'hits' on cpu"),
    ):
        program = mlp()._replace(eval_step=lambda state, batch, answer=answer: answer)
        refused(
            StepContractError,
            f"^eval_step: (the step )?{message}",
            lambda p=program: fit(p.init(), (batches(1), batches(1)), p, epochs=1),
        )


def test_an_error_of_the_step_itself_gets_its_place_as_a_note() -> None:
    calls = []

    def step(state: Any, batch: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            raise ZeroDivisionError("of the user's own")
        return state, {}

    with pytest.raises(ZeroDivisionError) as caught:
        fit({"w": torch.ones(1)}, batches(3), Program(step), epochs=2, check_every=None)
    assert caught.value.__notes__ == ["in train_step, epoch 2, batch 2"]


@pytest.mark.compile
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_compiled_model_of_another_dtype_than_its_batches_gets_the_cure(dtype: torch.dtype) -> None:
    program = mlp(module=tiny_mlp().to(dtype))
    with pytest.raises(StepContractError, match=rf'product of {dtype} and torch.float32.*model.float.*"64-true"'):
        fit(program.init(), batches(1), program, epochs=1, compile={"backend": "eager"})


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_of_another_dtype_than_its_batches_gets_the_cure_as_a_note(dtype: torch.dtype) -> None:
    program = mlp(module=tiny_mlp().to(dtype))
    with pytest.raises(RuntimeError, match="dtype") as caught:
        fit(program.init(), batches(1), program, epochs=1)
    place, cure = caught.value.__notes__
    assert place == "in train_step, epoch 1, batch 1"
    assert f"the batch has torch.float32, the weights are {dtype} (cure: call model.float()" in cure
    assert 'precision="64-true"' in cure


def test_the_cure_of_mixed_dtypes_is_one() -> None:
    program = mlp(module=tiny_mlp().double(), precision="64-true")
    assert fit(program.init(), batches(1), program, epochs=1).epochs == 1


def test_other_errors_say_nothing_of_dtypes() -> None:
    """64-true casts the batch: that the two differ is no fault, whatever else goes wrong."""

    def objective(model: Any, batch: Any) -> Any:
        raise RuntimeError("expected scalar type Long but found Float")

    program = mlp(objective, precision="64-true")
    with pytest.raises(RuntimeError, match="scalar type") as caught:
        fit(program.init(), batches(1), program, epochs=1, check_every=None)
    assert caught.value.__notes__ == ["in train_step, epoch 1, batch 1"]


def test_a_module_is_no_state() -> None:
    refused(
        StateError, r"^init_state: Sequential is not a tensor", lambda: fit(tiny_mlp(), batches(1), mlp(), epochs=1)
    )


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"epoch": 3}, "'epoch' is not a setting of fit.*cure: epochs"),
        ({"epochs": 3, "early_stoping": 2}, "early_stopping"),
        ({"epochs": "many"}, "epochs.*whole number"),
        ({"epochs": 0}, "epochs.*at least 1"),
        ({"epochs": 1, "evaluate_every": 1.5}, "evaluate_every"),
        ({"epochs": 1, "limit_batches": {"train": 0}}, "no batch to train on"),
        ({"epochs": 1, "compile": "yes"}, "compile"),
        ({"epochs": 1, "detect_anomaly": True, "compile": True}, "only in eager mode"),
    ],
)
def test_settings_are_refused_before_anything_is_looked_at(fields: Any, message: str) -> None:
    refused(ConfigError, message, lambda: fit(object(), object(), mlp(), **fields))


def test_snapshots_are_a_directory_or_snapshots() -> None:
    program = mlp()
    refused(ConfigError, "snapshots is a int", lambda: fit(program.init(), batches(1), program, epochs=1, snapshots=3))


# --- snapshots --------------------------------------------------------------------------------------------------------


def test_a_template_that_does_not_match_lists_its_leaves_and_reads_nothing(tmp_path: Path) -> None:
    program = mlp()
    fit(program.init(), batches(2), program, epochs=1, snapshots=tmp_path)
    wider = mlp(module=nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 3)))
    error = refused(
        Mismatch, "params/0.weight", lambda: fit(wider.init(), batches(2), wider, epochs=2, snapshots=tmp_path)
    )
    for found in ("[8, 4]", "[9, 4]", "params/2.weight", "params/0.bias"):
        assert found in str(error)
    result = fit(program.init(), batches(2), program, epochs=2, snapshots=tmp_path)
    assert int(result.state.updates) == 4


def test_a_path_without_snapshots_is_not_taken_for_a_fresh_start(tmp_path: Path) -> None:
    program = mlp()
    refused(
        NotFound, "no snapshot here", lambda: fit(program.init(), batches(1), program, epochs=1, resume=str(tmp_path))
    )


def test_two_runs_do_not_share_a_directory(tmp_path: Path) -> None:
    program = mlp()
    with ps.Snapshots(tmp_path):
        refused(Locked, str(tmp_path), lambda: fit(program.init(), batches(1), program, epochs=1, snapshots=tmp_path))
    fit(program.init(), batches(1), program, epochs=1, snapshots=tmp_path)


def test_a_run_that_an_error_ended_holds_neither_its_state_nor_the_directory(tmp_path: Path) -> None:
    """Reference counts alone free both: the error and the frame of the loop do not hold each other."""

    def fails(event: Any) -> None:
        if isinstance(event, ps.events.StepEnd):
            raise ValueError("of a callback")

    program = mlp()
    gc.collect()
    gc.disable()
    try:
        for callbacks in ([fails], []):
            state = program.init()
            last = weakref.ref(state.params["0.weight"])
            with suppress(ValueError):
                fit(state, batches(2), program, epochs=1, callbacks=callbacks, snapshots=ps.Snapshots(tmp_path))
            del state
            assert last() is None
    finally:
        gc.enable()


def test_a_second_object_of_one_process_is_told_how_to_end_the_first(tmp_path: Path) -> None:
    with ps.Snapshots(tmp_path), pytest.raises(Locked, match=r"another object of this process .*call close\(\)"):
        ps.Snapshots(tmp_path).open()


def test_a_fresh_start_in_a_used_directory_takes_nothing_away(tmp_path: Path) -> None:
    """What was there is kept beside it."""
    program = mlp()
    first = fit(program.init(), batches(3), program, epochs=3, snapshots=tmp_path)
    again = fit(program.init(), batches(3), program, epochs=1, snapshots=tmp_path, resume=None)
    assert int(again.state.updates) == 3
    assert ps.Snapshots(tmp_path, writer=False).latest() == 3
    assert (tmp_path / "9.archived").is_dir()
    assert int(first.state.updates) == 9


def test_a_fresh_start_sets_damaged_steps_aside_too(tmp_path: Path) -> None:
    """They would be taken for later steps when the run is saved, after an epoch of work."""
    program, here = mlp(), tmp_path / "here"
    with ps.Snapshots(here) as snapshots:
        snapshots.save(20, program.init())
    (here / "20" / "manifest.json").unlink()
    fit(program.init(), batches(3), program, epochs=1, snapshots=tmp_path / "elsewhere")
    with pytest.raises(Corrupt, match="every snapshot here is damaged"):  # the run's own directory comes first
        fit(program.init(), batches(3), program, epochs=2, snapshots=here, resume=str(tmp_path / "elsewhere"))
    fit(program.init(), batches(3), program, epochs=2, snapshots=here, resume=None)
    assert (here / "20.archived").is_dir()
    assert ps.Snapshots(here, writer=False).latest() is not None


def test_an_error_of_the_step_saves_the_state_before_it_and_frees_the_directory(tmp_path: Path) -> None:
    calls = []

    def step(state: Any, batch: Any) -> Any:
        calls.append(1)
        if len(calls) == 8:
            raise MemoryError
        return {"w": state["w"] + 1}, {"loss": Mean(state["w"].sum(), torch.ones(()))}

    state = {"w": torch.zeros(1)}
    with pytest.raises(MemoryError):
        fit(state, batches(3), Program(step), epochs=5, snapshots=tmp_path, check_every=None)
    found = ps.Snapshots(tmp_path, writer=False, strict=True).restore(state)
    assert (found.step, found.state["w"].item()) == (7, 7.0)
    result = fit(state, batches(3), Program(step), epochs=5, snapshots=tmp_path, check_every=None)
    assert result.state["w"].item() == 15
    assert result.history["step"] == [3, 6, 9, 12, 15]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is such a device")
def test_a_device_that_is_not_there_is_named() -> None:
    program = mlp()
    refused(
        ConfigError, "no device 'cuda' here", lambda: fit(program.init(), batches(2), program, epochs=1, device="cuda")
    )


def test_an_array_that_torch_does_not_take_is_named() -> None:
    program, (x, y) = mlp(), batches(1)[0]
    flipped = x.numpy()[::-1]
    refused(DataError, "cannot be moved.*negative", lambda: fit(program.init(), [(flipped, y)], program, epochs=1))


@pytest.mark.parametrize("policy", [{"keep": 1.5}, {"keep_best": 0.5}, {"every_epochs": 0.5}, {"every_steps": True}])
def test_counts_of_snapshots_are_whole(policy: Any, tmp_path: Path) -> None:
    refused(ConfigError, f"{next(iter(policy))}", lambda: ps.Snapshots(tmp_path, **policy))


def test_a_mean_of_numbers_is_a_metric_like_a_pair_of_them() -> None:
    def counted(outputs: Any, targets: Any) -> Mean:
        return Mean((outputs.argmax(-1) == targets).sum(), len(targets))  # pyright: ignore[reportArgumentType]

    program = mlp(ps.supervised(CRITERION, metrics={"mine": counted, "theirs": ps.metrics.accuracy}))
    history = fit(program.init(), batches(2), program, epochs=1).history
    assert history["train_mine"] == history["train_theirs"]


@pytest.mark.parametrize(
    ("of_state", "of_run", "found"),
    [
        ({"ema": 0.9}, {}, "the state alone has an average"),
        ({}, {"ema": 0.9}, "the program alone has an average"),
        ({"accumulate": 2}, {}, "accumulate=1, and the state has a window"),
        ({}, {"accumulate": 2}, "accumulate=2, and the state has no window"),
        ({"module": nn.Linear(4, 3)}, {"module": nn.Linear(4, 3, bias=False)}, "bias is trained in one of them only"),
    ],
)
def test_a_state_of_another_program_is_named(of_state: Any, of_run: Any, found: str) -> None:
    state, program = mlp(**of_state).init(), mlp(**of_run)
    refused(StateError, found, lambda: fit(state, batches(2), program, epochs=1))
