"""`ema.swa` and `refresh_batchnorm` beside `torch.optim.swa_utils`, step by step."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_trees_close
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, update_bn

import purestep as ps
from purestep import ema, optim
from purestep.errors import ConfigError, StateError
from purestep.types import Empty

GENERATOR = torch.Generator().manual_seed(0)
BATCHES = [(torch.randn(6, 3, 4, 4, generator=GENERATOR), torch.randn(6, 2, generator=GENERATOR)) for _ in range(9)]
BATCHES.append((BATCHES[0][0][:2] * 3 + 1, BATCHES[0][1][:2]))  # a smaller last one


class Net(nn.Module):
    """Two kinds of BatchNorm, one of them within a block, and one shared by two attributes."""

    def __init__(self, momentum: float | None = None) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=0.3), nn.ReLU())
        self.head = nn.Linear(16, 2)
        self.norm = self.alias = nn.BatchNorm1d(2, momentum=momentum)
        self.fixed = nn.BatchNorm1d(2, track_running_stats=False, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fixed(self.norm(self.head(self.conv(x).flatten(1))))


def made(average: ema.Average, momentum: float | None = None, **options: Any) -> tuple[nn.Module, ps.Program]:
    torch.manual_seed(0)
    net = Net(momentum).double()
    return net, ps.program(net, ps.supervised(nn.MSELoss()), optim.sgd(0.1, 0.9), ema=average, **options)


def doubles() -> list[Any]:
    return [(x.double(), y.double()) for x, y in BATCHES]


def trained(net: nn.Module, peer: AveragedModel, due: list[int]) -> None:
    """Torch's loop: `update_parameters` after these updates."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for update, (x, y) in enumerate(doubles(), 1):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
        if update in due:
            peer.update_parameters(net)


@pytest.mark.peer
@pytest.mark.parametrize(("start", "every"), [(1, 1), (3, 2), (4, 5), (10, 1)])
@pytest.mark.parametrize("buffers", ["copy", "average"])
def test_the_average_and_its_statistics_are_torchs(start: int, every: int, buffers: Any) -> None:
    net, program = made(ema.swa(start, every=every, buffers=buffers))
    peer = AveragedModel(net, use_buffers=buffers == "average")
    state = program.init()
    for batch in doubles():
        state, _ = program.train_step(state, batch)
    trained(net, peer, list(range(start, 11, every)))
    assert_trees_close(dict(ps.view(state).params), _tensors(peer.module.named_parameters()), rtol=1e-12, atol=1e-14)
    before = ps.clone(state)
    update_bn(doubles(), peer)
    refreshed = ps.refresh_batchnorm(program, state, doubles())
    ours = {name: value for name, value in ps.view(refreshed).buffers.items() if "alias" not in name}
    assert_trees_close(ours, _tensors(peer.module.named_buffers()), rtol=1e-12, atol=1e-14)
    assert_trees_close(before, state, exact=True)  # the given state is what it was
    assert_trees_close(refreshed.params, state.params, exact=True)
    peer.eval()
    x = doubles()[0][0]
    torch.testing.assert_close(program.bind(refreshed)(x), peer(x), rtol=1e-10, atol=1e-12)
    assert not torch.allclose(program.bind(state)(x), peer(x)), "the statistics of training are others"


def _tensors(named: Any) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in named}


def test_the_statistics_of_the_other_view_are_those_of_its_weights() -> None:
    _, program = made(ema.swa(2))
    state = program.init()
    for batch in doubles()[:4]:
        state, _ = program.train_step(state, batch)
    net = Net().double()
    ps.load_into(net, state, view="params")
    update_bn(doubles(), net)
    refreshed = ps.refresh_batchnorm(program, state, doubles(), view="params")
    assert_trees_close(dict(refreshed.buffers), _tensors(net.named_buffers()), rtol=1e-12, atol=1e-14)


def test_layers_in_eval_mode_and_other_buffers_keep_their_values() -> None:
    _, program = made(ema.none(), keep_eval=("conv.1",))
    state = program.init()
    state = state._replace(buffers={name: value + 1 for name, value in state.buffers.items()})
    refreshed = ps.refresh_batchnorm(program, state, doubles())
    for name in ("conv.1.running_mean", "conv.1.running_var", "conv.1.num_batches_tracked"):
        assert torch.equal(refreshed.buffers[name], state.buffers[name])
    assert int(refreshed.buffers["norm.num_batches_tracked"]) == len(BATCHES)


def test_without_batchnorm_nothing_is_read() -> None:
    program = ps.program(nn.Linear(2, 1), ps.supervised(nn.MSELoss()), optim.sgd(0.1))
    state = program.init()
    assert ps.refresh_batchnorm(program, state, []) is state


def test_dropout_draws_from_the_seed_of_the_state_and_leaves_torchs_generator() -> None:
    net = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2))
    program = ps.program(net, ps.supervised(nn.MSELoss()), optim.sgd(0.1))
    batches = [(torch.ones(8, 2), torch.ones(8, 2))] * 3
    before = torch.get_rng_state()
    one, two = (ps.refresh_batchnorm(program, program.init(seed=1), batches) for _ in range(2))
    other = ps.refresh_batchnorm(program, program.init(seed=2), batches)
    assert torch.equal(torch.get_rng_state(), before)
    assert_trees_close(one, two, exact=True)
    assert not torch.equal(one.buffers["1.running_mean"], other.buffers["1.running_mean"])


def test_mixed_precision_keeps_the_dtypes_of_the_buffers() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    program = ps.program(net, ps.supervised(nn.MSELoss()), optim.sgd(0.1), precision="bf16-true", ema=ema.swa(1))
    state = program.init()
    batches = [(torch.randn(8, 3), torch.randn(8, 4)) for _ in range(3)]
    refreshed = ps.refresh_batchnorm(program, state, batches)
    assert {k: v.dtype for k, v in refreshed.buffers.items()} == {k: v.dtype for k, v in state.buffers.items()}


def test_fit_averages_and_goes_on_where_it_was(tmp_path: Path) -> None:
    fields: dict[str, Any] = {"progress": False, "compile": False, "device": "cpu"}
    _, program = made(ema.swa(12, every=3))
    whole = ps.fit(program.init(), {"train": doubles(), "val": doubles()}, program, epochs=3, **fields)
    for epochs in (1, 2, 3):
        _, again = made(ema.swa(12, every=3))
        parts = ps.fit(again.init(), (doubles(), doubles()), again, epochs=epochs, snapshots=tmp_path, **fields)
    assert_trees_close(parts.state, whole.state, exact=True)
    assert whole.view == "ema"


@pytest.mark.compile
def test_a_compiled_step_averages_the_same() -> None:
    _, program = made(ema.swa(2, every=2), momentum=0.2)  # torch does not compile None
    step, state = ps.compile_step(program.train_step, backend="aot_eager"), program.init()
    compiled = program.init()
    for batch in doubles()[:5]:
        state, _ = program.train_step(state, batch)
        compiled, _ = step(compiled, batch)
    assert_trees_close(compiled.ema.params, state.ema.params, rtol=1e-12, atol=1e-14)
    refreshed = (ps.refresh_batchnorm(program, each, doubles()).buffers for each in (state, compiled))
    assert_trees_close(*(dict(each) for each in refreshed), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ema.swa(0), "swa: start=0 must be an int of at least 1"),
        (lambda: ema.swa(0.75), r"swa: start=0\.75 must be an int"),  # pyright: ignore[reportArgumentType]  # the point
        (lambda: ema.swa(1, every=0), "swa: every=0 must be"),
        (lambda: ema.swa(1, buffers="none"), "buffers='none'"),  # pyright: ignore[reportArgumentType]  # the point
    ],
)
def test_numbers_out_of_range_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_errors_say_where_and_the_cure() -> None:
    net, program = made(ema.none())
    with pytest.raises(StateError, match="the state is a Linear"):
        ps.refresh_batchnorm(program, nn.Linear(1, 1), doubles())  # type: ignore[arg-type]  # the point
    with pytest.raises(ConfigError, match=r"the program has no model.*ps\.program"):
        ps.refresh_batchnorm(ps.Program(program.train_step), program.init(), doubles())
    with pytest.raises(StateError, match="has no average"):
        ps.refresh_batchnorm(program, program.init(), doubles(), view="ema")
    with pytest.raises(Exception, match="channels") as caught:
        ps.refresh_batchnorm(program, program.init(), [doubles()[0], (torch.ones(2, 1, 4, 4).double(), None)])
    assert caught.value.__notes__ == ["in refresh_batchnorm, train, batch 2"]
    assert isinstance(program.init().ema, Empty)
    assert copy.deepcopy(net).training
