"""`outlast render`: printing a job file as Kubernetes documents, to read or to apply."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import typer

from outlast.base.errors import OutlastError
from outlast.cli import completion, find_job, terminal
from outlast.cli.find_job import FileArgument, SetOption, TitleOption, TopologyOption


def render(
    file: FileArgument,
    topology: TopologyOption = "elasticjob",
    namespace: Annotated[
        str | None,
        typer.Option("-n", "--namespace", help="Namespace, instead of that in the file.", autocompletion=completion.namespaces),
    ] = None,
    name: TitleOption = None,
    set_: SetOption = None,
    upload: Annotated[
        bool, typer.Option("--upload", help="Upload code that is too large for a ConfigMap to the store now.")
    ] = False,
    server_side: Annotated[
        bool, typer.Option("--server-side", help="For `kubectl apply --server-side`, which accepts more code in a ConfigMap.")
    ] = False,
    output: Annotated[Literal["yaml", "json"], typer.Option("-o", "--output", help="Output format.")] = "yaml",
) -> None:
    """Print a job as Kubernetes documents.

    The topology elasticjob needs the operator; such a job grows, shrinks and recovers as on this machine. The other topologies
    need no operator: job is one pod, and the rest are one pod per worker. Applying a file again changes nothing; applying a
    changed file starts a new run.

    Code on this machine is included in a ConfigMap if it is small; otherwise it is uploaded to the store that the job writes to.

    \b
    Examples:
      outlast render job.yaml
      outlast render job.yaml --as indexed-job -n team-a | kubectl apply -f -
      outlast render job.yaml --as job --name try-1 --set resources.gpu=8
      outlast render job.yaml --set scheduling.gang=volcano --set scheduling.queue=research -o json
      outlast render job.yaml --as job --server-side | kubectl apply --server-side -f -
      outlast render job.yaml --as job --upload | kubectl apply -f -
    """
    from outlast.cli.train import overrides
    from outlast.job.spec import unused_fields
    from outlast.kubernetes import manifests
    from outlast.kubernetes.jobs.parcel import CLIENT_APPLY_BYTES, CONFIG_MAP_BYTES, rendered

    job = overrides.load(file, name=name, set_=set_ or ())
    room = CONFIG_MAP_BYTES if server_side else CLIENT_APPLY_BYTES
    with rendered(job, topology, source=file, namespace=find_job.checked(namespace), room=room) as (documents, parcel):
        if parcel.url and not upload:
            ways = "add --upload, or use `outlast submit`"
            if parcel.archive.stat().st_size <= CONFIG_MAP_BYTES:
                ways = f"{ways}, or add --server-side for kubectl apply --server-side"
            raise OutlastError(f"{parcel.sentence}, which render does not upload to by default; {ways}")
        parcel.upload()
    sentences = [parcel.sentence] if parcel.sentence else []
    for sentence in [*sentences, *unused_fields.anywhere(job), *manifests.warnings(job, topology)]:
        terminal.say(f"{job.metadata.name}: {sentence}")
    if output == "yaml":
        print(text(documents), end="")
    else:
        print(json.dumps({"apiVersion": "v1", "kind": "List", "items": documents}, indent=2))


def text(documents: Sequence[dict[str, Any]]) -> str:
    """Format documents as a YAML stream, with keys in their original order and multi-line strings as blocks. Strings that
    kubectl's YAML, unlike PyYAML, would parse as numbers or booleans (`5e-5`, `y`) are quoted."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def written(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        style = "|" if "\n" in value else "'" if re.fullmatch(r"[-+.]?[0-9][0-9a-fA-F_.:xXoOtTzZ+-]*|[yYnN]", value) else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, written)
    return yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=120)
