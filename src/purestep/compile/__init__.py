"""Compiled steps: one graph from the forward pass to the EMA, with donation."""

from __future__ import annotations

from .capture import DataDependent as DataDependent
from .capture import stopped as stopped
from .live import LiveState as LiveState
from .runner import CompiledEval as CompiledEval
from .runner import CompiledStep as CompiledStep
from .runner import compile_program as compile_program
from .runner import compile_step as compile_step
