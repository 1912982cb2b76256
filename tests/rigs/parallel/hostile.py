"""Environments in which processes cannot become one mesh. `test_hostile` runs them; functions return JSON.

Each case has a port of its own, and the processes begin it together: they wait for one another by files, since nothing
else connects them before `parallel.start`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import purestep as ps
from purestep.parallel import mesh as meshes

TIMEOUT = 2.5  # seconds, of each start


def together(folder: Path, name: str, world: int) -> None:
    """Wait until all processes are at this place."""
    (folder / f"{name}-{os.environ['PROCESS']}").touch()
    while len(list(folder.glob(f"{name}-*"))) < world:
        time.sleep(0.01)


@contextlib.contextmanager
def environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Variables for a while; None removes one."""
    kept = dict(os.environ)
    for name, value in values.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


def wait_for(folder: Path, name: str, *processes: int) -> None:
    """Wait until these processes are at this place, `together` or not."""
    while not all((folder / f"{name}-{process}").exists() for process in processes):
        time.sleep(0.01)


def outcome(*, inside: Callable[[], None] = lambda: None, **options: Any) -> list[Any]:
    """The error of a start, or the ranks in the mesh; and its seconds.

    Args:
        inside: called in the mesh.
    """
    begun = time.monotonic()
    try:
        with ps.parallel.start(timeout=TIMEOUT, **options):
            text = f"processes {ps.parallel.processes.gathered(os.environ['PROCESS'])}"
            inside()
    except ps.errors.PurestepError as error:
        text = f"{type(error).__name__}: {error}"
    return [text, time.monotonic() - begun]


def two(folder: str, ports: list[int]) -> dict[str, Any]:
    """What two processes say in each case."""
    rank, found, free = int(os.environ["RANK"]), {}, iter(ports)

    @contextlib.contextmanager
    def case(name: str, **values: str | None) -> Iterator[None]:
        with environment({"MASTER_PORT": str(next(free)), **values}):
            together(Path(folder), name, 2)
            yield

    for absent in (("RANK",), ("WORLD_SIZE",), ("MASTER_ADDR", "MASTER_PORT"), ("RANK", "WORLD_SIZE")):
        with environment(dict.fromkeys(absent)):
            found[f"without {', '.join(absent)}"] = outcome()
    for name, values in {
        "no numbers": {"RANK": "one"},
        "rank too large": {"RANK": str(rank + 2)},
        "no port": {"MASTER_PORT": "http"},
        "port too large": {"MASTER_PORT": "123456"},
    }.items():
        with environment(values):
            found[name] = outcome()
    found["three wanted"] = outcome(data=3)
    found["odd"] = outcome(shard=2, tensor=2)

    with case("taken"), contextlib.ExitStack() as stack:
        if rank == 0:  # another program, which takes connections and says nothing
            other = stack.enter_context(socket.socket())
            other.bind(("", int(os.environ["MASTER_PORT"])))
            other.listen()
        together(Path(folder), "listening", 2)
        stack.enter_context(mock.patch.object(meshes, "_GRACE", 1.0))
        found["taken"] = outcome()
        together(Path(folder), "left", 2)
    with case("late"):
        time.sleep(TIMEOUT / 4 * rank)
        found["late"] = outcome()
    with case("first late"):
        time.sleep(TIMEOUT / 4 * (1 - rank))
        found["first late"] = outcome()
    with case("too late"):
        if rank == 1:
            wait_for(Path(folder), "given up", 0)
        found["too late"] = outcome()
        (Path(folder) / f"given up-{rank}").touch()
    with case("early for the next mesh"):
        outcome(inside=lambda: time.sleep(TIMEOUT / 4 * (1 - rank)))  # process 0 has the store of both
        found["early for the next mesh"] = outcome()
    with case("never"):
        found["never"] = ["did not start", 0.0] if rank == 0 else outcome()
    for name in ("torch", "purestep"):
        with case(name), contextlib.ExitStack() as stack:
            facts = meshes._facts(2) | ({name: "0.0.1"} if rank else {})
            stack.enter_context(mock.patch.object(meshes, "_facts", mock.Mock(return_value=facts)))
            found[name] = outcome()
    with case("sizes", WORLD_SIZE=str(2 + rank)):
        found["sizes"] = outcome()
    with case("gone before the mesh"), contextlib.ExitStack() as stack:
        if rank == 1:
            error = KeyError("of this process alone")
            stack.enter_context(mock.patch.object(meshes, "_opened", mock.Mock(side_effect=error)))
        try:
            found["gone before the mesh"] = outcome()
        except KeyError as error:
            found["gone before the mesh"] = [f"KeyError: {error}", 0.0]
    with case("after all of it"):
        found["after all of it"] = outcome()
    return found


def two_runs(folder: str, ports: list[int]) -> dict[str, Any]:
    """Four processes, two for each of two runs on one port: what they say where the second starts later, and where a
    process of the second is there before the first run's."""
    process = int(os.environ["RANK"])
    run, rank = divmod(process, 2)
    found: dict[str, Any] = {}
    # The processes that each waits for, which are in a mesh then. Process 3 of the second run starts with process 0.
    for number, (name, after) in enumerate(
        {
            "later": ((), (), (0, 1), (0, 1)),
            "mixed": ((), (0, 3), (0, 3), ()),
            "named": ((), (), (0, 1), ()),
        }.items()
    ):
        own = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": str(ports[number])}
        with environment(own | ({"TORCHELASTIC_RUN_ID": f"run {run}"} if name == "named" else {})):
            together(Path(folder), name, 4)
            wait_for(Path(folder), f"in {name}", *after[process])
            if name == "named" and process == 1:
                time.sleep(TIMEOUT / 4)  # process 3 is first
            place = Path(folder), f"end of {name}", 4
            found[name] = outcome(
                inside=lambda place=place, name=name: (
                    (Path(folder) / f"in {name}-{process}").touch(),
                    together(*place),
                )
            )
            together(*place)
    return found


def listening() -> list[str]:
    """The addresses at which this process accepts connections while a mesh is open, in hexadecimal digits."""
    with ps.parallel.start():
        own = set[str]()
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(FileNotFoundError):  # that of the list itself
                own.add(os.readlink(f"/proc/self/fd/{name}"))
        lines = [
            line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()
        ]
        found = [line[1].partition(":")[0] for line in lines if line[3] == "0A" and f"socket:[{line[9]}]" in own]
        ps.parallel.processes.gathered(0)
    return found


def pickled() -> str:
    """What this process says to values that a program in the place of another one has sent, as torch pickles them."""
    import torch

    with ps.parallel.start() as mesh:
        if mesh.rank:
            value = torch.frombuffer(bytearray(b"cos\nsystem\n(S'touch EXECUTED'\ntR."), dtype=torch.uint8)
            ps.parallel.processes._message = lambda _: value
        try:
            return str(ps.parallel.processes.gathered(0))
        except ps.errors.RankError as error:
            return str(error)
