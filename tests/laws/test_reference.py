"""The pages that are made from docstrings are those that the docstrings make, so every public name is on them; every
public function shows an example, and the docstring of every value its fields."""

from __future__ import annotations

import importlib
import inspect
import sys
from pathlib import Path

import pages
import pytest

import purestep as ps

sys.path.insert(0, str(pages.GUIDES))
import reference


def test_the_generated_pages_are_current():
    """Otherwise: python examples/guides/reference.py."""
    stale = [path.name for path, text in reference.pages() if path.read_text("utf-8") != text]
    assert stale == []
    assert {path.name for path, _ in reference.pages()} >= {"README.md", "events.md", "settings.md"}


def test_every_name_has_a_sentence():
    rows = reference.names_page().splitlines()
    assert [row for row in rows if row.endswith("| . |")] == []


def test_a_changed_docstring_makes_a_page_stale(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ps.fit, "__doc__", "Other words.")
    changed = dict(reference.pages())[Path(reference.PACKAGE / "README.md")]
    assert "| `fit` | Other words. |" in changed


def without_example(names: dict[str, list[str]]) -> list[str]:
    """Public functions, and classes of `purestep` itself, that show no use of themselves; doctest runs what they do."""
    found: list[str] = []
    for module, members in names.items():
        for name in members:
            value = getattr(importlib.import_module(module), name)
            shown = inspect.isfunction(value) or (module == "purestep" and inspect.isclass(value))
            if shown and ">>>" not in inspect.getsource(value):
                found.append(f"{module}.{name}")
    return found


def test_every_public_function_has_an_example():
    assert without_example(reference.public_names()) == []
    assert without_example({"json": ["dumps"], "purestep": ["fit", "TrainState"]}) == ["json.dumps"]


@pytest.mark.parametrize("name", [one.__name__ for one in ps.events.Event.__args__] + ["Position"])
def test_the_docstring_of_an_event_has_every_field(name: str):
    cls = getattr(ps.events, name)
    declared = getattr(cls, "_fields", None) or tuple(cls.__dataclass_fields__)
    assert tuple(reference.fields(cls)) == declared


@pytest.mark.parametrize("cls", [ps.TrainState, ps.FitResult, ps.Mean, ps.Loss, ps.Program])
def test_the_docstring_of_a_value_has_every_field(cls: type):
    assert tuple(reference.fields(cls)) == cls._fields
