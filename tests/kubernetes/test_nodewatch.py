"""The node watcher's decisions: what AWS announces, how a node says it, which pods go when. And its questions to AWS."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

import imds
from imds import Imds
from nodes import T0, Document, a_node, a_pod
from outlast.job import contract
from outlast.job.contract import Annotation, LeavingKind
from outlast.kubernetes.nodewatch import drain, notices
from outlast.kubernetes.nodewatch.drain import Step
from outlast.kubernetes.nodewatch.metadata import Metadata, MetadataAway
from outlast.kubernetes.nodewatch.notices import REBALANCE, Notice

SPOT = Notice(LeavingKind.SPOT, T0 + 120, "taken back")
REBOOT = Notice(LeavingKind.MAINTENANCE, T0 + 3600, "reboot")


def test_an_interruption_has_a_time_and_one_that_cannot_be_read_is_still_one() -> None:
    said = notices.spot('{"action": "terminate", "time": "2026-01-01T00:02:00Z"}', T0)
    assert said == Notice(LeavingKind.SPOT, T0 + 120, "AWS terminates this spot machine")
    for text in ("", "{}", "[]", "terminate", "1", '{"action": "stop", "time": "soon"}'):
        assert (said := notices.spot(text, T0)).deadline == T0 + 120
        later = notices.spot(text, T0 + 50)
        assert notices.effective([later], said, T0 + 50) == said  # counted from the first time


def an_event(**fields: str) -> Document:
    whole = {"NotBefore": "01 Jan 2026 00:10:00 GMT", "NotAfter": "01 Jan 2026 02:00:00 GMT", "Code": "system-reboot"}
    return {**whole, "State": "active", "Description": "scheduled reboot", **fields}


def test_scheduled_events_hold_while_they_are_active() -> None:
    (read,) = notices.scheduled(json.dumps([an_event()]), T0)
    assert (read.kind, read.deadline) == (LeavingKind.MAINTENANCE, T0 + 600)
    assert read.reason == "AWS has scheduled system-reboot for this machine: scheduled reboot"
    for done in (an_event(State="completed"), an_event(State="canceled"), an_event(Description="[Canceled] scheduled reboot")):
        assert notices.scheduled(json.dumps([done]), T0) == []
    for wrong in ("{}", "no", '["x"]'):
        with pytest.raises(ValueError, match=r"no list of events|Expecting value"):
            notices.scheduled(wrong, T0)


def test_maintenance_that_has_begun_has_until_the_end_of_its_window_and_each_pod_its_own_grace() -> None:
    (begun,) = notices.scheduled(json.dumps([an_event()]), T0 + 601)
    assert begun.deadline == T0 + 7200
    (over,) = notices.scheduled(json.dumps([an_event()]), T0 + 86400)
    assert over.deadline is None
    assert drain.plan([a_pod("web", grace=630)], over.deadline, T0 + 86400) == ([Step(a_pod("web", grace=630), 630)], [])


def test_the_earliest_deadline_counts_and_what_is_far_waits() -> None:
    assert notices.effective([REBALANCE, REBOOT, SPOT], None, T0) == SPOT
    assert notices.effective([REBALANCE, REBOOT], None, T0) == REBALANCE
    assert notices.effective([REBOOT], None, T0) is None
    assert notices.effective([REBOOT], None, T0 + 2700) == REBOOT


def test_a_recommendation_and_maintenance_can_be_withdrawn_and_an_interruption_cannot() -> None:
    assert notices.effective([], REBALANCE, T0) is notices.effective([], REBOOT, T0 + 3000) is None
    assert notices.effective([], SPOT, T0 + 150) == SPOT
    assert notices.effective([], SPOT, T0 + 180) is None  # the machine was stopped, and has come back


# Node


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
    marked = patched(before, notices.node_patch(before, SPOT))
    assert marked["spec"]["unschedulable"]
    assert marked["spec"]["taints"][-1] == {"key": contract.LEAVING, "value": "spot", "effect": "NoSchedule"}
    assert marked["metadata"]["annotations"][Annotation.LEAVING_AT] == "2026-01-01T00:02:00Z"
    assert notices.read(marked) == SPOT
    twice = patched(marked, notices.node_patch(marked, REBALANCE))
    assert notices.read(twice) == REBALANCE
    assert Annotation.LEAVING_AT not in twice["metadata"]["annotations"]
    assert patched(twice, notices.node_patch(twice, None)) == before
    assert notices.read(before) is None
    by_hand = {"key": contract.LEAVING, "value": "maintenance", "effect": "NoSchedule"}
    assert notices.read(a_node(taints=[by_hand])) is None
    marked["metadata"]["annotations"][Annotation.LEAVING_AT] = "soon"
    assert notices.read(marked) == Notice(LeavingKind.SPOT, None, "taken back"), "whoever wrote that does not end the watcher"


# Drain


END = T0 + 120
WORKER = a_pod("worker", "ElasticJob", grace=150, labels={"outlast.dev/job": "train"})
INDEXED = a_pod("indexed", "Job", grace=150, labels={"outlast.dev/job": "train"})
WEB = a_pod("web")
OPERATOR = a_pod("operator", labels={"app.kubernetes.io/part-of": "outlast"})


def test_what_stays_with_its_node_is_left_alone() -> None:
    static = a_pod("static", "Node", annotations={"kubernetes.io/config.mirror": "x"})
    ended = [a_pod(phase.lower(), phase=phase) for phase in ("Succeeded", "Failed")]
    assert drain.plan([a_pod("proxy", "DaemonSet"), static, *ended], END, T0) == ([], [])


def test_others_go_at_once_and_workers_that_the_operator_runs_have_until_the_last_call() -> None:
    steps, waiting = drain.plan([WORKER, INDEXED, WEB, OPERATOR], END, T0)
    assert steps == [Step(INDEXED, 118, last=True), Step(WEB, 30)]
    assert waiting == ["team/worker", "team/operator"]
    assert drain.plan([WORKER, OPERATOR], END, T0 + 89)[1] == ["team/worker", "team/operator"]
    assert drain.plan([WORKER, OPERATOR], END, T0 + 90) == ([Step(WORKER, 28, last=True), Step(OPERATOR, 28, last=True)], [])
    assert drain.plan([OPERATOR], END, T0 + 10) == ([Step(OPERATOR, 30)], [])


def test_a_pod_that_is_going_is_waited_for_and_the_last_has_a_second() -> None:
    assert drain.plan([a_pod("web", deletionTimestamp="2026-01-01T00:00:00Z")], END, T0) == ([], ["team/web"])
    assert drain.plan([WEB], END, T0 + 500) == ([Step(WEB, 1, last=True)], [])


# Metadata


@pytest.fixture
def service() -> Iterator[Imds]:
    with imds.serving(Imds()) as found:
        yield found


def test_aws_is_asked_with_a_token_that_is_renewed(service: Imds) -> None:
    source = Metadata(service.address, timeout_s=30)
    assert source.read(T0) == []
    assert service.asked.count(f"PUT {imds.TOKEN}") == 1
    service.asked.clear()
    source.read(T0)
    assert service.asked == [f"GET {each}" for each in (imds.SPOT, imds.REBALANCE, imds.SCHEDULED)]
    service.tokens.clear()  # it has expired, or the machine was stopped
    service.documents[imds.SPOT] = imds.spot("2026-01-01T00:02:00Z")
    assert [each.deadline for each in source.read(T0)] == [T0 + 120]


def test_recommendations_can_be_left_out(service: Imds) -> None:
    service.documents[imds.REBALANCE] = '{"noticeTime": "2026-01-01T00:00:00Z"}'
    assert Metadata(service.address, timeout_s=30).read(T0) == [REBALANCE]
    assert Metadata(service.address, rebalance=False, timeout_s=30).read(T0) == []


def test_a_service_that_refuses_is_slow_is_away_or_says_nonsense_is_named_with_the_remedy(service: Imds) -> None:
    service.documents[imds.SCHEDULED] = "{}"
    with pytest.raises(MetadataAway, match="scheduled events that are not understood: they are no list of events"):
        Metadata(service.address, timeout_s=30).read(T0)
    service.refused = True
    with pytest.raises(MetadataAway, match=r"/latest/meta-data/spot/instance-action with HTTP 403; see that the machine's"):
        Metadata(service.address, timeout_s=30).read(T0)
    service.silent.set()
    with pytest.raises(MetadataAway, match=r"does not answer in time; see that"):
        Metadata(service.address, timeout_s=0.05).read(T0)
    with pytest.raises(MetadataAway, match=r"AWS's metadata service at http://127.0.0.1:1 cannot be reached: .*refused"):
        Metadata("http://127.0.0.1:1").read(T0)
