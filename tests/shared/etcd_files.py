"""Manifests of an etcd in a cluster, and certificates that a user would create for them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import yaml

FILE = Path(__file__).parents[2] / "examples" / "kubernetes" / "etcd-server.yaml"


DOCUMENTS: list[dict[str, Any]] = list(yaml.safe_load_all(FILE.read_text()))


def certificates(directory: Path, namespace: str = "default") -> None:
    """Create the certificates that the manifest's comment describes: ca.crt, server.crt, client.crt and their keys."""
    lines = re.findall(r"^#   (names=.*|for n in .*|openssl .*|for who in .*openssl .*)$", FILE.read_text(), flags=re.M)
    script = "\n".join(["set -e", *lines]).replace(".default.svc", f".{namespace}.svc")
    subprocess.run(["bash", "-c", script], cwd=directory, check=True, capture_output=True)
