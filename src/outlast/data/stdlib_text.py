"""The sources of Python's standard library: real text for a first language model, without a download.

The same Python version always gives the same files, about 600 modules with 10 MB of UTF-8 text. Files that differ between
installations of one version are omitted: packages, the build configuration, and the tests. `outlast data get python-stdlib` calls
`write`.
"""

from __future__ import annotations

import os
import platform
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from outlast.base.errors import OutlastError

SOURCE = f"Python {platform.python_version()}"
_LEFT_OUT = ("site-packages", "dist-packages", "lib-dynload", "test", "tests", "idle_test", "__pycache__")
"""Directories that some installations lack, or that contain the user's packages."""
_SITE = ("sitecustomize.py", "usercustomize.py")


def write(directory: Path) -> None:
    """Write the sources below `directory`, at their paths in the library, such as `json/decoder.py`. Raises OSError, and
    OutlastError if this Python has no sources."""
    library = Path(sysconfig.get_path("stdlib"))
    written = 0
    for name in sorted(_modules(library)):
        try:
            with tokenize.open(library / name) as file:
                text = file.read()
        except (SyntaxError, UnicodeDecodeError):
            continue  # some modules are deliberately not valid, for tests
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
        written += 1
    if not written:
        raise OutlastError(
            f"this Python has no sources of its standard library in {library}; use a Python that has them, as python.org's"
        )


def _modules(library: Path) -> Iterator[str]:
    for parent, directories, names in os.walk(library):
        here = Path(parent).relative_to(library)
        directories[:] = [each for each in directories if each not in _LEFT_OUT and not each.startswith("config-")]
        for name in names:
            if name.endswith(".py") and not name.startswith("_sysconfigdata_") and name not in _SITE:
                yield (here / name).as_posix()
