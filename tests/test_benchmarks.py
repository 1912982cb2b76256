from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import (
    alone,
    contestants,
    figures,
    gpu,
    guard,
    jobs,
    measure,
    memory,
    models,
    parallel,
    picture,
    report,
    steps,
    works,
)
from benchmarks.contestants import Entry, Gate, Gated, byhand, ours
from benchmarks.measure import Plan, Spread, Turn

CPU = torch.device("cpu")
MLP = works.WORKS["mlp"]


def table_of(**rows):
    result = {"rows": [{"name": name, "unit": "s", "values": values} for name, values in rows.items()]}
    return result | {"title": "made up", "threads": 1, "absent": [{"name": "peer", "why": "not installed: peer"}]}


# --- statistics -------------------------------------------------------------------------------------------------------


def test_spread_is_median_and_deciles():
    assert measure.spread([4.0, 0.0, 1.0, 3.0, 2.0]) == Spread(2.0, pytest.approx(0.4), pytest.approx(3.6))
    assert measure.spread([7.0]) == Spread(7.0, 7.0, 7.0)


def test_ratio_is_taken_round_by_round():
    # A machine that is half as fast in the second round changes no ratio.
    assert measure.ratio([3.0, 6.0, 3.0], [1.0, 2.0, 1.0]) == Spread(3.0, 3.0, 3.0)
    assert measure.ratio([2.0, 4.0, 9.0], [1.0, 1.0, 3.0]).median == 3.0
    assert measure.difference([5.0, 7.0], [4.0, 4.0]).median == 2.0


class Counting:
    """Takes 10 ms a call by its own account, and remembers its turns."""

    def __init__(self, name, log):
        self.name, self.log = name, log

    def turn(self, calls):
        self.log.append((self.name, calls))
        return Turn(0.01 * calls, [])


def test_contestants_take_turns_and_each_begins_a_round():
    log = []
    runners = [Counting("a", log), Counting("b", log)]
    spent = measure.interleave(runners, Plan(seconds=2.0, calls=10, rounds=4, lead=1))
    assert spent == {"a": [pytest.approx(0.01)] * 4, "b": [pytest.approx(0.01)] * 4}
    timed = [name for name, calls in log if calls == 10]
    assert timed == ["b", "a", "a", "b", "b", "a", "a", "b", "b", "a"]  # the first round is not counted
    assert [calls for _, calls in log[2:6]] == [1, 10, 1, 10]


def test_slow_contestants_get_shorter_turns():
    log = []
    measure.interleave([Counting("a", log)], Plan(seconds=0.2, calls=10, least=5))
    assert max(calls for _, calls in log) == 4


def test_peak_memory_sees_what_has_been_freed():
    measure.forget_peak()
    before = measure.peak_bytes()
    torch.ones(2**24).sum()
    assert measure.peak_bytes() - before > 2**24 * 4 * 0.9


# --- the same work ----------------------------------------------------------------------------------------------------


def test_two_contestants_are_timed():
    result = steps.measured(MLP, "cpu", [byhand.EAGER, ours.EAGER], seconds=0.05, rounds=5)
    assert [row["name"] for row in result["rows"]] == [byhand.EAGER, ours.EAGER]
    assert all(len(row["values"]) == 5 and min(row["values"]) > 0 for row in result["rows"])
    assert result["absent"] == []


def with_recipe(monkeypatch, name, **changes):
    """That contestant, with another recipe than the others."""

    def make(work, device):
        return ours.ENTRIES[0].make(work._replace(recipe=work.recipe._replace(**changes)), device)

    monkeypatch.setitem(contestants.ENTRIES, name, Entry(name, (), make))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"learning_rate": 2e-3}, "loss of step"),
        ({"b1": 0.5}, "loss of step"),
        ({"clip": 1e-9}, "loss of step"),
        ({"weight_decay": 0.0}, "weights are"),
        ({"ema": 0.99}, "average are"),
    ],
)
def test_a_contestant_that_does_other_work_is_no_row(monkeypatch, changes, what):
    with_recipe(monkeypatch, "cheat", **changes)
    entered, absent = steps.enter(MLP, CPU, ["cheat"])
    assert [one.name for one in entered] == [contestants.REFERENCE]
    assert absent[0]["name"] == "cheat"
    assert "does other work" in absent[0]["why"]
    assert what in absent[0]["why"]


def test_an_honest_contestant_under_the_same_disguise_is_a_row(monkeypatch):
    with_recipe(monkeypatch, "honest", learning_rate=MLP.recipe.learning_rate)
    entered, absent = steps.enter(MLP, CPU, ["honest"])
    assert len(entered) == 2
    assert absent == []


def test_a_loss_that_is_no_number_is_a_disagreement():
    start, there = {"w": torch.zeros(2)}, {"w": torch.ones(2)}
    good, bad = guard.Seen([1.0], there, there), guard.Seen([float("nan")], there, there)
    assert guard.disagreement(good, good, start, tolerance=1e-3, drift=0.01) is None
    assert "loss of step 1" in (guard.disagreement(bad, good, start, tolerance=1e-3, drift=0.01) or "")


def test_missing_packages_and_errors_are_told(monkeypatch):
    def broken(work, device):
        raise ValueError("cannot")

    monkeypatch.setitem(contestants.ENTRIES, "missing", Entry("missing", ("no_such_package",), broken))
    monkeypatch.setitem(contestants.ENTRIES, "broken", Entry("broken", (), broken))
    _, absent = steps.enter(MLP, CPU, ["missing", "broken"])
    assert absent == [
        {"name": "missing", "why": "not installed: no_such_package"},
        {"name": "broken", "why": "error: ValueError: cannot"},
    ]


def test_batches_and_weights_are_the_same_at_every_call():
    first, again = works.batches(MLP), works.batches(MLP)
    pairs = [pair for both in zip(first, again, strict=True) for pair in zip(*both, strict=True)]
    assert all(torch.equal(one, other) for one, other in pairs)
    assert not torch.equal(first[0][0], first[1][0])
    left, right = (works.seeded_model(MLP).state_dict() for _ in range(2))
    assert all(torch.equal(left[name], right[name]) for name in left)


# --- trainers with a loop of their own --------------------------------------------------------------------------------


def gated(fit):
    return Gated("trainer", fit, Gate([(torch.zeros(1), torch.zeros(1))], CPU), weights=dict, shadow=dict)


def test_a_gate_lets_exactly_the_calls_of_a_turn_through():
    seen = []

    def fit(gate):
        for number, _ in enumerate(gate):
            seen.append(number)
            gate.passed(number)

    trainer = gated(fit)
    assert trainer.turn(3).losses == [0, 1, 2]
    assert seen == [0, 1, 2]
    assert trainer.turn(2).losses == [3, 4]
    trainer.close()
    assert not any(thread.name == "trainer" for thread in threading.enumerate())


def test_a_trainer_that_fails_or_ends_is_an_error():
    def fit(gate):
        raise ValueError("in the trainer")

    with pytest.raises(RuntimeError) as caught:
        gated(fit).turn(1)
    assert str(caught.value.__cause__) == "in the trainer"
    with pytest.raises(RuntimeError) as caught:
        gated(lambda gate: None).turn(1)
    assert isinstance(caught.value.__cause__, EOFError)


# --- processes of their own -------------------------------------------------------------------------------------------


def test_a_function_runs_in_a_process_of_its_own():
    assert alone.call("benchmarks.machine:now", {}).endswith("UTC")


def test_what_fails_or_takes_too_long_is_told():
    with pytest.raises(alone.Failed, match="no_such_work"):
        alone.call("benchmarks.steps:table", {"work": "no_such_work"})
    with pytest.raises(alone.Failed, match="took more than 0 s"):
        alone.call("benchmarks.machine:now", {}, limit=0.01)


# --- report -----------------------------------------------------------------------------------------------------------


def record_of(jobs):
    machine = {"processor": "abacus", "versions": {"torch": "0"}, "absent": ["jax"]}
    stamp = {"date": "today", "commit": "abc", "quick": False, "seconds": 1.0}
    found = {name: {"stamp": stamp, "result": result} for name, result in jobs.items()}
    return {"device": "cpu", "machine": machine, "jobs": found}


def test_report_goes_there_and_back(tmp_path):
    record = record_of({"mlp-1": table_of(**{byhand.EAGER: [5e-4, 6e-4], ours.DONATED: [1e-4, 1e-4]})})
    lines = report.write(record, tmp_path)
    assert report.load(tmp_path / "results.json") == json.loads(json.dumps(record))
    page = (tmp_path / "results.md").read_text()
    assert "abacus" in page
    assert "not installed: jax" in page
    assert "- peer: not installed: peer" in page
    assert "550.0 us" in page
    assert (tmp_path / "results.png").exists() or "no plot" in lines[-1]
    assert report.load(tmp_path / "nothing.json") is None


def test_figures_are_met_missed_or_named_as_not_measured():
    fast = table_of(**{byhand.EAGER: [6e-4, 6e-4], byhand.COMPILED: [6e-4, 6e-4], ours.DONATED: [1e-4, 1e-4]})
    found = {reading.name: reading for reading in figures.read({"mlp-1": fast}, "cpu")}
    met = found["MLP step against eager + fused, one thread"]
    assert (met.aim, met.measured, met.verdict) == (">= 5 x", "6 x", "met")
    assert found["MLP step against compiled + fused, one thread"].verdict == "missed"
    assert found["GPT 0.9 M step against JAX"].verdict.startswith("not measured")


def test_amounts_read_as_people_say_them():
    assert [report.amount(v, "s") for v in (2.0, 0.0123, 45.6e-6)] == ["2 s", "12.3 ms", "45.6 us"]
    assert report.amount(3 * 2**20, "B") == "3 MiB"


def test_every_job_has_a_function_and_every_figure_a_job():
    import importlib

    for device in ("cpu", "cuda"):
        for job in jobs.all_jobs(device).values():
            module, _, name = job.target.partition(":")
            assert callable(getattr(importlib.import_module(module), name))
    with pytest.raises(SystemExit, match="no job 'nothing'"):
        jobs.chosen("cpu", ["nothing"], quick=False)
    assert list(jobs.chosen("cpu", ["mlp"], quick=False)) == ["mlp"]
    assert list(jobs.chosen("cpu", ["save"], quick=False)) == ["save-1.2GB", "save-100MB", "save-leaves"]


# --- models -----------------------------------------------------------------------------------------------------------


def test_flops_of_a_token_by_hand():
    size = models.GPTSize(vocabulary=10, context=4, width=8, heads=2, layers=1)
    block = 2 * 16 + (8 * 24 + 24) + (8 * 8 + 8) + (8 * 32 + 32) + (32 * 8 + 8)
    weights = 10 * 8 + block + 16  # positions are in no product
    assert gpu.flops_a_token(models.GPT(size)) == 6 * weights + 12 * 1 * 8 * 4


SMALL = {
    "mlp": (lambda: models.mlp([4, 8, 3]), works.vectors(2, 4, 3)),
    "convnet": (lambda: models.ConvNet((4, 8)), works.images(2, 8, 10)),
    "gpt": (lambda: models.GPT(models.GPTSize(11, 6, 8, 2, 2)), works.text(2, 6, 11)),
    "vit": (
        lambda: models.ViT(size=8, patch=4, width=8, heads=2, layers=2, classes=3),
        works.images(2, 8, 3),
    ),
}


@pytest.mark.peer
@pytest.mark.parametrize("name", SMALL)
def test_flax_models_are_the_torch_models(name):
    jax = pytest.importorskip("jax")
    pytest.importorskip("flax")
    from benchmarks.contestants import flax_models, jaxes

    make, batch = SMALL[name]
    torch.manual_seed(0)
    module = make()
    params = flax_models.to_flax(module)
    back = flax_models.to_torch(params, module)
    assert all(torch.equal(back[key], p) for key, p in module.named_parameters())
    inputs, _ = batch(torch.Generator().manual_seed(0))
    apply = flax_models.applying(flax_models.like(module, bf16=False, cuda=False))
    kind = jax.numpy.float32 if inputs.is_floating_point() else jax.numpy.int32
    logits, _ = apply(params, jaxes.stats(module), flax_models.to_images(inputs).numpy().astype(kind))
    expected = module(inputs).detach()
    assert torch.allclose(torch.tensor(logits.tolist()), expected, atol=2e-5)


def test_a_loop_by_hand_compiles_its_loss_with_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []

    def noted(function: Any, **options: Any) -> Any:
        compiled.append(function)
        return function

    monkeypatch.setattr(torch, "compile", noted)
    work = works.WORKS["mlp"]
    made = byhand.loop(work, torch.device("cpu"), dynamic=False)
    batch = next(iter(works.batches(work, torch.device("cpu"))))
    assert [function(*batch).shape for function in compiled] == [torch.Size([])]
    assert made.loss(*batch).item() == works.loss(made.model(batch[0]), batch[1]).item()


@pytest.mark.parametrize("name", [byhand.EAGER, ours.DONATED, ours.EAGER])
def test_every_peak_on_cuda_is_what_is_reserved(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool of a CUDA graph counts; and caches of the first steps do not."""
    done: list[str] = []
    for call in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, call, lambda call=call: done.append(call))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 7)
    made = SimpleNamespace(make=lambda work, device: SimpleNamespace(turn=lambda steps: done.append("turn")))
    monkeypatch.setitem(memory.contestants.ENTRIES, name, made)
    assert memory.peak("mlp", name, "cuda") == 7
    assert done == ["turn", "synchronize", "empty_cache", "reset_peak_memory_stats", "turn"]


def test_the_share_of_an_h100s_peak_stands_beside_that_of_the_measured_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"name": ours.DONATED, "unit": "s", "values": [0.5]}]
    monkeypatch.setattr(gpu.steps, "measured", lambda *args, **options: {"rows": rows, "absent": []})
    monkeypatch.setattr(gpu, "matmul_rate", lambda *args: 989e12 / 2)
    monkeypatch.setattr(gpu, "settle", lambda device: None)
    work = works.WORKS["gpt-small"]
    monkeypatch.setitem(works.WORKS, "gpt", work._replace(tokens=1000))
    found = {row["name"]: row["values"] for row in gpu.gpt2("cuda", work="gpt")["rows"]}
    assert found["share of matmul"] == pytest.approx([2 * found["share of 989 TFLOP/s"][0]])


# --- several processes ------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.compile
def test_contestants_on_two_processes_do_the_same_work():
    names = (parallel.DDP, parallel.FSDP, parallel.REPLICATED, parallel.SHARDED)
    found = parallel.table(work="mlp", world=2, rounds=1, calls=1, only=names)
    assert [row["name"] for row in found["absent"]] == []
    values = {row["name"]: row["values"] for row in found["rows"]}
    assert values[f"{parallel.REPLICATED}: collectives a step"] == [2]  # the gradients, and the small numbers
    assert values[f"{parallel.SHARDED}: bytes at rest"][0] < 0.6 * values[f"{parallel.REPLICATED}: bytes at rest"][0]


def test_the_picture_of_the_readme_has_the_speeds_of_the_record(tmp_path: Any) -> None:
    record = json.loads((picture.RESULTS / "cpu" / "results.json").read_text())
    found = picture.speeds(record)
    assert list(found) == list(picture.WORKS)
    rows = {row["name"]: row["values"] for row in record["jobs"]["mlp-1"]["result"]["rows"]}
    expected = measure.spread(rows[byhand.EAGER]).median / measure.spread(rows[ours.DONATED]).median
    assert found["mlp-1"][ours.DONATED] == pytest.approx(expected)
    pytest.importorskip("matplotlib")
    picture.draw(record, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").stat().st_size > 10_000
