"""What `fit` is given, made ready: loaders, device, program, snapshots, sinks."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from .. import data, sinks, tree
from ..errors import ConfigError, DataError, StateError
from ..precision import auto_device, usable
from ..snapshot import Snapshots
from ..types import Empty, Program, TrainState, Tree
from .alone import check_alone
from .entry import is_key

if TYPE_CHECKING:  # pydantic, which settings are made of, is half of `import purestep`
    from ..config import FitConfig

_log = logging.getLogger("purestep")


class Feeds(NamedTuple):
    """The training feed and the evaluation feeds by name."""

    train: data.Feed
    evaluation: dict[str, data.Feed]

    def close(self) -> None:
        """Stop workers."""
        for feed in (self.train, *self.evaluation.values()):
            feed.close()


def settings(config: object, fields: Mapping[str, Any]) -> FitConfig:
    """`config.resolve`."""
    from .. import config as config_  # late, see above

    return config_.resolve(config, fields)


def checked_program(program: Any) -> Program:
    """The program, or what is missing.

    Raises:
        ConfigError: none was given, or something else.
    """
    if isinstance(program, Program):
        return program
    found = "no program was given" if program is None else f"a {type(program).__name__} is no program"
    raise ConfigError(
        found,
        where="fit",
        hint="fit(state, loaders, ps.program(model, objective, tx)), or ps.Program(train_step) for a step of your own",
    )


def open_feeds(loaders: Any, config: FitConfig, program: Program, seed: int) -> Feeds:
    """The feeds of a mapping of loaders, or of a (train, val) pair, with the config's limits.

    Raises:
        ConfigError: no "train" loader, or settings that name a loader that does not exist.
        DataError: a loader that is none, or empty.
        RankError: more than one process.
    """
    named = _named_loaders(loaders)
    check_alone(where="fit")
    for name, loader in named.items():
        check_alone(loader, where=name)
    for field in ("limit_batches", "evaluate_every"):
        value = getattr(config, field)
        for name in value if isinstance(value, Mapping) else ():
            if name not in named:
                raise ConfigError(f"{field} names a loader {name!r}", where="fit", hint=f"one of {sorted(named)}")
    train = _limited("train", named.pop("train"), config, seed)
    limits = {name: config.limit(name) for name in named}
    opened = {name: _limited(name, loader, config, seed) for name, loader in named.items() if limits[name] != 0}
    if config.overfit_batches:
        count = _share(config.overfit_batches, train)
        train = data.overfit(train, count)
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


def _limited(name: str, loader: Any, config: FitConfig, seed: int) -> data.Feed:
    feed = data.open_feed(loader, name=name, seed=seed, repeats=name != "train")
    amount = config.fast_dev_run or config.limit(name)
    return feed if amount is None else data.limit(feed, amount)


def _share(amount: int | float, feed: data.Feed) -> int:
    from .. import config as config_  # late, see above

    found = config_.count_batches(amount, feed.count(0) or feed.length, loader=feed.name)
    if found is None:
        raise DataError("has no length", where=feed.name, hint="overfit_batches=10, a number of batches")
    return found


def placed(state: Tree, device: str | None, program: Program) -> Tree:
    """The state on the device of a run, and its keys on the CPU, whoever has moved them.

    Args:
        state: as it was given; it stays as it is.
        device: where to train. None moves a copy of a state on the CPU to the best device there is, and says so; any
            other state stays where it is.
        program: that trains it.

    Returns:
        The very state where nothing had to move.

    Raises:
        ConfigError: a device that is not there, or that cannot compute in the program's precision.
    """
    here = data.device_of(state)
    best = auto_device() if device is None and here.type == "cpu" else here
    wanted = best if device is None else usable(device)
    if wanted != here and program.static is not None:
        program.static.check(wanted)
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
    """The seed of the first key of a state, 0 where there is none."""
    keys = [leaf for path, leaf in tree.with_paths(state) if is_key(path, leaf)]
    return int(keys[0][0]) if keys else 0


def view_to_evaluate(state: Tree, config: FitConfig) -> str:
    """ "ema" or "params".

    Raises:
        ConfigError: "ema" of a state without one.
    """
    has_ema = isinstance(state, TrainState) and not isinstance(state.ema, Empty)
    if config.evaluate_on == "ema" and not has_ema:
        raise ConfigError(
            'evaluate_on="ema", but the state has no average', where="fit", hint="ps.program(..., ema=0.999)"
        )
    return config.evaluate_on or ("ema" if has_ema else "params")


def window_left(state: Tree, window: int) -> int:
    """Micro-batches until the open accumulation window closes."""
    if window == 1 or not isinstance(state, TrainState):
        return 1
    return int(state.accum.left)


def windowed(state: Tree, window: int, before: int) -> Tree:
    """The state with the end of its accumulation window where this program has it.

    A gradient is divided by the weight that is in its window, so that a window which was begun under another number
    is as good as any: nothing of it is lost.

    Args:
        state: to train.
        window: micro-batches to an update.
        before: the same in the run that the state comes from; 0 where that is not known.
    """
    if window == 1 or not isinstance(state, TrainState):
        return state
    left = int(state.accum.left)
    before = before or max(left, window)  # with more to come than a window has, one of another size has just begun
    if before == window:
        return state
    done, rest = before - left, max(window - before + left, 1)
    if done:
        text = (
            "accumulate was %d and is %d: the window that is open has %d batches in it, and is applied %d batches later"
        )
        _log.warning(text, before, window, done, rest)
    return state._replace(accum=state.accum._replace(left=torch.full_like(state.accum.left, rest)))


def checked_answer(state: Tree, answer: Tree, *, copied: bool) -> Tree:
    """The state that a callback returned, if it is one of this run.

    Args:
        state: of the run.
        answer: what was returned.
        copied: steps write into the state that they are given, so they get a copy: the callback may hold its own.

    Raises:
        StateError: something else.
    """
    expected, found = tree.with_paths(state), _paths_of(answer)
    same = [path for path, _ in expected] == [path for path, _ in found] and all(
        isinstance(new, Tensor) and (old.shape, old.dtype) == (new.shape, new.dtype)
        for (_, old), (_, new) in zip(expected, found, strict=True)
    )
    if not same:
        raise StateError(
            f"a callback returned a {type(answer).__name__} that is no state of this run",
            where="callbacks",
            hint="return None, a state of the same structure (event.state._replace(...)), or ps.Stop(reason)",
        )
    return tree.clone(answer) if copied else answer


def _paths_of(answer: Any) -> list[tuple[str, Any]]:
    try:
        return tree.with_paths(answer)
    except StateError:  # it contains itself
        return []


def ready_sinks(given: Iterable[Any] | None, snapshots: Snapshots | None, config: FitConfig) -> list[Any]:
    """The sinks of a run, each guarded: none of them can end it."""
    if given is not None:
        guarded = [sinks.guarded(sink) for sink in called("sinks", given)]
        return [sink for sink in guarded if not (config.fast_dev_run and sink.writes_files)]
    directory = None if snapshots is None else snapshots.directory
    return [sinks.guarded(sink) for sink in sinks.default_sinks(directory, progress=config.progress)]


def called(name: str, given: Any) -> list[Any]:
    """The callbacks or sinks.

    Raises:
        ConfigError: something that is no iterable of callables.
    """
    listed: list[Any] = list(given) if isinstance(given, Iterable) and not isinstance(given, Tensor) else [None]
    if not all(callable(one) for one in listed):
        one = f"{name}=[{getattr(given, '__name__', type(given).__name__)}]" if callable(given) else f"{name}=[f, ...]"
        raise ConfigError(f"{name} is a {type(given).__name__}, not a list of callables", where="fit", hint=one)
    return listed
