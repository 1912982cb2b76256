from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from helpers import assert_trees_close, image_batch, tiny_convnet, tiny_mlp, vector_batch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import purestep as ps
from purestep import ema, optim, tree
from purestep.errors import ConfigError, StateError
from purestep.types import Empty


def count(n: int) -> torch.Tensor:
    return torch.tensor(n)


def run(average: ema.Average, weights: list[float], decay_from: int = 0) -> list[float]:
    """The shadow of one number after each update, from 0."""
    state = average.init({"w": torch.zeros(())}, {})
    found = []
    for index, weight in enumerate(weights):
        state = average.update(state, {"w": torch.tensor(weight)}, {}, count(decay_from + index))
        found.append(state.params["w"].item())
    return found


def program(net: nn.Module, **kwargs: Any) -> ps.Program:
    return ps.program(net, ps.supervised(nn.CrossEntropyLoss()), optim.sgd(0.5), **kwargs)


def test_the_first_update_copies_and_the_next_ones_average():
    assert run(ema.average(0.75), [4.0, 8.0, 0.0]) == [4.0, 5.0, 3.75]


def test_the_initial_weights_may_count():
    """As timm, BYOL and mean teachers: the average begins as a copy of the model."""
    assert run(ema.average(0.75, initial=True), [4.0, 8.0, 0.0]) == [1.0, 2.75, 2.0625]
    assert run(ema.average(0.75, initial=True, warmup=True), [10.0]) == [pytest.approx(9.0)]  # d = 0.1


def test_every_kth_update_alone_may_count():
    assert run(ema.average(0.75, every=2), [4.0, 9.0, 8.0, 9.0, 0.0]) == [4.0, 4.0, 5.0, 5.0, 3.75]
    assert run(ema.average(0.75, every=3, initial=True), [4.0, 9.0, 9.0, 5.0]) == [1.0, 1.0, 1.0, 2.0]


@pytest.mark.parametrize("initial", [False, True])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("warmup", [False, True])
def test_the_share_of_the_first_weights_is_that_of_the_average(initial: bool, every: int, warmup: bool):
    made = ema.average(0.75, initial=initial, every=every, warmup=warmup)
    assert made.first is not None
    for updates in (1, 2, 3, 4, 7):
        weights = [0.0] * updates if initial else [1.0] + [0.0] * (updates - 1)
        state = made.init({"w": torch.tensor(float(initial))}, {})
        for index, weight in enumerate(weights):
            state = made.update(state, {"w": torch.tensor(weight)}, {}, count(index))
        assert made.first(updates) == pytest.approx(state.params["w"].item())


def test_a_resumed_average_goes_on_instead_of_copying():
    assert run(ema.average(0.75), [4.0], decay_from=10) == [1.0]


def test_warm_up_follows_its_formula():
    # (1 + t) / (10 + t) is 2/11 at t=1 and 3/12 at t=2; 0.2 is below it from t=2 on.
    found = run(ema.average(0.2, warmup=True), [11.0, 0.0, 1.0])
    assert found == pytest.approx([11.0, 2.0, 0.2 * 2 + 0.8 * 1])


def test_warm_up_that_is_over_is_the_plain_average():
    late = run(ema.average(0.5, warmup=True), [1.0, 2.0], decay_from=1000)
    assert late == run(ema.average(0.5), [1.0, 2.0], decay_from=1000)


@pytest.mark.row("B44")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("decay", [0.0, 0.5, 0.999])
@pytest.mark.parametrize("use_buffers", [False, True])
def test_it_is_torchs_averaged_model_bit_for_bit(dtype: torch.dtype, decay: float, use_buffers: bool):
    net = tiny_convnet().to(dtype)
    peer = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=use_buffers)
    average = ema.average(decay, buffers="average" if use_buffers else "copy")
    tensors = dict(net.named_parameters()), dict(net.named_buffers())
    state = average.init(*tensors)
    generator = torch.Generator().manual_seed(1)
    for updates in range(6):
        with torch.no_grad():
            for value in (*tensors[0].values(), *tensors[1].values()):
                fresh = torch.randn(value.shape, generator=generator)
                value.copy_(fresh) if value.is_floating_point() else value.add_(1)
        peer.update_parameters(net)
        state = average.update(state, *tensors, count(updates))
        assert_trees_close(state.params, {k: v.detach() for k, v in peer.module.named_parameters()}, exact=True)
        if use_buffers:
            theirs = dict(peer.module.named_buffers())
            # torch averages an integer counter as a number and truncates it; ours is copied.
            del theirs["1.num_batches_tracked"]
            ours = {name: value for name, value in state.buffers.items() if name in theirs}
            assert_trees_close(ours, theirs, exact=True)
            assert torch.equal(state.buffers["1.num_batches_tracked"], net[1].num_batches_tracked)
        else:
            assert state.buffers == Empty()


def test_a_program_averages_as_torch_beside_a_torch_loop():
    """Twenty steps of SGD by hand with AveragedModel, and the same by train_step."""
    net = tiny_mlp(dtype=torch.float64)
    batches = [vector_batch(8, seed, torch.float64) for seed in range(20)]
    chosen = program(net, ema=0.9)
    state = chosen.init(device="cpu")
    peer = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for x, y in batches:
        state, _ = chosen.train_step(state, (x, y))
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
        peer.update_parameters(net)
        assert_trees_close(state.params, {k: v.detach() for k, v in net.named_parameters()}, rtol=1e-12, atol=1e-12)
        theirs = {k: v.detach() for k, v in peer.module.named_parameters()}
        assert_trees_close(state.ema.params, theirs, rtol=1e-12, atol=1e-12)


def test_nothing_is_averaged_in_place():
    average = ema.average(0.5, buffers="average")
    params, buffers = {"w": torch.zeros(2)}, {"b": torch.zeros(2), "n": torch.tensor(1)}
    first = average.init(params, buffers)
    assert first.params["w"].data_ptr() != params["w"].data_ptr()
    kept = ps.clone(first)
    second = average.update(first, {"w": torch.ones(2)}, {"b": torch.ones(2), "n": torch.tensor(5)}, count(0))
    assert_trees_close(first, kept, exact=True)
    assert second.buffers["n"].item() == 5
    assert second.buffers["b"].tolist() == [1.0, 1.0]


def test_the_shadow_of_bfloat16_weights_is_float32_and_moves():
    """In bfloat16 the shadow stays where it is for ever: 1 - 0.999 of a difference is below its resolution."""
    average = ema.average(0.999)
    weights = {"w": torch.ones(1, dtype=torch.bfloat16)}
    state = average.update(average.init(weights, {}), weights, {}, count(0))
    assert state.params["w"].dtype == torch.float32
    target = {"w": torch.full((1,), 1.5, dtype=torch.bfloat16)}
    narrow = weights["w"].clone()
    for step in range(1, 200):
        state = average.update(state, target, {}, count(step))
        narrow = torch.lerp(narrow, target["w"], 0.001)
    assert state.params["w"].item() == pytest.approx(1.5 - 0.5 * 0.999**199, rel=1e-4)
    assert narrow.item() == 1.0


def test_a_bfloat16_program_keeps_a_shadow_that_moves():
    chosen = program(tiny_mlp(), ema=0.999, precision="bf16-true")
    state = chosen.init(device="cpu")
    assert {leaf.dtype for leaf in tree.leaves(state.ema)} == {torch.float32}
    batch = vector_batch()
    state, _ = chosen.train_step(state, batch)
    first = ps.clone(state.ema)
    for _ in range(5):
        state, _ = chosen.train_step(state, batch)
    assert not torch.equal(first.params["0.weight"], state.ema.params["0.weight"])
    shown = ps.view(state, "ema")
    assert {p.dtype for p in shown.params.values()} == {torch.bfloat16}
    assert chosen.bind(state, view="ema")(batch[0]).dtype == torch.bfloat16


def test_frozen_parameters_are_not_averaged():
    net = tiny_mlp()
    net[0].requires_grad_(False)
    state = program(net, ema=0.9).init(device="cpu")
    assert set(state.ema.params) == {"2.weight", "2.bias"}


@pytest.mark.parametrize("decay", [-0.1, 1.0, 1, 2, float("nan")])
def test_a_decay_out_of_range_is_refused(decay: float):
    with pytest.raises(ConfigError, match=r"average: decay=.* must be in \[0, 1\) \(cure: "):
        ema.average(decay)
    with pytest.raises(ConfigError, match="decay=.* must be in"):
        program(tiny_mlp(), ema=decay)


@pytest.mark.parametrize("switch", [True, False])
def test_it_is_no_switch(switch: bool):
    with pytest.raises(ConfigError, match=r"program: ema is a bool \(cure: pass ema=0.999"):
        program(tiny_mlp(), ema=switch)


def test_other_words_for_the_buffers_are_refused():
    with pytest.raises(ConfigError, match=r"average: buffers='avg' is unknown .*\"copy\" or \"average\""):
        ema.average(0.9, buffers="avg")  # pyright: ignore[reportArgumentType]  # the point of the test


def test_off_is_empty():
    off = ema.none()
    state = off.init({"w": torch.ones(1)}, {})
    assert state == Empty()
    assert off.update(state, {"w": torch.ones(1)}, {}, count(0)) is state


class TestView:
    @pytest.fixture
    def state(self) -> ps.TrainState:
        chosen = ps.program(
            tiny_convnet(),
            ps.supervised(nn.CrossEntropyLoss()),
            optim.sgd(0.5),
            ema=ema.average(0.5, buffers="average"),
        )
        state = chosen.init(device="cpu")
        for seed in range(3):
            state, _ = chosen.train_step(state, image_batch(seed=seed))
        return state

    def test_params_has_the_weights_themselves_and_they_stand_in_its_average_too(self, state: ps.TrainState):
        shown = ps.view(state, "params")
        assert_trees_close(shown._replace(ema=state.ema), state, exact=True)
        assert_trees_close(shown.ema.params, state.params, exact=True)
        assert_trees_close(ps.view(shown, "ema"), shown, exact=True)
        assert tree.flatten(shown)[1] == tree.flatten(state)[1]

    def test_by_default_it_is_the_average_where_there_is_one(self, state: ps.TrainState):
        assert_trees_close(ps.view(state), ps.view(state, "ema"), exact=True)
        without = state._replace(ema=ps.Empty())
        assert_trees_close(ps.view(without), without, exact=True)

    def test_ema_has_the_averages_in_the_places_of_the_weights(self, state: ps.TrainState):
        shown = ps.view(state, "ema")
        assert_trees_close(shown.params, state.ema.params, exact=True)
        assert_trees_close(shown.buffers, state.ema.buffers, exact=True)
        assert not torch.equal(shown.params["6.weight"], state.params["6.weight"])
        assert not torch.equal(shown.buffers["1.running_mean"], state.buffers["1.running_mean"])
        rest = {"params": {}, "buffers": {}}
        assert_trees_close(shown._replace(**rest), state._replace(**rest), exact=True)

    def test_nothing_is_copied_and_nothing_is_swapped(self, state: ps.TrainState):
        kept = ps.clone(state)
        shown = ps.view(state, "ema")
        assert shown.params["6.weight"] is state.ema.params["6.weight"]
        assert_trees_close(state, kept, exact=True)

    def test_copied_buffers_are_those_of_the_state(self):
        chosen = program(tiny_convnet(), ema=0.5)
        state, _ = chosen.train_step(chosen.init(device="cpu"), image_batch())
        assert ps.view(state, "ema").buffers is state.buffers

    def test_without_an_average_there_is_nothing_to_show(self):
        state = program(tiny_mlp()).init(device="cpu")
        with pytest.raises(StateError, match=r"ema: this state has no average \(cure: ps.program\(..., ema=0.999\)\)"):
            ps.view(state, "ema")

    def test_what_is_no_state_is_refused(self):
        with pytest.raises(StateError, match=r"view: the state is a dict, not a TrainState \(cure: program.init\(\)\)"):
            ps.view({}, "ema")  # type: ignore[arg-type]

    def test_another_name_is_refused(self, state: ps.TrainState):
        with pytest.raises(ConfigError, match=r"""view: view='average' is unknown \(cure: "params" or "ema"\)"""):
            ps.view(state, "average")


class TestWhere:
    """The average of eager steps on a GPU: few launches, the numbers of ``update``."""

    @pytest.mark.parametrize("in_place", [False, True])
    @pytest.mark.parametrize("buffers", ["copy", "average"])
    @pytest.mark.parametrize(
        "make",
        [
            partial(ema.average, 0.9),
            partial(ema.average, 0.99, warmup=True),
            partial(ema.average, 0.9, every=2),
            partial(ema.average, 0.9, every=3, initial=True),
            partial(ema.average, 0.9, warmup=True, every=2),
            partial(ema.swa, 2),
            partial(ema.swa, 2, every=3),
        ],
    )
    def test_it_is_the_update_where_that_is_applied(self, make: Any, buffers: Any, in_place: bool) -> None:
        made = make(buffers=buffers)
        assert made.where is not None
        params, held = {"a": torch.randn(3, 2), "b": torch.randn(5)}, {"mean": torch.zeros(3), "other": torch.zeros(2)}
        state, expected = made.init(params, held), made.init(params, held)
        for count in range(8):
            params, held = tree.map(lambda value: value + torch.randn_like(value), (params, held))
            updates, applied = torch.tensor(count), torch.tensor(count != 3)
            if applied:
                expected = made.update(expected, params, held, updates)
            before = tree.clone(state)
            after = made.where(state, params, held, updates, applied, in_place)
            assert after is not None
            assert_trees_close(after, expected)
            for name in params:
                assert (after.params[name].data_ptr() == state.params[name].data_ptr()) == in_place
                if count == 0 and not getattr(make, "keywords", {}).get("initial"):  # the first update copies
                    assert torch.equal(after.params[name], params[name])
            if not applied:
                assert_trees_close(after, before, exact=True)
            state = after

    def test_tensors_of_several_dtypes_are_left_to_the_update(self) -> None:
        made = ema.average(0.9)
        assert made.where is not None
        params = {"a": torch.randn(3), "b": torch.randn(3, dtype=torch.float64)}
        found = made.where(made.init(params, {}), params, {}, torch.tensor(1), torch.tensor(True), False)
        assert found is None


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("in_place", [False, True])
def test_buffers_of_a_batch_that_is_skipped_stay_out_of_the_average(value: float, in_place: bool):
    average = ema.average(0.9, buffers="average")
    params, buffers = {"w": torch.ones(2)}, {"mean": torch.full((2,), 3.0), "none": torch.zeros(0)}
    state = average.init(params, buffers)
    broken = {name: torch.full_like(leaf, value) for name, leaf in buffers.items()}
    assert average.where is not None
    found = average.where(state, params, broken, count(2), torch.tensor(False), in_place)
    assert found is not None
    assert_trees_close(found, average.init(params, buffers), exact=True)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"every": 0}, "average: every=0 must be an int of at least 1"),
        ({"initial": "yes"}, "average: initial='yes' is unknown"),
    ],
)
def test_other_arguments_are_refused(options: dict[str, Any], text: str):
    with pytest.raises(ConfigError, match=text):
        ema.average(0.9, **options)
