"""Groups of processes with torchrun's variables, for tests: one start for many cases, and none outlives the call.

run("rigs.parallel.cases:function", 2)   the function in each process; its result comes back as JSON

The processes are forks of one that has imported what they need. `test_failures` and `test_torchrun` start torchrun.

    PURESTEP_TEST_DEVICE=cuda python -m pytest tests/parallel -k "not torchrun"

runs the same with NCCL on one GPU, which all processes share. That needs NCCL 2.30 or later; torch 2.14 has it.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import random
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rigs import forkserver
from rigs.forkserver import Child, Done

ROOT = Path(__file__).parents[3]
DEVICE = os.environ.get("PURESTEP_TEST_DEVICE", "cpu")
PLACE = {
    "cpu": {"CUDA_VISIBLE_DEVICES": ""},  # gloo, also where there is a GPU
    "cuda": {"LOCAL_RANK": "0", "NCCL_MULTI_RANK_GPU_ENABLE": "1"},
}
"""Variables of each process, by device."""
RESULT = "purestep-result "
"""The prefix of the line that holds a function's result as JSON."""
_CODE = """
import importlib, json, os
os.setsid()
result = getattr(importlib.import_module({module!r}), {name!r})(*json.loads({args!r}))
print({result!r} + json.dumps(result), flush=True)
"""


class Output(NamedTuple):
    """The end of one process."""

    code: int  # exit code; negative: the signal that ended it
    text: str  # stdout and stderr

    @property
    def value(self) -> Any:
        """The function's result."""
        lines = [line for line in self.text.splitlines() if line.startswith(RESULT)]
        if not lines:
            raise AssertionError(f"the process returned no result:\n{self.text[-4000:]}")
        return json.loads(lines[-1].removeprefix(RESULT))


def run(
    target: str,
    world: int,
    *,
    args: Sequence[Any] = (),
    env: Mapping[str, str] | None = None,
    own: Mapping[int, Mapping[str, str]] | None = None,
    timeout: float = 120,
    check: bool = True,
) -> list[Output]:
    """Run a function in ``world`` processes, and return their outputs in the order of their ranks.

    All processes are killed when one fails, after a grace of 20 seconds in which the others may report the error of
    their own, and at the end of this call in any case.

    Args:
        target: "package.module:function", which takes ``args`` and returns JSON.
        world: the number of processes.
        args: JSON values for the function.
        env: variables in addition to torchrun's. ``{rank}`` in a value becomes the rank.
        own: variables of single processes, by rank.
        timeout: seconds for all of them together.
        check: raise an AssertionError with the output of the first process that failed.
    """
    module, _, name = target.partition(":")
    common = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(free_port()), "TMPDIR": tempfile.gettempdir(), **(env or {})}  # with inductor's cache
    common |= PLACE[DEVICE]
    code = _CODE.format(module=module, name=name, args=json.dumps(list(args)), result=RESULT)
    server = forkserver.shared()
    server.preload("torch.distributed.tensor.parallel", module)
    started: list[Child] = []
    try:
        for rank in range(world):
            variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), **((own or {}).get(rank) or {})}
            variables |= {key: value.replace("{rank}", str(rank)) for key, value in common.items()}
            started.append(server.start(code, quick=True, **variables))
        late = _wait(started, timeout)
    finally:
        ended = [_killed(child) for child in started]
    outputs = [Output(done.status, done.out + done.err) for done in ended]
    if late:
        all_texts = "\n".join(f"--- rank {rank}\n{output.text[-3000:]}" for rank, output in enumerate(outputs))
        raise AssertionError(f"ranks {late} did not end in {timeout} s:\n{all_texts}")
    failed = [rank for rank, output in enumerate(outputs) if output.code]
    if check and failed:
        # The one that a signal ended was killed here, or is not the one with a traceback.
        first = next((rank for rank in failed if outputs[rank].code > 0), failed[0])
        raise AssertionError(f"rank {first} of {failed} failed ({outputs[first].code}):\n{outputs[first].text[-6000:]}")
    return outputs


def each(calls: Sequence[Sequence[Any]]) -> list[Any]:
    """Call functions one after the other in this process, so that several tests share one start of the processes.

    Args:
        calls: "package.module:function" and its arguments, each.
    """
    found = list[Any]()
    for target, *args in calls:
        module, _, name = target.partition(":")
        found.append(getattr(importlib.import_module(module), name)(*args))
    return found


def returned(
    factory: pytest.TempPathFactory, name: str, calls: Mapping[str, Sequence[Any]], *, timeout: float = 400
) -> list[dict[str, Any]]:
    """Make named calls, as for `each`, in two processes that are started once; return the results of each process."""

    def compute() -> list[dict[str, Any]]:
        outputs = run("rigs.parallel.processes:each", 2, args=[list(calls.values())], timeout=timeout)
        return [dict(zip(calls, output.value, strict=True)) for output in outputs]

    return once(factory, name, compute)


def once(factory: pytest.TempPathFactory, name: str, compute: Callable[[], Any]) -> Any:
    """A JSON value that one of pytest's own worker processes computes for all: tests of a module may run in several."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return compute()
    path = factory.getbasetemp().parent / f"{name}.json"
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            path.write_text(json.dumps(compute()))
        return json.loads(path.read_text())


def free_port() -> int:
    """A TCP port that is free now, outside of the ephemeral ports (Linux: 32768 and up), so that the system gives it to
    no other process before it is used."""
    for port in random.SystemRandom().sample(range(10_000, 32_768), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("none of 100 ports between 10000 and 32767 is free")


def _killed(child: Child) -> Done:
    """How a process ended; one that still runs is killed first, with the children that it started."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.kill()  # a child that has not called setsid yet is in another process group
    return child.wait()


def _wait(children: list[Child], timeout: float) -> list[int]:
    """Wait until all have ended, or one has failed 20 seconds ago. Returns the ranks that still run at ``timeout``."""
    end = time.monotonic() + timeout
    failed_at: float | None = None
    while any(child.poll() is None for child in children):
        now = time.monotonic()
        if failed_at is None and any(child.poll() for child in children):
            failed_at = now
        if failed_at is not None and now > failed_at + 20:
            return []
        if now > end:
            return [rank for rank, child in enumerate(children) if child.poll() is None]
        time.sleep(0.02)
    return []
