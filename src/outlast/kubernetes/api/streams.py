"""Runs commands in pods over websockets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outlast.base.errors import Refused, Unanswered
from outlast.kubernetes.api import requests
from outlast.kubernetes.api.error_mapping import Subject
from outlast.kubernetes.api.kinds import POD
from outlast.kubernetes.api.paths import Api

if TYPE_CHECKING:
    from httpx2.websockets import WebSocketSession


@dataclass(frozen=True)
class Ended:
    """The outcome of a command in a pod."""

    code: int
    output: bytes
    error: bytes

    @property
    def error_line(self) -> str:
        """The last line of stderr, or else the exit code."""
        lines = self.error.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"exit code {self.code}"


def execute(api: Api, pod: str, command: Sequence[str], *, namespace: str | None, container: str, stdin: bytes | None) -> Ended:
    params: list[tuple[str, str]] = [("command", word) for word in command]
    params += [("stdout", "true"), ("stderr", "true")]
    params += [("container", container)] if container else []
    params += [("stdin", "true")] if stdin is not None else []
    subject, path = api.address("exec", POD, pod, namespace, subresource="exec")
    written: dict[int, list[bytes]] = {1: [], 2: []}
    with api.connection.websocket(subject, path, params, "v5.channel.k8s.io") as connection:
        if stdin is not None:
            connection.send_bytes(b"\0" + stdin)
            connection.send_bytes(b"\xff\0")
        for message in _messages(connection, subject):
            channel, rest = message[0], message[1:]
            if channel == 3:
                return Ended(_exit_code(rest, subject), b"".join(written[1]), b"".join(written[2]))
            if channel in written:
                written[channel].append(rest)
    raise Unanswered(f"{subject.description}: the connection ended before the command did; the command may still run")


def _messages(connection: WebSocketSession, subject: Subject) -> Iterator[bytes]:
    from httpx2.websockets import WebSocketDisconnect, WebSocketNetworkError

    while True:
        try:
            message = connection.receive_bytes()
        except WebSocketDisconnect:
            return
        except (WebSocketNetworkError, OSError) as error:
            raise Unanswered(f"{subject.description}: the connection to the API server was lost; try again") from error
        if message:
            yield message


def _exit_code(content: bytes, subject: Subject) -> int:
    """Return the exit code from a command's final Status. Raises Refused if the command could not be started."""
    status = requests.parse(content, subject)
    if status.get("status") == "Success":
        return 0
    for cause in (status.get("details") or {}).get("causes") or ():
        if cause.get("reason") == "ExitCode":
            return int(cause["message"])
    raise Refused(f"nothing can be run in {subject.description}: {status.get('message')}")
