"""A module as a pure function of its tensors.

functional   the pure call: parameters and buffers in, outputs and new buffers out
template     the weightless copy of a module that a program holds, and checks of the module
dropout_masks  dropout with the same masks under `torch.func` as in eager mode
write_check  checks that a forward pass writes no weights, and only buffers that a state holds
"""

from __future__ import annotations

from .dropout_masks import EagerMasks as EagerMasks
from .functional import OBJECTIVE as OBJECTIVE
from .functional import Template as Template
from .template import copy_with as copy_with
from .template import unwrapped as unwrapped
from .template import wrappers as wrappers
