"""Every test that `.ci/nightly` or `soak.txt` names exists: what a refactoring moves is not left out without a word."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
SOAK = [line for line in (TESTS / "soak.txt").read_text("utf-8").splitlines() if line and not line.startswith("#")]


def paths_of(script: str) -> list[str]:
    """Files and folders of tests in the strings of a shell script, with its braces expanded."""
    words = [word for line in re.findall(r"'([^']*tests/[^']*)'", script) for word in line.split()]
    named = [word for word in words if word.startswith("tests/")] + re.findall(r"\btests/rigs/[\w/]+\.py", script)
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\n' {' '.join(named)}"], capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def paths_without_a_test(script: str, root: Path = ROOT) -> list[str]:
    named = [(name, root / name) for name in paths_of(script)]
    return [name for name, path in named if not (any(path.rglob("test_*.py")) if path.is_dir() else path.is_file())]


@functools.cache
def functions_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text("utf-8") if path.is_file() else "")
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def names_without_a_test(names: list[str], root: Path = ROOT) -> list[str]:
    """Names like ``tests/x.py::test_y[case]`` without that file or function. Cases are checked at collection."""
    parts = [(name, *name.partition("[")[0].split("::")) for name in names]
    return [name for name, path, test in parts if test not in functions_of(root / path)]


def test_the_nightly_script_names_tests():
    script = (ROOT / ".ci" / "nightly").read_text("utf-8")
    assert len(paths_of(script)) > 20
    assert paths_without_a_test(script) == []


def test_soak_names_tests():
    assert len(SOAK) > 20
    assert names_without_a_test(SOAK) == []


@pytest.mark.parametrize(
    ("script", "missing"),
    [
        ("fast='tests/test_a.py tests/room'", []),
        ("fast='tests/test_{a,b}.py tests/room'", ["tests/test_b.py"]),
        ("fast='tests/test_a.py'\nfast+=' tests/none tests/empty'", ["tests/none", "tests/empty"]),
        ('check x "python tests/rigs/a/run.py -n 3"', ["tests/rigs/a/run.py"]),
    ],
)
def test_a_path_without_a_test_is_found(script: str, missing: list[str], tmp_path: Path):
    for name in ("tests/test_a.py", "tests/room/test_b.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "tests" / "empty").mkdir()
    assert paths_without_a_test(script, tmp_path) == missing


def test_a_test_that_is_not_there_is_found(tmp_path: Path):
    (tmp_path / "test_a.py").write_text("def test_one():\n    pass\n")
    names = ["test_a.py::test_one", "test_a.py::test_one[1]", "test_a.py::test_two", "test_b.py::test_one"]
    assert names_without_a_test(names, tmp_path) == ["test_a.py::test_two", "test_b.py::test_one"]
