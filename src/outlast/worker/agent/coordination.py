"""An agent's tasks for the whole run if there is no launcher: it claims the run, coordinates its rendezvous, and records its end.
Every agent claims the run and records its end, since the other workers may be gone. `rendezvous.transport.Mode` says which agent
coordinates."""

from __future__ import annotations

import functools
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast.base.errors import OutlastError
from outlast.job import contract
from outlast.job.contract import Env
from outlast.job.ledger import Ledger
from outlast.rendezvous import transport
from outlast.rendezvous.messages import Closed
from outlast.rendezvous.transport import Mode
from outlast.worker import tracking

if TYPE_CHECKING:
    from outlast.job import spec
    from outlast.job.workerfiles.log_pipe import Output
    from outlast.rendezvous.etcd import client as etcd
    from outlast.rendezvous.worker0 import Host
    from outlast.storage import store
    from outlast.storage.runs import heartbeat
    from outlast.worker.agent import join_run

RECORD_TIMEOUT_S = 10.0


class Coordination:
    """One agent's tasks for the whole run. `claim` completes `environ`, the worker's environment. `lost(reason)` is called if
    another machine takes the run, and `broken(reason)` if coordination fails permanently."""

    def __init__(
        self, job: spec.Job, environ: dict[str, str], *, lost: Callable[[str], None], broken: Callable[[str], None]
    ) -> None:
        self.mode = transport.mode(environ[Env.RENDEZVOUS])
        self._job, self._environ = job, environ
        self._lost, self._broken = lost, broken
        self.index = int(environ[Env.WORKER])
        self.output = Path(environ[Env.OUTPUT])
        self._store = environ.get(Env.STORE, "")
        self._owner = environ.get(Env.RUN, "")
        """The run's owner; see `join_run`."""
        self.run_end: Closed | None = None
        self._coordinator: Host | etcd.Running | None = None
        self._heartbeat: heartbeat.Heartbeats | None = None
        self._recording: threading.Thread | None = None
        self._reporting: threading.Thread | None = None

    def claim(self, log: Output) -> join_run.Ended | None:
        """Determine this worker's run, and keep the `log` in that run's output. Returns the run's end if it has ended."""
        if self.mode is Mode.LAUNCHER:
            return None
        from outlast.storage import runs
        from outlast.storage.runs import heartbeat
        from outlast.worker.agent import join_run

        environ = self._environ
        where = self._place()
        if environ.get(Env.STAY) == "1" and runs.read(where) is None:
            others = join_run.others(environ[Env.RENDEZVOUS], socket.getfqdn(), self.index, self._job.spec.workers.max)
            if end := join_run.query_end(others, self._owner):
                return end
        self.output.mkdir(parents=True, exist_ok=True)
        new = join_run.record(self._job.metadata.name, self._owner)
        home, fresh = join_run.home(environ), environ.get(Env.FRESH) == "1"
        run = join_run.take(where, new, home=home, fresh=fresh, say=_say)
        if isinstance(run, join_run.Ended):
            return run
        environ[Env.RUN], environ[Env.OWNER] = run, self._owner
        if self._store:
            if self._heartbeat is None:  # otherwise this is another attempt
                self._heartbeat = heartbeat.Heartbeats(lambda: where, run, self._owner, home, self.index, self._lost)
            join_run.set_aside(self.output, run, _say)
            join_run.fetch_own(where, self.output, self.index)
        log.keep(self.output / contract.LOGS / contract.worker_log(self.index))
        return None

    def leaves(self) -> None:
        """Let the heartbeats say that this worker leaves."""
        if self._heartbeat:
            self._heartbeat.leaving = True

    def _place(self) -> store.Store:
        from outlast.storage import store

        return store.open_(self._store or f"file://{self.output}")

    def begin(self) -> None:
        if self.mode in (Mode.OPERATOR, Mode.ELECTED):
            from outlast.worker.agent import join_run

            # The next generation must exceed this one even if the coordinator has lost its state.
            newest = join_run.newest_generation(self._place(), self.output, self._environ[Env.RUN], stored=bool(self._store))
            self._environ[Env.GENERATION] = str(newest)
        if self.mode is Mode.ELECTED:
            self._run_for_election()
        elif self.mode is Mode.WORKER_0 and self.index == 0:
            self._coordinate()

    def _coordinate(self) -> None:
        from outlast.job import sealed_lines
        from outlast.rendezvous import worker0
        from outlast.worker.agent import join_run

        run = self._environ[Env.RUN]
        generation = join_run.generation(self._place(), self.output, run, stored=bool(self._store))
        host = worker0.Host(
            self._job,
            run=run,
            key=sealed_lines.key(self._environ),
            generation=generation,
            ledger=self._ledger,
            ended=self.finished,
            broken=self._broken,
        )
        host.start(self._environ[Env.RENDEZVOUS])
        self._coordinator = host

    def _run_for_election(self) -> None:
        from outlast.rendezvous import coordinator
        from outlast.rendezvous.etcd import client as etcd
        from outlast.rendezvous.etcd import gateway as servers
        from outlast.rendezvous.etcd import key_schema
        from outlast.rendezvous.etcd.election import ElectionConfig

        environ = self._environ
        config = ElectionConfig(coordinator.Settings.of(self._job.spec), self, replicas=self._job.spec.workers.replicas)
        where, name = servers.address(environ[Env.RENDEZVOUS], environ=environ), key_schema.run_name(environ[Env.RUN], environ)
        candidate = etcd.Running(where, name, config, id=lambda: self.index)
        candidate.start()
        self._coordinator = candidate

    def finished(self, state: str, reason: str, code: int) -> None:
        """Record the run's end, so that nobody trains it again, and report it to the trackers, both in the background."""
        from outlast.storage import runs

        run, owner = self._environ[Env.RUN], self._environ[Env.OWNER]

        def end() -> None:
            try:
                runs.end(self._place(), run, state, reason, code, by=owner)
            except OutlastError as problem:
                _say(f"the end of the run could not be recorded: {problem}")

        def report() -> None:
            if problem := tracking.end(self.output, self._environ, state):
                _say(problem)

        self._reporting = threading.Thread(target=report, daemon=True)
        self._reporting.start()
        self._recording = threading.Thread(target=end, daemon=True)
        self._recording.start()

    def operator_ended_run(self, end: Closed) -> None:
        """Remember how the operator ended the run. Called by the thread that watches the operator."""
        self.run_end = end

    def record_end_from_operator(self) -> None:
        """Record the run's end for the operator, which has no access to stores."""
        if end := self.run_end:
            self.finished("Failed" if end.code else "Succeeded", end.reason, end.code)

    def tell_account(self, report: Mapping[str, Any]) -> None:
        """Report an ended run's goodput and losses to the operator, if this worker's upload process has computed them."""
        if report.get("goodput") is None or self.run_end is None:
            return
        from outlast.base.errors import ClusterError

        try:
            transport.of(contract.KUBERNETES).report_account(self._job.metadata.name, self.index, self._environ, report)
        except ClusterError as problem:
            _say(f"the goodput of the run could not be reported: {problem}")

    def end_for_others(self, code: int) -> str:
        """Return the answer to other workers' queries about the run's end; empty if only this worker has ended."""
        if self.mode is Mode.LAUNCHER or code == contract.Exit.MISCONFIGURED:
            return ""
        from outlast.worker.agent import join_run

        reason = f"run {self._owner} has ended before, as another worker reports; nothing is left to do"
        return join_run.Ended(self._owner, reason, code).dumps()

    def close(self) -> None:
        """Wait until the run's end is recorded and the other workers are notified."""
        if self._coordinator:
            self._coordinator.close()
        for thread in filter(None, (self._recording, self._reporting)):
            thread.join(RECORD_TIMEOUT_S)
        if self._heartbeat:
            self._heartbeat.leave()

    # Called by an elected coordinator

    @functools.cached_property
    def _ledger(self) -> Ledger:
        return Ledger(self.output / contract.LEDGER, "decider" if self.mode is Mode.WORKER_0 else f"decider-{self.index}")

    def say(self, text: str) -> None:
        _say(text)

    def event(self, kind: str, **facts: Any) -> None:
        self._ledger.write(kind, **facts)


def _say(text: str) -> None:
    print(f"outlast | {text}", flush=True)
