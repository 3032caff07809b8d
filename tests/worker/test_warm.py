"""What forks of the warm process are called, how they end, and what becomes of one that cannot be made."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from outlast.job.contract import Env
from outlast.job.workerfiles import next_world
from outlast.worker.launch import rank_processes, warm_request
from outlast.worker.launch import warm_process as warm
from outlast.worker.launch.rank_failures import Start
from processes import listens

LEAVES = """
import atexit, sys, threading, time
from outlast.worker.launch import warm_process as warm

class Last:
    def __del__(self):
        print("the interpreter has ended")

last = Last()
text, data = open(sys.argv[1], "w"), open(sys.argv[2], "wb")
text.write("written")
data.write(b"written")
print("said", end="")
atexit.register(lambda: print(" at the end"))
threading.Thread(target=lambda: (time.sleep(0.2), text.write(" by a thread"))).start()
warm.leave(75)
"""


def test_who_leaves_in_the_middle_loses_nothing_that_was_written_and_ends_before_the_interpreter_does(tmp_path: Path) -> None:
    text, data = tmp_path / "text", tmp_path / "data"
    done = subprocess.run([sys.executable, "-c", LEAVES, str(text), str(data)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (75, "said at the end\n", "")
    assert (text.read_text(), data.read_bytes()) == ("written by a thread", b"written")


CALLED = """
import os
from pathlib import Path
from outlast.worker.launch import os_calls
if {without}:
    import sys
    sys.modules["setproctitle"] = None
os_calls.entitle("warm process")
pid = os.fork()
if pid == 0:
    os_calls.entitle("rank 3 train.py")
    read = lambda name: Path("/proc/self", name).read_bytes().replace(b"\\0", b"").decode().strip()
    print(read("comm"), read("cmdline"), "HERE=yes" in read("environ"), "SPT_NOENV" in os.environ, sep=";")
else:
    os.waitpid(pid, 0)
"""


@pytest.mark.parametrize("without", [False, True])
def test_a_fork_has_a_name_of_its_own_and_keeps_its_environment_in_proc(without: bool) -> None:
    program = CALLED.format(without=without)
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env={**os.environ, "HERE": "yes"}, capture_output=True, text=True, check=True)
    comm, cmdline, environ, left = done.stdout.strip().split(";")[:1] + done.stdout.strip().split(";")[-3:]
    assert comm == "outlast: rank 3"
    assert (environ, left) == ("True", "False")
    assert without or cmdline == "outlast: rank 3 train.py"


@pytest.mark.parametrize(
    ("kind", "argv", "title"),
    [
        ("store", ["127.0.0.1:5"], "store of worker 1"),
        ("rank", ["/code/train.py", "--lr=1"], "rank 3 train.py"),
        ("rank", ["-m", "outlast.recipes.cifar10"], "rank 3 outlast.recipes.cifar10"),
    ],
)
def test_a_fork_is_called_by_what_it_does(kind: str, argv: list[str], title: str) -> None:
    assert warm.title(warm.Request(kind, argv, {"RANK": "3", "OUTLAST_WORKER": "1"}, "/", [])) == title


FORKING = """
import os, signal, sys, time
from pathlib import Path
from outlast.worker.launch import warm_process as warm
from outlast.base import unix_sockets

fork, refused = os.fork, [BlockingIOError(11, "Resource temporarily unavailable")]
os.fork = lambda: (_ for _ in ()).throw(refused.pop()) if refused else fork()
if sys.argv[2:]:  # ranks sleep uninterruptibly, as far as it can see
    os.kill = lambda pid, number: None
request = warm.Server(unix_sockets.listening(Path(sys.argv[1])), dict(os.environ)).run()
warm.enter(request)
for text in request.argv:
    os.write(1, text.encode())
if not request.argv:
    signal.signal(signal.SIGCONT, lambda *_: os.write(1, b"goes on"))
    time.sleep(60)
os._exit(3)
"""


@pytest.fixture
def forking(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """Where a warm process without torch listens, whose first fork fails: a fork writes its arguments and exits with 3, or sleeps
    if it has none."""
    path = str(tmp_path / warm_request.SOCKET)
    with subprocess.Popen([sys.executable, "-c", FORKING, path, *getattr(request, "param", ())]) as process:
        while not listens(path):
            assert process.poll() is None
        yield path
        process.kill()


def forks(path: str) -> list[psutil.Process]:
    """The children of the warm process that listens there."""
    living = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
    (warm_process,) = [each for each in living if each.cmdline()[2:4] == [FORKING, path]]
    return list(warm_process.children())


RANK = """
import os, sys
from outlast.worker.launch.rank_processes import RankProcesses

environ = {**os.environ, "RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": sys.argv[2]}
rank = RankProcesses(sys.argv[1], os.getcwd())
rank.start(sys.argv[3:], [environ])
while not rank.over():
    rank.wait(1)
[ended] = rank.failures()
print(ended.why, end="", flush=True)
os._exit(ended.code & 0xFF)
"""


def a_rank(path: str, *words: str, of: int = 1) -> list[str]:
    """The command of a process that starts one rank `of` several, and ends as it did."""
    return [sys.executable, "-c", RANK, path, str(of), *words]


def run(command: list[str]) -> tuple[bytes, int]:
    done = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    return done.stdout, done.returncode


def test_a_fork_that_fails_is_the_end_of_that_rank_alone(forking: str) -> None:
    why = b"could not be started: Resource temporarily unavailable"
    assert run(a_rank(forking, "never said")) == (why, 256 - signal.SIGKILL)
    assert run(a_rank(forking, "one\ntwo")) == (b"one\ntwo", 3)
    said = b"[rank 5] one\n[rank 5] two\n[rank 5] 10%\r[rank 5] 20%\r[rank 5] the end"
    assert run(a_rank(forking, "one\ntw", "o\n", "10%\r", "20%\rthe end", of=2)) == (said, 3)


def test_a_rank_ends_with_the_process_that_asked_for_it(forking: str) -> None:
    run(a_rank(forking, "fails"))
    with subprocess.Popen(a_rank(forking)) as caller:
        while not forks(forking):
            assert caller.poll() is None
        caller.kill()
    while forks(forking):
        pass


ENVIRON = {**os.environ, "RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"}


@pytest.mark.parametrize("forking", [["stuck"]], indirect=True)
def test_a_rank_that_does_not_end_although_it_is_killed_is_left_alone_after_a_while(
    forking: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rank_processes, "END_S", 0.2)
    run(a_rank(forking, "fails"))
    ranks = rank_processes.RankProcesses(forking, "/")
    ranks.start([], [ENVIRON])
    ranks.stop(0.1)
    assert "rank 5 was killed 0 s ago and has not ended: a disk or a driver blocks it" in capfd.readouterr().out


def test_the_end_of_the_store_ends_a_start_of_ranks(forking: str, capfd: pytest.CaptureFixture[str]) -> None:
    run(a_rank(forking, "fails"))
    ranks = rank_processes.RankProcesses(forking, "/")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ranks.host("127.0.0.1:5", listener, ENVIRON)
    ranks.start([], [ENVIRON])
    while not ranks.over():
        ranks.wait(1.0)
    (ended,) = ranks.failures()
    ranks.stop(0.1)
    assert (ended.rank, ended.code) == (None, 3)
    assert Start(1, Path("/"), 1, 1, 0).failure(ended)["reason"] == "the store of the world on worker 1 exited with code 3"
    assert capfd.readouterr().out.endswith("127.0.0.1:5")


def test_a_store_that_is_stopped_goes_on_at_once(forking: str, capfd: pytest.CaptureFixture[str]) -> None:
    run(a_rank(forking, "fails"))
    store = rank_processes.Fork(forking, "store", [], ENVIRON, "/", threading.Condition())
    while not (found := forks(forking)):
        pass
    said = ""
    while "goes on" not in said:
        assert not store.ended
        found[0].send_signal(signal.SIGSTOP)
        time.sleep(0.01)
        said += capfd.readouterr().out
    store.signal(signal.SIGKILL)
    store.join()


STALE = """
import os, selectors, signal, socket, sys
from pathlib import Path
from outlast.base import unix_sockets
from outlast.worker.launch import warm_process as warm, warm_request

path = Path(sys.argv[1])
server = warm.Server(unix_sockets.listening(path), dict(os.environ))

def asks() -> socket.socket:
    caller = unix_sockets.connect(path)
    warm_request.request(caller, "store", [], dict(os.environ), "/", (0, 1, 2))
    return caller

def forked() -> None:
    if server._turn(10):
        signal.pause()

signal.alarm(30)
first = asks()
forked()
[(fd, child)] = server._children.items()
first.sendall(b"15\\n")  # it is read after the child's end, and after the next request
os.kill(child.pid, signal.SIGKILL)
os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
second = asks()
order = [server._wake_r, server._listener.fileno(), fd]
ready = sorted(server._selector.select(0), key=lambda each: order.index(each[0].fd))
assert [key.fd for key, _ in ready] == order
server._selector.select = lambda timeout_s: ready
forked()
[after] = server._children.values()
print(first.recv(4096).decode(), after.pid != child.pid)
os.kill(after.pid, signal.SIGKILL)
"""


def test_an_event_of_a_closed_connection_is_not_taken_for_one_of_the_next(tmp_path: Path) -> None:
    """The warm process would wait for a signal that nobody sends, and fork nothing else."""
    done = subprocess.run([sys.executable, "-c", STALE, str(tmp_path / "warm.sock")], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout[:14], done.stdout[-5:]) == (0, '{"status": -9,', "True\n"), done.stderr


def test_without_a_warm_process_there_is_no_rank(tmp_path: Path) -> None:
    path = str(tmp_path / warm_request.SOCKET)
    command = a_rank(path, "never said")
    ranks = rank_processes.RankProcesses(path, "/")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ranks.host("127.0.0.1:5", listener, ENVIRON)
    ranks.stop(0.0)
    assert [(ended.rank, ended.why[:20]) for ended in ranks.failures()] == [(None, "could not be started")]
    assert run(command) == (b"could not be started: [Errno 2] No such file or directory", 256 - signal.SIGKILL)


def test_a_line_without_end_is_divided_and_a_writer_without_rest_delays_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    lines = rank_processes.Lines(5)
    fcntl.fcntl(lines.write, fcntl.F_SETPIPE_SZ, 4 * rank_processes.PIECE)
    os.write(lines.write, b"x" * (3 * rank_processes.PIECE + 1))
    assert lines.copy()
    assert capfd.readouterr().out == f"[rank 5] {'x' * rank_processes.PIECE}\n"
    os.close(lines.write)
    while lines.copy():
        pass
    lines.copy(last=True)
    assert capfd.readouterr().out == 2 * f"[rank 5] {'x' * rank_processes.PIECE}\n" + "[rank 5] x"
    os.close(lines.read)


def test_a_kept_rank_goes_on_in_the_next_world_and_has_a_successor_if_it_has_ended(forking: str, tmp_path: Path) -> None:
    run(a_rank(forking, "fails"))
    begun = {**ENVIRON, Env.STATE: str(tmp_path), Env.GENERATION: "1"}
    ranks = rank_processes.RankProcesses(forking, "/")
    ranks.start([], [begun])
    while not (first := forks(forking)):
        pass
    ranks.keep()
    ranks.start([], [{**begun, "RANK": "2", Env.GENERATION: "2"}])
    assert forks(forking) == first
    assert next_world.read(tmp_path, 1, (1, 0)) == {"RANK": "2", Env.GENERATION: "2"}
    ranks.start([], [{**begun, Env.GENERATION: "3"}])
    assert next_world.read(tmp_path, 1, (2, 0)) == {"RANK": "5", Env.GENERATION: "3"}, "all that differs from its present place"
    ranks.start([], [{**begun, Env.GENERATION: "3", Env.ATTEMPT: "1"}])
    assert next_world.read(tmp_path, 1, (3, 0)) == {Env.GENERATION: "3", Env.ATTEMPT: "1"}, "another attempt of one generation"
    first[0].kill()
    while not ranks.over():
        ranks.wait(1.0)
    ranks.start([], [{**begun, Env.GENERATION: "4"}])
    while not (second := forks(forking)):
        pass
    assert second != first
    assert next_world.read(tmp_path, 1, (3, 1)) == {}, "a new process has its place in its environment"
    ranks.stop(0.1)
    [ended] = ranks.failures()
    assert (ended.rank, ended.code) == (5, -signal.SIGTERM)
