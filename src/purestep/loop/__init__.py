"""The outer loop: `fit`, `run_epoch`, `evaluate`, `predict`; what goes with it before, during and after a run."""

from __future__ import annotations

from .batch_statistics import refresh_batchnorm as refresh_batchnorm
from .evaluate import evaluate as evaluate
from .evaluate import run_epoch as run_epoch
from .fit import fit as fit
from .loop_state import FitResult as FitResult
from .plateau import reduce_on_plateau as reduce_on_plateau
from .predict import predict as predict
from .rate_finder import find_learning_rate as find_learning_rate
