"""Coordinators of the run `run`, one for each transport, for tests of members: they receive reports and say what tests tell.

outage             what a member says when the way to its coordinator is cut, and when it is mended
tell(...)          publish these; what is left out stays as it was
garble()           publish what makes no sense, in the place of all that was told
another_run()      coordinate another run of the same name
cut(), mend()      be out of reach, and within reach again
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import secrets
import socket
import threading
from pathlib import Path
from typing import Any

import apiserver
import ports
from etcds import Server
from outlast.base.typed_json import decode
from outlast.job import contract
from outlast.job.contract import Env
from outlast.kubernetes.api import kinds
from outlast.rendezvous import transport
from outlast.rendezvous.etcd import key_schema
from outlast.rendezvous.etcd.gateway import put
from outlast.rendezvous.messages import Called, Closed, Gone, Report
from outlast.rendezvous.transports import sockets
from outlast.rendezvous.who_trains import Call, World

Document = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Nonsense:
    because: str = "I say so"


def newer(content: Any) -> Any:
    """Return a message as a newer version sends it."""
    fields = [("since", str, "0.9")]
    return dataclasses.make_dataclass("Newer", fields, bases=(type(content),), frozen=True)(**vars(content))


class Sockets:
    """One that members connect to: the launcher, on a Unix socket, or worker 0, over TCP with the key of the run."""

    outage = "", ""
    run = "run"

    def __init__(self, path: Path | None = None) -> None:
        self._port, self._path = 0 if path else ports.free(), path
        self._environ = {} if path else {Env.RENDEZVOUS_KEY: "secret"}
        self._endpoint = f"{sockets.SCHEME}{path}" if path else f"{sockets.TCP}localhost:{self._port}"
        self._reports: dict[int, Report] = {}
        self._told: dict[str, Any] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.mend()

    def client(self, id: int, process: str = "p", *, state: Path) -> transport.Client:
        return transport.client(self._endpoint, transport.Member("run", id, state, 1, self._environ))

    def report(self, id: int) -> Report | None:
        return self._reports.get(id)

    def tell(self, **told: Any) -> None:
        async def send() -> None:
            self._told |= {kind: newer(content) for kind, content in told.items()}
            for id in self._reports:
                self._send(id)

        self._do(send())

    def garble(self) -> None:
        self._loop.call_soon_threadsafe(self._server.send, list(self._reports), "closed", Nonsense())

    def another_run(self) -> None:
        self.cut()
        self.run = "another"
        self.mend()

    def mend(self) -> None:
        key = self._environ.get(Env.RENDEZVOUS_KEY, "").encode()
        self._server = sockets.Server(run=self.run, take=self._take, key=key)
        self._do(self._server.start(self._path or socket.create_server(("127.0.0.1", self._port))))

    def cut(self) -> None:
        self._do(self._server.stop())

    def close(self) -> None:
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, what: Any) -> None:
        asyncio.run_coroutine_threadsafe(what, self._loop).result(60)

    def _take(self, event: Report | Gone) -> None:
        if isinstance(event, Gone):
            self._reports.pop(event.id, None)
        else:
            self._reports[event.id] = event
            self._send(event.id)

    def _send(self, id: int) -> None:
        for kind, content in self._told.items():
            self._server.send([id], kind, content)


class Etcd:
    """One that has been elected, and publishes in an etcd."""

    outage = (
        "this worker does not reach the others; it goes on as it was and tries again: etcd at 127.0.0.1",
        "this worker reaches the others again",
    )

    def __init__(self, server: Server) -> None:
        self._server, self._prefix = server, f"/{secrets.token_hex(4)}"
        self._keys = key_schema.Keys.of(self._prefix, "run")
        self._said = key_schema.Published(by="c", incarnation="i")

    def client(self, id: int, process: str = "p", *, state: Path) -> transport.Client:
        return transport.client(f"{self._server.endpoint}{self._prefix}", transport.Member("run", id, state, 1, {}))

    def _record(self, id: int) -> key_schema.Record | None:
        client = self._server.client()
        found = client.range(self._keys.member(id)).kvs
        client.close()
        return key_schema.Record.loads(found[0].value) if found else None

    def report(self, id: int) -> Report | None:
        record = self._record(id)
        return record.report if record else None

    def tell(self, *, world: World | None = None, called: Called | None = None, closed: Closed | None = None) -> None:
        said: dict[str, Any] = {"closed": closed}
        if world:
            records = [self._record(id) for id in world.members]
            said |= {"world": world, "tokens": tuple(record.token if record else "" for record in records)}
        if called:
            call = Call(called.generation, called.reason, called.planned, 0.0, ())
            said |= {"called": call, "leave_s": called.leave_s or 0.0}
        self._said = dataclasses.replace(self._said, **said)
        document = {**json.loads(self._said.dumps()), "since": "0.9"}
        self._write({**document, "world": {**document["world"], "since": "0.9"}} if document["world"] else document)

    def _write(self, document: Document) -> None:
        client = self._server.client()
        for key, value in ((self._keys.leader, key_schema.Leader("c").dumps()), (self._keys.published, json.dumps(document))):
            client.txn([], [put(key, value)])
        client.close()

    def garble(self) -> None:
        self._write(dataclasses.asdict(Nonsense()))

    def another_run(self) -> None:
        self._said = dataclasses.replace(self._said, incarnation="j", previous_incarnation="i")
        self.tell()

    def cut(self) -> None:
        self._server.stop()

    def mend(self) -> None:
        self._server.start()


class Operator:
    """An API server with the ElasticJob `train`, and what the operator writes there."""

    outage = (
        "the operator does not hear this worker; it goes on as it was and tries again: Lease train-worker-0 in",
        "the operator hears this worker again",
    )

    def __init__(self) -> None:
        self.api = apiserver.ApiServer(unserved=())
        self.job = self.api.put(kinds.ELASTIC_JOB.document({"name": "train"}, spec={}))
        self._told: dict[str, Any] = {}

    def client(self, id: int, process: str = "p", *, state: Path) -> transport.Client:
        environ = {Env.MEMBER: f"uid-{process}", Env.NAMESPACE: "default"}
        return transport.client("kubernetes://train", transport.Member("run", id, state, 1, environ))

    def report(self, id: int) -> Report | None:
        said = self.said(id)
        return decode(Report, said) if said and said["standing"] != "leaving" else None

    def tell(self, **told: Any) -> None:
        self._told |= {kind: dataclasses.asdict(newer(content)) for kind, content in told.items()}
        self.say(**self._told)

    def garble(self) -> None:
        self.say(closed=dataclasses.asdict(Nonsense()))

    def another_run(self) -> None:
        self.say(run="another")

    def cut(self) -> None:
        self.api.well = False
        self.api.cut()

    def mend(self) -> None:
        self.api.well = True

    # Documents

    def say(self, **rendezvous: Any) -> None:
        self.api.put({**self.job, "metadata": {**self.job["metadata"]}, "status": {"rendezvous": {"run": "run", **rendezvous}}})

    def lease(self, id: int = 0) -> Document | None:
        return self.api.documents.get(("leases.coordination.k8s.io", "default", f"train-worker-{id}"))

    def said(self, id: int = 0) -> Document:
        lease = self.lease(id)
        return dict(json.loads(lease["metadata"]["annotations"][contract.Annotation.REPORT])) if lease else {}


Coordinator = Sockets | Etcd | Operator
