"""Processes that may be killed, without paying for their imports each time.

The server imports torch, JAX, orbax and what a `fit` needs once, and has a single thread, so that its children can be
forked safely. Each child runs a piece of Python as a script; unless it is ``quick``, it also shuts its interpreter
down.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

_SERVER = """
import importlib, json, os, sys, tempfile, threading, traceback
import numpy, torch, jax, orbax.checkpoint
import purestep.compile.capture, purestep.config.settings, purestep.loop.fit, purestep.snapshot
import torch.fx.experimental.symbolic_shapes
from rigs.faults import planted, running
torch.set_num_threads(1)

def serve():
    for line in sys.stdin:
        ask = json.loads(line)
        if "wait" in ask:
            pid, status = os.waitpid(ask["wait"], os.WNOHANG if ask["poll"] else 0)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        elif "modules" in ask:
            for name in ask["modules"]:
                importlib.import_module(name)
            answer = len(os.listdir("/proc/self/task"))
        else:
            answer = os.fork()
            if answer == 0:
                return ask
        print(json.dumps(answer), flush=True)

ask = serve()
if ask is not None:
    os.dup2(os.open(ask["out"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), 1)
    os.dup2(os.open(ask["err"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(ask["env"])
    tempfile.tempdir = None  # the environment says where it is
    code = compile(ask["code"], "<child>", "exec")
    if not ask["quick"]:
        exec(code, {"__name__": "__main__"})
    else:
        status = 0
        try:
            exec(code, {"__name__": "__main__"})
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:
            traceback.print_exc()
            status = 1
        threading._shutdown()
        sys.stdout.flush()
        os._exit(status)
"""


def lives(pid: int) -> bool:
    """Whether there is such a process, and it is not only waited for."""
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


class Done(NamedTuple):
    """How a child ended."""

    status: int  # exit status, or minus the signal
    out: str
    err: str


class Child:
    """A running child."""

    def __init__(self, server: ForkServer, pid: int, folder: Path) -> None:
        self.pid = pid
        self._server = server
        self._folder = folder
        self._status: int | None = None

    def wait(self) -> Done:
        """Blocks until it has ended."""
        status = self._end(poll=False)
        assert status is not None
        return Done(status, self.out(), (self._folder / "err").read_text(errors="replace"))

    def poll(self) -> int | None:
        """Its exit status, or minus the signal; None while it is running."""
        return self._end(poll=True)

    def _end(self, *, poll: bool) -> int | None:
        if self._status is None:
            self._status = self._server.ask({"wait": self.pid, "poll": poll})
        return self._status

    def lives(self) -> bool:
        """Whether it is still running."""
        return lives(self.pid)

    def kill(self) -> None:
        """SIGKILL. It must not have been waited for."""
        os.kill(self.pid, signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM. It must not have been waited for."""
        os.kill(self.pid, signal.SIGTERM)

    def out(self) -> str:
        """What it has printed so far."""
        path = self._folder / "out"
        return path.read_text(errors="replace") if path.exists() else ""


class ForkServer:
    """``with ForkServer() as server: server.run("print(1)").out``."""

    def __enter__(self) -> ForkServer:
        self._scratch = tempfile.TemporaryDirectory()
        environment = {key: value for key, value in os.environ.items() if key != "PURESTEP_FAILPOINT"}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        environment["TMPDIR"] = self._scratch.name  # what killed children leave goes with it
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._count = 0
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._scratch.cleanup()

    def ask(self, question: dict[str, object]) -> int | None:
        """One line to the server, one number or None back."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, "the fork server has ended"
        return json.loads(answer)

    def preload(self, *modules: str) -> None:
        """Imports modules into the server, and so into the children that it starts from now on."""
        assert self.ask({"modules": modules}) == 1, f"an import of {modules} has started threads"

    def start(self, code: str, *, quick: bool = False, **env: str) -> Child:
        """Starts a child and returns at once.

        Args:
            code: Python.
            quick: ends it after its threads, without the interpreter's own clearing away, which takes a second.
            env: environment variables.
        """
        self._count += 1
        folder = Path(self._scratch.name) / str(self._count)
        folder.mkdir()
        out, err = str(folder / "out"), str(folder / "err")
        pid = self.ask({"code": code, "env": env, "quick": quick, "out": out, "err": err})
        assert pid is not None
        return Child(self, pid, folder)

    def run(self, code: str, *, quick: bool = False, **env: str) -> Done:
        """Runs a child to its end."""
        return self.start(code, quick=quick, **env).wait()


@functools.cache
def shared() -> ForkServer:
    """One server for this whole process: its imports take seconds."""
    server = ForkServer().__enter__()
    atexit.register(server.__exit__, None, None, None)
    return server
