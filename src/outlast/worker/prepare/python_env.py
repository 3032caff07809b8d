"""The Python environment for a job with its own packages, made once for all workers and jobs on a machine.

    <cache>/environments/<digest>/               a virtual or conda environment, at its final path, since neither can be moved
    <cache>/environments/<digest>/outlast.json   written last; marks the environment complete
    <cache>/environments/<digest>.lock           held by the process that makes the environment
    <cache>/environments/<digest>.log            output from pip or conda

`requirements` become a virtual environment on top of the Python in which training would otherwise run (our own, or the image's).
That Python's packages can still be imported, but new packages take precedence. `<digest>` covers the requirements, that Python
and its packages. `conda` files become separate environments, to which only our own package is added. The agent does not run in
the environment.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

import outlast
from outlast.base import file_locks, files
from outlast.base.errors import OutlastError
from outlast.job import spec
from outlast.worker.prepare import image_python, requirements
from outlast.worker.prepare.installers import Shell

if TYPE_CHECKING:
    from outlast.worker.prepare.fetch_from_store import Say

MARKER = "outlast.json"
_PROBE = """
import importlib, json, sys
found = {"version": list(sys.version_info[:3])}
try:
    import torch
    found["torch"] = str(torch.__version__)
    from outlast.__main__ import ROLES
    importlib.import_module(ROLES["warm"]).preload()
except BaseException as problem:
    found["problem"] = "%s: %s" % (type(problem).__name__, problem)
print(json.dumps(found))
"""
"""This program runs in the new environment; it must work in any Python, including unsupported versions."""


@dataclass(frozen=True)
class Made:
    """A finished Python environment."""

    python: str
    variables: Mapping[str, str]


def check(environment: spec.Environment, code: Path | None = None) -> None:
    """Check the environment's file, and that conda is installed if needed, without the network. Raises OutlastError. A relative
    path is below `code`, and is not checked if `code` is None."""
    if environment.conda:
        _conda_tool(os.environ)
    if path := _file(environment, code):
        _read(environment, path)


def frozen(environment: spec.Environment, directory: Path) -> spec.Environment:
    """Return the environment with a copy of its file in `directory`, so that edits of the original do not affect the run."""
    path = _file(environment, None)
    if path is None:
        return environment
    contents = _read(environment, path)
    if isinstance(contents, requirements.Requirements):
        return environment.model_copy(update={"requirements": str(contents.write(directory / "requirements.txt"))})
    files.replace(directory / "environment.yml", yaml.safe_dump(contents, sort_keys=False))
    return environment.model_copy(update={"conda": str(directory / "environment.yml")})


def make(
    environment: spec.Environment,
    cache: Path,
    code: Path,
    environ: Mapping[str, str],
    *,
    say: Say,
    stop: threading.Event,
    base: image_python.Base | None = None,
) -> Made:
    """Make the environment unless it exists. Concurrent calls wait for the first. `requirements` are installed on top of `base`,
    by default our own Python. Raises OutlastError, or `installers.Unavailable` if a later attempt may succeed."""
    path = _file(environment, code)
    assert path is not None
    recipe: _Venv | _Conda
    name = f"environment.{'conda' if environment.conda else 'requirements'} ({path.name})"
    contents = _read(environment, path)
    if isinstance(contents, requirements.Requirements):
        recipe = _Venv(contents, name, base or image_python.look(sys.executable, environ))
    else:
        recipe = _Conda(contents, name, _conda_tool(environ))
    digest = hashlib.sha256(json.dumps(recipe.depends_on()).encode()).hexdigest()[:24]
    home = cache / "environments" / digest
    made = Made(str(home / "bin" / "python"), recipe.variables(home, cache, environ))
    if not (home / MARKER).is_file():
        waiting = f"waiting for another worker that makes {name}"
        with file_locks.exclusive(home.with_name(f"{digest}.lock"), waiting=lambda: say(waiting), stop=stop) as lock:
            if not (home / MARKER).is_file():
                if home.exists():  # left by a killed process
                    shutil.rmtree(home)
                log = home.with_name(f"{digest}.log")
                log.unlink(missing_ok=True)
                say(f"making {name} in {home}; its output is in {log}")
                try:
                    recipe.make(home, Shell(environ, lock, say, stop, log))
                    versions = _probe(made, name, environ)
                except OutlastError:
                    shutil.rmtree(home, ignore_errors=True)
                    raise
                files.replace(home / MARKER, json.dumps({"from": str(path), **versions}), durable=True)
                say(f"made {name}: Python {'.'.join(map(str, versions['version']))} with PyTorch {versions['torch']}")
    return made


def finds(made: Made, package: str, code: Path, environ: Mapping[str, str]) -> bool:
    """Return whether the environment's Python finds a package, which may be in the code's directory."""
    look = "import importlib.util, sys; sys.path.insert(0, sys.argv[1]); sys.exit(not importlib.util.find_spec(sys.argv[2]))"
    argv = [made.python, "-c", look, str(code), package]
    return subprocess.run(argv, env={**environ, **made.variables}, capture_output=True, check=False).returncode == 0


def _file(environment: spec.Environment, code: Path | None) -> Path | None:
    path = Path(environment.requirements or environment.conda or "")
    return path if path.is_absolute() else code / path if code and path.name else None


def _read(environment: spec.Environment, path: Path) -> requirements.Requirements | dict[str, Any]:
    if environment.requirements:
        return requirements.read(path, "environment.requirements")
    return _conda_file(path)


def _probe(made: Made, name: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """Return a new environment's versions of Python and torch. Raises OutlastError if training cannot run there."""
    found = image_python.answer(made.python, _PROBE, {**environ, **made.variables}, f"{name}: its Python")
    version = ".".join(map(str, found["version"]))
    if found["version"] < [3, 11]:
        raise OutlastError(f"{name} has Python {version}; Outlast needs 3.11 or newer: add python>=3.11")
    if "torch" not in found:
        raise OutlastError(f"{name}: training needs PyTorch, which cannot be imported ({found['problem']}); add or correct it")
    if "problem" in found:
        raise OutlastError(f"{name}: Outlast does not run with these packages ({found['problem']}); correct them")
    return found


# Virtual environments


@dataclass(frozen=True)
class _Venv:
    required: requirements.Requirements
    name: str
    base: image_python.Base

    def depends_on(self) -> list[object]:
        installed = sorted(entry.name for directory in self.base.below for entry in directory.glob("*.*-info"))
        python = [*self.base.identity, [str(directory) for directory in self.base.below]]
        return ["venv", self.required.fingerprint(), python, installed]

    def variables(self, home: Path, cache: Path, environ: Mapping[str, str]) -> dict[str, str]:
        return {"VIRTUAL_ENV": str(home), "PATH": f"{home / 'bin'}{os.pathsep}{environ.get('PATH', os.defpath)}"}

    def make(self, home: Path, shell: Shell) -> None:
        shell.run([self.base.executable, "-m", "venv", "--without-pip", str(home)], self.name)
        (packages,) = home.glob("lib/python3*/site-packages")
        lines = [f"import site; site.addsitedir({str(directory)!r})" for directory in self.base.below]
        (packages / "outlast-below.pth").write_text("\n".join(lines) + "\n")  # after our own in sys.path
        file = self.required.write(home / "requirements.txt")
        constraints = []
        if self.base.torch not in ("", "unknown") and not self.required.names("torch") and not self.required.hashed():
            (home / "torch.txt").write_text(f"torch=={self.base.torch}\n")  # another version would be hundreds of megabytes
            constraints = ["-c", str(home / "torch.txt")]
        python = str(home / "bin" / "python")
        options = ["-r", str(file), *constraints]
        pip = [self.base.executable, "-m", "pip", "--python", python]
        if not self.base.pip:
            lacking = replace(shell, remedy="the image's Python has no pip; add pip to the image")
            lacking.run([python, "-m", "ensurepip"], self.name)
            pip = [python, "-m", "pip"]
        shell.run([*pip, "install", "--no-input", "--progress-bar=off", *options], self.name)


# Conda


@dataclass(frozen=True)
class _Conda:
    document: dict[str, Any]
    name: str
    tool: str

    def depends_on(self) -> list[object]:
        parts = self.document["dependencies"]
        pip = "\n".join(next((part["pip"] for part in parts if isinstance(part, dict) and "pip" in part), []))
        return ["conda", self.document, requirements.parse(pip, Path("/"), self.name).fingerprint(), sysconfig.get_platform()]

    def variables(self, home: Path, cache: Path, environ: Mapping[str, str]) -> dict[str, str]:
        shown = [str(_package(cache)), *filter(None, [environ.get("PYTHONPATH")])]
        return {
            "CONDA_PREFIX": str(home),
            "CONDA_DEFAULT_ENV": str(home),
            "PATH": f"{home / 'bin'}{os.pathsep}{environ.get('PATH', os.defpath)}",
            "PYTHONPATH": os.pathsep.join(shown),
            "PYTHONNOUSERSITE": "1",
        }

    def make(self, home: Path, shell: Shell) -> None:
        file = home.with_name(f"{home.name}.yml")
        files.replace(file, yaml.safe_dump(self.document, sort_keys=False))
        create = ["create"] if Path(self.tool).name == "micromamba" else ["env", "create"]
        quiet = {"CONDA_ALWAYS_YES": "1", "MAMBA_ALWAYS_YES": "1", "MAMBA_NO_BANNER": "1", "CI": "1"}
        shell = replace(shell, environ={**shell.environ, **quiet})
        shell.run([self.tool, *create, "--prefix", str(home), "--file", str(file)], self.name)


def _conda_tool(environ: Mapping[str, str]) -> str:
    for tool in ("micromamba", "mamba", "conda"):
        if path := shutil.which(tool, path=environ.get("PATH")):
            return path
    raise OutlastError(
        "environment.conda: this machine has neither micromamba, mamba nor conda; install one of them, "
        "or list the packages in a file for environment.requirements"
    )


def _conda_file(path: Path) -> dict[str, Any]:
    """Read a conda environment file, and flatten its requirements for pip."""
    field = "environment.conda"
    try:
        document = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except OSError as problem:
        raise OutlastError(f"{field}: {path} cannot be read: {problem.strerror}; correct the path") from problem
    except (UnicodeDecodeError, yaml.YAMLError) as problem:
        first = str(problem).replace("\n", " ")
        raise OutlastError(f"{field}: {path} is not YAML ({first}); correct it") from problem
    if not isinstance(document, dict) or not isinstance(document.get("dependencies"), list):
        raise OutlastError(f"{field}: {path} has no list `dependencies`; it must be an environment file of conda")
    parts: list[object] = []
    for part in document["dependencies"]:
        if isinstance(part, dict) and isinstance(part.get("pip"), list):
            required = requirements.parse("\n".join(map(str, part["pip"])), path.parent, field)
            if required.constraints:
                raise OutlastError(f"{field}: {path} has constraints (-c) for pip; write the versions into the list instead")
            part = {"pip": list(required.lines)}
        parts.append(part)
    return {key: value for key, value in document.items() if key not in ("name", "prefix")} | {"dependencies": parts}


def _package(cache: Path) -> Path:
    """Return a directory with only a link to our package, for the PYTHONPATH of other Pythons."""
    package = Path(outlast.__file__).resolve().parent
    directory = cache / "outlast" / hashlib.sha256(str(package).encode()).hexdigest()[:16]
    link = directory / "outlast"
    if not link.is_symlink():
        directory.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            link.symlink_to(package)
    return directory
