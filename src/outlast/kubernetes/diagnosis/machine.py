"""Requirements of `outlast run` on this machine, and which extras are installed."""

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
from outlast.job import accelerators
from outlast.kubernetes.diagnosis import cluster, inspection, inspection_pods
from outlast.kubernetes.diagnosis.finding import Finding, passed, warned

_LEAST_FREE = 10 * 2**30
"""Minimum free disk space in bytes, enough for a few checkpoints of a small model."""
_LEAST_SHARED = 2**30
"""Minimum free space of /dev/shm in bytes; workers of data loaders pass samples through it."""
_TORCH_S = 120

EXTRAS = (
    ("store", ("obstore", "botocore"), "outputs, code and data in a store"),
    ("kubernetes", ("lightkube",), "clusters"),
)
"""Extras of the package, with their modules and the features that need them."""


def checks() -> Iterator[Finding]:
    """Run all checks of this machine."""
    yield inspection_pods.found(inspection.python())
    yield passed("outlast", f"{__version__}, {platform.platform()}")
    yield from torch(sys.executable)
    for name, modules, needed_for in EXTRAS:
        yield installed(name, modules, needed_for)
    if not Path(sys.executable).with_name("py-spy").exists():  # where the agent looks
        yield warned("py-spy", "is not installed: a hang is ended without the stacks", "pip install 'outlast[train]'")
    yield devices()
    yield free(Path.cwd(), "disk", _LEAST_FREE, "free some, or set `output` to a place that has room")
    if (shared := Path("/dev/shm")).is_dir():
        yield free(shared, "shared memory", _LEAST_SHARED, "mount /dev/shm larger, or use no workers in data loaders")
    yield from map(inspection_pods.found, inspection.memory())


def torch(interpreter: str) -> list[Finding]:
    """Check torch by importing it in a separate process, since the import is heavy and may crash."""
    command = [interpreter, "-c", inspection_pods.source(), json.dumps([("torch", {"accelerators": inspection_pods.DEVICES})])]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TORCH_S)
    except subprocess.TimeoutExpired:
        return [Finding("torch", f"is not imported after {_TORCH_S} s", "look at the disk that it is on, or install it again")]
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        return [Finding("torch", last[0], "pip install 'outlast[train]'")]
    found = inspection_pods.answers(done.stdout.splitlines())  # a GPU is not needed here: jobs may be for a cluster
    return [replace(each, outcome="warn") if each.name == "gpu" and each.wrong else each for each in found]


def installed(name: str, modules: Sequence[str], needed_for: str) -> Finding:
    """Whether an extra is installed."""
    absent = [module for module in modules if importlib.util.find_spec(module) is None]
    if absent:
        what = f"{', '.join(absent)} is not installed: needed for {needed_for}"
        return warned(name, what, f"pip install 'outlast[{name}]'")
    return passed(name, ", ".join(f"{module} {metadata.version(module)}" for module in modules))


def devices() -> Finding:
    """The accelerators that drivers report. If torch does not see such an accelerator, the installation is at fault."""
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


def kubectl(version: str) -> Iterator[Finding]:
    """Whether this machine's kubectl, which Outlast does not need, is compatible with an API server of this version:
    https://kubernetes.io/releases/version-skew-policy/#kubectl"""
    if (program := shutil.which("kubectl")) is None:
        return
    done = subprocess.run([program, "version", "--client", "-o", "json"], capture_output=True, text=True, check=False)
    client = json.loads(done.stdout)["clientVersion"]["gitVersion"] if not done.returncode else ""
    if not client:
        yield warned("kubectl", f"{program} does not run: {done.stderr.strip()}", "install it again; Outlast does not need it")
    elif abs(cluster.minor(client) - cluster.minor(version)) > 1:
        what = f"{client} and the server's {version} are more than one minor apart"
        yield warned("kubectl", what, f"install kubectl 1.{cluster.minor(version)}; Outlast itself does not need it")
    else:
        yield passed("kubectl", client)


def free(place: Path, name: str, least: int, remedy: str) -> Finding:
    """Whether a file system has at least `least` bytes of free space."""
    room = shutil.disk_usage(place).free
    said = f"{units.human_bytes(room)} free on {place}"
    return passed(name, said) if room >= least else warned(name, f"only {said}", remedy)
