"""What fit looks at on the first calls of a step, and on every n-th where that is asked for: whether it is pure, and
whether gradients reach the parameters."""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch
from torch import Tensor

from .. import data, tree
from ..compile import plain
from ..diagnostics import purity
from ..errors import PurestepError, StepContractError
from ..step import static_of
from ..types import Form, Metrics, Params, Program, TrainState, Tree
from .evaluate import check_pair

FIRST = 2  # calls that are looked at in every run
_ROOM = 3  # states that have to fit into what is free on the device, beside the one that is trained
_SHOWN = 8  # names in a message
_log = logging.getLogger("purestep")


class Looks:
    """Looks at a program's step: always at the one in eager, of which a compiled one is a copy.

    Args:
        program: not compiled.
        every: calls between two looks after the first ones, 0 for no more; None for none at all.
        compiled: whether the run goes on with another step than this one.
    """

    def __init__(self, program: Program, every: int | None, *, compiled: bool) -> None:
        self._step = program.train_step
        self._every = every
        self._compiled = compiled
        self._reach = _Reach(program)
        self._made = 0
        self.due = sys.maxsize if every is None else 1
        """The number of the call, from 1, to look at next."""

    def __call__(self, state: Tree, batch: Any, place: str) -> tuple[Tree, Metrics] | None:
        """What the step in eager returns; None where there is no memory to find out.

        Args:
            state: left as it is, as is the batch.
            batch: what the step takes.
            place: of the batch, for messages.

        Raises:
            StepContractError: the step is not pure; with the kind of impurity and the leaf.
        """
        self._made += 1
        self.due = self.due + 1 if self._made < FIRST else self.due + self._every if self._every else sys.maxsize
        given = plain(state)
        if not _has_room(given):
            return self._not_looked()
        try:
            found = self._observed(given, batch)
            self._reach.check(given, found[1])
        except purity.Impure as error:
            where = f"train_step, {place}" + (f", {error.where}" if error.where != "step" else "")
            raise StepContractError(error.what, where=where, hint=error.hint) from None
        except torch.OutOfMemoryError:
            return self._not_looked()
        except Exception as error:
            # What stops the step in eager alone is no concern of a run that has another one.
            if isinstance(error, PurestepError) or not self._compiled:
                raise
            return self._not_looked()
        finally:
            if self._compiled and torch.cuda.is_initialized():
                torch.cuda.empty_cache()  # activations in eager are larger than those of a graph
        return found

    def _observed(self, state: Tree, batch: Any) -> tuple[Tree, Metrics]:
        return purity.observe(
            lambda: check_pair(self._step(state, batch)),
            {"state": state, "batch": batch},
            again=lambda: check_pair(self._reach.step(state, batch)),
            leaks=self._made == 1,
        )

    def _not_looked(self) -> None:
        _log.info("the step was not looked at: it does not run twice in eager on what memory there is")


def _has_room(state: Tree) -> bool:
    device = data.device_of(state)
    if device.type != "cuda":
        return True
    needed = _ROOM * sum(leaf.nbytes for leaf in tree.leaves(state) if isinstance(leaf, Tensor))
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device) >= needed


class _Reach:
    """Which parameters gradients have reached: ``step`` is the program's, and tells this object."""

    def __init__(self, program: Program) -> None:
        self.step = program.train_step
        static = program.static
        # A step that somebody wrapped may do more than the program's own.
        self._known = static is not None and static_of(self.step) is static
        if static is not None and self._known:
            self.step = static.steps(Form(lambda stored: stored, self._collect, self._tell)).train_step
        self._reached: set[str] = set()
        self._without: frozenset[str] | None = None  # no path leads from the loss to these, in any call
        self._calls = 0

    def _collect(self, grads: Params) -> Params:
        unknown = [name for name in grads if name not in self._reached]
        if unknown:  # read at once: each read waits for the device
            found = torch.stack([grads[name].any() for name in unknown]).tolist()
            self._reached |= {name for name, is_there in zip(unknown, found, strict=True) if is_there}
        return grads

    def _tell(self, unreached: frozenset[str]) -> dict[str, str]:
        self._without = unreached if self._without is None else self._without & unreached
        return {name: name for name in sorted(unreached)}

    def check(self, state: TrainState, metrics: Metrics) -> None:
        """After the second look, name the parameters that neither loss leads to.

        Raises:
            Impure: it was so of all of them.
        """
        if not self._known or self._calls == FIRST or not _counts(metrics):
            return
        self._calls += 1
        if self._calls < FIRST:
            return
        cure = "take out .detach() between them and the loss; freeze what is not to be trained: requires_grad_(False)"
        if not self._reached:
            names = _few(list(state.params))
            raise purity.Impure(f"the gradient is exactly 0 of every parameter: {names}", where="step", hint=cure)
        silent = [name for name in state.params if name in (self._without or ())]
        if silent:
            count = f"{len(silent)} of {len(state.params)}"
            _log.warning("no gradient reaches %s parameters: %s (%s)", count, _few(silent), cure)


def _few(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def _counts(metrics: Metrics) -> bool:
    """Whether this batch had something to learn from."""
    loss = metrics.get("loss")
    return loss is not None and bool(((loss.total != 0) & (loss.weight != 0)).any())
