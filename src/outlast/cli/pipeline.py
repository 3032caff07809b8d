"""`outlast pipeline argo | kfp | step`: training as a step of a pipeline."""

from __future__ import annotations

import base64
import binascii
import contextlib
import functools
import json
import re
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.cli import render, submit, terminal, waited, which
from outlast.cli.which import FileArgument, NamespaceOption, SetOption, TopologyOption
from outlast.errors import OutlastError

if TYPE_CHECKING:
    from outlast.manifests.pipelines import Step
    from outlast.spec import Job

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Train as a step of a pipeline: Argo Workflows, Kubeflow Pipelines."
)
_LARGEST_CONFIG_MAP = 190 << 10
"""Of code: as for `outlast render`, so that kubectl apply takes it."""

NameOption = Annotated[
    str | None,
    typer.Option("--name", metavar="NAME", help="Name of what is printed. Default: train-JOB.", show_default=False),
]
ImageOption = Annotated[
    str | None,
    typer.Option(metavar="IMAGE", help="Image of the step, with Outlast; it needs no torch. Default: the operator's."),
]
UploadOption = Annotated[bool, typer.Option("--upload", help="Upload code that is too large to be printed to the store now.")]


@app.callback()
def group() -> None:
    """Train as a step of a pipeline: Argo Workflows, Kubeflow Pipelines."""


@app.command()
def argo(
    file: FileArgument,
    topology: TopologyOption = "elasticjob",
    name: NameOption = None,
    namespace: Annotated[
        str | None,
        typer.Option("-n", "--namespace", metavar="NAME", help="Namespace of the workflows, instead of that in the file."),
    ] = None,
    image: ImageOption = None,
    set_: SetOption = None,
    account: Annotated[str | None, typer.Option(metavar="NAME", help="ServiceAccount of the step.")] = None,
    upload: UploadOption = False,
) -> None:
    """Print a WorkflowTemplate of Argo Workflows that submits a job and waits.

    Its template `train` is for the steps of your workflows (templateRef), with the outputs of the job as parameters. Printed
    with it: the account of the step with its rights, and the code of this machine in a ConfigMap.

    \b
    Examples:
      outlast pipeline argo job.yaml -n team-a | kubectl apply -f -
      outlast pipeline argo job.yaml -n team-a --as indexed-job --name train-digits
      outlast pipeline argo job.yaml -n team-a --set workers.replicas=4
    """
    from outlast.manifests.pipelines import argo as engine

    with _step(file, topology, which.checked(namespace), image, set_ or (), _LARGEST_CONFIG_MAP, upload) as step:
        title = _title(name, step.job)
        print(render.text(engine.documents(step, title, namespace or "", _checked("account", account or engine.ACCOUNT))), end="")


@app.command()
def kfp(
    file: FileArgument,
    topology: TopologyOption = "elasticjob",
    name: NameOption = None,
    image: ImageOption = None,
    set_: SetOption = None,
    rights: Annotated[
        bool, typer.Option("--rights", help="Print what the accounts of steps must be allowed instead; needs -n.")
    ] = False,
    namespace: NamespaceOption = None,
    upload: UploadOption = False,
) -> None:
    """Print a component of Kubeflow Pipelines that submits a job and waits.

    kfp.components.load_component_from_text reads it. Its outputs are those of the job. --rights prints the Role and its binding
    to the accounts default-editor and pipeline-runner of a namespace, to be applied once.

    \b
    Examples:
      outlast pipeline kfp job.yaml > train.yaml
      outlast pipeline kfp job.yaml --as indexed-job --set workers.replicas=4
      outlast pipeline kfp job.yaml --rights -n team-a | kubectl apply -f -
    """
    from outlast.manifests.pipelines import kfp as engine

    with _step(file, topology, which.checked(namespace), image, set_ or (), engine.LARGEST, upload) as step:
        title = _title(name, step.job)
        print(render.text(engine.rights(step, title, namespace or "") if rights else [engine.component(step, title)]), end="")


@app.command()
def step(
    ctx: typer.Context,
    pairs: Annotated[
        list[str] | None, typer.Argument(metavar="[OUTPUT PATH]...", help="Files for single outputs.", show_default=False)
    ] = None,
    job: Annotated[str, typer.Option(metavar="TEXT", help="The job file itself.", show_default=False)] = "",
    topology: TopologyOption = "elasticjob",
    key: Annotated[str, typer.Option("--idempotency-key", metavar="KEY", help="As for submit.", show_default=False)] = "",
    workers: Annotated[str, typer.Option(metavar="N", help="Number of workers; 0: as in the job file.")] = "0",
    set_: Annotated[str, typer.Option("--set", metavar="LINES", help="A KEY=VALUE on each line.", show_default=False)] = "",
    args: Annotated[str, typer.Option(metavar="WORDS", help="Arguments in place of the job's.", show_default=False)] = "",
    code: Annotated[str, typer.Option(metavar="BASE64", help="The archive of the job's code.", show_default=False)] = "",
    outputs: Annotated[Path | None, typer.Option(metavar="DIR", help="Write all outputs there.", show_default=False)] = None,
    on_terminate: Annotated[
        str, typer.Option("--on-terminate", metavar="WORD", help="cancel or leave, as for submit.")
    ] = "cancel",
    namespace: NamespaceOption = None,
) -> None:
    """Submit a job and wait: what the containers of `outlast pipeline argo` and `kfp` run.

    As `outlast submit --wait`, with the job file as an argument. An empty value is as none.

    \b
    Examples:
      outlast pipeline step --job "$(cat job.yaml)" --idempotency-key "$RUN" --outputs /tmp/outputs
    """
    from outlast.cli import overrides

    paths = _paths(pairs or ())
    if not job.strip():
        raise OutlastError("--job is empty; give the text of a job file")
    changes = [line.strip() for line in set_.splitlines() if line.strip()]
    if args.strip():
        changes.append(f"args={json.dumps(_words(args))}")
    workers, on_terminate = workers.strip() or "0", on_terminate.strip() or "cancel"
    if not workers.isdecimal():
        raise OutlastError(f"--workers {workers} is no number of workers; 0 leaves it to the job file")
    if on_terminate not in ("cancel", "leave"):
        raise OutlastError(f"--on-terminate {on_terminate} is neither cancel nor leave; choose one of them")
    with tempfile.TemporaryDirectory(prefix="outlast-job-") as directory:
        file = Path(directory, "job.yaml")
        file.write_text(job)
        wanted = overrides.load(file, workers=int(workers) or None, set_=changes)
        if code:
            _unpack(code, wanted)
        wanted = waited.named(wanted, key, job, workers, *changes)
        place = submit.backend(ctx, wanted, topology, which.checked(namespace), None)
        wish = waited.Wish(outputs, paths, on_terminate, keyed=bool(key))
        apply = functools.partial(place.apply, wanted, source=file)
        raise typer.Exit(waited.until_end(place, wanted.metadata.name, apply, wish))


def _title(name: str | None, job: Job) -> str:
    return _checked("name", name or f"train-{job.metadata.name}")


def _checked(option: str, name: str) -> str:
    """The name of something in the cluster, which Argo also writes into labels. Raises OutlastError."""
    if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name):
        raise OutlastError(f"--{option} {name}: must be at most 63 lower-case letters, digits and dashes")
    return name


def _paths(pairs: Sequence[str]) -> dict[str, Path]:
    """The files of `OUTPUT PATH OUTPUT PATH`. Raises OutlastError."""
    from outlast.cli import show
    from outlast.manifests.pipelines import OUTPUTS

    if len(pairs) % 2:
        raise OutlastError(f"{len(pairs)} words are no pairs of OUTPUT PATH; the last is {pairs[-1]}")
    for name in pairs[::2]:
        show.one_of("output", name, list(OUTPUTS), none="")
    return {name: Path(path) for name, path in zip(pairs[::2], pairs[1::2], strict=True)}


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise OutlastError(f"--args {text}: {error}; quote it as in a shell") from error


def _unpack(code: str, job: Job) -> None:
    """Put the archive of code where the job file says. Raises OutlastError."""
    from outlast import spec
    from outlast.manifests.pipelines.step import CODE

    path = spec.local(spec.pinned(job.spec.code or "")[0])
    if path is None or Path(CODE) not in Path(path).parents:
        raise OutlastError(f"--code is for a job with code in {CODE}; print the component again with: outlast pipeline kfp")
    try:
        content = base64.b64decode(code, validate=True)
    except binascii.Error as error:
        raise OutlastError(f"--code is no base64 ({error}); print the component again with: outlast pipeline kfp") from error
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(content)


@contextlib.contextmanager
def _step(
    file: Path, topology: str, namespace: str | None, image: str | None, set_: Sequence[str], room: int, upload: bool
) -> Iterator[Step]:
    """What every engine needs to know of a step, its code in the store if that is where it goes. Raises OutlastError."""
    from outlast import manifests
    from outlast.cli import overrides
    from outlast.kube.kinds import kind_of
    from outlast.manifests import install, volumes
    from outlast.manifests.pipelines import Step, step
    from outlast.spec import unused

    job = overrides.load(file, set_=set_)
    with render.rendered(job, topology, source=file, namespace=namespace, room=room) as (documents, parcel):
        if parcel.url and not upload:
            raise OutlastError(f"{parcel.sentence}, which is not uploaded by default; add --upload")
        if files := volumes.files(parcel.job.spec):
            raise OutlastError(f"environment ({files[0]}) is on this machine, which the step does not see; put it into the code")
        parcel.put()
        carried = parcel.job
        if parcel.code:
            carried = step.carried(parcel.job)
        if parcel.sentence:
            terminal.say(f"{job.metadata.name}: {parcel.sentence.partition(' -> ')[0] if parcel.code else parcel.sentence}")
        for sentence in (*unused.anywhere(job), *manifests.warnings(job, topology)):
            terminal.say(f"{job.metadata.name}: {sentence}")
        kinds = list(dict.fromkeys(map(kind_of, documents)))
        yield Step(carried, topology, kinds, parcel.code, image or install.IMAGE)
