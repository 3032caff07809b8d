"""`outlast simulate`: what a job would take and cost on machines that come and go."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast import units
from outlast.cli import show, terminal, which
from outlast.cli.show import Output, OutputOption
from outlast.errors import OutlastError

if TYPE_CHECKING:
    from outlast import spec
    from outlast.fleet.model import Capacity
    from outlast.simulation.choices import Choice, Result
    from outlast.simulation.profile import Profile
    from outlast.simulation.run import Job
    from outlast.simulation.traces import Trace

HEADINGS = (
    "FLEET",
    "WORKERS",
    "CHECKPOINT",
    "TIME",
    "WORST",
    "MACHINE-HOURS",
    "GOODPUT",
    "RECLAIMS",
    "LOSSES",
    "AGAIN",
    "WAITING",
)
_LONGER = 4
"""A made trace lasts so many times as long as the job on its fewest workers without a disturbance, then it begins again."""
_LEAVING_S = 5.0
"""What a worker needs to save and to leave, if its grace allows; arbitrary, and far below a notice of spot machines."""


def simulate(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The job file: workers, checkpoint interval, replicas.")],
    report: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="What `outlast report -o json` printed of a run; several of runs with other numbers of workers.",
            show_default=False,
        ),
    ] = None,
    step: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="Without a report: the time of a step on --workers workers.", min=1e-6, show_default=False
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", help="Workers of --step, or of reports that do not say it.", min=1, show_default=False),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="Steps to train. Default: those of the report.", min=1, show_default=False)
    ] = None,
    cluster: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A cluster.yaml: its groups are the fleet.", show_default=False)
    ] = None,
    group: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Of --cluster only these groups, of one shape. Default: all.", show_default=False),
    ] = None,
    spot: Annotated[int, typer.Option(metavar="N", help="Without --cluster: most spot machines.", min=0)] = 0,
    on_demand: Annotated[int, typer.Option(metavar="N", help="Without --cluster: most machines on demand.", min=0)] = 0,
    instance: Annotated[
        str | None, typer.Option(metavar="TYPE", help="Without --cluster: type of the machines.", show_default=False)
    ] = None,
    prices: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Prices per hour and type. Default: machine-hours.", show_default=False)
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Spot machines to be had: CSV with the columns seconds and available.", show_default=False
        ),
    ] = None,
    interruptions: Annotated[
        float, typer.Option(metavar="RATE", help="Without a trace: how often per hour a spot machine is taken.", min=0, max=3600)
    ] = 0.05,
    away: Annotated[str, typer.Option(metavar="TIME", help="Without a trace: until another one can be had, on average.")] = "30m",
    notice: Annotated[str, typer.Option(metavar="TIME", help="Warning before a spot machine is taken; 0s: none.")] = "2m",
    boot: Annotated[str, typer.Option(metavar="TIME", help="From the request for a machine until its worker is ready.")] = "4m",
    within: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Cheapest of what ends within this time, with every trace.", show_default=False),
    ] = None,
    draws: Annotated[int, typer.Option(metavar="N", help="Without a trace: so many are made.", min=1, max=1000)] = 20,
    seed: Annotated[int, typer.Option(metavar="N", help="Of the made traces.")] = 0,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw time against cost, and the machines: .svg, .png or .pdf.", show_default=False),
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Say what a job would take and cost on spot and on-demand machines.

    Plays the job through traces of spot capacity: a file, or made by chance. Spot machines are taken first, up to their cap, then
    machines on demand up to theirs. Shows the given fleet, each kind of machine alone, and the cheapest and the fastest of other
    checkpoint intervals and least and most workers. What a step, a change, a failure and a checkpoint take comes from reports of
    real runs (`outlast report cifar10 -o json > cifar10.json`); what they do not say is assumed, and named below the table.

    \b
    Examples:
      outlast simulate job.yaml --report cifar10.json --steps 200000 --spot 7 --on-demand 3
      outlast simulate job.yaml --report cifar10.json --steps 200000 --cluster cluster.yaml --prices prices.yaml --within 2d
      outlast simulate job.yaml --step 0.8 --workers 4 --steps 100000 --spot 8 --interruptions 0.2 --notice 0s
      outlast simulate job.yaml --report 2.json --report 4.json --steps 50000 --spot 7 --on-demand 3 \\
          --trace spot.csv --plot fleet.svg
    """
    from outlast import spec
    from outlast.simulation import choices
    from outlast.simulation.run import Fleet

    if plot is not None:
        from outlast.simulation import plot as plots

        plots.check(plot)
    job = spec.load(file)
    reports = [_report(path) for path in report or ()]
    profile = _profile(reports, step, workers, keeps=job.spec.checkpoint.memory != "off")
    machines = _machines(cluster, group or ()) if cluster else _Machines(spot, on_demand, (instance or "", instance or ""))
    if not machines.spot + machines.on_demand:
        raise OutlastError("the fleet has no machines; add --spot N, --on-demand N or --cluster FILE")
    times = {"boot_s": _seconds(boot, "--boot"), "notice_s": _seconds(notice, "--notice")}
    fleet = Fleet(machines.spot, machines.on_demand, *_prices(prices, machines), **times)
    trains = _job(job, profile, steps or sum(each.get("steps_kept") or 0 for each in reports[:1]))
    if trace is not None:
        traces = [_read(trace)]
    else:
        longest = _LONGER * trains.steps * profile.step_s(trains.sizes[0])
        traces = _made(fleet.spot, interruptions, _seconds(away, "--away"), longest, range(seed, seed + draws))
    given = choices.Choice("as given", fleet, trains)
    rows = [choices.played(each, profile, traces) for each in choices.fleets(given)]
    tried = [rows[0], *_played(list(choices.settings(given)), profile, traces)]
    limit = _seconds(within, "--within") if within else math.inf
    best = {"cheapest": choices.cheapest(each for each in tried if each.longest_s <= limit), "fastest": choices.fastest(tried)}
    rows += [dataclasses.replace(each, choice=dataclasses.replace(each.choice, name=name)) for name, each in best.items() if each]
    if output is not Output.TABLE:
        show.data({"traces": len(traces), "assumed": list(profile.assumed), "choices": [_plain(row) for row in rows]}, output)
    else:
        headings = ["COST" if prices and name == "MACHINE-HOURS" else name for name in HEADINGS]
        print(show.table(headings, (_cells(row, priced=prices is not None) for row in rows)))
        if best["cheapest"] is None:
            terminal.say(f"nothing ends within {within} with every trace" if within else "no setting ends with every trace")
        for sentence in profile.assumed:
            terminal.say(f"not measured, assumed: {sentence}")
    if plot is not None:
        plots.write(plot, rows, tried, "cost, $" if prices else "machine-hours")
        terminal.say(f"drawn to {plot}")


@dataclasses.dataclass(frozen=True)
class _Machines:
    """What a fleet has, and the types by which prices are looked up."""

    spot: int
    on_demand: int
    types: tuple[str, str]
    """Of spot machines, of machines on demand; empty: none was named."""


def _machines(path: Path, names: Sequence[str]) -> _Machines:
    """The groups of a cluster, all or some by name. Raises OutlastError if there is no such group, or they differ in shape."""
    from outlast import fleet
    from outlast.fleet import capacity

    cluster = fleet.load(path)
    known = {each.name: each for each in cluster.nodes}
    if unknown := [name for name in names if name not in known]:
        raise OutlastError(f"{path} has no group {unknown[0]}; it has {', '.join(known)}")
    groups = [known[each.name] for each in capacity.order(cluster) if not names or each.name in names]
    if len({cluster.shape(each) for each in groups}) > 1:
        raise OutlastError(f"{', '.join(each.name for each in groups)} of {path} differ in shape; name those of one with --group")
    caps = {kind: [each for each in groups if each.capacity == kind] for kind in ("spot", "on-demand")}
    types = [each[0].instance_types[0] if each else "" for each in caps.values()]
    spot, on_demand = (sum(group.max for group in each) for each in caps.values())
    return _Machines(spot, on_demand, (types[0], types[1] or types[0]))


def _prices(path: Path | None, machines: _Machines) -> tuple[float, float]:
    """Of a spot machine, of one on demand; 1 without a file, so that costs are machine-hours. Raises OutlastError if the file
    does not have them."""
    if path is None:
        return 1.0, 1.0
    from outlast.fleet import prices

    known, found = prices.load(path), []
    kinds: tuple[tuple[Capacity, int], ...] = (("spot", machines.spot), ("on-demand", machines.on_demand))
    for name, (kind, count) in zip(machines.types, kinds, strict=True):
        if count and not name:
            raise OutlastError("--prices needs the type of the machines; add --instance TYPE or --cluster FILE")
        price = known.of(name, kind) if name else None
        if price is None and (count or machines.spot):  # spot machines are compared with as many on demand
            raise OutlastError(f"{path} has no {kind} price of {name or machines.types[0]}; add it")
        found.append(price or 0.0)
    return found[0], found[1]


def _report(path: Path) -> dict[str, Any]:
    """What `outlast report -o json` has printed."""
    try:
        found = json.loads(path.read_text())
    except OSError as error:
        raise OutlastError(f"{path} cannot be read: {error.strerror}; make it with outlast report -o json") from error
    except ValueError:
        found = None
    if not isinstance(found, dict) or "step_median_s" not in found:
        raise OutlastError(f"{path} is no report; make it with outlast report NAME -o json")
    return found


def _profile(reports: Sequence[dict[str, Any]], step: float | None, workers: int | None, *, keeps: bool) -> Profile:
    """How fast the job is: by its reports, or by what is said of a step."""
    from outlast.simulation import profile

    if bool(reports) == (step is not None):
        raise OutlastError("say how fast the job is: --report FILE of a run, or --step SECONDS with --workers N")
    if step is None:
        return profile.measured(reports, workers, snapshots=keeps)
    if workers is None:
        raise OutlastError(f"--step {step:g} needs the number of workers that it was measured with; add --workers N")
    return profile.measured([{"name": "--step", "step_median_s": step, "snapshots": {"every": 1}}], workers, snapshots=keeps)


def _job(job: spec.Job, profile: Profile, steps: int) -> Job:
    """The job as it is simulated."""
    from outlast.simulation.run import Job

    if not steps:
        raise OutlastError("how long is the training? add --steps N")
    fields = job.spec
    leaving = min(_LEAVING_S, fields.interruption.grace.total_seconds())
    every, sizes = fields.checkpoint.every, fields.workers.allowed()
    at_full_size = (every.steps or 0) * profile.step_s(sizes[-1])
    every_s = every.duration.total_seconds() if every.duration else at_full_size
    return Job(steps, sizes, every_s, fields.checkpoint.replicas, leaving)


def _read(path: Path) -> Trace:
    from outlast.simulation import traces

    try:
        return traces.read(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise OutlastError(f"--trace {path} cannot be read: {why}; name a CSV file") from error


def _made(machines: int, per_hour: float, away_s: float, longest_s: float, seeds: Iterable[int]) -> list[Trace]:
    from outlast.simulation import traces

    if not away_s:
        raise OutlastError("--away 0s: a machine that is taken is away for a while; say 1m or longer")
    return [traces.made(machines, per_hour, away_s, length_s=longest_s, rng=random.Random(seed)) for seed in seeds]


def _seconds(text: str, option: str) -> float:
    return which.duration(option, text).total_seconds()


def _played(settings: Sequence[Choice], profile: Profile, traces: Sequence[Trace]) -> Iterable[Result]:
    """Every choice with all traces, with a bar on a terminal."""
    from rich.progress import track

    from outlast.simulation import choices

    console = terminal.console(stderr=True)
    for each in track(settings, "playing", console=console, transient=True, disable=not console.is_terminal):
        yield choices.played(each, profile, traces)


def _workers(job: Job) -> str:
    return f"{job.sizes[0]}–{job.sizes[-1]}" if len(job.sizes) > 1 else str(job.sizes[0])


def _cells(row: Result, *, priced: bool) -> tuple[object, ...]:
    choice, typical = row.choice, row.typical
    what = (choice.name, _workers(choice.job), units.human_seconds(choice.job.every_s))
    if not row.ended:
        ended = sum(each.ended for each in row.outcomes)
        return (*what, f"ends in {ended} of {len(row.outcomes)}", *[None] * (len(HEADINGS) - len(what) - 1))
    times = units.human_seconds(row.wall_s), units.human_seconds(row.longest_s)
    cost = f"${row.cost:,.2f}" if priced else f"{row.cost:,.1f}"
    share = units.percent(row.median(lambda each: each.goodput))
    return (
        *(*what, *times, cost, share, typical.reclaims, typical.losses),
        *(units.human_seconds(typical.again_s), units.human_seconds(typical.waiting_s)),
    )


def _plain(row: Result) -> dict[str, Any]:
    """For JSON: medians over the traces, in seconds and dollars."""
    choice = row.choice
    return {
        "name": choice.name,
        "spot": choice.fleet.spot,
        "on_demand": choice.fleet.on_demand,
        "sizes": list(choice.job.sizes),
        "checkpoint_every_s": choice.job.every_s,
        "ended": sum(each.ended for each in row.outcomes),
        "wall_s": row.wall_s,
        "longest_s": row.longest_s,
        "cost": row.cost,
        "goodput": row.median(lambda each: each.goodput),
        **{
            name: row.median(lambda each, name=name: getattr(each, name))  # type: ignore[misc] # a lambda with a default
            for name in ("again_s", "changing_s", "saving_s", "waiting_s", "reclaims", "losses")
        },
    }
