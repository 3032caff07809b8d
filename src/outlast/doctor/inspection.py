"""What a pod can see and reach: run inside one by `outlast doctor` alone.

    python -m outlast.doctor.inspection --image --dns NAME ...

Each check is a line of JSON on standard output, after what `--mark` says: name, outcome (pass, warn, fail), said, remedy.
`doctor` sends the text of this file along, so that an image may be asked that has an older Outlast, or none: nothing is imported
at the top but the standard library, and everything else where it is tried.
"""

from __future__ import annotations

import argparse
import contextlib
import glob
import importlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

LEAST_PYTHON = (3, 11)
SEND_S = 2.0
"""How long bandwidth is measured."""
REDUCED = 4 * 2**20
"""Numbers in the tensor of the all-reduce: 16 MiB."""
ROUNDS = 5


mark = ""
"""What the lines of checks begin with."""


def say(name: str, outcome: str, said: str, remedy: str = "") -> None:
    """Print one check."""
    print(mark + json.dumps({"name": name, "outcome": outcome, "said": said, "remedy": remedy}), flush=True)


@contextlib.contextmanager
def telling(name: str, remedy: str) -> Iterator[None]:
    """A check that fails with what it raises."""
    try:
        yield
    except Exception as error:
        say(name, "fail", f"{type(error).__name__}: {error}" if str(error) else type(error).__name__, remedy)


# The image


def image(asking: str, accelerators: Sequence[str] = ()) -> None:
    """Python, Outlast, which is to be of the version that is `asking`, torch and the command.

    Each of `accelerators` is torch's device type and the pattern of its files in /dev: `cuda:nvidia[0-9]*`.
    """
    have = sys.version_info[:2] >= LEAST_PYTHON
    least = ".".join(map(str, LEAST_PYTHON))
    say("python", "pass" if have else "fail", platform.python_version(), "" if have else f"use Python {least} or newer")
    _version("outlast", "outlast", "install Outlast in the image: pip install outlast[train,store]", needed=True, asking=asking)
    _version("torch", "torch", "install torch in the image: pip install outlast[train]", needed=True)
    _version("obstore", "obstore", "for outputs in a store: pip install outlast[store]", needed=False)
    _version("numpy", "numpy", "pip install outlast[train]", needed=True)
    _bytecode()
    _command()
    _accelerators(accelerators)
    if killed_together():
        say("out of memory", "warn", *TOGETHER)


TOGETHER = (
    "when this container's memory runs out, all its processes are killed: a worker's agent and its snapshots with the training",
    "leave memory to spare, or set singleProcessOOMKill: true in the kubelets' configuration (Kubernetes 1.32 and later)",
)


def killed_together(group: str = "/sys/fs/cgroup/memory.oom.group") -> bool:
    """Whether the kernel kills all processes of our cgroup at once, as kubelets want from Kubernetes 1.28 on, with cgroup v2."""
    with contextlib.suppress(OSError), open(group) as file:
        return file.read().strip() == "1"
    return False


def _bytecode() -> None:
    """After the imports above: what has no bytecode now cannot get any."""
    try:
        from outlast.launch import bytecode
    except ImportError:  # `outlast` has reported that
        return
    if lacking := bytecode.missing("torch", "outlast"):
        said = f"no compiled bytecode of {', '.join(lacking)}: every start of a worker compiles it anew, in 15 s and more"
        say("bytecode", "warn", said, bytecode.remedy(lacking))
    else:
        say("bytecode", "pass", "torch and outlast are compiled")


def _version(name: str, package: str, remedy: str, *, needed: bool, asking: str = "") -> None:
    try:
        importlib.import_module(package)
        have = importlib.metadata.version(package)
    except Exception as error:  # a library of the system that is missing raises anything
        say(name, "fail" if needed else "warn", f"{package} cannot be imported: {error}", remedy)
        return
    if asking and have != asking:
        said = f"{package} {have}, and who asks has {asking}: what one writes the other may not read"
        say(name, "warn", said, "use an image and a command line of the same version")
    else:
        say(name, "pass", f"{package} {have}")


def _command() -> None:
    found = shutil.which("outlast")
    remedy = "put the directory of `outlast` on the image's PATH: pods run `outlast agent`"
    if found is None:
        say("command", "fail", f"there is no outlast on PATH ({os.environ.get('PATH', '')})", remedy)
        return
    done = subprocess.run([found, "version"], capture_output=True, text=True, check=False, timeout=60)
    text = (done.stdout or done.stderr).strip().splitlines()
    outcome = "fail" if done.returncode else "pass"
    say("command", outcome, text[-1] if text else f"exit code {done.returncode}", remedy if done.returncode else "")


def _accelerators(kinds: Sequence[str]) -> None:
    try:
        import torch
    except Exception:  # `torch` has said so already
        return
    for device, files in (each.split(":") for each in kinds):
        module = getattr(torch, device, None)
        if module and module.is_available():
            version = f"{device.upper()} {getattr(torch.version, device, None) or 'of unknown version'}"
            said = f"{module.device_count()} × {module.get_device_name(0)}, {version}"
            if device != "cuda" or runs_on(module.get_device_capability(0), module.get_arch_list()):
                say("gpu", "pass", said)
                continue
            said += ", whose torch has no kernels for compute capability {}.{}".format(*module.get_device_capability(0))
            say(
                "gpu",
                "fail",
                said,
                "build it for an older CUDA: docker build --file images/Dockerfile --target cuda --build-arg TORCH_INDEX=URL .",
            )
        elif glob.glob(f"/dev/{files}"):
            remedy = f"use an image whose torch is built for {device.upper()}, no newer than the driver"
            say("gpu", "fail", "there is a GPU that torch cannot use", remedy)


def runs_on(capability: tuple[int, int], built: Sequence[str]) -> bool:
    """Whether a build of torch (`torch.cuda.get_arch_list()`) has kernels for a GPU of this compute capability.

    `sm_80` runs on 8.0 and higher of its generation, `compute_90`, which the driver compiles, on 9.0 and all that is newer.
    """
    found = re.findall(r"\b(sm|compute)_(\d+)(\d)[af]?\b", " ".join(built))
    pairs = [(kind, (int(major), int(minor))) for kind, major, minor in found]
    return not pairs or any(at <= capability and (kind == "compute" or at[0] == capability[0]) for kind, at in pairs)


# Names


def dns(names: Sequence[str]) -> None:
    """Names that must be known inside a cluster."""
    remedy = "see whether the cluster's DNS runs (kubectl get pods -n kube-system -l k8s-app=kube-dns) and pods may reach port 53"
    with telling("dns", remedy):
        found = []
        for name in names:
            began = time.monotonic()
            address = socket.getaddrinfo(name, None)[0][4][0]
            found.append(f"{name} is {address} ({(time.monotonic() - began) * 1000:.0f} ms)")
        say("dns", "pass", "; ".join(found))


# The other pod


def peer(rank: int, address: str, port: int, backend: str, timeout_s: float, device: str = "cpu") -> None:
    """Bandwidth between two pods, and an all-reduce of them, of tensors on `device`. Rank 0 listens on `address`."""
    remedy = f"let pods reach each other on all ports (network policies, security groups, the network plugin); {port} was tried"
    with telling("network", remedy):
        if rank == 0:
            _take(port, timeout_s)
        else:
            say("network", "pass", _send(address, port, timeout_s))
    with telling("all-reduce", f"see the network above; {backend} needs all ports between pods, and the same interface on both"):
        sentence = _all_reduce(rank, address, port + 1, backend, timeout_s, device)
        if rank == 0:
            say("all-reduce", "pass", sentence)


def _take(port: int, timeout_s: float) -> None:
    """Count what comes over one connection, and say how much it was."""
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", port), family=family, dualstack_ipv6=both) as server:
        server.settimeout(timeout_s)
        connection, _ = server.accept()
        with connection:
            connection.settimeout(timeout_s)
            total = 0
            while part := connection.recv(2**20):
                total += len(part)
            connection.sendall(str(total).encode())


def _send(address: str, port: int, timeout_s: float) -> str:
    """Send as much as goes, and tell how much that was."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            connection = socket.create_connection((address, port), timeout=5)
            break
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)  # it does not listen yet
    with connection:
        connection.settimeout(timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        began = time.monotonic()
        connection.sendall(b"x")
        data = bytes(2**20)
        while time.monotonic() - began < SEND_S:
            connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        total = int(connection.recv(64))
        seconds = time.monotonic() - began
    return f"TCP from {socket.gethostname()} to {address}: {total * 8 / seconds / 1e9:.1f} Gbit/s over one connection"


def _all_reduce(rank: int, address: str, port: int, backend: str, timeout_s: float, device: str) -> str:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    method = f"tcp://{address if ':' not in address else f'[{address}]'}:{port}"
    dist.init_process_group(backend, init_method=method, rank=rank, world_size=2, timeout=timedelta(seconds=timeout_s))
    try:
        tensor = torch.full((REDUCED,), float(rank + 1), device=device)  # (n,)
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
    size = REDUCED * 4
    return f"{backend} of {size / 2**20:.0f} MiB over two pods: {seconds * 1000:.0f} ms, {size / seconds / 1e9:.2f} GB/s"


# The store


def store(url: str) -> None:
    """Put, get, list, conditional put and delete, of a small object below a URL."""
    remedy = "give the pods credentials that may do this: --secret, `secrets` in the job file, or the pod's account"
    try:
        from outlast import store as stores
    except Exception as error:
        say("store", "fail", f"stores cannot be used: {error}", "pip install outlast[store] in the image")
        return
    key = f".outlast-doctor-{uuid.uuid4().hex}"
    try:
        place = stores.open_(url, timeout_s=10)
    except Exception as error:
        say("store", "fail", str(error), remedy)
        return

    def read() -> None:
        if place.get(key) != b"outlast":
            raise RuntimeError(f"{key} is not what was written")

    def listed() -> None:
        if key not in [entry.key for entry in place.entries()]:
            raise RuntimeError(f"{key} was written and is not in the list")

    steps: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("put", lambda: place.put(key, b"outlast")),
        ("get", read),
        ("list", listed),
    )
    done: list[str] = []
    try:
        for name, step in steps:
            with telling(f"store {name}", remedy):
                began = time.monotonic()
                step()
                done.append(f"{name} {(time.monotonic() - began) * 1000:.0f} ms")
                continue
            return
        _conditional(place, url)
    finally:
        if done:
            with telling("store delete", remedy):
                place.delete([key])
                done.append("delete")
    if len(done) == len(steps) + 1:
        say("store", "pass", f"{url}: {', '.join(done)}")


def _conditional(place: Any, url: str) -> None:
    """Whether two who create the same object are told apart: without it a zombie is only noticed late."""
    with telling("store conditional", "give the credentials the right to write and delete there"):
        knows = place.conditional()
        remedy = (
            "use a store that knows conditional writes (S3, GCS, Azure, MinIO), so that a zombie cannot overwrite a newer run"
        )
        said = "writes under a condition are " + ("told apart" if knows else "not known to it")
        say("store conditional", "pass" if knows else "warn", f"{url}: {said}", "" if knows else remedy)


def main(argv: Sequence[str] | None = None) -> None:
    """Make the checks that are asked for, in this order."""
    parser = argparse.ArgumentParser(prog="inspection")
    parser.add_argument("--mark", default="")
    parser.add_argument("--image", action="store_true")
    parser.add_argument("--outlast", default="")
    parser.add_argument("--dns", nargs="*", default=[])
    parser.add_argument("--store", default="")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--address", default="")
    parser.add_argument("--port", type=int, default=29400)
    parser.add_argument("--backend", default="gloo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--accelerators", nargs="*", default=[])
    parser.add_argument("--timeout", type=float, default=120.0)
    asked = parser.parse_args(argv)
    global mark
    mark = asked.mark
    if asked.image:
        image(asked.outlast, asked.accelerators)
    if asked.dns:
        dns(asked.dns)
    if asked.store:
        store(asked.store)
    if asked.rank is not None:
        peer(asked.rank, asked.address, asked.port, asked.backend, asked.timeout, asked.device)


if __name__ == "__main__":
    main()
