"""Several processes: meshes, placements of a state, and the collectives of a step."""

from __future__ import annotations

from .distribute import distribute as distribute
from .distribute import share as share
from .loaders import Sharded as Sharded
from .loaders import sharded as sharded
from .mesh import Mesh as Mesh
from .mesh import start as start
from .placement import full as full
