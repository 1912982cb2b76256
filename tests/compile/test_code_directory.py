"""Whose code a compiled step may load: the directory of inductor's cache, and what lies in it."""

from __future__ import annotations

import logging
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from helpers import tiny_mlp, vector_batch

import purestep as ps
from purestep import optim
from purestep.compile import code_directory

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    (tmp_path / "cache").mkdir(mode=0o755)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a file belong to another user. Another one than root cannot: to them, this user's files are another's."""
    if os.getuid() == 0:
        os.chown(path, 65534, 65534, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 65534)


def foreign(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give_away(path, monkeypatch)


def everybodys(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.chmod(0o777)


def a_groups(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.chmod(0o775)


def a_link_of_another_user(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.rename(path.with_name("own"))
    path.symlink_to(path.with_name("own"))
    give_away(path, monkeypatch)


def a_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.unlink() if path.is_file() else path.rmdir()
    path.touch()


@pytest.mark.parametrize("change", [foreign, everybodys, a_groups, a_link_of_another_user, a_file])
def test_a_directory_of_others_is_replaced_by_a_private_one_and_said_once(
    change, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    change(cache, monkeypatch)
    with caplog.at_level(logging.WARNING, "purestep"):
        found = [code_directory.directory(), code_directory.directory(whole=True)]
    assert set(found) == {Path(os.environ[VARIABLE])}
    assert not found[0].is_relative_to(cache)
    assert found[0].stat().st_mode & 0o777 == 0o700
    assert caplog.text.count("compiled code is kept in") == 1
    assert str(cache) in caplog.text


@pytest.mark.parametrize("change", [foreign, everybodys, a_groups])
@pytest.mark.parametrize("above", ["a", "a/b"])
def test_nobody_else_may_be_able_to_rename_a_directory_above(
    change, above: str, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    inner = cache / "a" / "b" / "c"
    inner.mkdir(parents=True)
    monkeypatch.setenv(VARIABLE, str(inner))
    change(cache / above, monkeypatch)
    with caplog.at_level(logging.WARNING, "purestep"):
        found = code_directory.directory()
    assert not found.is_relative_to(cache)
    assert f"{inner} is in {cache / above}, which" in caplog.text


def test_the_sticky_bit_of_a_directory_above_is_enough(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, str(cache / "a" / "b"))
    (cache / "a").mkdir()
    (cache / "a").chmod(0o1777)
    assert code_directory.directory(whole=True) == cache / "a" / "b"


def test_a_link_on_the_way_is_followed_once(cache: Path, monkeypatch: pytest.MonkeyPatch):
    (cache / "a").mkdir()
    (cache / "link").symlink_to(cache / "a")
    monkeypatch.setenv(VARIABLE, str(cache / "link" / "b"))
    assert code_directory.directory() == cache / "a" / "b" == Path(os.environ[VARIABLE])


@pytest.mark.parametrize("change", [foreign, everybodys])
@pytest.mark.parametrize("place", ["fxgraph", "fxgraph/ab/code.py"])
def test_nothing_in_the_directory_may_be_of_others(change, place: str, cache: Path, monkeypatch: pytest.MonkeyPatch):
    (cache / "fxgraph" / "ab").mkdir(parents=True)
    (cache / "fxgraph" / "ab" / "code.py").touch()
    change(cache / place, monkeypatch)
    assert code_directory.directory(whole=True) != cache


def test_in_a_directory_that_others_cannot_enter_a_umask_of_a_group_is_no_matter(cache: Path):
    (cache / "ab").mkdir()
    (cache / "ab").chmod(0o775)
    cache.chmod(0o700)
    assert code_directory.directory(whole=True) == cache


def test_the_cure_for_a_umask_of_a_group_lasts(cache: Path, caplog: pytest.LogCaptureFixture):
    """Torch writes more into the directory, by the umask."""
    cache.chmod(0o775)
    with caplog.at_level(logging.WARNING, "purestep"):
        assert code_directory.directory(whole=True) != cache
    (command,) = re.findall(r"or (chmod -R \S+ \S+) if you trust", caplog.text)
    for _ in range(2):
        subprocess.run(command.split(), check=True)
        code_directory._chosen.cache_clear()  # as in the next process
        os.environ[VARIABLE] = str(cache)
        (cache / "more").mkdir(exist_ok=True)
        (cache / "more").chmod(0o775)
        assert code_directory.directory(whole=True) == cache


def test_a_part_that_cannot_be_searched_is_a_reason(cache: Path, monkeypatch: pytest.MonkeyPatch):
    (cache / "part").mkdir()
    true = os.scandir

    def denied(path: object):
        if Path(str(path)).name == "part":
            raise PermissionError(13, "Permission denied")
        return true(path)

    monkeypatch.setattr(os, "scandir", denied)
    assert code_directory.directory(whole=True) != cache


@pytest.mark.parametrize("at", ["temporary", "temporary/private"])
def test_without_a_safe_directory_nothing_is_compiled(at: str, cache: Path, monkeypatch: pytest.MonkeyPatch):
    """The private one lies where others can rename it, or is one that others can write."""
    cache.chmod(0o777)
    monkeypatch.setattr(code_directory, "private", lambda: cache.parent / "temporary" / "private")
    code_directory.private().mkdir()
    (cache.parent / at).chmod(0o777)
    for _ in range(2):
        with pytest.raises(ps.errors.ConfigError, match=f"others can write.* set {VARIABLE} to a directory of yours"):
            code_directory.directory()


def test_a_missing_directory_is_created_for_this_user(cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(VARIABLE, str(cache / "new"))
    assert code_directory.directory(whole=True) == cache / "new"
    assert (cache / "new").stat().st_mode & 0o777 == 0o700
    monkeypatch.delenv(VARIABLE)
    assert code_directory.directory().parent == cache.parent / "temporary"


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("plugin", ["", "0"], ids=["plug-in", "public entry"])
def test_inductor_writes_nothing_into_a_directory_of_others(plugin: str, cache: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PURESTEP_CPU", plugin)
    cache.chmod(0o777)
    program = ps.program(tiny_mlp(), ps.supervised(torch.nn.CrossEntropyLoss()), optim.sgd(0.1))
    ps.compile_step(program.train_step)(program.init(), vector_batch(4, 0))
    assert not list(cache.iterdir())
    assert any(path.is_file() for path in Path(os.environ[VARIABLE]).rglob("*"))
