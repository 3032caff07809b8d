"""A member's side of the mesh: one listening port, one thread, and a connection to each peer that it watches or messages.

    mesh = Mesh(3, "10.0.0.7", key, run="digits-1a2b")
    mesh.changed = lambda: report(mesh.unheard)
    mesh.handlers["attempt"] = lambda id, message: ...
    mesh.enter(4, (0, 1, 3, 7))
    mesh.learn(4, {0: "10.0.0.4:41123", ...})
    mesh.send(7, {"kind": "attempt", ...}).result()                raises Undelivered
    mesh.close()                                                   sends a goodbye

The watching side connects, so two members that watch each other have two connections. The peer's kernel answers our probes
(`connection.IDLE_S`) even while the peer's process is stopped or starved, so the mesh does not detect hangs; each agent detects
those of its own processes. Used by `rendezvous.membership`.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import secrets
import selectors
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from outlast.base.clock import Awake
from outlast.job import sealed_lines
from outlast.job.sealed_lines import Forged, OtherKey
from outlast.rendezvous.mesh import watched_peers
from outlast.rendezvous.mesh.connection import Connection, resolved
from outlast.rendezvous.mesh.peer import BROKEN_S, FIRST_S, WOKEN_S, Peer, Undelivered

__all__ = ["Mesh", "Undelivered"]

TICK_S = 1.0
"""Maximum duration of a wait, in seconds: `Awake` must be read every second."""
STOOD_S = 2.0
"""A turn that is late by this many seconds shows that this process or machine was paused."""
PROVE_S = 5.0
"""Timeout, in seconds, for a new connection to prove that it has the key."""
STRANGERS = 256
"""Maximum number of connections without proof of the key. If there are more, the oldest is closed."""
ANSWER_S = 5.0
"""Timeout, in seconds, for the acknowledgement of a message."""
Handler = Callable[[int, Mapping[str, Any]], None]


class _Caller:
    def __init__(self, connection: Connection, until: float) -> None:
        self.connection, self.until = connection, until
        self.id: int | None = None
        """The member's id, once the caller has proven that it has the key."""
        self.process = ""


class Mesh:
    """A member's side of the mesh. Any thread may use it. `changed` and `handlers` are called in the mesh's thread and must
    return at once."""

    def __init__(
        self, id: int, host: str, key: bytes, *, run: str = "", clock: Callable[[], float] | None = None, thread: bool = True
    ) -> None:
        """Listen on `host`. Raises OSError. If `thread` is False, the caller must call `turn`."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family, backlog=1024)
        self._listener.setblocking(False)
        name = self._listener.getsockname()
        self.address = f"{name[0]}:{name[1]}"
        """`host:port`, with a numeric host."""
        self.generation = 0
        """The generation that `unheard`, `refused` and `complete` describe."""
        self.unheard: tuple[int, ...] = ()
        """Watched peers that were heard before and are now silent or refuse connections. Peers that were never heard may run a
        version without a mesh."""
        self.refused: tuple[int, ...] = ()
        """The subset of `unheard` whose machines refuse connections, so their processes have ended."""
        self.complete = False
        """True if every watched peer of this world has been heard."""
        self.changed: Callable[[], None] = lambda: None
        self.handlers: dict[str, Handler] = {}
        """Handlers, keyed by message kind. Each is called with the sender's id and the message."""
        self._key, self._clock = sealed_lines.derived(key, "mesh"), clock or Awake()
        self._hello: dict[str, Any] = {"id": id, "run": run, "process": secrets.token_hex(8), "address": self.address}
        self._selector = selectors.DefaultSelector()
        self._peers: dict[int, Peer] = {}
        self._callers: dict[_Caller, None] = {}
        self._last_handled: dict[tuple[int, str], int] = {}
        """Number of the last message handled, keyed by the sender's id and process."""
        self._todo: collections.deque[Callable[[float], None]] = collections.deque()
        self._woken_until = 0.0
        self._other_keys: set[str] = set()
        """Addresses of peers that have another key, once printed."""
        self._over = self._ended = False
        self._lock = threading.RLock()
        self._bell, self._button = socket.socketpair()
        self._bell.setblocking(False)
        self._button.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="outlast-mesh", daemon=True)
        if thread:
            self._thread.start()

    @property
    def id(self) -> int:
        """This member's index; negative before one is assigned."""
        return int(self._hello["id"])

    @id.setter
    def id(self, id: int) -> None:
        self._hello["id"] = id

    # Called from any thread

    def enter(self, generation: int, members: Sequence[int]) -> None:
        """Enter a world, and watch only the peers that `watched_peers` chooses in it. When this returns, `unheard` describes the
        new world."""
        done = threading.Event()

        def do(now: float) -> None:
            self._enter(generation, tuple(members), now)
            done.set()

        self._do(do)
        if self._thread.ident:
            done.wait(TICK_S)

    def learn(self, generation: int, addresses: Mapping[int, str]) -> None:
        """Set the addresses of members of world `generation`. Does nothing if the mesh is in another world."""
        self._do(functools.partial(self._learn, generation, dict(addresses)))

    def send(self, id: int, message: Mapping[str, Any], *, within_s: float = ANSWER_S) -> Future[None]:
        """Send a message to any member. The member calls its handler for the message's `kind` at most once.

        The future completes once the member has handled the message. It raises `Undelivered` if the member has left, refuses
        connections, or does not answer.
        """
        future: Future[None] = Future()
        future.set_running_or_notify_cancel()

        def do(now: float) -> None:
            if self._over:
                future.set_exception(Undelivered("this worker has left the mesh"))
            elif id == self.id:
                self._handle(id, message)
                future.set_result(None)
            else:
                self._peer(id).send(message, future, now, within_s)

        self._do(do)
        return future

    def close(self) -> None:
        """Send a goodbye, so that no peer counts this member as lost, and disconnect."""
        if not self._thread.ident:
            self._close(self._clock())
            self._finish()
        elif not self._over:
            self._do(self._close)
            self._thread.join(2 * TICK_S)

    def abandon(self) -> None:
        """Stop as if the process had been killed, without a goodbye. For tests and benchmarks."""
        self._do(lambda now: setattr(self, "_over", True))
        self._thread.join(2 * TICK_S)

    def _do(self, task: Callable[[float], None]) -> None:
        with self._lock:
            if self._ended:
                task(self._clock())
                return
            self._todo.append(task)
            with contextlib.suppress(BlockingIOError):  # enough wake-ups are pending
                self._button.send(b"!")

    # Called in the mesh's thread

    def _run(self) -> None:
        while not self._over:
            try:
                self.turn(TICK_S)
            except Exception:  # without this thread, losses of peers would go unnoticed
                _print_problem(f"the mesh of worker {self.id} continues after:\n{traceback.format_exc()}")
                time.sleep(TICK_S)
        self._finish()

    def _finish(self) -> None:
        with self._lock:
            self._ended = True
            while self._todo:
                self._todo.popleft()(self._clock())
            self._release()

    def turn(self, longest_s: float) -> None:
        """Wait at most `longest_s` for events, and handle them."""
        begun, looked = self._clock(), time.monotonic()
        for peer in self._peers.values():
            if begun >= peer.due:
                peer.due = peer.turn(begun, self._patience(begun, peer))
        due = min((each.due for each in self._peers.values()), default=begun + longest_s)
        self._publish()
        ready = self._selector.select(max(0.0, min(due - begun, longest_s)))
        now = self._clock()
        if time.monotonic() - looked > longest_s + STOOD_S:
            self._woken_until = now + WOKEN_S
        for key, events in ready:
            if isinstance(key.data, Peer):
                key.data.ready(events, now)
            elif isinstance(key.data, _Caller):
                self._answer(key.data, events)
            elif key.fileobj is self._listener:
                self._accept(now)
            else:
                self._bell.recv(4096)
        while self._todo:
            self._todo.popleft()(now)
        for caller in [each for each in self._callers if each.id is None and now > each.until]:
            self._drop(caller)

    def _patience(self, now: float, peer: Peer) -> float:
        return WOKEN_S if now < self._woken_until else BROKEN_S if peer.met else FIRST_S

    def _accept(self, now: float) -> None:
        try:
            sock, _ = self._listener.accept()
        except (BlockingIOError, ConnectionError):  # the caller has disconnected
            return
        caller = _Caller(Connection(sock, "decider", self._key), now + PROVE_S)
        self._callers[caller] = None
        strangers = [each for each in self._callers if each.id is None]
        if len(strangers) > STRANGERS:
            self._drop(strangers[0])
        self._selector.register(sock, selectors.EVENT_READ, caller)
        self._answer(caller, 0)

    def _answer(self, caller: _Caller, events: int) -> None:
        connection = caller.connection
        try:
            for message in connection.receive() if events & selectors.EVENT_READ else ():
                self._on_message(caller, message)
            connection.flush()
        except (OSError, ValueError, RecursionError) as problem:  # disconnected, or is not a member; a member reconnects
            if isinstance(problem, OtherKey):
                self._print_other_key(connection.sock)
            self._drop(caller)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.writing else 0)
        self._selector.modify(connection.sock, events, caller)

    def _print_other_key(self, sock: socket.socket) -> None:
        """Print, once for each address, that the peer on that machine has another key. Others are strangers."""
        with contextlib.suppress(OSError):  # disconnected meanwhile
            host = sock.getpeername()[0]
            for peer in self._peers.values():
                if peer.address.rpartition(":")[0] == host and not peer.met and peer.address not in self._other_keys:
                    self._other_keys.add(peer.address)
                    _print_problem(
                        f"worker {peer.id} has another key than this worker, so neither can read the other's snapshots: the "
                        "Secret with the key was created or deleted during the run; cancel the job, and submit it again"
                    )

    def _on_message(self, caller: _Caller, message: Mapping[str, Any]) -> None:
        if caller.id is None:
            caller.id, caller.process, address = self._parse_hello(message.get("hello"))
            caller.connection.send({"hello": self._hello})
            peer = self._peer(caller.id)
            if address and not peer.address:
                peer.meet(address, self._clock())
            return
        number, content = message.get("number"), message.get("message")
        if not isinstance(number, int) or not isinstance(content, Mapping):
            return  # from a newer version
        handled = content.get("kind") in self.handlers
        if number > self._last_handled.get((caller.id, caller.process), 0):
            self._last_handled[caller.id, caller.process] = number
            if handled:
                self._handle(caller.id, content)
        caller.connection.send({"got" if handled else "unknown": number})

    def _parse_hello(self, hello: object) -> tuple[int, str, str]:
        """Return the sender's index, process and address. The address is empty if the sender is in an older world."""
        if not isinstance(hello, Mapping) or hello.get("run") != self._hello["run"]:
            raise Forged("it does not name this run")
        id, process, address = hello.get("id"), hello.get("process"), hello.get("address")
        if not (isinstance(id, int) and isinstance(process, str) and isinstance(address, str)):
            raise Forged("it does not identify itself")
        resolved(address)
        world = hello.get("generation", self.generation)  # older versions do not send their generation
        return id, process, address if isinstance(world, int) and world >= self.generation else ""

    def _handle(self, id: int, message: Mapping[str, Any]) -> None:
        try:
            self.handlers[message["kind"]](id, message)
        except Exception:  # a bug in one handler must not end the mesh
            _print_problem(f"a message of worker {id} could not be handled:\n{traceback.format_exc()}")

    def _drop(self, caller: _Caller) -> None:
        if caller not in self._callers:
            return  # already dropped in this turn because there were too many strangers
        del self._callers[caller]
        self._selector.unregister(caller.connection.sock)
        caller.connection.close()

    def _peer(self, id: int) -> Peer:
        if id not in self._peers:
            self._peers[id] = Peer(id, self._selector, self._hello, self._key)
        return self._peers[id]

    def _enter(self, generation: int, members: tuple[int, ...], now: float) -> None:
        watched = set(watched_peers.watched(self.id, members))
        for id in [each for each in self._peers if each not in members]:
            self._peers.pop(id).close()
        for id in watched:
            self._peer(id)
        for id, peer in self._peers.items():
            peer.watched, peer.due = id in watched, now
            peer.forget(now)
        self.unheard, self.refused, self.complete = (), (), False
        self.generation = self._hello["generation"] = generation  # set last because other threads read it
        self._publish()

    def _learn(self, generation: int, addresses: dict[int, str], now: float) -> None:
        for id, address in addresses.items() if generation == self.generation else ():
            try:
                if id != self.id:
                    self._peer(id).meet(address, now)
            except ValueError as problem:
                _print_problem(f"worker {id} has no valid address in the mesh: {problem}")

    def _publish(self) -> None:
        watched = [peer for _, peer in sorted(self._peers.items()) if peer.watched]
        silent = [peer for peer in watched if peer.met and peer.state.unheard]
        unheard, refused = tuple(peer.id for peer in silent), tuple(peer.id for peer in silent if peer.state.gone)
        complete = bool(watched) and all(peer.met for peer in watched)
        if (unheard, refused, complete) == (self.unheard, self.refused, self.complete):
            return
        self.unheard, self.refused, self.complete = unheard, refused, complete
        try:
            self.changed()
        except Exception:  # a bug in the subscriber must not end the mesh
            _print_problem(f"the mesh of worker {self.id}:\n{traceback.format_exc()}")

    def _close(self, now: float) -> None:
        self._over = True
        for caller in self._callers:
            if caller.id is not None:
                with contextlib.suppress(OSError):  # the caller disconnected first
                    caller.connection.send({"goodbye": True})
                    caller.connection.flush()

    def _release(self) -> None:
        for peer in self._peers.values():
            peer.close()
        for caller in [*self._callers]:
            self._drop(caller)
        self._listener.close()
        self._selector.close()
        self._bell.close()
        self._button.close()


def _print_problem(sentence: str) -> None:
    print(f"outlast | {sentence}", file=sys.stderr, flush=True)
