"""What may happen to any job in the simulated cluster, as rules for Hypothesis; whatever does, the job is to settle."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from simulated import Cluster

MOST = 4
WORKER = st.integers(0, MOST - 1)


class Settling(RuleBasedStateMachine):
    cluster: Cluster
    wanted: int
    """How many workers the user wants."""
    least = 1
    failures = 0
    """How many failures may be counted at most."""

    def pod(self, index: int) -> dict[str, Any] | None:
        return self.cluster.documents.get(("Pod", f"train-worker-{index}"))

    @rule(seconds=st.integers(1, 40))
    def time_passes(self, seconds: int) -> None:
        self.cluster.run(seconds)

    @rule(writes=st.integers(0, 6), times=st.integers(1, 5))
    def the_operator_dies(self, writes: int, times: int) -> None:
        self.cluster.operator_dies(writes, times)

    @rule()
    def looking_alone_comes_to_an_end(self) -> None:
        for _ in range(4):  # what is deleted or made is seen once more
            before = len(self.cluster.writes)
            self.cluster.look()
        assert len(self.cluster.writes) == before, self.cluster.writes[before:]

    @rule(index=WORKER, code=st.sampled_from([1, 75, 137, 143]))
    def a_container_ends(self, index: int, code: int) -> None:
        if (pod := self.pod(index)) and pod["status"]["phase"] == "Running":
            self.failures += 1
            self.cluster.end(pod, code)

    @rule(replicas=st.integers(1, MOST))
    def another_number_is_wanted(self, replicas: int) -> None:
        self.wanted = max(self.least, replicas)
        self.cluster.change(replicas=self.wanted)

    @rule(suspend=st.booleans())
    def it_is_suspended_or_resumed(self, suspend: bool) -> None:
        self.cluster.change(suspend=suspend)


def play(machine: type[Settling], *, share: float, steps: int) -> None:
    """Try a share of the usual number of examples, each of so many steps."""
    examples = int(settings.default.max_examples * share)  # type: ignore[union-attr]
    chaos = settings(max_examples=examples, stateful_step_count=steps, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(machine, settings=chaos)
