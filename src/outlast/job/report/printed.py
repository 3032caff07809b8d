"""The goodput report as text for a terminal, and the same account as JSON."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

from outlast.base import units
from outlast.job.report.goodput import COUNTED, Goodput
from outlast.job.report.incidents import FAILURES, PLANNED, Incident, total
from outlast.job.report.steps import Bucket

_NAMES = {Bucket.REPLAYED: "replayed steps", Bucket.CHECKPOINT: "checkpoint stall", Bucket.STARTUP: "start-up"}
"""Names of buckets that say more than their values, which programs read."""
_FIELDS = ("time", "kind", "text", "worker", "generation", "attempt", "recovery_s", "replayed")
_TOTALS = {"failures": FAILURES, "interruptions": PLANNED}
PROGRESS = "from outlast.training import progress; progress(step, total)"
"""How a script without a session reports its steps."""
_BAR = 30
_SHOWN = 20


def plain(goodput: Goodput, title: str = "", width: int = 100) -> str:
    """Return the report, at most `width` columns wide, ending with a newline."""
    lines = [_headline(goodput, title), "", *_buckets(goodput), "", *_counts(goodput), *_incidents(goodput, width)]
    return "".join(f"{line.rstrip()}\n" for line in lines)


def as_json(goodput: Goodput) -> dict[str, Any]:
    """Return the account as plain values for JSON. Durations are in seconds, instants in seconds since the epoch."""
    fields = ("start", "end", "state", "wall_s", "goodput", "steps_replayed", "step_mean_s", "step_median_s", *COUNTED)
    totals = {kind: total(goodput.incidents, kinds) for kind, kinds in _TOTALS.items()}
    lost = {kind: {"count": each.failures, "seconds": each.seconds, "up_to": each.up_to} for kind, each in totals.items()}
    return {
        **{field: getattr(goodput, field) for field in fields},
        "seconds": {bucket.value: seconds for bucket, seconds in goodput.seconds.items()},
        "segments": [{"start": s.start, "end": s.end, "bucket": s.bucket.value} for s in goodput.segments],
        "incidents": [{**{field: getattr(i, field) for field in _FIELDS}, "lost": _lost(i)} for i in goodput.incidents],
        "lost": lost,
        "snapshots": dataclasses.asdict(goodput.snapshots) if goodput.snapshots else None,
    }


def _lost(incident: Incident) -> dict[str, Any] | None:
    """Return the training seconds lost to an incident; None while the incident continues, or if training never stopped."""
    lost = incident.lost
    if lost is None or incident.recovery_s is None:
        return None
    parts = {f"{part}_s": getattr(lost, f"{part}_us") / 1e6 for part in ("detection", "reforming", "restoring", "again")}
    return {"seconds": lost.seconds, **parts, "up_to": lost.up_to, "source": lost.source}


def _headline(goodput: Goodput, title: str) -> str:
    most = "" if goodput.steps_kept + goodput.steps_replayed else "at most "
    facts = [goodput.state or "running", units.human_seconds(goodput.wall_s), f"goodput {most}{units.percent(goodput.goodput)}"]
    return "  ".join([title, *facts] if title else facts)


def _buckets(goodput: Goodput) -> list[str]:
    """Return a line for each bucket that took time: training first, then the other buckets in descending order of time."""
    rows = sorted(Bucket, key=lambda bucket: (bucket is not Bucket.TRAINING, -goodput.microseconds[bucket]))
    lines = []
    for bucket in rows:
        if goodput.microseconds[bucket] or bucket is Bucket.TRAINING:
            name, share = _NAMES.get(bucket, bucket.value), goodput.share(bucket)
            lines.append(f"  {name:<17}{_seconds(goodput.seconds[bucket]):>11}  {units.percent(share):>7}  {_bar(share)}")
    return lines


def _seconds(seconds: float) -> str:
    """Format a duration as `units.human_seconds` does, but in seconds if it is below a minute."""
    return f"{seconds:.2f}s" if seconds < 59.995 else units.human_seconds(seconds)


def _bar(share: float) -> str:
    return "█" * round(share * _BAR) or ("▏" if share else "")


def counts(goodput: Goodput) -> dict[str, str]:
    """Return the counts as text, keyed by name: steps, saves, worlds, snapshots, lost."""
    steps = f"{goodput.steps_kept:,} kept"
    if goodput.steps_replayed:
        steps += f", {goodput.steps_replayed:,} replayed"
    if goodput.step_median_s is not None and goodput.step_mean_s is not None:
        median, mean = units.human_seconds(goodput.step_median_s), units.human_seconds(goodput.step_mean_s)
        steps += f"; {median} each in the median, {mean} in the mean"
    if not goodput.steps_kept + goodput.steps_replayed:
        steps = f"not reported, so that repeated ones count as training; exact with: {PROGRESS}"
    saves = f"{goodput.saves:,} committed"
    if goodput.saves_failed:
        saves += f", {goodput.saves_failed:,} failed"
    nouns = ("failure", "hang", "interruption", "restart")
    happened = [units.count(number, noun) for noun in nouns if (number := getattr(goodput, f"{noun}s"))]
    worlds = f"{goodput.worlds:,}" + (f" ({', '.join(happened)})" if happened else "")
    if not goodput.steps_kept + goodput.steps_replayed + goodput.saves + goodput.saves_failed:
        saves = ""  # a script that reports no steps saves on its own
    found = {"steps": steps, "saves": saves, "worlds": worlds, "snapshots": _snapshots(goodput), "lost": _total(goodput)}
    return {name: text for name, text in found.items() if text}


def _counts(goodput: Goodput) -> list[str]:
    found = counts(goodput)
    width = max(9, *(len(name) + 1 for name in found))
    return [f"  {name:<{width}}{text}" for name, text in found.items()]


def _snapshots(goodput: Goodput) -> str:
    """Return text such as `every 3 steps, 1.2 GiB, 1 replica`; empty if no snapshots were reported."""
    snapshots = goodput.snapshots
    if snapshots is None:
        return ""
    if not snapshots.every:
        return f"none: {snapshots.reason}" if snapshots.reason else "none"
    parts = ["every step" if snapshots.every == 1 else f"every {snapshots.every:,} steps"]
    parts += [units.human_bytes(snapshots.bytes)] if snapshots.bytes else []
    return ", ".join([*parts, units.count(snapshots.replicas, "replica") if snapshots.replicas else "no replica"])


def _total(goodput: Goodput) -> str:
    """Return text such as `3 failures cost 4.10s of training, 1.37s each`; empty before the first failure."""
    costs = []
    for kind, kinds in _TOTALS.items():
        cost = total(goodput.incidents, kinds)
        if count := cost.failures:
            each = f", {_seconds(cost.seconds / count)} each" if count > 1 else ""
            most = "up to " if cost.up_to else ""
            costs.append(f"{units.count(count, kind.removesuffix('s'))} cost {most}{_seconds(cost.seconds)} of training{each}")
    return "; ".join(costs)


def _cost(incident: Incident, steps: bool) -> str:
    """Return what an incident cost, such as `lost 1.40s: 0.20s detection + 1.20s re-forming`. For a script that reports no steps,
    it is only the time to the next world."""
    if not incident.recovery_s:
        return f"{units.count(incident.replayed, 'step')} again" if incident.replayed else ""
    lost = incident.lost
    if lost is None:
        return f"{units.human_seconds(incident.recovery_s)} to the next {'step' if steps else 'world'}"
    again = f"for {units.count(incident.replayed, 'step')} again" if incident.replayed else "of a step again"
    parts = [
        (lost.detection_us, "detection"),
        (lost.reforming_us, "re-forming"),
        (lost.restoring_us, f"restoring from {lost.source}" if lost.source else "restoring"),
        (lost.again_us, again),
    ]
    shown = " + ".join(f"{_seconds(us / 1e6)} {name}" for us, name in parts if us)
    return f"lost {'up to ' if lost.up_to else ''}{_seconds(lost.seconds)}{': ' if shown else ''}{shown}"


def _incidents(goodput: Goodput, width: int) -> list[str]:
    lines = [""] if goodput.incidents else []
    column = len(at(goodput.wall_s))
    if len(goodput.incidents) > _SHOWN:
        lines.append(f"  {len(goodput.incidents) - _SHOWN:,} earlier incidents are in the JSON")
    for incident in goodput.incidents[-_SHOWN:]:
        when = f"  {at(incident.time - goodput.start):>{column}}  "
        indent = " " * len(when)
        lines += textwrap.wrap(
            incident.text, width, initial_indent=when, subsequent_indent=indent, max_lines=2, placeholder=" …"
        ) or [when]
        if cost := _cost(incident, goodput.steps_kept > 0):
            lines += textwrap.wrap(f"… {cost}", width, initial_indent=indent, subsequent_indent=f"{indent}  ")
    return lines


def at(seconds: float) -> str:
    """Format a moment in the run, such as `0:42`, `1:02:03` or `50:00:00`."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
