"""Compiled steps on an x86 CPU: a plug-in that hands a traced graph to inductor and changes the C++ it writes.

backend          from a traced graph to native code
graph_key        the operations of a step as text, which names its code
code_cache       code of earlier runs, by that name
workspace        one piece of memory a thread for all intermediates
cpp_wrapper      inductor's C++ round the kernels, with that memory and with addresses for inputs
launcher         the call from Python
outline          equal layers of a graph as calls of one function
offset_pointers  weights of equal layers, of one packed vector, by pointers: one kernel for all of them
cpp_kernel       C++ functions of our own in inductor's code, for float32 on AVX2 and AVX-512:
gemm             matrix products
attention        attention over at most 256 positions, as products
embedding_grad   gradients of embeddings, in one order whatever the number of threads
"""

from __future__ import annotations
