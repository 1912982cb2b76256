"""Diagnostics of a step.

purity     call a step twice, and compare its arguments and results
nonfinite  repeat a step, and find the module, operation and line that first return nan or inf
replay     write the state and the batch of a step to a file, and read them
"""

from __future__ import annotations

from .nonfinite import Repeated as Repeated
from .nonfinite import bad_leaves as bad_leaves
from .nonfinite import not_finite as not_finite
from .nonfinite import repeated as repeated
