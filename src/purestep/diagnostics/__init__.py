"""Checks of a step: whether it is pure, where a number that is not finite comes from, and a call written to a file.

purity     a call made twice and compared: the batch, the state and the metrics
nonfinite  the module, operation and line that first return nan or inf
replay     a call that failed as a file, and that file called again
"""

from __future__ import annotations

from .nonfinite import Watch as Watch
from .nonfinite import backward as backward
from .nonfinite import differentiates as differentiates
from .nonfinite import not_finite as not_finite
