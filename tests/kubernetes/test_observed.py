"""What a job on a cluster is said to do, from documents alone."""

from __future__ import annotations

from typing import Any

import pytest

from outlast.job import differing_ranks, slow_ranks
from outlast.job.status import SnapshotStatus, State
from outlast.kubernetes.api import kinds, pod_status
from outlast.kubernetes.jobs import job_status
from outlast.kubernetes.jobs.job_status import Snapshot

Document = dict[str, Any]


def a_pod(index: int = 0, *, phase: str = "Running", made: int = 0, **status: Any) -> Document:
    meta: Document = {"name": f"train-{index}-{made}", "uid": f"{index}-{made}", "labels": {"outlast.dev/job": "train"}}
    meta |= {"creationTimestamp": f"2026-01-01T00:00:{made:02}Z"}
    meta |= {"annotations": {"batch.kubernetes.io/job-completion-index": str(index)}}
    spec = {"nodeName": "node-a", "containers": [{"name": "worker", "resources": {"limits": {"memory": "16Gi"}}}]}
    return {"metadata": meta, "spec": spec, "status": {"phase": phase, **status}}


def container(*, ready: bool = False, **state: Any) -> Document:
    """`containerStatuses` of the worker's container."""
    return {"containerStatuses": [{"name": "worker", "ready": ready, "restartCount": 0, "state": state}]}


def running(index: int = 0, *, made: int = 0, ready: bool = True) -> Document:
    return a_pod(index, made=made, **container(running={}, ready=ready))


def ended(index: int = 0, *, code: int, made: int = 0, reason: str = "Error", **status: Any) -> Document:
    done = container(terminated={"exitCode": code, "reason": reason, "finishedAt": "2026-01-01T01:00:00Z"})
    return a_pod(index, phase="Failed" if code else "Succeeded", made=made, **done, **status)


def disrupted(reason: str) -> Document:
    return {"type": "DisruptionTarget", "status": "True", "reason": reason}


def a_job(*, completions: int = 2, **spec: Any) -> Document:
    meta = {"name": "train-1", "uid": "j", "creationTimestamp": "2026-01-01T00:00:00Z", "labels": {"outlast.dev/run": "train-r"}}
    status = {"conditions": spec.pop("conditions", [])}
    return {"kind": "Job", "metadata": meta, "spec": {"completions": completions, **spec}, "status": status}


def said(*seen: Document, workload: Document | None = None, **more: Any) -> tuple[State, str]:
    found = job_status.status(Snapshot("train", workload or a_job(), seen, **more))
    return found.state, found.reason


NO_GPU = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes are available: no GPU."}
UNPLACED, AGAIN = a_pod(0, phase="Pending", conditions=[NO_GPU]), a_pod(1, phase="Pending", made=5)
BACK_OFF = container(waiting={"reason": "ImagePullBackOff", "message": 'Back-off pulling image "x"'})
NO_IMAGE = a_pod(1, phase="Pending", **BACK_OFF)
SILENT = a_pod(
    1, **container(running={}), conditions=[{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "True"}]
)
QUEUED = a_job(suspend=True)
QUEUED["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "research"
HELD = {"kind": "ElasticJob", "metadata": {"name": "train"}, "spec": {"workers": {"replicas": 0}}}


@pytest.mark.parametrize(
    ("seen", "workload", "state", "reason"),
    [
        ((running(0), running(1)), None, State.RUNNING, "all 2 workers train"),
        ((), None, State.PENDING, "its pods are not created yet; if it stays so, outlast why train says why"),
        ((UNPLACED,), None, State.PENDING, "worker 0 cannot be scheduled: 0/3 nodes are available: no GPU"),
        ((NO_IMAGE,), None, State.PENDING, 'worker 1 cannot start: ImagePullBackOff: Back-off pulling image "x"'),
        ((running(0), ended(1, code=1), AGAIN), None, State.RESTARTING, "worker 1 is being started on node-a"),
        ((running(0), SILENT), None, State.RESTARTING, "worker 1 is on node-a, which does not answer"),
        ((), a_job(suspend=True), State.SUSPENDED, "suspended"),
        ((running(0),), a_job(suspend=True), State.SUSPENDED, "suspended; workers that still save and leave: 1"),
        ((), HELD, State.SUSPENDED, "suspended"),
        ((), QUEUED, State.PENDING, "waits in the queue research to be admitted"),
    ],
)
def test_where_a_job_stands_is_said_by_its_pods(
    seen: tuple[Document, ...], workload: Document | None, state: State, reason: str
) -> None:
    assert said(*seen, workload=workload) == (state, reason)
    assert job_status.status(Snapshot("train", workload or a_job(), seen)).replicas == (0 if workload is HELD else 2)


def test_failures_are_counted_and_interruptions_are_not() -> None:
    drained = disrupted("EvictionByEvictionAPI")
    now = [running(0, made=9), running(1, made=9)]
    before = [ended(0, code=1), ended(0, code=75, made=1), ended(1, code=137, conditions=[drained])]
    seen = [*now, *before]
    found = job_status.status(Snapshot("train", a_job(), seen))
    assert (found.restarts, found.interruptions) == (1, 2)
    assert found.failure is not None
    assert (found.failure.worker, found.failure.code, found.failure.reason) == (0, 1, "worker 0 failed with exit code 1")


OVER_STORAGE = (
    'Usage of EmptyDir volume "cache" exceeds the limit "1Gi"',
    'Container worker exceeded its local ephemeral storage limit "1Gi"',
    "Pod ephemeral local storage usage exceeds the total limit of containers 1Gi",
)
OVER_LIMIT, LOW = "it used more than its limit of 16Gi", "The node was low on resource: memory"


@pytest.mark.parametrize(
    ("pod", "code", "sentence", "counted"),
    [
        (ended(code=137, reason="OOMKilled"), 137, f"was OOMKilled: {OVER_LIMIT}; raise resources.memory", True),
        (ended(code=78), 78, "has an invalid configuration (exit code 78); see its log", True),
        (ended(code=75), 75, "was told to leave (exit code 75)", False),
        (ended(code=139), 139, "failed with exit code 139", True),
        (ended(code=0), 0, "is done", False),
        (a_pod(phase="Failed", reason="Evicted", message=f"{LOW}."), -1, f"was evicted by its node: {LOW}", False),
        *(
            (
                a_pod(phase="Failed", reason="Evicted", message=f"{over}. ", **container(terminated={"exitCode": 75})),
                -1,  # it was told to leave, and would be told so again
                f"was evicted by its node: {over}; write less, or raise the limit",
                True,
            )
            for over in OVER_STORAGE
        ),
        (a_pod(phase="Failed", conditions=[disrupted("DeletionByPodGC")]), -1, "was lost with its node", False),
    ],
)
def test_how_a_worker_ended_is_a_sentence(pod: Document, code: int, sentence: str, counted: bool) -> None:
    end = pod_status.end(pod)
    assert end is not None
    assert (end.code, end.sentence, end.counted) == (code, sentence, counted)


def test_the_end_of_a_job_is_its_condition_and_the_last_failure() -> None:
    complete = {"type": "Complete", "status": "True", "lastTransitionTime": "2026-01-01T02:00:00Z"}
    assert said(workload=a_job(conditions=[complete])) == (State.SUCCEEDED, "all workers are done")
    failed = {"type": "Failed", "status": "True", "message": "Job has reached the specified backoff limit"}
    found = job_status.status(Snapshot("train", a_job(conditions=[failed]), [ended(1, code=3)]))
    assert found.state is State.FAILED
    assert found.reason == "worker 1 failed with exit code 3; Job has reached the specified backoff limit"
    assert found.exit_code == 3


def test_what_agents_say_is_the_step() -> None:
    exposition = (
        '# HELP outlast_step x.\noutlast_step{job="train"} 120\noutlast_target_step{job="train"} 1560\noutlast_generation 3\n'
    )
    told = {"train-0-0": {**job_status.metrics(exposition), "committed_step": 100.0}, "train-1-0": {"step": 119.0}}
    told["train-0-0"] |= {"snapshot_step": 118.0, "snapshot_every": 2.0}
    found = job_status.status(Snapshot("train", a_job(), [running(0), running(1)], told, allowed_sizes=(1, 4)))
    assert (found.step, found.steps, found.generation, found.world, found.min, found.max) == (120, 1560, 3, [0, 1], 1, 4)
    assert found.checkpoint is not None
    assert found.checkpoint.step == 100
    assert found.snapshot == SnapshotStatus(step=118, every=2)
    assert [worker.step for worker in found.workers] == [120, 119]
    assert found.warnings == []


def test_what_agents_find_slow_different_or_replaced_are_warnings_with_their_nodes() -> None:
    exposition = '# TYPE x gauge\noutlast_slow_ratio{job="train",rank="1"} 0.25\noutlast_slow_ratio{rank="0",worker="0"} 0.2\n'
    told = {
        "train-0-0": {"step": 5.0, **job_status.metrics(exposition)},
        "train-1-0": {"step": 5.0, **job_status.metrics('outlast_differing_step{job="train",rank="2"} 3\n')},
        "train-2-0": {"step": 5.0, **job_status.metrics('outlast_processes_replaced_total{job="train",worker="2"} 2\n')},
    }
    found = job_status.status(Snapshot("train", a_job(), [running(0), running(1), running(2)], told))
    nodes = [worker.node for worker in found.workers]
    *ranks, replaced = found.warnings
    assert ranks == [
        slow_ranks.sentence(1, 0.25, slow_ranks.place(0, nodes[0])),
        differing_ranks.notice(2, 3, slow_ranks.place(1, nodes[1])),
    ]
    assert all(node in warning for node, warning in zip(nodes[:2], ranks, strict=True))
    assert replaced == "worker 2 has replaced its processes 2 times, although they could have stayed; its log says why"


def test_a_step_that_an_agent_reads_in_the_log_is_shown_although_the_operator_knows_none() -> None:
    workload = kinds.ELASTIC_JOB.document({"name": "cifar10"}, spec={}, status={"state": "Running", "step": 0})
    told = {"cifar10-1-0": {"step": 0.0}, "cifar10-1-1": {"step": 58.0, "step_logged": 1.0, "target_step": 60.0}}
    found = job_status.status(Snapshot("cifar10", workload, [running(0), running(1)], told))
    assert (found.step, found.steps, found.told) == (58, 60, "log")


def test_without_the_right_to_ask_agents_it_is_said() -> None:
    found = job_status.status(Snapshot("train", a_job(), [running(0), running(1)], query_error="eve may not get pods/proxy"))
    assert found.warnings == ["steps are not known: eve may not get pods/proxy"]


def test_a_stateful_set_is_done_when_its_agents_say_so() -> None:
    workload = {"kind": "StatefulSet", "metadata": {"name": "train"}, "spec": {"replicas": 2}}
    both = {"train-0-0": {"done": 1.0}, "train-1-0": {"done": 1.0}}
    assert said(running(0), running(1), workload=workload, metrics=both) == (State.SUCCEEDED, "all workers are done")
    gave_up = {"train-0-0": {"done": 0.0, "failed": 1.0}, "train-1-0": {"done": 0.0, "failed": 1.0}}
    assert said(running(0), running(1), workload=workload, metrics=gave_up)[0] is State.FAILED
    gave_up.popitem()
    assert said(running(0), running(1), workload=workload, metrics=gave_up)[0] is State.RUNNING
    workload = kinds.STATEFUL_SET.document({"name": "t", "annotations": {job_status.REPLICAS: "3"}}, spec={"replicas": 0})
    found = job_status.status(Snapshot("train", workload))
    assert (found.state, found.replicas) == (State.SUSPENDED, 3)


def test_what_an_operator_has_written_is_believed() -> None:
    meta = {"name": "train", "creationTimestamp": "2026-01-01T00:00:00Z"}
    status = {"state": "Resizing", "reason": "grows to 3", "step": 7, "restarts": 2, "run": "r", "unheardOf": 1}
    workload = kinds.ELASTIC_JOB.document(meta, spec={"workers": {"replicas": 2, "min": 1, "max": 4}}, status=status)
    found = job_status.status(Snapshot("train", workload, [running(0)], allowed_sizes=(1, 4)))
    assert (found.state, found.reason, found.step, found.restarts, found.run) == (State.RESIZING, "grows to 3", 7, 2, "r")
    assert (found.replicas, found.min, found.max, len(found.workers)) == (2, 1, 4, 1)


def test_an_operator_is_missed_only_when_it_has_had_the_time_to_take_up_a_job() -> None:
    meta = {"name": "train", "creationTimestamp": "2026-01-01T00:00:00Z"}
    workload = {"kind": "ElasticJob", "metadata": meta, "spec": {"workers": {"replicas": 2}}}

    def reason(after_s: float) -> str:
        return job_status.status(Snapshot("train", workload, now=1_767_225_600.0 + after_s)).reason

    assert reason(1) == "it was submitted a moment ago, and its operator is to take it up"
    assert reason(16) == "no operator has taken it up yet; is one installed? (outlast install)"


NOT_IN_IMAGE = {
    "runc": "failed to create containerd task: failed to create shim task: OCI runtime create failed: runc create failed: unable "
    'to start container process: exec: "outlast": executable file not found in $PATH',
    "docker": 'failed to create task for container: exec: "outlast": executable file not found in $PATH: unknown',
    "crun": "container create failed: executable file `outlast` not found in $PATH: No such file or directory",
    "gVisor": 'creating container: error finding executable "outlast" in PATH [/usr/bin]: no such file or directory',
}


@pytest.mark.parametrize("runtime", NOT_IN_IMAGE)
def test_an_image_without_outlast_is_named_with_what_it_lacks_and_is_a_mistake(runtime: str) -> None:
    pod = ended(0, code=128, reason="StartError")
    (state,) = pod["status"]["containerStatuses"]
    state["state"]["terminated"]["message"] = NOT_IN_IMAGE[runtime]
    state["image"] = "docker.io/pytorch/pytorch:2.13"
    end = pod_status.end(pod)
    assert end is not None
    assert end.sentence.startswith(
        "cannot be started: there is no Outlast in its image docker.io/pytorch/pytorch:2.13; say inject: true"
    )
    assert (end.code, end.counted) == (78, True), "a mistake: the operator does not try it again"


def test_another_command_that_is_missing_is_told_as_the_runtime_says_it() -> None:
    pod = ended(0, code=128, reason="StartError")
    message = 'unable to start container process: exec: "train.sh": executable file not found in $PATH'
    pod["status"]["containerStatuses"][0]["state"]["terminated"]["message"] = message
    end = pod_status.end(pod)
    assert end is not None
    assert (end.code, end.sentence) == (128, f"could not be started: {message}")
