"""What a start that finds its code again asks of torch's compiler, which is not loaded for it.

Loading Dynamo and inductor takes as long as all the rest of such a start. It needs three things of theirs: how inductor
is set, where its cache lies, and tensors without memory. None of these needs the compiler, but naming one in an import
runs its package first, and that loads everything. So each file is run here as a module that nobody else sees, and the
few places of torch's own that name the compiler are answered without it. As soon as the compiler is loaded, its own
modules are used. None of the names are public; what goes wrong here costs a start its time, for then the compiler is
loaded as it always was.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode, fake_tensor

from .. import tree

_PACKAGES = ("torch._dynamo", "torch._inductor")

_ALONE = (
    "torch._dynamo.config",
    "torch._inductor.config",
    "torch._inductor.custom_graph_pass",
    "torch._inductor.runtime.cache_dir_utils",
)
"""Files that need nothing of their packages."""

_COPIES = f"{__name__}."

_ASK = ("torch._compile", "torch._subclasses.fake_tensor")
"""Who names Dynamo to ask for a setting, or to tell it what it should not look at."""


def module(name: str) -> Any:
    """The module of that name, as it is in use; where it is not, and is one of `_ALONE`, a copy of its own."""
    if name not in _ALONE or _package_is_loaded(name):
        return importlib.import_module(name)
    # What a file reads from the environment when it is loaded may be another thing later. Not where the cache is: that
    # is read when it is asked for, and `cache_dir()` itself writes it there.
    read = {key: value for key, value in os.environ.items() if key != "TORCHINDUCTOR_CACHE_DIR"}
    return _copy(name, tuple(sorted(read.items())))


def _package_is_loaded(name: str) -> bool:
    """Whether the package that this is, or lies in, has been loaded to its end."""
    spec = getattr(sys.modules.get(".".join(name.split(".")[:2])), "__spec__", None)
    return spec is not None and not getattr(spec, "_initializing", False)


@functools.lru_cache(maxsize=8)
def _copy(name: str, _: Any) -> Any:
    file = Path(torch.__file__).parent.joinpath(*name.split(".")[1:]).with_suffix(".py")
    spec: Any = importlib.util.spec_from_file_location(f"{_COPIES}{name}", file)
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made  # a module of settings looks itself up
    with unloaded():
        spec.loader.exec_module(made)
    return made


def fakes(mode: FakeTensorMode, leaves: list[Tensor]) -> list[Tensor]:
    """Tensors of the same layouts. `mode.from_tensor` would ask Dynamo what to call them."""
    with mode:
        return [_like(leaf).requires_grad_(leaf.requires_grad) for leaf in leaves]


def _like(leaf: Tensor) -> Tensor:
    shape, strides, start = leaf.shape, leaf.stride(), leaf.storage_offset()
    if not start:
        return torch.empty_strided(shape, strides, dtype=leaf.dtype, device=leaf.device)
    whole = torch.empty(start + tree.extent(leaf), dtype=leaf.dtype, device=leaf.device)
    return whole.as_strided(shape, strides, start)


@contextmanager
def unloaded() -> Generator[None]:
    """Inside, torch does not load Dynamo or inductor where it only has something to ask or to tell. Under `alone`."""
    owner: Any = fake_tensor
    view, thread = _torch(), get_ident()
    true, torch_ = builtins.__import__, owner.torch

    def import_(
        name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0
    ) -> types.ModuleType:
        who = (globals or {}).get("__name__", "")
        if get_ident() != thread or not (who in _ASK or who.startswith(_COPIES)):
            return true(name, globals, locals, fromlist, level)
        if not name.startswith(_PACKAGES) or _package_is_loaded(name):
            found = true(name, globals, locals, fromlist, level)
            return view if found is torch else found
        return module(name) if fromlist else view

    builtins.__import__, owner.torch = import_, view
    try:
        yield
    finally:
        builtins.__import__, owner.torch = true, torch_


def _torch() -> types.ModuleType:
    """The module torch, in which those of `_PACKAGES` that are not loaded stay so."""
    view = types.ModuleType("torch")
    view.__dict__.update(vars(torch))
    view.__dict__["__getattr__"] = functools.partial(getattr, torch)
    for package in _PACKAGES:
        if not _package_is_loaded(package):
            view.__dict__[package.rpartition(".")[2]] = _Package(package)
    return view


class _Package:
    """Stands for a package that is not loaded; loads it where it is asked for anything else."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        whole = f"{self._name}.{name}"
        if whole == "torch._dynamo.disable" and not _package_is_loaded(whole):
            return _disabled_later
        found = module(whole) if whole in _ALONE else getattr(importlib.import_module(self._name), name)
        self.__dict__[name] = found  # every operation asks
        return found


def _disabled_later(function: Any, recursive: bool = True, **more: Any) -> Callable[..., Any]:
    """What `torch._dynamo.disable` makes of a function, as soon as there is a Dynamo to be kept from it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not _package_is_loaded("torch._dynamo"):
            return function(*args, **kwargs)
        dynamo: Any = importlib.import_module("torch._dynamo")
        function.__dynamo_disable = made = dynamo.disable(function, recursive, **more)
        return made(*args, **kwargs)

    return call
