"""The outer loop: `fit`, `run_epoch` and `evaluate`."""

from __future__ import annotations

from .evaluate import evaluate as evaluate
from .evaluate import run_epoch as run_epoch
from .fit import fit as fit
from .loop_state import FitResult as FitResult
