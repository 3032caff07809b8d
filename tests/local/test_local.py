"""Jobs on this machine as the command line leaves them on disk: what a new run, one that goes on and a lost machine find there.

No launcher is started: `start` writes down what would be.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import pytest

import apiserver
import outlast as outlast_package
from here import LONG_AGO, SOON, Here, outlast
from outlast import cli
from outlast.base import file_locks, files
from outlast.base.errors import AlreadyRunning, NotFound, OutlastError
from outlast.job import contract, spec
from outlast.job import faults as chaos
from outlast.job.shipping import code_files
from outlast.job.status import CheckpointStatus, JobStatus, RankStatus, SnapshotStatus, State, WorkerStatus
from outlast.job.workerfiles import progress_file
from outlast.kubernetes.api import requests
from outlast.local import backend as local
from outlast.local import log_reader, output_dir
from outlast.local.live_status import LiveStatus
from outlast.local.state_dir import Request, Run, StateDir
from outlast.local.worker_processes import WorkerPool
from outlast.rendezvous.who_trains import World


def test_the_file_that_a_command_prints_to_is_no_code(here: Here) -> None:
    here.write("old.log", "of an earlier run, or data")
    terminal = os.dup(1)
    try:
        with open(here.source / "run.log", "w") as log:
            os.dup2(log.fileno(), 1)
            here.submit()
    finally:
        os.dup2(terminal, 1)
        os.close(terminal)
    assert set(here.code()) == {"train.py", "old.log"}


def test_a_job_that_has_ended_is_forgotten_and_its_output_only_when_asked(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    here.submit()
    (here.output / "last.pt").write_text("weights")
    here.leave(State.SUSPENDED)
    refused = "Error: job job has not ended (Suspended); outlast cancel job ends it\n"
    assert outlast(here, "forget", "job", "--yes") == (2, refused)
    assert outlast(here, "forget", "--all-finished", "--yes") == (0, "no job has ended\n")
    here.leave(State.FAILED)
    assert outlast(here, "forget", "--older-than", "7d") == (0, "no job has ended longer than 7d ago\n")
    code, said = outlast(here, "forget", "job")
    assert code == 2
    assert said.endswith("Error: this removes 1 job; add --yes to confirm\n")
    code, said = outlast(here, "forget", "--all-finished", "--yes")
    assert code == 0
    assert said == f"removed job: {here.state_dir.path}; its output stays in {here.output} (--output removes it, too)\n"
    assert (here.state_dir.path.exists(), (here.output / "last.pt").exists(), here.backend.list()) == (False, True, [])

    here.submit()
    here.leave(State.SUCCEEDED)
    monkeypatch.setattr(output_dir, "_UNLOCK_TIMEOUT_S", 0.0)
    with open(here.output / contract.OWNER, "a") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        code, said = outlast(here, "forget", "job", "--output", "--yes")
        assert (code, here.state_dir.run.exists()) == (2, True)
        assert "is in use by the job in" in said
    (here.output / contract.OWNER).write_text(str(here.source))
    code, said = outlast(here, "forget", "job", "--output", "--yes")
    assert (code, here.state_dir.run.exists()) == (2, True)
    assert f"is that of the job in {here.source} now; forget job without --output" in said
    (here.output / contract.OWNER).write_text(str(here.state_dir.path))
    assert outlast(here, "forget", "job", "--output", "-y")[0] == 0
    assert (here.output.exists(), here.state_dir.path.exists()) == (False, False)


@pytest.mark.parametrize(("config", "why"), [("gone", "KUBECONFIG names "), ("dead", "the API server http://127.0.0.1:9 ")])
def test_a_misspelt_name_is_said_before_the_cluster_that_cannot_be_asked(
    here: Here, config: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    here.submit()
    monkeypatch.setattr(requests, "pause", lambda *_: 0)
    apiserver.kubeconfig(tmp_path / "dead", "http://127.0.0.1:9")
    monkeypatch.setenv("OUTLAST_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / config))
    with pytest.raises(SystemExit):
        cli.main(["status", "jobb"])
    said = "Error: no job jobb; did you mean job? there is job; and the cluster cannot be asked: "
    assert capsys.readouterr().err.startswith(f"{said}{why}")


def test_git_ignores_the_state_but_nothing_that_is_not_ours(here: Here) -> None:
    state = here.state_dir.path.parent.parent
    state.mkdir()
    (state / "mine.py").write_text("")
    here.submit()
    assert not (state / ".gitignore").exists()
    (state / "mine.py").unlink()
    here.leave(State.SUCCEEDED)
    here.submit()
    assert (state / ".gitignore").read_text() == "*\n"


# The job's own files


def test_an_output_that_another_state_directory_drives_is_left_alone(here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(output_dir, "_UNLOCK_TIMEOUT_S", 0.0)
    output = tmp_path / "shared"
    (output / "job").mkdir(parents=True)
    (output / "job" / contract.OWNER).write_text("/home/ann/.outlast/jobs/job")
    (output / "job" / "metrics.jsonl").write_text("theirs")
    lock = file_locks.shared(output / "job" / contract.OWNER)
    assert lock is not None
    with pytest.raises(AlreadyRunning, match=r"shared/job is in use by the job in /home/ann/.outlast/jobs/job; end it there, or"):
        here.submit(output=str(output))
    assert (output / "job" / "metrics.jsonl").read_text() == "theirs"
    os.close(lock)
    here.submit(output=str(output))
    assert not (output / "job" / "metrics.jsonl").exists()


@pytest.mark.parametrize("name", ["src", "project"])
def test_an_output_that_holds_the_code_or_the_job_file_is_refused_before_anything_is_moved(tmp_path: Path, name: str) -> None:
    (tmp_path / "project").mkdir()
    here = Here(tmp_path / "project")
    output = here.source if name == "src" else tmp_path / "project"
    with pytest.raises(OutlastError, match=r"^output: .*, the job's name below output, holds .*; give the job another name or"):
        here.submit(name=name, output=str(output.parent))
    assert [path.name for path in here.source.iterdir()] == ["train.py"]


@pytest.mark.parametrize("left", [State.FAILED, State.INTERRUPTED])
def test_a_run_does_not_go_on_with_the_files_of_another_job(here: Here, left: State) -> None:
    run = here.submit()
    for ours in (here.state_dir.path, "/before/it/was/moved"):
        (here.output / contract.OWNER).write_text(str(ours))
        here.leave(left)
        assert here.submit() == run
    (here.output / contract.OWNER).write_text(str(here.source))  # of another job, which had the same output
    (here.output / "work" / "theirs.pt").write_text("weights")
    here.leave(left)
    assert here.submit() != run
    assert not (here.output / "work" / "theirs.pt").exists()
    assert [path.read_text() for path in (here.output / "previous").rglob("theirs.pt")] == ["weights"]


def test_a_job_that_is_to_have_no_workers_is_not_begun(here: Here) -> None:
    with pytest.raises(OutlastError, match=r"workers.replicas is 0, which trains nothing; set a number, e.g. with --workers 1"):
        here.submit(workers={"replicas": 0})
    assert here.started == []


def test_a_run_that_goes_on_takes_the_new_code_and_keeps_what_the_job_wrote(here: Here) -> None:
    here.write("model.py", "v1")
    here.write("snapshot.pt", "of another run")
    run = here.submit()
    (here.output / "work" / "snapshot.pt").write_text("of this run")
    (here.output / "work" / "out").mkdir()
    (here.output / "work" / "out" / "samples.txt").write_text("of this run")
    here.leave(State.INTERRUPTED)
    here.write("train.py", "v2", at=LONG_AGO - 1)  # put there with mv, which keeps its time
    (here.source / "new").mkdir()
    here.write("new/layers.py", "v2")
    assert here.submit() == run
    wrote = {"snapshot.pt": "of this run", "out/samples.txt": "of this run"}
    now = {"train.py": "v2", "model.py": "v1", "new/layers.py": "v2", **wrote}
    assert here.code() == now
    here.leave(State.INTERRUPTED)
    here.write("snapshot.pt", "mended by hand", at=SOON)
    here.submit()
    assert here.code() == {**now, "snapshot.pt": "mended by hand"}


def test_resume_goes_on_with_the_code_as_it_is(here: Here) -> None:
    here.submit()
    (here.output / "work" / "snapshot.pt").write_text("of this run")
    here.leave(State.SUSPENDED)
    here.write("train.py", "v2", at=SOON)
    here.backend.resume("job")
    assert here.code() == {"train.py": "v1", "snapshot.pt": "of this run"}


def test_resume_waits_for_workers_that_were_told_to_leave(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    here.submit()
    with here.launcher():
        with pytest.raises(AlreadyRunning, match="job is running"):
            here.backend.resume("job")
        here.backend.steer("job", "suspend")
        looks: list[StateDir] = []

        def has_launcher(state_dir: StateDir) -> bool:
            looks.append(state_dir)
            if len(looks) == 5:
                here.leave(State.SUSPENDED)
            return len(looks) < 6

        monkeypatch.setattr(StateDir, "has_launcher", has_launcher)
        here.backend.resume("job")
    assert here.backend.status("job").state is State.PENDING


def test_of_two_commands_that_start_a_job_at_once_one_is_told_that_it_runs(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    here.submit()
    here.leave(State.FAILED)
    with file_locks.attempted(here.state_dir.path.with_name(".job.lock")) as alone:  # another command is submitting it
        assert alone
        for start in (here.submit, lambda: here.backend.resume("job")):
            with pytest.raises(AlreadyRunning, match="job is running"):
                start()
    here.submit()  # and its launcher is slow to take its lock
    looks = iter([False, False, True])
    monkeypatch.setattr(StateDir, "has_launcher", lambda _: next(looks))
    with pytest.raises(AlreadyRunning, match="job is running"):
        here.submit()
    monkeypatch.undo()
    monkeypatch.setattr(local, "_START_TIMEOUT_S", 0.1)  # it died before
    here.submit()
    assert len(here.started) == 3


def test_a_file_that_cannot_be_written_is_named(here: Here) -> None:
    backend, train = here.backend, here.source / "train.py"
    here.backend = local.LocalBackend(train)
    with pytest.raises(OutlastError, match=rf"^job job is not started: {train}/jobs: Not a directory; .*OUTLAST_STATE_DIR$"):
        here.submit()
    here.backend = backend
    here.submit()
    here.leave(State.FAILED)
    here.state_dir.job.unlink()
    here.state_dir.job.mkdir()
    with pytest.raises(OutlastError, match=r"^job job is not started: .*: Is a directory; correct that"):
        here.submit()


def test_an_output_with_a_run_that_is_not_known_here_is_said_to_be_kept(here: Here, tmp_path: Path) -> None:
    here.submit(output=str(tmp_path / "shared"))
    (tmp_path / "shared" / "job" / "last.pt").write_text("weights")
    (tmp_path / "another").mkdir()
    there = Here(tmp_path / "another")
    there.submit(output=str(tmp_path / "shared"))
    (kept,) = (tmp_path / "shared" / "job" / "previous").iterdir()
    assert (kept / "last.pt").exists()
    (said,) = [notice for notice in there.backend.notices if notice.startswith("output: ")]
    assert (
        said == f"output: {kept.parent.parent} held a run that is not known here; it is kept in {kept}, and this one starts anew"
    )
    there.leave(State.SUCCEEDED)
    there.submit(output=str(tmp_path / "shared"))
    assert not any(notice.startswith("output: ") for notice in there.backend.notices)


def test_links_in_the_copy_are_replaced_and_never_written_through(here: Here, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "big").write_text("the user's")
    (here.source / "settings").symlink_to(tmp_path / "data" / "big")
    (here.source / "data").symlink_to(tmp_path / "data")
    (here.source / "other").symlink_to("train.py")
    here.submit()
    assert here.code()["data"] == f"-> {tmp_path / 'data'}"
    here.leave(State.INTERRUPTED)
    for name in ("settings", "data", "other"):
        (here.source / name).unlink()
    (here.source / "data").mkdir()
    here.write("data/big", "new")
    here.write("settings", "new")
    (here.source / "other").symlink_to("settings")
    here.submit()
    assert here.code() == {"train.py": "v1", "settings": "new", "data/big": "new", "other": "-> settings"}
    assert (tmp_path / "data" / "big").read_text() == "the user's"


def test_a_file_in_the_place_of_a_directory_is_refused_with_the_way_out(here: Here) -> None:
    (here.source / "part").mkdir()
    here.write("part/a.py", "v1")
    here.submit()
    here.leave(State.INTERRUPTED)
    (here.source / "part" / "a.py").unlink()
    (here.source / "part").rmdir()
    here.write("part", "a file now")
    with pytest.raises(
        OutlastError, match=r"code: cannot copy .*/work/part is a directory, .*/src/part is not; correct that, or use --fresh"
    ):
        here.submit()
    assert here.code() == {"train.py": "v1", "part/a.py": "v1"}


def test_a_run_gets_the_files_that_pods_would_get_and_says_which_it_does_not(here: Here, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for name in ("data", "sub"):
        (here.source / name).mkdir()
    (here.source / "datasets").symlink_to("../elsewhere")
    for name in (".gitignore", ".env", "data/x.bin", "sub/a.py", "sub/b.log"):
        here.write(name, "data/\n*.log\n" if name == ".gitignore" else "x")
    here.submit()
    entries = code_files.listed(here.source, links_out=True).entries
    assert sorted(here.code()) == [entry.name for entry in entries] == [".gitignore", "datasets", "sub/a.py", "train.py"]
    assert (here.output / "work" / "datasets").resolve() == tmp_path / "elsewhere"
    assert here.backend.notices == [
        "code: without .env, which may hold credentials (!.env in .outlastignore brings it back); pods do not get it either",
        "code: without data, sub/b.log, as .gitignore or .outlastignore says (!data in .outlastignore brings it back)",
        f"code: links that lead out of {here.source} (datasets) work on this machine, and pods would not have them; "
        "name what they lead to under data, or put copies in their place",
    ]


def test_more_than_code_can_be_is_refused_and_not_run_in_place(here: Here) -> None:
    with open(here.source / "data.bin", "wb") as file:
        file.truncate(5 << 30)
    with pytest.raises(
        OutlastError, match=r"too much for code \(the biggest: data.bin 5.0 GiB.*name what is no code in .outlastignore"
    ):
        here.submit()
    assert here.started == []
    here.write(".outlastignore", "*.bin")
    here.submit()
    assert sorted(here.code()) == [".outlastignore", "train.py"]


def test_a_new_run_starts_clean_and_the_old_ones_files_are_kept(here: Here) -> None:
    first = here.submit()
    (here.output / "work" / "snapshot.pt").write_text("of the first")
    (here.output / "model.pt").write_text("of the first")
    here.leave(State.SUCCEEDED)
    assert here.submit() != first
    assert here.code() == {"train.py": "v1"}
    (kept,) = (here.output / "previous").iterdir()
    assert (kept / "work" / "snapshot.pt").read_text() == "of the first"
    assert (kept / "model.pt").read_text() == "of the first"
    assert not (here.output / "model.pt").exists()


def test_a_mistake_in_the_job_file_costs_the_old_run_nothing(here: Here) -> None:
    here.submit()
    (here.output / "model.pt").write_text("of the first")
    here.leave(State.SUCCEEDED)
    with pytest.raises(OutlastError, match=r"code \(.*nowhere\) does not exist; correct the path"):
        here.submit(code=str(here.source / "nowhere"))
    (here.source / "bad.tgz").write_text("<html>")
    with pytest.raises(
        OutlastError, match=r"code \(.*/bad.tgz\) is no tar archive, or is damaged: .*; make or download it again"
    ):
        here.submit(code=str(here.source / "bad.tgz"))
    assert here.backend.status("job").state is State.SUCCEEDED
    assert (here.output / "model.pt").exists()


# Taken up again


@pytest.mark.parametrize("verb", ["submit", "resume"])
def test_a_run_that_is_taken_up_counts_its_time_anew(here: Here, verb: str) -> None:
    run = here.submit()
    here.save(40, run)
    saved = CheckpointStatus(step=40, path="p", time=1.0)
    here.leave(State.INTERRUPTED, started=1.0, checkpoint=saved, step=40, min=1, max=3, rate=12.4)
    os.utime(here.state_dir.run, (1.0, 1.0))
    before = here.backend.status("job")
    here.submit() if verb == "submit" else here.backend.resume("job")
    expected = {
        "state": State.PENDING,
        "reason": "goes on from step 40",
        "rate": None,
        "started": None,
        "finished": None,
        "exit_code": None,
        "replicas": 2,
    }
    assert here.backend.status("job") == before.model_copy(update=expected)
    assert (before.run, before.started) == (run, 1.0)
    assert here.state_dir.started_at() > time.time() - 60
    assert Request.read(here.state_dir) == Request(2)
    assert here.started[-1][1:] == ["-m", "outlast", "launcher", str(here.state_dir.path)]
    assert len(here.started) == 2


def test_a_run_keeps_its_copy_of_outlast_until_it_is_taken_up(here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    installed = tmp_path / "outlast" / "__init__.py"
    installed.parent.mkdir()
    monkeypatch.setattr(outlast_package, "__file__", str(installed))
    monkeypatch.setenv("OUTLAST_CACHE", str(tmp_path / "cache"))

    def runs_in() -> str:
        return (Path(here.environ["PYTHONPATH"].split(":")[0]) / "outlast" / "__init__.py").read_text()

    installed.write_text("first")
    here.submit()
    installed.write_text("second")
    here.leave(State.RUNNING, finished=None, launcher=1)
    assert here.backend.ensure("job")
    assert runs_in() == "first"
    here.leave(State.INTERRUPTED)
    here.submit()
    assert runs_in() == "second"

    monkeypatch.setenv("OUTLAST_CACHE", str(installed))
    here.leave(State.INTERRUPTED)
    here.backend.resume("job")
    assert here.environ == os.environ
    assert here.backend.notices[-1].endswith("/outlast/__init__.py/packages'); interrupt the job before an upgrade")


def test_a_launcher_that_always_ends_is_not_started_for_ever(here: Here) -> None:
    here.submit()
    here.leave(State.RUNNING, finished=None, launcher=1)
    assert [here.backend.ensure("job") for _ in range(3)] == [True] * 3
    here.state_dir.log.write_text("Traceback\nValueError: embedded null byte\n")
    with pytest.raises(
        OutlastError, match=r"3 launchers have ended within a minute; .*/launcher.log says: ValueError: embedded null byte$"
    ):
        here.backend.ensure("job")


# Processes


@contextlib.contextmanager
def a_process(**environ: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that sleeps, in a session of its own as an agent is."""
    with subprocess.Popen(["sleep", "60"], env={**os.environ, **environ}, start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()


def test_a_process_belongs_to_the_worker_whose_directory_is_in_its_environment(tmp_path: Path) -> None:
    state_dir = StateDir(tmp_path)
    assert not state_dir.owns(1, os.getpid())
    with a_process(**{contract.Env.STATE: str(state_dir.worker(1))}) as process:
        assert [state_dir.owns(index, process.pid) for index in (0, 1)] == [False, True]
        assert not StateDir(tmp_path / "other").owns(1, process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not state_dir.owns(1, process.pid), "a zombie works for nobody"
        process.wait()
        assert not state_dir.owns(1, process.pid)


def test_numbers_that_belong_to_others_after_a_reboot_are_left_alone(here: Here) -> None:
    here.submit()
    with a_process() as stranger:
        rank = RankStatus(rank=0, local_rank=0, pid=stranger.pid)
        worker = WorkerStatus(index=0, state="training", pid=stranger.pid, ranks=[rank])
        with here.launcher(workers=[worker], world=[0]):
            for action, whom in {
                "kill-worker": "worker 0",
                "kill-process": "rank 0 on worker 0",
                "slow": "rank 0 on worker 0",
            }.items():
                with pytest.raises(OutlastError, match=rf"^{whom} \(pid {stranger.pid}\) is gone already$"):
                    here.backend.chaos("job", action, worker=0, rng=random.Random(0))
        os.utime(here.state_dir.run, (1.0, 1.0))
        assert here.backend.status("job").reason == "all its processes are gone; `outlast run` goes on"
        here.backend.steer("job", "kill")
        assert here.backend.status("job").reason == "killed by the user"
        assert stranger.poll() is None
    assert [event["kind"] for event in here.backend.events("job")] == ["submitted", "finished"]


def test_workers_without_a_launcher_are_ours_and_can_be_faultsed_and_killed(here: Here) -> None:
    here.submit()
    with a_process(**{contract.Env.STATE: str(here.state_dir.worker(0))}) as ours:
        worker = WorkerStatus(index=0, pid=ours.pid, ranks=[RankStatus(rank=1, local_rank=0, pid=ours.pid)])
        here.leave(State.RUNNING, workers=[worker], finished=None, step=40, waits="waiting for worker 1")
        os.utime(here.state_dir.run, (1.0, 1.0))
        status = here.backend.status("job")
        assert status.reason == "the launcher is gone; its workers train on and will start it again"
        assert status.waits == "", "what it waited for is not why it waits now"
        said = here.backend.chaos("job", "stop", worker=None, rng=random.Random(0))
        assert said == f"stopped rank 1 on worker 0 (pid {ours.pid}) at step 40"
        here.backend.steer("job", "kill")
        assert ours.wait(timeout=60) == -signal.SIGKILL
    assert here.backend.status("job").state is State.INTERRUPTED


# What a power loss leaves


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_replaced_as_a_whole(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "run.json"
    path.write_text("old")
    with open(path) as reader:
        files.replace(path, "new: é", durable=durable)
        assert reader.read() == "old"
    assert path.read_text(encoding="utf-8") == "new: é"
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


DAMAGED = pytest.mark.parametrize("content", ["", "{", "[]", "{}", "\0\0"])


@DAMAGED
def test_a_damaged_status_stops_no_command(here: Here, content: str) -> None:
    first = here.submit()
    here.leave(State.RUNNING, finished=None, launcher=1)
    here.state_dir.status.write_text(content)
    lost = here.backend.status("job")
    assert (lost.state, lost.reason.split(";")[0]) == (State.INTERRUPTED, "its status is lost")
    assert here.submit() == first
    here.state_dir.status.write_text(content)
    assert outlast(here, "cancel", "job")[0] == 0
    assert here.backend.status("job").state is State.CANCELLED
    here.state_dir.status.write_text(content)
    assert outlast(here, "forget", "job", "-y")[0] == 0
    assert not here.state_dir.path.exists()


@DAMAGED
def test_a_damaged_file_is_named_with_a_way_out_that_leads_out(here: Here, content: str) -> None:
    here.submit()
    (here.output / "model.pt").write_text("of the first")
    here.leave(State.INTERRUPTED)
    path = here.state_dir.run
    path.write_text(content)
    remedy = "remove it and `outlast run` starts anew; what was saved is kept in `previous/`"
    sentence = f"{path} is empty, damaged or may not be read; {remedy}"
    calls: list[Callable[[], object]] = [
        lambda: here.backend.status("job"),
        *(lambda verb=verb: here.backend.steer("job", verb) for verb in ("resume", "cancel")),
        here.submit,
    ]
    for call in calls:
        with pytest.raises(OutlastError) as raised:
            call()
        assert str(raised.value) == sentence
    other = here.state_dir.path.with_name("other")
    other.mkdir()
    (other / "run.json").touch()
    listed = {status.name: status.reason for status in here.backend.list()}
    assert (listed["job"], set(listed)) == (sentence, {"job", "other"}), "it does not hide the others"
    shutil.rmtree(other)

    path.unlink()
    here.submit()
    assert here.backend.status("job").state is State.PENDING
    assert [path.read_text() for path in here.output.rglob("model.pt")] == ["of the first"]


def test_a_damaged_wish_is_written_anew_by_run(here: Here) -> None:
    here.submit()
    here.leave(State.INTERRUPTED)
    here.state_dir.request.write_text("")
    with pytest.raises(OutlastError, match=r"wanted.json is empty, .*; `outlast run` with the job file writes it anew"):
        here.backend.resume("job")
    here.submit()
    assert Request.read(here.state_dir) == Request(2)


@pytest.mark.parametrize("kind", [Run, Request])
def test_fields_that_a_newer_version_has_added_are_ignored(here: Here, kind: type[Run] | type[Request]) -> None:
    here.submit()
    path = here.state_dir.run if kind is Run else here.state_dir.request
    before = kind.read(here.state_dir)
    path.write_text(json.dumps({**json.loads(path.read_text()), "new": 1}))
    assert kind.read(here.state_dir) == before


# Fault injection ends with the run


INJECTIONS: dict[str, Callable[[Here], Iterator[str]]] = {
    "play": lambda here: chaos.play(
        here.backend, "job", chaos.parse("[{step: 0, do: term}, {step: 99, do: stop}]"), random.Random(0)
    ),
    "repeat": lambda here: chaos.repeat(
        here.backend, "job", chaos.Fault(do="term"), every=timedelta(hours=1), times=None, rng=random.Random(0)
    ),
}


@pytest.mark.parametrize("how", INJECTIONS)
@pytest.mark.parametrize("end", ["Interrupted", "Suspended", "Failed", "replaced", "removed"])
@pytest.mark.timeout(30)
def test_fault_injection_stops_when_the_run_stops_or_is_replaced(here: Here, how: str, end: str) -> None:
    here.submit()
    with here.launcher():
        faults = INJECTIONS[how](here)
        assert next(faults).startswith("term: no worker runs now")
        if end == "removed":
            here.state_dir.run.unlink()
        elif end == "replaced":
            here.leave(State.RUNNING, run="another")
        else:
            here.leave(State(end))
        assert list(faults) == []


def test_a_fault_for_an_unknown_job_is_an_error(here: Here) -> None:
    for faults in INJECTIONS.values():
        with pytest.raises(NotFound):
            next(faults(here))


def test_a_fault_is_repeated_the_given_number_of_times(here: Here) -> None:
    here.submit()
    with here.launcher():
        faults = chaos.repeat(
            here.backend, "job", chaos.Fault(do="term"), every=timedelta(milliseconds=1), times=3, rng=random.Random(0)
        )
        assert len(list(itertools.islice(faults, 9))) == 3


@pytest.mark.parametrize("text", ["", "one", "one\n", "one\ntwo", "one\ntwo\r3\n\n", "\n\n"])
def test_the_last_lines_of_a_log_are_found_and_then_the_new_ones(tmp_path: Path, text: str):
    (tmp_path / "log").write_bytes(text.encode())
    lines = text.removesuffix("\n").split("\n") if text else []
    for last in (None, 0, 1, 2, 9):
        tail = log_reader.Tail(tmp_path / "log", last)
        assert list(tail.lines(rest=True)) == (lines if last is None else lines[max(0, len(lines) - last) :])
        with (tmp_path / "log").open("a") as log:
            log.write("half")
            log.flush()
            assert list(tail.lines(rest=False)) == []
            log.write(" and half\n")
        assert list(tail.lines(rest=False)) == ["half and half"]
        (tmp_path / "log").write_bytes(text.encode())
        tail.close()


def test_the_newest_snapshot_is_shown_apart_from_the_checkpoint(tmp_path: Path) -> None:
    job = spec.of({"apiVersion": contract.API_VERSION, "kind": contract.KIND, "metadata": {"name": "a"}, "spec": {"module": "m"}})
    state_dir, status = StateDir(tmp_path), JobStatus(name="a", run="r")
    run = Run("r", 0.0, "", str(tmp_path / "out"), "")
    live = LiveStatus(state_dir, run, WorkerPool(state_dir, job, run, time.monotonic), status, time.monotonic)
    state_dir.worker(1).mkdir(parents=True)
    writer = progress_file.Writer(state_dir.worker(1), 0)
    writer.write(progress_file.Progress(generation=2, rank=0, phase="train", step=9, snapshot=8, every=2))
    live.read(World(2, (1, 0), "", ""))
    assert (status.step, status.snapshot, status.checkpoint) == (9, SnapshotStatus(step=8, every=2), None)
    writer.write(progress_file.Progress(generation=2, rank=0, phase="train", step=10))
    live.read(World(2, (1, 0), "", ""))
    assert status.snapshot is None
    writer.close()
    path = state_dir.worker(1) / "progress-0.json"
    path.write_text(path.read_text().strip().replace("{", '{"of a later version": 1, ', 1))
    assert progress_file.read(state_dir.worker(1), 0) is not None


def test_the_key_of_a_run_is_for_its_user_alone_and_stays(tmp_path: Path) -> None:
    key = StateDir(tmp_path).secret()
    assert len(key) == 64
    assert (tmp_path / "rendezvous.key").stat().st_mode & 0o777 == 0o600
    assert StateDir(tmp_path).secret() == key
