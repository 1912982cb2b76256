"""The settings of a run, and reading them from mappings, objects, files and a Lightning Trainer's arguments."""

from __future__ import annotations

from .fit import FitConfig as FitConfig
from .lightning import Plan as Plan
from .lightning import from_lightning as from_lightning
from .source import count_batches as count_batches
from .source import load as load
from .source import read as read
from .source import resolve as resolve
