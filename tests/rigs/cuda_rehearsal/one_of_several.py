"""One process of several on the stand-in, with ``package.module:function`` and its arguments in JSON.

The stand-in has no NCCL: gloo, which also sends tensors of a GPU, takes its place. What is not rehearsed: NCCL's
streams, its collectives in recorded graphs, and what it does when a process is gone.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

from . import device

device.load()

import torch  # noqa: E402  # after the stand-in
import torch.distributed as dist  # noqa: E402

from rigs.parallel.processes import RESULT  # noqa: E402

from . import emulation  # noqa: E402


def main(target: str, arguments: str) -> None:
    """Print the function's result as JSON."""
    start = dist.init_process_group

    def with_gloo(backend: str, **options: Any) -> Any:
        assert backend == "nccl", "CUDA is there, so the library asks for NCCL"
        return start("gloo", **options)

    dist.init_process_group = with_gloo  # pyright: ignore[reportAttributeAccessIssue]
    torch.backends.cudnn.enabled = False
    module, _, name = target.partition(":")
    with emulation.emulated():
        result = getattr(importlib.import_module(module), name)(*json.loads(arguments))
    print(RESULT + json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
