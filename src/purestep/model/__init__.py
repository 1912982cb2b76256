"""A module as a pure function of its tensors.

functional   the pure call: parameters and buffers in, outputs and new buffers out
template     the weightless copy of a module that a program holds, and checks of the module
write_check  checks that a forward pass writes no weights, and only buffers that a state holds
"""

from __future__ import annotations

from .functional import OBJECTIVE as OBJECTIVE
from .functional import Inference as Inference
from .functional import Template as Template
from .template import check_real as check_real
from .template import check_uncut as check_uncut
from .template import unwrapped as unwrapped
from .template import wrappers as wrappers
