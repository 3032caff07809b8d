"""Two real S3 servers on this machine. rclone serves a directory and knows no conditional writes; moto keeps everything in memory
and knows them. Fixtures (named in conftest.py):

    def test_x(moto):  open_(moto.url)            a fresh, empty bucket; the environment names server and credentials
    def test_y(s3):    ...                         the same test against each of the two

Each server is started at its first use, listens on a port of its choosing and dies with the tests, also when they are killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import waits
from outlast.storage.store import multipart
from outlast.storage.sync import transfer

KEY, SECRET, REGION = "AKIDEXAMPLE", "secretexample", "us-east-1"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": REGION}
SMALL_PART, PAGE = 1 << 20, 100
"""Minimum size of a part in moto, in bytes, and number of keys per page of its listings."""
STARTED = re.compile(rb"http://127\.0\.0\.1:(\d+)")


@dataclass
class Server:
    name: str
    endpoint: str
    directory: Path | None
    """Directory of rclone's buckets; None for moto. Read-only, because the server does not notice changes."""
    log: Path
    client: Any
    """Client of botocore, for a test's changes outside the code under test."""

    def bucket(self, prefix: str = "bucket") -> str:
        name = f"{prefix}-{uuid.uuid4().hex[:12]}"
        self.client.create_bucket(Bucket=name)
        return name


@dataclass
class Place:
    server: Server
    bucket: str
    env: Mapping[str, str] = field(default_factory=dict)
    """Environment variables for access to the bucket; this process has them."""

    @property
    def url(self) -> str:
        return f"s3://{self.bucket}"

    @property
    def directory(self) -> Path:
        """Directory of the bucket (rclone only), for reading."""
        assert self.server.directory is not None, f"{self.server.name} keeps no files"
        return self.server.directory / self.bucket


def client(endpoint: str) -> Any:
    """Return botocore's client of a server, with path-style addresses and no retries."""
    import botocore.session
    from botocore.config import Config

    config = Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1})
    return botocore.session.Session().create_client(
        "s3", endpoint_url=endpoint, region_name=REGION, aws_access_key_id=KEY, aws_secret_access_key=SECRET, config=config
    )


@contextlib.contextmanager
def serving(name: str, directory: Path, command: Sequence[object], buckets: Path | None = None, **env: str) -> Iterator[Server]:
    """Run a server that chooses its port and prints it, until the end of the block."""
    die: Callable[[], object] = lambda: ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG # noqa: E731
    with (log := directory / "log").open("wb") as out:
        words, how = [*map(str, command)], {"stdout": out, "stderr": subprocess.STDOUT, "preexec_fn": die}
        process = subprocess.Popen(words, env={**os.environ, **env}, **how)
    try:
        port = waits.until(lambda: STARTED.search(log.read_bytes()), why=log.read_text, pause_s=0.02)
        endpoint = f"http://127.0.0.1:{int(port[1])}"
        yield Server(name, endpoint, buckets, log, client(endpoint))
    finally:
        process.kill()
        process.wait()


def enter(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """Create a bucket of a server, and set the environment to it without the machine's configuration.

    The server's output is shown when the test fails.
    """
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
    """Send files in parts smaller than S3's minimum, so that small files give several parts."""
    for module, name in ((multipart, "SMALL"), (multipart, "PART"), (transfer, "SMALL")):
        monkeypatch.setattr(module, name, SMALL_PART)


@pytest.fixture(scope="session")
def rclone_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tmp_path_factory.mktemp("rclone")
    (buckets := directory / "buckets").mkdir()
    program = Path(sys.executable).with_name("rclone")
    command = [program, "serve", "s3", "--addr", "127.0.0.1:0", "--auth-key", f"{KEY},{SECRET}", buckets]
    with serving("rclone", directory, command, buckets) as server:
        yield server


@pytest.fixture(scope="session")
def moto_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Moto in server mode, with smaller parts and pages than S3's."""
    command = [sys.executable, Path(__file__).with_name("moto_in_turn.py"), "-H", "127.0.0.1", "-p", "0"]
    limits = {"S3_UPLOAD_PART_MIN_SIZE": str(SMALL_PART), "MOTO_S3_DEFAULT_MAX_KEYS": str(PAGE)}
    with serving("moto", tmp_path_factory.mktemp("moto"), command, **limits) as server:
        yield server


@pytest.fixture
def rclone(rclone_server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """New bucket of `rclone serve s3`: real files, real multipart uploads, no conditional writes."""
    yield from enter(rclone_server, monkeypatch)


@pytest.fixture
def moto(moto_server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """New bucket of moto, with conditional writes."""
    yield from enter(moto_server, monkeypatch)


@pytest.fixture(params=["rclone", "moto"])
def s3(request: pytest.FixtureRequest) -> Place:
    """New bucket of each of the two servers, one after the other."""
    place: Place = request.getfixturevalue(request.param)
    return place
