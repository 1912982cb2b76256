"""Optimizers by name, each one `chain` of documented parts, and the algebra they are written in.

The names and the algebra are optax's, the formulas and defaults those of torch.optim. A parameter that no loss of an
update leads to (an unused layer, the other task's head) is skipped, as torch skips one whose ``grad`` is None: neither
decay nor momentum moves it, and its own count of updates, by which Adam corrects its means, stands still. Two things go
on: the schedule of the learning rate, and Nadam's product of momentum coefficients. A transform of one's own that
counts updates counts them for all parameters.

Of each of them ``init`` raises a ConfigError where a ``mask`` does not fit the parameters (`masked`), and ``update`` a
StateError where the state is that of another chain, or with a mask that of other parameters. Without one, parameters
that the state has nothing of are a KeyError with their name.
"""

from __future__ import annotations

from ..transform import Transform as Transform
from ..transform import adaptive_grad_clip as adaptive_grad_clip
from ..transform import add_decayed_weights as add_decayed_weights
from ..transform import apply_updates as apply_updates
from ..transform import chain as chain
from ..transform import clip_by_block_rms as clip_by_block_rms
from ..transform import clip_by_global_norm as clip_by_global_norm
from ..transform import clip_by_value as clip_by_value
from ..transform import decay_mask as decay_mask
from ..transform import freeze as freeze
from ..transform import global_norm as global_norm
from ..transform import hyperparams as hyperparams
from ..transform import identity as identity
from ..transform import inject as inject
from ..transform import masked as masked
from ..transform import partition as partition
from ..transform import scale as scale
from ..transform import scale_by_adadelta as scale_by_adadelta
from ..transform import scale_by_adam as scale_by_adam
from ..transform import scale_by_adamax as scale_by_adamax
from ..transform import scale_by_factored_rms as scale_by_factored_rms
from ..transform import scale_by_inverse_time as scale_by_inverse_time
from ..transform import scale_by_learning_rate as scale_by_learning_rate
from ..transform import scale_by_lion as scale_by_lion
from ..transform import scale_by_muon as scale_by_muon
from ..transform import scale_by_nadam as scale_by_nadam
from ..transform import scale_by_param_block_rms as scale_by_param_block_rms
from ..transform import scale_by_radam as scale_by_radam
from ..transform import scale_by_relative_step as scale_by_relative_step
from ..transform import scale_by_rms as scale_by_rms
from ..transform import scale_by_rss as scale_by_rss
from ..transform import scale_by_shape as scale_by_shape
from ..transform import scale_by_trust_ratio as scale_by_trust_ratio
from ..transform import set_hyperparams as set_hyperparams
from ..transform import set_to_zero as set_to_zero
from ..transform import stateless as stateless
from ..transform import trace as trace
from .adam import adam as adam
from .adam import adamax as adamax
from .adam import adamw as adamw
from .adam import nadam as nadam
from .adam import radam as radam
from .from_torch import from_torch as from_torch
from .matrices import adafactor as adafactor
from .matrices import lamb as lamb
from .matrices import muon as muon
from .matrices import muon_labels as muon_labels
from .plain import lion as lion
from .plain import sgd as sgd
from .squares import adadelta as adadelta
from .squares import adagrad as adagrad
from .squares import rmsprop as rmsprop
