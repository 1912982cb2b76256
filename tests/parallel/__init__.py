"""Tests with several processes."""

import sys
from pathlib import Path

if (tests := str(Path(__file__).parents[1])) not in sys.path:  # `python -m tests.parallel.table`; pytest has it there
    sys.path.append(tests)
