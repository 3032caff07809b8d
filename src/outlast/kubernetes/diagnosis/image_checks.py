"""Checks of Python, of an image, and of services that a pod must reach. `outlast doctor` runs them, on this machine or in a pod.

    python -c SOURCE '[["image", {"expected": "0.1"}], ["dns", {"names": ["kubernetes.default"]}]]'

Each check prints a line with MARK and a JSON list of its name, outcome (pass, warn or fail), description and remedy. A pod
receives this file's source, so the top of the file imports only the standard library, and the file must work with an older
Python.
"""

from __future__ import annotations

import contextlib
import functools
import glob
import importlib
import importlib.metadata
import importlib.util
import json
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

MARK = "outlast-doctor "
MIN_PYTHON = (3, 11)
ELEMENTS = 4 * 2**20
"""Number of elements of the all-reduce tensor, which takes 16 MiB."""
ROUNDS = 5
_REMEDIES = {
    "^Denied": "give the pods credentials that may do this: --secret, `secrets` in the job file, or the pod's account",
    "no kernel image": "use a torch that is built for this GPU",
    "out of memory|busy or unavailable": "free the GPU: other processes use it",
}
"""Remedies for errors that match these patterns; for others, a check has one of its own."""
if TYPE_CHECKING:
    Check = tuple[str, str, str, str]
    """A check's name, outcome, description and remedy."""


def attempt(name: str, remedy: str, check: Callable[[], str], failure_outcome: str = "fail") -> Iterator[Check]:
    """Call `check`, and yield a passed check with the text that it returns, or one with `failure_outcome` if it raises. Yield
    nothing for an empty text."""
    try:
        if what := check():
            yield name, "pass", what, ""
    except Exception as error:  # a missing system library may raise any exception
        what = f"{type(error).__name__}: {error}".removesuffix(": ")
        yield name, failure_outcome, what, next((_REMEDIES[each] for each in _REMEDIES if re.search(each, what)), remedy)


# The image


def image(expected: str, accelerators: Sequence[str] = ()) -> Iterator[Check]:
    """Check that an image has what workers need, such as Python, torch, and Outlast in the version `expected`."""
    yield python()
    if injected := shutil.which("outlast") is None and importlib.util.find_spec("outlast") is None:
        yield "outlast", "pass", "not in the image; an init container brings it to each pod (inject in the job file)", ""
    else:
        yield from outlast(expected)
    yield from torch(accelerators)
    yield from package("numpy", "pip install outlast[train]")
    if not injected:
        yield from package("obstore", "for outputs in a store: pip install outlast[store]", "warn")
        yield from bytecode()
        yield from command()
    yield from memory()


def python(version: Sequence[int] = sys.version_info[:2]) -> Check:
    """Check that this Python is new enough."""
    minimum = ".".join(map(str, MIN_PYTHON))
    version_text = platform.python_version() if tuple(version) == sys.version_info[:2] else ".".join(map(str, version))
    if tuple(version) >= MIN_PYTHON:
        return "python", "pass", version_text, ""
    return "python", "fail", version_text, f"install Python {minimum} or newer"


def package(name: str, remedy: str, failure_outcome: str = "fail") -> Iterator[Check]:
    """Check that a package can be imported, and report its version."""

    def version() -> str:
        importlib.import_module(name)
        return f"{name} {importlib.metadata.version(name)}"

    return attempt(name, remedy, version, failure_outcome)


def outlast(expected: str) -> Iterator[Check]:
    """Check that Outlast is installed, and warn if its version is not `expected`."""
    for check in package("outlast", "install Outlast in the image: pip install outlast[train,store]"):
        what = f"{check[2]}, but the command line has {expected}; they may not read each other's files"
        mismatch = check[1] == "pass" and check[2] != f"outlast {expected}"
        yield ("outlast", "warn", what, "use an image and a command line of the same version") if mismatch else check


def torch(accelerators: Sequence[str] = ()) -> Iterator[Check]:
    """Check torch and the GPUs that it can use. Each of the `accelerators`, such as `cuda::nvidia[0-9]*`, consists of torch's
    device type, the package that adds this type to torch, and a pattern of device files in /dev, separated by colons. The last
    two may be empty."""
    checks = list(package("torch", "pip install 'outlast[train]'"))
    yield from checks
    if checks[0][1] != "pass":
        return
    import torch as torch_module

    if not torch_module.distributed.is_available():
        yield "torch", "fail", "it is built without torch.distributed", "install one with it: pip install torch"
    for device, package_name, files in (each.split(":") for each in accelerators):
        with contextlib.suppress(ImportError):
            package_name and importlib.import_module(package_name)
        module = getattr(torch_module, device, None)
        if module and module.is_available():
            remedy = "see whether the GPU and its driver work, for example with nvidia-smi"
            yield from attempt("gpu", remedy, functools.partial(_computes, torch_module, device, module))
        elif files and glob.glob(f"/dev/{files}"):
            remedy = f"use a torch that is built for {device.upper()}, no newer than the driver"
            yield "gpu", "fail", "there is a GPU that torch cannot use", remedy


def _computes(torch: Any, device: str, module: Any) -> str:
    torch.ones(1, device=device).add(1).item()  # raises if torch has no kernels for this device
    version = getattr(torch.version, device, None) or "of unknown version"
    return f"{module.device_count()} × {module.get_device_name(0)}, {device.upper()} {version}"


def bytecode() -> Iterator[Check]:
    """Check that torch and Outlast have compiled bytecode. Without it, every start of a worker compiles them again."""
    try:
        from outlast.worker.launch import bytecode
    except ImportError:  # the check `outlast` reports it
        return
    if missing := bytecode.missing("torch", "outlast"):
        what = f"no compiled bytecode of {', '.join(missing)}: every start of a worker compiles it again, in 15 s and more"
        yield "bytecode", "warn", what, bytecode.remedy(missing)
    else:
        yield "bytecode", "pass", "torch and outlast are compiled", ""


def command() -> Iterator[Check]:
    """Check that pods would find the command `outlast`, and that it runs."""
    remedy = "put the directory of `outlast` on the image's PATH: pods run `outlast agent`"
    return attempt("command", remedy, lambda: subprocess.check_output(["outlast", "--version"], text=True, timeout=60).strip())


def memory(path: str = "/sys/fs/cgroup/memory.oom.group") -> Iterator[Check]:
    """Warn if all processes of this cgroup are killed when its memory runs out. This is the kubelet's default for cgroup v2 since
    Kubernetes 1.28."""
    with contextlib.suppress(OSError), open(path) as file:
        if file.read().strip() == "1":
            what = "when this container's memory runs out, all its processes are killed: "
            what += "a worker's agent and its snapshots with the training"
            remedy = "leave memory to spare, or set singleProcessOOMKill: true in the kubelets' configuration "
            yield "out of memory", "warn", what, remedy + "(Kubernetes 1.32 and later)"


# Names


def dns(names: Sequence[str]) -> Iterator[Check]:
    """Check that these names resolve inside a cluster."""

    def resolve(name: str) -> str:
        began = time.monotonic()
        address = socket.getaddrinfo(name, None)[0][4][0]
        return f"{name} is {address} ({(time.monotonic() - began) * 1000:.0f} ms)"

    remedy = "see whether the cluster's DNS runs (kubectl get pods -n kube-system -l k8s-app=kube-dns) and pods may reach port 53"
    return attempt("dns", remedy, lambda: "; ".join(map(resolve, names)))


# The other pod


def peer(rank: int, address: str, port: int, backend: str, timeout_s: float, device: str = "cpu") -> Iterator[Check]:
    """Measure an all-reduce between two pods. Rank 1 connects to rank 0 at `address`."""
    remedy = (
        "let pods reach each other on all ports (network policies, security groups, the network plugin), and use the same "
        f"interface on both; {backend} began at port {port}"
    )
    return attempt("all-reduce", remedy, lambda: _all_reduce(rank, address, port, backend, timeout_s, device))


def _all_reduce(rank: int, address: str, port: int, backend: str, timeout_s: float, device: str) -> str:
    """Run all-reduces between the two pods. Rank 0 returns a report of the bandwidth, and rank 1 returns an empty string."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    method = f"tcp://{address if ':' not in address else f'[{address}]'}:{port}"
    dist.init_process_group(backend, init_method=method, rank=rank, world_size=2, timeout=timedelta(seconds=timeout_s))
    try:
        tensor = torch.full((ELEMENTS,), float(rank + 1), device=device)  # (n,)
        dist.all_reduce(tensor)
        if tensor[0].item() != 3.0 or tensor[-1].item() != 3.0:
            raise RuntimeError(f"the sum of 1 and 2 was {tensor[0].item()}")
        began = time.monotonic()
        for _ in range(ROUNDS):
            dist.all_reduce(tensor)
        getattr(torch, device).synchronize()
        seconds = (time.monotonic() - began) / ROUNDS
    finally:
        dist.destroy_process_group()
    size = ELEMENTS * 4
    report = f"{backend} of {size / 2**20:.0f} MiB over two pods: {seconds * 1000:.0f} ms, {size / seconds / 1e9:.2f} GB/s"
    return "" if rank else report


# The store


def store(url: str) -> Iterator[Check]:
    """Check that a store supports the operations that Outlast needs, by trying them on a small object."""
    key = f".outlast-doctor-{uuid.uuid4().hex}"
    supported = True

    def tried() -> str:
        nonlocal supported
        from outlast.storage import store as stores

        place = stores.open_(url, timeout_s=10)
        began = time.monotonic()
        place.put(key, b"outlast")
        try:
            if place.get(key) != b"outlast" or key not in [entry.key for entry in place.entries()]:
                raise RuntimeError(f"{key} was written, and is not read or listed as it was")
            supported = place.conditional()
        finally:
            place.delete([key])
        return f"{url}: put, get, list, conditional and delete took {(time.monotonic() - began) * 1000:.0f} ms"

    remedy = "correct what it names: the URL, the image (pip install outlast[store]), or the way from pods to the store"
    yield from attempt("store", remedy, tried)
    if not supported:
        remedy = (
            "use a store that supports conditional writes (S3, GCS, Azure, MinIO), so that a zombie cannot overwrite a newer run"
        )
        yield "store conditional", "warn", f"{url}: conditional writes are not supported", remedy


CHECKS: dict[str, Callable[..., Iterator[Check]]] = {"image": image, "torch": torch, "dns": dns, "peer": peer, "store": store}


def main(calls: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Run these checks in order, and print each result immediately."""
    for name, arguments in calls:
        for check in CHECKS[name](**arguments):
            print(MARK + json.dumps(check), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
