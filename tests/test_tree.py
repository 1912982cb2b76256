from __future__ import annotations

from collections import UserDict, namedtuple
from typing import Any, NamedTuple

import pytest
import torch
from helpers import assert_trees_close
from hypothesis import given, settings
from hypothesis import strategies as st

from purestep import tree
from purestep.torch_ext import tensor_layout
from purestep.types import Empty


class Pair(NamedTuple):
    left: Any
    right: Any


def node(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from(["b", "a", "c.d", "z"]), children, max_size=3),
        st.builds(Pair, children, children),
        st.just(Empty()),
    )


TREES = st.recursive(st.floats(allow_nan=False), node, max_leaves=12)


def test_leaves_come_in_sorted_order_of_the_keys():
    assert tree.leaves({"b": 1, "a": (2, [3]), "c": None}) == [2, 3, 1]


def test_none_and_empty_are_nodes_without_leaves():
    assert tree.leaves([None, Empty(), 1]) == [1]


def test_paths_name_fields_keys_and_indices():
    state = {"opt": (Pair(1, {"layers.0.weight": 2}), [3])}
    assert tree.with_paths(state) == [("opt/0/left", 1), ("opt/0/right/layers.0.weight", 2), ("opt/1/0", 3)]
    assert tree.paths(state) == ["opt/0/left", "opt/0/right/layers.0.weight", "opt/1/0"]
    assert tree.paths(7) == [""]


@settings(deadline=None)
@given(TREES)
def test_unflatten_is_the_way_back(found: Any):
    leaves, treedef = tree.flatten(found)
    assert leaves == tree.leaves(found)
    back = tree.unflatten(treedef, leaves)
    assert back == found
    assert type(back) is type(found)


@settings(deadline=None)
@given(TREES)
def test_clone_keeps_the_types_of_the_nodes(found: Any):
    assert tree.flatten(tree.clone(found))[1] == tree.flatten(found)[1]


def test_unflatten_makes_the_classes_that_went_in():
    leaves, treedef = tree.flatten({"a": Pair(1, [2, (3,)])})
    filled: Any = tree.unflatten(treedef, leaves)
    assert type(filled["a"]) is Pair
    assert type(filled["a"].right) is list
    assert type(filled["a"].right[1]) is tuple


def test_map_takes_corresponding_leaves_and_a_leaf_of_ones_own():
    assert tree.map(lambda a, b: a + b, {"a": 1, "b": (2,)}, {"a": 10, "b": (20,)}) == {"a": 11, "b": (22,)}
    assert tree.map(len, [(1, 2), (3,)], is_leaf=lambda x: isinstance(x, tuple)) == [2, 1]
    with pytest.raises(ValueError, match="dict"):
        tree.map(lambda a, b: a, {"a": 1}, (1,))


def test_where_chooses_whole_trees_on_the_device_and_keeps_bits():
    old = {"w": torch.tensor([1.0, float("nan")]), "n": torch.tensor(3)}
    new = {"w": torch.tensor([2.0, 5.0]), "n": torch.tensor(4)}
    assert_trees_close(tree.where(torch.tensor(True), new, old), new, exact=True)
    assert_trees_close(tree.where(torch.tensor(False), new, old), old, exact=True)
    assert tree.where(torch.tensor(False), old, old)["w"] is old["w"]


def test_a_clone_is_independent_and_keeps_the_memory_layout():
    image = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    number = object()
    found = {"w": torch.zeros(2, requires_grad=True), "image": image, "other": number}
    copy = tree.clone(found)
    copy["w"].add_(1)
    copy["image"].add_(1)
    assert found["w"].tolist() == [0, 0]
    assert not found["image"].any()
    assert not copy["w"].requires_grad
    assert copy["image"].stride() == image.stride()
    assert copy["other"] is number


def test_detach_shares_memory_and_drops_the_graph():
    w = torch.zeros(2, requires_grad=True)
    found = tree.detach({"y": w * 2, "n": 3})
    assert not found["y"].requires_grad
    assert found["n"] == 3
    assert tree.detach([w])[0].data_ptr() == w.data_ptr()


@pytest.mark.parametrize(
    ("other", "same"),
    [
        ((torch.ones(2), 1), True),
        ((torch.ones(3), 1), False),
        ((torch.ones(2, dtype=torch.float64), 1), False),
        ((torch.ones(2, device="meta"), 1), False),
        ((torch.ones(2), 2), False),
        ((torch.ones(2), 1.0), False),
        ([torch.ones(2), 1], False),
    ],
)
def test_a_signature_is_what_a_graph_depends_on(other: Any, same: bool):
    assert (tree.signature((torch.zeros(2), 1)) == tree.signature(other)) is same


def test_mappings_that_are_no_nodes_become_dicts():
    class Encoding(UserDict):
        pass

    inner = Encoding(ids=1, more=Encoding(mask=2))
    assert tree.dicts((inner, 3)) == ({"ids": 1, "more": {"mask": 2}}, 3)
    assert type(tree.dicts((inner, 3))[0]) is dict
    plain = ({"a": 1}, [2])
    assert tree.dicts(plain) is plain
    tensor = torch.ones(2)
    assert tree.dicts(tensor) is tensor


Base = namedtuple("Base", ["first", "second"])


class Live(Base):
    """A subclass whose children are not what iterating over it gives."""


tree.register(Live, lambda node: (node.first, ("seen", *node.second)), lambda first, second: Live(first, second[1:]))


def test_a_registered_class_is_seen_through_its_own_functions():
    live = Live(1, (2,))
    assert tree.with_paths(live) == [("first", 1), ("second/0", "seen"), ("second/1", 2)]
    back = tree.map(lambda leaf: leaf, live)
    assert type(back) is Live
    assert back == live


def test_registering_touches_no_other_namespace():
    import optree

    assert optree.tree_leaves(Live(1, (2,))) == [1, 2]


@pytest.mark.parametrize(
    ("leaf", "expected"),
    [
        (torch.zeros(()), 1),
        (torch.zeros(2, 3), 6),
        (torch.zeros(2, 3).t(), 6),
        (torch.zeros(4, 6)[1:3, ::2], 11),
        (torch.zeros(1, 3).expand(5, 3), 3),
        (torch.zeros(0, 3), 0),
    ],
)
def test_how_far_a_tensor_reaches(leaf: torch.Tensor, expected: int):
    assert tensor_layout.extent(leaf) == expected
