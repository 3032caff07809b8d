"""Flattens a pip requirements file, so that the result can be stored anywhere: includes are inlined, and paths become absolute.
`fingerprint` identifies the resulting environment. https://pip.pypa.io/en/stable/reference/requirements-file-format/"""

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
"""Maximum number of files from a local package in the fingerprint."""


@dataclass(frozen=True)
class Requirements:
    """The contents of a flattened requirements file."""

    lines: tuple[str, ...]
    constraints: tuple[str, ...]
    paths: tuple[Path, ...]
    """Local packages, which are installed from their files on this machine."""

    def names(self, package: str) -> bool:
        """Return whether a package is required by name."""
        normal = re.sub(r"[-_.]+", "-", package).lower()
        names = (re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", line) for line in (*self.lines, *self.constraints))
        return any(name and re.sub(r"[-_.]+", "-", name[0]).lower() == normal for name in names)

    def hashed(self) -> bool:
        """Return whether pip runs in hash-checking mode, in which every requirement needs a hash."""
        return any("--hash=" in line or line == "--require-hashes" for line in self.lines)

    def fingerprint(self) -> list[object]:
        """Return a value that changes with the environment made from these requirements."""
        return [self.lines, self.constraints, [list(_stat(path)) for path in self.paths]]

    def write(self, path: Path) -> Path:
        """Write the file, and a second file for any constraints; `read` reads both. Returns the path."""
        lines = list(self.lines)
        if self.constraints:
            beside = path.with_name("constraints.txt")
            beside.write_text("".join(f"{line}\n" for line in self.constraints))
            lines.append(f"-c {beside.name}")  # relative, since pip splits an absolute path at a space
        path.write_text("".join(f"{line}\n" for line in lines))
        return path


def read(path: Path, field: str) -> Requirements:
    """Parse the requirements file in the job file's `field`. Raises OutlastError if a file cannot be read."""
    parser = _Parser(field)
    parser.file(path, parser.lines, ())
    return parser.result()


def parse(text: str, directory: Path, field: str) -> Requirements:
    """Parse the text of a file in `directory`. Raises OutlastError if an included file cannot be read."""
    parser = _Parser(field)
    parser.text(text, directory, parser.lines, ())
    return parser.result()


class _Parser:
    def __init__(self, field: str) -> None:
        self.field = field
        self.lines: list[str] = []
        self.constraints: list[str] = []
        self.paths: list[Path] = []

    def result(self) -> Requirements:
        return Requirements(tuple(self.lines), tuple(self.constraints), tuple(self.paths))

    def file(self, path: Path, into: list[str], above: tuple[Path, ...]) -> None:
        path = Path(os.path.normpath(path))
        by = f", included by {above[-1]}," if above else ""
        if path in above:
            raise OutlastError(f"{self.field}: {path} includes itself; remove one of the includes")
        try:
            text = path.read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as problem:
            raise OutlastError(f"{self.field}: {path}{by} is not text in UTF-8; save it in UTF-8") from problem
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
    """Return a requirement as an absolute path if it is a path, such as `./lib[extra]`, or an empty string otherwise."""
    if "://" in requirement or re.search(r"\s@\s|[;<>=~!]", requirement):
        return ""
    if not (requirement.startswith((".", "/")) or os.sep in requirement or requirement.lower().endswith(_WHEELS)):
        return ""
    path, extra = re.fullmatch(r"(.*?)(\[[^]]*\])?", requirement).groups()  # type: ignore[union-attr] # it matches anything
    return f"{(directory / path).resolve()}{extra or ''}"


def _stat(path: Path) -> Iterator[tuple[str, int, int]]:
    """Yield the name, size and mtime of a file, or of each file in a directory."""
    if path.is_file():
        yield path.name, path.stat().st_size, path.stat().st_mtime_ns
        return
    count = 0
    for directory, names, others in os.walk(path):
        names[:] = sorted(n for n in names if not n.startswith(".") and n not in ("__pycache__", "build") and "egg-info" not in n)
        for name in sorted(others):
            file = Path(directory, name)
            count += 1
            if count > _LISTED:
                return
            yield str(file.relative_to(path)), file.lstat().st_size, file.lstat().st_mtime_ns
