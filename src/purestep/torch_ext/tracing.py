"""Is this code being captured into a graph, mapped by `torch.func.vmap`, or differentiated?

A step is a function, so it can be captured, mapped and differentiated, with its gradients and its update. Inside a
capture a tensor has no value, inside vmap it holds one value for each mapped index, and autograd keeps the tensors it
has recorded. Code that reads a value or overwrites a temporary to save time or memory checks here first.
"""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ..errors import StepContractError
from . import global_rng

_P = ParamSpec("_P")
_T = TypeVar("_T")

# torch has no public names for the active transforms and modes.
_C: Any = importlib.import_module("torch._C")
_functorch: Any = importlib.import_module("torch._C._functorch")
_forward: Any = importlib.import_module("torch.autograd.forward_ad")

_capturing: ContextVar[bool] = ContextVar("capturing", default=False)

LIBRARIES = (torch.__file__.rpartition("__init__")[0], __file__.rpartition("torch_ext")[0])
"""The directories of torch and of purestep."""
_NOT_USERS = (*LIBRARIES, "<string>", "<eval_with_key>")  # torch.fx names the code that it writes so


def user_line(error: BaseException) -> str:
    """The innermost line of an error's traceback outside torch, optree and purestep, as file:line; "" if there is none.

    Example:
        >>> try:
        ...     raise ValueError("of the user's own")
        ... except ValueError as error:
        ...     print(user_line(error))
        <doctest purestep.torch_ext.tracing.user_line[0]>:2
    """
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    own = [f"{name}:{line}" for name, line in frames if not name.startswith(_NOT_USERS) and "/optree/" not in name]
    return own[-1] if own else ""


def in_graph() -> bool:
    """True while a graph is captured, by purestep or by a user's `torch.compile`. Do not seed then: in a trace a seed
    would be a constant, and Dynamo cannot capture seeding."""
    return torch.compiler.is_dynamo_compiling() or _capturing.get()


@contextmanager
def capturing() -> Generator[None]:
    """Make `in_graph` return True inside the block."""
    token = _capturing.set(True)
    try:
        yield
    finally:
        _capturing.reset(token)


def constant_in_graph(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """As `torch.compiler.assume_constant_result`, without loading Dynamo: in a user's `torch.compile` the function is
    called once, and its result is a constant of the graph."""
    function._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


def break_in_graph(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """As `torch.compiler.disable`, without loading Dynamo: a user's `torch.compile` calls it between two graphs."""
    function._torchdynamo_disable = True  # pyright: ignore[reportFunctionMemberAccess]
    return function


def transformed() -> bool:
    """True inside a transform of `torch.func` or forward-mode autograd. Takes 0.15 us.

    Example:
        >>> import torch
        >>> def inside(x):
        ...     return x + transformed()
        >>> inside(torch.zeros(2)).tolist(), torch.func.vmap(inside)(torch.zeros(2)).tolist()
        ([0.0, 0.0], [1.0, 1.0])
    """
    if torch.compiler.is_dynamo_compiling():  # Dynamo cannot read the level; it captures transforms that it meets
        return False
    return _functorch.maybe_current_level() is not None or _forward._current_level >= 0


def followed(leaves: Iterable[Tensor]) -> bool:
    """True if autograd records what is computed from these tensors, or a transform is active.

    Example:
        >>> import torch
        >>> weight = torch.ones(2, requires_grad=True)
        >>> followed([weight]), followed([weight.detach()])
        (True, False)
    """
    return transformed() or (torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves))


def may_read(value: Tensor) -> bool:
    """True if Python may branch on the tensor's value: no capture, no transform and no dispatch mode is active."""
    if in_graph() or transformed():
        return False
    return type(value) is Tensor and not _C._len_torch_dispatch_stack()


def may_branch(value: Tensor) -> bool:
    """True if Python may branch on the tensor's value without a wait: `may_read`, and it is on the CPU."""
    return value.device.type == "cpu" and may_read(value)


Value: TypeAlias = Tensor | float
"""A number that the host knows, or a tensor that holds it."""


def read(value: Tensor) -> Value:
    """The number in a 0-d tensor if `may_branch`; else, and for other shapes, the tensor.

    Example:
        >>> float(read(torch.tensor(0.5))), read(torch.ones(2))
        (0.5, tensor([1., 1.]))
    """
    return value.item() if value.dim() == 0 and may_branch(value) else value


def is_finite(value: Tensor) -> Tensor:
    """Like `torch.isfinite` for floating numbers, in two operations in place of four: nan < inf is False.

    Example:
        >>> is_finite(torch.tensor([torch.nan, -torch.inf, 1.0]))
        tensor([False, False,  True])
    """
    return abs(value) < torch.inf


def may_overwrite(leaves: Iterable[Tensor]) -> bool:
    """True if a temporary that was computed from these tensors may be overwritten."""
    return not in_graph() and not followed(leaves)


def unwrapped(value: Tensor) -> Tensor:
    """The tensor inside the wrappers of `torch.func`: for a mapped tensor, the values of all mapped indices.

    Example:
        >>> import torch
        >>> seen = []
        >>> _ = torch.func.vmap(lambda x: (seen.append(unwrapped(x).tolist()), x)[1])(torch.arange(3))
        >>> seen
        [[0, 1, 2]]
    """
    if torch.compiler.is_dynamo_compiling():  # it warns of the functions below
        return value
    while _functorch.is_functorch_wrapped_tensor(value):
        value = _functorch.get_unwrapped(value)
    return value


def is_mapped(value: Tensor) -> bool:
    """True if `torch.func.vmap` maps over the tensor, at any level of nested transforms. Dynamo cannot read it.

    Example:
        >>> import torch
        >>> seen = []
        >>> _ = torch.func.vmap(lambda x: (seen.append(is_mapped(x)), x)[1])(torch.arange(3))
        >>> seen, is_mapped(torch.zeros(3))
        ([True], False)
    """
    while _functorch.is_functorch_wrapped_tensor(value):
        if _functorch.is_batchedtensor(value):
            return True
        value = _functorch.get_unwrapped(value)
    return False


def has_parts(types: Iterable[type]) -> bool:
    """True if a dispatch mode is called for a DTensor. It should return NotImplemented: the DTensor then calls the
    operators on its part, for which the mode is called too."""
    return any(kind.__name__ == "DTensor" for kind in types)


def is_random(operator: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """True if this call of a torch operator draws random numbers. Attention with ``dropout_p=0`` draws none.

    Example:
        >>> aten = torch.ops.aten
        >>> is_random(aten.rand.default, ([2],), {}), is_random(aten.add.Tensor, (1, 2), {})
        (True, False)
    """
    if torch.Tag.nondeterministic_seeded not in getattr(operator, "tags", ()):  # higher-order operators have no tags
        return False
    for at, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            rate = args[at] if at < len(args) else kwargs.get("dropout_p", argument.default_value)
            return rate != 0
    return True


@contextmanager
def no_recurrent_kernel() -> Generator[None]:
    """Run or trace an LSTM as matrix products inside the block. oneDNN's kernel has no rule for `torch.func.vmap`, and
    the size of its workspace is unknown before a real call. Convolutions of a graph choose their kernel later, when
    they are compiled."""
    was_on = _C._get_mkldnn_enabled()
    _C._set_mkldnn_enabled(False)  # torch.backends.mkldnn.flags warns of TF32
    try:
        yield
    finally:
        _C._set_mkldnn_enabled(was_on)


def replaying() -> AbstractContextManager[Any]:
    """While a graph is captured, return the earlier result for a draw from an earlier position of the generator.

    Example:
        >>> with global_rng.seeded(7), replaying():
        ...     before = torch.get_rng_state()
        ...     first = torch.rand(())
        ...     torch.set_rng_state(before)
        ...     bool(torch.rand(()) == first)
        True

    Activation checkpointing runs code twice and restores the generator, so that both runs use one dropout mask. A graph
    records draws but no generator, so the second run would draw other numbers. Inside this block the generator's seed
    serves as its position; checkpointing saves and restores it as in eager mode.

    Raises:
        StepContractError: at a draw after the code inside seeded the generator.
    """
    return _Replaying()


class Mode(TorchDispatchMode):
    """Base of dispatch modes that receive higher-order operators too. `torch.cond` calls Dynamo in eager mode as well;
    under any mode but these Dynamo would skip those frames for the rest of the process."""

    supports_higher_order_operators = True

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Return True, so that Dynamo does not skip frames."""
        return True


class _Replaying(Mode):
    def __init__(self) -> None:
        super().__init__()
        self._drawn: dict[int, Any] = {}  # position -> result of the draw there
        self._positions = {global_rng.cpu_seed()}  # positions that draws have reached

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if has_parts(types):
            return NotImplemented
        if not is_random(func, args, kwargs or {}):
            return func(*args, **(kwargs or {}))
        position = global_rng.cpu_seed()
        if position not in self._positions:
            raise StepContractError(
                f"the step seeds torch's generator with {position}; a graph cannot hold a seed",
                where="step",
                hint="call neither torch.manual_seed nor rng.scoped inside: the state's key seeds each call. Draw "
                "constant numbers before the step, with ps.rng.generator(ps.rng.key(0), 'name'), and store them in a "
                "buffer",
            )
        global_rng.seed_cpu(position + 1)
        self._positions.add(position + 1)
        if position in self._drawn:
            kept = self._drawn[position]
            # An in-place draw returns the tensor that it fills.
            return args[0].copy_(kept) if func._schema.is_mutable else tree_map_only(Tensor, torch.clone, kept)
        drawn = func(*args, **(kwargs or {}))
        self._drawn[position] = tree_map_only(Tensor, torch.clone, drawn)
        return drawn
