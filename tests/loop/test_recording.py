"""``fit(record=n)`` keeps the last batches and repeats any of their steps; `first_difference` names where runs part."""

from __future__ import annotations

import math
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_trees_close, tiny_convnet, tiny_mlp, vector_batch
from torch import Tensor, nn

import purestep as ps
from purestep import testing
from purestep.errors import ConfigError, DataError, Mismatch, NonFiniteError, NotFound
from purestep.loop import nonfinite_steps

CROSS_ENTROPY = ps.supervised(nn.CrossEntropyLoss())


def program(net: nn.Module | None = None, tx: Any = None, **kwargs: Any) -> ps.Program:
    return ps.program(net or tiny_mlp(), CROSS_ENTROPY, tx or ps.optim.adam(0.01), **kwargs)


def batches(count: int, bad: int | None = None) -> list[tuple[Tensor, Tensor]]:
    found = [vector_batch(8, seed=seed) for seed in range(count)]
    if bad is not None:
        found[bad][0][0, 0] = torch.nan
    return found


def fit(chosen: ps.Program, loader: Any, **fields: Any) -> ps.FitResult:
    state = chosen.init(seed=1, device="cpu")
    return ps.fit(state, {"train": loader}, chosen, **{"epochs": 1, "progress": False, "device": "cpu", **fields})


def states(chosen: ps.Program, loader: Any) -> list[ps.TrainState]:
    """Before the first call, and after each."""
    found = [chosen.init(seed=1, device="cpu")]
    for batch in loader:
        found.append(chosen.train_step(found[-1], batch)[0])
    return found


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Refilled:
    """A loader that yields one buffer, which it fills for each batch."""

    def __init__(self, found: list[tuple[Tensor, Tensor]]) -> None:
        self.found, self.buffer = found, [torch.empty_like(leaf) for leaf in found[0]]

    def __len__(self) -> int:
        return len(self.found)

    def __iter__(self) -> Any:
        for batch in self.found:
            for leaf, value in zip(self.buffer, batch, strict=True):
                leaf.copy_(value)
            yield tuple(self.buffer)


class Failing:
    """A loader whose worker fails behind n batches."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Any:
        yield from batches(self.count)
        raise OSError("the disk is gone")


class TestRecord:
    @pytest.mark.parametrize("size", [1, 3, 100])
    def test_it_keeps_the_last_batches_with_states(self, size: int):
        chosen, loader = program(Dropping()), batches(10)
        parts = fit(chosen, loader, record=size).recording
        known = states(chosen, loader)
        assert [step for part in parts for step in part.steps] == list(range(parts[0].first, 11))
        assert min(size, 10) <= sum(len(part.batches) for part in parts) < 2 * size
        for part in parts:
            assert_trees_close(part.state, known[part.first - 1], exact=True)
            for step in part.steps:
                found = testing.replay(part, chosen, step=step)
                assert_trees_close(found.state, known[step], exact=True)
                assert found.first is None

    def test_nothing_is_kept_by_default(self):
        assert fit(program(), batches(3)).recording == ()

    def test_a_flush_and_a_new_state_start_a_part(self):
        def answer(event: Any) -> Any:
            if isinstance(event, ps.events.StepEnd) and int(event.state.step) == 7:
                return event.state._replace(params={name: p * 2 for name, p in event.state.params.items()})
            return None

        chosen = program(accumulate=2)
        result = fit(chosen, batches(5), epochs=2, record=8, callbacks=[answer])
        # Calls 6 and 12 are flushes; call 7 only adds to a window, so its state is answered at the end of that window.
        assert [(part.steps[0], part.steps[-1]) for part in result.recording] == [(1, 5), (7, 11)]
        last = result.recording[-1]
        found = testing.replay(last, chosen).state
        assert_trees_close(chosen.flush(found)[0], result.state, exact=True)

    def test_an_error_writes_files_that_replay_reads(self, tmp_path: Path):
        chosen = program(Dropping())
        with pytest.raises(DataError, match="the disk is gone") as caught:
            fit(chosen, Failing(9), record=4, snapshots=tmp_path)
        known = states(chosen, batches(9))
        paths = sorted(tmp_path.glob("recording/*.safetensors"))
        assert [path.name for path in paths] == ["5-8.safetensors", "9-9.safetensors"]
        for path in paths:
            assert any(str(path) in note for note in caught.value.__notes__)
        for step in (5, 8):
            assert_trees_close(testing.replay(paths[0], chosen, step=step).state, known[step], exact=True)
        assert_trees_close(testing.replay(paths[0], chosen).state, known[8], exact=True)
        assert [part.first for part in caught.value.recording] == [5, 9]
        with pytest.raises(ConfigError, match="step 9 is not recorded: there are 5 to 8"):
            testing.replay(paths[0], chosen, step=9)

    def test_a_step_that_is_not_finite_is_among_them(self, tmp_path: Path):
        chosen = program()
        with pytest.raises(NonFiniteError) as caught:
            fit(chosen, batches(8, bad=6), record=4, snapshots=tmp_path)
        assert caught.value.step == 7
        path = tmp_path / "recording" / "5-8.safetensors"
        if not path.exists():  # the host read the metrics before call 8
            path = tmp_path / "recording" / "5-7.safetensors"
        assert testing.replay(path, chosen, step=7).first == "batch/0: 1 of 32 numbers are not finite"
        assert testing.replay(path, chosen, step=6).first is None

    def test_an_error_of_the_step_has_its_batch(self):
        with pytest.raises(RuntimeError) as caught:
            fit(program(), [*batches(3), (torch.ones(8, 5), torch.zeros(8, dtype=torch.long))], record=2)
        assert tuple(caught.value.recording[-1].batches[-1][0].shape) == (8, 5)

    def test_what_cannot_be_written_is_a_warning(self, tmp_path: Path, caplog: pytest.LogCaptureFixture):
        class Loader(Failing):
            def __iter__(self) -> Any:
                for x, y in batches(2):
                    yield {"x": x, "y": y, "odd": {1, 2}}
                raise OSError("the disk is gone")

        def objective(model: ps.Model, batch: Any) -> ps.Loss:
            return ps.Loss(nn.functional.cross_entropy(model(batch["x"]), batch["y"]), 8)

        chosen = ps.program(tiny_mlp(), objective, ps.optim.sgd(0.1))
        with pytest.raises(DataError, match="the disk is gone"):
            fit(chosen, Loader(2), record=4, snapshots=tmp_path)
        assert "calls 1 to 2 were not written down: batch/0/odd: a builtins.set cannot be stored" in caplog.text

    @pytest.mark.compile
    def test_donated_states_are_copied(self):
        chosen = program()
        result = fit(chosen, batches(6), record=2, compile={"backend": "aot_eager"})
        part = result.recording[0]
        assert_trees_close(part.state.params, states(chosen, batches(6))[part.first - 1].params, rtol=1e-5, atol=1e-6)
        step = result.recording[-1].steps[-1]
        found = testing.replay(result.recording[-1], chosen, step=step).state
        assert_trees_close(found.params, ps.tree.map(torch.clone, result.state.params), rtol=1e-5, atol=1e-6)


class TestRefilledBuffers:
    def test_recorded_batches_are_copies(self):
        chosen, loader = program(), batches(6)
        found = fit(chosen, Refilled(loader), record=3)
        part = found.recording[-1]
        for step, batch in zip(part.steps, part.batches, strict=True):
            assert_trees_close(batch, loader[step - 1], rtol=0, atol=0)
        again = testing.replay(part, chosen, step=part.steps[-1])
        assert_trees_close(again.state.params, found.state.params, rtol=0, atol=0)

    def test_copies_keep_their_classes(self):
        def step(state: Tensor, batch: Any) -> Any:
            return state + batch.x.sum() + float(batch.more["y"].sum()), {}

        x, y = torch.zeros(2), np.zeros(3)

        def refilled() -> Any:
            for k in range(4):
                x.fill_(k)
                y.fill(k)
                yield SimpleNamespace(x=x, more=UserDict(y=y))

        found = ps.fit(torch.zeros(()), {"train": refilled()}, ps.Program(step), epochs=1, progress=False, record=4)
        ((_, kept, _),) = found.recording
        assert [(type(b).__name__, type(b.more).__name__) for b in kept] == [("SimpleNamespace", "UserDict")] * 4
        assert [(float(b.x[0]), float(b.more["y"][0])) for b in kept] == [(k, k) for k in range(4)]

    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_a_halt_is_not_explained_by_another_batch(self, accumulate: int):
        chosen = program(accumulate=accumulate)
        with pytest.raises(NonFiniteError, match="the cause is unknown, because the batch was written") as found:
            fit(chosen, Refilled(batches(8, bad=3)))
        assert (found.value.step, found.value.batch, found.value.leaves) == (4, None, ())
        assert "x.clone()" in found.value.hint
        with pytest.raises(NonFiniteError) as found:
            fit(chosen, batches(8, bad=3))
        assert "batch/0" in found.value.leaves

    def test_processes_name_the_one_whose_batch_was_refilled(self):
        halted = NonFiniteError("halted")
        assert "the batch of process 1 is unknown" in nonfinite_steps.explain_from(halted, [[], None], "").what
        assert "not finite in process 0: x" in nonfinite_steps.explain_from(halted, [["x"], None], "").what
        assert "of all processes are finite" in nonfinite_steps.explain_from(halted, [[], []], "").what


def planted(chosen: ps.Program, at: int, change: Callable[[ps.TrainState], ps.TrainState]) -> ps.Program:
    """The program with another result of one step."""

    def train_step(state: Any, batch: Any) -> Any:
        new, metrics = chosen.train_step(state, batch)
        return (change(new) if int(new.step) == at else new), metrics

    return ps.Program(train_step)


def nudge(state: ps.TrainState) -> ps.TrainState:
    weight = state.params["2.weight"].clone()
    weight[1, 2] += 1e-3
    return state._replace(params={**state.params, "2.weight": weight})


class TestFirstDifference:
    @pytest.mark.parametrize("at", [1, 4, 6])
    def test_a_planted_difference_is_found(self, at: int):
        chosen, loader = program(), batches(6)
        state = chosen.init(device="cpu")
        found = testing.first_difference(
            testing.Run(chosen, state, loader), testing.Run(planted(chosen, at, nudge), state, loader)
        )
        assert found is not None
        assert (found.step, found.after, found.where) == (at, at - 1, "state/params/2.weight")
        assert found.size == pytest.approx(1e-3, rel=1e-3)
        assert list(found.leaves) == ["state/params/2.weight"]

    def test_programs_that_differ_by_a_setting(self):
        one, two = program(tx=ps.optim.sgd(0.1)), program(tx=ps.optim.sgd(ps.schedules.piecewise(0.1, {3: 0.5})))
        state, loader = one.init(device="cpu"), batches(6)
        found = testing.first_difference(
            testing.Run(one, state, loader), testing.Run(two, two.init(device="cpu"), loader)
        )
        assert found is not None
        assert found.step == 4

    def test_states_and_batches_that_differ(self):
        chosen, loader = program(), batches(4)
        state = chosen.init(device="cpu")
        run = testing.Run(chosen, state, loader, 10)
        found = testing.first_difference(run, run._replace(state=nudge(state)))
        assert (found.step, found.after, found.where) == (9, None, "state/params/2.weight")
        other = [*loader[:2], (loader[2][0] + 1, loader[2][1]), loader[3]]
        found = testing.first_difference(run, run._replace(batches=other))
        assert (found.step, found.after, found.where, found.size) == (12, 11, "batch/0", pytest.approx(1.0))
        assert testing.first_difference(run, run) is None
        other = [*loader[:3], (loader[3][0][:4], loader[3][1])]
        assert testing.first_difference(run, run._replace(batches=other)).size == float("inf")

    def test_rounding_is_allowed_on_request(self):
        chosen = program(tiny_convnet(dropout=0.0))
        loader = [(torch.randn(4, 1, 8, 8), torch.arange(4) % 3)]
        state = chosen.init(device="cpu")
        small = planted(chosen, 1, lambda s: s._replace(params={n: p * (1 + 1e-6) for n, p in s.params.items()}))
        one, two = testing.Run(chosen, state, loader), testing.Run(small, state, loader)
        assert testing.first_difference(one, two).step == 1
        assert testing.first_difference(one, two, rtol=1e-5) is None

    @pytest.mark.parametrize(
        ("one", "two", "size"),
        [
            (torch.tensor([2**53]), torch.tensor([2**53 + 1]), 1.0),
            (torch.tensor([-(2**63), 5]), torch.tensor([2**63 - 1, 5]), 2.0**64),
            (np.array([2**63], np.uint64), np.array([2**63 + 3], np.uint64), 3.0),
            (torch.tensor([True, False]), torch.tensor([True, True]), 1.0),
            (torch.tensor([math.inf]), torch.tensor([-math.inf]), math.inf),
            (np.array([math.nan, 1.0]), np.array([math.nan, 1.0]), 0.0),
            (np.array([math.nan, 1.0]), np.array([1.0, 1.0]), math.inf),
            (math.nan, math.nan, 0.0),
            (2**60, 2**60 + 1, 1.0),
            (1.0, 1, math.inf),
            (np.ones(2), np.ones(3), math.inf),
            ("a", "b", math.inf),
            (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), 0.0),
            (torch.eye(2).to_sparse(), torch.eye(2).to_sparse() * 3, 2.0),
            (torch.eye(2), torch.eye(2).to_sparse(), math.inf),
            (torch.ones(2, dtype=torch.cfloat).conj(), torch.ones(2, dtype=torch.cfloat), 0.0),
            (torch.ones(2, dtype=torch.bfloat16), torch.full((2,), 1.5, dtype=torch.bfloat16), 0.5),
        ],
    )
    def test_leaves_of_every_kind_are_compared_exactly(self, one: Any, two: Any, size: float):
        left, right = (testing.Run(ps.Program(lambda s, b: (s, {})), torch.zeros(()), [{"x": x}]) for x in (one, two))
        found = testing.first_difference(left, right)
        assert (0.0 if found is None else found.size) == size

    def test_nested_tensors_are_compared_by_their_parts(self):
        def run(last: float) -> testing.Run:
            ragged = torch.nested.nested_tensor([torch.ones(2), torch.full((3,), last)], layout=torch.jagged)
            return testing.Run(ps.Program(lambda s, b: (s, {})), torch.zeros(()), [ragged])

        assert testing.first_difference(run(1.0), run(1.0)) is None
        assert testing.first_difference(run(1.0), run(3.0)).size == 2.0

    def test_seeds_that_differ_in_their_last_bit(self):
        chosen = program()
        one, two = (testing.Run(chosen, chosen.init(seed=2**60 + k, device="cpu"), []) for k in (0, 1))
        found = testing.first_difference(one, two)
        assert (found.step, found.where) == (0, "state/key")

    @pytest.mark.parametrize(("one", "two"), [(1.0, 1.0 + 1e-9), (np.ones(3), np.ones(3) + 1e-9), (100, 101)])
    def test_the_tolerance_is_for_arrays_and_numbers_too(self, one: Any, two: Any):
        left, right = (testing.Run(ps.Program(lambda s, b: (s, {})), torch.zeros(()), [{"x": x}]) for x in (one, two))
        assert testing.first_difference(left, right).where == "batch/x"
        assert testing.first_difference(left, right, rtol=1e-2) is None
        assert testing.first_difference(left, right, atol=1.0) is None

    def test_runs_of_fit_by_their_recordings(self):
        """The run with a difference is recorded, and compared with the program without it."""
        chosen, loader = program(), batches(8)
        bad = planted(chosen, 6, nudge)
        state = chosen.init(seed=1, device="cpu")
        whole = ps.fit(state, {"train": loader}, bad, epochs=1, progress=False, device="cpu", record=8)
        (part,) = whole.recording
        found = testing.first_difference(testing.Run(chosen, *part), testing.Run(bad, *part))
        assert (found.step, found.where) == (6, "state/params/2.weight")

    @pytest.mark.parametrize("at", [1, 4])
    def test_directories_are_bisected(self, tmp_path: Path, at: int):
        chosen, loader = program(), batches(6)
        for name, each in (("a", chosen), ("b", planted(chosen, at, nudge))):
            state = chosen.init(device="cpu")
            with ps.Snapshots(tmp_path / name, keep=10) as snapshots:
                for batch in loader:
                    state, _ = each.train_step(state, batch)
                    snapshots.save(int(state.step), state)
        like = chosen.init(device="cpu")
        found = testing.first_difference(tmp_path / "a", tmp_path / "b", like=like)
        assert found is not None
        assert (found.step, found.after) == (at, at - 1 if at > 1 else None)
        assert found.where == "state/params/2.weight"
        assert testing.first_difference(tmp_path / "a", tmp_path / "a", like=like) is None

    def test_errors(self, tmp_path: Path):
        chosen = program()
        run = testing.Run(chosen, chosen.init(device="cpu"), batches(2))
        with pytest.raises(Mismatch, match="2 batches from step 1, and 1 from step 1"):
            testing.first_difference(run, run._replace(batches=run.batches[:1]))
        with pytest.raises(ConfigError, match="a Run and a directory"):
            testing.first_difference(run, tmp_path)
        with pytest.raises(ConfigError, match="like is None"):
            testing.first_difference(tmp_path, tmp_path)
        with pytest.raises(NotFound, match="no step in common"):
            testing.first_difference(tmp_path, tmp_path, like=run.state)
