"""Work-arounds for inductor's code on a GPU: without each, its code has the fault."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch._inductor.utils import run_and_get_code

import purestep as ps
from purestep.compile.inductor_fixes import mixed_reductions

ROWS, WIDTH = 1 << 13, 768


@pytest.mark.parametrize("is_fixed", [True, False])
def test_sums_that_are_parts_of_a_concatenation_are_read(is_fixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `mixed_reductions` no kernel reads them, and the concatenation is never written. Where inductor does
    that, `mixed_reductions` can go."""
    if not is_fixed:
        monkeypatch.setattr(mixed_reductions, "fix", lambda graph: None)

    def step(state: Any, batch: Any) -> Any:
        x, wanted = batch
        both = torch.cat([(x * wanted).sum(0), wanted.sum(0)])
        return {"both": both, "rows": (x * wanted).sum(1)}, {}

    batch = tuple(torch.empty(2, ROWS, WIDTH, device="cuda"))
    state = {"both": torch.empty(2 * WIDTH, device="cuda"), "rows": torch.empty(ROWS, device="cuda")}
    _, found = run_and_get_code(ps.compile_step(step, options={"fx_graph_cache": False}), state, batch)
    code = "".join(found)
    sums = re.findall(r"(buf\d+) = workspace_0", code)
    read = set(re.findall(r"buf\d+", " ".join(re.findall(r"\.run\((.*)\)", code))))
    assert len(sums) == 2
    assert read.issuperset(sums) == is_fixed
