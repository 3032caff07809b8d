"""The keys of a run in etcd, and what they hold. Pure.

    <prefix>/<run>/members/<id>        Record: a member's report                  under the member's lease
    <prefix>/<run>/decided/leader      Leader: the coordinator                    under its short lease
    <prefix>/<run>/decided/said        Said: all that it has published            under its long lease

Written by `rendezvous.etcd.client` (members) and `rendezvous.etcd.election` (the coordinator); docs/decisions/0014. It holds
no clock time that another machine would compare with its own. Field names are the wire format.
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


@dataclass(frozen=True)
class Keys:
    """The keys of one run."""

    root: str

    @classmethod
    def of(cls, prefix: str, run: str) -> Self:
        """Those of a run, whatever its name."""
        return cls(f"{prefix}/{quote(run, safe='')}")

    @property
    def members(self) -> str:
        """What the keys of all members begin with."""
        return f"{self.root}/members/"

    def member(self, id: int) -> str:
        return f"{self.members}{id}"

    @property
    def decided(self) -> str:
        """What the keys begin with that every member watches."""
        return f"{self.root}/decided/"

    @property
    def leader(self) -> str:
        return f"{self.decided}leader"

    @property
    def said(self) -> str:
        return f"{self.decided}said"


def run_of(prefix: str, key: str) -> str:
    """The name of the run that a key belongs to; empty for a key of something else."""
    name, slash, rest = key.removeprefix(f"{prefix}/").partition("/")
    return unquote(name) if slash and rest.startswith(("members/", "decided/")) else ""


def run_name(run: str, environ: Mapping[str, str]) -> str:
    """What a run is called in an etcd that many jobs share: runs of pods are unique only within their namespace and job."""
    place = [environ.get(name, "") for name in (contract.Env.NAMESPACE, contract.Env.JOB)]
    return "/".join([*filter(None, place), run])


@dataclass(frozen=True)
class _Value:
    """The value of a key."""

    def dumps(self) -> str:
        return json.dumps(dataclasses.asdict(self))


@dataclass(frozen=True)
class Record(_Value):
    """A member's report, with what it knows of the run."""

    report: Report
    token: str
    """Of the process: by it a member knows its own key."""
    terms: str = ""
    """`min:max`, where members have to ask for the same (torchrun's --nnodes); empty in pods, where the job file says it."""
    born: str = ""
    """Which run of this name it has heard of; empty: none yet."""
    world: World | None = None
    """The newest world that it has heard of, whether or not it is in it: so a coordinator learns what etcd has lost."""
    tokens: tuple[str, ...] = ()
    """Of the members of that world, in its order."""

    @classmethod
    def loads(cls, text: str) -> Self | None:
        """None for what makes no sense here: another program, or a version that is too different."""
        said = _fitting(cls, _read(text), token=_text, terms=_text, born=_text, tokens=_texts, report=_any, world=_any)
        if said is None:
            return None
        try:
            report, world = Report.of(said["report"]), _world(said.get("world"))
        except ValueError:
            return None
        return cls(**{**said, "report": report, "world": world})


@dataclass(frozen=True)
class Leader(_Value):
    """The coordinator."""

    token: str
    """Of the process; what it says names it."""
    host: str = ""
    id: int | None = None
    """As which member it is known, if it is one already."""
    word: str = ""
    """Of this election alone."""

    @classmethod
    def loads(cls, text: str) -> Self | None:
        """None for what makes no sense here."""
        said = _fitting(cls, _read(text), token=_text, host=_text, id=lambda id: id is None or is_count(id), word=_text)
        return None if said is None else cls(**said)


@dataclass(frozen=True)
class Said(_Value):
    """The published state: all that was decided, in one value with one writer."""

    by: str
    """Token of the coordinator that has written it."""
    born: str
    """Incarnation id: distinguishes successive runs of one name."""
    before: str = ""
    """Incarnation of the run of this name that ended before this one; its members have no part in this one."""
    terms: str = ""
    world: World | None = None
    tokens: tuple[str, ...] = ()
    """Of the processes that are the members of the world, in its order: an index may come to another."""
    called: Call | None = None
    leave_s: float = 0.0
    """How long members have for a planned call, from when they hear of it."""
    closed: Closed | None = None
    why: str = ""
    """What the coordinator waits for, or that all is well; without the seconds that are left."""
    floor: int = 0
    """Lower bound: calls are of newer generations."""
    done: tuple[int, ...] = ()
    """Members of the world that have finished, and may be gone."""
    judged: int = 0
    """The newest generation whose failure has been judged."""
    restarts: int = 0
    failures: tuple[tuple[float, int, int | None], ...] = field(default=())
    """`restarts.Record`s, each with the seconds since then, when this was written, as its time."""
    failure: Mapping[str, Any] | None = None
    """The last failure that was judged, a `failure.Failure`."""
    attempt: int = 0
    """Which start of the processes of generation `judged` that was, see `failure.Failure.attempt`."""
    ended: Mapping[str, str] = field(default_factory=dict)
    """Tokens of processes whose peers do not hear them, each with the sentence that says so: they are to end."""
    lost: tuple[tuple[int, float, int], ...] = ()
    """`partition.Loss`es that keep members out of worlds: id, seconds since then, how often in a row."""

    @classmethod
    def loads(cls, text: str) -> Self | None:
        """None for what makes no sense here."""
        fits: dict[str, Callable[[Any], bool]] = dict.fromkeys(("by", "born", "before", "terms", "why"), _text)
        fits |= dict.fromkeys(("floor", "judged", "attempt", "restarts"), is_count) | {
            "leave_s": is_number,
            "tokens": _texts,
            "done": _counts,
        }
        fits |= {"failures": _failures, "failure": lambda each: each is None or isinstance(each, Mapping)}
        fits |= {"ended": _sentences, "lost": _losses}
        said = _fitting(cls, _read(text), **fits, world=_any, called=_any, closed=_any)
        if said is None:
            return None
        try:
            world = _world(said.get("world"))
        except ValueError:
            return None
        parts: dict[str, Any] = {}
        if said.get("called"):
            call = {
                "generation": is_count,
                "reason": _text,
                "planned": _flag,
                "at": is_number,
                "leaving": _counts,
                "lost": _counts,
            }
            if (called := _fitting(Call, said["called"], **call, cause=_any)) is None:
                return None
            parts["called"] = Call(**{**called, "cause": Cause(called.get("cause", ""))})
        if said.get("closed"):
            if (closed := _fitting(Closed, said["closed"], reason=_text, code=is_count, end=_any)) is None:
                return None
            parts["closed"] = Closed(**closed)
        failures = tuple((each[0], each[1], each[2]) for each in said.get("failures", ()))
        parts["lost"] = tuple((each[0], each[1], each[2]) for each in said.get("lost", ()))
        return cls(**{**said, "called": None, "closed": None, **parts, "world": world, "failures": failures})

    @property
    def generation(self) -> int:
        """The newest generation that there may have been."""
        called = self.called.generation - 1 if self.called else 0
        return max(self.floor, called, self.world.generation if self.world else 0)


def live(said: Said, leader: KeyValue | None) -> bool:
    """Whether the writer still coordinates; if not, this may be left over from a run that is no more."""
    deciding = Leader.loads(leader.value) if leader else None
    return deciding is not None and deciding.token == said.by


def asked(terms: str) -> str:
    """Terms for people: `4` instead of `4:4`."""
    least, _, most = terms.partition(":")
    return terms if least != most else least


def _read(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _fitting(cls: type, said: object, **fits: Callable[[Any], bool]) -> dict[str, Any] | None:
    """The fields of a class, without what newer versions add, its lists as tuples; None when one does not fit, or is lacking."""
    if not isinstance(said, Mapping):
        return None
    found = {}
    for each in dataclasses.fields(cls):
        if each.name in said:
            value = said[each.name]
            if not fits[each.name](value):
                return None
            found[each.name] = tuple(value) if isinstance(value, list) else value
        elif each.default is dataclasses.MISSING and each.default_factory is dataclasses.MISSING:
            return None
    return found


def _any(value: object) -> bool:
    return True


def _flag(value: object) -> bool:
    return isinstance(value, bool)


def _text(value: object) -> bool:
    return isinstance(value, str)


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(map(_text, value))


def _counts(value: object) -> bool:
    return isinstance(value, list) and all(map(is_count, value))


def _failures(value: object) -> bool:
    if not isinstance(value, list):
        return False
    shaped = (isinstance(each, list) and len(each) == 3 and is_number(each[0]) and is_count(each[1]) for each in value)
    return all(shaped) and all(each[2] is None or is_count(each[2]) for each in value)


def _sentences(value: object) -> bool:
    return isinstance(value, Mapping) and all(isinstance(each, str) for each in value.values())


def _losses(value: object) -> bool:
    if not isinstance(value, list):
        return False
    shaped = (isinstance(each, list) and len(each) == 3 for each in value)
    return all(shaped) and all(is_count(each[0]) and is_number(each[1]) and is_count(each[2]) for each in value)


def _world(said: object) -> World | None:
    return world_from(said) if said else None
