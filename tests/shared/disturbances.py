"""Guarantees of the recipes under disturbances, for any recipe in five lines:

    def test_killed_20_times_it_ends_with_the_same_bits(tmp_path):
        disturbances.killed_20_times(gpt.main, [f"--data={data}", ...], tmp_path)

    def test_resized_1_to_3_to_2_each_sample_is_seen_once_and_the_loss_is_the_same(tmp_path):
        disturbances.resized(gpt.main, [f"--data={data}", ...], tmp_path)

A recipe is a `main(argv)` that can be imported: its ranks are forked from a process that has imported it, so that a start costs
milliseconds even where the import costs seconds. It must write `final.json` with `weights_sha256` and a `loss` of each step in
metrics.jsonl. The first is a slow test (10 to 60 s); a run of 60 steps is long enough.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import multiprocessing
import os
import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import pytest
import torch.distributed as dist

import worlds
from outlast.job import contract, ledger
from outlast.training import Stream

Main = Callable[[list[str]], Any]
Moment = tuple[int, Literal["start", "step", "save"]]


RANKS, SIZES = 2, (1, 3, 2)
"""Ranks of a run that is killed, and those of one that is resized, one after the other."""


def killed_20_times(
    main: Main,
    argv: Sequence[str],
    tmp_path: Path,
    *,
    seed: int = 0,
    logs: Sequence[str] = ("loss",),
    clocked: Sequence[str] = (),
    preload: Sequence[str] = (),
    memory: bool = False,
) -> None:
    """Kill all ranks 20 times, during starts, steps and saves. The final weights must equal the undisturbed run's, bit for bit.

    `logs`: names of metrics that must be equal in every step, too. `clocked`: entries of final.json that are times or speeds; all
    others must be equal. `preload`: modules that the recipe imports late. `memory`: agents keep snapshots of as many steps as can
    be, and training goes on from these.
    """
    rest = list(argv), tmp_path, random.Random(seed), tuple(logs), set(clocked)
    if not memory:
        return _in_nursery(preload, _killed_20_times, main, *rest)
    from ranks import Agents

    agents = Agents(tmp_path / "killed")
    with contextlib.ExitStack() as stack:
        for worker in range(RANKS):
            agents.start(worker)
            stack.callback(agents.servers[worker].close)
        _in_nursery(preload, _killed_20_times, functools.partial(_with_snapshots, main), *rest)
    events = ledger.read(agents.output / contract.LEDGER)
    from_memory = [event["t"] for event in events if event["kind"] == "restored" and event["source"] in ("memory", "peer")]
    before = [event for event in events if event["kind"] == "restoring" and event["t"] < from_memory[0]]
    print(f"{len(from_memory)} starts from memory, {len(agents.store_reads)} reads of the store")
    assert len(from_memory) >= 15, "nearly all"
    assert len(agents.store_reads) <= len(before), "none since there was a snapshot"


def _with_snapshots(main: Main, argv: list[str]) -> None:
    """Train with a snapshot at each step whose predecessor's snapshot is complete."""
    from outlast.training.state import snapshot_taking

    snapshot_taking.SHARE = float("inf")
    main(argv)


def resized(
    main: Main,
    argv: Sequence[str],
    tmp_path: Path,
    *,
    rel: float = 1e-4,
    logs: Sequence[str] = ("loss",),
    preload: Sequence[str] = (),
) -> None:
    """Train with 1, 3 and 2 ranks one after the other. Each sample must occur once per epoch, with the undisturbed loss.

    `rel`: by how much the metrics of `logs` may differ from those of one undisturbed rank, relatively.
    """
    _in_nursery(preload, _resized, main, list(argv), tmp_path, rel, tuple(logs))


def trained(
    main: Main, argv: Sequence[str], output: Path, ranks: int = 1, *, generation: int = 1, timeout_s: float = 240
) -> None:
    processes = worlds.started(functools.partial(main, list(argv)), output, ranks, generation=generation)
    end = worlds.ended(processes, output, timeout_s=timeout_s)
    assert end.codes == [0] * ranks, end.errors


def alone(main: Main, argv: Sequence[object]) -> None:
    """Run in this process. An error leaves no process group, as it leaves no process."""
    try:
        main([str(each) for each in argv])
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def final(output: Path) -> dict[str, Any]:
    return dict(json.loads((output / "final.json").read_text()))


def logged(output: Path, name: str = "loss") -> dict[int, float]:
    """Return a metric by step; no step may have two values."""
    found = [(line["step"], line[name]) for line in _lines(output) if name in line]
    assert len(dict(found)) == len(found), "a step that was replayed is in the metrics once"
    return dict(found)


def _lines(output: Path) -> list[dict[str, Any]]:
    lines = (output / contract.METRICS).read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


# Killed


def _killed_20_times(
    main: Main, argv: list[str], tmp_path: Path, draw: random.Random, logs: tuple[str, ...], clocked: set[str]
) -> None:
    calm, output = tmp_path / "calm", tmp_path / "killed"
    trained(main, argv, calm, RANKS)
    last = max(line["step"] for line in _lines(calm) if "step" in line)
    for generation, moment in enumerate(moments(draw, last), start=1):
        processes = worlds.started(functools.partial(main, argv), output, RANKS, generation=generation)
        for _ in _until(output, generation, moment):
            assert all(process.is_alive() for process in processes), f"it ended before {moment}: {_errors(output, RANKS)}"
        time.sleep(draw.uniform(0, {"start": 0.5, "step": 0.02, "save": 0.005}[moment[1]]))  # the moment that is drawn
        for process in draw.sample(processes, RANKS):
            process.kill()
            time.sleep(draw.choice((0, 0.02)))  # the others may see that it is gone
        for process in processes:
            process.join()
    trained(main, argv, output, RANKS, generation=21)
    ours, theirs = ({name: value for name, value in final(to).items() if name not in clocked} for to in (output, calm))
    assert ours == theirs
    assert ours["weights_sha256"], "there is something to compare"
    for name in logs:
        assert logged(output, name) == logged(calm, name) != {}


def moments(draw: random.Random, last: int) -> list[Moment]:
    """Return 20 moments of a run of `last` steps: 5 starts, 8 steps and 7 saves, within the first four fifths."""
    assert last >= 40, f"{last} steps are too few to be killed in: train at least 40"
    steps = sorted(draw.sample(range(1, last * 4 // 5), 15))
    saves = set(draw.sample(steps, 7))
    found: list[Moment] = [(step, "save" if step in saves else "step") for step in steps]
    for _ in range(5):
        found.insert(draw.randrange(len(found) + 1), (0, "start"))
    return found


def _until(output: Path, generation: int, moment: Moment) -> Iterator[None]:
    """Yield until the moment: a step of this generation is done, or a checkpoint is being written."""
    step, kind = moment
    metrics, checkpoints = output / contract.METRICS, output / contract.CHECKPOINTS
    if kind == "start":
        return
    size = metrics.stat().st_size if metrics.exists() else -1
    while not metrics.exists() or metrics.stat().st_size == size or _step(metrics) < step:
        yield
        time.sleep(0.002)
    while kind == "save" and not any(checkpoints.glob(f"*.saving-g{generation}")):
        yield
        time.sleep(0.0005)


def _step(metrics: Path) -> int:
    with metrics.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - 4096))
        lines = file.read().split(b"\n")[:-1]
    for line in reversed(lines):
        if line.startswith(b"{") and b'"step"' in line:
            return int(json.loads(line)["step"])
    return 0


def _errors(output: Path, ranks: int) -> list[str]:
    return [(output / "workers" / str(rank) / "stderr").read_text() for rank in range(ranks)]


# Resized


def _resized(main: Main, argv: list[str], tmp_path: Path, rel: float, logs: tuple[str, ...]) -> None:
    calm, output = tmp_path / "calm", tmp_path / "resized"
    assert _recorded(main, argv, calm, SIZES[0], 1, tmp_path / "calm-seen", None) == {0}, _errors(calm, SIZES[0])
    undisturbed = _seen(tmp_path / "calm-seen")
    steps = sorted({step for step, _, _ in undisturbed})
    assert len(steps) >= len(SIZES), f"{len(steps)} steps are too few for {len(SIZES)} sizes"
    for generation, ranks in enumerate(SIZES, start=1):
        leave = steps[len(steps) * generation // len(SIZES) - 1] if generation < len(SIZES) else None
        codes = _recorded(main, argv, output, ranks, generation, tmp_path / "seen", leave)
        assert codes == {0 if leave is None else contract.Exit.INTERRUPTED}, _errors(output, ranks)
    seen = _seen(tmp_path / "seen")
    twice = [sample for sample, times in Counter((epoch, index) for _, epoch, index in seen).items() if times > 1]
    assert not twice, f"samples (epoch, index) that were seen twice: {twice[:5]}"
    assert sorted(seen) == sorted(undisturbed), "each sample is seen in the same step as in the undisturbed run"
    for name in logs:
        assert logged(output, name) == pytest.approx(logged(calm, name), rel=rel)
        assert logged(output, name), f"there is no {name} in the metrics"


def _recorded(main: Main, argv: list[str], output: Path, ranks: int, generation: int, to: Path, leave: int | None) -> set[int]:
    """Train until a step at which the ranks must leave, or to the end. Records each rank's samples, and returns the exit
    codes."""
    program = functools.partial(_rank, main, argv, to, generation, leave)
    end = worlds.ended(worlds.started(program, output, ranks, generation=generation), output)
    worlds.again(end)
    return set(end.codes)


def _rank(main: Main, argv: list[str], to: Path, generation: int, leave: int | None) -> None:
    """Run a rank, which records its samples, and which gets its notice in a step, as from an agent."""
    batches = Stream.batches

    def noted(self: Stream, rank: int, ranks: int) -> Iterator[Any]:
        if not self.shuffle:  # it measures
            yield from batches(self, rank, ranks)
            return
        to.mkdir(exist_ok=True)
        with (to / f"{generation}-{rank}").open("a", buffering=1) as file:
            for batch in batches(self, rank, ranks):
                file.write(json.dumps([batch.step, batch.epoch, batch.indices.tolist()]) + "\n")
                if batch.step == leave and rank == 0:
                    Path(os.environ[contract.Env.NOTICE]).write_text("{}")
                yield batch

    Stream.batches = noted  # type: ignore[method-assign] # in a process of its own
    main(argv)


def _seen(directory: Path) -> list[tuple[int, int, int]]:
    records = [json.loads(line) for file in directory.iterdir() for line in file.read_text().splitlines()]
    return [(step, epoch, index) for step, epoch, indices in records for index in indices]


# The process that has imported the recipe


def _in_nursery(preload: Sequence[str], function: Callable[..., None], *args: Any) -> None:
    """Call a function in a process that has imported the ranks' modules and forks the ranks. Raises its failure."""
    ours, theirs = multiprocessing.Pipe()
    nursery = worlds.fork.Process(target=_nursery, args=(theirs, tuple(preload), function, args))
    nursery.start()
    theirs.close()
    try:
        problem = ours.recv()
    except EOFError:
        problem = "the process that forks the ranks has died"
    finally:
        for end in (os.killpg, os.kill):  # the latter where it has not come as far as a group of its own
            with contextlib.suppress(ProcessLookupError):
                end(nursery.pid, signal.SIGKILL)
        nursery.join()
    if problem:
        pytest.fail(problem, pytrace=False)


def _nursery(pipe: Connection, preload: Sequence[str], function: Callable[..., None], args: tuple[Any, ...]) -> None:
    os.setsid()  # so that whoever ends this process ends its ranks, too
    worlds.fork = multiprocessing.get_context("fork")  # type: ignore[assignment]
    try:
        for name in preload:
            importlib.import_module(name)
        function(*args)
    except BaseException:
        pipe.send(traceback.format_exc())
    else:
        pipe.send("")
