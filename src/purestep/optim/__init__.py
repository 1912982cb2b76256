"""Optimizers by name, each one `chain` of documented parts, and the algebra they are written in.

The names and the algebra are optax's, the formulas and defaults those of torch.optim.
"""

from __future__ import annotations

from ..transform import Transform as Transform
from ..transform import adaptive_grad_clip as adaptive_grad_clip
from ..transform import add_decayed_weights as add_decayed_weights
from ..transform import apply_updates as apply_updates
from ..transform import chain as chain
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
from ..transform import scale_by_adam as scale_by_adam
from ..transform import scale_by_learning_rate as scale_by_learning_rate
from ..transform import set_hyperparams as set_hyperparams
from ..transform import set_to_zero as set_to_zero
from ..transform import stateless as stateless
from ..transform import trace as trace
from .adam import adam as adam
from .adam import adamw as adamw
from .plain import sgd as sgd
