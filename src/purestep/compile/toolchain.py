"""The C++ compiler beside inductor's Python, which keeps a core to itself as long as it writes.

Inductor writes all of its C++ first, then compiles the kernels, then the code that calls them, then links. Here headers
and kernels are compiled as soon as they are known, and what is left at the end at the same time. Only object files are
made ahead: inductor finds them where it would have put them, and makes itself whatever is missing. So anything that
goes wrong here, or is named otherwise in another version of torch, costs time and nothing else.
"""

from __future__ import annotations

import contextvars
import functools
import gc
import importlib
import os
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

_FIRST, _PART = 30_000, 90_000
"""Characters of kernels that are worth a process of their own, which begins with half a second of headers; the first
of them sooner, because a core has nothing else to do."""


@contextmanager
def beside() -> Generator[Callable[[list[str]], None]]:
    """Whatever inductor compiles inside has its C++ built beside it. Under `alone`: this patches inductor.

    Yields:
        What takes the text of kernels that are certain to come, and compiles them at once.
    """
    codecache: Any = importlib.import_module("torch._inductor.codecache")
    wrapper: Any = importlib.import_module("torch._inductor.codegen.wrapper")
    instructions: Any = importlib.import_module("torch._inductor.cpu_vec_isa")
    with ExitStack() as stack:
        build: _Build | None = None
        with suppress(Exception), ExitStack() as own:  # another torch: all is taken back, and nothing is made ahead
            made = _Build(codecache, own)
            own.enter_context(_replaced(codecache, "_precompile_header", made.header))
            own.enter_context(_replaced(codecache, "_worker_compile_cpp", made.objects))
            own.enter_context(_replaced(wrapper.PythonWrapperCodegen, "define_kernel", made.kernel))
            own.enter_context(_replaced(instructions.VecISA, "check_build", _unless_known))
            made.start()
            stack.enter_context(own.pop_all())
            build = made
        yield build.ahead if build else _nothing


def _nothing(_: list[str]) -> None:
    pass


def _unless_known(true: Any) -> Any:
    """Try out no instructions that torch has found in the processor and the compiler has an option for."""
    from torch._inductor import cpu_vec_isa

    isa: Any = cpu_vec_isa
    known = (
        isa.VecAVX512._avx512_bf16_code,
        isa.VecAVX512VNNI._avx512_vnni_code,
        isa.VecAMX._amx_code,
        isa.VecAMX._amx_fp16_code,
    )

    def check_build(self: Any, code: str) -> bool:
        return (code in known and _accepts(self._arch_flags)) or true(self, code)

    return check_build


def _accepts(flags: str) -> bool:
    """Whether the C++ compiler takes these options; one that does has the intrinsics behind them."""
    builder: Any = importlib.import_module("torch._inductor.cpp_builder")
    with suppress(Exception):  # then it is tried out
        return _takes(builder.get_cpp_compiler(), flags)
    return False


@functools.cache
def _takes(compiler: str, flags: str) -> bool:
    command = [compiler, *flags.split(), "-E", "-x", "c++", os.devnull]
    return subprocess.run(command, capture_output=True).returncode == 0


@contextmanager
def _replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Generator[None]:
    true = owner.__dict__[name]
    setattr(owner, name, make(true))
    try:
        yield
    finally:
        setattr(owner, name, true)


class _Build:
    """What is made ahead for one graph."""

    def __init__(self, codecache: Any, stack: ExitStack) -> None:
        self._codecache = codecache
        self._directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=codecache.cache_dir())))
        self._pool = ThreadPoolExecutor(_cores(), thread_name_prefix="purestep-g++")
        # For so many parts at a time that a core is left to inductor's Python. Headers do not ask: that they are
        # compiled at all is rare, and takes longer than all of the rest.
        self._room = threading.Semaphore(max(1, _cores() - 1))
        stack.callback(self._pool.shutdown, cancel_futures=True)
        self._headers: dict[tuple[str, str], Future[str]] = {}
        self._kernels: list[str] = []  # bodies in the order that inductor has them in
        self._waiting: list[str] = []  # those that no part has yet
        self._parts: list[Future[Any]] = []
        self._ahead: dict[str, Future[Any]] = {}  # parts of kernels that may come
        self._has_begun = False  # with a first part; later ones are larger
        self._ready: Future[Any] = Future()  # options of a kernel's object, headers compiled

    def start(self) -> None:
        """Ask what instructions there are, and compile the headers, where that has not been done on this machine."""
        self._compile_header: Any = self._codecache._precompile_header.__wrapped__
        if self._codecache.config.fx_graph_cache:
            self._submit(self._codecache.torch_key)  # a hash of all of torch's files
        self._ready = self._submit(self._kernel_options)
        self._submit(self._wrapper_header)

    def _submit(self, task: Callable[..., Any], *arguments: Any) -> Future[Any]:
        # Inductor's configuration is kept by context.
        return self._pool.submit(contextvars.copy_context().run, task, *arguments)

    # --- headers ------------------------------------------------------------------------------------------------------

    def header(self, true: Any) -> Any:
        def precompiled(header: str, command: str, **options: Any) -> str:
            with suppress(Exception):
                return self._headers[header, command].result()
            return true(header, command, **options)

        precompiled.__wrapped__ = true  # type: ignore[attr-defined]
        return precompiled

    def _kernel_options(self) -> Any:
        from torch._inductor.cpu_vec_isa import pick_vec_isa

        options = self._options(vec_isa=pick_vec_isa())
        options.precompiled_header = self._compiled_header(
            self._codecache._get_cpp_prefix_header("cpu"), options, vec_isa=pick_vec_isa()
        )
        return options

    def _wrapper_header(self) -> None:
        from torch._inductor.cpu_vec_isa import invalid_vec_isa

        chosen = {"vec_isa": invalid_vec_isa, "min_optimize": True}
        header = self._codecache.CppWrapperCodeCache._get_uncompiled_header("cpu")
        self._compiled_header(header, self._options(**chosen), **chosen)

    def _options(self, **chosen: Any) -> Any:
        from torch._inductor import cpp_builder

        builder: Any = cpp_builder
        return builder.CppTorchDeviceOptions(compile_only=True, **self._shared(), **chosen)

    def _shared(self) -> dict[str, Any]:
        flags = self._codecache.CppWrapperCodeCache.cpp_compile_command_flags
        return {**flags, "device_type": "cpu", "extra_flags": (), "use_relative_path": False}

    def _compiled_header(self, header: str, options: Any, **chosen: Any) -> str:
        from torch._inductor.cpp_builder import CppBuilder

        command = CppBuilder(name="o", sources="i", BuildOption=options).get_command_line()
        known = self._headers[header, command] = Future[str]()
        try:
            known.set_result(self._compile_header(header, command, **self._shared(), **chosen))
        except Exception as error:
            known.set_exception(error)
        return known.result()

    # --- objects ------------------------------------------------------------------------------------------------------

    def ahead(self, bodies: list[str]) -> None:
        """Compile kernels that are going to come."""
        new = [body for body in bodies if body not in self._ahead]
        if new:
            part = self._submit(self._compiled_part, f"ahead{len(self._ahead)}", "\n".join(new))
            self._ahead |= dict.fromkeys(new, part)

    def kernel(self, true: Any) -> Any:
        def define(wrapper: Any, name: str, body: str, *rest: Any, **more: Any) -> Any:
            self._kernels.append(body)
            if body in self._ahead:
                if self._ahead[body] not in self._parts:
                    self._parts.append(self._ahead[body])
            else:
                self._waiting.append(body)
            if sum(map(len, self._waiting)) >= (_PART if self._has_begun else _FIRST):
                self._hand_over()
            return true(wrapper, name, body, *rest, **more)

        return define

    def _hand_over(self) -> None:
        if self._waiting:
            text, self._waiting, self._has_begun = "\n".join(self._waiting), [], True
            self._parts.append(self._submit(self._compiled_part, f"part{len(self._parts)}", text))

    def _compiled_part(self, name: str, text: str) -> tuple[str, str]:
        """The object file, and the command that made it, names left out."""
        from torch._inductor.cpp_builder import CppBuilder

        source = self._directory / f"{name}.cpp"
        source.write_text(text)
        options = self._ready.result()
        builder = CppBuilder(name=name, sources=str(source), BuildOption=options, output_dir=str(self._directory))
        with self._room:
            builder.build()
        return builder.get_target_file_path(), _anonymous(builder)

    def objects(self, true: Any) -> Any:
        def build(lock_path: str, builders: Sequence[Any]) -> None:
            with suppress(Exception):  # then inductor meets the same error, and says it better
                if len(builders) == 3:
                    self._build_objects(lock_path, *builders)
            true(lock_path, builders)

        return build

    def _build_objects(self, lock_path: str, calls: Any, kernels: Any, whole: Any) -> None:
        from torch.utils._filelock import FileLock

        with FileLock(lock_path, timeout=self._codecache.LOCK_TIMEOUT):
            if _exists(whole):
                return
            self._room.release()  # from here on inductor's thread only waits; this runs once a graph, so one release
            known = not _exists(kernels) and self._hand_over_rest(Path(_source(kernels)).read_text())
            if not _exists(calls):
                calls.build()
            # `alone` keeps garbage until the end, where it would be collected with nothing beside it.
            gc.collect(0)
            if known:
                self._join(kernels)
            if _exists(kernels):
                _link(whole)

    def _hand_over_rest(self, text: str) -> bool:
        """Compile what inductor has written besides kernels too; False where kernels are not those that were seen."""
        end = 0
        for body in self._kernels:
            start = text.find(body.strip(), end)
            if start < 0 or text[end:start].strip():
                return False
            end = start + len(body.strip())
        if text[end:].strip():
            self._waiting.append(text[end:])
        self._hand_over()
        return True

    def _join(self, kernels: Any) -> None:
        """One object of all parts, if they are what inductor would have made."""
        objects, commands = zip(*(part.result() for part in self._parts), strict=True)
        if set(commands) != {_anonymous(kernels)}:
            return
        compiler = shlex.split(kernels.get_command_line())[0]
        _made_whole([compiler, "-r", "-nostdlib", *objects], kernels)


def _link(whole: Any) -> None:
    """Link with the fastest linker there is: the usual one takes half a second to look through torch's libraries."""
    linker = next((name for name in ("mold", "lld", "gold") if shutil.which(f"ld.{name}")), None)
    if linker is not None:
        words = shlex.split(whole.get_command_line())
        at = words.index("-o")
        _made_whole([*words[:at], *words[at + 2 :], f"-fuse-ld={linker}"], whole)


def _made_whole(command: list[str], builder: Any) -> None:
    """Run a command, and give its output the name that inductor looks for once it is complete."""
    target = builder.get_target_file_path()
    subprocess.run([*command, "-o", f"{target}.making"], check=True, capture_output=True)
    os.replace(f"{target}.making", target)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _exists(builder: Any) -> bool:
    return Path(builder.get_target_file_path()).exists()


def _source(builder: Any) -> str:
    return next(word for word in shlex.split(builder.get_command_line()) if word.endswith(".cpp"))


def _anonymous(builder: Any) -> str:
    names = (_source(builder), builder.get_target_file_path())
    return " ".join(word for word in shlex.split(builder.get_command_line()) if word not in names)
