"""What the processes of `test_fit` and `test_failures` run. Functions take and return JSON (see `processes.run`)."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Subset,
    TensorDataset,
    random_split,
)

import purestep as ps
from purestep import events, optim, tree
from purestep.loop import decisions as decisions_
from purestep.snapshot import snapshots as snapshots_
from purestep.types import Share

from .processes import DEVICE

ROWS = 37  # in batches of 8: the last one has 5 rows
CLASSES = 7


class Net(nn.Module):
    """Odd sizes; the first input is the number of the row, which the model does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 9)
        self.down = nn.Linear(9, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x[:, 1:])))


def program(**options: Any) -> ps.Program:
    torch.manual_seed(0)
    model = Net().double().to(DEVICE)
    tx = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2, weight_decay=0.1))
    objective = ps.supervised(nn.CrossEntropyLoss(), metrics={"accuracy": ps.metrics.accuracy})
    return ps.program(model, objective, tx, precision="64-true", **({"ema": 0.9} | options))


def dataset(rows: int = ROWS) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 6, generator=generator, dtype=torch.float64)
    x[:, 0] = torch.arange(rows)
    return TensorDataset(x, torch.randint(0, CLASSES, (rows,), generator=generator))


def loader(rows: int = ROWS, size: int = 8, **options: Any) -> DataLoader[Any]:
    return DataLoader(dataset(rows), size, **({"shuffle": True} | options))


def loaders() -> dict[str, Any]:
    """67 rows and 5 rows, of which the last batch has one: a share is empty."""
    return {"train": loader(), "val": DataLoader(dataset(5), 4)}


def fit(program: ps.Program, data: Any = None, **options: Any) -> ps.loop.FitResult:
    fixed = {"progress": False, "device": DEVICE, "check_every": None, "log_every": 0}
    fixed |= {"compile": False} if DEVICE == "cuda" else {}  # some fifty programs: minutes of inductor
    state = options.pop("state", None)
    state = program.init(seed=7) if state is None else state
    return ps.fit(state, loaders() if data is None else data, program, **(fixed | {"epochs": 2} | options))


def distance(one: Any, other: Any) -> float:
    pairs = zip(tree.with_paths(one), tree.with_paths(other), strict=True)
    return max(float((a.double() - b.double()).abs().max()) for (p, a), (q, b) in pairs if p == q and a.numel())


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Without torchrun's variables."""
    kept = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE")}
    try:
        yield
    finally:
        os.environ.update(kept)


def rows_of(batch: Any) -> list[int]:
    """The numbers of the rows of a batch, or of a share if it counts."""
    if not isinstance(batch, Share):
        return [int(row) for row in batch[0][:, 0]]
    return [int(row) for row in batch.rows[0][:, 0]] if float(batch.counts) else []


def gathered(value: Any) -> list[Any]:
    return ps.parallel.processes.gathered(value)


def everything(folder: str) -> dict[str, Any]:
    """What `test_fit` needs of two processes, in one start of them."""
    return {
        "shard": equal("shard", {"shard": 2}, accumulate=1),
        "replicate": equal("replicate", {}, accumulate=3),
        "decisions": decisions(folder),
        "errors": errors(),
        "troubles": troubles(f"{folder}/troubles"),
        "open window": open_window(folder),
        "limited": limited(),
        "going on": going_on(f"{folder}/on"),
        "exact": exact(),
    }


# --- equal to one process ---------------------------------------------------------------------------------------------


class Lines(IterableDataset[Any]):
    """Batches of rows of its own, each a pair of tensors."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        x, y = dataset().tensors
        for rows in self.batches:
            yield x[rows], y[rows]


def own_batches(count: int, at: int, width: int) -> list[list[int]]:
    """Rows of whole batches of 6, cut unequally: the first process has ``count`` batches more than the others."""
    whole = [list(range(start, start + 6)) for start in range(0, 24, 6)]
    cut = [rows[6 * at // width : 6 * (at + 1) // width] for rows in whole]
    return cut + ([[30 + number] for number in range(count)] if at == 0 else [])


def equal(mode: str, sizes: dict[str, int], accumulate: int) -> dict[str, Any]:
    """The largest differences of a run of these processes from one process."""
    with ps.parallel.start(timeout=60, **sizes) as mesh:
        seen: list[Any] = []

        def note(event: events.Event) -> None:
            if isinstance(event, events.StepEnd) and event.batch is not None:
                seen.append((event.epoch, rows_of(event.batch)))

        one = ps.distribute(program(accumulate=accumulate), mesh, params=mode)
        result = fit(one, monitor="val_loss", callbacks=[note], compile="auto")
        whole = ps.full(result.state)
        means = ps.evaluate(ps.view(result.state, "ema"), loader(11, 4), one.eval_step)
        after, totals = ps.run_epoch(one.init(seed=3), loader(), one.train_step, seed=5)
        after = ps.full(after)
        lines = Lines([list(range(start, start + 6)) for start in range(0, 24, 6)])
        batches = list(lines)
        listed = ps.full(fit(one, batches).state)
        streamed = ps.full(fit(one, {"train": ps.parallel.sharded(DataLoader(lines, None), rows=True)}).state)
        own = DataLoader(Lines(own_batches(2, mesh.batch_rank, mesh.batch_size)), None)
        uneven = fit(one, {"train": ps.parallel.sharded(own), "val": ps.parallel.sharded(own)})
        uneven_state = ps.full(uneven.state)
        order = gathered(seen)
    with alone():
        plain = program(accumulate=accumulate)
        wanted = fit(plain, monitor="val_loss")
        wanted_means = ps.evaluate(ps.view(wanted.state, "ema"), loader(11, 4), plain.eval_step)
        wanted_after, wanted_totals = ps.run_epoch(plain.init(seed=3), loader(), plain.train_step, seed=5)
        wanted_listed = fit(plain, batches).state
        whole_batches = [list(range(start, start + 6)) for start in range(0, 24, 6)] + [[30], [31]]
        stream = DataLoader(Lines(whole_batches), None)
        wanted_uneven = fit(plain, {"train": stream, "val": stream})
    history = {name: (wanted.history[name], result.history[name]) for name in wanted.history}
    return {
        "state": distance(wanted.state, whole),
        "history": {
            name: max(abs(a - b) / max(abs(a), 1.0) for a, b in zip(*pair, strict=True))
            for name, pair in history.items()
        },
        "best": [result.best["step"], wanted.best["step"]],
        "means": max(abs(means[name] - wanted_means[name]) for name in wanted_means),
        "run_epoch": distance(wanted_after, after),
        "totals": max(abs(float(totals[name]) - float(wanted_totals[name])) for name in wanted_totals),
        "listed": distance(wanted_listed, listed),
        "streamed": distance(wanted_listed, streamed),
        "uneven": distance(wanted_uneven.state, uneven_state),
        "uneven_loss": abs(uneven.history["val_loss"][-1] - wanted_uneven.history["val_loss"][-1]),
        "rows": [sorted(row for part in order for e, rows in part if e == epoch for row in rows) for epoch in (0, 1)],
    }


def exact() -> dict[str, float]:
    """An exact AUROC of uneven batches and an empty share, of two processes and of one."""
    from torchmetrics.classification import MulticlassAUROC  # imported late: it takes two seconds

    def value(mesh: Any) -> float:
        torch.manual_seed(0)
        objective = ps.supervised(nn.CrossEntropyLoss(), metrics={"auroc": MulticlassAUROC(CLASSES)})
        made = ps.program(Net().double().to(DEVICE), objective, optim.sgd(1e-2), precision="64-true")
        made = made if mesh is None else ps.distribute(made, mesh, params="shard")
        return ps.evaluate(made.init(), loader(11, 5, shuffle=False), made.eval_step)["auroc"]

    with ps.parallel.start(timeout=60, shard=2) as mesh:
        several = value(mesh)
    with alone():
        return {"several": several, "one": value(None)}


# --- decisions --------------------------------------------------------------------------------------------------------


def at_call(call: int, act: Any, *, rank: int = 1, kind: Any = events.StepEnd) -> Any:
    """A callback that acts after this call of the step, in one process."""
    calls = [0]
    mesh = ps.parallel.mesh.here()

    def callback(event: events.Event) -> Any:
        if not isinstance(event, kind):
            return None
        calls[0] += 1
        return act(event) if calls[0] == call and mesh.size > 1 and mesh.rank == rank else None

    return callback


def send(number: int) -> Any:
    return lambda event: os.kill(os.getpid(), number)


def decisions(folder: str) -> dict[str, Any]:
    """Each decision, in process 1 alone: how the run ended in this process, where, and the snapshots there are."""
    found: dict[str, Any] = {}
    with ps.parallel.start(timeout=60, shard=2) as mesh, contextlib.ExitStack() as stack:
        one = ps.distribute(program(), mesh, params="shard")

        def run(
            name: str, act: Any, *, call: int = 3, rank: int = 1, kind: Any = events.StepEnd, **options: Any
        ) -> None:
            how = {"every_epochs": None} | options.pop("policy", {})
            snapshots = ps.Snapshots(f"{folder}/{name}", **how)
            data = {"train": loader(), "val": DataLoader(dataset(5), 4)}
            try:
                options = {"epochs": 40, "snapshots": snapshots} | options
                result = fit(one, data, callbacks=[at_call(call, act, rank=rank, kind=kind)], **options)
                end_kind = "returned"
            except (KeyboardInterrupt, SystemExit, ps.errors.PurestepError) as error:
                result, end_kind = getattr(error, "result", None), f"{type(error).__name__}: {error}"
            stack.close()
            snapshots.close()
            gathered(0)  # the first process has closed its files
            end = None if result is None else [int(result.state.step), result.stop_reason]
            found[name] = [end_kind, end, ps.Snapshots(f"{folder}/{name}", writer=False).steps()]

        def late(event: Any) -> None:
            clock = mock.Mock(monotonic=lambda: time.monotonic() + 1e9)
            for module in (decisions_, snapshots_):
                stack.enter_context(mock.patch.object(module, "time", clock))

        def broken(event: Any) -> None:
            error = ps.errors.WriteFailed("no space", where="disk")
            stack.enter_context(mock.patch.object(ps.Snapshots, "check", mock.Mock(side_effect=error)))

        run("sigterm", send(signal.SIGTERM))
        run("sigint", send(signal.SIGINT))
        run("snapshot", send(signal.SIGUSR1), call=2, epochs=1)
        run("stop", lambda event: ps.Stop("enough"))
        run("stop at the end", lambda event: ps.Stop("enough"), call=5)
        run("max_time", late, max_time=1e6)
        run("by the clock", late, rank=0, epochs=1, policy={"every_seconds": 1e6})
        run("sigterm in an evaluation", send(signal.SIGTERM), kind=events.EvalStepEnd, call=1)
        run("state", lambda event: event.state)
        run("writer", broken, rank=0)
    return found


# --- errors -----------------------------------------------------------------------------------------------------------


def errors() -> dict[str, str]:
    """The messages of what several processes do not take, in this process."""
    found: dict[str, str] = {}

    @contextlib.contextmanager
    def noted(name: str) -> Iterator[None]:
        try:
            yield
        except ps.errors.PurestepError as error:
            found[name] = f"{type(error).__name__}: {error}"
        else:
            found[name] = "nothing"

    plain = program()
    with noted("without start"):
        fit(plain)
    with ps.parallel.start(timeout=60) as mesh:
        one, rank = ps.distribute(program(), mesh), mesh.rank

        def differing(name: str, data: Any = None, **options: Any) -> None:
            with noted(name):
                fit(one, data, **options)

        with noted("not distributed"):
            fit(plain)
        with noted("evaluate"):
            ps.evaluate(plain.init(), loader(), plain.eval_step)
        with noted("run_epoch"):
            ps.run_epoch(plain.init(), loader(), plain.train_step)
        sampler: Any = DistributedSampler(dataset(), num_replicas=2, rank=rank)
        differing("sampler", loader(shuffle=False, sampler=sampler))
        differing("sampler, sharded", ps.parallel.sharded(loader(shuffle=False, sampler=sampler)))
        with noted("sampler, evaluate"):
            ps.evaluate(one.init(), loader(shuffle=False, sampler=sampler), one.eval_step)
        differing("iterable", DataLoader(Lines([[1, 2]]), None))
        differing("config", epochs=2 + rank)
        differing("rows", loader(37 + rank))
        differing("batch size", loader(size=8 + rank))
        with noted("accumulate"):
            fit(ps.distribute(program(accumulate=1 + rank), mesh))
        with noted("weights"):
            state = one.init(seed=7)
            params = {key: value + rank for key, value in state.params.items()}
            fit(one, state=state._replace(params=params))
        with noted("drift"):

            def drift(event: events.Event) -> Any:
                if not isinstance(event, events.StepEnd) or event.updates != 2:
                    return None
                params = dict(event.state.params)
                params["up.bias"] = params["up.bias"] * (1 + 2**-52 * rank)
                return event.state._replace(params=params)

            fit(one, callbacks=[drift])
        with noted("models"):
            torch.manual_seed(rank)
            linear = ps.program(nn.Linear(5, CLASSES), ps.supervised(nn.CrossEntropyLoss()), optim.sgd(0.1))
            ps.distribute(linear, mesh).init()
        with noted("snapshots"):
            fit(one, snapshots=None if rank else "runs/of-one-process")
        with noted("seed"):
            fit(one, state=one.init(seed=rank))
        with noted("structure"):
            x, y = dataset().tensors
            fit(one, [(x, y) if rank else [x, y]])
        with noted("keys"):
            fit(one, [{"x": x, "z" if rank else "y": y}])
        with noted("order"):
            order = list(range(37)) if rank else list(reversed(range(37)))
            fit(one, loader(shuffle=False, sampler=order))
        own = range(rank, 36, 2)
        differing("part", DataLoader(Subset(dataset(), own), 8))
        generator = torch.Generator().manual_seed(rank)
        train, val = random_split(dataset(), [30, 7], generator=generator)
        differing("split", {"train": DataLoader(train, 8, shuffle=True), "val": DataLoader(val, 8)})
        x, y = (column[list(own)] for column in dataset().tensors)
        differing("own tensors", DataLoader(TensorDataset(x, y), 8, shuffle=True))
        differing("own batches", list(zip(x.split(6), y.split(6), strict=True)))
        differing("own items", DataLoader(Items(list(own)), 8, num_workers=1))
        differing("own val", {"train": loader(), "val": DataLoader(Items(list(own)), 8)})
        with noted("own, evaluate"):
            ps.evaluate(one.init(), DataLoader(Items(list(own)), 8), one.eval_step)
        differing("augmented", DataLoader(Items(list(range(36)), noise=True), 8, shuffle=True), epochs=1)
        differing("drawn", DataLoader(Items(list(range(36)), drawn=True), 8), epochs=1)
        lines = Lines([[3, 4], [1, 2]] if rank else [[1, 2], [3, 4]])
        with noted("order of a list"):
            fit(one, list(lines))
        with noted("order of a stream"):
            fit(one, ps.parallel.sharded(DataLoader(lines, None), rows=True))
        with noted("ends"):
            rows = DataLoader(Lines([[1, 2], [3, 4]][: 1 + rank]), None)
            fit(one, ps.parallel.sharded(rows, rows=True))
        kept = one, one.init()
    with ps.parallel.start(timeout=60, shard=2) as mesh:
        with noted("another mesh"):
            fit(kept[0], state=kept[1])
        cut = ps.distribute(program(), mesh, params="shard").init()
    with noted("outside of start"):
        kept[0].train_step(kept[1], next(iter(loader())))
    with noted("outside of start, fit"), alone():
        fit(kept[0], state=kept[1])
    with noted("outside of start, full"):
        ps.full(cut)
    return found


class Items(Dataset[Any]):
    """Rows of `dataset`. ``noise``: as augmentations draw it; ``drawn``: by a source that nobody can seed."""

    def __init__(self, rows: list[int], *, noise: bool = False, drawn: bool = False) -> None:
        self.rows = rows
        self.noise = noise
        self.drawn = drawn

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        x, y = dataset()[self.rows[index]]
        x = x + torch.randn(6, dtype=torch.float64) if self.noise else x
        return x + random.SystemRandom().random() if self.drawn else x, y


# --- going on with loaders of one's own -------------------------------------------------------------------------------


class Counting(IterableDataset[Any]):
    """Batches of rows of its own, with a state."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.batches = batches
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        x, y = dataset().tensors
        while self.at < len(self.batches):
            rows = self.batches[self.at]
            self.at += 1
            yield x[rows], y[rows]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def going_on(folder: str) -> dict[str, Any]:
    """Runs that stop inside an epoch, each by its position, and end as one that did not stop."""
    found: dict[str, Any] = {}
    with ps.parallel.start(timeout=60) as mesh:
        one = ps.distribute(program(), mesh)
        own = own_batches(3, mesh.batch_rank, mesh.batch_size)  # 7 batches of the first process, 4 of the second
        x, y = dataset().tensors
        kinds: dict[str, Any] = {
            "state": lambda: ps.parallel.sharded(DataLoader(Counting(own), None)),
            "list": lambda: ps.parallel.sharded([(x[rows], y[rows]) for rows in own]),
            "iterable": lambda: ps.parallel.sharded(Lines(own)),
            "rows": lambda: ps.parallel.sharded(Lines(own_batches(0, 0, 1)), rows=True),
            "stateful rows": lambda: ps.parallel.sharded(DataLoader(Counting(own_batches(0, 0, 1)), None), rows=True),
        }
        for kind, create in kinds.items():
            wanted = ps.full(fit(one, {"train": create()}, epochs=3).state)
            for steps in (6, 9):  # behind the last batch of the second process; in the second epoch
                options = {"epochs": 3, "snapshots": f"{folder}/{kind}{steps}"}
                fit(one, {"train": create()}, steps=steps, **options)
                result = fit(one, {"train": create()}, **options)
                found[f"{kind} {steps}"] = distance(wanted, ps.full(result.state))
    return found


# --- failures ---------------------------------------------------------------------------------------------------------


def gone(how: str, rank: int) -> list[Any]:
    """One process ends, fails or hangs in its third call: the error of this one, and its seconds since then."""
    begun = [0.0]

    def act(event: Any) -> None:
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "hang":
            time.sleep(8)  # longer than the timeout of the others
            os._exit(3)
        raise ValueError("of this process alone")

    def note(event: events.Event) -> None:
        if not isinstance(event, events.StepEnd):
            return
        begun[0] = time.monotonic()
        if how == "hang" and event.updates == 3:  # until now they all answer, however slow the machine is
            groups = ps.parallel.mesh.current()
            on_cpu = groups.by_axis.values() if DEVICE == "cpu" else ()  # NCCL's wait longer than the host group
            for group in {id(group): group for group in (*on_cpu, groups.host)}.values():
                torch.distributed.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)

    try:
        with ps.parallel.start(timeout=60, shard=int(os.environ["WORLD_SIZE"])) as mesh:
            one = ps.distribute(program(), mesh, params="shard")
            fit(one, epochs=40, callbacks=[note, at_call(3, act, rank=rank)])
    except ps.errors.RankError as error:
        return [str(error), time.monotonic() - begun[0]]
    return ["no error", 0.0]


def troubles(folder: str) -> dict[str, Any]:
    """A loss that is not finite in the rows of one process: the message, and the end here and in one process alone."""
    found: dict[str, Any] = {}
    x, y = dataset().tensors
    x = x.clone()
    x[20:23, 2] = float("nan")  # rows of the second share of the third batch
    data = [(x[start : start + 8], y[start : start + 8]) for start in range(0, ROWS, 8)]

    def end(one: ps.Program, **options: Any) -> list[Any]:
        try:
            result, text = fit(one, data, epochs=1, **options), "returned"
        except ps.errors.NonFiniteError as error:
            result, text = error.result, str(error)
        whole = ps.full(result.state)
        return [text, int(whole.step), int(whole.updates), float(whole.params["up.weight"].sum())]

    kinds = ("raise", "skip")
    with ps.parallel.start(timeout=60, shard=2) as mesh:
        for name in kinds:
            one = ps.distribute(program(nonfinite=name), mesh, params="shard")
            found[name] = end(one, snapshots=f"{folder}/{name}")
        rank = mesh.rank
    with ps.parallel.start(timeout=60) as mesh:
        for name, accumulate in (("window", 4), ("flushed", 7)):  # the third call is no closing one
            one = ps.distribute(program(accumulate=accumulate), mesh)
            found[name] = end(one, snapshots=f"{folder}/{name}")
    with alone():
        for name in kinds:
            found[name] += end(program(nonfinite=name), snapshots=f"{folder}/{rank} {name}")[1:]
        for name, accumulate in (("window", 4), ("flushed", 7)):
            plain = program(accumulate=accumulate)
            found[name] += end(plain, snapshots=f"{folder}/{rank} {name}")[1:]
    return found


def open_window(folder: str) -> list[list[Any]]:
    """A gradient, not a loss, that is not finite in one process in a window that is open at a snapshot: the message and
    the end, here and in one process alone."""

    def steep(output: Tensor, rows: Tensor) -> Tensor:
        return (output[:, 0].square() * (rows != 21)).sqrt().mean()  # row 21: the gradient of sqrt(0) is not finite

    x, _ = dataset().tensors
    data = [(x[start : start + 8], x[start : start + 8, 0].long()) for start in range(0, ROWS, 8)]

    def end(mesh: Any) -> list[Any]:
        torch.manual_seed(0)
        one = ps.program(Net().double().to(DEVICE), ps.supervised(steep), optim.sgd(1e-2), accumulate=5)
        one = one if mesh is None else ps.distribute(one, mesh)
        name = f"{folder}/open {os.environ.get('RANK') if mesh is None else ''}"
        often = ps.Snapshots(name, every_epochs=None, every_seconds=1e-6)
        try:
            fit(one, data, epochs=1, snapshots=often)
        except ps.errors.NonFiniteError as error:
            return [str(error).partition(";")[0], int(error.result.state.step)]
        finally:
            often.close()
        return ["returned", 0]

    with ps.parallel.start(timeout=60) as mesh:
        found = gathered(end(mesh))
        rank = mesh.rank
    with alone(), mock.patch.dict(os.environ, {"RANK": str(rank)}):
        os.environ.pop("WORLD_SIZE", None)
        return [*found, end(None)]


def limited() -> list[list[Any]]:
    """The numbers of a run whose epochs are cut, and are evaluated in the middle; here and in one process alone."""
    data = list(loader(shuffle=False))
    how: dict[str, Any] = {"limit_batches": {"train": 4}, "evaluate_every": 0.5, "epochs": 1}

    def end(one: ps.Program, train: Any) -> list[Any]:
        result = fit(one, {"train": train, "val": data[:1]}, **how)
        return [int(result.state.step), result.history["step"], float(ps.full(result.state).params["up.bias"].sum())]

    with ps.parallel.start(timeout=60) as mesh:
        one = ps.distribute(program(), mesh)
        found = [end(one, data), end(one, ps.parallel.sharded(data, rows=True)), end(one, loader(shuffle=False))]
        found = [one for each in gathered(found) for one in each]
    with alone():
        return [end(program(), data), *found]


# --- restarts ---------------------------------------------------------------------------------------------------------


def train(
    folder: str,
    mode: str,
    epochs: int,
    kills: dict[str, list[int]],
    sizes: dict[str, int],
    pause: float = 0.0,
    how: str = "kill",
) -> None:
    """A run that is killed: in life n of torchrun, process ``kills[n][0]`` ends in its call ``kills[n][1]``:
    by SIGKILL, or with ``how="raise"`` by an error.

    Every process appends (time, epoch, batch, rows) of each call to a file ``log-``, and writes the time when it is
    killed into ``kill-``, and when it hears of it into ``heard-``.
    """
    life = os.environ.get("LAUNCH", "") + os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    with ps.parallel.start(timeout=60, **sizes) as mesh:
        one = ps.distribute(program(), mesh, params=mode)
        calls = [0]
        log = Path(folder, f"log-{life}-{mesh.rank}-{os.getpid()}.jsonl")

        def note(event: events.Event) -> None:
            if isinstance(event, events.StepEnd):
                calls[0] += 1
                time.sleep(pause)
                with log.open("a") as file:
                    file.write(json.dumps([time.time(), event.epoch, event.batch_index, rows_of(event.batch)]) + "\n")
                if kills.get(life) == [mesh.rank, calls[0]]:
                    Path(folder, f"kill-{life}").write_text(str(time.time()))
                    if how == "raise":
                        raise ValueError("of this process alone")
                    os.kill(os.getpid(), signal.SIGKILL)

        snapshots = ps.Snapshots(f"{folder}/run", every_steps=2)
        try:
            result = fit(one, epochs=epochs, snapshots=snapshots, callbacks=[note])
        except BaseException as error:
            Path(folder, f"heard-{life}").write_text(f"{time.time()} {type(error).__name__}")
            raise
        snapshots.close()
        whole = ps.full(result.state)
        if mesh.rank == 0:
            torch.save(dict(tree.with_paths(whole)), f"{folder}/end.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(*json.loads(sys.argv[1]))
