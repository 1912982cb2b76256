"""``restore(only="params")``: read the view ``"params"`` of a TrainState (parameters and buffers), and its average.

The snapshot and the template may differ in which parameters are trained, so a parameter is searched among the trained
and the frozen ones. The average of a parameter without an average is the parameter itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from .. import tree
from ..types import TrainState, Tree

WORD = "params"


def sources(template: Tree, prefix: str, stored: Collection[str]) -> dict[str, str] | None:
    """Map paths in the template to paths in the snapshot, for the weights, buffers and averages of a TrainState.

    Args:
        template: the template of the restored state.
        prefix: the value of ``only``: ``"params"``, or ``"generator/params"`` for a TrainState inside a tree.
        stored: the paths of the snapshot.

    Returns:
        The mapping, or None if the prefix does not end in "params" or the template has no TrainState there. A leaf that
        the snapshot lacks maps to its own path.
    """
    root, _, word = prefix.rpartition("/")
    above = f"{root}/" if root else ""
    states = tree.with_paths(template, is_leaf=lambda node: isinstance(node, TrainState))
    if word != WORD or not any(path == root and isinstance(node, TrainState) for path, node in states):
        return None
    known = frozenset(stored)
    return {
        path: next((above + found for found in _candidates(path.removeprefix(above)) if above + found in known), path)
        for path in tree.paths(template)
        if path.startswith(above) and path.removeprefix(above).split("/")[0] in ("params", "frozen", "buffers", "ema")
    }


def _candidates(path: str) -> Iterator[str]:
    yield path
    field, _, name = path.partition("/")
    if field == "ema":
        field, _, name = name.partition("/")
        yield f"{field}/{name}"
    if field in ("params", "frozen"):
        yield f"{'frozen' if field == 'params' else 'params'}/{name}"
