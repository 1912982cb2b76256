"""Right and wrong answers, counted: accuracy, precision, recall, F1.

Finding the logits in what a model returned, and the classes in the logits. Shapes are known when a graph is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, TypedDict, Unpack, cast

import torch
from torch import Tensor

from ..errors import ConfigError, StepContractError
from ..types import Mean

Average: TypeAlias = Literal["binary", "micro", "macro"]


class CountOptions(TypedDict, total=False):
    """How outputs are read as answers."""

    threshold: float | None  # one output a target: positive above it (0.0 for logits); None: one output a class
    ignore_index: int  # targets that do not count, -100
    class_dim: int | None  # where the classes are, where both places fit
    shift: bool  # each output predicts the next target


_OPTIONS = tuple(CountOptions.__annotations__)


class Counts(NamedTuple):
    """Answers by class. What is in no field is a true negative."""

    tp: Tensor  # shape=(C,), dtype=float32: predicted and right
    fp: Tensor  # shape=(C,), dtype=float32: predicted and wrong
    fn: Tensor  # shape=(C,), dtype=float32: not predicted, and should have been


def accuracy(outputs: Any, targets: Tensor, *, k: int = 1, **options: Unpack[CountOptions]) -> Mean:
    """The share of targets that are among the ``k`` largest outputs.

    Args:
        outputs: logits or probabilities [N, C], [N, C, d...] (as `torch.nn.CrossEntropyLoss`) or [N, d..., C], or
            something with ``.logits`` of that shape.
        targets: class indices [N, d...].
        k: in [1, C].
        **options: ``threshold``: for one output a target instead of one a class (equal shapes, or one more dimension
            of size 1): positive above it, 0.0 for logits and 0.5 for probabilities. ``ignore_index``: targets that do
            not count, -100. ``class_dim``: where the classes are, needed only where both places fit. ``shift``: each
            output predicts the next target, as in a causal language model.

    Raises:
        StepContractError: shapes that do not fit together.
        ConfigError: ``k`` out of its range, or no such option.

    Example:
        >>> logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0]])
        >>> float(accuracy(logits, torch.tensor([0, 1]))), float(accuracy(logits, torch.tensor([0, 1]), k=2))
        (0.5, 1.0)
    """
    _check_options("accuracy", options)
    logits, wanted = aligned("accuracy", outputs, targets, shift=options.get("shift", False))
    valid, threshold = wanted != options.get("ignore_index", -100), options.get("threshold")
    if threshold is not None:
        right = (one_a_target("accuracy", logits, wanted) > threshold) == (wanted == 1)
    else:
        last = classes_last("accuracy", logits, wanted, options.get("class_dim"))
        if not 1 <= k <= last.shape[-1]:
            raise ConfigError(f"k={k} of {last.shape[-1]} classes", where="metrics.accuracy", hint="k=1")
        best = last.argmax(-1, keepdim=True) if k == 1 else last.topk(k, dim=-1).indices
        right = (best == wanted.unsqueeze(-1)).any(-1)
    return Mean((right & valid).sum().float(), valid.sum().float())


def _check_options(where: str, options: CountOptions) -> None:
    for name in options:
        if name not in _OPTIONS:
            raise ConfigError(f"no option {name!r}", where=f"metrics.{where}", hint=f"one of {', '.join(_OPTIONS)}")


def counts(outputs: Any, targets: Tensor, **options: Unpack[CountOptions]) -> Counts:
    """True positives, false positives and false negatives of each class.

    Args:
        outputs: as in `accuracy`; with a ``threshold``, [N] or [N, C, d...] (several labels).
        targets: class indices; with a ``threshold``, 1 and 0 in the shape of the outputs.
        **options: as in `accuracy`.

    Returns:
        Three vectors of shape=(C,), dtype=float32. C is the number of classes; with a threshold, of labels, or 1 for
        targets [N].

    Raises:
        StepContractError: shapes that do not fit together.
        ConfigError: no such option.

    Example:
        >>> counts(torch.eye(2), torch.tensor([0, 0])).fn.tolist()
        [1.0, 0.0]
    """
    return _counts("counts", outputs, targets, options)


def _counts(where: str, outputs: Any, targets: Tensor, options: CountOptions) -> Counts:
    _check_options(where, options)
    logits, wanted = aligned(where, outputs, targets, shift=options.get("shift", False))
    valid, threshold = wanted != options.get("ignore_index", -100), options.get("threshold")
    if threshold is not None:
        return _counts_of_labels(one_a_target(where, logits, wanted) > threshold, wanted == 1, valid)
    last = classes_last(where, logits, wanted, options.get("class_dim"))
    # Whole numbers: a float32 that ones are added to stays at 2^24, and a volume has more voxels of a class.
    guessed, zeros = last.argmax(-1), torch.zeros(last.shape[-1], dtype=torch.int32, device=last.device)
    wanted = torch.where(valid, wanted, torch.zeros_like(wanted))

    def number(classes: Tensor, these: Tensor) -> Tensor:
        return zeros.index_add(0, classes.reshape(-1), these.reshape(-1).int())

    tp = number(wanted, valid & (guessed == wanted))
    found = tp, number(guessed, valid) - tp, number(wanted, valid) - tp
    return Counts(*(count.float() for count in found))


def _counts_of_labels(guessed: Tensor, positive: Tensor, valid: Tensor) -> Counts:
    if guessed.dim() < 2:
        guessed, positive, valid = (flag.reshape(-1, 1) for flag in (guessed, positive, valid))

    def number(these: Tensor) -> Tensor:
        return (these & valid).movedim(1, -1).reshape(-1, these.shape[1]).sum(0).float()

    return Counts(number(guessed & positive), number(guessed & ~positive), number(~guessed & positive))


def precision(
    outputs: Any, targets: Tensor, *, average: Average = "binary", positive: int = 1, **options: Unpack[CountOptions]
) -> Mean:
    """Of what was predicted to be of a class, the share that is: ``tp / (tp + fp)``.

    Args:
        outputs: as in `counts`.
        targets: as in `counts`.
        average: ``"binary"``: one class alone; ``"micro"``: all classes counted together; ``"macro"``: the mean over
            the classes that were ever predicted.
        positive: the class that ``"binary"`` is about, 0 or 1; 1 with a threshold.
        **options: as in `accuracy`.

    Raises:
        ConfigError: ``"binary"`` and more than two classes, no such average, or no such option.
        StepContractError: shapes that do not fit together.

    Example:
        >>> float(precision(torch.tensor([0.9, 0.8, 0.1]), torch.tensor([1, 0, 1]), threshold=0.5))
        0.5
    """
    tp, fp, _ = _counts("precision", outputs, targets, options)
    return _averaged("precision", tp, tp + fp, average, positive)


def recall(
    outputs: Any, targets: Tensor, *, average: Average = "binary", positive: int = 1, **options: Unpack[CountOptions]
) -> Mean:
    """Of what is of a class, the share that was predicted to be: ``tp / (tp + fn)``.

    Args:
        outputs: as in `counts`.
        targets: as in `counts`.
        average: as in `precision`; ``"macro"``: the mean over the classes that were ever a target.
        positive: as in `precision`.
        **options: as in `accuracy`.

    Raises:
        ConfigError: ``"binary"`` and more than two classes, no such average, or no such option.
        StepContractError: shapes that do not fit together.

    Example:
        >>> float(recall(torch.tensor([0.9, 0.8, 0.1, 0.2]), torch.tensor([1, 0, 1, 1]), threshold=0.15))
        0.6666666666666666
    """
    tp, _, fn = _counts("recall", outputs, targets, options)
    return _averaged("recall", tp, tp + fn, average, positive)


def f1(
    outputs: Any, targets: Tensor, *, average: Average = "binary", positive: int = 1, **options: Unpack[CountOptions]
) -> Mean:
    """The harmonic mean of precision and recall: ``2 tp / (2 tp + fp + fn)``.

    Args:
        outputs: as in `counts`.
        targets: as in `counts`.
        average: as in `precision`; ``"macro"``: the mean over the classes that were ever a target or predicted.
        positive: as in `precision`.
        **options: as in `accuracy`.

    Raises:
        ConfigError: ``"binary"`` and more than two classes, no such average, or no such option.
        StepContractError: shapes that do not fit together.

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
        raise ConfigError(f"average={average!r}", where=f"metrics.{where}", hint='"binary", "micro" or "macro"')
    if len(total) > 2 or not 0 <= positive <= 1:
        raise ConfigError(
            f'average="binary" of class {positive} among {len(total)}',
            where=f"metrics.{where}",
            hint=f'functools.partial(metrics.{where}, average="macro")',
        )
    if len(total) == 1 and positive != 1:
        raise ConfigError(
            "with a threshold only the class 1 is counted, and positive is 0",
            where=f"metrics.{where}",
            hint="outputs and targets of the other class: -outputs and 1 - targets",
        )
    only = 0 if len(total) == 1 else positive
    return Mean(total[only], weight[only])


def logits_of(where: str, outputs: Any) -> Tensor:
    """The tensor itself, or ``.logits`` or ``["logits"]`` of a model output.

    Raises:
        StepContractError: there is no such tensor.
    """
    found = outputs
    if isinstance(outputs, Mapping):
        found = cast(Mapping[str, Any], outputs).get("logits")
    elif not isinstance(outputs, Tensor):
        found = getattr(outputs, "logits", None)
    if isinstance(found, Tensor):
        return found.detach()
    raise StepContractError(
        f"the outputs are a {type(outputs).__name__} without logits",
        where=f"metrics.{where}",
        hint=f"lambda outputs, targets: metrics.{where}(outputs[0], targets)",
    )


def aligned(where: str, outputs: Any, targets: Tensor, *, shift: bool) -> tuple[Tensor, Tensor]:
    """Logits and targets; with ``shift`` the last output and the first target of each sequence are left out.

    Args:
        where: the metric's name, for errors.
        outputs: [N, d..., C] or any other shape without ``shift``.
        targets: [N, d...].
        shift: whether output t predicts target t + 1.

    Raises:
        StepContractError: no logits, or with ``shift`` other shapes than [N, T, C] and [N, T].
    """
    logits = logits_of(where, outputs)
    if not shift:
        return logits, targets.detach()
    if logits.dim() != 3 or logits.shape[:2] != targets.shape:
        raise StepContractError(
            f"logits {list(logits.shape)} and targets {list(targets.shape)}",
            where=f"metrics.{where}",
            hint="shift=True is for logits [N, T, C] and targets [N, T]",
        )
    return logits[:, :-1], targets[:, 1:].detach()


def classes_last(where: str, logits: Tensor, targets: Tensor, class_dim: int | None) -> Tensor:
    """Logits as [N, d..., C].

    Args:
        where: the metric's name, for errors.
        logits: [N, C, d...] or [N, d..., C].
        targets: [N, d...].
        class_dim: 1 or -1; None: whichever fits.

    Raises:
        StepContractError: both places fit, or neither does.
    """
    last = logits.movedim(class_dim, -1) if class_dim is not None else logits
    second = logits.movedim(1, -1) if logits.dim() > 1 else logits
    fits_last, fits_second = last.shape[:-1] == targets.shape, second.shape[:-1] == targets.shape
    if class_dim is None and logits.dim() > 2 and fits_last and fits_second:
        raise StepContractError(
            f"logits {list(logits.shape)} fit targets {list(targets.shape)} with the classes second and last",
            where=f"metrics.{where}",
            hint=f"functools.partial(metrics.{where}, class_dim=1)",
        )
    found = last if fits_last else second
    if logits.dim() < 2 or found.shape[:-1] != targets.shape or found.shape[-1] < 2 or targets.is_floating_point():
        raise StepContractError(
            f"outputs {list(logits.shape)} and targets {list(targets.shape)} ({targets.dtype}) are not logits over two "
            "or more classes and class indices",
            where=f"metrics.{where}",
            hint=f"functools.partial(metrics.{where}, threshold=0.0) for one logit a target",
        )
    return found


def one_a_target(where: str, logits: Tensor, targets: Tensor) -> Tensor:
    """Logits in the targets' shape, where there is one for each.

    Raises:
        StepContractError: there is not.
    """
    if logits.shape == targets.shape:
        return logits
    if logits.shape == (*targets.shape, 1):
        return logits.squeeze(-1)
    raise StepContractError(
        f"outputs {list(logits.shape)} and targets {list(targets.shape)}; a threshold needs one output a target",
        where=f"metrics.{where}",
        hint=f"metrics.{where} without a threshold, for one output a class",
    )
