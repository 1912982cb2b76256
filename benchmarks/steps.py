"""The time of one step of every contestant, side by side."""

from __future__ import annotations

import gc
import logging
import traceback
import warnings
from typing import Any

import torch

from . import alone, contestants, guard, measure, works
from .contestants import Contestant, Entry
from .works import Work


def table(
    work: str,
    device: str = "cpu",
    only: list[str] | None = None,
    seconds: float | None = None,
    rounds: int = 60,
) -> dict[str, Any]:
    """One table: rows of those that agree, and what is the matter with the others.

    Args:
        work: its name in `works.WORKS`.
        device: "cpu" or "cuda".
        only: names of contestants; None: all that are written for that work. The reference always takes part.
        seconds: to measure for; None: the work's.
        rounds: at most.
    """
    return measured(works.WORKS[work], device, only, seconds=seconds, rounds=rounds)


def measured(
    work: Work, device: str, only: list[str] | None = None, *, seconds: float | None = None, rounds: int = 60
) -> dict[str, Any]:
    """`table` of a work that has no name."""
    _hush()
    place = torch.device(device)
    torch.backends.cudnn.allow_tf32 = work.bf16  # float32 is float32, as for products and for JAX
    entered, absent = enter(work, place, only)
    pause = measure.PAUSE if place.type == "cpu" and torch.get_num_threads() > 1 else 0.0
    plan = measure.Plan(seconds=work.seconds if seconds is None else seconds, rounds=rounds, pause=pause)
    spent = measure.interleave(entered, plan)
    for contestant in entered:
        contestant.close()
    return {
        "title": work.about,
        "threads": torch.get_num_threads() if place.type == "cpu" else None,
        "tokens": work.tokens,
        "rows": [{"name": name, "unit": "s", "values": values} for name, values in spent.items()],
        "absent": absent,
    }


def enter(
    work: Work, device: torch.device, only: list[str] | None = None
) -> tuple[list[Contestant], list[dict[str, str]]]:
    """The contestants that agree with the reference, warm; and the others with what is the matter with them."""
    entries = contestants.entries_for(work, device, only)
    start = guard.copied(dict(works.seeded_model(work).named_parameters()))
    entered: list[Contestant] = []
    absent: list[dict[str, str]] = []
    reference: guard.Seen | None = None
    for entry in entries:
        made, seen, trouble = _first_steps(entry, work, device)
        if seen is not None and reference is None:
            reference = seen
        elif seen is not None and reference is not None:
            found = guard.disagreement(seen, reference, start, tolerance=work.tolerance, drift=work.drift)
            trouble = found and f"error: does other work: {found}"
        if made is not None and trouble is None:
            entered.append(made)
        else:
            absent.append({"name": entry.name, "why": trouble or "error"})
            if made is not None:
                made.close()
        gc.collect()
    return entered, absent


def _first_steps(
    entry: Entry, work: Work, device: torch.device
) -> tuple[Contestant | None, guard.Seen | None, str | None]:
    missing = contestants.lacking(entry)
    if missing:
        return None, None, f"not installed: {', '.join(missing)}"
    try:
        made = entry.make(work, device)
        losses = [made.read(loss) for loss in made.turn(guard.STEPS).losses]
        return made, guard.Seen(losses, guard.copied(made.weights()), guard.copied(made.shadow())), None
    except ModuleNotFoundError as error:
        return None, None, f"not installed: {error}"
    except Exception as error:  # whatever a peer raises is an entry in the table, with the reason
        traceback.print_exc()
        cause = error.__cause__ or error
        lines = str(cause).replace(f"{alone.ROOT}/", "").strip().splitlines() or [""]
        return None, None, f"error: {type(cause).__name__}: {lines[0][:200]}"


def _hush() -> None:
    """Advice of the peers about workers and loggers; errors still come through."""
    warnings.simplefilter("ignore")
    for name in ("lightning", "lightning.pytorch", "accelerate", "transformers", "absl"):
        logging.getLogger(name).setLevel(logging.ERROR)
