"""What a donated step writes: of the state as it was, whatever inductor makes of a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from helpers import assert_trees_close
from torch import Tensor
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx.experimental.proxy_tensor import make_fx

import purestep as ps
from purestep.compile import inductor_fixes
from purestep.compile.cpu import backend as backend_
from purestep.compile.inductor_fixes import PASS, aliasing

pytestmark = pytest.mark.compile

Pair = tuple[Tensor, Tensor]


def overwritten(old: Tensor, new: Tensor) -> Tensor:
    copy = old.clone()
    copy[:] = new
    return copy


@pytest.fixture
def front_door(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one of GPUs, and of versions of torch whose inner door is another."""
    monkeypatch.setattr(backend_, "suits", lambda inputs: False)


LATER: dict[str, Callable[[Tensor, Tensor], Pair]] = {
    "clone": lambda a, b: (a * 0.5, a.clone()),
    "detached": lambda a, b: (a * 0.5, a.detach()),
    "itself": lambda a, b: (a * 0.5, a),
    "by one": lambda a, b: (a * 0.5, a * 1.0 + 0),
    "by ones": lambda a, b: (a * 0.5, a * torch.ones_like(a)),
    "cast there and back": lambda a, b: (a * 0.5, a.double().float()),
    "viewed and back": lambda a, b: (a * 0.5, a.view(16).clone().view(4, 4)),
    "all of it written": lambda a, b: (a * 0.5, overwritten(b, a)),
    "scattered": lambda a, b: (a * 0.5, torch.slice_scatter(b, a, 0, 0, 4)),
    "turned": lambda a, b: (a * 0.5, a.t().clone()),
    "turned in place": lambda a, b: (a.t().clone(), b + 1),
    "a queue": lambda a, b: (a * 0.5, torch.cat([b[1:].clone(), a[:1].clone()])),
    "split and put together": lambda a, b: (a * 0.5, torch.cat(a.split([1, 3], 1), 1)),
    "halved and put together": lambda a, b: (a * 0.5, torch.cat(a.chunk(2))),
    "sliced and put together": lambda a, b: (a * 0.5, torch.cat([a[:1], a[1:]])),
    "unbound and stacked": lambda a, b: (a * 0.5, torch.stack(a.unbind(1), 1)),
    "split by pairs": lambda a, b: tuple(
        t.view(4, 4) for t in torch.cat([b.reshape(16), a.reshape(16)]).split([16, 16])
    ),
    "put together and split": lambda a, b: torch.cat([b, a], 1).split([4, 4], 1),
    "the largest": lambda a, b: (a * 0.5, torch.cat([a, b]).topk(4, 0).values),
    "sorted": lambda a, b: (b.sort().values, a + 1),
    "exchanged": lambda a, b: (b.clone(), a.clone()),
    "turned and scaled": lambda a, b: ((a.view(2, 8).t() * 2 + 1).reshape(4, 4), b + a),
    "turned, scaled and by one": lambda a, b: ((a.view(2, 8).t() * 2 + 1).reshape(4, 4) * 1.0, b + a),
    "written into another": lambda a, b: (overwritten(b, (a.view(2, 8).t() * 2 + 1).reshape(4, 4)), b + a),
    "widened": lambda a, b: (a[:2].flip(0).expand(2, 2, 4).reshape(4, 4), b + a),
}
"""What becomes of two leaves: the second is the first one as it was, or both are read while they are written."""


def as_in_eager(kinds: Iterable[str], **settings: Any) -> tuple[Any, Any]:
    """Two donated steps of such leaves, and the same in eager."""
    pairs = [(kind, names) for kind in kinds for names in ("ab", "ba")]  # in both orders of writing

    def step(state: dict[str, Any], x: Tensor) -> tuple[dict[str, Any], dict[str, Tensor]]:
        new: dict[str, Any] = {}
        for kind, names in pairs:
            old = state[f"{kind}, {names}"]
            first, second = LATER[kind](*(old[name] for name in names))
            new[f"{kind}, {names}"] = {names[0]: first, names[1]: second}
        return new, {"loss": x.sum()}

    generator = torch.Generator().manual_seed(0)
    state: Any = {
        f"{kind}, {names}": {name: torch.randn(4, 4, generator=generator) for name in names} for kind, names in pairs
    }
    compiled = ps.compile_step(step, donate=True, **settings)
    found, expected, x = ps.clone(state), state, torch.ones(3)
    for _ in range(2):
        (found, _), (expected, _) = compiled(found, x), step(expected, x)
    return ps.clone(found), expected


@pytest.mark.parametrize("kind", ["clone", "split and put together", "turned and scaled"])
def test_a_copy_of_the_state_as_it_was(kind: str) -> None:
    """Alone in its graph, one of each way: copied, put together, computed while it is read."""
    found, expected = as_in_eager([kind])
    assert_trees_close(found, expected)


def test_copies_of_the_state_as_it_was() -> None:
    found, expected = as_in_eager(LATER)
    assert_trees_close(found, expected)


@pytest.mark.usefixtures("front_door")
def test_copies_of_the_state_as_it_was_by_inductors_front_door() -> None:
    found, expected = as_in_eager(LATER)
    assert_trees_close(found, expected)


def test_without_memory_of_its_own_a_leaf_is_overwritten_while_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aliasing, "store_separately", lambda graph, node, reader: None)
    with torch._inductor.config.patch(fx_graph_cache=False):
        found, expected = as_in_eager(["turned and scaled"])
    assert not torch.equal(found["turned and scaled, ab"]["a"], expected["turned and scaled, ab"]["a"])


def test_without_it_a_copy_is_of_the_state_as_it_becomes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`aliasing` can go once torch is right."""
    monkeypatch.setattr(aliasing, "fix", lambda graph: None)
    with torch._inductor.config.patch(fx_graph_cache=False):
        found, expected = as_in_eager(["clone"])
    pair = found["clone, ab"]
    assert not torch.equal(pair["b"], expected["clone, ab"]["b"])
    assert torch.equal(pair["b"], pair["a"])


class Theirs(CustomGraphPass):
    """A pass of the user's: whether ours had run before it."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.seen.append(torch.ops.purestep.own_copy.default in [node.target for node in graph.nodes])

    def uuid(self) -> Any:
        return None


AWARE: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)


class Told(AWARE or CustomGraphPass):
    """One that wants to know whether there is a backward pass."""

    def __init__(self) -> None:
        self.seen: list[bool] = []

    def __call__(self, graph: torch.fx.Graph, is_inference: bool | None = None) -> None:
        assert AWARE is None or is_inference is not None
        self.seen.append(torch.ops.purestep.own_copy.default in [node.target for node in graph.nodes])

    def uuid(self) -> Any:
        return "told"


@pytest.mark.usefixtures("front_door")
@pytest.mark.parametrize(
    "given",
    [lambda one: one, lambda one: [one], lambda one: (one,), lambda one: one.__call__],
    ids=["one", "a list", "a tuple", "a function"],
)
def test_a_pass_of_the_users_is_run_too(given: Callable[[Any], Any]) -> None:
    one = Theirs()
    found, expected = as_in_eager(["clone"], options={PASS: given(one)})
    assert_trees_close(found, expected)
    assert one.seen == [False]


@pytest.mark.usefixtures("front_door")
def test_a_pass_that_wants_to_know_more_is_told() -> None:
    one, settings = Told(), torch._inductor.config
    with settings.patch({PASS: one, "fx_graph_cache": False}):
        found, expected = as_in_eager(["clone"])
    assert_trees_close(found, expected)
    assert one.seen == [False]


@pytest.mark.usefixtures("front_door")
def test_options_of_inductors_are_taken_by_its_front_door() -> None:
    one = Theirs()
    found, expected = as_in_eager(
        ["clone"],
        options={PASS: one, "epilogue_fusion": False},
    )
    assert_trees_close(found, expected)
    assert one.seen == [False]


def test_inductors_cache_knows_all_passes() -> None:
    def uuid(given: Any) -> Any:
        return inductor_fixes.options({PASS: given})[PASS].uuid()

    assert uuid(None) is not None
    assert uuid(Told()) not in (None, uuid(None))
    assert uuid([Told(), Told()]) not in (None, uuid(Told()))
    for unknown in (Theirs(), print, [Told(), print]):
        assert uuid(unknown) is None


# --- what is returned -------------------------------------------------------------------------------------------------

OLD: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
    "a leaf": lambda s: s["a"],
    "a copy": lambda s: s["a"].clone(),
    "one of several": lambda s: s["v"].clone()[1],
    "by one": lambda s: s["a"] * 1.0,
    "a count": lambda s: s["n"].clone(),
}


def losses(kind: str) -> tuple[list[float], list[float]]:
    """A number of the old state as the only metric, in three donated steps and in eager."""

    def step(s: dict[str, Tensor], x: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        return {"a": s["a"] * 0.5 + 1, "v": s["v"] * 0.5 + x.sum(), "n": s["n"] + 1}, {"old": OLD[kind](s)}

    state: Any = {"a": torch.tensor(3.0), "v": torch.arange(1.0, 5.0), "n": torch.tensor(7)}
    compiled, live, x = ps.compile_step(step, donate=True), ps.clone(state), torch.ones(3)
    metrics: list[tuple[Any, Any]] = []
    for _ in range(3):
        (live, found), (state, expected) = compiled(live, x), step(state, x)
        metrics.append((found["old"], expected["old"]))
    return [float(found) for found, _ in metrics], [float(expected) for _, expected in metrics]


@pytest.mark.parametrize("kind", OLD)
def test_a_metric_of_the_state_as_it_was(kind: str) -> None:
    found, expected = losses(kind)
    assert found == expected


@pytest.mark.usefixtures("front_door")
@pytest.mark.parametrize("kind", OLD)
def test_a_metric_of_the_state_as_it_was_by_inductors_front_door(kind: str) -> None:
    found, expected = losses(kind)
    assert found == expected


def test_without_it_a_metric_is_of_the_state_as_it_becomes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aliasing, "fix", lambda graph: None)
    with torch._inductor.config.patch(fx_graph_cache=False):
        found, expected = losses("a copy")
    assert found != expected


# --- what is left as it is --------------------------------------------------------------------------------------------


def taken_in(function: Callable[..., Any], *shapes: tuple[int, ...]) -> int:
    """How many copies there are after `aliasing.fix`."""
    graph = make_fx(function, tracing_mode="fake")(*(torch.ones(shape) for shape in shapes)).graph
    aliasing.fix(graph)
    graph.lint()
    return sum(node.target is torch.ops.purestep.own_copy.default for node in graph.nodes)


def average(weights: Tensor, mean: Tensor, count: Tensor) -> None:
    new, later = weights - 0.1 * mean, mean * 0.9 + weights * 0.1
    weights.copy_(new)
    mean.copy_(later)
    count.copy_(torch.stack([count[0] + 1]))


def unchanged(weights: Tensor, mean: Tensor, count: Tensor) -> None:
    new, same = weights * 0.5, mean.clone()
    weights.copy_(new)
    mean.copy_(same)
    count.copy_(torch.stack([count[0]]))


def halves(weights: Tensor, mean: Tensor, count: Tensor) -> None:
    new = torch.cat([weights[2:] * 0.5, mean[:2].clone()])
    mean.copy_(mean + 1)
    weights.copy_(new)


def scaled(weights: Tensor, mean: Tensor, count: Tensor) -> None:
    new, other = weights + 1, weights * 0.5
    weights.copy_(new)
    mean.copy_(other)


@pytest.mark.parametrize("function", [average, unchanged, halves, scaled])
def test_what_is_computed_is_not_copied(function: Callable[..., Any]) -> None:
    assert taken_in(function, (4, 4), (4, 4), (1,)) == 0


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_steps_of_a_program_copy_nothing(accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[Any] = []
    true = aliasing._insert_copy
    monkeypatch.setattr(aliasing, "_insert_copy", lambda *given: (copies.append(given), true(*given)))
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(0.1))
    program = ps.program(net, ps.supervised(torch.nn.MSELoss()), ps.optim.adamw(1e-2), ema=0.9, accumulate=accumulate)
    step = ps.compile_step(program.train_step, donate=True)
    state = program.init()
    for _ in range(2):
        state, _ = step(state, (torch.ones(5, 3), torch.ones(5, 4)))
    assert copies == []
