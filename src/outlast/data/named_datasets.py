"""The datasets of `outlast data get`, by name or by URL.

Sizes and checksums are those published by a dataset's authors or by libraries that load it. Without a checksum, `get` checks the
length of a download and the integrity of an archive, and records the SHA-256 in the marker.
"""

from __future__ import annotations

import dataclasses
import re

from outlast.base import unpack
from outlast.base.errors import OutlastError
from outlast.data.download import Remote, check_url


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A dataset to download or to generate."""

    name: str
    """Name in the registry, or the URL."""
    about: str = ""
    module: str = ""
    """The module that generates the dataset instead of a download: `write(directory)` and `SOURCE`."""
    remotes: tuple[Remote, ...] = ()
    """Files to download. Archives are unpacked; other files are kept as they are."""

    @property
    def directory(self) -> str:
        """Name of the default directory."""
        if not self.remotes or "://" not in self.name:
            return self.name
        lower = self.remotes[0].file
        for suffix in (*unpack.TARS, ".zip", *unpack.COMPRESSED):
            lower = lower.removesuffix(suffix)
        return lower if lower.strip(".") else "data"

    @property
    def size(self) -> int | None:
        """Number of bytes to download; None if unknown."""
        sizes = [remote.size for remote in self.remotes]
        return sum(sizes) if all(sizes) else None


def _kinetics(version: str, annotations: tuple[str, str, str] = ("train.csv", "val.csv", "test.csv")) -> Dataset:
    """Return one version of Kinetics: the clips' labels, and the URLs of the archives that contain the clips."""
    place, parts = version.replace("-", "_"), ("train", "val", "test")
    above = f"https://s3.amazonaws.com/kinetics/{place}"
    return Dataset(
        f"kinetics{version}",
        f"URLs and labels of the video clips of Kinetics-{version}, and where their archives are; no checksums are published",
        remotes=(
            *(Remote(f"{above}/annotations/{name}") for name in annotations),
            *(Remote(f"{above}/{part}/k{place}_{part}_path.txt") for part in parts),
        ),
    )


_KNOWN = (
    Dataset(
        "cifar10",
        "60,000 images of 10 classes, 32×32, in Python batches (A. Krizhevsky)",
        remotes=(
            Remote(
                "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
                size=170_498_071,
                sha256="6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",  # from Keras
            ),
        ),
    ),
    Dataset("digits", "1,797 handwritten digits of scikit-learn, in CIFAR-10's format; no download", "outlast.data.digits"),
    _kinetics("400"),
    _kinetics("600", ("train.txt", "val.txt", "test.csv")),
    _kinetics("700-2020"),
    Dataset(
        "python-stdlib",
        "the sources of Python's standard library: text for a first language model; no download",
        "outlast.data.stdlib_text",
    ),
    Dataset(
        "tiny-imagenet-200",
        "120,000 images of 200 classes, 64×64 (Stanford, CS231n)",
        remotes=(
            Remote(
                "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
                size=248_100_043,
                md5="90528d7ca1a48142e341f4ef8d21d0de",  # not from its authors, but from several libraries that load it
            ),
        ),
    ),
)
NAMES = tuple(each.name for each in _KNOWN)


def named(name: str) -> Dataset:
    """Return the dataset with this name, one of `NAMES`."""
    return next(each for each in _KNOWN if each.name == name)


def of_url(text: str) -> Dataset:
    """Return a dataset with the single file at a URL, which may end in `#sha256=` and 64 hexadecimal digits. Raises
    OutlastError."""
    url, mark, pin = text.partition("#")
    checksum = ""
    if mark:
        match = re.fullmatch(r"sha256=([0-9a-f]{64})", pin.lower())
        if not match:
            raise OutlastError(f"#{pin} is no checksum; append #sha256= and the 64 digits that sha256sum prints, or nothing")
        checksum = match[1]
    check_url(url)
    remote = Remote(url, sha256=checksum)
    return Dataset(remote.shown if checksum else remote.identity, remotes=(remote,))  # with a checksum, the query is irrelevant


def is_url(name: str) -> bool:
    """Return whether a dataset's name is a URL."""
    return "://" in name
