"""The metadata service of an AWS machine: real HTTP, documents in memory, answers that can be held back. For tests.

with imds.serving(Imds()) as service:
    service.documents[imds.SPOT] = imds.spot("2026-01-01T00:02:00Z")
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

import web
from apiserver import send

SPOT = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
SCHEDULED = "/latest/meta-data/events/maintenance/scheduled"
TOKEN = "/latest/api/token"


def spot(time: str, action: str = "terminate") -> str:
    return json.dumps({"action": action, "time": time})


class Imds:
    def __init__(self) -> None:
        self.documents: dict[str, str] = {SCHEDULED: "[]"}
        """Documents by path; other paths give 404."""
        self.tokens: set[str] = set()
        self.asked: list[str] = []
        self.refused = False
        """True to respond to everything with 403, as if the metadata service were disabled."""
        self.silent = threading.Event()
        """While set, requests get no response."""
        self.released = threading.Event()
        self.address = ""

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        self.asked.append(f"{handler.command} {handler.path}")
        if self.silent.is_set():
            self.released.wait(60)
            return
        if self.refused:
            return send(handler, 403, "Forbidden")
        if handler.path == TOKEN:
            if handler.command != "PUT" or not handler.headers.get("X-aws-ec2-metadata-token-ttl-seconds"):
                return send(handler, 400, "Bad Request")
            self.tokens.add(token := f"token-{len(self.asked)}")
            return send(handler, 200, token)
        if handler.headers.get("X-aws-ec2-metadata-token") not in self.tokens:
            return send(handler, 401, "Unauthorized")
        found = self.documents.get(handler.path)
        send(handler, *((404, "Not Found") if found is None else (200, found)))


@contextmanager
def serving(service: Imds) -> Iterator[Imds]:
    with web.serving(service.answer) as service.address:
        try:
            yield service
        finally:
            service.released.set()
