"""Memory for snapshots: what the kernel says, the budget, what fits, and which room a part gets; and how replicas are sent."""

from __future__ import annotations

import dataclasses
import fcntl
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outlast.job.contract import Env
from outlast.storage.snapshots import budget, data_port, part_format, replicas, rooms
from outlast.storage.snapshots.budget import Budget, Fit
from outlast.storage.snapshots.rooms import Choice, View

GI = 1 << 30


def a_machine(directory: Path, *, total: int, free: int, cgroup: str, files: dict[str, str]) -> rooms.Machine:
    """A machine whose kernel says this; `files` are below /sys/fs/cgroup."""
    proc, cgroups = directory / "proc", directory / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text(
        f"MemTotal: {total >> 10} kB\nMemFree: 1 kB\nMemAvailable: {free >> 10} kB\nHugePages_Total: 0\n"
    )
    (proc / "self/cgroup").write_text(cgroup)
    for name, text in files.items():
        (cgroups / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroups / name).write_text(text)
    return rooms.Machine(proc, cgroups)


V2 = {
    "memory.max": "max\n",
    "pods/memory.max": f"{100 * GI}\n",
    "pods/memory.current": f"{40 * GI}\n",
    "pods/memory.stat": f"anon 5\ninactive_file {10 * GI}\nactive_file 7\n",
    "pods/a/memory.max": f"{20 * GI}\n",
    "pods/a/memory.current": f"{15 * GI}\n",
    "pods/a/memory.stat": f"inactive_file {2 * GI}\nactive_file {GI}\n",
}


def test_a_cgroup_of_version_2_and_those_above_it_limit_memory(tmp_path: Path) -> None:
    machine = a_machine(tmp_path, total=1000 * GI, free=900 * GI, cgroup="0::/pods/a\n", files=V2)
    assert machine.headroom == 20 * GI - 12 * GI - 2 * GI
    assert machine.budget("auto", 1).bytes == 5 * GI
    assert machine.budget(50 * GI, 1).bytes == 6 * GI


def test_a_cgroup_of_version_1_limits_memory_and_one_without_limit_does_not(tmp_path: Path) -> None:
    names = {
        "memory.limit_in_bytes": f"{8 * GI}",
        "memory.usage_in_bytes": f"{2 * GI}",
        "memory.stat": f"total_inactive_file {GI}",
    }
    files = {f"memory/docker/{name}": text for name, text in names.items()}
    files |= {"memory/memory.limit_in_bytes": "9223372036854771712\n"}
    machine = a_machine(tmp_path, total=100 * GI, free=90 * GI, cgroup="4:cpu:/x\n3:memory:/docker\n0::/\n", files=files)
    assert machine.budget("auto", 1).bytes == 2 * GI
    assert machine.headroom == 8 * GI - GI - 8 * GI // 10


def test_in_a_container_the_path_of_its_cgroup_is_not_there_and_the_root_counts(tmp_path: Path) -> None:
    files = {"memory.max": f"{4 * GI}", "memory.current": f"{GI}", "memory.stat": "inactive_file 0"}
    machine = a_machine(tmp_path, total=100 * GI, free=90 * GI, cgroup="0::/../../pod7/c\n", files=files)
    assert machine.budget("auto", 1).bytes == GI


@pytest.mark.parametrize(
    ("cgroup", "file", "kills"),
    [
        ("0::/pods/a\n", "pods/a/memory.events", 2),
        ("3:memory:/docker\n", "memory/docker/memory.oom_control", 2),
        ("0::/\n", "cgroup.procs", 0),
    ],
)
def test_how_often_the_kernel_has_killed_for_want_of_memory(tmp_path: Path, cgroup: str, file: str, kills: int) -> None:
    files = {file: "low 0\noom 3\noom_kill 2\noom_group_kill 0\n"}
    assert a_machine(tmp_path, total=GI, free=GI, cgroup=cgroup, files=files).oom_kills() == kills


def test_workers_of_one_machine_share_its_memory(tmp_path: Path) -> None:
    machine = a_machine(tmp_path, total=48 * GI, free=40 * GI, cgroup="", files={})
    assert [machine.budget("auto", workers).bytes for workers in (1, 4)] == [12 * GI, 3 * GI]
    full = a_machine(tmp_path / "full", total=48 * GI, free=4 * GI, cgroup="", files={})
    assert full.headroom == 0
    assert full.budget("auto", 1).bytes == 0


def test_a_file_in_memory_cannot_shrink_below_whoever_maps_it() -> None:
    file = rooms.File(10_000)
    with pytest.raises(PermissionError):
        os.ftruncate(file.fd, 100)
    assert os.stat(file.fd).st_blocks * 512 >= part_format.PAGE + 10_000, "it is not touched"
    assert fcntl.fcntl(file.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    file.close()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ("127.0.0.1", False)),
        ({Env.ADDRESS: "10.0.0.3"}, ("10.0.0.3", True)),
        ({Env.ADDRESS: "fd00::3"}, ("fd00::3", True)),
        ({Env.ADDRESS: "10.0.0.3", "NCCL_SOCKET_IFNAME": "=lo"}, ("127.0.0.1", True)),
        ({Env.ADDRESS: "10.0.0.3", "GLOO_SOCKET_IFNAME": "none7,lo"}, ("127.0.0.1", True)),
        ({Env.ADDRESS: "10.0.0.3", "NCCL_SOCKET_IFNAME": "^lo,docker"}, ("10.0.0.3", True)),
        ({Env.ADDRESS: "10.0.0.3", "NCCL_SOCKET_IFNAME": "none7"}, ("10.0.0.3", True)),
    ],
)
def test_replicas_go_through_the_network_of_the_ranks(environ: dict[str, str], expected: tuple[str, bool]) -> None:
    assert data_port.advertised(environ) == expected


def test_a_replica_takes_a_quarter_of_the_time_between_snapshots_and_is_never_very_slow() -> None:
    assert replicas.rate(1_000_000_000, 8.0) == 500e6
    assert replicas.rate(1_000_000, 60.0) == replicas.SLOWEST
    assert replicas.rate(1_000_000_000, None) == 200e6


# The budget

TENTH = 16 * GI // 10
STAYS = ": a tenth of the memory stays free"


@pytest.mark.parametrize(
    ("requested", "used", "free", "bytes_", "why"),
    [
        ("off", 0, 16, 0, "checkpoint.memory is off"),
        ("auto", 8, 16, 4 * GI, "4.0 GiB, a quarter of 16 GiB"),
        (8 * GI, 0, 16, 8 * GI, "8.0 GiB, checkpoint.memory"),
        ("auto", 12, 16, 4 * GI - TENTH, "2.4 GiB instead of 4.0 GiB, a quarter of 16 GiB" + STAYS),
        ("auto", 0, 2, 2 * GI - TENTH, "410 MiB instead of 4.0 GiB, a quarter of 16 GiB" + STAYS),  # the machine has no more
        ("auto", 15, 16, 0, "no memory: less than a tenth of 16 GiB is free"),
        (20 * GI, 0, 16, 16 * GI - TENTH, "14 GiB instead of 20 GiB, checkpoint.memory" + STAYS),
    ],
)
def test_snapshots_use_what_was_asked_for_and_leave_a_tenth_free(
    requested: budget.Requested, used: int, free: int, bytes_: int, why: str
) -> None:
    assert budget.budget(requested, 16 * GI, used * GI, free * GI) == Budget(bytes_, why)


def test_the_variable_says_what_the_job_file_says() -> None:
    assert [budget.requested(text) for text in ("", "auto", "off", "1048576")] == ["auto", "auto", "off", 2**20]
    with pytest.raises(ValueError, match="is not a quantity; write 16Gi"):
        budget.requested("much")


@pytest.mark.parametrize(
    ("room", "shared", "unique", "workers", "expected"),
    [
        (2 * GI, GI, 0, 8, Fit(True, 0)),
        (6 * GI, 0, GI, 8, Fit(True, 2)),
        (4 * GI, 0, GI, 2, Fit(True, 1)),  # nobody else could hold another
        (2 * GI, 0, GI, 1, Fit(True, 0)),
        (
            5 * GI,
            0,
            GI,
            8,
            Fit(True, 1, "snapshots with replicas: 2 take 6.0 GiB, checkpoint.memory is 5.0 GiB; replicas are reduced to 1"),
        ),
        (GI, GI, GI, 8, Fit(False, 0, "snapshots take 4.0 GiB, checkpoint.memory is 1.0 GiB; there are none")),
    ],
)
def test_what_does_not_fit_is_reduced(room: int, shared: int, unique: int, workers: int, expected: Fit) -> None:
    assert budget.fit(room, shared, unique, 2, workers) == expected


@pytest.mark.parametrize("replicas", [0, 1, 3])
def test_the_largest_state_fits_and_a_larger_one_does_not(replicas: int) -> None:
    common, own = budget.largest(GI, replicas)
    assert budget.fit(GI, common, 0, replicas, 8) == Fit(True, 0)
    assert budget.fit(GI, 0, own, replicas, 8) == Fit(True, replicas)
    assert not budget.fit(GI, common + 1, 0, replicas, 8).held
    assert budget.fit(GI, 0, own + 1, replicas, 8).replicas < replicas or not replicas


AUTO = "4.0 GiB, a quarter of 16 GiB; a state of 2.0 GiB fits"
TOO_MUCH = "checkpoint.memory is 4.0 GiB; "


@pytest.mark.parametrize(
    ("requested", "workers", "saved", "expected"),
    [
        ("off", 2, 0, "checkpoint.memory is off"),
        ("auto", 1, 0, AUTO),
        ("auto", 2, GI, f"{AUTO} with DDP, 1.0 GiB a worker with FSDP and replicas: 1 (2 would need 3 workers); "
         "that of the newest checkpoint, 1.0 GiB, does"),
        ("auto", 1, 3 * GI, f"{AUTO}; that of the newest checkpoint, 3.0 GiB, does not: snapshots take 6.0 GiB, {TOO_MUCH}"
         "there are none"),
        ("auto", 8, 12 * GI, f"{AUTO} with DDP, 683 MiB a worker with FSDP and replicas: 2; that of the newest checkpoint, "
         f"12 GiB, with DDP: snapshots take 24 GiB, {TOO_MUCH}there are none and with FSDP: "
         f"snapshots with replicas: 2 take 9.0 GiB, {TOO_MUCH}replicas are reduced to 0"),
    ],
)  # fmt: skip
def test_validate_says_what_snapshots_cost_and_what_fits(
    requested: budget.Requested, workers: int, saved: int, expected: str
) -> None:
    assert budget.cost(requested, 2, 16 * GI, workers, saved) == expected


# Which room a new part gets: one complete snapshot at any time, and memory for two


class Worker:
    """Memory of a worker, as `server` manages it."""

    def __init__(self, budget: int) -> None:
        self.budget, self.rooms, self._next = budget, list[View](), 0

    def take(self, size: int, at: rooms.At, complete: rooms.At, *, replica: bool = False) -> int | None:
        choice = rooms.choose(self.rooms, size, self.budget, at, complete, replica=replica)
        if choice.problem:
            return None
        held = {room.id: room for room in self.rooms}
        overwritten = [held[id] for id in (*choice.drop, *([] if choice.reuse is None else [choice.reuse]))]
        assert not any(room.at == complete or room.busy for room in overwritten if not room.replica)
        self.rooms = [room for room in self.rooms if room not in overwritten]
        if choice.reuse is None:
            self._next += 1
            room = View(self._next, size)
        else:
            room = held[choice.reuse]
        self.rooms.append(dataclasses.replace(room, at=at, busy=False, replica=replica))
        assert sum(room.size for room in self.rooms) <= self.budget
        return room.id

    def holds(self, at: rooms.At) -> list[int]:
        return sorted(room.size for room in self.rooms if room.at == at)


@given(
    own=st.lists(st.integers(1, 1000), min_size=1, max_size=3),
    others=st.lists(st.integers(1, 1000), max_size=3),
    history=st.lists(st.tuples(st.booleans(), st.booleans(), st.randoms(use_true_random=False)), max_size=12),
)
def test_memory_for_two_snapshots_always_suffices_and_the_newest_complete_one_stays(
    own: list[int], others: list[int], history: list[tuple[bool, bool, object]]
) -> None:
    """Each snapshot ends complete or given up; now and then a failure begins another generation."""
    worker = Worker(int(2 * rooms._WASTE * (sum(own) + sum(others))) + 8)
    complete, generation = (0, 0), 1
    for step, (succeeds, fails, rng) in enumerate(history, start=1):
        at = (generation, step)
        wanted = [(size, False) for size in own] + [(size, True) for size in others]
        rng.shuffle(wanted)  # type: ignore[attr-defined]
        before = worker.holds(complete)
        assert all(worker.take(size, at, complete, replica=replica) for size, replica in wanted)
        assert worker.holds(complete) == before
        assert len(worker.holds(at)) == len(wanted)
        if succeeds:
            complete = at
        generation += fails


def test_replicas_leave_room_for_two_snapshots_of_the_workers_own() -> None:
    worker = Worker(250)
    assert worker.take(100, (1, 1), (0, 0))
    assert worker.take(60, (1, 1), (0, 0), replica=True) is None
    assert worker.take(50, (1, 1), (0, 0), replica=True)
    assert worker.take(100, (1, 2), (1, 1))
    assert worker.take(100, (1, 3), (1, 2))


def test_a_workers_own_part_displaces_a_replica_that_came_first() -> None:
    held = [View(1, 80, (1, 1), replica=True), View(2, 20, (1, 1), busy=True, replica=True)]
    assert rooms.choose(held, 50, 110, (1, 1), (0, 0)) == Choice(drop=(1,))


def test_memory_that_somebody_uses_is_not_overwritten() -> None:
    held = [View(1, 100, (1, 1), busy=True), View(2, 100, (1, 1)), View(3, 100, (1, 2))]
    assert rooms.choose(held, 100, 300, (1, 3), (1, 2)) == Choice(reuse=2)
    choice = rooms.choose([held[0], held[2]], 100, 250, (1, 3), (1, 2))
    assert choice.problem == (
        "0.0 MB of the 0.0 MB for snapshots in the memory of this worker are in use, 0.0 MB more are needed;"
        " raise checkpoint.memory, or lower checkpoint.replicas"
    )


@pytest.mark.parametrize(
    ("at", "free"), [((1, 100), False), ((1, 99), True), ((1, 101), True), ((2, 101), False), ((2, 102), False), (None, True)]
)
def test_what_is_neither_complete_nor_being_made_is_free(at: rooms.At | None, free: bool) -> None:
    """Generation 2 went on from step 100 of generation 1, whose step 101 some rank had not finished."""
    assert rooms.free(View(1, 1, at), (2, 101), (1, 100)) is free
