"""What the launcher decides by itself: GPUs, which of several failures is the cause, and when a time is over."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import signal
import socket
import subprocess
import threading
import time as wall
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import local_checkpoints
from boards import NO_PID, a_launcher
from clocks import DISTURBANCES, Machine
from outlast.base.errors import OutlastError
from outlast.base.typed_json import decode
from outlast.job import contract
from outlast.job.failure import Failure
from outlast.job.report import goodput
from outlast.job.status import Ending, State
from outlast.job.workerfiles import notice_file, progress_file
from outlast.local import worker_processes
from outlast.local.backend import LocalBackend
from outlast.local.launcher import Launcher
from outlast.local.state_dir import Request
from outlast.local.worker_processes import Ended, Worker
from outlast.rendezvous import restart_budget, root_cause, who_trains
from outlast.rendezvous.coordinator import CoordinatorState
from outlast.rendezvous.membership import Leaving, Membership, RunClosed
from outlast.rendezvous.messages import Called, Report
from outlast.rendezvous.root_cause import Pending
from outlast.worker.agent import launcher_watch
from outlast.worker.agent.world_loop import WorldLoop
from outlast.worker.launch import rank_processes, script_files


@pytest.mark.parametrize(
    ("shown", "count", "index", "expected"),
    [
        (["0", "1"], 0, 1, []),
        ([], 2, 0, []),
        (["0", "1"], 1, 1, ["1"]),
        (["0", "1", "2", "3"], 2, 1, ["2", "3"]),
        (["GPU-a", "GPU-b"], 2, 0, ["GPU-a", "GPU-b"]),
    ],
)
def test_every_worker_sees_gpus_of_its_own(shown: list[str], count: int, index: int, expected: list[str]):
    assert worker_processes.devices(shown, count, index) == expected


def test_too_few_gpus_are_refused_and_not_shared():
    with pytest.raises(
        OutlastError, match=r"this machine shows 2 GPUs, 3 workers need 3; lower workers.replicas or resources.gpu"
    ):
        worker_processes.devices(["0", "1"], 1, 2)


def test_the_gpus_shown_are_those_that_the_user_left_visible(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,GPU-a")
    assert worker_processes.gpus() == {"CUDA_VISIBLE_DEVICES": ["5", "GPU-a"]}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert worker_processes.gpus() == {"CUDA_VISIBLE_DEVICES": []}


def a_failure(code: int = 1, *, time: float = 0.0) -> Failure:
    return Failure(worker=0, code=code, reason="", time=time)


def test_the_cause_is_a_kill_before_an_error_and_an_error_before_its_echoes():
    killed, bug, aborted = a_failure(137, time=3.0), a_failure(1, time=1.0), a_failure(134, time=2.0)
    echo = a_failure(1, time=0.0)
    pending = [Pending(True, echo), Pending(False, aborted), Pending(False, bug), Pending(False, killed)]
    for cause in (killed, bug, aborted, echo):
        assert root_cause.cause(pending).failure == cause
        pending = [each for each in pending if each.failure != cause]


def test_a_rank_that_exited_with_0_is_the_cause_where_there_are_only_echoes():
    left = Failure(worker=1, rank=1, code=1, reason="rank 1 on worker 1", left=True, time=9.0)
    echo = Failure(worker=0, rank=0, code=1, reason="Connection closed by peer", step=5, time=1.0)
    pending = [Pending(True, echo), Pending(True, left)]
    found = root_cause.cause(pending)
    remedy = "all ranks must do as many steps; pods without a common disk find different checkpoint files"
    assert found.failure.reason == f"rank 1 on worker 1 exited with 0, as if done, while rank 0 trained (step 5): {remedy}"
    assert (found.echo, found.failure.step) == (False, 5)
    bug = a_failure(1)
    assert root_cause.cause([*pending, Pending(False, bug)]).failure == bug
    known, policy = root_cause.Known(found.failure, 0, 0), restart_budget.Policy(limit=10, window=timedelta(hours=1))
    history: restart_budget.History = ()
    for at in range(3):
        _, verdict = root_cause.judge(known, history, policy, float(at), pending=pending)
        history = getattr(verdict, "history", ())
    assert verdict.reason == f"{found.failure.reason}; it has failed soon after its start 3 times in a row"


# Clocks that are set, machines that sleep


def disturbed(machine: Machine, how: str) -> None:
    monotonic, wall = DISTURBANCES[how]
    machine.goes_on(monotonic, wall=wall)


@pytest.mark.parametrize("how", DISTURBANCES)
@pytest.mark.parametrize("begun", [False, True])
def test_a_deadline_counts_the_time_in_which_the_machine_ran(tmp_path: Path, how: str, begun: bool) -> None:
    machine = Machine()
    launcher = a_launcher(tmp_path, machine, startupDeadlineSeconds=60, activeDeadlineSeconds=60)
    if begun:
        launcher.formed(who_trains.World(1, (0, 1), "", ""))
    disturbed(machine, how)
    launcher._keep_deadlines()
    assert launcher.state.ending is None
    for _ in range(61):
        machine.goes_on(1.0)
        launcher._keep_deadlines()
    assert launcher.state.ending is not None
    assert launcher.state.ending.state is State.FAILED
    assert ("activeDeadlineSeconds" if begun else "startupDeadlineSeconds") in launcher.state.ending.reason


@pytest.mark.parametrize("how", DISTURBANCES)
def test_an_agent_is_silent_when_its_file_has_not_changed_while_we_looked(tmp_path: Path, how: str) -> None:
    machine = Machine()
    pool = a_launcher(tmp_path, machine).pool
    pool.adopt([{"index": 0, "pid": os.getpid(), "attempt": 1}])
    file = tmp_path / "state" / "jobs" / "job" / "workers" / "0" / contract.WORKER
    file.parent.mkdir(parents=True)
    file.touch()
    assert pool.silent() == []
    disturbed(machine, how)
    assert pool.silent() == []
    os.utime(file, (1.0, 1.0))  # a clock was set back: it lives all the same
    for _ in range(int(worker_processes.AGENT_SILENCE_S) + 1):
        assert pool.silent() == []
        machine.goes_on(1.0)
    assert [worker.index for worker in pool.silent()] == [0]


def test_a_worker_whose_agent_does_nothing_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = a_launcher(tmp_path, Machine())
    agent = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        launcher.pool.adopt([{"index": 0, "pid": agent.pid, "attempt": 1}])
        monkeypatch.setattr(launcher.pool, "silent", lambda: [*launcher.pool.present.values()])
        launcher._end_silent()
        assert agent.wait(10) == -signal.SIGKILL
    finally:
        agent.kill()
        agent.wait()


@pytest.mark.parametrize("how", DISTURBANCES)
def test_a_worker_that_cannot_start_is_tried_again_after_its_pause_and_no_hour_later(tmp_path: Path, how: str, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    machine = Machine()
    pool = a_launcher(tmp_path, machine).pool
    for _ in range(10):
        pool._failed_starts[0] += 1
    pool.pause(0)
    disturbed(machine, how)
    assert pool.missing(2, {}) == [1]
    for _ in range(int(max(worker_processes.BACKOFF_S))):
        machine.goes_on(1.0)
        missing = pool.missing(2, {})
    assert missing == [0, 1]


@pytest.mark.parametrize(("cores", "alone"), [(2, True), (3, False)])
def test_where_cores_are_few_the_first_worker_starts_alone_and_the_others_once_it_can_fork_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int, alone: bool
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    machine = Machine()
    pool = a_launcher(tmp_path, machine).pool
    assert pool.missing(3, {}) == ([0] if alone else [0, 1, 2])
    pool.present[0] = worker_processes.Worker(0, pid=1, attempt=1)
    assert pool.missing(3, {}) == ([] if alone else [1, 2])
    assert pool.missing(3, {0: "a report"}) == [1, 2]
    for _ in range(int(worker_processes.FIRST_S) + 1):
        machine.goes_on(1.0)
        late = pool.missing(3, {})
    assert late == [1, 2], "it has not reported in time"


class Asked:
    """Who asks this member to come to the next world."""

    id, world, closed = 1, who_trains.World(1, (0, 1), "", ""), None

    def __init__(self, deadline: float, *, planned: bool = True) -> None:
        self.called = Called(2, "worker 2 joins", planned, deadline)

    def report(self, standing: str, **fields: Any) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("kind", ["call", "leave"])
@pytest.mark.parametrize("how", DISTURBANCES)
def test_training_has_the_grace_of_its_job_from_when_it_hears_of_it(tmp_path: Path, monkeypatch, kind: str, how: str) -> None:
    monkeypatch.delenv(contract.Env.NOTICE, raising=False)
    machine = Machine()
    theirs = wall.time() - 3600.0  # the clock of whoever asks has nothing to do with ours
    member = Membership(Asked(theirs), run_id="run", state=tmp_path, host="127.0.0.1", processes=1, leave_s=120.0)  # type: ignore[arg-type]
    member._clock, member.world = machine.awake(), Asked.world
    writer = progress_file.Writer(tmp_path, 0)
    writer.write(progress_file.Progress(generation=1, rank=1, phase="train", step=3))
    if kind == "leave":
        notice_file.write(tmp_path / contract.NOTICE, "leave", "a drain", theirs)
    assert not member.must_stop(), "it is to save first"
    disturbed(machine, how)
    assert not member.must_stop()
    for _ in range(121):
        machine.goes_on(1.0)
        left = member.must_stop()
    assert left
    writer.close()


def test_who_leaves_waits_no_longer_than_10_s_for_a_save_with_a_lost_worker(tmp_path: Path, monkeypatch) -> None:
    """It may never end, and the next world saves what the memory of this worker has."""
    monkeypatch.delenv(contract.Env.NOTICE, raising=False)
    machine = Machine()
    asked = Asked(wall.time(), planned=False)
    member = Membership(asked, run_id="run", state=tmp_path, host="127.0.0.1", processes=1, leave_s=120.0)  # type: ignore[arg-type]
    member._clock, member.world = machine.awake(), Asked.world
    with contextlib.closing(progress_file.Writer(tmp_path, 0)) as writer:
        writer.write(progress_file.Progress(generation=1, rank=1, phase="save", step=4, snapshot=2))
        notice_file.write(tmp_path / contract.NOTICE, "leave", "a drain", wall.time())
        stops = []
        for _ in range(12):
            stops.append(member.must_stop())
            machine.goes_on(1.0)
    assert stops == [False] * 11 + [True]
    assert member._owes()


@pytest.mark.parametrize(("phase", "held", "stops"), [
    ("started", 0, True), ("open", 0, True), ("restore", 0, False), ("first step", 0, False), ("started", 6, False),
    ("open", 6, False),
])  # fmt: skip
def test_training_whose_session_is_not_open_is_not_waited_for_unless_it_restores_a_step_that_somebody_had(
    tmp_path: Path, monkeypatch, phase: str, held: int, stops: bool
) -> None:
    monkeypatch.delenv(contract.Env.NOTICE, raising=False)
    asked = Asked(wall.time() + 60)
    member = Membership(asked, run_id="run", state=tmp_path, host="127.0.0.1", processes=1, leave_s=60.0)  # type: ignore[arg-type]
    member.world = dataclasses.replace(Asked.world, held=held)
    writer = progress_file.Writer(tmp_path, 0)
    writer.write(progress_file.Progress(generation=1, rank=1, phase=phase))
    assert member.must_stop() == stops
    writer.close()


class Offers(Asked):
    """A coordinator that has a world for this member as soon as it waits for one."""

    def __init__(self) -> None:
        self.called, self.said = None, []  # type: ignore[assignment]

    def report(self, standing: str, **fields: Any) -> None:
        self.said.append((standing, fields.get("held")))
        self.owes = fields.get("owes")
        if standing == "waiting":
            self.world = who_trains.World(2, (1, 0), "host-1:1", "worker 0 is lost")

    def amend(self, **fields: Any) -> None:
        self.said.append(("amended", fields["held"]))
        self.owes = fields["owes"]


@pytest.mark.parametrize(("snapshot", "committed", "phase", "stays"), [
    (20, 10, "train", True), (20, 20, "train", False), (0, 10, "train", False), (20, 10, "started", False),
])  # fmt: skip
def test_a_worker_leaves_between_two_worlds_unless_only_its_memory_has_the_newest_step(
    tmp_path: Path, monkeypatch, snapshot: int, committed: int, phase: str, stays: bool
) -> None:
    monkeypatch.delenv(contract.Env.NOTICE, raising=False)
    offers = Offers()
    member = Membership(offers, run_id="run", state=tmp_path, host="127.0.0.1", processes=1, leave_s=60.0)  # type: ignore[arg-type]
    member.world = Asked.world
    writer = progress_file.Writer(tmp_path, 0)
    writer.write(progress_file.Progress(generation=1, rank=1, phase=phase, snapshot=snapshot, committed=committed))
    notice_file.write(tmp_path / contract.NOTICE, "leave", "a drain", wall.time() + 60)
    member.must_stop()
    member.failed({"reason": "worker 0 is lost"})
    if stays:
        assert member._await_world("host-1:1").generation == 2, "which saves, and then it leaves"
        assert (offers.said[-1], offers.owes) == (("waiting", 20), True)
        writer.write(progress_file.Progress(generation=2, rank=0, phase="started"))
        member.world = offers.world
        assert not member.must_stop(), "its processes are still restoring that step"
        writer.write(progress_file.Progress(generation=2, rank=0, phase="train", committed=20, snapshot=20))
    with pytest.raises(Leaving):
        member._await_world("host-1:1")
    assert offers.said[-1][0] == "leaving"
    writer.close()


@pytest.mark.parametrize(("committed", "owes"), [(10, True), (20, False)])
def test_a_worker_whose_processes_failed_says_whether_only_its_memory_has_the_newest_step(tmp_path, committed: int, owes: bool):
    offers = Offers()
    member = Membership(offers, run_id="run", state=tmp_path, host="127.0.0.1", processes=1)  # type: ignore[arg-type]
    member.world = Asked.world
    writer = progress_file.Writer(tmp_path, 0)
    writer.write(progress_file.Progress(generation=1, rank=1, phase="train", snapshot=20, committed=committed))
    member.failed({"reason": "worker 0 is lost"})
    member._await_world("host-1:1")
    assert (offers.said[-1], offers.owes) == (("waiting", 20), owes)
    writer.close()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_leaves_is_waited_for_while_the_store_lacks_what_it_saved_and_not_for_a_save_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Only rank 0's is brought to the store."""
    output = tmp_path / "out"
    (output / ".push").mkdir(parents=True)
    monkeypatch.setenv(contract.Env.STATE, str(tmp_path))
    monkeypatch.setenv(contract.Env.OUTPUT, str(output))
    monkeypatch.setenv(contract.Env.STORE, "s3://bucket/job")
    monkeypatch.setenv(contract.Env.RENDEZVOUS, "operator://job")
    offers = Offers()
    member = Membership(offers, run_id="run", state=tmp_path, host="127.0.0.1", processes=1)  # type: ignore[arg-type]
    member.world = who_trains.World(1, (1, 0) if rank == 0 else (0, 1), "", "")
    writer = progress_file.Writer(tmp_path, 0)
    writer.write(progress_file.Progress(generation=1, rank=rank, phase="train", committed=10, snapshot=19))
    member._report_leaving()
    assert (offers.said, offers.owes) == ([("leaving", 19)], True)
    loop: Any = SimpleNamespace(_member=member, _environ=dict(os.environ), _warm=SimpleNamespace(killed=False))
    leaves = threading.Thread(target=WorldLoop._leave, args=(loop,))
    leaves.start()
    while rank == 0 and not (number := script_files.requested(output)):
        assert leaves.is_alive()
        wall.sleep(0.01)
    if rank == 0:
        assert (offers.said[1:], offers.owes) == ([("amended", 10)], True)
        script_files.report(output, number)
    leaves.join(10)
    assert (offers.said[1:], offers.owes) == ([("amended", 10)] * 2, False)
    writer.close()


def test_a_world_whose_store_an_earlier_process_was_to_host_is_not_begun() -> None:
    hosted: list[str] = []
    ranks: Any = SimpleNamespace(host=lambda address, *_: hosted.append(address))
    warm = SimpleNamespace(wait_until_ready=lambda *_: True)
    loop: Any = SimpleNamespace(_member=SimpleNamespace(must_stop=None), _warm=warm, _python="", _environ={})
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConnectionError, match="an earlier process of this worker was to host it"):
            WorldLoop._connect(loop, ranks, who_trains.World(1, (0,), f"127.0.0.1:{port - 1}", ""), 0, listener)
        assert WorldLoop._connect(loop, ranks, who_trains.World(1, (0,), f"127.0.0.1:{port}", ""), 0, listener)
    assert hosted == [f"127.0.0.1:{port}"]


@pytest.mark.parametrize("waits", [False, True])
def test_only_processes_that_have_something_to_save_are_given_time_to_end(tmp_path: Path, monkeypatch, waits: bool) -> None:
    """A script may handle SIGTERM, also in a process that waits for the next world."""
    delays: list[float] = []
    ranks = SimpleNamespace(start=lambda *_: None, over=lambda: False, keep=lambda: None, stop=delays.append)
    monkeypatch.setattr(rank_processes, "RankProcesses", lambda *_: ranks)
    worlds = iter([True])

    def next_world(_: object) -> bool:
        if not next(worlds, False):
            raise RunClosed
        return True

    environ = {contract.Env.CODE: "/", contract.Env.NOTICE: str(tmp_path)}
    world = who_trains.World(1, (0,), "127.0.0.1:5", "")
    member = SimpleNamespace(
        next_world=next_world, world=world, generation=1, attempt=0, numbers={}, run_id="r", rank=0, must_stop=lambda: not waits
    )
    loop: Any = SimpleNamespace(
        _environ=environ, _processes=1, _command=[], _grace_s=75.0,
        _member=member, _state=tmp_path, _connect=next_world, _all_wait=lambda: True, _stay=lambda _: waits, _waiting=None,
        _start=SimpleNamespace(errors=dict),
    )  # fmt: skip
    with pytest.raises(RunClosed):
        WorldLoop._train(loop)
    assert delays[0] == (0.0 if waits else 75.0)


def test_a_worker_that_is_killed_while_it_leaves_promises_nothing_of_what_it_saved(tmp_path: Path, monkeypatch) -> None:
    offers = Offers()
    member = Membership(offers, run_id="run", state=tmp_path, host="127.0.0.1", processes=1)  # type: ignore[arg-type]
    member.world, member.abandoned = who_trains.World(1, (1, 0), "", ""), lambda: True
    loop: Any = SimpleNamespace(_member=member, _environ={}, _warm=SimpleNamespace(killed=True))
    assert WorldLoop._leave(loop) == 137
    assert offers.owes
    said = list(offers.said)
    with pytest.raises(Leaving, match="were killed"):
        member.next_world(lambda *_: None)
    with pytest.raises(Leaving, match="were killed"):
        member._await_world("host:1")
    assert offers.said == said, "nor does it report that it waits for a world"


def test_a_worker_that_leaves_is_a_member_until_the_store_has_what_it_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    clock = SimpleNamespace(monotonic=wall.monotonic, sleep=lambda _: wall.sleep(0.01))
    monkeypatch.setattr(script_files, "time", clock)
    output, asked = tmp_path / "out", []
    environ = {contract.Env.STATE: str(tmp_path), contract.Env.OUTPUT: str(output), contract.Env.STORE: "s3://bucket/job"}
    pods = {**environ, contract.Env.RENDEZVOUS: "operator://job"}
    waits = threading.Thread(target=script_files.leave, args=(pods, 3, lambda: bool(asked.append(None))))
    waits.start()
    while len(asked) < 2:  # it cannot write there, as on a full disk
        assert waits.is_alive()
        wall.sleep(0.01)
    (output / ".push").mkdir(parents=True)
    for problem in ("the store is out of reach", ""):
        while not script_files.requested(output):
            assert waits.is_alive()
            wall.sleep(0.01)
        script_files.report(output, script_files.requested(output), problem)
    waits.join(10)
    assert not waits.is_alive()
    script_files.leave({**pods, contract.Env.RENDEZVOUS: "unix:///here"}, 3, lambda: False)  # all workers see this directory
    assert not script_files.requested(output)


# The end


def test_the_end_is_written_before_the_ledger_is_read(tmp_path: Path, monkeypatch) -> None:
    """Killed while it reads the ledger of a month, the launcher leaves a job that has succeeded."""
    launcher = a_launcher(tmp_path, Machine())
    launcher._take(Ending(State.SUCCEEDED, "training is done", 0))

    def killed(*_: object) -> float:
        raise MemoryError

    with monkeypatch.context() as long:
        long.setattr(launcher.live, "final_goodput", killed)
        with pytest.raises(MemoryError):
            launcher._finish()
    status = LocalBackend(tmp_path / "state", start=lambda *_, **_env: None).status("job")
    assert (status.state, status.exit_code, status.launcher) == (State.SUCCEEDED, 0, None)


def test_status_and_report_say_the_same_goodput(tmp_path: Path) -> None:
    launcher = a_launcher(tmp_path, Machine())
    for kind, facts in (("world", {"generation": 1, "workers": [0]}), ("restored", {"generation": 1, "step": 0})):
        launcher.ledger.write(kind, **facts)
    for step in range(1, 20):
        launcher.ledger.step(1, step)
        wall.sleep(0.001)
    launcher._take(Ending(State.SUCCEEDED, "training is done", 0))
    launcher._finish()
    backend = LocalBackend(tmp_path / "state", start=lambda *_, **_env: None)
    assert backend.status("job").goodput == goodput.buckets(backend.events("job"), None).goodput > 0


def test_workers_of_a_world_that_die_one_after_another_are_one_failure_and_those_that_never_came_back_are_more(tmp_path: Path):
    machine = Machine()
    launcher = a_launcher(tmp_path, machine)
    launcher.state = CoordinatorState({}, who_trains.World(1, (0, 1), "a:1", "training starts", 0.0))
    launcher.state = launcher.state.after(who_trains.Call(2, "lost worker 0", False, launcher.clock()))
    counted = []
    for index in (0, 1, 1):
        launcher._worker_died(Ended(Worker(index, 1, 1), 137, ""))
        for _ in range(20):
            machine.goes_on(0.1)
            launcher._decide()
        counted.append(launcher.state.restarts)
        launcher.pool._failed_starts[1] += index  # it is started again
    assert counted == [1, 1, 2]


def test_what_a_successor_needs_is_on_the_disk_before_anybody_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = a_launcher(tmp_path, Machine())
    told: list[tuple[str, int, int, bool]] = []

    def on_disk(kind: str) -> None:
        memory = json.loads(launcher.state_dir.recovery.read_text()) if launcher.state_dir.recovery.exists() else {}
        told.append((kind, memory.get("generation", 0), memory.get("restarts", 0), bool(memory.get("closing"))))

    monkeypatch.setattr(launcher.server, "send", lambda to, kind, message: on_disk(f"send {kind}"))
    monkeypatch.setattr(launcher.ledger, "write", lambda kind, **facts: on_disk(kind))
    for id in (0, 1):
        launcher.pool.present[id] = Worker(id, NO_PID, 1)
        launcher._take(Report("r", id, who_trains.MemberState.WAITING, address=f"a:{id}"))
    launcher._decide()
    failure = {"code": 1, "reason": "it failed"}
    launcher._take(Report("r", 0, who_trains.MemberState.WAITING, 1, address="a:0", failed=True, failure=failure))
    launcher._take(Report("r", 1, who_trains.MemberState.WAITING, 1, address="a:1"))
    for _ in range(2):
        launcher._decide()
    launcher._take(Ending(State.SUCCEEDED, "training is done", 0))
    assert [each for each in told if "called" not in each[0]] == [
        ("world", 1, 0, False), ("send world", 1, 0, False),
        ("failure", 2, 1, False), ("world", 2, 1, False), ("send world", 2, 1, False), ("send closed", 2, 1, True),
    ]  # fmt: skip


def test_a_launcher_goes_on_from_the_file_of_the_version_before_and_writes_one_that_it_reads(tmp_path: Path, monkeypatch) -> None:
    written = wall.time() - 100
    world_before = {
        "generation": 4, "members": [0, 2], "address": "127.0.0.1:4711", "reason": "worker 1 is lost", "at": written - 9,
        "held": 40, "mesh_addresses": [],
    }  # fmt: skip
    before = {
        "time": written, "generation": 4, "world": world_before, "history": [[written - 50, 30, None], [written - 20, 30, 40]],
        "restarts": 5, "interruptions": 2, "judged": 3, "attempt": 1, "start": 2, "lost": [[1, 2.5, 1]],
        "gpus": {"CUDA_VISIBLE_DEVICES": ["0"]}, "closing": None, "end": "", "workers": [],
    }  # fmt: skip
    launcher = a_launcher(tmp_path, Machine())
    launcher.state_dir.recovery.write_text(json.dumps(before))
    for again in range(2):  # also from its own file
        revived = Launcher(launcher.state_dir)
        monkeypatch.setattr(revived.pool, "ended", list)
        revived.pool.present[0] = Worker(0, NO_PID, 1)
        revived._recover()
        assert revived.state.world == dataclasses.replace(decode(who_trains.World, world_before), at=revived.state.world.at)
        assert (revived.state.restarts, revived.state.counted, revived.state.followed) == (5, (3, 1), 4), again
        assert revived.newest_start() == (4, 2)
        assert (revived.status.interruptions, revived.state.called) == (2, None)
        ages = [(revived.clock() - at, *rest) for at, *rest in revived.state.history]
        assert ages == [(pytest.approx(150, abs=9), 30, None), (pytest.approx(120, abs=9), 30, 40)]
        assert [(id, revived.clock() - loss.at) for id, loss in revived.state.lost.items()] == [(1, pytest.approx(102.5, abs=9))]
    ours = json.loads(launcher.state_dir.recovery.read_text())
    assert {name: type(ours[name]) for name in before} == {name: type(value) for name, value in before.items()}
    assert {name: ours[name] for name in ("generation", "judged", "attempt", "restarts", "start")} == {
        "generation": 4, "judged": 3, "attempt": 1, "restarts": 5, "start": 2
    }  # fmt: skip
    assert [wall.time() - at for at, *_ in ours["history"]] == [pytest.approx(150, abs=9), pytest.approx(120, abs=9)]


@pytest.mark.parametrize(
    ("saved", "step", "said"),
    [
        (0, 5, "no step is saved, 5 are lost"),
        (0, 0, "no step was done yet"),
        (10, 13, "step 10 is saved, 3 later ones are not"),
        (10, 10, "step 10 is saved"),
    ],
)
def test_what_is_saved_is_said_as_the_disk_has_it(tmp_path: Path, saved: int, step: int, said: str) -> None:
    launcher = a_launcher(tmp_path, Machine())
    if saved:
        local_checkpoints.written(launcher.output / contract.CHECKPOINTS, saved, run=launcher.run_id, generation=3)
    launcher.status.step, launcher.live.has_session = step, True
    assert launcher.live.saved_sentence() == said
    taken_up = Launcher(launcher.state_dir, Machine().awake())
    taken_up._recover()
    assert (taken_up.status.step, taken_up.status.reason) == (saved, f"goes on from step {saved}" if saved else "")


def test_workers_that_find_no_gpu_are_named_in_a_warning(tmp_path: Path) -> None:
    launcher = a_launcher(tmp_path, Machine(), resources={"gpu": 8})
    launcher.pool.gpus = {"CUDA_VISIBLE_DEVICES": []}
    launcher._write_status()
    train = f"{8 * launcher.request.replicas} processes, 8 a worker, train on {len(os.sched_getaffinity(0))} CPU cores"
    sentence = f"resources.gpu (8): this machine shows no GPU; {train}; --set processesPerWorker=1 for one a worker"
    assert launcher.status.warnings == [sentence]


def test_a_stronger_request_changes_the_end_that_workers_hear(tmp_path: Path) -> None:
    launcher = a_launcher(tmp_path, Machine())
    on_report = {}
    for end in ("interrupt", "cancel", "kill"):
        Request.read(launcher.state_dir).replaced(launcher.state_dir, end=end)
        launcher._apply_request()
        on_report[end] = launcher.state.closed and launcher.state.closed.reason
    assert on_report == {"interrupt": None, "cancel": "cancelled by the user", "kill": "killed by the user"}


def test_a_plain_scripts_checkpoint_is_known_from_the_start_and_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    first = a_launcher(tmp_path, Machine())
    for step in (20, 40):
        (first.output / "work" / f"checkpoint-{step}").mkdir(parents=True)
        (first.output / "work" / f"checkpoint-{step}" / "model.pt").touch()
    launcher = Launcher(first.state_dir, Machine().awake())
    launcher._recover()
    assert launcher.status.saved is not None
    assert launcher.status.saved.name == "work/checkpoint-40"
    launcher.formed(who_trains.World(2, (0, 1), "", ""))
    launcher.state = CoordinatorState({}, who_trains.World(2, (0, 1), "", "", 0.0))
    of_worker = {"logged": [9, 100, 1]}
    launcher.pool.present[0] = Worker(0, NO_PID, 1)
    monkeypatch.setattr(launcher.pool, "report", lambda _: of_worker)
    record = progress_file.Progress(generation=2, rank=0, phase="started", pid=7, started=1 << 60)
    monkeypatch.setattr("outlast.local.live_status.progress_file.read", lambda *_: record)
    launcher.status.step, launcher.status.steps, launcher.status.told = 45, 100, "log"
    launcher.live.read(launcher.state.world)
    assert (launcher.live.begun_anew, launcher.status.step) == ("", 45), (
        "the line that the worker tells of was printed in the world before"
    )
    of_worker |= {"logged": [3, 100, 2], "logged_more": {"pid": 6, "first": [3, 100, None]}}
    launcher.live.read(launcher.state.world)
    assert launcher.status.step == 45, "or by the process before"
    of_worker["logged_more"] |= {"pid": 7}
    launcher._write_status()
    (warning,) = launcher.status.warnings
    assert "began again at step 3, before it was at step 45, although work/checkpoint-40 was there" in warning

    (first.output / "work" / "checkpoint-60").mkdir()
    (first.output / "work" / "checkpoint-60" / "model.pt").touch()
    launcher._take(Ending(State.SUCCEEDED, "done", 0))
    launcher._finish()
    assert launcher.status.saved.name == "work/checkpoint-60"
    assert launcher.status.warnings == [warning], "it has not become well by the end"


def test_a_launcher_that_takes_over_a_plain_script_that_trains_does_not_take_it_for_restarted(tmp_path: Path, monkeypatch):
    launcher = a_launcher(tmp_path, Machine())
    launcher.pool.present[0] = Worker(0, NO_PID, 1)
    launcher.state = CoordinatorState({}, who_trains.World(1, (0, 1), "", "", 0.0))
    record = progress_file.Progress(generation=1, rank=0, phase="started", pid=7, started=1)
    monkeypatch.setattr("outlast.local.live_status.progress_file.read", lambda *_: record)
    told = {"logged": [46, 100, 1], "logged_more": {"pid": 7, "first": [0, 100, None]}}
    monkeypatch.setattr(launcher.pool, "report", lambda _: told)
    launcher.status.step = 45
    launcher.live.read(launcher.state.world)
    assert (launcher.status.step, launcher.live.begun_anew) == (46, "")


def test_a_launcher_that_is_long_in_starting_is_started_ever_more_rarely(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[float] = []
    now = 0.0
    monkeypatch.setattr(launcher_watch.os_calls, "daemon", lambda *args, **kwargs: started.append(now))
    monkeypatch.setattr(launcher_watch.time, "monotonic", lambda: now)
    environ = {contract.Env.REVIVE: "[]", contract.Env.RENDEZVOUS: f"unix://{tmp_path}/none.sock", contract.Env.WORKER: "0"}
    watch = launcher_watch.LauncherWatch(environ)
    while now < 200:
        watch.look()
        now += 0.5
    assert [round(after - before) for before, after in itertools.pairwise([0.0, *started])] == [2, 4, 7, 13, 25, 49, 61]
