"""Cost of uploads for training: the time of a step with and without its output in a store, alternating in one run.

    python bench/push.py                 5 repeats of each, about five minutes
    python bench/push.py --quick         2

The store is `rclone serve s3` on this machine. It would not be in reality, so it runs with the lowest priority; what it still
takes is counted against us. Training uses all cores but one. Each run saves about 70 MB every 40 steps, so that pushing never
rests for long.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS, EVERY = 240, 40
PROGRAM = f"""
import time, torch
from outlast.training import Stream, session
torch.manual_seed(0)
with session.open(seed=0) as run:
    net = run.ddp(torch.nn.Sequential(torch.nn.Linear(1500, 3000), torch.nn.ReLU(), torch.nn.Linear(3000, 1500)))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    stream = Stream((torch.randn(256, 1500),), 32, seed=1, steps={STEPS}, epochs=10**6)
    step = run.resume({{"net": net, "optimizer": optimizer, "stream": stream}})
    times = []
    for batch in stream:
        begun = time.perf_counter()
        for (inputs,), share in batch.split(net):
            for _ in range(4):
                (net(inputs).square().mean() * share).backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        run.log(step)
        if run.interrupted() or run.due(step):
            run.save(step)
        times.append(time.perf_counter() - begun)
    import json
    (run.output / "times.json").write_text(json.dumps(times))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    repeats = 2 if args.quick else args.repeats
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        (root / "buckets" / "bucket").mkdir(parents=True)
        endpoint, server = serve(root / "buckets")
        try:
            steps: dict[str, list[float]] = {"directory": [], "store": []}
            totals: dict[str, list[float]] = {"directory": [], "store": []}
            for repeat in range(repeats):
                for where in ("directory", "store") if repeat % 2 == 0 else ("store", "directory"):
                    times = train(root, f"{where}-{repeat}", "s3://bucket" if where == "store" else str(root / "out"), endpoint)
                    steps[where] += times[5:]
                    totals[where].append(sum(times[5:]))
                    print(
                        f"{where:10} {1000 * statistics.median(times[5:]):7.2f} ms a step, {totals[where][-1]:6.2f} s in all",
                        flush=True,
                    )
        finally:
            server.kill()
            server.wait()
    median = {where: 1000 * statistics.median(times) for where, times in steps.items()}
    mean = {where: 1000 * statistics.mean(times) for where, times in steps.items()}
    lines = [
        f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}",
        f"{repeats} repeats of {STEPS} steps, a save every {EVERY}",
        "",
        "| time of a step | output in a directory | output in a store | ratio |",
        "|---|---|---|---|",
        f"| median | {median['directory']:.2f} ms | {median['store']:.2f} ms | {median['store'] / median['directory']:.3f} |",
        f"| mean | {mean['directory']:.2f} ms | {mean['store']:.2f} ms | {mean['store'] / mean['directory']:.3f} |",
    ]
    text = "\n".join(lines)
    print(text)
    args.results.mkdir(exist_ok=True)
    with open(args.results / f"{time.strftime('%Y-%m-%d')}-push.md", "a") as file:
        file.write(f"# Pushing while training, {time.strftime('%H:%M')}\n\n{text}\n\n")


def serve(buckets: Path) -> tuple[str, subprocess.Popen[bytes]]:
    """Serve a directory by S3. Returns the endpoint and the process."""
    rclone = Path(sys.executable).with_name("rclone")
    log = buckets.with_name("rclone.log")
    with log.open("wb") as out:
        server = subprocess.Popen(
            ["nice", "-n", "19", str(rclone), "serve", "s3", "--addr", "127.0.0.1:0", "--auth-key", "outlast,outlastsecret",
             str(buckets)], stdout=out, stderr=out,
        )  # fmt: skip
    deadline = time.monotonic() + 30
    while "http://127.0.0.1:" not in (said := log.read_text()):
        if time.monotonic() > deadline or server.poll() is not None:
            sys.exit(f"rclone did not start: {said}")
        time.sleep(0.05)
    return "http://127.0.0.1:" + said.split("http://127.0.0.1:")[1].split("/")[0], server


def train(root: Path, name: str, output: str, endpoint: str) -> list[float]:
    """Train once, and return the seconds of each step."""
    (root / "bench.py").write_text(PROGRAM)
    spec = {
        "script": "bench.py", "code": str(root), "output": output, "workers": {"replicas": 1},
        "resources": {"cpu": max(1, (os.cpu_count() or 2) - 1)}, "checkpoint": {"every": f"{EVERY} steps", "keep": 2},
        "sync": {"every": "5s"},
    }  # fmt: skip
    job = root / f"{name}.yaml"
    job.write_text(
        json.dumps({"apiVersion": "outlast.dev/v1alpha1", "kind": "ElasticJob", "metadata": {"name": name}, "spec": spec})
    )
    env = {
        **os.environ, "OUTLAST_STATE_DIR": str(root / "state"), "AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "outlast",
        "AWS_SECRET_ACCESS_KEY": "outlastsecret", "AWS_REGION": "us-east-1",
    }  # fmt: skip
    done = subprocess.run(
        [str(Path(sys.executable).with_name("outlast")), "run", str(job)],
        env=env,
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        sys.exit(f"the run failed:\n{done.stdout}\n{done.stderr}")
    where = root / "out" / name if output.startswith("/") else root / "state" / "runs" / name
    return [float(value) for value in json.loads((where / "times.json").read_text())]


if __name__ == "__main__":
    main()
