"""`outlast notebook`: who may use the server, where the work is, and that the first notebook is right."""

from __future__ import annotations

import contextlib
import http.server
import json
import math
import os
import re
import signal
import socket
import stat
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

import pages
from browsers import Read
from here import Here
from outlast import cli
from outlast.base.errors import OutlastError
from outlast.cli import web_servers
from outlast.cli.train import notebook
from outlast.job.failure import Failure
from outlast.job.report import panel
from outlast.job.status import JobStatus, RankStatus, State, WorkerStatus
from outlast.local import jupyter
from outlast.local import notebook_panel as notebooks

FIRST = Path(jupyter.__file__).with_name(jupyter.FIRST)
GIVEN = "0123456789abcdef0123456789abcdef"


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What `outlast notebook` says when it does not start."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["notebook", *words])
    assert ended.value.code == 2
    return capsys.readouterr().err


def test_the_first_notebook_is_valid_and_has_no_outputs() -> None:
    notebook = nbformat.read(FIRST, as_version=4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell for cell in code if cell.outputs or cell.execution_count] == []
    assert notebook.metadata.kernelspec.name == "python3"


def commands() -> list[list[str]]:
    """The words after `!outlast` in the cells of the first notebook."""
    cells = json.loads(FIRST.read_text())["cells"]
    sources = ["".join(cell["source"]).replace("\\\n", "") for cell in cells if cell["cell_type"] == "code"]
    lines = [line for source in sources for line in source.splitlines()]
    return [pages.shell(line.strip())[1:] for line in lines if line.startswith("!outlast ")]


def test_the_commands_of_the_first_notebook_exist_and_take_their_options() -> None:
    assert [mistake for words in commands() if (mistake := pages.mistake(words))] == []


def test_a_token_is_random_unless_a_file_or_a_variable_gives_it(tmp_path: Path) -> None:
    made = [jupyter.token(None, {}) for _ in range(2)]
    assert all(new and len(token) == 64 for token, new in made)
    assert made[0] != made[1]
    (tmp_path / "token").write_text(f"{GIVEN}\n")
    assert jupyter.token(tmp_path / "token", {jupyter.TOKEN: "another, which the file precedes"}) == (GIVEN, False)
    assert jupyter.token(None, {jupyter.TOKEN: GIVEN}) == (GIVEN, False)


def test_a_token_that_protects_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OutlastError, match=r"^--token-file .*nowhere cannot be read: .*No such file or directory.*; name a file"):
        jupyter.token(tmp_path / "nowhere", {})
    for weak in ("", "secret", "with some spaces within"):
        said = rf"^the token in the variable {jupyter.TOKEN} must have at least 16 characters, without spaces"
        with pytest.raises(OutlastError, match=said):
            jupyter.token(None, {jupyter.TOKEN: weak})


def test_the_token_is_on_no_command_line_and_in_no_variable_of_a_kernel(tmp_path: Path) -> None:
    server = jupyter.Server(tmp_path)
    jupyter.prepare(tmp_path, GIVEN)
    environ = jupyter.environment({"HOME": "/home/me", jupyter.TOKEN: GIVEN, "JUPYTER_TOKEN": "x"}, tmp_path, tmp_path, home=True)
    assert GIVEN not in "".join([*jupyter.command(server, root=False), *environ.values()])
    assert "JUPYTER_TOKEN" not in environ
    file = Path(environ["JUPYTER_TOKEN_FILE"])
    assert (file.read_text(), stat.S_IMODE(file.stat().st_mode)) == (GIVEN, 0o600)
    assert jupyter.url(server, "localhost", "") == "http://localhost:8888/lab/tree/first.ipynb"
    assert jupyter.url(server, "localhost", GIVEN) == f"http://localhost:8888/lab/tree/first.ipynb?token={GIVEN}"


def test_the_kernel_is_the_python_of_outlast_and_so_are_its_programs(tmp_path: Path) -> None:
    jupyter.prepare(tmp_path, GIVEN)
    environ = jupyter.environment({"HOME": "/root", "PATH": "/bin", "JUPYTER_PATH": "/mine"}, tmp_path, tmp_path, home=True)
    assert environ["PATH"].split(os.pathsep) == [str(Path(sys.executable).parent), "/bin"]
    assert environ["JUPYTER_PATH"].split(os.pathsep) == [str(tmp_path), "/mine"]
    assert json.loads((tmp_path / "kernels/python3/kernel.json").read_text())["argv"][0] == sys.executable
    assert environ["JUPYTER_CONFIG_PATH"] == str(tmp_path)
    assert "news" in (tmp_path / "labconfig/default_setting_overrides.json").read_text().lower()


def test_settings_are_kept_with_the_work_where_the_home_directory_is_read_only(tmp_path: Path) -> None:
    environ = jupyter.environment({"HOME": "/"}, tmp_path, tmp_path / "private", home=False)
    assert environ["HOME"] == str(tmp_path / ".home")


def test_the_first_notebook_is_put_into_the_directory_once(tmp_path: Path) -> None:
    assert jupyter.place(tmp_path / "a/work")
    assert (tmp_path / "a/work" / jupyter.FIRST).read_bytes() == FIRST.read_bytes()
    (tmp_path / "a/work" / jupyter.FIRST).write_text("mine")
    assert not jupyter.place(tmp_path / "a/work")
    assert (tmp_path / "a/work" / jupyter.FIRST).read_text() == "mine"


def test_what_is_missing_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "file").touch()
    said = f"Error: {tmp_path}/file cannot be written: File exists; name another directory for the notebooks\n"
    assert refused(capsys, str(tmp_path / "file")) == said
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = f"Error: port {port} at 127.0.0.1 cannot be used: Address already in use; choose another --port or --bind\n"
        assert refused(capsys, str(tmp_path / "work"), "--port", str(port)).endswith(said)
        assert web_servers.port(None, "127.0.0.1", port) not in (0, port)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert refused(capsys) == "Error: JupyterLab is not installed; pip install 'outlast[notebook]'\n"


def test_an_address_may_be_of_ipv6() -> None:
    try:
        taken = socket.create_server(("::1", 0), family=socket.AF_INET6)
    except OSError as error:
        pytest.skip(f"no IPv6 here: {error}")
    with taken:
        port = taken.getsockname()[1]
        assert web_servers.port(None, "::1", port) not in (0, port)
        with pytest.raises(OutlastError, match=rf"^port {port} at ::1 cannot be used: Address already in use; .* --bind$"):
            web_servers.port(port, "::1", 1)


def test_an_address_that_cannot_be_used_is_named() -> None:
    with pytest.raises(OutlastError, match=r"at 192\.0\.2\.1 cannot be used: Cannot assign requested address; .* --bind$"):
        web_servers.port(None, "192.0.2.1", 8888)
    with pytest.raises(OutlastError, match=r"^--bind is empty"):
        web_servers.port(None, "", 8888)


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_server_as_ctrl_c_does_unless_it_is_ignored(number: signal.Signals, handler: signal.Handlers) -> None:
    before, after = signal.signal(number, handler), []
    try:
        with web_servers.until_stopped():
            signal.raise_signal(number)
            after.append("the server goes on")
        assert (bool(after), signal.getsignal(number)) == (handler == signal.SIG_IGN, handler)
    finally:
        signal.signal(number, before)


def test_the_token_is_deleted_once_the_server_has_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def child(name: str, command: list[str], log: Path, *_: object, **__: object) -> Iterator[Any]:
        assert (log.parent / "token").is_file()
        yield types.SimpleNamespace(wait=lambda: int((log.parent / "token").exists()))

    monkeypatch.setattr(web_servers, "child", child)
    notebook.notebook(tmp_path)


class Api(http.server.BaseHTTPRequestHandler):
    """What JupyterLab answers with a token, and without."""

    without = 403

    def do_GET(self) -> None:
        right = self.headers["Authorization"] == f"token {GIVEN}"
        self.send_response(404 if self.path != "/base/api/status" else 200 if right else self.without)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[jupyter.Server]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Api) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
        yield jupyter.Server(tmp_path, server.server_port, "0.0.0.0", base="/base/")
        server.shutdown()


def test_a_server_is_ready_when_it_answers_with_the_token_and_not_without(served: jupyter.Server, monkeypatch) -> None:
    assert jupyter.ready(served, GIVEN)
    assert not jupyter.ready(served, "another")
    monkeypatch.setattr(Api, "without", 200)
    with pytest.raises(OutlastError, match="answers without a token: your Jupyter settings switch authentication off"):
        jupyter.ready(served, GIVEN)


def a_status(**fields: Any) -> JobStatus:
    """A job of two workers that trains."""
    workers = [WorkerStatus(index=0, state="training", ranks=[RankStatus(rank=0, local_rank=0)]), WorkerStatus(index=1)]
    known = {"name": "gpt", "run": "1", "state": State.RUNNING, "reason": "world of 2", "step": 30, "steps": 60, "rate": 2.0}
    return JobStatus(**{**known, "replicas": 2, "world": [0, 1], "workers": workers, "submitted": 100.0, **fields})


METRICS = [b'{"step": %d, "generation": %d, "loss": %d.5}' % (step, 1 + (step > 2), 9 - step) for step in range(5)]


def test_points_are_the_lines_that_have_the_metric() -> None:
    lines = [*METRICS[:2], b'{"step": 2, "val_loss": 1}', b"", b"7", b'{"step": 4, "lo']
    assert panel.points(lines, "loss") == [panel.Point(0, 1, 9.5), panel.Point(1, 1, 8.5)]


def test_the_panel_shows_progress_workers_what_was_lost_and_the_curve() -> None:
    failure = Failure(worker=1, code=137, reason="worker 1 was killed by SIGKILL")
    status = a_status(restarts=1, failure=failure, metrics={"loss": 5.5, "accuracy": 0.25})
    page = panel.page(status, panel.points(METRICS, "loss"), "loss", 112.0)
    text = " ".join(re.sub(r"<[^>]*>", " ", page).split())
    said = (
        "gpt · Running world of 2",
        "step 30 of 60 · 2 steps/s · 15s left",
        "● worker 0: training, rank 0 ● worker 1: starting",
    )
    for part in (*said, "last failure: worker 1 was killed by SIGKILL", "1 restart · 12s since the start", "loss, now 5.5"):
        assert part in text
    assert "width:50.0%" in page
    assert page.count("<polyline") == 1
    assert page.count("<path") == 1, "where the new world began"
    assert panel.text(status) == "gpt: Running, step 30/60, 2 workers, 1 restart, loss 5.5"
    assert panel.text(status, "accuracy").endswith("1 restart, accuracy 0.25")


def test_a_panel_of_a_job_that_has_just_begun_is_without_a_curve() -> None:
    assert "<svg" not in panel.page(a_status(step=0, steps=None, rate=None), [], "loss", 100.0)


def drawn(*values: float, step: int = 1) -> str:
    """The points of the curve of these values, one every `step` steps."""
    points = [panel.Point(number * step, 1, value) for number, value in enumerate(values)]
    return re.search('points="([^"]*)"', panel.page(a_status(steps=None), points, "loss", 100.0))[1]  # type: ignore[index]


def test_the_curve_leaves_out_what_is_not_finite_begins_at_step_0_and_is_short() -> None:
    assert drawn(2, math.nan, 1, math.inf) == "0.0,0.0 440.0,120.0"
    assert drawn(2, 1, step=0) == "0.0,0.0 0.0,120.0"
    assert len(long := drawn(*range(5000)).split()) < 1000
    assert (long[0], long[-1]) == ("0.0,120.0", "660.0,0.0")
    assert "<svg" not in panel.page(a_status(), [panel.Point(1, 1, math.nan)] * 2, "loss", 100.0)


def test_nothing_that_a_job_says_becomes_part_of_the_page() -> None:
    evil = "<script>alert(1)</script>"
    status = a_status(reason=evil, failure=Failure(worker=1, code=1, reason=evil), workers=[WorkerStatus(index=0, state=evil)])
    assert "<script" not in panel.page(status, panel.points(METRICS, "loss"), evil, 100.0)


def test_drawing_shows_the_page_of_the_report_in_a_frame_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, displayed = Here(tmp_path), list[dict[str, str]]()
    here.submit()
    monkeypatch.setattr(notebooks, "_here", lambda: here.backend)
    monkeypatch.setattr("IPython.display.display", lambda data, raw: displayed.append(data))
    notebooks.draw("job")
    ((frame, attributes),) = Read(displayed[0]["text/html"]).tags
    assert (frame, attributes["sandbox"]) == ("iframe", "allow-scripts"), "it cannot reach the notebook"
    assert "Time by cause" in Read(str(attributes["srcdoc"])).text
    assert "goodput" in displayed[0]["text/plain"]


def test_behind_kubeflows_gateway_it_serves_below_its_prefix() -> None:
    assert jupyter.base({"NB_PREFIX": "/notebook/team/mine"}) == "/notebook/team/mine/"
    assert jupyter.base({}) == jupyter.base({"NB_PREFIX": "/"}) == "/", "with docker run; a token is made then"


def test_pages_of_other_origins_are_given_no_way_in(tmp_path: Path) -> None:
    words = jupyter.command(jupyter.Server(tmp_path, base="/notebook/team/mine/"), root=False)
    assert not [word for word in words if re.search("allow_origin|allow_credentials|disable_check_xsrf", word)]


class Place:
    """Where a job is, that gets on whenever somebody looks."""

    poll_s = 0.0

    def __init__(self, output: Path, *statuses: JobStatus) -> None:
        self._output, self.left = output, list(statuses)

    def status(self, name: str) -> JobStatus:
        return self.left.pop(0)

    def output(self, name: str) -> Path:
        return self._output

    def metrics(self, name: str) -> list[bytes]:
        return []


def test_following_ends_at_a_step_or_with_the_job_and_one_that_has_failed_is_an_error(tmp_path: Path, monkeypatch, capsys):
    failed = a_status(state=State.FAILED, reason="rank 0 is out of memory")
    place = Place(tmp_path, a_status(step=10), a_status(step=29), a_status(step=31), a_status(step=40), failed)
    monkeypatch.setattr(notebooks, "_here", lambda: place)
    notebooks.follow("gpt", until=30)
    assert [status.step for status in place.left] == [40, 30]
    assert capsys.readouterr().out == "gpt: Running, step 10/60, 2 workers, 0 restarts\n"
    with pytest.raises(OutlastError, match=r"^gpt has ended: Failed: rank 0 is out of memory; its log: outlast logs gpt$"):
        notebooks.follow("gpt")
