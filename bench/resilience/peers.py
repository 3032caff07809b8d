"""The environments of the peers: a virtual environment each, which also sees this environment's torch.

pip finds that torch installed and brings no other. What does not install is left out of the comparison, with pip's reason.
"""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata
from pathlib import Path

PEERS = {
    "torchft": ["torchft==0.2.0"],
    "dlrover": ["dlrover[k8s]==0.6.1", "protobuf", "requests"],
    "nvrx": ["nvidia-resiliency-ext==0.4.1"],
    "ray": ["ray[train]==2.60.0"],
}
"""Packages by environment. Of NVRx this is the newest that Python 3.11 and glibc below 2.39 can install."""


def prepare(peers: Path) -> dict[str, str]:
    """Make the environments that are not there, and return the reason of each that could not be made."""
    import torch

    reasons = {}
    for name, packages in PEERS.items():
        place = peers / name
        if (place / "ready").exists():
            continue
        print(f"{name}: {' '.join(packages)}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", place], check=True)
        (there,) = place.glob("lib/python*/site-packages")
        (there / "torch.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
        command = [place / "bin" / "python", "-m", "pip", "install", "--disable-pip-version-check", "-q"]
        done = subprocess.run(
            [*command, f"torch=={metadata.version('torch')}", *packages], capture_output=True, text=True, check=False
        )
        if done.returncode:
            reasons[name] = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        else:
            (place / "ready").touch()
    return reasons
