"""Settings of a run, read from mappings, objects, files and the arguments of a Lightning Trainer.

settings   `FitConfig`
fields     the types of its fields
sources    where settings come from
messages   the error messages
lightning      the arguments of a Lightning Trainer
command_line   a script's own dataclass, filled from a file and options
"""

from __future__ import annotations

from .command_line import cli as cli
from .lightning import Plan as Plan
from .lightning import from_lightning as from_lightning
from .settings import FitConfig as FitConfig
from .sources import read as read
