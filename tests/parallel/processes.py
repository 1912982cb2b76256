"""Groups of processes with torchrun's variables, for tests: one start for many cases, and none outlives the call.

run("tests.parallel.cases:function", 2)   the function in each process; its result comes back as JSON
run(Path("script.py"), 2, args=["x"])     a script in each process
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
_RESULT = "purestep-result "


class Output(NamedTuple):
    """The end of one process."""

    code: int  # exit code; negative: the signal that ended it
    text: str  # stdout and stderr

    @property
    def value(self) -> Any:
        """The function's result."""
        lines = [line for line in self.text.splitlines() if line.startswith(_RESULT)]
        if not lines:
            raise AssertionError(f"the process returned no result:\n{self.text[-4000:]}")
        return json.loads(lines[-1].removeprefix(_RESULT))


def run(
    target: str | Path,
    world: int,
    *,
    args: Sequence[Any] = (),
    env: Mapping[str, str | None] | None = None,
    timeout: float = 120,
    check: bool = True,
) -> list[Output]:
    """Run a function or a script in ``world`` processes, and return their outputs in the order of their ranks.

    All processes are killed when one fails, after a grace of 20 seconds in which the others may report the error of
    their own, and at the end of this call in any case.

    Args:
        target: "package.module:function", which takes ``args`` and returns JSON, or the path of a script.
        world: the number of processes.
        args: JSON values for a function, strings for a script.
        env: variables in addition to torchrun's; None removes one. ``{rank}`` in a value becomes the rank.
        timeout: seconds for all of them together.
        check: raise an AssertionError with the output of the first process that failed.
    """
    common = {
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT))),
        "PYTHONUNBUFFERED": "1",
    }
    is_function = isinstance(target, str) and ":" in target
    command = [sys.executable, "-m", "tests.parallel.processes", target, json.dumps(list(args))]
    if not is_function:
        command = [sys.executable, str(target), *map(str, args)]
    with contextlib.ExitStack() as stack:
        started: list[tuple[subprocess.Popen[bytes], Any]] = []
        stack.callback(lambda: kill(process for process, _ in started))
        for rank in range(world):
            own = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            for name, value in (env or {}).items():
                own.pop(name, None)
                if value is not None:
                    own[name] = value.replace("{rank}", str(rank))
            text = stack.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(
                command, cwd=ROOT, env=own, stdout=text, stderr=text, stdin=subprocess.DEVNULL, start_new_session=True
            )
            started.append((process, text))
        late = _wait([process for process, _ in started], timeout)
        kill(process for process, _ in started)
        outputs = [Output(process.wait(), _read(text)) for process, text in started]
    if late:
        all_texts = "\n".join(f"--- rank {rank}\n{output.text[-3000:]}" for rank, output in enumerate(outputs))
        raise AssertionError(f"ranks {late} did not end in {timeout} s:\n{all_texts}")
    failed = [rank for rank, output in enumerate(outputs) if output.code and not _ended_late(output)]
    if check and failed:
        # The one that a signal ended was killed here, or is not the one with a traceback.
        first = next((rank for rank in failed if outputs[rank].code > 0), failed[0])
        raise AssertionError(f"rank {first} of {failed} failed ({outputs[first].code}):\n{outputs[first].text[-6000:]}")
    return outputs


def _ended_late(output: Output) -> bool:
    """True for a process that had returned its result when a thread of torch in C++ ended it, on its way out. Seen once
    in some thousand processes on a busy machine; its cause is not known."""
    said = "terminate called without an active exception" in output.text
    return output.code == -signal.SIGABRT and said and _RESULT in output.text


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def kill(processes: Any) -> None:
    """Kill those of these processes that still run, with the children that they started."""
    for process in processes:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # each has a session of its own
            process.wait()


def _wait(processes: list[subprocess.Popen[bytes]], timeout: float) -> list[int]:
    """Wait until all have ended, or one has failed 20 seconds ago. Returns the ranks that still run at ``timeout``."""
    end = time.monotonic() + timeout
    failed_at: float | None = None
    while any(process.poll() is None for process in processes):
        now = time.monotonic()
        if failed_at is None and any(process.poll() for process in processes):
            failed_at = now
        if failed_at is not None and now > failed_at + 20:
            return []
        if now > end:
            return [rank for rank, process in enumerate(processes) if process.poll() is None]
        time.sleep(0.02)
    return []


def _read(file: Any) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _main() -> None:
    import torch

    torch.set_num_threads(1)
    module, _, name = sys.argv[1].partition(":")
    result = getattr(importlib.import_module(module), name)(*json.loads(sys.argv[2]))
    print(_RESULT + json.dumps(result), flush=True)


if __name__ == "__main__":
    _main()
