"""Loads the job that a command line requests: the job file or script, with `--set`, `--workers` and `--name` applied."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outlast.base.errors import InvalidJob, OutlastError
from outlast.cli import terminal
from outlast.cli.train import script

if TYPE_CHECKING:
    from outlast.job.spec import Job


def load(
    file: str | Path,
    args: Sequence[str] = (),
    *,
    module: bool = False,
    workers: int | None = None,
    name: str | None = None,
    set_: Iterable[str] = (),
    gpus: int = 0,
) -> Job:
    """Load a job from a file, a script or a module, with the changes requested on the command line. The file may be a Kubeflow
    document. A script's workers share `gpus`. Raises InvalidJob."""
    from outlast.job import spec

    changes = [_assignment(text) for text in set_]
    if script.is_script(file, module=module):
        here = Path.cwd()
        text = script.job_file(str(file), args, module=module, workers=workers or 1, name=name, gpus=gpus, directory=here)
        job = spec.anchor(spec.parse(text, source=str(file)), here)
    else:
        text, here = _job_file(Path(file)), Path(file).parent
        job = spec.anchor(spec.parse(text, source=str(file)), here)
        if workers is not None:
            changes.append((("spec", "workers", "replicas"), workers))
        if name is not None:
            changes.append((("metadata", "name"), name))
    if not changes:
        return job
    import yaml

    written = spec.parse(text, source=str(file))
    document = written.model_dump(mode="json", by_alias=True, exclude_unset=True)
    for path, value in changes:
        _put(document, path, value)
    try:
        return spec.anchor(spec.parse(yaml.safe_dump(document, sort_keys=False), source=str(file)), here)
    except InvalidJob as error:  # its line numbers refer to intermediate YAML
        raise InvalidJob([(None, text) for _, text in error.problems], source=f"{file} with the command line's values") from error


def _job_file(file: Path) -> str:
    """Return the text of a job file. Translates Kubeflow documents, and reports fields that are assumed or dropped."""
    from outlast.job import spec

    text = spec.text(file)
    if "kubeflow.org/" not in text:
        return text
    import yaml

    from outlast.kubernetes import kubeflow

    job, sentences = kubeflow.convert(text, source=str(file), directory=file.parent)
    for sentence in sentences:
        terminal.say(f"{job['metadata']['name']}: {sentence}")
    return yaml.safe_dump(job, sort_keys=False) if job else text


def _assignment(text: str) -> tuple[tuple[str, ...], Any]:
    import yaml

    key, equals, value = text.partition("=")
    path = tuple(key.split("."))
    if not equals or not all(path):
        raise OutlastError(f"--set {text}: expected KEY=VALUE, such as checkpoint.every=1m")
    if path[0] in ("metadata", "spec"):
        remedy = f"write --set {text.removeprefix('spec.')}" if path[0] == "spec" else "use --name, or change the job file"
        raise OutlastError(f"--set {text}: --set changes fields of spec; {remedy}")
    try:
        return ("spec", *path), yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise OutlastError(f"--set {text}: the value is not YAML: {error}") from error


def _put(document: Any, path: tuple[str, ...], value: Any) -> None:
    for key in path[:-1]:
        if not isinstance(document.get(key), dict):
            document[key] = {}
        document = document[key]
    document[path[-1]] = value
