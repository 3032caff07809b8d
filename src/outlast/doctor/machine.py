"""What `outlast run` needs of this machine, and which extras are there."""

from __future__ import annotations

import importlib.util
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from outlast import __version__, accelerators, units
from outlast.doctor import Check, failed, inspection, passed, warned

LEAST_PYTHON = (3, 11)
_LEAST_FREE = 10 * 2**30
"""Bytes; a few checkpoints of a small model."""
_LEAST_SHARED = 2**30
"""Bytes of /dev/shm: workers of data loaders hand samples over in it."""
_TORCH_S = 120

_ASK_TORCH = """
import contextlib, importlib, sys, torch, torch.distributed as d
modules = []
for device, _, package in (each.partition(":") for each in sys.argv[1:]):
    with contextlib.suppress(ImportError):
        package and importlib.import_module(package)
    modules.append(getattr(torch, device, None))
found = next((module for module in modules if module and module.is_available()), None)
print(torch.__version__, d.is_available(), found and found.device_count(), found and found.get_device_name(0), sep="|")
"""
"""Run with the device types that torch may know, each with the package that adds it: `hpu:habana_frameworks.torch`."""


EXTRAS = (
    ("store", ("obstore", "botocore"), "outputs, code and data in a store"),
    ("kubernetes", ("lightkube",), "clusters"),
)
"""Extras of the package: their modules, and what needs them."""


def checks() -> Iterator[Check]:
    """Look at this machine."""
    yield python(sys.version_info[:2])
    yield passed("outlast", f"{__version__}, {platform.platform()}")
    yield torch(sys.executable)
    for name, modules, needed_for in EXTRAS:
        yield installed(name, modules, needed_for)
    if not Path(sys.executable).with_name("py-spy").exists():  # where the agent looks
        yield warned("py-spy", "is not installed: a hang is ended without the stacks", "pip install 'outlast[train]'")
    yield devices()
    yield from free(Path.cwd(), "disk", _LEAST_FREE, "free some, or set `output` to a place that has room")
    if Path("/dev/shm").is_dir():
        yield from free(
            Path("/dev/shm"), "shared memory", _LEAST_SHARED, "mount /dev/shm larger, or use no workers in data loaders"
        )
    if inspection.killed_together():
        yield warned("out of memory", *inspection.TOGETHER)


def python(version: Sequence[int]) -> Check:
    """Whether this Python is new enough."""
    least, have = (".".join(map(str, each)) for each in (LEAST_PYTHON, version))
    if tuple(version) < LEAST_PYTHON:
        return failed("python", f"{have}; {least} or newer is needed", f"install Python {least}")
    return passed("python", platform.python_version())


def torch(interpreter: str) -> Check:
    """What torch says in a process of its own: it is heavy, and may crash."""
    remedy = "pip install 'outlast[train]'"
    try:
        devices = (f"{row.device}:{row.package}" for row in accelerators.DEVICES.values())
        command = [interpreter, "-c", _ASK_TORCH, *devices]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TORCH_S)
    except subprocess.TimeoutExpired:
        return failed("torch", f"is not imported after {_TORCH_S} s", "look at the disk that it is on, or install it again")
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return failed("torch", last[0], remedy)
    return judged_torch(done.stdout.strip())


def judged_torch(answer: str) -> Check:
    """What the answer to _ASK_TORCH means."""
    version, distributed, count, name = answer.split("|")
    if distributed != "True":
        return failed("torch", f"{version} is built without torch.distributed", "install a build with it: pip install torch")
    return passed("torch", f"{version}, {f'{count} × {name}' if count != 'None' else 'no GPU'}")


def installed(name: str, modules: Sequence[str], needed_for: str) -> Check:
    """Whether an extra is there."""
    absent = [module for module in modules if importlib.util.find_spec(module) is None]
    if absent:
        said = f"{', '.join(absent)} is not installed: needed for {needed_for}"
        return warned(name, said, f"pip install 'outlast[{name}]'")
    return passed(name, ", ".join(f"{module} {metadata.version(module)}" for module in modules))


def devices() -> Check:
    """The accelerators that drivers know: those that torch does not see are a mistake of the installation."""
    rows = [row for row in accelerators.TABLE if row.query]
    row = next((row for row in rows if shutil.which(row.query[0])), None)
    if row is None:
        return passed("devices", f"no {' or '.join(row.vendor for row in rows)} driver on this machine")
    done = subprocess.run(row.query, capture_output=True, text=True, check=False)
    names = done.stdout.strip().splitlines()
    if done.returncode or not names:
        said = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        return warned("devices", f"{row.query[0]} knows none: {said}", "see whether the driver is loaded (dmesg), or use CPUs")
    return passed("devices", f"{len(names)} × {names[0]}")


def free(place: Path, name: str, least: int, remedy: str) -> Iterator[Check]:
    """How much room a file system has."""
    room = shutil.disk_usage(place).free
    said = f"{units.human_bytes(room)} free on {place}"
    yield passed(name, said) if room >= least else warned(name, f"only {said}", remedy)
