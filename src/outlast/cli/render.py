"""`outlast render`: a job file as documents for Kubernetes, to read or to apply."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from outlast.cli import which
from outlast.errors import InvalidJob, OutlastError


def render(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The job file.", show_default=False)],
    topology: Annotated[
        str, typer.Option("--as", metavar="TOPOLOGY", help="elasticjob, job, indexed-job, statefulset or volcano.")
    ] = "elasticjob",
    namespace: Annotated[str | None, typer.Option("-n", "--namespace", help="Namespace, instead of the file's.")] = None,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the job, instead of the file's.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Another value for a field of `spec`, as YAML; may be repeated."),
    ] = None,
    output: Annotated[Literal["yaml", "json"], typer.Option("-o", "--output", help="How to write.")] = "yaml",
) -> None:
    """Print a job as documents for Kubernetes.

    elasticjob is for the operator and grows, shrinks and recovers as on this machine. The others need no operator: job is one
    pod, the rest are one pod a worker. Applying a file again changes nothing, applying a changed one makes a new run.

    \b
    Examples:
      outlast render job.yaml
      outlast render job.yaml --as indexed-job -n team-a | kubectl apply -f -
      outlast render job.yaml --as job --name try-1 --set resources.gpu=8
      outlast render job.yaml --as volcano --set scheduling.queue=research -o json
    """
    from outlast import manifests
    from outlast.cli import run
    from outlast.manifests import places

    job = run.load(file, name=name, set_=set_ or ())
    try:
        documents = manifests.render(job, topology, namespace=which.checked(namespace), files=texts(places.files(job.spec)))
    except InvalidJob as error:
        raise InvalidJob(error.problems, source=str(file)) from error
    for sentence in manifests.warnings(job, topology):
        print(f"outlast | {job.metadata.name}: {sentence}", file=sys.stderr)
    print(text(documents) if output == "yaml" else listed(documents), end="")


def text(documents: Sequence[dict[str, Any]]) -> str:
    """A YAML stream of documents: keys in their order, texts of several lines as they are.

    What kubectl's YAML would read as a number or truth although ours does not (`5e-5`, `y`) is in quotes.
    """
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def written(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        style = "|" if "\n" in value else "'" if re.fullmatch(r"[-+.]?[0-9][0-9a-fA-F_.:xXoOtTzZ+-]*|[yYnN]", value) else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, written)
    return yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=120)


def listed(documents: Sequence[dict[str, Any]]) -> str:
    """The documents as a List in JSON."""
    import json

    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(documents)}, indent=2) + "\n"


def texts(paths: Sequence[str]) -> dict[str, str]:
    """The texts of files that pods need."""
    found = {}
    for path in paths:
        try:
            found[path] = Path(path).read_text()
        except OSError as error:
            raise OutlastError(f"{path} cannot be read: {error.strerror}; correct the path") from error
    return found
