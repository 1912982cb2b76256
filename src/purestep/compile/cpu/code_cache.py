"""Cache of compiled libraries between runs, in inductor's cache directory.

An entry is a directory: the library, a JSON file that torch reads for operators without a C function, and a line with
how to call it and a digest of the three. Each process builds an entry in a temporary directory and renames that: of
processes that start together each builds one, and the first stays. A damaged entry is built again.

A library is code, so an entry is loaded only if it, and the directory, belong to this user or root and nobody else may
write them. If the cache directory is not like that, or cannot be written, a private one is used.

Private names: ``torch._inductor.config``, the tables of decompositions and lowerings, if they are loaded.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import json
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .. import code_directory
from ..code_directory import is_own, is_safe
from . import graph_key

if TYPE_CHECKING:
    from torch.fx import GraphModule


class Entry(NamedTuple):
    """A compiled library."""

    path: str
    facts: Sequence[Any]
    """what its builder has returned"""


LIBRARY, CALLS, LINE = "step.so", "step.json", "entry"
"""The files of an entry. Torch looks for `CALLS` under this name."""


def obtained(name: str | None, build: Callable[[str], Sequence[Any]]) -> Entry:
    """Load an entry, or build it.

    Args:
        name: from `named`; None builds a library that only this process uses.
        build: writes the library to a path, and returns facts that JSON can hold.
    """
    return (name and found(name)) or _built(name, build)


def named(lines: Sequence[str]) -> str:
    """The name of what these lines determine on this machine, with the installed torch and purestep."""
    return hashlib.sha256("\n".join([_installed(), *lines]).encode()).hexdigest()


def found(name: str) -> Entry | None:
    """The entry of a name, if there is a whole one that nobody else could have written."""
    for place in (_shared(), code_directory.private()):
        entry = place / name
        with suppress(OSError, ValueError):
            if is_safe(place) and all(map(is_own, (entry, *entry.iterdir()))):
                *facts, digest = json.loads((entry / LINE).read_text(encoding="utf-8"))
                if digest == _digest(entry, facts):
                    return Entry(str(entry / LIBRARY), facts)
    return None


def _built(name: str | None, build: Callable[[str], Sequence[Any]]) -> Entry:
    code_directory.directory(whole=True)
    place = _writable()
    new = Path(tempfile.mkdtemp(prefix="purestep_", dir=place))  # of mode 0700
    atexit.register(shutil.rmtree, new, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=new) as work:
        made = Path(work, LIBRARY)
        facts = build(str(made))
        made.rename(new / LIBRARY).chmod(0o700)
        for calls in made.parent.glob("*.wrapper.json"):
            calls.rename(new / CALLS).chmod(0o600)
    with suppress(OSError):  # without an entry the next start only takes longer
        if name is not None and place is not None:
            (new / LINE).write_text(json.dumps([*facts, _digest(new, facts)]), encoding="utf-8")
            (new / LINE).chmod(0o600)
            new = _put(new, place / name)
    return Entry(str(new / LIBRARY), facts)


def _put(new: Path, entry: Path) -> Path:
    """Rename a directory to an entry, and return where it is: another process may have been faster, and wins. A
    damaged entry goes away."""
    try:
        return new.rename(entry)
    except OSError:
        if found(entry.name) is None:
            shutil.rmtree(entry)
            return new.rename(entry)
        return new


def _digest(entry: Path, facts: Sequence[Any]) -> str:
    made = hashlib.sha256(json.dumps(list(facts)).encode())
    for name in (LIBRARY, CALLS):
        with suppress(FileNotFoundError):
            made.update((entry / name).read_bytes())
    return made.hexdigest()


# --- directories ------------------------------------------------------------------------------------------------------


def _shared() -> Path:
    """The directory in inductor's cache."""
    return code_directory.directory() / "purestep"


def _writable() -> Path | None:
    """The first directory that this user can write, and nobody else."""
    for place in (_shared(), code_directory.private()):
        with suppress(OSError):
            place.mkdir(mode=0o700, parents=True, exist_ok=True)
            if is_safe(place) and os.access(place, os.W_OK):
                return place
    return None


# --- dependencies of the code -----------------------------------------------------------------------------------------


def key(graph: GraphModule, options: Mapping[str, Any]) -> str | None:
    """The name of a graph's code with the current settings of torch and inductor; None if they cannot be named, or
    forbid caches.

    Args:
        graph: without decompositions.
        options: inductor's configuration in addition to the current one.
    """
    try:
        if not all(_is_torchs(becomes) for operator, becomes in _tables() if graph_key.uses(graph, operator)):
            raise graph_key.Unnamed("a user's decomposition or lowering")
        return named([*_surroundings(options), *graph_key.lines(graph)])
    except graph_key.Unnamed:
        return None


def _surroundings(options: Mapping[str, Any]) -> Iterator[str]:
    from torch._inductor import config  # loaded by torch's fake tensors

    settings: Any = config

    def is_set(name: str) -> Any:
        return options.get(name, getattr(settings, name, None))

    passes = map(is_set, settings._save_config_ignore)
    if is_set("force_disable_caches") or not is_set("fx_graph_cache") or any(map(callable, passes)):
        raise graph_key.Unnamed("inductor's settings")
    found = settings.save_config_portable(ignore_private_configs=False) | dict(options)
    found.pop("aot_inductor.metadata")  # inductor changes it
    yield graph_key.text(dict(sorted(found.items())))
    yield graph_key.text(
        (
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.get_float32_matmul_precision(),
            torch.backends.mkldnn.enabled,
            os.environ.get("ATEN_CPU_CAPABILITY"),
            os.environ.get("PURESTEP_CPU"),
        )
    )


def _tables() -> Iterator[tuple[Any, Any]]:
    """(operator, decomposition or lowering) pairs of the loaded tables."""
    for module, name in (
        ("torch._decomp", "decomposition_table"),
        ("torch._inductor.decomposition", "decompositions"),
        ("torch._inductor.lowering", "lowerings"),
    ):
        yield from getattr(sys.modules.get(module), name, {}).items()


def _is_torchs(becomes: Any) -> bool:
    if isinstance(becomes, functools.partial):
        becomes = becomes.func  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return getattr(becomes, "__module__", "").partition(".")[0] in ("torch", "purestep")


@functools.cache
def _installed() -> str:
    """Versions of torch, Python and the processor, and the files of the code that compiles a graph."""
    roots = [Path(torch.__file__).parent / "_inductor", Path(__file__).parents[1]]
    sources = sorted(file for root in roots for file in root.rglob("*") if file.suffix in (".py", ".cpp", ".h"))
    stats = [(str(file), (each := file.stat()).st_size, each.st_mtime_ns) for file in sources]
    return repr((environment(), stats))


def environment() -> str:
    """Versions of torch and Python, and the processor."""
    interpreter = (torch.__version__, torch.version.git_version, sysconfig.get_config_var("EXT_SUFFIX"))
    return repr((interpreter, _processor(), torch.backends.cpu.get_cpu_capability()))


def _processor() -> str:
    """The processor's properties that `-march=native` depends on."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    telling = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU part")
    return "\n".join(line for line in first if line.partition(":")[0].strip() in telling)
