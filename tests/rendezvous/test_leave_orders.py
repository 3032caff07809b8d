"""Who may order a worker to leave, and what an order may say."""

from __future__ import annotations

import http.client
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.base import probes
from outlast.job import sealed_lines
from outlast.rendezvous.transports import leave_orders
from outlast.rendezvous.transports.leave_orders import Answer, Orders

KEY, NOW = b"the key of the run", 1_700_000_000.0
BODY = json.dumps({"deadline": "2023-11-14T22:15:20Z", "reason": "AWS takes the machine back"}).encode()


def an_order(body: bytes = BODY, *, key: bytes = KEY, worker: int = 3, now: float = NOW) -> tuple[dict[str, str], bytes]:
    return leave_orders.signed(key, worker=worker, body=body, now=now), body


def judged(headers: dict[str, str], body: bytes, *, now: float = NOW) -> Answer:
    return Orders(KEY, worker=3, since=NOW - 1000).judge(headers, body, now)


def test_an_order_that_is_signed_is_accepted_once() -> None:
    taken = Orders(KEY, worker=3, since=NOW - 1000)
    accepted = Answer(202, "the worker saves and leaves", "AWS takes the machine back", NOW + 120)
    assert taken.judge(*an_order(), NOW) == accepted
    again = taken.judge(*an_order(), NOW + 59)
    assert (again.status, again.text) == (409, "the order is a repetition; sign it again if the worker must leave once more")
    assert taken.judge(*an_order(now=NOW + 1), NOW + 1).status == 202, "signed anew it is another one, e.g. with less time"
    assert taken.judge(*an_order(), NOW + 61).status == 409
    assert len(taken._seen) <= 2, "what is too old is not remembered"


@pytest.mark.parametrize(
    ("order", "status"),
    [
        (an_order(key=b"another"), 401),
        (an_order(key=sealed_lines.derived(KEY, "mesh")), 401),
        (an_order(worker=2), 401),
        ((an_order()[0], BODY + b" "), 401),
        (({**an_order()[0], leave_orders.TIME: f"{NOW + 1:.3f}"}, BODY), 401),
        (({}, BODY), 401),
        (({leave_orders.SIGNATURE: "\xe9" * 64, leave_orders.TIME: "1"}, BODY), 401),
        (an_order(now=NOW - 61), 409),
        (an_order(now=NOW + 61), 409),
        (an_order(now=float("nan")), 409),
        (an_order(b"no JSON"), 400),
        (an_order(b"[" * 2000), 400),
        (an_order(b'"leave"'), 400),
        (an_order(b'{"deadline": "tomorrow"}'), 400),
        (an_order(b'{"deadline": "2023-11-14T22:15:20"}'), 400),
        (an_order(b'{"deadline": 1700000000}'), 400),
        (an_order(b""), 202),
        (an_order(b"{}"), 202),
    ],
)
def test_anything_else_is_refused_with_the_reason(order: tuple[dict[str, str], bytes], status: int) -> None:
    answer = judged(*order)
    assert (answer.status, bool(answer.text)) == (status, True)


def test_an_order_to_the_process_before_is_not_for_this_one() -> None:
    answer = Orders(KEY, worker=3, since=NOW + 5).judge(*an_order(), NOW + 6)
    assert (answer.status, "older than this process" in answer.text) == (409, True)


def test_without_a_key_nobody_can_order_anything() -> None:
    assert Orders(b"", worker=3, since=0).judge(*an_order(key=b""), NOW).status == 401


@given(st.binary(max_size=200))
def test_no_body_however_strange_is_more_than_refused(body: bytes) -> None:
    assert judged(*an_order(body)).status in (202, 400)


# Over HTTP


def post(address: str, path: str, headers: dict[str, str], body: bytes | None) -> tuple[int, str]:
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        connection.putrequest("POST", path)
        for name, value in {**headers, **({"Content-Length": str(len(body))} if body is not None else {})}.items():
            connection.putheader(name.lower(), value)
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_orders_come_over_the_agents_port() -> None:
    taken = Orders(KEY, worker=3, since=NOW - 1000)

    def order(headers: object, body: bytes) -> tuple[int, str]:
        answer = taken.judge(headers, body, NOW)  # type: ignore[arg-type] # is a mapping
        return answer.status, answer.text

    address = probes.serve(probes.Health, orders={leave_orders.PATH: order})
    assert post(address, leave_orders.PATH, *an_order()) == (202, "the worker saves and leaves\n")
    assert post(address, leave_orders.PATH, *an_order())[0] == 409
    assert post(address, leave_orders.PATH, {}, BODY)[0] == 401
    assert post(address, "/healthz", *an_order())[0] == 404
    assert post(address, leave_orders.PATH, {}, None) == (411, "Content-Length is missing\n")
    assert post(address, leave_orders.PATH, {"Content-Length": "9" * 5000}, None)[0] == 413
    assert post(address, leave_orders.PATH, {"Content-Length": str(probes.LONGEST_BODY + 1)}, None)[0] == 413
    assert post(probes.serve(probes.Health), leave_orders.PATH, *an_order())[0] == 404, "the operator takes none"
