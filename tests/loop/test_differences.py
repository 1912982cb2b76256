"""`first_difference` names where runs part; a halt is not explained by a batch that was written since."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers import tiny_convnet, tiny_mlp, vector_batch
from torch import Tensor, nn

import purestep as ps
from purestep import testing
from purestep.errors import Mismatch, NonFiniteError
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


class TestRefilledBuffers:
    @pytest.mark.parametrize("accumulate", [1, 2])
    def test_a_halt_is_not_explained_by_another_batch(self, accumulate: int):
        chosen = program(accumulate=accumulate)
        with pytest.raises(NonFiniteError, match="the cause is unknown, because the call is finite") as found:
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
        assert (found.step, found.where) == (at, "state/params/2.weight")
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
        run = testing.Run(chosen, state, loader)
        found = testing.first_difference(run, run._replace(state=nudge(state)))
        assert (found.step, found.where) == (0, "state/params/2.weight")
        other = [*loader[:2], (loader[2][0] + 1, loader[2][1]), loader[3]]
        found = testing.first_difference(run, run._replace(batches=other))
        assert (found.step, found.where, found.size) == (3, "batch/0", pytest.approx(1.0))
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
            (np.array([2**63], np.uint64), np.array([2**63 + 3], np.uint64), 1.0),  # at least: a float holds no more
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

    def test_errors(self):
        chosen = program()
        run = testing.Run(chosen, chosen.init(device="cpu"), batches(2))
        with pytest.raises(Mismatch, match="2 batches, and 1"):
            testing.first_difference(run, run._replace(batches=run.batches[:1]))
