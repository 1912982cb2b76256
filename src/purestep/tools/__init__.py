"""Tools for a run.

batch_statistics  `ps.refresh_batchnorm`: running statistics for averaged weights
bench             `ps.benchmark`, `ps.find_batch_size`
export            `ps.export_weights`, `ps.load_into`: weights for other programs
model_summary     `ps.summary`: parameters by module, and FLOPs
plateau           `ps.reduce_on_plateau`: a learning rate that falls when a metric stops improving
predict           `ps.predict`: the outputs of a model for a loader
rate_finder       `ps.find_learning_rate`
"""

from .batch_statistics import refresh_batchnorm as refresh_batchnorm
from .bench import benchmark as benchmark
from .bench import find_batch_size as find_batch_size
from .export import export_weights as export_weights
from .export import load_into as load_into
from .model_summary import summary as summary
from .plateau import reduce_on_plateau as reduce_on_plateau
from .predict import predict as predict
from .rate_finder import find_learning_rate as find_learning_rate
