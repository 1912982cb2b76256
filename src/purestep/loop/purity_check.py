"""Check the first calls of a step: that it is pure, and that gradients reach the parameters."""

from __future__ import annotations

import logging
import sys
from typing import Any

import torch

from ..compile import plain
from ..diagnostics import purity
from ..errors import PurestepError, StepContractError
from ..parallel import passes
from ..step import static_of
from ..torch_ext import tracing
from ..types import Form, Metrics, Params, Program, TrainState, Tree
from .evaluate import check_pair

FIRST = 2  # calls that are checked in every run
_SHOWN = 8  # names in a message
_log = logging.getLogger("purestep")


class PurityCheck:
    """Checks a program's step by two calls in eager mode. A compiled step is a copy of the eager one.

    Args:
        program: not compiled.
        every: calls between two checks after the first ones, 0 for no more; None for none at all.
        compiled: the run uses a compiled step.
    """

    def __init__(self, program: Program, every: int | None, *, compiled: bool) -> None:
        self._step = program.train_step
        self._every = every
        self._compiled = compiled
        self._reach = _GradientReach(program)
        self._made = 0
        self.next_call = sys.maxsize if every is None else 1
        """The number of the next call to check, from 1."""

    def __call__(self, state: Tree, batch: Any, place: str) -> tuple[Tree, Metrics] | None:
        """Return the result of the eager step; None if the memory is too small to check it, or if a step that the run
        uses compiled fails in eager mode. ``place`` is that of the batch, for messages.

        Raises:
            StepContractError: the step is not pure; with the kind of impurity and the leaf.
        """
        self._made += 1
        step = 1 if self._made < FIRST else self._every
        self.next_call = self.next_call + step if step else sys.maxsize
        state = plain(state)
        try:
            with passes.checking():
                result = purity.observe(
                    lambda: check_pair(self._step(state, batch)),
                    {"state": state, "batch": batch},
                    again=lambda: check_pair(self._reach.step(state, batch)),
                    leaks=self._made == 1,
                )
            self._reach.check(state, result[1])
        except purity.Impure as error:
            where = f"train_step, {place}" + (f", {error.where}" if error.where != "step" else "")
            raise StepContractError(error.what, where=where, hint=error.hint) from None
        except torch.OutOfMemoryError:
            return self._unchecked()
        except Exception as error:
            if isinstance(error, PurestepError) or not self._compiled:
                raise
            return self._unchecked()
        finally:
            if self._compiled and torch.cuda.is_initialized():
                torch.cuda.empty_cache()  # eager activations are larger than those of a graph
        return result

    def _unchecked(self) -> None:
        _log.info("the step is not checked: it does not run in eager mode, or not within the memory of the device")


class _GradientReach:
    """Records which parameters get a gradient. ``step`` is the program's step, with hooks into this object."""

    def __init__(self, program: Program) -> None:
        self.step = program.train_step
        static = program.static
        # A wrapped step may do more than the program's own.
        self._known = static is not None and static_of(self.step) is static
        if static is not None and self._known:
            self.step = static.made.steps(Form(lambda stored: stored, self._collect, self._note_unreached)).train_step
        self._reached: set[str] = set()  # parameters with a gradient that is not 0, in any call
        self._unreached: frozenset[str] | None = None  # parameters without a path from the loss, in every call
        self._calls = 0

    def _collect(self, grads: Params) -> Params:
        unknown = [name for name in grads if name not in self._reached]
        if unknown:  # one read for all: each read waits for the device
            flags = torch.stack([tracing.unwrapped(grads[name]).any() for name in unknown]).tolist()
            self._reached |= {name for name, is_there in zip(unknown, flags, strict=True) if is_there}
        return grads

    def _note_unreached(self, names: frozenset[str]) -> dict[str, str]:
        self._unreached = names if self._unreached is None else self._unreached & names
        return {name: name for name in sorted(names)}

    def check(self, state: TrainState, metrics: Metrics) -> None:
        """After the second checked call, warn of parameters that no gradient has reached in either.

        Raises:
            Impure: no parameter has a gradient.
        """
        if not self._known or self._calls == FIRST:
            return
        loss = metrics.get("loss")
        if loss is None or not ((loss.total != 0) & (loss.weight != 0)).any():
            return  # the batch has no targets, or no loss to learn from
        self._calls += 1
        if self._calls < FIRST:
            return
        cure = "take out .detach() between them and the loss; freeze what is not to be trained: requires_grad_(False)"
        if not self._reached:
            names = _few(list(state.params))
            raise purity.Impure(f"the gradient is exactly 0 of every parameter: {names}", where="step", hint=cure)
        unreached = [name for name in state.params if name in (self._unreached or ())]
        if unreached:
            count = f"{len(unreached)} of {len(state.params)}"
            _log.warning("no gradient reaches %s parameters: %s (%s)", count, _few(unreached), cure)


def _few(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
