"""Compiled steps on an x86 CPU under Linux: a plug-in that makes AOTInductor's libraries of traced graphs.

`compile/backends.py` loads it by name. It uses private names of torch 2.13. With another torch, or with the environment
variable ``PURESTEP_CPU=0``, `torch._inductor.standalone_compile` compiles a graph instead, to slower code with the same
results but for rounding; so it does graphs for many sizes, with `torch.cond` and its kind, and with fake quantization.
``PURESTEP_CPU=-fast`` switches off our C++ alone.

    backend      a graph's library, from the cache or new, and its calls
    graph_key    a graph as text, the key of its library
    code_cache   libraries of earlier runs
    aot          a lowered graph to a library
    cpp_library  our C++ beside inductor's: a model's class, products, the memory of intermediates
    attention    short attention as products

``csrc`` has the C++: ``model.h`` and ``fast.h`` in each library, ``gemm.cpp`` and ``memory.cpp`` in one that all
call.
"""

from __future__ import annotations
