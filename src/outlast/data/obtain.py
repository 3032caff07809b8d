"""Downloads or generates a dataset, verifies and unpacks it, and writes the marker.

    marker, written = get(named_datasets.named("cifar10"), Path("data/cifar10"), How(say=print))

Called by `outlast data get` and by machines' caches. If a call is killed, the next call completes the dataset. Files appear in
the directory only after all of them are verified and unpacked; the marker is written last.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import shutil
import threading
from pathlib import Path

from outlast.base import unpack
from outlast.base.errors import OutlastError, Stopped
from outlast.data import dataset_directory, download
from outlast.data.dataset_directory import Marker, Place, Say
from outlast.data.download import Progress, Remote
from outlast.data.named_datasets import Dataset

MAX_ENTRIES = 20_000_000
"""ImageNet-21k has 14 million files."""
MAX_BYTES, MAX_RATIO = 1 << 30, 100
"""An archive may unpack to the larger of this size and this multiple of its own. Images, text and numbers expand less than a
hundredfold, decompression bombs a thousandfold or more."""


@dataclasses.dataclass(frozen=True)
class How:
    """Options for `get`."""

    say: Say
    progress: Progress = lambda done, total: None
    stop: threading.Event = dataclasses.field(default_factory=threading.Event)
    archive: Path | None = None
    """A downloaded file, or a directory of downloaded files."""


def get(dataset: Dataset, directory: Path, how: How) -> tuple[Marker, bool]:
    """Put a dataset into a directory unless it is already complete there. Returns the marker, and whether this call wrote
    anything. Raises OutlastError and Stopped."""
    if marker := checked(dataset, dataset_directory.marker(directory), str(directory)):
        return marker, False
    given = _given(dataset, how.archive) if how.archive else {}
    with dataset_directory.opened(directory, dataset.name, say=how.say, stop=how.stop) as opened:
        if marker := checked(dataset, dataset_directory.marker(directory), str(directory)):  # another process has finished it
            return marker, False
        try:
            if dataset.module:
                made = importlib.import_module(dataset.module)
                made.write(opened.tree())
                return opened.finish(Marker(dataset.name, made.SOURCE)), True
            return _downloaded(dataset, opened, given, how), True
        except (OutlastError, OSError):
            opened.discard_tree()
            raise


def checked(dataset: Dataset, marker: Marker | None, where: str) -> Marker | None:
    """Return the given marker. Raises OutlastError if the marker belongs to another dataset or version."""
    if marker is None:
        return None
    expected = [remote.sha256 for remote in dataset.remotes]
    if marker.name != dataset.name:
        raise OutlastError(f"{where} holds {marker.name}; choose another place for {dataset.name}")
    if len(expected) == 1 and expected[0] and marker.sha256 and expected[0] != marker.sha256:
        raise OutlastError(
            f"{where} holds another version of {dataset.name}, with the SHA-256 {marker.sha256}; choose another place"
        )
    return marker


def _downloaded(dataset: Dataset, opened: Place, given: dict[Remote, Path], how: How) -> Marker:
    paths: dict[Remote, Path] = {}
    for number, remote in enumerate(dataset.remotes):
        if remote not in given:
            into = opened.staging / f"{number}"
            paths[remote] = download.fetch(remote, into, say=how.say, progress=how.progress, stop=how.stop)
        elif problem := download.mismatch(given[remote], remote, str(given[remote])):
            raise OutlastError(problem)
    tree, paths = opened.tree(), paths | given
    sha256 = remote.sha256 or unpack.checksum(paths[remote]) if len(paths) == 1 else ""
    for remote, path in paths.items():
        try:
            _unpacked(remote, path, tree, how, given=bool(given))
        except Stopped:
            raise
        except OutlastError:
            if not given:
                shutil.rmtree(path.parent)  # the next call must not reuse a file that is damaged at its source
            raise
    compared = all(remote.checked for remote in paths)
    return opened.finish(Marker(dataset.name, dataset.remotes[0].shown, sha256=sha256, checked=compared))


def _unpacked(remote: Remote, path: Path, tree: Path, how: How, *, given: bool) -> None:
    kind = unpack.kind(remote.file)
    if not kind:
        (shutil.copyfile if given else os.rename)(path, tree / remote.file)
        return
    how.say(f"unpacking {remote.file}")
    size = max(MAX_BYTES, MAX_RATIO * path.stat().st_size)
    budget = unpack.Budget(str(path) if given else remote.shown, size=size, entries=MAX_ENTRIES, stop=how.stop)
    if kind == "compressed":
        unpack.decompress(path, tree / Path(remote.file).stem, budget)
    else:
        unpack.extract(path, tree, budget, kind=kind)


def _given(dataset: Dataset, archive: Path) -> dict[Remote, Path]:
    """Return the local paths of the dataset's files, to use instead of downloads. Raises OutlastError if a file is missing."""
    if dataset.module:
        raise OutlastError(f"{dataset.name} needs no download; leave out --from")
    if len(dataset.remotes) == 1 and not archive.is_dir():
        paths = {dataset.remotes[0]: archive}
    else:
        paths = {remote: archive / remote.file for remote in dataset.remotes}
    for remote, path in paths.items():
        if not path.is_file():
            raise OutlastError(f"{path} does not exist; download {remote.shown} where there is internet, and copy it to there")
    return paths
