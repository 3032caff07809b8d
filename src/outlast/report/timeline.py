"""The timeline of a job: the ledger's events folded, in order, into stretches of time that each have an owner.

Called by `report.goodput` only. No event is trusted: it may be late, repeated, torn, out of order, missing, or from a generation
that was replaced. In every case each instant between the first event and the end has one owner.

A step owns the time from the end of the step before it to its own end. That time is training if the step is kept, but for what
it has waited for data; and replayed if a restore takes it back or a failure cuts it short. All other time has the bucket of the
phase that the job was in. Reasons: `docs/decisions/0004-goodput.md`.

Memory is bounded: neighbouring steps of a long run that are long done are joined (`_join`).
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator

from outlast.ledger import Event


class Bucket(enum.StrEnum):
    """What a stretch of time was spent on."""

    TRAINING = "training"
    """Steps whose result was kept. The share of this in the wall time is the goodput."""
    REPLAYED = "replayed"
    """Steps whose result was lost: taken back by a restore, or cut short by a failure."""
    DATA = "data stall"
    """Steps whose result was kept waited for their data."""
    CHECKPOINT = "checkpoint"
    """Training stood still for a save; a save in the background costs nothing here."""
    RENDEZVOUS = "rendezvous"
    """From the end of a world (failure, interruption, planned change) until the next one was formed."""
    RESTORE = "restore"
    """Reading a checkpoint back."""
    STARTUP = "startup"
    """Starting processes, importing, building the model; the extra time of a first step; exiting at the end."""
    QUEUE = "queue"
    """Submitted (or resumed), before the first worker started."""
    HANG = "hang"
    """From the last step until a hang was noticed."""
    IDLE = "idle"
    """Suspended, interrupted, or without a launcher and workers."""


@dataclasses.dataclass(slots=True)
class Incident:
    """Something that happened to the run."""

    time: float
    kind: str
    """failure | hang | interruption | change | launcher | save | damaged"""
    text: str
    """One sentence, from the process that decided or saw it."""
    worker: int | None = None
    generation: int = -1
    """The world that it ended or happened in."""
    recovery_s: float | None = None
    """Until the next step had ended, or until the next world for a script that reports no steps.
    None: not yet, or training never stopped."""
    replayed: int = 0
    """Steps whose result it cost."""


# Reading the ledger

_REOPENS = ("submitted", "launcher", "resumed", "worker")
_FOREVER = 1e12
Timed = tuple[int, Event]
"""An event and its time in microseconds since the epoch."""


def microseconds(t: float) -> int:
    """Seconds as a whole number of microseconds, the resolution of the ledger."""
    return round(t * 1e6)


def _int(event: Event, field: str) -> int | None:
    value = event.get(field)
    return value if isinstance(value, int) and not isinstance(value, bool) and abs(value) < _FOREVER else None


def _seconds(event: Event, field: str) -> float:
    value = event.get(field)
    return value if isinstance(value, (int, float)) and 0 <= value < _FOREVER else 0.0


def _text(event: Event, field: str, otherwise: str) -> str:
    value = event.get(field)
    return value if isinstance(value, str) and value else otherwise


def usable(event: Event) -> bool:
    """Whether an event has a time and a kind that we know."""
    t, kind = event.get("t"), event.get("kind")
    return isinstance(t, (int, float)) and -_FOREVER < t < _FOREVER and isinstance(kind, str) and hasattr(Timeline, f"_on_{kind}")


def in_order(events: Iterable[Event]) -> Iterator[Timed]:
    """The usable ones of `events`, which come in the order of time, each once: the same words at the same instant are one event.

    What other machines' clocks put after `finished` happened before it, unless the job was taken up again.
    """
    finished: Timed | None = None
    for t, event in _once(events):
        if finished is None:
            if event["kind"] == "finished":
                finished = t, event
            else:
                yield t, event
        elif event["kind"] in _REOPENS:
            yield finished
            yield t, event
            finished = None
        elif event["kind"] != "finished":
            yield finished[0], event
    if finished is not None:
        yield finished


def _once(events: Iterable[Event]) -> Iterator[Timed]:
    now, heard = None, []
    for event in events:
        if not usable(event):
            continue
        t = microseconds(event["t"])
        if t != now:
            now, heard = t, [event]
        elif event in heard:
            continue
        else:
            heard.append(event)
        yield t, event


@dataclasses.dataclass
class Survey:
    """What the fold has to know of all events before it begins."""

    start: int | None = None
    """Time of the first event, microseconds since the epoch; None when there is none."""
    last_steps: dict[int, int] = dataclasses.field(default_factory=dict)
    """When the last step of each generation ended: until then its world was not broken, whatever was reported meanwhile."""
    blind: bool = True
    """Whether the script reports nothing."""


def survey(ordered: Iterable[Timed]) -> Survey:
    """A first pass over all events."""
    found, newest = Survey(), -1
    for t, event in ordered:
        found.start = t if found.start is None else found.start
        kind = event["kind"]
        found.blind = found.blind and kind not in ("session", "step")
        if kind in ("world", "session", "step"):
            generation = _int(event, "generation")
            newest = max(newest, 0 if generation is None else generation)
            if kind == "step" and generation in (newest, None):
                found.last_steps[newest] = t
    return found


# The fold


@dataclasses.dataclass(slots=True)
class Step:
    """One execution of a step, finished or not, or of several that were reported together or joined since."""

    bucket: Bucket = Bucket.TRAINING
    first: bool = False
    """First of its world: its extra time is start-up."""
    before: int = 0
    """Number of the step before the first of these."""
    number: int = 0
    """Of the last of these whose result is kept."""
    count: int = 0
    """How many of them are kept; 0 while it is under way."""
    life: int = 0
    us: int = 0
    waited_us: int = 0
    """What of `us` was waiting for data."""
    kept_us: int = -1
    """What of `us` was for the kept ones, when the later ones were taken back; -1: all."""
    pieces: int = 0
    """Spans that it owns."""

    def join(self, other: Step) -> bool:
        """Take in the step after this one, if nothing tells the two apart."""
        one = (self.bucket, self.life) == (other.bucket, other.life) and self.number == other.before
        whole = self.pieces == other.pieces == 1 and self.kept_us == other.kept_us == -1 and self.count and other.count
        if not one or not whole or self.first or other.first:
            return False
        self.number, self.count = other.number, self.count + other.count
        self.us, self.waited_us = self.us + other.us, self.waited_us + other.waited_us
        return True


_SPANS = 1 << 16
"""Number of spans above which old ones are joined."""
_DIGITS = 1 << 16
"""Most distinct step durations; above, they are rounded to a thousandth."""


class Durations:
    """How long steps took, per step, in bounded memory."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._total = self._number = 0

    def add(self, us: int, count: int) -> None:
        """Add `count` steps that took `us` microseconds together."""
        self._counts[us // count] += count
        self._total, self._number = self._total + us, self._number + count
        if len(self._counts) > _DIGITS:
            rounded: Counter[int] = Counter()
            for each, number in self._counts.items():
                grain = max(1, 1 << (each.bit_length() - 10))
                rounded[each // grain * grain + grain // 2] += number
            self._counts = rounded

    def mean(self) -> float | None:
        """Microseconds; None before the first step."""
        return self._total / self._number if self._number else None

    def median(self) -> float | None:
        """Microseconds; None before the first step."""
        if not self._number:
            return None
        ordered = sorted(self._counts)
        seen = list(itertools.accumulate(self._counts[each] for each in ordered))
        middle = self._number / 2
        return (ordered[bisect.bisect_left(seen, middle)] + ordered[bisect.bisect_right(seen, middle)]) / 2


class Timeline:
    """Folds events, in order, into spans of time with an owner: a bucket, or the step whose fate decides."""

    def __init__(self, start: int, known: Survey) -> None:
        self.spans: list[tuple[int, int, Bucket | Step]] = []
        self.kept: list[Step] = []
        self.steps_executed = self.steps_kept = 0
        self.durations = Durations()
        """Of all steps that were executed but the first of each world."""
        self._full = _SPANS
        self.incidents: list[Incident] = []
        self.seen = start  # time of the newest event
        self.finished: str | None = None
        self.worlds = self.failures = self.restarts = self.interruptions = self.hangs = self.saves = self.saves_failed = 0
        self._last_steps, self._blind = known.last_steps, known.blind
        self._since = start
        self._phase = Bucket.QUEUE
        self._after_save = Bucket.TRAINING
        self._step: Step | None = None  # under way; owns the time spent in phase TRAINING
        self._last_step = start
        self._durable = start
        self._generation = -1
        self._life = 0  # grows with every start of the training processes, and with every restore
        self._members: frozenset[int | None] | None = None
        self._broken = False
        self._why = ""  # the planned call that the present world is to follow
        self._launchers = 0
        self._open: list[Incident] = []  # training has not gone on since

    def feed(self, t: int, event: Event) -> None:
        """Take in the next event; `t` never falls."""
        getattr(self, "_on_" + event["kind"])(t, event)
        self.seen = t

    def stop(self, now: int) -> None:
        """Extend the span under way to now, unless the job has ended."""
        if self.finished is None:
            self._cut(now)

    # Moving along the timeline

    def _cut(self, t: int) -> None:
        """End the span under way."""
        if t <= self._since:
            return
        owner: Bucket | Step = self._phase
        if self._phase is Bucket.TRAINING and self._step is not None:
            owner = self._step
            self._step.us += t - self._since
            self._step.pieces += 1
        self.spans.append((self._since, t, owner))
        self._since = t
        if len(self.spans) > self._full:
            self._join()

    def _join(self) -> None:
        """Join equal neighbours, except in the latest quarter, where a restore may take steps back."""
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
        """The step under way will never end; its time belongs to `fate`."""
        self._cut(t)
        if self._step is not None:
            self._step.bucket = fate
            self._step = None

    def _goes_on(self, t: int) -> bool:
        """Whether the present world has yet to make its last step: then it was not broken, whatever was reported."""
        return t < self._last_steps.get(self._generation, t)

    def _end_world(self, fate: Bucket, t: int) -> None:
        """Training stops, at once or after the world's last step."""
        if self._goes_on(t):
            self._broken = True
        elif self._phase not in (Bucket.IDLE, Bucket.QUEUE):
            self._drop(fate, t)
            self._phase = Bucket.RENDEZVOUS

    def _form(self, generation: int, t: int) -> None:
        self._drop(Bucket.RENDEZVOUS, t)
        self.restarts += any(incident.kind in ("failure", "hang") for incident in self._open)
        self.worlds += 1
        self._generation = generation
        self._members = None
        self._broken, self._why = False, ""
        self._life += 1
        self._phase = Bucket.STARTUP
        if self._blind:
            self._phase = Bucket.TRAINING
            self._recovered(t)

    def _current(self, event: Event, t: int) -> bool:
        """Whether an event of the training is of the present world; one of a newer world proves that it was formed."""
        generation = _int(event, "generation")
        if generation is None:
            generation = max(0, self._generation)
        if generation > self._generation:
            self._form(generation, t)
        return generation == self._generation

    def _concerns(self, event: Event) -> bool:
        """Whether an event of the launcher or an agent is about a member of the present world, or may be."""
        generation, worker = _int(event, "generation"), _int(event, "worker")
        if generation is not None and generation < self._generation:
            return False
        return self._members is None or worker is None or worker in self._members

    def _roll_back(self, step: int) -> None:
        """The results of all steps after this one are lost."""
        before = self.steps_kept
        while self.kept and self.kept[-1].number > step:
            last = self.kept[-1]
            if last.before < step:  # of several, the first ones stay; they are taken to have been equally long
                stays, of = step - last.before, last.number - last.before
                last.kept_us = (last.us if last.kept_us < 0 else last.kept_us) * stays // of
                last.waited_us = last.waited_us * stays // of
                left = max(1, last.count * stays // of)
                self.steps_kept -= last.count - left
                last.number, last.count = step, left
                break
            self.kept.pop().bucket = Bucket.REPLAYED
            self.steps_kept -= last.count
        if self._open:
            self._open[0].replayed += before - self.steps_kept

    def _recovered(self, t: int) -> None:
        """Training goes on in a newer world: what ended the older ones is over."""
        for incident in self._open:
            if incident.generation < self._generation:
                incident.recovery_s = t / 1e6 - incident.time
        self._open = [incident for incident in self._open if incident.recovery_s is None]

    def _incident(self, t: int, kind: str, text: str, event: Event, *, stops: bool) -> None:
        incident = Incident(t / 1e6, kind, text, _int(event, "worker"), self._generation)
        self.incidents.append(incident)
        if stops:
            self._open.append(incident)

    def _cause(self) -> Incident | None:
        """The incident that ended the present world, if known: later reports are consequences."""
        return next((incident for incident in self._open if incident.generation == self._generation >= 0), None)

    def _rests(self) -> None:
        """Training is not expected to go on: the time after a planned stop is no recovery."""
        self._open = [incident for incident in self._open if incident.kind in ("failure", "hang")]

    # What the launcher says

    def _on_resumed(self, t: int, event: Event) -> None:
        self._rests()
        self._taken_up(t, event)

    def _on_launcher(self, t: int, event: Event) -> None:
        self._launchers += 1
        if self._launchers == 1:
            self._wake(Bucket.QUEUE, t)
        elif event.get("adopted") and self._phase not in (Bucket.IDLE, Bucket.QUEUE):
            self._incident(t, "launcher", "the launcher was started again; training went on meanwhile", event, stops=False)
        else:
            self._taken_up(t, event)

    def _taken_up(self, t: int, event: Event) -> None:
        """The job has a launcher again. If it had not ended, its processes were gone since the last event."""
        if self._phase not in (Bucket.IDLE, Bucket.QUEUE) and not self._goes_on(t):
            self._incident(self.seen, "launcher", "the launcher and its workers were gone", event, stops=True)
            self._drop(Bucket.REPLAYED, self.seen)
            self._phase = Bucket.IDLE
        self._wake(Bucket.QUEUE, t)

    _on_submitted = _taken_up

    def _on_worker(self, t: int, event: Event) -> None:
        self._wake(Bucket.STARTUP, t)
        if self._phase is Bucket.QUEUE:
            self._enter(Bucket.STARTUP, t)

    def _wake(self, phase: Bucket, t: int) -> None:
        self.finished = None
        if self._phase is Bucket.IDLE:
            self._enter(phase, t)

    def _on_called(self, t: int, event: Event) -> None:
        generation = _int(event, "generation")
        if generation is not None and generation <= self._generation:
            return
        reason = _text(event, "reason", "the world was called together again")
        if event.get("planned") and not self._blind and self._phase in (Bucket.TRAINING, Bucket.CHECKPOINT):
            self._why = reason
            return  # it saves first, and says `interrupted` when it has
        if not event.get("planned"):
            if all(incident.generation != self._generation for incident in self._open):
                self._incident(t, "failure", reason, event, stops=True)
            self._end_world(Bucket.REPLAYED, t)
        else:
            if self._generation >= 0:
                self._incident(t, "change", reason, event, stops=True)
            self._end_world(Bucket.RENDEZVOUS, t)

    def _on_world(self, t: int, event: Event) -> None:
        generation = _int(event, "generation")
        generation = self._generation + 1 if generation is None else generation
        if generation > self._generation:
            self._form(generation, t)
        if generation == self._generation:
            workers = event.get("workers")
            self._members = frozenset(w for w in workers if isinstance(w, int)) if isinstance(workers, list) else None

    def _on_failure(self, t: int, event: Event) -> None:
        counted = event.get("counted") is not False
        self.failures += counted
        reason = _text(event, "reason", f"worker {event.get('worker')} failed")
        concerns = self._concerns(event)
        cause = self._cause() if concerns else None
        if cause is None:
            self._incident(t, "failure" if counted else "interruption", reason, event, stops=concerns)
        elif cause.kind == "failure" and cause.worker is None:  # so far only the call that followed it was known
            cause.text, cause.worker = reason, _int(event, "worker")
        if concerns:
            self._end_world(Bucket.REPLAYED, t)

    def _on_exited(self, t: int, event: Event) -> None:
        interrupted = bool(event.get("interrupted"))
        if self._members and _int(event, "worker") in self._members and (interrupted or event.get("code") != 0):
            self._end_world(Bucket.CHECKPOINT if interrupted else Bucket.REPLAYED, t)

    def _on_finished(self, t: int, event: Event) -> None:
        self.finished = _text(event, "state", "finished")
        self._cut(t)
        if self._step is not None and self.finished == "Succeeded":
            for i in range(len(self.spans) - 1, -1, -1):  # after the last step: until the last save was durable, then leaving
                start, end, owner = self.spans[i]
                if start < self._last_step:
                    break
                if owner is self._step:
                    self.spans[i] = start, end, Bucket.CHECKPOINT if end <= self._durable else Bucket.STARTUP
        self._drop(Bucket.REPLAYED, t)
        self._phase = Bucket.IDLE
        self._rests()

    # What an agent says

    def _on_hang(self, t: int, event: Event) -> None:
        self.hangs += 1
        silent = event.get("silent_s")
        silent = silent if isinstance(silent, (int, float)) and 0 <= silent < _FOREVER else None
        concerns = self._concerns(event)
        if not concerns or self._cause() is None:
            who = f"rank {event.get('rank')} on worker {event.get('worker')}"
            self._incident(t, "hang", f"{who} {_text(event, 'reason', 'hung')}", event, stops=concerns)
        if concerns and not self._goes_on(t) and self._phase not in (Bucket.IDLE, Bucket.QUEUE, Bucket.RENDEZVOUS):
            if self._step is None and silent is not None:
                self._cut(max(self._since, t - microseconds(silent)))
            self._phase = Bucket.HANG if self._step is None else Bucket.TRAINING
            self._end_world(Bucket.HANG, t)

    # What the training says

    def _on_session(self, t: int, event: Event) -> None:
        if event.get("rank") not in (0, None) or not self._current(event, t):
            return
        if self._phase in (Bucket.TRAINING, Bucket.CHECKPOINT, Bucket.RESTORE):  # plain torchrun restarts in the same generation
            self._drop(Bucket.RENDEZVOUS, t)
            self._phase = Bucket.STARTUP
            self._life += 1
        if self._phase is Bucket.STARTUP:
            self._cut(t)  # the first step may begin here

    def _on_restoring(self, t: int, event: Event) -> None:
        if self._current(event, t) and self._phase in (Bucket.STARTUP, Bucket.TRAINING):
            self._drop(Bucket.STARTUP, t)
            self._phase = Bucket.RESTORE

    def _on_restored(self, t: int, event: Event) -> None:
        step = _int(event, "step")
        if not self._current(event, t) or step is None:
            return
        self._life += 1
        self._roll_back(step)
        if self._phase in (Bucket.STARTUP, Bucket.RESTORE, Bucket.TRAINING):
            self._drop(Bucket.STARTUP, t)
            self._phase = Bucket.TRAINING
            self._step = Step(first=True)

    def _on_step(self, t: int, event: Event) -> None:
        number = _int(event, "step")
        if number is None or not self._current(event, t):
            return
        if self._phase is Bucket.STARTUP:
            self._phase = Bucket.TRAINING
            self._step = Step(first=True)
        self._cut(t)
        step = self._step or Step(first=True)
        self._step, self._phase, self._last_step = Step(), Bucket.TRAINING, t
        if not self.kept or self.kept[-1].life != self._life or self.kept[-1].number < number:  # else reported twice
            together = _int(event, "steps") or 1
            step.count = together if together > 0 else 1
            step.waited_us = min(step.us, microseconds(_seconds(event, "waited_s")))
            step.before, step.number, step.life = number - step.count, number, self._life
            self._roll_back(step.before)
            self.kept.append(step)
            self.steps_executed += step.count
            self.steps_kept += step.count
            if not step.first:
                self.durations.add(step.us, step.count)
        self._recovered(t)
        if self._broken and not self._goes_on(t):
            self._broken = False
            self._end_world(Bucket.REPLAYED, t)

    def _on_saving(self, t: int, event: Event) -> None:
        if self._phase is Bucket.STARTUP or (self._phase is Bucket.TRAINING and self._step is not None):
            self._after_save = self._phase
            self._enter(Bucket.CHECKPOINT, t)

    def _on_staged(self, t: int, event: Event) -> None:
        if self._phase is Bucket.CHECKPOINT:
            self._enter(self._after_save, t)

    def _on_committed(self, t: int, event: Event) -> None:
        self.saves += 1
        self._durable = t
        self._cut(t)

    def _on_save_failed(self, t: int, event: Event) -> None:
        self.saves_failed += 1
        self._of_checkpoint(t, "save", f"step {event.get('step')} could not be saved", event)

    def _on_not_copied(self, t: int, event: Event) -> None:
        self._of_checkpoint(t, "save", f"step {event.get('step')} was saved, but not on every disk", event)

    def _on_damaged(self, t: int, event: Event) -> None:
        name = _text(event, "path", "a checkpoint").rsplit("/", 1)[-1]
        self._of_checkpoint(t, "damaged", f"{name} is damaged and was skipped", event)

    def _of_checkpoint(self, t: int, kind: str, text: str, event: Event) -> None:
        self._incident(t, kind, f"{text}: {_text(event, 'reason', 'no reason given')}", event, stops=False)

    def _on_interrupted(self, t: int, event: Event) -> None:
        self.interruptions += 1
        stops = self._phase not in (Bucket.IDLE, Bucket.QUEUE, Bucket.RENDEZVOUS)
        said = _text(event, "reason", "told to leave")
        self._incident(t, "interruption", f"{self._why}; {said}" if self._why else said, event, stops=stops)
        if stops:
            self._end_world(Bucket.CHECKPOINT, t)
