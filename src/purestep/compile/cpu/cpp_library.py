"""The C++ of a step beside inductor's: a library with the product kernel and a thread's memory (``gemm.cpp``,
``memory.cpp``), which each compiled step calls, and the header of each step's code: a small class for its model
(``model.h``), and calls of the library (``fast.h``).

Buys: a call of torch's product has an overhead of 1.2 to 2.5 us, and MKL's kernels are slow for small matrices and on
processors that are not Intel's. Inductor's code calls malloc for every intermediate tensor and wraps each in objects, a
tenth of the time of a step with many small tensors; the memory of large ones returns to the system after every use, and
comes back page by page. AOTInductor's own class for a model and the container around it, whose constants can be
exchanged, take g++ five seconds for each graph.

The kernel follows Goto and van de Geijn (Anatomy of High-Performance Matrix Multiplication, ACM TOMS 2008): as many
rows on the left as the L2 cache holds, panels of two vectors of columns on the right, packed if they are not
contiguous, blocks of rows in registers. Each element is summed in one order, whatever the number of threads.

The header replaces names of inductor's generated C++ by macros: ``RAIIAtenTensorHandle``,
``steal_from_raw_handles_to_raii_handles``, ``aoti_torch_empty_strided``, ``aoti_torch_cpu_mm_out`` and the like,
``AOTInductorModelBase``.

Without: torch's products, inductor's allocations, and AOTInductor's class.
"""

from __future__ import annotations

import ctypes
import functools
from importlib import resources
from pathlib import Path
from typing import Any

from . import code_cache

_SOURCES = ("gemm.cpp", "memory.cpp")


def source(name: str) -> str:
    """Read a C++ file."""
    return resources.files(__package__ or "").joinpath("csrc", name).read_text(encoding="utf-8")


def options(library: str) -> dict[str, Any]:
    """Write the header for the code of a graph, and return inductor's configuration with it.

    For static linking, the code includes a header with its model's class in place of all of AOTInductor's C++. Inductor
    writes one, unless a file of this name exists. The name is unique: compilations of one name wait for one another.

    Args:
        library: the path, in a directory for the files of the compilation.
    """
    place = Path(library).parent
    text = "\n".join([f"#define MODEL AOTInductorModel{place.name}", source("model.h"), source("fast.h")])
    (place / f"{place.name}.h").write_text(text, encoding="utf-8")
    return {"aot_inductor.dynamic_linkage": False, "aot_inductor.model_name_for_generated_files": place.name}


@functools.cache
def loaded() -> ctypes.CDLL:
    """Load the library, whose functions the code of steps finds by their names; compile it once for a machine."""
    text = "\n".join(map(source, _SOURCES))
    load = functools.partial(ctypes.CDLL, mode=ctypes.RTLD_GLOBAL)
    made = code_cache.obtained(code_cache.named([text]), functools.partial(_build, text), load)
    made.purestep_held.restype = ctypes.c_int64
    return made


def _build(text: str, library: str) -> None:
    from torch._inductor import config, cpp_builder, cpu_vec_isa

    builders: Any = cpp_builder
    file = Path(library).with_suffix(".cpp")
    file.write_text(text, encoding="utf-8")
    with config.patch({"cpp.vec_isa_ok": True}):
        options = builders.CppTorchOptions(vec_isa=cpu_vec_isa.pick_vec_isa())
    builder = builders.CppBuilder(file.stem, str(file), options, str(file.parent))
    builder.build()
