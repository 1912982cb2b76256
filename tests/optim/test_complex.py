"""Complex parameters: torch's own loop is the measure; what torch does not define is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import optimizers
import pytest
import torch
from helpers import assert_trees_close
from torch import Tensor, nn

import purestep as ps
from purestep import optim
from purestep.compile.cpu import backend
from purestep.errors import ConfigError

T = torch.optim
MSE = ps.supervised(nn.MSELoss())


class Filter(nn.Module):
    """A learned filter of the lowest frequencies, between two real layers."""

    def __init__(self, dtype: torch.dtype = torch.complex128) -> None:
        super().__init__()
        torch.manual_seed(0)
        real = dtype.to_real()
        self.lift, self.out = nn.Linear(1, 4, dtype=real), nn.Linear(4, 1, dtype=real)
        self.modes = nn.Parameter(0.3 * torch.randn(4, 4, 5, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.lift(x).transpose(1, 2)
        spectrum = torch.fft.rfft(hidden)[..., : self.modes.shape[-1]]
        mixed = torch.fft.irfft(torch.einsum("bim,iom->bom", spectrum, self.modes), n=hidden.shape[-1])
        return self.out((mixed + hidden).transpose(1, 2).tanh())


def data(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    x = torch.randn(6, 16, 1, dtype=dtype, generator=torch.Generator().manual_seed(1))
    return x, x.cos()


Pair = tuple[Callable[[], optim.Transform], Callable[[Any], T.Optimizer]]
NESTEROV: Any = {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}
CENTERED: Any = {"momentum": 0.9, "centered": True}
START: Any = {"initial_accumulator_value": 0.1, "lr_decay": 0.1}
DEFINED: dict[str, Pair] = {
    "sgd": (lambda: optim.sgd(0.1), lambda p: T.SGD(p, 0.1)),
    "sgd nesterov": (lambda: optim.sgd(0.1, **NESTEROV), lambda p: T.SGD(p, 0.1, **NESTEROV)),
    "adam": (lambda: optim.adam(0.01), lambda p: T.Adam(p, 0.01)),
    "adamw": (lambda: optim.adamw(0.01), lambda p: T.AdamW(p, 0.01)),
    "nadam": (lambda: optim.nadam(0.01), lambda p: T.NAdam(p, 0.01)),
    "radam": (lambda: optim.radam(0.01), lambda p: T.RAdam(p, 0.01)),
    "adamax": (lambda: optim.adamax(0.01), lambda p: T.Adamax(p, 0.01)),
    "rmsprop": (lambda: optim.rmsprop(0.01, **CENTERED), lambda p: T.RMSprop(p, 0.01, **CENTERED)),
    "adagrad": (lambda: optim.adagrad(0.01, **START), lambda p: T.Adagrad(p, 0.01, **START)),
    "adadelta": (lambda: optim.adadelta(1.0), lambda p: T.Adadelta(p, 1.0)),
    "lbfgs": (
        lambda: optim.lbfgs(max_iter=4),
        lambda p: T.LBFGS(p, 1.0, max_iter=4, line_search_fn="strong_wolfe"),
    ),
    "from_torch": (lambda: optim.from_torch(T.Rprop, lr=0.01), lambda p: T.Rprop(p, 0.01)),
}
NOT_DEFINED: dict[str, Callable[[], optim.Transform]] = {
    "adafactor": lambda: optim.adafactor(0.01),
    "ademamix": lambda: optim.ademamix(0.01),
    "lamb": lambda: optim.lamb(0.01),
    "lion": lambda: optim.lion(0.01),
    "muon": lambda: optim.muon(0.01),
    "prodigy": lambda: optim.prodigy(),
    "schedule_free": lambda: optim.schedule_free_adamw(0.01),
    "soap": lambda: optim.soap(0.01),
    "clip_by_value": lambda: optim.chain(optim.clip_by_value(0.1), optim.sgd(0.1)),
    "adaptive_grad_clip": lambda: optim.chain(optim.adaptive_grad_clip(0.1), optim.sgd(0.1)),
    "clip_by_block_rms": lambda: optim.chain(optim.clip_by_block_rms(1.0), optim.sgd(0.1)),
    "scale_by_param_block_rms": lambda: optim.chain(optim.scale_by_param_block_rms(), optim.sgd(0.1)),
    "scale_by_shape": lambda: optim.chain(optim.scale_by_shape(), optim.sgd(0.1)),
}


def loop(
    module: nn.Module, make: Callable[[Any], T.Optimizer], steps: int = 4, max_norm: float | None = None
) -> Params:
    """Train by torch's own loop; the weights, and under ``ema.`` their average."""
    optimizer = make(module.parameters())
    average = T.swa_utils.AveragedModel(module, multi_avg_fn=T.swa_utils.get_ema_multi_avg_fn(0.5))
    x, y = data(next(module.parameters()).dtype.to_real())

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(module(x), y)
        loss.backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(module.parameters(), max_norm)
        return loss

    for _ in range(steps):
        optimizer.step(closure)
        average.update_parameters(module)
    return weights(module) | {f"ema.{name}": value for name, value in weights(average.module).items()}


Params = dict[str, Tensor]


def weights(module: nn.Module) -> Params:
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def after(tx: optim.Transform, steps: int = 4, dtype: torch.dtype = torch.complex128, **settings: Any) -> Params:
    program = ps.program(Filter(dtype), MSE, tx, ema=0.5, **settings)
    state = program.init()
    for _ in range(steps):
        state, _ = program.train_step(state, data(dtype.to_real()))
    return state.params | {f"ema.{name}": value for name, value in state.ema.params.items()}


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("name", DEFINED)
def test_an_optimizer_that_torch_defines_is_torchs(name: str, dtype: torch.dtype) -> None:
    mine, theirs = DEFINED[name]
    rtol, atol = (1e-9, 1e-12) if dtype == torch.complex128 else (1e-4, 2e-6)
    assert_trees_close(after(mine(), dtype=dtype), loop(Filter(dtype), theirs), rtol=rtol, atol=atol)


def test_a_state_has_complex_moments_in_the_shape_of_the_parameters() -> None:
    program = ps.program(Filter(), MSE, optim.adam(0.01))
    state, _ = program.train_step(program.init(), data())
    assert {leaf.shape for path, leaf in ps.tree.with_paths(state.opt_state) if path.endswith("modes")} == {
        state.params["modes"].shape
    }


def test_the_norm_that_clips_is_torchs() -> None:
    expected = loop(Filter(), lambda p: T.Adam(p, 0.01), max_norm=0.01)
    found = after(optim.chain(optim.clip_by_global_norm(0.01), optim.adam(0.01)))
    assert_trees_close(found, expected, rtol=1e-9, atol=1e-12)
    grads = {"a": torch.tensor([3 + 4j]), "b": torch.tensor([12.0])}
    assert optim.global_norm(grads).item() == 13.0
    assert optim.global_norm({"a": torch.tensor([3 + 4j], dtype=torch.complex128)}).dtype == torch.float64


@pytest.mark.parametrize("name", NOT_DEFINED)
def test_what_torch_does_not_define_is_refused(name: str) -> None:
    program = ps.program(Filter(), MSE, NOT_DEFINED[name]())
    with pytest.raises(ConfigError, match=rf"{name}.*not defined for complex parameters: modes is one.*optim\.adamw"):
        program.init()


def test_an_optimizer_that_refuses_trains_the_real_parameters_of_a_partition() -> None:
    groups = {"muon": optim.muon(0.01), "adam": optim.adam(0.01)}
    rules = [("modes|bias", "adam"), ("", "muon")]
    found = after(optim.partition(groups, rules))
    assert not torch.equal(found["modes"], Filter().modes)


@pytest.mark.parametrize("settings", [{"microbatches": 3}, {"accumulate": 2}, {"sam": 0.05}, {"engine": "func"}])
def test_other_parts_of_a_step_take_them(settings: Any) -> None:
    whole = ps.program(Filter(), MSE, optim.adam(0.01), **({"sam": 0.05} if "sam" in settings else {}))
    program = ps.program(Filter(), MSE, optim.adam(0.01), **settings)
    rows = [tuple(leaf[at : at + 3] for leaf in data()) for at in (0, 3)]
    state, expected = program.init(), whole.init()
    for _ in range(2):
        for batch in rows if "accumulate" in settings else [data()]:
            state, _ = program.train_step(state, batch)
        expected, _ = whole.train_step(expected, data())
    assert_trees_close(state.params, expected.params, rtol=1e-9, atol=1e-12)


def test_the_gradient_of_sam_is_at_the_worst_weights_nearby() -> None:
    program, plain = ps.program(Filter(), MSE, optim.sgd(1.0), sam=0.05), ps.program(Filter(), MSE, optim.sgd(1.0))
    state = plain.init()

    def gradient(at: Any) -> Any:  # by one step of a learning rate of 1
        new, _ = plain.train_step(at, data())
        return {name: param - new.params[name] for name, param in at.params.items()}

    grads = gradient(state)
    norm = optim.global_norm(grads)
    worst = {name: param + 0.05 * grads[name] / norm for name, param in state.params.items()}
    expected = gradient(state._replace(params=worst))
    new, _ = program.train_step(program.init(), data())
    assert_trees_close({n: state.params[n] - p for n, p in new.params.items()}, expected, rtol=1e-9, atol=1e-12)


def test_double_precision_is_double_for_both_kinds() -> None:
    program = ps.program(Filter(torch.complex64), MSE, optim.adam(0.01), precision="64-true")
    state, _ = program.train_step(program.init(), data())
    assert {p.dtype for p in state.params.values()} == {torch.float64, torch.complex128}
    assert Filter(torch.complex64).modes.dtype == torch.complex64
    half = ps.program(Filter(torch.complex64), MSE, optim.adam(0.01), precision="bf16-true").init()
    assert half.params["modes"].dtype == torch.complex64
    assert half.params["out.weight"].dtype == torch.bfloat16


def test_swa_averages_them() -> None:
    program = ps.program(Filter(), MSE, optim.sgd(0.5), ema=ps.ema.swa(1))
    state, seen = program.init(), []
    for _ in range(3):
        state, _ = program.train_step(state, data())
        seen.append(state.params["modes"])
    torch.testing.assert_close(state.ema.params["modes"], torch.stack(seen).mean(dim=0))


def test_a_resumed_run_ends_in_the_same_bits(tmp_path: Path) -> None:
    program = ps.program(Filter(), MSE, optim.adamw(0.01), ema=0.5)
    whole = ps.fit(program.init(), [data()] * 2, program, epochs=3, progress=False)
    ps.fit(program.init(), [data()] * 2, program, epochs=1, snapshots=tmp_path / "run", progress=False)
    later = ps.fit(program.init(), [data()] * 2, program, epochs=3, snapshots=tmp_path / "run", progress=False)
    assert_trees_close(later.state, whole.state, exact=True)
    ps.export_weights(tmp_path / "weights.pt", program, later.state)
    module = Filter()
    module.load_state_dict(torch.load(tmp_path / "weights.pt", weights_only=True))
    assert torch.equal(module.modes, later.state.ema.params["modes"])


def test_a_compiled_step_is_the_eager_one() -> None:
    program = ps.program(Filter(), MSE, optim.adam(0.01), ema=0.5)
    step = ps.compile_step(program.train_step, donate=True, backend="aot_eager")
    state, expected = program.init(), program.init()
    for _ in range(3):
        state, _ = step(state, data())
        expected, _ = program.train_step(expected, data())
    assert_trees_close(ps.clone(state).params, expected.params, rtol=1e-9, atol=1e-12)
    assert_trees_close(ps.clone(state).ema.params, expected.ema.params, rtol=1e-9, atol=1e-12)


def test_the_plug_in_leaves_them_to_torch() -> None:
    assert not backend.suits([torch.zeros(2), torch.zeros(2, dtype=torch.complex64)])


def test_derivatives_other_than_a_steps_are_refused() -> None:
    program = ps.program(Filter(), MSE, optim.adam(0.01))
    with pytest.raises(ConfigError, match=r"per_example.*complex parameters: modes"):
        ps.per_example(program)
    with pytest.raises(ConfigError, match=r"complex parameters: modes"):
        ps.privacy.dp_sgd(program, max_norm=1.0, noise_multiplier=1.0)


def test_the_members_of_an_ensemble_are_those_of_single_steps() -> None:
    program = ps.program(Filter(), MSE, optim.adam(0.01))
    both = ps.ensemble(program, 2)
    state, _ = both.train_step(both.init(seeds=[0, 1]), data())
    expected, _ = program.train_step(program.init(), data())
    assert_trees_close(ps.member(state, 1).params, expected.params, rtol=1e-9, atol=1e-12)


def test_each_optimizer_is_compared_with_torch_or_refuses() -> None:
    linear = {"lookahead"}  # mixes the weights of its inner optimizer
    for name in optimizers.ROWS.keys() - DEFINED.keys() - linear:
        with pytest.raises(ConfigError, match="complex parameters: w is one"):
            optimizers.ROWS[name]().init({"w": torch.zeros(4, 3, dtype=torch.complex64)})
