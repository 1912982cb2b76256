"""Compiled steps: one graph from the forward pass to the EMA, with donation."""

from __future__ import annotations

from .capture import DataDependent as DataDependent
from .capture import stopped as stopped
from .entry import compile_program as compile_program
from .entry import compile_step as compile_step
from .evaluation import CompiledEval as CompiledEval
from .live import LiveState as LiveState
from .runner import CompiledStep as CompiledStep
