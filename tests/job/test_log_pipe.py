"""The end of a worker's log, as a report of a failure quotes it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from outlast.job.workerfiles import log_pipe

SAID = "outlast | rank 0 on worker 0 exited with code 3"


def a_log(directory: Path, *lines: str) -> Path:
    log = directory / "worker-0.log"
    log.write_text("".join(f"{line}\n" for line in lines))
    return log


def test_a_tail_is_the_last_lines_before_the_one_that_names_the_failure(tmp_path: Path) -> None:
    log = a_log(tmp_path, *(f"line {number}" for number in range(30)), SAID, "worker 0 starts again")
    assert log_pipe.tail(log, SAID).splitlines() == [f"line {number}" for number in range(10, 30)]


def test_a_tail_is_of_this_generation(tmp_path: Path) -> None:
    log = a_log(tmp_path, "the first", SAID)
    begun = log_pipe.size(log)
    log.write_text(log.read_text() + f"the second\n{SAID}\n")
    assert log_pipe.tail(log, SAID, since=begun) == "the second"


def test_a_tail_is_of_the_process_that_failed(tmp_path: Path) -> None:
    log = a_log(tmp_path, "[rank 1] so be it", "[rank 10] nor this", "[rank 2] not this", "outlast | nor that", SAID)
    assert log_pipe.tail(log, SAID, prefix="[rank 1] ") == "[rank 1] so be it"


def test_a_tail_is_short_and_can_be_read_however_long_and_strange_its_lines_are(tmp_path: Path) -> None:
    log = tmp_path / "worker-0.log"
    log.write_bytes(b"\xff" + "ä".encode() * 5000 + b"!\n" + SAID.encode() + b"\n")
    assert log_pipe.tail(log, SAID) == "ä" * 1023 + "!"


@pytest.mark.parametrize(("lines", "tail"), [(("before the disk was full",), "before the disk was full"), ((), "")])
def test_a_line_that_never_comes_is_not_waited_for(tmp_path: Path, lines: tuple[str, ...], tail: str, monkeypatch) -> None:
    monkeypatch.setattr(log_pipe, "_TAIL_S", 0.02)
    assert log_pipe.tail(a_log(tmp_path, *lines), SAID) == tail
    assert log_pipe.tail(tmp_path / "nowhere", SAID) == ""


LATE = """
import sys, threading
from pathlib import Path
from outlast.job.workerfiles import log_pipe as output

log, path = output.Output(), Path(sys.argv[1])
output._TAIL_S = 60
with log._copying:  # the pipe is not read now
    print("the last words", flush=True)
    print(sys.argv[2], file=sys.stderr, flush=True)
    assert output.size(path) == 0
    tails = []
    thread = threading.Thread(target=lambda: tails.append(output.tail(path, sys.argv[2])))
    thread.start()
log.keep(path)
thread.join()
log.close()
assert tails == ["the last words"], tails
"""


def test_what_is_still_on_its_way_to_the_log_is_waited_for(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", LATE, str(tmp_path / "logs" / "worker-0.log"), SAID], check=True)
