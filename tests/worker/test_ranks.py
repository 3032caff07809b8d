"""Which training processes an agent takes for alive, silent and hung: real processes, clocks that are set and stand still."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from clocks import Machine
from outlast.job import contract
from outlast.job.workerfiles import guessed_progress
from outlast.job.workerfiles import progress_file as progress
from outlast.job.workerfiles.progress_file import Progress
from outlast.rendezvous import root_cause
from outlast.rendezvous.membership import LOOK_S, Membership
from outlast.rendezvous.who_trains import World
from outlast.worker.agent import reporter
from outlast.worker.agent.ranks import Ranks
from outlast.worker.hangs import hang_limit, stacks
from outlast.worker.launch import rank_failures, training_process
from outlast.worker.launch.rank_failures import Ended, Start, Verdict

LIMIT_S = 600.0


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has nothing to do with the job."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Start:
    return Start(0, tmp_path, 1, generation=1, attempt=0)


def a_record(pid: int, *, started: int | None = None, step: int = 7, time: float = 0.0) -> Progress:
    started = progress.kernel(pid)[1] if started is None else started
    return Progress(generation=1, rank=0, phase="train", step=step, pid=pid, started=started, time=time)


def written(state: Path, record: Progress) -> None:
    (state / contract.PROGRESS.format(local_rank=0)).write_text(json.dumps(dataclasses.asdict(record)))


def test_a_process_whose_name_is_not_utf_8_is_known() -> None:
    program = r"import sys; open('/proc/self/comm', 'wb').write(b'\xff'); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        state, started = progress.kernel(process.pid)
        assert (state in "RS", started > 0) == (True, True)
        process.communicate()


def test_a_process_writes_down_who_it_is(tmp_path: Path) -> None:
    writer = progress.Writer(tmp_path, 0)
    writer.write(Progress(generation=1, rank=0, phase="train"))
    writer.close()
    (process,) = Ranks(tmp_path, 1, Machine().awake()).look()
    assert (process.stopped, process.silent_s) == (False, 0.0)
    assert process.progress.started == progress.kernel(process.progress.pid)[1] > 0


def test_the_time_of_steps_excludes_the_first_of_a_process_and_stalls_for_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = progress.Writer(tmp_path, 0)
    moments: list[tuple[float, str, int, float]] = [
        (0, "open", 0, 0), (50, "first step", 7, 0), (90, "train", 8, 0), (91, "train", 9, 0), (91.5, "train", 9, 0),
        (92, "train", 10, 0), (97, "train", 10, 4), (98, "train", 11, 4), (100, "train", 15, 4), (200, "first step", 12, 4),
        (300, "train", 13, 4), (301, "train", 14, 4),
    ]  # fmt: skip
    for now, phase, step, stalled_s in moments:
        monkeypatch.setattr(time, "monotonic", lambda now=now: now)
        writer.write(Progress(1, 0, phase, step, stalled_s=stalled_s))
    record = progress.read(tmp_path, 0)
    assert record is not None
    assert (record.stepped, record.stepped_s) == (8, 1 + 1 + 2 + 2 + 1)
    writer.close()


def test_where_no_record_can_be_written_that_of_an_earlier_process_is_gone(tmp_path: Path) -> None:
    """Otherwise its step, its attempt and its rank would be believed."""
    progress.Writer(tmp_path, 0).write(Progress(generation=1, rank=1, phase="train", step=9, committed=9))
    writer, before = progress.Writer(tmp_path, 0), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        writer.write(Progress(generation=2, rank=0, phase="open"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert progress.read(tmp_path, 0) is None
    writer.write(Progress(generation=2, rank=0, phase="train"))
    record = progress.read(tmp_path, 0)
    assert record is not None
    assert (record.generation, record.phase) == (2, "train")


def test_records_that_are_not_of_this_start_tell_the_coordinator_nothing(tmp_path: Path) -> None:
    """A disk that can only be read keeps them."""
    member = Membership(cast(Any, None), run_id="r", state=tmp_path, host="127.0.0.1", processes=1)
    member.world = World(2, (1, 0), "", "")
    old = Progress(generation=1, rank=0, phase="train", step=9, committed=5, snapshot=9)
    for fields in ({}, {"generation": 2, "attempt": 1}):
        said = {**dataclasses.asdict(old), **fields}
        (tmp_path / contract.PROGRESS.format(local_rank=0)).write_text(json.dumps(said))
        assert progress.read(tmp_path, 0) is not None
        assert (member._records(), member._owes(), member._held) == ([], False, 0)
        assert Start(0, tmp_path, 1, 2, 0).failure(Ended(1, 0, -9, 0.0))["step"] is None
        assert Ranks(tmp_path, 1, time.monotonic).look() == [], "their process is not there"


class Amended:
    """A client that keeps what it is to report."""

    id, closed, called = 0, None, None

    def __init__(self) -> None:
        self.batches: list[tuple[int, ...]] = []

    def amend(self, *, batch: tuple[int, ...]) -> None:
        self.batches.append(batch)


def test_the_batch_is_reported_once_it_is_known_and_kept_while_other_processes_start(tmp_path: Path) -> None:
    client, now = Amended(), [0.0]
    member = Membership(cast(Any, client), run_id="r", state=tmp_path, host="127.0.0.1", processes=2)
    member._clock = cast(Any, lambda: now[0])
    writers = [progress.Writer(tmp_path, local_rank) for local_rank in (0, 1)]

    def after_start(generation: int, batch: object) -> list[tuple[int, ...]]:
        member.world = World(generation, (0,), "", "")
        for told in (0, batch):
            writers[0].write(Progress(generation=generation, rank=0, phase="started", batch=cast(Any, told)))
            for _ in range(2):
                assert not member.must_stop()
                now[0] += LOOK_S / 2
        return client.batches

    assert after_start(1, 0) == []
    assert after_start(2, 8) == [(2, 0, 4)]
    assert after_start(3, 0) == [(2, 0, 4)]
    assert (member._stopped()["batch"], len(client.batches)) == ((2, 0, 4), 1)
    for nonsense in (-4, "8", 1 << 60, True):
        assert after_start(4, nonsense) == [(2, 0, 4)]
    assert after_start(5, 6)[1:] == [(5, 0, 3)]
    assert after_start(6, 7)[2:] == [(6, 0, 0)], "two processes cannot share 7 samples, whatever the number of workers"


def test_a_process_whose_main_thread_moves_is_not_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "cpu_s", lambda pid: 5.0)
    machine = Machine()
    ranks = Ranks(tmp_path, 1, machine.awake())
    writer, beat = progress.Writer(tmp_path, 0), progress.Beat(tmp_path, 0)
    writer.write(Progress(generation=1, rank=0, phase="train"))

    def after(seconds: int, moves: bool, where: str = "") -> hang_limit.Process:
        for _ in range(seconds):
            machine.goes_on(1.0)
            beat.write(moves, where)
            (process,) = ranks.look()
        return process

    assert after(30, moves=True).silent_s == 0.0
    still = after(20, moves=False, where="rank 0 is in lock.acquire() (train.py:3)")
    assert (still.silent_s, still.frozen, still.watched) == (20.0, False, True)
    assert still.where == "rank 0 is in lock.acquire() (train.py:3)"
    for _ in range(30):
        machine.goes_on(1.0)
        (process,) = ranks.look()
    assert process.frozen, "nobody looks any more"
    assert process.silent_s == 30 + 20, "that is no sign of life"
    os.close(beat._fd)
    assert not ranks.look()[0].watched, "it has become another program"
    writer.close()


def test_what_a_plain_script_writes_is_a_sign_of_life(tmp_path: Path) -> None:
    machine = Machine()
    ranks = Ranks(tmp_path, 1, machine.awake())
    for phase, silent_s in [("started", 0.0), ("train", 1.0)]:
        written(tmp_path, dataclasses.replace(a_record(os.getpid()), phase=phase))
        for bytes_ in (10, 20):
            (process,) = ranks.look(bytes_)
            machine.goes_on(1.0)
        assert process.silent_s == silent_s


def test_whoever_got_the_number_of_a_dead_process_is_neither_watched_nor_killed(tmp_path: Path, bystander) -> None:
    ranks = Ranks(tmp_path, 1, Machine().awake())
    dead = a_record(bystander.pid, started=progress.kernel(bystander.pid)[1] - 1)
    written(tmp_path, dead)
    assert ranks.look() == []
    ranks.kill(hang_limit.Process(0, dead, stopped=False, silent_s=LIMIT_S))  # it died between the look and the kill
    assert bystander.poll() is None


def test_a_process_with_the_number_of_one_that_was_killed_is_watched(tmp_path: Path, bystander) -> None:
    ranks = Ranks(tmp_path, 1, Machine().awake())
    ranks.kill(hang_limit.Process(0, a_record(bystander.pid, started=1), stopped=True, silent_s=LIMIT_S))
    written(tmp_path, a_record(bystander.pid))
    assert [process.progress.pid for process in ranks.look()] == [bystander.pid]


def test_one_that_hangs_is_killed_and_no_longer_watched(tmp_path: Path, bystander) -> None:
    ranks = Ranks(tmp_path, 1, Machine().awake())
    written(tmp_path, a_record(bystander.pid))
    (process,) = ranks.look()
    ranks.kill(process)
    assert ranks.look() == []
    assert bystander.wait(60) == -9


def test_what_an_earlier_container_left_is_forgotten(tmp_path: Path, bystander) -> None:
    ranks = Ranks(tmp_path, 1, Machine().awake())
    written(tmp_path, a_record(bystander.pid))
    ranks.forget()
    assert ranks.look() == []


@pytest.mark.parametrize(
    ("phase", "step", "early", "said"),
    [
        ("open", 7, False, (False, 7)),
        ("restore", 7, False, (False, 7)),
        ("first step", 7, False, (True, 7)),
        ("train", 7, False, (True, 7)),
        ("save", 7, False, (False, 7)),
        ("started", 0, True, (True, 0)),  # a plain script
        ("started", 0, False, (False, None)),
        ("started", 7, True, (True, 7)),
        ("started", 7, False, (True, 7)),
    ],
)
def test_a_hang_says_something_of_a_step_only_where_there_is_one(
    start: Start, tmp_path: Path, phase: str, step: int, early: bool, said: tuple[bool, int | None]
) -> None:
    written(tmp_path, dataclasses.replace(a_record(1, started=1), phase=phase, step=step))
    failure = start.failure(Ended(0, 0, -9, 0.0), Verdict("hung: no progress for 750 s", stuck=True, early=early))
    assert (failure["hung"], failure["step"]) == said
    assert (failure["code"], failure["reason"]) == (137, "rank 0 on worker 0 hung: no progress for 750 s")


@pytest.mark.parametrize(
    ("kind", "message", "cause"),
    [
        ("OutOfMemoryError", "raised OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB", "oom"),
        ("RuntimeError", "raised RuntimeError: CUDA error: out of memory", "oom"),
        ("ValueError", "raised ValueError: error: out of memory", ""),
        ("OSError", "raised OSError: [Errno 28] No space left on device: 'losses.txt'", "disk"),
        ("OSError", "raised OSError: [Errno 5] Input/output error", ""),
    ],
)
def test_a_driver_without_memory_and_a_script_that_finds_a_full_disk_are_causes(kind: str, message: str, cause: str) -> None:
    assert rank_failures.cause({"type": kind, "message": message}) == cause


OUT_OF_MEMORY = "was killed: out of memory; raise resources.memory, or lower the batch"


@pytest.mark.parametrize(
    ("exitcode", "message", "cause", "what"),
    [
        (-9, "was killed by SIGKILL", "oom", OUT_OF_MEMORY),
        (1, "raised RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed. ", "oom", OUT_OF_MEMORY),
        (1, "raised ValueError: bad batch", "", "raised ValueError: bad batch"),
        (-15, "was killed by SIGTERM", "", "was killed by SIGTERM"),
    ],
)
def test_of_what_died_while_the_kernel_killed_for_want_of_memory_it_is_the_cause_where_that_can_be(
    start: Start, tmp_path: Path, exitcode: int, message: str, cause: str, what: str
) -> None:
    record = {"type": message.split()[1].rstrip(":"), "message": message, "traceback": "...", "time": 0.0}
    (tmp_path / contract.ERROR.format(local_rank=0)).write_text(json.dumps(record if exitcode < 0 else {**record, "code": 1}))
    ended = Ended(0, 0, exitcode, 0.0)
    said = start.failure(ended, oom=True)
    assert (said["cause"], said["reason"]) == (cause, f"rank 0 on worker 0 {what}")
    assert start.failure(ended)["cause"] == ""


def test_a_process_that_a_nameless_signal_has_ended_is_told_of(start: Start) -> None:
    failure = start.failure(Ended(0, 0, -40, 7.0))
    assert (failure["reason"], failure["time"]) == ("rank 0 on worker 0 was killed by signal 40", 7.0)


def test_the_stacks_of_many_ranks_take_no_longer_than_those_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setattr(stacks, "DUMP_TIMEOUT_S", 1)
    (tmp_path / "py-spy").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "py-spy").chmod(0o755)
    began = time.monotonic()
    stacks.dump(list(range(1, 17)), tmp_path / "stacks")
    assert time.monotonic() - began < 16
    assert (tmp_path / "stacks").read_text().count("no stack") == 16


def test_a_file_that_may_be_missed_because_the_code_is_a_copy_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(contract.Env.CODE, "/work")
    for name, hinted in (("../data/x", True), ("/work/x", True), ("/data/x", False)):
        hint = training_process._hint(FileNotFoundError(2, "No such file", name))
        assert bool(hint) is hinted
        assert not hinted or f"name {name} under data" in hint


def test_an_exception_that_is_its_own_cause_has_no_endless_story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(contract.Env.CODE, str(tmp_path))
    error = ValueError("bad")
    error.__cause__ = error  # raise error from error
    assert training_process._hint(error) == ""


def test_a_script_that_is_no_python_dies_without_frames_of_ours(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def x(:")
    environ = {name: value for name, value in os.environ.items() if name != contract.Env.STATE}
    command = [sys.executable, "-m", "outlast", "rank", "train.py"]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[0].endswith('train.py", line 1')
    assert done.stderr.splitlines()[-1] == "SyntaxError: invalid syntax"
    assert "training_process.py" not in done.stderr


def test_a_script_that_misses_a_file_of_its_original_directory_dies_with_the_hint(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(
        "try:\n    open('../data/x')\nexcept OSError as e:\n    raise ValueError('bad') from e"
    )
    environ = {**os.environ, "OUTLAST_CODE": str(tmp_path / "code")}
    environ.pop(contract.Env.STATE, None)
    command = [sys.executable, "-m", "outlast", "rank", str(tmp_path / "code" / "train.py")]
    done = subprocess.run(command, env=environ, cwd=tmp_path / "code", capture_output=True, text=True, check=False)
    assert done.returncode == contract.Exit.FAILED
    assert done.stderr.splitlines()[-1].startswith(f"outlast: the job runs in {tmp_path}/code; a copy of")


def test_a_rank_that_exited_with_0_before_a_collective_broke_is_known_on_its_worker(start: Start, tmp_path: Path) -> None:
    broke = {"rank": 0, "type": "RuntimeError", "message": "raised RuntimeError: Connection closed by peer", "traceback": "x"}
    (tmp_path / contract.ERROR.format(local_rank=0)).write_text(json.dumps({**broke, "time": 2.0, "age_s": 3.0, "code": 1}))
    echo = start.failure(Ended(0, 0, 1, 0.0))
    assert (echo["echo"], echo["step"]) == (True, 0), "soon after its start"
    assert start.first([echo], None) == echo
    said = start.first([echo], 1)
    assert (said["rank"], said["echo"], said["reason"]) == (1, False, root_cause.left_early("rank 1 on worker 0", 0, 0))


def test_a_process_that_was_stopped_on_its_way_out_is_a_cause_and_no_echo(tmp_path: Path) -> None:
    said = {"rank": 1, "type": "ValueError", "message": "raised ValueError: a bug", "traceback": "", "time": 1.0, "code": 1}
    (tmp_path / contract.ERROR.format(local_rank=1)).write_text(json.dumps(said))

    def failed(local_rank: int) -> tuple[int, bool]:
        failure = Start(0, tmp_path, 2, 1, 0).failure(Ended(local_rank, local_rank, -signal.SIGTERM, 0.0, asked=True))
        return failure["code"], failure["echo"]

    assert (failed(0), failed(1)) == ((143, True), (1, False))


@pytest.mark.parametrize("pod", [True, False])  # elsewhere the launcher says it
def test_a_script_in_a_pod_that_begins_again_is_told_so_once(pod: bool, capsys: pytest.CaptureFixture[str]) -> None:
    logged, log = reporter.LoggedStep(pod=pod), SimpleNamespace(written=0, recent=b"")

    def prints(generation: int, *steps: int) -> str:
        """What the agent says while the process of this generation prints these steps."""
        progress = dataclasses.replace(a_record(7, started=1, step=0), phase="started", generation=generation)
        for said in (b"", *(b"step %d\n" % step for step in steps)):
            log.written, log.recent = log.written + len(said), log.recent + said
            logged.look([hang_limit.Process(0, progress, stopped=False, silent_s=0.0)], log)
        return capsys.readouterr().out

    assert prints(1, 1, 2, 40) + prints(2, 38, 80) == "", "it goes on from what it has saved"
    said = "outlast | after its restart the script began again at step 1, before it was at step 80: have it save checkpoints and"
    assert prints(3, 1, 2, 3).startswith(said) is pod
    assert prints(3, 4) == ""


def test_processes_that_train_without_a_process_group_are_named_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logged, log = reporter.LoggedStep(), SimpleNamespace(written=0, recent=b"")
    process = hang_limit.Process(0, a_record(1, started=1, step=0), stopped=False, silent_s=0.0, alone=2)
    process = dataclasses.replace(process, progress=dataclasses.replace(process.progress, phase="started"))

    def looks(found: hang_limit.Process, said: bytes = b"") -> str:
        log.written, log.recent = log.written + len(said), log.recent + said
        for _ in range(reporter.ALONE_LOOKS):
            logged.look([found], log)
        return logged.warning

    assert looks(process) == looks(process, b"hello\n") == "", "whether it trains is not known"
    assert looks(dataclasses.replace(process, alone=0), b"step 1\n") == "", "it has a group"
    assert looks(process) == looks(process) == guessed_progress.alone(2)
    assert capsys.readouterr().out == f"outlast | {guessed_progress.alone(2)}\n"
    assert logged.record()["logged_more"]["first"] == guessed_progress.Logged(1)
