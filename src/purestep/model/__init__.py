"""A module as a pure function of its tensors.

functional   the call: parameters and buffers in, outputs and new buffers out
template     the module without its weights, which a program keeps
dropout      dropout that draws the same numbers under `torch.func` as without
write_check  forward passes must not write weights, nor buffers that no state keeps
"""

from __future__ import annotations

from .functional import OBJECTIVE as OBJECTIVE
from .functional import Template as Template
from .template import uncompiled as uncompiled
