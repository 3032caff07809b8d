"""What a cluster does to ElasticJobs beside their pods: nodes go, the API server is away, the operator dies.

Nodes and the API server are harmed by two commands, which who runs the cluster has to bring:
OUTLAST_TEST_NODE is called with kill, start, freeze or thaw (of its kubelet), cut or mend (no packet passes) and a node,
OUTLAST_TEST_API with freeze or thaw.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from namespaces import ELASTIC, Namespace, begun, live, status, trains, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def harm(variable: str, *words: str) -> None:
    if variable not in os.environ:
        pytest.skip(f"{variable} does not name a command")
    subprocess.run([os.environ[variable], *words], check=True, timeout=120)


@contextmanager
def harmed(variable: str, before: str, after: str, *what: str) -> Iterator[None]:
    harm(variable, before, *what)
    try:
        yield
    finally:
        harm(variable, after, *what)


def node_of(namespace: Namespace, pod: str) -> str:
    return namespace.kubectl("get", "pod", pod, "-o", "jsonpath={.spec.nodeName}")


def node_of_leader() -> str:
    """The node of the operator that leads: without it nobody makes another world until the next one leads."""
    operators = Namespace("outlast-system")
    leader = operators.kubectl("get", "lease", "outlast-operator", "-o", "jsonpath={.spec.holderIdentity}")
    return node_of(operators, leader)


def stopwatch(name: str) -> Callable[[str], None]:
    """Says how many seconds after now something was so; pytest -rA shows it."""
    began = time.monotonic()
    return lambda what: print(f"{name}: {time.monotonic() - began:.1f} s {what}")


@pytest.mark.parametrize("index", [0, 1])
def test_the_node_of_a_worker_is_lost(index: int, namespace: Namespace, undisturbed_pods: str) -> None:
    name = f"lost-{index}"
    before = begun(namespace, name, {"replicas": 2, "min": 2})
    node = node_of(namespace, f"{name}-worker-{index}")
    assert node_of(namespace, f"{name}-worker-{1 - index}") != node, "the workers are on one node; nothing is shown by its loss"
    with harmed("OUTLAST_TEST_NODE", "kill", "start", node):
        told = stopwatch(name)
        found = until(namespace, name, lambda found: found["generation"] > before and trains(2)(found))
        told("until both trained again")
        assert node_of(namespace, f"{name}-worker-{index}") != node
        assert (found["restarts"], found["interruptions"]) == (0, 1)
        ended = until(namespace, name, lambda found: found["state"] in ("Succeeded", "Failed"))
    assert (ended["state"], ended["progress"]) == ("Succeeded", "100 %")
    assert namespace.weights(name) == undisturbed_pods


def test_survivors_train_while_a_node_is_lost(namespace: Namespace) -> None:
    before = begun(namespace, "survivor", {"replicas": 2, "min": 1, "max": 2}, args=["--epochs=100000"])
    node = node_of(namespace, "survivor-worker-0")
    with harmed("OUTLAST_TEST_NODE", "kill", "start", node):
        told = stopwatch("survivor")
        until(namespace, "survivor", lambda found: found["generation"] > before and trains(1)(found))
        told("until the survivor trained")
        found = until(namespace, "survivor", trains(2))
        told("until both trained again")
        assert (found["restarts"], found["interruptions"]) == (0, 1)
    namespace.kubectl("delete", ELASTIC, "survivor", "--wait=false")


@pytest.mark.parametrize(("before", "after"), [("kill", "start"), ("cut", "mend")])
def test_survivors_of_a_silent_node_train_within_seconds(namespace: Namespace, before: str, after: str) -> None:
    """Their agents notice after 3 s, and say so; nobody waits for a Lease or for the node to be called lost."""
    name = f"heard-{before}"
    generation = begun(namespace, name, {"replicas": 3, "min": 2, "max": 3}, args=["--epochs=100000"])
    nodes = [node_of(namespace, f"{name}-worker-{index}") for index in range(3)]
    alone = [node for node in nodes if nodes.count(node) == 1 and node != node_of_leader()]
    assert alone, f"no node has one of the workers and not the operator that leads: {nodes}; the cluster needs more nodes"
    node = alone[-1]
    with harmed("OUTLAST_TEST_NODE", before, after, node):
        began, told = time.monotonic(), stopwatch(name)
        found = until(namespace, name, lambda found: found["generation"] > generation and trains(2)(found))
        told("until the survivors trained")
        assert time.monotonic() - began < 10.0  # 5 s, and the time in which kubectl looks
        until(namespace, name, lambda now: now.get("step", 0) > found.get("step", 0))
        found = until(namespace, name, trains(3))
        told("until all trained again")
        assert node_of(namespace, f"{name}-worker-{nodes.index(node)}") != node
        # a machine that refuses connections has lost the process, but only its kubelet or its silence says how
        assert (found["restarts"], found["interruptions"]) == (0, 1)
    namespace.kubectl("delete", ELASTIC, name, "--wait=false")


def test_a_kubelet_that_stands_still_stops_no_training(namespace: Namespace) -> None:
    before = begun(namespace, "still", {"replicas": 2, "min": 2}, args=["--epochs=100000"])
    node = node_of(namespace, "still-worker-1")
    with harmed("OUTLAST_TEST_NODE", "freeze", "thaw", node):
        time.sleep(100)  # it is called lost after 50 s, and our limit is 30 s
        found = status(namespace, "still")
        assert namespace.kubectl("get", "node", node).split()[6] == "NotReady"
        assert trains(2)(found)
        assert (found["generation"], found["restarts"], found["interruptions"]) == (before, 0, 0)
    namespace.kubectl("delete", ELASTIC, "still", "--wait=false")


def test_training_goes_on_while_the_api_server_is_away(namespace: Namespace) -> None:
    before = begun(namespace, "deaf", {"replicas": 2, "min": 1, "max": 2}, args=["--epochs=100000"])
    found = status(namespace, "deaf")
    with harmed("OUTLAST_TEST_API", "freeze", "thaw"):
        time.sleep(60)
    back = until(namespace, "deaf", lambda now: now["step"] > found["step"])
    time.sleep(45)  # whoever is taken for dead wrongly is so by now
    found = status(namespace, "deaf")
    assert found["step"] > back["step"]
    assert trains(2)(found)
    assert (found["generation"], found["restarts"], found["interruptions"]) == (before, 0, 0)
    assert len(live(namespace, "deaf")) == 2
    namespace.kubectl("delete", ELASTIC, "deaf", "--wait=false")


KILLER = """
import json, os, signal, sys, time
path = os.path.join(os.environ["OUTLAST_WORKER_STATE"], "progress-0.json")  # the record of this pod's rank
def record():
    try:
        return json.load(open(path))
    except (OSError, ValueError):
        return {}
for at in map(float, sys.argv[1:]):
    time.sleep(max(0.0, at - time.time()))
    before, began = record(), time.monotonic()
    os.kill(before["pid"], signal.SIGKILL)
    while True:
        now = record()
        if now.get("pid") != before["pid"] and now.get("phase") == "train":
            break
        time.sleep(0.01)
    print(round(time.monotonic() - began, 2), now.get("attempt"), flush=True)
print("over", flush=True)
"""
"""Kills the process of its pod at each of the given times, and prints when it trained again."""


def test_processes_are_killed_in_all_workers_while_the_api_server_is_away(namespace: Namespace) -> None:
    before = begun(namespace, "alone", {"replicas": 2, "min": 2}, args=["--epochs=100000"], restarts={"limit": 100})
    start, each = time.time() + 15, 3
    for worker in (0, 1):
        times = " ".join(f"{start + 16 * number + 8 * worker:.1f}" for number in range(each))
        command = f'nohup python -c "$KILLER" {times} > /tmp/killed 2>&1 &'
        namespace.kubectl("exec", f"alone-worker-{worker}", "--", "env", f"KILLER={KILLER}", "sh", "-c", command)
    time.sleep(max(0.0, start - 3 - time.time()))
    with harmed("OUTLAST_TEST_API", "freeze", "thaw"):
        time.sleep(60)
    took = []
    for worker in (0, 1):
        said = namespace.kubectl("exec", f"alone-worker-{worker}", "--", "cat", "/tmp/killed").splitlines()
        print(f"worker {worker} was killed and trained again after (seconds, attempt): {said}")
        assert said[-1:] == ["over"]
        took += [float(line.split()[0]) for line in said[:-1]]
    until(namespace, "alone", lambda now: now.get("restarts", 0) >= 2 * each)
    time.sleep(10)  # whatever is counted twice is so by now
    found = status(namespace, "alone")
    assert (found["restarts"], found["generation"], len(took)) == (2 * each, before, 2 * each)
    assert trains(2)(found)
    assert max(took) < 3.0
    namespace.kubectl("delete", ELASTIC, "alone", "--wait=false")


def test_a_worker_dies_while_the_api_server_is_away(namespace: Namespace, undisturbed_pods: str) -> None:
    before = begun(namespace, "twofold", {"replicas": 2, "min": 2})
    exec_ = subprocess.Popen(
        ["kubectl", "-n", namespace.name, "exec", "twofold-worker-1", "--", "sh", "-c", "sleep 3; kill -9 -1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    time.sleep(1.5)
    with harmed("OUTLAST_TEST_API", "freeze", "thaw"):
        time.sleep(30)
    exec_.wait(30)
    until(namespace, "twofold", lambda found: found["generation"] > before and trains(2)(found))
    ended = until(namespace, "twofold", lambda found: found["state"] in ("Succeeded", "Failed"))
    assert (ended["state"], ended["restarts"]) == ("Succeeded", 1)
    assert namespace.weights("twofold") == undisturbed_pods


def test_the_operator_dies_while_a_job_is_scaled(namespace: Namespace) -> None:
    begun(namespace, "headless", {"replicas": 2, "min": 1, "max": 4}, args=["--epochs=100000"])
    for wanted in (3, 1, 2):
        namespace.kubectl("scale", f"{ELASTIC}/headless", f"--replicas={wanted}")
        operators = ("delete", "pods", "-l", "app.kubernetes.io/name=outlast,app.kubernetes.io/component=operator")
        namespace.kubectl(*operators, "-n", "outlast-system", "--grace-period=0", "--force")
        until(namespace, "headless", trains(wanted))
        namespace.wait(lambda: len(live(namespace, "headless")) == wanted, lambda: namespace.kubectl("get", "pods"), 60)  # noqa: B023
    found = status(namespace, "headless")
    assert (found["restarts"], found["interruptions"]) == (0, 0)
    namespace.kubectl("delete", ELASTIC, "headless", "--wait=false")


@pytest.mark.parametrize("least", [1, 2])
def test_a_node_is_drained(least: int, namespace: Namespace) -> None:
    name = f"drained-{least}"
    before = begun(namespace, name, {"replicas": 2, "min": least, "max": 2})
    node = node_of(namespace, f"{name}-worker-0")
    try:
        namespace.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=120s")
        until(namespace, name, lambda found: found["generation"] > before and trains(2)(found))
        assert node_of(namespace, f"{name}-worker-0") != node
    finally:
        namespace.kubectl("uncordon", node)
    ended = until(namespace, name, lambda found: found["state"] in ("Succeeded", "Failed"))
    assert (ended["state"], ended["progress"], ended["restarts"]) == ("Succeeded", "100 %", 0)
