"""The operator of a real cluster, and documents that no program should read whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from namespaces import ELASTIC, Namespace, begun, status, trains, until
from outlast.job import contract

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

FAT = int(os.environ.get("OUTLAST_TEST_FAT", "20"))
"""Jobs of 1.3 MiB: etcd takes no more than 1.5 MiB at once. Parsed, so many take 660 MiB. To take one, an API server that has two
cores needs 7 s."""
OPERATOR = f"deployment/{contract.OPERATOR}"


def operators(*words: str) -> str:
    command = ["kubectl", "-n", contract.OPERATOR_NAMESPACE, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def posted(namespace: Namespace, path: Path, name: str, template: str, group: str = "outlast.dev") -> None:
    """Create a job with this template, which is text: Python can write no such thing."""
    meta = f'"metadata":{{"name":"{name}"}}'
    if group == "outlast.dev":
        version, spec = "v1alpha1", f'{{"image":"i","module":"m","template":{{"metadata":{{"x":{template}}}}}}}'
    else:
        pods = f'{{"metadata":{{"x":{template}}},"spec":{{"containers":[{{"name":"w","image":"i"}}]}}}}'
        version, spec = "v1alpha1", f'{{"replicaSpecs":{{"Worker":{{"template":{pods}}}}}}}'
    path.write_text(f'{{"apiVersion":"{group}/{version}","kind":"ElasticJob",{meta},"spec":{spec}}}')
    where = f"/apis/{group}/{version}/namespaces/{namespace.name}/elasticjobs"
    namespace.kubectl("create", "--raw", where, "-f", str(path))


def recovers(namespace: Namespace, name: str) -> None:
    before, begun_at = int(status(namespace, name)["generation"]), time.monotonic()
    namespace.kubectl("delete", "pod", f"{name}-worker-1", "--grace-period=0", "--force")
    until(namespace, name, lambda found: found["generation"] > before and trains(2)(found))
    print(f"recovered within {time.monotonic() - begun_at:.1f} s")


def states(namespace: Namespace, kind: str) -> dict[str, str]:
    found = namespace.kubectl("get", kind, "--no-headers", "--chunk-size=10").splitlines()  # what the server prints, not the jobs
    return {line.split()[0]: next((word for word in line.split() if word in ("Failed", "Running")), "") for line in found}


def reason(namespace: Namespace, name: str) -> str:
    """Of a job that this program could not read whole either."""
    return namespace.kubectl("get", ELASTIC, name, "-o", "jsonpath={.status.reason}")


def test_jobs_that_nobody_can_read_fail_alone_and_the_others_recover(namespace: Namespace, tmp_path: Path) -> None:
    begun(namespace, "good", {"replicas": 2, "min": 1, "max": 2}, args=["--epochs=1000000"])
    posted(namespace, tmp_path / "deep", "deep", "[" * 1100 + "]" * 1100)
    posted(namespace, tmp_path / "old", "old", "[" * 1100 + "]" * 1100, group="elastic.pytorch.org")
    fat = "[" + "{}," * 450_000 + "{}]"
    for number in range(FAT):
        posted(namespace, tmp_path / "fat", f"fat-{number}", fat)
    recovers(namespace, "good")
    expected = {"good": "Running", "deep": "Failed", **{f"fat-{number}": "Failed" for number in range(FAT)}}
    namespace.wait(lambda: states(namespace, ELASTIC) == expected, lambda: str(states(namespace, ELASTIC)))
    assert states(namespace, "elasticjobs.elastic.pytorch.org") == {"old": "Failed"}
    assert "nested more than 100 levels deep" in reason(namespace, "deep")
    assert "its spec takes 1318 KiB" in reason(namespace, "fat-0")

    operators("rollout", "restart", OPERATOR)  # those that come list them all
    operators("rollout", "status", OPERATOR, "--timeout=120s")
    recovers(namespace, "good")
    pods = json.loads(operators("get", "pods", "-l", "app.kubernetes.io/component=operator", "-o", "json"))["items"]
    assert [each["restartCount"] for pod in pods for each in pod["status"]["containerStatuses"]] == [0] * len(pods)
    peaks = [
        operators("exec", pod["metadata"]["name"], "--", "python3", "-c", "print(open('/proc/1/status').read())")
        for pod in pods
        if "deletionTimestamp" not in pod["metadata"]
    ]
    kib = [int(text.partition("VmHWM:")[2].split()[0]) for text in peaks]
    print("at most", kib, "KiB")
    assert max(kib) < 256 * 1024
    begun_at = time.monotonic()
    list_ = [str(Path(sys.executable).parent / "outlast"), "list", "-n", namespace.name]
    listed = subprocess.run(list_, capture_output=True, text=True, check=True).stdout
    print(f"listed within {time.monotonic() - begun_at:.1f} s")
    assert f"fat-{FAT - 1}" in listed
