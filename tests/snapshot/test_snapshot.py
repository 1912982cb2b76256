"""Snapshots: what comes back, what is refused, what stays, and what a fault leaves."""

from __future__ import annotations

import json
import math
import re
import sys
import weakref
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from saving import assert_same, bits, golden_state, small
from torch import Tensor, nn

import purestep as ps
from purestep import errors, report, tree
from purestep.snapshot import Snapshots, manifest, orbax_io, staging

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.bool),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
)


class Pair(NamedTuple):
    first: Any
    second: Any


def rich() -> Pair:
    """Every dtype, odd layouts, odd names, Python leaves, containers of all kinds."""
    generator = torch.Generator().manual_seed(0)
    every = {
        str(dtype): torch.randint(0, 256, (5, dtype.itemsize * 2), dtype=torch.uint8, generator=generator).view(dtype)
        for dtype in DTYPES
        if dtype != torch.bool
    }
    layouts = {
        "bool": torch.tensor([True, False, True]),
        "transposed": torch.arange(12.0).reshape(3, 4).t(),
        "strided": torch.arange(20)[::3],
        "expanded": torch.tensor([1.5]).expand(4, 3),
        "channels_last": torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last),
        "conjugated": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "zero_d": torch.tensor(2**60 + 1),
        "no_elements": torch.zeros(0, 3),
        "special": torch.tensor([math.nan, math.inf, -math.inf, -0.0]),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "a.b": torch.tensor(1.0),
        "odd %/é\n" + "x" * 300: torch.tensor(3.0),
        "": torch.tensor(4.0),
    }
    python = {"flag": True, "count": 2**70, "rate": math.nan, "name": "adam", "nothing": None}
    return Pair({"every": every, "a": {"b": torch.tensor(2.0)}}, [layouts, (python, Pair(torch.tensor(5), ()))])


# --- what comes back ----------------------------------------------------------------------------------------------


def test_every_leaf_comes_back_bit_for_bit(tmp_path):
    state = rich()
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(3, state)
        template = tree.map(lambda x: torch.zeros_like(x) if isinstance(x, Tensor) else x, state)
        before = tree.clone(template)
        snapshots.wait()
        found = snapshots.restore(template)
        assert_same(found.state, state)
        assert_same(template, before)
        kept = {leaf.data_ptr() for leaf in tree.leaves(template) if isinstance(leaf, Tensor) and leaf.numel()}
        fresh = [leaf.data_ptr() for leaf in tree.leaves(found.state) if isinstance(leaf, Tensor) and leaf.numel()]
        assert not kept & set(fresh)
        assert len(set(fresh)) == len(fresh)


def test_the_layout_of_the_template_is_kept(tmp_path):
    state = {"x": torch.randn(2, 3, 4, 5)}
    template = {"x": torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)}
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(0, state)
        found = snapshots.restore(template).state["x"]
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(found, state["x"])


def test_the_records_come_back(tmp_path):
    loop = {"epoch": 2, "history": [0.5, math.inf], "done": False, "none": None, "deep": {"name": "é"}}
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(5, small(), loop=loop, metrics={"loss": torch.tensor(0.25)}, meta=("a", 1))
        loop["epoch"] = 3
    found = Snapshots(tmp_path, writer=False).restore(small())
    assert found.step == 5
    assert found.loop == {"epoch": 2, "history": [0.5, math.inf], "done": False, "none": None, "deep": {"name": "é"}}
    assert found.metrics == {"loss": 0.25}
    assert found.meta == ["a", 1]


def test_the_state_may_change_right_after_save(tmp_path):
    state = {f"w{i}": torch.full((1000,), float(i)) for i in range(20)}
    with Snapshots(tmp_path) as snapshots:
        for step in range(3):
            expected = tree.clone(state)
            snapshots.save(step, state)
            tree.map(lambda x: x.add_(1.0), state)
            assert_same(snapshots.restore(state, step=step).state, expected)


def test_a_state_without_tensor_values(tmp_path):
    state = {"none": torch.zeros(0), "name": "x"}
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(0, state)
        assert_same(snapshots.restore(state).state, state)


# --- what stays ---------------------------------------------------------------------------------------------------


def test_keep_and_best(tmp_path):
    losses = {1: 0.5, 2: 0.1, 3: math.nan, 4: 0.3, 5: 0.4, 6: 0.1}
    with Snapshots(tmp_path, keep=2, keep_best=1, monitor="loss") as snapshots:
        for step, loss in losses.items():
            snapshots.save(step, small(step), metrics={"loss": loss})
        snapshots.wait()
        assert snapshots.steps() == [2, 5, 6]
        assert snapshots.latest() == 6
        assert snapshots.best() == 2
        assert_same(snapshots.restore(small(), step=2).state, small(2))
    assert Snapshots(tmp_path, writer=False).best() == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "2", "5", "6"]


def test_a_run_that_goes_on_with_another_monitor_keeps_its_own_best(tmp_path):
    with Snapshots(tmp_path, keep=1, keep_best=1, monitor="loss") as snapshots:
        snapshots.save(1, small(), metrics={"loss": 0.1, "acc": 0.9})
    with Snapshots(tmp_path, keep=1, keep_best=1, monitor="acc", mode="max") as snapshots:
        for step, acc in {2: 0.5, 3: 0.4, 4: 0.3}.items():
            snapshots.save(step, small(), metrics={"acc": acc})
        snapshots.wait()
        assert snapshots.steps() == [2, 4]


def test_best_by_the_largest(tmp_path):
    with Snapshots(tmp_path, keep=1, keep_best=2, monitor="acc", mode="max") as snapshots:
        for step, acc in enumerate([0.1, 0.9, 0.5, 0.7, 0.2]):
            snapshots.save(step, small(), metrics={"acc": acc})
        snapshots.wait()
        assert snapshots.steps() == [1, 3, 4]


def test_keep_all(tmp_path):
    with Snapshots(tmp_path, keep=None) as snapshots:
        for step in range(5):
            snapshots.save(step, small())
        snapshots.wait()
        assert snapshots.steps() == [0, 1, 2, 3, 4]


def test_an_empty_directory(tmp_path):
    snapshots = Snapshots(tmp_path / "none")
    assert snapshots.steps() == []
    assert snapshots.latest() is None
    assert snapshots.best() is None
    with pytest.raises(errors.NotFound, match="no snapshot here"):
        snapshots.restore(small())
    assert not (tmp_path / "none").exists()


# --- what does not fit --------------------------------------------------------------------------------------------


def test_a_part_of_the_state(tmp_path):
    old = {"params": {"layers.1.w": torch.ones(2), "layers.10.w": torch.ones(3)}, "opt": torch.ones(4)}
    new = {"params": {"layers.1.w": torch.zeros(2), "layers.10.w": torch.zeros(3)}, "opt": torch.zeros(5)}
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, old)
        found = snapshots.restore(new, only={"params"}).state
        assert_same(found, {"params": old["params"], "opt": new["opt"]})
        assert found["opt"].data_ptr() != new["opt"].data_ptr()
        found = snapshots.restore(new, only="params/layers.1").state
        assert found["params"]["layers.1.w"].tolist() == [1, 1]
        assert found["params"]["layers.10.w"].tolist() == [0, 0, 0]
        with pytest.raises(
            errors.Mismatch, match=r"no leaf is under 'parms' \(cure: pass only= some of: opt, params\)"
        ):
            snapshots.restore(new, only="parms")
        match = (
            r"(?s)opt: float32 \[4\] in the snapshot.*cure: pass a template whose leaves fit the saved ones, or only="
        )
        with pytest.raises(errors.Mismatch, match=match):
            snapshots.restore(new, only={"opt"})
        with pytest.raises(errors.Mismatch, match=r'(?s)opt: .*cure: .*restore\(template, only="params"\)'):
            snapshots.restore(new)


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        ({1, 2}, r"a/x: a builtins.set cannot be stored"),
        (torch.zeros(2).to_sparse(), r"a/x: a sparse_coo tensor cannot be stored \(cure: call .to_dense\(\)\)"),
        (torch.zeros(2, device="meta"), r"a/x: a tensor on the meta device has no values"),
        (torch.empty(2, dtype=torch.float4_e2m1fn_x2), r"a/x: torch.float4_e2m1fn_x2 cannot be stored"),
    ],
)
def test_leaves_that_cannot_be_stored(tmp_path, leaf, text):
    with Snapshots(tmp_path) as snapshots:
        with pytest.raises(errors.StateError, match=text):
            snapshots.save(0, {"a": {"x": leaf}})
        assert snapshots.steps() == []


@pytest.mark.parametrize("name", ["run[1]", "x[best]/s", "back\\slash"])
def test_paths_that_orbax_cannot_use(tmp_path, name):
    with pytest.raises(errors.ConfigError, match=r"orbax cannot use a directory with .* in its path .*cure: pass ano"):
        Snapshots(tmp_path / name)
    with Snapshots(tmp_path / "plain") as written:
        written.save(1, small(1))
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / "plain").rename(tmp_path / name)
    if "\\" not in name:  # a reader finds what a rename has put there
        assert_same(Snapshots(tmp_path / name, writer=False).restore(small(1)).state, small(1))
        return
    with pytest.raises(errors.ConfigError, match="orbax cannot use"):
        Snapshots(tmp_path / name, writer=False)


@pytest.mark.parametrize("name", ["a b", "lr=1e-3", "what?", "star*", "100%", "{brace}", "co:lon", "ü", "'\""])
def test_other_names_are_fine(tmp_path, name):
    with Snapshots(tmp_path / name) as written:
        written.save(1, small(1))
        written.wait()
        assert_same(written.restore(small(1)).state, small(1))


def test_two_leaves_with_one_path(tmp_path):
    with Snapshots(tmp_path) as snapshots, pytest.raises(errors.SnapshotError, match="a/b: two leaves have this path"):
        snapshots.save(0, {"a/b": torch.zeros(1), "a": {"b": torch.ones(1)}})


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"loop": {"x": [torch.zeros(1)]}}, r"loop/x/0: a Tensor cannot be stored in JSON"),
        ({"meta": {1: 2}}, r"meta: the key 1 must be text"),
        ({"metrics": {"loss": "high"}}, r"metrics: loss is a str, not a number"),
    ],
)
def test_records_that_json_would_change(tmp_path, kwargs, text):
    with Snapshots(tmp_path) as snapshots, pytest.raises(errors.SnapshotError, match=text):
        snapshots.save(0, small(), **kwargs)


@pytest.mark.parametrize("step", [-1, True, 1.5, "1", 10**18])
def test_steps_that_are_no_counts(tmp_path, step):
    with (
        Snapshots(tmp_path) as snapshots,
        pytest.raises(errors.SnapshotError, match=f"step={step!r} must be an int in"),
    ):
        snapshots.save(step, small())


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"keep": 0}, "keep=0 must be an int of at least 1"),
        ({"keep_best": -1}, "keep_best=-1"),
        ({"every_steps": 0}, "every_steps=0"),
        ({"every_steps": "a"}, "every_steps='a'"),
        ({"keep": "3"}, "keep='3' must be an int of at least 1"),
        ({"keep_best": None}, "keep_best=None"),
        ({"monitor": "loss", "mode": "best"}, "mode='best'"),
    ],
)
def test_settings_that_make_no_sense(tmp_path, kwargs, text):
    with pytest.raises(errors.ConfigError, match=text):
        Snapshots(tmp_path, **kwargs)


@pytest.mark.parametrize("path", ["", None, 3])
def test_a_directory_that_is_no_path(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.ConfigError, match=r"Snapshots: directory=.* is not a path \(cure: pass .*runs/name"):
        Snapshots(path)


@pytest.mark.parametrize("path", ["s3://bucket/run", "gs://bucket/run", "file:///runs/a", Path("s3://bucket/run")])
def test_a_url_is_refused_and_nothing_is_written(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    program = ps.program(nn.Linear(2, 1), ps.supervised(nn.MSELoss()), ps.optim.sgd(0.1))
    batches, state = [(torch.ones(2, 2), torch.ones(2, 1))], program.init()
    for call in (
        lambda: Snapshots(path),
        lambda: ps.fit(state, batches, program, epochs=1, snapshots=path, progress=False),
        lambda: ps.fit(state, batches, program, epochs=1, snapshots="runs", resume=str(path), progress=False),
        lambda: ps.export_weights(path, program, state),
        lambda: ps.sinks.csv(path),
        lambda: ps.sinks.jsonl(path),
        lambda: ps.sinks.history_json(path),
        lambda: ps.sinks.tensorboard(path),
        lambda: ps.testing.record(path, state, batches[0]),
        lambda: report.write_page([], path),
    ):
        with pytest.raises(errors.ConfigError, match=r"is a URL, .*\(cure: pass a local directory"):
            call()
    assert {entry.name for entry in tmp_path.iterdir()} <= {"runs"}


def test_fit_with_an_empty_path_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    program = ps.program(nn.Linear(2, 1), ps.supervised(nn.MSELoss()), ps.optim.sgd(0.1))
    with pytest.raises(errors.ConfigError, match=r"Snapshots: directory='' is not a path"):
        ps.fit(program.init(), [(torch.ones(2, 2), torch.ones(2, 1))], program, epochs=1, snapshots="", progress=False)
    assert not list(tmp_path.iterdir())


# --- when ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "overwrite"), [(3, False), (5, True), (7, False), (5, False)])
def test_the_cure_of_a_step_that_is_too_old_cures(tmp_path, step, overwrite):
    with Snapshots(tmp_path, keep=None) as snapshots:
        for there in (5, 10):
            snapshots.save(there, small())
        with pytest.raises(errors.SnapshotError, match="is not newer than the existing step 10") as caught:
            snapshots.save(step, small(), overwrite=overwrite)
        after = re.search(r"call start_over\((?:after=(\d+))?\), which renames them", caught.value.hint)
        assert after is not None
        assert snapshots.start_over(after=after[1] and int(after[1])) == ([10] if after[1] else [5, 10])
        snapshots.save(step, small(), overwrite=overwrite)
        snapshots.wait()
        assert snapshots.steps()[-1] == step


def test_due_at_multiples_and_ages(tmp_path):
    snapshots = Snapshots(tmp_path, every_steps=4, every_epochs=2, every_seconds=10)
    snapshots.count_from(updates=6, epoch=1, now=100.0)
    assert snapshots.due(updates=7, epoch=1, now=109.0) == ()
    assert snapshots.due(updates=9, epoch=1, now=109.0) == ("every_steps",)
    assert snapshots.due(updates=9, epoch=2, now=110.0) == ("every_steps", "every_epochs", "every_seconds")
    assert snapshots.due(updates=9, epoch=1, now=109.0) == ("every_steps",)  # to ask changes nothing
    snapshots.count_from(updates=9, epoch=2, now=110.0)
    assert snapshots.due(updates=10, epoch=2, now=119.0) == ()
    assert snapshots.due(updates=12, epoch=2, now=120.0) == ("every_steps", "every_seconds")


def test_the_default_is_every_epoch(tmp_path):
    snapshots = Snapshots(tmp_path)
    assert snapshots.due(updates=10**6, epoch=0) == ()
    assert snapshots.due(updates=10**6, epoch=1) == ("every_epochs",)
    assert Snapshots(tmp_path, every_epochs=None).due(updates=10**6, epoch=10**6) == ()


@given(
    every=st.integers(1, 7),
    moves=st.lists(st.integers(0, 9), max_size=30),
)
def test_no_multiple_is_missed_and_none_counted_twice(every, moves):
    snapshots = Snapshots("never opened", every_steps=every, every_epochs=None)
    last = updates = saved = 0
    for move in moves:
        updates += move
        crossed = updates // every > last // every
        assert bool(snapshots.due(updates=updates, epoch=0)) == crossed
        if crossed:
            snapshots.count_from(updates=updates, epoch=0)
            last, saved = updates, saved + 1
    assert saved <= updates // every
    assert updates - last < every + max(moves, default=0)


# --- which is best ------------------------------------------------------------------------------------------------


def test_a_monitor_set_later_and_never_twice(tmp_path):
    with Snapshots(tmp_path, keep=1) as snapshots:
        snapshots.track("acc", mode="max")
        snapshots.track("loss", mode="min")
        for step, (acc, loss) in enumerate([(0.9, 0.9), (0.1, 0.1), (0.5, 0.5)]):
            snapshots.save(step, small(), metrics={"acc": acc, "loss": loss})
        snapshots.wait()
        assert snapshots.best() == 0
        assert snapshots.steps() == [0, 2]


def test_without_a_value_there_is_no_best(tmp_path):
    with Snapshots(tmp_path, monitor="loss") as snapshots:
        snapshots.save(1, small())
        snapshots.save(2, small(), metrics={"loss": math.nan, "acc": 1.0})
        snapshots.wait()
        assert snapshots.best() is None


# --- the parts ----------------------------------------------------------------------------------------------------


@st.composite
def odd_tensors(draw: st.DrawFn) -> Tensor:
    """Any dtype, 0 to 4 dimensions, some of them permuted, strided or expanded."""
    dtype = draw(st.sampled_from([d for d in DTYPES if d != torch.bool]))
    shape = draw(st.lists(st.integers(1, 4), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    count = math.prod(shape) * dtype.itemsize
    tensor = torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)
    if shape:
        tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
        tensor = tensor[:: draw(st.integers(1, 2))]
        if draw(st.booleans()):
            tensor = tensor.unsqueeze(0).expand(draw(st.integers(1, 3)), *tensor.shape)
    return tensor


@given(tensors=st.lists(odd_tensors(), min_size=1, max_size=4), again=st.lists(odd_tensors(), max_size=4))
@settings(deadline=None)
def test_to_host_memory_and_back(tensors, again):
    """Also with buffers left over from a state of other shapes."""
    spare: staging.Buffers = {}
    for round_of in (tensors, again, tensors):
        spare = staging.stage({str(i): tensor for i, tensor in enumerate(round_of)}, spare)
        for i, tensor in enumerate(round_of):
            like = torch.empty_like(tensor)
            back = staging.tensor(staging.array(spare[str(i)]), like)
            assert (back.shape, back.dtype, back.stride()) == (like.shape, like.dtype, like.stride())
            assert bits(back) == bits(tensor)


def test_buffers_are_used_again():
    state = {"a": torch.randn(10), "b": torch.randn(3, 4)}
    first = staging.stage(state, {})
    second = staging.stage({"a": state["a"], "b": torch.randn(4, 3)}, first)
    assert second["a"].data_ptr() == first["a"].data_ptr()
    assert second["b"].data_ptr() != first["b"].data_ptr()


def test_a_copy_that_fails_leaves_none_behind(tmp_path, monkeypatch: pytest.MonkeyPatch):
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, small(1.0))
        with monkeypatch.context() as patch:
            patch.setattr(staging, "stage", lambda *_: [][0])
            with pytest.raises(IndexError):
                snapshots.save(2, small(2.0))
        snapshots.save(3, small(3.0))
        assert_same(snapshots.restore(small()).state, small(3.0))
        assert snapshots.steps() == [1, 3]


def test_saves_of_other_layouts_one_after_another(tmp_path):
    others = (small() | {"b": torch.zeros(2, dtype=torch.float64)}, small() | {"b": 7}, small() | {"c": small()})
    with Snapshots(tmp_path, keep=None) as snapshots:
        for step, state in enumerate((small(1.0), *others, small(2.0))):
            snapshots.save(step, state)
            assert_same(snapshots.restore(state, step=step).state, state)


def test_no_state_is_kept_alive_by_its_save(tmp_path):
    state = small()
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, state)
        snapshots.wait()
        gone = [weakref.ref(leaf) for leaf in state.values()]
        del state
        assert [leaf() for leaf in gone] == [None, None]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
)


@given(value=JSON)
def test_records_come_back_as_they_went(value):
    copied = manifest.as_json(value, where="loop")
    assert copied == value
    assert json.loads(json.dumps(copied)) == value


@given(paths=st.lists(st.text(min_size=0, max_size=8), unique=True, max_size=20))
def test_stored_names_are_distinct_and_tame(paths):
    keys = [orbax_io.key(path) for path in paths]
    assert len(set(keys)) == len(keys)
    assert all(re.fullmatch(r"[A-Za-z0-9_%-]+", key) for key in keys)


def test_another_library_reads_the_arrays(tmp_path):
    from orbax.checkpoint import v1

    state = {"params": {"layer.0": torch.randn(3, 2)}, "half": torch.randn(4).bfloat16()}
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, state)
    found = v1.load(tmp_path / "1", checkpointable_name="state")
    assert found["params%2Flayer%2E0"].tolist() == state["params"]["layer.0"].tolist()
    assert str(found["half"].dtype) == "bfloat16"


def test_a_tensor_at_two_places_is_one_again(tmp_path):
    shared = torch.randn(3)
    with Snapshots(tmp_path) as snapshots:
        snapshots.save(1, {"a": shared, "b": shared, "c": shared.clone()})
        found = snapshots.restore({"a": shared, "b": shared, "c": shared.clone()}).state
        assert found["a"] is found["b"]
        assert found["c"] is not found["a"]
        assert_same(found, {"a": shared, "b": shared, "c": shared})
        snapshots.save(2, {"a": shared, "b": shared + 1, "c": shared})
        found = snapshots.restore({"a": shared, "b": shared, "c": shared}).state
        assert_same(found, {"a": shared, "b": shared + 1, "c": shared})


if __name__ == "__main__":
    with Snapshots(sys.argv[1], monitor="loss") as golden:
        golden.save(12, golden_state(), loop={"epoch": 3}, metrics={"loss": 0.25}, meta=["golden"])
