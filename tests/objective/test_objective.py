from __future__ import annotations

from collections import UserDict
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from helpers import assert_trees_close, tiny_mlp, vector_batch
from torch import Tensor, nn
from torch.nn import functional

import purestep as ps
from purestep import objective, optim
from purestep.errors import ConfigError, DataError, StepContractError
from purestep.types import Mean


def identity(x: Any) -> Any:
    return x


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, shape, generator=torch.Generator().manual_seed(seed))


CLASS_WEIGHT = torch.tensor([1.0, 2.0, 4.0])
TARGETS = torch.tensor([0, 1, 2, 2, -100, 1])
IGNORED = torch.tensor([0, 1, 2, 2, 7, 7])
PROBABILITIES = draw(6, 3, seed=1).softmax(dim=1)
CE = nn.CrossEntropyLoss

# criterion, outputs, targets, weight by hand
WEIGHTS = {
    "ce": (CE(), draw(6, 3), classes(6), 6),
    "ce ignored": (CE(), draw(6, 3), TARGETS, 5),
    "ce ignore_index": (CE(ignore_index=7), draw(6, 3), IGNORED, 4),
    "ce class weights": (CE(weight=CLASS_WEIGHT), draw(6, 3), TARGETS, 1 + 2 + 4 + 4 + 2),
    "ce class weights smoothed": (CE(weight=CLASS_WEIGHT, label_smoothing=0.2), draw(6, 3), TARGETS, 13),
    "ce class weights ignore_index": (CE(weight=CLASS_WEIGHT, ignore_index=7), draw(6, 3), IGNORED, 1 + 2 + 4 + 4),
    "ce probabilities": (CE(), draw(6, 3), PROBABILITIES, 6),
    "ce probabilities weighted": (CE(weight=CLASS_WEIGHT), draw(6, 3), PROBABILITIES, 6),
    "ce probabilities of one": (CE(), draw(3), PROBABILITIES[0], 1),
    "ce images": (CE(), draw(2, 3, 4, 4), classes(2, 4, 4), 32),
    "ce images probabilities": (CE(), draw(2, 3, 4, 4), draw(2, 3, 4, 4).softmax(1), 32),
    "ce nothing": (CE(), draw(2, 3), torch.tensor([-100, -100]), 0),
    "ce bytes": (CE(weight=CLASS_WEIGHT), draw(6, 3), classes(6).to(torch.uint8), None),
    "nll": (nn.NLLLoss(), draw(6, 3).log_softmax(1), TARGETS, 5),
    "nll class weights": (nn.NLLLoss(weight=CLASS_WEIGHT), draw(6, 3).log_softmax(1), TARGETS, 13),
    "mse": (nn.MSELoss(), draw(6, 3), draw(6, 3, seed=2), 18),
    "l1": (nn.L1Loss(), draw(6, 3), draw(6, 3, seed=2), 18),
    "smooth l1": (nn.SmoothL1Loss(), draw(6, 3), draw(6, 3, seed=2), 18),
    "huber": (nn.HuberLoss(), draw(6, 3), draw(6, 3, seed=2), 18),
    "bce": (nn.BCELoss(), draw(6, 3).sigmoid(), draw(6, 3, seed=2).sigmoid(), 18),
    "bce logits": (nn.BCEWithLogitsLoss(pos_weight=CLASS_WEIGHT), draw(6, 3), draw(6, 3, seed=2).sigmoid(), 18),
    "f.cross_entropy": (functional.cross_entropy, draw(6, 3), TARGETS, 5),
    "f.nll_loss": (functional.nll_loss, draw(6, 3).log_softmax(1), TARGETS, 5),
    "f.mse_loss": (functional.mse_loss, draw(6, 3), draw(6, 3, seed=2), 18),
    "f.huber_loss": (functional.huber_loss, draw(6, 3), draw(6, 3, seed=2), 18),
    "f.cross_entropy ignore_index": (partial(functional.cross_entropy, ignore_index=7), draw(6, 3), IGNORED, 4),
    "f.cross_entropy class weights": (partial(functional.cross_entropy, weight=CLASS_WEIGHT), draw(6, 3), TARGETS, 13),
    "f.smooth_l1_loss beta": (partial(functional.smooth_l1_loss, beta=0.1), draw(6, 3), draw(6, 3, seed=2), 18),
    "f.mse_loss sum": (partial(functional.mse_loss, reduction="sum"), draw(6, 3), draw(6, 3, seed=2), 1),
    "a criterion in a partial": (partial(CE(weight=CLASS_WEIGHT)), draw(6, 3), TARGETS, 13),
    "any callable": (lambda o, t: (o - t).square().sum(1).mean(), draw(6, 3), draw(6, 3, seed=2), 6),
    "kl": (nn.KLDivLoss(reduction="batchmean"), draw(6, 3).log_softmax(1), PROBABILITIES, 6),
    "kl elements": (nn.KLDivLoss(), draw(6, 3).log_softmax(1), PROBABILITIES, 18),
    "poisson": (nn.PoissonNLLLoss(), draw(6, 3), draw(6, 3, seed=2).abs(), 18),
    "soft margin": (nn.SoftMarginLoss(), draw(6, 3), draw(6, 3, seed=2).sign(), 18),
    "hinge": (nn.HingeEmbeddingLoss(), draw(6, 3), draw(6, 3, seed=2).sign(), 18),
    "multi margin": (nn.MultiMarginLoss(), draw(6, 3), classes(6), 6),
    "multilabel soft margin": (nn.MultiLabelSoftMarginLoss(), draw(6, 3), classes(6, 3).clamp(max=1), 6),
    "mse sum": (nn.MSELoss(reduction="sum"), draw(6, 3), draw(6, 3, seed=2), 1),
    "ce sum": (CE(reduction="sum"), draw(6, 3), TARGETS, 1),
}
if hasattr(nn, "LinearCrossEntropyLoss"):  # torch 2.13
    WEIGHTS["linear ce"] = (nn.LinearCrossEntropyLoss(8, 3), draw(6, 8), TARGETS, 5)
    WEIGHTS["linear ce class weights"] = nn.LinearCrossEntropyLoss(8, 3, weight=CLASS_WEIGHT), draw(6, 8), TARGETS, 13


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("case", WEIGHTS)
def test_the_weight_is_what_the_mean_is_a_mean_over(case: str):
    criterion, outputs, targets, expected = WEIGHTS[case]
    loss = ps.supervised(criterion)(identity, (outputs, targets))
    assert torch.equal(loss.mean, criterion(outputs, targets)) or loss.mean.isnan()
    assert (loss.weight.dtype, loss.weight.shape) == (torch.float32, ())
    assert expected is None or loss.weight.item() == expected


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
@pytest.mark.parametrize("case", [name for name in WEIGHTS if name not in ("ce nothing", "ce probabilities of one")])
def test_parts_weighted_so_add_up_to_the_whole(case: str):
    """What the weight is for: sum(w_i mean_i) / sum(w_i) is the loss of the whole batch. Sums add up as they are."""
    criterion, outputs, targets, _ = WEIGHTS[case]
    run = ps.supervised(criterion)
    cut = 1 if len(outputs) == 2 else 4
    parts = [run(identity, (outputs[p], targets[p])) for p in (slice(0, cut), slice(cut, None))]
    total = sum(part.mean.nan_to_num() * part.weight for part in parts)
    if "sum" not in case:
        total = total / sum(part.weight for part in parts)
    assert torch.allclose(total, criterion(outputs, targets), rtol=1e-5)


def test_a_wrong_weight_would_not_add_up():
    """The planted fault: counting rows where elements are ignored."""
    _, outputs, targets, _ = WEIGHTS["ce ignored"]
    means = [functional.cross_entropy(outputs[p], targets[p]) for p in (slice(0, 4), slice(4, None))]
    assert not torch.allclose((4 * means[0] + 2 * means[1]) / 6, functional.cross_entropy(outputs, targets), rtol=1e-3)


def test_class_weights_are_counted_in_float32_at_least():
    criterion = nn.CrossEntropyLoss(weight=torch.ones(3, dtype=torch.bfloat16))
    loss = ps.supervised(criterion)(identity, (draw(300, 3).bfloat16(), classes(300)))
    assert loss.weight.item() == 300


def test_no_reduction_is_no_objective():
    with pytest.raises(
        ConfigError, match=r"""criterion: reduction="none" gives no scalar \(cure: reduction="mean"\)"""
    ):
        ps.supervised(nn.MSELoss(reduction="none"))
    with pytest.raises(ConfigError, match="gives no scalar"):
        ps.supervised(partial(functional.mse_loss, reduction="none"))


class Tagger(nn.Embedding):
    """Returns its loss, as models of transformers do."""

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = super().forward(ids)
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


class Rows(nn.Module):
    """A criterion that takes row losses inside, and may or may not reduce them."""

    def __init__(self, reduction: str, *, reduces: bool) -> None:
        super().__init__()
        self.reduction, self.reduces = reduction, reduces

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        rows = functional.cross_entropy(outputs, targets, reduction="none")
        return rows.mean() if self.reduces else rows


def test_a_setting_of_somebody_elses_criterion_is_not_taken_for_what_it_returns():
    batch = vector_batch()

    def step(criterion: nn.Module) -> Any:
        program = ps.program(tiny_mlp(), ps.supervised(criterion), optim.sgd(0.1))
        return program.train_step(program.init(device="cpu"), batch)

    new, metrics = step(Rows("none", reduces=True))
    assert_trees_close(new.params, step(nn.CrossEntropyLoss())[0].params, rtol=1e-6, atol=1e-7)
    assert float(metrics["loss"].weight) == 16
    for reduction in ("none", "mean"):
        with pytest.raises(StepContractError, match=r'the loss has shape \[16\] .*cure: set reduction="mean"'):
            step(Rows(reduction, reduces=False))


@pytest.mark.parametrize(
    ("metric", "found"),
    [
        (lambda o, y: ((o.argmax(1) == y).float(), 16), r"total \[16\] and a weight \[\]"),
        (lambda o, y: ps.Mean(o.sum(), torch.ones(16)), r"total \[\] and a weight \[16\]"),
        (lambda o, y: (torch.ones(2, 3), torch.ones(2, 3)), r"total \[2, 3\] and a weight"),
    ],
    ids=["rows over a number", "a number over rows", "matrices"],
)
def test_a_metric_of_two_shapes_is_no_mean(metric: Any, found: str):
    """Broadcast it would be a mean that is too small by the number of rows."""
    objective = ps.supervised(nn.CrossEntropyLoss(), metrics={"hits": metric})
    program = ps.program(tiny_mlp(), objective, optim.sgd(0.1))
    state = program.init(device="cpu")
    for call in (program.train_step, program.eval_step):
        with pytest.raises(StepContractError, match=rf"metrics/hits: .*{found}.*cure: pass total\.sum\(\)"):
            call(state, vector_batch())


@pytest.mark.parametrize("value", [1.0, None, (torch.ones(()), 1)])
def test_a_criterion_returns_a_tensor(value: Any):
    with pytest.raises(StepContractError, match=rf"criterion: the criterion returned a {type(value).__name__}"):
        ps.supervised(lambda o, t: value)(identity, vector_batch())


class Named(NamedTuple):
    inputs: Tensor
    targets: Tensor


class Three(NamedTuple):
    left: Tensor
    right: Tensor
    labels: Tensor


class Sum(nn.Module):
    """Adds up whatever it is called with, and remembers how."""

    seen: tuple[int, tuple[str, ...]] = (0, ())

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        self.seen = len(args), tuple(sorted(kwargs))
        return sum(args) + sum(kwargs.values())


X, Y = draw(4, 2), draw(4, 2, seed=2)


class TestBatches:
    @pytest.mark.row("1.17")
    @pytest.mark.parametrize(
        ("batch", "seen", "targets"),
        [
            ((X, Y), (1, ()), Y),
            ([X, Y], (1, ()), Y),
            (Named(X, Y), (1, ()), Y),
            (((X, X), Y), (2, ()), Y),
            ({"a": X, "b": X, "labels": Y}, (0, ("a", "b")), Y),
            ({"a": X, "y": Y}, (0, ("a",)), Y),
            ({"a": X, "target": Y, "y": X}, (0, ("a", "y")), Y),
            (UserDict(a=X, label=Y), (0, ("a",)), Y),
            (({"a": X, "b": X}, Y), (0, ("a", "b")), Y),
            ((Named(X, X), Y), (2, ()), Y),
        ],
    )
    def test_each_kind_is_split_and_handed_to_the_model(self, batch: Any, seen: Any, targets: Tensor):
        net = Sum()
        loss = ps.supervised(nn.MSELoss())(net, batch)
        assert net.seen == seen
        assert torch.equal(loss.mean, functional.mse_loss(X * sum([seen[0], len(seen[1])]), targets))

    def test_a_batch_is_left_as_it_is(self):
        batch = {"a": X, "labels": Y}
        ps.supervised(nn.MSELoss())(Sum(), batch)
        assert set(batch) == {"a", "labels"}

    @pytest.mark.row("1.16", "1.17", "1.18")
    def test_prepare_and_forward_are_the_users(self):
        run = ps.supervised(
            nn.MSELoss(),
            prepare=lambda batch: (batch.left, batch.labels),
            forward=lambda model, inputs: model(inputs, inputs) - inputs,
        )
        net = Sum()
        loss = run(net, Three(X, X, Y))
        assert net.seen == (2, ())
        assert torch.equal(loss.mean, functional.mse_loss(2 * X - X, Y))

    @pytest.mark.parametrize(
        ("batch", "found"),
        [
            (X, "a Tensor"),
            (None, "a NoneType"),
            ("text", "a str"),
            ((X,), "a tuple of 1"),
            ([X, X, Y], "a list of 3"),
            (Three(X, X, Y), "a Three of 3"),
            ({"a": X, "b": Y}, r"a mapping with the keys \['a', 'b'\]"),
            ({}, r"a mapping with the keys \[\]"),
        ],
    )
    def test_others_are_named_with_the_cure(self, batch: Any, found: str):
        message = rf"batch: the batch is {found}, not a pair of inputs and targets \(cure: ps.supervised\(..., prepare="
        with pytest.raises(DataError, match=message):
            ps.supervised(nn.MSELoss())(Sum(), batch)

    @pytest.mark.parametrize("targets", ["text", None, 3, [], {}])
    def test_examples_that_cannot_be_counted(self, targets: Any):
        with pytest.raises(DataError, match="targets: purestep cannot count the examples of a"):
            ps.supervised(lambda o, t: o.sum())(identity, (X, targets))

    def test_examples_of_nested_targets_are_counted_on_the_first(self):
        run = ps.supervised(lambda o, t: o.sum())
        assert run(identity, (X, {"boxes": draw(5, 4), "names": draw(5)})).weight == 5
        assert run(identity, (X, (draw(6, 1), draw(6)))).weight == 6  # columns: they differ in rank
        assert run(identity, (X, (draw(4, 1), draw(4, 1)))).weight == 4  # columns: they are as long as the inputs
        assert run(identity, (X, [draw(5, 1), draw(5, 1), draw(5, 1)])).weight == 3  # an entry per example
        assert run(identity, (X, torch.tensor(1.0))).weight == 1

    @pytest.mark.parametrize(
        ("inputs", "targets", "expected"),
        [
            ((X, classes(4)), (Y, Y), 4),
            ((X, None), (Y, Y), 4),
            ({"img": [draw(3, 8, 8)] * 4, "x": X}, (Y[:, 0],), 4),
            ({"t": torch.tensor(0.5), "side": {"x": X}}, (Y, Y), 4),
            ([draw(3, 8, 8)] * 2, [draw(3, 4)] * 2, 2),  # images, and the boxes of each
            ([draw(3, 8, 8)], [draw(3, 4)], 1),
            ([{"image": draw(3, 8, 8)}] * 2, [draw(3, 4)] * 2, 2),
            (["a", "b"], [draw(3, 4)] * 2, 2),
        ],
    )
    def test_columns_of_targets_are_as_long_as_the_first_tensor_in_the_inputs(
        self, inputs: Any, targets: Any, expected: int
    ):
        run = ps.supervised(lambda o, t: X.sum(), forward=lambda model, x: x, metrics={"m": lambda o, t: X.sum()})
        loss = run(identity, (inputs, targets))
        assert (loss.weight, loss.metrics["m"].weight) == (expected, expected)

    @pytest.mark.compile
    def test_columns_are_counted_in_a_graph(self):
        def weight(inputs: Any, targets: Any) -> Tensor:
            run = ps.supervised(lambda o, t: X.sum(), forward=lambda model, x: x)
            return run(identity, (inputs, targets)).weight

        compiled = torch.compile(weight, backend="eager", fullgraph=True)
        assert compiled(({"names": None, "x": X}, classes(4)), (Y, Y)) == 4


class TestMetrics:
    @pytest.mark.parametrize(
        ("value", "total", "weight"),
        [
            (torch.tensor(0.25), 0.25 * 6, 6),
            (torch.tensor(2), 12, 6),
            ((torch.tensor(3.0), torch.tensor(4.0)), 3, 4),
            ((torch.tensor(3), 4), 3, 4),
            ((3, 4), 3, 4),
            (Mean(torch.tensor(1.0), torch.tensor(2.0)), 1, 2),
        ],
    )
    def test_each_form_becomes_a_mean(self, value: Any, total: float, weight: float):
        run = ps.supervised(nn.CrossEntropyLoss(), metrics={"m": lambda o, t: value})
        found = run(identity, (draw(6, 3), classes(6))).metrics["m"]
        assert (float(found.total), float(found.weight)) == (total, weight)

    @pytest.mark.parametrize(
        ("value", "found"),
        [
            (1.0, "a float"),
            (None, "a NoneType"),
            (torch.ones(2), r"a tensor of shape \[2\]"),
            ("0.5", "a str"),
            ((1.0, 2.0, 3.0), "a tuple of a float, a float, a float"),
            ((None, 3), "a tuple of a NoneType, a int"),
            ((torch.ones(2), "3"), r"a tuple of a tensor of shape \[2\], a str"),
        ],
    )
    def test_others_are_refused_by_the_name_of_the_metric(self, value: Any, found: str):
        metrics = {"right": lambda o, t: (1, 2), "wrong": lambda o, t: value}
        message = rf"metrics/wrong: the metric returned {found} \(cure: return a Mean, a \(total, weight"
        with pytest.raises(StepContractError, match=message):
            ps.supervised(nn.CrossEntropyLoss(), metrics=metrics)(identity, (draw(6, 3), classes(6)))
        with pytest.raises(StepContractError, match=message):
            ps.hf_loss(weight=lambda batch: 6, metrics=metrics)(Tagger(3, 3), {"ids": classes(6), "labels": classes(6)})

    def test_they_carry_no_graph(self):
        x = draw(6, 3).requires_grad_()
        metrics = {
            "bare": lambda o, t: o.mean(),
            "pair": lambda o, t: (o.sum(), 1),
            "mean": lambda o, t: Mean(o.sum(), o.sum()),
        }
        loss = ps.supervised(nn.CrossEntropyLoss(), metrics=metrics)(identity, (x, classes(6)))
        assert loss.mean.requires_grad
        assert not any(part.requires_grad for mean in loss.metrics.values() for part in mean)

    def test_in_a_step_they_stand_beside_the_loss(self):
        run = ps.supervised(nn.CrossEntropyLoss(), metrics={"accuracy": ps.metrics.accuracy})
        program = ps.program(tiny_mlp(), run, optim.sgd(0.1))
        state = program.init(device="cpu")
        x, y = vector_batch()
        _, metrics = program.train_step(state, (x, y))
        assert set(metrics) == {"loss", "lr", "grad_norm", "applied", "accuracy"}
        assert float(metrics["accuracy"]) == pytest.approx((tiny_mlp()(x).argmax(1) == y).float().mean().item())
        assert set(program.eval_step(state, (x, y))) == {"loss", "accuracy"}


class FakeLanguageModel(nn.Module):
    """Like those of transformers: takes labels, shifts them, returns an object with the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.head = nn.Linear(8, 11)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, attention_mask: Tensor | None = None) -> Any:
        logits = self.head(self.embedding(input_ids))
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss, logits=logits)


class FakeForCausalLM(FakeLanguageModel):
    pass


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(11, (4, 6), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[0, 3:] = -100
    labels[1, 0] = -100  # never counted in a causal model
    return {"input_ids": ids, "labels": labels}


class TestHuggingFace:
    def test_causal_models_are_told_by_their_class_and_shift(self):
        # 4 rows of 5 shifted labels, of which 3 are -100.
        assert ps.hf_loss()(FakeForCausalLM(), tokens()).weight.item() == 17
        assert ps.hf_loss()(FakeLanguageModel(), tokens()).weight.item() == 24 - 4
        assert ps.hf_loss(causal=True)(FakeLanguageModel(), tokens()).weight.item() == 17
        assert ps.hf_loss(causal=False)(FakeForCausalLM(), tokens()).weight.item() == 20

    def test_the_ignored_label_may_be_another(self):
        batch = tokens()
        batch["labels"][2, 5] = 0
        zeros = (batch["labels"][:, 1:] == 0).sum().item()
        assert ps.hf_loss(causal=True, ignore_index=0)(FakeLanguageModel(), batch).weight.item() == 20 - zeros

    def test_labels_that_are_numbers_count_each(self):
        class Regression(nn.Module):
            def forward(self, x: Tensor, labels: Tensor) -> Any:
                return SimpleNamespace(loss=functional.mse_loss(x, labels))

        loss = ps.hf_loss()(Regression(), {"x": X, "labels": Y})
        assert loss.weight.item() == 8

    @pytest.mark.row("1.25")
    def test_it_is_trained_and_accumulates_by_tokens(self):
        batch = tokens()
        halves = [{name: value[rows] for name, value in batch.items()} for rows in (slice(0, 1), slice(1, 4))]
        net = FakeForCausalLM()
        whole, parts = (
            ps.program(net, ps.hf_loss(), optim.sgd(0.5), precision="64-true", accumulate=k) for k in (1, 2)
        )
        ps.testing.assert_accumulates(parts, whole, batch, halves, rtol=1e-12)

    def test_metrics_see_outputs_and_labels(self):
        run = ps.hf_loss(metrics={"size": lambda outputs, labels: (outputs.logits.numel(), labels.shape[0])})
        found = run(FakeForCausalLM(), tokens()).metrics["size"]
        assert (float(found.total), float(found.weight)) == (4 * 6 * 11, 4)

    @pytest.mark.parametrize("batch", [(X, Y), X, None])
    def test_a_batch_is_a_mapping(self, batch: Any):
        with pytest.raises(
            DataError, match=r"""batch: hf_loss needs a mapping with 'labels', .* \(cure: {"input_ids": ..."""
        ):
            ps.hf_loss()(FakeForCausalLM(), batch)

    def test_a_model_without_a_loss_is_named(self):
        class Headless(nn.Module):
            def forward(self, labels: Tensor) -> Any:
                return SimpleNamespace(logits=labels)

        with pytest.raises(
            StepContractError, match=r"Headless: the model returned no loss .* of 'labels' \(cure: ps.supervised"
        ):
            ps.hf_loss()(Headless(), {"labels": Y})


MASK = torch.tensor([[True, False, True], [False, False, True]])  # True where the error counts
RECON, INPUT = torch.tensor([[1.0, 9.0, 3.0], [9.0, 9.0, 2.0]]), torch.zeros(2, 3)


class Coder(nn.Module):
    """A masked autoencoder that shows the given part of its input."""

    def __init__(self, visible: Tensor) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(()))
        self.visible = visible

    def forward(self, x: Tensor) -> tuple[Tensor, None, Tensor]:
        return self.gain * RECON, None, self.visible


class TestMaskedReconstruction:
    @pytest.mark.row("4.8", "4.9", "4.10", "B38", "4.22")
    @pytest.mark.parametrize(
        ("loss", "reduction", "mean", "weight"),
        [
            ("mse", None, 14 / 3, 3),
            ("mse", "mean", 14 / 3, 3),
            ("sse", None, 14 / 2, 2),
            ("sse", "batch_mean", 14 / 2, 2),
            ("mse", "batch_mean", 14 / 2, 2),
            ("sse", "mean", 14 / 3, 3),
            ("mse", "sum", 14, 1),
            ("sse", "sum", 14, 1),
        ],
    )
    @pytest.mark.parametrize("batch", [INPUT, (INPUT, "meta"), [INPUT]])
    def test_by_hand(self, loss: Any, reduction: Any, mean: float, weight: float, batch: Any):
        """The two losses differ in their default reduction alone; the weight is the reduction's own denominator."""
        found = ps.masked_reconstruction(loss, reduction)(Coder(~MASK), batch)
        assert found.mean.item() == pytest.approx(mean)
        assert found.weight.item() == weight

    def test_the_functions_alone(self):
        assert ps.masked_mse(RECON, INPUT, MASK).item() == pytest.approx(14 / 3)
        assert ps.masked_sse(RECON, INPUT, MASK).item() == 7
        assert ps.masked_sse(RECON, INPUT, MASK, reduction="sum").item() == 14
        each = torch.func.vmap(ps.masked_mse)(RECON[:, None], INPUT[:, None], MASK[:, None])
        assert each.tolist() == pytest.approx([5, 4])  # no shape depends on the data

    @pytest.mark.parametrize("reduction", ["mean", "sum", "batch_mean"])
    def test_everything_visible_is_a_loss_of_0_with_a_graph(self, reduction: Any):
        net = Coder(torch.ones(2, 3, dtype=torch.bool))
        loss = ps.masked_reconstruction(reduction=reduction)(net, INPUT)
        assert loss.mean.item() == 0
        loss.mean.backward()
        assert net.gain.grad.item() == 0

    @pytest.mark.row("B39")
    def test_everything_visible_makes_no_update(self):
        program = ps.program(Coder(torch.ones(2, 3, dtype=torch.bool)), ps.masked_reconstruction(), optim.sgd(0.1))
        state, metrics = program.train_step(program.init(device="cpu"), INPUT)
        assert (int(state.updates), int(state.halted), float(metrics["applied"])) == (0, 0, 0)
        assert float(metrics["loss"].weight) == 0

    def test_what_is_not_scored_may_be_missing(self):
        """nan x 0 is nan: a mask that multiplies lets it through, into the loss and into the gradient."""
        x = torch.where(MASK, INPUT, torch.nan)
        recon = RECON.clone().requires_grad_()
        loss = ps.masked_mse(recon, x, MASK)
        loss.backward()
        assert loss.item() == pytest.approx(14 / 3)
        assert torch.equal(recon.grad, torch.where(MASK, 2 * RECON / 3, 0))
        assert ((RECON - x).square() * MASK).sum().isnan()

    def test_masks_of_different_sizes_add_up(self):
        """The epoch's mean weighs batches by what they were a mean over."""
        masks = [MASK[:1], MASK[1:]]
        means = [ps.masked_mse(RECON[i : i + 1], INPUT[i : i + 1], mask) for i, mask in enumerate(masks)]
        assert (2 * means[0] + 1 * means[1]) / 3 == pytest.approx(14 / 3)

    @pytest.mark.parametrize(
        ("visible", "found"),
        [
            (torch.ones(2, 3), r"\[2, 3\] \(torch.float32\)"),
            (torch.ones(2, 2, dtype=torch.bool), r"\[2, 2\] \(torch.bool\)"),
            (torch.ones(2, 1, dtype=torch.bool), r"\[2, 1\] \(torch.bool\)"),
        ],
    )
    def test_shapes_and_the_kind_of_mask_are_checked(self, visible: Tensor, found: str):
        message = rf"masked_reconstruction: reconstruction .*, input .* and mask {found} do not fit together \(cure"
        with pytest.raises(StepContractError, match=message):
            ps.masked_reconstruction()(Coder(visible), INPUT)

    def test_names_are_checked(self):
        with pytest.raises(
            ConfigError, match=r"""masked_reconstruction: loss='mae' is unknown \(cure: "mse" or "sse"\)"""
        ):
            ps.masked_reconstruction("mae")
        for wrong, known in (
            (partial(ps.masked_reconstruction, "mse", "max"), '"mean", "sum", "batch_mean" or None'),
            (partial(ps.masked_mse, RECON, INPUT, MASK, reduction="max"), '"mean", "sum" or "batch_mean"'),
        ):
            with pytest.raises(
                ConfigError, match=rf"""masked_reconstruction: reduction='max' is unknown \(cure: {known}\)"""
            ):
                wrong()


def test_a_context_is_passed_by_and_not_used():
    assert ps.supervised(nn.MSELoss())(identity, (X, Y), "teacher").mean == functional.mse_loss(X, Y)
    assert ps.masked_reconstruction()(Coder(~MASK), INPUT, "teacher").weight == 3
    assert ps.hf_loss()(FakeForCausalLM(), tokens(), "teacher").weight == 17


def test_a_criterion_without_tensors_is_no_part_of_the_state():
    assert ps.supervised(nn.MSELoss()).module is None
    assert ps.supervised(functional.mse_loss).module is None
    criterion = nn.CrossEntropyLoss(weight=CLASS_WEIGHT)
    assert ps.supervised(criterion).module is criterion


def test_the_map_lists_the_target_keys_in_their_order():
    batch = {"y": 1, "target": 2, "targets": 3, "label": 4, "labels": 5}
    for expected in (5, 4, 3, 2, 1):
        rest, target = objective.split_batch(batch)
        assert target == expected
        assert len(rest) == len(batch) - 1
        batch = rest


def test_a_packed_sequence_is_one_argument():
    net = nn.GRU(4, 3)
    x = nn.utils.rnn.pack_sequence([draw(3, 4), draw(2, 4)])
    outputs, _ = objective.call_model(net, x)
    assert torch.equal(outputs.data, net(x)[0].data)
