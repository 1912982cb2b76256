"""Three recorded steps of every optimizer: numbers that no refactoring may move.

The twins in torch.optim and optax tell whether an optimizer is right (test_peers_optim.py); this file tells whether it
is still the same, on machines without the peers, and what the state of a transform looks like in a snapshot: the path
of each leaf, and one checksum. `PYTHONPATH=src:tests python tests/laws/test_golden.py` records a new row.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import optimizers_left_out, quadratic
from optimizers import ROWS
from torch import Tensor

from purestep import optim, schedules, tree
from purestep.optim import Transform

PATH = Path(__file__).parents[1] / "golden" / "optimizers.json"
ADVICE = f"""{{name}} no longer computes what it computed: {{where}}
is {{found}}
was {{wanted}}

If that is meant (a formula was wrong, a default or the order of the state's fields was changed on purpose), say so in
CHANGELOG.md: runs that are resumed across this version go on differently, or not at all. Check the optimizer against
its twin first (pytest tests/optim/test_peers_optim.py), then record it anew with

    PYTHONPATH=src:tests python tests/laws/{Path(__file__).name} {{name!r}}

and look at the difference in git before committing it. If nothing was meant to change, the code is what is wrong.
"""

OPTIMIZERS: dict[str, Callable[[], Transform]] = {
    **ROWS,
    "sgd momentum": lambda: optim.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "clip and schedule": lambda: optim.chain(
        optim.clip_by_global_norm(1.0), optim.adamw(schedules.warmup_cosine(peak=0.1, warmup=2, total=8))
    ),
    "inject": lambda: optim.inject(optim.adamw)(learning_rate=0.1, weight_decay=0.1),
    "from_torch": lambda: optim.from_torch(torch.optim.AdamW, lr=0.1),
    "other clips": lambda: optim.chain(optim.clip_by_value(0.5), optim.adaptive_grad_clip(0.3), optim.sgd(0.1)),
    "freeze": lambda: optim.chain(optim.scale(0.5), optim.adamw(0.1), optim.freeze("bias")),
}
STEPS = 3  # the first is special in many of them: moments are zero


def checksum(leaf: Tensor) -> float:
    """A sum of all numbers with irrational weights: a number, or two that change places, change it."""
    numbers = leaf.double().reshape(-1)
    return float(numbers @ torch.arange(1, len(numbers) + 1, dtype=torch.float64).sqrt())


def recorded(tx: Transform) -> dict[str, float]:
    """Parameters and state after a few steps on a quadratic: a checksum of each leaf, by its path."""
    problem = quadratic()
    params = {name: torch.full_like(value, 0.3) for name, value in problem.params.items()}
    state = tx.init(params)
    for _ in range(STEPS):
        updates, state = tx.update(problem.gradient(params), state, params)
        params = optim.apply_updates(params, updates)
    leaves = tree.with_paths({"params": params, "state": state})
    return {path: checksum(leaf) for path, leaf in leaves}


def compare(name: str, found: dict[str, float], wanted: dict[str, float]) -> None:
    told: dict[str, Any] = {"name": name}
    if list(found) != list(wanted):
        pytest.fail(ADVICE.format(**told, where="the leaves", found=list(found), wanted=list(wanted)), pytrace=False)
    for path, number in found.items():
        if number != pytest.approx(wanted[path], rel=1e-9, abs=1e-12):
            pytest.fail(ADVICE.format(**told, where=path, found=number, wanted=wanted[path]), pytrace=False)


@pytest.fixture(scope="module")
def golden() -> Any:
    return json.loads(PATH.read_text())


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_computes_what_it_did(name: str, golden: Any) -> None:
    assert name in golden, f"not recorded yet: PYTHONPATH=src:tests python tests/laws/{Path(__file__).name}"
    compare(name, recorded(OPTIMIZERS[name]()), golden[name])


def test_a_checksum_sees_one_number_and_an_order() -> None:
    leaf = torch.tensor([1.0, 2.0, 3.0])
    others = ([1.0, 2.0, 3.0001], [2.0, 1.0, 3.0], [3.0, 2.0, 1.0], [-1.0, 2.0, 3.0])
    assert all(checksum(torch.tensor(other)) != pytest.approx(checksum(leaf), rel=1e-9) for other in others)


def test_nothing_is_recorded_that_is_not_tested(golden: Any) -> None:
    assert sorted(golden) == sorted(OPTIMIZERS)


OWN_TESTS = ["lbfgs"]  # an update evaluates the loss: test_lbfgs.py compares it with torch's


def test_no_optimizer_is_left_out() -> None:
    forgotten = [name for name in optimizers_left_out(OPTIMIZERS.values()) if name not in OWN_TESTS]
    assert not forgotten, (
        f"add a row to tests/optimizers.py that calls {forgotten}, and record it as the docstring says"
    )
    others = [make for name, make in OPTIMIZERS.items() if name not in ("soap", "freeze")]
    missing = ["freeze", "scale", "scale_by_soap", "set_to_zero", "soap"]
    assert optimizers_left_out(others) == sorted([*OWN_TESTS, *missing])


@pytest.mark.parametrize(
    ("changed", "where"),
    [
        (lambda: optim.adamw(0.1, eps=1e-6), "params/bias"),
        (lambda: optim.adamw(0.1, weight_decay=0.011), "params/bias"),
        (lambda: optim.adam(0.1), "the leaves|params/bias"),
        (lambda: optim.chain(optim.identity(), optim.adamw(0.1)), "the leaves"),
    ],
)
def test_a_change_is_seen_and_the_failure_says_what_to_do(changed: Any, where: str, golden: Any) -> None:
    with pytest.raises(pytest.fail.Exception, match=rf"(?s)adamw no longer .*({where}).*tests/laws/test_golden.py"):
        compare("adamw", recorded(changed()), golden["adamw"])


def record(names: list[str]) -> None:
    """Write these rows anew, and those that are missing."""
    known = json.loads(PATH.read_text())
    found = {n: recorded(make()) if n in names or n not in known else known[n] for n, make in OPTIMIZERS.items()}
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(leaves)}" for name, leaves in found.items())
    PATH.write_text(f"{{\n{lines}\n}}\n")
    sys.stdout.write(f"{PATH}: {len(found)} optimizers\n")


if __name__ == "__main__":
    record(sys.argv[1:])
