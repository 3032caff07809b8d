"""`outlast node-watch`: a watcher configured from options, with probes, a log, and a thread that sends messages to a queue."""

from __future__ import annotations

import json
import logging
import queue
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from outlast import kube, probes, units
from outlast.clock import Clock
from outlast.cloud.sqs import Queue
from outlast.errors import OutlastError
from outlast.loglines import write_log
from outlast.nodewatch import node, sources
from outlast.nodewatch.sources import ADDRESS, Cloud, Source
from outlast.nodewatch.watch import Settings, Watcher

log = logging.getLogger(__name__)

_TRIES = 4
"""Attempts to send a message."""
_PAUSE_S = 2.0
"""Between two of them; botocore has retried what is worth it by then."""


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    node: str
    cloud: Cloud | None = None
    """Default: the cloud of the node's providerID."""
    metadata: str = ADDRESS
    notice_url: str = ""
    """An address to ask instead of a cloud's metadata service."""
    rebalance: bool = True
    queue: str = ""
    """URL of an SQS queue."""
    settings: Settings = field(default_factory=Settings)
    port: int = 0
    """Port of the probes; 0: any free one."""


def settings(every: str, ahead: str, *, dry_run: bool) -> Settings:
    """The times of the command line. Raises OutlastError."""
    seconds = {}
    for option, text, least in (("--poll-interval", every, 0.2), ("--ahead", ahead, 0.0)):
        try:
            seconds[option] = units.duration(text).total_seconds()
        except ValueError as error:
            raise OutlastError(f"{option} {text} {error}") from error
        if seconds[option] < least:
            raise OutlastError(f"{option} {text} is below {least:g}s; give {least:g}s or more")
    return Settings(seconds["--poll-interval"], seconds["--ahead"], dry_run)


def source(options: Options, found: dict[str, Any]) -> Source:
    """Where the notices of a node come from. Raises OutlastError."""
    if options.notice_url:
        if not options.notice_url.startswith(("http://", "https://")):
            raise OutlastError(f"--notice-url {options.notice_url} is not an address; give one with http:// or https://")
        return sources.Address(options.notice_url)
    return sources.of(options.cloud or node.cloud(found), address=options.metadata.rstrip("/"), rebalance=options.rebalance)


class Outbox:
    """Sends messages in a thread of its own: a queue that does not answer must not cost the pods of a node their time."""

    def __init__(self, deliver: Callable[[str], None], pause_s: float = _PAUSE_S) -> None:
        self._deliver, self._pause_s = deliver, pause_s
        self._waiting: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="outbox", daemon=True)
        self._thread.start()

    def put(self, message: dict[str, Any]) -> None:
        """Send a message soon."""
        self._waiting.put(json.dumps(message))

    def close(self, timeout_s: float) -> None:
        """Send what is left, within this time."""
        self._waiting.put(None)
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (text := self._waiting.get()) is not None:
            for attempt in range(1, _TRIES + 1):
                try:
                    self._deliver(text)
                except OutlastError as error:
                    log.warning("%s (attempt %d of %d); the message was %s", error, attempt, _TRIES, text)
                    time.sleep(self._pause_s if attempt < _TRIES else 0.0)
                else:
                    log.info("sent %s", text)
                    break


def main(options: Options, *, text: bool, context: str | None) -> None:
    """Watch until SIGTERM or SIGINT. Raises OutlastError when it cannot begin."""
    write_log(text=text)
    target = Queue.parse(options.queue) if options.queue else None
    cluster = kube.connect(context)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    found = cluster.get(kube.NODE, options.node)
    asked = source(options, found)
    outbox = Outbox(lambda message: target.send(message, subject=options.node)) if target else None
    send = outbox.put if outbox else None
    watcher = Watcher(found, asked, cluster, options.settings, clock=Clock(), send=send)
    address = probes.serve(watcher.health, {"node": options.node}, host="", port=options.port)
    log.info(
        "node %s is watched: %s is asked every %g s; probes on %s", options.node, asked.name, options.settings.every_s, address
    )
    while not stop.wait(watcher.tick()):
        pass
    if outbox:
        outbox.close(_PAUSE_S)
    cluster.close()
    log.info("stopped")
