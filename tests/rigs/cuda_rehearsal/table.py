"""The table of budgets: ``python tests/rigs/cuda_rehearsal/run.py --table [PROGRAM ...]``. Compiling takes minutes."""

from __future__ import annotations

from . import device

device.load()

import sys  # noqa: E402
import warnings  # noqa: E402

import torch  # noqa: E402  # after the stand-in

import purestep as ps  # noqa: E402
from purestep.step import counting  # noqa: E402

from .counting import counted  # noqa: E402
from .emulation import emulated  # noqa: E402
from .programs import PROGRAMS  # noqa: E402

HEAD = (
    "| program | eager: launches, copies, syncs | compiled: Triton, products, others, copies, syncs "
    "| replay: launches, copies, syncs |"
)


def row(name: str) -> str:
    """One program in eager, compiled and replayed."""
    program, batch = PROGRAMS[name]()
    assert program.init is not None
    with emulated():  # how often a parameter was missed is read, and tells apart what may share a buffer
        state = program.init(device="cuda")
    eager, _ = counted(counting(program.train_step), state, batch)  # as a loop calls it
    step = ps.compile_step(program.train_step, donate=True, cuda_graph=True)
    whole, state = counted(step, state, batch, warm=1)
    replay, _ = counted(step, state, batch)
    forbidden = "".join(f" {line}" for seen in (eager, whole, replay) for line in seen.forbidden)
    return (
        f"| {name} | {eager.launches}, {len(eager.copies)}, {eager.syncs} "
        f"| {whole.triton}, {whole.products}, {whole.kernels}, {len(whole.copies)}, {whole.syncs} "
        f"| {replay.replays} graph + {replay.launches - replay.replays}, {len(replay.copies)}, {replay.syncs} "
        f"|{forbidden}"
    )


def main(names: list[str]) -> None:
    """Print a row a program."""
    warnings.simplefilter("ignore")
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    print(HEAD, "|---|---|---|---|", sep="\n")
    for name in names or PROGRAMS:
        try:
            print(row(name), flush=True)
        except Exception as error:
            print(f"| {name} | {type(error).__name__}: {str(error).splitlines()[0]} |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
