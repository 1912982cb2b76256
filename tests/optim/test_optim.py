"""Named optimizers: laws that all of them keep, hand-computed steps where torch has no twin, and `from_torch`."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from typing import Any, get_args, get_type_hints

import pytest
import torch
from helpers import assert_trees_close, count_graphs, quadratic
from hypothesis import given, settings
from hypothesis import strategies as st
from optimizers import ROWS, factories
from torch import Tensor, nn

import purestep as ps
from purestep import optim, tree
from purestep.errors import ConfigError, StateError
from purestep.optim import Transform
from purestep.types import Empty, Params, Tree

HIDDEN = ("tall", "wide")
SHAPES = {"tall": (6, 3), "wide": (3, 5), "bias": (4,), "gain": (), "kernel": (2, 3, 2, 2)}


def muon_and_adamw() -> Transform:
    rules = [("tall|wide", "muon"), ("", "adamw")]
    return optim.partition({"muon": optim.muon(0.01), "adamw": optim.adamw(0.01)}, rules)


def warm_up(count: Tensor) -> Tensor:
    return 0.02 * torch.clamp((count + 1) / 10, max=1.0)


VARIANTS: dict[str, Callable[[], Transform]] = {  # more options of the rows, and of what is no row
    "sgd": lambda: optim.sgd(0.01),
    "sgd with everything": lambda: optim.sgd(0.01, 0.9, dampening=0.1, weight_decay=0.1, mask="tall|wide|kernel"),
    "sgd nesterov": lambda: optim.sgd(0.01, 0.9, nesterov=True),
    "adam": lambda: optim.adam(0.01, weight_decay=0.1),
    "adamw": lambda: optim.adamw(warm_up, mask="tall|wide|kernel"),
    "adamw amsgrad": lambda: optim.adamw(0.01, amsgrad=True, mu_dtype=torch.float32),
    "nadam": lambda: optim.nadam(0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "radam": lambda: optim.radam(warm_up, b2=0.9, weight_decay=0.1),
    "adamax": lambda: optim.adamax(0.01, weight_decay=0.1),
    "rmsprop": lambda: optim.rmsprop(0.01, momentum=0.9, centered=True, weight_decay=0.1, eps=1e-3),
    "adagrad": lambda: optim.adagrad(0.01, lr_decay=0.1, initial_accumulator_value=0.1, weight_decay=0.1),
    "adadelta": lambda: optim.adadelta(weight_decay=0.1),
    "adafactor": lambda: optim.adafactor(0.1, weight_decay=0.1),
    "lamb": lambda: optim.lamb(warm_up, weight_decay=0.1),
    "lion": lambda: optim.lion(0.01, weight_decay=0.1, mask="wide"),
    "ademamix": lambda: optim.ademamix(warm_up, weight_decay=0.1, mask="wide|bias", mu_dtype=torch.float32),
    "schedule_free_adamw": lambda: optim.schedule_free_adamw(warm_up, weight_decay=0.1, mask="tall"),
    "schedule_free_sgd": lambda: optim.schedule_free_sgd(0.1, b1=0.8, weight_decay=0.1),
    "lookahead": lambda: optim.lookahead(optim.adamw(0.02, weight_decay=0.1, mask="tall"), 2, 0.6),
    "prodigy": lambda: optim.prodigy(estim_lr0=1e-2, weight_decay=0.1, mask="tall|bias"),
    "muon": muon_and_adamw,
    "muon of kernels": lambda: optim.partition(
        {"muon": optim.muon(0.01, flatten=True, adjust=0.3), "adamw": optim.adamw(0.01)},
        [("tall|wide|kernel", "muon"), ("", "adamw")],
    ),
    "muon in lookahead": lambda: optim.lookahead(muon_and_adamw()),
    "clipped": lambda: optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(0.01)),
    "adaptive clipping": lambda: optim.chain(optim.adaptive_grad_clip(0.01), optim.sgd(0.1)),
    "groups": lambda: optim.partition(
        {"clip": optim.chain(optim.clip_by_global_norm(0.5), optim.sgd(0.1)), "rest": optim.adam(0.01, mask="wide")},
        [("tall|bias", "clip"), ("", "rest")],
    ),
    "value clipping": lambda: optim.chain(
        optim.clip_by_value(0.5), optim.scale(0.5), optim.sgd(0.1), optim.freeze("bias")
    ),
    "soap": lambda: optim.soap(0.01, weight_decay=0.1, precondition_frequency=2),
    "injected": lambda: optim.inject(optim.adamw)(learning_rate=warm_up, b1=0.8, weight_decay=0.1, mask="tall"),
}
ALL = ROWS | VARIANTS
ELEMENTWISE = {name: make for name, make in ALL.items() if make().elementwise}


def problem(dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Params, Params]:
    generator = torch.Generator().manual_seed(seed)
    params = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}
    return params, {name: torch.randn(p.shape, generator=generator).to(dtype) for name, p in params.items()}


def few(tensors: Params) -> Params:
    """Three of them: capturing takes time by the tensor."""
    return {name: tensors[name] for name in ("tall", "wide", "bias")}


def step(tx: Transform, params: Params, state: Tree, grads: Params) -> tuple[Params, Tree]:
    updates, state = tx.update(grads, state, params)
    return optim.apply_updates(params, updates), state


def run(tx: Transform, params: Params, steps: int = 5) -> tuple[Params, Tree]:
    """Steps with gradients that depend on the parameters."""
    state = tx.init(params)
    for count in range(steps):
        grads = {name: torch.sin(3 * p + count) for name, p in params.items()}
        params, state = step(tx, params, state, grads)
    return params, state


# ---------------------------------------------------------------------------------------------------------------- laws


@pytest.mark.parametrize(
    ("name", "order"),
    [
        ("adamw", "learning_rate b1 b2 eps weight_decay mask"),
        ("sgd", "learning_rate momentum nesterov"),
        *((name, "learning_rate b1 b2 eps") for name in ("adam", "adamax", "lamb", "nadam", "radam")),
        ("rmsprop", "learning_rate decay eps"),
        ("adadelta", "learning_rate rho eps"),
    ],
)
def test_arguments_by_position_come_in_optaxs_order(name: str, order: str) -> None:
    known = inspect.signature(getattr(optim, name)).parameters.values()
    assert [one.name for one in known if one.kind is one.POSITIONAL_OR_KEYWORD] == order.split()


@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_every_optimizer_goes_downhill(make: Callable[[], Transform]) -> None:
    params, _ = problem(torch.float64)
    centre = {name: torch.full_like(p, 0.3) for name, p in params.items()}

    def loss(at: Params) -> Tensor:
        return sum(((at[name] - centre[name]) ** 2).sum() for name in at) / 2  # type: ignore[return-value]

    tx, state = make(), None
    start, state = float(loss(params)), make().init(params)
    for _ in range(30):
        params, state = step(tx, params, state, {name: params[name] - centre[name] for name in params})
    assert float(loss(params)) < 0.99 * start


def test_gradient_descent_finds_the_minimum_of_a_quadratic() -> None:
    found = quadratic()
    params, tx = found.params, optim.sgd(0.25, 0.5)
    state = tx.init(params)
    for _ in range(120):
        params, state = step(tx, params, state, found.gradient(params))
    assert_trees_close(params, found.minimum, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_every_optimizer_is_pure_and_keeps_structure_and_dtypes(
    make: Callable[[], Transform], dtype: torch.dtype
) -> None:
    params, grads = problem(dtype)
    tx = make()
    state = tx.init(params)
    for _ in range(2):
        before = tree.clone((grads, state, params))
        new_params, new_state = step(tx, params, state, grads)
        assert_trees_close((grads, state, params), before, exact=True)
        assert tree.signature(new_state) == tree.signature(state)
        assert tree.signature(new_params) == tree.signature(params)
        assert all(bool(p.isfinite().all()) for p in new_params.values())
        params, state = new_params, new_state


@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_a_state_shares_no_memory_with_the_parameters(make: Callable[[], Transform]) -> None:
    params, grads = problem()
    tx = make()
    state = tx.init(params)
    owned = {leaf.data_ptr() for leaf in params.values()}
    assert not owned & {leaf.data_ptr() for leaf in tree.leaves(state)}
    new_params, new_state = step(tx, params, state, grads)
    taken = owned | {leaf.data_ptr() for leaf in grads.values()}
    assert not taken & {leaf.data_ptr() for leaf in tree.leaves((new_params, new_state))}


@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_every_optimizer_reports_its_learning_rate(make: Callable[[], Transform]) -> None:
    _, state = run(make(), problem()[0], steps=2)
    rates = {name: value for name, value in optim.hyperparams(state).items() if "learning_rate" in name}
    assert rates
    assert all(value.dtype == torch.float32 and value.shape == () and value > 0 for value in rates.values())


# ------------------------------------------------------------------------------------------------------ the packed form


def groups_of(tx: Transform, params: Params) -> dict[str, list[str]]:
    """First name -> the names of equal dtype and label."""
    labels = tx.labels(params)
    groups: dict[Any, list[str]] = {}
    for name, p in params.items():
        groups.setdefault((p.dtype, labels[name]), []).append(name)
    return {names[0]: names for names in groups.values()}


def packed(node: Tree, groups: dict[str, list[str]]) -> Tree:
    """Every dict by parameter names as one by first names, its tensors flat and joined."""

    def is_named(value: Any) -> bool:
        return isinstance(value, dict) and bool(value) and all(isinstance(x, Tensor | Empty) for x in value.values())

    def pack(value: Any) -> Any:
        if not is_named(value) or not set(value) <= set(SHAPES):
            return value
        joined: dict[str, Any] = {}
        for first, names in groups.items():
            if first in value:
                leaves = [value[name] for name in names]
                joined[first] = Empty() if leaves[0] == Empty() else torch.cat([leaf.flatten() for leaf in leaves])
        return joined

    if is_named(node):
        return pack(node)
    if isinstance(node, dict):
        return {key: packed(value, groups) for key, value in node.items()}
    if isinstance(node, tuple):
        parts = [packed(value, groups) for value in node]
        return type(node)(*parts) if hasattr(node, "_fields") else tuple(parts)
    return node


def packed_error(tx: Transform, params: Params, steps: int = 4) -> float:
    """The largest difference between the named and the packed form."""
    groups = groups_of(tx, params)
    state, worst = tx.init(params), 0.0
    flat_params, flat_state = packed(params, groups), packed(state, groups)
    for count in range(steps):
        grads = {name: torch.sin(3 * p + count) for name, p in params.items()}
        params, state = step(tx, params, state, grads)
        flat_params, flat_state = step(tx, flat_params, flat_state, packed(grads, groups))
        for one, other in zip(
            tree.leaves(packed((params, state), groups)), tree.leaves((flat_params, flat_state)), strict=True
        ):
            worst = max(worst, float((one - other).abs().max()))
    return worst


@pytest.mark.parametrize("make", ELEMENTWISE.values(), ids=ELEMENTWISE)
def test_the_packed_form_gives_the_same_numbers(make: Callable[[], Transform]) -> None:
    tx = make()
    assert tx.elementwise
    assert packed_error(tx, problem(torch.float64)[0]) < 1e-14


@settings(max_examples=25, deadline=None)
@given(
    names=st.permutations(sorted(SHAPES)),
    decayed=st.sets(st.sampled_from(sorted(SHAPES))),
    clipped=st.sets(st.sampled_from(sorted(SHAPES))),
    half=st.sets(st.sampled_from(sorted(SHAPES))),
)
def test_the_packed_form_gives_the_same_numbers_for_any_groups(
    names: list[str], decayed: set[str], clipped: set[str], half: set[str]
) -> None:
    given_params, _ = problem(torch.float64)
    params = {name: given_params[name].float() if name in half else given_params[name] for name in names}
    mask = {name: name in decayed for name in params}
    groups = {
        "clip": optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(0.01, mask=mask)),
        "rest": optim.adam(0.01),
    }
    tx = optim.partition(groups, {name: "clip" if name in clipped else "rest" for name in params})
    assert packed_error(tx, params) < 1e-6


def test_the_packed_law_catches_a_transform_that_only_says_it_is_elementwise() -> None:
    """The planted fault: a ratio of norms per tensor."""
    broken = optim.scale_by_trust_ratio()._replace(elementwise=True)
    assert packed_error(optim.chain(broken, optim.sgd(0.1)), problem(torch.float64)[0]) > 1e-3


def test_the_packed_law_catches_labels_that_hide_a_mask() -> None:
    """The planted fault: one label for parameters of which some decay."""
    tx = optim.adamw(0.1, weight_decay=0.5, mask="tall")
    broken = tx._replace(labels=lambda params: dict.fromkeys(params, ()))
    assert packed_error(tx, problem(torch.float64)[0]) < 1e-14
    with pytest.raises((AssertionError, KeyError, RuntimeError, StateError)):
        assert packed_error(broken, problem(torch.float64)[0]) < 1e-14


# ------------------------------------------------------------------------------------------------------------- compiled


@pytest.mark.compile
@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_every_optimizer_compiles_to_one_graph_with_the_same_numbers(make: Callable[[], Transform]) -> None:
    tx = make()
    params, grads = map(few, problem())
    state = tx.init(params)
    compiled = torch.compile(lambda p, s, g: step(tx, p, s, g), fullgraph=True, backend="eager")
    with count_graphs() as graphs:
        for _ in range(3):
            expected = step(tx, params, state, grads)
            assert_trees_close(compiled(params, state, grads), expected, rtol=1e-6, atol=1e-7)
            params, state = expected
        assert graphs() == 1


@pytest.mark.compile
@pytest.mark.parametrize("make", ALL.values(), ids=ALL)
def test_every_optimizer_can_be_traced_once(make: Callable[[], Transform]) -> None:
    tx = make()
    params, grads = map(few, problem())
    state = tx.init(params)
    traced = by_make_fx(tx, params, state)
    assert_trees_close(traced(params, state, grads), step(tx, params, state, grads), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("make", ELEMENTWISE.values(), ids=ELEMENTWISE)
def test_stacked_states_go_through_vmap(make: Callable[[], Transform]) -> None:
    tx, pairs = make(), [problem(torch.float64, seed) for seed in (0, 1)]
    ensemble = [(params, tx.init(params), grads) for params, grads in pairs]
    stacked = tree.map(lambda *leaves: torch.stack(leaves), *ensemble)
    found = torch.vmap(lambda p, s, g: step(tx, p, s, g))(*stacked)
    alone = [step(tx, *member) for member in ensemble]
    assert_trees_close(found, tree.map(lambda *leaves: torch.stack(leaves), *alone))


@pytest.mark.compile
def test_a_schedule_never_recompiles() -> None:
    tx = optim.adamw(warm_up)
    params, grads = map(few, problem())
    state = tx.init(params)
    compiled = torch.compile(lambda p, s, g: step(tx, p, s, g), fullgraph=True, backend="eager")
    rates: list[float] = []
    with count_graphs() as graphs:
        for _ in range(15):
            params, state = compiled(params, state, grads)
            rates.append(optim.hyperparams(state)["learning_rate"].item())
        assert graphs() == 1
    assert rates == pytest.approx([0.02 * min((count + 1) / 10, 1.0) for count in range(15)])


@pytest.mark.compile
def test_the_graph_count_catches_a_rate_that_is_a_python_number() -> None:
    """The planted fault."""
    params, grads = map(few, problem())
    compiled = torch.compile(
        lambda p, g, rate: step(optim.sgd(rate), p, optim.sgd(rate).init(p), g)[0], fullgraph=True, backend="eager"
    )
    with count_graphs() as graphs:
        for rate in (0.1, 0.2, 0.3):
            params = compiled(params, grads, rate)
        assert graphs() > 1


# -------------------------------------------------------------------------------------------------------- by hand


def test_two_steps_of_lion_by_hand() -> None:
    tx = optim.lion(0.1, b1=0.5, b2=0.75, weight_decay=0.2)
    params = {"w": torch.tensor([1.0, -2.0], dtype=torch.float64)}
    state = tx.init(params)
    params, state = step(tx, params, state, {"w": torch.tensor([4.0, -4.0], dtype=torch.float64)})
    # m = 0: the signs are those of the gradient; m becomes (1, -1).
    expected = [1.0 - 0.1 * (1 + 0.2), -2.0 - 0.1 * (-1 - 0.4)]
    assert params["w"].tolist() == pytest.approx(expected, abs=1e-15)
    params, state = step(tx, params, state, {"w": torch.tensor([-0.5, 3.0], dtype=torch.float64)})
    # 0.5 * (1, -1) + 0.5 * (-0.5, 3) = (0.25, 1): the first still follows the mean.
    expected = [p - 0.1 * (1 + 0.2 * p) for p in expected]
    assert params["w"].tolist() == pytest.approx(expected, abs=1e-15)
    assert state[0].mu["w"].tolist() == pytest.approx([0.75 - 0.125, -0.75 + 0.75], abs=1e-15)


def test_one_step_of_lamb_by_hand() -> None:
    tx = optim.lamb(0.1, eps=0.0, weight_decay=0.5)
    params = {"w": torch.tensor([3.0, 4.0], dtype=torch.float64), "new": torch.zeros(1, dtype=torch.float64)}
    grads = {"w": torch.tensor([2.0, -7.0], dtype=torch.float64), "new": torch.tensor([-2.0], dtype=torch.float64)}
    params, _ = step(tx, params, tx.init(params), grads)
    # Adam's first direction is the sign; with the decay it is (2.5, 1), and the weights' norm is 5.
    ratio = 5 / math.hypot(2.5, 1.0)
    assert params["w"].tolist() == pytest.approx([3 - 0.1 * ratio * 2.5, 4 - 0.1 * ratio], rel=1e-9)
    assert params["new"].tolist() == pytest.approx([0.1], rel=1e-9)


def test_radam_starts_without_adapting_and_then_does() -> None:
    tx = optim.radam(1.0)
    params = {"w": torch.zeros(1, dtype=torch.float64)}
    grads, state = {"w": torch.full((1,), 8.0, dtype=torch.float64)}, tx.init(params)
    sizes: list[float] = []
    for _ in range(8):
        updates, state = tx.update(grads, state, params)
        sizes.append(-updates["w"].item())
    assert sizes[:5] == pytest.approx([8.0] * 5)
    assert all(size < 0.2 for size in sizes[5:])


def test_an_optimizer_is_the_chain_that_it_says() -> None:
    params, grads = problem(torch.float64)
    by_parts = optim.chain(optim.scale_by_adam(), optim.add_decayed_weights(0.01), optim.scale_by_learning_rate(0.1))
    one, other = optim.adamw(0.1), by_parts
    assert_trees_close(step(one, params, one.init(params), grads), step(other, params, other.init(params), grads))


# ------------------------------------------------------------------------------------------------------------- messages


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: optim.sgd(-1.0),
            "sgd: learning_rate=-1.0 must be a finite number of at least 0 (cure: 0.001 is the default)",
        ),
        (lambda: optim.sgd(0.1, -0.9), "sgd: momentum=-0.9"),
        (lambda: optim.sgd(0.1, nesterov=True), "sgd: nesterov=True needs momentum (cure: momentum=0.9)"),
        (lambda: optim.sgd(0.1, 0.9, nesterov=True, dampening=0.1), "nesterov=True needs dampening=0, not 0.1"),
        (lambda: optim.sgd(0.1, weight_decay=-0.1), "weight_decay=-0.1"),
        (lambda: optim.adam(b1=1.0), "adam: b1=1.0 must be in [0, 1) (cure: 0.9 is the default)"),
        (lambda: optim.adamw(b2=1.5), "b2=1.5"),
        (lambda: optim.adamw(eps=-1e-8), "eps=-1e-08"),
        (lambda: optim.nadam(momentum_decay=-1.0), "nadam: momentum_decay=-1.0"),
        (lambda: optim.radam(b1=-0.1), "radam: b1=-0.1"),
        (lambda: optim.adamax(b2=1.0), "adamax: b2=1.0"),
        (lambda: optim.rmsprop(decay=1.0), "rmsprop: decay=1.0"),
        (lambda: optim.adagrad(lr_decay=-1.0), "decay=-1.0"),
        (lambda: optim.adagrad(initial_accumulator_value=-1.0), "adagrad: initial_accumulator_value=-1.0"),
        (lambda: optim.adadelta(rho=1.0), "adadelta: rho=1.0 must be in [0, 1)"),
        (
            lambda: optim.adafactor(clipping_threshold=0.5),
            "adafactor: clipping_threshold=0.5 must be a finite number of at least 1 (cure: 1.0 is the default)",
        ),
        (lambda: optim.adafactor(decay_rate=-0.8), "adafactor: decay_rate=-0.8"),
        (lambda: optim.lion(b1=1.0), "lion: b1=1.0"),
        (lambda: optim.lamb(eps=-1.0), "eps=-1.0"),
        (lambda: optim.muon(momentum=1.0), "muon: momentum=1.0"),
        (lambda: optim.muon(adjust="none"), "muon: adjust='none' is unknown"),  # type: ignore[arg-type]
        (lambda: optim.muon(ns_steps=100), "muon: ns_steps=100 must be in [0, 100) (cure: 5 is the default)"),
        (lambda: optim.soap(shampoo_beta=1.5), "soap: shampoo_beta=1.5 must be in [0, 1) (cure: None is the default)"),
        (lambda: optim.soap(b1=None), "soap: b1=None is a NoneType, not a number"),  # type: ignore[arg-type]
        (lambda: optim.adafactor(eps=(None, -1.0)), "adafactor: eps=-1.0 must be a finite number of at least 0"),
        (
            lambda: optim.clip_by_block_rms(0.0),
            "clip_by_block_rms: threshold=0.0 must be a finite number greater than 0",
        ),
        (lambda: optim.schedule_free_sgd(0.1, 0.0), "schedule_free_sgd: b1=0.0 must be in (0, 1)"),
        (
            lambda: optim.lookahead(optim.sgd(0.1), 0),
            "lookahead: sync_period=0 must be an int of at least 1 (cure: 5 is the default)",
        ),
        (lambda: optim.scale(math.inf), "scale: factor=inf must be a finite number"),
    ],
)
def test_numbers_out_of_range_are_refused(make: Callable[[], Transform], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make()


def test_muon_refuses_what_is_no_matrix_and_shows_the_cure() -> None:
    params, _ = problem()
    message = (
        "params/bias: muon needs matrices, but this parameter has shape (4,) (cure: "
        'optim.partition({"muon": optim.muon(...), "adamw": optim.adamw(...)}, optim.muon_labels(model)))'
    )
    with pytest.raises(StateError, match=re.escape(message)):
        optim.muon().init(params)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.conv = nn.Conv1d(4, 4, 3)
        self.norm = nn.LayerNorm((2, 2))
        self.hidden = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.value = nn.Linear(4, 1)


def test_muon_labels_choose_hidden_matrices() -> None:
    labels = optim.muon_labels(Tied(), skip=("value",))
    assert {name for name, label in labels.items() if label == "muon"} == {"hidden.weight"}
    assert labels["head.weight"] == labels["embed.weight"] == "adamw"
    assert optim.muon_labels(Tied())["value.weight"] == "muon"
    with pytest.raises(ConfigError, match=r"no parameter is named 'heat'"):
        optim.muon_labels(Tied(), skip=("heat",))


def test_muon_for_hidden_matrices_and_adamw_for_the_rest() -> None:
    model = Tied()
    params = {name: p.detach() for name, p in model.named_parameters()}
    labels = optim.muon_labels(model, skip=("value",))
    tx = optim.partition({"muon": optim.muon(0.02), "adamw": optim.adamw(1e-3)}, labels)
    grads = {name: torch.randn_like(p) for name, p in params.items()}
    new, state = step(tx, params, tx.init(params), grads)
    for label, alone in (("muon", optim.muon(0.02)), ("adamw", optim.adamw(1e-3))):
        mine = {name: p for name, p in params.items() if labels[name] == label}
        expected, _ = step(alone, mine, alone.init(mine), {name: grads[name] for name in mine})
        assert_trees_close({name: new[name] for name in mine}, expected, exact=True)
    rates = {name: value.item() for name, value in optim.hyperparams(state).items()}
    assert rates == pytest.approx({"muon/learning_rate": 0.02, "adamw/learning_rate": 1e-3})


# ----------------------------------------------------------------------------------------------------------- from_torch

T = torch.optim
TORCH: dict[str, tuple[type[T.Optimizer], dict[str, Any]]] = {
    "Adadelta": (T.Adadelta, {}),
    "Adafactor": (T.Adafactor, {}),
    "Adagrad": (T.Adagrad, {"initial_accumulator_value": 0.5}),
    "Adam": (T.Adam, {"amsgrad": True}),
    "AdamW": (T.AdamW, {}),
    "Adamax": (T.Adamax, {}),
    "ASGD": (T.ASGD, {"t0": 5}),
    "Muon": (T.Muon, {}),
    "NAdam": (T.NAdam, {}),
    "RAdam": (T.RAdam, {}),
    "RMSprop": (T.RMSprop, {"centered": True, "momentum": 0.9}),
    "Rprop": (T.Rprop, {}),
    "SGD": (T.SGD, {}),
    "SGD with momentum": (T.SGD, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
}


class CountsInPython(T.Optimizer):
    """A third-party optimizer of an old style: Python numbers and None in its state, gradients changed in place."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state.setdefault("step", 0)
                state.setdefault("size", 0.0)
                state.setdefault("started", False)
                state.setdefault("nothing", None)
                state["step"] += 1
                state["size"] = 0.9 * state["size"] + float(p.grad.abs().max())
                state["started"] = True
                p.grad.add_(p, alpha=0.01)
                p.add_(p.grad, alpha=-group["lr"] / (state["step"] * (1 + state["size"])))


class KeepsInGroup(T.Optimizer):
    """A count that all parameters share, as schedule-free optimizers have."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"] / (100 + group["k"]))


class Anchored(T.Optimizer):
    """State that starts as the parameter, and an update that draws random numbers."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["anchor"] = p.clone()
                p.add_(p.grad + p - state["anchor"] + 0.0 * torch.randn_like(p), alpha=-group["lr"])
                state["anchor"].lerp_(p, 0.1)


class CountsLate(T.Optimizer):
    """A number that becomes a tensor, an odd key, and no state for a gradient of 0."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        for p in group["params"]:
            if not bool(p.grad.any()):
                continue
            state = self.state[p]
            if not state:
                state.update({"rms": 0, "m::quantized": torch.zeros_like(p)})
            state["rms"] = 0.5 * state["rms"] + p.grad.square().mean()
            state["m::quantized"].lerp_(p.grad, 0.5)
            p.sub_(group["lr"] * state["m::quantized"] / (1 + state["rms"]))


class Differs(T.Optimizer):
    """The difference of two gradients, which is 0 at the first step."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            before = self.state[p].setdefault("before", p.grad.clone())
            p.sub_(self.param_groups[0]["lr"] * (2 * p.grad - before))
            before.copy_(p.grad)


THIRD = {"counts": CountsInPython, "anchored": Anchored, "late": CountsLate}


def torch_error(
    cls: type[T.Optimizer],
    options: dict[str, Any],
    *,
    dtype: torch.dtype = torch.float64,
    scheduled: bool = False,
    capture: Callable[..., Any] | None = None,
    steps: int = 12,
) -> float:
    """The largest difference from the optimizer itself."""
    names = HIDDEN if cls is T.Muon else ("tall", "bias", "gain")
    params = {name: p for name, p in problem(dtype)[0].items() if name in names}
    twins = [nn.Parameter(p.clone()) for p in params.values()]
    twin = cls(twins, lr=0.02, **options)  # type: ignore[call-arg]
    tx = optim.from_torch(cls, lr=(lambda count: 0.02 * 0.9 ** count.double()) if scheduled else 0.02, **options)
    state, worst = tx.init(params), 0.0
    one = capture(tx, params, state) if capture else lambda p, s, g: step(tx, p, s, g)
    for count in range(steps):
        grads = {name: torch.sin(3 * p + count) for name, p in params.items()}
        for parameter, grad in zip(twins, grads.values(), strict=True):
            parameter.grad = grad.clone()
        twin.param_groups[0]["lr"] = 0.02 * 0.9**count if scheduled else 0.02
        twin.step()
        before = tree.clone((params, state, grads))
        new_params, new_state = one(params, state, grads)
        assert_trees_close((params, state, grads), before, exact=True)
        assert tree.signature(new_state) == tree.signature(state)
        params, state = new_params, new_state
        worst = max(worst, *(float((p - q.detach()).abs().max()) for p, q in zip(params.values(), twins, strict=True)))
    return worst


def wrong_number(argument: inspect.Parameter, check: Any) -> float:
    """A number that the type of an argument refuses."""
    for number in (-0.1, 1.5):
        try:
            check("", argument.name, number, "")
        except ConfigError:
            return number
    raise AssertionError(f"the type of {argument.name} refuses no number")


def test_every_optimizer_is_a_row_of_the_table() -> None:
    assert sorted(factories()) == sorted({*ROWS} - {"lookahead"})


@pytest.mark.parametrize("name", factories())
def test_an_error_names_the_optimizer_and_the_argument_that_were_typed(name: str) -> None:
    make = factories()[name]
    parameters = inspect.signature(make).parameters
    hints = get_type_hints(make, include_extras=True)
    parts = {argument: (hints[argument], *get_args(hints[argument])) for argument in parameters}
    found = {
        argument: [c for part in each for c in getattr(part, "__metadata__", ())] for argument, each in parts.items()
    }
    typed = {argument: checks[0] for argument, checks in found.items() if checks}
    assert {"learning_rate", "weight_decay"} <= set(typed)
    untyped = {argument for argument in parameters if hints[argument] in (int, float)}
    assert not untyped, "a number without a range in its type (optim/arguments.py)"
    for argument, check in typed.items():
        cure = re.escape(f"(cure: {parameters[argument].default!r} is the default)")
        with pytest.raises(ConfigError, match=rf"^{name}: {argument}=.* must be .* {cure}$"):
            make(**{argument: wrong_number(parameters[argument], check)})
    if "momentum" in typed:
        with pytest.raises(ConfigError, match=rf"schedule.*cure: optim\.inject\(optim\.{name}\)\(\.\.\., momentum="):
            make(momentum=lambda count: 0.9)


def test_what_is_left_of_such_errors() -> None:
    with pytest.raises(ConfigError, match=r"^sgd: nesterov=True needs dampening=0, not 0\.1"):
        optim.sgd(0.1, momentum=0.9, nesterov=True, dampening=0.1)
    with pytest.raises(
        ConfigError, match=r"^adafactor: eps=1e-08 must be a pair \(cure: \(None, 0\.001\) is the default\)"
    ):
        optim.adafactor(eps=1e-8)  # type: ignore[arg-type]


@pytest.mark.parametrize("within", ["alone", "a chain", "a group"])
def test_from_torch_is_not_made_anew_in_every_update(within: str) -> None:
    def factory(lr: Any) -> Transform:
        tx = optim.from_torch(T.SGD, lr=lr)
        if within == "a chain":
            return optim.chain(optim.clip_by_global_norm(1.0), tx)
        return optim.partition({"all": tx}, [("", "all")]) if within == "a group" else tx

    with pytest.raises(
        ConfigError, match=r"inject: .*from_torch, again in every update \(cure: optim\.inject\(optim\.adamw\)"
    ):
        optim.inject(factory)(lr=0.1).init({"w": torch.ones(2)})


@pytest.mark.parametrize("scheduled", [False, True], ids=["constant", "scheduled"])
@pytest.mark.parametrize(("cls", "options"), TORCH.values(), ids=TORCH)
def test_from_torch_is_that_optimizer(cls: type[T.Optimizer], options: dict[str, Any], scheduled: bool) -> None:
    assert torch_error(cls, options, scheduled=scheduled) < 1e-14


@pytest.mark.parametrize("scheduled", [False, True], ids=["constant", "scheduled"])
@pytest.mark.parametrize("cls", THIRD.values(), ids=THIRD)
def test_from_torch_takes_third_party_optimizers(cls: type[T.Optimizer], scheduled: bool) -> None:
    assert torch_error(cls, {}, scheduled=scheduled) < 1e-14


def by_make_fx(tx: Transform, params: Params, state: Tree) -> Callable[..., Any]:
    """The update alone, whose Python ran once."""
    from torch.fx.experimental.proxy_tensor import make_fx

    leaves, structure = tree.flatten((params, state, params))

    def flat(*values: Tensor) -> list[Tensor]:
        return tree.leaves(step(tx, *tree.unflatten(structure, values)))

    graph = make_fx(flat, tracing_mode="fake", _allow_non_fake_inputs=True)(*(leaf.clone() for leaf in leaves))
    out = tree.flatten((params, state))[1]
    return lambda *arguments: tree.unflatten(out, graph(*tree.leaves(arguments)))


def by_trace(tx: Transform, params: Params, state: Tree) -> Callable[..., Any]:
    """A step whose Python ran once."""

    def both(given: tuple[Params, Tree], grads: Params) -> tuple[Any, dict[str, Any]]:
        return step(tx, *given, grads), {}

    compiled = ps.compile_step(both, backend="aot_eager")
    compiled((params, state), params)
    return lambda params, state, grads: compiled((params, state), grads)[0]


# A float32 product of momenta in NAdam's state is rounded elsewhere; RAdam subtracts nearly equal numbers.
LIMITS = {T.NAdam: 1e-7, T.RAdam: 1e-7}


@pytest.mark.compile
@pytest.mark.parametrize("scheduled", [False, True], ids=["constant", "scheduled"])
@pytest.mark.parametrize("name", [name for name in TORCH if name != "Adafactor"])
def test_from_torch_can_be_traced(name: str, scheduled: bool) -> None:
    cls, options = TORCH[name]
    assert torch_error(cls, options, scheduled=scheduled, capture=by_trace) < LIMITS.get(cls, 1e-14)


@pytest.mark.compile
@pytest.mark.parametrize("name", ["AdamW", "RMSprop"])
def test_a_program_of_from_torch_compiles(name: str) -> None:
    cls, options = TORCH[name]
    tx = optim.from_torch(cls, **options, lr=lambda count: 0.02 * 0.9 ** count.double())
    program = ps.program(nn.Linear(3, 2), ps.supervised(nn.MSELoss()), tx)
    compiled = ps.compile_step(program.train_step, donate=True, backend="aot_eager")
    batch = torch.randn(5, 3), torch.randn(5, 2)
    eager = fast = program.init()
    for _ in range(3):
        (eager, _), (fast, _) = program.train_step(eager, batch), compiled(fast, batch)
    assert_trees_close(ps.clone(fast).params, eager.params)
    assert compiled.graphs == 1


@pytest.mark.compile
def test_from_torch_is_a_break_in_the_graph_of_a_users_torch_compile() -> None:
    def by_dynamo(tx: Transform, params: Params, state: Tree) -> Callable[..., Any]:
        return torch.compile(lambda p, s, g: step(tx, p, s, g), backend="eager")

    assert torch_error(T.SGD, {"momentum": 0.9}, scheduled=True, capture=by_dynamo) < 1e-14


def test_from_torch_states_are_tensors_under_fixed_keys() -> None:
    params, _ = problem(torch.float64)
    slots = optim.from_torch(T.AdamW).init(params).slots
    assert {key: leaf.dtype for key, leaf in slots["tall"].items()} == {
        "step": torch.float32,
        "exp_avg": torch.float64,
        "exp_avg_sq": torch.float64,
    }
    kept = optim.from_torch(CountsInPython).init(params)
    assert set(kept.slots["tall"]) == {"step:int", "size:float", "started:bool", "nothing"}
    assert kept.slots["tall"]["size:float"].shape == (1,)
    late = optim.from_torch(CountsLate).init(params)
    assert set(late.slots["tall"]) == {"rms:scalar", "m::quantized"}
    assert late.slots["tall"]["rms:scalar"].shape == (1,), "a 0-d float64 leaf would not survive donation"
    assert torch.equal(optim.from_torch(Anchored).init(params).slots["tall"]["anchor"], params["tall"])


TENSORS: list[tuple[type[T.Optimizer], dict[str, Any]]] = [
    (T.Muon, {"lr": torch.tensor(1e-3)}),
    (T.Muon, {"lr": torch.tensor(1e-3, dtype=torch.float64)}),
    (T.AdamW, {"lr": torch.tensor(1e-2), "weight_decay": 0.1}),
    (T.SGD, {"lr": torch.tensor(1e-1), "momentum": 0.9, "weight_decay": 0.1}),
    (T.RMSprop, {"lr": torch.tensor(1e-2), "weight_decay": 0.1}),
    (T.Adam, {"lr": torch.tensor(1e-2), "betas": (torch.tensor(0.9), torch.tensor(0.99))}),
    (T.Adam, {"lr": 1e-2, "weight_decay": torch.tensor(0.1), "eps": torch.tensor(1e-6)}),
]


@pytest.mark.parametrize(("cls", "options"), TENSORS)
def test_from_torch_rounds_options_that_are_tensors_as_torch_does(
    cls: type[T.Optimizer], options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    param, target = nn.Parameter(torch.randn(6, 5, dtype=torch.float64)), torch.randn(6, 5, dtype=torch.float64)
    tx = optim.from_torch(cls, **options)
    params = {"w": param.detach().clone()}
    state, theirs = tx.init(params), cls([param], **options)
    for _ in range(6):
        theirs.zero_grad()
        (param - target).square().sum().backward()
        theirs.step()
        updates, state = tx.update({"w": 2 * (params["w"] - target)}, state, params)
        params = optim.apply_updates(params, updates)
    assert (params["w"] - param.detach()).abs().max() < 1e-14
    assert state.learning_rate.dtype == torch.float32


@pytest.mark.parametrize("cls", [T.ASGD, T.Adafactor, T.RAdam])  # the first two read a value in their first step
def test_from_torch_has_a_state_on_meta(cls: type[T.Optimizer]) -> None:
    params = {"w": torch.ones(3, 2), "b": torch.ones(3)}
    tx = optim.from_torch(cls, lr=1e-2)
    found = tree.with_paths(tx.init({name: p.to("meta") for name, p in params.items()}))
    expected = tree.with_paths(tx.init(params))
    for (path, leaf), (wanted, other) in zip(found, expected, strict=True):
        assert (path, leaf.shape, leaf.dtype, leaf.is_meta) == (wanted, other.shape, other.dtype, True)


def test_from_torch_reports_its_learning_rate() -> None:
    params, grads = problem()
    assert optim.hyperparams(optim.from_torch(T.AdamW).init(params))["learning_rate"].item() == pytest.approx(1e-3)
    tx = optim.from_torch(T.SGD, lr=warm_up)
    _, state = step(tx, params, tx.init(params), grads)
    _, state = step(tx, params, state, grads)
    assert optim.hyperparams(state)["learning_rate"].item() == pytest.approx(0.004)


def test_from_torch_goes_on_from_a_state_of_another_process() -> None:
    params, grads = problem(torch.float64)
    one = optim.from_torch(T.AdamW, lr=0.1)
    params, state = step(one, params, one.init(params), grads)
    other = optim.from_torch(T.AdamW, lr=0.1)  # its init is never called
    assert_trees_close(step(other, params, state, grads), step(one, params, state, grads), exact=True)


@pytest.mark.compile
def test_a_state_of_another_process_compiles() -> None:
    params = {"w": torch.ones(2)}
    state = optim.from_torch(T.SGD, lr=0.5).init(params)
    assert by_trace(optim.from_torch(T.SGD, lr=0.5), params, state)(params, state, params)[0]["w"].tolist() == [0.5] * 2


@pytest.mark.compile
def test_one_transform_serves_models_whose_parameters_share_names() -> None:
    tx = optim.from_torch(T.SGD, lr=0.5, momentum=0.9)
    small, large = {"w": torch.ones(2)}, {"w": torch.ones(3)}
    states = [tx.init(small), tx.init(large)]
    for params, state in zip((small, large), states, strict=True):
        assert by_trace(tx, params, state)(params, state, params)[0]["w"].tolist() == [0.5] * len(params["w"])


def test_from_torch_leaves_the_global_generator_alone() -> None:
    params, _ = problem()
    before = torch.get_rng_state()
    optim.from_torch(Anchored).init(params)
    assert torch.equal(torch.get_rng_state(), before)


def test_from_torch_works_below_a_partition() -> None:
    params, grads = problem(torch.float64)
    tx = optim.partition(
        {"a": optim.from_torch(T.Muon, lr=0.1), "b": optim.from_torch(T.SGD, lr=0.1)}, [("tall|wide", "a"), ("", "b")]
    )
    new, state = step(tx, params, tx.init(params), grads)
    torch.testing.assert_close(new["bias"], params["bias"] - 0.1 * grads["bias"])
    assert set(optim.hyperparams(state)) == {"a/learning_rate", "b/learning_rate"}


class NeedsClosure(T.Optimizer):
    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is None:
            raise RuntimeError("a closure is needed")


class Grows(CountsInPython):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if self.state[p]:
                self.state[p]["second"] = torch.zeros(1)
            self.state[p]["first"] = torch.zeros(1)


class KeepsAList(CountsInPython):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.state[p]["history"] = [1.0]


class KeepsOnItself(CountsInPython):
    calls = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.calls = self.__dict__.get("calls", 0) + 1

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.calls = 0


class KeepsBesideParameters(CountsInPython):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.state["k"] = self.state.get("k", 0) + 1  # type: ignore[call-overload,index]


class Hides(CountsInPython):
    """Slower and slower, by a count where nobody looks."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._count = self.__dict__.get("_count", 0) + 1
        for p in self.param_groups[0]["params"]:
            p.data.sub_(p.grad / self._count)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: optim.from_torch(KeepsBesideParameters), "it keeps state elsewhere than by parameter: state['k']"),
        (lambda: optim.from_torch(KeepsInGroup), "it keeps state elsewhere than by parameter: param_groups[0]['k']"),
        (lambda: optim.from_torch(Hides), "rebuilt from its state it computes other updates"),
        (lambda: optim.from_torch(T.LBFGS), "from_torch(LBFGS): its step needs a closure"),
        (lambda: optim.from_torch(T.SparseAdam), "from_torch(SparseAdam): it needs sparse gradients"),
        (lambda: optim.from_torch(T.SGD, lr=-1.0), "from_torch(SGD): lr=-1.0"),
        (lambda: optim.from_torch(T.AdamW, betas=(2.0, 0.9)), "from_torch(AdamW): a step failed: Invalid beta"),
        (lambda: optim.from_torch(T.Muon), "from_torch(Muon): a step failed: Muon only supports 2D"),
        (lambda: optim.from_torch(NeedsClosure), "a step failed: a closure is needed"),
        (lambda: optim.from_torch(Grows), "its state gained or lost ['second'] after the first step"),
        (lambda: optim.from_torch(KeepsAList), "its state 'history' of a parameter is a list: [1.0]"),
        (lambda: optim.from_torch(KeepsOnItself), "it keeps state elsewhere than by parameter: calls"),
        (lambda: optim.from_torch(Differs), "its first step differs from the later ones (cure: use an optimizer of"),
        (
            lambda: optim.from_torch(T.SGD, lr=1e-9, momentum=0.9, dampening=1e-3),
            "its first step differs from the later ones (cure: optim.sgd(..., dampening=0.5))",
        ),
    ],
)
def test_from_torch_refuses_what_it_cannot_keep(make: Callable[[], Transform], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make().init(problem()[0])


@pytest.mark.compile
@pytest.mark.parametrize(
    ("cls", "options", "reason"),
    [
        (T.Adafactor, {}, "GuardOnDataDependentSymNode|dtype is needed to compute eps1"),  # the latter of torch 2.11
        (CountsInPython, {}, r"its state has Python numbers \(size, started, step\)"),
    ],
)
def test_what_cannot_be_compiled_says_so(cls: type[T.Optimizer], options: dict[str, Any], reason: str) -> None:
    tx = optim.from_torch(cls, **options)
    params, _ = problem()
    state = tx.init(params)
    message = rf"(?s)from_torch\({cls.__name__}\): its step cannot be compiled: .*({reason}).*cure: set compile=False"
    with pytest.raises(ConfigError, match=message):
        by_trace(tx, params, state)
