from __future__ import annotations

import copy
import functools
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import assert_trees_close, image_batch, tiny_convnet, tiny_mlp, vector_batch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import prune

import purestep as ps
from purestep import optim, tree
from purestep.errors import ConfigError, StateError, StepContractError
from purestep.model import functional as functional_

LR = 0.25


def program(net: nn.Module, objective: Any = None, **kwargs: Any) -> ps.Program:
    return ps.program(net, objective or ps.supervised(nn.CrossEntropyLoss()), optim.sgd(LR), **kwargs)


def trained_by_torch(net: nn.Module, batches: list[Any], criterion: Any = functional.cross_entropy) -> nn.Module:
    """The usual loop on a copy of the module."""
    net = copy.deepcopy(net).train()
    own = criterion.parameters() if isinstance(criterion, nn.Module) else []
    optimizer = torch.optim.SGD([*net.parameters(), *(p for p in own if all(p is not q for q in net.parameters()))], LR)
    for x, y in batches:
        optimizer.zero_grad()
        criterion(net(x), y).backward()
        optimizer.step()
    return net


def trained(chosen: ps.Program, batches: list[Any]) -> ps.TrainState:
    state = chosen.init(device="cpu")
    for batch in batches:
        state, _ = chosen.train_step(state, batch)
    return state


def assert_same_weights(state: ps.TrainState, net: nn.Module, **tolerance: Any) -> None:
    tolerance = tolerance or {"rtol": 1e-6, "atol": 1e-7}
    theirs = {name: p.detach() for name, p in net.named_parameters()}
    assert_trees_close({**state.params, **state.frozen}, theirs, **tolerance)
    assert_trees_close(state.buffers, dict(net.named_buffers()), **tolerance)


def is_weightless(chosen: ps.Program | functional_.Template) -> bool:
    template = chosen if isinstance(chosen, functional_.Template) else template_of(chosen)
    modules = (template.train, template.eval)
    return all(t.is_meta for module in modules for t in (*module.parameters(), *module.buffers()))


def template_of(chosen: ps.Program) -> functional_.Template:
    cells = [cell.cell_contents for cell in chosen.train_step.__closure__ or ()]
    return next(cell.template for cell in cells if hasattr(cell, "template"))


class Language(nn.Module):
    """Words in, the next word out, through one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.head = nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.embedding(words).tanh()).movedim(-1, 1)


class TwoBuffers(nn.Module):
    """One buffer under two names, written under one and read under the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("scale", torch.ones(4))
        self.other = nn.Module()
        self.other.register_buffer("scale", self.scale)

    def forward(self, x: Tensor) -> Tensor:
        self.scale.mul_(2)
        return self.layer(x * self.other.scale)


class Counting(nn.Module):
    """Counts its calls in buffers: one assigned anew, one written, one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.register_buffer("assigned", torch.zeros((), dtype=torch.int64))
        self.register_buffer("written", torch.zeros(()))
        self.register_buffer("passing", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        self.assigned = self.assigned + 1
        self.written.add_(1)
        self.passing = self.passing + 3
        return self.layer(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, num_layers=2, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x.unsqueeze(1).expand(-1, 5, -1))[0][:, -1])


def words_batch() -> tuple[Tensor, Tensor]:
    words = torch.randint(7, (4, 9), generator=torch.Generator().manual_seed(0))
    return words[:, :-1], words[:, 1:]


BATCHES = [vector_batch(8, seed) for seed in range(4)]


def test_weights_of_an_lstm_stay_where_they_are(monkeypatch: pytest.MonkeyPatch):
    """As torch does on CUDA in every call: its kernels take all weights as one vector."""
    chosen = program(Recurrent())
    state = chosen.init()

    def moved(lstm: nn.LSTM) -> None:
        for weight in lstm.parameters():
            weight.data = weight.detach().clone()

    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", moved)
    before = {name: weight.data_ptr() for name, weight in state.params.items()}
    chosen.train_step(state, BATCHES[0])
    chosen.bind(state)(BATCHES[0][0])
    assert {name: weight.data_ptr() for name, weight in state.params.items()} == before


class TestTies:
    @pytest.mark.parametrize("engine", ["autograd", "func"])
    def test_embedding_and_head_stay_one_matrix(self, engine: str):
        net = Language()
        batches = [words_batch()] * 3
        chosen = program(net, engine=engine)
        state = trained(chosen, batches)
        assert list(state.params) == ["embedding.weight"]
        assert chosen.static.ties == {"head.weight": "embedding.weight"}
        theirs = trained_by_torch(net, batches)
        assert theirs.head.weight is theirs.embedding.weight
        assert_same_weights(state, theirs)
        assert torch.allclose(chosen.bind(state)(batches[0][0]), theirs.eval()(batches[0][0]), atol=1e-6)

    def test_the_gradient_of_a_tie_is_the_sum_over_both_places(self):
        """Without the tie half of the gradient is missing: the test above can tell."""
        net, untied = Language(), Language()
        untied.load_state_dict(net.state_dict())
        untied.head.weight = nn.Parameter(net.head.weight.detach().clone())
        one, two = (trained(program(n), [words_batch()]) for n in (net, untied))
        start = net.embedding.weight.detach()
        both = sum(value - start for value in two.params.values())
        assert torch.allclose(one.params["embedding.weight"] - start, both, atol=1e-6)
        assert not torch.allclose(one.params["embedding.weight"], two.params["embedding.weight"], atol=1e-4)

    def test_a_frozen_tie_is_frozen_in_both_places(self):
        net = Language()
        net.embedding.weight.requires_grad_(False)
        net.register_parameter("gain", nn.Parameter(torch.ones(())))
        objective = ps.supervised(nn.CrossEntropyLoss(), forward=lambda m, x: m(x) * m.params["gain"])
        state = trained(program(net, objective), [words_batch()] * 2)
        assert list(state.params) == ["gain"]
        assert torch.equal(state.frozen["embedding.weight"], net.embedding.weight)
        assert state.params["gain"] != 1

    def test_a_module_used_twice_is_trained_once_and_leaves_nothing_behind(self):
        shared = nn.Linear(4, 4)
        net = nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(4, 3))
        chosen = program(net)
        state = trained(chosen, BATCHES)
        assert set(state.params) == {"0.weight", "0.bias", "3.weight", "3.bias"}
        assert chosen.static.ties == {"2.weight": "0.weight", "2.bias": "0.bias"}
        assert_same_weights(state, trained_by_torch(net, BATCHES))
        assert is_weightless(chosen)

    def test_a_norm_used_twice_moves_its_buffers_twice(self):
        shared = nn.BatchNorm1d(4)
        net = nn.Sequential(shared, nn.Linear(4, 4), shared, nn.Linear(4, 3))
        state = trained(program(net), BATCHES)
        assert int(state.buffers["0.num_batches_tracked"]) == 8
        assert_same_weights(state, trained_by_torch(net, BATCHES))

    def test_a_buffer_under_two_names_is_one(self):
        net = TwoBuffers()
        chosen = program(net)
        state = trained(chosen, BATCHES[:2])
        assert list(state.buffers) == ["scale"]
        assert state.buffers["scale"].tolist() == [4.0] * 4
        assert chosen.static.ties == {"other.scale": "scale"}
        assert chosen.static.persistent == {"scale", "other.scale"}
        assert_same_weights(state, trained_by_torch(net, BATCHES[:2]))


class TestFrozen:
    @pytest.fixture
    def net(self) -> nn.Module:
        net = tiny_mlp()
        net[0].requires_grad_(False)
        return net

    def test_no_gradient_no_optimizer_state_no_average(self, net: nn.Module):
        seen: list[bool] = []

        def objective(m: Any, batch: Any) -> ps.Loss:
            seen.extend(p.requires_grad for p in m.frozen.values())
            return ps.Loss(functional.cross_entropy(m(batch[0]), batch[1]), 8, {})

        chosen = ps.program(net, objective, optim.adamw(0.1), ema=0.5, accumulate=2)
        state = trained(chosen, BATCHES[:2])
        assert seen == [False] * 4
        assert set(state.frozen) == {"0.weight", "0.bias"}
        assert chosen.static.frozen == ("0.weight", "0.bias")
        rest = {*tree.paths(state.opt_state), *tree.paths(state.ema), *tree.paths(state.accum)}
        assert not [path for path in rest if "0.weight" in path or "0.bias" in path]
        assert int(state.updates) == 1

    def test_it_keeps_its_bits_while_the_rest_trains_as_in_torch(self, net: nn.Module):
        state = trained(program(net), BATCHES)
        assert torch.equal(state.frozen["0.weight"], net[0].weight)
        assert not torch.equal(state.params["2.weight"], net[2].weight)
        assert_same_weights(state, trained_by_torch(net, BATCHES))

    def test_weight_decay_does_not_reach_it(self, net: nn.Module):
        chosen = ps.program(net, ps.supervised(nn.CrossEntropyLoss()), optim.adamw(0.1, weight_decay=0.5))
        assert torch.equal(trained(chosen, BATCHES).frozen["0.weight"], net[0].weight)


class TestKeepEval:
    @pytest.mark.parametrize("patterns", [("1",), "1", ("[1]",), ("1", "5")])
    def test_a_norm_that_stays_in_eval_mode_uses_and_keeps_its_statistics(self, patterns: Any):
        net = tiny_convnet(dropout=0.0)
        state = trained(program(net, keep_eval=patterns), [image_batch()] * 3)
        assert_trees_close(state.buffers, dict(net.named_buffers()), exact=True)

        class Still(nn.BatchNorm2d):
            def train(self, mode: bool = True) -> nn.Module:
                return super().train(False)

        frozen = copy.deepcopy(net)
        frozen[1] = Still(4)
        assert_same_weights(state, trained_by_torch(frozen, [image_batch()] * 3))

    def test_without_it_the_statistics_move(self):
        net = tiny_convnet(dropout=0.0)
        state = trained(program(net), [image_batch()])
        assert not torch.equal(state.buffers["1.running_mean"], net[1].running_mean)

    def test_children_of_a_name_are_meant_too(self):
        net = nn.Sequential(nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4)), nn.BatchNorm1d(4), nn.Linear(4, 3))
        state = trained(program(net, keep_eval=("0",)), BATCHES)
        tracked = {name: int(b) for name, b in state.buffers.items() if name.endswith("tracked")}
        assert tracked == {
            "0.0.num_batches_tracked": 0, "0.1.num_batches_tracked": 0, "1.num_batches_tracked": 4
        }  # fmt: skip

    def test_the_rest_of_the_program_is_as_ever(self):
        net = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 3))
        still = program(net, keep_eval=("0",))
        a, b = (still.train_step(still.init(seed, device="cpu"), BATCHES[0])[0] for seed in (1, 2))
        assert_trees_close(a.params, b.params, exact=True)
        draws = program(net)
        a, b = (draws.train_step(draws.init(seed, device="cpu"), BATCHES[0])[0] for seed in (1, 2))
        assert not torch.equal(a.params["1.weight"], b.params["1.weight"])

    def test_a_pattern_that_matches_nothing_is_refused(self):
        with pytest.raises(ConfigError, match=r"keep_eval: 'norm\*' matches no submodule \(cure: the nearest name"):
            program(tiny_convnet(), keep_eval=("1", "norm*"))


class TestTheModuleIsATemplate:
    @pytest.mark.parametrize("engine", ["autograd", "func"])
    @pytest.mark.parametrize("mode", [True, False])
    def test_it_is_never_written(self, mode: bool, engine: str):
        net = tiny_convnet().train(mode)
        kept = copy.deepcopy(net.state_dict())
        chosen = program(net, engine=engine)
        state = trained(chosen, [image_batch()] * 2)
        chosen.eval_step(state, image_batch())
        chosen.bind(state)(image_batch()[0])
        assert_trees_close(dict(net.state_dict()), dict(kept), exact=True)
        assert all(module.training is mode for module in net.modules())
        assert all(p.grad is None and p.requires_grad for p in net.parameters())

    def test_its_mode_makes_no_difference(self):
        of_train, of_eval = (trained(program(tiny_convnet().train(m)), [image_batch()] * 2) for m in (True, False))
        assert_trees_close(of_train, of_eval, exact=True)
        assert int(of_train.buffers["1.num_batches_tracked"]) == 2

    def test_no_second_copy_of_the_weights_is_kept(self):
        chosen = program(tiny_convnet())
        assert is_weightless(chosen)
        trained(chosen, [image_batch()] * 2)
        assert is_weightless(chosen)

    def test_a_forward_pass_that_fails_leaves_it_without_weights(self):
        chosen = program(tiny_mlp())
        with pytest.raises(RuntimeError, match="shapes"):
            chosen.train_step(chosen.init(device="cpu"), (torch.ones(2, 5), torch.zeros(2, dtype=torch.int64)))
        assert is_weightless(chosen)

    def test_its_attributes_are_looked_at_once(self):
        """A vocabulary of many words is as slow to look at as to copy."""
        looks: list[int] = []

        class Table(dict[str, int]):
            def values(self) -> Any:
                looks.append(1)
                return super().values()

        net = tiny_mlp()
        net.words = Table(a=1, b=2)  # pyright: ignore[reportAttributeAccessIssue]
        made = functional_.template(net)
        assert len(looks) == 1
        tables = net.words, made.train.model.words, made.eval.model.words
        assert all(table == {"a": 1, "b": 2} for table in tables)
        assert len(set(map(id, tables))) == 3  # each copy has one of its own

    def test_a_second_program_of_it_is_another(self):
        net = tiny_mlp()
        first, second = program(net), program(net)
        assert_trees_close(trained(first, BATCHES), trained(second, BATCHES), exact=True)

    def test_later_changes_of_the_module_reach_init_alone(self):
        net = tiny_mlp()
        chosen = program(net)
        with torch.no_grad():
            net[0].weight.fill_(7)
        state = chosen.init(device="cpu")
        assert state.params["0.weight"].eq(7).all()
        with torch.no_grad():
            net[0].weight.fill_(8)
        assert state.params["0.weight"].eq(7).all()


def wrap(part: nn.Module) -> Any:
    return torch.compile(part, backend="aot_eager")


def nested() -> nn.Module:
    inner = tiny_convnet()
    inner[0] = wrap(inner[0])
    return wrap(nn.Sequential(wrap(inner), nn.Identity()))


def in_place() -> nn.Module:
    net = tiny_convnet()
    net.compile(backend="aot_eager")
    return net


class Holder(nn.Linear):
    """A module with an attribute that is neither a parameter nor a buffer."""

    def __init__(self, held: Any) -> None:
        super().__init__(2, 2)
        self.held = held


class UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = tiny_convnet()
        self.again = wrap(self.net[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) + 0 * self.again(torch.ones(2, 4, 1, 1)).sum()


def parallel(kind: str, module: nn.Module, tmp_path: Path) -> nn.Module:
    if kind == "DataParallel":
        return nn.DataParallel(module)
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    return nn.parallel.DistributedDataParallel(module)


class TestParallelModules:
    @pytest.fixture(autouse=True)
    def leave_the_group(self) -> Iterator[None]:
        yield
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()

    @pytest.mark.parametrize("kind", ["DataParallel", "DistributedDataParallel"])
    def test_they_train_and_export_as_the_module_inside(self, kind: str, tmp_path: Path):
        plain = tiny_convnet()
        whole = parallel(kind, copy.deepcopy(plain), tmp_path)
        with pytest.warns(UserWarning, match=f"wrapped by {kind}") as said:
            made = program(whole)
        assert len(said) == 1
        assert said[0].filename == __file__
        assert not [name for name in made.init().params if name.startswith("module.")]
        assert optim.decay_mask(whole) == optim.decay_mask(plain)
        state = trained(made, [image_batch()] * 2)
        expected = trained(program(plain), [image_batch()] * 2)
        assert_trees_close(state.params, expected.params, exact=True)
        ps.export_weights(tmp_path / "w.pt", made, state)
        loaded = torch.load(tmp_path / "w.pt", weights_only=True)
        assert set(loaded) == set(plain.state_dict())
        assert "" in loaded._metadata
        assert "module" not in loaded._metadata
        ps.load_into(whole, state)
        inside = tree.map(Tensor.cpu, dict(whole.module.state_dict()))  # DataParallel moves it to a GPU
        assert_trees_close(inside, dict(loaded), exact=True)

    def test_inside_of_another_module_and_of_each_other(self):
        net = nn.Sequential(nn.DataParallel(wrap(nn.Linear(2, 3))), nn.LayerNorm(3))
        assert set(optim.decay_mask(net)) == {"0.weight", "0.bias", "1.weight", "1.bias"}
        assert set(optim.muon_labels(net)) == set(optim.decay_mask(net))


@pytest.mark.filterwarnings("ignore:the model is wrapped by torch.compile")
class TestModulesThatWentThroughTorchCompile:
    """A step is compiled whole, so the wrappers are left out; the names are those of the model."""

    @pytest.mark.parametrize("mode", ["eager", "trace"])
    @pytest.mark.parametrize(
        "make", [lambda: wrap(tiny_convnet()), nested, in_place], ids=["root", "nested", "in-place"]
    )
    def test_they_train_as_the_plain_one(self, make: Any, mode: str):
        whole = program(make())
        step = whole.train_step
        if mode != "eager":
            step = ps.compile_step(step, backend="aot_eager")
        state = whole.init(device="cpu")
        assert not [name for name in (*state.params, *state.buffers) if "_orig_mod" in name]
        for batch in [image_batch()] * 2:
            state, _ = step(state, batch)
        plain = trained(program(tiny_convnet()), [image_batch()] * 2)
        for mine, theirs in ((state.params, plain.params), (state.buffers, plain.buffers)):
            assert_trees_close(list(mine.values()), list(theirs.values()), rtol=1e-5, atol=1e-6)

    def test_a_part_that_is_used_plain_too_is_one(self):
        state = trained(program(UsedTwice()), [image_batch()])
        assert int(state.buffers["net.1.num_batches_tracked"]) == 2
        assert not [name for name in state.params if name.startswith("again")]

    def test_masks_have_the_names_of_the_model(self):
        net = nn.Sequential(wrap(nn.Linear(2, 3)), nn.LayerNorm(3))
        assert optim.decay_mask(net) == {"0.weight": True, "0.bias": False, "1.weight": False, "1.bias": False}
        assert set(optim.muon_labels(net)) == set(optim.decay_mask(net))

    def test_weights_go_back_into_them(self):
        net = wrap(tiny_convnet())
        state = trained(program(net), [image_batch()])
        ps.load_into(net, state)
        assert_trees_close(dict(net._orig_mod.state_dict()), {**state.params, **state.buffers}, exact=True)

    def test_they_are_not_changed(self):
        net = nested()
        names = list(net.state_dict())
        trained(program(net), [image_batch()])
        assert list(net.state_dict()) == names

    def test_a_criterion(self):
        chosen = program(tiny_mlp(), ps.supervised(wrap(nn.CrossEntropyLoss(weight=torch.ones(3)))))
        assert list(chosen.init(device="cpu").buffers) == ["objective.weight"]
        trained(chosen, BATCHES)


class Moves(nn.Module):
    """Moves its layers in each forward pass; ``how`` does it."""

    def __init__(self, how: Any) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        self.layer = self.how(self.layer)
        return self.how(self).norm(self.layer(x))


def to_itself(part: nn.Module) -> nn.Module:
    return part.to(torch.float32)


def to_the_device(part: nn.Module) -> nn.Module:
    return part.to(torch.device("cpu"))


class TestModulesThatAForwardPassMoves:
    @pytest.mark.parametrize("mode", ["eager", "trace"])
    @pytest.mark.parametrize("how", [to_itself, to_the_device, nn.Module.float])
    def test_to_where_they_are_is_nothing(self, how: Any, mode: str):
        chosen, plain = program(Moves(how)), program(Moves(lambda part: part))
        step = chosen.train_step
        if mode != "eager":
            step = ps.compile_step(step, backend="aot_eager")
        state, expected = chosen.init(device="cpu"), plain.init(device="cpu")._replace(params=chosen.init().params)
        for seed in range(2):
            state, _ = step(state, vector_batch(seed=seed))
            expected, _ = plain.train_step(expected, vector_batch(seed=seed))
        assert_trees_close(state, expected, rtol=1e-5, atol=1e-6)
        assert_trees_close(
            chosen.eval_step(state, BATCHES[0]), plain.eval_step(expected, BATCHES[0]), rtol=1e-5, atol=1e-6
        )

    @pytest.mark.parametrize("mode", ["eager", "trace"])
    def test_to_another_dtype_is_refused_by_name(self, mode: str):
        chosen = program(Moves(nn.Module.double))
        step = chosen.train_step if mode == "eager" else ps.compile_step(chosen.train_step, backend="aot_eager")
        with pytest.raises(
            StepContractError, match=r"layer.weight: the forward pass moves this tensor.*before ps.program"
        ):
            step(chosen.init(device="cpu"), vector_batch())


class ScalesItsInput(nn.Module):
    """Writes through a view of what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        x[:, 1:].mul_(2)
        return x


class Normalizes(nn.Module):
    """Writes an entry of a mapping of inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mask.logical_not_()
        return self.layer(x * mask)


class TestModelsThatWriteTheirInput:
    """They train as elsewhere, and the batch stays what it was."""

    @pytest.mark.parametrize("how", ["autograd", "func", "microbatches", "trace", "donate", "fit"])
    @pytest.mark.parametrize("first", [nn.ReLU(inplace=True), ScalesItsInput()], ids=["relu", "view"])
    def test_the_batch_is_what_it_was(self, first: nn.Module, how: str):
        net = nn.Sequential(first, nn.Linear(4, 3))
        options: dict[str, Any] = {"engine": how} if how in ("autograd", "func") else {}
        chosen = program(net, **options, microbatches=2 if how == "microbatches" else 1)
        step: Any = chosen.train_step
        if how in ("trace", "donate"):
            step = ps.compile_step(step, donate=how == "donate", backend="aot_eager")
        given, kept = ([vector_batch(seed=seed) for seed in range(3)] for _ in range(2))
        if how == "fit":
            state = ps.fit(chosen.init(device="cpu"), given, chosen, epochs=1, device="cpu", progress=False).state
        else:
            state = chosen.init(device="cpu")
            for batch in given:
                state, _ = step(state, batch)
        assert_trees_close(given, kept, exact=True)
        copies = [(x.clone(), y) for x, y in kept]
        assert_same_weights(ps.clone(state), trained_by_torch(net, copies), rtol=1e-5, atol=1e-6)

    def test_each_structure_of_batches_is_looked_at(self):
        def objective(bound: Any, batch: Any) -> ps.Loss:
            found = bound(batch["x"], batch["mask"]) if isinstance(batch, dict) else bound(*batch)
            return ps.Loss(found.square().mean(), 1, {})

        chosen = program(Normalizes(), objective)
        state = chosen.init(device="cpu")
        for batch in ({"x": torch.ones(2, 4), "mask": torch.ones(2, 4) > 0}, (torch.ones(2, 4), torch.ones(2, 4) > 0)):
            for _ in range(2):
                chosen.train_step(state, batch)
                chosen.eval_step(state, batch)
                assert all(bool(leaf.all()) for leaf in tree.leaves(batch))

    def test_only_what_is_written_is_copied(self):
        seen: list[Any] = []

        def objective(bound: Any, batch: Any) -> ps.Loss:
            seen.append([leaf.data_ptr() for leaf in batch])
            return ps.Loss(bound(*batch).square().mean(), 1, {})

        chosen = program(Normalizes(), objective)
        batch = torch.ones(2, 4), torch.ones(2, 4) > 0
        for _ in range(2):
            chosen.train_step(chosen.init(device="cpu"), batch)
        assert [mine == theirs.data_ptr() for mine, theirs in zip(seen[1], batch, strict=True)] == [True, False]


class Clamped(nn.Linear):
    """Keeps its weights in bounds in the forward pass, in one of the ways that a loop with a module allows."""

    def __init__(self, how: str) -> None:
        super().__init__(4, 3)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        clamped = self.weight.detach().clamp(-0.1, 0.1)
        with torch.no_grad():
            if self.how == "data":
                self.weight.data = clamped
            elif self.how == "set_":
                self.weight.set_(clamped)
            elif self.how == "clamp_":
                self.weight.clamp_(-0.1, 0.1)
            elif self.how == "assigned":
                self.weight = nn.Parameter(clamped)
            else:
                self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


class TestWeightsThatAForwardPassWrites:
    """They are those of a state, which is a value: the write would be lost, or change it."""

    REFUSED = r"^weight: the forward pass .* this weight.*cure: .*weight\.clamp.*parametrize"

    @pytest.mark.parametrize("mode", ["autograd", "func", "eval", "bind", "trace"])
    @pytest.mark.parametrize("how", ["data", "set_", "clamp_", "assigned"])
    def test_they_are_refused(self, how: str, mode: str):
        chosen = program(Clamped(how), engine=mode if mode in ("autograd", "func") else "auto")
        state, batch = chosen.init(device="cpu"), vector_batch()
        calls: dict[str, Any] = {
            "eval": lambda: chosen.eval_step(state, batch),
            "bind": lambda: chosen.bind(state)(batch[0]),
            "trace": lambda: ps.compile_step(chosen.train_step, backend="aot_eager")(state, batch),
        }
        torchs = (how, mode) == ("data", "func")  # which torch itself refuses
        with pytest.raises(RuntimeError if torchs else StepContractError, match=r"\.data" if torchs else self.REFUSED):
            calls.get(mode, lambda: chosen.train_step(state, batch))()

    def test_those_past_autograd_are_found_by_the_look_at_purity(self):
        chosen = program(Clamped("past autograd"))
        with pytest.raises(StepContractError, match=r"params/weight: .*past autograd.*nn\.utils\.parametrize"):
            ps.testing.assert_pure(chosen.train_step, chosen.init(device="cpu"), vector_batch())

    def test_the_cure_for_weights_that_stay_in_bounds(self):
        def clamped(updates: dict[str, Tensor], params: dict[str, Tensor]) -> dict[str, Tensor]:
            return {name: (params[name] + u).clamp(-0.1, 0.1) - params[name] for name, u in updates.items()}

        tx = optim.chain(optim.sgd(LR), optim.stateless(clamped))
        chosen = ps.program(nn.Linear(4, 3), ps.supervised(nn.CrossEntropyLoss()), tx)
        state = trained(chosen, [vector_batch()])
        assert state.params["weight"].abs().max() <= 0.1 + 1e-6


class TestBuffers:
    def test_written_and_assigned_ones_come_back_in_the_state(self):
        net = Counting()
        chosen = program(net)
        state = chosen.init(device="cpu")
        kept = ps.clone(state)
        new = trained(chosen, BATCHES[:3])
        assert (int(new.buffers["assigned"]), float(new.buffers["written"])) == (3, 3.0)
        assert new.buffers["passing"].tolist() == [9.0, 9.0]
        assert new.buffers["assigned"].dtype == torch.int64
        assert_trees_close(state, kept, exact=True)
        assert (int(net.assigned), float(net.written)) == (0, 0.0)

    @pytest.mark.parametrize("mode", ["autograd", "func", "eval", "trace"])
    def test_one_in_the_memory_of_another_is_refused_where_it_is_written(self, mode: str):
        class Net(nn.Linear):
            def __init__(self, *, writes: bool) -> None:
                super().__init__(4, 3)
                self.register_buffer("table", torch.zeros(8))
                self.register_buffer("first", self.table[:4])
                self.register_buffer("last", self.table[4:])
                self.writes = writes

            def forward(self, x: Tensor) -> Tensor:
                if self.writes:
                    self.table.add_(x.detach().mean())
                return super().forward(x + self.first)

        for writes in (False, True):
            chosen = program(Net(writes=writes), engine=mode if mode in ("autograd", "func") else "auto")
            state, batch = chosen.init(device="cpu"), vector_batch()
            calls: dict[str, Any] = {"eval": chosen.eval_step}
            if mode == "trace":
                calls["trace"] = ps.compile_step(chosen.train_step, backend="aot_eager")
            step = calls.get(mode, chosen.train_step)
            if not writes:
                step(state, batch)
                continue
            with pytest.raises(StepContractError, match=r"^table: .*writes this buffer.* another .*cure: register one"):
                step(state, batch)

    def test_two_calls_in_one_objective_see_each_other(self):
        def twice(m: Any, batch: Any) -> ps.Loss:
            x, y = batch
            loss = functional.cross_entropy(m(x), y)
            assert int(m.buffers["assigned"]) % 2 == 1
            return ps.Loss((loss + functional.cross_entropy(m(2 * x), y)) / 2, len(x), {})

        new = trained(program(Counting(), twice), BATCHES[:2])
        assert (int(new.buffers["assigned"]), float(new.buffers["written"])) == (4, 4.0)

    @pytest.mark.parametrize("engine", ["autograd", "func"])
    def test_one_that_was_computed_from_weights_carries_no_graph(self, engine: str):
        class Centred(nn.Linear):
            def __init__(self) -> None:
                super().__init__(4, 3)
                self.register_buffer("centre", torch.zeros(3))

            def forward(self, x: Tensor) -> Tensor:
                y = super().forward(x)
                self.centre = 0.5 * self.centre + 0.5 * y.mean(0)
                return y - self.centre

        chosen = program(Centred(), engine=engine)
        new = trained(chosen, BATCHES[:2])
        assert not new.buffers["centre"].requires_grad
        assert new.buffers["centre"].any()
        ps.testing.assert_pure(chosen.train_step, new, BATCHES[2])

    def test_evaluation_changes_none(self):
        chosen = program(Counting())
        state = chosen.init(device="cpu")
        with pytest.warns(UserWarning, match="the model writes the buffer assigned in eval mode"):
            chosen.eval_step(state, BATCHES[0])
        predict = chosen.bind(state, train=True)
        predict(BATCHES[0][0])
        predict(BATCHES[0][0])
        assert int(state.buffers["assigned"]) == 0

    def test_the_persistent_ones_are_those_of_a_state_dict(self):
        net = Counting()
        names = functional_.template(net).names
        assert names.buffers == ("assigned", "written", "passing")
        assert names.persistent == {"assigned", "written"} == set(net.state_dict()) - {"layer.weight", "layer.bias"}

    def test_of_one_under_two_names_both_are(self):
        net = Counting()
        net.register_buffer("again", net.written)
        names = functional_.template(net).names
        assert names.persistent == {"assigned", "written", "again"} == {n for n in net.state_dict() if "layer" not in n}
        assert names.ties == {"again": "written"}

    def test_what_bind_is_given_is_not_written(self):
        net = Counting()
        params, frozen, buffers = functional_.tensors(net)
        bound = functional_.bind(functional_.template(net), params, frozen, buffers, train=True)
        bound(torch.ones(2, 4))
        assert float(buffers["written"]) == 0
        assert float(bound.buffers["written"]) == 1


class TestBound:
    def test_methods_other_than_forward_run_on_the_same_weights(self):
        class Coder(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(4, 3)
                self.register_buffer("calls", torch.zeros(()))

            def encode(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
                self.calls.add_(1)
                return self.inner(x) * scale

            def forward(self, x: Tensor) -> Tensor:
                return -self.encode(x)

        net = Coder()
        bound = functional_.bind(functional_.template(net), *functional_.tensors(net), train=True)
        x = torch.ones(2, 4)
        expected = net.inner(x) * 2
        assert torch.equal(bound.call("encode", x, scale=2.0), expected)
        assert torch.equal(bound(x), -expected / 2)
        assert float(bound.buffers["calls"]) == 2

        def objective(m: Any, batch: Any) -> ps.Loss:
            return ps.Loss(m.call("encode", batch, scale=3.0).sum(), 1, {})

        state = trained(program(net, objective), [x])
        assert torch.allclose(state.params["inner.bias"], net.inner.bias - LR * 2 * 3)

    def test_submodules_run_by_their_dotted_names_and_an_attribute_says_so(self):
        net = nn.Sequential(nn.Linear(4, 3), nn.Sequential(nn.ReLU(), nn.Linear(3, 2)))
        bound = functional_.bind(functional_.template(net), *functional_.tensors(net))
        x = torch.randn(2, 4)
        assert torch.equal(bound.call("1.1", bound.call("1.0", bound.call("0", x))), net(x))
        named = nn.ModuleDict({"encoder": nn.Linear(4, 3)})
        bound = functional_.bind(functional_.template(named), *functional_.tensors(named))
        with pytest.raises(AttributeError, match=r"no attribute 'encoder' .*model.call\('encoder', ...\)"):
            bound.encoder(x)  # pyright: ignore
        assert not hasattr(bound, "decoder")

    def test_what_it_lacks_has_a_cure_that_works(self):
        class Net(nn.Linear):
            scale = 2.0

            def forward(self, x: Tensor) -> Tensor:
                self.aux = super().forward(x)
                return self.aux

        net = Net(2, 1)
        bound = functional_.bind(functional_.template(net), *functional_.tensors(net))
        bound(torch.ones(1, 2))
        for name, cure in (
            ("scale", "model.module.scale is a setting"),
            ("weight", "model.params, .* hold its tensors"),
            ("forward", r"model.call\('forward', ...\) runs a method"),
        ):
            with pytest.raises(AttributeError, match=f"no attribute '{name}' .cure: .*{cure}"):
                getattr(bound, name)
        with pytest.raises(TypeError, match="'Tensor' object is not callable"):
            bound.call("aux")
        with pytest.raises(StepContractError, match="parameters: the method returned a generator .cure: read model"):
            bound.call("parameters")

    def test_it_shows_weights_mode_and_the_hollow_module(self):
        net = tiny_mlp()
        net[0].bias.requires_grad_(False)
        template = functional_.template(net)
        params, frozen, buffers = functional_.tensors(net)
        assert params["0.weight"].data_ptr() == net[0].weight.data_ptr()
        assert not params["0.weight"].requires_grad
        for train in (True, False):
            bound = functional_.bind(template, params, frozen, buffers, train=train)
            assert bound.training is train
            assert set(bound.params) == {"0.weight", "2.weight", "2.bias"}
            assert set(bound.frozen) == {"0.bias"}
            assert isinstance(bound.module, nn.Sequential)
            assert bound.module.training is train
            assert next(bound.module.parameters()).is_meta

    def test_weights_can_be_penalized_by_the_objective(self):
        def objective(m: Any, batch: Any) -> ps.Loss:
            return ps.Loss(functional.cross_entropy(m(batch[0]), batch[1]) + m.params["2.bias"].sum(), 8, {})

        plain, penalized = (trained(program(tiny_mlp(), o), BATCHES[:1]) for o in (None, objective))
        assert torch.allclose(penalized.params["2.bias"], plain.params["2.bias"] - LR)


class TestKindsOfModules:
    @pytest.mark.parametrize("engine", ["autograd", "func"])
    def test_an_lstm_trains_as_in_torch(self, engine: str):
        net = Recurrent()
        chosen = program(net, engine=engine)
        state = trained(chosen, BATCHES)
        theirs = trained_by_torch(net, BATCHES)
        assert_same_weights(state, theirs)
        x = BATCHES[0][0]
        assert torch.allclose(chosen.bind(state)(x), theirs(x), atol=1e-6)

    def test_weights_of_a_class_that_cannot_be_copied_train_as_in_torch(self):
        class Special(Tensor):
            def __deepcopy__(self, memo: Any) -> Special:
                raise RuntimeError("not that way")

        net, plain = nn.Linear(4, 3), nn.Linear(4, 3)
        net.load_state_dict(plain.state_dict())
        net.weight = nn.Parameter(net.weight.detach().as_subclass(Special))
        state = trained(program(net), BATCHES)
        params = {name: weight.as_subclass(Tensor) for name, weight in state.params.items()}
        assert_same_weights(state._replace(params=params), trained_by_torch(plain, BATCHES))

    @pytest.mark.parametrize("wrap", ["weight_norm", "spectral_norm", "orthogonal"])
    def test_parametrizations_train_as_in_torch(self, wrap: str):
        net = nn.Sequential(getattr(nn.utils.parametrizations, wrap)(nn.Linear(4, 3)))
        state = trained(program(net), BATCHES)
        assert set(state.params) == {name for name, _ in net.named_parameters()}
        assert_same_weights(state, trained_by_torch(net, BATCHES), rtol=1e-5, atol=1e-6)

    def test_dropout_of_zero_and_a_convnet_train_as_in_torch(self):
        net = tiny_convnet(dropout=0.0)
        batches = [image_batch(seed=seed) for seed in range(3)]
        assert_same_weights(trained(program(net), batches), trained_by_torch(net, batches), rtol=1e-5, atol=1e-6)


class TestWhatCannotBeTrained:
    @pytest.mark.parametrize(
        ("parameter", "message"),
        [
            (nn.Parameter(torch.ones(2, dtype=torch.int64), requires_grad=False), "torch.int64.*register_buffer"),
            (nn.Parameter(torch.ones(2, dtype=torch.bool), requires_grad=False), "torch.bool.*register_buffer"),
            (nn.parameter.UninitializedParameter(), r"is lazy and has no shape yet \(cure: run one forward pass"),
        ],
        ids=["integer", "bool", "lazy"],
    )
    def test_parameters_are_named(self, parameter: nn.Parameter, message: str):
        net = nn.Sequential(nn.Linear(4, 3))
        net[0].register_parameter("odd", parameter)
        with pytest.raises(StateError, match=rf"0\.odd: .*{message}"):
            program(net)

    def test_lazy_buffers_are_named(self):
        with pytest.raises(StateError, match=r"0\.running_mean: the tensor is lazy"):
            program(nn.Sequential(nn.LazyBatchNorm1d(affine=False), nn.Linear(4, 3)))

    def test_nothing_to_train(self):
        with pytest.raises(StateError, match=r"Sequential: the module has no parameter with requires_grad=True"):
            program(tiny_mlp().requires_grad_(False))

    def test_layers_in_a_list_are_no_parameters(self):
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = [nn.Linear(2, 2)]

        with pytest.raises(
            StateError, match=r"Net: the module has no parameters \(cure: put layers into nn\.ModuleList"
        ):
            program(Net())

    @pytest.mark.parametrize(
        "utility",
        [
            nn.utils.weight_norm,
            nn.utils.spectral_norm,
            functools.partial(prune.l1_unstructured, name="weight", amount=0.5),
        ],
        ids=["weight_norm", "spectral_norm", "prune"],
    )
    def test_old_utilities_are_refused_with_the_cure(self, utility: Any):
        with warnings.catch_warnings(action="ignore"):
            layer = utility(nn.Linear(4, 3))
        layer(torch.ones(1, 4))  # spectral_norm replaces the weight here
        cure = r"use torch\.nn\.utils\.parametrizations for weight_norm and spectral_norm, and prune\.remove"
        with pytest.raises(StateError, match=rf"^1\.weight: .* of Linear cannot be copied: .*{cure}") as caught:
            program(nn.Sequential(nn.Linear(4, 4), layer))
        assert caught.value.__cause__ is not None

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (threading.Lock, r"cannot pickle '_thread\.lock' object \(cure: keep only .* define __deepcopy__"),
            (lambda: [threading.Lock()], r"cannot pickle '_thread\.lock' object"),
            (Path(__file__).open, r"cannot pickle '(_io\.)?TextIOWrapper' (object|instances)"),
            (lambda: (number for number in range(3)), r"cannot pickle 'generator' object"),
            (
                lambda: torch.ones(1, requires_grad=True) * 2,
                r"Only Tensors created explicitly.*cure: .*value\.detach\(\)",
            ),
            (
                lambda: [torch.ones(1, requires_grad=True) * 2],
                r"Only Tensors created explicitly.*cure: .*value\.detach\(\)",
            ),
        ],
        ids=["a lock", "a list with a lock", "a file", "a generator", "a result", "a list with a result"],
    )
    def test_an_attribute_that_cannot_be_copied_is_named(self, make: Any, message: str):
        holder = Holder(make())
        net = nn.Sequential(nn.Linear(2, 2), holder)
        net.blocks = [holder]  # which is not at fault
        with pytest.raises(StateError, match=rf"^1\.held: the attribute of Holder cannot be copied: {message}"):
            functional_.template(net)
        with pytest.raises(StateError, match=r"^held: the attribute of Holder"):
            functional_.template(holder)
        if hasattr(holder.held, "close"):
            holder.held.close()

    def test_the_cure_for_an_attribute_that_cannot_be_copied_works(self):
        class Copied(Holder):
            def __deepcopy__(self, memo: dict[int, Any]) -> Copied:
                made = copy.copy(self)
                made.__dict__ = {k: v if k == "held" else copy.deepcopy(v, memo) for k, v in vars(self).items()}
                return made

        net = Copied(threading.Lock())
        made = functional_.template(net).train
        assert made.model.held is net.held
        assert made.model.weight.is_meta

    def test_a_submodule_whose_copy_fails_is_refused(self):
        class Single(nn.Dropout):
            def __deepcopy__(self, memo: Any) -> Single:
                raise RuntimeError("only one may exist")

        with pytest.raises(StateError, match=r"^Sequential: the module cannot be copied: only one may exist"):
            functional_.template(nn.Sequential(nn.Linear(2, 2), Single()))

    @pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
    def test_a_scripted_module_is_refused(self):
        class Scale(nn.Linear):
            def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
                return (torch.nn.functional.linear(outputs, self.weight) - targets).square().mean()

        message = "get_submodule is not supported on ScriptModules"
        with pytest.raises(RuntimeError, match=message):
            program(torch.jit.script(nn.Linear(2, 2)))
        with pytest.raises(RuntimeError, match=message):
            functional_.template(nn.Linear(2, 2), objective=torch.jit.script(Scale(2, 2)))
        # Its submodules and functions may be scripted.
        net = nn.Sequential(torch.jit.script(nn.Linear(2, 2)))
        net.objective = torch.jit.script(nn.CrossEntropyLoss())
        functional_.template(net)

    def test_a_module_that_copies_to_itself_is_named(self):
        """Its mode would be that of the last of the two copies, and the user's module would change."""

        class Single(nn.Dropout):
            def __deepcopy__(self, memo: Any) -> Single:
                return self

        with pytest.raises(
            StateError,
            match=r"^1: ps.program copies the model, but copy.deepcopy of this module returns the module itself",
        ):
            functional_.template(nn.Sequential(nn.Linear(2, 2), Single()))

    def test_a_weight_that_an_attribute_holds_too_is_named(self):
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Linear(2, 2)
                self.heads = {"a": [self.inner.weight]}

        with pytest.raises(
            StateError, match=r"heads: the attribute refers to a weight that is registered too \(cure: use a method"
        ):
            functional_.template(Net())

    @pytest.mark.parametrize("kind", ["a hook", "a partial", "a default", "a bound method of another copy"])
    def test_a_function_that_uses_the_module_itself_is_named(self, kind: str):
        """Deepcopy copies no functions: such an adapter would never be trained."""
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        adapter = net[1]
        if kind == "a hook":
            net[0].register_forward_hook(lambda module, inputs, output: output + adapter(inputs[0]))
        elif kind == "a partial":
            net[0].register_forward_hook(functools.partial(lambda adapter, *_: adapter(_[2]), adapter))
        elif kind == "a default":
            net[0].register_forward_hook(lambda module, inputs, output, adapter=adapter: adapter(output))
        else:
            forward = adapter.forward
            net[0].register_forward_hook(lambda module, inputs, output: forward(output))
        if kind == "a partial":  # which a copy is made of, with its copy of the adapter
            functional_.template(net)
            return
        with pytest.raises(StateError, match=r"0\._forward_hooks: the attribute refers to the original module"):
            functional_.template(net)

    def test_functions_that_use_something_else_are_taken(self):
        seen: list[Tensor] = []
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        net[0].register_forward_hook(lambda module, inputs, output: seen.append(output))
        net.both = [net[0], net[1]]  # copied with the module
        functional_.template(net)

    def test_a_hook_on_a_gradient_is_named(self):
        net = nn.Linear(2, 2)
        net.weight.register_hook(lambda grad: grad * 0)
        with pytest.raises(
            StateError, match=r"weight: the parameter has a hook on its gradient.*cure: .* optim\.masked"
        ):
            functional_.template(net)
        net.weight.requires_grad_(False)
        functional_.template(net)  # which no gradient reaches

    def test_a_weight_in_the_memory_of_another_tensor_is_named(self):
        net = nn.Linear(2, 2)
        net.register_buffer("alias", net.weight)
        with pytest.raises(StateError, match=r"shares memory with"):
            functional_.template(net)
        twice = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        twice[1].weight.data = twice[0].weight.data
        with pytest.raises(StateError, match=r"shares memory with"):
            functional_.template(twice)
        inside = nn.Linear(2, 2)
        inside.register_buffer("whole", torch.zeros(10))
        inside.register_buffer("start", inside.whole[1:2])  # between the two in memory
        inside.bias.data = inside.whole[2:4]
        with pytest.raises(StateError, match=r"bias: the tensor shares memory with whole"):
            functional_.template(inside)
        apart = nn.Linear(2, 2)
        whole = torch.zeros(10)
        apart.weight.data, apart.bias.data = whole[:4].view(2, 2), whole[4:6]
        apart.register_buffer("left", whole[6:])
        functional_.template(apart)  # side by side, as an LSTM's weights lie on a GPU
        columns, matrix = nn.Linear(2, 2), torch.zeros(3, 4)
        columns.a, columns.b = nn.Parameter(matrix[:, :2]), nn.Parameter(matrix[:, 2:])
        with pytest.raises(StateError, match=r"b: the tensor shares memory with a.*register x\.clone\(\) for columns"):
            functional_.template(columns)  # between each other
        columns.a, columns.b = nn.Parameter(columns.a.data.clone()), nn.Parameter(columns.b.data.clone())
        functional_.template(columns)

    @pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
    def test_embeddings_that_no_step_can_train_are_named(self, kind: type[nn.Module]):
        with pytest.raises(StateError, match=rf"{kind.__name__}: max_norm=1\.0 writes the weights in the forward pass"):
            functional_.template(kind(4, 2, max_norm=1.0))
        with pytest.raises(StateError, match=r"^0: sparse=True makes a sparse gradient"):
            functional_.template(nn.Sequential(kind(4, 2, sparse=True)))

    @pytest.mark.parametrize("engine", ["autograd", "func"])
    def test_a_buffer_that_was_none_and_is_filled_is_named(self, engine: str):
        """Evaluation, which has a copy of its own, would find None."""

        class Seen(nn.Module):
            def __init__(self, persistent: bool) -> None:
                super().__init__()
                self.register_buffer("mean", None, persistent=persistent)

            def forward(self, x: Tensor) -> Tensor:
                if self.mean is None:
                    self.mean = x.mean(0).detach()
                return x - self.mean

        message = r"0\.mean: .*fills this buffer.* None.*cure: call register_buffer\('mean', torch\.zeros\(\(4,\)\)\)"
        chosen = program(nn.Sequential(Seen(True), nn.Linear(4, 3)), engine=engine)
        state = chosen.init(device="cpu")
        for _ in range(2):
            with pytest.raises(StepContractError, match=message):
                chosen.train_step(state, BATCHES[0])
        with pytest.raises(StepContractError, match=message):
            chosen.bind(state)(BATCHES[0][0])
        kept = nn.BatchNorm1d(4, track_running_stats=False)  # whose buffers stay None
        trained(program(nn.Sequential(kept, Seen(False), nn.Linear(4, 3)), engine=engine), BATCHES)

    def test_names_of_the_objective_are_reserved(self):
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.objective = nn.Linear(4, 3)

        with pytest.raises(StateError, match=r"objective\.weight: the name is reserved for the objective's own"):
            program(Net())


class Weighted(nn.Module):
    """A criterion that learns: class offsets, and a buffer that counts its calls."""

    def __init__(self, *, drop: float = 0.0) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(3))
        self.register_buffer("calls", torch.zeros(()))
        self.drop = nn.Dropout(drop)

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.calls.add_(1)
        return functional.cross_entropy(self.drop(outputs) + self.offset, targets)


class TestCriteriaWithTensors:
    def test_its_parameters_train_with_the_model_under_names_of_their_own(self):
        net, criterion = tiny_mlp(), Weighted()
        theirs = copy.deepcopy(criterion)
        state = trained(program(net, ps.supervised(criterion)), BATCHES)
        assert_same_weights(
            state._replace(params={k: v for k, v in state.params.items() if k != "objective.offset"}, buffers={}),
            trained_by_torch(net, BATCHES, theirs),
        )
        assert torch.allclose(state.params["objective.offset"], theirs.offset, atol=1e-6)
        assert float(state.buffers["objective.calls"]) == 4
        assert float(criterion.calls) == 0
        assert not criterion.offset.any()

    def test_it_has_the_mode_of_the_step(self):
        objective = ps.supervised(Weighted(drop=0.5).eval())
        chosen = program(tiny_mlp(), objective)
        losses = {float(chosen.train_step(chosen.init(seed, device="cpu"), BATCHES[0])[1]["loss"]) for seed in range(3)}
        assert len(losses) == 3
        state = chosen.init(device="cpu")
        with pytest.warns(UserWarning, match="the model writes the buffer objective.calls in eval mode"):
            assert len({float(chosen.eval_step(state, BATCHES[0], index=index)["loss"]) for index in range(3)}) == 1

    def test_class_weights_are_a_buffer_in_the_state_and_follow_it(self):
        weight = torch.tensor([1.0, 2.0, 4.0])
        chosen = program(tiny_mlp(), ps.supervised(nn.CrossEntropyLoss(weight=weight)))
        state = chosen.init(device="cpu")
        assert torch.equal(state.buffers["objective.weight"], weight)
        _, y = BATCHES[0]
        _, metrics = chosen.train_step(state, BATCHES[0])
        assert float(metrics["loss"].weight) == weight[y].sum()
        other = state._replace(buffers={"objective.weight": torch.tensor([0.0, 0.0, 8.0])})
        assert float(chosen.train_step(other, BATCHES[0])[1]["loss"].weight) == 8 * (y == 2).sum()

    def test_ties_inside_of_it_hold(self):
        class Two(Weighted):
            def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
                return functional.cross_entropy(outputs + self.offset + self.other, targets)

        tied = Two()
        tied.other = tied.offset
        net = tiny_mlp()
        theirs = copy.deepcopy(tied)
        state = trained(program(net, ps.supervised(tied)), BATCHES)
        trained_by_torch(net, BATCHES, theirs)
        assert torch.allclose(state.params["objective.offset"], theirs.offset, atol=1e-6)
        assert "objective.other" not in state.params

    def test_a_parameter_it_shares_with_the_model_is_one(self):
        net = tiny_mlp()

        class Decay(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.bias = net[2].bias

            def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
                return functional.cross_entropy(outputs, targets) + self.bias.square().sum()

        theirs, criterion = copy.deepcopy((net, Decay()))
        optimizer = torch.optim.SGD(theirs.parameters(), LR)
        for x, y in BATCHES:
            optimizer.zero_grad()
            criterion(theirs(x), y).backward()
            optimizer.step()
        state = trained(program(net, ps.supervised(Decay())), BATCHES)
        assert set(state.params) == {name for name, _ in net.named_parameters()}
        assert_same_weights(state, theirs)


class NumberInForward(nn.Linear):
    """Counts its calls in a Python number, as for a warm-up inside of the model."""

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.calls, self.longest, self.at = 0, 0, 0

    def forward(self, x: Tensor) -> Tensor:
        self.longest = max(self.longest, len(x))  # as a cache of positions: it changes once
        self.at = len(x)
        if self.training:
            self.calls += 1
        return super().forward(x) * min(1.0, self.calls / 10)


COUNTED = r"0\.calls: the forward pass changes this Python number .*cure: count in a buffer: .*register_buffer\('calls'"


def test_a_counter_in_forward_is_refused_at_its_second_call():
    made = program(nn.Sequential(NumberInForward()))
    state = made.init()
    state, _ = made.train_step(state, vector_batch())
    for _ in range(2):
        with pytest.raises(StepContractError, match=COUNTED):
            made.train_step(state, vector_batch())
    made.eval_step(state, vector_batch())
    made.eval_step(state, vector_batch())


def test_a_counter_is_refused_by_the_checks_of_a_step():
    made, batch = program(nn.Sequential(NumberInForward())), vector_batch()
    with pytest.raises(StepContractError, match=COUNTED):
        ps.testing.assert_pure(made.train_step, made.init(), batch)
    made = program(nn.Sequential(NumberInForward()))
    with pytest.raises(StepContractError, match=COUNTED):
        ps.fit(made.init(), [batch] * 3, made, epochs=1, progress=False)


@pytest.mark.compile
def test_a_counter_is_refused_by_a_graph():
    made = program(nn.Sequential(NumberInForward()))
    step = ps.compile_step(made.train_step, backend="aot_eager")
    with pytest.raises(StepContractError, match=r"0\.\w+: the forward pass changes this Python number"):
        step(made.init(), vector_batch())


class Places(nn.Linear):
    """Counts in one of several places."""

    total = 0

    def __init__(self, place: str) -> None:
        super().__init__(4, 3)
        self.place = place
        self.named, self.listed = {"calls": 0}, [0.0]
        self.box, self.part = SimpleNamespace(calls=0), nn.Identity()
        self.part.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.place == "a dict":
            self.named["calls"] += 1
        elif self.place == "a list":
            self.listed[0] += 0.5
        elif self.place == "an object":
            self.box.calls += 1
        elif self.place == "a submodule":
            self.part.calls += 1
        elif self.place == "the class":
            type(self).total += 1
        return super().forward(x)


COUNTERS = {
    "a dict": r"named\['calls'\]",
    "a list": r"listed\[0\]",
    "an object": r"box\.calls",
    "a submodule": r"part\.calls",
    "the class": r"Places\.total",
}


@pytest.mark.compile
@pytest.mark.parametrize("place", COUNTERS)
def test_a_counter_one_level_deep_is_refused(place: str):
    made = program(Places(place))
    state, _ = made.train_step(made.init(), vector_batch())
    with pytest.raises(StepContractError, match=f"^{COUNTERS[place]}: the forward pass changes this Python number"):
        made.train_step(state, vector_batch())
    made = program(Places(place))
    with pytest.raises(StepContractError, match=f"^{COUNTERS[place]}: the forward pass changes this Python number"):
        ps.compile_step(made.train_step, backend="aot_eager")(made.init(), vector_batch())
    made = program(Places("nowhere"))
    for _ in range(3):
        made.train_step(made.init(), vector_batch())


def test_a_counter_in_a_buffer_is_the_cure():
    class Buffered(NumberInForward):
        def __init__(self) -> None:
            super().__init__()
            del self.calls
            self.register_buffer("calls", torch.tensor(0))

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.calls = self.calls + 1
            return nn.functional.linear(x, self.weight, self.bias) * (self.calls / 10).clamp(max=1.0)

    made = program(Buffered())
    state = made.init()
    for _ in range(4):
        state, _ = made.train_step(state, vector_batch())
    assert int(state.buffers["calls"]) == 4
