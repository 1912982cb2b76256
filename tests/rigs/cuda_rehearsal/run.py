"""The CUDA rehearsal: ``python tests/rigs/cuda_rehearsal/run.py``, with pytest's arguments, or `--table`.

The interpreter is that of an environment with a CUDA build of torch. No GPU is used, also where there is one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
ROOT = TESTS.parent


def main(arguments: list[str]) -> None:
    """Become pytest on the stand-in."""
    sys.path.insert(0, str(TESTS))
    from rigs.cuda_rehearsal import build, device

    try:
        library = build.stand_in()
    except build.NotPossibleError as error:
        print(f"no rehearsal of CUDA here: {error}", file=sys.stderr)
        sys.exit(os.EX_UNAVAILABLE)
    paths = [str(ROOT / "src"), str(TESTS), str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ |= {
        device.VARIABLE: str(library),
        "TRITON_LIBCUDA_PATH": str(library.parent),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # processes of its own would have no stand-in
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    os.chdir(ROOT)
    if arguments[:1] == ["--table"]:
        os.execv(sys.executable, [sys.executable, "-m", "rigs.cuda_rehearsal.table", *arguments[1:]])
    os.execv(sys.executable, [sys.executable, "-m", "pytest", "-p", "rigs.cuda_rehearsal.plugin", *arguments])


if __name__ == "__main__":
    main(sys.argv[1:])
