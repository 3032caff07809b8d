"""A worker that another worker's warm process forks: when it may, and that it depends on nobody but its own agent."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from outlast.base import unix_sockets
from outlast.job import contract
from outlast.local.state_dir import StateDir
from outlast.worker.agent import start
from outlast.worker.launch import os_calls, sibling, warm_request
from processes import listens
from waits import until

OURS = {"PATH": "/bin", "OMP_NUM_THREADS": "1", "OUTLAST_WORKER": "0", "OUTLAST_STATE": "/s/0", "CUDA_VISIBLE_DEVICES": "0"}


@pytest.mark.parametrize(
    ("theirs", "differing"),
    [
        ({}, {}),
        (
            {"OUTLAST_WORKER": "1", "OUTLAST_STATE": "/s/1", "CUDA_VISIBLE_DEVICES": "1"},
            {"OUTLAST_WORKER": "1", "OUTLAST_STATE": "/s/1", "CUDA_VISIBLE_DEVICES": "1"},
        ),
        ({"OUTLAST_WORKER": "10"}, None),
        ({"OMP_NUM_THREADS": "2"}, None),
        ({"LD_PRELOAD": "/lib/new.so"}, None),
        ({"PATH": None}, None),
    ],
)
def test_a_worker_is_forked_if_its_environment_fits_into_that_of_another(theirs: dict[str, Any], differing: object) -> None:
    environ = {name: value for name, value in {**OURS, **theirs}.items() if value is not None}
    assert sibling.differing(OURS, environ) == differing


class Stopped(Exception):
    """Ends an agent."""


def test_what_an_agent_adds_for_its_warm_process_does_not_keep_that_from_forking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both environments come from one launcher; `ours` is that of a real agent's warm process."""
    started = {**OURS, contract.Env.WORKER: "0", contract.Env.STATE: "/s/0", contract.Env.JOB_FILE: str(tmp_path / "job.yaml")}
    (tmp_path / "job.yaml").touch()
    monkeypatch.setattr(os, "environ", started)
    seen: list[Mapping[str, str]] = []

    def taken(*args: Any) -> None:
        seen.extend(each for each in args if isinstance(each, Mapping))
        raise Stopped

    for owner, name in ((start.pid1, "stand_by"), (start, "Output"), (start.os_calls, "entitle")):
        monkeypatch.setattr(owner, name, mock.Mock())
    monkeypatch.setattr(sibling, "start_warm", taken)
    with pytest.raises(Stopped):
        start.main([])
    monkeypatch.setattr(unix_sockets, "connect", mock.MagicMock())
    monkeypatch.setattr(warm_request, "request", taken)
    with pytest.raises(Stopped):
        sibling.ask("warm.sock", {**started, contract.Env.WORKER: "1"}, "/", 1)
    ours, theirs = seen
    assert sibling.differing(ours, theirs) == {contract.Env.WORKER: "1"}


WARM = """
import json, os, sys, time
from pathlib import Path
from outlast.worker.launch import os_calls, sibling, warm_process
from outlast.base import unix_sockets

request = warm_process.Server(unix_sockets.listening(Path(sys.argv[1])), dict(os.environ)).run()
parent = os.getpid()  # which may be dead before the child runs
child = os.fork()
if child == 0:
    os_calls.die_with(parent)
    time.sleep(60)
print(json.dumps({"pid": os.getpid(), "group": os.getpgrp(), "child": child, "here": os.getcwd(), **os.environ}), flush=True)
time.sleep(60)
"""


def environ(state_dir: StateDir, worker: int) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "LC_ALL": "C.UTF-8", contract.Env.STATE: str(state_dir.worker(worker))}


@pytest.fixture
def parent(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A warm process of worker 0, without torch."""
    command = [sys.executable, "-c", WARM, str(tmp_path / "warm.sock")]
    ours = environ(StateDir(tmp_path), 0)
    with subprocess.Popen(command, env=ours | os_calls.streaming(ours)) as process:
        until(lambda: listens(str(tmp_path / "warm.sock")))
        yield process
        process.kill()


def asked(directory: Path) -> int | None:
    """Ask the warm process for worker 1, which writes to the file `log`."""
    with (directory / "log").open("wb") as log:
        return sibling.ask(str(directory / "warm.sock"), environ(StateDir(directory), 1), str(directory), log.fileno())


def said(directory: Path) -> dict[str, Any]:
    """What the new worker has written."""
    until(lambda: (directory / "log").read_bytes().endswith(b"\n"))
    return dict(json.loads((directory / "log").read_bytes()))


def test_a_forked_worker_outlives_its_parent_but_its_warm_process_does_not_outlive_it(
    tmp_path: Path, parent: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sibling, "ANSWER_S", 30.0)
    state_dir = StateDir(tmp_path)
    pid = asked(tmp_path)
    assert pid is not None
    new = said(tmp_path)
    assert (new["pid"], new["group"], new["here"]) == (pid, pid, str(tmp_path))
    assert new[contract.Env.STATE] == environ(state_dir, 1)[contract.Env.STATE]
    assert [state_dir.owns(0, parent.pid), state_dir.owns(1, parent.pid)] == [True, False]
    for each in (pid, new["child"]):
        assert [state_dir.owns(0, each), state_dir.owns(1, each)] == [False, True], "as /proc shows it"
    parent.kill()
    parent.wait()
    assert state_dir.owns(1, pid)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not state_dir.owns(1, new["child"]))


def test_a_forked_worker_shows_whose_it_is_before_it_says_that_it_is_there(
    tmp_path: Path, parent: subprocess.Popen[bytes]
) -> None:
    """The launcher looks at once, and starts another if it finds a process of another worker."""
    theirs = environ(StateDir(tmp_path), 1)
    with unix_sockets.connect(str(tmp_path / "warm.sock")) as sock, open(os.devnull, "r+b") as null:
        warm_request.request(sock, sibling.KIND, [], theirs | os_calls.streaming(theirs), str(tmp_path), (null.fileno(),) * 3)
        pid = int(sock.recv(64))
        assert StateDir(tmp_path).owns(1, pid)
        assert not StateDir(tmp_path).owns(0, pid)


def test_nobody_is_forked_for_a_launcher_that_has_stopped_waiting(
    tmp_path: Path, parent: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sibling, "ANSWER_S", 0.01)
    parent.send_signal(signal.SIGSTOP)
    until(lambda: psutil.Process(parent.pid).status() == psutil.STATUS_STOPPED)
    assert asked(tmp_path) is None
    parent.send_signal(signal.SIGCONT)
    monkeypatch.setattr(sibling, "ANSWER_S", 30.0)
    pid = asked(tmp_path)
    assert pid is not None
    assert said(tmp_path)["pid"] == pid
    os.kill(pid, signal.SIGKILL)


def test_proc_shows_the_local_rank_of_a_rank_alone(tmp_path: Path) -> None:
    """Tools and people find training processes by it, as they find torchrun's."""
    program = (
        "import os, psutil; from outlast.worker.launch import sibling\n"
        "before = open('/proc/self/environ').read()\n"
        "if os.fork(): os.wait()\n"
        "else: sibling.show_local_rank('3')\n"
        "print('\\0LOCAL_RANK=' in before, psutil.Process().environ().get('LOCAL_RANK'), psutil.Process().environ()['HERE'])"
    )
    process = mock.Mock()
    with mock.patch.object(subprocess, "Popen", process):
        sibling.start_warm(sys.executable, {**os.environ, "OUTLAST_WORKER_STATE": str(tmp_path), "HERE": "yes"})
    environ = process.call_args.kwargs["env"]
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert sorted(done.stdout.splitlines()) == ["False 3 yes", "False None yes"]
