"""Compiled steps: one graph from the forward pass to the EMA, with donation.

    api               `compile_step` and `compile_program`
    as_settings       compiled, donated or eager, as the settings of a run say; eager where a compiler fails
    compiled_step     a call: the graph for these inputs, with the state's buffers
    eval_step         the same for an eval_step
    graphs            the graphs of one step; chooses one by structure, shapes and torch's settings
    guards            the comparison of inputs with those of a graph
    contract          checks of what a step returns
    outside           tensors that a step reads besides its arguments, as inputs of its graph; those that it writes
    captured_values   values that a step reads besides its arguments, as parts of the key of a graph
    capture           from Python to a graph, a trace on fake tensors, and from it to code
    backends          plug-ins for devices (`cpu`, `cuda`), and the settings of inductor's public entry
    lower             inductor's lowering of a graph, for the plug-ins
    cuda              a graph for one GPU
    code_directory    the directory of compiled code, and whose it is
    buffers           the buffers of a state, which a step writes in place
    live_state        a state in such buffers, whose reads raise after its donation
    eager_donation    the same for eager steps
    cuda_graph        a donated step as one CUDA graph

Changes to a graph:

    fx_passes         rewrites, and questions about a graph
    inductor_fixes    work-arounds for faults of inductor
    draw_code         calls of torch's random fills, which inductor never removes
    control_flow      `torch.cond` and its kind
    recurrent_layers  LSTMs and their kind on a GPU: short sequences only
    sizes             sizes that vary between batches
    outputs           scalars returned as one vector
"""

from __future__ import annotations

from .api import compile_program as compile_program
from .api import compile_step as compile_step
from .as_settings import batch_sizes as batch_sizes
from .as_settings import eager_program as eager_program
from .as_settings import is_compiled as is_compiled
from .as_settings import prepared as prepared
from .as_settings import set_batch_sizes as set_batch_sizes
from .capture import Uncaptured as Uncaptured
from .compiled_step import CompiledStep as CompiledStep
from .eager_donation import donate as donate
from .eager_donation import released as released
from .eager_donation import without_donation as without_donation
from .eval_step import takes_index as takes_index
from .fx_passes import ONE_DTYPE as ONE_DTYPE
from .live_state import LiveState as LiveState
from .live_state import is_alive as is_alive
from .live_state import is_state as is_state
from .live_state import plain as plain
from .live_state import states as states
from .outputs import MetricVector as MetricVector
from .outputs import as_dict as as_dict
from .outside import Writes as Writes
