"""Several processes: meshes, placements of a state, and the collectives of a step.

mesh         processes and their groups, from torchrun's environment
placement    which leaves of a state are cut, where, and how the whole is put together
collectives  operators that graphs may contain, and their gradients
distribute   the steps of a program with these collectives
units        blocks that gather their own parameters, in the forward and in the backward pass
joined_buffers    how buffers that a forward pass writes become one
passes       the pass that runs: rows that count, weight of the loss, order of the collectives
batchnorm    batch normalization by the statistics of all rows
gathering    `gather`: the rows of all processes, for losses that compare them
tensor_parallel   tensor parallel by torch's styles
loaders      how the batches of a loader without indices are divided
processes    what they tell each other on the host: numbers, values, errors, and checks that they are the same
"""

from __future__ import annotations

from ..types import Share as Share
from .distribute import distribute as distribute
from .distribute import share as share
from .gathering import gather as gather
from .loaders import sharded as sharded
from .mesh import Mesh as Mesh
from .mesh import start as start
from .placement import full as full
