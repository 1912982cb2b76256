"""Steps and runs of two processes whose states are on the GPU, equal to one process: see `one_of_several`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rigs.parallel.processes import Output, free_port

SHARD: dict[str, Any] = {"params": "shard", "mesh": {"shard": 2}}
CASES: list[dict[str, Any]] = [
    {"params": "replicate"},
    {"params": "replicate", "kind": "uneven", "options": {"accumulate": 3}},
    {**SHARD, "kind": "empty", "options": {"microbatches": 2}},
    {**SHARD, "kind": "uneven", "compiled": {"backend": "aot_eager"}},
    {**SHARD, "units": ["blocks.*"]},
]


def two(target: str, *arguments: Any, timeout: float = 200) -> list[Any]:
    """The results of a function of `rigs.parallel` in two processes."""
    common = os.environ | {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    common |= {"MASTER_PORT": str(free_port()), "PURESTEP_TEST_DEVICE": "cuda", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "rigs.cuda_rehearsal.one_of_several", target, json.dumps(arguments)]
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2)]  # a full pipe would stop one
        started = [
            subprocess.Popen(command, env=common | {"RANK": str(rank)}, stdout=file, stderr=subprocess.STDOUT)
            for rank, file in enumerate(files)
        ]
        end = time.monotonic() + timeout
        while any(process.poll() is None for process in started) and time.monotonic() < end:
            time.sleep(0.05)
        texts = list[str]()
        for process, file in zip(started, files, strict=True):
            process.kill()
            process.wait()
            file.seek(0)
            texts.append(file.read())
    for process, text in zip(started, texts, strict=True):
        assert process.returncode == 0, text[-6000:]
    return [Output(process.returncode, text).value for process, text in zip(started, texts, strict=True)]


def test_steps_equal_one_process():
    for one in two("rigs.parallel.cases:steps", CASES)[0]:
        assert one["far"] < 1e-13, one


def test_a_run_equals_one_process(tmp_path: Path):
    found = two("rigs.parallel.fitting:equal", "shard", {"shard": 2}, 1)[0]
    assert max(found["state"], found["run_epoch"], found["streamed"], found["uneven"]) < 1e-14, found
