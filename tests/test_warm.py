"""What forks of the warm process are called, and how one ends that leaves in the middle."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from outlast.launch import warm

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
