"""The rendezvous by way of the Kubernetes API: what a member says on its Lease, what it hears, and what outages do to both."""

from __future__ import annotations

import contextlib
import json
import secrets
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import apiserver
from coordinators import Document, Operator
from outlast.base import errors
from outlast.base.typed_json import decode
from outlast.job import contract, ledger
from outlast.job.workerfiles import progress_file
from outlast.kubernetes import api, board
from outlast.kubernetes.api import kinds
from outlast.rendezvous import messages, transport
from outlast.rendezvous.who_trains import MemberState, World
from waits import until


@pytest.fixture
def operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Operator]:
    made = Operator()
    with apiserver.entered(made.api, tmp_path, monkeypatch):
        monkeypatch.setenv(contract.Env.MEMBER, "uid-of-the-pod")
        monkeypatch.setenv(contract.Env.NAMESPACE, "default")
        for name in (contract.Env.OWNER, contract.Env.GENERATION):
            monkeypatch.delenv(name, raising=False)
        yield made


@pytest.fixture
def ended() -> list[messages.Closed]:
    """The ends of the run that a member has noted for its agent."""
    return []


@pytest.fixture
def told() -> list[tuple[float | None, str]]:
    """Until when, and why, a member must leave."""
    return []


@pytest.fixture
def member(operator: Operator, tmp_path: Path, ended: list[messages.Closed], told) -> Iterator[Callable[..., transport.Client]]:
    """Makes members of the run, which go at the end."""
    with contextlib.ExitStack() as stack:

        def make(id: int = 0) -> transport.Client:
            heard = {"must_leave": lambda *when: told.append(when), "run_ended": ended.append}
            client = transport.client("kubernetes://train", transport.Member("run", id, tmp_path, 2, **heard))
            return stack.enter_context(contextlib.closing(client))

        yield make


@pytest.fixture
def waiting(operator: Operator, member) -> Callable[[], transport.Client]:
    """Makes a member whose first report has arrived."""

    def make() -> transport.Client:
        client: transport.Client = member()
        client.report("waiting")
        until(operator.lease)
        return client

    return make


def a_world(generation: int = 1, *members: int) -> Document:
    return {"generation": generation, "members": list(members or (0,)), "address": "10.0.0.1:5", "reason": "all here", "at": 5.0}


def test_a_report_is_the_lease_of_a_pod_and_goes_with_the_job(operator: Operator, member) -> None:
    member(3).report("waiting", address="10.0.0.7:4711")
    until(lambda: operator.lease(3))
    lease = operator.lease(3)
    assert lease is not None
    meta, spec = lease["metadata"], lease["spec"]
    assert meta["labels"] == {"outlast.dev/job": "train", "outlast.dev/worker": "3", "app.kubernetes.io/managed-by": "outlast"}
    reference = {"apiVersion": "outlast.dev/v1alpha1", "kind": "ElasticJob", "name": "train", "controller": False}
    assert meta["ownerReferences"] == [{**reference, "uid": operator.job["metadata"]["uid"]}]
    assert (spec["holderIdentity"], spec["leaseDurationSeconds"]) == ("uid-of-the-pod", 30)
    written = datetime.strptime(spec["renewTime"], "%Y-%m-%dT%H:%M:%S.%fZ").replace(tzinfo=UTC)
    assert abs((datetime.now(UTC) - written).total_seconds()) < 5
    said = operator.said(3)
    assert decode(messages.Report, said) == messages.Report("run", 3, "waiting", 0, said["since"], "10.0.0.7:4711")
    assert contract.Annotation.PROGRESS not in meta["annotations"]


def test_who_has_missed_a_call_hears_it_by_the_world_that_came_of_it(operator: Operator, waiting) -> None:
    client = waiting()
    operator.say(world=a_world(4, 0, 1))
    until(lambda: client.world)
    operator.say(world=a_world(6, 1, 2))
    until(lambda: client.called == messages.Called(6, "all here", False, 5.0))


def test_a_world_from_before_the_first_report_is_not_ours(operator: Operator, waiting) -> None:
    operator.say(world=a_world(4))
    client = waiting()
    assert client.world is None
    operator.say(world=a_world(5))
    until(lambda: client.world)


@pytest.mark.parametrize(
    ("said", "generation"),
    [
        ({}, 7),
        ({"world": a_world(3)}, 7),
        ({"world": a_world(7)}, 0),
        ({"world": a_world(3), "called": {"generation": 8, "reason": "", "planned": False, "deadline": 0.0}}, 0),
        ({"world": a_world(3), "called": {"generation": 7, "reason": "", "planned": False, "deadline": 0.0}}, 7),
    ],
)
def test_an_operator_that_knows_less_than_the_output_is_told_the_newest_generation(
    operator: Operator, member, monkeypatch: pytest.MonkeyPatch, said: Document, generation: int
) -> None:
    monkeypatch.setenv(contract.Env.GENERATION, "7")
    if said:
        operator.say(**said)
    client = member()
    client.report("waiting", generation=0)
    until(operator.lease)
    assert operator.said()["generation"] == generation
    client.report("training", generation=9)
    until(lambda: operator.said()["generation"] == 9)


def test_a_lease_of_a_world_that_watches_itself_lasts_longer_and_says_at_once_who_is_unheard(operator: Operator, member) -> None:
    client = member()
    client.report("training", generation=2)
    client.amend(mesh=True)
    until(lambda: (operator.lease() or {}).get("spec", {}).get("leaseDurationSeconds") == 100)
    client.amend(unheard=(1, 2), refused=(2,))
    until(lambda: operator.said()["unheard"] == [1, 2])
    assert (operator.said()["standing"], operator.said()["refused"]) == ("training", [2])
    client.report("waiting")
    until(lambda: operator.lease()["spec"]["leaseDurationSeconds"] == 30)
    client.report("training", generation=3)
    until(lambda: operator.said()["unheard"] == [])


def progress(operator: Operator) -> Document:
    """The progress on the lease of worker 0."""
    lease = operator.lease()
    return dict(json.loads(lease["metadata"]["annotations"][contract.Annotation.PROGRESS])) if lease else {}


def test_the_lease_is_renewed_with_the_newest_progress(operator: Operator, member, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(board, "RENEW_S", 0.05)
    writers = [progress_file.Writer(tmp_path, local_rank) for local_rank in (0, 1)]
    writers[1].write(progress_file.Progress(generation=2, rank=3, phase="train", step=9, steps=60, committed=5))
    writers[0].write(progress_file.Progress(generation=2, rank=2, phase="train", step=10, steps=60, committed=0))
    client = member()
    client.report("training", generation=2)
    first, renewed = until(lambda: progress(operator)), operator.lease()["spec"]["renewTime"]
    assert (first["step"], first["steps"], first["committed"]) == (10, 60, 5)
    assert "snapshot" not in first
    newer = progress_file.Progress(generation=2, rank=3, phase="train", step=11, steps=60, committed=10, snapshot=9, every=3)
    writers[1].write(newer)
    until(lambda: progress(operator)["step"] == 11)
    assert (progress(operator)["committed"], progress(operator)["snapshot"], progress(operator)["every"]) == (10, 9, 3)
    assert progress(operator)["time"] > first["time"]
    assert operator.lease()["spec"]["renewTime"] > renewed
    for writer in writers:
        writer.close()


@pytest.mark.parametrize("phase", ["started", "open", "restore"])
def test_a_plain_script_and_one_that_restores_say_no_progress(operator: Operator, member, tmp_path: Path, phase: str) -> None:
    writer = progress_file.Writer(tmp_path, 0)
    writer.write(progress_file.Progress(generation=1, rank=0, phase=phase))
    writer.close()
    member().report("training", generation=1)
    until(operator.lease)
    assert list(operator.lease()["metadata"]["annotations"]) == [contract.Annotation.REPORT]


def test_a_server_that_does_not_answer_is_asked_again(operator: Operator, member, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "ANSWER_S", 0.2)
    frozen = threading.Event()
    client = member()
    operator.api.prescribe("PATCH", lambda handler: frozen.wait(60))
    client.report("waiting")
    client.report("training", generation=1)
    until(lambda: operator.said().get("standing") == "training")
    frozen.set()


def test_a_refusal_is_said_and_tried_again(operator: Operator, member, capfd: pytest.CaptureFixture[str]) -> None:
    text = 'leases.coordination.k8s.io "train-worker-0" is forbidden: User "w" cannot patch resource "leases" in API group ' + (
        '"coordination.k8s.io" in the namespace "default"'
    )
    operator.api.prescribe("PATCH", *[apiserver.status(403, "Forbidden", text)] * 2)
    client = member()
    client.report("waiting")
    until(operator.lease)
    client.close()  # it says that it is heard again
    said = "the operator does not hear this worker; it goes on as it was and tries again: leases.coordination"
    assert capfd.readouterr().out.count(said) == 1


def test_clients_with_an_expired_login_are_closed(operator: Operator, member, monkeypatch) -> None:
    opened: list[api.Cluster] = []
    closed: list[api.Cluster] = []
    connect, close = api.connect, api.Cluster.close
    monkeypatch.setattr(api, "connect", lambda **how: opened.append(connect(**how)) or opened[-1])
    monkeypatch.setattr(api.Cluster, "close", lambda self: close(self) or closed.append(self))
    client = member()
    operator.api.prescribe("PATCH", *[apiserver.status(401, "Unauthorized", "Unauthorized")] * 2)
    client.report("waiting")
    until(operator.lease)
    assert len(opened) - len(closed) <= 2, "one that watches, one that writes"
    client.close()
    until(lambda: len(closed) == len(opened))


def test_the_operator_knows_the_run_by_the_word_that_it_gave_its_pods(operator: Operator, waiting, monkeypatch) -> None:
    monkeypatch.setenv(contract.Env.OWNER, "the-word")
    operator.say(run="the-word")
    waiting()
    assert operator.said()["run"] == "the-word"


@pytest.mark.parametrize("before", [True, False])
def test_who_works_for_a_job_that_is_deleted_leaves_with_its_grace_even_if_there_is_a_new_one(
    operator: Operator, member, ended: list[messages.Closed], told: list[tuple[float | None, str]], before: bool
) -> None:
    client = member()
    if not before:
        client.report("waiting")
        until(operator.lease)
    operator.api.remove("elasticjobs.outlast.dev", "train")
    if before:
        client.report("waiting")
    until(lambda: told)
    operator.api.put(kinds.ELASTIC_JOB.document({"name": "train"}, spec={}, status={"rendezvous": {"run": "another"}}))
    client.report("leaving")
    client.wait(0.3)
    client.close()
    assert told == [(None, "the job was deleted")], "once"
    assert (client.closed, ended, operator.lease()) == (None, [], None), "it may save, and writes no Lease of the new job"


@pytest.mark.parametrize(("code", "noted"), [(0, True), (79, True), (75, False)])
def test_the_end_is_noted_for_the_agent_unless_the_job_may_go_on(operator: Operator, member, ended, code, noted) -> None:
    operator.say(closed={"reason": "it is so", "code": code})
    client = member()
    client.report("waiting")
    until(lambda: client.closed)
    assert client.closed == messages.Closed("it is so", code)
    assert ended == ([messages.Closed("it is so", code)] if noted else [])


def test_an_answer_that_was_lost_does_no_harm(operator: Operator, waiting) -> None:
    client = waiting()
    # The server has done it, and the answer does not come: the next version is not the one that we know.
    operator.api.put(
        {**operator.lease(), "metadata": {**operator.lease()["metadata"], "annotations": {"outlast.dev/report": "{}"}}}
    )
    client.report("training", generation=1)
    until(lambda: operator.said().get("standing") == "training")
    client.report("done", generation=1)
    until(lambda: operator.said()["standing"] == "done")
    assert client.closed is None


def test_a_lease_that_somebody_deletes_is_made_again(operator: Operator, waiting) -> None:
    client = waiting()
    operator.api.remove("leases.coordination.k8s.io", "train-worker-0")
    client.report("training", generation=1)
    until(lambda: operator.said().get("standing") == "training")


def test_a_pod_that_does_not_know_its_uid_says_so(member, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(contract.Env.MEMBER)
    with pytest.raises(errors.OutlastError, match=r"OUTLAST_MEMBER is not set; set it to the uid of this pod"):
        member()


RBAC = "rbac.authorization.k8s.io/v1"


@pytest.fixture
def account(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[api.Cluster, api.Cluster]]:
    """A namespace of its own with the ElasticJob `train`; its clients: who may do anything, and worker 0, whose account may write
    to its own Lease and read its own job, each by its name."""
    namespace = f"rendezvous-{secrets.token_hex(3)}"
    admin = api.connect(namespace=namespace)
    named = {"name": "worker", "namespace": namespace}

    def rule(group: str, resource: str, name: str, *verbs: str) -> Document:
        return {"apiGroups": [group], "resources": [resource], "verbs": verbs, "resourceNames": [name]}

    rules = [
        rule(kinds.LEASE.group, "leases", "train-worker-0", "create", "patch"),
        rule(contract.GROUP, "elasticjobs", "train", "get", "list", "watch"),
    ]
    subject = {"kind": "ServiceAccount", "name": "worker", "namespace": namespace}
    role = {"apiGroup": kinds.ROLE.group, "kind": "Role", "name": "worker"}
    job = {"apiVersion": contract.API_VERSION, "kind": contract.KIND, "spec": {"image": "none:0", "script": "train.py"}}
    admin.create({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    try:
        for document in (
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": named},
            {"apiVersion": RBAC, "kind": "Role", "metadata": named, "rules": rules},
            {"apiVersion": RBAC, "kind": "RoleBinding", "metadata": named, "subjects": [subject], "roleRef": role},
            *({**job, "metadata": {"name": name, "namespace": namespace}} for name in ("train", "other")),
        ):
            admin.create(document)
        command = ["kubectl", "-n", namespace, "create", "token", "worker"]
        token = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
        command = ["kubectl", "config", "view", "--raw", "--minify", "--flatten", "-o", "json"]
        config = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        config["users"][0]["user"] = {"token": token}
        file = tmp_path / "worker.kubeconfig"
        file.write_text(json.dumps(config))
        monkeypatch.setenv("KUBECONFIG", str(file))
        monkeypatch.setenv(contract.Env.MEMBER, "uid-of-the-pod")
        monkeypatch.setenv(contract.Env.NAMESPACE, namespace)
        worker = api.connect(namespace=namespace)
        until(lambda: worker.may("patch", kinds.LEASE, name="train-worker-0"))  # the authorizer hears of roles a moment later
        yield admin, worker
        worker.close()
    finally:
        admin.delete(kinds.NAMESPACE, namespace)
        admin.close()


@pytest.mark.cluster
def test_an_account_of_exactly_two_rules_is_enough_for_a_member(account, tmp_path: Path, capfd) -> None:
    admin, _ = account
    told: list[str] = []
    must_leave = lambda _deadline, reason: told.append(reason)  # noqa: E731
    client = transport.client("kubernetes://train", transport.Member("run", 0, tmp_path, 1, must_leave=must_leave))
    begun = time.monotonic()
    client.report("waiting", address="10.0.0.7:4711")

    def reported() -> Document:
        found = admin.list_(kinds.LEASE)
        return json.loads(found[0]["metadata"]["annotations"][contract.Annotation.REPORT]) if found else {}

    until(reported)
    first_s = time.monotonic() - begun
    lease = admin.get(kinds.LEASE, "train-worker-0")
    assert lease["spec"]["holderIdentity"] == "uid-of-the-pod"
    assert lease["metadata"]["ownerReferences"][0]["uid"] == admin.get(kinds.ELASTIC_JOB, "train")["metadata"]["uid"]
    begun = time.monotonic()
    client.report("training", generation=1)
    until(lambda: reported()["standing"] == "training")
    report_s = time.monotonic() - begun
    begun = time.monotonic()
    change = {"status": {"rendezvous": {"run": "run", "world": a_world(2)}}}
    admin.patch(kinds.ELASTIC_JOB, "train", change, subresource="status")
    until(lambda: client.world)
    heard_s = time.monotonic() - begun
    assert client.world == World(2, (0,), "10.0.0.1:5", "all here", 5.0)
    admin.delete(kinds.ELASTIC_JOB, "train")
    until(lambda: told == ["the job was deleted"])
    client.close()
    assert (client.closed, capfd.readouterr().out) == (None, "")
    until(lambda: not admin.list_(kinds.LEASE), 60)
    print(f"first report {first_s:.3f} s, report {report_s:.3f} s, world heard {heard_s:.3f} s")


@pytest.mark.cluster
def test_an_account_of_exactly_two_rules_can_do_nothing_else(account) -> None:
    _, worker = account
    named = {"name": "train-worker-0"}
    lease = {"apiVersion": kinds.LEASE.api_version, "kind": kinds.LEASE.kind, "metadata": named, "spec": {}}
    other = {**lease, "metadata": {"name": "train-worker-1"}}
    worker.apply(lease)
    for refused in (
        lambda: worker.create(other),
        lambda: worker.create({**lease, "metadata": {"generateName": "train-worker-"}}),
        lambda: worker.apply(other),
        lambda: worker.apply({**other, "metadata": {"name": "outlast-operator", "namespace": "kube-system"}}),
        lambda: worker.get(kinds.LEASE, "train-worker-0"),
        lambda: worker.list_(kinds.LEASE),
        lambda: worker.delete(kinds.LEASE, "train-worker-0"),
        lambda: worker.list_(kinds.ELASTIC_JOB),
        lambda: worker.list_(kinds.ELASTIC_JOB, fields="metadata.name=other"),
        lambda: worker.get(kinds.ELASTIC_JOB, "other"),
        lambda: worker.patch(kinds.ELASTIC_JOB, "train", {"metadata": {"labels": {"a": "b"}}}),
        lambda: worker.patch(kinds.ELASTIC_JOB, "train", {"status": {"run": "mine"}}, subresource="status"),
        lambda: worker.list_(kinds.POD),
        lambda: worker.list_(kinds.SECRET),
    ):
        with pytest.raises(errors.Forbidden):
            refused()


def a_board(directory: Path, id: int = 0, **how: Any) -> board.Board:
    """A board that reads no server."""
    environ = {contract.Env.MEMBER: "uid", contract.Env.NAMESPACE: "team", contract.Env.OUTPUT: str(directory)}
    return board.Board("train", transport.Member("r", id, directory, 0, environ, **how))


@pytest.mark.parametrize(("workers", "every_s", "lasts_s"), [(4, 10, 30), (2000, 10, 30), (10_000, 50, 150)])
def test_members_of_a_large_world_renew_less_often_and_say_how_long_that_lasts(
    tmp_path: Path, workers: int, every_s: float, lasts_s: int
) -> None:
    member = a_board(tmp_path)
    member._receive({"metadata": {"name": "train", "uid": "u"}, "spec": {"workers": {"replicas": workers}}})
    report = messages.Report("r", 0, MemberState.WAITING)
    assert (member._interval_s(report), member._lease(report)["spec"]["leaseDurationSeconds"]) == (every_s, lasts_s)


def test_the_deadline_that_the_operator_publishes_for_a_pod_is_noted_for_its_agent(tmp_path: Path) -> None:
    noted: list[tuple[float, str]] = []
    member = a_board(tmp_path, must_leave=lambda deadline, reason: noted.append((deadline, reason)))

    def hear(leaving: object) -> None:
        status = {"rendezvous": {"run": "r", "leaving": leaving}}
        member._receive({"metadata": {"name": "train", "uid": "u"}, "spec": {}, "status": status})

    for others in (None, "soon", [7], [{"uid": "another", "deadline": 9.0}], [{"uid": "uid", "deadline": "soon"}]):
        hear(others)
        assert noted == []
    for _ in range(2):
        hear([{"uid": "another", "deadline": 9.0}, {"uid": "uid", "worker": 0, "deadline": 1_700_000_015.0, "reason": "spot"}])
    hear([{"uid": "uid", "deadline": 1_700_000_005.0}])
    assert noted == [(1_700_000_015.0, "spot"), (1_700_000_005.0, "")], "each once"


def test_the_worker_of_rank_0_renews_soon_and_copies_what_the_operator_notes_into_the_ledger(tmp_path: Path) -> None:
    waiting = messages.Report("r", 0, MemberState.WAITING)
    noted = [{"t": 1.0, "kind": "submitted", "source": "operator"}, {"t": 2.0, "kind": "world", "source": "operator"}]

    def hear(id: int, entries: list[Document]) -> board.Board:
        client = a_board(tmp_path, id)
        said = {"run": "r", "world": a_world(4, 1, 0)}
        for until_now in (noted[:1], entries):
            document = {"metadata": {"name": "train", "uid": "u"}, "spec": {}, "status": {"ledger": until_now}}
            client._receive(document)  # of no world yet
            client._receive({**document, "status": {"ledger": until_now, "rendezvous": said}})
            said = {"run": "r", "world": a_world(5, 1, 0)}
        return client

    assert hear(0, noted)._interval_s(waiting) == 10
    assert list(ledger.read(tmp_path / contract.LEDGER)) == []
    assert hear(1, noted)._interval_s(waiting) == 3
    assert list(ledger.read(tmp_path / contract.LEDGER)) == noted


def test_the_goodput_of_a_run_is_told_while_it_trains_and_whole_after_its_end(operator: Operator, member, tmp_path: Path) -> None:
    progress_file.Writer(tmp_path, 0).write(progress_file.Progress(1, 0, "train", step=5, committed=4, bytes=700))
    (tmp_path / contract.WORKER).write_text(json.dumps({"pushed": {"goodput": 0.5, "lost": {"oom": 1.5}, "lost_steps": 3}}))
    member().report("training", generation=1)
    told = until(lambda: progress(operator))
    assert (told["goodput"], told["lost"], told["lostSteps"], told["bytes"]) == (0.5, {"oom": 1.5}, 3, 700)
    environ, whole = {contract.Env.NAMESPACE: "default"}, {"goodput": 0.7, "lost": {"oom": 2.5}, "lost_steps": 3}
    board.report_account("train", 0, environ | {contract.Env.MEMBER: "uid-of-another"}, whole)
    assert progress(operator) == told
    board.report_account("train", 0, environ | {contract.Env.MEMBER: "uid-of-the-pod"}, whole)
    told = progress(operator)
    assert (told["step"], told["goodput"], told["lost"], told["whole"]) == (5, 0.7, {"oom": 2.5}, True)
