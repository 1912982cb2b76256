"""Every row of `systems.toml` is proved by a test, and tests/systems/README.md says for each how to move over.

    python -m pytest tests/laws/test_systems.py        # fails where a row has no test, or the tables are out of step
    python -m pytest -m row                            # runs those tests
    python tests/laws/test_systems.py                  # prints each row with its tests

A test proves the rows that it is marked with, `@pytest.mark.row("0.7", "B2")`; rows of the fault matrix stand beside
them as "F12". Each rule is a function that lists violations, and has planted ones that it must find.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

TESTS = Path(__file__).resolve().parents[1]
TABLES = TESTS / "systems" / "README.md"
MOST = 5  # rows a test may prove
FAULT = re.compile(r"F\d+")

Rows = dict[str, str]
Sources = dict[str, str]


def rows_of(path: Path) -> Rows:
    """id -> what it is about, in the order of the file."""
    return {name: text for table in tomllib.loads(path.read_text("utf-8")).values() for name, text in table.items()}


def sources_of(folder: Path) -> Sources:
    return {str(path.relative_to(folder)): path.read_text("utf-8") for path in sorted(folder.rglob("test_*.py"))}


ROWS = rows_of(TESTS / "systems.toml")


# --- the marks --------------------------------------------------------------------------------------------------------


class Mark(NamedTuple):
    """A test and the rows that it says it proves."""

    test: str  # path::name
    ids: tuple[Any, ...]  # None for what is no literal text
    checks: bool  # it asserts something
    runs: bool  # it is run on every machine


def marks(sources: Sources) -> list[Mark]:
    return [mark for path, text in sources.items() for mark in _marks_in(path, text)]


@functools.cache
def _marks_in(path: str, text: str) -> tuple[Mark, ...]:
    return tuple(_marks(path, ast.parse(text)))


def _marks(path: str, module: ast.Module) -> Iterator[Mark]:
    inside: set[ast.AST] = set()
    for function in (node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)):
        calls = [call for decorator in function.decorator_list for call in _row_calls(decorator)]
        inside.update(calls)
        if calls:
            is_test = function.name.startswith("test_")
            ids = tuple(getattr(argument, "value", None) for call in calls for argument in call.args)
            yield Mark(f"{path}::{function.name}", ids, is_test and _checks(function), not _is_skipped(function))
    for call in _row_calls(module):
        if call not in inside:
            yield Mark(f"{path}:{call.lineno}", (), False, True)


def _row_calls(node: ast.AST) -> list[ast.Call]:
    return [n for n in ast.walk(node) if isinstance(n, ast.Call) and ast.unparse(n.func) == "pytest.mark.row"]


def _checks(function: ast.FunctionDef) -> bool:
    called = {ast.unparse(node.func).split(".")[-1] for node in ast.walk(function) if isinstance(node, ast.Call)}
    # `refused` and `same` are the fault matrix's: an error with its place, two results that are equal to the bit.
    checking = any(name in ("raises", "warns", "refused", "same") or name.startswith("assert_") for name in called)
    return checking or any(isinstance(node, ast.Assert) for node in ast.walk(function))


def _is_skipped(function: ast.FunctionDef) -> bool:
    text = " ".join(map(ast.unparse, function.decorator_list))
    return bool(re.search(r"pytest\.mark\.(skip|skipif|xfail|cuda)\b", text))


# --- rules about the marks --------------------------------------------------------------------------------------------


def rows_without_a_test(sources: Sources, rows: Rows) -> list[str]:
    proved = {name for mark in marks(sources) if mark.checks and mark.runs for name in mark.ids}
    return [f"{name}: no test proves that {text}" for name, text in rows.items() if name not in proved]


def rows_that_do_not_exist(sources: Sources, rows: Rows) -> list[str]:
    return [
        f"{mark.test}: there is no row {name!r}"
        for mark in marks(sources)
        for name in mark.ids
        if name not in rows and not (isinstance(name, str) and FAULT.fullmatch(name))
    ]


def too_many_rows(sources: Sources, rows: Rows) -> list[str]:
    del rows  # any five
    return [f"{m.test}: {len(m.ids)} rows, {MOST} at most" for m in marks(sources) if len(set(m.ids)) > MOST]


def marks_that_prove_nothing(sources: Sources, rows: Rows) -> list[str]:
    del rows  # whatever it is marked with
    return [f"{mark.test}: is no test that asserts anything" for mark in marks(sources) if not mark.checks]


RULES = (rows_without_a_test, rows_that_do_not_exist, too_many_rows, marks_that_prove_nothing)
Rule = Callable[[Sources, Rows], list[str]]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_marks_are_right(rule: Rule):
    found = rule(sources_of(TESTS), ROWS)
    assert not found, "\n".join(found)


FEW = {"0.1": "it works", "B1": "it worked"}
GOOD = """
@pytest.mark.row("0.1", "B1", "F12")
def test_it():
    assert work()
"""
PLANTED = [
    (rows_without_a_test, GOOD.replace('"B1", ', ""), "B1: no test proves that it worked"),
    (rows_without_a_test, GOOD.replace("@pytest", "@pytest.mark.skip\n@pytest"), "0.1: no test"),
    (rows_without_a_test, GOOD.replace("@pytest", "@pytest.mark.cuda\n@pytest"), "0.1: no test"),
    (rows_without_a_test, GOOD.replace("assert work()", "import work"), "0.1: no test"),
    (rows_that_do_not_exist, GOOD.replace("0.1", "0.99"), "test_a.py::test_it: there is no row '0.99'"),
    (rows_that_do_not_exist, GOOD.replace('"0.1"', "NAME"), "there is no row None"),
    (rows_that_do_not_exist, GOOD.replace("F12", "F"), "there is no row 'F'"),
    (too_many_rows, GOOD.replace('"0.1"', '"1", "2", "3", "4"'), "test_a.py::test_it: 6 rows, 5 at most"),
    (marks_that_prove_nothing, GOOD.replace("assert work()", "work()"), "test_a.py::test_it: is no test"),
    (marks_that_prove_nothing, GOOD.replace("test_it", "helper"), "test_a.py::helper: is no test"),
    (marks_that_prove_nothing, GOOD + '\npytestmark = pytest.mark.row("0.1")', "test_a.py:6: is no test"),
]


@pytest.mark.parametrize(("rule", "text", "complaint"), PLANTED)
def test_a_wrong_mark_is_found(rule: Rule, text: str, complaint: str):
    found = rule({"test_a.py": text}, FEW)
    assert found
    assert found[0].startswith(complaint) or complaint in found[0]


def test_right_marks_are_left_alone():
    one, several = '@pytest.mark.row("0.1", "B1", "F12")', 'pytest.param(1, marks=pytest.mark.row("0.1", "B1"))'
    nested = GOOD.replace(one, f'@pytest.mark.parametrize("x", [{several}])')
    for text in (GOOD, nested, GOOD.replace("assert work()", "assert_work()")):
        assert [rule({"test_a.py": text}, FEW) for rule in RULES] == [[], [], [], []]


def test_there_are_as_many_rows_as_there_were():
    systems = Counter(name.partition(".")[0] for name in ROWS if not name.startswith("B"))
    assert [systems[system] for system in "01234"] == [21, 29, 23, 20, 27]
    assert list(ROWS)[120:] == [f"B{number}" for number in range(1, 54)]


# --- the tables -------------------------------------------------------------------------------------------------------


class Cells(NamedTuple):
    """One row of a table: what was written, and what is written now."""

    name: str
    before: str
    now: str


def cells(page: str) -> list[Cells]:
    """The rows of the tables whose first column is an id."""
    lines = re.findall(r"^\| *([0-4]\.\d+|B\d+) *\|(.*)\|(.*)\| *$", page, flags=re.MULTILINE)
    return [Cells(name, before.strip(), now.strip()) for name, before, now in lines]


def rows_out_of_step(page: str, rows: Rows) -> list[str]:
    listed = [cell.name for cell in cells(page)]
    missing = [f"{name}: not in the tables" for name in rows if name not in listed]
    extra = [f"{name}: in the tables, and no row" for name in listed if name not in rows]
    twice = [f"{name}: {count} times in the tables" for name, count in Counter(listed).items() if count > 1]
    empty = [f"{cell.name}: nothing is said" for cell in cells(page) if not cell.before or not cell.now]
    return missing + extra + twice + empty


def names_that_do_not_exist(page: str, rows: Rows) -> list[str]:
    """Code in the last column that names what is not public, or calls it with arguments that it does not take."""
    del rows  # whatever they are about
    found = []
    for cell in cells(page):
        for code in re.findall(r"`([^`]+)`", cell.now):
            try:
                parsed = ast.parse(code)
            except SyntaxError:
                found.append(f"{cell.name}: `{code}` is no Python")
                continue
            found += [f"{cell.name}: `{code}`: {what}" for what in _unknown(parsed)]
    return found


def _unknown(parsed: ast.Module) -> Iterator[str]:
    for node in ast.walk(parsed):
        if isinstance(node, ast.Attribute) and (dotted := _dotted(node)):
            owner = _resolved(dotted.rpartition(".")[0])
            if (inspect.ismodule(owner) or inspect.isclass(owner)) and not hasattr(owner, node.attr):
                yield f"there is no {dotted}"
        if isinstance(node, ast.Call) and (dotted := _dotted(node.func)):
            yield from _wrong_arguments(dotted, node)


def _wrong_arguments(dotted: str, call: ast.Call) -> Iterator[str]:
    import purestep as ps

    function = _resolved(dotted)
    if not callable(function) or any(isinstance(argument, ast.Starred) for argument in call.args):
        return
    named = {keyword.arg: None for keyword in call.keywords if keyword.arg}
    if function is ps.fit:
        named = {name: None for name in named if name not in ps.FitConfig.model_fields}
        unknown = [name for name in named if name not in inspect.signature(ps.fit).parameters]
        if unknown:
            yield f"fit has no {unknown[0]}"
            return
    try:
        inspect.signature(function).bind_partial(*call.args, **named)
    except (TypeError, ValueError) as error:
        yield str(error)


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    head = _dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{head}.{node.attr}" if isinstance(node, ast.Attribute) and head else ""


def _resolved(dotted: str) -> Any:
    """What a dotted name of the tables stands for; a variable for its class; None for what is not ours."""
    import torch

    import purestep as ps

    known: dict[str, Any] = {"ps": ps, "torch": torch, "nn": torch.nn}
    known |= {name: getattr(ps, name) for name in ("config", "events", "metrics", "optim", "schedules", "sinks", "rng")}
    known |= {"program": ps.Program, "state": ps.TrainState, "snapshots": ps.Snapshots, "result": ps.FitResult}
    head, *rest = dotted.split(".")
    found = known.get(head)
    for name in rest:
        found = getattr(found, name, None)
    return found


@pytest.mark.parametrize("rule", [rows_out_of_step, names_that_do_not_exist], ids=lambda rule: rule.__name__)
def test_the_tables_are_right(rule: Callable[[str, Rows], list[str]]):
    found = rule(TABLES.read_text("utf-8"), ROWS)
    assert not found, "\n".join(found)


PAGE = "| row | before | now |\n|---|---|---|\n| 0.1 | `Trainer()` | `ps.fit(state, loaders, program, epochs=3)` |\n"
PAGE += "| B1 | nothing | `optim.adamw(3e-4, weight_decay=0.1)`, `f(event)`, `program.init(seed=0).step` |\n"


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("| B1 |", "| B2 |", "B1: not in the tables"),
        ("| 0.1 |", "| B1 |", "0.1: not in the tables"),
        ("nothing", "", "B1: nothing is said"),
        ("epochs=3", "epoch=3", "fit has no epoch"),
        ("ps.fit(", "ps.fitt(", "there is no ps.fitt"),
        ("adamw(3e-4, weight_decay", "adamw(3e-4, decay", "unexpected keyword argument 'decay'"),
        ("f(event)", "f(event", "is no Python"),
        ("program.init", "program.start", "there is no program.start"),
    ],
)
def test_a_wrong_table_is_found(old: str, new: str, complaint: str):
    right, wrong = (rows_out_of_step(p, FEW) + names_that_do_not_exist(p, FEW) for p in (PAGE, PAGE.replace(old, new)))
    assert right == []
    assert complaint in " ".join(wrong)


if __name__ == "__main__":
    proving = marks(sources_of(TESTS))
    for row, about in ROWS.items():
        print(row, about, *(mark.test for mark in proving if row in mark.ids), sep="\n    ")
