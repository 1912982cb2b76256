"""Cache of compiled libraries between runs, in inductor's cache directory.

An entry is a library, and a JSON file that torch reads for operators without a C function. A process builds both in a
temporary directory, syncs and renames them, so an entry is whole, and of processes that start together the last one
stays. The name holds the version of torch, not its files: after an edit of inductor, delete the cache.

A library is code, so an entry is loaded only if it belongs to this user or root and nobody else may write it; see
`code_directory`.

Private names: ``torch._inductor.config``, the tables of decompositions and lowerings, if they are loaded.
"""

from __future__ import annotations

import atexit
import functools
import hashlib
import os
import platform
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import code_directory
from . import graph_key

if TYPE_CHECKING:
    from torch.fx import GraphModule


def obtained(name: str | None, build: Callable[[str], object], load: Callable[[str], Any] = str) -> Any:
    """Find a library, or build it; return what ``load`` makes of its path.

    Args:
        name: from `named`; None builds a library that only this process uses.
        build: writes the library to a path.
        load: raises OSError or RuntimeError if the library is damaged; an entry is then built again.
    """
    for whole in (False, True):  # the directory may be another one once all that it contains is checked
        place = code_directory.directory(whole=whole) / "purestep"
        entry = place / f"{name}.so"
        if name is not None and _is_entry(entry):
            try:
                return load(str(entry))
            except (OSError, RuntimeError):
                entry.unlink(missing_ok=True)  # another process may have found it, too
    place.mkdir(mode=0o700, exist_ok=True)
    if name is None:
        entry = Path(tempfile.mkdtemp(dir=place), "step.so")
        atexit.register(shutil.rmtree, entry.parent, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=place) as work:
        made = Path(work, "step.so")
        build(str(made))
        for calls in made.parent.glob("*.wrapper.json"):  # torch looks for it beside the library
            calls.chmod(0o600)
            _sync(calls)
            calls.replace(entry.with_suffix(".json"))
        made.chmod(0o700)
        _sync(made)
        made.replace(entry)
    return load(str(entry))


def _sync(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def _is_entry(library: Path) -> bool:
    """True if there is such a library, and nobody else could have written it."""
    with suppress(OSError):
        place = library.parent
        return library.is_file() and all(map(code_directory.is_own, (place, *place.glob(f"{library.stem}.*"))))
    return False


def named(lines: Sequence[str]) -> str:
    """The name of what these lines determine on this machine, with the installed torch and purestep."""
    return hashlib.sha256("\n".join([_installed(), *lines]).encode()).hexdigest()


# --- dependencies of the code -----------------------------------------------------------------------------------------


def key(graph: GraphModule, options: Mapping[str, Any]) -> str | None:
    """The name of a graph's code with the current settings of torch and inductor; None if they cannot be named, or
    forbid caches.

    Args:
        graph: without decompositions.
        options: inductor's configuration in addition to the current one.
    """
    try:
        if any(_is_used(graph, operator) and not _is_torchs(becomes) for operator, becomes in _tables()):
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


def _is_used(graph: GraphModule, operator: Any) -> bool:
    """True if the code of a graph may call an operator: of torch, of purestep, or of the graph."""
    if getattr(operator, "namespace", "") in ("aten", "prims", "purestep"):
        return True
    return any(node.target is operator for node in graph.graph.nodes)


def _is_torchs(becomes: Any) -> bool:
    if isinstance(becomes, functools.partial):
        becomes = becomes.func  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
    return getattr(becomes, "__module__", "").partition(".")[0] in ("torch", "purestep")


@functools.cache
def _installed() -> str:
    """Versions of torch and Python, the processor, and the files of purestep that compile a graph."""
    folder = Path(__file__).parents[1]
    sources = sorted(file for file in folder.rglob("*") if file.suffix in (".py", ".cpp", ".h"))
    stats = [(str(file), (each := file.stat()).st_size, each.st_mtime_ns) for file in sources]
    versions = (torch.__version__, torch.version.git_version, sysconfig.get_config_var("EXT_SUFFIX"))
    return repr((versions, _processor(), torch.backends.cpu.get_cpu_capability(), stats))


def _processor() -> str:
    """The processor's properties that `-march=native` depends on."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    telling = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU part")
    return "\n".join(line for line in first if line.partition(":")[0].strip() in telling)
