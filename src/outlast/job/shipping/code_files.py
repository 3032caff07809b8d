"""Lists the files in a code directory, and packs them into an archive.

The archive leaves out files excluded by `.gitignore` or `.outlastignore` (the latter takes precedence, and its `!` rules include
files again), files that are never code, and empty directories. The archive's bytes depend only on names, contents, links and
executable bits.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import os
import stat
import tarfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
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
REMEDY = "name what is no code in .outlastignore, or keep it elsewhere"


@dataclass(frozen=True)
class Entry:
    """A file or link in a code directory."""

    name: str
    """Path below the directory, with slashes."""
    kind: Literal["file", "link"]
    size: int = 0
    target: str = ""


@dataclass(frozen=True)
class Listing:
    """The content of a code directory. Names are paths below it, with slashes."""

    entries: list[Entry] = field(default_factory=list)
    withheld: list[str] = field(default_factory=list)
    """Names of probable credentials."""
    ignored: list[str] = field(default_factory=list)
    """Names that an ignore file excludes."""
    outside: list[str] = field(default_factory=list)
    """Names of links that lead out of the directory."""


def listed(root: Path, but: Collection[Path] = (), *, links_out: bool = False) -> Listing:
    """List the files and links in a code directory, sorted by name. The list is the same for a run on this machine and for pods.

    `but` lists paths below `root` that are not code. A link that leads out of `root` is an error, because pods lack its target;
    with `links_out`, it gets an absolute target instead. Raises OutlastError for such links, unreadable files, and too many files
    or bytes.
    """
    top = root.resolve()
    layers = _above(top)
    secret = [ignore.Layer(str(top).rstrip("/"), ignore.rules(CREDENTIALS))]
    secret += [_layer(Path(layer.directory), FILES[1:]) for layer in layers]
    listing = Listing()
    size = 0
    for entry in _below(top, {place.resolve() for place in but}, "", layers, secret, listing):
        target = _target(top, entry.name, links_out, listing) if entry.kind == "link" else ""
        listing.entries.append(replace(entry, target=target))
        size += entry.size
        if len(listing.entries) > archives.MAX_ENTRIES or size > archives.MAX_BYTES:
            held = f"more than {len(listing.entries) - 1:,} files, {units.human_bytes(size)}"
            most = biggest(listing.entries)
            raise OutlastError(f"code ({root}) holds {held}, which is too much for code ({most}); {REMEDY}")
    listing.entries.sort(key=lambda entry: os.fsencode(entry.name))
    return listing


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


def biggest(entries: Sequence[Entry]) -> str:
    """List the biggest files, for use in a sentence."""
    most = sorted(entries, key=lambda entry: -entry.size)[:3]
    return "the biggest: " + ", ".join(f"{entry.name} {units.human_bytes(entry.size)}" for entry in most)


def pack(root: Path, into: Path, *, but: Collection[Path] = (), room: int | None = None) -> Listing:
    """Pack a code directory into a new `.tar.gz`, and return its listing. Stops once the archive exceeds `room` bytes.

    Raises OutlastError in the same cases as `listed`, for a file that changes meanwhile, and if the archive cannot be written.
    """
    listing = listed(root, but)
    try:
        _write(root, listing.entries, into, room)
    except OSError as problem:  # a full disk may show only when the archive is closed
        raise OutlastError(f"code: {into} cannot be written: {problem.strerror}; make room there, or {REMEDY}") from problem
    return listing


def _write(root: Path, entries: Sequence[Entry], into: Path, room: int | None) -> None:
    with (
        open(into, "wb") as out,
        gzip.GzipFile("", "wb", compresslevel=6, fileobj=out, mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT, encoding="utf-8", errors="surrogateescape") as tar,
    ):
        for entry in entries:
            try:
                _add(tar, root, entry)
            except OSError as problem:
                reason = problem.strerror or "it has changed meanwhile"
                remedy = "try again when nothing writes there, or name it in .outlastignore"
                raise OutlastError(f"code: {root / entry.name} cannot be packed: {reason}; {remedy}") from problem
            if room is not None and out.tell() > room:
                break


def _add(tar: tarfile.TarFile, root: Path, entry: Entry) -> None:
    info = tarfile.TarInfo(entry.name)
    if entry.kind == "link":
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, entry.target, 0o777
        tar.addfile(info)
        return
    with open(os.open(root / entry.name, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
        before = os.fstat(file.fileno())
        info.size, info.mode = before.st_size, 0o755 if before.st_mode & stat.S_IXUSR else 0o644
        tar.addfile(info, file)
        after = os.fstat(file.fileno())
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise OSError


def _below(
    top: Path, but: set[Path], directory: str, layers: list[ignore.Layer], secret: list[ignore.Layer], listing: Listing
) -> Iterator[Entry]:
    """Yield the entries below a directory of the code. `layers` and `secret` are the rules from above, for all files and for
    probable credentials."""
    here = top / directory
    layers, secret = [*layers, _layer(here)], [*secret, _layer(here, FILES[1:])]
    try:
        with os.scandir(here) as scanned:
            entries = list(scanned)
    except OSError as problem:
        raise OutlastError(f"code: {here} cannot be read: {problem.strerror}; correct that, or {REMEDY}") from problem
    for each in entries:
        name = f"{directory}/{each.name}".removeprefix("/")
        is_directory = each.is_dir(follow_symlinks=False)
        if each.name in NEVER or top / name in but:
            continue
        if ignore.left_out(each.path, is_directory, layers):
            listing.ignored.append(name)
        elif ignore.left_out(each.path, is_directory, secret):
            listing.withheld.append(name)
        elif is_directory:
            if not os.path.lexists(os.path.join(each.path, "pyvenv.cfg")):
                yield from _below(top, but, name, layers, secret, listing)
        elif each.is_symlink():
            yield Entry(name, "link")
        elif each.is_file(follow_symlinks=False):  # a socket or a pipe is not code
            yield Entry(name, "file", each.stat(follow_symlinks=False).st_size)


def _target(top: Path, name: str, links_out: bool, listing: Listing) -> str:
    """Return a link's target. Raises OutlastError if pods lack it, unless `links_out` is set."""
    link = top / name
    target = os.readlink(link)
    lexical = os.path.normpath(os.path.join(os.path.dirname(name), target))
    leads_out = not Path(os.path.realpath(link)).is_relative_to(top)  # `resolve` raises RuntimeError for a loop
    if not (os.path.isabs(target) or lexical.split("/")[0] == ".." or leads_out):
        return target
    if links_out:
        listing.outside.append(name)
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
