"""Diagnostics of a step.

purity     call a step twice, and compare its arguments and results
nonfinite  find the module, operation and line that first return nan or inf
replay     write the state and the batch of a step to a file, and read them
recording  the last batches of a run, in one file
"""

from __future__ import annotations

from .nonfinite import Watch as Watch
from .nonfinite import backward as backward
from .nonfinite import differentiates as differentiates
from .nonfinite import not_finite as not_finite
from .recording import Recording as Recording
