"""Readers for the settings of other libraries. ``lightning.py`` reads the arguments of Lightning's Trainer."""

from __future__ import annotations

from .lightning import Plan as Plan
from .lightning import from_lightning as from_lightning
