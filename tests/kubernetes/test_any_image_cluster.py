"""Images without Outlast on a real cluster, with the operator that is installed there.

As for test_operator_cluster.py; OUTLAST_TEST_TORCH_IMAGE has Python, torch and numpy alone, and no `outlast` in its name.
"""

from __future__ import annotations

import os

import pytest

from namespaces import KILL_RANKS, Namespace, begun, status, trains, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
ARGS = ["--epochs=500"]


@pytest.fixture
def image() -> str:
    if "OUTLAST_TEST_TORCH_IMAGE" not in os.environ:
        pytest.skip("OUTLAST_TEST_TORCH_IMAGE does not name an image that the cluster has")
    return os.environ["OUTLAST_TEST_TORCH_IMAGE"]


def test_a_job_in_an_image_with_torch_alone_is_struck_five_times_and_has_the_undisturbed_weights(
    namespace: Namespace, image: str
) -> None:
    workers = {"replicas": 2, "min": 2}
    begun(namespace, "any", workers, image=image, args=ARGS)
    for index, harm in (
        (1, ["exec", "any-worker-1", "--", "sh", "-c", KILL_RANKS]),
        (1, ["delete", "pod", "any-worker-1", "--grace-period=0", "--force"]),
        (0, ["exec", "any-worker-0", "--", "sh", "-c", "kill -9 -1"]),
        (0, ["exec", "any-worker-0", "--", "sh", "-c", KILL_RANKS]),
        (0, ["delete", "pod", "any-worker-0", "--wait=false"]),
    ):
        before = status(namespace, "any")["step"]
        namespace.kubectl(*harm, fails=True)
        until(namespace, "any", lambda found: trains(2)(found) and found["step"] > before + 40, 200)  # noqa: B023
        assert namespace.pods("any")[index]["spec"]["containers"][0]["image"] == image
    assert until(namespace, "any", lambda found: found["state"] in ("Succeeded", "Failed"), 400)["state"] == "Succeeded"
    namespace.run("plain", "elasticjob", workers=workers, args=ARGS)
    until(namespace, "plain", lambda found: found.get("state") == "Succeeded", 400)
    assert namespace.weights("any") == namespace.weights("plain")


def test_an_image_without_python_fails_the_job_with_one_sentence(namespace: Namespace, image: str) -> None:
    namespace.run("bad", "elasticjob", image=image, env={"PATH": "/nonexistent"})
    found = until(namespace, "bad", lambda found: found.get("state") == "Failed", 120)
    assert "the image has no Python: there is neither python nor python3 on its PATH" in found["reason"]
    assert found["restarts"] == 0
