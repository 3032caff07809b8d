"""Prepares a worker for training: code, environment, data, and models. Each method of a `Preparation` carries out one preparation
phase from `agent.lifecycle`, and raises OutlastError on failure."""

from __future__ import annotations

import importlib.util
import os
import posixpath
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from outlast.base.errors import OutlastError
from outlast.job import spec
from outlast.job.contract import EVALUATE, Env, Pod
from outlast.job.spec import substitution
from outlast.worker.launch import package_copy, relocatable
from outlast.worker.prepare import image_python

if TYPE_CHECKING:
    from outlast.worker.prepare.data_cache import Version
    from outlast.worker.prepare.fetch_from_store import Say


PINS = "pins"
"""Directory for pins (`data_cache.Source`), below the directory that a run's workers share."""
REACH_S = 10.0


def check(job: spec.Job, pins: Path) -> None:
    """Find mistakes at submission, such as missing files (here or in a store). Raises OutlastError. An unreachable store is not a
    mistake, since workers retry, and data that a run has pinned in `pins` needs no store."""
    from outlast.worker.prepare import python_env as environment

    for sentence in spec.absent(job.spec):
        raise OutlastError(sentence)
    environment.check(job.spec.environment)
    place, checksum = spec.pinned(job.spec.code or "")
    if place and (path := spec.local(place)) and not path.is_dir():
        from outlast.job.shipping import archives

        archives.check(path, f"code ({path})", checksum, _runs(job))
    sources = [(f"data[{i}].from", entry.from_) for i, entry in enumerate(job.spec.data)]
    sources += [(f"models[{i}].from", entry.from_) for i, entry in enumerate(job.spec.models)]
    remote = [(field, url) for field, url in sources if spec.local(url) is None]
    if remote or _layered(job):
        from outlast.worker.prepare import data_cache

        data_cache.writable(os.environ)
    if place and spec.local(place) is None:
        remote.insert(0, ("code", place))
    if remote:
        _check_remote(remote, job.spec.script, pins)


def _check_remote(places: Sequence[tuple[str, str]], script: str | None, pins: Path) -> None:
    """Raise OutlastError if a place is empty, missing or unreadable. Sends one or two requests per place."""
    from outlast.storage import store
    from outlast.worker.prepare import data_cache

    problems: dict[str, OutlastError] = {}

    def look(field: str, url: str) -> None:
        try:
            if spec.web(url):
                from outlast.data import download

                return download.check(url, timeout_s=REACH_S)
            place = store.open_(url)
            above, _, key = place.url.rpartition("/")
            if next(iter(place.entries()), None) is None:
                store.open_(above).head(key)
            elif field == "code" and script:
                url += f"/{script}"
                place.head(script)
        except store.Missing:
            problems[field] = OutlastError(f"{field} ({url}) does not exist; put it there, or correct the URL")
        except OutlastError as problem:
            if not (isinstance(problem, store.StoreError) and problem.retry):
                problems[field] = OutlastError(f"{field}: {problem}")

    unpinned = [(field, url) for field, url in places if field == "code" or not data_cache.has_pin(url, pins)]
    threads = [threading.Thread(target=look, args=each, daemon=True) for each in unpinned]
    deadline = time.monotonic() + REACH_S
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    for field, _ in unpinned:
        if field in problems:
            raise problems[field]


def _layered(job: spec.Job) -> bool:
    """Return whether the job has its own environment with packages."""
    return bool(job.spec.environment.requirements or job.spec.environment.conda)


def _runs(job: spec.Job) -> str:
    """Return the job's entry point in its code: a script's path, or a module's top-level package."""
    return job.spec.script or str(job.spec.module).partition(".")[0]


def place_code(job: spec.Job, into: Path, shared: Path, *, say: Say, stop: threading.Event) -> None:
    """Fetch a job's code from an archive or a store; see `code_placement.place`."""
    from outlast.worker.prepare import code_placement as code

    code.place(str(job.spec.code), into, shared, runs=_runs(job), say=say, stop=stop)


class Preparation:
    """Prepares one worker, and adds variables for training to `environ`. Its data stays in the cache until `close`."""

    def __init__(
        self, job: spec.Job, environ: dict[str, str], *, say: Say | None = None, stop: threading.Event | None = None
    ) -> None:
        self._job, self._environ = job, environ
        self._state = Path(environ[Env.STATE])
        self._shared = Path(environ.get(Env.SHARED) or self._state)
        self.say = say or (lambda text: print(f"outlast | {text}", flush=True))
        self._stop = stop or threading.Event()
        self._versions: list[Version] = []
        self.python = sys.executable

    def close(self) -> None:
        while self._versions:
            self._versions.pop().close()

    def prepare(self) -> None:
        """Carry out all phases except `compiled`."""
        self.code()
        self.environment()
        self.data()

    def code(self) -> None:
        """Put the code into its run directory, and check that it contains the script or module."""
        fields, directory = self._job.spec, Path(self._environ[Env.CODE])
        if fields.code and not _copied_at_submission(fields.code):
            place_code(self._job, directory, self._shared, say=self.say, stop=self._stop)
        if not directory.is_dir():
            raise OutlastError(f"code: {directory} is not a directory, but had the job's code at submission")
        if fields.script and not (directory / fields.script).is_file():
            raise OutlastError(f"script: {fields.script} is not in {directory}; correct the name or the code directory")
        if _layered(self._job):
            from outlast.worker.prepare import python_env as environment

            environment.check(fields.environment, directory)
        elif fields.module and not relocatable.home():
            sys.path.insert(0, str(directory))
            package = fields.module.partition(".")[0]  # searching for a submodule would run the package's code in this process
            if importlib.util.find_spec(package) is None:
                raise OutlastError(f"module: Python finds no {package!r} in {directory}; correct the name or install its package")

    def environment(self) -> None:
        """Make the job's Python environment, if any, and set `python` to the interpreter for training: the environment's, the
        image's (if the image lacks Outlast), or this process's."""
        fields, base = self._job.spec, None
        if relocatable.home() and not fields.environment.conda:
            base = image_python.find(self._environ, packages=not fields.environment.requirements)
        if not _layered(self._job) and not base:
            if importlib.util.find_spec("torch") is None:
                raise OutlastError(f"PyTorch is not installed for {sys.executable}; pip install 'outlast[train]'")
            return
        from outlast.worker.prepare import data_cache
        from outlast.worker.prepare import python_env as environment

        code = Path(self._environ[Env.CODE])
        if base and not _layered(self._job):
            made = environment.Made(base.executable, {})
        else:
            cache, environ = data_cache.writable(self._environ), self._environ
            made = environment.make(fields.environment, cache, code, environ, say=self.say, stop=self._stop, base=base)
        self._environ.update(made.variables)
        self.python = self._environ[Env.PYTHON] = made.python
        package = str(fields.module).partition(".")[0]
        if fields.module and not environment.finds(made, package, code, self._environ):
            where = "the environment" if _layered(self._job) else "the image"
            remedy = f"correct the name, or add its package to {where}"
            raise OutlastError(f"module: Python finds no {package!r} in {code} or in {where}; {remedy}")

    def data(self) -> None:
        """Make data and models available. Local files are used in place; files in a store are fetched. Several data entries are
        linked into one directory, with the same layout as their `to` in pods. Models are linked by name. In pods, each data entry
        is linked at its `to`."""
        fields = self._job.spec
        before = substitution.values(fields.env, self._environ)
        data = [self._local(f"data[{i}].from", entry.from_) for i, entry in enumerate(fields.data)]
        models = [self._local(f"models[{i}].from", entry.from_) for i, entry in enumerate(fields.models)]
        if Env.DATA in self._environ:  # in a pod
            for entry, tree in zip(fields.data, data, strict=True):
                if (to := Path(entry.to)) != tree:
                    _link(to, {path.name: path for path in tree.iterdir()} if tree.is_dir() else {tree.name: tree})
            if fields.data:
                self._environ[Env.DATA] = posixpath.commonpath([entry.to for entry in fields.data])
        elif len(data) == 1:
            self._environ[Env.DATA] = str(data[0])
        elif data:
            above = posixpath.commonpath([entry.to for entry in fields.data])
            names = [posixpath.relpath(entry.to, above) for entry in fields.data]
            self._environ[Env.DATA] = str(_link(self._state / "data", dict(zip(names, data, strict=True))))
        if models:
            names = [entry.name for entry in fields.models]
            shelf = Path(self._environ.get(Env.MODELS) or self._state / "models")
            self._environ[Env.MODELS] = str(_link(shelf, dict(zip(names, models, strict=True))))
            for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
                self._environ.setdefault(name, "1")
        if token := self._environ.get("HUGGINGFACE_HUB_TOKEN"):
            self._environ.setdefault("HF_TOKEN", token)  # Hugging Face's libraries read only this one
        after = substitution.values(fields.env, self._environ)
        changed = {name: value for name, value in after.items() if value != before[name]}
        self._environ.update(package_copy.ahead({**self._environ, **changed}))

    def compiled(self) -> None:
        """Fetch the cache of compiled code, and run the job's warm-up if it has one."""
        if self._job.spec.compile.cache:
            from outlast.worker.prepare import compile_cache

            warm_up = self._job.spec.compile.warm_up
            compile_cache.prepare(
                compile_cache.Cache.of(self._environ), warm_up, self._environ, self.python, self.say, self._stop
            )

    def _local(self, field: str, place: str) -> Path:
        if path := spec.local(place):
            if not path.exists():
                raise OutlastError(f"{field}: {path} does not exist; create it or correct the path")
            return path
        from outlast.worker.prepare import data_cache

        kind = data_cache.Web if spec.web(place) else data_cache.Source
        source = kind(
            data_cache.writable(self._environ), place, field=field, pins=self._shared / PINS, say=self.say, stop=self._stop
        )
        self._versions.append(source.acquire())
        return self._versions[-1].tree


def _copied_at_submission(code: str) -> bool:
    """Return whether code was copied to the run's directory at submission: true unless it is from a store or a ConfigMap."""
    path = spec.local(spec.pinned(code)[0])
    return path is not None and Path(Pod.SHIPPED) not in path.parents


def _link(directory: Path, sources: Mapping[str, Path]) -> Path:
    for name, source in sources.items():
        link = directory / name
        if link == source:  # a mounted volume
            continue
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(source)
    return directory


def evaluate(job: spec.Job, environ: dict[str, str], args: Sequence[str], *, say: Say | None = None) -> int:
    """Prepare a job's code and data, and run its module with `--evaluate` in a worker's `environ`. Returns the exit code."""
    environ |= package_copy.ahead(environ)
    preparation = Preparation(job, environ, say=say)
    try:
        preparation.prepare()
        del environ[Env.STATE]  # the module is not a worker
        environ[Env.EVALUATION] = "1"
        argv = [preparation.python, *command(job, environ), EVALUATE, *args]
        return subprocess.run(argv, env=environ, cwd=environ[Env.CODE], check=False).returncode
    finally:
        preparation.close()


def command(job: spec.Job, environ: Mapping[str, str]) -> list[str]:
    """Return the command for `launch.training_process`, with `$(NAME)` replaced from the environment, as in Kubernetes."""
    args = [substitution.replaced(arg, environ) for arg in job.spec.args]
    if job.spec.module:
        return ["-m", job.spec.module, *args]
    return [os.path.join(environ["OUTLAST_CODE"], str(job.spec.script)), *args]
