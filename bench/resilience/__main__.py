"""The command line: prepares, runs, draws. Run from the root of a clone: `python -m bench.resilience --help`."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from pathlib import Path

from bench.resilience import drive, page, peers, systems, trace

RESULTS = Path(__file__).parents[1] / "results" / "resilience.jsonl"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.resilience", description=__doc__)
    parser.add_argument("--prepare", type=Path, metavar="PEERS", help="make the environments of the peers in this directory")
    parser.add_argument("--short", action="store_true", help="run the trace of 90 s")
    parser.add_argument("--full", action="store_true", help="run the trace of 30 minutes")
    parser.add_argument(
        "--page", type=Path, nargs="?", const=page.PAGE, help="write the page of the results (default: %(const)s)"
    )
    parser.add_argument("--systems", help=f"only these, with commas: {','.join(systems.known(None))}")
    parser.add_argument("--repeats", type=int, default=1, help="trials of each system; those in the results are not run again")
    parser.add_argument(
        "--peers", type=Path, metavar="PEERS", help="what --prepare has made; without it no peer but torchrun runs"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="one JSON line for each trial (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="cuda: NCCL, a GPU for each worker")
    parser.add_argument("--millions", type=float, default=2.0, help="parameters; with AdamW the state is three times as large")
    parser.add_argument("--keep", action="store_true", help="keep the logs of all jobs in /tmp, not only of those that were lost")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that what was started is ended
    if args.prepare:
        for name, reason in peers.prepare(args.prepare).items():
            print(f"{name} is left out: {reason}")
    for name in [name for name in ("short", "full") if getattr(args, name)]:
        run(args, getattr(trace, name)(args.seed, workers(args.device)))
    if args.page:
        page.write(args.page, page.load(args.results))


def workers(device: str) -> int:
    """Return the number of workers: three, or as many as there are GPUs."""
    if device == "cpu":
        return 3
    import torch

    return min(3, torch.cuda.device_count()) or sys.exit("this machine has no GPU that torch can use")


def run(args: argparse.Namespace, plan: trace.Trace) -> None:
    """Run the trials that are not in the results, in turn: the order turns around with every repeat."""
    known = systems.known(args.peers)
    chosen = args.systems.split(",") if args.systems else list(known)
    if strange := set(chosen) - set(known):
        sys.exit(f"there is no system {', '.join(sorted(strange))}; there are {', '.join(known)}")
    args.results.parent.mkdir(parents=True, exist_ok=True)
    kept = page.load(args.results)
    done = {
        (each["system"], each["repeat"])
        for each in kept
        if page.alike(each) == (plan.name, plan.seed, args.device, drive.place(args.device))
    }
    absent = {name: why for name in chosen if (why := known[name].missing())}
    for name, why in absent.items():
        print(f"{name} is left out: {why}", flush=True)
        if (name, page.ABSENT) not in done:
            keep(args.results, name, page.ABSENT, {**drive.head(plan, args.device, args.millions), "failure": f"left out: {why}"})
    for repeat in range(args.repeats):
        for name in chosen if repeat % 2 == 0 else reversed(chosen):
            if (name, repeat) in done or name in absent:
                continue
            began = time.monotonic()
            record = drive.trial(known[name], plan, args.device, args.millions, args.keep)
            keep(args.results, name, repeat, record)
            costs = ", ".join(
                f"{f['kind']} {f['lost_s'] and round(f['lost_s'], 1)}" for leg in record["legs"] for f in leg["faults"]
            )
            print(f"{plan.name} {repeat} {name}: {costs or record['failure']} ({time.monotonic() - began:.0f} s)", flush=True)


def keep(results: Path, name: str, repeat: int, record: page.Record) -> None:
    """Append the record of a trial."""
    with results.open("a") as file:
        file.write(json.dumps({"system": name, "repeat": repeat, **record}) + "\n")


if __name__ == "__main__":
    main()
