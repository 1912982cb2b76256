"""The first things to see on a GPU, in this order: capture, random numbers in graphs, the scaler, attention dropout.

Without a GPU, `rigs/cuda_rehearsal/run.py` runs them on its stand-in, with graphs of aot_eager.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import Recurrent, assert_trees_close, no_waiting, tiny_convnet, tiny_mlp, vector_batch
from torch import Tensor, library, nn
from torch.utils.data import DataLoader, TensorDataset

import purestep as ps
from purestep import optim, schedules, tree
from purestep.errors import StepContractError

pytestmark = pytest.mark.cuda

CROSS_ENTROPY = ps.supervised(nn.CrossEntropyLoss())


def noisy(p: float = 0.5) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Dropout(p), nn.Linear(32, 3))


def full(module: nn.Module, **fields: Any) -> ps.Program:
    rate = schedules.warmup_cosine(peak=1e-2, warmup=3, total=50)
    adamw = optim.adamw(rate, weight_decay=0.1, mask=optim.decay_mask(module))
    return ps.program(module, CROSS_ENTROPY, optim.chain(optim.clip_by_global_norm(1.0), adamw), ema=0.9, **fields)


def on_cuda(batch: Any) -> Any:
    return tree.map(lambda leaf: leaf.cuda(), batch)


def stepped(step: Callable[..., Any], state: Any, batches: list[Any]) -> tuple[Any, list[float]]:
    seen: list[Any] = []
    for batch in batches:
        state, metrics = step(state, batch)
        seen.append(metrics["loss"])
    return state, [float(loss) for loss in seen]


BATCHES = [vector_batch(16, seed) for seed in range(4)] * 2


@library.custom_op("tests::waits", mutates_args=())
def waits(value: Tensor) -> Tensor:
    """The value, by way of the host."""
    return value.cpu().to(value.device).clone()


@waits.register_fake
def _(value: Tensor) -> Tensor:
    return torch.empty_like(value)


# --- capture ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuda_graph", [True, False], ids=["replayed", "donated"])
def test_a_captured_step_is_the_eager_step_and_that_of_the_cpu(cuda_graph: bool):
    program = full(tiny_mlp())
    state = program.init(device="cuda")
    before = ps.clone(state)
    step = ps.compile_step(program.train_step, donate=True, cuda_graph=cuda_graph)
    live, losses = stepped(step, state, on_cuda(BATCHES))
    eager, expected = stepped(program.train_step, state, on_cuda(BATCHES))
    _, of_the_cpu = stepped(program.train_step, program.init(), BATCHES)
    assert losses == pytest.approx(expected, rel=1e-4)
    assert losses == pytest.approx(of_the_cpu, rel=1e-3)
    assert_trees_close(ps.clone(live).params, eager.params, rtol=1e-3, atol=1e-5)
    assert_trees_close(state, before, exact=True)
    assert (step.graphs, int(live.updates)) == (1, len(BATCHES))


def test_batches_of_several_sizes_are_recorded_each_and_two_states_do_not_mix():
    program = full(tiny_mlp())
    step = ps.compile_step(program.train_step, donate=True, cuda_graph=True)
    first, second = program.init(device="cuda"), program.init(device="cuda")
    plain = program.init()
    for number in range(12):
        batch = vector_batch((16, 8, 5)[number % 3], number)
        first, one = step(first, on_cuda(batch))
        second, other = step(second, on_cuda(batch))
        plain, expected = program.train_step(plain, batch)
        assert float(one["loss"]) == float(other["loss"]) == pytest.approx(float(expected["loss"]), rel=1e-3)


def test_what_cannot_be_recorded_is_refused_and_leaves_torch_whole():
    def asks_the_host(model: Any, batch: Any) -> ps.Loss:
        x, y = batch
        loss = nn.functional.cross_entropy(model(x), y)
        waited = torch.ops.tests.waits(loss.detach())  # inductor removes a plain copy to the host and back
        return ps.Loss((loss + waited) / 2, torch.tensor(1.0, device=x.device), {})

    program = ps.program(tiny_mlp(), asks_the_host, optim.sgd(0.1))
    step, state = ps.compile_step(program.train_step, donate=True, cuda_graph=True), program.init(device="cuda")
    batch = on_cuda(vector_batch())
    for _ in range(2):
        state, _ = step(state, batch)
    with pytest.raises(StepContractError, match="CUDA graph"):
        step(state, batch)  # the third call is recorded
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert torch.rand(3, device="cuda").min() >= 0
    after, losses = stepped(full(tiny_mlp()).train_step, full(tiny_mlp()).init(device="cuda"), on_cuda(BATCHES))
    assert losses[-1] < losses[0]
    assert int(after.updates) == len(BATCHES)


def recorded(step: Any) -> list[bool] | None:
    """For each size of batch, whether its calls are replayed, while its state is alive; None if none ever is."""
    if step._replays is None:
        return None
    graphs = [graph for store in step._replays._stores.values() for graph in store.recorded.values()]
    return [graph.graph is not None for graph in graphs]


def by_way_of_the_host(model: Any, batch: Any) -> ps.Loss:
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    return ps.Loss((loss + loss.detach().cpu().to(loss.device)) / 2, torch.tensor(1.0, device=loss.device), {})


def by_an_operator(model: Any, batch: Any) -> ps.Loss:
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    return ps.Loss((loss + torch.ops.tests.waits(loss.detach())) / 2, torch.tensor(1.0, device=loss.device), {})


class TestRecordingByDefault:
    def run(self, objective: Any = CROSS_ENTROPY, **options: Any) -> tuple[list[bool] | None, list[float]]:
        program = ps.program(tiny_mlp(), objective, optim.sgd(0.1))
        step = ps.compile_step(program.train_step, donate=True, **options)
        found, losses = stepped(step, program.init(device="cuda"), on_cuda(BATCHES[:5]))
        _, expected = stepped(program.train_step, program.init(device="cpu"), BATCHES[:5])
        assert losses == pytest.approx(expected, rel=1e-3)
        assert int(found.updates) == 5
        return recorded(step), losses

    def test_a_donated_step_is_recorded_and_gives_the_numbers_of_one_that_is_not(self):
        replayed, losses = self.run()
        assert replayed == [True]
        assert self.run(cuda_graph=False) == (None, losses)

    def test_an_operator_of_the_users_own_is_not_recorded(self, caplog: pytest.LogCaptureFixture):
        assert self.run(by_an_operator)[0] == []
        assert not caplog.messages

    def test_what_cuda_refuses_runs_without_a_recording_and_says_so_once(self, caplog: pytest.LogCaptureFixture):
        assert self.run(by_way_of_the_host)[0] == [False]
        assert sum("runs without a CUDA graph" in line for line in caplog.messages) == 1

    def test_several_sizes_that_cuda_refuses_are_one_warning(self, caplog: pytest.LogCaptureFixture):
        program = ps.program(tiny_mlp(), by_way_of_the_host, optim.sgd(0.1))
        step = ps.compile_step(program.train_step, donate=True)
        stepped(step, program.init(device="cuda"), on_cuda([vector_batch(size) for size in (16, 8) for _ in range(4)]))
        assert sum("runs without a CUDA graph" in line for line in caplog.messages) == 1

    def test_intermediates_that_take_much_of_the_device_are_given_back(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("purestep.compile.cuda_graph._SHARE", 1 << 50)
        assert self.run()[0] == [False]
        assert self.run(cuda_graph=True)[0] == [True]


# --- recurrent layers -------------------------------------------------------------------------------------------------


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(4, 8, num_layers=2, batch_first=True),
    "gru": lambda: nn.GRU(4, 4, bidirectional=True, batch_first=True),
    "rnn": lambda: nn.RNN(4, 8, batch_first=True),
}


def sequences(length: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(6, length, 4, generator=torch.Generator().manual_seed(length))
    return x, (x.mean((1, 2)) > 0).long()


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_over_short_sequences_compile(name: str):
    torch.manual_seed(0)
    program = ps.program(Recurrent(RECURRENT[name]()), CROSS_ENTROPY, optim.sgd(0.1))
    if name != "rnn" and "stand-in" in torch.cuda.get_device_name():
        pytest.skip("CUDA's fused cells of this layer have no kernel on the CPU: tests/rigs/cuda_rehearsal compiles it")
    step = ps.compile_step(program.train_step, donate=True)
    batches = [sequences(7)] * 3
    _, losses = stepped(step, program.init(device="cuda"), on_cuda(batches))
    _, expected = stepped(program.train_step, program.init(device="cpu"), batches)
    assert losses == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", RECURRENT)
def test_long_sequences_are_refused_by_graphs(name: str):
    program = ps.program(Recurrent(RECURRENT[name]()), CROSS_ENTROPY, optim.sgd(0.1))
    with pytest.raises(StepContractError, match="(300|600) times.*eager mode"):
        ps.compile_step(program.train_step, donate=True)(program.init(device="cuda"), on_cuda(sequences(300)))


def test_long_sequences_are_trained_in_eager_mode():
    program, batch = ps.program(Recurrent(RECURRENT["rnn"]()), CROSS_ENTROPY, optim.sgd(0.1)), sequences(70)
    with pytest.warns(RuntimeWarning, match="repeat its cell 70 times"):
        result = ps.fit(program.init(device="cuda"), {"train": [batch] * 2}, program, epochs=1, progress=False)
    assert int(result.state.updates) == 2


# --- eager steps ------------------------------------------------------------------------------------------------------


class Normed(nn.Module):
    """Two layers with BatchNorm, whose buffers are float and int."""

    def __init__(self) -> None:
        super().__init__()
        # A bias before BatchNorm has no gradient but rounding.
        self.layers = nn.Sequential(nn.Linear(4, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.BatchNorm1d(16))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x))


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("ema", [0.9, ps.ema.average(0.9, warmup=True, buffers="average")], ids=["plain", "warm"])
def test_eager_steps_average_and_skip_as_on_the_cpu(ema: Any, donate: bool):
    adamw = optim.adamw(1e-2)
    program = ps.program(Normed(), CROSS_ENTROPY, adamw, ema=ema, nonfinite="skip")
    step = (ps.donate(program) if donate else program).train_step
    bad = vector_batch(16)
    bad = bad[0] * torch.nan, bad[1]
    batches = [*BATCHES[:3], bad, *BATCHES[3:5]]
    there, _ = stepped(step, program.init(device="cuda"), on_cuda(batches))
    here, _ = stepped(program.train_step, program.init(device="cpu"), batches)
    there = ps.clone(there)
    for name in ("params", "buffers", "ema", "opt_state"):
        found = tree.map(Tensor.cpu, getattr(there, name))
        assert_trees_close(found, getattr(here, name), rtol=1e-3, atol=1e-4)
    assert int(there.updates) == int(here.updates) == len(batches) - 1


# --- random numbers in graphs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuda_graph", [True, False], ids=["replayed", "donated"])
def test_every_step_draws_anew_and_a_key_draws_the_same(cuda_graph: bool):
    program = ps.program(noisy(), CROSS_ENTROPY, optim.sgd(0.0))
    step = ps.compile_step(program.train_step, donate=True, cuda_graph=cuda_graph)
    batches = on_cuda([vector_batch(16)] * 6)
    _, first = stepped(step, program.init(0, "cuda"), batches)
    torch.randn(7, device="cuda")  # somebody else draws
    before = torch.cuda.get_rng_state()
    _, again = stepped(step, program.init(0, "cuda"), batches)
    _, other = stepped(step, program.init(1, "cuda"), batches)
    assert len(set(first)) == len(first)
    assert first == again
    assert not set(first) & set(other)
    assert torch.equal(before, torch.cuda.get_rng_state())


# --- the loss scale ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuda_graph", [True, False], ids=["replayed", "donated"])
def test_an_overflow_in_float16_skips_the_update_and_halves_the_scale(cuda_graph: bool):
    net = nn.Linear(4, 3)
    program = ps.program(net, CROSS_ENTROPY, optim.adamw(1e-3), precision="16-mixed", nonfinite="skip", ema=0.9)
    step = ps.compile_step(program.train_step, donate=True, cuda_graph=cuda_graph)
    x, y = on_cuda(vector_batch(16))
    bad = torch.full_like(x, 6e4), y  # finite in float16; its products are not
    state, seen, weights = program.init(device="cuda"), [], []
    for batch in ((x, y), (x, y), (x, y), bad, (x, y)):  # the first two warm up, the third is recorded
        state, metrics = step(state, batch)
        seen.append((float(metrics["applied"]), float(state.scaler.scale), int(state.updates)))
        weights.append(state.params["weight"].detach().clone())
    applied, scales, updates = zip(*seen, strict=True)
    assert applied == (1.0, 1.0, 1.0, 0.0, 1.0)
    assert scales[3] == scales[2] / 2
    assert updates == (1, 2, 3, 3, 4)
    assert torch.equal(weights[2], weights[3])
    assert not torch.equal(weights[3], weights[4])


# --- attention dropout ------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """One head over eight places, with dropout on its weights."""

    def __init__(self, *, masked: bool) -> None:
        super().__init__()
        self.masked = masked
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (1, 16)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mask = torch.zeros(8, 8, device=x.device, dtype=q.dtype) if self.masked else None
        p = 0.5 if self.training else 0.0
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)
        return self.out(mixed.transpose(1, 2).flatten(2).mean(1))


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("masked", [True, False], ids=["masked", "no mask"])
@pytest.mark.parametrize("cuda_graph", [True, False], ids=["replayed", "donated"])
def test_attention_dropout_compiles_and_draws_anew(precision: str, masked: bool, cuda_graph: bool):
    program = ps.program(Attention(masked=masked), CROSS_ENTROPY, optim.sgd(0.0), precision=precision)
    step = ps.compile_step(program.train_step, donate=True, cuda_graph=cuda_graph)
    batch = torch.randn(4, 8, 16, device="cuda"), torch.arange(4, device="cuda") % 3
    runs = [stepped(step, program.init(seed, "cuda"), [batch] * 6)[1] for seed in (0, 0, 1)]
    assert all(math.isfinite(loss) for loss in runs[0])
    assert runs[0] == runs[1] != runs[2]
    assert len(set(runs[0])) > 3  # bfloat16 has few numbers


def test_attention_dropout_of_a_hugging_face_model():
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 1, "n_embd": 32, "n_head": 2, "vocab_size": 64, "n_positions": 16}
    ids = {"bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM"}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, attn_pdrop=0.5, **ids))
    program = ps.program(model, ps.hf_loss(), optim.adamw(1e-3))
    step = ps.compile_step(program.train_step, donate=True)
    ids = torch.arange(32, device="cuda").view(2, 16)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    _, losses = stepped(step, program.init(device="cuda"), [batch] * 5)
    assert all(math.isfinite(loss) for loss in losses)
    assert len(set(losses)) == 5


# --- fit --------------------------------------------------------------------------------------------------------------


def loaders() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(96, 4, generator=generator)
    data = TensorDataset(x, (x[:, 0] > 0).long())
    return {"train": DataLoader(data, batch_size=16, shuffle=True), "val": DataLoader(data, batch_size=32)}


FIELDS: dict[str, Any] = {"epochs": 2, "monitor": "val_loss", "progress": False}


@pytest.mark.parametrize(
    "how", ["auto", False, {"donate": True, "cuda_graph": True}], ids=["auto", "eager", "replayed"]
)
def test_fit_moves_a_state_to_the_device_and_trains_as_on_the_cpu(
    how: Any, tmp_path: Any, caplog: pytest.LogCaptureFixture
):
    program = full(tiny_mlp())
    state = program.init()
    before = ps.clone(state)
    result = ps.fit(state, loaders(), program, compile=how, snapshots=tmp_path / "run", **FIELDS)
    assert {leaf.device.type for path, leaf in tree.with_paths(result.state) if path != "key"} == {"cuda"}
    assert result.state.key.device.type == "cpu"
    assert sum("a copy of it is trained on cuda:0" in line for line in caplog.messages) == 1
    assert_trees_close(state, before, exact=True)
    expected = ps.fit(program.init(), loaders(), program, device="cpu", **FIELDS)
    assert set(map(str, {leaf.device for leaf in tree.leaves(expected.state)})) == {"cpu"}
    for name in ("train_loss", "val_loss"):
        assert result.history[name] == pytest.approx(expected.history[name], rel=2e-3)
    again = ps.fit(state, loaders(), program, compile=how, snapshots=tmp_path / "run", **FIELDS)
    assert_trees_close(ps.clone(again.state), ps.clone(result.state), exact=True)  # from the snapshot, on the device


def test_init_follows_the_module():
    for device in ("cpu", "cuda"):
        program = ps.program(tiny_convnet().to(device), CROSS_ENTROPY, optim.sgd(0.1), accumulate=2, ema=0.9)
        found = {leaf.device.type for path, leaf in tree.with_paths(program.init()) if path != "key"}
        assert found == {device}


def test_fit_trains_where_the_module_is_or_where_it_is_told():
    for place, device, expected in (("cuda", None, "cuda"), ("cuda", "cpu", "cpu"), ("cpu", "cuda:0", "cuda")):
        program = full(tiny_mlp().to(place))
        result = ps.fit(program.init(), loaders()["train"], program, epochs=1, device=device, progress=False)
        assert result.state.step.device.type == expected


# --- nothing waits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"accumulate": 2}, {"microbatches": 2}, {"precision": "16-mixed"}])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_no_step_waits_for_the_device(fields: dict[str, Any], compiled: bool):
    program = full(tiny_mlp(), **fields)
    step = ps.compile_step(program.train_step, donate=True) if compiled else program.train_step
    state, batch = program.init(device="cuda"), on_cuda(vector_batch())
    for _ in range(2):
        state, _ = step(state, batch)
    with no_waiting():
        for _ in range(2):
            state, _ = step(state, batch)
    assert int(state.step) == 4


class TestDerivatives:
    """Gradients of examples, products and noise equal those of the CPU, and the host does not wait."""

    def test_gradients_of_examples(self):
        chosen = ps.program(tiny_mlp(), CROSS_ENTROPY, optim.sgd(0.1))
        state, batch = chosen.init(device="cpu"), vector_batch(8)
        there = chosen.init(device="cuda"), on_cuda(batch)
        for function in (ps.per_example(chosen, chunk_size=3), ps.gradient_noise_scale(chosen)):
            with no_waiting():
                found = function(*there)
            assert_trees_close(tree.map(Tensor.cpu, found), function(state, batch), rtol=1e-4, atol=1e-5)

    def test_products(self):
        chosen = ps.program(tiny_mlp(), CROSS_ENTROPY, optim.sgd(0.1))
        state, batch = chosen.init(device="cpu"), vector_batch(8)
        there = chosen.init(device="cuda"), on_cuda(batch)
        product = ps.curvature.hessian(chosen)
        with no_waiting():
            found = product(*there, there[0].params)
        assert_trees_close(tree.map(Tensor.cpu, found), product(state, batch, state.params), rtol=1e-4, atol=1e-5)
        largest = ps.curvature.eigenvalues(lambda v: product(*there, v), there[0].params)
        expected = ps.curvature.eigenvalues(lambda v: product(state, batch, v), state.params)
        torch.testing.assert_close(largest.values, expected.values, rtol=1e-3, atol=1e-4)

    def test_private_steps(self):
        chosen = ps.program(tiny_mlp(), CROSS_ENTROPY, optim.sgd(0.1))
        batch = vector_batch(8)
        silent = ps.privacy.dp_sgd(chosen, max_norm=1.0, noise_multiplier=0.0, chunk_size=3)
        state, given = silent.init(device="cuda"), on_cuda(batch)
        with no_waiting():
            found, _ = silent.train_step(state, given)
        expected, _ = silent.train_step(silent.init(device="cpu"), batch)
        assert_trees_close(tree.map(Tensor.cpu, found.params), expected.params, rtol=1e-4, atol=1e-5)
        noised = ps.privacy.dp_sgd(chosen, max_norm=1.0, noise_multiplier=2.0)
        one, two = (noised.train_step(state, given)[0].params["0.weight"] for _ in range(2))
        assert torch.equal(one, two)
        assert not torch.equal(one, found.params["0.weight"])
