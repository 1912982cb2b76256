"""Training in several processes against one process: problems that do not divide, and the runs of `test_steps`.

Everything is float64, so that a difference is an error and no rounding. Functions named in `processes.run` take and
return JSON.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import itertools
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import purestep as ps
from purestep import optim, tree
from purestep.optim import fused
from purestep.parallel import collectives, passes
from purestep.parallel import mesh as meshes
from purestep.step import exchange
from purestep.types import Share

from .processes import DEVICE

CLASSES = 29
CALLS = ("all_reduce", "all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor")


class Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(size)
        self.up = nn.Linear(size, 2 * size + 1)
        self.down = nn.Linear(2 * size + 1, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Odd sizes, a head tied to the embedding, a frozen layer, a scalar, and a layer that no loss reaches."""

    def __init__(self, blocks: int, size: int = 13) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, size)
        self.blocks = nn.ModuleList([Block(size) for _ in range(blocks)])
        self.head = nn.Linear(size, CLASSES, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Linear(size, size).requires_grad_(requires_grad=False)
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embedding(x).mean(1) * self.factor
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.frozen(hidden))


def net(blocks: int) -> nn.Module:
    torch.manual_seed(0)
    return Net(blocks).double().to(DEVICE)


def transforms(blocks: int) -> dict[str, Callable[[], optim.Transform]]:
    def adamw() -> optim.Transform:
        rule = optim.adamw(1e-2, weight_decay=0.1, mask=optim.decay_mask(net(blocks)))
        return optim.chain(optim.clip_by_global_norm(0.5), rule)

    def groups() -> optim.Transform:
        both = {"muon": optim.muon(0.02), "adamw": optim.adamw(1e-2)}
        return optim.partition(both, optim.muon_labels(net(blocks)))

    return {
        "adamw": adamw,
        "partition": groups,
        "lamb": lambda: optim.chain(optim.clip_by_global_norm(0.5), optim.lamb(1e-2)),
        "masked": lambda: optim.chain(optim.adamw(1e-2), optim.freeze(optim.decay_mask(net(blocks)))),
    }


def problem(tx: str = "adamw", blocks: int = 2, **options: Any) -> ps.Program:
    objective = ps.supervised(nn.CrossEntropyLoss(), metrics={"accuracy": ps.metrics.accuracy})
    settings: dict[str, Any] = {"precision": "64-true", "ema": 0.9, **options}
    return ps.program(net(blocks), objective, transforms(blocks)[tx](), **settings)


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 18)
        self.down = nn.Linear(18, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def rules() -> dict[str, Callable[[], optim.Transform]]:
    return {
        "adamw": lambda: optim.chain(optim.clip_by_global_norm(0.2), optim.adamw(1e-2)),
        "lamb": lambda: optim.chain(optim.clip_by_global_norm(0.2), optim.lamb(1e-2)),
    }


def perceptrons(tx: str = "adamw", **options: Any) -> ps.Program:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), Perceptron(), Perceptron()).double().to(DEVICE)
    return ps.program(net, ps.supervised(nn.MSELoss()), rules()[tx](), precision="64-true", ema=0.9, **options)


def halves() -> ps.Program:
    """Trained in float16 with a loss scale."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8)).to(DEVICE)
    rule, scaler = optim.adamw(1e-3, eps=1e-4), ps.scaler.dynamic(2.0**14)
    return ps.program(net, ps.supervised(nn.MSELoss()), rule, precision="16-true", scaler=scaler)


def spoilt() -> list[Any]:
    """The third batch has a nan in its last row, which one process has."""
    found = [tuple(leaf.clone() for leaf in batch) for batch in vectors()]
    found[2][0][-1, 0, 0] = float("nan")
    return found


def huge() -> list[Any]:
    """Float16 batches; the gradients of the second one's last row overflow, on one process alone."""
    found = [tuple(leaf.float() for leaf in batch) for batch in vectors()]
    found[1][1][-1] *= 100
    return found


class Counting(nn.Linear):
    """Buffers of each kind that a forward pass may write, and some that none writes."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int32))
        self.register_buffer("sums", torch.zeros(8))
        self.register_buffer("turns", torch.zeros(8, dtype=torch.complex128))
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("rotary", torch.polar(torch.ones(2), torch.arange(2.0)))
        self.register_buffer("coarse", torch.ones(2))
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += len(x)
            self.sums += x.detach().sum((0, 1))
            self.turns = self.turns + torch.complex(x, x.square()).detach().to(torch.complex128).sum((0, 1))
            self.mean = self.mean.lerp(x.detach().mean((0, 1)), 0.1)
            self.calls += 1
        return super().forward(x)


def counting(tx: str = "adamw", **options: Any) -> ps.Program:
    del tx
    torch.manual_seed(0)
    net = Counting().double().to(DEVICE)
    net.coarse = net.coarse.to(torch.bfloat16)
    return ps.program(
        net,
        ps.supervised(nn.MSELoss()),
        optim.sgd(0.1),
        precision="64-true",
        ema=0.9,
        **options,
    )


def contrastive(tx: str = "adamw", **options: Any) -> ps.Program:
    """Two views, whose rows are compared with those of all processes, as CLIP does."""
    del tx
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 9), nn.Tanh(), nn.Linear(9, 5)).double().to(DEVICE)

    def objective(model: Any, batch: Any) -> ps.Loss:
        a, b = (ps.parallel.gather(nn.functional.normalize(model(view.mean(1)), dim=-1)) for view in batch)
        logits, places = 5 * a @ b.T, torch.arange(len(a), device=a.device)
        mean = (nn.functional.cross_entropy(logits, places) + nn.functional.cross_entropy(logits.T, places)) / 2
        right = ps.metrics.as_mean((logits.argmax(1) == places).double().mean(), len(batch[0]))
        return ps.Loss(mean, len(batch[0]), {"accuracy": right})

    return ps.program(net, objective, optim.adamw(1e-2), precision="64-true", ema=0.9, **options)


def rows_gathered() -> dict[str, Any]:
    """Rows by `gather` outside of a step and in evaluations, and its errors."""
    found: dict[str, Any] = {}
    batch, (sizes, shapes) = vectors()[0], ([1, 3], [(2,), (3,)])
    wanted = {name: float(mean) for name, mean in contrastive().eval_step(contrastive().init(), batch).items()}
    with ps.parallel.start(timeout=60) as mesh:
        rank = mesh.rank
        found["uneven"] = ps.parallel.gather(torch.full((sizes[rank], 2), float(rank), device=DEVICE)).tolist()
        found["integers"] = ps.parallel.gather(torch.tensor([rank, 7], device=DEVICE)).tolist()
        program = ps.distribute(contrastive(), mesh)
        for kind in ("even", "uneven", "empty"):
            means = program.eval_step(program.init(), share(batch, mesh, kind))
            found[f"{kind} shares"] = max(abs(float(means[name]) - value) for name, value in wanted.items())
        errors: dict[str, Callable[[], Any]] = {
            "shapes": lambda: ps.parallel.gather(torch.ones(1, *shapes[rank], device=DEVICE)),
            "number": lambda: ps.parallel.gather(torch.ones((), device=DEVICE)),
            "compiled": lambda: ps.compile_step(program.train_step, backend="aot_eager")(
                program.init(), share(batch, mesh, "uneven")
            ),
        }
        found |= refusals(errors)
    return found


def refusals(calls: Mapping[str, Callable[[], Any]]) -> dict[str, str]:
    """The error of each call; for one that raises none, its result."""
    found: dict[str, str] = {}
    for name, call in calls.items():
        try:
            found[name] = f"returned {call()}"
        except ps.errors.PurestepError as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


_PASSES = [itertools.count(1)]


class Blocks(nn.Module):
    """Blocks of one shape, of which each pass runs those that ``chosen(rank, number of the pass)`` names."""

    def __init__(self, chosen: Callable[[int, int], list[int]], rank: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.head = nn.Linear(4, 4)
        self.chosen = chosen
        self.rank = rank

    def forward(self, x: Tensor) -> Tensor:
        for number in self.chosen(self.rank, next(_PASSES[0])):
            x = x + self.blocks[number](x)
        return self.head(x)


CHOICES: dict[str, tuple[Callable[[int, int], list[int]], Any]] = {
    "same": (lambda rank, number: [0, 2], 0),
    "experts": (lambda rank, number: [1 - rank], "step"),
    "dropped": (lambda rank, number: [1, 2] if rank == 0 else [0, 1, 2], "step"),
    "dropped last": (lambda rank, number: [0] if rank == 0 else [0, 1], "step"),
    "dropped in the second call": (lambda rank, number: [0, 1][: 2 - (rank == 0 and number == 2)], "step"),
    "dropped all": (lambda rank, number: [] if rank == 0 else [0, 1, 2], "step"),
    "later": (lambda rank, number: [rank] if number == 7 else [0], None),
    "dropped in a checked call": (lambda rank, number: [] if rank == 0 and number > 8 else [0], 1),
}
"""Blocks of a pass, and the calls: of train_step, or of `fit` with this ``check_every``."""


def orders() -> dict[str, str]:
    """The errors of processes that gather other blocks, or the same ones in another order; "" if there is none."""
    found: dict[str, str] = {}
    random = torch.Generator().manual_seed(0)
    batches = placed([[torch.randn(4, 4, generator=random) for _ in range(2)] for _ in range(12)])
    with ps.parallel.start(timeout=60, shard=2) as mesh:
        for name, (chosen, how) in CHOICES.items():
            torch.manual_seed(0)
            _PASSES[0] = itertools.count(1)
            net = Blocks(chosen, mesh.rank).to(DEVICE)
            program = ps.program(net, ps.supervised(nn.MSELoss()), optim.sgd(0.1))
            program = ps.distribute(program, mesh, params="shard", units=["blocks.*"])
            state = program.init()
            found[name] = ""
            try:
                if how == "step":
                    for batch in batches[:3]:
                        state, _ = program.train_step(state, ps.parallel.share(batch, mesh))
                else:
                    ps.fit(state, batches, program, epochs=1, check_every=how, progress=False, compile=False)
            except ps.errors.RankError as error:
                found[name] = str(error)
    return found


def vectors() -> list[Any]:
    random = torch.Generator().manual_seed(4)
    return placed([[torch.randn(6, 4, 8, generator=random, dtype=torch.float64) for _ in range(2)] for _ in range(6)])


def plan(names: Any) -> dict[str, Any]:
    """torch's styles by name; "sequence": the norm and the sum of a block on parts of its sequence."""
    from torch.distributed.tensor import Replicate, Shard, parallel

    if names != "sequence":
        return {name: getattr(parallel, style)() for name, style in names.items()}
    return {
        "1": parallel.PrepareModuleInputOutput(
            input_layouts=Replicate(),
            desired_input_layouts=Shard(1),
            use_local_input=True,
            output_layouts=Shard(1),
            desired_output_layouts=Replicate(),
        ),
        "1.norm": parallel.SequenceParallel(),
        "1.up": parallel.ColwiseParallel(input_layouts=Shard(1)),
        "1.down": parallel.RowwiseParallel(output_layouts=Shard(1)),
    }


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 5, 3)
        self.norm = nn.BatchNorm2d(5)
        self.last = nn.Linear(5, 7)
        self.plain = nn.BatchNorm1d(7, affine=False, momentum=None)

    def forward(self, x: Tensor) -> Tensor:
        return self.plain(self.last(torch.relu(self.norm(self.first(x))).mean((2, 3))))


def normalized(tx: str = "sgd", **options: Any) -> ps.Program:
    del tx
    torch.manual_seed(0)
    # The last class is padding: batches without another have the loss 0/0.
    objective = ps.supervised(nn.CrossEntropyLoss(ignore_index=6))
    rule = optim.chain(optim.clip_by_global_norm(1.0), optim.sgd(0.1, momentum=0.9))
    return ps.program(Normalized().double().to(DEVICE), objective, rule, precision="64-true", ema=0.9, **options)


def images() -> list[Any]:
    """Six batches of 10 rows; targets of the second one's last rows are padding."""
    random = torch.Generator().manual_seed(2)
    found = []
    for number in range(6):
        x = torch.randn(10, 2, 6, 6, generator=random, dtype=torch.float64) * 2 + 1
        y = torch.randint(0, 6, (10,), generator=random)
        if number == 1:
            y[5:] = 6
        found.append((x, y))
    return placed(found)


def batches(count: int = 8, rows: int = 12) -> list[Any]:
    random = torch.Generator().manual_seed(1)
    return placed(
        [[torch.randint(0, CLASSES, shape, generator=random) for shape in ((rows, 5), (rows,))] for _ in range(count)]
    )


def placed(found: list[Any]) -> list[Any]:
    """Batches as tuples of tensors on the device of the processes."""
    return [tuple(leaf.to(DEVICE) for leaf in batch) for batch in found]


def share(batch: Any, mesh: ps.parallel.Mesh, kind: str) -> Share:
    """This process's rows: "even", "uneven", or "empty", where the last processes have none."""
    if kind == "even":
        return ps.parallel.share(batch, mesh)
    rows, width = len(batch[0]), mesh.batch_size
    if kind == "uneven":
        cuts = [0, *(rows * (at + 1) * (at + 2) // (width * (width + 1)) for at in range(width - 1)), rows]
    else:
        cuts = [0, *[rows] * width] if width < 3 else [0, rows // 3, *[rows] * (width - 1)]
    first, end = cuts[mesh.batch_rank], cuts[mesh.batch_rank + 1]
    rows = slice(first, end) if end > first else slice(1)
    return Share(tuple(leaf[rows] for leaf in batch), torch.tensor(float(end > first), device=DEVICE))


def difference(found: Any, expected: Any) -> tuple[float, str]:
    """The largest difference of any two leaves, and where; trees of other structures are an error."""
    pairs, wanted = tree.with_paths(found), tree.with_paths(expected)
    assert [path for path, _ in pairs] == [path for path, _ in wanted]
    result = (0.0, "")
    for (path, one), (_, other) in zip(pairs, wanted, strict=True):
        assert one.shape == other.shape, path
        assert one.dtype == other.dtype, path
        if one.is_complex():
            one, other = torch.view_as_real(one), torch.view_as_real(other)
        if not one.numel():
            continue
        far = (one.double() - other.double()).abs().max().item()
        result = max(result, (float("inf") if far != far else far, path))
    return result


@contextlib.contextmanager
def counted() -> Generator[dict[str, int]]:
    """Count the calls of torch's collectives, without those of the host about the run."""
    counts: dict[str, int] = {}
    with contextlib.ExitStack() as stack:
        for name in CALLS:
            real = getattr(dist, name, None)
            if real is None:
                continue

            def call(*args: Any, _real: Any = real, _name: str = name, **kwargs: Any) -> Any:
                groups = meshes.current()
                if groups is None or kwargs.get("group") is not groups.host:
                    counts[_name] = counts.get(_name, 0) + 1
                return _real(*args, **kwargs)

            stack.enter_context(mock.patch.object(dist, name, call))
        yield counts


def _unsummed(value: Tensor, axis: str, op: str = "sum") -> Tensor:
    return value if axis == "shard" else _ALL_REDUCE(value, axis, op)


_ALL_REDUCE = collectives.all_reduce
_UNMIXED = property(lambda one: False, lambda one, value: None)

FAULTS: dict[str, Callable[[], Any]] = {
    # A process's gradient counts as if its share had one row.
    "unweighted": lambda: mock.patch.object(exchange, "times", lambda grad, weight: grad * (weight > 0)),
    # The rows that stand in for an empty share are counted.
    "counted": lambda: mock.patch("purestep.step.gradient.counted", lambda loss, counts: loss),
    # Each process clips by the norm of its own pieces.
    "local norm": lambda: mock.patch.object(collectives, "all_reduce", _unsummed),
    # A loss that reaches other processes' rows counts there by their weight.
    "unmixed": lambda: mock.patch.object(passes.Pass, "mixes", _UNMIXED, create=True),
    # Nothing is exchanged.
    "alone": lambda: mock.patch("purestep.parallel.placement.all_reduced", lambda values, axis: values),
}


def trained(program: ps.Program, shares: list[Any], *, compiled: Any = None) -> tuple[ps.TrainState, Any]:
    """The state after all batches and a flush, and the metrics of each call."""
    step, flush = program.train_step, program.flush
    if compiled is not None:
        both = ps.compile_program(program, donate=True, **compiled)
        step, flush = both.train_step, both.flush
    state, seen = program.init(seed=3), []
    for one in shares:
        state, metrics = step(state, one)
        seen.append({name: float(mean) for name, mean in metrics.items()})
    state, _ = flush(state)
    return ps.tree.clone(state), seen


def _named(name: str) -> Any:
    """A function of this module or of `situations`, or "module:name"."""
    module, _, name = name.rpartition(":")
    return (not module and globals().get(name)) or getattr(
        importlib.import_module(module or "rigs.parallel.situations"), name
    )


def steps(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Compare runs on this group of processes with runs of one process on the whole batches.

    A case has ``problem`` ("name", or "module:name"), ``mesh`` (sizes), ``params``, ``kind`` of shares, ``tx``,
    ``options`` of the program, ``compiled`` (arguments of `compile_program`), ``fault``, and other arguments of
    `distribute`.
    """
    found: list[dict[str, Any]] = []
    for case in cases:
        given = dict(case)
        sizes, kind = given.pop("mesh", {}), given.pop("kind", "even")
        tx, options = given.pop("tx", "adamw"), given.pop("options", {})
        compiled, fault = given.pop("compiled", None), given.pop("fault", None)
        if isinstance(given["params"], list):  # JSON has no tuples
            given["params"] = [tuple(rule) for rule in given["params"]]
        if "tensor" in given:
            given["tensor"] = plan(given["tensor"])
        build, examples = _named(given.pop("problem", "problem")), _named(given.pop("batches", "batches"))()
        expected, wanted = trained(build(tx, **options), examples)
        with ps.parallel.start(timeout=90, **sizes) as mesh, contextlib.ExitStack() as stack:
            program = ps.distribute(build(tx, **options), mesh, **given)
            if fault is not None:
                stack.enter_context(FAULTS[fault]())
            counts = stack.enter_context(counted())
            kernel = stack.enter_context(mock.patch.object(fused.foreach, "fused_", wraps=fused.foreach.fused_))
            state, metrics = trained(program, [share(batch, mesh, kind) for batch in examples], compiled=compiled)
            counts = dict(counts)
            far, path = difference(ps.full(state), expected)
            found.append(
                {
                    "far": far,
                    "path": path,
                    "metrics": max(
                        abs(one[name] - other[name]) for one, other in zip(metrics, wanted, strict=True) for name in one
                    ),
                    "collectives": counts,
                    "kernels": kernel.call_count,
                    "rest": sum(leaf.numel() for leaf in tree.leaves(state.params)),
                    "total": sum(leaf.numel() for leaf in tree.leaves(expected.params)),
                    "updates": int(expected.updates),
                }
            )
    return found


def ragged() -> list[Any]:
    """Batches of four sizes: a graph for many sizes is compiled."""
    return [tuple(leaf[:rows] for leaf in batch) for batch, rows in zip(batches(6), (12, 12, 9, 7, 5, 12), strict=True)]


def evaluations(compiled: dict[str, Any] | None) -> float:
    """The largest difference between the metrics of an evaluation and those of one process."""
    state = problem().init(seed=3)
    found = 0.0
    for params, sizes in (("replicate", {}), ("shard", {"shard": 2})):
        with ps.parallel.start(timeout=90, **sizes) as mesh:
            program = ps.distribute(problem(), mesh, params=params)
            program = program if compiled is None else ps.compile_program(program, donate=True, **compiled)
            part = program.init(seed=3)
            for batch in batches(2):
                expected = problem().eval_step(state, batch)
                metrics = program.eval_step(part, share(batch, mesh, "uneven"))
                found = max(found, *(abs(float(metrics[name]) - float(expected[name])) for name in expected))
    return found


class Wide(nn.Module):
    """About 80 MiB in float32, of which all but a thousandth is in blocks."""

    def __init__(self, width: int = 400, count: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return hidden


def peaks_with_and_without() -> list[dict[str, float]]:
    if DEVICE == "cpu":
        ctypes.CDLL(None).mallopt(-3, 2**17)  # M_MMAP_THRESHOLD: freed memory returns to the system
    return [peaks(["blocks.*"]), peaks([])]


def _high_water() -> int:
    """The largest memory since the last reset, in bytes: resident memory of this process, or memory of the device."""
    if DEVICE == "cuda":
        return torch.cuda.max_memory_allocated()
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024


def _reset_high_water() -> None:
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")


def peaks(units: list[str]) -> dict[str, float]:
    """The memory that gradients of one call need at their peak, and that a state holds, relative to all parameters."""
    from purestep.step import gradient

    torch.manual_seed(0)
    with torch.no_grad():
        net = Wide().to(DEVICE)
    objective = ps.supervised(nn.MSELoss())
    whole = ps.program(net, objective, optim.sgd(1e-3))
    total = sum(leaf.numel() * leaf.element_size() for leaf in net.parameters())
    (batch,) = placed([[torch.randn(4, 8), torch.randn(4, 400)]])
    with ps.parallel.start(timeout=90, shard=2) as mesh:
        program = ps.distribute(whole, mesh, params="shard", units=units)
        state = program.init(seed=0)
        rest = sum(leaf.numel() * leaf.element_size() for leaf in state.params.values())
        del whole, net
        found: list[int] = []
        original = gradient._micro

        def measured(*args: Any) -> Any:
            _reset_high_water()
            before = _high_water()
            result = original(*args)
            found.append(_high_water() - before)
            return result

        with mock.patch.object(gradient, "_micro", measured):
            for _ in range(3):
                state, _ = program.train_step(state, ps.parallel.share(batch, mesh))
    return {"peak": found[-1] / total, "first": found[0] / total, "rest": rest / total, "total": total / 2**20}


def overflow(params: str, sizes: dict[str, int]) -> dict[str, list[Any]]:
    """Train in float16 while one process's gradients overflow: the counts, scales and digests of this process."""
    found: dict[str, list[Any]] = {"updates": [], "scales": [], "digests": []}
    with ps.parallel.start(timeout=60, **sizes) as mesh:
        program = ps.distribute(halves(), mesh, params=params)
        state = program.init(seed=0)
        for batch in huge():
            state, _ = program.train_step(state, ps.parallel.share(batch, mesh))
            found["updates"].append(int(state.updates))
            found["scales"].append(float(state.scaler.scale))
            found["digests"].append(sum(leaf.double().sum().item() for leaf in ps.full(state).params.values()))
    return found


def many_elements() -> dict[str, list[float]]:
    """Updates applied and last loss of a run in float16 whose losses are means of 65,536 numbers: in one process, with
    units, and with units compiled."""
    found: dict[str, list[float]] = {}
    with ps.parallel.start(timeout=60, shard=2) as mesh:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(DEVICE)
        one = ps.program(layers, ps.supervised(nn.MSELoss()), optim.sgd(0.1), precision="16-mixed", nonfinite="skip")
        units = ps.distribute(one, mesh, params="shard", units=["0"])
        compiled = ps.compile_program(units, backend="aot_eager")
        x = torch.randn(1024, 64, device=DEVICE)
        for name, program in {"one": one, "units": units, "compiled": compiled}.items():
            state, applied, loss = program.init(device=DEVICE), 0.0, 0.0
            for _ in range(4):
                batch = (x, 2 * x)
                state, metrics = program.train_step(state, batch if program is one else ps.parallel.share(batch, mesh))
                applied, loss = applied + float(metrics["applied"]), float(metrics["loss"])
            found[name] = [applied, loss]
    return found


def one_row(batchnorm: str) -> str:
    """The error of a step in which a process has one row, or a row that stands in for none; "" if there is none."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    program = ps.program(net.to(DEVICE), ps.supervised(nn.MSELoss()), optim.sgd(0.1))
    rows = 0
    try:
        with ps.parallel.start(timeout=60) as mesh:
            several = ps.distribute(program, mesh, batchnorm=batchnorm)
            state = several.init(seed=0)
            for rows in (3, 2, 1) if batchnorm == "sync" else (3,):
                batch = torch.randn(rows, 4, device=DEVICE), torch.randn(rows, 4, device=DEVICE)
                state, _ = several.train_step(state, share(batch, mesh, "empty" if batchnorm == "average" else "even"))
    except ps.errors.PurestepError as error:
        return f"{rows} rows: {error}"
    return ""


def refused() -> dict[str, str]:
    """The errors of a step whose forward pass writes buffers that `distribute` has no way for, and of a plan that has a
    frozen layer."""
    with ps.parallel.start(timeout=60) as mesh:
        program = ps.distribute(counting(), mesh)
        found = refusals(
            {"a buffer": lambda: program.train_step(program.init(seed=0), ps.parallel.share(vectors()[0], mesh))}
        )
    with ps.parallel.start(timeout=60, tensor=2) as mesh:
        net = nn.Sequential(Perceptron(), Perceptron()).double().to(DEVICE)
        net[1].up.requires_grad_(requires_grad=False)
        frozen = ps.program(net, ps.supervised(nn.MSELoss()), optim.sgd(0.1))
        styles = plan({"*.up": "ColwiseParallel", "*.down": "RowwiseParallel"})
        return found | refusals({"a plan": lambda: ps.distribute(frozen, mesh, tensor=styles)})


LAYERS: dict[str, tuple[str, str, dict[str, int], dict[str, Any]]] = {
    "sync": ("normalized", "images", {}, {"batchnorm": "sync"}),
    "units": ("problem", "batches", {"shard": 2}, {"params": "shard", "units": ["blocks.*"]}),
    "tensor": (
        "perceptrons",
        "vectors",
        {"tensor": 2},
        {"tensor": {"*.up": "ColwiseParallel", "*.down": "RowwiseParallel"}},
    ),
}
"""Layers that communicate: program, batches, mesh, and arguments of `distribute`."""


def captured() -> dict[str, dict[str, float]]:
    """The difference of a compiled step with each of these layers: all donated, the first also not."""
    found: dict[str, dict[str, float]] = {}
    for name, (build, examples, sizes, options) in LAYERS.items():
        given = {**options, "tensor": plan(options["tensor"])} if "tensor" in options else options
        batch = globals()[examples]()[0]
        with ps.parallel.start(timeout=60, **sizes) as mesh:
            program = ps.distribute(globals()[build]("adamw"), mesh, **given)
            wanted = ps.full(program.train_step(program.init(seed=0), share(batch, mesh, "even"))[0])
            found[name] = {}
            for donate in (True, False) if len(found) == 1 else (True,):
                step = ps.compile_step(program.train_step, donate=donate, backend="aot_eager")
                state = step(program.init(seed=0), share(batch, mesh, "even"))[0]
                found[name]["donated" if donate else "alone"] = difference(ps.full(state), wanted)[0]
    return found


def functional() -> dict[str, str]:
    """What the plug-in for the CPU makes of graphs with and without functional collectives."""
    import torch.distributed._functional_collectives as functional_collectives
    from torch.fx.experimental.proxy_tensor import make_fx

    from purestep.compile import lower
    from purestep.compile.cpu import backend

    def reduced(x: Tensor) -> list[Tensor]:
        found = functional_collectives.all_reduce(torch.tanh(x), "sum", dist.group.WORLD)
        return [found * 2]

    def plain(x: Tensor) -> list[Tensor]:
        return [torch.tanh(x) * 2]

    found: dict[str, str] = {}
    with ps.parallel.start(timeout=60):
        for name, function in (("functional", reduced), ("own", plain)):
            try:
                graph = make_fx(function, tracing_mode="fake")(torch.ones(3))
                backend.compiled(graph, [torch.ones(3)], options=None)
                found[name] = "compiled"
            except lower.NotLowered as error:
                found[name] = str(error)
    return found
