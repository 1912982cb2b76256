"""Native code of earlier runs, found by the graph that it was made from.

Inductor has a cache on disk too, but asks it late: after loading all of the compiler, running its passes, and hashing
every file of torch and the C++ headers. Here the traced graph itself is the question, and the answer one line in
inductor's cache directory: which library, and the hash of its bytes. What cannot be told from its text (a constant
tensor, an operator of the user's, a pass of the user's) is not kept here.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import operator
import os
import platform
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from . import calls
from .calls import Code

if TYPE_CHECKING:
    from torch.fx import GraphModule

_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)

_NAMESPACES = ("aten", "prims", "purestep")
"""Operators whose code changes with what `_installed` looks at, and with nothing else."""


class Unkept(Exception):
    """Text does not tell this apart from something else."""


def name(graph: GraphModule, inputs: Sequence[Tensor]) -> str | None:
    """Names the code of this graph, on this machine, with torch and inductor set as they are; None: do not keep it."""
    try:
        lines = [*_surroundings(), *(_tensor(leaf) for leaf in inputs), *_lines(graph)]
    except Exception:  # Unkept, or names that another torch does not have
        return None
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def load(known: str | None) -> Code | None:
    """The code of that name; None where there is none, or not as it was: then it is removed, for inductor would take it
    without a look."""
    if known is None:
        return None
    try:
        place, digest = _record(known).read_text().split()
        library = _directory() / place
        if _digest(library) != digest:
            for part in (library, library.with_suffix(".o")):
                part.unlink(missing_ok=True)
            return None
        return calls.loaded(str(library), digest)
    except Exception:  # it is made anew, whatever is wrong with what is there
        return None


def keep(known: str | None, code: Code) -> None:
    """Remember in which library the code of that name is."""
    if known is None or code.file is None:
        return
    library = Path(code.file)
    with suppress(Exception):  # the next start takes longer
        record = _record(known)
        record.parent.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=record.parent, delete=False) as file:
            file.write(f"{library.relative_to(_directory())} {_digest(library)}\n")
        try:
            os.replace(file.name, record)
        except OSError:
            os.unlink(file.name)


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _record(known: str) -> Path:
    return _directory() / "purestep" / known


def _directory() -> Path:
    from torch._inductor.runtime import cache_dir_utils

    return Path(cache_dir_utils.cache_dir())


# --- what the code depends on -----------------------------------------------------------------------------------------


def _surroundings() -> Iterator[str]:
    from torch._inductor import config

    settings: Any = config
    if settings.force_disable_caches or not settings.fx_graph_cache:
        raise Unkept
    for ignored in settings._save_config_ignore:
        if callable(getattr(settings, ignored, None)):
            raise Unkept
    portable = settings.save_config_portable(ignore_private_configs=False)
    yield from (f"{key} {_text(value)}" for key, value in sorted(portable.items()))
    yield _installed()
    yield _text(
        (
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.get_float32_matmul_precision(),
            torch.backends.mkldnn.enabled,
            os.environ.get("ATEN_CPU_CAPABILITY"),
        )
    )


@functools.cache
def _installed() -> str:
    """This torch, this Python, this processor, and the code that turns a graph into a library."""
    import torch._inductor as inductor

    roots = [Path(inspect.getfile(inductor)).parent, Path(__file__).parent]
    sources = sorted(file for root in roots for file in root.rglob("*.py"))
    stats = [(str(file), (stat := file.stat()).st_size, stat.st_mtime_ns) for file in sources]
    interpreter = (torch.__version__, torch.version.git_version, sysconfig.get_config_var("EXT_SUFFIX"))
    return repr((interpreter, _processor(), torch.backends.cpu.get_cpu_capability(), stats))


def _processor() -> str:
    """What `-march=native` looks at."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    telling = ("vendor_id", "cpu family", "model", "stepping", "flags", "Features", "CPU part")
    return "\n".join(line for line in first if line.partition(":")[0].strip() in telling)


def _lines(graph: GraphModule) -> Iterator[str]:
    places = {node: f"%{index}" for index, node in enumerate(graph.graph.nodes)}
    for node in graph.graph.nodes:
        made = "" if node.op == "output" else _text(node.meta.get("val"))
        yield f"{node.op} {_target(node)} {_text(node.args, places)} {_text(node.kwargs, places)} {made}"


def _target(node: Any) -> str:
    if node.op in ("placeholder", "output"):
        return ""
    if node.op != "call_function" or not known(node.target):
        raise Unkept
    return str(node.target)


def known(target: Any) -> bool:
    """Whether this is an operator of torch's or of purestep's own."""
    return target is operator.getitem or (isinstance(target, OpOverload) and target.namespace in _NAMESPACES)


def _text(value: Any, places: dict[Any, str] | None = None) -> str:
    if type(value) in _PLAIN:
        return repr(value)
    if places is not None and isinstance(value, torch.fx.Node):
        return places[value]
    if isinstance(value, Tensor):
        return _tensor(value)
    if isinstance(value, list | tuple):
        return f"({', '.join(_text(item, places) for item in value)})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_text(key, places)}: {_text(item, places)}' for key, item in value.items())}}}"
    raise Unkept


def _tensor(value: Tensor) -> str:
    if not all(type(size) is int for size in (*value.shape, *value.stride(), value.storage_offset())):
        raise Unkept
    return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.storage_offset()} {value.device}"
