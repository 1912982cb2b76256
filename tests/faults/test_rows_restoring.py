"""Rows 12 to 21 of the fault matrix: what can be found where a snapshot should be."""

from __future__ import annotations

import itertools
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.faults import damaging, planting, running
from rigs.faults.damaging import BEFORE, NEWEST
from rigs.faults.planting import forge
from rigs.faults.running import steps_of_a_fit
from rigs.faults.trials import fails_without, first_failure
from rigs.parallel import snapshot_cases
from saving import GOLDEN, assert_same, golden_state, small
from torch import Tensor

from purestep import errors, tree
from purestep.snapshot import Snapshots, manifest, orbax_io, read_history, verify

FLIPS = range(60)
CUTS = range(60, 90)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A directory with three good steps, to damage."""
    return Path(shutil.copytree(damaging.whole(), tmp_path / "run"))


def flip(path: Path) -> None:
    """A bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def restored(folder: Path, **options: Any) -> Any:
    with Snapshots(folder, **options) as snapshots:
        return snapshots.restore(running.state(0))


# --- 12, 13: damage ---------------------------------------------------------------------------------------------------


def test_row_12_a_flipped_bit_anywhere(tmp_path: Path) -> None:
    def trial(number: int, folder: Path) -> str | None:
        return damaging.trial(number, folder, kinds="f")

    assert first_failure(trial, FLIPS, tmp_path) is None


def test_row_12_without_checksums_a_flipped_bit_goes_unnoticed(run: Path) -> None:
    flip(running.largest_file(run / str(NEWEST)))

    def check() -> None:
        assert "not what was written (its checksum differs)" in str(damaging.strictly(run))

    check()
    with fails_without("purestep.snapshot.manifest.check_files"):
        check()


def test_row_12_a_bit_of_the_manifest(run: Path) -> None:
    """What is no tensor stands in the manifest alone: its own digest is all that guards it."""
    path = run / str(NEWEST) / manifest.NAME
    path.write_bytes(path.read_bytes().replace(b'"meta": null', b'"meta": true'))

    def check() -> None:
        assert "does not have the digest" in str(damaging.strictly(run))

    check()
    with fails_without("purestep.snapshot.manifest._parse", lambda path, digest: json.loads(path.read_bytes())):
        check()


def test_row_13_cut_short_or_gone(tmp_path: Path) -> None:
    def trial(number: int, folder: Path) -> str | None:
        return damaging.trial(number, folder, kinds="thd")

    assert first_failure(trial, CUTS, tmp_path) is None


def test_row_13_every_file_emptied_cut_or_gone_is_not_listed(tmp_path: Path) -> None:
    def check(folder: Path, name: Path, cut: str) -> None:
        step = Path(shutil.copytree(damaging.whole() / "1", folder / "1"))
        victim = step / name
        data = victim.read_bytes()
        victim.write_bytes({"empty": b"", "half": data[: len(data) // 2], "last": data[:-1], "gone": b""}[cut])
        if cut == "gone":
            victim.unlink()
        # The last byte of the digest's file is the end of its line.
        changed = cut == "gone" or (len(data) > 0 and (cut, name.name) != ("last", manifest.DIGEST_NAME))
        assert Snapshots(folder).steps() == ([] if changed else [1]), (name, cut)

    names = [path.relative_to(damaging.whole() / "1") for path in running.files_of(damaging.whole() / "1")]
    for index, (name, cut) in enumerate(itertools.product(names, ("empty", "half", "last", "gone"))):
        check(tmp_path / str(index), name, cut)
    largest = running.largest_file(damaging.whole() / "1").relative_to(damaging.whole() / "1")
    with fails_without("purestep.snapshot.manifest._check_sizes"):
        check(tmp_path / "off", largest, "half")


def test_row_13_a_file_too_many_is_harmless(run: Path) -> None:
    (run / str(NEWEST) / "state" / "notes.txt").write_text("x")
    (run / "readme").write_text("x")
    (run / "02").mkdir()
    assert damaging.falls_back(run, "three files too many", damaged=False) is None


# --- 14 to 16: which one ----------------------------------------------------------------------------------------------


def test_row_14_the_newest_is_bad_and_the_one_before_is_good(run: Path) -> None:
    flip(running.largest_file(run / str(NEWEST)))
    reader = Snapshots(run, writer=False)
    with pytest.warns(RuntimeWarning, match=f"went back to step {BEFORE}, 1 steps lost") as caught:
        assert reader.restore(running.state(0)).step == BEFORE
    assert "its checksum differs" in str(caught[0].message)
    assert reader.steps() == [1, BEFORE, NEWEST]
    for ask in (lambda: restored(run, strict=True), lambda: reader.restore(running.state(0), step=NEWEST)):
        with pytest.raises(errors.Corrupt, match="its checksum differs"):
            ask()
    with Snapshots(run, keep=None) as snapshots:
        with pytest.warns(RuntimeWarning, match=rf"renamed to {NEWEST}\.corrupt"):
            assert_same(snapshots.restore(running.state(0)).state, running.state(BEFORE))
        assert snapshots.steps() == [1, BEFORE]
        snapshots.save(NEWEST, running.state(NEWEST))
    assert Snapshots(run).steps() == [1, BEFORE, NEWEST]
    assert (run / f"{NEWEST}.corrupt" / manifest.NAME).exists()


@pytest.mark.parametrize("guard", ["snapshots.Snapshots._pass_over", "directory.set_aside"])
def test_row_14_a_fall_that_is_not_told_or_not_kept_is_noticed(run: Path, guard: str) -> None:
    flip(running.largest_file(run / str(NEWEST)))
    with fails_without(f"purestep.snapshot.{guard}"):
        assert damaging.falls_back(run, "a bit", damaged=True) is None


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError(24, "Too many open files"), RuntimeError("can't start new thread")]
)
def test_row_14_what_the_reader_lacks_is_no_damage(
    run: Path, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted fault: taken for damage, it would set a good step aside."""

    def read(*args: Any, **kwargs: Any) -> None:
        raise error

    def check() -> None:
        with pytest.raises(errors.SnapshotError, match="cannot be read: .*more memory, file descriptors") as caught:
            restored(run)
        assert not isinstance(caught.value, errors.Corrupt)

    monkeypatch.setattr(orbax_io, "read", read)
    check()
    assert Snapshots(run).steps() == [1, BEFORE, NEWEST]
    with fails_without("purestep.snapshot.manifest.unreadable", lambda where, e: errors.Corrupt("bad", where="x")):
        check()


def test_row_15_all_bad_is_never_a_fresh_start(tmp_path: Path) -> None:
    def check() -> None:
        with pytest.raises(errors.Corrupt, match=r"every snapshot here is damaged\n  4: .*missing.*\n  2: .*missing"):
            steps_of_a_fit(tmp_path, steps=6)

    with Snapshots(tmp_path, every_steps=2) as snapshots:
        steps_of_a_fit(snapshots)
    for step in ("2", "4"):
        (tmp_path / step / manifest.NAME).unlink()
    check()
    check()
    with fails_without("purestep.snapshot.directory.nothing_good", lambda root, damaged: errors.NotFound("none")):
        check()


def test_row_15_what_was_set_aside_counts_as_damaged(run: Path) -> None:
    for step in (1, BEFORE, NEWEST):
        (run / str(step)).rename(run / f"{step}.corrupt")
    with pytest.raises(errors.Corrupt, match=r"1\.corrupt: set aside\n  2\.corrupt: set aside"):
        restored(run)


def test_row_16_an_empty_directory_and_a_step_that_is_not_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "purestep")
    steps_of_a_fit(tmp_path / "new")
    assert f"fresh start: no snapshot in {tmp_path / 'new'}" in caplog.text
    with Snapshots(tmp_path / "new") as snapshots:
        snapshots.save(8, small())
        with pytest.raises(errors.NotFound, match=r"no snapshot of step 5 \(cure: pass one of: 4, 8\)"):
            snapshots.restore(small(), step=5)
    with pytest.raises(errors.NotFound, match="no snapshot here"):
        restored(tmp_path / "none", writer=False)
    assert not (tmp_path / "none").exists()


def test_row_16_fails_where_another_step_stands_in_or_nothing_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    real = Snapshots.restore
    newest = lambda self, template, *, step=None, only=None: real(self, template, only=only)  # noqa: E731
    with fails_without("purestep.snapshot.snapshots.Snapshots.restore", newest):
        test_row_16_an_empty_directory_and_a_step_that_is_not_there(tmp_path / "another", caplog)
    with fails_without("purestep.loop.resume.log", logging.Logger("nobody")):
        test_row_16_an_empty_directory_and_a_step_that_is_not_there(tmp_path / "nothing", caplog)


# --- 17, 18: another model, another format ----------------------------------------------------------------------------


RESHAPED = {"w": torch.zeros(3, 2), "b": torch.zeros(2)}


@pytest.mark.parametrize(
    ("template", "line", "same"),
    [
        (RESHAPED, r"w: float32 \[2, 3\] in the snapshot, float32 \[3, 2\] in", "b"),
        ({"w": torch.zeros(2, 3).half(), "b": torch.zeros(2)}, r"w: float32 \[2, 3\] in the snapshot, float16 \[", "b"),
        ({"w": torch.zeros(2, 3)}, r"b: float32 \[2\] in the snapshot only", "w"),
        (small() | {"c": torch.zeros(1)}, r"c: float32 \[1\] in the template only", "w"),
        ({"w": torch.zeros(2, 3), "b": 1}, r"b: float32 \[2\] in the snapshot, Python int in the template", "w"),
    ],
    ids=["reshaped", "another dtype", "removed", "added", "no tensor any more"],
)
def test_row_17_a_changed_model(
    template: Any, line: str, same: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told before any data are read; nothing is cast; a part is restored where that is asked for."""

    def check() -> None:
        with pytest.raises(errors.Mismatch, match=line):
            snapshots.restore(template)

    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, small(3))
        snapshots.wait()
        with monkeypatch.context() as patch:
            patch.setattr(orbax_io, "read", lambda *args, **kwargs: pytest.fail("data were read"))
            check()
            if template is RESHAPED:
                with fails_without("purestep.snapshot.manifest.compare"):
                    check()
        assert torch.equal(snapshots.restore(template, only=same).state[same], small(3)[same])


def test_row_17_a_renamed_leaf_is_told_with_the_nearest_name(tmp_path: Path) -> None:
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, {"layers.0.weight": torch.zeros(2), "head": torch.zeros(1)})
        with pytest.raises(errors.Mismatch) as caught:
            snapshots.restore({"layer.0.weight": torch.zeros(2), "head": torch.zeros(1)})
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("2 leaves differ from the template")
    assert lines[1].strip() == "layer.0.weight: float32 [2] in the template only (nearest name: layers.0.weight)"
    assert lines[2].startswith("  layers.0.weight: float32 [2] in the snapshot only (nearest name: layer.0.weight)")


def zeros(state: Any) -> Any:
    return tree.map(lambda x: torch.zeros_like(x) if isinstance(x, Tensor) else x, state)


def test_row_18_the_first_format_loads_for_ever() -> None:
    found = Snapshots(GOLDEN, writer=False).restore(zeros(golden_state()))
    assert_same(found.state, golden_state())
    assert (found.step, found.loop, found.metrics, found.meta) == (12, {"epoch": 3}, {"loss": 0.25}, ["golden"])
    assert found.history is None
    assert Snapshots(GOLDEN, writer=False).best() == 12


def test_row_18_the_first_format_with_earlier_rows_in_a_file(tmp_path: Path) -> None:
    root = Path(shutil.copytree(f"{GOLDEN}-rows", tmp_path / "run"))
    steps = range(1, 41)
    expected = {
        "epoch": list(steps),
        "step": [3 * n for n in steps],
        "train_loss": [1 / n for n in steps],
        "val_loss": [None if n % 2 else 0.5 for n in steps],
    }
    found = Snapshots(root, writer=False).restore(zeros(golden_state()))
    assert_same(found.state, golden_state())
    assert found.history == expected
    assert found.loop["record"]["epoch"] == 3
    assert (read_history(root, 12), verify(root, 12)) == (expected, None)
    flip(root / "rows-1.jsonl")
    with pytest.raises(errors.Corrupt, match=r"earlier rows of the history: rows-1\.jsonl is not what was written"):
        Snapshots(root, writer=False).restore(zeros(golden_state()), step=12)


def test_row_18_the_second_format_of_several_processes() -> None:
    root = GOLDEN.with_name("snapshot-format-2")
    found = Snapshots(root, writer=False).restore(snapshot_cases.small_whole(0))
    assert_same(found.state, snapshot_cases.small_whole(3))
    assert (found.step, found.loop, found.meta) == (3, {"epoch": 3, "history": [1.0]}, ["golden"])
    assert verify(root, 3) is None


def test_row_18_damaged_values_of_earlier_formats_are_named(tmp_path: Path) -> None:
    """Their files with values have no checksum: the leaves have one each."""
    root = Path(shutil.copytree(GOLDEN.with_name("snapshot-format-2"), tmp_path / "run"))
    needle = torch.full((6,), 3.0).numpy().tobytes()
    hit = [path for path in root.glob("**/ocdbt.process_0/d/*") if needle in path.read_bytes()]
    for path in hit:
        path.write_bytes(path.read_bytes().replace(needle, b"\1" + needle[1:]))
    assert hit

    def check() -> None:
        with pytest.raises(errors.Corrupt, match="the values of params/w are not the saved ones"):
            Snapshots(root, writer=False).restore(snapshot_cases.small_whole(0), step=3)
        assert verify(root, 3)

    check()
    real = manifest.check_values
    off = lambda path, leaf, piece, *rest, **where: real(path, leaf, piece._replace(crc32=None), *rest, **where)  # noqa: E731
    with fails_without("purestep.snapshot.manifest.check_values", off):
        check()


def test_row_18_a_newer_format_is_refused_by_name(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forge(run / str(NEWEST), lambda record: record.update(format=4))

    def check() -> None:
        with pytest.raises(
            errors.Mismatch, match=r"format 4, written by a newer purestep.*cure: update your checkout of purestep, and"
        ):
            restored(run)

    check()
    assert (run / str(NEWEST)).exists()
    with fails_without("purestep.snapshot.manifest.FORMAT", 4):
        check()


# --- 19, 20: hostile directories --------------------------------------------------------------------------------------


@pytest.mark.parametrize("plant", planting.PLANTS[:5], ids=lambda plant: plant.__name__)
def test_row_19_planted_code_is_not_run(plant: Callable[..., None], tmp_path: Path) -> None:
    assert planting.restored(plant, 0, tmp_path) is None


def test_row_19_a_reader_that_unpickles_is_noticed(tmp_path: Path) -> None:
    found = planting.restored(planting.a_pickle, 0, tmp_path, off="unpickle_what_is_there")
    assert found == "a pickle: code was run"


@pytest.mark.parametrize("plant", planting.PLANTS[5:], ids=lambda plant: plant.__name__)
@pytest.mark.parametrize("number", range(3))
def test_row_20_no_way_out_and_no_bomb(plant: Callable[..., None], number: int, tmp_path: Path) -> None:
    assert planting.restored(plant, number, tmp_path) is None


def test_row_20_a_writer_that_follows_links_is_noticed(tmp_path: Path) -> None:
    def trial(number: int, folder: Path) -> str | None:
        return planting.restored(planting.a_link, number, folder, off="delete_through_links")

    assert "something outside was changed" in str(first_failure(trial, range(20), tmp_path))


def test_row_20_a_reader_of_code_that_looks_only_at_its_directory_is_noticed(tmp_path: Path) -> None:
    def trial(number: int, folder: Path) -> str | None:
        return planting.restored(
            planting.foreign_code, number, folder, off="purestep.compile.code_directory._problem_above"
        )

    assert "foreign code: ['code " in str(first_failure(trial, range(20), tmp_path))


def test_row_20_links_are_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "1").symlink_to(run / "1")
    assert Snapshots(tmp_path / "linked").steps() == []
    with pytest.raises(errors.Corrupt, match="a symbolic link, which is not followed"):
        Snapshots(tmp_path / "linked").restore(running.state(0), step=1)
    victim = running.largest_file(run / "1")
    shutil.copy(victim, tmp_path / "bytes")
    victim.unlink()
    victim.symlink_to(tmp_path / "bytes")
    with pytest.raises(errors.Corrupt, match="links are not followed"):
        Snapshots(run).restore(running.state(0), step=1)


def test_row_20_names_with_slashes_and_dots_are_distinct(tmp_path: Path) -> None:
    state = {"a/b": torch.tensor(1.0), "a.b": torch.tensor(2.0), "../../x": torch.tensor(3.0), "": torch.tensor(4.0)}
    state |= {"\0": torch.tensor(5.0), "x" * 300: torch.tensor(6.0)}
    with Snapshots(tmp_path / "run") as snapshots:
        snapshots.save(1, state)
        assert_same(snapshots.restore(tree.map(torch.zeros_like, state)).state, state)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


# --- 21 ---------------------------------------------------------------------------------------------------------------


def test_row_21_other_threads_and_another_torch_are_told(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Several processes, the rest of the row, are not supported yet."""

    def told(**options: Any) -> str:
        caplog.clear()
        assert restored(run, **options).step == NEWEST
        return "".join(record.getMessage() for record in caplog.records if record.name == "purestep")

    def check() -> None:
        assert "may differ in the last bits: torch 1.0 then" in told()
        assert "threads 99 then" in told()

    assert told() == ""
    forge(run / str(NEWEST), lambda record: record["environment"].update(threads=99, torch="1.0"))
    assert told(writer=False) == ""
    check()
    with fails_without("purestep.snapshot.reader._warn_of_changes"):
        check()
