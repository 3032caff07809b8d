"""Files, uploads and reading costs of a month of training: a simulated run of DAYS at STEPS_S steps per second.

    python bench/long_run.py                       30 days at 10 steps/s: some 4 GB below --at twice, and some ten minutes
    python bench/long_run.py --days 1

The ledger, `metrics.jsonl` and a log are written as a session writes them, with a save every 5 minutes and a failure every day,
and pushed to a store (a directory) after every save and every 10 minutes. Then each process that reads them does so by itself,
and says how much memory it took at most.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

from outlast.job import contract
from outlast.storage import store
from outlast.storage.sync import growing_files

DAY_S, SAVE_S, PUSH_S = 86_400, 300, 600
LEDGER = f"{contract.LEDGER}/worker-0-process-0.jsonl"
LOG = f"{contract.LOGS}/worker-0.log"
BEGUN = 1_790_000_000.0

READERS = {
    "launcher (folds the ledger)": """
        from outlast.local import launcher
        from outlast.job.report import goodput
        from outlast.job import ledger
        print(f"goodput {goodput.buckets(ledger.read(output / 'ledger'), None).goodput:.5f}")""",
    "report, of this machine": """
        import outlast.cli
        from outlast.job.report import goodput, printed
        from outlast.job import ledger
        found = goodput.buckets(ledger.read(output / 'ledger'), None)
        printed.plain(found); print(f"goodput {found.goodput:.5f}, {found.steps_kept} steps kept")""",
    "report, from the store": """
        import outlast.cli
        from outlast.storage.runs import output as stored
        from outlast.job.report import goodput
        print(f"goodput {goodput.buckets(stored.events(place), None).goodput:.5f}")""",
    "logs, from the store": """
        from outlast.storage.runs import output as stored
        print(sum(1 for _ in stored.logs(place.url)), "lines")""",
    "agent (fetches what its disk has lost)": """
        import shutil
        from outlast.worker.agent import agent, join_run
        join_run.fetch_own(place, output / 'fetched', 0)
        print((output / 'fetched/metrics.jsonl').stat().st_size, "bytes of metrics")
        shutil.rmtree(output / 'fetched')""",
    "pusher (starts, finds nothing new)": """
        import threading
        from outlast.worker.agent import upload
        from outlast.storage.sync import growing_files
        names = ['metrics.jsonl', 'logs/worker-0.log', 'ledger/worker-0-process-0.jsonl']
        print(growing_files.Sender(place, output).push(names, threading.Event()), "bytes sent")""",
    "training (compares metrics between disks)": """
        from outlast.training import metrics
        print(metrics.Copy(output / 'metrics.jsonl')._summary()[0], "is the last step; its memory is torch's and this")""",
}


def write(output: Path, days: float, steps_s: int, place: store.Store) -> tuple[dict[str, int], dict[str, int], float]:
    """Simulate the run. Returns the bytes written and sent by file, and the true goodput."""
    names = (LEDGER, contract.METRICS, LOG)
    files = {name: output / name for name in names}
    for file in files.values():
        file.parent.mkdir(parents=True, exist_ok=True)
    opened = {name: file.open("ab") for name, file in files.items()}
    sender, sent = growing_files.Sender(place, output), 0
    step, generation, committed, kept_s, lost_s = 0, 1, 0, 0.0, 0.0

    def tell(t: float, kind: str, **fields: object) -> None:
        event = {"t": round(t, 6), "kind": kind, "source": "worker-0-process-0", **fields}
        opened[LEDGER].write(json.dumps(event).encode() + b"\n")

    t, cut = BEGUN, 0
    tell(t, "worker", worker=0)
    tell(t, "world", generation=1, workers=[0])
    tell(t, "restored", generation=1, step=0)
    for second in range(int(days * DAY_S)):
        t += 1
        lines = [
            f'{{"step": {step + i}, "time": {t - 1 + i / steps_s:.3f}, "generation": {generation}, "loss": 2.{step + i:015d}}}\n'
            for i in range(1, steps_s + 1)
        ]
        opened[contract.METRICS].write("".join(lines).encode())
        step, kept_s = step + steps_s, kept_s + 1
        tell(t, "step", generation=generation, step=step, steps=steps_s)
        if second % 10 == 9:
            opened[LOG].write(f"step {step}: loss {2.0 + second / 1e9:.9f}, {steps_s} steps/s, all is well\n".encode())
        if second % SAVE_S == SAVE_S - 1:
            committed = step
            tell(t, "saving", step=step)
            tell(t, "staged", step=step, stall_s=0.0)
            tell(t + 0.5, "committed", step=step, path="checkpoints/step", bytes=1 << 30, seconds=0.5)
            opened[contract.METRICS].flush()
            cut = files[contract.METRICS].stat().st_size
        if second % DAY_S == DAY_S // 2 + 200:  # so long after a save
            lost = (step - committed) / steps_s
            kept_s, lost_s = kept_s - lost, lost_s + lost
            tell(t, "failure", generation=generation, worker=0, reason="rank 0 was killed", counted=True)
            step, generation = committed, generation + 1
            tell(t, "world", generation=generation, workers=[0])
            tell(t, "restored", generation=generation, step=step)
            opened[contract.METRICS].flush()
            opened[contract.METRICS].truncate(cut)
        if second % SAVE_S == SAVE_S - 1 or second % PUSH_S == PUSH_S // 4:
            for file in opened.values():
                file.flush()
            sent += sender.push(names, threading.Event())
    tell(t, "finished", state="Succeeded")
    for file in opened.values():
        file.close()
    sent += sender.push(names, threading.Event())
    written = {name: file.stat().st_size for name, file in files.items()}
    there = {name: sum(part.size for part in growing_files.parts(place, name)) for name in names}
    assert sum(there.values()) == sent, "the store has what was sent"
    return written, there, kept_s / (kept_s + lost_s)


def read(body: str, output: Path, url: str) -> tuple[str, float, float]:
    """Run a reader in a separate process. Returns its output, its seconds, and its peak memory in MiB."""
    lines = "\n".join(line[8:] for line in body.splitlines())
    code = (
        "import resource\nfrom pathlib import Path\nfrom outlast.storage import store\n"
        f"output, place = Path({str(output)!r}), store.open_({url!r})\n{lines}\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"
    )
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    said, mib = done.stdout.strip().rsplit("\n", 1)
    return said, time.perf_counter() - began, float(mib)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--days", type=float, default=30)
    parser.add_argument("--steps-per-second", type=int, default=10)
    parser.add_argument("--at", type=Path, default=Path("/tmp/outlast-long-run"))
    given = parser.parse_args()
    shutil.rmtree(given.at, ignore_errors=True)
    output, url = given.at / "here", f"file://{given.at}/there"
    (given.at / "there").mkdir(parents=True)
    place = store.open_(url)
    began = time.perf_counter()
    written, sent, goodput = write(output, given.days, given.steps_per_second, place)
    took = time.perf_counter() - began
    writer = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{given.days:g} days at {given.steps_per_second} steps/s; {platform.platform()}, Python {platform.python_version()}\n")
    print("| file | MiB written | MiB sent | ratio | objects |\n|---|---|---|---|---|")
    for name, size in written.items():
        count = len(growing_files.parts(place, name))
        print(f"| {name} | {size / 2**20:.1f} | {sent[name] / 2**20:.1f} | {sent[name] / size:.4f} | {count} |")
    whole, all_sent = sum(written.values()), sum(sent.values())
    print(f"| together | {whole / 2**20:.1f} | {all_sent / 2**20:.1f} | {all_sent / whole:.4f} | |\n")
    print(f"Written and pushed in {took:.0f} s by a process of {writer:.0f} MiB at most. Its true goodput was {goodput:.5f}.\n")
    print("| reader | says | seconds | MiB at most |\n|---|---|---|---|", flush=True)
    for name, body in READERS.items():
        said, seconds, mib = read(body, output, url)
        print(f"| {name} | {said} | {seconds:.1f} | {mib:.0f} |", flush=True)
    shutil.rmtree(given.at)


if __name__ == "__main__":
    main()
