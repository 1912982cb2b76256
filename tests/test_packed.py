from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers import assert_trees_close, image_batch, tiny_convnet, tiny_mlp, vector_batch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import purestep as ps
from purestep import ema, optim, tree
from purestep.state import packed
from purestep.types import Empty

MODEL = tiny_convnet()  # parameters: 0.weight, 1.weight, 1.bias, 6.weight, 6.bias


def program(tx: Any = None, net: nn.Module | None = None, **kwargs: Any) -> ps.Program:
    return ps.program(net or MODEL, ps.supervised(nn.CrossEntropyLoss()), tx or optim.adamw(0.01), **kwargs)


def packing_of(chosen: ps.Program, state: ps.TrainState) -> packed.Packing:
    return packed.packing(state.params, chosen.static.labels(state.params))


def sizes(state: ps.TrainState) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in state.params.items()}


def distinct(state: ps.TrainState) -> ps.TrainState:
    """Every number of every leaf another one, so that a wrong place cannot go unseen."""
    start = iter(range(0, 10**6, 1000))

    def numbers(leaf: Tensor) -> Tensor:
        found = torch.arange(leaf.numel()).add(next(start)).to(leaf.dtype)
        return torch.empty_like(leaf).copy_(found.view(leaf.shape))

    return tree.map(numbers, state)


def round_trip(chosen: ps.Program) -> tuple[ps.TrainState, ps.TrainState, ps.TrainState]:
    state = distinct(chosen.init(device="cpu"))
    packing = packing_of(chosen, state)
    flat = packed.pack(packing, state)
    assert flat is not None
    return state, flat, packed.unpack(packing, flat)


TRANSFORMS = {
    "sgd": lambda: optim.sgd(0.1),
    "momentum": lambda: optim.sgd(0.1, momentum=0.9),
    "adamw": lambda: optim.adamw(0.1),
    "adamw masked": lambda: optim.adamw(0.1, mask=optim.decay_mask(MODEL)),
    "clip": lambda: optim.chain(optim.clip_by_global_norm(1.0), optim.adam(0.1)),
    "masked": lambda: optim.masked(optim.adam(0.1), "bias"),
    "partition": lambda: optim.partition(
        {"a": optim.adamw(0.1), "b": optim.sgd(0.1, momentum=0.9)}, [("weight", "a"), ("", "b")]
    ),
    "freeze": lambda: optim.chain(optim.adam(0.1), optim.freeze("^6")),
    "inject": lambda: optim.inject(optim.adamw)(learning_rate=0.1),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_what_is_packed_comes_back(name: str):
    chosen = program(TRANSFORMS[name](), ema=ema.average(0.9, buffers="average"), accumulate=2, precision="16-mixed")
    state, flat, back = round_trip(chosen)
    assert_trees_close(back, state, exact=True)
    assert len(tree.leaves(flat)) < len(tree.leaves(state))


def test_without_groups_there_is_one_buffer_a_kind():
    state, flat, _ = round_trip(program(optim.sgd(0.1), ema=0.9, accumulate=2))
    assert sizes(flat) == {"0.weight": [36 + 4 + 4 + 48 + 3]}
    for named in (flat.ema.params, flat.accum.grads):
        assert {name: list(value.shape) for name, value in named.items()} == sizes(flat)
    whole = torch.cat([p.flatten() for p in state.params.values()])
    assert torch.equal(flat.params["0.weight"].sort()[0], whole.sort()[0])  # the best aligned come first
    for name in ("buffers", "step", "updates", "key", "halted", "frozen"):
        assert_trees_close(getattr(flat, name), getattr(state, name), exact=True)


def test_labels_make_groups():
    tx = optim.adamw(0.1, mask=optim.decay_mask(MODEL))
    chosen = program(tx)
    state, flat, _ = round_trip(chosen)
    assert sizes(flat) == {"0.weight": [36 + 48], "1.weight": [4 + 4 + 3]}
    groups = packing_of(chosen, state).groups
    assert [[slot.name for slot in group.slots] for group in groups] == [
        ["6.weight", "0.weight"], ["1.weight", "1.bias", "6.bias"]
    ]  # fmt: skip
    assert [group.name for group in groups] == list(flat.params)


def test_dtypes_make_groups():
    params = {"a": torch.zeros(2), "b": torch.ones(3).bfloat16(), "c": torch.ones(4), "d": torch.ones(5).bfloat16()}
    packing = packed.packing(params, dict.fromkeys(params, ()))
    flat = packing.collect(params)
    assert {name: (value.dtype, value.numel()) for name, value in flat.items()} == {
        "a": (torch.float32, 6), "b": (torch.bfloat16, 8)
    }  # fmt: skip
    assert_trees_close(packing.expand(flat), params, exact=True)


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=1, max_size=6))
def test_any_shapes(shapes: list[list[int]]):
    """0-d and empty ones too."""
    start, params = 0, {}
    for index, shape in enumerate(shapes):
        count = torch.Size(shape).numel()
        params[f"p{index}"] = torch.arange(start, start + count, dtype=torch.float32).view(shape)
        start += count
    packing = packed.packing(params, dict.fromkeys(params, ()))
    (flat,) = packing.collect(params).values()
    assert sorted(flat.tolist()) == list(range(start))
    flat = packing.collect(params)
    offset = 0
    for slot in packing.groups[0].slots:  # as aligned as its own size allows
        assert not slot.size or offset % math.gcd(slot.size, 64) == 0
        offset += slot.size
    assert_trees_close(packing.expand(flat), params, exact=True)


def test_masks_and_partitions_are_packed_as_structure():
    _, flat, _ = round_trip(program(optim.masked(optim.adam(0.1), "bias")))
    assert flat.opt_state.selected == {"1.bias": Empty()}
    assert sizes(flat) == {"0.weight": [36 + 4 + 48], "1.bias": [4 + 3]}
    inner = [
        (path, list(leaf.shape))
        for path, leaf in tree.with_paths(flat.opt_state)
        if leaf.dim() and leaf.is_floating_point()
    ]
    assert [shape for _, shape in inner] == [[7], [7]]
    assert all(path.endswith("/1.bias") for path, _ in inner)


def test_the_named_tree_is_views_of_the_buffers():
    chosen = program(ema=0.9)
    state = chosen.init(device="cpu")
    packing = packing_of(chosen, state)
    flat = packed.pack(packing, state)
    back = packed.unpack(packing, flat)
    buffer = flat.params["0.weight"]
    assert {p.untyped_storage().data_ptr() for p in back.params.values()} == {buffer.untyped_storage().data_ptr()}
    buffer.zero_()
    assert not any(p.any() for p in back.params.values())
    back.ema.params["6.bias"].fill_(7)
    assert flat.ema.params["0.weight"][-3:].tolist() == [7, 7, 7]


def test_no_view_is_taken_that_changes_nothing():
    """Each is an operation of every graph: none of a vector, none of what lies in the order of its dimensions."""
    plain = {"a.weight": torch.randn(3, 4), "a.bias": torch.randn(3), "b.bias": torch.randn(1)}
    turned = {"t": torch.randn(4, 3).t()}
    for params, there, back in (
        (plain, ["split_with_sizes", "view"], ["view", "cat"]),
        (turned, ["split_with_sizes", "view", "permute"], ["permute", "view", "cat"]),
    ):
        packing = packed.packing(params, dict.fromkeys(params, 0))
        stored = packing.collect(params)
        with Operations() as opened:
            named = packing.expand(stored)
        with Operations() as closed:
            packing.collect(named)
        assert (opened.names, closed.names) == (there, back)
        assert_trees_close(named, params, exact=True)


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_packing_copies():
    chosen = program()
    state = chosen.init(device="cpu")
    kept = ps.clone(state)
    flat = packed.pack(packing_of(chosen, state), state)
    for value in flat.params.values():
        value.add_(1)
    assert_trees_close(state, kept, exact=True)


def test_channels_last_survives():
    net = tiny_convnet().to(memory_format=torch.channels_last)
    net[0] = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    chosen = program(net=net, tx=optim.sgd(0.1, momentum=0.9))
    state, flat, back = round_trip(chosen)
    assert not state.params["0.weight"].is_contiguous()
    assert back.params["0.weight"].stride() == state.params["0.weight"].stride()
    assert back.params["0.weight"].is_contiguous(memory_format=torch.channels_last)
    # In memory order: a plain flatten of the view would be another order.
    weight = state.params["0.weight"]
    (group,) = packing_of(chosen, state).groups
    start = sum(slot.size for slot in group.slots[: [slot.name for slot in group.slots].index("0.weight")])
    stored = flat.params["0.weight"][start : start + weight.numel()]
    assert torch.equal(stored, weight.permute(0, 2, 3, 1).flatten())
    assert_trees_close(back, state, exact=True)


def test_transposed_ones_survive():
    params = {"w": torch.arange(6.0).view(2, 3).t(), "b": torch.zeros(3)}
    packing = packed.packing(params, dict.fromkeys(params, ()))
    back = packing.expand(packing.collect(params))
    assert back["w"].stride() == params["w"].stride()
    assert_trees_close(back, params, exact=True)


def test_a_dict_that_cuts_through_a_group_is_uneven():
    """A transform whose labels are too coarse for its state: the tree form has to be kept."""
    mask = optim.masked(optim.sgd(0.1, momentum=0.9), "bias")
    coarse = mask._replace(labels=lambda params: dict.fromkeys(params, ()))
    chosen = program(coarse)
    state = chosen.init(device="cpu")
    kept = ps.clone(state)
    assert packed.pack(packing_of(chosen, state), state) is None
    assert_trees_close(state, kept, exact=True)


def test_dicts_of_other_things_are_left_alone():
    params = {"a": torch.ones(2, 2), "b": torch.ones(3)}
    packing = packed.packing(params, dict.fromkeys(params, ()))
    chosen = program(net=tiny_mlp())
    state = chosen.init(device="cpu")._replace(
        params=params,
        opt_state={
            "norms": {"a": torch.ones(()), "b": torch.ones(())},
            "rates": {"learning_rate": torch.ones(())},
            "none": {},
            "moments": ({"a": torch.ones(2, 2), "b": torch.ones(3)},),
        },
    )
    flat = packed.pack(packing, state)
    assert list(flat.opt_state["norms"]) == ["a", "b"]
    assert flat.opt_state["rates"] == state.opt_state["rates"]
    assert flat.opt_state["none"] == {}
    assert flat.opt_state["moments"][0]["a"].shape == (7,)
    assert_trees_close(packed.unpack(packing, flat), state, exact=True)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_step_on_the_packed_form_is_the_same_step(name: str):
    chosen = program(TRANSFORMS[name](), ema=0.9, accumulate=2, precision="64-true")
    state = chosen.init(device="cpu")
    packing = packing_of(chosen, state)
    steps = chosen.static.made.steps(packing.form)
    flat = packed.pack(packing, state)
    for seed in range(5):
        state, metrics = chosen.train_step(state, image_batch(seed=seed))
        flat, packed_metrics = steps.train_step(flat, image_batch(seed=seed))
        assert_trees_close(packed_metrics, metrics, rtol=1e-6, atol=1e-12)
    state, flat = chosen.flush(state)[0], steps.flush(flat)[0]
    assert_trees_close(packed.unpack(packing, flat), state, rtol=1e-12, atol=1e-12)


def test_transforms_that_need_the_tree_say_so():
    net = tiny_mlp()
    tx = optim.lamb(0.1)
    assert program(tx, net).static.labels is None
    assert program(optim.chain(optim.clip_by_global_norm(1.0), tx), net).static.labels is None
    assert program(optim.adam(0.1), net).static.labels is not None


def test_a_packed_step_leaves_its_input_alone():
    chosen = program(net=tiny_mlp(), ema=0.9)
    state = chosen.init(device="cpu")
    packing = packing_of(chosen, state)
    flat = packed.pack(packing, state)
    ps.testing.assert_pure(chosen.static.made.steps(packing.form).train_step, flat, vector_batch())


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_parameter_behind_one_of_odd_size_is_read_as_complex(dtype: torch.dtype, donate: bool):
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.odd, self.pair = nn.Parameter(torch.ones(3)), nn.Parameter(torch.randn(6, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (torch.fft.fft(x * self.odd.sum()) * torch.view_as_complex(self.pair)).real

    precision = "64-true" if dtype == torch.float64 else "32-true"
    program_ = ps.program(Spectral().to(dtype), ps.supervised(nn.MSELoss()), ps.optim.sgd(0.1), precision=precision)
    batch = (torch.randn(4, 6, dtype=dtype), torch.randn(4, 6, dtype=dtype))
    step = ps.compile_step(program_.train_step, backend="aot_eager", donate=donate)
    state, wanted = program_.init(), program_.init()
    for _ in range(2):
        wanted, _ = program_.train_step(wanted, batch)
        state, _ = step(state, batch)
    assert_trees_close(dict(state.params), wanted.params)
