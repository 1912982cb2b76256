r"""Schedules: pure functions from the count of updates to a 0-d tensor, with no state of their own.

The count :math:`t` is that of the updates applied so far, so 0 at the first update: an update that was skipped does not
move a schedule. Every schedule stays at its last value past its end. The result is float64 (float32 on mps, which has
no float64): as a 0-d tensor it takes on the dtype of what it multiplies. Argument names are those of optax or, where
optax has no such schedule, of `torch.optim.lr_scheduler`.

The functions trace: no value is read back to the host, so a whole warm-up and decay is one graph.
"""

from __future__ import annotations

from .combine import AnySchedule as AnySchedule
from .combine import from_torch_scheduler as from_torch_scheduler
from .combine import join as join
from .combine import per_epoch as per_epoch
from .decay import constant as constant
from .decay import cosine as cosine
from .decay import exponential as exponential
from .decay import linear as linear
from .decay import polynomial as polynomial
from .decay import warmup_cosine as warmup_cosine
from .decay import warmup_stable_decay as warmup_stable_decay
from .interpolate import Count as Count
from .interpolate import Schedule as Schedule
from .steps import multistep as multistep
from .steps import one_cycle as one_cycle
from .steps import piecewise as piecewise
from .steps import step as step
