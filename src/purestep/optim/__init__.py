"""Optimizers by name, and the gradient transformations that they are composed of.

Names and composition follow optax (Babuschkin et al., 2020); formulas and defaults follow torch.optim. Each file holds
one algorithm, in the order State, ``scale_by_x``, ``x``; the optimizer ``x`` is a `chain` of documented parts.

A parameter that the loss does not depend on (an unused layer, the head of another task) is skipped, as torch skips a
parameter whose ``grad`` is None: weight decay and momentum do not move it, and its update count for bias correction
does not advance. The learning rate schedule and Nadam's product of momentum coefficients advance for all parameters.
A user's own transform that counts updates counts them for all parameters.

A factory raises a ConfigError if a number is out of the range in the argument's type (`arguments`). A 0-d tensor is
not checked, since reading it waits for the device.

``init`` of each transform raises a ConfigError if a ``mask`` does not fit the parameters (see `masked`). ``update``
raises a StateError if the state belongs to another chain or, with a mask, to other parameters. Without a mask, a
parameter missing from the state raises a KeyError with its name.

base              `Transform`, `chain`, the global norm
arguments         types of arguments, with their ranges
numerics          arithmetic that keeps dtypes
counts            the updates of each parameter, bias corrections
scale             the learning rate, weight decay
clip              gradient clipping
wrappers          masks, parameter groups, freezing
hyperparameters   hyperparameters as leaves of the state
unused_parameters parameters without a gradient
complex_params    complex parameters
fused             torch's fused kernels, for eager steps
from_torch        any optimizer of torch as a transform
sgd  adam  nadam  radam  adamax  lamb  lbfgs  lion  rmsprop  adagrad  adadelta
adafactor  muon  soap  ademamix  prodigy  schedule_free  lookahead
                  an algorithm each
"""

from __future__ import annotations

from .adadelta import adadelta as adadelta
from .adadelta import scale_by_adadelta as scale_by_adadelta
from .adafactor import adafactor as adafactor
from .adafactor import clip_by_block_rms as clip_by_block_rms
from .adafactor import scale_by_factored_rms as scale_by_factored_rms
from .adafactor import scale_by_param_block_rms as scale_by_param_block_rms
from .adafactor import scale_by_relative_step as scale_by_relative_step
from .adagrad import adagrad as adagrad
from .adagrad import scale_by_inverse_time as scale_by_inverse_time
from .adagrad import scale_by_rss as scale_by_rss
from .adam import adam as adam
from .adam import adamw as adamw
from .adam import scale_by_adam as scale_by_adam
from .adamax import adamax as adamax
from .adamax import scale_by_adamax as scale_by_adamax
from .ademamix import ademamix as ademamix
from .ademamix import scale_by_ademamix as scale_by_ademamix
from .base import Transform as Transform
from .base import apply_updates as apply_updates
from .base import chain as chain
from .base import global_norm as global_norm
from .base import identity as identity
from .base import stateless as stateless
from .clip import adaptive_grad_clip as adaptive_grad_clip
from .clip import clip_by_global_norm as clip_by_global_norm
from .clip import clip_by_value as clip_by_value
from .from_torch import from_torch as from_torch
from .hyperparameters import hyperparams as hyperparams
from .hyperparameters import inject as inject
from .hyperparameters import set_hyperparams as set_hyperparams
from .lamb import lamb as lamb
from .lamb import scale_by_trust_ratio as scale_by_trust_ratio
from .lbfgs import lbfgs as lbfgs
from .lion import lion as lion
from .lion import scale_by_lion as scale_by_lion
from .lookahead import lookahead as lookahead
from .muon import muon as muon
from .muon import muon_labels as muon_labels
from .muon import scale_by_muon as scale_by_muon
from .muon import scale_by_shape as scale_by_shape
from .nadam import nadam as nadam
from .nadam import scale_by_nadam as scale_by_nadam
from .prodigy import prodigy as prodigy
from .radam import radam as radam
from .radam import scale_by_radam as scale_by_radam
from .rmsprop import rmsprop as rmsprop
from .rmsprop import scale_by_rms as scale_by_rms
from .scale import add_decayed_weights as add_decayed_weights
from .scale import scale as scale
from .scale import scale_by_learning_rate as scale_by_learning_rate
from .schedule_free import schedule_free as schedule_free
from .schedule_free import schedule_free_adamw as schedule_free_adamw
from .schedule_free import schedule_free_sgd as schedule_free_sgd
from .schedule_free import schedule_free_view as schedule_free_view
from .sgd import sgd as sgd
from .sgd import trace as trace
from .soap import scale_by_soap as scale_by_soap
from .soap import soap as soap
from .wrappers import decay_mask as decay_mask
from .wrappers import freeze as freeze
from .wrappers import masked as masked
from .wrappers import partition as partition
from .wrappers import set_to_zero as set_to_zero
