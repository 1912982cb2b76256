"""The stand-in's library, made by the machine's g++ for one build of torch. Imports no torch: it is loaded before."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path

NATIVE = Path(__file__).parent / "native"
BUILT = Path(__file__).parent / "build"
NAME = "libcuda.so.1"  # as Triton and torch ask for it

_CUDA = re.compile(r" U ((?:__cuda|cuda|cublas|cusolver|cusparse|cufft|curand|cudnn|nccl|cu[A-Z])\w*)")
_DEFINED = re.compile(r"^EXPORT [\w *]*?\*?\b(\w+)\(", re.MULTILINE)
_PRODUCTS = re.compile(r"cublas(?:[SDCZ](?:gemm|gemv|trsm|getr|dot)|Gemm|Dot)")
# Asked while CUDA is set up or shut down; there is nothing to do.
_NOTHING_TO_DO = {"ncclGetVersion", "cudnnGetVersion", "cuLogsRegisterCallback"}


class NotPossibleError(Exception):
    """Why the stand-in cannot be made here."""


def stand_in() -> Path:
    """The library for the installed torch, built unless it is there.

    Raises:
        NotPossibleError: torch has no CUDA, or there is no C++ compiler.
    """
    torch, triton = _package("torch"), _package("triton")
    if not (torch / "lib" / "libtorch_cuda.so").exists():
        raise NotPossibleError(f"the torch in {torch} is built without CUDA")
    if shutil.which("g++") is None or shutil.which("nm") is None:
        raise NotPossibleError("there is no g++ and nm")
    sources = sorted(NATIVE.glob("*.cpp"))
    names = _wanted(torch, triton) - {name for source in sources for name in _DEFINED.findall(source.read_text())}
    rest = _entry_points(sorted(names))
    text = rest + "".join(path.read_text() for path in sorted(NATIVE.iterdir())) + str(_headers(torch, triton))
    folder = BUILT / hashlib.sha256(text.encode()).hexdigest()[:16]
    if not (folder / NAME).exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "rest.cpp").write_text(rest)
        command = ["g++", "-O1", "-Wall", "-shared", "-fPIC", "-std=c++17", f"-I{NATIVE}"]
        command += [f"-I{include}" for include in _headers(torch, triton)]
        made = folder / f"{NAME}.{os.getpid()}"
        command += [*map(str, sources), str(folder / "rest.cpp"), "-o", str(made), f"-Wl,-soname,{NAME}", "-ldl"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotPossibleError(f"g++ refuses the stand-in:\n{done.stderr}")
        made.rename(folder / NAME)
    return folder / NAME


def _headers(torch: Path, triton: Path) -> list[Path]:
    """Where CUDA's are: those of torch's own runtime first, since records of other versions have other sizes."""
    of_torch = sorted((torch.parent / "nvidia").glob("cu*/include/driver_types.h"), reverse=True)
    return [*(header.parent for header in of_torch[:1]), triton / "backends" / "nvidia" / "include"]


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)  # imports nothing
    if spec is None or not spec.submodule_search_locations:
        raise NotPossibleError(f"{name} is not installed")
    return Path(spec.submodule_search_locations[0])


def _wanted(torch: Path, triton: Path) -> set[str]:
    """What torch's libraries and Triton's launcher ask of CUDA."""
    found: set[str] = set()
    for path in (torch / "lib").glob("*.so"):
        command = ["nm", "-D", "--undefined-only", str(path)]
        found |= set(_CUDA.findall(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    named = re.findall(rb"\0(cu[A-Z]\w+)(?=\0)", (torch / "lib" / "libc10_cuda.so").read_bytes())  # looked up later
    launcher = (triton / "backends" / "nvidia" / "driver.c").read_text()
    return found | {name.decode() for name in named} | set(re.findall(r"\bcu[A-Z]\w+(?=\()", launcher)) | _NOTHING_TO_DO


def _entry_points(names: list[str]) -> str:
    """Functions that the sources do not have: products of cuBLAS are launches, any other is an error when called."""
    lines = ['#include "device.h"', "namespace standin {", "int blas(void* handle, const char* name);", "}"]
    for name in names:
        if name in _NOTHING_TO_DO:
            lines.append(f"EXPORT int {name}() {{ return 0; }}")
        elif _PRODUCTS.match(name):
            lines.append(f'EXPORT int {name}(void* handle) {{ return standin::blas(handle, "{name}"); }}')
        else:
            lines.append(f'EXPORT int {name}() {{ return standin::unknown("{name}"); }}')
    return "\n".join(lines) + "\n"
