"""Checks whether this machine meets the requirements of `outlast run`, and which extras are installed."""

from __future__ import annotations

import importlib.util
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from outlast import __version__
from outlast.base import units
from outlast.kubernetes.diagnosis import check_pods, image_checks
from outlast.kubernetes.diagnosis.finding import Finding, passed, warned

_MIN_FREE = 10 * 2**30
"""Minimum free disk space in bytes, enough for a few checkpoints of a small model."""
_MIN_SHARED = 2**30
"""Minimum free space in /dev/shm, in bytes. Data loader workers pass samples through it."""
_TORCH_S = 120

EXTRAS = (("store", ("obstore", "botocore"), "outputs, code and data in a store"), ("kubernetes", ("lightkube",), "clusters"))
"""The extras, their modules, and the features that need them."""


def checks() -> Iterator[Finding]:
    yield check_pods.finding_for(image_checks.python())
    yield passed("outlast", f"{__version__}, {platform.platform()}")
    yield from torch(sys.executable)
    for name, modules, needed_for in EXTRAS:
        yield installed(name, modules, needed_for)
    if not Path(sys.executable).with_name("py-spy").exists():  # the agent expects it there
        yield warned("py-spy", "is not installed: a hang is ended without the stacks", "pip install 'outlast[train]'")
    yield free(Path.cwd(), "disk", _MIN_FREE, "free some, or set `output` to a place that has room")
    if (shared := Path("/dev/shm")).is_dir():
        yield free(shared, "shared memory", _MIN_SHARED, "mount /dev/shm larger, or use no workers in data loaders")
    yield from map(check_pods.finding_for, image_checks.memory())


def torch(interpreter: str) -> list[Finding]:
    """Check torch in a separate process, because importing it is slow and may crash."""
    command = [interpreter, "-c", check_pods.source(), json.dumps([("torch", {"accelerators": check_pods.DEVICES})])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TORCH_S)
    except subprocess.TimeoutExpired:
        return [Finding("torch", f"is not imported after {_TORCH_S} s", "look at the disk that it is on, or install it again")]
    if done.returncode:
        error = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return [Finding("torch", error[0], "pip install 'outlast[train]'")]
    findings = check_pods.parse_findings(done.stdout.splitlines())  # a missing GPU may be fine: jobs may be for a cluster
    return [replace(each, outcome="warn") if each.name == "gpu" and each.failed else each for each in findings]


def installed(name: str, modules: Sequence[str], needed_for: str) -> Finding:
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    if missing:
        what = f"{', '.join(missing)} is not installed: needed for {needed_for}"
        return warned(name, what, f"pip install 'outlast[{name}]'")
    return passed(name, ", ".join(f"{module} {metadata.version(module)}" for module in modules))


def free(place: Path, name: str, minimum: int, remedy: str) -> Finding:
    """Check that a file system has `minimum` bytes free."""
    free_bytes = shutil.disk_usage(place).free
    what = f"{units.human_bytes(free_bytes)} free on {place}"
    return passed(name, what) if free_bytes >= minimum else warned(name, f"only {what}", remedy)
