"""Functions that the processes of `test_tools` run: predictions, BatchNorm statistics, learning rates."""

from __future__ import annotations

import contextlib
import importlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import purestep as ps
from purestep import optim, tree

from . import cases, fitting
from .fitting import alone, distance, gathered
from .processes import DEVICE


def everything() -> dict[str, Any]:
    """What `test_tools` needs of two processes, in one start of them."""
    return {
        "predict": [predicted("replicate", {}), predicted("shard", {"shard": 2})],
        "statistics": [refreshed(kind, view) for kind in ("sync", "average") for view in ("params", "ema")],
        "rates": swept(),
        "refusals": refusals(),
        "handed out": handed_out(),
        "split": split_by_tensor(),
    }


def split_by_tensor() -> float:
    """Processes of one model predict its rows once: the difference from one process."""
    plan = cases.plan({"*.up": "ColwiseParallel", "*.down": "RowwiseParallel"})
    rows = [batch[0] for batch in cases.vectors()]
    with ps.parallel.start(timeout=60, tensor=2) as mesh:
        program = ps.distribute(cases.perceptrons(), mesh, tensor=plan)
        found = ps.predict(program, program.init(), rows)
    with alone():
        plain = cases.perceptrons()
        return float((found - ps.predict(plain, plain.init(), rows)).abs().max())


def threads_left(folder: str, kind: str) -> list[int]:
    """Threads of gloo before a mesh in which a run has trained, inside of it, and after it. "hold": somebody keeps the
    groups; "user": in the user's process group."""

    def count() -> int:
        tasks = Path("/proc/self/task").iterdir()
        return sum("gloo" in (task / "comm").read_text() for task in tasks)

    importlib.import_module("torch.distributed.nn.functional")
    if kind == "user":
        dist.init_process_group("gloo")
        dist.barrier()
        time.sleep(0.3)  # until its threads have their names
    before = count()
    environment = alone() if kind == "user" else contextlib.nullcontext()  # torchrun's variables are not read then
    with environment, ps.parallel.start(timeout=60) as mesh:
        assert mesh.size == 2
        program = ps.distribute(fitting.program(), mesh)
        fitting.fit(program, epochs=1, snapshots=folder)
        held = mesh.device_mesh if kind == "hold" else None
        inside = count()
    found = [before, inside, count()]
    del held
    return found


# --- predict ----------------------------------------------------------------------------------------------------------


def _forward(model: Any, inputs: Any) -> dict[str, Any]:
    logits = model(inputs)
    return {"logits": logits, "row": inputs[:, 0]}


def predicted(mode: str, sizes: dict[str, int]) -> dict[str, Any]:
    """37 rows in batches of 8, shuffled; and 5 rows in batches of 4, so that a share is empty."""
    loaders = [fitting.loader(), DataLoader(fitting.dataset(5), 4)]
    called: list[tuple[int, list[int]]] = []

    def note(outputs: Any, batch: Any, index: int) -> None:
        assert len(outputs["row"]) == len(batch[0])
        called.append((index, outputs["row"].int().tolist()))

    with ps.parallel.start(timeout=60, **sizes) as mesh:
        program = ps.distribute(fitting.program(), mesh, params=mode)
        state = program.init(seed=3)
        found = [ps.predict(program, state, loader, forward=_forward) for loader in loaders]
        nothing = ps.predict(program, state, loaders[1], forward=_forward, callback=note)
        by_rows = ps.parallel.sharded(fitting.loader(), rows=True)
        ordered = [
            ps.predict(program, state, loader, forward=_forward)["row"].int().tolist()
            for loader in (by_rows, ps.open_feed(fitting.loader()))
        ]
        own = DataLoader(fitting.Lines(fitting.own_batches(2, mesh.batch_rank, mesh.batch_size)), None)
        separate = ps.predict(program, state, ps.parallel.sharded(own), forward=_forward)
        order = gathered(called)
    with alone():
        plain = fitting.program()
        wanted = [ps.predict(plain, plain.init(seed=3), loader, forward=_forward) for loader in loaders]
    return {
        "far": max(distance(a, b) for a, b in zip(found, wanted, strict=True)),
        "rows": [one["row"].int().tolist() for one in found],
        "callback": [nothing, sorted(row for part in order for _, rows in part for row in rows), order],
        "separate": separate["row"].int().tolist(),
        "ordered": ordered,
    }


# --- refresh_batchnorm ------------------------------------------------------------------------------------------------


def refreshed(batchnorm: str, view: str) -> dict[str, Any]:
    """The largest difference of the statistics from those of one process, of its whole batches or of each half."""
    images = [tuple(leaf[:9] for leaf in batch) for batch in cases.images()]
    halves = [tuple(leaf[part] for leaf in batch) for batch in images for part in (slice(4), slice(4, 9))]
    with ps.parallel.start(timeout=60, shard=2) as mesh:
        program = ps.distribute(cases.normalized(), mesh, params="shard", batchnorm=batchnorm)
        state = program.init(seed=3)
        found = ps.refresh_batchnorm(program, state, images, view=view)
        assert found.placement == state.placement
        whole = ps.full(found)
        untouched = distance(whole.params, ps.full(state).params)
    with alone():
        plain = cases.normalized()
        wanted = ps.refresh_batchnorm(plain, plain.init(seed=3), images if batchnorm == "sync" else halves, view=view)
    kept = {name for name in wanted.buffers if not name.endswith("num_batches_tracked")}
    chosen = [ps.view(one, view).buffers for one in (whole, wanted)]
    return {
        "far": max(float((chosen[0][name] - chosen[1][name]).abs().max()) for name in kept),
        "params": untouched,
        "batches": int(chosen[0]["norm.num_batches_tracked"]),
    }


# --- find_learning_rate -----------------------------------------------------------------------------------------------


def swept() -> dict[str, Any]:
    def program() -> ps.Program:
        torch.manual_seed(0)
        tx = optim.inject(optim.sgd)(learning_rate=0.1)
        return ps.program(
            fitting.Net().double().to(DEVICE), ps.supervised(nn.CrossEntropyLoss()), tx, precision="64-true"
        )

    how: dict[str, Any] = {"low": 1e-3, "high": 1e3, "steps": 12}
    with ps.parallel.start(timeout=60, shard=2) as mesh:
        one = ps.distribute(program(), mesh, params="shard")
        state = one.init(seed=3)
        before = tree.clone(state)
        found = ps.find_learning_rate(one, state, fitting.loader(), **how)
        unchanged = distance(state, before)
    with alone():
        plain = program()
        wanted = ps.find_learning_rate(plain, plain.init(seed=3), fitting.loader(), **how)
    return {
        "rates": [list(found.rates), list(wanted.rates)],
        "far": max(abs(a - b) / max(abs(b), 1.0) for a, b in zip(found.losses, wanted.losses, strict=True)),
        "diverged": [found.diverged, wanted.diverged],
        "unchanged": unchanged,
    }


# --- errors -----------------------------------------------------------------------------------------------------------


def refusals() -> dict[str, str]:
    """Return the errors for a program that is not distributed, and for outputs that cannot be joined."""
    with ps.parallel.start(timeout=60, shard=2) as mesh:
        plain = cases.normalized()
        program = ps.distribute(cases.normalized(), mesh, params="shard", batchnorm="sync")
        state = program.init(seed=3)
        images = cases.images()
        sought = _linear(optim.inject(optim.sgd)(learning_rate=0.1))
        rates = ps.distribute(sought, mesh).init()
        calls: dict[str, Callable[[], Any]] = {
            "predict": lambda: ps.predict(plain, state, images),
            "refresh_batchnorm": lambda: ps.refresh_batchnorm(plain, state, images),
            "find_learning_rate": lambda: ps.find_learning_rate(sought, rates, images),
            "a list": lambda: ps.predict(program, state, images, forward=lambda model, x: [model(x)]),
            "other widths": lambda: ps.predict(program, state, images, forward=_as_wide_as_its_rank),
            "a stream": lambda: ps.predict(program, state, DataLoader(fitting.Lines([[0, 1]]), None)),
            "lbfgs": lambda: ps.distribute(_linear(optim.lbfgs()), mesh),
            "complex": lambda: ps.distribute(_linear(optim.sgd(0.1), torch.complex64), mesh),
        }
        found = cases.refusals(calls)
    return found | cases.refusals({"without a mesh": lambda: ps.predict(program, state, images)})


def _linear(tx: optim.Transform, dtype: torch.dtype = torch.float32) -> ps.Program:
    return ps.program(nn.Linear(2, 1, dtype=dtype), ps.supervised(nn.MSELoss()), tx)


def handed_out() -> list[list[float]]:
    """The outputs of a step of this process: of five rows, and of one row, which the second process has."""

    def objective(model: Any, rows: torch.Tensor) -> ps.Loss:
        errors = (model(rows) - 1).square()
        return ps.Loss(errors.mean(), len(rows), outputs={"rows": rows[:, 0]})

    with ps.parallel.start(timeout=60) as mesh:
        program = ps.distribute(ps.program(nn.Linear(2, 1).to(DEVICE), objective, optim.sgd(0.1)), mesh)
        state, found = program.init(), []
        for count in (5, 1):
            rows = torch.arange(count, device=DEVICE, dtype=torch.float32)[:, None].expand(count, 2)
            state, metrics = program.train_step(state, ps.parallel.share(rows, mesh))
            found.append(metrics["outputs"]["rows"].tolist())
    return found


def _as_wide_as_its_rank(model: Any, inputs: Any) -> Any:
    return model(inputs)[:, : 2 + dist.get_rank()]
