"""Arithmetic for the stand-in: operators on "CUDA" tensors, computed on the host in the same memory.

After torch's CUDA code has run (allocation, streams, checks, rules of captures), the same operator of the CPU writes
the numbers; what is captured is computed again at every replay. What only CUDA has (fused attention, cuDNN) and
Triton's kernels are not computed: graphs are made with ``backend="aot_eager"``, attention by its plain kernels.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from . import device

_DONE_BY_THE_DEVICE = {
    *("aten::_local_scalar_dense aten::record_stream aten::is_pinned aten::_pin_memory aten::set_".split()),
    *("aten::_has_compatible_shallow_copy_type aten::detach aten::empty aten::empty_strided aten::empty_like".split()),
    *("aten::new_empty aten::new_empty_strided".split()),
}


class _Captured(NamedTuple):
    run: Callable[[int, int], None]  # (seed, offset)
    holds: list[Tensor]  # the memory that it works on stays


class Emulation(TorchDispatchMode):
    """Computes what kernels of the stand-in do not."""

    def __init__(self) -> None:
        super().__init__()
        self.capturing: list[list[_Captured]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = _tensors((args, kwargs))
        if not all(map(_plain, inputs)):
            return func(*args, **kwargs)
        if func._schema.name == "aten::equal":
            return torch.equal(*(_host(one) for one in args))
        draws = torch.Tag.nondeterministic_seeded in func.tags
        at = _generator_state() if draws and not self.capturing else (0, 0)
        out = func(*args, **kwargs)
        outputs = _tensors(out)
        if not all(map(_plain, outputs)) or not self._is_to_compute(func, args, inputs, outputs, out):
            return out
        run = _on_the_host(func, args, kwargs, inputs, outputs, draws=draws)
        if self.capturing:
            self.capturing[-1].append(_Captured(run, [*inputs, *outputs]))
        else:
            try:
                run(*at)
            except NotImplementedError as error:
                raise NotImplementedError(f"{func} cannot be emulated on the CPU: {error}") from error
        return out

    def _is_to_compute(self, func: Any, args: Any, inputs: list[Tensor], outputs: list[Tensor], out: Any) -> bool:
        schema = func._schema
        kinds = {one.device.type for one in (*inputs, *outputs)}
        if "cuda" not in kinds or schema.name in _DONE_BY_THE_DEVICE:
            return False
        if not schema.is_mutable:
            if schema.returns and all(result.alias_info is not None for result in schema.returns):
                return False  # a view
            if outputs and all(any(result is one for one in inputs) for result in outputs):
                return False  # handed back as it is
        if schema.name in ("aten::copy_", "aten::_to_copy") and kinds == {"cpu", "cuda"} and not self.capturing:
            target, source = (args[0], args[1]) if schema.name == "aten::copy_" else (out, args[0])
            same = source.dtype == target.dtype and source.is_contiguous() and target.is_contiguous()
            return not same  # a plain copy of memory, which the device makes
        return True


def _on_the_host(
    func: Any, args: Any, kwargs: dict[str, Any], inputs: list[Tensor], outputs: list[Tensor], *, draws: bool
) -> Callable[[int, int], None]:
    """What writes the numbers of one operator, whenever it is called."""
    on_host: Any = tree_map(_as_on_host, (args, kwargs))
    own, named = on_host
    named = named | ({"generator": None} if named.get("generator") is not None else {})
    named |= {"pin_memory": False} if named.get("pin_memory") else {}
    targets = [None if any(result is one for one in inputs) else _host(result) for result in outputs]

    def run(seed: int, offset: int) -> None:
        before = torch.default_generator.get_state() if draws else None
        if draws:
            torch.default_generator.manual_seed(hash((seed, offset)) & ((1 << 62) - 1))
        try:
            with torch.no_grad():
                try:
                    results = _tensors(func(*own, **named))
                except RuntimeError:  # CUDA takes more mixtures of dtypes than the CPU
                    if func._schema.is_mutable:
                        raise
                    results = _tensors(func(*tree_map(_wide, own), **tree_map(_wide, named)))
                for target, result in zip(targets, results, strict=True):
                    if target is not None and target.data_ptr() != result.data_ptr():
                        target.copy_(result)
        finally:
            if before is not None:
                torch.default_generator.set_state(before)

    return run


def _generator_state() -> tuple[int, int]:
    generator = torch.cuda.default_generators[0]
    return generator.initial_seed(), generator.get_offset()


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _plain(tensor: Tensor) -> bool:
    return type(tensor) in (Tensor, torch.nn.Parameter)


def _as_on_host(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return _host(leaf)
    return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type == "cuda" else leaf


def _host(tensor: Tensor) -> Tensor:
    """A CPU tensor over the memory of one of the stand-in's."""
    if tensor.device.type != "cuda":
        return tensor
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0 or tensor.numel() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    whole = torch.frombuffer(memory, dtype=torch.uint8).untyped_storage()
    made = torch.empty(0, dtype=tensor.dtype).set_(whole, tensor.storage_offset(), tensor.shape, tensor.stride())
    made = made.conj() if tensor.is_conj() else made
    return torch._neg_view(made) if tensor.is_neg() else made


def _wide(leaf: Any) -> Any:
    is_narrow = isinstance(leaf, Tensor) and leaf.dtype in (torch.float16, torch.bfloat16)
    return leaf.float() if is_narrow else leaf


@contextmanager
def emulated() -> Iterator[Emulation]:
    """Inside, tensors on the stand-in have the numbers that they would have on CUDA, and graphs are made for it."""
    from purestep.compile import compile_program, compile_step

    torch.cuda.init()  # its generators are asked
    mode = Emulation()
    recorded: weakref.WeakKeyDictionary[Any, list[_Captured]] = weakref.WeakKeyDictionary()
    graph = torch.cuda.CUDAGraph
    begin, end, replay = graph.capture_begin, graph.capture_end, graph.replay

    def capture_begin(self: Any, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        mode.capturing.append([])

    def capture_end(self: Any) -> None:
        works = mode.capturing.pop() if mode.capturing else []
        end(self)
        recorded[self] = works

    def replayed(self: Any) -> None:
        seed, offset = _generator_state()
        replay(self)
        for number, work in enumerate(recorded.get(self, ())):
            work.run(seed, offset + 4 * number)

    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(graph, "capture_begin", capture_begin)
        patch.setattr(graph, "capture_end", capture_end)
        patch.setattr(graph, "replay", replayed)
        for function in (compile_program, compile_step):  # Triton's kernels are not computed
            patch.setitem(function.__kwdefaults__, "backend", "aot_eager")
        device.stand_in().standin_set_replays_copy(0)
        stack.callback(device.stand_in().standin_set_replays_copy, 1)
        stack.enter_context(torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH))
        stack.enter_context(mode)
        yield mode
