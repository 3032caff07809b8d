"""`outlast image`: build Outlast's images or your own, and push them, with docker, podman or buildah."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast import __version__, accelerators
from outlast.cli import show
from outlast.errors import OutlastError

if TYPE_CHECKING:
    from outlast.cloud.images import Command

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Build and push images.")

_VARIANTS = f"{', '.join(('cpu', *accelerators.IMAGES, 'spark'))} or operator"
With = Annotated[str | None, typer.Option("--with", metavar="ENGINE", help="docker, podman or buildah; the first that works.")]
Dry = Annotated[bool, typer.Option("--dry-run", help="Only print the commands.")]


@app.callback()
def group() -> None:
    """Build and push images."""


@app.command()
def build(
    context: Annotated[Path, typer.Argument(metavar="DIR", help="Outlast's sources, or the directory of your image.")] = Path(),
    variant: Annotated[str | None, typer.Option(metavar="VARIANT", help=f"Which of Outlast's: {_VARIANTS}.")] = None,
    tag: Annotated[str | None, typer.Option("-t", "--tag", metavar="NAME", help="Name of the image; outlast:VARIANT.")] = None,
    platform: Annotated[str, typer.Option(metavar="LIST", help="amd64, arm64, or both with a comma between them.")] = "",
    file: Annotated[Path | None, typer.Option("-f", "--file", metavar="FILE", help="The Dockerfile.")] = None,
    arg: Annotated[list[str] | None, typer.Option("--build-arg", metavar="KEY=VALUE", help="A build argument.")] = None,
    push: Annotated[bool, typer.Option("--push", help="Push it, too.")] = False,
    with_: With = None,
    dry_run: Dry = False,
) -> None:
    """Build an image: one of Outlast's from its sources, or your own from a directory with a Dockerfile.

    For Amazon's registry, --push logs in and creates the repository if there is none.

    \b
    Examples:
      outlast image build --variant cpu
      outlast image build --variant cuda --platform amd64,arm64 --push --tag ghcr.io/me/outlast:0.1
      outlast image build my-image/ --tag 123456789012.dkr.ecr.us-west-2.amazonaws.com/train:1 --push
    """
    from outlast.cloud import images

    found = images.dockerfile(context, file)
    ours = found == context / "images" / "Dockerfile"
    if ours or variant:
        variant = show.one_of("variant", variant or "cpu", images.VARIANTS, none="")
    if tag is None and not ours:
        raise OutlastError(f"{found} has no name yet; add --tag registry/name:tag")
    tag = images.checked(tag or f"outlast:{variant}", push=push)
    given = dict(_assignment(each) for each in arg or ())
    labels = {"VERSION": __version__, "REVISION": _revision(context)} if ours else {}
    wanted = images.Build(
        context,
        found,
        tag,
        target=variant or "",
        platforms=images.platforms(platform),
        args={**{name: value for name, value in labels.items() if value}, **given},
        push=push,
    )
    engine = images.choose(with_, _engines(with_))
    commands = images.build(engine, wanted)
    if push:
        _enter(engine, tag, dry_run=dry_run)
    for command in commands:
        _run(command, dry_run=dry_run)


@app.command()
def push(
    tag: Annotated[str, typer.Argument(metavar="NAME", help="Name of the image, with its registry.", show_default=False)],
    with_: With = None,
    dry_run: Dry = False,
) -> None:
    """Push an image. For Amazon's registry, log in and create the repository if there is none.

    \b
    Examples:
      outlast image push ghcr.io/me/outlast:0.1
      outlast image push 123456789012.dkr.ecr.us-west-2.amazonaws.com/outlast:0.1 --with podman
    """
    from outlast.cloud import images

    images.checked(tag, push=True)
    engine = images.choose(with_, _engines(with_))
    question = images.listed(engine, tag)
    several = question is not None and subprocess.run(question, capture_output=True, check=False).returncode == 0
    _enter(engine, tag, dry_run=dry_run)
    for command in images.push(engine, tag, several=several):
        _run(command, dry_run=dry_run)


def _enter(engine: str, tag: str, *, dry_run: bool) -> None:
    """Log in to Amazon's registry, if the image goes there; for other registries the user logs in."""
    from outlast.cloud import images

    repository = images.repository(tag)
    if repository is None:
        return
    user, password = "AWS", ""
    if not dry_run:
        from outlast.cloud import ecr

        user, password, made = ecr.enter(repository)
        if made:
            print(f"outlast | created the repository {repository.registry}/{repository.name}", file=sys.stderr, flush=True)
    _run(images.login(engine, repository.registry, user), dry_run=dry_run, given=password)


def _run(command: Command, *, dry_run: bool, given: str | None = None) -> None:
    """Run a command, whose output is ours. Exits with 1 when it fails: it has said why."""
    if dry_run:
        print(shlex.join(command))
        return
    print(f"outlast | {shlex.join(command)}", file=sys.stderr, flush=True)
    done = subprocess.run(command, input=given, text=True, check=False)
    if done.returncode:
        print(f"Error: {shlex.join(command[:2])} failed (exit {done.returncode}); it says why above", file=sys.stderr)
        raise typer.Exit(1)


def _engines(wanted: str | None) -> dict[str, str]:
    """The engines on this machine, and why each cannot be used; empty when it can."""
    from outlast.cloud import images

    found = {}
    for engine in images.ENGINES:
        if wanted not in (None, engine) or not shutil.which(engine):
            continue
        found[engine] = ""
        if engine == "docker":  # a client alone, of a daemon that may not be there
            asked = subprocess.run(
                ["docker", "version", "--format", "{{.Server.Version}}"], capture_output=True, text=True, check=False
            )
            if asked.returncode:
                found[engine] = (asked.stderr.strip() or "it does not answer").splitlines()[-1].rstrip(".")
        if not found[engine]:
            break
    return found


def _revision(context: Path) -> str:
    """The commit of the sources; empty when they are no work tree of git."""
    try:
        said = subprocess.run(["git", "-C", str(context), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return said.stdout.strip() if not said.returncode else ""


def _assignment(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise OutlastError(f"--build-arg {text}: expected KEY=VALUE")
    return name, value
