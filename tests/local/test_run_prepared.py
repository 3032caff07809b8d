"""Real jobs whose code, data, models and packages come from elsewhere: stores, archives, requirements files."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from outlast.job.status import State
from outlast.storage import store
from packages import a_wheel, tar
from servers import Place

SCRIPT = """
import json, os, sys
from pathlib import Path

def tree(name):
    root = os.environ.get(name)
    paths = [Path(d, n) for d, _, names in os.walk(root, followlinks=True) for n in names] if root else []
    return {str(p.relative_to(root)): p.read_text() for p in paths}

try:
    import tiny
    version = tiny.VERSION
except ImportError:
    version = None
seen = {"data": tree("OUTLAST_DATA"), "models": tree("OUTLAST_MODELS"), "tiny": version, "python": sys.executable}
if "--evaluate" in sys.argv:
    print(json.dumps(seen))
    sys.exit()
import time
import torch.distributed as dist
dist.init_process_group("gloo")
Path(os.environ["OUTLAST_OUTPUT"], f"seen-{dist.get_rank()}.json").write_text(json.dumps(seen))
for _ in range(int(sys.argv[1])):
    dist.barrier()
    time.sleep(0.05)
"""


class Gate:
    """Passes connections to a server on, unless it is closed."""

    def __init__(self, endpoint: str) -> None:
        self.target = ("127.0.0.1", int(endpoint.rpartition(":")[2]))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.open = True
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                client, _ = self.listener.accept()
                if not self.open:
                    client.close()
                    continue
                server = socket.create_connection(self.target)
                for source, target in ((client, server), (server, client)):
                    threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with source, target, contextlib.suppress(OSError):
            while self.open and (data := source.recv(65536)):
                target.sendall(data)


@pytest.fixture
def gate(rclone: Place, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(rclone.server.endpoint)
    monkeypatch.setenv("AWS_ENDPOINT_URL", gate.endpoint)
    yield gate
    gate.listener.close()


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTLAST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def upload(place: Place, files: dict[str, str | bytes]) -> None:
    there = store.open_(place.url)
    for key, content in files.items():
        there.put(key, content if isinstance(content, bytes) else content.encode())


def seen(machine, name: str = "job") -> list[dict[str, object]]:
    """What each rank of a job has seen."""
    return [json.loads(path.read_text()) for path in sorted(machine.backend.output(name).glob("seen-*.json"))]


def logs(machine, name: str = "job") -> str:
    return "".join(path.read_text() for path in machine.backend.output(name).glob("logs/worker-*.log"))


DATA = {f"digits/part {i}/ä#{i}.txt": f"content {i}" for i in range(25)}


@pytest.mark.slow
def test_a_store_that_is_away_is_waited_for_and_a_second_job_needs_none(
    machine, rclone: Place, gate: Gate, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("OUTLAST_STORE_TIMEOUT", "1")
    upload(rclone, {**DATA, "code.tgz": tar({"repo/see.py": SCRIPT}), "bert/config.txt": "{}"})
    fields = {
        "script": "see.py",
        "code": f"{rclone.url}/code.tgz",
        "data": [{"from": f"{rclone.url}/digits", "to": "/data"}],
        "models": [{"from": f"{rclone.url}/bert", "name": "bert"}],
    }
    gate.open = False
    name = machine.submit(machine.job(args=("3",), **fields))
    machine.wait(name, lambda s: "exited with code 1" in (machine.directory / "state/jobs/job/launcher.log").read_text())
    gate.open = True
    status = machine.end(name)
    assert (status.state, status.exit_code) == (State.SUCCEEDED, 0), status
    expected = {key.removeprefix("digits/"): content for key, content in DATA.items()}
    assert [(rank["data"], rank["models"]) for rank in seen(machine)] == [(expected, {"bert/config.txt": "{}"})] * 2
    assert logs(machine).count("outlast | fetched data") == 1
    status = machine.run(machine.job("second", args=("3",), **fields))
    assert status.state is State.SUCCEEDED, status
    assert [rank["data"] for rank in seen(machine, "second")] == [expected] * 2
    assert "is here already" in logs(machine, "second")


@pytest.mark.slow
def test_a_worker_that_starts_again_needs_no_store_and_sees_the_same(machine, rclone: Place, gate: Gate):
    upload(rclone, {"digits/a.txt": "old", "code/see.py": SCRIPT})
    job = machine.job(
        args=("400",), script="see.py", code=f"{rclone.url}/code", data=[{"from": f"{rclone.url}/digits", "to": "/data"}]
    )
    name = machine.submit(job)
    first = machine.wait(name, lambda s: len(seen(machine)) == 2 and all(w.ranks for w in s.workers))
    for path in machine.backend.output(name).glob("seen-*.json"):
        path.unlink()
    upload(rclone, {"digits/a.txt": "new"})
    gate.open = False
    machine.backend.chaos(name, "kill-worker", worker=1, rng=machine.rng)
    machine.wait(name, lambda s: s.generation > first.generation and len(seen(machine)) == 2)
    assert [rank["data"] for rank in seen(machine)] == [{"a.txt": "old"}] * 2
    machine.backend.steer(name, "cancel")


@pytest.mark.slow
def test_packages_of_the_job_are_there_in_training_and_in_evaluation(machine, capfd: pytest.CaptureFixture[str], own_cache: Path):
    a_wheel(machine.directory, "tiny", "2.0")
    (machine.directory / "requirements.txt").write_text("--no-index\n--find-links .\ntiny")
    (machine.directory / "code").mkdir()
    (machine.directory / "code" / "see.py").write_text(SCRIPT)
    fields = {"script": "see.py", "code": str(machine.directory / "code"), "environment": {"requirements": "requirements.txt"}}
    status = machine.run(machine.job(args=("3",), **fields))
    assert status.state is State.SUCCEEDED, status
    (python,) = own_cache.glob("environments/*/bin/python")
    assert [(rank["tiny"], rank["python"]) for rank in seen(machine)] == [("2.0", str(python))] * 2
    assert logs(machine).count("outlast | making environment.requirements") == 1
    (printed,) = own_cache.glob("environments/*.log")
    assert "Successfully installed tiny-2.0" in printed.read_text() or "+ tiny==2.0" in printed.read_text()
    status = machine.run(machine.job("second", args=("3",), **fields))
    assert status.state is State.SUCCEEDED, status
    assert "making environment" not in logs(machine, "second")
    assert machine.backend.evaluate("second", []) == 0
    out = capfd.readouterr().out.strip().splitlines()
    assert json.loads(out[-1])["tiny"] == "2.0"
