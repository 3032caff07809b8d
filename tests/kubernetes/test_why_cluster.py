"""`outlast why` on a real cluster: each situation is made anew, and its cause is the first that is said.

Makes namespaces `why-test-...` and deletes them. The image needs nothing but Python and a shell.

KUBECONFIG=... OUTLAST_TEST_IMAGE=... pytest -m cluster tests/kubernetes/test_why_cluster.py
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

import situations
from namespaces import Namespace, made
from outlast import cli
from outlast.base.errors import NotFound
from outlast.job.contract import Pod
from outlast.kubernetes import api, diagnosis
from outlast.kubernetes.diagnosis import Finding, gather_evidence

pytestmark = pytest.mark.cluster
LAST = {"deadline": 60, "probe-fails": 240}
"""Seconds until there is something to see; a startup probe may fail for two minutes."""


def causes(namespace: str) -> list[Finding]:
    cluster = api.connect(namespace=namespace)
    try:
        return diagnosis.causes(gather_evidence.job(cluster, "train"), time.time())
    finally:
        cluster.close()


@pytest.fixture
def place(request: pytest.FixtureRequest) -> Iterator[Namespace]:
    """A namespace of its own, with the labels of the test's situation."""
    with made("why-test", situations.SITUATIONS[getattr(request, "param", "gpu")].labels) as found:
        yield found


@pytest.mark.parametrize(("name", "place"), [(name, name) for name in situations.SITUATIONS], indirect=["place"])
def test_the_first_cause_is_the_one_that_was_made(name: str, place: Namespace) -> None:
    expected = diagnosis.causes(situations.seen(name), situations.noted(situations.seen(name)))[0]
    what = expected.what.replace("namespace team", f"namespace {place.name}").replace(situations.RECORDED_IMAGE, situations.IMAGE)
    wanted = (expected.name, what.replace(f'"{Pod.CONTAINER}"', f'"{Pod.TRAINER}"'))  # recorded with the earlier name
    situations.begin(name, place)
    found: list[Finding] = []

    def told() -> bool:
        found[:] = causes(place.name)
        return (found[0].name, found[0].what) == wanted

    place.wait(told, lambda: f"{name}: {diagnosis.text(found)}", LAST.get(name, 120))


def test_the_command_tells_it(place: Namespace, capsys: pytest.CaptureFixture[str]) -> None:
    situations.begin("gpu", place)
    place.wait(lambda: "FailedScheduling" in place.kubectl("get", "events", "-o", "json"), lambda: place.logs("train"), 60)
    with pytest.raises(SystemExit) as ended:
        cli.main(["why", "train", "-n", place.name])
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("Workers 0 and 1 find no node: none has any nvidia.com/gpu\n  nodes offer: ")


def test_a_job_and_a_namespace_that_do_not_exist_are_told(place: Namespace) -> None:
    with pytest.raises(NotFound, match="there is no namespace why-nowhere"):
        causes("why-nowhere")
    with pytest.raises(NotFound, match="there is no job train in namespace why-test-"):
        causes(place.name)
