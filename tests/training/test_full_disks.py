"""A disk that is full, or that can only be read, ends no training that memory can carry on."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import local_checkpoints
import small_disks
import worlds
from outlast.job import ledger
from outlast.job.contract import Env
from outlast.job.workerfiles import progress_file
from outlast.storage import checkpoints, store
from outlast.storage.checkpoints import in_store
from outlast.storage.sync import push_and_pull
from outlast.training import Stream, metrics, session
from outlast.training.state import background_save, snapshot_taking
from outlast.worker.agent import upload
from outlast.worker.launch import training_process as rank
from ranks import Agents
from worlds import Ended

EVERY = 5
"""Steps between two saves."""
STEPS = 20


@dataclasses.dataclass(frozen=True)
class Plan:
    """What happens after which step."""

    kill_at: int = 0
    repair_at: int = 0
    disks: tuple[str, ...] = ()
    """Those that rank 0 repairs then."""


def train(plan: Plan) -> None:
    """A snapshot at each step; writes nothing to the output by itself. What it ends with is in the state directory."""
    snapshot_taking.SHARE = float("inf")
    tempfile.tempdir = os.environ[Env.STATE]  # nobody else's
    with session.open(seed=3, quiet=True) as run:
        net = run.ddp(torch.nn.Sequential(torch.nn.Linear(8, 300), torch.nn.Dropout(0.1), torch.nn.Linear(300, 1)))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        stream = Stream({"x": torch.ones(160, 8).numpy()}, 8, seed=1, epochs=1)
        named = set[Path]()
        step = resumed = run.resume({"model": net, "optimizer": optimizer, "stream": stream})
        run.parameters({"lr": 0.01})
        for batch in stream:
            optimizer.zero_grad()
            for data, share in batch.split(net):
                (net(data["x"]).square().mean() * share).backward()
            optimizer.step()
            step += 1
            run.log(step, step_again=step)
            if step == plan.repair_at and run.rank == 0:
                for disk in plan.disks:
                    small_disks.repair(Path(disk))
            run.gather(None)
            while run._snapshots._working and not run._snapshots._replicated():
                time.sleep(0.001)
            if run.due(step):
                run.save(step)
                while run._saver.busy:
                    named.update(Path(tempfile.gettempdir()).glob("outlast-*"))
                    time.sleep(0.001)
            if step == plan.kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
        result = {"resumed": resumed, "hash": worlds.hashed(net, optimizer), "named": sorted(map(str, named))}
        (Path(os.environ[Env.STATE]) / "result.json").write_text(json.dumps(result))


class World:
    """Two workers, with agents in this process that keep their snapshots; `outputs` are theirs."""

    def __init__(self, agents: Agents, outputs: tuple[Path, ...]) -> None:
        self.agents, self.outputs = agents, outputs

    def train(self, plan: Plan, generation: int, attempt: int = 0) -> Ended:
        """One start of the world, to its end."""
        for worker in range(2):
            if worker not in self.agents.servers:
                self.agents.start(worker)
        names = [str(path.relative_to(self.agents.output)) for path in self.outputs]
        env = {Env.ATTEMPT: str(attempt), Env.CHECKPOINT_EVERY: f"{EVERY} steps", Env.CHECKPOINT_KEEP: "9"}
        if len(names) == 1:
            env, names = {**env, Env.OUTPUT: str(self.outputs[0])}, []
        processes = worlds.started(
            functools.partial(train, plan), self.agents.output, 2, generation=generation, disks=names, **env
        )
        return worlds.ended(processes, self.agents.output, disks=names)

    def results(self) -> list[dict[str, object]]:
        return [json.loads((self.agents.output / f"workers/{rank}/result.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("generation", [1, pytest.param(None, marks=pytest.mark.slow)])
def test_the_first_start_of_a_run_needs_the_disk_of_rank_0_only(tmp_path: Path, small_disk: Path, generation: int | None):
    """In a job, and in a torchrun, which numbers no generations."""
    small_disks.protect(small_disk)
    disks = ["a", "disk"]
    end = worlds.ran(functools.partial(train, Plan()), tmp_path, 2, generation=generation, disks=disks)
    assert f"outlast: output {small_disk} cannot be written: Read-only file system; training goes on" in end.errors[1]
    assert committed(tmp_path / "a") == [10, 15, 20]


def test_what_finds_no_room_leaves_no_part_of_it(small_disk: Path):
    """Lines of metrics and events of the ledger before and after are whole, and no partial files remain."""
    directory = small_disk / "checkpoints"
    checkpoints.acquire(directory, "r", 1)
    book = ledger.Ledger(small_disk / "ledger", "rank-0")
    text = "x" * 8000  # fills two pages, and there is one
    for step in (1, 2, 3):
        with pytest.raises(OSError, match="No space left") if step == 2 else contextlib.nullcontext():
            metrics.append(small_disk / "metrics.jsonl", {"step": step, "text": text})
        book.write("saving", step=step, text=text)
        if step == 1:
            small_disks.fill(small_disk)
            with pytest.raises(OSError, match="No space left"):
                checkpoints.acquire(directory, "r", 2)
            os.truncate(small_disk / "filler", (small_disk / "filler").stat().st_size - 4096)
        else:
            small_disks.repair(small_disk)
    book.close()
    assert [json.loads(line)["step"] for line in (small_disk / "metrics.jsonl").read_text().splitlines()] == [1, 3]
    assert [event["step"] for event in ledger.read(small_disk / "ledger")] == [1, 3]
    assert {path.name for path in directory.iterdir()} == {".lock", "FENCE"}


def test_a_whole_checkpoint_on_a_full_disk_is_uploaded_and_so_is_the_rest(small_disk: Path, tmp_path: Path) -> None:
    directory = small_disk / "checkpoints"
    checkpoints.acquire(directory, "r", 1, first=True)
    local_checkpoints.written(directory, 20, acquire=False)
    (small_disk / "notes.txt").write_text("how it went")
    (small_disk / ".push").mkdir()
    small_disks.fill(small_disk)
    place = store.open_(f"memory://{tmp_path.name}/runs/job")

    def uploader(**environ: str) -> upload.Uploader:
        return upload.Uploader(small_disk, place, "r", "", checkpoints.Retention(3), lambda _: None, environ=environ)

    with pytest.raises(OSError, match="No space left"):
        uploader().upload(threading.Event())
    assert [c.step for c in in_store.Checkpoints(place, "r").list_()] == [20], "it does not wait for what needs room"
    last = uploader(**{Env.STATE: str(tmp_path / "state"), Env.MEMBER: "uid"})
    last.run_ended = True
    assert upload.flush(last, time.monotonic() + 60) == "", "no notes of it, nor the goodput, are worth an upload"
    assert place.get("notes.txt") == b"how it went"
    assert push_and_pull.MANIFEST in place.names("")


def test_small_files_that_cannot_be_written_keep_no_process_from_training(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(Env.OUTPUT, str(small_disk))
    rank.enter(small_disk)
    record = progress_file.read(small_disk, 0)
    small_disks.protect(small_disk)
    rank.enter(small_disk)
    progress_file.Beat(small_disk, 0).write(True, "")
    assert progress_file.read(small_disk, 0) == record


def committed(output: Path) -> list[int]:
    return [c.step for c in checkpoints.list_(output / "checkpoints") if checkpoints.verify(c.path) is None]


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> object:
    """The hash that the weights end with."""
    output = tmp_path_factory.mktemp("undisturbed")
    worlds.ran(functools.partial(train, Plan()), output, 2)
    [weights] = {json.loads((output / f"workers/{rank}/result.json").read_text())["hash"] for rank in range(2)}
    return weights


def test_a_last_step_that_only_memory_has_ends_no_job_with_success(agents: Agents, small_disk: Path):
    """The disk is full at the end; once there is room, the next start saves the step from memory."""
    world = World(agents, (small_disk,))
    assert world.train(Plan(kill_at=8), 1).codes == [-9, -9]
    small_disks.fill(small_disk)
    full = world.train(Plan(), 1, attempt=1)
    assert full.codes == [1, 1], full.errors
    sentence = "NotSaved: step 20 could not be saved: rank 0: No space left on device; the next start tries again from memory"
    assert all(sentence in error for error in full.errors)
    assert committed(small_disk) == [5]
    small_disks.repair(small_disk)
    assert world.train(Plan(), 1, attempt=2).codes == [0, 0]
    assert committed(small_disk) == [5, 20]
    assert [result["resumed"] for result in world.results()] == [20, 20]


def test_the_others_go_on_from_memory_without_a_disk_that_cannot_even_be_read(agents: Agents, tmp_path: Path):
    world = World(agents, (tmp_path / "a", tmp_path / "b"))
    assert world.train(Plan(kill_at=8), 1).codes == [-9, -9]
    held = agents.newest(2).at[1]  # not each step has a snapshot
    assert held > 5, "newer than the checkpoint on the disks"
    (tmp_path / "b").rename(tmp_path / "gone")
    (tmp_path / "b").symlink_to("b")  # every access to it fails: too many levels of symbolic links
    end = world.train(Plan(), 1, attempt=1)
    assert end.codes == [0, 0], end.errors
    assert [result["resumed"] for result in world.results()] == [held, held]
    assert committed(tmp_path / "a") == [5, 10, 15, 20]


def cut() -> None:
    """As `train`, but the connections of the savers are reset after step 10."""
    begin = background_save.Saver.begin

    def begun(self: background_save.Saver, step: int, *rest: Any) -> None:
        before = _sockets()
        begin(self, step, *rest)
        self._thread.join()  # type: ignore[union-attr] # has begun
        new.append(_sockets() - before)

    new: list[set[str]] = []
    background_save.Saver.begin = begun  # type: ignore[method-assign]
    due = session.Session.due

    def cutting(self: session.Session, step: int) -> bool:
        if step == 2 * EVERY + 1:
            for name in os.listdir("/proc/self/fd"):
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/self/fd/{name}") in new[0]:
                        with socket.socket(fileno=os.dup(int(name))) as connection:
                            connection.getpeername()  # one that listens has none
                            connection.shutdown(socket.SHUT_RDWR)
        return due(self, step)

    session.Session.due = cutting  # type: ignore[method-assign]
    train(Plan())


def _sockets() -> set[str]:
    found = set[str]()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return {each for each in found if each.startswith("socket:")}


def test_saves_go_on_after_a_reset_of_their_connections(tmp_path: Path):
    end = worlds.ran(cut, tmp_path, 2, **{Env.CHECKPOINT_EVERY: f"{EVERY} steps", Env.CHECKPOINT_KEEP: "9"})
    assert "step 15 could not be saved: the ranks lost each other" in end.errors[0]
    assert [c.step for c in end.checkpoints] == [5, 10, 20]


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (small_disks.fill, "No space left on device"),
        pytest.param(small_disks.protect, "Read-only file system", marks=pytest.mark.slow),
    ],
)
def test_training_goes_on_from_memory_and_saves_again_once_the_disk_is_well(
    agents: Agents, small_disk: Path, undisturbed: object, harm: Callable[[Path], None], said: str
):
    """The disk that both workers share fails. Another attempt and another generation begin, then it is repaired."""
    world = World(agents, (small_disk,))
    first = world.train(Plan(kill_at=8), 1)
    assert first.codes == [-9, -9], first.errors
    harm(small_disk)
    attempt = world.train(Plan(kill_at=12), 1, 1)
    assert attempt.codes == [-9, -9], attempt.errors
    assert committed(small_disk) == [5]
    assert not list(small_disk.glob("checkpoints/*.saving-*"))
    kept = agents.newest(2).at[1]
    last = world.train(Plan(repair_at=16, disks=(str(small_disk),)), 2)
    assert last.codes == [0, 0], last.errors
    assert world.results() == [{"resumed": kept, "hash": undisturbed, "named": []}] * 2
    assert f"outlast: output {small_disk} cannot be written: {said}; training goes on" in last.errors[0]
    assert f"outlast: step 15 could not be saved: rank 0: {said}; the newest checkpoint is that of step 5" in last.errors[0]
    assert committed(small_disk) == [5, 20]
    assert checkpoints.generation(small_disk / "checkpoints", "r") == 2
    logged = [json.loads(line)["step"] for line in (small_disk / "metrics.jsonl").read_text().splitlines()]
    assert logged == sorted(set(logged)), "each step once"
    assert logged[-4:] == [17, 18, 19, 20]
    left = {path.name for path in (small_disk / "checkpoints").iterdir() if not path.name.startswith("step-000000")}
    assert left <= {".lock", "FENCE"}


@pytest.mark.slow  # quickly: test_the_others_go_on_from_memory_without_a_disk_that_cannot_even_be_read
@pytest.mark.parametrize(("names", "saved"), [("a/disk", [5, 10, 15, 20]), ("disk/a", [5, 20])])
def test_the_others_save_without_a_disk_that_fails_unless_it_is_rank_0s(
    agents: Agents, tmp_path: Path, small_disk: Path, undisturbed: object, names: str, saved: list[int]
):
    """One of two workers has a disk of its own that turns read-only. Nothing ends; from step 16 on it is well again."""
    outputs = [tmp_path / name for name in names.split("/")]
    world = World(agents, tuple(outputs))
    assert world.train(Plan(kill_at=8), 1).codes == [-9, -9]
    small_disks.protect(small_disk)
    last = world.train(Plan(repair_at=16, disks=(str(small_disk),)), 2)
    assert last.codes == [0, 0], last.errors
    assert {result["hash"] for result in world.results()} == {undisturbed}
    assert not any(result["named"] for result in world.results()), "a process that is killed could not remove it"
    assert committed(tmp_path / "a") == saved
    assert committed(small_disk) == [5, 20]
    number = outputs.index(small_disk)
    assert f"outlast: output {small_disk} cannot be written: Read-only file system; training goes on" in last.errors[number]
    failed = "outlast: step 15 could not be saved: rank 0: Read-only file system; the newest checkpoint is that of step 5"
    lacks = "outlast: step 15 is saved, but not on every disk: rank 1: Read-only file system"
    assert (lacks if number else failed) in last.errors[0]
