"""Where to compute and in what numbers: accelerator, devices, strategy, nodes, precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ...errors import ConfigError, RankError
from .. import values
from .signature import HERE, checked


def check_one_process(args: Mapping[str, Any]) -> None:
    """A strategy or number of nodes that means several processes is refused.

    Raises:
        RankError: several processes.
        ConfigError: no such strategy, or no number of nodes.
    """
    strategy, nodes = args["strategy"], args["num_nodes"]
    several = ("ddp", "fsdp", "deepspeed", "dp", "model_parallel", "xla", "horovod")
    if isinstance(strategy, str) and strategy.startswith(several):
        raise RankError(
            f"strategy={strategy!r}: several processes are not supported yet", where=HERE, hint='strategy="auto"'
        )
    if strategy not in ("auto", "single_device"):
        raise ConfigError(f"strategy={strategy!r} is not known", where=HERE, hint='strategy="auto"')
    if checked("num_nodes", nodes, values.count) > 1:
        raise RankError(f"num_nodes={nodes}: several processes are not supported yet", where=HERE, hint="num_nodes=1")


def read_device(args: Mapping[str, Any]) -> str | None:
    """A torch device, or None where Lightning would choose one itself.

    Raises:
        ConfigError: no such accelerator or device.
        RankError: more than one device.
    """
    accelerator = args["accelerator"]
    kinds: dict[Any, str | None] = {"auto": None, "cpu": "cpu", "cuda": "cuda", "gpu": _gpu(), "mps": "mps"}
    if not isinstance(accelerator, str) or accelerator not in kinds:
        raise ConfigError(
            f"accelerator={accelerator!r} is not supported; there are {', '.join(kinds)}",
            where=HERE,
            hint='accelerator="auto"',
        )
    kind, index = kinds[accelerator], _index(args["devices"], accelerator)
    if index is None:
        return kind
    if kind == "cpu":
        raise ConfigError(f"devices={args['devices']!r}: a CPU has no index", where=HERE, hint="devices=1")
    return f"{kind or _gpu()}:{index}"


def _gpu() -> str:
    return "mps" if torch.backends.mps.is_available() and not torch.cuda.is_available() else "cuda"


def _index(devices: Any, accelerator: str) -> int | None:
    """The index of the one device, None where any will do."""
    if devices == "auto":
        return None
    chosen = devices.split(",") if isinstance(devices, str) and "," in devices else devices
    try:
        if isinstance(chosen, list | tuple):
            indices = [values.count(one, least=0) for one in chosen if one != ""]
            number = len(indices)
        else:
            indices, number = [], values.count(chosen, infinite=True)
    except ValueError:
        indices, number = [], 0
    if number == -1:
        number = 1 if accelerator in ("cpu", "mps") else max(1, torch.cuda.device_count())
    if number == 0:
        raise ConfigError(f"devices={devices!r} names no device", where=HERE, hint='devices=1, or "auto"')
    if number > 1:
        raise RankError(
            f"devices={devices!r} is {number} devices: several processes are not supported yet",
            where=HERE,
            hint="devices=1",
        )
    return indices[0] if indices else None


def read_precision(value: Any) -> str:
    """The precision by the name that it has here, from any of Lightning's spellings.

    Raises:
        ConfigError: none that there is here.
    """
    names = {
        "None": "32-true",
        "64": "64-true",
        "32": "32-true",
        "16": "16-mixed",
        "bf16": "bf16-mixed",
    }
    known = ("64-true", "32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed")
    found = names.get(str(value), str(value))
    if found in known:
        return found
    raise ConfigError(
        f"precision={value!r} is not supported; there are {', '.join(known)}", where=HERE, hint='precision="bf16-mixed"'
    )
