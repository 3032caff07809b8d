"""Lists the files in a code directory, and packs them into an archive.

The archive leaves out files excluded by `.gitignore` or `.outlastignore` (the latter takes precedence, and its `!` rules include
files again), files that are never code, and empty directories. The archive's bytes depend only on names, contents, links and
executable bits.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import os
import stat
import tarfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from outlast.base import units
from outlast.base.errors import OutlastError
from outlast.job import spec
from outlast.job.shipping import archives, ignore

NEVER = frozenset(
    {".git", ".hg", ".svn", ".outlast", ".venv", "venv", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache"}
    | {".hypothesis", ".ipynb_checkpoints", "node_modules", ".DS_Store"}
)
FILES = (".gitignore", ".outlastignore")
"""Names of ignore files. Later files override earlier ones."""
CREDENTIALS = """
.env
.env.*
!.env.example
!.env.sample
!.env.template
.netrc
_netrc
.pypirc
.npmrc
.pgpass
.git-credentials
.vault-token
.aws/
.azure/
**/.docker/config.json
.gnupg/
.kaggle/
.kube/
.ssh/
**/.config/gcloud/
id_rsa*
id_dsa*
id_ecdsa*
id_ed25519*
*.pem
*.key
*.p12
*.pfx
*.jks
*.kdbx
kubeconfig
credentials.json
service-account*.json
service_account*.json
"""
"""Rules for files that usually hold credentials. Such files are left out unless an `.outlastignore` includes them, because anyone
who can read ConfigMaps in the namespace can read the code."""
_TRIES = 3


@dataclass(frozen=True)
class Entry:
    """A file or link in a code directory."""

    name: str
    """Path below the directory, with slashes."""
    kind: Literal["file", "link"]
    size: int = 0
    target: str = ""


class TooLarge(Exception):
    """The archive would exceed its size limit."""


class _Changed(Exception):
    """A file changed while it was read."""


NameCallback = Callable[[str], object]
"""Callback that receives the name of a file, directory or link below the code directory."""


def _nothing(_: str) -> None:
    pass


def listed(
    root: Path,
    but: Collection[Path] = (),
    *,
    withheld: NameCallback = _nothing,
    ignored: NameCallback = _nothing,
    outside: NameCallback | None = None,
) -> list[Entry]:
    """Return the files and links in a code directory, sorted by name. The list is the same for a run on this machine and for
    pods.

    `but` lists paths below `root` that are not code. `withheld` receives the names of probable credentials, `ignored` the names
    that an ignore file excludes. A link that leads out of `root` is an error, because pods lack its target. If `outside` is
    given, it receives the link's name instead, and the link gets an absolute target. Raises OutlastError for such links,
    unreadable files, and too many files or bytes.
    """
    top = root.resolve()
    layers = _above(top)
    above = [_layer(Path(layer.directory), FILES[1:]) for layer in layers]
    secret = [ignore.Layer(str(top).rstrip("/"), ignore.rules(CREDENTIALS)), *above]
    entries: list[Entry] = []
    size = 0
    walk = _Walk(top, {place.resolve() for place in but}, withheld, ignored, outside)
    for entry in walk.below("", layers, secret):
        entries.append(entry)
        size += entry.size
        if len(entries) > archives.MAX_ENTRIES or size > archives.MAX_BYTES:
            held = f"more than {len(entries) - 1:,} files, {units.human_bytes(size)}"
            raise OutlastError(f"code ({root}) holds {held}, which is too much for code ({biggest(entries)}); {REMEDY}")
    return sorted(entries, key=lambda entry: os.fsencode(entry.name))


def digest(root: Path, entries: Iterable[Entry]) -> str:
    """Return a digest of the names, contents and executable bits of these files, and of the targets of these links."""
    total = hashlib.sha256()
    for entry in entries:
        path, content = root / entry.name, entry.target
        if entry.kind == "file":
            with path.open("rb") as file:
                content = hashlib.file_digest(file, "sha256").hexdigest()
        total.update(os.fsencode(f"{entry.kind} {path.lstat().st_mode & stat.S_IXUSR} {entry.name}\0{content}\0"))
    return total.hexdigest()[:16]


def not_code(fields: spec.Spec, root: Path, but: Collection[Path] = ()) -> list[Path]:
    """Return the paths in a code directory that are not code: those in `but`, the job's data, models and output, and this
    command's log. The script counts as code even if it is in `but`."""
    but = [place for place in but if place.absolute() != root / (fields.script or "")]
    return [*but, *_redirected(), *(place for place in _named(fields) if place != root and place not in root.parents)]


def _redirected() -> Iterator[Path]:
    """Yield the files that this command's output is redirected to, as in `outlast run train.py > run.log`."""
    for number in (1, 2):
        with contextlib.suppress(OSError):
            yield Path(f"/proc/self/fd/{number}").resolve(strict=True)


def check_script(fields: spec.Spec, root: Path, names: Collection[str]) -> None:
    """Raise OutlastError if an ignore file excludes the script."""
    if fields.script and str(Path(fields.script)) not in names:
        remedy = f"add !{fields.script} to {root / '.outlastignore'}, or correct the rule"
        raise OutlastError(f"script ({fields.script}) is left out of code ({root}) by .gitignore or .outlastignore; {remedy}")


def _named(fields: spec.Spec) -> Iterator[Path]:
    given = [*(each.from_ for each in fields.data), *(each.from_ for each in fields.models), fields.output or ""]
    for place in given:
        if place and (path := spec.local(place)):
            yield path.resolve()


def some(names: Collection[str]) -> str:
    """Join the first few names, for use in a sentence."""
    found = sorted(names)
    return ", ".join([*found[:5], *(["..."] if found[5:] else [])])


def without_credentials(withheld: Collection[str]) -> str:
    """Return the message about left-out files that look like credentials."""
    return f"without {some(withheld)}, which may hold credentials ({bring_back(withheld)})"


def bring_back(names: Collection[str]) -> str:
    """Return the remedy for files that were left out."""
    return f"!{min(names).rpartition('/')[2]} in .outlastignore brings it back"


REMEDY = "name what is no code in .outlastignore, or keep it elsewhere"


def biggest(entries: Sequence[Entry]) -> str:
    """List the biggest files, for use in a sentence."""
    most = sorted(entries, key=lambda entry: -entry.size)[:3]
    return "the biggest: " + ", ".join(f"{entry.name} {units.human_bytes(entry.size)}" for entry in most)


def pack(
    root: Path,
    into: Path,
    *,
    but: Collection[Path] = (),
    room: int | None = None,
    withheld: NameCallback = _nothing,
    reading: NameCallback = _nothing,
) -> list[Entry]:
    """Pack a code directory into a new `.tar.gz`, and return its entries.

    `reading` receives each file's name before the file is read; `withheld` is as in `listed`. Raises OutlastError in the same
    cases as `listed`, and for a file that keeps changing, and TooLarge if the archive would exceed `room` bytes.
    """
    for left in reversed(range(_TRIES)):
        entries = listed(root, but, withheld=withheld)
        try:
            _write(root, entries, into, room, reading)
            return entries
        except (_Changed, FileNotFoundError) as problem:
            if not left:
                name = problem if isinstance(problem, _Changed) else problem.filename
                remedy = "try again when nothing writes there, or name it in .outlastignore"
                raise OutlastError(f"code: {name} changes while it is packed; {remedy}") from problem
        except OSError as problem:
            raise OutlastError(
                f"code: {problem.filename or into} cannot be packed: {problem.strerror}; correct that, or {REMEDY}"
            ) from problem
    raise AssertionError("there was no try")


def _write(root: Path, entries: Sequence[Entry], into: Path, room: int | None, reading: NameCallback) -> None:
    with (
        _Bounded(into, room) as out,
        gzip.GzipFile("", "wb", compresslevel=6, fileobj=out, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8", errors="surrogateescape") as tar,
    ):
        for entry in entries:
            info = tarfile.TarInfo(entry.name)
            if entry.kind == "link":
                info.type, info.linkname, info.mode = tarfile.SYMTYPE, entry.target, 0o777
                tar.addfile(info)
                continue
            path = root / entry.name
            with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
                before = os.fstat(file.fileno())
                info.size, info.mode = before.st_size, 0o755 if before.st_mode & stat.S_IXUSR else 0o644
                reading(entry.name)
                try:
                    tar.addfile(info, file)
                except OSError as problem:
                    if problem.errno is not None:
                        raise
                    raise _Changed(str(path)) from problem  # the file became shorter
                after = os.fstat(file.fileno())
            if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
                raise _Changed(str(path))


class _Bounded(io.FileIO):
    """A new file with a size limit."""

    def __init__(self, path: Path, room: int | None) -> None:
        super().__init__(path, "w")
        self._room = room

    def write(self, data: bytes | bytearray | memoryview) -> int:  # type: ignore[override]
        if self._room is not None and self.tell() + len(data) > self._room:
            raise TooLarge
        view = memoryview(data)
        while view:
            view = view[super().write(view) :]
        return len(data)


# ----------------------------------------------------------------------------------------------------------- listing the files


@dataclass(frozen=True)
class _Walk:
    """One walk through a code directory."""

    top: Path
    but: Collection[Path]
    withheld: NameCallback
    ignored: NameCallback
    outside: NameCallback | None

    def below(self, directory: str, layers: list[ignore.Layer], secret: list[ignore.Layer]) -> Iterator[Entry]:
        here = self.top / directory
        layers, secret = [*layers, _layer(here)], [*secret, _layer(here, FILES[1:])]
        try:
            with os.scandir(here) as scanned:
                entries = list(scanned)
        except OSError as problem:
            raise OutlastError(f"code: {here} cannot be read: {problem.strerror}; correct that, or {REMEDY}") from problem
        for each in entries:
            name = f"{directory}/{each.name}".removeprefix("/")
            is_directory = each.is_dir(follow_symlinks=False)
            if each.name in NEVER or self.top / name in self.but:
                continue
            if ignore.left_out(each.path, is_directory, layers):
                self.ignored(name)
            elif ignore.left_out(each.path, is_directory, secret):
                self.withheld(name)
            elif is_directory:
                if not os.path.lexists(os.path.join(each.path, "pyvenv.cfg")):
                    yield from self.below(name, layers, secret)
            elif each.is_symlink():
                yield Entry(name, "link", target=self._target(name))
            elif each.is_file(follow_symlinks=False):  # a socket or a pipe is not code
                yield Entry(name, "file", each.stat(follow_symlinks=False).st_size)

    def _target(self, name: str) -> str:
        """Return a link's target. Raises OutlastError if the target is outside the directory and `self.outside` is not set."""
        link = self.top / name
        target = os.readlink(link)
        root = os.path.realpath(self.top)
        lexical = os.path.normpath(os.path.join(os.path.dirname(name), target))
        real = os.path.realpath(link)
        leads_out = not (real == root or real.startswith(f"{root}/"))
        if not (os.path.isabs(target) or lexical.split("/")[0] == ".." or leads_out):
            return target
        if self.outside is not None:
            self.outside(name)
            return os.path.abspath(link.parent / target)
        what = "outside of the code" if leads_out else "an absolute path"
        remedy = "put a copy or a relative link in its place, or name it in .outlastignore"
        raise OutlastError(f"code: {link} is a link to {target}, {what}, which pods do not have; {remedy}")


def _above(top: Path) -> list[ignore.Layer]:
    """Return the rules that apply to a directory from the git work tree above it. If these rules would ignore the directory
    itself, none of them apply, because the user has named the directory explicitly."""
    work_tree = next((each for each in top.parents if (each / ".git").exists()), None) if not (top / ".git").exists() else None
    if work_tree is None:
        return []
    directories = [each for each in reversed(top.parents) if each == work_tree or work_tree in each.parents]
    layers = [_layer(each) for each in directories]
    for index, place in enumerate([*directories[1:], top], 1):
        if ignore.left_out(str(place), True, layers[:index]):
            return []
    return layers


def _layer(directory: Path, files: Sequence[str] = FILES) -> ignore.Layer:
    rules: list[ignore.Rule] = []
    for name in files:
        path = directory / name
        if path.is_file():
            try:
                rules += ignore.rules(path.read_text(encoding="utf-8", errors="surrogateescape"))
            except OSError as problem:
                raise OutlastError(f"code: {path} cannot be read: {problem.strerror}; correct that or remove it") from problem
    return ignore.Layer(str(directory).rstrip("/"), tuple(rules))
