"""Takes snapshots: at every k-th step boundary, each rank copies its state into memory that its agent owns.

The ranks agree on a snapshot in the all-reduce of `run.interrupted()`. Rank 0 votes on whether a snapshot is due. Every rank
votes on whether its part of the last snapshot is held and replicated, and whether it has memory for the next one. All ranks thus
know when a snapshot is complete, and keep the previous one until then. Training never waits for an agent: a thread requests
memory, and boundaries without memory are skipped. If a rank has a problem, all ranks give their memory back, except the complete
snapshot, and try again later.

k is the smallest interval at which snapshots take at most a hundredth of the steps' time. The time of a snapshot includes the
copying, and the delay of steps while the agents compute checksums and send replicas.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
import math
import os
import secrets
import statistics
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outlast.base.errors import OutlastError
from outlast.job import differing_ranks
from outlast.job.contract import Env
from outlast.job.ledger import Ledger
from outlast.storage.snapshots import part_format, replicas
from outlast.storage.snapshots.client import Client
from outlast.storage.snapshots.part_format import Part
from outlast.training import ddp
from outlast.training.state import resuming, snapshot_capture
from outlast.training.state.resuming import WayBack
from outlast.training.state.shared_disks import Disks
from outlast.training.state.snapshot_capture import Capture, Content

log = logging.getLogger("outlast")

SHARE = 0.01
_STEPS, _SNAPSHOTS = 31, 15
"""Number of recent steps and of recent snapshots whose medians are used."""
_LESS = 0.75
"""The interval is shortened only to this fraction or less, since smaller changes are noise."""
_LEARN = 3
"""Minimum number of steps without a snapshot before k is chosen, and of snapshots before the delay that they cause is
estimated."""
_EVENT_S = 10.0
_FEW = 256
"""Maximum number of items that the training thread publishes itself; with more, an agent that hangs could block it."""
_PAUSE_S = 600.0
"""Seconds of pause after the first problem. Each further problem doubles the pause."""


def interval(cost_s: float, step_s: float) -> int:
    """Return the number of steps between snapshots, given the cost of a snapshot and the duration of a step."""
    return max(1, math.ceil(cost_s / (SHARE * step_s) - 1e-9)) if step_s > 0 else 1


def steady(measured: int, current: int) -> int:
    """Return the `measured` interval, or the `current` one if the difference is probably noise."""
    return current if _LESS * current < measured <= current else measured


def significant_delay(delays: Sequence[float], steps: Sequence[float]) -> float:
    """Return the seconds by which a snapshot delays steps, less two standard errors of the medians. `delays` has the excess time
    of the steps during each snapshot, and `steps` the durations of steps without snapshots. Steps vary by more than the cost of a
    small snapshot, so without the subtraction the interval between snapshots could be ten times too long."""
    if len(delays) < _LEARN or len(steps) < _LEARN:
        return 0.0
    middle = statistics.median(steps)
    # The standard error of one value's median, for a normal distribution.
    spread = 1.25 * 1.48 * statistics.median(abs(step - middle) for step in steps)
    return max(0.0, statistics.median(delays) - 2 * spread * math.sqrt(1 / len(delays) + 1 / len(steps)))


@dataclasses.dataclass(frozen=True)
class Place:
    """The identity of this rank's parts, and the holders of their replicas."""

    run: str
    generation: int
    world: int
    rank: int
    worker: int
    local_rank: int
    local_ranks: int
    session: str = ""
    """A nonce shared by all ranks, new for each start of their processes."""
    to: tuple[str, ...] = ()
    """Addresses of the agents that hold replicas."""
    weight: int = 0
    """Factor of this rank's digest in the sum over all ranks; 0 if there is nothing to compare it with."""

    @classmethod
    def of(cls, env: Mapping[str, str], run: str, generation: int, world: int, rank: int) -> Place:
        local = int(env.get("LOCAL_RANK", 0)), int(env.get("LOCAL_WORLD_SIZE", 1))
        return cls(run, generation, world, rank, int(env.get(Env.WORKER, rank)), *local)


def open_(
    client: Client | None, place: Place, directory: Path, disks: Disks, ledger: Ledger, report: Callable[..., None]
) -> Snapshots:
    """Create this rank's `Snapshots`, and agree on the holders of replicas. `directory` contains the run's checkpoints. All ranks
    must call this."""
    gather = disks.gather
    own = replicas.Place(client.address, *client.where) if client else replicas.Place("")
    every = gather((own, place.worker, secrets.token_hex(8)))
    workers = {worker: where for where, worker, _ in every}
    to = replicas.holders(list(workers.values()), int(os.environ.get(Env.REPLICAS, "1")))
    number, sizes = list(workers).index(place.worker), collections.Counter(worker for _, worker, _ in every)
    weight = differing_ranks.weight(number, len(workers)) if len(set(sizes.values())) == 1 else 0  # else the shares differ
    place = dataclasses.replace(place, session=every[0][2], to=to[number], weight=weight)
    back = resuming.WayBack(directory, place.run, place.generation, disks) if os.environ.get(Env.GO_BACK) == "1" else None
    return Snapshots(client, place, ledger, report, gather, back)


class Snapshots:
    """One rank's snapshots. No rank takes snapshots if one rank has no `client`."""

    def __init__(
        self,
        client: Client | None,
        place: Place,
        ledger: Ledger,
        report: Callable[..., None],
        gather: Callable[[Any], list[Any]] = lambda value: [value],
        back: WayBack | None = None,
    ) -> None:
        self._back = back
        self._client, self._place, self._ledger, self._report, self._gather = client, place, ledger, report, gather
        self._clock = time.monotonic
        self._enabled = self._able = client is not None
        self._pause_s, self._retry_at = _PAUSE_S, 0.0
        """Seconds of pause after the next problem, and the time of the next attempt."""
        self._problem = ""
        self._sizes: list[int] = []
        """Sizes of the last snapshot's parts in bytes; empty until the first one is prepared."""
        self._agent_thread: threading.Thread | None = None
        """The thread that requests memory from the agent or gives it back."""
        self._pending = self._missed = False
        """Whether the last snapshot may be incomplete, and whether our part of it had no memory."""
        self._capture: Capture | None = None
        self._extra: Callable[[], dict[str, Any]] = dict
        self._step = self._taken = self._turn = 0
        """The steps of the last boundary and the last snapshot, and the number of snapshots."""
        self._share = 0
        self._passed, self._pass = 0, 1
        """Number of differing snapshots since the last comparison, and the number at which the next comparison is due."""
        self._equal: dict[int, int] = {}
        """Step of the last snapshot without a difference, keyed by share. All shares together are the replicated state."""
        self._resumed = 0
        """The step from which all ranks resumed with the same bits."""
        self._named: dict[tuple[int, ...], int] = {}
        """The step of the first snapshot with a difference, keyed by the ranks that differ."""
        self._complete = 0, 0
        self._last: float | None = None
        self._steps_s: collections.deque[float] = collections.deque(maxlen=_STEPS)
        self._all_s: collections.deque[float] = collections.deque(maxlen=_STEPS)
        self._delays_s: collections.deque[float] = collections.deque(maxlen=_SNAPSHOTS)
        """Seconds by which each snapshot has delayed steps."""
        self._copies_s: collections.deque[float] = collections.deque(maxlen=_SNAPSHOTS)
        self._cost_s = 0.0
        self._delay_s: float | None = None
        """Seconds by which the incomplete snapshot has delayed steps so far; None if no snapshot is incomplete."""
        self._ended = True
        self._steps_since = 0
        self._every, self._logged, self._logged_at = 1 + _LEARN, 0, float("-inf")
        self._agreed = self._working = self._chosen = False
        self._copied_s = 0.0
        self._copying: threading.Thread | None = None
        self._bytes = 0
        self._unreplicated = False

    @property
    def newest(self) -> int:
        """The step of the newest snapshot, whether taken or resumed from; 0 if there is none."""
        return max(self._taken, self._complete[1])

    def begin(self, state: dict[str, Any], complete: tuple[int, int], extra: Callable[[], dict[str, Any]], step: int = 0) -> None:
        """Take snapshots of `state` from now on, in a run that has resumed from `step`. `extra` returns data that rank 0 adds to
        each. `complete` is the (generation, step) of the snapshot that was loaded, or (0, 0) if there was none."""
        self._resumed, self._equal = step, {}
        local = self._place.local_rank, self._place.local_ranks
        if self._capture is not None:  # a new session, so that agents refuse parts of the old state
            self._capture.close()
            self._place = dataclasses.replace(self._place, session=f"{self._place.session}+")
        self._capture = Capture(state, self._place.rank, local) if self._client else None
        self._complete, self._extra, self._last, self._turn = complete, extra, None, 0
        self._enabled = self._able = self._client is not None and bool(state)
        self._give_back()

    def close(self) -> None:
        """Release the memory and the connection to the agent, which keeps the complete snapshot."""
        for thread in (self._agent_thread, self._copying):
            if thread is not None:
                thread.join()
        if self._capture is not None:
            self._capture.close()
            for hook in self._capture.hooks:
                hook.remove()
        if self._client is not None:
            self._client.close()

    def votes(self) -> tuple[float, ...]:
        """Return this rank's votes at a boundary. `count` gets their sums over all ranks."""
        first = self._place.rank == 0
        if not self._enabled:
            return float(first and self._able and self._clock() >= self._retry_at), 0.0, float(not self._able), *(0.0,) * 4
        due = first and self._capture is not None and (not self._taken or self._steps_since + 1 >= self._every)
        if self._working:
            self._working = not self._replicated()
        unready = not self._ready()
        return tuple(map(float, (due, self._working, bool(self._problem), unready, self._missed, self._cost_s, self._digest())))

    def _digest(self) -> float:
        """Return the weighted digest of this rank's share; 0 if there is nothing to compare, NaN if it is unknown."""
        if self._client is None or not self._pending or self._working or self._missed or not ddp.wrapped:
            return 0.0
        digest = self._client.digest("shared", self._taken)
        return float(self._place.weight * int(digest, 16)) if digest else math.nan

    def count(self, sums: Sequence[float], *, compare: bool = True) -> None:
        """Act on the sums of all ranks' votes. With `compare`, also report the ranks that differ."""
        due, working, problems, unready, missed, cost, digests = sums
        self._agreed = self._enabled and due > 0 and not any((working, problems, unready, missed))
        if problems and self._enabled:
            self._stop()
        elif due and not problems and not self._enabled:
            self._enabled, self._problem = True, ""
        if self._pending and not working:
            self._pending, self._ended = False, True
            if missed:  # all ranks try again
                self._missed, self._steps_since = False, self._every
                return
            self._complete, self._pause_s = (self._place.generation, self._taken), _PAUSE_S
            self._choose(cost / self._place.world)
            if compare and digests == 0:
                self._equal[self._share] = self._taken
            elif compare and not math.isnan(digests):
                self._compare()
            self._report(snapshot=self._taken, **({"every": self._every} if self._place.rank == 0 else {}))

    def _compare(self) -> None:
        """Report, each only once, the ranks whose replicated state differs in the last snapshot. All ranks must call this.
        Differences persist, so comparisons become rarer."""
        self._passed += 1
        if self._passed < self._pass:
            return
        self._passed, self._pass = 0, 2 * self._pass
        place, node = self._place, os.environ.get(Env.NODE, "")
        copies = self._gather((place.rank, place.worker, node, self._share, self._checksums()))
        agreed = min(self._equal.values()) if len(self._equal) == place.local_ranks else self._resumed
        found = differing_ranks.differing([differing_ranks.Copy(*copy) for copy in copies])
        for each in found:
            ranks = tuple(copy.rank for copy in each.ranks)
            if self._named.setdefault(ranks, self._taken) < self._taken:
                continue
            if place.rank in ranks:
                self._report(differs=self._taken)
            if place.rank == 0:
                event = each.event(self._taken, agreed)
                self._ledger.write("differs", generation=place.generation, step=self._taken, **event)
                log.warning("outlast: %s", event["reason"])
        if self._back:
            self._back.go(found, self._taken, agreed)

    def _checksums(self) -> dict[str, int]:
        """Return the checksums of the tensors in this rank's share of the last snapshot, or an empty dict if the agent fails."""
        assert self._client is not None
        found: dict[str, int] = {}
        try:
            for part in self._client.catalog():
                if (part.kind, part.step, part.rank, part.replica) == ("shared", self._taken, self._place.rank, False):
                    with self._client.open(part) as source:
                        index, blocks = part_format.read_tail(part, source.tail)
                    found = {item.key: zlib.crc32(repr(crcs).encode()) for item, crcs in zip(index, blocks, strict=True)}
        except OutlastError as problem:  # the agent has ended, or its memory is damaged
            log.warning("outlast: the checksums of this rank's memory cannot be read: %s", problem)
        return found

    def _stop(self) -> None:
        if self._problem:
            log.warning("outlast: no snapshots are taken for %.0f minutes: %s", self._pause_s / 60, self._problem)
            self._report(warning=self._problem)
        self._report(every=0)
        self._enabled, self._problem = False, ""
        self._retry_at, self._pause_s = self._clock() + self._pause_s, 2 * self._pause_s
        self._give_back()

    def _give_back(self) -> None:
        client, complete = self._client, self._complete
        if self._capture is not None and client is not None and self._sizes:
            self._capture.close()
            self._run(lambda: client.give_back(complete))
        self._sizes, self._pending, self._working, self._missed = [], False, False, False

    def _ready(self) -> bool:
        """Return whether there is memory for the snapshot after the current one. Requests missing memory."""
        client, sizes, generation = self._client, self._sizes, self._place.generation
        if client is None or not sizes or (self._agent_thread is not None and self._agent_thread.is_alive()):
            return False
        if self._problem:  # set before the thread ends: a refusal, after which memory is given back and not requested again
            return False
        complete = (generation, self._taken) if self._pending else self._complete
        if not (ready := client.spare(sizes, complete)) and not self._pending:
            at = generation, self._step + 1
            self._run(lambda: client.reserve(sizes, at, complete, self._place.session))
        return ready

    def _run(self, task: Callable[[], None]) -> None:
        """Run `task`, which waits for the agent, in a thread."""

        def run() -> None:
            try:
                task()
            except OutlastError as problem:
                self._problem = str(problem)

        self._agent_thread = threading.Thread(target=run, name="outlast-snapshot-rooms", daemon=True)
        self._agent_thread.start()

    def boundary(self, step: int) -> None:
        """Take a snapshot after `step` if all ranks have agreed to. The first call only requests memory."""
        now = time.monotonic()
        if self._last is not None:
            self._measure(now - self._last)
        self._steps_since += 1
        self._step = step
        if self._enabled and self._capture is not None and (self._agreed or not self._sizes) and step > self._taken:
            self._turn += self._agreed
            try:
                self._take(step, self._capture)
            except OutlastError as problem:
                self._problem = str(problem)
            except Exception as error:  # training must go on, even with a state that a snapshot cannot hold
                self._problem = f"the state of step {step} cannot be copied: {error!r}"
            self._copied_s += time.monotonic() - now
        self._agreed = False
        self._last = time.monotonic()

    def _measure(self, step_s: float) -> None:
        self._all_s.append(step_s)
        if self._delay_s is None:
            self._steps_s.append(step_s)
            return
        if self._steps_s:  # an evaluation counts as at most two steps
            typical_s = self._step_s()
            self._delay_s += min(step_s, 2 * typical_s) - typical_s
        if self._ended:
            self._delays_s.append(self._delay_s)
            self._delay_s = None
            copied_s = statistics.median(self._copies_s) if self._copies_s else 0.0
            self._cost_s = copied_s + significant_delay(self._delays_s, self._steps_s)

    def step_s(self) -> float:
        """Return the median duration of recent steps in seconds, or 0."""
        return statistics.median(self._all_s) if self._all_s else 0.0

    def _step_s(self) -> float:
        """Return the duration of a step without snapshots in seconds. The median of all recent steps is an upper bound."""
        return min(statistics.median(self._steps_s), statistics.median(self._all_s))

    def spent_s(self) -> float:
        spent, self._copied_s = self._copied_s, 0.0
        return spent

    def _take(self, step: int, capturing: Capture) -> None:
        assert self._client is not None
        place, at = self._place, (self._place.generation, step)
        begun = time.monotonic()
        extra = json.dumps(self._extra()).encode() if place.rank == 0 else b""
        contents = capturing.prepare(extra, self._turn)
        first, self._sizes = not self._sizes, [snapshot_capture.size(content, objects) for content, objects in contents]
        if first:
            self._ready()
            return
        self._taken, self._steps_since, self._delay_s, self._ended, self._pending = step, 0, 0.0, False, True
        self._share = contents[0][0].share
        if not self._client.spare(self._sizes, self._complete):  # the state has grown
            self._missed = True
            return
        rooms = self._client.rooms(self._sizes, at, self._complete)
        copied = capturing.copy([(content, room) for (content, _), room in zip(contents, rooms, strict=True)])
        parts = []
        for (content, objects), room in zip(contents, rooms, strict=True):
            index, size = snapshot_capture.write_objects(content, objects, room)
            parts.append((room, self._part(content, step, size), index))
        self._bytes, self._working = sum(part.bytes for _, part, _ in parts), True

        def publish() -> None:
            assert self._client is not None
            try:
                copied()
                for room, part, index in parts:
                    to = place.to if part.kind == "unique" else ()
                    self._client.publish(room, part, index, to=to, complete=self._complete)
            except Exception as error:  # in a thread it would be lost
                self._problem = f"the state of step {step} cannot be copied: {error!r}"

        if capturing.in_background or sum(len(index) for _, _, index in parts) > _FEW:
            self._copying = threading.Thread(target=publish, name="outlast-snapshot", daemon=True)
            self._copying.start()
        else:
            publish()
        self._copies_s.append(time.monotonic() - begun)

    def _part(self, content: Content, step: int, size: int) -> Part:
        place = self._place
        local_rank = content.share if content.kind == "shared" else place.local_rank
        who = place.world, place.rank, place.worker, local_rank, place.local_ranks
        return Part(place.run, place.generation, step, *who, content.kind, bytes=size, session=place.session)

    def _replicated(self) -> bool:
        """Return whether the agent holds this rank's parts of the last snapshot and has replicated them as far as possible."""
        assert self._client is not None
        if self._copying is not None and self._copying.is_alive():
            return False
        if self._problem:
            return True
        states = self._client.poll()
        for kind in ("shared", "unique"):
            state = states.get((kind, self._taken), "")
            word, _, why = state.partition("; ")
            if word not in ("", "held", "replicated"):
                self._problem = state
                return True
            if why:
                if not self._unreplicated:
                    log.warning("outlast: %s; if this worker is lost, training goes on from an older state", why)
                self._unreplicated = True
            elif not word or (word == "held" and kind == "unique" and self._place.to):
                return False
        return True

    def _choose(self, cost_s: float) -> None:
        if self._place.rank > 0 or len(self._steps_s) < _LEARN:
            return
        step_s = self._step_s()
        measured = interval(cost_s, step_s)
        self._every = steady(measured, self._every) if self._chosen else measured
        self._chosen = True
        now = time.monotonic()
        if self._every != self._logged and now - self._logged_at >= _EVENT_S:
            self._logged, self._logged_at = self._every, now
            copied_s = round(statistics.median(self._copies_s), 6)
            reason = (
                f"a snapshot takes {1e3 * cost_s:.1f} ms, {1e3 * copied_s:.1f} ms of it to copy, and a step {1e3 * step_s:.1f} ms"
            )
            self._ledger.write(
                "snapshots", generation=self._place.generation, every=self._every, step=self._taken, copied_s=copied_s,
                bytes=self._bytes, replicas=len(self._place.to), reason=reason,
            )  # fmt: skip
