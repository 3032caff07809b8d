"""How a training process ends that leaves in the middle."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LEAVES = """
import atexit, sys, threading, time
from outlast.runtime import warm

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
