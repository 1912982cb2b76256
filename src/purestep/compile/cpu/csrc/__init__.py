"""C++ that becomes part of the code of a compiled step.

entries.cpp         functions of a library: for inductor, by handles, and for `launcher.py`, by addresses
gemm.cpp            matrix products
embedding_grad.cpp  sums of rows by index
piece.h             a part of a packed vector
workspace.h         memory of a thread, and tensors in it
"""

from __future__ import annotations

from importlib import resources


def text(name: str) -> str:
    """The source file of that name, whose words in capitals (``INPUTS``, ``SIZE``) are replaced where it is used."""
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")
