"""A differential fuzzer: small modules trained by a loop by hand, by the eager step and by compiled ones.

`cases.py` makes a case of a seed: layers, the layout of the batch, optimizer, precision, average, accumulation and
the way to compile, dropout on. `compare.py` trains it in every way and names what differs.
`python -m tests.rigs.fuzz` runs many.
"""
