"""The generators that data code draws from (torch's, numpy's and Python's global ones), taken as one.

Everything that runs a user's dataset, sampler, collate function or iterable does so inside `scoped`, so that what it
draws depends on a seed alone, and the caller's generators are as they were.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import torch

from .. import rng


@contextmanager
def scoped(number: int) -> Generator[None]:
    """Draw from ``number``, in [0, 2**63), and leave the three generators as they were (90 us, most of it numpy's).

    Example:
        >>> with scoped(1):
        ...     first = random.random()
        >>> with scoped(1):
        ...     print(random.random() == first)
        True
    """
    numpys, pythons = np.random.get_state(legacy=False), random.getstate()
    try:
        with seeded(number):
            yield
    finally:
        try:
            _put_back(numpys, pythons)
        except BaseException:  # a signal handler raised half-way through: finish, then let it go on
            _put_back(numpys, pythons)
            raise


def _put_back(numpys: dict[str, object], pythons: tuple[object, ...]) -> None:
    np.random.set_state(numpys)
    random.setstate(pythons)


@contextmanager
def seeded(number: int) -> Generator[None]:
    """Inside `scoped`: draw from another seed (9 us)."""
    with rng.scoped(number):
        np.random.seed(number & 0xFFFFFFFF)
        random.seed(number)
        yield


def sample() -> tuple[int, float, float]:
    """One number from each: equal ones after equal seeds mean that nothing was drawn between."""
    return int(torch.empty((), dtype=torch.int64).random_()), float(np.random.random_sample()), random.random()
