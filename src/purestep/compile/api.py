"""`compile_step` and `compile_program`: compile a pure step into one graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from ..errors import ConfigError
from ..state import check_choice
from ..step import static_of
from ..types import Metrics, Program, Static
from .compiled_step import CompiledStep
from .eager_donation import DonatedStep, without_donation
from .eval_step import CompiledEval
from .graphs import Options


def compile_step(
    step: Callable[..., tuple[Any, Metrics]],
    *,
    donate: bool | Literal["init"] = False,
    backend: Any = "inductor",
    options: Mapping[str, Any] | None = None,
    cuda_graph: bool | None = None,
) -> CompiledStep:
    """Compile a step into one graph, from the forward pass to the EMA.

    Example:
        >>> import torch, purestep as ps
        >>> net = torch.nn.Linear(2, 1)
        >>> program = ps.program(net, ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1))
        >>> step = ps.compile_step(program.train_step, donate=True, backend="aot_eager")
        >>> state, metrics = step(program.init(), (torch.ones(4, 2), torch.ones(4, 1)))
        >>> int(state.step)
        1

    Results equal those of the eager step but for rounding: operations are fused, and on a CPU with AVX2 or AVX-512
    float32 matrix products use a kernel of purestep. On the CPU each thread that calls compiled steps keeps the memory
    of their intermediates until it ends. Random numbers come from torch's generator of the device, which all threads
    share: a step that draws is reproducible only on one thread at a time. On CUDA kernels draw the numbers: they differ
    from those of the eager step, and are the same in every run.

    The Python of a step runs once for each graph, on tensors without values. A tensor outside of the state and the
    batch (of a teacher in the objective's closure, a table) is an input of the graph: each call reads it as it is, so
    writes in place, ``load_state_dict`` and ``tensor.data.copy_`` count. Numbers and objects are constants of the
    graph. If another one is assigned to a name that the code of the objective or of a user-defined step reads (a
    variable of its closure, a global), or one level below it or a default (an item of a dict or list, an attribute, a
    tensor or layer of a module), the step is compiled again, with one warning. What lies deeper, such as a number that
    a function called by the objective reads, stays what it was at the first call. A step that writes a tensor outside,
    stores one there or reads its value (``float(scale)``) is refused.

    Compiled code is stored in inductor's cache directory (``TORCHINDUCTOR_CACHE_DIR``). The next process looks it up by
    the operations of the step (on the CPU, with torch 2.13). The directory may be moved, and may lie with the
    snapshots of a run: it is valid for the same processor and installation, as in a restarted container.

    A model that reads the value of a tensor (``if loss > 0``, ``.item()``) is refused. It trains in eager mode, or by
    ``torch.compile(program.train_step)``, which compiles the code around such a line. There the state's key stays where
    it is, and dropout draws from torch's global generator.

    Args:
        step: ``(state, batch, *context) -> (state, metrics)``, of a program or user-defined.
        donate: write the new state into the memory of the old one. The first input state is copied and stays valid.
            Each returned state is invalid once it has been passed in again: reading it raises StateError, and tensors
            taken from it before may show new values. "init": the memory of the first state is taken over as well. A
            state is a TrainState or a tree of TrainStates (a NamedTuple, tuple, list or dict); a tree with other leaves
            is copied at every call. A call that fails while its graph runs (an index out of range) leaves its input
            state invalid: continue from a clone or a snapshot. False: the state is copied at every call, and the
            returned tensors are views of a few new buffers.
        backend: "inductor"; "aot_eager" or "eager", which run the traced operations one by one; or a callable
            ``(graph_module, inputs) -> callable``.
        options: inductor's configuration.
        cuda_graph: record the donated step as one CUDA graph at its third call, and replay it; one graph for each batch
            size, at most 16. None: where it can be recorded, calls only torch's operators, takes less than an eighth of
            the device's memory for its intermediates, and runs in one process. True: always; an error if it cannot be
            recorded. Needs ``donate`` and a TrainState, or a tree of them. No effect on other devices, or if a tensor
            of the state or the batch is on the host.

    Returns:
        A callable like ``step``. Schedules and changed hyperparameters never cause a recompile. The first two batch
        sizes get a graph each; the third compiles one graph for all other sizes, which is compiled again when another
        dimension varies; a size that it cannot take gets a graph. ``step.batch_sizes``, as JSON, lists the sizes that
        have decided this: `fit` stores it in snapshots, so that a resumed run
        chooses the same graphs and ends in the same bits. In your own loop store it with the state, and set it in the
        new process before the first call. A number in the batch or the context that changes compiles a graph for each
        value, with one warning at first and an error after 16 changes: pass it as a tensor. A call inside
        `torch.autocast`, or with another default dtype, matmul precision or determinism setting of torch, compiles one
        more graph.

    Raises:
        ConfigError: ``step`` is a program; an unknown ``backend`` or ``donate``; a CUDA graph without donation.
        StateError: from a call: with ``donate``, the state was passed in before.
        StepContractError: from a call: a number of the batch changed too often; the step changes the structure, a shape
            or a dtype of its state, multiplies tensors of two dtypes, branches on the value of a tensor, writes a
            tensor that is not in its state, stores a tensor between captures (a module's table built in its first
            forward pass), seeds torch's generator, or cannot be recorded as a CUDA graph.
    """
    _check_backend(backend)
    _check_function(step)
    step = step.eager if isinstance(step, DonatedStep) else step
    static = static_of(step)
    _check_launch(static, donate=donate, cuda_graph=cuda_graph)
    chosen = Options(backend, options)
    return CompiledStep(step, static, donate=donate, options=chosen, cuda_graph=cuda_graph)


def compile_program(
    program: Program,
    *,
    donate: bool | Literal["init"] = False,
    backend: Any = "inductor",
    options: Mapping[str, Any] | None = None,
    cuda_graph: bool | None = None,
) -> Program:
    """Compile train_step, flush and eval_step of a program over one set of buffers.

    The arguments are those of `compile_step`. flush and eval_step take a state of train_step without a copy.

    Raises:
        ConfigError: ``program`` is not a program, or a setting is unknown or conflicts with another.

    Example:
        >>> import torch, purestep as ps
        >>> net = torch.nn.Linear(2, 1)
        >>> program = ps.program(net, ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1))
        >>> fast = ps.compile_program(program, donate=True, backend="aot_eager")
        >>> state, _ = fast.train_step(program.init(), (torch.ones(4, 2), torch.ones(4, 1)))
        >>> sorted(fast.eval_step(state, (torch.ones(4, 2), torch.ones(4, 1))))
        ['loss']
    """
    if not isinstance(program, Program):  # pyright: ignore[reportUnnecessaryIsInstance]  # a step, mostly
        hint = "ps.compile_step(step), or ps.compile_program(program)"
        raise ConfigError(f"the program is a {type(program).__name__}", where="compile_program", hint=hint)
    _check_backend(backend)
    program = without_donation(program)
    _check_launch(program.static, donate=donate, cuda_graph=cuda_graph)
    chosen = Options(backend, options)
    static = static_of(program.train_step)  # None if the program's step was replaced
    train = CompiledStep(program.train_step, static, donate=donate, options=chosen, cuda_graph=cuda_graph)
    flush = program.flush
    if static is not None and static_of(flush) is static:
        flush = CompiledStep(flush, static, donate=donate, options=chosen, flush=True, shared_with=train)
    return program._replace(
        train_step=train,
        flush=flush,
        eval_step=None if program.eval_step is None else CompiledEval(program.eval_step, chosen),
    )


def _check_function(step: Any) -> None:
    if isinstance(step, Program) or not callable(step):
        hint = "ps.compile_program(program), or ps.compile_step(program.train_step)"
        raise ConfigError(f"the step is a {type(step).__name__}", where="compile_step", hint=hint)


def _check_backend(backend: Any) -> None:
    known = ("inductor", "aot_eager", "eager")
    if not callable(backend):
        also = "a callable; torch.compile(program.train_step, backend=...) takes others"
        check_choice("compile_step", known, also=also, backend=backend)


def evaluates_again(static: Static | None) -> bool:
    """True if the transform of a program evaluates the loss again: no graph does that as often as its values say."""
    return static is not None and getattr(static.tx, "evaluates", False)


def _check_launch(static: Static | None, *, donate: Any, cuda_graph: bool | None) -> None:
    if evaluates_again(static):
        raise ConfigError(
            "the transform evaluates the loss as often as its values say, which no graph does",
            where="compile_step",
            hint="train in eager mode: compile=False",
        )
    check_choice("compile_step", (True, False, "init"), donate=donate)
    if cuda_graph and not donate:
        raise ConfigError(
            "a CUDA graph replays on fixed memory, which only a donated state has",
            where="cuda_graph",
            hint="compile_step(step, donate=True, cuda_graph=True)",
        )
