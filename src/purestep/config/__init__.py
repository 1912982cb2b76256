"""The settings of a run, and how they are read from mappings, objects, files and a Lightning Trainer's arguments."""

from __future__ import annotations

import importlib as _importlib
import typing as _typing

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
        """`contrib` builds on this package, so its names are loaded when they are first read."""
        if name not in _CONTRIB:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals().setdefault(name, getattr(_importlib.import_module("..contrib", __name__), name))
