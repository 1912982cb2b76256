"""From a function of tensors to one graph: the only place that calls torch.compile.

``"dynamo"`` is `torch.compile(fullgraph=True)`. ``"trace"`` runs the Python once on fake tensors and compiles what it
did, as `jax.jit` does: no guards are checked at call time, code that Dynamo cannot read is no obstacle, and a branch on
the value of a tensor is an error. ``"auto"`` traces, and takes Dynamo where that does not work.
"""

from __future__ import annotations

import importlib
import logging
import traceback
import types
import uuid
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from .. import global_rng, rng, tracing, tree
from ..errors import ConfigError, PurestepError, StepContractError
from ..step import NoSetupContext, last_unreached
from . import backends, control_flow, dynamic_shapes, formats, fx_passes, precision_casts, random_ops
from .compile_lock import with_compiler

if TYPE_CHECKING:  # loading torch.fx's tracing doubles the time of `import purestep`
    from torch.fx import GraphModule

Flat = Callable[..., Any]
"""``f(*tensors) -> tensors``"""

Compiled = Callable[[list[Tensor]], Any]
"""``f(tensors) -> tensors``; may empty the list it is given"""

log = logging.getLogger("purestep")

CAPTURES = ("auto", "dynamo", "trace")
_LIBRARIES = (torch.__file__.rpartition("__init__")[0], __file__.rpartition("compile")[0])


class Uncaptured(StepContractError):
    """No graph can be made of this; in eager it runs."""


class DataDependent(Uncaptured):
    """The step looks at the value of a tensor, which a trace does not have."""


def trace(
    function: Flat, inputs: list[Tensor], *, backend: Any, options: Mapping[str, Any] | None
) -> tuple[Compiled, bool]:
    """One graph of ``function`` for inputs of these shapes, and whether it draws random numbers.

    Args:
        function: flat in, list of tensors out; may write its inputs in place.
        inputs: tensors that are only looked at; one that is there twice counts as two.
        backend: "inductor", "aot_eager" or "eager" (both run the traced operations one by one), or a callable
            ``(graph_module, inputs) -> callable`` as torch.compile takes.
        options: inductor's configuration.

    Raises:
        DataDependent: the Python branches on the value of a tensor.
    """
    run, is_drawing = _made(_recorded(function), _each_its_own(inputs), backend, options)
    core: Any = importlib.import_module("torch._C")
    if core._is_any_autocast_enabled():  # and will be in every call of this graph
        return _below_autocast(run), is_drawing
    return run, is_drawing


def trace_sizes(
    function: Flat,
    inputs: list[Tensor],
    leaves: list[Tensor],
    dims: dynamic_shapes.Varying,
    *,
    backend: Any,
    options: Mapping[str, Any] | None,
) -> tuple[Compiled, bool, Callable[[list[Tensor]], bool]] | None:
    """One graph for batches of many sizes, whether it draws, and whether it serves given tensors of a batch.

    Args:
        function: of ``inputs`` and then ``leaves``; as for `trace`.
        inputs: tensors of the state.
        leaves: tensors of a batch, every varying size at least 2.
        dims: which dimensions of each leaf vary.
        backend: as for `trace`.
        options: the same.

    Returns:
        None where a size that varies became a constant.
    """
    from torch import _guards

    if not isinstance(backend, str):  # one of the user's own is given real tensors
        return None
    with with_compiler():
        symbols = dynamic_shapes.Symbols(_each_its_own(inputs), _each_its_own(leaves), dims)
        casts = precision_casts.Casts()
        with tracing.capturing(), torch.no_grad(), no_recurrent_kernel(), symbols.mode, casts:
            graph = fx_passes.finished(fx_passes.views_allowed(_traced(_recorded(function), symbols.fakes, "real")))
        if not symbols.vary():
            return None
        is_drawing, shapes = fx_passes.draws(graph), "from_tracing_context"
        with below_autocast(), _guards.tracing(_guards.TracingContext(symbols.mode)):
            run = _lowered(graph, symbols.fakes, backend, options, rounds=casts.seen, shapes=shapes)
        core: Any = importlib.import_module("torch._C")
        return _below_autocast(run) if core._is_any_autocast_enabled() else run, is_drawing, symbols.fits()


def _made(run: Flat, inputs: list[Tensor], backend: Any, options: Mapping[str, Any] | None) -> tuple[Compiled, bool]:
    plugin, failed = backends.plugin(inputs) if backend == "inductor" else None, None
    if plugin is not None:
        with tracing.capturing(), torch.no_grad():
            with no_recurrent_kernel():
                record = plugin.record(run, inputs)
            run = record.function
            try:
                return plugin.compiled(record, options=options)
            except PurestepError:
                raise
            except Exception as error:
                failed = error
    with with_compiler():
        with tracing.capturing(), torch.no_grad(), no_recurrent_kernel():
            casts = precision_casts.Casts()
            with casts:
                graph = fx_passes.finished(fx_passes.views_allowed(_traced(run, inputs)))
        is_drawing = fx_passes.draws(graph)
        with below_autocast():
            made = _lowered(graph, inputs, backend, options, rounds=casts.seen)
    if plugin is not None and failed is not None:
        given_up(plugin, failed)
    return made, is_drawing


def given_up(plugin: types.ModuleType, error: Exception) -> None:
    """Log that a graph goes to inductor's public entry, after the plug-in has failed on it."""
    log.warning("%s cannot compile the step, torch alone does, whose code is slower: %r", plugin.__name__, error)


def _below_autocast(run: Compiled) -> Compiled:
    def call(tensors: list[Tensor]) -> Any:
        with below_autocast():
            return run(tensors)

    return call


@contextmanager
def no_recurrent_kernel() -> Generator[None]:
    """An LSTM is traced as its products: the workspace of oneDNN's kernel for it has no size before a real call.
    Convolutions are not decided here but when they are compiled."""
    core: Any = importlib.import_module("torch._C")
    was_on = core._get_mkldnn_enabled()
    core._set_mkldnn_enabled(False)  # torch.backends.mkldnn.flags warns of TF32
    try:
        yield
    finally:
        core._set_mkldnn_enabled(was_on)


def below_autocast() -> Any:
    """Inside, operators are not cast, whatever the caller has asked for: in a graph its casts are written out."""
    core: Any = importlib.import_module("torch._C")
    return core._DisableAutocast()


def _each_its_own(inputs: list[Tensor]) -> list[Tensor]:
    """The inputs as tensors of their own: a tensor that is given in two places becomes one input of a graph, which
    later calls with two tensors would find as well."""
    seen, found = set[int](), list[Tensor]()
    for leaf in inputs:
        found.append(leaf.detach().requires_grad_(leaf.requires_grad) if id(leaf) in seen else leaf)
        seen.add(id(leaf))
    return found


LOOKS_CURE = (
    "torch.where(condition, a, b) instead of if; no .item(), no float(tensor), no boolean indexing; or the step itself,"
    " in eager mode (in fit: compile=False)"
)

_SIZE_WANTED = ("expected to contain only concrete integers", "when unpacking SymInt, expected int")
"""What torch's C++ says where it wants a number for a size, and gets one that is known when the step runs."""
_SIZE_MET = "a size is read from it"

_FIRST = 1 << 40  # the seed a capture starts from: positions must not run into seeds that a step sets itself


@contextmanager
def _drawing() -> Generator[None]:
    with rng.scoped(_FIRST), random_ops.AsInEager(), tracing.replaying(), _compiling():
        yield


@contextmanager
def _no_host_draws() -> Generator[None]:
    """Refuse a step that draws from numpy's or Python's generator: a graph would repeat the numbers of its capture."""
    before = global_rng.host_states()
    yield
    for name, state in global_rng.host_states().items():
        if state != before[name]:
            raise Uncaptured(
                f"the step draws from {name} global generator, and a graph would repeat these numbers at every call",
                where="step",
                hint="draw with torch, or in the loader; or the step itself, in eager mode (in fit: compile=False)",
            )


@contextmanager
def _compiling() -> Generator[None]:
    """Code that asks `torch.compiler.is_compiling()` hears what it hears under torch.compile."""
    compiler: Any = torch.compiler  # the flag has no public name that sets it
    before = compiler._is_compiling_flag
    compiler._is_compiling_flag = True
    try:
        yield
    finally:
        compiler._is_compiling_flag = before


def _recorded(function: Flat) -> Flat:
    """The function as a trace should run it: its draws replayed, its looks at values named."""

    def run(*tensors: Tensor) -> Any:
        try:
            with _drawing(), _no_host_draws():
                return function(*tensors)
        except PurestepError:
            raise
        except _data_dependent() as error:
            raise _looked(error) from error
        except RuntimeError as error:
            if not any(words in str(error) for words in _SIZE_WANTED):
                raise
            raise _looked(error, _SIZE_MET) from error
        except ZeroDivisionError as error:
            if all(tensor.numel() for tensor in tensors):
                raise
            raise StepContractError(
                "a mean over no elements cannot be captured: torch divides by their number as it is traced",
                where=_where(error)[0],
                hint="no empty batches in a compiled step (the step itself, in eager mode, takes them)",
            ) from error

    return run


def _traced(function: Flat, inputs: list[Tensor], mode: Literal["fake", "real"] = "fake") -> GraphModule:
    from torch.fx.experimental.proxy_tensor import make_fx

    # Constants that a step closes over (tables, masks) are real tensors beside fake ones.
    with control_flow.of_one_vector():
        graph: GraphModule = make_fx(function, tracing_mode=mode, _allow_non_fake_inputs=True)(*inputs)
    return fx_passes.without_copies(graph)


def rehearse(core: Callable[..., Any], tensors: list[Tensor], leaves: list[Any]) -> None:
    """Run a function on fake tensors: no arithmetic, all of its checks.

    Raises:
        StepContractError: from those checks. What else goes wrong is left to the real capture, which says it better.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # no public name

    with tracing.capturing(), torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode, _drawing():
        fakes = [[mode.from_tensor(x) if isinstance(x, Tensor) else x for x in group] for group in (tensors, leaves)]
        try:
            core(*fakes)
        except NoSetupContext:  # which Dynamo differentiates
            return
        except PurestepError:
            raise
        except Exception:  # a data-dependent branch, an operator without a fake: not what is asked here
            return


def _data_dependent() -> tuple[type[BaseException], ...]:
    from torch._subclasses import fake_tensor  # no public name for what a fake tensor refuses
    from torch.fx.experimental import symbolic_shapes

    return (
        fake_tensor.DataDependentOutputException,
        fake_tensor.DynamicOutputShapeException,
        symbolic_shapes.GuardOnDataDependentSymNode,
    )


def _lowered(
    graph: GraphModule,
    inputs: list[Tensor],
    backend: Any,
    options: Mapping[str, Any] | None,
    *,
    rounds: bool,
    shapes: str = "from_example_inputs",
) -> Compiled:
    if backend in ("eager", "aot_eager"):
        return _unpacking(formats.settled(graph))
    if backend != "inductor":
        return _unpacking(backend(graph, inputs))
    # Documented, not yet public; torch.compile stands behind it.
    inductor: Any = importlib.import_module("torch._inductor")
    on_cpu = all(leaf.device.type == "cpu" for leaf in inputs)
    chosen = {"config_patches": backends.chosen(options, on_cpu=on_cpu, rounds=rounds)}
    names = control_flow.operators(graph)
    backends.register_fallbacks(graph)
    try:
        graph = control_flow.apart(graph) if names else graph
        made = inductor.standalone_compile(graph, inputs, dynamic_shapes=shapes, options=chosen)
    except Exception as error:
        if not names:
            raise
        raise Uncaptured(
            f"inductor cannot compile {', '.join(names)}", where="step", hint=control_flow.cure(names)
        ) from error
    return on_threads(_unpacking(made), torch.get_num_threads())


def _unpacking(run: Flat) -> Compiled:
    """The gradient is in the graph already: what else autograd would keep, it would keep for ever."""

    def call(tensors: list[Tensor]) -> Any:
        with torch.no_grad():
            return run(*tensors)

    return call


def on_threads(run: Compiled, most: int) -> Compiled:
    """The code on no more threads than so many: inductor has made room for the sums of those that there were."""

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


def _looked(error: BaseException, met: str = "") -> DataDependent:
    """What to do about a look at a value, which may be one of torch's own; ``met`` instead of the error's words."""
    met, (place, layer) = met or str(error).strip().partition("\n")[0], _where(error)
    cure = LOOKS_CURE
    if own := _function_of_torch(error):
        cure = f"the step itself, in eager mode: torch's own {own} looks at it; or write {own} without that check"
    if met == _SIZE_MET:
        cure = "a size that is in a shape (x.shape[-1]), or one that the loader gives as a number; or eager mode"
    if "_ctc_loss" in met:
        cure = "the step itself, in eager mode: torch's ctc_loss reads its lengths on the host, tensors or not"
    if getattr(layer, "momentum", 0) is None and hasattr(layer, "num_batches_tracked"):
        cure = f"{type(layer).__name__}(..., momentum=0.1): momentum=None divides by a count of batches on the host"
    return DataDependent(f"the step looks at the value of a tensor: {met}", where=place, hint=cure)


def _function_of_torch(error: BaseException) -> str:
    """The function of torch.nn.functional that looked, where no line of the user's is below it."""
    found, step = "", error.__traceback__
    while step is not None:
        name, function = step.tb_frame.f_code.co_filename, step.tb_frame.f_code.co_name
        if name == torch.nn.functional.__file__:
            found = found or function
        elif not name.startswith(_LIBRARIES):
            found = ""
        step = step.tb_next
    return found


def _where(error: BaseException) -> tuple[str, Any]:
    """The innermost line of the traceback that is neither torch's nor ours, else the layer; and that layer."""
    found, layer = "", None
    step = error.__traceback__
    while step is not None:
        name = step.tb_frame.f_code.co_filename
        if "/optree/" not in name and not name.startswith(_LIBRARIES):
            found = f"{name}:{step.tb_lineno}"
        inside = step.tb_frame.f_locals.get("self")
        layer = inside if isinstance(inside, torch.nn.Module) else layer
        step = step.tb_next
    return found or (f"a {type(layer).__name__}" if layer is not None else "step"), layer


def dynamo(function: types.FunctionType, *, backend: Any, options: Mapping[str, Any] | None) -> Flat:
    """`torch.compile(function, fullgraph=True)`."""
    if backend in backends.OURS:
        backend = backends.of(backend, options)
    torch.compiler.assume_constant_result(last_unreached)
    # Dynamo counts graphs by code object and stops at eight, and takes a size for dynamic that has changed since the
    # last function of the same name and line, the width of another model too: every function is one of its own.
    own = types.FunctionType(
        function.__code__.replace(co_name=f"{function.__name__}_{uuid.uuid4().hex}"),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    return torch.no_grad()(torch.compile(own, fullgraph=True, backend=backend))


def stopped(error: BaseException) -> bool:
    """Whether this is Dynamo's word that it cannot capture a function, or anything else that ended its attempt."""
    if any(kind.__module__.startswith("torch._dynamo") for kind in type(error).__mro__):
        return True
    frames = (frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__))
    return not isinstance(error, PurestepError) and _ATTEMPT in frames


_ATTEMPT = f"{_LIBRARIES[0]}_dynamo/convert_frame.py"
"""Where Dynamo captures; code that it has captured runs without it."""


def refused(error: Exception, core: Callable[..., Any], tensors: list[Tensor], leaves: list[Any]) -> Exception:
    """What to raise of an error that has ended the last way to capture a step, whatever its class: the step's own
    error where it fails in eager mode too, on copies; else that it cannot be captured.

    Args:
        error: that a capture met.
        core: what was captured.
        tensors: the state's, which are left alone.
        leaves: of the batch.
    """
    if isinstance(error, PurestepError | MemoryError):
        return error
    copies = [tensor.clone() for tensor in tensors]
    with tracing.capturing(), torch.no_grad(), rng.scoped(_FIRST, tree.device(tensors)):
        try:
            core(copies, leaves)
        except Exception as own:
            return own
    met = next(iter(str(error).strip().splitlines()), "")
    return Uncaptured(
        f"torch cannot capture the step, which runs in eager mode: {type(error).__name__}: {met}",
        where=_where(error)[0],
        hint="use the step itself, in eager mode (in fit: compile=False), or leave out what this line does",
    )


def check(capture: str) -> None:
    """Raise ConfigError for a capture that does not exist."""
    if capture not in CAPTURES:
        raise ConfigError(f"capture is {capture!r}", where="compile_step", hint=f"one of {CAPTURES}")
