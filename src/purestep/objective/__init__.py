"""Objectives: functions of model and batch that return a loss, its weight, and metrics.

supervised           a criterion of outputs and targets
huggingface          the losses that Hugging Face models compute
masked_autoencoder   reconstruction of masked elements
measure              the result of a metric as a `Mean`
"""

from __future__ import annotations

from ..types import Metric as Metric
from .huggingface import hf_loss as hf_loss
from .masked_autoencoder import masked_mse as masked_mse
from .masked_autoencoder import masked_reconstruction as masked_reconstruction
from .masked_autoencoder import masked_sse as masked_sse
from .supervised import call_model as call_model
from .supervised import split_batch as split_batch
from .supervised import supervised as supervised
