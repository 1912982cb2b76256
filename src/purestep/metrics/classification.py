"""Classification metrics: accuracy, precision, recall, F1.

Helpers at the end find the logits in the model's outputs and the class dimension in the logits. Several labels for each
example, and other averages, are metrics of torchmetrics (`from_torchmetrics`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from ..errors import ConfigError, StepContractError
from ..state import check_choice, check_range
from ..types import Mean

_Average: TypeAlias = Literal["binary", "micro", "macro"]


class Counts(NamedTuple):
    """True positives, false positives and false negatives by class."""

    tp: Tensor  # shape=(C,), dtype=float32: predicted, and the target
    fp: Tensor  # shape=(C,), dtype=float32: predicted, not the target
    fn: Tensor  # shape=(C,), dtype=float32: not predicted, but the target


def accuracy(
    outputs: Any,
    targets: Tensor,
    *,
    k: int = 1,
    threshold: float | None = None,
    ignore_index: int = -100,
    shift: bool = False,
) -> Mean:
    """The share of targets that are among the ``k`` largest outputs.

    Example:
        >>> logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0]])
        >>> float(accuracy(logits, torch.tensor([0, 1]))), float(accuracy(logits, torch.tensor([0, 1]), k=2))
        (0.5, 1.0)

    Args:
        outputs: logits or probabilities [N, C], [N, C, d...] (as `torch.nn.CrossEntropyLoss`) or [N, d..., C], or an
            object with such ``.logits``.
        targets: class indices [N, d...].
        k: in [1, C].
        threshold: for one output per target instead of one per class (equal shapes, or a last dimension of size 1): an
            output above it is positive. Use 0.0 for logits, 0.5 for probabilities.
        ignore_index: this target value does not count.
        shift: each output predicts the next target, as in a causal language model.

    Raises:
        StepContractError: the shapes do not fit together, or the classes could be the second dimension and the last.
        ConfigError: ``k`` is out of its range.
    """
    logits, labels = aligned("accuracy", outputs, targets, shift=shift)
    valid = labels != ignore_index
    if threshold is not None:
        correct = (one_per_target("accuracy", logits, labels) > threshold) == (labels == 1)
    else:
        last = classes_last("accuracy", logits, labels)
        check_range("metrics.accuracy", 1, last.shape[-1], ends="[]", cure="k=1; k counts classes", k=k)
        best = last.argmax(-1, keepdim=True) if k == 1 else last.topk(k, dim=-1).indices
        correct = (best == labels.unsqueeze(-1)).any(-1)
    return Mean((correct & valid).sum().float(), valid.sum().float())


def counts(
    outputs: Any, targets: Tensor, *, threshold: float | None = None, ignore_index: int = -100, shift: bool = False
) -> Counts:
    """Count true positives, false positives and false negatives of each class.

    Example:
        >>> counts(torch.eye(2), torch.tensor([0, 0])).fn.tolist()
        [1.0, 0.0]

    Args:
        outputs: as in `accuracy`.
        targets: class indices; with a ``threshold``, 1 and 0 in the shape of the outputs.
        threshold: as in `accuracy`; all targets are then of one class.
        ignore_index: this target value does not count.
        shift: as in `accuracy`.

    Returns:
        Three vectors of shape=(C,), dtype=float32. C is the number of classes; with a threshold, 1.

    Raises:
        StepContractError: the shapes do not fit together.
    """
    return _counts("counts", outputs, targets, threshold, ignore_index, shift)


def _counts(
    where: str, outputs: Any, targets: Tensor, threshold: float | None, ignore_index: int, shift: bool
) -> Counts:
    logits, labels = aligned(where, outputs, targets, shift=shift)
    valid = labels != ignore_index
    if threshold is not None:
        predicted, positive = one_per_target(where, logits, labels) > threshold, labels == 1
        flags = predicted & positive, predicted & ~positive, ~predicted & positive
        return Counts(*((flag & valid).sum().float().reshape(1) for flag in flags))
    last = classes_last(where, logits, labels)
    # int32: adding ones to a float32 stops at 2^24, and a segmented volume has more voxels of one class.
    predicted, zeros = last.argmax(-1), torch.zeros(last.shape[-1], dtype=torch.int32, device=last.device)
    labels = torch.where(valid, labels, torch.zeros_like(labels))

    def count(classes: Tensor, mask: Tensor) -> Tensor:
        return zeros.index_add(0, classes.reshape(-1), mask.reshape(-1).int())

    tp = count(labels, valid & (predicted == labels))
    by_class = tp, count(predicted, valid) - tp, count(labels, valid) - tp
    return Counts(*(number.float() for number in by_class))


def precision(
    outputs: Any,
    targets: Tensor,
    *,
    average: _Average = "binary",
    threshold: float | None = None,
    ignore_index: int = -100,
    shift: bool = False,
) -> Mean:
    """Precision, the share of a class's predictions that are correct: ``tp / (tp + fp)``.

    Example:
        >>> float(precision(torch.tensor([0.9, 0.8, 0.1]), torch.tensor([1, 0, 1]), threshold=0.5))
        0.5

    Args:
        outputs: as in `counts`.
        targets: as in `counts`.
        average: ``"binary"``: class 1 of two, or of a threshold; ``"micro"``: the counts of all classes together;
            ``"macro"``: the mean over the classes that were predicted at least once.
        threshold: as in `counts`.
        ignore_index: this target value does not count.
        shift: as in `accuracy`.

    Raises:
        ConfigError: ``"binary"`` with more than two classes, ``"macro"`` with a threshold, or an unknown average.
        StepContractError: the shapes do not fit together.
    """
    tp, fp, _ = _counts("precision", outputs, targets, threshold, ignore_index, shift)
    return _averaged("precision", tp, tp + fp, average)


def recall(
    outputs: Any,
    targets: Tensor,
    *,
    average: _Average = "binary",
    threshold: float | None = None,
    ignore_index: int = -100,
    shift: bool = False,
) -> Mean:
    """Recall, the share of a class's targets that were predicted: ``tp / (tp + fn)``.

    Example:
        >>> float(recall(torch.tensor([0.9, 0.8, 0.1, 0.2]), torch.tensor([1, 0, 1, 1]), threshold=0.15))
        0.6666666666666666

    Args:
        outputs: as in `counts`.
        targets: as in `counts`.
        average: as in `precision`; ``"macro"``: the mean over the classes that were a target at least once.
        threshold: as in `counts`.
        ignore_index: this target value does not count.
        shift: as in `accuracy`.

    Raises:
        ConfigError: ``"binary"`` with more than two classes, ``"macro"`` with a threshold, or an unknown average.
        StepContractError: the shapes do not fit together.
    """
    tp, _, fn = _counts("recall", outputs, targets, threshold, ignore_index, shift)
    return _averaged("recall", tp, tp + fn, average)


def f1(
    outputs: Any,
    targets: Tensor,
    *,
    average: _Average = "binary",
    threshold: float | None = None,
    ignore_index: int = -100,
    shift: bool = False,
) -> Mean:
    """F1, the harmonic mean of precision and recall: ``2 tp / (2 tp + fp + fn)``.

    Example:
        >>> f1(torch.eye(3), torch.tensor([0, 1, 1]), average="macro").compute()
        tensor([1.0000, 0.6667, 0.0000])

    Args:
        outputs: as in `counts`.
        targets: as in `counts`.
        average: as in `precision`; ``"macro"``: the mean over the classes that were a target or predicted.
        threshold: as in `counts`.
        ignore_index: this target value does not count.
        shift: as in `accuracy`.

    Raises:
        ConfigError: ``"binary"`` with more than two classes, ``"macro"`` with a threshold, or an unknown average.
        StepContractError: the shapes do not fit together.
    """
    tp, fp, fn = _counts("f1", outputs, targets, threshold, ignore_index, shift)
    return _averaged("f1", 2 * tp, 2 * tp + fp + fn, average)


def _averaged(where: str, total: Tensor, weight: Tensor, average: _Average) -> Mean:
    check_choice(f"metrics.{where}", ("binary", "micro", "macro"), average=average)
    if average == "micro":
        return Mean(total.sum(), weight.sum())
    if average == "macro" and len(total) > 1:
        return Mean(total, weight)
    if average == "macro":
        raise ConfigError(
            'average="macro" with a threshold, which has one class',
            where=f"metrics.{where}",
            hint='average="binary"; for several labels an object of torchmetrics, such as MultilabelF1Score(3)',
        )
    if len(total) > 2:
        raise ConfigError(
            f'average="binary" with {len(total)} classes',
            where=f"metrics.{where}",
            hint=f'functools.partial(metrics.{where}, average="macro")',
        )
    return Mean(total[-1], weight[-1])


def logits_of(where: str, outputs: Any) -> Tensor:
    """Return the tensor itself, or ``.logits`` or ``["logits"]`` of a model output, detached.

    Raises:
        StepContractError: the outputs have no such tensor.
    """
    logits = outputs
    if isinstance(outputs, Mapping):
        logits = cast(Mapping[str, Any], outputs).get("logits")
    elif not isinstance(outputs, Tensor):
        logits = getattr(outputs, "logits", None)
    if isinstance(logits, Tensor):
        return logits.detach()
    raise StepContractError(
        f"the outputs are a {type(outputs).__name__} without logits",
        where=f"metrics.{where}",
        hint=f"lambda outputs, targets: metrics.{where}(outputs[0], targets)",
    )


def aligned(where: str, outputs: Any, targets: Tensor, *, shift: bool) -> tuple[Tensor, Tensor]:
    """Return logits and targets; ``shift`` drops the last output and the first target of each sequence.

    Args:
        where: the metric's name, for errors.
        outputs: [N, d..., C], or any other shape without ``shift``.
        targets: [N, d...].
        shift: output t predicts target t + 1.

    Raises:
        StepContractError: the outputs have no logits, or the shapes with ``shift`` are not [N, T, C] and [N, T].
    """
    logits = logits_of(where, outputs)
    if not shift:
        return logits, targets.detach()
    if logits.dim() != 3 or logits.shape[:2] != targets.shape:
        raise StepContractError(
            f"shift=True needs logits [N, T, C] and targets [N, T], not {list(logits.shape)} and {list(targets.shape)}",
            where=f"metrics.{where}",
            hint="shift=False",
        )
    return logits[:, :-1], targets[:, 1:].detach()


def classes_last(where: str, logits: Tensor, targets: Tensor) -> Tensor:
    """Return the logits as [N, d..., C].

    Args:
        where: the metric's name, for errors.
        logits: [N, C, d...] or [N, d..., C].
        targets: [N, d...].

    Raises:
        StepContractError: the classes could be the second dimension and the last, or neither.
    """
    second = logits.movedim(1, -1) if logits.dim() > 1 else logits
    fits_last, fits_second = logits.shape[:-1] == targets.shape, second.shape[:-1] == targets.shape
    if logits.dim() > 2 and fits_last and fits_second:
        raise StepContractError(
            f"logits {list(logits.shape)} fit targets {list(targets.shape)} with the classes in dimension 1 and -1",
            where=f"metrics.{where}",
            hint=f"lambda outputs, targets: metrics.{where}(outputs.movedim(1, -1).flatten(0, -2), targets.flatten()), "
            "or without movedim if they are in the last one",
        )
    moved = logits if fits_last else second
    is_class = fits_last or fits_second
    if logits.dim() < 2 or not is_class or moved.shape[-1] < 2 or targets.is_floating_point():
        raise StepContractError(
            f"outputs {list(logits.shape)} and targets {list(targets.shape)} ({targets.dtype}) are not logits over two "
            "or more classes and class indices",
            where=f"metrics.{where}",
            hint=f"functools.partial(metrics.{where}, threshold=0.0) for one logit per target",
        )
    return moved


def one_per_target(where: str, logits: Tensor, targets: Tensor) -> Tensor:
    """Return the logits in the shape of the targets.

    Raises:
        StepContractError: there is not exactly one logit per target.
    """
    if logits.shape == targets.shape:
        return logits
    if logits.shape == (*targets.shape, 1):
        return logits.squeeze(-1)
    raise StepContractError(
        f"a threshold needs one output per target, not outputs {list(logits.shape)} and targets {list(targets.shape)}",
        where=f"metrics.{where}",
        hint=f"call metrics.{where} without a threshold for one output per class",
    )
