"""Every named optimizer beside its twin in torch.optim (optax where torch has none), parameter by parameter, 50 steps.

float64 to 1e-10 and float32 to 1e-6, relative to the largest number that each parameter has had: rounding errors are of
that size, and a scalar that passes through zero keeps them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from optimizers import OPTAX, SHAPES, TWINS
from torch import Tensor

from purestep import optim
from purestep.optim import Transform

pytestmark = pytest.mark.peer

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-6}
STEPS = 50
T = torch.optim


def cases() -> list[Any]:
    found: list[Any] = []
    for name, twin in TWINS.items():
        for values in itertools.product(*twin.grid.values()):
            options = dict(zip(twin.grid, values, strict=True))
            if options.get("nesterov") and (options.get("dampening") or options.get("momentum") == 0.0):
                continue
            text = ",".join(f"{key}={value}" for key, value in options.items())
            found.append(pytest.param(name, options, id=f"{name}-{text}"))
    return found


def twin_options(name: str, options: dict[str, Any]) -> dict[str, Any]:
    renamed = {TWINS[name].names.get(key, key): value for key, value in options.items()}
    if "beta2_decay" in renamed:
        renamed["beta2_decay"] *= -1
    if "b1" in renamed or "b2" in renamed:
        renamed["betas"] = (renamed.pop("b1", 0.9), renamed.pop("b2", 0.999))
    return renamed


def gradient(param: Tensor, step: int, generator: torch.Generator) -> Tensor:
    """Of a size that jumps, so that every clipping and every maximum has work."""
    return (1 + step % 5) * torch.randn(param.shape, generator=generator, dtype=param.dtype)


def worst_error(
    tx: Transform,
    twin: Callable[[list[Tensor]], T.Optimizer],
    dtype: torch.dtype,
    shapes: dict[str, tuple[int, ...]] = SHAPES,
    before_step: Callable[[T.Optimizer, list[Tensor], int], None] = lambda optimizer, parameters, step: None,
) -> float:
    """The largest difference over all steps, relative to the largest number that its parameter has had."""
    generator = torch.Generator().manual_seed(0)
    params = {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}
    parameters = [torch.nn.Parameter(p.clone()) for p in params.values()]
    optimizer, state, worst = twin(parameters), tx.init(params), 0.0
    size = {name: p.abs().max() for name, p in params.items()}
    for step in range(STEPS):
        grads = {name: gradient(p, step, generator) for name, p in params.items()}
        for parameter, grad in zip(parameters, grads.values(), strict=True):
            parameter.grad = grad.clone()
        before_step(optimizer, parameters, step)
        optimizer.step()
        updates, state = tx.update(grads, state, params)
        params = optim.apply_updates(params, updates)
        for (name, ours), theirs in zip(params.items(), parameters, strict=True):
            size[name] = torch.maximum(size[name], theirs.detach().abs().max())
            worst = max(worst, float((ours - theirs.detach()).abs().max() / size[name]))
    return worst


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("name", "options"), cases())
def test_every_step_equals_the_twin_in_torch(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    twin, make = TWINS[name], getattr(optim, name)
    error = worst_error(
        make(twin.rate, **options),
        lambda ps: twin.optimizer(ps, lr=twin.rate, **twin_options(name, options)),  # type: ignore[call-arg]
        dtype,
        twin.shapes,
    )
    assert error <= TOLERANCE[dtype]


@pytest.mark.parametrize("name", TWINS)
def test_the_defaults_are_those_of_the_twin(name: str) -> None:
    twin = TWINS[name]
    error = worst_error(getattr(optim, name)(), twin.optimizer, torch.float64, twin.shapes)  # type: ignore[arg-type]
    assert error <= TOLERANCE[torch.float64]


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_a_step_in_the_other_direction_is_not_equal(name: str) -> None:
    """The planted fault: a twin that maximizes."""
    tx = getattr(optim, name)(2**-7)
    assert worst_error(tx, lambda ps: TWINS[name].optimizer(ps, lr=2**-7, maximize=True), torch.float32) > 1e-3


@pytest.mark.parametrize("name", ["sgd", "adamw", "radam"])
def test_maximizing_is_a_chain_with_scale(name: str) -> None:
    tx = optim.chain(optim.scale(-1.0), getattr(optim, name)(2**-7, weight_decay=0.125))
    error = worst_error(
        tx, lambda ps: TWINS[name].optimizer(ps, lr=2**-7, weight_decay=0.125, maximize=True), torch.float64
    )
    assert error <= TOLERANCE[torch.float64]


def test_a_schedule_equals_a_scheduler_of_torch() -> None:
    tx = optim.adamw(lambda count: 0.01 * 0.9 ** count.double())

    def set_rate(optimizer: T.Optimizer, parameters: list[Tensor], step: int) -> None:
        del parameters
        optimizer.param_groups[0]["lr"] = 0.01 * 0.9**step

    assert worst_error(tx, T.AdamW, torch.float64, before_step=set_rate) <= TOLERANCE[torch.float64]


def test_clipping_then_a_step_equals_clip_grad_norm() -> None:
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(2**-7, 0.9))

    def clip(optimizer: T.Optimizer, parameters: list[Tensor], step: int) -> None:
        del optimizer, step
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)

    twin = lambda ps: T.SGD(ps, lr=2**-7, momentum=0.9)  # noqa: E731  # a function of one line, as elsewhere here
    assert worst_error(tx, twin, torch.float64, before_step=clip) <= TOLERANCE[torch.float64]
    assert worst_error(tx, twin, torch.float64) > 1e-3, "without clipping the twin goes elsewhere"


def test_decay_groups_equal_parameter_groups() -> None:
    mask = {name: len(shape) >= 2 for name, shape in SHAPES.items()}
    tx = optim.adamw(2**-7, weight_decay=0.125, mask=mask)

    def grouped(ps: list[Tensor]) -> T.Optimizer:
        groups = [{"params": p, "weight_decay": 0.125 * keep} for p, keep in zip(ps, mask.values(), strict=True)]
        return T.AdamW(groups, lr=2**-7)

    assert worst_error(tx, grouped, torch.float64) <= TOLERANCE[torch.float64]
    assert worst_error(tx, lambda ps: T.AdamW(ps, lr=2**-7, weight_decay=0.125), torch.float64) > 1e-3


def optax_error(name: str, rate: float, options: dict[str, Any]) -> float:
    """`worst_error` with optax as the twin, in float64."""
    optax = pytest.importorskip("optax")
    jax = pytest.importorskip("jax")
    with jax.enable_x64(True):
        return _optax_error(optax, jax.numpy, name, rate, options)


def _optax_error(optax: Any, jnp: Any, name: str, rate: float, options: dict[str, Any]) -> float:
    generator = torch.Generator().manual_seed(0)
    params = {key: torch.randn(shape, generator=generator, dtype=torch.float64) for key, shape in SHAPES.items()}
    theirs = {key: jnp.asarray(p.numpy()) for key, p in params.items()}
    twin, tx = getattr(optax, name)(rate, **options), getattr(optim, name)(rate, **options)
    twin_state, state, worst = twin.init(theirs), tx.init(params), 0.0
    size = {key: p.abs().max() for key, p in params.items()}
    for step in range(STEPS):
        grads = {key: gradient(p, step, generator) for key, p in params.items()}
        updates, state = tx.update(grads, state, params)
        params = optim.apply_updates(params, updates)
        twin_grads = {key: jnp.asarray(g.numpy()) for key, g in grads.items()}
        twin_updates, twin_state = twin.update(twin_grads, twin_state, theirs)
        theirs = optax.apply_updates(theirs, twin_updates)
        for key, ours in params.items():
            other = torch.tensor(theirs[key].tolist(), dtype=torch.float64)
            size[key] = torch.maximum(size[key], other.abs().max())
            worst = max(worst, float((ours - other).abs().max() / size[key]))
    return worst


@pytest.mark.parametrize("weight_decay", [0.0, 0.125])
@pytest.mark.parametrize(("name", "options"), [(name, each) for name, given in OPTAX.items() for each in given])
def test_every_step_equals_optax_where_torch_has_no_twin(
    name: str, options: dict[str, float], weight_decay: float
) -> None:
    assert optax_error(name, 2**-7, {**options, "weight_decay": weight_decay}) <= TOLERANCE[torch.float64]


def test_optax_lamb_is_not_our_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted fault: a comparison that finds any two optimizers equal."""
    monkeypatch.setattr(optim, "lamb", optim.adamw)
    assert optax_error("lamb", 2**-7, {"weight_decay": 0.0}) > 1e-4
