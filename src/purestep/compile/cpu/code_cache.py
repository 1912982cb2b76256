"""Native code of earlier runs, found by the text of a step's operations (`graph_key`).

Buys: a start that finds its code skips the trace by `make_fx`, inductor's passes and the hash of every file of torch,
which inductor's own cache needs. An entry is a small file in inductor's cache directory: the library, the hash of its
bytes, and how it is called. Code that the text does not determine (a constant tensor, an operator or a pass of the
user's) is not kept here.

Private names: ``torch._inductor.config``, the directory of inductor's cache, the tables of decompositions and
lowerings.

Without: inductor's own cache of graphs.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from . import graph_key, launcher
from .graph_key import Record
from .launcher import Code


class Made(NamedTuple):
    """What has been made of a function."""

    code: Code
    draws: bool
    """whether it draws random numbers"""
    threads: int
    """on how many it may run; 0: on as many as there are"""


def name(record: Record, chosen: Mapping[str, Any]) -> str | None:
    """Names the code of this, on this machine, with torch and inductor set as they are; None: do not keep it.

    Args:
        record: what it is made of.
        chosen: of inductor's configuration, what will be set while the code is made.
    """
    if record.lines is None:
        return None
    try:
        text = [*_surroundings(chosen), *record.lines]
    except Exception:  # untold, or names that another torch does not have
        return None
    return f"{_hash(text)}.{here()}"


def here() -> str:
    """A word for this machine, with torch and purestep as they are installed."""
    return _hash([_installed()])


def _hash(text: list[str]) -> str:
    return hashlib.sha256("\n".join(text).encode()).hexdigest()


def load(known: str | None, count: int) -> Made | None:
    """The code that was stored under a name; None where there is none, or the file has changed: then it is removed,
    because inductor would load it unseen.

    Args:
        known: of `name`.
        count: of the graph's tensors, but the workspace.
    """
    if known is None:
        return None
    try:
        place, digest, draws, threads = _read(file_of(known))
        library = _directory() / place
        code = None
        if _digest(library) == digest:
            with suppress(OSError):  # made for another C library
                code = launcher.loaded(str(library), count)
        if code is None:
            for part in (library, library.with_suffix(".o")):
                part.unlink(missing_ok=True)
            return None
        return Made(code, draws, threads)
    except Exception:  # it is made anew, whatever is wrong with what is there
        return None


def keep(known: str | None, made: Made) -> None:
    """Remember in which library the code of that name is, and how it is called."""
    code, *rest = made
    if known is None or code.file is None:
        return
    library = Path(code.file)
    with suppress(Exception):  # the next start takes longer
        text = json.dumps([str(library.relative_to(_directory())), _digest(library), *rest])
        _write(file_of(known), f"{text}\n{_hash([text])}\n".encode())


def _read(record: Path) -> list[Any]:
    """What `keep` has written; ValueError where it is something else."""
    text, digest = record.read_text().splitlines()
    if _hash([text]) != digest:
        raise ValueError("the digest of a record is not that of its text")
    return json.loads(text)


def _write(file: Path, data: bytes) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent) as directory:
        whole = Path(directory, file.name)
        whole.write_bytes(data)
        os.replace(whole, file)


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def file_of(known: str) -> Path:
    """Where it is remembered what has been made under that name."""
    return _directory() / "purestep" / known


def _directory() -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


# --- what the code depends on -----------------------------------------------------------------------------------------


def _surroundings(chosen: Mapping[str, Any]) -> Iterator[str]:
    from torch._inductor import config

    settings: Any = config
    ignored = settings._save_config_ignore  # passes of the user's and the like

    def is_set(name: str) -> Any:
        return chosen.get(name, getattr(settings, name, None))

    if is_set("force_disable_caches") or not is_set("fx_graph_cache") or any(map(callable, map(is_set, ignored))):
        raise graph_key.Untold("inductor's settings")
    if not all(map(_is_torchs, _tables())):
        raise graph_key.Untold("a decomposition or a lowering of the user's")
    found = settings.save_config_portable(ignore_private_configs=False) | dict(chosen)
    yield from (f"{key} {graph_key.plain(value)}" for key, value in sorted(found.items()))
    yield graph_key.plain(sorted(chosen))  # what is not may depend on the graph: `rounding`
    yield graph_key.plain(
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
    """What becomes of each operator, as far as it is loaded."""
    for module, name in (
        ("torch._decomp", "decomposition_table"),
        ("torch._inductor.decomposition", "decompositions"),
        ("torch._inductor.lowering", "lowerings"),
    ):
        yield from getattr(sys.modules.get(module), name, {}).items()


def _is_torchs(entry: tuple[Any, Any]) -> bool:
    target, becomes = entry
    if isinstance(becomes, functools.partial):
        becomes = becomes.func  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return not graph_key.known(target) or getattr(becomes, "__module__", "").partition(".")[0] in ("torch", "purestep")


@functools.cache
def _installed() -> str:
    """This torch, this Python, this processor, and the code that turns a graph into a library."""
    roots = [Path(torch.__file__).parent / "_inductor", Path(__file__).parents[1]]
    sources = sorted(file for root in roots for file in root.rglob("*") if file.suffix in (".py", ".cpp", ".h"))
    stats = [(str(file), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in sources]
    return repr((environment(), stats))


def environment() -> str:
    """This torch, this Python, this processor."""
    interpreter = (torch.__version__, torch.version.git_version, sysconfig.get_config_var("EXT_SUFFIX"))
    return repr((interpreter, _processor(), torch.backends.cpu.get_cpu_capability()))


def _processor() -> str:
    """What `-march=native` looks at."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    telling = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU part")
    return "\n".join(line for line in first if line.partition(":")[0].strip() in telling)
