"""`outlast cluster`: clusters on EKS, from a `cluster.yaml`."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from outlast.errors import OutlastError

if TYPE_CHECKING:
    from outlast import fleet

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Plan, make, look at and remove clusters on EKS.")


@app.callback()
def group() -> None:
    """Plan, make, look at and remove clusters on EKS."""


ClusterFile = Annotated[Path | None, typer.Argument(metavar="FILE", help="A cluster.yaml.", show_default=False)]
PresetOption = Annotated[str | None, typer.Option(metavar="NAME", help="A preset instead of a file; `list` shows them.")]
PricesOption = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Prices of machines, to say what the cluster costs.", show_default=False)
]


@app.command()
def plan(
    file: ClusterFile = None,
    preset: PresetOption = None,
    prices: PricesOption = None,
    to: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the files of the plan into this directory.", show_default=False)
    ] = None,
    output: Annotated[Literal["text", "yaml", "json"], typer.Option("-o", "--output", help="Output format.")] = "text",
) -> None:
    """Print how a cluster would be made: its steps, their commands, the order in which machines are taken.

    Nothing is asked of AWS and nothing is made. --to writes eksctl.yaml, Helm values, manifests and the cluster.yaml itself,
    so the commands can be run from that directory by hand. yaml and json contain the documents of all files.

    \b
    Examples:
      outlast cluster plan cluster.yaml
      outlast cluster plan --preset list
      outlast cluster plan --preset workshop --to do-eks
      outlast cluster plan cluster.yaml --prices prices.yaml
      outlast cluster plan cluster.yaml -o json
    """
    from outlast import fleet
    from outlast.fleet import prices as priced

    if preset == "list":
        width = max(map(len, fleet.PRESETS))
        for name, sentence in fleet.PRESETS.items():
            print(f"{name:{width}}  {sentence}")
        return
    text, cluster = chosen(file, preset)
    made = fleet.plan(cluster, priced.load(prices) if prices else None)
    if to:
        written = write(made, to, text)
        print(f"outlast | wrote {len(written)} files to {to}: {', '.join(written)}", file=sys.stderr)
    if output == "text":
        print("\n".join(lines(made)))
    elif output == "json":
        print(json.dumps(plain(made), indent=2))
    else:
        from outlast.cli import render

        print(render.text([plain(made)]), end="")


def chosen(file: Path | None, preset: str | None) -> tuple[str, fleet.Cluster]:
    """The text of a cluster.yaml or of a preset, and the cluster in it."""
    from outlast import fleet

    if file and preset:
        raise OutlastError(f"{file} and --preset {preset} are both given; keep one")
    if preset:
        return fleet.preset_text(preset), fleet.preset(preset)
    if not file:
        raise OutlastError("there is no cluster to plan; give a cluster.yaml, or --preset NAME (--preset list shows them)")
    cluster = fleet.load(file)
    return file.read_text(encoding="utf-8-sig"), cluster


def write(made: fleet.Plan, to: Path, text: str) -> list[str]:
    """Write the files of a plan and its cluster.yaml, each as a whole; returns their names."""
    from outlast import files
    from outlast.cli import render

    if (there := _already(to)) and there != (made.cluster, made.region):
        raise OutlastError(
            f"{to} has the files of cluster {there[0]} in {there[1]}, and not of {made.cluster} in {made.region}; "
            "give another directory with --to"
        )
    texts = {"cluster.yaml": text} | {name: render.text(documents) for name, documents in made.files.items()}
    for name, content in texts.items():
        path = to / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.replace(path, content)
        except OSError as error:
            raise OutlastError(f"{path} cannot be written: {error.strerror}; give another directory with --to") from error
    return list(texts)


def _already(to: Path) -> tuple[str, str] | None:
    """Name and region of the cluster whose files are in a directory; None if there is no valid cluster.yaml."""
    from outlast import fleet

    try:
        found = fleet.load(to / "cluster.yaml")
    except OutlastError:
        return None
    return found.name, found.region


def plain(made: fleet.Plan) -> dict[str, Any]:
    """The plan as plain values, for programs."""
    return {
        "cluster": made.cluster,
        "region": made.region,
        "order": [dataclasses.asdict(each) for each in made.order],
        "steps": [{name: value for name, value in dataclasses.asdict(step).items() if value is not None} for step in made.steps],
        "cost": dataclasses.asdict(made.cost) if made.cost else None,
        "files": {name: list(documents) for name, documents in made.files.items()},
    }


def lines(made: fleet.Plan) -> Iterator[str]:
    """The plan for people."""
    from outlast.fleet import capacity

    yield f"{made.cluster} in {made.region}: {len(made.steps)} steps; those with $ make what costs money while it exists"
    if made.grows:
        yield from (f"new nodes for pods with {said}" for said in capacity.sentences(made.order))
    else:
        yield "nothing adds nodes for pending pods; add addons: {autoscaler: true}, or use: eksctl scale nodegroup"
    yield ""
    for number, step in enumerate(made.steps, 1):
        yield f"{number:3} {'$' if step.paid else ' '} {step.sentence}{_dollars(step.cost)}"
        yield f"      {shlex.join(step.command)}"
    if made.cost:
        yield f"\nin all{_dollars(made.cost)}, without disks, network and volumes"


def _dollars(cost: fleet.Cost | None) -> str:
    """`: $1.36 an hour at first, at most $6.80`; nothing without prices."""
    if cost is None:
        return ""
    if cost.first is None or cost.most is None:
        return ": the prices do not name all of its machines"
    first = f"${cost.first:.2f} an hour" if cost.first else "nothing"
    return f": {first}" if cost.first == cost.most else f": {first} at first, at most ${cost.most:.2f} an hour"
