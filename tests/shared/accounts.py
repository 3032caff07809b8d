"""Ledgers of simulated runs, event by event."""

from __future__ import annotations

from outlast.job.report import goodput

KILLED = "rank 1 on worker 1 was killed by SIGKILL; restart 1 of 10"


class Story:
    """Builder of a ledger: `at` is the current second, and every method advances it and writes the events of the processes."""

    def __init__(self, at: float = 0.0) -> None:
        self.at = at
        self.generation = 0
        self.step = 0
        self.events: list[dict] = []

    def say(self, kind: str, after: float = 0.0, **fields: object) -> Story:
        self.at = round(self.at + after, 6)
        self.events.append({"t": self.at, "kind": kind, "source": "story", **fields})
        return self

    def submitted(self) -> Story:
        self.say("submitted", run="r", job="j").say("launcher", pid=1, adopted=0)
        return self.say("worker", 1, worker=0).say("worker", worker=1)

    def world(self, after: float = 0.0, workers: tuple[int, ...] = (0, 1)) -> Story:
        self.generation += 1
        return self.say("world", after, generation=self.generation, workers=list(workers), reason="all here")

    def session(self, after: float = 0.0) -> Story:
        for rank in (1, 0):
            self.say("session", after if rank else 0, generation=self.generation, rank=rank, world_size=2)
        return self

    def restored(self, step: int = 0, after: float = 0.0) -> Story:
        self.step = step
        self.say("restoring", generation=self.generation)
        return self.say("restored", after, generation=self.generation, step=step, path=None)

    def steps(self, count: int, each: float = 1.0, waited: float = 0.0) -> Story:
        for _ in range(count):
            self.step += 1
            self.say("step", each, generation=self.generation, step=self.step, **({"waited_s": waited} if waited else {}))
        return self

    def save(self, stall: float = 0.0, durable: float = 0.0) -> Story:
        self.say("saving", step=self.step).say("staged", stall, step=self.step, stall_s=stall)
        return self.say("committed", durable, step=self.step, path="p", bytes=1, seconds=stall + durable)

    def failure(self, after: float = 0.0, worker: int = 1, reason: str = KILLED) -> Story:
        whose = {"generation": self.generation, "worker": worker, "rank": worker, "code": 137}
        self.say("failure", after, **whose, reason=reason, counted=True)
        return self.say("called", generation=self.generation + 1, reason=f"lost worker {worker}", planned=False)

    def finished(self, after: float = 0.0, state: str = "Succeeded") -> Story:
        return self.say("finished", after, state=state, reason="", step=self.step, code=0)

    def account(self, now: float | None = None) -> goodput.Goodput:
        return goodput.buckets(self.events, self.at if now is None else now)


def training(story: Story | None = None) -> Story:
    """Return the story of a job in its first world, just restored: 1 s queue, 2 s start-up."""
    return (story or Story()).submitted().world(1).session(1).restored()
