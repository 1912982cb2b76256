"""Capture of a function of tensors as one graph.

The Python runs once, on fake tensors, and the recorded operations are compiled, as under `jax.jit`. The compiled
code checks nothing; `compiled_step` compares the inputs before. A branch on the value of a tensor is an error.
"""

from __future__ import annotations

import importlib
import logging
import traceback
import types
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from .. import rng
from ..errors import PurestepError, StepContractError
from ..torch_ext import draws, global_rng, host_generators, tracing
from . import backends, code_directory, control_flow, fx_passes, inductor_fixes, recurrent_layers, sizes
from .outside import Unwritten, lifted

if TYPE_CHECKING:  # loading torch.fx's tracing doubles the time of `import purestep`
    from torch.fx import GraphModule

Flat = Callable[..., Any]
"""``f(*tensors) -> tensors``"""

Compiled = Callable[[list[Tensor]], Any]
"""``f(tensors) -> tensors``; may empty its argument"""

log = logging.getLogger("purestep")


@contextmanager
def exclusive() -> Generator[None]:
    """Let one thread at a time trace and compile: both patch torch, and a trace swaps tensors in the module. Eager
    steps and draws of other threads wait too, and so does their `torch.compile`."""
    dynamo: Any = importlib.import_module("torch._dynamo.convert_frame")
    with global_rng.locked(), dynamo.compile_lock:  # in this order: a thread with the second never asks for the first
        yield


class Uncaptured(StepContractError):
    """The step cannot be captured as a graph. `fit(compile="auto")` runs it in eager mode."""


class Traits(NamedTuple):
    """Properties of a graph, for those who call it."""

    draws: bool  # random numbers
    recordable: bool  # as a CUDA graph: it calls only operators of torch and purestep, which never ask the host


def compile_graph(
    function: Flat, inputs: list[Tensor], *, backend: Any, options: Mapping[str, Any] | None
) -> tuple[Compiled, Traits, list[Tensor]]:
    """Compile one graph of ``function`` for inputs of these shapes; return it, its traits, and the tensors that the
    function reads besides its inputs, which the graph takes after them. Inside `exclusive`.

    Args:
        function: takes tensors, returns a list of tensors; may write its inputs in place.
        inputs: examples, which are not written; a tensor that occurs twice counts as two inputs.
        backend: "inductor", "aot_eager" or "eager" (both run the traced operations one by one), or a callable
            ``(graph_module, inputs) -> callable``.
        options: inductor's configuration.

    Raises:
        Uncaptured: the Python code branches on the value of a tensor.
    """
    inputs, run = _distinct(inputs), _traceable(function)
    plugin = backends.plugin(inputs) if backend == "inductor" else None
    failed: Exception | None = None
    context = plugin.while_traced() if plugin is not None else nullcontext()
    with tracing.capturing(), torch.no_grad(), tracing.no_recurrent_kernel(), context:
        graph, outside = _traced(run, inputs)
    inputs = [*inputs, *(leaf.detach() for leaf in outside)]
    if plugin is not None and plugin.suits(inputs):
        try:
            with tracing.capturing(), torch.no_grad(), autocast_disabled(), _function_modes_removed():
                made = plugin.compiled(graph, inputs, options=options)
            if made is not None:
                return _outside_autocast(made[0]), Traits(made[1], fx_passes.is_recordable(graph)), outside
        except PurestepError:
            raise
        except Exception as error:
            failed = error
    with tracing.capturing(), torch.no_grad():
        graph = fx_passes.checked(fx_passes.reshaped(graph))
    traits = Traits(fx_passes.draws(graph), fx_passes.is_recordable(graph))
    with autocast_disabled(), _function_modes_removed():
        compiled = _by_public_entry(graph, inputs, backend, options)
    if plugin is not None and failed is not None:
        warn_fallback(plugin, failed)
    return _outside_autocast(compiled), traits, outside


def compile_sizes(
    function: Flat,
    inputs: list[Tensor],
    leaves: list[Tensor],
    dims: sizes.Varying,
    *,
    backend: Any,
    options: Mapping[str, Any] | None,
) -> tuple[Compiled, Traits, list[Tensor], Callable[[list[Tensor]], bool]] | None:
    """Compile one graph for batches of many sizes.

    Args:
        function: of ``inputs`` followed by ``leaves``; as for `compile_graph`.
        inputs: tensors of the state.
        leaves: tensors of a batch, every varying size at least 2.
        dims: which dimensions of each leaf vary.
        backend: as for `compile_graph`.
        options: the same.

    Returns:
        As `compile_graph`, and a function from a batch's tensors to whether the graph accepts them. None if a varying
        size became a constant.
    """
    from torch import _guards

    if not isinstance(backend, str):  # a user's backend gets real tensors
        return None
    symbols = sizes.Symbols(_distinct(inputs), _distinct(leaves), dims)
    with tracing.capturing(), torch.no_grad(), tracing.no_recurrent_kernel(), symbols.mode:
        graph, outside = _traced(_traceable(function), symbols.fakes, "real")
        graph = fx_passes.checked(fx_passes.reshaped(graph))
    if not symbols.vary():
        return None
    traits = Traits(fx_passes.draws(graph), fx_passes.is_recordable(graph))
    fakes = [*symbols.fakes, *(symbols.mode.from_tensor(leaf.detach(), static_shapes=True) for leaf in outside)]
    with autocast_disabled(), _guards.tracing(_guards.TracingContext(symbols.mode)):
        run = _by_public_entry(graph, fakes, backend, options, shapes="from_tracing_context")
    return _outside_autocast(run), traits, outside, symbols.fits()


def warn_fallback(plugin: types.ModuleType, error: Exception) -> None:
    """Log that a graph is compiled by inductor alone, because the plug-in failed."""
    log.warning("%s cannot compile the step; torch alone compiles it: %r", plugin.__name__, error)


def _outside_autocast(run: Compiled) -> Compiled:
    """Disable autocast in the calls of a graph, if it is on now: it is on in every later call of this graph too."""
    core: Any = importlib.import_module("torch._C")
    if not core._is_any_autocast_enabled():
        return run

    def call(tensors: list[Tensor]) -> Any:
        with autocast_disabled():
            return run(tensors)

    return call


def autocast_disabled() -> Any:
    """Disable the caller's autocast inside: a graph already contains its casts."""
    core: Any = importlib.import_module("torch._C")
    return core._DisableAutocast()


@contextmanager
def _function_modes_removed() -> Generator[None]:
    """Remove the caller's torch function modes inside: the trace has called them, a compiler would call them again."""
    functions: Any = importlib.import_module("torch.overrides")
    modes = [functions._pop_mode() for _ in range(functions._len_torch_function_stack())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            functions._push_mode(mode)


def _distinct(inputs: list[Tensor]) -> list[Tensor]:
    """Replace repeated inputs by distinct tensors: a graph would merge them into one input, and later calls with two
    different tensors would be wrong."""
    seen, found = set[int](), list[Tensor]()
    for leaf in inputs:
        found.append(leaf.detach().requires_grad_(leaf.requires_grad) if id(leaf) in seen else leaf)
        seen.add(id(leaf))
    return found


EAGER_CURE = (
    "call the step itself, in eager mode (in fit: compile=False), or torch.compile(program.train_step), which compiles "
    "the code around such a line"
)
"""The cure for a step that no trace accepts."""

_SIZE_ERRORS = ("expected to contain only concrete integers", "when unpacking SymInt, expected int")
"""Parts of errors of torch's C++ about a size that is unknown until the step runs."""

_CAPTURE_SEED = 1 << 40  # initial seed of a capture: large, so that draw positions do not collide with the step's seeds


@contextmanager
def _as_in_a_graph() -> Generator[None]:
    """Run a function as its graph will run: draws are recorded, `torch.compiler.is_compiling()` returns True, and
    nothing is drawn from numpy's or Python's generator, of which a graph would repeat the numbers."""
    compiler: Any = torch.compiler  # no public function sets the flag
    was_compiling, before = compiler._is_compiling_flag, host_generators.states()
    compiler._is_compiling_flag = True
    try:
        with rng.scoped(_CAPTURE_SEED), draws.Draws(), tracing.replaying(), Unwritten():
            yield
    finally:
        compiler._is_compiling_flag = was_compiling
    after = host_generators.states()
    for name, one, other in zip(("numpy's", "Python's"), before, after, strict=True):
        if one != other:
            raise Uncaptured(
                f"the step draws from {name} global generator, and a graph would repeat these numbers at every call",
                where="step",
                hint="draw with torch, or in the loader; or call the step in eager mode (in fit: compile=False)",
            )


def _traceable(function: Flat) -> Flat:
    """Wrap the function for a trace: draws are replayed, and reads of values raise Uncaptured."""

    def run(*tensors: Tensor) -> Any:
        try:
            on_gpu = any(tensor.is_cuda for tensor in tensors)
            with _as_in_a_graph(), recurrent_layers.Cells(_long_sequence) if on_gpu else nullcontext():
                return function(*tensors)
        except draws.RefusedDraw as error:
            raise Uncaptured(error.what, where=_where(error), hint=error.hint) from error
        except PurestepError:
            raise
        except _data_dependent() as error:
            raise _value_read(error, str(error).strip().partition("\n")[0]) from error
        except RuntimeError as error:
            if not any(words in str(error) for words in _SIZE_ERRORS):
                raise
            raise _value_read(error, "a size is read from it") from error

    return run


def _traced(
    function: Flat, inputs: list[Tensor], mode: Literal["fake", "real"] = "fake"
) -> tuple[GraphModule, list[Tensor]]:
    """The graph of a function, and the tensors that it reads besides its inputs, which are further inputs."""
    from torch.fx.experimental.proxy_tensor import make_fx

    # Those tensors are real ones among fake ones.
    with control_flow.aliased_inputs_allowed():
        graph: GraphModule = make_fx(function, tracing_mode=mode, _allow_non_fake_inputs=True)(*inputs)
    return lifted(fx_passes.without_copies(graph))


def _long_sequence(text: str) -> Uncaptured:
    return Uncaptured(
        text,
        where="step",
        hint="call the step itself, in eager mode, where cuDNN's kernel runs (in fit: compile=False); or pass shorter "
        "sequences",
    )


def _data_dependent() -> tuple[type[BaseException], ...]:
    from torch._subclasses import fake_tensor  # these errors have no public name
    from torch.fx.experimental import symbolic_shapes

    return (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        symbolic_shapes.GuardOnDataDependentSymNode,
    )


def _by_public_entry(
    graph: GraphModule,
    inputs: list[Tensor],
    backend: Any,
    options: Mapping[str, Any] | None,
    *,
    shapes: str = "from_example_inputs",
) -> Compiled:
    if backend in ("eager", "aot_eager"):
        return _unpacked(graph)
    if backend != "inductor":
        return _unpacked(backend(graph, inputs))
    code_directory.directory(whole=True)
    # `standalone_compile` is documented, but not yet public.
    inductor: Any = importlib.import_module("torch._inductor")
    on_cpu = all(leaf.device.type == "cpu" for leaf in inputs)
    own = fx_passes.rounding(graph) | dict(options or {})
    chosen = {"config_patches": backends.inductor_options(own, on_cpu=on_cpu)}
    names = control_flow.operators(graph)
    inductor_fixes.before(graph.graph)
    backends.register_fallbacks(graph)
    try:
        graph = control_flow.copy_operands(graph) if names else graph
        made = inductor.standalone_compile(graph, inputs, dynamic_shapes=shapes, options=chosen)
    except Exception as error:
        if not names:
            raise
        raise Uncaptured(
            f"inductor cannot compile {', '.join(names)}", where="step", hint=control_flow.cure(names)
        ) from error
    return limit_threads(_unpacked(made), torch.get_num_threads())


def _unpacked(run: Flat) -> Compiled:
    """Wrap ``run`` to take a list, without autograd: the graph contains the gradient."""

    def call(tensors: list[Tensor]) -> Any:
        with torch.no_grad():
            return run(*tensors)

    return call


def limit_threads(run: Compiled, most: int) -> Compiled:
    """Wrap ``run`` to use at most ``most`` threads: inductor allocated partial sums for that many."""

    def call(tensors: list[Tensor]) -> Any:
        threads = torch.get_num_threads()
        if threads <= most:
            return run(tensors)
        torch.set_num_threads(most)
        try:
            return run(tensors)
        finally:
            torch.set_num_threads(threads)

    return call


_CURE = (
    "use torch.where(condition, a, b) instead of if; no .item(), no float(tensor), no boolean indexing; a size of a "
    "shape (x.shape[-1]), or a number from the loader"
)
_CURES_OF_TORCH = {
    "_detect_is_causal_mask": "torch compares the mask with a causal one: pass is_causal=True or False to "
    "nn.TransformerEncoder, tgt_is_causal to nn.TransformerDecoder, and src_is_causal and tgt_is_causal to "
    "nn.Transformer",
    "distribution": "pass validate_args=False to the distribution, which compares its arguments on the host",
    "batchnorm": "set momentum=0.1 in the BatchNorm layer: with None it divides by a count of batches on the host",
    "ctc_loss": "compute ctc_loss outside of the graph: it reads its lengths on the host",
    "gaussian_nll_loss": "torch's gaussian_nll_loss reads it: write gaussian_nll_loss without that check",
}
"""A function or file of torch that reads a value -> the cure."""


def _value_read(error: BaseException, met: str) -> Uncaptured:
    """The error for a read of a tensor's value, with a cure."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    of_torch = [code for code in codes if code.co_filename.startswith(tracing.LIBRARIES[0])]
    found = (
        cure
        for name, cure in _CURES_OF_TORCH.items()
        if any(code.co_name == name or code.co_filename.endswith(f"{name}.py") for code in of_torch)
    )
    cure = next(found, _CURE)
    what = f"the step reads the value of a tensor: {met}"
    return Uncaptured(what, where=_where(error), hint=f"{cure}; or {EAGER_CURE}")


def _where(error: BaseException) -> str:
    """The innermost line of the traceback outside torch and purestep, or else the layer."""
    if line := tracing.user_line(error):
        return line
    held = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    kinds = [type(each) for each in held if isinstance(each, torch.nn.Module)]
    names = [kind.__name__ for kind in kinds if not kind.__module__.startswith("purestep.")]
    return f"a {names[-1]}" if names else "step"


def failed(error: Exception) -> Uncaptured:
    """The error to raise after torch's trace, or the compiler, has failed in an unknown way."""
    met = next(iter(str(error).strip().splitlines()), "")
    return Uncaptured(
        f"torch cannot compile the step: {type(error).__name__}: {met}",
        where=_where(error),
        hint=f"correct this call or remove it; or {EAGER_CURE}",
    )
