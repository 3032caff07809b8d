"""Whatever happens to pods, nodes, agents, wishes and the operator itself: the job settles, and trains every step to the last."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

import settling
from outlast.kubernetes.api import kinds
from settling import MOST, WORKER, Settling
from simulated import Cluster, trains


class Chaos(Settling):
    @initialize(replicas=st.integers(1, MOST), mesh=st.booleans())
    def begin(self, replicas: int, mesh: bool) -> None:
        self.cluster = Cluster({"replicas": replicas, "min": 1, "max": MOST}, steps=600, restarts={"limit": 1000})
        self.cluster.mesh = mesh
        self.wanted = replicas

    @rule(seconds=st.integers(1, 20))
    def nobody_decides(self, seconds: int) -> None:
        for _ in range(seconds):
            self.cluster.pass_()

    @rule(index=WORKER, code=st.sampled_from([1, 137, 139]))
    def a_process_fails(self, index: int, code: int) -> None:
        self.failures += 1
        self.cluster.fail(index, code=code)

    @rule(index=WORKER)
    def a_pod_is_evicted(self, index: int) -> None:
        if (pod := self.pod(index)) and pod["status"]["phase"] == "Running":
            self.failures += 1  # what the others say of it may be heard first
            self.cluster.end(pod, 143, disrupted="EvictionByEvictionAPI")

    @rule(index=WORKER, grace=st.sampled_from([None, 0]))
    def a_pod_is_deleted(self, index: int, grace: int | None) -> None:
        if pod := self.pod(index):
            self.failures += grace == 0
            self.cluster.delete(kinds.POD, pod["metadata"]["name"], pod["metadata"]["uid"], grace)

    @rule(index=WORKER)
    def a_worker_stands_still(self, index: int) -> None:
        if agent := self.cluster.agent_of(index):
            self.failures += 2
            agent.frozen = True

    @rule(node=st.integers(0, 5))
    def a_node_is_lost(self, node: int) -> None:
        well = {n["metadata"]["name"] for n in self.cluster.all("Node") if not n["spec"].get("taints")} - self.cluster.lost.keys()
        if len(well) > 2 and f"node-{node}" in well:
            self.failures += 2
            self.cluster.lose(f"node-{node}")

    @rule(seconds=st.integers(1, 60))
    def its_document_cannot_be_read(self, seconds: int) -> None:
        if not self.cluster.status:
            return  # such a job has failed before it began
        self.cluster.change()
        self.cluster.unreadable = True
        pods = {pod["metadata"]["uid"] for pod in self.cluster.alive()}
        self.cluster.look()
        assert {pod["metadata"]["uid"] for pod in self.cluster.alive()} == pods
        self.cluster.run(seconds)
        self.cluster.change()
        self.cluster.unreadable = False

    @rule(seconds=st.integers(20, 90))
    def the_api_server_is_away(self, seconds: int) -> None:
        self.cluster.reached = False
        for _ in range(seconds):
            self.cluster.pass_()
        self.cluster.reached, self.cluster.since = True, self.cluster.now

    @rule(seconds=st.integers(20, 120))
    def no_agent_reaches_the_api_server(self, seconds: int) -> None:
        self.cluster.reached = False
        self.cluster.run(seconds)
        self.cluster.reached = True

    @rule(nodes=st.sets(st.integers(0, 5), min_size=1, max_size=4), seconds=st.integers(1, 60))
    def nodes_do_not_hear_the_others(self, nodes: set[int], seconds: int) -> None:
        self.failures += 1
        cut, others = nodes, set(range(6)) - nodes
        self.cluster.broken = {frozenset((f"node-{one}", f"node-{other}")) for one in cut for other in others}
        self.cluster.run(seconds)
        self.cluster.broken = set()

    @rule(index=WORKER, of=st.sets(WORKER, max_size=3), seconds=st.integers(1, 30))
    def a_worker_errs_about_others(self, index: int, of: set[int], seconds: int) -> None:
        self.failures += 1
        self.cluster.lies = {index: of - {index}}
        self.cluster.run(seconds)
        self.cluster.lies = {}

    @rule(nodes=st.sets(st.integers(0, 5), min_size=1, max_size=4), seconds=st.integers(20, 120))
    def a_group_of_nodes_is_cut_off(self, nodes: set[int], seconds: int) -> None:
        self.failures += 1
        self.cluster.cut = {f"node-{node}" for node in nodes}
        self.cluster.run(seconds)
        self.cluster.cut = set()

    @rule(seconds=st.sampled_from([-3600, -40, 40, 3600]))
    def the_operators_clock_is_set(self, seconds: int) -> None:
        uids = {pod["metadata"]["uid"] for pod in self.cluster.alive()}
        self.cluster.set_by += seconds
        plan = self.cluster.look()
        assert not [each for each in plan.deletes if each.uid in uids and "said nothing" in each.reason]

    @rule(seconds=st.sampled_from([5, 40, 120]), paused=st.booleans())
    def the_operators_machine_sleeps(self, seconds: int, paused: bool) -> None:
        self.cluster.sleep(seconds, paused=paused)

    @rule(seconds=st.sampled_from([-3600, -5, 5, 3600]))
    def the_clock_jumps(self, seconds: int) -> None:
        self.cluster.jump(seconds)

    @invariant()
    def there_are_never_too_many(self) -> None:
        if hasattr(self, "cluster"):
            assert self.cluster.most <= MOST
            generations = [generation for _, generation in self.cluster.trained]
            assert generations == sorted(generations), "two worlds trained at once"
            assert self.cluster.status.get("restarts", 0) <= self.failures

    def teardown(self) -> None:
        if not hasattr(self, "cluster") or not self.cluster.documents:
            return
        cluster = self.cluster
        cluster.change(suspend=False)

        def settled(c: Cluster) -> bool:
            ended = c.status.get("state") in ("Succeeded", "Failed")
            well = len(c.agents) == self.wanted and not any(agent.frozen for agent in c.agents.values())
            return ended or (trains(self.wanted)(c) and well)

        cluster.until(settled, 900)
        if cluster.status["state"] == "Running":
            cluster.run(45)
            made = dict(cluster.made)
            before = len(cluster.writes)
            cluster.run(60)
            assert cluster.made == made
            assert len(set(cluster.writes[before:])) <= 3, cluster.writes[before:]  # the step is told every few seconds
            cluster.until(lambda c: c.status["state"] == "Succeeded", 900)
        assert cluster.status["state"] == "Succeeded", cluster.status["reason"]
        steps = {step for _, step in cluster.done_steps}
        assert steps == set(range(1, cluster.steps + 1))


@pytest.mark.hypothesis
def test_every_situation_settles() -> None:
    settling.play(Chaos, share=0.15, steps=20)
