"""CUDA rehearsed where there is no GPU.

The CUDA build of torch, inductor, Triton and ptxas run as they are, above a stand-in for CUDA's runtime, driver and
cuBLAS over the host's memory (``native/``). Its kernels do nothing, every call is written down, and what CUDA forbids
is refused. `emulation` computes aten operators on the host, in the same memory, so that numbers can be compared.

    sed 's/^torch==.*/torch==2.14.1/' constraints.txt > newest.txt
    python3 -m venv .venv-newest && .venv-newest/bin/pip install -c newest.txt -e '.[test]'
    .venv-newest/bin/python tests/rigs/cuda_rehearsal/run.py         # this folder, the tests marked cuda, the doctests
    .venv-newest/bin/python tests/rigs/cuda_rehearsal/run.py --table # launches, copies and syncs of programs

What it shows: launches, copies, synchronisations, captures and their rules, allocations, code that Triton and ptxas
take, and numbers of eager, donated and replayed steps. What it cannot show: numbers of Triton's kernels, of fused
attention and of cuDNN, real times, real races.
"""
