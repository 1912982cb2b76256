"""Errors of several processes name the cause, the line and the cure; no test here starts a process."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

import purestep as ps
from purestep import data
from purestep.loop import decisions
from purestep.parallel import mesh as meshes
from purestep.parallel import placement, processes

LAUNCHERS = [
    (
        {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0"},
        r"srun .* 1 of 2.*`srun --ntasks-per-node=1 torch",
    ),
    ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}, r"mpirun.* 0 of 4.*`torchrun --nproc-per-node 4"),
    ({"PMI_SIZE": "2", "PMI_RANK": "1"}, r"mpirun.*unset PMI_RANK where the processes are unrelated"),
    ({"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}, "srun"),
]


@pytest.mark.parametrize(("variables", "text"), LAUNCHERS)
def test_processes_of_another_launcher_are_refused(
    variables: dict[str, str], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ps.errors.RankError, match=text), ps.parallel.start():
        pass


@pytest.mark.parametrize(
    "variables",
    [
        {"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "3"},  # in the job's own script
        {"SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_ID": "0"},
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
    ],
)
def test_one_process_of_another_launcher_is_alone(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with ps.parallel.start() as mesh:
        assert mesh.size == 1


def test_a_difference_behind_many_letters_is_found_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["same " * 200 + end for end in ("one", "other")]
    monkeypatch.setattr(processes, "gathered", lambda mine: [mine, {"a batch": texts[1]}])
    with pytest.raises(
        ps.errors.RankError, match=r"a batch is \.\.\..*same one in process 0, .*same other in"
    ) as found:
        processes.check_same({"a batch": texts[0]}, where="train", hint="none")
    assert len(str(found.value)) < 800


def test_the_number_of_examples_of_a_list_is_no_difference() -> None:
    """One entry per example; a batch of tensors has one per column."""
    image, counts = torch.zeros(3, 4, 4), torch.tensor(1.0)

    def text(rows: Any) -> str:
        return decisions._text(data.check_batch(ps.types.Share(rows, counts)))

    assert text([([image] * 3, {"x": image})]) == text([([image] * 4, {"x": image})] * 2)
    assert text([image] * 2) != text([image] * 3)
    assert text({"x": image, "y": image}) != text({"x": image, "z": image})


def _error(monkeypatch: pytest.MonkeyPatch, *, opened: float, store: Any = None) -> str:
    groups = meshes.Groups(ps.parallel.Mesh(data=2), None, {}, None, timeout=5.0, opened=opened, store=store)
    monkeypatch.setattr(meshes, "_started", [groups])
    monkeypatch.setattr(processes, "_last_answer", 0.0)
    with pytest.raises(ps.errors.RankError) as found:  # noqa: SIM117
        with processes.answered("all_gather"):
            raise RuntimeError("Connection closed by peer\nmore")
    return str(found.value)


def test_a_collective_that_fails_names_the_line_and_that_every_process_makes_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = _error(monkeypatch, opened=time.monotonic())
    assert text.startswith(
        "process 0 of 2: another process ended, failed, did not answer in time, or made another call"
    )
    assert f"all_gather ({__file__}, line " in text
    assert "with processes.answered(" in text
    assert "cure: every process makes this call, not the first one alone" in text


def test_a_process_that_was_late_learns_it(monkeypatch: pytest.MonkeyPatch) -> None:
    text = _error(monkeypatch, opened=time.monotonic() - 60)
    assert "this process was late: it made no call for 60 s, and the others wait 5 s" in text
    assert "cure: parallel.start(timeout=...)" in text
    assert "every process makes this call" not in text


def test_the_first_error_is_named_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    other = meshes.Groups(ps.parallel.Mesh(data=2, rank=1), None, {}, None, store=store)
    meshes._tell(other, ps.errors.RankError("a consequence"))
    assert not store.check(["failure"])
    meshes._tell(other, ValueError("of the data"))
    meshes._tell(other._replace(mesh=ps.parallel.Mesh(data=2)), ValueError("a later one"))
    assert json.loads(store.get("failure")) == "process 1 raised ValueError: of the data"
    assert "another process failed: process 1 raised ValueError: of the data; all_gather" in _error(
        monkeypatch, opened=time.monotonic(), store=store
    )


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids))


@pytest.mark.parametrize("unit", ["embed", "head"])
def test_a_unit_whose_only_weight_is_tied_outside_is_refused(unit: str) -> None:
    program = ps.program(Tied(), ps.supervised(nn.CrossEntropyLoss()), ps.optim.sgd(0.1))
    with pytest.raises(
        ps.errors.ConfigError, match=rf"{unit}\.weight of the unit {unit} is tied to .*leave the unit out"
    ):
        ps.distribute(program, ps.parallel.Mesh(shard=2), params="shard", units=[unit])


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Torch's mesh of one process; purestep's has two, so that plans are applied."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    device_mesh = dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("tensor",))
    yield device_mesh
    dist.destroy_process_group()


@pytest.mark.parametrize("names", [["head"], ["embed"]])
def test_half_of_a_tie_in_a_plan_is_refused(
    names: list[str], one_process: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    styles = {"head": ColwiseParallel(), "embed": RowwiseParallel()}
    monkeypatch.setattr(meshes, "axis_mesh", lambda axis: one_process)
    program = ps.program(Tied(), ps.supervised(nn.CrossEntropyLoss()), ps.optim.sgd(0.1))
    with pytest.raises(
        ps.errors.ConfigError, match="embed.weight and head.weight are one weight.*both layers, embed and"
    ):
        ps.distribute(program, ps.parallel.Mesh(tensor=2), tensor={name: styles[name] for name in names})
    ps.distribute(program, ps.parallel.Mesh(tensor=2), tensor=styles)


def test_a_model_that_is_cut_already_is_refused(one_process: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    fully_shard(model, mesh=one_process)
    with pytest.raises(
        ps.errors.ConfigError, match=r"0\.weight is in pieces already.*distribute\(program, mesh, params"
    ):
        ps.program(model, ps.supervised(nn.MSELoss()), ps.optim.sgd(0.1))


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (
            {"x": torch.ones(8, 4), "mask": torch.ones(4, 4)},
            r"4 rows in mask.*2 parts need equal",
        ),
        ({}, "holds no tensor to split into 2 parts"),
    ],
)
def test_the_cure_of_share_says_nothing_of_micro_batches(batch: Any, text: str) -> None:
    with pytest.raises(ps.errors.DataError, match=text) as found:
        ps.parallel.share(batch, ps.parallel.Mesh(data=2))
    assert "microbatches" not in str(found.value)
    assert "buffer of the model" in str(found.value)


def test_the_part_of_one_process_is_refused_by_the_program_of_one_process() -> None:
    """As it comes back from a file that one process has written with torch.save."""
    program = ps.program(nn.Linear(4, 2), ps.supervised(nn.MSELoss()), ps.optim.sgd(0.1))
    whole = program.init(seed=0)
    sharding = placement.sharding_of(whole, lambda name: True, ps.parallel.Mesh(shard=2))
    state = placement.part(sharding, whole)
    batch = torch.ones(2, 4), torch.ones(2, 2)
    for name, call in {
        "train_step": lambda: program.train_step(state, batch),
        "flush": lambda: program.flush(state),
        "eval_step": lambda: program.eval_step(state, batch),
        "bind": lambda: program.bind(state),
    }.items():
        with pytest.raises(
            ps.errors.StateError, match=rf"{name}: .* part of one of several processes.*ps\.full\(state"
        ):
            call()
