"""Jobs that are each killed three times by chance: whichever process it hits, the weights are those of the undisturbed run.

Ten of them; OUTLAST_TEST_SCHEDULES=30 for more.
"""

from __future__ import annotations

import contextlib
import os
import random

import psutil
import pytest

from outlast.job.status import JobStatus, State

ARGS = ("--steps=100", "--pause=0.04", "--gate")


def victims(status: JobStatus, rng: random.Random) -> list[int]:
    """Process ids to kill together: any process of a worker, a whole worker, all workers, or the launcher."""
    workers = [w for w in status.workers if w.pid]
    if not workers:
        return []
    worker = rng.choice(workers)
    match rng.choice(["rank", "any", "any", "worker", "all workers", "launcher", "everything at once"]):
        case "rank":
            return [rank.pid for rank in worker.ranks[:1] if rank.pid]
        case "any":  # agent, warm process, store, training process
            agent = psutil.Process(worker.pid)
            return [rng.choice([agent, *agent.children(recursive=True)]).pid]
        case "worker":
            return [w for w in [worker.pid] if w]
        case "all workers":
            return [w.pid for w in workers if w.pid]
        case "launcher":
            return [pid for pid in [status.launcher] if pid]
        case _:
            return [pid for pid in [status.launcher, *(w.pid for w in workers)] if pid]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(int(os.environ.get("OUTLAST_TEST_SCHEDULES", "10"))))
def test_a_random_schedule_of_kills_changes_nothing_in_the_result(machine, undisturbed, seed: int):
    rng = random.Random(seed)
    workers = rng.choice([1, 2, 2, 3])
    path = machine.job(args=ARGS, workers={"replicas": workers}, restarts={"limit": 20})
    name = machine.submit(path)
    killed = 0
    for step in sorted(rng.sample(range(3, 95), 3)):
        status = machine.wait(name, lambda s, at=step: s.step >= at or s.state is State.INTERRUPTED)
        if status.state is State.INTERRUPTED:  # everything was killed at once: the user runs it again
            machine.submit(path)
            status = machine.wait(name, lambda s, at=step: s.step >= at)
        with contextlib.suppress(psutil.NoSuchProcess):
            for pid in victims(status, rng):
                with contextlib.suppress(psutil.NoSuchProcess):
                    psutil.Process(pid).kill()
                    killed += 1
    (machine.backend.output(name) / "hurry").touch()
    status = machine.wait(name, lambda s: s.finished is not None or s.state is State.INTERRUPTED)
    if status.state is State.INTERRUPTED:
        machine.submit(path)
        status = machine.end(name)
    assert status.state is State.SUCCEEDED, (machine.directory / "state/jobs/job/launcher.log").read_text()
    assert machine.final(name) == undisturbed(ARGS, workers)
    assert killed >= 1, "a strike may find its victim dead already, but not all three"
