"""Cost of TensorBoard and MLflow per step of 20 ms, and cost of run.log.

    python bench/tracking.py [--quick] [--threads 2]

One process trains on as many threads as the machine has cores, and logs three values a step; its follower writes event files and
sends to a real MLflow server (SQLite) on this machine, which runs at the lowest priority, since elsewhere it would take nothing.
Windows in which the follower runs and windows in which it is stopped (SIGSTOP) take turns; after a stop it sends that window's
values, too. So the two differ in nothing but the follower's work, twice what it is otherwise. Beside it, run.log is timed in
sessions with and without trackers. Prints medians and ratios, and appends them to results/<date>-tracking.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STEP_S = 0.02
WINDOW_S = 6.0
"""Seconds per window, longer than the pause of any tracker, so that each sends in each window."""
WARM_S = 12.0
"""Seconds for the follower's imports, which do not count: about two CPU seconds at the lowest priority."""


def train(windows: int, threads: int) -> None:
    """Train, and print the measurements."""
    import torch

    from outlast.job.workerfiles import progress_file
    from outlast.training import session

    torch.set_num_threads(threads)
    a = torch.randn(256, 256)
    with session.open(quiet=True) as run:
        step = run.resume({"net": torch.nn.Linear(2, 2)})
        one = []
        for _ in range(1000):
            begun = time.perf_counter()
            a @ a
            one.append(time.perf_counter() - begun)
        times = round(STEP_S / statistics.median(one))
        run.parameters({"lr": 0.1, "times": times})
        follower = run._trackers.process
        pid = follower.pid if follower else 0
        log_s: list[float] = []

        def window(seconds: float) -> list[float]:
            nonlocal step
            found, until = [], time.perf_counter() + seconds
            while (begun := time.perf_counter()) < until:
                for _ in range(times):
                    a @ a
                step += 1
                computed = time.perf_counter()
                run.log(step, loss=1 / step, lr=0.1, norm=float(step % 7))
                ended = time.perf_counter()
                found.append(ended - begun)
                log_s.append(ended - computed)
            return found

        window(WARM_S if pid else 1.0)
        log_s.clear()
        steps: dict[str, list[float]] = {"on": [], "off": []}
        used = progress_file.cpu_s(pid) if pid else 0.0
        begun = time.monotonic()
        for number in range(windows):
            mode = "on" if number % 2 == 0 else "off"
            if pid:
                os.kill(pid, signal.SIGCONT if mode == "on" else signal.SIGSTOP)
            steps[mode] += window(WINDOW_S)
        if pid:
            os.kill(pid, signal.SIGCONT)
        used = (progress_file.cpu_s(pid) - used) / (time.monotonic() - begun) if pid else 0.0
    print(json.dumps({**steps, "log_s": log_s, "follower": used}))


def measure(directory: Path, windows: int, threads: int, **environ: str) -> Any:
    """Run one training process."""
    command = [sys.executable, __file__, "--train", "--windows", str(windows), "--threads", str(threads)]
    environ = {**os.environ, "OUTLAST_OUTPUT": str(directory), **environ}
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


@contextlib.contextmanager
def server(directory: Path) -> Iterator[str]:
    """Start an MLflow server, and yield its URL."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = ["nice", "-n", "19", str(Path(sys.executable).with_name("mlflow")), "server", "--workers", "1", "--port", str(port)]
    environ = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with (directory / "server.log").open("wb") as log:
        started = subprocess.Popen(
            [*command, "--backend-store-uri", f"sqlite:///{directory}/mlflow.db"], env=environ, stdout=log, stderr=log,
            cwd=directory, start_new_session=True,
        )  # fmt: skip
    try:
        until = time.monotonic() + 120
        while time.monotonic() < until:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1):
                break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()


def main() -> None:
    """Measure, print, append."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="6 windows of 6 s instead of 40")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the training; default: all cores")
    parser.add_argument("--windows", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--train", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        train(args.windows, args.threads)
        return
    windows = args.windows or (6 if args.quick else 40)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as made, server(Path(made)) as url:
        plain = measure(Path(made, "plain"), 2, args.threads)
        tracked = measure(Path(made, "tracked"), windows, args.threads, OUTLAST_TENSORBOARD="1", MLFLOW_TRACKING_URI=url)
    on, off = (statistics.median(tracked[mode]) * 1e3 for mode in ("on", "off"))
    mean_on, mean_off = (statistics.fmean(tracked[mode]) * 1e3 for mode in ("on", "off"))
    logs = [statistics.median(each["log_s"]) * 1e6 for each in (plain, tracked)]
    lines = [
        "| | follower stopped | follower runs | ratio |",
        "|---|---|---|---|",
        f"| step, median ms | {off:.3f} | {on:.3f} | {on / off:.5f} |",
        f"| step, mean ms | {mean_off:.3f} | {mean_on:.3f} | {mean_on / mean_off:.5f} |",
        "",
        f"run.log of three values: median {logs[0]:.1f} µs without trackers, {logs[1]:.1f} µs with, of a step "
        f"{logs[0] / off / 10:.3f} % and {logs[1] / off / 10:.3f} %. The follower uses "
        f"{tracked['follower'] * 100:.2f} % of a core; {len(tracked['on'])} and {len(tracked['off'])} steps.",
    ]
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {args.threads} threads, load before {load:.1f}"
    text = f"\n## {time.strftime('%H:%M')}\n\n{machine}, Python {platform.python_version()}.\n\n" + "\n".join(lines) + "\n"
    print(text)
    with (HERE / "results" / f"{time.strftime('%Y-%m-%d')}-tracking.md").open("a") as file:
        file.write(text)


if __name__ == "__main__":
    main()
