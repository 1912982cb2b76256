"""A module as a pure function of its tensors: the only module that calls `torch.func.functional_call`.

`Template` holds weightless copies of a module (parameters and buffers on the meta device), one in train mode and one in
eval mode, since the mode is a flag of the module. So the weights exist once, and the user's module never changes.
`bind` builds the pure call that an objective gets.
"""

from __future__ import annotations

import fnmatch
import operator
from collections.abc import Callable, Generator, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..errors import ConfigError, StateError, StepContractError
from ..state import nearest_names
from ..torch_ext import foreach, hidden, tensor_layout, tracing
from ..types import Params
from . import write_check
from .template import Named, check, copy_structure, none_buffers, overlaps, unwrapped, weightless_copy

_Found = TypeVar("_Found")
_Result = TypeVar("_Result")

OBJECTIVE = "objective."  # prefix of the names of an objective's own parameters and buffers


class Names(NamedTuple):
    """Names of a module's tensors, all static."""

    params: tuple[str, ...]  # trained
    frozen: tuple[str, ...]  # requires_grad=False
    buffers: tuple[str, ...]
    persistent: frozenset[str]  # buffers that a state_dict holds
    ties: dict[str, str]  # alias, as in a state_dict -> name in `params`, `frozen` or `buffers`
    aliases: dict[str, str]  # the ties that are separate attributes, which every call must set
    shared: tuple[str, ...]  # buffers that share memory with another tensor; a state holds them separately
    empty: tuple[str, ...]  # buffers registered as None, which a state does not hold


class Scheduled(dict[str, Tensor]):
    """The scheduled scalars of a program by name; shape=() each."""

    def __missing__(self, name: str) -> Tensor:
        known = f"it has {', '.join(self)}" if self else "it has none"
        raise StepContractError(
            f"the program has no scheduled value of this name; {known}",
            where=f"model.values/{name}",
            hint=f"ps.program(..., values={{{name!r}: schedule}})",
        )


class Template(NamedTuple):
    """Weightless modules in train and eval mode, and the names of their tensors."""

    train: _Dispatch
    eval: _Dispatch
    names: Names


class Bound:
    """The pure call of a module: ``model(...)``, ``model.call("encode", x)``, ``model.params``, ``model.training``.

    Its weights are fixed. Buffers that a forward pass writes are replaced in ``buffers`` of this object, so a second
    call uses the buffers of the first.
    """

    __slots__ = ("_held", "_module", "_names", "_tensors", "buffers", "frozen", "params", "training", "values")

    def __init__(self, template: Template, params: Params, frozen: Params, buffers: Params, *, train: bool) -> None:
        self._module = template.train if train else template.eval
        self._names = template.names
        self.params = params
        self.frozen = frozen
        self.buffers = buffers
        self.training = train
        self.values: dict[str, Tensor] = Scheduled()
        self._held = False
        self._tensors = {_inner(name): tensor for name, tensor in {**params, **frozen}.items()}

    @property
    def module(self) -> nn.Module:
        """The weightless module, to read its configuration."""
        return self._module.model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("model", "__call__", args, kwargs)

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the module other than forward, or a submodule, with the same weights.

        Example:
            >>> import torch
            >>> class Net(torch.nn.Linear):
            ...     def double(self, x):
            ...         return 2 * self(x)
            >>> net = Net(1, 1)
            >>> model = bind(template(net), *tensors(net))
            >>> model.call("double", torch.ones(1)).shape
            torch.Size([1])

        Args:
            method: its name, or the dotted name of a submodule (``"encoder.layers.0"``).
            args: of the method.
            kwargs: of the method.
        """
        return self._run("model", method, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the bound model has no attribute {name!r} (cure: model.params, model.frozen and model.buffers hold its "
            f"tensors by name; model.call({name!r}, ...) runs a method or submodule; model.module.{name} is a setting)"
        )

    def objective(self, *args: Any, **kwargs: Any) -> Any:
        """Call the objective's module (a criterion with parameters or buffers)."""
        return self._run("objective", "__call__", args, kwargs)

    def hold(self, forward: Callable[[], _Found], backward: Callable[[_Found], _Result]) -> _Result:
        """Return ``backward(forward())`` with the weights in the module during both.

        Activation checkpointing repeats parts of the forward pass during the backward pass, which needs the weights.
        The repeated parts read the buffers as they were before the forward pass; their writes to buffers are dropped.
        """
        before = _copied(self.buffers)
        marks = write_check.marks(self._tensors)

        def both() -> _Result:
            found = forward()
            write_check.check_weights(marks, self._tensors)
            for name, (owner, attribute) in _places(self._module, before).items():
                setattr(owner, attribute, before[name])
            return backward(found)

        self._held = True
        try:
            return self._with_weights(both)
        finally:
            self._held = False

    def _with_weights(self, run: Callable[[], _Result]) -> _Result:
        given = self._named()
        found = dict(given)  # functional_call updates this dict in place
        result = functional_call(self._module, found, (run,), tie_weights=False)
        if not torch.compiler.is_dynamo_compiling():
            weights = set(map(id, self._tensors.values()))
            lost = [name for name, weight in given.items() if found[name] is not weight and id(weight) in weights]
            if lost:
                raise write_check.assigned(lost[0])
        return result

    def _named(self) -> Params:
        tensors = {**self._tensors, **{_inner(name): buffer for name, buffer in self.buffers.items()}}
        # Set aliases here: functional_call would search for ties in every call.
        return tensors | {_inner(alias): tensors[_inner(name)] for alias, name in self._names.aliases.items()}

    def _run(self, target: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        shared = write_check.marks({name: self.buffers[name] for name in self._names.shared if name in self.buffers})

        def call() -> Any:
            owner = getattr(self._module, target)
            found = owner if method == "__call__" else operator.attrgetter(method)(owner)
            numbers = self._module.numbers.read()
            output = found(*args, **kwargs)
            self._module.numbers.check(numbers)
            if isinstance(output, Generator | nn.Module):  # they would be read when the module has no weights
                raise StepContractError(
                    f"the method returned a {type(output).__name__}",
                    where=f"model.{method}",
                    hint="read model.params, model.frozen and model.buffers, dicts from name to tensor, or the layers "
                    "of model.module, without weights; or add a method that computes with them",
                )
            # Read them before functional_call restores the module: the forward pass may have assigned new buffers.
            written: Params = {name: getattr(*at) for name, at in _places(self._module, self._names.buffers).items()}
            write_check.check_aliased_buffers(shared, self.buffers, written)
            write_check.check_none_buffers(_places(self._module, self._names.empty))
            return output, written

        if self._held:
            output, written = call()
        else:
            marks = write_check.marks(self._tensors)
            output, written = self._with_weights(call)
            write_check.check_weights(marks, self._tensors)
        if self.buffers:
            self.buffers = written
        return output


class Inference:
    """A module with the weights of a state, the value of ``program.bind(state)``: ``predict(x)`` calls forward,
    ``predict.call("encode", x)`` another method or a submodule.

    Example:
        >>> import torch, purestep as ps
        >>> class Net(torch.nn.Linear):
        ...     def double(self, x):
        ...         return 2 * self(x)
        >>> program = ps.program(Net(2, 1), ps.supervised(torch.nn.MSELoss()), ps.optim.sgd(0.1))
        >>> predict, x = program.bind(program.init()), torch.ones(4, 2)
        >>> torch.equal(predict.call("double", x), 2 * predict(x))
        True

    Args:
        run: ``(method, args, kwargs) -> outputs``.
    """

    __slots__ = ("_run",)

    def __init__(self, run: Callable[[str, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        self._run = run

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run("__call__", args, kwargs)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"the bound module has no attribute {name!r} (cure: predict.call({name!r}, ...))")

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the module other than forward, or a submodule by its dotted name."""
        return self._run(method, args, kwargs)


class _Dispatch(nn.Module):
    """Parent of the model and the objective, so that one functional_call can run any method of either."""

    model: nn.Module

    def __init__(self, model: nn.Module, objective: nn.Module | None) -> None:
        super().__init__()
        self.model = model
        if objective is not None:
            self.objective = objective
        self.numbers = write_check.Numbers(self)

    def forward(self, run: Callable[[], _Result]) -> _Result:
        return run()


def template(module: nn.Module, *, objective: nn.Module | None = None, keep_eval: Iterable[str] = ()) -> Template:
    """Build weightless copies of ``module`` (and of an objective's module), with the names of their tensors.

    Args:
        module: any `nn.Module`; it is not changed.
        objective: a criterion with parameters or buffers, which get names with the prefix ``objective.``.
        keep_eval: glob patterns of submodule names that stay in eval mode while training (``"backbone.*"``).

    Raises:
        StateError: a parameter is integer or lazy, or the module cannot be copied.
        ConfigError: a pattern of ``keep_eval`` matches no submodule.
    """
    module, objective = unwrapped(module), None if objective is None else unwrapped(objective)
    names = _names(module, objective)
    train = _Dispatch(weightless_copy(module), None if objective is None else weightless_copy(objective))
    evaluation = copy_structure(train)  # `train` has passed the checks
    train.train()
    evaluation.eval()
    _keep_eval(train.model, keep_eval)
    return Template(train, evaluation, names)


class _Inside(nn.Module):
    """Parent of a block, so that one functional_call can run its forward method without its hooks."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, run: Callable[[], _Result]) -> _Result:
        return run()


def with_weights(block: nn.Module, params: Params, run: Callable[[], _Result]) -> _Result:
    """Return ``run()`` with these parameters in a block, by their names in it."""
    named = {f"block.{name}": value for name, value in params.items()}
    return functional_call(_Inside(block), named, (run,), tie_weights=False)


def rewritten(given: Template, change: Callable[[nn.Module], None]) -> Template:
    """Copy a template and change the copies of its module.

    Args:
        given: from `template`.
        change: changes the module in train mode, and the one in eval mode, in place; the names of tensors stay.
    """
    train, evaluation = copy_structure(given.train), copy_structure(given.eval)
    for each in (train, evaluation):
        change(each.model)
    return Template(train, evaluation, given.names)


def bind(
    template: Template,
    params: Params,
    frozen: Params | None = None,
    buffers: Params | None = None,
    train: bool = False,
) -> Bound:
    """Return the pure call with these weights. Buffers are copied, so a forward pass does not change the caller's."""
    return Bound(template, params, frozen or {}, _copied(buffers or {}), train=train)


def _copied(buffers: Params) -> Params:
    are_dense = all(type(buffer) is Tensor and tensor_layout.is_dense(buffer) for buffer in buffers.values())
    if are_dense and len(buffers) > 1 and tracing.may_overwrite(buffers.values()):
        return dict(zip(buffers, foreach.clone(list(buffers.values())), strict=True))
    return {name: buffer.clone() for name, buffer in buffers.items()}


def tensors(module: nn.Module, objective: nn.Module | None = None) -> tuple[Params, Params, Params]:
    """Return the current ``(params, frozen, buffers)`` of a module by name, each tied tensor once, without copies."""
    module, objective = unwrapped(module), None if objective is None else unwrapped(objective)
    params: Params = {}
    frozen: Params = {}
    for name, parameter in _first(_parameters(module, objective)).items():
        (params if parameter.requires_grad else frozen)[name] = parameter.detach()
    buffers = {name: buffer.detach() for name, buffer in _first(_buffers(module, objective)).items()}
    return params, frozen, buffers


def _parameters(module: nn.Module, objective: nn.Module | None) -> Named:
    own = [] if objective is None else objective.named_parameters(prefix=OBJECTIVE[:-1], remove_duplicate=False)
    return [*module.named_parameters(remove_duplicate=False), *own]


def _buffers(module: nn.Module, objective: nn.Module | None) -> Named:
    own = [] if objective is None else objective.named_buffers(prefix=OBJECTIVE[:-1], remove_duplicate=False)
    return [*module.named_buffers(remove_duplicate=False), *own]


def _modules(module: nn.Module, objective: nn.Module | None) -> list[tuple[str, nn.Module]]:
    own = [] if objective is None else objective.named_modules(prefix=OBJECTIVE[:-1])
    return [*module.named_modules(), *own]


def _first(named: Named) -> dict[str, Tensor]:
    """Each tensor under its first name only."""
    ties = _ties(named)
    return {name: value for name, value in named if name not in ties}


def _ties(named: Named) -> dict[str, str]:
    first: dict[int, str] = {}
    return {name: known for name, value in named if (known := first.setdefault(id(value), name)) != name}


def _names(module: nn.Module, objective: nn.Module | None) -> Names:
    reserved = [name for name, _ in (*_parameters(module, None), *_buffers(module, None)) if name.startswith(OBJECTIVE)]
    if reserved:
        raise StateError(
            "the name is reserved for the objective's own tensors",
            where=reserved[0],
            hint="rename the submodule 'objective'",
        )
    parameters, buffers = _parameters(module, objective), _buffers(module, objective)
    modules = _modules(module, objective)
    check(modules, parameters, buffers)
    found = _first(parameters)
    params = tuple(name for name, parameter in found.items() if parameter.requires_grad)
    if not found:
        hint = "put layers into nn.ModuleList or nn.ModuleDict: a plain list or dict does not register them"
        raise StateError("the module has no parameters", where=type(module).__name__, hint=hint)
    if not params:
        raise StateError(
            "the module has no parameter with requires_grad=True",
            where=type(module).__name__,
            hint="call module.requires_grad_(True)",
        )
    frozen = tuple(name for name, parameter in found.items() if not parameter.requires_grad)
    persistent = _persistent(module, objective)
    ties = _ties(parameters) | _ties(buffers)
    saved = {alias: name for alias, name in ties.items() if name in found or {alias, name} <= persistent}
    kept = tuple(_first(buffers))
    together = {name for pair in overlaps(dict(parameters), dict(buffers)) for name in pair}
    shared = tuple(name for name in kept if name in together)
    attributes, nothing = _attributes(module, objective, ties), none_buffers(modules)
    return Names(params, frozen, kept, persistent, saved, attributes, shared, nothing)


def _attributes(module: nn.Module, objective: nn.Module | None, ties: dict[str, str]) -> dict[str, str]:
    """Ties without those of a module that is used twice: its only attribute is set under its first name."""
    seen: set[tuple[int, str]] = set()
    found: dict[str, str] = {}
    for name, _ in (*_parameters(module, objective), *_buffers(module, objective)):
        root = objective if name.startswith(OBJECTIVE) and objective is not None else module
        owner, _, attribute = name.removeprefix(OBJECTIVE).rpartition(".")
        slot = id(root.get_submodule(owner)), attribute
        if name in ties and slot not in seen:
            found[name] = ties[name]
        seen.add(slot)
    return found


def _persistent(module: nn.Module, objective: nn.Module | None) -> frozenset[str]:
    found: set[str] = set()
    for prefix, root in (("", module), (OBJECTIVE, objective)):
        for path, owner in () if root is None else root.named_modules(remove_duplicate=False):
            start = f"{prefix}{path}." if path else prefix
            found |= {start + name for name in hidden.saved_buffers(owner)}
    return frozenset(found)


def matching_buffers(module: nn.Module, objective: nn.Module | None, patterns: Iterable[str]) -> Params:
    """Copies of the buffers whose names match a pattern.

    Raises:
        ConfigError: a pattern matches none.
    """
    _, _, buffers = tensors(module, objective)
    found: Params = {}
    for pattern in (patterns,) if isinstance(patterns, str) else patterns:
        matched = fnmatch.filter(buffers, pattern)
        if not matched:
            hint = nearest_names(pattern, list(buffers)) if buffers else f"self.register_buffer({pattern!r}, ...)"
            raise ConfigError(f"{pattern!r} matches no buffer", where="carry", hint=hint)
        found |= {name: buffers[name].clone() for name in matched}
    return found


def _keep_eval(module: nn.Module, patterns: Iterable[str]) -> None:
    known = [name for name, _ in module.named_modules() if name]
    for pattern in (patterns,) if isinstance(patterns, str) else patterns:
        matched = [name for name in known if fnmatch.fnmatchcase(name, pattern) or name.startswith(f"{pattern}.")]
        if not matched:
            hint = nearest_names(pattern, known)
            raise ConfigError(f"{pattern!r} matches no submodule", where="keep_eval", hint=hint)
        for name in matched:
            module.get_submodule(name).eval()


def _inner(name: str) -> str:
    return name if name.startswith(OBJECTIVE) else f"model.{name}"


def _places(root: nn.Module, names: Iterable[str]) -> dict[str, tuple[nn.Module, str]]:
    """The module and the attribute of each name."""
    owners: dict[str, nn.Module] = {}
    found: dict[str, tuple[nn.Module, str]] = {}
    for name in names:
        path, _, attribute = _inner(name).rpartition(".")
        owner = owners.get(path)
        if owner is None:  # attrgetter takes a fraction of get_submodule's time
            owner = owners[path] = operator.attrgetter(path)(root)
        found[name] = owner, attribute
    return found
