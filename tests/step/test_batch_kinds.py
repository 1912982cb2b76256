"""Batches of every kind that a step takes: `fit`, compiled or not, trains on them as a loop by hand does."""

from __future__ import annotations

import dataclasses
import re
import types
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import purestep as ps
from purestep import tree
from purestep.data import check_batch
from purestep.diagnostics import purity
from purestep.errors import DataError, NonFiniteError, StepContractError

pytestmark = pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested", r"ignore:Sparse \w+ tensor support is in beta", "ignore:Sparse invariant"
)


class Moved:
    """As torch_geometric and many a project's own code hand out: a class that says nothing of what it holds."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y

    def to(self, device: Any) -> Moved:
        return type(self)(self.x.to(device), self.y.to(device))


class Plain:
    """Without a `to`."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y


class Slotted:
    __slots__ = ("x", "y")

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y


class Stored:
    """Holds its tensors in a mapping, as a graph of torch_geometric does."""

    def __init__(self, x: Any, y: Any) -> None:
        self._store = UserDict(x=x, more=[y])


class Registered(Plain):
    """Another library's class, made known by `tree.register`."""


tree.register(Registered, vars, Registered)


class AttrsLike:
    """As attrs makes classes, which need not be installed."""

    __attrs_attrs__ = ("x", "y")

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y


@dataclasses.dataclass
class Data:
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    y: Any


class Named(NamedTuple):
    x: Any
    y: Any


OBJECTS: dict[str, Callable[[Any, Any], Any]] = {
    "a NamedTuple": Named,
    "registered": Registered,
    "attrs": AttrsLike,
    "a namespace": lambda x, y: types.SimpleNamespace(x=x, y=y),
    "a dataclass": Data,
    "a frozen dataclass": Frozen,
    "a mapping": lambda x, y: UserDict(x=x, y=y),
    "one inside another": lambda x, y: types.SimpleNamespace(x=x, y=None, more=[Data(y, "text")]),
}
objects = pytest.mark.parametrize("make", OBJECTS.values(), ids=OBJECTS)


def parts_of(batch: Any) -> Any:
    return parts(dict(batch) if isinstance(batch, UserDict) else batch)


def parts(batch: Any) -> tuple[Any, Any]:
    if isinstance(batch, dict):
        return batch["x"], batch["y"]
    return batch.x, (batch.more[0].x if hasattr(batch, "more") else batch.y)


def objective(model: Any, batch: Any) -> ps.Loss:
    x, y = parts(batch)
    return ps.Loss((model(x) - y).square().mean(), torch.tensor(float(len(x))), {})


def batches(make: Callable[[Any, Any], Any], rows: tuple[int, ...] = (4, 4, 2)) -> list[Any]:
    source = torch.Generator().manual_seed(0)
    return [make(torch.randn(n, 1, generator=source), torch.randn(n, 1, generator=source)) for n in rows]


def linear(**kwargs: Any) -> ps.Program:
    net = torch.nn.Linear(1, 1)
    net.load_state_dict({"weight": torch.tensor([[0.5]]), "bias": torch.tensor([0.1])})
    return ps.program(net, kwargs.pop("objective", objective), ps.optim.sgd(0.1), **kwargs)


def by_hand(given: list[Any], **kwargs: Any) -> list[float]:
    program = linear(**kwargs)
    state = program.init()
    for batch in given:
        state, _ = program.train_step(state, ps.to_device(batch, state))
    return weights(state)


def weights(state: Any) -> list[float]:
    return [float(leaf.sum()) for leaf in state.params.values()]


def fit(given: Any, program: ps.Program | None = None, **fields: Any) -> list[float]:
    program = program or linear()
    fields = {"epochs": 1, "progress": False} | fields
    return weights(ps.fit(program.init(), given, program, **fields).state)


# --- objects ----------------------------------------------------------------------------------------------------------

COMPILED = {"backend": "aot_eager"}


@objects
@pytest.mark.parametrize(
    "fields", [{}, {"check_every": 1}, {"compile": COMPILED}], ids=["eager", "looked at", "compiled"]
)
def test_fit_trains_on_objects(make: Any, fields: dict[str, Any]) -> None:
    given = batches(make)
    assert fit({"train": given, "val": given}, **fields) == pytest.approx(by_hand(batches(Named)), rel=1e-6)


@objects
def test_what_cuts_or_casts_a_batch_reaches_into_them(make: Any) -> None:
    given, named = batches(make), batches(Named)
    assert fit(given, linear(microbatches=2)) == by_hand(named, microbatches=2)
    assert fit(given, linear(precision="bf16-true")) == by_hand(named, precision="bf16-true")
    assert fit(given, overfit_batches=1, epochs=2) == by_hand([named[0]] * 2)


@objects
def test_a_step_that_writes_into_them_is_found(make: Any) -> None:
    def writes(state: Any, batch: Any) -> Any:
        parts_of(batch)[0].add_(1)
        return plain(state, batch)

    program = linear()
    plain = program.train_step
    with pytest.raises(StepContractError, match=r"batch/x: the step writes its arguments, in place"):
        fit(batches(make), program._replace(train_step=writes))


@objects
def test_an_objective_that_writes_into_them_trains_on_a_copy(make: Any) -> None:
    def writes(model: Any, batch: Any) -> ps.Loss:
        parts(batch)[0].add_(1)
        return objective(model, batch)

    given = batches(make)
    before = [[leaf.clone() for leaf in parts_of(each)] for each in given]
    fit(given, linear(objective=writes))
    after = [list(parts_of(each)) for each in given]
    assert all(torch.equal(*pair) for each in zip(before, after, strict=True) for pair in zip(*each, strict=True))


def mixup(writes: list[bool]) -> Any:
    """An objective that writes into its batch in some calls only, as a mixup of a probability does."""

    def objective(model: Any, batch: Any) -> ps.Loss:
        if writes.pop(0):
            batch["x"].mul_(0.5)
        return ps.Loss((model(batch["x"]) - batch["y"]).square().mean(), torch.tensor(4.0))

    return objective


def test_a_write_that_the_first_call_did_not_make_is_refused() -> None:
    batch = {"x": torch.ones(4, 1), "y": torch.ones(4, 1)}
    program = linear(objective=mixup([True, False, False, True, False, True]))
    state = program.init()
    for _ in range(2):
        state, _ = program.train_step(state, batch)  # the first call writes: later ones run on a copy
    program.eval_step(state, batch)  # the entry of eval mode: the first call of it does not write
    assert batch["x"].eq(1).all()
    with pytest.raises(StepContractError, match=r"batch/x: this call writes the tensor in place.*x\.clone"):
        program.eval_step(state, batch)
    other = linear(objective=mixup([False, True]))
    state, _ = other.train_step(other.init(), batch)
    with pytest.raises(StepContractError, match="batch/x: this call writes"):
        other.train_step(state, batch)


@objects
def test_an_incident_holds_them(make: Any, tmp_path: Path) -> None:
    given = batches(make)
    parts(dict(given[1]) if isinstance(given[1], UserDict) else given[1])[0][0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"batch/x \(1 of 4 not finite\)") as caught:
        fit(given, snapshots=tmp_path)
    found = ps.testing.replay(caught.value.path, linear())
    assert found is not None


@objects
def test_one_of_another_dtype_is_refused_by_its_path(make: Any) -> None:
    given = batches(make)
    given[1] = make(torch.zeros(4, 1, dtype=torch.float64), torch.zeros(4, 1))
    with pytest.raises(
        DataError, match=r"train, epoch 1, batch 2: batch/(x|0) is a float64 tensor of rank 2; batch 1 had"
    ):
        fit(given)


def test_a_run_on_objects_goes_on(tmp_path: Path) -> None:
    given = batches(Data)
    fit(given, steps=2, snapshots=tmp_path)
    assert fit(given, steps=-1, snapshots=tmp_path) == fit(given)


def test_objects_have_one_graph_a_size() -> None:
    step = ps.compile_step(linear().train_step, backend="aot_eager")
    state = linear().init()
    for batch in batches(Data, (4, 4, 2, 4, 2)):
        state, _ = step(state, batch)
    assert step.graphs == 2


@pytest.mark.parametrize("make", [Moved, Plain, Slotted, Stored])
def test_an_object_of_another_class_is_refused_with_the_cure(make: Any) -> None:
    kind = make.__name__
    told = (
        rf"the leaf is a {kind}, an object that holds tensors, .*"
        r"\(cure: make a dict of its tensors in the loader's collate_fn"
    )
    program, batch = linear(), batches(make)[0]
    state = program.init()
    for step in (program.train_step, program.eval_step, ps.compile_step(program.train_step, **COMPILED)):
        with pytest.raises(DataError, match=rf"^batch(/0)?: {told}"):
            step(state, batch)
    for given in ([batch], [(torch.ones(2), [batch])]):
        with pytest.raises(DataError, match=rf"batch.* {told}"):
            fit(given)


def test_one_is_refused_whatever_was_seen_before() -> None:
    """A batch decides by its class: neither another batch nor the other attributes change it."""
    for _ in range(2):
        with pytest.raises(DataError, match=r"^batch/0: the leaf is a Plain"):
            tree.dicts([Plain(torch.ones(1), object())])
        assert tree.leaves(tree.dicts(Data(1, "text"))) == [1, "text"]
        assert tree.dicts(Plain(1, "no tensor")).x == 1


def test_the_cure_of_a_registered_class_works_compiled() -> None:
    given = batches(Registered)
    assert fit(given, linear(microbatches=2), compile=COMPILED) == pytest.approx(
        by_hand(batches(Named), microbatches=2), rel=1e-6
    )
    moved = ps.to_device(given[0], torch.device("meta"))
    assert type(moved) is Registered
    assert moved.x.device.type == "meta"


@pytest.mark.parametrize(
    "array",
    [np.array(["a", "b"]), np.array([torch.ones(1), "b"], dtype=object), np.ones(2)],
    ids=["text", "objects", "numbers"],
)
def test_an_array_in_a_compiled_batch_is_refused(array: Any) -> None:
    program = linear(objective=lambda model, batch, *context: objective(model, batch))
    x, y = batches(Data)[0].x, batches(Data)[0].y
    told = r"^batch: the batch has a ndarray, which no .*cure: call torch\.as_tensor\(array\), or array\.tolist\(\)"
    for step in (ps.compile_step(program.train_step, **COMPILED), ps.compile_step(program.eval_step, **COMPILED)):
        with pytest.raises(StepContractError, match=told):
            step(program.init(), {"x": x, "y": y, "info": [array]})
    step = ps.compile_step(program.train_step, **COMPILED)
    with pytest.raises(StepContractError, match=told):
        step(program.init(), {"x": x, "y": y}, {"w": array})
    step(program.init(), {"x": x, "y": y, "info": ["a", "b"]})  # the cure for text


def test_an_object_without_a_tensor_is_refused() -> None:
    with pytest.raises(DataError, match="without a tensor"):
        fit([types.SimpleNamespace(x=1, y="text")])


def test_objects_move_with_all_they_hold() -> None:
    meta = torch.device("meta")
    for make in (AttrsLike, Registered, Frozen, OBJECTS["a namespace"]):
        batch = make(torch.ones(2), [torch.ones(1), np.ones(1)])
        moved = ps.to_device(batch, meta)
        assert type(moved) is type(batch)
        assert moved.x.device == moved.y[0].device == moved.y[1].device == meta
        assert batch.x.device.type == "cpu"
        whole = make(torch.ones(2), "text")
        assert ps.to_device(whole, "cpu") is whole


def test_what_is_no_record_has_no_attributes() -> None:
    for node in (torch.ones(1), torch.nn.Linear(1, 1), torch.device("cpu"), object(), {"x": 1}, (1,), int, len, None):
        assert tree.attributes(node) is None


# --- sparse and nested tensors ----------------------------------------------------------------------------------------

LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "coo": lambda: torch.eye(4).to_sparse(),
    "coo with doubles": lambda: torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (4, 4)),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "csc": lambda: torch.eye(4).to_sparse_csc(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)], layout=torch.jagged),
}
every_layout = pytest.mark.parametrize("make", LAYOUTS.values(), ids=LAYOUTS)


def mixed(model: Any, batch: Any) -> ps.Loss:
    x, more = batch
    size = sum(part.sum() for part in more.unbind()) if more.is_nested else more.to_dense().sum()
    return ps.Loss((model(x) * size).square().mean(), torch.tensor(float(len(x))), {})


def holding(make: Callable[[], Tensor]) -> list[Any]:
    return [(torch.full((4, 1), float(number)), make()) for number in (1, 2, 3)]


@every_layout
@pytest.mark.parametrize("fields", [{}, {"check_every": 1, "overfit_batches": 3}, {"compile": "auto"}], ids=str)
def test_fit_trains_on_sparse_and_nested_tensors(make: Any, fields: dict[str, Any]) -> None:
    given = holding(make)
    found = fit({"train": given, "val": given}, linear(objective=mixed), **fields)
    assert found == by_hand(given, objective=mixed)


@every_layout
def test_a_write_into_them_is_found(make: Any) -> None:
    def writes(state: Any, batch: Any) -> Any:
        more = batch[1]
        if more.layout is torch.sparse_coo or more.layout is torch.strided:
            more.mul_(2)
        else:
            more.values().mul_(2)
        return plain(state, batch)

    program = linear(objective=mixed)
    plain = program.train_step
    with pytest.raises(StepContractError, match=r"batch/1: the step writes its arguments"):
        fit(holding(make), program._replace(train_step=writes))


@every_layout
def test_a_graph_takes_none_and_says_so(make: Any) -> None:
    with pytest.raises(
        StepContractError, match=r"(sparse|nested).* tensor in the batch, which no compiled graph takes"
    ):
        fit(holding(make), linear(objective=mixed), compile=COMPILED)


@every_layout
def test_no_part_is_made_of_them(make: Any) -> None:
    with pytest.raises(DataError, match=r"batch: .*(micro-?batches|parts).*cure:"):
        fit(holding(make), linear(objective=mixed, microbatches=2))


@every_layout
def test_an_incident_with_them_is_not_written_and_says_so(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given = holding(make)
    given[1][0][0] = torch.nan
    with pytest.raises(NonFiniteError) as caught:
        fit(given, linear(objective=mixed), snapshots=tmp_path)
    assert caught.value.path is None
    assert re.search(r"not written down: batch/1: a (sparse_\w+|nested) tensor cannot be stored", caplog.text)


def test_numbers_that_are_not_finite_are_counted_in_them() -> None:
    from purestep.diagnostics.nonfinite import not_finite

    assert not_finite((torch.eye(2) * torch.inf).nan_to_num(nan=0.0, posinf=torch.inf).to_sparse()) == 2
    assert not_finite(torch.nested.nested_tensor([torch.ones(2), torch.tensor([torch.nan])])) == 1


def test_a_fingerprint_depends_on_their_parts() -> None:
    one, other = torch.eye(3).to_sparse_csr(), torch.eye(3).roll(1, 0).to_sparse_csr()
    assert int(purity.fingerprint(one, {})) != int(purity.fingerprint(other, {}))  # type: ignore[arg-type]


def test_a_dense_tensor_in_place_of_a_sparse_one_is_another_batch() -> None:
    given = holding(LAYOUTS["coo"])
    given[2] = (given[2][0], torch.eye(4))
    with pytest.raises(
        DataError, match=r"batch 3: batch/1 is a float32 tensor of rank 2; batch 1 had a float32 sparse_coo"
    ):
        fit(given, linear(objective=mixed))


# --- lists of one entry an example ------------------------------------------------------------------------------------

TABLE = TensorDataset(torch.arange(10.0)[:, None] / 10, torch.zeros(10, 1))


def stacked(model: Any, batch: Any) -> ps.Loss:
    x, y = batch["x"], batch["y"]
    return ps.Loss((model(torch.stack(list(x))) - torch.stack(list(y))).square().mean(), float(len(x)), {})


COLLATED: dict[str, Callable[[list[Any]], Any]] = {
    "lists of tensors": lambda items: {"x": [x for x, _ in items], "y": [y for _, y in items]},
    "tuples": lambda items: dict(zip("xy", zip(*items, strict=True), strict=True)),
    "ids and notes": lambda items: (
        COLLATED["tuples"](items) | {"id": [len(items)] * len(items), "note": ["a"] * len(items)}
    ),
    "dicts": lambda items: (
        COLLATED["tuples"](items) | {"more": [{"boxes": torch.ones(i, 4)} for i in range(len(items))]}
    ),
}


@pytest.mark.parametrize("collate", COLLATED.values(), ids=COLLATED)
@pytest.mark.parametrize("fields", [{}, {"compile": COMPILED}], ids=["eager", "compiled"])
def test_the_last_batch_may_have_fewer_entries(collate: Any, fields: dict[str, Any]) -> None:
    loader = DataLoader(TABLE, batch_size=4, collate_fn=collate)
    found = fit({"train": loader, "val": loader}, linear(objective=stacked), **fields)
    assert found == pytest.approx(by_hand(list(loader), objective=stacked), rel=1e-6)


def test_a_batch_that_is_a_list_of_examples_too() -> None:
    def listed(model: Any, batch: Any) -> ps.Loss:
        return stacked(model, {"x": [x for x, _ in batch], "y": [y for _, y in batch]})

    loader = DataLoader(TABLE, batch_size=4, collate_fn=list)
    assert fit(loader, linear(objective=listed)) == by_hand(list(loader), objective=listed)


@pytest.mark.parametrize(
    ("first", "second", "told"),
    [
        ((torch.ones(2, 1), torch.ones(2, 1)), (torch.ones(2, 1),), "batch has 1 items; batch 1 had 2"),
        (([torch.ones(1)] * 3,), ([torch.ones(1), torch.ones(1, 1)],), "batch/0 has 2 items; batch 1 had 3"),
        (([torch.ones(1)] * 3,), ([torch.ones(1)] * 2 + [None],), "batch/0/2 is None; batch 1 had a float32"),
        (({"a": torch.ones(1)},), ({"b": torch.ones(1)},), r"batch/0 misses \['a'\] and has the new"),
    ],
    ids=["a target that is gone", "one of another rank", "one that is None", "another key"],
)
def test_another_structure_is_refused_still(first: Any, second: Any, told: str) -> None:
    with pytest.raises(DataError, match=told):
        check_batch(second, check_batch(first))


# --- weights ----------------------------------------------------------------------------------------------------------


def distance(outputs: Any, targets: Any) -> Tensor:
    return torch.stack([(a - b).square().mean() for a, b in zip(outputs, targets, strict=True)]).mean()


class Each(torch.nn.Linear):
    """Of every image by itself."""

    def forward(self, *images: Tensor) -> Any:
        return [super(Each, self).forward(image) for image in images]


def images(count: int, rows: int, value: float) -> Any:
    return [torch.full((rows, 1), value)] * count, [torch.zeros(rows, 1)] * count


def detector(**kwargs: Any) -> ps.Program:
    metrics = {"distance": distance}
    return ps.program(Each(1, 1), ps.supervised(distance, metrics=metrics), ps.optim.sgd(0.01), **kwargs)


@pytest.mark.parametrize("rows", [(3, 9), (4, 2), (1, 1)], ids=str)
def test_lists_weigh_their_entries(rows: tuple[int, int]) -> None:
    program = detector()
    state, given = program.init(), [images(4, rows[0], 1.0), images(2, rows[1], 5.0)]
    one, two, both = (ps.evaluate(state, part, program.eval_step) for part in (given[:1], given[1:], given))
    for name in ("loss", "distance"):
        assert both[name] == pytest.approx((4 * one[name] + 2 * two[name]) / 6)


def test_accumulated_lists_are_as_one_batch() -> None:
    first, second = images(4, 3, 1.0), images(2, 9, 5.0)
    whole, parts = detector(), detector(accumulate=2)
    expected, _ = whole.train_step(whole.init(), tuple(a + b for a, b in zip(first, second, strict=True)))
    state = parts.init()._replace(params=whole.init().params)
    for batch in (first, second):
        state, _ = parts.train_step(state, batch)
    for name, leaf in expected.params.items():
        torch.testing.assert_close(state.params[name], leaf)


BOXES = [{"boxes": torch.ones(n, 4)} for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("targets", "inputs", "count"),
    [
        (torch.ones(5, 2), None, 5),
        (torch.ones(()), None, 1),
        ([torch.ones(3, 4)] * 2, [torch.ones(3, 8)] * 2, 2),
        ([torch.ones(3, 4)] * 2, torch.ones(2, 8), 2),
        (BOXES, torch.ones(3, 1), 3),
        (BOXES, [torch.ones(3, 8, 8)] * 3, 3),
        ({"boxes": [torch.ones(2, 4), torch.ones(5, 4)]}, None, 2),
        ([1, 2, 3, 4], None, 4),
        ([torch.ones(())] * 3, None, 3),
        # Columns: the targets of two heads.
        ([torch.ones(7, 1), torch.ones(7, 1)], torch.ones(7, 3), 7),
        ([torch.ones(7, 4), torch.ones(7, dtype=torch.int64)], [torch.ones(7, 3), torch.ones(7, 5)], 7),
        ((torch.ones(7), torch.ones(7)), {"a": torch.ones(7, 2), "b": torch.ones(7)}, 7),
        (([torch.ones(1)] * 3, [torch.ones(2)] * 3), [torch.ones(8)] * 3, 3),
    ],
)
def test_examples_are_counted(targets: Any, inputs: Any, count: int) -> None:
    from purestep.objective.measure import leading

    assert leading(targets, inputs) == count


# --- parts ------------------------------------------------------------------------------------------------------------


def cut(batch: Any, count: int = 2) -> list[Any]:
    from purestep.step.microbatch import split

    return list(split(batch, count))


def shapes(node: Any) -> Any:
    return tree.map(lambda leaf: tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf, node)


PICTURES: dict[str, tuple[Any, list[int]]] = {
    "other numbers of boxes": ([1, 2, 3, 1], [2, 2]),
    "as many as pictures": ([4, 4, 4, 4], [2, 2]),
    "one each": ([1, 1, 1], [2, 1]),
}


@pytest.mark.parametrize(("boxes", "found"), PICTURES.values(), ids=PICTURES)
@pytest.mark.parametrize("wrap", [dict, lambda **held: types.SimpleNamespace(**held)], ids=["dicts", "objects"])
def test_lists_of_one_mapping_a_picture_are_cut_by_pictures(boxes: list[int], found: list[int], wrap: Any) -> None:
    labels = [wrap(boxes=torch.ones(n, 4), label=torch.ones(n)) for n in boxes]
    for whole in ({"x": torch.ones(len(boxes), 3), "labels": labels}, ([torch.ones(3, n, n) for n in boxes], labels)):
        made = [part["labels"] if isinstance(part, dict) else part[1] for part in cut(tree.dicts(whole))]
        assert [len(part) for part in made] == found
        assert [leaf for part in made for leaf in tree.leaves(part)] == tree.leaves(labels)
        others = [part["x"] if isinstance(part, dict) else part[0] for part in cut(whole)]
        assert [len(part) for part in others] == found


def test_records_may_hold_lists_of_other_lengths_and_nothing() -> None:
    records = [{"boxes": torch.ones(3, 4), "names": names, "mask": None} for names in (["a", "b"], ["c"], [], ["d"])]
    records[1]["mask"] = torch.ones(3)
    for whole in ({"targets": records}, {"files": ("a", "b"), "targets": records}):
        assert [part["targets"] for part in cut(whole)] == [records[:2], records[2:]]


def test_three_pictures_of_three_channels_are_no_columns() -> None:
    batch = ([torch.ones(3, 8, 8)] * 3, [{"boxes": torch.ones(3, 4)}] * 3)
    assert shapes(cut(batch, 3)) == [([(3, 8, 8)], [{"boxes": (3, 4)}])] * 3


AMBIGUOUS = {
    "two inside": (torch.ones(2, 3), [torch.ones(2, 1), torch.ones(2, 4)]),
    "two and two": ([torch.ones(4, 3), torch.ones(4, 3)], [torch.ones(4, 1), torch.ones(4, 1)]),
    "two views": {"views": [torch.ones(8, 3), torch.ones(8, 3)]},
    "three pictures of three channels": ([torch.ones(3, 8, 8)] * 3, [0, 1, 2]),
}


@pytest.mark.parametrize("batch", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_a_list_of_columns_or_of_examples_is_refused_with_the_cure(batch: Any) -> None:
    with pytest.raises(
        DataError, match=r"one for each row, or columns \(cure: stack tensors .*name columns: .*one dict"
    ):
        cut(batch)


def test_the_cures_of_an_ambiguous_list_are_cut() -> None:
    assert (
        shapes(cut({"views": {"a": torch.ones(8, 3), "b": torch.ones(8, 3)}}))
        == [{"views": {"a": (4, 3), "b": (4, 3)}}] * 2
    )
    assert shapes(cut((torch.ones(3, 3, 8, 8), torch.arange(3)), 3)) == [((1, 3, 8, 8), (1,))] * 3
    assert [len(part["x"]) for part in cut({"x": [{"picture": torch.ones(3, 8, 8)} for _ in range(3)]})] == [2, 1]


def test_a_batch_that_is_a_list_is_a_list_of_columns() -> None:
    examples = [{"x": torch.ones(n, 2), "y": torch.ones(())} for n in (1, 2, 3)]
    with pytest.raises(DataError, match=r"1 rows in 0/x and 2 rows in 1/x; 2 parts need equal numbers of rows"):
        cut(examples)
    pairs = [(torch.ones(n, 2), torch.ones(1)) for n in (2, 3)]
    with pytest.raises(DataError, match=r"2 rows in 0/0 and 1 rows in 0/1; 2 parts need equal numbers of rows"):
        cut(pairs)


@pytest.mark.parametrize(
    "columns",
    [
        [torch.ones(2, 3), torch.ones(2, 1)],
        (torch.ones(4, 3), [torch.ones(4, 1), torch.ones(4, 4)]),
        ([torch.ones(4, 3), torch.ones(4)], {"y": (torch.ones(4, 1), torch.ones(4))}),
        ({"a": torch.ones(4, 3)}, {"a": torch.ones(4)}),
        [{"a": torch.ones(2, 3)}, {"a": torch.ones(2)}],
    ],
    ids=["two of two", "a list of two heads", "pairs", "mappings", "as many mappings as rows"],
)
def test_columns_are_cut_by_rows(columns: Any) -> None:
    half = tree.map(lambda leaf: leaf[: len(leaf) // 2], columns)
    assert shapes(cut(columns)) == [shapes(half)] * 2


def test_parts_of_pictures_add_up_to_the_whole() -> None:
    class Net(torch.nn.Linear):
        def forward(self, x: Tensor, labels: Any) -> Tensor:
            rows = [(super(Net, self).forward(x[i]) - t["boxes"].mean()).square().mean() for i, t in enumerate(labels)]
            return torch.stack(rows).mean()

    def loss(model: Any, batch: Any) -> ps.Loss:
        return ps.Loss(model(**batch), torch.tensor(float(len(batch["labels"]))), {})

    source = torch.Generator().manual_seed(1)
    labels = [{"boxes": torch.rand(n, 4, generator=source)} for n in (4, 4, 4, 1)]
    batch = {"x": torch.rand(4, 3, generator=source), "labels": labels}
    torch.manual_seed(0)
    net = Net(3, 1)
    whole, split = (ps.program(net, loss, ps.optim.sgd(0.1), microbatches=count) for count in (1, 3))
    expected, _ = whole.train_step(whole.init(), batch)
    found, _ = split.train_step(split.init(), batch)
    for name, leaf in expected.params.items():
        torch.testing.assert_close(found.params[name], leaf)
