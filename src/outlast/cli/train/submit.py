"""`outlast submit`: applying a job to a cluster, or showing the changes without applying them."""

from __future__ import annotations

import difflib
import functools
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outlast.base import backoff
from outlast.base.errors import NotFound, OutlastError, StoreError
from outlast.cli import find_job, terminal
from outlast.cli.find_job import ContextOption, FileOrScript, NamespaceOption, SetOption, TitleOption, TopologyOption
from outlast.cli.train import script, submit_wait
from outlast.cli.train.script import ModuleOption, WorkersOption
from outlast.cli.train.submit_wait import KeyOption, OutputsOption, TerminateOption, WaitOption

if TYPE_CHECKING:
    from outlast.job.spec import Job
    from outlast.kubernetes.api import Cluster, Document
    from outlast.kubernetes.jobs.backend import KubernetesBackend


def submit(
    ctx: typer.Context,
    file: FileOrScript,
    topology: TopologyOption = "elasticjob",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Have the cluster check it and show what would change, without changing anything.")
    ] = False,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Show the logs until the job ends.")] = False,
    wait: WaitOption = False,
    outputs: OutputsOption = None,
    on_terminate: TerminateOption = "cancel",
    key: KeyOption = None,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="End the present run of this job, and start from the beginning.")
    ] = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Take its run in the store from another cluster or namespace that trains it.")
    ] = False,
    module: ModuleOption = False,
    image: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="Image of the pods, with PyTorch; Outlast is brought along.")
    ] = None,
    workers: WorkersOption = None,
    name: TitleOption = None,
    set_: SetOption = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Start or continue training in a cluster.

    This applies a job file, a TrainJob or PyTorchJob of Kubeflow, or a script. The file - is standard input. The topology
    elasticjob needs the operator (outlast install); the other topologies need nothing installed. Submitting the same file again
    changes nothing while the job runs, and continues a job that is suspended, has failed or was cancelled. A job that has
    succeeded is not run again.

    --wait is for steps of pipelines: the command returns only when the job ends, and if it is run again, it waits for the same
    job.

    \b
    Examples:
      outlast submit --image pytorch/pytorch:2.11.0-cuda12.8-cudnn9-runtime --workers 4 train.py --steps 100
      outlast submit job.yaml
      outlast submit job.yaml --as indexed-job -n team-a --follow
      outlast submit job.yaml --dry-run --set workers.replicas=8
      outlast submit job.yaml --wait --outputs out --idempotency-key "$RUN"
    """
    from outlast.cli.train import overrides
    from outlast.job import spec
    from outlast.job.spec import unused_fields
    from outlast.kubernetes import manifests
    from outlast.kubernetes.jobs.parcel import rendered

    changes = [*(set_ or ()), *([f"image={image}"] if image else [])]
    job = overrides.load(file, ctx.args, module=module, workers=workers, name=name, set_=changes)
    if script.is_script(file, module=module) and not job.spec.image:
        raise OutlastError(f"{file} needs an image in a cluster, with torch: add --image NAME before it")
    _check(wait, follow=follow, dry_run=dry_run, fresh=fresh, others=outputs is not None or on_terminate != "cancel")
    source = Path(file)
    if key is not None and not key.strip():
        raise OutlastError("--idempotency-key is empty; give the id of the pipeline's run")
    if key:
        content = spec.dump(job) if file == "-" else file if module else source.read_bytes()
        job = submit_wait.with_key(job, key, content, *ctx.args, workers, *changes)
    place = backend(ctx, job, topology, namespace, context)
    if not wait and not place.cluster.has_namespace():  # with --wait, requests are repeated while the API server is away
        raise place.workloads.no_namespace()
    title = job.metadata.name
    for sentence in (*script.misplaced(ctx, file), *unused_fields.anywhere(job), *manifests.warnings(job, topology)):
        terminal.say(f"{title}: {sentence}")
    if dry_run:
        with rendered(job, topology, source=source, namespace=place.cluster.namespace) as (made, parcel):
            if parcel.sentence:
                terminal.say(parcel.sentence)
        for sentence in place.submission.make_room(title, made, fresh=fresh, dry_run=True):
            terminal.say(sentence)
        for document in made:
            print(_change(place.cluster, document), flush=True)
        _warn(place.cluster)
        return
    if wait:
        apply = functools.partial(place.submission.apply, job, source=source, take_over=take_over)
        raise typer.Exit(submit_wait.until_end(place, title, apply, outputs=outputs, on_terminate=on_terminate, keyed=bool(key)))
    for sentence in place.submission.apply(job, source=source, fresh=fresh, take_over=take_over):
        print(sentence, flush=True)
    _warn(place.cluster)
    options = find_job.suffix(namespace, context)
    if follow:
        raise typer.Exit(follow_(place, title, options))
    print(f"look at {title} in namespace {place.cluster.namespace} with: outlast logs -f {title}{options}")


def _check(wait: bool, *, follow: bool, dry_run: bool, fresh: bool, others: bool) -> None:
    if wait and (follow or dry_run or fresh):
        excluded = "--follow" if follow else "--dry-run" if dry_run else "--fresh"
        why = "a step that is run again would start again; use --idempotency-key" if fresh else "leave one of them out"
        raise OutlastError(f"--wait and {excluded} exclude each other: {why}")
    if others and not wait:
        raise OutlastError("--outputs and --on-terminate are for --wait; add it")


def backend(ctx: typer.Context, job: Job, topology: str, namespace: str | None, context: str | None) -> KubernetesBackend:
    """Return the cluster's backend for jobs with this topology."""
    from outlast.kubernetes.jobs.backend import KubernetesBackend

    if isinstance(ctx.obj, KubernetesBackend):
        cluster = ctx.obj.cluster
    else:
        cluster = find_job.cluster(ctx, namespace or job.metadata.namespace, context).cluster

    return KubernetesBackend(cluster, topology=topology, say=terminal.say)


def _change(cluster: Cluster, document: Document) -> str:
    from outlast.kubernetes import api
    from outlast.kubernetes.api import apply_documents, kinds
    from outlast.kubernetes.manifests import configmaps_and_service

    old = apply_documents.existing(cluster, document)
    if old is not None and kinds.kind_of(document) is kinds.CLAIM:
        return configmaps_and_service.existing_claim(old)
    done = apply_documents.apply(cluster, document, old=old, dry_run=True)
    verb = "is" if done.what == "unchanged" else "would be"
    difference = _diff(*map(api.without_server_fields, (old, done.new))) if old else ()
    return "\n".join([f"{document['kind']} {document['metadata']['name']} {verb} {done.what}", *difference])


def _diff(old: Document, new: Document) -> Iterator[str]:
    import yaml

    def lines(value: Any) -> list[str]:
        return yaml.safe_dump(value, sort_keys=True, width=120).splitlines()

    for line in difflib.unified_diff(lines(old), lines(new), n=2, lineterm=""):
        if not line.startswith(("---", "+++")):
            yield f"  {'...' if line.startswith('@@') else line}"


def follow_(place: KubernetesBackend, name: str, options: str) -> int:
    """Show the logs until the job ends. Returns the exit code."""
    from outlast.cli import run_view, status_page

    try:
        try:
            for line in place.logs(name, follow=True, say=terminal.say):
                terminal.log([line])
        except (NotFound, StoreError) as error:  # the job had ended earlier, and its pods are gone
            terminal.say(str(error))
        status = backoff.until_answered(lambda: place.status(name), terminal.say, every_s=place.poll_s)
        deadline = time.monotonic() + 10  # the pods have ended, but their controller may not have reported that yet
        while status.state.active and time.monotonic() < deadline:
            time.sleep(0.5)
            status = backoff.until_answered(lambda: place.status(name), terminal.say, every_s=place.poll_s)
    except KeyboardInterrupt:
        terminal.say(f"{name} goes on; follow it again with: outlast logs -f {name}{options}")
        return 0
    terminal.say(f"{name}: {status_page.state(status)}")
    return run_view.exit_code(status)


def _warn(cluster: Cluster) -> None:
    for sentence in cluster.warnings:
        terminal.say(f"the cluster warns: {sentence}")
