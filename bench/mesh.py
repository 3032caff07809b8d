"""Cost of mutual watching among agents, and delay of detecting the end of an agent.

    python bench/mesh.py --quick          100 agents, 10 s
    python bench/mesh.py                  1,000 agents, 60 s

Real ends of the mesh, all in this process, each with its thread, its port and its connections over the loopback interface. The
CPU time of the process, kernel included, while nothing happens is that of all agents. Silence is measured where packets can be
lost: `tests/rendezvous/test_mesh_partitions.py`, and `recovery.py` for whole jobs.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from outlast.rendezvous.mesh import watched_peers
from outlast.rendezvous.mesh.mesh import Mesh

KEY = b"key of the run"
DEATHS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0, help="of which the CPU is measured")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    if args.quick:
        args.agents, args.seconds = 100, 10.0
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    load = os.getloadavg()[0]
    lines = [
        f"{platform.platform()}, {os.cpu_count()} cores, Python {platform.python_version()}; load {load:.1f} when this began",
        "",
        *measured(args.agents, args.seconds),
    ]
    text = "\n".join(lines)
    print(text)
    if not args.quick:
        args.results.mkdir(exist_ok=True)
        with open(args.results / f"{time.strftime('%Y-%m-%d')}-mesh.md", "a") as file:
            file.write(f"# Mesh, {time.strftime('%H:%M')}\n\n{text}\n\n")
    sys.stdout.flush()
    os._exit(0)  # a thousand goodbyes are of no interest


def measured(agents: int, seconds: float) -> list[str]:
    """Return the table."""
    gc.freeze()
    members = range(agents)
    meshes = [Mesh(id, "127.0.0.1", KEY) for id in members]
    for mesh in meshes:
        mesh.handlers["ping"] = lambda id, message: None
    addresses = {mesh.id: mesh.address for mesh in meshes}
    begun = time.monotonic()
    for mesh in meshes:
        mesh.enter(1, members)
        mesh.learn(1, {id: addresses[id] for id in (0, *watched_peers.watched(mesh.id, members))})
    formed_s = until(lambda: all(mesh.complete for mesh in meshes), begun)
    watched = statistics.mean(len(watched_peers.watched(id, members)) for id in members)

    time.sleep(2.0)
    used, at = time.process_time(), time.monotonic()
    time.sleep(seconds)
    share = (time.process_time() - used) / (time.monotonic() - at) / agents

    begun = time.monotonic()
    for answer in [mesh.send(0, {"kind": "ping"}) for mesh in meshes]:
        answer.result(60)
    to_one_s = time.monotonic() - begun
    begun = time.monotonic()
    for answer in [meshes[0].send(id, {"kind": "ping"}) for id in members]:
        answer.result(60)
    from_one_s = time.monotonic() - begun
    found_s = [death(meshes, id) for id in range(agents // 7, agents, agents // DEATHS)[:DEATHS]]
    return [
        f"| {agents:,} agents, each watches {watched:.1f} | |",
        "|---|---|",
        f"| CPU of one while nothing happens, of a core | {share:.4%} |",
        f"| until all are connected | {formed_s:.2f} s |",
        f"| all tell one something, all acknowledged | {1000 * to_one_s:.0f} ms |",
        f"| one tells all something, all acknowledged | {1000 * from_one_s:.0f} ms |",
        f"| a process dies: until all who watch it know, median of {len(found_s)} | {1000 * statistics.median(found_s):.0f} ms |",
    ]


def death(meshes: list[Mesh], id: int) -> float:
    """End an agent as the kernel ends a process. Returns the seconds until all its watchers have detected the end."""
    victim, begun = meshes[id], time.monotonic()
    victim.abandon()
    watchers = [meshes[each] for each in watched_peers.watched(id, range(len(meshes)))]
    return until(lambda: all(id in mesh.unheard for mesh in watchers), begun)


def until(true: Callable[[], bool], begun: float) -> float:
    """Wait for a condition, and return the seconds since `begun`."""
    while not true():
        time.sleep(0.005)
        if time.monotonic() - begun > 120:
            raise SystemExit("it did not happen within 120 s")
    return time.monotonic() - begun


if __name__ == "__main__":
    main()
