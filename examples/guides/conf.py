"""The site: README, guides, examples and a page for each public name.

    pip install -e '.[docs]'
    sphinx-build -W -c examples/guides -b html . build/site

The sources are the pages of the repository, so `conf.py` is beside the guides and the root is the source directory. The
pages of names are written into `build/reference` before the build.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ForwardRef, TypeVar

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT / "src")]

import reference  # noqa: E402
from docutils.nodes import SkipNode  # noqa: E402
from docutils.utils.math.latex2mathml import tex2mathml  # noqa: E402

project = "purestep"
author = copyright = "The purestep authors"
root_doc = "README"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
include_patterns = [
    "*.md",
    "benchmarks/LESSONS.md",
    "benchmarks/README.md",
    "benchmarks/results/**.md",
    "build/reference/*.md",
    "examples/README.md",
    "examples/guides/*.md",
    "tests/derivatives/layers.md",
    "tests/rigs/parallel/NCCL.md",
    "tests/rigs/parallel/peaks.md",
    "tests/systems/README.md",
]
exclude_patterns = ["build/site"]
source_suffix = {".md": "markdown"}

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4
default_role = "py:obj"
autodoc_member_order = "bysource"
napoleon_numpy_docstring = False
napoleon_custom_sections = [("Fields", "params_style")]
napoleon_preprocess_types = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100

html_theme = "furo"
html_title = "purestep"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_search_scorer = str(HERE / "search.js")
html_math_renderer = "mathml"
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "monokai"
copybutton_prompt_text = "$ "


SECTIONS = {
    "Begin": "start faq state compile resume nan averages tools events settings",
    "Recipes": "classifier finetune diffusion models optimizers metrics data two_datasets teachers precision memory",
    "More": "loop processes jobs ensembles search derivatives gradients",
    "Moving over": "moving from_loop from_lightning from_trainer from_accelerate from_keras",
    "About": "limits trust platforms measure architecture tests",
}
"""The guides, in the order of the menu."""

OTHERS = ["examples/guides/README", "examples/README", "build/reference/index", "benchmarks/README", "CHANGELOG"]


def menu() -> str:
    """Hidden lists of pages, which README.md has on the site alone."""
    parts = {"": OTHERS[:3]}
    parts |= {title: [f"examples/guides/{name}" for name in names.split()] for title, names in SECTIONS.items()}
    parts["Project"] = [*OTHERS[3:], "CONTRIBUTING", "SECURITY"]
    lists = [f":caption: {title}\n\n" + "\n".join(pages) for title, pages in parts.items()]
    return "".join(f"\n```{{toctree}}\n:hidden:\n{text}\n```\n" for text in lists).replace(":caption: \n", "")


def read(app: Any, page: str, source: list[str]) -> None:
    """The list of public names is the reference of the site."""
    source[0] = re.sub(r"\((?:\.\./)*src/purestep/README\.md\)", "(/build/reference/index.md)", source[0])
    if page.startswith(("benchmarks/results/", "benchmarks/LESSONS", "tests/")):
        source[0] = f"---\norphan: true\n---\n{source[0]}"  # linked from a page, and not in the menu
    if page == root_doc:
        source[0] += menu()


def write_reference(*_: Any) -> None:
    """A page for each public module, with a table of its names, and one for each name."""
    folder = ROOT / "build" / "reference"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.md"):
        old.unlink()
    names = reference.public_names()
    first: dict[int, str] = {}  # a value that has several names -> its page
    for module, members in names.items():
        listed = [name for name in members if not isinstance(reference.value_of(module, name), ModuleType)]
        rows = [f"| [`{name}`]({module}.{name}.md) | {reference.sentence(module, name)} |" for name in listed]
        about = "" if module == "purestep" else f"{reference.sentence('purestep', module.partition('.')[2])}\n\n"
        table = "| name | what it is |\n|---|---|\n" + "\n".join(rows)
        entries = "\n".join(f"{module}.{name}" for name in listed)
        page = f"# {module}\n\n{about}{table}\n\n```{{toctree}}\n:hidden:\n\n{entries}\n```\n"
        (folder / f"{module}.md").write_text(page, "utf-8")
        for name in listed:
            path = f"{module}.{name}"
            same = first.setdefault(id(reference.value_of(module, name)), path)
            text = _directive(module, name) if same == path else f"The same as [`{same}`]({same}.md).\n"
            (folder / f"{path}.md").write_text(f"# {name}\n\n{text}", "utf-8")
    intro = "# Every public name\n\nWrite `import purestep as ps`, then `ps.fit`, `ps.optim.adamw`, and so on.\n\n"
    table = "| module | names |\n|---|---|\n"
    for module, members in names.items():
        linked = (f"[`{name}`]({module}.{name}.md)" for name in members if (folder / f"{module}.{name}.md").exists())
        table += f"| [{module}]({module}.md) | {', '.join(linked)} |\n"
    listed = "\n".join(names)
    (folder / "index.md").write_text(f"{intro}{table}\n```{{toctree}}\n:hidden:\n\n{listed}\n```\n", "utf-8")


def _directive(module: str, name: str) -> str:
    value = reference.value_of(module, name)
    if isinstance(value, type):
        lines = [f".. autoclass:: {module}.{name}", "   :members:"]
    elif inspect.isroutine(value):
        lines = [f".. autofunction:: {module}.{name}"]
    else:  # a type alias
        assigned = reference.assigned(module, name)
        text = reference.sentence(module, name).replace("`", "``")
        lines = [f".. py:data:: {module}.{name}", *[f"   :value: {assigned}"][: bool(assigned)], "", f"   {text}"]
    return "```{eval-rst}\n" + "\n".join(lines) + "\n```\n"


class _AsWritten(str):
    """An annotation that a signature shows as the source has it."""

    __slots__ = ()
    __repr__ = str.__str__


class _Plain(ast.NodeTransformer):
    """An annotation without the checks of `Annotated` and without private names."""

    def __init__(self, names: dict[str, Any]) -> None:
        self.names = names

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id == "Annotated" and isinstance(node.slice, ast.Tuple):
            return self.visit(node.slice.elts[0])
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        value = self.names.get(node.id)
        if not node.id.startswith("_") or value is None:
            return node
        if isinstance(value, TypeVar):
            return ast.Name(node.id.strip("_"))
        text = inspect.formatannotation(getattr(value, "__origin__", value))
        return ast.Name(re.sub(r"(?:\w+\.)+(\w+)", r"\1", text))


def signature(app: Any, what: str, name: str, value: Any, *_: Any) -> tuple[str, str] | None:
    """Annotations as the source has them: evaluated ones are long, and show checks as addresses."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return None
    names = vars(sys.modules[value.__module__]) if value.__module__ in sys.modules else {}

    def written(annotation: Any) -> Any:
        text = annotation.__forward_arg__ if isinstance(annotation, ForwardRef) else annotation  # of a NamedTuple
        if not isinstance(text, str):
            return inspect.Parameter.empty if "Annotated" in repr(text) else text  # pydantic's are checks
        return _AsWritten(ast.unparse(_Plain(names).visit(ast.parse(text, mode="eval"))))

    parameters = [
        one.replace(
            annotation=written(one.annotation),
            default=_AsWritten("...") if inspect.isroutine(one.default) else one.default,
        )
        for one in found.parameters.values()
    ]
    parameters = parameters[1:] if parameters and parameters[0].name in ("self", "cls", "_cls") else parameters
    none = isinstance(value, type) or found.return_annotation is found.empty
    returned = "" if none else str(written(found.return_annotation))
    return str(inspect.Signature(parameters)), returned


def math(self: Any, node: Any) -> None:
    """Equations as MathML, which needs neither a network nor a script."""
    block = node.tagname == "math_block"
    text = tex2mathml(node.astext(), as_block=block)
    self.body.append(f"<p>{text}</p>" if block else text)
    raise SkipNode


def setup(app: Any) -> None:
    app.connect("builder-inited", write_reference)
    app.connect("source-read", read)
    app.connect("autodoc-process-signature", signature)
    app.add_html_math_renderer("mathml", (math, None), (math, None))
