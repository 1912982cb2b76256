"""Draws from numpy's and Python's global generators inside of a step: they depend on the state's key alone, so that the
step is pure and a run can be resumed."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_trees_close, vector_batch
from torch import Tensor, nn

import purestep as ps
from purestep import testing

fit = partial(ps.fit, progress=False)


class Mask(nn.Linear):
    """SpecAugment's kind: what is masked is drawn by numpy."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.masked_fill(torch.from_numpy(np.random.random(tuple(x.shape)) < 0.3), 0.0))


class LayerDrop(nn.Linear):
    """A layer is left out by Python's generator."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if random.random() < 0.5 else x + 1)


class Normal(nn.Linear):
    """Normal numbers come in pairs, of which the generators keep the second one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + np.random.normal()) * random.gauss(1.0, 0.1)


class All(nn.Linear):
    """From the three generators, in no order of their own."""

    def forward(self, x: Tensor) -> Tensor:
        order = np.random.permutation(len(x))
        return super().forward(nn.functional.dropout(x * random.uniform(0.5, 1.0), 0.3) + torch.rand(1) + order[0])


KINDS: list[Callable[..., nn.Module]] = [Mask, LayerDrop, Normal, All]


def program(made: Callable[..., nn.Module], **options: Any) -> ps.Program:
    torch.manual_seed(0)
    loss = ps.supervised(nn.CrossEntropyLoss())
    return ps.program(made(4, 3), loss, ps.optim.sgd(0.1, momentum=0.9), **options)


def states() -> Any:
    kind, keys, *rest = np.random.get_state()
    return kind, np.asarray(keys).tolist(), rest, random.getstate(), torch.get_rng_state().tolist()


def batches(count: int) -> list[Any]:
    return [vector_batch(8, seed) for seed in range(count)]


@pytest.mark.parametrize("options", [{}, {"microbatches": 2}, {"accumulate": 2}, {"engine": "func"}], ids=str)
@pytest.mark.parametrize("made", KINDS)
def test_a_step_that_draws_on_the_host_is_pure(made: Callable[..., nn.Module], options: dict[str, Any]) -> None:
    trained = program(made, **options)
    state, before = trained.init(seed=7), states()
    testing.assert_pure(trained.train_step, state, vector_batch())
    testing.assert_pure(lambda s, b: (s, trained.eval_step(s, b)), state, vector_batch())
    assert states() == before


@pytest.mark.parametrize("made", KINDS)
def test_draws_on_the_host_depend_on_the_key_and_on_nothing_else(made: Callable[..., nn.Module]) -> None:
    def losses(seed: int, callers: int, first: ps.Program | None = None) -> list[float]:
        trained = first or program(made)
        np.random.seed(callers)
        random.seed(callers)
        state, found = trained.init(seed=seed), list[float]()
        for _ in range(8):
            stepped, metrics = trained.train_step(state, vector_batch())
            state = state._replace(key=stepped.key)  # of the same weights
            found.append(float(metrics["loss"]))
        return found

    known = program(made)
    one = losses(7, 0, known)
    assert losses(7, 1) == one
    assert losses(7, 2, known) == one  # which draws from its seed at once
    assert len(set(one)) > 1
    assert losses(8, 0) != one


def test_a_program_that_draws_late_is_seeded_from_then_on() -> None:
    class Late(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * random.random() if float(x[0, 0].detach()) > 0 else x)

    trained = program(Late)
    x, y = vector_batch()
    up, down = x.abs(), -x.abs()
    random.seed(1)
    before = random.getstate()
    state = trained.init()
    for _ in range(11):  # of a curriculum
        state, _ = trained.train_step(state, (down, y))
    first, _ = trained.train_step(state, (up, y))
    second, _ = trained.train_step(state, (up, y))
    assert random.getstate() == before
    assert_trees_close(first, second, exact=True)
    other = program(Late)
    again = other.init()
    for _ in range(11):
        again, _ = other.train_step(again, (down, y))
    random.seed(2)
    assert_trees_close(other.train_step(again, (up, y))[0], first, exact=True)


def test_generators_are_put_back_where_a_step_fails() -> None:
    class Fails(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            np.random.random(3)
            np.random.normal()
            random.gauss(0, 1)
            raise ValueError("no room")

    trained = program(Fails)
    np.random.normal()
    random.gauss(0, 1)  # each leaves the half of a pair
    before = states()
    for _ in range(2):
        with pytest.raises(ValueError, match="no room"):
            trained.train_step(trained.init(), vector_batch())
        assert states() == before


@pytest.mark.parametrize("kind", [np.random.PCG64, np.random.SFC64, np.random.MT19937])
def test_another_kind_of_numpys_generator_is_put_back(kind: Any) -> None:
    usual: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    np.random.set_bit_generator(kind(5))  # type: ignore[attr-defined]
    try:
        before = np.random.get_state(legacy=False)
        trained = program(Mask)
        for _ in range(2):
            one, other = (trained.train_step(trained.init(), vector_batch())[0] for _ in range(2))
            assert_trees_close(one, other, exact=True)
        assert str(np.random.get_state(legacy=False)) == str(before)
    finally:
        np.random.set_bit_generator(usual)  # type: ignore[attr-defined]


@pytest.mark.parametrize("made", KINDS)
def test_a_run_is_resumed_bit_for_bit(made: Callable[..., nn.Module], tmp_path: Path) -> None:
    trained, data = program(made), batches(4)
    whole = fit(trained.init(), data, trained, epochs=3)
    fit(trained.init(), data, trained, epochs=1, snapshots=tmp_path / "run")
    again = program(made)
    random.seed(5)
    resumed = fit(again.init(), data, again, epochs=3, snapshots=tmp_path / "run")
    assert_trees_close(resumed.state, whole.state, exact=True)


@pytest.mark.parametrize("compiles", [False, pytest.param(True, marks=pytest.mark.compile)])
def test_numpys_global_generator_may_be_of_another_kind(compiles: bool) -> None:
    """`fit` reads its state to see whether a step draws, as does the capture of a graph."""
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(5))
    try:
        trained = program(nn.Linear if compiles else Mask)
        ways = {"compile": {"backend": "aot_eager"}} if compiles else {}
        result = fit(trained.init(), batches(3), trained, epochs=1, **ways)
        assert (int(result.state.updates), type(np.random.get_bit_generator())) == (3, np.random.PCG64)
    finally:
        np.random.set_bit_generator(before)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("family", ["Wav2Vec2", "Hubert", "SEW"])
def test_spec_augment_trains_and_resumes(family: str, tmp_path: Path) -> None:
    hf = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    sound = {"conv_dim": [8, 8], "conv_stride": [5, 4], "conv_kernel": [10, 8], "num_feat_extract_layers": 2}
    masks = {"mask_time_prob": 0.4, "mask_time_length": 3, "mask_feature_prob": 0.2, "mask_feature_length": 2}
    small = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "vocab_size": 12, "layerdrop": 0.0}
    config = getattr(hf, f"{family}Config")(**sizes, **sound, **masks, **small, apply_spec_augment=True)
    torch.manual_seed(0)
    model, draw = getattr(hf, f"{family}ForCTC")(config), torch.Generator().manual_seed(1)
    trained = ps.program(model, ps.hf_loss(), ps.optim.adamw(1e-3))
    data = [
        {
            "input_values": torch.randn(2, 800, generator=draw),
            "labels": torch.randint(1, 12, (2, 4), generator=draw),
        }
        for _ in range(2)
    ]
    run = partial(fit, trained.init(), data, trained, compile="auto")
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        whole = run(epochs=2)
        run(epochs=1, snapshots=tmp_path / "run")
        resumed = run(epochs=2, snapshots=tmp_path / "run")
    assert_trees_close(resumed.state, whole.state, exact=True)
    assert whole.state.updates == 4
