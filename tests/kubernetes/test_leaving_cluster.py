"""A worker is lost, and the other leaves while the first one's replacement starts: nothing that was saved is trained again.

    outlast install --image registry/outlast:dev --wait
    KUBECONFIG=... OUTLAST_TEST_IMAGE=registry/outlast:dev OUTLAST_TEST_STORE=s3://bucket/tests AWS_ENDPOINT_URL=...
    pytest -m cluster tests/kubernetes/test_leaving_cluster.py

The store is one that pods reach; its AWS_* variables are theirs, too. Two of 20 trials: OUTLAST_TEST_SCHEDULES=20 for all. What
each did is in its output (-rP).
"""

from __future__ import annotations

import itertools
import json
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from namespaces import ELASTIC, Namespace, both_train, hurried, submit_exact
from outlast.storage import store
from outlast.storage.runs import output as stored
from seeds import seeds

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]
STORE = os.environ.get("OUTLAST_TEST_STORE", "")
STEPS = 200
FROZEN = 32 << 20
"""Parameters that are saved and not trained, 128 MiB: the steps are short, and the saves are not."""
LONGEST_S = 15.0

Event = dict[str, Any]


@pytest.fixture
def place(namespace: Namespace) -> Iterator[store.Store]:
    """Where a job's output goes; the namespace has a Secret for it. Nothing of it is left."""
    if not STORE:
        pytest.skip("OUTLAST_TEST_STORE is not set")
    keys = [f"--from-literal={key}={value}" for key, value in os.environ.items() if key.startswith("AWS_")]
    namespace.kubectl("create", "secret", "generic", "store", *keys, fails=True)  # the test before may have done it
    found = store.open_(f"{STORE}/{uuid.uuid4().hex[:8]}")
    yield found
    found.delete([entry.key for entry in found.entries()])


def without_training(events: list[Event]) -> list[float]:
    steps = [event for event in events if event["kind"] == "step"]
    return [
        after["t"] - before["t"] for before, after in itertools.pairwise(steps) if after["generation"] != before["generation"]
    ]


def below(events: list[Event]) -> list[Event]:
    """The worlds that began below a step that a world before them had saved, whichever was first by the clock."""
    generation: dict[str, int] = {}
    saved, began = [(0, 0)], []
    for event in events:
        if event["kind"] == "session":
            generation[event["source"]] = event["generation"]
        elif event["kind"] == "committed":
            saved.append((generation[event["source"]], event["step"]))
        elif event["kind"] == "restored":
            began.append(event)
    return [each for each in began if each["step"] < max(step for by, step in saved if by < each["generation"])]


def running(namespace: Namespace, name: str) -> list[str]:
    """The pods in which something runs, also of those that are on their way out."""
    return [pod["metadata"]["name"] for pod in namespace.pods(name) if pod["status"]["phase"] in ("Pending", "Running")]


@pytest.mark.parametrize("seed", seeds(2))
def test_a_worker_that_leaves_while_the_other_is_replaced_loses_no_step_that_it_has_saved(
    seed: int, namespace: Namespace, tmp_path: Path, place: store.Store
) -> None:
    wait_s = LONGEST_S * ((seed + 1) * 0.618 % 1)  # the golden ratio: any number of trials is spread evenly
    name = f"left-{seed}"
    args = (f"--steps={STEPS}", "--pause=0.3", f"--frozen={FROZEN}")
    only_what_it_must = {"checkpoint": {"every": "1h"}, "output": place.url, "secrets": [{"name": "store"}]}
    submit_exact(namespace, tmp_path, name, *args, **only_what_it_must)
    both_train(namespace, name)
    namespace.kubectl("delete", "pod", f"{name}-worker-1", "--grace-period=0", "--force")
    time.sleep(wait_s)
    namespace.kubectl("delete", "pod", f"{name}-worker-0")  # returns when it is gone
    ended = hurried(namespace, name)
    namespace.wait(lambda: not running(namespace, name), lambda: namespace.logs(name))  # then the ledger is in the store
    events = list(stored.events(place.child(name)))
    told = [each for each in events if each["kind"] in ("session", "committed", "interrupted", "restored")]
    print(f"seed {seed}: {wait_s:.1f} s between the two; without training: {[round(s, 1) for s in without_training(events)]}")
    print("\n".join(json.dumps(each) for each in told))
    assert (ended["state"], ended["step"]) == ("Succeeded", STEPS), ended
    left = [at for at, each in enumerate(told) if each["kind"] == "interrupted" and each["source"].startswith("worker-0-")]
    assert "restored" in [each["kind"] for each in told[left[-1] :]], "after worker 0 has saved and left"
    assert below(told) == []
    assert [each for each in told if "warning" in each] == []
    lost = namespace.kubectl("get", "events", "--field-selector", f"reason=StepsLost,involvedObject.name={name}", "-o", "name")
    assert lost == "", namespace.kubectl("get", "events")
    namespace.kubectl("delete", ELASTIC, name, "--wait=false")
