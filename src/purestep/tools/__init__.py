"""Tools for a run.

bench          `ps.benchmark`, `ps.find_batch_size`
export         `ps.export_weights`, `ps.load_into`, `ps.save_pretrained`: weights for other programs
model_summary  `ps.summary`: parameters by module, and FLOPs
"""

from .bench import benchmark as benchmark
from .bench import find_batch_size as find_batch_size
from .export import export_weights as export_weights
from .export import load_into as load_into
from .export import save_pretrained as save_pretrained
from .model_summary import summary as summary
