"""A module without its weights, to be run with those of a state, and what such a copy cannot be made of."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from .. import tensor_layout
from ..errors import StateError, StepContractError

Named = Iterable[tuple[str, Tensor]]
"""Of every name a tensor goes by, tied ones under each."""


_WRAPPED = "_orig_mod"
"""The attribute under which `torch.compile` keeps the module that it was given, and the prefix of its names."""


def uncompiled(module: nn.Module) -> nn.Module:
    """The module without the wrappers of `torch.compile`: a step is compiled whole, and its names are the model's.

    Returns:
        The module itself where no part of it is wrapped; else a copy of its structure with the same parameters and
        buffers. `module.compile()` wraps nothing: copies leave it out.
    """
    wrapped = [part for part in module.modules() if isinstance(getattr(part, _WRAPPED, None), nn.Module)]
    if not wrapped:
        return module
    memo: dict[int, Any] = {id(each): each for each in (*module.parameters(), *module.buffers())}
    for part in reversed(wrapped):  # the innermost first: one inside another is copied with it
        memo[id(part)] = _copied(getattr(part, _WRAPPED), memo)
    return _copied(module, memo)


def _copied(module: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(module, memo)
    except (RuntimeError, TypeError) as error:
        raise StateError(
            f"the module cannot be copied: {error}",
            where=type(module).__name__,
            hint="keep only parameters, buffers and plain values as attributes "
            "(torch.nn.utils.parametrizations.weight_norm instead of torch.nn.utils.weight_norm)",
        ) from error


def hollow(module: nn.Module) -> nn.Module:
    """A copy whose parameters and buffers have no memory; ties are kept.

    Raises:
        StateError: what cannot be copied; an attribute that leads to other weights than those of a state.
    """
    made = without_weights(module)
    kept = set(map(id, module.modules()))
    for name, part in made.named_modules():
        if id(part) in kept:
            raise StateError(
                "is no copy: its __deepcopy__ returns the module itself, which a step would put into another mode",
                where=name or type(part).__name__,
                hint="no __deepcopy__, or one that makes a new module",
            )
    _check_attributes(module, made)
    for name, part in made.named_modules():
        part._apply = functools.partial(_applied, part, name)  # pyright: ignore[reportPrivateUsage]  # all of .to, .half
        if isinstance(part, nn.RNNBase):
            part.flatten_parameters = _left_where_they_are
    return made


def without_weights(module: nn.Module) -> nn.Module:
    """The copy alone: of a hollow module, which has been looked at, another one."""
    # Seeding deepcopy's memo with meta tensors copies the structure without the weights, and keeps ties. Nor is a class
    # of tensors asked for a copy of its own, which not every one can make.
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
    for buffer in module.buffers():
        memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return _copied(module, memo)


def _left_where_they_are() -> None:
    """On CUDA each call of an LSTM or GRU would move the weights of the state into memory of its own."""


def _applied(module: nn.Module, name: str, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """``module.to(...)`` and the like in a forward pass: a module that is there already stays, as in torch."""
    tensors = {**dict(module.named_parameters(recurse=recurse)), **dict(module.named_buffers(recurse=recurse))}
    for inner, tensor in tensors.items():
        if fn(tensor) is not tensor:
            raise StepContractError(
                f"the forward pass moves this tensor of {tensor.dtype} on {tensor.device} to another dtype or device",
                where=f"{name}.{inner}" if name else inner,
                hint="cast what the layer is given (x.to(weight.dtype)), or move the module before ps.program",
            )
    return module


# --- attributes -------------------------------------------------------------------------------------------------------

_REGISTERED = ("_parameters", "_buffers", "_modules")
_PLAIN = (str, int, float, bool, bytes, type(None))  # lead nowhere; a vocabulary has many


def _check_attributes(module: nn.Module, made: nn.Module) -> None:
    """Raise StateError for an attribute that holds a weight beside the registered one, which a state does not reach, or
    that leads back to the original: `copy.deepcopy` copies no functions."""
    tensors = {id(each): "a weight that is registered too" for each in (*made.parameters(), *made.buffers())}
    parts = [*module.modules(), *module.parameters(), *module.buffers()]
    wrong = dict.fromkeys(map(id, parts), "the module itself, whose weights stay what they are") | tensors
    seen: set[int] = set()
    for name, part in made.named_modules():
        left = _REGISTERED if not isinstance(part, nn.RNNBase) else (*_REGISTERED, "_flat_weights")  # set with weights
        for attribute, value in vars(part).items():
            found = None if attribute in left else _leads_to(value, wrong, seen)
            if found is not None:
                where = f"{name}.{attribute}" if name else attribute
                raise StateError(f"leads to {found}", where=where, hint="a method of the module, which uses self")


def _leads_to(value: Any, wrong: dict[int, str], seen: set[int]) -> str | None:
    if type(value) in _PLAIN:
        return None
    if id(value) in wrong:
        return wrong[id(value)]
    if id(value) in seen:
        return None
    seen.add(id(value))
    found = (_leads_to(inside, wrong, seen) for inside in _inside(value))
    return next((each for each in found if each is not None), None)


def _inside(value: Any) -> Iterator[Any]:
    """What a container holds, or a function closes over."""
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
            except ValueError:  # not filled yet
                continue


# --- tensors ----------------------------------------------------------------------------------------------------------


def check(modules: Iterable[tuple[str, nn.Module]], parameters: Named, buffers: Named) -> None:
    """Raise StateError for what no step can train as torch would; all are given by the names that users know."""
    for name, value in (*parameters, *buffers):
        _check_tensor(name, value)
    _check_memory(dict(parameters), dict(buffers))
    for name, part in modules:
        if isinstance(part, nn.Embedding | nn.EmbeddingBag):
            _check_embedding(name or type(part).__name__, part)


def _check_tensor(name: str, value: Tensor) -> None:
    if nn.parameter.is_lazy(value):
        raise StateError("is lazy and has no shape yet", where=name, hint="run one forward pass before ps.program")
    if value.requires_grad and (value._backward_hooks or getattr(value, "_post_accumulate_grad_hooks", None)):
        hint = "optim.masked, or optim.stateless(f) in the chain, for what the hook does to gradients"
        raise StateError("has a hook on its gradient, which a pure step does not call", where=name, hint=hint)
    if value.is_floating_point() or not isinstance(value, nn.Parameter):
        return
    cure = f"module.register_buffer({name.rpartition('.')[2]!r}, ...) for what is not trained"
    if value.is_complex():
        cure = "hold real and imaginary part as one real parameter and use torch.view_as_complex in forward"
    raise StateError(f"is a parameter of dtype {value.dtype}; floating point is needed", where=name, hint=cure)


def _check_memory(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
    """A trained weight that is another tensor too, without being the same object, would come apart from it."""
    for first, second in overlaps(parameters, buffers):
        if any(name in parameters and parameters[name].requires_grad for name in (first, second)):
            raise StateError(
                f"lies in the memory of {first}, which is a tensor of its own; trained, they would differ",
                where=second,
                hint="the same nn.Parameter under both names, or a property that makes the one of the other",
            )


def overlaps(parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Names of two tensors that have memory in common, as a view has, without being tied: one object of one kind."""
    named = {**parameters, **buffers}
    spans = sorted((start, start + _length(value), name) for name, value in named.items() if (start := _address(value)))
    reaching: list[tuple[int, str]] = []  # ends and names of what began before and may reach this one
    for start, end, name in spans:
        reaching = [(until, other) for until, other in reaching if until > start]
        others = [other for _, other in reaching]
        if any(named[name] is named[other] and (name in parameters) == (other in parameters) for other in others):
            continue
        yield from ((other, name) for other in others if _meet(named[other], named[name]))
        reaching.append((end, name))


def _meet(one: Tensor, other: Tensor) -> bool:
    """Whether they share an element. Two columns of a matrix lie between each other's elements and share none."""
    size, start = one.element_size(), min(_address(one), _address(other))
    dense = all(value.numel() * value.element_size() == _length(value) for value in (one, other))
    if dense or other.element_size() != size or (_address(one) - _address(other)) % size:
        return True
    end = max(_address(value) + _length(value) for value in (one, other))
    taken = torch.zeros((end - start) // size, dtype=torch.bool)
    first, second = (
        # An expanded dimension is one element, again and again.
        taken.as_strided(
            [n if stride else 1 for n, stride in zip(value.shape, value.stride(), strict=True)],
            value.stride(),
            (_address(value) - start) // size,
        )
        for value in (one, other)
    )
    first.fill_(True)
    return bool(second.any())


def empty(modules: Iterable[tuple[str, nn.Module]]) -> tuple[str, ...]:
    """Names of buffers registered as None that a state_dict would hold if they were filled. A mask or a table that is
    made when it is first needed is left out of it, and is no state."""
    return tuple(
        f"{path}.{name}" if path else name
        for path, owner in modules
        if not type(owner).__module__.startswith("torch.nn.modules.")  # norms that keep no statistics never fill them
        for name, buffer in owner._buffers.items()  # pyright: ignore[reportPrivateUsage]  # named_buffers has no None
        if buffer is None and name not in owner._non_persistent_buffers_set  # pyright: ignore[reportPrivateUsage]
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


def _check_embedding(name: str, part: nn.Embedding | nn.EmbeddingBag) -> None:
    if part.max_norm is not None:
        raise StateError(
            f"max_norm={part.max_norm} writes the weights in the forward pass",
            where=name,
            hint="max_norm=None, and torch.nn.utils.parametrize for the norm",
        )
    if part.sparse and part.weight.requires_grad:
        raise StateError("sparse=True makes a sparse gradient", where=name, hint="sparse=False")
