"""`outlast rdzv show | watch`: what an etcd knows of who trains together.

Reads the keys that members and who decides have written (`rendezvous.transports.etcd.look`), and writes none.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast import contract
from outlast.cli import show as shown
from outlast.cli.show import Output, OutputOption
from outlast.errors import EtcdAway, NotFound

if TYPE_CHECKING:
    from outlast.etcd import Etcd
    from outlast.rendezvous.transports.etcd import Present, Run

_AGAIN_S = 1.0
"""How long after an etcd that does not answer it is asked again."""

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Look into an etcd at which workers meet: who is there, who decides, why a world waits.",
)

EndpointOption = Annotated[
    str,
    typer.Option(
        metavar="URL",
        envvar=contract.Env.RENDEZVOUS,
        help="The etcd: etcd://host:2379, etcds:// for TLS; several hosts with commas, then /PREFIX if it is not /outlast.",
        show_default=False,
    ),
]
RunOption = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Only this run: a --rdzv-id; of pods NAMESPACE/JOB.", show_default=False),
]


@app.command()
def show(endpoint: EndpointOption, run: RunOption = None, output: OutputOption = Output.TABLE) -> None:
    """Show the runs that an etcd knows, or one with its members.

    Who asks is said by the variables OUTLAST_ETCD_USER, _PASSWORD, _CACERT, _CERT and _KEY. Nothing is changed.

    \b
    Examples:
      outlast rdzv show --endpoint etcd://etcd:2379
      outlast rdzv show --endpoint etcd://etcd:2379 --run team-a/cifar10
      kubectl exec cifar10-0 -- outlast rdzv show -o json
    """
    with _client(endpoint) as client:
        found = _look(client, run)
        if output is not Output.TABLE:
            shown.data([facts(each) for each in found], output)
        else:
            print(page(found) or f"{client.address} knows no run below {client.address.prefix}", flush=True)


@app.command()
def watch(endpoint: EndpointOption, run: RunOption = None, output: OutputOption = Output.TABLE) -> None:
    """Show what changes in an etcd: on a terminal the runs as they are, otherwise a line for every change.

    With --run it ends when that run does. JSON is one document a line, the whole run after each change.

    \b
    Examples:
      outlast rdzv watch --endpoint etcd://etcd:2379
      outlast rdzv watch --endpoint etcd://etcd:2379 --run team-a/cifar10 -o json | jq .why
    """
    with _client(endpoint) as client:
        looks = _looks(client, run)
        if output is Output.TABLE and sys.stdout.isatty():
            from outlast.cli import live

            live.texts(page(found) for found in looks)
            return
        before: dict[str, Run] = {}
        for found in looks:
            now = {each.name: each for each in found}
            for name in sorted(before.keys() | now.keys()):
                if said := changes(before.get(name), now.get(name)):
                    _tell(name, now.get(name), said, output)
            before = now


def page(runs: Sequence[Run]) -> str:
    """A line a run; of a single one all that is known."""
    if len(runs) == 1:
        return _whole(runs[0])
    rows = []
    for run in runs:
        generation, size = (run.world.generation, len(run.world.members)) if run.world else (None, None)
        rows.append([run.name, len(run.members), generation, size, _decides(run), why(run)])
    return shown.table(["RUN", "MEMBERS", "GENERATION", "WORLD", "DECIDES", "WHY"], rows) if rows else ""


def why(run: Run) -> str:
    """Where a run stands, in the words of who decides."""
    if run.closed:
        return f"over: {run.closed.reason} (exit code {run.closed.code})"
    if run.called:
        return f"generation {run.called.generation} is called: {run.called.reason}" + (f"; {run.why}" if run.why else "")
    return run.why or ("nobody decides yet" if run.decider is None else "nothing is decided yet")


def facts(run: Run) -> dict[str, Any]:
    """A run as plain data."""
    return {
        "run": run.name,
        "nnodes": run.terms or None,
        "generation": run.world.generation if run.world else 0,
        "world": {"members": list(run.world.members), "address": run.world.address, "reason": run.world.reason}
        if run.world
        else None,
        "called": {"generation": run.called.generation, "reason": run.called.reason, "planned": run.called.planned}
        if run.called
        else None,
        "closed": {"reason": run.closed.reason, "code": run.closed.code} if run.closed else None,
        "decides": {"member": run.decider.id, "host": run.decider.host} if run.decider else None,
        "why": why(run),
        "members": [
            {
                "id": each.report.id,
                "standing": str(each.report.standing),
                "generation": each.report.generation,
                "address": each.report.address,
                "failure": (each.report.failure or {}).get("reason"),
                "lease_s": each.left_s,
            }
            for each in run.members
        ],
    }


def changes(old: Run | None, new: Run | None) -> list[str]:
    """What has become of a run between two looks, in sentences; that leases are renewed is no change."""
    if new is None:
        return ["is forgotten"]
    before = {each.report.id: each for each in old.members} if old else {}
    now = {each.report.id: each for each in new.members}
    said = [f"member {id} is gone" for id in before.keys() - now.keys()]
    for id, member in now.items():
        if id not in before or _standing(before[id]) != _standing(member):
            said.append(f"member {id} {'comes: ' if id not in before else 'is '}{_standing(member)}")
    if old is None or (old.decider and old.decider.token) != (new.decider and new.decider.token):
        said += [f"{_decides(new)} decides"] if new.decider else ["nobody decides"] if old and not new.closed else []
    if new.called and (old is None or old.called != new.called):
        said.append(f"generation {new.called.generation} is called: {new.called.reason}")
    if new.world and (old is None or old.world is None or old.world.generation != new.world.generation):
        said.append(_world(new))
    if new.closed and (old is None or old.closed != new.closed):
        said.append(why(new))
    elif new.why and not new.closed and (old is None or old.why != new.why):
        said.append(new.why)
    return said


# ---------------------------------------------------------------------------------------------------------------------- parts


@contextlib.contextmanager
def _client(endpoint: str) -> Iterator[Etcd]:
    from outlast import etcd

    with contextlib.closing(etcd.Etcd(etcd.address(endpoint))) as client:
        yield client


def _look(client: Etcd, run: str | None) -> list[Run]:
    """The runs that are meant. Raises NotFound, EtcdError."""
    found = _now(client, run)
    if run is not None and not found:
        there = ", ".join(each.name for each in _now(client, None)) or "none"
        raise NotFound(
            f"{client.address} knows no run {run} below {client.address.prefix}; it knows {there}. Runs that have ended are "
            "forgotten after a while"
        )
    return found


def _now(client: Etcd, run: str | None) -> list[Run]:
    from outlast.rendezvous.transports import etcd

    return etcd.look(client, run)


def _looks(client: Etcd, run: str | None) -> Iterator[list[Run]]:
    """What there is, now and after every change; with a run, until that is over. Goes on when the etcd was away."""
    from outlast.etcd import Behind

    there, away = f"{client.address.prefix}/", False
    revision: int | None = client.range(there, prefix=True).revision
    found = _look(client, run)
    while True:
        yield found
        if run is not None and found and all(each.closed for each in found):
            return
        try:
            if revision is None:
                revision = client.range(there, prefix=True).revision
            else:
                with contextlib.closing(client.watch(there, revision)) as watch:
                    revision = next(events[-1].modified for events in watch if events)
            found = _now(client, run)
            if away:
                _say("the etcd answers again")
            away = False
        except Behind:
            revision = None
        except EtcdAway as problem:
            if not away:
                _say(f"{problem}; trying again")
            revision, away = None, True
            time.sleep(_AGAIN_S)


def _tell(name: str, run: Run | None, said: Sequence[str], output: Output) -> None:
    if output is Output.TABLE:
        for sentence in said:
            print(f"{time.strftime('%H:%M:%S')} {name}: {sentence}", flush=True)
        return
    plain = facts(run) if run else {"run": name, "why": said[0]}
    if output is Output.JSON:
        print(json.dumps(plain), flush=True)
    else:
        print("---")
        shown.data(plain, output)
        sys.stdout.flush()


def _whole(run: Run) -> str:
    """All that is known of a run."""
    top = {
        "run": run.name,
        **({"nnodes": run.terms} if run.terms else {}),
        "world": _world(run) if run.world else "none yet",
        "decides": _decides(run) or "nobody",
        "why": why(run),
        **({"forgotten": f"in {run.left_s} s"} if run.closed and run.left_s is not None else {}),
    }
    rows = [
        [
            each.report.id,
            each.report.standing,
            each.report.generation or None,
            each.report.address or None,
            None if each.left_s is None else f"{each.left_s} s",
            (each.report.failure or {}).get("reason"),
        ]
        for each in run.members
    ]
    members = shown.table(["MEMBER", "STANDING", "GENERATION", "ADDRESS", "LEASE", "FAILED"], rows)
    return f"{shown.fields(top)}\n\n{members if rows else 'no members'}"


def _world(run: Run) -> str:
    assert run.world is not None
    members = f"member{'s' * (len(run.world.members) > 1)} {', '.join(map(str, run.world.members))}"
    return f"generation {run.world.generation}: {members} at {run.world.address} ({run.world.reason})"


def _decides(run: Run) -> str:
    """Who does, for people; empty when nobody does."""
    if run.decider is None:
        return ""
    who = "" if run.decider.id is None else f"member {run.decider.id}"
    return " on ".join(filter(None, (who, run.decider.host)))


def _standing(member: Present) -> str:
    report = member.report
    where = f" in generation {report.generation}" if report.standing == "training" else ""
    failed = f", failed: {(report.failure or {}).get('reason')}" if report.failed else ""
    return f"{report.standing}{where}{failed}"


def _say(sentence: str) -> None:
    print(f"outlast | {sentence}", file=sys.stderr, flush=True)
