"""Compiled steps on an x86 CPU: a plug-in that passes a traced graph to inductor and modifies its C++.

`compile/backends.py` loads it by name. It uses private names of torch 2.13 and 2.14. With another torch, or with the
environment variable ``PURESTEP_CPU=0``, `torch._inductor.standalone_compile` compiles a graph instead, to slower code
with the same results but for rounding. ``PURESTEP_CPU=-gemm,-outline`` switches off single parts:

    gemm             float32 matrix products by a C++ kernel for AVX2 and AVX-512 (`cpp_kernel` lets inductor call it)
    attention        attention over at most 256 positions, as matrix products
    embedding_grad   gradients of embeddings, in one order whatever the number of threads
    workspace        one block of memory for each thread's intermediates, and inputs by address (`cpp_wrapper`,
                     `launcher`)
    outline          equal layers of a graph as calls of one function; needs ``workspace``
    offset_pointers  weights of equal layers by pointers, so that they share a kernel; needs ``workspace``
    code_cache       code of earlier runs, keyed by the text of a step's operations (`graph_key`)

``python benchmarks/run.py --only ablation`` measures each. `backend` combines them; ``csrc`` has the C++.
"""

from __future__ import annotations
