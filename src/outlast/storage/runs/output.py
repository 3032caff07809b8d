"""A job's output in a store: the workers' logs and the ledger, readable when the machine that wrote them is gone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from outlast.base.errors import NotFound
from outlast.job import contract, ledger
from outlast.job.backend import LogLine
from outlast.storage import runs, store
from outlast.storage.sync import growing


def logs(url: str, *, worker: int | None = None, tail: int | None = None) -> Iterator[LogLine]:
    """The log lines of all workers, or of one. Raises NotFound when there is no job."""
    place = store.open_(url)
    found: dict[int, str] = {}
    for path in growing.files(place):
        index = path.removeprefix(f"{contract.LOGS}/worker-").removesuffix(".log")
        if index.isdecimal() and path == f"{contract.LOGS}/{contract.worker_log(int(index))}" and worker in (None, int(index)):
            found[int(index)] = path
    if not found and runs.read(place) is None:
        raise NotFound(f"{url} holds no job; give <output>/<name of the job>")
    for number, key in sorted(found.items()):
        with ThreadPoolExecutor(growing.AHEAD) as pool:
            lines = ledger.lines(growing.pieces(place, key, pool)) if tail is None else growing.tail(place, key, tail)
            yield from (LogLine(number, line.decode(errors="replace")) for line in lines)


def events(place: store.Store) -> ledger.Events:
    """The ledger of the run."""
    found = (path for path in growing.files(place) if path.startswith(f"{contract.LEDGER}/"))
    pool = ThreadPoolExecutor(growing.AHEAD)
    return ledger.Events(partial(growing.pieces, place, path, pool) for path in found)


def metrics(place: store.Store) -> Iterator[bytes]:
    """The lines of the run's metrics; none where it has logged none."""
    if contract.METRICS in growing.files(place):
        with ThreadPoolExecutor(growing.AHEAD) as pool:
            yield from ledger.lines(growing.pieces(place, contract.METRICS, pool))
