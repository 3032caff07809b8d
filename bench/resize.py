"""Cost of a planned change of the number of workers: processes kept, processes replaced, and torchrun, in turn on one machine.

    python bench/resize.py                # 10 repeats, some ten minutes
    python bench/resize.py --repeats 1    # a look

Three workers of one process each grow to four, and then (ours only) shrink to two. The cost of a change is the time from the last
step of the old world to the first step that all ranks of the new one have ended, less one step, plus the steps that were done
again. Ours runs `resized.py`, which has a session, with and without `session.run`; torchrun, with its shortest time-outs, runs
`steps.py`, and gets a fourth node. In both a step takes 20 ms and one all-reduce. Prints the table and appends it to
bench/results/<date>-resize.md.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import recovery
from recovery import Book, Line, Outlast, Torchrun, complete, marked, waited

STEP_S = 0.02
LIMIT_S = 60.0
SYSTEMS = ("kept", "replaced", "torchrun")
CHANGES = {"grow from 3 to 4": (3, 4), "shrink from 4 to 2": (4, 2)}


class Resized(Outlast):
    """A job that runs `resized.py`."""

    script = "resized.py"

    def __init__(self, *, keep: bool) -> None:
        self.name = "kept" if keep else "replaced"
        self.args = ["--keep"] if keep else []

    def resize(self, workers: int) -> None:
        self._cli("scale", "bench", str(workers))


def trained(lines: list[Line], ranks: int) -> float | None:
    """Return when a world of this many ranks had ended 20 steps, or None."""
    return complete([line for line in lines if line.world_size == ranks and (line.step or 0) >= 20])


def cost(lines: list[Line], old: int, new: int) -> tuple[float, int] | None:
    """Return what the change from a world of `old` ranks to one of `new` ranks cost: seconds, and steps that were done again.
    None if no step of the new world has ended yet."""
    steps = [line for line in lines if line.step is not None]
    end = complete([line for line in steps if line.world_size == new])
    if end is None:
        return None
    last = max((line for line in steps if line.world_size == old), key=lambda line: line.time)
    first = min(line.step or 0 for line in steps if line.world_size == new)
    again = (last.step or 0) + 1 - first
    return end - last.time - STEP_S + again * STEP_S, again


Cost = tuple[float | None, int]
"""Seconds and repeated steps; None is never."""


def trial(system: str, rng: random.Random) -> dict[str, Cost]:
    """Run one job through the changes. Returns the cost of each."""
    directory = Path(tempfile.mkdtemp(prefix="outlast-bench-resize-"))
    job = Torchrun("torchrun", recovery.TUNED) if system == "torchrun" else Resized(keep=system == "kept")
    costs: dict[str, Cost] = {}
    with marked() as (environ, _):
        (directory / "steps").touch()
        book = Book(directory / "steps")
        job.start(directory, environ)
        for change, (old, new) in CHANGES.items():
            if waited(LIMIT_S, lambda: trained(book.lines(), old), job.over) is None:  # noqa: B023 (called in this turn)
                raise SystemExit(f"{system} did not train with {old} workers; see {directory}")
            time.sleep(rng.uniform(1.5, 2.5))
            before = len(book.lines())
            if isinstance(job, Resized):
                job.resize(new)
            else:
                job.add_node()
            paid = waited(LIMIT_S, lambda: cost(book.lines()[before:], old, new), job.over)  # noqa: B023 (called in this turn)
            costs[change] = paid or (None, 0)
            if paid is None or isinstance(job, Torchrun):
                break
    if any(seconds is None for seconds, _ in costs.values()):
        print(f"never: see {directory}")
    else:
        shutil.rmtree(directory, ignore_errors=True)
    return costs


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, load = random.Random(args.seed), os.getloadavg()[0]
    results: dict[str, list[dict[str, Cost]]] = {system: [] for system in SYSTEMS}
    for repeat in range(args.repeats):
        for system in SYSTEMS if repeat % 2 == 0 else reversed(SYSTEMS):
            results[system].append(trial(system, rng))
            print(f"{repeat + 1}/{args.repeats} {system:<9} {results[system][-1]}", flush=True)
    report = [f"## {time.strftime('%Y-%m-%d %H:%M')}", "", f"{recovery.machine()}. Load before: {load:.2f}.", ""]
    report += ["| change | processes | seconds: median (range) | steps again | kept / this |", "|---|---|---|---|---|"]
    for change in CHANGES:
        medians: dict[str, float] = {}
        for system in SYSTEMS:
            if paid := [trial[change] for trial in results[system] if change in trial]:
                medians[system] = recovery.median([s for s, _ in paid])
                again = [steps for seconds, steps in paid if seconds is not None]
                shown = f"{statistics.median(again):g} ({min(again)} – {max(again)})" if again else ""
                ratio = f"{medians['kept'] / medians[system]:.2f}"
                report.append(f"| {change} | {system} | {recovery.said([s for s, _ in paid])} | {shown} | {ratio} |")
    recovery.publish("resize", "Planned changes of the world", report)


if __name__ == "__main__":
    main()
