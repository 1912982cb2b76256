"""``python -m purestep report``: the page, in a real browser too."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from report.test_show import train

from purestep.__main__ import main
from purestep.errors import ConfigError
from purestep.report import read_run, write_page
from purestep.report.curves import MOST_POINTS, quantities

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PROBE = """<script>
window.addEventListener('error', e => parent.postMessage('error ' + e.message, '*'));
addEventListener('load', () => setTimeout(() => {
  const chart = document.querySelector('.js-plotly-plot');
  const right = part => part.getBoundingClientRect().right;
  parent.postMessage(JSON.stringify({drawn: chart.querySelectorAll('.scatterlayer .trace').length,
    made: chart.data.length, over: right(chart.querySelector('.main-svg')) - right(document.body),
    titles: [...chart.querySelectorAll('.annotation-text')].map(t => t.textContent)}), '*');
}, 500));</script>"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    found = [tmp_path_factory.mktemp("runs") / name for name in ("a", "<b>&co")]
    for epochs, directory in zip((3, 4), found, strict=True):
        train(directory, epochs)
    return found


@pytest.fixture(scope="module")
def page(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("plotly", reason="plotly is not installed: pip install 'purestep[report]'")
    path = tmp_path_factory.mktemp("page") / "report.html"
    assert main(["report", *map(str, runs), "-o", str(path)]) == 0
    return path


def without_plotly(text: str) -> str:
    return re.sub(r"<script[^>]*>/\*\*.*?</script>", "", text, flags=re.DOTALL)


def test_the_page_is_whole(page: Path):
    text = page.read_text(encoding="utf-8")
    own = without_plotly(text)
    assert len(own) < 100_000 < len(text)  # plotly's code is in the page
    assert not re.search(r"(src|href|url)\s*[=(]\s*[\"']?(https?:)?//", own)
    assert "<b>&co" not in own
    assert "Snapshots of &lt;b&gt;&amp;co</h2>" in own
    for part in ("all epochs are done", "Settings of fit (1 differ", "torch", "Snapshots of a", "6 best newest</td>"):
        assert part in own, part
    assert own.count('"symbol":"star"') == 2  # the best epoch of each run
    assert own.count('"showlegend":true') == 4  # training and evaluation of each run; with training, its learning rate
    assert page.stat().st_size < 6e6


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine: apt-get install chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_a_browser_draws_it(page: Path, tmp_path: Path, width: int):
    script = base64.b64encode(hashlib.sha256(PROBE[8:-9].encode()).digest()).decode()
    text = page.read_text(encoding="utf-8").replace("script-src ", f"script-src 'sha256-{script}' ", 1)
    injected = "<script>parent.postMessage('error injected', '*')</script>"
    (tmp_path / "page.html").write_text(text.replace("</body>", f"{PROBE}{injected}</body>"))
    frame = f'<iframe src="page.html" style="width:{width}px;height:3000px;border:0"></iframe>'
    (tmp_path / "top.html").write_text(f"<title></title>{frame}<script>onmessage=e=>document.title=e.data</script>")
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=10000", "--window-size=1400,3000"]
    command += ["--dump-dom", f"file://{tmp_path}/top.html"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    title = re.search(r"<title>(.*?)</title>", done.stdout)
    assert title is not None, done.stderr[-2000:]
    found = json.loads(title[1])
    assert found["drawn"] == found["made"] > 0
    assert found["over"] <= 0
    assert found["titles"][:2] == ["loss", "learning rate"]


def test_names_are_no_links(tmp_path: Path):
    pytest.importorskip("plotly", reason="plotly is not installed: pip install 'purestep[report]'")
    name = '<a href="https://evil.example">log in</a>'
    rows = [
        {"epoch": f"{name}{epoch}", "step": epoch, f"val_{name}": 1.0, "val_loss": 1.0, name: 2.0} for epoch in (1, 2)
    ]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "training_history.json").write_text(json.dumps(rows))
    write_page([read_run(tmp_path / "run")], tmp_path / "x.html")
    text = without_plotly((tmp_path / "x.html").read_text(encoding="utf-8"))
    assert "evil.example" in text
    assert not re.search(r"(<|\\u003c)a href", text)
    assert "default-src 'none'" in text


def test_curves_have_the_densest_rows(runs: list[Path], tmp_path: Path):
    found = quantities([read_run(runs[0])])
    assert next(iter(found)) == "loss"
    assert [curve.loader for curve in found["loss"]] == ["train", "val"]
    assert found["loss"][0].steps == [1, 2, 3, 4, 5, 6]
    assert found["loss"][1].steps == [2, 4, 6]
    run = read_run(runs[0])
    many = [{"kind": "step", "step": step, "train_loss": 1.0} for step in range(1, 50_001)]
    (curve, _) = quantities([run._replace(lines=many)])["loss"]
    assert len(curve.values) == MOST_POINTS
    assert set(curve.values) == {1.0}


def test_without_plotly_the_cure_is_named(runs: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "plotly.subplots", None)
    with pytest.raises(ConfigError, match=r"pip install 'purestep\[report\]'"):
        write_page([read_run(runs[0])], tmp_path / "x.html")
    with pytest.raises(ConfigError, match="at least one directory"):
        write_page([], tmp_path / "x.html")


def test_a_run_without_rows_has_a_page_too(tmp_path: Path):
    pytest.importorskip("plotly", reason="plotly is not installed: pip install 'purestep[report]'")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("broken")
    (tmp_path / "run" / "metrics.jsonl").write_text('{"kind": "step", "step": 1, "train_loss": null}\n')
    write_page([read_run(tmp_path / "run")], tmp_path / "x.html")
    assert "No rows of a history yet" in (tmp_path / "x.html").read_text()
