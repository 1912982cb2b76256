"""Schedule-free optimizers, AdEMAMix, Lookahead, Prodigy and Muon of kernels beside their references, step by step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_trees_close
from torch import Tensor, nn

import purestep as ps
from purestep import optim
from purestep.errors import ConfigError, StateError
from purestep.optim import Transform
from purestep.types import Params

SHAPES = {"matrix": (4, 3), "vector": (5,), "scalar": ()}
STEPS = 30
Watch = Callable[[Any, Params, Any, Any], None]


def gradient(param: Tensor, step: int, generator: torch.Generator) -> Tensor:
    """Of a size that jumps, and towards 0.3 in the mean, so that Prodigy's estimate grows."""
    noise = torch.randn(param.shape, generator=generator, dtype=param.dtype)
    return (1 + step % 5) * (noise / 4 + param.detach() - 0.3)


def beside_optax(tx: Transform, twin: Any, watch: Watch = lambda *_: None, *, pair: bool = False) -> float:
    """The largest difference over all steps in float64. ``pair``: optax's lookahead has two sets of parameters."""
    optax, jax = pytest.importorskip("optax"), pytest.importorskip("jax")
    with jax.enable_x64(True):
        generator = torch.Generator().manual_seed(0)
        params = {key: torch.randn(shape, generator=generator, dtype=torch.float64) for key, shape in SHAPES.items()}
        theirs: Any = {key: jax.numpy.asarray(p.numpy()) for key, p in params.items()}
        theirs = optax.LookaheadParams.init_synced(theirs) if pair else theirs
        twin = twin(optax)
        twin_state, state, worst = twin.init(theirs), tx.init(params), 0.0
        for step in range(STEPS):
            grads = {key: gradient(p, step, generator) for key, p in params.items()}
            updates, state = tx.update(grads, state, params)
            params = optim.apply_updates(params, updates)
            twin_grads = {key: jax.numpy.asarray(g.numpy()) for key, g in grads.items()}
            twin_updates, twin_state = twin.update(twin_grads, twin_state, theirs)
            theirs = optax.apply_updates(theirs, twin_updates)
            worst = max(worst, distance(params, theirs.fast if pair else theirs))
            watch(state, params, twin_state, theirs)
        return worst


def distance(ours: Params, theirs: Any) -> float:
    wanted = doubles(theirs)
    return max(float((p - wanted[key]).abs().max()) for key, p in ours.items())


def doubles(tree: Any) -> Params:
    return {key: torch.tensor(value.tolist(), dtype=torch.float64) for key, value in tree.items()}


RATE = 2**-7


@pytest.mark.peer
@pytest.mark.parametrize("options", [{}, {"b1": 0.5, "b2": 0.9, "b3": 0.99, "alpha": 2.0}, {"weight_decay": 0.125}])
def test_ademamix_equals_optax(options: dict[str, float]) -> None:
    assert beside_optax(optim.ademamix(RATE, **options), lambda o: o.contrib.ademamix(RATE, **options)) < 1e-10
    assert beside_optax(optim.adamw(RATE), lambda o: o.contrib.ademamix(RATE)) > 1e-3, "the planted fault"


@pytest.mark.peer
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("options", [{}, {"b1": 0.5, "weight_decay": 0.125}, {"weight_lr_power": 0.0}])
def test_schedule_free_equals_optax_with_the_weights_to_evaluate(kind: str, options: dict[str, float]) -> None:
    optax = pytest.importorskip("optax")
    name, views = f"schedule_free_{kind}", []

    def watch(state: Any, params: Params, twin_state: Any, theirs: Any) -> None:
        wanted = doubles(optax.contrib.schedule_free_eval_params(twin_state, theirs))
        assert_trees_close(viewed(state, params), wanted, rtol=1e-6, atol=1e-6)  # b1 is float32 in the state
        views.append(max(float((wanted[key] - p).abs().max()) for key, p in params.items()))

    tx = getattr(optim, name)(RATE, **options)
    assert beside_optax(tx, lambda o: getattr(o.contrib, name)(RATE, **options), watch) < 1e-10
    assert max(views) > 1e-4, "the view is another model"


def viewed(opt_state: Any, params: Params) -> Params:
    program = ps.program(nn.Linear(1, 1), ps.supervised(nn.MSELoss()), optim.sgd(0.1))
    return dict(optim.schedule_free_view(program.init()._replace(params=params, opt_state=opt_state)).params)


def test_a_warm_up_weights_the_average_by_the_largest_rate() -> None:
    """The algorithm as the paper writes it: three sequences."""
    rates = [0.0, 0.1, 0.3, 0.3, 0.2]
    tx = optim.schedule_free_sgd(lambda count: torch.tensor(rates)[count], b1=0.75)
    y = {"w": torch.tensor([1.0, -2.0], dtype=torch.float64)}
    x, z, state, total, largest = y["w"], y["w"], tx.init(y), 0.0, 0.0
    for rate in torch.tensor(rates).double().tolist():
        g = torch.sin(3 * y["w"])
        updates, state = tx.update({"w": g}, state, y)
        largest = max(largest, rate)
        total += largest**2
        c = largest**2 / total if total else 0.0
        z = z - rate * g
        x = (1 - c) * x + c * z
        y = optim.apply_updates(y, updates)
        torch.testing.assert_close(y["w"], 0.75 * x + 0.25 * z, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(state.z["w"], z, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(viewed(state, y)["w"], x, rtol=1e-6, atol=1e-6)


def test_the_view_is_evaluated_by_fit_and_finds_the_state_in_any_composition() -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 3)
    batches = [(x, x.sum(1, keepdim=True))]
    free = optim.chain(optim.clip_by_global_norm(1.0), optim.inject(optim.schedule_free_adamw)(learning_rate=0.1))
    tx = optim.partition({"a": free, "b": optim.sgd(0.1)}, [("weight", "a"), ("", "b")])
    program = ps.program(nn.Linear(3, 1), ps.supervised(nn.MSELoss()), tx)

    def eval_step(state: Any, batch: Any, *, index: int = 0) -> Any:
        return program.eval_step(optim.schedule_free_view(state), batch, index=index)  # type: ignore[misc]

    loaders = {"train": batches, "val": batches}
    result = ps.fit(
        program.init(), loaders, program._replace(eval_step=eval_step), epochs=5, sinks=[], device="cpu", compile=False
    )
    view = optim.schedule_free_view(result.state)
    assert not torch.equal(view.params["weight"], result.state.params["weight"])
    assert torch.equal(view.params["bias"], result.state.params["bias"])
    again = ps.evaluate(view, batches, program.eval_step)  # type: ignore[arg-type]
    assert result.history["val_loss"][-1] == pytest.approx(again["loss"])
    changed = optim.set_hyperparams(result.state.opt_state, learning_rate=0.5)
    assert optim.hyperparams(changed)["a/learning_rate"] == 0.5


def test_the_view_of_another_state_is_an_error_with_the_cure() -> None:
    def state(tx: Transform, **options: Any) -> Any:
        return ps.program(nn.Linear(3, 1), ps.supervised(nn.MSELoss()), tx, **options).init()

    with pytest.raises(StateError, match=r"not schedule-free.*schedule_free_adamw"):
        optim.schedule_free_view(state(optim.adamw(0.1)))
    with pytest.raises(StateError, match="second average.*without ema="):
        optim.schedule_free_view(state(optim.schedule_free_sgd(0.1), ema=0.9))
    with pytest.raises(StateError, match="not a TrainState"):
        optim.schedule_free_view({})  # type: ignore[arg-type]
    for make in (optim.schedule_free_sgd, optim.schedule_free_adamw):
        with pytest.raises(ConfigError, match=r"b1=0\.0 must be in \(0, 1\) \(cure: 0\.9 is the default"):
            make(0.1, b1=0.0)


@pytest.mark.peer
@pytest.mark.parametrize(("period", "size"), [(1, 0.5), (3, 0.25), (5, 1.0)])
def test_lookahead_equals_optax(period: int, size: float) -> None:
    def watch(state: Any, params: Params, twin_state: Any, theirs: Any) -> None:
        del params, twin_state
        assert_trees_close(state.slow, doubles(theirs.slow), rtol=0.0, atol=1e-12)

    tx = optim.lookahead(optim.sgd(RATE, 0.875), period, size)
    error = beside_optax(tx, lambda o: o.lookahead(o.sgd(RATE, 0.875), period, size), watch, pair=True)
    assert error < 1e-12
    if period == 3:
        wrong = optim.lookahead(optim.sgd(RATE, 0.875), 4, size)
        assert beside_optax(wrong, lambda o: o.lookahead(o.sgd(RATE, 0.875), 3, size), pair=True) > 1e-3


def test_a_leaf_inside_of_lookahead_can_be_set() -> None:
    tx = optim.lookahead(optim.inject(optim.sgd)(learning_rate=0.1))
    params = {"w": torch.ones(1)}
    state = optim.set_hyperparams(tx.init(params), learning_rate=0.5)
    assert tx.update(params, state, params)[0]["w"].item() == -0.5


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.lookahead(optim.adamw), "inner is a function"),
        (lambda: optim.lookahead(optim.adamw(), 0), "sync_period=0"),
        (
            lambda: optim.lookahead(optim.adamw(), 5, 1.5),
            r"slow_step_size=1\.5 must be in \[0, 1\] \(cure: 0\.5 is",
        ),
    ],
)
def test_lookahead_names_what_is_wrong(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^lookahead: {message}"):
        make()


@pytest.mark.peer
@pytest.mark.parametrize(
    "options", [{}, {"weight_decay": 0.125}, {"safeguard_warmup": True, "estim_lr_coef": 2.0}, {"b1": 0.5, "b2": 0.9}]
)
def test_prodigy_equals_optax(options: dict[str, Any]) -> None:
    estimates = []

    def watch(state: Any, params: Params, twin_state: Any, theirs: Any) -> None:
        del params, theirs
        estimates.append(state.estim_lr.item())
        assert estimates[-1] == pytest.approx(float(twin_state.estim_lr), rel=1e-4)

    def twin(optax: Any) -> Any:
        betas = options.get("b1", 0.9), options.get("b2", 0.999)
        rest = {key: value for key, value in options.items() if key not in ("b1", "b2")}
        return optax.contrib.prodigy(0.5, betas, estim_lr0=2**-10, **rest)

    # the estimate is float32 in our state, float64 in optax's
    assert beside_optax(optim.prodigy(0.5, estim_lr0=2**-10, **options), twin, watch) < 1e-5
    assert estimates[-1] > estimates[0], "the estimate has grown"


def test_prodigy_stands_gradients_of_zero() -> None:
    tx, params = optim.prodigy(), {"w": torch.ones(2)}
    updates, state = tx.update({"w": torch.zeros(2)}, tx.init(params), params)
    assert updates["w"].tolist() == [0.0, 0.0]
    assert state.estim_lr.item() == pytest.approx(1e-6)


@pytest.mark.parametrize("shape", [(6, 3, 2, 2), (8, 2, 1), (4, 5, 3)])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw", 0.35])
def test_muon_of_a_kernel_is_muon_of_its_matrix(shape: tuple[int, ...], adjust: Any) -> None:
    """The reference is `torch.optim.Muon` on the flattened kernel; it has the first two factors, we write the third."""
    torch.manual_seed(0)
    kernel = torch.randn(shape)
    parameter = nn.Parameter(kernel.flatten(1).clone())
    rows, columns = parameter.shape
    factor = (
        1.0 if isinstance(adjust, str) else adjust * math.sqrt(max(rows, columns)) / math.sqrt(max(1, rows / columns))
    )
    named = adjust if isinstance(adjust, str) else "original"
    twin = torch.optim.Muon([parameter], lr=0.01 * factor, weight_decay=0.0, adjust_lr_fn=named)
    tx, params = optim.muon(0.01, weight_decay=0.0, adjust=adjust, flatten=True), {"k": kernel}
    state = tx.init(params)
    for _ in range(4):
        grad = torch.randn(shape)
        parameter.grad = grad.flatten(1).clone()
        twin.step()
        updates, state = tx.update({"k": grad}, state, params)
        params = optim.apply_updates(params, updates)
    torch.testing.assert_close(params["k"].flatten(1), parameter.detach(), rtol=1e-5, atol=1e-6)


def test_a_number_is_the_root_mean_square_of_every_update() -> None:
    torch.manual_seed(0)
    params = {"tall": torch.randn(64, 8), "wide": torch.randn(8, 64), "kernel": torch.randn(32, 8, 3, 3)}
    tx = optim.chain(optim.scale_by_muon(flatten=True, ns_steps=12), optim.scale_by_shape(0.2))
    updates, _ = tx.update(params, tx.init(params), params)
    for update in updates.values():  # Newton-Schulz leaves singular values between 0.7 and 1.2
        assert update.square().mean().sqrt().item() == pytest.approx(0.2, rel=0.3)


def test_labels_and_errors_know_kernels() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    assert {name for name, label in optim.muon_labels(model).items() if label == "muon"} == {"3.weight"}
    found = optim.muon_labels(model, flatten=True, skip=("3",))
    assert {name for name, label in found.items() if label == "muon"} == {"0.weight"}
    with pytest.raises(StateError, match=r"shape \(4, 3, 3, 3\).*flatten=True"):
        optim.muon(0.1).init({"w": torch.ones(4, 3, 3, 3)})
    with pytest.raises(StateError, match=r"shape \(4,\)"):
        optim.muon(0.1, flatten=True).init({"w": torch.ones(4)})
    with pytest.raises(
        ConfigError,
        match=r"muon: adjust=-0\.1 must be a finite number of at least 0 \(cure: 'original' is the default\)",
    ):
        optim.muon(0.1, adjust=-0.1)
