"""Coordination by worker 0, for pods without an operator or an etcd (`c10d://<full name of pod 0>:29400`).

Worker 0's agent runs a `Host` in a separate thread. The host may die and return: the other workers keep training, and report
their state to the next host. Only the history of failures is lost. No message can end the host: an invalid message closes its
sender's connection, and a failed decision is retried while training continues.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable

from outlast.base import tcp
from outlast.base.clock import Awake
from outlast.base.errors import OutlastError
from outlast.job import spec
from outlast.job.ledger import Ledger
from outlast.job.status import State
from outlast.rendezvous import coordinator, who_trains
from outlast.rendezvous.transports import sockets

TICK_S = 0.1
LISTENING = 3
"""Length of the pause after a decision, in multiples of the decision's duration. The pause leaves time to process reports."""
LEAVE_S = 15.0
"""Seconds that the coordinator has to notify workers of the end."""
BROKEN_S = 30.0
"""Seconds for which decisions may fail before this worker is restarted."""


class Host:
    """The coordinator in worker 0. `generation` is the newest generation of earlier runs; `ended` receives the final state."""

    def __init__(
        self,
        job: spec.Job,
        *,
        run: str,
        key: bytes,
        generation: int,
        ledger: Ledger,
        ended: Callable[[State, str, int], None],
        broken: Callable[[str], None],
    ) -> None:
        self.settings, self._clock = coordinator.Settings.of(job.spec), Awake()
        self.state = coordinator.after(generation, self._clock())
        self._replicas = job.spec.workers.replicas
        self.event, self.finished, self._broken = ledger.write, ended, broken
        self._server = sockets.Server(run=run, take=self._take, key=key, clock=self._clock)
        self._wake = asyncio.Event()
        self._all_notified = threading.Event()
        self._printed = ""
        self._fails_since: float | None = None

    def start(self, endpoint: str) -> None:
        """Listen and decide in the background, on all addresses of this machine, or only on loopback for `localhost`. Raises
        OutlastError if the port is taken."""
        host, port = tcp.host_port(endpoint.removeprefix(sockets.TCP))
        anywhere = host != "localhost" and socket.has_dualstack_ipv6()
        try:
            family = socket.AF_INET6 if anywhere else socket.AF_INET
            name = "127.0.0.1" if host == "localhost" else ""
            sock = socket.create_server((name, port), family=family, backlog=1024, dualstack_ipv6=anywhere)
        except OSError as problem:
            raise OutlastError(f"the rendezvous cannot listen on port {port}: {problem.strerror}; free it") from problem
        threading.Thread(target=self._run, args=(sock,), name="outlast-host", daemon=True).start()

    def close(self) -> None:
        """Wait until every member has been notified of the end; returns at once if the run is not over."""
        if self.state.closed is not None:
            self._all_notified.wait(LEAVE_S)

    def _run(self, sock: socket.socket) -> None:
        try:
            asyncio.run(self._serve(sock))
        except Exception as bug:  # without this thread the run has no coordinator
            self._broken(f"the rendezvous has failed: {bug!r}")
            raise

    async def _serve(self, sock: socket.socket) -> None:
        await self._server.start(sock)
        leave_at = 0.0
        while not leave_at or (self.state.reports and self._clock() < leave_at):
            self._wake.clear()
            self._server.drop_silent()
            began = time.monotonic()
            if self.state.closed is None:
                self._try_to_decide()
            elif not leave_at:
                leave_at = self._clock() + LEAVE_S
            took_s = time.monotonic() - began
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), TICK_S)
            await asyncio.sleep(LISTENING * took_s)  # thousands of workers arrive one by one, and each decision reads all reports
        self._all_notified.set()
        await self._server.stop()

    def _try_to_decide(self) -> None:
        """Decide. After an error, the next tick tries again. Once decisions have failed for BROKEN_S, raises the error."""
        try:
            # We expect the pods in the spec, plus any other workers that report, as when the workload is scaled.
            self._take(coordinator.Tick(frozenset({*range(self._replicas), *self.state.reports})))
            self._fails_since = None
        except Exception:
            now = self._clock()
            if self._fails_since is None:
                self._fails_since = now
                print(f"outlast | the rendezvous could not decide, and tries again:\n{traceback.format_exc()}", file=sys.stderr)
            if now - self._fails_since > BROKEN_S:
                raise

    def _take(self, event: coordinator.Event) -> None:
        before = self.state
        self.state, effects = coordinator.step(self.settings, before, event, self._clock())
        for effect in effects:
            match effect:
                case coordinator.Send(to, kind, message):
                    self._server.send(to, kind, message)
                case who_trains.Wait(reason, steady=steady) if self.state.world is None and steady != self._printed:
                    self._printed = steady
                    self.say(reason)
                case _:
                    coordinator.show(effect, self)
        if self.state is not before:
            self._wake.set()

    def say(self, text: str) -> None:
        print(f"outlast | {text}", flush=True)
