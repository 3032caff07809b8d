"""Real jobs with real processes, killed in every way: the end is that of the undisturbed run, bit for bit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import outlast
from outlast.job.report import goodput
from outlast.job.status import JobStatus, State
from outlast.job.workerfiles import progress_file
from outlast.local.state_dir import StateDir

Final = Callable[..., dict[str, object]]
ARGS = ("--steps=60", "--pause=0.04", "--gate")
GATE = 59
"""The step after which it waits."""


def kill(pid: int | None) -> None:
    assert pid is not None
    os.kill(pid, signal.SIGKILL)


def test_whatever_is_killed_or_stopped_changes_nothing_in_the_result(machine, undisturbed: Final):
    """One job, to which one thing after another happens: to its processes, its launcher,
    a worker, and a process that is stopped."""
    name = machine.submit(machine.job(args=ARGS))
    before = machine.at_step(name, 15)
    agent = psutil.Process(before.workers[1].pid)
    called = {process.cmdline()[0] for process in (psutil.Process(before.launcher), agent, *agent.children(recursive=True))}
    (rank,) = before.workers[1].ranks
    assert {f"outlast: rank {rank.rank} exact.py", "outlast: agent 1", "outlast: warm process"} <= called
    assert f"outlast: launcher {machine.directory}" in " ".join(called)
    shown = [each.environ() for each in agent.children(recursive=True)]
    assert [environ["LOCAL_RANK"] for environ in shown if "LOCAL_RANK" in environ] == ["0"]
    after = repaired_by_its_members(machine, name, before)
    kill(before.launcher)
    after = machine.wait(name, lambda s: s.launcher not in (None, before.launcher) and s.step > 20 and bool(s.world))
    assert after.generation == before.generation, "the world was not disturbed"
    assert [w.pid for w in after.workers] == [w.pid for w in before.workers]

    machine.backend.chaos(name, "kill-worker", worker=0, rng=machine.rng)
    after = trains_again(machine, name, after)
    assert "worker 0" in after.failure.reason
    assert "was killed by SIGKILL" in after.failure.reason

    victim, stopped = after.workers[1].ranks[0], time.monotonic()
    machine.backend.chaos(name, "stop", worker=1, rng=machine.rng)
    after = trains_again(machine, name, after)
    assert time.monotonic() - stopped < 60, "found by the hang limit of 3 s"
    said = f"rank {victim.rank} on worker 1 hung: stopped (SIGSTOP) for 3 s"
    assert after.failure.reason.startswith(said)  # after which step, and where it stood if it had for a second before
    (hang,) = [event for event in machine.backend.events(name) if event["kind"] == "hang"]
    assert (hang["rank"], hang["pid"], hang["state"]) == (victim.rank, victim.pid, "stopped")
    assert "exact.py" in Path(hang["stacks"]).read_text(), "py-spy's stacks show where it stood"

    status = machine.end(name, hurry=True)
    assert (status.state, status.restarts) == (State.SUCCEEDED, 4)
    worlds_since = status.generation - before.generation
    assert 1 <= worlds_since <= 2, "the lost worker's; its members repair the hang, or the launcher if they take over 2 s"
    assert machine.final(name) == undisturbed(ARGS, 2)


def repaired_by_its_members(machine, name: str, before: JobStatus) -> JobStatus:
    """Kill a process of each worker while the launcher stands still: all train again without it, and it counts that after."""
    home = StateDir(machine.directory / "state" / "jobs" / name)
    os.kill(before.launcher, signal.SIGSTOP)
    for attempt, worker in ((1, 0), (2, 1)):
        found = [progress_file.read(home.worker(index), 0) for index in (0, 1)]
        killed = time.monotonic()
        kill(found[worker].pid)
        while not all(one and one.attempt == attempt and one.phase == "train" for one in found):
            assert time.monotonic() - killed < 30, found
            time.sleep(0.01)
            found = [progress_file.read(home.worker(index), 0) for index in (0, 1)]
    os.kill(before.launcher, signal.SIGCONT)
    after = machine.wait(name, lambda s: s.restarts == 2)
    assert after.generation == before.generation
    counted = [each["repaired"] for each in machine.backend.events(name) if each["kind"] == "failure"]
    told = [each["attempt"] for each in machine.backend.events(name) if each["kind"] == "attempt"]
    assert (counted, told) == ([1, 2], [1, 2])
    assert "was killed by SIGKILL" in after.failure.reason
    return after


def trains_again(machine, name: str, before: JobStatus) -> JobStatus:
    """Wait until all processes have been started again and have made steps: more than the restored one, which they report
    first, unless that is the one before the gate."""

    def trains(status: JobStatus) -> bool:
        restored = [event for event in machine.backend.events(name) if event["kind"] == "restored"]
        ranks = [rank for worker in status.workers for rank in worker.ranks]
        return (
            len(restored) > status.restarts > before.restarts
            and len(ranks) == status.processes * len(status.world) > 0
            and all((rank.step or 0) >= min(restored[-1]["step"] + 1, GATE) for rank in ranks)
        )

    return machine.wait(name, trains)


@pytest.mark.slow
@pytest.mark.parametrize("back", [True, False], ids=["goes back", "goes on"])
def test_a_flipped_bit_changes_nothing_in_the_result_if_the_run_goes_back(machine, undisturbed: Final, back: bool):
    args = ("--steps=60", "--pause=0.04")
    path = machine.job(
        args=(*args, "--flip-at=30"), workers={"replicas": 3}, checkpoint={"every": "10 steps", "keep": 9, "goBack": back}
    )
    status = machine.run(path)
    assert status.state is State.SUCCEEDED
    events = machine.backend.events("job")
    [differs] = [event for event in events if event["kind"] == "differs"]
    assert (differs["rank"], differs["worker"]) == (1, 1)
    assert (machine.final("job") == undisturbed(args, 3)) == back
    if not back:
        assert (status.restarts, status.failure) == (0, None)
        return
    assert (status.restarts, status.generation, status.failure.worker, status.failure.cause) == (1, 2, 1, "bits")
    assert f"goes back to step {differs['agreed']}, and another worker takes the place of this one" in status.failure.reason
    restored = [event for event in events if event["kind"] == "restored"][-1]
    assert (restored["step"], restored["source"]) == (differs["agreed"], "peer")
    [incident] = [each for each in goodput.buckets(events, None).incidents if each.kind == "failure"]
    assert (incident.cause, incident.worker) == ("bits", 1)
    assert incident.replayed >= differs["step"] - differs["agreed"]


@pytest.mark.slow
def test_an_upgrade_in_place_changes_nothing_for_a_job_that_runs(machine, undisturbed: Final):
    """Every file of the package that the job was started from is overwritten; then each kind of process is replaced."""
    installed = machine.directory / "installed" / "outlast"
    shutil.copytree(Path(outlast.__file__).parent, installed)
    places = {"OUTLAST_STATE_DIR": machine.directory / "state", "OUTLAST_CACHE": machine.directory / "cache"}
    environ = {**os.environ, "PYTHONPATH": str(installed.parent), **{name: str(path) for name, path in places.items()}}
    path = machine.job(args=ARGS, env={"PYTHONPATH": str(installed.parent)})
    run = [sys.executable, "-m", "outlast", "run", str(path), "--detach"]
    subprocess.run(run, cwd=machine.directory, env=environ, check=True)
    before = machine.at_step("job", 15)
    for file in installed.rglob("*.py"):
        file.write_text("raise ImportError('a module of the new version')")
    assert subprocess.run(run, cwd=machine.directory, env=environ, capture_output=True).returncode == 1

    kill(before.launcher)
    after = machine.wait("job", lambda s: s.launcher not in (None, before.launcher) and s.step > 20 and bool(s.world))
    machine.backend.chaos("job", "kill-process", worker=1, rng=machine.rng)
    after = trains_again(machine, "job", after)
    kill(psutil.Process(after.workers[0].pid).children()[0].pid)  # the warm process, from which all others are forked
    after = trains_again(machine, "job", after)
    for worker in after.workers:  # so that none is left to fork another
        kill(worker.pid)
    assert machine.end("job", hurry=True).state is State.SUCCEEDED
    assert machine.final("job") == undisturbed(ARGS, 2)


def process(agent: int, title: str) -> psutil.Process:
    """One of the processes of the worker with this agent."""
    below = psutil.Process(agent).children(recursive=True)
    return next(each for each in below if each.cmdline()[0].startswith(f"outlast: {title}"))


def restored(machine, name: str) -> list[int]:
    """The steps from which the job went on, the first time from the beginning."""
    return [event["step"] for event in machine.backend.events(name) if event["kind"] == "restored"]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_the_process_of_the_store_and_the_warm_process_may_die_and_the_snapshots_stay(machine, undisturbed: Final, workers: int):
    """Nothing is saved: the steps are in the memory of agents alone, of a single one where there is one worker."""
    ranks = {"workers": {"replicas": workers}, "processesPerWorker": 2 // workers}
    name = machine.submit(machine.job(args=(*ARGS, "--print"), checkpoint={"every": "1h"}, **ranks))
    status = machine.at_step(name, 15)
    home, agents = StateDir(machine.directory / "state" / "jobs" / name), [worker.pid for worker in status.workers]
    for deaths, (victim, index) in enumerate([("store", 0), ("warm process", workers - 1)], 1):
        machine.wait(name, lambda _: progress_file.read(home.worker(0), 0).snapshot > 0)
        snapshot = progress_file.read(home.worker(0), 0).snapshot
        process(agents[index], victim).kill()
        status = trains_again(machine, name, status)
        assert (status.restarts, [worker.pid for worker in status.workers]) == (deaths, agents)
        how = "the store of the world on worker 0 was killed by SIGKILL" if deaths == 1 else "was lost with its warm process"
        assert how in status.failure.reason
        assert status.generation == deaths, "only processes that are gone start again in the same one"
        assert restored(machine, name)[-1] >= snapshot > 0, "and not from the beginning"
        assert all(path.is_file() or path.is_socket() for path in home.worker(0).iterdir()), "a directory needs room"
    status = machine.end(name, hurry=True)
    assert (status.state, status.restarts) == (State.SUCCEEDED, 2)
    assert machine.final(name) == undisturbed(ARGS, 2)
    said = {line.text for line in machine.backend.logs(name)}
    assert {f"{f'[rank {rank}] ' * (workers == 1)}rank {rank} step 60" for rank in (0, 1)} <= said


@pytest.mark.slow
def test_a_machine_that_stands_still_for_longer_than_the_hang_limit_costs_the_pause_and_nothing_else(machine, undisturbed: Final):
    name = machine.submit(machine.job(args=ARGS, hang={"limit": "3s"}))
    before = machine.at_step(name, 15)
    launcher = psutil.Process(before.launcher)
    agents = [psutil.Process(worker.pid) for worker in before.workers]
    everybody = [launcher, *agents, *(child for agent in agents for child in agent.children(recursive=True))]
    for process in everybody:
        process.suspend()
    time.sleep(7)  # as long as the pause is to be
    for process in everybody:
        process.resume()
    status = machine.end(name, hurry=True)
    assert (status.state, status.restarts, status.generation) == (State.SUCCEEDED, 0, before.generation)
    assert not [event for event in machine.backend.events(name) if event["kind"] in ("hang", "failure")]
    assert machine.final(name) == undisturbed(ARGS, 2)


def ask(address: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.slow
def test_probes_tell_the_truth(machine):
    name = machine.submit(machine.job(args=("--steps=400", "--pause=0.05")))
    worker = machine.at_step(name, 12).workers[1]
    assert worker.probes is not None
    assert ask(worker.probes, "/healthz") == (200, "training\n")
    assert ask(worker.probes, "/readyz") == (200, "training\n")
    code, text = ask(worker.probes, "/metrics")
    assert code == 200
    assert 'outlast_generation{job="job",worker="1"} 1' in text
    (step,) = [float(line.split()[-1]) for line in text.splitlines() if line.startswith("outlast_step{")]
    assert step >= 11, "its agent looks now and then, and may be a step behind"
    assert ask(worker.probes, "/other")[0] == 404
    os.kill(worker.ranks[0].pid, signal.SIGSTOP)
    stale = machine.wait(name, lambda s: ask(worker.probes, "/healthz")[0] == 503 or s.restarts > 0)
    assert stale.restarts <= 1
    machine.backend.steer(name, "cancel")
    assert machine.end(name).state is State.CANCELLED
