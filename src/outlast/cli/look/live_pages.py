"""The server and the read-only pages of `outlast ui`: the job list, the page of a job, and the log of a worker. A job's page has
the notebook panel above the page of `outlast report -o html`. See docs/decisions/0068-the-live-page.md."""

from __future__ import annotations

import contextlib
import dataclasses
import hmac
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingTCPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote

from outlast.base import units
from outlast.base.errors import NotFound, OutlastError
from outlast.cli import find_job, status_page, terminal
from outlast.cli.tables import ListOutput
from outlast.job import contract
from outlast.job.backend import Backend
from outlast.job.report import page, panel
from outlast.job.status import JobStatus

HERE = "127.0.0.1"
_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'; form-action 'none'",  # in addition to the page's own policy
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_NAME = re.compile(r"[a-z0-9]([-.a-z0-9]*[a-z0-9])?")
"""Pattern for job names on this machine and in clusters. No other text becomes part of a path."""
_LINES, _CHARACTERS = 1000, 1 << 18
"""Maximum numbers of lines and characters shown from the end of a log."""


@dataclasses.dataclass(frozen=True)
class _Report:
    """The part of a job's page below the panel, as it was last built."""

    built: page.Page | None
    problem: str
    workers: list[int]
    version: list[object]
    """The job's state, and everything else that changes with the job."""
    due: float
    """Monotonic time before which the report is not rebuilt."""


class Pages:
    """The pages for one backend's jobs."""

    def __init__(self, place: Backend, *, pause_s: Callable[[float], float] = lambda took_s: max(5.0, 20 * took_s)) -> None:
        """`pause_s` returns the minimum seconds between two builds of a report, given how many seconds the last build took."""
        self._place, self._pause_s = place, pause_s
        self._reports: dict[str, _Report] = {}
        self._lock = threading.Lock()  # backends are not thread-safe

    def page(self, path: str, *, part: bool) -> tuple[HTTPStatus, str]:
        """Return the page at a path, such as `job/digits/log/0/`. With `part`, the page has no scripts."""
        code, problem = HTTPStatus.NOT_FOUND, f"there is no page {unquote(path)}"
        try:
            with self._lock:
                match [unquote(each) for each in path.split("/")]:
                    case [""]:
                        return HTTPStatus.OK, self._list(part)
                    case ["job", name, ""] if _NAME.fullmatch(name):
                        return HTTPStatus.OK, self._job(name, part)
                    case ["job", name, "log", worker, ""] if _NAME.fullmatch(name) and re.fullmatch("[0-9]{1,6}", worker):
                        return HTTPStatus.OK, self._log(name, int(worker), part)
        except (OutlastError, OSError) as error:
            code = HTTPStatus.NOT_FOUND if isinstance(error, NotFound) else HTTPStatus.SERVICE_UNAVAILABLE
            problem = _sentence(error)
        return code, page.live(title="outlast ui", problem=problem, part=part)

    def _list(self, part: bool) -> str:
        rows, now = list[dict[str, object]](), time.time()
        for status in reversed(self._place.list()):
            link = {"text": status.name, "link": f"job/{quote(status.name, safe='')}/"}
            rows.append({**status_page.row(status, now, ListOutput.TABLE), "NAME": link})
        section: dict[str, object] = {"title": "Jobs", "open": True}
        if rows:
            section["table"] = units.count(len(rows), "job"), map(str.lower, rows[0]), [row.values() for row in rows]
        else:
            section["note"] = find_job.no_job(self._place)
        return page.live(title="outlast", sections=[section], part=part)

    def _job(self, name: str, part: bool) -> str:
        status = self._place.status(name)
        found, shown = self._report(status), panel.page(status, (), "", time.time())
        html = page.live if found.built is None else found.built.html
        return html(title=name, panel=shown, job="./", name=name, workers=found.workers, problem=found.problem, part=part)

    def _log(self, name: str, worker: int, part: bool) -> str:
        lines = self._place.logs(name, worker=worker, tail=_LINES)
        drawn = (terminal.logged(each, colour=False) for line in lines for each in terminal.drawn(line.text, terminal=False))
        text, seen = "\n".join(drawn)[-_CHARACTERS:], self._reports.get(name)
        section = {"title": f"Log of worker {worker}", "texts": [(f"the last {_LINES:,} lines", text)]}
        workers = seen.workers if seen else [worker]
        return page.live(title=name, job="../../", name=name, workers=workers, sections=[section], part=part)

    def _report(self, status: JobStatus) -> _Report:
        """Return a job's report, rebuilt if the job has changed, but not too often while its state stays the same."""
        last, now = self._reports.get(status.name), time.monotonic()
        files = sorted((Path(status.output) / contract.LEDGER).glob("*.jsonl"))  # none in a cluster
        version = [status.state, status.model_dump_json(), *(file.stat().st_size for file in files)]
        if last and last.version[0] == status.state and (now < last.due or (last.version == version and not last.problem)):
            return last
        built, problem, workers = last.built if last else None, "", {worker.index for worker in status.workers}
        with contextlib.suppress(NotFound):  # there may be no log
            workers = workers or {line.worker for line in self._place.logs(status.name, tail=1)}
        try:
            built = page.built(page.of(self._place, status))
            for fact in ("state", "step", "goodput"):  # the panel shows the current ones
                built.facts.pop(fact, None)
            built.packed  # noqa: B018  takes half of the time
        except (OutlastError, OSError) as error:
            problem = _sentence(error)
        ended = time.monotonic()
        found = _Report(built, problem, sorted(workers), version, ended + self._pause_s(ended - now))
        self._reports[status.name] = found
        return found


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, NotFound) else f"{error}; trying again"


class Server(ThreadingTCPServer):
    """Serves pages at 127.0.0.1 to users who have the token in `url`, which leads to the page `first`."""

    allow_reuse_address = daemon_threads = True

    def __init__(self, pages: Pages, port: int, first: str = "./", hosts: Iterable[str] = ()) -> None:
        super().__init__((HERE, port), _Handler)
        self.pages, self.first, self.hosts = pages, first, {"localhost", HERE, *map(str.lower, hosts)}
        self.token = secrets.token_urlsafe(32)
        self.cookie = f"outlast-ui-{self.server_address[1]}"  # cookies ignore the port
        self.url = f"http://{HERE}:{self.server_address[1]}/?token={self.token}"

    def knows(self, token: str) -> bool:
        return hmac.compare_digest(token.encode(), self.token.encode())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print a traceback, unless the browser has disconnected."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "outlast", ""
    timeout = 60.0
    server: Server

    def do_GET(self) -> None:
        server, (path, _, query) = self.server, self.path.removeprefix("/").partition("?")
        given = parse_qs(query, keep_blank_values=True)
        cookies = (each.strip().partition("=") for each in self.headers.get("Cookie", "").split(";"))
        cookie = next((value for name, _, value in cookies if name == server.cookie), "")
        if re.sub(r":\d+$", "", self.headers.get("Host", "").lower()) not in server.hosts:
            said = "outlast ui answers to names of this machine only; name the host of a proxy with --host"
            self._send(HTTPStatus.MISDIRECTED_REQUEST, said)
        elif not path and "token" in given and server.knows(given["token"][0]):
            kept = f"{server.cookie}={server.token}; HttpOnly; SameSite=Lax"  # for the path at which a proxy serves us
            self._send(HTTPStatus.SEE_OTHER, "", Location=server.first, **{"Set-Cookie": kept})
        elif not server.knows(cookie):
            self._send(HTTPStatus.FORBIDDEN, "this page needs a token: open the URL that outlast ui has printed")
        elif path and not path.endswith("/"):
            self._send(HTTPStatus.SEE_OTHER, "", Location=f"{quote(unquote(path.rpartition('/')[2]), safe='')}/")
        else:
            status, text = server.pages.page(path, part="part" in given)
            self._send(status, text, **{"Content-Type": "text/html; charset=utf-8"})

    do_HEAD = do_GET

    def _send(self, status: HTTPStatus, text: str, **headers: str) -> None:
        body = text.encode()
        self.send_response(status)
        described = {"Content-Type": "text/plain; charset=utf-8", "Content-Length": str(len(body))}
        for name, value in {**_HEADERS, **described, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass
