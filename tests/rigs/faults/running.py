"""The runs that the trials break off, as functions for the children of the fork server.

Each says on stdout, line by line, what it has done, so that whoever kills it knows what must be there afterwards.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import json
import os
import re
import resource
import signal
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from helpers import image_batch, tiny_convnet, tiny_mlp, vector_batch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import purestep as ps
from purestep import errors, events, tree
from purestep.__main__ import main
from purestep.compile.cpu import code_cache
from purestep.snapshot import Snapshots
from rigs.faults import failpoints

BATCHES, EPOCHS = 6, 3
CALLS = BATCHES * EPOCHS
KEEP = 2
ENTRY = "k" * 64  # a name in the cache of compiled code

failpoints.install()


def child(function: str, *arguments: Any, off: str = "") -> str:
    """The code of a child that calls one of these functions.

    Args:
        function: its name.
        arguments: for it.
        off: a guard of the library that does nothing there (``"purestep.snapshot.directory.sweep"``), or one of
            `planted`.
    """
    plant = f"planted.switch_off({off!r})" if "." in off else f"planted.{off}()" if off else ""
    return "\n".join(["from rigs.faults import planted, running", plant, f"running.{function}(*{arguments!r})"])


def say(*words: object) -> None:
    # One write: a line is there whole or not at all, whenever the kill comes.
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


# --- saving and nothing else ------------------------------------------------------------------------------------------


def state(step: int) -> dict[str, Tensor]:
    """What is saved under this number."""
    return {"w": torch.arange(1000.0) + step, "b": torch.full((2,), float(step))}


def save_for_ever(folder: str) -> None:
    """Saves as fast as the disk allows, always one in flight, and says each step once it is acknowledged."""
    with Snapshots(folder, keep=KEEP) as snapshots:
        say("begun")
        for step in range(1, 10**6):
            snapshots.save(step, state(step))  # returns when the one before is committed
            say("saved", step - 1)


def save_in_every_way(folder: str) -> None:
    """Saves, overwrites, goes back, falls back: through every failpoint that a snapshot has.

    "saved n" is said for what must be there from now on: before a run goes back, that is the step it goes back to.
    """
    with Snapshots(folder, keep=1) as snapshots:
        for step in (1, 2, 3, 4):
            snapshots.save(step, state(step))
            snapshots.wait()
            say("saved", step if step < 4 else 3)
        snapshots.save(4, state(4), overwrite=True)
        snapshots.wait()
        say("saved", 4)
    with Snapshots(folder, keep=None) as snapshots:
        snapshots.save(5, state(5))
        snapshots.wait()
        snapshots.restore(state(0), step=4)
        snapshots.start_over(after=4)  # the other 5 is set aside
        snapshots.save(5, state(5))
        snapshots.wait()
        largest_file(Path(folder) / "5").write_bytes(b"")
        with warnings.catch_warnings(action="ignore"):
            snapshots.restore(state(0))
    tell_points()


def tell_points() -> None:
    """How often each failpoint was passed, where ``PURESTEP_FAILPOINT`` has them counted."""
    say("points", json.dumps(failpoints.hits, separators=(",", ":")))


def race(folder: str, go: str) -> None:
    """Waits for the start, tries to get the directory, saves there; the winner holds it until ``go`` is gone."""
    say("ready")
    while not os.path.exists(go):
        time.sleep(0.0005)
    began = time.perf_counter()
    try:
        with Snapshots(folder) as snapshots:
            say("won")
            for step in (1, 2):
                snapshots.save(step, state(step))
            snapshots.wait()
            say("saved", 2)
            while os.path.exists(go):
                time.sleep(0.002)
    except errors.Locked as error:
        say("lost", f"{time.perf_counter() - began:.3f}", error)


def take_over(folder: str) -> None:
    """The next run in this directory, which may find what a killed one has left."""
    with Snapshots(folder) as snapshots:
        say("restored", snapshots.restore(state(0)).step)
        snapshots.save(3, state(3))


WATCHED = ("pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "marshal.loads")


def _is_import(caller: Any, folder: str) -> bool:
    """True where Python itself imports an installed module, whose bytecode is not below the folder."""
    if caller is None or caller.f_code.co_name != "_compile_bytecode":
        return False
    path = caller.f_locals.get("bytecode_path")
    return path is not None and not str(path).startswith(folder)


def read_watched(folder: str, room: int, reports: bool = False) -> None:
    """Restores from a directory that somebody has prepared, saves there, shows and reports it; says each thing that
    must not happen, and the megabytes by which it has grown.

    Args:
        folder: of the snapshots.
        room: bytes of addresses that this may take.
        reports: write a page about the run too.
    """
    with Snapshots(folder + ".first") as first:  # what is imported, and compiled, on first use
        first.save(0, state(0), history={"loss": [0.5]})
    commands = [["show", "--verify"], ["report", "-o", folder + ".first/report.html"]][: 1 + reports]
    for command, *options in commands:
        main([command, folder + ".first", *options])
    used, resident = (int(pages) * resource.getpagesize() for pages in Path("/proc/self/statm").read_text().split()[:2])
    resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in WATCHED and not _is_import(sys._getframe().f_back, os.path.dirname(folder)):
            say("watched", event, repr(arguments)[:200])
        writes = event == "open" and isinstance(arguments[0], str) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writes and not os.path.abspath(arguments[0]).startswith((folder, "/dev/", "/proc/")):
            say("watched", event, arguments)

    sys.addaudithook(watch)
    for ask in (lambda found: found.restore(state(0)), lambda found: found.save(99, state(99))):
        try:
            with warnings.catch_warnings(action="ignore"), Snapshots(folder) as snapshots:
                found = ask(snapshots)
                snapshots.wait()
        except errors.PurestepError as error:
            say("came", type(error).__name__, error)
            continue
        if found is not None:
            assert all(torch.equal(found.state[name], leaf) for name, leaf in state(found.step).items())
        say("came", "back")
    for command, *options in commands:
        say("came", main([command, folder, *options]))
    if os.path.isdir(f"{folder}/cache"):
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/cache"
        tempfile.tempdir = f"{folder}.first"
        found = code_cache.obtained(ENTRY, lambda library: Path(library).write_text("own"))
        if Path(found).read_text() == "foreign" or not os.path.realpath(found).startswith(folder):
            say("watched", "code", found)
    page = Path(folder, "report.html")
    if page.is_file() and re.search(r"\\u003ca href|<h\d>.*<a href", page.read_text(encoding="utf-8")):
        say("watched", "a link in the page")
    say("peak", (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10) - (resident >> 20))


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def largest_file(folder: Path) -> Path:
    return max(files_of(folder), key=lambda path: path.stat().st_size)


def save_without_memory(folder: str, megabytes: int) -> None:
    """A state for whose copy there are no addresses left; afterwards there are."""
    large = {"w": torch.zeros(megabytes << 18)}
    with Snapshots(folder) as snapshots:
        snapshots.save(1, state(1))
        snapshots.wait()
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (megabytes << 19), resource.RLIM_INFINITY))
        try:
            snapshots.save(2, large)
        except errors.WriteFailed as error:
            say("told", error)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert not large["w"].any()
        snapshots.save(3, large)
    say("steps", *snapshots.steps())


# --- fit --------------------------------------------------------------------------------------------------------------


class Items(Dataset[Any]):
    """Images that take their time to load, one of them a very long one."""

    def __init__(self, pause: float, hang: int) -> None:
        self.data, self.pause, self.hang = image_batch(4 * BATCHES), pause, hang
        self.loaded = 0

    def __len__(self) -> int:
        return len(self.data[0])

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if len(indices) > 1:  # else a probe of the loader, which is no batch
            self.loaded += 1
            say("load", self.loaded)
            time.sleep(60 if self.loaded == self.hang else self.pause)
        return [self[index] for index in indices]

    def __getitem__(self, index: int) -> Any:
        return self.data[0][index], self.data[1][index]


def program(pause: float = 0.0) -> ps.Program:
    """BatchNorm, dropout, moments and an average: all that a small state can hold."""
    made = ps.program(tiny_convnet(), ps.supervised(nn.CrossEntropyLoss()), ps.optim.adamw(0.01), ema=0.9)

    def train_step(state: Any, batch: Any) -> Any:
        say("step", int(state.step) + 1)
        time.sleep(pause)
        return made.train_step(state, batch)

    return made._replace(train_step=train_step)


def train(folder: str, every: int = 4, pause: float = 0.0, hang: int = 0) -> None:
    """A run of `CALLS` steps, resumed where there is something to resume from.

    Says "load", "step", "did", "eval" and "saving" with the number of each, and at the end "done" with a digest of
    everything that came out of it.

    Args:
        folder: of its snapshots.
        every: steps between two snapshots.
        pause: seconds that each load, step and evaluation batch takes longer.
        hang: the batch whose load takes a minute.
    """
    made = program(pause)
    loader = DataLoader(Items(pause, hang), batch_size=4, shuffle=True)
    with Snapshots(folder, every_steps=every, keep=KEEP) as snapshots:

        def tell(event: Any) -> None:
            match event:
                case events.StepEnd():
                    say("did", int(event.state.step), int(snapshots._background.busy))
                case events.EvalStepEnd():
                    say("eval", event.index)
                    time.sleep(pause)
                case events.Saved():
                    say("saving", event.step)
                case _:
                    pass

        loaders = {"train": loader, "val": [image_batch(6, 9), image_batch(3, 10)]}
        result = ps.fit(
            made.init(seed=5),
            loaders,
            made,
            epochs=EPOCHS,
            snapshots=snapshots,
            compile=False,
            progress=False,
            callbacks=[tell],
        )
    say("done", digest(result))
    tell_points()


def steps_of_a_fit(snapshots: Any, *, steps: int = 4, **fields: Any) -> list[int]:
    """The steps that a small fit gets done, into a list that is there also where it raises."""
    program = ps.program(tiny_mlp(), ps.supervised(nn.CrossEntropyLoss()), ps.optim.sgd(0.1))
    done: list[int] = fields.pop("done", [])

    def count(event: Any) -> None:
        if isinstance(event, events.StepEnd):
            done.append(event.updates)

    ps.fit(
        program.init(),
        [vector_batch(8, seed) for seed in range(steps)],
        program,
        epochs=1,
        snapshots=snapshots,
        compile=False,
        progress=False,
        callbacks=[count],
        **fields,
    )
    return done


def train_with_workers(folder: str) -> None:
    """A run whose loader has two workers, the same in every epoch; says who they are."""
    made = program(0.02)
    loader = DataLoader(Items(0.0, 0), batch_size=4, num_workers=2, persistent_workers=True)

    def tell(event: Any) -> None:
        if isinstance(event, events.StepEnd):
            say("workers", *(process.pid for process in torch.multiprocessing.active_children()))
            say("did", event.updates)

    fields: dict[str, Any] = {"compile": False, "progress": False, "callbacks": [tell]}
    ps.fit(made.init(), loader, made, epochs=1000, snapshots=folder, **fields)


def digest(result: ps.FitResult) -> str:
    """Of every bit of a result: leaves, history, best."""
    found = hashlib.sha256(json.dumps([result.history, result.best, result.epochs, result.stop_reason]).encode())
    for path, leaf in tree.with_paths(result.state):
        found.update(path.encode() + leaf.contiguous().numpy().tobytes())
    return found.hexdigest()


def told(out: str, word: str) -> Iterator[list[str]]:
    """The rest of each line that begins with the word."""
    return (line.split()[1:] for line in out.splitlines() if line.split()[:1] == [word])


def last(out: str, word: str) -> int:
    """The number in the last such line; 0 where there is none."""
    return max((int(rest[0]) for rest in list(told(out, word))[-1:]), default=0)


# --- a long life ------------------------------------------------------------------------------------------------------


def live_long(folder: str, steps: int, saves: int, fits: int) -> None:
    """Steps, saves and fits in one process; says what has grown meanwhile."""
    live_through(folder + ".first", 20, 3, min(fits, 2))  # what is made once, on first use
    before = settled()
    slope = live_through(folder, steps, saves, fits)
    for _ in range(500):  # until they have ended again
        grown = {name: value - before[name] for name, value in what_there_is().items()}
        if not any(grown.values()):
            break
        time.sleep(0.01)
    say("grown", json.dumps({"bytes": round(slope), **grown}, separators=(",", ":")))


def live_through(folder: str, steps: int, saves: int, fits: int) -> float:
    """The bytes by which a step makes the process larger: the median over all pairs of measurements."""
    made, memory = program(), []
    batches = [image_batch(4, seed) for seed in range(10)]

    def measure(event: Any) -> None:
        if isinstance(event, events.StepEnd) and event.updates % (steps // 20) == 0:
            gc.collect()
            memory.append((event.updates, int(Path("/proc/self/statm").read_text().split()[1])))

    quiet: dict[str, Any] = {"compile": False, "progress": False, "sinks": ()}
    ps.fit(made.init(), batches, made, epochs=steps // 10, callbacks=[measure], **quiet)
    with Snapshots(folder, keep=1) as snapshots:
        for step in range(saves):
            snapshots.save(step, state(step))
            snapshots.restore(state(0))
    for index in range(fits):
        loader = DataLoader(Items(0.0, 0), batch_size=8, num_workers=index % 2)
        ps.fit(made.init(), loader, made, epochs=1, snapshots=f"{folder}.{index}", **quiet)
    late = memory[len(memory) // 5 :]
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(late, 2)]
    return statistics.median(slopes) * resource.getpagesize()


def settled() -> dict[str, int]:
    """What there is when nothing has changed for a fifth of a second: orbax's threads end a little after their work."""
    seen = [what_there_is()]
    while len(seen) < 500 and (len(seen) < 20 or any(each != seen[-1] for each in seen[-20:])):
        time.sleep(0.01)
        seen.append(what_there_is())
    return seen[-1]


def what_there_is() -> dict[str, int]:
    numbers, own = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1), (signal.SIG_DFL, signal.default_int_handler)
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "processes": len(torch.multiprocessing.active_children()),
        "handlers": sum(signal.getsignal(number) not in own for number in numbers),
    }
