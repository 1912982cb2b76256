"""C++ sources that become part of the code of a compiled step.

entries.cpp         entry points of a library: with handles for inductor, with addresses for `launcher`
gemm.cpp            matrix products
embedding_grad.cpp  sums of rows by index
piece.h             a part of a packed vector
workspace.h         the workspace of a thread, and tensors in it
"""

from __future__ import annotations

from importlib import resources


def text(name: str) -> str:
    """Read a source file; users replace its words in capitals (``INPUTS``, ``OUTPUTS``)."""
    return resources.files(__name__).joinpath(name).read_text(encoding="utf-8")
