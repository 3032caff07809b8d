"""Real jobs whose output is in a store, with real servers: whatever happens to the machine, the run goes on from the store."""

from __future__ import annotations

import json
import re
import shutil
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from faults import Proxy
from outlast import cli
from outlast.base.errors import OutlastError
from outlast.cli import status_page
from outlast.job import contract
from outlast.job.status import JobStatus, State
from outlast.storage import checkpoints, store
from outlast.storage.sync import growing_files
from servers import Place

Final = Callable[..., dict[str, object]]
ARGS = ("--steps=60", "--pause=0.04", "--gate")
LONG = ("--steps=1000", "--pause=0.04", "--gate")


def objects(url: str) -> dict[str, int]:
    return {entry.key: entry.size for entry in store.open_(url).entries()}


def committed(url: str) -> set[int]:
    """The steps whose checkpoints have a COMMIT."""
    found = (re.fullmatch(r"checkpoints/step-(\d+)/.*COMMIT", key) for key in objects(url))
    return {int(match[1]) for match in found if match}


def there(url: str, name: str = "job") -> dict[str, object]:
    return dict(json.loads(store.open_(f"{url}/{name}").get("run.json")))


def one_server(name: str) -> pytest.MarkDecorator:
    """A test that meets this server of the two, and the other one among the slow tests."""
    other = {"moto": "rclone", "rclone": "moto"}[name]
    return pytest.mark.parametrize("s3", [name, pytest.param(other, marks=pytest.mark.slow)], indirect=True)


def grown(place: store.Store, path: str) -> bytes:
    """A growing file as it is in a store."""
    with ThreadPoolExecutor(1) as pool:
        return b"".join(growing_files.pieces(place, path, pool))


def pushed(step: int) -> Callable[[JobStatus], bool]:
    return lambda status: status.store is not None and status.store.step >= step


@pytest.mark.slow
@one_server("moto")
def test_everything_a_run_leaves_is_in_the_store_when_it_ends_and_its_logs_are_read_there(machine, s3: Place, capsys) -> None:
    status = machine.run(machine.job(args=ARGS[:-1], output=f"{s3.url}/runs/"))
    assert (status.state, status.exit_code) == (State.SUCCEEDED, 0), status
    output = machine.backend.output("job")
    found = objects(f"{s3.url}/runs/job")
    place = store.open_(f"{s3.url}/runs/job")
    assert {"job.yaml", "run.json", "final.json"} <= found.keys()
    assert place.get("final.json") == (output / "final.json").read_bytes()
    for path in [*output.glob("logs/*.log"), *output.glob("ledger/*"), output / "metrics.jsonl"]:
        assert grown(place, str(path.relative_to(output))) == path.read_bytes()
    for worker in (0, 1):
        log = grown(place, f"logs/worker-{worker}.log").decode()
        assert log.endswith(f"outlast | worker {worker}: training is done (exit 0)\n")
    here = [checkpoint.step for checkpoint in checkpoints.list_(output / contract.CHECKPOINTS)]
    kept = sorted(committed(f"{s3.url}/runs/job"))
    assert here == [40, 50, 60]
    assert kept[-2:] == [50, 60]
    assert len(kept) <= 3  # training may be ahead of the store: what two newer ones have overtaken is not pushed any more
    assert there(f"{s3.url}/runs")["state"] == "Succeeded"
    assert not [key for key in found if "//" in key or key.startswith(".push/")]
    assert status.store is not None
    assert (status.store.step, status.store.error) == (60, "")
    lines = [(line.worker, line.text) for line in machine.backend.logs("job")]
    shutil.rmtree(output)
    assert [(line.worker, line.text) for line in machine.backend.logs("job")] == lines
    assert [line.worker for line in machine.backend.logs("job", worker=1, tail=1)] == [1]
    for given in (f"{s3.url}/runs/job", str(machine.directory / "job.yaml")):
        with pytest.raises(SystemExit) as ended:
            cli.main(["logs", given, "--worker", "1"])
        assert (ended.value.code, capsys.readouterr().out.splitlines()) == (0, [text for worker, text in lines if worker == 1])


@pytest.mark.slow
@one_server("rclone")
def test_killed_and_its_directory_deleted_a_run_goes_on_elsewhere_bit_for_bit(machine, elsewhere, s3: Place, undisturbed: Final):
    job = machine.job(args=ARGS, output=s3.url)
    name = machine.submit(job)
    step = machine.wait(name, pushed(20)).store.step
    machine.kill_everything()
    shutil.rmtree(machine.directory / "state")
    status = elsewhere.end(elsewhere.submit(job, take_over=True), hurry=True)
    assert status.state is State.SUCCEEDED, status
    events = elsewhere.backend.events(name)
    restored = [event["step"] for event in events if event["kind"] == "restored"]
    assert restored[-1] >= step
    assert len({event["run"] for event in events if event["kind"] == "submitted"}) == 1
    log = "\n".join(line.text for line in elsewhere.backend.logs(name))
    assert f"fetching the checkpoint of step {restored[-1]}" in log
    assert elsewhere.final(name) == undisturbed(ARGS, 2)


@pytest.mark.slow
def test_a_run_that_failed_is_mended_on_another_machine_and_goes_on_bit_for_bit(
    machine, elsewhere, moto: Place, undisturbed: Final
):
    fields = {"output": moto.url, "restarts": {"limit": 0}}
    failed = machine.run(machine.job(args=("--steps=40", "--pause=0.04", "--fail-at=23"), **fields))
    assert (failed.state, there(moto.url)["state"]) == (State.FAILED, "Failed")
    assert "a bug at step 23" in grown(store.open_(f"{moto.url}/job"), "logs/worker-1.log").decode()
    status = elsewhere.run(elsewhere.job(args=("--steps=40", "--pause=0.04"), **fields))
    assert (status.state, status.run, status.restarts) == (State.SUCCEEDED, failed.run, 0), status
    goes_on, changed = elsewhere.backend.notices[:2]
    assert goes_on == f"goes on from step 20 of the run in {moto.url}/job that failed; --fresh starts anew"
    assert changed == "changed since: args: --fail-at=23 → nothing"
    restored = [event["step"] for event in elsewhere.backend.events("job") if event["kind"] == "restored"]
    assert (restored[0], restored[-1]) == (0, 20)
    assert elsewhere.final("job") == undisturbed(("--steps=40", "--pause=0.04"), 2)


@pytest.mark.slow
def test_a_store_that_goes_away_costs_nothing_and_gets_everything_later(
    machine, rclone_proxy: Proxy, undisturbed: Final, monkeypatch
):
    monkeypatch.setenv("OUTLAST_STORE_TIMEOUT", "1")
    name = machine.submit(machine.job(args=LONG, output=rclone_proxy.url, sync={"every": "1s"}))
    machine.wait(name, pushed(10))
    rclone_proxy.down()
    away = machine.wait(name, lambda s: s.store is not None and s.store.since is not None and s.store.backlog > 0)
    assert away.state is State.RUNNING
    assert away.store.error
    probes = [worker.probes for worker in away.workers if worker.probes]
    assert [urllib.request.urlopen(f"http://{probe}/healthz", timeout=60).status for probe in probes] == [200, 200]
    metrics = "\n".join(urllib.request.urlopen(f"http://{probe}/metrics", timeout=60).read().decode() for probe in probes)
    failing = re.search(r"^outlast_sync_failing_seconds\{.*\} ([\d.]+)$", metrics, re.MULTILINE)
    assert failing
    assert float(failing[1]) > 0
    assert "fails since" in status_page.in_store(away.store, time.time())
    step = away.step
    machine.wait(name, lambda s: s.step > step + 5)
    rclone_proxy.up()
    machine.wait(name, lambda s: s.store is not None and s.store.since is None)
    status = machine.end(name, hurry=True)
    assert status.state is State.SUCCEEDED
    assert machine.final(name) == undisturbed(LONG, 2)
    assert 1000 in committed(f"{rclone_proxy.url}/job")


@pytest.mark.slow
def test_what_a_killed_run_could_not_push_is_pushed_by_its_next_start(machine, rclone_proxy: Proxy, monkeypatch):
    monkeypatch.setenv("OUTLAST_STORE_TIMEOUT", "1")
    job = machine.job(args=ARGS, output=rclone_proxy.url)
    name = machine.submit(job)
    machine.wait(name, pushed(10))
    machine.kill_everything()
    here = checkpoints.list_(machine.backend.output(name) / contract.CHECKPOINTS)[-1].step
    rclone_proxy.down()
    with pytest.raises(OutlastError, match=r"connection was (refused|lost)"):
        machine.submit(job)
    rclone_proxy.up()
    status = machine.end(machine.submit(job), hurry=True)
    assert status.state is State.SUCCEEDED
    restored = [event["step"] for event in machine.backend.events(name) if event["kind"] == "restored"]
    assert restored[-1] >= here
    assert 60 in committed(f"{rclone_proxy.url}/job")


@pytest.mark.slow
def test_a_zombie_is_ended_when_its_run_has_gone_on_elsewhere(machine, elsewhere, moto: Place):
    job = machine.job(args=("--steps=400", "--pause=0.05", "--gate"), output=moto.url)
    name = machine.submit(job)
    machine.wait(name, pushed(10))
    elsewhere.submit(job, take_over=True)
    elsewhere.wait(name, lambda s: s.generation > 1 and pushed(20)(s))
    zombie = machine.end(name)
    assert (zombie.state, zombie.exit_code) == (State.INTERRUPTED, 75)
    assert "elsewhere" in zombie.reason or "generation" in zombie.reason
    step = elsewhere.backend.status(name).step
    elsewhere.wait(name, lambda s: s.step > step)
    # and back again: who takes the run up last goes on with it
    step = elsewhere.backend.status(name).store.step
    machine.submit(job, take_over=True)
    machine.wait(name, lambda s: s.step > step + 5)
    assert elsewhere.end(name).state is State.INTERRUPTED
    lines = [json.loads(line)["step"] for line in (machine.backend.output(name) / "metrics.jsonl").read_text().splitlines()]
    assert lines[: lines[-1]] == list(range(1, lines[-1] + 1))
