"""Workers as pods run them: no launcher, the agent of worker 0 decides, and the record of the run is in its output."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import urllib.request
from pathlib import Path

import pytest
import torch

from bare_pods import ARGS, Final, Pods
from outlast.job import contract
from outlast.job.workerfiles import progress_file
from outlast.storage import store
from servers import Place


def steps(pods: Pods) -> list[int]:
    return [json.loads(line)["step"] for line in (pods.output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_pod_that_is_lost_comes_back_and_the_weights_are_those_of_the_undisturbed_run(victim, pods, undisturbed: Final):
    two = pods(args=ARGS)
    two.start(0, 1)
    two.wait(lambda: two.step() >= 25, "step 25")
    two.kill(victim)
    two.start(victim)
    assert two.codes() == {0: 0, 1: 0}
    assert two.final() == undisturbed(ARGS, 2)
    assert (two.record().state, two.record().exit_code) == ("Succeeded", 0)
    log = (two.output / "logs" / f"worker-{1 - victim}.log").read_text()
    assert log.endswith(f"outlast | worker {1 - victim}: training is done (exit 0)\n")
    assert log == two.log(1 - victim)


@pytest.mark.slow
def test_a_pod_that_is_told_to_leave_has_everybody_save_and_no_step_is_lost(pods, undisturbed: Final):
    two = pods(args=ARGS)
    two.start(0, 1)
    two.wait(lambda: two.step() >= 25, "step 25")
    two.running[1].terminate()
    assert two.running.pop(1).wait(60) == contract.Exit.INTERRUPTED
    two.start(1)
    assert two.codes() == {0: 0, 1: 0}
    assert two.final() == undisturbed(ARGS, 2)
    assert steps(two) == list(range(1, 61))


@pytest.mark.slow
def test_a_training_that_fails_is_given_up_by_all_pods_and_goes_on_when_it_is_submitted_again(pods, undisturbed: Final):
    two = pods(args=("--fail-at=15",), restarts={"limit": 1})
    two.start(0, 1)
    assert two.codes(hurry=False) == {0: contract.Exit.GIVEN_UP, 1: contract.Exit.GIVEN_UP}
    assert two.record().state == "Failed"
    assert "restarts.limit (1 within" in two.log(1)
    two.start(1)
    assert two.running[1].wait(60) == contract.Exit.GIVEN_UP
    assert "has ended before (Failed:" in two.log(1)
    two.mend("--fail-at=15", "--steps=60")
    two.start(0, 1, **{contract.Env.RUN: "job-mended00"})
    assert two.codes() == {0: 0, 1: 0}
    assert (two.record().run, two.record().owner, two.record().state) == ("job-1a2b3c4d", "job-mended00", "Succeeded")
    assert two.final() == undisturbed(("--steps=60",), 2)
    assert steps(two) == list(range(1, 61))


@pytest.mark.slow
def test_who_is_done_stays_up_where_pods_are_always_started_again_and_never_trains_again(pods):
    one = pods(args=ARGS[:-1], workers={"replicas": 1})
    one.start(0, **{contract.Env.STAY: "1"})
    one.wait(lambda: "stays up and does nothing more" in one.log(0), "the end")
    probes = json.loads((one.directory / "state-0" / contract.WORKER).read_text())["probes"].rpartition(":")[2]
    assert urllib.request.urlopen(f"http://127.0.0.1:{probes}/healthz", timeout=60).status == 200
    assert b'outlast_done{job="job",worker="0"} 1' in urllib.request.urlopen(f"http://127.0.0.1:{probes}/metrics").read()
    one.running[0].terminate()
    assert one.running.pop(0).wait(60) == 0
    one.start(0, **{contract.Env.STAY: "1"})
    one.wait(lambda: one.log(0).count("stays up and does nothing more") == 2, "the second end")
    assert one.log(0).count("has ended before (Succeeded:") == 1


@pytest.mark.slow
def test_a_changed_job_goes_on_with_the_run_and_the_one_before_it_takes_nothing_back(pods, undisturbed: Final):
    one = pods(args=ARGS, workers={"replicas": 1})
    one.start(0)
    one.wait(lambda: one.step() >= 25, "step 25")
    one.running[0].terminate()
    assert one.running.pop(0).wait(60) == contract.Exit.INTERRUPTED
    one.start(0, **{contract.Env.RUN: "job-changed0"})
    one.wait(lambda: one.step() >= 40, "step 40")
    one.kill(0)
    one.start(0)
    assert one.running.pop(0).wait(60) == contract.Exit.MISCONFIGURED
    assert "belongs to a later version of this job" in one.log(0)
    one.start(0, **{contract.Env.RUN: "job-changed0"})
    assert one.codes() == {0: 0}
    assert (one.record().run, one.record().owner) == ("job-1a2b3c4d", "job-changed0")
    assert one.final() == undisturbed(ARGS, 1)


EXAMPLES = str(Path(__file__).parents[2] / "examples")


def disk(directory: Path, index: int, store_url: str) -> dict[str, str]:
    output = directory / f"disk-{index}"
    paths = {contract.Env.OUTPUT: str(output), contract.Env.LEDGER: str(output / contract.LEDGER)}
    return {**paths, contract.Env.CODE: EXAMPLES, contract.Env.STORE: store_url}


@pytest.mark.slow
def test_a_plain_script_whose_pods_are_lost_with_their_disks_goes_on_with_its_files_from_the_store(
    pods, tmp_path: Path, rclone: Place
):
    args, url = ("--steps=3000", "--pause=0.02", "--save-every=20"), f"{rclone.url}/job"
    two = pods(script="torchrun.py", code=EXAMPLES, args=args, sync={"every": "1s"})

    def pushed() -> bool:
        return "work/checkpoint.pt" in {entry.key for entry in store.open_(url).entries()}

    for index in (0, 1):
        two.start(index, **disk(tmp_path, index, url))
    two.wait(pushed, "a checkpoint in the store")
    for index in (0, 1):
        two.kill(index)
        shutil.rmtree(tmp_path / f"disk-{index}")
        shutil.rmtree(two.directory / f"state-{index}")
    step = torch.load(io.BytesIO(store.open_(url).get("work/checkpoint.pt")))["step"]
    for index in (0, 1):
        two.start(index, **disk(tmp_path, index, url))
    for index in (0, 1):
        two.wait(lambda i=index: f"rank {i} of 2 goes on from step {step}" in two.log(i), f"rank {index} that goes on")
    found = {entry.key for entry in store.open_(url).entries()}
    assert not {key for key in found if key.startswith("work/")} - {"work/checkpoint.pt"}


@pytest.mark.slow
def test_a_plain_script_that_saves_on_rank_0_goes_on_at_one_step_in_all_pods(pods, tmp_path: Path, rclone: Place):
    """Rank 0 stays and is ahead of the store; the other pod is lost with its disk, or stays and never had the file."""
    args, url = ("--steps=400", "--pause=0.02", "--save-every=20"), f"{rclone.url}/job"
    two = pods(script="torchrun.py", code=EXAMPLES, args=args, sync={"every": "1h"})
    for index in (0, 1):
        two.start(index, **disk(tmp_path, index, url))

    def begun(index: int) -> list[str]:
        return re.findall(r"goes on from step (\d+)", two.log(index))

    def process() -> int:
        record = progress_file.read(two.directory / "state-0", 0)
        return record.pid if record else 0

    two.wait(lambda: "step 60/" in two.log(0), "a checkpoint")
    os.kill(process(), signal.SIGKILL)
    two.wait(lambda: len(begun(0)) == len(begun(1)) == 1, "ranks that go on")
    two.kill(1)
    shutil.rmtree(tmp_path / "disk-1")
    shutil.rmtree(two.directory / "state-1")
    two.start(1, **disk(tmp_path, 1, url))
    two.wait(lambda: len(begun(0)) == len(begun(1)) == 2, "ranks that go on with a new pod")
    assert begun(0) == begun(1)
    assert two.codes(hurry=False) == {0: 0, 1: 0}
