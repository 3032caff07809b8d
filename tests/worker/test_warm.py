"""What forks of the warm process are called, how they end, and what becomes of one that cannot be made."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from outlast.base import unix_sockets
from outlast.worker.launch import rank_processes, warm_request
from outlast.worker.launch import warm_process as warm

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
        ("elastic", ["2", "120", "train.py"], "elastic agent 1"),
        ("rank", ["/code/train.py", "--lr=1"], "rank 3 train.py"),
        ("rank", ["-m", "outlast.recipes.cifar10"], "rank 3 outlast.recipes.cifar10"),
    ],
)
def test_a_fork_is_called_by_what_it_does(kind: str, argv: list[str], title: str) -> None:
    assert warm.title(warm.Request(kind, argv, {"RANK": "3", "OUTLAST_WORKER": "1"}, "/", [])) == title


ELASTIC = """
import os, sys
from types import SimpleNamespace
from outlast.worker.launch import warm_process as warm

def main(argv, *, ready_fd):
    raise {}

sys.modules["outlast.worker.launch.elastic_agent"] = SimpleNamespace(main=main)
warm.become(warm.Request("elastic", [], dict(os.environ), "/", []))
"""


@pytest.mark.parametrize(("raised", "code"), [("ValueError('a bug')", os.EX_SOFTWARE), ("SystemExit(79)", 79)])
def test_an_exception_of_the_elastic_agent_has_an_exit_code_that_no_end_of_a_run_has(raised: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", ELASTIC.format(raised)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.endswith("ValueError: a bug\n") == (code == os.EX_SOFTWARE)


FORKING = """
import os, sys, time
from pathlib import Path
from outlast.job import contract
from outlast.worker.launch import warm_process as warm
from outlast.base import unix_sockets

fork, refused = os.fork, [None, BlockingIOError(11, "Resource temporarily unavailable")]
os.fork = lambda: (_ for _ in ()).throw(problem) if refused and (problem := refused.pop(0)) else fork()
if sys.argv[2:]:  # ranks sleep uninterruptibly, as far as it can see
    warm.END_S, os.kill = 1, lambda pid, number: None
request = warm.Server(unix_sockets.listening(Path(sys.argv[1])), dict(os.environ)).run(())
warm.enter(request)
if request.kind == "elastic":
    os.environ[contract.Env.PARENT] = str(os.getpid())
    os.execvp("sh", ["sh"])
for text in request.argv:
    os.write(1, text.encode())
if not request.argv:
    time.sleep(60)
os._exit(3)
"""


@pytest.fixture
def forking(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """Where a warm process without torch listens, whose second fork fails: a rank writes its arguments and exits with 3."""
    path = str(tmp_path / warm_request.SOCKET)
    with subprocess.Popen([sys.executable, "-c", FORKING, path, *getattr(request, "param", ())]) as process:
        while not listens(path):
            assert process.poll() is None
        yield path
        process.kill()


def listens(path: str) -> bool:
    with contextlib.suppress(OSError):
        unix_sockets.connect(path).close()
        return True
    return False


def forks(path: str) -> list[psutil.Process]:
    """The children of the warm process that listens there."""
    living = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
    (warm_process,) = [each for each in living if path in each.cmdline()]
    return list(warm_process.children())


RANK = """
import os, sys
from outlast.worker.launch.rank_processes import RankProcesses

environ = {**os.environ, "RANK": "5", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": sys.argv[2]}
rank = RankProcesses(sys.argv[1], sys.argv[3:], [environ])
while not rank.over():
    rank.wait(1)
[ended] = rank.failures()
print(ended.why, end="", flush=True)
os._exit(ended.code & 0xFF)
"""


def a_rank(path: str, *words: str, of: int = 1) -> list[str]:
    """The command of an elastic agent that starts one rank `of` several, and ends as it did."""
    return [sys.executable, "-c", RANK, path, str(of), *words]


class Elastic:
    """An elastic agent that starts what it is told to: a shell."""

    def __init__(self, path: str) -> None:
        (read, write), (out, to) = os.pipe(), os.pipe()
        self.connection = unix_sockets.connect(path)
        self.connection.settimeout(60)
        warm_request.request(self.connection, "elastic", [], dict(os.environ), "/", (read, to, 2))
        os.close(read)
        os.close(to)
        self.commands, self.output = os.fdopen(write, "w"), os.fdopen(out, "rb")

    def __enter__(self) -> Elastic:
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self.connection, self.commands, self.output):
            each.close()

    def begin(self, command: list[str], after: str = "&") -> None:
        self.commands.write(f"{shlex.join(command)} {after}\n")
        self.commands.flush()

    def run(self, command: list[str]) -> tuple[bytes, int]:
        """What it wrote, and the exit code as a shell has it."""
        self.begin(command, after="; echo _$?_END_")
        written = b""
        while not written.endswith(b"_END_\n"):
            line = self.output.readline()
            assert line
            written += line
        output, code, _ = written.rsplit(b"_", 3)[:3]
        return output, int(code)


def test_a_fork_that_fails_is_the_end_of_that_rank_alone(forking: str) -> None:
    with Elastic(forking) as elastic:
        why = b"could not be started: Resource temporarily unavailable"
        assert elastic.run(a_rank(forking, "never said")) == (why, 256 - signal.SIGKILL)
        assert elastic.run(a_rank(forking, "one\ntwo")) == (b"one\ntwo", 3)
        said = b"[rank 5] one\n[rank 5] two\n[rank 5] 10%\r[rank 5] 20%\r[rank 5] the end"
        assert elastic.run(a_rank(forking, "one\ntw", "o\n", "10%\r", "20%\rthe end", of=2)) == (said, 3)


def test_ranks_end_with_their_elastic_agent_and_before_others_hear_of_that(forking: str) -> None:
    with Elastic(forking) as elastic:
        elastic.run(a_rank(forking))
        elastic.begin(a_rank(forking))
        while len(forks(forking)) < 2:
            pass
        elastic.connection.sendall(b"%d\n" % signal.SIGKILL)
        assert json.loads(elastic.connection.recv(4096))["status"] == -signal.SIGKILL
        assert not forks(forking)
        assert elastic.output.read() == b"", "and so has its child"


@pytest.mark.parametrize("forking", [["stuck"]], indirect=True)
def test_ranks_that_do_not_end_although_they_are_killed_delay_that_only_for_so_long(forking: str) -> None:
    with Elastic(forking) as elastic:
        elastic.run(a_rank(forking))
        elastic.begin(a_rank(forking))
        while len(forks(forking)) < 2:
            pass
        elastic.begin(["exit", "0"], after="")
        assert elastic.connection.recv(4096) == b"", "the warm process has ended"


@pytest.mark.parametrize("another", [True, False])
def test_a_rank_whose_elastic_agent_has_ended_is_not_started(forking: str, another: bool) -> None:
    with Elastic(forking) if another else contextlib.nullcontext() as elastic:
        if elastic:
            elastic.run(a_rank(forking, "fails"))
        done = subprocess.run(a_rank(forking, "never said"), capture_output=True, check=False)
        assert (done.stdout, done.returncode) == (b"was lost with its warm process", 256 - signal.SIGKILL)


def test_without_a_warm_process_there_is_no_rank_since_its_elastic_agent_has_ended_too(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('never said')")
    command = a_rank(str(tmp_path / warm_request.SOCKET), str(tmp_path / "train.py"))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 256 - signal.SIGKILL
    assert done.stdout == "could not be started: [Errno 2] No such file or directory"


def test_a_line_without_end_is_divided_and_a_writer_without_rest_delays_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
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
