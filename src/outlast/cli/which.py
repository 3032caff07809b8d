"""Which job is meant, and where it runs: what every command that names a job shares."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from outlast import backends
from outlast.cli import show
from outlast.errors import NotFound

if TYPE_CHECKING:
    from outlast.backends import Backend


def backend(ctx: typer.Context) -> Backend:
    """The backend given to `main`, or the one of this machine."""
    given: Backend | None = ctx.obj
    return given if given is not None else backends.find()


def _names(incomplete: str) -> list[str]:
    """For the shell's completion."""
    return [status.name for status in backends.find().list() if status.name.startswith(incomplete)]


NameArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME", help="Name of the job; may be left out when there is only one.", show_default=False, autocompletion=_names
    ),
]


def job(place: Backend, name: str | None) -> str:
    """The name of the job that is meant; raises NotFound with the names that there are."""
    known = [status.name for status in place.list()]
    return show.one_of("job", name, known, none="no job has been run here; start one with `outlast run FILE`, in this directory")


def in_store(given: str | None) -> str | None:
    """The URL of a job's output in a store, when that is given in place of a name: the URL itself, or the job's file.

    So commands work on any machine, not only on the one that runs the job.
    """
    if given is None or "://" in given:
        return given
    if not given.endswith((".yaml", ".yml")):
        return None
    from outlast import spec

    job = spec.load(given)
    if job.spec.output is None or spec.local(job.spec.output) is not None:
        raise NotFound(f"{given}: the output is no place in a store; give the name of the job, in the directory that it runs in")
    return f"{job.spec.output.rstrip('/')}/{job.metadata.name}"


def takes(words: str) -> type[TyperCommand]:
    """A command whose usage says `words`, such as `[NAME] N`: an optional word before one that is needed."""

    class Command(TyperCommand):
        def collect_usage_pieces(self, ctx: Any) -> list[str]:
            return ["[OPTIONS]", words]

    return Command


def and_last(place: Backend, words: Sequence[str], what: str) -> tuple[str, str]:
    """The job and the last word of `[NAME] WORD`."""
    match words:
        case [word]:
            return job(place, None), word
        case [name, word]:
            return job(place, name), word
        case _:
            raise typer.BadParameter(f"expected [NAME] {what}, got {len(words)} words")
