"""Compiled steps on an x86 CPU: a plug-in that hands a traced graph to inductor and changes the C++ it writes.

`compile/backends.py` loads it by its name. It leans on private names of torch 2.13 and 2.14; with another torch, or
with the environment variable ``PURESTEP_CPU=0``, a graph goes through `torch._inductor.standalone_compile` instead,
which is slower and gives the same numbers but for rounding. ``PURESTEP_CPU=-gemm,-outline`` switches parts off, of

    gemm             matrix products in C++ of our own, for float32 on AVX2 and AVX-512 (`cpp_kernel`: how inductor
                     calls it)
    attention        attention over at most 256 positions, as products
    embedding_grad   gradients of embeddings, in one order whatever the number of threads
    workspace        one piece of memory a thread for all intermediates, and inputs by address (`cpp_wrapper`,
                     `launcher`)
    outline          equal layers of a graph as calls of one function; with ``workspace`` alone
    offset_pointers  weights of equal layers by pointers: one kernel for all of them; with ``workspace`` alone
    code_cache       code of earlier runs, found by the text of a step's operations (`graph_key`)

``python benchmarks/run.py --only ablation`` measures each. `backend` puts them together; ``csrc`` has the C++.
"""

from __future__ import annotations
