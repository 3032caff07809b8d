"""Flattens a pip requirements file: includes are inlined, paths made absolute, comments dropped, so it can be stored anywhere.

A run keeps the requirements that it was submitted with, and the environment is identified by their fingerprint. Format:
https://pip.pypa.io/en/stable/reference/requirements-file-format/
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from outlast.base.errors import OutlastError

_COMMENT = re.compile(r"(^|\s+)#.*$")
_OPTION = re.compile(r"(-r|--requirement|-c|--constraint|-e|--editable|-f|--find-links)(?:\s*=\s*|\s+|(?<=-[rcef]))(.+)")
_WHEELS = (".whl", ".tar.gz", ".zip")
_LISTED = 10_000
"""Files of a local package that count in its fingerprint, at most."""


@dataclass(frozen=True)
class Requirements:
    """What to install."""

    lines: tuple[str, ...]
    constraints: tuple[str, ...]
    paths: tuple[Path, ...]
    """Packages on this machine, installed from their files."""

    def names(self, package: str) -> bool:
        """Whether a package is required by name."""
        normal = re.sub(r"[-_.]+", "-", package).lower()
        found = (re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", line) for line in (*self.lines, *self.constraints))
        return any(name and re.sub(r"[-_.]+", "-", name[0]).lower() == normal for name in found)

    def hashed(self) -> bool:
        """Whether pip runs in hash-checking mode, in which every requirement needs a hash."""
        return any("--hash=" in line or line == "--require-hashes" for line in self.lines)

    def fingerprint(self) -> list[object]:
        """Changes when an environment made from this would."""
        return [self.lines, self.constraints, [list(_stat(path)) for path in self.paths]]

    def write(self, path: Path) -> Path:
        """Write the file, and one beside it for the constraints if there are any; `read` reads both."""
        lines = list(self.lines)
        if self.constraints:
            beside = path.with_name("constraints.txt")
            beside.write_text("".join(f"{line}\n" for line in self.constraints))
            lines.append(f"-c {beside.name}")  # relative: an absolute path may have a space, which ends it for pip
        path.write_text("".join(f"{line}\n" for line in lines))
        return path


def read(path: Path, field: str) -> Requirements:
    """The requirements in a file; `field` is where the job file names it. Raises OutlastError for files that cannot be read."""
    found = _Found(field, [], [], [])
    found.file(path, found.lines, ())
    return Requirements(tuple(found.lines), tuple(found.constraints), tuple(found.paths))


def parse(text: str, directory: Path, field: str) -> Requirements:
    """The requirements in the text of a file in `directory`."""
    found = _Found(field, [], [], [])
    found.text(text, directory, found.lines, ())
    return Requirements(tuple(found.lines), tuple(found.constraints), tuple(found.paths))


@dataclass
class _Found:
    field: str
    lines: list[str]
    constraints: list[str]
    paths: list[Path]

    def file(self, path: Path, into: list[str], above: tuple[Path, ...]) -> None:
        path = Path(os.path.normpath(path))
        by = f", included by {above[-1]}," if above else ""
        if path in above:
            raise OutlastError(f"{self.field}: {path} includes itself; remove one of the includes")
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as problem:
            raise OutlastError(f"{self.field}: {path}{by} is not text in UTF-8; save it as that") from problem
        except OSError as problem:
            remedy = "correct the path" if isinstance(problem, FileNotFoundError) else "correct that"
            raise OutlastError(f"{self.field}: {path}{by} cannot be read: {problem.strerror}; {remedy}") from problem
        self.text(text, path.parent, into, (*above, path))

    def text(self, text: str, directory: Path, into: list[str], above: tuple[Path, ...]) -> None:
        for line in _logical(text.splitlines()):
            option = _OPTION.fullmatch(line)
            flag, value = (option[1], option[2].strip()) if option else ("", line)
            if flag in ("-r", "--requirement", "-c", "--constraint") and "://" not in value:
                constraint = flag in ("-c", "--constraint")
                self.file(directory / value, self.constraints if constraint else into, above)
            elif flag in ("-e", "--editable"):
                into.append(f"-e {_absolute(value, directory) or value}")
            elif flag in ("-f", "--find-links"):
                links = directory / value
                into.append(f"--find-links {links.resolve()}" if "://" not in value and links.exists() else line)
            elif not flag and (local := _absolute(line, directory)):
                into.append(local)
                self.paths.append(Path(re.sub(r"\[[^]]*\]$", "", local.removeprefix("file://"))))
            else:
                into.append(line)


def _logical(lines: Iterable[str]) -> Iterator[str]:
    """Lines with their continuations, without comments."""
    whole = ""
    for line in lines:
        if line.endswith("\\") and not _COMMENT.match(line):
            whole += line[:-1]
            continue
        if line := _COMMENT.sub("", whole + line).strip():
            yield line
        whole = ""
    if whole.strip():
        yield whole.strip()


def _absolute(requirement: str, directory: Path) -> str:
    """A requirement that is a path, `./lib[extra]` or `wheels/a.whl`, made absolute; empty for any other."""
    if "://" in requirement or re.search(r"\s@\s|[;<>=~!]", requirement):
        return ""
    if not (requirement.startswith((".", "/")) or os.sep in requirement or requirement.lower().endswith(_WHEELS)):
        return ""
    path, extra = re.fullmatch(r"(.*?)(\[[^]]*\])?", requirement).groups()  # type: ignore[union-attr] # it matches anything
    return f"{(directory / path).resolve()}{extra or ''}"


def _stat(path: Path) -> Iterator[tuple[str, int, int]]:
    """Names, sizes and times of a file, or of those in a directory."""
    if path.is_file():
        yield path.name, path.stat().st_size, path.stat().st_mtime_ns
        return
    count = 0
    for directory, names, found in os.walk(path):
        names[:] = sorted(n for n in names if not n.startswith(".") and n not in ("__pycache__", "build") and "egg-info" not in n)
        for name in sorted(found):
            file = Path(directory, name)
            count += 1
            if count > _LISTED:
                return
            yield str(file.relative_to(path)), file.lstat().st_size, file.lstat().st_mtime_ns
