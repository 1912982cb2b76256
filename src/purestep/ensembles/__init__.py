"""Many models in one step.

ensemble      `ps.ensemble`: the program of several members
member_draws  random numbers of a mapped step, so that each member draws as it does alone
"""

from .ensemble import ensemble as ensemble
from .ensemble import mean_and_std as mean_and_std
