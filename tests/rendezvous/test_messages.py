"""The messages of the rendezvous, as recorded from the version before the typed decoder: read, and written in the same bytes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest

from outlast.base.typed_json import decode
from outlast.job.contract import End
from outlast.kubernetes import board
from outlast.kubernetes.operator import elasticjob_status as operated
from outlast.rendezvous import attempts, messages
from outlast.rendezvous.etcd import key_schema
from outlast.rendezvous.messages import Called, Closed
from outlast.rendezvous.restart_budget import Record
from outlast.rendezvous.transports import sockets
from outlast.rendezvous.who_trains import Call, Cause, MemberState, World

Document = dict[str, Any]

REASON = "rank 2 on worker 1 was killed by SIGKILL"
FAILURE: Document = {
    "rank": 2, "code": 137, "reason": REASON, "cause": "oom", "traceback": "T", "log_tail": "L", "time": 17.5, "echo": False,
    "step": 40, "committed": 30,
}  # fmt: skip
PAST: Document = {"generation": 4, "attempt": 1, "worker": 1, "failure": FAILURE, "at": 12.5}
REPORT: Document = {
    "run": "train-1", "id": 1, "standing": "waiting", "generation": 4, "since": 1.5, "address": "10.0.0.7:4711", "failed": True,
    "failure": FAILURE, "mesh": True, "unheard": [0, 2], "refused": [2], "attempt": 1, "past": [PAST], "held": 40, "owes": False,
    "again": True, "batch": [4, 1, 64], "mesh_address": "10.0.0.7:4712",
}  # fmt: skip
WORLD: Document = {
    "generation": 4, "members": [0, 2], "address": "[::1]:4711", "reason": "worker 1 is lost", "at": 9.25, "held": 40,
    "mesh_addresses": ["10.0.0.7:4712", ""],
}  # fmt: skip
CALLED: Document = {"generation": 5, "reason": "worker 2 leaves", "planned": True, "deadline": 85.5, "leave_s": 75.0}
CALL: Document = {
    "generation": 5, "reason": "worker 2 leaves", "planned": True, "at": 10.5, "leaving": [2], "cause": "leaving", "lost": [1],
}  # fmt: skip
CLOSED: Document = {"reason": "all is done", "code": 0, "end": "JobSucceeded"}
LINE: Document = {"report": REPORT, "process": "p"}
RECORD: Document = {"report": REPORT, "token": "t1", "terms": "1:4", "born": "i2", "world": WORLD, "tokens": ["t0", "t2"]}
LEADER: Document = {"token": "t0", "host": "node-7", "id": 0, "word": "w"}
PUBLISHED: Document = {
    "world": WORLD, "called": CALL, "closed": CLOSED, "floor": 3, "judged": 4, "attempt": 1, "restarts": 1,
    "failures": [[1.5, 30, None], [0.5, 30, 40]], "failure": FAILURE, "lost": [[1, 2.5, 1]],
    "by": "t0", "born": "i2", "before": "i1", "terms": "1:4", "tokens": ["t0", "t2"], "leave_s": 75.0, "why": "why",
    "done": [2], "ended": {"t1": "it is lost"},
}  # fmt: skip
READY: Document = {"word": "ready", "generation": 4, "attempt": 1, "address": "h:1", "step": 40, "failure": FAILURE}
STOP: Document = {"word": "stop", "generation": 4, "attempt": 1}
GO: Document = {"word": "go", "generation": 4, "attempt": 1, "address": "h:1", "worker": 1, "failure": FAILURE}
NO: Document = {"word": "no", "generation": 4, "attempt": 1, "reason": "a worker leaves"}

A_WORLD = World(4, (0, 2), "[::1]:4711", "worker 1 is lost", 9.25, 40, ("10.0.0.7:4712", ""))
A_CALL = Call(5, "worker 2 leaves", True, 10.5, (2,), Cause.LEAVING, (1,))
A_REPORT = messages.Report(
    "train-1", 1, MemberState.WAITING, 4, 1.5, "10.0.0.7:4711", True, FAILURE, True, (0, 2), (2,), 1, (PAST,), 40, False, True,
    (4, 1, 64), "10.0.0.7:4712",
)  # fmt: skip
IS_CLOSED = Closed("all is done", 0, End.SUCCEEDED)


def typed(kind: type) -> Callable[[Document], object]:
    return lambda document: decode(kind, document)


def of_etcd(kind: Any) -> Callable[[Document], object]:
    return lambda document: kind.loads(json.dumps(document))


MESSAGES: dict[str, tuple[Document, object, Callable[[Document], object]]] = {
    "report": (REPORT, A_REPORT, typed(messages.Report)),
    "line": (LINE, sockets._Line(A_REPORT, "p"), typed(sockets._Line)),
    "world": (WORLD, A_WORLD, typed(World)),
    "called": (CALLED, Called(5, "worker 2 leaves", True, 85.5, 75.0), typed(Called)),
    "closed": (CLOSED, IS_CLOSED, typed(Closed)),
    "past": (PAST, attempts.Past(4, 1, 1, FAILURE, 12.5), typed(attempts.Past)),
    "record": (RECORD, key_schema.Record(A_REPORT, "t1", "1:4", "i2", A_WORLD, ("t0", "t2")), of_etcd(key_schema.Record)),
    "leader": (LEADER, key_schema.Leader("t0", "node-7", 0, "w"), of_etcd(key_schema.Leader)),
    "published": (
        PUBLISHED,
        key_schema.Published(
            A_WORLD, A_CALL, IS_CLOSED, 3, 4, 1, 1, ((1.5, 30, None), (0.5, 30, 40)), FAILURE, ((1, 2.5, 1),),
            by="t0", incarnation="i2", previous_incarnation="i1", nnodes="1:4", tokens=("t0", "t2"), leave_s=75.0, why="why",
            done=(2,), ended={"t1": "it is lost"},
        ),
        of_etcd(key_schema.Published),
    ),
    "ready": (READY, attempts.Ready(4, 1, "h:1", 40, FAILURE), attempts.read),
    "stop": (STOP, attempts.Stop(4, 1), attempts.read),
    "go": (GO, attempts.Go(4, 1, "h:1", 1, FAILURE), attempts.read),
    "no": (NO, attempts.No(4, 1, "a worker leaves"), attempts.read),
}  # fmt: skip


def written(message: Any) -> str:
    if isinstance(message, attempts.Message):
        return json.dumps(attempts.written(message))
    return str(message.dumps()) if hasattr(message, "dumps") else json.dumps(dataclasses.asdict(message))


@pytest.mark.parametrize("kind", MESSAGES)
def test_messages_of_the_version_before_are_read_and_it_reads_ours(kind: str) -> None:
    document, message, read = MESSAGES[kind]
    assert read(document) == message
    assert written(message) == json.dumps(document)
    newer = {**document, "newer": [1], **({"world": {**WORLD, "newer": 1}} if "world" in document else {})}
    assert read(newer) == message


LEAST: dict[str, Document] = {
    "report": {"run": "r", "id": 1, "standing": "done"},
    "world": {"generation": 1, "members": [0], "address": "a:1", "reason": ""},
    "called": {"generation": 5, "reason": "", "planned": True, "deadline": 85.5},
    "closed": {"reason": "", "code": 0},
    "past": {"generation": 1, "attempt": 1, "worker": 0, "failure": {}},
    "record": {"report": {"run": "r", "id": 1, "standing": "done"}, "token": "t", "wanted": {"number": 3}, "world": None},
    "leader": {"token": "t", "id": None},
    "published": {"by": "t", "born": "i", "called": None},
    "ready": {"word": "ready", "generation": 1, "attempt": 1, "address": "h:1", "failure": None},
}


@pytest.mark.parametrize("kind", LEAST)
def test_what_the_first_versions_did_not_write_has_its_default(kind: str) -> None:
    message = MESSAGES[kind][2](LEAST[kind])
    assert message is not None
    assert isinstance(message, type(MESSAGES[kind][1]))


WRONG: dict[str, list[Document]] = {
    "report": [
        *({"id": wrong} for wrong in ("0", -1, True, 10_000)),
        *({"unheard": wrong} for wrong in ("all", 3, [-1], [True], [1.5], ["2"], [1 << 40], [[1]], list(range(300)))),
        *({"batch": wrong} for wrong in (64, "64", [64], [3, 1, -64], [3, 1, 1 << 60], [3, 1, True])),
        *({"standing": "dreaming"}, {"generation": [1]}, {"address": "host"}, {"failure": "it failed"}),
        *({"attempt": -1}, {"attempt": "1"}, {"past": 5}, {"past": ["x"]}, {"past": [{}] * 65}),
    ],
    "world": [{"generation": "1"}, {"members": ["0"]}, {"members": []}, {"members": [0, 0]}, {"address": ""}, {"at": "now"}],
    "called": [{"planned": 1}, {"deadline": None}],
    "closed": [{"code": "0"}, {"reason": 1}],
    "past": [{"attempt": 0}, {"worker": -1}, {"at": "now"}],
    "record": [{"token": 7}, {"tokens": [1]}, {"report": 3}, {"world": {**WORLD, "address": ""}}],
    "leader": [{"token": None}, {"id": "0"}],
    "published": [
        *({"floor": "9"}, {"done": 3}, {"failures": [[1, "x", None]]}, {"leave_s": None}, {"ended": ["t"]}, {"ended": {"t": 1}}),
        *({"lost": [[1, 2]]}, {"lost": 3}, {"world": {**WORLD, "members": []}}, {"closed": {**CLOSED, "code": "0"}}),
        {"called": {**CALL, "planned": 1}},
    ],
    "ready": [{"word": "what"}, {"word": []}, {"failure": "x"}, {"address": 5}],
    "stop": [{"attempt": 0}, {"generation": True}],
    "go": [{"failure": None}, {"worker": 1 << 40}],
}


@pytest.mark.parametrize(("kind", "wrong"), [(kind, wrong) for kind, wrongs in WRONG.items() for wrong in wrongs])
def test_what_is_of_the_wrong_type_is_nothing(kind: str, wrong: Document) -> None:
    """Whoever may write to an etcd or a port must not end who reads there."""
    document, message, read = MESSAGES[kind]
    if hasattr(message, "dumps") or isinstance(message, attempts.Message):
        assert read({**document, **wrong}) is None
        return
    with pytest.raises(ValueError, match=f"^{next(iter(wrong))} of a {kind} cannot be "):
        read({**document, **wrong})


@pytest.mark.parametrize("text", ["", "[]", "{}", "3", '{"by": 1}', '{"word": "go"}', "[" * 100_000])
def test_what_makes_no_sense_is_nothing(text: str) -> None:
    kinds = key_schema.Record, key_schema.Published, key_schema.Leader
    assert [kind.loads(text) for kind in kinds] == [None, None, None]
    assert attempts.read(json.loads(text) if text[:1] == "{" else text) is None


@pytest.mark.parametrize("kind", [None, 5, [1], "of a newer version"])
def test_a_kind_that_is_not_known_costs_nothing_of_what_is_published(kind: object) -> None:
    document = {**PUBLISHED, "called": {**CALL, "cause": kind}, "closed": {**CLOSED, "end": kind}}
    published = key_schema.Published.loads(json.dumps(document))
    assert published
    assert published.called == dataclasses.replace(A_CALL, cause=Cause.UNKNOWN)
    assert published.closed == Closed("all is done", 0)


def test_the_status_of_the_operator_before_is_read_and_it_reads_ours() -> None:
    leaving = {"worker": 2, "uid": "u2", "deadline": 99.5, "reason": "spot"}
    called, closed = {**CALL, "deadline": 85.5}, {"reason": "all is done", "code": 0}
    rendezvous = {"run": "train-1", "world": WORLD, "called": called, "closed": closed, "resumed": 2.0, "leaving": [leaving]}
    silent = {"uid": "u1", "worker": 1, "node": "n", "since": 2.5, "generation": 4, "echo": True, "after_s": 100.0}
    lost = {"worker": 1, "uid": "u1", "node": "n", "at": 2.5, "times": 2, "held": False}
    recorded = {
        "snapshot": {"step": 40, "every": 10},
        "rendezvous": rendezvous,
        "judged": {"generation": 4, "attempt": 1, "pods": ["u1"], "restarted": {"u1": 1}, "silent": [silent], "lost": [lost]},
        "failures": [{"time": 2.5, "committedStep": 30, "failedStep": 40, "node": "n"}],
        "accounting": {"reported": {"step": 40, "time": 6.5}, "lost": {"seconds": {"failure": 1.5}, "steps": 3}},
    }
    status = operated.Status(
        run="train-1", world=A_WORLD, called=A_CALL, result=operated.Result("all is done", 0), counted=(4, 1), resumed=2.0,
        handled_pods=("u1",), restarted={"u1": 1}, silent=(operated.Silent("u1", 1, "n", 2.5, 4, True, 100.0),),
        lost=(operated.Lost(1, "u1", "n", 2.5, 2, False),), leaves=(operated.Leaving(2, "u2", 99.5, "spot"),),
        counted_failures=(operated.CountedFailure(Record(2.5, 30, 40), "n"),),
        progress=operated.Progress(mark=(40, 6.5), snapshot=(40, 10), losses=operated.Losses({"failure": 1.5}, 3)),
    )  # fmt: skip
    document = operated.write(status, job="train", pods=3, world_size=2, size_range=(1, 4), checkpoints="", grace_s=75.0)
    assert json.dumps({name: document[name] for name in recorded}) == json.dumps(recorded)
    assert operated.read(document) == status
    heard = decode(board._Rendezvous, rendezvous)
    assert (heard.run, heard.world, heard.called) == ("train-1", A_WORLD, Called(5, "worker 2 leaves", True, 85.5))
    assert (heard.closed, heard.leaving) == (Closed("all is done", 0), (board._Leaving("u2", 99.5, "spot"),))


def test_a_report_forgets_with_its_world_what_was_said_in_it_and_keeps_the_past() -> None:
    report = decode(messages.Report, {**REPORT, "standing": "training", "failed": False})
    waiting = report.changed("waiting", failed=True)
    assert waiting == dataclasses.replace(report, standing=MemberState.WAITING, failed=True, mesh=False, since=waiting.since)
    new = waiting.changed("training", generation=5, failed=False)
    forgotten: Document = {"unheard": (), "refused": (), "attempt": 0, "again": False}
    assert new == dataclasses.replace(report, generation=5, mesh=False, since=new.since, **forgotten)
