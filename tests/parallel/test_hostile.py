"""Environments in which processes cannot become one mesh: each process ends with a clear error, and none hangs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from rigs.parallel.hostile import TIMEOUT
from rigs.parallel.processes import free_port, once, run

MISSING = r"the environment has {}, but not {} \(cure: start with `torchrun --nproc-per-node 2 train\.py`"
JOIN = r"process {} of 2 could not join the others at 127\.0\.0\.1:\S+: "
TOGETHER = r"processes \['0', '1'\]"
TAKEN = r"another process is number 1 of 2 already: two runs use port \d+, .*cure: a port for each run"
IN_USE = JOIN.format(0) + r".*address already in use.*another program or run uses the port"

TWO: dict[str, tuple[str, str] | str] = {
    "without RANK": MISSING.format("WORLD_SIZE, MASTER_ADDR, MASTER_PORT", "RANK"),
    "without WORLD_SIZE": MISSING.format("RANK, MASTER_ADDR, MASTER_PORT", "WORLD_SIZE"),
    "without MASTER_ADDR, MASTER_PORT": MISSING.format("RANK, WORLD_SIZE", "MASTER_ADDR, MASTER_PORT"),
    "without RANK, WORLD_SIZE": MISSING.format("MASTER_ADDR, MASTER_PORT", "RANK, WORLD_SIZE"),
    "no numbers": r"RANK='one' of WORLD_SIZE='2' \(cure: start with `torchrun",
    "rank too large": (r"RANK='2' of WORLD_SIZE='2'", r"RANK='3' of WORLD_SIZE='2'"),
    "no port": (JOIN.format(0) + r"invalid literal .*'http'", JOIN.format(1) + r"invalid literal .*'http'"),
    "port too large": (JOIN.format(0) + r".*65535", JOIN.format(1) + r".*65535"),
    "three wanted": r"there are 2 processes, and a mesh of data=3 \(cure: start\(data=2, ...\), or torchrun with 3",
    "odd": r"there are 2 processes, and a mesh of data=1 x shard=2 x tensor=2 \(cure: .*torchrun with 4 processes",
    "taken": (IN_USE, JOIN.format(1) + r"the program at this port did not answer within 2\.5 s"),
    "late": TOGETHER,
    "first late": TOGETHER,
    "too late": (JOIN.format(0) + r".*1/2 clients joined.*within the timeout", JOIN.format(1) + r".*timed out"),
    "early for the next mesh": TOGETHER,
    "never": ("did not start", JOIN.format(1) + r".*timed out"),
    "torch": (
        r"processes 0 and 1 differ: torch is \S+ and 0\.0\.1 \(cure: install the same versions",
        r"processes 1 and 0 differ: torch is 0\.0\.1 and \S+ \(cure: install the same versions",
    ),
    "purestep": (r"processes 0 and 1 differ: purestep is \S+ and 0\.0\.1", r"1 and 0 differ: purestep is 0\.0\.1 and"),
    "sizes": (r"processes 0 and 1 differ: WORLD_SIZE is 2 and 3", r"processes 1 and 0 differ: WORLD_SIZE is 3 and 2"),
    "gone before the mesh": (JOIN.format(0) + r".*timeout.*see the first error of the other", "KeyError: "),
    "after all of it": TOGETHER,
}
"""What both processes, or each of them, say."""

RUNS: dict[str, tuple[str, ...]] = {
    # Process: rank 0 and 1 of the first run, 0 and 1 of the second.
    "later": (TOGETHER, TOGETHER, IN_USE, TAKEN),
    # Without a launcher that names its runs, a process of the second may take the place of one of the first.
    "mixed": (r"processes \['0', '3'\]", TAKEN, IN_USE, r"processes \['0', '3'\]"),
    "named": (TOGETHER, TOGETHER, IN_USE, r"of 2 processes, 0 did not start within|" + JOIN.format(1)),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return once(tmp_path_factory, "two", lambda: started("two", 2, tmp_path_factory.mktemp("two")))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return once(tmp_path_factory, "two runs", lambda: started("two_runs", 4, tmp_path_factory.mktemp("runs")))


def started(function: str, world: int, folder: Path) -> list[dict[str, Any]]:
    ports = [free_port() for _ in range(12)]
    env = {"PROCESS": "{rank}"}
    outputs = run(f"rigs.parallel.hostile:{function}", world, args=[str(folder), ports], env=env)
    return [output.value for output in outputs]


@pytest.mark.parametrize("name", list(TWO))
def test_each_of_two_processes_says_what_is_wrong(two: list[dict[str, Any]], name: str):
    wanted = TWO[name]
    check([each[name] for each in two], (wanted, wanted) if isinstance(wanted, str) else wanted)


@pytest.mark.parametrize("name", list(RUNS))
def test_two_runs_on_one_port_do_not_meet(runs: list[dict[str, Any]], name: str):
    check([each[name] for each in runs], RUNS[name])


def check(found: list[Any], wanted: tuple[str, ...]) -> None:
    for (text, seconds), pattern in zip(found, wanted, strict=True):
        is_error = not pattern.startswith(("processes \\[", "did not", "KeyError"))
        assert re.search(rf"^RankError: parallel\.start.*(?:{pattern})" if is_error else f"^{pattern}", text), text
        assert seconds < 20 * TIMEOUT  # no hang
