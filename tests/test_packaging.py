"""The metadata that `pip` and a package index show, and the files that a build contains."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
from rigs.parallel.processes import once

import purestep as ps

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)]*)\)")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an sdist and a wheel, built without a network."""
    for name in ("hatchling", "hatch_fancy_pypi_readme"):
        pytest.importorskip(name, reason=f"{name} is not installed: pip install 'purestep[test]'")

    def build() -> str:
        folder = tmp_path_factory.mktemp("dist")
        command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
        return str(folder)

    return Path(once(tmp_path_factory, "dist", build))


@pytest.fixture(scope="module")
def metadata(built: Path) -> Message:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        (name,) = (name for name in files.namelist() if name.endswith("/METADATA"))
        return message_from_string(files.read(name).decode())


def without_address(link: re.Match[str]) -> str:
    """The text of a relative link; nothing for a picture."""
    return link[0] if link[2].startswith(("http", "#")) else "" if link[1] else re.split(r"[\[\]]", link[0])[1]


def test_the_page_on_an_index_is_the_readme_without_dead_links(metadata: Message):
    page, readme = str(metadata.get_payload()), (ROOT / "README.md").read_text()
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert any(not target.startswith("http") for _, target in LINK.findall(readme))
    assert [target for _, target in LINK.findall(page) if not target.startswith(("http", "#"))] == []
    assert re.findall(r"```python\n.*?```", page, re.DOTALL) == re.findall(r"```python\n.*?```", readme, re.DOTALL)
    words = LINK.sub(without_address, readme)
    assert page.split() == words.split()  # nothing else is left out


def test_the_metadata_name_no_address(metadata: Message):
    """There is no public repository yet. If there is one, write it into pyproject.toml, and its links into the page."""
    assert metadata.get_all("Project-URL") is None
    assert metadata["Author"] == "The purestep authors"
    versions = [line for line in metadata.get_all("Classifier", []) if re.search(r":: 3\.\d+$", line)]
    assert [line.rpartition(" ")[2] for line in versions] == ["3.11", "3.12", "3.13"]


def test_the_hosted_checks_are_those_of_the_classifiers_and_of_this_checkout():
    yaml = pytest.importorskip("yaml", reason="pyyaml comes with transformers: pip install 'purestep[test]'")
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]
    steps = [step for job in jobs.values() for step in job["steps"]]
    assert all(("run" in step) != ("uses" in step) for step in steps)
    assert [step["run"] for step in jobs["linux"]["steps"] if "run" in step] == [".ci/run"]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100
    taken = {step["with"]["python-version"] for step in steps if "python-version" in step.get("with", {})}
    taken |= {each["python"] for each in jobs["versions"]["strategy"]["matrix"]["include"]}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert sorted(taken - {"${{ matrix.python }}"}) == named


def test_an_sdist_has_every_file_that_its_own_build_reads(built: Path):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    fragments = project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["fragments"]
    assert {"pyproject.toml", "LICENSE", "src/purestep/py.typed"} | {one["path"] for one in fragments} <= names


def test_every_name_in_the_changelog_exists():
    names = re.findall(r"`(ps(?:\.\w+)+)", (ROOT / "CHANGELOG.md").read_text())
    assert len(names) > 20
    for name in names:
        found: object = ps
        for part in name.split(".")[1:]:
            found = getattr(found, part)
