"""Progress for Kubeflow Trainer's status server, against a real server with TLS."""

from __future__ import annotations

import json
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from machines import Machine
from outlast.worker.agent import kubeflow_status
from outlast.worker.agent.kubeflow_status import CA_CERT, TOKEN, URL, StatusServer


class Server:
    """The status server, which keeps what it gets."""

    def __init__(self, directory: Path) -> None:
        self.received: list[tuple[str, str, dict[str, Any]]] = []
        self.answer = 200
        self.stuck = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.received.append((self.path, self.headers["Authorization"], body["trainerStatus"]))
                if outer.answer == 0:
                    outer.stuck.wait()
                self.send_response(outer.answer or 200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        name = ["-subj", "/CN=status", "-addext", "subjectAltName=IP:127.0.0.1"]
        key, self.certificate = directory / "tls.key", directory / "ca.crt"
        files = ["-keyout", str(key), "-out", str(self.certificate)]
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *files, *name], check=True, capture_output=True
        )
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, key)
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.socket = context.wrap_socket(self.http.socket, server_side=True)
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.stuck.set()
    server.http.shutdown()
    server.http.server_close()


@pytest.fixture
def variables(server: Server, tmp_path: Path) -> dict[str, str]:
    (tmp_path / "token").write_text("secret\n")
    url = f"https://127.0.0.1:{server.http.server_port}/status"
    return {URL: url, CA_CERT: str(server.certificate), TOKEN: str(tmp_path / "token")}


@pytest.fixture
def ours(variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StatusServer:
    monkeypatch.setattr(kubeflow_status, "INTERVAL_S", 0.0)
    monkeypatch.setattr(kubeflow_status, "TIMEOUT_S", 0.5)
    return StatusServer(variables, tmp_path)


def settled(ours: StatusServer) -> None:
    assert ours._sender is not None
    ours._sender.join(5)


def test_the_agent_of_rank_0_reports_progress_and_the_end(server: Server, ours: StatusServer, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 9}\n{"step": 2, "loss": 0.5, "note": "x", "generation": 1}\n{"st'
    )
    ours.look(4, 20, rank=3)
    ours.end(done=True)
    assert server.received == [], "rank 0 is on another worker"
    ours.look(4, 20, rank=0)
    settled(ours)
    time.sleep(0.02)
    ours.look(5, 20, rank=0)
    settled(ours)
    ours.look(20, 20, rank=0)
    settled(ours)
    ours.end(done=True)
    assert {(path, token) for path, token, _ in server.received} == {("/status", "Bearer secret")}
    statuses = [status for _, _, status in server.received]
    assert [status["progressPercentage"] for status in statuses] == [20, 25, 99, 100]
    assert "estimatedRemainingSeconds" not in statuses[0]
    assert [status["estimatedRemainingSeconds"] for status in statuses[2:]] == [0, 0]
    assert statuses[1]["metrics"] == [
        {"name": "current_step", "value": "5"},
        {"name": "total_steps", "value": "20"},
        {"name": "loss", "value": "0.5"},
    ]


def test_a_failed_run_has_no_time_left_and_an_unknown_length_no_percentage(server: Server, ours: StatusServer) -> None:
    ours.look(4, None, rank=0)
    ours.end(done=False)
    first, last = [status for _, _, status in server.received]
    assert first.keys() == last.keys() == {"lastUpdatedTime", "metrics"}


@pytest.mark.parametrize("how", ["refuses", "hangs", "is gone"])
def test_a_server_that_fails_harms_nothing(server: Server, ours: StatusServer, how: str) -> None:
    server.answer = {"refuses": 500, "hangs": 0}.get(how, 200)
    if how == "is gone":
        server.http.server_close()
    began = time.monotonic()
    for step in range(3):
        ours.look(step, 20, rank=0)
    assert time.monotonic() - began < 1.5, "reports are sent beside the agent's loop"
    ours.end(done=True)
    assert time.monotonic() - began < 3
    assert len(server.received) <= 2, "one attempt at a time"


def test_reports_have_an_interval_and_without_the_variables_there_are_none(
    server: Server, ours: StatusServer, tmp_path: Path
) -> None:
    kubeflow_status.INTERVAL_S = 60.0
    for step in range(5):
        ours.look(step, 20, rank=0)
        settled(ours)
    assert len(server.received) == 1
    none = StatusServer({}, tmp_path)
    none.look(4, 20, rank=0)
    none.end(done=True)
    assert none._sender is None


@pytest.mark.slow
@pytest.mark.jobs
def test_a_run_reports_what_it_logs_and_its_end(
    server: Server, variables: dict[str, str], machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    machine.run(machine.job(args=("--steps=20",), workers={"replicas": 2}))
    statuses = [status for _, _, status in server.received]
    assert (statuses[-1]["progressPercentage"], statuses[-1]["estimatedRemainingSeconds"]) == (100, 0)
    assert [status.get("progressPercentage") for status in statuses].count(100) == 1
    assert "loss" in {metric["name"] for metric in statuses[-1]["metrics"]}
    assert {"name": "current_step", "value": "20"} in statuses[-1]["metrics"]
