"""Gradient transformations: pairs of pure functions, how they compose, and the parts that optimizers are chains of.

The algebra is optax's (Babuschkin et al., 2020), the formulas are torch's.
"""

from __future__ import annotations

from .base import Rate as Rate
from .base import Scalar as Scalar
from .base import Schedule as Schedule
from .base import Transform as Transform
from .base import apply_updates as apply_updates
from .base import chain as chain
from .base import global_norm as global_norm
from .base import identity as identity
from .base import stateless as stateless
from .clip import adaptive_grad_clip as adaptive_grad_clip
from .clip import clip_by_global_norm as clip_by_global_norm
from .clip import clip_by_value as clip_by_value
from .group import Mask as Mask
from .group import MaskedState as MaskedState
from .group import PartitionState as PartitionState
from .group import Rules as Rules
from .group import decay_mask as decay_mask
from .group import freeze as freeze
from .group import masked as masked
from .group import partition as partition
from .group import set_to_zero as set_to_zero
from .inject import InjectState as InjectState
from .inject import hyperparams as hyperparams
from .inject import inject as inject
from .inject import set_hyperparams as set_hyperparams
from .moments import ScaleByAdamState as ScaleByAdamState
from .moments import scale_by_adam as scale_by_adam
from .scale import ScaleByLearningRateState as ScaleByLearningRateState
from .scale import TraceState as TraceState
from .scale import add_decayed_weights as add_decayed_weights
from .scale import scale as scale
from .scale import scale_by_learning_rate as scale_by_learning_rate
from .scale import trace as trace
