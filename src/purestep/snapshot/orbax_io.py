"""Write arrays through orbax, and read them: the only file that imports it, and with it JAX, at the first save.

The import has side effects. absl adds a handler to the root logger, so call `logging.basicConfig` before the first
save. JAX starts threads and warns at every later `os.fork` (a DataLoader with workers) that a child must not use JAX.
If this module is the first to import JAX, nothing else in the process uses it, so that warning is filtered out; after
an import by the user it is shown. JAX would take most of the GPU's memory, so its platform is set to the CPU here,
unless it runs already or its platforms are set. JAX draws five numbers from numpy's global generator
(``jax._src.clusters.k8s_cluster``), so `ready` imports it in the thread that calls `save`, not in the writer's thread,
which would draw while a dataset draws.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import re
import sys
import warnings
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ..data import random_state
from ..files import read_json

Array = np.ndarray[Any, Any]

_ITEM = "state"


def ready() -> Any:
    """Import orbax, and restore the caller's generators. Takes a second, once per process."""
    is_ours = "jax" not in sys.modules
    with random_state.scoped(0) if is_ours else nullcontext():
        import jax
    if is_ours:
        warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)

    if not getattr(jax.config, "jax_platforms", None) and not _jax_is_running():
        jax.config.update("jax_platforms", "cpu")
    logging.getLogger("asyncio").addFilter(_is_wanted)  # adding it twice has no effect; the tasks fail late
    return importlib.import_module("orbax.checkpoint").v1


def _jax_is_running() -> bool:
    try:
        from jax._src import xla_bridge

        return bool(xla_bridge.backends_are_initialized())
    except (ImportError, AttributeError):  # these names are private; an update without effect is harmless
        return False


def _context(orbax: Any) -> Any:
    context = orbax.Context()
    context.memory.deepcopy_host_arrays = False  # the arrays are ours already
    context.array.saving.use_compression = False  # compression saves 8 % and takes 1.5 times as long
    return context


def _is_wanted(record: logging.LogRecord) -> bool:
    """False for asyncio's tracebacks of orbax's other failed tasks; the error of one task is raised."""
    return "orbax" not in record.getMessage()


def _is_news(record: logging.LogRecord) -> bool:
    """False for orbax's dozens of lines for each save, and hundreds for each error that it raises too."""
    return record.levelno >= logging.WARNING and "raised an exception" not in str(record.msg)


@contextmanager
def _quiet() -> Generator[None]:
    logger, news = logging.getLogger("absl"), partial(_is_news)  # one for each save: two may overlap
    logger.addFilter(news)
    try:
        yield
    except Exception as error:
        # After a failed save, orbax never awaits some of its coroutines.
        classes = "OrbaxLayout|NumpyHandler|BasePyTreeCheckpointHandler"
        warnings.filterwarnings("ignore", f"coroutine '({classes})", RuntimeWarning)
        code = re.search(r"os_error_code='(\d+)'", str(error))
        if code is None:
            raise
        number = int(code.group(1))
        raise OSError(number, os.strerror(number)) from error
    finally:
        logger.removeFilter(news)


def key(path: str) -> str:
    """The name of a stored leaf. orbax joins names with '.', so a name must not contain one.

    Example:
        >>> key("params/layers.0.weight")
        'params%2Flayers%2E0%2Eweight'
    """
    return "".join(c if c.isascii() and (c.isalnum() or c in "_-") else _escape(c) for c in path) or "%"


def _escape(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogatepass"))


def write(folder: Path, arrays: Mapping[str, tuple[str, Array]]) -> None:
    """Write the arrays into ``folder``, which must not exist, and wait until orbax has committed them.

    Args:
        arrays: path -> (dtype name, carrier array); not copied, not changed.
    """
    orbax = ready()
    with _quiet(), _context(orbax):
        state = {key(path): values.view(_stored_type(dtype)) for path, (dtype, values) in arrays.items()}
        orbax.save(folder, state, checkpointable_name=_ITEM)


def read(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array]:
    """Read arrays as carrier arrays that share no memory, by tensorstore, in a fifth of orbax's time if they are small.

    Args:
        shapes: by path, of the arrays to read.

    Raises:
        ValueError: the arrays' own metadata claim other shapes.
    """
    import tensorstore  # orbax's own

    with _quiet():
        check_shapes(folder, shapes)
        place, shared = _place(folder), tensorstore.Context()  # one index for all arrays
        specs = [{"driver": "zarr3", "kvstore": place | {"path": f"{key(path)}/"}} for path in shapes]
        opened = [tensorstore.open(spec, read=True, context=shared) for spec in specs]
        found = [array.result().read() for array in opened]
        return {path: _carried(values.result()) for path, values in zip(shapes, found, strict=True)}


def check_shapes(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compare the shapes in the arrays' own metadata before memory is allocated: a few bytes can claim terabytes.

    Args:
        folder: of the arrays.
        shapes: by path.

    Raises:
        ValueError: a shape differs, or the arrays are stored in another way than `write` stores them.
    """
    import tensorstore  # orbax's own

    layout = read_json(folder / _ITEM / "_METADATA")
    if not (layout["use_ocdbt"] and layout["use_zarr3"]):
        raise ValueError("not stored as purestep stores arrays")
    store: Any = tensorstore.KvStore.open(_place(folder)).result()
    found = {path: store.read(f"{key(path)}/zarr.json") for path in shapes}
    for path, shape in shapes.items():
        claims = list(_claims(json.loads(found[path].result().value or "{}")))
        if not claims or any(claim != list(shape) for claim in claims):
            raise ValueError(f"the metadata of {path} claim {claims} where {list(shape)} was written")


def _place(folder: Path) -> dict[str, Any]:
    """The place of the arrays, as tensorstore describes it."""
    return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{folder / _ITEM}/"}}


_PLAIN = ("regular", "default", "sharding_indexed", "bytes", "crc32c")
"""Chunk grid, chunk names and codecs of arrays that are not compressed."""


def _claims(node: Any) -> Iterator[Any]:
    """Every shape in the metadata of an array, those of its chunks too, and each codec that may expand."""
    items: Any = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, value in items:
        if name in ("shape", "chunk_shape") or (name == "name" and value not in _PLAIN):
            yield value
        else:
            yield from _claims(value)


def _carried(values: Array) -> Array:
    standard = values.dtype.isbuiltin == 1  # 2 for ml_dtypes, some of which claim kind "f"
    return values if standard else values.view(np.dtype(f"uint{values.dtype.itemsize * 8}"))


def _stored_type(dtype: str) -> np.dtype[Any]:
    import ml_dtypes  # a JAX program that reads the snapshot expects its types

    return np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
