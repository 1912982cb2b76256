r"""Schedules: pure functions without state from the count of updates to a 0-d tensor.

The count :math:`t` is the number of updates applied so far, 0 at the first update; a skipped update does not advance a
schedule. Past its end a schedule keeps its last value. The result is float64 (float32 on mps, which has no float64),
and a 0-d tensor does not promote the tensors that it multiplies. Argument names are those of optax or, for schedules
that optax does not have, of `torch.optim.lr_scheduler`.

A schedule reads no value back to the host, so one graph contains the whole warm-up and decay.

decay         along a curve: linear, polynomial, cosine, exponential, warm-up and decay
steps         constant or interpolated values between given counts
combine       a sequence of schedules, schedules by epoch, torch's schedulers
interpolate   between two values
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
from .decay import warm_restarts as warm_restarts
from .decay import warmup_cosine as warmup_cosine
from .decay import warmup_stable_decay as warmup_stable_decay
from .interpolate import Count as Count
from .interpolate import Schedule as Schedule
from .steps import multistep as multistep
from .steps import one_cycle as one_cycle
from .steps import piecewise as piecewise
from .steps import step as step
