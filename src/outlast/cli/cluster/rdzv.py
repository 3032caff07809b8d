"""`outlast rdzv show`: showing the rendezvous of runs that coordinate through etcd. The command only reads keys."""

from __future__ import annotations

import contextlib
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
    """Show the runs in etcd with their members, or one run.

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
            nothing = f"{client.address} has no run below {client.address.prefix}"
            print("\n\n".join(map(page, runs)) or nothing, flush=True)


def page(run: Run) -> str:
    """Format a run with its members as text."""
    known = facts(run)
    world, members, decides = known["world"], known["members"], run.coordinator
    member = f"member {decides.id} on " if decides and decides.id is not None else ""
    top = {
        "run": run.name,
        "nnodes": known["nnodes"],
        "generation": known["generation"] or None,
        "world": f"members {', '.join(map(str, world['members']))} at {world['address']} ({world['reason']})" if world else None,
        "decides": f"{member}{decides.host}" if decides else "nobody",
        "why": known["why"],
        "forgotten": f"in {run.left_s} s" if run.closed and run.left_s is not None else None,
    }
    table = (
        tables.table([name.upper() for name in members[0]], [[*each.values()] for each in members]) if members else "no members"
    )
    return f"{tables.fields(top)}\n\n{table}"


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
