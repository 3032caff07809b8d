"""Runs on each board in this process, on a simulated clock: without sockets, threads or waiting.

The coordinators are the real ones: the launcher, worker 0, members elected in an etcd, and the operator in its simulated cluster.
So are the members' sides of the boards and all that is written there; only what carries it is simulated. Members do what
`rendezvous.membership` makes of what they hear, and whoever dies is started again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

from clocks import Machine
from outlast.base.clock import Clock
from outlast.base.errors import EtcdError, Superseded
from outlast.base.typed_json import decode
from outlast.job import contract, spec
from outlast.job.ledger import Ledger
from outlast.kubernetes import board
from outlast.kubernetes.api import kinds
from outlast.local.backend import LocalBackend
from outlast.local.launcher import Launcher
from outlast.local.state_dir import StateDir
from outlast.local.worker_processes import Ended, Worker
from outlast.rendezvous import coordinator, worker0
from outlast.rendezvous.coordinator import PersistedState
from outlast.rendezvous.etcd import election, key_schema
from outlast.rendezvous.etcd.gateway import KeyValue
from outlast.rendezvous.etcd.member import EtcdMember, Identity
from outlast.rendezvous.messages import Gone, Published, Report
from outlast.rendezvous.transports import sockets
from outlast.rendezvous.who_trains import Call, MemberState, State, World
from simulated import Cluster
from simulated_etcd import Link, SimulatedEtcd, Watch

TICK_S = 0.5
RETURNS_S = 1.0
"""Seconds after which a worker that has ended is started again."""
GRACE_S = 75.0
"""Seconds that a worker has to leave."""
NO_PID = (1 << 22) + 1
"""A number that no process has: tests must not signal one."""
KILLED = {"rank": 0, "code": 137, "reason": "a rank was killed by SIGKILL", "time": 0.0}


def a_job(workers: int, least: int, limit: int) -> dict[str, Any]:
    fields = {"script": "train.py", "workers": {"replicas": workers, "min": least}, "restarts": {"limit": limit}}
    return kinds.ELASTIC_JOB.document({"name": "job"}, spec=fields)


def a_launcher(directory: Path, machine: Machine, **fields: object) -> Launcher:
    """One of a job that was just submitted, on the clocks of `machine`. Nothing is started."""
    (directory / "train.py").write_text("")
    document = {**a_job(2, 1, 9), "spec": {"script": "train.py", "workers": {"replicas": 2}, **fields}}
    (directory / "job.yaml").write_text(json.dumps(document))
    backend = LocalBackend(directory / "state", start=lambda *_, **_env: None)
    backend.submit(spec.load(directory / "job.yaml"), source=directory / "job.yaml")
    return Launcher(StateDir(directory / "state" / "jobs" / "job"), machine.awake())


@dataclass
class Process:
    side: Any
    report: Report
    frozen: bool = False
    """Whether it is stopped: it does nothing, and its connection stays."""
    cut: bool = False
    """Whether it does not reach the board."""
    hangs: bool = False
    """Whether its training does not stop when it is told to."""
    heard_at: float = 0.0
    leaves_by: float = math.inf
    """The end of its grace period, once it leaves."""
    reads: bool = False
    """Whether it is connected."""
    written: Report | None = None
    line: Any = None
    """`written` as it arrives."""
    past: list[dict[str, Any]] = field(default_factory=list)


class Run:
    """A run of some workers. `passes` lets time pass."""

    name: str
    counts_deaths = False
    """Whether the coordinator learns of the end of processes otherwise, and counts it."""
    remembers = True
    """Whether a coordinator leaves a successor what it has counted."""

    def __init__(self, directory: Path, workers: int = 3, *, least: int = 1, limit: int = 9) -> None:
        self.directory, self.workers, self.least, self.limit = directory, workers, least, limit
        self.sizes = tuple(range(least, workers + 1))
        self.machine = Machine()
        self.clock = self.machine.awake()
        self.members: dict[int, Process] = {}
        self.broken: set[frozenset[int]] = set()
        """Pairs of members between which nothing passes."""
        self.lies: dict[int, tuple[int, ...]] = {}
        """Whom members falsely say that they do not hear."""
        self.check: Callable[[State, State], None] = lambda before, after: None
        """Called with the coordinator's state before and after each decision, where it has such a state."""
        self.worlds: dict[int, World] = {}
        self.calls: dict[int, Call] = {}
        """The last call for each generation."""
        self._return_at: dict[int, float] = {}
        self._back_at = -math.inf
        """When there is a coordinator again."""
        self.begin()
        for id in range(workers):
            self.start(id)

    @property
    def now(self) -> float:
        return self.machine.monotonic

    # What a board has of its own

    def begin(self) -> None:
        """Start the first coordinator."""

    state: PersistedState
    """What the coordinator has published, and what a successor has of it."""

    def connect(self, id: int) -> Any:
        """Return the side of the board of a new process."""

    def exchange(self, process: Process) -> None:
        """Write the report of a process, and read what is published."""

    def gone(self, id: int, process: Process, *, in_order: bool) -> None:
        """Note that a process has ended."""

    def decide(self) -> None:
        """Let the coordinator act."""

    def away(self, seconds: float = 0.0) -> None:
        """The coordinator is lost; its successor comes after so many seconds."""
        self._back_at = self.now + seconds

    def outage(self, seconds: float) -> None:
        """The board itself is away for so long, which is not there without a coordinator where members connect to that."""
        self.away(seconds)

    def stall(self, seconds: float) -> None:
        """The coordinator does nothing for so long, and then goes on."""
        self._back_at = self.now + seconds

    def lose_messages(self, share: float) -> None:
        """So many requests to the board, or their answers, are lost. A connection loses none."""

    def heal(self) -> None:
        """Nothing is broken any more, and there is a coordinator."""
        self._back_at = -math.inf
        self.lose_messages(0.0)
        self.cut()
        self.lies.clear()
        for id, process in self.members.items():
            process.hangs = False
            self.freeze(id, False)
            self.detach(id, False)

    def disturb(self, *, wall_s: float = 0.0, slept_s: float = 0.0) -> None:
        """The clock of the coordinator's machine is set, or all machines sleep."""
        self.machine.goes_on(0.0, wall=wall_s + slept_s)

    # What members do

    def passes(self, seconds: float = TICK_S) -> None:
        for _ in range(max(1, round(seconds / TICK_S))):
            self.machine.goes_on(TICK_S)
            for id in [id for id, at in self._return_at.items() if self.now >= at]:
                self.start(id)
            for id, process in list(self.members.items()):
                if not process.frozen and self.members.get(id) is process:
                    self._act(id, process)
            self.decide()
            self.observe()

    def observe(self) -> None:
        """Check what may never be, whatever happens."""
        if called := self.pending:
            self.calls[called.generation] = called
        new = self.state.world
        if new is None:
            return
        new = replace(new, at=0.0)
        if new.generation not in self.worlds:
            newest = max(self.worlds, default=0)
            assert new.generation > newest, f"generation {new.generation} after {newest}"
            assert self.least <= len(set(new.members)) == len(new.members) <= self.workers, new
        assert self.worlds.setdefault(new.generation, new) == new, "two worlds of one generation"

    def until(self, condition: Callable[[], object], seconds: float = 120.0) -> None:
        end = self.now + seconds
        while not condition():
            assert self.now < end, (self.state, self.members)
            self.passes()

    def train(self) -> int:
        """Let time pass until all train together; returns the generation."""
        self.until(lambda: len(self.training()) == self.workers)
        return max(self.worlds)

    def training(self) -> list[int]:
        world, ids = self.state.world, []
        for process in self.members.values():
            if world and process.report.standing == MemberState.TRAINING and process.report.generation == world.generation:
                ids.append(process.side.id)
        return sorted(ids) if world and not self.pending and set(ids) == set(world.members) else []

    @property
    def pending(self) -> Call | None:
        """The call for a world that is not there yet."""
        called, world = self.state.called, self.state.world
        return called if called and called.generation > (world.generation if world else 0) else None

    def _act(self, id: int, process: Process) -> None:
        try:
            self.exchange(process)
        except Superseded:
            return self.exit(id, process)
        told, me, id_ = process.side.published(), process.report, process.side.id
        called = told.called.generation if told.called else 0
        if told.closed:
            return self.exit(id, process, returns=told.closed.code == contract.Exit.INTERRUPTED)
        match me.standing:
            case MemberState.WAITING if (world := told.world) and world.generation > me.generation and id_ in world.members:
                process.past = []
                joined = {"generation": world.generation, "failed": False, "failure": None, "held": 0, "owes": True}
                process.report = me.changed("training", **joined)
            case MemberState.TRAINING | MemberState.DONE if (
                called > me.generation
                and told.called
                and (not process.hangs and (me.standing == "training" or not told.called.planned))
            ):
                process.report = me.changed("waiting", held=1, owes=not told.called.planned)
            case MemberState.LEAVING if called > me.generation or self.now > process.leaves_by:
                return self.exit(id, process)
        unheard = self._unheard(process)
        refused = tuple(other for other in unheard if other not in {each.side.id for each in self.members.values()})
        if (unheard, refused) != (process.report.unheard, process.report.refused):
            process.report = replace(process.report, unheard=unheard, refused=refused)

    def _unheard(self, process: Process) -> tuple[int, ...]:
        world = process.side.published().world
        if not world or process.report.generation != world.generation or process.report.standing != MemberState.TRAINING:
            return ()
        broken = {other for other in world.members if frozenset((other, process.side.id)) in self.broken}
        return tuple(sorted(broken | {*self.lies.get(process.side.id, ())} & {*world.members}))

    def exit(self, id: int, process: Process, *, returns: bool = True) -> None:
        """It ends in order."""
        if self.members.get(id) is process:
            del self.members[id]
            if returns:
                self._return_at[id] = self.now + RETURNS_S
        self.gone(id, process, in_order=True)

    def has(self, id: int) -> bool:
        """Whether there is a member of that number."""
        return id in self.members

    def is_known(self) -> bool:
        newest, here = self.state.world, [each.report for each in self.members.values() if not each.frozen and not each.cut]
        return (MemberState.TRAINING, newest and newest.generation) in [(each.standing, each.generation) for each in here]

    def forget(self) -> None:
        """All is lost that a coordinator has written."""

    def scale(self, replicas: int) -> None:
        """The user wants so many, where that can be changed."""

    # What happens to them

    def start(self, id: int) -> None:
        self._return_at.pop(id, None)
        side = self.connect(id)
        self.members[id] = Process(side, Report("run", id, MemberState.WAITING, address=f"10.0.0.{id}:1"), heard_at=self.now)

    def die(self, id: int) -> None:
        """It is killed, which the others notice by errors of their own."""
        process = self.members.pop(id)
        self._return_at[id] = self.now + RETURNS_S
        self.gone(id, process, in_order=False)
        self._echo(process)

    def fail(self, id: int, failure: dict[str, Any] = KILLED) -> None:
        """One of its ranks fails, by which those of the others do; the others may say so first."""
        process = self.members[id]
        if process.report.standing == MemberState.TRAINING:
            process.report = process.report.changed("waiting", failed=True, failure=failure)
            self._echo(process)

    def _echo(self, cause: Process) -> None:
        echo = {"rank": 0, "code": 1, "reason": "connection reset", "echo": True, "time": 0.0}
        for process in self.members.values():
            me = process.report
            if not process.frozen and me.standing == MemberState.TRAINING and me.generation == cause.report.generation:
                process.report = me.changed("waiting", failed=True, failure=echo)

    def repair(self, id: int) -> None:
        """One of its ranks is killed, and the members go on in another attempt without the coordinator."""
        for process in self.members.values():
            me = process.report
            past = {"generation": me.generation, "attempt": me.attempt + 1, "worker": id, "failure": KILLED}
            process.past = [*process.past, past]
            process.report = replace(me, attempt=me.attempt + 1, past=tuple(process.past))

    def leave(self, id: int) -> None:
        process = self.members[id]
        if process.report.standing == MemberState.TRAINING:
            process.report, process.leaves_by = process.report.changed("leaving"), self.now + GRACE_S
        elif process.report.standing == MemberState.WAITING:
            self.exit(id, process)

    def finish(self) -> None:
        for process in self.members.values():
            process.report = process.report.changed("done")

    def cut(self, *ids: int) -> None:
        """Nothing passes between these members and the others; none is an end of all cuts."""
        others = set(range(self.workers)) - set(ids)
        self.broken = {frozenset((one, other)) for one in ids for other in others}

    def freeze(self, id: int, frozen: bool = True) -> None:
        if id in self.members:
            self.members[id].frozen = frozen

    def detach(self, id: int, cut: bool = True) -> None:
        """It does not reach the board."""
        self.members[id].cut = cut


class OnSockets(Run):
    """Members connect to the coordinator, which sends each what concerns it."""

    owner: Any = None
    """The process that coordinates; None while there is none."""

    def connect(self, id: int) -> sockets.MemberSocket:
        if before := self.members.pop(id, None):
            self._lose(before)
        return sockets.MemberSocket("unix:///nowhere", run="run", id=id)

    @property
    def state(self) -> PersistedState:
        if self.owner is not None:
            self._state = self.owner.state.persisted(self.clock())
        return self._state

    def exchange(self, process: Process) -> None:
        if self.owner is None or process.cut:
            return self._lose(process)
        process.reads, process.heard_at = True, self.now
        if process.report is not process.written:
            process.written, line = process.report, json.loads(process.side._line(process.report))
            process.line = decode(sockets._Line, line).report
        self.owner._take(process.line)

    def send(self, to: Iterable[int], kind: str, content: Any) -> None:
        """As `sockets.Server.send`."""
        for process in [self.members[id] for id in to if id in self.members and self.members[id].reads]:
            process.side._on_message(json.loads(json.dumps({kind: dataclasses.asdict(content)})))

    def _lose(self, process: Process) -> None:
        if process.reads:
            process.reads = False
            if self.owner is not None:
                self.owner._take(Gone(process.side.id))

    def gone(self, id: int, process: Process, *, in_order: bool) -> None:
        self._lose(process)

    def decide(self) -> None:
        if self.owner is None and self.now >= self._back_at:
            self.succeed()
        for process in list(self.members.values()):
            if process.frozen and self.now - process.heard_at > sockets.SILENCE_S:
                self._lose(process)
        if self.owner is not None and self.now >= self._back_at:
            before = self.owner.state
            self.tick()
            self.check(before, self.owner.state)

    def away(self, seconds: float = 0.0) -> None:
        super().away(seconds)
        self._state, self.owner = self.state, None
        for process in self.members.values():
            process.reads = False

    def succeed(self) -> None:
        """Start the next coordinator."""

    def tick(self) -> None:
        """Let it decide."""


class OnLauncher(OnSockets):
    """A launcher sees the end of its workers' processes, starts them again, and keeps its state in a file."""

    name = "launcher"
    counts_deaths = True

    def begin(self) -> None:
        self._present: dict[int, Worker] = {}
        self._ended: list[Ended] = []
        workers = {"replicas": self.workers, "min": self.least}
        self._own(a_launcher(self.directory, self.machine, workers=workers, restarts={"limit": self.limit}))

    def _own(self, launcher: Launcher) -> None:
        launcher.server = self  # type: ignore[assignment]
        launcher.pool.present, launcher.pool.kill = self._present, self._kill  # type: ignore[method-assign]
        launcher.pool.ended = lambda: [self._ended.pop() for _ in self._ended[:]]  # type: ignore[method-assign, assignment, return-value]
        launcher.pool.adopt = lambda records: None  # type: ignore[method-assign]
        launcher.pool.ask_to_leave = self._ask_to_leave  # type: ignore[method-assign]
        self.owner = launcher

    def succeed(self) -> None:
        self._own(Launcher(StateDir(self.directory / "state" / "jobs" / "job"), self.machine.awake()))
        self.owner._recover()

    def forget(self) -> None:
        """It is lost with what it has written. The output has the generation."""
        StateDir(self.directory / "state" / "jobs" / "job").recovery.unlink(missing_ok=True)
        self.away()

    def scale(self, replicas: int) -> None:
        self.owner.request = replace(self.owner.request, replicas=replicas)

    def _ask_to_leave(self, worker: Worker) -> None:
        worker.leaving = True
        if worker.index in self.members:
            self.leave(worker.index)

    def _kill(self, index: int, why: str) -> None:
        if index in self.members:
            self.die(index)

    def start(self, id: int) -> None:
        if self.owner is None:  # who would start it?
            self._return_at[id] = self.now + RETURNS_S
            return
        super().start(id)
        self._present[id] = Worker(id, NO_PID, 1)

    def gone(self, id: int, process: Process, *, in_order: bool) -> None:
        super().gone(id, process, in_order=in_order)
        if worker := self._present.pop(id, None):
            self._ended.append(Ended(worker, contract.Exit.INTERRUPTED if in_order else 137, ""))

    def tick(self) -> None:
        for id, process in list(self.members.items()):
            if process.frozen and not process.reads:
                self.die(id)  # as `WorkerPool.silent` has it
        self.owner._collect_ended()
        self.owner._decide()


class OnWorker0(OnSockets):
    """Worker 0 coordinates as long as its process lives. Its successor has the newest generation from the run's output."""

    name = "worker 0"
    remembers = False

    def begin(self) -> None:
        job = spec.parse(json.dumps(a_job(self.workers, self.least, self.limit)))
        generation, ledger = max(self.worlds, default=0), Ledger(self.directory / contract.LEDGER, "worker-0")
        over = lambda *_: None  # noqa: E731
        host = worker0.Host(job, run="run", key=b"", generation=generation, ledger=ledger, ended=over, broken=over)
        host._clock, host._server, host.state = self.clock, self, coordinator.after(generation, self.clock())  # type: ignore
        self.owner = host

    succeed = begin

    def gone(self, id: int, process: Process, *, in_order: bool) -> None:
        if id == 0 and self.owner is not None and self.owner.state.closed is None:
            super().away(RETURNS_S)
        super().gone(id, process, in_order=in_order)

    def away(self, seconds: float = 0.0) -> None:
        if 0 in self.members:
            self.die(0)
        self._return_at[0] = self._back_at = self.now + seconds

    def forget(self) -> None:
        self.away(RETURNS_S)  # it leaves nothing

    def tick(self) -> None:
        if self.owner.state.closed is None:
            self.owner._try_to_decide()


@dataclass
class EtcdSide:
    """A process and its connection to etcd."""

    member: EtcdMember
    link: Link
    watch: Watch

    @property
    def id(self) -> int:
        return self.member.id

    def published(self) -> Published:
        return Published(self.member.called, self.member.world, self.member.closed, self.member.why)


KEYS = key_schema.Keys.of("/outlast", "run")


class OnEtcd(Run):
    """Members and candidates meet in an etcd. What they hear of it may come late or twice."""

    name = "etcd"
    nnodes = ""

    def begin(self) -> None:
        self.rng, self.etcd, self._made = random.Random(0), SimulatedEtcd(), 0
        self.etcd.wrote = self._wrote
        self.state = key_schema.Published(by="", incarnation="")
        self.candidates: list[tuple[election.Candidate, Watch, Link]] = []
        self._up_at = self._stalls_until = self._loss = 0.0

    def _token(self) -> str:
        self._made += 1
        return f"process-{self._made}"

    def _clock(self) -> Clock:
        """A clock of a machine of its own."""
        skew = self.rng.uniform(-1e4, 1e4)
        return Clock(lambda: self.machine.wall + skew, lambda: self.machine.monotonic + skew)

    def _stand(self) -> None:
        job = spec.parse(json.dumps(a_job(self.workers, self.least, self.limit)))
        ours = {"nnodes": self.nnodes, "replicas": 0 if self.nnodes else self.workers}
        config = election.ElectionConfig(
            coordinator.Settings.of(job.spec), Mock(), self._token(), clock=self._clock(), random=self.rng.random,
            nonce=lambda: str(self.rng.random()), **ours,
        )  # fmt: skip
        link = Link(self.etcd, self.rng)
        made = election.Candidate(link, KEYS, config)
        self.candidates.append((made, Watch(link, lambda: made.prefix, made.listed, made.happened), link))

    def _wrote(self, kv: KeyValue) -> None:
        if kv.key == KEYS.published:
            said = key_schema.Published.loads(kv.value)
            leader = key_schema.Leader.loads(self.etcd.kvs[KEYS.leader].value)
            assert said
            assert leader
            assert leader.token == said.by, "who was not elected has written"
            self.state = said
            self.observe()

    def connect(self, id: int) -> EtcdSide:
        link = Link(self.etcd, self.rng)
        who = Identity("run", None if self.nnodes else id, self._token(), nnodes=self.nnodes, most=self.workers)
        clocks = {"clock": self._clock(), "wall": lambda: self.machine.wall}
        member = EtcdMember(link, KEYS, who, choose=min, **clocks)
        return EtcdSide(member, link, Watch(link, lambda: KEYS.decided, member.listed, member.happened))

    def exchange(self, process: Process) -> None:
        side = process.side
        side.link.cut, side.link.loss = process.cut, self._loss
        side.watch.hear(self.rng)
        side.member.report = process.report
        with contextlib.suppress(EtcdError):
            if side.member.synced:
                side.member.publish()

    def gone(self, id: int, process: Process, *, in_order: bool) -> None:
        if in_order:
            with contextlib.suppress(EtcdError):
                process.side.member.leave()

    def decide(self) -> None:
        self.etcd.pass_(TICK_S)
        if not self.etcd.up and self.now >= self._up_at:
            self.etcd.restart()
        while len(self.candidates) < 2 and self.now >= self._back_at:
            self._stand()
        for candidate, watch, link in self.candidates:
            if candidate.term is None or self.now >= self._stalls_until:
                link.loss = self._loss
                watch.hear(self.rng)
                with contextlib.suppress(EtcdError):
                    candidate.turn()

    def away(self, seconds: float = 0.0) -> None:
        super().away(seconds)
        for candidate, *_ in [] if seconds else self.candidates:  # they end in order
            with contextlib.suppress(EtcdError):
                candidate.resign()
        self.candidates.clear()

    def outage(self, seconds: float) -> None:
        self.etcd.up, self._up_at = False, self.now + seconds

    def stall(self, seconds: float) -> None:
        self._stalls_until = self.now + seconds

    def lose_messages(self, share: float) -> None:
        self._loss = share

    def forget(self) -> None:
        """It has lost its data, which those who have heard of the world tell the next one."""
        self.etcd.lose_data()
        self.etcd.restart()

    def disturb(self, *, wall_s: float = 0.0, slept_s: float = 0.0) -> None:
        super().disturb(wall_s=wall_s, slept_s=slept_s)
        self.etcd.pass_(slept_s)


class OnTorchrun(OnEtcd):
    """Torchruns at an etcd: any process may take any index, and whoever is lost is not started again by us."""

    name = "torchrun"

    @property
    def nnodes(self) -> str:  # type: ignore[override]
        return f"{self.least}:{self.workers}"


class OnOperator(Run):
    """The operator, in the simulated cluster, which has agents of its own."""

    name = "operator"
    counts_deaths = True

    def begin(self) -> None:
        workers = {"replicas": self.workers, "min": self.least, "max": self.workers}
        self.cluster = Cluster(workers, steps=10**6, restarts={"limit": self.limit})
        self.cluster.mesh, self._up_at = True, 0.0

    @property
    def now(self) -> float:
        return self.cluster.now

    @property
    def state(self) -> PersistedState:
        status = self.cluster.status
        said = decode(board._Rendezvous, status.get("rendezvous") or {})
        called = said.called and Call(said.called.generation, said.called.reason, said.called.planned)
        counted, failure = status.get("judged") or {}, status.get("lastFailure")
        counts = {"counted": counted.get("generation", 0), "attempt": counted.get("attempt", 0)}
        return PersistedState(said.world, called, said.closed, restarts=status.get("restarts", 0), failure=failure, **counts)

    def passes(self, seconds: float = 1.0) -> None:
        for _ in range(max(1, round(seconds))):
            self.cluster.reached = self.now >= self._up_at
            self.cluster.pass_()
            if self.now >= self._back_at:
                self.cluster.look()
            self.observe()

    def training(self) -> list[int]:
        world, agents = self.state.world, self.cluster.agents.values()
        here = [agent for agent in agents if agent.standing == "training" and not agent.frozen]
        ids = sorted(agent.index for agent in here if world and agent.generation == world.generation)
        return ids if world and sorted(world.members) == ids and not self.pending else []

    def start(self, id: int) -> None: ...

    def has(self, id: int) -> bool:
        return self.cluster.agent_of(id) is not None

    def is_known(self) -> bool:
        return False  # the status is the job's own

    def scale(self, replicas: int) -> None:
        self.cluster.change(replicas=replicas)

    def away(self, seconds: float = 0.0) -> None:
        super().away(seconds)
        self.cluster.since, self.cluster.clock = self._back_at, self.cluster.started()

    def outage(self, seconds: float) -> None:
        self._up_at = self.now + seconds

    def heal(self) -> None:
        super().heal()
        self._up_at = 0.0
        for agent in self.cluster.agents.values():
            agent.frozen = False
        self.cluster.cut = set()

    def disturb(self, *, wall_s: float = 0.0, slept_s: float = 0.0) -> None:
        self.cluster.set_by += wall_s
        if slept_s:
            self.cluster.sleep(slept_s)

    def die(self, id: int) -> None:
        self.cluster.end(self.cluster.documents["Pod", f"train-worker-{id}"], 137)

    def fail(self, id: int, failure: dict[str, Any] = KILLED) -> None:
        self.cluster.fail(id)
        self.cluster.agent_of(id).failure = failure  # type: ignore[union-attr]

    def repair(self, id: int) -> None:
        self.cluster.repair(id)

    def leave(self, id: int) -> None:
        meta = self.cluster.documents["Pod", f"train-worker-{id}"]["metadata"]
        self.cluster.delete(kinds.POD, meta["name"], meta["uid"])

    def finish(self) -> None:
        self.cluster.steps = self.cluster.step

    def cut(self, *ids: int) -> None:
        super().cut(*ids)
        where = {agent.index: self.cluster.node_of(agent) for agent in self.cluster.agents.values()}
        self.cluster.broken = {frozenset(where[id] for id in pair) for pair in self.broken if pair <= where.keys()}

    def freeze(self, id: int, frozen: bool = True) -> None:
        if agent := self.cluster.agent_of(id):
            agent.frozen = frozen

    def detach(self, id: int, cut: bool = True) -> None:
        node = {self.cluster.node_of(agent) for agent in self.cluster.agents.values() if agent.index == id}
        self.cluster.cut = self.cluster.cut | node if cut else self.cluster.cut - node


BOARDS: dict[str, type[Run]] = {each.name: each for each in (OnLauncher, OnWorker0, OnEtcd, OnTorchrun, OnOperator)}
