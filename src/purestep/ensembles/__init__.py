"""Many models in one step.

ensemble      `ps.ensemble`: the program of several members
"""

from .ensemble import ensemble as ensemble
