from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial, reduce
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_trees_close, count_graphs, no_waiting
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from purestep import metrics, tree
from purestep.errors import ConfigError, StepContractError
from purestep.types import Mean, Metrics

LOGITS = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.0], [0.0, 1.0, 2.0], [1.0, 0.0, 0.5]])
TARGETS = torch.tensor([0, 1, 1, 2])


def mean(total: float, weight: float) -> Mean:
    return Mean(torch.tensor(float(total)), torch.tensor(float(weight)))


# Whole numbers this small add up exactly in float32, so the laws hold without a tolerance.
MEANS = st.builds(mean, st.integers(-1000, 1000), st.integers(0, 1000))
METRICS = st.dictionaries(st.sampled_from("loss accuracy f1 lr".split()), MEANS)


def test_compute_is_plain_numbers_under_prefixed_names_and_nan_of_nothing():
    found = metrics.compute({"loss": mean(6, 4), "f1": mean(0, 0)}, prefix="val_")
    assert found["val_loss"] == 1.5
    assert math.isnan(found["val_f1"])
    assert {type(value) for value in found.values()} == {float}


def test_a_value_keeps_its_dtype_up_to_the_number() -> None:
    found = {
        "count": Mean(torch.tensor(2**24 + 1), torch.tensor(1)),  # as float32 it would be one less
        "loss": mean(6, 4),
        "wide": Mean(torch.tensor(0.1, dtype=torch.float64), torch.tensor(1.0)),
    }
    assert metrics.compute(found) == {"count": 2**24 + 1, "loss": 1.5, "wide": 0.1}


def test_a_vector_is_the_mean_over_the_classes_that_were_counted():
    classes = Mean(torch.tensor([1.0, 0.0, 3.0]), torch.tensor([2.0, 0.0, 3.0]))
    assert float(classes) == 0.75
    assert metrics.compute({"f1": classes}) == {"f1": 0.75}
    assert classes.compute()[[0, 2]].tolist() == [0.5, 1.0]
    assert math.isnan(float(Mean(torch.zeros(2), torch.zeros(2))))


def test_merge_broadcasts_nothing() -> None:
    classes = Mean(torch.ones(3), torch.ones(3))
    with pytest.raises(StepContractError, match=r"metrics.merge: 'f1' has shape \[\] and \[3\]"):
        metrics.merge({"f1": mean(1, 2)}, {"f1": classes})


@pytest.mark.parametrize(
    ("value", "weight", "total"),
    [(torch.tensor(0.5), 8, 4.0), (0.5, torch.tensor(8.0), 4.0), (torch.tensor(math.nan), 0, 0.0), (2, 1.0, 2.0)],
)
def test_as_mean(value: Any, weight: Any, total: float):
    found = metrics.as_mean(value, weight)
    assert_trees_close(found, mean(total, float(weight)), exact=True)


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_as_mean_has_no_graph_and_at_least_float32(dtype: torch.dtype, kept: torch.dtype):
    leaf = torch.tensor(1.0, dtype=dtype, requires_grad=True)
    found = metrics.as_mean(leaf * 2, 3)
    assert not found.total.requires_grad
    assert found.total.dtype == found.weight.dtype == kept
    assert metrics.as_mean(torch.tensor([1.0, 2.0]), 2).total.tolist() == [2.0, 4.0]


@pytest.mark.parametrize("value", [torch.zeros(2, 2), torch.tensor(1j)])
def test_as_mean_of_what_is_no_mean_is_refused(value: Tensor):
    with pytest.raises(StepContractError, match=r"metrics\.as_mean: the value has shape"):
        metrics.as_mean(value, 1)


# ---- regression


def test_errors_of_numbers():
    outputs, targets = torch.tensor([[1.0], [4.0]]), torch.tensor([[0.0], [2.0]])
    assert_trees_close(metrics.mean_absolute_error(outputs, targets), mean(3, 2), exact=True)
    assert_trees_close(metrics.mean_squared_error(outputs, targets), mean(5, 2), exact=True)


@pytest.mark.parametrize("metric", [metrics.mean_absolute_error, metrics.mean_squared_error])
def test_shapes_that_would_broadcast_are_refused(metric: metrics.Metric):
    with pytest.raises(StepContractError, match=r"metrics\.mean_.*: outputs \[4, 1\] and targets \[4\]"):
        metric(torch.zeros(4, 1), torch.zeros(4))


# ---- classification


def test_accuracy_by_hand():
    assert_trees_close(metrics.accuracy(LOGITS, TARGETS), mean(2, 4), exact=True)
    assert_trees_close(metrics.accuracy(LOGITS, TARGETS, k=2), mean(4, 4), exact=True)
    assert_trees_close(metrics.accuracy(LOGITS, torch.tensor([0, -100, 1, -100])), mean(1, 2), exact=True)
    assert_trees_close(metrics.accuracy(LOGITS, TARGETS, ignore_index=1), mean(1, 2), exact=True)


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: SimpleNamespace(logits=x), lambda x: {"logits": x}])
def test_logits_are_found_in_a_models_output(wrap: Callable[[Tensor], Any]):
    assert float(metrics.accuracy(wrap(LOGITS), TARGETS)) == 0.5


def test_classes_second_or_last():
    targets = torch.tensor([[0, 1, 2, 2], [2, 1, 0, 1]])
    last = torch.nn.functional.one_hot(targets, 3).float()
    last[0, 0] = torch.tensor([0.0, 1.0, 0.0])
    assert float(metrics.accuracy(last, targets)) == 7 / 8
    assert float(metrics.accuracy(last.movedim(-1, 1), targets)) == 7 / 8
    square, few = last[:, :3], targets[:, :3]
    with pytest.raises(StepContractError, match=r"\[2, 3, 3\] fit targets \[2, 3\] with the classes in dim") as caught:
        metrics.accuracy(square, few)
    assert float(metrics.accuracy(square.flatten(0, -2), few.flatten())) == 5 / 6
    cure: Any = eval(caught.value.hint.partition(", or without")[0], {"metrics": metrics})
    assert float(cure(square.movedim(-1, 1), few)) == 5 / 6


def test_a_causal_models_output_predicts_the_next_target():
    tokens = torch.tensor([[3, 1, 2, 0]])
    logits = torch.nn.functional.one_hot(torch.tensor([[1, 2, 3, 3]]), 4).float()
    assert_trees_close(metrics.accuracy(logits, tokens, shift=True), mean(2, 3), exact=True)


@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_a_threshold_reads_one_output_a_target(shape: tuple[int, ...]):
    logits, targets = torch.tensor([1.0, -1.0, 2.0, -2.0]).reshape(shape), torch.tensor([1.0, 1.0, 0.0, 0.0])
    assert_trees_close(metrics.accuracy(logits, targets, threshold=0.0), mean(2, 4), exact=True)
    found = metrics.counts(logits, targets, threshold=0.0)
    assert [field.tolist() for field in found] == [[1.0], [1.0], [1.0]]


def test_counts_by_hand():
    found = metrics.counts(LOGITS, TARGETS)
    assert [field.tolist() for field in found] == [[1, 1, 0], [1, 0, 1], [0, 1, 1]]
    ignored = metrics.counts(LOGITS, torch.tensor([0, -100, -100, -100]))
    assert [field.tolist() for field in ignored] == [[1, 0, 0], [0, 0, 0], [0, 0, 0]]


def test_more_answers_of_one_class_than_a_float32_counts_to():
    n = 2**24 + 64
    outputs, targets = torch.tensor([1.0, 0.0]).expand(n, 2), torch.zeros((), dtype=torch.int64).expand(n)
    assert metrics.counts(outputs, targets).tp.tolist() == [n, 0]


def test_with_a_threshold_all_targets_are_of_one_class():
    outputs = torch.tensor([[0.9, 0.9, 0.1], [0.9, 0.1, 0.1]])
    targets = torch.tensor([[1, 0, 1], [1, 1, -100]])
    found = metrics.counts(outputs, targets, threshold=0.5)
    assert [field.tolist() for field in found] == [[2], [1], [2]]
    assert float(metrics.precision(outputs, targets, threshold=0.5)) == pytest.approx(2 / 3)
    with pytest.raises(ConfigError, match=r"one class .*several labels an object of torchmetrics"):
        metrics.recall(outputs, targets, threshold=0.5, average="macro")


METRIC_NAMES = ["precision", "recall", "f1"]
SKLEARN = {"precision": "precision_score", "recall": "recall_score", "f1": "f1_score"}


@pytest.mark.row("2.17", "B28")
@pytest.mark.peer
@pytest.mark.parametrize("average", ["micro", "macro", "binary"])
@pytest.mark.parametrize("name", METRIC_NAMES)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_merged_counts_equal_scikit_learn_over_all_batches(name: str, average: Any, data: st.DataObject):
    from sklearn import metrics as sklearn_metrics

    classes = 2 if average == "binary" else 4
    label = st.integers(0, classes - 1)
    pairs = data.draw(st.lists(st.tuples(label, label), min_size=1, max_size=40))
    cut = data.draw(st.integers(0, len(pairs)))
    metric = partial(getattr(metrics, name), average=average)
    found: Metrics = metrics.empty()
    for part in (pairs[:cut], pairs[cut:]):
        if part:
            guessed, targets = (torch.tensor(column) for column in zip(*part, strict=True))
            found = metrics.merge(found, {name: metric(torch.nn.functional.one_hot(guessed, classes), targets)})
    guessed, targets = zip(*pairs, strict=True)
    expected = getattr(sklearn_metrics, SKLEARN[name])(
        targets, guessed, average=average, labels=None if average == "binary" else range(classes), zero_division=np.nan
    )
    assert float(found[name]) == pytest.approx(expected, nan_ok=True)


@pytest.mark.row("2.17", "B28")
def test_f1_averaged_over_batches_is_another_number():
    batches = [(LOGITS[:1], TARGETS[:1]), (LOGITS[1:], TARGETS[1:])]
    metric = partial(metrics.f1, average="macro")
    averaged = sum(float(metric(*batch)) for batch in batches) / 2
    merged = reduce(metrics.merge, ({"f1": metric(*batch)} for batch in batches))
    assert float(merged["f1"]) == pytest.approx(float(metric(LOGITS, TARGETS)))
    assert float(merged["f1"]) != pytest.approx(averaged)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: metrics.accuracy((LOGITS,), TARGETS),
            StepContractError,
            r"metrics\.accuracy: the outputs are a tuple",
        ),
        (lambda: metrics.accuracy({"x": LOGITS}, TARGETS), StepContractError, r"are a dict without logits"),
        (lambda: metrics.accuracy(LOGITS, TARGETS[:3]), StepContractError, r"outputs \[4, 3\] and targets \[3\]"),
        (lambda: metrics.accuracy(LOGITS[:, :1], TARGETS), StepContractError, r"cure: .*threshold=0\.0"),
        (lambda: metrics.accuracy(LOGITS, TARGETS.float()), StepContractError, r"float32.* and class indices"),
        (lambda: metrics.accuracy(LOGITS, TARGETS, threshold=0.0), StepContractError, r"needs one output per target"),
        (lambda: metrics.accuracy(LOGITS, TARGETS, shift=True), StepContractError, r"shift=True needs logits \[N, T"),
        (lambda: metrics.accuracy(LOGITS, TARGETS, k=4), ConfigError, r"metrics\.accuracy: k=4 must be in \[1, 3\]"),
        (lambda: metrics.f1(LOGITS, TARGETS), ConfigError, r"average=\"binary\" with 3 classes.*average=\"macro\""),
        (lambda: metrics.f1(LOGITS, TARGETS, average="mean"), ConfigError, r"average='mean'"),  # pyright: ignore[reportArgumentType]  # the point of the test
    ],
)
def test_what_does_not_fit_is_refused_with_the_cure(call: Callable[[], Any], error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        call()


EVERY: dict[str, Callable[[Any, Any], Mean]] = {
    "accuracy": metrics.accuracy,
    "top2": partial(metrics.accuracy, k=2),
    "precision": partial(metrics.precision, average="macro"),
    "recall": partial(metrics.recall, average="micro"),
    "f1": partial(metrics.f1, average="macro"),
}


def every(logits: Tensor, targets: Tensor) -> Metrics:
    return {name: metric(logits, targets) for name, metric in EVERY.items()}


def test_every_metric_is_float32_without_a_graph_also_of_low_precision():
    found = every(LOGITS.bfloat16().requires_grad_(), TARGETS)
    assert {leaf.dtype for leaf in tree.leaves(found)} == {torch.float32}
    assert not any(leaf.requires_grad for leaf in tree.leaves(found))


@pytest.mark.compile
def test_metrics_are_one_graph_and_the_same_numbers():
    with count_graphs() as graphs:
        compiled = torch.compile(every, backend="aot_eager", fullgraph=True)
        for _ in range(3):
            assert_trees_close(compiled(LOGITS, TARGETS), every(LOGITS, TARGETS), exact=True)
    assert graphs() == 1


@pytest.mark.compile
def test_metrics_can_be_traced_so_nothing_looks_at_the_data():
    graph = make_fx(lambda x, y: [tuple(one) for one in every(x, y).values()], tracing_mode="fake")(LOGITS, TARGETS)
    assert_trees_close(graph(LOGITS, TARGETS), [tuple(one) for one in every(LOGITS, TARGETS).values()], exact=True)


def test_metrics_work_inside_the_gradient():
    def loss(logits: Tensor) -> tuple[Tensor, Metrics]:
        return logits.square().sum(), every(logits, TARGETS)

    _, (_, found) = torch.func.grad_and_value(loss, has_aux=True)(LOGITS)
    assert_trees_close(found, every(LOGITS, TARGETS), exact=True)


# ---- torchmetrics


@pytest.fixture
def torchmetrics() -> Any:
    return pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(n, 3, generator=generator), torch.randint(0, 3, (n,), generator=generator)) for n in (5, 1, 8)]


def merged(metric: metrics.Metric, found: list[tuple[Tensor, Tensor]]) -> Metrics:
    return reduce(metrics.merge, ({"it": metric(*batch)} for batch in found), metrics.empty())


@pytest.mark.peer
def test_a_torchmetrics_object_is_not_touched_and_remembers_nothing(torchmetrics: Any):
    theirs = torchmetrics.classification.MulticlassF1Score(3)
    ours = metrics.from_torchmetrics(theirs)
    first, *rest = batches()
    once = merged(ours, [first])
    for batch in rest:
        ours(*batch)
    assert_trees_close(merged(ours, [first]), once, exact=True)
    assert float(once["it"]) == float(once["it"])
    assert theirs._update_count == 0
    assert theirs.tp.sum() == 0


@pytest.mark.peer
def test_a_torchmetrics_object_works_in_the_gradient_and_in_a_trace(torchmetrics: Any):
    ours = metrics.from_torchmetrics(torchmetrics.classification.MulticlassF1Score(3, validate_args=False))
    logits, targets = batches()[0]

    def loss(logits: Tensor) -> tuple[Tensor, Mean]:
        return logits.square().sum(), ours(logits, targets)

    _, (_, found) = torch.func.grad_and_value(loss, has_aux=True)(logits)
    assert_trees_close(found, ours(logits, targets), exact=True)
    graph = make_fx(lambda x, y: tuple(ours(x, y)), tracing_mode="fake")(logits, targets)
    assert_trees_close(graph(logits, targets), tuple(ours(logits, targets)), exact=True)


@pytest.mark.peer
def test_stored_sums_of_torchmetrics_take_up_their_kind_again(torchmetrics: Any):
    ours = metrics.from_torchmetrics(torchmetrics.classification.MulticlassF1Score(3))
    first, *rest = batches()
    stored = {name: Mean(*(leaf.clone() for leaf in found)) for name, found in merged(ours, [first]).items()}
    whole = merged(ours, batches())
    for found in (metrics.merge(stored, merged(ours, rest)), metrics.merge(merged(ours, rest), stored)):
        assert metrics.compute(found) == metrics.compute(whole)


@pytest.mark.cuda
def test_on_cuda_nothing_waits_but_compute():
    logits, targets = LOGITS.cuda(), TARGETS.cuda()
    every(logits, targets)
    with no_waiting():
        found = metrics.merge(every(logits, targets), every(logits, targets))
    assert metrics.compute(found) == metrics.compute(every(LOGITS, TARGETS))
