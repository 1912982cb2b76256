"""The committed table of layers is what torch does: some rows are computed again."""

from __future__ import annotations

import pytest
import torch
from layers import COLUMNS, LAYERS, PAGE, verdict

TEXT = PAGE.read_text(encoding="utf-8")


def rows() -> dict[str, list[str]]:
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in TEXT.splitlines() if line[:1] == "|"]
    return {name: found for name, *found in cells[2:]}


def test_every_layer_has_a_row():
    assert list(rows()) == list(LAYERS)
    assert len(LAYERS) > 40


@pytest.mark.skipif(f"torch {torch.__version__.split('+')[0]}," not in TEXT, reason="the table is of another torch")
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
@pytest.mark.parametrize("name", ["LSTM", "GRUCell", "MultiheadAttention", "BatchNorm1d, train", "RReLU", "cdist"])
def test_a_row_is_true(name: str):
    assert rows()[name] == [verdict(column, name) for column in COLUMNS]
