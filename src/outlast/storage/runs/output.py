"""A run's output: which files are Outlast's own, and which are synchronized unchanged.

Logs, metrics and the ledger are read from a store when the machine that wrote them is gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from outlast.base.errors import NotFound
from outlast.job import contract, ledger
from outlast.job.backend import LogLine
from outlast.storage import runs, store
from outlast.storage.runs import alive
from outlast.storage.sync import growing

OWN = ".push"
"""The upload process's directory in the output: lock, index, journals of uploads."""
_PROTOCOL = {OWN, contract.TRACKING, contract.CHECKPOINTS, runs.PREVIOUS, runs.RUN, alive.ALIVE}
"""Entries that have a protocol of their own or are in the store already."""


def skipped(path: str) -> bool:
    """Whether a path below the output is excluded from the sync: Outlast's own files, unfinished files, and growing files
    (`sync.growing`)."""
    first, _, rest = path.partition("/")
    name = rest.rpartition("/")[2] if rest else first
    own = first in _PROTOCOL or growing.grows(path) or growing.is_part(path)
    return own or name.startswith(".") or name.endswith(".tmp")


def logs(url: str, *, worker: int | None = None, tail: int | None = None) -> Iterator[LogLine]:
    """The log lines of all workers, or of one worker. Raises NotFound if there is no job."""
    place = store.open_(url)
    keys: dict[int, str] = {}
    for path in growing.files(place):
        index = path.removeprefix(f"{contract.LOGS}/worker-").removesuffix(".log")
        if index.isdecimal() and path == f"{contract.LOGS}/{contract.worker_log(int(index))}" and worker in (None, int(index)):
            keys[int(index)] = path
    if not keys and runs.read(place) is None:
        raise NotFound(f"{url} holds no job; give <output>/<name of the job>")
    for number, key in sorted(keys.items()):
        with ThreadPoolExecutor(growing.AHEAD) as pool:
            lines = ledger.lines(growing.pieces(place, key, pool)) if tail is None else growing.tail(place, key, tail)
            yield from (LogLine(number, line.decode(errors="replace")) for line in lines)


def events(place: store.Store) -> ledger.Events:
    """The ledger of the run."""
    paths = (path for path in growing.files(place) if path.startswith(f"{contract.LEDGER}/"))
    pool = ThreadPoolExecutor(growing.AHEAD)
    return ledger.Events(partial(growing.pieces, place, path, pool) for path in paths)


def metrics(place: store.Store) -> Iterator[bytes]:
    """The lines of the run's metrics; none if it has not logged any."""
    if contract.METRICS in growing.files(place):
        with ThreadPoolExecutor(growing.AHEAD) as pool:
            yield from ledger.lines(growing.pieces(place, contract.METRICS, pool))
