"""Downloads or generates a dataset, verifies and unpacks it, and writes the marker.

    marker, written = get(named_datasets.named("cifar10"), Path("data/cifar10"), How(say=print))

Called by `outlast data get` and by machines' caches. If a call is killed, the next call completes the dataset. Files appear in
the directory only after all of them are verified and unpacked; the marker is written last.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import threading
from pathlib import Path

from outlast.base import unpack
from outlast.base.errors import OutlastError, Stopped
from outlast.data import dataset_directory, download
from outlast.data.dataset_directory import Marker, Place, Say
from outlast.data.download import Download, Options, Progress, Remote
from outlast.data.named_datasets import Dataset

LIMITS = unpack.Limits(
    "data",
    entries=20_000_000,
    size=1 << 30,
    ratio=100,
    instead="unpack it by hand if it is what you want, and use the directory",
    again="the URL is not that of an archive, or the file is damaged where it comes from",
)
"""Limits against decompression bombs, which expand a thousandfold or more. Images, text and numbers expand less than a
hundredfold, and ImageNet-21k has 14 million files."""


@dataclasses.dataclass(frozen=True)
class How:
    """Options for `get`."""

    say: Say
    progress: Progress = lambda done, total: None
    stop: threading.Event = dataclasses.field(default_factory=threading.Event)
    options: Options = dataclasses.field(default_factory=Options)
    archive: Path | None = None
    """A downloaded file, or a directory of downloaded files."""


def get(dataset: Dataset, directory: Path, how: How) -> tuple[Marker, bool]:
    """Put a dataset into a directory unless it is already complete there. Returns the marker, and whether this call wrote
    anything. Raises OutlastError and Stopped."""
    if marker := checked(dataset, dataset_directory.marker(directory), str(directory)):
        return marker, False
    given = _given(dataset, how.archive) if how.archive else {}
    with dataset_directory.opened(directory, dataset.name, say=how.say, stop=how.stop) as opened:
        if marker := checked(
            dataset, dataset_directory.marker(directory), str(directory)
        ):  # another process has finished the dataset
            return marker, False
        try:
            if dataset.made:
                dataset.made.write(opened.tree())
                return opened.finish(Marker(dataset.name, dataset.made.source())), True
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
        if remote in given:
            if problem := download.mismatch(given[remote], remote, str(given[remote]), how.stop):
                raise OutlastError(problem)
            paths[remote] = given[remote]
        else:
            into = opened.staging / f"{number}"
            paths[remote] = Download(remote, into, say=how.say, progress=how.progress, stop=how.stop, options=how.options).fetch()
    tree = opened.tree()
    for remote, path in paths.items():
        try:
            if unpack.kind(remote.file):
                how.say(f"unpacking {remote.file}")
            _unpacked(remote, path, tree, how.stop, given=bool(given))
        except Stopped:
            raise
        except OutlastError:
            if not given:
                shutil.rmtree(path.parent)  # the next call must not reuse a file that is damaged at its source
            raise
    return opened.finish(
        Marker(
            dataset.name,
            dataset.remotes[0].shown,
            sha256=remote.sha256 or unpack.checksum(path) if len(paths) == 1 else "",
            checked=all(remote.checked for remote in paths),
        )
    )


def _unpacked(remote: Remote, path: Path, tree: Path, stop: threading.Event, *, given: bool) -> None:
    kind, name = unpack.kind(remote.file), str(path) if given else remote.shown
    if kind in ("tar", "zip"):
        unpack.extract(path, tree, name=name, limits=LIMITS, kind=kind, stop=stop)
    elif kind:
        unpack.decompress(path, tree / Path(remote.file).stem, name=name, limits=LIMITS, stop=stop)
    elif given:
        shutil.copyfile(path, tree / remote.file)
    else:
        try:
            os.link(path, tree / remote.file)  # the download stays until the marker is written
        except OSError:
            path.rename(tree / remote.file)


def _given(dataset: Dataset, archive: Path) -> dict[Remote, Path]:
    """Return the local paths of the dataset's files, to use instead of downloads. Raises OutlastError if a file is missing."""
    if dataset.made:
        raise OutlastError(f"{dataset.name} needs no download; leave out --from")
    if len(dataset.remotes) == 1 and not archive.is_dir():
        paths = {dataset.remotes[0]: archive}
    else:
        paths = {remote: archive / remote.file for remote in dataset.remotes}
    for remote, path in paths.items():
        if not path.is_file():
            raise OutlastError(f"{path} does not exist; download {remote.shown} where there is internet, and copy it to there")
    return paths
