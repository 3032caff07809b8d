"""`outlast install` and `outlast uninstall`, on a cluster without a server and, marked `cluster`, on a real one."""

from __future__ import annotations

import copy
import functools
import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kubernetes_validate import utils as schemas

from fake_cluster import Document, FakeCluster
from outlast.base.errors import ClusterError, OutlastError
from outlast.kubernetes import api
from outlast.kubernetes.api import kinds
from outlast.kubernetes.diagnosis import gather_evidence
from outlast.kubernetes.jobs import installation
from outlast.kubernetes.manifests.installed import operator_deployment

Outlast = Callable[..., tuple[int, str, str]]

ROOT = Path(__file__).parents[2]
FILES = functools.cache(operator_deployment.files)


@pytest.fixture(autouse=True)
def read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the installed documents from YAML once for each choice of options, and not hundreds of times."""
    monkeypatch.setattr(operator_deployment, "files", lambda **options: copy.deepcopy(FILES(**options)))


def established(cluster: FakeCluster) -> FakeCluster:
    """The cluster serves what is defined, as soon as it is."""

    def serve(document: Document) -> None:
        if document["kind"] == "CustomResourceDefinition":
            document["status"] = {"conditions": [{"type": "Established", "status": "True"}]}

    cluster.then = serve
    return cluster


def bring(cluster: FakeCluster, **options: Any) -> list[str]:
    wanted = installation.documents(**{key: value for key, value in options.items() if key != "dry_run"})
    return [str(done) for done in installation.ensure(cluster, wanted, dry_run=options.get("dry_run", False))]  # type: ignore[arg-type]


def installed(**options: Any) -> FakeCluster:
    """A cluster that has everything."""
    cluster = established(FakeCluster())
    bring(cluster, **options)
    return cluster


WHOLE = [
    "Namespace outlast-system",
    "CustomResourceDefinition elasticjobs.outlast.dev",
    "CustomResourceDefinition elasticjobs.elastic.pytorch.org",
    "ServiceAccount outlast-operator in outlast-system",
    "ClusterRole outlast-operator",
    "ClusterRoleBinding outlast-operator",
    "Role outlast-operator in outlast-system",
    "RoleBinding outlast-operator in outlast-system",
    "ClusterRole outlast-view",
    "ClusterRole outlast-edit",
    "Deployment outlast-operator in outlast-system",
]


def test_a_new_cluster_is_given_everything_in_an_order_that_can_be_made_and_again_nothing() -> None:
    cluster = established(FakeCluster())
    assert bring(cluster, dry_run=True) == [f"created    {each}" for each in WHOLE]
    assert cluster.documents == {}
    assert bring(cluster) == [f"created    {each}" for each in WHOLE]
    assert cluster.order == [f"apply {each.partition(' in ')[0]}" for each in WHOLE]
    before = copy.deepcopy(cluster.documents)
    for dry_run in (True, False):
        assert bring(cluster, dry_run=dry_run) == [f"unchanged  {each}" for each in WHOLE]
    assert cluster.documents == before


WATCHER = [
    "Namespace outlast-node-watch",
    "ServiceAccount outlast-node-watch in outlast-node-watch",
    "ClusterRole outlast-node-watch",
    "ClusterRoleBinding outlast-node-watch",
    "DaemonSet outlast-node-watch in outlast-node-watch",
]


def test_the_node_watcher_comes_and_goes_with_the_rest() -> None:
    cluster = installed()
    fresh = [each for each in bring(cluster, watch=True) if not each.startswith("unchanged")]
    assert fresh == [f"created    {each}" for each in WATCHER]
    daemons = cluster.get(kinds.DAEMON_SET, "outlast-node-watch", namespace="outlast-node-watch")
    (container,) = daemons["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["outlast", "node-watch"]
    gone = remove(cluster)
    assert [each for each in WATCHER if f"deleted    {each}" in gone] == WATCHER[1:]


def test_the_node_watcher_is_no_root_and_has_no_more_rights_than_it_uses() -> None:
    documents = [
        each for each in installation.documents(watch=True) if each["metadata"]["name"] == operator_deployment.NODE_WATCH
    ]
    made = {each["kind"]: each for each in documents}
    rules = made["ClusterRole"]["rules"]
    found = {(verb, resource) for rule in rules for verb in rule["verbs"] for resource in rule["resources"]}
    assert found == {("get", "nodes"), ("patch", "nodes"), ("list", "pods"), ("delete", "pods"), ("create", "pods/eviction")}
    pod = made["DaemonSet"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (pod["hostNetwork"], pod["tolerations"]) == (True, [{"operator": "Exists"}])
    assert pod["securityContext"]["runAsNonRoot"]
    assert container["securityContext"]["readOnlyRootFilesystem"]
    for document in documents:
        schemas.validate(document, "1.36", strict=True)


def test_the_operator_can_be_kept_off_spot_machines() -> None:
    wanted = {each["kind"]: each.get("spec", {}) for each in installation.documents(on_demand=True, watch=True)}
    operator, watcher = (json.dumps(wanted[kind]["template"]["spec"].get("affinity")) for kind in ("Deployment", "DaemonSet"))
    assert re.search(r'"karpenter.sh/capacity-type", "operator": "NotIn"', operator)
    assert "karpenter.sh/capacity-type" not in watcher, "it runs on each node"


def test_another_image_changes_the_deployment_alone() -> None:
    cluster = installed()
    changed = [each for each in bring(cluster, image="example.com/operator:2") if not each.startswith("unchanged")]
    assert changed == ["changed    Deployment outlast-operator in outlast-system"]
    deployment = cluster.get(kinds.DEPLOYMENT, "outlast-operator", namespace="outlast-system")
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"] == "example.com/operator:2"


def test_everything_is_in_the_namespace_that_is_asked_for() -> None:
    made = json.dumps(installation.documents(namespace="ml-platform"))
    assert "outlast-system" not in made
    with pytest.raises(OutlastError, match="--namespace default: that one is the cluster's own; choose another"):
        installation.check_namespace("default")


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_namespace_that_was_there_before_stays_as_it_was(dry_run: bool) -> None:
    cluster = established(FakeCluster(kinds.NAMESPACE.document({"name": "outlast-system", "labels": {"team": "ours"}})))
    before = copy.deepcopy(cluster.get(kinds.NAMESPACE, "outlast-system"))
    told = bring(cluster, dry_run=dry_run)
    assert told == ["unchanged  Namespace outlast-system: it was there before", *(f"created    {each}" for each in WHOLE[1:])]
    assert cluster.get(kinds.NAMESPACE, "outlast-system") == before


def test_what_is_being_deleted_is_told_and_nothing_put_into_it(monkeypatch: pytest.MonkeyPatch) -> None:
    going = kinds.NAMESPACE.document({"name": "outlast-system", "deletionTimestamp": "2026-11-21T16:00:00Z"})
    cluster = established(FakeCluster(going))
    monkeypatch.setattr(installation, "_DELETED_S", 0.05)
    with pytest.raises(ClusterError, match="Namespace outlast-system is still being deleted; kubectl describe says what holds"):
        bring(cluster)
    assert cluster.order == []


@pytest.mark.parametrize("dry_run", [True, False])
def test_installing_right_after_uninstalling_waits_for_the_definition_to_be_gone(
    dry_run: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installation, "_POLL_S", 0.01)
    cluster = installed()
    kind, name = kinds.CRD, kinds.ELASTIC_JOB.resource
    going = {**(old := cluster.get(kind, name)), "metadata": {**old["metadata"], "deletionTimestamp": "2026-11-21T16:00:00Z"}}
    left, find = [going, going], cluster.find

    def found(*asked: Any, **where: Any) -> Document | None:
        if asked != (kind, name) or not left:
            return find(*asked, **where)
        cluster.documents.pop((kind.resource, "", name), None)
        return left.pop()

    monkeypatch.setattr(cluster, "find", found)
    told = bring(cluster, dry_run=dry_run)
    assert [each for each in told if not each.startswith("unchanged")] == [f"created    {WHOLE[1]}"]
    assert cluster.order.count(f"apply CustomResourceDefinition {name}") == 1 + (not dry_run)


def test_another_operators_rights_are_neither_taken_nor_deleted() -> None:
    cluster = installed(namespace="op1")
    before = copy.deepcopy(cluster.documents)
    for act in (lambda: bring(cluster), lambda: bring(cluster, dry_run=True), lambda: remove(cluster, crds=True)):
        with pytest.raises(OutlastError, match="in namespace op1; pass --namespace op1, or take it away first: outlast uninst"):
            act()
    assert cluster.documents == before


@pytest.mark.parametrize(("image", "replicas"), [("torchelastic/kubernetes:0.1.0", 2), ("torchelastic/examples:0.2.0", 1)])
def test_nothing_is_installed_while_the_archived_controller_runs(image: str, replicas: int) -> None:
    spec = {"replicas": replicas, "template": {"spec": {"containers": [{"name": "manager", "image": image}]}}}
    cluster = established(FakeCluster(kinds.DEPLOYMENT.document({"name": "renamed", "namespace": "elastic-job"}, spec=spec)))
    if "examples" in image:
        assert bring(cluster) == [f"created    {each}" for each in WHOLE]
        return
    with pytest.raises(OutlastError, match="stop it first: kubectl -n elastic-job scale deployment renamed --replicas=0"):
        bring(cluster)
    assert cluster.order == []


def test_a_binding_that_an_operator_has_left_behind_is_taken_over() -> None:
    cluster = installed(namespace="op1")
    cluster.delete(kinds.DEPLOYMENT, "outlast-operator", namespace="op1")
    assert "changed    ClusterRoleBinding outlast-operator" in bring(cluster)
    assert gather_evidence.operator_namespace(cluster.get(kinds.CLUSTER_ROLE_BINDING, "outlast-operator")) == "outlast-system"


def test_a_definition_that_is_never_served_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "_ESTABLISHED_S", 0.05)
    cluster = FakeCluster()
    cluster.then = lambda document: document.setdefault("status", {"conditions": None})
    with pytest.raises(ClusterError, match=r"the API server does not serve elasticjobs.outlast.dev"):
        bring(cluster)


# Taking it away


def remove(cluster: FakeCluster, **options: Any) -> list[str]:
    return [str(done) for done in installation.remove(cluster, **options)]  # type: ignore[arg-type]


def test_uninstalling_takes_all_but_the_definition_and_the_rights_to_it_the_last_first() -> None:
    cluster = installed()
    rights = "users have their rights to ElasticJobs from it; --crds removes it"
    jobs = "ElasticJobs would be deleted with it; --crds removes it"
    users, definitions = WHOLE[-3:-1], WHOLE[1:3]
    others = [each for each in reversed(WHOLE[1:]) if each not in definitions]
    namespace = "if nothing else is in it, delete it with: kubectl delete namespace outlast-system"
    assert remove(cluster) == [
        *(f"kept       {each}: {rights}" if each in users else f"deleted    {each}" for each in others),
        f"kept       {WHOLE[0]}: {namespace}",
        *(f"kept       {each}: {jobs}" for each in definitions),
    ]
    assert [key[2] for key in cluster.documents] == [each.split()[1] for each in (WHOLE[0], *definitions, *users)]


@pytest.mark.parametrize("crds", [True, False])
def test_with_crds_or_where_there_are_none_nothing_is_left_and_again_there_is_nothing_to_do(crds: bool) -> None:
    cluster = installed()
    for kind in () if crds else (kinds.ELASTIC_JOB, kinds.LEGACY_JOB):
        cluster.delete(kinds.CRD, kind.resource)
    remove(cluster, crds=crds)
    assert [key[2] for key in cluster.documents] == ["outlast-system"]
    assert [each.split()[0] for each in remove(cluster, crds=True) if "Namespace" not in each] == ["absent"] * (len(WHOLE) - 1)


# The command line


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    cluster = established(FakeCluster())
    monkeypatch.setattr(api, "connect", lambda context=None, namespace=None: cluster)
    return cluster


def test_install_counts_what_it_has_done(cluster: FakeCluster, outlast: Outlast) -> None:
    cluster.warnings.append("something is old")
    code, out, err = outlast("install")
    assert (code, out.splitlines()[-1]) == (0, f"fake: {len(WHOLE)} created")
    assert err == "outlast | the server warns: something is old\n"
    assert outlast("install", "--dry-run")[1].splitlines()[-1] == f"fake: {len(WHOLE)} would be unchanged"


def test_install_that_waits_for_an_operator_that_cannot_run_says_why(cluster: FakeCluster, outlast: Outlast) -> None:
    waits = {"waiting": {"reason": "ImagePullBackOff", "message": "ghcr.io/outlast/operator:0.1: not found"}}
    labels = {"app.kubernetes.io/name": "outlast", "app.kubernetes.io/component": "operator"}
    meta = {"name": "operator-a", "namespace": "outlast-system", "labels": labels}
    container = {"name": "operator", "image": operator_deployment.OPERATOR_IMAGE, "state": waits}
    status = {"phase": "Pending", "containerStatuses": [container]}
    cluster.put(kinds.POD.document(meta, spec={"containers": [{"name": "operator"}]}, status=status))
    code, _, err = outlast("install", "--wait", "--timeout", "1")
    assert code == 1
    assert err.startswith("\nThe operator does not run after 1 s:\n\nPod operator-a waits for the image ghcr.io/outlast/operat")


def test_install_that_waits_ends_as_soon_as_the_operator_runs(cluster: FakeCluster, outlast: Outlast) -> None:
    serve = cluster.then

    def run(document: Document) -> None:
        serve(document)
        if document["kind"] == "Deployment":
            document["status"] = {"updatedReplicas": 2, "availableReplicas": 2}

    cluster.then = run
    code, out, _ = outlast("install", "--wait")
    assert (code, out.splitlines()[-1]) == (0, "the operator runs")


def test_uninstall_does_not_delete_jobs_that_it_was_not_told_to(
    cluster: FakeCluster, outlast: Outlast, monkeypatch: pytest.MonkeyPatch
) -> None:
    outlast("install")
    cluster.put(kinds.ELASTIC_JOB.document({"name": "train", "namespace": "team"}, spec={}))
    code, out, err = outlast("uninstall", "--crds")
    assert (code, out) == (2, "")
    assert err == "Error: 1 ElasticJob of fake would be deleted with --crds (team/train); add --yes to confirm\n"
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda question: "no")
    assert outlast("uninstall", "--crds")[0::2] == (2, "Error: nothing was changed\n")
    assert cluster.serves(kinds.ELASTIC_JOB)
    assert outlast("uninstall", "--crds", "--yes")[0] == 0
    assert not cluster.serves(kinds.ELASTIC_JOB)


# A real cluster


@pytest.fixture
def real() -> Iterator[api.Cluster]:
    cluster = api.connect(namespace="why-install")
    defined = cluster.serves(kinds.ELASTIC_JOB)
    roles = {each["metadata"]["name"] for each in cluster.list_(kinds.CLUSTER_ROLE)}
    yield cluster
    list(installation.remove(cluster, namespace="why-install", crds=not defined))
    for name in {"outlast-view", "outlast-edit"} - roles:
        subprocess.run(["kubectl", "delete", "clusterrole", name, "--ignore-not-found"], check=True)
    subprocess.run(["kubectl", "delete", "namespace", "why-install", "--ignore-not-found"], check=True)
    cluster.close()


@pytest.mark.cluster
def test_a_real_cluster_is_given_all_once_and_gives_all_back(real: api.Cluster) -> None:
    """Puts roles into the cluster and removes them, and the definition of ElasticJob where there is none."""
    wanted = installation.documents(namespace="why-install")
    would = [done.action for done in installation.ensure(real, wanted, dry_run=True)]
    made = [done.action for done in installation.ensure(real, wanted)]
    assert made == would
    assert set(made) <= {"created", "unchanged", "changed"}  # others may have the definition
    assert {done.action for done in installation.ensure(real, wanted)} == {"unchanged"}
    (again,) = installation.ensure(real, wanted[:1])
    assert again.action == "unchanged"
    other = installation.documents(namespace="why-install", image="example.com/operator:2")
    changed = [done for done in installation.ensure(real, other) if done.action == "changed"]
    assert [str(done) for done in changed] == ["changed    Deployment outlast-operator in why-install"]
    assert installation.wait(real, wanted[-1], timeout_s=5), "it says why the operator does not run"
    gone = [str(done) for done in installation.remove(real, namespace="why-install")]
    assert "deleted    Deployment outlast-operator in why-install" in gone
    assert any(each.startswith("kept       CustomResourceDefinition elasticjobs.outlast.dev") for each in gone)
