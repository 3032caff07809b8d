"""What forks of the warm process are called, how they end, and what becomes of one that cannot be made."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from outlast import contract
from outlast.launch import shim, warm

LEAVES = """
import atexit, sys, threading, time
from outlast.launch import warm

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
from outlast.launch import titles
if {without}:
    import sys
    sys.modules["setproctitle"] = None
titles.entitle("warm process")
pid = os.fork()
if pid == 0:
    titles.entitle("rank 3 train.py")
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
from outlast.launch import warm

def main(argv, *, unready):
    raise {}

sys.modules["outlast.launch.elastic"] = SimpleNamespace(main=main)
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
from outlast.launch import warm
from outlast.rendezvous.transports import sockets

fork, refused = os.fork, [BlockingIOError(11, "Resource temporarily unavailable")]
os.fork = lambda: fork() if not refused else (_ for _ in ()).throw(refused.pop())
request = warm.Server(sockets.listening(Path(sys.argv[1])), dict(os.environ)).run(())
warm.enter(request)
for text in request.argv:
    os.write(1, text.encode())
if request.kind == "elastic" or not request.argv:
    time.sleep(60)
os._exit(3)
"""


@pytest.fixture
def forking(tmp_path: Path) -> Iterator[str]:
    """Where a warm process without torch listens, whose first fork fails: a rank writes its arguments and exits with 3."""
    path = str(tmp_path / shim.SOCKET)
    with subprocess.Popen([sys.executable, "-c", FORKING, path]) as process:
        while not listens(path):
            assert process.poll() is None
        yield path
        process.kill()


def listens(path: str) -> bool:
    with contextlib.suppress(OSError):
        shim.connect(path).close()
        return True
    return False


def a_rank(path: str, *words: str, of: int = 1) -> subprocess.Popen[bytes]:
    """A stand-in as torch's agent starts it."""
    environ = {
        **os.environ,
        "RANK": "5",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": str(of),
        contract.Env.STATE: str(Path(path).parent),
    }
    command = [sys.executable, "-I", "-S", shim.__file__, path, "1", *words]
    return subprocess.Popen(command, env=environ, stdout=subprocess.PIPE)


def test_a_fork_that_fails_is_the_end_of_that_rank_alone(forking: str) -> None:
    failed = a_rank(forking, "never said")
    assert (failed.communicate()[0], failed.returncode) == (b"", -signal.SIGKILL)
    record = json.loads(Path(forking).with_name("error-1.json").read_text())
    assert record["message"] == "could not be started: Resource temporarily unavailable"
    again = a_rank(forking, "one\ntwo")
    assert (again.communicate()[0], again.returncode) == (b"one\ntwo", 3)
    several = a_rank(forking, "one\ntw", "o\n", "10%\r", "20%\rthe end", of=2)
    said = b"[rank 5] one\n[rank 5] two\n[rank 5] 10%\r[rank 5] 20%\r[rank 5] the end"
    assert (several.communicate()[0], several.returncode) == (said, 3)


def test_ranks_end_with_their_elastic_agent_and_before_others_hear_of_that(forking: str) -> None:
    a_rank(forking).communicate()
    (warm_process,) = [each for each in psutil.Process().children() if forking in each.cmdline()]
    with shim.connect(forking) as elastic, open(os.devnull, "r+b") as null:
        shim.request(elastic, "elastic", [], dict(os.environ), "/", (null.fileno(),) * 3)
        rank = a_rank(forking)
        while len(warm_process.children()) < 2:
            assert rank.poll() is None
        elastic.sendall(b"%d\n" % signal.SIGKILL)
        assert json.loads(elastic.recv(4096))["status"] == -signal.SIGKILL
        assert not warm_process.children()
        rank.communicate()
        assert rank.returncode == -signal.SIGKILL
