"""`outlast tensorboard`: TensorBoard for any job's metrics. The command reads a job's `metrics.jsonl` from the output on this
machine, in a store or in a pod, makes event files from it in a temporary directory, and updates them while the job runs."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.base.errors import OutlastError
from outlast.cli import completion, find_job, terminal, web_servers
from outlast.cli.find_job import ContextOption, NamespaceOption
from outlast.job import contract

if TYPE_CHECKING:
    from outlast.kubernetes.jobs.backend import KubernetesBackend
    from outlast.storage.store import Store
    from outlast.worker.tracking.forwarding import Forwarder

PORT = 6006
"""TensorBoard's own default port. If it is taken, a free port is used."""
REFRESH_S = 5.0


def tensorboard(
    ctx: typer.Context,
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[JOB]...",
            help="Names of jobs, URLs of outputs in a store, or directories of outputs.",
            autocompletion=completion.jobs,
        ),
    ] = None,
    port: Annotated[
        int | None, typer.Option(metavar="N", min=0, max=65535, help="Port. Default: 6006, or a free one if that is taken.")
    ] = None,
    bind: Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen at; 0.0.0.0 for all.")] = "127.0.0.1",
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Run TensorBoard on the metrics of jobs until Ctrl-C.

    TensorBoard follows the jobs while they run. This works for every job that calls run.log, even without `tracking` in its job
    file: the command makes event files from the job's metrics.jsonl, which it reads from the output directory, from a store, or
    from a pod. Files that a script itself writes into tensorboard/ are shown too, unless they are only in a pod. If several jobs
    are named, TensorBoard compares them.

    \b
    Examples:
      outlast tensorboard
      outlast tensorboard cifar10 digits --port 7000
      outlast tensorboard s3://bucket/runs/cifar10
      outlast tensorboard cifar10 -n team-a
      outlast tensorboard out --bind 0.0.0.0
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise OutlastError("TensorBoard is not installed; pip install 'outlast[tracking]'")
    with tempfile.TemporaryDirectory(prefix="outlast-tensorboard-") as made:
        directory = Path(made)
        shows = [Show(directory, label, source) for label, source in _labelled(_sources(ctx, names, namespace, context))]
        for show in shows:
            show.refresh()
        with web_servers.until_stopped(), _server(directory / "logs", bind, web_servers.port(port, bind, PORT)) as process:
            _follow(shows, process)


def _follow(shows: Sequence[Show], process: subprocess.Popen[bytes]) -> None:
    while process.poll() is None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(REFRESH_S)
        for show in shows:
            show.refresh()
    raise OutlastError(f"TensorBoard has ended with exit code {process.returncode}")


# The jobs


class Source:
    """Reads a job's metrics and event files from its output directory on this machine, even while the job runs."""

    def __init__(self, output: Path) -> None:
        self.output = output

    def fetch(self, into: Path) -> Path:
        """Return the directory that has `metrics.jsonl` and `parameters.json`. Remote sources copy these files to `into`."""
        return self.output

    def add_script_files(self, into: Path) -> None:
        """Add the event files written by the script itself to the directory `into`."""
        found = self.output / contract.TENSORBOARD
        for path in found.rglob("*tfevents*"):
            inside = path.relative_to(found)
            if inside.parts[0] != "metrics" and not (link := into / inside).is_symlink():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(path.absolute())


class InStore(Source):
    """Reads a job's metrics and event files from its output in a store."""

    def __init__(self, place: Store) -> None:
        self._place = place
        self._versions: dict[str, str] = {}

    def fetch(self, into: Path) -> Path:
        from outlast.base.errors import Missing
        from outlast.storage.sync import growing_files
        from outlast.worker.tracking import follower

        follower.refresh(into / contract.METRICS, lambda start: growing_files.since(self._place, contract.METRICS, start))
        with contextlib.suppress(Missing):
            (into / contract.PARAMETERS).write_bytes(self._place.get(contract.PARAMETERS))
        return into

    def add_script_files(self, into: Path) -> None:
        for entry in self._place.entries(contract.TENSORBOARD):
            inside = entry.key.removeprefix(f"{contract.TENSORBOARD}/")
            if inside.startswith("metrics/") or "tfevents" not in inside or ".." in inside.split("/"):
                continue
            if self._versions.get(inside) != entry.etag:
                (into / inside).parent.mkdir(parents=True, exist_ok=True)
                (into / inside).write_bytes(self._place.get(entry.key))
                self._versions[inside] = entry.etag


class InPod(Source):
    """Reads a job's metrics, but not its event files, from the output in the job's pods."""

    def __init__(self, place: KubernetesBackend, name: str) -> None:
        self._place, self._name = place, name

    def fetch(self, into: Path) -> Path:
        from outlast.worker.tracking import follower

        read = self._place.reader(self._name)
        follower.refresh(into / contract.METRICS, lambda start: read(contract.METRICS, start))
        if found := read(contract.PARAMETERS, 0):
            (into / contract.PARAMETERS).write_bytes(found)
        return into

    def add_script_files(self, into: Path) -> None:
        """Do nothing, because the files may be too large for the API server."""


class Show:
    """One job in TensorBoard."""

    def __init__(self, directory: Path, label: str, source: Source) -> None:
        self._logs, self._copy = directory / "logs" / label, directory / "copies" / label
        self._copy.mkdir(parents=True)
        self._logs.mkdir(parents=True)
        self._label, self._source = label, source
        self._forwarder: Forwarder | None = None
        self._history, self._problem = b"", ""

    def refresh(self) -> None:
        """Update the job's event files. Reports each problem once."""
        try:
            self._forward(self._source.fetch(self._copy))
            self._source.add_script_files(self._logs / "script")
        except (OutlastError, OSError) as error:
            problem = str(error)
        else:
            problem = ""
        if problem != self._problem:
            self._problem = problem
            terminal.say(f"{self._label}: {problem or 'its metrics can be read again'}")

    def _forward(self, output: Path) -> None:
        from outlast.worker.tracking.event_files import EventFile
        from outlast.worker.tracking.forwarding import Forwarder
        from outlast.worker.tracking.tracker_interface import Run

        if (first := _first_line(output / contract.METRICS)) != self._history or self._forwarder is None:
            self._history = first  # a different first line: the job has started again
            sink = EventFile(self._logs, f"{zlib.crc32(first):08x}", self._logs / "position.json")
            self._forwarder = Forwarder(sink, Run.of(output, "", {}), terminal.say)
        self._forwarder.forward()


def _first_line(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.readline()
    except OSError:
        return b""


def _sources(
    ctx: typer.Context, names: Sequence[str] | None, namespace: str | None, context: str | None
) -> Iterator[tuple[str, Source]]:
    for name in names or (None,):
        if name and (Path(name) / contract.METRICS).is_file() and not namespace and not context:
            yield Path(name).resolve().name, Source(Path(name))
        elif url := find_job.in_store(name):
            place, record = find_job.stored_run(url)
            yield record.job, InStore(place)
        else:
            yield _of_job(ctx, name, namespace, context)


def _of_job(ctx: typer.Context, name: str | None, namespace: str | None, context: str | None) -> tuple[str, Source]:
    run = find_job.run(ctx, name, namespace, context)
    job = run.name
    if (there := find_job.in_cluster(run.place)) is None:
        return job, Source(Path(run.output))
    if url := there.workloads.store_url(job):
        place, _ = find_job.stored_run(url)
        return job, InStore(place)
    return job, InPod(there, job)


def _labelled(sources: Iterator[tuple[str, Source]]) -> list[tuple[str, Source]]:
    labelled: dict[str, Source] = {}
    for label, source in sources:
        number = 1
        while (unique := label if number == 1 else f"{label}-{number}") in labelled:
            number += 1
        labelled[unique] = source
    return list(labelled.items())


# The server


@contextlib.contextmanager
def _server(logs: Path, bind: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Start TensorBoard on the directory `logs`, and yield its process once it accepts connections."""
    command = [sys.executable, "-P", "-m", "tensorboard.main", "--logdir", str(logs), "--host", bind, "--port", str(port)]
    ready = functools.partial(web_servers.answers, bind, port)
    with web_servers.child("TensorBoard", [*command, "--reload_interval", "5"], logs.parent / "log", ready) as process:
        print(f"TensorBoard: http://{web_servers.shown(bind)}:{port}/ (Ctrl-C ends it)", flush=True)
        yield process
