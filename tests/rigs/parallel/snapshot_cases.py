"""Functions that run in every process of a group: they save, restore and export states in pieces."""

from __future__ import annotations

import hashlib
import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from saving import bits
from torch import Tensor, nn

import purestep as ps
from purestep import errors, optim
from purestep.parallel import placement

from .processes import DEVICE

KINDS = ("shard", "replicate", "rules")


class Net(nn.Module):
    """Odd sizes, a tied head, a scalar, a frozen part, a channels_last convolution, a buffer, bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.head = nn.Linear(5, 11, bias=False)
        self.head.weight = self.embed.weight
        self.conv = nn.Conv2d(3, 7, 2).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.row = nn.Parameter(torch.ones(1, 5))
        self.frozen = nn.Linear(5, 5).requires_grad_(False)
        self.register_buffer("seen", torch.arange(3.0))
        self.brief = nn.Parameter(torch.ones(3, 5, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x).mean(1) * self.scale + self.row + self.brief.float().sum(0)
        image = hidden[:, :4].reshape(-1, 1, 2, 2).expand(-1, 3, 2, 2)
        return self.head(self.frozen(hidden)) + self.conv(image).mean((1, 2, 3))[:, None]


def program(accumulate: int = 3) -> ps.Program:
    torch.manual_seed(0)
    tx = optim.chain(optim.clip_by_global_norm(0.5), optim.adamw(1e-2))
    return ps.program(Net().to(DEVICE), ps.supervised(nn.CrossEntropyLoss()), tx, ema=0.9, accumulate=accumulate)


def distributed(mesh: ps.parallel.Mesh, kind: str, accumulate: int = 3) -> ps.Program:
    rules: Any = {"rules": [("conv|brief", "shard")], "shard": "shard"}
    return ps.distribute(program(accumulate), mesh, params="replicate" if mesh.shard == 1 else rules[kind])


def trained(own: ps.Program, mesh: ps.parallel.Mesh, calls: int = 5) -> Any:
    """A state after some calls: with ``accumulate=3`` a window is open."""
    assert own.init is not None
    state = own.init(seed=3)
    generator = torch.Generator().manual_seed(1)
    for _ in range(calls):
        rows = torch.randint(0, 11, (6, 4), generator=generator).to(DEVICE)
        state = step(own, state, mesh, rows)
    return state


def step(own: ps.Program, state: Any, mesh: ps.parallel.Mesh, rows: Tensor) -> Any:
    batch = rows, rows[:, 0]
    return own.train_step(state, ps.parallel.share(batch, mesh) if mesh.size > 1 else batch)[0]


def digest(state: Any) -> str:
    """Of paths and bits of a whole state."""
    found = hashlib.sha256()
    for path, leaf in ps.tree.with_paths(state):
        found.update(f"{path} {leaf.dtype} {tuple(leaf.shape)} ".encode() + bits(leaf))
    return found.hexdigest()


def meshes_of(world: int, kind: str) -> dict[str, int]:
    if kind == "replicate":
        return {}
    return {"shard": 2 if world == 4 else world}  # of four processes: hybrid


def write(root: str, kind: str) -> str:
    """Save a trained state; returns the digest of the whole."""
    world = int(os.environ["WORLD_SIZE"])
    with ps.parallel.start(timeout=60, **meshes_of(world, kind)) as mesh:
        own = distributed(mesh, kind)
        state = trained(own, mesh)
        with ps.Snapshots(root) as snapshots:
            snapshots.save(int(state.step), state, loop={"rank": mesh.rank}, metrics={"loss": 0.5})
            snapshots.wait()
            assert snapshots.steps() == [int(state.step)]
        return digest(ps.full(state))


def read(root: str, kind: str) -> str:
    """Restore the newest step into another state; returns the digest of the whole."""
    world = int(os.environ["WORLD_SIZE"])
    with ps.parallel.start(timeout=60, **meshes_of(world, kind)) as mesh:
        own = distributed(mesh, kind)
        assert own.init is not None
        template = own.init(seed=7)
        found = ps.Snapshots(root, writer=False).restore(template)
        assert found.loop == {"rank": 0}
        assert ps.tree.flatten(found.state)[1] == ps.tree.flatten(template)[1]
        for (path, leaf), like in zip(ps.tree.with_paths(found.state), ps.tree.leaves(template), strict=True):
            assert (leaf.shape, leaf.dtype, leaf.stride()) == (like.shape, like.dtype, like.stride()), path
        step(own, found.state, mesh, torch.zeros(6, 4, dtype=torch.int64, device=DEVICE))
        return digest(ps.full(found.state))


def tensor_parallel(root: str) -> dict[str, Any]:
    """Save and restore parts of layers, and with four processes pieces of them: the digests of the whole before and
    after, that of one process that reads, and the largest number of numbers that a process has written."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    def made() -> ps.Program:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4), nn.Linear(4, 4)).to(DEVICE)
        return ps.program(model, ps.supervised(nn.MSELoss()), optim.adamw(1e-2), ema=0.9, accumulate=2)

    shard = int(os.environ["WORLD_SIZE"]) // 2
    with ps.parallel.start(timeout=60, shard=shard, tensor=2) as mesh:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        own = ps.distribute(made(), mesh, params="shard" if shard > 1 else "replicate", tensor=plan)
        assert own.init is not None
        state = own.init(seed=3)
        batch = torch.arange(12.0, device=DEVICE).reshape(3, 4), torch.zeros(3, 4, device=DEVICE)
        for _ in range(3):  # a window is open
            state, _ = own.train_step(state, ps.parallel.share(batch, mesh) if shard > 1 else batch)
        gathers = mock.patch.object(placement, "unsharded", mock.Mock(side_effect=AssertionError("gathers all")))
        with gathers, ps.Snapshots(root) as snapshots:
            snapshots.save(1, state)
            written = sum(buffer.numel() for buffer in snapshots._buffers.values())
            snapshots.wait()
            found = snapshots.restore(own.init(seed=5)).state
        assert ps.tree.flatten(found)[1] == ps.tree.flatten(state)[1]
        for (path, leaf), like in zip(ps.tree.with_paths(found), ps.tree.leaves(state), strict=True):
            assert (leaf.shape, leaf.dtype, leaf.stride()) == (like.shape, like.dtype, like.stride()), path
        digests = [digest(ps.full(state)), digest(ps.full(found))]
    plain = made()
    assert plain.init is not None
    whole = ps.Snapshots(root, writer=False).restore(plain.init()).state
    size = sum(leaf.numel() for leaf in ps.tree.leaves(whole))
    return {"digests": [*digests, digest(whole)], "share": written / size}


# --- faults: a small state, made by hand ------------------------------------------------------------------------------


def small(value: int, mesh: ps.parallel.Mesh) -> ps.TrainState:
    """This process's part of a state whose numbers are all ``value``."""
    whole = small_whole(value)
    sharding = placement.sharding_of(whole, lambda name: name != "b", mesh)
    return placement.part(sharding, whole) if mesh.size > 1 else whole


def small_whole(value: int) -> ps.TrainState:
    own = ps.program(nn.Linear(30, 21), ps.supervised(nn.MSELoss()), optim.adamw(1e-2))
    assert own.init is not None
    state = own.init(seed=0)
    state = state._replace(params={"b": state.params["bias"], "w": state.params["weight"]}, opt_state=())
    return ps.tree.map(lambda leaf: torch.full_like(leaf, value), state)


def save_three(root: str) -> None:
    """Save the steps 1, 2 and 3, with ``keep=2``, and 3 once more; prints each that is on the disk, and the errors."""
    with ps.parallel.start(timeout=60, shard=int(os.environ["WORLD_SIZE"])) as mesh:
        try:
            with ps.Snapshots(root, keep=2, keep_best=0) as snapshots:
                for step in (1, 2, 3):
                    snapshots.save(step, small(step, mesh))
                    snapshots.wait()
                    print("saved", step, flush=True)
                snapshots.save(3, small(3, mesh), overwrite=True)
        except errors.PurestepError as error:
            print("error", type(error).__name__, error, flush=True)


def disagree(root: str) -> list[str]:
    """Every way in which two processes may differ, and every error that one of them has."""
    found: list[str] = []

    def expect(kind: type[Exception], word: str, function: Any) -> None:
        with pytest.raises(kind, match=word):
            function()
        found.append(kind.__name__)

    with ps.parallel.start(timeout=60, shard=int(os.environ["WORLD_SIZE"])) as mesh:
        one = mesh.rank == 1
        expect(errors.RankError, "directories", lambda: ps.Snapshots(f"{root}/{mesh.rank}").open())
        with ps.Snapshots(f"{root}/run", keep=2, keep_best=0) as snapshots:
            expect(
                errors.RankError, "the step is 1 in process 0, 2", lambda: snapshots.save(1 + mesh.rank, small(1, mesh))
            )
            expect(
                errors.RankError,
                "the checksum of the leaves' names and shapes is",
                lambda: snapshots.save(1, small_whole(1) if one else small(1, mesh)),
            )
            expect(errors.StateError, "no_such", lambda: snapshots.save(1, {"no_such": set() if one else 1}))
            expect(errors.SnapshotError, "JSON", lambda: snapshots.save(1, small(1, mesh), meta=set() if one else None))
            snapshots.save(1, small(1, mesh))
            snapshots.wait()
            again = lambda: snapshots.save(1, small(1, mesh))  # noqa: E731
            expect(errors.SnapshotError, "exists already", again)
            for rank in (0, 1):
                if mesh.rank == rank:
                    os.environ["PURESTEP_FAILPOINT"] = "snapshot.copy=raise:MemoryError"
                expect(errors.WriteFailed, "no host copy", lambda: snapshots.save(2, small(2, mesh)))
                os.environ.pop("PURESTEP_FAILPOINT", None)
            for point, action in (
                ("stage", "ENOSPC"),
                ("sync", "EIO"),
                ("digest", "RuntimeError"),
            ):
                for rank in (0, 1):
                    if mesh.rank == rank:
                        os.environ["PURESTEP_FAILPOINT"] = f"snapshot.{point}=raise:{action}"
                    word = "step 2: process 1" if rank else "step 2"
                    snapshots.save(2, small(2, mesh))
                    expect(errors.WriteFailed, word, snapshots.wait)
                    os.environ.pop("PURESTEP_FAILPOINT", None)
                    assert snapshots.steps() == [1]
            snapshots.save(2, small(2, mesh), loop={"rank": mesh.rank})
            assert snapshots.restore(small(0, mesh)).step == 2
            expect(errors.NotFound, "7", lambda: snapshots.restore(small(0, mesh), step=7))
            expect(
                errors.RankError,
                "the step to restore is",
                lambda: snapshots.restore(small(0, mesh), step=1 + mesh.rank),
            )
            wrong = {"w": torch.zeros(2)}
            expect(errors.Mismatch, "differ", lambda: snapshots.restore(wrong if one else small(0, mesh)))
            snapshots.save(3, small(3, mesh))
            snapshots.save(4, small(4, mesh))  # waits in every process
            snapshots.wait()
            assert snapshots.steps() == [3, 4]
            torch.distributed.barrier()
            if mesh.rank == 0:
                damage(Path(root) / "run" / "4" / "part-1")
            torch.distributed.barrier()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                back = snapshots.restore(small(0, mesh))
            assert back.step == 3
            assert len(caught) == (mesh.rank == 0), caught
            torch.distributed.barrier()
            assert (Path(root) / "run" / "4.corrupt").exists()
            assert digest(ps.full(back.state)) == digest(small_whole(3))
            snapshots.save(4, small(5, mesh))
            snapshots.wait()
            back = snapshots.restore(small(0, mesh), step=3)
            expect(errors.SnapshotError, "start_over", lambda: snapshots.save(4, small(6, mesh)))
            assert snapshots.start_over(after=3) == [4]
            snapshots.save(4, small(6, mesh))
            snapshots.wait()
            assert snapshots.steps() == [3, 4]
            assert (Path(root) / "run" / "4.archived").exists()
            snapshots.save(4, small(7, mesh), overwrite=True)
            snapshots.wait()
            assert digest(ps.full(snapshots.restore(small(0, mesh)).state)) == digest(small_whole(7))
            assert snapshots.start_over() == [3, 4]
            assert snapshots.steps() == []
    assert [name for name in os.listdir(f"{root}/run") if name.startswith((".tmp", ".old"))] == []
    expect(errors.RankError, "pieces", lambda: ps.Snapshots(f"{root}/x").save(1, back.state))
    return found


def damage(folder: Path) -> None:
    """Flip a byte in the files with values, which have no digest of their own: only a process that reads this part
    can see it."""
    for path in folder.rglob("ocdbt.process_*/d/*"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)


def locked(root: str) -> str:
    """Another process holds the directory."""
    with ps.parallel.start(timeout=60, shard=int(os.environ["WORLD_SIZE"])):
        try:
            ps.Snapshots(root).open()
        except errors.Locked as error:
            return str(error)
    return ""


def continued(root: str) -> str:
    """``on_save_error="continue"``: the failure of one is counted by all, and the run goes on."""
    with ps.parallel.start(timeout=60, shard=int(os.environ["WORLD_SIZE"])) as mesh:
        with ps.Snapshots(root, on_save_error="continue") as snapshots:
            if mesh.rank == 1:
                os.environ["PURESTEP_FAILPOINT"] = "snapshot.stage=raise:ENOSPC@1"
            snapshots.save(1, small(1, mesh))
            snapshots.save(1, small(1, mesh))
        return f"{snapshots.failed} {snapshots.steps()}"


class SavesItself(Net):
    def save_pretrained(self, directory: Path) -> None:
        from safetensors.torch import save_file

        assert int(os.environ["RANK"]) == 0
        save_file({name: value.clone() for name, value in self.state_dict().items()}, directory / "model.safetensors")


def tools(root: str) -> list[str]:
    """Exports, binds and evaluates a state in pieces, and compares each with the whole."""
    with ps.parallel.start(timeout=60, shard=int(os.environ["WORLD_SIZE"])) as mesh:
        own, plain = distributed(mesh, "shard"), program()
        state = trained(own, mesh)
        whole = ps.full(state)
        rows = torch.arange(8, device=DEVICE).reshape(2, 4)
        assert own.bind is not None
        assert plain.bind is not None
        for view in ("params", "ema"):
            ps.export_weights(f"{root}/{view}.safetensors", own, state, view)
            from safetensors.torch import load_file

            exported = load_file(f"{root}/{view}.safetensors")
            expected = ps.view(whole, view)
            for name, value in expected.params.items():
                assert bits(exported[name]) == bits(value), name
            ps.save_pretrained(f"{root}/{view}", SavesItself(), state, view)
            saved = load_file(f"{root}/{view}/model.safetensors")
            assert {name: bits(value) for name, value in saved.items()} == {
                name: bits(value) for name, value in exported.items()
            }
            module = Net()
            ps.load_into(module, state, view)
            for name, value in module.named_parameters():
                assert bits(value) == bits({**expected.params, **expected.frozen}[name]), name
            with torch.no_grad():
                found, wanted = own.bind(state, view)(rows), plain.bind(whole, view)(rows)
            assert torch.equal(found, wanted)
            assert own.eval_step is not None
            metrics = own.eval_step(ps.view(state, view), ps.parallel.share((rows, rows[:, 0]), mesh))
            assert plain.eval_step is not None
            assert abs(float(metrics["loss"]) - float(plain.eval_step(expected, (rows, rows[:, 0]))["loss"])) < 1e-6
        found = []
        for path in (f"{root}/missing/\0.pt", f"{root}/a.zip"):
            try:
                ps.export_weights(path, own, state)
            except (errors.PurestepError, ValueError) as error:
                found.append(type(error).__name__)
        return found


def only(root: str) -> str:
    """Restore the weights alone, into a state whose other leaves stay."""
    with ps.parallel.start(timeout=60, shard=int(os.environ["WORLD_SIZE"])) as mesh:
        own = distributed(mesh, "shard")
        assert own.init is not None
        template = own.init(seed=7)
        found = ps.Snapshots(root, writer=False).restore(template, only="params").state
        whole = ps.full(found)
        assert int(whole.step) == 0
        return digest((whole.params, whole.buffers, whole.ema))
