"""Flattens a pip requirements file, so that the result can be stored anywhere: includes are inlined, and paths become absolute.
`fingerprint` identifies the resulting environment. https://pip.pypa.io/en/stable/reference/requirements-file-format/"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from outlast.base.errors import OutlastError

_COMMENT = re.compile(r"(^|\s+)#.*$")
_OPTION = re.compile(r"(-r|--requirement|-c|--constraint|-e|--editable|-f|--find-links)(?:\s*=\s*|\s+|(?<=-[rcef]))(.+)")
_EXTRA = re.compile(r"\[[^]]*\]$")
_WHEELS = (".whl", ".tar.gz", ".zip")
_LISTED = 10_000
"""Maximum number of files from a local package in the fingerprint."""


@dataclass(frozen=True)
class Requirements:
    """The contents of a flattened requirements file."""

    lines: tuple[str, ...]
    constraints: tuple[str, ...]

    def names(self, package: str) -> bool:
        """Return whether a package is required by name. `package` is a normalized name."""
        names = (re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", line) for line in (*self.lines, *self.constraints))
        return any(name and re.sub(r"[-_.]+", "-", name[0]).lower() == package for name in names)

    def hashed(self) -> bool:
        """Return whether pip runs in hash-checking mode, in which every requirement needs a hash."""
        return any("--hash=" in line or line == "--require-hashes" for line in self.lines)

    def fingerprint(self) -> list[object]:
        """Return a value that changes with the environment made from these requirements."""
        local = [Path(_EXTRA.sub("", line)) for line in self.lines if line.startswith("/")]
        return [self.lines, self.constraints, [list(_stat(path)) for path in local]]

    def write(self, path: Path) -> Path:
        """Write the file, and a second file for any constraints; `read` reads both. Returns the path."""
        lines = list(self.lines)
        if self.constraints:
            beside = path.with_name("constraints.txt")
            beside.write_text("".join(f"{line}\n" for line in self.constraints))
            lines.append(f"-c {beside.name}")  # relative, since pip splits an absolute path at a space
        path.write_text("".join(f"{line}\n" for line in lines))
        return path


def read(path: Path, field: str, above: tuple[Path, ...] = ()) -> Requirements:
    """Parse the requirements file in the job file's `field`. `above` are the files that include it. Raises OutlastError if a file
    cannot be read."""
    path = Path(os.path.normpath(path))
    if path in above:
        raise OutlastError(f"{field}: {path} includes itself; remove one of the includes")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as problem:
        by = f", included by {above[-1]}," if above else ""
        reason = problem.strerror if isinstance(problem, OSError) else "it is not text in UTF-8"
        raise OutlastError(f"{field}: {path}{by} cannot be read: {reason}; correct the path or the file") from problem
    return parse(text, path.parent, field, (*above, path))


def parse(text: str, directory: Path, field: str, above: tuple[Path, ...] = ()) -> Requirements:
    """Parse the text of a file in `directory`. Raises OutlastError if an included file cannot be read."""
    lines: list[str] = []
    constraints: list[str] = []
    text = re.sub(r"(?m)^[ \t]*#.*$", "", text)  # a comment ends with its line, even if that ends in a backslash
    for line in re.sub(r"\\\r?\n", "", text).splitlines():
        if not (line := _COMMENT.sub("", line).strip()):
            continue
        option = _OPTION.fullmatch(line)
        flag, value = option.groups() if option else ("", line)
        if flag in ("-r", "--requirement", "-c", "--constraint") and "://" not in value:
            included = read(directory / value, field, above)
            (lines if flag in ("-r", "--requirement") else constraints).extend(included.lines)
            constraints.extend(included.constraints)
        else:
            lines.append(f"{flag} {_absolute(value, directory, flag)}".strip())
    return Requirements(tuple(lines), tuple(constraints))


def _absolute(value: str, directory: Path, flag: str) -> str:
    """Make a requirement or an option's value absolute if it is a path that exists, such as `./lib[extra]`."""
    path = _EXTRA.sub("", value)
    looks_like_path = flag or path.startswith(".") or os.sep in path or path.lower().endswith(_WHEELS)
    if looks_like_path and (directory / path).exists():
        return f"{(directory / path).resolve()}{value.removeprefix(path)}"
    return value


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
