"""Work-arounds for faults of inductor, a file each: what goes wrong, in which versions of torch, and the test for it.

    aliasing          wrong numbers: a copy of an old value, read after the value was overwritten
    mixed_reductions  wrong numbers on CUDA: a sum that is a piece of a concatenation
    scalar_views      scalars computed again in every kernel
    permutations      an index by `torch.randperm` does not compile
    philox            failed launches on CUDA: the random state of attention kernels
    early_reductions  memory: losses and metrics that wait for the end of a step
    inplace_reuse     memory: results that do not reuse the memory of their inputs

A file names the issue of torch where one is known. A file whose test passes without it goes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import (
    aliasing,
    early_reductions,
    inplace_reuse,
    mixed_reductions,
    permutations,
    philox,
    scalar_views,
)

PASS = "post_grad_custom_post_pass"
"""The option of inductor whose passes are the last ones that change a graph."""

_PASSES = (aliasing, philox, early_reductions, mixed_reductions, scalar_views)


before = permutations.fix
"""Changes a graph before inductor's first passes."""


def options(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """Add the fixes to a user's options of inductor, which override them. Loads inductor."""
    from torch._inductor import config, custom_graph_pass

    for module in (aliasing, philox, early_reductions):
        module.register()
    given, settings, passes = dict(given or {}), config, custom_graph_pass
    theirs: Any = given.get(PASS, getattr(settings, PASS, None))
    each: tuple[Any, ...] = tuple(theirs) if isinstance(theirs, list | tuple) else (theirs,) if theirs else ()
    aware: Any = getattr(passes, "CustomInferenceAwareGraphPass", None)  # torch 2.11 has none

    class Passes(aware or passes.CustomGraphPass):
        def __call__(self, graph: Any, is_inference: bool = False) -> None:
            for one in each:
                known = {"is_inference": is_inference} if aware and isinstance(one, aware) else {}
                one(graph, **known)
            for module in _PASSES:
                module.fix(graph)

        def uuid(self) -> Any:
            """The key for inductor's cache, which stores no graph compiled with a pass without a key."""
            found = [one.uuid() if isinstance(one, passes.CustomGraphPass) else None for one in each]
            files = (__file__, *(str(module.__file__) for module in _PASSES))
            return (passes.get_hash_for_files(files), *found) if all(found) else None

    return {**inplace_reuse.option(given), **given, PASS: Passes()}
