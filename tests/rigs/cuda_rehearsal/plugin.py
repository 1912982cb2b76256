"""pytest on the stand-in: ``-p rigs.cuda_rehearsal.plugin``, before torch is imported; `run.py` says so.

Tests marked cuda and doctests run with numbers (`emulation`), those of this folder as they ask for. No test may call
what CUDA forbids or what the stand-in does not have.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import nullcontext

import pytest

from . import device

device.load()

HERE = "cuda_rehearsal"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without -m or -k, what is about CUDA: the others run where there is none."""
    if config.option.markexpr or config.option.keyword:
        return
    chosen = [item for item in items if _is_rehearsal(item) or item.get_closest_marker("cuda") or _is_doctest(item)]
    left = [item for item in items if item not in set(chosen)]
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = chosen


def _is_rehearsal(item: pytest.Item) -> bool:
    return item.path.parent.name == HERE


def _is_doctest(item: pytest.Item) -> bool:
    return isinstance(item, pytest.DoctestItem)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    import torch

    from . import emulation

    torch.backends.cudnn.enabled = False  # the stand-in has none
    torch.backends.cuda.enable_cudnn_sdp(False)
    device.reset()
    with nullcontext() if _is_rehearsal(item) else emulation.emulated():
        yield
    if item.get_closest_marker("breaks_rules") is None:
        found = device.forbidden(device.calls())
        assert not found, f"CUDA forbids this, or the stand-in does not have it: {found[:5]}"


@pytest.fixture
def emulated() -> Iterator[None]:
    """Tensors have numbers, see `emulation`."""
    from . import emulation

    with emulation.emulated():
        yield
