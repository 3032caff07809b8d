"""ElasticJobs on a real cluster, with the operator that is installed there: whatever happens to pods, the job completes.

outlast install --image registry/outlast:dev --wait
KUBECONFIG=... OUTLAST_TEST_IMAGE=registry/outlast:dev pytest -m cluster tests/kubernetes/test_operator_cluster.py
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from namespaces import ELASTIC, Namespace, begun, live, status, trains, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


HARM: dict[str, Callable[[Namespace, str], object]] = {
    "deleted": lambda ns, pod: ns.kubectl("delete", "pod", pod, "--wait=false"),
    "cut off": lambda ns, pod: ns.kubectl("delete", "pod", pod, "--grace-period=0", "--force"),
    "processes killed": lambda ns, pod: ns.kubectl("exec", pod, "--", "sh", "-c", "kill -9 -1", fails=True),
    "processes stopped": lambda ns, pod: ns.kubectl(
        "exec",
        pod,
        "--",
        "sh",
        "-c",
        "for p in /proc/[0-9]*; do p=${p#/proc/}; [ $p -gt 1 ] && [ $p != $$ ] && kill -STOP $p; done",
        fails=True,
    ),
}


@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("harm", HARM)
def test_whatever_happens_to_a_worker_the_weights_are_those_of_the_undisturbed_run(
    harm: str, index: int, namespace: Namespace, undisturbed_pods: str
) -> None:
    name = f"{harm.replace(' ', '-')}-{index}"
    before = begun(namespace, name, {"replicas": 2, "min": 2})
    HARM[harm](namespace, f"{name}-worker-{index}")
    until(namespace, name, lambda found: found["generation"] > before)
    ended = until(namespace, name, lambda found: found["state"] in ("Succeeded", "Failed"))
    assert (ended["state"], ended["progress"]) == ("Succeeded", "100 %")
    assert namespace.weights(name) == undisturbed_pods
    assert ended["restarts"] == (0 if "deleted" in harm or "cut" in harm else 1)


def test_scaling_makes_exactly_so_many_pods(namespace: Namespace) -> None:
    begun(namespace, "scaled", {"replicas": 2, "min": 1, "max": 4}, args=["--epochs=100000"])
    for wanted in (4, 1, 2):
        namespace.kubectl("scale", f"{ELASTIC}/scaled", f"--replicas={wanted}")
        until(namespace, "scaled", trains(wanted))
        assert len(live(namespace, "scaled")) == wanted
    namespace.kubectl("scale", f"{ELASTIC}/scaled", "--replicas=0")
    until(namespace, "scaled", lambda found: found["state"] == "Suspended" and not namespace.pods("scaled"))
    found = status(namespace, "scaled")
    assert (found["restarts"], found["interruptions"], found["replicas"]) == (0, 0, 0)
    namespace.kubectl("delete", ELASTIC, "scaled")
    kinds = "pods,services,leases,roles,rolebindings,poddisruptionbudgets,serviceaccounts"
    namespace.wait(
        lambda: not namespace.kubectl("get", kinds, "-l", "outlast.dev/job=scaled", "-o", "name"),
        lambda: namespace.kubectl("get", kinds, "-l", "outlast.dev/job=scaled"),
        60,
    )


def test_an_evicted_worker_saves_and_is_replaced(namespace: Namespace) -> None:
    before = begun(namespace, "evicted", {"replicas": 2, "min": 1, "max": 2}, args=["--epochs=100000"])
    step = status(namespace, "evicted")["step"]
    eviction = {
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": "evicted-worker-0", "namespace": namespace.name},
    }
    path = f"/api/v1/namespaces/{namespace.name}/pods/evicted-worker-0/eviction"
    # Until the budget's controller has seen both pods, the server refuses, and a drain asks again.
    namespace.wait(
        lambda: "Success" in namespace.kubectl("create", "--raw", path, "-f", "-", given=eviction, fails=True), str, 60
    )
    found = until(namespace, "evicted", lambda found: found["generation"] > before + 1 and trains(2)(found))
    assert (found["restarts"], found["interruptions"]) == (0, 1)
    assert found["checkpoint"]["step"] >= step
    namespace.kubectl("delete", ELASTIC, "evicted", "--wait=false")


def test_a_script_that_fails_ends_the_job_with_its_reason(namespace: Namespace) -> None:
    namespace.run("wrong", "elasticjob", args=["--world=3"])
    found = until(namespace, "wrong", lambda found: found.get("state") == "Failed")
    assert "a restart would not help" in found["reason"]
    assert found["lastFailure"]["code"] == 78
    namespace.wait(lambda: not live(namespace, "wrong"), lambda: namespace.kubectl("get", "pods"), 120)


def test_a_workers_token_can_do_nothing_but_its_own_membership(namespace: Namespace) -> None:
    begun(namespace, "bound", {"replicas": 1, "min": 1, "max": 1}, args=["--epochs=100000"])
    who = f"--as=system:serviceaccount:{namespace.name}:bound-worker"

    def may(*words: str) -> bool:
        return namespace.kubectl("auth", "can-i", *words, who, fails=True).strip() == "yes"

    assert may("patch", "leases/bound-worker-0")
    assert may("get", f"{ELASTIC}/bound")
    refused = (
        ("patch", "leases/bound-worker-1"), ("create", "leases"), ("delete", "leases/bound-worker-0"), ("get", "pods"),
        ("patch", "pods"), ("get", "secrets"), ("get", f"{ELASTIC}/other"), ("patch", f"{ELASTIC}/bound"),
        ("patch", f"{ELASTIC}/bound", "--subresource=status"), ("create", "pods"), ("list", "configmaps"),
    )  # fmt: skip
    assert [words for words in refused if may(*words)] == []
    namespace.kubectl("delete", ELASTIC, "bound", "--wait=false")
