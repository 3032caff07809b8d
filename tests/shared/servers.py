"""Two real S3 servers on this machine. rclone serves a directory and knows no conditional writes; moto keeps everything in memory
and knows them. Fixtures (named in conftest.py):

    def test_x(moto):  open_(moto.url)            a fresh, empty bucket; the environment names server and credentials
    def test_y(s3):    ...                         the same test against each of the two

Each server is started at its first use, listens on a port of its choosing and dies with the tests, also when they are killed.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from outlast.storage.store import multipart
from outlast.storage.sync import transfer

KEY, SECRET, REGION = "AKIDEXAMPLE", "secretexample", "us-east-1"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": REGION}
SMALL_PART, PAGE = 1 << 20, 100
"""What moto takes for a part, in bytes, and how many keys it lists at a time."""
STARTED = re.compile(rb"http://127\.0\.0\.1:(\d+)")


@dataclass
class Server:
    """A running server of S3."""

    name: str
    endpoint: str
    directory: Path | None
    """Where rclone keeps its buckets, as directories; None for moto. For looking: changes go unnoticed."""
    process: subprocess.Popen[bytes]
    log: Path
    client: Any
    """botocore's, for what a test wants to do behind our back."""

    def bucket(self, prefix: str = "bucket") -> str:
        """The name of a new, empty bucket."""
        name = f"{prefix}-{uuid.uuid4().hex[:12]}"
        self.client.create_bucket(Bucket=name)
        return name


@dataclass
class Place:
    """A fresh bucket."""

    server: Server
    bucket: str
    env: Mapping[str, str] = field(default_factory=dict)
    """What a process needs to get there; this process has it in its environment."""

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}"

    @property
    def directory(self) -> Path:
        """The bucket as a directory (rclone only), to be looked at."""
        assert self.server.directory is not None, f"{self.server.name} keeps no files"
        return self.server.directory / self.bucket


def client(endpoint: str) -> Any:
    """botocore's client of a server; path-style, no retries."""
    import botocore.session
    from botocore.config import Config

    config = Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1})
    return botocore.session.Session().create_client(
        "s3", endpoint_url=endpoint, region_name=REGION, aws_access_key_id=KEY, aws_secret_access_key=SECRET, config=config
    )


def die_with_parent() -> None:
    """In a child, before exec: be killed when the thread that started us ends, however it ends (Linux)."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def started(log: Path, command: list[str], **env: str) -> tuple[subprocess.Popen[bytes], str]:
    """Start a server that chooses its port and says so in what it writes, to `log`; its process and endpoint."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            env={**os.environ, **env},
            stdout=out,
            stderr=subprocess.STDOUT,
            preexec_fn=die_with_parent if sys.platform == "linux" else None,
        )
    deadline = time.monotonic() + 60
    while not (port := STARTED.search(log.read_bytes())):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"{command[0]} did not start:\n{log.read_text()}")
        time.sleep(0.02)
    return process, f"http://127.0.0.1:{int(port[1])}"


def serve_rclone(directory: Path) -> Server:
    """`rclone serve s3` over `directory`/buckets."""
    buckets = directory / "buckets"
    buckets.mkdir()
    program = Path(sys.executable).with_name("rclone")
    command = [str(program), "serve", "s3", "--addr", "127.0.0.1:0", "--auth-key", f"{KEY},{SECRET}", str(buckets)]
    process, endpoint = started(log := directory / "rclone.log", command)
    return Server("rclone", endpoint, buckets, process, log, client(endpoint))


def serve_moto(directory: Path) -> Server:
    """moto in server mode, with parts that may be smaller than S3's and pages of fewer keys."""
    command = [sys.executable, str(Path(__file__).with_name("moto_in_turn.py")), "-H", "127.0.0.1", "-p", "0"]
    limits = {"S3_UPLOAD_PART_MIN_SIZE": str(SMALL_PART), "MOTO_S3_DEFAULT_MAX_KEYS": str(PAGE)}
    process, endpoint = started(log := directory / "moto.log", command, **limits)
    return Server("moto", endpoint, None, process, log, client(endpoint))


def enter(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A fresh bucket of a server, with the environment set; what the machine's own configuration says is hidden. What the server
    says meanwhile is shown when the test fails."""
    said = server.log.stat().st_size
    env = {**CREDENTIALS, "AWS_ENDPOINT_URL": server.endpoint}
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION", "AWS_SKIP_SIGNATURE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    yield Place(server, server.bucket(server.name), env)
    with server.log.open("rb") as log:
        log.seek(said)
        print(b"".join(log.readlines()[-50:]).decode(errors="replace"))


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files go in parts that are smaller than S3's, with a few of the pieces that one is read in: tests send many."""
    for module, name in ((multipart, "SMALL"), (multipart, "PART"), (transfer, "SMALL")):
        monkeypatch.setattr(module, name, SMALL_PART)


@pytest.fixture(scope="session")
def rclone_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = serve_rclone(tmp_path_factory.mktemp("rclone"))
    yield server
    server.process.kill()
    server.process.wait()


@pytest.fixture(scope="session")
def moto_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = serve_moto(tmp_path_factory.mktemp("moto"))
    yield server
    server.process.kill()
    server.process.wait()


@pytest.fixture
def rclone(rclone_server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A fresh bucket of `rclone serve s3`: real files, real multipart uploads, no conditional writes."""
    yield from enter(rclone_server, monkeypatch)


@pytest.fixture
def moto(moto_server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A fresh bucket of moto: conditional writes."""
    yield from enter(moto_server, monkeypatch)


@pytest.fixture(params=["rclone", "moto"])
def s3(request: pytest.FixtureRequest) -> Place:
    """A fresh bucket of each of the two servers in turn."""
    place: Place = request.getfixturevalue(request.param)
    return place
