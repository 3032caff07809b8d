"""`outlast validate | convert`: checking job files, and making them from Kubeflow's documents."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outlast.base import units
from outlast.base.errors import OutlastError
from outlast.cli.find_job import FileArgument

if TYPE_CHECKING:
    from outlast.job import spec


def validate(
    files: Annotated[list[Path] | None, typer.Argument(metavar="FILE", help="Job files.")] = None,
    schema: Annotated[bool, typer.Option("--schema", help="Print the JSON schema of job files, for editors.")] = False,
) -> None:
    """Check job files, and print every mistake in them.

    Editors with the YAML language server (VS Code's YAML extension, Neovim) check and complete a job file that begins with
    `# yaml-language-server: $schema=elasticjob.json`, once --schema has written that file.

    \b
    Examples:
      outlast validate job.yaml
      outlast validate examples/*.yaml
      outlast validate --schema > elasticjob.json
    """
    if not files and not schema:
        raise typer.BadParameter("give the job files to check, or --schema")
    from outlast.job import spec
    from outlast.job.spec import unused_fields

    if schema:
        print(json.dumps(spec.schema(), indent=2))
        return
    code = 0
    for file in files or ():
        try:
            job = spec.load(file, code=True)
        except OutlastError as error:
            print(error, file=sys.stderr)
            code = error.exit_code
        else:
            print(f"{job.metadata.name}: ok ({_size(job.spec.workers)})")
            for sentence in _snapshots(job):
                print(f"  {sentence}")
            for sentence in unused_fields.anywhere(job):
                print(f"{file}: warning: {sentence}", file=sys.stderr)
            for sentence in unused_fields.here(job):
                print(f"{file}: with outlast run: {sentence}", file=sys.stderr)
    raise typer.Exit(code)


def convert(file: FileArgument) -> None:
    """Translate a TrainJob or PyTorchJob of Kubeflow to a job file.

    Standard error has a line for each field that is assumed or dropped. A document that cannot be converted is rejected with one
    sentence. run, submit and render accept Kubeflow documents directly, and print the same lines. The file - is standard input.

    \b
    Examples:
      outlast convert trainjob.yaml > job.yaml
      outlast convert pytorchjob.yaml | outlast submit -
      kubectl get trainjob train -o yaml | outlast convert -
    """
    from outlast.cli.cluster import render
    from outlast.cli.train import overrides

    job = overrides.load(file)
    print(render.text([job.model_dump(mode="json", by_alias=True, exclude_defaults=True)]), end="")


def _snapshots(job: spec.Job) -> Iterator[str]:
    """Yield sentences about the memory for a worker's snapshots, in pods and on this machine, and about the largest snapshot that
    fits."""
    from outlast.job import contract
    from outlast.local import output_dir, state_dir
    from outlast.storage import checkpoints
    from outlast.storage.snapshots import budget

    fields, workers = job.spec.checkpoint, max(1, job.spec.workers.replicas)
    saved = 0
    if not output_dir.store_url(job):
        output = output_dir.directory(job, state_dir.root())
        with contextlib.suppress(OSError):  # an unreadable output
            saved = max((found.bytes for found in checkpoints.list_(output / contract.CHECKPOINTS)[-1:]), default=0)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = {"with outlast run": machine // workers}
    if job.spec.resources.memory:
        limits["in a pod"] = job.spec.resources.memory + fields.reserved
    for where, limit in limits.items():
        yield f"snapshots {where}: {budget.cost(fields.memory, fields.replicas, limit, workers, saved)}"


def _size(workers: spec.Workers) -> str:
    count = units.count(workers.replicas, "worker")
    allowed = workers.allowed()
    if len(allowed) == 1:
        return count
    if allowed == tuple(range(allowed[0], allowed[-1] + 1)):
        return f"{count}, {allowed[0]}–{allowed[-1]}"
    return f"{count} of {', '.join(map(str, allowed))}"
