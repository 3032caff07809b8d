"""Reads, writes and describes job files, makes their paths absolute, and checks whether the files that they name exist."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema

from outlast.base import units
from outlast.base.errors import InvalidJob, NotFound, OutlastError
from outlast.job.spec import field_types as fields
from outlast.job.spec import validation
from outlast.job.spec import yaml_document as document
from outlast.job.spec.locations import ARCHIVES, archive, local, pinned
from outlast.job.spec.model import Job, Spec
from outlast.job.spec.yaml_document import Place

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSW|CREDENTIAL", re.IGNORECASE)


def load(path: Path | str, *, code: bool = False, data: bool = False) -> Job:
    """Read the job in a file. Paths relative to the file's directory become absolute.

    With `code`, the job's code and requirements must exist; with `data`, its data and models. Raises InvalidJob with every
    mistake, and NotFound or another OutlastError if the job file does not exist or cannot be read.
    """
    path = Path(path)
    read = _document(text(path), str(path))
    job = anchor(validation.validated(Job, read, source=str(path)), path.parent)
    absent = [*(_absent_code(job.spec) if code else ()), *(_absent_data(job.spec) if data else ())]
    if absent:
        raise InvalidJob([(read.line(place), sentence) for place, sentence in absent], source=str(path))
    return job


def parse(text: str, *, source: str = "job.yaml") -> Job:
    """Parse a job from text, without changing its relative paths. Raises InvalidJob with every mistake."""
    return validation.validated(Job, _document(text, source), source=source)


def of(fields: dict[str, Any], *, source: str = "job") -> Job:
    """Parse a job from an API server's object. Raises InvalidJob with every mistake."""
    return validation.validated(Job, document.Document(fields, {}), source=source)


def dump(job: Job) -> str:
    """Format a job as YAML without default values. `parse` turns the result into an equal job."""
    document = job.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return yaml.safe_dump(document, sort_keys=False, width=120)  # not allow_unicode: PyYAML 6.0.3 cannot read back its own U+0085


def schema() -> dict[str, Any]:
    """Return the JSON schema for job files, which editors use."""
    described = Job.model_json_schema(schema_generator=_Schema)
    for model in (described, *described["$defs"].values()):
        for field in model["properties"].values():
            field.pop("title", None)  # only repeats the name, capitalized
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **described}


class _Schema(GenerateJsonSchema):
    def encode_default(self, dft: Any) -> Any:
        match dft:
            case timedelta():
                return units.duration_text(dft)
            case units.Every():
                return str(dft) if dft.steps else units.duration_text(dft.duration or timedelta())
            case BaseModel():
                return {}
        return super().encode_default(dft)


def without_secrets(job: Job) -> Job:
    """Return a copy of the job that may be kept in its output: values in `env` that look like secrets are hidden."""
    env = {name: "(not kept)" if _SECRET.search(name) else value for name, value in job.spec.env.items()}
    return job.model_copy(update={"spec": job.spec.model_copy(update={"env": env})})


def anchor(job: Job, directory: Path) -> Job:
    """Resolve a job's relative paths against `directory`, and set the default `code` of a `script`."""

    def absolute(place: str | None) -> str | None:
        path = place and local(place)
        return str((directory / path).resolve()) if path else place

    def file(name: str | None) -> str | None:
        path = name and (directory / Path(name).expanduser()).resolve()
        in_code = path and code and not (local(code) and not archive(code)) and not Path(str(name)).is_absolute()
        return name if in_code and not Path(str(path)).exists() else str(path) if path else None

    spec = job.spec
    code, checksum = pinned(spec.code or ("." if spec.script else ""))
    environment = {name: file(value) for name, value in spec.environment}
    changed = {
        "code": f"{absolute(code)}#sha256={checksum}" if checksum else absolute(code) or None,
        "output": absolute(spec.output),
        "data": tuple(data.model_copy(update={"from_": absolute(data.from_)}) for data in spec.data),
        "models": tuple(model.model_copy(update={"from_": absolute(model.from_)}) for model in spec.models),
        "environment": spec.environment.model_copy(update=environment),
    }
    return job.model_copy(update={"spec": spec.model_copy(update=changed)})


def code_of(script: Path) -> Path:
    """Return the directory that serves as `code` without a job file: the working directory if `script`, an absolute path, is
    below it, so that the script finds the same files as under plain python; otherwise the script's own directory."""
    here = Path.cwd()
    return here if here in script.parents and here != Path.home() else script.parent


def absent(spec: Spec) -> Iterator[str]:
    """Yield a sentence for each local file of a loaded job that is missing or wrong."""
    for _, sentence in (*_absent_code(spec), *_absent_data(spec)):
        yield sentence


def no_such_file(path: Path, pattern: str, expected: str) -> NotFound:
    """Return the error for a missing file, which suggests the most similar file name that matches `pattern`."""
    if path.is_symlink():
        return NotFound(f"{path} is a link to {path.readlink()}, which does not exist; correct the link")
    near = difflib.get_close_matches(path.name, [each.name for each in path.parent.glob(pattern)], 1)
    remedy = f"did you mean {path.with_name(near[0])}?" if near else f"give the path of {expected}"
    return NotFound(f"{path}: there is no such file; {remedy}")


def text(path: Path) -> str:
    """Return a job file's text; `-` is standard input. Raises NotFound or another OutlastError."""
    if str(path) == "-":
        return sys.stdin.read()
    if path.suffix == ".py":
        ways = f"`outlast run {path}` trains with it, `outlast init {path}` writes its job file"
        raise OutlastError(f"{path} is a Python script, not a job file; {ways}")
    if path.suffix == ".sh":
        raise OutlastError(f"{path} {fields.SHELL}")
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise no_such_file(path, "*.y*ml", "a job file") from error
    except IsADirectoryError as error:
        raise OutlastError(f"{path} is a directory; give the path of a job file, e.g. {path / 'job.yaml'}") from error
    except UnicodeDecodeError as error:
        raise InvalidJob([(None, "this is not UTF-8 text; save it as UTF-8")], source=str(path)) from error
    except OSError as error:
        raise OutlastError(f"{path} cannot be read: {error.strerror}") from error


def _document(text: str, source: str) -> document.Document:
    return document.read(text, source=source, verbatim=_verbatim)


def _verbatim(place: Place) -> bool:
    """Return whether a value is kept as written: in args, env and labels, `3e-3` is not a number, and `yes` is not a boolean."""
    return place[:-1] in (
        ("spec", "args"),
        ("spec", "env"),
        ("spec", "nodeSelector"),
        ("metadata", "labels"),
        ("metadata", "annotations"),
    )


def _absent_code(spec: Spec) -> Iterator[tuple[Place, str]]:
    place, checksum = pinned(spec.code or "")
    code = local(place) if place else None
    if code and not code.exists():
        yield ("spec", "code"), f"code ({code}) does not exist; correct the path"
    elif code and code.is_dir() and checksum:
        yield ("spec", "code"), f"code ({code}) is a directory, and only archives have a checksum; remove #sha256=..."
    elif code and code.is_dir() and spec.script and not (code / spec.script).is_file():
        yield ("spec", "script"), f"script ({spec.script}) is not in {code}; correct it, or set code: to its directory"
    elif code and not code.is_dir() and not archive(place):
        kinds = ", ".join(ARCHIVES)
        yield ("spec", "code"), f"code ({code}) is neither a directory nor an archive ({kinds}); give one of them"
    for field, file in spec.environment:
        if file and Path(file).is_absolute() and not Path(file).is_file():  # relative paths are in the code
            yield ("spec", "environment", field), f"environment.{field} ({file}) does not exist; correct the path"


def _absent_data(spec: Spec) -> Iterator[tuple[Place, str]]:
    sources = [(("data", i, "from"), data.from_) for i, data in enumerate(spec.data)]
    sources += [(("models", i, "from"), model.from_) for i, model in enumerate(spec.models)]
    for place, source in sources:
        path = local(source)
        if path and not path.exists():
            yield ("spec", *place), f"{validation.name(place)} ({path}) does not exist; get the data, or correct the path"
