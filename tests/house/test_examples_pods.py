"""The pods made by hand, as processes: their arguments, an etcd of this machine, and what their page promises."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import etcds
import processes

ROOT = Path(__file__).parents[2]


class Pods:
    """Containers as processes of this machine."""

    def __init__(self, directory: Path, etcd: etcds.Server) -> None:
        self.directory, self._etcd = directory, etcd
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def apply(self, file: str) -> None:
        """Start the pods of an example."""
        for pod in yaml.safe_load_all((ROOT / "examples" / "pods" / file).read_text()):
            self.start(pod)

    def start(self, pod: dict[str, Any]) -> None:
        name = pod["metadata"]["name"]
        (container,) = pod["spec"]["containers"]
        assert container["command"] == ["torchrun"]
        there = {
            "etcds://etcd-server:2379": self._etcd.endpoint,
            "$(POD_IP)": "127.0.0.1",
            "$(NAMESPACE)": self.directory.name,
            "/code/train.py": str(ROOT / "examples" / "train.py"),
            "/out": str(self.directory / name),
        }
        args = [re.sub("|".join(map(re.escape, there)), lambda found: there[found[0]], arg) for arg in container["args"]]
        own = {each["name"]: each["value"] for each in container["env"] if "value" in each}
        own = {name: value for name, value in own.items() if not name.startswith("OUTLAST_ETCD_")}  # this one asks for no login
        with (self.directory / f"{name}.log").open("ab") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-m", "torch.distributed.run", *args],
                env={**os.environ, **own, "GLOO_SOCKET_IFNAME": "lo"},
                stdout=log,
                stderr=log,
            )

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()

    def says(self, pattern: str, *names: str, after: int = 0, timeout_s: float = 90) -> re.Match[str]:
        """Wait until one of the pods has said so, in what it has said after that many characters."""
        deadline = time.monotonic() + timeout_s
        while not (found := next(filter(None, (re.search(pattern, self.log(name)[after:]) for name in names)), None)):
            assert time.monotonic() < deadline, "\n".join(f"{each}:\n{self.log(each)}" for each in self.running)
            time.sleep(0.05)
        return found

    def delete(self, name: str) -> None:
        """Without a word, as when its node is lost."""
        processes.kill(self.running.pop(name))


@pytest.fixture
def pods(tmp_path: Path, shared_etcd: etcds.Server) -> Iterator[Callable[[], Pods]]:
    made = Pods(tmp_path, shared_etcd)
    yield lambda: made
    for name in list(made.running):
        made.delete(name)


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["hand-made-1", "hand-made-3"])
def test_a_third_pod_joins_two_and_whichever_is_lost_the_others_go_on(victim: str, pods: Callable[[], Pods]) -> None:
    three = pods()
    three.apply("two.yaml")
    three.says(r"step \d+ loss", *three.running)
    three.apply("third.yaml")
    for name in list(three.running):
        three.says(r"rank \d of 3 goes on from step \d+", name)
    seen = {name: len(three.log(name)) for name in three.running}
    three.delete(victim)
    reached = {int(three.says(r"rank \d of 2 goes on from step (\d+)", name, after=seen[name])[1]) for name in three.running}
    (step,) = reached
    assert step > 0
