"""Pods that stay in a planned change of the world keep their training processes, if the script chooses it, and change no bit.

As for test_operator_cluster.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from namespaces import Namespace
from operated import ELASTIC, for_ranks, hurried, status, submit_exact, trains, until, weights

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
RANKS = for_ranks("echo ${p#/proc/}")


def resized(namespace: Namespace, directory: Path, name: str, *args: str) -> Iterator[list[str]]:
    """Train in worlds of 2, 3 and 1 workers, which change after steps 20 and 40. Yields the first two pods' processes in each."""

    def processes(workers: int) -> list[str]:
        pods = [f"{name}-worker-{index}" for index in range(min(workers, 2))]
        return [namespace.kubectl("exec", pod, "--", "sh", "-c", RANKS).strip() for pod in pods]

    submit_exact(namespace, directory, name, "--steps=60", *args, "--holds", "20", "40")
    for step, before, workers in ((20, 2, 3), (40, 3, 1)):
        namespace.wait(lambda at=step: f"rank 0 step {at}\n" in namespace.logs(name), lambda: namespace.logs(name))
        yield processes(before)
        namespace.kubectl("scale", f"{ELASTIC}/{name}", f"--replicas={workers}")
        until(namespace, name, trains(workers))
    namespace.wait(lambda: "rank 0 step 59\n" in namespace.logs(name), lambda: namespace.logs(name))
    yield processes(1)
    assert hurried(namespace, name)["state"] == "Succeeded", status(namespace, name)


def test_pods_that_stay_keep_their_processes_and_change_no_bit(namespace: Namespace, tmp_path: Path) -> None:
    replaced = list(resized(namespace, tmp_path, "replaced"))
    assert not {*replaced[0]} & {*replaced[1]}, "without the choice a change replaces all processes"
    first, second, third = resized(namespace, tmp_path, "kept", "--keep")
    assert (second, third) == (first, first[:1])
    assert weights(namespace.logs("kept")) == weights(namespace.logs("replaced"))
    assert status(namespace, "kept")["restarts"] == 0
