"""A stored job that asks for an etcd is run like any other. All is real but the API server, the kubelet and the network: the
operator is a process, and so are the agents and their training."""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable

import pytest

import imds
import processes
import prometheus_text
import waits
from imds import Imds
from kubelets import Operated
from outlast.job import contract
from outlast.kubernetes import api as kube
from outlast.kubernetes.api import kinds, pod_status
from outlast.kubernetes.nodewatch.metadata import Metadata
from outlast.kubernetes.nodewatch.node_watcher import Watcher
from outlast.storage import checkpoints
from servers import Place

ARGS = ("--steps=150", "--pause=0.04", "--gate")
Final = Callable[..., dict[str, object]]


@pytest.mark.slow
def test_rank_0_and_the_operator_are_killed_and_the_weights_are_those_of_the_undisturbed_run(
    operated: Operated, undisturbed: Final
) -> None:
    operated.submit(workers={"replicas": 2, "min": 2}, args=[*ARGS])
    operated.trains(2, beyond=5)
    operated.api.well = False
    operated.api.cut()
    operated.until(lambda: operated.steps[-1] > 25, "step 25 without an API server")
    operated.api.well = True
    assert operated.operator
    processes.kill(operated.operator)
    operated.lose(0)  # rank 0
    operated.operate()
    operated.trains(2, beyond=60)
    (operated.directory / "out/train/hurry").touch()
    operated.until(lambda: operated.status["state"] == "Succeeded", "the end")
    assert (operated.status["restarts"], operated.status["lastFailure"]["reason"]) == (1, "worker 0 was killed (exit code 137)")
    assert operated.final() == undisturbed(ARGS, 2)
    assert (operated.record.state, operated.record.exit_code) == ("Succeeded", 0)


@pytest.mark.slow
def test_workers_come_and_go_as_is_wanted_and_no_step_is_lost(operated: Operated) -> None:
    operated.submit(workers={"replicas": 2, "min": 1, "max": 4}, args=["--steps=1000000", "--pause=0.04"])
    operated.trains(2, beyond=10)
    for wanted in (3, 1):
        operated.change(replicas=wanted)
        operated.trains(wanted, beyond=operated.steps[-1])
        operated.trains(wanted, beyond=operated.steps[-1] + 5)
    steps = operated.steps
    assert steps == list(range(1, len(steps) + 1))
    assert (operated.status["restarts"], operated.status.get("interruptions", 0)) == (0, 0)


@pytest.mark.slow
def test_the_end_that_the_operator_decides_ends_all_and_is_recorded_by_whoever_is_there(operated: Operated) -> None:
    operated.submit(workers={"replicas": 2, "min": 2}, args=[*ARGS], restarts={"limit": 0})
    operated.trains(2, beyond=5)
    operated.lose(0)  # rank 0
    operated.until(lambda: not operated.kubelet.running, "the end of the pods")
    assert (operated.record.state, operated.record.exit_code) == ("Failed", contract.Exit.GIVEN_UP)
    assert operated.record.reason == operated.status["reason"]
    log = (operated.directory / "train-worker-1.log").read_text()
    assert log.endswith("outlast | worker 1: the job is given up (exit 79)\n")


@pytest.mark.slow
def test_pods_that_are_told_to_go_save_and_an_operator_that_knows_nothing_goes_on_beyond_them(operated: Operated) -> None:
    operated.submit(workers={"replicas": 2, "min": 2}, args=["--steps=100", "--pause=0.04"])
    operated.trains(2, beyond=25)
    generation = operated.status["generation"]
    operated.change(suspend=True)
    operated.until(lambda: not operated.kubelet.running, "the end of the pods")
    assert [code for _, code, _ in operated.kubelet.ended] == [contract.Exit.INTERRUPTED] * 2
    assert operated.record.state == "Running"
    assert operated.operator
    processes.kill(operated.operator)
    operated.change(suspend=False, forget=True)
    operated.operate()
    operated.until(lambda: operated.status.get("state") == "Succeeded", "the end")
    assert operated.status["generation"] > generation
    assert operated.steps == list(range(1, 101)), "none lost, none twice"


@pytest.mark.slow
def test_workers_of_a_job_that_is_deleted_save_although_nobody_tells_their_pods(operated: Operated) -> None:
    operated.submit(workers={"replicas": 2, "min": 2}, args=["--steps=100000", "--pause=0.04"], checkpoint={"every": "1h"})
    operated.trains(2, beyond=25)
    with operated.api.lock:  # as with --cascade=orphan
        for kind, _, name in [key for key in operated.api.documents if key[0] == "pods"]:
            operated.api.documents[kind, "default", name]["metadata"].pop("ownerReferences", None)
        operated.api.remove("elasticjobs.outlast.dev", "train")
    waits.until(lambda: len(operated.kubelet.ended) == 2, 30, lambda: (operated.directory / "train-worker-0.log").read_text())
    assert [code for _, code, _ in operated.kubelet.ended] == [contract.Exit.INTERRUPTED] * 2
    newest = checkpoints.latest(checkpoints.list_(operated.directory / "out/train/checkpoints"), operated.record.run)
    assert newest is not None
    assert newest.step == operated.steps[-1]


@pytest.mark.slow
def test_what_a_kill_has_cost_is_counted_where_prometheus_reads_it(operated: Operated, moto: Place) -> None:
    """The ledger of rank 0, the account beside it, the Lease, the status, the operator's `/metrics`."""

    def counted(name: str) -> dict[str, float]:
        (address,) = re.findall(r"metrics are served on (:\d+)", (operated.directory / "operator.log").read_text())[-1:]
        families = prometheus_text.scrape(address)
        return {each.labels.get("cause", ""): each.value for family in families for each in family.samples if each.name == name}

    operated.submit(workers={"replicas": 2, "min": 2}, output=moto.url, args=["--steps=100000", "--pause=0.04"])
    operated.until(lambda: operated.status.get("state") == "Running", "training")
    operated.until(lambda: counted("outlast_lost_seconds_total"), "an account")
    assert set(counted("outlast_lost_seconds_total").values()) == {0.0}
    operated.lose(1)
    operated.until(lambda: any(counted("outlast_lost_seconds_total").values()), "the cost of a kill")
    assert {cause for cause, seconds in counted("outlast_lost_seconds_total").items() if seconds} == {"killed"}
    assert counted("outlast_recovery_seconds_count") == {"killed": 1}
    worker = json.loads((operated.directory / operated.uid(0) / "state" / contract.WORKER).read_text())
    (steps,) = (each for each in prometheus_text.scrape(worker["probes"]) if each.name == "outlast_step_seconds")
    seconds, count = (each.value for each in steps.samples)
    assert count > 10
    assert 0.04 <= seconds / count < 1


@pytest.mark.slow
@pytest.mark.parametrize("notice_s", [15, 120])
def test_a_spot_machine_goes_and_training_goes_on_elsewhere_without_a_step_lost_and_no_restart_is_counted(
    operated: Operated, undisturbed: Final, monkeypatch: pytest.MonkeyPatch, notice_s: int
) -> None:
    args = ("--steps=150", "--pause=0.1", "--gate")
    operated.submit(workers={"replicas": 2, "min": 2}, args=[*args], interruption={"grace": "10s"})
    operated.trains(2, beyond=25)
    uid, before, stop = operated.uid(1), set(operated.kubelet.nodes), threading.Event()
    going = operated.kubelet.nodes[uid]
    monkeypatch.setenv("KUBECONFIG", str(operated.kubeconfig))
    with imds.serving(Imds()) as service, contextlib.closing(kube.connect(namespace="default")) as cluster:
        watcher = Watcher(cluster.get(kinds.NODE, going), Metadata(service.address, timeout_s=30), cluster, clock=time.time)

        def watch() -> None:
            while not stop.wait(watcher.tick()):
                pass

        watching = threading.Thread(target=watch)
        watching.start()
        begun = time.time()
        service.documents[imds.SPOT] = imds.spot(pod_status.rfc3339(begun + notice_s))
        operated.until(lambda: operated.kubelet.ended, "the end of its worker")
        stop.set()
        watching.join()
    ((ended, code, at),) = operated.kubelet.ended
    assert (ended, code) == (uid, contract.Exit.INTERRUPTED)
    assert at < begun + notice_s, "it has saved and left"
    operated.until(lambda: set(operated.kubelet.nodes) - before, "its replacement")
    assert [operated.kubelet.nodes[each] == going for each in set(operated.kubelet.nodes) - before] == [False]
    (operated.directory / "out/train/hurry").touch()
    operated.until(lambda: operated.status.get("state") == "Succeeded", "the end")
    assert operated.status.get("restarts", 0) == 0
    assert operated.steps == list(range(1, 151)), "none lost, none twice"
    assert operated.final() == undisturbed(args, 2)
