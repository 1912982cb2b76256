"""Models of many kinds, each trained by a loop by hand and by purestep's steps: `python -m tests.rigs.zoo`."""
