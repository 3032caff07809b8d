"""Cost of a save for training, in seconds: ours, `async_save` of DCP and `torch.save`, alternating.

    python bench/saves.py [--quick] [--millions 38] [--repeats 5]

One process trains a model of so many million parameters with AdamW, on a GPU if there is one. A save is begun after a step. Its
*stall* is how long the training stands still until the call returns. The *inflation* of a step is what it takes beyond the median
of steps with no save under way, on average over the steps until the save is on disk. What a save *takes* in all is its stall and
the inflation of all these steps. All run with what an agent sets for training (`os_calls.streaming`). To tell what is left
to gain, as many bytes are moved by `memmove` between touched memory, by one thread and by one for each core. Prints medians and
ratios, and appends them to results/<date>-saves.md.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from outlast.worker.launch import os_calls

HERE = Path(__file__).parent
SYSTEMS = ("outlast", "dcp", "torch.save")
MEASURES = ("stall", "inflation", "takes")
QUIET, WARM = 12, 3
"""Number of steps between two saves, and number of first saves that do not count, because they allocate memory."""


def train(system: str, millions: float, saves: int, directory: Path) -> None:
    """Train and save with one system. Writes its stalls, and the seconds of a step without a save."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    from outlast.training import session

    torch.set_num_threads(1)
    width = round((millions * 1e6 / 8) ** 0.5)
    with session.open() as run:
        net = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(8)]).to(run.device)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
        x = torch.randn(8, width, device=run.device)
        count = 0

        def step() -> float:
            nonlocal count
            begun = time.perf_counter()
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
            if run.device.type == "cuda":
                torch.cuda.synchronize()
            count += 1
            return time.perf_counter() - begun

        step()  # AdamW's state comes with the first
        group = dist.new_group(backend="gloo")
        run.resume({"net": net, "optimizer": optimizer})

        def begin() -> Callable[[], bool]:
            """Begin a save; what is returned says whether it is over."""
            if system == "outlast":
                run.save(count)
                return lambda: not run._saver.busy
            state = dict(zip(("net", "optimizer"), get_state_dict(net, optimizer), strict=True))
            target = directory / f"{system}-{count}"
            if system == "torch.save":
                torch.save(state, target)
                descriptor = os.open(target, os.O_RDONLY)
                os.fsync(descriptor)
                os.close(descriptor)
                return lambda: True
            future = dcp.async_save(state, checkpoint_id=target, process_group=group)
            return future.done  # type: ignore[no-any-return]

        counted = []
        for _ in range(WARM + saves):
            quiet = statistics.median(step() for _ in range(QUIET))
            begun = time.perf_counter()
            over = begin()
            stall, steps = time.perf_counter() - begun, []
            while not over():
                steps.append(step() - quiet)
            inflation = statistics.mean(steps) if steps else 0.0
            counted.append({"stall": stall, "inflation": inflation, "takes": stall + sum(steps), "steps": len(steps)})
            for old in directory.glob(f"{system}-*"):
                shutil.rmtree(old) if old.is_dir() else old.unlink()
        parameters = sum(parameter.numel() for parameter in net.parameters())
        device = torch.cuda.get_device_name() if run.device.type == "cuda" else f"CPU, torch {torch.__version__}"
        bytes_ = 12 * parameters
        limits = {str(threads): moving(bytes_, threads) for threads in sorted({1, min(4, os.cpu_count() or 1)})}
        said = {"saves": counted[WARM:], "quiet": quiet, "parameters": parameters, "device": device, "limits": limits}
        (directory / "said.json").write_text(json.dumps(said))


def moving(size: int, threads: int) -> float:
    """Return the median seconds of moving `size` bytes with this number of threads, a lower bound for copying a state."""
    import torch

    here, there = (torch.ones(size, dtype=torch.uint8) for _ in range(2))
    part, taken = size // threads, []

    def move(number: int) -> None:
        ctypes.memmove(there.data_ptr() + number * part, here.data_ptr() + number * part, part)

    for _ in range(9):
        helpers = [threading.Thread(target=move, args=(number,)) for number in range(1, threads)]
        begun = time.perf_counter()
        for helper in helpers:
            helper.start()
        move(0)
        for helper in helpers:
            helper.join()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken)


def measured(system: str, millions: float, saves: int) -> dict[str, object]:
    """Run one process of a system."""
    with tempfile.TemporaryDirectory() as directory, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        world = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        free.close()
        own = {
            "LOCAL_RANK": "0",
            "OUTLAST_GENERATION": "1",
            "OUTLAST_OUTPUT": directory,
            "OMP_NUM_THREADS": "1",
        } | os_calls.streaming(os.environ)
        arguments = ["--train", system, "--millions", str(millions), "--saves", str(saves), "--directory", directory]
        subprocess.run([sys.executable, __file__, *arguments], env={**os.environ, **world, **own}, check=True)
        found: dict[str, object] = json.loads((Path(directory) / "said.json").read_text())
        return found


def median(runs: list[dict[str, object]], what: str) -> float:
    """Return the median of one measure over all saves."""
    return statistics.median(save[what] for each in runs for save in each["saves"])


def ratio(medians: dict[str, dict[str, float]], name: str, what: str) -> str:
    """Return the ratio of ours to another system, or a dash if no step was done during its saves."""
    return f"{medians['outlast'][what] / medians[name][what]:.2f}" if medians[name][what] > 0 else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=38, help="parameters")
    parser.add_argument("--saves", type=int, default=5, help="that are counted in a process")
    parser.add_argument("--repeats", type=int, default=5, help="processes of each system")
    parser.add_argument("--quick", action="store_true", help="two processes of each, three saves")
    parser.add_argument("--train", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train, options.millions, options.saves, options.directory)
        return
    repeats, saves = (2, 3) if options.quick else (options.repeats, options.saves)
    found: dict[str, list[dict[str, object]]] = {system: [] for system in SYSTEMS}
    for number in range(repeats):
        for system in SYSTEMS if number % 2 == 0 else reversed(SYSTEMS):
            found[system].append(measured(system, options.millions, saves))
    medians = {name: {what: median(runs, what) for what in MEASURES} for name, runs in found.items()}
    lines = [f"| system | {' | '.join(f'{what} | ours / it' for what in MEASURES)} | steps during it | a quiet step |"]
    lines.append("|---" * (2 * len(MEASURES) + 3) + "|")
    for name, runs in found.items():
        quiet = statistics.median(each["quiet"] for each in runs)
        cells = [f"{1e3 * medians[name][what]:.1f} ms | {ratio(medians, name, what)}" for what in MEASURES]
        lines.append(f"| {name} | {' | '.join(cells)} | {median(runs, 'steps'):.0f} | {quiet * 1e3:.1f} ms |")
    any_ = found["outlast"][0]
    machine = f"{any_['device']}, {platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    what = f"{any_['parameters'] / 1e6:.1f} M parameters + AdamW, {repeats} processes of {saves} saves each"
    limits = {
        threads: statistics.median(run["limits"][threads] for runs in found.values() for run in runs)
        for threads in any_["limits"]
    }
    said = "; ".join(f"{threads} thread{'s' * (threads != '1')} {1e3 * taken:.1f} ms" for threads, taken in limits.items())
    lines.append(f"\nTo move as many bytes with `memmove` takes: {said}.")
    text = (
        f"\n## {time.strftime('%H:%M')}: {what}\n\n{machine}, Python {platform.python_version()}.\n\n" + "\n".join(lines) + "\n"
    )
    print(text)
    with (HERE / "results" / f"{time.strftime('%Y-%m-%d')}-saves.md").open("a") as file:
        file.write(text)


if __name__ == "__main__":
    main()
