"""Some cases of the fuzzer; `python -m tests.rigs.fuzz` runs thousands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.fuzz import cases, compare

from purestep.torch_ext import draws

pytestmark = [pytest.mark.compile, pytest.mark.optimized]


@pytest.fixture(scope="module", autouse=True)
def one_cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """For all cases, so that what one compiles serves the next."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(Path(tmp_path_factory.mktemp("fuzz"))))
        yield


WAYS = {"inductor": 3, "aot_eager": 6, "front": 1}
"""How many cases of each; those that end in inductor take ten seconds each. `tests.rigs.fuzz` tries any number."""


def _seeds() -> list[int]:
    made = [case for case in map(cases.case, range(400)) if case.accumulate == 1 or case.way != "front"]
    return [case.seed for way, count in WAYS.items() for case in [case for case in made if case.way == way][:count]]


@pytest.mark.parametrize("seed", _seeds())
def test_every_way_trains_as_the_loop_by_hand(seed: int) -> None:
    assert compare.mismatches(cases.case(seed)) == []


def test_a_case_is_that_of_its_seed() -> None:
    assert cases.case(5) == cases.case(5)
    assert len({cases.case(seed)._replace(seed=0) for seed in range(50)}) > 40
    assert "seed 5" in str(cases.case(5))


PLANTED = cases.Case(
    seed=-1,
    sizes=(3, 5),
    layers=("turned",),
    layout="contiguous",
    optimizer="sgd",
    precision="64-true",
    ema=None,
    accumulate=1,
    way="inductor",
    donate=False,
)


def test_a_mask_in_another_layout_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    true = draws.drawn

    def contiguous(fill: str, size: Any, stride: Any, *given: Any) -> torch.Tensor:
        return true(fill, size, torch.empty(size).stride(), *given)

    monkeypatch.setattr(draws, "DRAWN", contiguous)
    found = compare.mismatches(PLANTED)
    assert found
    assert all("seed -1" in line and ": compiled: " in line for line in found)


def test_a_gradient_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    true = compare.by_hand

    def wrong(case: Any, given: Any, device: str) -> Any:
        return true(case, [(x * 1.001, y) for x, y in given], device)

    monkeypatch.setattr(compare, "by_hand", wrong)
    assert any("first " in line for line in compare.mismatches(PLANTED._replace(way="aot_eager")))
