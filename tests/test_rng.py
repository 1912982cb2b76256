from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from purestep import rng
from purestep.data import random_state
from purestep.errors import ConfigError
from purestep.torch_ext import global_rng, tracing

PARTS = st.one_of(st.integers(-(2**63), 2**63 - 1), st.text(max_size=8))


def test_a_key_is_a_seed_and_a_count_of_calls_on_the_cpu():
    key = rng.key(7)
    assert key.tolist() == [7, 0]
    assert (key.dtype, key.device.type) == (torch.int64, "cpu")
    later = rng.advance(key)
    assert later.tolist() == [7, 1]
    assert rng.advance(later, 3).tolist() == [7, 4]
    assert key.tolist() == [7, 0]


def test_mix_is_what_it_was():
    """A change here changes every run that is resumed. splitmix64's first number from state 0 is a published one."""
    assert rng._splitmix64(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF
    assert rng.mix() == 0x9E3779B97F4A7C15 >> 1
    assert rng.mix(0, 1) == 3364290834513671632
    assert rng.mix("eval") == 3273691883051121294
    assert rng.mix(7, 3, "step") == 4638162081400048588


@settings(deadline=None)
@given(st.lists(PARTS, min_size=1, max_size=4))
def test_a_hash_is_a_valid_seed(parts: list[int | str]):
    assert 0 <= rng.mix(*parts) < 2**63


@settings(deadline=None)
@given(PARTS, PARTS)
def test_order_counts(a: int | str, b: int | str):
    if rng.mix(a) != rng.mix(b):
        assert rng.mix(a, b) != rng.mix(b, a)


def test_no_two_of_many_neighbours_meet():
    found = {rng.mix(seed, call) for seed in range(100) for call in range(100)}
    assert len(found) == 10_000


def test_every_bit_of_a_hash_is_even():
    bits = np.array([[rng.mix(seed, 0) >> bit & 1 for bit in range(63)] for seed in range(2000)])
    # 5 standard deviations of a fair coin: a stuck or lopsided bit is far outside.
    assert np.abs(bits.mean(axis=0) - 0.5).max() < 5 * 0.5 / np.sqrt(2000)


def test_streams_of_one_key_are_apart():
    key = rng.key(3)
    folded = {name: rng.fold_in(key, name) for name in ("data", "eval", 0, 1)}
    assert len({int(k[0]) for k in folded.values()}) == 4
    assert all(k.dtype == torch.int64 and k.shape == (2,) for k in folded.values())
    assert torch.equal(folded["data"], rng.fold_in(rng.key(3), "data"))
    assert not torch.equal(folded["data"], rng.fold_in(rng.key(4), "data"))
    assert not torch.equal(folded["data"], rng.fold_in(rng.advance(key), "data"))


def test_a_generator_repeats_and_is_nobody_elses():
    before = torch.get_rng_state()
    first = torch.randn(3, generator=rng.generator(rng.key(0), "masks"))
    again = torch.randn(3, generator=rng.generator(rng.key(0), "masks"))
    other = torch.randn(3, generator=rng.generator(rng.key(0), "order"))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(before, torch.get_rng_state())


def test_a_scope_draws_from_its_seed_and_leaves_no_trace():
    outside = torch.rand(1)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with rng.scoped(5):
        first = torch.rand(2)
    with rng.scoped(5, torch.device("cpu")):
        second = torch.rand(2)
    with rng.scoped(6):
        third = torch.rand(2)
    assert torch.equal(first, second)
    assert not torch.equal(first, third)
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    torch.manual_seed(0)
    assert torch.equal(torch.rand(1), outside)


def test_scopes_nest():
    with rng.scoped(1):
        torch.rand(1)
        middle = torch.get_rng_state()
        with rng.scoped(2):
            torch.rand(5)
        assert torch.equal(middle, torch.get_rng_state())


def test_a_scope_that_ends_in_an_error_leaves_no_trace():
    before = torch.get_rng_state()

    def fails() -> None:
        with rng.scoped(5):
            torch.rand(2)
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fails()
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("scoped", [rng.scoped, random_state.scoped], ids=["torch", "all"])
def test_ctrl_c_inside_a_scope_leaves_no_trace(scoped: Any):
    before = torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())

    def interrupted() -> None:
        torch.rand(2)
        if scoped is not rng.scoped:
            random.gauss(), np.random.randn()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), scoped(5):
        interrupted()
    assert (torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())) == before
    thread = threading.Thread(target=lambda: free.append(global_rng._LOCK[0].acquire(blocking=False)))
    free: list[bool] = []
    thread.start()
    thread.join()
    global_rng.replace_lock()  # the other thread has ended
    assert free == [True]


def test_states_see_a_single_draw():
    before = global_rng.torch_states()
    assert all(torch.equal(a, b) for a, b in zip(before, global_rng.torch_states(), strict=True))
    torch.rand(1)
    assert not all(torch.equal(a, b) for a, b in zip(before, global_rng.torch_states(), strict=True))


def test_in_a_graph_only_while_one_is_captured():
    assert not tracing.in_graph()
    with tracing.capturing():
        assert tracing.in_graph()
        with tracing.capturing():
            assert tracing.in_graph()
        assert tracing.in_graph()
    assert not tracing.in_graph()
    with pytest.raises(KeyError), tracing.capturing():
        raise KeyError
    assert not tracing.in_graph()


@pytest.mark.compile
def test_a_users_torch_compile_is_a_graph_too():
    inside = torch.compile(lambda x: x + 1 if tracing.in_graph() else x, backend="eager", fullgraph=True)
    assert inside(torch.zeros(())).item() == 1


@pytest.mark.cuda
def test_a_scope_of_a_gpu_leaves_no_trace_there():
    torch.cuda.init()
    before = torch.cuda.get_rng_state()
    with rng.scoped(5, torch.device("cuda", 0)):
        first = torch.rand(2, device="cuda")
    with rng.scoped(5, torch.device("cuda", 0)):
        assert torch.equal(first, torch.rand(2, device="cuda"))
    assert torch.equal(before, torch.cuda.get_rng_state())


def test_a_draw_may_give_more_than_tensors() -> None:
    """Attention on CUDA: flash attention returns None and numbers beside its tensors."""
    inputs = torch.empty(1, 2, 4, 8, device="meta", dtype=torch.bfloat16)
    with rng.scoped(1), tracing.replaying():
        out = torch.ops.aten._scaled_dot_product_flash_attention(inputs, inputs, inputs)
    assert out[0].shape == inputs.shape
    assert out[2] is None


def test_what_draws() -> None:
    aten = torch.ops.aten
    attention = aten._scaled_dot_product_efficient_attention.default
    q = torch.empty(1, 1, 4, 8, device="meta")
    assert tracing.is_random(aten.rand.default, ([3],), {})
    assert tracing.is_random(aten.native_dropout.default, (q, 0.5, True), {})
    assert not tracing.is_random(aten.add.Tensor, (q, q), {})
    assert tracing.is_random(attention, (q, q, q, None, True, 0.1), {})
    assert tracing.is_random(attention, (q, q, q, None, True), {"dropout_p": 0.1})
    assert not tracing.is_random(attention, (q, q, q, None, True, 0.0), {})
    assert not tracing.is_random(attention, (q, q, q, None, True), {})
    assert not tracing.is_random(aten._scaled_dot_product_cudnn_attention.default, (q, q, q, None, True, 0.0), {})
    assert tracing.is_random(aten._scaled_dot_product_flash_attention.default, (q, q, q, 0.5), {})
    assert not tracing.is_random(aten._scaled_dot_product_flash_attention.default, (q, q, q), {})


@pytest.mark.parametrize("seed", [1.5, "0", None, 2**63, -(2**63) - 1])
def test_a_seed_that_is_none_is_refused(seed: Any):
    with pytest.raises(ConfigError, match=r"rng.key: seed=.* must be an int in"):
        rng.key(seed)


def test_any_whole_number_is_a_seed():
    assert rng.key(-(2**63)).tolist() == [-(2**63), 0]
    assert rng.key(np.int32(7)).tolist() == [7, 0]
