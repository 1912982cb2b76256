"""Intermediate results computed in the memory of their inputs, in graphs that also write the weights.

A donated step reads the weights, and writes the new ones at its end. Inductor orders this write after every reader of
the old weights by a dependency on the reader's result, and then counts the write as a reader of this result. So it
computes nothing in the memory of a result of a weight: the gradient of the logits, often the largest tensor, gets new
memory. Here these readers, which read nothing, are removed when the order is fixed. A dependency that orders the write
after readers of a view of the weights stays.

Private names: ``torch._inductor.config._post_fusion_custom_pass``, and of ``torch._inductor.scheduler`` ``users`` of a
buffer, ``get_outputs`` and ``read_writes`` of a node, ``is_fake`` of a dependency.

Without: the peak memory of a step is higher by its largest intermediate result (torch 2.13 and 2.14; torch 2.11 has no
passes over its schedule).

Test: `test_inplace_reuse.py`, ``test_the_public_entry_of_inductor_has_the_pass_too``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

OPTION = "_post_fusion_custom_pass"


def option(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return inductor's option with the pass; empty if the user sets the option or this torch has no such passes."""
    from torch._inductor import config

    if getattr(config, OPTION, None) is not None or OPTION in (options or {}):
        return {}
    made = _pass()
    return {} if made is None else {OPTION: made}


@functools.cache
def _pass() -> Any:
    """The pass as inductor's class, which gives it a key for inductor's cache; None if this torch has no such class."""
    from torch._inductor import custom_graph_pass

    passes: Any = custom_graph_pass
    kind = getattr(passes, "CustomSchedulerPass", None)
    if kind is None:
        return None

    class Pass(kind):
        def __call__(self, nodes: list[Any]) -> list[Any]:
            return without_ordering_users(nodes)

        def uuid(self) -> Any:
            return passes.get_hash_for_files((__file__,))

        def __reduce__(self) -> Any:  # inductor pickles its configuration
            return _pass, ()

    return Pass()


def without_ordering_users(nodes: list[Any]) -> list[Any]:
    """Remove users of a buffer that only run after its computation and do not read it.

    Args:
        nodes: of inductor's scheduler, after fusion; their buffers are changed.
    """
    for node in nodes:
        for buffer in node.get_outputs():
            buffer.users = [user for user in buffer.users if not _only_orders(user, buffer.get_name())]
    return nodes


def _only_orders(user: Any, name: str) -> bool:
    """True if the user's only dependencies on the buffer are for the order of nodes."""
    if not user.is_weak:
        return False
    found = [dep for dep in user.node.read_writes.reads if dep.name == name]
    return bool(found) and all(getattr(dep, "is_fake", False) for dep in found)
