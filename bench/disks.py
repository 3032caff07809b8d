"""Cost of separate disks for two workers: saves of 60 MB with one output directory and with two, alternating.

    python bench/disks.py [--repeats 5]

Two ranks on gloo train a linear model by DDP and save every 20th step. Both directories are on one disk, so it takes twice the
bytes; on two machines it would not. Prints medians, and appends them to results/<date>-disks.md.
"""

import argparse
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
STEPS, EVERY, WIDTH = 41, 20, 3873


def train() -> None:
    """Train as one rank. Prints the seconds of steps with and without a save in progress, and of the saves."""
    import torch

    from outlast.training import session

    torch.set_num_threads(1)
    with session.open() as run:
        net = run.ddp(torch.nn.Linear(WIDTH, WIDTH))
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
        begin = run.resume({"net": net, "optimizer": optimizer})
        x, quiet, busy = torch.randn(8, WIDTH), [], []
        for step in range(begin + 1, STEPS + 1):
            before, at = run._saver.busy, time.perf_counter()
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
            run.interrupted()
            took = time.perf_counter() - at
            if step > 5:
                (busy if before else quiet).append(took)
            if step % EVERY == 0:
                run.save(step)
        if run.rank == 0:
            (run.output / "steps.json").write_text(json.dumps({"quiet": quiet, "busy": busy}))


def measured(disks: int) -> tuple[float, float, float]:
    """Return the medians of one run: a step alone, a step beside a save, and a save until it is committed."""
    with tempfile.TemporaryDirectory() as directory, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        free.close()
        children = []
        for rank in range(2):
            output = Path(directory) / str(rank % disks)
            own = {"RANK": str(rank), "OUTLAST_WORKER": str(rank), "OUTLAST_GENERATION": "1", "OUTLAST_OUTPUT": str(output)}
            env = {**os.environ, **world, **own, "OMP_NUM_THREADS": "1"}
            children.append(subprocess.Popen([sys.executable, __file__, "--train"], env=env))
        assert [child.wait() for child in children] == [0, 0]
        said = json.loads((Path(directory) / "0" / "steps.json").read_text())
        ledger = (Path(directory) / "0" / "ledger" / "worker-0-process-0.jsonl").read_text().splitlines()
        saves = [event["seconds"] for event in map(json.loads, ledger) if event["kind"] == "committed"]
        return statistics.median(said["quiet"]), statistics.median(said["busy"]), statistics.median(saves)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--train", action="store_true")
    options = parser.parse_args()
    if options.train:
        train()
        return
    found: dict[int, list[tuple[float, float, float]]] = {1: [], 2: []}
    for _ in range(options.repeats):
        for disks, runs in found.items():
            runs.append(measured(disks))
    middle = {disks: [statistics.median(column) for column in zip(*runs, strict=True)] for disks, runs in found.items()}
    lines = ["| disks | a step alone | a step beside a save | inflated | until committed |", "|---|---|---|---|---|"]
    for disks, (quiet, busy, save) in middle.items():
        lines.append(f"| {disks} | {quiet * 1e3:.0f} ms | {busy * 1e3:.0f} ms | {busy / quiet:.2f} × | {save:.2f} s |")
    one, two = middle[1], middle[2]
    lines.append(f"| ratio | {two[0] / one[0]:.2f} | {two[1] / one[1]:.2f} | | {two[2] / one[2]:.2f} |")
    what = f"60 MB, two ranks, {options.repeats} repeats"
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}"
    text = f"\n## {time.strftime('%H:%M')}: {what}\n\n{machine}.\n\n" + "\n".join(lines) + "\n"
    print(text)
    with (HERE / "results" / f"{time.strftime('%Y-%m-%d')}-disks.md").open("a") as file:
        file.write(text)


if __name__ == "__main__":
    main()
