"""The house: which module may import which, and what stays out of the pure half.

Each rule is a function from source texts to a list of violations, and each has a planted violation that it must find.
"""

from __future__ import annotations

import ast
import functools
import importlib
import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from purestep import errors

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "purestep"
SOURCES = {str(path.relative_to(PACKAGE)): path.read_text(encoding="utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
LEVEL = {
    name: level
    for level, names in enumerate(
        (
            "errors types",
            "torch_ext",
            "tree rng",
            "state",
            "model",
            "optim schedules ema scaler precision metrics stopping",
            "objective",
            "step",
            "analysis",
            "ensembles",
            "compile curvature privacy",
            "parallel",
            "files events config data",
            "snapshot sinks diagnostics",
            "loop",
            "tools testing report",
            "__main__",
        )
    )
    for name in names.split()
}
LAST_PURE_LEVEL = LEVEL["compile"]

Sources = dict[str, str]
Rule = Callable[[Sources], list[str]]


def module_of(path: str) -> str:
    """``optim`` for both ``optim.py`` and ``optim/adam.py``."""
    return Path(path).parts[0].removesuffix(".py")


def level_of(path: str) -> int:
    return LEVEL.get(module_of(path), len(LEVEL))


@functools.cache
def parsed(text: str) -> ast.Module:
    return ast.parse(text)


@functools.cache
def imported(path: str, text: str) -> tuple[tuple[str, str, int], ...]:
    """``(local name, dotted origin, line)`` of every import, lazy ones too; relative ones start with ``purestep``."""
    return tuple(_imported(path, text))


def _imported(path: str, text: str) -> Iterator[tuple[str, str, int]]:
    package = ["purestep", *Path(path).parts[:-1]]
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                local = alias.asname or alias.name.split(".")[0]
                yield local, alias.name if alias.asname else local, node.lineno
                if not alias.asname and "." in alias.name:
                    yield "", alias.name, node.lineno
        elif isinstance(node, ast.ImportFrom):
            parent = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join([*parent, *(node.module or "").split(".")]).strip(".")
            for alias in node.names:
                yield alias.asname or alias.name, f"{origin}.{alias.name}", node.lineno


def used(path: str, text: str) -> Iterator[tuple[str, int]]:
    """``(dotted name, line)`` of whatever comes from an import: ``torch.func.grad`` however it was imported."""
    names = {local: origin for local, origin, _ in imported(path, text) if local}
    for _, origin, line in imported(path, text):
        yield origin, line
    for node in ast.walk(parsed(text)):
        dotted = _dotted(node)
        if dotted:
            head, _, rest = dotted.partition(".")
            if head in names:
                yield f"{names[head]}.{rest}".rstrip("."), getattr(node, "lineno", 0)


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = _dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return ""


def within(name: str, *prefixes: str) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def upward_imports(sources: Sources) -> list[str]:
    found = []
    for path, text in sources.items():
        if path == "__init__.py":
            continue
        here = module_of(path)
        for _, origin, line in imported(path, text):
            parts = origin.split(".")
            if parts[0] != "purestep" or parts[1:2] == [here]:
                continue
            there = parts[1] if len(parts) > 1 else "purestep"
            if there not in LEVEL or LEVEL[there] >= level_of(path):
                found.append(f"{path}:{line}: {here} (level {level_of(path)}) imports {there} ({LEVEL.get(there)})")
    return found


def modules_without_a_level(sources: Sources) -> list[str]:
    return sorted({module_of(path) for path in sources} - set(LEVEL) - {"__init__"})


IMPURE_MODULES = frozenset(
    """asyncio datetime fcntl glob io json logging multiprocessing os pathlib random rich shutil signal socket
    subprocess tempfile threading time urllib""".split()
)
IMPURE_CALLS = {"breakpoint", "exec", "input", "open", "print"}
AT_THE_COMPILER = ("compile/code_directory.py", "compile/cpu/code_cache.py", "compile/cpu/cpp_library.py")
"""They read and write the compiler's files: its settings, its cache directory, our C++."""
ALLOWED = (
    ("torch_ext/host_generators.py", "random"),
    ("torch_ext/global_rng.py", "random"),
    ("torch_ext/global_rng.py", "threading.RLock"),
    ("compile/eager_donation.py", "threading.local"),
    ("compile/backends.py", "os"),
    ("compile/capture.py", "logging"),
    ("compile/captured_values.py", "logging"),
    ("compile/cuda_graph.py", "logging"),
)


def impurities(sources: Sources) -> list[str]:
    """I/O, clock, logging and state of a module's own in the modules up to `compile`.

    The exceptions are the room that a thread's compiled steps work in, none of which reads what it has not written, the
    lock under which threads draw and graphs are made, and the words that one had to be made in a slower way, or anew.
    """
    found = []
    for path, text in sources.items():
        if level_of(path) > LAST_PURE_LEVEL:
            continue
        for _, origin, line in imported(path, text):
            allowed = path in AT_THE_COMPILER or (path, origin) in ALLOWED
            if within(origin, *IMPURE_MODULES) and not allowed:
                found.append(f"{path}:{line}: imports {origin}")
        for node in ast.walk(parsed(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in IMPURE_CALLS:
                found.append(f"{path}:{node.lineno}: calls {node.func.id}")
            if isinstance(node, ast.Global):
                found.append(f"{path}:{node.lineno}: global {', '.join(node.names)}")
        found += [f"{path}:{line}: module-level {name} can change" for name, line in _module_state(text)]
    return found


def _module_state(text: str) -> Iterator[tuple[str, int]]:
    """Module-level containers under names that are no CONSTANTS."""
    for node in parsed(text).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        value: Any = node.value
        made_by = _dotted(value.func).split(".")[-1] if isinstance(value, ast.Call) else type(value).__name__
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if (
                made_by in CONTAINERS
                and isinstance(target, ast.Name)
                and target.id not in ("__all__", target.id.upper())
            ):
                yield target.id, node.lineno


CONTAINERS = {"Dict", "List", "Set", "DictComp", "ListComp", "SetComp", "dict", "list", "set", "defaultdict"}


ONLY_IN = {
    name: owners.split()
    for owners, names in (
        ("tree", "optree"),
        ("snapshot", "orbax jax"),
        ("model", "torch.func.functional_call torch.nn.utils.stateless"),
        ("step analysis curvature", "torch.func.grad torch.func.vjp"),
        ("step", "torch.func.grad_and_value torch.func.jacrev torch.autograd.grad torch.autograd.backward"),
        ("torch_ext", "torch.manual_seed torch.seed torch.set_rng_state torch.default_generator torch.random"),
        ("torch_ext", "torch.cuda.manual_seed torch.cuda.manual_seed_all"),
        ("", "torch.compile torch.load cloudpickle dill joblib marshal pickle shelve"),
    )
    for name in names.split()
}


def out_of_place(sources: Sources) -> list[str]:
    """What only one module may talk to, and what none may: nothing that is read can run code."""
    found = set()
    for path, text in sources.items():
        for name, line in used(path, text):
            for owned, owners in ONLY_IN.items():
                if within(name, owned) and module_of(path) not in owners:
                    found.add(f"{path}:{line}: {name} belongs in {' or '.join(owners) or 'no module'}")
        if path == "step/gradient.py":  # into the .grad of tensors that it has just made
            continue
        for node in ast.walk(parsed(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "backward":
                found.add(f"{path}:{node.lineno}: backward() accumulates into .grad")
    return sorted(found)


ADAPTERS = {
    "data/workers.py": {"_exit"},  # of os, documented
    "metrics/torchmetrics.py": {"_defaults", "_reductions"},  # of a metric: no public name has its states
    "snapshot/orbax_io.py": {"_src"},  # of jax: has it started?
    "snapshot/writer.py": {"_register_atexit"},  # of threading: before executors refuse work
}
OF_NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}


def private_names(sources: Sources) -> list[str]:
    """Private names of other libraries outside of the rooms for them: those that no file of the room defines."""
    own: dict[str, set[str]] = {}
    for path, text in sources.items():
        own.setdefault(module_of(path), set(OF_NAMED_TUPLES)).update(_defined(text))
    found = []
    for path, text in sources.items():
        if module_of(path) in ("torch_ext", "compile", "parallel"):
            continue
        known = own[module_of(path)] | ADAPTERS.get(path, set())
        named = [(name, line) for name, line in _names(text) if re.match("_[^_]", name) and name not in known]
        found += [f"{path}:{line}: the private name {name}" for name, line in named]
    return found


def _defined(text: str) -> Iterator[str]:
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _dotted(node.value) == "self":
            yield node.attr
        elif isinstance(node, ast.keyword):
            yield node.arg or ""
        elif isinstance(node, ast.Dict):
            yield from (str(key.value) for key in node.keys if isinstance(key, ast.Constant))


def _names(text: str) -> Iterator[tuple[str, int]]:
    """Parts of imported names, attributes, and the texts that `getattr` and the like read, with their lines."""
    for node in ast.walk(parsed(text)):
        if isinstance(node, ast.Attribute):
            yield node.attr, node.lineno
        elif isinstance(node, ast.Import | ast.ImportFrom):
            whole = ".".join([getattr(node, "module", None) or "", *(alias.name for alias in node.names)])
            yield from ((part, node.lineno) for part in whole.split("."))
        elif isinstance(node, ast.Call) and _dotted(node.func) in ("getattr", "hasattr", "setattr", "delattr"):
            yield from ((str(each.value), node.lineno) for each in node.args[1:2] if isinstance(each, ast.Constant))


def eager_heavy_imports(sources: Sources) -> list[str]:
    """orbax and jax are imported inside functions, so that `import purestep` stays light."""
    return [
        f"{path}:{node.lineno}: {ast.unparse(node)} at import time"
        for path, text in sources.items()
        for node in parsed(text).body
        if isinstance(node, ast.Import | ast.ImportFrom) and re.search(r"\b(jax|orbax)\b", ast.unparse(node))
    ]


def through_the_fence(sources: Sources) -> list[str]:
    """`compile/cpu` is a plug-in: only `compile/backends.py` knows it, by its name."""
    return [
        f"{path}:{line}: imports {origin}"
        for path, text in sources.items()
        if not path.startswith("compile/cpu/")
        for _, origin, line in imported(path, text)
        if within(origin, "purestep.compile.cpu")
    ]


def into_a_package(sources: Sources) -> list[str]:
    """Names of another package's file, which its ``__init__`` should have; a module of it as a whole is fine."""
    found = []
    for path, text in sources.items():
        for node in ast.walk(parsed(text)):
            if isinstance(node, ast.ImportFrom) and node.level:
                package = ["purestep", *Path(path).parts[:-1]]
                origin = [*package[: len(package) - node.level + 1], *(node.module or "").split(".")]
                if len(origin) > 2 and origin[:2] != package[:2]:
                    found.append(f"{path}:{node.lineno}: imports from {'.'.join(origin)}")
    return found


def names_twice(sources: Sources) -> list[str]:
    """Files of one name: a name in a traceback says where it is."""
    names = Counter(name for path in sources if (name := Path(path).name) != "__init__.py")
    return [path for path in sources if names[Path(path).name] > 1]


CHECKS = {"check_rate", "check_range", "check_count"}
"""They raise a ConfigError for the function that calls them."""


def unsaid_errors(sources: Sources) -> list[str]:
    """Errors that a public function raises itself, or by one of the checks of arguments, without a word about it."""
    found = []
    for path, text in sources.items():
        public = [
            node
            for scope in ast.walk(parsed(text))
            if isinstance(scope, ast.Module) or (isinstance(scope, ast.ClassDef) and not scope.name.startswith("_"))
            for node in scope.body
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
        ]
        for function in public:
            said = ast.get_docstring(function) or ""
            unsaid = [error for error in sorted(_raised(function)) if error not in said]
            found += [f"{path}:{function.lineno}: {function.name} raises {error}" for error in unsaid]
    return found


def _raised(function: ast.FunctionDef) -> set[str]:
    """The library's errors, also of functions inside: what they are raised by is what the function has made."""
    found = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            found.add(_dotted(node.exc.func).split(".")[-1])
        elif isinstance(node, ast.Call) and _dotted(node.func) in CHECKS:
            found.add("ConfigError")
    return found & {name for name, kind in vars(errors).items() if isinstance(kind, type)}


def unlisted_modules(sources: Sources) -> list[str]:
    """Modules that the docstring of their package does not name."""
    found = []
    for path in sources:
        init = sources.get(str(Path(path).parent / "__init__.py"))
        if init is None or Path(path).stem in ("__init__", "__main__"):
            continue
        if Path(path).stem not in re.findall(r"\w+", ast.get_docstring(parsed(init)) or ""):
            found.append(path)
    return found


def attics(sources: Sources) -> list[str]:
    """Folders and files named for nothing in particular."""
    names = {"utils", "util", "common", "helpers", "misc", "core", "_src", "experimental"}
    return [path for path in sources if names & set(Path(path).with_suffix("").parts)]


RULES: list[tuple[Rule, str, str]] = [
    (upward_imports, "tree.py", "from .model import bind"),
    (upward_imports, "ema.py", "from . import scaler"),
    (upward_imports, "optim/adam.py", "from ..loop import fit"),
    (upward_imports, "optim/adam.py", "from .. import step"),
    (upward_imports, "step.py", "def f():\n    import purestep.loop"),
    (upward_imports, "step.py", "from purestep import fit"),
    (upward_imports, "model.py", "from .nowhere import x"),
    (modules_without_a_level, "engine.py", ""),
    (impurities, "step.py", "import time"),
    (impurities, "step.py", "from threading import local"),
    (impurities, "compile/cpu/backend.py", "import threading"),
    (impurities, "schedules.py", "from pathlib import Path"),
    (impurities, "metrics.py", "def f():\n    import logging"),
    (impurities, "optim/adam.py", "print(1)"),
    (impurities, "model.py", "def f():\n    global x"),
    (impurities, "compile.py", "cache = {}"),
    (impurities, "compile/cpu/backend.py", "import os"),
    (impurities, "compile/cpu/code_cache.py", "seen = {}"),
    (impurities, "ema.py", "seen: list[int] = list()"),
    (out_of_place, "model.py", "import optree"),
    (out_of_place, "step.py", "from optree import tree_map"),
    (out_of_place, "loop.py", "def f():\n    from orbax.checkpoint import v1"),
    (out_of_place, "loop.py", "import jax.numpy"),
    (out_of_place, "step.py", "from torch.func import functional_call"),
    (out_of_place, "step.py", "import torch\ntorch.func.functional_call(1)"),
    (out_of_place, "tools/bench.py", "import torch as t\nt.compile(f)"),
    (out_of_place, "model.py", "from torch import func\nfunc.grad_and_value(f)"),
    (out_of_place, "optim/torch.py", "import torch\ntorch.autograd.grad(a, b)"),
    (out_of_place, "optim/torch.py", "loss.backward()"),
    (out_of_place, "data.py", "import torch\ntorch.manual_seed(0)"),
    (out_of_place, "snapshot/read.py", "import pickle"),
    (out_of_place, "export.py", "import torch\ntorch.load(path)"),
    (eager_heavy_imports, "snapshot.py", "from orbax.checkpoint import v1"),
    (through_the_fence, "compile/capture.py", "from .cpu import backend"),
    (through_the_fence, "loop/fit.py", "from ..compile.cpu.backend import record"),
    (private_names, "loop/fit.py", "from torch.utils.data._utils import worker"),
    (private_names, "snapshot/writer.py", "import jax._src"),
    (private_names, "step/update.py", "from torch import _foreach_add"),
    (private_names, "model/bound.py", "def f(module):\n    return module._buffers"),
    (private_names, "model/bound.py", "def f(module):\n    module._apply = f"),
    (private_names, "data/shares.py", "def f(loader):\n    return getattr(loader, '_workers', None)"),
    (into_a_package, "loop/fit.py", "from ..compile.buffers import states"),
    (into_a_package, "ema.py", "from .model.template import unwrapped"),
    (unsaid_errors, "step.py", 'def f():\n    """Does."""\n    raise ConfigError("x")'),
    (unsaid_errors, "step.py", "class C:\n    def f(self):\n        raise errors.ConfigError('x')"),
    (unsaid_errors, "optim/adam.py", "def f(x):\n    check_rate('f', 'x', x)"),
    (unsaid_errors, "optim/adam.py", "def f():\n    def update():\n        raise StateError('x')"),
    (names_twice, "loop/fit.py config/fit.py", ""),
    (unlisted_modules, "optim/__init__.py optim/adam.py", '"""Optimizers.\n\nsgd   SGD\n"""'),
    (attics, "utils.py", ""),
    (attics, "core/step.py", ""),
]


@pytest.mark.parametrize(
    ("rule", "path", "text"), RULES, ids=[f"{r.__name__}-{i}" for i, (r, _, _) in enumerate(RULES)]
)
def test_a_planted_violation_is_found(rule: Rule, path: str, text: str):
    assert rule(dict.fromkeys(path.split(), text))


@pytest.mark.parametrize("rule", sorted({rule for rule, _, _ in RULES}, key=lambda rule: rule.__name__))
def test_the_house_keeps_the_rule(rule: Rule):
    assert rule(SOURCES) == []


def test_what_is_allowed_is_not_flagged():
    allowed = {
        "model.py": "from torch.func import functional_call\nfrom .tree import map\nfrom .types import Params",
        "optim/adam.py": "from .sgd import sgd\nfrom ..model import unwrapped\nTABLE = {'adam': 1}",
        "optim/torch.py": "import torch\nparam.grad = g\ntorch.compiler.is_compiling()",
        "torch_ext/global_rng.py": "import torch\ntorch.default_generator.manual_seed(0)",
        "loop.py": "import time\nfrom .step import program\nprint(time.time())",
        "snapshot.py": "def save():\n    from orbax.checkpoint import v1",
        "__init__.py": '"""model loop snapshot ema"""\nfrom .loop import fit as fit',
        "optim/__init__.py": '"""Optimizers.\n\nadam   Adam\ntorch  its own"""',
        "step/a.py": "class A(NamedTuple):\n    def f(self):\n        self._x = 1\n        return self._replace()._x",
        "ema.py": 'def f(x):\n    """Raises:\n        ConfigError: for x."""\n    require("f", x=x)',
        "tools/b.py": "def _f():\n    raise ConfigError('x')\ndef g():\n    raise\ndef h():\n    raise KeyError('x')",
    }
    assert [violation for rule, _, _ in RULES for violation in rule(allowed)] == []


HEAVY = ("jax", "orbax", "sympy", "pydantic")  # sympy: Dynamo, a second; pydantic: as much as purestep itself
USES = {
    "ps.compile_step": "compile",
    "ps.data.open_feed": "data",
    "from purestep import Snapshots": "snapshot",
    "ps.fit": "loop",
    "ps.testing": "testing",
}
IMPORT = """
import json, logging, random, sys, warnings
import torch

def state():
    return (logging.root.handlers[:], logging.root.level, warnings.filters[:], random.getstate(),
            torch.get_rng_state().tolist(), torch.get_default_dtype(), torch.get_num_threads(),
            torch.get_float32_matmul_precision(), torch.is_grad_enabled())

before, modules = state(), set(sys.modules)
import purestep as ps
found = {"same": state() == before, "all": sorted(sys.modules), "new": sorted(set(sys.modules) - modules), "late": []}
logging.root.addHandler(logging.NullHandler())
found["planted"] = state() == before
for use, module in {uses}.items():
    earlier = module in sys.modules
    exec(use)
    found["late"].append([module, earlier, module in sys.modules])
print(json.dumps(found))
"""


def printed(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=PACKAGE.parent).stdout.strip()


def heavy(modules: Iterable[str]) -> set[str]:
    return {name.partition(".")[0] for name in modules} & set(HEAVY)


def unasked(modules: Iterable[str]) -> set[str]:
    """Modules of torch and numpy's generators that an import has loaded."""
    return {name for name in modules if name.startswith(("torch", "numpy.random"))}


def test_an_import_changes_nothing_is_light_and_loads_the_rest_where_it_is_asked_for():
    """In a fresh process, which then uses one late name after the other."""
    uses = {use: f"purestep.{module}" for use, module in USES.items()}
    found = json.loads(printed(IMPORT.replace("{uses}", repr(uses))))
    assert found["same"]
    assert not found["planted"]  # a handler is seen
    assert heavy(found["all"]) == set()
    assert heavy(["jax.numpy"]) == {"jax"}
    assert unasked(found["new"]) == set()
    assert unasked(["numpy.random.mtrand", "torch._dynamo"]) == {"numpy.random.mtrand", "torch._dynamo"}
    pure = {f"purestep.{name}" for name in LEVEL if LEVEL[name] <= LEVEL["step"]}
    assert {name for name in found["new"] if name.count(".") == 1 and name.startswith("purestep.")} == pure
    assert found["late"] == [[module, False, True] for module in uses.values()]


def test_a_late_package_may_be_the_first_import_of_all():
    code = "import sys, purestep\nbefore = 'purestep.loop' in sys.modules\nfrom purestep.loop import fit\nprint(before)"
    assert printed(code) == "False"


def test_late_names_are_those_that_type_checkers_are_told(monkeypatch: pytest.MonkeyPatch):
    package = importlib.import_module("purestep")
    assert set(package._HOME) < exported(SOURCES["__init__.py"])
    assert {name for name in exported(SOURCES["__init__.py"]) if name not in dir(package)} == set()
    with pytest.raises(AttributeError, match="module 'purestep' has no attribute 'fitt'"):
        package.fitt  # noqa: B018  # asking is the test
    monkeypatch.setitem(package._HOME, "fitt", "loop")
    with pytest.raises(AttributeError, match="fitt"):
        package.fitt  # noqa: B018
    monkeypatch.setitem(sys.modules, "purestep.broken", None)
    with pytest.raises(AttributeError, match="broken"):
        package.broken  # noqa: B018


def exported(text: str) -> set[str]:
    """The names that a package's ``__init__.py`` re-exports: one statement each, no star."""
    found = {local for local, origin, _ in imported("__init__.py", text) if not within(origin, "__future__")}
    return {name for name in found if not name.startswith("_")}
