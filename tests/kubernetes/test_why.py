"""`outlast why`: what was recorded on a cluster, what schedulers, runtimes and admission say, and jobs of this machine."""

from __future__ import annotations

import copy
import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fake
import situations
from fake_cluster import FakeCluster
from outlast import cli
from outlast.base.errors import Forbidden, NotFound
from outlast.cli import status_page
from outlast.job.contract import End, FailureCause
from outlast.job.failure import Failure
from outlast.job.status import CheckpointStatus, JobStatus, State, StoreStatus, WorkerStatus
from outlast.kubernetes import api, diagnosis
from outlast.kubernetes.api import kinds, pod_status
from outlast.kubernetes.diagnosis import Finding, Snapshot, containers, gather_evidence, local_job, messages, nodes
from outlast.rendezvous import sentences

Outlast = Callable[..., tuple[int, str, str]]

Document = dict[str, Any]
NOW = 1_800_000_000.0


def causes(seen: Snapshot) -> list[Finding]:
    return diagnosis.causes(seen, NOW)


@pytest.mark.parametrize("name", situations.SITUATIONS)
def test_what_is_said_of_a_recorded_situation_is_what_was_said(name: str) -> None:
    assert causes(situations.seen(name)) == situations.findings(name), "run: python tests/shared/situations.py, and look at it"


@pytest.mark.parametrize("name", situations.SITUATIONS)
def test_what_may_not_be_read_costs_evidence_and_no_more(name: str) -> None:
    """Someone with the role `view`: no nodes and Secrets."""
    blind = dict.fromkeys(("nodes", "secrets"), "you may not list them")
    seen = dataclasses.replace(situations.seen(name), nodes=(), secrets=frozenset(), forbidden=blind)
    found = causes(seen)[0]
    assert found.name == situations.findings(name)[0].name
    assert not [each for each in found.evidence if "no node has this label" in each]


def test_nodes_without_a_gpu_and_with_none_left_are_told_apart() -> None:
    seen = situations.seen("gpu")
    nodes = copy.deepcopy(seen.nodes)
    for node in nodes:
        node["status"]["allocatable"]["nvidia.com/gpu"] = "8"
    (cause,) = causes(dataclasses.replace(seen, nodes=nodes))
    assert cause.what == "workers 0 and 1 find no node with room: each asks for 2 nvidia.com/gpu, and others use it"
    assert cause.remedy == "wait until others leave, add nodes, or lower resources.gpu or workers.replicas"


def test_a_paragraph_has_the_sentence_the_evidence_and_the_remedy() -> None:
    text = diagnosis.text([Finding("a", "it is late", "go", ("the clock: 9:30",)), Finding("b", "well")], forbidden=["nodes"])
    assert text == "It is late\n  the clock: 9:30\n  → go\n\nWell\n\nNot checked, because you may not read them: nodes."
    assert "\n        File " in diagnosis.text(causes(situations.seen("script-fails"))), "a log is shown as it is"


# Builders


def a_pod(name: str = "train-0", *, phase: str = "Pending", node: str = "", index: int = 0, **status: Any) -> Document:
    labels = {"outlast.dev/job": "train", "outlast.dev/worker": str(index)}
    spec = {"containers": [{"name": "worker", "image": "team/train:v9"}], **({"nodeName": node} if node else {})}
    meta = {"name": name, "labels": labels, "creationTimestamp": "2026-11-21T16:00:00Z"}
    return {"kind": "Pod", "metadata": meta, "spec": spec, "status": {"phase": phase, **status}}


def an_event(about: Document, reason: str, message: str) -> Document:
    it = {"kind": about["kind"], "name": about["metadata"]["name"]}
    return {"involvedObject": it, "reason": reason, "message": message, "lastTimestamp": "2026-11-21T16:00:05Z", "count": 1}


def a_node(name: str = "node-a", *, ready: str = "True") -> Document:
    conditions = [{"type": "Ready", "status": ready, "reason": "NodeStatusUnknown", "message": "Kubelet stopped posting."}]
    conditions[0]["lastTransitionTime"] = "2027-01-15T07:58:20Z"  # 100 s before NOW
    status = {"conditions": conditions, "allocatable": {"cpu": "8"}}
    return {"kind": "Node", "metadata": {"name": name, "labels": {}}, "spec": {}, "status": status}


def a_job(replicas: int = 1, **status: Any) -> Document:
    return {"kind": "Job", "metadata": {"name": "train", "labels": {}}, "spec": {"parallelism": replicas}, "status": status}


def refusing(message: str, **more: Any) -> Snapshot:
    """A pod that the scheduler says this of."""
    pod = a_pod()
    return Snapshot("train", workload=a_job(), pods=(pod,), events=(an_event(pod, "FailedScheduling", message),), **more)


# Messages

TEXTS = st.sampled_from(
    ["Insufficient cpu", "Too many pods", "node(s) had untolerated taint {a: b}", "node(s) were unschedulable"]
)


@given(st.lists(st.tuples(st.integers(1, 5000), TEXTS), min_size=1, max_size=5), st.sampled_from(["", " preemption: 0/3 no."]))
def test_a_message_of_the_scheduler_is_taken_apart(parts: list[tuple[int, str]], tail: str) -> None:
    total = sum(count for count, _ in parts)
    message = f"0/{total} nodes are available: {', '.join(f'{count} {text}' for count, text in parts)}.{tail}"
    assert nodes.parts(message) == parts


SAYS = {
    "1 node(s) had untolerated taint {nvidia.com/gpu: present}": "1 node is kept for others by the taint nvidia.com/gpu=present",
    "2 node(s) had untolerated taint {team: }": "2 nodes are kept for others by the taint team",
    "1 node(s) had taint {spot: true}, that the pod didn't tolerate": "1 node is kept for others by the taint spot=true",
    "1 node(s) had untolerated taint {node.kubernetes.io/unreachable: }": (
        "1 node cannot take any (node.kubernetes.io/unreachable)"
    ),
    "3 node(s) were unschedulable": "3 are cordoned",
    "3 Too many pods": "3 run as many pods as they may",
    "3 node(s) didn't match pod topology spread constraints": "it would make the spread of pods over zones or nodes too uneven",
    "3 node(s) had volume node affinity conflict": "its volume is in another zone or on another machine than the free nodes",
    "3 node(s) are on fire": "3 node(s) are on fire",
}


@pytest.mark.parametrize("said", SAYS)
def test_what_the_scheduler_says_has_a_meaning(said: str) -> None:
    tail = "preemption: 0/3 nodes are available: 3 Preemption is not helpful."
    (cause,) = causes(refusing(f"0/3 nodes are available: {said}. {tail}"))
    assert cause.what == f"worker 0 finds no node: {SAYS[said]}"
    assert cause.remedy


WORDS = {
    "admission": ("namespace", "amounts"),
    "scheduler": ("count", "number"),
    "resources": ("kind", "resource", "request", "largest", "field"),
    "claims": ("claim",),
    "kueue": ("queue", "known", "state", "workload"),
    "images": ("image",),
    "starts": (),
    "deaf": (),
    "exits": ("pods", "were", "code", "reason", "job", "field"),
    "given-up": ("job", "said"),
    "mounts": ("node",),
    "taken": ("pods", "node", "restore"),
}
"""What the rules give to the sentences of each who speaks."""


def test_every_sentence_about_a_message_is_made_of_words_that_are_given() -> None:
    assert {*WORDS, "taints"} == messages.tables().keys()
    for speaker, words in WORDS.items():
        default = messages.tables()[speaker].get("default", {})
        *known, last = ({**default, **each} for each in messages.tables()[speaker]["meanings"])
        assert "pattern" not in last
        for each in (*known, last):
            groups = re.compile(each.get("pattern", "")).groupindex
            given = dict.fromkeys(("message", *words, *groups), "x")
            assert (each.get("what", "") + each["remedy"]).format(**given), each
            assert each.get("name") or messages.tables()[speaker]["name"], each


ABSENT = "does not exist in its registry"
PULLS = {
    'failed to resolve reference "docker.io/library/trian:9": docker.io/library/trian:9: not found': ABSENT,
    "pull access denied, repository does not exist or may require authorization: server message: "
    "insufficient_scope: authorization failed": "does not exist, or its registry wants a login",
    "failed to fetch anonymous token: unexpected status: 401 Unauthorized": "may not be pulled: its registry wants a login",
    "429 Too Many Requests: toomanyrequests: your pull rate limit": "may not be pulled so often: its registry limits us",
    "dial tcp: lookup exmaple.com on 10.0.0.2:53: no such host": "cannot be pulled: the name of its registry is unknown (DNS)",
    "tls: x509: certificate signed by unknown authority": "cannot be pulled: there is no secure connection to its registry",
    "layer sha256:a401403404429b0: unexpected end: no space left on device": "does not fit on the node's disk",
    "reading manifest: StatusCode: 404": ABSENT,
    "no match for platform in manifest: not found": "is not built for the processors of that node",
}


@pytest.mark.parametrize("message", PULLS)
def test_what_a_runtime_says_of_an_image_has_a_meaning(message: str) -> None:
    pod = held("ImagePullBackOff", 'Back-off pulling image "team/train:v404"', image="team/train:v404")
    events = (
        an_event(pod, "Failed", f'Failed to pull image "team/train:v404": {message}'),
        an_event(pod, "Failed", "Error: ErrImagePull"),
    )
    (cause,) = containers.images(Snapshot("train", pods=(pod,), events=events), NOW)
    assert cause.what == f"worker 0 waits for the image team/train:v404, which {PULLS[message]}"
    assert message in cause.evidence[0]


QUOTA = "exceeded quota: team, requested: pods=1,cpu=8, used: pods=3,cpu=4, limited: pods=3,cpu=9"
LEAVES = "pods: a pod asks for 1, 3 of 3 are used; cpu: a pod asks for 8, 4 of 9 are used"
REFUSALS = [
    (QUOTA, "quota", f"the quota team of the namespace leaves too little: {LEAVES}"),
    ('admission webhook "a.b" denied the request: no latest', "webhook", "the webhook a.b refuses the pods: no latest"),
    ('failed calling webhook "a.b": late', "webhook", "the webhook a.b, which must admit all pods, does not answer: late"),
    ("ValidatingAdmissionPolicy 'a' with binding 'b' denied request: no c", "policy", "the policy a refuses the pods: no c"),
    ('pods is forbidden: User "a" cannot b', "rights", 'the controller that creates the pods lacks a right: User "a" cannot b'),
    ("in namespace team because it is being terminated", "namespace-ends", "the namespace team is being deleted"),
    ('Pod "a" is invalid: image: Required value', "invalid", "the API server rejects the pods as invalid: image: Required value"),
    (
        'Pod "a" is invalid: resources.requests: Invalid value: "4": must be less than or equal to cpu limit of 1',
        "cpu-limit",
        "a worker asks for 4 cores, and its limit is 1, which a LimitRange of the namespace sets",
    ),
    ("pods are out of stock", "refused", "the API server refused: Error creating: pods are out of stock"),
]


@pytest.mark.parametrize(("message", "name", "what"), REFUSALS)
def test_what_admission_says_has_a_meaning(message: str, name: str, what: str) -> None:
    cause = messages.refusal("team", f"Error creating: {message}")
    assert (cause.name, cause.what) == (name, what)
    assert ("resources.cpuLimit" in cause.remedy) == (name == "cpu-limit")
    assert cause.remedy


# What is shown, and what is said first


def held(reason: str, message: str, **fields: Any) -> Document:
    """A pod with a node whose container waits."""
    status = {"name": "worker", "state": {"waiting": {"reason": reason, "message": message}}, **fields}
    return a_pod(node="node-a", containerStatuses=[status])


def ended(code: int, reason: str = "Error", **more: Any) -> Document:
    over = {"terminated": {"exitCode": code, "reason": reason}}
    return a_pod(phase="Failed", node="node-a", containerStatuses=[{"name": "worker", "state": over}], **more)


def running(count: int = 1, **more: Any) -> tuple[Document, ...]:
    ready = [{"type": "Ready", "status": "True"}]
    return tuple(a_pod(f"train-{i}", phase="Running", node="node-a", index=i, conditions=ready, **more) for i in range(count))


def later(pod: Document) -> Document:
    """The same worker in a pod that was made five minutes later."""
    meta = {**pod["metadata"], "name": f"{pod['metadata']['name']}b", "creationTimestamp": "2026-11-21T16:05:00Z"}
    return {**pod, "metadata": meta}


def claiming(phase: str, *events: tuple[str, str]) -> Snapshot:
    """A pod that waits for a claim in this phase."""
    claim = {"kind": "PersistentVolumeClaim", "metadata": {"name": "data"}, "spec": {}, "status": {"phase": phase}}
    pod = a_pod()
    pod["spec"]["volumes"] = [{"name": "data", "persistentVolumeClaim": {"claimName": "data"}}]
    return of_pods(pod, claims=(claim,), events=tuple(an_event(claim, *event) for event in events))


def of_pods(*pods: Document, **more: Any) -> Snapshot:
    """A job with these pods, on a node that is well."""
    return Snapshot("train", "team", **{"workload": a_job(), "pods": pods, "nodes": (a_node(),), **more})


def of_pod(pod: Document, *events: tuple[str, str], **more: Any) -> Snapshot:
    """A job with one pod and events about it."""
    return of_pods(pod, events=tuple(an_event(pod, *event) for event in events), **more)


def disrupted(reason: str, message: str) -> Document:
    target = {"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}
    return a_pod(phase="Failed", node="node-a", conditions=[target])


def refused_to(name: str, *pods: Document, **more: str) -> Snapshot:
    """A job that lacks pods, and one of this name that may not have any more."""
    other = {**a_job(), "metadata": {"name": name}, **more}
    return of_pods(*pods, events=(an_event(other, "FailedCreate", QUOTA),))


def in_queue(*others: Document, active: bool = True, **status: Any) -> Snapshot:
    """A job that Kueue holds, with its Workload and others."""
    meta = {"name": "train", "labels": {"kueue.x-k8s.io/queue-name": "research"}}
    job = {**a_job(), "metadata": meta, "spec": {"parallelism": 1, "suspend": True}}
    spec = {"queueName": "research", "active": active}
    workload = {"kind": "Workload", "metadata": {"name": "w"}, "spec": spec, "status": status}
    queues = ({"metadata": {"name": "team-a"}},)
    return of_pods(workload=job, kueue_workloads=(*others, workload), queues=queues)


def refusal(message: str) -> Document:
    return {"type": "QuotaReserved", "status": "False", "reason": "Pending", "message": message}


def a_group(phase: str) -> Document:
    spec = {"minMember": 4, "queue": "research"}
    return {"kind": "PodGroup", "metadata": {"name": "train"}, "spec": spec, "status": {"phase": phase}}


PROBED = {"name": "worker", "state": {"running": {}}, "started": True}
PROBED = a_pod(phase="Running", node="node-a", containerStatuses=[PROBED])
SCHEDULED_BY = a_pod()
SCHEDULED_BY["spec"]["schedulerName"] = "volcano"
SILENT = [{"type": "Ready", "status": "False"}, {"type": "ContainersReady", "status": "True"}]
SILENT = a_pod("train-1", phase="Running", node="node-b", index=1, conditions=SILENT)
TRACES = [
    "[rank1]: Traceback (most recent call last):",
    "[rank1]: RuntimeError: shape mismatch",
    "Traceback (most recent call last):",
    "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    "outlast | worker 0: rank 1 on worker 0 failed with exit code 1 (exit 1)",
]
ELASTIC = {"kind": "ElasticJob", "metadata": {"name": "train"}, "spec": {"workers": {"replicas": 2}}}
WAITS = a_pod(phase="Running", node="node-a")
DEAF = f"outlast | {sentences.DEAF}; it tries again: the API server https://10.96.0.1:443 cannot be reached: no answer"
HEARS = f"outlast | {sentences.HEARS}"
CALLED = {"type": "Running", "status": "True"}
NEW = {"status": {"conditions": [{"type": "Created", "status": "True"}]}}
TAKEN = "PodDisruptionBudget train exists and does not belong to this job, and stays as it is"
UNHEARD = "most of the 2 workers have said nothing for 100 s though their nodes are well"
EVICTED = {"type": "Evicted", "status": "True", "reason": "Preempted", "message": "for a workload of higher priority"}
ADMITTED = {"kind": "Workload", "metadata": {"name": "v"}, "status": {"conditions": [{"type": "Admitted", "status": "True"}]}}
RESERVED = {"type": "QuotaReserved", "status": "True", "reason": "QuotaReserved", "message": "in ClusterQueue all"}
CHECKED = [{"name": "autoscaler", "state": "Pending", "message": "asked for 4 nodes"}]
PULLING = a_pod(
    node="node-a",
    containerStatuses=[{"name": "worker", "state": {"waiting": {"reason": "ContainerCreating"}}}],
    startTime="2027-01-15T07:58:20Z",
)
NO_KEY = "couldn't find key TOKEN in Secret team/hf"
UNHEALTHY = ("Unhealthy", "Liveness probe failed: timeout")
KILLED = ("Killing", "Container worker failed liveness probe, will be restarted")
ATTACHED = ("FailedAttachVolume", "Multi-Attach error for volume")
ROOT = ": the image wants to run as root, and the pod may not"
NOT_STARTED = (
    ("CreateContainerConfigError", "container has runAsNonRoot and image will run as root", "root", ROOT),
    ("CreateContainerConfigError", "image has non-numeric user (app), cannot verify user is non-root", "root", ROOT),
    ("RunContainerError", 'exec: "outlast": permission denied', "start", ": the command may not be executed"),
    ("RunContainerError", "exec /usr/bin/outlast: exec format error", "image", ": the image is not built for that processor"),
    ("CreateContainerError", "device is busy", "start", ""),
)
"""What a container waits for, what the kubelet says of it, and the rule and the sentence of its cause."""
CODES = {79: "79", 137: "137 (SIGKILL)", 135: "135 (SIGBUS)"}
KUBELET, OVER_DISK = "TerminationByKubelet", "evicted from node-a: too much was written to the node's disk"
SHUTDOWN = "Pod was terminated in response to imminent node shutdown."
LOW_MEMORY = "The node was low on resource: memory. Container disk-cache was using 5Gi."
TAINTED = "Taint manager: deleting due to NoExecute taint"
PREEMPTING = "preempting to accommodate a higher priority pod"
DISRUPTED = (
    ("PreemptionByScheduler", PREEMPTING, "preempted", "preempted by a pod of higher priority on node-a"),
    ("EvictionByEvictionAPI", "Eviction API: evicting", "drained", "asked to leave node-a, by a drain or an autoscaler"),
    ("DeletionByTaintManager", TAINTED, "node-lost", "taken away because node node-a was lost"),
    ("DeletionByPodGC", "PodGC: node no longer exists", "node-lost", "taken away because node node-a no longer exists"),
    (KUBELET, "The node was low on resource: ephemeral-storage.", "evicted", OVER_DISK),
    (KUBELET, 'Usage of EmptyDir volume "tmp" exceeds the limit "1Gi".', "evicted", OVER_DISK),
    (KUBELET, LOW_MEMORY, "evicted", "evicted from node-a, whose memory was used up"),
    (KUBELET, SHUTDOWN, "drained", "ended because node-a was shut down"),
)
"""Reason and message of a disruption, and the rule and the sentence of its cause."""
NO_VOLUME = "which has no volume: "
FIRST = ("WaitForFirstConsumer", "waiting for first consumer to be created before binding")
UNBOUND = (
    ("Pending", [FIRST], "claim-waits", f"{NO_VOLUME}it is created when a pod that uses it has a node"),
    ("Pending", [("ProvisioningFailed", "no credentials")], "claim-failed", f"{NO_VOLUME}none can be made"),
    ("Pending", [], "claim-pending", "which has no volume yet"),
    ("Lost", [], "claim-lost", "whose volume is gone"),
)
"""A claim's phase and events, and the rule and the sentence of its cause."""


def elastic(**status: Any) -> Document:
    return {**ELASTIC, "status": status}


def warnings(reason: str, message: str) -> tuple[Document, ...]:
    return ({**an_event(ELASTIC, reason, message), "type": "Warning"},)


def training(events: tuple[Document, ...] = (), **status: Any) -> Snapshot:
    """An ElasticJob whose two workers train."""
    return of_pods(*running(2), workload=elastic(**{"state": "Running", "world": [0, 1], **status}), events=events)


def of_operator(seen: Snapshot, ready: int, suspend: bool = False, **more: Any) -> Snapshot:
    """A job of generation 2, and an operator of which so many pods are ready."""
    spec = {"template": {"spec": {"containers": [{"image": "operator:1"}]}}, "replicas": 2}
    operator = {"metadata": {"namespace": "outlast-system"}, "spec": spec, "status": {"availableReplicas": ready}}
    meta, spec = {"name": "train", "generation": 2}, {**ELASTIC["spec"], "suspend": suspend}
    workload = {**seen.workload, "metadata": meta, "spec": spec}
    return dataclasses.replace(seen, workload=workload, defined=True, operator=operator, **more)


def without_operator(seen: Snapshot, **more: Any) -> Snapshot:
    return of_operator(seen, ready=0, **more)


SHOWN: tuple[tuple[Snapshot, str, str], ...] = (
    (refusing("no nodes available to schedule pods"), "unschedulable-node", "worker 0 finds no node: the cluster has none"),
    (
        of_pod(held("ErrImagePull", 'pulling "a.local/team/train:403": connection refused', image="a.local/team/train:403")),
        "image",  # a tag is no status of a server
        "worker 0 waits for the image a.local/team/train:403, which cannot be pulled: its registry does not answer the nodes",
    ),
    *((of_pod(held(reason, said)), name, f"worker 0 cannot be started{what}") for reason, said, name, what in NOT_STARTED),
    *((of_pod(ended(code)), "failing-script", f"worker 0 ended with exit code {text}") for code, text in CODES.items()),
    (
        of_pod(ended(1), logs={"train-0": TRACES}),
        "failing-script",
        "worker 0 ended with exit code 1: rank 1 on worker 0 failed with exit code 1: RuntimeError: shape mismatch",
    ),
    (of_pods(ended(1), later(running()[0])), "training", "nothing is wrong: 1 of 1 workers run"),  # it has recovered
    (of_pod(PROBED, UNHEALTHY, KILLED), "probe", "worker 0 was killed, not having answered any more"),
    (refused_to("other"), "starting", "no worker has a pod yet, and no event says why"),
    (refused_to("train-web-5d88f95f65", kind="ReplicaSet"), "starting", "no worker has a pod yet, and no event says why"),
    (refused_to("train", *running()), "training", "nothing is wrong: 1 of 1 workers run"),  # they could not be made at first
    *((claiming(phase, *said), name, f"worker 0 waits for the claim data, {what}") for phase, said, name, what in UNBOUND),
    (of_pod(held("CreateContainerConfigError", NO_KEY)), "secret-missing", "worker 0 waits for the key TOKEN of the Secret hf"),
    (of_pod(a_pod(node="node-a"), ATTACHED), "mount", "worker 0 waits on node-a: another node still has the volume"),
    (
        of_pods(*running(), SILENT, workload=a_job(2), nodes=(), forbidden={"nodes": "you may not list nodes"}),
        "node-lost",
        "worker 1 is on node node-b, which does not answer",
    ),
    (of_pod(a_pod(phase="Running", node="node-b")), "node-lost", "worker 0 is on node node-b, which no longer exists"),
    (
        of_pods(WAITS, nodes=(a_node(ready="Unknown"),)),
        "node-lost",
        "worker 0 is on node node-a, which does not answer for 100 s",
    ),
    *((of_pod(disrupted(reason, said)), name, f"worker 0 was {what}") for reason, said, name, what in DISRUPTED),
    (in_queue(conditions=[refusal("x"), EVICTED], admissionChecks=CHECKED), "queue", "queue research has not admitted it"),
    (in_queue(ADMITTED, conditions=[refusal("x")]), "queue", "queue research has not admitted all of its workers"),
    (
        dataclasses.replace(in_queue(), kueue_workloads=()),
        "queue",
        "it waits in queue research, and Kueue has created no Workload for it",
    ),
    (
        of_pods(workload=a_job(4), pod_groups=(a_group("Pending"),)),
        "gang",
        "its 4 workers start together, and there is not room for all of them in queue research",
    ),
    (of_pod(SCHEDULED_BY), "scheduler", "worker 0 waits for the scheduler volcano, which does not react"),
    (training(world=[0]), "training", "it trains with 1 of 2 workers; the others are joining"),
    (of_pod(PULLING, ("Pulling", "Pulling image")), "starting", "worker 0 pulls its image on node-a for 1m40s"),
    *(
        (Snapshot("train", workload=elastic(**held, reason=said), events=told), "reported", said)
        for said in ("the job cannot be understood: its name is long", "Role train-worker of an earlier job still exists")
        for held, told in (({"state": "Pending"}, ()), ({"state": "Pending", "startTime": "x"}, warnings("InvalidJob", said)))
    ),
    (Snapshot("train", workload=ELASTIC | NEW, events=warnings("InvalidJob", "it is not valid")), "reported", "it is not valid"),
    (training(warnings("NameTaken", TAKEN)), "reported", TAKEN),
    (training(reason=UNHEARD, conditions=[{**CALLED, "reason": "Unheard"}]), "reported", UNHEARD),
    (training(warnings("InvalidJob", "it was not valid"), reason="all train"), "training", "nothing is wrong"),
    (without_operator(training(), pods=running()), "operator", "no operator has replaced its missing workers"),
    (without_operator(training(), pods=(ended(75), *running(2)[1:])), "operator", "no operator has replaced its missing workers"),
    (without_operator(training(observedGeneration=1), suspend=True), "operator", "no operator has taken up its last change"),
    (of_operator(training(observedGeneration=1), ready=2), "operator", "no operator has taken up its last change"),
    (of_operator(training(observedGeneration=2), ready=2, pods=running()), "training", "nothing is wrong: 1 of 2 workers run"),
    (of_operator(training(), ready=2, suspend=True), "suspended", "it is being suspended; still running: workers 0 and 1"),
    (of_pod(WAITS, logs={"train-0": [DEAF]}), "deaf", "worker 0 does not hear the operator: it does not reach the API server"),
    (of_pod(WAITS, logs={"train-0": [DEAF.replace("cannot be reached", "x")]}), "deaf", "worker 0 does not hear the operator"),
    (of_pod(WAITS, logs={"train-0": [DEAF, HEARS]}), "starting", "worker 0 runs, and is in no world yet"),
    (Snapshot("train", workload=ELASTIC), "operator", "no operator has taken up the job: its status is empty"),
    (Snapshot("train"), "absent", "there is no job train in namespace default"),
)


def test_a_key_that_is_gone_is_made_of_that_of_a_worker_that_still_has_it() -> None:
    alone = of_pod(held("CreateContainerConfigError", 'secret "train-rdzv" not found'))
    assert causes(alone)[0].remedy.startswith("make it (kubectl create secret generic train-rdzv")
    (first, *_) = causes(dataclasses.replace(alone, pods=(*alone.pods, *running(2)[1:])))
    there = "kubectl exec -n team train-1 -- printenv OUTLAST_RENDEZVOUS_KEY"
    assert f'kubectl create secret generic train-rdzv -n team --from-literal=key="$({there})"' in first.remedy


@pytest.mark.parametrize(("seen", "name", "what"), SHOWN, ids=[what for _, _, what in SHOWN])
def test_what_is_shown_is_explained(seen: Snapshot, name: str, what: str) -> None:
    first = causes(seen)[0]
    assert (first.name, first.what[: len(what)]) == (name, what)
    assert first.failed == (name not in ("training", "starting", "suspended")) or first.outcome == "warn"
    assert first.remedy or name == "training"


def test_code_that_was_deleted_with_its_job_is_submitted_again() -> None:
    waits = of_pod(a_pod(node="node-a"), ("FailedMount", 'configmap "train-code-1a2b3c4d" not found'))
    assert causes(waits)[0].remedy == "bring the code, which is deleted with its job: outlast submit FILE"


def test_a_job_in_which_nothing_is_wrong_shows_what_the_operator_says() -> None:
    assert [each.evidence for each in causes(training(reason="all 2 workers are here"))] == [("all 2 workers are here",)]


def test_a_pod_that_was_replaced_or_left_as_asked_is_no_cause() -> None:
    gone = disrupted("EvictionByEvictionAPI", "Eviction API: evicting")
    assert list(nodes.removed_pods(Snapshot("train", pods=(gone, later(a_pod(phase="Running", node="node-a")))), NOW)) == []
    assert [each for code in (0, 75, 143) for each in containers.failures(of_pod(ended(code)), NOW)] == []


def test_what_follows_from_another_cause_is_told_after_it() -> None:
    seen = refusing("0/3 nodes are available: 1 Too many pods, 2 node(s) had untolerated taint {team: a}.")
    found = causes(dataclasses.replace(seen, pod_groups=(a_group("Pending"),)))
    assert [cause.name for cause in found] == ["unschedulable-pods", "unschedulable-taint", "gang"]


def test_pods_on_a_node_that_is_gone_are_deleted_and_the_node_is_not() -> None:
    (gone,) = causes(of_pod(a_pod(phase="Running", node="node-b")))
    assert gone.remedy == "kubectl delete pod --force -n team train-0, and they are replaced"
    (silent,) = causes(of_pods(WAITS, nodes=(a_node(ready="Unknown"),)))
    assert "kubectl delete node node-a, or kubectl delete pod --force -n team train-0; until then" in silent.remedy


def test_an_init_container_that_fails_is_named_with_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = {"name": "outlast-agent", "state": {"terminated": {"exitCode": 1, "reason": "Error"}}}
    waits = {"name": "worker", "state": {"waiting": {"reason": "PodInitializing"}}}
    pod = a_pod(node="node-a", initContainerStatuses=[failed], containerStatuses=[waits])
    cluster = FakeCluster(a_namespace(), pod | {"apiVersion": "v1"})
    monkeypatch.setattr(cluster, "logs", lambda name, options, **_: iter([f"{options.container}: no space left on device"]))
    (cause,) = causes(dataclasses.replace(gather_evidence.job(cluster, "train"), workload=a_job(), nodes=(a_node(),)))  # type: ignore[arg-type]
    assert cause.what == "worker 0 ended with exit code 1 in the container outlast-agent"
    assert cause.evidence[-1].strip() == "outlast-agent: no space left on device"
    assert cause.remedy.startswith("correct what its log says")


def test_a_container_that_ran_out_of_memory_and_was_started_again_is_told() -> None:
    last = {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}
    status = {"name": "worker", "state": {"running": {}}, "lastState": last}
    pod = a_pod(phase="Running", node="node-a", containerStatuses=[status])
    failed, stopped = ("Unhealthy", "Startup probe failed: connection refused"), ("Killing", "Stopping container worker")
    seen = of_pod(pod, failed, stopped, workload={**a_job(), "kind": "StatefulSet"})  # busy at its start, and deleted at its end
    assert not [*containers.failed_probes(seen, NOW)]
    (cause,) = containers.failures(seen, NOW)
    assert (cause.what, cause.remedy) == (
        "worker 0 was killed for lack of memory: the node's memory was used up",
        "set resources.memory, so that the pod is put where there is room",
    )


def deactivated(reason: str, message: str = "") -> Snapshot:
    evicted = {"type": "Evicted", "status": "True", "reason": reason, "message": f"The workload is deactivated{message}"}
    return in_queue(active=False, conditions=[refusal("x"), evicted])


def held_by(message: str) -> Snapshot:
    return in_queue(conditions=[refusal(message)])


ACTIVATE = 'when its cause is gone: kubectl patch workload w -n team --type merge -p \'{"spec": {"active": true}}\''
CHECKS = "see what the checks wait for: kubectl describe workload w -n team"
NO_QUEUE = "correct scheduling.queue (there are: team-a), or make the LocalQueue research"


@pytest.mark.parametrize(
    ("seen", "what", "remedy"),
    [
        (deactivated("Deactivated"), "may not admit it: a user has deactivated its Workload", ACTIVATE),
        (deactivated("DeactivatedDueToRequeuing"), "may not admit it: Kueue has deactivated its Workload", ACTIVATE),
        (deactivated("Deactivated", " due to retries"), "may not admit it: Kueue has deactivated its Workload", ACTIVATE),
        (in_queue(conditions=[RESERVED], admissionChecks=CHECKED), "has room for it, and waits for autoscaler", CHECKS),
        (held_by("insufficient unused quota for nvidia.com/gpu"), "has not admitted it", "lower `resources` or workers.replicas"),
        (held_by("LocalQueue research doesn't exist"), "has not admitted it", NO_QUEUE),
        (held_by("waiting for the head of the queue"), "has not admitted it", "wait until others leave the queue, raise its"),
    ],
)
def test_a_job_that_waits_in_a_queue_says_what_the_queue_says(seen: Snapshot, what: str, remedy: str) -> None:
    (cause,) = causes(seen)
    assert (cause.name, cause.what, cause.remedy[: len(remedy)]) == ("queue", f"queue research {what}", remedy)
    for condition in seen.kueue_workloads[0]["status"]["conditions"]:
        told = f"{condition['reason']}: {condition['message']}" in cause.evidence
        assert told != (condition is RESERVED)


def test_a_job_whose_last_step_could_not_be_saved_is_finished_and_not_well() -> None:
    warning = "step 64 could not be saved: rank 0: No space left on device"
    newest = CheckpointStatus(step=10, path="/out", time=NOW)
    status = a_status(State.SUCCEEDED, step=64, told="session", checkpoint=newest, warnings=[warning])
    unsaved = f"step 64 is not saved: {warning}; the newest checkpoint is that of step 10"
    assert local_job.causes(status, [], NOW) == [Finding("unsaved", f"it is finished, but {unsaved}")]
    assert status_page.state(status) == f"Succeeded, but {unsaved}"
    for well in ({"step": 10}, {"told": "log"}, {"checkpoint": None, "warnings": []}, {"state": State.RUNNING}):
        assert status.model_copy(update=well).unsaved == ""
    written = {"state": "Succeeded", "step": 64, "checkpoint": {"step": 10, "path": "s3://b", "time": NOW}}
    written |= {"conditions": [{"type": "Succeeded", "status": "True", "reason": "JobSucceeded", "message": "done"}]}
    (cause,) = causes(Snapshot("train", workload=elastic(**written)))
    assert cause.what == "it is finished, but step 64 is not saved: the newest checkpoint is that of step 10"


def test_a_statefulset_whose_workers_all_said_that_they_are_done_is_finished() -> None:
    workload = {"kind": "StatefulSet", "metadata": {"name": "train"}, "spec": {"replicas": 2}}
    pods = (a_pod("train-0", phase="Running", node="node-a"), a_pod("train-1", phase="Running", node="node-a", index=1))
    done = ["outlast | worker 0: training is done (exit 0)", "outlast | worker 0 stays up and does nothing more"]
    wrong = ["outlast | worker 1: --world is wrong (exit 78)", "outlast | worker 1 stays up and does nothing more"]

    def first(*logs: list[str]) -> Finding:
        return causes(of_pods(*pods, workload=workload, logs={f"train-{i}": log for i, log in enumerate(logs)}))[0]

    assert first(done, done).name == "finished"
    assert first(done, ["step 8"]).name == "starting"
    assert first(done, wrong).what == "worker 1 ended with exit code 78: --world is wrong; starting again would not help"


# Here


def a_status(state: State, reason: str = "", **fields: Any) -> JobStatus:
    whole = {"name": "digits", "run": "r", "replicas": 2, "launcher": 7, "submitted": NOW - 60, **fields}
    return JobStatus(state=state, reason=reason, **whole)


def test_a_job_here_that_succeeded_is_not_well_while_there_are_warnings() -> None:
    found = local_job.causes(a_status(State.SUCCEEDED, "workers 0 and 1 are done", warnings=["it began again"]), [], NOW)
    assert [(cause.what, cause.outcome) for cause in found] == [
        ("it began again", "fail"),
        ("it is finished: workers 0 and 1 are done", "pass"),
    ]


def test_slow_and_differing_ranks_are_findings_and_no_further_warnings() -> None:
    slow, differs = WorkerStatus(index=0, slow="rank 0 is slow"), WorkerStatus(index=1, node="b", differs="rank 1 differs")
    status = a_status(State.RUNNING, world=[0, 1], step=3, workers=[slow, differs], warnings=["rank 0 is slow", "rank 1 differs"])
    found = local_job.causes(status, [], NOW)
    assert [(cause.name, cause.what, cause.outcome) for cause in found] == [
        ("differing-rank", "rank 1 differs", "fail"),
        ("training", "2 of 2 workers train, at step 3", "pass"),
        ("slow-rank", "all ranks wait for one: rank 0 is slow", "warn"),
    ]
    assert "test the memory and the accelerators of b" in found[0].remedy


def test_a_job_here_that_failed_shows_the_traceback_of_the_first_rank() -> None:
    failure = Failure(worker=1, rank=1, code=1, reason="rank 1 on worker 1 failed", traceback="Traceback:\nKeyError: 'x'", step=8)
    (cause,) = local_job.causes(a_status(State.FAILED, "restart 3 of 2", failure=failure, exit_code=1), [], NOW)
    assert (cause.name, cause.what, cause.evidence) == (
        "failing-script",
        "it has failed: restart 3 of 2",
        ("rank 1 on worker 1 failed at step 8", "    Traceback:", "    KeyError: 'x'"),
    )


HANG = {"kind": "hang", "t": NOW, "stacks": "/out/stacks.txt"}
HUNG_RANK = Failure(worker=0, rank=0, code=137, cause=FailureCause.HANG, reason="no progress")


@pytest.mark.parametrize(
    ("status", "rule", "wrong"),
    [
        (a_status(State.SUCCEEDED, "training is done"), "finished", False),
        (a_status(State.SUSPENDED, "by the user"), "suspended", False),
        (a_status(State.INTERRUPTED, "Ctrl-C"), "interrupted", True),
        (a_status(State.CANCELLED, "cancelled by the user"), "cancelled", False),
        (a_status(State.FAILED, reason="x", exit_code=78), "configuration", True),
        (a_status(State.FAILED, reason="x", exit_code=137), "killed", True),
        (a_status(State.FAILED, reason="too late", end=End.DEADLINE, exit_code=1), "deadline", True),
        (a_status(State.FAILED, reason="restart 1 of 0", failure=HUNG_RANK), "hang", True),
        (a_status(State.PENDING, "starting"), "starting", True),
        (a_status(State.RUNNING, world=[0, 1], workers=[WorkerStatus(index=0, reason="stands still")]), "still", True),
        (a_status(State.RESTARTING, "lost worker 1"), "restarting", True),
        (a_status(State.RUNNING, launcher=None), "launcher", True),
        (a_status(State.RUNNING, world=[0, 1], step=3, steps=9), "training", False),
    ],
    ids=lambda value: str(value.state) if isinstance(value, JobStatus) else "",
)
def test_a_job_here_says_where_it_stands(status: JobStatus, rule: str, wrong: bool) -> None:
    (cause,) = local_job.causes(status, [{"t": NOW - 300, "kind": "launcher"}, HANG], NOW)
    assert (cause.name, cause.failed) == (rule, wrong)


def test_a_job_here_is_started_again_with_its_file() -> None:
    for state in (State.FAILED, State.CANCELLED):
        for file, command in (("/home/job.yaml", "/home/job.yaml"), ("", "FILE (its job file)")):
            (cause,) = local_job.causes(a_status(state, file=file), [], NOW)
            assert cause.remedy.endswith(f"outlast run {command}")


HUNG = "rank 1 on worker 1 hung: no progress for 12 s after step 5: rank 0 is in run.save(5) (train.py:20), rank 1 is in lock"


def failures(*steps: int | None, cause: str = "hang", every_s: float = 60.0) -> list[dict[str, Any]]:
    began = NOW - every_s * len(steps)
    said = {"kind": "failure", "reason": HUNG, "cause": cause, "counted": True}
    return [{"t": began + every_s * index, "step": step, **said} for index, step in enumerate(steps)]


def a_run_that_goes_on(**fields: Any) -> JobStatus:
    failure = Failure(worker=1, rank=1, code=137, cause=FailureCause.HANG, reason=HUNG, step=5)
    return a_status(State.RUNNING, **{"world": [0, 1], "step": 5, "steps": 24, "restarts": 14, "failure": failure, **fields})


def test_a_run_that_hangs_again_and_again_at_one_step_is_not_well() -> None:
    (cause,) = local_job.causes(a_run_that_goes_on(), [*failures(4, 5, 5, 5), HANG], NOW)
    assert (cause.name, cause.failed, cause.evidence) == ("failing", True, (HUNG,))
    said = "it has hung 3 times in a row at step 5 (4 failures without a new checkpoint)"
    assert cause.what == f"2 of 2 workers train, at step 5 of 24, but {said}"
    assert cause.remedy == "correct it; the stacks are in /out/stacks.txt; `outlast logs digits` shows all"


@pytest.mark.parametrize(
    ("status", "events", "said"),
    [
        (a_run_that_goes_on(), failures(3, 5), "it has failed 2 times without a new checkpoint"),
        (a_run_that_goes_on(step=0, steps=None), failures(0, 0), "it has hung 2 times in a row before its first step"),
        (a_run_that_goes_on(), failures(5), ""),
        (a_run_that_goes_on(step=6), failures(5, 5), ""),
        (a_run_that_goes_on(), [*failures(5, 5), {"kind": "committed", "t": NOW}], ""),
        (a_run_that_goes_on(step=0, steps=None), failures(0, 0, every_s=10)[:1] + failures(0), ""),
    ],
)  # fmt: skip
def test_a_run_that_fails_without_progress_is_not_well_and_one_that_gets_on_is(
    status: JobStatus, events: list[dict[str, Any]], said: str
) -> None:
    (cause,) = local_job.causes(status, events, NOW)
    assert cause.failed is bool(said)
    assert said in cause.what


def test_an_elastic_job_that_hangs_again_and_again_is_not_well() -> None:
    record = {"time": NOW, "committedStep": 4, "failedStep": 5}
    failed = {"checkpoint": {"step": 4}, "failures": [record, record], "lastFailure": {"reason": HUNG, "cause": "hang"}}

    def found(**better: Any) -> list[Finding]:
        return [cause for cause in causes(training(**{"step": 5, **failed, **better})) if cause.name == "failing"]

    (cause,) = found()
    assert (cause.what, cause.failed) == ("it trains at step 5, but it has hung 2 times in a row at step 5", True)
    assert cause.evidence == (HUNG,)
    for better in ({"step": 6}, {"checkpoint": {"step": 5}}, {"failures": [record]}):
        assert not found(**better)


def test_a_worker_that_is_kept_out_because_the_others_did_not_hear_it_is_named_with_its_node_and_the_time() -> None:
    lost = {"worker": 2, "uid": "u", "node": "node-c", "at": NOW - 15, "times": 2}

    def found(world: list[int], **more: object) -> list[Finding]:
        return [cause for cause in causes(training(world=world, judged={"lost": [{**lost, **more}]})) if cause.failed]

    (cause,) = found([0, 1])
    assert cause == Finding(
        "cut-off",
        "worker 2 was lost 2 times, each soon after the one before, and may join again in 5.0s",
        "wait; if it happens again, look at the network of node node-c",
        ("the others did not hear it",),
    )
    assert not found([0, 1, 2])
    assert not found([0, 1], times=1)
    assert not found([0, 1], held=False)


def test_a_store_that_cannot_be_pushed_to_is_told_before_that_all_trains() -> None:
    there = StoreStatus(url="s3://b/runs/digits", since=NOW - 120, error="the store is not well (HTTP 503)", backlog=2**20)
    found = local_job.causes(a_status(State.RUNNING, world=[0, 1], store=there, warnings=["the disk is full"]), [], NOW)
    assert [cause.name for cause in found] == ["store", "warning", "training"]
    assert found[0].what == "its output cannot be uploaded to s3://b/runs/digits since 2m00s, 1.0 MiB of checkpoints wait"
    assert found[-1].what.startswith("2 of 2 workers train")


# The command line


@pytest.fixture
def backend(tmp_path: Path) -> fake.FakeBackend:
    backend = fake.FakeBackend(tmp_path)
    backend.runs["digits"] = fake.Run(a_status(State.SUSPENDED, "by the user"))
    return backend


def test_why_tells_of_a_job_of_this_machine(backend: fake.FakeBackend, outlast: Outlast) -> None:
    assert outlast("why", backend=backend) == (0, "It is suspended: by the user\n  → go on with: outlast resume digits\n", "")
    code, out, _ = outlast("why", "digits", "-o", "json", backend=backend)
    assert (code, json.loads(out)["causes"][0]["rule"]) == (0, "suspended")


# What is read of a cluster


def a_cluster(name: str, **options: Any) -> FakeCluster:
    """A cluster that shows what was recorded."""
    found = situations.recorded(name)
    cluster = FakeCluster(a_namespace(), **options)
    for kind in (kinds.JOB, kinds.POD, kinds.EVENT, kinds.NODE, kinds.CLAIM):
        for document in found[kind.plural]:
            cluster.put({**document, "apiVersion": kind.api_version, "kind": kind.kind})
    for kind in (kinds.SECRET, kinds.CONFIG_MAP):
        for each in found[kind.plural]:
            cluster.put(kind.document({"name": each}))
    cluster.lines = found["logs"]
    return cluster


@pytest.mark.parametrize("name", situations.SITUATIONS)
def test_what_is_read_of_a_cluster_gives_the_same_cause(name: str) -> None:
    found = causes(gather_evidence.job(a_cluster(name), "train"))  # type: ignore[arg-type]
    assert (found[0].name, found[0].what) == (situations.findings(name)[0].name, situations.findings(name)[0].what)


def test_what_is_forbidden_is_named_and_the_rest_is_told() -> None:
    seen = gather_evidence.job(a_cluster("gpu", forbidden=(kinds.NODE, kinds.EVENT)), "train")  # type: ignore[arg-type]
    assert seen.forbidden == {"nodes": "you may not list nodes", "events": "you may not list events"}
    assert causes(seen)[0].name == "unschedulable-gpu"


def test_a_kind_that_is_not_installed_is_not_said_to_be_forbidden() -> None:
    cluster = a_cluster("gpu", forbidden=(kinds.ELASTIC_JOB, kinds.WORKLOAD))
    assert gather_evidence.job(cluster, "train").forbidden == {}  # type: ignore[arg-type]


def test_secrets_that_outlast_has_made_are_not_offered_in_place_of_a_missing_one() -> None:
    cluster = a_cluster("secret-missing")
    labels = {"app.kubernetes.io/managed-by": "outlast"}
    cluster.put(kinds.SECRET.document({"name": "train-rdzv", "labels": labels}))
    cluster.put(kinds.SECRET.document({"name": "theirs"}))
    seen = gather_evidence.job(cluster, "train").secrets  # type: ignore[arg-type]
    assert ("theirs" in seen, "train-rdzv" in seen) == (True, False)


def test_a_job_that_was_submitted_again_is_the_newest_one() -> None:
    cluster = a_cluster("gpu")
    for old in (*cluster.list_(kinds.JOB), *cluster.list_(kinds.POD)):
        meta = {**old["metadata"], "name": f"{old['metadata']['name']}-new", "creationTimestamp": "2030-01-01T00:00:00Z"}
        del meta["uid"]
        cluster.put({**old, "metadata": {**meta, "labels": {**meta["labels"], "outlast.dev/run": "new"}}})
    seen = gather_evidence.job(cluster, "train")  # type: ignore[arg-type]
    assert pod_status.name(seen.workload).endswith("-new")
    assert [pod_status.name(pod).endswith("-new") for pod in seen.pods] == [True, True]


def test_a_job_that_is_not_in_the_cluster_is_told() -> None:
    with pytest.raises(NotFound, match="there is no job other in namespace team; `outlast list` shows those there are"):
        gather_evidence.job(a_cluster("gpu"), "other")  # type: ignore[arg-type]
    with pytest.raises(NotFound, match="there is no namespace nowhere; correct --namespace"):
        gather_evidence.job(FakeCluster(namespace="nowhere"), "other")  # type: ignore[arg-type]
    with pytest.raises(Forbidden, match="you may not list pods"):
        gather_evidence.job(FakeCluster(a_namespace(), forbidden=(kinds.POD,)), "other")  # type: ignore[arg-type]


def a_namespace() -> Document:
    return kinds.NAMESPACE.document({"name": "team"})


def test_why_tells_of_a_job_in_a_cluster(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "connect", lambda context, namespace: a_cluster("gpu", forbidden=(kinds.CLAIM,)))
    with pytest.raises(SystemExit) as ended:
        cli.main(["why", "train", "-n", "team"])
    assert ended.value.code == 0
    out, err = capsys.readouterr()
    assert out.startswith("Workers 0 and 1 find no node: none has any nvidia.com/gpu\n  nodes offer: node-a 0 nvidia.com/gpu")
    assert out.endswith("Not checked, because you may not read them: persistentvolumeclaims.\n")
    assert err == ""
