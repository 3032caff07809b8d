"""A run's keys in etcd, and their values. Pure.

    <prefix>/<run>/members/<id>        Record: a member's report           under the member's lease
    <prefix>/<run>/decided/leader      Leader: the coordinator             under its short lease
    <prefix>/<run>/decided/said        Published: the state of the run     under its long lease

Members write their own keys (`rendezvous.etcd.client`), and the coordinator writes the other keys (`rendezvous.etcd.election`).
Readers ignore clock times in values, because clocks differ. Field names are the wire format, except for those in `_WIRE`. See
docs/decisions/0014.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self
from urllib.parse import quote, unquote

from outlast.base.typed_json import decode
from outlast.job import contract
from outlast.rendezvous.coordinator import PersistedState
from outlast.rendezvous.etcd.gateway import KeyValue
from outlast.rendezvous.messages import Report
from outlast.rendezvous.who_trains import World

_WIRE = {
    "nnodes": "terms",
    "incarnation": "born",
    "previous_incarnation": "before",
    "min_generation": "floor",
    "counted": "judged",
}
"""Names on the wire, where they differ from the fields' names."""
_FIELDS = {wire: name for name, wire in _WIRE.items()}


@dataclass(frozen=True)
class Keys:
    root: str

    @classmethod
    def of(cls, prefix: str, run: str) -> Self:
        """Return a run's keys. The run's name may contain any characters."""
        return cls(f"{prefix}/{quote(run, safe='')}")

    @property
    def members(self) -> str:
        return f"{self.root}/members/"

    def member(self, id: int) -> str:
        return f"{self.members}{id}"

    @property
    def decided(self) -> str:
        """Prefix for the keys that all members watch."""
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
    """Return a run's name in an etcd shared by many jobs. In pods, the name begins with the namespace and the job, because a
    run's own name is unique only within its job."""
    place = [environ.get(name, "") for name in (contract.Env.NAMESPACE, contract.Env.JOB)]
    return "/".join([*filter(None, place), run])


@dataclass(frozen=True)
class _Value:
    def dumps(self) -> str:
        return json.dumps({_WIRE.get(name, name): value for name, value in dataclasses.asdict(self).items()})

    @classmethod
    def loads(cls, text: str) -> Self | None:
        """Parse a value; returns None if it is invalid, e.g. from another program or an incompatible version."""
        try:
            return decode(cls, {_FIELDS.get(wire, wire): value for wire, value in json.loads(text).items()})
        except (ValueError, AttributeError, RecursionError):
            return None


@dataclass(frozen=True)
class Record(_Value):
    """A member's report, with the last published state that the member has received."""

    report: Report
    token: str
    """Identifies the process."""
    nnodes: str = ""
    """`min:max` of torchrun's --nnodes, on which members must agree; empty in pods."""
    incarnation: str = ""
    """See `Published.incarnation`; empty before the member has received it."""
    world: World | None = None
    """The newest published world, with or without this member. A coordinator recovers lost state from it."""
    tokens: tuple[str, ...] = ()
    """Tokens of the members of `world`, in rank order."""


@dataclass(frozen=True)
class Leader(_Value):
    """The coordinator, as recorded in the leader's key."""

    token: str
    """Identifies the process."""
    host: str = ""
    id: int | None = None
    word: str = ""
    """A nonce, new for each election."""


@dataclass(frozen=True, kw_only=True)
class Published(PersistedState, _Value):
    """The published state, which only the coordinator writes."""

    by: str
    incarnation: str
    """Distinguishes successive runs with the same name."""
    previous_incarnation: str = ""
    """Incarnation of the previous run with this name, whose members are ignored."""
    nnodes: str = ""
    tokens: tuple[str, ...] = ()
    """Tokens of the world's processes, in rank order. An index alone identifies no process: another process may take it over."""
    leave_s: float = 0.0
    """Seconds from when a member receives a planned call until the call becomes unplanned."""
    why: str = ""
    """The coordinator's reason for waiting, without the remaining seconds, or a description of normal training."""
    done: tuple[int, ...] = ()
    """Members of the world that have finished, and may have exited."""
    ended: Mapping[str, str] = field(default_factory=dict)
    """Why each fenced process must exit, keyed by the process's token."""


def live(published: Published, leader: KeyValue | None) -> bool:
    """Return whether a state's writer still coordinates; if not, its run may be over."""
    current = Leader.loads(leader.value) if leader else None
    return current is not None and current.token == published.by


def nnodes_text(nnodes: str) -> str:
    """Return --nnodes as shown to people: `4` instead of `4:4`."""
    least, _, most = nnodes.partition(":")
    return nnodes if least != most else least
