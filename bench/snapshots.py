"""Cost of snapshots in memory per step: jobs with `checkpoint: {memory: auto}` and with `off`, alternating.

    python bench/snapshots.py [--millions 8] [--workers 2] [--batch 256] [--repeats 5] [--steps 200] [--quick]

Each job trains a model of so many million parameters with AdamW and DDP, without a pause, and saves nothing to disk. The first
fifth of the steps does not count: the interval between snapshots is chosen during it. Prints the mean and median step of both,
their ratio, the share of copying in these steps by the ledger, and how far apart they were; appends it to
results/<date>-snapshots.md. How fast 500 MB are back from memory is what memory.py measures.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
OUTLAST = str(Path(sys.executable).with_name("outlast"))
MEMORIES = ("auto", "off")
LAYERS = 8


def train(millions: float, batch: int, steps: int, directory: Path) -> None:
    """Train as a rank. Rank 0 writes the seconds of its steps."""
    import torch

    from outlast.training import session

    torch.set_num_threads(1)
    width = round((millions * 1e6 / LAYERS) ** 0.5)
    with session.open(seed=0, quiet=True) as run:
        net = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)])
        model = run.ddp(net.to(run.device))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        x = torch.randn(batch, width, device=run.device)
        step, taken = run.resume({"model": model, "optimizer": optimizer}), []
        while step < steps:
            begun = time.perf_counter()
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            step += 1
            run.log(step, loss=loss)
            if run.interrupted() or run.due(step):
                run.save(step)
            taken.append(time.perf_counter() - begun)
        if run.rank == 0:
            (directory / "taken.json").write_text(json.dumps(taken))


def measured(memory: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run one job. Returns the steps that count, and the snapshots in its ledger."""
    from outlast.job import contract, ledger
    from outlast.job.report import goodput

    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        shutil.copy(__file__, directory / "train.py")
        paces = [f"--millions={options.millions}", f"--batch={options.batch}", f"--steps={options.steps}"]
        spec = {
            "script": "train.py",
            "args": ["--train", str(directory), *paces],
            "output": str(directory / "out"),
            "workers": {"replicas": options.workers},
            "processesPerWorker": 1,
            "resources": {"cpu": 1},
            "checkpoint": {"every": "1h", "memory": memory},
        }
        job = {"apiVersion": "outlast.dev/v1alpha1", "kind": "ElasticJob", "metadata": {"name": "bench"}, "spec": spec}
        (directory / "job.yaml").write_text(json.dumps(job))
        environ = {**os.environ, "OUTLAST_STATE_DIR": str(directory / "state"), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [OUTLAST, "run", str(directory / "job.yaml")], env=environ, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"outlast run exited with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        taken = json.loads((directory / "taken.json").read_text())
        events = list(ledger.read(directory / "out" / "bench" / contract.LEDGER))
        account = goodput.buckets(events, None)
    every = account.snapshots.every if account.snapshots else 0
    counted = taken[len(taken) // 5 :]
    copied = sum(event.get("copied_s", 0.0) for event in events if event["kind"] == "step" and event["step"] > len(taken) // 5)
    return {"taken": counted, "share": copied / sum(counted), "every": every}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=8, help="parameters; the state is three times as large, in float32")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=256, help="rows a step, of each worker")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=5, help="jobs of each kind")
    parser.add_argument("--quick", action="store_true", help="one job of each, 60 steps")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.quick:
        options.repeats, options.steps = 1, 60
    if options.train:
        train(options.millions, options.batch, options.steps, options.train)
        return
    load = os.getloadavg()[0]
    found: dict[str, list[dict[str, Any]]] = {memory: [] for memory in MEMORIES}
    for repeat in range(options.repeats):
        for memory in MEMORIES if repeat % 2 == 0 else reversed(MEMORIES):
            found[memory].append(measured(memory, options))
            print(
                f"{repeat + 1}/{options.repeats} {memory}: mean {statistics.mean(found[memory][-1]['taken']) * 1e3:.1f} ms",
                flush=True,
            )
    means = {memory: statistics.median(statistics.mean(each["taken"]) for each in jobs) for memory, jobs in found.items()}
    medians = {memory: statistics.median(statistics.median(each["taken"]) for each in jobs) for memory, jobs in found.items()}
    lines = [
        "| memory | a step, mean | a step, median | mean / mean without | copying, by the ledger | snapshot every |",
        "|---|---|---|---|---|---|",
    ]
    for memory, jobs in found.items():
        share = statistics.median(each["share"] for each in jobs)
        every = sorted({each["every"] for each in jobs})
        kept = f"{', '.join(map(str, every))} steps" if memory == "auto" else ""
        ratio = f"{means[memory] / means['off']:.4f}"
        lines.append(
            f"| {memory} | {means[memory] * 1e3:.2f} ms | {medians[memory] * 1e3:.2f} ms | {ratio} | {share:.2%} | {kept} |"
        )
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load before {load:.1f}, Python {platform.python_version()}"
    what = (
        f"{options.millions:g} M parameters + AdamW, {options.workers} workers, {options.repeats} jobs of {options.steps} steps"
    )
    text = f"\n## {time.strftime('%H:%M')}: {what}\n\n{machine}.\n\n" + "\n".join(lines) + "\n"
    print(text)
    with (HERE / "results" / f"{time.strftime('%Y-%m-%d')}-snapshots.md").open("a") as file:
        file.write(text)


if __name__ == "__main__":
    main()
