"""Eager steps that write the new state into the memory of the old one."""

from __future__ import annotations

from collections.abc import Callable
from threading import local
from typing import Any

from torch import Tensor

from .. import tree
from ..errors import ConfigError
from ..step import IDENTITY, static_of
from ..torch_ext import tracing
from ..types import Metrics, Program, Static, TrainState, Tree
from . import live_state
from .compiled_step import CompiledStep
from .live_state import LiveState, Store


class OwnedState(Store):
    """A state whose memory belongs to the steps of one donated program."""

    def __init__(self, state: TrainState, owner: object) -> None:
        super().__init__()
        self.owner = owner
        self.take(state)

    def take(self, state: TrainState) -> None:
        """Hold the state that a call returned."""
        self.named, self.parts, self.exposed, self.is_read = state, [tuple(state)], None, False

    def tensors(self) -> list[Tensor]:
        """The leaves."""
        return tree.leaves(self.named)


class Writes(local):
    """Records whether this thread's call has started to write into its state: a fused kernel's writes do not change the
    version counters of tensors."""

    begun = False

    def begin(self) -> None:
        """Note the first write."""
        self.begun = True


class DonatedStep:
    """A program's train_step or flush over memory that it owns; see `donate`.

    Args:
        eager: the pure step.
        owning: the same step, which may write into the memory of its input.
        writes: common to the steps that may take each other's states.
    """

    def __init__(self, eager: Callable[..., Any], owning: Callable[..., Any], writes: Writes) -> None:
        self.eager = eager
        self._owning = owning
        self._writes = writes

    def __call__(self, state: Any, *batch: Any) -> tuple[Any, Metrics]:
        if tracing.in_graph() or tracing.transformed():
            return self.eager(state, *batch)
        live_state.check_alive(state)
        if not isinstance(state, TrainState):
            return self.eager(state, *batch)  # which raises its own error
        store = self._own(state)
        if store is None:
            plain = TrainState(*state)
            if tracing.followed(plain.params.values()):
                return self.eager(plain, *batch)  # autograd keeps what it has recorded
            params, opt_state, average = tree.clone((plain.params, plain.opt_state, plain.ema))
            store = OwnedState(plain._replace(params=params, opt_state=opt_state, ema=average), self._writes)
        self._writes.begun = False
        store.begin()
        try:
            new, metrics = self._owning(store.named, *batch)
        except BaseException:
            if not self._writes.begun:
                store.undo()
            raise
        store.take(new)
        store.failed = False
        return live_state.live(store, 0), metrics

    def _own(self, state: TrainState) -> OwnedState | None:
        """The memory of a state of these steps; None if it is of others, or has been changed."""
        store = state.live_store if isinstance(state, LiveState) else None
        if isinstance(store, OwnedState) and store.owner is self._writes and store.is_unmodified():
            return store
        return None


def donate(program: Program) -> Program:
    """Let the eager steps of a program write the new state into the memory of the old one, as a loop by hand does.

    Example:
        >>> import torch, purestep as ps
        >>> net = torch.nn.Linear(2, 1)
        >>> program = ps.program(net, ps.supervised(torch.nn.MSELoss()), ps.optim.adamw(0.1))
        >>> step, batch = ps.donate(program).train_step, (torch.ones(4, 2), torch.ones(4, 1))
        >>> first, _ = step(program.init(), batch)
        >>> second, _ = step(first, batch)
        >>> first, int(second.step)
        (TrainState(donated), 2)

    ``train_step`` and ``flush`` return the same numbers as those of the program, bit for bit, in less time and memory:
    optimizers with a fused kernel of torch (`optim.adam`, `optim.adamw`, `optim.sgd`) write weights and moments in
    place, and an average is written in place. What a transform of the user's own computes is new memory as before.

    The first input state is copied and stays valid. Each returned state is invalid once it has been passed in again:
    reading it raises StateError, and tensors taken from it before may show new values. `fit` does this by itself
    (``donate=True``), and `compile_step` has an argument for compiled steps.

    Args:
        program: from `program`, not compiled, for one process.

    Raises:
        ConfigError: the step is user-defined or compiled, or the program is distributed.
        StateError: from a call: the state was passed in before.
    """
    is_one = isinstance(program, Program)  # pyright: ignore[reportUnnecessaryIsInstance]  # may be of any type
    eager = is_one and not isinstance(program.train_step, CompiledStep)
    static = static_of(program.train_step) if eager else None
    if static is None or not can_donate(static):
        what = "distributed" if static is not None else "not one of ps.program with its own eager step"
        hint = "pass the result of ps.program(...); for compiled steps ps.compile_program(program, donate=True)"
        raise ConfigError(f"the program is {what}", where="donate", hint=hint)
    writes = Writes()
    owning = static.made.steps(IDENTITY._replace(before_write=writes.begin))
    flush: Any = program.flush
    if static_of(flush) is static:
        flush = DonatedStep(flush, owning.flush, writes)
    step = DonatedStep(program.train_step, owning.train_step, writes)
    return program._replace(train_step=step, flush=flush)


def can_donate(static: Static) -> bool:
    """True if the steps of one process make up the program."""
    return not static.stream


def released(state: Tree) -> Tree:
    """A live state of `donate` as a plain TrainState, when its steps make no more calls. Any other state as it is."""
    owned = isinstance(state, LiveState) and isinstance(state.live_store, OwnedState)
    return TrainState(*state) if owned and live_state.is_alive(state) else state


def without_donation(program: Program) -> Program:
    """The program before `donate`."""
    train, flush = program.train_step, program.flush
    return program._replace(
        train_step=train.eager if isinstance(train, DonatedStep) else train,
        flush=flush.eager if isinstance(flush, DonatedStep) else flush,
    )
