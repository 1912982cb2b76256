"""Settings of a run, read from mappings, objects, files and the arguments of a Lightning Trainer.

settings   `FitConfig`
fields     the types of its fields
sources    where settings come from
messages   the error messages
command_line   a script's own dataclass, filled from a file and options
"""

from __future__ import annotations

import importlib as _importlib
import typing as _typing

from .command_line import cli as cli
from .settings import FitConfig as FitConfig
from .sources import count_batches as count_batches
from .sources import load as load
from .sources import read as read
from .sources import resolve as resolve

if _typing.TYPE_CHECKING:
    from ..contrib import Plan as Plan
    from ..contrib import from_lightning as from_lightning
else:
    _CONTRIB = ("Plan", "from_lightning")

    def __getattr__(name):
        """Import the names of `contrib`, which imports this package, at their first use."""
        if name not in _CONTRIB:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals().setdefault(name, getattr(_importlib.import_module("..contrib", __name__), name))
