"""`POST /leave`: an authenticated order to a worker to save and leave, for topologies without an operator. Pure.

    POST /leave                       on the agent's port
    Outlast-Time: 1700000000.000      time of the signature, seconds since the epoch
    Outlast-Signature: <64 hex digits>

    {"deadline": "2026-01-01T00:02:00Z", "reason": "AWS takes the machine back"}

The signature is an HMAC-SHA256 over the worker's index, the time and the body, with a key derived from the run's key. An order
cannot be replayed: neither to another worker, nor twice, nor after WINDOW_S, nor to the worker's next process. Both fields are
optional; the default deadline is the end of the job's grace period.

    202 accepted    400 not an order    401 not signed with the run's key    409 repeated, too old, or already ending
    411 no Content-Length    413 longer than 4 KiB (`probes`)

See docs/guide/security.md.
"""

from __future__ import annotations

import dataclasses
import datetime
import hmac
import json
import math
from collections.abc import Mapping

from outlast.job import sealed_lines

PATH = "/leave"
TIME, SIGNATURE = "Outlast-Time", "Outlast-Signature"
WINDOW_S = 60.0
"""Maximum difference, in seconds, between the sender's and the worker's clocks, and how long orders are remembered."""
_REASON = 256


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer to an order, which is accepted if the status is 202."""

    status: int
    text: str
    reason: str = ""
    deadline: float | None = None
    """Seconds since the epoch; None for the end of the job's grace period."""


def signed(key: bytes, *, worker: int, body: bytes, now: float) -> dict[str, str]:
    """Return the headers for an order to a worker. `key` is the run's key; see `sealed_lines.key`."""
    time = f"{now:.3f}"
    return {"Content-Type": "application/json", TIME: time, SIGNATURE: _signature(key, worker, time, body)}


class Orders:
    """The orders to one worker. `since` is when its agent started, in seconds since the epoch; older orders are rejected."""

    def __init__(self, key: bytes, *, worker: int, since: float) -> None:
        self._key, self._worker, self._since = key, worker, since
        self._seen: dict[str, float] = {}
        """Times of accepted orders, keyed by signature. Only a holder of the key can add entries."""

    def judge(self, headers: Mapping[str, str], body: bytes, now: float) -> Answer:
        """Validate an order. Each order is accepted at most once."""
        time, signature = headers.get(TIME, ""), headers.get(SIGNATURE, "").encode()
        if not self._key:
            return Answer(401, "this run has no key, so it accepts no orders")
        if not hmac.compare_digest(signature, _signature(self._key, self._worker, time, body).encode()):
            return Answer(401, f"the order is not signed with the key of the run for worker {self._worker}; see {SIGNATURE}")
        try:
            at = float(time)
        except ValueError:
            at = math.nan
        if not abs(now - at) <= WINDOW_S:
            return Answer(409, f"the order was signed at {time}, and it is {now:.0f} here; correct the clock and sign it again")
        if at < self._since:
            return Answer(409, "the order is older than this process; sign it again if this process must leave")
        self._seen = {each: when for each, when in self._seen.items() if abs(now - when) <= WINDOW_S}
        if signature.decode() in self._seen:
            return Answer(409, "the order is a repetition; sign it again if the worker must leave once more")
        answer = _read(body)
        if answer.status == 202:
            self._seen[signature.decode()] = at
        return answer


def _read(body: bytes) -> Answer:
    try:
        order = json.loads(body or b"{}")
        reason, deadline = str(order.get("reason") or ""), order.get("deadline")
        time = None if deadline is None else datetime.datetime.fromisoformat(deadline)
        if time and time.tzinfo is None:
            raise ValueError(f"deadline ({deadline}) has no UTC offset")
        return Answer(202, "the worker saves and leaves", reason[:_REASON], time.timestamp() if time else None)
    except (AttributeError, OverflowError, RecursionError, TypeError, ValueError) as problem:
        return Answer(400, f'the order must be {{"deadline": "2026-01-01T00:02:00Z", "reason": "..."}}: {problem}')


def _signature(key: bytes, worker: int, time: str, body: bytes) -> str:
    return hmac.digest(sealed_lines.derived(key, "leave"), f"{worker}\n{time}\n".encode() + body, "sha256").hex()
