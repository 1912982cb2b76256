"""Each configuration of torch's own table of optimizers, through `from_torch`, beside the optimizer itself."""

from __future__ import annotations

import sys
import types
import unittest
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from purestep import optim

SHAPES: dict[str, tuple[int, ...]] = {"matrix": (4, 3), "vector": (3,), "scalar": ()}
MATRICES: dict[str, tuple[int, ...]] = {"tall": (4, 3), "wide": (3, 5)}


def configurations(monkeypatch: pytest.MonkeyPatch) -> list[tuple[type[torch.optim.Optimizer], dict[str, Any]]]:
    # torch's table lies in a module of test helpers; of the package that this imports, torch does not need more here.
    stub: Any = types.ModuleType("expecttest")
    stub.TestCase, stub.assert_expected_inline = unittest.TestCase, None
    monkeypatch.setitem(sys.modules, "expecttest", stub)
    # The module forbids, for the whole process, to set flags of torch.backends.
    monkeypatch.setattr(torch.backends, "disable_global_flags", lambda: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        common: Any = pytest.importorskip("torch.testing._internal.common_optimizers")
    return [
        (info.optim_cls, dict(given.kwargs))
        for info in common.optim_db
        for given in info.optim_inputs_func(device="cpu", dtype=torch.float64)
        if info.optim_cls not in (torch.optim.LBFGS, torch.optim.SparseAdam)  # refused: `test_optim.py`
        and not given.kwargs.get("dampening")
    ]


def error(optimizer: type[torch.optim.Optimizer], options: dict[str, Any], twin_options: dict[str, Any]) -> float:
    """The largest difference of a parameter in float64 over a few steps."""
    generator = torch.Generator().manual_seed(0)
    shapes = MATRICES if optimizer is torch.optim.Muon else SHAPES
    params = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    twins = [nn.Parameter(param.clone()) for param in params.values()]
    make: Any = optimizer
    twin, tx = make(twins, **twin_options), optim.from_torch(optimizer, **options)
    state, worst = tx.init(params), 0.0
    for step in range(6):
        grads: dict[str, Tensor] = {name: torch.sin(3 * param + step) for name, param in params.items()}
        for own, grad in zip(twins, grads.values(), strict=True):
            own.grad = grad.clone()
        twin.step()
        updates, state = tx.update(grads, state, params)
        params = optim.apply_updates(params, updates)
        pairs = zip(params.values(), twins, strict=True)
        worst = max(worst, *(float((param - own.detach()).abs().max()) for param, own in pairs))
    return worst


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's, of deprecated options in its table
def test_from_torch_computes_every_configuration_of_torchs_table(monkeypatch: pytest.MonkeyPatch) -> None:
    found = configurations(monkeypatch)
    wrong = [
        (cls.__name__, options, far) for cls, options in found if not (far := error(cls, options, options)) < 1e-12
    ]
    assert not wrong
    assert len(found) > 60
    cls, options = found[0]
    assert error(cls, options, options | {"lr": 0.3}) > 1e-3, "the planted fault: another learning rate"
