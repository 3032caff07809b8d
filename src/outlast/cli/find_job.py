"""Finds the job that a command refers to, and the backend that runs it.

With `-n`, `-A`, `-l` or `--context`, and as a kubectl plug-in, the job is in a cluster. Otherwise, the current directory is
searched first, then the namespace of the kubeconfig's current context, if there is one.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from outlast.base import units
from outlast.base.errors import NoCluster, NotFound, OutlastError, Unanswered
from outlast.cli import completion, tables, terminal

if TYPE_CHECKING:
    from outlast.client import Run
    from outlast.job.backend import Backend
    from outlast.job.status import JobStatus
    from outlast.kubernetes.jobs.backend import KubernetesBackend
    from outlast.storage import runs
    from outlast.storage.store import Store

FileArgument = Annotated[Path, typer.Argument(metavar="FILE", help="The job file.")]
FileOrScript = Annotated[str, typer.Argument(metavar="FILE", help="A job file, or a Python script followed by its arguments.")]
TitleOption = Annotated[str | None, typer.Option(metavar="NAME", help="Name of the job, instead of that in the file.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a field of `spec` to this value (YAML); may be repeated."),
]
TopologyOption = Annotated[
    str,
    typer.Option(
        "--as", metavar="TOPOLOGY", help="elasticjob, job, indexed-job or statefulset.", autocompletion=completion.topologies
    ),
]
NamespaceOption = Annotated[
    str | None,
    typer.Option(
        "-n",
        "--namespace",
        metavar="NAME",
        help="The job is in this namespace of a cluster.",
        autocompletion=completion.namespaces,
    ),
]
ContextOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", help="The job is in the cluster of this kubeconfig context.", autocompletion=completion.contexts
    ),
]
EverywhereOption = Annotated[bool, typer.Option("-A", "--all-namespaces", help="Jobs in all namespaces of a cluster.")]
SelectorOption = Annotated[
    str,
    typer.Option("-l", "--selector", metavar="LABELS", help="Jobs of a cluster with these labels, such as team=a,tier!=test."),
]
BestOption = Annotated[bool, typer.Option("--best", help="The best checkpoint, by its metric.")]
StepOption = Annotated[int | None, typer.Option(metavar="N", min=0, help="The checkpoint of this step.")]
YesOption = Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")]


def this_machine() -> Backend:
    """Return the backend that runs jobs on this machine."""
    from outlast.local import state_dir
    from outlast.local.backend import LocalBackend

    return LocalBackend(state_dir.root())


def backend(ctx: typer.Context) -> Backend:
    """Return the backend passed to `main`, or else this machine's backend."""
    given: Backend | None = ctx.obj
    return given if given is not None else this_machine()


def place(
    ctx: typer.Context,
    name: str | None,
    namespace: str | None,
    context: str | None,
    *,
    everywhere: bool = False,
    selector: str = "",
) -> Backend:
    """Return the backend that has the job with this name or, if no name is given, any job."""
    if ctx.obj is not None:
        return backend(ctx)
    if namespace or context or everywhere or selector or ctx.find_root().info_name == completion.PLUGIN:
        return cluster(ctx, namespace, context, everywhere=everywhere, selector=selector)
    here = this_machine()
    known = {status.name for status in here.list()}
    if name in known or (name is None and known):
        return here
    from outlast.kubernetes.api import kubeconfig

    try:
        there = cluster(ctx) if kubeconfig.available(os.environ) else None
        if there and name and difflib.get_close_matches(name, known, 1):  # probably a job of this machine
            there.cluster.has_namespace()
        return there or here
    except (NoCluster, Unanswered) as problem:
        try:
            tables.one_of("job", name, sorted(known), none=str(problem))
        except NotFound as unknown:
            if known:
                raise NotFound(f"{unknown}; and the cluster cannot be asked: {problem}") from problem
        raise


def cluster(
    ctx: typer.Context, namespace: str | None = None, context: str | None = None, *, everywhere: bool = False, selector: str = ""
) -> KubernetesBackend:
    """Return a cluster's backend, whose connections are closed at the end of the command. Raises NoCluster."""
    from outlast.kubernetes import api
    from outlast.kubernetes.jobs import backend as kubernetes

    connected = api.connect(context, checked(namespace))
    ctx.call_on_close(connected.close)
    return kubernetes.KubernetesBackend(connected, everywhere=everywhere, selector=selector)


def checked(namespace: str | None) -> str | None:
    """Return the namespace if its name is valid. Raises OutlastError otherwise."""
    if namespace is not None and not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", namespace):
        raise OutlastError(f"--namespace {namespace}: must be at most 63 lower-case letters, digits and dashes")
    return namespace


def in_cluster(where: Backend) -> KubernetesBackend | None:
    """Return the backend if it is a cluster, else None."""
    from outlast.local import backend as local

    if isinstance(where, local.LocalBackend):
        return None
    from outlast.kubernetes.jobs import backend as kubernetes

    return where if isinstance(where, kubernetes.KubernetesBackend) else None


def suffix(namespace: str | None, context: str | None) -> str:
    """Return the given options as a suffix for a suggested command."""
    return "".join([f" -n {namespace}" if namespace else "", f" --context {context}" if context else ""])


NameArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME",
        help="Name of the job. Default: the only unfinished one, else the newest; in a cluster the only one.",
        autocompletion=completion.jobs,
    ),
]


def job(place: Backend, name: str | None) -> str:
    """Return the name of the job that a command refers to. Raises NotFound with the existing names."""
    there = in_cluster(place)
    if there is not None and name is not None:
        return name  # the cluster checks it
    statuses = place.list()
    if there is None and name is None and len(statuses) > 1 and (found := pick(statuses)):
        name, reason = found
        terminal.say(f"{name}: {reason}; outlast list shows all")
    return tables.one_of("job", name, [status.name for status in statuses], none="" if statuses else no_job(place))


def no_job(place: Backend) -> str:
    """Return a sentence that says that there is no job, and how to start one. Raises OutlastError if even the namespace does not
    exist."""
    if (there := in_cluster(place)) is None:
        return "no job has been run here; start one with `outlast run FILE`, in this directory"
    if not there.everywhere and not there.cluster.has_namespace():
        raise there.workloads.no_namespace()
    where = "any namespace" if there.everywhere else f"namespace {there.cluster.namespace}"
    labelled = f" with labels {there.selector}" if there.selector else ""
    return f"there is no job{labelled} in {where} of {there.cluster.context}; outlast submit FILE creates one"


def run(ctx: typer.Context, name: str | None, namespace: str | None, context: str | None) -> Run:
    """Return the run of the job that a command refers to."""
    from outlast import client

    where = place(ctx, name, namespace, context)
    return client.Run(job(where, name), where)


def pick(statuses: Sequence[JobStatus]) -> tuple[str, str] | None:
    """Pick a job for a command without a name: the only unfinished job, or the newest (the last) if all have finished. Returns
    its name and the reason, or None if several jobs are unfinished."""
    match [status.name for status in statuses if not status.state.final]:
        case []:
            return statuses[-1].name, f"the newest of {len(statuses)} jobs"
        case [name]:
            return name, f"the only unfinished one of {len(statuses)} jobs"
        case _:
            return None


def in_store(given: str | None) -> str | None:
    """Return the URL of a job's output in a store if the user gave this URL, or a job file, instead of a name. This lets commands
    work on any machine, not only where the job runs."""
    if given is None or "://" in given:
        return given
    if not given.endswith((".yaml", ".yml")):
        return None
    from outlast.job import spec

    job = spec.load(given)
    if job.spec.output is None or spec.local(job.spec.output) is not None:
        raise NotFound(f"{given}: its output is not in a store; give the name of the job, in the directory that it runs in")
    return f"{job.spec.output.rstrip('/')}/{job.metadata.name}"


def stored_run(url: str) -> tuple[Store, runs.Run]:
    """Return the store with a job's output, and the record of the run in that store. Raises NotFound."""
    from outlast.storage import runs, store

    there = store.open_(url)
    if (record := runs.read(there)) is None:
        raise NotFound(f"there is no job in {there.url}; give the URL of a job's output, such as s3://bucket/runs/digits")
    return there, record


def duration(option: str, text: str) -> timedelta:
    """Parse a duration given as an option, such as `10m`. Raises BadParameter."""
    try:
        return units.duration(text)
    except ValueError as error:
        raise typer.BadParameter(f"{option} {text}: {error}") from error


def takes(words: str) -> type[TyperCommand]:
    """Return a command class with these words in its usage, such as `[NAME] N`: an optional word before a required one."""

    class Command(TyperCommand):
        def collect_usage_pieces(self, ctx: Any) -> list[str]:
            return ["[OPTIONS]", words]

    return Command


def run_and_last(
    ctx: typer.Context, words: Sequence[str], what: str, namespace: str | None, context: str | None
) -> tuple[Run, str]:
    """Return the run and the last word for arguments of the form `[NAME] WORD`."""
    if not 1 <= len(words) <= 2:
        raise typer.BadParameter(f"expected [NAME] {what}, got {len(words)} words")
    return run(ctx, words[0] if len(words) > 1 else None, namespace, context), words[-1]
