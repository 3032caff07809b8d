"""`outlast ui`: who may see the pages, what they lead to, that nothing in them acts, and that they grow with their jobs."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import pytest

import browsers
from accounts import Story, training
from browsers import HOSTILE, Read
from here import Here
from outlast.base.errors import NotFound, Unanswered
from outlast.cli.look import live_pages
from outlast.job import contract, report
from outlast.job.failure import Failure
from outlast.job.status import State, WorkerStatus
from outlast.local.backend import LocalBackend

EVIL = "<img src=x onerror=hit=1>"
WORKERS = [WorkerStatus(index=index, state="training") for index in range(2)]


class Place(LocalBackend):
    """The backend of a job that runs, which counts how often its ledger is read, and may be away."""

    def __init__(self, directory: Path) -> None:
        self.here = Here(directory)
        super().__init__(directory / "state")
        self.here.submit()
        self.story = training(Story(time.time() - 1000))
        self.read, self.away, self.ledger = 0, "", ""
        self.train(5)
        self.log(f"\x1b[31mstep 5\x1b[0m {HOSTILE}")

    def train(self, steps: int, **status: Any) -> None:
        """Train on, in the ledger and the status."""
        with (self.here.output / contract.LEDGER / "story.jsonl").open("w") as file:
            file.writelines(json.dumps(event) + "\n" for event in self.story.steps(steps).events)
        self.here.leave(State.RUNNING, **{"finished": None, "step": self.story.step, "workers": WORKERS, **status})

    def log(self, line: str) -> None:
        (self.here.output / contract.LOGS).mkdir(exist_ok=True)
        with (self.here.output / contract.LOGS / "worker-0.log").open("a", errors="replace") as file:
            file.write(f"{line}\n")

    def list(self) -> Any:
        if self.away:
            raise Unanswered(self.away)
        return super().list()

    def status(self, name: str) -> Any:
        if self.away:
            raise Unanswered(self.away)
        return super().status(name)

    def events(self, name: str) -> Any:
        self.read += 1
        if self.ledger:
            raise NotFound(self.ledger)
        return super().events(name)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    found = Place(tmp_path)
    with found.here.launcher(step=5, workers=WORKERS):
        yield found


class Served:
    """The pages of a place, served. The cookie is that of the token."""

    def __init__(self, server: live_pages.Server) -> None:
        self.server, self.cookie = server, {"Cookie": f"a=b; {server.cookie}={server.token}"}

    def ask(self, path: str, method: str = "GET", **headers: str) -> tuple[int, http.client.HTTPMessage, str]:
        connection = http.client.HTTPConnection(*self.server.server_address, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read().decode()

    def page(self, path: str) -> Read:
        status, _, text = self.ask(path, **self.cookie)
        assert status == 200, text
        return Read(text)


@contextlib.contextmanager
def serving(place: LocalBackend, *, pause_s: float = 0.0, **options: Any) -> Iterator[Served]:
    with live_pages.Server(live_pages.Pages(place, pause_s=lambda _: pause_s), 0, **options) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield Served(server)
        finally:
            server.shutdown()
            thread.join()


def test_the_url_leads_to_a_cookie_and_nothing_else_opens_a_page(place: Place) -> None:
    with serving(place, first="job/job/", hosts=["Hub.example.com"]) as served:
        status, headers, _ = served.ask(served.server.url.partition(str(served.server.server_address[1]))[2])
        assert (status, headers["Location"]) == (303, "job/job/"), "and a proxy may serve it below another path"
        assert headers["Set-Cookie"] == f"{served.server.cookie}={served.server.token}; HttpOnly; SameSite=Lax"
        assert served.server.server_address[0] == "127.0.0.1"
        wrong = {"Cookie": f"{served.server.cookie}=\xe9{served.server.token}"}
        hosts = (("evil.example", 421), ("", 421), ("localhost:1", 200), ("hub.example.com", 200))
        token = f"/job/job/?token={served.server.token}"
        for path, given, expected in [
            *(("/", {}, 403), ("/job/job/", wrong, 403), ("/?token=wrong", {}, 403), (token, {}, 403)),
            *(("/", {**served.cookie, "Host": host}, expected) for host, expected in hosts),
        ]:
            status, headers, text = served.ask(path, **given)
            found = (status, "job" in text.lower(), headers["X-Content-Type-Options"])
            assert found == (expected, status == 200, "nosniff"), path


def test_pages_lead_to_jobs_and_logs_below_any_path_and_only_read(place: Place) -> None:
    prefix = "http://hub.example.com/user/me/proxy/8700"

    def links(served: Served, path: str) -> dict[str, str]:
        found = [attributes["href"] for tag, attributes in served.page(path).tags if tag == "a"]
        urls = [urljoin(f"{prefix}{path}", str(each)) for each in found]
        assert all(url.startswith(prefix) for url in urls)
        return {url.removeprefix(prefix): urlsplit(url).path for url in urls}

    with serving(place) as served:
        assert [*links(served, "/")] == ["/job/job/"]
        logs = ["/job/job/log/0/", "/job/job/log/1/"]
        assert [*links(served, "/job/job/")] == ["/", "/job/job/", *logs]
        assert [*links(served, logs[0])] == ["/", "/job/job/", *logs]
        assert served.ask("/job/job", **served.cookie)[1]["Location"] == "job/"
        listed, job, log = (served.page(path).text for path in ("/", "/job/job/", logs[0]))
        assert "Running" in listed
        assert "step 5" in job
        assert "Time by cause" in job
        assert f"step 5 {HOSTILE}".replace("\ud800", "?") in log, "without its colours"
        for path in ("/job/none/", "/job/..%2F..%2Fjob/", "/job/job/log/7/", "/job/job/log/x/", "/nothing/", "/job/"):
            status, _, text = served.ask(path, **served.cookie)
            assert (status, "Traceback" in text) == (404, False), path
        assert "job has no log of worker 7; there are logs of 0" in Read(served.ask("/job/job/log/7/", **served.cookie)[2]).text
        for method in ("POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "MKCOL"):
            assert served.ask("/job/job/", method, **served.cookie)[0] == 501
        for path in ("/", "/job/job/?part", "/job/job/log/0/", "/job/none/"):
            got, had = served.ask(path, **served.cookie), served.ask(path, "HEAD", **served.cookie)
            assert (had[0], had[1]["Content-Type"], had[2]) == (got[0], "text/html; charset=utf-8", "")


def test_texts_of_jobs_never_become_markup(place: Place) -> None:
    (place.here.state_dir.path.parent / EVIL).mkdir()
    (place.here.state_dir.path.parent / EVIL / "run.json").write_text("{")
    place.story.failure(reason=EVIL)
    place.train(1, reason=EVIL, failure=Failure(worker=1, code=1, reason=EVIL, traceback=EVIL))
    place.log(EVIL)
    with serving(place) as served:
        for path, least in (("/", 2), ("/job/job/", 4), ("/job/job/log/0/", 1), ("/job/%3Cimg src=x onerror=hit=1%3E/", 1)):
            text = served.ask(path.replace(" ", "%20"), **served.cookie)[2]
            read = Read(text)
            assert read.text.count(EVIL) >= least, path
            assert "img" not in {tag for tag, _ in read.tags}
            assert not [name for _, attributes in read.tags for name in attributes if name.startswith("on")]
            (policy,) = (a["content"] for tag, a in read.tags if a.get("http-equiv") == "Content-Security-Policy")
            assert str(policy).startswith("default-src 'none'; script-src 'sha256-")
            assert str(policy).endswith("; connect-src 'self'")


def test_a_report_is_built_anew_only_if_something_has_changed_and_not_too_often(place: Place) -> None:
    def builds(served: Served) -> int:
        before = place.read
        served.page("/job/job/?part")
        return place.read - before

    with serving(place) as served:
        assert [builds(served) for _ in range(3)] == [1, 0, 0]
        place.story.say("chaos", action="term")
        place.train(0)
        assert [builds(served), builds(served)] == [1, 0], "the ledger alone has grown"
        parts = {attributes["id"] for _, attributes in served.page("/job/job/?part").tags if "data-part" in attributes}
        assert parts == {"ways", "problem", "panel", "report", "plots"}
    with serving(place, pause_s=1000) as served:
        assert builds(served) == 1
        place.train(1)
        assert builds(served) == 0
        assert "step 6" in served.page("/job/job/?part").text, "the panel is of now"
        place.here.leave(State.SUCCEEDED)
        assert builds(served) == 1, "a new state is shown at once"


def test_what_is_away_is_said_in_a_sentence_and_asked_for_again(place: Place) -> None:
    with serving(place) as served:
        place.away = "the cluster c does not answer"
        for path in ("/", "/job/job/?part"):
            status, _, text = served.ask(path, **served.cookie)
            assert (status, "the cluster c does not answer; trying again" in text) == (503, True)
        place.away, place.ledger = "", "the ledger of job is in its pods only"
        job = served.page("/job/job/").text
        assert "the ledger of job is in its pods only" in job
        assert "step 5" in job
        place.ledger = ""
        assert "Time by cause" in served.page("/job/job/").text


def test_a_job_that_is_not_there_and_a_missing_library_are_a_sentence(place: Place, outlast, monkeypatch) -> None:
    assert outlast("ui", "jobb", backend=place) == (2, "", "Error: no job jobb; did you mean job? there is job\n")
    monkeypatch.delattr(report, "figures", raising=False)
    monkeypatch.delitem(sys.modules, "outlast.job.report.figures", raising=False)
    monkeypatch.setitem(sys.modules, "bokeh.document", None)
    needs = "Error: a page needs the library bokeh; run: pip install 'outlast[plots]'\n"
    assert outlast("ui", "jobb", backend=place) == (2, "", needs)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_prints_a_url_and_serves_until_it_is_stopped(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "outlast", "ui", "--port", "0"]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        url = urlsplit(line.split()[1])
        with contextlib.closing(http.client.HTTPConnection(str(url.hostname), url.port, timeout=60)) as connection:
            connection.request("GET", f"/?{url.query}")
            answer = connection.getresponse()
            cookie = str(answer.headers["Set-Cookie"]).partition(";")[0]
            assert (answer.status, answer.read()) == (303, b"")
            connection.request("GET", "/", headers={"Cookie": cookie})
            assert b"no job has been run here" in connection.getresponse().read()
            process.send_signal(number)
            assert process.wait(30) == 0, "even while a browser is connected"
        assert process.stdout.read() == ""
    finally:
        process.kill()
        process.stdout.close()


@pytest.fixture
def browser() -> Iterator[Any]:
    with browsers.chromium() as found:
        yield found


@pytest.mark.slow
@pytest.mark.jobs
def test_a_page_grows_with_its_job_and_keeps_the_part_that_its_reader_looks_at(place: Place, browser: Any) -> None:
    shown = browser.new_page(viewport={"width": 1000, "height": 500})
    told: list[str] = []
    shown.on("console", lambda message: told.append(message.text) if message.type in ("error", "warning") else None)
    shown.on("pageerror", lambda error: told.append(str(error)))
    timeline = "Bokeh.documents[0].roots()[0].x_range"
    with serving(place) as served:
        shown.goto(served.server.url)
        assert "token" not in shown.url
        shown.get_by_role("link", name="job", exact=True).click()
        shown.locator("body[data-drawn]").wait_for(timeout=60_000)
        whole = shown.evaluate(f"() => {timeline}.end")
        place.train(40)
        shown.get_by_text("step 45", exact=True).wait_for(timeout=60_000)
        shown.get_by_text("45 kept").wait_for(timeout=60_000)
        shown.wait_for_function(f"(whole) => {timeline}.end > whole", arg=whole, timeout=60_000)
        shown.evaluate(f"() => {timeline}.setv({{start: 5, end: 10}})")
        place.story.failure(reason="worker 1 has fallen over")
        place.train(1)
        shown.get_by_role("heading", name="Incidents").wait_for(timeout=60_000)
        shown.wait_for_function("() => document.querySelectorAll('.plot').length === Bokeh.documents[0].roots().length")
        assert shown.evaluate(f"() => [{timeline}.start, {timeline}.end]") == [5, 10]
        shown.get_by_role("link", name="log of worker 0").click()
        place.log("the last line")
        shown.get_by_text("the last line").wait_for(timeout=60_000)
        assert (told, shown.evaluate("() => typeof hit")) == ([], "undefined")
