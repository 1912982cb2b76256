"""Compiled steps: one graph from the forward pass to the EMA, with donation.

A call goes from `entry` (what users call) to `runner`, which finds its graph in `graphs` and keeps the state of a
donated step in the buffers of `live` (`standing` finds them again); a step that leaves its state as it was writes a
copy of them, by `forks`. A graph that is not there yet is made by `capture`, by one thread at a time (`alone`): Python
is run on fake tensors, or Dynamo reads it; `skeleton` puts the state together in there, `passes` and `sources` are what
changes in the graph, and `contract` checks what the step returned. `draws` makes random numbers those of eager mode, in
every way to capture, `rounding` keeps casts there and back, `formats` lays tensors out for graphs that nothing
compiles, and `backends` is what Dynamo gives its graphs to. On CUDA `first_run` takes back what the first run of a
graph has written where that fails, `philox` keeps inductor off the random state of attention kernels, and `replay`
records the donated step. `evaluation` is the same for an eval_step.

On the CPU `native` hands the traced graph straight to inductor. What differs from `torch.compile` there:

    arena       one piece of memory a thread for all intermediates
    wrapper     inductor's C++ round the kernels, with that memory and with addresses for inputs
    calls       how Python calls it
    pieces      weights of equal layers, of one packed vector, by pointers of their own: one kernel for all of them
    blocks      equal layers of a graph as calls of one function
    elementary  tanh in fewer operations
    toolchain   g++ runs beside inductor's Python
    shortcuts   what inductor does for nothing while it writes C++, left out
    kept        libraries of earlier runs, found by what the function does; `carried` takes them to other machines
    recording   that as text, and `apart`: without loading the compiler
    kernels     C++ functions of our own in inductor's code, for float32 on x86 with AVX2 or AVX-512:
    products        matrix products
    attention       attention over at most 256 positions, as products
    rows            gradients of embeddings, in one order whatever the number of threads
"""

from __future__ import annotations

from . import alone as alone  # first: see its end
from .capture import Uncaptured as Uncaptured
from .capture import stopped as stopped
from .entry import compile_program as compile_program
from .entry import compile_step as compile_step
from .evaluation import CompiledEval as CompiledEval
from .live import LiveState as LiveState
from .passes import ONE_DTYPE as ONE_DTYPE
from .runner import CompiledStep as CompiledStep
from .standing import is_alive as is_alive
