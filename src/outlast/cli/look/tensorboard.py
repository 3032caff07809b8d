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
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.base.errors import OutlastError
from outlast.cli import completion, find_job, terminal, web_servers
from outlast.cli.find_job import ContextOption, NamespaceOption
from outlast.job import contract

if TYPE_CHECKING:
    from outlast.storage.store import Store
    from outlast.worker.tracking.follower import Forwarder

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
    from a pod. Files that a script itself writes into tensorboard/ are shown too if the output is on this machine. If several
    jobs are named, TensorBoard compares them.

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

Read = Callable[[str, int], bytes]
"""Reads a file of an output that is not on this machine, from an offset on. Returns no bytes if the file is missing."""


def in_store(place: Store, name: str, start: int) -> bytes:
    """Read a file of an output in a store."""
    from outlast.base.errors import Missing
    from outlast.storage.sync import growing_files

    if name == contract.METRICS:
        return growing_files.since(place, name, start)
    try:
        return place.get(name)
    except Missing:
        return b""


def refresh(copy: Path, read: Callable[[int], bytes]) -> None:
    """Make `copy` equal to the complete lines in a growing file, whose bytes from an offset on `read(offset)` returns. The copy's
    last line, which contains the time, is read again to detect a replaced file."""
    old = copy.read_bytes() if copy.exists() else b""
    last = old[old.rfind(b"\n", 0, -1) + 1 :]
    data = read(len(old) - len(last))
    if not data.startswith(last):
        old, last, data = b"", b"", read(0)
    copy.write_bytes(old + data[len(last) : data.rfind(b"\n") + 1])


class Show:
    """One job in TensorBoard. Its output is on this machine, or is copied by a function."""

    def __init__(self, directory: Path, label: str, source: Path | Read) -> None:
        self._logs, self._copy = directory / "logs" / label, directory / "copies" / label
        self._copy.mkdir(parents=True)
        self._logs.mkdir(parents=True)
        self._label, self._source = label, source
        self._forwarder: Forwarder | None = None
        self._history, self._problem = b"", ""

    def refresh(self) -> None:
        """Update the job's event files. Reports each problem once, and when it is over."""
        try:
            self._forward(self._fetch())
        except (OutlastError, OSError) as error:
            problem = str(error)
        else:
            problem = ""
        if problem != self._problem:
            self._problem = problem
            terminal.say(f"{self._label}: {problem or 'its metrics can be read again'}")

    def _fetch(self) -> Path:
        """Return the directory that has `metrics.jsonl` and `parameters.json`."""
        if isinstance(self._source, Path):
            self._link_script_files(self._source / contract.TENSORBOARD)
            return self._source
        refresh(self._copy / contract.METRICS, functools.partial(self._source, contract.METRICS))
        (self._copy / contract.PARAMETERS).write_bytes(self._source(contract.PARAMETERS, 0))
        return self._copy

    def _link_script_files(self, written: Path) -> None:
        """Show the event files that the script itself has written."""
        for path in written.rglob("*tfevents*"):
            inside = path.relative_to(written)
            if inside.parts[0] != "metrics" and not (link := self._logs / "script" / inside).is_symlink():
                link.parent.mkdir(parents=True, exist_ok=True)
                link.symlink_to(path.absolute())

    def _forward(self, output: Path) -> None:
        from outlast.worker.tracking.event_files import EventFile
        from outlast.worker.tracking.follower import Forwarder
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
) -> Iterator[tuple[str, Path | Read]]:
    for name in names or (None,):
        if name and (Path(name) / contract.METRICS).is_file() and not namespace and not context:
            yield Path(name).resolve().name, Path(name)
        elif url := find_job.in_store(name):
            place, record = find_job.stored_run(url)
            yield record.job, functools.partial(in_store, place)
        else:
            yield _of_job(ctx, name, namespace, context)


def _of_job(ctx: typer.Context, name: str | None, namespace: str | None, context: str | None) -> tuple[str, Path | Read]:
    run = find_job.run(ctx, name, namespace, context)
    job = run.name
    if (there := find_job.in_cluster(run.place)) is None:
        return job, Path(run.output)
    if url := there.workloads.store_url(job):
        place, _ = find_job.stored_run(url)
        return job, functools.partial(in_store, place)
    return job, lambda name, start: there.reader(job)(name, start)


def _labelled(sources: Iterator[tuple[str, Path | Read]]) -> list[tuple[str, Path | Read]]:
    labelled: dict[str, Path | Read] = {}
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
