"""The inputs of `fit`, checked and opened: settings, program, state, loaders, sinks.

A state is checked before the first step, and one message names all its problems. Two leaves that share memory are an
error: a donated step that writes one would change both, and a snapshot would untie them. A module's tied weights are
one leaf of a state, so they are none of these.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from .. import data, parallel, sinks, tree
from ..compile import plain
from ..errors import ConfigError, Mismatch, StateError
from ..precision import auto_device, policy
from ..snapshot import RunRecord, Snapshots
from ..state import stacked, usable_device, views
from ..torch_ext import tensor_layout
from ..types import Empty, Program, TrainState, Tree
from . import ranks

if TYPE_CHECKING:  # loads pydantic, which takes half as long as the rest of `import purestep`
    from ..config import FitConfig

_log = logging.getLogger("purestep")


# --- settings, program, loaders ---------------------------------------------------------------------------------------


class Feeds(NamedTuple):
    """The training feed and the evaluation feeds by name."""

    train: data.Feed
    evaluation: dict[str, data.Feed]

    def close(self) -> None:
        """Stop the workers of all feeds, also if one fails."""
        with ExitStack() as stack:
            for feed in (self.train, *self.evaluation.values()):
                stack.callback(feed.close)


def settings(config: object, fields: Mapping[str, Any]) -> FitConfig:
    """Return the settings of `config` and `fields`: see `config.sources`."""
    from ..config import sources  # late, see above

    return sources.resolve(config, fields)


def checked_program(program: Any) -> Program:
    """Return the program.

    Raises:
        ConfigError: it is missing, or something else.
    """
    if isinstance(program, Program):
        return program
    raise ConfigError(
        "no program was given" if program is None else f"program is a {type(program).__name__}, not a Program",
        where="fit",
        hint="fit(state, loaders, ps.program(model, objective, tx)), or ps.Program(train_step) for a step of your own",
    )


def open_feeds(loaders: Any, config: FitConfig, program: Program, seed: int, mesh: parallel.Mesh | None) -> Feeds:
    """Open the feeds of a mapping of loaders, or of a (train, val) pair, with the config's limits.

    Raises:
        ConfigError: no "train" loader, or settings that name an unknown loader.
        DataError: an object that is no loader, or an empty loader.
        RankError: a loader that cannot be divided among processes, or that is divided already.
    """
    named = _named_loaders(loaders)
    for name, loader in named.items():
        ranks.check_loader(loader, where=name)
    for field in ("limit_batches", "evaluate_every"):
        value = getattr(config, field)
        for name in value if isinstance(value, Mapping) else ():
            if name not in named:
                raise ConfigError(f"{field} names a loader {name!r}", where="fit", hint=f"one of {sorted(named)}")
    train = _limited("train", named.pop("train"), config, seed, mesh)
    limits = {name: config.limit(name) for name in named}
    opened = {name: _limited(name, loader, config, seed, mesh) for name, loader in named.items() if limits[name] != 0}
    if config.overfit_batches:
        train = data.held(train, config.overfit_batches)
        opened = dict.fromkeys(opened, train)
    if opened and program.eval_step is None:
        raise ConfigError(
            f"the program has no eval_step for the loaders {sorted(opened)}",
            where="fit",
            hint='ps.Program(train_step, eval_step=...), or {"train": loader} alone',
        )
    return Feeds(train, opened)


def _named_loaders(loaders: Any) -> dict[str, Any]:
    if isinstance(loaders, Mapping):
        named = dict(loaders)
    elif isinstance(loaders, tuple) and len(loaders) == 2:
        named = {name: loader for name, loader in zip(("train", "val"), loaders, strict=True) if loader is not None}
    elif isinstance(loaders, tuple):
        raise ConfigError(
            f"loaders are a tuple of {len(cast(tuple[Any, ...], loaders))}: only a pair (train, val) has names",
            where="fit",
            hint='{"train": train, "val": val, "test": test}, where "test" is evaluated in each epoch too; or, after '
            "fit, ps.evaluate(result.state, test, program.eval_step); list(batches) for a tuple of batches",
        )
    elif isinstance(loaders, list) and any(isinstance(one, DataLoader) for one in cast(list[Any], loaders)):
        hint = '{"train": train_loader, "val": val_loader}, or the pair (train_loader, val_loader)'
        raise ConfigError("loaders are a list, which is read as one loader's batches", where="fit", hint=hint)
    else:
        named = {"train": loaders}
    if "train" not in named:
        raise ConfigError(
            f"loaders are {sorted(map(str, named))}; none is called 'train'",
            where="fit",
            hint='{"train": train_loader, "val": val_loader}',
        )
    return named


def _limited(name: str, loader: Any, config: FitConfig, seed: int, mesh: parallel.Mesh | None) -> data.Feed:
    first = config.fast_dev_run or config.limit(name)
    return data.open_feed(loader, name=name, seed=seed, repeats=name != "train", first=first, mesh=mesh)


# --- the state --------------------------------------------------------------------------------------------------------

_CURE = "program.init(seed=0), or a tree of dicts, lists, tuples and dense tensors"


def checked_state(state: Tree) -> Tree:
    """Return the plain state, if it is a tree of dense tensors on one device (a key may be on the CPU).

    Raises:
        StateError: one message for all leaves that are not; a node that contains itself; or a donated state.
    """
    state = plain(state)
    leaves = tree.with_paths(state)
    problems = [(path, _unfit(leaf)) for path, leaf in leaves]
    wrong = [f"{path}: {text}" if path else text for path, text in problems if text]
    if wrong or not leaves:
        raise StateError("; ".join(wrong) or "there is no tensor in it", where="init_state", hint=_CURE)
    _check_counters(state)
    _check_devices(leaves)
    _check_ties(leaves)
    return state


def check_fits(state: Tree, program: Program) -> None:
    """Check that a TrainState has the fields of this program.

    Raises:
        StateError: other weights are trained, or an average or an accumulation window is missing or too many.
    """
    static = program.static
    if static is None or not isinstance(state, TrainState):
        return
    if stacked.size(state) != static.members:
        text = f"the state has {stacked.size(state)} members, the program {static.members}"
        hint = (
            "ps.ensemble(program, members).init(), ps.stack(states), or ps.member(state, 0) for a program of one model"
        )
        raise StateError(f"the state is of another program: {text}", where="init_state", hint=hint)
    has_window, has_ema = (not isinstance(part, Empty) for part in (state.accum, state.ema))
    wrong = [f"{name} is trained in one of them only" for name in sorted({*state.params} ^ {*static.trained})[:3]]
    if has_ema != static.has_ema:
        wrong.append(f"{'the state' if has_ema else 'the program'} alone has an average")
    if has_window != (static.accumulate > 1):
        wrong.append(f"accumulate={static.accumulate}, and the state has {'a' if has_window else 'no'} window")
    if wrong:
        raise StateError(
            f"the state is of another program: {'; '.join(wrong)}",
            where="init_state",
            hint="program.init(); call ps.load_into(model, state) before it to take over weights",
        )


def is_key(path: str, leaf: Tensor) -> bool:
    """True if a leaf is a random key, or the keys of a stacked state. A parameter may be called "key" too."""
    if path.rpartition("/")[2] != "key" or leaf.dtype != torch.int64:
        return False
    return leaf.shape == (2,) or (path == "key" and leaf.dim() == 2 and leaf.shape[1] == 2)


def _unfit(leaf: Any) -> str:
    """Say why a leaf cannot be trained or stored; "" if it can."""
    if not isinstance(leaf, Tensor):
        return f"{type(leaf).__name__} is not a tensor"
    if kind := tensor_layout.layout_name(leaf):
        return f"a {kind} tensor; dense ones are needed"
    if tensor_layout.overlaps(leaf):
        return f"several of its numbers share memory (strides {list(leaf.stride())}); .clone() copies it"
    return ""


def _check_counters(state: Tree) -> None:
    """Check the leaves of a TrainState that the host reads."""
    many = (stacked.size(state),) if stacked.size(state) else ()
    shapes = {"step": many, "updates": many, "key": (*many, 2)} if isinstance(state, TrainState) else {}
    for name, shape in shapes.items():
        leaf = getattr(state, name)
        if not isinstance(leaf, Tensor) or leaf.dtype != torch.int64 or leaf.shape != shape:
            raise StateError(
                f"the leaf must be an int64 tensor of shape {list(shape)}", where=name, hint="program.init(seed=0)"
            )


def _check_devices(leaves: list[tuple[str, Tensor]]) -> None:
    devices: dict[str, str] = {}
    for path, leaf in leaves:
        if not is_key(path, leaf):
            devices.setdefault(str(leaf.device), path)
    if len(devices) > 1:
        raise StateError(
            f"leaves are on several devices: {', '.join(f'{path} on {device}' for device, path in devices.items())}",
            where="init_state",
            hint='program.init(seed=0, device="cuda")',
        )
    if "meta" in devices:
        raise StateError("the tensor is on the meta device and has no values", where=devices["meta"], hint=_CURE)


def _check_ties(leaves: list[tuple[str, Tensor]]) -> None:
    paths: set[str] = set()
    owners: dict[tuple[str, int], str] = {}
    wrong: list[str] = []
    for path, leaf in leaves:
        if path in paths:
            wrong.append(f"two leaves have the path {path}")
        paths.add(path)
        if leaf.numel():
            owner = owners.setdefault((str(leaf.device), leaf.data_ptr()), path)
            if owner != path:
                wrong.append(f"{path} and {owner} are one tensor")
    if wrong:
        raise StateError("; ".join(wrong), where="init_state", hint="ps.clone(value) for one of them; keys without '/'")


def placed(state: Tree, device: str | None, program: Program) -> Tree:
    """Return the state on the device of the run, with its keys on the CPU, even if the caller moved them.

    Args:
        state: stays as it is.
        device: where to train. None: the best device, with a message, for a copy of a state on the CPU; the present
            device for any other state.
        program: of the run.

    Returns:
        The same object if nothing has to move.

    Raises:
        ConfigError: the device does not exist, or cannot compute in the program's precision.
    """
    here = data.device_of(state)
    best = auto_device() if device is None and here.type == "cpu" else here
    wanted = best if device is None else usable_device(device)
    if wanted.type == "cpu" and program.static is not None and program.static.precision.startswith("16-"):
        text = "precision=%r on the CPU, which has no fast float16: steps take several times as long (cure: %r)"
        _log.warning(text, program.static.precision, program.static.precision.replace("16-", "bf16-"))
    if wanted != here and program.static is not None:
        policy(program.static.precision).check(wanted)
    leaves = tree.with_paths(state)
    try:
        moved = [leaf.cpu() if is_key(path, leaf) else leaf.to(wanted) for path, leaf in leaves]
    except TypeError as error:  # float64 on MPS
        raise ConfigError(
            f"the state cannot be moved to {wanted}: {error}", where="fit", hint='device="cpu"'
        ) from error
    if all(new is old for new, (_, old) in zip(moved, leaves, strict=True)):
        return state
    if device is None and wanted != here:
        _log.warning('the state is on the CPU: a copy of it is trained on %s (device="cpu" trains it there)', wanted)
    return tree.unflatten(tree.flatten(state)[1], moved)


def seed_of(state: Tree) -> int:
    """Return the seed of the first key of a state, 0 without one."""
    keys = [leaf for path, leaf in tree.with_paths(state) if is_key(path, leaf)]
    return int(keys[0].flatten()[0]) if keys else 0


def view_to_evaluate(state: Tree, config: FitConfig) -> str | None:
    """Return "ema" or "params"; None if the state has no average, or is no TrainState.

    Raises:
        ConfigError: "ema", and the state has no average.
    """
    has_ema = isinstance(state, TrainState) and views.default_view(state) == "ema"
    if config.evaluate_on == "ema" and not has_ema:
        raise ConfigError(
            'evaluate_on="ema", but the state has no average', where="fit", hint="ps.program(..., ema=0.999)"
        )
    return (config.evaluate_on or "ema") if has_ema else None


def window_left(state: Tree, window: int) -> int:
    """Return the micro-batches until the accumulation window closes.

    Raises:
        StateError: the members of an ensemble differ in it, so that a run has no end of a window to evaluate at.
    """
    if window == 1 or not isinstance(state, TrainState):
        return 1
    left = stacked.window_left(state)
    if left is None:
        raise StateError(
            f"the members are at different positions in their windows: {state.accum.left.tolist()} micro-batches left",
            where="init_state/accum",
            hint='close all windows before: state, _ = program.flush(state), of a program with tail="step" or "drop"',
        )
    return left


def check_window(state: Tree, window: int, before: int) -> None:
    """Check that the state comes from a run with the same ``accumulate``.

    Args:
        state: to train.
        window: micro-batches per update.
        before: the same in the run that the state comes from, 0 if unknown.

    Raises:
        Mismatch: it does not.
    """
    if window == 1 or not isinstance(state, TrainState):
        return
    before = before or max(window_left(state, window), window)  # more left than a window has: a larger window
    if before != window:
        raise Mismatch(
            f"accumulate was {before} and is {window}",
            where="accum",
            hint=f"ps.program(..., accumulate={before}); or begin a new run with these weights: "
            "program.init()._replace(params=state.params, buffers=state.buffers)",
        )


def checked_answer(state: Tree, answer: Tree, *, copied: bool) -> Tree:
    """Return the state that a callback returned, if it is one of this run.

    Args:
        state: of the run.
        answer: of the callback.
        copied: return a copy, since steps write into their input and the callback may keep its state.

    Raises:
        StateError: something else.
    """
    expected = tree.with_paths(state)
    try:
        given = tree.with_paths(answer)
    except StateError:  # it contains itself
        given = []
    same = [path for path, _ in expected] == [path for path, _ in given] and all(
        isinstance(new, Tensor) and (old.shape, old.dtype) == (new.shape, new.dtype)
        for (_, old), (_, new) in zip(expected, given, strict=True)
    )
    if not same:
        raise StateError(
            f"a callback returned a {type(answer).__name__}, which is not a state of this run",
            where="callbacks",
            hint="return None, a state of the same structure (event.state._replace(...)), or ps.Stop(reason)",
        )
    for (path, old), (_, new) in zip(expected, given, strict=True):
        if old.device != new.device and path.rpartition("/")[2] != "key":  # keys are read on the host
            raise StateError(
                f"a callback returned a state with {path} on {new.device}, and the run has it on {old.device}",
                where="callbacks",
                hint="ps.to_device(state, event.state)",
            )
    return tree.clone(answer) if copied else answer


# --- callbacks and sinks ----------------------------------------------------------------------------------------------


def ready_sinks(
    given: Iterable[Any] | None, snapshots: Snapshots | None, config: FitConfig, mesh: parallel.Mesh | None
) -> list[Any]:
    """Return the sinks of a run, each guarded, so that none of them can end it. Of several processes the first has
    some."""
    if mesh is not None and mesh.rank:
        return []
    directory = None if snapshots is None else snapshots.directory
    record = [] if directory is None else [sinks.guarded(RunRecord(directory, config.to_dict()))]
    if given is not None:
        guarded = [sinks.guarded(sink) for sink in callables("sinks", given)]
        return record + [sink for sink in guarded if not (config.fast_dev_run and sink.writes_files)]
    chosen: list[Any] = [sinks.progress()] if config.progress else []
    if directory is not None:
        chosen.append(sinks.history_json(directory / "training_history.json"))
    return record + [sinks.guarded(sink) for sink in chosen]


def callables(name: str, given: Any) -> list[Any]:
    """Return the callbacks or sinks as a list.

    Raises:
        ConfigError: it is no iterable of callables.
    """
    listed: list[Any] = list(given) if isinstance(given, Iterable) and not isinstance(given, Tensor) else [None]
    if not all(callable(one) for one in listed):
        one = f"{name}=[{getattr(given, '__name__', type(given).__name__)}]" if callable(given) else f"{name}=[f, ...]"
        raise ConfigError(f"{name} is a {type(given).__name__}, not a list of callables", where="fit", hint=one)
    return listed
