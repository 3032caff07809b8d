"""What the kernel says of memory, by which address agents reach each other, and how fast replicas are sent."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest

from outlast.job.contract import Env
from outlast.storage.snapshots import data_port, part_format, replicas, rooms

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
