"""The copy of a job's code that a run on this machine works in, so that editing the code does not change a run in progress."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from pathlib import Path

from outlast.job import spec
from outlast.job.shipping import tree
from outlast.worker.prepare import code, prepare


@dataclasses.dataclass(frozen=True)
class Copy:
    """Where a run finds its code."""

    directory: Path
    """The directory that it runs in."""
    changed: tuple[str, ...] = ()
    """Files that are new or different since the last submission."""
    notices: tuple[str, ...] = ()
    """Sentences about files that were not copied."""


def copy(job: spec.Job, source: Path, into: Path, state: Path, exclude: Sequence[Path], submitted: float) -> Copy:
    """Copy the code of a job into its working directory; without `code` the job runs in the directory of its file.

    Code in a store is fetched by the first worker. `exclude` lists directories that are not code.
    """
    if not job.spec.code:
        return Copy(source.absolute().parent)
    place, _ = spec.pinned(job.spec.code)
    path = spec.local(place)
    if path and path.is_dir():
        return _copied(job, path, into, (source, *exclude), submitted)
    into.mkdir(exist_ok=True)
    code.submitted_again(state)
    if path:
        prepare.place_code(job, into, state, say=lambda _: None, stop=threading.Event())
    return Copy(into)


def _copied(job: spec.Job, path: Path, into: Path, exclude: Sequence[Path], submitted: float) -> Copy:
    """Copy a directory of code with the files that pods would get."""
    withheld: list[str] = []
    ignored: list[str] = []
    outside: list[str] = []
    but = tree.not_code(job.spec, path, exclude)
    entries = tree.listed(path, but, withheld=withheld.append, ignored=ignored.append, outside=outside.append)
    tree.check_script(job.spec, path, {entry.name for entry in entries})
    changed = code.copy(path, entries, into, submitted)
    notices = []
    if withheld:
        notices.append(f"code: {tree.without_credentials(withheld)}; pods do not get it either")
    if ignored:
        notices.append(f"code: without {tree.some(ignored)}, as .gitignore or .outlastignore says ({tree.bring_back(ignored)})")
    if outside:
        links = f"links that lead out of {path} ({tree.some(outside)}) work on this machine, and pods would not have them"
        notices.append(f"code: {links}; name what they lead to under data, or put copies in their place")
    return Copy(into, tuple(changed), tuple(notices))
