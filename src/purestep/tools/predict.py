"""`predict`: the outputs of a model for every batch of a loader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor

from .. import data, rng, tree
from ..errors import ConfigError, DataError, StepContractError
from ..loop import ranks
from ..objective import call_model, split_batch
from ..parallel import processes
from ..state import stacked
from ..step import untouched
from ..types import Program, Share, TrainState

_CURE = (
    "pass forward=lambda model, inputs: ... that returns tensors with one row per example, in dicts and tuples; or "
    "callback=, which takes any outputs"
)


def predict(
    program: Program,
    state: TrainState,
    loader: Any,
    *,
    view: str | None = None,
    prepare: Callable[[Any], tuple[Any, Any]] | None = None,
    forward: Callable[[Any, Any], Any] | None = None,
    callback: Callable[[Any, Any, int], Any] | None = None,
    name: str = "predict",
) -> Any:
    """Return the outputs of the model for all batches of a loader, in eval mode, without gradients.

    Example:
        >>> import torch, purestep as ps
        >>> program = ps.program(torch.nn.Linear(2, 3), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1))
        >>> batches = [(torch.ones(4, 2), torch.ones(4, 3)), (torch.ones(1, 2), torch.ones(1, 3))]
        >>> predict(program, program.init(), batches).shape
        torch.Size([5, 3])

    Row i of the result belongs to item i of the dataset: a DataLoader that shuffles a dataset is read in the dataset's
    order. Other loaders keep their own order. Random numbers depend on the seed of the state and on the number of the
    batch, so a second call returns the same values. The state is only read.

    With a distributed program every process calls this with the whole loader, runs the model on its rows, and gets the
    outputs of all rows.

    Args:
        program: has a ``bind``, as the programs of `program` and `compile_program`.
        state: of this program; batches move to its device.
        loader: as for `evaluate`, with or without targets.
        view: "params" or "ema". None: "ema" for a state with an average, as in `evaluate`.
        prepare: batch -> (inputs, targets), as in `supervised`. Default: a pair is (inputs, targets); in a mapping
            ``labels``, ``label``, ``targets``, ``target`` and ``y`` are no inputs; a tensor or a tuple of one is input.
        forward: (model, inputs) -> outputs, as in `supervised`. Default: a mapping is passed as keyword arguments, a
            tuple as arguments.
        callback: called as ``callback(outputs, batch, index)`` for every batch, with the outputs on the device of the
            state. Nothing is collected, and the result is None: for outputs that do not fit into memory. Of several
            processes each gets its rows; one without rows is not called.
        name: of the loader, for messages.

    Returns:
        The structure of one batch's outputs (a tensor, or tensors in dicts and tuples) on the CPU. Tensors are
        concatenated along dimension 0, for an `ensemble` along dimension 1; a 0-d tensor becomes one number per batch
        (of several processes: one for each one's rows). None with a ``callback``.

    Raises:
        ConfigError: the program has no ``bind``; or ``view`` has another value.
        DataError: an empty loader, or a batch whose inputs are unknown.
        RankError: several processes without a distributed state and program; a loader that cannot be divided among
            them.
        StateError: the state is no TrainState, or has no average for the view "ema".
        StepContractError: outputs that cannot be concatenated: a list, a leaf that is no tensor, or batches that differ
            in structure or in a dimension other than 0.
    """
    stacked.check_train_state(state, where="predict")
    if program.bind is None:
        raise ConfigError(
            "the program has no bind", where="predict", hint="ps.Program(train_step, bind=...), or ps.program(...)"
        )
    seed = int(state.key.flatten()[0])
    split, run = prepare or _inputs_of, forward or call_model
    outputs_of: Callable[..., Any] = untouched(lambda model, rows: run(model, split(rows)[0]))
    collected = _Outputs(name, rows=1 if stacked.size(state) else 0)
    with ExitStack() as stack:
        opened = stack.enter_context(
            ranks.opened(loader, state, where="predict", name=name, program=program, repeats=True)
        )
        model, feed = program.bind(state, view=view), opened.in_order()
        if feed is not opened:
            stack.callback(feed.close)
        for index, batch in enumerate(data.Prefetched(feed.epoch(0), data.device_of(state), name=name)):
            rows, counts = batch.rows if isinstance(batch, Share) else batch, ranks.has_rows(batch)
            try:
                with torch.no_grad(), rng.scoped(rng.mix(seed, "eval", index), data.device_of(state)):
                    outputs = outputs_of(model, rows)
            except Exception as error:
                error.add_note(f"in predict, {name}, batch {index + 1}")
                raise
            if callback is None:
                collected.add(outputs, index, counts=counts)
            elif counts:
                callback(outputs, rows, index)
    return None if callback is not None else collected.joined()


def _inputs_of(batch: Any) -> tuple[Any, Any]:
    """As `split_batch`, and also take a batch without targets."""
    if isinstance(batch, Tensor):
        return batch, None
    if isinstance(batch, tuple | list) and len(cast(tuple[Any, ...], batch)) == 1:
        return batch[0], None
    try:
        return split_batch(batch)
    except DataError as error:
        if isinstance(batch, Mapping):  # no targets: all of it is input
            return batch, None
        raise DataError(
            f"the inputs of a {type(batch).__name__} batch are unknown",
            where="batch",
            hint="ps.predict(..., prepare=lambda batch: (inputs, None))",
        ) from error


def _without(shape: list[int], dim: int) -> list[int]:
    return shape[:dim] + shape[dim + 1 :]


class _Outputs:
    """The outputs of all batches, on the CPU."""

    def __init__(self, name: str, *, rows: int) -> None:
        self._name = name
        self._rows = rows  # the dimension of the examples; before it, members of an ensemble
        self._treedef: tree.TreeDef | None = None
        self._paths: list[str] = []
        self._shapes: list[list[int]] = []  # of the first outputs
        self._parts: list[tuple[int, list[Tensor]]] = []
        self._count = 0

    def add(self, outputs: Any, index: int, *, counts: bool) -> None:
        """Copy the outputs of a batch to the CPU, unless its row only stands in for an empty share."""
        self._count = index + 1
        outputs = tree.dicts(outputs, where=None)
        self._check_nodes(outputs, "")
        named = tree.with_paths(outputs)
        treedef = tree.flatten(outputs)[1]
        if self._treedef is None:
            self._treedef, self._paths = treedef, [path for path, _ in named]
        elif treedef != self._treedef:
            self._fail("", "the outputs have another structure than those of batch 1")
        copies: list[Tensor] = []
        for place, (path, leaf) in enumerate(named):
            if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided or leaf.is_nested:
                kind = type(leaf).__name__ if not isinstance(leaf, Tensor) else f"{leaf.layout} tensor"
                self._fail(path, f"the output is a {kind}, not a dense tensor")
            shape = [*leaf.shape] if leaf.dim() > self._rows else [*leaf.shape, 1]
            if place == len(self._shapes):
                self._shapes.append(shape)
            first = self._shapes[place]
            if _without(shape, self._rows) != _without(first, self._rows):
                self._fail(path, f"the shape is {list(leaf.shape)}, and {first} in batch 1")
            # A copy on the CPU too: the loader may use its memory again.
            copies.append(leaf.detach().to("cpu", copy=True).reshape(shape))
        if counts:
            self._parts.append((index, copies))

    def joined(self) -> Any:
        """Concatenate the outputs of all processes leaf by leaf, and free the parts of each leaf."""
        kinds = processes.gathered((self._paths, [_without(shape, self._rows) for shape in self._shapes]))
        for rank, (paths, shapes) in enumerate(kinds):
            if paths != kinds[0][0]:
                self._fail("", f"the outputs have another structure in process {rank} than in process 0")
            for path, shape, first in zip(paths, shapes, kinds[0][1], strict=True):
                if shape != first:
                    self._fail(
                        path, f"without its rows the shape is {first} in process 0, and {shape} in process {rank}"
                    )
        parts, self._parts = ranks.in_order(self._parts), []
        columns = [list(column) for column in zip(*parts, strict=True)]
        del parts
        whole: list[Tensor] = []
        for column in columns:
            whole.append(torch.cat(column, dim=self._rows))
            column.clear()
        return tree.unflatten(cast(tree.TreeDef, self._treedef), whole)

    def _check_nodes(self, node: Any, path: str) -> None:
        """Raise for a list: its entries may be examples or columns."""
        if isinstance(node, list):
            self._fail(path, "the output is a list, whose entries may be examples or columns")
        items: Any = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, tuple) else ()
        for key, child in items:
            self._check_nodes(child, f"{path}/{key}" if path else str(key))

    def _fail(self, path: str, problem: str) -> None:
        where = f"{self._name}, batch {self._count}" + (f", {path}" if path else "")
        raise StepContractError(problem, where=where, hint=_CURE)
