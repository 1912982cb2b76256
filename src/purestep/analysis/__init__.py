"""Gradients of a program's objective other than that of a batch. `purestep.curvature` has second derivatives,
`purestep.privacy` DP-SGD.

examples         gradients of single examples, mapped by `torch.func.vmap` in chunks
per_example      `per_example`: these gradients, or their norms
noise_scale      `gradient_noise_scale`: the noise of gradients between batches
plain_functions  attention and `one_hot` in operations that can be mapped and differentiated twice
"""

from .examples import Chunk as Chunk
from .examples import chunks as chunks
from .examples import explained as explained
from .examples import refused as refused
from .noise_scale import NoiseScale as NoiseScale
from .noise_scale import gradient_noise_scale as gradient_noise_scale
from .per_example import PerExample as PerExample
from .per_example import per_example as per_example
