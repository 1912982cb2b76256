"""Arrays on disk through orbax: the only file that imports it (and with it JAX), on first use.

Three effects of that import are not ours to prevent. absl puts a handler on the root logger, so `logging.basicConfig`
belongs before the first save. JAX starts threads, so every later `os.fork` (a DataLoader with workers) warns on Python
3.12. JAX picks its platforms when orbax first asks: unless JAX runs already or its platforms were chosen, they are set
to the CPU here, since JAX would otherwise take most of the GPU's memory.

A fourth one is: JAX draws from numpy's global generator as it is imported (``jax._src.clusters.k8s_cluster``, five
numbers). So it is imported by the thread that saves, in `ready`, and not by the one that writes, which would draw while
a dataset does.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from ..data import random_state

Array = np.ndarray[Any, Any]

_ITEM = "state"
_log = logging.getLogger("purestep")


def ready(platforms: str | None) -> None:
    """Imports orbax where nobody did, and leaves the caller's generators as they were: a second, once in a process.

    Args:
        platforms: as in `write`.
    """
    _orbax(platforms)


def _orbax(platforms: str | None) -> Any:
    with nullcontext() if "jax" in sys.modules else random_state.scoped(0):
        import jax

    if platforms is not None and not getattr(jax.config, "jax_platforms", None) and not _jax_is_running():
        jax.config.update("jax_platforms", platforms)
    logging.getLogger("asyncio").addFilter(_orphans)  # adding it again changes nothing; the tasks die late
    return importlib.import_module("orbax.checkpoint").v1


def _jax_is_running() -> bool:
    try:
        from jax._src import xla_bridge

        return bool(xla_bridge.backends_are_initialized())
    except (ImportError, AttributeError):  # private: then an update without effect does no harm
        return False


def _context(orbax: Any) -> Any:
    context = orbax.Context()
    context.memory.deepcopy_host_arrays = False  # the arrays are ours already
    context.array.saving.use_compression = False  # 8 % smaller for half again the time
    context.pytree_options.loading.partial_load = True
    return context


class _Orphans(logging.Filter):
    """asyncio logs, with a traceback, each of orbax's tasks that failed beside the one whose error was raised."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "orbax" not in record.getMessage()


_orphans = _Orphans()


class _Noise(logging.Filter):
    """orbax logs dozens of lines for each save, and hundreds for each error that it also raises."""

    def filter(self, record: logging.LogRecord) -> bool:
        return record.levelno >= logging.WARNING and "raised an exception" not in str(record.msg)


@contextmanager
def _quiet() -> Generator[None]:
    logger, noise = logging.getLogger("absl"), _Noise()
    logger.addFilter(noise)
    try:
        yield
    except Exception as error:
        code = re.search(r"os_error_code='(\d+)'", str(error))
        if code is None:
            raise
        number = int(code.group(1))
        raise OSError(number, os.strerror(number)) from error
    finally:
        logger.removeFilter(noise)


def key(path: str) -> str:
    """The name under which a leaf is stored. orbax joins names with '.', so none may be left in it.

    Example:
        >>> key("params/layers.0.weight")
        'params%2Flayers%2E0%2Eweight'
    """
    return "".join(c if c.isascii() and (c.isalnum() or c in "_-") else _escape(c) for c in path) or "%"


def _escape(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogatepass"))


def write(folder: Path, arrays: Mapping[str, tuple[str, Array]], *, platforms: str | None) -> None:
    """Writes the arrays into ``folder``, which must not exist; returns when orbax has committed them.

    Args:
        arrays: path -> (dtype name, carrier array); not copied, not changed.
        platforms: what JAX may start on; None leaves JAX alone.
    """
    orbax = _orbax(platforms)
    with _quiet(), _context(orbax):
        state = {key(path): values.view(_stored_type(dtype)) for path, (dtype, values) in arrays.items()}
        orbax.save(folder, state, checkpointable_name=_ITEM)


def shapes(folder: Path, *, platforms: str | None) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Per stored name its shape and the shape of its chunks, from the metadata alone."""
    orbax = _orbax(platforms)
    with _quiet():
        found = orbax.metadata(folder, checkpointable_name=_ITEM).metadata
    result: dict[str, tuple[tuple[int, ...], ...]] = {}
    for name, entry in found.items():
        storage = entry.storage_metadata
        chunks = (storage.chunk_shape, storage.write_shape) if storage is not None else ()
        result[name] = (tuple(entry.shape), *(tuple(chunk) for chunk in chunks if chunk is not None))
    return result


def read(folder: Path, wanted: Mapping[str, str], *, platforms: str | None) -> dict[str, Array]:
    """Reads some of the arrays, as carrier arrays, each in memory of its own.

    Args:
        wanted: path -> dtype name; only these are read.
    """
    orbax = _orbax(platforms)
    with _quiet(), _context(orbax):
        placeholders = {key(path): np.empty(0, _stored_type(dtype)) for path, dtype in wanted.items()}
        found = orbax.load(folder, placeholders, checkpointable_name=_ITEM)
    return {path: _carried(found[key(path)]) for path in wanted}


def read_chunks(folder: Path, wanted: Mapping[str, int]) -> dict[str, bytes]:
    """Reads arrays of one chunk straight from the key-value store that orbax writes them into.

    orbax takes a millisecond for an array, whatever its size, this takes a thirtieth. What it gives is what lies there:
    the caller holds it against digests, and asks `read` for what does not have its own, or is missing.

    Args:
        wanted: path -> number of dimensions.
    """
    try:
        import tensorstore  # orbax's own

        base = {"driver": "file", "path": f"{folder / _ITEM}/"}
        values = tensorstore.KvStore.open({"driver": "ocdbt", "base": base}).result()
        found = {path: values.read(f"{key(path)}/c{'/0' * rank}") for path, rank in wanted.items()}
        return {path: value for path, chunk in found.items() if (value := chunk.result().value)}
    except Exception as error:  # damaged, or laid out in another way: `read` knows, or says so
        _log.info("%s: read through orbax: %s", folder, error)
        return {}


def _carried(values: Array) -> Array:
    standard = values.dtype.isbuiltin == 1  # ml_dtypes gives 2, and claims kind "f" for some of its types
    return values if standard else values.view(np.dtype(f"uint{values.dtype.itemsize * 8}"))


def _stored_type(dtype: str) -> np.dtype[Any]:
    import ml_dtypes  # JAX's own: what a JAX program that reads the snapshot expects

    return np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
