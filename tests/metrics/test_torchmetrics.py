"""Objects of torchmetrics as they are: each comes to what torchmetrics itself comes to over uneven batches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import purestep as ps
from purestep import metrics
from purestep.errors import ConfigError, StepContractError

tm = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed")
retrieval = pytest.importorskip("torchmetrics.retrieval")
cl = tm.classification
pytestmark = [
    pytest.mark.peer,
    pytest.mark.filterwarnings("ignore:Metric .* will save all targets:UserWarning"),  # torchmetrics', of its lists
]
fit = partial(ps.fit, progress=False)

SIZES = (24, 24, 1, 7)
CLASSES = torch.randint(3, (56,), generator=torch.Generator().manual_seed(1))
INPUTS = torch.randn(56, 5, generator=torch.Generator().manual_seed(0))


def parts(targets: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(INPUTS.split(SIZES), targets.split(SIZES), strict=True))


def net(outputs: int) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(5, outputs)


def itself(metric: Any, module: nn.Module, targets: Tensor) -> Any:
    """What the object comes to in a loop of torchmetrics."""
    with torch.no_grad():
        for x, y in parts(targets):
            metric.update(module(x), y)
    return metric.compute()


def by_class(kind: Any) -> Any:
    return tm.ClasswiseWrapper(kind(3, average=None))


KINDS: dict[str, tuple[nn.Module, int, Tensor, Callable[[], Any], bool]] = {
    # name: criterion, outputs, targets, metric, measured in training too
    "f1": (nn.CrossEntropyLoss(), 3, CLASSES, lambda: cl.MulticlassF1Score(3), True),
    "f1 ignored": (nn.CrossEntropyLoss(), 3, CLASSES, lambda: cl.MulticlassF1Score(3, ignore_index=0), True),
    "f1 by class": (nn.CrossEntropyLoss(), 3, CLASSES, lambda: cl.MulticlassF1Score(3, average=None), True),
    "binned auroc": (nn.CrossEntropyLoss(), 3, CLASSES, lambda: cl.MulticlassAUROC(3, thresholds=20), True),
    "auroc": (nn.CrossEntropyLoss(), 3, CLASSES, lambda: cl.MulticlassAUROC(3), False),
    "auroc by class": (nn.CrossEntropyLoss(), 3, CLASSES, lambda: cl.MulticlassAUROC(3, average=None), False),
    "precision": (nn.CrossEntropyLoss(), 3, CLASSES, lambda: cl.MulticlassAveragePrecision(3), False),
    "calibration": (nn.CrossEntropyLoss(), 3, CLASSES, lambda: cl.MulticlassCalibrationError(3), False),
    "wrapped": (nn.CrossEntropyLoss(), 3, CLASSES, lambda: by_class(cl.MulticlassRecall), False),
    "accuracy": (nn.CrossEntropyLoss(), 3, CLASSES, lambda: cl.MulticlassAccuracy(3, average="micro"), True),
    "matthews": (nn.CrossEntropyLoss(), 3, CLASSES, lambda: cl.MulticlassMatthewsCorrCoef(3), True),
    "r2": (nn.MSELoss(), 1, INPUTS[:, :1], tm.R2Score, True),
    "pearson": (nn.MSELoss(), 1, INPUTS[:, :1], tm.PearsonCorrCoef, False),
    "spearman": (nn.MSELoss(), 1, INPUTS[:, :1], tm.SpearmanCorrCoef, False),
    "binary": (nn.BCEWithLogitsLoss(), 1, (INPUTS[:, :1] > 0).float(), cl.BinaryAUROC, False),
}  # fmt: skip


def in_history(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, dict):
        return {f"{name}_{key}": float(one) for key, one in value.items()}
    if value.numel() == 1:
        return {name: float(value)}
    return {name: float(value.mean()), **{f"{name}[{i}]": float(one) for i, one in enumerate(value)}}


@pytest.mark.parametrize("kind", KINDS)
def test_it_comes_to_what_it_comes_to_itself(kind: str):
    criterion, outputs, targets, make, trains = KINDS[kind]
    module, bare = net(outputs), make()
    program = ps.program(module, ps.supervised(criterion, metrics={"it": bare}), ps.optim.sgd(1e-9))
    expected = in_history("it", itself(make(), module, targets))
    found = ps.evaluate(program.init(), parts(targets), program.eval_step)  # type: ignore[arg-type]
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-6)
    assert set(found) == {"loss", *expected}
    result = fit(program.init(), (parts(targets), parts(targets)), program, epochs=1)
    assert {name: result.history[f"val_{name}"] for name in expected} == {
        name: [pytest.approx(value, rel=1e-5)] for name, value in expected.items()
    }
    assert all((f"train_{name}" in result.history) == trains for name in expected)
    assert bare._update_count == make()._update_count  # the user's object is not touched


@pytest.mark.compile
@pytest.mark.parametrize("kind", ["f1 by class", "auroc", "pearson"])
def test_compiled_it_comes_to_the_same(kind: str):
    criterion, outputs, targets, make, _ = KINDS[kind]
    program = ps.program(net(outputs), ps.supervised(criterion, metrics={"it": make()}), ps.optim.sgd(0.1))
    data = (parts(targets), parts(targets))
    eager = fit(program.init(), data, program, epochs=1)
    compiled = fit(program.init(), data, program, epochs=1, compile={"backend": "aot_eager"})
    assert compiled.history.keys() == eager.history.keys()
    for name, column in eager.history.items():
        assert compiled.history[name] == pytest.approx(column, rel=1e-4, abs=1e-6), name


@pytest.mark.compile
def test_a_sum_that_branches_on_values_is_measured_in_evaluation_where_it_is_compiled():
    targets = (INPUTS[:, :1] > 0).float()
    objective = ps.supervised(nn.BCEWithLogitsLoss(), metrics={"it": cl.BinaryAccuracy()})
    module = net(1)
    program = ps.program(module, objective, ps.optim.sgd(1e-9))
    data = (parts(targets), parts(targets))
    result = fit(program.init(), data, program, epochs=1, compile={"backend": "aot_eager"})
    assert result.history["val_it"] == [pytest.approx(float(itself(cl.BinaryAccuracy(), module, targets)))]
    assert "train_it" not in result.history


def collection() -> Any:
    return tm.MetricCollection({"recall": cl.MulticlassRecall(3), "auroc": cl.MulticlassAUROC(3)}, prefix="my_")


@pytest.mark.parametrize("inside", [False, True])
def test_a_collection_keeps_its_names(inside: bool):
    module = net(3)
    given: Any = {"all": collection()} if inside else collection()
    program = ps.program(module, ps.supervised(nn.CrossEntropyLoss(), metrics=given), ps.optim.sgd(0.1))
    found = ps.evaluate(program.init(), parts(CLASSES), program.eval_step)  # type: ignore[arg-type]
    expected = {f"{'all_' if inside else ''}{k}": float(v) for k, v in itself(collection(), module, CLASSES).items()}
    assert found == pytest.approx({"loss": found["loss"], **expected})
    result = fit(program.init(), (parts(CLASSES), parts(CLASSES)), program, epochs=1)
    assert [name for name in result.history if name.startswith("train_") and "my_" in name] == [
        f"train_{'all_' if inside else ''}my_recall"
    ]


def test_it_is_monitored_and_stops_early():
    objective = ps.supervised(nn.CrossEntropyLoss(), metrics={"auroc": cl.MulticlassAUROC(3)})
    program = ps.program(net(3), objective, ps.optim.sgd(0.1))
    data = (parts(CLASSES), parts(CLASSES))
    result = fit(program.init(), data, program, epochs=3, monitor="val_auroc", mode="max")
    assert result.best is not None
    assert result.best["val_auroc"] == max(result.history["val_auroc"])
    with pytest.raises(ConfigError, match="'train_auroc' is not among the metrics") as caught:
        fit(program.init(), data, program, epochs=1, monitor="train_auroc", mode="max")
    assert caught.value.hint == "monitor='val_auroc'"


def test_retrieval_gets_its_queries_from_prepare():
    query = torch.randint(6, (56,), generator=torch.Generator().manual_seed(2))
    relevant = torch.rand(56, generator=torch.Generator().manual_seed(3)) > 0.5
    batches = [
        {"x": x, "y": {"relevant": r, "query": q}}
        for x, r, q in zip(INPUTS.split(SIZES), relevant.split(SIZES), query.split(SIZES), strict=True)
    ]

    def prepare(outputs: Any, targets: Any) -> Any:
        return {"preds": outputs, "target": targets["relevant"], "indexes": targets["query"]}

    def criterion(outputs: Tensor, targets: Any) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(outputs, targets["relevant"].float())

    module = nn.Sequential(net(1), nn.Flatten(0))
    found: dict[str, Any] = {"mrr": metrics.from_torchmetrics(retrieval.RetrievalMRR(), prepare=prepare)}
    objective = ps.supervised(
        criterion, metrics=found, prepare=lambda b: (b["x"], b["y"]), forward=lambda model, x: model(x)
    )
    program = ps.program(module, objective, ps.optim.sgd(0.1))
    values = ps.evaluate(program.init(), batches, program.eval_step)  # type: ignore[arg-type]
    theirs = retrieval.RetrievalMRR()
    with torch.no_grad():
        for batch in batches:
            theirs.update(module(batch["x"]), batch["y"]["relevant"], batch["y"]["query"])
    assert values["mrr"] == pytest.approx(float(theirs.compute()))


def test_a_sum_over_texts_takes_lists_of_texts():
    def decode(outputs: Tensor, targets: Any) -> Any:
        return ["right" if best else "wrong" for best in outputs.argmax(-1).tolist()], targets

    rate = metrics.from_torchmetrics(tm.text.WordErrorRate(), prepare=decode)
    one = rate(torch.eye(2), ["right", "right"])
    assert float(one) == 0.5
    assert float(metrics.merge({"rate": one}, {"rate": rate(torch.eye(2), ["wrong", "right"])})["rate"]) == 0.25


def test_the_outputs_of_a_step_are_a_value_that_merges_in_any_order_of_grouping():
    auroc = metrics.from_torchmetrics(cl.MulticlassAUROC(3))
    module = net(3)
    one, *rest = [{"auroc": auroc(module(x), y)} for x, y in parts(CLASSES)]
    left = reduce(metrics.merge, rest, one)
    right = metrics.merge(one, reduce(metrics.merge, rest, metrics.empty()))
    expected = float(itself(cl.MulticlassAUROC(3), module, CLASSES))
    assert metrics.compute(left) == metrics.compute(right) == {"auroc": pytest.approx(expected)}
    assert metrics.compute(left, prefix="val_").keys() == {"val_auroc"}
    assert float(left["auroc"]) == pytest.approx(expected)
    with pytest.raises(StepContractError, match="one metric function"):
        metrics.merge(one, {"auroc": ps.Mean(torch.ones(()), torch.ones(()))})


def test_a_tensor_of_several_metrics_is_copied_once_and_a_loader_may_use_its_memory_again():
    module = net(3)
    named: dict[str, Any] = {"auroc": cl.MulticlassAUROC(3), "ap": cl.MulticlassAveragePrecision(3)}
    program = ps.program(module, ps.supervised(nn.CrossEntropyLoss(), metrics=named), ps.optim.sgd(0.1))
    x, y = torch.empty(8, 5), torch.empty(8, dtype=torch.int64)

    class Reusing:
        def __iter__(self) -> Any:
            for at in range(0, 56, 8):
                x.copy_(INPUTS[at : at + 8])
                y.copy_(CLASSES[at : at + 8])
                yield x, y

    found = ps.evaluate(program.init(), Reusing(), program.eval_step)  # type: ignore[arg-type]
    with torch.no_grad():
        for name, theirs in (("auroc", cl.MulticlassAUROC(3)), ("ap", cl.MulticlassAveragePrecision(3))):
            assert found[name] == pytest.approx(float(theirs(module(INPUTS), CLASSES)))
    seen: list[Any] = []
    ps.evaluate(program.init(), parts(CLASSES), program.eval_step, watch=lambda b, m, i: seen.append(m))  # type: ignore[arg-type]
    assert isinstance(seen[0]["auroc"], metrics.Gathered)


def test_a_train_step_returns_no_outputs():
    objective = ps.supervised(nn.CrossEntropyLoss(), metrics={"auroc": cl.MulticlassAUROC(3)})
    program = ps.program(net(3), objective, ps.optim.sgd(0.1), microbatches=2)
    _, found = program.train_step(program.init(), parts(CLASSES)[0])  # type: ignore[misc]
    assert "auroc" not in found


def test_a_bootstrap_leaves_the_callers_random_numbers_alone():
    objective = ps.supervised(
        nn.CrossEntropyLoss(), metrics={"it": tm.BootStrapper(cl.MulticlassAccuracy(3), num_bootstraps=3)}
    )
    program = ps.program(net(3), objective, ps.optim.sgd(0.1))
    state, before = program.init(), torch.get_rng_state()  # type: ignore[misc]
    found = [ps.evaluate(state, parts(CLASSES), program.eval_step) for _ in range(2)]  # type: ignore[arg-type]
    assert torch.equal(before, torch.get_rng_state())
    assert found[0] == found[1]
    assert {"it_mean", "it_std"} < set(found[0])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (cl.MulticlassF1Score(3), r'is a MulticlassF1Score, not a dict \(cure: metrics=\{"accuracy": ps\.metrics\.acc'),
        (metrics.accuracy, r'metrics is a function, not a dict \(cure: metrics=\{"accuracy": ps\.metrics\.accuracy\}'),
        ({"f1": cl.MulticlassF1Score}, r"metrics/f1: the metric is a MulticlassF1Score.*cure: MulticlassF1Score\(\)"),
        ({"f1": 3}, "metrics/f1: the metric is a int"),
        ([cl.MulticlassF1Score(3)], "metrics is a list"),
        ({"a": tm.MetricCollection({"b": tm.MeanSquaredError()}), "a_b": tm.MeanSquaredError()}, "metrics/a_b: two"),
    ],
)
def test_what_is_no_metric_is_named(given: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        ps.supervised(nn.CrossEntropyLoss(), metrics=given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (collection(), r"cure: pass the collection itself: ps.supervised\(..., metrics=collection\)"),
        (tm.MeanSquaredError, r"MeanSquaredError is not a torchmetrics\.Metric \(cure: pass an object"),
        (lambda outputs, targets: 0, r"is not a torchmetrics\.Metric"),
    ],
)
def test_only_an_object_is_converted(given: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        metrics.from_torchmetrics(given)


@pytest.mark.parametrize("make", [lambda: cl.MulticlassROC(3), lambda: cl.MulticlassConfusionMatrix(3)])
def test_a_curve_or_a_matrix_is_refused_at_the_end(make: Callable[[], Any]):
    objective = ps.supervised(nn.CrossEntropyLoss(), metrics={"curve": make()})
    program = ps.program(net(3), objective, ps.optim.sgd(0.1))
    with pytest.raises(StepContractError, match=r"metrics/curve: the metric computes a .*a history holds numbers"):
        ps.evaluate(program.init(), parts(CLASSES), program.eval_step)  # type: ignore[arg-type]


def test_stored_sums_of_a_class_take_up_their_kind_again():
    ours = metrics.from_torchmetrics(cl.MulticlassF1Score(3, average=None))
    module = net(3)
    one, *rest = [{"f1": ours(module(x), y)} for x, y in parts(CLASSES)]
    stored = {"f1": ps.Mean(*(leaf.clone() for leaf in one["f1"]))}
    whole = metrics.compute(reduce(metrics.merge, rest, one))
    assert metrics.compute(reduce(metrics.merge, rest, stored)) == whole
    assert set(whole) == {"f1", "f1[0]", "f1[1]", "f1[2]"}
