"""`ensemble`: many models of one program in one step.

The step of one model is mapped by `torch.func.vmap` over stacked states, so that eight small matrix products become one
batched product. Whatever the host decides for one model, it decides here for all: random numbers, the position in the
accumulation window, the calls in the keys.
"""

# pyright: reportUnnecessaryIsInstance=false
# Arguments may be of any type, whatever the annotations say.

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Annotated, Any, Literal, cast

import torch
from torch import Tensor, nn

from .. import optim, rng, tree
from ..analysis import plain_functions, refused
from ..errors import ConfigError, DataError, StateError
from ..metrics import Gathered, handed_out
from ..model import Inference, functional
from ..state import at_least, known_keywords, stacked, views
from ..step import Adding, Closing, static_of
from ..torch_ext import draws, tracing
from ..types import Batch, Empty, Mean, Metrics, Program, Static, Steps, TrainState

_CURE = "replace this operation (torch.where instead of if); or train the members one by one, with the program itself"


@known_keywords
def ensemble(
    program: Program, members: Annotated[int, at_least(1)], *, batches: Literal["shared", "own"] = "shared"
) -> Program:
    """Train many models of one program in one step: an ensemble, several seeds, or a sweep of hyperparameters.

    Example:
        >>> import torch, purestep as ps
        >>> tx = ps.optim.inject(ps.optim.sgd)(learning_rate=0.1)
        >>> program = ps.program(torch.nn.Linear(2, 1), ps.supervised(torch.nn.MSELoss()), tx)
        >>> three = ps.ensemble(program, 3)
        >>> state = three.init(factory=lambda: torch.nn.Linear(2, 1), vary={"learning_rate": [0.1, 0.2, 0.4]})
        >>> state, metrics = three.train_step(state, (torch.ones(4, 2), torch.ones(4, 1)))
        >>> metrics["loss"].total.shape, three.bind(state)(torch.ones(4, 2)).shape
        (torch.Size([3]), torch.Size([3, 4, 1]))
        >>> predict = program.bind(ps.member(state, 0))

    The state is a TrainState whose leaves have a leading dimension for the members, also the key. Each member trains
    like the same program alone: it has its own weights, buffers, optimizer state, average, loss scale, dropout masks
    and counters. A member whose loss or gradient is not finite halts (or skips) alone.

    `fit`, `evaluate`, `predict`, `run_epoch`, `Snapshots`, `compile_step` and `compile_program` take the program and
    its states. A metric of a step is a vector with one entry for each member. The history has ``val_loss[0]``,
    ``val_loss[1]``, ..., their mean under ``val_loss`` and the best of them under ``val_loss[best]``; ``monitor`` may
    be any of these. A metric that computes its value itself (`metrics.from_torchmetrics`) is called ``val_auroc[0]``
    and so on. `fit` goes on until all members have halted, and warns of each one that has, or whose last 100 updates
    were refused. The order of a loader that shuffles depends on the seed of the first member.

    Functions of the result:

    - ``init(seed=0, device=None, *, seeds=None, models=None, factory=None, vary=None)`` returns the state. ``seeds``
      has an int for each member, by default ``seed``, ``seed + 1``, .... The weights are those of ``models`` (a
      module for each member), or of ``factory()``, called for each member inside ``rng.scoped(its seed)``, or those of
      the program's module for all. ``vary`` sets hyperparameters that `optim.inject` has put into the state:
      ``{"learning_rate": [1e-3, 3e-3]}``, a number for each member.
    - ``train_step``, ``flush``, ``eval_step`` are those of `Program`; a context is passed to every member as it is.
    - ``bind(state, view=None, train=False)`` returns a callable whose outputs have the leading dimension, for inputs
      that all members share: ``outputs.mean(0)`` and ``outputs.std(0)`` are those over the members.

    The guide "Sweeps and ensembles" lists the layers that cannot be mapped, and where random numbers differ.

    Args:
        program: from `purestep.program`, not compiled and not distributed, with ``engine="auto"`` or ``"func"``.
        members: the number of models, >= 1.
        batches: "shared": all members train on the same batch. "own": each tensor of a batch has a leading dimension
            for the members. For members that train on their own batches and are evaluated on shared ones, write
            ``own._replace(eval_step=shared.eval_step)``.

    Raises:
        ConfigError: an argument is out of range; from ``init``: a list does not have one entry for each member, a model
            is no module (also of a factory that returns none) or has other weights than the program's, or ``vary``
            names a hyperparameter that is not in the state.
        StateError: from a step: the state is not stacked, or has another number of members.
        DataError: from a step with ``batches="own"``: a leaf of the batch is no tensor with the leading dimension.
        StepContractError: from a step: torch cannot map an operation of the model.
    """
    base = _checked(program)
    mapped = _Mapped(base, members, own=batches == "own")

    def eval_step(state: TrainState, batch: Batch, *context: Any, index: int = 0) -> Metrics:
        """``(state, batch, *context, index=0) -> metrics`` in eval mode; see `Program`."""
        evaluate = base.eval_step
        assert evaluate is not None
        return _by_member(
            mapped(
                lambda one, rows: evaluate(one, rows, *context, index=index),
                views.for_evaluation(views.to_evaluate(mapped.plain(state))),
                batch,
                name="eval",
                index=index,
                where="eval_step",
            ),
            members,
        )

    def bind(state: TrainState, view: str | None = None, train: bool = False) -> Inference:
        """Return a callable with the weights of all members; its outputs have a leading dimension for them."""
        bound, plain = base.bind, mapped.plain(state)
        chosen = views.for_evaluation(views.view(plain, "params" if train and view is None else view))

        def run(method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            def of_member(one: TrainState, _: Batch) -> Any:
                return bound(one, "params", train).call(method, *args, **kwargs)

            return mapped.shared(of_member, chosen, where="bind")

        return Inference(run)

    assert base.static is not None
    of_one, tail = base.static.made.steps, base.static.tail
    steps = _steps_of(mapped, Steps(base.train_step, base.flush), tail)
    static = base.static._replace(
        members=members,
        member=base,
        made=base.static.made._replace(
            steps=lambda form: _steps_of(mapped, of_one(form), tail), rewritten=None, init_with=None
        ),
    )
    for function in steps:  # read by compile_step
        vars(function)["static"] = static
    return Program(steps.train_step, steps.flush, eval_step, _init_of(base, members), bind, static)


def _steps_of(mapped: _Mapped, one: Steps, tail: str) -> Steps:
    """Map the steps of one member."""

    def train_step(state: TrainState, batch: Batch, *context: Any) -> tuple[TrainState, Metrics]:
        """``(state, batch, *context) -> (state, metrics)``; the input state does not change."""
        plain = mapped.plain(state)
        new, metrics = mapped(
            lambda own, rows: one.train_step(own, rows, *context),
            _with_window(plain),
            batch,
            name="step",
            where="train_step",
        )
        return _with_key(new, plain), _by_member(metrics, mapped.members)

    def flush(state: TrainState) -> tuple[TrainState, Metrics]:
        """Close the open windows according to the program's ``tail``."""
        plain = mapped.plain(state)
        if isinstance(plain.accum, Empty) or tail == "carry":
            return plain, {}
        new, metrics = mapped(lambda own, _: one.flush(own), plain, None, name="step", where="flush")
        return _with_key(new, plain), _by_member(metrics, mapped.members)

    return Steps(train_step, flush)


def _checked(program: Any) -> Program:
    if not isinstance(program, Program):
        hint = "ps.ensemble(ps.program(model, objective, tx), 8)"
        raise ConfigError(f"the program is a {type(program).__name__}", where="ensemble", hint=hint)
    if program.static is None or static_of(program.train_step) is not program.static:
        raise ConfigError(
            "ps.ensemble maps the eager train_step of ps.program, and this one is compiled, or a function of yours",
            where="ensemble",
            hint="ps.ensemble(ps.program(model, objective, tx), 8), then ps.compile_program; map a step of your own by "
            "torch.func.vmap",
        )
    if program.static.stream:
        raise ConfigError("the program is distributed", where="ensemble", hint="pass the program of ps.program")
    if program.static.carry:
        hint = "train one model, or a model whose forward takes and returns the hidden state"
        raise ConfigError("the program carries buffers from batch to batch", where="ensemble", hint=hint)
    if program.static.members:
        raise ConfigError("the program is an ensemble", where="ensemble", hint="pass the program of one member")
    return program


# --- init -------------------------------------------------------------------------------------------------------------


def _init_of(base: Program, members: int) -> Callable[..., TrainState]:
    of_program = cast(Callable[..., TrainState], base.init)

    def init(
        seed: int = 0,
        device: torch.device | str | None = None,
        *,
        seeds: Sequence[int] | None = None,
        models: Sequence[nn.Module] | None = None,
        factory: Callable[[], nn.Module] | None = None,
        vary: Mapping[str, Sequence[float]] | None = None,
    ) -> TrainState:
        """Return the stacked state before the first step; see `ensemble`."""
        first = int(rng.key(seed)[0])
        given = range(first, first + members) if seeds is None else _listed("seeds", seeds, members)
        own = [int(rng.key(one)[0]) for one in given]
        modules = _modules(own, models, factory, members)
        if not isinstance(vary or {}, Mapping):
            hint = 'vary={"learning_rate": [...]}, a number for each member'
            raise ConfigError(f"vary is a {type(vary).__name__}", where="init", hint=hint)
        rates = {name: _listed(f"vary[{name!r}]", values, members) for name, values in (vary or {}).items()}
        states: list[TrainState] = []
        for index in range(members):
            made = of_program if modules is None else _init_with(base, modules[index], index)
            state = made(own[index], device)
            values = {name: numbers[index] for name, numbers in rates.items()}
            states.append(state._replace(opt_state=optim.set_hyperparams(state.opt_state, **values)))
        return stacked.stack(states)

    return init


def _listed(name: str, given: Any, members: int) -> list[Any]:
    found = list(given) if isinstance(given, Sequence | Tensor) and not isinstance(given, str) else None
    if found is None or len(found) != members:
        count = f"a {type(given).__name__}" if found is None else f"{len(found)} values"
        raise ConfigError(f"{name} is {count} for {members} members", where="init", hint=f"pass a list of {members}")
    return found


def _modules(seeds: list[int], models: Any, factory: Any, members: int) -> list[nn.Module] | None:
    if models is not None and factory is not None:
        raise ConfigError("both models and factory are set", where="init", hint="pass one of them")
    if models is not None:
        return _listed("models", models, members)
    if factory is None:
        return None
    if not callable(factory) or isinstance(factory, nn.Module):
        hint = "pass a function that returns a new module: factory=lambda: Net()"
        raise ConfigError(f"factory is a {type(factory).__name__}", where="init", hint=hint)
    made: list[Any] = []
    for seed in seeds:
        with rng.scoped(seed & ((1 << 63) - 1)):
            made.append(factory())
    return made


def _init_with(base: Program, module: Any, index: int) -> Callable[..., TrainState]:
    """Return ``init`` with the weights of the module of a member.

    Raises:
        ConfigError: it is no module, or has other weights than the program's.
    """
    assert base.static is not None
    assert base.static.made.init_with is not None
    if not isinstance(module, nn.Module):
        hint = "pass modules of the class that the program was built from; a factory returns one"
        raise ConfigError(f"model {index} is a {type(module).__name__}", where="init", hint=hint)
    params, frozen, _ = functional.tensors(module)
    other = {*params} ^ {*base.static.trained} | {*frozen} ^ {*base.static.frozen}
    wrong = [name for name in other if not name.startswith(functional.OBJECTIVE)]  # whose tensors all members share
    if wrong:
        raise ConfigError(
            f"model {index} does not fit the program: {', '.join(sorted(wrong)[:3])} is trained or frozen in one of "
            "them only",
            where="init",
            hint="build every model like the one that the program was built from",
        )
    return base.static.made.init_with(module)


# --- the mapped call --------------------------------------------------------------------------------------------------


class _Mapped:
    """Calls a function of one member's state and batch for all members at once.

    Args:
        base: the program of one member.
        members: their number.
        own: every member has its own batch.
    """

    def __init__(self, base: Program, members: int, *, own: bool) -> None:
        static = cast(Static, base.static)
        modules = list(static.module.modules()) if static.module is not None else []
        self._is_recurrent = any(isinstance(part, nn.RNNBase) for part in modules)
        self.members = members
        self._own = own
        self._draws = dict[str, bool]()  # by function: a call has drawn random numbers

    def plain(self, state: Any) -> TrainState:
        """Return the state as a plain TrainState.

        Raises:
            StateError: it is not stacked, or of another number of members.
        """
        found = stacked.size(state)
        if found != self.members:
            kind = f"has {found} members" if found else f"is a {type(state).__name__} of one model"
            kind = kind if isinstance(state, TrainState) else f"is a {type(state).__name__}"
            hint = f"pass the state of ensemble(...).init(), or ps.stack of {self.members} states"
            raise StateError(f"{kind}, and the ensemble has {self.members}", where="state", hint=hint)
        return TrainState(*state)

    def shared(self, call: Callable[[Any, Any], Any], state: TrainState, *, where: str) -> Any:
        """Return ``call(member's state, None)`` for all members, with draws from the caller's generator."""
        with ExitStack() as stack:
            self._enter_kernels(stack)
            return self._vmap(call, state, None, where, "different")

    def __call__(
        self,
        call: Callable[[Any, Any], Any],
        state: TrainState,
        batch: Batch,
        *,
        name: Literal["step", "eval"],
        where: str,
        index: int = 0,
    ) -> Any:
        """Return ``call(member's state, member's batch)`` for all members, with their random numbers.

        Args:
            call: returns a tree of tensors.
            state: stacked.
            batch: shared, or with the leading dimension; None for no batch.
            name: the stream of the random numbers.
            where: the function, for messages.
            index: of an evaluation's batch.
        """
        with ExitStack() as stack:
            self._enter_kernels(stack)
            if torch.compiler.is_dynamo_compiling():
                return self._vmap(call, state, batch, where, "different")
            if tracing.in_graph():
                with draws.Draws(self.members), draws.EagerDropout(mapped=True):
                    return self._vmap(call, state, batch, where, "different")
            # A dispatch mode takes a third of a small step's time, so only a step that draws runs inside it.
            if not self._draws.get(where):
                try:
                    return self._vmap(call, state, batch, where, "error")
                except _DrawsError:
                    self._draws[where] = True
            keys = stacked.keys(state)
            tags = [(seed, calls, "step") if name == "step" else (seed, "eval", index) for seed, calls in keys]
            numbers = [rng.mix(*tag) for tag in tags]
            stack.enter_context(draws.scoped(numbers, state.step.device, together=rng.mix(*numbers)))
            with draws.Draws(self.members), draws.EagerDropout(mapped=True):
                return self._vmap(call, state, batch, where, "different")

    def _enter_kernels(self, stack: ExitStack) -> None:
        """Choose kernels that `vmap` can map, instead of calling them for one member after another."""
        if torch.compiler.is_dynamo_compiling():
            return
        stack.enter_context(_attention_as_products())
        if self._is_recurrent:
            stack.enter_context(tracing.no_recurrent_kernel())

    def _vmap(self, call: Callable[[Any, Any], Any], state: TrainState, batch: Batch, where: str, draws: str) -> Any:
        leaves, state_def = tree.flatten(state)
        rows, batch_def = self._rows(batch)
        result: list[Any] = []

        def flat(*parts: Tensor) -> tuple[Tensor, ...]:
            one = tree.unflatten(state_def, list(parts[: len(leaves)]))
            own = batch if batch_def is None else tree.unflatten(batch_def, list(parts[len(leaves) :]))
            found, treedef = tree.flatten(call(one, own))
            at = [index for index, leaf in enumerate(found) if isinstance(leaf, Tensor)]
            result[:] = [treedef, found, at]
            return tuple(found[index] for index in at)

        try:
            is_plain = not self._is_recurrent or where not in ("eval_step", "bind")
            function = flat if is_plain else plain_functions.decomposed(flat)
            outputs = torch.func.vmap(function, randomness=draws)(*leaves, *rows)
        except RuntimeError as error:
            is_draw = "randomness error mode" in str(error)
            found = _DrawsError() if is_draw else refused(where, error, _CURE)
            if found is None:
                raise
            raise found from error
        treedef, found, at = result
        for index, leaf in zip(at, outputs, strict=True):
            found[index] = leaf
        return tree.unflatten(treedef, found)

    def _rows(self, batch: Batch) -> tuple[list[Tensor], tree.TreeDef | None]:
        """The leaves of a batch with a leading dimension for the members, and its structure; None if it is shared."""
        if not self._own or batch is None:
            return [], None
        named = tree.with_paths(tree.dicts(batch))
        for path, leaf in named:
            if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != self.members:
                found = f"shape {list(leaf.shape)}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
                raise DataError(
                    f"the leaf is {found}, without a leading dimension for {self.members} members",
                    where="/".join(filter(None, ("batch", path))),
                    hint='stack the batches of the members: torch.stack([x, ...]); or pass batches="shared"',
                )
        return [leaf for _, leaf in named], tree.flatten(tree.dicts(batch))[1]


class _DrawsError(Exception):
    """A step draws random numbers, in a call that allows none."""


@contextmanager
def _attention_as_products() -> Generator[None]:
    """`vmap` has no rule for the fused kernels of attention, and would call them for one member after another."""
    fused = torch.backends.mha
    was_on = fused.get_fastpath_enabled()
    fused.set_fastpath_enabled(False)
    try:
        with plain_functions.differentiable():
            yield
    finally:
        fused.set_fastpath_enabled(was_on)


# --- states and metrics -----------------------------------------------------------------------------------------------


def _with_window(state: TrainState) -> TrainState:
    """Set the type of the window to the one that selects what the step does with it, if the host may read it."""
    accum: Any = state.accum
    if isinstance(accum, Empty | Adding | Closing) or not tracing.may_branch(accum.left):
        return state
    left = stacked.window_left(state)
    if left is None:  # every member computes both results and selects its own
        return state
    return state._replace(accum=(Closing if left == 1 else Adding)(*accum))


def _with_key(new: TrainState, old: TrainState) -> TrainState:
    """Advance the keys, unless the host does so for a graph."""
    return new._replace(key=old.key if tracing.in_graph() else rng.advance(old.key))


def _by_member(metrics: Metrics, members: int) -> Metrics:
    """Split metrics that compute their value themselves into one for each member, called ``name[i]``."""
    means = handed_out.measured(metrics)
    split = [name for name, value in means.items() if isinstance(value, Gathered) or type(value) is not Mean]
    if not split:
        return metrics
    found: dict[str, Any] = {name: value for name, value in metrics.items() if name not in split}
    for name in split:
        for index in range(members):
            found[f"{name}[{index}]"] = tree.map(
                lambda leaf, at=index: leaf[at] if isinstance(leaf, Tensor) else leaf, metrics[name]
            )
    return found
