"""Who takes part."""

from __future__ import annotations

import importlib.util

import torch

from ..works import Work
from . import byhand, jaxes, ours, trainers
from .base import Contestant as Contestant
from .base import Entry as Entry
from .base import Gate as Gate
from .base import Gated as Gated
from .base import Stepping as Stepping

REFERENCE = byhand.EAGER  # whose losses and weights the others must have

ENTRIES: dict[str, Entry] = {
    entry.name: entry for entry in (*byhand.ENTRIES, *ours.ENTRIES, *trainers.ENTRIES, *jaxes.ENTRIES)
}


def lacking(entry: Entry) -> list[str]:
    """The packages it needs that are not installed."""
    return [name for name in entry.needs if importlib.util.find_spec(name) is None]


def entries_for(work: Work, device: torch.device, only: list[str] | None = None) -> list[Entry]:
    """Everybody who is written for that work, the reference first."""
    chosen = [ENTRIES[name] for name in only] if only is not None else list(ENTRIES.values())
    found = [entry for entry in chosen if entry.name != REFERENCE and entry.fits(work, device)]
    return [ENTRIES[REFERENCE], *found]
