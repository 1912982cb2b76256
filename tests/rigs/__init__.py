"""Programs that tests run or share and that are no tests themselves; see README.md."""

import sys
from pathlib import Path

if (tests := str(Path(__file__).parents[1])) not in sys.path:  # as pytest has it; for `python -m tests.rigs.fuzz`
    sys.path.append(tests)
