"""The agent's own loop on clocks that are set and stand still. Nothing is started: there is no warm process."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import prometheus_text
from clocks import DISTURBANCES, Machine
from outlast.base.clock import STEP_S
from outlast.base.errors import OutlastError
from outlast.job import contract, prometheus_metrics, spec
from outlast.job.workerfiles import notice_file, progress_file
from outlast.job.workerfiles.progress_file import Progress
from outlast.rendezvous.membership import Membership, RunClosed
from outlast.rendezvous.messages import Closed
from outlast.worker.agent import lifecycle
from outlast.worker.agent.agent import Agent
from outlast.worker.agent.lifecycle import Phase
from outlast.worker.agent.nvml import Gpus
from outlast.worker.agent.ranks import Ranks
from outlast.worker.agent.upload_supervisor import UploadProcess
from outlast.worker.hangs import hang_limit
from outlast.worker.launch import warm_request, warm_supervisor
from waits import until

GRACE_S = 75


class Bench:
    """An agent whose training runs, and its machine."""

    def __init__(self, directory: Path) -> None:
        self.machine = Machine()
        self.state = directory / "state"
        self.state.mkdir()
        document = {"apiVersion": contract.API_VERSION, "kind": contract.KIND, "metadata": {"name": "job"}}
        job = spec.parse(json.dumps({**document, "spec": {"script": "train.py"}}))
        environ = {
            contract.Env.WORKER: "0",
            contract.Env.STATE: str(self.state),
            contract.Env.OUTPUT: str(directory / "output"),
            contract.Env.NOTICE: str(self.state / contract.NOTICE),
            contract.Env.RENDEZVOUS: f"unix://{directory}/launcher.sock",
        }
        self.agent = Agent(None, job, environ, cast(Any, SimpleNamespace(written=0)), self.machine.awake())
        self.agent.worker = lifecycle.Worker(Phase.TRAINING)
        self.writer = progress_file.Writer(self.state, 0)
        self.writer.write(Progress(generation=1, rank=0, phase="train", step=3))

    def looks(self) -> list[lifecycle.Event]:
        """What follows from a look."""
        self.agent._look()
        found = []
        while not self.agent._events.empty():
            found.append(self.agent._events.get())
        return found

    def disturbed(self, how: str) -> None:
        monotonic, wall = DISTURBANCES[how]
        self.machine.goes_on(monotonic, wall=wall)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.writer.close()


@pytest.mark.parametrize("how", DISTURBANCES)
def test_training_that_was_told_to_leave_has_its_grace_whatever_the_clocks_do(bench: Bench, how: str) -> None:
    bench.agent._happened(lifecycle.Interrupted("received SIGTERM", bench.agent.clock(), GRACE_S))
    assert notice_file.read(bench.state / contract.NOTICE)["kind"] == "leave"
    bench.disturbed(how)
    assert bench.looks() == []
    assert bench.agent._flush_timeout_s() >= GRACE_S - 2 * STEP_S, "and what is left of it for the push"
    found = []
    for _ in range(GRACE_S + 2):
        bench.machine.goes_on(STEP_S)
        found.append(bench.looks())
    assert not any(found[: GRACE_S - 1])
    assert [event for each in found for event in each] == [lifecycle.GraceOver()], "once"


@pytest.mark.parametrize(
    ("left_s", "save_s", "upload_s"),
    [(15.0, 3.0, 2.0), (15.0, 7.0, 4.0), (120.0, 60.0, 20.0), (600.0, 60.0, 20.0), (None, 40.0, 20.0)],
)
def test_with_any_notice_there_is_time_to_save_and_to_upload(
    bench: Bench, left_s: float | None, save_s: float, upload_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, began = bench.agent, bench.agent.clock()
    monkeypatch.setattr(time, "time", lambda: bench.machine.wall)
    agent._store = "s3://bucket/runs"
    agent._upload.received({"pushed": 1.0, "since": None, "backlog": 0, "step": 3, "seconds": upload_s})
    if left_s is None:
        agent._happened(lifecycle.Interrupted("received SIGTERM", began, GRACE_S))
    else:
        agent._leave_until(time.time() + left_s, "told to leave: spot")
        for event in bench.looks():
            agent._happened(event)
        assert bench.looks() == [], "once"
    assert agent.worker.leaving == ("received SIGTERM" if left_s is None else "told to leave: spot")
    told = notice_file.read(bench.state / contract.NOTICE)
    assert told["deadline"] - time.time() >= save_s, "the training saves"
    assert agent.worker.leave_by is not None
    assert agent.worker.leave_by - began <= min(GRACE_S, left_s or GRACE_S), "and is a member for the grace at most"
    for _ in range(int(save_s)):
        bench.machine.goes_on(1.0)
        assert bench.looks() == [], "and is not killed meanwhile"
    agent.worker = dataclasses.replace(agent.worker, code=75)
    assert upload_s <= agent._flush_timeout_s() < (left_s or 1000.0) - save_s, "and the upload ends before the machine does"


@pytest.mark.parametrize(
    ("code", "uploaded", "rank", "recorded"),
    [(0, 0, 0, ["Succeeded"]), (0, 1, 0, []), (0, 0, 2, []), (79, 0, 2, ["Failed"])],
)
def test_a_run_has_succeeded_once_the_worker_of_rank_0_has_uploaded_its_results(
    bench: Bench, code: int, uploaded: int, rank: int, recorded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, found = bench.agent, []
    agent._store, agent.environ[contract.Env.OWNER] = "s3://bucket/runs", "me"
    agent._log = cast(Any, SimpleNamespace(drain=lambda: None))
    agent.coordination.operator_ended_run(Closed("the job is over", code))
    bench.writer.write(Progress(generation=1, rank=rank, phase="train", step=3))
    agent.worker = dataclasses.replace(agent.worker, code=code)
    monkeypatch.setattr(agent.coordination, "finished", lambda state, *_: found.append(state))
    monkeypatch.setattr(agent._upload, "flush", lambda *_, **__: found.append("uploaded") or (uploaded, "no store"))
    agent._begin_flush()
    assert isinstance(agent._events.get(timeout=10), lifecycle.Flushed)
    assert found == (["uploaded", *recorded] if code == 0 else [*recorded, "uploaded"])


@pytest.fixture
def handle(tmp_path: Path) -> Iterator[warm_supervisor.WarmProcess]:
    handle = warm_supervisor.WarmProcess({contract.Env.STATE: str(tmp_path)})
    yield handle
    handle.kill()
    handle.wait()


LISTENS = "import socket, sys, time; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); time.sleep(60)"


@pytest.mark.parametrize(("death", "code"), [("kill -9 $$", 137), ("exit 1", 1), ("", 137)])
def test_a_warm_process_that_dies_is_started_again_if_it_could_fork_before(
    handle: warm_supervisor.WarmProcess,
    tmp_path: Path,
    death: str,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def die(process: Any) -> None:
        process.kill()
        process.wait()

    commands = [["sh", "-c", death]] if death else [["/no/such/program"]]

    def start(_python: str, _environ: dict[str, str]) -> subprocess.Popen[bytes]:
        (tmp_path / warm_request.SOCKET).unlink(missing_ok=True)
        return subprocess.Popen(commands[0])

    monkeypatch.setattr("outlast.worker.launch.sibling.start_warm", start)
    with pytest.raises(warm_supervisor.WarmEnded) as ended:
        handle.wait_until_ready("python")
    assert ended.value.code == code
    how = {"": "could not be started: No such file or directory", "exit 1": "exited with code 1"}
    assert capsys.readouterr().out == f"outlast | the warm process {how.get(death, 'was killed by SIGKILL')}\n"
    commands[0] = [sys.executable, "-c", LISTENS, str(tmp_path / warm_request.SOCKET)]
    assert handle.wait_until_ready("python")
    assert handle._process
    first = handle._process
    die(first)
    assert handle.wait_until_ready("python")
    assert handle._process is not first
    die(handle._process)
    monkeypatch.setattr(warm_supervisor, "PAUSE_S", 0.0)
    commands[0] = ["sh", "-c", "exit 1"]
    with pytest.raises(warm_supervisor.WarmEnded):
        handle.wait_until_ready("python")
    assert capsys.readouterr().out.count("exited with code 1") == warm_supervisor.RESTARTS, "and gives up after a while"


def test_a_killed_warm_process_is_never_started_again(
    handle: warm_supervisor.WarmProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outlast.worker.launch.sibling.start_warm", lambda *_: pytest.fail("started"))
    handle.kill()
    handle.start("python")
    assert not handle.wait_until_ready("python")


def test_a_warm_process_that_is_stopped_goes_on_at_the_next_look(bench: Bench) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        bench.agent._warm._process = process
        process.send_signal(signal.SIGSTOP)
        until(lambda: progress_file.kernel(process.pid)[0] == "T")
        bench.looks()
        until(lambda: progress_file.kernel(process.pid)[0] == "S")
        process.kill()


@pytest.mark.parametrize("problem", [ValueError("a bug"), OutlastError("no endpoint")])
def test_a_bug_in_the_world_loop_ends_the_worker_and_a_mistake_is_told_in_a_sentence(
    bench: Bench, problem: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **_more: object) -> None:
        raise problem

    monkeypatch.setattr("outlast.worker.agent.world_loop.WorldLoop", fail)
    bench.agent.environ[contract.Env.CODE] = "."
    bench.agent._train()
    mistake = isinstance(problem, OutlastError)
    assert bench.looks() == [lifecycle.Trained(contract.Exit.MISCONFIGURED if mistake else contract.Exit.FAILED)]
    assert ("Traceback" in capsys.readouterr().err) != mistake


@pytest.mark.parametrize(
    ("rendezvous", "generation", "workers", "waits"),
    [
        ("kubernetes://job", "0", {"replicas": 2, "min": 1}, False),  # nobody has trained yet
        ("kubernetes://job", "3", {"replicas": 2, "min": 1}, True),
        ("kubernetes://job", "3", {"replicas": 2, "min": 2, "max": 4}, False),
        ("kubernetes://job", "3", {"replicas": 2}, False),
        ("unix://launcher.sock", "0", {"replicas": 2}, True),
    ],
)
def test_a_worker_reports_before_its_ranks_can_start_where_nobody_can_train_without_it(
    bench: Bench, rendezvous: str, generation: str, workers: dict[str, int], waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, done = bench.agent, list[str]()
    document = {"apiVersion": contract.API_VERSION, "kind": contract.KIND, "metadata": {"name": "job"}}
    agent.job = spec.parse(json.dumps({**document, "spec": {"script": "train.py", "workers": workers}}))
    own = {contract.Env.RENDEZVOUS: rendezvous, contract.Env.GENERATION: generation, contract.Env.RUN: "r"}
    agent.environ |= {**own, contract.Env.CODE: ".", contract.Env.MEMBER: "uid"}

    def next_world(_self: Membership, _connect: object) -> None:
        done.append("reported")
        raise RunClosed("over")

    monkeypatch.setattr(agent._warm, "wait_until_ready", lambda *_: done.append("warm"))
    monkeypatch.setattr(Membership, "next_world", next_world)
    agent._train()
    assert done == (["warm"] if waits else []) + ["reported"]


def test_an_agent_that_cannot_coordinate_any_more_ends_and_launches_nothing(bench: Bench) -> None:
    bench.agent._coordination_broke("the rendezvous has failed")
    (broken,) = bench.looks()
    bench.agent._happened(broken)
    assert (bench.agent.worker.phase, bench.agent.worker.code) == (Phase.FLUSHING, 137)


@pytest.mark.parametrize("how", DISTURBANCES)
def test_probes_call_no_training_stuck_for_a_pause_and_no_age_is_negative(bench: Bench, how: str) -> None:
    bench.agent._upload.received({"pushed": 999_999.0, "since": 999_999.0, "backlog": 0, "step": 3})
    bench.looks()
    bench.disturbed(how)
    bench.looks()
    assert bench.agent.reporter.health.healthy
    ages = {name: value for name, value in bench.agent.reporter.metrics.items() if name.endswith("_seconds")}
    assert sorted(ages) == ["sync_age_seconds", "sync_failing_seconds", "worker_progress_age_seconds"]
    assert all(0 <= value < 10 for value in ages.values())


NVML = """
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) { *device = (void *)(1ul + index); return index == 2 ? 15 : 0; }
int nvmlDeviceGetUtilizationRates(void *device, unsigned *rates) { rates[0] = 25; return device == (void *)1 ? 0 : 3; }
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *memory)
{ memory[0] = 85899345920ull; memory[1] = 1; memory[2] = 7 * (unsigned long long)device; return 0; }
"""


def test_prometheus_reads_what_the_table_names_from_an_agent(bench: Bench, tmp_path: Path) -> None:
    """Beside an NVML of three GPUs, of which one is a part of a GPU, and one is lost."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("there is no C compiler for an NVML")
    (tmp_path / "nvml.c").write_text(NVML)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", tmp_path / "nvml.so", tmp_path / "nvml.c"], check=True)
    agent = bench.agent
    agent.reporter._gpus = Gpus(str(tmp_path / "nvml.so"))
    agent._upload.received(
        {"pushed": 1.0, "since": None, "backlog": 5, "step": 3, "seconds": 2.0, "uploads": 2, "uploads_s": 4.5}
    )
    saves = {
        "own_s": 0.25,
        "slow": 0.2,
        "differs": 7,
        "stalls": 2,
        "stalled_s": 0.5,
        "saves": 1,
        "saved_s": 3.0,
        "snapshot": 12_345_670,
        "every": 4,
    }
    for step in (12_345_677, 12_345_678):
        bench.writer.write(Progress(1, 0, "train", step, 20_000_000, 12_345_600, waited_s=0.1 + 0.2, **saves))
    bench.looks()
    families = prometheus_text.scrape(agent.reporter.probes)
    prometheus_text.check(families, prometheus_metrics.WORKER, missing=("outlast_step_logged", "outlast_done", "outlast_failed"))
    samples = {
        (each.name, *((name, value) for name, value in each.labels.items() if name not in ("job", "worker"))): each.value
        for family in families
        for each in family.samples
    }
    told = {
        ("outlast_step",): 12_345_678,
        ("outlast_snapshot_age_steps",): 8,
        ("outlast_data_stall_seconds_total", ("rank", "0")): 0.1 + 0.2,
        ("outlast_own_step_seconds", ("rank", "0")): 0.25,
        ("outlast_slow_ratio", ("rank", "0")): 0.2,
        ("outlast_differing_step", ("rank", "0")): 7,
        ("outlast_checkpoint_stall_seconds_sum", ("rank", "0")): 0.5,
        ("outlast_checkpoint_stall_seconds_count", ("rank", "0")): 2,
        ("outlast_checkpoint_save_seconds_sum", ("rank", "0")): 3,
        ("outlast_checkpoint_upload_seconds_sum",): 4.5,
        ("outlast_gpu_use_ratio", ("gpu", "0")): 0.25,
        ("outlast_gpu_memory_used_bytes", ("gpu", "0")): 7,
        ("outlast_gpu_memory_used_bytes", ("gpu", "1")): 14,
        ("outlast_gpu_memory_bytes", ("gpu", "1")): 80 << 30,
    }
    assert {name: samples.get(name) for name in told} == told
    assert len([name for name in samples if name[0].startswith("outlast_gpu")]) == 5, "a part has no use, and none is made up"
    agent.reporter.stays("it is over", "", done=True)
    assert {each.name for each in prometheus_text.scrape(agent.reporter.probes)} > {"outlast_done", "outlast_failed"}


def test_a_number_has_all_its_digits_and_a_label_no_quotes() -> None:
    text = prometheus_metrics.exposition([("step", {}, 12_345_678.0)], {"job": 'a "job"\\\n'})
    assert text.splitlines()[-1] == r'outlast_step{job="a \"job\"\\\n"} 12345678'


def test_an_agent_says_where_its_processes_stand_still(bench: Bench) -> None:
    beat = progress_file.Beat(bench.state, 0)
    said = []
    for _ in range(40):
        beat.write(False, "rank 0 is in lock.acquire() (train.py:9)")
        bench.machine.goes_on(1.0)
        bench.looks()
        said.append(json.loads((bench.state / contract.WORKER).read_text())["still"])
    assert (said[0], said[-1]) == ("", "rank 0 is in lock.acquire() (train.py:9)")
    beat.write(True, "")
    bench.looks()
    assert json.loads((bench.state / contract.WORKER).read_text())["still"] == ""


def test_a_store_that_fails_does_so_since_we_heard_of_it_and_not_since_somebody_asked(bench: Bench) -> None:
    bench.agent._upload.received({"pushed": None, "since": 1.0, "backlog": 5, "step": 3})
    assert bench.agent._upload.metrics()["sync_failing_seconds"] > 0


REPORTS, LOOKS = "it reports", "we look"
EVENTS = st.lists(st.sampled_from([REPORTS, LOOKS, LOOKS, LOOKS, *DISTURBANCES]), max_size=40)
LIMIT_S = 10.0


@settings(max_examples=settings.default.max_examples // 2)
@given(EVENTS)
def test_a_process_hangs_when_it_was_silent_for_as_long_as_its_agent_watched_and_only_then(events: list[str]) -> None:
    machine, pid = Machine(), os.getpid()
    with tempfile.TemporaryDirectory() as directory:
        ranks, step = Ranks(Path(directory), 1, machine.awake()), 0
        file = Path(directory) / contract.PROGRESS.format(local_rank=0)
        started = progress_file.kernel(pid)[1]
        watched = 0.0

        def report() -> None:
            record = Progress(generation=1, rank=0, phase="train", step=step, pid=pid, started=started, time=machine.wall)
            file.write_text(json.dumps(dataclasses.asdict(record)))

        report()
        ranks.look()
        for event in events:
            if event == REPORTS:
                step, watched = step + 1, 0.0
                report()
                ranks.look()
            elif event == LOOKS:
                machine.goes_on(STEP_S)
                watched += STEP_S
                hang = hang_limit.hung(ranks.look(), LIMIT_S)
                assert bool(hang) == (watched > hang_limit.OTHERS_FIRST * LIMIT_S)
            else:
                monotonic, wall = DISTURBANCES[event]
                machine.goes_on(monotonic, wall=wall)
                ranks.look()
                watched += min(monotonic, STEP_S)


class Uploads(UploadProcess):
    """Counts the upload processes that it starts; these do nothing."""

    started = 0

    def _start(self, *args: str) -> subprocess.Popen[bytes]:
        self.started += 1
        return subprocess.Popen(["cat"], stdin=subprocess.PIPE)


@pytest.mark.parametrize(
    ("phase", "age_s", "waited_s", "wanted", "begins"),
    [
        ("restore", 0.1, 0.0, False, False),
        ("train", 0.1, 0.0, False, True),
        ("started", 2.1, 0.0, False, True),  # a plain script says no more
        ("", 0.0, 29.0, False, False),
        ("", 0.0, 31.0, False, True),  # there is no world, but there are logs
        ("", 0.0, 0.0, True, True),
    ],
)
def test_the_first_upload_begins_after_the_first_step_or_when_training_takes_long_to_begin(
    tmp_path: Path, phase: str, age_s: float, waited_s: float, wanted: bool, begins: bool
) -> None:
    now = [100.0]
    uploads = Uploads({contract.Env.OUTPUT: str(tmp_path)}, clock=lambda: now[0])
    assert not uploads.ensure_running()
    assert uploads.started == 0
    now[0] += waited_s
    if wanted:
        (tmp_path / ".push").mkdir()
        (tmp_path / ".push" / "wanted").write_text("3")
    processes = [hang_limit.Process(0, Progress(generation=1, rank=0, phase=phase), False, 0.0, age_s=age_s)] if phase else []
    uploads.ensure_running(processes)
    assert uploads.started == begins
    uploads.ensure_running()
    assert uploads.started == begins, "one at a time"
    uploads.stop()
