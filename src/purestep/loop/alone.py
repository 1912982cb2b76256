"""A run is one process: one that was started as several, or a loader for a part of the data, is refused by name."""

from __future__ import annotations

import os
from typing import Any

import torch

from ..errors import RankError


def check_alone(loader: Any = None, *, where: str) -> None:
    """Nothing, where this process is the only one and the loader reads all of its data.

    Args:
        loader: any; one with a sampler for several processes (`num_replicas`) is one for a part.
        where: the loader's name, or the function.

    Raises:
        RankError: with the number of processes, or the part.
    """
    count = _processes()
    if count > 1:
        raise RankError(
            f"this is one of {count} processes: several processes are not supported yet",
            where=where,
            hint="python train.py, without torchrun; or unset WORLD_SIZE where the processes are unrelated",
        )
    for part in (getattr(loader, name, None) for name in ("sampler", "batch_sampler")):
        shares = getattr(part, "num_replicas", 1)
        if isinstance(shares, int) and shares > 1:
            raise RankError(
                f"its {type(part).__name__} is for process {getattr(part, 'rank', '?')} of {shares}: "
                "several processes are not supported yet",
                where=where,
                hint="DataLoader(dataset, batch_size=32, shuffle=True): the order is drawn anew each epoch",
            )


def _processes() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    text = os.environ.get("WORLD_SIZE", "1")
    return int(text) if text.isdecimal() else 1
