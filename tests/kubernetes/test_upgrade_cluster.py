"""A job begun in pods of the version before goes on in pods of both versions side by side, with the operator of this one.

    OUTLAST_TEST_IMAGE_MIXED=outlast:rolling OUTLAST_TEST_NODE_BEFORE=node-a \\
        pytest -m cluster tests/kubernetes/test_upgrade_cluster.py

The image is of the version before on that node, and of this version on all other nodes, as when a tag is moved.
"""

from __future__ import annotations

import os

import pytest

from namespaces import Namespace, begun, for_ranks, status, trains, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
KILL_RANKS = for_ranks("kill -9 ${p#/proc/} && echo killed")  # the version before does not show LOCAL_RANK


def test_a_job_of_the_version_before_goes_on_pod_by_pod(namespace: Namespace, undisturbed_pods: str) -> None:
    image, old = os.environ.get("OUTLAST_TEST_IMAGE_MIXED"), os.environ.get("OUTLAST_TEST_NODE_BEFORE")
    if image is None or old is None:
        pytest.skip("OUTLAST_TEST_IMAGE_MIXED and OUTLAST_TEST_NODE_BEFORE do not name an image of two versions")
    nodes = namespace.kubectl("get", "nodes", "-o", "jsonpath={.items[*].metadata.name}").split()
    name = "upgraded"

    def version(index: int) -> str:
        show = "import outlast, pathlib; print(sum(1 for _ in pathlib.Path(outlast.__file__).parent.rglob('*.py')))"
        return namespace.kubectl("exec", f"{name}-worker-{index}", "--", "python3", "-c", show)

    def replaced(index: int) -> None:
        generation = status(namespace, name)["generation"]
        namespace.kubectl("delete", "pod", f"{name}-worker-{index}", "--wait=false")
        until(namespace, name, lambda found: found["generation"] > generation and trains(2)(found))

    def killed(index: int) -> None:
        restarts = status(namespace, name)["restarts"]
        kill = ("exec", f"{name}-worker-{index}", "--", "sh", "-c", KILL_RANKS)
        namespace.wait(lambda: namespace.kubectl(*kill, fails=True), lambda: namespace.logs(name))  # it may be starting
        until(namespace, name, lambda found: found["restarts"] > restarts and trains(2)(found))

    try:
        namespace.kubectl("cordon", *(each for each in nodes if each != old))
        begun(namespace, name, {"replicas": 2, "min": 2}, image=image)
        killed(0)
        namespace.kubectl("uncordon", *nodes)
        namespace.kubectl("cordon", old)
        replaced(1)
        assert version(0) != version(1)
        killed(0)
        killed(1)
        replaced(0)
        assert version(0) == version(1)
    finally:
        namespace.kubectl("uncordon", *nodes)
    ended = until(namespace, name, lambda found: found["state"] in ("Succeeded", "Failed"))
    assert (ended["state"], ended["restarts"]) == ("Succeeded", 3), ended
    assert namespace.weights(name) == undisturbed_pods
