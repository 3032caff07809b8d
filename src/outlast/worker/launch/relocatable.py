"""Makes a copy of our Python that runs the agent in any Linux image of the same architecture, even without Outlast.

    <directory>/python/              bin/python, its library with an agent's packages, its loader and shared libraries
    <directory>/package/outlast/     our package, first on training's PYTHONPATH; see `package_copy`
    <directory>/packages/            links to what training may import, last in its sys.path

    python -m outlast inject DIRECTORY        makes the copy, in a pod's init container

The agent runs in this Python, and training in the image's (`prepare.image_python`). See docs/decisions/0063-any-image.md.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import outlast
from outlast.worker.launch import package_copy

if TYPE_CHECKING:
    from importlib.metadata import Distribution

EXTRA = "store"
"""The extra of our package whose requirements an agent needs."""
FURTHER = ("httpx2", "py-spy", "setproctitle")
"""Other distributions that an agent uses if they are installed."""
FOR_TRAINING = (
    *("yaml", "psutil", "obstore", "botocore", "jmespath", "dateutil", "six.py", "urllib3"),
    *("httpx2", "httpcore2", "h11", "idna", "truststore", "typing_extensions.py"),
)
"""Modules in `packages`. They are pure Python, or compiled for Python's stable ABI."""
_UNUSED = (
    *("test", "tests", "distutils", "idlelib", "tkinter", "turtledemo", "lib2to3", "ensurepip", "pydoc_data", "*-packages"),
    *("config-*", "*.opt-?.pyc", "*.a", "_tkinter.*", "_test*", "_ctypes_test.*", "xxlimited*"),
)
_UNNEEDED = re.compile(
    r"botocore/data/(?!(s3|sts|sso|sso-oidc)/)[^/]+/|pygments/lexers/(?!python|text|special)[a-z]|.*\.pyc$|\.\./"
)
"""Files in packages that an agent does not use, such as descriptions of most AWS services."""


def command(directory: str) -> list[str]:
    """Return the command that runs a copy's Python with its own loader. `-I` ignores the image's variables, e.g. PYTHONPATH."""
    library = f"{directory}/python/lib"
    return [f"{library}/ld.so", "--library-path", library, f"{directory}/python/bin/python", "-I", "-u"]


def home() -> Path | None:
    """Return the directory of the copy from which this process imports Outlast, if any."""
    copy = package_copy.current()
    return copy.parent if copy and (copy.parent / "python").is_dir() else None


def python() -> list[str]:
    """Return the command for a Python with the agent's packages: that of the injected copy if it is in use, otherwise our own."""
    directory = home()
    return command(str(directory)) if directory else [sys.executable]


def offer() -> None:
    """Let this process import the modules in `packages` that its Python lacks."""
    if directory := home():
        sys.path.append(str(directory / "packages"))


def main(argv: list[str]) -> None:
    make(Path(argv[0]))


def make(directory: Path) -> None:
    """Copy this Python, our package and what an agent needs into a directory that can be moved later. Raises OSError."""
    for left in directory.glob("*"):  # left by a container that was killed
        shutil.rmtree(left)
    library = directory / "python" / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}"
    (directory / "python" / "bin").mkdir(parents=True, exist_ok=True)
    shutil.copy2(os.path.realpath(sys.executable), directory / "python" / "bin" / "python")
    if (py_spy := Path(sys.executable).with_name("py-spy")).is_file():  # where `hangs.stacks` looks for it
        shutil.copy2(py_spy, directory / "python" / "bin")
    unused = shutil.ignore_patterns(*_UNUSED)
    shutil.copytree(sysconfig.get_path("stdlib"), library, ignore=unused)
    packages = library / "site-packages"
    (library / "dist-packages").symlink_to(packages.name)  # where Debian's Python looks
    for distribution in _distributions():
        _copy(distribution, packages)
    package = directory / "package"
    shutil.copytree(Path(outlast.__file__).parent, package / "outlast")
    (package / package_copy.LOCK).touch()
    (packages / "outlast.pth").write_text(os.path.relpath(package, packages) + "\n")
    (directory / "packages").mkdir()
    for name in FOR_TRAINING:
        for path in (packages / name, *packages.glob(f"{name}-*.dist-info")):  # httpx2 asks for its version
            (directory / "packages" / path.name).symlink_to(os.path.relpath(path, directory / "packages"))
    for source, names in _libraries(directory).items():
        target = directory / "python" / "lib" / names[0]
        shutil.copy2(source, target)
        for name in names[1:]:
            target.with_name(name).symlink_to(names[0])


def _distributions() -> list[Distribution]:
    """Return the installed distributions that an agent needs, with their dependencies."""
    import importlib.metadata

    found: dict[str, Distribution] = {}
    wanted = [*_required(importlib.metadata.distribution("outlast"), EXTRA), *FURTHER]
    while wanted:
        name = re.sub(r"[-_.]+", "-", wanted.pop()).lower()
        if name not in found:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # for another system, or an older Python
                found[name] = importlib.metadata.distribution(name)
                wanted += _required(found[name])
    return list(found.values())


def _required(distribution: Distribution, extra: str = "") -> Iterator[str]:
    for requirement in distribution.requires or ():
        marker = requirement.partition(";")[2]
        if "extra" not in marker or (extra and re.search(rf"""extra == ['"]{extra}['"]""", marker)):
            yield re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def _copy(distribution: Distribution, packages: Path) -> None:
    directories = set()
    for file in map(str, distribution.files or ()):
        if _UNNEEDED.match(file):
            continue
        source, target = str(distribution.locate_file(file)), f"{packages}/{file}"
        bytecode = importlib.util.cache_from_source(source) if file.endswith(".py") else ""
        if (directory := os.path.dirname(target)) not in directories:
            os.makedirs(f"{directory}/__pycache__" if bytecode else directory, exist_ok=True)
            directories.add(directory)
        shutil.copy2(source, target)
        if bytecode and os.path.exists(bytecode):
            shutil.copy2(bytecode, f"{directory}/__pycache__")


def _libraries(directory: Path) -> dict[str, list[str]]:
    """Return the shared libraries that Python and the extension modules in `directory` use, with all their names. To find them,
    load the modules into this process without initializing them."""
    for module in directory.rglob("*.so"):
        with contextlib.suppress(OSError):  # it needs a library that the image lacks: it cannot be imported here, either
            ctypes.CDLL(str(module))
    maps = Path("/proc/self/maps").read_text()
    paths = set(re.findall(r"/\S+/(?:lib|ld-)[^/\s]*\.so[^/\s]*$", maps, re.MULTILINE))
    shared = {path for path in paths if not path.startswith(str(directory)) and "/site-packages/" not in path}
    names = {path: ["ld.so"] if os.path.basename(path).startswith("ld-") else [os.path.basename(path)] for path in shared}
    for place in {os.path.dirname(path) for path in shared}:
        for entry in os.scandir(place):
            if entry.is_symlink() and entry.name.startswith("lib") and (path := os.path.realpath(entry)) in shared:
                names[path].append(entry.name)
    return names
