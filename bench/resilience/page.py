"""Makes docs/compare.md, its plot and the README's table from the kept results; the prose is in template.md."""

from __future__ import annotations

import difflib
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.resilience import systems, trace

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "compare.md"
README = ROOT / "README.md"
OURS = ("outlast", "outlast-trainer")
KINDS = ("process", "worker", "hang", "silent", "notice", "resize")
SHOWN = (
    "outlast",
    "outlast-trainer",
    "torchrun-tuned",
    "elastic-tuned",
    "torchft-tuned",
    "dlrover",
    "nvrx-tuned",
    "ray-tuned",
    "hf",
)
"""Rows of the README."""

ABSENT = -1
"""Number of the repeat of a record that only says why a system was left out."""

Record = dict[str, Any]


def load(path: Path) -> list[Record]:
    """Return the kept trials."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def alike(record: Record) -> tuple[str, int, str, str]:
    """Return what must be the same for trials that stand in one table."""
    return record["trace"], record["seed"], record["device"], record["machine"]


class Row:
    """The trials of one system."""

    def __init__(self, name: str, records: Sequence[Record]) -> None:
        self.name, self.system = name, systems.known(None)[name]
        self.records = [record for record in records if record["repeat"] != ABSENT] or records
        self.legs = [leg for record in records for leg in record["legs"] if leg["name"] != "calm"]
        self.faults = [fault for leg in self.legs for fault in leg["faults"] if fault.get("hit", True)]

    def of(self, kind: str, part: str) -> list[float]:
        """Return a part of the cost of each fault of a kind, infinity for never."""
        return [math.inf if f["lost_s"] is None or f[part] is None else f[part] for f in self.faults if f["kind"] == kind]

    def goodput(self) -> float:
        """Return the median of the trials' goodput: steps that count x undisturbed pace / wall time."""
        found = []
        for record in self.records:
            legs = [leg for leg in record["legs"] if leg["name"] != "calm" and "wall_s" in leg]
            if legs:
                found.append(sum((leg["steps"] - 1) * record["pace_s"] for leg in legs) / sum(leg["wall_s"] for leg in legs))
        return middle(found)

    def came_back(self) -> tuple[int, int]:
        """Return how often training went on by itself, of how many faults."""
        return sum(fault["lost_s"] is not None for fault in self.faults), len(self.faults)

    def value(self, part: str) -> float:
        """Return the median of a number of all trials, such as `pace_s`, or of their legs."""
        found = [record[part] for record in self.records if part in record] or [leg[part] for leg in self.legs if part in leg]
        return middle(found)

    def same(self) -> bool | None:
        found = [leg["same"] for leg in self.legs if leg.get("same") is not None]
        return all(found) if found else None

    def changed(self) -> int:
        """Return how many lines of code differ from the script that has no saving."""
        if self.system.base == self.system.script:
            return 0
        old, new = (code(systems.SCRIPTS / name) for name in (self.system.base, self.system.script))
        return sum(line[0] in "+-" for line in difflib.ndiff(old, new))


def code(path: Path) -> list[str]:
    """Return the lines of a script without its docstring and empty lines."""
    text = re.sub(r'\A""".*?"""\n', "", path.read_text(), flags=re.DOTALL)
    return [line for line in text.splitlines() if line.strip()]


# Cells


def number(value: float) -> str:
    """Return seconds or steps as text: never, 0.84, 12."""
    if math.isnan(value):
        return "–"
    shown = f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
    return "never" if math.isinf(value) else shown.rstrip("0").rstrip(".")


def spread(values: Sequence[float]) -> str:
    """Return the median, and the worst in brackets."""
    if not values:
        return "–"
    middle, worst = statistics.median(values), max(values)
    return number(middle) + (f" ({number(worst)})" if len(values) > 1 and worst != middle else "")


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{100 * value:.0f} %"


# Parts of the page


def lost(rows: Sequence[Row], kinds: Sequence[str] = KINDS) -> str:
    body = []
    for row in rows:
        back, faults = row.came_back()
        cells = [spread(row.of(kind, "lost_s")) for kind in kinds]
        body.append([row.system.title, *cells, f"{back} of {faults}" if faults else "–", percent(row.goodput())])
    return table(["system", *kinds, "came back", "goodput"], body)


def exact(rows: Sequence[Row]) -> str:
    body = []
    for row in rows:
        again = [float(fault["again"]) for fault in row.faults if fault["lost_s"] is not None]
        whole = [value for kind in KINDS for value in row.of(kind, "whole_s")]
        kept = "samples" in row.system.claims
        wrong = [
            number(sum(leg.get(part, 0) for leg in row.legs)) if kept and row.legs else "–" for part in ("repeated", "missing")
        ]
        weights = {None: "–", True: "yes", False: "no"}[row.same()]
        costs = [number(row.value("pace_s")), number(row.value("start_s")), str(row.changed()) if row.changed() else "–"]
        body.append([row.system.title, spread(again), spread(whole), weights, *wrong, *costs])
    return table(
        ["system", "steps again", "all train", "same weights", "repeated", "missing", "step, s", "start, s", "lines"], body
    )


def better(rows: Sequence[Row]) -> str:
    """Return a sentence for each cell in which a peer is better than a row of ours."""
    cells: dict[str, Callable[[Row], float]] = {
        **{f"seconds lost, {kind}": lambda row, kind=kind: middle(row.of(kind, "lost_s")) for kind in KINDS},
        "goodput": lambda row: -row.goodput(),
        "faults that it did not come back from": lambda row: row.came_back()[1] - row.came_back()[0] if row.faults else math.nan,
        "steps again": lambda row: middle([fault["again"] for fault in row.faults if fault["lost_s"] is not None]),
        "seconds of a step without faults": lambda row: row.value("pace_s"),
        "seconds from start to first step": lambda row: row.value("start_s"),
        "lines changed": lambda row: row.changed() or math.nan,
    }
    sentences = []
    for name, cell in cells.items():
        for ours in (row for row in rows if row.name in OURS):
            ahead = {row.system.title: cell(row) for row in rows if row.name not in OURS and cell(row) < cell(ours)}
            if ahead:
                shown = percent if name == "goodput" else number
                said = ", ".join(
                    f"{title} {shown(abs(value))}" for title, value in sorted(ahead.items(), key=lambda item: item[1])
                )
                sentences.append(f"* **{name}**: {said}; {ours.system.title} {shown(abs(cell(ours)))}.")
    return "\n".join(sentences) or "In no cell of the tables below."


def middle(values: Sequence[float]) -> float:
    return statistics.median(values) if values else math.nan


def parts(rows: Sequence[Row]) -> str:
    names = ("detection_s", "reforming_s", "restoring_s", "again_s")
    body = []
    for row in rows:
        incidents = [each for leg in row.legs for each in leg.get("parts", [])]
        for kind in sorted({each["kind"] for each in incidents}):
            of = [each for each in incidents if each["kind"] == kind]
            body.append([row.system.title, kind, str(len(of)), *(number(middle([each[name] for each in of])) for name in names)])
    return table(["system", "failure", "times", "detection", "re-forming", "restoring", "steps again"], body)


def measured(rows: Sequence[Row]) -> str:
    """Return what was measured, where, and how busy the machine was."""
    records = [record for row in rows for record in row.records]
    first, loads = records[0], sorted(load for record in records for load in record["load"])
    days = sorted({record["at"][:10] for record in records})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    trials = sorted({len(row.records) for row in rows if row.legs})
    return (
        f"Measured {when} on: {first['machine']}. {number(first['millions'])} M parameters. Load before and after a trial: "
        f"median {statistics.median(loads):.1f}, highest {loads[-1]:.1f}. Trials of a system: {' to '.join(map(str, trials))}. "
        f"Trace: {first['trace']}, seed {first['seed']}. [All results](../bench/results/resilience.jsonl)."
    )


def versions(rows: Sequence[Row]) -> str:
    body = []
    for row in rows:
        failures = {record["failure"] for record in row.records if record["failure"]}
        trials = sum(record["repeat"] != ABSENT for record in row.records)
        said = [", ".join(sorted({record["version"] for record in row.records})), str(trials)]
        body.append([row.system.title, *said, str(sum(leg["by_hand"] for leg in row.legs)), "; ".join(sorted(failures)) or "–"])
    return table(["system", "version", "trials", "starts by hand", "job lost, or left out"], body)


def render(records: Sequence[Record]) -> str:
    """Return the page of the trials of one trace on one machine."""
    rows = sorted_rows(records)
    plan: trace.Trace = getattr(trace, records[0]["trace"])()
    found = {
        "measured": measured(rows),
        "better": better(rows),
        "limit": f"{plan.limit_s:g} s ({plan.quiet_limit_s:g} s after a hang or silence)",
        "lost": lost(rows),
        "exact": exact(rows),
        "parts": parts(rows),
        "systems": versions(rows),
    }
    text = Path(__file__).with_name("template.md").read_text()
    return re.sub(r"<!-- (\w+) -->", lambda match: found[match[1]], text)


def sorted_rows(records: Sequence[Record]) -> list[Row]:
    of = {name: [record for record in records if record["system"] == name] for name in systems.known(None)}
    return [Row(name, those) for name, those in of.items() if those]


def readme(text: str, records: Sequence[Record]) -> str:
    """Return the README with its table made anew."""
    rows = [row for row in sorted_rows(records) if row.name in SHOWN]
    block = f"<!-- compare -->\n{lost(rows)}\n<!-- /compare -->"
    return re.sub(r"<!-- compare -->.*?<!-- /compare -->", lambda _: block, text, flags=re.DOTALL)


def chosen(records: Sequence[Record]) -> list[Record]:
    """Return the trials of the page: of the trace, device and machine of the last one."""
    return [record for record in records if alike(record) == alike(records[-1])]


def write(path: Path, records: Sequence[Record]) -> None:
    """Write the page and its plot, and for docs/compare.md the README's table."""
    if not records:
        raise SystemExit("there are no results; run --short or --full first")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(chosen(records)).replace("(compare.svg)", f"({path.stem}.svg)"))
    plot(chosen(records), path.with_suffix(".svg"))
    if path == PAGE:
        README.write_text(readme(README.read_text(), chosen(records)))


def plot(records: Sequence[Record], path: Path) -> None:
    """Draw the training of the first trial of each system against wall time: legs with faults, one after the other."""
    import matplotlib.pyplot as plt

    rows = [row for row in sorted_rows(records) if row.legs]
    plt.rcParams.update({"svg.hashsalt": "compare", "font.size": 8, "svg.fonttype": "none"})
    figure, frames = plt.subplots(len(rows), 1, figsize=(9, 0.9 * len(rows)), sharex=True, squeeze=False)
    for (frame,), row in zip(frames, rows, strict=True):
        start = 0.0
        for leg in (leg for leg in row.records[0]["legs"] if leg["name"] != "calm" and "curve" in leg):
            times, steps = zip(*leg["curve"], strict=True)
            frame.plot([start + t for t in times], steps, color="C0" if row.name in OURS else "C1", linewidth=1)
            at = [start + t for t in leg["struck"]]
            frame.plot(at, [fault["step"] for fault in leg["faults"]], "kx", markersize=4)
            start += max(leg["wall_s"], times[-1])
        frame.set_ylabel(row.system.title, rotation=0, ha="right", va="center")
        frame.set_yticks([])
    frames[-1][0].set_xlabel("seconds of wall time; height: step")
    figure.savefig(path, bbox_inches="tight", metadata={"Date": None})
