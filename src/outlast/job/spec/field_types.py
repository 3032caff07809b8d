"""The types of a job file's fields: their accepted values, error messages, and patterns for schemas."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    PlainSerializer,
    PlainValidator,
    WithJsonSchema,
)
from pydantic_core import core_schema

from outlast.base import units
from outlast.job import accelerators, contract, url_logins
from outlast.job.spec import validation
from outlast.job.spec.locations import ARCHIVES, OTHER_ARCHIVES, STORES, archive, local, pinned, web
from outlast.job.spec.yaml_document import Place


def _above_zero(value: Any) -> timedelta:
    parsed = units.duration(value)
    if not parsed:
        raise ValueError("must be more than 0")
    return parsed


def _enough_memory(value: Any) -> int:
    parsed = units.memory(value)
    if parsed < 2**20:
        raise ValueError(f"means {parsed} bytes, less than any process needs; write 16Gi")
    return parsed


def _snapshot_memory(value: Any) -> int | str:
    """Parse `auto`, `off` or a number of bytes. YAML reads `off` as false."""
    if value is False or value in ("auto", "off"):
        return value or "off"
    try:
        parsed = units.memory(value)
    except ValueError:
        raise ValueError("must be auto, off or a quantity, e.g. 8Gi") from None
    if parsed < 2**20:
        raise ValueError(f"means {parsed} bytes, less than any snapshot needs; write 8Gi, or off")
    return parsed


@dataclass(frozen=True)
class Pattern:
    """Text that matches a regular expression, which must also be valid RE2. `sentence` is the error for any other text."""

    pattern: str
    sentence: str
    longest: int | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def __get_pydantic_json_schema__(self, inner: core_schema.CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        longest = {"maxLength": self.longest} if self.longest else {}
        return {**handler(inner), "pattern": f"^({self.pattern})$", **longest}

    def _check(self, value: str) -> str:
        if not re.fullmatch(self.pattern, value, re.ASCII) or len(value) > (self.longest or len(value)):
            raise ValueError(self.sentence)
        return value


def label(longest: int) -> Pattern:
    """Return the pattern for a DNS label that begins with a letter."""
    sentence = f"must be lower-case letters, digits and dashes, from a letter on, at most {longest} characters"
    return Pattern(r"[a-z]([-a-z0-9]*[a-z0-9])?", sentence, longest)


def object_name(longest: int) -> Pattern:
    """Return the pattern for a Kubernetes object's name (an RFC 1123 subdomain), which also matches empty text."""
    part = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
    sentence = f"must be a name in the cluster: lower-case letters, digits, dashes and dots, at most {longest} characters"
    return Pattern(rf"{part}(\.{part})*|", sentence, longest)


def _public(value: str) -> str:
    if problem := url_logins.exposed(value, "job files are copied into the output"):
        raise ValueError(problem)
    return value


def _endpoint(value: str) -> str:
    if url_logins.exposed(value if "://" in value else f"etcd://{value}", ""):
        raise ValueError(
            "holds a login, and job files are copied into the output; leave it out here and set OUTLAST_ETCD_USER and "
            "OUTLAST_ETCD_PASSWORD by secrets or in the shell"
        )
    return value


def _location(value: str) -> str:
    _public(value)
    scheme, separator, rest = value.partition("://")
    if separator and scheme not in STORES:
        raise ValueError(f"is not in a store that Outlast supports; use a path, or one of {', '.join(f'{s}://' for s in STORES)}")
    if not separator and (almost := re.match(rf"({'|'.join(STORES)}):/?([^/].*)", value)):
        raise ValueError(f"is no URL of a store; write {almost[1]}://{almost[2]}, or ./{value} for a path")
    if not (rest if separator else value):
        raise ValueError("must be a path or the URL of a store")
    return value


def _source(value: str) -> str:
    if not web(value):
        return _location(value)
    _public(value)
    place, checksum = pinned(value)
    if not re.fullmatch(r"https?://[^/?#]+/\S+", place):
        raise ValueError("must be the URL of a file: https://HOST/PATH#sha256=...")
    if not re.fullmatch(r"[0-9a-fA-F]{64}", checksum):
        raise ValueError(
            "must end with #sha256= and 64 hexadecimal digits, so that all workers train on the same bytes; "
            "outlast data get prints them"
        )
    return value


def _code(value: str) -> str:
    place, checksum = pinned(_location(value))
    if checksum and not re.fullmatch(r"[0-9a-fA-F]{64}", checksum):
        raise ValueError("must end with #sha256= and 64 hexadecimal digits, as sha256sum prints them")
    if checksum and not archive(place):
        raise ValueError(f"is no archive ({', '.join(ARCHIVES)}), and only those have a checksum; remove #sha256=...")
    if local(place) is None and not archive(place) and place.lower().endswith(OTHER_ARCHIVES):
        raise ValueError("is an archive of a kind not known here; make it a .tar.gz or .zip")
    return value


SHELL = "is a shell script; name the Python file that it starts, and what else it does with environment, data, output and env"


def _inside(value: str) -> str:
    path = PurePosixPath(value)
    if path.is_absolute():
        raise ValueError(f"is an absolute path; write it relative to code, e.g. {path.name or 'train.py'}")
    if not path.name or ".." in path.parts:
        raise ValueError("must be a file in code, e.g. train.py")
    if path.suffix == ".sh":
        raise ValueError(SHELL)
    return value


def auto_or_count(value: Any) -> Any:
    """Accept `auto` or a positive number."""
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 1):
        return value
    raise ValueError("must be auto or a number from 1 on")


_LONGEST = 32 * 4096
"""MAX_ARG_STRLEN of Linux in bytes, with the name, `=` and a NUL: https://man7.org/linux/man-pages/man2/execve.2.html"""


def unreserved(value: dict[str, str]) -> dict[str, str]:
    """Accept environment variables that a process can have, except those that Outlast or torchrun sets."""
    broken: list[tuple[Place, str]] = []
    for name, text in value.items():
        size = len(f"{name}={text}\0".encode(errors="replace"))
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            broken.append(((name,), f"env.{name} is not a name for an environment variable; use letters, digits and _"))
        elif contract.RESERVED_ENV.search(name):
            broken.append(((name,), f"env.{name} is set by Outlast itself; remove it"))
        elif odd := re.search("[\0\ud800-\udfff]", text):
            what = "a NUL" if odd[0] == "\0" else f"a lone surrogate (U+{ord(odd[0]):X})"
            broken.append(((name,), f"env.{name} has {what}, which no variable can hold; remove it"))
        elif size > _LONGEST:
            remedy = f"Linux allows {_LONGEST} for a variable with its name; write it to a file, and name that file here"
            broken.append(((name,), f"env.{name} has {size} bytes; {remedy}"))
    if broken:
        raise validation.Broken(broken)
    return value


def _text_schema(pattern: str, *others: str) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [*({"type": other} for other in others), {"type": "string", "pattern": pattern}]})


Count = Annotated[int, Field(strict=True, ge=1, le=contract.MOST_WORKERS)]
Whole = Annotated[int, Field(strict=True, ge=0)]
Seconds = Annotated[int, Field(strict=True, ge=1)]
Flag = Annotated[bool, Field(strict=True)]
ManagedBy = Annotated[
    str,
    Pattern(
        r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?",
        "must be a domain and a name with a slash between them: outlast.dev/operator",
        63,
    ),
]
Text = Annotated[str, Field(min_length=1)]
Duration = Annotated[
    timedelta,
    BeforeValidator(_above_zero),
    PlainSerializer(units.duration_text, when_used="json"),
    _text_schema(units.DURATION_PATTERN, "number"),
]
Every = Annotated[
    units.Every,
    PlainValidator(units.Every.parse),
    PlainSerializer(str, when_used="json"),
    _text_schema(units.EVERY_PATTERN, "number"),
]
Memory = Annotated[
    int,
    BeforeValidator(_enough_memory),
    PlainSerializer(units.memory_text, when_used="json"),
    _text_schema(units.QUANTITY_PATTERN, "integer"),
]
SnapshotMemory = Annotated[
    int | Literal["auto", "off"],
    PlainValidator(_snapshot_memory),
    PlainSerializer(lambda value: units.memory_text(value) if isinstance(value, int) else value, when_used="json"),
    _text_schema(f"^(auto|off)$|{units.QUANTITY_PATTERN}", "integer"),
]
Cores = Annotated[
    float,
    BeforeValidator(units.cores),
    PlainSerializer(units.cores_text, when_used="json"),
    _text_schema(units.QUANTITY_PATTERN, "number"),
]
Location = Annotated[str, AfterValidator(_location)]
Source = Annotated[str, AfterValidator(_source)]
Code = Annotated[str, AfterValidator(_code)]
Script = Annotated[str, AfterValidator(_inside)]
Module = Annotated[str, Pattern(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", "must be a Python module, e.g. outlast.recipes.cifar10")]
Mount = Annotated[
    str,
    Pattern(
        r"(/([^/:.][^/:]*|\.[^/:.][^/:]*|\.\.[^/:]+))+",
        "must be an absolute path in the worker, e.g. /data, without : and parts that are . or ..",
    ),
]
Directory = Annotated[str, Pattern(r"[\w.-]*[\w-]", "must be a directory's name: letters, digits, dashes and dots")]
Accelerator = Annotated[
    str,
    Pattern(
        rf"{'|'.join(accelerators.RESOURCES)}|[\w.-]+/[\w.-]+",
        f"must be {', '.join(accelerators.RESOURCES)} or a resource such as nvidia.com/gpu",
    ),
]
LABEL_VALUE = r"([A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?)?"
TAINT_KEY = Pattern(
    r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?|",
    "must be the key of a taint, e.g. nvidia.com/gpu: letters, digits, -, _ and .",
    317,
)
Endpoint = Annotated[
    str, Pattern(r"(\w+://)?[^ /]+:[0-9]+(/[^ ]*)?", "must be an address with a port, e.g. etcd:2379"), AfterValidator(_endpoint)
]
