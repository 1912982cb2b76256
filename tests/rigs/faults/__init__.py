"""Trials of faults, each a function of a seed: `tests/faults` runs some of them, `soak` all."""
