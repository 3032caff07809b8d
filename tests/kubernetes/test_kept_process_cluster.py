"""Pods that stay in a planned change of the world keep their training processes, if the script chooses it, and change no bit.

As for test_operator_cluster.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from namespaces import ELASTIC, Namespace, for_ranks, hurried, status, submit_exact, trains, until, weights

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
RANKS = for_ranks("echo ${p#/proc/}")


def processes(namespace: Namespace, name: str, *workers: int) -> list[str]:
    pods = [f"{name}-worker-{index}" for index in workers]
    return [namespace.kubectl("exec", pod, "--", "sh", "-c", RANKS).strip() for pod in pods]


def resized(namespace: Namespace, directory: Path, name: str, *args: str) -> Iterator[list[str]]:
    """Train in worlds of 2, 3 and 1 workers, which change after steps 20 and 40. Yields the first two pods' processes in each."""

    submit_exact(namespace, directory, name, "--steps=60", *args, "--holds", "20", "40")
    for step, before, workers in ((20, 2, 3), (40, 3, 1)):
        namespace.wait(lambda at=step: f"rank 0 step {at}\n" in namespace.logs(name), lambda: namespace.logs(name))
        yield processes(namespace, name, *range(min(before, 2)))
        namespace.kubectl("scale", f"{ELASTIC}/{name}", f"--replicas={workers}")
        until(namespace, name, trains(workers))
    namespace.wait(lambda: "rank 0 step 59\n" in namespace.logs(name), lambda: namespace.logs(name))
    yield processes(namespace, name, 0)
    assert hurried(namespace, name)["state"] == "Succeeded", status(namespace, name)


def test_pods_that_stay_keep_their_processes_and_change_no_bit(namespace: Namespace, tmp_path: Path) -> None:
    replaced = list(resized(namespace, tmp_path, "replaced"))
    assert not {*replaced[0]} & {*replaced[1]}, "without the choice a change replaces all processes"
    first, second, third = resized(namespace, tmp_path, "kept", "--keep")
    assert (second, third) == (first, first[:1])
    assert weights(namespace.logs("kept")) == weights(namespace.logs("replaced"))
    assert status(namespace, "kept")["restarts"] == 0


def test_pods_keep_their_processes_when_another_is_lost_and_change_no_bit(namespace: Namespace, tmp_path: Path) -> None:
    size = {"workers": {"replicas": 3, "min": 3}}
    submit_exact(namespace, tmp_path, "whole", "--steps=60", **size)
    whole = weights_of(namespace, "whole")
    submit_exact(namespace, tmp_path, "lost", "--steps=60", "--keep", "--pause=0.2", **size)
    namespace.wait(lambda: "rank 0 step 20\n" in namespace.logs("lost"), lambda: namespace.logs("lost"))
    before = processes(namespace, "lost", 0, 2)
    namespace.kubectl("delete", "pod", "lost-worker-1", "--grace-period=0", "--force")
    until(namespace, "lost", lambda found: found.get("generation") == 2 and trains(3)(found))
    namespace.wait(lambda: "rank 0 step 40\n" in namespace.logs("lost"), lambda: namespace.logs("lost"))
    assert processes(namespace, "lost", 0, 2) == before
    assert weights_of(namespace, "lost") == whole


def weights_of(namespace: Namespace, name: str) -> str:
    assert hurried(namespace, name)["state"] == "Succeeded", status(namespace, name)
    return weights(namespace.logs(name))
