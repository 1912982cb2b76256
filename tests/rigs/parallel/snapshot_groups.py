"""Groups of processes that run the functions of `snapshot_cases`, and kills among them."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import purestep as ps
from rigs import forkserver

from . import processes, snapshot_cases


def group(function: str, world: int, *args: Any, plan: dict[int, str] | None = None, limit: float = 120) -> Any:
    """Run a function of `snapshot_cases` in every process; returns how each ended, in the order of ranks.

    Args:
        function: its name.
        world: the number of processes.
        args: JSON values.
        plan: rank -> failpoint.
        limit: seconds.
    """
    port = str(processes.free_port())
    code = (
        "import json\n"
        "from rigs.parallel import snapshot_cases\n"
        f"print('result', json.dumps(snapshot_cases.{function}(*{list(args)!r})), flush=True)\n"
    )
    children = []
    for rank in range(world):
        own = {"PURESTEP_FAILPOINT": plan[rank]} if plan and rank in plan else {}
        own |= processes.PLACE[processes.DEVICE]
        children.append(
            forkserver.shared().start(
                code,
                quick=True,
                RANK=str(rank),
                WORLD_SIZE=str(world),
                MASTER_ADDR="127.0.0.1",
                MASTER_PORT=port,
                **own,
            )
        )
    end = time.monotonic() + limit
    while any(child.lives() for child in children) and time.monotonic() < end:
        time.sleep(0.01)
    late = [rank for rank, child in enumerate(children) if child.lives()]
    for child in children:
        if child.lives():
            child.kill()
    done = [child.wait() for child in children]
    assert not late, f"ranks {late} did not end in {limit} s:\n" + "\n".join(f"{d.out}\n{d.err[-3000:]}" for d in done)
    return done


def values(done: Any) -> list[Any]:
    text = "\n".join(f"--- rank {rank}: {each.status}\n{each.out}{each.err[-3000:]}" for rank, each in enumerate(done))
    assert not any(each.status for each in done), text
    return [json.loads(each.out.splitlines()[-1].removeprefix("result ")) for each in done]


def killed(root: Path, world: int, rank: int, point: str) -> str | None:
    """Kill one process when it passes a point for the second time, or for the nth time (``"point@n"``); returns what is
    wrong afterwards."""
    name, _, times = point.partition("@")
    done = group("save_three", world, str(root), plan={rank: f"{name}=kill@{times or 2}"})
    text = "\n".join(f"--- {r}: {each.status}\n{each.out}{each.err[-1500:]}" for r, each in enumerate(done))
    if done[rank].status != -signal.SIGKILL:
        return f"was not killed:\n{text}"
    saved = max(int(line.split()[1]) for each in done for line in each.out.splitlines() if line.startswith("saved"))
    for other, each in enumerate(done):
        if other != rank and (each.status or f"process {rank} ended" not in each.out):
            return f"process {other} did not name process {rank}:\n{text}"
    reader = ps.Snapshots(root, writer=False)
    if not set(reader.steps()) <= {1, 2, 3} or saved not in reader.steps():
        return f"step {saved} was saved, there are {reader.steps()}:\n{text}"
    for step in reader.steps():
        found = reader.restore(snapshot_cases.small_whole(0), step=step).state
        if snapshot_cases.digest(found) != snapshot_cases.digest(snapshot_cases.small_whole(step)):
            return f"step {step} has other values"
    with ps.Snapshots(root) as snapshots:
        left = [name for name in os.listdir(root) if name.startswith((".tmp", ".old", ".replaced"))]
        if left:
            return f"left: {left}"
        newest = snapshots.restore(snapshot_cases.small_whole(0))
        snapshots.save(newest.step + 1, newest.state)
    return None
