"""Many models in one step.

ensemble      `ps.ensemble`: the program of several members
"""

from .ensemble import ensemble as ensemble
from .ensemble import mean_and_std as mean_and_std
