"""compile_step and compile_program: a pure step as one graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

from ..errors import ConfigError
from ..step import static_of
from ..types import Metrics, Program, Static
from ..validation import is_count
from .capture import check as check_capture
from .compiled_step import CompiledStep
from .eval_step import CompiledEval
from .graph_cache import Options


def compile_step(
    step: Callable[..., tuple[Any, Metrics]],
    *,
    donate: bool | Literal["init"] = False,
    capture: str = "auto",
    backend: Any = "inductor",
    options: Mapping[str, Any] | None = None,
    cuda_graph: bool = False,
    unroll: int = 1,
) -> CompiledStep:
    """The step as one graph, from the forward pass to the EMA.

    Results are those of the eager step but for rounding: operations are fused, and on the CPU products of float32 are
    a kernel of purestep's own where the processor has AVX2 or AVX-512. There a thread that calls compiled steps keeps
    the memory of their intermediates until it ends. Random numbers come from torch's generator of the device, which
    threads share: steps that draw some repeat themselves on one thread at a time. On CUDA they are drawn inside of
    kernels: others than those of the eager step, and the same at every run.

    Compiled code is kept in inductor's cache directory for the next process, which finds it without loading the
    compiler, by the operations that the step consists of (on the CPU, with torch 2.13 or later; not where the step uses
    a tensor that is neither in the state nor in the batch, as a table that an objective closes over is).
    ``TORCHINDUCTOR_CACHE_DIR`` says which directory, and may lie beside the snapshots of a run: then whoever goes on
    with it finds both, on the same processor and with the same installation (as in a container that is started again),
    wherever the directory has been moved to.

    Args:
        step: ``(state, batch, *context) -> (state, metrics)``, a program's or one's own.
        donate: write the new state into the memory of the old one. The first state that goes in is copied and stays
            valid; each state that comes out is dead once it went in again: reading it raises StateError, and tensors
            taken out of it before may show new values. "init": the first state's memory is taken over as well. A tree
            without a TrainState in it cannot say so, and is copied at every call. A call that fails while its graph
            runs (an index out of range) has spoilt the state that went in: go on from a clone or a snapshot.
            False: a program's state is copied at every call, and its tensors are views of a few buffers. On the CPU
            the step keeps the memory of the state that went in last, as long as it lives itself, and makes the next
            copy in it if nobody else holds any of it.
        capture: "dynamo" (torch.compile), "trace" (Python runs once, as under jax.jit) or "auto": the trace, which is
            faster to call, and Dynamo where it does not work.
        backend: of torch.compile.
        options: inductor's configuration.
        cuda_graph: record the donated step as one CUDA graph from its third call on, and replay it; once for every size
            of a batch, 16 at most. Needs ``donate`` and a TrainState; without effect on other devices, and where
            something of the state or the batch lies on the host.
        unroll: up to this many steps a call, for models whose launch costs more than their arithmetic. The callable
            then takes a list of at most ``unroll`` batches and returns the last state and the merged metrics. Random
            numbers are seeded once a call, so a step that draws gives others than one step a call does. Takes no
            context.

    Returns:
        A callable like ``step``. Schedules and changed hyperparameters never compile anew. The first two sizes of a
        batch have a graph each; a third one makes a graph for all others, by torch.compile, or has its own where that
        does not work. A call inside `torch.autocast`, or with torch set to another default dtype, precision of products
        or determinism, has one more.

    Raises:
        ConfigError: a program instead of a step; no such capture; a CUDA graph without donation; ``unroll`` of a step
            that accumulates; a backend that a trace does not have; ``donate`` that is none of the three.
        StateError: from a call: with ``donate``, a state that went in once already.
        StepContractError: from a call: the step changes the structure, a shape or a dtype of its state, multiplies
            tensors of two dtypes, branches on the value of a tensor, keeps a tensor from one capture to the next (a
            module's table made at its first forward pass), seeds torch's generator, or cannot be recorded as a CUDA
            graph.

    Example:
        >>> import torch, purestep as ps
        >>> net = torch.nn.Linear(2, 1)
        >>> program = ps.program(net, ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1))
        >>> step = ps.compile_step(program.train_step, donate=True, backend="aot_eager")
        >>> state, metrics = step(program.init(), (torch.ones(4, 2), torch.ones(4, 1)))
        >>> int(state.step)
        1
    """
    check_capture(capture)
    _check_backend(backend, capture)
    _check_function(step)
    static = static_of(step)
    _check_launch(static, donate=donate, cuda_graph=cuda_graph, unroll=unroll)
    chosen = Options(capture, backend, options)
    return CompiledStep(step, static, donate=donate, options=chosen, cuda_graph=cuda_graph, unroll=unroll)


def compile_program(
    program: Program,
    *,
    donate: bool | Literal["init"] = False,
    capture: str = "auto",
    backend: Any = "inductor",
    options: Mapping[str, Any] | None = None,
    cuda_graph: bool = False,
) -> Program:
    """The program with train_step, flush and eval_step compiled over one set of buffers.

    Args are those of `compile_step`, but for ``unroll``. A state of the compiled train_step goes into flush and
    eval_step without a copy.

    Raises:
        ConfigError: no program, or a setting that does not exist or fit.

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
    check_capture(capture)
    _check_backend(backend, capture)
    _check_launch(program.static, donate=donate, cuda_graph=cuda_graph, unroll=1)
    chosen = Options(capture, backend, options)
    static = static_of(program.train_step)  # of a program whose step somebody has exchanged: None
    train = CompiledStep(program.train_step, static, donate=donate, options=chosen, cuda_graph=cuda_graph)
    flush = program.flush
    if static is not None and static_of(flush) is static:
        flush = CompiledStep(flush, static, donate=donate, options=chosen, flush=True, beside=train)
    return program._replace(
        train_step=train,
        flush=flush,
        eval_step=None if program.eval_step is None else CompiledEval(program.eval_step, chosen),
    )


def _check_function(step: Any) -> None:
    if isinstance(step, Program) or not callable(step):
        hint = "ps.compile_program(program), or ps.compile_step(program.train_step)"
        raise ConfigError(f"the step is a {type(step).__name__}", where="compile_step", hint=hint)


def _check_backend(backend: Any, capture: str) -> None:
    known = ("inductor", "aot_eager", "eager")  # any other name is one of Dynamo's
    if callable(backend) or backend in known or (isinstance(backend, str) and capture != "trace"):
        return
    raise ConfigError(
        f"backend is {backend!r}",
        where="compile_step",
        hint=f"one of {known} or a callable; others that torch.compile knows take capture='dynamo'",
    )


def _check_launch(static: Static | None, *, donate: Any, cuda_graph: bool, unroll: int) -> None:
    if donate not in (False, True, "init"):
        raise ConfigError(f"donate is {donate!r}", where="compile_step", hint='donate=True, False or "init"')
    if cuda_graph and not donate:
        raise ConfigError(
            "a CUDA graph replays on fixed memory, which only a donated state has",
            where="cuda_graph",
            hint="compile_step(step, donate=True, cuda_graph=True)",
        )
    if not is_count(unroll, 1):
        raise ConfigError(f"unroll is {unroll!r}", where="compile_step", hint="unroll=1, or more")
    if unroll > 1 and static is not None and static.accumulate > 1:
        raise ConfigError(
            f"the program accumulates over {static.accumulate} calls, whose graphs differ",
            where="unroll",
            hint="program(..., microbatches=k) to accumulate inside a step, or unroll=1",
        )
