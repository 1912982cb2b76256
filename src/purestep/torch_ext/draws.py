"""Random numbers that a graph, and a member of an ensemble, draw as eager mode does.

Torch fills a tensor in memory order, so its numbers depend on its layout. Inductor chooses layouts for the readers,
removes unread tensors and rewrites random operators, and `torch.func.vmap` draws the numbers of all members in one
call. `Draws` replaces uniform, normal, Bernoulli and similar draws, and the functions that torch builds on them, by two
operators with explicit strides, which compilers neither change nor remove: ``purestep::drawn`` fills a new tensor, and
``purestep::coins`` draws with a tensor of probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, library
from torch.overrides import TorchFunctionMode

from ..errors import StepContractError
from . import global_rng, tracing

_aten: Any = torch.ops.aten
_generators: ContextVar[Sequence[torch.Generator]] = ContextVar("member_generators", default=())


class RefusedDraw(StepContractError):
    """A graph, or a member of an ensemble, cannot draw by this operator."""


@contextmanager
def scoped(numbers: Sequence[int], device: torch.device, *, together: int) -> Generator[None]:
    """Give each member a generator inside the block, and seed the global generators for draws that belong to no member.

    Args:
        numbers: a seed in [0, 2**63) for each member.
        device: of the draws.
        together: the seed of the global generators.

    Example:
        >>> with scoped([1, 2], torch.device("cpu"), together=3):
        ...     both = drawn("aten.uniform_.default", (2, 3), (3, 1), torch.float32, [], [0.0, 1.0], 2)
        >>> bool((both[1] == torch.rand(3, generator=torch.Generator().manual_seed(2))).all())
        True
    """
    token = _generators.set([torch.Generator(device=device).manual_seed(number) for number in numbers])
    try:
        with global_rng.seeded(together, device):
            yield
    finally:
        _generators.reset(token)


# --- operators --------------------------------------------------------------------------------------------------------

_INTEGERS = getattr(_aten.random_, "from")
_PERMUTATION = "randperm"

FILLS: dict[str, Any] = {
    str(fill): fill
    for fill in (
        *(_aten.bernoulli_.float, _aten.uniform_.default, _aten.normal_.default, _aten.exponential_.default),
        *(_aten.geometric_.default, _aten.cauchy_.default, _aten.log_normal_.default),
        *(_aten.random_.default, _aten.random_.to, _INTEGERS),
    )
}
"""In-place operators of torch that fill a tensor, with numeric arguments."""


def drawn(
    fill: str,
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    whole: Sequence[int],
    numbers: Sequence[float],
    members: int,
) -> Tensor:
    """Return a new tensor, filled by torch.

    Args:
        fill: the name of an operator that fills a tensor in place; or "randperm".
        size: of the result.
        stride: the same.
        dtype: the same.
        whole: integer arguments of the operator.
        numbers: the other ones.
        members: the leading dimension, whose parts the members' generators fill; 0: the default generator fills all.
    """
    made = _empty(size, stride, dtype, members)
    for part, generator in _parts(made, members):
        if fill == _PERMUTATION:
            torch.randperm(len(part), out=part)
        else:
            FILLS[fill](part, *(whole or ()), *(numbers or ()), generator=generator)  # AOTInductor gives None for []
    return made


def coins(chances: Tensor, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, members: int) -> Tensor:
    """As `drawn`, with Bernoulli draws of these probabilities, which have the same shape if there are members."""
    made = _empty(size, stride, dtype, members)
    each = chances.unbind() if members else (chances,)
    for (part, generator), chance in zip(_parts(made, members), each, strict=True):
        part.bernoulli_(chance, generator=generator)
    return made


def _empty(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, members: int) -> Tensor:
    generators = _generators.get() if members else ()
    device = generators[0].device if generators else torch.device("cpu")
    return torch.empty_strided(size or (), stride or (), dtype=dtype, device=device)


def _parts(made: Tensor, members: int) -> Sequence[tuple[Tensor, torch.Generator | None]]:
    if not members:
        return [(made, None)]
    # While a compiler tries an operator there is no scope: any numbers will do.
    return list(zip(made.unbind(), _generators.get() or [torch.Generator()] * members, strict=True))


def _fake(like: Any, size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, *_: Any) -> Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cpu")


_LIBRARY = library.Library("purestep", "FRAGMENT")

for _function, _schema in (
    (drawn, "str fill, SymInt[] size, SymInt[] stride, ScalarType dtype, SymInt[] whole, float[] numbers, int members"),
    (coins, "Tensor chances, SymInt[] size, SymInt[] stride, ScalarType dtype, int members"),
):
    _LIBRARY.define(f"{_function.__name__}({_schema}) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,))
    _LIBRARY.impl(_function.__name__, _function, "CompositeExplicitAutograd")
    library.register_fake(f"purestep::{_function.__name__}", _fake, lib=_LIBRARY)

DRAWN: Any = torch.ops.purestep.drawn.default
COINS: Any = torch.ops.purestep.coins.default
for _operator in (DRAWN, COINS):
    torch.fx.has_side_effect(_operator)  # the generator advances even if the numbers are unread


# --- the mode ---------------------------------------------------------------------------------------------------------

_NEW: dict[str, Callable[[Mapping[str, Any]], tuple[str, Sequence[Any]]]] = {
    **dict.fromkeys(("rand", "rand_like"), lambda given: ("aten.uniform_.default", (0.0, 1.0))),
    **dict.fromkeys(("randn", "randn_like"), lambda given: ("aten.normal_.default", (0.0, 1.0))),
    **dict.fromkeys(("randint", "randint_like"), lambda given: (str(_INTEGERS), (given.get("low", 0), given["high"]))),
    "normal": lambda given: ("aten.normal_.default", (given["mean"], given["std"])),
    "randperm": lambda given: (_PERMUTATION, ()),
}
"""Operators that allocate a tensor and fill it -> the fill and its numeric arguments."""

_REFUSED = {
    *("multinomial", "poisson", "binomial", "_standard_gamma", "_sample_dirichlet"),
    *("rrelu_with_noise", "rrelu_with_noise_", "rrelu_with_noise_functional"),
}
"""Operators without a fill in place, which compilers lower in ways of their own."""


class Draws(tracing.Mode):
    """Mode in which a graph, or each member of an ensemble, draws the numbers of eager mode.

    In a graph it replaces draws on the CPU without an explicit generator. Other devices have numbers of their own.

    Args:
        members: the leading dimension of the tensors under `torch.func.vmap`; 0: a graph of one model.

    Raises:
        RefusedDraw: a sampler without a rule here.

    Example:
        >>> def noisy(x):
        ...     return x + torch.rand(3)
        >>> with scoped([1, 2], torch.device("cpu"), together=3), Draws(2):
        ...     both = torch.func.vmap(noisy, randomness="different")(torch.zeros(2, 3))
        >>> bool((both[1] == torch.rand(3, generator=torch.Generator().manual_seed(2))).all())
        True
    """

    def __init__(self, members: int = 0) -> None:
        super().__init__()
        self._members = members

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if tracing.has_parts(types):
            return NotImplemented
        kwargs = kwargs or {}
        if getattr(func, "namespace", "") != "aten" or not tracing.is_random(func, args, kwargs):
            return func(*args, **kwargs)
        given = _bound(func, args, kwargs)
        if given.get("generator") is not None or given.get("training") is False:  # a ReLU in evaluation draws nothing
            return func(*args, **kwargs)
        name, in_graph = func._schema.name.removeprefix("aten::"), not self._members or tracing.in_graph()
        if name in _REFUSED or (self._members and in_graph and name == "randperm"):
            raise self._refused(name)
        if in_graph and not _is_on_cpu(given):
            return func(*args, **kwargs)
        made = self._replaced(func, name, given, DRAWN if in_graph else drawn, COINS if in_graph else coins)
        if made is NotImplemented and self._members:
            raise self._refused(name)
        return func(*args, **kwargs) if made is NotImplemented else made

    def _refused(self, name: str) -> RefusedDraw:
        cure = "draw in the loader, and pass the numbers in the batch"
        if self._members:
            what, other = "which a member of an ensemble cannot do", "or train the members one by one"
        else:
            what, other = "which a graph cannot hold", "or call the step itself, in eager mode (in fit: compile=False)"
        return RefusedDraw(f"the step draws with aten::{name}, {what}", where="step", hint=f"{cure}; {other}")

    def _replaced(self, func: Any, name: str, given: dict[str, Any], drawn: Any, coins: Any) -> Any:
        """The result of a random operator; NotImplemented for one without a rule."""
        source: Any = given.get("self", given.get("input"))

        def fill(operator: str, like: Tensor, numbers: Sequence[Any]) -> Any:
            if not self._fits(like) or any(number is None or isinstance(number, Tensor) for number in numbers):
                return NotImplemented
            whole, floats = (numbers, []) if "random_" in operator else ([], [float(number) for number in numbers])
            return drawn(operator, like.shape, like.stride(), like.dtype, list(whole), floats, self._members)

        def toss(like: Tensor, chances: Any) -> Any:
            if not isinstance(chances, Tensor):
                return fill("aten.bernoulli_.float", like, [chances])
            if not self._fits(like) or (self._members and like.shape != chances.shape):
                return NotImplemented
            return coins(chances, like.shape, like.stride(), like.dtype, self._members)

        made = NotImplemented
        if "out" in given:
            pass
        elif name in ("bernoulli", "bernoulli_"):
            like = torch.empty_like(source, memory_format=torch.contiguous_format) if name == "bernoulli" else source
            made = toss(like, given.get("p", source))
        elif str(func) in FILLS:
            made = fill(str(func), source, [value for key, value in given.items() if key not in ("self", "generator")])
        elif name == "native_dropout" and 0 < given["p"] < 1 and given["train"] is not False:
            mask = fill("aten.bernoulli_.float", torch.empty_like(source), [1 - given["p"]])
            return mask if mask is NotImplemented else (source * (mask / (1 - given["p"])), mask.to(torch.bool))
        elif name == "normal" and "size" not in given:
            return _normal(fill, given["mean"], given["std"])
        elif name in _NEW and not (self._members and name == "randperm"):
            operator, numbers = _NEW[name](given)
            made = fill(operator, _allocated(given), numbers)
        return source.copy_(made) if made is not NotImplemented and name.endswith("_") else made

    def _fits(self, like: Tensor) -> bool:
        return not self._members or (like.dim() > 0 and like.shape[0] == self._members)


def _bound(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, with the operator's own defaults."""
    found = dict[str, Any]()
    for at, argument in enumerate(func._schema.arguments):
        default = argument.default_value
        default = torch.int64 if argument.name == "dtype" and default is not None else default  # schemas have numbers
        found[argument.name] = args[at] if at < len(args) else kwargs.get(argument.name, default)
    return found


def _is_on_cpu(given: Mapping[str, Any]) -> bool:
    devices = {leaf.device.type for leaf in given.values() if isinstance(leaf, Tensor)}
    if given.get("device") is not None:
        devices = {torch.device(given["device"]).type}
    return devices <= {"cpu"} and not given.get("pin_memory")


def _allocated(given: Mapping[str, Any]) -> Tensor:
    """The tensor that an operator fills, from its arguments."""
    options = {name: given[name] for name in ("dtype", "layout", "device", "pin_memory")}
    if "self" in given:
        return torch.empty_like(given["self"], **options, memory_format=given["memory_format"])
    return torch.empty(given["size"] if "size" in given else (given["n"],), **options)


def _normal(fill: Callable[..., Any], mean: Any, std: Any) -> Any:
    """Normal draws with a tensor as mean or deviation. The result is contiguous whatever their layouts, and has the
    dtype of the first tensor."""
    tensors = [leaf for leaf in (mean, std) if isinstance(leaf, Tensor)]
    shape = torch.broadcast_shapes(*(leaf.shape for leaf in tensors))
    like = torch.empty(shape, dtype=tensors[0].dtype, device=tensors[0].device)
    made = fill("aten.normal_.default", like, (0.0, 1.0 if isinstance(std, Tensor) else std))
    if made is NotImplemented:
        return made
    scaled = (made * std).to(like.dtype) if isinstance(std, Tensor) else made
    return (scaled + mean).to(like.dtype)


class EagerDropout(TorchFunctionMode):
    """Mode in which dropout under `torch.func` has the masks of eager mode, on the CPU.

    Torch fills a mask in the memory order of its input, but under a transform a contiguous one, from sizes that must
    not be symbols.

    Args:
        mapped: under `torch.func.vmap`, where a member has the masks that it has alone.

    Example:
        >>> def dropped(x):
        ...     return torch.nn.functional.dropout(x.t())
        >>> with scoped([1, 2], torch.device("cpu"), together=3), Draws(2), EagerDropout(mapped=True):
        ...     both = torch.func.vmap(dropped, randomness="different")(torch.ones(2, 3, 4))
        >>> _ = torch.manual_seed(2)
        >>> bool((both[1] == dropped(torch.ones(3, 4))).all())
        True
    """

    def __init__(self, *, mapped: bool = False) -> None:
        super().__init__()
        self._mapped = mapped

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.dropout or func is torch.dropout:
            return _dropped(self._mapped, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _dropped(
    mapped: bool, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **given: bool
) -> Tensor:
    training = given.get("train", training)
    # Mapped by the user. Dynamo cannot read `is_mapped`.
    other = not mapped and not torch.compiler.is_compiling() and tracing.is_mapped(input)
    if other or not training or not 0 < p < 1 or input.device.type != "cpu":
        return torch.nn.functional.dropout(input, p, training, inplace)
    mask = torch.empty_like(input)
    if mapped:  # `vmap` cannot fill a tensor that all members share
        order = sorted(range(mask.dim()), key=mask.stride, reverse=True)
        drawn = torch.bernoulli(mask.permute(order), 1 - p)
        mask = drawn.permute(sorted(range(mask.dim()), key=order.__getitem__))
    else:
        mask.bernoulli_(1 - p)
    dropped = input * (mask / (1 - p))
    return input.copy_(dropped) if inplace else dropped
