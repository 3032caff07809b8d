"""What the process tests share: a machine that runs jobs in a temporary directory and leaves nothing behind."""

from __future__ import annotations

import functools
import gc
import json
import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

import worlds
from etcds import own_etcd, shared_etcd  # noqa: F401 (fixtures)
from faults import moto_proxy, rclone_proxy  # noqa: F401 (fixtures)
from machines import Machine
from namespaces import (
    Namespace,
    made,
    undisturbed_pods,  # noqa: F401 (fixture)
)
from outlast import cli
from outlast.job.backend import Backend
from outlast.storage import store
from outlast.storage.store import Store
from servers import Place as Bucket
from servers import moto, moto_server, rclone, rclone_server, s3, small_parts  # noqa: F401 (fixtures)
from small_disks import small_disk  # noqa: F401 (a fixture)
from sparks import _session, spark_engine  # noqa: F401 (fixtures)
from web import web  # noqa: F401 (a fixture)
from worlds import calm, fork_server  # noqa: F401 (fixtures)

# No deadline: an example that is slow, on a busy machine, is not wrong.
hypothesis.settings.register_profile("fixed", deadline=None, derandomize=True, max_examples=25)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
hypothesis.settings.load_profile("fixed")
"""The same examples in every run. `make test-slow` explores: forty times as many, others each time, with blobs of failures."""

os.environ.setdefault("OMP_NUM_THREADS", "1")
"""Read when torch is imported. Its threads wait for each other busily: with more of them than idle cores, small models take
several times as much of all cores. Jobs set their own."""

os.environ.setdefault("OUTLAST_CACHE_SIZE", "2GiB")
"""Without it a disk that is nine tenths full leaves the caches of tests no room."""

sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
"""jsonschema imports it where it is installed, which takes seconds; no schema here has a format that it knows."""


signal.signal(signal.SIGINT, signal.default_int_handler)
"""Also where a shell has started us in the background, with Ctrl-C ignored: what tests start would inherit that."""

LIBRARIES = ("test_accelerate.", "test_hf.", "test_lightning.", "test_llm.", "test_torchtitan.")
LIBRARIES += ("test_gpt.", "test_imagenet.", "test_imports.", "test_perceiver.", "test_roles.", "test_spark.")
"""Modules that import large libraries, with which forks and garbage collections take longer, or that start processes which do."""

JOBS = ("test_push_killed", "test_run_", "test_torchrun", *LIBRARIES)
"""These, and modules whose tests run whole jobs."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Import no module of which `make test` runs nothing in this half."""
    wanted, name = str(config.getoption("markexpr")), collection_path.name
    if not name.startswith("test_") or collection_path.suffix != ".py":
        return None
    if wanted == "gpu":  # there may be nothing but torch
        return b"mark.gpu" not in collection_path.read_bytes() or None
    if "not jobs" in wanted:
        return name.startswith(JOBS) or None
    if wanted.startswith("jobs ") and not name.startswith(JOBS):
        return b"mark.jobs" not in collection_path.read_bytes() or None
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them, so that the others may run in parallel."""
    for item in items:
        if item.path.name.startswith(JOBS):
            item.add_marker("jobs")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadscope`: one job at a time, and beside the jobs, in another process, what imports libraries."""
    if config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Lanes(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "libraries" if nodeid.partition("::")[0].rpartition("/")[2].startswith(LIBRARIES) else "jobs"

    return Lanes(config, log)


def pytest_collection_finish() -> None:
    """Keep the garbage collector from looking again and again at what has been imported: an eighth of the time of quick tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)
    os.register_at_fork(after_in_child=gc.freeze)  # a data loader's worker must not finalize what earlier tests have left


@pytest.fixture(autouse=True)
def _same_environment(request: pytest.FixtureRequest) -> Iterator[None]:
    """A recipe that runs in this process sets variables of a run, which would be those of the tests after it, too. The login of a
    cluster's store is for tests of the cluster."""
    before = {name: value for name, value in os.environ.items() if name.startswith("OUTLAST_")}
    if not request.node.get_closest_marker("cluster"):
        before |= {name: os.environ.pop(name) for name in [*os.environ] if name.startswith("AWS_")}
    yield
    for name in [name for name in os.environ if name.startswith("OUTLAST_")]:
        if name not in before:
            del os.environ[name]
    os.environ.update(before)


@pytest.fixture(scope="module")
def namespace() -> Iterator[Namespace]:
    """A namespace of a real cluster."""
    with made() as found:
        yield found


def empty(request: pytest.FixtureRequest) -> str:
    """Return an empty place of a kind of store: with conditional writes (memory, moto) or without."""
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}"
    if request.param == "file":
        return f"file://{request.getfixturevalue('tmp_path')}/a store%20#ü"
    bucket: Bucket = request.getfixturevalue(request.param)
    return bucket.url


@pytest.fixture(params=["memory", "file", "rclone", "moto"])
def url(request: pytest.FixtureRequest) -> str:
    """An empty place of each kind of store in turn: what all stores promise is tested with these."""
    return empty(request)


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("file", "moto")]


@pytest.fixture(params=["memory", "rclone", *SLOW])
def place(request: pytest.FixtureRequest) -> Store:
    """A job's place in a store, for what is built upon stores: one with and one without conditional writes, others slowly."""
    return store.open_(f"{empty(request)}/runs/job")


@pytest.fixture
def memory() -> Store:
    """A job's place in a store of this process."""
    return store.open_(f"memory://{uuid.uuid4().hex}/runs/job")


@pytest.fixture
def outlast(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs the command line, on a backend of the test's choice: words -> exit code, standard output, standard error."""

    def call(*words: object, backend: Backend | None = None) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main([str(word) for word in words], backend=backend)
        return (int(ended.value.code or 0), *capsys.readouterr())

    return call


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    """A machine for jobs; whatever still runs at the end of the test is killed."""
    machine = Machine(tmp_path)
    yield machine
    machine.kill_everything()


@pytest.fixture
def elsewhere(machine: Machine) -> Machine:
    """Another machine. Its processes end with those of `machine`, in whose directory it is."""
    (machine.directory / "elsewhere").mkdir()
    return Machine(machine.directory / "elsewhere")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[tuple[str, ...], int], dict[str, object]]:
    """The final state of exact.py with these arguments and this number of ranks, which no agent starts; run once a session."""

    @functools.cache
    def final(args: tuple[str, ...], ranks: int) -> dict[str, object]:
        end = worlds.exact(args, tmp_path_factory.mktemp("undisturbed"), ranks)
        return dict(json.loads((end.output / "final.json").read_text()))

    return final
