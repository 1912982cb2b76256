"""Export the weights of a state: to a file that any PyTorch program can load, or to a module."""

from __future__ import annotations

import fnmatch
import json
import os
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from ..errors import ConfigError, Mismatch, StateError
from ..files import local_path, replacing, write_failed
from ..model import OBJECTIVE, unwrapped
from ..parallel import placement, processes
from ..state import nearest, nearest_names, stacked, views
from ..torch_ext import hidden
from ..types import Params, Program, TrainState


def export_weights(
    path: str | os.PathLike[str],
    program: Program,
    state: TrainState,
    view: str | None = None,
    *,
    only: str | Iterable[str] | None = None,
) -> None:
    """Write the weights to a file under the module's ``state_dict`` keys, atomically.

    Example:
        >>> import tempfile, torch
        >>> from pathlib import Path
        >>> from purestep.objective import supervised
        >>> from purestep.optim import sgd
        >>> from purestep.step import program
        >>> model = torch.nn.Linear(2, 1)
        >>> trained = program(model, supervised(torch.nn.MSELoss()), sgd(0.1))
        >>> path = Path(tempfile.mkdtemp()) / "model.safetensors"
        >>> export_weights(path, trained, trained.init())
        >>> from safetensors.torch import load_file
        >>> model.load_state_dict(load_file(path))
        <All keys matched successfully>

    ``module.load_state_dict(...)`` accepts the file. It contains tied parameters under all of their names, and neither
    non-persistent buffers nor tensors of the objective. The result of a module's ``get_extra_state`` is not part of a
    state, so it is missing.

    A ``.pt`` file also contains the versions of the submodules (as ``state_dict()`` does), from which a module
    recognizes an older format of its weights. A ``.safetensors`` file contains them as JSON under ``"versions"`` in its
    metadata, which ``load_file`` drops: for a module with versions, write a ``.pt`` file or use `load_into`.

    On several processes (`parallel.start`) it is a collective: every process calls it, the first one writes, and all
    return when the file is complete. A call by one process alone waits for the others until the timeout.

    Args:
        path: ``.safetensors``, or ``.pt`` / ``.pth`` for `torch.load` with ``weights_only=True``.
        program: the program of the state.
        state: on any device; it is not changed.
        view: "params", or "ema" for the averaged weights (in the parameters' dtypes). None: "ema" if the state has an
            average, which is also what `fit` evaluates.
        only: names or glob patterns of the tensors to write; None writes all. For adapters over frozen weights pass
            ``only=program.static.trained`` or ``only="*lora*"``, and load with ``strict=False``.

    Raises:
        ConfigError: the suffix or the view is unknown, a pattern matches nothing, or the program has no ``static``.
        StateError: the view is "ema", and the state has no EMA.
        WriteFailed: the file could not be written; an older file at ``path`` is unchanged.
    """
    target = local_path("export_weights", path=path)
    if target.suffix not in (".safetensors", ".pt", ".pth"):
        raise ConfigError(
            f"the suffix {target.suffix!r} names no format", where=str(path), hint="use the suffix .safetensors or .pt"
        )
    stacked.check_plain(state, where="export_weights", pieces=True)
    shown = placement.weights(views.view(state, view))
    processes.first(lambda: _write(target, program, weights(program, shown, only=only)))


def _write(target: Path, program: Program, tensors: Params) -> None:
    versions = {} if program.static is None else dict(program.static.versions or {})
    with replacing(target) as temporary:
        try:
            if target.suffix == ".safetensors":
                from safetensors.torch import save_file

                save_file(tensors, temporary, metadata={"format": "pt", "versions": json.dumps(versions)})
            else:
                torch.save(hidden.state_dict(tensors, versions), temporary)
        except Exception as error:  # both report a full disk with error classes of their own
            raise write_failed(target, error) from error


def weights(
    program: Program, state: TrainState, view: str | None = None, *, only: str | Iterable[str] | None = None
) -> Params:
    """The weights of a state as the module's ``state_dict``, on the CPU. Entries are contiguous and share no memory.

    Arguments, ConfigError and StateError are those of `export_weights`. A collective, if the state is in pieces.
    """
    static = program.static
    if static is None:
        hint = "call torch.save with the tensors of your state"
        raise ConfigError("a program without static names cannot be exported", where="program", hint=hint)
    shown = placement.weights(views.view(state, view))
    found = {**shown.params, **shown.frozen}
    found.update({name: value for name, value in shown.buffers.items() if name in static.persistent})
    found.update({alias: found[name] for alias, name in static.ties.items()})
    names = _chosen(sorted(name for name in found if not name.startswith(OBJECTIVE)), only)
    return {name: found[name].detach().to("cpu", copy=True).contiguous() for name in names}


def _chosen(names: list[str], only: str | Iterable[str] | None) -> list[str]:
    if only is None:
        return names
    patterns = (only,) if isinstance(only, str) else tuple(only)
    chosen: set[str] = set()
    for pattern in patterns:
        if pattern.startswith(OBJECTIVE):  # in static.trained, but no weight of the module
            continue
        matched = {name for name in names if fnmatch.fnmatchcase(name, pattern)}
        if not matched:
            hint = nearest_names(pattern, names) or "only=None"
            raise ConfigError(f"{pattern!r} matches no weight", where="only", hint=hint)
        chosen |= matched
    return [name for name in names if name in chosen]


def load_into(module: nn.Module, state: TrainState, view: str | None = None) -> None:
    """Copy the weights and buffers of a state into a module, in place.

    Example:
        >>> import torch
        >>> from purestep.objective import supervised
        >>> from purestep.optim import sgd
        >>> from purestep.step import program
        >>> make = lambda: torch.nn.Linear(2, 1)
        >>> trained = program(make(), supervised(torch.nn.MSELoss()), sgd(0.1))
        >>> model, state = make(), trained.init()
        >>> load_into(model, state)
        >>> torch.equal(model.weight, state.params["weight"])
        True

    Values are cast to the module's dtypes and moved to its devices. The module keeps its mode and device: call
    ``module.to(device).eval()`` for inference. If a name or shape differs, nothing is copied. Call this before
    ``model.save_pretrained(directory)`` of Hugging Face's libraries, ``torch.export.export(model.eval(), (x,))`` or
    ``torch.onnx.export(model.eval(), (x,), "model.onnx", dynamo=True)`` (``pip install 'purestep[export]'``), which
    write a module. On several processes it is a collective: every process passes its module, which gets the whole
    weights.

    Args:
        module: a module of the same architecture; tied parameters stay tied.
        state: a state; it is not changed. Tensors of the objective are ignored.
        view: "params", or "ema" for the averaged weights. None: "ema" if the state has an average, which is also what
            `fit` evaluates.

    Raises:
        Mismatch: names or shapes differ; the message has one line for each.
        ConfigError: the view is unknown.
        StateError: the view is "ema", and the state has no EMA; or the module is on the meta device.
    """
    module = unwrapped(module)  # it has the same tensors
    stored = _stored(module, state, view)
    if empty := [name for name, value in _tensors(module).items() if value.is_meta]:
        raise StateError(
            f"{empty[0]} of the module is on the meta device and has no memory",
            where="load_into",
            hint='build the module on a device, or call module.to_empty(device="cpu") and tie its weights again',
        )
    with torch.no_grad():
        for name, value in _tensors(module).items():
            value.copy_(stored[name])


def _stored(module: nn.Module, state: TrainState, view: str | None) -> Params:
    """The tensors of a state by their names in a module.

    Raises:
        Mismatch: a name or a shape differs.
    """
    stacked.check_plain(state, where="load_into", pieces=True)
    shown = placement.weights(views.view(state, view))
    stored = {**shown.params, **shown.frozen, **shown.buffers}
    stored = {name: value for name, value in stored.items() if not name.startswith(OBJECTIVE)}
    lines = _differences(stored, _tensors(module))
    if lines:
        count = f"{len(lines)} tensors differ" if len(lines) > 1 else "1 tensor differs"
        text = "\n  ".join([f"{count} between the state and the module", *lines])
        raise Mismatch(text, where=type(module).__name__, hint="pass the module that ps.program got")
    return stored


def _tensors(module: nn.Module) -> Params:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _differences(stored: Params, own: Params) -> list[str]:
    lines = [
        f"{name}: {list(stored[name].shape)} in the state, {list(value.shape)} in the module"
        for name, value in own.items()
        if name in stored and stored[name].shape != value.shape
    ]
    lines += [f"{name}: in the module only{_near(name, stored, own)}" for name in own if name not in stored]
    return lines + [f"{name}: in the state only{_near(name, own, stored)}" for name in stored if name not in own]


def _near(name: str, others: Params, these: Params) -> str:
    found = nearest(name, [other for other in others if other not in these])
    return f" (nearest name: {found})" if found else ""
