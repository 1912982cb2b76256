from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers import assert_trees_close, image_batch, tiny_convnet, tiny_mlp, vector_batch
from torch import Tensor, nn

import purestep as ps
from purestep import optim, precision
from purestep.errors import ConfigError
from purestep.scaler import ScalerState
from purestep.types import Empty

CPU = torch.device("cpu")
# name -> dtypes of weights, of what a linear layer computes in, and of the loss that is differentiated
DTYPES = {
    "32-true": (torch.float32, torch.float32, torch.float32),
    "64-true": (torch.float64, torch.float64, torch.float64),
    "bf16-true": (torch.bfloat16, torch.bfloat16, torch.float32),
    "16-true": (torch.float16, torch.float16, torch.float32),
    "bf16-mixed": (torch.float32, torch.bfloat16, torch.float32),
    "16-mixed": (torch.float32, torch.float16, torch.float32),
}


def program(net: nn.Module, name: Any, objective: Any = None, **kwargs: Any) -> ps.Program:
    return ps.program(
        net, objective or ps.supervised(nn.CrossEntropyLoss()), optim.adamw(0.01), precision=name, **kwargs
    )


@pytest.mark.parametrize("name", DTYPES)
class TestOnTheCpu:
    def test_weights_inputs_and_outputs_have_the_documented_dtypes(self, name: str):
        weights, compute, _ = DTYPES[name]
        seen: dict[str, torch.dtype] = {}

        class Net(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                y = super().forward(x)
                seen.update(weight=self.weight.dtype, input=x.dtype, output=y.dtype)
                return y

        chosen = program(Net(4, 3), name)
        state = chosen.init(device="cpu")
        batch = vector_batch()
        for call in (chosen.train_step, chosen.eval_step):
            seen.clear()
            call(state, batch)
            assert seen == {"weight": weights, "input": weights, "output": compute}
        assert chosen.bind(state)(batch[0]).dtype == compute
        assert seen["input"] == weights

    def test_a_step_trains_and_keeps_every_dtype(self, name: str):
        weights = DTYPES[name][0]
        chosen = program(tiny_convnet(), name, ema=0.9, accumulate=2)
        state = chosen.init(device="cpu")
        assert {p.dtype for p in state.params.values()} == {weights}
        assert {b.dtype for b in state.buffers.values()} == {weights, torch.int64}
        assert {leaf.dtype for leaf in state.accum.grads.values()} == {
            max(weights, torch.float32, key=lambda d: d.itemsize)
        }
        new = state
        for _ in range(2):
            new, metrics = chosen.train_step(new, image_batch())
        assert [x.dtype for x in ps.tree.leaves(new)] == [x.dtype for x in ps.tree.leaves(state)]
        assert int(new.updates) == 1
        assert not torch.equal(new.params["6.weight"], state.params["6.weight"])
        loss = torch.float64 if name == "64-true" else torch.float32
        assert {part.dtype for part in metrics["loss"]} == {loss}

    def test_only_one_brings_a_loss_scaler(self, name: str):
        state = program(tiny_mlp(), name).init(device="cpu")
        assert isinstance(state.scaler, ScalerState if name == "16-mixed" else Empty)

    def test_the_loss_goes_down(self, name: str):
        # Not Adam: its eps of 1e-8 is 0 in float16, in torch as here.
        chosen = ps.program(tiny_mlp(), ps.supervised(nn.CrossEntropyLoss()), optim.sgd(0.5), precision=name)
        state = chosen.init(device="cpu")
        losses = []
        for _ in range(15):
            state, metrics = chosen.train_step(state, vector_batch())
            losses.append(float(metrics["loss"]))
        assert losses[-1] < losses[0] - 0.05

    def test_the_objective_gets_the_context_as_it_is(self, name: str):
        given = torch.ones(2)

        def objective(m: Any, batch: Any, teacher: Tensor) -> ps.Loss:
            assert teacher is given
            return ps.Loss(m(batch[0]).float().square().mean(), 1, {})

        chosen = program(tiny_mlp(), name, objective)
        chosen.train_step(chosen.init(device="cpu"), vector_batch(), given)


SQUARES = {
    "adam": optim.adam(1e-3, amsgrad=True),
    "nadam": optim.nadam(1e-3),
    "radam": optim.radam(1e-3),
    "adamax": optim.adamax(1e-3),
    "rmsprop": optim.rmsprop(1e-3),
    "adagrad": optim.adagrad(1e-2),
    "adadelta": optim.adadelta(1.0),
}


@pytest.mark.parametrize("name", SQUARES)
def test_squares_of_gradients_are_not_lost_in_float16(name: str):
    """The first layer's are, in float16: torch's optimizers end in nan here."""
    losses = {}
    for precision_ in ("16-true", "32-true"):
        chosen = ps.program(tiny_mlp(), ps.supervised(nn.CrossEntropyLoss()), SQUARES[name], precision=precision_)
        state, (x, y) = chosen.init(), vector_batch()
        state = state._replace(params={**state.params, "2.weight": state.params["2.weight"] * 1e-3})
        for _ in range(20):
            state, metrics = chosen.train_step(state, (x, y))
        assert int(state.updates) == 20
        losses[precision_] = float(metrics["loss"])
    assert losses["16-true"] == pytest.approx(losses["32-true"], rel=5e-3)


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize(("factor", "updates"), [(1.0, 3), (1e8, 0)])
def test_a_compiled_step_in_float16_is_that_of_eager(factor: float, updates: int):
    """The update is never stored in float16, so that what float16 cannot hold has to be told otherwise."""
    tx = optim.chain(optim.adam(1e-3), optim.scale(factor))
    chosen = ps.program(tiny_mlp(), ps.supervised(nn.CrossEntropyLoss()), tx, precision="16-true", nonfinite="skip")
    fast, state, eager = ps.compile_step(chosen.train_step), chosen.init(), chosen.init()
    for _ in range(3):
        state, _ = fast(state, vector_batch())
        eager, _ = chosen.train_step(eager, vector_batch())
    assert int(state.updates) == int(eager.updates) == updates
    assert_trees_close(state.params, eager.params, rtol=1e-2, atol=1e-3)


@pytest.mark.row("2.19")
def test_mixed_precision_is_torch_autocast():
    x, y = vector_batch()
    net = tiny_mlp()
    chosen = program(net, "bf16-mixed")
    _, metrics = chosen.train_step(chosen.init(device="cpu"), (x, y))
    with torch.autocast("cpu", torch.bfloat16):
        expected = nn.functional.cross_entropy(net(x), y)
    assert float(metrics["loss"]) == pytest.approx(expected.item(), rel=1e-6)
    assert expected.item() != nn.functional.cross_entropy(net(x), y).item()


def test_32_true_keeps_the_modules_own_dtype():
    chosen = program(tiny_mlp(dtype=torch.float64), "32-true")
    assert chosen.init(device="cpu").params["0.weight"].dtype == torch.float64


def test_integers_and_what_is_no_tensor_are_not_cast():
    batch = {"x": torch.ones(2), "ids": torch.ones(2, dtype=torch.int64), "mask": torch.ones(2).bool(), "name": "a"}
    cast = precision.policy("bf16-true").cast(batch)
    assert [cast[k].dtype for k in ("x", "ids", "mask")] == [torch.bfloat16, torch.int64, torch.bool]
    assert cast["name"] == "a"
    assert batch["x"].dtype == torch.float32
    assert precision.policy("bf16-mixed").cast(batch) is batch


@pytest.mark.parametrize("name", ["bf16", "16", "fp16-mixed", "32", "", None, 16])
def test_an_unknown_name_lists_those_there_are(name: Any):
    with pytest.raises(
        ConfigError, match=r'program: precision=.* is unknown \(cure: "64-true", "32-true".* or "16-mixed"\)'
    ):
        program(tiny_mlp(), name)


def test_a_policy_of_ones_own_is_taken_as_it_is():
    own = precision.Policy("bf16 all through", torch.bfloat16, torch.bfloat16, scaled=False)
    assert precision.policy(own) is own
    state = program(tiny_mlp(), own).init(device="cpu")
    assert state.params["0.weight"].dtype == torch.bfloat16


class TestWhatADeviceCannotDo:
    def test_a_device_that_is_not_there(self):
        name = "mps" if torch.cuda.is_available() else "cuda"
        for kind in ("32-true", "16-mixed"):
            with pytest.raises(ConfigError, match=rf"""device: no device '{name}' here: .*\(cure: .*device="cpu"\)"""):
                program(tiny_mlp(), kind).init(device=name)

    def test_a_torch_without_cuda_is_named(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
        with pytest.raises(ConfigError, match=r"torch .* is built without CUDA \(cure: install a CUDA build of torch"):
            program(tiny_mlp(), "32-true").init(device=f"cuda:{torch.cuda.device_count()}")  # one more than there are

    def test_a_device_that_is_none(self):
        with pytest.raises(ConfigError, match="no device 'gpu' here: Expected one of cpu, cuda"):
            program(tiny_mlp(), "32-true").init(device="gpu")

    def test_a_dtype_that_the_device_refuses(self, monkeypatch: pytest.MonkeyPatch):
        """As MPS does with float64."""
        real = torch.ones

        def ones(*args: Any, dtype: torch.dtype, **kwargs: Any) -> Tensor:
            if dtype == torch.float64:
                raise TypeError("Cannot convert a MPS Tensor to float64 dtype")
            return real(*args, dtype=dtype, **kwargs)

        monkeypatch.setattr(torch, "ones", ones)
        with pytest.raises(
            ConfigError, match=r"""cpu does not support 64-true: Cannot convert.*\(cure: precision="32-true"\)"""
        ):
            program(tiny_mlp(), "64-true").init(device="cpu")
        program(tiny_mlp(), "bf16-true").init(device="cpu")

    @pytest.mark.row("B1", "B6")
    def test_an_autocast_that_switches_itself_off(self, monkeypatch: pytest.MonkeyPatch):
        """torch warns and goes on in float32; here that is an error, and no warning."""

        def off(device: str, dtype: torch.dtype) -> Any:
            warnings.warn(
                f"In {device} autocast, but the target dtype is not supported. Disabling autocast.", stacklevel=1
            )
            return nullcontext()

        monkeypatch.setattr(torch.amp, "autocast", off)
        with pytest.raises(ConfigError, match="cpu does not support bf16-mixed: autocast computes in torch.float32"):
            program(tiny_mlp(), "bf16-mixed").init(device="cpu")

    def test_a_gpu_that_only_emulates_bfloat16(self, monkeypatch: pytest.MonkeyPatch):
        asked = []
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: asked.append(1) and False)
        for name in ("bf16-mixed", "bf16-true"):
            with pytest.raises(ConfigError, match=f"cuda does not support {name}: this GPU has no bfloat16 arithmetic"):
                precision.policy(name).check(torch.device("cuda"))
        assert len(asked) == 2

    def test_nothing_is_asked_of_a_device_that_computes_in_its_own(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(torch, "ones", None)
        precision.policy("32-true").check(CPU)


@pytest.mark.row("1.2", "4.3")
@pytest.mark.parametrize(
    ("cuda", "mps", "first"), [(True, True, "cuda"), (False, True, "mps"), (False, False, "cpu"), (True, False, "cuda")]
)
def test_devices_are_taken_in_order(monkeypatch: pytest.MonkeyPatch, cuda: bool, mps: bool, first: str):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert precision.auto_device() == torch.device(*(("cuda", 1) if first == "cuda" else (first,)))


@pytest.mark.cuda
@pytest.mark.parametrize("name", DTYPES)
def test_on_a_gpu(name: str):
    chosen = program(tiny_convnet(), name, ema=0.9)
    state = chosen.init(device="cuda")
    batch = ps.to_device(image_batch(), state)
    for _ in range(3):
        state, metrics = chosen.train_step(state, batch)
    assert {p.dtype for p in state.params.values()} == {DTYPES[name][0]}
    assert state.key.device.type == "cpu"
    assert {leaf.device.type for path, leaf in ps.tree.with_paths(state) if path != "key"} == {"cuda"}
    assert torch.isfinite(metrics["loss"].compute())


@pytest.mark.parametrize("precision", ["16-mixed", "16-true", "bf16-mixed", "32-true"])
def test_fit_says_that_a_cpu_is_slow_in_float16(precision: str, caplog: pytest.LogCaptureFixture):
    made = ps.program(torch.nn.Linear(2, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1), precision=precision)
    batch = (torch.ones(4, 2), torch.ones(4, 1))
    ps.fit(made.init(), [batch], made, epochs=1, progress=False)
    said = [record.getMessage() for record in caplog.records if "no fast float16" in record.getMessage()]
    assert len(said) == precision.startswith("16-")
    assert all(f"cure: 'bf{precision}'" in line for line in said)
