"""The keys of a run in etcd, and their values. Pure.

    <prefix>/<run>/members/<id>        Record: a member's report           under the member's lease
    <prefix>/<run>/decided/leader      Leader: the coordinator             under its short lease
    <prefix>/<run>/decided/said        Published: the state of the run     under its long lease

Written by `rendezvous.etcd.client` (members) and `rendezvous.etcd.election` (the coordinator); docs/decisions/0014. Values
contain no clock times for comparison across machines. Field names are the wire format, except for those in `_WIRE`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self
from urllib.parse import quote, unquote

from outlast.job import contract
from outlast.rendezvous.etcd.gateway import KeyValue
from outlast.rendezvous.transports.sockets import Closed, Report, is_count, is_number, world_from
from outlast.rendezvous.world import Call, Cause, World

_WIRE = {
    "nnodes": "terms",
    "incarnation": "born",
    "previous_incarnation": "before",
    "min_generation": "floor",
    "counted": "judged",
}
"""Names on the wire for fields with other names."""


@dataclass(frozen=True)
class Keys:
    """The keys of one run."""

    root: str

    @classmethod
    def of(cls, prefix: str, run: str) -> Self:
        """Return the keys of a run, whose name may contain any characters."""
        return cls(f"{prefix}/{quote(run, safe='')}")

    @property
    def members(self) -> str:
        """Prefix of the keys of all members."""
        return f"{self.root}/members/"

    def member(self, id: int) -> str:
        return f"{self.members}{id}"

    @property
    def decided(self) -> str:
        """Prefix of the keys that all members watch."""
        return f"{self.root}/decided/"

    @property
    def leader(self) -> str:
        return f"{self.decided}leader"

    @property
    def published(self) -> str:
        return f"{self.decided}said"


def run_of(prefix: str, key: str) -> str:
    """Return the name of the run that a key belongs to; empty for any other key."""
    name, slash, rest = key.removeprefix(f"{prefix}/").partition("/")
    return unquote(name) if slash and rest.startswith(("members/", "decided/")) else ""


def run_name(run: str, environ: Mapping[str, str]) -> str:
    """Return the name of a run in an etcd shared by many jobs. A run in pods is prefixed by its namespace and job, within which
    its name is unique."""
    place = [environ.get(name, "") for name in (contract.Env.NAMESPACE, contract.Env.JOB)]
    return "/".join([*filter(None, place), run])


@dataclass(frozen=True)
class _Value:
    """A value of a key, stored as JSON."""

    def dumps(self) -> str:
        return json.dumps({_WIRE.get(name, name): value for name, value in dataclasses.asdict(self).items()})


@dataclass(frozen=True)
class Record(_Value):
    """A member's report, with the last state of the run that the member has received."""

    report: Report
    token: str
    """Identifier of the process, by which it recognises its own key."""
    nnodes: str = ""
    """`min:max` of torchrun's --nnodes, on which members must agree; empty in pods, where the job file sets the sizes."""
    incarnation: str = ""
    """See `Published.incarnation`; empty before the first is received."""
    world: World | None = None
    """The newest published world, with or without this member. A coordinator recovers lost state from it."""
    tokens: tuple[str, ...] = ()
    """Tokens of the members of that world, in the same order."""

    @classmethod
    def loads(cls, text: str) -> Self | None:
        """Parse a value; returns None if it is invalid, e.g. from another program or an incompatible version."""
        value = _fitting(cls, _read(text), token=_text, nnodes=_text, incarnation=_text, tokens=_texts, report=_any, world=_any)
        if value is None:
            return None
        try:
            report, world = Report.of(value["report"]), _world(value.get("world"))
        except ValueError:
            return None
        return cls(**{**value, "report": report, "world": world})


@dataclass(frozen=True)
class Leader(_Value):
    """The coordinator, as recorded in the leader's key."""

    token: str
    """Identifier of the process; see `Published.by`."""
    host: str = ""
    id: int | None = None
    """Id of the coordinator's member; None before it has one."""
    word: str = ""
    """Nonce of this election."""

    @classmethod
    def loads(cls, text: str) -> Self | None:
        """Parse a value; None if it is invalid."""
        value = _fitting(cls, _read(text), token=_text, host=_text, id=lambda id: id is None or is_count(id), word=_text)
        return None if value is None else cls(**value)


@dataclass(frozen=True)
class Published(_Value):
    """The published state, with all decisions. It has one writer."""

    by: str
    """Token of the coordinator that wrote the state."""
    incarnation: str
    """Identifier that distinguishes successive runs of one name."""
    previous_incarnation: str = ""
    """Incarnation of the previous run of this name, which has ended and whose members are ignored."""
    nnodes: str = ""
    world: World | None = None
    tokens: tuple[str, ...] = ()
    """Tokens of the world's processes in the order of its members, since an index may pass to another process."""
    called: Call | None = None
    leave_s: float = 0.0
    """Duration of a planned call in seconds, from when a member receives it."""
    closed: Closed | None = None
    why: str = ""
    """The coordinator's reason to wait, without the remaining seconds, or a description of normal training."""
    min_generation: int = 0
    """Lower bound of generations: calls use newer ones."""
    done: tuple[int, ...] = ()
    """Members of the world that have finished, and may have exited."""
    counted: int = 0
    """The newest generation with a counted failure."""
    restarts: int = 0
    failures: tuple[tuple[float, int, int | None], ...] = field(default=())
    """`restart_budget.Record`s, each with its age in seconds when the state was written, instead of its time."""
    failure: Mapping[str, Any] | None = None
    """The last counted failure, a `failure.Failure`."""
    attempt: int = 0
    """Attempt of that failure in generation `counted`, see `failure.Failure.attempt`."""
    ended: Mapping[str, str] = field(default_factory=dict)
    """Reasons for fenced processes to exit, by the token of the process."""
    lost: tuple[tuple[int, float, int], ...] = ()
    """`partition.Loss`es that keep members out of worlds, each as id, seconds since the loss, and number of consecutive
    losses."""

    @classmethod
    def loads(cls, text: str) -> Self | None:
        """Parse a value; None if it is invalid."""
        value = _fitting(cls, _read(text), **_PUBLISHED)
        if value is None:
            return None
        try:
            world = _world(value.get("world"))
        except ValueError:
            return None
        parts: dict[str, Any] = {}
        if value.get("called"):
            if (called := _fitting(Call, value["called"], **_CALL)) is None:
                return None
            parts["called"] = Call(**{**called, "cause": Cause(called.get("cause", ""))})
        if value.get("closed"):
            if (closed := _fitting(Closed, value["closed"], reason=_text, code=is_count, end=_any)) is None:
                return None
            parts["closed"] = Closed(**closed)
        failures = tuple((each[0], each[1], each[2]) for each in value.get("failures", ()))
        parts["lost"] = tuple((each[0], each[1], each[2]) for each in value.get("lost", ()))
        return cls(**{**value, "called": None, "closed": None, **parts, "world": world, "failures": failures})

    @property
    def generation(self) -> int:
        """The newest generation that may have existed."""
        called = self.called.generation - 1 if self.called else 0
        return max(self.min_generation, called, self.world.generation if self.world else 0)


def live(published: Published, leader: KeyValue | None) -> bool:
    """Return whether the writer of a state still coordinates; if not, its run may be over."""
    current = Leader.loads(leader.value) if leader else None
    return current is not None and current.token == published.by


def nnodes_text(nnodes: str) -> str:
    """Return --nnodes as shown to people: `4` instead of `4:4`."""
    least, _, most = nnodes.partition(":")
    return nnodes if least != most else least


def _read(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _fitting(cls: type, value: object, **fits: Callable[[Any], bool]) -> dict[str, Any] | None:
    """Return the fields of a dataclass from JSON, lists as tuples, without fields of newer versions. Returns None if a field is
    invalid or missing."""
    if not isinstance(value, Mapping):
        return None
    fields = {}
    for each in dataclasses.fields(cls):
        wire = _WIRE.get(each.name, each.name)
        if wire in value:
            content = value[wire]
            if not fits[each.name](content):
                return None
            fields[each.name] = tuple(content) if isinstance(content, list) else content
        elif each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING:
            return None
    return fields


def _any(value: object) -> bool:
    return True


def _text(value: object) -> bool:
    return isinstance(value, str)


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_text, value))


def _counts(value: object) -> bool:
    return isinstance(value, list) and all(map(is_count, value))


def _triples(*fits: Callable[[object], bool]) -> Callable[[object], bool]:
    """Return a check for a list of triples, from one check for each of the three values."""

    def check(value: object) -> bool:
        if not isinstance(value, list) or not all(isinstance(each, list) and len(each) == 3 for each in value):
            return False
        return all(fit(item) for each in value for fit, item in zip(fits, each, strict=True))

    return check


def _world(value: object) -> World | None:
    return world_from(value) if value else None


_CALL: dict[str, Callable[[Any], bool]] = {
    "generation": is_count,
    "reason": _text,
    "planned": lambda value: isinstance(value, bool),
    "at": is_number,
    "leaving": _counts,
    "lost": _counts,
    "cause": _any,
}
_PUBLISHED: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("by", "incarnation", "previous_incarnation", "nnodes", "why"), _text),
    **dict.fromkeys(("min_generation", "counted", "attempt", "restarts"), is_count),
    **dict.fromkeys(("world", "called", "closed"), _any),
    "leave_s": is_number,
    "tokens": _texts,
    "done": _counts,
    "failures": _triples(is_number, is_count, lambda value: value is None or is_count(value)),
    "failure": lambda value: value is None or isinstance(value, Mapping),
    "ended": lambda value: isinstance(value, Mapping) and all(map(_text, value.values())),
    "lost": _triples(is_count, is_number, is_count),
}
