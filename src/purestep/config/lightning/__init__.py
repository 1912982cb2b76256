"""A Lightning Trainer's arguments (2.6), read into what purestep's own builders take. Lightning is not needed for it.

Each argument is honoured, or refused with the cure; none is dropped. Where Lightning is ambiguous or surprising, the
difference is said in `from_lightning`.
"""

from __future__ import annotations

from .plan import Plan as Plan
from .plan import from_lightning as from_lightning
