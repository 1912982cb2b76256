"""The outer loop: `fit` and the pieces it is made of."""

from __future__ import annotations

from .fit import fit as fit
from .pieces import evaluate as evaluate
from .pieces import run_epoch as run_epoch
from .record import FitResult as FitResult
