"""One account of a job on a real cluster, on S3: whatever happens to its pods, everybody shows the same.

OUTLAST_TEST_S3 is the address of an S3 server that pods and this machine reach, with the key `k`, the secret `s` and a `bucket`.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

import pytest

from namespaces import KILL_RANKS, Namespace, hurried, status, submit_exact, trains, until
from outlast.job.report import goodput
from outlast.job.report.steps import Bucket
from outlast.kubernetes import api
from outlast.kubernetes.api import pod_status
from outlast.kubernetes.jobs.backend import KubernetesBackend
from outlast.storage import store
from outlast.storage.runs import output as stored

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1200)]


def test_a_job_that_is_harmed_is_one_account_for_everybody(
    namespace: Namespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "OUTLAST_TEST_S3" not in os.environ:
        pytest.skip("OUTLAST_TEST_S3 does not name an S3 server")
    login = {"AWS_ENDPOINT_URL": os.environ["OUTLAST_TEST_S3"], "AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
    login["AWS_REGION"] = "us-east-1"
    for name, value in login.items():
        monkeypatch.setenv(name, value)
    place = f"s3://bucket/{namespace.name}"
    args, fields = ("--steps=3000", "--pause=0.1", "--swell=/tmp/swell"), {"checkpoint": {"every": "10s"}}
    submit_exact(namespace, tmp_path, "job", *args, output=place, env=login, **fields)
    output = store.open_(place).child("job")

    def settled(workers: int, after: int = 0) -> None:
        """Wait until so many train and the store has a step of theirs: a lost disk takes along what it has not sent."""

        def there() -> bool:
            found = status(namespace, "job")
            newest = found.get("generation", 0)
            events = stored.events(output) if newest > after and trains(workers)(found) else ()
            return any(event["kind"] == "step" and event["generation"] == newest for event in events)

        namespace.wait(there, lambda: namespace.logs("job"))

    def again(workers: int, *words: str) -> None:
        before = status(namespace, "job")["generation"]
        namespace.kubectl(*words, fails=True)
        settled(workers, before)

    def repaired(worker: int, harm: str, words: str) -> None:
        """Harm a rank, which its world repairs without another, and wait until training has gone on for a while."""
        namespace.kubectl("exec", f"job-worker-{worker}", "--", "sh", "-c", harm, fails=True)
        namespace.wait(lambda: words in namespace.logs("job"), lambda: namespace.logs("job"))
        after = status(namespace, "job")["step"] + 50
        until(namespace, "job", lambda found: found["step"] > after)

    settled(2)
    again(2, "delete", "pod", "job-worker-0", "--grace-period=0", "--force")
    again(2, "exec", "job-worker-1", "--", "sh", "-c", "kill -9 -1")
    again(2, "delete", "pod", "job-worker-1", "--wait=false")
    again(3, "scale", "ej/job", "--replicas=3")
    namespace.kubectl("patch", "ej/job", "--type=merge", "-p", '{"spec":{"suspend":true}}')
    until(namespace, "job", lambda found: found["state"] == "Suspended" and not namespace.pods("job"))
    again(3, "patch", "ej/job", "--type=merge", "-p", '{"spec":{"suspend":false}}')
    again(3, "delete", "pod", "job-worker-2", "--grace-period=0", "--force")
    repaired(1, "touch /tmp/swell", "rank 1 on worker 1 was killed: out of memory")
    again(3, "exec", "job-worker-2", "--", "sh", "-c", "kill -STOP -1")
    again(2, "scale", "ej/job", "--replicas=2")
    repaired(0, KILL_RANKS, "rank 0 on worker 0 was killed by SIGKILL")
    hurried(namespace, "job")
    ended = until(namespace, "job", lambda found: found.get("goodput"))

    with contextlib.closing(api.connect(namespace=namespace.name)) as cluster:
        backend = KubernetesBackend(cluster)
        account, [listed], shown = goodput.buckets(backend.events("job"), None), backend.list(), backend.status("job")
    told = " | ".join(incident.text for incident in account.incidents)
    print({bucket.value: round(seconds, 2) for bucket, seconds in account.seconds.items()}, told, sep="\n")
    created = json.loads(namespace.kubectl("get", "ej", "job", "-o", "json"))["metadata"]["creationTimestamp"]
    whole_s = pod_status.timestamp(ended["completionTime"]) - pod_status.timestamp(created)
    assert sum(account.seconds.values()) == pytest.approx(whole_s, rel=0.01)
    assert account.seconds[Bucket.SUSPENDED] > 0
    assert (account.state, shown.state, listed.state, ended["state"]) == ("Succeeded",) * 4
    assert (account.steps_kept, shown.step, listed.step, ended["step"]) == (ended["steps"],) * 4
    assert shown.goodput == listed.goodput == ended["goodput"] == pytest.approx(account.goodput, abs=1e-4)
    harms = (
        "lost worker 0", "worker 1 was killed (exit code 137)", "worker 1 is leaving", "growing from 2 to 3 with worker 2; saved",
        "suspended: no workers are wanted", "lost worker 2", "rank 1 on worker 1 was killed: out of memory",
        "worker 2 has said nothing for 100 s", "shrinking from 3 to 2", "rank 0 on worker 0 was killed by SIGKILL",
    )  # fmt: skip
    for harm in harms:
        assert told.count(harm) == (3 if harm.startswith("growing") else 1), (harm, told)
