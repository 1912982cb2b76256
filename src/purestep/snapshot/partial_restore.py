"""What ``only="params"`` reads of a snapshot: the view ``"params"`` of a TrainState, and its average.

That view is what evaluation runs: parameters, trained or frozen, and buffers.

Which parameters are trained may differ between the snapshot and the template: a parameter is looked for among the
trained and the frozen ones. The average of a parameter that was not averaged is the parameter itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from .. import tree
from ..types import TrainState, Tree

WORD = "params"


def sources(template: Tree, prefix: str, stored: Collection[str]) -> dict[str, str] | None:
    """Path in the template -> path in the snapshot, of the weights, buffers and averages of a TrainState.

    Args:
        template: the state to restore into.
        prefix: what ``only`` says: ``"params"``, or ``"generator/params"`` for a TrainState inside a tree.
        stored: the paths of the snapshot.

    Returns:
        None for another word, or where the template has no TrainState. A leaf that the snapshot lacks is mapped to its
        own path.
    """
    root, _, word = prefix.rpartition("/")
    above = f"{root}/" if root else ""
    if word != WORD or not isinstance(_part(template, root), TrainState):
        return None
    known = frozenset(stored)
    return {
        path: next((above + found for found in _candidates(path.removeprefix(above)) if above + found in known), path)
        for path in tree.paths(template)
        if path.startswith(above) and path.removeprefix(above).split("/")[0] in ("params", "frozen", "buffers", "ema")
    }


def _part(template: Tree, root: str) -> Tree:
    for name in filter(None, root.split("/")):
        fields = getattr(template, "_fields", None)
        if isinstance(template, dict):
            template = next((value for key, value in template.items() if str(key) == name), None)
        elif fields is not None:
            template = getattr(template, name, None)
        elif isinstance(template, list | tuple):
            template = template[int(name)] if name.isdecimal() and int(name) < len(template) else None
        else:
            return None
    return template


def _candidates(path: str) -> Iterator[str]:
    yield path
    field, _, name = path.partition("/")
    if field == "ema":
        field, _, name = name.partition("/")
        yield f"{field}/{name}"
    if field in ("params", "frozen"):
        yield f"{'frozen' if field == 'params' else 'params'}/{name}"
