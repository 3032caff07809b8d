"""`outlast cluster create | status | delete`."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli import cluster as planned
from outlast.cli import show, terminal
from outlast.cli.cluster import ClusterFile, PresetOption, PricesOption
from outlast.cli.show import Output, OutputOption

if TYPE_CHECKING:
    from outlast import fleet
    from outlast.provision.tools import Tools

DirectoryOption = Annotated[
    Path | None,
    typer.Option(
        "--to",
        metavar="DIR",
        help="Directory of the plan's files and kubeconfig. Default: the name of the cluster.",
        show_default=False,
    ),
]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


def create(
    file: ClusterFile = None,
    preset: PresetOption = None,
    to: DirectoryOption = None,
    prices: PricesOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and write nothing.")] = False,
    yes: YesOption = False,
) -> None:
    """Make a cluster on EKS, or go on where an earlier call stopped.

    Writes the files of the plan into a directory, then runs its commands one after another: eksctl, kubectl, helm. What is
    done already is not done again, so the same command continues after Ctrl-C, a lost connection or an error, and changes
    nothing once all is done. Asks first, and says what will cost money.

    \b
    Examples:
      outlast cluster create cluster.yaml
      outlast cluster create --preset workshop --to do-eks
      outlast cluster create cluster.yaml --prices prices.yaml --dry-run
      outlast cluster create cluster.yaml --yes
    """
    from outlast.cloud import clusters
    from outlast.provision import create as creation
    from outlast.provision import tools

    text, made = _plan(file, preset, prices)
    directory = to or Path(made.cluster)
    if dry_run:
        print("\n".join(planned.lines(made)))
        return
    tools.check(step.kind for step in made.steps)
    found = clusters.find(made.cluster, made.region)
    creation.stage(found, made.cluster)
    account = clusters.account(made.region)
    if not yes:
        print("\n".join(planned.lines(made)), file=sys.stderr)
        terminal.confirm(
            f"this makes cluster {made.cluster} in {made.region}, account {account}, and costs money until it is deleted"
        )
    planned.write(made, directory, text)
    runs = _tools(directory)
    world = creation.World(runs, lambda: clusters.find(made.cluster, made.region), terminal.say)
    count = creation.create(made, world)
    terminal.say(f"cluster {made.cluster} is there; {show.count(count, 'step')} done now, {len(made.steps) - count} before")
    terminal.say(f"to use it: export KUBECONFIG={directory.resolve() / _kubeconfig()}")


def status(
    file: ClusterFile = None,
    preset: PresetOption = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show which steps of a cluster's plan are done, and its nodes.

    Asks AWS, eksctl, helm and the cluster, and changes nothing. `outlast doctor` then says whether training would work there.

    \b
    Examples:
      outlast cluster status cluster.yaml
      outlast cluster status --preset workshop
      outlast cluster status cluster.yaml -o json
    """
    from outlast.cloud import clusters
    from outlast.provision import create as creation
    from outlast.provision import nodes, tools

    text, made = _plan(file, preset)
    found = clusters.find(made.cluster, made.region)
    there = bool(found.status)
    steps: list[tuple[fleet.Step, bool | None]] = [(step, False) for step in made.steps]
    groups: dict[str, int] = {}
    if there:
        tools.check(step.kind for step in made.steps)
        with _looking(made, text, there=True) as (runs, _):
            steps = list(creation.states(made, runs))
            groups = nodes.counted(runs.ask(nodes.ASK).output)
    if output is not Output.TABLE:
        states = [{"key": step.key, "done": done} for step, done in steps]
        facts = {"cluster": made.cluster, "region": made.region, **dataclasses.asdict(found)}
        show.data({**facts, "steps": states, "nodes": groups}, output)
        return
    whose = "" if found.ours else "; not made by Outlast"
    state = f"{found.status}, Kubernetes {found.version}{whose}" if there else "is not there"
    print(f"{made.cluster} in {made.region}: {state}\n")
    words = {True: "done", False: "not done", None: "cannot be asked"}
    print(show.table(("STEP", "STATE"), ((step.key, words[done]) for step, done in steps)))
    if there:
        rows = ((each.name, each.capacity, groups.get(each.name, 0), each.most) for each in made.order)
        print("\n" + show.table(("NODES", "CAPACITY", "READY", "MOST"), rows))


def delete(
    file: ClusterFile = None,
    preset: PresetOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be removed, and remove nothing.")] = False,
    yes: YesOption = False,
) -> None:
    """Remove a cluster that Outlast has made, and say what is left.

    Shows what goes and what stays, and asks. A cluster without our tags is never touched. Volumes of `outlast volume` stay; disks
    of claims and other remains are named afterwards, with the command that removes each.

    \b
    Examples:
      outlast cluster delete cluster.yaml --dry-run
      outlast cluster delete --preset workshop
      outlast cluster delete cluster.yaml --yes
    """
    from outlast.cloud import clusters
    from outlast.provision import delete as deletion
    from outlast.provision import tools

    text, made = _plan(file, preset)
    name, region = made.cluster, made.region
    found = clusters.find(name, region)
    if deletion.judged(found, name, region):
        if found.status:
            tools.check(("eksctl", "kubectl"))
        with _looking(made, text, there=bool(found.status)) as (runs, reached):
            asked = deletion.look(runs, bool(found.status), reached)
            for line in deletion.listed(asked, name, region, clusters.tagged(name, region)):
                print(line)
            if dry_run:
                return
            if not yes:
                terminal.confirm(f"this removes cluster {name} in {region}, account {clusters.account(region)}")
            if asked.exists:
                deletion.delete(asked, name, region, runs, terminal.say)
            for stack in clusters.stacks(name, region):  # eksctl deletes nothing of a cluster whose control plane is not there
                terminal.say(f"deletes the stack {stack}")
                clusters.delete_stack(stack, region)
        terminal.say(f"cluster {name} is gone")
    else:
        terminal.say(f"there is no cluster {name} in {region}")
    found_left = clusters.tagged(name, region), clusters.disks(name, region), clusters.machines(name, region)
    for line in (remains := deletion.left(name, region, *found_left)):
        print(f"left: {line}")
    if not remains:
        terminal.say("nothing is left")


def _plan(file: Path | None, preset: str | None, prices: Path | None = None) -> tuple[str, fleet.Plan]:
    """The text of a cluster's file, and its plan."""
    from outlast import fleet
    from outlast.fleet import prices as priced

    text, cluster = planned.chosen(file, preset)
    return text, fleet.plan(cluster, priced.load(prices) if prices else None)


def _kubeconfig() -> str:
    from outlast.fleet import steps

    return steps.KUBECONFIG


def _tools(directory: Path) -> Tools:
    """What runs programs in a directory with the files of a plan."""
    from outlast.provision import tools

    return tools.Tools(directory, tools.environment(directory.resolve() / _kubeconfig()), terminal.say)


@contextlib.contextmanager
def _looking(made: fleet.Plan, text: str, *, there: bool) -> Iterator[tuple[Tools, bool]]:
    """What asks a cluster, from a directory that is gone afterwards; and whether its kubeconfig leads there."""
    with tempfile.TemporaryDirectory(prefix="outlast-cluster-") as directory:
        planned.write(made, Path(directory), text)
        runs = _tools(Path(directory))
        reached = False
        if there:
            (write,) = (step.command for step in made.steps if step.key == "kubeconfig")
            reached = runs.ask(write).code == 0
        yield runs, reached
