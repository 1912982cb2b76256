"""torchmetrics objects as pure functions: sums of states that merge, or outputs that are gathered for the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, cast

import torch
from torch import Tensor

from .. import rng, tree
from ..errors import ConfigError
from ..state import known_keywords
from ..torch_ext import tracing
from ..types import Mean, Metric
from .classification import logits_of
from .gathered import Gathered, numbers

Prepare = Callable[[Any, Any], Any]
"""(outputs, targets) -> the arguments of the metric's ``update``: a tuple, or a dict of keyword arguments."""


@known_keywords
def from_torchmetrics(metric: Any, prepare: Prepare | None = None) -> Metric:
    """Build a metric function from a ``torchmetrics.Metric``. `supervised` and `hf_loss` call it for bare objects.

    Example:
        >>> MeanSquaredError = __import__("pytest").importorskip("torchmetrics").MeanSquaredError
        >>> rmse = from_torchmetrics(MeanSquaredError(squared=False))
        >>> float(rmse(torch.zeros(4), torch.full((4,), 3.0)))
        3.0

    If all states of the object are sums (accuracy, F1, mean squared error, a curve with ``thresholds=``), those of one
    batch form one vector, and `merge` adds these vectors: it is measured in training and evaluation. Any other object
    (exact AUROC, average precision, calibration error, Pearson, Spearman, retrieval, minima and maxima) needs all
    outputs: ``eval_step`` returns them, `evaluate` copies them to the host after each batch, and ``update`` and
    ``compute`` run there at the end. It is measured in evaluation only, and holds all outputs in host memory. Inside a
    graph, this is also the way of a sum whose ``update`` branches on tensor values (binary metrics on the CPU).

    The object is copied and never modified. Counts are exact up to 2**24 per batch, and rounded to float32 above.

    Args:
        metric: for example ``torchmetrics.classification.MulticlassAUROC(10)``. It computes one number, one per class
            (``f1[0]``, ``f1[1]``, ... in the history, and their mean as ``f1``), or a dict of such values
            (``name_key``). Its argument checks, which read tensor values, are left out inside a graph.
        prepare: (outputs, targets) -> the arguments of ``update``, as a tuple or dict. Default: the outputs, or their
            ``logits``, and the targets. Retrieval metrics need it:
            ``lambda outputs, targets: (outputs, targets["relevant"], targets["query"])``.

    Returns:
        ``f(outputs, targets) -> Mean`` with total and weight of shape=(n,) for n numbers of state, or
        ``f(outputs, targets) -> Gathered``.

    Raises:
        ConfigError: the argument is a class, a collection, or not of torchmetrics.
        StepContractError: at the end of an evaluation, if the metric computes a curve, a matrix or other values.
    """
    if not is_torchmetrics(metric):
        kind = metric.__name__ if isinstance(metric, type) else type(metric).__name__
        if _is_of(metric, "MetricCollection"):
            hint = "pass the collection itself: ps.supervised(..., metrics=collection)"
        else:
            hint = f"pass an object: {kind}()" if isinstance(metric, type) else "pass a torchmetrics.Metric"
        raise ConfigError(f"{kind} is not a torchmetrics.Metric", where="metrics.from_torchmetrics", hint=hint)
    arguments = prepare or _outputs_and_targets
    states = _summed_states(metric)
    return _gathering(metric, arguments) if states is None else _summing(metric, states, arguments)


def is_torchmetrics(value: Any) -> bool:
    """True for an object of torchmetrics' class ``Metric``, which is not imported for it."""
    return _is_of(value, "Metric")


def functions(metrics: Any) -> dict[str, Metric]:
    """Return metric functions by name, with torchmetrics objects among them converted by `from_torchmetrics`.

    Example:
        >>> functions(None)
        {}

    Args:
        metrics: name -> function, ``torchmetrics.Metric`` or ``MetricCollection``; or a ``MetricCollection``, whose
            names are used; or None.

    Raises:
        ConfigError: it is none of these, or two metrics have one name.
    """
    if metrics is None:
        return {}
    if _is_of(metrics, "MetricCollection"):
        return {str(name): from_torchmetrics(one) for name, one in metrics.items(copy_state=False)}
    if not isinstance(metrics, Mapping):
        what, hint = f"metrics is a {type(metrics).__name__}, not a dict", 'metrics={"accuracy": ps.metrics.accuracy}'
        raise ConfigError(what, where="metrics", hint=hint)
    found: dict[str, Metric] = {}
    for name, metric in cast(Mapping[str, Any], metrics).items():
        if _is_of(metric, "MetricCollection"):
            named = {f"{name}_{key}": one for key, one in functions(metric).items()}
        elif is_torchmetrics(metric):
            named = {name: from_torchmetrics(metric)}
        elif callable(metric) and not (isinstance(metric, type) and _is_of_class(metric, "Metric")):
            named = {name: metric}
        else:
            kind = metric.__name__ if isinstance(metric, type) else type(metric).__name__
            hint = f"{kind}()" if isinstance(metric, type) else "a function (outputs, targets) -> ps.Mean"
            raise ConfigError(
                f"the metric is a {kind}, not a function or an object", where=f"metrics/{name}", hint=hint
            )
        if both := found.keys() & named.keys():
            raise ConfigError("two metrics have this name", where=f"metrics/{min(both)}", hint="rename one of them")
        found |= named
    return found


def _is_of(value: Any, name: str) -> bool:
    return not isinstance(value, type) and _is_of_class(type(value), name)


def _is_of_class(kind: type, name: str) -> bool:
    return any(one.__name__ == name and one.__module__.partition(".")[0] == "torchmetrics" for one in kind.__mro__)


def _outputs_and_targets(outputs: Any, targets: Any) -> tuple[Any, ...]:
    return logits_of("from_torchmetrics", outputs), targets


def _update(update: Callable[..., Any], arguments: Any, *metric: Any) -> None:
    if isinstance(arguments, Mapping):
        update(*metric, **arguments)
    else:
        update(*metric, *arguments)


# --- states that are not sums: at the end, on the host ----------------------------------------------------------------


def _gathering(metric: Any, arguments: Prepare) -> Metric:
    template = deepcopy(metric)

    class Batches(Gathered):
        """The arguments of the metric's ``update``, batch by batch."""

        __slots__ = ()

        def compute(self) -> Any:
            scratch = deepcopy(template)
            scratch.reset()
            scratch.sync_on_compute = False  # each process has all batches, or merges them before
            first = next((leaf for part in self.parts for leaf in _tensors(part)), None)
            scratch.to("cpu" if first is None else first.device)
            with torch.no_grad(), rng.scoped(0):  # a bootstrap draws
                for part in self.parts:
                    _update(scratch.update, part)
                return scratch.compute()

        def __float__(self) -> float:
            return numbers("", self.compute())[""]

    def gather(outputs: Any, targets: Any) -> Gathered:
        found = arguments(outputs, targets)
        if isinstance(found, Mapping):
            return Batches(({str(name): _detached(value) for name, value in found.items()},))
        return Batches((tuple(map(_detached, found)),))

    return gather


def _detached(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _tensors(part: Any) -> list[Tensor]:
    values = part.values() if isinstance(part, Mapping) else part
    return [value for value in values if isinstance(value, Tensor)]


# --- states that are sums ---------------------------------------------------------------------------------------------


def _summing(metric: Any, states: dict[str, Tensor], arguments: Prepare) -> Metric:
    # They hold state only during one call. The second one checks no arguments: a graph cannot read their values.
    scratch, unchecked = deepcopy(metric), deepcopy(metric)
    gather = _gathering(metric, arguments)
    if hasattr(unchecked, "validate_args"):
        unchecked.validate_args = False

    class State(Mean):
        """The summed states of all batches."""

        __slots__ = ()

        def compute(self) -> Any:
            _load(scratch, states, self.total)
            try:
                return type(scratch).compute(scratch)
            finally:
                _reset(scratch, states)

        def __float__(self) -> float:
            return numbers("", self.compute())[""]

    def count(outputs: Any, targets: Any) -> Mean | Gathered:
        found = arguments(outputs, targets)
        given = (*_tensors(found), *tree.leaves((outputs, targets)))  # texts have no device: that of their outputs
        device = next((leaf.device for leaf in given if isinstance(leaf, Tensor)), torch.device("cpu"))
        own = unchecked if tracing.in_graph() or tracing.transformed() else scratch
        _load(own, states, torch.zeros(sum(one.numel() for one in states.values()), device=device))
        try:
            # The method of the class: torchmetrics wraps that of the object in bookkeeping that cannot be captured.
            _update(type(own).update, found, own)
            total = torch.cat([getattr(own, name).detach().reshape(-1).float() for name in states])
        except (RuntimeError, NotImplementedError):
            if not tracing.in_graph() or torch.compiler.is_dynamo_compiling():
                raise
            return gather(outputs, targets)  # the update reads tensor values, so a graph cannot hold it
        finally:
            _reset(own, states)
        return State(total, torch.ones_like(total))

    return count


def _summed_states(metric: Any) -> dict[str, Tensor] | None:
    """Return the default values of the states; None if one is no sum, or lies in a metric inside this one."""
    defaults, reductions = metric._defaults, metric._reductions
    is_wrapper = any(is_torchmetrics(part) or _is_of(part, "MetricCollection") for part in metric.children())
    for name, default in defaults.items():
        is_sum = isinstance(default, Tensor) and getattr(reductions[name], "__name__", "") == "dim_zero_sum"
        if not is_sum or bool(default.count_nonzero()):
            return None
    return {str(name): default for name, default in defaults.items()} if defaults and not is_wrapper else None


def _load(metric: Any, states: dict[str, Tensor], total: Tensor) -> None:
    """Split the vector into the states of the metric, in their shapes and dtypes, on the device of the vector."""
    if metric.device != total.device:
        metric.to(total.device)  # It may have other buffers than its states: thresholds, class weights.
    parts = total.split([default.numel() for default in states.values()])
    for (name, default), part in zip(states.items(), parts, strict=True):
        rounded = part if default.is_floating_point() else part.round()
        setattr(metric, name, rounded.to(default.dtype).reshape(default.shape))


def _reset(metric: Any, states: dict[str, Tensor]) -> None:
    """Set the states to their defaults, without the metric's own ``reset``, whose operations a graph would record."""
    for name, default in states.items():
        setattr(metric, name, default)
