"""Twelve models of the zoo; `python -m tests.rigs.zoo` trains all of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from rigs.zoo import compare, families, models, table
from torch import nn

import purestep as ps
from purestep.compile.cpu import backend as native

pytestmark = pytest.mark.compile
SEVEN = {
    "GPT2LMHeadModel": "transformers",
    "BertForMaskedLM": "transformers",
    "LlamaForCausalLM": "transformers",
    "T5ForConditionalGeneration": "transformers",
    "MixtralForCausalLM": "transformers",
    "ViTForImageClassification": "transformers",
    "DetrForObjectDetection": "transformers",
}
"""Of transformers, beside the five of plain torch."""
REFUSED = "DetrForObjectDetection"  # its matcher is scipy's, on the host


def known() -> dict[str, compare.Entry]:
    rows = {entry.name: entry for entry in [*models.PLAIN, *families.entries()]}
    rows.setdefault("BertForMaskedLM", families.row("bert", "masked"))
    return rows


@pytest.mark.parametrize("name", [*(entry.name for entry in models.PLAIN), *SEVEN])
def test_a_model_trains_as_a_loop_by_hand_and_its_weights_load(name: str) -> None:
    if name in SEVEN:
        pytest.importorskip("transformers")
    row = compare.compared(known()[name], backend="aot_eager")
    assert not row.wrong, table.line(row)
    assert row.ways["eager"].startswith(("equal", "rounding"))
    for way in ("compiled", "donated"):
        if name == REFUSED:
            assert row.ways[way].startswith("refused: modeling_detr.py"), row.ways[way]
            assert "cure" in row.ways[way]
        else:
            assert row.ways[way].startswith(("equal", "rounding")), row.ways[way]


@pytest.mark.optimized
@pytest.mark.parametrize("name", ["dead draws and asserts", "ConvNeXt"])
def test_dropout_draws_the_same_through_inductor(name: str) -> None:
    row = compare.compared(known()[name], ways=("compiled", "donated"))
    assert set(row.ways.values()) == {"equal"}, table.line(row)
    assert not row.wrong, table.line(row)


# --- what is wrong is found -------------------------------------------------------------------------------------------


def cnn() -> compare.Entry:
    return models.labelled("planted", "torch", models.cnn)


def planted(monkeypatch: pytest.MonkeyPatch, change: Any) -> compare.Row:
    """The row where each eager step's new state is changed."""
    true = compare._stepped

    def stepped(program: Any, step: Any, given: list[Any]) -> Any:
        return true(program, lambda state, batch: change(state, *step(state, batch)), given)

    monkeypatch.setattr(compare, "_stepped", stepped)
    return compare.compared(cnn(), ways=("eager",), backend="aot_eager")


def a_gradient_that_is_wrong(before: Any, state: Any, metrics: Any) -> Any:
    name = "5.weight"
    moved = before.params[name] + (state.params[name] - before.params[name]) * 1.01
    return state._replace(params={**state.params, name: moved}), metrics


def a_buffer_that_stands(before: Any, state: Any, metrics: Any) -> Any:
    return state._replace(buffers={**state.buffers, "1.running_var": before.buffers["1.running_var"]}), metrics


def a_loss_that_is_wrong(before: Any, state: Any, metrics: Any) -> Any:
    mean = metrics["loss"]
    return state, {**metrics, "loss": ps.Mean(mean.total * 1.01, mean.weight)}


@pytest.mark.parametrize(
    ("change", "leaf"),
    [(a_gradient_that_is_wrong, "5.weight"), (a_buffer_that_stands, "1.running_var"), (a_loss_that_is_wrong, "loss ")],
)
def test_a_planted_difference_is_found(monkeypatch: pytest.MonkeyPatch, change: Any, leaf: str) -> None:
    row = planted(monkeypatch, change)
    assert row.wrong
    assert row.ways["eager"].startswith(f"DIFFERENT: {leaf}"), row.ways["eager"]


def test_a_batch_that_is_written_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    true = compare._stepped

    def stepped(program: Any, step: Any, given: list[Any]) -> Any:
        found = true(program, step, given)
        given[0][0].add_(1)
        return found

    monkeypatch.setattr(compare, "_stepped", stepped)
    assert compare.compared(cnn(), ways=("eager",)).notes == ("eager: the batch has been written to",)


def test_an_export_that_lacks_a_weight_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    true = ps.export_weights

    def lacking(path: Path, program: Any, state: Any) -> None:
        true(path, program, state, only="0.*")

    monkeypatch.setattr(ps, "export_weights", lacking)
    notes = compare.compared(cnn(), ways=("eager",)).notes
    assert len(notes) == 2
    assert all("Error(s) in loading state_dict" in note for note in notes)


# --- the table --------------------------------------------------------------------------------------------------------


def test_a_model_that_refuses_has_a_row_that_says_why() -> None:
    def make() -> nn.Module:
        raise ValueError("too large:\n more")

    row = compare.compared(models.labelled("huge", "torch", make), ways=("eager", "compiled"))
    assert not row.wrong
    assert table.line(row) == "| huge | torch | 0 | not built: too large: | the same | - |"
    page = table.text([row], {"torch": "2"}, "inductor")
    assert "1 models, 0 wrong, 1 not trained by plain torch." in page
    assert table.line(row) not in page


def test_a_number_that_is_not_finite_by_hand_is_no_row_of_the_comparison() -> None:
    class Broken(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * float("nan")

    row = compare.compared(models.labelled("nan", "torch", lambda: Broken(4, 3), (4,)), ways=("eager",))
    assert row.ways["eager"].startswith("not finite by hand")


@pytest.mark.usefixtures("cpu_plugin")
def test_native_code_that_is_given_up_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "compiled", lambda *_, **__: 1 / 0)
    small = models.labelled("planted", "torch", lambda: nn.Linear(4, 3), (4,))
    notes = compare.compared(small, ways=("donated",)).notes  # one for each graph
    assert set(notes) == {"donated: native code given up: division by zero"}
