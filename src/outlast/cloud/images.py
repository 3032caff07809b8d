"""Building and pushing images with docker, podman or buildah: what to ask of each of them.

    commands = build("podman", Build(context, file, "team/outlast:1", target="cuda", platforms=("linux/amd64", "linux/arm64")))

The engines have nearly the same options, and part where an image has several platforms: docker's buildx pushes those as it builds
them, the others make a list of images that is pushed as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from outlast import accelerators
from outlast.errors import NotFound, OutlastError

ENGINES = ("docker", "podman", "buildah")
"""In order of preference."""
VARIANTS = ("cpu", *accelerators.IMAGES, "spark", "notebook", "operator")
"""Stages of images/Dockerfile."""
_ECR = re.compile(r"([0-9]{12})\.dkr\.ecr(?:-fips)?\.([a-z0-9-]+)\.amazonaws\.com(?:\.cn)?")
_REFERENCE = re.compile(r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?::[0-9]+)?(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*(?::[\w][\w.-]{0,127})?")

Command = list[str]


@dataclass(frozen=True)
class Build:
    """One image to be built."""

    context: Path
    file: Path
    tag: str
    target: str = ""
    """Stage of the file; empty for its last."""
    platforms: tuple[str, ...] = ()
    """`linux/amd64`; none for that of this machine."""
    args: Mapping[str, str] = field(default_factory=dict)
    push: bool = False


@dataclass(frozen=True)
class Repository:
    """A repository in Amazon's registry."""

    registry: str
    account: str
    region: str
    name: str


def build(engine: str, wanted: Build) -> list[Command]:
    """The commands that build an image, and push it if that is wanted. Raises OutlastError for what the engine cannot do."""
    several = len(wanted.platforms) > 1
    options = ["--file", str(wanted.file)]
    options += ["--target", wanted.target] if wanted.target else []
    options += ["--platform", ",".join(wanted.platforms)] if wanted.platforms else []
    options += [word for name, value in sorted(wanted.args.items()) for word in ("--build-arg", f"{name}={value}")]
    where = str(wanted.context)
    if engine == "docker":
        if not several:
            made = [["docker", "build", *options, "--tag", wanted.tag, where]]
            return made + (push(engine, wanted.tag) if wanted.push else [])
        if not wanted.push:
            raise OutlastError(
                f"--platform {','.join(wanted.platforms)}: docker keeps no image of several platforms; add --push, "
                "give one platform, or use --with podman"
            )
        return [["docker", "buildx", "build", *options, "--tag", wanted.tag, "--push", where]]
    cached = ["--layers"] if engine == "buildah" else []
    name = ["--manifest" if several else "--tag", wanted.tag]
    made = [[engine, "build", *cached, *options, *name, where]]
    return made + (push(engine, wanted.tag, several=several) if wanted.push else [])


def push(engine: str, tag: str, *, several: bool = False) -> list[Command]:
    """The commands that push an image; `several`: it is a list of images, as podman and buildah make for several platforms."""
    if several:
        return [[engine, "manifest", "push", "--all", tag, f"docker://{tag}"]]
    return [[engine, "push", tag]]


def login(engine: str, registry: str, user: str) -> Command:
    """The command that logs in; it reads the password from its standard input, which hides it from the list of processes."""
    return [engine, "login", "--username", user, "--password-stdin", registry]


def listed(engine: str, tag: str) -> Command | None:
    """The command that says whether an image here is a list of images; None for an engine that keeps none."""
    return None if engine == "docker" else [engine, "manifest", "exists", tag]


def choose(wanted: str | None, broken: Mapping[str, str]) -> str:
    """The engine to use. `broken`: of those on this machine, why each cannot be used; empty when it can.

    Raises OutlastError when there is none, or not the wanted one.
    """
    if wanted and wanted not in ENGINES:
        raise OutlastError(f"--with {wanted}: must be one of {', '.join(ENGINES)}")
    for engine in (wanted,) if wanted else ENGINES:
        if broken.get(engine) == "":
            return engine
    for engine in (wanted,) if wanted else ENGINES:
        if engine in broken:
            raise OutlastError(f"{engine} cannot be used: {broken[engine]}; start it, or install podman or buildah")
    raise OutlastError(f"there is no {wanted or 'docker, podman or buildah'} on PATH; install one of them")


def dockerfile(context: Path, file: Path | None) -> Path:
    """The Dockerfile of a directory: what is asked for, else Outlast's, else its own. Raises NotFound."""
    usual = [context / "images" / "Dockerfile", context / "Dockerfile", context / "Containerfile"]
    for each in [file] if file else usual:
        if each.is_file():
            return each
    looked = str(file) if file else ", ".join(map(str, usual))
    raise NotFound(f"there is no Dockerfile ({looked}); give the directory of Outlast's sources or of your own image, or --file")


def platforms(text: str) -> tuple[str, ...]:
    """`amd64,arm64` or `linux/amd64`, as the engines write them."""
    found = tuple(each if "/" in each else f"linux/{each}" for each in (part.strip() for part in text.split(",")) if each)
    for each in found:
        if not re.fullmatch(r"[a-z0-9]+/[a-z0-9]+(/[a-z0-9]+)?", each):
            raise OutlastError(f"--platform {each}: expected amd64, arm64 or such as linux/arm64/v8")
    return found


def checked(tag: str, *, push: bool) -> str:
    """A name for an image. Raises OutlastError when it cannot be one, or cannot be pushed."""
    if not _REFERENCE.fullmatch(tag):
        raise OutlastError(f"{tag} cannot name an image; write registry/name:tag in lower-case letters, digits, `-`, `_` and `.`")
    if push and "/" not in tag:
        raise OutlastError(f"{tag} names no registry to push to; write registry/{tag}, e.g. ghcr.io/me/{tag}")
    return tag


def repository(tag: str) -> Repository | None:
    """The repository in Amazon's registry that a name is of; None when it is of another registry."""
    registry, _, rest = tag.partition("/")
    found = _ECR.fullmatch(registry)
    return Repository(registry, found[1], found[2], rest.rpartition(":")[0] or rest) if found else None
