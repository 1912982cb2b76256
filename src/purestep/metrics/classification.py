"""Classification metrics: accuracy, precision, recall, F1.

Helpers at the end find the logits in the model's outputs and the class dimension in the logits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict, Unpack, cast

import torch
from torch import Tensor

from ..errors import ConfigError, StepContractError
from ..state import check_choice
from ..types import Mean

Average: TypeAlias = Literal["binary", "micro", "macro"]
"""The mean over classes: of one class, of all rows, or of the classes' own values."""


class CountOptions(TypedDict, total=False):
    """Options for reading predictions from outputs."""

    threshold: float | None  # one output per target, positive above it (0.0 for logits); None: one output per class
    ignore_index: int  # this target value does not count; -100 by default
    class_dim: int | None  # the class dimension, 1 or -1, if both would fit
    shift: bool  # each output predicts the next target


_OPTIONS = tuple(CountOptions.__annotations__)


class Counts(NamedTuple):
    """True positives, false positives and false negatives by class."""

    tp: Tensor  # shape=(C,), dtype=float32: predicted, and the target
    fp: Tensor  # shape=(C,), dtype=float32: predicted, not the target
    fn: Tensor  # shape=(C,), dtype=float32: not predicted, but the target


def accuracy(outputs: Any, targets: Tensor, *, k: int = 1, **options: Unpack[CountOptions]) -> Mean:
    """The share of targets that are among the ``k`` largest outputs.

    Args:
        outputs: logits or probabilities [N, C], [N, C, d...] (as `torch.nn.CrossEntropyLoss`) or [N, d..., C], or an
            object with such ``.logits``.
        targets: class indices [N, d...].
        k: in [1, C].
        **options: ``threshold``: for one output per target instead of one per class (equal shapes, or a last dimension
            of size 1); an output above it is positive. Use 0.0 for logits, 0.5 for probabilities. ``ignore_index``:
            this target value does not count; default -100. ``class_dim``: the class dimension, 1 or -1; needed only if
            both would fit. ``shift``: each output predicts the next target, as in a causal language model.

    Raises:
        StepContractError: the shapes do not fit together.
        ConfigError: ``k`` is out of its range, or an option is unknown.

    Example:
        >>> logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0]])
        >>> float(accuracy(logits, torch.tensor([0, 1]))), float(accuracy(logits, torch.tensor([0, 1]), k=2))
        (0.5, 1.0)
    """
    _check_options("accuracy", options)
    logits, labels = aligned("accuracy", outputs, targets, shift=options.get("shift", False))
    valid, threshold = labels != options.get("ignore_index", -100), options.get("threshold")
    if threshold is not None:
        correct = (one_per_target("accuracy", logits, labels) > threshold) == (labels == 1)
    else:
        last = classes_last("accuracy", logits, labels, options.get("class_dim"))
        if not 1 <= k <= last.shape[-1]:
            raise ConfigError(f"k={k} of {last.shape[-1]} classes", where="metrics.accuracy", hint="k=1")
        best = last.argmax(-1, keepdim=True) if k == 1 else last.topk(k, dim=-1).indices
        correct = (best == labels.unsqueeze(-1)).any(-1)
    return Mean((correct & valid).sum().float(), valid.sum().float())


def _check_options(where: str, options: CountOptions) -> None:
    for name in options:
        check_choice(f"metrics.{where}", _OPTIONS, option=name)


def counts(outputs: Any, targets: Tensor, **options: Unpack[CountOptions]) -> Counts:
    """Count true positives, false positives and false negatives of each class.

    Args:
        outputs: as in `accuracy`; with a ``threshold``, [N] or [N, C, d...] (multi-label).
        targets: class indices; with a ``threshold``, 1 and 0 in the shape of the outputs.
        **options: as in `accuracy`.

    Returns:
        Three vectors of shape=(C,), dtype=float32. C is the number of classes; with a threshold, the number of labels,
        or 1 for targets [N].

    Raises:
        StepContractError: the shapes do not fit together.
        ConfigError: an option is unknown.

    Example:
        >>> counts(torch.eye(2), torch.tensor([0, 0])).fn.tolist()
        [1.0, 0.0]
    """
    return _counts("counts", outputs, targets, options)


def _counts(where: str, outputs: Any, targets: Tensor, options: CountOptions) -> Counts:
    _check_options(where, options)
    logits, labels = aligned(where, outputs, targets, shift=options.get("shift", False))
    valid, threshold = labels != options.get("ignore_index", -100), options.get("threshold")
    if threshold is not None:
        return _multilabel_counts(one_per_target(where, logits, labels) > threshold, labels == 1, valid)
    last = classes_last(where, logits, labels, options.get("class_dim"))
    # int32: adding ones to a float32 stops at 2^24, and a segmented volume has more voxels of one class.
    predicted, zeros = last.argmax(-1), torch.zeros(last.shape[-1], dtype=torch.int32, device=last.device)
    labels = torch.where(valid, labels, torch.zeros_like(labels))

    def count(classes: Tensor, mask: Tensor) -> Tensor:
        return zeros.index_add(0, classes.reshape(-1), mask.reshape(-1).int())

    tp = count(labels, valid & (predicted == labels))
    by_class = tp, count(predicted, valid) - tp, count(labels, valid) - tp
    return Counts(*(number.float() for number in by_class))


def _multilabel_counts(predicted: Tensor, positive: Tensor, valid: Tensor) -> Counts:
    if predicted.dim() < 2:
        predicted, positive, valid = (flag.reshape(-1, 1) for flag in (predicted, positive, valid))

    def count(mask: Tensor) -> Tensor:
        return (mask & valid).movedim(1, -1).reshape(-1, mask.shape[1]).sum(0).float()

    return Counts(count(predicted & positive), count(predicted & ~positive), count(~predicted & positive))


def precision(
    outputs: Any, targets: Tensor, *, average: Average = "binary", positive: int = 1, **options: Unpack[CountOptions]
) -> Mean:
    """Precision, the share of a class's predictions that are correct: ``tp / (tp + fp)``.

    Args:
        outputs: as in `counts`.
        targets: as in `counts`.
        average: ``"binary"``: one class only; ``"micro"``: the counts of all classes together; ``"macro"``: the mean
            over the classes that were predicted at least once.
        positive: the class of ``"binary"``, 0 or 1; 1 with a threshold.
        **options: as in `accuracy`.

    Raises:
        ConfigError: ``"binary"`` with more than two classes, or an unknown average or option.
        StepContractError: the shapes do not fit together.

    Example:
        >>> float(precision(torch.tensor([0.9, 0.8, 0.1]), torch.tensor([1, 0, 1]), threshold=0.5))
        0.5
    """
    tp, fp, _ = _counts("precision", outputs, targets, options)
    return _averaged("precision", tp, tp + fp, average, positive)


def recall(
    outputs: Any, targets: Tensor, *, average: Average = "binary", positive: int = 1, **options: Unpack[CountOptions]
) -> Mean:
    """Recall, the share of a class's targets that were predicted: ``tp / (tp + fn)``.

    Args:
        outputs: as in `counts`.
        targets: as in `counts`.
        average: as in `precision`; ``"macro"``: the mean over the classes that were a target at least once.
        positive: as in `precision`.
        **options: as in `accuracy`.

    Raises:
        ConfigError: ``"binary"`` with more than two classes, or an unknown average or option.
        StepContractError: the shapes do not fit together.

    Example:
        >>> float(recall(torch.tensor([0.9, 0.8, 0.1, 0.2]), torch.tensor([1, 0, 1, 1]), threshold=0.15))
        0.6666666666666666
    """
    tp, _, fn = _counts("recall", outputs, targets, options)
    return _averaged("recall", tp, tp + fn, average, positive)


def f1(
    outputs: Any, targets: Tensor, *, average: Average = "binary", positive: int = 1, **options: Unpack[CountOptions]
) -> Mean:
    """F1, the harmonic mean of precision and recall: ``2 tp / (2 tp + fp + fn)``.

    Args:
        outputs: as in `counts`.
        targets: as in `counts`.
        average: as in `precision`; ``"macro"``: the mean over the classes that were a target or predicted.
        positive: as in `precision`.
        **options: as in `accuracy`.

    Raises:
        ConfigError: ``"binary"`` with more than two classes, or an unknown average or option.
        StepContractError: the shapes do not fit together.

    Example:
        >>> f1(torch.eye(3), torch.tensor([0, 1, 1]), average="macro").compute()
        tensor([1.0000, 0.6667, 0.0000])
    """
    tp, fp, fn = _counts("f1", outputs, targets, options)
    return _averaged("f1", 2 * tp, 2 * tp + fp + fn, average, positive)


def _averaged(where: str, total: Tensor, weight: Tensor, average: Average, positive: int) -> Mean:
    if average == "micro":
        return Mean(total.sum(), weight.sum())
    if average == "macro":
        return Mean(total, weight)
    if average != "binary":
        check_choice(f"metrics.{where}", ("binary", "micro", "macro"), average=average)
    if len(total) > 2 or not 0 <= positive <= 1:
        raise ConfigError(
            f'average="binary" with class {positive} of {len(total)} classes',
            where=f"metrics.{where}",
            hint=f'functools.partial(metrics.{where}, average="macro")',
        )
    if len(total) == 1 and positive != 1:
        raise ConfigError(
            "with a threshold only class 1 is counted, but positive is 0",
            where=f"metrics.{where}",
            hint="pass -outputs and 1 - targets",
        )
    only = 0 if len(total) == 1 else positive
    return Mean(total[only], weight[only])


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


def classes_last(where: str, logits: Tensor, targets: Tensor, class_dim: int | None) -> Tensor:
    """Return the logits as [N, d..., C].

    Args:
        where: the metric's name, for errors.
        logits: [N, C, d...] or [N, d..., C].
        targets: [N, d...].
        class_dim: 1 or -1; None: the one that fits.

    Raises:
        StepContractError: both dimensions fit, or neither.
    """
    last = logits.movedim(class_dim, -1) if class_dim is not None else logits
    second = logits.movedim(1, -1) if logits.dim() > 1 else logits
    fits_last, fits_second = last.shape[:-1] == targets.shape, second.shape[:-1] == targets.shape
    if class_dim is None and logits.dim() > 2 and fits_last and fits_second:
        raise StepContractError(
            f"logits {list(logits.shape)} fit targets {list(targets.shape)} with the class dimension 1 and -1",
            where=f"metrics.{where}",
            hint=f"functools.partial(metrics.{where}, class_dim=1)",
        )
    moved = last if fits_last else second
    if logits.dim() < 2 or moved.shape[:-1] != targets.shape or moved.shape[-1] < 2 or targets.is_floating_point():
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
