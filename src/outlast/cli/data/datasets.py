"""`outlast data`: getting datasets, and listing the named datasets."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.base import units
from outlast.base.errors import OutlastError
from outlast.cli import completion, find_job, tables, terminal, transfer_progress
from outlast.cli.data import prepare
from outlast.cli.find_job import ContextOption, NamespaceOption
from outlast.cli.groups import Commands

if TYPE_CHECKING:
    from outlast.data.dataset_directory import Marker
    from outlast.data.named_datasets import Dataset
    from outlast.data.obtain import How
    from outlast.kubernetes.jobs.backend import KubernetesBackend
    from outlast.kubernetes.manifests.dataset_job import Download

app = typer.Typer(cls=Commands, no_args_is_help=True, rich_markup_mode=None, help="Get datasets, and prepare them for training.")


@app.command()
def get(
    ctx: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME|URL]",
            help="A dataset, or the URL of a file, followed by #sha256=... Without this argument, the named datasets are listed.",
            autocompletion=completion.datasets,
        ),
    ] = None,
    to: Annotated[
        str | None, typer.Option(metavar="DIR|URL", help="Directory or place in a store to write to. Default: data/NAME.")
    ] = None,
    given: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="The file, already downloaded, or a directory with several.")
    ] = None,
    on: Annotated[str | None, typer.Option(metavar="kubernetes", help="Download in a pod of a cluster.")] = None,
    claim: Annotated[
        str | None, typer.Option(metavar="NAME:/PATH", help="In a cluster: the claim, and where it is mounted.")
    ] = None,
    secret: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="In a cluster: a Secret with variables; may be repeated.")
    ] = None,
    image: Annotated[str | None, typer.Option(metavar="IMAGE", help="In a cluster: another image with Outlast.")] = None,
    namespace: NamespaceOption = None,
    context: ContextOption = None,
) -> None:
    """Download, check and unpack a dataset.

    The dataset goes to a directory or a store. If it is already complete there, nothing changes. If the command is interrupted
    or killed, run it again to continue; a dataset is complete once its marker, .outlast-data.json, is written. Archives (.tar,
    .tar.gz, .tar.bz2, .tar.xz, .tar.zst, .zip) and compressed files are unpacked; other files are kept as they are.

    \b
    Examples:
      outlast data get
      outlast data get digits
      outlast data get cifar10 --to /data/cifar10
      outlast data get cifar10 --from Downloads/cifar-10-python.tar.gz
      outlast data get https://example.org/corpus.tar.zst#sha256=9f86d0... --to s3://bucket/corpus
      outlast data get cifar10 --on kubernetes --claim efs-pvc:/data
      outlast logs -f data-cifar10
    """
    from outlast.data import named_datasets, obtain

    if name is None:
        known = [named_datasets.named(each) for each in named_datasets.NAMES]
        rows = [(each.name, units.human_bytes(each.size) if each.size else None, each.about) for each in known]
        print(tables.table(("NAME", "DOWNLOAD", "WHAT"), rows))
        return
    dataset = _dataset(name)
    if on is not None:
        tables.one_of("place to do it", on, ("kubernetes",), none="")
        if given:
            raise OutlastError(
                "--from is a file of this machine, which pods do not see; put it onto the claim, or leave out --on"
            )
        from outlast.kubernetes.jobs import parcel
        from outlast.kubernetes.manifests.dataset_job import Download

        pod_image = image or parcel.operator_image()
        request = Download(name, dataset.directory, to or "", claim or "", pod_image, tuple(secret or ()))
        _in_pod(find_job.cluster(ctx, namespace, context), request, context)
        return
    if claim or secret or image or namespace or context:
        raise OutlastError("--claim, --secret, --image, --namespace and --context are for a pod; add --on kubernetes")
    with transfer_progress.interruptible() as stop, transfer_progress.shown("received") as tell:
        how = obtain.How(say=terminal.say, progress=tell, stop=stop, archive=given)
        if to and "://" in to and not to.startswith("file://"):
            found, written = _to_store(dataset, to, how)
        else:
            found, written = obtain.get(dataset, _directory(dataset, to), how)
    verb, size = ("got" if written else "already there:", f"{units.count(found.files, 'file')}, {units.human_bytes(found.size)}")
    print(f"{verb} {found.name}: {size} in {to or _directory(dataset, to)}")
    if written and dataset.remotes and not found.checked:
        terminal.say(_unchecked(dataset, found, named_datasets.is_url(name)))


def _dataset(name: str) -> Dataset:
    from outlast.data import named_datasets

    if named_datasets.is_url(name):
        return named_datasets.of_url(name)
    tables.one_of("dataset", name, named_datasets.NAMES, none="")
    return named_datasets.named(name)


def _directory(dataset: Dataset, to: str | None) -> Path:
    return Path(to.removeprefix("file://")) if to else Path("data") / dataset.directory


def _in_pod(place: KubernetesBackend, request: Download, context: str | None) -> None:
    from outlast.kubernetes.jobs import dataset_download

    print(dataset_download.get(place.workloads, request))
    print(f"look at it with: outlast logs -f {request.name}{find_job.suffix(place.cluster.namespace, context)}")


def _to_store(dataset: Dataset, url: str, how: How) -> tuple[Marker, bool]:
    """Copy a dataset to a place in a store, through this machine's cache. The marker is uploaded last."""
    from outlast.data import dataset_directory as place
    from outlast.data import obtain
    from outlast.data.dataset_directory import Marker
    from outlast.storage import store
    from outlast.worker.prepare import data_cache

    there = store.open_(url)
    try:
        found = obtain.checked(dataset, Marker.parse(there.get(place.MARKER)), url)
    except store.Missing:
        found = None
    if found:
        return found, False
    prepare.check_place(there, dataset.name)
    home = data_cache.writable(os.environ) / "get" / hashlib.sha256(f"{dataset.name} {there.url}".encode()).hexdigest()[:16]
    found, _ = obtain.get(dataset, home / "tree", how)
    terminal.say(f"sending {units.count(found.files, 'file')}, {units.human_bytes(found.size)}, to {url}")
    prepare.upload(home / "tree", there, dataset.name, place.MARKER, home / "state", lambda path: path != place.MARKER, how.stop)
    shutil.rmtree(home, ignore_errors=True)
    return found, True


def _unchecked(dataset: Dataset, marker: Marker, url: bool) -> str:
    if not url:
        return f"no checksum of {dataset.name} is published; its length was checked" + (
            f", its SHA-256 is {marker.sha256}" if marker.sha256 else ""
        )
    return f"the download was not compared with any checksum; for a comparison, append #sha256={marker.sha256} to the URL"


app.add_typer(prepare.app, name="prepare")
app.command()(prepare.verify)
