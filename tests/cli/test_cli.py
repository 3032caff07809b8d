"""The command line, in this process, on a backend without processes."""

from __future__ import annotations

import io
import json
import os
import random
import runpy
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import yaml
from rich.console import Console

import fake
from machines import PROGRAMS
from outlast.base.errors import NotFound, OutlastError, Unanswered
from outlast.cli import commands, live_panel, run_view, status_page, tables
from outlast.cli.train import chaos as chaos_command
from outlast.cli.train import overrides
from outlast.job import contract
from outlast.job import faults as chaos
from outlast.job import status as told
from outlast.job.logs import LogLine
from outlast.job.status import CheckpointStatus, Failure, JobStatus, RankStatus, State, WorkerStatus
from outlast.local import backend as local
from outlast.local.state_dir import Run
from waits import until

JOB = """\
apiVersion: outlast.dev/v1alpha1
kind: ElasticJob
metadata: {name: job}
spec:
  module: outlast.recipes.smoke
  workers: {replicas: 2, max: 4}
"""

Outlast = Callable[..., tuple[int, str, str]]


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


@pytest.fixture
def backend(tmp_path: Path) -> fake.FakeBackend:
    return fake.FakeBackend(tmp_path)


@pytest.fixture
def outlast(outlast: Outlast) -> Outlast:
    """Runs the command line: (backend, *words) -> exit code, standard output, standard error."""
    return lambda backend, *words: outlast(*words, backend=backend)


def a_status(**fields: object) -> JobStatus:
    """A job in the middle of its run, submitted at 1000."""
    usual = {
        "name": "job", "run": "run-1", "state": State.RUNNING, "reason": "world of 2", "replicas": 2, "min": 1, "max": 4,
        "generation": 3, "world": [0, 1], "step": 40, "steps": 100, "rate": 10.0, "submitted": 1000.0, "output": "/out/job",
    }  # fmt: skip
    return JobStatus(**{**usual, **fields})


# Run


def comes(number: signal.Signals) -> None:
    """Send this process a signal, once the view of a run handles it."""
    unhandled = (signal.SIG_DFL, signal.default_int_handler)
    until(lambda: signal.getsignal(number) not in unhandled)
    os.kill(os.getpid(), number)


def test_a_run_shows_the_workers_lines_and_says_how_it_ended(backend: fake.FakeBackend, outlast: Outlast, job_file: Path) -> None:
    code, out, err = outlast(backend, "run", job_file)
    assert code == 0
    assert out.splitlines() == [f"worker-{worker} | step {step}" for step in range(1, 21) for worker in (0, 1)]
    assert "outlast | Running: world of 2\n" in err
    assert "outlast | Succeeded: all steps are done\noutlast | 20/20 steps in " in err


def test_a_failed_run_exits_with_the_workers_code_and_shows_the_first_error(tmp_path: Path, outlast: Outlast, job_file: Path):
    code, _, err = outlast(fake.FakeBackend(tmp_path, at={5: fake.fails(78)}), "run", job_file)
    assert code == 78
    assert "outlast | rank 1 on worker 1 raised ValueError: too bad (exit code 78)\n" in err
    assert "outlast |     ValueError: too bad\n" in err


def test_the_first_interruption_saves_and_the_same_command_goes_on(tmp_path: Path, outlast: Outlast, job_file: Path) -> None:
    backend = fake.FakeBackend(tmp_path, at={5: lambda run: (comes(signal.SIGINT), until(lambda: run.wish))})
    code, _, err = outlast(backend, "run", job_file)
    assert code == 75
    assert "outlast | saving and stopping; press Ctrl-C again to kill it\n" in err
    assert "go on from step 5 with `outlast run FILE`, or in the background with `outlast resume job`\n" in err

    code, out, _ = outlast(backend, "run", job_file)
    assert code == 0
    assert int(out.split()[3]) > 5, "lines of before are not shown again"


def test_the_second_interruption_kills(tmp_path: Path, outlast: Outlast, job_file: Path) -> None:
    def never_leaves(run: fake.Run) -> None:
        for _ in range(2):
            comes(signal.SIGTERM)
            time.sleep(0.05)
        until(lambda: run.launcher is None)

    code, _, err = outlast(fake.FakeBackend(tmp_path, at={5: never_leaves}), "run", job_file)
    assert code == 130
    assert "outlast | Interrupted: killed\n" in err
    assert "go on with `outlast run" in err


def test_a_launcher_that_dies_is_started_again(tmp_path: Path, outlast: Outlast, job_file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(run_view, "_ENSURE_INTERVAL_S", 0.02)
    code, out, err = outlast(fake.FakeBackend(tmp_path, at={5: fake.launcher_dies}), "run", job_file)
    assert code == 0
    assert out.splitlines()[-1] == "worker-1 | step 20"
    assert "outlast | the job's launcher was gone; started it again\n" in err


def test_a_launcher_that_is_started_again_has_time_to_come(tmp_path: Path, outlast: Outlast, job_file: Path, monkeypatch) -> None:
    def all_die(run: fake.Run) -> None:
        fake.launcher_dies(run)
        run.status.state = State.INTERRUPTED

    calls: list[float] = []

    def slow(name: str) -> bool:
        calls.append(time.monotonic())
        return len(calls) == 1 or ensure(name)

    backend = fake.FakeBackend(tmp_path, at={5: all_die})
    ensure, backend.ensure = backend.ensure, slow  # type: ignore[method-assign]
    monkeypatch.setattr(run_view, "_START_TIMEOUT_S", 0.5)
    assert outlast(backend, "run", job_file)[0] == 0
    assert len(calls) == 2
    assert calls[1] - calls[0] >= 0.4


def test_a_job_that_is_suspended_elsewhere_ends_the_view(tmp_path: Path, outlast: Outlast, job_file: Path) -> None:
    backend = fake.FakeBackend(tmp_path, at={5: lambda run: backend.suspend("job")})
    code, _, err = outlast(backend, "run", job_file)
    assert code == 75
    assert "outlast resume job" in err


def test_detached_runs_return_at_once(backend: fake.FakeBackend, outlast: Outlast, job_file: Path) -> None:
    code, out, _ = outlast(backend, "run", job_file, "--detach")
    assert (code, out) == (0, "job runs in the background; look at it with: outlast logs -f job\n")


def test_a_fresh_run_ends_the_unfinished_one_first(tmp_path: Path, outlast: Outlast, job_file: Path) -> None:
    backend = fake.FakeBackend(tmp_path, at={5: lambda run: backend.interrupt("job")})
    assert outlast(backend, "run", job_file)[0] == 75
    code, out, _ = outlast(backend, "run", job_file, "--fresh")
    assert (code, out.splitlines()[0]) == (0, "worker-0 | step 1")
    endless = fake.FakeBackend(tmp_path, steps=10_000)
    outlast(endless, "run", job_file, "--detach")
    until(lambda: endless.status("job").state is State.RUNNING)
    code, _, err = outlast(endless, "run", job_file, "--detach", "--fresh")
    assert (code, err) == (
        0,
        "outlast | job: its present run (Running) is ended, since the next one is to start from the beginning\n",
    )
    endless.cancel("job")


def test_values_of_the_command_line_replace_those_of_the_file(job_file: Path) -> None:
    sets = ["checkpoint.every=7 steps", "args=[--epochs=2]", "workers.max=5", "env.WHO=me", "code=src"]
    job = overrides.load(job_file, workers=5, name="other", set_=sets)
    assert job.metadata.name == "other"
    assert (job.spec.workers.replicas, job.spec.workers.allowed()) == (5, (5,))
    assert (str(job.spec.checkpoint.every), job.spec.args, job.spec.env) == ("7 steps", ("--epochs=2",), {"WHO": "me"})
    assert job.spec.code == str(job_file.parent / "src"), "paths start from the job file"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "workers=9=9"], "job.yaml with the command line's values: "),
        (["--set", "wrokers.max=3"], "workers"),
        (["--set", "nothing"], "Error: --set nothing: expected KEY=VALUE, such as checkpoint.every=1m\n"),
        (
            ["--set", "metadata.name=x"],
            "Error: --set metadata.name=x: --set changes fields of spec; use --name, or change the job",
        ),
        (
            ["--set", "spec.suspend=true"],
            "Error: --set spec.suspend=true: --set changes fields of spec; write --set suspend=true\n",
        ),
        (["--set", "args=[1"], "Error: --set args=[1: the value is not YAML"),
        (["--workers", "9"], "workers.replicas (9) is above workers.max (4)"),
        (["--chaos", "none.yaml"], "Error: the schedule none.yaml cannot be read: "),
    ],
)
def test_wrong_values_are_one_clear_sentence(backend, outlast, job_file, words: list[str], said: str) -> None:
    code, out, err = outlast(backend, "run", job_file, *words)
    assert (code, out, backend.runs) == (2, "", {})
    assert said in err
    assert "Traceback" not in err


def test_the_chaos_schedule_is_checked_and_handed_on(backend: fake.FakeBackend, outlast: Outlast, job_file: Path, tmp_path: Path):
    schedule = tmp_path / "chaos.yaml"
    schedule.write_text(
        "- {step: 4, do: kill-worker, worker: 1}\n- {at: 2s, do: explode}\n- {do: term}\n- {step: 1, do: term, worker: x}\n"
    )
    code, _, err = outlast(backend, "run", job_file, "--chaos", schedule)
    assert code == 2
    assert err.splitlines() == [
        f"{schedule}:2: faults[1].do (explode) must be one of kill-process, kill-worker, stop, slow, term, evict",
        f"{schedule}:4: faults[3].worker (x) must be a whole number",
    ]
    schedule.write_text("# none yet\n")
    assert (
        "the file is empty; a schedule starts with `- {step: 40, do" in outlast(backend, "run", job_file, "--chaos", schedule)[2]
    )
    schedule.write_text("- {step: 4, do: kill-worker, worker: 1}\n")
    assert outlast(backend, "run", job_file, "--chaos", schedule)[0] == 0
    assert backend.chaos_schedule == schedule


# Looking


def a_machine_with_jobs(backend: fake.FakeBackend, outlast: Outlast, job_file: Path, *names: str) -> None:
    for name in names:
        assert outlast(backend, "run", job_file, "--name", name)[0] == 0


def test_the_list_has_a_line_for_each_job(backend: fake.FakeBackend, outlast: Outlast, job_file: Path) -> None:
    assert outlast(backend, "list")[1] == ""
    a_machine_with_jobs(backend, outlast, job_file, "one", "two")
    _, out, _ = outlast(backend, "list")
    assert [line.split()[:4] for line in out.splitlines()] == [
        ["NAME", "STATE", "WORKERS", "STEP"],
        ["one", "Succeeded", "2/2", "(2–4)"],
        ["two", "Succeeded", "2/2", "(2–4)"],
    ]
    assert [job["name"] for job in json.loads(outlast(backend, "list", "-o", "json")[1])] == ["one", "two"]
    assert [job["name"] for job in yaml.safe_load(outlast(backend, "list", "-o", "yaml")[1])] == ["one", "two"]
    assert outlast(backend, "list", "-o", "name")[1] == "one\ntwo\n"
    wide = outlast(backend, "list", "-o", "wide")[1].splitlines()
    assert wide[0].split()[7:] == ["CHECKPOINT", "NODES", "OUTPUT", "REASON"]
    assert str(backend.output("one")) in wide[1]


class Changing(fake.FakeBackend):
    """Jobs as they are at one look after another; then Ctrl-C."""

    def __init__(self, output: Path, *looks: list[JobStatus]) -> None:
        super().__init__(output)
        self.looks, self.poll_s = [*looks], 0.0

    def list(self) -> list[JobStatus]:
        if not self.looks:
            raise KeyboardInterrupt
        return self.looks.pop(0)


def test_a_list_that_is_watched_has_a_line_for_each_change_until_it_is_interrupted(tmp_path: Path, outlast: Outlast) -> None:
    now = time.time()
    one = a_status(name="one", submitted=now, reason="", state=State.PENDING)
    runs = one.model_copy(update={"state": State.RUNNING})
    two = a_status(name="the-second", submitted=now, reason="")
    looks = [], [one], [one.model_copy(update={"metrics": {"loss": 1.0}})], [runs, two], [two]
    code, out, err = outlast(Changing(tmp_path, *looks), "list", "-w")
    assert code == 130
    assert err.startswith("no job has been run here")
    assert [(*line.split()[:2], line.split()[-1]) for line in out.splitlines()] == [
        ("NAME", "STATE", "REASON"),
        ("one", "Pending", "-"),
        ("one", "Running", "-"),
        ("the-second", "Running", "-"),
        ("one", "Running", "gone"),
    ]
    documents = [json.loads(line) for line in outlast(Changing(tmp_path, *looks), "list", "-w", "-o", "json")[1].splitlines()]
    assert [job["name"] for job in documents] == ["one", "one", "one", "the-second", "one"]
    assert outlast(Changing(tmp_path, *looks), "list", "-w", "-o", "name")[1].split() == ["one", "the-second", "one"]


def test_the_only_job_needs_no_name(backend: fake.FakeBackend, outlast: Outlast, job_file: Path) -> None:
    assert "no job has been run here" in outlast(backend, "status")[2]
    a_machine_with_jobs(backend, outlast, job_file, "one")
    assert outlast(backend, "status")[1].startswith("one: Succeeded: all steps are done\n")
    assert JobStatus.model_validate_json(outlast(backend, "status", "-o", "json")[1]).name == "one"
    a_machine_with_jobs(backend, outlast, job_file, "two")
    _, out, err = outlast(backend, "status")
    assert (out[:14], err) == ("two: Succeeded", "outlast | two: the newest of 2 jobs; outlast list shows all\n")
    backend.runs["one"].status.state = State.SUSPENDED
    _, out, err = outlast(backend, "status")
    assert (out[:14], err) == ("one: Suspended", "outlast | one: the only unfinished one of 2 jobs; outlast list shows all\n")
    backend.runs["two"].status.state = State.RUNNING
    assert outlast(backend, "status") == (2, "", "Error: which job? there are one, two\n")
    assert outlast(backend, "status", "ome") == (2, "", "Error: no job ome; did you mean one? there are one, two\n")


def test_watching_prints_a_line_for_every_change_until_the_end(backend: fake.FakeBackend, outlast: Outlast, job_file: Path):
    outlast(backend, "run", job_file, "--detach")
    assert outlast(backend, "status", "-w")[1].splitlines()[-1] == "Succeeded: all steps are done"


def test_waiting_ends_at_a_step_a_state_or_the_end_and_says_otherwise_why_not(tmp_path: Path, outlast: Outlast, job_file: Path):
    bound = threading.Event()

    def fails(run: fake.Run) -> None:
        assert bound.wait(60)
        run.status.failure = Failure(worker=1, code=1, reason="rank 1 on worker 1 raised ValueError")
        run.wish = State.FAILED

    backend = fake.FakeBackend(tmp_path, at={15: fails})
    outlast(backend, "run", str(job_file), "--detach")
    assert outlast(backend, "wait", "--for", "step=5")[0] == 0
    code, out, _ = outlast(backend, "wait", "job", "--for", "Running", "--timeout", "1m")
    assert (code, out.startswith("job: Running")) == (0, True)
    assert outlast(backend, "wait", "--for", "step=20", "--timeout", "0.1s")[0] == 124
    bound.set()
    code, _, error = outlast(backend, "wait")
    assert (code, error) == (1, "Error: job has ended: Failed: rank 1 on worker 1 raised ValueError\n")
    assert outlast(backend, "wait", "--for", "step=many")[2] == "Error: --for step=many: expected step=N with a whole number\n"
    assert "--for Trained: expected step=N or one of Pending, Queued" in outlast(backend, "wait", "--for", "Trained")[2]


def test_logs_can_be_followed_cut_and_searched(backend: fake.FakeBackend, outlast: Outlast, job_file: Path) -> None:
    outlast(backend, "run", job_file, "--detach")
    assert len(outlast(backend, "logs", "-f")[1].splitlines()) == 40
    assert outlast(backend, "logs", "--worker", 1, "--grep", "step 12", "--tail", 4)[1] == ""
    assert outlast(backend, "logs", "--worker", 1, "--grep", "9$")[1] == "step 9\nstep 19\n"
    assert outlast(backend, "logs", "--grep", "9$", "--tail", 4)[1] == "worker-0 | step 19\nworker-1 | step 19\n"
    code, _, err = outlast(backend, "logs", "--grep", "(")
    assert (code, err) == (2, "Error: --grep '(' is not a regular expression: missing ), unterminated subpattern at position 0\n")


def test_the_log_of_the_attempt_before_ends_with_what_ended_it(backend: fake.FakeBackend, outlast: Outlast) -> None:
    killed = "rank 0 on worker 0 was killed by SIGKILL"
    first = ["step 1", f"outlast | {killed}"]
    second = [contract.start_line(1, 1, killed), "step 1", "generation 1: a line of the script"]
    third = [contract.start_line(2, 0, "lost worker 1"), "step 1", "step 2"]
    run = backend.runs["job"] = fake.Run(a_status(), [LogLine(worker, text) for text in first for worker in (0, 1)])
    assert outlast(backend, "logs", "-p") == (2, "", "Error: no worker has had more than one attempt; leave out -p\n")
    run.lines += [LogLine(0, text) for text in (*second, *third)]
    assert outlast(backend, "logs", "-p")[1].splitlines() == [f"worker-0 | {text}" for text in second]
    run.lines += [LogLine(1, text) for text in third]
    assert outlast(backend, "logs", "--previous", "--tail", 1)[1].splitlines() == [
        f"worker-1 | {first[1]}", f"worker-0 | {second[-1]}"
    ]  # fmt: skip
    assert "leave out -f or -p" in outlast(backend, "logs", "-p", "-f")[2]


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    program = (
        "import sys, fake, pathlib; from outlast import cli; from outlast.job.backend import LogLine\n"
        "from outlast.job.status import JobStatus\n"
        "b = fake.FakeBackend(pathlib.Path(sys.argv[1])); b.runs['job'] = fake.Run(JobStatus(name='job', run='1'))\n"
        "b.runs['job'].lines += [LogLine(0, 'x' * 100)] * 10000\n"
        "cli.main(['logs'], backend=b)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=PROGRAMS.parent
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline().startswith(b"worker-0 | xxx")
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 1


def test_the_page_of_a_job_shows_everything_that_is_known() -> None:
    best, why = told.BestStatus(step=20, value=0.31, by="val_loss"), "rank 1 on worker 1 was killed by SIGKILL"
    status = a_status(
        restarts=1,
        interruptions=2,
        goodput=0.941,
        lost=told.LostStatus(failures=2, seconds=5.0, last_s=1.5, generation=2, up_to=True),
        metrics={"step": 38.0, "loss": 0.31622, "accuracy": 0.5},
        warnings=["the save of step 30 failed: disk full"],
        workers=[WorkerStatus(index=1, state="training", pid=7, ranks=[RankStatus(rank=1, local_rank=0, step=40)], restarts=1)],
        checkpoint=CheckpointStatus(step=30, path="/x", time=1090.0, bytes=5 << 20, best=best),
        snapshot=told.SnapshotStatus(step=39, every=3),
        failure=Failure(worker=1, rank=1, code=137, reason=why, step=20, generation=2, time=1055, traceback="a\nb"),
    )
    assert status_page.page(status, 1100.0).replace(tables.moment(1000.0), "THEN").splitlines() == [
        "job: Running: world of 2",
        "",
        "run         run-1",
        "world       2/2 (1–4) workers, generation 3, 1 per worker",
        "step        40/100, 10 steps/s, 6.0s left",
        "metrics     loss 0.3162, accuracy 0.5 (step 38)",
        "snapshot    step 39, every 3 steps",
        "checkpoint  step 30, 10s ago, 5.0 MiB; best: step 20, val_loss 0.31",
        "restarts    1, and 2 interruptions, not counted",
        "goodput     94.1 %",
        "lost        up to 5.0s of training by 2 failures, 2.5s each",
        "submitted   THEN, for 1m40s",
        "output      /out/job",
        "",
        "WORKER  STATE     PID  RANK:STEP  RESTARTS  PROBES",
        "1       training  7    1:40       1         -",
        "",
        "Warnings",
        "  the save of step 30 failed: disk full",
        "",
        "Last failure, 45s ago, cost up to 1.5s of training",
        "  rank 1 on worker 1 was killed by SIGKILL (generation 2, step 20, exit code 137)",
        "      a",
        "      b",
    ]


def test_a_failure_without_a_traceback_shows_the_tail_of_its_log() -> None:
    failed = Failure(worker=0, code=3, reason="rank 0 on worker 0 exited with code 3", log_tail="no such file\nbye\n")
    ends = "\n    its log ends with:\n    no such file\n    bye"
    assert status_page.failure(failed) == f"rank 0 on worker 0 exited with code 3 (exit code 3){ends}"
    long = status_page.failure(replace(failed, log_tail="x" * 500))
    assert max(map(len, long.splitlines())) == 4 + 300


def test_only_what_changed_is_said() -> None:
    old = a_status(warnings=["a"])
    assert status_page.changes(None, old) == ["Running: world of 2", "warning: a"]
    assert status_page.changes(old, a_status(warnings=["a"], step=41)) == []
    waits = "waiting for worker 1, then it starts"
    counting = [a_status(reason=f"waiting ({n} s left), then it starts", waits=waits, warnings=["a"]) for n in (9, 8)]
    assert status_page.changes(*counting) == []
    assert status_page.changes(old, a_status(reason="", warnings=["a"])) == []
    restarts = a_status(reason="", state=State.RESTARTING, warnings=["a", "b"])
    assert status_page.changes(old, restarts) == ["Restarting", "warning: b"]


def test_a_terminal_shows_lines_above_a_panel() -> None:
    screen = io.StringIO()
    with live_panel.Terminal(Console(file=screen, force_terminal=True, width=80, color_system=None)) as terminal:
        failed = Failure(worker=0, code=1, reason="too bad")
        terminal.update(a_status(goodput=0.5, metrics={"step": 40, "loss": 2.5}, failure=failed, warnings=["disk full"]))
        terminal.lines([LogLine(0, "[EPOCH] \033[31mred\033[0m"), LogLine(1, "50%\rdone [b]")])
        terminal.say("saving")
        terminal.update(a_status(step=50, steps=None))
    shown = screen.getvalue()
    for words in (
        *("worker-0 | [EPOCH] red", "worker-1 | done [b]", "outlast | saving"),
        *("job · Running", "world of 2", "step 40/100, 10 steps/s, 6.0s left (40%)"),
        *("world 2/2 (1–4) · generation 3 · 0 restarts · 0 interruptions", "no checkpoint yet", "goodput 50.0 %"),
        "loss 2.5 (step 40)",
        *("last failure: too bad", "warning: disk full", "step 50"),
    ):
        assert words in shown


def test_a_page_on_a_terminal_waits_for_a_cluster_that_is_away(capsys: pytest.CaptureFixture[str]) -> None:
    answers = iter([a_status(), Unanswered("the API server is gone"), Unanswered("gone"), a_status(state=State.SUCCEEDED)])

    def look() -> JobStatus:
        if isinstance(answer := next(answers), Unanswered):
            raise answer
        return answer

    live_panel.page(look, every_s=0)
    out = capsys.readouterr().out
    assert out.count("outlast | the API server is gone; trying again") == 1
    assert "Succeeded" in out


def test_a_run_on_a_terminal_ends_with_its_panel(backend, outlast, job_file, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for name, value in {"TERM": "xterm", "COLUMNS": "100", "LINES": "30"}.items():
        monkeypatch.setenv(name, value)
    code, out, err = outlast(backend, "run", job_file)
    assert (code, "20/20 steps in" in err) == (0, True)
    assert [words for words in ("worker-1 | \033[0mstep 20", "╭─", "Succeeded") if words not in out] == []


# Steering


def test_wishes_reach_the_backend(tmp_path: Path, outlast: Outlast, job_file: Path) -> None:
    backend = fake.FakeBackend(tmp_path, steps=10_000)
    outlast(backend, "run", job_file, "--detach")
    assert outlast(backend, "scale", 3) == (0, "job is scaled to 3 workers\n", "")
    assert backend.status("job").replicas == 3
    assert outlast(backend, "scale", "job", 1) == (0, "job is scaled to 1 worker\n", "")
    assert outlast(backend, "scale", "many")[0] == 2
    assert outlast(backend, "scale", "a", "b", "3")[0] == 2
    said = "job is being suspended: its workers save and exit; continue with: outlast resume job\n"
    assert outlast(backend, "suspend")[:2] == (0, said)
    until(lambda: backend.status("job").state is State.SUSPENDED)
    assert outlast(backend, "resume", "job")[:2] == (0, "job goes on; look at it with: outlast status job\n")
    assert outlast(backend, "cancel")[0] == 0
    until(lambda: backend.status("job").state is State.CANCELLED)


def test_chaos_injects_a_fault_once_or_repeatedly(tmp_path: Path, outlast: Outlast, job_file: Path, monkeypatch) -> None:
    backend = fake.FakeBackend(tmp_path, steps=10_000)
    outlast(backend, "run", job_file, "--detach")
    until(lambda: backend.status("job").state is State.RUNNING)
    assert outlast(backend, "chaos", "kill-worker", "--worker", 1)[1].startswith("kill-worker: worker 1 at step ")
    for words in (["job", "stop"], ["stop", "job"]):
        assert outlast(backend, "chaos", *words, "--random")[1].startswith("stop: worker ")
    code, out, err = outlast(backend, "chaos", "job", "term", "--every", "10ms", "--times", 3)
    assert (code, out) == (2, "")
    assert "10ms" in err
    assert "--every 0: must be at least 1s" in outlast(backend, "chaos", "term", "--every", 0, "--times", 30)[2]
    monkeypatch.setattr(chaos_command, "_SHORTEST", timedelta(0))
    struck = [outlast(backend, "chaos", "term", "--every", "0.01s", "--times", 8, "--seed", 1)[1] for _ in range(2)]
    workers = [[line.split(" at ")[0] for line in lines.splitlines()] for lines in struck]
    assert workers[0] == workers[1], "the same seed picks the same workers"
    assert len(set(workers[0])) == 2
    assert outlast(backend, "chaos", "explode")[2].startswith("Error: no fault 'explode'")
    for wrong in (["term", "--times", 2], ["term", "--worker", 1, "--random"], ["a", "b", "term"]):
        assert outlast(backend, "chaos", *wrong)[0] == 2
    assert "choose the worker with --worker 1" in outlast(backend, "chaos", "kill-worker", 1)[2]
    for command, argument in (("scale", "N"), ("chaos", "ACTION")):
        assert f"Missing argument '{argument}'." in outlast(backend, command)[2]
    backend.cancel("job")
    until(lambda: backend.status("job").state is State.CANCELLED)
    (schedule := tmp_path / "chaos.yaml").write_text("[{at: 1s, do: term}]")
    for words in (["term", "--every", "5s"], [schedule]):
        code, out, err = outlast(backend, "chaos", *words)
        assert (code, out) == (2, "")
        assert err.startswith("Error: no worker runs now (job is Cancelled); start it with: ")


def test_a_schedule_injects_each_fault_once_when_it_is_due(tmp_path: Path, outlast: Outlast, job_file: Path, monkeypatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(chaos, "_POLL_S", 0.01)
    backend = fake.FakeBackend(tmp_path, steps=60, at={50: lambda run: until(lambda: len(done) == 2)})
    outlast(backend, "run", job_file, "--detach")
    faults = chaos.parse("[{step: 20, do: term, worker: 1}, {at: 0s, step: 10, do: stop}, {step: 99, do: slow}]")
    assert faults[1] == chaos.Fault(do="stop", at=timedelta(0), step=10)
    done.extend(chaos.play(backend, "job", faults, random.Random(0)))
    assert [sentence.split(":")[0] for sentence in done] == ["stop", "term"]
    assert [int(sentence.split()[-1]) >= step for sentence, step in zip(done, (10, 20), strict=True)] == [True, True]


@pytest.mark.parametrize(
    "text", ["do: term", "- term", "- {step: -1, do: term}", "- {at: soon, do: term}", "- {step: 1, do: term, who: 1}", "["]
)
def test_a_wrong_schedule_is_refused(text: str) -> None:
    with pytest.raises(OutlastError, match=r"^chaos\.yaml"):
        chaos.parse(text)


# Results


def test_the_report_sums_up_the_ledger(backend: fake.FakeBackend, outlast: Outlast, job_file: Path) -> None:
    a_machine_with_jobs(backend, outlast, job_file, "one")
    assert "goodput" in outlast(backend, "report")[1]
    report = json.loads(outlast(backend, "report", "-o", "json")[1])
    assert (report["name"], report["state"]) == ("one", "Succeeded")
    assert sum(report["seconds"].values()) == pytest.approx(report["wall_s"])


def test_a_report_is_a_page_of_one_job_or_of_several(backend: fake.FakeBackend, outlast: Outlast, job_file: Path) -> None:
    a_machine_with_jobs(backend, outlast, job_file, "one", "two")
    output = Path(backend.output("one"))
    output.mkdir(exist_ok=True)
    (output / "metrics.jsonl").write_text('{"step": 20, "loss": 0.25}\n')
    (output / "job.yaml").write_text("kind: ElasticJob # of one\n")
    code, page, err = outlast(backend, "report", "one", "-o", "html")
    assert (code, err, page.splitlines()[0]) == (0, "", "<!doctype html>")
    assert all(words in page for words in ("<h2>loss</h2>", "kind: ElasticJob # of one", "<dd>Succeeded</dd>"))
    assert "<h2>Time to train</h2>" in outlast(backend, "report", "one", "two", "-o", "html")[1]


def test_several_jobs_are_compared_as_a_table_and_as_json(backend, outlast, job_file, tmp_path) -> None:
    a_machine_with_jobs(backend, outlast, job_file, "one", "two")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "metrics.jsonl").write_text('{"step": 20, "loss": 0.25}\n')
    code, out, _ = outlast(backend, "report", "one", "two")
    assert (code, out.splitlines()[0].split()[:4], [line.split()[0] for line in out.splitlines()[1:]]) == (
        *(0, ["NAME", "STATE", "WORKERS", "TIME"]),
        ["one", "two"],
    )
    first, second = json.loads(outlast(backend, "report", "one", "two", "-o", "json")[1])
    assert (first["speedup"], first["loss"], second["loss"]) == (1.0, None, 0.25)


def test_the_module_evaluates_and_its_exit_code_is_ours(backend: fake.FakeBackend, outlast: Outlast, job_file: Path) -> None:
    a_machine_with_jobs(backend, outlast, job_file, "one")
    assert outlast(backend, "evaluate")[0] == 3
    assert outlast(backend, "evaluate", "one", "--", "--batch=5", "x")[0] == 3
    assert outlast(backend, "evaluate", "--", "--batch=5")[0] == 3
    assert backend.evaluated == [("one", []), ("one", ["--batch=5", "x"]), ("one", ["--batch=5"])]
    backend.evaluated.clear()
    assert outlast(backend, "evaluate", "one", "--best", "--", "--batch=5")[0] == 3
    assert outlast(backend, "evaluate", "--step", "1200")[0] == 3
    assert backend.evaluated == [("one", ["--checkpoint=best", "--batch=5"]), ("one", ["--checkpoint=1200"])]
    assert "the best checkpoint and that of step 3 are two" in outlast(backend, "evaluate", "--best", "--step", "3")[2]


# The rest


def test_validate_says_what_is_wrong(backend: fake.FakeBackend, outlast: Outlast, job_file: Path) -> None:
    code, out, err = outlast(backend, "validate", job_file)
    assert (code, out.splitlines()[0], err) == (0, "job: ok (2 workers, 2–4)", "")
    job_file.write_text(JOB.replace("max: 4", "max: 1"))
    code, out, err = outlast(backend, "validate", job_file)
    assert (code, out) == (2, "")
    assert err.startswith(f"{job_file}:6: workers.replicas (2) is above workers.max (1)")
    assert json.loads(outlast(backend, "validate", "--schema")[1])["properties"]["kind"]
    assert outlast(backend, "validate")[0] == 2


def test_a_job_that_does_not_train_has_no_rate_and_a_script_without_steps_has_none() -> None:
    ranks = [RankStatus(rank=0, local_rank=0), RankStatus(rank=1, local_rank=1, step=7)]
    page = status_page.page(a_status(state=State.SUSPENDED, workers=[WorkerStatus(index=0, pid=5, ranks=ranks)]), 1600.0)
    assert "step        40/100\n" in page
    assert "5    0 1:7 " in page


def test_a_log_that_there_is_not_is_named_with_those_that_there_are(tmp_path: Path) -> None:
    machine = local.LocalBackend(tmp_path)
    state_dir = machine.state_dir("job")
    state_dir.path.mkdir(parents=True)
    Run("r", 0.0, "job.yaml", str(tmp_path / "out"), str(tmp_path)).write(state_dir)
    with pytest.raises(NotFound, match="job has no log of worker 9; no worker has started"):
        list(machine.logs("job", worker=9))
    (tmp_path / "out" / "logs").mkdir(parents=True)
    (tmp_path / "out" / "logs" / "worker-0.log").write_text("a\n")
    with pytest.raises(NotFound, match="job has no log of worker 9; there are logs of 0"):
        list(machine.logs("job", worker=9))
    said: list[str] = []
    assert list(machine.logs("job", worker=0, say=said.append)) == list(machine.logs("job", say=said.append)) == [LogLine(0, "a")]
    assert said == []
    (tmp_path / "out" / "logs" / "worker-1.log").write_text("b\n")
    assert list(machine.logs("job", say=said.append)) == [LogLine(0, "a"), LogLine(1, "b")]
    assert said == ["existing lines come one worker after the other, since log lines on this machine have no times"]


def test_the_exit_code_says_how_a_run_ended() -> None:
    codes = {State.SUCCEEDED: 0, State.INTERRUPTED: 75, State.SUSPENDED: 75, State.FAILED: 1}
    assert {state: run_view.exit_code(a_status(state=state)) for state in codes} == codes
    assert run_view.exit_code(a_status(state=State.FAILED, exit_code=78)) == 78


PAGE = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "guide" / "commands.py"))


def test_every_command_has_help_with_examples() -> None:
    assert {"run", "status", "checkpoints verify", "data get"} <= set(PAGE["commands"]())
    for command in PAGE["commands"]():
        assert f"  Examples:\n    outlast {command}" in PAGE["help_of"](command)


def test_each_command_stands_in_one_group_of_the_help() -> None:
    grouped = [name for names in commands.GROUPS.values() for name in names]
    visible = [name for name, command in commands.command().commands.items() if not command.hidden]
    assert sorted(grouped) == sorted(visible)
    page = PAGE["help_of"]("")
    words = [word for heading, names in commands.GROUPS.items() for word in (f"\n{heading}:\n", *(f"\n  {n} " for n in names))]
    assert [page.index(word) for word in words] == sorted(page.index(word) for word in words), "in the order of the groups"
