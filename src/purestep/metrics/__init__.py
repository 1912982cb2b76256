"""Mergeable metrics: totals and weights are added over batches and resumes, and divided once at the end.

A metric is ``f(outputs, targets) -> Mean``, computed on the device; only `compute` waits for the device.
Options are keyword arguments; bind them with `functools.partial`::

    ps.supervised(criterion, metrics={"accuracy": metrics.accuracy, "top5": partial(metrics.accuracy, k=5)})

Precision, recall and F1 are ratios of counts, so they are Means too; averaging their values over batches would be
wrong. A metric by class is a `Mean` of vectors: ``compute()`` returns one value per class, ``float`` the mean over the
classes with a weight > 0.

An object of torchmetrics, or a collection of them, is a metric as it is: ``metrics={"auroc": MulticlassAUROC(10)}``.

mean             empty, merge, compute
classification   accuracy, precision, recall, F1
regression       absolute and squared errors
gathered         metrics that need all outputs of an evaluation
handed_out       values that a step hands out besides its metrics
torchmetrics     objects of torchmetrics as pure functions
"""

from __future__ import annotations

from ..types import Metric as Metric
from .classification import Counts as Counts
from .classification import accuracy as accuracy
from .classification import counts as counts
from .classification import f1 as f1
from .classification import precision as precision
from .classification import recall as recall
from .gathered import Gathered as Gathered
from .handed_out import outputs as outputs
from .mean import as_mean as as_mean
from .mean import compute as compute
from .mean import empty as empty
from .mean import merge as merge
from .regression import mean_absolute_error as mean_absolute_error
from .regression import mean_squared_error as mean_squared_error
from .torchmetrics import from_torchmetrics as from_torchmetrics
