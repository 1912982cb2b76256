"""Programs and what they are made of, pickled: another process gets the same steps, bit for bit."""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import inspect
import pickle
from collections.abc import Callable, Iterable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import purestep as ps
from purestep import errors, optim, schedules

SOURCE = Path(str(ps.__file__)).parent
RESULTS = ("Transform", "Schedule", "Objective", "Average", "Scaler", "Metric", "Callable[..., Transform]", "Program")
PARAMS = {"a.weight": torch.linspace(-1.0, 1.0, 12).reshape(3, 4), "a.bias": torch.linspace(0.1, 0.3, 3)}


def factories() -> dict[str, Callable[..., Any]]:
    """Every public function that returns what a program is made of, by its module and name."""
    found: dict[str, Callable[..., Any]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if parts[0] not in ("optim", "schedules", "objective", "ema", "scaler", "metrics"):
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef) or node.returns is None or node.name.startswith("_"):
                continue
            if ast.unparse(node.returns) in RESULTS:
                module = importlib.import_module(".".join(("purestep", *parts)))
                found[".".join((parts[0], node.name))] = getattr(module, node.name)
    return found


FACTORIES = factories()


def halved(updates: dict[str, Tensor], params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: update / 2 for name, update in updates.items()}


def halving(epoch: int) -> float:
    return 0.5**epoch


def pair_of(batch: Any) -> tuple[Any, Any]:
    return batch["x"], batch["y"]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Any:
        return self.a(x)


def rate() -> Any:
    return schedules.warmup_cosine(0.1, 2, total=6)


RULES = [("weight$", "one"), ("", "two")]
ARGUMENTS: dict[str, Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "optim.lookahead": lambda: ((optim.adam(rate()),), {"sync_period": 2}),
    "optim.schedule_free": lambda: ((optim.scale_by_adam(), rate()), {}),
    "optim.chain": lambda: ((optim.scale(0.5), optim.chain(optim.scale(2.0))), {}),
    "optim.stateless": lambda: ((halved,), {"elementwise": True}),
    "optim.scale": lambda: ((0.5,), {}),
    "optim.scale_by_learning_rate": lambda: ((rate(),), {}),
    "optim.scale_by_relative_step": lambda: ((rate(),), {}),
    "optim.scale_by_inverse_time": lambda: ((0.5,), {}),
    "optim.scale_by_shape": lambda: ((), {}),
    "optim.add_decayed_weights": lambda: ((0.1,), {"mask": {"a.weight": True, "a.bias": False}}),
    "optim.trace": lambda: ((0.9,), {"nesterov": True}),
    "optim.clip_by_global_norm": lambda: ((0.1,), {}),
    "optim.clip_by_value": lambda: ((0.1,), {}),
    "optim.adaptive_grad_clip": lambda: ((0.1,), {}),
    "optim.masked": lambda: ((optim.adam(rate()), "weight$"), {}),
    "optim.freeze": lambda: (("bias$",), {}),
    "optim.partition": lambda: (({"one": optim.adam(rate()), "two": optim.sgd(0.1)}, RULES), {}),
    "optim.adamw": lambda: ((rate(),), {"mask": "weight$"}),
    "optim.sgd": lambda: ((rate(),), {"momentum": 0.9}),
    "optim.muon": lambda: ((rate(),), {}),
    "optim.from_torch": lambda: ((torch.optim.AdamW,), {"lr": rate(), "betas": (0.8, 0.9)}),
    "schedules.constant": lambda: ((0.5,), {}),
    "schedules.linear": lambda: ((0.0, 1.0), {"transition_steps": 4}),
    "schedules.polynomial": lambda: ((0.0, 1.0), {"transition_steps": 4, "power": 2.0}),
    "schedules.cosine": lambda: ((1.0, 4), {}),
    "schedules.exponential": lambda: ((1.0, 0.5), {"transition_steps": 4}),
    "schedules.warm_restarts": lambda: ((1.0, 2), {"T_mult": 2}),
    "schedules.warmup_cosine": lambda: ((1.0, 2), {"total": 6}),
    "schedules.warmup_stable_decay": lambda: ((1.0, 2), {"decay": 2, "total": 7}),
    "schedules.step": lambda: ((1.0, 2), {}),
    "schedules.multistep": lambda: ((1.0, iter([1, 3])), {}),
    "schedules.one_cycle": lambda: ((1.0, 6), {}),
    "schedules.piecewise": lambda: ((1.0, {2: 0.5}), {}),
    "schedules.join": lambda: (([schedules.linear(0.0, 1.0, transition_steps=2), rate()], [3]), {}),
    "schedules.per_epoch": lambda: ((rate(),), {"updates_per_epoch": 2}),
    "schedules.from_torch_scheduler": lambda: ((LambdaLR, 1.0), {"steps": 5, "lr_lambda": halving}),
    "objective.supervised": lambda: (
        (functools.partial(nn.functional.mse_loss, reduction="mean"),),
        {"metrics": {"mae": ps.metrics.mean_absolute_error}, "prepare": pair_of},
    ),
    "ema.swa": lambda: ((2,), {"every": 2}),
    "ema.average": lambda: ((0.9,), {"warmup": True, "buffers": "average"}),
}
"""Arguments of a factory; none where this has nothing of it."""


FOR_MATRICES = ("optim.muon", "optim.scale_by_muon", "optim.scale_by_shape")


def outcome(name: str, made: Any) -> Any:
    """What it computes, as tensors."""
    kind = name.partition(".")[0]
    if kind == "schedules":
        return [made(torch.tensor(count)) for count in range(8)]
    if kind == "optim":
        params = {key: value for key, value in PARAMS.items() if value.ndim == 2 or name not in FOR_MATRICES}
        state, updates, shown = made.init(params), params, []
        for _ in range(3):
            updates, state = made.update({key: value.cos() for key, value in updates.items()}, state, params)
            shown.append(updates)
        return shown, ps.tree.leaves(state), made.elementwise, made.labels(params)
    if kind == "ema":
        state = made.init(PARAMS, {})
        return made.update(state, {key: value * 2 for key, value in PARAMS.items()}, {}, torch.tensor(3))
    state = made.init(torch.device("cpu"))
    return made.scale(state), made.update(state, torch.tensor(False)), made.exhausted(state, torch.tensor(False))


def same(one: Any, other: Any) -> bool:
    leaves, others = ps.tree.leaves(one), ps.tree.leaves(other)
    return len(leaves) == len(others) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b for a, b in zip(leaves, others, strict=True)
    )


def again(made: Any) -> Any:
    return pickle.loads(pickle.dumps(made))


ELSEWHERE = ("optim.inject", "objective.hf_loss", "objective.masked_reconstruction", "metrics.from_torchmetrics")


@pytest.mark.parametrize("name", [name for name in FACTORIES if name not in ELSEWHERE])
def test_what_a_factory_returns_is_pickled(name: str):
    args, kwargs = ARGUMENTS.get(name, lambda: ((), {}))()
    made = FACTORIES[name](*args, **kwargs)
    back = again(again(made))
    if name == "objective.supervised":
        batch = {"x": torch.ones(2, 4), "y": torch.zeros(2, 3)}
        net = Net()
        assert same(made(net, batch), back(net, batch))
    else:
        assert same(outcome(name, made), outcome(name, back))
    assert copy.copy(made) is copy.deepcopy(made) is made
    assert type(back) is type(made)


def test_inject_is_pickled_with_its_schedules():
    build = again(optim.inject(optim.adamw))
    made = build(learning_rate=rate(), b1=0.8)
    assert same(outcome("optim.adamw", made), outcome("optim.adamw", again(made)))
    assert set(optim.hyperparams(again(made).init(PARAMS))) >= {"learning_rate", "b1"}


def test_the_other_objectives_are_pickled():
    x = torch.tensor([[1.0, -2.0, -4.0]])
    model = lambda x: (torch.zeros_like(x), None, x > 0)  # noqa: E731
    made = ps.masked_reconstruction("sse", reduction="sum")
    assert same(made(model, x), again(made)(model, x))
    found = again(ps.hf_loss(weight=weight_of))
    batch = {"labels": x}
    assert float(found(loss_of, batch).weight) == 7


def loss_of(labels: Tensor) -> dict[str, Tensor]:
    return {"loss": labels.sum()}


def weight_of(batch: Any) -> float:
    return 7.0


def test_a_metric_of_torchmetrics_is_pickled():
    torchmetrics: Any = pytest.importorskip("torchmetrics")
    made = ps.metrics.from_torchmetrics(torchmetrics.MeanSquaredError(squared=False))
    assert float(again(made)(torch.zeros(4), torch.full((4,), 3.0))) == 3.0


class Criterion(nn.Module):
    """With a weight that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs * self.scale - targets).square().mean()


def program(**settings: Any) -> ps.Program:
    torch.manual_seed(0)
    tx = optim.chain(
        optim.clip_by_global_norm(1.0),
        optim.partition({"one": optim.inject(optim.adamw)(learning_rate=rate()), "two": optim.sgd(0.1)}, RULES),
    )
    return ps.program(
        nn.Sequential(Net(), nn.Dropout(0.5), nn.Linear(3, 2)),
        ps.supervised(Criterion(), metrics={"mae": ps.metrics.mean_absolute_error}),
        tx,
        ema=ps.ema.average(0.9, warmup=True),
        scaler=ps.scaler.dynamic(2.0**10),
        values={"kl": schedules.linear(0.0, 1.0, transition_steps=3)},
        **settings,
    )


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(6, 4, generator=generator), torch.randn(6, 2, generator=generator)) for _ in range(3)]


def trained(made: ps.Program) -> list[Tensor]:
    assert made.init is not None
    state, found = made.init(seed=3), []
    for batch in batches():
        state, metrics = made.train_step(state, batch)
        found += ps.tree.leaves((state, metrics))
    assert made.eval_step is not None
    return [*found, *ps.tree.leaves(made.eval_step(state, batches()[0]))]


def test_a_program_is_pickled_with_its_weights():
    made = program(accumulate=2, tail="carry")
    back = again(made)
    assert isinstance(back, ps.Program)
    assert back is not made
    assert same(trained(made), trained(back))
    assert same(trained(made), trained(again(back)))
    assert copy.copy(made) is copy.deepcopy(made) is made


@pytest.mark.compile
def test_a_program_that_was_pickled_compiles():
    found = []
    for made in (program(), again(program())):
        step = ps.compile_step(made.train_step, backend="aot_eager", donate=True)
        assert made.init is not None
        state = made.init()
        for batch in batches():
            state, _ = step(state, batch)
        assert step.graphs == 1
        found.append(ps.tree.leaves(state))
    assert same(*found)


def test_a_program_that_was_pickled_trains_in_fit():
    results = [
        ps.fit(made.init(), {"train": batches()}, made, epochs=2, sinks=[], compile=False)
        for made in (program(), again(program()))
        if made.init is not None
    ]
    assert same(results[0].state, results[1].state)


def own_eval(state: Any, batch: Any, *, index: int = 0) -> dict[str, Any]:
    return {"mine": ps.Mean(torch.ones(()), torch.ones(()))}


def test_a_program_with_another_function_is_pickled_with_it():
    made = program()._replace(eval_step=own_eval)
    back = again(made)
    assert back.eval_step is own_eval
    assert same(trained(made), trained(back))
    slower = optim.sgd(0.5)._replace(elementwise=False)
    assert not again(slower).elementwise


def in_another_process(made: ps.Program, queue: Any) -> None:
    torch.set_num_threads(1)
    queue.put([leaf.numpy() for leaf in trained(made)])


def test_a_program_goes_to_a_process_that_is_spawned():
    context = get_context("spawn")
    queue = context.SimpleQueue()
    made = program()
    process = context.Process(target=in_another_process, args=(made, queue))
    process.start()
    found = [torch.from_numpy(value) for value in queue.get()]
    process.join()
    assert process.exitcode == 0
    assert same(trained(made), found)


def refused() -> Iterable[Any]:
    net, objective = nn.Linear(1, 1), ps.supervised(nn.MSELoss())

    def own(model: Any, batch: Any) -> ps.Loss:
        return ps.Loss(model(batch).mean(), torch.ones(()))

    class Inner(nn.Linear):
        pass

    hooked = nn.Linear(1, 1)
    hooked.act = lambda x: x  # type: ignore[assignment]
    tx = optim.sgd(0.1)
    yield "objective", lambda: ps.program(net, lambda model, batch: own(model, batch), tx), "program", "a lambda"
    yield "objective", lambda: ps.program(net, own, tx), "program", "the local function"
    yield "own of partial", lambda: ps.program(net, functools.partial(own), tx), "program", "objective.func"
    yield "model", lambda: ps.program(Inner(1, 1), objective, tx), "program", "its model is the local class"
    yield "child", lambda: ps.program(nn.Sequential(Inner(1, 1)), objective, tx), "program", "its model.0 is"
    yield "attribute", lambda: ps.program(hooked, objective, tx), "program", "its model.act is a lambda"
    yield "schedule", lambda: ps.program(net, objective, optim.sgd(lambda t: 0.1 * t)), "sgd", "its learning_rate is"
    yield (
        "metric",
        lambda: ps.program(net, ps.supervised(nn.MSELoss(), metrics={"m": lambda a, b: a.mean()}), tx),
        "supervised",
        r"its metrics\['m'\] is a lambda",
    )
    yield "chained", lambda: optim.chain(tx, optim.stateless(lambda u, p: u)), "stateless", "its fn is a lambda"
    yield "joined", lambda: schedules.join([lambda t: t, rate()], [2]), "join", r"its schedules\[0\] is a lambda"
    yield (
        "injected",
        lambda: optim.inject(optim.sgd)(learning_rate=lambda t: t * 0.1),
        "injected",
        r"its injected\['learning_rate'\] is a lambda",
    )
    yield "replaced", lambda: program()._replace(eval_step=lambda s, b: {}), "program", "its eval_step is a lambda"


@pytest.mark.parametrize(("make", "where", "what"), [pytest.param(*rest, id=name) for name, *rest in refused()])
def test_what_no_process_can_import_is_refused_by_its_name(make: Callable[[], Any], where: str, what: str):
    made = make()
    with pytest.raises(errors.ConfigError, match=rf"^{where}: cannot be pickled: .*{what}.*\(cure: define it with "):
        pickle.dumps(made)
    assert copy.deepcopy(made) is made


def test_the_call_is_kept_as_it_was():
    metrics = {"mae": ps.metrics.mean_absolute_error}
    made = ps.supervised(nn.MSELoss(), metrics=metrics)
    metrics.clear()
    assert set(again(made)(nn.Linear(1, 1), (torch.ones(2, 1), torch.ones(2, 1))).metrics) == {"mae"}


def test_a_step_runs_the_bare_functions():
    """Nothing of how a part was made is called in a step."""
    made = schedules.join([schedules.constant(0.1), rate()], [2])
    cells = inspect.getclosurevars(made.__wrapped__).nonlocals  # type: ignore[attr-defined]
    assert all(inspect.isfunction(part) for part in cells["parts"])
    tx = optim.chain(optim.sgd(made), optim.scale(1.0))
    assert all(type(part) is ps.optim.Transform for part in inspect.getclosurevars(tx.update).nonlocals["transforms"])
