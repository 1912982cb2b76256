"""One step on several processes, beside what one would write by hand: time, collectives, bytes and memory at rest."""

from __future__ import annotations

import concurrent.futures
import importlib.util
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import purestep as ps

from . import alone, guard, works
from .contestants import base, byhand, ours
from .works import Batch, Work

DDP = "DDP by hand, eager"
DDP_COMPILED = "DDP by hand, compiled"
FSDP = "FSDP2 by hand, eager"
FSDP_COMPILED = "FSDP2 by hand, compiled"
ACCELERATE = "Accelerate, DDP"
LIGHTNING = "Lightning, ddp"
REPLICATED = "purestep, replicate, eager"
REPLICATED_DONATED = "purestep, replicate, donated"
SHARDED = "purestep, shard, eager"
SHARDED_DONATED = "purestep, shard, donated"


class Runner(NamedTuple):
    """One way to train the work on several processes. Every process calls all of its functions."""

    step: Callable[[Any], Any]  # of this process's rows; returns a loss that nobody has waited for
    batches: list[Any]
    read: Callable[[Any], float]  # the loss of the whole batch
    weights: Callable[[], Mapping[str, Tensor]]  # whole
    shadow: Callable[[], Mapping[str, Tensor]]  # whole
    rest: Callable[[], int]  # bytes of weights, optimizer state and average between two steps


# --- the job ----------------------------------------------------------------------------------------------------------


def table(
    device: str = "cpu",
    work: str = "gpt-small",
    world: int = 2,
    rounds: int = 12,
    calls: int = 5,
    only: tuple[str, ...] | None = None,
) -> dict[str, Any]:
    """Rows of every contestant on ``world`` processes of this machine.

    Args:
        device: "cpu" (gloo) or "cuda" (NCCL). Processes share GPUs where there are fewer; NCCL 2.30 or later
            allows that with NCCL_MULTI_RANK_GPU_ENABLE=1.
        work: its name in `works.WORKS`; each process takes its share of the same batches.
        world: processes.
        rounds: turns of each contestant.
        calls: of a turn.
        only: names of contestants; None: all.
    """
    arguments = {"device": device, "work": work, "rounds": rounds, "calls": calls, "only": only}
    threads = max(1, (os.cpu_count() or 1) // world)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]

    def of_rank(rank: int) -> Any:
        local = rank % max(torch.cuda.device_count(), 1) if device == "cuda" else rank
        variables = {"RANK": str(rank), "LOCAL_RANK": str(local), "WORLD_SIZE": str(world)}
        variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": str(threads)}
        return alone.call("benchmarks.parallel:one_rank", arguments, environment=variables)

    with concurrent.futures.ThreadPoolExecutor(world) as pool:
        return next(iter(list(pool.map(of_rank, range(world)))))


def one_rank(device: str, work: str, rounds: int, calls: int, only: list[str] | None = None) -> dict[str, Any]:
    """The table as one of the processes measures it. All of them take the same turns in the same order."""
    made, place = works.WORKS[work], torch.device(device)
    world = int(os.environ["WORLD_SIZE"])
    with ps.parallel.start(shard=world, timeout=600) as mesh:
        entered, absent = _enter(made, place, mesh, only or list(CONTESTANTS))
        spent = _interleaved(entered, place, rounds, calls)
        rows = [{"name": name, "unit": "s", "values": values} for name, values in spent.items()]
        for name, runner in entered.items():
            count, size = traffic(lambda runner=runner: runner.step(runner.batches[0]))
            rows.append({"name": f"{name}: collectives a step", "unit": "", "values": [count]})
            rows.append({"name": f"{name}: bytes into collectives a step", "unit": "B", "values": [size]})
            rows.append({"name": f"{name}: bytes at rest", "unit": "B", "values": [runner.rest()]})
    threads = torch.get_num_threads() if place.type == "cpu" else None
    return {"title": f"{made.about}; {world} processes", "threads": threads, "rows": rows, "absent": absent}


def _enter(
    work: Work, device: torch.device, mesh: Any, only: list[str]
) -> tuple[dict[str, Runner], list[dict[str, str]]]:
    """The contestants that do the work of the first, warm; and the others with what is the matter with them."""
    entered: dict[str, Runner] = {}
    absent: list[dict[str, str]] = []
    reference: guard.Seen | None = None
    start = guard.copied(dict(works.seeded_model(work).named_parameters()))
    for name in only:
        needs, make = CONTESTANTS[name]
        missing = [each for each in needs if importlib.util.find_spec(each) is None]
        if missing:
            absent.append({"name": name, "why": f"not installed: {', '.join(missing)}"})
            continue
        runner = make(work, device, mesh)
        losses = [runner.read(runner.step(batch)) for batch in (runner.batches * guard.STEPS)[: guard.STEPS]]
        seen = guard.Seen(losses, guard.copied(runner.weights()), guard.copied(runner.shadow()))
        reference = reference or seen
        trouble = guard.disagreement(seen, reference, start, tolerance=work.tolerance, drift=work.drift)
        if trouble is None:
            entered[name] = runner
        else:
            absent.append({"name": name, "why": f"error: does other work: {trouble}"})
    return entered, absent


def _interleaved(
    runners: Mapping[str, Runner], device: torch.device, rounds: int, calls: int
) -> dict[str, list[float]]:
    """Seconds a call, one for each round. The first round is not counted; each begins with another contestant."""
    spent: dict[str, list[float]] = {name: [] for name in runners}
    names = list(runners)
    for number in range(-1, rounds):
        first = number % len(names)
        for name in (*names[first:], *names[:first]):
            runner = runners[name]
            runner.step(runner.batches[0])
            base.settle(device)
            if dist.is_initialized():
                dist.barrier()
            begun = time.perf_counter()
            for call in range(calls):
                runner.step(runner.batches[call % len(runner.batches)])
            base.settle(device)
            if number >= 0:
                spent[name].append((time.perf_counter() - begun) / calls)
    return spent


def traffic(call: Callable[[], Any]) -> tuple[int, int]:
    """How many collectives a call makes, and the bytes that go into them, by torch's profiler."""
    call()
    with torch.profiler.profile(record_shapes=True) as profile:
        call()
    count = size = 0
    for event in profile.events():
        if event.name.startswith(("gloo:", "nccl:")):
            count += 1
            shapes = [shape for shape in event.input_shapes if shape]
            size += 4 * sum(math.prod(shape) for shape in shapes)
    return count, size


# --- contestants ------------------------------------------------------------------------------------------------------


def _share(batch: Batch) -> Batch:
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    inputs, classes = batch
    count = len(inputs)
    first, end = count * rank // world, count * (rank + 1) // world
    return inputs[first:end], classes[first:end]


def _mean(loss: Tensor) -> float:
    """The mean over processes of equal shares."""
    found = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(found)
        found /= dist.get_world_size()
    return float(found)


def _bytes(tensors: Any) -> int:
    return sum(_local(tensor).nbytes for tensor in tensors if isinstance(tensor, Tensor))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor  # pyright: ignore[reportAttributeAccessIssue]


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # pyright: ignore[reportAttributeAccessIssue]


class _LocalShadow(byhand.Shadow):
    """An average of the numbers that this process holds: the foreach operations know no DTensor."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__(model, decay)
        self._parameters = [parameter.detach() for parameter in model.parameters()]
        self._source = [_local(parameter) for parameter in self._parameters]
        self._tensors = [source.clone() for source in self._source]

    def whole(self) -> dict[str, Tensor]:
        """Name -> the whole average."""
        return {
            name: self._joined(*pair) for name, *pair in zip(self._names, self._parameters, self._tensors, strict=True)
        }

    @staticmethod
    def _joined(parameter: Any, local: Tensor) -> Tensor:
        if not hasattr(parameter, "full_tensor"):
            return local
        made = type(parameter).from_local(
            local, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
        )
        return made.full_tensor()


def _by_hand(work: Work, device: torch.device, wrap: Callable[[nn.Module], nn.Module], *, compiled: bool) -> Runner:
    """The usual loop round a wrapped module."""
    plain = works.seeded_model(work, device).train()
    model = wrap(plain)
    optimizer = byhand.adamw(plain, work.recipe, fused=True)
    shadow = _LocalShadow(plain, work.recipe.ema)
    parameters = list(plain.parameters())

    def loss_of(inputs: Tensor, classes: Tensor) -> Tensor:
        return works.loss(model(inputs), classes)

    of_batch = torch.compile(loss_of, dynamic=False) if compiled else loss_of

    def step(batch: Batch) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=work.bf16):
            loss = of_batch(*batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, work.recipe.clip)
        optimizer.step()
        shadow.update()
        return loss.detach()

    def rest() -> int:
        slots = [value for state in optimizer.state.values() for value in state.values()]
        return _bytes([*parameters, *slots, *shadow.named().values()])

    return Runner(
        step,
        [_share(batch) for batch in works.batches(work, device)],
        _mean,
        lambda: {name: _whole(value) for name, value in byhand.weights(plain).items()},
        shadow.whole,
        rest,
    )


def _ddp(*, compiled: bool) -> Callable[[Work, torch.device, Any], Runner]:
    def make(work: Work, device: torch.device, mesh: Any) -> Runner:
        del mesh
        wrap = nn.parallel.DistributedDataParallel if dist.is_initialized() else lambda module: module
        return _by_hand(work, device, wrap, compiled=compiled)

    return make


def _fsdp(*, compiled: bool) -> Callable[[Work, torch.device, Any], Runner]:
    def make(work: Work, device: torch.device, mesh: Any) -> Runner:
        from torch.distributed.fsdp import fully_shard

        def wrap(module: nn.Module) -> nn.Module:
            if not dist.is_initialized():
                return module
            return fully_shard(module, mesh=mesh.device_mesh["shard"], reshard_after_forward=False)

        return _by_hand(work, device, wrap, compiled=compiled)

    return make


def _of_module(
    work: Work,
    device: torch.device,
    step: Callable[[Any], Any],
    plain: nn.Module,
    optimizer: Any,
    shadow: byhand.Shadow,
) -> Runner:
    """A runner of a library that wraps a module and torch's optimizer; every process holds all of both."""

    def rest() -> int:
        slots = [value for state in optimizer.state.values() for value in state.values()]
        return _bytes([*plain.parameters(), *slots, *shadow.named().values()])

    batches = [_share(batch) for batch in works.batches(work, device)]
    return Runner(step, batches, _mean, lambda: byhand.weights(plain), shadow.named, rest)


def _accelerate(work: Work, device: torch.device, mesh: Any) -> Runner:
    from accelerate import Accelerator

    del mesh
    accelerator: Any = Accelerator(cpu=device.type == "cpu", mixed_precision="bf16" if work.bf16 else "no")
    plain = works.seeded_model(work, device).train()
    model, optimizer = accelerator.prepare(plain, byhand.adamw(plain, work.recipe, fused=True))
    shadow = byhand.Shadow(plain, work.recipe.ema)

    def step(batch: Batch) -> Tensor:
        loss = works.loss(model(batch[0]), batch[1])
        optimizer.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), work.recipe.clip)
        optimizer.step()
        shadow.update()
        return loss.detach()

    return _of_module(work, device, step, plain, optimizer, shadow)


def _lightning(work: Work, device: torch.device, mesh: Any) -> Runner:
    from lightning import fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    del mesh
    made: Any = fabric.Fabric(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=dist.get_world_size() if dist.is_initialized() else 1,
        strategy="ddp" if dist.is_initialized() else "auto",
        precision="bf16-mixed" if work.bf16 else "32-true",
        plugins=[TorchElasticEnvironment()],  # these processes are all there are
    )
    made.launch()
    plain = works.seeded_model(work, device).train()
    model, optimizer = made.setup(plain, byhand.adamw(plain, work.recipe, fused=True))
    shadow = byhand.Shadow(plain, work.recipe.ema)

    def step(batch: Batch) -> Tensor:
        loss = works.loss(model(batch[0]), batch[1])
        optimizer.zero_grad()
        made.backward(loss)
        made.clip_gradients(model, optimizer, max_norm=work.recipe.clip)
        optimizer.step()
        shadow.update()
        return loss.detach()

    return _of_module(work, device, step, plain, optimizer, shadow)


def _ours(params: str, *, donated: bool) -> Callable[[Work, torch.device, Any], Runner]:
    def make(work: Work, device: torch.device, mesh: Any) -> Runner:
        program = ps.distribute(ours.program(work), mesh, params=params)
        assert program.init is not None
        state = program.init(seed=0, device=device)
        run = ps.compile_step(program.train_step, donate=True) if donated else program.train_step

        def step(batch: Any) -> Any:
            nonlocal state
            state, metrics = run(state, batch)
            return metrics

        def rest() -> int:
            return _bytes(ps.tree.leaves((state.params, state.opt_state, state.ema)))

        return Runner(
            step,
            [ps.parallel.share(batch, mesh) if mesh.size > 1 else batch for batch in works.batches(work, device)],
            ours.read,
            lambda: ps.full(ps.clone(state)).params,
            lambda: ps.full(ps.clone(state)).ema.params,
            rest,
        )

    return make


CONTESTANTS: dict[str, tuple[tuple[str, ...], Callable[[Work, torch.device, Any], Runner]]] = {
    DDP: ((), _ddp(compiled=False)),
    DDP_COMPILED: ((), _ddp(compiled=True)),
    FSDP: ((), _fsdp(compiled=False)),
    FSDP_COMPILED: ((), _fsdp(compiled=True)),
    ACCELERATE: (("accelerate",), _accelerate),
    LIGHTNING: (("lightning",), _lightning),
    REPLICATED: ((), _ours("replicate", donated=False)),
    REPLICATED_DONATED: ((), _ours("replicate", donated=True)),
    SHARDED: ((), _ours("shard", donated=False)),
    SHARDED_DONATED: ((), _ours("shard", donated=True)),
}
"""Name -> (packages that it needs, its constructor). The first is what the others are compared with."""
