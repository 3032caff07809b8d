"""Lines between a member and the coordinator, authenticated with the run's key.

Each side sends a nonce in the clear. Every later line carries an HMAC-SHA256 over the direction, a counter and the line, keyed by
the run's key and both nonces, so nobody without the key can write, replay or reflect a line. Nothing is encrypted.

    member <-> coordinator  {"nonce": "..."}
    then each side          <64 hex digits> {"report": ...}

`rendezvous.transports.sockets` and `rendezvous.mesh` use these lines; in the mesh, the accepting side is the "decider". Lines on
a Unix socket are plain, because only the socket's owner can open it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from outlast.job.contract import Env

Side = Literal["decider", "member"]
LONGEST_NONCE = 256
"""Maximum length in bytes of the line with a nonce."""
_OTHER: dict[Side, Side] = {"decider": "member", "member": "decider"}
_DIGITS = 64


class Forged(ValueError):
    """A line was written without the key, for another connection, or for another position in this connection."""


def key(environ: Mapping[str, str]) -> bytes:
    """Return a run's key: the one from a Secret or the launcher, or else one derived from the job. It is empty under plain
    torchrun.

    The derived key is a digest of the job file if pods meet at worker 0, otherwise a digest of the run's name, because in all
    other cases the job file may change during a run.
    """
    if given := environ.get(Env.RENDEZVOUS_KEY):
        return given.encode()
    file, run = environ.get(Env.JOB_FILE), environ.get(Env.RUN)
    if file and (not run or environ.get(Env.RENDEZVOUS, "").startswith("c10d://")):
        return hashlib.sha256(Path(file).read_bytes()).digest()
    return hashlib.sha256(f"{environ.get(Env.NAMESPACE, '')}/{run}".encode()).digest() if run else b""


def derived(key: bytes, purpose: str) -> bytes:
    """Derive a key for another purpose from the run's key. Lines sealed with one key are invalid under the other key."""
    return hmac.digest(key, purpose.encode(), "sha256")


class OtherKey(Forged):
    """A line was sealed with another key, or not at all."""


class Plain:
    """Passes lines on unsealed."""

    def sealed(self, line: bytes) -> bytes:
        return line + b"\n"

    def opened(self, line: bytes) -> bytes:
        return line


class Seal(Plain):
    """Seals and verifies the lines of one side of a connection."""

    def __init__(self, key: bytes, side: Side, *, own: str, peer: str) -> None:
        nonces = (own, peer) if side == "decider" else (peer, own)
        self._key = hmac.digest(key, json.dumps(nonces).encode(), "sha256")
        self._side: Side = side
        self._written = self._read = 0

    def sealed(self, line: bytes) -> bytes:
        """Seal a line for sending."""
        self._written += 1
        return self._digits(self._side, self._written, line) + b" " + line + b"\n"

    def opened(self, line: bytes) -> bytes:
        """Verify a sealed line, and return its content. Raises Forged."""
        self._read += 1
        digits, rest = line[:_DIGITS], line[_DIGITS + 1 :].rstrip(b"\n")
        if not hmac.compare_digest(digits, self._digits(_OTHER[self._side], self._read, rest)):
            raise OtherKey("it is not sealed with the key of the run")
        return rest

    def _digits(self, side: Side, number: int, line: bytes) -> bytes:
        return hmac.digest(self._key, f"{side} {number} ".encode() + line, "sha256").hex().encode()


def nonce() -> str:
    return secrets.token_hex(16)


def greeting(nonce: str) -> bytes:
    """Return the line that sends a nonce."""
    return json.dumps({"nonce": nonce}).encode() + b"\n"


def greeted(line: bytes) -> str:
    """Return the nonce in the peer's greeting. Raises Forged."""
    try:
        message = json.loads(line) if len(line) <= LONGEST_NONCE else None
    except (ValueError, RecursionError):
        message = None
    value = message.get("nonce") if isinstance(message, dict) else None
    if not isinstance(value, str):
        raise Forged("it does not begin with a nonce")
    return value
