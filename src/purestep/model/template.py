"""The weightless copy of a module, which runs with the weights of a state, and checks of what cannot be copied."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ..errors import ConfigError, StateError, StepContractError
from ..torch_ext import hidden, tensor_layout

_Module = TypeVar("_Module", bound=nn.Module)

Named = Iterable[tuple[str, Tensor]]
"""(name, tensor) pairs, including tied aliases."""


def wrapper(module: nn.Module) -> str | None:
    """Return "torch.compile", "DataParallel" or "DistributedDataParallel" for a module that only wraps another one."""
    if hidden.compiled_module(module) is not None:
        return "torch.compile"
    name = type(module).__name__
    # By name: torch.nn.parallel.distributed loads torch.distributed.
    is_parallel = type(module).__module__.startswith("torch.nn.parallel.")
    return name if is_parallel and isinstance(getattr(module, "module", None), nn.Module) else None


def wrappers(module: nn.Module) -> tuple[str, ...]:
    """Return the kinds of wrappers in a module, each once, the outermost first."""
    return tuple(dict.fromkeys(kind for part in module.modules() if (kind := wrapper(part))))


def check_uncut(module: nn.Module) -> None:
    """Check that no other tool has cut the parameters of a module into the pieces of several processes.

    Raises:
        ConfigError: with the name of a parameter or module.
    """
    # By names: these classes load torch.distributed.
    cut = [name for name, each in module.named_parameters() if type(each).__name__ == "DTensor"]
    cut += [name or "model" for name, each in module.named_modules() if type(each).__name__ == _FSDP]
    if cut:
        raise ConfigError(
            f"{cut[0]} is in pieces already, by fully_shard, {_FSDP} or parallelize_module",
            where="program",
            hint='pass the model as one process has it; then ps.distribute(program, mesh, params="shard") cuts it, and '
            "tensor={...} takes the plan of parallelize_module",
        )


_FSDP = "FullyShardedDataParallel"


def unwrapped(module: nn.Module) -> nn.Module:
    """Remove the wrappers of `torch.compile`, `DataParallel` and `DistributedDataParallel` from a module: a step is
    compiled and distributed as a whole, and its names are those of the model.

    Returns:
        The module itself if no part is wrapped; otherwise a copy of its structure with the same parameters and buffers.
        `module.compile()` adds no wrapper, and copies drop its effect.
    """
    wrapped = [part for part in module.modules() if wrapper(part)]
    if not wrapped:
        return module
    memo: dict[int, Any] = {id(each): each for each in (*module.parameters(), *module.buffers())}
    for part in reversed(wrapped):  # innermost first: the copy of an outer one contains it
        inner: Any = part
        memo[id(part)] = _copied(hidden.compiled_module(part) or inner.module, memo)
    return _copied(module, memo)


def _copied(module: Any, memo: dict[int, Any]) -> Any:
    kept = dict(memo)  # deepcopy leaves incomplete copies in its memo when it fails
    try:
        return copy.deepcopy(module, memo)
    except (RuntimeError, TypeError) as error:
        raise _not_copied(module, kept, error) from error


def _not_copied(module: nn.Module, memo: dict[int, Any], error: Exception) -> StateError:
    """The error for a failed copy, with the name of the attribute that fails."""
    known = memo | {id(part): part for part in module.modules()}  # copies of a part do not copy the others
    for name, part in module.named_modules():
        for attribute, value in vars(part).items():
            if attribute in hidden.REGISTERED:
                continue
            try:
                copy.deepcopy(value, dict(known))
            except (RuntimeError, TypeError):
                what = f"the attribute of {type(part).__name__} cannot be copied: {error}"
                return StateError(what, where=f"{name}.{attribute}" if name else attribute, hint=_ONLY_PLAIN)
    return StateError(f"the module cannot be copied: {error}", where=type(module).__name__, hint=_ONLY_PLAIN)


_ONLY_PLAIN = (
    "keep only parameters, buffers and plain values as attributes, and a computed tensor as value.detach(); use "
    "torch.nn.utils.parametrizations for weight_norm and spectral_norm, and prune.remove; or define __deepcopy__"
)


def weightless_copy(module: nn.Module) -> nn.Module:
    """Copy a module with parameters and buffers on the meta device; ties are kept.

    Raises:
        StateError: the module cannot be copied, or an attribute refers to weights that a state does not replace.
    """
    made = copy_structure(module)
    kept = set(map(id, module.modules()))
    for name, part in made.named_modules():
        if id(part) in kept:
            raise StateError(
                "ps.program copies the model, but copy.deepcopy of this module returns the module itself, so a step "
                "would switch the train/eval mode of your model",
                where=name or type(part).__name__,
                hint="remove __deepcopy__, or return a new module from it",
            )
    _check_attributes(module, made)
    for name, part in made.named_modules():
        hidden.set_apply(part, functools.partial(_checked_apply, part, name))
        if isinstance(part, nn.RNNBase):
            part.flatten_parameters = _skip_flatten
    return made


def copy_structure(module: _Module) -> _Module:
    """Copy a module to the meta device without the checks of `weightless_copy`."""
    # With meta tensors in its memo, deepcopy copies the structure without the weights, keeps ties, and never calls a
    # tensor subclass's own __deepcopy__, which may fail.
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return _copied(module, memo)


def _skip_flatten() -> None:
    """Replaces `flatten_parameters`: on CUDA each call of an LSTM or GRU would copy the weights of the state."""


def _checked_apply(module: nn.Module, name: str, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Replaces the method behind ``module.to(...)``, which in a forward pass raises unless it changes nothing."""
    tensors = {**dict(module.named_parameters(recurse=recurse)), **dict(module.named_buffers(recurse=recurse))}
    for inner, tensor in tensors.items():
        if fn(tensor) is not tensor:
            raise StepContractError(
                f"the forward pass moves this tensor of {tensor.dtype} on {tensor.device} to another dtype or device",
                where=f"{name}.{inner}" if name else inner,
                hint="cast the layer's input (x.to(weight.dtype)), or move the module before ps.program",
            )
    return module


# --- attributes -------------------------------------------------------------------------------------------------------

_PLAIN = (str, int, float, bool, bytes, type(None))  # contain no tensors; skipped for speed (a vocabulary has many)


def _check_attributes(module: nn.Module, made: nn.Module) -> None:
    """Raise StateError for an attribute that holds a second reference to a registered weight, which a state does not
    replace, or that refers to the original module: `copy.deepcopy` does not copy functions."""
    tensors = {id(each): "a weight that is registered too" for each in (*made.parameters(), *made.buffers())}
    parts = [*module.modules(), *module.parameters(), *module.buffers()]
    wrong = dict.fromkeys(map(id, parts), "the original module, whose weights never change") | tensors
    seen: set[int] = set()
    for name, part in made.named_modules():
        skipped = hidden.REGISTERED | ({hidden.FLAT_WEIGHTS} if isinstance(part, nn.RNNBase) else set())
        for attribute, value in vars(part).items():
            found = None if attribute in skipped else _reachable_weight(value, wrong, seen)
            if found is not None:
                where = f"{name}.{attribute}" if name else attribute
                raise StateError(
                    f"the attribute refers to {found}", where=where, hint="use a method of the module, with self"
                )


def _reachable_weight(value: Any, wrong: dict[int, str], seen: set[int]) -> str | None:
    if type(value) in _PLAIN:
        return None
    if id(value) in wrong:
        return wrong[id(value)]
    if id(value) in seen:
        return None
    seen.add(id(value))
    found = (_reachable_weight(inside, wrong, seen) for inside in _contents(value))
    return next((each for each in found if each is not None), None)


def _contents(value: Any) -> Iterator[Any]:
    """The contents of a container, or the defaults and closure of a function."""
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple | set):
        yield from value
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif inspect.ismethod(value):
        yield value.__self__
    elif inspect.isfunction(value):
        yield from value.__defaults__ or ()
        for cell in value.__closure__ or ():
            try:
                yield cell.cell_contents
            except ValueError:  # an empty cell
                continue


# --- tensors ----------------------------------------------------------------------------------------------------------


def check(modules: Iterable[tuple[str, nn.Module]], parameters: Named, buffers: Named) -> None:
    """Raise StateError for modules and tensors that a pure step cannot train like torch; names are the user's."""
    for name, value in (*parameters, *buffers):
        _check_tensor(name, value)
    _check_memory(dict(parameters), dict(buffers))
    for name, part in modules:
        if not isinstance(part, nn.Embedding | nn.EmbeddingBag):
            continue
        where = name or type(part).__name__
        if part.max_norm is not None:
            raise StateError(
                f"max_norm={part.max_norm} writes the weights in the forward pass",
                where=where,
                hint="set max_norm=None, and use torch.nn.utils.parametrize for the norm",
            )
        if part.sparse and part.weight.requires_grad:
            raise StateError(
                "sparse=True makes a sparse gradient, which no step supports", where=where, hint="set sparse=False"
            )


def _check_tensor(name: str, value: Tensor) -> None:
    if nn.parameter.is_lazy(value):
        raise StateError(
            "the tensor is lazy and has no shape yet", where=name, hint="run one forward pass before ps.program"
        )
    if value.requires_grad and hidden.has_gradient_hook(value):
        hint = "replace the hook: use optim.masked, or optim.stateless(f) in the chain"
        raise StateError(
            "the parameter has a hook on its gradient, which a pure step does not call", where=name, hint=hint
        )
    if value.is_floating_point() or value.is_complex() or not isinstance(value, nn.Parameter):
        return
    cure = f"call module.register_buffer({name.rpartition('.')[2]!r}, ...) for a tensor that is not trained"
    raise StateError(f"the parameter has dtype {value.dtype}; floating point is needed", where=name, hint=cure)


def check_real(module: nn.Module, where: str) -> None:
    """Raise a ConfigError if a trained parameter of the module is complex."""
    found = [name for name, value in module.named_parameters() if value.is_complex() and value.requires_grad]
    if found:
        raise ConfigError(
            f"the transform is not defined for complex parameters: {found[0]} is one",
            where=where,
            hint="hold real and imaginary part as one real parameter and use torch.view_as_complex in forward",
        )


def _check_memory(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
    """Raise StateError for a trained weight that shares memory with another tensor object: training would separate
    them."""
    for first, second in overlaps(parameters, buffers):
        if any(name in parameters and parameters[name].requires_grad for name in (first, second)):
            raise StateError(
                f"the tensor shares memory with {first}, a different tensor object; after training they would differ",
                where=second,
                hint="register the same nn.Parameter under both names, or compute one from the other in a property; "
                "register x.clone() for columns of one matrix",
            )


def overlaps(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Pairs of names of tensors that are not tied (the same object) and whose memory overlaps, from the first to the
    last element: views, also columns of one matrix."""
    named = {**parameters, **buffers}
    spans = sorted((start, start + _length(value), name) for name, value in named.items() if (start := _address(value)))
    reaching: list[tuple[int, str]] = []  # (end, name) of earlier spans that may overlap this one
    for start, end, name in spans:
        reaching = [(until, other) for until, other in reaching if until > start]
        others = [other for _, other in reaching]
        if any(named[name] is named[other] and (name in parameters) == (other in parameters) for other in others):
            continue
        yield from ((other, name) for other in others)
        reaching.append((end, name))


def none_buffers(modules: Iterable[tuple[str, nn.Module]]) -> tuple[str, ...]:
    """Names of persistent buffers registered as None. A buffer that is not persistent (a mask or table computed at its
    first use) is no state."""
    return tuple(
        f"{path}.{name}" if path else name
        for path, owner in modules
        if not type(owner).__module__.startswith("torch.nn.modules.")  # norms without statistics never fill them
        for name in hidden.unset_buffers(owner)
    )


def _address(value: Tensor) -> int:
    if value.device.type == "meta" or not value.numel():
        return 0
    try:
        return value.data_ptr()
    except RuntimeError:  # a tensor without memory
        return 0


def _length(value: Tensor) -> int:
    return tensor_layout.extent(value) * value.element_size()
