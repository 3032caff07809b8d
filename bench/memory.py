"""Speed of snapshots to an agent's memory, and of restores from this agent and from another worker's agent over loopback.

    python bench/memory.py [--megabytes 500] [--repeats 5] [--quick]

Two agents' servers, one process each, and one process that is a rank of both workers. In turn with them the same bytes are read
and verified from a file in the page cache, as a checkpoint on a disk would be. The sender is not throttled. Prints medians, and
appends them to results/<date>-memory.md.
"""

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from outlast.job.contract import Env
from outlast.storage.snapshots import client, part_format
from outlast.storage.snapshots.part_format import Item, Part

HERE = Path(__file__).parent
TENSORS = 100
AGENT = """
import os, sys
from outlast.storage.snapshots import replicas, server
replicas.SLOWEST = 1e12
agent = server.Server(os.environ, 1 << 40, lambda: None)
agent.start()
print(agent.address, flush=True)
sys.stdin.read()
"""
ROWS = {
    "first room": "a room for it, the first time",
    "room": "the same, again",
    "copy": "copied into the room",
    "publish": "published: the rank goes on",
    "held": "until the agent holds it, verified",
    "replicated": "until another agent holds it, too",
    "memory": "back from its own agent",
    "peer": "back from the other worker's agent",
    "file": "back from a file in the page cache",
}


class Bench:
    """Two agents and the state of a rank."""

    def __init__(self, directory: Path, size: int) -> None:
        self.directory, self.taken = directory, defaultdict[str, list[float]](list)
        self.environs, self.agents = [], []
        for worker in range(2):
            state = directory / str(worker)
            state.mkdir()
            self.environs.append({**os.environ, Env.RUN: "bench", Env.STATE: str(state), Env.RENDEZVOUS_KEY: "key"})
            agent = subprocess.Popen(
                [sys.executable, "-c", AGENT], env=self.environs[-1], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            self.agents.append(agent)
            assert agent.stdout
            agent.stdout.readline()
        each = size // TENSORS
        places, self.size = part_format.laid_out([each] * TENSORS)
        self.index = [Item(f"w{i}", "uint8", (each,), (0,), (each,), place, each) for i, place in enumerate(places)]
        self.data = os.urandom(1 << 20) * (self.size // (1 << 20) + 1)
        self.into = memoryview(bytearray(self.size))
        self.into[:] = bytes(self.size)  # touched
        (directory / "file").write_bytes(self.data[: self.size])

    def timed(self, row: str, work: Callable[[], object]) -> None:
        """Measure some work, and add its seconds to its row."""
        begun = time.perf_counter()
        work()
        self.taken[row].append(time.perf_counter() - begun)

    def snapshot(self, rank: client.Client, peer: str, step: int) -> None:
        """Take and replicate one snapshot."""
        rooms: list[client.Room] = []
        self.timed("first room" if step <= 2 else "room", lambda: rooms.append(rank.room(self.size, (1, step), (1, step - 1))))
        room = rooms[0]

        def copy() -> None:
            room.view[:] = memoryview(self.data)[: self.size]

        self.timed("copy", copy)
        part = Part("bench", 1, step, 2, 0, 0, 0, 1, "unique", bytes=self.size)
        begun = time.perf_counter()
        self.timed("publish", lambda: rank.publish(room, part, self.index, to=[peer], complete=(1, step - 1)))
        for state, row in (("held", "held"), ("replicated", "replicated")):
            while (said := rank.poll()["unique", step]) not in (state, "replicated"):
                assert said in ("", "held"), said
                time.sleep(0.001)
            self.taken[row].append(time.perf_counter() - begun)

    def read(self, rank: client.Client, address: str | None) -> None:
        """Read the whole newest part."""
        part = max((each for each in rank.catalog()), key=lambda each: each.at)
        with rank.open(part, address) as source:
            source.fetch([(i, self.into[item.place : item.place + item.nbytes]) for i, item in enumerate(source.index)])

    def read_file(self) -> None:
        """Read and verify the same bytes, as from a checkpoint."""
        with (self.directory / "file").open("rb", buffering=0) as file:
            for start in range(0, self.size, part_format.BLOCK):
                block = self.into[start : start + part_format.BLOCK]
                file.readinto(block)  # type: ignore[attr-defined] # a raw file
                zlib.crc32(block)

    def run(self, repeats: int) -> None:
        """Run all measurements alternately."""
        first, second = (client.connect(environ) for environ in self.environs)
        assert first
        assert second
        for step in range(1, repeats + 3):
            self.snapshot(first, second.address, step)
            self.timed("memory", lambda: self.read(first, None))
            self.timed("peer", lambda: self.read(first, second.address))
            self.timed("file", self.read_file)

    def close(self) -> None:
        for agent in self.agents:
            agent.communicate()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="50 MB, twice; nothing is written")
    options = parser.parse_args()
    if options.quick:
        options.megabytes, options.repeats = 50, 2
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(Path(directory), options.megabytes * 1_000_000)
        try:
            bench.run(options.repeats)
        finally:
            bench.close()
    lines = ["| | median | worst | GB/s |", "|---|---|---|---|"]
    for row, meaning in ROWS.items():
        taken = bench.taken[row]
        middle = statistics.median(taken)
        rate = "" if row == "publish" else f"{bench.size / 1e9 / middle:.1f}"
        lines.append(f"| {meaning} | {1e3 * middle:.1f} ms | {1e3 * max(taken):.1f} ms | {rate} |")
    ratio = {row: statistics.median(bench.taken["file"]) / statistics.median(bench.taken[row]) for row in ("memory", "peer")}
    lines.append(f"\nThe file takes {ratio['memory']:.1f} times as long as memory, {ratio['peer']:.1f} times as long as a peer.")
    what = f"{options.megabytes} MB in {TENSORS} tensors, {options.repeats} repeats"
    machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}"
    text = f"\n## {time.strftime('%H:%M')}: {what}\n\n{machine}.\n\n" + "\n".join(lines) + "\n"
    print(text)
    if not options.quick:
        with (HERE / "results" / f"{time.strftime('%Y-%m-%d')}-memory.md").open("a") as file:
            file.write(text)


if __name__ == "__main__":
    main()
