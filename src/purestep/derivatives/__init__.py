"""Derivatives of a program's objective other than the gradient of a batch.

examples     gradients of single examples, mapped by `torch.func.vmap` in chunks
plain_attention  attention that can be mapped and differentiated twice
per_example  `per_example`: these gradients, or their norms
privacy      `ps.privacy`: DP-SGD, and the epsilon that a run has spent
noise_scale  `gradient_noise_scale`: the noise of gradients between batches
curvature    `ps.curvature`: products with the Hessian and the Gauss-Newton matrix, eigenvalues, trace
"""

from . import curvature as curvature
from . import privacy as privacy
from .noise_scale import NoiseScale as NoiseScale
from .noise_scale import gradient_noise_scale as gradient_noise_scale
from .per_example import PerExample as PerExample
from .per_example import per_example as per_example
