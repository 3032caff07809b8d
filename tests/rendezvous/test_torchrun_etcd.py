"""torchrun as anybody runs it, with its rendezvous in a real etcd: no other part of Outlast takes part."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import processes
from etcds import Server
from outlast.rendezvous.etcd import client as etcd
from waits import until

SCRIPT = """
import json, os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
for step in range(int(sys.argv[1])):
    number = torch.ones(1)
    dist.all_reduce(number)
    print(json.dumps({"generation": int(os.environ["OUTLAST_GENERATION"]), "world": int(number), "rank": rank, "step": step,
                      "pid": os.getpid()}), flush=True)
    time.sleep(0.05)
dist.destroy_process_group()
"""


class Node:
    """One torchrun, and what its training says."""

    def __init__(self, directory: Path, endpoint: str, *, nnodes: str, steps: int, id: str, conf: str, restarts: int) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        script = directory / "train.py"
        script.write_text(SCRIPT)
        options = ["--rdzv-backend=outlast", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={id}", f"--nnodes={nnodes}"]
        options += [f"--rdzv-conf={conf}"] if conf else []
        self.out, self.err = directory / "out", directory / "err"
        environ = {name: value for name, value in os.environ.items() if not name.startswith("OUTLAST_")}
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *options, f"--max-restarts={restarts}", str(script), str(steps)],
                stdout=out,
                stderr=err,
                env={**environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
                cwd=directory,
            )

    def said(self) -> list[dict[str, int]]:
        return [
            json.loads(line) for line in self.out.read_text().splitlines(keepends=True) if line[0] == "{" and line[-1] == "\n"
        ]

    def generation(self) -> int:
        return max((each["generation"] for each in self.said()), default=0)

    def decides(self) -> bool:
        """Whether it has been elected at some time: only who decides says so."""
        return "outlast | Running: " in self.out.read_text()

    def kill(self) -> None:
        """The whole node is lost, without a word."""
        processes.kill(self.process)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """Starts nodes of a run, and ends what is left of them."""
    nodes: list[Node] = []

    def make(
        endpoint: str,
        *,
        nnodes: str = "2",
        steps: int = 40,
        id: str = "run",
        conf: str = "last_call_timeout=1",
        restarts: int = 5,
    ) -> Node:
        directory = tmp_path / f"node-{len(nodes)}"
        nodes.append(Node(directory, endpoint, nnodes=nnodes, steps=steps, id=id, conf=conf, restarts=restarts))
        return nodes[-1]

    yield make
    for node in nodes:
        node.kill()


@pytest.mark.parametrize("times", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_two_nodes_train_to_the_end_after_a_killed_process_and_again_at_once_under_the_same_id(
    own_etcd: Server, start, times: int
) -> None:
    for turn in range(times):
        nodes = [start(own_etcd.endpoint, nnodes="2", steps=5 if turn else 40) for _ in range(2)]
        if not turn:
            until(nodes[1].said)
            psutil.Process(nodes[1].said()[0]["pid"]).kill()
        assert [node.process.wait(120) for node in nodes] == [0, 0], [node.err.read_text() for node in nodes]
        last = (1, 2, 4) if turn else (2, 2, 39)
        assert [tuple(node.said()[-1][key] for key in ("generation", "world", "step")) for node in nodes] == [last, last]
        assert not list(nodes[0].out.parent.glob("*.json"))  # nothing is left in the directory of the script


@pytest.mark.slow
def test_training_goes_on_when_a_process_a_node_or_the_decider_is_killed(own_etcd: Server, start) -> None:
    nodes = [start(own_etcd.endpoint, nnodes="1:3", steps=10_000) for _ in range(3)]
    until(lambda: all(node.generation() == 1 and node.said()[-1]["world"] == 3 for node in nodes))
    psutil.Process(nodes[1].said()[0]["pid"]).kill()
    until(lambda: all(node.generation() == 2 for node in nodes))
    assert nodes[0].said()[-1]["world"] == 3
    [deciding] = [node for node in nodes if node.decides()]
    others = [node for node in nodes if node is not deciding]
    deciding.kill()
    until(lambda: all(node.generation() == 3 and node.said()[-1]["world"] == 2 for node in others))
    [deciding] = [node for node in others if node.decides()]
    [last] = [node for node in others if node is not deciding]
    deciding.kill()
    until(lambda: last.generation() == 4 and last.said()[-1]["world"] == 1)


@pytest.mark.slow
def test_training_goes_on_without_etcd_and_forms_anew_when_that_is_back_without_its_data(own_etcd: Server, start) -> None:
    nodes = [start(own_etcd.endpoint, nnodes="1:2", steps=10_000) for _ in range(2)]
    until(lambda: all(node.generation() == 1 and node.said()[-1]["world"] == 2 for node in nodes))
    own_etcd.stop()
    time.sleep(10)
    steps = [node.said()[-1]["step"] for node in nodes]
    until(lambda: all(node.said()[-1]["step"] > step for node, step in zip(nodes, steps, strict=True)))
    own_etcd.lose_data()
    client = own_etcd.client()
    until(lambda: [len(run.members) for run in etcd.look(client, "run") if run.coordinator and run.world] == [2])
    assert [node.generation() for node in nodes] == [1, 1]
    nodes[0].kill()
    until(lambda: nodes[1].generation() == 102)
    client.close()


@pytest.mark.slow
def test_a_node_that_has_used_up_its_restarts_ends_the_job_on_all(own_etcd: Server, start) -> None:
    nodes = [start(own_etcd.endpoint, nnodes="2", steps=10_000, restarts=restarts) for restarts in (0, 5)]
    until(lambda: all(node.generation() == 1 for node in nodes))
    psutil.Process(nodes[0].said()[0]["pid"]).kill()
    assert [node.process.wait(90) for node in nodes] == [1, 1]
    assert "gives up, its --max-restarts are used up: rank" in nodes[1].err.read_text()


@pytest.mark.slow
def test_a_node_that_is_told_to_end_leaves_at_once(own_etcd: Server, start) -> None:
    nodes = [start(own_etcd.endpoint, nnodes="1:2", steps=10_000, conf="last_call_timeout=1,ttl=60") for _ in range(2)]
    until(lambda: all(node.generation() == 1 and node.said()[-1]["world"] == 2 for node in nodes))
    nodes[0].process.send_signal(signal.SIGTERM)
    nodes[0].process.wait(60)
    until(lambda: nodes[1].generation() == 2 and nodes[1].said()[-1]["world"] == 1, within_s=60)


@pytest.mark.slow
def test_a_node_too_many_takes_the_place_of_one_that_is_lost_or_ends_with_the_others(own_etcd: Server, start) -> None:
    nodes = [start(own_etcd.endpoint, nnodes="1", steps=200) for _ in range(3)]
    until(lambda: any(node.said() for node in nodes))
    [first] = [node for node in nodes if node.said()]
    first.kill()
    others = [node for node in nodes if node is not first]
    until(lambda: any(node.said() for node in others))
    assert [node.process.wait(60) for node in others] == [0, 0]
    [trained, spare] = sorted(others, key=lambda node: len(node.said()), reverse=True)
    assert (trained.generation(), spare.said()) == (2, [])
    assert "is done; nothing is left to do here" in spare.out.read_text()


@pytest.mark.slow
def test_a_world_that_does_not_come_is_given_up_with_the_reason(own_etcd: Server, start) -> None:
    node = start(own_etcd.endpoint, nnodes="2:3", conf="join_timeout=3")
    assert node.process.wait(60) == 1
    sentence = "no world within join_timeout (3 s): waiting for 2 more workers: 1 of at least 2 workers is here"
    assert sentence in node.err.read_text()
