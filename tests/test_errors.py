from __future__ import annotations

import pytest

import purestep as ps
from purestep import errors

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
