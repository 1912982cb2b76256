"""Arguments that a function does not have, and names of other libraries: the error names ours."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

import purestep as ps
from purestep import optim
from purestep.errors import ConfigError
from purestep.state import known_keywords


def program(**more: Any) -> Any:
    return ps.program(nn.Linear(2, 1), ps.supervised(nn.MSELoss()), optim.sgd(0.1), **more)


@pytest.mark.parametrize(
    ("call", "where", "cure"),
    [
        (lambda: program(accumulation=4), "program", "accumulate=4"),
        (lambda: program(gradient_accumulation_steps=8), "program", "accumulate=8"),
        (lambda: program(precison="bf16-mixed"), "program", "precision='bf16-mixed'"),
        (lambda: program(lr=0.1), "program", "optim.adamw(learning_rate=1e-3)"),
        (lambda: program(epochs=3), "program", "ps.fit(..., epochs=10)"),
        (lambda: optim.adamw(lr=1e-3), "adamw", "learning_rate=0.001"),  # type: ignore[call-arg]
        (lambda: optim.sgd(lr=1e-3), "sgd", "learning_rate=0.001"),  # type: ignore[call-arg]
        (lambda: optim.adamw(1e-3, betas=(0.9, 0.95)), "adamw", "b1=0.9, b2=0.95"),  # type: ignore[call-arg]
        (lambda: optim.lion(1e-3, beta1=0.9), "lion", "b1=0.9"),  # type: ignore[call-arg]
        (lambda: optim.adam(1e-3, params=[]), "adam", "program.init() passes the parameters"),  # type: ignore[call-arg]
        (lambda: optim.clip_by_global_norm(max_grad_norm=1.0), "clip_by_global_norm", "max_norm=1.0"),  # type: ignore[call-arg]
        (lambda: ps.supervised(nn.MSELoss(), metric=3), "supervised", "metrics=3"),  # type: ignore[call-arg]
        (lambda: ps.schedules.cosine(1.0, 4, zzzz=1), "cosine", "one of "),  # type: ignore[call-arg]
    ],
)
def test_the_error_names_our_argument(call: Callable[[], Any], where: str, cure: str):
    with pytest.raises(ConfigError, match="has no argument") as caught:
        call()
    assert caught.value.where == where
    assert cure in caught.value.hint


SOURCE = Path(str(ps.__file__)).parent
RESULTS = ("Transform", "Schedule", "Objective", "Average", "Scaler", "Callable[..., Transform]", "Program")


def factories() -> dict[str, Callable[..., Any]]:
    """The public functions with named arguments of their own that build a program or a part of one."""
    found: dict[str, Callable[..., Any]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE).with_suffix("").parts
        if parts[0] not in ("optim", "schedules", "objective", "ema", "scaler", "step"):
            continue
        if parts[-1] == "complex_params":  # for files of optimizers, not for users
            continue
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.FunctionDef) or node.returns is None or node.name.startswith("_"):
                continue
            if (
                ast.unparse(node.returns) in RESULTS
                and node.args.kwarg is None
                and (node.args.args or node.args.kwonlyargs)
            ):
                found[node.name] = getattr(importlib.import_module(".".join(("purestep", *parts))), node.name)
    return found


@pytest.mark.parametrize("name", factories())
def test_every_factory_names_an_argument_that_it_does_not_have(name: str):
    factory = factories()[name]
    known = next(iter(inspect.signature(factory).parameters))
    with pytest.raises(ConfigError, match="has no argument") as caught:
        factory(**{f"{known}x": 3})
    assert caught.value.hint == f"{known}=3"


@pytest.mark.parametrize("name", ["accumulation", "accumulate_grad_batches", "gradient_accumulation_steps", "lr"])
def test_fit_names_the_function_that_has_the_setting(name: str):
    made = program()
    with pytest.raises(ConfigError, match=name) as caught:
        ps.fit(made.init(), [torch.ones(1)], made, epochs=1, **{name: 4})
    assert "program(..., accumulate=4)" in caught.value.hint or "optim.adamw" in caught.value.hint


def test_three_loaders_in_a_tuple_have_no_names():
    made, batches = program(), [(torch.ones(4, 2), torch.ones(4, 1))]
    with pytest.raises(ConfigError, match="a tuple of 3") as caught:
        ps.fit(made.init(), (batches, batches, batches), made, epochs=1)
    assert '{"train": train, "val": val, "test": test}' in caught.value.hint
    with pytest.raises(ConfigError, match="a tuple of 1"):
        ps.fit(made.init(), (batches,), made, epochs=1)
    assert ps.fit(made.init(), (batches, batches), made, epochs=1, progress=False).epochs == 1


def _chosen(kind: Literal["a", "b"] | None = None, way: bool | Literal["init"] = False, free: str | int = 0) -> None:
    del kind, way, free


def test_literals_of_a_type_are_its_values():
    chosen: Any = known_keywords(_chosen)
    valid: list[dict[str, Any]] = [{"kind": "a"}, {"kind": None}, {"way": True}, {"way": "init"}, {"free": "any"}]
    for options in valid:
        chosen(**options)
    with pytest.raises(ConfigError, match=r'_chosen: kind=\'c\' is unknown \(cure: "a", "b" or None\)'):
        chosen(kind="c")
    with pytest.raises(ConfigError, match=r'_chosen: way=\'no\' is unknown \(cure: True, False or "init"\)'):
        chosen(way="no")
