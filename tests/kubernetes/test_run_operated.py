"""Workers as the operator runs them: it decides, agents and operator speak by way of an API server, and pods have uids."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import apiserver
from bare_pods import Pods
from outlast.base.typed_json import decode
from outlast.job import contract
from outlast.rendezvous import messages, world
from outlast.rendezvous.world import MemberState

RUN = "job-1a2b3c4d"
ARGS = ("--steps=100", "--pause=0.04", "--print", "--gate")
STARTS_AGAIN = world.Timeouts(recovery=20)
"""Whoever was killed is waited for: a new pod takes longer than the second that survivors wait by themselves."""


class Operator:
    """The least that decides: Leases in, `world.decide`, status out."""

    def __init__(self, api: apiserver.ApiServer, pods: Pods, kubeconfig: Path) -> None:
        self.api, self.pods, self.kubeconfig = api, pods, kubeconfig
        self.uids: dict[int, str] = {}
        self.state = world.State({})
        self.worlds: list[world.World] = []
        self.standings: set[tuple[int, str]] = set()
        """All that was ever reported."""
        self.closed: messages.Closed | None = None
        self.document = api.put(
            {"apiVersion": contract.API_VERSION, "kind": contract.KIND, "metadata": {"name": "job"}, "spec": {}}
        )
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def start(self, *ids: int) -> None:
        """Make pods; each has a uid of its own."""
        for id in ids:
            self.uids[id] = f"uid-{id}-{time.monotonic_ns()}"
            named = {contract.Env.RENDEZVOUS: "kubernetes://job", contract.Env.NAMESPACE: "default"}
            self.pods.start(id, **named, **{contract.Env.MEMBER: self.uids[id], "KUBECONFIG": str(self.kubeconfig)})

    def stop(self, id: int, kill: Callable[[], None]) -> None:
        kill()
        del self.uids[id]

    def _run(self) -> None:
        while not self.over.wait(0.02):
            heard = {report.id: report for report in self._reports()}
            for id in [id for id in self.state.members if id not in heard]:
                self.state = self.state.gone(id)
            for id, report in heard.items():
                self.standings.add((id, report.standing))
                standing = MemberState(report.standing)
                self.state = self.state.reported(
                    world.Member(id, report.address, standing, report.generation, time.time(), report.failed)
                )
            decision = world.decide(self.state, world.Desired(2, (2,), frozenset((0, 1))), STARTS_AGAIN, time.time())
            self.state = self.state.after(decision)
            if isinstance(decision, world.World):
                self.worlds.append(decision)
            if isinstance(decision, world.Closed) and decision.done:
                self.closed = messages.Closed(decision.reason, 0)
            self._publish()

    def _reports(self) -> Iterator[messages.Report]:
        with self.api.lock:
            leases = [d for key, d in self.api.documents.items() if key[0] == "leases.coordination.k8s.io"]
        for lease in leases:
            report = decode(messages.Report, json.loads(lease["metadata"]["annotations"][contract.Annotation.REPORT]))
            if report.run == RUN and self.uids.get(report.id) == lease["spec"]["holderIdentity"]:
                yield report

    def _publish(self) -> None:
        call = self.state.called
        called = messages.Called(call.generation, call.reason, call.planned, call.at + 120) if call else None
        said: dict[str, Any] = {"run": RUN}
        for name, content in (("world", self.state.world), ("called", called), ("closed", self.closed)):
            said[name] = dataclasses.asdict(content) if content else None
        self.api.put({**self.document, "metadata": dict(self.document["metadata"]), "status": {"rendezvous": said}})


@pytest.fixture
def operated(machine) -> Iterator[Callable[..., Any]]:
    """Makes an operator over the pods of one job; each has an API server of its own, so it knows nothing of those before."""
    pods = Pods(machine.directory, machine.job(args=ARGS))

    @contextmanager
    def make() -> Iterator[Operator]:
        api = apiserver.ApiServer(unserved=())
        with apiserver.serving(api) as url:
            operator = Operator(api, pods, apiserver.kubeconfig(machine.directory / "kubeconfig", url))
            operator.thread.start()
            try:
                yield operator
            finally:
                operator.over.set()
                operator.thread.join()

    yield make
    for index in list(pods.running):
        if pods.running[index].poll() is None:
            pods.kill(index)


def all_steps(pods: Pods) -> None:
    """Every step was trained, and nothing after the last."""
    assert pods.final()["step"] == 100
    steps = [json.loads(line)["step"] for line in (pods.output / contract.METRICS).read_text().splitlines()]
    assert sorted(set(steps)) == list(range(1, 101))


@pytest.mark.slow
def test_training_outlasts_the_api_server_and_a_worker_that_is_killed_and_comes_back_as_another_pod(operated):
    with operated() as operator:
        pods = operator.pods
        operator.start(0, 1)
        pods.wait(lambda: pods.step() >= 5, "step 5")
        operator.api.well = False
        operator.api.cut()
        pods.wait(lambda: pods.step() >= 25, "step 25 without an API server")
        operator.api.well = True
        operator.stop(1, lambda: pods.kill(1))
        operator.start(1)
        assert pods.codes() == {0: 0, 1: 0}
        assert [each.members for each in operator.worlds] == [(0, 1), (0, 1)]
        all_steps(pods)
        record = pods.record()
        assert (record.state, record.exit_code, record.reason) == ("Succeeded", 0, "workers 0 and 1 are done")
        operator.start(1)
        assert pods.running[1].wait(60) == 0
        assert "has ended before (Succeeded: workers 0 and 1 are done); nothing is left to do" in pods.log(1)


@pytest.mark.slow
def test_the_end_that_the_operator_says_ends_all_agents_and_is_recorded_by_whoever_is_there(operated):
    with operated() as operator:
        pods = operator.pods
        operator.start(0, 1)
        pods.wait(lambda: pods.step() >= 5, "step 5")
        operator.stop(0, lambda: pods.kill(0))  # rank 0
        operator.closed = messages.Closed("restarts.limit is used up", contract.Exit.GIVEN_UP)
        assert pods.codes(hurry=False) == {1: contract.Exit.GIVEN_UP}
        record = pods.record()
        assert (record.state, record.reason, record.exit_code) == ("Failed", "restarts.limit is used up", contract.Exit.GIVEN_UP)
        assert pods.log(1).count("outlast | restarts.limit is used up\n") == 1
        assert pods.log(1).endswith("outlast | worker 1: the job is given up (exit 79)\n")


@pytest.mark.slow
def test_pods_that_are_told_to_go_save_and_an_operator_that_knows_nothing_goes_on_beyond_them(operated):
    with operated() as operator:
        pods = operator.pods
        operator.start(0, 1)
        pods.wait(lambda: pods.step() >= 25, "step 25")
        for id in (0, 1):
            pods.running[id].terminate()
        assert pods.codes(hurry=False) == {0: contract.Exit.INTERRUPTED, 1: contract.Exit.INTERRUPTED}
        assert {(0, "leaving"), (1, "leaving")} <= operator.standings
        assert pods.record().state == "Running"
        generation = operator.worlds[-1].generation
    with operated() as operator:
        operator.start(0, 1)
        assert pods.codes() == {0: 0, 1: 0}
        assert [each.generation > generation for each in operator.worlds] == [True]
    all_steps(pods)
