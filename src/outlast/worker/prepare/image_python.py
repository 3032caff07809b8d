"""Finds the Python in which training runs, for images without Outlast (`launch.relocatable`). This module imports only the
standard library, since each worker with such an image waits for it."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outlast.base.errors import OutlastError

OLDEST_PYTHON, OLDEST_TORCH = (3, 11), (2, 11)
_LOOK = """
import json, sys
found = {"version": list(sys.version_info[:3])}
if sys.version_info >= (3, 11):
    import importlib.metadata, importlib.util, site, sysconfig
    def version(name):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return "unknown" if importlib.util.find_spec(name) else ""
    found["identity"] = [sys.version, sys.prefix, sysconfig.get_platform()]
    found["below"] = ([site.getusersitepackages()] if site.ENABLE_USER_SITE else []) + site.getsitepackages()
    found["torch"], found["numpy"], found["pip"] = version("torch"), version("numpy"), bool(importlib.util.find_spec("pip"))
print(json.dumps(found))
"""
"""This program must work in any Python, including unsupported versions."""


@dataclass(frozen=True)
class Base:
    """A Python with its packages, in which training runs or on which environments are built."""

    executable: str
    version: tuple[int, ...]
    identity: tuple[str, ...] = ()
    below: tuple[Path, ...] = ()
    torch: str = ""
    """PyTorch's version; `unknown` if it was not installed as a distribution, empty if it is missing."""
    numpy: str = ""
    pip: bool = False

    def problem(self, *, packages: bool = True) -> str:
        """Return why training cannot run in this Python, or an empty string. If `packages` is false, only the version is
        checked."""
        if self.version < OLDEST_PYTHON:
            return f"Python {_dotted(self.version)}, and Outlast needs {_dotted(OLDEST_PYTHON)} or newer"
        if not packages:
            return ""
        if not self.torch:
            return "no PyTorch"
        numbers = tuple(int(part) for part in self.torch.split(".")[:2] if part.isdecimal())
        if self.torch != "unknown" and numbers < OLDEST_TORCH:
            return f"PyTorch {self.torch}, and Outlast needs {_dotted(OLDEST_TORCH)} or newer"
        return "" if self.numpy else "no numpy, which Outlast needs beside PyTorch"


def answer(executable: str, program: str, environ: Mapping[str, str], name: str) -> dict[str, Any]:
    """Return the JSON object that a program prints last. `name` is the Python's name in the OutlastError if it does not start."""
    argv, environ = [executable, "-c", program], dict(environ)
    done = subprocess.run(argv, env=environ, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    try:
        return dict(json.loads(done.stdout.strip().splitlines()[-1]))
    except (ValueError, IndexError):
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise OutlastError(f"{name} does not start: {last}") from None


def look(executable: str, environ: Mapping[str, str]) -> Base:
    """Inspect a Python and its packages. Raises OutlastError if it does not start."""
    found = answer(executable, _LOOK, environ, executable)
    below = tuple(Path(directory) for directory in found.pop("below", ()) if Path(directory).is_dir())
    version, identity = tuple(found.pop("version")), tuple(found.pop("identity", ()))
    return Base(executable, version, identity, below, **found)


def find(environ: Mapping[str, str], *, packages: bool = True) -> Base:
    """Return the first Python in the image that can run training; see `Base.problem`. Raises OutlastError if there is none."""
    needed = f"training needs Python {_dotted(OLDEST_PYTHON)} with PyTorch {_dotted(OLDEST_TORCH)}, or newer"
    remedy = "choose another image, or add them to this one"
    reasons = []
    for name in ("python", "python3"):
        if executable := shutil.which(name, path=environ.get("PATH")):
            base = look(executable, environ)
            if not (problem := base.problem(packages=packages)):
                return base
            reasons.append(f"the image's {executable} has {problem}")
    if not reasons:
        raise OutlastError(f"the image has no Python: there is neither python nor python3 on its PATH; {needed}: {remedy}")
    raise OutlastError(f"{reasons[0]}; {needed}: {remedy}")


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
