"""Laws that hold for everything in a table: states are values, every form of a step computes the same, a graph serves a
whole run, micro-batches add up, metrics are a monoid.

Each law is a function that raises AssertionError (or purestep's own error), is run over the table, and is run over
implementations that were broken on purpose: `test_..._catches_...`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from helpers import assert_trees_close, image_batch, tiny_convnet, tiny_mlp, vector_batch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from optimizers import ROWS
from torch import Tensor, nn

import purestep as ps
from purestep import ema, metrics, optim, scaler, schedules, tree
from purestep.errors import StepContractError
from purestep.optim import Transform
from purestep.state.packed import pack, packing, unpack
from purestep.torch_ext import tracing
from purestep.types import Mean, Params, Program, TrainState

CRITERION = nn.CrossEntropyLoss()
compiled = partial(ps.compile_step, backend="aot_eager")
# Derandomized, so that a run is a run; not shrunk, since shrinking a law that compiles takes minutes.
few = settings(
    max_examples=8,
    deadline=None,
    derandomize=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=list(HealthCheck),
)
many = settings(few, max_examples=60)
seeds = st.integers(0, 2**31 - 1)


class Case(NamedTuple):
    """A program of the table."""

    program: Callable[[], Program]
    batch: Callable[[int], Any] = lambda seed: vector_batch(8, seed)  # seed -> batch
    exact: bool = True  # packed as well: no sum over all parameters is part of the state
    on_the_tree: bool = False  # donated in the form that transforms which cannot be packed take, too


def mlp(tx: Transform, **options: Any) -> Program:
    return ps.program(tiny_mlp(), ps.supervised(CRITERION, metrics={"accuracy": metrics.accuracy}), tx, **options)


def frozen() -> Program:
    module = tiny_mlp()
    module[0].requires_grad_(False)
    return ps.program(module, ps.supervised(CRITERION), optim.adam(1e-2), ema=0.9)


def convnet(**options: Any) -> Program:
    return ps.program(tiny_convnet(), ps.supervised(CRITERION), optim.sgd(0.1, momentum=0.9), **options)


def images(seed: int) -> Any:
    return image_batch(4, seed)


def doubles(seed: int) -> Any:
    return vector_batch(8, seed, torch.float64)


WARMUP_COSINE = schedules.warmup_cosine(peak=1e-2, warmup=2, total=6)
MASK = optim.decay_mask(tiny_mlp())
OPTIMIZERS: dict[str, Callable[[], Transform]] = {
    **ROWS,
    "adamw": lambda: optim.adamw(1e-2, weight_decay=0.1, mask=MASK),
    "rmsprop": lambda: optim.rmsprop(1e-2, momentum=0.9, centered=True),
    "schedule_free_adamw": lambda: optim.schedule_free_adamw(1e-2, weight_decay=0.1, mask=MASK),
    # Other dimensions have eigenvalues of zero, whose eigenvectors depend on rounding.
    "soap": lambda: optim.partition(
        {"soap": optim.soap(1e-2, precondition_frequency=2, max_precond_dim=4), "adamw": optim.adamw(1e-2)},
        [(r"^0\.weight$", "soap"), ("", "adamw")],
    ),
    "sgd nesterov": lambda: optim.sgd(0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw scheduled": lambda: optim.adamw(WARMUP_COSINE),
    "partition": lambda: optim.partition(
        {"slow": optim.sgd(0.01), "fast": optim.adam(0.1)}, [("^0", "slow"), ("", "fast")]
    ),
    "inject": lambda: optim.inject(optim.adamw)(learning_rate=1e-2, weight_decay=0.1),
    "value clip": lambda: optim.chain(optim.clip_by_value(0.01), optim.identity(), optim.scale(2.0), optim.sgd(0.1)),
    "freeze": lambda: optim.chain(optim.adam(1e-2), optim.freeze(r"^0\.bias$")),
    "from_torch": lambda: optim.from_torch(torch.optim.SGD, lr=0.1, momentum=0.9),
}
CASES: dict[str, Case] = {
    # The step size of prodigy is a sum over all parameters, and soap's graph has a branch.
    **{
        name: Case(partial(lambda make: mlp(make()), make), exact=name not in ("prodigy", "soap"))
        for name, make in OPTIMIZERS.items()
    },
    "norm clip": Case(lambda: mlp(optim.chain(optim.clip_by_global_norm(0.1), optim.sgd(0.1))), exact=False),
    "agc": Case(lambda: mlp(optim.chain(optim.adaptive_grad_clip(0.1), optim.sgd(0.1)))),
    "ema": Case(lambda: mlp(optim.adam(0.1), ema=ema.average(0.99, warmup=True)), on_the_tree=True),
    "ema of the initial weights": Case(
        lambda: mlp(optim.adam(0.1), ema=ema.average(0.9, initial=True)), on_the_tree=True
    ),
    "ema of every second update": Case(lambda: mlp(optim.adam(0.1), ema=ema.average(0.9, every=2)), on_the_tree=True),
    "swa": Case(lambda: mlp(optim.adam(0.1), ema=ema.swa(2)), on_the_tree=True),
    "sam": Case(lambda: mlp(optim.adam(1e-2), sam=ps.Sam(0.1, adaptive=True)), exact=False),
    "ema of buffers": Case(lambda: convnet(ema=ema.average(0.9, buffers="average")), images),
    "ema of buffers, every second update": Case(
        lambda: convnet(ema=ema.average(0.9, every=2, buffers="average")), images
    ),
    "accumulate": Case(lambda: mlp(optim.adam(1e-2), accumulate=3, ema=0.9), on_the_tree=True),
    "microbatches": Case(lambda: mlp(optim.adam(1e-2), microbatches=2)),
    "scaler": Case(lambda: mlp(optim.adam(1e-2), precision="16-mixed")),
    "scaler accumulate": Case(lambda: mlp(optim.adam(1e-2), precision="16-mixed", accumulate=2)),
    "bf16-mixed": Case(lambda: mlp(optim.sgd(0.1), precision="bf16-mixed")),
    "bf16-true": Case(lambda: mlp(optim.sgd(0.1), precision="bf16-true", ema=0.9)),
    "64-true": Case(lambda: mlp(optim.adam(1e-2), precision="64-true"), doubles),
    "skip": Case(lambda: mlp(optim.sgd(0.1), nonfinite="skip")),
    "frozen": Case(frozen),
    "batch norm and dropout": Case(convnet, images, on_the_tree=True),
    "keep_eval": Case(lambda: convnet(keep_eval=("1",)), images),
}
TABLE = pytest.mark.parametrize("name", CASES)


def through(step: Callable[..., Any], state: Any, batches: list[Any]) -> tuple[Any, list[Any]]:
    found = []
    for batch in batches:
        state, measured = step(state, batch)
        found.append(measured)
    return ps.clone(state), found


# --- a state is a value -----------------------------------------------------------------------------------------------


def keeps_kind(step: Callable[..., Any], state: Any, batch: Any) -> None:
    """Structure, shapes, dtypes and devices of the state; no 0-d float64, metrics are pairs of the same shape."""
    new, measured = step(state, batch)
    assert tree.signature(new)[0] == tree.signature(state)[0]
    assert tree.signature(new) == tree.signature(state)
    assert not [path for path, leaf in tree.with_paths(new) if leaf.dim() == 0 and leaf.dtype == torch.float64]
    for mean in measured.values():
        assert mean.total.shape == mean.weight.shape
        assert mean.total.dtype == measured["loss"].total.dtype


@TABLE
def test_a_step_is_a_pure_function_of_its_arguments(name: str) -> None:
    case = CASES[name]
    program = case.program()
    state = program.init()
    for seed in range(2):  # the second from a state that has moved
        ps.testing.assert_pure(program.train_step, state, case.batch(seed))
        keeps_kind(program.train_step, state, case.batch(seed))
        state, _ = program.train_step(state, case.batch(seed))


@pytest.mark.parametrize("name", ["accumulate", "scaler accumulate"])
def test_a_flush_is_pure_too(name: str) -> None:
    case = CASES[name]
    program = case.program()
    state, _ = program.train_step(program.init(), case.batch(0))
    ps.testing.assert_pure(lambda state, batch: program.flush(state), state, None)


IMPURE: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "writes its state": (lambda s, b: (s._replace(params={k: p.mul_(0.5) for k, p in s.params.items()}), {}), "writes"),
    "writes its batch": (lambda s, b: (s, {"x": Mean(b[0].add_(1).sum(), torch.ones(()))}), "batch/0.*writes"),
    "writes a buffer": (lambda s, b: (s._replace(buffers={k: x.add_(1) for k, x in s.buffers.items()}), {}), "writes"),
    "draws": (lambda s, b: (s, {"noise": Mean(torch.rand(()), torch.ones(()))}), "torch's global generator"),
    "changes a dtype": (lambda s, b: (s._replace(step=s.step.float()), {}), "state/step: .* became"),
    "drops a leaf": (lambda s, b: (s._replace(params={}), {}), "structure"),
    "keeps a graph": (
        lambda s, b: (s._replace(params={k: p.requires_grad_() * 1 for k, p in ps.clone(s.params).items()}), {}),
        "graph",
    ),
}


@pytest.mark.parametrize("fault", IMPURE)
def test_the_law_of_purity_catches(fault: str) -> None:
    step, message = IMPURE[fault]
    with pytest.raises(StepContractError, match=message):
        ps.testing.assert_pure(step, convnet().init(), images(0))


def test_the_law_of_kinds_catches_a_wider_leaf() -> None:
    def widened(state: TrainState, batch: Any) -> Any:
        return state._replace(params={name: p.double() for name, p in state.params.items()}), {}

    with pytest.raises(AssertionError):
        keeps_kind(widened, mlp(optim.sgd(0.1)).init(), None)


# --- transforms, without a step around them ---------------------------------------------------------------------------


def update_is_pure(tx: Transform, params: Params, grads: Params) -> None:
    """Twice the same bits, inputs untouched, updates and state of the kinds that went in."""
    state = tx.init(params)
    before = tree.clone((grads, state, params))
    first = tree.clone(tx.update(grads, state, params))
    second = tx.update(grads, state, params)
    assert_trees_close((grads, state, params), before, exact=True)
    assert_trees_close(second, first, exact=True)
    assert tree.signature(second) == tree.signature((grads, state))


def random_tree(seed: int, dtype: torch.dtype = torch.float32) -> Params:
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: p.shape for name, p in tiny_mlp().named_parameters()}
    return {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("name", OPTIMIZERS)
@few
@given(seed=seeds)
def test_updates_are_pure(name: str, seed: int) -> None:
    update_is_pure(OPTIMIZERS[name](), random_tree(seed), random_tree(seed + 1))


def test_the_law_of_updates_catches_a_momentum_that_is_written_in_place() -> None:
    def update(updates: Params, state: Params, params: Params) -> tuple[Params, Params]:
        return {name: -u for name, u in updates.items()}, {name: m.add_(updates[name]) for name, m in state.items()}

    broken = Transform(lambda params: tree.map(torch.zeros_like, params), update)
    with pytest.raises(AssertionError):
        update_is_pure(broken, random_tree(0), random_tree(1))


def packs(tx: Transform, params: Params, grads: Params) -> None:
    """An elementwise transform computes the same numbers on flat buffers; packing and unpacking lose nothing."""
    assert tx.elementwise
    form = packing(params, tx.labels(params))
    state = _as_state(params, tx.init(params))
    assert_trees_close(unpack(form, pack(form, state)), state, exact=True)
    for _ in range(3):
        packed = pack(form, state)
        assert packed is not None
        updates, opt_state = tx.update(form.collect(grads), packed.opt_state, packed.params)
        expected, wanted = tx.update(grads, state.opt_state, state.params)
        found = unpack(form, packed._replace(opt_state=opt_state, params=updates))
        assert_trees_close(found.params, expected, exact=True)
        assert_trees_close(found.opt_state, wanted, exact=True)
        state = state._replace(opt_state=wanted)


def _as_state(params: Params, opt_state: Any) -> TrainState:
    return mlp(optim.sgd(0.1)).init()._replace(params=params, opt_state=opt_state)


@pytest.mark.parametrize("name", [name for name, make in OPTIMIZERS.items() if make().elementwise])
@few
@given(seed=seeds)
def test_elementwise_transforms_may_be_packed(name: str, seed: int) -> None:
    packs(OPTIMIZERS[name](), random_tree(seed), random_tree(seed + 1))


def test_the_law_of_packing_catches_a_norm_by_leaf_that_claims_to_be_elementwise() -> None:
    def update(updates: Params, state: Any, params: Params) -> tuple[Params, Any]:
        return {name: u / u.norm() for name, u in updates.items()}, state

    broken = Transform(lambda params: (), update, elementwise=True)
    with pytest.raises(AssertionError):
        packs(broken, random_tree(0), random_tree(1))


# --- every form of a step computes the same ---------------------------------------------------------------------------


def forms_agree(case: Case, program: Program, batches: list[Any], steps: dict[str, Any] | None = None) -> None:
    """Eager, compiled, donated on the tree, donated and packed: one state, the same metrics, the fewest graphs."""
    steps = steps or forms(program)
    expected, wanted = through(program.train_step, program.init(seed=1), batches)
    graphs = 1 if program.static.accumulate == 1 else 2
    for form, step in steps.items():
        found, measured = through(step, program.init(seed=1), batches)
        exact = case.exact or form == "donated"
        tolerance: dict[str, Any] = {"exact": True} if exact else {"rtol": 1e-6, "atol": 1e-7}
        assert_trees_close(found, expected, **tolerance)
        # The norm of the gradient is a sum over all of them, which the packed form takes in another order.
        assert_trees_close(measured, wanted, rtol=1e-5, atol=1e-7)
        assert step.graphs == graphs, f"{form}: {step.graphs} graphs"


def forms(program: Program, *, on_the_tree: bool = True) -> dict[str, Any]:
    """The compiled forms: packed, unless the transform is not elementwise, which stays on the tree in any of them."""
    found = {"compiled": compiled(program.train_step), "packed": compiled(program.train_step, donate=True)}

    def not_packed(state: Any, batch: Any) -> Any:
        return program.train_step(state, batch)

    not_packed.static = program.static._replace(labels=None)  # type: ignore[attr-defined]
    return {**found, "donated": compiled(not_packed, donate=True)} if on_the_tree else found


@pytest.mark.compile
@TABLE
def test_eager_compiled_donated_and_packed_steps_agree(name: str) -> None:
    case = CASES[name]
    program = case.program()
    steps = forms(program, on_the_tree=case.on_the_tree)
    if name in OPTIMIZERS:
        del steps["compiled"]  # the packed graph between two copies, whatever the optimizer

    @settings(few, max_examples=2)
    @given(seed=seeds, count=st.integers(4, 6))
    def law(seed: int, count: int) -> None:
        forms_agree(case, program, [case.batch(seed + number) for number in range(count)], steps)

    law()


@pytest.mark.compile
def test_the_law_of_forms_catches_a_transform_that_computes_something_else_inside_a_graph() -> None:
    def update(updates: Params, state: Any, params: Params) -> tuple[Params, Any]:
        factor = 0.1000001 if tracing.in_graph() else 0.1
        return {name: -factor * u for name, u in updates.items()}, state

    broken = Case(lambda: mlp(Transform(lambda params: (), update)))
    with pytest.raises(AssertionError, match="params"):
        forms_agree(broken, broken.program(), [broken.batch(0)] * 3)


@pytest.mark.compile
def test_the_law_of_forms_catches_aleaf_norm_in_the_packed_forms_alone() -> None:
    def update(updates: Params, state: Any, params: Params) -> tuple[Params, Any]:
        return {name: -0.1 * u / u.norm() for name, u in updates.items()}, state

    broken = Case(lambda: mlp(Transform(lambda params: (), update, elementwise=True)))
    program = broken.program()
    steps = forms(program)
    batches = [broken.batch(seed) for seed in range(3)]
    forms_agree(broken, program, batches, {"donated": steps["donated"]})
    for form in ("compiled", "packed"):
        with pytest.raises(AssertionError, match="params"):
            forms_agree(broken, program, batches, {form: steps[form]})


@pytest.mark.compile
def test_the_law_of_forms_catches_a_key_that_stands_still() -> None:
    program = convnet()

    def stuck(state: TrainState, batch: Any) -> Any:
        new, measured = program.train_step(state, batch)
        return new._replace(key=state.key), measured

    with pytest.raises(AssertionError):
        forms_agree(Case(lambda: program), program._replace(train_step=stuck), [images(0)] * 2)


# --- one graph for a whole run ----------------------------------------------------------------------------------------


def graphs_of(step: Any, state: Any, batches: list[Any]) -> int:
    """Graphs that a run makes."""
    before = step.graphs
    through(step, state, batches)
    return step.graphs - before


@pytest.mark.compile
@pytest.mark.parametrize("donate", [False, True])
def test_one_graph_serves_a_whole_warm_up_and_cosine(donate: bool) -> None:
    schedule = schedules.warmup_cosine(peak=1e-2, warmup=5, total=30)
    program = mlp(optim.adamw(schedule), ema=0.9)
    step = compiled(program.train_step, donate=donate)
    batches = [vector_batch(8, seed) for seed in range(32)]
    found, measured = through(step, program.init(), batches)
    assert_trees_close(found, through(program.train_step, program.init(), batches)[0], exact=True)
    rates = [float(m["lr"]) for m in measured]
    assert rates == pytest.approx([float(schedule(torch.tensor(count))) for count in range(32)])
    assert rates[0] < rates[4] > rates[20] > rates[29]
    assert step.graphs == 1


@pytest.mark.compile
@pytest.mark.parametrize("donate", [False, True])
def test_a_changed_hyperparameter_makes_no_new_graph(donate: bool) -> None:
    program = mlp(optim.inject(optim.sgd)(learning_rate=0.1, momentum=0.9))
    step = compiled(program.train_step, donate=donate)
    state, eager = program.init(), program.init()
    for number, rate in enumerate((0.1, 0.1, 0.01, 0.5)):
        state = state._replace(opt_state=optim.set_hyperparams(state.opt_state, learning_rate=rate))
        eager = eager._replace(opt_state=optim.set_hyperparams(eager.opt_state, learning_rate=rate))
        state, measured = step(state, vector_batch(8, number))
        eager, _ = program.train_step(eager, vector_batch(8, number))
        assert float(measured["lr"]) == pytest.approx(rate)
    assert step.graphs == 1
    assert_trees_close(ps.clone(state), eager, exact=True)


def test_the_law_of_one_graph_catches_a_number_that_is_baked_into_it() -> None:
    """A rate that is an argument and a Python float."""
    step = compiled(lambda state, batch: ({"w": state["w"] - batch["lr"] * batch["x"]}, {}))
    batches = [{"x": torch.ones(2), "lr": 0.1 * number} for number in range(1, 4)]
    assert graphs_of(step, {"w": torch.zeros(2)}, batches) == 3


@pytest.mark.compile
@pytest.mark.parametrize("donate", [False, True])
def test_accumulation_takes_two_graphs_and_a_ragged_batch_one_more(donate: bool) -> None:
    program = mlp(optim.sgd(0.1), accumulate=3)
    fast = ps.compile_program(program, donate=donate, backend="aot_eager")
    state, eager = fast.init(), program.init()
    for _ in range(3):
        for number, rows in enumerate((8, 8, 8, 8, 8, 8, 5)):
            state, _ = fast.train_step(state, vector_batch(rows, number))
            eager, _ = program.train_step(eager, vector_batch(rows, number))
        state, _ = fast.flush(state)
        eager, _ = program.flush(eager)
    assert fast.train_step.graphs == 3
    assert fast.flush.graphs == 1
    assert_trees_close(ps.clone(state), eager, exact=True)


@pytest.mark.compile
@pytest.mark.optimized
def test_batches_of_any_size_take_three_graphs() -> None:
    program = mlp(optim.sgd(0.1))
    step = compiled(program.train_step)
    sizes = [8, 8, 5, 8, 5, 3, 7, 2, 16, 12, 30]
    batches = [vector_batch(rows, number) for number, rows in enumerate(sizes)]
    found, _ = through(step, program.init(), batches)
    assert step.graphs == 3  # two of one size each, and one for all the others
    assert_trees_close(found, through(program.train_step, program.init(), batches)[0], rtol=1e-6, atol=1e-7)


# --- micro-batches add up ---------------------------------------------------------------------------------------------

ROWS = 24


def linear(accumulate: int = 1, microbatches: int = 1, objective: Any = None) -> Program:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Linear(4, 3)
    return ps.program(
        module,
        objective or ps.supervised(CRITERION),
        optim.sgd(0.1, momentum=0.9),
        precision="64-true",
        accumulate=accumulate,
        microbatches=microbatches,
    )


class Adder(NamedTuple):
    """Steps of one program that accumulates, in every form, and of one that does not."""

    program: Program
    whole: Program
    steps: dict[str, Any]


def adder(parts: int, objective: Any = None) -> Adder:
    program = linear(parts, objective=objective)
    steps = {"eager": program.train_step}
    steps["compiled"] = compiled(program.train_step)
    steps["donated"] = compiled(program.train_step, donate=True)
    return Adder(program, linear(objective=objective), steps)


def micro_batches_add_up(found: Adder, sizes: list[int], seed: int, forms: list[str]) -> None:
    """Two windows of micro-batches of these sizes make the two updates that their whole batches make."""
    windows = [vector_batch(sum(sizes), seed + number, torch.float64) for number in range(2)]
    expected, _ = through(found.whole.train_step, found.whole.init(), windows)
    pieces = [piece for x, y in windows for piece in zip(torch.split(x, sizes), torch.split(y, sizes), strict=True)]
    for form in forms:
        state, _ = through(found.steps[form], found.program.init(), pieces)
        assert int(state.updates) == 2
        assert_trees_close(state.params, expected.params, rtol=1e-12, atol=1e-12)
        assert_trees_close(state.opt_state, expected.opt_state, rtol=1e-12, atol=1e-12)


@few
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5), seed=seeds)
def test_micro_batches_of_random_sizes_equal_the_whole_batch(sizes: list[int], seed: int) -> None:
    micro_batches_add_up(adder(len(sizes)), sizes, seed, ["eager"])


@pytest.mark.compile
@pytest.mark.optimized
def test_compiled_and_donated_micro_batches_of_random_sizes_equal_the_whole_batch() -> None:
    found = adder(3)

    @settings(few, max_examples=20)
    @given(sizes=st.lists(st.integers(1, 9), min_size=3, max_size=3), seed=seeds)
    def any_size(sizes: list[int], seed: int) -> None:
        micro_batches_add_up(found, sizes, seed, ["donated"])

    @few
    @given(sizes=st.lists(st.sampled_from([3, 5]), min_size=3, max_size=3), seed=seeds)
    def two_sizes(sizes: list[int], seed: int) -> None:
        micro_batches_add_up(found, sizes, seed, ["compiled"])

    any_size()
    two_sizes()
    # To add and to close a window: of the first two sizes, of one row if it is none of them, of all others.
    assert 6 <= found.steps["donated"].graphs <= 8
    assert found.steps["compiled"].graphs == 4


@few
@given(count=st.integers(1, 6), seed=seeds)
def test_a_batch_split_inside_a_step_equals_the_whole_batch(count: int, seed: int) -> None:
    batch = vector_batch(ROWS, seed, torch.float64)
    split, whole = linear(microbatches=count), linear()
    found, _ = split.train_step(split.init(), batch)
    expected, _ = whole.train_step(whole.init(), batch)
    assert_trees_close(found, expected, rtol=1e-12, atol=1e-12)


@few
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4), seed=seeds)
def test_an_open_window_is_flushed_with_its_true_weight(sizes: list[int], seed: int) -> None:
    program, whole = linear(len(sizes) + 1), linear()
    x, y = vector_batch(sum(sizes), seed, torch.float64)
    state, _ = through(
        program.train_step, program.init(), list(zip(torch.split(x, sizes), torch.split(y, sizes), strict=True))
    )
    state, _ = program.flush(state)
    expected, _ = whole.train_step(whole.init(), (x, y))
    assert_trees_close(state.params, expected.params, rtol=1e-12, atol=1e-12)


def unweighted(model: Any, batch: Any) -> ps.Loss:
    """The mean of micro-batch means: the bug of half the trainers."""
    return ps.Loss(CRITERION(model(batch[0]), batch[1]), torch.tensor(1.0), {})


def summed(model: Any, batch: Any) -> ps.Loss:
    """Says that it is a mean over its rows, and is their sum."""
    return ps.Loss(CRITERION(model(batch[0]), batch[1]) * len(batch[1]), torch.tensor(float(len(batch[1]))), {})


@pytest.mark.parametrize("objective", [unweighted, summed])
def test_the_law_of_micro_batches_catches_a_wrong_weight(objective: Any) -> None:
    found = adder(2, objective)
    with pytest.raises(AssertionError):
        micro_batches_add_up(found, [1, 7], 0, ["eager"])
    x, y = vector_batch(8, 0, torch.float64)
    parts = [(x[:1], y[:1]), (x[1:], y[1:])]
    with pytest.raises(StepContractError, match="differs by .* from the update of the whole batch"):
        ps.testing.assert_accumulates(found.program, found.whole, (x, y), parts, rtol=1e-12)


# --- metrics are a monoid ---------------------------------------------------------------------------------------------

whole_numbers = st.integers(-1000, 1000).map(float)  # of which float32 makes exact sums
scalars = st.tuples(whole_numbers, whole_numbers).map(lambda pair: Mean(*map(torch.tensor, pair)))
vectors = st.lists(st.tuples(whole_numbers, whole_numbers), min_size=3, max_size=3).map(
    lambda pairs: Mean(*(torch.tensor(column) for column in zip(*pairs, strict=True)))
)
metric_dicts = st.fixed_dictionaries({}, optional={"loss": scalars, "accuracy": scalars, "recall": vectors})
Merge = Callable[[Any, Any], Any]


def is_monoid(merge: Merge, a: Any, b: Any, c: Any) -> None:
    """Associative, with `metrics.empty` as its unit on both sides, and nothing that went in is changed."""
    before = tree.clone((a, b, c))
    whole = merge(merge(a, b), c)
    assert set(whole) == set(a) | set(b) | set(c)
    assert_trees_close(whole, merge(a, merge(b, c)), exact=True)
    assert_trees_close(merge(a, metrics.empty()), a, exact=True)
    assert_trees_close(merge(metrics.empty(), a), a, exact=True)
    assert_trees_close((a, b, c), before, exact=True)


@many
@given(a=metric_dicts, b=metric_dicts, c=metric_dicts)
def test_metrics_are_a_monoid(a: Any, b: Any, c: Any) -> None:
    is_monoid(metrics.merge, a, b, c)
    assert_trees_close(metrics.merge(a, b), metrics.merge(b, a), exact=True)


@few
@given(seed=seeds, cuts=st.lists(st.integers(1, ROWS - 1), min_size=0, max_size=3))
def test_metrics_of_parts_merge_to_those_of_the_whole(seed: int, cuts: list[int]) -> None:
    program = linear(objective=ps.supervised(CRITERION, metrics={"accuracy": metrics.accuracy}))
    state, batch = program.init(), vector_batch(ROWS, seed, torch.float64)
    edges = [0, *sorted(set(cuts)), ROWS]
    total = metrics.empty()
    for low, high in itertools.pairwise(edges):
        total = metrics.merge(total, program.eval_step(state, tuple(part[low:high] for part in batch)))
    expected = metrics.compute(program.eval_step(state, batch))
    assert metrics.compute(total) == pytest.approx(expected, rel=1e-5)


def mean_of_means(a: Any, b: Any) -> Any:
    halves = {
        name: Mean((a[name].total + b[name].total) / 2, (a[name].weight + b[name].weight) / 2)
        for name in a
        if name in b
    }
    return {**a, **b, **halves}


def last_wins(a: Any, b: Any) -> Any:
    return {**a, **b}


def forgets(a: Any, b: Any) -> Any:
    return {name: mean for name, mean in metrics.merge(a, b).items() if name in b}


def in_place(a: Any, b: Any) -> Any:
    both = {name: Mean(a[name].total.add_(b[name].total), a[name].weight + b[name].weight) for name in a if name in b}
    return {**a, **b, **both}


@pytest.mark.parametrize("broken", [mean_of_means, forgets, in_place])
def test_the_law_of_the_monoid_catches(broken: Merge) -> None:
    one, two, three = ({"loss": Mean(torch.tensor(float(n)), torch.tensor(float(n)))} for n in (1, 2, 4))
    with pytest.raises(AssertionError):
        is_monoid(broken, one, two, three)


def test_the_law_of_parts_catches_a_merge_that_keeps_the_last() -> None:
    """Associative with a unit, and no sum: it takes the law about parts and whole to see it."""
    one, two = ({"loss": Mean(torch.tensor(float(n)), torch.tensor(1.0))} for n in (1, 3))
    is_monoid(last_wins, one, two, one)
    assert metrics.compute(last_wins(one, two)) != metrics.compute(metrics.merge(one, two)) == {"loss": 2.0}


# --- scaler and average -----------------------------------------------------------------------------------------------


def keeps_its_rule(rule: Callable[[Any, Tensor], Any], state: Any, inputs: list[Tensor]) -> None:
    """Eager, traced in one graph, and twice in a row: the same bits, the same kinds, nothing written."""
    step = compiled(lambda state, batch: (rule(state, batch), {}))
    for value in inputs:
        before = tree.clone(state)
        new = rule(state, value)
        assert_trees_close(state, before, exact=True)
        assert tree.signature(new) == tree.signature(state)
        assert_trees_close(step(state, value)[0], new, exact=True)
        state = new
    assert step.graphs == 1


@pytest.mark.compile
@few
@given(finite=st.lists(st.booleans(), min_size=1, max_size=12))
def test_the_scaler_is_a_pure_rule(finite: list[bool]) -> None:
    rule = scaler.dynamic(8.0, growth_interval=3)
    keeps_its_rule(rule.update, rule.init(torch.device("cpu")), [torch.tensor(value) for value in finite])


@pytest.mark.compile
@few
@given(decay=st.floats(0, 0.999), warmup=st.booleans(), seed=seeds)
def test_the_average_is_a_pure_rule(decay: float, warmup: bool, seed: int) -> None:
    rule = ema.average(decay, warmup=warmup, buffers="average")
    params, buffers = random_tree(seed), {"mean": torch.ones(3), "count": torch.tensor(4)}
    state = (rule.init(params, buffers), torch.zeros((), dtype=torch.int64))

    def update(state: Any, factor: Tensor) -> Any:
        shadow, updates = state
        return rule.update(shadow, {name: p * factor for name, p in params.items()}, buffers, updates), updates + 1

    keeps_its_rule(update, state, [torch.tensor(float(n)) for n in range(4)])


def test_the_law_of_rules_catches_a_scale_that_is_halved_in_place() -> None:
    def update(state: scaler.ScalerState, finite: Tensor) -> scaler.ScalerState:
        return state._replace(scale=state.scale.mul_(torch.where(finite, 1.0, 0.5)))

    start = scaler.dynamic(8.0).init(torch.device("cpu"))
    with pytest.raises(AssertionError):
        keeps_its_rule(update, start, [torch.tensor(False)])
