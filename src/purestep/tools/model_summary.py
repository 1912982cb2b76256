"""`summary`: a table of a program's parameters by module."""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from .. import data, tree
from ..data import random_state
from ..errors import ConfigError, StateError
from ..state import stacked
from ..types import Empty, Program, TrainState

_WIDTH = 98  # characters of a line


class ModuleRow(NamedTuple):
    """The parameters of one module, without those of its submodules."""

    module: str  # dotted name; "" for the model itself
    shapes: dict[str, tuple[int, ...]]  # name within the module -> shape
    trained: int  # numbers that the optimizer updates
    frozen: int  # numbers of parameters with requires_grad=False


class ModelSummary(NamedTuple):
    """The result of `summary`; ``str`` returns a table."""

    rows: list[ModuleRow]
    trained: int
    frozen: int
    buffers: int  # numbers in buffers
    parameter_bytes: int  # of trained and frozen parameters
    state_bytes: int  # of the whole state: parameters, buffers, optimizer, average, accumulated gradients
    forward_flops: int | None  # of one batch in eval_step; None without a batch
    step_flops: int | None  # of one batch in train_step: forward, backward and update; None without a batch

    def __str__(self) -> str:
        with random_state.scoped(0):  # the import of rich draws a random number
            from rich.box import SIMPLE
            from rich.console import Console
            from rich.filesize import decimal
            from rich.table import Table

        table = Table(box=SIMPLE, show_edge=False, pad_edge=False, show_footer=True, padding=(0, 1, 0, 0))
        table.add_column("module", "total", overflow="fold")
        table.add_column("shape", no_wrap=True)
        for name, count in (("trained", self.trained), ("frozen", self.frozen)):
            table.add_column(name, f"{count:,}", justify="right", no_wrap=True)
        for row in self.rows:
            table.add_row(row.module or "(model)", _shapes(row), *(f"{count:,}" for count in row[2:]))
        console = Console(file=io.StringIO(), width=_WIDTH, markup=False, highlight=False)
        with console.capture() as text:
            console.print(table)
        sizes = f"parameters {decimal(self.parameter_bytes)}, state {decimal(self.state_bytes)}"
        notes = [f"buffers {self.buffers:,}, {sizes}"]
        if self.forward_flops is not None and self.step_flops is not None:
            notes.append(f"FLOPs a batch: forward {self.forward_flops:,}, train step {self.step_flops:,}")
        return "\n".join([*map(str.rstrip, text.get().splitlines()), *notes])


def summary(program: Program, state: TrainState, batch: Any = None) -> ModelSummary:
    """Count the parameters of a program by module: trained and frozen, and the FLOPs of a batch.

    Example:
        >>> import torch, purestep as ps
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> program = ps.program(net, ps.supervised(torch.nn.MSELoss()), ps.optim.adamw(1e-3))
        >>> print(summary(program, program.init(), (torch.ones(2, 4), torch.ones(2, 1))))
        module  shape   trained  frozen
        ───────────────────────────────
        0       8x4, 8       40       0
        2       1x8, 1        9       0
        ───────────────────────────────
        total                49       0
        buffers 0, parameters 196 bytes, state 680 bytes
        FLOPs a batch: forward 160, train step 352

    A parameter that is tied counts once, under its first name. A parameter that `optim.freeze` holds counts as trained,
    since it has a gradient and moments. FLOPs are those of matrix products, convolutions and attention, as
    `torch.utils.flop_counter` counts them: a multiplication and an addition are 2; elementwise operations and kernels
    without a formula are 0.

    Args:
        program: from `program`, not compiled if there is a batch.
        state: of this program, whole; it is only read.
        batch: one batch of the training loader, of which ``eval_step`` and ``train_step`` run once. None: no FLOPs.

    Returns:
        Rows in the order of the model (modules that are wholly frozen come last), and totals.

    Raises:
        ConfigError: with a batch, the program is compiled: the counter does not see compiled kernels.
        StateError: the state is no TrainState, is spread over processes, or halted.
    """
    stacked.check_plain(state, where="summary")
    state = TrainState(*state)
    rows = _rows(program, state)
    flops = (None, None) if batch is None else _counted(program, state, batch)
    return ModelSummary(
        rows,
        sum(row.trained for row in rows),
        sum(row.frozen for row in rows),
        sum(map(torch.Tensor.numel, state.buffers.values())),
        sum(leaf.nbytes for leaf in (*state.params.values(), *state.frozen.values())),
        sum(leaf.nbytes for leaf in tree.leaves(state) if isinstance(leaf, Tensor)),
        *flops,
    )


def _rows(program: Program, state: TrainState) -> list[ModuleRow]:
    named = {**state.params, **state.frozen}
    static = program.static
    # Trained and frozen parameters may alternate in a module.
    order = dict.fromkeys([*(() if static is None else (*static.trained, *static.frozen)), *named])
    modules: dict[str, list[str]] = {}
    for name in filter(named.__contains__, order):
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    return [
        ModuleRow(
            module,
            {name.rpartition(".")[2]: tuple(named[name].shape) for name in names},
            sum(named[name].numel() for name in names if name in state.params),
            sum(named[name].numel() for name in names if name in state.frozen),
        )
        for module, names in modules.items()
    ]


def _counted(program: Program, state: TrainState, batch: Any) -> tuple[int, int]:
    if hasattr(program.train_step, "graphs"):
        raise ConfigError(
            "the program is compiled, and FLOPs are counted in eager mode",
            where="summary",
            hint="pass the program before compile_program, or no batch",
        )
    if not isinstance(state.halted, Empty) and int(state.halted):
        raise StateError("the state halted, so a step would do nothing", where="summary", hint="program.init()")
    batch = data.to_device(batch, state)
    with FlopCounterMode(display=False) as forward:
        if program.eval_step is not None:
            program.eval_step(state, batch)
    with FlopCounterMode(display=False) as step:
        program.train_step(state, batch)
    return forward.get_total_flops(), step.get_total_flops()


def _shapes(row: ModuleRow) -> str:
    return ", ".join("x".join(map(str, shape)) or "scalar" for shape in row.shapes.values())
