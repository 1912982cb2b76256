from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import tiny_mlp, vector_batch
from torch import nn

import purestep as ps
from purestep import errors, optim

BASES = {
    errors.StateError: ValueError,
    errors.StepContractError: ValueError,
    errors.NonFiniteError: ArithmeticError,
    errors.DataError: ValueError,
    errors.ConfigError: ValueError,
    errors.SnapshotError: errors.PurestepError,
    errors.Corrupt: ValueError,
    errors.Mismatch: ValueError,
    errors.NotFound: FileNotFoundError,
    errors.Locked: OSError,
    errors.WriteFailed: OSError,
    errors.RankError: RuntimeError,
}


def test_every_error_is_in_the_table():
    found = {e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, errors.PurestepError)}
    assert found == {*BASES, errors.PurestepError}


@pytest.mark.parametrize("error", BASES, ids=lambda error: error.__name__)
def test_it_says_what_where_and_the_cure_and_is_caught_as_its_builtin_kind(error: type[errors.PurestepError]):
    with pytest.raises(BASES[error], match=r"^params/w: is lazy \(cure: run it once\)$") as caught:
        raise error("is lazy", where="params/w", hint="run it once")
    assert isinstance(caught.value, errors.PurestepError)
    assert (caught.value.what, caught.value.where, caught.value.hint) == ("is lazy", "params/w", "run it once")
    assert error.__doc__


@pytest.mark.parametrize("error", [errors.Corrupt, errors.Mismatch, errors.NotFound, errors.Locked, errors.WriteFailed])
def test_what_a_snapshot_does_wrong_is_a_snapshot_error(error: type[errors.PurestepError]):
    assert issubclass(error, errors.SnapshotError)


@pytest.mark.parametrize("error", BASES, ids=lambda error: error.__name__)
def test_names_of_others_do_not_act_on_a_terminal(error: type[errors.PurestepError]):
    text = str(error("a\x1b]52;c;eA==\x07", where="b\u202ec\ud800", hint="d\x9b2J\r\n\te"))
    assert text == r"b\u202ec\ud800: a\x1b]52;c;eA==\x07 (cure: d\x9b2J\r" + "\n\te)"


def test_nor_do_they_in_the_log(caplog: pytest.LogCaptureFixture):
    logging.getLogger("purestep").warning("%s: %d", "\x1b[2J", 1)
    assert caplog.messages == [r"\x1b[2J: 1"]


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({}, "found"),
        ({"where": "here"}, "here: found"),
        ({"hint": "do"}, "found (cure: do)"),
    ],
)
def test_place_and_cure_may_be_missing(kwargs: dict[str, str], text: str):
    assert str(errors.PurestepError("found", **kwargs)) == text


def test_errors_are_reached_through_the_package():
    assert ps.errors is errors


# --- slips of the pen: what is given in the wrong place, or in another library's way ----------------------------------


def program(tx: Any = None) -> ps.Program:
    return ps.program(tiny_mlp(), ps.supervised(nn.CrossEntropyLoss()), tx or optim.sgd(0.1))


def fit(**options: Any) -> Any:
    loaders = {"train": [vector_batch()], "val": [vector_batch()]}
    return ps.fit(program().init(), loaders, program(), epochs=1, progress=False, **options)


def returning(update: Callable[[Any, Any], Any]) -> ps.Program:
    return program(optim.Transform(lambda params: (), lambda updates, state, params: update(updates, state)))


def listener(event: Any) -> None:
    del event


def plateau() -> Any:
    return torch.optim.lr_scheduler.StepLR(torch.optim.SGD([torch.ones(1)], lr=0.1), 10)


SLIPS: dict[str, tuple[Callable[[], Any], str]] = {
    "a list of transforms": (
        lambda: optim.chain([optim.sgd(0.1)]),  # pyright: ignore
        "chain: part 0 is a list, not a Transform (cure: pass the parts one by one: optim.chain(first, second))",
    ),
    "an optimizer that is not called": (
        lambda: optim.chain(optim.clip_by_global_norm(1.0), optim.sgd),  # pyright: ignore
        "chain: part 1 is a function, not a Transform (cure: call the factory: optim.adamw(1e-3))",
    ),
    "an optimizer with parameters": (
        lambda: optim.from_torch(torch.optim.AdamW([torch.ones(1)])),  # pyright: ignore
        "the optimizer is a AdamW, not a class (cure: from_torch(torch.optim.AdamW, lr=1e-3, ...)",
    ),
    "a torch scheduler as the rate": (
        lambda: optim.adamw(plateau()),
        "learning_rate is a StepLR, which counts its own steps (cure: schedules.from_torch_scheduler(StepLR, 0.1,",
    ),
    "a negative rate": (
        lambda: optim.adamw(-1.0),
        "adamw: learning_rate=-1.0 must be a finite number of at least 0 (cure: 0.001 is the default)",
    ),
    "a criterion's class": (
        lambda: ps.supervised(nn.CrossEntropyLoss),
        "CrossEntropyLoss: the criterion is a class, not an instance (cure: CrossEntropyLoss())",
    ),
    "the batch first": (
        lambda: program().train_step(vector_batch(), program().init()),
        "state: the state is a tuple (cure: call train_step(state, batch))",
    ),
    "a transform that leaves parameters out": (
        lambda: returning(lambda updates, state: ({}, state)).train_step(program().init(), vector_batch()),
        "tx.update: the transformation returned no update of 0.weight, 0.bias",
    ),
    "a transform that returns a list": (
        lambda: returning(lambda updates, state: (list(updates.values()), state)).train_step(
            program().init(), vector_batch()
        ),
        "tx.update: the transformation returned updates as a list",
    ),
    "a transform that returns no state": (
        lambda: returning(lambda updates, state: updates).train_step(program().init(), vector_batch()),
        "tx.update: the transformation returned a dict (cure: return ({name: update",
    ),
    "one callback": (
        lambda: fit(callbacks=listener),
        "callbacks is a function, not a list of callables (cure: callbacks=[listener])",
    ),
    "resume switched off": (lambda: fit(resume=False), "(cure: resume=None)"),
    "a metric's bare name": (lambda: fit(monitor="loss"), "(cure: monitor='val_loss')"),
    "a metric that is not measured": (lambda: fit(monitor="val_acc", mode="max"), "(cure: monitor='val_loss')"),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_gets_its_cure(slip: str):
    make, message = SLIPS[slip]
    with pytest.raises(errors.PurestepError, match=re.escape(message)):
        make()


def test_another_runs_directory_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    def run(seed: int = 0, hidden: int = 8, **options: Any) -> Any:
        net = nn.Sequential(nn.Linear(4, hidden), nn.Tanh(), nn.Linear(hidden, 3))
        made = ps.program(net, ps.supervised(nn.CrossEntropyLoss()), optim.sgd(0.1))
        return ps.fit(made.init(seed), [vector_batch()], made, progress=False, snapshots=tmp_path, **options)

    run(epochs=1)
    assert not _warnings(caplog)
    run(epochs=2)
    assert not _warnings(caplog)
    run(epochs=2)
    assert _warnings(caplog) == [
        f"nothing is trained: the run of {'/'.join(tmp_path.parts[-2:])} had ended already, by epochs, after 2 epochs "
        "and 2 updates"
    ]
    caplog.clear()
    run(seed=1, epochs=3)
    (told,) = _warnings(caplog)
    assert told.startswith("the state given has seed 1, and the run that goes on has seed 0")
    with pytest.raises(errors.Mismatch) as caught:
        run(hidden=9, epochs=3)
    assert f"(cure: if {tmp_path} is another run's: snapshots=<another directory>, or resume=None" in str(caught.value)


def test_an_epoch_without_a_target_is_told_of(caplog: pytest.LogCaptureFixture):
    x, y = vector_batch()
    made = ps.program(nn.Linear(4, 3), ps.supervised(nn.CrossEntropyLoss()), optim.sgd(0.1))
    ps.fit(made.init(), [(x, torch.full_like(y, -100))], made, epochs=2, progress=False)
    (told,) = _warnings(caplog)
    assert told.startswith("epoch 1 has made no update: no target counted")
    caplog.clear()
    ps.fit(made.init(), [(x, y)], made, epochs=1, progress=False)
    assert not _warnings(caplog)


def _warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]


def test_help_shows_every_setting_of_a_run():
    text = ps.FitConfig.__doc__ or ""
    for name, field in ps.FitConfig.model_fields.items():
        assert field.description, name
        assert f"\n    {name} (default {field.default!r}): " in text, name
