"""Reads logs, metrics and the ledger from a run's output in a store, and decides which files of an output a sync skips.

The command line uses the readers when the machine that wrote the files is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from outlast.base.errors import NotFound
from outlast.job import contract, ledger
from outlast.job.logs import LogLine
from outlast.storage import runs, store
from outlast.storage.runs import heartbeat
from outlast.storage.sync import growing_files

OWN = ".push"
_PROTOCOL = {OWN, contract.TRACKING, contract.CHECKPOINTS, runs.PREVIOUS, runs.RUN, heartbeat.ALIVE}
"""Entries that are uploaded in other ways, or that exist only in the store."""


def skipped(path: str) -> bool:
    """Return whether a sync skips a path in the output: one of Outlast's own files, an unfinished or a growing file."""
    first, _, rest = path.partition("/")
    name = rest.rpartition("/")[2] if rest else first
    own = first in _PROTOCOL or growing_files.grows(path) or growing_files.is_part(path)
    return own or name.startswith(".") or name.endswith(".tmp")


def logs(url: str, *, worker: int | None = None, tail: int | None = None) -> Iterator[LogLine]:
    """Yield the log lines of all workers or of one. Raises NotFound if the URL holds no job."""
    place = store.open_(url)
    keys: dict[int, str] = {}
    for path in growing_files.files(place):
        index = path.removeprefix(f"{contract.LOGS}/worker-").removesuffix(".log")
        if index.isdecimal() and path == f"{contract.LOGS}/{contract.worker_log(int(index))}" and worker in (None, int(index)):
            keys[int(index)] = path
    if not keys and runs.read(place) is None:
        raise NotFound(f"{url} holds no job; give <output>/<name of the job>")
    for number, key in sorted(keys.items()):
        with ThreadPoolExecutor(growing_files.AHEAD) as pool:
            lines = ledger.lines(growing_files.pieces(place, key, pool)) if tail is None else growing_files.tail(place, key, tail)
            yield from (LogLine(number, line.decode(errors="replace")) for line in lines)


def events(place: store.Store) -> ledger.Events:
    """Return the events in the run's ledger."""
    paths = (path for path in growing_files.files(place) if path.startswith(f"{contract.LEDGER}/"))
    pool = ThreadPoolExecutor(growing_files.AHEAD)
    return ledger.Events(partial(growing_files.pieces, place, path, pool) for path in paths)


def metrics(place: store.Store) -> Iterator[bytes]:
    """Yield the lines of the run's metrics."""
    if contract.METRICS in growing_files.files(place):
        with ThreadPoolExecutor(growing_files.AHEAD) as pool:
            yield from ledger.lines(growing_files.pieces(place, contract.METRICS, pool))
