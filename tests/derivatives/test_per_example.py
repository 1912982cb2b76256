"""Gradients of single examples equal those of batches of one row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from derivatives_cases import CROSS_ENTROPY, TinyGPT, program, text_objective, texts
from helpers import assert_trees_close, tiny_convnet, tiny_mlp, vector_batch
from torch import Tensor, nn

import purestep as ps
from purestep.analysis import plain_functions
from purestep.errors import ConfigError, DataError, StateError, StepContractError

EXACT = {"rtol": 1e-12, "atol": 1e-12}


MASKS: list[Tensor] = []
AT: list[int] = []  # empty while masks are drawn, else the example and the next mask


class Recorded(nn.Module):
    """Dropout whose masks a test can read, or set for one example."""

    def forward(self, x: Tensor) -> Tensor:
        if AT:
            mask = MASKS[AT[1]][AT[0]]
            AT[1] += 1
        else:
            mask = torch.empty_like(x).bernoulli_(0.8)
            MASKS.append(ps.torch_ext.tracing.unwrapped(mask).clone())
        return x * mask / 0.8


def images(rows: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, 1, 8, 8, generator=generator), torch.arange(rows) % 3


def rows_of(batch: Any) -> list[Any]:
    return [tuple(leaf[i : i + 1] for leaf in batch) for i in range(len(batch[0]))]


def by_a_step(chosen: ps.Program, state: ps.TrainState, batch: Any) -> dict[str, Tensor]:
    """With SGD at a rate of 1, the gradient is the old weights minus the new ones."""
    new, _ = chosen.train_step(state, batch)
    return {name: old - new.params[name] for name, old in state.params.items()}


def frozen_mlp() -> nn.Module:
    net = tiny_mlp()
    net[0].bias.requires_grad_(False)
    return net


CASES = {
    "mlp": (tiny_mlp, CROSS_ENTROPY, lambda: vector_batch(7, dtype=torch.float64), {}),
    "frozen": (frozen_mlp, CROSS_ENTROPY, lambda: vector_batch(7), {}),
    "convnet": (lambda: tiny_convnet(dropout=0.0), CROSS_ENTROPY, images, {"keep_eval": ("1",)}),
    "gpt": (lambda: TinyGPT(lambda: nn.Dropout(0.0)), text_objective, texts, {}),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_gradients_equal_those_of_single_rows(name: str, chunk_size: int | None):
    net, objective, batch_of, options = CASES[name]
    chosen, batch = program(net(), objective, **options), batch_of()
    state = chosen.init(seed=3, device="cpu")
    found = ps.per_example(chosen, chunk_size=chunk_size)(state, batch)
    expected = [by_a_step(chosen, state, row) for row in rows_of(batch)]
    stacked = {name: torch.stack([each[name] for each in expected]) for name in expected[0]}
    assert_trees_close(found.grads, stacked, **EXACT)
    assert set(found.grads) == set(state.params)
    norms = torch.stack([ps.optim.global_norm(each) for each in expected])
    torch.testing.assert_close(found.norms, norms, **EXACT)
    losses = [chosen.train_step(state, row)[1]["loss"] for row in rows_of(batch)]
    torch.testing.assert_close(found.losses, torch.stack([loss.compute() for loss in losses]))
    only = ps.per_example(chosen, chunk_size=chunk_size, norms_only=True)(state, batch)
    assert only.grads == {}
    assert_trees_close(only._replace(grads=found.grads), found, **EXACT)


def test_the_batch_gradient_is_the_weighted_mean():
    chosen, (x, y) = program(TinyGPT(lambda: nn.Dropout(0.0)), text_objective), texts()
    y[0, 2:], y[1] = -100, -100
    state = chosen.init(device="cpu")
    found = ps.per_example(chosen)(state, (x, y))
    assert found.weights.tolist() == [2, 0, 7, 7, 7]
    assert float(found.norms[1]) == float(found.losses[1]) == 0
    weights = found.weights.double() / found.weights.sum()
    mean = {name: torch.einsum("n,n...->...", weights, grad) for name, grad in found.grads.items()}
    assert_trees_close(mean, by_a_step(chosen, state, (x, y)), **EXACT)


def test_each_example_has_its_own_dropout_mask():
    MASKS.clear()
    AT.clear()
    chosen, batch = program(TinyGPT(Recorded), text_objective), texts()
    state = chosen.init(device="cpu")
    found = ps.per_example(chosen)(state, batch)
    assert len(MASKS) == 4
    assert not torch.equal(MASKS[0][0], MASKS[0][1])
    for i, row in enumerate(rows_of(batch)):
        AT[:] = [i, 0]
        expected = by_a_step(chosen, state, row)
        assert_trees_close({name: grad[i] for name, grad in found.grads.items()}, expected, **EXACT)


def test_dropout_follows_the_states_key():
    chosen = program(TinyGPT(), text_objective)
    x, y = (leaf[:1].expand(4, -1) for leaf in texts())
    state = chosen.init(seed=1, device="cpu")
    before = torch.get_rng_state()
    norms = ps.per_example(chosen)(state, (x, y)).norms
    assert len(set(norms.tolist())) == 4
    assert torch.equal(ps.per_example(chosen)(state, (x, y)).norms, norms)
    other = state._replace(key=ps.rng.advance(state.key))
    assert not torch.equal(ps.per_example(chosen)(other, (x, y)).norms, norms)
    still = ps.per_example(chosen, train=False)(state, (x, y)).norms
    assert len(set(still.tolist())) == 1
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_half_precision_rounds_as_a_step_does(precision: str):
    net = TinyGPT(lambda: nn.Dropout(0.0))
    chosen, exact = program(net, text_objective, precision=precision), program(net, text_objective)
    state = chosen.init(device="cpu")
    found = ps.per_example(chosen)(state, texts())
    expected = ps.per_example(exact)(exact.init(device="cpu"), texts())
    torch.testing.assert_close(found.norms.double(), expected.norms, rtol=0.05, atol=0)
    assert found.grads["norm.weight"].dtype == state.params["norm.weight"].dtype


ATTENTION = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask": {"attn_mask": torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]], dtype=torch.bool)},
    "bias": {"attn_mask": torch.arange(12.0, dtype=torch.float64).view(4, 3) / 5},
    "scale": {"scale": 0.3},
    "gqa": {"enable_gqa": True},
}


@pytest.mark.parametrize("name", ATTENTION)
def test_plain_functions_is_torchs(name: str):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=generator, dtype=torch.float64)

    heads = 2 if name == "gqa" else 4
    q, k, v = draw(4, 4, 8), draw(heads, 3, 8), draw(heads, 3, 8)
    expected = nn.functional.scaled_dot_product_attention(q, k, v, **ATTENTION[name])
    with plain_functions.differentiable():
        found = nn.functional.scaled_dot_product_attention(q, k, v, **ATTENTION[name])
    torch.testing.assert_close(found, expected, **EXACT)


def test_context_and_values_without_rows_go_to_every_example():
    def objective(model: ps.Model, batch: Any, shift: Tensor) -> ps.Loss:
        error = (model(batch["x"]) - shift) * batch["factor"] * len(batch["name"])
        return ps.Loss(error.square().mean(), len(batch["x"]))

    chosen = program(nn.Linear(4, 3), objective)
    state = chosen.init(device="cpu")
    x = np.random.default_rng(0).normal(size=(4, 4))
    batch = {"x": x, "factor": torch.tensor(2.0, dtype=torch.float64), "name": "ab"}
    shift = torch.ones(3, dtype=torch.float64)
    found = ps.per_example(chosen)(state, batch, shift)
    new, _ = chosen.train_step(state, {**batch, "x": torch.as_tensor(x[2:3])}, shift)
    torch.testing.assert_close(found.grads["weight"][2], state.params["weight"] - new.params["weight"], **EXACT)


def test_the_function_can_be_mapped_over_states():
    chosen, batch = program(tiny_mlp()), vector_batch(5)
    states = [chosen.init(seed=0, device="cpu"), chosen.init(seed=1, device="cpu")]
    states[1] = states[1]._replace(params={name: p + 1 for name, p in states[1].params.items()})
    params = {name: torch.stack([s.params[name] for s in states]) for name in states[0].params}
    many = torch.func.vmap(lambda p: ps.per_example(chosen)(states[0]._replace(params=p), batch).grads)(params)
    for i, state in enumerate(states):
        expected = ps.per_example(chosen)(state, batch).grads
        assert_trees_close({name: grad[i] for name, grad in many.items()}, expected, **EXACT)


def test_a_model_of_transformers_computes_its_own_loss():
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 11, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    rates = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    net = GPT2LMHeadModel(GPT2Config(**sizes, **rates, bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM"))
    chosen = program(net, ps.hf_loss())
    state, tokens = chosen.init(device="cpu"), texts(3)[0]
    found = ps.per_example(chosen)(state, {"input_ids": tokens, "labels": tokens})
    expected = by_a_step(chosen, state, {"input_ids": tokens[1:2], "labels": tokens[1:2]})
    assert_trees_close({name: grad[1] for name, grad in found.grads.items()}, expected, rtol=1e-6, atol=1e-7)


class TestErrors:
    @pytest.mark.parametrize("norm", [nn.BatchNorm1d(8), nn.InstanceNorm1d(8, track_running_stats=True)])
    def test_statistics_of_the_batch(self, norm: nn.Module):
        chosen = program(nn.Sequential(nn.Linear(4, 8), norm, nn.Linear(8, 3)))
        with pytest.raises(StepContractError, match=r"per_example: 1: a \w+Norm1d in train mode .*keep_eval"):
            ps.per_example(chosen)(chosen.init(device="cpu"), vector_batch())

    def test_eval_mode_uses_running_statistics(self):
        chosen = program(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)))
        kept = program(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), keep_eval=("1",))
        state = chosen.init(device="cpu")
        found = ps.per_example(chosen, train=False)(state, vector_batch())
        assert_trees_close(found, ps.per_example(kept)(state, vector_batch()), **EXACT)

    @pytest.mark.parametrize(
        ("batch", "match"),
        [
            ((torch.ones(4, 4), torch.zeros(3, dtype=torch.long)), "3 and 4 rows"),
            ((torch.tensor(1.0), 2), "no tensor with rows"),
            ((torch.ones(0, 4), torch.zeros(0, dtype=torch.long)), "batch: the batch has no rows"),
            ((torch.ones(4, 4).to_sparse(), torch.zeros(4, dtype=torch.long)), "sparse"),
        ],
    )
    def test_batches_without_examples(self, batch: Any, match: str):
        chosen = program(tiny_mlp())
        with pytest.raises(DataError, match=match):
            ps.per_example(chosen)(chosen.init(device="cpu"), batch)

    def test_models_that_torch_cannot_map(self):
        class Reads(nn.Linear):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x) * (2 if x.sum().item() > 0 else 1)

        chosen = program(Reads(4, 3))
        with pytest.raises(StepContractError, match=r"per_example, .*\.item\(\)"):
            ps.per_example(chosen)(chosen.init(device="cpu"), vector_batch())

    def test_the_models_own_errors_pass(self):
        chosen = program(nn.Linear(5, 3))
        with pytest.raises(RuntimeError, match="shape"):
            ps.per_example(chosen)(chosen.init(device="cpu"), vector_batch())

    def test_arguments(self):
        chosen = program(tiny_mlp())
        with pytest.raises(ConfigError, match="chunk_size=0"):
            ps.per_example(chosen, chunk_size=0)
        with pytest.raises(ConfigError, match="no objective to differentiate"):
            ps.per_example(ps.Program(lambda state, batch: (state, {})))
        with pytest.raises(StateError, match="is a dict"):
            ps.per_example(chosen)({}, vector_batch())

    def test_several_processes(self):
        chosen = program(tiny_mlp())
        divided = chosen._replace(static=chosen.static._replace(stream=(1,)))
        for function in (ps.per_example, ps.gradient_noise_scale, ps.curvature.hessian):
            with pytest.raises(ConfigError, match="several processes"):
                function(divided)
        with pytest.raises(ConfigError, match="several processes"):
            ps.privacy.dp_sgd(divided, max_norm=1.0, noise_multiplier=1.0)
        piece = chosen.init(device="cpu")._replace(placement=(1,))
        with pytest.raises(StateError, match="the part of one of several processes"):
            ps.per_example(chosen)(piece, vector_batch())


@pytest.mark.compile
def test_compiled_equals_eager():
    chosen, batch = program(tiny_mlp()), vector_batch(7, dtype=torch.float64)
    state, function = chosen.init(device="cpu"), ps.per_example(chosen, chunk_size=4)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_trees_close(compiled(state, batch), function(state, batch), **EXACT)
