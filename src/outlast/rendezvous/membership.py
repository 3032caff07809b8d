"""A worker's membership in the rendezvous: it joins worlds, learns when to stop training, reports, and leaves. Needs no torch.

    store = member.next_world(connect)            the next world that includes this worker, and what `connect` returns for it
    while not member.must_stop(): ...             its training processes run
    member.failed({...}) or member.done()         how they ended; then the next world

Every generation and every attempt has a fresh TCPStore, hosted by the worker with rank 0 on a socket that already listens when
its address is reported. Used by `worker.agent.world_loop` and `rendezvous.handler`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from outlast.base import files
from outlast.base.clock import Awake
from outlast.base.typed_json import is_count
from outlast.job import contract
from outlast.job.workerfiles import notice_file, progress_file
from outlast.rendezvous import messages
from outlast.rendezvous.attempts import Past
from outlast.rendezvous.member_client import Client
from outlast.rendezvous.mesh import watched_peers
from outlast.rendezvous.mesh.mesh import Mesh
from outlast.rendezvous.repairs import Repairs
from outlast.rendezvous.who_trains import MemberState, World

LOOK_S = 1.0
"""Interval, in seconds, between reads of the processes' records, until the processes have reported their batch."""
BROKEN_S = 10.0
"""Seconds for which a worker that leaves lets its processes finish a save although others have ended. Arbitrary."""
Store = TypeVar("Store")
Connect = Callable[[World, int, socket.socket], Store]
"""Connects to a world's store as the given rank; rank 0 also hosts it on the listening socket. Raises OSError or torch's
RuntimeError if the host is unreachable."""


class RunClosed(Exception):
    """Raised if there will be no further world. The message is the coordinator's reason."""


class Leaving(RunClosed):
    """Raised if this worker was asked to leave."""


_KILLED = "the training processes of this worker were killed"


class NoWorld(Exception):
    """Raised if no world has included this worker in time."""


class Membership:
    """One worker's membership, used by one thread.

    `state` is a directory for `world.json` and the notice; `processes` is this worker's number of training processes.
    """

    def __init__(
        self,
        client: Client,
        *,
        run_id: str,
        state: Path,
        host: str,
        processes: int,
        join_s: float = math.inf,
        leave_s: float | None = None,
    ) -> None:
        """`join_s` is the timeout for joining a world. `leave_s` is how long training has to save and leave on request; if None,
        the call's deadline applies."""
        self._client = client
        self._run_id = run_id
        self._join_s, self._leave_s = join_s, leave_s
        self._clock = Awake()
        self._request: tuple[tuple[str, int, float], float] | None = None
        """The last request to training (kind, generation, deadline), and its deadline on our clock."""
        self._broken_at: float | None = None
        """When others had ended while this worker leaves; None if they have not."""
        self._state = state
        self._host = host
        self._processes = processes
        self.notice = state / contract.NOTICE
        """The file that asks training to save for a call, or to save and leave."""
        self.world: World | None = None
        self.attempt = 0
        """Number of times that the current world's processes were restarted without the coordinator."""
        self.abandoned: Callable[[], bool] = lambda: False
        """Returns True once the training processes have been killed for good. This worker then leaves without saving."""
        self.joining: Callable[[], None] = lambda: None
        """Called before the training processes of a new world or attempt start."""
        self.dies: Callable[[], bool] = lambda: False
        """Returns True while a rank is crashing, so that it can report its error before it is stopped."""
        self.pause_s = 0.0
        """Delay, in seconds, before processes are next started."""
        self._next: dict[str, Any] = {}
        self._reported_leaving = False
        self._unsaved = False
        self._held = self._saved = 0
        """This worker's newest step, saved or in memory, and its newest saved step."""
        self._batch: tuple[int, ...] = ()
        self._looked = -math.inf
        self.key = b""
        """The run's key; the mesh is disabled if it is empty."""
        self.mesh: Mesh | None = None
        """None before the first report, without a key, or if the mesh cannot listen."""
        self.repairs: Repairs | None = None
        """None if only the coordinator may restart processes."""
        self.repaired: Callable[[Past], None] = lambda _: None
        """Called for each restart that the members have agreed on."""

    # Called between two worlds

    def failed(self, failure: dict[str, Any]) -> None:
        """Record how the current world's training processes have failed, for the next report."""
        self._next = {"failed": True, "failure": failure}

    def replaced(self, failure: dict[str, Any]) -> None:
        """Report a failure of the training processes before another process takes this worker's place."""
        self._client.amend(failed=True, failure=failure, **(self.repairs.report(failed=True) if self.repairs else {}))

    def left(self, *, reached: bool) -> None:
        """Report that the training processes have ended and this worker leaves. `reached` is True if other workers can load its
        newest step."""
        self._report_leaving()
        self._read_steps()
        self._client.amend(held=self._saved, owes=not reached)

    def done(self) -> None:
        """Record that the current world's training processes have finished, for the next report."""
        self._next = {"standing": MemberState.DONE}

    @property
    def id(self) -> int:
        """This worker's index; negative before one is assigned."""
        return self._client.id

    @property
    def generation(self) -> int:
        """The current world's generation; 0 before the first world."""
        return self.world.generation if self.world else 0

    @property
    def rank(self) -> int:
        """This worker's rank in the current world; -1 before the first world."""
        return self.world.members.index(self._client.id) if self.world else -1

    @property
    def closed(self) -> messages.Closed | None:
        """The final result; None until the run is over."""
        return self._client.closed

    def leaving(self) -> bool:
        return self.abandoned() or notice_file.read(self.notice).get("kind") == "leave"

    @property
    def numbers(self) -> dict[str, str]:
        """Environment variables that describe the current world to training processes."""
        held = self.world.held if self.world else 0
        numbers = {contract.Env.GENERATION: self.generation, contract.Env.ATTEMPT: self.attempt, contract.Env.HELD: held}
        return {name: str(number) for name, number in numbers.items()}

    def called(self) -> bool:
        """Return whether a newer generation than the current world's has been called."""
        called = self._client.called
        return called is not None and self.world is not None and called.generation > self.world.generation

    @property
    def run_id(self) -> str:
        """The run id without slashes, because torch uses it in a directory name."""
        return self._run_id.replace("/", ".")

    def close(self) -> None:
        """Leave the run, after the last report."""
        if self.mesh:
            self.mesh.close()
        self._client.close()

    def report(self, standing: str, **fields: Any) -> None:
        """Report a standing that `next_world` does not report itself."""
        self._client.report(standing=standing, **fields)

    def must_stop(self) -> bool:
        """Return whether this worker must stop its training processes and request the next world. If training must save first,
        this writes the notice that asks for it."""
        now = self._clock()
        if self._client.closed is not None or self.abandoned():
            return True
        if self._batch[:2] != (self.generation, self.attempt) and now - self._looked >= LOOK_S:
            self._looked = now
            last, newest = self._batch, self._newest_batch()
            if newest != last:
                self._client.amend(batch=newest)
        request, called = notice_file.read(self.notice), self._client.called
        if request.get("kind") == "leave":
            self._refuse("this worker was told to leave")
            self._report_leaving()
            broken = called is not None and self.called() and not called.planned  # ranks of other workers may have left already
            saves = self._listening() or self._owes() if broken else self._saves()
            self._broken_at = (self._broken_at or now) if broken else None
            stuck = self._broken_at is not None and now - self._broken_at > BROKEN_S  # the next world saves what they owe
            return not saves or stuck or self._too_late("leave", 0, request["deadline"])
        if called is None or not self.called():
            return self.repairs is not None and self.repairs.stop_requested() and not self.dies()
        self._refuse(called.reason)
        too_late = self._too_late("call", called.generation, called.deadline)
        if not called.planned or not self._saves() or too_late:
            return not self.dies()
        if request.get("generation") != called.generation:
            try:
                notice_file.write(self.notice, "call", called.reason, called.deadline, generation=called.generation)
            except OSError:  # the disk is full: training receives no request to save, and could not save
                return True
        return False

    def next_world(self, connect: Connect[Store]) -> Store:
        """Wait for the next world that includes this worker, and connect to its store. Raises RunClosed and NoWorld."""
        begun = time.monotonic()
        self._listen()
        while True:
            if self.abandoned():
                raise Leaving(_KILLED)
            family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
            try:
                listener = socket.create_server((self._host, 0), family=family, backlog=1024)
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE) or time.monotonic() - begun > self._join_s:
                    raise
                self._client.wait(LOOK_S)
                continue
            with listener:
                address = f"{self._host}:{listener.getsockname()[1]}"
                again = self._agree_on_attempt(address)
                world = again or self._await_world(address)
                try:
                    return self._join(world, listener, connect, again=again is not None)
                except (RuntimeError, OSError) as error:
                    problem = error
            # The store's host died before we connected: report that, and request another world.
            where = f"the store of generation {world.generation} at {world.address}"
            reason = f"worker {self._client.id} cannot reach {where}: {problem}"
            if time.monotonic() - begun > self._join_s:  # the store's host is alive but unreachable
                raise NoWorld(f"no world within join_timeout ({self._join_s:g} s): {reason}") from problem
            self.failed({"code": 1, "reason": reason, "time": time.time(), "echo": True})

    def _agree_on_attempt(self, address: str) -> World | None:
        """Return the current world with a fresh store if its members agree on an attempt, otherwise None."""
        self._read_steps()
        if self.repairs is None or self.world is None:
            return None
        if self._next.get("standing") is MemberState.DONE:
            self._refuse("this worker has finished")
            return None

        def late() -> None:  # the coordinator may decide sooner
            self._client.report(address=address, generation=self.generation, **self._stopped())

        failure, step = self._next.get("failure"), max((record.step for record in self._records()), default=0)
        go = self.repairs.agree(address, step, failure, overruled=self._overruled, late=late)
        if go is None:
            if failure:
                print(f"outlast | the coordinator is to start the processes again: {self.repairs.reason}", flush=True)
            return None
        self._next = {}
        return dataclasses.replace(self.world, address=go.address, held=self._held)

    def _overruled(self) -> str:
        """Return why the coordinator must decide; empty if the members may."""
        new, mesh = self._client.world, self.mesh
        if self._client.closed is not None or self.called() or (new is not None and new.generation > self.generation):
            return "the coordinator has decided what comes next"
        if self.leaving():
            return "this worker was told to leave"
        if self.world is None or len(self.world.members) == 1:
            return ""
        if mesh is None or not mesh.complete:
            return "the members do not watch each other"
        return f"worker {mesh.unheard[0]} is not heard" if mesh.unheard else ""

    def _refuse(self, reason: str) -> None:
        if self.repairs:
            self.repairs.refuse(reason)

    def _stopped(self) -> dict[str, Any]:
        self._read_steps()
        fields: dict[str, Any] = {"standing": MemberState.WAITING, "failed": False, "failure": None, "held": self._held}
        fields |= {"owes": self._unsaved, "batch": self._newest_batch(), "mesh_address": self.mesh.address if self.mesh else ""}
        fields |= self._next
        return {**(self.repairs.report(failed=True) if fields["failed"] and self.repairs else {}), **fields}

    def _await_world(self, address: str) -> World:
        if self.abandoned():
            raise Leaving(_KILLED)
        generation = self.generation
        fields = self._stopped()
        self._next = {}
        if not self._reported_leaving or self._unsaved:
            self._reported_leaving = False
            self._client.report(address=address, generation=generation, **fields)
        begun = time.monotonic()
        while True:
            self._clock()
            if self._client.closed is not None:
                raise RunClosed(self._client.closed.reason)
            if time.monotonic() - begun > self._join_s:
                why = self._client.why
                raise NoWorld(f"no world within join_timeout ({self._join_s:g} s){': ' if why else ''}{why}")
            if self.abandoned():
                raise Leaving(_KILLED)
            if self.leaving() and not self._unsaved:  # otherwise this worker leaves from the next world, after a save
                self._report_leaving()
                raise Leaving("this worker was told to leave")
            if self.mesh:
                self.mesh.id = self._client.id  # etcd assigns the id after the first report
            world, called = self._client.world, self._client.called
            if (
                fields["standing"] is MemberState.DONE
                and called is not None
                and not called.planned
                and called.generation > generation
            ):
                fields["standing"] = MemberState.WAITING  # other workers failed at the end: the last steps are repeated
                who = f"rank {self.rank}" if self._processes == 1 else "a process"
                reason = f"{who} on worker {self._client.id}"
                failure = {"code": 1, "reason": reason, "time": time.time(), "echo": True, "left": True}
                fields |= {"failed": True, "failure": failure}
                self._client.report(**fields)
            if world is not None and world.generation > generation and self._client.id in world.members:
                return world
            self._client.wait(0.1)

    def _join(self, world: World, listener: socket.socket, connect: Connect[Store], *, again: bool) -> Store:
        self.world = world
        self.joining()
        if not again:
            self._enter_mesh(world)
        reported = self._take_up(world, again=again)
        notice_file.end_call(self.notice)
        fields = {**dataclasses.asdict(world), "attempt": self.attempt}
        with contextlib.suppress(OSError):  # the file is for people only; a full disk must not prevent a world
            files.replace(self._state / contract.WORLD, json.dumps(fields))
        reported |= {"generation": world.generation, "failed": False, "failure": None, "held": 0}
        self._client.report(standing=MemberState.TRAINING, **reported)
        self._report_peers()
        store = connect(world, self.rank, listener)
        until, self.pause_s = time.monotonic() + self.pause_s, 0.0
        while time.monotonic() < until and not self.must_stop() and not self.leaving():
            self._client.wait(0.1)
        return store

    def _take_up(self, world: World, *, again: bool) -> dict[str, Any]:
        if self.repairs is None:
            return {}
        if again:
            self.repaired(self.repairs.taken_up())
        else:
            self.repairs.enter(world, self.mesh)
        self.attempt = self.repairs.attempt
        return self.repairs.report()

    def _listen(self) -> None:
        if self.mesh or not self.key:
            return
        try:
            self.mesh = Mesh(self._client.id, self._host, self.key, run=self._run_id, clock=self._clock)
        except OSError as problem:
            print(f"outlast | this worker cannot listen at {self._host}, so its peers do not watch it: {problem}", flush=True)
            return
        self.mesh.changed = self._report_peers

    def _enter_mesh(self, world: World) -> None:
        if self.mesh is None:
            return
        self.mesh.id = self._client.id
        self.mesh.enter(world.generation, world.members)
        addresses = dict(zip(world.members, world.mesh_addresses, strict=False))
        known = watched_peers.known(self._client.id, world.members)
        self.mesh.learn(world.generation, {each: addresses[each] for each in known if addresses.get(each)})

    def _report_peers(self) -> None:
        """Report the peers that are silent. Any thread may call this. Does nothing while the mesh is still in another world,
        whose indices may belong to other processes."""
        if self.mesh and self.mesh.generation == self.generation:
            self._client.amend(mesh=self.mesh.complete, unheard=self.mesh.unheard, refused=self.mesh.refused)

    def _listening(self) -> bool:
        """Return whether all training processes have an open session. Before that, training cannot save and may wait for a rank
        that left."""
        records = self._records()
        return len(records) == self._processes and all(record.phase not in ("started", "open") for record in records)

    def _saves(self) -> bool:
        """Return whether training saves on request. A step to restore (`World.held`) is restored first, even if a member leaves,
        because few workers may have it in memory."""
        return self._listening() or self._owes() or (self.world is not None and self.world.held > 0)

    def _records(self) -> list[progress_file.Progress]:
        records = [progress_file.read(self._state, local_rank) for local_rank in range(self._processes)]
        return [each for each in records if each and (each.generation, each.attempt) == (self.generation, self.attempt)]

    def _owes(self) -> bool:
        self._read_steps()
        return self._unsaved

    def _read_steps(self) -> None:
        """Read the newest steps from the processes' records. The last world's values stay in effect until the new processes have
        restored their state."""
        records = [each for each in self._records() if each.phase not in ("started", "open", "restore")]
        if records:
            in_memory, self._saved = (max(getattr(each, name) for each in records) for name in ("snapshot", "committed"))
            self._unsaved, self._held = in_memory > self._saved, max(in_memory, self._saved)

    def _newest_batch(self) -> tuple[int, ...]:
        batch = max((each.batch for each in self._records() if is_count(each.batch)), default=0)
        if batch:
            self._batch = self.generation, self.attempt, 0 if batch % self._processes else batch // self._processes
        return self._batch

    def _too_late(self, kind: str, generation: int, deadline: float) -> bool:
        """Return whether training has used up its time to save and leave. The time starts when we receive the request, because
        clocks may differ; a new deadline restarts it."""
        request, now = (kind, generation, deadline), self._clock()
        if self._request is None or self._request[0] != request:
            left_s = deadline - time.time() if self._leave_s is None else self._leave_s
            self._request = request, now + left_s
        return now > self._request[1]

    def _report_leaving(self) -> None:
        if not self._reported_leaving:
            self._reported_leaving = True
            self._read_steps()
            self._client.report(standing=MemberState.LEAVING, held=self._held, owes=True)
