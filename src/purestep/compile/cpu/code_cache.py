"""Cache of native code between runs, keyed by the text of a step's operations (`graph_key`).

Buys: a cache hit skips the trace by `make_fx`, inductor's passes and the hash of every file of torch that inductor's
own cache needs. An entry is a small file in inductor's cache directory: the library, its digest, and how to call it.
Code that the text does not determine (with a constant tensor, or a user's operator or pass) is not stored.

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
    """The compiled code of a function."""

    code: Code
    draws: bool
    """whether it draws random numbers"""
    threads: int
    """maximal number of threads; 0 means no limit"""


def name(record: Record, chosen: Mapping[str, Any]) -> str | None:
    """Return the cache key of a record's code on this machine with the current settings of torch and inductor; None if
    it must not be stored.

    Args:
        record: of the function.
        chosen: inductor's configuration during the compilation.
    """
    if record.lines is None:
        return None
    try:
        text = [*_surroundings(chosen), *record.lines]
    except Exception:  # no key, or a name that this torch lacks
        return None
    return f"{_hash(text)}.{here()}"


def here() -> str:
    """A digest of this machine and the installed torch and purestep."""
    return _hash([_installed()])


def _hash(text: list[str]) -> str:
    return hashlib.sha256("\n".join(text).encode()).hexdigest()


def load(known: str | None, count: int) -> Made | None:
    """Load the code stored under a key; None if there is none or the library has changed. A changed library is removed,
    because inductor would load it unchecked.

    Args:
        known: from `name`.
        count: number of the graph's tensors without the workspace.
    """
    if known is None:
        return None
    try:
        place, digest, draws, threads = _read(file_of(known))
        library = _directory() / place
        code = None
        if _digest(library) == digest:
            with suppress(OSError):  # built for another C library
                code = launcher.loaded(str(library), count)
        if code is None:
            for part in (library, library.with_suffix(".o")):
                part.unlink(missing_ok=True)
            return None
        return Made(code, draws, threads)
    except Exception:  # compile again, whatever is wrong with the entry
        return None


def keep(known: str | None, made: Made) -> None:
    """Store the library of a key, and how to call it."""
    code, *rest = made
    if known is None or code.file is None:
        return
    library = Path(code.file)
    with suppress(Exception):  # without an entry the next start only takes longer
        text = json.dumps([str(library.relative_to(_directory())), _digest(library), *rest])
        _write(file_of(known), f"{text}\n{_hash([text])}\n".encode())


def _read(record: Path) -> list[Any]:
    """Read an entry of `keep`; raise ValueError if it is damaged."""
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
    """The file of a key's entry."""
    return _directory() / "purestep" / known


def _directory() -> Path:
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    return Path(cache_dir())


# --- dependencies of the code -----------------------------------------------------------------------------------------


def _surroundings(chosen: Mapping[str, Any]) -> Iterator[str]:
    from torch._inductor import config

    settings: Any = config
    ignored = settings._save_config_ignore  # includes a user's passes

    def is_set(name: str) -> Any:
        return chosen.get(name, getattr(settings, name, None))

    if is_set("force_disable_caches") or not is_set("fx_graph_cache") or any(map(callable, map(is_set, ignored))):
        raise graph_key.Unkeyable("inductor's settings")
    if not all(map(_is_torchs, _tables())):
        raise graph_key.Unkeyable("a user's decomposition or lowering")
    found = settings.save_config_portable(ignore_private_configs=False) | dict(chosen)
    yield from (f"{key} {graph_key.plain(value)}" for key, value in sorted(found.items()))
    yield graph_key.plain(
        sorted(chosen)
    )  # settings outside `chosen` may depend on the graph: `emulate_precision_casts`
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
    """(operator, decomposition or lowering) pairs of the loaded tables."""
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
    """Versions of torch, Python and the processor, and the files of the code that compiles a graph."""
    roots = [Path(torch.__file__).parent / "_inductor", Path(__file__).parents[1]]
    sources = sorted(file for root in roots for file in root.rglob("*") if file.suffix in (".py", ".cpp", ".h"))
    stats = [(str(file), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in sources]
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
