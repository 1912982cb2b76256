"""The texts of errors: each names its subject, its place and its cure."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import purestep
from purestep import errors

SOURCE = Path(purestep.__file__).parent
KINDS = {name for name, found in vars(errors).items() if inspect.isclass(found)} | {"Uncaptured"}
VERBS = (
    "are cannot comes does goes had has holds is may must needs not of raises reads refers requires returned returns "
    "shares takes was would"
).split()
WITHOUT_CURE = {"Corrupt", "Mismatch"}
"""A damaged file has no cure; a snapshot of another version says what it is."""
NAMED_BY_PYDANTIC = {"config/fields.py", "config/settings.py"}
"""`config.messages.explain` adds the place."""


def constructions(text: str) -> Iterator[tuple[int, str, str, set[str]]]:
    """Line, class, text and keywords of each error that a source builds."""
    for call in ast.walk(ast.parse(text)):
        if not isinstance(call, ast.Call) or not call.args:
            continue
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if name in KINDS:
            yield call.lineno, name, ast.unparse(call.args[0]), {str(keyword.arg) for keyword in call.keywords}


def wrong(file: str, text: str) -> list[str]:
    """What is wrong with the errors of a file."""
    found: list[str] = []
    for line, name, what, keywords in constructions(text):
        at = f"{file}:{line} {what[:100]}"
        begin = re.match(r"f?['\"](\w+)", what)
        if begin is not None and begin[1] in VERBS:
            found.append(f"{at}: begins with a verb; name the subject")
        if re.search(r"\b(is|are) no (?!longer)", what) and "there is no" not in what and "there are no" not in what:
            found.append(f"{at}: say 'is not a', or 'must be a'")
        if "where" not in keywords and file not in NAMED_BY_PYDANTIC:
            found.append(f"{at}: has no place")
        if "hint" not in keywords and name not in WITHOUT_CURE:
            found.append(f"{at}: has no cure")
    return found


def test_every_error_has_a_subject_a_place_and_a_cure() -> None:
    found = [
        each
        for path in sorted(SOURCE.rglob("*.py"))
        for each in wrong(path.relative_to(SOURCE).as_posix(), path.read_text("utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        ('StateError("the leaf is lazy", where=name, hint="run it")', ""),
        ('StateError(f"{name}={value!r} must be a list", where=name, hint="run it")', ""),
        ('StateError("is lazy", where=name, hint="run it")', "subject"),
        ('errors.DataError(f"holds a {kind}", where=name, hint="run it")', "subject"),
        ('StateError(f"{name} is no list", where=name, hint="run it")', "must be"),
        ('StateError("the leaf is lazy", hint="run it")', "place"),
        ('StateError("the leaf is lazy", where=name)', "cure"),
    ],
)
def test_a_planted_text_is_found(call: str, complaint: str) -> None:
    found = wrong("a.py", f"raise {call}")
    assert [complaint in each for each in found] == ([True] if complaint else [])
