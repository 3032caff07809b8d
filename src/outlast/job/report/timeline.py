"""A job's timeline: folds the ledger's events, in order, into spans of time, each with an owner. Called only by `report.goodput`.

An event may be missing because its writer was killed, or it may come from a replaced generation or a slightly wrong clock.
Whatever happens, each instant between the first event and the end has exactly one owner. A step owns the time since the previous
step. If the step is kept, this time counts as training, except for stalls. If a restore or a failure undoes the step, it counts
as replayed. All other time goes into the bucket for the job's phase. See `docs/decisions/0004-goodput.md`.
"""

from __future__ import annotations

import dataclasses

from outlast.job.ledger import Event
from outlast.job.report import incidents
from outlast.job.report.incidents import Incident, Lost
from outlast.job.report.ledger_events import Survey, microseconds
from outlast.job.report.steps import WAITING, Bucket, Durations, Step

_HELD = {"Suspended": Bucket.SUSPENDED, "Queued": Bucket.QUEUE}
"""Buckets for a stopped job, keyed by its state: suspended by its user, or queued again because its queue withdrew the quota."""
_SPANS = 1 << 16


@dataclasses.dataclass(frozen=True, slots=True)
class Snapshots:
    """Snapshot interval and size, as last reported."""

    every: int
    bytes: int = 0
    """Total size of all ranks' parts in bytes, as reported by rank 0."""
    replicas: int = 0
    reason: str = ""


class Timeline:
    """Folds events, in order, into spans of time. A span's owner is a bucket, or a step, which gets its bucket later."""

    def __init__(self, start: int, survey: Survey) -> None:
        self.spans: list[tuple[int, int, Bucket | Step]] = []
        self.kept: list[Step] = []
        self.steps_executed = self.steps_kept = 0
        self.durations = Durations()
        self._full = _SPANS
        self.incidents: list[Incident] = []
        self.seen = start  # time of the newest event
        self.finished: str | None = None
        self.worlds = self.failures = self.restarts = self.interruptions = self.hangs = self.saves = self.saves_failed = 0
        self._last_steps, self._blind = survey.last_steps, survey.blind
        self._since = start
        self._phase = Bucket.QUEUE
        self._after_save = Bucket.TRAINING
        self._step: Step | None = None  # running; owns the time spent in phase TRAINING
        self._last_step = start
        self._durable = start
        self._generation = -1
        self._life = 0  # incremented at every start of the training processes, and at every restore
        self._members: frozenset[int | None] | None = None
        self._broken = False
        self._why = ""  # why the current world is to join a planned rendezvous
        self._next = Bucket.RENDEZVOUS  # bucket after the current world
        self._early: Event | None = None  # a newer world, formed before the last step of the current one
        self._launchers = 0
        self._open: list[Incident] = []  # incidents that training has not recovered from
        self.snapshots: Snapshots | None = None
        self._announced = self._begun = 0  # latest attempts of the current world: announced, and with a session
        self._progress: int | None = None  # end of the last step of the current processes
        self._fault: int | None = None  # time of a fault after that step, if known
        self._noticed: int | None = None  # time of the first report of that fault
        self._lost: Lost | None = None  # the loss while training stands still
        self._cut_short: Step | None = None  # the step that the latest failure ended

    def feed(self, t: int, event: Event) -> None:
        """Process the next event; `t` never decreases."""
        getattr(self, "_on_" + event["kind"])(t, event)
        self.seen = t

    def stop(self, now: int) -> None:
        """Extend the current span to now, unless the job has ended."""
        if self.finished is None:
            self._cut(now)

    # Moving along the timeline

    def _cut(self, t: int) -> None:
        if t <= self._since:
            return
        owner: Bucket | Step = self._phase
        if self._phase is Bucket.TRAINING and self._step is not None:
            owner = self._step
            self._step.us += t - self._since
            self._step.pieces += 1
        if self._lost is not None:
            self._lost.spend(self._phase, t - self._since)
        self.spans.append((self._since, t, owner))
        self._since = t
        if len(self.spans) > self._full:
            self._join()

    def _join(self) -> None:
        """Join consecutive steps, except in the latest quarter of the spans, where a restore may roll steps back."""
        old = len(self.spans) * 3 // 4
        joined, gone = self.spans[:1], set()
        for start, end, owner in self.spans[1:old]:
            last = joined[-1][2]
            if isinstance(last, Step) and isinstance(owner, Step) and last.join(owner):
                joined[-1] = joined[-1][0], end, last
                gone.add(id(owner))
            else:
                joined.append((start, end, owner))
        self.kept = [step for step in self.kept if id(step) not in gone]
        self.spans = joined + self.spans[old:]
        self._full = max(_SPANS, len(self.spans) * 3 // 2)

    def _enter(self, phase: Bucket, t: int) -> None:
        self._cut(t)
        self._phase = phase

    def _drop(self, fate: Bucket, t: int) -> None:
        """Drop the current step, which will never end. Its time goes into the bucket `fate`."""
        self._cut(t)
        if self._step is not None:
            self._step.bucket = fate
            self._cut_short = self._step if fate in (Bucket.REPLAYED, Bucket.HANG) else None
            self._step = None

    def _intact(self, t: int) -> bool:
        """Return whether the current world completes more steps later. If so, it is intact, whatever was reported."""
        return t < self._last_steps.get((self._generation, self._begun), t)

    def _end_world(self, fate: Bucket, t: int) -> None:
        """End training in the current world, now or after its last step."""
        if self._intact(t):
            self._broken = True
        elif self._phase not in WAITING:
            self._stop(fate, t)
            self._phase = self._next

    def _stop(self, fate: Bucket, t: int) -> None:
        """Record that training has stopped and is losing time."""
        if self._lost is not None or self._blind:
            self._drop(fate, t)
            return
        planned = fate not in (Bucket.REPLAYED, Bucket.HANG)
        noticed = t if self._noticed is None else self._noticed
        self._drop(fate, t)
        self._lost = Lost() if planned else incidents.stopped(progress=self._progress, fault=self._fault, noticed=noticed, at=t)
        unpriced = next((incident for incident in reversed(self._open) if incident.lost is None), None)
        if unpriced is not None:
            unpriced.lost = self._lost

    def _form(self, generation: int, t: int) -> None:
        self._drop(Bucket.RENDEZVOUS, t)
        self.restarts += any(incident.kind in ("failure", "hang") for incident in self._open)
        self.worlds += 1
        self._generation = generation
        self._members = None
        self._announced = self._begun = 0
        self._start_processes()
        if self._blind:
            self._phase = Bucket.TRAINING
            self._recovered(t)

    def _start_processes(self) -> None:
        self._broken, self._why, self._next = False, "", Bucket.RENDEZVOUS
        self._progress = self._fault = self._noticed = None
        self._life += 1
        self._phase = Bucket.STARTUP

    def _current(self, event: Event, t: int) -> bool:
        """Return whether a training event belongs to the current world. An event from a newer world proves that the newer one has
        formed."""
        generation = event.get("generation", max(0, self._generation))
        if generation > self._generation:
            self._form(generation, t)
        return bool(generation == self._generation)

    def _concerns(self, event: Event) -> bool:
        """Return whether an event from the launcher or an agent may be about a member of the current world."""
        generation, worker = event.get("generation"), event.get("worker")
        late = generation is not None and generation < self._generation
        return not late and (self._members is None or worker is None or worker in self._members)

    def _roll_back(self, step: int) -> None:
        """Record that the results of all steps after `step` are lost."""
        before, again_us = self.steps_kept, 0
        while self.kept and self.kept[-1].number > step:
            last = self.kept[-1]
            if last.before < step:  # of several steps, the first ones are kept; all are assumed to be equally long
                stays, of = step - last.before, last.number - last.before
                whole = last.us if last.kept_us < 0 else last.kept_us
                last.kept_us = whole * stays // of
                last.waited_us, last.copied_us = last.waited_us * stays // of, last.copied_us * stays // of
                again_us += whole - last.kept_us
                left = max(1, last.count * stays // of)
                self.steps_kept -= last.count - left
                last.number, last.count = step, left
                break
            self.kept.pop().bucket = Bucket.REPLAYED
            self.steps_kept -= last.count
            again_us += self._ordinary(last)
        if self._open:
            self._open[0].replayed += before - self.steps_kept
            if (lost := self._open[0].lost) is not None:
                lost.again_us += again_us

    def _keep(self, step: Step) -> None:
        self.kept.append(step)
        self.steps_executed += step.count
        self.steps_kept += step.count

    def _ordinary(self, step: Step) -> int:
        """Return the time of these steps in microseconds, without the extra time of a first step."""
        usual = self.durations.median() if step.first else None
        return step.us if usual is None else min(step.us, step.waited_us + step.copied_us + round(usual * max(1, step.count)))

    def _keep_unreported(self, step: int) -> None:
        """Keep completed steps that are missing from the ledger: those between the last step in the ledger and a newer restored
        state."""
        done, last = self._cut_short, self.kept[-1].number if self.kept else 0
        if done is None or self._lost is None or step <= last:
            return
        usual = self.durations.median()
        done.kept_us = done.us if usual is None else min(done.us, round(usual * (step - last)))
        done.bucket, done.before, done.number, done.count, done.life = Bucket.TRAINING, last, step, step - last, self._life
        self._keep(done)
        (next((i.lost for i in self._open if i.lost is not None), None) or self._lost).recover(done.kept_us)

    def _recovered(self, t: int) -> None:
        """Close the incidents of older worlds, because training continues in a newer world."""
        for incident in self._open:
            if (incident.generation, incident.attempt) < (self._generation, self._begun):
                incident.recovery_s = t / 1e6 - incident.time
        self._open = [incident for incident in self._open if incident.recovery_s is None]

    def _incident(self, t: int, kind: str, text: str, event: Event, *, stops: bool) -> None:
        cause = incidents.cause(kind, event)
        incident = Incident(t / 1e6, kind, text, event.get("worker"), self._generation, attempt=self._announced, cause=cause)
        self.incidents.append(incident)
        if not stops:
            return
        if self._lost is not None:
            if all(other.lost is not self._lost for other in self._open):
                incident.lost = self._lost
            elif kind in incidents.FAILURES:  # another failure before recovery: from now on, the loss is its own
                self._cut(t)
                incident.lost = self._lost = Lost()
        self._open.append(incident)

    def _cause(self) -> Incident | None:
        """Return the incident that ended the current world, if known. Later reports are consequences of this incident."""
        present = self._generation, self._announced
        return next((incident for incident in self._open if (incident.generation, incident.attempt) == present >= (0, 0)), None)

    def _close_planned(self) -> None:
        """Close incidents other than failures. A planned stop needs no recovery, so the time after it is not lost."""
        self._open = [incident for incident in self._open if incident.kind in incidents.FAILURES]
        if all(incident.lost is not self._lost for incident in self._open):
            self._lost = None

    # Events from the launcher

    def _on_resumed(self, t: int, event: Event) -> None:
        self._close_planned()
        self._relaunched(t, event)

    def _on_launcher(self, t: int, event: Event) -> None:
        self._launchers += 1
        if self._launchers == 1:
            self._wake(Bucket.QUEUE, t)
        elif event.get("adopted") and self._phase not in WAITING:
            self._incident(t, "launcher", "the launcher was started again; training went on meanwhile", event, stops=False)
        else:
            self._relaunched(t, event)

    def _relaunched(self, t: int, event: Event) -> None:
        """Record that the job has a launcher again. Unless the job had ended, it has had no processes since the last event."""
        if self._phase not in WAITING and not self._intact(t):
            self._incident(self.seen, "launcher", "the launcher and its workers were gone", event, stops=True)
            self._stop(Bucket.REPLAYED, self.seen)
            self._phase = Bucket.IDLE
        self._wake(Bucket.QUEUE, t)

    _on_submitted = _relaunched

    def _on_asked(self, t: int, event: Event) -> None:
        if self._phase is Bucket.QUEUE:
            self._enter(Bucket.PODS, t)

    def _on_worker(self, t: int, event: Event) -> None:
        self._wake(Bucket.STARTUP, t)
        if self._phase in (Bucket.QUEUE, Bucket.PODS):
            self._enter(Bucket.STARTUP, t)

    def _wake(self, phase: Bucket, t: int) -> None:
        self.finished, self._next = None, Bucket.RENDEZVOUS
        if self._phase in (Bucket.IDLE, Bucket.SUSPENDED):
            self._enter(phase, t)

    def _on_called(self, t: int, event: Event) -> None:
        reason = event.get("reason") or "the world was called together again"
        if event["generation"] <= self._generation:
            return
        self._next = _HELD.get(event.get("suspends", ""), Bucket.RENDEZVOUS)
        if event.get("planned") and not self._blind and self._phase in (Bucket.TRAINING, Bucket.CHECKPOINT):
            self._why = reason
            return  # training saves first, and then reports `interrupted`
        if not event.get("planned"):
            if not self._unheard_failed(self._cause(), reason, event) and all(
                i.generation != self._generation for i in self._open
            ):
                self._incident(t, "failure", reason, event, stops=True)
            self._end_world(Bucket.REPLAYED, t)
        else:
            if self._generation >= 0 and self._cause() is None:
                self._incident(t, "change", reason, event, stops=True)
            self._end_world(Bucket.RENDEZVOUS, t)

    def _on_world(self, t: int, event: Event) -> None:
        generation = event["generation"]
        if generation > self._generation and self._intact(t):  # the coordinator's clock is behind
            self._early = event
        elif generation > self._generation:
            self._form(generation, t)
        if generation == self._generation:
            self._members = frozenset(event["workers"]) if "workers" in event else None

    def _on_failure(self, t: int, event: Event) -> None:
        counted = event.get("counted") is not False
        self.failures += counted
        reason = event.get("reason") or f"worker {event.get('worker')} failed"
        if event.get("repaired") is not None:
            return  # counted late: the members repaired the world themselves, as `attempt` reported
        concerns = self._concerns(event)
        cause = self._cause() if concerns else self._unexplained(event.get("generation"))
        if cause is None:
            self._incident(t, "failure" if counted else "interruption", reason, event, stops=concerns)
        elif not self._unheard_failed(cause, reason, event) and cause.kind == "failure" and cause.worker is None:
            # so far, only the resulting rendezvous was known
            cause.text, cause.worker, cause.cause = reason, event.get("worker"), incidents.cause("failure", event)
        if concerns:
            self._end_world(Bucket.REPLAYED, t)

    def _unexplained(self, generation: int | None) -> Incident | None:
        """Return the incident that ended an earlier world, if only the resulting rendezvous is known so far."""
        found = (i for i in reversed(self.incidents) if i.generation == generation and i.kind == "failure" and i.worker is None)
        return next(found, None)

    def _unheard_failed(self, cause: Incident | None, reason: str, event: Event) -> bool:
        """Turn an incident about an unreachable peer into a failure with this reason. Returns False for any other `cause`."""
        if cause is None or cause.kind != "unheard":
            return False
        cause.kind, cause.text, cause.cause = "failure", reason, incidents.cause("failure", event)
        cause.worker = event.get("worker", cause.worker)
        return True

    def _on_exited(self, t: int, event: Event) -> None:
        if self._members and event["worker"] in self._members and (event["interrupted"] or event["code"] != 0):
            self._end_world(Bucket.CHECKPOINT if event["interrupted"] else Bucket.REPLAYED, t)

    def _on_finished(self, t: int, event: Event) -> None:
        self.finished = str(event["state"])
        self._cut(t)
        if self._step is not None and self.finished == "Succeeded":
            for i in range(len(self.spans) - 1, -1, -1):  # after the last step: the last save, then leaving
                start, end, owner = self.spans[i]
                if start < self._last_step:
                    break
                if owner is self._step:
                    self.spans[i] = start, end, Bucket.CHECKPOINT if end <= self._durable else Bucket.STARTUP
        self._drop(Bucket.REPLAYED, t)
        self._phase = _HELD.get(self.finished, Bucket.IDLE)
        if self._phase is Bucket.QUEUE:
            self.finished = None
        self._close_planned()

    # Events from agents

    def _on_hang(self, t: int, event: Event) -> None:
        self.hangs += 1
        since, concerns = t - microseconds(event["silent_s"]), self._concerns(event)
        if concerns and self._fault is None:
            self._fault = since
        if not concerns or self._cause() is None:
            text = f"rank {event['rank']} on worker {event['worker']} {event['reason']}"
            self._incident(t, "hang", text, event, stops=concerns)
        if concerns and not self._intact(t) and self._phase not in (*WAITING, Bucket.RENDEZVOUS):
            if self._step is None:
                self._cut(max(self._since, since))
            self._phase = Bucket.HANG if self._step is None else Bucket.TRAINING
            self._end_world(Bucket.HANG, t)

    def _on_unheard(self, t: int, event: Event) -> None:
        of = {**event, "worker": event["workers"][0]}
        if self._generation < 0 or not self._concerns(of) or self._phase in (*WAITING, Bucket.RENDEZVOUS):
            return
        self._noticed = t if self._noticed is None else self._noticed
        if self._cause() is None:
            self._incident(t, "unheard", event["reason"], of, stops=not self._intact(t))

    def _on_attempt(self, t: int, event: Event) -> None:
        number, reason = event["attempt"], event["reason"]
        if not self._current(event, t) or number <= self._announced:
            return
        cause = self._cause()
        if cause is None:
            self._incident(t, "failure", reason, event, stops=True)
        else:
            self._unheard_failed(cause, reason, event)
        self._end_world(Bucket.REPLAYED, t)
        self._announced = number
        if self._blind:  # no session reports the start of its processes
            self._begun, self._phase = number, Bucket.TRAINING
            self.restarts += 1
            self._recovered(t)

    def _on_chaos(self, t: int, event: Event) -> None:
        self._fault = t if self._fault is None else self._fault

    # Events from training

    def _on_snapshots(self, t: int, event: Event) -> None:
        if self._current(event, t):
            self.snapshots = Snapshots(event["every"], event["bytes"], event["replicas"], event["reason"])

    def _on_session(self, t: int, event: Event) -> None:
        if event.get("rank") not in (0, None) or not self._current(event, t):
            return
        if self._announced > self._begun:
            self._drop(Bucket.RENDEZVOUS, t)
            self._begun = self._announced
            self.restarts += 1
            self._start_processes()
        elif self._phase in (Bucket.TRAINING, Bucket.CHECKPOINT, Bucket.RESTORE):
            self._drop(Bucket.RENDEZVOUS, t)  # plain torchrun restarts in the same generation
            self._phase = Bucket.STARTUP
            self._life += 1
        if self._phase is Bucket.STARTUP:
            self._cut(t)  # the first step may begin here

    def _on_restoring(self, t: int, event: Event) -> None:
        if self._current(event, t) and self._phase in (Bucket.STARTUP, Bucket.TRAINING):
            self._drop(Bucket.STARTUP, t)
            self._phase = Bucket.RESTORE

    def _on_restored(self, t: int, event: Event) -> None:
        if not self._current(event, t):
            return
        self._life += 1
        self._keep_unreported(event["step"])
        self._roll_back(event["step"])
        if self._lost is not None:
            source = event.get("source", "")  # in events without this field, `source` names the event's writer
            self._lost.source = source if source in incidents.SOURCES else ""
        if self._phase in (Bucket.STARTUP, Bucket.RESTORE, Bucket.TRAINING):
            self._drop(Bucket.STARTUP, t)
            self._phase = Bucket.TRAINING
            self._step = Step(first=True)

    def _on_step(self, t: int, event: Event) -> None:
        if not self._current(event, t):
            return
        if self._phase is Bucket.STARTUP:
            self._phase = Bucket.TRAINING
            self._step = Step(first=True)
        self._cut(t)
        step = self._step or Step(first=True)
        self._step, self._phase, self._last_step = Step(), Bucket.TRAINING, t
        step.count, step.number, step.life = event.get("steps", 1), event["step"], self._life
        step.before = step.number - step.count
        step.waited_us = min(step.us, microseconds(event.get("waited_s", 0.0)))
        step.copied_us = min(step.us - step.waited_us, microseconds(event.get("copied_s", 0.0)))
        self._roll_back(step.before)
        self._keep(step)
        if not step.first:
            self.durations.add(step.us, step.count)
        self._progressed(step, t)
        self._recovered(t)
        if self._broken and not self._intact(t):
            self._broken = False
            self._end_world(Bucket.REPLAYED, t)
        if self._early is not None and not self._intact(t):
            early, self._early = self._early, None
            self._on_world(t, early)

    def _progressed(self, step: Step, t: int) -> None:
        """Record the end of a step: no more time is lost, and unreachable peers are back."""
        if self._lost is not None:
            self._lost.ordinary(self._ordinary(step))
            self._lost = None
        self._progress, self._fault, self._noticed, self._cut_short = t, None, None, None
        self._open = [incident for incident in self._open if incident.kind != "unheard"]

    def _on_saving(self, t: int, event: Event) -> None:
        if self._phase is Bucket.STARTUP or (self._phase is Bucket.TRAINING and self._step is not None):
            self._after_save = self._phase
            self._enter(Bucket.CHECKPOINT, t)

    def _on_staged(self, t: int, event: Event) -> None:
        if self._phase is Bucket.CHECKPOINT:
            self._enter(self._after_save, t)
            self._progress = t if self._progress is not None else None  # the stall belongs to the checkpoint

    def _on_committed(self, t: int, event: Event) -> None:
        self.saves += 1
        self._durable = t
        self._cut(t)

    def _on_save_failed(self, t: int, event: Event) -> None:
        self.saves_failed += 1
        self._checkpoint_incident(t, "save", f"step {event['step']} could not be saved", event)

    def _on_not_copied(self, t: int, event: Event) -> None:
        self._checkpoint_incident(t, "save", f"step {event['step']} was saved, but not on every disk", event)

    def _on_damaged(self, t: int, event: Event) -> None:
        name = event["path"].rsplit("/", 1)[-1]
        self._checkpoint_incident(t, "damaged", f"{name} is damaged and was skipped", event)

    def _on_slow(self, t: int, event: Event) -> None:
        self._incident(t, event["kind"], event["reason"], event, stops=False)

    _on_differs = _on_slow

    def _checkpoint_incident(self, t: int, kind: str, text: str, event: Event) -> None:
        self._incident(t, kind, f"{text}: {event['reason']}", event, stops=False)

    def _on_interrupted(self, t: int, event: Event) -> None:
        self.interruptions += 1
        late = (event.get("generation") or self._generation) < self._generation
        stops = self._phase not in (*WAITING, Bucket.RENDEZVOUS) and not late
        reason = event.get("reason") or "told to leave"
        self._incident(t, "interruption", f"{self._why}; {reason}" if self._why else reason, event, stops=stops)
        if stops:
            self._end_world(Bucket.CHECKPOINT, t)
