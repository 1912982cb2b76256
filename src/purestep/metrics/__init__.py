"""Metrics that merge: sums and what to divide them by, added over batches and resumes, divided once at the end.

A metric is ``f(outputs, targets) -> Mean``, computed on the device; nothing here waits for it but `compute` and
`to_json`. Options are keyword arguments, to be bound with `functools.partial`::

    ps.supervised(criterion, metrics={"accuracy": metrics.accuracy, "top5": partial(metrics.accuracy, k=5)})

Precision, recall and F1 are ratios of counts, so they too are Means; averaging them over batches would be wrong. A mean
over classes is a `Mean` of vectors: ``compute()`` gives the classes, ``float`` the mean over those that were counted.
"""

from __future__ import annotations

from ..types import Metric as Metric
from .classification import Average as Average
from .classification import CountOptions as CountOptions
from .classification import Counts as Counts
from .classification import accuracy as accuracy
from .classification import counts as counts
from .classification import f1 as f1
from .classification import precision as precision
from .classification import recall as recall
from .mean import as_mean as as_mean
from .mean import compute as compute
from .mean import empty as empty
from .mean import from_json as from_json
from .mean import merge as merge
from .mean import to_json as to_json
from .regression import mean_absolute_error as mean_absolute_error
from .regression import mean_squared_error as mean_squared_error
from .torchmetrics import from_torchmetrics as from_torchmetrics
