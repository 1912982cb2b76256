"""Links in README.md, the guides and examples/README.md lead somewhere, and each part of the first README has its page.

Each rule is a function that lists violations, and has planted ones that it must find.
"""

from __future__ import annotations

import re
from pathlib import Path

import pages
import pytest

INDEX = pages.GUIDES / "README.md"
LINKING = [
    *pages.PROGRAMS,
    pages.ROOT / "examples" / "README.md",
    pages.ROOT / "tests" / "systems" / "README.md",
    pages.ROOT / "benchmarks" / "README.md",
]

HEADINGS = {
    "What follows from that: speed": "measure.md#one-training-step-on-the-cpu",
    "What follows from that: resuming that is exact to the bit": "resume.md#resume",
    "What follows from that: steps that can be tested, mapped and differentiated": "state.md",
    "one training step, one H200": "measure.md#one-training-step-on-a-gpu",
    "pip install": "platforms.md#install",
    "`program` makes the pure steps": "start.md#train-and-resume",
    "Run it again": "start.md#train-and-resume",
    "With a schedule, clipping, metrics": "start.md#schedule-clipping-metrics-averaged-weights-the-best-epoch",
    "`program.init(seed=)`": "start.md#initial-weights-and-the-seed",
    "Two commands: digits": "tests.md#an-example",
    "Two commands: run the tests": "tests.md#the-tests",
    "A step can be tested alone": "state.md#a-step-can-be-tested-alone",
    "A state is changed by making a new one": "state.md#a-state-is-changed-by-making-a-new-one",
    "A step can be mapped": "derivatives.md#map",
    "A step can be differentiated": "derivatives.md#differentiate",
    "Gradients are values too": "gradients.md",
    "Many models train in one step": "ensembles.md",
    "A run can be stopped anywhere": "resume.md#resume",
    "A loss that is not finite ends a run of `fit`": "nan.md#find-the-operation",
    "The averaged weights are a view": "averages.md#scored-and-shipped-weights-are-the-same",
    "A step compiles as one graph": "compile.md#compile-a-step",
    "A donated step overwrites its input state": "compile.md#a-donated-step-overwrites-its-input-state",
    "Eager steps beside a loop by hand": "compile.md#uncompiled-speed",
    "On CUDA a donated step is recorded": "compile.md#cuda-graphs",
    "LSTMs and other recurrent layers": "compile.md#recurrent-layers",
    "`torch.cond` and `torch.while_loop`": "compile.md#control-flow",
    "BatchNorm for channels-last tensors": "compile.md#channels-last-batchnorm-on-the-cpu",
    "`ps.benchmark`": "compile.md#time-a-step",
    "A loop of your own": "loop.md",
    "`state.halted`": "nan.md#continue-after-a-nan",
    "Several processes": "processes.md",
    "Several processes: the table": "processes.md#ddp-fsdp-zero-tensor-parallel",
    "Several processes: the list": "processes.md#rules",
    "Where is ...?": "README.md#where-is-",
    "From Lightning": "from_lightning.md#before",
    "Where it runs": "platforms.md#where-it-runs",
    "`OMP_WAIT_POLICY=passive`": "platforms.md#slow-steps-on-a-busy-machine",
}
"""Headings, bold leads and unnamed paragraphs of the first README -> the page, and heading, that has them now."""

ROWS = {
    "mixed precision": "precision.md#mixed-precision",
    "the device": "precision.md#the-device",
    "gradient accumulation": "precision.md#gradient-accumulation",
    "a rate by epochs": "optimizers.md#a-schedule-by-epochs",
    "gradient clipping": "optimizers.md#gradient-clipping",
    "parameter groups, rates by layer": "optimizers.md#parameter-groups-learning-rates-by-layer",
    "the weight of a term": "optimizers.md#the-weight-of-a-term-a-temperature-by-a-schedule",
    "a torch optimizer or scheduler": "optimizers.md#an-optimizer-or-scheduler-of-torch",
    "pretrained weights": "models.md#pretrained-weights",
    "less memory": "precision.md#less-memory",
    "weights of another run": "models.md#weights-of-another-run",
    "a finished run, in a new process": "models.md#a-finished-run-in-a-new-process",
    "frozen layers": "models.md#frozen-layers",
    "a loss of your own, of several terms": "models.md#your-own-loss-of-several-terms",
    "several optimizers or networks": "../custom_step.py",
    "early stopping, the best epoch": "tools.md#early-stopping-and-the-best-epoch",
    "which snapshots are kept": "resume.md#which-snapshots-are-kept",
    "hooks": "tools.md#callbacks",
    "metrics": "metrics.md#metrics",
    "how a run stands": "tools.md#the-progress-of-a-run",
    "curves of several runs": "tools.md#curves-of-several-runs",
    "Weights & Biases": "metrics.md#weights--biases",
    "MLflow": "metrics.md#mlflow",
    "TensorBoard, CSV": "metrics.md#tensorboard-csv-json-lines",
    "histograms of weights and gradients": "metrics.md#histograms-of-weights-and-gradients",
    "a generator, a stream of data, with snapshots": "data.md#a-generator-a-stream-with-snapshots",
    "a test set": "data.md#a-test-set",
    "DDP, FSDP, DeepSpeed, tensor parallel": "processes.md#ddp-fsdp-zero-tensor-parallel",
    "a compiled or parallel module": "models.md#a-compiled-or-parallel-module",
    "a logger of your own": "metrics.md#your-own-logger",
    "several processes, or GPUs": "processes.md#start",
    "a loader without indices on several processes": "processes.md#a-loader-without-indices",
    "an ensemble, several seeds, a sweep of rates": "ensembles.md#a-sweep-of-learning-rates",
    "a learning-rate finder": "tools.md#a-learning-rate-finder",
    "predictions for a data set": "data.md#predictions-for-a-data-set",
    "a table of the layers": "tools.md#a-table-of-the-layers",
    "a lower rate on a plateau": "optimizers.md#a-lower-learning-rate-on-a-plateau",
    "SWA": "averages.md#swa",
    "a command line, a config file": "tools.md#a-command-line-and-a-config-file",
    "warm restarts": "optimizers.md#warm-restarts",
    "SAM, ASAM": "optimizers.md#sam-and-asam",
    "no schedule at all": "optimizers.md#no-schedule-at-all",
    "the largest batch": "precision.md#the-largest-batch",
    "a Hugging Face model": "models.md#a-hugging-face-model",
    "LoRA and other adapters of PEFT": "models.md#lora-and-other-adapters-of-peft",
    "inference, export": "models.md#inference-and-export",
    "gradients of single examples, influence": "gradients.md#gradients-of-single-examples",
    "differential privacy": "gradients.md#differential-privacy",
    "sharpness, Hessian, trace": "gradients.md#sharpness-hessian-trace",
    "which batch size is worth it": "gradients.md#the-batch-size-that-is-worth-its-cost",
    "why two runs differ": "nan.md#why-two-runs-differ",
    "profiling": "tools.md#profiling",
}
"""Rows of "Where is ...?" -> the target of its link."""


# --- links ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", LINKING, ids=lambda path: path.relative_to(pages.ROOT).as_posix())
def test_every_link_leads_somewhere(path: Path):
    found = pages.broken_links(path, path.read_text("utf-8"))
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("link", "complaint"),
    [
        ("other.md", ""),
        ("other.md#weights--biases", ""),
        ("other.md#twice-1", ""),
        ("#page", ""),
        ("https://example.org/nowhere.md", ""),
        ("nowhere.md", "page.md: nowhere.md: there is no such file"),
        ("other.md#weights-biases", "other.md#weights-biases: there is no such heading"),
        ("other.md#in-code", "there is no such heading"),
        ("#nowhere", "there is no such heading"),
    ],
)
def test_a_broken_link_is_found(link: str, complaint: str, tmp_path: Path):
    (tmp_path / "other.md").write_text("# Weights & Biases\n\n## Twice\n\n## Twice\n\n```sh\n# in code\n```\n")
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\nSee [it]({link}).\n")
    found = pages.broken_links(page, page.read_text())
    assert bool(found) == bool(complaint)
    assert complaint in "".join(found)


def test_links_in_code_are_code():
    assert pages.links("`rows[0](x)`\n\n```python\nrows[0](x)\n```\n\n[a](b.md) ![c](d.png)\n") == ["b.md", "d.png"]


# --- the parts of the first README ------------------------------------------------------------------------------------


def lost(targets: dict[str, str]) -> list[str]:
    """Parts whose page or heading does not exist."""
    page = "".join(f"[{part}]({target})\n" for part, target in targets.items())
    return pages.broken_links(INDEX.with_name("moved.md"), page)


def rows(index: str) -> list[str]:
    """The targets of "Where is ...?", the first one of each row."""
    table = index.partition("## Where is ...?")[2].partition("\n## ")[0]
    return re.findall(r"^\| [^|]* \| \[[^]]*\]\(([^()\s]+)\)[^|`]*\|$", table, flags=re.MULTILINE)


def test_every_part_of_the_first_readme_has_its_page():
    assert not lost(HEADINGS | ROWS)
    assert lost({"Resume": "resume.md#nowhere", "Start": "nowhere.md"}) == [
        "moved.md: resume.md#nowhere: there is no such heading",
        "moved.md: nowhere.md: there is no such file",
    ]


def test_the_index_has_every_row_and_no_code():
    assert set(ROWS.values()) <= set(rows(INDEX.read_text("utf-8")))
    table = "## Where is ...?\n\n| you | it |\n|---|---|\n| a | [A](a.md), [B](b.md) |\n"
    assert rows(table) == ["a.md"]
    assert rows(table + "| b | `b` |\n| c | [C](c.md), `c` |\n") == ["a.md"]


def unlisted(index: str, names: set[str]) -> set[str]:
    """Pages that the table of pages and the line of recipes do not have."""
    return names - {link.partition("#")[0] for link in pages.links(index.partition("## Where is ...?")[0])}


def test_every_page_is_in_the_index():
    names = {path.name for path in pages.GUIDES.glob("*.md")} - {INDEX.name}
    index = INDEX.read_text("utf-8")
    assert not unlisted(index, names)
    assert unlisted(index, names | {"new.md"}) == {"new.md"}


def test_the_command_of_the_tests_is_the_same_everywhere():
    """`.ci/run` reads it from README.md."""
    start = "python3 -m venv .venv-test"
    found = [
        [line for line in path.read_text("utf-8").splitlines() if line.startswith(start)]
        for path in (pages.ROOT / "README.md", pages.GUIDES / "tests.md")
    ]
    assert len(found[0]) == 1
    assert found[0] == found[1]


# --- the numbers of "How we measure" ----------------------------------------------------------------------------------

RESULTS = pages.ROOT / "benchmarks" / "results"
JOBS = {
    "MLP, batch 64 (one thread)": "mlp-1",
    "convnet, 32 images": "convnet",
    "GPT, 0.9 M weights, 8 x 128 tokens": "gpt-small",
    "GPT, 34 M weights, 2 x 128 tokens": "gpt-medium",
    "32 small layers, batch 16": "toy32",
    "ViT, 2.7 M weights, 16 images": "vit",
    "GPT-2, 124 M weights, 16 x 1024 tokens, bfloat16": "gpt2",
    "ResNet-50, 64 images of 224 x 224, bfloat16": "resnet50",
}
CONTESTANTS = {
    "by hand, compiled": "by hand, compiled + fused",
    "JAX, donated": "JAX, donated",
    "Lightning, not compiled": "Lightning, fit",
    "purestep, compiled, donated": "purestep, donated",
    "`ps.fit(compile=True)`": "purestep, fit",
    "`ps.fit`": "purestep, fit",
    "eager by hand": "by hand, eager + fused",
    "by hand, `reduce-overhead`": "by hand, reduce-overhead + fused",
}
ELSEWHERE = {("gpt2", "purestep, fit"): "gpt2-apart"}
"""Numbers of another job."""


def medians(report: str) -> dict[tuple[str, str], float]:
    """(job, contestant) -> milliseconds, from results.md."""
    found = {}
    for section in report.split("\n## ")[1:]:
        for name, value, unit in re.findall(r"^\| (.+?) +\| ([\d.]+) (ms|us) +\|", section, flags=re.MULTILINE):
            found[section.partition(":")[0], name] = float(value) / (1000 if unit == "us" else 1)
    return found


def wrong_numbers(table: str, measured: dict[tuple[str, str], float]) -> list[str]:
    """Cells that are not the measured medians, rounded to the digits that they show."""
    (_, *columns), _, *lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]
    found = []
    for label, *cells in lines:
        for column, cell in zip(columns, cells, strict=True):
            shown = re.match(r"\W*([\d.]+) ms", cell)
            if shown is None:
                continue
            # A cell may name another contestant than its column.
            contestant = "by hand, compiled + fused" if "`torch.compile`" in cell else CONTESTANTS[column]
            key = JOBS[label], contestant
            job = ELSEWHERE.get(key, key[0])
            digits = len(shown[1].partition(".")[2])
            true = measured[job, key[1]]
            if abs(float(shown[1]) - true) > 0.51 * 10**-digits:
                found.append(f"{label}, {column}: {cell}, but {true:.4g} ms were measured")
    return found


@pytest.mark.parametrize(("heading", "folder"), [("on the CPU", "cpu"), ("on a GPU", "cuda")])
def test_the_published_times_are_those_that_were_measured(heading: str, folder: str):
    page = (pages.GUIDES / "measure.md").read_text("utf-8").partition(f"## One training step {heading}\n")[2]
    table = "\n".join(re.findall(r"^\|.*", page.partition("\n## ")[0], flags=re.MULTILINE))
    measured = medians((RESULTS / folder / "results.md").read_text("utf-8"))
    assert wrong_numbers(table, measured) == []
    (found,) = wrong_numbers(re.sub(r"(\| convnet, 32 images \| \W*)\d", r"\g<1>9", table), measured)
    assert found.startswith("convnet, 32 images, ")
