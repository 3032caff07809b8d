"""The node watcher's decisions: what clouds announce, how a node says it, which pods go when. And its questions to clouds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

import imds
from imds import Imds
from outlast import contract
from outlast.contract import Annotation, LeavingKind
from outlast.errors import OutlastError
from outlast.kube import pods as podwords
from outlast.nodewatch import drain, node, notices, process, sources
from outlast.nodewatch.drain import Plan, Step, Window
from outlast.nodewatch.notices import Notice
from outlast.nodewatch.sources import MetadataAway

Document = dict[str, Any]
T0 = podwords.seconds("2026-01-01T00:00:00Z")


# ---------------------------------------------------------------------------------------------------------------- notices


def test_an_interruption_on_aws_has_a_time() -> None:
    read = notices.aws_spot('{"action": "terminate", "time": "2026-01-01T00:02:00Z"}', T0)
    assert (read.kind, read.deadline, read.reason) == (LeavingKind.SPOT, T0 + 120, "AWS terminates this spot machine")
    assert (
        notices.aws_spot('{"action": "hibernate", "time": "2026-01-01T00:02:00Z"}', T0).reason
        == "AWS hibernates this spot machine"
    )


@pytest.mark.parametrize("text", ["", "{}", "[]", "terminate", '{"action": "terminate", "time": "soon"}'])
def test_an_interruption_that_cannot_be_read_is_still_one(text: str) -> None:
    read = notices.aws_spot(text, T0)
    assert (read.kind, read.deadline) == (LeavingKind.SPOT, T0 + 120)
    (later,) = notices.merged([read], [notices.aws_spot(text, T0 + 50)], T0 + 50)
    assert later.deadline == T0 + 120  # counted from the first time


def an_event(**fields: str) -> Document:
    whole = {"NotBefore": "01 Jan 2026 00:10:00 GMT", "Code": "system-reboot", "EventId": "e-1", "State": "active"}
    return {**whole, "Description": "scheduled reboot", **fields}


def test_scheduled_events_of_aws_hold_while_they_are_active() -> None:
    (read,) = notices.aws_scheduled(json.dumps([an_event()]), T0)
    assert (read.kind, read.deadline) == (LeavingKind.MAINTENANCE, T0 + 600)
    assert read.reason == "AWS has scheduled system-reboot for this machine: scheduled reboot"
    for done in (an_event(State="completed"), an_event(State="canceled"), an_event(Description="[Canceled] scheduled reboot")):
        assert notices.aws_scheduled(json.dumps([done]), T0) == []
    assert notices.aws_scheduled("", T0) == notices.aws_scheduled("[]", T0) == []
    for wrong in ("{}", "no", '["x"]'):
        with pytest.raises(ValueError, match="it is no list of events"):
            notices.aws_scheduled(wrong, T0)


def test_google_gives_seconds_from_the_moment_at_which_it_says_so() -> None:
    assert notices.gcp_preempted("FALSE\n", T0) == notices.gcp_maintenance("MIGRATE_ON_HOST_MAINTENANCE", T0) == []
    first, again = notices.gcp_preempted("TRUE", T0), notices.gcp_preempted("TRUE", T0 + 5)
    assert notices.merged(first, again, T0 + 5) == tuple(first)
    assert [(each.kind, each.deadline) for each in first] == [(LeavingKind.SPOT, T0 + 15)]
    (read,) = notices.gcp_maintenance("TERMINATE_ON_HOST_MAINTENANCE", T0)
    assert (read.kind, read.deadline) == (LeavingKind.MAINTENANCE, T0 + 60)


def azure(*events: Document) -> str:
    return json.dumps({"DocumentIncarnation": 1, "Events": list(events)})


def test_azure_names_the_machines_of_an_event() -> None:
    event = {"EventId": "A", "EventType": "Preempt", "Resources": ["vm_0"], "NotBefore": "Thu, 01 Jan 2026 00:00:30 GMT"}
    (read,) = notices.azure_events(azure(event), T0, "vm_0")
    assert read == Notice(LeavingKind.SPOT, T0 + 30, "Azure takes this spot machine back", "A", alone=True)
    assert notices.azure_events(azure(event), T0, "vm_1") == []
    assert notices.azure_events(azure({**event, "EventType": "Freeze"}), T0, "vm_0") == []
    begun = {**event, "EventType": "Reboot", "NotBefore": "", "Resources": ["vm_0", "vm_1"], "Description": "Host update."}
    (read,) = notices.azure_events(azure(begun), T0, "vm_0")
    assert read == Notice(LeavingKind.MAINTENANCE, T0, "Azure reboots this machine: Host update.", "A")
    for wrong in ("", "[]", "{}", '{"Events": [1]}'):
        with pytest.raises(ValueError, match="it has no list of Events"):
            notices.azure_events(wrong, T0, "vm_0")


def test_an_address_of_ones_own_may_say_a_time() -> None:
    for text in ("2026-01-01T00:02:00Z", '{"action": "stop", "time": "2026-01-01T00:02:00Z"}'):
        assert notices.from_address(text, T0).deadline == T0 + 120
    assert notices.from_address("soon", T0).deadline is None


SPOT = Notice(LeavingKind.SPOT, T0 + 120, "taken back", "spot")
REBALANCE = Notice(LeavingKind.REBALANCE, None, "better to leave", "rebalance")
REBOOT = Notice(LeavingKind.MAINTENANCE, T0 + 3600, "reboot", "e-1")


def test_the_earliest_deadline_counts_and_what_is_far_waits() -> None:
    assert notices.due([REBALANCE, REBOOT, SPOT], T0, ahead_s=900) == SPOT
    assert notices.due([REBALANCE, REBOOT], T0, ahead_s=900) == REBALANCE
    assert notices.due([REBOOT], T0, ahead_s=900) is None
    assert notices.due([REBOOT], T0 + 2700, ahead_s=900) == REBOOT


def test_a_recommendation_and_maintenance_can_be_withdrawn_and_an_interruption_cannot() -> None:
    assert notices.merged([REBALANCE, REBOOT], [], T0) == ()
    assert notices.merged([SPOT], [], T0 + 150) == (SPOT,)
    assert notices.merged([SPOT], [], T0 + 180) == ()  # the machine was stopped, and has come back
    assert notices.merged([SPOT, REBOOT], [SPOT, SPOT], T0) == (SPOT,)


# ------------------------------------------------------------------------------------------------------------------- node


def a_node(**spec: Any) -> Document:
    labels = {
        "topology.kubernetes.io/zone": "us-west-2a",
        "node.kubernetes.io/instance-type": "g5.xlarge",
        "karpenter.sh/nodepool": "gpu",
    }
    meta = {"name": "n1", "resourceVersion": "7", "labels": labels, "annotations": {"theirs": "kept"}}
    return {"apiVersion": "v1", "kind": "Node", "metadata": meta, "spec": {"providerID": "aws:///us-west-2a/i-1", **spec}}


def patched(document: Document, change: Document) -> Document:
    """RFC 7396, as far as these changes need it."""
    found = {**document}
    for key, value in change.items():
        if isinstance(value, dict):
            found[key] = patched(found.get(key, {}), value)
        elif value is None:
            found.pop(key, None)
        else:
            found[key] = value
    return found


@pytest.mark.parametrize("spec", [{}, {"unschedulable": True}, {"taints": [{"key": "gpu", "effect": "NoSchedule"}]}])
def test_a_node_is_marked_and_cleared_and_everything_of_others_stays(spec: Document) -> None:
    before = a_node(**spec)
    marked = patched(before, node.marked(before, SPOT))
    assert marked["spec"]["unschedulable"]
    assert marked["spec"]["taints"][-1] == {"key": contract.LEAVING, "value": "spot", "effect": "NoSchedule"}
    assert marked["metadata"]["annotations"][Annotation.LEAVING_AT] == "2026-01-01T00:02:00Z"
    assert node.read(marked) == Notice(LeavingKind.SPOT, T0 + 120, "taken back", node.KEPT)
    assert node.same(node.read(marked), SPOT)
    twice = patched(marked, node.marked(marked, REBALANCE))
    assert node.same(node.read(twice), REBALANCE)
    assert Annotation.LEAVING_AT not in twice["metadata"]["annotations"]
    assert patched(twice, node.cleared(twice)) == before
    assert node.read(before) is None
    by_hand = {"key": contract.LEAVING, "value": "maintenance", "effect": "NoSchedule"}
    assert node.read(a_node(taints=[by_hand])) is None
    marked["metadata"]["annotations"][Annotation.LEAVING_AT] = "soon"
    assert node.read(marked) == Notice(LeavingKind.SPOT, None, "taken back", node.KEPT), (
        "whoever wrote that does not end the watcher"
    )


def test_the_cloud_is_that_of_the_providerid() -> None:
    given = {"aws:///us-west-2a/i-1": "aws", "gce://p/z/n": "gcp", "azure:///subscriptions/s": "azure"}
    assert {provider: node.cloud(a_node(providerID=provider)) for provider in given} == given
    with pytest.raises(OutlastError, match=r"node n1 has the providerID kind://docker/a/b, which is not of AWS, .* --cloud"):
        node.cloud(a_node(providerID="kind://docker/a/b"))


def test_the_message_names_machine_pods_and_times() -> None:
    found = node.message(node.machine(a_node()), ["team/train-worker-0"], SPOT, T0)
    times = {"noticed": "2026-01-01T00:00:00Z", "deadline": "2026-01-01T00:02:00Z"}
    machine = {"node": "n1", "zone": "us-west-2a", "type": "g5.xlarge", "group": "gpu"}
    assert found == {**machine, **times, "kind": "spot", "reason": "taken back", "pods": ["team/train-worker-0"]}


# ------------------------------------------------------------------------------------------------------------------ drain


def a_pod(name: str, owner: str = "ReplicaSet", *, grace: int | None = 30, phase: str = "Running", **meta: Any) -> Document:
    api = "outlast.dev/v1alpha1" if owner == "ElasticJob" else "apps/v1"
    owners = [{"apiVersion": api, "kind": owner, "name": "o", "uid": "u", "controller": True}]
    whole = {"name": name, "namespace": "team", "uid": f"uid-{name}", "ownerReferences": owners, **meta}
    spec = {"nodeName": "n1"} if grace is None else {"nodeName": "n1", "terminationGracePeriodSeconds": grace}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": whole, "spec": spec, "status": {"phase": phase}}


WINDOW = Window(T0, T0 + 120)
WORKER = a_pod("worker", "ElasticJob", grace=150, labels={"outlast.dev/job": "train"})
INDEXED = a_pod("indexed", "Job", grace=150, labels={"outlast.dev/job": "train"})
WEB = a_pod("web")
ETCD = a_pod("etcd", "StatefulSet", labels={"app.kubernetes.io/part-of": "outlast"})


def test_what_stays_with_its_node_is_left_alone() -> None:
    left = [
        a_pod("proxy", "DaemonSet"),
        a_pod("static", "Node", annotations={"kubernetes.io/config.mirror": "x"}),
        a_pod("done", phase="Succeeded"),
        a_pod("failed", phase="Failed"),
    ]
    assert drain.plan(left, WINDOW, T0, ()) == Plan()
    assert drain.plan(left, WINDOW, T0, ()).drained


def test_others_go_at_once_and_workers_that_the_operator_runs_have_until_the_last_call() -> None:
    scratch = a_pod("scratch")
    scratch["spec"]["volumes"] = [{"name": "shm", "emptyDir": {"medium": "Memory"}}]
    pods = [WORKER, INDEXED, scratch, ETCD]
    assert drain.plan(pods, WINDOW, T0, ()) == Plan(
        (Step(INDEXED, "evict", 118), Step(scratch, "evict", 30)), ("team/worker", "team/etcd")
    )
    assert drain.plan([WORKER, ETCD], WINDOW, T0 + 89, ()).waiting == ("team/worker", "team/etcd")
    assert drain.plan([WORKER, ETCD], WINDOW, T0 + 90, ()).steps == (Step(WORKER, "evict", 28), Step(ETCD, "evict", 28))
    assert drain.plan([ETCD], WINDOW, T0 + 10, ()).steps == (Step(ETCD, "evict", 30),)


def test_a_short_notice_keeps_a_third_for_evictions() -> None:
    short = Window(T0, T0 + 15)
    assert drain.plan([WORKER], short, T0 + 9.9, ()).waiting == ("team/worker",)
    assert drain.plan([WORKER], short, T0 + 10, ()).steps == (Step(WORKER, "evict", 3),)
    assert drain.plan([WEB], short, T0 + 14.5, ()).steps == (Step(WEB, "evict", 1),)
    assert drain.plan([WEB], short, T0 + 99, ()).steps == (Step(WEB, "evict", 1),)


def test_a_pod_that_is_going_is_waited_for() -> None:
    going = a_pod("web", deletionTimestamp="2026-01-01T00:00:00Z")
    found = drain.plan([going], WINDOW, T0, ())
    assert (found.steps, found.waiting, found.drained) == ((), ("team/web",), False)


def test_a_budget_is_respected_until_the_pod_would_be_lost() -> None:
    refused = {"uid-web"}
    assert drain.plan([WEB], WINDOW, T0 + 88, refused).steps == (Step(WEB, "evict", 30),)
    (step,) = drain.plan([WEB], WINDOW, T0 + 88.5, refused).steps
    assert step == Step(WEB, "delete", 29)
    assert str(step) == "deletes, whatever its PodDisruptionBudget says, team/web, which has 29 s to end"


# ---------------------------------------------------------------------------------------------------------------- sources


@pytest.fixture
def service() -> Iterator[Imds]:
    with imds.serving(Imds()) as found:
        yield found


def test_aws_is_asked_with_a_token_that_is_renewed(service: Imds) -> None:
    clock = [0.0]
    source = sources.Aws(service.address, timeout_s=30, clock=lambda: clock[0])
    assert source.read(T0) == []
    assert service.asked == [f"PUT {imds.TOKEN}", *(f"GET {each}" for each in (imds.SPOT, imds.REBALANCE, imds.SCHEDULED))]
    service.asked.clear()
    source.read(T0)
    assert len(service.asked) == 3
    clock[0] = 6 * 3600 - 299
    source.read(T0)
    assert service.asked.count(f"PUT {imds.TOKEN}") == 1
    service.tokens.clear()  # as after a stop of the machine
    service.documents[imds.SPOT] = imds.spot("2026-01-01T00:02:00Z")
    assert [each.deadline for each in source.read(T0)] == [T0 + 120]


def test_aws_recommendations_can_be_left_out(service: Imds) -> None:
    service.documents[imds.REBALANCE] = '{"noticeTime": "2026-01-01T00:00:00Z"}'
    assert [each.kind for each in sources.of("aws", address=service.address, timeout_s=30).read(T0)] == [LeavingKind.REBALANCE]
    assert sources.of("aws", address=service.address, timeout_s=30, rebalance=False).read(T0) == []


def test_google_and_azure_are_asked_with_their_headers(service: Imds) -> None:
    instance = "/computeMetadata/v1/instance/"
    service.documents |= {f"{instance}preempted": "FALSE", f"{instance}maintenance-event": "NONE"}
    google = sources.of("gcp", address=service.address, timeout_s=30)
    assert google.read(T0) == []
    service.documents[f"{instance}preempted"] = "TRUE"
    assert [each.deadline for each in google.read(T0)] == [T0 + 15]

    event = {"EventId": "A", "EventType": "Preempt", "Resources": ["vm_0"], "NotBefore": "Thu, 01 Jan 2026 00:00:30 GMT"}
    service.documents[sources._AZURE_NAME] = "vm_0"
    service.documents[sources._AZURE_EVENTS] = azure(event)
    source = sources.of("azure", address=service.address, timeout_s=30)
    (notice,) = source.read(T0)
    source.acknowledge(notice)
    assert service.posted == ['{"StartRequests": [{"EventId": "A"}]}']
    service.documents[sources._AZURE_EVENTS] = azure({**event, "Resources": ["vm_0", "vm_1"]})
    (notice,) = source.read(T0)
    source.acknowledge(notice)  # for all of its machines: not ours to say
    assert len(service.posted) == 1


def test_an_address_of_ones_own_is_asked_with_a_token_where_it_wants_one(service: Imds) -> None:
    source = sources.Address(f"{service.address}{imds.SPOT}", 30)
    assert source.read(T0) == []
    service.documents[imds.SPOT] = imds.spot("2026-01-01T00:02:00Z")
    assert [each.deadline for each in source.read(T0)] == [T0 + 120]
    own = sources.Address(f"{service.address}/notice", 30)
    assert own.read(T0) == []
    service.documents["/notice"] = "2026-01-01T00:01:00Z"
    assert [each.deadline for each in own.read(T0)] == [T0 + 60]


def test_a_service_that_refuses_is_slow_is_away_or_says_nonsense_is_named_with_the_remedy(
    service: Imds,
) -> None:
    source = sources.of("aws", address=service.address, timeout_s=30)
    service.documents[imds.SCHEDULED] = "<html>"
    with pytest.raises(MetadataAway, match=r"answers /latest/meta-data/events/maintenance/scheduled with a document that"):
        source.read(T0)
    service.refused = True
    with pytest.raises(MetadataAway, match=r"answers .*/instance-action with HTTP 403 \(Forbidden\); see that the machine's"):
        source.read(T0)
    service.silent.set()
    with pytest.raises(MetadataAway, match=r"cannot be reached: it does not answer in time; see that"):
        sources.Metadata(service.address, "it", 0.05).ask("/", {})
    with pytest.raises(MetadataAway, match=r"AWS's metadata service at http://127.0.0.1:1 cannot be reached: .*refused"):
        sources.of("aws", address="http://127.0.0.1:1").read(T0)


# ---------------------------------------------------------------------------------------------------------------- options


def test_times_of_the_command_line_are_checked() -> None:
    assert process.settings("5", "1h", dry_run=True) == process.Settings(5.0, 3600.0, True)
    with pytest.raises(OutlastError, match=r"--poll-interval 0s is below 0\.2s; give 0\.2s or more"):
        process.settings("0s", "15m", dry_run=False)
    with pytest.raises(OutlastError, match="--ahead soon"):
        process.settings("1s", "soon", dry_run=False)
    with pytest.raises(OutlastError, match="--notice-url localhost is not an address"):
        process.source(process.Options("n1", notice_url="localhost"), a_node())
    assert process.source(process.Options("n1"), a_node()) == sources.Aws()


@pytest.mark.parametrize(
    ("deadline", "said"), [(T0 + 5, ", 5 s before its deadline"), (T0 - 1, ", 1 s after its deadline"), (None, "")]
)
def test_what_ends_after_the_deadline_is_not_said_to_end_before_it(deadline: float | None, said: str) -> None:
    assert notices.against(deadline, T0) == said
