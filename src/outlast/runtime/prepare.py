"""What a worker needs before it can train: code, data, environment. Here from this machine's own disk, by links: nothing is
copied twice.

Each function does one preparing phase of `runtime.lifecycle` and raises OutlastError when it cannot.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.errors import OutlastError

if TYPE_CHECKING:
    from outlast import spec


def code(job: spec.Job, directory: Path) -> None:
    """Check that what is to be run is there."""
    if not directory.is_dir():
        raise OutlastError(f"code: {directory} is not a directory; it held the job's code when it was submitted")
    script = job.spec.script
    if script and not (directory / script).is_file():
        raise OutlastError(f"script: {script} is not in {directory}; correct the name or the code directory")
    sys.path.insert(0, str(directory))
    if job.spec.module:
        package = job.spec.module.partition(".")[0]  # looking further down would run its code in here
        if importlib.util.find_spec(package) is None:
            raise OutlastError(f"module: Python finds no {package!r} from {directory}; correct the name or install its package")


def data(job: spec.Job, root: Path) -> Path | None:
    """Make the job's data visible; the directory that becomes OUTLAST_DATA, None without data.

    One entry is used where it lies. Several are linked below `root` by the last part of their `to`.
    """
    sources = [(_local(entry.from_), Path(entry.to).name) for entry in job.spec.data]
    for source, _ in sources:
        if not source.exists():
            raise OutlastError(f"data.from: {source} does not exist; create it or correct the path")
    if len(sources) == 1:
        return sources[0][0]
    for source, name in sources:
        root.mkdir(exist_ok=True)
        link = root / name
        link.unlink(missing_ok=True)
        link.symlink_to(source)
    return root if sources else None


def _local(place: str) -> Path:
    from outlast import spec

    path = spec.local(place)
    if path is None:
        raise OutlastError(f"data.from: {place} is not on this machine; this version reads local paths and file:// URLs")
    return path


def environment() -> None:
    """Check that training can run at all. A job's own requirements are the business of whoever made this Python."""
    if importlib.util.find_spec("torch") is None:
        raise OutlastError(f"PyTorch is not installed for {sys.executable}; pip install 'outlast[train]'")


def command(job: spec.Job, environ: Mapping[str, str]) -> list[str]:
    """The training command for `runtime.rank`, with `$(NAME)` in arguments replaced from the environment, as Kubernetes does
    it."""

    def value(match: re.Match[str]) -> str:
        return environ.get(match[1], match[0])

    args = [re.sub(r"\$\((\w+)\)", value, arg) for arg in job.spec.args]
    if job.spec.module:
        return ["-m", job.spec.module, *args]
    return [os.path.join(environ["OUTLAST_CODE"], str(job.spec.script)), *args]
