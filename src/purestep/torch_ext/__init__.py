"""Functions that torch hides or lacks.

global_rng       torch's global generators: seed them in a block, restore them after it
host_generators  the generators of numpy and of Python
hidden           modules, tensors and services of torch: facts without a public name
tensor_layout    the memory of a tensor: its extent, overlaps, formats
draws            random numbers of a graph and of the members of an ensemble, as in eager mode
tracing          is this call captured, mapped or differentiated, and may the host read this value
foreach          one call for many tensors, under plain names
complex_numbers  complex tensors as pairs of real ones
"""

from .tracing import Value as Value
from .tracing import is_finite as is_finite
from .tracing import read as read
