"""A function in a process of its own: with its own threads, caches and memory.

python -m benchmarks.alone benchmarks.steps:table '{"work": "mlp", ...}' result.json
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


class Failed(RuntimeError):
    """The process ended without a result; the message is the end of what it wrote."""


def call(
    target: str,
    arguments: Mapping[str, Any],
    *,
    environment: Mapping[str, str] | None = None,
    limit: float | None = None,
) -> Any:
    """What ``target`` ("module:function") returns for these arguments, both as JSON can hold them.

    Args:
        target: of a function in this package.
        arguments: its keyword arguments.
        environment: variables on top of those of this process.
        limit: seconds; None: as long as it takes.

    Raises:
        Failed: it raised, was killed, or took too long.
    """
    paths = [str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(paths)} | dict(environment or {})
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        command = [sys.executable, "-m", "benchmarks.alone", target, json.dumps(dict(arguments)), str(result)]
        try:
            done = subprocess.run(
                command, env=variables, cwd=ROOT, capture_output=True, text=True, check=False, timeout=limit
            )
        except subprocess.TimeoutExpired as error:
            raise Failed(f"{target} took more than {limit:.0f} s") from error
        if done.returncode or not result.exists():
            tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-12:])
            raise Failed(f"{target} ended with {done.returncode}:\n{tail}")
        return json.loads(result.read_text())


def threads_environment(threads: int | None) -> dict[str, str]:
    """Variables for that many threads of torch and of JAX; None: as many as the machine has."""
    from .contestants import jaxes

    limits = {} if threads is None else {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return limits | jaxes.environment(threads)


def main(target: str, arguments: str, result: str) -> None:
    module, _, name = target.partition(":")
    found = getattr(importlib.import_module(module), name)(**json.loads(arguments))
    Path(result).write_text(json.dumps(found))
    sys.stdout.flush()
    os._exit(0)  # threads of trainers and of JAX are not waited for


if __name__ == "__main__":
    main(*sys.argv[1:])
