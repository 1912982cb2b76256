"""The algebra and its parts: hand-computed values, masks and groups, hyperparameters as state, dtypes, messages."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import assert_trees_close, count_graphs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import purestep as ps
from purestep import optim, tree
from purestep.errors import ConfigError, StateError, StepContractError
from purestep.optim import Transform
from purestep.types import Empty, Params

W = {"w": torch.tensor([1.0, -2.0])}
G = {"w": torch.tensor([3.0, 4.0])}


def updated(tx: Transform, grads: Params, params: Params, steps: int = 1) -> Params:
    """The last of `steps` updates with the same gradient and parameters."""
    state = tx.init(params)
    updates: Params = {}
    for _ in range(steps):
        updates, state = tx.update(grads, state, params)
    return updates


def assert_update(tx: Transform, expected: list[float], *, steps: int = 1) -> None:
    torch.testing.assert_close(updated(tx, G, W, steps)["w"], torch.tensor(expected), rtol=1e-6, atol=1e-7)


# ---------------------------------------------------------------------------------------------------- the algebra


def test_a_chain_applies_from_left_to_right() -> None:
    clip_then_scale = optim.chain(optim.clip_by_value(1.0), optim.scale(10.0))
    scale_then_clip = optim.chain(optim.scale(10.0), optim.clip_by_value(1.0))
    assert_update(clip_then_scale, [10.0, 10.0])
    assert_update(scale_then_clip, [1.0, 1.0])


def test_a_chain_of_nothing_is_the_identity() -> None:
    tx = optim.chain()
    assert tx.init(W) == ()
    assert tx.elementwise
    assert_update(tx, [3.0, 4.0])
    assert_update(optim.identity(), [3.0, 4.0])


def test_a_chain_is_elementwise_when_all_its_parts_are() -> None:
    assert optim.chain(optim.scale(1.0), optim.trace(0.9)).elementwise
    assert not optim.chain(optim.scale(1.0), optim.scale_by_trust_ratio()).elementwise
    assert not optim.masked(optim.scale_by_trust_ratio(), "w").elementwise
    assert not optim.partition({"all": optim.scale_by_trust_ratio()}, [("", "all")]).elementwise


def test_a_state_of_another_chain_is_refused() -> None:
    tx = optim.chain(optim.scale(1.0), optim.scale(1.0))
    with pytest.raises(StateError, match=r"opt_state: the chain has 2 transforms, the state 1 parts"):
        tx.update(G, (Empty(),), W)


def test_apply_updates_adds_and_keeps_the_dtype_of_the_parameter() -> None:
    params = {"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.ones((), dtype=torch.float32)}
    updates = {"a": torch.full((2,), 2.0**-7), "b": torch.tensor(0.5, dtype=torch.float64)}
    new = optim.apply_updates(params, updates)
    assert new["a"].dtype == torch.bfloat16
    assert new["b"].dtype == torch.float32
    assert new["a"].tolist() == [1 + 2**-7] * 2
    assert new["b"].item() == 1.5


# -------------------------------------------------------------------------------------------------------- clipping


def test_clip_by_global_norm_is_that_of_torch() -> None:
    grads = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}
    twins = [nn.Parameter(torch.zeros_like(g)) for g in grads.values()]
    for twin, g in zip(twins, grads.values(), strict=True):
        twin.grad = g.clone()
    torch.nn.utils.clip_grad_norm_(twins, 2.5)
    found = updated(optim.clip_by_global_norm(2.5), grads, grads)
    for name, twin in zip(found, twins, strict=True):
        torch.testing.assert_close(found[name], twin.grad, rtol=1e-7, atol=0.0)
    torch.testing.assert_close(found["a"][0], torch.tensor(3.0 * 2.5 / (5.0 + 1e-6)))


def test_gradients_within_the_norm_are_left_exactly_as_they_are() -> None:
    assert torch.equal(updated(optim.clip_by_global_norm(5.1), G, W)["w"], G["w"])


def test_a_gradient_that_is_not_finite_is_not_hidden_by_clipping() -> None:
    for bad in (math.nan, math.inf):
        grads = {"w": torch.tensor([bad, 1.0])}
        assert not bool(updated(optim.clip_by_global_norm(1.0), grads, W)["w"].isfinite().all())


def test_clipping_takes_a_tensor_for_its_bound() -> None:
    assert_update(optim.clip_by_global_norm(torch.tensor(1.0)), [0.6, 0.8])
    assert_update(optim.clip_by_value(torch.tensor(3.5)), [3.0, 3.5])


def test_clip_by_value_is_that_of_torch() -> None:
    twin = nn.Parameter(torch.zeros(3))
    twin.grad = torch.tensor([-2.0, 0.25, 7.0])
    grads = {"w": twin.grad.clone()}
    torch.nn.utils.clip_grad_value_([twin], 0.5)
    assert torch.equal(updated(optim.clip_by_value(0.5), grads, grads)["w"], twin.grad)


def test_adaptive_clipping_bounds_each_unit_by_its_weights() -> None:
    params = {
        "linear": torch.tensor([[3.0, 4.0], [0.0, 0.0]]),
        "conv": torch.ones(1, 1, 2, 2),
        "bias": torch.tensor([6.0, 8.0]),
        "gain": torch.tensor(2.0),
    }
    grads = {
        "linear": torch.tensor([[30.0, 40.0], [3.0, 4.0]]),  # norms 50 and 5, limits 0.5 and 0.1 * eps
        "conv": torch.full((1, 1, 2, 2), 10.0),  # norm 20, limit 0.2
        "bias": torch.tensor([0.3, 0.4]),  # norm 0.5, limit 1: as it is
        "gain": torch.tensor(-5.0),  # norm 5, limit 0.2
    }
    found = updated(optim.adaptive_grad_clip(0.1, eps=1e-3), grads, params)
    expected = {
        "linear": torch.tensor([[0.3, 0.4], [0.6e-4, 0.8e-4]]),
        "conv": torch.full((1, 1, 2, 2), 0.1),
        "bias": grads["bias"],
        "gain": torch.tensor(-0.2),
    }
    assert_trees_close(found, expected, rtol=1e-5, atol=0.0)


def test_adaptive_clipping_of_no_gradient_is_no_gradient() -> None:
    zero = {"w": torch.zeros(3, 2)}
    assert torch.equal(updated(optim.adaptive_grad_clip(0.1), zero, {"w": torch.ones(3, 2)})["w"], zero["w"])


@pytest.mark.parametrize("size", [7, 64 * 1024, 64 * 1024 + 3, 3_000_000])
def test_the_global_norm_is_accurate_at_every_size(size: int) -> None:
    leaf = torch.randn(size)
    exact = torch.linalg.vector_norm(leaf.double())
    assert abs(optim.global_norm({"w": leaf}).double() / exact - 1) < 1e-6


def test_one_running_float32_sum_would_not_be_accurate() -> None:
    """The planted fault: what torch does on a CPU for one large leaf."""
    leaf = torch.randn(3_000_000)
    naive = torch.linalg.vector_norm(leaf)
    assert abs(naive.double() / torch.linalg.vector_norm(leaf.double()) - 1) > 1e-6


def test_the_global_norm_of_any_layout_and_dtype() -> None:
    leaf = torch.randn(300, 400)
    exact = torch.linalg.vector_norm(leaf.double()).float()
    for other in (leaf.t(), leaf.view(300, 20, 20, 1).to(memory_format=torch.channels_last)):
        torch.testing.assert_close(optim.global_norm({"w": other}), exact, rtol=1e-6, atol=0.0)
    assert optim.global_norm({}).item() == 0.0
    assert optim.global_norm({"w": torch.zeros(0)}).item() == 0.0
    mixed = {"a": torch.tensor([3.0], dtype=torch.float64), "b": torch.tensor([4.0], dtype=torch.float16)}
    norm = optim.global_norm(mixed)
    assert norm.dtype == torch.float64
    assert norm.item() == 5.0


def test_the_global_norm_of_half_precision_does_not_overflow() -> None:
    leaf = torch.full((1000,), 300.0, dtype=torch.float16)  # its sum of squares is 9e7, beyond 65504
    norm = optim.global_norm({"w": leaf})
    assert norm.dtype == torch.float32
    torch.testing.assert_close(norm, torch.tensor(300.0 * math.sqrt(1000)))


# ------------------------------------------------------------------------------------------------ rate, decay, momentum


def test_the_learning_rate_is_that_of_the_update_it_is_reported_with() -> None:
    tx = optim.scale_by_learning_rate(lambda count: 0.5 / (count + 1))
    state = tx.init(W)
    assert state.learning_rate.item() == 0.5
    for count in range(3):
        updates, state = tx.update(G, state, W)
        rate = 0.5 / (count + 1)
        torch.testing.assert_close(updates["w"], -rate * G["w"])
        assert optim.hyperparams(state)["learning_rate"].item() == pytest.approx(rate)
        assert state.step.item() == count + 1


def test_a_learning_rate_in_a_tensor_is_copied_into_the_state() -> None:
    rate = torch.tensor(0.5)
    state = optim.scale_by_learning_rate(rate).init(W)
    rate.fill_(9.0)
    assert state.learning_rate.item() == 0.5


def test_a_float64_rate_promotes_no_parameter() -> None:
    tx = optim.scale_by_learning_rate(torch.tensor(0.1, dtype=torch.float64))
    grads = {"scalar": torch.tensor(1.0), "vector": torch.ones(2), "half": torch.ones(2, dtype=torch.bfloat16)}
    for name, update in updated(tx, grads, grads).items():
        assert update.dtype == grads[name].dtype


def test_a_rate_is_not_rounded_to_the_parameters_sixteen_bits() -> None:
    grads = {"w": torch.full((1,), 1.2890625, dtype=torch.bfloat16)}
    rate = torch.tensor(0.3)
    found = updated(optim.scale_by_learning_rate(rate), grads, grads)["w"]
    assert torch.equal(found, (grads["w"].float() * -rate).bfloat16())
    assert not torch.equal(found, grads["w"] * -rate.bfloat16()), "the case must tell the two apart"


def test_decayed_weights_are_added() -> None:
    assert_update(optim.add_decayed_weights(0.5), [3.5, 3.0])
    assert_update(optim.add_decayed_weights(torch.tensor(0.5)), [3.5, 3.0])
    assert_update(optim.add_decayed_weights(0.5, mask={"w": False}), [3.0, 4.0])


def test_trace_sums_with_decay() -> None:
    assert_update(optim.trace(0.5), [3.0, 4.0])
    assert_update(optim.trace(0.5), [3.0 * 1.75, 4.0 * 1.75], steps=3)
    assert_update(optim.trace(torch.tensor(0.5)), [3.0 * 1.75, 4.0 * 1.75], steps=3)
    assert_update(optim.trace(0.5, nesterov=True), [3.0 * 1.875, 4.0 * 1.875], steps=3)


def test_trace_does_not_dampen_the_first_gradient() -> None:
    assert_update(optim.trace(0.5, dampening=0.25), [3.0, 4.0])
    assert_update(optim.trace(0.5, dampening=0.25), [3.0 * 1.25, 4.0 * 1.25], steps=2)
    assert_update(optim.trace(0.5, dampening=torch.tensor(0.25)), [3.0 * 1.25, 4.0 * 1.25], steps=2)


def test_inverse_time_divides_by_the_updates_done() -> None:
    assert_update(optim.scale_by_inverse_time(0.5), [1.5, 2.0], steps=3)


# --------------------------------------------------------------------------------------------------- masks and groups

P = {"encoder.weight": torch.ones(2, 2), "encoder.bias": torch.ones(2), "head.weight": torch.ones(1, 2)}


@pytest.mark.parametrize(
    "mask",
    [
        {"encoder.weight": True, "encoder.bias": False, "head.weight": False, "frozen.weight": True},
        lambda params: {name: name == "encoder.weight" for name in params},
        r"^encoder\.weight$",
    ],
    ids=["dict", "function", "expression"],
)
def test_masked_changes_what_is_selected(mask: Any) -> None:
    found = updated(optim.masked(optim.scale(0.0), mask), P, P)
    assert list(found) == list(P), "the order of the parameters stays"
    assert {name: bool(u.any()) for name, u in found.items()} == {
        "encoder.weight": False,
        "encoder.bias": True,
        "head.weight": True,
    }


def test_a_list_is_no_mask() -> None:
    with pytest.raises(
        ConfigError, match=r"mask: it is a list, .* \(cure: mask=optim.decay_mask\(model\), \{\"w\": True"
    ):
        optim.masked(optim.scale(0.0), ["w"]).init({"w": torch.ones(2)})  # type: ignore[arg-type]


@pytest.mark.parametrize("mask", [lambda name, p: p.ndim > 1, lambda p: p.ndim > 1])
def test_a_function_of_one_parameter_is_no_mask(mask: Any) -> None:
    with pytest.raises(ConfigError, match=r"called with the dict .* fails: .*\(cure: mask=optim.decay_mask\(model\)"):
        optim.masked(optim.scale(0.0), mask).init({"w": torch.ones(2)})


def test_masked_has_state_for_what_is_selected_alone() -> None:
    state = optim.masked(optim.trace(0.9), "bias").init(P)
    assert tree.paths(state) == ["inner/trace/encoder.bias"]
    assert state.selected == {"encoder.bias": Empty()}


def test_a_mask_is_resolved_at_init_and_never_again() -> None:
    calls: list[int] = []

    def mask(params: Params) -> dict[str, bool]:
        calls.append(1)
        return {name: p.ndim > 1 for name, p in params.items()}

    tx = optim.masked(optim.scale(0.0), mask)
    state = tx.init(P)
    flat = {name: p.flatten() for name, p in P.items()}
    updates, _ = tx.update(flat, state, flat)
    assert len(calls) == 1
    assert {name: bool(u.any()) for name, u in updates.items()} == {
        "encoder.weight": False,
        "encoder.bias": True,
        "head.weight": False,
    }


def test_a_mask_that_selects_nothing_does_nothing() -> None:
    tx = optim.masked(optim.trace(0.9), dict.fromkeys(P, False))
    state = tx.init(P)
    assert tree.leaves(state) == []
    assert_trees_close(tx.update(P, state, P)[0], P, exact=True)


def test_a_mask_that_leaves_parameters_out_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"mask: it has no entry for encoder.bias, head.weight \(cure: mask=\{\*\*"):
        optim.masked(optim.scale(0.0), {"encoder.weight": True}).init(P)


def test_an_expression_that_matches_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"mask: 'decoder' matches no parameter .*nearest names are 'encoder"):
        optim.masked(optim.scale(0.0), "decoder").init(P)


def test_a_state_of_other_parameters_is_refused() -> None:
    tx = optim.masked(optim.scale(0.0), "weight")
    with pytest.raises(StateError, match=r"encoder.weight: the optimizer state belongs to other parameters"):
        tx.update(W, tx.init(P), W)


def test_freeze_gives_zero_updates() -> None:
    found = updated(optim.freeze(r"^encoder"), P, P)
    assert {name: bool(u.any()) for name, u in found.items()} == {
        "encoder.weight": False,
        "encoder.bias": False,
        "head.weight": True,
    }


@pytest.mark.parametrize(
    "labels",
    [
        {"encoder.weight": "slow", "encoder.bias": "slow", "head.weight": "fast", "frozen.weight": "none"},
        [(r"^encoder\.", "slow"), ("", "fast")],
        lambda params: {name: "fast" if name.startswith("head") else "slow" for name in params},
    ],
    ids=["dict", "rules", "function"],
)
def test_partition_gives_each_group_its_transform(labels: Any) -> None:
    tx = optim.partition({"slow": optim.scale(0.5), "fast": optim.scale(2.0)}, labels)
    found = updated(tx, P, P)
    assert list(found) == list(P)
    assert {name: u.flatten()[0].item() for name, u in found.items()} == {
        "encoder.weight": 0.5,
        "encoder.bias": 0.5,
        "head.weight": 2.0,
    }


def test_a_group_without_parameters_has_no_state() -> None:
    tx = optim.partition({"all": optim.scale(2.0), "none": optim.trace(0.9)}, [("", "all")])
    state = tx.init(P)
    assert tree.leaves(state) == []
    assert updated(tx, P, P)["head.weight"].flatten()[0].item() == 2.0


def test_clipping_inside_a_group_sees_that_group_alone() -> None:
    clip = optim.clip_by_global_norm(1.0)
    tx = optim.partition({"a": clip, "b": optim.identity()}, {"x": "a", "y": "a", "z": "b"})
    grads = {"x": torch.tensor([3.0]), "y": torch.tensor([4.0]), "z": torch.tensor([100.0])}
    found = updated(tx, grads, grads)
    assert [round(u.item(), 4) for u in found.values()] == [0.6, 0.8, 100.0]


def test_a_parameter_without_label_is_refused() -> None:
    tx = optim.partition({"slow": optim.scale(0.5)}, [(r"^encoder\.", "slow")])
    with pytest.raises(
        ConfigError, match=r'head.weight: no label for this parameter \(cure: add \("", "slow"\) as the last'
    ):
        tx.init(P)


def test_a_label_without_transform_is_refused() -> None:
    tx = optim.partition({"slow": optim.scale(0.5)}, [("", "fast")])
    with pytest.raises(ConfigError, match=r"encoder.weight: no transform for label 'fast' \(cure: one of 'slow'\)"):
        tx.init(P)


def test_labels_tell_apart_what_is_treated_differently() -> None:
    tx = optim.chain(
        optim.add_decayed_weights(0.1, mask="weight"),
        optim.partition({"a": optim.scale(1.0), "b": optim.scale(2.0)}, [("head", "b"), ("", "a")]),
    )
    labels = tx.labels(P)
    assert list(labels) == list(P)
    assert len(set(labels.values())) == 3
    same = optim.chain(optim.trace(0.9), optim.scale(1.0)).labels(P)
    assert len(set(same.values())) == 1
    assert all(isinstance(hash(label), int) for label in labels.values())


class ChannelNorm(nn.Module):
    """A norm of someone's own, with weights of two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cls_token = nn.Parameter(torch.ones(1, 1, 4))
        self.pos_embed = nn.Parameter(torch.ones(1, 5, 4))
        self.proj = nn.Conv2d(3, 4, 2)
        self.norms = nn.ModuleList([nn.LayerNorm((2, 2)), nn.BatchNorm2d(4), nn.GroupNorm(2, 4), ChannelNorm()])
        self.embed = nn.Embedding(3, 4)
        self.head = nn.Linear(4, 3)
        self.head.weight = self.embed.weight


def test_decay_mask_spares_biases_norms_and_vectors() -> None:
    mask = optim.decay_mask(Patches())
    decayed = {name for name, keep in mask.items() if keep}
    assert decayed == {"cls_token", "pos_embed", "proj.weight", "embed.weight", "head.weight"}
    assert set(mask) == {name for name, _ in Patches().named_parameters(remove_duplicate=False)}


def test_decay_mask_skips_names_and_parts_of_names() -> None:
    mask = optim.decay_mask(Patches(), skip=("cls_token", "pos_embed", "embed"))
    assert {name for name, keep in mask.items() if keep} == {"proj.weight"}  # the head is the embedding
    assert optim.decay_mask(Patches(), skip=("proj.weight",))["proj.weight"] is False


@pytest.mark.parametrize("name", ["head", "head.weight", "embed.weight"])
def test_decay_mask_skips_a_tied_parameter_by_any_of_its_names(name: str) -> None:
    mask = optim.decay_mask(Patches(), skip=(name,))
    assert (mask["embed.weight"], mask["head.weight"]) == (False, False)
    assert mask["proj.weight"]


def test_decay_mask_refuses_a_name_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"no parameter is named 'cls_tokn' \(cure: skip=\(\"cls_token\",\)\)"):
        optim.decay_mask(Patches(), skip=("cls_tokn",))


# ------------------------------------------------------------------------------------------- hyperparameters as state


def adam_like(learning_rate: Any = 1e-3, *, b1: Any = 0.9, weight_decay: Any = 0.0, mask: Any = None) -> Transform:
    return optim.chain(
        optim.scale_by_adam(b1),
        optim.add_decayed_weights(weight_decay, mask=mask),
        optim.scale_by_learning_rate(learning_rate),
    )


def test_injected_numbers_give_the_updates_of_constants() -> None:
    options: dict[str, Any] = {"learning_rate": 0.1, "b1": 0.5, "weight_decay": 0.25, "mask": {"w": True}}
    injected = optim.inject(adam_like)(**options)
    torch.testing.assert_close(updated(injected, G, W, 3), updated(adam_like(**options), G, W, 3))
    assert set(injected.init(W).hyperparams) == {"learning_rate", "b1", "weight_decay"}


def test_injected_numbers_have_names() -> None:
    with pytest.raises(ConfigError, match=r"^inject\(adamw\): 0\.1 is passed by position \(cure: pass each .* by name"):
        optim.inject(ps.optim.adamw)(0.1, weight_decay=0.0)


def test_injected_schedules_are_followed() -> None:
    tx = optim.inject(adam_like)(weight_decay=lambda count: 1.0 * (count < 1), learning_rate=1.0)
    still = {"w": torch.zeros(2)}
    state = tx.init(W)
    first, state = tx.update(still, state, W)
    second, state = tx.update(still, state, W)
    assert first["w"].tolist() == [-1.0, 2.0]
    assert second["w"].tolist() == [0.0, 0.0]
    assert state.scheduled == {"weight_decay": Empty()}


def test_a_leaf_that_is_set_counts_from_the_next_update_and_the_old_state_stays() -> None:
    tx = optim.inject(optim.scale_by_learning_rate)(learning_rate=0.5)
    state = tx.init(W)
    changed = optim.set_hyperparams(state, learning_rate=0.25)
    torch.testing.assert_close(tx.update(G, changed, W)[0]["w"], -0.25 * G["w"])
    torch.testing.assert_close(tx.update(G, state, W)[0]["w"], -0.5 * G["w"])
    assert optim.hyperparams(changed)["learning_rate"].item() == 0.25


def test_injected_numbers_out_of_range_are_refused_when_the_transform_is_made() -> None:
    with pytest.raises(ConfigError, match=r"b1=1.5"):
        optim.inject(adam_like)(b1=1.5)


def test_set_hyperparams_reaches_every_leaf_of_that_name() -> None:
    inner = optim.inject(optim.scale)(factor=1.0)
    tx = optim.chain(optim.partition({"a": inner, "b": optim.masked(inner, "head")}, [("enc", "a"), ("", "b")]))
    state = optim.set_hyperparams(tx.init(P), factor=3.0)
    updates, _ = tx.update(P, state, P)
    assert all(u.flatten()[0].item() == 3.0 for u in updates.values())
    assert {name: value.item() for name, value in optim.hyperparams(state).items()} == {
        "a/factor": 3.0,
        "b/factor": 3.0,
    }


def test_set_hyperparams_reaches_one_group_by_its_name() -> None:
    inner = optim.inject(optim.scale)(factor=1.0)
    nested = optim.partition({"top": inner, "rest": inner}, [("weight", "top"), ("", "rest")])
    state = optim.partition({"a": inner, "b": nested}, [("head", "a"), ("", "b")]).init(P)

    def found(**values: Any) -> dict[str, float]:
        new = optim.set_hyperparams(state, **values)
        return {name: value.item() for name, value in optim.hyperparams(new).items()}

    assert found(**{"b/top/factor": 3.0}) == {"a/factor": 1.0, "b/top/factor": 3.0, "b/rest/factor": 1.0}
    assert found(**{"a/factor": 2.0}, factor=5.0) == {"a/factor": 2.0, "b/top/factor": 5.0, "b/rest/factor": 5.0}
    with pytest.raises(
        ConfigError, match=r"c/factor is not a leaf.*cure: one of a/factor, b/top/factor, b/rest/factor, or"
    ):
        found(**{"c/factor": 2.0})
    with pytest.raises(ConfigError, match=r"b/factor is not a leaf of this state"):
        found(**{"b/factor": 2.0})


def test_a_group_with_a_schedule_does_not_keep_another_from_being_set() -> None:
    rate = optim.inject(optim.scale_by_learning_rate)
    groups = {"a": rate(learning_rate=lambda count: 0.1 + 0.0 * count), "b": rate(learning_rate=0.5)}
    state = optim.partition(groups, [("enc", "a"), ("", "b")]).init(P)
    new = optim.set_hyperparams(state, **{"b/learning_rate": 0.25})
    assert optim.hyperparams(new)["b/learning_rate"].item() == 0.25
    with pytest.raises(ConfigError, match=r"a/learning_rate follows a schedule"):
        optim.set_hyperparams(state, **{"a/learning_rate": 0.25})


def test_set_hyperparams_refuses_what_is_no_leaf() -> None:
    with pytest.raises(
        ConfigError, match=r"b2 is not a leaf of this state \(cure: optim.inject\(optim.adamw\)\(b2=...\)\)"
    ):
        optim.set_hyperparams(adam_like().init(W), b2=0.5)


def test_set_hyperparams_of_a_train_state_says_which_part_to_pass() -> None:
    tx = optim.inject(optim.adamw)(learning_rate=0.5)
    state = ps.program(nn.Linear(2, 1), ps.supervised(nn.MSELoss()), tx).init()
    cure = r"cure: pass state\.opt_state: .*set_hyperparams\(state\.opt_state, learning_rate=\.\.\., b1=\.\.\.\)\)"
    with pytest.raises(ConfigError, match=rf"set_hyperparams: opt_state is a TrainState \({cure}"):
        optim.set_hyperparams(state, learning_rate=0.25, b1=0.5)
    state = state._replace(opt_state=optim.set_hyperparams(state.opt_state, learning_rate=0.25))
    assert optim.hyperparams(state)["learning_rate"].item() == 0.25


def test_set_hyperparams_refuses_what_a_schedule_fills() -> None:
    tx = optim.inject(optim.scale_by_learning_rate)(learning_rate=lambda count: 0.1 + 0.0 * count)
    number = optim.inject(optim.scale_by_learning_rate)(learning_rate=0.5)
    for found in (tx, optim.chain(tx, number), optim.chain(number, tx)):
        with pytest.raises(ConfigError, match=r"learning_rate follows a schedule"):
            optim.set_hyperparams(found.init(W), learning_rate=0.5)


def test_hyperparams_below_a_partition_carry_the_label() -> None:
    rate = optim.scale_by_learning_rate
    tx = optim.chain(optim.trace(0.9), optim.partition({"a": rate(0.5), "b": rate(0.25)}, [("enc", "a"), ("", "b")]))
    found = {name: value.item() for name, value in optim.hyperparams(tx.init(P)).items()}
    assert found == {"a/learning_rate": 0.5, "b/learning_rate": 0.25}


@pytest.mark.compile
def test_a_leaf_that_is_set_does_not_recompile() -> None:
    tx = optim.inject(adam_like)(learning_rate=0.1, weight_decay=0.1)
    step = torch.compile(tx.update, fullgraph=True, backend="eager")
    state = tx.init(W)
    with count_graphs() as graphs:
        for rate in (0.1, 0.2, 0.3):
            state = optim.set_hyperparams(state, learning_rate=rate)
            eager = tx.update(G, state, W)
            assert_trees_close(step(G, state, W), eager)
            state = eager[1]
        assert graphs() == 1


# ------------------------------------------------------------------------------------------- every part: purity, dtypes

PARTS: dict[str, Callable[[], Transform]] = {
    "identity": optim.identity,
    "scale": lambda: optim.scale(0.5),
    "scale tensor": lambda: optim.scale(torch.tensor(0.5, dtype=torch.float64)),
    "set_to_zero": optim.set_to_zero,
    "clip_by_global_norm": lambda: optim.clip_by_global_norm(0.1),
    "clip_by_value": lambda: optim.clip_by_value(0.1),
    "adaptive_grad_clip": lambda: optim.adaptive_grad_clip(0.01),
    "scale_by_learning_rate": lambda: optim.scale_by_learning_rate(0.1),
    "scale_by_learning_rate schedule": lambda: optim.scale_by_learning_rate(lambda count: 0.1 / (count + 1.0)),
    "add_decayed_weights": lambda: optim.add_decayed_weights(0.1),
    "trace": lambda: optim.trace(0.9),
    "trace dampened": lambda: optim.trace(0.9, dampening=0.5),
    "trace nesterov": lambda: optim.trace(0.9, nesterov=True, accumulator_dtype=torch.float32),
    "scale_by_adam": optim.scale_by_adam,
    "scale_by_adam wide": lambda: optim.scale_by_adam(amsgrad=True, mu_dtype=torch.float32, nu_dtype=torch.float32),
    "scale_by_nadam": optim.scale_by_nadam,
    "scale_by_radam": optim.scale_by_radam,
    "scale_by_adamax": lambda: optim.scale_by_adamax(eps=1e-3),
    "scale_by_lion": optim.scale_by_lion,
    "scale_by_rms": lambda: optim.scale_by_rms(eps=1e-3),
    "scale_by_rms centered": lambda: optim.scale_by_rms(eps=1e-3, centered=True),
    "scale_by_rss": lambda: optim.scale_by_rss(0.5),
    "scale_by_adadelta": optim.scale_by_adadelta,
    "scale_by_inverse_time": lambda: optim.scale_by_inverse_time(0.5),
    "scale_by_trust_ratio": optim.scale_by_trust_ratio,
    "scale_by_factored_rms": optim.scale_by_factored_rms,
    "clip_by_block_rms": lambda: optim.clip_by_block_rms(0.1),
    "scale_by_param_block_rms": optim.scale_by_param_block_rms,
    "scale_by_relative_step": lambda: optim.scale_by_relative_step(0.9),
    "masked": lambda: optim.masked(optim.scale_by_adam(), "matrix"),
    "partition": lambda: optim.partition(
        {"a": optim.scale_by_adam(), "b": optim.trace(0.9)}, [("matrix", "a"), ("", "b")]
    ),
    "freeze": lambda: optim.freeze("matrix"),
    "inject": lambda: optim.inject(optim.scale_by_adam)(b1=0.5, b2=0.9, eps=1e-3),
}
DTYPES = {
    "float64": (torch.float64, torch.float64),
    "float32": (torch.float32, torch.float32),
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "bfloat16 with float32 gradients": (torch.bfloat16, torch.float32),
}


def problem(param_dtype: torch.dtype, grad_dtype: torch.dtype) -> tuple[Params, Params]:
    params = {"matrix": torch.randn(3, 4), "vector": torch.randn(5), "scalar": torch.randn(())}
    return (
        {name: p.to(param_dtype) for name, p in params.items()},
        {name: torch.randn_like(p).to(grad_dtype) for name, p in params.items()},
    )


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("make", PARTS.values(), ids=PARTS)
def test_every_part_is_pure_and_keeps_structure_and_dtypes(
    make: Callable[[], Transform], dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    params, grads = problem(*dtypes)
    tx = make()
    state = tx.init(params)
    for _ in range(3):
        before = tree.clone((grads, state, params))
        updates, new_state = tx.update(grads, state, params)
        assert_trees_close((grads, state, params), before, exact=True)
        assert tree.signature(new_state) == tree.signature(state)
        assert tree.signature(updates) == tree.signature(grads)
        assert all(bool(u.isfinite().all()) for u in updates.values())
        for path, leaf in tree.with_paths(state):
            is_scalar = leaf.ndim == 0 and "scalar" not in path
            assert not is_scalar or leaf.dtype in (torch.int64, torch.float32), path
        state = new_state


def test_a_block_rms_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"clip_by_block_rms: threshold=0.0 must be a finite number greater than 0"):
        optim.clip_by_block_rms(0.0)


def test_the_purity_law_catches_an_update_in_place() -> None:
    """The planted fault."""
    broken = optim.stateless(lambda updates, params: {name: u.mul_(2) for name, u in updates.items()})
    before = tree.clone(G)
    grads = tree.clone(G)
    broken.update(grads, Empty(), W)
    with pytest.raises(AssertionError, match="w: "):
        assert_trees_close(grads, before, exact=True)


@pytest.mark.parametrize("name", [name for name in PARTS if name not in ("masked", "freeze")])  # nothing to match
def test_every_part_takes_no_parameters_at_all(name: str) -> None:
    tx = PARTS[name]()
    state = tx.init({})
    updates, new_state = tx.update({}, state, {})
    assert updates == {}
    assert tree.signature(new_state) == tree.signature(state)


def test_moments_may_be_wider_than_the_parameters() -> None:
    params, grads = problem(torch.bfloat16, torch.bfloat16)
    state = optim.scale_by_adam(mu_dtype=torch.float32).init(params)
    assert {leaf.dtype for leaf in state.mu.values()} == {torch.float32}
    assert {leaf.dtype for leaf in state.nu.values()} == {torch.bfloat16}
    exact = optim.scale_by_adam(mu_dtype=torch.float32, nu_dtype=torch.float32)
    found = updated(exact, grads, params, 20)
    wide = updated(optim.scale_by_adam(), tree.map(Tensor.float, grads), tree.map(Tensor.float, params), 20)
    assert_trees_close(found, tree.map(Tensor.bfloat16, wide), exact=True)


# -------------------------------------------------------------------------------------- unit tests of matrix transforms


def test_trust_ratio_leaves_zero_norms_alone() -> None:
    tx = optim.scale_by_trust_ratio()
    assert updated(tx, G, {"w": torch.zeros(2)})["w"].tolist() == [3.0, 4.0]
    assert updated(tx, {"w": torch.zeros(2)}, W)["w"].tolist() == [0.0, 0.0]


def test_the_factored_mean_of_a_rank_one_square_is_exact() -> None:
    row, column = torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0, 1.0, 2.0]])
    grads = {"w": row * column}
    found = updated(optim.scale_by_factored_rms(), grads, grads)["w"]
    torch.testing.assert_close(found, torch.ones(2, 3))


def test_muon_makes_singular_values_about_one() -> None:
    for shape in ((8, 4), (4, 8), (5, 5)):
        grads = {"w": torch.randn(shape)}
        found = updated(optim.scale_by_muon(), grads, grads)["w"]
        values = torch.linalg.svdvals(found)
        assert 0.5 < values.min() <= values.max() < 1.4
        left, _, right = torch.linalg.svd(grads["w"], full_matrices=False)
        assert torch.linalg.matrix_norm(found - left @ right) < 0.35 * min(shape) ** 0.5


def test_shape_factors() -> None:
    tall = {"w": torch.ones(9, 4)}
    assert updated(optim.scale_by_shape(), tall, tall)["w"][0, 0].item() == 1.5
    assert updated(optim.scale_by_shape("match_rms_adamw"), tall, tall)["w"][0, 0].item() == pytest.approx(0.6)
    with pytest.raises(ConfigError, match=r"adjust='orginal'"):
        optim.scale_by_shape("orginal")  # type: ignore[arg-type]  # the mistake under test


def test_the_relative_step_is_a_bound_by_the_learning_rate() -> None:
    ones = {"w": torch.ones(1)}
    tx = optim.scale_by_relative_step(0.5)
    assert [round(updated(tx, ones, ones, t)["w"].item(), 4) for t in (1, 4, 16)] == [1.0, 1.0, 0.5]
    assert updated(optim.scale_by_relative_step(lambda count: 0.0 * count), ones, ones)["w"].item() == 1.0


# ------------------------------------------------------------------------------------------------------------ messages


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: optim.clip_by_global_norm(-1.0),
            "clip_by_global_norm: max_norm=-1.0 must be a finite number of at least 0 (cure: max_norm=1.0)",
        ),
        (lambda: optim.clip_by_value(-1.0), "clip_by_value: max_value=-1.0"),
        (lambda: optim.adaptive_grad_clip(-1.0), "adaptive_grad_clip: clipping=-1.0"),
        (lambda: optim.add_decayed_weights(-0.1), "add_decayed_weights: weight_decay=-0.1"),
        (lambda: optim.scale_by_learning_rate(-0.1), "learning_rate=-0.1"),
        (
            lambda: optim.scale_by_learning_rate("0.1"),
            "learning_rate='0.1' is a str, not a number (cure: learning_rate=0.1)",
        ),  # type: ignore[arg-type]
        (lambda: optim.scale_by_learning_rate(math.nan), "learning_rate=nan"),
        (lambda: optim.trace(-0.1), "trace: decay=-0.1"),
        (
            lambda: optim.trace(0.9, dampening=math.nan),
            "trace: dampening=nan must be a finite number of at least 0 (cure: 0.0 is the default)",
        ),
        (lambda: optim.scale(math.inf), "scale: factor=inf must be a finite number (cure: pass a finite number)"),
        (lambda: optim.scale("2"), "scale: factor='2' is a str, not a number"),  # type: ignore[arg-type]
        (lambda: optim.scale(lambda count: 2.0), "optim.inject(optim.scale)(..., factor=schedule)"),  # type: ignore[arg-type]
        (lambda: optim.trace(0.9, nesterov=True, dampening=0.1), "trace: nesterov=True needs dampening=0, not 0.1"),
        (lambda: optim.scale_by_adam(1.0), "scale_by_adam: b1=1.0 must be in [0, 1) (cure: 0.9 is the default)"),
        (lambda: optim.scale_by_adam(b2=-0.1), "scale_by_adam: b2=-0.1"),
        (lambda: optim.scale_by_adam(eps=-1.0), "scale_by_adam: eps=-1.0"),
        (
            lambda: optim.scale_by_adam(lambda count: 0.9),  # type: ignore[arg-type]
            "scale_by_adam: b1 is a schedule; only learning_rate takes one directly "
            "(cure: optim.inject(optim.scale_by_adam)(..., b1=schedule))",
        ),
    ],
)
def test_numbers_out_of_range_are_refused(make: Callable[[], Transform], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make()


# --------------------------------------------------------------------------------------------------- the algebra's laws


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), cuts=st.lists(st.integers(0, 4), max_size=2))
def test_chains_associate(seed: int, cuts: list[int]) -> None:
    parts = [
        optim.clip_by_value(0.5),
        optim.trace(0.9),
        optim.scale(2.0),
        optim.add_decayed_weights(0.1),
    ]
    low, high = min(cuts, default=0), max(cuts, default=0)
    nested = optim.chain(optim.chain(*parts[:low]), optim.chain(*parts[low:high]), optim.chain(*parts[high:]))
    generator = torch.Generator().manual_seed(seed)
    params = {"w": torch.randn(4, generator=generator)}
    grads = {"w": torch.randn(4, generator=generator)}
    assert torch.equal(updated(nested, grads, params, 3)["w"], updated(optim.chain(*parts), grads, params, 3)["w"])


@settings(max_examples=25, deadline=None)
@given(selected=st.sets(st.sampled_from(sorted(P)), min_size=0, max_size=3))
def test_a_mask_and_its_complement_are_a_partition(selected: set[str]) -> None:
    mask = {name: name in selected for name in P}
    two = optim.chain(
        optim.masked(optim.scale(3.0), mask),
        optim.masked(optim.trace(0.5), {name: not chosen for name, chosen in mask.items()}),
    )
    one = optim.partition(
        {"yes": optim.scale(3.0), "no": optim.trace(0.5)},
        {name: "yes" if chosen else "no" for name, chosen in mask.items()},
    )
    assert_trees_close(updated(two, P, P, 2), updated(one, P, P, 2), exact=True)


# -------------------------------------------------------------------------------- what packing must not change


@pytest.mark.compile
@pytest.mark.parametrize("kind", ["by name", "by rows"])
def test_a_function_that_goes_by_names_or_whole_tensors_is_the_same_compiled(kind: str) -> None:
    fn = {
        "by name": lambda updates, params: {name: u * (name == "bias") for name, u in updates.items()},
        "by rows": lambda updates, params: {name: u - u.mean(-1, keepdim=True) for name, u in updates.items()},
    }[kind]
    tx = optim.chain(optim.stateless(fn), ps.optim.sgd(0.5))
    program = ps.program(torch.nn.Linear(4, 2), ps.supervised(torch.nn.MSELoss()), tx)
    state, batch = program.init(), (torch.randn(8, 4), torch.randn(8, 2))
    expected, _ = program.train_step(state, batch)
    found, _ = ps.compile_step(program.train_step, donate=True, backend="aot_eager")(state, batch)
    assert_trees_close(dict(found.params), expected.params)
    assert not torch.equal(expected.params["bias"], state.params["bias"])


def test_the_norm_of_a_turned_weight_is_that_of_the_weight() -> None:
    leaf = torch.rand(3000, 3000)
    exact = float(leaf.double().norm())
    for one in (leaf, leaf.t(), leaf.view(1000, 3000, 3).permute(2, 0, 1)):
        assert float(ps.optim.global_norm({"w": one})) == pytest.approx(exact, rel=1e-6)


def test_a_derivative_by_an_injected_rate_is_that_of_the_step() -> None:
    tx = ps.optim.inject(ps.optim.sgd)(learning_rate=0.5)
    params, grads = {"w": torch.tensor([2.0])}, {"w": torch.tensor([3.0])}
    state = tx.init(params)

    def after(rate: Tensor) -> Tensor:
        updates, _ = tx.update(grads, ps.optim.set_hyperparams(state, learning_rate=rate), params)
        return updates["w"].sum()

    assert float(torch.func.grad(after)(torch.tensor(0.5))) == -3.0


def test_a_derivative_through_an_optimizer_of_torchs_is_refused() -> None:
    tx = ps.optim.from_torch(torch.optim.SGD, lr=0.5)
    params = {"w": torch.ones(2, requires_grad=True)}
    with pytest.raises(StepContractError, match="inside of torch.func"):
        tx.update({"w": torch.ones(2)}, tx.init({"w": torch.ones(2)}), params)


@pytest.mark.parametrize("pattern", [r"^encodr\.", "layers.0", r"bias$ "])
def test_a_rule_that_matches_nothing_is_refused_with_the_nearest_names(pattern: str) -> None:
    tx = optim.partition({"a": optim.scale(1.0), "b": optim.scale(2.0)}, [(pattern, "a"), ("", "b")])
    with pytest.raises(ConfigError, match="matches no trained parameter") as caught:
        tx.init(P)
    assert "the nearest names are 'encoder." in caught.value.hint
    net = torch.nn.ModuleDict({"encoder": torch.nn.Linear(2, 2), "head": torch.nn.Linear(2, 1)})
    program = ps.program(net, lambda model, batch: ps.Loss(batch.sum(), 1), tx)
    with pytest.raises(ConfigError, match="partition: the rule"):
        program.init()


def test_a_rule_that_an_earlier_one_shadows_matches() -> None:
    tx = optim.partition(
        {"a": optim.scale(1.0), "b": optim.scale(2.0)}, [("encoder", "a"), ("encoder.bias", "b"), ("", "b")]
    )
    assert set(tx.init(P).groups["a"].selected) == {"encoder.weight", "encoder.bias"}
