"""Where a state lives: `init` follows the module, `fit` moves a copy of a state on the CPU to the best device there is.

"meta" stands for that device where there is none: tensors can be moved there, and nothing can be computed.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_trees_close, tiny_convnet, tiny_mlp, vector_batch
from rigs.cuda_rehearsal import build
from rigs.cuda_rehearsal.device import seen as counted
from torch import nn

import purestep as ps
from purestep import optim, tree
from purestep.errors import ConfigError
from purestep.loop import inputs
from purestep.types import Program


def made(**fields: Any) -> Program:
    return ps.program(tiny_mlp(), ps.supervised(nn.CrossEntropyLoss()), optim.adamw(1e-3), **fields)


def devices(state: Any) -> dict[str, str]:
    return {path: leaf.device.type for path, leaf in tree.with_paths(state)}


@pytest.fixture
def best(monkeypatch: pytest.MonkeyPatch) -> str:
    """A device better than the CPU."""
    monkeypatch.setattr(inputs, "auto_device", lambda: torch.device("meta"))
    return "meta"


class TestFitMoves:
    def test_a_copy_of_a_state_on_the_cpu(self, best: str, caplog: pytest.LogCaptureFixture):
        program = made(ema=0.9, accumulate=2)
        state = program.init()
        before = ps.clone(state)
        moved = inputs.placed(state, None, program)
        assert_trees_close(state, before, exact=True)
        found = devices(moved)
        assert found.pop("key") == "cpu"
        assert set(found.values()) == {best}
        (told,) = caplog.messages
        assert told == 'the state is on the CPU: a copy of it is trained on meta (device="cpu" trains it there)'
        assert caplog.records[0].levelno == logging.WARNING  # shown where nobody has set logging up

    def test_any_tree_of_tensors(self, best: str):
        state = {"w": torch.ones(2), "inner": [torch.zeros(()), {"key": torch.tensor([3, 0])}]}
        moved = inputs.placed(state, None, Program(lambda state, batch: (state, {})))
        assert devices(moved) == {"w": best, "inner/0": best, "inner/1/key": "cpu"}

    def test_nothing_where_the_cpu_is_named(self, best: str, caplog: pytest.LogCaptureFixture):
        program = made()
        state = program.init()
        assert inputs.placed(state, "cpu", program) is state
        result = ps.fit(state, [vector_batch()], program, epochs=1, device="cpu", progress=False)
        assert set(devices(result.state).values()) == {"cpu"}
        assert not caplog.messages

    def test_nothing_where_there_is_no_better_device(self, caplog: pytest.LogCaptureFixture):
        program = made()
        state = program.init()
        assert inputs.placed(state, None, program) is state
        assert not caplog.messages

    def test_nothing_that_is_on_a_device_already(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ):
        monkeypatch.setattr(inputs, "auto_device", lambda: pytest.fail("nobody asks"))
        program = made()
        state = program.init(device="meta")
        assert inputs.placed(state, None, program) is state
        assert not caplog.messages

    def test_but_never_silently_where_it_was_told_to(self, best: str, caplog: pytest.LogCaptureFixture):
        program = made()
        assert set(devices(inputs.placed(program.init(), "meta", program)).values()) == {best, "cpu"}
        assert not caplog.messages  # the caller knows

    def test_and_fit_asks_for_it(self, monkeypatch: pytest.MonkeyPatch):
        asked: list[Any] = []

        def placed(state: Any, device: str | None, program: Program) -> Any:
            asked.append(device)
            return ps.clone(state)

        monkeypatch.setattr(inputs, "placed", placed)
        program = made()
        state = program.init()
        for target in (None, "cpu"):
            ps.fit(state, [vector_batch()], program, epochs=1, device=target, progress=False)
        assert asked == [None, "cpu"]


class TestWhatCannotBe:
    def test_a_precision_that_the_device_lacks_is_refused_before_the_first_step(self, best: str):
        program = made(precision="bf16-mixed")
        with pytest.raises(ConfigError, match=r"meta does not support bf16-mixed.*cure: precision=\"32-true\""):
            inputs.placed(program.init(), None, program)

    def test_a_dtype_that_the_device_lacks_is_told_with_a_cure(self, monkeypatch: pytest.MonkeyPatch, best: str):
        def refuse(self: Any, device: Any) -> Any:
            raise TypeError(
                "Cannot convert a MPS Tensor to float64 dtype as the MPS framework doesn't support float64."
            )

        monkeypatch.setattr(torch.Tensor, "to", refuse)
        with pytest.raises(
            ConfigError, match=r"fit: the state cannot be moved to meta: .*float64.*cure: device=\"cpu\""
        ):
            inputs.placed({"w": torch.ones(1)}, None, Program(lambda state, batch: (state, {})))


class TestWhatAMovedStateCosts:
    def test_the_run_does_not_keep_it(self, monkeypatch: pytest.MonkeyPatch):
        """A state of the caller's costs nothing to remember; a copy would stand in the device's memory for good."""
        import weakref

        alive: list[Any] = []
        kept: list[bool] = []

        def placed(state: Any, device: str | None, program: Program) -> Any:
            copy = ps.clone(state)
            alive.append(weakref.ref(copy.params["0.weight"]))
            return copy

        def callback(event: Any) -> None:
            if isinstance(event, ps.events.StepEnd):
                kept.append(alive[0]() is not None)

        monkeypatch.setattr(inputs, "placed", placed)
        program = made()
        fields = {"epochs": 1, "progress": False, "check_every": None, "callbacks": [callback]}
        ps.fit(program.init(), [vector_batch()] * 4, program, **fields)
        assert kept[-1] is False


class TestInitFollowsTheModule:
    @pytest.mark.parametrize("make", [tiny_mlp, tiny_convnet, lambda: nn.LSTM(3, 4)])
    def test_whatever_there_is(self, make: Any, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
        program = ps.program(make(), lambda model, batch: None, optim.sgd(0.1), ema=0.9, accumulate=2)
        assert set(devices(program.init()).values()) == {"cpu"}

    def test_a_user_s_step_on_it_takes_batches_as_they_are(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        program = made()
        state, metrics = program.train_step(program.init(), vector_batch())
        assert program.eval_step is not None
        assert float(program.eval_step(state, vector_batch())["loss"]) < float(metrics["loss"])


class TestTheRehearsal:
    """What `rigs/cuda_rehearsal/run.py` does before the stand-in is there; what is on it runs in there."""

    def test_says_why_it_cannot_be(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
        monkeypatch.setattr(build, "_package", lambda name: tmp_path / name)
        with pytest.raises(build.NotPossibleError, match=r"the torch in .* is built without CUDA"):
            build.stand_in()
        (tmp_path / "torch" / "lib").mkdir(parents=True)
        (tmp_path / "torch" / "lib" / "libtorch_cuda.so").touch()
        monkeypatch.setenv("PATH", "")
        with pytest.raises(build.NotPossibleError, match=r"there is no g\+\+ and nm"):
            build.stand_in()

    def test_a_call_that_the_stand_in_lacks_is_an_error_and_a_product_a_launch(self):
        made = build._entry_points(["cublasSgemm_v2", "cusparseCreate", "ncclGetVersion"])
        assert 'int cublasSgemm_v2(void* handle) { return standin::blas(handle, "cublasSgemm_v2"); }' in made
        assert 'int cusparseCreate() { return standin::unknown("cusparseCreate"); }' in made
        assert "int ncclGetVersion() { return 0; }" in made

    def test_finds_what_must_not_be_in_a_record(self):
        lines = ["KERNEL f", "BLAS g", "TRITON h", "MEMCPY D->Hpinned 8", "SYNC stream 0", "UNKNOWN cusparseCreate"]
        seen = counted([*lines, "ESCAPED from a capture, on stream 1: KERNEL f"])
        assert (seen.launches, seen.copies, seen.syncs) == (3, ("D->Hpinned 8",), 1)
        assert [line.split()[0] for line in seen.forbidden] == ["UNKNOWN", "ESCAPED"]
