"""The outer loop: `fit`, `run_epoch`, `evaluate`, `predict` and `find_learning_rate`."""

from __future__ import annotations

from .evaluate import evaluate as evaluate
from .evaluate import run_epoch as run_epoch
from .fit import fit as fit
from .loop_state import FitResult as FitResult
from .predict import predict as predict
from .rate_finder import find_learning_rate as find_learning_rate
