"""The ledger: what processes append is there to read, however they end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

from outlast.job import ledger
from outlast.job.ledger import Ledger

WRITE_FOR_EVER = """
import sys
from pathlib import Path
from outlast.job.ledger import Ledger
mine = Ledger(Path(sys.argv[1]), sys.argv[2])
n = 0
while True:
    mine.write("step", generation=1, step=n, note="x" * (n % 200))
    n += 1
    if n == 100:
        print("going", flush=True)
"""


def test_an_event_has_a_time_a_kind_a_source_and_its_fields(tmp_path):
    mine = Ledger(tmp_path / "ledger", "launcher")
    mine.write("world", generation=2, workers=[0, 1], reason="all here\n")
    mine.close()
    (event,) = ledger.read(tmp_path / "ledger")
    assert event.pop("t") > 1.6e9
    assert event == {"kind": "world", "source": "launcher", "generation": 2, "workers": [0, 1], "reason": "all here\n"}


def test_events_of_all_sources_come_in_the_order_of_time(tmp_path):
    a, b = Ledger(tmp_path, "a"), Ledger(tmp_path, "b")
    for n in range(6):
        (a if n % 2 else b).write("step", step=n)
    assert [event["step"] for event in ledger.read(tmp_path)] == [0, 1, 2, 3, 4, 5]
    a.close()
    b.close()


def test_a_process_that_comes_back_appends_to_what_it_wrote(tmp_path):
    for attempt in (1, 2):
        mine = Ledger(tmp_path, "launcher")
        mine.write("launcher", attempt=attempt)
        mine.close()
    assert [event["attempt"] for event in ledger.read(tmp_path)] == [1, 2]


def test_lines_that_are_no_events_are_left_out(tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"t": 2, "kind": "step"}\n[1]\n{"t": 3}\n\nnull\n\xff\n{"t": 1, "kind": "world"}\n{"t": 4, "ki'
    )
    (tmp_path / "notes.txt").write_text("not a ledger")
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    (tmp_path / "directory.jsonl").mkdir()
    assert list(ledger.read(tmp_path)) == [{"t": 1, "kind": "world"}, {"t": 2, "kind": "step"}]


def test_events_out_of_order_come_in_order_unless_a_clock_was_set_back(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "_UNSORTED", 2)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"t": t, "kind": "step"}) + "\n" for t in (1, 3, 2, 9, 8, 7, 4)))
    (tmp_path / "b.jsonl").write_text(json.dumps({"t": 2.5, "kind": "world"}) + "\n")
    found = ledger.read(tmp_path)
    assert [event["t"] for event in found] == [1, 2, 2.5, 3, 7, 7, 8, 9] == [event["t"] for event in found]


def test_steps_that_end_within_a_second_are_one_event_and_all_else_comes_after_it(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger.time, "monotonic", lambda: now)
    mine = Ledger(tmp_path, "a")
    for step in range(1, 31):
        now = 1000 + step * 0.1
        mine.step(1, step)
        if step == 25:
            mine.write("saving", step=25)
    mine.step(2, 26)  # a world that goes on from the save
    mine.close()
    told = [(e["kind"], e["step"], e.get("steps", 1)) for e in ledger.read(tmp_path)]
    assert told == [
        *(("step", last, count) for last, count in ((1, 1), (11, 10), (21, 10), (25, 4))),
        ("saving", 25, 1),
        *(("step", last, count) for last, count in ((26, 1), (30, 4), (26, 1))),
    ]


def test_there_is_nothing_in_a_ledger_that_nobody_wrote(tmp_path):
    assert list(ledger.read(tmp_path / "nowhere")) == []


def test_a_killed_writer_leaves_whole_lines(tmp_path):
    """Two processes write as fast as they can and are killed; every line but perhaps the last of each file is whole."""
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITE_FOR_EVER, str(tmp_path), name], stdout=subprocess.PIPE, text=True)
        for name in "ab"
    ]
    try:
        assert [writer.stdout.readline() for writer in writers] == ["going\n", "going\n"]
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    assert [writer.returncode for writer in writers] == [-signal.SIGKILL] * 2
    for name in "ab":
        lines = (tmp_path / f"{name}.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines[:-1]] == list(range(len(lines) - 1))
    found = list(ledger.read(tmp_path))
    assert [event["step"] for event in found if event["source"] == "a"][:100] == list(range(100))
    assert [event["t"] for event in found] == sorted(event["t"] for event in found)


def test_a_full_disk_drops_events_and_ends_nothing(tmp_path):
    """A limit on the size of files stands in for the full disk; the process goes on to its end."""
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))\n"
    script = limit + WRITE_FOR_EVER.replace("while True:", "for _ in range(1000):")
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path), "a"], check=False, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    steps = [event["step"] for event in ledger.read(tmp_path)]
    assert steps == list(range(len(steps)))
    assert 0 < len(steps) < 1000
    assert Path(tmp_path / "a.jsonl").stat().st_size <= 20_000


def test_a_line_that_comes_in_many_pieces_is_put_together_once():
    pieces = [b"a\nb", *[b"x" * 10_000] * 3_000, b"\n", b"c\n\n", b"d"]
    began = time.process_time()
    found = list(ledger.lines(pieces))
    assert (found[0], len(found[1]), found[2:]) == (b"a", 30_000_001, [b"c", b"", b"d"])
    assert time.process_time() - began < 2  # in proportion to the bytes


def test_steps_that_are_written_together_have_waited_for_data_together(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "TOGETHER_S", 3600.0)
    writer = ledger.Ledger(tmp_path, "rank-0")
    for step, waited_s in ((1, 0.5), (2, 0.0), (3, 0.25), (4, 0.125)):
        writer.step(1, step, waited_s, copied_s=waited_s / 2 if step > 2 else 0.0)
    writer.write("saving", step=4)
    writer.step(1, 5)
    writer.close()
    fields = ("step", "steps", "waited_s", "copied_s")
    told = [tuple(map(e.get, fields)) for e in ledger.read(tmp_path) if e["kind"] == "step"]
    assert told == [(1, None, 0.5, None), (4, 3, 0.375, 0.1875), (5, None, None, None)]
