"""Compiled steps: capture, donation and its guard, user-defined steps, shared buffers, random numbers."""

from __future__ import annotations

import copy
import pickle
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from helpers import assert_trees_close, image_batch, tiny_convnet, tiny_mlp, vector_batch
from torch import Tensor, nn
from torch.nn import functional

import purestep as ps
from purestep import optim, tree
from purestep.compile import graphs
from purestep.errors import ConfigError, DataError, StateError, StepContractError
from purestep.torch_ext.tensor_layout import layout_guard
from purestep.types import Mean, Program, TrainState

CRITERION = nn.CrossEntropyLoss()
compiled = partial(ps.compile_step, backend="aot_eager")
FORMS = [pytest.param(False, id="pure"), pytest.param(True, id="donated")]


def mlp(tx: optim.Transform | None = None, **options: Any) -> Program:
    return ps.program(tiny_mlp(), ps.supervised(CRITERION), tx or optim.sgd(0.1, momentum=0.9), **options)


def convnet(**options: Any) -> Program:
    return ps.program(tiny_convnet(), ps.supervised(CRITERION), optim.sgd(0.1), **options)


def run(step: Callable[..., Any], state: Any, batches: list[Any]) -> tuple[Any, list[Any]]:
    """The last state, plain, and the metrics of every step."""
    found = []
    for batch in batches:
        state, metrics = step(state, batch)
        found.append(metrics)
    return ps.clone(state), found


def batches(count: int, rows: int = 16) -> list[tuple[Tensor, Tensor]]:
    return [vector_batch(rows, seed) for seed in range(count)]


def images(count: int) -> list[tuple[Tensor, Tensor]]:
    return [image_batch(8, seed) for seed in range(count)]


# --- capture ----------------------------------------------------------------------------------------------------------


@pytest.mark.compile
@pytest.mark.parametrize("donate", FORMS)
def test_every_capture_computes_what_eager_does(donate: bool) -> None:
    program = mlp(ema=0.9)
    step = compiled(program.train_step, donate=donate)
    expected = run(program.train_step, program.init(), batches(3))
    found = run(step, program.init(), batches(3))
    assert_trees_close(found[0], expected[0], exact=True)
    assert_trees_close(found[1], expected[1], rtol=1e-6, atol=0.0)  # the norm is summed in another order
    assert step.graphs == 1


def test_a_step_is_no_program() -> None:
    with pytest.raises(ConfigError, match=r"compile_program: the program is a function.*ps\.compile_step\(step\)"):
        ps.compile_program(mlp().train_step)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "make",
    [lambda **more: ps.compile_step(mlp().train_step, **more), lambda **more: ps.compile_program(mlp(), **more)],
    ids=["step", "program"],
)
def test_a_backend_that_a_trace_does_not_have_and_an_unknown_donation_are_refused(make: Callable[..., Any]) -> None:
    for backend in ("inducter", "cudagraphs", 3):
        with pytest.raises(
            ConfigError, match=rf'backend={backend!r} is unknown.*"inductor", "aot_eager", "eager" or a callable'
        ):
            make(backend=backend)
    for donate in ("Init", "true", None, 2):
        with pytest.raises(ConfigError, match=rf"donate={donate!r} is unknown.*True, False or \"init\""):
            make(donate=donate)
    make(donate="init")


@pytest.mark.compile
@pytest.mark.parametrize("donate", FORMS)
def test_a_step_may_call_compiled_ones(donate: bool) -> None:
    program = mlp()
    fast = ps.compile_program(program, donate=donate, backend="aot_eager")

    def step(made: Program) -> Callable[..., Any]:
        def both(state: TrainState, batch: Any) -> Any:
            new, metrics = made.train_step(state, batch)
            assert made.eval_step
            return new, metrics | {"after": made.eval_step(new, batch)["loss"]}

        return both

    expected = run(step(program), program.init(), batches(2))
    for outer in (fast, fast._replace(train_step=compiled(fast.train_step, donate=donate))):
        found = run(compiled(step(outer), donate=donate), program.init(), batches(2))
        assert_trees_close(found, expected)


@pytest.mark.compile
def test_a_backend_of_ones_own_gets_the_one_graph() -> None:
    seen = []

    def backend(graph: Any, inputs: list[Tensor]) -> Any:
        seen.append(len(list(graph.graph.nodes)))
        return graph

    program = mlp()
    step = ps.compile_step(program.train_step, backend=backend)
    found, _ = run(step, program.init(), batches(2))
    assert len(seen) == 1
    assert_trees_close(found, run(program.train_step, program.init(), batches(2))[0], exact=True)


# --- what a step may not do -------------------------------------------------------------------------------------------


def branching(state: dict[str, Tensor], batch: Any) -> tuple[Any, Any]:
    if state["w"].sum() > 0:  # the line that the error has to name
        return {"w": state["w"] + 1}, {}
    return state, {}


LINE = branching.__code__.co_firstlineno + 1


@pytest.mark.compile
def test_a_branch_on_a_value_names_its_line() -> None:
    step = compiled(branching)
    with pytest.raises(StepContractError, match=rf"(?s)test_compile.py:{LINE}: the step reads the value.*torch.where"):
        step({"w": torch.ones(3)}, None)


BROKEN: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "shape": (lambda s: ({"a": s["a"], "b": s["b"][:1]}, {}), r"^b: the leaf goes in as \[3\] .*comes out as \[1\]"),
    "dtype": (lambda s: ({"a": s["a"].double(), "b": s["b"]}, {}), r"^a: .*float32 and comes out as .*float64"),
    "gone": (lambda s: ({"a": s["a"]}, {}), r"structure of the state changes: without \['b'\]"),
    "new": (lambda s: ({**s, "c": s["a"]}, {}), r"structure of the state changes: .*with \['c'\]"),
    "number": (lambda s: ({"a": s["a"], "b": 1.0}, {}), r"^b: .*comes out as float"),
    "no pair": (lambda s: s, "returned a dict.*return .state, metrics."),
    "no metrics": (lambda s: (s, s["a"]), r"returned metrics of type \w*Tensor"),
}


@pytest.mark.compile
@pytest.mark.parametrize("donate", FORMS)
@pytest.mark.parametrize("fault", BROKEN)
def test_a_step_that_breaks_the_contract_is_named(fault: str, donate: bool) -> None:
    broken, message = BROKEN[fault]
    state = {"a": torch.ones(3), "b": torch.ones(3)}
    with pytest.raises(StepContractError, match=message):
        compiled(lambda state, batch: broken(state), donate=donate)(state, None)
    assert state["a"].tolist() == [1, 1, 1]


@pytest.mark.compile
@pytest.mark.parametrize("donate", FORMS)
def test_a_metric_of_a_number_of_pythons_is_named(donate: bool) -> None:
    def counted(state: Tensor, batch: Tensor) -> tuple[Any, Any]:
        return state + 1, {"seen": Mean(batch.sum(), len(batch))}  # pyright: ignore[reportArgumentType]

    with pytest.raises(StepContractError, match="metric 'seen/weight' is a int, not a tensor"):
        compiled(counted, donate=donate)(torch.ones(3), torch.ones(2))
    program = Program(counted, eval_step=lambda state, batch, index=0: counted(state, batch)[1])
    evaluate: Any = ps.compile_program(program, backend="aot_eager").eval_step
    with pytest.raises(StepContractError, match="metric 'seen/weight' is a int, not a tensor"):
        evaluate(torch.ones(3), torch.ones(2))


@pytest.mark.compile
@pytest.mark.parametrize("donate", FORMS)
def test_a_state_with_a_leaf_that_is_no_tensor_is_refused(donate: bool) -> None:
    with pytest.raises(StateError, match="the state has a float, not a tensor"):
        compiled(lambda state, batch: (state, {}), donate=donate)({"w": torch.ones(1), "lr": 0.1}, None)


@pytest.mark.compile
def test_a_detached_loss_is_found_while_capturing() -> None:
    def detached(model: Any, batch: Any) -> ps.Loss:
        return ps.Loss(model(batch[0]).square().mean().detach(), torch.tensor(1.0), {})

    program = ps.program(tiny_mlp(), detached, optim.sgd(0.1))
    with pytest.raises(StepContractError, match="does not depend on the parameters"):
        compiled(program.train_step)(program.init(), vector_batch())


# --- donation ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared_step() -> tuple[Program, Any]:
    """One program and its donated step, so that the tests of the guard share one graph."""
    program = mlp(ema=0.9)
    return program, compiled(program.train_step, donate=True)


@pytest.mark.compile
@pytest.mark.parametrize("field", TrainState._fields)
def test_every_field_of_a_donated_state_says_when_it_was_donated(shared_step: Any, field: str) -> None:
    program, step = shared_step
    first, _ = step(program.init(), vector_batch())
    second, _ = step(first, vector_batch())
    with pytest.raises(StateError, match=r"this state in call 2.*ps.clone\(state\) before the call"):
        getattr(first, field)
    step(second, vector_batch())
    with pytest.raises(StateError, match="this state in call 2"):
        getattr(first, field)
    with pytest.raises(StateError, match="this state in call 3"):
        getattr(second, field)


READS: dict[str, Callable[[Any], Any]] = {
    "index": lambda s: s[0],
    "slice": lambda s: s[:2],
    "unpack": lambda s: tuple(s),
    "replace": lambda s: s._replace(step=torch.zeros(())),
    "asdict": lambda s: s._asdict(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "clone": ps.clone,
    "view": ps.view,
    "leaves": tree.leaves,
    "map": lambda s: tree.map(lambda leaf: leaf + 1, s),
}


@pytest.mark.compile
@pytest.mark.parametrize("read", READS)
def test_no_way_of_reading_gives_the_memory_of_a_donated_state(shared_step: Any, read: str) -> None:
    program, step = shared_step
    first, _ = step(program.init(), vector_batch())
    READS[read](first)  # alive: every one of them works
    step(first, vector_batch())
    with pytest.raises(StateError, match="this state in call 2"):
        READS[read](first)


@pytest.mark.compile
def test_a_donated_state_can_be_shown_and_neither_stepped_flushed_nor_evaluated() -> None:
    program = ps.compile_program(mlp(), donate=True, backend="aot_eager")
    assert program.init is not None
    assert program.eval_step is not None
    first, _ = program.train_step(program.init(), vector_batch())
    assert "step=1" in repr(first)
    program.train_step(first, vector_batch())
    assert repr(first) == "TrainState(donated)"
    assert f"{first}" == "TrainState(donated)"
    for use in (lambda: program.train_step(first, vector_batch()), lambda: program.eval_step(first, vector_batch())):
        with pytest.raises(StateError, match="this state in call 2"):
            use()


PLAIN: dict[str, Callable[[Any], Any]] = {
    "replace": lambda s: s._replace(updates=s.updates),
    "view": ps.view,
    "view ema": lambda s: ps.view(s, "ema"),
    "clone": ps.clone,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda s: pickle.loads(pickle.dumps(s)),
    "map": lambda s: tree.map(lambda leaf: leaf, s),
}


@pytest.mark.compile
@pytest.mark.parametrize("way", PLAIN)
def test_what_is_made_of_a_live_state_is_plain(shared_step: Any, way: str) -> None:
    program, step = shared_step
    state, _ = step(program.init(), vector_batch())
    plain = PLAIN[way](state)
    assert type(plain) is TrainState
    assert type(state) is not TrainState
    assert isinstance(state, TrainState)
    step(state, vector_batch())
    assert int(plain.step) in (1, 2)  # readable; where memory is shared it may show the new value


@pytest.mark.compile
@pytest.mark.parametrize("way", ["clone", "deepcopy", "pickle"])
def test_a_copy_of_a_live_state_keeps_its_numbers(shared_step: Any, way: str) -> None:
    program, step = shared_step
    state, _ = step(program.init(), vector_batch())
    kept = PLAIN[way](state)
    expected, _ = run(program.train_step, program.init(), [vector_batch()])
    for _ in range(3):
        state, _ = step(state, vector_batch())
    assert_trees_close(kept, expected, exact=True)


@pytest.mark.compile
def test_the_state_that_goes_in_first_stays_valid(shared_step: Any) -> None:
    program, step = shared_step
    entry = program.init()
    before = ps.clone(entry)
    state, _ = step(entry, vector_batch())
    step(state, vector_batch())
    assert_trees_close(entry, before, exact=True)
    again, _ = run(step, entry, [vector_batch()])
    assert_trees_close(again, run(program.train_step, before, [vector_batch()])[0], exact=True)


@pytest.mark.compile
def test_two_runs_of_one_compiled_step_do_not_touch_each_other(shared_step: Any) -> None:
    program, step = shared_step
    left, right = program.init(seed=0), program.init(seed=1)._replace(params=program.init().params)
    for batch in batches(3):
        left, _ = step(left, batch)
        right, _ = step(right, vector_batch(16, seed=7))
    assert_trees_close(ps.clone(left), run(program.train_step, program.init(), batches(3))[0], exact=True)
    expected, _ = run(program.train_step, program.init(seed=1), [vector_batch(16, seed=7)] * 3)
    assert_trees_close(ps.clone(right), expected, exact=True)
    assert step.graphs == 1


@pytest.mark.compile
def test_a_state_put_back_starts_a_branch_and_leaves_the_live_one_alive(shared_step: Any) -> None:
    program, step = shared_step
    state, _ = step(program.init(), vector_batch())
    kept = ps.clone(state)
    state, _ = step(state, vector_batch(16, seed=1))
    branch, _ = step(kept, vector_batch(16, seed=2))
    assert int(state.step) == int(branch.step) == 2
    expected, _ = run(program.train_step, program.init(), [vector_batch(), vector_batch(16, seed=2)])
    assert_trees_close(ps.clone(branch), expected, exact=True)
    edited = branch._replace(params={name: p * 0 for name, p in branch.params.items()})
    found, _ = run(step, edited, [vector_batch()])
    assert_trees_close(found, run(program.train_step, edited, [vector_batch()])[0], exact=True)


@pytest.mark.compile
def test_the_new_state_lives_in_the_memory_of_the_old_one(shared_step: Any) -> None:
    program, step = shared_step
    first, _ = step(program.init(), vector_batch())
    taken = first.params["0.weight"]
    shown = taken.clone()
    second, _ = step(first, vector_batch())
    assert second.params["0.weight"].data_ptr() == taken.data_ptr()
    assert not torch.equal(taken, shown)  # as documented: what was taken out before may show new values


@pytest.mark.compile
@pytest.mark.parametrize("donate", FORMS)
def test_metrics_of_a_step_outlive_the_next_one(donate: bool) -> None:
    def own(state: dict[str, Tensor], batch: Tensor) -> tuple[Any, Any]:
        one = torch.ones_like(state["w"])
        return {"w": state["w"] + batch, "n": state["n"] + 1}, {
            "before": Mean(state["w"], one),
            "count": Mean(state["n"], torch.ones(())),
        }

    step = compiled(own, donate=donate)
    state, first = step({"w": torch.zeros(2), "n": torch.zeros(())}, torch.ones(2))
    step(state, torch.ones(2))
    assert first["before"].total.tolist() == [0, 0]
    assert first["count"].total.item() == 0


@pytest.mark.compile
@pytest.mark.parametrize("donate", FORMS)
def test_a_step_may_move_leaves_to_each_others_places(donate: bool) -> None:
    def shift(state: dict[str, Tensor], batch: Tensor) -> tuple[Any, Any]:
        return {"a": state["b"], "b": state["a"], "now": state["now"] + batch, "prev": state["now"]}, {}

    step = compiled(shift, donate=donate)
    state = {"a": torch.zeros(2), "b": torch.ones(2), "now": torch.zeros(2), "prev": torch.full((2,), -1.0)}
    eager = state
    for number in range(1, 4):
        state, _ = step(state, torch.full((2,), float(number)))
        eager, _ = shift(eager, torch.full((2,), float(number)))
        assert_trees_close(state, eager, exact=True)


@pytest.mark.compile
@pytest.mark.parametrize("donate", [True, "init"])
def test_a_number_in_double_precision_is_written(donate: Any) -> None:
    def add(state: dict[str, Tensor], batch: Tensor) -> tuple[Any, Any]:
        return {"sum": state["sum"] + batch.double().sum(), "before": state["sum"]}, {}

    step = compiled(add, donate=donate)
    state = {"sum": torch.zeros((), dtype=torch.float64), "before": torch.zeros((), dtype=torch.float64)}
    for size in range(1, 6):
        state, _ = step(state, torch.ones(size))
    assert (state["sum"].item(), state["before"].item()) == (15, 10)
    assert state["sum"].shape == ()


@pytest.mark.compile
@pytest.mark.parametrize("donate", FORMS)
def test_a_scalar_weight_and_buffer_in_double_precision_are_trained(donate: bool) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.0))
            self.fixed = nn.Parameter(torch.tensor(2.0), requires_grad=False)
            self.register_buffer("seen", torch.tensor(0.0))

        def forward(self, x: Tensor) -> Tensor:
            self.seen.add_(x.sum())
            return self.scale * self.fixed * x

    # Not elementwise, so that the weight is a leaf of its own.
    program = ps.program(Scaled(), ps.supervised(nn.MSELoss()), optim.lamb(0.1), precision="64-true")
    rows = [torch.arange(1.0, n + 1, dtype=torch.float64) for n in (1, 2, 3, 4)]
    found, _ = run(compiled(program.train_step, donate=donate), program.init(), [(x, x) for x in rows])
    expected, _ = run(program.train_step, program.init(), [(x, x) for x in rows])
    assert_trees_close(found, expected)


@pytest.mark.compile
@pytest.mark.parametrize("donate", FORMS)
def test_a_key_that_is_a_leaf_elsewhere_too_is_that_leaf_there(donate: bool) -> None:
    program = mlp()

    def keep(state: dict[str, Any], batch: Any) -> tuple[Any, Any]:
        trained, metrics = program.train_step(state["model"], batch)
        return {"first": state["first"], "model": trained}, metrics

    start = program.init(seed=3)
    state, _ = run(compiled(keep, donate=donate), {"first": start.key, "model": start}, batches(2))
    assert state["first"].tolist() == [3, 0]
    assert state["model"].key.tolist() == [3, 2]
    evaluate: Any = ps.compile_program(
        Program(keep, eval_step=lambda state, batch, index=0: {"first": ps.metrics.as_mean(state["first"][0])}),
        backend="aot_eager",
    ).eval_step
    assert float(evaluate({"first": start.key, "model": start}, None)["first"]) == 3


@pytest.mark.compile
@pytest.mark.parametrize("donate", FORMS)
def test_an_ordered_dict_keeps_its_numbers_at_their_keys(donate: bool) -> None:
    """Its leaves come in the order of its keys, not in sorted order."""

    def grow(state: dict[str, Any], batch: Tensor) -> tuple[Any, Any]:
        return {"doubled": tree.map(lambda x: 2 * x, state["doubled"]), "kept": state["kept"]}, {}

    start = OrderedDict(z=torch.ones(3), a=torch.zeros(3))
    state = eager = {"doubled": start, "kept": tree.clone(start)}
    step = compiled(grow, donate=donate)
    for _ in range(3):
        state, _ = step(state, torch.ones(3))
        eager, _ = grow(eager, torch.ones(3))
    assert_trees_close(state, eager, exact=True)
    assert type(state["kept"]) is OrderedDict


@pytest.mark.compile
@pytest.mark.parametrize("donate", FORMS)
def test_a_dict_of_another_kind_and_keys_in_another_order_are_refused(donate: bool) -> None:
    def sort(state: dict[str, Any], kind: Any) -> tuple[Any, Any]:
        return {"w": type(kind)(sorted(state["w"].items()))}, {}

    step = compiled(sort, donate=donate)
    state = {"w": OrderedDict(z=torch.ones(3), a=torch.zeros(3))}
    for kind in ({}, OrderedDict()):
        with pytest.raises(StepContractError, match="a node has another type, or its keys another order"):
            step(state, kind)


@pytest.mark.compile
def test_a_dict_with_defaults_is_one_inside_a_step_too() -> None:
    def count(state: defaultdict[str, Any], batch: Any) -> tuple[Any, Any]:
        return defaultdict(state.default_factory, a=state["a"] + 1), {}

    state, _ = compiled(count)(defaultdict(list, a=torch.zeros(3)), None)
    assert type(state) is defaultdict
    assert state.default_factory is list
    assert state["a"].tolist() == [1, 1, 1]


@pytest.mark.compile
@pytest.mark.parametrize("donate", FORMS)
def test_a_call_that_fails_leaves_the_state_as_it_was(donate: bool) -> None:
    program = mlp()
    step = compiled(program.train_step, donate=donate)
    state, _ = step(program.init(), vector_batch())
    kept = ps.clone(state)
    with pytest.raises(StepContractError, match=r"a Linear: .*\[16, 5\]"):
        step(state, (torch.ones(16, 5), torch.zeros(16, dtype=torch.int64)))
    assert_trees_close(ps.clone(state), kept, exact=True)
    assert_trees_close(
        run(step, state, [vector_batch()])[0], run(program.train_step, kept, [vector_batch()])[0], exact=True
    )


# --- the packed form --------------------------------------------------------------------------------------------------


def storages(state: TrainState) -> int:
    return len({p.untyped_storage().data_ptr() for p in state.params.values()})


@pytest.mark.compile
def test_elementwise_transforms_work_on_one_buffer_a_group() -> None:
    program = mlp(optim.adamw(1e-2, weight_decay=0.1, mask=optim.decay_mask(tiny_mlp())))
    state, _ = compiled(program.train_step, donate=True)(program.init(), vector_batch())
    assert list(state.params) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert storages(state) == 2  # decayed, and not
    assert [p.shape for p in state.params.values()] == [p.shape for p in program.init().params.values()]


@pytest.mark.compile
def test_a_transform_that_needs_the_tree_keeps_it() -> None:
    program = mlp(optim.lamb(1e-2))
    state, _ = compiled(program.train_step, donate=True)(program.init(), vector_batch())
    assert storages(state) == 4


@pytest.mark.compile
def test_channels_last_weights_stay_so() -> None:
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 3)).to(memory_format=torch.channels_last)
    program = ps.program(module, ps.supervised(CRITERION), optim.sgd(0.1))
    batch = (torch.randn(2, 3, 4, 4), torch.tensor([0, 1]))
    state, _ = compiled(program.train_step, donate=True)(program.init(), batch)
    assert state.params["0.weight"].stride() == program.init().params["0.weight"].stride() == (27, 1, 9, 3)
    assert storages(state) == 1


@pytest.mark.compile
def test_frozen_weights_are_not_held_twice() -> None:
    module = tiny_mlp()
    module[0].requires_grad_(False)
    program = ps.program(module, ps.supervised(CRITERION), optim.sgd(0.1))
    entry = program.init()
    step = compiled(program.train_step, donate=True)
    state, _ = step(entry, vector_batch())
    state, _ = step(state, vector_batch())
    assert state.frozen["0.weight"].data_ptr() == entry.frozen["0.weight"].data_ptr()
    assert_trees_close(state.frozen, program.init().frozen, exact=True)


def frozen_first(tx: optim.Transform) -> Program:
    """A program of two layers, the first of them frozen."""
    module = tiny_mlp()
    module[0].requires_grad_(False)
    return ps.program(module, ps.supervised(CRITERION), tx)


@pytest.mark.compile
def test_a_step_of_ones_own_does_not_write_into_frozen_weights_of_the_caller() -> None:
    program = frozen_first(optim.lamb(0.1))  # whose states keep their tree

    def own(state: TrainState, batch: Any) -> tuple[Any, Any]:
        return state._replace(frozen={name: value + 1 for name, value in state.frozen.items()}), {}

    entry = program.init()
    before = ps.clone(entry)
    train, add = compiled(program.train_step, donate=True), compiled(own, donate=True)
    state, _ = train(entry, vector_batch())
    for count in (1, 2):
        state, _ = add(state, None)
        assert_trees_close(entry, before, exact=True)
        assert_trees_close(state.frozen["0.weight"], before.frozen["0.weight"] + count)


NEGATED = torch.complex(torch.zeros(3), torch.tensor([1.0, 2.0, 3.0])).conj().imag
"""-1, -2, -3, of which memory holds 1, 2, 3."""


class Shifted(nn.Module):
    """``((scale + 2 shift) x)^2``, the shift frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.shift = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return ((self.scale + 2 * self.shift) * x).square()


@pytest.mark.slow
@pytest.mark.compile
@pytest.mark.parametrize("where", ["params/scale", "frozen/shift"])
@pytest.mark.parametrize("donate", [False, True, "init"])
def test_a_sign_that_torch_has_put_off_counts_wherever_a_state_holds_it(donate: Any, where: str) -> None:
    def loss(model: Any, x: Tensor) -> ps.Loss:
        return ps.Loss(model(x).sum(), torch.tensor(1.0), {})

    field, name = where.split("/")
    program = ps.program(Shifted(), loss, optim.lamb(0.1))  # whose states keep their tree
    state, x = program.init()._replace(**{field: {name: NEGATED}}), torch.ones(3)
    fast = ps.compile_program(program, donate=donate)
    assert fast.eval_step is not None
    assert program.eval_step is not None
    assert_trees_close(fast.eval_step(state, x)["loss"], program.eval_step(state, x)["loss"])
    expected, metrics = program.train_step(state, x)
    found, told = fast.train_step(state, x)
    assert_trees_close(told["loss"], metrics["loss"])
    assert_trees_close(found.params, expected.params)
    assert_trees_close(fast.eval_step(found, x)["loss"], program.eval_step(expected, x)["loss"])


# --- programs ---------------------------------------------------------------------------------------------------------


@pytest.mark.compile
@pytest.mark.parametrize("donate", FORMS)
def test_the_functions_of_a_compiled_program_share_their_buffers(donate: bool) -> None:
    plain = mlp(accumulate=3)
    fast = ps.compile_program(plain, donate=donate, backend="aot_eager")
    assert fast.init is plain.init
    assert fast.eval_step is not None
    assert plain.eval_step is not None
    state, eager = fast.init(), plain.init()
    for batch in batches(4):
        state, _ = fast.train_step(state, batch)
        eager, _ = plain.train_step(eager, batch)
    place = state.params["0.weight"].data_ptr()
    assert_trees_close(
        fast.eval_step(state, vector_batch()), plain.eval_step(eager, vector_batch()), rtol=1e-6, atol=0.0
    )
    assert int(state.step) == 4  # evaluating took nothing away
    state, _ = fast.flush(state)
    eager, _ = plain.flush(eager)
    if donate:
        assert state.params["0.weight"].data_ptr() == place
    for batch in batches(3):
        state, _ = fast.train_step(state, batch)
        eager, _ = plain.train_step(eager, batch)
    assert_trees_close(ps.clone(state), eager, exact=True)
    assert (fast.train_step.graphs, fast.flush.graphs, fast.eval_step.graphs) == (2, 1, 1)


@pytest.mark.compile
def test_a_flush_without_an_open_window_needs_no_graph() -> None:
    fast = ps.compile_program(mlp(), donate=True, backend="aot_eager")
    state, _ = fast.train_step(fast.init(), vector_batch())
    assert fast.flush(state) == (state, {})
    assert fast.flush.graphs == 0
    carried = ps.compile_program(mlp(accumulate=2, tail="carry"), donate=True, backend="aot_eager")
    state, _ = carried.train_step(carried.init(), vector_batch())
    assert carried.flush(state)[0] is state


@pytest.mark.compile
def test_evaluation_draws_from_a_stream_of_its_own() -> None:
    def masked(model: Any, batch: Any) -> ps.Loss:
        mask = torch.rand(batch[0].shape) > 0.5
        return ps.Loss((model(batch[0] * mask) - 1).square().mean(), torch.tensor(1.0), {})

    program = ps.program(tiny_mlp(), masked, optim.sgd(0.1))
    fast = ps.compile_program(program, backend="aot_eager")
    state = program.init()
    losses = [float(fast.eval_step(state, vector_batch(), index=index)["loss"]) for index in (0, 1, 0)]
    assert losses[0] == losses[2] != losses[1]
    assert losses == [float(program.eval_step(state, vector_batch(), index=index)["loss"]) for index in (0, 1, 0)]
    assert fast.eval_step.graphs == 1


@pytest.mark.compile
@pytest.mark.parametrize("donate", FORMS)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_loss_that_is_not_finite_skips_alike(accumulate: int, donate: bool) -> None:
    options: dict[str, Any] = {"precision": "16-mixed", "ema": 0.9, "accumulate": accumulate, "nonfinite": "skip"}
    program = mlp(**options)
    good = batches(6)
    x, y = good[2]
    good[2] = (torch.full_like(x, torch.inf), y)
    step = compiled(program.train_step, donate=donate)
    found, metrics = run(step, program.init(), good)
    expected, wanted = run(program.train_step, program.init(), good)
    assert_trees_close(found, expected, exact=True)
    assert [float(m["applied"]) for m in metrics] == [float(m["applied"]) for m in wanted]
    assert int(found.updates) == 6 // accumulate - 1
    assert found.scaler.scale.item() == 2.0**15


# --- random numbers ---------------------------------------------------------------------------------------------------


@pytest.mark.compile
@pytest.mark.parametrize("donate", FORMS)
def test_dropout_draws_anew_each_step_again_the_same_and_as_in_eager(donate: bool) -> None:
    program = convnet()
    step = compiled(program.train_step, donate=donate)
    before = torch.get_rng_state()
    batch = image_batch(8)
    _, first = run(step, program.init(seed=3), [batch] * 3)
    state, again = run(step, program.init(seed=3), [batch] * 3)
    assert torch.equal(torch.get_rng_state(), before)
    assert_trees_close(again, first, exact=True)
    expected, eager = run(program.train_step, program.init(seed=3), [batch] * 3)
    assert_trees_close(state, expected, exact=True)
    assert state.key.tolist() == [3, 3]
    assert [float(m["loss"]) for m in again] == [float(m["loss"]) for m in eager]
    _, other = run(step, program.init(seed=4), [batch])
    assert float(other[0]["loss"]) != float(first[0]["loss"])


@pytest.mark.compile
def test_draws_differ_from_step_to_step() -> None:
    def noisy(state: dict[str, Any], batch: Any) -> tuple[Any, Any]:
        inner = state["net"]
        return {"net": inner._replace(step=inner.step + 1)}, {"draw": Mean(torch.rand(()), torch.ones(()))}

    step = compiled(noisy, donate=True)
    _, metrics = run(step, {"net": mlp().init()}, [None] * 4)
    drawn = [float(m["draw"]) for m in metrics]
    assert len(set(drawn)) == 4
    assert [float(m["draw"]) for m in run(step, {"net": mlp().init()}, [None] * 4)[1]] == drawn


def test_a_live_state_may_be_moved_into_shared_memory() -> None:
    """As sending it to another process does; its memory of before is free then."""
    made = mlp()
    step, state, eager = compiled(made.train_step, donate=True), made.init(), made.init()
    for seed in range(6):
        state, _ = step(state, vector_batch(seed=seed))
        eager, _ = made.train_step(eager, vector_batch(seed=seed))
        if seed == 2:
            for leaf in tree.leaves(state):
                leaf.share_memory_()
    assert_trees_close(ps.clone(state), eager, rtol=1e-4, atol=1e-5)
    assert state.key.tolist() == [0, 6]


@pytest.mark.parametrize("donate", [True, False])
def test_a_batch_may_be_a_list_or_a_tuple_and_one_follow_the_other(donate: bool) -> None:
    made = mlp()
    step, state, eager = compiled(made.train_step, donate=donate), made.init(), made.init()
    for seed, kind in enumerate([list, list, tuple, list, tuple, tuple, list]):
        state, metrics = step(state, kind(vector_batch(seed=seed)))
        eager, expected = made.train_step(eager, vector_batch(seed=seed))
        assert_trees_close(metrics, expected, rtol=1e-4, atol=1e-5)
    assert_trees_close(ps.clone(state), eager, rtol=1e-4, atol=1e-5)
    assert step.graphs == 2
    with pytest.raises((ValueError, TypeError, StepContractError)):
        step(state, [*vector_batch(), torch.ones(1)])


@pytest.mark.compile
def test_a_batch_that_cannot_be_trained_on_is_no_size() -> None:
    """Each of two good sizes has a graph; from the third on, one graph serves all. All of them are traced."""
    program = mlp()
    step, state = compiled(program.train_step), program.init()
    wrong = torch.ones(8, 5), torch.zeros(8, dtype=torch.int64)
    for rows in (8, 6):
        with pytest.raises(StepContractError):
            step(state, wrong)
        state, _ = step(state, vector_batch(rows))
    with pytest.raises(StepContractError):
        step(state, wrong)
    for rows in (5, 4, 3):
        state, _ = step(state, vector_batch(rows))
    assert step.graphs == 3


@pytest.mark.compile
def test_a_batch_that_the_step_refuses_is_told_as_in_eager_by_the_graph_for_every_size() -> None:
    program = mlp(microbatches=4)
    step, state = compiled(program.train_step), program.init()
    for rows in (8, 16, 12):
        state, _ = step(state, vector_batch(rows))
    with pytest.raises(DataError, match="has 3 rows, too few for 4 micro-batches"):
        step(state, vector_batch(3))


@pytest.mark.compile
@pytest.mark.parametrize("donate", FORMS)
def test_a_known_graph_is_taken_without_waiting_for_those_who_make_one(
    donate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = mlp()
    step, state = compiled(program.train_step, donate=donate), program.init()
    for rows in (8, 7, 6, 5, 8, 7):  # after the third size, each size is looked up once more
        state, _ = step(state, vector_batch(rows))
    monkeypatch.setattr(graphs, "exclusive", lambda: pytest.fail("one thread at a time"))
    for rows in (8, 6, 5, 7, 5, 6):  # a size of another process, or a new one, waits: its place decides its graph
        state, _ = step(state, vector_batch(rows))
    assert step.graphs == 3


@pytest.mark.compile
def test_numbers_of_two_devices_are_returned_apart() -> None:
    def step(state: dict[str, Tensor], batch: Tensor) -> tuple[Any, Any]:
        return {"w": state["w"] + batch}, {"sum": Mean(batch.sum(), torch.tensor(16.0)), "n": Mean(batch[0], batch[1])}

    found = ps.compile_step(step, backend="eager")
    _, metrics = found({"w": torch.zeros(2, device="meta")}, torch.ones(2, device="meta"))
    assert [leaf.device.type for leaf in tree.leaves(metrics)] == ["meta", "meta", "meta", "cpu"]
    assert metrics["sum"].weight.item() == 16.0


# --- steps of one's own -----------------------------------------------------------------------------------------------


class Gan(NamedTuple):
    """Two networks that train against each other."""

    generator: TrainState
    discriminator: TrainState


class GanParts(NamedTuple):
    init: Callable[..., Gan]
    step: Callable[..., Any]


def gan(*, accumulate: int = 1, dropout: float = 0.0) -> GanParts:
    fake_net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 4))
    real_net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    loss = nn.functional.binary_cross_entropy_with_logits

    def fool(model: Any, noise: Tensor, judge: Any) -> ps.Loss:
        verdict = judge(model(noise))
        return ps.Loss(loss(verdict, torch.ones_like(verdict)), torch.tensor(float(noise.shape[0])), {})

    def tell(model: Any, pair: tuple[Tensor, Tensor]) -> ps.Loss:
        real, fake = model(pair[0]), model(pair[1])
        both = loss(real, torch.ones_like(real)) + loss(fake, torch.zeros_like(fake))
        return ps.Loss(both / 2, torch.tensor(2.0 * real.shape[0]), {})

    makes = ps.program(fake_net, fool, optim.sgd(0.1, momentum=0.9), accumulate=accumulate)
    tells = ps.program(real_net, tell, optim.sgd(0.1), accumulate=accumulate)
    assert makes.init is not None
    assert tells.init is not None
    assert makes.bind is not None
    assert tells.bind is not None

    def step(state: Gan, batch: tuple[Tensor, Tensor]) -> tuple[Gan, Any]:
        real, noise = batch
        fake = makes.bind(state.generator)(noise)
        discriminator, told = tells.train_step(state.discriminator, (real, fake))
        judge = tells.bind(discriminator, train=True)
        generator, made = makes.train_step(state.generator, noise, judge)
        return Gan(generator, discriminator), {"told": told["loss"], "made": made["loss"]}

    return GanParts(lambda seed=0: Gan(makes.init(seed), tells.init(seed + 1)), step)


def gan_batches(count: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [(torch.randn(8, 4, generator=generator), torch.randn(8, 2, generator=generator)) for _ in range(count)]


@pytest.mark.compile
@pytest.mark.parametrize("donate", FORMS)
def test_a_step_over_two_train_states_compiles(donate: bool) -> None:
    parts = gan()
    step = compiled(parts.step, donate=donate)
    state, metrics = run(step, parts.init(), gan_batches(4))
    expected, wanted = run(parts.step, parts.init(), gan_batches(4))
    assert type(state) is Gan
    assert_trees_close(state, expected, rtol=1e-4, atol=1e-6)
    assert_trees_close(metrics, wanted, rtol=1e-4, atol=1e-6)
    assert step.graphs == 1
    assert [int(part.step) for part in state] == [4, 4]
    assert [part.key.tolist() for part in state] == [[0, 4], [1, 4]]


@pytest.mark.compile
@pytest.mark.parametrize("donate", FORMS)
def test_a_step_over_two_train_states_accumulates_in_two_graphs(donate: bool) -> None:
    parts = gan(accumulate=2)
    step = compiled(parts.step, donate=donate)
    state, _ = run(step, parts.init(), gan_batches(5))
    expected, _ = run(parts.step, parts.init(), gan_batches(5))
    assert_trees_close(state, expected, exact=True)
    assert step.graphs == 2
    assert [int(part.updates) for part in state] == [2, 2]


@pytest.mark.compile
def test_dropout_in_a_step_over_two_states_differs_from_step_to_step_and_is_reproducible() -> None:
    parts = gan(dropout=0.5)
    step = compiled(parts.step, donate=True)
    batch = gan_batches(1)[0]
    _, first = run(step, parts.init(), [batch] * 3)
    _, again = run(step, parts.init(), [batch] * 3)
    assert_trees_close(again, first, exact=True)
    made = [float(m["made"]) for m in first]
    assert len(set(made)) == 3


@pytest.mark.compile
@pytest.mark.parametrize("donate", FORMS)
def test_one_of_several_states_goes_on_by_itself_and_leaves_the_others_alone(donate: bool) -> None:
    program = mlp()

    def both(states: Any, batch: Any) -> Any:
        return {name: program.train_step(state, batch)[0] for name, state in states.items()}, {}

    tree_, _ = compiled(both, donate=True)({"a": program.init(0), "b": program.init(1)}, vector_batch())
    kept = ps.clone(tree_)
    found, _ = compiled(program.train_step, donate=donate)(tree_["b"], vector_batch())
    expected, _ = program.train_step(kept["b"], vector_batch())
    assert_trees_close(ps.clone(found), expected, rtol=1e-5, atol=1e-6)
    assert_trees_close(ps.clone(tree_), kept, exact=True)


@pytest.mark.compile
def test_the_states_inside_a_tree_are_guarded_too() -> None:
    parts = gan()
    step = compiled(parts.step, donate=True)
    first, _ = step(parts.init(), gan_batches(1)[0])
    second, _ = step(first, gan_batches(1)[0])
    for part in first:
        with pytest.raises(StateError, match="this state in call 2"):
            _ = part.params
        assert repr(part) == "TrainState(donated)"
    with pytest.raises(StateError, match="this state in call 2"):
        step(first, gan_batches(1)[0])
    mixed = Gan(second.generator, ps.clone(second.discriminator))
    found, _ = run(step, mixed, gan_batches(1))
    assert [int(part.step) for part in found] == [3, 3]


def test_any_number_of_states_may_be_in_a_tree() -> None:
    """Where their windows cannot be read without waiting for the device."""
    store: Any = SimpleNamespace(hosts=[None] * 70, device=torch.device("meta"))
    assert len(compiled(lambda state, batch: (state, {}), donate=True)._phase(store)) == 70


@pytest.mark.compile
@pytest.mark.parametrize("donate", FORMS)
def test_context_may_change_its_values_without_a_new_graph(donate: bool) -> None:
    def distill(model: Any, x: Tensor, teacher: dict[str, Tensor]) -> ps.Loss:
        target = x @ teacher["w"]
        return ps.Loss((model(x) - target).square().mean(), torch.tensor(float(x.shape[0])), {})

    program = ps.program(nn.Linear(4, 3), distill, optim.sgd(0.1))
    step = compiled(program.train_step, donate=donate)
    state, eager = program.init(), program.init()
    for scale in (0.0, 1.0, 2.0):
        teacher = {"w": torch.full((4, 3), scale)}
        state, _ = step(state, vector_batch()[0], teacher)
        eager, _ = program.train_step(eager, vector_batch()[0], teacher)
    assert_trees_close(ps.clone(state), eager, exact=True)
    assert step.graphs == 1


@pytest.mark.compile
@pytest.mark.parametrize("donate", FORMS)
def test_a_number_in_a_batch_is_never_a_stale_constant(donate: bool) -> None:
    def scaled(state: dict[str, Tensor], batch: dict[str, Any]) -> tuple[Any, Any]:
        return {"w": state["w"] + batch["x"] * batch["factor"]}, {}

    step = compiled(scaled, donate=donate)
    state: Any = {"w": torch.zeros(2)}
    for factor in (1.0, 2.0, 1.0):
        state, _ = step(state, {"x": torch.ones(2), "factor": factor})
    assert state["w"].tolist() == [4, 4]


def unlike(leaf: Tensor) -> dict[str, Any]:
    """What no graph for this leaf, shape (4, 6), float32, may be given."""
    number = leaf.to(torch.complex64)
    return {
        "sizes": leaf[:3],
        "dimensions": leaf[None],
        "strides": leaf.t().contiguous().t(),
        "dtype": leaf.to(torch.int32),
        "device": leaf.to("meta"),
        "negated": (1j * number).conj().imag,
        "parameter": nn.Parameter(leaf),
        "sparse": leaf.to_sparse(),
        "number": 3.0,
        "text": "x",
        "nothing": None,
    }


def test_which_leaves_are_alike() -> None:
    leaf, labels = torch.randn(4, 6), torch.arange(4)
    alike = layout_guard([leaf, labels])
    assert alike(torch.randn(9, 6)[5:], labels.clone())
    with torch.no_grad():
        assert alike(leaf, labels)
    found = {name: alike(other, labels) for name, other in unlike(leaf).items()}
    assert found == dict.fromkeys(found, False)
    assert not layout_guard([3.0])(3.0)


NORMED = "1.running_mean"


def step_after(change: Callable[[Tensor], None], backend: str = "aot_eager") -> tuple[Any, Any]:
    """A compiled and an eager step after a user has done something to a tensor that a graph writes into."""
    program = ps.program(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), ps.supervised(nn.MSELoss()), optim.sgd(0.1))
    step = ps.compile_step(program.train_step, donate=True, backend=backend)
    state = eager = program.init()
    batch = torch.randn(4, 8), torch.randn(4, 8)
    for _ in range(2):
        state, _ = step(state, batch)
        eager, _ = program.train_step(eager, batch)
    change(state.buffers[NORMED])
    eager = eager._replace(buffers={**eager.buffers, NORMED: state.buffers[NORMED].clone()})
    return ps.clone(step(state, batch)[0]), program.train_step(eager, batch)[0]


def given(make: Callable[[], Tensor]) -> Callable[[Tensor], None]:
    def change(tensor: Tensor) -> None:
        tensor.data = make()

    return change


@pytest.mark.compile
@pytest.mark.parametrize(
    "change",
    [
        given(lambda: torch.randn(16)[::2]),
        given(lambda: torch.randn(1)),
        given(lambda: torch.zeros(8, dtype=torch.int8)),
        lambda tensor: tensor.resize_(3),
    ],
    ids=["strides", "sizes", "dtype", "resized"],
)
def test_memory_of_another_layout_given_to_a_tensor_of_the_state_is_refused(change: Callable[[Tensor], None]) -> None:
    with pytest.raises(StateError, match="a tensor of the state, .* has become"):
        step_after(change)


@pytest.mark.slow
@pytest.mark.compile
def test_a_layout_that_is_not_looked_at_is_seen_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("purestep.compile.buffers.StateBuffers.check", lambda self, signature: None)

    def looked_at() -> None:
        new, eager = step_after(given(lambda: torch.randn(16)[::2]), "inductor")  # torch 2.11 looks itself
        assert_trees_close(new.buffers, eager.buffers)

    with pytest.raises(AssertionError):
        looked_at()


@pytest.mark.compile
@pytest.mark.parametrize("change", [given(lambda: torch.full((8,), 5.0)), lambda tensor: tensor.fill_(3.0)])
def test_other_numbers_in_a_tensor_of_the_state_are_taken(change: Callable[[Tensor], None]) -> None:
    new, eager = step_after(change)
    assert_trees_close(new.buffers, eager.buffers)


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


def train_on_unlike_batches() -> int:
    """Batches of the same shapes that need other graphs, one after the other. How many graphs that were."""
    net = torch.nn.Sequential(torch.nn.Tanh(), *tiny_mlp())  # a loop, whose strides are constants
    program = ps.program(net, ps.supervised(torch.nn.CrossEntropyLoss()), optim.sgd(0.1))
    step, state, eager = ps.compile_step(program.train_step, donate=True), program.init(), program.init()
    x, y = vector_batch(6, 0)
    turned = x.t().contiguous().t()
    for batch in [(x, y), (turned, y), (x, y), [x, y], (x.clone().requires_grad_(), y), Pair(turned, y), (turned, y)]:
        state, _ = step(state, batch)
        eager, _ = program.train_step(eager, batch)
    assert_trees_close(ps.clone(state).params, eager.params)
    return step.graphs


@pytest.mark.slow
@pytest.mark.compile
def test_a_batch_of_another_kind_gets_another_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    assert train_on_unlike_batches() == 4
    monkeypatch.setattr("purestep.torch_ext.tensor_layout.layout_guard", lambda leaves: lambda *others: True)
    with pytest.raises(AssertionError):
        train_on_unlike_batches()


@pytest.mark.compile
@pytest.mark.parametrize(("backend", "donate"), [("aot_eager", False), ("aot_eager", True), ("inductor", True)])
def test_what_torch_is_set_to_around_a_call_selects_its_graph(backend: str, donate: bool) -> None:
    """As torch.compile has it. The number of threads selects none, nor whether gradients are on."""
    program = mlp()
    fast = ps.compile_program(program, donate=donate, backend=backend)
    state, eager, batch = fast.init(), program.init(), vector_batch()
    threads, halves = torch.get_num_threads(), partial(torch.autocast, "cpu", torch.bfloat16)
    for around in (nullcontext, halves, nullcontext, halves, torch.no_grad):
        with around():
            state, metrics = fast.train_step(state, batch)
            eager, expected = program.train_step(eager, batch)
            torch.set_num_threads(threads + 1)
            scores = [p.eval_step(state, batch)["loss"].total for p in (fast, program)]  # type: ignore[misc]
        torch.set_num_threads(threads)
        assert_trees_close(metrics["loss"].total, expected["loss"].total, rtol=1e-5, atol=0.0)
        assert_trees_close(*scores, rtol=1e-5, atol=0.0)
    assert fast.train_step.graphs == fast.eval_step.graphs == 2  # type: ignore[union-attr]


@pytest.mark.compile
@pytest.mark.parametrize("donate", FORMS)
def test_a_batch_that_requires_gradients_leaves_no_graph_of_autograd_behind(donate: bool) -> None:
    program = mlp()
    step = compiled(program.train_step, donate=donate)
    x, y = vector_batch()
    state, metrics = run(step, program.init(), [(x.requires_grad_(), y)] * 2)
    assert not any(leaf.requires_grad for leaf in tree.leaves((state.params, state.opt_state, metrics)))
    assert x.grad is None


@pytest.mark.compile
@pytest.mark.parametrize("donate", [True, False])
def test_a_compiled_step_says_that_autograd_cannot_follow_it(donate: bool) -> None:
    program = mlp()
    step, state = ps.compile_step(program.train_step, donate=donate, backend="aot_eager"), program.init()
    leaves = {name: weight.clone().requires_grad_() for name, weight in state.params.items()}
    for _ in range(2):
        with pytest.raises(
            StepContractError, match=r"state/params/.*: the parameter requires a gradient, .*cure: call program.tr"
        ):
            step(state._replace(params=leaves), vector_batch())
        with torch.no_grad():
            new, _ = step(state._replace(params=leaves), vector_batch())
        assert int(new.updates) == 1


@pytest.mark.compile
@pytest.mark.parametrize("transform", [torch.vmap, torch.func.grad])
@pytest.mark.parametrize("donate", FORMS)
def test_a_transform_of_a_compiled_step_is_refused_before_anything_is_written(donate: bool, transform: Any) -> None:
    program = mlp()
    fast = ps.compile_program(program, donate=donate, backend="aot_eager")
    state, (x, y) = fast.init(), vector_batch()
    for _ in range(2):
        for call in (fast.train_step, lambda *inputs: (None, fast.eval_step(*inputs))):  # type: ignore[misc]
            with pytest.raises(StepContractError, match="inside torch.func.vmap, grad"):
                transform(lambda x, f=call, s=state: f(s, (x, y))[1]["loss"].total)(x.expand(2, *x.shape))
        state, _ = fast.train_step(state, (x, y))


@pytest.mark.compile
@pytest.mark.parametrize("donate", FORMS)
def test_text_in_a_batch_makes_no_graph_a_text(donate: bool) -> None:
    def step(state: dict[str, Tensor], batch: dict[str, Any]) -> tuple[Any, Any]:
        return {"w": state["w"] + batch["x"]}, {}

    found = compiled(step, donate=donate)
    state: Any = {"w": torch.zeros(2)}
    for number in range(4):
        state, _ = found(state, {"x": torch.ones(2), "id": [f"file {number}", "other"]})
    assert state["w"].tolist() == [4, 4]
    assert found.graphs == 1


@pytest.mark.compile
def test_names_in_a_batch_are_split_into_micro_batches() -> None:
    program = ps.program(
        nn.Linear(4, 3), lambda m, b: ps.Loss(m(b["x"]).square().mean(), 1), optim.sgd(0.1), microbatches=2
    )
    batch, state = {"x": torch.randn(8, 4), "names": ["a"] * 8, "kind": "train"}, program.init()
    found, _ = compiled(program.train_step)(state, batch)
    assert_trees_close(found.params, program.train_step(state, batch)[0].params)


READ_TEXT: dict[str, Callable[[Any], Any]] = {
    "equal": lambda text: text == "train",
    "not equal": lambda text: text != "train",
    "one of a tuple": lambda text: text in ("train", "valid"),
    "one of a set": lambda text: text in {"train", "valid"},
    "a key": lambda text: {"train": 1}.get(text),
}


@pytest.mark.compile
@pytest.mark.parametrize("read", READ_TEXT)
def test_a_step_that_reads_text_of_a_batch_is_refused(read: str) -> None:
    def step(state: dict[str, Tensor], batch: dict[str, Any]) -> tuple[Any, Any]:
        return {"w": state["w"] + batch["x"] if READ_TEXT[read](batch["kind"]) else state["w"]}, {}

    with pytest.raises(StepContractError, match="the step reads text of the batch"):
        compiled(step)({"w": torch.zeros(2)}, {"x": torch.ones(2), "kind": "train"})


@pytest.mark.compile
def test_an_eval_step_that_reads_the_number_of_the_batch_is_refused() -> None:
    """A graph would hold 0. One that passes it on is right: the host seeds."""
    program = ps.program(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), ps.supervised(nn.MSELoss()), optim.sgd(0.1))
    evaluate, state, batch = program.eval_step, program.init(), (torch.ones(8, 4), torch.zeros(8, 4))
    assert evaluate is not None

    def passed(state: Any, batch: Any, *, index: int = 0) -> Any:
        return evaluate(state, batch, index=index)

    def read(state: Any, batch: Any, *, index: int = 0) -> Any:
        return evaluate(state, batch) if index < 3 else {}

    found = ps.compile_program(program._replace(eval_step=passed), backend="aot_eager").eval_step
    assert found is not None
    assert_trees_close(found(state, batch, index=5), evaluate(state, batch, index=5))
    refused = ps.compile_program(program._replace(eval_step=read), backend="aot_eager").eval_step
    assert refused is not None
    with pytest.raises(StepContractError, match="the eval_step reads the number of the batch"):
        refused(state, batch, index=5)


@pytest.mark.compile
@pytest.mark.parametrize("donate", FORMS)
def test_a_copy_of_the_old_state_stays_one_where_operations_run_one_by_one(donate: bool) -> None:
    def step(state: dict[str, Tensor], x: Tensor) -> tuple[Any, Any]:
        return {"w": state["w"] + x}, {"old": state["w"].clone(memory_format=torch.preserve_format).sum()}

    found = ps.compile_step(step, donate=donate, backend="aot_eager")
    _, read = found({"w": torch.zeros(2)}, torch.ones(2))
    assert float(read["old"]) == 0


@pytest.mark.compile
@pytest.mark.parametrize("donate", FORMS)
@pytest.mark.parametrize("parts", [lambda x: x.chunk(2, 1), lambda x: x.unbind(), lambda x: x.split([1, 3], 1)])
def test_a_batch_that_is_written_through_one_of_its_parts_stays(donate: bool, parts: Any) -> None:
    def objective(model: Any, batch: Any) -> ps.Loss:
        parts(batch[0])[0].sub_(1)
        return ps.supervised(nn.MSELoss())(model, batch)

    step = ps.compile_step(
        (program := ps.program(nn.Linear(4, 4), objective, optim.sgd(0.1))).train_step,
        donate=donate,
        backend="aot_eager",
    )
    batch = torch.ones(8, 4), torch.zeros(8, 4)
    step(program.init(), batch)
    assert torch.equal(batch[0], torch.ones(8, 4))


@pytest.mark.compile
@pytest.mark.parametrize("donate", FORMS)
def test_a_tensor_in_two_places_of_a_batch_makes_no_graph_of_one_input(donate: bool) -> None:
    program = ps.program(nn.Linear(4, 4), ps.supervised(nn.MSELoss()), optim.sgd(0.1))
    step = compiled(program.train_step, donate=donate)
    inputs, targets = torch.ones(8, 4), torch.zeros(8, 4)
    step(program.init(), (inputs, inputs))
    found, _ = step(program.init(), (inputs, targets))
    expected, _ = program.train_step(program.init(), (inputs, targets))
    assert_trees_close(ps.clone(found), expected, rtol=1e-6, atol=1e-7)
    # ... nor the other way round.
    found, _ = step(program.init(), (targets, targets))
    expected, _ = program.train_step(program.init(), (targets, targets))
    assert_trees_close(ps.clone(found), expected, rtol=1e-6, atol=1e-7)


@pytest.mark.compile
def test_a_tensor_in_two_places_counts_as_two_in_evaluation_too() -> None:
    program = ps.program(nn.Linear(4, 4), ps.supervised(nn.MSELoss()), optim.sgd(0.1))
    x, y = torch.ones(8, 4), torch.zeros(8, 4)
    fast, state = ps.compile_program(program, backend="aot_eager"), program.init()
    assert fast.eval_step is not None
    assert program.eval_step is not None
    fast.eval_step(state, (x, x))
    assert float(fast.eval_step(state, (x, y))["loss"]) == pytest.approx(
        float(program.eval_step(state, (x, y))["loss"])
    )


class _Averaged(NamedTuple):
    online: TrainState
    target: dict[str, Tensor]


@pytest.mark.compile
@pytest.mark.parametrize("donate", FORMS)
def test_an_average_that_starts_as_the_very_weights_is_a_tensor_of_its_own(donate: bool) -> None:
    program = ps.program(nn.Linear(4, 4), ps.supervised(nn.MSELoss()), optim.sgd(0.1))

    def step(state: _Averaged, batch: Any) -> tuple[Any, Any]:
        new, metrics = program.train_step(state.online, batch)
        return _Averaged(new, {k: 0.5 * old + 0.5 * new.params[k] for k, old in state.target.items()}), metrics

    start = program.init()
    state = _Averaged(start, dict(start.params))
    data = [(torch.randn(8, 4), torch.randn(8, 4)) for _ in range(3)]
    found, expected = run(compiled(step, donate=donate), state, data)[0], run(step, state, data)[0]
    assert_trees_close(found, expected, rtol=1e-5, atol=1e-6)


# --- through inductor -------------------------------------------------------------------------------------------------


@pytest.mark.compile
@pytest.mark.optimized
def test_inductor_computes_what_eager_does_in_a_donated_packed_step() -> None:
    tx = optim.chain(optim.clip_by_global_norm(1.0), optim.adamw(1e-2))
    program = mlp(tx, ema=0.9, precision="64-true")
    data = [vector_batch(16, seed, torch.float64) for seed in range(4)]
    step = ps.compile_step(program.train_step, donate=True)
    found, metrics = run(step, program.init(), data)
    expected, wanted = run(program.train_step, program.init(), data)
    assert_trees_close(found, expected, rtol=1e-9, atol=1e-9)
    assert_trees_close(metrics, wanted, rtol=1e-5, atol=1e-6)
    assert step.graphs == 1


# --- what a call says that cannot go well -----------------------------------------------------------------------------


@pytest.mark.compile
@pytest.mark.parametrize("backend", ["inductor", "aot_eager"])
def test_a_batch_of_another_dtype_is_refused_before_anything_is_written(backend: str) -> None:
    program = mlp()
    step = ps.compile_step(program.train_step, donate=True, backend=backend)
    state, _ = step(program.init(), vector_batch())
    inputs, targets = vector_batch()
    with pytest.raises(
        StepContractError, match=r"torch.float32 and torch.float64 \(aten.addmm.default\).*float32 batches"
    ):
        step(state, (inputs.double(), targets))
    expected, _ = run(program.train_step, program.init(), [vector_batch()] * 2)
    assert_trees_close(ps.clone(step(state, vector_batch())[0]), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.compile
def test_an_index_out_of_range_is_named_and_the_state_says_what_became_of_it() -> None:
    program = mlp()
    step = ps.compile_step(program.train_step, donate=True)
    state, _ = step(program.init(), vector_batch())
    inputs, targets = vector_batch()
    with pytest.raises(RuntimeError, match="index out of bounds") as caught:
        step(state, (inputs, targets + 1000))
    assert any("a class in the targets" in note for note in caught.value.__notes__)
    with pytest.raises(StateError, match="this state in call 2, which failed"):
        step(state, vector_batch())
    step(program.init(), vector_batch())  # the step itself goes on


@pytest.mark.compile
def test_a_sparse_batch_is_refused_with_the_cure() -> None:
    program = mlp()
    inputs, targets = vector_batch()
    step = ps.compile_step(program.train_step)
    with pytest.raises(StepContractError, match=r"a sparse_coo tensor in the batch.*x.to_dense\(\)"):
        step(program.init(), (inputs.to_sparse(), targets))


@pytest.mark.compile
@pytest.mark.parametrize("where", ["begin", "_run", "_launch", "end"])
def test_ctrl_c_at_any_line_of_a_donated_call_leaves_no_state_that_seems_alive(where: str) -> None:
    """The graph may have run: then the state that went in shows new weights under the old key."""
    program = convnet()  # draws
    step = compiled(program.train_step, donate=True)
    state, _ = step(program.init(), image_batch())

    def interrupt(frame: Any, event: str, _: Any) -> None:
        if frame.f_code.co_name == where and event == "return":
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            step(state, image_batch())
    finally:
        sys.setprofile(None)
    with pytest.raises(StateError, match="this state in call 2"):
        ps.clone(state)
    step(program.init(), image_batch())


@pytest.mark.parametrize("given", [mlp(), "step"], ids=["program", "text"])
def test_what_is_no_step_is_refused_with_the_cure(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"the step is a (Program|str).*compile_program\(program\)"):
        ps.compile_step(given)


# --- what torch itself looks at ---------------------------------------------------------------------------------------


def ctc(model: Any, batch: Any) -> ps.Loss:
    scores, labels, *lengths = model(batch[0]).log_softmax(-1), *batch[1:]
    return ps.Loss(nn.functional.ctc_loss(scores, labels, *lengths), torch.ones(()), {})


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_look_of_torchs_own_at_a_value_has_its_cure(backend: str) -> None:
    step = partial(ps.compile_step, backend=backend)
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=None))
    program = ps.program(module, ps.supervised(CRITERION), optim.sgd(0.1))
    with pytest.raises(StepContractError, match=r"^a BatchNorm1d: .*cure: set momentum=0\.1 in the BatchNorm"):
        step(program.train_step)(program.init(), vector_batch())
    program = ps.program(nn.Linear(4, 3), ctc, optim.sgd(0.1))
    batch = torch.randn(6, 2, 4), torch.ones(2, 3).long(), torch.tensor([6, 6]), torch.tensor([3, 2])
    with pytest.raises(
        StepContractError, match=r"test_compile\.py:\d+: .*ctc_loss.*; or call the step itself, in eager mode"
    ):
        step(program.train_step)(program.init(), batch)


def looks_itself(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs if outputs.sum() > 0 else -outputs).mean() + 0 * targets.sum()


@pytest.mark.parametrize(
    ("criterion", "cure"),
    [
        (lambda o, y: nn.functional.gaussian_nll_loss(o, y, torch.ones_like(y)), "torch's gaussian_nll_loss reads"),
        (lambda o, y: nn.GaussianNLLLoss()(o, y, torch.ones_like(y)), "torch's gaussian_nll_loss reads"),
        (looks_itself, "torch.where"),
    ],
    ids=["function", "module", "the user's"],
)
def test_the_cure_of_a_look_is_for_whoever_looks(criterion: Any, cure: str) -> None:
    program = ps.program(nn.Linear(4, 3), ps.supervised(criterion), optim.sgd(0.1))
    with pytest.raises(StepContractError, match=f"test_compile.py:.*cure: .*{cure}"):
        ps.compile_step(program.train_step)(program.init(), (torch.ones(2, 4), torch.ones(2, 3)))


def test_a_mean_over_nothing_is_refused() -> None:
    program = ps.program(nn.Linear(4, 3), ps.supervised(nn.MSELoss()), optim.sgd(0.1))
    batch, state = (torch.zeros(0, 4), torch.zeros(0, 3)), program.init()
    assert not program.train_step(state, batch)[1]["applied"].total
    with pytest.raises(StepContractError, match=r"^step: torch cannot compile the step: ZeroDivisionError"):
        ps.compile_step(program.train_step)(state, batch)


SIZES: dict[str, Any] = {
    "interpolate": lambda x, n: functional.interpolate(x, size=tuple(n), mode="bilinear", align_corners=True),
    "nearest": lambda x, n: functional.interpolate(x, size=(n[0], n[1])),
    "pad": lambda x, n: functional.pad(x, (0, n[0])),
}


@pytest.mark.parametrize("resized", SIZES.values(), ids=SIZES)
def test_a_size_that_is_read_from_a_tensor_is_a_look_at_its_value(resized: Any) -> None:
    """Torch's C++ has words of its own for it."""

    class Net(nn.Conv2d):
        def forward(self, x: Tensor, n: Tensor) -> Tensor:
            return resized(super().forward(x), n.max(dim=0).values).mean((2, 3))

    objective = ps.supervised(nn.MSELoss(), forward=lambda model, inputs: model(*inputs))
    program = ps.program(Net(1, 1, 3, padding=1), objective, optim.sgd(0.1))
    batch = ((torch.randn(2, 1, 4, 4), torch.tensor([[6, 5], [3, 7]])), torch.randn(2, 1))
    program.train_step(program.init(), batch)
    step = ps.compile_step(program.train_step, backend="aot_eager")
    told = r"test_compile.py:\d+: the step reads the value of a tensor: a size is read from it \(cure: .* a size of"
    with pytest.raises(StepContractError, match=told):
        step(program.init(), batch)


class Masked(nn.Module):
    """One of torch's transformers with a causal mask, and what says so."""

    def __init__(self, kind: str, **said: bool) -> None:
        super().__init__()
        self.kind, self.said = kind, said
        options: dict[str, Any] = {"dim_feedforward": 8, "dropout": 0.0, "batch_first": True}
        if kind == "whole":
            self.body: nn.Module = nn.Transformer(8, 2, 1, 1, **options)
        elif kind == "encoder":
            self.body = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, **options), 1)
        else:
            self.body = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, **options), 1)

    def forward(self, x: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        if self.kind == "encoder":
            return self.body(x, mask=mask, **self.said)
        if self.kind == "decoder":
            return self.body(x, x, tgt_mask=mask, **self.said)
        return self.body(x, x, src_mask=mask, tgt_mask=mask, **self.said)


@pytest.mark.parametrize(
    ("kind", "said"),
    [("encoder", ["is_causal"]), ("decoder", ["tgt_is_causal"]), ("whole", ["src_is_causal", "tgt_is_causal"])],
)
def test_a_transformer_that_looks_at_its_mask_is_told_the_argument_that_says_it(kind: str, said: list[str]) -> None:
    batch = torch.randn(2, 5, 8), torch.randn(2, 5, 8)

    def compared(**options: bool) -> None:
        torch.manual_seed(0)
        program = ps.program(Masked(kind, **options), ps.supervised(nn.MSELoss()), ps.optim.sgd(0.1))
        state = program.init()
        found = ps.compile_step(program.train_step, backend="aot_eager")(state, batch)
        assert_trees_close(found[1], program.train_step(state, batch)[1], rtol=1e-5, atol=1e-6)

    with pytest.raises(StepContractError, match=rf"cure: .*{' and '.join(said)}"):
        compared()
    compared(**dict.fromkeys(said, True))
    compared(**dict.fromkeys(said, False))


class Graph:
    """Like the batches of PyTorch Geometric."""

    def __init__(self, x: Tensor) -> None:
        self._store = [SimpleNamespace(x=x)]

    def to_dict(self) -> dict[str, Tensor]:
        return {"x": self._store[0].x}


def test_an_object_that_no_graph_holds_is_refused_with_a_cure_that_works() -> None:
    def objective(model: Any, batch: Any) -> ps.Loss:
        return ps.Loss(model(batch["x"]).square().mean(), 4)

    program = ps.program(nn.Linear(2, 1), objective, ps.optim.sgd(0.1))
    step, state, batch = (
        ps.compile_step(program.train_step, backend="aot_eager"),
        program.init(),
        Graph(torch.ones(4, 2)),
    )
    with pytest.raises(
        StepContractError, match=r"the batch has a Graph, .*\(cure: make a dict of its tensors .*: batch\.to_dict\(\)"
    ) as caught:
        step(state, batch)
    assert "to_device" not in str(caught.value)
    step(state, batch.to_dict())
