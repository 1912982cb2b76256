"""Several processes: meshes, placements of a state, and the collectives of a step.

mesh         processes and their groups, from torchrun's environment
placement    which leaves of a state are cut, where, and how the whole is put together
collectives  operators that graphs may contain, and their gradients
distribute   the steps of a program with these collectives
units        blocks that gather their own parameters, in the forward and in the backward pass
batchnorm    batch normalization by the statistics of all rows
tensorwise   tensor parallel by torch's styles
running_pass the forward and backward pass that runs, for layers that communicate
loaders      how the batches of a loader without indices are divided
agreement    numbers that all hosts exchange once a call, and checks that processes are the same
host         one process decides, or the error of one is raised by all
peers        processes that are gone
"""

from __future__ import annotations

from ..types import Share as Share
from .distribute import distribute as distribute
from .distribute import share as share
from .loaders import Sharded as Sharded
from .loaders import sharded as sharded
from .mesh import Mesh as Mesh
from .mesh import start as start
from .placement import full as full
