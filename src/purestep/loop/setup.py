"""What `fit` is given, made ready: loaders, device, program, snapshots, sinks."""

from __future__ import annotations

import difflib
import inspect
import logging
import os
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import compile as compile_
from .. import config as config_
from .. import data, rng, sinks, tree
from ..compile.live import plain
from ..config import FitConfig
from ..errors import ConfigError, DataError, NotFound, StateError
from ..snapshot import Snapshot, Snapshots
from ..types import Empty, EvalStep, Metrics, Program, TrainState, Tree
from .pieces import takes_index

log = logging.getLogger("purestep")


class Feeds(NamedTuple):
    """The training feed and the evaluation feeds by name."""

    train: data.Feed
    evaluation: dict[str, data.Feed]

    def close(self) -> None:
        """Stop workers."""
        for feed in (self.train, *self.evaluation.values()):
            feed.close()


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
    """
    named = _named_loaders(loaders)
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
    assert train is not None
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
    feed = data.open_feed(loader, name=name, seed=seed)
    amount = config.fast_dev_run or config.limit(name)
    return feed if amount is None else data.limit(feed, amount)


def _share(amount: int | float, feed: data.Feed) -> int:
    found = config_.count_batches(amount, feed.length, loader=feed.name)
    if found is None:
        raise DataError("has no length", where=feed.name, hint="overfit_batches=10, a number of batches")
    return found


def checked_state(state: Tree) -> Tree:
    """The state, plain, if it is a tree of dense tensors on one device (a key may stay on the CPU).

    Raises:
        StateError: every leaf that is not, in one message; or a donated state.
    """
    state = plain(state)
    leaves = tree.with_paths(state)
    wrong = [f"{path}: a {type(leaf).__name__}" for path, leaf in leaves if not isinstance(leaf, Tensor)]
    if wrong or not leaves:
        raise StateError(
            "; ".join(wrong) or "there is no tensor in it", where="init_state", hint="program.init(seed=0)"
        )
    devices: dict[str, str] = {}
    for path, leaf in leaves:
        if not _is_key(path, leaf):
            devices.setdefault(str(leaf.device), path)
    if len(devices) > 1:
        raise StateError(
            f"leaves are on several devices: {', '.join(f'{path} on {device}' for device, path in devices.items())}",
            where="init_state",
            hint='program.init(seed=0, device="cuda")',
        )
    return state


def placed(state: Tree, device: str | None) -> Tree:
    """The state on that device, keys on the CPU."""
    if device is None:
        return state
    target = torch.device(device)

    def move(path: str, leaf: Tensor) -> Tensor:
        return leaf if _is_key(path, leaf) else leaf.to(target)

    leaves = [move(path, leaf) for path, leaf in tree.with_paths(state)]
    return tree.unflatten(tree.flatten(state)[1], leaves)


def _is_key(path: str, leaf: Tensor) -> bool:
    # A parameter may be called "key" as well.
    return path.rpartition("/")[2] == "key" and leaf.dtype == torch.int64 and leaf.shape == (2,)


def seed_of(state: Tree) -> int:
    """The seed of the first key of a state, 0 where there is none."""
    keys = [leaf for path, leaf in tree.with_paths(state) if _is_key(path, leaf)]
    return int(keys[0][0]) if keys else 0


def calls_of(state: Tree) -> int:
    """Calls that a state has been through, 0 where it does not count them."""
    return int(state.key[1]) if isinstance(state, TrainState) else 0


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


# --- the program ------------------------------------------------------------------------------------------------------


def ready_program(program: Program, state: Tree, config: FitConfig) -> Program:
    """The program compiled as the config says."""
    device = data.device_of(state)
    wanted = config.compile
    if wanted is False or config.detect_anomaly or (wanted == "auto" and device.type != "cuda"):
        return program
    options = _compile_options(wanted) if isinstance(wanted, Mapping) else {}
    options.setdefault("donate", config.donate)
    compiled = compile_.compile_program(program, **options)
    if wanted != "auto":
        return compiled
    return compiled._replace(
        train_step=_falls_back(compiled.train_step, program.train_step),
        flush=_falls_back(compiled.flush, program.flush),
        eval_step=_eval_falls_back(compiled.eval_step, program.eval_step),
    )


def _compile_options(given: Mapping[str, Any]) -> dict[str, Any]:
    known = [name for name in inspect.signature(compile_.compile_program).parameters if name != "program"]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            raise ConfigError(
                f"compile has no option {name!r}; there are {', '.join(known)}",
                where="fit",
                hint=f"compile={{{near[0]!r}: ...}}",
            )
    return dict(given)


def _falls_back(compiled: Callable[..., Any], eager: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled function until it meets something that cannot be captured; then the eager one, with a warning."""
    chosen = compiled

    def call(state: Tree, *batch: Any, **named: Any) -> Any:
        nonlocal chosen
        try:
            return chosen(state, *batch, **named)
        except Exception as error:
            if chosen is eager or not (compile_.stopped(error) or isinstance(error, compile_.DataDependent)):
                raise
            warnings.warn(
                f"the step cannot be compiled and runs in eager: {str(error).splitlines()[0]} "
                "(compile=False says that this is meant, compile=True makes it an error)",
                RuntimeWarning,
                stacklevel=4,
            )
        chosen = eager
        return chosen(state, *batch, **named)

    return call


def _eval_falls_back(compiled: EvalStep | None, eager: EvalStep | None) -> EvalStep | None:
    if compiled is None or eager is None:
        return None
    plain = eager if takes_index(eager) else lambda state, *batch, index: eager(state, *batch)
    both = _falls_back(compiled, plain)

    def eval_step(state: Tree, *batch: Any, index: int = 0) -> Metrics:
        return both(state, *batch, index=index)

    return eval_step


# --- snapshots --------------------------------------------------------------------------------------------------------


def open_snapshots(snapshots: Any, config: FitConfig) -> tuple[Snapshots | None, bool]:
    """The snapshots to write, and whether fit opened them and so closes them.

    Raises:
        ConfigError: something that is neither a Snapshots nor a path.
        Locked, WriteFailed: the directory cannot be written.
    """
    if snapshots is None or config.fast_dev_run:
        return None, False
    if isinstance(snapshots, Snapshots):
        snapshots.open()
        return snapshots, False
    if not isinstance(snapshots, str | os.PathLike):
        raise ConfigError(
            f"snapshots is a {type(snapshots).__name__}", where="fit", hint='"runs/name" or Snapshots("runs/name")'
        )
    opened = Snapshots(snapshots)
    opened.open()
    return opened, True


def restored(state: Tree, snapshots: Snapshots | None, config: FitConfig) -> Snapshot | None:
    """The snapshot to go on from, if there is one.

    Raises:
        NotFound: ``resume`` names a path without snapshots.
        Mismatch, Corrupt: what is there does not fit, or is damaged in every copy.
    """
    if snapshots is not None and not config.fast_dev_run:
        snapshots.check_space(state)
    if config.resume is None or config.fast_dev_run:
        if snapshots is not None and snapshots.steps():
            log.info("fresh start: the steps %s in %s are set aside", snapshots.steps(), snapshots.directory)
            snapshots.start_over()
        return None
    source = snapshots
    if config.resume != "auto":
        source = Snapshots(Path(config.resume), writer=False)
        if snapshots is not None and source.directory == snapshots.directory:
            source = snapshots
    if source is None:
        return None
    try:
        return source.restore(state)
    except NotFound:
        if config.resume != "auto":
            raise
        log.info("fresh start: no snapshot in %s", source.directory)
        return None


def window_left(state: Tree, window: int) -> int:
    """Micro-batches until the open accumulation window closes."""
    if window == 1 or not isinstance(state, TrainState):
        return 1
    return int(state.accum.left)


def checked_answer(state: Tree, answer: Tree) -> Tree:
    """The state that a callback returned, if it is one of this run.

    Raises:
        StateError: something else.
    """
    expected, found = tree.with_paths(state), tree.with_paths(answer)
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
    return answer


def ready_sinks(given: Iterable[Any] | None, snapshots: Snapshots | None, config: FitConfig) -> list[Any]:
    """The sinks of a run, each guarded: none of them can end it."""
    if given is not None:
        return [sinks.guarded(sink) for sink in given]
    directory = None if snapshots is None else snapshots.directory
    return [sinks.guarded(sink) for sink in sinks.default_sinks(directory, progress=config.progress)]


# --- surroundings -----------------------------------------------------------------------------------------------------


@contextmanager
def surroundings(config: FitConfig, device: torch.device) -> Generator[None]:
    """Process-wide switches of a run, as they were afterwards. What is drawn outside of steps leaves no trace."""
    with ExitStack() as stack:
        stack.enter_context(rng.scoped(0, device))
        if config.deterministic:
            stack.enter_context(_deterministic(warn_only=config.deterministic == "warn"))
        if config.tf32 is not None:
            stack.enter_context(_tf32(config.tf32))
        if config.detect_anomaly:
            stack.enter_context(torch.autograd.set_detect_anomaly(True))
        yield


@contextmanager
def _deterministic(*, warn_only: bool) -> Generator[None]:
    before, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    benchmark = torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warned)
        torch.backends.cudnn.benchmark = benchmark


@contextmanager
def _tf32(allowed: bool) -> Generator[None]:
    matmul, cudnn = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = matmul, cudnn
