"""The first notebook from its first to its last cell, and `outlast notebook` in a browser: real kernels, Spark, training."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import nbclient
import nbformat
import psutil
import pytest

import browsers
from outlast.local import jupyter

FIRST = Path(jupyter.__file__).with_name(jupyter.FIRST)
STEPS = 200
"""That the first notebook trains."""
RUN_S = 500
"""How long the notebook may take on a busy machine; it takes one to two minutes."""

pytestmark = [pytest.mark.slow, pytest.mark.jobs, pytest.mark.timeout(2 * RUN_S)]


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Variables as of a user without any settings of Jupyter."""
    for name in list(os.environ):
        if name.startswith(("JUPYTER", "JPY_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    (tmp_path / "home").mkdir()
    (tmp_path / "tmp").mkdir()
    return dict(os.environ)


def text(cell: Any) -> str:
    """All that a cell has printed and shown, without a page."""
    outputs = [each.get("text") or each.get("data", {}).get("text/plain", "") for each in cell.outputs]
    return "".join(outputs)


def shown(cells: list[Any], source: str) -> str:
    """What the only cell with these words has shown."""
    (cell,) = (each for each in cells if source in each.source and each.cell_type == "code")
    return text(cell)


def step(said: str) -> int:
    """The step in `gpt: Running, step 61/200, ...`."""
    found = re.search(rf"step (\d+)/{STEPS}", said)
    assert found, said
    return int(found[1])


@pytest.mark.filterwarnings("default")  # of Jupyter's event loops
def test_the_first_notebook_runs_from_its_first_to_its_last_cell_and_again(environ: dict[str, str], tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    for again in (False, True):
        notebook = nbformat.read(FIRST, as_version=4)
        nbclient.NotebookClient(notebook, timeout=RUN_S, resources={"metadata": {"path": str(work)}}).execute()
        cells = notebook.cells
        assert "already there: " in shown(cells, "data get") if again else "got python-stdlib: " in shown(cells, "data get")
        prepared = shown(cells, "data prepare")
        assert re.search(r"train [\d,]+ tokens, val [\d,]+ tokens of \d+ documents \(vocabulary 1,024, uint16\)", prepared)
        assert ("already there: " in prepared) is again
        assert 60 <= step(shown(cells, "until=60")) < STEPS
        assert "killed worker 1 " in shown(cells, "outlast chaos")
        (end,) = (each for each in cells if each.source == 'notebooks.follow("gpt")')
        assert "gpt: Succeeded, " in text(end)
        assert (step(text(end)), "1 restart" in text(end)) == (STEPS, True)
        page = end.outputs[-1].data["text/html"]
        assert "worker 1 was killed by SIGKILL" in page
        assert "world 2<" in page
        assert re.search(rf"{STEPS} steps kept, \d+ trained again\n", shown(cells, "report(")), "no step is missing"
        (drawn,) = (each for each in cells if "notebooks.draw" in each.source)
        assert "<iframe" in drawn.outputs[0].data["text/html"]
        assert "def" in shown(cells, "--sample")
        losses = [json.loads(line) for line in (work / ".outlast/runs/gpt/metrics.jsonl").read_text().splitlines()]
        values = [each["loss"] for each in losses if "loss" in each]
        assert values[-1] < values[0] - 1
        assert [each["step"] for each in losses if "loss" in each] == list(range(5, STEPS + 1, 5)), "each step once"


class Server:
    """`outlast notebook` as a child process."""

    def __init__(self, work: Path, environ: dict[str, str], *options: str) -> None:
        command = [sys.executable, "-m", "outlast", "notebook", str(work), *options]
        self.process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        found = re.search(r"http://\S+", self.line)
        assert found, self.process.communicate()
        self.url = found[0]
        self.token = self.url.rpartition("token=")[2]
        self.others = psutil.Process(self.process.pid).children(recursive=True)

    def status(self, method: str, path: str, token: str = "") -> tuple[int, Any]:
        """What the server answers, with the body as JSON."""
        address = urlsplit(self.url)
        with contextlib.closing(http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)) as connection:
            connection.request(method, path, headers={"Authorization": f"token {token}"} if token else {})
            answer = connection.getresponse()
            body = answer.read()
        return answer.status, json.loads(body) if body.startswith(b"{") else None

    def start_kernel(self) -> None:
        """Start one, and wait until it answers."""
        status, kernel = self.status("POST", "/api/kernels", self.token)
        assert status == 201
        self.others = psutil.Process(self.process.pid).children(recursive=True)
        assert any("ipykernel" in " ".join(each.cmdline()) for each in self.others), kernel

    def gone(self) -> bool:
        """Whether nothing is left of it, once that is so."""
        _, alive = psutil.wait_procs(self.others, timeout=60)
        return not alive


@contextlib.contextmanager
def server(work: Path, environ: dict[str, str], *options: str) -> Iterator[Server]:
    started = Server(work, environ, *options)
    try:
        yield started
    finally:
        started.process.terminate()
        started.process.communicate()
        for each in started.others:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_server_ends_with_its_kernels_and_the_work_stays(number: signal.Signals, environ: dict[str, str], tmp_path: Path):
    with server(tmp_path / "work", environ) as started:
        started.start_kernel()
        for each in psutil.process_iter(["cmdline"]):
            assert started.token not in " ".join(each.info["cmdline"] or ()), "everybody on the machine can read that"
        started.process.send_signal(number)
        assert started.process.wait(60) == (0 if number != signal.SIGKILL else -number)
        assert started.gone()
    left = [path for path in tmp_path.rglob("*") if path.is_file() and started.token.encode() in path.read_bytes()]
    assert left == [], "the token is kept nowhere"
    assert (tmp_path / "work" / jupyter.FIRST).read_bytes() == FIRST.read_bytes()


def test_a_wrong_token_is_refused_and_a_second_server_has_another_port(environ: dict[str, str], tmp_path: Path):
    given = tmp_path / "token"
    given.write_text("a-token-that-somebody-has-made\n")
    with server(tmp_path / "work", environ) as first, server(tmp_path / "other", environ, "--token-file", str(given)) as other:
        assert [first.status("GET", "/api/contents", token)[0] for token in ("", "wrong", first.token)] == [403, 403, 200]
        assert "token" not in other.url, "a token that was given is not printed"
        assert other.status("GET", "/api/contents", given.read_text().strip())[0] == 200
        assert urlsplit(first.url).port != urlsplit(other.url).port
        (tmp_path / "work" / "mine.txt").write_text("mine")
        _, listed = first.status("GET", "/api/contents", first.token)
        assert [each["name"] for each in listed["content"]] == [jupyter.FIRST, "mine.txt"]


@pytest.fixture
def browser() -> Iterator[Any]:
    with browsers.chromium() as found:
        yield found


@pytest.fixture
def all_cells(tmp_path: Path, environ: dict[str, str]) -> None:
    """JupyterLab draws also those cells that are out of sight."""
    settings = tmp_path / "home/.jupyter/lab/user-settings/@jupyterlab/notebook-extension/tracker.jupyterlab-settings"
    settings.parent.mkdir(parents=True)
    settings.write_text('{"windowingMode": "none"}')


OBSERVE = r"""
window.steps = new Set();
new MutationObserver(() => {
    for (const each of document.querySelectorAll(".jp-OutputArea-output"))
        for (const found of each.textContent.matchAll(/step (\d+) of \d+/g)) window.steps.add(Number(found[1]));
}).observe(document.body, {subtree: true, childList: true});
"""
"""Has the page remember every step that a panel shows."""


@pytest.mark.usefixtures("all_cells")
def test_the_page_shows_the_notebook_its_progress_and_its_picture(browser: Any, environ: dict[str, str], tmp_path: Path) -> None:
    with server(tmp_path / "work", environ) as started:
        page = browser.new_page(viewport={"width": 1300, "height": 1000})
        page.goto(started.url.partition("?")[0])
        page.get_by_text("Token authentication is enabled").wait_for(timeout=60_000)
        page.goto(started.url)
        headings = page.locator(".jp-Notebook h1, .jp-Notebook h2")
        page.get_by_role("heading", name="Where to go from here").wait_for(timeout=120_000)
        assert headings.first.inner_text().startswith("Train a model that outlasts its workers")
        assert headings.count() == FIRST.read_text().count('"# ') + FIRST.read_text().count('"## ')
        page.get_by_text("Python 3 (Outlast) | Idle").wait_for(timeout=120_000)
        page.evaluate(OBSERVE)
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        page.get_by_text("killed worker 1").wait_for(timeout=RUN_S * 1000)
        page.locator(f".jp-OutputArea-output:has-text('step {STEPS} of {STEPS}') svg polyline").wait_for(timeout=RUN_S * 1000)
        assert len([each for each in page.evaluate("[...window.steps]") if each <= 60]) > 5, "the page has shown progress"
        page.frame_locator(".jp-OutputArea-output iframe").locator("body[data-drawn]").wait_for(timeout=RUN_S * 1000)
        page.locator(".jp-OutputArea-output").filter(has_text="---------------").wait_for(timeout=RUN_S * 1000)
        assert page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.stderr']").count() == 0
