"""Write the generated parts of the pages from the docstrings: every public name, the settings of `fit`, the events.

    python examples/guides/reference.py            # write them
    python examples/guides/reference.py --check    # fail if a page is not what it would be

`src/purestep/README.md` is written whole; other pages between two comments. `conf.py` makes the pages of the site from
the same functions.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
import typing
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PACKAGE = ROOT / "src" / "purestep"

HEAD = """# Every public name

Write `import purestep as ps`, then `ps.fit`, `ps.optim.adamw`, and so on. A name that is not listed here is not public.
The docstring of each name has its arguments, errors, equations and an example: `help(ps.fit)`.

This page is made from the docstrings: `python examples/guides/reference.py`.
"""


# --- the names ---


def public_names() -> dict[str, list[str]]:
    """``{module: names}`` of `purestep` and of each module that it exports."""
    package = importlib.import_module("purestep")
    top = _names(package)
    modules = [name for name in top if isinstance(getattr(package, name), ModuleType)]
    return {"purestep": top} | {f"purestep.{name}": _names(getattr(package, name)) for name in modules}


def _names(module: ModuleType) -> list[str]:
    """The names that a package re-exports (one ``import name as name`` each), or that a module defines."""
    path = Path(str(module.__file__))
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and path.name == "__init__.py" and node.module != "__future__":
            found |= {alias.asname or alias.name for alias in node.names}
    for node in [] if path.name == "__init__.py" else ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            found.add(_target(node))
    return sorted((name for name in found if name and not name.startswith("_")), key=lambda name: (name.lower(), name))


def _target(node: ast.Assign | ast.AnnAssign) -> str:
    target = node.targets[0] if isinstance(node, ast.Assign) else node.target
    return target.id if isinstance(target, ast.Name) else ""


def value_of(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


def sentence(module: str, name: str) -> str:
    """The first sentence of a docstring; of a type alias or constant, of the text after its assignment."""
    value = value_of(module, name)
    own = inspect.isroutine(value) or isinstance(value, type | ModuleType)
    text = (inspect.getdoc(value) if own and not typing.get_origin(value) else _after_assignment(module, name)) or ""
    first = _cell(text.partition("\n\n")[0])
    words = re.split(r"(?<!al)\. (?=[\w`])", first)[0].partition(":math:")[0]  # a formula follows the words
    return words.removesuffix(": the ").rstrip(" .,:;") + "."


def assigned(module: str, name: str) -> str:
    """The source of the value of ``Name: TypeAlias = ...``."""
    return _assignment(module, name)[0]


def _after_assignment(module: str, name: str) -> str:
    return _assignment(module, name)[1]


def _assignment(module: str, name: str) -> tuple[str, str]:
    """The value of ``Name: TypeAlias = ...``, and the string literal under it, in the file that has it."""
    room = PACKAGE / module.removeprefix("purestep").strip(".")
    for path in [*sorted(PACKAGE.glob("*.py")), *sorted(room.glob("*.py"))]:
        for node, after in pairwise(ast.parse(path.read_text("utf-8")).body):
            found = isinstance(node, ast.Assign | ast.AnnAssign) and _target(node) == name and node.value is not None
            if found and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                return ast.unparse(node.value).strip("'"), str(after.value.value)
    return "", ""


# --- fields ---


def fields(cls: type) -> dict[str, str]:
    """Fields of a NamedTuple or dataclass with the text that the section ``Args`` of its docstring has for each."""
    found: dict[str, str] = {}
    name, inside = "", False
    for line in (inspect.getdoc(cls) or "").splitlines():
        if not line.startswith(" ") and line:
            inside = line == "Args:"
        elif inside and (match := re.match(r"    (\w+): (.*)", line)):
            name = match[1]
            found[name] = match[2]
        elif inside and name and line.strip():
            found[name] += " " + line.strip()
    return found


# --- the parts of pages ---


def names_page() -> str:
    parts = [HEAD]
    for module, names in public_names().items():
        rows = [f"| `{name}` | {sentence(module, name)} |" for name in names]
        parts.append(f"\n## `{module}`\n\n| name | what it is |\n|---|---|\n" + "\n".join(rows) + "\n")
    return "".join(parts)


def events_table() -> str:
    from purestep import events

    rows = ["| event | sent | fields |", "|---|---|---|"]
    for name in [one.__name__ for one in typing.get_args(events.Event)]:
        cls = getattr(events, name)
        when = " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].split()).removeprefix("Sent ").rstrip(".")
        listed = "<br>".join(f"`{field}`: {_cell(text)}" for field, text in fields(cls).items())
        rows.append(f"| `{name}` | {_cell(when)} | {listed} |")
    return "\n".join(rows)


def settings_table() -> str:
    import purestep as ps

    rows = ["| setting | default | meaning |", "|---|---|---|"]
    for name, field in ps.FitConfig.model_fields.items():
        rows.append(f"| `{name}` | `{field.default!r}` | {_cell(field.description or '')} |")
    return "\n".join(rows)


def state_table() -> str:
    import purestep as ps

    rows = ["| field | meaning |", "|---|---|"]
    return "\n".join(rows + [f"| `{name}` | {_cell(text)} |" for name, text in fields(ps.TrainState).items()])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("``", "`").replace("|", "\\|")


PARTS = {"events": events_table, "settings": settings_table, "state": state_table}


def pages() -> Iterator[tuple[Path, str]]:
    """Each page that has generated parts, as it should be."""
    yield PACKAGE / "README.md", names_page()
    for path in sorted(HERE.glob("*.md")):
        text = path.read_text("utf-8")
        made = re.sub(
            r"(<!-- generated: (\w+) -->\n).*?(\n<!-- end -->)",
            lambda match: f"{match[1]}\n{PARTS[match[2]]()}\n{match[3]}",
            text,
            flags=re.DOTALL,
        )
        if made != text or "<!-- generated" in text:
            yield path, made


def main(*, check: bool) -> int:
    stale = [path for path, text in pages() if path.read_text("utf-8") != text]
    for path, text in pages() if not check else ():
        path.write_text(text, "utf-8")
    for path in stale:
        print(f"{path.relative_to(ROOT)}: {'is not what the docstrings say' if check else 'written'}")
    return len(stale) if check else 0


if __name__ == "__main__":
    sys.exit(main(check="--check" in sys.argv[1:]))
