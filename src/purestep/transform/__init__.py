"""Gradient transformations: pairs of pure functions, how they compose, and the parts that optimizers are chains of.

The algebra is optax's (Babuschkin et al., 2020), the formulas are torch's.
"""

from __future__ import annotations

from .arithmetic import Rate as Rate
from .arithmetic import Scalar as Scalar
from .arithmetic import Schedule as Schedule
from .arithmetic import is_on as is_on
from .arithmetic import on_count as on_count
from .arithmetic import rate_at as rate_at
from .arithmetic import zero_count as zero_count
from .base import Transform as Transform
from .base import apply_updates as apply_updates
from .base import chain as chain
from .base import global_norm as global_norm
from .base import identity as identity
from .base import require as require
from .base import require_rate as require_rate
from .base import require_typed as require_typed
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
from .inject import injected as injected
from .inject import set_hyperparams as set_hyperparams
from .matrices import NEWTON_SCHULZ as NEWTON_SCHULZ
from .matrices import Adjust as Adjust
from .matrices import ScaleByFactoredRmsState as ScaleByFactoredRmsState
from .matrices import ScaleByMuonState as ScaleByMuonState
from .matrices import clip_by_block_rms as clip_by_block_rms
from .matrices import scale_by_factored_rms as scale_by_factored_rms
from .matrices import scale_by_muon as scale_by_muon
from .matrices import scale_by_param_block_rms as scale_by_param_block_rms
from .matrices import scale_by_relative_step as scale_by_relative_step
from .matrices import scale_by_shape as scale_by_shape
from .matrices import scale_by_trust_ratio as scale_by_trust_ratio
from .missed import Reached as Reached
from .missed import skip as skip
from .moments import MomentsState as MomentsState
from .moments import ScaleByAdamState as ScaleByAdamState
from .moments import ScaleByLionState as ScaleByLionState
from .moments import ScaleByNadamState as ScaleByNadamState
from .moments import scale_by_adam as scale_by_adam
from .moments import scale_by_adamax as scale_by_adamax
from .moments import scale_by_lion as scale_by_lion
from .moments import scale_by_nadam as scale_by_nadam
from .moments import scale_by_radam as scale_by_radam
from .scale import ScaleByLearningRateState as ScaleByLearningRateState
from .scale import TraceState as TraceState
from .scale import add_decayed_weights as add_decayed_weights
from .scale import decay_parts as decay_parts
from .scale import reported as reported
from .scale import scale as scale
from .scale import scale_by_learning_rate as scale_by_learning_rate
from .scale import trace as trace
from .squares import ScaleByAdadeltaState as ScaleByAdadeltaState
from .squares import ScaleByRmsState as ScaleByRmsState
from .squares import ScaleByRssState as ScaleByRssState
from .squares import StepState as StepState
from .squares import scale_by_adadelta as scale_by_adadelta
from .squares import scale_by_inverse_time as scale_by_inverse_time
from .squares import scale_by_rms as scale_by_rms
from .squares import scale_by_rss as scale_by_rss
