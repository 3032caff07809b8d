"""`outlast rdzv show`: showing the rendezvous of runs that coordinate through etcd. The command only reads keys."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.base.errors import NotFound
from outlast.cli import tables
from outlast.cli.groups import Commands
from outlast.cli.tables import Output, OutputOption
from outlast.job import contract

if TYPE_CHECKING:
    from outlast.rendezvous.etcd.client import Run
    from outlast.rendezvous.etcd.gateway import Etcd

app = typer.Typer(
    cls=Commands, no_args_is_help=True, rich_markup_mode=None, help="Show the rendezvous of runs that meet in an etcd."
)

EndpointOption = Annotated[
    str,
    typer.Option(
        metavar="URL",
        envvar=contract.Env.RENDEZVOUS,
        help="The etcd: etcd://host:2379, etcds:// for TLS; several hosts with commas, then /PREFIX if it is not /outlast.",
    ),
]
RunOption = Annotated[str | None, typer.Option(metavar="NAME", help="Only this run: its --rdzv-id, or NAMESPACE/JOB for pods.")]


@app.command()
def show(endpoint: EndpointOption, run: RunOption = None, output: OutputOption = Output.TABLE) -> None:
    """Show the runs in etcd, or one run with its members.

    Credentials come from the variables OUTLAST_ETCD_USER, _PASSWORD, _CACERT, _CERT and _KEY. Nothing is changed.

    \b
    Examples:
      outlast rdzv show --endpoint etcd://etcd:2379
      outlast rdzv show --endpoint etcd://etcd:2379 --run team-a/cifar10
      kubectl exec cifar10-0 -- outlast rdzv show -o json
    """
    from outlast.rendezvous.etcd import gateway

    with contextlib.closing(gateway.Etcd(gateway.address(endpoint))) as client:
        runs = _look(client, run)
        if output is not Output.TABLE:
            tables.data([facts(each) for each in runs], output)
        else:
            print(page(runs) or f"{client.address} has no run below {client.address.prefix}", flush=True)


def page(runs: Sequence[Run]) -> str:
    """Format runs as text: one line each, or a single run with all its members."""
    if len(runs) == 1:
        return _whole(runs[0])
    rows = []
    for run in runs:
        generation, size = (run.world.generation, len(run.world.members)) if run.world else (None, None)
        rows.append([run.name, len(run.members), generation, size, _decides(run), why(run)])
    return tables.table(["RUN", "MEMBERS", "GENERATION", "WORLD", "DECIDES", "WHY"], rows) if rows else ""


def why(run: Run) -> str:
    """Return the coordinator's reason for a run's current state."""
    if run.closed:
        return f"over: {run.closed.reason} (exit code {run.closed.code})"
    if run.called:
        return f"generation {run.called.generation} is called: {run.called.reason}" + (f"; {run.why}" if run.why else "")
    return run.why or ("nobody decides yet" if run.coordinator is None else "nothing is decided yet")


def facts(run: Run) -> dict[str, Any]:
    """Return a run as plain data."""
    return {
        "run": run.name,
        "nnodes": run.nnodes or None,
        "generation": run.world.generation if run.world else 0,
        "world": {"members": list(run.world.members), "address": run.world.address, "reason": run.world.reason}
        if run.world
        else None,
        "called": {"generation": run.called.generation, "reason": run.called.reason, "planned": run.called.planned}
        if run.called
        else None,
        "closed": {"reason": run.closed.reason, "code": run.closed.code} if run.closed else None,
        "decides": {"member": run.coordinator.id, "host": run.coordinator.host} if run.coordinator else None,
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


# ---------------------------------------------------------------------------------------------------------------------- parts


def _look(client: Etcd, run: str | None) -> list[Run]:
    from outlast.rendezvous.etcd import client as etcd

    runs = etcd.look(client, run)
    if run is not None and not runs:
        names = ", ".join(each.name for each in etcd.look(client, None)) or "none"
        raise NotFound(
            f"{client.address} has no run {run} below {client.address.prefix}; it has {names}. Runs that have ended are deleted "
            "after a while"
        )
    return runs


def _whole(run: Run) -> str:
    top = {
        "run": run.name,
        **({"nnodes": run.nnodes} if run.nnodes else {}),
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
    members = tables.table(["MEMBER", "STANDING", "GENERATION", "ADDRESS", "LEASE", "FAILED"], rows)
    return f"{tables.fields(top)}\n\n{members if rows else 'no members'}"


def _world(run: Run) -> str:
    assert run.world is not None
    members = f"member{'s' * (len(run.world.members) > 1)} {', '.join(map(str, run.world.members))}"
    return f"generation {run.world.generation}: {members} at {run.world.address} ({run.world.reason})"


def _decides(run: Run) -> str:
    if run.coordinator is None:
        return ""
    who = "" if run.coordinator.id is None else f"member {run.coordinator.id}"
    return " on ".join(filter(None, (who, run.coordinator.host)))
