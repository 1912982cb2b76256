from __future__ import annotations

import pytest
import torch
from helpers import assert_trees_close, count_graphs, least_squares, quadratic, rosenbrock, tiny_convnet, tiny_mlp

from purestep.types import Mean

ONE = {"a": torch.ones(2), "b": (torch.zeros((), dtype=torch.int64), 3)}


def changed(**fields: object) -> dict[str, object]:
    return {**ONE, **fields}


def test_equal_trees_pass():
    assert_trees_close(ONE, changed(), exact=True)
    assert_trees_close({"a": torch.tensor(float("nan"))}, {"a": torch.tensor(float("nan"))}, exact=True)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (changed(c=torch.ones(2)), r"should not be there: \['c'\]"),
        ({"a": ONE["a"]}, r"missing: \['b/0', 'b/1'\]"),
        (changed(b=[torch.zeros((), dtype=torch.int64), 3]), "containers of other types"),
        (changed(a=torch.ones(2, dtype=torch.float64)), "a: dtype torch.float64, not torch.float32"),
        (changed(a=torch.ones(2, 1)), r"a: shape torch.Size\(\[2, 1\]\), not torch.Size\(\[2\]\)"),
        (changed(a=torch.tensor([1.0, 1.001])), "(?s)a: .*not close"),
        (changed(a=7), "a: int, expected Tensor"),
        (changed(b=(ONE["b"][0], 4)), "b/1: 4, expected 3"),
    ],
)
def test_each_difference_is_named(other: object, message: str):
    with pytest.raises(AssertionError, match=message):
        assert_trees_close(other, ONE)


def test_exact_is_stricter_than_the_tolerance():
    almost = changed(a=torch.ones(2) * (1 + 1e-6))
    assert_trees_close(almost, ONE)
    with pytest.raises(AssertionError, match="a: "):
        assert_trees_close(almost, ONE, exact=True)


def test_a_named_tuple_is_not_a_tuple():
    with pytest.raises(AssertionError, match="should not be there"):
        assert_trees_close(Mean(torch.ones(()), torch.ones(())), (torch.ones(()), torch.ones(())))


@pytest.mark.parametrize("problem", [quadratic(), rosenbrock()], ids=["quadratic", "rosenbrock"])
def test_the_gradient_vanishes_at_the_minimum_only(problem):
    assert all(g.abs().max() < 1e-12 for g in problem.gradient(problem.minimum).values())
    assert any(g.abs().max() > 0.1 for g in problem.gradient(problem.params).values())


def test_the_closed_form_is_where_the_gradient_vanishes():
    module, (x, y), solution = least_squares()
    module.load_state_dict(solution)
    torch.nn.functional.mse_loss(module(x), y).backward()
    assert module.weight.grad is not None
    assert module.weight.grad.abs().max() < 1e-12


def test_models_depend_on_their_seed_and_leave_the_generator_alone():
    before = torch.get_rng_state()
    for make in (tiny_mlp, tiny_convnet):
        assert_trees_close(make(1).state_dict(), make(1).state_dict(), exact=True)
        with pytest.raises(AssertionError):
            assert_trees_close(make(1).state_dict(), make(2).state_dict())
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.compile
def test_graphs_are_counted():
    compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    with count_graphs() as graphs:
        compiled(torch.ones(2))
        compiled(torch.ones(2))
        assert graphs() == 1
        compiled(torch.ones(3))
        assert graphs() == 2
