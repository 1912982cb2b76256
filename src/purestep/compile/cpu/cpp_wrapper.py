"""Generator of the C++ that calls a graph's kernels, with intermediates in the workspace and inputs as addresses.

Buys: inductor's code takes handles. For each input Python creates a tensor object and a capsule, C++ a vector and a
reference-counting owner, and sizes and strides are read and compared. A step knows them and holds its buffers, so an
address is enough; `launcher` passes it. Graphs that return an input, contain a constant, or call an operator that might
store its arguments keep inductor's code.

Private names: ``torch._inductor.codegen`` (the wrapper for the CPU, whose methods are overridden, and its lines),
``torch._inductor.graph.GraphLowering``, ``torch._inductor.ir``.

Without: inductor's own wrapper. Importing this module loads inductor.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._inductor import ir
from torch._inductor.codegen import common, cpp_wrapper_cpu
from torch._inductor.codegen.common import DeferredLine
from torch._inductor.codegen.wrapper import EnterSubgraphLine, ExitSubgraphLine, ReuseLine, WrapperLine
from torch._inductor.fx_passes.control_dependencies import control_deps  # keeps draws in order
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V

from . import cpp_kernel, csrc, graph_key, offset_pointers, outline, workspace

_BODY = "static void purestep_body(void* const* addresses, AtenTensorHandle* output_handles) {"

_ENTRIES = csrc.text("entries.cpp")


@contextmanager
def enabled() -> Generator[None]:
    """Let inductor use `Wrapper`, which places intermediates in the workspace, the last input of a graph."""
    common.init_backend_registration()
    kind: Any = GraphLowering
    with (
        mock.patch.object(common.device_codegens["cpu"], "cpp_wrapper_codegen", Wrapper),
        mock.patch.object(kind, "init_wrapper_code", _initialized_once(kind.init_wrapper_code)),
    ):
        yield


def _initialized_once(true: Callable[..., None]) -> Callable[..., None]:
    """Keep the wrapper of a graph whose functions are already written."""

    def init_wrapper_code(graph: Any, *of_part: Any, **more: Any) -> None:
        if graph.wrapper_code is None or of_part or more:
            true(graph, *of_part, **more)

    return init_wrapper_code


_CALLING: Any = cpp_wrapper_cpu.CppWrapperCpu


class Wrapper(_CALLING):
    """Generates the code that calls a graph's kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.layouts = [workspace.Layout()]  # of the graph, and of the function being written
        self.places: dict[str, tuple[int, int]] = {}  # buffer -> (offset, bytes)
        self.returned: set[str] = set()
        self.outputs: dict[str, int] = {}  # output of a function -> its index
        self.delivered: dict[str, int] = {}  # buffer in the memory of an output -> index of that output
        self.becomes: dict[str, str] = {}  # buffer -> the buffer that a kernel writes over it
        self.sizes: dict[str, int] = {}  # function -> bytes of workspace
        self.header.splice(workspace.HEADER + offset_pointers.HEADER)

    @property
    def layout(self) -> workspace.Layout:
        return self.layouts[-1]

    @staticmethod
    def create(*_: Any, **__: Any) -> Any:
        return Wrapper()

    def write_constant(self, name: str, hashed: str) -> None:
        """Do nothing: `write_wrapper_decl` writes them, when all constants are known."""

    def write_wrapper_decl(self) -> None:
        for constant in V.graph.constant_reprs.items():
            super().write_constant(*constant)
        self.by_address = _by_address()
        if self.by_address:  # the caller has checked sizes
            self.lines = [line for line in self.lines if getattr(line, "op_name", None) != "input"]
        super().write_wrapper_decl()

    def _write_entry_point_signature(self) -> None:
        if not self.by_address:
            return super()._write_entry_point_signature()
        self.prefix.writeline(_BODY)

    def _write_input_preamble(self) -> None:
        if not self.by_address:
            return super()._write_input_preamble()
        self.prefix.writeline("py::gil_scoped_release_simple release;")

    def _write_input_unpacking(self) -> None:
        if not self.by_address:
            return super()._write_input_unpacking()
        for index, (name, given) in enumerate(V.graph.graph_inputs.items()):
            self.prefix.writeline(self._declared(name, f"addresses[{index}]", given, self.prefix.writeline))

    def memory_plan_reuse(self) -> None:
        super().memory_plan_reuse()
        self.returned = _returned([line for line in self.lines if isinstance(line, ReuseLine)])
        self.prefix.writeline(f"const Workspace workspace((int64_t*)({list(V.graph.graph_inputs)[-1]}.data_ptr()));")
        self.prefix.writeline("char* const memory = workspace.at();")

    def codegen_inplace_reuse(self, input_buffer: Any, output_buffer: Any) -> None:
        self.becomes[input_buffer.get_name()] = output_buffer.get_name()
        super().codegen_inplace_reuse(input_buffer, output_buffer)

    def make_buffer_allocation(self, buffer: Any) -> str:
        size = _bytes(buffer)
        if self._destination(buffer.get_name()) is not None:
            return self._delivered(buffer)
        if size is None or buffer.get_name() in self.returned:
            return super().make_buffer_allocation(buffer)
        self.places[buffer.get_name()] = (self.layout.take(size), size)
        return self._placed(buffer)

    def make_buffer_free(self, buffer: Any) -> str:
        place = self.places.pop(buffer.get_name(), None)
        if place is None:
            return super().make_buffer_free(buffer)
        self.layout.give(*place)
        return ""

    def make_buffer_reuse(self, old: Any, new: Any, delete_old: bool) -> str:
        at = self._destination(new.get_name())
        if at is not None and self.becomes.get(old.get_name()) != new.get_name():
            return f"{self._delivered(new)} {self.make_buffer_free(old)}"
        if at is not None and self.delivered.get(old.get_name()) == at:
            return self._delivered(new)
        place = self.places.pop(old.get_name(), None)
        if place is None:
            return super().make_buffer_reuse(old, new, delete_old)
        self.places[new.get_name()] = place
        return self._placed(new)

    def codegen_deferred_allocation(self, name: str, view: Any) -> None:
        if name in self.returned or not all(map(_is_number, (*view.get_size(), *view.get_stride()))):
            return super().codegen_deferred_allocation(name, view)
        line = self._declared(name, cpp_kernel.address(view), view, self.wrapper_call.writeline)
        self.writeline(DeferredLine(name, line))

    def codegen_invoke_subgraph(self, call: Any) -> None:
        for made in call.outputs:
            layout = made.get_output_spec()
            if isinstance(layout, ir.NonOwningLayout):  # part of a vector, which must be allocated
                self.codegen_allocation(V.graph.get_buffer(layout.view.get_name()))
                self.codegen_deferred_allocation(made.get_name(), layout.view)
        self.writeline(_Call(self, call))

    def write_function(self, function: Any) -> None:
        """Write a repeated layer as a function of addresses; see `outline`."""
        self.writeline(f"const auto {function.name} = [](void* const* in, void* const* out, char* memory) {{")
        self.writeline(_Enter(self, function))
        self.push_codegened_graph(function)
        for at, (name, given) in enumerate(function.graph_inputs.items()):
            self.writeline(self._declared(name, f"in[{at}]", given, self.writeline))
        for at, output in enumerate(function.graph_outputs):
            if not cpp_kernel.is_view(output):  # a view's buffer may be larger than the caller's memory
                self.outputs.setdefault(output.get_name(), at)
        outer = V.graph
        with V.set_graph_handler(function):
            function.codegen_subgraph(parent_graph=outer)
        for at, output in enumerate(function.graph_outputs):
            self.writeline(_Output(self, output, at))
        self.pop_codegened_graph()
        self.writeline(_Exit(self))
        self.writeline("};")

    def write_call(self, call: Any) -> None:
        """Write a call of such a function, with memory for its outputs."""
        function, room, made = call.subgraph.graph, list[tuple[int, int]](), list[str]()

        def borrowed(size: int) -> str:
            """Allocate memory for the duration of the call."""
            room.append((self.layout.take(size), size))
            return f"memory + {room[-1][0]}"

        for output in call.outputs:
            if output.get_name() in V.graph.removed_buffers:
                made.append(borrowed(_bytes(output) or 0))
                continue
            if not isinstance(output.get_output_spec(), ir.NonOwningLayout):
                self.wrapper_call.writeline(self.make_buffer_allocation(output))
            made.append(f"{output.get_name()}.data_ptr()")
        arrays = _array(map(cpp_kernel.address, call.inputs)), _array(made)
        self.wrapper_call.writeline(f"{function.name}({', '.join(arrays)}, {borrowed(self.sizes[function.name])});")
        for place in room:
            self.layout.give(*place)

    def _destination(self, name: str) -> int | None:
        """The index of the function's output that this buffer, or a later one in its memory, is."""
        while name in self.becomes:
            name = self.becomes[name]
        return self.outputs.get(name)

    def _delivered(self, buffer: Any) -> str:
        """Declare a function's output in the caller's memory."""
        name = buffer.get_name()
        at = self._destination(name)
        assert at is not None
        self.delivered[name] = at
        return self._declared(name, f"out[{at}]", buffer, self.wrapper_call.writeline)

    def _placed(self, buffer: Any) -> str:
        place = f"memory + {self.places[buffer.get_name()][0]}"
        return self._declared(buffer.get_name(), place, buffer, self.wrapper_call.writeline)

    def _declared(self, name: str, address: str, buffer: Any, write: Callable[[str], None]) -> str:
        arrays = [
            self.codegen_int_array_var(
                self.codegen_shape_tuple(numbers), write, known_statically=True, graph=self.get_codegened_graph()
            )
            for numbers in (buffer.get_size(), buffer.get_stride())
        ]
        dtype = buffer.get_dtype()
        parts = [len(buffer.get_size()), *arrays, self.codegen_dtype(dtype), dtype.itemsize]
        return f"Kept {name}({address}, {', '.join(map(str, parts))});"

    def _generate_end_jit(self, result: Any) -> None:
        self.kernel_declarations.splice(f'extern "C" const int64_t purestep_bytes = {self.layout.size};')
        if self.by_address:
            counts = {"INPUTS": len(V.graph.graph_inputs), "OUTPUTS": len(V.graph.graph_outputs)}
            result.splice(re.sub("INPUTS|OUTPUTS", lambda name: str(counts[name[0]]), _ENTRIES))
        super()._generate_end_jit(result)


class _Enter(EnterSubgraphLine):
    """Start of a function, with a new workspace layout."""

    wrapper: Any

    def codegen(self, code: Any) -> None:
        super().codegen(code)
        self.wrapper.layouts.append(workspace.Layout())


class _Exit(ExitSubgraphLine):
    """End of a function; records the size of its workspace."""

    wrapper: Any

    def codegen(self, code: Any) -> None:
        wrapper = self.wrapper
        wrapper.sizes[wrapper.get_codegened_graph().name] = wrapper.layouts.pop().size
        super().codegen(code)


class _Output(WrapperLine):
    """Copies an output that was not computed in the caller's memory."""

    def __init__(self, wrapper: Any, made: Any, at: int) -> None:
        self.wrapper, self.made, self.at = wrapper, made, at

    def codegen(self, code: Any) -> None:
        name, layout = self.made.get_name(), self.made.get_layout()
        place = self.wrapper.delivered.get(name)
        if (place != self.at or cpp_kernel.is_view(self.made)) and all(layout.size):
            length = 1 + sum((size - 1) * stride for size, stride in zip(layout.size, layout.stride, strict=True))
            size = int(length) * layout.dtype.itemsize
            code.writeline(f"std::memcpy(out[{self.at}], {cpp_kernel.address(self.made)}, {size});")


class _Call(WrapperLine):
    """A call of a function; memory for its outputs is allocated when the line is written."""

    def __init__(self, wrapper: Any, call: Any) -> None:
        self.wrapper, self.call = wrapper, call

    def codegen(self, code: Any) -> None:
        self.wrapper.write_call(self.call)


def _array(addresses: Iterable[str]) -> str:
    found = [f"(void*)({address})" for address in addresses]
    return f"std::array<void*, {len(found)}>{{{', '.join(found)}}}.data()"


def _by_address() -> bool:
    """True if the current graph can take addresses."""
    graph: Any = V.graph
    inputs = graph.graph_inputs
    plain = all(isinstance(given, ir.TensorBox) and _is_fixed(given) for given in inputs.values())
    returned = _returned([]) & set(inputs)
    return plain and not graph.constants and not returned and all(map(_is_ours, _called(graph.module)))


def _called(module: Any) -> Iterator[Any]:
    """The targets that a graph calls, also in its subgraphs that keep draws in order."""
    for part in module.modules():
        if isinstance(part, torch.fx.GraphModule):
            yield from (node.target for node in part.graph.nodes if node.op == "call_function")


def _is_ours(target: Any) -> bool:
    return graph_key.known(target) or isinstance(target, outline.Block) or target is control_deps


def _is_fixed(given: Any) -> bool:
    numbers = [*given.get_size(), *given.get_stride(), given.get_layout().offset]
    return given.get_device().type == "cpu" and all(map(_is_number, numbers))


def _is_number(size: Any) -> bool:
    return getattr(size, "is_Integer", isinstance(size, int))


def _bytes(buffer: Any) -> int | None:
    """The aligned size of a buffer, or None if it is unknown."""
    length = V.graph.get_allocation_storage_size(buffer)
    plain = buffer.get_device().type == "cpu" and not buffer.get_is_pinned()
    if not plain or not _is_number(length):
        return None
    return max(1, -(-int(length) * buffer.get_dtype().itemsize // workspace.ALIGNMENT)) * workspace.ALIGNMENT


def _returned(reuses: list[Any]) -> set[str]:
    """Buffers whose memory the graph returns: directly, as a buffer that reuses it, or as a view."""
    names = set(V.graph.get_output_names())
    count = -1
    while count != len(names):
        count = len(names)
        names |= {line.node.get_name() for line in reuses if line.reused_as.get_name() in names}
        for buffer in V.graph.buffers:
            if buffer.get_name() in names and isinstance(buffer.get_output_spec(), ir.NonOwningLayout):
                names.add(buffer.get_output_spec().view.get_name())
            if buffer.get_name() in names:
                names |= set(buffer.get_inputs_that_alias_output())
    return names
